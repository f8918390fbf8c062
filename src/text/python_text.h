// JSON values as Python writes them, since chat templates were written for Python: json.dumps and str().
#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace beryl {

// Deepest nesting that is written; deeper values are an Error(kBadInput) rather than a deep recursion.
inline constexpr int kMaxPythonDepth = 100;

// repr(float): the shortest digits that read back as the same number; 1.0, 1e-05, 1e+16, inf, nan.
std::string python_float(double value);

// json.dumps(value, ensure_ascii=False, indent=indent): ", " and ": " between, key order as given. indent 0: one line.
std::string python_json(const nlohmann::ordered_json& value, int indent = 0);

// str(value): a string as it is, True, None, 1.0, and repr for lists and dicts.
std::string python_str(const nlohmann::ordered_json& value);

// text.upper() for ASCII letters; others stay.
std::string ascii_upper(std::string_view text);

}  // namespace beryl
