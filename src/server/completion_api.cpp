// POST /v1/completions: goes on with texts or ids.
#include <algorithm>

#include <fmt/format.h>

#include "server/api.h"
#include "server/structured_output.h"
#include "text/chat_format.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

constexpr size_t kMaxPrompts = 256;
constexpr int64_t kDefaultTokens = 16;   // as the original has it

struct Prompt {
  std::vector<int32_t> ids;
  std::string text;        // for echo
};

struct Completion {
  Completion(const ServedModel& served, const Json& body) : model(served), fields(body) {}

  const ServedModel& model;
  Fields fields;
  Generation generation;
  std::vector<Prompt> prompts;
  bool echo = false;
  std::string id = random_id("cmpl-");
  std::vector<Reply> replies;                // [prompts · n]
  // [replies] of the next token: characters before it, and bytes of one that is not whole yet.
  std::vector<size_t> text_offsets;
  std::vector<TextStream> texts;

  size_t prompt_of(size_t choice) const { return choice / static_cast<size_t>(generation.n); }
};

Prompt prompt_of_ids(const ServedModel& model, const Json& ids) {
  Prompt prompt;
  for (const Json& each : ids) {
    if (!each.is_number_integer() || each.get<int64_t>() < 0 || each.get<int64_t>() >= model.vocab)
      throw ApiError(400, fmt::format("'prompt' holds {}, ids from 0 to {} were expected", in_words(each), model.vocab - 1), "prompt");
    prompt.ids.push_back(each.get<int32_t>());
  }
  prompt.text = model.tokenizer.decode(prompt.ids, false);
  return prompt;
}

Prompt prompt_of_text(const ServedModel& model, const std::string& text) { return {encode_text(model, text, true), text}; }

void read_prompts(Completion& completion) {
  const ServedModel& model = completion.model;
  const Json* value = completion.fields.find("prompt");
  constexpr std::string_view kExpected = "a text, a list of texts, a list of ids or a list of such lists";
  if (value == nullptr || !(value->is_string() || value->is_array())) completion.fields.refuse("prompt", kExpected);
  if (value->is_string()) {
    completion.prompts.push_back(prompt_of_text(model, value->get_ref<const std::string&>()));
  } else if (!value->empty() && value->front().is_number()) {
    completion.prompts.push_back(prompt_of_ids(model, *value));
  } else {
    if (value->size() > kMaxPrompts) completion.fields.refuse("prompt", fmt::format("a list of at most {}", kMaxPrompts));
    for (const Json& each : *value) {
      if (!each.is_string() && !each.is_array()) completion.fields.refuse("prompt", kExpected);
      completion.prompts.push_back(each.is_string() ? prompt_of_text(model, each.get_ref<const std::string&>())
                                                    : prompt_of_ids(model, each));
    }
  }
  for (const Prompt& prompt : completion.prompts)
    if (prompt.ids.empty()) throw ApiError(400, "'prompt' is empty, at least one token was expected", "prompt");
  if (completion.prompts.empty()) throw ApiError(400, "'prompt' is an empty list", "prompt");
}

// Characters, as the original counts them.
size_t n_characters(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// As the original writes a token that is a part of a character, so that two of them have two names.
std::string token_name(const ServedModel& model, int32_t id) {
  std::string bytes = model.tokenizer.token_bytes(id);
  if (is_utf8(bytes)) return bytes;
  std::string name = "bytes:";
  for (unsigned char byte : bytes) name += fmt::format("\\x{:02x}", byte);
  return name;
}

Json logprobs_of(Completion& completion, size_t choice, const std::vector<Sampled>& tokens) {
  if (completion.generation.sampling.n_logprobs < 0) return nullptr;
  Json names = Json::array(), values = Json::array(), tops = Json::array(), offsets = Json::array();
  for (const Sampled& token : tokens) {
    const std::string name = token_name(completion.model, token.id);
    names.push_back(name);
    values.push_back(finite_logprob(token.logprob));
    Json top = Json::object();
    for (const auto& [id, logprob] : token.top) top[token_name(completion.model, id)] = finite_logprob(logprob);
    top[name] = finite_logprob(token.logprob);
    tops.push_back(std::move(top));
    offsets.push_back(completion.text_offsets[choice]);
    completion.text_offsets[choice] += n_characters(completion.texts[choice].push(token.id));
  }
  return {{"tokens", names}, {"token_logprobs", values}, {"top_logprobs", tops}, {"text_offset", offsets}};
}

Json finish_of(const Reply& reply) { return reply.finish() == Reply::Finish::kLength ? "length" : "stop"; }

Json usage_of(const Completion& completion) {
  int64_t n_prompt = 0, n_reply = 0, n_reused = 0;
  for (size_t i = 0; i < completion.replies.size(); ++i) {
    n_reply += completion.replies[i].n_tokens();
    if (i % static_cast<size_t>(completion.generation.n) != 0) continue;
    n_prompt += completion.replies[i].result().timings.prompt_tokens;
    n_reused += completion.replies[i].result().timings.reused_tokens;
  }
  return {{"prompt_tokens", n_prompt},
          {"completion_tokens", n_reply},
          {"total_tokens", n_prompt + n_reply},
          {"prompt_tokens_details", {{"cached_tokens", n_reused}}}};
}

Json head_of(const Completion& completion) {
  return {{"id", completion.id},
          {"object", "text_completion"},
          {"created", seconds_since_1970()},
          {"model", completion.model.id}};
}

HttpResponse answer_whole(Completion& completion, const HttpRequest& request) {
  std::vector<ReplyPiece> pieces = finish_all(completion.replies, request);
  Json choices = Json::array();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::string& echoed = completion.prompts[completion.prompt_of(i)].text;
    choices.push_back({{"index", i},
                       {"text", (completion.echo ? echoed : "") + pieces[i].together().content},
                       {"logprobs", logprobs_of(completion, i, pieces[i].tokens)},
                       {"finish_reason", finish_of(completion.replies[i])}});
  }
  Json answer = head_of(completion);
  answer["choices"] = std::move(choices);
  answer["usage"] = usage_of(completion);
  answer["timings"] = timings_of(completion.replies.front().result());
  add_warnings(answer, completion.generation);
  return json_response(answer);
}

HttpResponse answer_stream(std::shared_ptr<Completion> completion, bool include_usage) {
  const Json head = head_of(*completion);
  const auto chunk = [head, include_usage](Json choices) {
    Json event = head;
    event["choices"] = std::move(choices);
    if (include_usage) event["usage"] = nullptr;
    return event;
  };
  bool began = false;
  EventSource source = [completion, include_usage, chunk, began](std::string& events) mutable {
    if (!began && completion->echo)
      for (size_t i = 0; i < completion->replies.size(); ++i)
        events += event_of(chunk({{{"index", i}, {"text", completion->prompts[completion->prompt_of(i)].text}, {"logprobs", nullptr}, {"finish_reason", nullptr}}}));
    began = true;
    const bool more = advance_all(completion->replies, [&](size_t i, ReplyPiece& piece) {
      const Reply& reply = completion->replies[i];
      if (reply.ended()) reply.require_success();
      Json logprobs = logprobs_of(*completion, i, piece.tokens);
      if (piece.deltas.empty() && logprobs.is_null() && !reply.ended()) return;
      Json event = chunk({{{"index", i},
                           {"text", piece.together().content},
                           {"logprobs", std::move(logprobs)},
                           {"finish_reason", reply.ended() ? finish_of(reply) : Json(nullptr)}}});
      if (reply.ended()) {
        event["timings"] = timings_of(reply.result());
        add_warnings(event, completion->generation);
      }
      events += event_of(event);
    });
    if (more) return true;
    if (include_usage) {
      Json last = chunk(Json::array());
      last["usage"] = usage_of(*completion);
      events += event_of(last);
    }
    events += "data: [DONE]\n\n";
    return false;
  };
  return event_response(completion->model.sign_of_life, std::move(source), [](const ApiError& error) { return event_of(openai_error(error)); });
}

}  // namespace

HttpResponse answer_completion(const ServedModel& model, const Json& body, const HttpRequest& request) {
  auto completion = std::make_shared<Completion>(model, body);
  const Fields& fields = completion->fields;
  const StreamOptions streams = read_stream_options(fields);
  completion->generation = read_generation(fields, model);
  Generation& generation = completion->generation;
  generation.max_new = fields.integer("max_tokens", kDefaultTokens, 0, INT32_MAX);
  generation.sampling.n_logprobs = static_cast<int32_t>(fields.integer("logprobs", -1, 0, 20));
  completion->echo = fields.boolean("echo", false);
  if (completion->echo && generation.sampling.n_logprobs >= 0)
    throw ApiError(400, "'logprobs' with 'echo' is not supported: log-probabilities are of what is written, not of the prompt", "echo");
  if (fields.integer("best_of", generation.n, 1, 128) != generation.n) fields.refuse("best_of", "the same number as n");
  if (const std::optional<std::string> suffix = fields.string("suffix"); suffix && !suffix->empty())
    throw ApiError(400, "'suffix' is not supported: this model only goes on with a text", "suffix");
  read_prompts(*completion);
  if (const Json* format = fields.object("response_format"))
    bind_generation(model, read_reply_form(*format, "response_format"), {}, nullptr, generation);
  if (completion->prompts.size() * static_cast<size_t>(generation.n) > kMaxPrompts)
    throw ApiError(400, fmt::format("{} prompts with 'n' {} are more than the {} replies that a request may have", completion->prompts.size(), generation.n, kMaxPrompts), "n");
  for (const Prompt& prompt : completion->prompts) {
    submit_all(model, generation, prompt.ids, completion->replies);
    completion->text_offsets.resize(completion->replies.size());
    while (completion->texts.size() < completion->replies.size()) completion->texts.emplace_back(model.tokenizer);
  }
  return streams.stream ? answer_stream(std::move(completion), streams.include_usage) : answer_whole(*completion, request);
}

}  // namespace beryl::server
