// Values of a template, with Python's meaning: what is true, equal, smaller, printed, iterated.
//
// Lists and dictionaries never change once made (the sandbox forbids it in Python too); only namespaces and iterators
// do. Every object counts against the budget of the rendering that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "text/jinja_text.h"

namespace beryl::jinja {

using Integer = __int128;  // Python's have no end; arithmetic beyond this is an error

// What a rendering may still spend. Every loop over data charges it, so no template runs for ever or takes all memory.
class Budget {
 public:
  // max_work: steps of the machine count 64, a character copied or compared 1. max_bytes: of values alive at once.
  Budget(uint64_t max_work, size_t max_bytes, size_t max_characters)
      : work_left_(max_work), max_bytes_(max_bytes), max_characters_(max_characters) {}

  void charge(uint64_t work) {
    if (work > work_left_) fail_work();
    work_left_ -= work;
  }
  void step() { charge(64); }
  // Before a text of this length is made; making it is work of its own.
  void check_length(uint64_t n_characters) {
    if (n_characters > max_characters_) fail_length();
  }
  void take(size_t bytes) {
    if (bytes > max_bytes_ - bytes_) fail_bytes();
    bytes_ += bytes;
  }
  void give_back(size_t bytes) noexcept { bytes_ -= bytes; }
  size_t bytes() const { return bytes_; }

 private:
  [[noreturn]] void fail_work() const;
  [[noreturn]] void fail_length() const;
  [[noreturn]] void fail_bytes() const;

  uint64_t work_left_;
  size_t max_bytes_, max_characters_, bytes_ = 0;
};

// Deepest nesting of values: printing, comparing and freeing them recurse.
inline constexpr int kMaxValueDepth = 200;

// What goes wrong while a template runs; the machine adds the line.
Error template_error(std::string_view what);

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBoolean,
  kInteger,
  kFloat,
  kText,
  kList,
  kTuple,
  kDict,
  kView,
  kRange,
  kIterator,
  kNamespace,
  kFunction,
  kLoop
};

class Value;
using Values = std::vector<Value>;

// The base of all that values share. Counts its bytes from begin to end of its life.
class Object {
 public:
  explicit Object(Budget* budget = nullptr) : budget_(budget) {}
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  virtual ~Object() {
    if (budget_ != nullptr) budget_->give_back(bytes_);
  }
  int depth() const { return depth_; }
  // Lets go of all other objects; for those that may be part of a circle.
  virtual void clear() {}

 protected:
  // Throw Error(kBadInput) beyond the limits.
  void take(size_t bytes);
  void nest(const Value& inner);
  void nest(const Values& inner);

 private:
  Budget* budget_;  // null: constants of a template, which outlive renderings
  size_t bytes_ = 0;
  int depth_ = 1;
};

class Function;
struct TextObject;
struct SequenceObject;
struct DictObject;

class Value {
 public:
  Value() = default;  // undefined, without a name
  Value(bool value) : kind_(Kind::kBoolean), integer_(value) {}
  Value(Integer value) : kind_(Kind::kInteger), integer_(value) {}
  Value(int value) : Value(static_cast<Integer>(value)) {}
  Value(int64_t value) : Value(static_cast<Integer>(value)) {}
  Value(uint64_t value) : Value(static_cast<Integer>(value)) {}
  Value(double value) : kind_(Kind::kFloat), float_(value) {}
  Value(const void*) = delete;  // else a string literal would be a boolean
  Value(Kind kind, std::shared_ptr<Object> object) : kind_(kind), object_(std::move(object)) {}

  static Value none() {
    Value value;
    value.kind_ = Kind::kNone;
    return value;
  }
  static Value undefined(std::string message);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_text() const { return kind_ == Kind::kText; }
  bool is_integral() const { return kind_ == Kind::kInteger || kind_ == Kind::kBoolean; }
  bool is_numeric() const { return is_integral() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ == Kind::kList || kind_ == Kind::kTuple; }
  // A text that markupsafe calls Markup: joined with others it escapes them for HTML.
  bool is_markup() const { return markup_; }
  Value as_markup(bool markup) const {
    Value value = *this;
    value.markup_ = markup;
    return value;
  }

  // Require the kind.
  bool boolean() const { return integer_ != 0; }
  Integer integer() const { return integer_; }
  double number() const { return kind_ == Kind::kFloat ? float_ : static_cast<double>(integer_); }
  const Text& text() const;
  const Values& items() const;  // lists and tuples
  const DictObject& dict() const;
  const std::shared_ptr<Object>& object() const { return object_; }
  template <class T>
  T& as() const {
    return static_cast<T&>(*object_);
  }

 private:
  Kind kind_ = Kind::kUndefined;
  bool markup_ = false;
  union {
    Integer integer_ = 0;
    double float_;
  };
  std::shared_ptr<Object> object_;
};

struct UndefinedObject : Object {
  explicit UndefinedObject(std::string why) : message(std::move(why)) {}
  std::string message;
};

struct TextObject : Object {
  TextObject(Budget* budget, Text content) : Object(budget), text(std::move(content)) {
    take(sizeof(TextObject) + text.size() * sizeof(Character));
  }
  Text text;
};

struct SequenceObject : Object {
  SequenceObject(Budget* budget, Values content) : Object(budget), items(std::move(content)) {
    take(sizeof(SequenceObject) + items.size() * sizeof(Value));
    nest(items);
  }
  Values items;
  bool grouped = false;  // groupby's pairs also have the attributes grouper and list
};

// In order of insertion. A value set again keeps its place and its first key.
struct DictObject : Object {
  explicit DictObject(Budget* budget) : Object(budget) { take(sizeof(DictObject)); }
  // Throws for a key that has no hash.
  void set(const Value& key, Value value, Budget& budget);
  const Value* find(const Value& key, Budget& budget) const;
  const Value* find(TextView key) const;
  std::vector<std::pair<Value, Value>> entries;

 private:
  const size_t* find_index(const Value& key, size_t hash, Budget& budget) const;
  std::unordered_multimap<size_t, size_t> places_;  // hash to entry
};

struct ViewObject : Object {  // dict.keys(), .values(), .items()
  enum class Part { kKeys, kValues, kItems };
  ViewObject(Budget* budget, Value of, Part which) : Object(budget), dict(std::move(of)), part(which) {
    take(sizeof(ViewObject));
    nest(dict);
  }
  Value dict;
  Part part;
};

struct RangeObject : Object {
  RangeObject(Budget* budget, int64_t begin, int64_t end, int64_t by)
      : Object(budget), start(begin), stop(end), step(by) {
    take(sizeof(RangeObject));
  }
  int64_t length() const;
  int64_t start, stop, step;
};

// A generator: its items are there, but can be had once only.
struct IteratorObject : Object {
  IteratorObject(Budget* budget, Values content, std::string_view type)
      : Object(budget), items(std::move(content)), type_name(type) {
    take(sizeof(IteratorObject) + items.size() * sizeof(Value));
    nest(items);
  }
  Values items;
  size_t position = 0;
  std::string_view type_name;
};

// The one thing that templates change. The machine keeps all of them until the end and then empties them, so that
// neither cycles nor long chains of them matter.
struct NamespaceObject : Object {
  explicit NamespaceObject(Budget* budget) : Object(budget) { take(sizeof(NamespaceObject)); }
  void set(TextView name, Value value, Budget& budget);
  const Value* find(TextView name) const;
  void clear() override { attributes.clear(); }
  std::vector<std::pair<Text, Value>> attributes;
};

struct Arguments {
  Values positional;
  std::vector<std::pair<Text, Value>> keyword;
};

class Machine;

// What can be called. Attributes are what Python code would see on it.
class Function : public Object {
 public:
  Function(Budget* budget, std::string_view function_name) : Object(budget), name_(function_name) {
    take(sizeof(Function));
  }
  virtual Value call(Machine& machine, Arguments& arguments) = 0;
  virtual std::optional<Value> attribute(Machine&, std::string_view) { return std::nullopt; }
  virtual std::string printed() const;
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

// How to make values.
Value make_text(Budget& budget, Text text, bool markup = false);
Value make_text(Budget& budget, std::string_view utf8);
Value make_list(Budget& budget, Values items);
Value make_tuple(Budget& budget, Values items);
Value make_iterator(Budget& budget, Values items, std::string_view type = "generator");
Value constant_text(Text text);                    // not counted
Value constant_sequence(Kind kind, Values items);  // not counted

bool is_true(const Value& value);
bool equal(const Value& a, const Value& b, Budget& budget);
bool same(const Value& a, const Value& b);  // Python's `is`, as far as it can be told
// a < b; throws for what has no order.
bool less(const Value& a, const Value& b, Budget& budget);
// Indices of what the keys belong to, sorted by them; equals keep their order, in reverse too.
std::vector<size_t> sorted_order(const std::vector<Values>& keys, bool reverse, Budget& budget);
bool contains(const Value& container, const Value& item, Budget& budget);
// nullopt: it has none (numbers, generators).
std::optional<Integer> length(const Value& value);
bool is_iterable(const Value& value);
// All items; a generator is emptied. Throws when it is not iterable.
Values iterate(const Value& value, Budget& budget);
std::string_view type_name(const Value& value);  // Python's, for messages

// str() and repr(). Structure that they write around foreign text is itself foreign: no control token arises from it.
Text printed(const Value& value, Budget& budget);
Text representation(const Value& value, Budget& budget);
void append(Text& out, TextView text, Budget& budget);  // within the limits
std::string integer_text(Integer value);

// "'x' is undefined": throws when the value is undefined and something is wanted of it.
void require_defined(const Value& value);
[[noreturn]] void fail_undefined(const Value& value);

// a[i], a[i:j:k]. Negative indices count from the end. index: nullopt when there is no such item.
std::optional<Value> index(const Value& value, Integer at, Budget& budget);
Value slice(const Value& value, const Value& start, const Value& stop, const Value& step, Budget& budget);

// &, <, >, ' and " as HTML entities. The result is Markup; so is what is given, then it stays as it is.
Value escape(const Value& value, Budget& budget);

enum class Operator { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
Value calculate(Operator op, const Value& left, const Value& right, Budget& budget);
Value negate(const Value& value);

}  // namespace beryl::jinja
