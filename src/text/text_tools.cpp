#include "text/text_tools.h"

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

}  // namespace

bool writes_tools(const ChatWriter& writer) {
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
    const std::string text = writer.write(messages, options).text();
    return text.find("beryl-description") != std::string::npos && text.find("beryl_value") != std::string::npos &&
           text.find("beryl-result") != std::string::npos;
  } catch (const Error&) {
    return false;
  }
}

Json with_tools_as_text(const Json& messages, const Json& tools) {
  Json all = Json::array();
  const bool declares = !read_tools(tools).empty();
  if (declares) all.push_back({{"role", "system"}, {"content", declarations(tools)}});
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
  }
  return all;
}

}  // namespace beryl
