// HTTP as far as downloads need it, on libcurl: requests for byte ranges, many at once in one thread, each with a head
// that is looked at before its body is taken. Redirects are not followed here: where a token may go is the caller's to
// decide, request by request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "store/ranges.h"

namespace beryl {

struct HttpHead {
  int status = 0;
  std::optional<int64_t> length;          // Content-Length
  std::optional<ByteRange> range;         // Content-Range, and the whole size in it
  std::optional<int64_t> total;
  std::string validator;                  // a strong ETag as it was sent, else Last-Modified; empty: neither
  std::string location;
  std::string encoding;                   // Content-Encoding other than identity
  std::optional<double> retry_after_seconds;
  std::string linked_digest;              // what a hub says of a file behind a redirect: X-Linked-ETag without quotes
  std::optional<int64_t> linked_size;     //   X-Linked-Size
  std::string error_message;              // X-Error-Message
};

struct HttpRequest {
  std::string url;
  std::string token;                      // Authorization: Bearer; empty: none
  std::optional<ByteRange> range;
  std::string if_range;                   // the range is wanted of this version only; empty: of any
  std::function<bool(const HttpHead&)> on_head;                  // false ends the transfer
  std::function<bool(std::span<const std::byte>)> on_body;       // likewise; may be empty
};

enum class HttpEnd : uint8_t {
  kDone,          // head and the body that was announced
  kStopped,       // a callback returned false
  kBroken,        // cut, reset, stalled: may be tried again
  kUnreachable,   // no such host, connection refused
  kRefused,       // certificate, protocol: trying again changes nothing
};

struct HttpResult {
  int id = 0;
  HttpEnd end = HttpEnd::kDone;
  HttpHead head;                          // status 0: there was none
  std::string reason;                     // for people, when end is one of the last three
};

class HttpClient {
 public:
  // A transfer without a byte for `stall_seconds` is broken.
  explicit HttpClient(double stall_seconds);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  int start(HttpRequest request);
  void stop(int id);                      // no result comes of it
  void stop_all();
  size_t n_running() const { return transfers_.size(); }

  // Runs the transfers, for `seconds` at most or until some have ended. What a callback throws comes out here.
  std::vector<HttpResult> run(double seconds);

 private:
  struct Transfer;
  struct FreeMulti {
    void operator()(void* multi) const noexcept;
  };
  double stall_seconds_;
  std::unique_ptr<void, FreeMulti> multi_;
  void end_stalled(std::vector<HttpResult>& results);

  std::map<int, std::unique_ptr<Transfer>> transfers_;   // by id
  int next_id_ = 1;
};

// ---- addresses ----

// Throws Error(kBadInput) unless it is http://HOST… or https://HOST….
void check_url(const std::string& url);
// scheme, host and port: what must be equal for a token to be sent. "https://host:443"
std::string origin_of(const std::string& url);
// Without name and password, query and fragment, which may hold secrets.
std::string shown_url(const std::string& url);
std::string host_of(const std::string& url);
// Where a redirect leads. Throws Error(kBadInput): no address, another protocol than http and https, or from https back
// to http.
std::string redirected_url(const std::string& from, const std::string& location);
// A path for an address: all bytes but letters, digits and -._~/ as %XX.
std::string escaped_path(std::string_view path);

}  // namespace beryl
