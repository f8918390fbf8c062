// The three formats that are turns and little else: Gemma 3, Llama 3, ChatML.
#include <fmt/format.h>

#include "base/error.h"
#include "text/chat_message.h"
#include "text/python_text.h"
#include "text/utf8.h"

namespace beryl {

namespace {

using Json = nlohmann::ordered_json;

void refuse_media(const Message& message) {
  for (const ContentPart& part : message.parts)
    if (part.kind != ContentPart::Kind::kText)
      throw bad_message(message.index, "this model's chat format has no form for images, audio or video");
}

void refuse_tool_messages(const Message& message) {
  if (message.role == Role::kTool || !message.tool_calls.empty() || !message.tool_results.empty())
    throw bad_message(message.index, "this model's chat format has no form for tool calls and their results");
}

void warn_of_tools(PromptBuilder& out, const ChatOptions& options) {
  if (!read_tools(options.tools).empty())
    out.warn("this model's chat format has no form for tools; their declarations are left out");
}

void warn_of_thinking(PromptBuilder& out, const ChatOptions& options) {
  if (options.enable_thinking) out.warn("this model's chat format has no form for thinking; it is left out");
}

// "26 Jul 2024"
std::string date_today() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  return fmt::format("{:02} {} {}", local.tm_mday, kMonths[local.tm_mon], local.tm_year + 1900);
}

}  // namespace

// <bos> <start_of_turn>ROLE \n CONTENT <end_of_turn> \n ... with the roles user and model in turn. There is no system
// role: its text goes in front of the first user's.
ChatPrompt format_gemma3(const std::vector<Message>& all, const ChatOptions& options) {
  PromptBuilder out;
  warn_of_tools(out, options);
  warn_of_thinking(out, options);
  const bool has_system = all.front().role == Role::kSystem;
  if (has_system) refuse_media(all.front());

  out.control("<bos>");
  for (size_t i = has_system ? 1 : 0; i < all.size(); ++i) {
    const Message& message = all[i];
    refuse_tool_messages(message);
    const bool first = i == (has_system ? 1u : 0u);
    const bool users_turn = (i - (has_system ? 1 : 0)) % 2 == 0;
    if ((message.role == Role::kUser) != users_turn || message.role == Role::kSystem)
      throw bad_message(message.index, fmt::format("role '{}': Conversation roles must alternate "
                                                   "user/assistant/user/assistant/...", name(message.role)));
    out.control("<start_of_turn>");
    out.text(message.role == Role::kAssistant ? "model\n" : "user\n");
    if (first && has_system) out.text(all.front().text() + "\n\n");
    for (const ContentPart& part : message.parts) {
      if (part.kind == ContentPart::Kind::kText)
        out.text(trim(part.text));
      else if (part.kind == ContentPart::Kind::kImage)
        out.control("<start_of_image>");
      else
        throw bad_message(message.index, "this model's chat format has no form for audio or video");
    }
    out.control("<end_of_turn>");
    out.text("\n");
  }
  if (has_system && all.size() == 1) throw bad_message(0, "a system message needs a user's message to go with");
  if (options.add_generation_prompt) {
    out.control("<start_of_turn>");
    out.text("model\n");
  }
  return out.take();
}

// <|begin_of_text|> <|start_header_id|>ROLE<|end_header_id|> \n\n CONTENT <|eot_id|> ... From 3.1 on a system turn with
// two dates always comes first, and tools are declared as JSON in the first user's turn.
ChatPrompt format_llama3(const ChatFormat& format, const std::vector<Message>& all, const ChatOptions& options) {
  PromptBuilder out;
  warn_of_thinking(out, options);
  const std::vector<const Json*> tools = read_tools(options.tools);
  const bool declares_tools = !tools.empty() && format.dated_system;
  if (!tools.empty() && !format.dated_system) warn_of_tools(out, options);
  const auto header = [&](std::string_view role) {
    out.control("<|start_header_id|>");
    out.text(role);
    out.control("<|end_header_id|>");
    out.text("\n\n");
  };
  const auto end_turn = [&] { out.control("<|eot_id|>"); };

  size_t next = 0;
  out.control("<|begin_of_text|>");
  if (format.dated_system) {
    header("system");
    if (declares_tools) out.text("Environment: ipython\n");
    const std::string today =
        !format.todays_date ? "26 Jul 2024" : options.today.empty() ? date_today() : options.today;
    out.text(fmt::format("Cutting Knowledge Date: December 2023\nToday Date: {}\n\n", today));
    if (all.front().role == Role::kSystem) {
      refuse_media(all.front());
      out.text(trim(all.front().text()));
      next = 1;
    }
    end_turn();
  }
  if (declares_tools) {
    if (next == all.size() || all[next].role != Role::kUser)
      throw Error(ErrorCode::kBadInput,
                  "Cannot put tools in the first user message when there's no first user message!");
    refuse_media(all[next]);
    header("user");
    out.text("Given the following functions, please respond with a JSON for a function call with its proper arguments "
             "that best answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": "
             "dictionary of argument name and its value}.Do not use variables.\n\n");
    for (const Json& tool : options.tools) out.text(python_json(tool, 4) + "\n\n");
    out.text(trim(all[next].text()));
    end_turn();
    ++next;
  }

  for (; next < all.size(); ++next) {
    const Message& message = all[next];
    refuse_media(message);
    if (!message.tool_results.empty()) refuse_tool_messages(message);
    if (!format.dated_system) refuse_tool_messages(message);
    if (!message.tool_calls.empty()) {
      if (message.tool_calls.size() != 1)
        throw bad_message(message.index, "This model only supports single tool-calls at once!");
      if (!trim(message.text()).empty())
        out.warn("this model's chat format has no form for text beside a tool call; the text is left out");
      const ToolCall& call = message.tool_calls.front();
      header("assistant");
      out.text(fmt::format("{{\"name\": \"{}\", \"parameters\": {}}}", call.name, python_json(call.arguments)));
    } else if (message.role == Role::kTool) {
      header("ipython");
      out.text(python_json(message.value.is_null() ? Json(message.text()) : message.value));
    } else {
      header(name(message.role));
      out.text(trim(message.text()));
    }
    end_turn();
  }
  if (options.add_generation_prompt) header("assistant");
  return out.take();
}

// <|im_start|>ROLE \n CONTENT <|im_end|> \n ... without BOS; the content as it is.
ChatPrompt format_chatml(const ChatFormat& format, const std::vector<Message>& all, const ChatOptions& options) {
  PromptBuilder out;
  warn_of_tools(out, options);
  warn_of_thinking(out, options);
  const auto turn = [&](std::string_view role, std::string_view content) {
    out.control("<|im_start|>");
    out.text(role);
    out.text("\n");
    out.text(content);
    out.control("<|im_end|>");
    out.text("\n");
  };
  if (!format.default_system.empty() && all.front().role != Role::kSystem) turn("system", format.default_system);
  for (const Message& message : all) {
    refuse_media(message);
    refuse_tool_messages(message);
    if (!message.has_content) throw bad_message(message.index, "it has no content");
    turn(name(message.role), message.text());
  }
  if (options.add_generation_prompt) {
    out.control("<|im_start|>");
    out.text("assistant\n");
  }
  return out.take();
}

}  // namespace beryl
