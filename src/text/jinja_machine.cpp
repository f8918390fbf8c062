#include "text/jinja_machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

// Calls of evaluate and execute within each other. A level takes a few hundred bytes of the stack.
constexpr int kMaxNesting = 1000;
constexpr size_t kMaxArguments = 10000;

// Memory that lives as long as a block of code.
class Taken {
 public:
  Taken(Budget& budget, size_t bytes) : budget_(budget), bytes_(bytes) { budget_.take(bytes); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;
  ~Taken() { budget_.give_back(bytes_); }

 private:
  Budget& budget_;
  size_t bytes_;
};

bool is_missing(const Value& value) { return value.is(Kind::kUndefined) && value.object() == nullptr; }

std::string named(const Value& value) {
  return value.is(Kind::kNone) ? std::string("None") : fmt::format("{} object", type_name(value));
}

class Macro : public Function {
 public:
  Macro(Budget* budget, const Statement& statement, std::shared_ptr<Activation> outer)
      : Function(budget, statement.name), statement_(statement), outer_(std::move(outer)) {}
  Value call(Machine& machine, Arguments& arguments) override {
    return make_text(machine.budget(), machine.run_macro(statement_, outer_, arguments));
  }
  std::optional<Value> attribute(Machine& machine, std::string_view name) override {
    if (name == "name") return make_text(machine.budget(), this->name());
    if (name == "caller") return Value(statement_.caller.function_level >= 0);
    if (name == "catch_kwargs") return Value(statement_.keywords.function_level >= 0);
    if (name == "catch_varargs") return Value(statement_.extra.function_level >= 0);
    if (name == "arguments") {
      Values names;
      for (const Parameter& parameter : statement_.parameters)
        names.push_back(make_text(machine.budget(), Text(parameter.name_text)));
      return make_tuple(machine.budget(), std::move(names));
    }
    return std::nullopt;
  }
  std::string printed() const override {
    return name().empty() ? "<Macro anonymous>" : fmt::format("<Macro '{}'>", name());
  }

 private:
  const Statement& statement_;
  std::shared_ptr<Activation> outer_;
};

// The variable `loop`, and the loop itself: it hands out the items.
class Loop : public Function, public std::enable_shared_from_this<Loop> {
 public:
  Loop(Budget* budget, Values items, std::function<bool(const Value&)> accepts, int depth0)
      : Function(budget, "LoopContext"), items_(std::move(items)), accepts_(std::move(accepts)), depth0_(depth0) {
    take(items_.size() * sizeof(Value));
    nest(items_);
    if (accepts_ == nullptr) length_ = items_.size();
  }
  // For loop(...), where the loop is recursive.
  void set_recursion(const Statement& statement, std::shared_ptr<Activation> outer) {
    statement_ = &statement;
    outer_ = std::move(outer);
  }

  std::optional<Value> next() {
    std::optional<Value> item = after_ ? std::exchange(after_, std::nullopt) : pull();
    if (!item) return std::nullopt;
    ++index0_;
    before_ = std::exchange(current_, item);
    return item;
  }
  // The loop is over: what remains is never asked for again.
  void finish() {
    accepts_ = nullptr;
    position_ = items_.size();
    outer_.reset();
  }

  Value call(Machine& machine, Arguments& arguments) override {
    const Parameters given("loop", arguments, {"iterable"}, 1);
    if (statement_ == nullptr || outer_ == nullptr)
      throw template_error("The loop must have the 'recursive' marker to be called recursively.");
    return make_text(machine.budget(), machine.run_recursive_loop(*statement_, outer_, *given[0], depth0_ + 1));
  }

  std::optional<Value> attribute(Machine& machine, std::string_view name) override {
    if (name == "index0") return Value(index0_);
    if (name == "index") return Value(index0_ + 1);
    if (name == "first") return Value(index0_ == 0);
    if (name == "last") return Value(!peek());
    if (name == "length") return Value(uint64_t{length()});
    if (name == "revindex0") return Value(static_cast<int64_t>(length()) - index0_ - 1);
    if (name == "revindex") return Value(static_cast<int64_t>(length()) - index0_);
    if (name == "depth0") return Value(depth0_);
    if (name == "depth") return Value(depth0_ + 1);
    if (name == "previtem") return index0_ == 0 || !before_ ? Value::undefined("there is no previous item") : *before_;
    if (name == "nextitem") {
      peek();
      return after_ ? *after_ : Value::undefined("there is no next item");
    }
    const int64_t index0 = index0_;
    if (name == "cycle")
      return make_function(machine.budget(), "cycle", [index0](Machine&, Arguments& arguments) {
        if (arguments.positional.empty()) throw template_error("no items for cycling given");
        return arguments.positional[static_cast<size_t>(index0) % arguments.positional.size()];
      });
    if (name == "changed") {
      machine.keep(shared_from_this());  // it may be given itself
      return make_function(machine.budget(), "changed",
                           [loop = shared_from_this()](Machine& running, Arguments& arguments) {
                             return Value(loop->changed(arguments.positional, running.budget()));
                           });
    }
    return std::nullopt;
  }
  void clear() override {
    finish();
    items_.clear();
    before_ = current_ = after_ = std::nullopt;
    seen_.reset();
  }
  std::string printed() const override {
    return fmt::format("<LoopContext {}/{}>", index0_ + 1, length_ ? fmt::format("{}", *length_) : std::string("?"));
  }

 private:
  std::optional<Value> pull() {
    while (position_ < items_.size()) {
      Value& item = items_[position_++];
      if (accepts_ == nullptr || accepts_(item)) return item;
    }
    return std::nullopt;
  }
  bool changed(const Values& now, Budget& budget) {
    const auto same_value = [&](const Value& a, const Value& b) { return equal(a, b, budget); };
    if (seen_ && std::equal(now.begin(), now.end(), seen_->begin(), seen_->end(), same_value)) return false;
    nest(now);
    seen_ = now;
    return true;
  }
  bool peek() {
    if (!after_) after_ = pull();
    return after_.has_value();
  }
  size_t length() {
    if (length_) return *length_;
    Values rest;
    while (std::optional<Value> item = pull()) rest.push_back(std::move(*item));
    length_ = rest.size() + static_cast<size_t>(index0_ + 1) + (after_ ? 1 : 0);
    items_ = std::move(rest);
    position_ = 0;
    accepts_ = nullptr;
    return *length_;
  }

  Values items_;
  size_t position_ = 0;
  std::function<bool(const Value&)> accepts_;
  int64_t index0_ = -1;
  int depth0_;
  std::optional<Value> before_, current_, after_;
  std::optional<size_t> length_;
  std::optional<Values> seen_;
  const Statement* statement_ = nullptr;
  std::shared_ptr<Activation> outer_;
};

}  // namespace

std::string BuiltIn::printed() const { return fmt::format("<built-in function {}>", name()); }

Value make_function(Budget& budget, std::string_view name, BuiltIn::Body body, const Value* holds) {
  return {Kind::kFunction, std::make_shared<BuiltIn>(&budget, name, std::move(body), holds)};
}

Parameters::Parameters(std::string_view function, const Arguments& arguments,
                       std::initializer_list<std::string_view> names, size_t required)
    : function_(function), given_(names.size(), nullptr) {
  if (arguments.positional.size() > names.size())
    throw template_error(
        fmt::format("{}() takes {} arguments but {} were given", function, names.size(), arguments.positional.size()));
  for (size_t i = 0; i < arguments.positional.size(); ++i) given_[i] = &arguments.positional[i];
  for (const auto& [keyword, value] : arguments.keyword) {
    const std::string name = to_utf8(keyword);
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end())
      throw template_error(fmt::format("{}() got an unexpected keyword argument {}", function, quote(name)));
    const Value*& place = given_[static_cast<size_t>(found - names.begin())];
    if (place != nullptr)
      throw template_error(fmt::format("{}() got multiple values for argument {}", function, quote(name)));
    place = &value;
  }
  for (size_t i = 0; i < required; ++i)
    if (given_[i] == nullptr)
      throw template_error(fmt::format("{}() missing a required argument: '{}'", function, *(names.begin() + i)));
}

Integer Parameters::integer(size_t index, Integer otherwise) const {
  if (!has(index)) return otherwise;
  require_defined(*given_[index]);
  if (!given_[index]->is_integral())
    throw template_error(
        fmt::format("{}(): '{}' object cannot be interpreted as an integer", function_, type_name(*given_[index])));
  return given_[index]->integer();
}

const Text& Parameters::text(size_t index) const {
  require_defined(*given_[index]);
  if (!given_[index]->is_text())
    throw template_error(fmt::format("{}(): a str is required, not {}", function_, type_name(*given_[index])));
  return given_[index]->text();
}

// A deeper level of evaluate or execute.
class Machine::Nested {
 public:
  explicit Nested(Machine& machine) : machine_(machine) {
    if (++machine_.nesting_ > kMaxNesting) {
      --machine_.nesting_;
      throw template_error("the template calls or nests too deeply");
    }
    machine_.budget_.step();
  }
  ~Nested() { --machine_.nesting_; }

 private:
  Machine& machine_;
};

// A function of the template that runs: its variables and its output, until the end of its block.
class Machine::RunningFunction {
 public:
  RunningFunction(Machine& machine, const FunctionScope& function, std::shared_ptr<Activation> outer)
      : machine_(machine),
        output_(machine.budget_),
        caller_(std::move(machine.activation_)),
        caller_out_(machine.out_) {
    machine_.activation_ = std::make_shared<Activation>(&machine.budget_, function, std::move(outer));
    machine_.out_ = &output_;
  }
  RunningFunction(const RunningFunction&) = delete;
  RunningFunction& operator=(const RunningFunction&) = delete;
  ~RunningFunction() {
    machine_.activation_ = std::move(caller_);
    machine_.out_ = caller_out_;
  }
  Text take() { return output_.take(); }

 private:
  Machine& machine_;
  Output output_;
  std::shared_ptr<Activation> caller_;
  Output* caller_out_;
};

Machine::Machine(const Syntax& syntax, Budget& budget, std::map<std::string, Value> variables,
                 std::function<std::string(const std::string&)> clock)
    : syntax_(syntax), budget_(budget), context_(std::move(variables)), clock_(std::move(clock)) {
  add_globals(budget_, context_);
}

Machine::~Machine() {
  for (const auto& object : kept_) object->clear();
}

Text Machine::run() {
  try {
    RunningFunction root(*this, syntax_.function, nullptr);
    enter(syntax_.scope);
    execute(syntax_.body);
    return root.take();
  } catch (const Error& error) {
    // Messages of raise_exception may hold anything.
    const std::string quoted = quote(error.what(), 400);
    throw Error(error.code, fmt::format("line {}: {}", line_, std::string_view(quoted).substr(1, quoted.size() - 2)));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, fmt::format("line {}: there is no memory left", line_));
  }
}

// --- statements ---

void Machine::enter(const Scope& scope) {
  for (const Load& load : scope.loads) {
    switch (load.from) {
      case Load::From::kParameter: break;
      case Load::From::kContext: slot(load.slot) = resolve_context(load.name); break;
      case Load::From::kOuter: {
        const Value value = slot(load.outer);
        slot(load.slot) = value;
        break;
      }
      case Load::From::kNothing: slot(load.slot) = Value(); break;
    }
  }
}

void Machine::leave(const Scope& scope) {
  for (const Load& load : scope.loads) slot(load.slot) = Value();
}

Machine::Flow Machine::execute(const Statements& statements) {
  for (const auto& statement : statements) {
    const Flow flow = execute(*statement);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Machine::Flow Machine::execute(const Statement& statement) {
  const Nested nested(*this);
  line_ = statement.line;
  switch (statement.kind) {
    case StatementKind::kText: out_->add(statement.text.text()); break;
    case StatementKind::kOutput:
      for (const ExpressionPtr& expression : statement.expressions) write(evaluate(*expression));
      break;
    case StatementKind::kIf: return execute_if(statement);
    case StatementKind::kFor:
      if (statement.recursive) {
        const Value items = evaluate(*statement.expressions[0]);
        capture();
        out_->add(run_recursive_loop(statement, activation_, items, 0));
        break;
      }
      return execute_for(statement, evaluate(*statement.expressions[0]), 0);
    case StatementKind::kSet: {
      assign(*statement.targets[0], evaluate(*statement.expressions[0]), statement.top_level);
      break;
    }
    case StatementKind::kMacro: {
      const Value macro = macro_value(statement);
      slot(statement.slot) = macro;
      if (statement.top_level) context_[statement.name] = macro;
      break;
    }
    case StatementKind::kCallBlock: {
      const Value caller = macro_value(statement);
      write(evaluate_call(*statement.expressions[0], &caller));
      break;
    }
    case StatementKind::kGeneration: {
      Arguments none;
      out_->add(run_macro(statement, activation_, none));
      break;
    }
    case StatementKind::kSetBlock:
    case StatementKind::kFilterBlock:
    case StatementKind::kWith: return execute_block(statement);
    case StatementKind::kBlock: {
      Text text;
      {
        RunningFunction block(*this, statement.function, nullptr);
        enter(statement.scope);
        execute(statement.body);
        text = block.take();
      }
      out_->add(text);
      break;
    }
    case StatementKind::kBreak: return Flow::kBreak;
    case StatementKind::kContinue: return Flow::kContinue;
    case StatementKind::kNeedsLoader:
      throw template_error(fmt::format("'{}' reads another template, and there is none to read", statement.name));
  }
  return Flow::kNext;
}

Machine::Flow Machine::execute_if(const Statement& statement) {
  for (const auto& [condition, body] : statement.branches)
    if (condition == nullptr || is_true(evaluate(*condition))) return execute(body);
  return Flow::kNext;
}

// set and filter blocks write into a text of their own; with only opens a scope.
Machine::Flow Machine::execute_block(const Statement& statement) {
  if (statement.kind == StatementKind::kWith) {
    // The values mean the variables around; but targets may be set before later values are computed, as in Jinja.
    enter(statement.scope);
    for (size_t i = 0; i < statement.targets.size(); ++i)
      assign(*statement.targets[i], evaluate(*statement.expressions[i]), false);
    const Flow flow = execute(statement.body);
    if (flow == Flow::kNext) leave(statement.scope);
    return flow;
  }
  enter(statement.scope);
  Output inner(budget_);
  Output* const outside = std::exchange(out_, &inner);
  Flow flow = Flow::kNext;
  try {
    flow = execute(statement.body);
  } catch (...) {
    out_ = outside;
    throw;
  }
  out_ = outside;
  if (flow != Flow::kNext) return flow;  // the text is lost with the turn of the loop
  Value value;
  if (statement.expressions.empty()) {
    value = make_text(budget_, inner.take());
  } else {
    filter_input_ = inner.take();
    value = evaluate(*statement.expressions[0]);
  }
  if (statement.kind == StatementKind::kFilterBlock)
    write(value);
  else
    assign(*statement.targets[0], value, statement.top_level);
  leave(statement.scope);
  return Flow::kNext;
}

Machine::Flow Machine::execute_for(const Statement& statement, const Value& source, int depth) {
  Values items = iterate(source, budget_);
  std::function<bool(const Value&)> accepts;
  if (statement.condition != nullptr) {
    enter(statement.condition_scope);
    accepts = [&](const Value& item) {
      assign(*statement.condition_targets[0], item, false);
      return is_true(evaluate(*statement.condition));
    };
  }
  const Taken taken(budget_, items.size() * sizeof(Value));
  std::shared_ptr<Loop> loop;
  const bool has_loop = statement.loop.function_level >= 0;
  if (has_loop) {
    loop = std::make_shared<Loop>(&budget_, std::move(items), accepts, depth);
    if (statement.recursive) loop->set_recursion(statement, activation_->outer);
  }
  bool none_finished = true;  // no turn ran to its end: then `else` is for this loop
  Flow leaving = Flow::kNext;
  for (size_t i = 0;; ++i) {
    std::optional<Value> item;
    if (has_loop) {
      item = loop->next();
    } else {
      while (i < items.size() && accepts != nullptr && !accepts(items[i])) ++i;
      if (i < items.size()) item = items[i];
    }
    if (!item) break;
    budget_.step();
    assign(*statement.targets[0], *item, false);
    if (has_loop) slot(statement.loop) = Value(Kind::kLoop, loop);
    enter(statement.scope);
    leaving = execute(statement.body);
    if (leaving == Flow::kBreak) break;
    if (leaving == Flow::kNext) none_finished = false;
  }
  if (loop != nullptr) loop->finish();
  leave(statement.scope);
  if (statement.condition != nullptr) leave(statement.condition_scope);
  if (none_finished && !statement.otherwise.empty()) {
    enter(statement.otherwise_scope);
    const Flow flow = execute(statement.otherwise);
    leave(statement.otherwise_scope);
    return flow;
  }
  return Flow::kNext;
}

Text Machine::run_recursive_loop(const Statement& statement, const std::shared_ptr<Activation>& outer,
                                 const Value& items, int depth) {
  const Nested nested(*this);
  RunningFunction function(*this, statement.function, outer);
  execute_for(statement, items, depth);
  return function.take();
}

void Machine::capture() {
  if (activation_->captured) return;
  activation_->captured = true;
  keep(activation_);
}

Value Machine::macro_value(const Statement& statement) {
  capture();
  return {Kind::kFunction, std::make_shared<Macro>(&budget_, statement, activation_)};
}

Text Machine::run_macro(const Statement& macro, const std::shared_ptr<Activation>& outer, Arguments& arguments) {
  const Nested nested(*this);
  const int called_at = line_;
  RunningFunction function(*this, macro.function, outer);
  const size_t n_parameters = macro.parameters.size();
  const size_t n_positional = std::min(arguments.positional.size(), n_parameters);
  auto& keyword = arguments.keyword;
  const auto pop = [&](TextView name) -> std::optional<Value> {
    const auto found = std::find_if(keyword.begin(), keyword.end(), [&](const auto& one) { return one.first == name; });
    if (found == keyword.end()) return std::nullopt;
    Value value = std::move(found->second);
    keyword.erase(found);
    return value;
  };
  bool found_caller = false;
  for (size_t i = 0; i < n_parameters; ++i) {
    const Parameter& parameter = macro.parameters[i];
    if (i < n_positional) {
      slot(parameter.slot) = arguments.positional[i];
      found_caller = found_caller || (parameter.name == "caller" && n_positional == n_parameters);
      continue;
    }
    if (auto value = pop(parameter.name_text)) slot(parameter.slot) = *value;
    found_caller = found_caller || parameter.name == "caller";
  }
  if (macro.caller.function_level >= 0 && !found_caller) {
    const std::optional<Value> caller = pop(to_text("caller"));
    slot(macro.caller) = caller && !caller->is(Kind::kNone) ? *caller : Value::undefined("No caller defined");
  }
  if (macro.keywords.function_level >= 0) {
    auto dict = std::make_shared<DictObject>(&budget_);
    for (auto& [name, value] : keyword) dict->set(make_text(budget_, Text(name)), std::move(value), budget_);
    slot(macro.keywords) = Value(Kind::kDict, std::move(dict));
  } else if (!keyword.empty()) {
    throw template_error(
        fmt::format("macro '{}' takes no keyword argument {}", macro.name, quote(to_utf8(keyword[0].first))));
  }
  if (macro.extra.function_level >= 0) {
    slot(macro.extra) = make_tuple(
        budget_,
        Values(arguments.positional.begin() + static_cast<std::ptrdiff_t>(n_positional), arguments.positional.end()));
  } else if (arguments.positional.size() > n_parameters) {
    throw template_error(fmt::format("macro '{}' takes not more than {} argument(s)", macro.name, n_parameters));
  }
  enter(macro.scope);
  for (const Parameter& parameter : macro.parameters) {
    if (!is_missing(slot(parameter.slot))) continue;
    const Value value = parameter.otherwise != nullptr
                            ? evaluate(*parameter.otherwise)
                            : Value::undefined(fmt::format("parameter '{}' was not provided", parameter.name));
    slot(parameter.slot) = value;
  }
  execute(macro.body);
  line_ = called_at;
  return function.take();
}

// --- variables ---

Value& Machine::slot(const Slot& slot) {
  Activation* activation = activation_.get();
  while (activation->level > slot.function_level) activation = activation->outer.get();
  return activation->slots[static_cast<size_t>(slot.index)];
}

Value Machine::resolve_context(const std::string& name) const {
  const auto found = context_.find(name);
  return found == context_.end() ? Value() : found->second;
}

void Machine::assign(const Expression& target, const Value& value, bool top_level) {
  switch (target.kind) {
    case ExpressionKind::kTuple: {
      const Values items = iterate(value, budget_);
      if (items.size() != target.parts.size())
        throw template_error(fmt::format("{} values to unpack (expected {}, got {})",
                                         items.size() < target.parts.size() ? "not enough" : "too many",
                                         target.parts.size(), items.size()));
      for (size_t i = 0; i < items.size(); ++i) assign(*target.parts[i], items[i], top_level);
      break;
    }
    case ExpressionKind::kNamespaceReference: {
      const Value space = slot(target.slot);
      if (!space.is(Kind::kNamespace)) throw template_error("cannot assign attribute on non-namespace object");
      if (target.attribute.starts_with(U'_'))
        throw template_error("Chat templates cannot store underscore-prefixed attributes on a namespace");
      space.as<NamespaceObject>().set(target.attribute, value, budget_);
      break;
    }
    default:
      slot(target.slot) = value;
      if (top_level) context_[target.name] = value;
  }
}

void Machine::write(const Value& value) {
  if (value.is_text())
    out_->add(value.text());
  else
    out_->add(printed(value, budget_));
}

// --- expressions ---

Value Machine::evaluate(const Expression& expression) {
  const Nested nested(*this);
  switch (expression.kind) {
    case ExpressionKind::kConstant: return expression.constant;
    case ExpressionKind::kName: return evaluate_name(expression);
    case ExpressionKind::kList:
    case ExpressionKind::kTuple: return evaluate_list(expression);
    case ExpressionKind::kDict: return evaluate_dict(expression);
    case ExpressionKind::kAttribute: {
      const Value value = evaluate(*expression.parts[0]);
      line_ = expression.line;
      return get_attribute(value, expression.attribute);
    }
    case ExpressionKind::kItem: {
      const Value value = evaluate(*expression.parts[0]);
      const Value key = evaluate(*expression.parts[1]);
      line_ = expression.line;
      return get_item(value, key);
    }
    case ExpressionKind::kSlice: return evaluate_slice(expression);
    case ExpressionKind::kCall: return evaluate_call(expression, nullptr);
    case ExpressionKind::kFilter: return evaluate_filter(expression);
    case ExpressionKind::kTest: return evaluate_test(expression);
    case ExpressionKind::kNot: return !is_true(evaluate(*expression.parts[0]));
    case ExpressionKind::kNegative: return negate(evaluate(*expression.parts[0]));
    case ExpressionKind::kPositive: return negate(negate(evaluate(*expression.parts[0])));
    case ExpressionKind::kAnd: {
      Value left = evaluate(*expression.parts[0]);
      return is_true(left) ? evaluate(*expression.parts[1]) : left;
    }
    case ExpressionKind::kOr: {
      Value left = evaluate(*expression.parts[0]);
      return is_true(left) ? left : evaluate(*expression.parts[1]);
    }
    case ExpressionKind::kCalculate: return evaluate_calculation(expression);
    case ExpressionKind::kConcatenate: return evaluate_concatenation(expression);
    case ExpressionKind::kCompare: return evaluate_comparison(expression);
    case ExpressionKind::kConditional:
      if (is_true(evaluate(*expression.parts[0]))) return evaluate(*expression.parts[1]);
      if (expression.parts[2] != nullptr) return evaluate(*expression.parts[2]);
      return Value::undefined(fmt::format(
          "the inline if-expression on line {} evaluated to false and no else section was defined.", expression.line));
    case ExpressionKind::kNamespaceReference: break;  // a target only
  }
  return {};
}

Value Machine::evaluate_name(const Expression& expression) {
  const Value& value = slot(expression.slot);
  return is_missing(value) ? Value::undefined(fmt::format("'{}' is undefined", expression.name)) : value;
}

Value Machine::evaluate_list(const Expression& expression) {
  Values items;
  items.reserve(expression.parts.size());
  for (const ExpressionPtr& part : expression.parts) items.push_back(evaluate(*part));
  return expression.kind == ExpressionKind::kList ? make_list(budget_, std::move(items))
                                                  : make_tuple(budget_, std::move(items));
}

Value Machine::evaluate_dict(const Expression& expression) {
  auto dict = std::make_shared<DictObject>(&budget_);
  for (size_t i = 0; i + 1 < expression.parts.size(); i += 2) {
    const Value key = evaluate(*expression.parts[i]);
    dict->set(key, evaluate(*expression.parts[i + 1]), budget_);
  }
  return {Kind::kDict, std::move(dict)};
}

Value Machine::evaluate_slice(const Expression& expression) {
  const Value value = evaluate(*expression.parts[0]);
  const auto part = [&](size_t i) {
    return expression.parts[i] == nullptr ? Value::none() : evaluate(*expression.parts[i]);
  };
  const Value start = part(1), stop = part(2), step = part(3);
  line_ = expression.line;
  return slice(value, start, stop, step, budget_);
}

void Machine::evaluate_arguments(const std::vector<Argument>& arguments, Arguments& out) {
  for (const Argument& argument : arguments) {
    Value value = evaluate(*argument.value);
    switch (argument.kind) {
      case Argument::Kind::kPositional: out.positional.push_back(std::move(value)); break;
      case Argument::Kind::kKeyword: out.keyword.emplace_back(argument.keyword, std::move(value)); break;
      case Argument::Kind::kList:
        for (Value& item : iterate(value, budget_)) out.positional.push_back(std::move(item));
        break;
      case Argument::Kind::kDict: {
        if (!value.is(Kind::kDict)) {
          require_defined(value);
          throw template_error(fmt::format("argument after ** must be a mapping, not {}", type_name(value)));
        }
        for (const auto& [key, inner] : value.dict().entries) {
          if (!key.is_text()) throw template_error("keywords must be strings");
          for (const auto& known : out.keyword) {
            budget_.charge(4);
            if (known.first == key.text())
              throw template_error(
                  fmt::format("got multiple values for keyword argument {}", quote(to_utf8(key.text()))));
          }
          out.keyword.emplace_back(key.text(), inner);
        }
        break;
      }
    }
    if (out.positional.size() + out.keyword.size() > kMaxArguments)
      throw template_error(fmt::format("a call with more than {} arguments", kMaxArguments));
  }
}

Value Machine::evaluate_call(const Expression& expression, const Value* caller) {
  const Value function = evaluate(*expression.parts[0]);
  Arguments arguments;
  evaluate_arguments(expression.arguments, arguments);
  if (caller != nullptr) {
    for (const auto& known : arguments.keyword)
      if (to_utf8(known.first) == "caller") throw template_error("got multiple values for keyword argument 'caller'");
    arguments.keyword.emplace_back(to_text("caller"), *caller);
  }
  line_ = expression.line;
  return call(function, arguments);
}

Value Machine::call(const Value& function, Arguments& arguments) {
  const Nested nested(*this);
  require_defined(function);
  if (!function.is(Kind::kFunction) && !function.is(Kind::kLoop))
    throw template_error(fmt::format("'{}' object is not callable", type_name(function)));
  return function.as<Function>().call(*this, arguments);
}

Value Machine::evaluate_filter(const Expression& expression) {
  const Value value =
      expression.parts[0] != nullptr ? evaluate(*expression.parts[0]) : make_text(budget_, std::move(filter_input_));
  Arguments arguments;
  evaluate_arguments(expression.arguments, arguments);
  line_ = expression.line;
  return filter(expression.name, value, arguments);
}

bool Machine::evaluate_test(const Expression& expression) {
  const Value value = evaluate(*expression.parts[0]);
  Arguments arguments;
  evaluate_arguments(expression.arguments, arguments);
  line_ = expression.line;
  return test(expression.name, value, arguments);
}

Value Machine::filter(std::string_view name, const Value& value, Arguments& arguments) {
  const Nested nested(*this);
  return apply_filter(*this, name, value, arguments);
}

bool Machine::test(std::string_view name, const Value& value, Arguments& arguments) {
  const Nested nested(*this);
  return apply_test(*this, name, value, arguments);
}

Value Machine::evaluate_calculation(const Expression& expression) {
  const Value left = evaluate(*expression.parts[0]);
  const Value right = evaluate(*expression.parts[1]);
  line_ = expression.line;
  return calculate(expression.calculation, left, right, budget_);
}

Value Machine::evaluate_concatenation(const Expression& expression) {
  Values parts;
  for (const ExpressionPtr& part : expression.parts) parts.push_back(evaluate(*part));
  Text text;
  for (const Value& part : parts)
    append(text, part.is_text() ? TextView(part.text()) : TextView(printed(part, budget_)), budget_);
  return make_text(budget_, std::move(text));
}

bool Machine::evaluate_comparison(const Expression& expression) {
  Value left = evaluate(*expression.parts[0]);
  for (size_t i = 0; i < expression.comparisons.size(); ++i) {
    Value right = evaluate(*expression.parts[i + 1]);
    line_ = expression.line;
    bool holds = false;
    switch (expression.comparisons[i]) {
      case Comparison::kEqual: holds = equal(left, right, budget_); break;
      case Comparison::kNotEqual: holds = !equal(left, right, budget_); break;
      case Comparison::kLess: holds = less(left, right, budget_); break;
      case Comparison::kGreater: holds = less(right, left, budget_); break;
      case Comparison::kLessEqual: holds = less(left, right, budget_) || equal(left, right, budget_); break;
      case Comparison::kGreaterEqual: holds = less(right, left, budget_) || equal(left, right, budget_); break;
      case Comparison::kIn: holds = contains(right, left, budget_); break;
      case Comparison::kNotIn: holds = !contains(right, left, budget_); break;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

// --- attributes and items ---

Value Machine::get_attribute(const Value& value, TextView name) {
  require_defined(value);
  const std::string utf8 = to_utf8(name);
  if (utf8.starts_with("__") && utf8.ends_with("__"))
    return Value::undefined(
        fmt::format("access to attribute {} of '{}' object is unsafe.", quote(utf8), type_name(value)));
  if (auto found = built_in_attribute(*this, value, utf8)) return *found;
  if (value.is(Kind::kDict)) {
    budget_.charge(16 + name.size());
    if (const Value* found = value.dict().find(name)) return *found;
  }
  return Value::undefined(fmt::format("'{}' has no attribute {}", named(value), quote(utf8)));
}

Value Machine::get_item(const Value& value, const Value& key) {
  require_defined(value);
  if (value.is(Kind::kDict)) {
    if (key.is(Kind::kList) || key.is(Kind::kDict))
      return Value::undefined(fmt::format("{} has no element of an unhashable type", named(value)));
    if (const Value* found = value.dict().find(key, budget_)) return *found;
  } else if (key.is_integral()) {
    if (auto found = index(value, key.integer(), budget_)) return *found;
  }
  if (!key.is_text())
    return Value::undefined(fmt::format("{} has no element {}", named(value),
                                        key.is_integral() ? integer_text(key.integer()) : std::string("of this key")));
  const std::string name = to_utf8(key.text());
  if (name.starts_with("__") && name.ends_with("__"))
    return Value::undefined(
        fmt::format("access to attribute {} of '{}' object is unsafe.", quote(name), type_name(value)));
  if (auto found = built_in_attribute(*this, value, name)) return *found;
  return Value::undefined(fmt::format("'{}' has no attribute {}", named(value), quote(name)));
}

}  // namespace beryl::jinja
