// HTTP/1.1 for the APIs above it: requests with whole bodies in, whole or streamed replies out. The one file that knows
// libmicrohttpd.
//
// A connection has a thread of its own, in which its handler runs; so handlers may wait for the engine. What a client can
// make the server hold is bounded: connections, header, body, idle time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct MHD_Daemon;

namespace beryl::server {

struct HttpStartLog;

struct HttpLimits {
  int max_connections = 128;          // those beyond are told to come back later
  size_t max_header_bytes = 32 << 10;
  size_t max_body_bytes = 8 << 20;
  int idle_seconds = 60;              // a connection on which nothing moves
};

struct HttpRequest {
  std::string method;
  std::string path;
  std::map<std::string, std::string> headers;   // names in lower case; of several with one name the last
  std::string body;
  bool busy = false;                  // its connection is one more than wanted: answer briefly
  std::function<bool()> client_gone;  // has the other side closed the connection?

  std::string_view header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::string_view() : found->second;
  }
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string body = {};
  // Streamed instead of body: appends what comes next, waiting for it; false: that was the last. An empty piece is asked on.
  // Called by the connection's thread; destroyed when the reply has ended or the client is gone.
  std::function<bool(std::string& piece)> stream = nullptr;
};

class HttpServer {
 public:
  using Handler = std::function<HttpResponse(HttpRequest&)>;
  // What to answer to a request whose body, which it lacks, is beyond the limit.
  using TooLarge = std::function<HttpResponse(const HttpRequest&)>;
  // Throws Error(kIo) when the address can not be listened on, or threads
  // or files are refused: with the reason, and what would help.
  HttpServer(const std::string& host, int port, const HttpLimits& limits, Handler handler, TooLarge too_large);
  // Ends all connections.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }
  int n_connections() const { return n_connections_; }
  // Accepts no more connections; those that are open go on.
  void stop_accepting();
  // Requests whose reply is not all sent.
  int n_active() const { return n_active_; }

 private:
  friend struct HttpCallbacks;
  const HttpLimits limits_;
  const Handler handler_;
  const TooLarge too_large_;
  std::atomic<int> n_connections_ = 0, n_active_ = 0;
  int port_ = 0;
  int listener_ = -1;   // ours again once the daemon was told to stop accepting
  std::unique_ptr<HttpStartLog> log_;
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace beryl::server
