// What a server answers to: routes, keys, errors. One file an API: completion_api.cpp, chat_api.cpp,
// responses_api.cpp, messages_api.cpp.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/api_error.h"
#include "server/generation.h"
#include "server/http_server.h"
#include "server/retry_after.h"

namespace beryl::server {

struct ApiOptions {
  std::vector<std::string> keys = {};   // none: everybody may ask
  std::vector<std::string> hosts = {};  // names by which requests may call the server; none: any
  std::string cors_origin = {};       // empty: browsers of other origins may not read answers
  size_t max_body_bytes = 8 << 20;    // for the message
};

// The names by which a server that listens on this address is called, where only this machine reaches it; else none. A web page
// can give a name of its own the address 127.0.0.1 and then ask as if it were the server's; that name stands in the header Host.
std::vector<std::string> local_hosts(const std::string& address);

// Answers one request; never throws. Any thread.
class Api {
 public:
  // The model outlives it.
  Api(const ServedModel& model, ApiOptions options);

  HttpResponse answer(HttpRequest& request);
  // By the header alone: who may not ask, or comes when there are too many. Nothing: the body is wanted.
  std::optional<HttpResponse> refuse(const HttpRequest& request);
  HttpResponse answer_too_large(const HttpRequest& request);
  HttpResponse answer_malformed(const HttpRequest& request, int status, const std::string& what);
  // All of them, for a server; the Api outlives it.
  HttpHandlers handlers();
  void set_draining() { draining_ = true; }

 private:
  HttpResponse route(HttpRequest& request);
  void require_admission(const HttpRequest& request) const;
  bool is_preflight(const HttpRequest& request) const;
  HttpResponse finish(HttpResponse response);
  HttpResponse error_answer(const ApiError& error, const HttpRequest& request);
  bool has_key(const HttpRequest& request) const;
  bool is_called_by_name(const HttpRequest& request) const;
  // Did a browser send it for a page that is not this server's, and that --cors does not let in? A page can send a POST anywhere without
  // being able to read the answer, and would have the server compute. Who is no browser sends none of the headers that tell.
  bool is_from_elsewhere(const HttpRequest& request) const;
  HttpResponse health() const;
  HttpResponse models(const HttpRequest& request) const;
  HttpResponse metrics() const;
  HttpResponse tokenize(const Json& body) const;
  HttpResponse detokenize(const Json& body) const;

  const ServedModel& model_;
  const ApiOptions options_;
  std::vector<std::string> hosts_;     // in lower case
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::atomic<bool> draining_ = false;
  std::atomic<int64_t> n_requests_ = 0, n_errors_ = 0;
  FinishRate finish_rate_;
};

// POST routes: each reads the body, submits, and answers whole or as a stream of events.
HttpResponse answer_completion(const ServedModel& model, const Json& body, const HttpRequest& request);
HttpResponse answer_chat(const ServedModel& model, const Json& body, const HttpRequest& request);
HttpResponse answer_message(const ServedModel& model, const Json& body, const HttpRequest& request);
HttpResponse answer_responses(const ServedModel& model, const Json& body, const HttpRequest& request);
HttpResponse answer_token_count(const ServedModel& model, const Json& body, const HttpRequest& request);

// Pieces for the APIs' files.
HttpResponse json_response(const Json& json, int status = 200);
Json openai_error(const ApiError& error);
Json anthropic_error(const ApiError& error);
std::string event_of(const Json& data);                         // "data: {...}\n\n"
// A reply's next piece, or the end, as events.
using EventSource = std::function<bool(std::string& events)>;
// A stream of events with signs of life while nothing comes: a comment after each such time. Errors become a last event, made by
// `error_event`.
HttpResponse event_response(std::chrono::milliseconds sign_of_life, EventSource source, std::function<std::string(const ApiError&)> error_event);
// Waits until all replies have ended. Throws ApiError: a reply failed, or the client is gone (then nobody hears it).
std::vector<ReplyPiece> finish_all(std::vector<Reply>& replies, const HttpRequest& request);
// One round over those that have not ended: gives what came to `take`, which may ask the reply whether it has ended. Waits a
// little when nothing comes. False: all have ended.
bool advance_all(std::vector<Reply>& replies, const std::function<void(size_t index, ReplyPiece& piece)>& take);
// The parameters of stream_options.
struct StreamOptions {
  bool stream = false;
  bool include_usage = false;
};
StreamOptions read_stream_options(const Fields& fields);
// A token by itself: its text, repaired where it is a part of a character.
std::string token_text(const ServedModel& model, int32_t id);
// Of each token: its text, log-probability and bytes, and the same of the likeliest.
Json token_logprobs(const ServedModel& model, const std::vector<Sampled>& tokens);
int64_t seconds_since_1970();
std::string random_id(std::string_view prefix);
// Submits generation.n replies to one prompt, and appends them to those of the same request.
void submit_all(const ServedModel& model, const Generation& generation, const std::vector<int32_t>& prompt, std::vector<Reply>& replies);

}  // namespace beryl::server
