#include "text/jinja.h"

#include <algorithm>
#include <ctime>
#include <map>

#include "base/error.h"
#include "text/jinja_machine.h"
#include "text/jinja_syntax.h"

namespace beryl {

using namespace jinja;

namespace {

constexpr int kMaxVariableDepth = 100;

struct InputSize {
  size_t characters = 0, values = 0;
};

void measure(const nlohmann::ordered_json& json, InputSize& size, int depth) {
  if (depth > kMaxVariableDepth) throw template_error("a variable is nested too deeply");
  ++size.values;
  if (json.is_string()) size.characters += json.get_ref<const std::string&>().size();
  if (json.is_object())
    for (const auto& [key, value] : json.items()) {
      size.characters += key.size();
      measure(value, size, depth + 1);
    }
  if (json.is_array())
    for (const auto& value : json) measure(value, size, depth + 1);
}

Value to_value(const nlohmann::ordered_json& json, Character origin, Budget& budget) {
  using Type = nlohmann::ordered_json::value_t;
  switch (json.type()) {
    case Type::null: return Value::none();
    case Type::boolean: return json.get<bool>();
    case Type::number_integer: return json.get<int64_t>();
    case Type::number_unsigned: return json.get<uint64_t>();
    case Type::number_float: return json.get<double>();
    case Type::string: return make_text(budget, to_text(json.get_ref<const std::string&>(), origin));
    case Type::array: {
      Values items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(to_value(item, origin, budget));
      return make_list(budget, std::move(items));
    }
    case Type::object: {
      auto dict = std::make_shared<DictObject>(&budget);
      for (const auto& [key, value] : json.items())
        dict->set(make_text(budget, to_text(key, origin)), to_value(value, origin, budget), budget);
      return {Kind::kDict, std::move(dict)};
    }
    default: throw template_error("a variable holds binary data");
  }
}

Value to_value(const TemplateVariable& variable, Budget& budget) {
  const Character origin = variable.trusted ? 0 : kForeign;
  if (variable.trusted_members.empty() || !variable.value.is_array()) return to_value(variable.value, origin, budget);
  Values items;
  for (const auto& item : variable.value) {
    if (!item.is_object()) {
      items.push_back(to_value(item, origin, budget));
      continue;
    }
    auto dict = std::make_shared<DictObject>(&budget);
    for (const auto& [key, value] : item.items()) {
      const auto& trusted = variable.trusted_members;
      const bool is_trusted = value.is_string() && std::find(trusted.begin(), trusted.end(), key) != trusted.end();
      dict->set(make_text(budget, to_text(key, origin)), to_value(value, is_trusted ? 0 : origin, budget), budget);
    }
    items.emplace_back(Kind::kDict, std::move(dict));
  }
  return make_list(budget, std::move(items));
}

bool reads_from_context(const Scope& scope, std::string_view name) {
  return std::any_of(scope.loads.begin(), scope.loads.end(),
                     [&](const Load& load) { return load.from == Load::From::kContext && load.name == name; });
}

bool reads_from_context(const Statements& statements, std::string_view name) {
  return std::any_of(statements.begin(), statements.end(), [&](const auto& statement) {
    for (const Scope* scope : {&statement->scope, &statement->otherwise_scope, &statement->condition_scope})
      if (reads_from_context(*scope, name)) return true;
    for (const auto& branch : statement->branches)
      if (reads_from_context(branch.second, name)) return true;
    return reads_from_context(statement->body, name) || reads_from_context(statement->otherwise, name);
  });
}

std::string local_time(const std::string& format) {
  const std::time_t now = std::time(nullptr);
  std::tm parts = {};
  localtime_r(&now, &parts);
  std::string text(4096, '\0');
  text.resize(std::strftime(text.data(), text.size(), format.c_str(), &parts));
  return text;
}

}  // namespace

struct JinjaTemplate::Parsed {
  Syntax syntax;
};

JinjaTemplate::JinjaTemplate(std::string_view source) : parsed_(std::make_unique<Parsed>(Parsed{parse(source)})) {}
JinjaTemplate::~JinjaTemplate() = default;
JinjaTemplate::JinjaTemplate(JinjaTemplate&&) noexcept = default;
JinjaTemplate& JinjaTemplate::operator=(JinjaTemplate&&) noexcept = default;

bool JinjaTemplate::reads(std::string_view name) const {
  return reads_from_context(parsed_->syntax.scope, name) || reads_from_context(parsed_->syntax.body, name);
}

std::vector<RenderedPiece> JinjaTemplate::render(const std::vector<TemplateVariable>& variables,
                                                 const std::function<std::string(const std::string&)>& clock,
                                                 const TemplateLimits& limits) const {
  InputSize size;
  for (const TemplateVariable& variable : variables) measure(variable.value, size, 0);
  Budget budget(limits.work + 256 * (size.characters + size.values),
                limits.bytes + 32 * size.characters + 512 * size.values, limits.characters + 4 * size.characters);
  std::map<std::string, Value> context;
  for (const TemplateVariable& variable : variables) context[variable.name] = to_value(variable, budget);
  const Text text = Machine(parsed_->syntax, budget, std::move(context), clock ? clock : local_time).run();

  std::vector<RenderedPiece> pieces;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = begin + 1;
    while (end < text.size() && is_foreign(text[end]) == is_foreign(text[begin])) ++end;
    pieces.push_back({to_utf8(TextView(text).substr(begin, end - begin)), is_foreign(text[begin])});
    begin = end;
  }
  return pieces;
}

}  // namespace beryl
