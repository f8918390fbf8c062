#include "server/http_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "base/error.h"
#include "base/threads.h"
#include "server/connection_watch.h"
#include "server/request_framing.h"

namespace beryl::server {
namespace {

// A body beyond the limit is read and dropped up to here, so that its sender hears the answer; then it is cut off.
constexpr uint64_t kDroppedBytes = 64 << 20;
// The same of a request that is refused by its header: enough for an honest client with the wrong key.
constexpr uint64_t kRefusedBytes = 1 << 20;

// Some connections more than wanted, which hear that they should come back.
int accepted_connections(int wanted) { return wanted + wanted / 4 + 8; }

// What would help, where that is known.
std::string advice_for(int error) {
  switch (error) {
    case EADDRINUSE: return "; another program listens there: --port takes another, 0 any free one";
    case EACCES: return "; ports below 1024 are the superuser's: --port takes another";
    case EADDRNOTAVAIL: return "; --host takes an address of this machine";
    case EMFILE: {
      rlimit files = {};
      getrlimit(RLIMIT_NOFILE, &files);
      return fmt::format("; this process may have {} files and connections open (ulimit -n): raise that", files.rlim_cur);
    }
    default: return "";
  }
}

struct BoundTo {
  int port = 0;
  bool is_local = false;   // a loopback address
  bool is_any = false;     // all of the machine's
  bool is_ip6 = false;
};

BoundTo read_address(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6) {
    const auto& ip6 = reinterpret_cast<const sockaddr_in6&>(address);
    const uint8_t* const bytes = ip6.sin6_addr.s6_addr;
    const bool is_mapped = IN6_IS_ADDR_V4MAPPED(&ip6.sin6_addr);
    return {ntohs(ip6.sin6_port), IN6_IS_ADDR_LOOPBACK(&ip6.sin6_addr) || (is_mapped && bytes[12] == 127), IN6_IS_ADDR_UNSPECIFIED(&ip6.sin6_addr) != 0, true};
  }
  const auto& ip4 = reinterpret_cast<const sockaddr_in&>(address);
  const uint32_t number = ntohl(ip4.sin_addr.s_addr);
  return {ntohs(ip4.sin_port), number >> 24 == 127, number == INADDR_ANY, false};
}

std::string host_of_url(const std::string& host, const BoundTo& bound) {
  if (bound.is_any) return bound.is_ip6 ? "[::1]" : "127.0.0.1";
  if (host.find(':') == std::string::npos) return host;
  const size_t zone = host.find('%');   // of fe80::1%eth0, for example
  return zone == std::string::npos ? fmt::format("[{}]", host) : fmt::format("[{}%25{}]", host.substr(0, zone), host.substr(zone + 1));
}

// A listening socket, and what it got.
int listen_on(const std::string& host, int port, BoundTo& bound) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); error != 0)
    throw Error(ErrorCode::kIo, fmt::format("--host {}: {}", host, gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  const int listener = socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (listener >= 0) setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (listener < 0 || bind(listener, addresses->ai_addr, addresses->ai_addrlen) != 0 || listen(listener, 128) != 0) {
    const int error = errno;
    if (listener >= 0) close(listener);
    throw Error(ErrorCode::kIo, fmt::format("{}:{} can not be listened on: {}{}", host, port, std::strerror(error), advice_for(error)));
  }
  sockaddr_storage address = {};
  socklen_t length = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  bound = read_address(address);
  return listener;
}

enum class Client {
  kThere,
  kSaysNoMore,   // has closed its sending half, or the connection: the same to us, before it refuses what we send
  kGone,
};

Client look_at(int socket) {
  pollfd state = {socket, POLLRDHUP, 0};
  if (poll(&state, 1, 0) <= 0) return Client::kThere;
  if ((state.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) return Client::kGone;
  return (state.revents & POLLRDHUP) != 0 ? Client::kSaysNoMore : Client::kThere;
}

// One request and its reply; lives until the reply has been sent.
struct Exchange {
  HttpRequest request;
  HeaderLines lines;                      // as they came
  ConnectionWatch::Connection* connection = nullptr;
  bool reads_interim = false;             // HTTP/1.1: answers may come before the answer
  bool was_asked = false;                 // whether it is still there
  std::optional<HttpResponse> refusal;
  bool too_large = false;
  uint64_t n_body_bytes = 0;
};

// While nothing of the reply has been sent.
bool is_gone(Exchange& exchange) {
  const int socket = exchange.connection->socket;
  const Client client = look_at(socket);
  if (client != Client::kSaysNoMore) return client == Client::kGone;
  if (!exchange.reads_interim) return true;
  if (!exchange.was_asked) {
    exchange.was_asked = true;
    constexpr std::string_view kQuestion = "HTTP/1.1 100 Continue\r\n\r\n";
    return send(socket, kQuestion.data(), kQuestion.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(kQuestion.size());
  }
  return false;
}

struct Stream {
  std::function<bool(std::string&)> source;
  int socket = -1;
  std::string sign_of_life;
  std::chrono::milliseconds sign_of_life_after{0};
  std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();   // when something came
  bool was_asked = false;  // whether the client is still there
  std::string pending;
  size_t n_sent = 0;       // of pending
  bool ended = false;

  // False: the client is gone. Else pending has what comes next, or nothing.
  bool advance() {
    const Client client = look_at(socket);
    if (client == Client::kGone) return false;
    pending.clear();
    n_sent = 0;
    ended = !source(pending);
    const auto now = std::chrono::steady_clock::now();
    const bool asks = client == Client::kSaysNoMore && !was_asked;
    if (pending.empty() && !ended && (asks || now - last > sign_of_life_after)) pending = sign_of_life;
    if (!pending.empty()) {
      last = now;
      was_asked = was_asked || asks;
    }
    return true;
  }
};

// The connection that this thread serves, from its first request line on, and what is known of its request: for errors that the library
// finds by itself, which it tells to its log alone.
struct Served {
  const HttpServer* server = nullptr;
  int socket = -1;
  HttpRequest request;
  bool may_answer = false;   // nothing of a reply has been sent
};
thread_local Served served;

std::string status_line(int status) {
  const char* const words = status == 400   ? "Bad Request"
                            : status == 413 ? "Content Too Large"
                            : status == 414 ? "URI Too Long"
                            : status == 431 ? "Request Header Fields Too Large"
                            : status == 505 ? "HTTP Version Not Supported"
                                            : "Error";
  return fmt::format("HTTP/1.1 {} {}\r\n", status, words);
}

}  // namespace

// What the library says. While it starts: why it does not. Later: that a request is none, to which it has a page of its own to send; how
// connections end, which nobody needs to read.
struct HttpLog {
  std::string text;   // the last line
  int error = 0;      // errno at that time
  const std::thread::id starter = std::this_thread::get_id();   // nobody else touches the two

  static void add(void* self, const char* format, va_list arguments) {
    const int error = errno;
    auto& log = *static_cast<HttpLog*>(self);
    if (std::this_thread::get_id() != log.starter) return answer_for_library(format, arguments);
    char line[256];
    std::vsnprintf(line, sizeof line, format, arguments);
    log.error = error;
    log.text = line;
    while (!log.text.empty() && (log.text.back() == '\n' || log.text.back() == '.')) log.text.pop_back();
  }
  // The library's page is no JSON, and its headers go out twice where the length of a body is none (0.9.75). So the answer is sent before
  // the page, which then finds the connection closed. Where the library's words are others, or it knows no request line yet, its page goes out.
  static void answer_for_library(const char* format, va_list arguments);
  std::string reason() const {
    if (error == EMFILE || error == ENFILE) return fmt::format("{}{}", std::strerror(error), advice_for(error));
    if (error == EAGAIN || error == ENOMEM) return fmt::format("a thread was refused: {}", refusal_words(error));
    return text.empty() ? "the library tells no reason" : text;
  }
};

struct HttpCallbacks {
  static MHD_Result header(void* context, MHD_ValueKind, const char* name, const char* value) {
    auto& exchange = *static_cast<Exchange*>(context);
    exchange.lines.emplace_back(name, value == nullptr ? "" : value);
    exchange.request.headers[lower_case(name)] = exchange.lines.back().second;
    return MHD_YES;
  }

  // The request line has come. What is returned is the state that access() begins with.
  static void* request_line(void* self, const char* target, MHD_Connection* connection) {
    served.server = static_cast<const HttpServer*>(self);
    served.socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
    served.may_answer = true;
    try {
      served.request.path = target;
      take_host_off(served.request.path);
    } catch (const std::bad_alloc&) {
      served.may_answer = false;
    }
    return nullptr;
  }

  // The library closes the socket after the second of these.
  static void connection(void* self, MHD_Connection* connection, void** watched, MHD_ConnectionNotificationCode code) {
    ConnectionWatch& watch = *static_cast<HttpServer*>(self)->watch_;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
      *watched = watch.add(MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
    } else {
      watch.remove(static_cast<ConnectionWatch::Connection*>(*watched));
    }
  }

  static void completed(void* self, MHD_Connection*, void** context, MHD_RequestTerminationCode) {
    if (*context == nullptr) return;
    auto& server = *static_cast<HttpServer*>(self);
    const std::unique_ptr<Exchange> exchange(static_cast<Exchange*>(*context));
    *context = nullptr;
    server.watch_->reply_ended(exchange->connection);
    --server.n_active_;
  }

  static ssize_t read_stream(void* context, uint64_t, char* out, size_t room) {
    auto& stream = *static_cast<Stream*>(context);
    try {
      while (stream.n_sent == stream.pending.size()) {
        if (stream.ended) return MHD_CONTENT_READER_END_OF_STREAM;
        if (!stream.advance()) return MHD_CONTENT_READER_END_WITH_ERROR;
      }
    } catch (const std::exception&) {
      return MHD_CONTENT_READER_END_WITH_ERROR;
    }
    const size_t n = std::min(room, stream.pending.size() - stream.n_sent);
    std::memcpy(out, stream.pending.data() + stream.n_sent, n);
    stream.n_sent += n;
    return static_cast<ssize_t>(n);
  }
  static void free_stream(void* context) { delete static_cast<Stream*>(context); }

  static MHD_Result respond(MHD_Connection* connection, const Exchange& exchange, HttpResponse response) {
    MHD_Response* reply = nullptr;
    served.may_answer = false;
    if (response.stream) {
      auto stream = std::make_unique<Stream>();
      stream->source = std::move(response.stream);
      stream->socket = exchange.connection->socket;
      stream->sign_of_life = std::move(response.sign_of_life);
      stream->sign_of_life_after = response.sign_of_life_after;
      reply = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16 << 10, &read_stream, stream.get(), &free_stream);
      if (reply != nullptr) stream.release();
    } else {
      reply = MHD_create_response_from_buffer(response.body.size(), response.body.data(), MHD_RESPMEM_MUST_COPY);
    }
    if (reply == nullptr) return MHD_NO;
    if (response.status != 204) MHD_add_response_header(reply, "Content-Type", response.content_type.c_str());
    for (const auto& [name, value] : response.headers) MHD_add_response_header(reply, name.c_str(), value.c_str());
    const MHD_Result queued = MHD_queue_response(connection, static_cast<unsigned>(response.status), reply);
    MHD_destroy_response(reply);
    return queued;
  }

  static MHD_Result access(void* context, MHD_Connection* connection, const char* url, const char* method, const char* version,
                           const char* data, size_t* n_data, void** state) {
    auto& self = *static_cast<HttpServer*>(context);
    try {
      if (*state == nullptr) return begin(self, connection, url, method, version, state);
      return go_on(self, connection, *static_cast<Exchange*>(*state), data, n_data);
    } catch (const std::exception&) {
      return MHD_NO;   // no memory: the connection closes
    }
  }

  // The header alone is there.
  static MHD_Result begin(HttpServer& self, MHD_Connection* connection, const char* url, const char* method, const char* version,
                          void** state) {
    auto created = std::make_unique<Exchange>();
    Exchange& exchange = *created;
    HttpRequest& request = exchange.request;
    request.method = method;
    request.path = url;
    MHD_get_connection_values(connection, MHD_HEADER_KIND, &header, &exchange);
    exchange.connection =
        static_cast<ConnectionWatch::Connection*>(MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context);
    exchange.reads_interim = version != std::string_view("HTTP/1.0");
    request.client_gone = [&exchange] { return is_gone(exchange); };
    if (std::optional<std::string> host = take_host_off(request.path)) request.headers["host"] = std::move(*host);
    request.busy = self.watch_->is_too_many(exchange.connection);
    const std::string_view length = request.header("content-length");
    uint64_t n_bytes = 0;
    std::from_chars(length.data(), length.data() + length.size(), n_bytes);
    exchange.too_large = n_bytes > self.limits_.max_body_bytes;
    const std::optional<FramingFault> fault = find_framing_fault(exchange.lines, version);
    if (!fault) exchange.refusal = self.handlers_.refuse(request);
    *state = created.release();
    ++self.n_active_;
    self.watch_->header_came(exchange.connection);
    if (fault) {
      HttpResponse answer = self.handlers_.answer_malformed(request, fault->status, fault->what);
      answer.headers.emplace_back("Connection", "close");
      return respond(connection, exchange, std::move(answer));
    }
    if (exchange.refusal) {
      // Who waits to be told to go on with it, or does not say how long it is, need not.
      const bool is_short = n_bytes <= kRefusedBytes && request.header("transfer-encoding").empty() && request.header("expect").empty();
      return is_short ? MHD_YES : respond(connection, exchange, std::move(*exchange.refusal));
    }
    if (n_bytes > self.limits_.max_body_bytes + kDroppedBytes) return respond(connection, exchange, self.handlers_.answer_too_large(request));
    return MHD_YES;
  }

  // A piece of the body, or its end.
  static MHD_Result go_on(HttpServer& self, MHD_Connection* connection, Exchange& exchange, const char* data, size_t* n_data) {
    HttpRequest& request = exchange.request;
    if (*n_data > 0) {
      self.watch_->body_came(exchange.connection, *n_data);
      exchange.n_body_bytes += *n_data;
      if (exchange.n_body_bytes > self.limits_.max_body_bytes) {
        exchange.too_large = true;
        request.body = std::string();
        if (exchange.n_body_bytes > self.limits_.max_body_bytes + kDroppedBytes) return MHD_NO;
      } else if (!exchange.too_large && !exchange.refusal) {
        request.body.append(data, *n_data);
      }
      *n_data = 0;
      return MHD_YES;
    }
    self.watch_->request_came(exchange.connection);
    if (exchange.refusal) return respond(connection, exchange, std::move(*exchange.refusal));
    return respond(connection, exchange, exchange.too_large ? self.handlers_.answer_too_large(request) : self.handlers_.answer(request));
  }
};

void HttpLog::answer_for_library(const char* format, va_list arguments) {
  constexpr std::string_view kBegin = "Error processing request (HTTP response code is %u";
  if (!served.may_answer || !std::string_view(format).starts_with(kBegin)) return;
  served.may_answer = false;
  char line[512];
  std::vsnprintf(line, sizeof line, format, arguments);
  int status = 0;
  const char* const number = line + kBegin.size() - 2;
  std::from_chars(number, line + std::strlen(line), status);
  const char* const what = status == 413   ? "Content-Length is more than any computer has"
                           : status == 431 ? "the header is larger than this server reads"
                           : status == 400 ? "the request is no HTTP: a line of its header, Content-Length or a chunk of its body is malformed"
                                           : nullptr;
  if (what == nullptr) return;
  try {
    const HttpResponse answer = served.server->handlers_.answer_malformed(served.request, status, what);
    std::string all = status_line(status) + fmt::format("Content-Type: {}\r\nContent-Length: {}\r\n", answer.content_type, answer.body.size());
    for (const auto& [name, value] : answer.headers)
      if (name != "Connection") all += fmt::format("{}: {}\r\n", name, value);
    all += "Connection: close\r\n\r\n" + answer.body;
    send(served.socket, all.data(), all.size(), MSG_NOSIGNAL | MSG_DONTWAIT);   // fits an empty buffer
    shutdown(served.socket, SHUT_WR);
  } catch (const std::bad_alloc&) {
    // the library's page
  }
}

int affordable_connections(int wanted) {
  // Of connections more than wanted see HttpServer; the rest is for what is opened later.
  constexpr rlim_t kReserve = 64;
  rlim_t n_open = 0;
  std::error_code error;
  for (auto each = std::filesystem::directory_iterator("/proc/self/fd", error); !error && each != std::filesystem::directory_iterator(); each.increment(error)) ++n_open;
  const auto needed = [&](int n) { return n_open + kReserve + static_cast<rlim_t>(accepted_connections(n)); };
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return wanted;
  if (files.rlim_cur < needed(wanted) && files.rlim_cur < files.rlim_max) {
    const rlimit raised = {std::min(needed(wanted), files.rlim_max), files.rlim_max};
    if (setrlimit(RLIMIT_NOFILE, &raised) == 0) files = raised;
  }
  int n = wanted;
  while (n > 0 && needed(n) > files.rlim_cur) --n;
  if (n == 0)
    throw Error(ErrorCode::kIo, fmt::format("this process may have {} files and connections open (ulimit -n), at least {} were expected", files.rlim_cur, needed(1)));
  return n;
}

HttpServer::HttpServer(const std::string& host, int port, const HttpLimits& limits, HttpHandlers handlers)
    : limits_(limits), handlers_(std::move(handlers)) {
  watch_ = std::make_unique<ConnectionWatch>(limits.max_connections, limits.header_time, limits.idle_time);
  BoundTo bound;
  listener_ = listen_on(host, port, bound);
  port_ = bound.port;
  is_local_ = bound.is_local;
  url_host_ = host_of_url(host, bound);
  const int n_connections = accepted_connections(limits.max_connections);
  log_ = std::make_unique<HttpLog>();
  daemon_ = MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC | MHD_USE_ERROR_LOG,
                             0, nullptr, nullptr, &HttpCallbacks::access, this,
                             MHD_OPTION_EXTERNAL_LOGGER, &HttpLog::add, log_.get(),   // the first, so that it hears of the others
                             MHD_OPTION_LISTEN_SOCKET, listener_,
                             MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(n_connections),
                             MHD_OPTION_CONNECTION_MEMORY_LIMIT, limits.max_header_bytes,
                             MHD_OPTION_CONNECTION_TIMEOUT, static_cast<unsigned>((limits.idle_time.count() + 999) / 1000),
                             MHD_OPTION_URI_LOG_CALLBACK, &HttpCallbacks::request_line, this,
                             MHD_OPTION_NOTIFY_COMPLETED, &HttpCallbacks::completed, this,
                             MHD_OPTION_NOTIFY_CONNECTION, &HttpCallbacks::connection, this, MHD_OPTION_END);
  if (daemon_ == nullptr) {
    close(listener_);
    throw Error(ErrorCode::kIo, fmt::format("{}:{}: the HTTP server could not be started: {}", host, port, log_->reason()));
  }
}

void HttpServer::stop_accepting() {
  if (listener_ < 0) return;
  if (MHD_quiesce_daemon(daemon_) != MHD_INVALID_SOCKET) close(listener_);
  listener_ = -1;
  watch_->drain();
}

HttpServer::~HttpServer() {
  stop_accepting();
  MHD_stop_daemon(daemon_);
}

}  // namespace beryl::server
