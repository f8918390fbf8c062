#include "server/connection_watch.h"

#include <linux/sockios.h>
#include <linux/tcp.h>   // of the kernel, for what <netinet/tcp.h> lacks
#include <netinet/in.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

#include "base/threads.h"

namespace beryl::server {
namespace {

bool has_sent(int socket) {
  pollfd state = {socket, POLLIN, 0};
  return poll(&state, 1, 0) > 0;
}

// Bytes that the other side has no room for.
bool holds_unsent(int socket) {
  int n = 0;
  return ioctl(socket, SIOCOUTQNSD, &n) == 0 && n > 0;
}

// Bytes that the other side has taken, since the connection was there.
uint64_t bytes_taken(int socket) {
  tcp_info info = {};
  socklen_t length = sizeof info;
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 ? info.tcpi_bytes_acked : 0;
}

}  // namespace

using Phase = ConnectionWatch::Connection::Phase;

ConnectionWatch::ConnectionWatch(int max_connections, std::chrono::milliseconds header_time, std::chrono::milliseconds idle_time)
    : max_connections_(max_connections), header_time_(header_time), idle_time_(idle_time) {
  thread_ = start_thread("a thread that watches connections", [this] { run(); });
}

ConnectionWatch::~ConnectionWatch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

ConnectionWatch::Connection* ConnectionWatch::add(int socket) {
  const std::lock_guard lock(mutex_);
  if (n_placed_ >= max_connections_) make_room();
  Connection& connection = connections_.emplace_back();
  connection.socket = socket;
  connection.since = Clock::now();
  connection.is_extra = n_placed_ >= max_connections_;
  ++n_placed_;
  if (connections_.size() == 1) changed_.notify_one();
  return &connection;
}

void ConnectionWatch::remove(Connection* connection) {
  const std::lock_guard lock(mutex_);
  n_placed_ -= !connection->is_shut;
  std::erase_if(connections_, [&](const Connection& each) { return &each == connection; });
}

void ConnectionWatch::header_came(Connection* connection) { enter(connection, Phase::kBody); }
void ConnectionWatch::request_came(Connection* connection) { enter(connection, Phase::kReply); }
void ConnectionWatch::reply_ended(Connection* connection) { enter(connection, Phase::kIdle); }

void ConnectionWatch::body_came(Connection* connection, size_t n_bytes) {
  const std::lock_guard lock(mutex_);
  connection->n_body_bytes += static_cast<int64_t>(n_bytes);
}

void ConnectionWatch::drain() {
  {
    const std::lock_guard lock(mutex_);
    if (draining_) return;
    draining_ = true;
    drain_begin_ = Clock::now();
    for (Connection& each : connections_) each.n_taken_before = bytes_taken(each.socket);
  }
  changed_.notify_one();
}

bool ConnectionWatch::is_too_many(const Connection* connection) const {
  const std::lock_guard lock(mutex_);
  return connection->is_extra && n_placed_ > max_connections_;
}

int ConnectionWatch::n_connections() const {
  const std::lock_guard lock(mutex_);
  return n_placed_;
}

void ConnectionWatch::enter(Connection* connection, Phase phase) {
  const std::lock_guard lock(mutex_);
  connection->phase = phase;
  connection->since = Clock::now();
  connection->n_body_bytes = 0;
}

// Its thread sees the end of what the client sends, and ends. The place is free at once.
void ConnectionWatch::shut(Connection& connection) {
  shutdown(connection.socket, SHUT_RDWR);
  connection.is_shut = true;
  --n_placed_;
}

void ConnectionWatch::make_room() {
  Connection* longest = nullptr;
  for (Connection& each : connections_)
    if (each.phase == Phase::kIdle && !each.is_shut && (longest == nullptr || each.since < longest->since) && !has_sent(each.socket))
      longest = &each;
  if (longest != nullptr) shut(*longest);
}

ConnectionWatch::Clock::time_point ConnectionWatch::deadline(const Connection& connection) const {
  if (draining_ && connection.phase == Phase::kBody) return std::max(connection.since, drain_begin_) + kDrainTime;
  switch (connection.phase) {
    case Phase::kNew: return connection.since + header_time_;
    case Phase::kIdle: return connection.since + idle_time_;
    case Phase::kBody: return connection.since + idle_time_ + std::chrono::milliseconds(connection.n_body_bytes * 1000 / kLeastBytesPerSecond);
    case Phase::kReply: break;
  }
  return Clock::time_point::max();
}

bool ConnectionWatch::is_stuck(Connection& connection, Clock::duration since_last_look) const {
  if (!draining_ || connection.phase != Phase::kReply || !holds_unsent(connection.socket)) return false;
  connection.waited += since_last_look;
  const auto n_taken = static_cast<int64_t>(bytes_taken(connection.socket) - connection.n_taken_before);
  return connection.waited >= header_time_ + std::chrono::milliseconds(n_taken * 1000 / kLeastTakenPerSecond);
}

// Looks often enough that a deadline is met within a tenth of it.
void ConnectionWatch::run() {
  const std::chrono::milliseconds calm = std::max(std::min(header_time_, idle_time_) / 10, std::chrono::milliseconds(1));
  std::unique_lock lock(mutex_);
  Clock::time_point last = Clock::now();
  while (!stopping_) {
    if (connections_.empty()) {
      changed_.wait(lock);
      last = Clock::now();
      continue;
    }
    changed_.wait_for(lock, draining_ ? std::min(calm, kDrainTime / 10) : calm);
    const Clock::time_point now = Clock::now();
    for (Connection& each : connections_)
      if (!each.is_shut && (deadline(each) <= now || is_stuck(each, now - last))) shut(each);
    last = now;
  }
}

}  // namespace beryl::server
