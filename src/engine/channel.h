// Between the engine's thread and the one that asked: tokens come as they are sampled, the result at the end.
//
// The engine never waits for a reader: a channel has room for all tokens that its request may have. A reader that goes
// away cancels.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "engine/request.h"

namespace beryl {

class Channel {
 public:
  // Of the reader.
  // Appends what has come since the last call, waiting for it at most so long. False: the reply has ended, result() is
  // there, and all its tokens were given out.
  bool read(std::vector<Sampled>& tokens, std::chrono::milliseconds timeout);
  // Valid once read() has returned false.
  const RequestResult& result() const { return *result_; }
  // The engine frees what the request holds before its next step. What was sampled before may still come.
  void cancel() { cancelled_.store(true, std::memory_order_release); }   // releases what stop() wrote before it, too
  // The same by a reader that has all it wants with the first n_tokens of the reply: it ends as one that has stopped, and so many
  // count, where it has not ended already.
  void stop(int64_t n_tokens) {
    stopped_at_.store(n_tokens, std::memory_order_relaxed);
    cancel();
  }

  // Of the engine.
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  // Of one that is cancelled: the tokens that the reader wanted; -1: it wants none.
  int64_t stopped_at() const { return stopped_at_.load(std::memory_order_relaxed); }
  void push(std::span<const Sampled> tokens);
  void finish(RequestResult result);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Sampled> tokens_;
  std::optional<RequestResult> result_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<int64_t> stopped_at_ = -1;
};

}  // namespace beryl
