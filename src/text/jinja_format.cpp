#include "text/jinja_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "text/jinja_machine.h"
#include "text/python_text.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

constexpr int kMaxPrecision = 1000;

void append_ascii(Text& out, std::string_view ascii, Character origin) {
  for (const char c : ascii) out += static_cast<Character>(static_cast<unsigned char>(c)) | origin;
}

// A number that a specification gives; wider than any text is an error at once.
int read_number(TextView text, size_t& at) {
  int64_t number = 0;
  bool any = false;
  while (at < text.size() && code_point(text[at]) >= '0' && code_point(text[at]) <= '9') {
    number = number * 10 + static_cast<int64_t>(code_point(text[at++]) - '0');
    any = true;
    if (number > (1 << 30)) throw template_error("a width or precision in a format is too large");
  }
  return any ? static_cast<int>(number) : -1;
}

std::string digits_in_base(Integer magnitude, int base, bool upper) {
  std::string digits;
  do {
    const int digit = static_cast<int>(magnitude % base);
    digits += static_cast<char>(digit < 10 ? '0' + digit : (upper ? 'A' : 'a') + digit - 10);
    magnitude /= base;
  } while (magnitude != 0);
  std::reverse(digits.begin(), digits.end());
  return digits;
}

Text ascii_of(TextView text) {  // repr() with all but ASCII escaped, for !a and %a
  Text out;
  for (const Character c : text) {
    const uint32_t code = code_point(c);
    if (code < 0x80)
      out += c;
    else
      append_ascii(out,
                   code < 0x100     ? fmt::format("\\x{:02x}", code)
                   : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                                    : fmt::format("\\U{:08x}", code),
                   c & kForeign);
  }
  return out;
}

struct PercentField {
  bool left = false, plus = false, blank = false, alternate = false, zero = false;
  int width = -1, precision = -1;
};

Text pad_number(std::string sign, const std::string& digits, const PercentField& field, Budget& budget) {
  const int size = static_cast<int>(sign.size() + digits.size());
  const int missing = std::max(field.width - size, 0);
  budget.check_length(static_cast<uint64_t>(size + missing));
  Text out;
  if (!field.left && !field.zero) out.append(static_cast<size_t>(missing), U' ');
  append_ascii(out, sign, 0);
  if (!field.left && field.zero) out.append(static_cast<size_t>(missing), U'0');
  append_ascii(out, digits, 0);
  if (field.left) out.append(static_cast<size_t>(missing), U' ');
  return out;
}

std::string sign_of(bool negative, const PercentField& field) {
  return negative ? "-" : field.plus ? "+" : field.blank ? " " : "";
}

Text percent_number(const Value& value, char type, const PercentField& field, Budget& budget) {
  const bool floats = std::string_view("eEfFgG").find(type) != std::string_view::npos;
  require_defined(value);
  if (!value.is_numeric())
    throw template_error(fmt::format("%{} format: a real number is required, not {}", type, type_name(value)));
  if (floats) {
    const double number = value.number();
    PercentField finite = field;
    finite.zero = field.zero && std::isfinite(number);
    return pad_number(sign_of(std::signbit(number) && !std::isnan(number), field),
                      format_float(std::abs(number), type, field.precision, field.alternate), finite, budget);
  }
  Integer integer = value.integer();
  if (value.is(Kind::kFloat)) {
    if (type == 'x' || type == 'X' || type == 'o')
      throw template_error(fmt::format("%{} format: an integer is required, not float", type));
    if (!std::isfinite(value.number()) || std::abs(value.number()) > 1e37)
      throw template_error("cannot convert float to integer");
    integer = static_cast<Integer>(value.number());
  }
  const Integer magnitude = integer < 0 ? -integer : integer;
  const int base = type == 'o' ? 8 : type == 'x' || type == 'X' ? 16 : 10;
  std::string digits = digits_in_base(magnitude, base, type == 'X');
  if (field.precision > static_cast<int>(digits.size())) {
    budget.check_length(static_cast<uint64_t>(field.precision));
    digits.insert(0, static_cast<size_t>(field.precision) - digits.size(), '0');
  }
  std::string sign = sign_of(integer < 0, field);
  if (field.alternate && base != 10) sign += type == 'o' ? "0o" : type == 'x' ? "0x" : "0X";
  return pad_number(std::move(sign), digits, field, budget);
}

}  // namespace

std::string format_float(double value, char type, int precision, bool alternate) {
  if (std::isnan(value)) return type >= 'A' && type <= 'Z' ? "NAN" : "nan";
  if (std::isinf(value)) return type >= 'A' && type <= 'Z' ? "INF" : "inf";
  if (precision > kMaxPrecision) throw template_error("a precision in a format is too large");
  const std::string format = fmt::format("%{}.*{}", alternate ? "#" : "", type);
  std::string out(512 + static_cast<size_t>(std::max(precision, 0)), '\0');
  const int size = std::snprintf(out.data(), out.size(), format.c_str(), precision < 0 ? 6 : precision, value);
  out.resize(static_cast<size_t>(size));
  return out;
}

Value format_percent(const Value& format, const Value& arguments, Budget& budget) {
  const Text& text = format.text();
  const bool markup = format.is_markup();
  const bool is_tuple = arguments.is(Kind::kTuple);
  const bool is_mapping = arguments.is(Kind::kDict);
  // What has items by key may be left unused.
  const bool may_be_unused =
      is_mapping || arguments.is(Kind::kList) || arguments.is(Kind::kUndefined) || arguments.is(Kind::kRange);
  size_t used = 0;
  const auto next = [&]() -> Value {
    if (is_tuple) {
      if (used >= arguments.items().size()) throw template_error("not enough arguments for format string");
      return arguments.items()[used++];
    }
    if (used++ > 0) throw template_error("not enough arguments for format string");
    return arguments;
  };
  Text out;
  for (size_t at = 0; at < text.size();) {
    budget.charge(1);
    if (code_point(text[at]) != '%') {
      out += text[at++];
      continue;
    }
    ++at;
    const auto peek = [&]() -> char {
      if (at >= text.size()) throw template_error("incomplete format");
      const uint32_t code = code_point(text[at]);
      return code < 0x80 ? static_cast<char>(code) : '\0';
    };
    std::optional<Value> named;
    if (peek() == '(') {
      if (!is_mapping) throw template_error("format requires a mapping");
      size_t open = 1;
      const size_t begin = ++at;
      while (open > 0) {
        const char c = peek();
        open += c == '(' ? 1 : 0;
        open -= c == ')' ? 1 : 0;
        ++at;
      }
      const Text key = text.substr(begin, at - 1 - begin);
      const Value* found = arguments.dict().find(TextView(key));
      if (found == nullptr)
        throw template_error(fmt::format("the format names an unknown key {}", quote(to_utf8(key))));
      named = *found;
    }
    PercentField field;
    for (bool more = true; more;) {
      switch (peek()) {
        case '-': field.left = true; break;
        case '+': field.plus = true; break;
        case ' ': field.blank = true; break;
        case '#': field.alternate = true; break;
        case '0': field.zero = true; break;
        default: more = false;
      }
      at += more;
    }
    const auto number = [&]() -> int {
      if (peek() != '*') return read_number(text, at);
      ++at;
      const Value given = next();
      if (!given.is_integral()) throw template_error("* wants int");
      if (given.integer() > (1 << 30) || given.integer() < -(1 << 30))
        throw template_error("a width or precision in a format is too large");
      return static_cast<int>(given.integer());
    };
    field.width = number();
    if (field.width < -1) {
      field.left = true;
      field.width = -field.width;
    }
    if (peek() == '.') {
      ++at;
      field.precision = std::max(number(), 0);
    }
    while (peek() == 'h' || peek() == 'l' || peek() == 'L') ++at;
    const char type = peek();
    const Character origin = text[at] & kForeign;
    ++at;
    if (type == '%') {
      out += U'%' | origin;
      continue;
    }
    const Value value = named ? *named : next();
    Text piece;
    switch (type) {
      case 's':
      case 'r':
      case 'a': {
        piece = type == 's' ? printed(value, budget) : representation(value, budget);
        if (type == 'a') piece = ascii_of(piece);
        if (markup && !(type == 's' && value.is_markup()))
          piece = escape(make_text(budget, std::move(piece)), budget).text();
        if (field.precision >= 0) piece = piece.substr(0, static_cast<size_t>(field.precision));
        break;
      }
      case 'c':
        if (value.is_text() && value.text().size() == 1)
          piece = value.text();
        else if (value.is_integral() && value.integer() >= 0 && value.integer() < 0x110000 &&
                 !(value.integer() >= 0xD800 && value.integer() <= 0xDFFF))
          piece = Text(1, static_cast<Character>(value.integer()));
        else
          throw template_error("%c requires int or char");
        break;
      case 'd':
      case 'i':
      case 'u':
      case 'x':
      case 'X':
      case 'o':
      case 'e':
      case 'E':
      case 'f':
      case 'F':
      case 'g':
      case 'G': piece = percent_number(value, type, field, budget); break;
      default:
        throw template_error(
            fmt::format("unsupported format character {} at index {}", quote(to_utf8(text.substr(at - 1, 1))), at - 1));
    }
    const auto missing = static_cast<size_t>(std::max<int64_t>(field.width - static_cast<int64_t>(piece.size()), 0));
    budget.check_length(out.size() + piece.size() + missing);
    if (!field.left) out.append(missing, U' ');
    out += piece;
    if (field.left) out.append(missing, U' ');
  }
  if (is_tuple ? used < arguments.items().size() : used == 0 && !may_be_unused)
    throw template_error("not all arguments converted during string formatting");
  return make_text(budget, std::move(out), markup);
}

namespace {

// [[fill]align][sign][z][#][0][width][grouping][.precision][type]
struct BraceField {
  Character fill = U' ';
  char align = '\0', sign = '-', grouping = '\0', type = '\0';
  bool alternate = false;
  int width = -1, precision = -1;
};

BraceField read_specification(TextView text) {
  BraceField field;
  size_t at = 0;
  const auto ascii = [&](size_t i) -> char {
    return i < text.size() && code_point(text[i]) < 0x80 ? static_cast<char>(code_point(text[i])) : '\0';
  };
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  if (text.size() >= 2 && is_align(ascii(1))) {
    field.fill = text[0];
    field.align = ascii(1);
    at = 2;
  } else if (is_align(ascii(0))) {
    field.align = ascii(0);
    at = 1;
  }
  if (ascii(at) == '+' || ascii(at) == '-' || ascii(at) == ' ') field.sign = ascii(at++);
  if (ascii(at) == '#') {
    field.alternate = true;
    ++at;
  }
  if (ascii(at) == '0') {
    if (field.align == '\0') {
      field.fill = U'0';
      field.align = '=';
    }
    ++at;
  }
  field.width = read_number(text, at);
  if (ascii(at) == ',' || ascii(at) == '_') field.grouping = ascii(at++);
  if (ascii(at) == '.') {
    ++at;
    field.precision = read_number(text, at);
    if (field.precision < 0) throw template_error("Format specifier missing precision");
  }
  if (at < text.size()) field.type = ascii(at++);
  if (at < text.size()) throw template_error("Invalid format specifier");
  return field;
}

// Separators between groups of digits, in the part before the point or exponent.
std::string group_digits(const std::string& number, char separator, size_t group) {
  size_t whole = 0;
  while (whole < number.size() && std::isalnum(static_cast<unsigned char>(number[whole])) != 0 && number[whole] != 'e')
    ++whole;
  std::string out;
  for (size_t i = 0; i < whole; ++i) {
    if (i > 0 && (whole - i) % group == 0) out += separator;
    out += number[i];
  }
  return out + number.substr(whole);
}

Text align(TextView sign, TextView body, const BraceField& field, char default_align, Budget& budget) {
  const int64_t size = static_cast<int64_t>(sign.size() + body.size());
  const auto missing = static_cast<size_t>(std::max<int64_t>(field.width - size, 0));
  budget.check_length(static_cast<uint64_t>(size) + missing);
  const char how = field.align == '\0' ? default_align : field.align;
  const size_t before = how == '>' ? missing : how == '^' ? missing / 2 : 0;
  Text out(before, field.fill);
  out += sign;
  if (how == '=') out.append(missing, field.fill);
  out += body;
  if (how == '<' || how == '^') out.append(missing - before, field.fill);
  return out;
}

Text format_number(const Value& value, const BraceField& field, Budget& budget) {
  bool negative = false;
  std::string body, prefix;
  const bool as_float =
      value.is(Kind::kFloat) || std::string_view("eEfFgG%").find(field.type) != std::string_view::npos;
  if (as_float && (value.is(Kind::kFloat) || field.type != '\0')) {
    const double number = value.number();
    negative = std::signbit(number) && !std::isnan(number);
    const double magnitude = std::abs(number);
    if (field.type == '\0' && field.precision < 0) {
      body = python_float(magnitude);
    } else if (field.type == '\0') {  // like g, but with a digit after the point
      body = format_float(magnitude, 'g', std::max(field.precision, 1), field.alternate);
      if (body.find_first_of(".en") == std::string::npos) {
        if (static_cast<int>(body.size()) < std::max(field.precision, 1))
          body += ".0";
        else
          body = format_float(magnitude, 'e', std::max(field.precision - 1, 0), field.alternate);
      }
    } else if (field.type == '%') {
      body = format_float(magnitude * 100, 'f', field.precision, field.alternate) + "%";
    } else if (field.type == 'n') {
      body = format_float(magnitude, 'g', field.precision, field.alternate);
    } else if (std::string_view("eEfFgG").find(field.type) != std::string_view::npos) {
      body = format_float(magnitude, field.type, field.precision, field.alternate);
    } else {
      throw template_error(fmt::format("Unknown format code '{}' for object of type 'float'", field.type));
    }
  } else {
    if (field.precision >= 0) throw template_error("Precision not allowed in integer format specifier");
    const Integer integer = value.integer();
    negative = integer < 0;
    const Integer magnitude = negative ? -integer : integer;
    switch (field.type) {
      case '\0':
      case 'd':
      case 'n': body = digits_in_base(magnitude, 10, false); break;
      case 'b': body = digits_in_base(magnitude, 2, false), prefix = "0b"; break;
      case 'o': body = digits_in_base(magnitude, 8, false), prefix = "0o"; break;
      case 'x': body = digits_in_base(magnitude, 16, false), prefix = "0x"; break;
      case 'X': body = digits_in_base(magnitude, 16, true), prefix = "0X"; break;
      case 'c':
        if (integer < 0 || integer >= 0x110000 || (integer >= 0xD800 && integer <= 0xDFFF))
          throw template_error("%c arg not in range(0x110000)");
        return align({}, Text(1, static_cast<Character>(integer)), field, '<', budget);
      default: throw template_error(fmt::format("Unknown format code '{}' for object of type 'int'", field.type));
    }
    if (!field.alternate) prefix.clear();
  }
  if (field.grouping != '\0')
    body =
        group_digits(body, field.grouping, field.type == 'b' || field.type == 'o' || (field.type | 32) == 'x' ? 4 : 3);
  const std::string sign = (negative ? "-" : field.sign == '+' ? "+" : field.sign == ' ' ? " " : "") + prefix;
  if (field.grouping != '\0' && field.fill == U'0' && field.align == '=')
    while (static_cast<int>(sign.size() + body.size()) < field.width) {  // the zeros are grouped too
      std::string digits;
      for (const char c : body)
        if (c != field.grouping) digits += c;
      const std::string grouped = group_digits(fmt::format("0{}", digits), field.grouping, 3);
      if (static_cast<int>(sign.size() + grouped.size()) > field.width && grouped[1] == field.grouping) break;
      budget.step();
      body = grouped;
    }
  return align(to_text(sign), to_text(body), field, '>', budget);
}

Text format_value(const Value& value, TextView specification, Budget& budget) {
  if (specification.empty()) return printed(value, budget);
  const bool plain = value.is_text() || value.is_numeric();
  if (!plain) throw template_error(fmt::format("unsupported format string passed to {}.__format__", type_name(value)));
  BraceField field = read_specification(specification);
  if (value.is_numeric()) return format_number(value, field, budget);
  if (field.type != '\0' && field.type != 's')
    throw template_error(fmt::format("Unknown format code '{}' for object of type 'str'", field.type));
  if (field.sign != '-') throw template_error("Sign not allowed in string format specifier");
  if (field.align == '=') {
    if (field.fill != U'0') throw template_error("'=' alignment not allowed in string format specifier");
    field.align = '<';  // a bare 0 before the width fills on the right
  }
  const TextView text = value.text();
  return align({}, field.precision >= 0 ? text.substr(0, static_cast<size_t>(field.precision)) : text, field, '<',
               budget);
}

class BraceFormatter {
 public:
  BraceFormatter(Machine& machine, const Arguments& arguments, bool markup)
      : machine_(machine), arguments_(arguments), markup_(markup) {}

  Text format(TextView text, int depth) {
    if (depth > 2) throw template_error("Max string recursion exceeded");
    Budget& budget = machine_.budget();
    Text out;
    for (size_t at = 0; at < text.size();) {
      budget.charge(1);
      const uint32_t code = code_point(text[at]);
      if ((code == '{' || code == '}') && at + 1 < text.size() && code_point(text[at + 1]) == code) {
        out += text[at];
        at += 2;
        continue;
      }
      if (code == '}') throw template_error("Single '}' encountered in format string");
      if (code != '{') {
        out += text[at++];
        continue;
      }
      size_t open = 1;
      const size_t begin = ++at;
      for (; at < text.size() && open > 0; ++at) {
        open += code_point(text[at]) == '{' ? 1 : 0;
        open -= code_point(text[at]) == '}' ? 1 : 0;
      }
      if (open > 0)
        throw template_error(begin >= text.size() ? "Single '{' encountered in format string"
                                                  : "expected '}' before end of string");
      append(out, field(text.substr(begin, at - 1 - begin), depth), budget);
    }
    return out;
  }

 private:
  Text field(TextView text, int depth) {
    Budget& budget = machine_.budget();
    // name [! conversion] [: specification]; brackets of the name may hold either sign.
    size_t end = 0;
    bool in_brackets = false;
    for (; end < text.size(); ++end) {
      const uint32_t code = code_point(text[end]);
      if (code == '[') in_brackets = true;
      if (code == ']') in_brackets = false;
      if (!in_brackets && (code == '!' || code == ':')) break;
    }
    Value value = lookup(text.substr(0, end));
    TextView specification;
    char conversion = '\0';
    if (end < text.size() && code_point(text[end]) == '!') {
      if (end + 1 >= text.size()) throw template_error("end of string while looking for conversion specifier");
      conversion = static_cast<char>(code_point(text[end + 1]));
      end += 2;
      if (end < text.size() && code_point(text[end]) != ':')
        throw template_error("expected ':' after conversion specifier");
    }
    if (end < text.size()) specification = text.substr(end + 1);
    switch (conversion) {
      case '\0': break;
      case 's': value = make_text(budget, printed(value, budget)); break;
      case 'r': value = make_text(budget, representation(value, budget)); break;
      case 'a': value = make_text(budget, ascii_of(representation(value, budget))); break;
      default: throw template_error("Unknown conversion specifier in format string");
    }
    const Text expanded = format(specification, depth + 1);
    Text piece = format_value(value, expanded, budget);
    if (markup_ && !value.is_markup()) piece = escape(make_text(budget, std::move(piece)), budget).text();
    return piece;
  }

  Value lookup(TextView name) {
    size_t at = 0;
    while (at < name.size() && code_point(name[at]) != '.' && code_point(name[at]) != '[') ++at;
    const TextView first = name.substr(0, at);
    Value value;
    const bool is_number = !first.empty() && std::all_of(first.begin(), first.end(), is_decimal);
    if (first.empty() || is_number) {
      size_t position = 0;
      if (is_number) {
        if (next_ > 0)
          throw template_error("cannot switch from automatic field numbering to manual field specification");
        manual_ = true;
        size_t digit = 0;
        position = static_cast<size_t>(read_number(first, digit));
      } else {
        if (manual_) throw template_error("cannot switch from manual field specification to automatic field numbering");
        position = next_++;
      }
      if (position >= arguments_.positional.size())
        throw template_error("Replacement index out of range for positional args tuple");
      value = arguments_.positional[position];
    } else {
      const auto found = std::find_if(arguments_.keyword.begin(), arguments_.keyword.end(),
                                      [&](const auto& argument) { return argument.first == first; });
      if (found == arguments_.keyword.end())
        throw template_error(fmt::format("the format names an unknown argument {}", quote(to_utf8(first))));
      value = found->second;
    }
    while (at < name.size()) {
      machine_.budget().step();
      if (code_point(name[at]) == '.') {
        const size_t begin = ++at;
        while (at < name.size() && code_point(name[at]) != '.' && code_point(name[at]) != '[') ++at;
        if (at == begin) throw template_error("Empty attribute in format string");
        value = machine_.get_attribute(value, name.substr(begin, at - begin));
      } else if (code_point(name[at]) == '[') {
        const size_t begin = ++at;
        while (at < name.size() && code_point(name[at]) != ']') ++at;
        if (at == name.size() || at == begin) throw template_error("Empty attribute in format string");
        const TextView key = name.substr(begin, at - begin);
        ++at;
        size_t digit = 0;
        const bool number = std::all_of(key.begin(), key.end(), is_decimal);
        value =
            machine_.get_item(value, number ? Value(read_number(key, digit)) : make_text(machine_.budget(), Text(key)));
      } else {
        throw template_error("Only '.' or '[' may follow ']' in format field specifier");
      }
    }
    return value;
  }

  Machine& machine_;
  const Arguments& arguments_;
  bool markup_;
  size_t next_ = 0;
  bool manual_ = false;
};

}  // namespace

Value format_braces(Machine& machine, const Value& text, const Arguments& arguments) {
  return make_text(machine.budget(), BraceFormatter(machine, arguments, text.is_markup()).format(text.text(), 0),
                   text.is_markup());
}

namespace {

class JsonWriter {
 public:
  JsonWriter(const JsonStyle& style, Budget& budget) : style_(style), budget_(budget) {}

  void write(const Value& value, int depth) {
    budget_.step();
    if (depth > kMaxValueDepth) throw template_error("a value is nested too deeply for JSON");
    switch (value.kind()) {
      case Kind::kNone: structure("null"); break;
      case Kind::kBoolean: structure(value.boolean() ? "true" : "false"); break;
      case Kind::kInteger: structure(integer_text(value.integer())); break;
      case Kind::kFloat: structure(number(value.number())); break;
      case Kind::kText: string(value.text()); break;
      case Kind::kList:
      case Kind::kTuple: {
        structure("[");
        for (size_t i = 0; i < value.items().size(); ++i) {
          between(i == 0, depth);
          write(value.items()[i], depth + 1);
        }
        if (!value.items().empty()) new_line(depth);
        structure("]");
        break;
      }
      case Kind::kDict: {
        structure("{");
        const auto& members = value.dict().entries;
        std::vector<size_t> order;
        if (style_.sort_keys) {
          std::vector<Values> keys;
          for (const auto& member : members) keys.push_back({member.first});
          order = sorted_order(keys, false, budget_);
        }
        for (size_t i = 0; i < members.size(); ++i) {
          const auto& [name, inner] = members[style_.sort_keys ? order[i] : i];
          between(i == 0, depth);
          key(name);
          add(style_.key_separator);
          write(inner, depth + 1);
        }
        if (!members.empty()) new_line(depth);
        structure("}");
        break;
      }
      default: throw template_error(fmt::format("Object of type {} is not JSON serializable", type_name(value)));
    }
  }
  Text take() { return std::move(out_); }

 private:
  static std::string number(double value) {
    return std::isnan(value) ? "NaN" : std::isinf(value) ? (value < 0 ? "-Infinity" : "Infinity") : python_float(value);
  }
  void structure(std::string_view ascii) {
    budget_.check_length(out_.size() + ascii.size());
    budget_.charge(ascii.size());
    append_ascii(out_, ascii, kForeign);
  }
  void add(TextView text) { append(out_, text, budget_); }
  void new_line(int depth) {
    if (!style_.indent) return;
    structure("\n");
    for (int i = 0; i < depth; ++i) add(*style_.indent);
  }
  void between(bool first, int depth) {
    if (!first) add(style_.item_separator);
    new_line(depth + 1);
  }
  void key(const Value& key) {
    switch (key.kind()) {
      case Kind::kText: string(key.text()); break;
      case Kind::kBoolean: string(to_text(key.boolean() ? "true" : "false", kForeign)); break;
      case Kind::kNone: string(to_text("null", kForeign)); break;
      case Kind::kInteger: string(to_text(integer_text(key.integer()), kForeign)); break;
      case Kind::kFloat: string(to_text(number(key.number()), kForeign)); break;
      default: throw template_error(fmt::format("keys must be str, int, float, bool or None, not {}", type_name(key)));
    }
  }
  void string(TextView text) {
    structure("\"");
    budget_.check_length(out_.size() + text.size());
    budget_.charge(text.size());
    for (const Character c : text) {
      const uint32_t code = code_point(c);
      const auto escaped = [&](std::string_view with) {
        budget_.check_length(out_.size());
        append_ascii(out_, with, c & kForeign);
      };
      switch (code) {
        case '"': escaped("\\\""); break;
        case '\\': escaped("\\\\"); break;
        case '\n': escaped("\\n"); break;
        case '\r': escaped("\\r"); break;
        case '\t': escaped("\\t"); break;
        case '\b': escaped("\\b"); break;
        case '\f': escaped("\\f"); break;
        default:
          if (code < 0x20 || (style_.ascii && code > 0x7E && code < 0x10000 && code != 0x7F))
            escaped(fmt::format("\\u{:04x}", code));
          else if (style_.ascii && code >= 0x10000)
            escaped(fmt::format("\\u{:04x}\\u{:04x}", 0xD800 + ((code - 0x10000) >> 10), 0xDC00 + (code & 0x3FF)));
          else
            out_ += c;
      }
    }
    structure("\"");
  }

  const JsonStyle& style_;
  Budget& budget_;
  Text out_;
};

}  // namespace

Text to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  JsonWriter writer(style, budget);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace beryl::jinja
