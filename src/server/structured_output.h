// What a request binds its reply to: a form of its content (response_format and its kin), calls of tools (tool_choice, strict
// tools). Read from each API's words, and made the constraint that the engine is given.
#pragma once

#include <string>
#include <vector>

#include "grammar/constraint.h"
#include "server/generation.h"
#include "server/json_fields.h"

namespace beryl::server {

struct ReplyForm {
  ConstraintSpec::Kind kind = ConstraintSpec::Kind::kText;
  std::string text = {};           // ConstraintSpec::text
  std::string field = {};          // where it was read from, for messages
};

struct ToolChoice {
  bool may_call = false;
  bool must_call = false;
  bool single = false;             // one call at most
  std::vector<std::string> names = {};   // of the tools that may be called; none: all
};

// {"type": "text" | "json_object" | "json_schema" | "regex", ...}; a schema stands in the member json_schema (chat), or with its
// name beside the type (responses, Anthropic's).
ReplyForm read_reply_form(const Json& format, const std::string& field);
// OpenAI's tool_choice and parallel_tool_calls; `tools` in the form of chats. Throws ApiError(400).
ToolChoice read_tool_choice(const Fields& fields, const Json& tools);
// Throws ApiError(400) unless a tool has this name.
void require_tool(const Json& tools, const std::string& name, const std::string& field);

// Tells `generation` what binds the reply, if anything does; its is_chat must be set. tools: OpenAI's list. Throws
// ApiError(400) for what can not be expressed.
void bind_generation(const ServedModel& model, const ReplyForm& form, const ToolChoice& choice, const Json& tools, Generation& generation);

}  // namespace beryl::server
