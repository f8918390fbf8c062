// Tools for models whose chat format has no form for them: declared in the system message, called and answered as text.
//
// The form is the one that most such models have seen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, which
// ReplyParser reads back, and <tool_response>...</tool_response> in a user's message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace beryl {

// How a model writes its calls, as ReplyParser reads them.
enum class CallNotation : uint8_t {
  kGemma4,   // <|tool_call>call:NAME{key:value,...}<tool_call|>, by tokens
  kTagged,   // <tool_call>{"name": ..., "arguments": {...}}</tool_call>, by tokens where the vocabulary has them, else as text
  kBare,     // {"name": ..., "parameters": {...}}, the whole reply
};
CallNotation call_notation(const ChatWriter& writer, const Tokenizer& tokenizer);

// Whether the writer's format shows the model a tool and the result of a call.
bool writes_tools(const ChatWriter& writer);

// The conversation with its tools, calls and results as text. messages and tools: OpenAI's lists. Throws Error(kBadInput).
// origins, if given: for each message of the result the one that it comes from, or the first of these.
inline constexpr size_t kNoMessage = SIZE_MAX;
nlohmann::ordered_json with_tools_as_text(const nlohmann::ordered_json& messages, const nlohmann::ordered_json& tools,
                                          std::vector<size_t>* origins = nullptr);

}  // namespace beryl
