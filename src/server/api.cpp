#include "server/api.h"

#include <algorithm>
#include <ctime>
#include <iterator>
#include <numeric>
#include <random>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "base/error.h"
#include "server/page.h"
#include "server/request_framing.h"
#include "text/utf8.h"
#include "weights/quote.h"

namespace beryl::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kWait = std::chrono::milliseconds(100);        // between looks at whether the client is still there

// In a time that depends on the lengths only.
bool same_text(std::string_view given, std::string_view key) {
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[key.empty() ? 0 : i % key.size()]);
  return difference == 0;
}

std::string error_type(int status) {
  switch (status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return "request_too_large";
    case 503: return "overloaded_error";
    default: return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

bool is_anthropic(const HttpRequest& request) {
  return request.path.starts_with("/v1/messages") || !request.header("anthropic-version").empty();
}

ApiError wrong_method(const HttpRequest& request, const char* right, const char* allow) {
  ApiError error(405, fmt::format("{} takes {}, not {}", request.path, right, quote(request.method)));
  error.allow = allow;
  return error;
}

ApiError to_api_error(const Error& error) {
  return ApiError(error.code == ErrorCode::kBadInput || error.code == ErrorCode::kUnsupported ? 400 : 500, error.what());
}

}  // namespace

HttpResponse json_response(const Json& json, int status) {
  HttpResponse response;
  response.status = status;
  response.body = to_line(json);
  return response;
}

Json openai_error(const ApiError& error) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  return {{"error",
           {{"message", error.what()},
            {"type", error_type(error.status)},
            {"param", text_or_null(error.param)},
            {"code", text_or_null(error.code)}}}};
}

Json anthropic_error(const ApiError& error) {
  return {{"type", "error"}, {"error", {{"type", error_type(error.status)}, {"message", error.what()}}}};
}

std::string event_of(const Json& data) { return fmt::format("data: {}\n\n", to_line(data)); }

std::string random_id(std::string_view prefix) {
  static thread_local std::mt19937_64 random(std::random_device{}());
  return fmt::format("{}{:016x}{:08x}", prefix, random(), random() >> 32);
}

HttpResponse event_response(std::chrono::milliseconds sign_of_life, EventSource source, std::function<std::string(const ApiError&)> error_event) {
  HttpResponse response;
  response.content_type = "text/event-stream";
  response.headers.emplace_back("Cache-Control", "no-cache");
  response.headers.emplace_back("X-Accel-Buffering", "no");
  response.sign_of_life = ": waiting\n\n";
  response.sign_of_life_after = sign_of_life;
  response.stream = [source = std::move(source), error_event = std::move(error_event)](std::string& piece) {
    try {
      return source(piece);
    } catch (const ApiError& error) {
      piece += error_event(error);
    } catch (const Error& error) {
      piece += error_event(to_api_error(error));
    }
    return false;
  };
  return response;
}

std::vector<ReplyPiece> finish_all(std::vector<Reply>& replies, const HttpRequest& request) {
  std::vector<ReplyPiece> pieces(replies.size());
  for (size_t i = 0; i < replies.size(); ++i)
    while (!replies[i].ended()) {
      replies[i].advance(pieces[i], kWait);
      if (!replies[i].ended() && request.client_gone()) throw ApiError(499, "the client has closed the connection");
    }
  for (const Reply& reply : replies) reply.require_success();
  return pieces;
}

bool advance_all(std::vector<Reply>& replies, const std::function<void(size_t, ReplyPiece&)>& take) {
  const auto n_open = std::count_if(replies.begin(), replies.end(), [](const Reply& reply) { return !reply.ended(); });
  bool news = false;
  for (int round = 0; round < 2 && !news; ++round)
    for (size_t i = 0; i < replies.size(); ++i) {
      if (replies[i].ended()) continue;
      ReplyPiece piece;
      // One reply is waited for; several are looked at in turn.
      replies[i].advance(piece, n_open == 1 ? kWait : std::chrono::milliseconds(round == 0 ? 0 : 5));
      if (piece.deltas.empty() && piece.tokens.empty() && !replies[i].ended()) continue;
      news = true;
      take(i, piece);
    }
  return std::any_of(replies.begin(), replies.end(), [](const Reply& reply) { return !reply.ended(); });
}

StreamOptions read_stream_options(const Fields& fields) {
  StreamOptions options;
  options.stream = fields.boolean("stream", false);
  if (const Json* object = fields.object("stream_options"))
    options.include_usage = Fields(*object, "stream_options.").boolean("include_usage", false);
  return options;
}

std::string token_text(const ServedModel& model, int32_t id) { return repair_utf8(model.tokenizer.token_bytes(id)); }

Json token_logprobs(const ServedModel& model, const std::vector<Sampled>& tokens) {
  const auto one = [&](int32_t id, float logprob) -> Json {
    Json bytes = Json::array();
    for (unsigned char byte : model.tokenizer.token_bytes(id)) bytes.push_back(byte);
    return {{"token", token_text(model, id)}, {"logprob", finite_logprob(logprob)}, {"bytes", std::move(bytes)}};
  };
  Json all = Json::array();
  for (const Sampled& token : tokens) {
    Json each = one(token.id, token.logprob);
    Json top = Json::array();
    for (const auto& [id, logprob] : token.top) top.push_back(one(id, logprob));
    each["top_logprobs"] = std::move(top);
    all.push_back(std::move(each));
  }
  return all;
}

int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void submit_all(const ServedModel& model, const Generation& generation, const std::vector<int32_t>& prompt, std::vector<Reply>& replies) {
  for (int i = 0; i < generation.n; ++i) replies.emplace_back(model, generation, prompt, i, !replies.empty());
}

Api::Api(const ServedModel& model, ApiOptions options) : model_(model), options_(std::move(options)) {
  for (const std::string& host : options_.hosts) hosts_.push_back(lower_case(host));
}

HttpResponse Api::answer_too_large(const HttpRequest& request) {
  ++n_requests_;
  const ApiError error(413, fmt::format("the body is larger than the {} bytes that this server reads", options_.max_body_bytes));
  return finish(error_answer(error, request));
}

HttpResponse Api::answer_malformed(const HttpRequest& request, int status, const std::string& what) {
  ++n_requests_;
  return finish(error_answer(ApiError(status, what), request));
}

// Requests that have ended, in whatever way: each made room for another.
static int64_t n_finished(const EngineCounts& counts) { return std::accumulate(std::begin(counts.finished), std::end(counts.finished), int64_t{0}); }

HttpResponse Api::error_answer(const ApiError& error, const HttpRequest& request) {
  HttpResponse response = json_response(is_anthropic(request) ? anthropic_error(error) : openai_error(error), error.status);
  if (!error.allow.empty()) response.headers.emplace_back("Allow", error.allow);
  if (error.status == 503) {
    const EngineCounts counts = model_.engine.counts();
    response.headers.emplace_back("Retry-After", fmt::format("{}", finish_rate_.retry_after(counts.n_waiting, n_finished(counts), counts.step_seconds)));
  }
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

std::optional<HttpResponse> Api::refuse(const HttpRequest& request) {
  try {
    require_admission(request);
    return std::nullopt;
  } catch (const ApiError& error) {
    ++n_requests_;
    return finish(error_answer(error, request));
  }
}

HttpHandlers Api::handlers() {
  return {[this](HttpRequest& request) { return answer(request); }, [this](const HttpRequest& request) { return refuse(request); },
          [this](const HttpRequest& request) { return answer_too_large(request); },
          [this](const HttpRequest& request, int status, const std::string& what) { return answer_malformed(request, status, what); }};
}

bool Api::has_key(const HttpRequest& request) const {
  if (options_.keys.empty()) return true;
  std::string_view given = request.header("authorization");
  constexpr std::string_view kScheme = "bearer ";   // schemes have no case
  if (lower_case(given.substr(0, kScheme.size())) == kScheme) {
    given.remove_prefix(kScheme.size());
  } else {
    given = request.header("x-api-key");
  }
  bool found = false;
  for (const std::string& key : options_.keys) found = same_text(given, key) || found;   // all of them, always
  return found;
}

std::vector<std::string> local_hosts(const std::string& address) {
  if (address != "localhost" && address != "::1" && !address.starts_with("127.")) return {};
  std::vector<std::string> hosts = {"localhost", "127.0.0.1", "[::1]"};
  if (address.starts_with("127.") && address != "127.0.0.1") hosts.push_back(address);
  return hosts;
}

bool Api::is_called_by_name(const HttpRequest& request) const {
  std::string host(request.header("host"));
  if (hosts_.empty() || host.empty()) return true;   // no browser leaves it out
  if (const size_t colon = host.find(':', host.starts_with('[') ? std::min(host.find(']'), host.size()) : 0); colon != std::string::npos)
    host.resize(colon);
  return std::find(hosts_.begin(), hosts_.end(), lower_case(host)) != hosts_.end();
}

bool Api::is_from_elsewhere(const HttpRequest& request) const {
  const std::string_view site = request.header("sec-fetch-site");
  const std::string origin = lower_case(request.header("origin"));
  const std::string& cors = options_.cors_origin;
  if (site == "same-origin" || cors == "*" || (!origin.empty() && origin == lower_case(cors))) return false;
  if (origin.empty()) return site == "cross-site";   // no browser; or one that has not told, of a request that a page can not make alone
  const size_t host = origin.find("://");
  return host == std::string::npos || std::string_view(origin).substr(host + 3) != lower_case(request.header("host"));
}

HttpResponse Api::answer(HttpRequest& request) {
  ++n_requests_;
  const EngineCounts counts = model_.engine.counts();
  finish_rate_.note(n_finished(counts), counts.step_seconds);
  HttpResponse response;
  try {
    response = route(request);
  } catch (const ApiError& error) {
    response = error_answer(error, request);
  } catch (const Error& error) {
    response = error_answer(to_api_error(error), request);
  } catch (const std::bad_alloc&) {
    response = error_answer(ApiError(503, "the server has no memory for this request"), request);
  } catch (const std::exception& error) {
    response = error_answer(ApiError(500, error.what()), request);
  }
  return finish(std::move(response));
}

// What every answer has.
HttpResponse Api::finish(HttpResponse response) {
  if (response.status >= 400) ++n_errors_;
  if (!options_.cors_origin.empty()) {
    response.headers.emplace_back("Access-Control-Allow-Origin", options_.cors_origin);
    response.headers.emplace_back("Vary", "Origin");
  }
  // By which the two companies' packages name a request.
  const std::string id = random_id("req_");
  response.headers.emplace_back("x-request-id", id);
  response.headers.emplace_back("request-id", id);
  if (draining_) response.headers.emplace_back("Connection", "close");
  return response;
}

bool Api::is_preflight(const HttpRequest& request) const { return request.method == "OPTIONS" && !options_.cors_origin.empty(); }

// What the header alone decides.
void Api::require_admission(const HttpRequest& request) const {
  const bool get = request.method == "GET" || request.method == "HEAD";
  if (!is_called_by_name(request))
    throw ApiError(403, fmt::format("this server is not called {}: start it with --allow-host to let that name in", quote(request.header("host"))));
  if ((request.path == "/health" && get) || is_preflight(request)) return;
  if (request.busy) throw ApiError(503, "too many connections: try again later");
  if (request.path == "/" && get) return;
  if (!get && is_from_elsewhere(request))
    throw ApiError(403, fmt::format("a web page of {} may not ask this server: --cors lets one in", request.header("origin").empty() ? "elsewhere" : quote(request.header("origin"))));
  if (!has_key(request)) throw ApiError(401, "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'", "", "invalid_api_key");
  if (const std::string_view coding = request.header("content-encoding"); !get && !coding.empty() && lower_case(coding) != "identity")
    throw ApiError(415, fmt::format("the body is in the coding {}, which this server does not read: send it as it is", quote(coding)));
}

HttpResponse Api::route(HttpRequest& request) {
  require_admission(request);
  using Answer = HttpResponse (*)(const ServedModel&, const Json&, const HttpRequest&);
  const std::string& path = request.path;
  const bool get = request.method == "GET" || request.method == "HEAD";
  if (path == "/health" && get) return health();
  if (is_preflight(request)) {
    // Whatever is asked for: the clients' libraries have headers of their own, and none does harm here.
    const std::string_view asked = request.header("access-control-request-headers");
    HttpResponse response;
    response.status = 204;
    response.headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                        {"Access-Control-Allow-Headers", asked.empty() ? "Authorization, Content-Type, X-Api-Key" : std::string(asked)},
                        {"Access-Control-Max-Age", "86400"}};
    return response;
  }
  if (path == "/" && get) return answer_page(request);

  const bool is_model = path.starts_with("/v1/models/");
  if (path == "/v1/models" || is_model || path == "/metrics" || path == "/health" || path == "/") {
    if (!get) throw wrong_method(request, "GET", "GET, HEAD");
    return path == "/metrics" ? metrics() : models(request);
  }
  const std::pair<std::string_view, Answer> posts[] = {{"/v1/completions", &answer_completion},
                                                       {"/v1/chat/completions", &answer_chat},
                                                       {"/v1/responses", &answer_responses},
                                                       {"/v1/messages", &answer_message},
                                                       {"/v1/messages/count_tokens", &answer_token_count}};
  const auto post = std::find_if(std::begin(posts), std::end(posts), [&](const auto& each) { return each.first == path; });
  const bool tokens = path == "/tokenize" || path == "/detokenize";
  if (post == std::end(posts) && !tokens) throw ApiError(404, fmt::format("there is no {}", quote(path)));
  if (request.method != "POST") throw wrong_method(request, "POST", "POST");
  const Json body = parse_object(request.body);
  request.body = std::string();
  if (tokens) return path == "/tokenize" ? tokenize(body) : detokenize(body);
  return post->second(model_, body, request);
}

HttpResponse Api::health() const {
  return draining_ ? json_response({{"status", "draining"}}, 503) : json_response({{"status", "ok"}});
}

HttpResponse Api::models(const HttpRequest& request) const {
  const bool anthropic = is_anthropic(request);
  const Json model = anthropic ? Json{{"type", "model"},
                                      {"id", model_.id},
                                      {"display_name", model_.id},
                                      {"created_at", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(model_.created)))}}
                               : Json{{"id", model_.id}, {"object", "model"}, {"created", model_.created}, {"owned_by", "beryl"},
                                      {"context_length", model_.engine.context()}};
  constexpr std::string_view kList = "/v1/models";
  const std::string id = request.path.substr(std::min(kList.size() + 1, request.path.size()));
  if (!id.empty() && id != model_.id)
    throw ApiError(404, fmt::format("there is no model {}, only {}", quote(id), quote(model_.id)), "model", "model_not_found");
  if (!id.empty()) return json_response(model);
  if (anthropic) return json_response({{"data", Json::array({model})}, {"has_more", false}, {"first_id", model_.id}, {"last_id", model_.id}});
  return json_response({{"object", "list"}, {"data", Json::array({model})}});
}

HttpResponse Api::tokenize(const Json& body) const {
  const Fields fields(body);
  const std::string text = fields.has("content") ? fields.required_string("content") : fields.required_string("text");
  const bool special = fields.boolean("parse_special", false);
  std::vector<int32_t> ids = model_.tokenizer.encode(text, special);
  if (fields.boolean("add_special", false) && model_.tokenizer.adds_bos() && model_.tokenizer.bos_id())
    ids.insert(ids.begin(), *model_.tokenizer.bos_id());
  return json_response({{"tokens", ids}, {"count", ids.size()}});
}

HttpResponse Api::detokenize(const Json& body) const {
  const Fields fields(body);
  const Json* tokens = fields.array("tokens");
  if (tokens == nullptr) fields.refuse("tokens", "an array of ids");
  std::vector<int32_t> ids;
  for (const Json& each : *tokens) {
    if (!each.is_number_integer() || each.get<int64_t>() < 0 || each.get<int64_t>() >= model_.vocab)
      throw ApiError(400, fmt::format("'tokens' holds {}, ids from 0 to {} were expected", in_words(each), model_.vocab - 1), "tokens");
    ids.push_back(each.get<int32_t>());
  }
  return json_response({{"content", model_.tokenizer.decode(ids, fields.boolean("show_special", true))}});
}

// Prometheus' text format.
HttpResponse Api::metrics() const {
  const EngineCounts counts = model_.engine.counts();
  std::string text;
  const auto metric = [&](const char* name, const char* type, const char* help, double value) {
    text += fmt::format("# HELP beryl_{0} {1}\n# TYPE beryl_{0} {2}\nberyl_{0} {3}\n", name, help, type, value);
  };
  const auto d = [](int64_t n) { return static_cast<double>(n); };
  metric("requests_running", "gauge", "Requests that are computed now", counts.n_running);
  metric("requests_waiting", "gauge", "Requests that wait to be let in", counts.n_waiting);
  text += "# HELP beryl_requests_total Requests that have ended, by how\n# TYPE beryl_requests_total counter\n";
  const char* const reasons[] = {"stop", "length", "context", "cancelled", "failed"};
  for (int i = 0; i < 5; ++i) text += fmt::format("beryl_requests_total{{finish=\"{}\"}} {}\n", reasons[i], counts.finished[i]);
  metric("http_requests_total", "counter", "HTTP requests", d(n_requests_));
  metric("http_errors_total", "counter", "HTTP requests that were answered with an error", d(n_errors_));
  metric("prompt_tokens_total", "counter", "Tokens of prompts of ended requests", d(counts.prompt_tokens));
  metric("reused_tokens_total", "counter", "Of these, found in the caches", d(counts.reused_tokens));
  metric("reply_tokens_total", "counter", "Tokens sampled for ended requests", d(counts.reply_tokens));
  metric("drafted_tokens_total", "counter", "Guessed tokens that were checked", d(counts.drafted_tokens));
  metric("accepted_tokens_total", "counter", "Of these, came true", d(counts.accepted_tokens));
  metric("preemptions_total", "counter", "Times that a request was put back for want of cache pages", d(counts.preemptions));
  metric("recomputed_tokens_total", "counter", "Tokens computed anew because of that", d(counts.recomputed_tokens));
  metric("steps_total", "counter", "Steps of the model", d(counts.steps));
  metric("step_seconds_total", "counter", "Time in steps", counts.step_seconds);
  metric("cache_pages", "gauge", "Pages of all caches", d(counts.n_pages));
  metric("cache_pages_free", "gauge", "Pages that no request has", d(counts.n_free_pages));
  metric("cache_pages_known", "gauge", "Of these, hold beginnings of texts that may come again", d(counts.n_known_pages));
  metric("uptime_seconds", "gauge", "Since the start", std::chrono::duration<double>(Clock::now() - started_).count());
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = std::move(text);
  return response;
}

}  // namespace beryl::server
