#include "text/chat_message.h"

#include <fmt/format.h>

#include "base/error.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

// The member as a string; empty when absent or null.
std::string string_member(const Json& object, const char* key, size_t index) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (!found->is_string())
    throw bad_message(index, fmt::format("'{}' is a {}, expected a string", key, found->type_name()));
  return found->get<std::string>();
}

Role read_role(const Json& message, size_t index) {
  const std::string role = string_member(message, "role", index);
  if (role == "system" || role == "developer") return Role::kSystem;
  if (role == "user") return Role::kUser;
  if (role == "assistant") return Role::kAssistant;
  if (role == "tool") return Role::kTool;
  throw bad_message(index, role.empty()
                               ? "it has no role"
                               : fmt::format("role {} is unknown; known are system, developer, user, assistant "
                                             "and tool",
                                             quote(role)));
}

ContentPart read_part(const Json& part, size_t index, bool allow_media) {
  if (!part.is_object())
    throw bad_message(index, fmt::format("a content part is a {}, expected an object", part.type_name()));
  const std::string type = string_member(part, "type", index);
  if (type == "text" || type == "input_text" || type == "output_text") {
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) throw bad_message(index, "a text part has no text");
    return {ContentPart::Kind::kText, text->get<std::string>()};
  }
  ContentPart media;
  if (type == "image" || type == "image_url" || type == "input_image")
    media.kind = ContentPart::Kind::kImage;
  else if (type == "audio" || type == "input_audio" || type == "audio_url")
    media.kind = ContentPart::Kind::kAudio;
  else if (type == "video" || type == "video_url")
    media.kind = ContentPart::Kind::kVideo;
  else
    throw bad_message(index, fmt::format("content part of type {} is unknown; only text is read", quote(type)));
  if (!allow_media) throw bad_message(index, fmt::format("it holds a part of type {}; only text is read", quote(type)));
  return media;
}

void read_content(const Json& json, bool allow_media, Message& message) {
  const auto content = json.find("content");
  if (content == json.end() || content->is_null()) return;
  message.has_content = true;
  if (content->is_string()) {
    message.parts.push_back({ContentPart::Kind::kText, content->get<std::string>()});
  } else if (content->is_array()) {
    message.is_list = true;
    for (const Json& part : *content) message.parts.push_back(read_part(part, message.index, allow_media));
  } else if (message.role == Role::kTool) {
    message.value = *content;   // a result that is not text: an object, a number
  } else {
    throw bad_message(message.index,
                      fmt::format("content is a {}, expected a string or a list of parts", content->type_name()));
  }
}

Json read_arguments(const Json& function, size_t index) {
  const auto arguments = function.find("arguments");
  if (arguments == function.end() || arguments->is_null()) return Json::object();
  Json value = *arguments;
  if (value.is_string()) {   // OpenAI's form: JSON as text, or what a model wrote in its place
    const std::string& text = value.get_ref<const std::string&>();
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) return Json::object();
    try {
      Json parsed = parse_json<Json>("arguments", text);
      if (parsed.is_object()) return parsed;
    } catch (const Error&) {
      // as it is
    }
    return value;
  }
  if (!value.is_object())
    throw bad_message(index, fmt::format("arguments of a tool call are a {}, expected a JSON object, or a string", value.type_name()));
  return value;
}

void read_tool_calls(const Json& json, Message& message) {
  const auto calls = json.find("tool_calls");
  if (calls == json.end() || calls->is_null()) return;
  if (!calls->is_array()) throw bad_message(message.index, "tool_calls is not a list");
  if (!calls->empty() && message.role != Role::kAssistant)
    throw bad_message(message.index, "only an assistant's message can hold tool_calls");
  for (const Json& call : *calls) {
    if (!call.is_object() || !call.contains("function") || !call["function"].is_object())
      throw bad_message(message.index, "a tool call has no function");
    const Json& function = call["function"];
    ToolCall read{string_member(call, "id", message.index), string_member(function, "name", message.index),
                  read_arguments(function, message.index)};
    if (read.name.empty()) throw bad_message(message.index, "a tool call has no name");
    message.tool_calls.push_back(std::move(read));
  }
}

void read_tool_results(const Json& json, Message& message) {
  const auto results = json.find("tool_responses");
  if (results == json.end() || results->is_null()) return;
  if (!results->is_array()) throw bad_message(message.index, "tool_responses is not a list");
  for (const Json& result : *results) {
    if (!result.is_object()) throw bad_message(message.index, "a tool response is not an object");
    std::string tool = string_member(result, "name", message.index);
    message.tool_results.push_back(
        {tool.empty() ? "unknown" : tool, result.contains("response") ? result["response"] : Json()});
  }
}

}  // namespace

std::string unexpressed_warning(std::string_view tool, std::string_view parameter, std::string_view keyword) {
  const std::string where = parameter.empty() ? "" : fmt::format("parameter {}: ", quote(parameter));
  return fmt::format("tool {}: {}{} has no form in this model's tool declarations and is left out", quote(tool), where,
                     quote(keyword));
}

Error bad_message(size_t index, std::string_view what) {
  return {ErrorCode::kBadInput, fmt::format("message {}: {}", index, what)};
}

std::string_view name(Role role) {
  switch (role) {
    case Role::kSystem: return "system";
    case Role::kUser: return "user";
    case Role::kAssistant: return "assistant";
    case Role::kTool: return "tool";
  }
  return "";
}

std::string Message::text() const {
  std::string all;
  for (const ContentPart& part : parts)
    if (part.kind == ContentPart::Kind::kText) all += part.text;
  return all;
}

std::vector<Message> read_messages(const Json& messages, bool allow_media) {
  if (!messages.is_array() || messages.empty())
    throw Error(ErrorCode::kBadInput, "messages is empty or not a list");
  std::vector<Message> read;
  read.reserve(messages.size());
  for (const Json& json : messages) {
    Message message;
    message.index = read.size();
    if (!json.is_object()) throw bad_message(message.index, "it is not an object");
    message.role = read_role(json, message.index);
    read_content(json, allow_media, message);
    read_tool_calls(json, message);
    read_tool_results(json, message);
    message.reasoning = string_member(json, "reasoning", message.index);
    if (message.reasoning.empty()) message.reasoning = string_member(json, "reasoning_content", message.index);
    message.tool_call_id = string_member(json, "tool_call_id", message.index);
    message.name = string_member(json, "name", message.index);
    read.push_back(std::move(message));
  }
  return read;
}

std::vector<const Json*> read_tools(const Json& tools) {
  std::vector<const Json*> functions;
  if (tools.is_null()) return functions;
  if (!tools.is_array()) throw Error(ErrorCode::kBadInput, "tools is not a list");
  for (const Json& tool : tools) {
    const bool whole = tool.is_object() && tool.contains("function") && tool["function"].is_object() &&
                       tool["function"].contains("name") && tool["function"]["name"].is_string();
    if (!whole)
      throw Error(ErrorCode::kBadInput, fmt::format("tool {}: it has no function with a name", functions.size()));
    functions.push_back(&tool["function"]);
  }
  return functions;
}

void PromptBuilder::text(std::string_view text) {
  if (text.empty()) return;
  if (!prompt_.pieces.empty() && !prompt_.pieces.back().control)
    prompt_.pieces.back().text += text;
  else
    prompt_.pieces.push_back({std::string(text), false});
}

void PromptBuilder::warn(std::string line) {
  for (const std::string& known : prompt_.warnings)
    if (known == line) return;
  prompt_.warnings.push_back(std::move(line));
}

}  // namespace beryl
