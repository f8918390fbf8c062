// POST /v1/messages and /v1/messages/count_tokens: Anthropic's API. Its messages become OpenAI's, its reply is made of blocks.
#include <set>

#include <fmt/format.h>

#include "server/api.h"
#include "server/conversation.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

constexpr size_t kMaxStops = 16;

struct Message {
  explicit Message(const ServedModel& served) : model(served) {}

  const ServedModel& model;
  Generation generation;
  std::string id = random_id("msg_");
  std::vector<Reply> replies;    // one
  Json content = Json::array();  // the blocks so far
  enum class Block : uint8_t { kNone, kThinking, kText } block = Block::kNone;   // the last of them, where it may grow
};

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ApiError(400, fmt::format("'{}' {}", where, what), where);
}

// A text, or blocks of type text.
std::string text_of(const Json& value, const std::string& where) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) refuse(where, fmt::format("is {}, a text or an array of blocks was expected", in_words(value)));
  std::string text;
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& block = value[i];
    const std::string place = fmt::format("{}.{}", where, i);
    if (!block.is_object()) refuse(place, fmt::format("is {}, a block was expected", in_words(block)));
    const Fields fields(block, place + ".");
    if (fields.required_string("type") != "text") refuse(place, fmt::format("is a block of type {}, only texts can be read here", in_words(block["type"])));
    text += fields.required_string("text");
  }
  return text;
}

// One message's blocks as OpenAI's messages: results of tools first, then the rest.
// known: the ids of calls so far.
void add_blocks(const std::string& role, const Json& content, const std::string& where, Json& messages, std::set<std::string>& known) {
  std::string text, reasoning;
  Json calls = Json::array();
  const size_t n_before = messages.size();
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& block = content[i];
    const std::string place = fmt::format("{}.{}", where, i);
    if (!block.is_object()) refuse(place, fmt::format("is {}, a block was expected", in_words(block)));
    const Fields fields(block, place + ".");
    const std::string type = fields.required_string("type");
    if (type == "text") {
      text += fields.required_string("text");
    } else if (type == "thinking" && role == "assistant") {
      reasoning += fields.required_string("thinking");
    } else if (type == "redacted_thinking" && role == "assistant") {
      continue;   // nobody can read it
    } else if (type == "tool_use" && role == "assistant") {
      const Json* input = fields.object("input");
      known.insert(fields.required_string("id"));
      calls.push_back({{"id", fields.required_string("id")},
                       {"type", "function"},
                       {"function", {{"name", fields.required_string("name")}, {"arguments", to_line(input == nullptr ? Json::object() : *input)}}}});
    } else if (type == "tool_result" && role == "user") {
      const Json* result = fields.find("content");
      const std::string id = fields.required_string("tool_use_id");
      if (!known.contains(id)) refuse(place + ".tool_use_id", fmt::format("is {}, the id of a tool_use before it was expected", quote(id)));
      // The model's formats have no other place for it.
      const char* const begin = fields.boolean("is_error", false) ? "Error: " : "";
      messages.push_back({{"role", "tool"}, {"tool_call_id", id}, {"content", begin + (result == nullptr ? "" : text_of(*result, place + ".content"))}});
    } else {
      refuse(place, fmt::format("is a block of type {}, which this model can not be given here", quote(type)));
    }
  }
  // A turn that says nothing is a turn all the same; but not behind results of tools.
  if (text.empty() && calls.empty() && reasoning.empty() && messages.size() > n_before) return;
  Json message = {{"role", role}, {"content", text}};
  if (!reasoning.empty()) message["reasoning_content"] = reasoning;
  if (!calls.empty()) message["tool_calls"] = std::move(calls);
  messages.push_back(std::move(message));
}

void read_tools(const Fields& fields, Conversation& conversation) {
  Json tools = Json::array();
  if (const Json* given = fields.array("tools"))
    for (size_t i = 0; i < given->size(); ++i) {
      const Json& tool = (*given)[i];
      const std::string place = fmt::format("tools.{}", i);
      if (!tool.is_object()) refuse(place, fmt::format("is {}, an object was expected", in_words(tool)));
      const Fields each(tool, place + ".");
      if (const std::optional<std::string> type = each.string("type"); type && *type != "custom")
        refuse(place, fmt::format("is a tool of type {}; tools of the type custom are what this server can do", quote(*type)));
      tools.push_back({{"type", "function"}, {"function", read_function(each, "input_schema")}});
    }
  require_different_names(tools);
  const bool has_tools = !tools.empty();
  ToolChoice& choice = conversation.tool_choice;
  choice.may_call = has_tools;
  conversation.options.tools = std::move(tools);
  const Json* object = fields.object("tool_choice");
  if (object == nullptr) return;
  const Fields chosen(*object, "tool_choice.");
  const std::string type = chosen.required_string("type");
  if (type != "auto" && type != "any" && type != "tool" && type != "none") chosen.refuse("type", "auto, any, tool or none");
  if (type == "none") {
    choice = {};
    return;
  }
  choice.single = chosen.boolean("disable_parallel_tool_use", false);
  choice.must_call = type != "auto";
  if (choice.must_call && !has_tools) refuse("tool_choice", "asks for a call, but there are no tools");
  if (type != "tool") return;
  choice.names = {chosen.required_string("name")};
  require_tool(conversation.options.tools, choice.names[0], "tool_choice.name");
}

Conversation read_messages(const Fields& fields) {
  Conversation conversation;
  conversation.messages = Json::array();
  if (const Json* system = fields.find("system")) {
    const std::string text = text_of(*system, "system");
    if (!text.empty()) conversation.messages.push_back({{"role", "system"}, {"content", text}});
    conversation.places.resize(conversation.messages.size(), "system");
  }
  const Json* messages = fields.array("messages");
  if (messages == nullptr || messages->empty()) fields.refuse("messages", "an array of at least one message");
  std::set<std::string> calls;
  for (size_t i = 0; i < messages->size(); ++i) {
    const Json& message = (*messages)[i];
    const std::string where = fmt::format("messages.{}", i);
    if (!message.is_object()) refuse(where, fmt::format("is {}, an object was expected", in_words(message)));
    const Fields each(message, where + ".");
    const std::string role = each.required_string("role");
    if (role != "user" && role != "assistant") refuse(where + ".role", fmt::format("is {}, user or assistant was expected", quote(role)));
    const Json* content = each.find("content");
    if (content == nullptr || !(content->is_string() || content->is_array())) each.refuse("content", "a text or an array of blocks");
    if (content->is_string()) {
      conversation.messages.push_back({{"role", role}, {"content", *content}});
    } else {
      add_blocks(role, *content, where + ".content", conversation.messages, calls);
    }
    conversation.places.resize(conversation.messages.size(), where);   // none, one, or several: results of tools are messages of their own
    if (i + 1 == messages->size() && role == "assistant")
      refuse(where + ".role", "is assistant; a conversation must end with a user's message, since this server does not go on with a reply");
  }
  read_tools(fields, conversation);
  if (const Json* output = fields.object("output_config"))
    if (const Json* format = Fields(*output, "output_config.").object("format"))
      conversation.form = read_reply_form(*format, "output_config.format");
  if (const Json* format = fields.object("output_format")) conversation.form = read_reply_form(*format, "output_format");   // as it was called first
  if (const Json* thinking = fields.object("thinking")) {
    const Fields each(*thinking, "thinking.");
    const std::string type = each.required_string("type");
    if (type != "enabled" && type != "disabled" && type != "adaptive") each.refuse("type", "enabled, adaptive or disabled");
    set_thinking(conversation, type != "disabled");
    conversation.thought_budget = each.integer("budget_tokens", conversation.thought_budget, 1, INT32_MAX);
  }
  return conversation;
}

const char* stop_reason(const Reply& reply) {
  switch (reply.finish()) {
    case Reply::Finish::kStopString: return "stop_sequence";
    case Reply::Finish::kLength: return "max_tokens";
    case Reply::Finish::kCalls: return "tool_use";
    default: return "end_turn";
  }
}

Json stop_sequence(const Reply& reply) {
  return reply.finish() == Reply::Finish::kStopString ? Json(reply.stop_string()) : Json(nullptr);
}

Json usage_of(const Reply& reply) {
  const RequestTimings& timings = reply.result().timings;
  return {{"input_tokens", timings.prompt_tokens - timings.reused_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", timings.reused_tokens},
          {"output_tokens", reply.n_tokens()}};
}

Json head_of(const Message& message, int64_t n_prompt) {
  return {{"id", message.id},
          {"type", "message"},
          {"role", "assistant"},
          {"model", message.model.id},
          {"content", Json::array()},
          {"stop_reason", nullptr},
          {"stop_sequence", nullptr},
          {"usage", {{"input_tokens", n_prompt}, {"output_tokens", 0}}}};
}

std::string named_event(const char* type, Json data) {
  Json event = {{"type", type}};
  event.update(data);
  return fmt::format("event: {}\n{}", type, event_of(event));
}

// A reply's pieces as blocks that are opened, grow, and are closed: in message.content, and as events.
void add_delta(Message& message, const ReplyDelta& delta, std::string& events) {
  using Block = Message::Block;
  const auto index = [&] { return message.content.size() - 1; };
  const auto close = [&] {
    if (message.block != Block::kNone) events += named_event("content_block_stop", {{"index", index()}});
    message.block = Block::kNone;
  };
  const auto open = [&](Block block, const Json& content) {
    if (message.block == block) return;
    close();
    message.block = block;
    message.content.push_back(content);
    events += named_event("content_block_start", {{"index", index()}, {"content_block", content}});
  };
  const auto grow = [&](const char* member, const std::string& text) {
    std::string& whole = message.content.back()[member].get_ref<std::string&>();
    whole += text;
    events += named_event("content_block_delta", {{"index", index()}, {"delta", {{"type", fmt::format("{}_delta", member)}, {member, text}}}});
  };
  if (!delta.reasoning.empty()) {
    open(Block::kThinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
    grow("thinking", delta.reasoning);
  }
  for (const ParsedCall& call : delta.calls) {
    close();
    Json block = {{"type", "tool_use"}, {"id", random_id("toolu_")}, {"name", call.name}, {"input", Json::object()}};
    message.content.push_back(block);
    events += named_event("content_block_start", {{"index", index()}, {"content_block", block}});
    events += named_event("content_block_delta", {{"index", index()}, {"delta", {{"type", "input_json_delta"}, {"partial_json", call.arguments}}}});
    events += named_event("content_block_stop", {{"index", index()}});
    message.content.back()["input"] = Json::parse(call.arguments);
  }
  if (!delta.content.empty()) {
    open(Block::kText, {{"type", "text"}, {"text", ""}});
    grow("text", delta.content);
  }
}

HttpResponse answer_whole(Message& message, const HttpRequest& request) {
  std::string events;   // that nobody reads
  const std::vector<ReplyPiece> pieces = finish_all(message.replies, request);
  for (const ReplyDelta& delta : pieces.front().deltas) add_delta(message, delta, events);
  const Reply& reply = message.replies.front();
  Json answer = head_of(message, 0);
  answer["content"] = std::move(message.content);
  answer["stop_reason"] = stop_reason(reply);
  answer["stop_sequence"] = stop_sequence(reply);
  answer["usage"] = usage_of(reply);
  answer["timings"] = timings_of(reply.result());
  add_warnings(answer, message.generation);
  return json_response(answer);
}

HttpResponse answer_stream(std::shared_ptr<Message> message, int64_t n_prompt) {
  EventSource source = [message, n_prompt, began = false](std::string& events) mutable {
    if (!began) {
      began = true;
      events += named_event("message_start", {{"message", head_of(*message, n_prompt)}});
      return true;
    }
    const Reply& reply = message->replies.front();
    const bool more = advance_all(message->replies, [&](size_t, ReplyPiece& piece) {
      if (reply.ended()) reply.require_success();
      for (const ReplyDelta& delta : piece.deltas) add_delta(*message, delta, events);
    });
    if (more) return true;
    if (message->block != Message::Block::kNone) events += named_event("content_block_stop", {{"index", message->content.size() - 1}});
    Json last = {{"delta", {{"stop_reason", stop_reason(reply)}, {"stop_sequence", stop_sequence(reply)}}},
                 {"usage", usage_of(reply)},
                 {"timings", timings_of(reply.result())}};
    add_warnings(last, message->generation);
    events += named_event("message_delta", std::move(last));
    events += named_event("message_stop", Json::object());
    return false;
  };
  return event_response(message->model.sign_of_life, std::move(source), [](const ApiError& error) {
    return fmt::format("event: error\n{}", event_of(anthropic_error(error)));
  });
}

}  // namespace

HttpResponse answer_message(const ServedModel& model, const Json& body, const HttpRequest& request) {
  const Fields fields(body);
  auto message = std::make_shared<Message>(model);
  Generation& generation = message->generation;
  generation = read_generation(fields, model);
  if (!fields.has("max_tokens")) fields.refuse("max_tokens", "a whole number");
  generation.max_new = fields.integer("max_tokens", 1, 1, INT32_MAX);
  generation.n = 1;
  generation.stops = fields.strings("stop_sequences", kMaxStops);
  std::erase(generation.stops, "");
  const bool streams = fields.boolean("stream", false);
  const std::vector<int32_t> prompt = write_prompt(model, read_messages(fields), generation);
  submit_all(model, generation, prompt, message->replies);
  return streams ? answer_stream(std::move(message), static_cast<int64_t>(prompt.size())) : answer_whole(*message, request);
}

HttpResponse answer_token_count(const ServedModel& model, const Json& body, const HttpRequest&) {
  const std::vector<int32_t> prompt = write_prompt(model, read_messages(Fields(body)));
  return json_response({{"input_tokens", prompt.size()}});
}

}  // namespace beryl::server
