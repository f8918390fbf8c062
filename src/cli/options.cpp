#include "cli/options.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/model_name.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

// The whole of `text` as a number.
template <class Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

std::string first_name(const std::string& names) {
  // "-n,--tokens": people look for the name that says more.
  const size_t comma = names.rfind(',');
  return comma == std::string::npos ? names : names.substr(comma + 1);
}

// The last value counts when an option is given twice.
template <class Take>
CLI::Option* add_checked(CLI::App& app, const std::string& names, const std::string& type, const std::string& help,
                         const std::string& expected, const Take& take) {
  CLI::Option* option = app.add_option(
      names,
      [name = first_name(names), expected, take](const CLI::results_t& results) {
        if (!take(results.back()))
          throw UsageError(fmt::format("{} is {}, {} was expected", name, quote(results.back()), expected));
        return true;
      },
      help);
  return option->type_name(type)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

}  // namespace

CLI::Option* add_integer(CLI::App& app, const std::string& names, int64_t& value, int64_t least, int64_t most,
                         const std::string& help) {
  const std::string expected = fmt::format("a whole number from {} to {}", least, most);
  return add_checked(app, names, "N", help, expected, [&value, least, most](const std::string& text) {
    int64_t number = 0;
    if (!parse_number(text, number) || number < least || number > most) return false;
    value = number;
    return true;
  });
}

CLI::Option* add_integers(CLI::App& app, const std::string& names, std::vector<int64_t>& values, int64_t least,
                          int64_t most, const std::string& help) {
  const std::string expected = fmt::format("whole numbers from {} to {} with commas", least, most);
  return add_checked(app, names, "N,...", fmt::format("{} (default: {})", help, fmt::join(values, ",")), expected,
                     [&values, least, most](const std::string& text) {
                       std::vector<int64_t> numbers;
                       for (size_t begin = 0; begin <= text.size();) {
                         const size_t end = std::min(text.find(',', begin), text.size());
                         int64_t number = 0;
                         if (!parse_number(std::string_view(text).substr(begin, end - begin), number)) return false;
                         if (number < least || number > most) return false;
                         numbers.push_back(number);
                         begin = end + 1;
                       }
                       values = std::move(numbers);
                       return true;
                     });
}

CLI::Option* add_real(CLI::App& app, const std::string& names, double& value, double least, double most,
                      const std::string& help) {
  return add_checked(app, names, "X", help, fmt::format("a number from {} to {}", least, most),
                     [&value, least, most](const std::string& text) {
                       double number = 0;
                       // Written so that NaN is refused.
                       if (!parse_number(text, number) || !(number >= least && number <= most)) return false;
                       value = number;
                       return true;
                     });
}

CLI::Option* add_choice(CLI::App& app, const std::string& names, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help) {
  return add_checked(app, names, "NAME", help, fmt::format("one of {}", fmt::join(choices, ", ")),
                     [&value, choices](const std::string& text) {
                       if (std::find(choices.begin(), choices.end(), text) == choices.end()) return false;
                       value = text;
                       return true;
                     });
}

CLI::Option* add_choices(CLI::App& app, const std::string& names, std::vector<std::string>& values,
                         const std::vector<std::string>& choices, const std::string& help) {
  const std::string expected = fmt::format("some of {} with commas", fmt::join(choices, ", "));
  return add_checked(app, names, "NAME,...", fmt::format("{} (default: {})", help, fmt::join(values, ",")), expected,
                     [&values, choices](const std::string& text) {
                       std::vector<std::string> chosen = split_list(text);
                       for (const std::string& name : chosen)
                         if (std::find(choices.begin(), choices.end(), name) == choices.end()) return false;
                       values = std::move(chosen);
                       return true;
                     });
}

std::vector<std::string> split_list(std::string_view text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

CLI::Option* add_model(CLI::App& app, std::string& path) {
  app.final_callback([&path] { path = find_model(path); });
  return app
      .add_option_function<std::string>(
          "MODEL",
          [&path](const std::string& given) {
            if (given.empty()) throw UsageError("MODEL is empty");
            path = given;
          },
          "a GGUF file, a Hugging Face folder (config.json, safetensors), or a name that 'beryl list' shows")
      ->type_name("")
      ->required();
}

std::vector<int32_t> parse_ids(std::string_view text, int64_t vocab) {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string_view part = text.substr(begin, end - begin);
    begin = end + 1;
    const size_t first = part.find_first_not_of(" \t\r\n");
    part = first == std::string_view::npos ? std::string_view() : part.substr(first);
    part = part.substr(0, part.find_last_not_of(" \t\r\n") + 1);
    int64_t id = 0;
    if (!parse_number(part, id))
      throw UsageError(
          fmt::format("--ids holds {}, numbers with commas between them were expected, as in 2,818", quote(part)));
    if (id < 0 || id >= vocab)
      throw UsageError(fmt::format("--ids holds {}, but the model's ids go from 0 to {}", id, vocab - 1));
    ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

std::string join_ids(std::span<const int32_t> ids) { return fmt::format("{}", fmt::join(ids, ",")); }

}  // namespace beryl::cli
