#include "server/conversation.h"

#include <algorithm>

#include <fmt/format.h>

#include "server/api_error.h"
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

void read_tool_choice(const Fields& fields, Conversation& conversation) {
  conversation.calls_tools = conversation.options.tools.is_array() && !conversation.options.tools.empty();
  fields.boolean("parallel_tool_calls", true);
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) return;
  if (*choice == "none") {
    conversation.calls_tools = false;
    conversation.options.tools = nullptr;
  } else if (*choice != "auto") {
    throw ApiError(400, fmt::format("'tool_choice' is {}; \"auto\" and \"none\" are what this server can do", in_words(*choice)), "tool_choice");
  }
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
  read_tool_choice(fields, conversation);
  if (const Json* format = fields.object("response_format")) {
    const std::optional<std::string> type = Fields(*format, "response_format.").string("type");
    if (type != "text") throw ApiError(400, "'response_format' can only be {\"type\": \"text\"} on this server", "response_format");
  }
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

std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation, Generation& generation) {
  if (model.writer == nullptr)
    throw ApiError(400, fmt::format("the model {} has no chat format: use /v1/completions", quote(model.id)), "model");
  require_length(model, text_bytes(conversation.messages));
  ChatOptions options = conversation.options;
  ChatPrompt prompt;
  if (model.writes_tools) {
    prompt = model.writer->write(conversation.messages, options);
  } else {
    const Json tools = std::exchange(options.tools, nullptr);
    prompt = model.writer->write(with_tools_as_text(conversation.messages, tools), options);
  }
  generation.is_chat = true;
  generation.in_thought = prompt.in_thought;
  generation.finds_calls = conversation.calls_tools;
  generation.thought_budget = conversation.thought_budget;
  return encode_prompt(model.tokenizer, prompt);
}

}  // namespace beryl::server
