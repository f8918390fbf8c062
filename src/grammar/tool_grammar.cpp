#include "grammar/tool_grammar.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/grammar_text.h"
#include "text/chat_message.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

struct Tool {
  std::string name;
  Json parameters;
};

// The list's functions, with a name each and a schema of an object.
std::vector<Tool> tools_of(const std::string& name, std::string_view text) {
  const Json list = parse_json<Json>(name, text);
  std::vector<Tool> tools;
  std::set<std::string> names;
  for (const Json* function : read_tools(list)) {
    Tool tool;
    const auto at = function->find("name");
    if (at == function->end() || !at->is_string()) throw Error(ErrorCode::kBadInput, fmt::format("{}: a tool has no name", name));
    tool.name = at->get<std::string>();
    const bool is_plain = !tool.name.empty() && std::all_of(tool.name.begin(), tool.name.end(), [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
    });
    if (!is_plain) throw Error(ErrorCode::kBadInput, fmt::format("{}: {} is no name of a tool: letters, digits, _, - and . were expected", name, quote(tool.name)));
    if (!names.insert(tool.name).second) throw Error(ErrorCode::kBadInput, fmt::format("{}: two tools are called {}", name, quote(tool.name)));
    const auto parameters = function->find("parameters");
    tool.parameters = parameters == function->end() || parameters->is_null() ? Json{{"type", "object"}} : *parameters;
    if (tool.parameters.is_object() && !tool.parameters.contains("type") && tool.parameters.contains("properties")) tool.parameters["type"] = "object";
    // A call without arguments: nothing else is offered.
    if (tool.parameters == Json{{"type", "object"}, {"properties", Json::object()}}) tool.parameters["additionalProperties"] = false;
    tools.push_back(std::move(tool));
  }
  if (tools.empty()) throw Error(ErrorCode::kBadInput, fmt::format("{}: there is no tool to call", name));
  return tools;
}

// Keys of all "properties" in the order of their bytes, as Gemma 4 writes them.
Json sorted(const Json& schema) {
  if (schema.is_array()) {
    Json result = Json::array();
    for (const Json& item : schema) result.push_back(sorted(item));
    return result;
  }
  if (!schema.is_object()) return schema;
  Json result = Json::object();
  for (const auto& [key, value] : schema.items()) {
    if (key == "const" || key == "enum") {
      result[key] = value;
    } else if (key == "properties" && value.is_object()) {
      std::map<std::string, Json> properties;
      for (const auto& [name, property] : value.items()) properties.emplace(name, sorted(property));
      result[key] = properties;
    } else {
      result[key] = sorted(value);
    }
  }
  return result;
}

// Bare keys cannot hold what the notation is made of.
void check_keys(const std::string& name, const Json& schema) {
  if (schema.is_array())
    for (const Json& item : schema) check_keys(name, item);
  if (!schema.is_object()) return;
  for (const auto& [key, value] : schema.items()) {
    if (key == "properties" && value.is_object())
      for (const auto& [property, inner] : value.items())
        if (property.empty() || property.find_first_of(":,{}[]<>|\" \t\r\n") != property.npos)
          throw Error(ErrorCode::kUnsupported, fmt::format("{}: the property {} cannot be written in Gemma 4's notation, whose keys are bare", name, quote(property)));
    if (key == "propertyNames")
      throw Error(ErrorCode::kUnsupported, fmt::format("{}: {} cannot be enforced in Gemma 4's notation", name, quote(key)));
    if (key != "const" && key != "enum") check_keys(name, value);
  }
}

// The constants that stand for patterns, with `prefix`.
Json with_constants_of(const Json& schema, const std::string& prefix, const std::vector<SchemaPattern>& patterns) {
  if (schema.is_string()) {
    const bool is_one = std::any_of(patterns.begin(), patterns.end(), [&](const SchemaPattern& pattern) { return pattern.constant == prefix + schema.get<std::string>(); });
    return is_one ? Json(prefix + schema.get<std::string>()) : schema;
  }
  if (!schema.is_structured()) return schema;
  Json result = schema;
  for (auto& [key, value] : result.items()) value = with_constants_of(value, prefix, patterns);
  return result;
}

// "#/…" within a tool's schema, as seen from the place where it is put.
Json with_references_at(const Json& schema, const std::string& place) {
  if (schema.is_array()) {
    Json result = Json::array();
    for (const Json& item : schema) result.push_back(with_references_at(item, place));
    return result;
  }
  if (!schema.is_object()) return schema;
  Json result = Json::object();
  for (const auto& [key, value] : schema.items()) {
    const bool is_reference = key == "$ref" && value.is_string() && value.get_ref<const std::string&>().starts_with('#');
    if (is_reference) {
      result[key] = place + value.get<std::string>().substr(1);
    } else {
      result[key] = key == "const" || key == "enum" ? value : with_references_at(value, place);
    }
  }
  return result;
}

}  // namespace

ToolTokens find_tool_tokens(const Tokenizer& tokenizer) {
  ToolTokens tokens;
  for (ToolTokens::Mark& mark : tokens.marks) mark.id = tokenizer.find_special(mark.text).value_or(-1);
  return tokens;
}

nlohmann::ordered_json gemma4_calls_tag(const std::string& name, std::string_view text, std::vector<SchemaPattern>& patterns, std::vector<std::string>& notes) {
  int n_tools = 0;
  Json tags = Json::array();
  for (const Tool& tool : tools_of(name, text)) {
    const std::string its_name = fmt::format("{}: the parameters of {}", name, quote(tool.name));
    CheckedSchema checked = checked_schema(its_name, tool.parameters, notes);
    // Each tool is walked by itself: constants of different tools are told apart by the tool.
    const std::string its_own = fmt::format("tool{}-", n_tools++);
    for (SchemaPattern& pattern : checked.patterns) pattern.constant = its_own + pattern.constant;
    const Json schema = sorted(with_constants_of(checked.schema, its_own, checked.patterns));
    patterns.insert(patterns.end(), checked.patterns.begin(), checked.patterns.end());
    check_keys(its_name, schema);
    Json content = {{"type", "json_schema"}, {"style", "gemma"}, {"excludes", {"<|tool_call>", "<tool_call|>"}}, {"json_schema", schema}};
    tags.push_back({{"type", "tag"}, {"begin", "<|tool_call>call:" + tool.name}, {"content", std::move(content)}, {"end", "<tool_call|>"}});
  }
  return {{"type", "structural_tag"},
          {"format", {{"type", "tags_with_separator"}, {"tags", std::move(tags)}, {"separator", ""}, {"at_least_one", true}}}};
}

std::string with_mark_tokens(const std::string& grammar, const ToolTokens& tokens) {
  // Blanks between the notation's parts, of which it has none; and "any text without these marks", bytes of any kind. Since
  // the marks are tokens that no text matches, any text will do.
  static constexpr std::string_view kBlanks = "[ \\n\\r\\t]* ", kAnyText = "TagDispatch(", kText = "[^\\0]*";
  std::string text;
  for (size_t i = 0; i < grammar.size();) {
    if (grammar.compare(i, kBlanks.size(), kBlanks) == 0) {
      i += kBlanks.size();
    } else if (grammar.compare(i, kAnyText.size(), kAnyText) == 0) {
      i += kAnyText.size();
      for (int depth = 1; i < grammar.size() && depth > 0; ++i) {
        if (grammar[i] == '"') {
          for (++i; i < grammar.size() && grammar[i] != '"'; ++i) i += grammar[i] == '\\' ? 1 : 0;
        } else {
          depth += grammar[i] == '(' ? 1 : grammar[i] == ')' ? -1 : 0;
        }
      }
      text += kText;
    } else {
      text += grammar[i++];
    }
  }
  static constexpr std::string_view kTexts[] = {"<|tool_call>", "<tool_call|>", "<|\\\"|>"};   // as literals write them
  std::vector<LiteralPart> parts;
  for (size_t i = 0; i < 3; ++i) parts.push_back({std::string(kTexts[i]), fmt::format("Token({})", tokens.marks[i].id)});
  return with_literal_parts(text, parts);
}

nlohmann::ordered_json llama3_call_schema(const std::string& name, std::string_view text) {
  Json definitions = Json::object(), calls = Json::array();
  const std::vector<Tool> tools = tools_of(name, text);
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string key = fmt::format("tool{}", i);
    definitions[key] = with_references_at(tools[i].parameters, "#/$defs/" + key);
    calls.push_back({{"type", "object"},
                     {"properties", {{"name", {{"const", tools[i].name}}}, {"parameters", {{"$ref", "#/$defs/" + key}}}}},
                     {"required", {"name", "parameters"}},
                     {"additionalProperties", false}});
  }
  return {{"$defs", std::move(definitions)}, {"anyOf", std::move(calls)}};
}

}  // namespace beryl
