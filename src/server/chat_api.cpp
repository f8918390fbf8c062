// POST /v1/chat/completions: the next message of a conversation, with reasoning and tool calls.
#include <fmt/format.h>

#include "base/error.h"
#include "server/api.h"
#include "server/conversation.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

struct Chat {
  explicit Chat(const ServedModel& served) : model(served) {}

  const ServedModel& model;
  Generation generation;
  std::string id = random_id("chatcmpl-");
  std::vector<Reply> replies;      // [n]
  std::vector<int> n_calls;        // [n] so far, of a stream
};

Json logprobs_of(const Chat& chat, const std::vector<Sampled>& tokens) {
  if (chat.generation.sampling.n_logprobs < 0) return nullptr;
  return {{"content", token_logprobs(chat.model, tokens)}, {"refusal", nullptr}};
}

const char* finish_of(const Reply& reply) {
  switch (reply.finish()) {
    case Reply::Finish::kLength: return "length";
    case Reply::Finish::kCalls: return "tool_calls";
    default: return "stop";
  }
}

Json call_of(const ParsedCall& call) {
  return {{"id", random_id("call_")}, {"type", "function"}, {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
}

Json head_of(const Chat& chat, const char* object) {
  return {{"id", chat.id},
          {"object", object},
          {"created", seconds_since_1970()},
          {"model", chat.model.id}};
}

HttpResponse answer_whole(Chat& chat, const HttpRequest& request) {
  const std::vector<ReplyPiece> pieces = finish_all(chat.replies, request);
  Json choices = Json::array();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const ReplyDelta delta = pieces[i].together();
    Json message = {{"role", "assistant"}, {"content", delta.content.empty() && !delta.calls.empty() ? Json(nullptr) : Json(delta.content)}};
    if (!delta.reasoning.empty()) message["reasoning_content"] = delta.reasoning;
    for (const ParsedCall& call : delta.calls) message["tool_calls"].push_back(call_of(call));
    choices.push_back({{"index", i},
                       {"message", std::move(message)},
                       {"logprobs", logprobs_of(chat, pieces[i].tokens)},
                       {"finish_reason", finish_of(chat.replies[i])}});
  }
  Json answer = head_of(chat, "chat.completion");
  answer["choices"] = std::move(choices);
  answer["usage"] = usage_of(chat.replies);
  answer["timings"] = timings_of(chat.replies.front().result());
  add_warnings(answer, chat.generation);
  return json_response(answer);
}

HttpResponse answer_stream(std::shared_ptr<Chat> chat, bool include_usage) {
  const Json head = head_of(*chat, "chat.completion.chunk");
  const auto chunk = [head, include_usage](size_t index, Json delta, Json logprobs, Json finish) {
    Json event = head;
    event["choices"] = Json::array({{{"index", index}, {"delta", std::move(delta)}, {"logprobs", std::move(logprobs)}, {"finish_reason", std::move(finish)}}});
    if (include_usage) event["usage"] = nullptr;
    return event;
  };
  EventSource source = [chat, include_usage, chunk, head, began = false](std::string& events) mutable {
    if (!began)
      for (size_t i = 0; i < chat->replies.size(); ++i)
        events += event_of(chunk(i, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr));
    if (!began) {
      began = true;
      return true;   // the client hears at once that it is understood
    }
    const bool more = advance_all(chat->replies, [&](size_t i, ReplyPiece& piece) {
      const Reply& reply = chat->replies[i];
      if (reply.ended()) reply.require_success();
      const ReplyDelta fresh = piece.together();
      Json delta = Json::object();
      if (!fresh.reasoning.empty()) delta["reasoning_content"] = fresh.reasoning;
      if (!fresh.content.empty()) delta["content"] = fresh.content;
      for (const ParsedCall& call : fresh.calls) {
        Json each = call_of(call);
        Json indexed = {{"index", chat->n_calls[i]++}};
        indexed.update(each);
        delta["tool_calls"].push_back(std::move(indexed));
      }
      Json logprobs = logprobs_of(*chat, piece.tokens);
      if (!delta.empty() || !logprobs.is_null()) events += event_of(chunk(i, std::move(delta), std::move(logprobs), nullptr));
      if (!reply.ended()) return;
      Json last = chunk(i, Json::object(), nullptr, finish_of(reply));
      last["timings"] = timings_of(reply.result());
      add_warnings(last, chat->generation);
      events += event_of(last);
    });
    if (more) return true;
    if (include_usage) {
      Json last = head;
      last["choices"] = Json::array();
      last["usage"] = usage_of(chat->replies);
      events += event_of(last);
    }
    events += "data: [DONE]\n\n";
    return false;
  };
  return event_response(chat->model.sign_of_life, std::move(source), [](const ApiError& error) { return event_of(openai_error(error)); });
}

}  // namespace

HttpResponse answer_chat(const ServedModel& model, const Json& body, const HttpRequest& request) {
  const Fields fields(body);
  auto chat = std::make_shared<Chat>(model);
  Generation& generation = chat->generation;
  const StreamOptions streams = read_stream_options(fields);
  generation = read_generation(fields, model);
  generation.max_new = fields.integer("max_completion_tokens", fields.integer("max_tokens", INT32_MAX, 1, INT32_MAX), 1, INT32_MAX);
  for (const char* name : {"functions", "function_call"})
    if (fields.has(name)) throw ApiError(400, fmt::format("'{}' is what 'tools' and 'tool_choice' were once called: send those", name), name);
  for (const std::string& each : fields.strings("modalities", 8))
    if (each != "text") fields.refuse("modalities", "[\"text\"], which is what this server writes");
  const bool logprobs = fields.boolean("logprobs", false);
  const int64_t n_top = fields.integer("top_logprobs", 0, 0, 20);
  if (n_top > 0 && !logprobs) throw ApiError(400, "'top_logprobs' needs 'logprobs': true", "top_logprobs");
  generation.sampling.n_logprobs = logprobs ? static_cast<int32_t>(n_top) : -1;

  const std::vector<int32_t> prompt = write_prompt(model, read_conversation(fields), generation);
  submit_all(model, generation, prompt, chat->replies);
  chat->n_calls.resize(chat->replies.size());
  return streams.stream ? answer_stream(std::move(chat), streams.include_usage) : answer_whole(*chat, request);
}

}  // namespace beryl::server
