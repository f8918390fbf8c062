// Options that check what they are given, and say in one line what was expected.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

namespace beryl::cli {

// The command line is wrong: one line on standard error, exit status 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `value` holds the default and is changed only by a number in [least, most]; plain decimal, nothing behind it.
CLI::Option* add_integer(CLI::App& app, const std::string& names, int64_t& value, int64_t least, int64_t most,
                         const std::string& help);
// Whole numbers in [least, most] with commas between them; at least one.
CLI::Option* add_integers(CLI::App& app, const std::string& names, std::vector<int64_t>& values, int64_t least,
                          int64_t most, const std::string& help);
CLI::Option* add_real(CLI::App& app, const std::string& names, double& value, double least, double most,
                      const std::string& help);
CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help);
// Names out of `choices` with commas between them; at least one.
CLI::Option* add_choices(CLI::App& app, const std::string& names, std::vector<std::string>& values,
                         const std::vector<std::string>& choices, const std::string& help);
// The MODEL of every subcommand: once the command line is parsed, `path` is that of a file or folder, or of the model of
// this name in the store (find_model).
CLI::Option* add_model(CLI::App& app, std::string& path);

// "a,b,c" at its commas; at least one part, which may be empty.
std::vector<std::string> split_list(std::string_view text);

// "2,818,5279" (blanks around the numbers are allowed). Throws UsageError for anything else, for nothing, and for ids
// outside [0, vocab).
std::vector<int32_t> parse_ids(std::string_view text, int64_t vocab);

std::string join_ids(std::span<const int32_t> ids);   // "2,818,5279"

}  // namespace beryl::cli
