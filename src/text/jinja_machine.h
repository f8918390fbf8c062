// Runs a template. One machine, one rendering.
#pragma once

#include <ctime>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja_syntax.h"
#include "text/jinja_value.h"

namespace beryl::jinja {

// The variables of a function that runs. Slots without an object and of kind kUndefined are not set.
struct Activation : Object {
  Activation(Budget* budget, const FunctionScope& function, std::shared_ptr<Activation> around)
      : Object(budget), level(function.level), outer(std::move(around)) {
    take(sizeof(Activation) + static_cast<size_t>(function.n_slots) * sizeof(Value));
    slots.resize(static_cast<size_t>(function.n_slots));
  }
  void clear() override { slots.clear(); }
  int level;
  std::shared_ptr<Activation> outer;
  Values slots;
  bool captured = false;  // by a macro, so the machine keeps it
};

// Text under construction, counted while it lives.
class Output {
 public:
  explicit Output(Budget& budget) : budget_(budget) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() { budget_.give_back(taken_); }
  void add(TextView text) {
    const size_t bytes = text.size() * sizeof(Character);
    budget_.take(bytes);
    taken_ += bytes;
    append(text_, text, budget_);
  }
  Text take() { return std::move(text_); }

 private:
  Budget& budget_;
  size_t taken_ = 0;
  Text text_;
};

class Machine {
 public:
  // The syntax and the budget must outlive it. clock: what strftime_now writes for a format.
  Machine(const Syntax& syntax, Budget& budget, std::map<std::string, Value> variables,
          std::function<std::string(const std::string&)> clock);
  ~Machine();

  // Throws Error(kBadInput) with the line.
  Text run();

  Budget& budget() { return budget_; }
  // a.name and a[key], by the rules of the sandbox. What is missing is undefined.
  Value get_attribute(const Value& value, TextView name);
  Value get_item(const Value& value, const Value& key);
  Value call(const Value& function, Arguments& arguments);
  Value filter(std::string_view name, const Value& value, Arguments& arguments);
  bool test(std::string_view name, const Value& value, Arguments& arguments);
  // Keeps an object until the end and then empties it: such may hold each other in circles or in long chains.
  void keep(std::shared_ptr<Object> object) { kept_.push_back(std::move(object)); }
  std::string time_text(const std::string& format) { return clock_(format); }

  // For macros and loops.
  Text run_macro(const Statement& macro, const std::shared_ptr<Activation>& outer, Arguments& arguments);
  Text run_recursive_loop(const Statement& loop, const std::shared_ptr<Activation>& outer, const Value& items,
                          int depth);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class Nested;
  class RunningFunction;

  Flow execute(const Statements& statements);
  Flow execute(const Statement& statement);
  Flow execute_if(const Statement& statement);
  Flow execute_for(const Statement& statement, const Value& items, int depth);
  Flow execute_block(const Statement& statement);
  void enter(const Scope& scope);
  void leave(const Scope& scope);
  Value macro_value(const Statement& statement);

  Value evaluate(const Expression& expression);
  Value evaluate_name(const Expression& expression);
  Value evaluate_list(const Expression& expression);
  Value evaluate_dict(const Expression& expression);
  Value evaluate_slice(const Expression& expression);
  Value evaluate_call(const Expression& expression, const Value* caller);
  Value evaluate_filter(const Expression& expression);
  bool evaluate_test(const Expression& expression);
  Value evaluate_concatenation(const Expression& expression);
  bool evaluate_comparison(const Expression& expression);
  Value evaluate_calculation(const Expression& expression);
  void evaluate_arguments(const std::vector<Argument>& arguments, Arguments& out);

  Value& slot(const Slot& slot);
  void assign(const Expression& target, const Value& value, bool top_level);
  void write(const Value& value);
  Value resolve_context(const std::string& name) const;
  void capture();

  const Syntax& syntax_;
  Budget& budget_;
  std::map<std::string, Value> context_;
  std::function<std::string(const std::string&)> clock_;
  std::shared_ptr<Activation> activation_;
  Output* out_ = nullptr;
  Text filter_input_;  // the text of a filter's block
  int line_ = 0;
  int nesting_ = 0;
  std::vector<std::shared_ptr<Object>> kept_;
};

// How a function's arguments meet its parameters.
class Parameters {
 public:
  // required: the first so many must be given. Throws for too many, unknown, doubled and missing ones.
  Parameters(std::string_view function, const Arguments& arguments, std::initializer_list<std::string_view> names,
             size_t required = 0);
  // nullptr: not given.
  const Value* operator[](size_t index) const { return given_[index]; }
  bool has(size_t index) const { return given_[index] != nullptr; }
  Value get(size_t index, const Value& otherwise) const { return has(index) ? *given_[index] : otherwise; }
  bool flag(size_t index, bool otherwise = false) const { return has(index) ? is_true(*given_[index]) : otherwise; }
  // Throw for another kind.
  Integer integer(size_t index, Integer otherwise) const;
  const Text& text(size_t index) const;

 private:
  std::string_view function_;
  std::vector<const Value*> given_;
};

// A function of the machine's own: range, namespace, a text's split.
class BuiltIn : public Function {
 public:
  using Body = std::function<Value(Machine&, Arguments&)>;
  BuiltIn(Budget* budget, std::string_view name, Body body, const Value* holds = nullptr)
      : Function(budget, name), body_(std::move(body)) {
    if (holds != nullptr) nest(*holds);
  }
  Value call(Machine& machine, Arguments& arguments) override { return body_(machine, arguments); }
  std::string printed() const override;

 private:
  Body body_;
};
Value make_function(Budget& budget, std::string_view name, BuiltIn::Body body, const Value* holds = nullptr);

// An attribute that Python's type has: a method bound to the value, or a value. nullopt: there is none of this name.
std::optional<Value> built_in_attribute(Machine& machine, const Value& value, std::string_view name);

// The names that every template knows: range, dict, namespace, cycler, joiner, raise_exception, strftime_now.
void add_globals(Budget& budget, std::map<std::string, Value>& variables);

// jinja_filters.cpp, jinja_tests.cpp. Throw for unknown names.
Value apply_filter(Machine& machine, std::string_view name, const Value& value, Arguments& arguments);
bool apply_test(Machine& machine, std::string_view name, const Value& value, Arguments& arguments);

}  // namespace beryl::jinja
