#include "grammar/tool_grammar.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/json_schema.h"
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
    if ((key == "minLength" || key == "maxLength") && value.is_number())
      throw Error(ErrorCode::kUnsupported, fmt::format("{}: {} cannot be enforced in Gemma 4's notation", name, quote(key)));
    if (key == "patternProperties" || key == "propertyNames")
      throw Error(ErrorCode::kUnsupported, fmt::format("{}: {} cannot be enforced in Gemma 4's notation", name, quote(key)));
    if (key != "const" && key != "enum") check_keys(name, value);
  }
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

nlohmann::ordered_json gemma4_calls_tag(const std::string& name, std::string_view text, std::vector<std::string>& notes) {
  Json tags = Json::array();
  for (const Tool& tool : tools_of(name, text)) {
    const std::string its_name = fmt::format("{}: the parameters of {}", name, quote(tool.name));
    const Json schema = sorted(checked_schema(its_name, tool.parameters, notes));
    check_keys(its_name, schema);
    Json content = {{"type", "json_schema"}, {"style", "gemma"}, {"excludes", {"<|tool_call>", "<tool_call|>"}}, {"json_schema", schema}};
    tags.push_back({{"type", "tag"}, {"begin", "<|tool_call>call:" + tool.name}, {"content", std::move(content)}, {"end", "<tool_call|>"}});
  }
  return {{"type", "structural_tag"},
          {"format", {{"type", "tags_with_separator"}, {"tags", std::move(tags)}, {"separator", ""}, {"at_least_one", true}}}};
}

std::string with_mark_tokens(const std::string& grammar, const ToolTokens& tokens) {
  static constexpr std::string_view kBlanks = "[ \\n\\r\\t]* ";
  static constexpr std::string_view kTexts[] = {"<|tool_call>", "<tool_call|>", "<|\\\"|>"};   // as literals write them
  std::string result;
  // How the library says "any text without these": bytes of any kind. What cannot stand there are tokens, so text it is.
  static constexpr std::string_view kAnyText = "TagDispatch(", kText = "[^\\0]*";
  int macro_depth = 0;   // within Regex(…) and the like, whose texts stay text
  for (size_t i = 0; i < grammar.size();) {
    if (macro_depth == 0 && grammar.compare(i, kBlanks.size(), kBlanks) == 0) {
      i += kBlanks.size();
      continue;
    }
    if (grammar.compare(i, kAnyText.size(), kAnyText) == 0) {
      i += kAnyText.size();
      for (int depth = 1; i < grammar.size() && depth > 0; ++i) {
        if (grammar[i] == '"')
          for (++i; i < grammar.size() && grammar[i] != '"'; ++i) i += grammar[i] == '\\' ? 1 : 0;
        else
          depth += grammar[i] == '(' ? 1 : grammar[i] == ')' ? -1 : 0;
      }
      result += kText;
      continue;
    }
    const char c = grammar[i];
    if (c == '[') {   // a class, which may hold anything
      const size_t begin = i++;
      while (i < grammar.size() && grammar[i] != ']') i += grammar[i] == '\\' ? 2 : 1;
      i = std::min(i + 1, grammar.size());
      result += grammar.substr(begin, i - begin);
      continue;
    }
    if (c != '"') {
      // A name right before a bracket is a macro's.
      if (c == '(' && (macro_depth > 0 || (i > 0 && std::isalnum(static_cast<unsigned char>(grammar[i - 1])) != 0))) ++macro_depth;
      if (c == ')' && macro_depth > 0) --macro_depth;
      result += c;
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < grammar.size() && grammar[end] != '"') end += grammar[end] == '\\' ? 2 : 1;
    std::string_view literal = std::string_view(grammar).substr(i + 1, end - i - 1);
    i = std::min(end + 1, grammar.size());
    if (macro_depth > 0) {
      result += fmt::format("\"{}\"", literal);
      continue;
    }
    // The literal's pieces between the marks; an empty one only where there is nothing else.
    std::string pieces;
    std::string piece;
    const auto flush = [&] {
      if (!piece.empty()) pieces += fmt::format("{}\"{}\"", pieces.empty() ? "" : " ", piece);
      piece.clear();
    };
    while (!literal.empty()) {
      size_t mark = 0;
      while (mark < 3 && !literal.starts_with(kTexts[mark])) ++mark;
      if (mark < 3) {
        flush();
        pieces += fmt::format("{}Token({})", pieces.empty() ? "" : " ", tokens.marks[mark].id);
        literal.remove_prefix(kTexts[mark].size());
      } else {
        const size_t n = literal[0] == '\\' && literal.size() > 1 ? 2 : 1;
        piece += literal.substr(0, n);
        literal.remove_prefix(n);
      }
    }
    flush();
    result += pieces.empty() ? "\"\"" : pieces;
  }
  return result;
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
