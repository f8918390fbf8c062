#include "text/jinja_value.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "text/jinja_format.h"
#include "text/python_text.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

constexpr size_t kEntryBytes = 2 * sizeof(Value) + 4 * sizeof(size_t);  // and its place in the hash table
constexpr uint64_t kItemWork = 32;                                      // to copy a value, beside a character's 1
constexpr size_t kSmallDict = 8;                                        // so few keys are searched in order

Error unhashable(const Value& key) { return template_error(fmt::format("unhashable type: '{}'", type_name(key))); }

size_t mix(size_t seed, size_t more) { return seed ^ (more + 0x9E3779B97F4A7C15u + (seed << 6) + (seed >> 2)); }

size_t hash_of(const Value& key, Budget& budget) {
  budget.charge(8);
  switch (key.kind()) {
    case Kind::kText: {
      budget.charge(key.text().size());
      size_t hash = 14695981039346656037u;
      for (const Character c : key.text()) hash = (hash ^ code_point(c)) * 1099511628211u;
      return hash;
    }
    case Kind::kBoolean:
    case Kind::kInteger: return std::hash<int64_t>()(static_cast<int64_t>(key.integer()));
    case Kind::kFloat: {
      const double value = key.number();
      if (std::floor(value) == value && std::abs(value) < 9e18)
        return std::hash<int64_t>()(static_cast<int64_t>(value));
      return std::hash<double>()(value);
    }
    case Kind::kNone: return 1;
    case Kind::kUndefined: return 2;
    case Kind::kTuple: {
      size_t hash = 3;
      for (const Value& item : key.items()) hash = mix(hash, hash_of(item, budget));
      return hash;
    }
    case Kind::kRange: return static_cast<size_t>(key.as<RangeObject>().length());
    case Kind::kList:
    case Kind::kDict: throw unhashable(key);
    default: return std::hash<const void*>()(key.object().get());
  }
}

// Exact where doubles are; beyond 2^53 the long double still tells neighbours apart.
int compare_numbers(const Value& a, const Value& b) {
  if (!a.is(Kind::kFloat) && !b.is(Kind::kFloat)) return a.integer() < b.integer() ? -1 : a.integer() > b.integer();
  const auto wide = [](const Value& value) {
    return value.is(Kind::kFloat) ? static_cast<long double>(value.number())
                                  : static_cast<long double>(value.integer());
  };
  const long double x = wide(a), y = wide(b);
  return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;  // 2: not a number
}

void append_structure(Text& out, std::string_view ascii, Budget& budget) {
  budget.check_length(out.size() + ascii.size());
  budget.charge(ascii.size());
  for (const char c : ascii) out += static_cast<Character>(static_cast<unsigned char>(c)) | kForeign;
}

void append_quoted(Text& out, TextView text, Budget& budget) {
  const bool has_single = text.find(U'\'') != TextView::npos, has_double = text.find(U'"') != TextView::npos;
  const Character quote = has_single && !has_double ? U'"' : U'\'';
  budget.check_length(out.size() + text.size());
  budget.charge(text.size());
  out += quote | kForeign;
  const auto escaped = [&](Character of, const std::string& with) {
    budget.check_length(out.size());
    for (const char c : with) out += static_cast<Character>(c) | (of & kForeign);
  };
  for (const Character c : text) {
    const uint32_t code = code_point(c);
    if (code == quote || code == '\\')
      escaped(c, std::string{'\\', static_cast<char>(code)});
    else if (code == '\n')
      escaped(c, "\\n");
    else if (code == '\r')
      escaped(c, "\\r");
    else if (code == '\t')
      escaped(c, "\\t");
    else if (is_printable(c))
      out += c;
    else if (code < 0x100)
      escaped(c, fmt::format("\\x{:02x}", code));
    else if (code < 0x10000)
      escaped(c, fmt::format("\\u{:04x}", code));
    else
      escaped(c, fmt::format("\\U{:08x}", code));
  }
  out += quote | kForeign;
}

void append_representation(Text& out, const Value& value, Budget& budget, int depth) {
  budget.step();
  if (depth > kMaxValueDepth) throw template_error("a value is nested too deeply to be printed");
  const auto structure = [&](std::string_view text) { append_structure(out, text, budget); };
  const auto list = [&](const Values& items) {
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) structure(", ");
      append_representation(out, items[i], budget, depth + 1);
    }
  };
  switch (value.kind()) {
    case Kind::kUndefined: structure("Undefined"); break;
    case Kind::kNone: structure("None"); break;
    case Kind::kBoolean: structure(value.boolean() ? "True" : "False"); break;
    case Kind::kInteger: structure(integer_text(value.integer())); break;
    case Kind::kFloat: structure(python_float(value.number())); break;
    case Kind::kText:
      if (value.is_markup()) structure("Markup(");
      append_quoted(out, value.text(), budget);
      if (value.is_markup()) structure(")");
      break;
    case Kind::kList:
      structure("[");
      list(value.items());
      structure("]");
      break;
    case Kind::kTuple:
      structure("(");
      list(value.items());
      structure(value.items().size() == 1 ? ",)" : ")");
      break;
    case Kind::kDict: {
      structure("{");
      bool first = true;
      for (const auto& [key, inner] : value.dict().entries) {
        if (!first) structure(", ");
        first = false;
        append_representation(out, key, budget, depth + 1);
        structure(": ");
        append_representation(out, inner, budget, depth + 1);
      }
      structure("}");
      break;
    }
    case Kind::kView: {
      structure(fmt::format("{}([", type_name(value)));
      list(iterate(value, budget));
      structure("])");
      break;
    }
    case Kind::kRange: {
      const RangeObject& range = value.as<RangeObject>();
      structure(range.step == 1 ? fmt::format("range({}, {})", range.start, range.stop)
                                : fmt::format("range({}, {}, {})", range.start, range.stop, range.step));
      break;
    }
    case Kind::kNamespace: {
      structure("<Namespace {");
      bool first = true;
      for (const auto& [name, inner] : value.as<NamespaceObject>().attributes) {
        if (!first) structure(", ");
        first = false;
        append_quoted(out, name, budget);
        structure(": ");
        append_representation(out, inner, budget, depth + 1);
      }
      structure("}>");
      break;
    }
    case Kind::kIterator: structure(fmt::format("<{} object>", type_name(value))); break;
    case Kind::kFunction:
    case Kind::kLoop: structure(value.as<Function>().printed()); break;
  }
}

// Python's slice arithmetic: which items of `size` a slice takes.
struct SliceBounds {
  int64_t start = 0, step = 1, count = 0;
};

SliceBounds slice_bounds(const Value& start, const Value& stop, const Value& step, int64_t size) {
  const auto number = [](const Value& value, int64_t otherwise) -> int64_t {
    if (value.is(Kind::kNone)) return otherwise;
    if (!value.is_integral())
      throw template_error("slice indices must be integers or None or have an __index__ method");
    constexpr Integer kFar = Integer{1} << 60;
    return static_cast<int64_t>(std::clamp(value.integer(), -kFar, kFar));
  };
  SliceBounds bounds;
  bounds.step = number(step, 1);
  if (bounds.step == 0) throw template_error("slice step cannot be zero");
  const bool backward = bounds.step < 0;
  const auto clip = [&](int64_t at) {
    if (at < 0) at += size;
    if (at < 0) return backward ? int64_t{-1} : int64_t{0};
    return std::min(at, backward ? size - 1 : size);
  };
  bounds.start = start.is(Kind::kNone) ? (backward ? size - 1 : 0) : clip(number(start, 0));
  const int64_t end = stop.is(Kind::kNone) ? (backward ? -1 : size) : clip(number(stop, 0));
  if (backward && end < bounds.start) bounds.count = (bounds.start - end - 1) / -bounds.step + 1;
  if (!backward && bounds.start < end) bounds.count = (end - bounds.start - 1) / bounds.step + 1;
  return bounds;
}

}  // namespace

Error template_error(std::string_view what) { return {ErrorCode::kBadInput, std::string(what)}; }

void Budget::fail_work() const { throw template_error("the template takes too many steps"); }
void Budget::fail_length() const {
  throw template_error(fmt::format("the template makes a text of more than {} characters", max_characters_));
}
void Budget::fail_bytes() const {
  throw template_error(fmt::format("the template needs more than {} MiB of memory", max_bytes_ >> 20));
}

void Object::take(size_t bytes) {
  if (budget_ == nullptr) return;
  budget_->take(bytes);
  bytes_ += bytes;
}

void Object::nest(const Value& inner) {
  if (inner.object() == nullptr) return;
  depth_ = std::max(depth_, inner.object()->depth() + 1);
  if (depth_ > kMaxValueDepth)
    throw template_error(fmt::format("values are nested deeper than {} levels", kMaxValueDepth));
}

void Object::nest(const Values& inner) {
  for (const Value& value : inner) nest(value);
}

Value Value::undefined(std::string message) {
  return {Kind::kUndefined, std::make_shared<UndefinedObject>(std::move(message))};
}

const Text& Value::text() const { return as<TextObject>().text; }
const Values& Value::items() const { return as<SequenceObject>().items; }
const DictObject& Value::dict() const { return as<DictObject>(); }

const size_t* DictObject::find_index(const Value& key, size_t hash, Budget& budget) const {
  const auto [begin, end] = places_.equal_range(hash);
  for (auto place = begin; place != end; ++place)
    if (equal(entries[place->second].first, key, budget)) return &place->second;
  return nullptr;
}

void DictObject::set(const Value& key, Value value, Budget& budget) {
  const size_t hash = hash_of(key, budget);
  nest(key);
  nest(value);
  if (const size_t* place = find_index(key, hash, budget)) {
    entries[*place].second = std::move(value);
    return;
  }
  take(kEntryBytes);
  places_.emplace(hash, entries.size());
  entries.emplace_back(key, std::move(value));
}

const Value* DictObject::find(const Value& key, Budget& budget) const {
  const size_t hash = hash_of(key, budget);
  const size_t* place = find_index(key, hash, budget);
  return place == nullptr ? nullptr : &entries[*place].second;
}

const Value* DictObject::find(TextView key) const {
  if (entries.size() <= kSmallDict) {
    for (const auto& [name, value] : entries)
      if (name.is_text() && name.text() == key) return &value;
    return nullptr;
  }
  size_t hash = 14695981039346656037u;
  for (const Character c : key) hash = (hash ^ code_point(c)) * 1099511628211u;
  const auto [begin, end] = places_.equal_range(hash);
  for (auto place = begin; place != end; ++place)
    if (const Value& name = entries[place->second].first; name.is_text() && name.text() == key)
      return &entries[place->second].second;
  return nullptr;
}

int64_t RangeObject::length() const {
  if (step > 0) return start < stop ? (stop - start - 1) / step + 1 : 0;
  return start > stop ? (start - stop - 1) / -step + 1 : 0;
}

void NamespaceObject::set(TextView name, Value value, Budget& budget) {
  budget.charge(attributes.size());
  for (auto& [known, held] : attributes) {
    if (known != name) continue;
    held = std::move(value);
    return;
  }
  take(sizeof(Text) + name.size() * sizeof(Character) + sizeof(Value));
  attributes.emplace_back(Text(name), std::move(value));
}

const Value* NamespaceObject::find(TextView name) const {
  for (const auto& [known, held] : attributes)
    if (known == name) return &held;
  return nullptr;
}

std::string Function::printed() const { return fmt::format("<function {}>", name_); }

Value make_text(Budget& budget, Text text, bool markup) {
  budget.check_length(text.size());
  budget.charge(text.size());
  return Value(Kind::kText, std::make_shared<TextObject>(&budget, std::move(text))).as_markup(markup);
}

Value make_text(Budget& budget, std::string_view utf8) { return make_text(budget, to_text(utf8)); }

Value make_list(Budget& budget, Values items) {
  budget.charge(items.size() * kItemWork);
  return {Kind::kList, std::make_shared<SequenceObject>(&budget, std::move(items))};
}

Value make_tuple(Budget& budget, Values items) {
  budget.charge(items.size() * kItemWork);
  return {Kind::kTuple, std::make_shared<SequenceObject>(&budget, std::move(items))};
}

Value make_iterator(Budget& budget, Values items, std::string_view type) {
  budget.charge(items.size() * kItemWork);
  return {Kind::kIterator, std::make_shared<IteratorObject>(&budget, std::move(items), type)};
}

Value constant_text(Text text) { return {Kind::kText, std::make_shared<TextObject>(nullptr, std::move(text))}; }

Value constant_sequence(Kind kind, Values items) {
  return {kind, std::make_shared<SequenceObject>(nullptr, std::move(items))};
}

bool is_true(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return false;
    case Kind::kBoolean:
    case Kind::kInteger: return value.integer() != 0;
    case Kind::kFloat: return value.number() != 0;
    case Kind::kText: return !value.text().empty();
    case Kind::kList:
    case Kind::kTuple: return !value.items().empty();
    case Kind::kDict: return !value.dict().entries.empty();
    case Kind::kView: return !value.as<ViewObject>().dict.dict().entries.empty();
    case Kind::kRange: return value.as<RangeObject>().length() != 0;
    default: return true;
  }
}

bool same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined: return a.object() == b.object() && a.object() != nullptr;
    case Kind::kNone: return true;
    case Kind::kBoolean:
    case Kind::kInteger: return a.integer() == b.integer();
    case Kind::kFloat: return a.number() == b.number();
    default: return a.object() == b.object();
  }
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.charge(8);
  if (a.is_numeric() && b.is_numeric()) return compare_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone: return true;
    case Kind::kText:
      if (a.text().size() != b.text().size()) return false;
      budget.charge(a.text().size());
      return a.object() == b.object() || a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple: {
      if (a.object() == b.object()) return true;
      const Values &x = a.items(), &y = b.items();
      if (x.size() != y.size()) return false;
      for (size_t i = 0; i < x.size(); ++i)
        if (!same(x[i], y[i]) && !equal(x[i], y[i], budget)) return false;
      return true;
    }
    case Kind::kDict: {
      if (a.object() == b.object()) return true;
      const DictObject &x = a.dict(), &y = b.dict();
      if (x.entries.size() != y.entries.size()) return false;
      for (const auto& [key, value] : x.entries) {
        const Value* other = y.find(key, budget);
        if (other == nullptr || !(same(value, *other) || equal(value, *other, budget))) return false;
      }
      return true;
    }
    case Kind::kRange: {
      const RangeObject &x = a.as<RangeObject>(), &y = b.as<RangeObject>();
      const int64_t n = x.length();
      return n == y.length() && (n == 0 || (x.start == y.start && (n == 1 || x.step == y.step)));
    }
    default: return a.object() == b.object();
  }
}

bool less(const Value& a, const Value& b, Budget& budget) {
  budget.charge(8);
  if (a.is_numeric() && b.is_numeric()) return compare_numbers(a, b) == -1;
  require_defined(a);
  require_defined(b);
  if (a.is_text() && b.is_text()) {
    budget.charge(std::min(a.text().size(), b.text().size()));
    return a.text() < b.text();
  }
  if (a.is_sequence() && a.kind() == b.kind()) {
    const Values &x = a.items(), &y = b.items();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!same(x[i], y[i]) && !equal(x[i], y[i], budget)) return less(x[i], y[i], budget);
    return x.size() < y.size();
  }
  throw template_error(fmt::format("'<' not supported between instances of '{}' and '{}'", type_name(a), type_name(b)));
}

bool contains(const Value& container, const Value& item, Budget& budget) {
  const auto among = [&](const Values& items) {
    for (const Value& one : items)
      if (same(one, item) || equal(one, item, budget)) return true;
    return false;
  };
  switch (container.kind()) {
    case Kind::kUndefined: return false;
    case Kind::kText:
      if (!item.is_text())
        throw template_error(fmt::format("'in <string>' requires string as left operand, not {}", type_name(item)));
      budget.charge(container.text().size());
      return container.text().find(item.text()) != Text::npos;
    case Kind::kList:
    case Kind::kTuple: return among(container.items());
    case Kind::kDict: return container.dict().find(item, budget) != nullptr;
    case Kind::kView:
      if (container.as<ViewObject>().part == ViewObject::Part::kKeys)
        return container.as<ViewObject>().dict.dict().find(item, budget) != nullptr;
      return among(iterate(container, budget));
    case Kind::kRange:
    case Kind::kIterator: return among(iterate(container, budget));
    default: throw template_error(fmt::format("argument of type '{}' is not iterable", type_name(container)));
  }
}

std::optional<Integer> length(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return 0;
    case Kind::kText: return value.text().size();
    case Kind::kList:
    case Kind::kTuple: return value.items().size();
    case Kind::kDict: return value.dict().entries.size();
    case Kind::kView: return value.as<ViewObject>().dict.dict().entries.size();
    case Kind::kRange: return value.as<RangeObject>().length();
    default: return std::nullopt;
  }
}

bool is_iterable(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kText:
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kDict:
    case Kind::kView:
    case Kind::kRange:
    case Kind::kIterator:
    case Kind::kLoop: return true;
    default: return false;
  }
}

Values iterate(const Value& value, Budget& budget) {
  Values items;
  if (const auto n = length(value)) budget.charge(static_cast<uint64_t>(*n) * kItemWork);
  switch (value.kind()) {
    case Kind::kUndefined: break;
    case Kind::kText:
      for (const Character c : value.text()) items.push_back(make_text(budget, Text(1, c), value.is_markup()));
      break;
    case Kind::kList:
    case Kind::kTuple: return value.items();
    case Kind::kDict:
      for (const auto& entry : value.dict().entries) items.push_back(entry.first);
      break;
    case Kind::kView: {
      const ViewObject& view = value.as<ViewObject>();
      for (const auto& [key, inner] : view.dict.dict().entries) {
        if (view.part == ViewObject::Part::kKeys)
          items.push_back(key);
        else if (view.part == ViewObject::Part::kValues)
          items.push_back(inner);
        else
          items.push_back(make_tuple(budget, {key, inner}));
      }
      break;
    }
    case Kind::kRange: {
      const RangeObject& range = value.as<RangeObject>();
      for (int64_t i = 0; i < range.length(); ++i) items.emplace_back(range.start + i * range.step);
      break;
    }
    case Kind::kIterator: {
      IteratorObject& iterator = value.as<IteratorObject>();
      items.assign(iterator.items.begin() + static_cast<std::ptrdiff_t>(iterator.position), iterator.items.end());
      iterator.position = iterator.items.size();
      budget.charge(items.size());
      break;
    }
    default: throw template_error(fmt::format("'{}' object is not iterable", type_name(value)));
  }
  return items;
}

std::string_view type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined: return "Undefined";
    case Kind::kNone: return "NoneType";
    case Kind::kBoolean: return "bool";
    case Kind::kInteger: return "int";
    case Kind::kFloat: return "float";
    case Kind::kText: return value.is_markup() ? "Markup" : "str";
    case Kind::kList: return "list";
    case Kind::kTuple: return "tuple";
    case Kind::kDict: return "dict";
    case Kind::kView:
      switch (value.as<ViewObject>().part) {
        case ViewObject::Part::kKeys: return "dict_keys";
        case ViewObject::Part::kValues: return "dict_values";
        case ViewObject::Part::kItems: return "dict_items";
      }
      return "";
    case Kind::kRange: return "range";
    case Kind::kIterator: return value.as<IteratorObject>().type_name;
    case Kind::kNamespace: return "Namespace";
    case Kind::kFunction: return "function";
    case Kind::kLoop: return "LoopContext";
  }
  return "";
}

std::string integer_text(Integer value) {
  std::string digits;
  const bool negative = value < 0;
  do {
    const int digit = static_cast<int>(value % 10);
    digits += static_cast<char>('0' + (digit < 0 ? -digit : digit));
    value /= 10;
  } while (value != 0);
  if (negative) digits += '-';
  std::reverse(digits.begin(), digits.end());
  return digits;
}

Text printed(const Value& value, Budget& budget) {
  switch (value.kind()) {
    case Kind::kUndefined: return {};
    case Kind::kText: budget.charge(value.text().size()); return value.text();
    case Kind::kNone: return to_text("None");
    case Kind::kBoolean: return to_text(value.boolean() ? "True" : "False");
    case Kind::kInteger: return to_text(integer_text(value.integer()));
    case Kind::kFloat: return to_text(python_float(value.number()));
    default: return representation(value, budget);
  }
}

Text representation(const Value& value, Budget& budget) {
  Text out;
  append_representation(out, value, budget, 0);
  return out;
}

void append(Text& out, TextView text, Budget& budget) {
  budget.charge(text.size());
  budget.check_length(out.size() + text.size());
  out += text;
}

void fail_undefined(const Value& value) {
  const bool named = value.object() != nullptr;
  throw template_error(named ? value.as<UndefinedObject>().message : "a value is undefined");
}

void require_defined(const Value& value) {
  if (value.is(Kind::kUndefined)) fail_undefined(value);
}

std::optional<Value> index(const Value& value, Integer at, Budget& budget) {
  const std::optional<Integer> size = length(value);
  const bool indexable = value.is_text() || value.is_sequence() || value.is(Kind::kRange);
  if (!indexable) return std::nullopt;
  if (at < 0) at += *size;
  if (at < 0 || at >= *size) return std::nullopt;
  const auto i = static_cast<size_t>(at);
  if (value.is_text()) return make_text(budget, Text(1, value.text()[i]), value.is_markup());
  if (value.is_sequence()) return value.items()[i];
  const RangeObject& range = value.as<RangeObject>();
  return Value(range.start + static_cast<int64_t>(i) * range.step);
}

Value slice(const Value& value, const Value& start, const Value& stop, const Value& step, Budget& budget) {
  require_defined(value);
  if (!value.is_text() && !value.is_sequence() && !value.is(Kind::kRange))
    throw template_error(fmt::format("'{}' object can not be sliced", type_name(value)));
  const SliceBounds bounds = slice_bounds(start, stop, step, static_cast<int64_t>(*length(value)));
  const auto count = static_cast<size_t>(bounds.count);
  const auto at = [&](size_t i) { return static_cast<size_t>(bounds.start + static_cast<int64_t>(i) * bounds.step); };
  budget.charge(count);
  if (value.is_text()) {
    if (bounds.step == 1)
      return make_text(budget, count == 0 ? Text() : value.text().substr(at(0), count), value.is_markup());
    Text text;
    for (size_t i = 0; i < count; ++i) text += value.text()[at(i)];
    return make_text(budget, std::move(text), value.is_markup());
  }
  if (value.is(Kind::kRange)) {
    const RangeObject& range = value.as<RangeObject>();
    const int64_t begin = range.start + bounds.start * range.step, by = range.step * bounds.step;
    return {Kind::kRange, std::make_shared<RangeObject>(&budget, begin, begin + bounds.count * by, by)};
  }
  Values items;
  items.reserve(count);
  for (size_t i = 0; i < count; ++i) items.push_back(value.items()[at(i)]);
  return value.is(Kind::kList) ? make_list(budget, std::move(items)) : make_tuple(budget, std::move(items));
}

Value escape(const Value& value, Budget& budget) {
  if (value.is_markup()) return value;
  const Text plain = printed(value, budget);
  budget.charge(plain.size());
  Text out;
  for (const Character c : plain) {
    budget.check_length(out.size());
    const std::string_view entity = code_point(c) == '&'    ? "&amp;"
                                    : code_point(c) == '<'  ? "&lt;"
                                    : code_point(c) == '>'  ? "&gt;"
                                    : code_point(c) == '"'  ? "&#34;"
                                    : code_point(c) == '\'' ? "&#39;"
                                                            : "";
    if (entity.empty())
      out += c;
    else
      for (const char e : entity) out += static_cast<Character>(e) | (c & kForeign);
  }
  return make_text(budget, std::move(out), true);
}

Value negate(const Value& value) {
  require_defined(value);
  if (value.is(Kind::kFloat)) return -value.number();
  if (!value.is_integral()) throw template_error(fmt::format("bad operand type for unary -: '{}'", type_name(value)));
  return -value.integer();  // the smallest Integer does not arise: results beyond 2^126 are refused
}

namespace {

// Room for one more addition or negation, so that these never overflow.
Integer checked(Integer value) {
  constexpr Integer kMost = Integer{1} << 126;
  if (value > kMost || value < -kMost) throw template_error("an integer is too large");
  return value;
}

Integer floor_divide(Integer a, Integer b) {
  const Integer quotient = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? quotient - 1 : quotient;
}

double float_modulo(double a, double b) {
  double rest = std::fmod(a, b);
  if (rest != 0) {
    if ((rest < 0) != (b < 0)) rest += b;
  } else {
    rest = std::copysign(0.0, b);
  }
  return rest;
}

Value integer_power(Integer base, Integer exponent) {
  if (exponent < 0) {
    if (base == 0) throw template_error("0.0 cannot be raised to a negative power");
    return std::pow(static_cast<double>(base), static_cast<double>(exponent));
  }
  if (base == 0 || base == 1) return exponent == 0 ? Integer{1} : base;
  if (base == -1) return exponent % 2 == 0 ? Integer{1} : base;
  if (exponent > 126) throw template_error("an integer is too large");
  Integer result = 1;
  for (Integer i = 0; i < exponent; ++i)
    if (__builtin_mul_overflow(result, base, &result)) throw template_error("an integer is too large");
  return checked(result);
}

Value calculate_integers(Operator op, Integer a, Integer b) {
  Integer result = 0;
  switch (op) {
    case Operator::kAdd: return checked(a + b);
    case Operator::kSubtract: return checked(a - b);
    case Operator::kMultiply:
      if (__builtin_mul_overflow(a, b, &result)) throw template_error("an integer is too large");
      return checked(result);
    case Operator::kPower: return integer_power(a, b);
    case Operator::kDivide:
      if (b == 0) throw template_error("division by zero");
      return static_cast<double>(static_cast<long double>(a) / static_cast<long double>(b));
    case Operator::kFloorDivide:
    case Operator::kModulo:
      if (b == 0) throw template_error("integer division or modulo by zero");
      return op == Operator::kFloorDivide ? floor_divide(a, b) : a - floor_divide(a, b) * b;
  }
  return {};
}

Value calculate_floats(Operator op, double a, double b) {
  switch (op) {
    case Operator::kAdd: return a + b;
    case Operator::kSubtract: return a - b;
    case Operator::kMultiply: return a * b;
    case Operator::kPower: {
      if (a == 0 && b < 0) throw template_error("0.0 cannot be raised to a negative power");
      if (a < 0 && std::floor(b) != b && std::isfinite(a) && std::isfinite(b))
        throw template_error("complex numbers are not supported");
      const double result = std::pow(a, b);
      if (std::isinf(result) && std::isfinite(a) && std::isfinite(b))
        throw template_error("numerical result out of range");
      return result;
    }
    case Operator::kDivide:
      if (b == 0) throw template_error("float division by zero");
      return a / b;
    case Operator::kModulo:
    case Operator::kFloorDivide: {
      if (b == 0) throw template_error("float floor division or modulo by zero");
      const double rest = float_modulo(a, b);
      if (op == Operator::kModulo) return rest;
      const double quotient = (a - rest) / b;
      const double whole = std::floor(quotient);
      return quotient == 0 ? std::copysign(0.0, a / b) : quotient - whole > 0.5 ? whole + 1 : whole;
    }
  }
  return {};
}

Value repeat(const Value& value, Integer times, Budget& budget) {
  const Integer size = *length(value);
  if (times < 0) times = 0;
  if (size > 0 && times > (Integer{1} << 40)) throw template_error("a repetition is too long");
  const auto total = static_cast<uint64_t>(size * times);
  budget.check_length(total);
  budget.charge(total);
  if (value.is_text()) {
    Text text;
    text.reserve(total);
    for (Integer i = 0; i < times && size > 0; ++i) text += value.text();
    return make_text(budget, std::move(text), value.is_markup());
  }
  budget.take(total * sizeof(Value));  // before they are made
  budget.give_back(total * sizeof(Value));
  budget.charge(total * kItemWork);
  Values items;
  items.reserve(total);
  for (Integer i = 0; i < times && size > 0; ++i) items.insert(items.end(), value.items().begin(), value.items().end());
  return value.is(Kind::kList) ? make_list(budget, std::move(items)) : make_tuple(budget, std::move(items));
}

std::string_view symbol(Operator op) {
  switch (op) {
    case Operator::kAdd: return "+";
    case Operator::kSubtract: return "-";
    case Operator::kMultiply: return "*";
    case Operator::kDivide: return "/";
    case Operator::kFloorDivide: return "//";
    case Operator::kModulo: return "%";
    case Operator::kPower: return "** or pow()";
  }
  return "";
}

}  // namespace

Value calculate(Operator op, const Value& left, const Value& right, Budget& budget) {
  if (op == Operator::kModulo && left.is_text()) return format_percent(left, right, budget);
  require_defined(left);
  require_defined(right);
  if (left.is_numeric() && right.is_numeric()) {
    if (left.is(Kind::kFloat) || right.is(Kind::kFloat)) return calculate_floats(op, left.number(), right.number());
    return calculate_integers(op, left.integer(), right.integer());
  }
  if (op == Operator::kAdd && left.is_text() && right.is_text()) {
    const bool markup = left.is_markup() || right.is_markup();
    const Value a = markup ? escape(left, budget) : left, b = markup ? escape(right, budget) : right;
    budget.check_length(a.text().size() + b.text().size());
    Text text;
    text.reserve(a.text().size() + b.text().size());
    text += a.text();
    text += b.text();
    return make_text(budget, std::move(text), markup);
  }
  if (op == Operator::kAdd && left.is_sequence() && left.kind() == right.kind()) {
    budget.charge((left.items().size() + right.items().size()) * kItemWork);
    Values items = left.items();
    items.insert(items.end(), right.items().begin(), right.items().end());
    return left.is(Kind::kList) ? make_list(budget, std::move(items)) : make_tuple(budget, std::move(items));
  }
  if (op == Operator::kMultiply && (left.is_text() || left.is_sequence()) && right.is_integral())
    return repeat(left, right.integer(), budget);
  if (op == Operator::kMultiply && (right.is_text() || right.is_sequence()) && left.is_integral())
    return repeat(right, left.integer(), budget);
  throw template_error(
      fmt::format("unsupported operand type(s) for {}: '{}' and '{}'", symbol(op), type_name(left), type_name(right)));
}

std::vector<size_t> sorted_order(const std::vector<Values>& keys, bool reverse, Budget& budget) {
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto before = [&](size_t a, size_t b) {
    for (size_t i = 0; i < keys[a].size(); ++i)
      if (!equal(keys[a][i], keys[b][i], budget)) return less(keys[a][i], keys[b][i], budget);
    return false;
  };
  // A merge by hand: std::stable_sort may not be left by an exception of an order that is none (NaN), and this one may.
  std::vector<size_t> merged(order.size());
  for (size_t width = 1; width < order.size(); width *= 2) {
    for (size_t begin = 0; begin < order.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, order.size()), end = std::min(begin + 2 * width, order.size());
      size_t left = begin, right = middle;
      for (size_t out = begin; out < end; ++out) {
        const bool take_right =
            left == middle ||
            (right < end && (reverse ? before(order[left], order[right]) : before(order[right], order[left])));
        merged[out] = take_right ? order[right++] : order[left++];
      }
    }
    order.swap(merged);
  }
  return order;
}

}  // namespace beryl::jinja
