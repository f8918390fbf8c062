#include "text/text_tools.h"

#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "text/chat_message.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kIntroduction =
    "You can call functions. To call one, answer with nothing but\n"
    "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {...}}\n</tool_call>\n"
    "once for each call; its result comes back in <tool_response>. Call a function only when it helps. The functions:\n";

std::string to_line(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string call_text(const ToolCall& call) {
  return fmt::format("<tool_call>\n{}\n</tool_call>", to_line({{"name", call.name}, {"arguments", call.arguments}}));
}

std::string declarations(const Json& tools) {
  std::string text(kIntroduction);
  for (const Json* function : read_tools(tools)) text += to_line(*function) + "\n";
  return text;
}

// How the writer's format shows a tool, a call and its result; nullopt: it has no form for one of them.
std::optional<std::string> sample_call(const ChatWriter& writer) {
  const Json tool = {{"type", "function"},
                     {"function",
                      {{"name", "beryl_tool"},
                       {"description", "beryl-description"},
                       {"parameters", {{"type", "object"}, {"properties", {{"beryl_key", {{"type", "string"}}}}}}}}}};
  const Json call = {{"id", "call00001"},
                     {"type", "function"},
                     {"function", {{"name", "beryl_tool"}, {"arguments", "{\"beryl_key\": \"beryl_value\"}"}}}};
  const Json question = {{"role", "user"}, {"content", "beryl-question"}};
  const Json messages = Json::array({question,
                                     {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array({call})}},
                                     {{"role", "tool"}, {"tool_call_id", "call00001"}, {"name", "beryl_tool"}, {"content", "beryl-result"}}});
  ChatOptions options;
  options.tools = Json::array({tool});
  try {
    std::string text = writer.write(messages, options).text();
    for (const char* part : {"beryl-description", "beryl_value", "beryl-result"})
      if (text.find(part) == std::string::npos) return std::nullopt;
    return text;
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

bool writes_tools(const ChatWriter& writer) { return sample_call(writer).has_value(); }

CallNotation call_notation(const ChatWriter& writer, const Tokenizer& tokenizer) {
  const auto has = [&](std::string_view begin, std::string_view end) { return tokenizer.find_token(begin) && tokenizer.find_token(end); };
  if (has("<|tool_call>", "<tool_call|>")) return CallNotation::kGemma4;
  if (has("<tool_call>", "</tool_call>")) return CallNotation::kTagged;
  const std::optional<std::string> sample = sample_call(writer);
  return !sample || sample->find("<tool_call>") != std::string::npos ? CallNotation::kTagged : CallNotation::kBare;
}

Json with_tools_as_text(const Json& messages, const Json& tools, std::vector<size_t>* origins) {
  Json all = Json::array();
  std::vector<size_t> its_origins;
  const bool declares = !read_tools(tools).empty();
  if (declares) all.push_back({{"role", "system"}, {"content", declarations(tools)}});
  if (declares) its_origins.push_back(kNoMessage);
  bool results = false;   // the last message is made of results
  for (const Message& message : read_messages(messages, false)) {
    const Json& original = messages[message.index];
    const bool is_result = message.role == Role::kTool;
    if (is_result) {
      const std::string text =
          fmt::format("<tool_response>\n{}\n</tool_response>", message.value.is_null() ? message.text() : to_line(message.value));
      if (results) {
        all.back()["content"] = all.back()["content"].get<std::string>() + "\n" + text;
      } else {
        all.push_back({{"role", "user"}, {"content", text}});
      }
    } else if (!message.tool_calls.empty()) {
      std::string text = message.text();
      for (const ToolCall& call : message.tool_calls) {
        if (!text.empty()) text += '\n';
        text += call_text(call);
      }
      all.push_back({{"role", "assistant"}, {"content", text}});
    } else if (message.role == Role::kSystem && declares && all.size() == 1) {
      all.front()["content"] = message.text() + "\n\n" + all.front()["content"].get<std::string>();
    } else {
      all.push_back(original);
    }
    results = is_result;
    its_origins.resize(all.size(), message.index);
  }
  if (origins != nullptr) *origins = std::move(its_origins);
  return all;
}

}  // namespace beryl
