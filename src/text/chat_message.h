// Messages as the chat formats need them, read from OpenAI's JSON and checked once for all formats.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/chat_format.h"

namespace beryl {

enum class Role { kSystem, kUser, kAssistant, kTool };

struct ContentPart {
  enum class Kind { kText, kImage, kAudio, kVideo };
  Kind kind = Kind::kText;
  std::string text;
};

struct ToolCall {
  std::string id;                     // empty when the caller gave none
  std::string name;
  nlohmann::ordered_json arguments;   // an object; or a string: what the caller sent, which is the text of none
};

struct ToolResult {
  std::string name;
  nlohmann::ordered_json value;
};

struct Message {
  size_t index = 0;                   // in the caller's list, for messages
  Role role = Role::kUser;
  bool has_content = false;           // not null, not absent
  bool is_list = false;               // the content is a list of parts, not a string
  std::vector<ContentPart> parts;     // a string is one part
  nlohmann::ordered_json value;       // a tool result that is no text
  std::string reasoning;
  std::vector<ToolCall> tool_calls;
  std::vector<ToolResult> tool_results;   // Gemma's own way: results within the assistant's message
  std::string tool_call_id;           // of a tool's message
  std::string name;

  // All text parts joined.
  std::string text() const;
};

// Throws Error(kBadInput) naming the message. allow_media: parts of other kinds are kept instead of refused.
std::vector<Message> read_messages(const nlohmann::ordered_json& messages, bool allow_media);

// The functions of OpenAI's tools list; empty for null. Throws Error(kBadInput) for anything else.
std::vector<const nlohmann::ordered_json*> read_tools(const nlohmann::ordered_json& tools);

// What a parameter's schema, or that of all parameters of a tool, can say that many formats have no form for.
inline constexpr std::array<std::string_view, 9> kRareKeywords = {
    "$ref", "anyOf", "oneOf", "allOf", "not", "if", "const", "patternProperties", "prefixItems"};
inline constexpr std::array<std::string_view, 6> kRareRootKeywords = {"anyOf", "oneOf",       "allOf",
                                                                      "$defs", "definitions", "$ref"};
// The line that says so. parameter: empty for the schema of all parameters.
std::string unexpressed_warning(std::string_view tool, std::string_view parameter, std::string_view keyword);

std::string_view name(Role role);
Error bad_message(size_t index, std::string_view what);

// Collects a prompt; neighbouring texts become one piece.
class PromptBuilder {
 public:
  void text(std::string_view text);
  void control(std::string_view token) { prompt_.pieces.push_back({std::string(token), true}); }
  void warn(std::string line);
  void set_in_thought() { prompt_.in_thought = true; }
  ChatPrompt take() { return std::move(prompt_); }

 private:
  ChatPrompt prompt_;
};

// One function a format, in a file each.
ChatPrompt format_gemma4(const ChatFormat& format, const std::vector<Message>& messages, const ChatOptions& options);
ChatPrompt format_gemma3(const std::vector<Message>& messages, const ChatOptions& options);
ChatPrompt format_llama3(const ChatFormat& format, const std::vector<Message>& messages, const ChatOptions& options);
ChatPrompt format_chatml(const ChatFormat& format, const std::vector<Message>& messages, const ChatOptions& options);

}  // namespace beryl
