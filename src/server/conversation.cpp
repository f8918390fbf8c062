#include "server/conversation.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "server/api_error.h"
#include "text/chat_message.h"
#include "text/text_tools.h"
#include "text/write_conversation.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

// Bytes of all texts in it.
size_t text_bytes(const Json& json) {
  if (json.is_string()) return json.get_ref<const std::string&>().size();
  size_t sum = 0;
  if (json.is_structured())
    for (const Json& each : json) sum += text_bytes(each);
  return sum;
}

}  // namespace

bool thinks_at(const Fields& fields, const char* name, const std::string& effort) {
  const char* const efforts[] = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
  if (std::find(std::begin(efforts), std::end(efforts), effort) == std::end(efforts))
    fields.refuse(name, "none, minimal, low, medium, high, xhigh or max");
  return effort != "none";
}

void set_thinking(Conversation& conversation, bool thinks) {
  conversation.options.enable_thinking = thinks;
  conversation.thought_budget = thinks ? INT64_MAX : 0;
}

Json read_function(const Fields& tool, const char* schema) {
  constexpr size_t kMaxNameBytes = 128;
  Json function = {{"name", tool.required_string("name")}};
  const std::string& name = function["name"].get_ref<const std::string&>();
  const bool is_plain = std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-' || c == '.'; });
  if (name.empty() || name.size() > kMaxNameBytes || !is_plain)
    tool.refuse("name", fmt::format("1 to {} letters, digits, _, - or .", kMaxNameBytes));
  if (const std::optional<std::string> description = tool.string("description")) function["description"] = *description;
  const Json* parameters = tool.object(schema);
  function["parameters"] = parameters == nullptr ? Json{{"type", "object"}, {"properties", Json::object()}} : *parameters;
  // Arguments are an object's members, whatever else a schema may say.
  if (const auto type = function["parameters"].find("type"); type != function["parameters"].end() && *type != "object")
    throw ApiError(400, fmt::format("'{}.type' is {}, \"object\" was expected: a call's arguments are one", tool.path_of(schema), in_words(*type)),
                   tool.path_of(schema));
  if (tool.boolean("strict", false)) function["strict"] = true;
  return function;
}

void require_different_names(const Json& tools) {
  std::set<std::string> names;
  for (const Json& tool : tools)
    if (const std::string name = tool["function"]["name"]; !names.insert(name).second)
      throw ApiError(400, fmt::format("'tools' has two functions named {}", quote(name)), "tools");
}

namespace {

Json read_chat_tools(const Json& given) {
  Json tools = Json::array();
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string where = fmt::format("tools.{}", i);
    if (!given[i].is_object()) throw ApiError(400, fmt::format("'{}' is {}, an object was expected", where, in_words(given[i])), where);
    const Fields tool(given[i], where + ".");
    if (tool.string("type").value_or("function") != "function") tool.refuse("type", "function");
    const Json* function = tool.object("function");
    if (function == nullptr) tool.refuse("function", "an object");
    tools.push_back({{"type", "function"}, {"function", read_function(Fields(*function, where + ".function."), "parameters")}});
  }
  require_different_names(tools);
  return tools;
}

[[noreturn]] void refuse(const std::string& where, const std::string& what) { throw ApiError(400, fmt::format("'{}' {}", where, what), where); }

// One message, whose names are brought to those that the chat formats know; they check what is within. calls: the ids of those so far.
void read_message(Json& message, const std::string& where, std::set<std::string>& calls) {
  if (!message.is_object()) refuse(where, fmt::format("is {}, an object was expected", in_words(message)));
  const Fields fields(message, where + ".");
  std::string role = fields.required_string("role");
  const char* const roles[] = {"system", "developer", "user", "assistant", "tool"};
  if (std::find(std::begin(roles), std::end(roles), role) == std::end(roles)) fields.refuse("role", "system, developer, user, assistant or tool");
  if (const Json* content = fields.find("content"); content != nullptr && role != "tool" && !content->is_string() && !content->is_array())
    fields.refuse("content", "a text or an array of parts");
  if (const Json* list = fields.array("tool_calls"))
    for (const Json& call : *list)
      if (call.is_object() && call.contains("id") && call["id"].is_string()) calls.insert(call["id"].get<std::string>());
  if (const std::optional<std::string> id = fields.string("tool_call_id"); id && role == "tool" && !calls.contains(*id))
    refuse(where + ".tool_call_id", fmt::format("is {}, the id of a call before it was expected", quote(*id)));

  if (role == "developer") message["role"] = "system";   // OpenAI's later name of it
  // A reply that was refused has its words there, or in a part.
  if (const auto refusal = message.find("refusal"); refusal != message.end()) {
    if (refusal->is_string() && (!message.contains("content") || message["content"].is_null())) message["content"] = *refusal;
    message.erase("refusal");
  }
  if (!message.contains("content") || !message["content"].is_array()) return;
  Json& parts = message["content"];
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string place = fmt::format("{}.content.{}", where, i);
    if (!parts[i].is_object()) refuse(place, fmt::format("is {}, an object was expected", in_words(parts[i])));
    const Fields part(parts[i], place + ".");
    const std::string type = part.required_string("type");
    if (type == "refusal") {
      parts[i] = {{"type", "text"}, {"text", part.required_string("refusal")}};
    } else if (type == "text") {
      part.required_string("text");
    }
  }
}

}  // namespace

Conversation read_conversation(const Fields& fields) {
  Conversation conversation;
  const Json* messages = fields.array("messages");
  if (messages == nullptr || messages->empty()) fields.refuse("messages", "an array of at least one message");
  conversation.messages = *messages;
  std::set<std::string> calls;
  for (size_t i = 0; i < conversation.messages.size(); ++i) {
    conversation.places.push_back(fmt::format("messages.{}", i));
    read_message(conversation.messages[i], conversation.places.back(), calls);
  }
  if (const Json* tools = fields.array("tools")) conversation.options.tools = read_chat_tools(*tools);
  conversation.tool_choice = read_tool_choice(fields, conversation.options.tools);
  if (const Json* format = fields.object("response_format")) conversation.form = read_reply_form(*format, "response_format");
  if (const std::optional<std::string> effort = fields.string("reasoning_effort"))
    set_thinking(conversation, thinks_at(fields, "reasoning_effort", *effort));
  if (const Json* variables = fields.object("chat_template_kwargs")) {
    conversation.options.template_variables = *variables;
    if (variables->contains("enable_thinking")) set_thinking(conversation, Fields(*variables, "chat_template_kwargs.").boolean("enable_thinking", false));
  }
  conversation.thought_budget = fields.integer("thinking_budget", conversation.thought_budget, 0, INT32_MAX);
  return conversation;
}

namespace {

// What is wrong with the messages, by the request's names. `what` begins with "message 3: " where it is about one of them.
ApiError to_message_error(const std::string& what, const Conversation& conversation) {
  size_t index = 0;
  constexpr std::string_view kBegin = "message ";
  const char* const end = what.data() + what.size();
  const char* rest = end;
  if (what.starts_with(kBegin)) rest = std::from_chars(what.data() + kBegin.size(), end, index).ptr;
  const bool is_one = index < conversation.places.size() && std::string_view(rest, static_cast<size_t>(end - rest)).starts_with(": ");
  if (!is_one) return ApiError(400, what, conversation.field);
  const std::string& field = conversation.places[index];
  return ApiError(400, fmt::format("'{}'{}", field, rest), field);
}

ChatPrompt prompt_of(const ServedModel& model, const Conversation& conversation) {
  if (model.writer == nullptr)
    throw ApiError(400, fmt::format("the model {} has no chat format: use /v1/completions", quote(model.id)), "model");
  require_length(model, text_bytes(conversation.messages), conversation.field);
  ChatOptions options = conversation.options;
  if (!conversation.tool_choice.may_call) options.tools = nullptr;
  // A word to the server, not to the model.
  if (options.tools.is_array())
    for (Json& tool : options.tools)
      if (tool.is_object() && tool.contains("function") && tool["function"].is_object()) tool["function"].erase("strict");
  try {
    return write_conversation(*model.writer, model.writes_tools, conversation.messages, options);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kBadInput) throw;
    throw to_message_error(error.what(), conversation);
  }
}

}  // namespace

std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation) {
  return encode_prompt(model.tokenizer, prompt_of(model, conversation));
}

std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation, Generation& generation) {
  const ChatPrompt prompt = prompt_of(model, conversation);
  generation.is_chat = true;
  generation.prompt_field = conversation.field;
  generation.warnings.insert(generation.warnings.end(), prompt.warnings.begin(), prompt.warnings.end());
  generation.in_thought = prompt.in_thought;
  generation.may_think = conversation.options.enable_thinking;
  generation.finds_calls = conversation.tool_choice.may_call;
  if (generation.finds_calls)
    for (const Json* function : read_tools(conversation.options.tools)) generation.tool_names.push_back(function->value("name", ""));
  generation.thought_budget = conversation.thought_budget;
  std::vector<int32_t> ids = encode_prompt(model.tokenizer, prompt);
  bind_generation(model, conversation.form, conversation.tool_choice, conversation.options.tools, generation);
  return ids;
}

}  // namespace beryl::server
