#include "server/conversation.h"

#include <algorithm>

#include <fmt/format.h>

#include "server/api_error.h"
#include "text/chat_message.h"
#include "text/text_tools.h"
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
  const char* const efforts[] = {"none", "minimal", "low", "medium", "high", "xhigh"};
  if (std::find(std::begin(efforts), std::end(efforts), effort) == std::end(efforts))
    fields.refuse(name, "none, minimal, low, medium, high or xhigh");
  return effort != "none";
}

Conversation read_conversation(const Fields& fields) {
  Conversation conversation;
  const Json* messages = fields.array("messages");
  if (messages == nullptr || messages->empty()) fields.refuse("messages", "an array of at least one message");
  conversation.messages = *messages;
  // OpenAI's later name of the system's role.
  for (Json& message : conversation.messages)
    if (message.is_object() && message.contains("role") && message["role"] == "developer") message["role"] = "system";
  if (const Json* tools = fields.array("tools")) conversation.options.tools = *tools;
  conversation.tool_choice = read_tool_choice(fields, conversation.options.tools);
  if (const Json* format = fields.object("response_format")) conversation.form = read_reply_form(*format, "response_format");
  if (const std::optional<std::string> effort = fields.string("reasoning_effort"))
    conversation.options.enable_thinking = thinks_at(fields, "reasoning_effort", *effort);
  if (const Json* variables = fields.object("chat_template_kwargs")) {
    conversation.options.template_variables = *variables;
    conversation.options.enable_thinking =
        Fields(*variables, "chat_template_kwargs.").boolean("enable_thinking", conversation.options.enable_thinking);
  }
  conversation.thought_budget = fields.integer("thinking_budget", INT64_MAX, 0, INT32_MAX);
  return conversation;
}

namespace {

ChatPrompt prompt_of(const ServedModel& model, const Conversation& conversation) {
  if (model.writer == nullptr)
    throw ApiError(400, fmt::format("the model {} has no chat format: use /v1/completions", quote(model.id)), "model");
  require_length(model, text_bytes(conversation.messages));
  ChatOptions options = conversation.options;
  if (!conversation.tool_choice.may_call) options.tools = nullptr;
  // A word to the server, not to the model.
  if (options.tools.is_array())
    for (Json& tool : options.tools)
      if (tool.is_object() && tool.contains("function") && tool["function"].is_object()) tool["function"].erase("strict");
  if (model.writes_tools) return model.writer->write(conversation.messages, options);
  const Json tools = std::exchange(options.tools, nullptr);
  return model.writer->write(with_tools_as_text(conversation.messages, tools), options);
}

}  // namespace

std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation) {
  return encode_prompt(model.tokenizer, prompt_of(model, conversation));
}

std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation, Generation& generation) {
  const ChatPrompt prompt = prompt_of(model, conversation);
  generation.is_chat = true;
  generation.warnings = prompt.warnings;
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
