// A client's conversation as a prompt, also where the model's format takes user and assistant in turn only.
//
// Agents send two user's messages in a row, results of tools and a question, system messages later on; Anthropic's own API takes
// neighbours of a role as one message. Formats that alternate refuse all that. What a format takes as it is stays as it is.
#pragma once

#include <nlohmann/json.hpp>

#include "text/chat_writer.h"

namespace beryl {

// messages: OpenAI's list; options.tools likewise. writes_tools: the format has a form for tools (text_tools.h), else they are text.
//
// Where the format refuses the messages, neighbours of one role are joined, a blank line between their texts, all system messages
// are put in front as one, and where an assistant speaks first an empty user's message goes before it; a warning says so. Throws
// Error(kBadInput) for what is refused all the same; the message begins with "message N: ", N of `messages`, where it is about one.
ChatPrompt write_conversation(const ChatWriter& writer, bool writes_tools, const nlohmann::ordered_json& messages, const ChatOptions& options);

}  // namespace beryl
