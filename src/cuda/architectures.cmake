# Which GPU architectures to compile for: one takes a third of the time of three.
#
# gpu_architectures(VARIABLE): those of the GPUs of this machine. Without a GPU, or where nvcc is too old to know one of them: 80, 89,
# 90a, and 120 if nvcc knows it. 89 comes with PTX, so that other GPUs translate it when the program first starts.
function(gpu_architectures variable)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  set(all 80-real 89 90a-real)
  if(known MATCHES "sm_120")
    list(APPEND all 120-real)
  endif()
  set(found)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader RESULT_VARIABLE failed OUTPUT_VARIABLE capabilities
                  ERROR_QUIET)
  if(NOT failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    foreach(capability ${capabilities})
      string(REPLACE "." "" number ${capability})
      if(number LESS 80)
        continue()   # no GPU that the backend runs on
      elseif(NOT known MATCHES "sm_${number}")
        set(found ${all})
        break()
      elseif(number EQUAL 90)
        list(APPEND found 90a-real)   # wgmma
      else()
        list(APPEND found ${number}-real)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  if(NOT found)
    set(found ${all})
  endif()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()
