// From a request's fields to requests of the engine, and from their tokens to text: what all APIs share.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "grammar/constraint.h"
#include "server/form_compiler.h"
#include "server/json_fields.h"
#include "text/chat_writer.h"
#include "text/reply_parser.h"
#include "text/text_stream.h"
#include "text/tokenizer.h"

namespace beryl::server {

// What is served. All of it outlives the server.
struct ServedModel {
  std::string id;                        // as clients name it
  int64_t created = 0;                   // seconds since 1970
  const Tokenizer& tokenizer;
  const ChatWriter* writer = nullptr;    // null: no chat format
  bool writes_tools = false;             // the writer's format has a form for tools
  CallNotation notation = CallNotation::kTagged;   // in which the model writes calls
  FormCompiler& forms;
  Engine& engine;
  std::vector<int32_t> suppressed_ids;   // never sampled
  int64_t vocab = 0;
  size_t longest_token_bytes = 1;
  std::chrono::milliseconds sign_of_life{10'000};   // of streams on which nothing comes: while a prompt is read, mostly
};

// How replies are made.
struct Generation {
  SampleParams sampling;
  int64_t max_new = INT64_MAX;
  std::vector<std::string> stops;
  int n = 1;
  std::string prompt_field = "prompt";   // of the request, for errors
  bool has_bans = false;                 // the client's, by logit_bias
  // Of chats: thoughts and calls are told apart from content.
  bool is_chat = false;
  bool in_thought = false;               // the prompt has opened a thought
  bool may_think = false;                // the reply may open one
  bool finds_calls = false;
  std::vector<std::string> tool_names;   // of these
  int64_t thought_budget = INT64_MAX;    // tokens, then the thought is closed
  std::vector<std::string> warnings;     // of the request, what could not be expressed as it was asked, or was ignored
  std::shared_ptr<const CompiledConstraint> content = nullptr;   // what the reply must be, behind its thoughts; null: anything
};

// temperature, top_p, top_k, min_p, the penalties, seed, stop, n, logit_bias. max_new and logprobs are each API's own.
Generation read_generation(const Fields& fields, const ServedModel& model);

// Ids of a text that may not be too long to be looked at. Throws ApiError(400).
std::vector<int32_t> encode_text(const ServedModel& model, const std::string& text, bool with_bos);
// The same for what does not fit, before anything is computed of it. field: where the text came from, for the error.
void require_length(const ServedModel& model, size_t n_bytes, const std::string& field);

// What a chunk of a reply brought.
struct ReplyPiece {
  // In the order in which the model said it; each has text of one kind, or calls.
  std::vector<ReplyDelta> deltas;
  std::vector<Sampled> tokens;           // those that it is made of
  ReplyDelta together() const;           // for formats that keep no order between content, reasoning and calls
};

// One reply as text: whole characters, content up to a stop string.
class Reply {
 public:
  // Submits. index: among the replies to one prompt. follows: the client's request, which is let in as a whole, has replies already.
  // Throws ApiError(503) when too many wait, (400) for a prompt that does not fit.
  Reply(const ServedModel& model, const Generation& generation, std::vector<int32_t> prompt, int index, bool follows);
  // Cancels what still runs.
  ~Reply();
  Reply(Reply&&) = default;
  Reply& operator=(Reply&&) = delete;

  // Waits at most so long for more. What has come is appended.
  void advance(ReplyPiece& piece, std::chrono::milliseconds timeout);
  bool ended() const { return ended_; }
  // Valid once it has ended.
  const RequestResult& result() const { return channel_->result(); }
  enum class Finish : uint8_t { kStop, kStopString, kLength, kCalls };
  Finish finish() const;
  const std::string& stop_string() const { return stop_string_; }   // with kStopString
  // Throws ApiError when the reply failed or the server is going down.
  void require_success() const;
  int64_t n_tokens() const { return n_tokens_; }   // that the text is made of, the stop id included
  int64_t n_thought_tokens() const { return n_thought_tokens_; }   // of these

 private:
  void add(ReplyDelta fresh, ReplyPiece& piece);
  void add_content(std::string text, ReplyPiece& piece);
  void release_held(ReplyPiece& piece);

  const ServedModel* model_;
  std::vector<std::string> stops_;
  std::shared_ptr<Channel> channel_;
  std::unique_ptr<TextStream> stream_;   // one of the two
  std::unique_ptr<ReplyParser> parser_;
  std::string held_;                     // may be the beginning of a stop string
  std::vector<Sampled> fresh_;
  bool stopped_ = false;                 // by a stop string
  std::string stop_string_;
  bool has_calls_ = false;
  bool has_bans_ = false;                // the client's own, which may leave nothing to say
  bool ended_ = false;
  int64_t n_tokens_ = 0, n_thought_tokens_ = 0;
};

// "usage" of OpenAI's APIs, and "timings", over all replies to one prompt.
Json usage_of(const std::vector<Reply>& replies);
Json timings_of(const RequestResult& result);

// Adds "warnings", where there are any.
void add_warnings(Json& answer, const Generation& generation);

// -infinity has no form in JSON.
double finite_logprob(float logprob);

}  // namespace beryl::server
