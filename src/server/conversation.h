// A conversation as a request has it, and the prompt that the model is given for it.
#pragma once

#include <vector>

#include "server/generation.h"
#include "server/json_fields.h"
#include "text/chat_format.h"

namespace beryl::server {

struct Conversation {
  Json messages;           // OpenAI's list
  ChatOptions options;     // tools, thinking, the template's variables
  bool calls_tools = false;
  int64_t thought_budget = INT64_MAX;
};

// messages, tools, tool_choice, response_format, reasoning_effort, chat_template_kwargs, thinking_budget.
Conversation read_conversation(const Fields& fields);

// none: no thinking; the other of OpenAI's words: thinking. Throws ApiError(400) for what is none of them.
bool thinks_at(const Fields& fields, const char* name, const std::string& effort);
// "auto" or "none"; other choices need grammars. Sets the tools aside for none.
void read_tool_choice(const Fields& fields, Conversation& conversation);

// The prompt's ids; tells `generation` how to read the reply. Throws ApiError(400) or Error(kBadInput).
std::vector<int32_t> write_prompt(const ServedModel& model, const Conversation& conversation, Generation& generation);

}  // namespace beryl::server
