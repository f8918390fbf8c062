#include "server/structured_output.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "server/api_error.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

using Kind = ConstraintSpec::Kind;

// The name in a member of a list of tools; null: it has none.
const Json* name_in(const Json& tool) {
  const Json* object = &tool;
  if (tool.is_object() && tool.contains("function")) object = &tool["function"];
  if (!object->is_object()) return nullptr;
  const auto name = object->find("name");
  return name != object->end() && name->is_string() ? &*name : nullptr;
}

bool is_strict(const Json& tool) {
  if (!tool.is_object() || !tool.contains("function") || !tool["function"].is_object()) return false;
  const auto strict = tool["function"].find("strict");
  return strict != tool["function"].end() && *strict == true;
}

[[noreturn]] void refuse_choice(const std::string& what) {
  throw ApiError(400, fmt::format("'tool_choice' {}", what), "tool_choice");
}

}  // namespace

ReplyForm read_reply_form(const Json& format, const std::string& field) {
  const Fields fields(format, field + ".");
  const std::string type = fields.required_string("type");
  if (type == "text") return {};
  if (type == "json_object") return {Kind::kJsonObject, "", field};
  if (type == "regex") return {Kind::kRegex, fields.required_string("pattern"), field};
  if (type != "json_schema") fields.refuse("type", "text, json_object, json_schema or regex");
  const Json* schema = fields.object("json_schema");
  if (schema == nullptr && !fields.has("schema") && field == "response_format") fields.refuse("json_schema", "an object with the schema");   // others have it here
  const Fields inner = schema == nullptr ? fields : Fields(*schema, field + ".json_schema.");
  if (const Json* object = inner.object("schema")) return {Kind::kJsonSchema, to_line(*object), inner.path_of("schema")};
  inner.refuse("schema", "an object");
}

void require_tool(const Json& tools, const std::string& name, const std::string& field) {
  if (tools.is_array())
    for (const Json& tool : tools)
      if (const Json* its_name = name_in(tool); its_name != nullptr && *its_name == name) return;
  throw ApiError(400, fmt::format("'{}' names the function {}, which is not among the tools", field, quote(name)), field);
}

ToolChoice read_tool_choice(const Fields& fields, const Json& tools) {
  ToolChoice choice;
  const bool has_tools = tools.is_array() && !tools.empty();
  choice.may_call = has_tools;
  choice.single = !fields.boolean("parallel_tool_calls", true);
  const Json* value = fields.find("tool_choice");
  if (value == nullptr) return choice;
  std::string mode;
  if (value->is_string()) {
    mode = value->get<std::string>();
  } else if (value->is_object()) {
    const Fields object(*value, "tool_choice.");
    const std::string type = object.required_string("type");
    if (type == "function") {
      const Json* function = object.object("function");
      const Fields named = function == nullptr ? object : Fields(*function, "tool_choice.function.");
      choice.names = {named.required_string("name")};
      choice.single = true;
      mode = "required";
    } else if (type == "allowed_tools") {
      const Json* nested = object.object("allowed_tools");
      const Fields allowed = nested == nullptr ? object : Fields(*nested, "tool_choice.allowed_tools.");
      mode = allowed.required_string("mode");
      if (mode != "auto" && mode != "required") allowed.refuse("mode", "auto or required");
      const Json* list = allowed.array("tools");
      if (list == nullptr || list->empty()) allowed.refuse("tools", "an array of at least one tool");
      for (const Json& tool : *list) {
        const Json* name = name_in(tool);
        if (name == nullptr) refuse_choice("holds a tool without a name");
        choice.names.push_back(*name);
      }
    } else {
      object.refuse("type", "function or allowed_tools");
    }
    for (const std::string& name : choice.names) require_tool(tools, name, "tool_choice");
  }
  if (mode == "none") return {};
  if (mode != "auto" && mode != "required")
    refuse_choice(fmt::format("is {}, \"auto\", \"none\", \"required\" or an object that names a function was expected", in_words(*value)));
  choice.must_call = mode == "required";
  if (choice.must_call && !has_tools) refuse_choice("asks for a call, but there are no tools");
  return choice;
}

void bind_generation(const ServedModel& model, const ReplyForm& form, const ToolChoice& choice, const Json& tools, Generation& generation) {
  ConstraintSpec spec{form.kind, form.text, std::nullopt};
  if (choice.may_call) {
    Json callable = Json::array();
    bool strict = false;
    for (const Json& tool : tools) {
      const Json* name = name_in(tool);
      if (!choice.names.empty() && (name == nullptr || std::find(choice.names.begin(), choice.names.end(), *name) == choice.names.end())) continue;
      strict = strict || is_strict(tool);
      callable.push_back(tool);
    }
    // What is only asked for is left to the model where nothing can be enforced.
    const bool bound = strict || !choice.names.empty() || choice.must_call || form.kind != Kind::kText || (choice.single && has_constraints());
    if (bound) spec.calls = CallSpec{model.notation, to_line(callable), choice.single};
    if (choice.must_call) spec.kind = Kind::kNothing;
  }
  if (spec.kind == Kind::kText && !spec.calls) return;
  try {
    generation.content = model.forms.compile(spec);
    const std::vector<std::string>& notes = generation.content->notes();
    generation.warnings.insert(generation.warnings.end(), notes.begin(), notes.end());
  } catch (const Error& error) {
    // Errors of tools begin with their name.
    const bool is_content = !spec.calls || (form.kind != Kind::kText && std::string_view(error.what()).substr(0, 5) != "tools");
    const std::string field = is_content ? form.field : "tools";
    throw ApiError(400, fmt::format("'{}': {}", field, error.what()), field);
  }
}

}  // namespace beryl::server
