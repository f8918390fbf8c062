#include "grammar/tool_grammar.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/grammar_text.h"
#include "text/chat_message.h"
#include "text/reply_parser.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

struct Tool {
  std::string name;
  Json parameters;
};

std::string name_of_parameters(const std::string& name, const Tool& tool) {
  return fmt::format("{}: the parameters of {}", name, quote(tool.name));
}

// The list's functions, with a name each and a schema of an object. `check` throws Error(kUnsupported) for a schema that
// cannot be expressed.
template <class Check>
std::vector<Tool> tools_of(const std::string& name, std::string_view text, std::vector<std::string>& notes, const Check& check) {
  const Json list = parse_json<Json>(name, text);
  std::vector<Tool> tools;
  std::set<std::string> names;
  for (const Json* function : read_tools(list)) {
    Tool tool;
    const auto at = function->find("name");
    if (at == function->end() || !at->is_string())
      throw Error(ErrorCode::kBadInput, fmt::format("{}: a tool has no name", name));
    tool.name = at->get<std::string>();
    const bool is_plain = !tool.name.empty() && std::all_of(tool.name.begin(), tool.name.end(), [](unsigned char c) {
      return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.';
    });
    if (!is_plain)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{}: {} is no name of a tool: letters, digits, _, - and . were expected", name,
                              quote(tool.name)));
    if (!names.insert(tool.name).second)
      throw Error(ErrorCode::kBadInput, fmt::format("{}: two tools are called {}", name, quote(tool.name)));
    const auto parameters = function->find("parameters");
    tool.parameters = parameters == function->end() || parameters->is_null() ? Json{{"type", "object"}} : *parameters;
    if (tool.parameters.is_object() && !tool.parameters.contains("type") && tool.parameters.contains("properties"))
      tool.parameters["type"] = "object";
    // A call without arguments: nothing else is offered.
    if (tool.parameters == Json{{"type", "object"}, {"properties", Json::object()}})
      tool.parameters["additionalProperties"] = false;
    const auto strict = function->find("strict");
    try {
      check(tool);
    } catch (const Error& error) {
      if (error.code != ErrorCode::kUnsupported || (strict != function->end() && *strict == true)) throw;
      notes.push_back(fmt::format("{}; any object is let through", error.what()));
      tool.parameters = {{"type", "object"}};
    }
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
        if (property.empty() || property.find_first_of(kNotInGemmaKeys) != property.npos)
          throw Error(ErrorCode::kUnsupported,
                      fmt::format("{}: the property {} cannot be written in Gemma 4's notation, whose keys are bare",
                                  name, quote(property)));
    if (key == "propertyNames")
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: {} cannot be enforced in Gemma 4's notation", name, quote(key)));
    if (key != "const" && key != "enum") check_keys(name, value);
  }
}

// The constants that stand for patterns, with `prefix`.
Json with_constants_of(const Json& schema, const std::string& prefix, const std::vector<SchemaPattern>& patterns) {
  if (schema.is_string()) {
    const bool is_one = std::any_of(patterns.begin(), patterns.end(), [&](const SchemaPattern& pattern) {
      return pattern.constant == prefix + schema.get<std::string>();
    });
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
    const bool is_reference =
        key == "$ref" && value.is_string() && value.get_ref<const std::string&>().starts_with('#');
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
  for (const std::vector<std::string_view>& texts : {std::vector<std::string_view>{"<|tool_call>", "<tool_call|>", "<|\"|>"},
                                                     std::vector<std::string_view>{"<tool_call>", "</tool_call>"}}) {
    ToolTokens tokens;
    for (const std::string_view text : texts)
      if (const std::optional<int32_t> id = tokenizer.find_token(text)) tokens.marks.push_back({text, *id});
    if (tokens.marks.size() == texts.size()) return tokens;
  }
  return {};
}

nlohmann::ordered_json gemma4_calls_tag(const std::string& name, std::string_view text, bool single,
                                        std::vector<SchemaPattern>& patterns, std::vector<std::string>& notes) {
  int n_tools = 0;
  Json tags = Json::array();
  const auto check = [&](const Tool& tool) {
    const std::string its_name = name_of_parameters(name, tool);
    std::vector<std::string> unread;
    check_keys(its_name, checked_schema(its_name, tool.parameters, unread).schema);
  };
  for (const Tool& tool : tools_of(name, text, notes, check)) {
    const std::string its_name = name_of_parameters(name, tool);
    CheckedSchema checked = checked_schema(its_name, tool.parameters, notes);
    // Each tool is walked by itself: constants of different tools are told apart by the tool.
    const std::string its_own = fmt::format("tool{}-", n_tools++);
    for (SchemaPattern& pattern : checked.patterns) pattern.constant = its_own + pattern.constant;
    const Json schema = sorted(with_constants_of(checked.schema, its_own, checked.patterns));
    patterns.insert(patterns.end(), checked.patterns.begin(), checked.patterns.end());
    Json content = {{"type", "json_schema"},
                    {"style", "gemma"},
                    {"excludes", {"<|tool_call>", "<tool_call|>"}},
                    {"json_schema", schema}};
    tags.push_back({{"type", "tag"},
                    {"begin", "<|tool_call>call:" + tool.name},
                    {"content", std::move(content)},
                    {"end", "<tool_call|>"}});
  }
  return {{"type", "structural_tag"},
          {"format",
           {{"type", "tags_with_separator"},
            {"tags", std::move(tags)},
            {"separator", ""},
            {"at_least_one", true},
            {"stop_after_first", single}}}};
}

std::string with_mark_tokens(const std::string& grammar, const ToolTokens& tokens) {
  // Blanks between the notation's parts, of which it has none; and "any text without these marks", bytes of any kind.
  // Since the marks are tokens that no text matches, any text will do.
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
  static constexpr std::string_view kTexts[] = {"<|tool_call>", "<tool_call|>", "<|\\\"|>"};  // as literals write them
  std::vector<LiteralPart> parts;
  for (size_t i = 0; i < 3; ++i)
    parts.push_back({std::string(kTexts[i]), fmt::format("Token({})", tokens.marks[i].id)});
  return with_literal_parts(text, parts);
}

nlohmann::ordered_json call_schema(const std::string& name, std::string_view text, const std::string& arguments,
                                   std::vector<std::string>& notes) {
  Json definitions = Json::object(), calls = Json::array();
  const auto check = [&](const Tool& tool) {
    std::vector<std::string> unread;
    checked_schema(name_of_parameters(name, tool), tool.parameters, unread);
  };
  const std::vector<Tool> tools = tools_of(name, text, notes, check);
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string key = fmt::format("tool{}", i);
    definitions[key] = with_references_at(tools[i].parameters, "#/$defs/" + key);
    calls.push_back(
        {{"type", "object"},
         {"properties", {{"name", {{"const", tools[i].name}}}, {arguments, {{"$ref", "#/$defs/" + key}}}}},
         {"required", {"name", arguments}},
         {"additionalProperties", false}});
  }
  return {{"$defs", std::move(definitions)}, {"anyOf", std::move(calls)}};
}

std::string tagged_calls(const std::string& call_grammar, const ToolTokens& tokens, bool single) {
  // Behind a tag that is a token the line break may be part of a longer token; so it is one literal with what follows.
  const auto tag = [&](size_t index, std::string_view text) {
    return tokens.are_tags() ? fmt::format("Token({})", tokens.marks[index].id) : fmt::format("\"{}\"", text);
  };
  return fmt::format("root ::= tagged_call {}\ntagged_call ::= {} \"\\n\" bare_call \"\\n\" {}\n{}",
                     single ? "" : "(\"\\n\" tagged_call)*", tag(0, "<tool_call>"), tag(1, "</tool_call>"),
                     with_rule_renamed(call_grammar, "root", "bare_call"));
}

std::string text_without_calls(bool tagged) {
  static constexpr std::string_view kTag = "<tool_call>";
  std::string text = "any ::= [^\\0]*\n";
  text += fmt::format("root ::= [ \\n\\r\\t]* (\"\" | [^{{<\\0 \\n\\r\\t] any | \"<\" {})\n", tagged ? "tag1" : "any");
  for (size_t i = 1; tagged && i < kTag.size(); ++i) {
    text += fmt::format("tag{} ::= \"\" | [^{}\\0] any", i, kTag[i]);
    if (i + 1 < kTag.size()) text += fmt::format(" | \"{}\" tag{}", kTag[i], i + 1);
    text += '\n';
  }
  return text;
}

}  // namespace beryl
