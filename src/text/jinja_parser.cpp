// Jinja's grammar, by recursive descent, from the loosest binding to the tightest:
//   x if c else y | or | and | not | comparisons, in | + - | ~ | * / // % | ** | unary - + | . [] () | filters, tests
#include <fmt/format.h>

#include <algorithm>

#include "text/jinja_lexer.h"
#include "text/jinja_syntax.h"
#include "weights/quote.h"

namespace beryl::jinja {

namespace {

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  Syntax run() {
    Syntax syntax;
    syntax.body = statements({});
    return syntax;
  }

 private:
  // Recursion of the parser itself; a level is some dozen small stack frames.
  class Nested {
   public:
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) throw syntax_error(parser_.line(), "the template is nested too deeply");
    }
    ~Nested() { --parser_.nesting_; }

   private:
    Parser& parser_;
  };
  static constexpr int kMaxNesting = 200;

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  int line() const { return current().line; }
  void next() {
    if (at_ + 1 < tokens_.size()) ++at_;
  }
  bool at(TokenKind kind) const { return current().kind == kind; }
  bool at_op(std::string_view op) const { return at(TokenKind::kOperator) && current().word == op; }
  bool at_name(std::string_view name) const { return at(TokenKind::kName) && current().word == name; }
  bool take_op(std::string_view op) {
    if (!at_op(op)) return false;
    next();
    return true;
  }
  bool take_name(std::string_view name) {
    if (!at_name(name)) return false;
    next();
    return true;
  }
  static std::string describe(const Token& token) {
    switch (token.kind) {
      case TokenKind::kData: return "template data";
      case TokenKind::kVariableBegin: return "begin of print statement";
      case TokenKind::kVariableEnd: return "end of print statement";
      case TokenKind::kBlockBegin: return "begin of statement block";
      case TokenKind::kBlockEnd: return "end of statement block";
      case TokenKind::kText: return "string";
      case TokenKind::kNumber: return "number";
      case TokenKind::kEnd: return "end of template";
      default: return token.word;
    }
  }
  [[noreturn]] void unexpected(std::string_view wanted) const {
    throw syntax_error(line(), fmt::format("expected {}, got {}", wanted, quote(describe(current()))));
  }
  void expect_op(std::string_view op) {
    if (!take_op(op)) unexpected(fmt::format("'{}'", op));
  }
  void expect_name(std::string_view name) {
    if (!take_name(name)) unexpected(fmt::format("'{}'", name));
  }
  void expect(TokenKind kind, std::string_view what) {
    if (!at(kind)) unexpected(what);
    next();
  }
  std::string any_name() {
    if (!at(TokenKind::kName)) unexpected("a name");
    std::string word = current().word;
    next();
    return word;
  }

  ExpressionPtr make(ExpressionKind kind, int at_line) {
    auto expression = std::make_unique<Expression>();
    expression->kind = kind;
    expression->line = at_line;
    return expression;
  }
  // Depth grows along chains too, because running and freeing a tree recurse.
  void adopt(Expression& parent, ExpressionPtr child) {
    if (child != nullptr) {
      parent.depth = std::max(parent.depth, child->depth + 1);
      if (parent.depth > kMaxSyntaxDepth) throw syntax_error(parent.line, "an expression is nested too deeply");
    }
    parent.parts.push_back(std::move(child));
  }
  ExpressionPtr constant(Value value, int at_line) {
    ExpressionPtr expression = make(ExpressionKind::kConstant, at_line);
    expression->constant = std::move(value);
    return expression;
  }

  // --- expressions ---

  ExpressionPtr expression(bool with_conditional = true) {
    const Nested nested(*this);
    return with_conditional ? conditional() : disjunction();
  }

  ExpressionPtr conditional() {
    int at_line = line();
    ExpressionPtr value = disjunction();
    while (take_name("if")) {
      ExpressionPtr choice = make(ExpressionKind::kConditional, at_line);
      adopt(*choice, disjunction());
      adopt(*choice, std::move(value));
      ExpressionPtr otherwise;
      if (take_name("else")) {
        const Nested nested(*this);
        otherwise = conditional();
      }
      adopt(*choice, std::move(otherwise));
      value = std::move(choice);
      at_line = line();
    }
    return value;
  }

  template <class Inner>
  ExpressionPtr chain(ExpressionKind kind, std::string_view word, Inner inner) {
    ExpressionPtr left = inner();
    while (at_name(word)) {
      ExpressionPtr both = make(kind, line());
      next();
      adopt(*both, std::move(left));
      adopt(*both, inner());
      left = std::move(both);
    }
    return left;
  }
  ExpressionPtr disjunction() {
    return chain(ExpressionKind::kOr, "or", [&] { return conjunction(); });
  }
  ExpressionPtr conjunction() {
    return chain(ExpressionKind::kAnd, "and", [&] { return negation(); });
  }

  ExpressionPtr negation() {
    if (!at_name("not")) return comparison();
    const Nested nested(*this);
    ExpressionPtr result = make(ExpressionKind::kNot, line());
    next();
    adopt(*result, negation());
    return result;
  }

  std::optional<Comparison> take_comparison() {
    static constexpr std::pair<std::string_view, Comparison> kSigns[] = {
        {"==", Comparison::kEqual},        {"!=", Comparison::kNotEqual}, {"<=", Comparison::kLessEqual},
        {">=", Comparison::kGreaterEqual}, {"<", Comparison::kLess},      {">", Comparison::kGreater}};
    for (const auto& [sign, comparison] : kSigns)
      if (take_op(sign)) return comparison;
    if (take_name("in")) return Comparison::kIn;
    if (at_name("not") && ahead().kind == TokenKind::kName && ahead().word == "in") {
      next();
      next();
      return Comparison::kNotIn;
    }
    return std::nullopt;
  }

  ExpressionPtr comparison() {
    const int at_line = line();
    ExpressionPtr first = sum();
    ExpressionPtr result;
    while (const auto how = take_comparison()) {
      if (result == nullptr) {
        result = make(ExpressionKind::kCompare, at_line);
        adopt(*result, std::move(first));
      }
      result->comparisons.push_back(*how);
      adopt(*result, sum());
    }
    return result != nullptr ? std::move(result) : std::move(first);
  }

  template <class Inner>
  ExpressionPtr arithmetic(std::initializer_list<std::pair<std::string_view, Operator>> operators, Inner inner) {
    ExpressionPtr left = inner();
    for (;;) {
      const auto found =
          std::find_if(operators.begin(), operators.end(), [&](const auto& one) { return at_op(one.first); });
      if (found == operators.end()) return left;
      ExpressionPtr both = make(ExpressionKind::kCalculate, line());
      next();
      both->calculation = found->second;
      adopt(*both, std::move(left));
      adopt(*both, inner());
      left = std::move(both);
    }
  }
  ExpressionPtr sum() {
    return arithmetic({{"+", Operator::kAdd}, {"-", Operator::kSubtract}}, [&] { return concatenation(); });
  }
  ExpressionPtr concatenation() {
    const int at_line = line();
    ExpressionPtr first = product();
    if (!at_op("~")) return first;
    ExpressionPtr result = make(ExpressionKind::kConcatenate, at_line);
    adopt(*result, std::move(first));
    while (take_op("~")) adopt(*result, product());
    return result;
  }
  ExpressionPtr product() {
    return arithmetic({{"*", Operator::kMultiply},
                       {"/", Operator::kDivide},
                       {"//", Operator::kFloorDivide},
                       {"%", Operator::kModulo}},
                      [&] { return arithmetic({{"**", Operator::kPower}}, [&] { return unary(true); }); });
  }

  ExpressionPtr unary(bool with_filters) {
    const Nested nested(*this);
    const int at_line = line();
    ExpressionPtr result;
    if (at_op("-") || at_op("+")) {
      result = make(at_op("-") ? ExpressionKind::kNegative : ExpressionKind::kPositive, at_line);
      next();
      adopt(*result, unary(false));
    } else {
      result = primary();
    }
    result = postfix(std::move(result));
    return with_filters ? filters_and_tests(std::move(result)) : std::move(result);
  }

  ExpressionPtr primary(bool namespace_targets = false) {
    const Nested nested(*this);
    const Token& token = current();
    const int at_line = token.line;
    if (token.kind == TokenKind::kName) {
      const std::string word = token.word;
      next();
      if (word == "true" || word == "True") return constant(true, at_line);
      if (word == "false" || word == "False") return constant(false, at_line);
      if (word == "none" || word == "None") return constant(Value::none(), at_line);
      if (namespace_targets && take_op(".")) {
        ExpressionPtr reference = make(ExpressionKind::kNamespaceReference, at_line);
        reference->name = word;
        reference->attribute = to_text(any_name());
        return reference;
      }
      ExpressionPtr name = make(ExpressionKind::kName, at_line);
      name->name = word;
      return name;
    }
    if (token.kind == TokenKind::kText) {
      Text text;
      while (at(TokenKind::kText)) {
        text += current().text;
        next();
      }
      return constant(constant_text(std::move(text)), at_line);
    }
    if (token.kind == TokenKind::kNumber) {
      const Value number = token.number;
      next();
      return constant(number, at_line);
    }
    if (take_op("(")) {
      ExpressionPtr inner = tuple({.parenthesized = true});
      expect_op(")");
      return inner;
    }
    if (take_op("[")) {
      ExpressionPtr list = make(ExpressionKind::kList, at_line);
      while (!at_op("]")) {
        if (!list->parts.empty()) expect_op(",");
        if (at_op("]")) break;
        adopt(*list, expression());
      }
      expect_op("]");
      return list;
    }
    if (take_op("{")) {
      ExpressionPtr dict = make(ExpressionKind::kDict, at_line);
      while (!at_op("}")) {
        if (!dict->parts.empty()) expect_op(",");
        if (at_op("}")) break;
        adopt(*dict, expression());
        expect_op(":");
        adopt(*dict, expression());
      }
      expect_op("}");
      return dict;
    }
    throw syntax_error(at_line, fmt::format("unexpected {}", quote(describe(token))));
  }

  struct TupleForm {
    bool names_only = false;  // targets
    bool with_conditional = true;
    bool parenthesized = false;  // may be empty
    bool namespace_targets = false;
    std::string_view end_word = {};
  };

  // An expression, or several with commas between.
  ExpressionPtr tuple(const TupleForm& form) {
    const int at_line = line();
    const auto at_end = [&] {
      return at(TokenKind::kVariableEnd) || at(TokenKind::kBlockEnd) || at_op(")") ||
             (!form.end_word.empty() && at_name(form.end_word));
    };
    std::vector<ExpressionPtr> parts;
    bool is_tuple = false;
    for (;;) {
      if (!parts.empty()) expect_op(",");
      if (at_end()) break;
      parts.push_back(form.names_only ? primary(form.namespace_targets) : expression(form.with_conditional));
      if (!at_op(",")) break;
      is_tuple = true;
    }
    if (!is_tuple) {
      if (!parts.empty()) return std::move(parts.front());
      if (!form.parenthesized) unexpected("an expression");
    }
    ExpressionPtr result = make(ExpressionKind::kTuple, at_line);
    for (ExpressionPtr& part : parts) adopt(*result, std::move(part));
    return result;
  }

  ExpressionPtr postfix(ExpressionPtr value) {
    for (;;) {
      const int at_line = line();
      if (take_op(".")) {
        if (at(TokenKind::kName)) {
          ExpressionPtr attribute = make(ExpressionKind::kAttribute, at_line);
          attribute->name = any_name();
          attribute->attribute = to_text(attribute->name);
          adopt(*attribute, std::move(value));
          value = std::move(attribute);
        } else if (at(TokenKind::kNumber) && current().number.is(Kind::kInteger)) {
          ExpressionPtr item = make(ExpressionKind::kItem, at_line);
          adopt(*item, std::move(value));
          adopt(*item, constant(current().number, at_line));
          next();
          value = std::move(item);
        } else {
          unexpected("a name or number");
        }
      } else if (take_op("[")) {
        value = subscript(std::move(value), at_line);
      } else if (at_op("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr value, int at_line) {
    std::vector<ExpressionPtr> parts;
    ExpressionPtr slice;
    while (!at_op("]")) {
      if (!parts.empty() || slice != nullptr) expect_op(",");
      if (slice != nullptr) throw syntax_error(at_line, "a slice among several subscripts is not supported");
      ExpressionPtr start;
      if (!at_op(":")) start = expression();
      if (!at_op(":")) {
        parts.push_back(std::move(start));
        continue;
      }
      if (!parts.empty()) throw syntax_error(at_line, "a slice among several subscripts is not supported");
      next();
      slice = make(ExpressionKind::kSlice, at_line);
      ExpressionPtr stop, step;
      if (!at_op(":") && !at_op("]") && !at_op(",")) stop = expression();
      if (take_op(":") && !at_op("]") && !at_op(",")) step = expression();
      adopt(*slice, nullptr);  // the value, below
      adopt(*slice, std::move(start));
      adopt(*slice, std::move(stop));
      adopt(*slice, std::move(step));
    }
    expect_op("]");
    if (slice != nullptr) {
      slice->depth = std::max(slice->depth, value->depth + 1);
      if (slice->depth > kMaxSyntaxDepth) throw syntax_error(at_line, "an expression is nested too deeply");
      slice->parts[0] = std::move(value);
      return slice;
    }
    ExpressionPtr item = make(ExpressionKind::kItem, at_line);
    adopt(*item, std::move(value));
    if (parts.size() == 1) {
      adopt(*item, std::move(parts.front()));
    } else {
      ExpressionPtr key = make(ExpressionKind::kTuple, at_line);
      for (ExpressionPtr& part : parts) adopt(*key, std::move(part));
      adopt(*item, std::move(key));
    }
    return item;
  }

  void arguments(Expression& of) {
    expect_op("(");
    bool seen_keyword = false, seen_list = false, seen_dict = false;
    const auto require = [&](bool right) {
      if (!right) throw syntax_error(of.line, "invalid syntax for function call expression");
    };
    bool first = true;
    while (!at_op(")")) {
      if (!first) {
        expect_op(",");
        if (at_op(")")) break;
      }
      first = false;
      Argument argument;
      if (take_op("*")) {
        require(!seen_list && !seen_dict);
        seen_list = true;
        argument.kind = Argument::Kind::kList;
      } else if (take_op("**")) {
        require(!seen_dict);
        seen_dict = true;
        argument.kind = Argument::Kind::kDict;
      } else if (at(TokenKind::kName) && ahead().kind == TokenKind::kOperator && ahead().word == "=") {
        require(!seen_dict);
        seen_keyword = true;
        argument.kind = Argument::Kind::kKeyword;
        argument.keyword = to_text(any_name());
        for (const Argument& other : of.arguments)
          if (other.kind == Argument::Kind::kKeyword && other.keyword == argument.keyword)
            throw syntax_error(of.line, fmt::format("keyword argument repeated: {}", to_utf8(argument.keyword)));
        next();
      } else {
        require(!seen_list && !seen_dict && !seen_keyword);
      }
      argument.value = expression();
      of.depth = std::max(of.depth, argument.value->depth + 1);
      if (of.depth > kMaxSyntaxDepth) throw syntax_error(of.line, "an expression is nested too deeply");
      of.arguments.push_back(std::move(argument));
    }
    expect_op(")");
  }

  ExpressionPtr call(ExpressionPtr function) {
    ExpressionPtr result = make(ExpressionKind::kCall, line());
    adopt(*result, std::move(function));
    arguments(*result);
    return result;
  }

  std::string dotted_name() {
    std::string name = any_name();
    while (take_op(".")) name.append(1, '.').append(any_name());
    return name;
  }

  ExpressionPtr one_filter(ExpressionPtr value) {
    ExpressionPtr filter = make(ExpressionKind::kFilter, line());
    adopt(*filter, std::move(value));
    filter->name = dotted_name();
    if (at_op("(")) arguments(*filter);
    return filter;
  }

  ExpressionPtr test(ExpressionPtr value) {
    const int at_line = line();
    next();  // is
    const bool negated = take_name("not");
    ExpressionPtr result = make(ExpressionKind::kTest, at_line);
    adopt(*result, std::move(value));
    result->name = dotted_name();
    const bool name_argument = at(TokenKind::kName) && !at_name("else") && !at_name("or") && !at_name("and");
    if (at_op("(")) {
      arguments(*result);
    } else if (name_argument || at(TokenKind::kText) || at(TokenKind::kNumber) || at_op("[") || at_op("{")) {
      if (at_name("is")) throw syntax_error(line(), "You cannot chain multiple tests with is");
      Argument argument;
      argument.value = postfix(primary());
      result->depth = std::max(result->depth, argument.value->depth + 1);
      if (result->depth > kMaxSyntaxDepth) throw syntax_error(at_line, "an expression is nested too deeply");
      result->arguments.push_back(std::move(argument));
    }
    if (!negated) return result;
    ExpressionPtr inverse = make(ExpressionKind::kNot, at_line);
    adopt(*inverse, std::move(result));
    return inverse;
  }

  ExpressionPtr filters_and_tests(ExpressionPtr value) {
    for (;;) {
      if (take_op("|"))
        value = one_filter(std::move(value));
      else if (at_name("is"))
        value = test(std::move(value));
      else if (at_op("("))
        value = call(std::move(value));
      else
        return value;
    }
  }

  // --- statements ---

  std::unique_ptr<Statement> make_statement(StatementKind kind) {
    auto statement = std::make_unique<Statement>();
    statement->kind = kind;
    statement->line = line();
    return statement;
  }

  void check_target(const Expression& target) {
    switch (target.kind) {
      case ExpressionKind::kName: return;
      case ExpressionKind::kNamespaceReference: return;
      case ExpressionKind::kTuple:
        for (const ExpressionPtr& part : target.parts) check_target(*part);
        return;
      default: throw syntax_error(target.line, "can't assign to what is not a name");
    }
  }
  ExpressionPtr assign_target(bool namespace_targets, std::string_view end_word = {}) {
    ExpressionPtr target = tuple({.names_only = true, .namespace_targets = namespace_targets, .end_word = end_word});
    check_target(*target);
    return target;
  }
  std::string name_target() {
    const int at_line = line();
    std::string name = any_name();
    for (const char* reserved : {"true", "false", "none", "True", "False", "None"})
      if (name == reserved) throw syntax_error(at_line, fmt::format("can't assign to '{}'", name));
    return name;
  }
  ExpressionPtr name_expression(const std::string& name, int at_line) {
    ExpressionPtr expression = make(ExpressionKind::kName, at_line);
    expression->name = name;
    return expression;
  }

  // Statements up to a tag that begins with one of these words, which is left for the caller; to the end without.
  Statements statements(std::initializer_list<std::string_view> end_words) {
    const Nested nested(*this);
    Statements body;
    std::unique_ptr<Statement> output;
    const auto flush = [&] {
      if (output != nullptr) body.push_back(std::move(output));
    };
    for (;;) {
      switch (current().kind) {
        case TokenKind::kEnd: {
          if (end_words.size() > 0)
            throw syntax_error(line(),
                               fmt::format("unexpected end of template, expected '{}'", *(end_words.end() - 1)));
          flush();
          return body;
        }
        case TokenKind::kData: {
          flush();
          auto statement = make_statement(StatementKind::kText);
          statement->text = constant_text(current().text);
          next();
          body.push_back(std::move(statement));
          break;
        }
        case TokenKind::kVariableBegin: {
          if (output == nullptr) output = make_statement(StatementKind::kOutput);
          next();
          output->expressions.push_back(tuple({}));
          expect(TokenKind::kVariableEnd, "end of print statement");
          break;
        }
        case TokenKind::kBlockBegin: {
          flush();
          next();
          for (const std::string_view word : end_words)
            if (at_name(word)) return body;
          body.push_back(statement());
          expect(TokenKind::kBlockEnd, "end of statement block");
          break;
        }
        default: unexpected("a tag");
      }
    }
  }
  // After a tag's head: its body.
  Statements block(std::initializer_list<std::string_view> end_words) {
    take_op(":");
    expect(TokenKind::kBlockEnd, "end of statement block");
    return statements(end_words);
  }
  Statements whole_block(std::string_view end_word) {
    Statements body = block({end_word});
    next();
    return body;
  }

  std::unique_ptr<Statement> statement() {
    if (!at(TokenKind::kName)) unexpected("a tag name");
    const std::string word = current().word;
    if (word == "if") return if_statement();
    if (word == "for") return for_statement();
    if (word == "set") return set_statement();
    if (word == "macro") return macro_statement();
    if (word == "call") return call_statement();
    if (word == "filter") return filter_statement();
    if (word == "with") return with_statement();
    if (word == "block") return block_statement();
    if (word == "print") return print_statement();
    if (word == "generation") {
      auto result = make_statement(StatementKind::kGeneration);
      next();
      result->body = whole_block("endgeneration");
      return result;
    }
    if (word == "break" || word == "continue") {
      auto result = make_statement(word == "break" ? StatementKind::kBreak : StatementKind::kContinue);
      next();
      return result;
    }
    if (word == "include" || word == "import" || word == "from" || word == "extends") {
      auto result = make_statement(StatementKind::kNeedsLoader);
      result->name = word;
      next();
      while (!at(TokenKind::kBlockEnd) && !at(TokenKind::kEnd)) next();
      return result;
    }
    if (word == "autoescape") throw syntax_error(line(), "the tag 'autoescape' is not supported");
    throw syntax_error(line(), fmt::format("Encountered unknown tag {}", quote(word)));
  }

  std::unique_ptr<Statement> if_statement() {
    auto result = make_statement(StatementKind::kIf);
    for (;;) {
      next();  // if, elif
      ExpressionPtr condition = tuple({.with_conditional = false});
      Statements body = block({"elif", "else", "endif"});
      result->branches.emplace_back(std::move(condition), std::move(body));
      if (at_name("elif")) continue;
      if (take_name("else")) {
        result->branches.emplace_back(nullptr, whole_block("endif"));
      } else {
        next();
      }
      return result;
    }
  }

  std::unique_ptr<Statement> for_statement() {
    auto result = make_statement(StatementKind::kFor);
    next();
    result->targets.push_back(assign_target(false, "in"));
    expect_name("in");
    result->expressions.push_back(tuple({.with_conditional = false, .end_word = "recursive"}));
    if (take_name("if")) result->condition = expression();
    result->recursive = take_name("recursive");
    result->body = block({"endfor", "else"});
    if (take_name("else"))
      result->otherwise = whole_block("endfor");
    else
      next();
    if (result->condition != nullptr) result->condition_targets.push_back(copy_target(*result->targets[0]));
    return result;
  }
  ExpressionPtr copy_target(const Expression& target) {
    ExpressionPtr copy = make(target.kind, target.line);
    copy->name = target.name;
    for (const ExpressionPtr& part : target.parts) adopt(*copy, copy_target(*part));
    return copy;
  }

  std::unique_ptr<Statement> set_statement() {
    auto result = make_statement(StatementKind::kSet);
    next();
    result->targets.push_back(assign_target(true));
    if (take_op("=")) {
      result->expressions.push_back(tuple({}));
      return result;
    }
    result->kind = StatementKind::kSetBlock;
    ExpressionPtr filter;
    while (take_op("|")) filter = one_filter(std::move(filter));
    if (filter != nullptr) result->expressions.push_back(std::move(filter));
    result->body = whole_block("endset");
    return result;
  }

  void signature(Statement& of) {
    expect_op("(");
    bool defaults = false;
    while (!at_op(")")) {
      if (!of.parameters.empty()) expect_op(",");
      Parameter parameter;
      parameter.name = name_target();
      for (const Parameter& other : of.parameters)
        if (other.name == parameter.name)
          throw syntax_error(of.line, fmt::format("duplicate argument '{}' in macro", parameter.name));
      parameter.name_text = to_text(parameter.name);
      if (take_op("=")) {
        parameter.otherwise = expression();
        defaults = true;
      } else if (defaults) {
        throw syntax_error(line(), "non-default argument follows default argument");
      }
      of.parameters.push_back(std::move(parameter));
    }
    expect_op(")");
  }

  std::unique_ptr<Statement> macro_statement() {
    auto result = make_statement(StatementKind::kMacro);
    next();
    result->name = name_target();
    result->name_text = to_text(result->name);
    signature(*result);
    result->body = whole_block("endmacro");
    return result;
  }

  std::unique_ptr<Statement> call_statement() {
    auto result = make_statement(StatementKind::kCallBlock);
    next();
    if (at_op("(")) signature(*result);
    result->expressions.push_back(expression());
    if (result->expressions[0]->kind != ExpressionKind::kCall) throw syntax_error(result->line, "expected call");
    result->body = whole_block("endcall");
    return result;
  }

  std::unique_ptr<Statement> filter_statement() {
    auto result = make_statement(StatementKind::kFilterBlock);
    next();
    ExpressionPtr filter = one_filter(nullptr);
    while (take_op("|")) filter = one_filter(std::move(filter));
    result->expressions.push_back(std::move(filter));
    result->body = whole_block("endfilter");
    return result;
  }

  std::unique_ptr<Statement> with_statement() {
    auto result = make_statement(StatementKind::kWith);
    next();
    while (!at(TokenKind::kBlockEnd)) {
      if (!result->targets.empty()) expect_op(",");
      result->targets.push_back(assign_target(false));
      expect_op("=");
      result->expressions.push_back(expression());
    }
    result->body = whole_block("endwith");
    return result;
  }

  std::unique_ptr<Statement> block_statement() {
    auto result = make_statement(StatementKind::kBlock);
    next();
    result->name = any_name();
    for (const std::string& known : blocks_)
      if (known == result->name) throw syntax_error(result->line, fmt::format("block '{}' defined twice", known));
    blocks_.push_back(result->name);
    if (at_name("scoped") || at_name("required"))
      throw syntax_error(result->line, "blocks that are scoped or required are not supported");
    result->body = whole_block("endblock");
    take_name(result->name);
    return result;
  }

  std::unique_ptr<Statement> print_statement() {
    auto result = make_statement(StatementKind::kOutput);
    next();
    while (!at(TokenKind::kBlockEnd)) {
      if (!result->expressions.empty()) expect_op(",");
      result->expressions.push_back(expression());
    }
    return result;
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
  std::vector<std::string> blocks_;
};

}  // namespace

Error syntax_error(int line, std::string_view what) {
  return {ErrorCode::kBadInput, fmt::format("line {}: {}", line, what)};
}

Syntax parse(std::string_view source) {
  if (source.size() > kMaxTemplateBytes)
    throw Error(ErrorCode::kBadInput,
                fmt::format("a template of {} bytes, expected at most {}", source.size(), kMaxTemplateBytes));
  Syntax syntax = Parser(source).run();
  resolve(syntax);
  return syntax;
}

}  // namespace beryl::jinja
