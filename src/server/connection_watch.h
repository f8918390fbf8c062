// What every connection of a server does, and since when: those that take too long over it are shut, so that nobody holds a
// place by saying nothing, or one byte now and then.
//
//   a new one       header_time until its first header is whole
//   between two     idle_time from the end of a reply until the next header is whole
//   a body          idle_time, and what its bytes so far would take at kLeastBytesPerSecond
//   a reply         no limit here
//
// Once the server ends, nobody may make it wait: a request has to be whole within kDrainTime, and a reader that leaves bytes
// waiting for it is shut after header_time of that, and what those that it took would take at kLeastTakenPerSecond.
//
// Where there is no place for a new connection, the one that waits the longest between two requests is shut for it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

namespace beryl::server {

class ConnectionWatch {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kLeastBytesPerSecond = 16 << 10;
  static constexpr int64_t kLeastTakenPerSecond = 1 << 10;
  static constexpr std::chrono::milliseconds kDrainTime{500};

  struct Connection {
    int socket;
    enum class Phase : uint8_t { kNew, kIdle, kBody, kReply } phase = Phase::kNew;
    Clock::time_point since;
    int64_t n_body_bytes = 0;
    bool is_extra = false;   // came when all places were taken
    bool is_shut = false;    // by us: it has no place any more
    // Of a reply, once the server ends: how long bytes have waited for the reader, and those that it had taken at first.
    Clock::duration waited{0};
    uint64_t n_taken_before = 0;
  };

  // Throws Error(kIo) when the system has no thread for it.
  ConnectionWatch(int max_connections, std::chrono::milliseconds header_time, std::chrono::milliseconds idle_time);
  ~ConnectionWatch();
  ConnectionWatch(const ConnectionWatch&) = delete;
  ConnectionWatch& operator=(const ConnectionWatch&) = delete;

  // All of these by any thread. The socket stays open until remove() has returned.
  Connection* add(int socket);
  void remove(Connection* connection);
  void header_came(Connection* connection);
  void body_came(Connection* connection, size_t n_bytes);
  void request_came(Connection* connection);
  void reply_ended(Connection* connection);
  // From now on those that do not get on are shut sooner.
  void drain();
  // Is it one more than wanted, still?
  bool is_too_many(const Connection* connection) const;
  int n_connections() const;

 private:
  void run();
  void enter(Connection* connection, Connection::Phase phase);
  void shut(Connection& connection);
  void make_room();
  Clock::time_point deadline(const Connection& connection) const;
  bool is_stuck(Connection& connection, Clock::duration since_last_look) const;

  const int max_connections_;
  const std::chrono::milliseconds header_time_, idle_time_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Connection> connections_;
  int n_placed_ = 0;       // of them, not shut
  bool stopping_ = false;
  bool draining_ = false;
  Clock::time_point drain_begin_;
  std::thread thread_;
};

}  // namespace beryl::server
