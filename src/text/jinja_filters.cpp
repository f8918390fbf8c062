// The filters of Jinja, with transformers' tojson.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "text/jinja_format.h"
#include "text/jinja_machine.h"
#include "text/python_text.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

struct Call {
  Machine& machine;
  std::string_view name;
  const Value& value;
  Arguments& arguments;
  Budget& budget() const { return machine.budget(); }
  Parameters parameters(std::initializer_list<std::string_view> names, size_t required = 0) const {
    return {name, arguments, names, required};
  }
};

// soft_str: texts as they are, the rest printed.
Value soft_text(const Value& value, Budget& budget) {
  return value.is_text() ? value : make_text(budget, printed(value, budget));
}

Value like(const Value& model, Text text, Budget& budget) {
  return make_text(budget, std::move(text), model.is_markup());
}

Value ignore_case(const Value& value, Budget& budget) {
  return value.is_text() ? like(value, lower(value.text()), budget) : value;
}

// "a.b.0" or a number: the path to a part of an item.
class Path {
 public:
  Path(Machine& machine, const Value& path, const Value* otherwise = nullptr)
      : machine_(machine), otherwise_(otherwise) {
    if (path.is(Kind::kNone)) return;
    if (!path.is_text()) {
      parts_.push_back(path);
      return;
    }
    const TextView text = path.text();
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(U'.', begin), text.size());
      const TextView part = text.substr(begin, end - begin);
      Integer number = 0;
      bool is_number = !part.empty() && part.size() < 30;
      for (const Character c : part) {
        is_number = is_number && code_point(c) >= '0' && code_point(c) <= '9';
        if (is_number) number = number * 10 + static_cast<Integer>(code_point(c) - '0');
      }
      parts_.push_back(is_number ? Value(number) : make_text(machine.budget(), Text(part)));
      begin = end + 1;
    }
  }
  Value of(Value item) const {
    for (const Value& part : parts_) {
      item = machine_.get_item(item, part);
      if (otherwise_ != nullptr && !otherwise_->is(Kind::kNone) && item.is(Kind::kUndefined)) item = *otherwise_;
    }
    return item;
  }

 private:
  Machine& machine_;
  const Value* otherwise_;
  Values parts_;
};

// --- texts ---

Value trim(const Call& call) {
  const auto p = call.parameters({"chars"});
  const Value text = soft_text(call.value, call.budget());
  const bool listed = p.has(0) && !p[0]->is(Kind::kNone);
  if (listed) call.budget().charge(text.text().size() * (p.text(0).size() + 1));
  return like(text, Text(listed ? strip(TextView(text.text()), TextView(p.text(0))) : strip(TextView(text.text()))),
              call.budget());
}

Value change_case(const Call& call) {
  call.parameters({});
  const Value text = soft_text(call.value, call.budget());
  call.budget().charge(text.text().size() * 4);
  const std::string_view name = call.name;
  return like(text,
              name == "upper"   ? upper(text.text())
              : name == "lower" ? lower(text.text())
                                : capitalize(text.text()),
              call.budget());
}

// Words begin after white space and ( [ { < -, not as str.title does it.
Value title_filter(const Call& call) {
  call.parameters({});
  const Text text = soft_text(call.value, call.budget()).text();
  call.budget().charge(text.size() * 4);
  const auto separates = [](Character c) {
    return is_space(c) ||
           std::u32string_view(U"-({[<").find(static_cast<char32_t>(code_point(c))) != std::u32string_view::npos;
  };
  Text out;
  for (size_t at = 0; at < text.size();) {
    size_t end = at + 1;
    while (end < text.size() && separates(text[end]) == separates(text[at])) ++end;
    out += upper(TextView(text).substr(at, 1));
    out += lower(TextView(text).substr(at + 1, end - at - 1));
    at = end;
  }
  return make_text(call.budget(), std::move(out));
}

Value replace_filter(const Call& call) {
  const auto p = call.parameters({"old", "new", "count"}, 2);
  Arguments arguments;
  Budget& budget = call.budget();
  arguments.positional = {make_text(budget, printed(*p[0], budget)), make_text(budget, printed(*p[1], budget))};
  if (p.has(2) && !p[2]->is(Kind::kNone)) arguments.positional.push_back(*p[2]);
  const Value text = make_text(budget, printed(call.value, budget));
  return call.machine.call(*built_in_attribute(call.machine, text, "replace"), arguments);
}

Value method_filter(const Call& call) {  // center
  const auto p = call.parameters({"width"});
  Arguments arguments;
  arguments.positional = {p.get(0, 80)};
  const Value text = soft_text(call.value, call.budget());
  return call.machine.call(*built_in_attribute(call.machine, text, call.name), arguments);
}

Value format_filter(const Call& call) {
  Budget& budget = call.budget();
  if (!call.arguments.positional.empty() && !call.arguments.keyword.empty())
    throw template_error("can't handle positional and keyword arguments at the same time");
  if (call.arguments.keyword.empty())
    return format_percent(soft_text(call.value, budget), make_tuple(budget, call.arguments.positional), budget);
  auto dict = std::make_shared<DictObject>(&budget);
  for (const auto& [name, value] : call.arguments.keyword) dict->set(make_text(budget, Text(name)), value, budget);
  return format_percent(soft_text(call.value, budget), Value(Kind::kDict, std::move(dict)), budget);
}

Values split_lines(const Value& text, Machine& machine) {
  Arguments none;
  return machine.call(*built_in_attribute(machine, text, "splitlines"), none).items();
}

Value indent(const Call& call) {
  const auto p = call.parameters({"width", "first", "blank"});
  Budget& budget = call.budget();
  require_defined(call.value);
  if (!call.value.is_text())
    throw template_error(fmt::format("indent: a str is required, not {}", type_name(call.value)));
  const bool markup = call.value.is_markup();
  Text indention;
  if (p.has(0) && p[0]->is_text()) {
    indention = markup ? escape(*p[0], budget).text() : p.text(0);
    if (markup && p[0]->is_text()) indention = p.text(0);  // Markup(indention) escapes nothing
  } else {
    const Integer width = p.integer(0, 4);
    if (width > 0) {
      budget.check_length(static_cast<uint64_t>(std::min<Integer>(width, Integer{1} << 60)));
      indention.assign(static_cast<size_t>(width), U' ');
    }
  }
  const Values lines = split_lines(make_text(budget, call.value.text() + Text(1, U'\n')), call.machine);
  Text out;
  if (p.flag(1)) append(out, indention, budget);
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      append(out, Text(1, U'\n'), budget);
      if (p.flag(2) || !lines[i].text().empty()) append(out, indention, budget);
    }
    append(out, lines[i].text(), budget);
  }
  return make_text(budget, std::move(out), markup);
}

Value truncate(const Call& call) {
  const auto p = call.parameters({"length", "killwords", "end", "leeway"});
  Budget& budget = call.budget();
  require_defined(call.value);
  if (!call.value.is_text())
    throw template_error(fmt::format("truncate: a str is required, not {}", type_name(call.value)));
  const Text& text = call.value.text();
  const Text end = p.has(2) ? p.text(2) : to_text("...");
  const Integer length = p.integer(0, 255);
  const Integer leeway = p.has(3) && !p[3]->is(Kind::kNone) ? p.integer(3, 5) : 5;
  if (length < static_cast<Integer>(end.size()) || leeway < 0)
    throw template_error("truncate: the length is too small");
  if (static_cast<Integer>(text.size()) <= length + leeway) return call.value;
  Text kept = text.substr(0, static_cast<size_t>(length) - end.size());
  if (!p.flag(1)) {
    const size_t blank = kept.rfind(U' ');
    if (blank != Text::npos) kept.resize(blank);
  }
  return like(call.value, kept + end, budget);
}

Value word_count(const Call& call) {
  call.parameters({});
  const Text text = soft_text(call.value, call.budget()).text();
  call.budget().charge(text.size() * 4);
  int64_t words = 0;
  bool inside = false;
  for (const Character c : text) {
    const bool word = code_point(c) == '_' || is_letter(c) || is_number(c);
    words += word && !inside;
    inside = word;
  }
  return words;
}

Value urlencode(const Call& call) {
  call.parameters({});
  Budget& budget = call.budget();
  const auto encode = [&](const Value& value, bool query) {
    Text out;
    for (const Character c : printed(value, budget)) {
      std::string utf8 = to_utf8(Text(1, c));
      for (const char byte : utf8) {
        budget.check_length(out.size());
        budget.charge(2);
        const auto code = static_cast<unsigned char>(byte);
        const bool plain = code < 0x80 && (std::isalnum(code) != 0 || code == '_' || code == '.' || code == '-' ||
                                           code == '~' || (code == '/' && !query));
        if (plain)
          out += code | (c & kForeign);
        else if (code == ' ' && query)
          out += U'+' | (c & kForeign);
        else
          for (const char e : fmt::format("%{:02X}", code)) out += static_cast<Character>(e) | (c & kForeign);
      }
    }
    return out;
  };
  if (call.value.is_text() || !is_iterable(call.value)) return make_text(budget, encode(call.value, false));
  const Values pairs = call.value.is(Kind::kDict) ? Values() : iterate(call.value, budget);
  Text out;
  const auto add = [&](const Value& key, const Value& value) {
    if (!out.empty()) out += U'&';
    append(out, encode(key, true), budget);
    out += U'=';
    append(out, encode(value, true), budget);
  };
  if (call.value.is(Kind::kDict))
    for (const auto& [key, value] : call.value.dict().entries) add(key, value);
  for (const Value& pair : pairs) {
    const Values both = iterate(pair, budget);
    if (both.size() != 2) throw template_error("urlencode: items must be pairs");
    add(both[0], both[1]);
  }
  return make_text(budget, std::move(out));
}

Value xmlattr(const Call& call) {
  const auto p = call.parameters({"autospace"});
  Budget& budget = call.budget();
  if (!call.value.is(Kind::kDict))
    throw template_error(fmt::format("xmlattr: a dict is required, not {}", type_name(call.value)));
  Text out;
  for (const auto& [key, value] : call.value.dict().entries) {
    if (value.is(Kind::kNone) || value.is(Kind::kUndefined)) continue;
    if (!key.is_text()) throw template_error("xmlattr: attribute names must be str");
    for (const Character c : key.text())
      if (code_point(c) < 0x80 && (is_space(c) || code_point(c) == '/' || code_point(c) == '>' || code_point(c) == '='))
        throw template_error(fmt::format("Invalid character in attribute name: {}", quote(to_utf8(key.text()))));
    if (!out.empty() || p.flag(0, true)) out += U' ';
    append(out, escape(key, budget).text(), budget);
    append(out, to_text("=\""), budget);
    append(out, escape(value, budget).text(), budget);
    append(out, to_text("\""), budget);
  }
  return make_text(budget, std::move(out));
}

Value mark_safe(const Call& call) {
  call.parameters({});
  return soft_text(call.value, call.budget()).as_markup(true);
}
Value escape_filter(const Call& call) {
  call.parameters({});
  const bool again = call.name == "forceescape" && call.value.is_text();
  return escape(again ? call.value.as_markup(false) : call.value, call.budget());
}
Value to_string(const Call& call) {
  call.parameters({});
  return soft_text(call.value, call.budget());
}

Value tojson(const Call& call) {
  const auto p = call.parameters({"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = p.flag(0);
  style.sort_keys = p.flag(3);
  const bool indented = p.has(1) && !p[1]->is(Kind::kNone);
  if (indented && p[1]->is_text()) {
    style.indent = p.text(1);
  } else if (indented) {
    const Integer width = std::max<Integer>(p.integer(1, 0), 0);
    call.budget().check_length(static_cast<uint64_t>(std::min<Integer>(width, Integer{1} << 60)));
    style.indent = Text(static_cast<size_t>(width), U' ' | kForeign);
  }
  style.item_separator = to_text(indented ? "," : ", ", kForeign);
  style.key_separator = to_text(": ", kForeign);
  if (p.has(2) && !p[2]->is(Kind::kNone)) {
    const Values both = iterate(*p[2], call.budget());
    if (both.size() != 2 || !both[0].is_text() || !both[1].is_text())
      throw template_error("tojson: separators must be two strings");
    style.item_separator = both[0].text();
    style.key_separator = both[1].text();
  }
  return make_text(call.budget(), to_json(call.value, style, call.budget()));
}

// --- numbers ---

std::optional<double> parse_float(TextView text) {
  std::string digits;
  for (const Character c : strip(text)) {
    if (code_point(c) >= 0x80) return std::nullopt;
    digits += static_cast<char>(code_point(c));
  }
  std::string plain;
  for (size_t i = 0; i < digits.size(); ++i) {
    const bool between = i > 0 && i + 1 < digits.size() &&
                         std::isdigit(static_cast<unsigned char>(digits[i - 1])) != 0 &&
                         std::isdigit(static_cast<unsigned char>(digits[i + 1])) != 0;
    if (digits[i] == '_' && !between) return std::nullopt;
    if (digits[i] != '_') plain += static_cast<char>(std::tolower(static_cast<unsigned char>(digits[i])));
  }
  double sign = 1;
  std::string_view rest = plain;
  if (rest.starts_with('+') || rest.starts_with('-')) {
    sign = rest[0] == '-' ? -1 : 1;
    rest.remove_prefix(1);
  }
  if (rest == "inf" || rest == "infinity") return sign * HUGE_VAL;
  if (rest == "nan") return std::nan("");
  if (rest.empty() || (std::isdigit(static_cast<unsigned char>(rest[0])) == 0 && rest[0] != '.')) return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  if (end != rest.data() + rest.size()) return std::nullopt;
  if (error == std::errc::result_out_of_range) value = std::strtod(std::string(rest).c_str(), nullptr);
  return sign * value;
}

std::optional<Integer> parse_integer(TextView text, int base) {
  std::string digits;
  for (const Character c : strip(text)) {
    if (code_point(c) >= 0x80) return std::nullopt;
    digits += static_cast<char>(std::tolower(static_cast<int>(code_point(c))));
  }
  std::string_view rest = digits;
  const bool negative = rest.starts_with('-');
  if (rest.starts_with('+') || rest.starts_with('-')) rest.remove_prefix(1);
  const auto drop = [&](std::string_view prefix, int of) {
    if ((base != of && base != 0) || !rest.starts_with(prefix)) return false;
    rest.remove_prefix(2);
    if (rest.starts_with('_')) rest.remove_prefix(1);
    base = of;
    return true;
  };
  if (!drop("0x", 16) && !drop("0o", 8)) drop("0b", 2);
  if (base == 0) {
    if (rest.size() > 1 && rest[0] == '0' && rest.find_first_not_of("0_") != std::string_view::npos)
      return std::nullopt;
    base = 10;
  }
  if (rest.empty()) return std::nullopt;
  Integer value = 0;
  bool after_digit = false;
  for (const char c : rest) {
    if (c == '_') {
      if (!after_digit) return std::nullopt;
      after_digit = false;
      continue;
    }
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'z' ? c - 'a' + 10 : 99;
    if (digit >= base) return std::nullopt;
    after_digit = true;
    value = value * base + digit;
    if (value > (Integer{1} << 120)) throw template_error("an integer is too large");
  }
  if (!after_digit) return std::nullopt;
  return negative ? -value : value;
}

Value truncated(double value) {
  if (!(std::abs(value) < 1e36)) throw template_error("cannot convert float infinity to integer");
  return static_cast<Integer>(value);
}

Value to_integer(const Call& call) {
  const auto p = call.parameters({"default", "base"});
  require_defined(call.value);
  const Value otherwise = p.get(0, 0);
  if (call.value.is_integral()) return call.value.integer();
  if (call.value.is(Kind::kFloat)) {
    if (std::isnan(call.value.number())) return otherwise;
    return truncated(call.value.number());  // infinity: an OverflowError there too
  }
  if (!call.value.is_text()) return otherwise;
  call.budget().charge(call.value.text().size());
  const Integer base = p.integer(1, 10);
  if (base == 0 || (base >= 2 && base <= 36))
    if (const auto integer = parse_integer(call.value.text(), static_cast<int>(base))) return *integer;
  const auto number = parse_float(call.value.text());
  if (!number || std::isnan(*number) || std::isinf(*number)) return otherwise;
  return truncated(*number);
}

Value to_float(const Call& call) {
  const auto p = call.parameters({"default"});
  require_defined(call.value);
  if (call.value.is_numeric()) return call.value.number();
  if (call.value.is_text()) {
    call.budget().charge(call.value.text().size());
    if (const auto number = parse_float(call.value.text())) return *number;
  }
  return p.get(0, 0.0);
}

void require_number(const Call& call) {
  require_defined(call.value);
  if (!call.value.is_numeric())
    throw template_error(fmt::format("{}: a number is required, not {}", call.name, type_name(call.value)));
}

Value absolute(const Call& call) {
  call.parameters({});
  require_number(call);
  if (call.value.is(Kind::kFloat)) return std::abs(call.value.number());
  return call.value.integer() < 0 ? -call.value.integer() : call.value.integer();
}

// round(): to the even neighbour of a tie. Through the decimal digits, as Python does it.
double round_digits(double value, int digits) {
  if (!std::isfinite(value) || digits > 300) return value;
  if (digits < -310) return std::copysign(0.0, value);
  if (digits >= 0) return std::strtod(fmt::format("{:.{}f}", value, digits).c_str(), nullptr);
  const double unit = std::pow(10.0, -digits);
  return std::nearbyint(value / unit) * unit;
}

Value round_filter(const Call& call) {
  const auto p = call.parameters({"precision", "method"});
  require_number(call);
  const Integer precision = p.integer(0, 0);
  if (precision > 1000 || precision < -1000) throw template_error("round: the precision is too large");
  const auto digits = static_cast<int>(precision);
  const std::string method = p.has(1) ? to_utf8(p.text(1)) : "common";
  if (method == "common") {
    if (call.value.is(Kind::kFloat)) return round_digits(call.value.number(), digits);
    if (digits >= 0) return call.value.integer();
    if (digits < -30) return 0;
    Integer unit = 1;
    for (int i = 0; i < -digits; ++i) unit *= 10;
    const Integer magnitude = call.value.integer() < 0 ? -call.value.integer() : call.value.integer();
    Integer whole = magnitude / unit;
    const Integer twice = magnitude % unit * 2;
    if (twice > unit || (twice == unit && whole % 2 != 0)) ++whole;
    return (call.value.integer() < 0 ? -whole : whole) * unit;
  }
  if (method != "ceil" && method != "floor") throw template_error("method must be common, ceil or floor");
  const double factor = std::pow(10.0, digits);
  const double scaled = call.value.number() * factor;
  if (!std::isfinite(scaled) || std::abs(scaled) > 1e36) throw template_error("round: the number is too large");
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / factor;
}

Value file_size(const Call& call) {
  const auto p = call.parameters({"binary"});
  Arguments none;
  const Value number =
      call.value.is_numeric() || call.value.is_text() ? to_float({call.machine, "float", call.value, none}) : Value();
  if (!number.is(Kind::kFloat)) throw template_error("filesizeformat: a number is required");
  const double bytes = number.number();
  const bool binary = p.flag(0);
  const double base = binary ? 1024 : 1000;
  if (bytes == 1) return make_text(call.budget(), "1 Byte");
  if (bytes < base) return make_text(call.budget(), fmt::format("{} Bytes", static_cast<int64_t>(bytes)));
  static constexpr std::string_view kPrefixes[2][8] = {{"kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"},
                                                       {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"}};
  double unit = base;
  for (int i = 0;; ++i) {
    unit *= base;
    if (bytes < unit || i == 7)
      return make_text(call.budget(), fmt::format("{:.1f} {}", base * bytes / unit, kPrefixes[binary][i]));
  }
}

// --- collections ---

Value count(const Call& call) {
  call.parameters({});
  if (call.value.is(Kind::kLoop)) return call.machine.get_attribute(call.value, to_text("length"));
  const auto n = length(call.value);
  if (!n) throw template_error(fmt::format("object of type '{}' has no len()", type_name(call.value)));
  return *n;
}

Value items(const Call& call) {
  call.parameters({});
  if (call.value.is(Kind::kUndefined)) return make_iterator(call.budget(), {});
  if (!call.value.is(Kind::kDict)) throw template_error("Can only get item pairs from a mapping.");
  Values pairs;
  for (const auto& [key, value] : call.value.dict().entries) pairs.push_back(make_tuple(call.budget(), {key, value}));
  return make_iterator(call.budget(), std::move(pairs));
}

Value to_list(const Call& call) {
  call.parameters({});
  return make_list(call.budget(), iterate(call.value, call.budget()));
}

Value first(const Call& call) {
  call.parameters({});
  if (call.value.is(Kind::kIterator)) {
    IteratorObject& iterator = call.value.as<IteratorObject>();
    if (iterator.position < iterator.items.size()) return iterator.items[iterator.position++];
    return Value::undefined("No first item, sequence was empty.");
  }
  const Values all = iterate(call.value, call.budget());
  return all.empty() ? Value::undefined("No first item, sequence was empty.") : all.front();
}

Value last(const Call& call) {
  call.parameters({});
  if (call.value.is(Kind::kIterator) || call.value.is(Kind::kLoop))
    throw template_error(fmt::format("'{}' object is not reversible", type_name(call.value)));
  const Values all = iterate(call.value, call.budget());
  return all.empty() ? Value::undefined("No last item, sequence was empty.") : all.back();
}

Value reverse(const Call& call) {
  call.parameters({});
  if (call.value.is_text()) return slice(call.value, Value::none(), Value::none(), Value(-1), call.budget());
  Values all = iterate(call.value, call.budget());
  std::reverse(all.begin(), all.end());
  if (call.value.is(Kind::kIterator) || call.value.is(Kind::kUndefined))
    return make_list(call.budget(), std::move(all));
  const std::string_view type = call.value.is(Kind::kList)    ? "list_reverseiterator"
                                : call.value.is(Kind::kDict)  ? "dict_reversekeyiterator"
                                : call.value.is(Kind::kRange) ? "range_iterator"
                                                              : "reversed";
  return make_iterator(call.budget(), std::move(all), type);
}

Value join(const Call& call) {
  const auto p = call.parameters({"d", "attribute"});
  Budget& budget = call.budget();
  const Text separator = p.has(0) ? printed(*p[0], budget) : Text();
  const Path path(call.machine, p.get(1, Value::none()));
  Text out;
  bool is_first = true;
  for (const Value& item : iterate(call.value, budget)) {
    if (!is_first) append(out, separator, budget);
    is_first = false;
    append(out, printed(path.of(item), budget), budget);
  }
  return make_text(budget, std::move(out));
}

Value default_value(const Call& call) {
  const auto p = call.parameters({"default_value", "boolean"});
  const bool replace = call.value.is(Kind::kUndefined) || (p.flag(1) && !is_true(call.value));
  return replace ? (p.has(0) ? *p[0] : make_text(call.budget(), "")) : call.value;
}

Value dictsort(const Call& call) {
  const auto p = call.parameters({"case_sensitive", "by", "reverse"});
  require_defined(call.value);
  const std::string by = p.has(1) ? to_utf8(p.text(1)) : "key";
  if (by != "key" && by != "value") throw template_error("You can only sort by either \"key\" or \"value\"");
  if (!call.value.is(Kind::kDict))
    throw template_error(fmt::format("dictsort: a dict is required, not {}", type_name(call.value)));
  const auto& entries = call.value.dict().entries;
  std::vector<Values> keys;
  for (const auto& [key, value] : entries) {
    const Value& of = by == "key" ? key : value;
    keys.push_back({p.flag(0) ? of : ignore_case(of, call.budget())});
  }
  Values out;
  for (const size_t i : sorted_order(keys, p.flag(2), call.budget()))
    out.push_back(make_tuple(call.budget(), {entries[i].first, entries[i].second}));
  return make_list(call.budget(), std::move(out));
}

Value sort(const Call& call) {
  const auto p = call.parameters({"reverse", "case_sensitive", "attribute"});
  Budget& budget = call.budget();
  std::vector<Path> paths;
  if (p.has(2) && p[2]->is_text()) {
    const TextView list = p.text(2);
    for (size_t begin = 0; begin <= list.size();) {
      const size_t end = std::min(list.find(U',', begin), list.size());
      paths.emplace_back(call.machine, make_text(budget, Text(list.substr(begin, end - begin))));
      begin = end + 1;
    }
  } else {
    paths.emplace_back(call.machine, p.get(2, Value::none()));
  }
  const Values all = iterate(call.value, budget);
  std::vector<Values> keys;
  for (const Value& item : all) {
    Values& key = keys.emplace_back();
    for (const Path& path : paths) key.push_back(p.flag(1) ? path.of(item) : ignore_case(path.of(item), budget));
  }
  Values out;
  for (const size_t i : sorted_order(keys, p.flag(0), budget)) out.push_back(all[i]);
  return make_list(budget, std::move(out));
}

Value unique(const Call& call) {
  const auto p = call.parameters({"case_sensitive", "attribute"});
  Budget& budget = call.budget();
  const Path path(call.machine, p.get(1, Value::none()));
  DictObject seen(&budget);
  Values out;
  for (const Value& item : iterate(call.value, budget)) {
    const Value key = p.flag(0) ? path.of(item) : ignore_case(path.of(item), budget);
    if (seen.find(key, budget) != nullptr) continue;
    seen.set(key, Value::none(), budget);
    out.push_back(item);
  }
  return make_iterator(budget, std::move(out));
}

Value extreme(const Call& call) {  // min, max
  const auto p = call.parameters({"case_sensitive", "attribute"});
  Budget& budget = call.budget();
  const Path path(call.machine, p.get(1, Value::none()));
  std::optional<Value> best, best_key;
  for (const Value& item : iterate(call.value, budget)) {
    Value key = p.flag(0) ? path.of(item) : ignore_case(path.of(item), budget);
    if (best_key && !(call.name == "min" ? less(key, *best_key, budget) : less(*best_key, key, budget))) continue;
    best = item;
    best_key = std::move(key);
  }
  return best ? *best : Value::undefined("No aggregated item, sequence was empty.");
}

Value sum(const Call& call) {
  const auto p = call.parameters({"attribute", "start"});
  const Path path(call.machine, p.get(0, Value::none()));
  Value total = p.get(1, 0);
  if (total.is_text()) throw template_error("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : iterate(call.value, call.budget()))
    total = calculate(Operator::kAdd, total, path.of(item), call.budget());
  return total;
}

Value groupby(const Call& call) {
  const auto p = call.parameters({"attribute", "default", "case_sensitive"}, 1);
  Budget& budget = call.budget();
  const Path path(call.machine, *p[0], p[1]);
  const Values all = iterate(call.value, budget);
  std::vector<Values> keys;
  for (const Value& item : all) keys.push_back({p.flag(2) ? path.of(item) : ignore_case(path.of(item), budget)});
  Values groups, members;
  std::optional<size_t> group;  // the first member
  const auto close = [&] {
    if (!group) return;
    auto pair =
        std::make_shared<SequenceObject>(&budget, Values{path.of(all[*group]), make_list(budget, std::move(members))});
    pair->grouped = true;
    groups.emplace_back(Kind::kTuple, std::move(pair));
    members.clear();
  };
  for (const size_t i : sorted_order(keys, false, budget)) {
    if (!group || !equal(keys[*group][0], keys[i][0], budget)) {
      close();
      group = i;
    }
    members.push_back(all[i]);
  }
  close();
  return make_list(budget, std::move(groups));
}

Value map(const Call& call) {
  Budget& budget = call.budget();
  Values out;
  if (!is_true(call.value)) return make_iterator(budget, {});
  auto& keyword = call.arguments.keyword;
  if (call.arguments.positional.empty()) {
    const auto p = call.parameters({"attribute", "default"});
    if (!p.has(0)) throw template_error("map requires a filter argument");
    const Path path(call.machine, *p[0], p[1]);
    for (const Value& item : iterate(call.value, budget)) out.push_back(path.of(item));
    return make_iterator(budget, std::move(out));
  }
  if (!call.arguments.positional[0].is_text()) throw template_error("map requires the name of a filter");
  const std::string name = to_utf8(call.arguments.positional[0].text());
  const Values rest(call.arguments.positional.begin() + 1, call.arguments.positional.end());
  for (const Value& item : iterate(call.value, budget)) {
    Arguments arguments{rest, keyword};
    out.push_back(call.machine.filter(name, item, arguments));
  }
  return make_iterator(budget, std::move(out));
}

// select, reject, selectattr, rejectattr
Value select(const Call& call) {
  Budget& budget = call.budget();
  if (!is_true(call.value)) return make_iterator(budget, {});
  const bool by_attribute = call.name.ends_with("attr"), keeps = call.name.starts_with("select");
  const Values& given = call.arguments.positional;
  if (by_attribute && given.empty()) throw template_error("Missing parameter for attribute name");
  const Path path(call.machine, by_attribute ? given[0] : Value::none());
  const size_t at = by_attribute ? 1 : 0;
  std::string test;
  if (given.size() > at) {
    if (!given[at].is_text()) throw template_error(fmt::format("{} requires the name of a test", call.name));
    test = to_utf8(given[at].text());
  }
  Values out;
  for (const Value& item : iterate(call.value, budget)) {
    const Value subject = path.of(item);
    bool holds = false;
    if (given.size() > at) {
      Arguments arguments{Values(given.begin() + static_cast<std::ptrdiff_t>(at) + 1, given.end()),
                          call.arguments.keyword};
      holds = call.machine.test(test, subject, arguments);
    } else {
      holds = is_true(subject);
    }
    if (holds == keeps) out.push_back(item);
  }
  return make_iterator(budget, std::move(out));
}

Value batch(const Call& call) {
  const auto p = call.parameters({"linecount", "fill_with"}, 1);
  Budget& budget = call.budget();
  const Integer size = p.integer(0, 0);
  const Value fill = p.get(1, Value::none());
  Values out, row;
  const Values all = iterate(call.value, budget);
  for (const Value& item : all) {
    if (static_cast<Integer>(row.size()) == size) out.push_back(make_list(budget, std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty()) {
    if (!fill.is(Kind::kNone) && static_cast<Integer>(row.size()) < size) {
      if (size > (1 << 24)) throw template_error("batch: the rows are too long");
      budget.take(static_cast<size_t>(size) * sizeof(Value));
      budget.give_back(static_cast<size_t>(size) * sizeof(Value));
      row.resize(static_cast<size_t>(size), fill);
    }
    out.push_back(make_list(budget, std::move(row)));
  }
  return make_iterator(budget, std::move(out));
}

Value slice_filter(const Call& call) {
  const auto p = call.parameters({"slices", "fill_with"}, 1);
  Budget& budget = call.budget();
  const Integer n = p.integer(0, 0);
  if (n == 0) throw template_error("integer division or modulo by zero");
  if (n > (1 << 20)) throw template_error("slice: too many slices");
  const Value fill = p.get(1, Value::none());
  const Values all = iterate(call.value, budget);
  Values out;
  size_t begin = 0;
  for (Integer i = 0; i < n; ++i) {
    const bool longer = i < static_cast<Integer>(all.size()) % n;
    const size_t size = static_cast<size_t>(static_cast<Integer>(all.size()) / n) + (longer ? 1 : 0);
    Values column(all.begin() + static_cast<std::ptrdiff_t>(begin),
                  all.begin() + static_cast<std::ptrdiff_t>(begin + size));
    begin += size;
    if (!fill.is(Kind::kNone) && !longer) column.push_back(fill);
    out.push_back(make_list(budget, std::move(column)));
  }
  return make_iterator(budget, std::move(out));
}

Value attribute(const Call& call) {
  const auto p = call.parameters({"name"}, 1);
  const Text name = printed(*p[0], call.budget());
  require_defined(call.value);
  if (call.value.is(Kind::kDict))
    if (auto found = built_in_attribute(call.machine, call.value, to_utf8(name))) return *found;
  if (call.value.is(Kind::kDict))
    return Value::undefined(fmt::format("'dict object' has no attribute {}", quote(to_utf8(name))));
  return call.machine.get_attribute(call.value, name);
}

using Filter = Value (*)(const Call&);

const std::unordered_map<std::string_view, Filter>& filters() {
  static const std::unordered_map<std::string_view, Filter> all = {
      {"abs", absolute},
      {"attr", attribute},
      {"batch", batch},
      {"capitalize", change_case},
      {"center", method_filter},
      {"count", count},
      {"d", default_value},
      {"default", default_value},
      {"dictsort", dictsort},
      {"e", escape_filter},
      {"escape", escape_filter},
      {"filesizeformat", file_size},
      {"first", first},
      {"float", to_float},
      {"forceescape", escape_filter},
      {"format", format_filter},
      {"groupby", groupby},
      {"indent", indent},
      {"int", to_integer},
      {"items", items},
      {"join", join},
      {"last", last},
      {"length", count},
      {"list", to_list},
      {"lower", change_case},
      {"map", map},
      {"max", extreme},
      {"min", extreme},
      {"reject", select},
      {"rejectattr", select},
      {"replace", replace_filter},
      {"reverse", reverse},
      {"round", round_filter},
      {"safe", mark_safe},
      {"select", select},
      {"selectattr", select},
      {"slice", slice_filter},
      {"sort", sort},
      {"string", to_string},
      {"sum", sum},
      {"title", title_filter},
      {"tojson", tojson},
      {"trim", trim},
      {"truncate", truncate},
      {"unique", unique},
      {"upper", change_case},
      {"urlencode", urlencode},
      {"wordcount", word_count},
      {"xmlattr", xmlattr},
  };
  return all;
}

// Jinja has them; nobody has missed them here.
constexpr std::string_view kNotBuilt[] = {"pprint", "random", "striptags", "urlize", "wordwrap"};

}  // namespace

bool is_filter(std::string_view name) {
  return filters().contains(name) || std::find(std::begin(kNotBuilt), std::end(kNotBuilt), name) != std::end(kNotBuilt);
}

Value apply_filter(Machine& machine, std::string_view name, const Value& value, Arguments& arguments) {
  const auto found = filters().find(name);
  if (found == filters().end())
    throw template_error(is_filter(name) ? fmt::format("the filter {} is not supported", quote(name))
                                         : fmt::format("No filter named {} found.", quote(name)));
  return found->second({machine, name, value, arguments});
}

}  // namespace beryl::jinja
