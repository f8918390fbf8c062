// What Python's types have by name: the methods of str, dict, list and the others. Names that Python has but that are
// not built here are an error, not undefined.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "text/jinja_format.h"
#include "text/jinja_machine.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

struct Call {
  Machine& machine;
  std::string_view name;
  const Value& self;
  Arguments& arguments;
  Budget& budget() const { return machine.budget(); }
  Parameters parameters(std::initializer_list<std::string_view> names, size_t required = 0) const {
    return {name, arguments, names, required};
  }
  const Text& text() const { return self.text(); }
  // A text of the same kind as the one whose method this is.
  Value make(Text text) const { return make_text(machine.budget(), std::move(text), self.is_markup()); }
  Value make(TextView text) const { return make(Text(text)); }
};
using Method = Value (*)(const Call&);

bool given(const Parameters& p, size_t index) { return p.has(index) && !p[index]->is(Kind::kNone); }

// --- str ---

Value strip_method(const Call& call) {
  const auto p = call.parameters({"chars"});
  const bool left = call.name != "rstrip", right = call.name != "lstrip";
  if (!given(p, 0)) return call.make(strip(TextView(call.text()), left, right));
  call.budget().charge(call.text().size() * (p.text(0).size() + 1));
  return call.make(strip(TextView(call.text()), TextView(p.text(0)), left, right));
}

Value split(const Call& call) {  // split, rsplit
  const auto p = call.parameters({"sep", "maxsplit"});
  const TextView text = call.text();
  const Integer asked = p.integer(1, -1);
  const bool unlimited = asked < 0;
  size_t left = unlimited || asked > static_cast<Integer>(text.size()) ? text.size() + 1 : static_cast<size_t>(asked);
  const bool from_right = call.name == "rsplit";
  std::vector<TextView> parts;
  call.budget().charge(text.size() * 2);
  if (given(p, 0)) {
    const TextView separator = p.text(0);
    if (separator.empty()) throw template_error("empty separator");
    if (from_right) {
      size_t end = text.size();
      for (; left > 0; --left) {
        const size_t at = end < separator.size() ? TextView::npos : text.rfind(separator, end - separator.size());
        if (at == TextView::npos) break;
        parts.push_back(text.substr(at + separator.size(), end - at - separator.size()));
        end = at;
      }
      parts.push_back(text.substr(0, end));
    } else {
      size_t begin = 0;
      for (; left > 0; --left) {
        const size_t at = text.find(separator, begin);
        if (at == TextView::npos) break;
        parts.push_back(text.substr(begin, at - begin));
        begin = at + separator.size();
      }
      parts.push_back(text.substr(begin));
    }
  } else if (from_right) {
    TextView rest = strip(text, false, true);
    while (!rest.empty() && left-- > 0) {
      size_t begin = rest.size();
      while (begin > 0 && !is_space(rest[begin - 1])) --begin;
      parts.push_back(rest.substr(begin));
      rest = strip(rest.substr(0, begin), false, true);
    }
    if (!rest.empty()) parts.push_back(rest);
  } else {
    TextView rest = strip(text, true, false);
    while (!rest.empty() && left-- > 0) {
      size_t end = 0;
      while (end < rest.size() && !is_space(rest[end])) ++end;
      parts.push_back(rest.substr(0, end));
      rest = strip(rest.substr(end), true, false);
    }
    if (!rest.empty()) parts.push_back(rest);
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  Values out;
  for (const TextView part : parts) out.push_back(call.make(part));
  return make_list(call.budget(), std::move(out));
}

Value split_lines(const Call& call) {
  const auto p = call.parameters({"keepends"});
  const TextView text = call.text();
  call.budget().charge(text.size());
  Values lines;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin;
    const auto ends_line = [](Character c) {
      const uint32_t code = code_point(c);
      return (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 || code == 0x2028 ||
             code == 0x2029;
    };
    while (end < text.size() && !ends_line(text[end])) ++end;
    size_t next = std::min(end + 1, text.size());
    if (end + 1 < text.size() && code_point(text[end]) == '\r' && code_point(text[end + 1]) == '\n') ++next;
    lines.push_back(call.make(text.substr(begin, (p.flag(0) ? next : end) - begin)));
    begin = next;
  }
  return make_list(call.budget(), std::move(lines));
}

Value partition(const Call& call) {  // partition, rpartition
  const auto p = call.parameters({"sep"}, 1);
  const TextView text = call.text(), separator = p.text(0);
  if (separator.empty()) throw template_error("empty separator");
  call.budget().charge(text.size());
  const bool from_right = call.name == "rpartition";
  const size_t at = from_right ? text.rfind(separator) : text.find(separator);
  if (at == TextView::npos) {
    const Value empty = call.make(Text()), whole = call.make(text);
    return make_tuple(call.budget(), from_right ? Values{empty, empty, whole} : Values{whole, empty, empty});
  }
  return make_tuple(call.budget(), {call.make(text.substr(0, at)), call.make(text.substr(at, separator.size())),
                                    call.make(text.substr(at + separator.size()))});
}

Value replace(const Call& call) {
  const auto p = call.parameters({"old", "new", "count"}, 2);
  const TextView text = call.text(), old = p.text(0);
  const Value with = call.self.is_markup() ? escape(*p[1], call.budget()) : *p[1];
  const TextView replacement = call.self.is_markup() ? with.text() : p.text(1);
  Integer left = p.integer(2, -1);
  if (left < 0) left = static_cast<Integer>(text.size()) + 1;
  Text out;
  call.budget().charge(text.size());
  size_t begin = 0;
  if (old.empty()) {  // between all characters, and at both ends
    for (; begin < text.size() && left > 0; ++begin, --left) {
      append(out, replacement, call.budget());
      out += text[begin];
    }
    append(out, text.substr(begin), call.budget());
    if (left > 0) append(out, replacement, call.budget());
    return call.make(std::move(out));
  }
  for (; left > 0; --left) {
    const size_t at = text.find(old, begin);
    if (at == TextView::npos) break;
    append(out, text.substr(begin, at - begin), call.budget());
    append(out, replacement, call.budget());
    begin = at + old.size();
  }
  append(out, text.substr(begin), call.budget());
  return call.make(std::move(out));
}

// The part of a text that start and end (parameters `from` and the next) leave; nullopt when start lies behind its end.
struct Range {
  size_t begin = 0, end = 0;
};
std::optional<Range> range_of(const Parameters& p, size_t from, size_t size) {
  const auto clip = [&](size_t index, Integer otherwise) {
    Integer at = given(p, index) ? p.integer(index, 0) : otherwise;
    if (at < 0) at = std::max<Integer>(at + static_cast<Integer>(size), 0);
    return at;
  };
  const Integer begin = clip(from, 0),
                end = std::min<Integer>(clip(from + 1, static_cast<Integer>(size)), static_cast<Integer>(size));
  if (begin > static_cast<Integer>(size) || begin > end) return std::nullopt;
  return Range{static_cast<size_t>(begin), static_cast<size_t>(end)};
}

Value starts_or_ends(const Call& call) {
  const auto p = call.parameters({"prefix", "start", "end"}, 1);
  require_defined(*p[0]);
  const auto range = range_of(p, 1, call.text().size());
  const auto matches = [&](const Value& affix) {
    if (!affix.is_text())
      throw template_error(
          fmt::format("{} first arg must be str or a tuple of str, not {}", call.name, type_name(affix)));
    if (!range) return false;
    const TextView part = TextView(call.text()).substr(range->begin, range->end - range->begin);
    return call.name == "startswith" ? part.starts_with(affix.text()) : part.ends_with(affix.text());
  };
  if (!p[0]->is(Kind::kTuple)) return matches(*p[0]);
  for (const Value& affix : p[0]->items())
    if (matches(affix)) return true;
  return false;
}

Value find_method(const Call& call) {  // find, rfind, index, rindex, count
  const auto p = call.parameters({"sub", "start", "end"}, 1);
  const TextView wanted = p.text(0);
  const auto range = range_of(p, 1, call.text().size());
  call.budget().charge(call.text().size());
  const TextView part = range ? TextView(call.text()).substr(range->begin, range->end - range->begin) : TextView();
  if (call.name == "count") {
    if (!range) return 0;
    if (wanted.empty()) return static_cast<int64_t>(part.size()) + 1;
    int64_t n = 0;
    for (size_t at = part.find(wanted); at != TextView::npos; at = part.find(wanted, at + wanted.size())) ++n;
    return n;
  }
  const size_t at = !range ? TextView::npos : call.name[0] == 'r' ? part.rfind(wanted) : part.find(wanted);
  if (at != TextView::npos) return static_cast<int64_t>(at + range->begin);
  if (call.name.ends_with("index")) throw template_error("substring not found");
  return -1;
}

Value case_method(const Call& call) {
  call.parameters({});
  call.budget().charge(call.text().size() * 4);
  const std::string_view name = call.name;
  return call.make(name == "upper"        ? upper(call.text())
                   : name == "lower"      ? lower(call.text())
                   : name == "title"      ? title(call.text())
                   : name == "capitalize" ? capitalize(call.text())
                   : name == "casefold"   ? case_fold(call.text())
                                          : swap_case(call.text()));
}

Value class_method(const Call& call) {  // isalpha and the like
  call.parameters({});
  const Text& text = call.text();
  call.budget().charge(text.size() * 8);
  const std::string_view name = call.name;
  const auto all = [&](auto test) { return !text.empty() && std::all_of(text.begin(), text.end(), test); };
  if (name == "isalpha") return all(is_letter);
  if (name == "isdigit") return all(is_digit);
  if (name == "isdecimal") return all(is_decimal);
  if (name == "isnumeric") return all(is_number);
  if (name == "isalnum") return all([](Character c) { return is_letter(c) || is_number(c); });
  if (name == "isspace") return all(is_space);
  if (name == "isprintable") return text.empty() || all(is_printable);
  if (name == "isascii") return text.empty() || all([](Character c) { return code_point(c) < 0x80; });
  if (name == "isidentifier")
    return all([](Character c) { return is_letter(c) || is_decimal(c) || code_point(c) == '_'; }) &&
           !is_decimal(text[0]);
  bool any = false, after_cased = false;  // isupper, islower, istitle
  for (const Character c : text) {
    const bool up = is_upper(c), low = is_lower(c);
    if (name == "isupper" && low) return false;
    if (name == "islower" && up) return false;
    if (name == "istitle" && ((up && after_cased) || (low && !after_cased))) return false;
    after_cased = up || low;
    any = any || after_cased;
  }
  return any;
}

Value pad(const Call& call) {  // center, ljust, rjust, zfill
  const auto p = call.parameters({"width", "fillchar"}, 1);
  const Text& text = call.text();
  const Integer width = p.integer(0, 0);
  Character fill = U' ';
  if (call.name == "zfill") {
    fill = U'0';
  } else if (p.has(1)) {
    const Text filling = call.self.is_markup() ? escape(*p[1], call.budget()).text() : p.text(1);
    if (filling.size() != 1) throw template_error("The fill character must be exactly one character long");
    fill = filling[0];
  }
  if (width <= static_cast<Integer>(text.size())) return call.self;
  call.budget().check_length(static_cast<uint64_t>(std::min<Integer>(width, Integer{1} << 60)));
  const size_t missing = static_cast<size_t>(width) - text.size();
  size_t before = 0;
  if (call.name == "rjust" || call.name == "zfill") before = missing;
  if (call.name == "center") before = missing / 2 + (missing & static_cast<size_t>(width) & 1);
  Text out(before, fill);
  out += text;
  out.append(missing - before, fill);
  if (call.name == "zfill" && !text.empty() && (code_point(text[0]) == '+' || code_point(text[0]) == '-'))
    std::swap(out[0], out[before]);
  return call.make(std::move(out));
}

Value join(const Call& call) {
  const auto p = call.parameters({"iterable"}, 1);
  Text out;
  size_t i = 0;
  for (const Value& item : iterate(*p[0], call.budget())) {
    if (!call.self.is_markup() && !item.is_text())
      throw template_error(fmt::format("sequence item {}: expected str instance, {} found", i, type_name(item)));
    if (i++ > 0) append(out, call.text(), call.budget());
    append(out, call.self.is_markup() ? escape(item, call.budget()).text() : item.text(), call.budget());
  }
  return call.make(std::move(out));
}

Value remove_affix(const Call& call) {
  const auto p = call.parameters({"affix"}, 1);
  const TextView text = call.text(), affix = p.text(0);
  if (call.name == "removeprefix") return call.make(text.starts_with(affix) ? text.substr(affix.size()) : text);
  return call.make(text.ends_with(affix) && !affix.empty() ? text.substr(0, text.size() - affix.size()) : text);
}

Value expand_tabs(const Call& call) {
  const auto p = call.parameters({"tabsize"});
  const Integer size = p.integer(0, 8);
  if (size > (1 << 20)) throw template_error("expandtabs: the tab size is too large");
  Text out;
  Integer column = 0;
  for (const Character c : call.text()) {
    call.budget().charge(1);
    const uint32_t code = code_point(c);
    if (code == '\t') {
      const Integer blanks = size > 0 ? size - column % size : 0;
      append(out, Text(static_cast<size_t>(blanks), U' ' | (c & kForeign)), call.budget());
      column += blanks;
      continue;
    }
    out += c;
    column = code == '\n' || code == '\r' ? 0 : column + 1;
  }
  return call.make(std::move(out));
}

Value format_method(const Call& call) { return format_braces(call.machine, call.self, call.arguments); }

Value format_map(const Call& call) {
  const auto p = call.parameters({"mapping"}, 1);
  if (!p[0]->is(Kind::kDict)) throw template_error("format_map: a mapping is required");
  Arguments named;
  for (const auto& [key, value] : p[0]->dict().entries)
    if (key.is_text()) named.keyword.emplace_back(key.text(), value);
  return format_braces(call.machine, call.self, named);
}

// --- list, tuple, dict ---

Value sequence_method(const Call& call) {  // count, index, copy
  if (call.name == "copy") {
    call.parameters({});
    return call.self;
  }
  const auto p = call.parameters({"value", "start", "stop"}, 1);
  const Values items = iterate(call.self, call.budget());
  if (call.name == "count") {
    int64_t n = 0;
    for (const Value& item : items) n += same(item, *p[0]) || equal(item, *p[0], call.budget());
    return n;
  }
  const auto range = range_of(p, 1, items.size());
  for (size_t i = range ? range->begin : 0; range && i < range->end; ++i)
    if (same(items[i], *p[0]) || equal(items[i], *p[0], call.budget())) return static_cast<int64_t>(i);
  throw template_error("the value is not in the list");
}

Value dict_get(const Call& call) {
  if (!call.arguments.keyword.empty()) throw template_error("dict.get() takes no keyword arguments");
  const auto p = call.parameters({"key", "default"}, 1);
  const Value* found = call.self.dict().find(*p[0], call.budget());
  return found != nullptr ? *found : p.get(1, Value::none());
}

Value dict_view(const Call& call) {
  call.parameters({});
  const ViewObject::Part part = call.name == "keys"     ? ViewObject::Part::kKeys
                                : call.name == "values" ? ViewObject::Part::kValues
                                                        : ViewObject::Part::kItems;
  return {Kind::kView, std::make_shared<ViewObject>(&call.budget(), call.self, part)};
}

Value copy(const Call& call) {
  call.parameters({});
  return call.self;
}

// --- numbers ---

Value number_method(const Call& call) {
  call.parameters({});
  if (call.name == "is_integer") {
    if (!call.self.is(Kind::kFloat)) return true;
    const double value = call.self.number();
    return value - value == 0 && value == static_cast<double>(static_cast<long double>(value)) &&
           std::floor(value) == value;
  }
  if (call.name == "conjugate")
    return call.self.is(Kind::kFloat) ? Value(call.self.number()) : Value(call.self.integer());
  int bits = 0;  // bit_length
  for (Integer rest = call.self.integer() < 0 ? -call.self.integer() : call.self.integer(); rest > 0; rest /= 2) ++bits;
  return bits;
}

using Methods = std::unordered_map<std::string_view, Method>;

const Methods& text_methods() {
  static const Methods all = {
      {"capitalize", case_method},
      {"casefold", case_method},
      {"center", pad},
      {"count", find_method},
      {"encode", nullptr},
      {"endswith", starts_or_ends},
      {"expandtabs", expand_tabs},
      {"find", find_method},
      {"format", format_method},
      {"format_map", format_map},
      {"index", find_method},
      {"isalnum", class_method},
      {"isalpha", class_method},
      {"isascii", class_method},
      {"isdecimal", class_method},
      {"isdigit", class_method},
      {"isidentifier", class_method},
      {"islower", class_method},
      {"isnumeric", class_method},
      {"isprintable", class_method},
      {"isspace", class_method},
      {"istitle", class_method},
      {"isupper", class_method},
      {"join", join},
      {"ljust", pad},
      {"lower", case_method},
      {"lstrip", strip_method},
      {"maketrans", nullptr},
      {"partition", partition},
      {"removeprefix", remove_affix},
      {"removesuffix", remove_affix},
      {"replace", replace},
      {"rfind", find_method},
      {"rindex", find_method},
      {"rjust", pad},
      {"rpartition", partition},
      {"rsplit", split},
      {"rstrip", strip_method},
      {"split", split},
      {"splitlines", split_lines},
      {"startswith", starts_or_ends},
      {"strip", strip_method},
      {"swapcase", case_method},
      {"title", case_method},
      {"translate", nullptr},
      {"upper", case_method},
      {"zfill", pad},
  };
  return all;
}
const Methods& dict_methods() {
  static const Methods all = {{"copy", copy},       {"fromkeys", nullptr}, {"get", dict_get},
                              {"items", dict_view}, {"keys", dict_view},   {"values", dict_view}};
  return all;
}
const Methods& list_methods() {
  static const Methods all = {{"copy", sequence_method}, {"count", sequence_method}, {"index", sequence_method}};
  return all;
}
const Methods& tuple_methods() {
  static const Methods all = {{"count", sequence_method}, {"index", sequence_method}};
  return all;
}
const Methods& number_methods() {
  static const Methods all = {{"as_integer_ratio", nullptr},
                              {"bit_count", nullptr},
                              {"bit_length", number_method},
                              {"conjugate", number_method},
                              {"from_bytes", nullptr},
                              {"fromhex", nullptr},
                              {"hex", nullptr},
                              {"is_integer", number_method},
                              {"to_bytes", nullptr}};
  return all;
}

bool changes_its_object(Kind kind, std::string_view name) {
  static constexpr std::string_view kOfDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::string_view kOfList[] = {"append", "clear", "pop",    "reverse",
                                                 "insert", "sort",  "extend", "remove"};
  if (kind == Kind::kDict) return std::find(std::begin(kOfDict), std::end(kOfDict), name) != std::end(kOfDict);
  if (kind == Kind::kList) return std::find(std::begin(kOfList), std::end(kOfList), name) != std::end(kOfList);
  return false;
}

std::optional<Value> number_attribute(const Value& value, std::string_view name) {
  const bool is_float = value.is(Kind::kFloat);
  if (name == "real") return is_float ? Value(value.number()) : Value(value.integer());
  if (name == "imag") return is_float ? Value(0.0) : Value(0);
  if (!is_float && name == "numerator") return Value(value.integer());
  if (!is_float && name == "denominator") return Value(1);
  return std::nullopt;
}

}  // namespace

std::optional<Value> built_in_attribute(Machine& machine, const Value& value, std::string_view name) {
  const Methods* methods = nullptr;
  switch (value.kind()) {
    case Kind::kText: methods = &text_methods(); break;
    case Kind::kDict: methods = &dict_methods(); break;
    case Kind::kList: methods = &list_methods(); break;
    case Kind::kTuple:
      methods = &tuple_methods();
      if (value.as<SequenceObject>().grouped && name == "grouper") return value.items()[0];
      if (value.as<SequenceObject>().grouped && name == "list") return value.items()[1];
      break;
    case Kind::kBoolean:
    case Kind::kInteger:
    case Kind::kFloat:
      if (auto found = number_attribute(value, name)) return found;
      methods = &number_methods();
      break;
    case Kind::kRange: {
      const RangeObject& range = value.as<RangeObject>();
      if (name == "start") return Value(range.start);
      if (name == "stop") return Value(range.stop);
      if (name == "step") return Value(range.step);
      methods = &tuple_methods();
      break;
    }
    case Kind::kNamespace: {
      const Value* found = value.as<NamespaceObject>().find(to_text(name));
      return found == nullptr ? std::nullopt : std::optional<Value>(*found);
    }
    case Kind::kFunction:
    case Kind::kLoop: return value.as<Function>().attribute(machine, name);
    default: return std::nullopt;
  }
  if (changes_its_object(value.kind(), name))
    return Value::undefined(fmt::format("access to attribute '{}' of '{}' object is unsafe.", name, type_name(value)));
  const auto found = methods->find(name);
  if (found == methods->end()) return std::nullopt;
  const std::string_view own_name = found->first;  // outlives the value
  const Method method = found->second;
  if (method == nullptr)
    throw template_error(fmt::format("the method {} of {} is not supported", quote(name), type_name(value)));
  return make_function(
      machine.budget(), own_name,
      [self = value, own_name, method](Machine& running, Arguments& arguments) {
        return method({running, own_name, self, arguments});
      },
      &value);
}

namespace {

Value make_range(Machine& machine, Arguments& arguments) {
  const Parameters p("range", arguments, {"start", "stop", "step"}, 1);
  const auto number = [&](size_t index, int64_t otherwise) {
    const Integer given = p.integer(index, otherwise);
    if (given > (Integer{1} << 60) || given < -(Integer{1} << 60))
      throw template_error("range: the number is too large");
    return static_cast<int64_t>(given);
  };
  const bool one = !p.has(1);
  const int64_t start = one ? 0 : number(0, 0), stop = one ? number(0, 0) : number(1, 0), step = number(2, 1);
  if (step == 0) throw template_error("range() arg 3 must not be zero");
  auto range = std::make_shared<RangeObject>(&machine.budget(), start, stop, step);
  if (range->length() > 100000)
    throw template_error("Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  return {Kind::kRange, std::move(range)};
}

// dict(mapping or pairs, key=value): for dict and namespace.
std::shared_ptr<DictObject> collect(Machine& machine, std::string_view function, Arguments& arguments) {
  Budget& budget = machine.budget();
  auto dict = std::make_shared<DictObject>(&budget);
  if (arguments.positional.size() > 1)
    throw template_error(fmt::format("{} expected at most 1 argument, got {}", function, arguments.positional.size()));
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional[0];
    if (source.is(Kind::kDict)) {
      for (const auto& [key, value] : source.dict().entries) dict->set(key, value, budget);
    } else {
      for (const Value& pair : iterate(source, budget)) {
        const Values both = iterate(pair, budget);
        if (both.size() != 2)
          throw template_error(fmt::format("{}: a pair is required, not {} items", function, both.size()));
        dict->set(both[0], both[1], budget);
      }
    }
  }
  for (auto& [name, value] : arguments.keyword) dict->set(make_text(budget, Text(name)), value, budget);
  return dict;
}

Value make_namespace(Machine& machine, Arguments& arguments) {
  auto space = std::make_shared<NamespaceObject>(&machine.budget());
  machine.keep(space);
  const std::shared_ptr<DictObject> given_values = collect(machine, "namespace", arguments);
  for (const auto& [key, value] : given_values->entries) {
    if (!key.is_text()) throw template_error("namespace: names must be strings");
    if (key.text().starts_with(U'_'))
      throw template_error("Chat templates cannot store underscore-prefixed attributes on a namespace");
    space->set(key.text(), value, machine.budget());
  }
  return {Kind::kNamespace, std::move(space)};
}

class Cycler : public Function {
 public:
  Cycler(Budget* budget, Values items) : Function(budget, "cycler"), items_(std::move(items)) {
    take(items_.size() * sizeof(Value));
    nest(items_);
  }
  Value call(Machine&, Arguments&) override { throw template_error("'Cycler' object is not callable"); }
  std::optional<Value> attribute(Machine& machine, std::string_view name) override {
    if (name == "current") return items_[*position_];
    if (name == "pos") return Value(uint64_t{*position_});
    if (name == "items") return make_tuple(machine.budget(), items_);
    if (name != "next" && name != "reset") return std::nullopt;
    const Value items = make_tuple(machine.budget(), items_);
    return make_function(
        machine.budget(), name == "next" ? "next" : "reset",
        [items, position = position_, advances = name == "next"](Machine&, Arguments& arguments) {
          Parameters("cycler", arguments, {});
          if (!advances) {
            *position = 0;
            return Value::none();
          }
          const Value item = items.items()[*position];
          *position = (*position + 1) % items.items().size();
          return item;
        },
        &items);
  }
  std::string printed() const override { return "<jinja2.utils.Cycler object>"; }

 private:
  Values items_;
  std::shared_ptr<size_t> position_ = std::make_shared<size_t>(0);
};

}  // namespace

void add_globals(Budget& budget, std::map<std::string, Value>& variables) {
  const auto add = [&](const char* name, BuiltIn::Body body) {
    variables.try_emplace(name, make_function(budget, name, std::move(body)));
  };
  add("range", make_range);
  add("dict",
      [](Machine& machine, Arguments& arguments) { return Value(Kind::kDict, collect(machine, "dict", arguments)); });
  add("namespace", make_namespace);
  add("cycler", [](Machine& machine, Arguments& arguments) {
    if (arguments.positional.empty()) throw template_error("at least one item has to be provided");
    if (!arguments.keyword.empty()) throw template_error("cycler() takes no keyword arguments");
    return Value(Kind::kFunction, std::make_shared<Cycler>(&machine.budget(), std::move(arguments.positional)));
  });
  add("joiner", [](Machine& machine, Arguments& arguments) {
    const Parameters p("joiner", arguments, {"sep"});
    const Value separator = p.has(0) ? *p[0] : make_text(machine.budget(), ", ");
    const auto used = std::make_shared<bool>(false);
    return make_function(
        machine.budget(), "joiner",
        [separator, used](Machine& running, Arguments&) {
          return std::exchange(*used, true) ? separator : make_text(running.budget(), "");
        },
        &separator);
  });
  add("lipsum", [](Machine&, Arguments&) -> Value { throw template_error("the function 'lipsum' is not supported"); });
  add("raise_exception", [](Machine& machine, Arguments& arguments) -> Value {
    const Parameters p("raise_exception", arguments, {"message"}, 1);
    throw template_error(to_utf8(printed(*p[0], machine.budget())));
  });
  add("strftime_now", [](Machine& machine, Arguments& arguments) {
    const Parameters p("strftime_now", arguments, {"format"}, 1);
    const Text& format = p.text(0);
    if (format.size() > 200) throw template_error("strftime_now: the format is too long");
    const bool foreign = std::any_of(format.begin(), format.end(), is_foreign);
    return make_text(machine.budget(), to_text(machine.time_text(to_utf8(format)), foreign ? kForeign : 0));
  });
}

}  // namespace beryl::jinja
