#include "text/python_text.h"

#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"
#include "text/utf8.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

void check_depth(int depth) {
  if (depth > kMaxPythonDepth)
    throw Error(ErrorCode::kBadInput, fmt::format("JSON nested deeper than {} levels", kMaxPythonDepth));
}

// Integers and floats are written alike by json.dumps and repr, but for the names of what is no number.
std::string number_text(const Json& value) {
  if (value.is_number_unsigned()) return fmt::format("{}", value.get<uint64_t>());
  if (value.is_number_integer()) return fmt::format("{}", value.get<int64_t>());
  return python_float(value.get<double>());
}

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\b': out += "\\b"; break;
      case '\f': out += "\\f"; break;
      default:
        if (static_cast<uint8_t>(c) < 0x20)
          out += fmt::format("\\u{:04x}", static_cast<int>(c));
        else
          out += c;
    }
  }
  out += '"';
}

void append_json(std::string& out, const Json& value, int indent, int depth) {
  check_depth(depth);
  const auto new_line = [&](int level) {
    if (indent > 0) out += '\n' + std::string(static_cast<size_t>(indent * level), ' ');
  };
  const std::string_view separator = indent > 0 ? "," : ", ";
  if (value.is_object() || value.is_array()) {
    const bool object = value.is_object();
    out += object ? '{' : '[';
    bool first = true;
    for (auto member = value.begin(); member != value.end(); ++member) {
      if (!first) out += separator;
      first = false;
      new_line(depth + 1);
      if (object) {
        append_json_string(out, member.key());
        out += ": ";
      }
      append_json(out, *member, indent, depth + 1);
    }
    if (!first) new_line(depth);
    out += object ? '}' : ']';
  } else if (value.is_string()) {
    append_json_string(out, value.get_ref<const std::string&>());
  } else if (value.is_boolean()) {
    out += value.get<bool>() ? "true" : "false";
  } else if (value.is_number()) {
    out += number_text(value);
  } else {
    out += "null";
  }
}

// repr(str): single quotes unless the text has some and no double ones; backslash escapes for what does not print.
void append_repr_string(std::string& out, std::string_view text) {
  const char quote = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (size_t position = 0; position < text.size();) {
    const DecodedCharacter c = decode_character(text, position);
    const uint32_t code = c.code_point;
    if (code == static_cast<uint8_t>(quote) || code == '\\')
      out += fmt::format("\\{}", static_cast<char>(code));
    else if (code == '\n')
      out += "\\n";
    else if (code == '\r')
      out += "\\r";
    else if (code == '\t')
      out += "\\t";
    else if (code < 0x20 || (code >= 0x7F && code <= 0xA0) || code == 0xAD)
      out += fmt::format("\\x{:02x}", code);
    else
      out += text.substr(position, c.length);
    position += c.length;
  }
  out += quote;
}

void append_repr(std::string& out, const Json& value, int depth) {
  check_depth(depth);
  if (value.is_object() || value.is_array()) {
    const bool object = value.is_object();
    out += object ? '{' : '[';
    bool first = true;
    for (auto member = value.begin(); member != value.end(); ++member) {
      if (!first) out += ", ";
      first = false;
      if (object) {
        append_repr_string(out, member.key());
        out += ": ";
      }
      append_repr(out, *member, depth + 1);
    }
    out += object ? '}' : ']';
  } else if (value.is_string()) {
    append_repr_string(out, value.get_ref<const std::string&>());
  } else if (value.is_boolean()) {
    out += value.get<bool>() ? "True" : "False";
  } else if (value.is_number()) {
    out += number_text(value);
  } else {
    out += "None";
  }
}

}  // namespace

std::string python_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // The shortest round-trip digits as d.dddde+XX, then laid out by Python's rule: an exponent below -4 or from 16 on.
  char buffer[64];
  const auto written = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string_view text(buffer, static_cast<size_t>(written.ptr - buffer));
  std::string out;
  if (text.front() == '-') {
    out += '-';
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits(1, text[0]);
  if (e > 1) digits += text.substr(2, e - 2);
  int exponent = 0;
  const char* exponent_begin = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
  std::from_chars(exponent_begin, text.data() + text.size(), exponent);

  const int n_digits = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    out += digits[0];
    if (n_digits > 1) out += '.' + digits.substr(1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (n_digits <= exponent + 1)
    return out + digits + std::string(static_cast<size_t>(exponent + 1 - n_digits), '0') + ".0";
  return out + digits.substr(0, static_cast<size_t>(exponent) + 1) + '.' +
         digits.substr(static_cast<size_t>(exponent) + 1);
}

std::string python_json(const Json& value, int indent) {
  std::string out;
  append_json(out, value, indent, 0);
  return out;
}

std::string python_str(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  std::string out;
  append_repr(out, value, 0);
  return out;
}

std::string ascii_upper(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
  return out;
}

}  // namespace beryl
