// HTTP/1.1 for the APIs above it: requests with whole bodies in, whole or streamed replies out. The one file that knows
// libmicrohttpd.
//
// A connection has a thread of its own, in which its handler runs; so handlers may wait for the engine. What a client can
// make the server hold is bounded: connections, header, body, and the time that it takes over each (connection_watch.h).
//
// A client that closes its sending half behind a request hears the answer; one that has closed the connection looks the same
// until something is sent to it, which it then refuses. So something is sent: a stream's sign of life, and before a whole
// reply "100 Continue", which clients of HTTP/1.1 read over. One of HTTP/1.0 would not, and is taken to be gone.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct MHD_Daemon;

namespace beryl::server {

struct HttpLog;
class ConnectionWatch;

struct HttpLimits {
  int max_connections = 128;          // those beyond take the place of one between two requests, or are told to come back later
  size_t max_header_bytes = 32 << 10;
  size_t max_body_bytes = 8 << 20;
  std::chrono::milliseconds header_time{10'000};   // a new connection, until its first header is whole
  std::chrono::milliseconds idle_time{60'000};     // one between two requests, likewise; a body or a reply that does not move
};

struct HttpRequest {
  std::string method;
  std::string path;
  std::map<std::string, std::string> headers;   // names in lower case; of several with one name the last
  std::string body;
  bool busy = false;                  // its connection is one more than wanted: answer briefly
  // Has the client closed the connection? Known a moment after it did, if this is asked again and again. Not for streams.
  std::function<bool()> client_gone;

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
  // Of a stream on which nothing comes: sent after each such time, and at once when the client has closed its sending half.
  std::string sign_of_life = {};
  std::chrono::milliseconds sign_of_life_after{0};
};

struct HttpHandlers {
  std::function<HttpResponse(HttpRequest&)> answer;
  // Asked when the header is there and the body is not: what it gives is the answer, and no byte of the body is kept. A body of
  // some length is not even read; then the connection closes.
  std::function<std::optional<HttpResponse>(const HttpRequest&)> refuse;
  // What to answer to a request whose body, which it lacks, is beyond the limit.
  std::function<HttpResponse(const HttpRequest&)> answer_too_large;
  // What to answer where the header, or the frame of the body, is wrong; of such a request no more than the path may be known.
  std::function<HttpResponse(const HttpRequest&, int status, const std::string& what)> answer_malformed;
};

// How many connections there can be of so many wanted: each needs a file, and so do the model, the device and the judges of forms. Lets
// this process have more files where the system allows it. Throws Error(kIo) where not even one is left.
int affordable_connections(int wanted);

class HttpServer {
 public:
  // Throws Error(kIo) when the address can not be listened on, or threads
  // or files are refused: with the reason, and what would help.
  HttpServer(const std::string& host, int port, const HttpLimits& limits, HttpHandlers handlers);
  // Ends all connections.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }
  // Can nobody reach it but this machine?
  bool is_local() const { return is_local_; }
  // How a URL that this machine can open names it: as it was asked for, but for "all addresses", which is none.
  const std::string& url_host() const { return url_host_; }
  // Accepts no more connections. Of those that are open the replies go on; a request has to be whole within half a second from
  // here on, and who takes nothing of its reply, or next to nothing, is cut off after header_time.
  void stop_accepting();
  // Requests whose reply is not all sent.
  int n_active() const { return n_active_; }

 private:
  friend struct HttpCallbacks;
  friend struct HttpLog;
  const HttpLimits limits_;
  const HttpHandlers handlers_;
  std::atomic<int> n_active_ = 0;
  int port_ = 0;
  bool is_local_ = false;
  std::string url_host_;
  int listener_ = -1;   // ours again once the daemon was told to stop accepting
  std::unique_ptr<HttpLog> log_;
  std::unique_ptr<ConnectionWatch> watch_;
  MHD_Daemon* daemon_ = nullptr;
};

}  // namespace beryl::server
