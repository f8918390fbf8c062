// Where each variable of a template lives.
//
// Jinja compiles to Python functions, and decides for each block what a name means in it: a parameter, a value of the
// context, another name for the variable of a block outside, or nothing yet. Templates can see that (a name that is set
// in one branch of an `if`, a `set` within a loop that is gone after it), so it is decided here by the same rules:
//   * `if` opens no scope; what its branches set is the context's or the outer variable's value where they did not.
//   * loops, with, set and filter blocks open one; a variable that is set in them begins as the outer one of its name.
//   * macros, callers, blocks and recursive loops are functions; all but blocks see the variables around them, as they
//     are when the function runs.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "text/jinja_syntax.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

class Symbols {
 public:
  Symbols(Symbols* parent, FunctionScope* function)
      : parent_(parent), function_(function), slots_(std::make_shared<std::map<std::string, Slot>>()) {}

  const Slot* find(const std::string& name) const {
    const auto found = slots_->find(name);
    if (found != slots_->end() && known_.contains(name)) return &found->second;
    return parent_ == nullptr ? nullptr : parent_->find(name);
  }
  Slot slot(const std::string& name) const {
    const Slot* found = find(name);
    BERYL_CHECK(found != nullptr, "a name was seen before its variable is asked for");
    return *found;
  }

  void load(const std::string& name) {
    if (find(name) == nullptr) define(name, {.from = Load::From::kContext});
  }
  void store(const std::string& name) {
    stored_.insert(name);
    if (known_.contains(name)) return;
    const Slot* outer = parent_ == nullptr ? nullptr : parent_->find(name);
    if (outer != nullptr)
      define(name, {.from = Load::From::kOuter, .outer = *outer});
    else
      define(name, {.from = Load::From::kNothing});
  }
  void declare_parameter(const std::string& name) {
    stored_.insert(name);
    define(name, {.from = Load::From::kParameter});
  }
  // Branches of an `if`, each a copy of these symbols that saw more.
  void merge(const std::vector<Symbols>& branches) {
    std::set<std::string> stored_there;
    for (const Symbols& branch : branches) stored_there.insert(branch.stored_.begin(), branch.stored_.end());
    for (const std::string& name : stored_) stored_there.erase(name);
    for (const Symbols& branch : branches) {
      known_.insert(branch.known_.begin(), branch.known_.end());
      stored_.insert(branch.stored_.begin(), branch.stored_.end());
      for (const auto& [name, load] : branch.loads_) loads_.insert_or_assign(name, load);
    }
    for (const std::string& name : stored_there) {
      const Slot* outer = parent_ == nullptr ? nullptr : parent_->find(name);
      define(name,
             outer != nullptr ? Load{.from = Load::From::kOuter, .outer = *outer} : Load{.from = Load::From::kContext});
    }
  }

  Scope scope() const {
    Scope scope;
    for (const auto& [name, load] : loads_) scope.loads.push_back(load);
    return scope;
  }

 private:
  void define(const std::string& name, Load load) {
    const auto [place, is_new] = slots_->try_emplace(name, Slot{function_->level, 0});
    if (is_new) place->second.index = function_->n_slots++;
    known_.insert(name);
    load.slot = place->second;
    load.name = name;
    loads_.insert_or_assign(name, std::move(load));
  }

  Symbols* parent_;
  FunctionScope* function_;
  std::shared_ptr<std::map<std::string, Slot>> slots_;  // shared with the copies for branches
  std::set<std::string> known_, stored_;
  std::map<std::string, Load> loads_;
};

// --- what a scope's own statements mention, without those of scopes within it ---

void see_loads(Symbols& symbols, const Expression* expression) {
  if (expression == nullptr) return;
  if (expression->kind == ExpressionKind::kName || expression->kind == ExpressionKind::kNamespaceReference)
    symbols.load(expression->name);
  for (const ExpressionPtr& part : expression->parts) see_loads(symbols, part.get());
  for (const Argument& argument : expression->arguments) see_loads(symbols, argument.value.get());
}

void see_target(Symbols& symbols, const Expression& target, bool parameter) {
  if (target.kind == ExpressionKind::kTuple) {
    for (const ExpressionPtr& part : target.parts) see_target(symbols, *part, parameter);
  } else if (target.kind == ExpressionKind::kNamespaceReference) {
    symbols.load(target.name);
  } else if (parameter) {
    symbols.declare_parameter(target.name);
  } else {
    symbols.store(target.name);
  }
}

void see(Symbols& symbols, const Statements& statements);

void see(Symbols& symbols, const Statement& statement) {
  switch (statement.kind) {
    case StatementKind::kIf: {
      see_loads(symbols, statement.branches[0].first.get());
      std::vector<Symbols> branches(3, symbols);  // if, elif, else
      see(branches[0], statement.branches[0].second);
      for (size_t i = 1; i < statement.branches.size(); ++i) {
        const auto& [condition, body] = statement.branches[i];
        if (condition == nullptr) {
          see(branches[2], body);
          continue;
        }
        see_loads(branches[1], condition.get());
        std::vector<Symbols> inner(1, branches[1]);
        see(inner[0], body);
        branches[1].merge(inner);
      }
      symbols.merge(branches);
      break;
    }
    case StatementKind::kFor:
    case StatementKind::kOutput:
    case StatementKind::kCallBlock:
    case StatementKind::kFilterBlock:
    case StatementKind::kWith:
      for (const ExpressionPtr& expression : statement.expressions) see_loads(symbols, expression.get());
      break;
    case StatementKind::kSet:
      see_loads(symbols, statement.expressions[0].get());
      see_target(symbols, *statement.targets[0], false);
      break;
    case StatementKind::kSetBlock: see_target(symbols, *statement.targets[0], false); break;
    case StatementKind::kMacro: symbols.store(statement.name); break;
    default: break;
  }
}

void see(Symbols& symbols, const Statements& statements) {
  for (const auto& statement : statements) see(symbols, *statement);
}

// --- whether a body uses a name that it does not itself set first ---

class Mentions {
 public:
  Mentions(const Statements& body, std::string_view name) : name_(name) { visit(body); }
  bool found() const { return found_; }

 private:
  void visit(const Expression* expression, bool store = false) {
    if (expression == nullptr || found_ || hidden_) return;
    if (expression->kind == ExpressionKind::kName && expression->name == name_) (store ? hidden_ : found_) = true;
    for (const ExpressionPtr& part : expression->parts) visit(part.get(), store);
    for (const Argument& argument : expression->arguments) visit(argument.value.get());
  }
  void visit(const Statements& statements) {
    for (const auto& statement : statements) {
      if (found_ || hidden_) return;
      const Statement& s = *statement;
      if (s.kind == StatementKind::kBlock) continue;
      for (const ExpressionPtr& target : s.targets) visit(target.get(), true);
      if (s.kind != StatementKind::kFilterBlock)
        for (const ExpressionPtr& expression : s.expressions) visit(expression.get());
      for (const Parameter& parameter : s.parameters) hidden_ = hidden_ || (!found_ && parameter.name == name_);
      for (const Parameter& parameter : s.parameters) visit(parameter.otherwise.get());
      for (const auto& [condition, body] : s.branches) {
        visit(condition.get());
        visit(body);
      }
      visit(s.body);
      visit(s.otherwise);
      visit(s.condition.get());
      if (s.kind == StatementKind::kFilterBlock)
        for (const ExpressionPtr& expression : s.expressions) visit(expression.get());
    }
  }

  std::string_view name_;
  bool found_ = false;
  bool hidden_ = false;  // set before it was used
};

// --- the second pass: every name gets its slot, every scope its loads ---

struct Place {
  Symbols* symbols;
  FunctionScope* function;
  int loops = 0;             // around, within this function
  bool in_any_loop = false;  // around, anywhere
  bool top_level = false;
  bool soft = false;  // within an `if`: filters may be unknown until they are needed
};

class Resolver {
 public:
  void run(Syntax& syntax) {
    Symbols symbols(nullptr, &syntax.function);
    see(symbols, syntax.body);
    syntax.scope = symbols.scope();
    visit(syntax.body, {.symbols = &symbols, .function = &syntax.function, .top_level = true});
  }

 private:
  void visit(Expression* expression, const Place& place) {
    if (expression == nullptr) return;
    Place inner = place;
    switch (expression->kind) {
      case ExpressionKind::kName:
      case ExpressionKind::kNamespaceReference: expression->slot = place.symbols->slot(expression->name); break;
      case ExpressionKind::kConditional: inner.soft = true; break;
      case ExpressionKind::kFilter:
        if (!place.soft && !is_filter(expression->name))
          throw syntax_error(expression->line, fmt::format("No filter named {}.", quote(expression->name)));
        break;
      case ExpressionKind::kTest:
        if (!place.soft && !is_test(expression->name))
          throw syntax_error(expression->line, fmt::format("No test named {}.", quote(expression->name)));
        break;
      default: break;
    }
    for (const ExpressionPtr& part : expression->parts) visit(part.get(), inner);
    for (const Argument& argument : expression->arguments) visit(argument.value.get(), inner);
  }

  void check_store(const Expression& target, const Place& place) {
    if (target.kind == ExpressionKind::kName && target.name == "loop" && place.in_any_loop)
      throw syntax_error(target.line, "Can't assign to special loop variable in for-loop target");
    for (const ExpressionPtr& part : target.parts) check_store(*part, place);
  }

  void visit(Statements& statements, const Place& place) {
    for (const auto& statement : statements) visit(*statement, place);
  }

  void visit(Statement& s, const Place& place) {
    s.top_level = place.top_level;
    switch (s.kind) {
      case StatementKind::kText:
      case StatementKind::kNeedsLoader: break;
      case StatementKind::kOutput:
        for (const ExpressionPtr& expression : s.expressions) visit(expression.get(), place);
        break;
      case StatementKind::kIf: {
        Place soft = place;
        soft.soft = true;
        for (auto& [condition, body] : s.branches) {
          visit(condition.get(), soft);
          visit(body, soft);
        }
        break;
      }
      case StatementKind::kFor: visit_for(s, place); break;
      case StatementKind::kSet:
        check_store(*s.targets[0], place);
        visit(s.expressions[0].get(), place);
        visit(s.targets[0].get(), place);
        break;
      case StatementKind::kSetBlock: {
        check_store(*s.targets[0], place);
        visit(s.targets[0].get(), place);
        Symbols symbols(place.symbols, place.function);
        see(symbols, s.body);
        for (const ExpressionPtr& filter : s.expressions) see_loads(symbols, filter.get());
        const Place inner = within(place, symbols);
        s.scope = symbols.scope();
        visit(s.body, inner);
        for (const ExpressionPtr& filter : s.expressions) visit(filter.get(), inner);
        break;
      }
      case StatementKind::kMacro:
        s.slot = place.symbols->slot(s.name);
        visit_function(s, place);
        break;
      case StatementKind::kCallBlock:
        visit_function(s, place);
        visit(s.expressions[0].get(), place);
        break;
      case StatementKind::kGeneration: visit_function(s, place); break;
      case StatementKind::kFilterBlock: {
        Symbols symbols(place.symbols, place.function);
        see(symbols, s.body);
        see_loads(symbols, s.expressions[0].get());
        const Place inner = within(place, symbols);
        s.scope = symbols.scope();
        visit(s.body, inner);
        visit(s.expressions[0].get(), inner);
        break;
      }
      case StatementKind::kWith: {
        for (const ExpressionPtr& value : s.expressions) visit(value.get(), place);
        Symbols symbols(place.symbols, place.function);
        for (const ExpressionPtr& target : s.targets) see_target(symbols, *target, true);
        see(symbols, s.body);
        const Place inner = within(place, symbols);
        s.scope = symbols.scope();
        for (const ExpressionPtr& target : s.targets) visit(target.get(), inner);
        visit(s.body, inner);
        break;
      }
      case StatementKind::kBlock: {  // sees the context only
        Symbols symbols(nullptr, &s.function);
        see(symbols, s.body);
        s.scope = symbols.scope();
        visit(s.body, {.symbols = &symbols, .function = &s.function, .in_any_loop = place.in_any_loop});
        break;
      }
      case StatementKind::kBreak:
      case StatementKind::kContinue:
        if (place.loops == 0)
          throw syntax_error(
              s.line, s.kind == StatementKind::kBreak ? "'break' outside loop" : "'continue' not properly in loop");
        break;
    }
  }

  static Place within(const Place& place, Symbols& symbols) {
    return {.symbols = &symbols, .function = place.function, .loops = place.loops, .in_any_loop = place.in_any_loop};
  }

  void visit_for(Statement& s, const Place& place) {
    visit(s.expressions[0].get(), place);
    FunctionScope* function = place.function;
    if (s.recursive) {
      s.function.level = place.function->level + 1;
      function = &s.function;
    }
    Place inner{
        .symbols = nullptr, .function = function, .loops = s.recursive ? 1 : place.loops + 1, .in_any_loop = true};
    check_store(*s.targets[0], inner);

    Symbols symbols(place.symbols, function);
    if (s.recursive || Mentions(s.body, "loop").found()) {
      symbols.declare_parameter("loop");
      s.loop = symbols.slot("loop");
    }
    see_target(symbols, *s.targets[0], true);
    see(symbols, s.body);
    s.scope = symbols.scope();
    inner.symbols = &symbols;
    visit(s.targets[0].get(), inner);
    visit(s.body, inner);

    Symbols otherwise(place.symbols, function);
    see(otherwise, s.otherwise);
    s.otherwise_scope = otherwise.scope();
    Place after = inner;
    after.symbols = &otherwise;
    after.loops = s.recursive ? 0 : place.loops;
    visit(s.otherwise, after);

    if (s.condition != nullptr) {
      Symbols test(place.symbols, function);
      see_target(test, *s.condition_targets[0], true);
      see_loads(test, s.condition.get());
      s.condition_scope = test.scope();
      Place condition = inner;
      condition.symbols = &test;
      visit(s.condition_targets[0].get(), condition);
      visit(s.condition.get(), condition);
    }
  }

  void visit_function(Statement& s, const Place& place) {
    s.function.level = place.function->level + 1;
    Symbols symbols(place.symbols, &s.function);
    for (const Parameter& parameter : s.parameters) symbols.declare_parameter(parameter.name);
    for (const Parameter& parameter : s.parameters) see_loads(symbols, parameter.otherwise.get());
    see(symbols, s.body);
    const auto special = [&](const char* name, Slot& slot) {
      if (!Mentions(s.body, name).found()) return;
      for (const Parameter& parameter : s.parameters) {
        if (parameter.name != name) continue;
        if (std::string_view(name) == "caller" && parameter.otherwise == nullptr)
          throw syntax_error(s.line,
                             "When defining macros or call blocks the special \"caller\" argument must be "
                             "omitted or be given a default.");
        return;
      }
      symbols.declare_parameter(name);
      slot = symbols.slot(name);
    };
    special("caller", s.caller);
    special("kwargs", s.keywords);
    special("varargs", s.extra);
    s.scope = symbols.scope();
    const Place inner{.symbols = &symbols, .function = &s.function, .in_any_loop = place.in_any_loop};
    for (Parameter& parameter : s.parameters) {
      parameter.slot = symbols.slot(parameter.name);
      visit(parameter.otherwise.get(), inner);
    }
    visit(s.body, inner);
  }
};

}  // namespace

void resolve(Syntax& syntax) { Resolver().run(syntax); }

}  // namespace beryl::jinja
