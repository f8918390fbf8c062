// A template as a tree: what the parser makes and the machine walks.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja_value.h"

namespace beryl::jinja {

// Deepest nesting of expressions and blocks; a chain like a + b + c counts as nesting too.
inline constexpr int kMaxSyntaxDepth = 500;
inline constexpr size_t kMaxTemplateBytes = 1 << 20;

// A variable's place: how many functions (macros, blocks, recursive loops) outwards, and which of its slots.
struct Slot {
  int function_level = -1;  // of the function that owns it; -1: not resolved
  int index = 0;
};

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

enum class ExpressionKind : uint8_t {
  kConstant,  // constant
  kName,      // name, slot
  kList,
  kTuple,      // parts
  kDict,       // parts: key, value, key, value, ...
  kAttribute,  // parts[0] . name
  kItem,       // parts[0] [ parts[1] ]
  kSlice,      // parts[0] [ parts[1] : parts[2] : parts[3] ], absent ones null
  kCall,       // parts[0] ( arguments )
  kFilter,     // parts[0] | name ( arguments ); parts[0] null: the text of the filter's block
  kTest,       // parts[0] is name ( arguments )
  kNot,
  kNegative,
  kPositive,
  kAnd,
  kOr,
  kCalculate,           // calculation of parts[0], parts[1]
  kConcatenate,         // parts ~ ...
  kCompare,             // parts[0] comparisons[0] parts[1] comparisons[1] ...
  kConditional,         // parts[1] if parts[0] else parts[2] (null: undefined)
  kNamespaceReference,  // name . attribute, as a target of set
};

enum class Comparison : uint8_t { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

struct Argument {
  enum class Kind { kPositional, kKeyword, kList, kDict } kind = Kind::kPositional;  // the last two: *a and **a
  Text keyword;
  ExpressionPtr value;
};

struct Expression {
  ExpressionKind kind;
  int line = 0;
  int depth = 1;
  Value constant;
  std::string name;
  Text attribute;  // name as text, for look-ups; a namespace's attribute
  Slot slot;
  Operator calculation = Operator::kAdd;
  std::vector<Comparison> comparisons;
  std::vector<ExpressionPtr> parts;
  std::vector<Argument> arguments;
};

struct Statement;
using Statements = std::vector<std::unique_ptr<Statement>>;

enum class StatementKind : uint8_t {
  kText,         // text
  kOutput,       // expressions
  kIf,           // branches: condition (null: else) and body
  kFor,          // target in expressions[0] if condition, body, otherwise
  kSet,          // target = expressions[0]
  kSetBlock,     // target = body, through the filter expressions[0] if there is one
  kMacro,        // name, parameters, body
  kCallBlock,    // expressions[0] called with body as caller
  kGeneration,   // body: what a model wrote; of no meaning here
  kFilterBlock,  // body through the filter expressions[0]
  kWith,         // targets and expressions, body
  kBlock,        // name, body
  kBreak,
  kContinue,
  kNeedsLoader,  // include, import, extends: an error when it is reached
};

// How a variable begins when its scope is entered.
struct Load {
  enum class From { kParameter, kContext, kOuter, kNothing } from = From::kNothing;
  Slot slot = {};
  Slot outer = {};
  std::string name = {};
};

struct Scope {
  std::vector<Load> loads;
};

// A function of its own: the root, a macro, a caller, a block, a recursive loop.
struct FunctionScope {
  int level = 0;
  int n_slots = 0;
};

struct Parameter {
  std::string name;
  Text name_text;
  Slot slot;
  ExpressionPtr otherwise;  // null: undefined
};

struct Statement {
  StatementKind kind;
  int line = 0;
  Value text;
  std::string name;
  Text name_text;
  std::vector<ExpressionPtr> expressions;
  std::vector<ExpressionPtr> targets;
  ExpressionPtr condition;
  Statements body, otherwise;
  std::vector<std::pair<ExpressionPtr, Statements>> branches;

  // What the resolver fills in.
  Scope scope, otherwise_scope, condition_scope;  // for-loops have three
  std::vector<ExpressionPtr> condition_targets;   // a for-loop's target within condition_scope
  FunctionScope function;
  Slot slot;               // a macro's own name
  bool top_level = false;  // assignments are seen by blocks
  bool recursive = false;
  Slot loop;  // a for-loop's `loop`; level -1: nobody looks at it
  std::vector<Parameter> parameters;
  Slot caller, keywords, extra;  // special names that a macro's body uses; level -1: it does not
};

struct Syntax {
  Statements body;
  Scope scope;
  FunctionScope function;
};

// Throws Error(kBadInput) with the line, for what Jinja would refuse to compile, and beyond the limits.
Syntax parse(std::string_view source);
// The second half of it: where each variable lives.
void resolve(Syntax& syntax);

// Whether Jinja has them, built here or not.
bool is_filter(std::string_view name);
bool is_test(std::string_view name);

Error syntax_error(int line, std::string_view what);

}  // namespace beryl::jinja
