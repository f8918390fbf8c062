// A chat on this terminal, or with what is piped in: messages, replies, and commands that begin with a slash.
#pragma once

#include "cli/speaker.h"

namespace beryl::cli {

enum class ChatHistory : uint8_t { kKept, kForgotten };   // what was typed, in a file, for the next time

// Until the input ends. The options are those that the speaker was made with; commands change them. Returns the exit status.
int hold_chat(Speaker& speaker, SpeakOptions& options, ChatHistory history);

}  // namespace beryl::cli
