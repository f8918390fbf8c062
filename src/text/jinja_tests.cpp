// Jinja's tests: what may follow `is`.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "text/jinja_machine.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

struct Call {
  Machine& machine;
  std::string_view name;
  const Value& value;
  Arguments& arguments;
  Budget& budget() const { return machine.budget(); }
  void no_parameters() const { Parameters(name, arguments, {}); }
  Value parameter(std::string_view of) const { return *Parameters(name, arguments, {of}, 1)[0]; }
};

template <bool (*kTest)(const Value&)>
bool plain(const Call& call) {
  call.no_parameters();
  return kTest(call.value);
}

template <Kind... kKinds>
bool is_kind(const Value& value) {
  return (value.is(kKinds) || ...);
}

bool is_true_itself(const Value& value) { return value.is(Kind::kBoolean) && value.boolean(); }
bool is_false_itself(const Value& value) { return value.is(Kind::kBoolean) && !value.boolean(); }
bool is_defined(const Value& value) { return !value.is(Kind::kUndefined); }
bool is_escaped(const Value& value) { return value.is_markup(); }
bool is_sequence(const Value& value) {
  return is_kind<Kind::kText, Kind::kList, Kind::kTuple, Kind::kDict, Kind::kRange, Kind::kUndefined>(value);
}

Integer remainder(const Call& call, const Value& by) {
  const Value rest = calculate(Operator::kModulo, call.value, by, call.budget());
  if (!rest.is_numeric()) throw template_error(fmt::format("{}: a number is required", call.name));
  // 0.5 is neither odd nor even
  return rest.is(Kind::kFloat) ? (rest.number() == 0 ? 0 : rest.number() == 1 ? 1 : 2) : rest.integer();
}

bool parity(const Call& call) {
  call.no_parameters();
  return remainder(call, Value(2)) == (call.name == "odd" ? 1 : 0);
}
bool divisible(const Call& call) { return remainder(call, call.parameter("num")) == 0; }

bool case_test(const Call& call) {
  call.no_parameters();
  const Text text = printed(call.value, call.budget());
  call.budget().charge(text.size() * 4);
  const bool wants_upper = call.name == "upper";
  bool any = false;
  for (const Character c : text) {
    if (wants_upper ? is_lower(c) : is_upper(c)) return false;
    any = any || (wants_upper ? is_upper(c) : is_lower(c));
  }
  return any;
}

bool named(const Call& call) {  // filter, test
  call.no_parameters();
  if (!call.value.is_text()) return false;
  return call.name == "filter" ? is_filter(to_utf8(call.value.text())) : is_test(to_utf8(call.value.text()));
}

bool same_as(const Call& call) { return same(call.value, call.parameter("other")); }
bool in(const Call& call) { return contains(call.parameter("seq"), call.value, call.budget()); }

bool is_equal(const Call& call) { return equal(call.value, call.parameter("b"), call.budget()); }
bool not_equal(const Call& call) { return !is_equal(call); }
bool less_than(const Call& call) { return less(call.value, call.parameter("b"), call.budget()); }
bool greater_than(const Call& call) { return less(call.parameter("b"), call.value, call.budget()); }
bool at_most(const Call& call) { return less_than(call) || is_equal(call); }
bool at_least(const Call& call) { return greater_than(call) || is_equal(call); }

using Test = bool (*)(const Call&);

const std::unordered_map<std::string_view, Test>& tests() {
  static const std::unordered_map<std::string_view, Test> all = {
      {"odd", parity},
      {"even", parity},
      {"divisibleby", divisible},
      {"defined", plain<is_defined>},
      {"undefined", plain<is_kind<Kind::kUndefined>>},
      {"filter", named},
      {"test", named},
      {"none", plain<is_kind<Kind::kNone>>},
      {"boolean", plain<is_kind<Kind::kBoolean>>},
      {"false", plain<is_false_itself>},
      {"true", plain<is_true_itself>},
      {"integer", plain<is_kind<Kind::kInteger>>},
      {"float", plain<is_kind<Kind::kFloat>>},
      {"lower", case_test},
      {"upper", case_test},
      {"string", plain<is_kind<Kind::kText>>},
      {"mapping", plain<is_kind<Kind::kDict>>},
      {"number", plain<is_kind<Kind::kInteger, Kind::kFloat, Kind::kBoolean>>},
      {"sequence", plain<is_sequence>},
      {"iterable", plain<is_iterable>},
      {"callable", plain<is_kind<Kind::kFunction, Kind::kLoop, Kind::kUndefined>>},
      {"sameas", same_as},
      {"escaped", plain<is_escaped>},
      {"in", in},
      {"==", is_equal},
      {"eq", is_equal},
      {"equalto", is_equal},
      {"!=", not_equal},
      {"ne", not_equal},
      {">", greater_than},
      {"gt", greater_than},
      {"greaterthan", greater_than},
      {"<", less_than},
      {"lt", less_than},
      {"lessthan", less_than},
      {">=", at_least},
      {"ge", at_least},
      {"<=", at_most},
      {"le", at_most},
  };
  return all;
}

}  // namespace

bool is_test(std::string_view name) { return tests().contains(name); }

bool apply_test(Machine& machine, std::string_view name, const Value& value, Arguments& arguments) {
  const auto found = tests().find(name);
  if (found == tests().end()) throw template_error(fmt::format("No test named {} found.", quote(name)));
  return found->second({machine, name, value, arguments});
}

}  // namespace beryl::jinja
