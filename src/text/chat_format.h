// Conversations as prompts, in the formats that Gemma 4, Gemma 3, Llama 3 and ChatML models were trained on.
//
// A prompt is a list of pieces: control tokens that the format itself writes, and text. Text is never searched for
// control tokens, so whatever a user or a tool writes stays text. Joined together the pieces are, character for
// character, what the models' own templates write (tests/golden/chat_cases.json).
#pragma once

#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl {

enum class ChatFamily { kGemma4, kGemma3, kLlama3, kChatMl };

// A format and those of its habits that differ between models.
struct ChatFormat {
  ChatFamily family = ChatFamily::kChatMl;
  bool empty_thought = true;     // Gemma 4: without thinking, a reply starts with an empty thought (not E2B and E4B)
  bool dated_system = true;      // Llama 3.1 and later: always a system turn, with two dates
  bool todays_date = false;      // Llama 3.2: the second date is today's; else 26 Jul 2024
  std::string default_system = {};   // ChatML: the system text of a conversation that has none; empty: no system turn
  std::vector<std::string> warnings = {};   // what detection assumed, one line each
};

std::string_view name(ChatFamily family);

struct ChatOptions {
  bool add_generation_prompt = true;    // end with the opening of the reply
  bool enable_thinking = false;         // Gemma 4
  bool preserve_thinking = false;       // Gemma 4: keep the thoughts of all messages with tool calls, not only the last
  bool media_placeholders = false;      // write images and audio as placeholders instead of refusing them
  nlohmann::ordered_json tools = nullptr;   // OpenAI's list; null or empty: none
  std::string today = {};               // for ChatFormat::todays_date, "01 Jan 2026"; empty: the clock's date
  nlohmann::ordered_json template_variables = nullptr;   // for templates only: an object of what else they may read
};

struct PromptPiece {
  std::string text;       // never empty
  bool control = false;   // one token, by its exact name
};

struct ChatPrompt {
  std::vector<PromptPiece> pieces;      // no two text pieces are neighbours
  bool in_thought = false;              // the prompt ends inside an open thought: the reply begins as reasoning
  std::vector<std::string> warnings;    // what the format could not express, one line each
  std::string text() const;             // all pieces joined
};

// messages: OpenAI's list (role, content as a string or text parts, tool_calls, tool_call_id, reasoning or
// reasoning_content). Throws Error(kBadInput), naming the message, for what the format can not hold: unknown roles,
// roles out of order (Gemma 3), media parts, tool arguments that are neither an object nor a string, a tool result without a
// call. A string that is no JSON object is written as it is.
ChatPrompt format_chat(const ChatFormat& format, const nlohmann::ordered_json& messages, const ChatOptions& options);

// Control pieces by name, text with special parsing off, and exactly one BOS where the model wants one. Throws
// Error(kBadInput) when the vocabulary lacks a control token: the prompt's format is not this model's.
std::vector<int32_t> encode_prompt(const Tokenizer& tokenizer, const ChatPrompt& prompt);

// The built-in format of a model, by its architecture and by which turn markers its vocabulary has; its template, where
// it has one, settles the details. nullopt when the vocabulary has no markers of a built-in format (GPT-2).
std::optional<ChatFormat> detect_chat_format(const Checkpoint& checkpoint, const Tokenizer& tokenizer);

// Whose turns this token opens; nullopt when no built-in format's.
std::optional<ChatFamily> find_family_of_marker(std::string_view token);

// The Jinja template that the checkpoint carries.
std::optional<std::string> find_chat_template(const Checkpoint& checkpoint);

}  // namespace beryl
