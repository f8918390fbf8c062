// Python's ways to write values into texts: `%`, str.format and json.dumps.
#pragma once

#include "text/jinja_value.h"

namespace beryl::jinja {

// text % arguments. A tuple gives the arguments; a dictionary the named ones; anything else is the only one.
Value format_percent(const Value& text, const Value& arguments, Budget& budget);

// text.format(...), with the sandbox's rules for the attributes that fields may name.
Value format_braces(Machine& machine, const Value& text, const Arguments& arguments);

struct JsonStyle {
  bool ascii = false;          // non-ASCII as \uXXXX
  std::optional<Text> indent;  // absent: one line
  Text item_separator, key_separator;
  bool sort_keys = false;
};
// json.dumps(value). Its punctuation is foreign text, as in representation().
Text to_json(const Value& value, const JsonStyle& style, Budget& budget);

// format(value, specification) for the presentation types of integers and floats: "e", "f", "g", "x", "%", ...
// Without sign, width and grouping. precision < 0: the default. Throws for an unknown type.
std::string format_float(double value, char type, int precision, bool alternate);

}  // namespace beryl::jinja
