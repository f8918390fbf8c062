#include "store/http.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <chrono>
#include <ctime>
#include <exception>
#include <mutex>

#include <curl/curl.h>
#include <fmt/format.h>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr size_t kMaxHeadBytes = 256 << 10;

std::string_view trimmed(std::string_view text) {
  const auto is_blank = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

// "bytes 0-99/1000", "bytes 0-99/*", "bytes */1000".
void read_content_range(std::string_view value, HttpHead& head) {
  constexpr std::string_view kUnit = "bytes ";
  const size_t slash = value.find('/');
  if (!lower(value).starts_with(kUnit) || slash == value.npos) return;
  head.total = whole_number(trimmed(value.substr(slash + 1)));
  const std::string_view range = trimmed(value.substr(kUnit.size(), slash - kUnit.size()));
  const size_t dash = range.find('-');
  if (dash == range.npos) return;
  const auto first = whole_number(range.substr(0, dash)), last = whole_number(range.substr(dash + 1));
  if (first && last && *first <= *last && *last < INT64_MAX) head.range = ByteRange{*first, *last + 1};
}

// Seconds, or a date.
std::optional<double> read_retry_after(std::string_view value) {
  if (const auto seconds = whole_number(value)) return static_cast<double>(*seconds);
  const time_t date = curl_getdate(std::string(value).c_str(), nullptr);
  if (date < 0) return std::nullopt;
  return std::max(0.0, std::difftime(date, std::time(nullptr)));
}

void read_field(std::string_view line, HttpHead& head) {
  const size_t colon = line.find(':');
  if (colon == line.npos) return;
  const std::string name = lower(trimmed(line.substr(0, colon)));
  const std::string_view value = trimmed(line.substr(colon + 1));
  if (name == "content-length") head.length = whole_number(value);
  if (name == "content-range") read_content_range(value, head);
  if (name == "etag" && !value.starts_with("W/")) head.validator = value;
  if (name == "last-modified" && head.validator.empty()) head.validator = value;
  if (name == "location") head.location = value;
  if (name == "content-encoding" && lower(value) != "identity") head.encoding = value;
  if (name == "retry-after") head.retry_after_seconds = read_retry_after(value);
  if (name == "x-linked-size") head.linked_size = whole_number(value);
  if (name == "x-error-message") head.error_message = value;
  if (name == "x-linked-etag") {
    std::string_view digest = value;
    if (digest.size() >= 2 && digest.front() == '"' && digest.back() == '"') digest = digest.substr(1, digest.size() - 2);
    head.linked_digest = lower(digest);
  }
}

HttpEnd end_of(CURLcode code) {
  switch (code) {
    case CURLE_OK: return HttpEnd::kDone;
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT: return HttpEnd::kUnreachable;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_OUT_OF_MEMORY:
    case CURLE_BAD_FUNCTION_ARGUMENT: return HttpEnd::kRefused;
    default: return HttpEnd::kBroken;
  }
}

struct FreeUrl {
  void operator()(CURLU* url) const noexcept { curl_url_cleanup(url); }
};
using Url = std::unique_ptr<CURLU, FreeUrl>;

std::string part_of(const Url& url, CURLUPart part, unsigned flags = 0) {
  char* text = nullptr;
  if (curl_url_get(url.get(), part, &text, flags) != CURLUE_OK) return "";
  const std::string result = text;
  curl_free(text);
  return result;
}

Url parsed(const std::string& text) {
  Url url(curl_url());
  if (url == nullptr) throw std::bad_alloc();
  if (text.find('\0') != text.npos || curl_url_set(url.get(), CURLUPART_URL, text.c_str(), 0) != CURLUE_OK ||
      part_of(url, CURLUPART_HOST).empty())
    throw Error(ErrorCode::kBadInput, fmt::format("{} is no address, expected https://HOST/FILE", quote(text, 200)));
  const std::string scheme = part_of(url, CURLUPART_SCHEME);
  if (scheme != "https" && scheme != "http")
    throw Error(ErrorCode::kBadInput, fmt::format("{} is of the protocol {}, expected https", quote(text, 200), quote(scheme)));
  return url;
}

}  // namespace

struct HttpClient::Transfer {
  int id = 0;
  HttpRequest request;
  CURL* easy = nullptr;
  curl_slist* fields = nullptr;
  char words[CURL_ERROR_SIZE] = {};
  HttpHead head;
  size_t head_bytes = 0;
  bool has_head = false, is_stopped = false;
  double idle_seconds = 0;   // spent waiting since the last byte
  std::exception_ptr thrown;

  ~Transfer() {
    if (easy != nullptr) curl_easy_cleanup(easy);
    curl_slist_free_all(fields);
  }

  // Callbacks run inside C code, which no exception may cross.
  template <class Call>
  bool guarded(const Call& call) {
    try {
      if (call()) return true;
    } catch (...) {
      thrown = std::current_exception();
    }
    is_stopped = true;
    return false;
  }

  static size_t take_head(char* data, size_t, size_t size, void* self_pointer) {
    auto& self = *static_cast<Transfer*>(self_pointer);
    self.idle_seconds = 0;
    self.head_bytes += size;
    if (self.head_bytes > kMaxHeadBytes) return 0;
    if (self.has_head) return size;   // fields behind the body
    const std::string_view line = trimmed({data, size});
    if (line.starts_with("HTTP/")) {
      self.head = {};
      const size_t blank = line.find(' ');
      if (blank != line.npos)
        if (const auto status = whole_number(line.substr(blank + 1, 3))) self.head.status = static_cast<int>(*status);
    } else if (!line.empty()) {
      read_field(line, self.head);
    } else if (self.head.status >= 200) {   // not 100 Continue and the like
      self.has_head = true;
      if (self.request.on_head && !self.guarded([&] { return self.request.on_head(self.head); })) return 0;
    }
    return size;
  }

  static size_t take_body(char* data, size_t, size_t size, void* self_pointer) {
    auto& self = *static_cast<Transfer*>(self_pointer);
    self.idle_seconds = 0;
    if (!self.request.on_body) return size;
    const auto bytes = std::as_bytes(std::span(data, size));
    return self.guarded([&] { return self.request.on_body(bytes); }) ? size : 0;
  }
};

void HttpClient::FreeMulti::operator()(void* multi) const noexcept { curl_multi_cleanup(multi); }

HttpClient::HttpClient(double stall_seconds) : stall_seconds_(stall_seconds) {
  static std::once_flag once;
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  multi_.reset(curl_multi_init());
  if (multi_ == nullptr) throw std::bad_alloc();
}

HttpClient::~HttpClient() { stop_all(); }

int HttpClient::start(HttpRequest request) {
  auto transfer = std::make_unique<Transfer>();
  transfer->id = next_id_++;
  transfer->request = std::move(request);
  transfer->easy = curl_easy_init();
  if (transfer->easy == nullptr) throw std::bad_alloc();
  CURL* easy = transfer->easy;
  const HttpRequest& wanted = transfer->request;
  const auto set = [&](CURLoption option, auto value) {
    if (curl_easy_setopt(easy, option, value) != CURLE_OK)
      throw Error(ErrorCode::kUnsupported, fmt::format("this libcurl lacks option {}", static_cast<int>(option)));
  };
  set(CURLOPT_URL, wanted.url.c_str());
  set(CURLOPT_PROTOCOLS_STR, "http,https");
  set(CURLOPT_FOLLOWLOCATION, 0L);
  set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));   // one connection a transfer
  set(CURLOPT_USERAGENT, "beryl");
  set(CURLOPT_ERRORBUFFER, transfer->words);
  set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
  set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(stall_seconds_ * 1000));
  set(CURLOPT_HEADERFUNCTION, &Transfer::take_head);
  set(CURLOPT_HEADERDATA, transfer.get());
  set(CURLOPT_WRITEFUNCTION, &Transfer::take_body);
  set(CURLOPT_WRITEDATA, transfer.get());
  set(CURLOPT_BUFFERSIZE, 256L << 10);
  const auto add_field = [&](const std::string& field) {
    curl_slist* longer = curl_slist_append(transfer->fields, field.c_str());
    if (longer == nullptr) throw std::bad_alloc();
    transfer->fields = longer;
  };
  if (!wanted.token.empty()) add_field("Authorization: Bearer " + wanted.token);
  if (wanted.range && !wanted.if_range.empty()) add_field("If-Range: " + wanted.if_range);
  if (transfer->fields != nullptr) set(CURLOPT_HTTPHEADER, transfer->fields);
  if (wanted.range)
    set(CURLOPT_RANGE, fmt::format("{}-{}", wanted.range->begin, wanted.range->end - 1).c_str());
  set(CURLOPT_PRIVATE, transfer.get());
  if (curl_multi_add_handle(multi_.get(), easy) != CURLM_OK) throw std::bad_alloc();
  const int id = transfer->id;
  transfers_.emplace(id, std::move(transfer));
  return id;
}

void HttpClient::stop(int id) {
  const auto at = transfers_.find(id);
  if (at == transfers_.end()) return;
  curl_multi_remove_handle(multi_.get(), at->second->easy);
  transfers_.erase(at);
}

void HttpClient::stop_all() {
  while (!transfers_.empty()) stop(transfers_.begin()->first);
}

std::vector<HttpResult> HttpClient::run(double seconds) {
  std::vector<HttpResult> results;
  int n_running = 0;
  curl_multi_perform(multi_.get(), &n_running);
  for (int round = 0;; ++round) {
    int n_left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_.get(), &n_left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      void* pointer = nullptr;
      curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &pointer);
      auto& transfer = *static_cast<Transfer*>(pointer);
      if (transfer.thrown) {
        const std::exception_ptr thrown = transfer.thrown;
        stop(transfer.id);
        std::rethrow_exception(thrown);
      }
      HttpResult result;
      result.id = transfer.id;
      result.end = transfer.is_stopped ? HttpEnd::kStopped : end_of(code);
      if (transfer.has_head) result.head = std::move(transfer.head);
      if (result.end != HttpEnd::kDone && result.end != HttpEnd::kStopped)
        result.reason = transfer.words[0] != '\0' ? transfer.words : curl_easy_strerror(code);
      stop(transfer.id);
      results.push_back(std::move(result));
    }
    end_stalled(results);
    if (!results.empty() || round > 0) return results;
    // Only the time spent here counts as idle: what we ourselves do with the bytes may take long, on a slow disk.
    const auto start = std::chrono::steady_clock::now();
    curl_multi_poll(multi_.get(), nullptr, 0, static_cast<int>(std::max(0.0, seconds) * 1000), nullptr);
    const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    for (auto& [id, transfer] : transfers_) transfer->idle_seconds += waited;
    curl_multi_perform(multi_.get(), &n_running);
  }
}

void HttpClient::end_stalled(std::vector<HttpResult>& results) {
  std::vector<int> stalled;
  for (const auto& [id, transfer] : transfers_)
    if (transfer->idle_seconds >= stall_seconds_) stalled.push_back(id);
  for (const int id : stalled) {
    stop(id);
    HttpResult result;
    result.id = id;
    result.end = HttpEnd::kBroken;
    result.reason = fmt::format("nothing came for {:g} s", stall_seconds_);
    results.push_back(std::move(result));
  }
}

void check_url(const std::string& url) { parsed(url); }

std::string origin_of(const std::string& text) {
  const Url url = parsed(text);
  return fmt::format("{}://{}:{}", part_of(url, CURLUPART_SCHEME), lower(part_of(url, CURLUPART_HOST)),
                     part_of(url, CURLUPART_PORT, CURLU_DEFAULT_PORT));
}

std::string shown_url(const std::string& text) {
  const Url url = parsed(text);
  for (const CURLUPart part : {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_OPTIONS, CURLUPART_QUERY, CURLUPART_FRAGMENT})
    curl_url_set(url.get(), part, nullptr, 0);
  return part_of(url, CURLUPART_URL);
}

std::string host_of(const std::string& url) { return part_of(parsed(url), CURLUPART_HOST); }

std::string redirected_url(const std::string& from, const std::string& location) {
  const Url url = parsed(from);
  const std::string old_scheme = part_of(url, CURLUPART_SCHEME);
  if (location.empty() || curl_url_set(url.get(), CURLUPART_URL, location.c_str(), 0) != CURLUE_OK)
    throw Error(ErrorCode::kBadInput, fmt::format("{} redirects to {}, which is no address", shown_url(from), quote(location, 200)));
  const std::string scheme = part_of(url, CURLUPART_SCHEME);
  if (scheme != "https" && scheme != "http")
    throw Error(ErrorCode::kBadInput, fmt::format("{} redirects to the protocol {}, expected https", shown_url(from), quote(scheme)));
  if (old_scheme == "https" && scheme == "http")
    throw Error(ErrorCode::kBadInput, fmt::format("{} redirects to {}, from https back to http", shown_url(from),
                                                  quote(part_of(url, CURLUPART_HOST))));
  return part_of(url, CURLUPART_URL);
}

std::string escaped_path(std::string_view path) {
  std::string escaped;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || std::string_view("-._~/").find(c) != std::string_view::npos) {
      escaped += c;
    } else {
      escaped += fmt::format("%{:02X}", byte);
    }
  }
  return escaped;
}

}  // namespace beryl
