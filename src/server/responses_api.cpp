// POST /v1/responses: OpenAI's later API. Its items become messages, its reply is made of items. Nothing is stored.
#include <set>
#include <utility>

#include <fmt/format.h>

#include "server/api.h"
#include "server/conversation.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

struct Response {
  explicit Response(const ServedModel& served) : model(served) {}

  const ServedModel& model;
  Generation generation;
  std::string id = random_id("resp_");
  int64_t created = seconds_since_1970();
  Json echoed;                   // members of the request that the answer repeats
  std::vector<Reply> replies;    // one

  // The items so far; the last one is open while open_text has what it holds.
  Json output = Json::array();
  enum class Item : uint8_t { kNone, kReasoning, kText } item = Item::kNone;
  std::string open_text;
  Json open_logprobs = Json::array();
  Json fresh_logprobs = Json::array();   // of tokens whose text is still to come
  int64_t n_events = 0;
};

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ApiError(400, fmt::format("'{}' {}", where, what), where);
}

// A text, or parts of type input_text or output_text.
std::string text_of(const Json& value, const std::string& where) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_array()) refuse(where, fmt::format("is {}, a text or an array of parts was expected", in_words(value)));
  std::string text;
  for (size_t i = 0; i < value.size(); ++i) {
    const Json& part = value[i];
    const std::string place = fmt::format("{}.{}", where, i);
    if (!part.is_object()) refuse(place, fmt::format("is {}, a part was expected", in_words(part)));
    const Fields fields(part, place + ".");
    const std::string type = fields.required_string("type");
    if (type != "input_text" && type != "output_text" && type != "text" && type != "reasoning_text" && type != "summary_text" && type != "refusal")
      refuse(place, fmt::format("is a part of type {}, only texts can be read here", quote(type)));
    text += fields.required_string(type == "refusal" ? "refusal" : "text");
  }
  return text;
}

// Calls and reasoning belong to the assistant's message; one is opened where the last message is none.
Json& assistant_message(Json& messages) {
  if (messages.empty() || messages.back()["role"] != "assistant") messages.push_back({{"role", "assistant"}, {"content", ""}});
  return messages.back();
}

// calls: the ids of those so far.
void add_item(const Json& item, const std::string& where, Json& messages, std::set<std::string>& calls) {
  if (!item.is_object()) refuse(where, fmt::format("is {}, an object was expected", in_words(item)));
  const Fields fields(item, where + ".");
  const std::string type = fields.string("type").value_or("message");
  if (type == "message") {
    std::string role = fields.required_string("role");
    if (role == "developer") role = "system";
    if (role != "user" && role != "assistant" && role != "system") fields.refuse("role", "user, assistant, system or developer");
    const Json* content = fields.find("content");
    if (content == nullptr) fields.refuse("content", "a text or an array of parts");
    const std::string text = text_of(*content, where + ".content");
    if (role == "assistant" && !messages.empty() && messages.back()["role"] == "assistant" && messages.back()["content"] == "") {
      messages.back()["content"] = text;   // behind its reasoning
    } else {
      messages.push_back({{"role", role}, {"content", text}});
    }
  } else if (type == "function_call") {
    calls.insert(fields.required_string("call_id"));
    assistant_message(messages)["tool_calls"].push_back(
        {{"id", fields.required_string("call_id")},
         {"type", "function"},
         {"function", {{"name", fields.required_string("name")}, {"arguments", fields.required_string("arguments")}}}});
  } else if (type == "function_call_output") {
    const Json* output = fields.find("output");
    if (output == nullptr) fields.refuse("output", "a text or an array of parts");
    const std::string id = fields.required_string("call_id");
    if (!calls.contains(id)) refuse(where + ".call_id", fmt::format("is {}, the call_id of a function_call before it was expected", quote(id)));
    messages.push_back({{"role", "tool"}, {"tool_call_id", id}, {"content", text_of(*output, where + ".output")}});
  } else if (type == "reasoning") {
    if (const Json* content = fields.array("content")) assistant_message(messages)["reasoning_content"] = text_of(*content, where + ".content");
  } else {
    refuse(where, fmt::format("is an item of type {}, which this server can not read", quote(type)));
  }
}

Conversation read_input(const Fields& fields) {
  Conversation conversation;
  conversation.field = "input";
  conversation.messages = Json::array();
  if (const std::optional<std::string> instructions = fields.string("instructions"))
    conversation.messages.push_back({{"role", "system"}, {"content", *instructions}});
  conversation.places.resize(conversation.messages.size(), "instructions");
  const Json* input = fields.find("input");
  if (input == nullptr || !(input->is_string() || (input->is_array() && !input->empty()))) fields.refuse("input", "a text or an array of items");
  if (input->is_string()) {
    conversation.messages.push_back({{"role", "user"}, {"content", *input}});
    conversation.places.push_back("input");
  } else {
    std::set<std::string> calls;
    for (size_t i = 0; i < input->size(); ++i) {
      const std::string place = fmt::format("input.{}", i);
      add_item((*input)[i], place, conversation.messages, calls);
      conversation.places.resize(conversation.messages.size(), place);   // a call goes to the message that its reply has already
    }
  }
  for (const char* name : {"previous_response_id", "conversation", "prompt"})
    if (fields.has(name)) refuse(name, "is given, but this server stores nothing: send the whole conversation as input");
  if (const Json* tools = fields.array("tools")) {
    Json all = Json::array();
    for (size_t i = 0; i < tools->size(); ++i) {
      const Json& tool = (*tools)[i];
      const std::string place = fmt::format("tools.{}", i);
      if (!tool.is_object()) refuse(place, fmt::format("is {}, an object was expected", in_words(tool)));
      const Fields each(tool, place + ".");
      if (const std::string type = each.required_string("type"); type != "function")
        refuse(place, fmt::format("is a tool of type {}; functions are what this server can do", quote(type)));
      all.push_back({{"type", "function"}, {"function", read_function(each, "parameters")}});
    }
    require_different_names(all);
    conversation.options.tools = std::move(all);
  }
  conversation.tool_choice = read_tool_choice(fields, conversation.options.tools);
  if (const Json* text = fields.object("text"))
    if (const Json* format = Fields(*text, "text.").object("format")) conversation.form = read_reply_form(*format, "text.format");
  if (const Json* reasoning = fields.object("reasoning")) {
    const Fields each(*reasoning, "reasoning.");
    if (const std::optional<std::string> effort = each.string("effort")) set_thinking(conversation, thinks_at(each, "effort", *effort));
  }
  conversation.thought_budget = fields.integer("thinking_budget", conversation.thought_budget, 0, INT32_MAX);
  return conversation;
}

Json text_part(const std::string& text, Json logprobs) {
  return {{"type", "output_text"}, {"text", text}, {"annotations", Json::array()}, {"logprobs", std::move(logprobs)}};
}

Json text_item(const std::string& id, const std::string& text, Json logprobs) {
  return {{"id", id}, {"type", "message"}, {"role", "assistant"}, {"status", "completed"}, {"content", Json::array({text_part(text, std::move(logprobs))})}};
}

Json reasoning_item(const std::string& id, const std::string& text) {
  return {{"id", id},
          {"type", "reasoning"},
          {"summary", Json::array()},
          {"status", "completed"},
          {"content", Json::array({{{"type", "reasoning_text"}, {"text", text}}})}};
}

Json call_item(const ParsedCall& call) {
  return {{"id", random_id("fc_")}, {"type", "function_call"}, {"status", "completed"}, {"call_id", random_id("call_")}, {"name", call.name}, {"arguments", call.arguments}};
}

// The whole object; output and usage when it has ended.
Json object_of(const Response& response, const Json* output) {
  Json object = {{"id", response.id}, {"object", "response"}, {"created_at", response.created}, {"status", "in_progress"}, {"model", response.model.id}};
  object.update(response.echoed);
  object.update(Json{{"error", nullptr}, {"incomplete_details", nullptr}, {"output", output == nullptr ? Json::array() : *output}, {"usage", nullptr}});
  if (output == nullptr) return object;
  const Reply& reply = response.replies.front();
  const bool cut = reply.finish() == Reply::Finish::kLength;
  object["status"] = cut ? "incomplete" : "completed";
  if (cut) object["incomplete_details"] = {{"reason", "max_output_tokens"}};
  const RequestTimings& timings = reply.result().timings;
  object["usage"] = {{"input_tokens", timings.prompt_tokens},
                     {"input_tokens_details", {{"cached_tokens", timings.reused_tokens}}},
                     {"output_tokens", reply.n_tokens()},
                     {"output_tokens_details", {{"reasoning_tokens", reply.n_thought_tokens()}}},
                     {"total_tokens", timings.prompt_tokens + reply.n_tokens()}};
  object["timings"] = timings_of(reply.result());
  add_warnings(object, response.generation);
  return object;
}

Json logprobs_of(const Response& response, const std::vector<Sampled>& tokens) {
  return response.generation.sampling.n_logprobs < 0 ? Json::array() : token_logprobs(response.model, tokens);
}

// ---- items, and the events that tell of them --------------------------------------------------------------------------

void emit(Response& response, std::string& events, const char* type, const Json& data) {
  Json event = {{"type", type}, {"sequence_number", response.n_events++}};
  event.update(data);
  events += fmt::format("event: {}\n{}", type, event_of(event));
}

// Where the open item's part stands, for its events.
Json place_of(const Response& response) {
  return {{"item_id", response.output.back()["id"]}, {"output_index", response.output.size() - 1}, {"content_index", 0}};
}

Json with(Json place, const Json& more) {
  place.update(more);
  return place;
}

void close_item(Response& response, std::string& events, const char* status = "completed") {
  using Item = Response::Item;
  if (response.item == Item::kNone) return;
  if (response.item == Item::kText)
    for (const Json& each : std::exchange(response.fresh_logprobs, Json::array())) response.open_logprobs.push_back(each);
  Json& item = response.output.back();
  const Json place = place_of(response);
  const std::string id = item["id"];
  if (response.item == Item::kText) {
    emit(response, events, "response.output_text.done", with(place, {{"text", response.open_text}, {"logprobs", response.open_logprobs}}));
    emit(response, events, "response.content_part.done", with(place, {{"part", text_part(response.open_text, response.open_logprobs)}}));
    item = text_item(id, response.open_text, response.open_logprobs);
  } else {
    emit(response, events, "response.reasoning_text.done", with(place, {{"text", response.open_text}}));
    item = reasoning_item(id, response.open_text);
  }
  item["status"] = status;
  emit(response, events, "response.output_item.done", {{"output_index", response.output.size() - 1}, {"item", item}});
  response.item = Item::kNone;
  response.open_text.clear();
  response.open_logprobs = Json::array();
}

void open_item(Response& response, Response::Item item, std::string& events) {
  if (response.item == item) return;
  close_item(response, events);
  response.item = item;
  const bool text = item == Response::Item::kText;
  response.output.push_back(text ? text_item(random_id("msg_"), "", Json::array()) : reasoning_item(random_id("rs_"), ""));
  response.output.back()["status"] = "in_progress";
  response.output.back()["content"] = Json::array();
  emit(response, events, "response.output_item.added", {{"output_index", response.output.size() - 1}, {"item", response.output.back()}});
  if (text) emit(response, events, "response.content_part.added", with(place_of(response), {{"part", text_part("", Json::array())}}));
}

void add_delta(Response& response, const ReplyDelta& delta, std::string& events) {
  if (!delta.reasoning.empty()) {
    open_item(response, Response::Item::kReasoning, events);
    response.open_text += delta.reasoning;
    emit(response, events, "response.reasoning_text.delta", with(place_of(response), {{"delta", delta.reasoning}}));
  }
  for (const ParsedCall& call : delta.calls) {
    close_item(response, events);
    const Json item = call_item(call);
    Json begun = item;
    begun["status"] = "in_progress";
    begun["arguments"] = "";
    response.output.push_back(item);
    const Json place = {{"item_id", item["id"]}, {"output_index", response.output.size() - 1}};
    emit(response, events, "response.output_item.added", {{"output_index", place["output_index"]}, {"item", begun}});
    emit(response, events, "response.function_call_arguments.delta", with(place, {{"delta", call.arguments}}));
    emit(response, events, "response.function_call_arguments.done", with(place, {{"name", call.name}, {"arguments", call.arguments}}));
    emit(response, events, "response.output_item.done", {{"output_index", place["output_index"]}, {"item", item}});
  }
  if (!delta.content.empty()) {
    open_item(response, Response::Item::kText, events);
    response.open_text += delta.content;
    Json logprobs = std::exchange(response.fresh_logprobs, Json::array());
    for (const Json& each : logprobs) response.open_logprobs.push_back(each);
    emit(response, events, "response.output_text.delta", with(place_of(response), {{"delta", delta.content}, {"logprobs", std::move(logprobs)}}));
  }
}

void add_piece(Response& response, const ReplyPiece& piece, std::string& events) {
  for (const Json& each : logprobs_of(response, piece.tokens)) response.fresh_logprobs.push_back(each);
  for (const ReplyDelta& delta : piece.deltas) add_delta(response, delta, events);
}

void end_items(Response& response, std::string& events) {
  if (response.output.empty()) open_item(response, Response::Item::kText, events);   // an empty reply is one too
  close_item(response, events, response.replies.front().finish() == Reply::Finish::kLength ? "incomplete" : "completed");
}

HttpResponse answer_whole(Response& response, const HttpRequest& request) {
  std::string events;   // that nobody reads
  add_piece(response, finish_all(response.replies, request).front(), events);
  end_items(response, events);
  return json_response(object_of(response, &response.output));
}

HttpResponse answer_stream(std::shared_ptr<Response> response) {
  EventSource source = [response, began = false](std::string& events) mutable {
    if (!began) {
      began = true;
      emit(*response, events, "response.created", {{"response", object_of(*response, nullptr)}});
      emit(*response, events, "response.in_progress", {{"response", object_of(*response, nullptr)}});
      return true;
    }
    const bool more = advance_all(response->replies, [&](size_t, ReplyPiece& piece) {
      if (response->replies.front().ended()) response->replies.front().require_success();
      add_piece(*response, piece, events);
    });
    if (more) return true;
    end_items(*response, events);
    const Json object = object_of(*response, &response->output);
    emit(*response, events, object["status"] == "completed" ? "response.completed" : "response.incomplete", {{"response", object}});
    return false;
  };
  return event_response(response->model.sign_of_life, std::move(source), [response](const ApiError& error) {
    std::string events;
    Json object = object_of(*response, nullptr);
    object["status"] = "failed";
    object["error"] = {{"code", "server_error"}, {"message", error.what()}};
    emit(*response, events, "response.failed", {{"response", object}});
    return events;
  });
}

}  // namespace

HttpResponse answer_responses(const ServedModel& model, const Json& body, const HttpRequest& request) {
  const Fields fields(body);
  auto response = std::make_shared<Response>(model);
  Generation& generation = response->generation;
  generation = read_generation(fields, model);
  generation.n = 1;
  generation.max_new = fields.integer("max_output_tokens", INT32_MAX, 1, INT32_MAX);
  const int64_t n_top = fields.integer("top_logprobs", 0, 0, 20);
  bool logprobs = false;
  if (const Json* include = fields.array("include"))
    for (const Json& each : *include) logprobs = logprobs || each == "message.output_text.logprobs";
  generation.sampling.n_logprobs = logprobs ? static_cast<int32_t>(n_top) : -1;
  if (fields.boolean("background", false)) refuse("background", "is true, but this server answers at once or not at all");
  const bool streams = fields.boolean("stream", false);
  const std::vector<int32_t> prompt = write_prompt(model, read_input(fields), generation);
  const auto echo = [&](const char* name, Json otherwise) {
    const Json* value = fields.find(name);
    response->echoed[name] = value == nullptr ? std::move(otherwise) : *value;
  };
  echo("instructions", nullptr);
  echo("metadata", Json::object());
  echo("parallel_tool_calls", true);
  echo("temperature", 1.0);
  echo("text", {{"format", {{"type", "text"}}}});
  echo("tool_choice", "auto");
  echo("tools", Json::array());
  echo("top_p", 1.0);
  echo("max_output_tokens", nullptr);
  submit_all(model, generation, prompt, response->replies);
  return streams ? answer_stream(std::move(response)) : answer_whole(*response, request);
}

}  // namespace beryl::server
