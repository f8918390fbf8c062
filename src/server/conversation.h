// A conversation as a request has it, and the prompt that the model is given for it.
#pragma once

#include <string>
#include <vector>

#include "server/generation.h"
#include "server/json_fields.h"
#include "server/structured_output.h"
#include "text/chat_format.h"

namespace beryl::server {

struct Conversation {
  Json messages;           // OpenAI's list
  std::string field = "messages";   // of the request, where they came from
  std::vector<std::string> places = {};   // of each message: the request's field that it comes from, or the first of these
  ChatOptions options;     // tools, thinking, the template's variables
  ToolChoice tool_choice;
  ReplyForm form;
  int64_t thought_budget = INT64_MAX;
};

// messages, tools, tool_choice, response_format, reasoning_effort, chat_template_kwargs, thinking_budget.
Conversation read_conversation(const Fields& fields);

// none: no thinking; the other of OpenAI's words: thinking. Throws ApiError(400) for what is none of them.
bool thinks_at(const Fields& fields, const char* name, const std::string& effort);
// As the client asked: thinking, or none, not even by models that begin a thought by themselves.
void set_thinking(Conversation& conversation, bool thinks);
// A function that the model may call: name, description, its schema (a member of that name), strict. Throws ApiError(400).
Json read_function(const Fields& tool, const char* schema);
// tools: [{"function": {"name": ...}}]. Throws ApiError(400) where two have one name.
void require_different_names(const Json& tools);
// The prompt's ids. Throws ApiError(400) or Error(kBadInput).
std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation);
// The same, and tells `generation` how to read the reply, and what binds it.
std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation, Generation& generation);

}  // namespace beryl::server
