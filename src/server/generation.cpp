#include "server/generation.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/reply_constraint.h"
#include "server/api_error.h"
#include "text/chat_format.h"

namespace beryl::server {
namespace {

constexpr size_t kMaxStops = 16;
constexpr int64_t kMaxChoices = 128;   // as OpenAI has it
constexpr size_t kMaxBiases = 4096;

// Parameters of these APIs, and of other servers of them, that would change the reply where they are known.
constexpr const char* kIgnored[] = {
    "audio", "bad_words", "container", "context_management", "dry_multiplier", "dynatemp_range", "grammar", "guided_choice", "guided_grammar", "guided_json",
    "guided_regex", "ignore_eos", "json_schema", "length_penalty", "lora", "max_tool_calls", "mcp_servers", "min_tokens", "mirostat", "n_predict",
    "repeat_last_n", "stop_token_ids", "structured_outputs", "tfs_z", "top_a", "typical_p", "use_beam_search", "verbosity", "web_search_options", "xtc_probability"};

uint64_t random_seed() {
  static thread_local std::random_device random;
  return (uint64_t{random()} << 32 | random()) >> 1;
}

std::vector<std::pair<int32_t, float>> read_logit_bias(const Fields& fields, const ServedModel& model) {
  std::vector<std::pair<int32_t, float>> biases;
  const Json* object = fields.object("logit_bias");
  if (object == nullptr) return biases;
  if (object->size() > kMaxBiases) fields.refuse("logit_bias", fmt::format("an object of at most {} members", kMaxBiases));
  for (const auto& [name, value] : object->items()) {
    int64_t id = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
    if (error != std::errc() || end != name.data() + name.size() || id < 0 || id >= model.vocab)
      throw ApiError(400, fmt::format("'logit_bias' names token {}, ids from 0 to {} were expected", in_words(name), model.vocab - 1),
                     "logit_bias");
    const float bias = static_cast<float>(Fields(*object, "logit_bias.").number(name.c_str(), 0, -100, 100));
    // As OpenAI has it: -100 bans.
    biases.emplace_back(static_cast<int32_t>(id), bias <= -100 ? -std::numeric_limits<float>::infinity() : bias);
  }
  return biases;
}

// The stop string that begins first; the text ends before it.
const std::string* find_stop(const std::string& text, const std::vector<std::string>& stops, size_t& at) {
  const std::string* first = nullptr;
  at = std::string::npos;
  for (const std::string& stop : stops)
    if (const size_t found = text.find(stop); found < at) {
      at = found;
      first = &stop;
    }
  return first;
}

// Bytes at the end that may be the beginning of a stop string.
size_t held_bytes(const std::string& text, const std::vector<std::string>& stops) {
  size_t held = 0;
  for (const std::string& stop : stops)
    for (size_t n = std::min(stop.size() - 1, text.size()); n > held; --n)
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) held = n;
  return held;
}

}  // namespace

Generation read_generation(const Fields& fields, const ServedModel& model) {
  Generation generation;
  SampleParams& sampling = generation.sampling;
  sampling.temperature = static_cast<float>(fields.number("temperature", 1, 0, 100));
  sampling.top_p = static_cast<float>(fields.number("top_p", 1, 0, 1));
  sampling.top_k = static_cast<int32_t>(std::max<int64_t>(0, fields.integer("top_k", 0, -1, INT32_MAX)));
  sampling.min_p = static_cast<float>(fields.number("min_p", 0, 0, 1));
  sampling.presence_penalty = static_cast<float>(fields.number("presence_penalty", 0, -2, 2));
  sampling.frequency_penalty = static_cast<float>(fields.number("frequency_penalty", 0, -2, 2));
  // repeat_penalty: as llama.cpp calls it.
  sampling.repetition_penalty = static_cast<float>(fields.number("repetition_penalty", fields.number("repeat_penalty", 1, 0.01, 100), 0.01, 100));
  // Below 2^-20 the draw is the largest logit anyway, and the division by it stays finite.
  if (sampling.temperature < 0x1p-20f) sampling.temperature = 0;
  sampling.seed = fields.has("seed") ? static_cast<uint64_t>(fields.integer("seed", 0, INT64_MIN, INT64_MAX)) : random_seed();
  sampling.logit_bias = read_logit_bias(fields, model);
  generation.has_bans = std::any_of(sampling.logit_bias.begin(), sampling.logit_bias.end(), [](const auto& bias) { return std::isinf(bias.second); });
  for (int32_t id : model.suppressed_ids) sampling.logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
  generation.stops = fields.strings("stop", kMaxStops);
  std::erase(generation.stops, "");
  generation.n = static_cast<int>(fields.integer("n", 1, 1, kMaxChoices));
  fields.string("model");   // whatever it is called here; but a text
  for (const char* name : kIgnored)
    if (const Json* value = fields.find(name); value != nullptr && *value != false)
      generation.warnings.push_back(fmt::format("'{}' is not supported and was ignored", name));
  return generation;
}

void require_length(const ServedModel& model, size_t n_bytes, const std::string& field) {
  const auto least = static_cast<int64_t>(n_bytes / model.longest_token_bytes);
  if (least > model.engine.context())
    throw ApiError(400, fmt::format("the prompt has at least {} tokens, the context {}", least, model.engine.context()), field,
                   "context_length_exceeded");
}

std::vector<int32_t> encode_text(const ServedModel& model, const std::string& text, bool with_bos) {
  require_length(model, text.size(), "prompt");
  std::vector<int32_t> ids = model.tokenizer.encode(text, false);
  if (with_bos && model.tokenizer.adds_bos() && model.tokenizer.bos_id()) ids.insert(ids.begin(), *model.tokenizer.bos_id());
  return ids;
}

Reply::Reply(const ServedModel& model, const Generation& generation, std::vector<int32_t> prompt, int index, bool follows)
    : model_(&model), stops_(generation.stops), has_bans_(generation.has_bans) {
  if (generation.is_chat) {
    parser_ = std::make_unique<ReplyParser>(model.tokenizer, generation.in_thought, generation.finds_calls, generation.tool_names);
  } else {
    stream_ = std::make_unique<TextStream>(model.tokenizer);
  }
  Request request;
  request.prompt = std::move(prompt);
  request.max_new = generation.max_new;
  request.sampling = generation.sampling;
  request.sampling.seed += static_cast<uint64_t>(index);
  request.follows = follows;
  const std::span<const int32_t> stop_ids = model.tokenizer.stop_ids();
  request.stop_ids.assign(stop_ids.begin(), stop_ids.end());
  if (static_cast<int64_t>(request.prompt.size()) > model.engine.context())
    throw ApiError(400, fmt::format("the prompt has {} tokens, the context {}", request.prompt.size(), model.engine.context()), generation.prompt_field,
                   "context_length_exceeded");
  request.constraint = bind_reply({generation.content, generation.in_thought, generation.may_think, generation.thought_budget}, model.tokenizer, model.vocab);
  channel_ = model.engine.submit(std::move(request));
  if (channel_ == nullptr) throw ApiError(503, "too many requests wait, or the server is going down: try again later");
}

Reply::~Reply() {
  if (channel_ != nullptr && !ended_) channel_->cancel();
}

ReplyDelta ReplyPiece::together() const {
  ReplyDelta all;
  for (const ReplyDelta& delta : deltas) {
    all.content += delta.content;
    all.reasoning += delta.reasoning;
    all.calls.insert(all.calls.end(), delta.calls.begin(), delta.calls.end());
  }
  return all;
}

// A delta of the parser has reasoning, then calls, then content. No stop string reaches across the other two.
void Reply::add(ReplyDelta fresh, ReplyPiece& piece) {
  if (!fresh.reasoning.empty()) {
    release_held(piece);
    if (piece.deltas.empty() || piece.deltas.back().reasoning.empty()) piece.deltas.emplace_back();
    piece.deltas.back().reasoning += fresh.reasoning;
  }
  if (!fresh.calls.empty()) {
    release_held(piece);
    has_calls_ = true;
    if (piece.deltas.empty() || piece.deltas.back().calls.empty()) piece.deltas.emplace_back();
    for (ParsedCall& call : fresh.calls) piece.deltas.back().calls.push_back(std::move(call));
  }
  held_ += fresh.content;
  size_t at = 0;
  if (const std::string* stop = find_stop(held_, stops_, at)) {
    stopped_ = true;
    stop_string_ = *stop;
    channel_->stop(n_tokens_);
    add_content(held_.substr(0, at), piece);
    held_.clear();
    return;
  }
  const size_t n = held_.size() - held_bytes(held_, stops_);
  add_content(held_.substr(0, n), piece);
  held_.erase(0, n);
}

void Reply::add_content(std::string text, ReplyPiece& piece) {
  if (text.empty()) return;
  if (piece.deltas.empty() || piece.deltas.back().content.empty()) piece.deltas.emplace_back();
  piece.deltas.back().content += text;
}

void Reply::release_held(ReplyPiece& piece) { add_content(std::exchange(held_, {}), piece); }

void Reply::advance(ReplyPiece& piece, std::chrono::milliseconds timeout) {
  if (ended_) return;
  fresh_.clear();
  const bool more = channel_->read(fresh_, timeout);
  // Behind a stop string the engine may have sampled a little more before it heard of it.
  for (Sampled& token : fresh_) {
    if (stopped_) break;
    ++n_tokens_;
    ReplyDelta fresh;
    if (parser_) {
      n_thought_tokens_ += parser_->in_thought();
      parser_->push(token.id, fresh);
    } else {
      fresh.content = stream_->push(token.id);
    }
    add(std::move(fresh), piece);
    piece.tokens.push_back(std::move(token));
  }
  if (more) return;
  ended_ = true;
  if (stopped_) return;
  n_tokens_ += channel_->result().finish == FinishReason::kStop;
  ReplyDelta rest;
  if (parser_) {
    parser_->finish(rest);
  } else {
    rest.content = stream_->finish();
  }
  add(std::move(rest), piece);
  release_held(piece);
}

Reply::Finish Reply::finish() const {
  if (stopped_) return has_calls_ ? Finish::kCalls : Finish::kStopString;   // who asked for calls must hear that there are some
  const FinishReason finish = result().finish;
  if (finish == FinishReason::kLength || finish == FinishReason::kContext) return Finish::kLength;
  return has_calls_ ? Finish::kCalls : Finish::kStop;
}

void Reply::require_success() const {
  if (stopped_) return;
  if (result().failure == Failure::kNoToken && has_bans_)
    throw ApiError(400, fmt::format("{}: what 'logit_bias' and the reply's form leave may be nothing", result().error), "logit_bias");
  if (result().finish == FinishReason::kFailed) throw ApiError(500, result().error);
  if (result().finish == FinishReason::kCancelled) throw ApiError(503, "the server is going down: try again later");
}

Json usage_of(const std::vector<Reply>& replies) {
  int64_t n_reply = 0, n_thought = 0;
  for (const Reply& reply : replies) n_reply += reply.n_tokens(), n_thought += reply.n_thought_tokens();
  const int64_t n_prompt = replies.front().result().timings.prompt_tokens;
  // What the others found in the caches was computed for the first.
  const int64_t n_reused = replies.front().result().timings.reused_tokens;
  return {{"prompt_tokens", n_prompt},
          {"completion_tokens", n_reply},
          {"total_tokens", n_prompt + n_reply},
          {"prompt_tokens_details", {{"cached_tokens", n_reused}}},
          {"completion_tokens_details", {{"reasoning_tokens", n_thought}}}};
}

Json timings_of(const RequestResult& result) {
  const RequestTimings& t = result.timings;
  const auto ms = [](double seconds) { return std::round(seconds * 1e6) / 1e3; };
  const auto rate = [](int64_t n, double seconds) { return seconds > 0 ? std::round(static_cast<double>(n) / seconds * 100) / 100 : 0.0; };
  const char* const limits[] = {"whole", "unknown", "window", "off"};
  Json timings = {{"queue_ms", ms(t.queue_seconds)},
                  {"prompt_ms", ms(t.prefill_seconds)},
                  {"prompt_n", t.prompt_tokens - t.reused_tokens},
                  {"prompt_per_second", rate(t.prompt_tokens - t.reused_tokens, t.prefill_seconds)},
                  {"reused_n", t.reused_tokens},
                  {"reuse_limit", limits[static_cast<int>(t.reuse_limit)]},
                  {"predicted_ms", ms(t.decode_seconds)},
                  {"predicted_n", t.reply_tokens},
                  {"predicted_per_second", rate(t.reply_tokens - 1, t.decode_seconds)},
                  {"decode_steps", t.decode_steps},
                  {"draft_n", t.drafted_tokens},
                  {"draft_n_accepted", t.accepted_tokens}};
  if (t.reuse_limit == ReuseLimit::kWindow) timings["known_n"] = t.known_tokens;
  if (t.preemptions > 0) {
    timings["preemptions"] = t.preemptions;
    timings["recomputed_n"] = t.recomputed_tokens;
  }
  return timings;
}

void add_warnings(Json& answer, const Generation& generation) {
  if (!generation.warnings.empty()) answer["warnings"] = generation.warnings;
}

double finite_logprob(float logprob) { return std::isfinite(logprob) ? static_cast<double>(logprob) : -9999.0; }

}  // namespace beryl::server
