# Writes a header with the commit that is built, and touches it only when that changes.
#   cmake -DSOURCE=FOLDER -DOUTPUT=FILE -P build_commit.cmake
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=10
                OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT commit MATCHES "^[0-9A-Za-z._-]+$")
  set(commit "unknown")   # no git, or sources without history
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
#pragma once
inline constexpr const char* kBuildCommit = "@commit@";
]])
