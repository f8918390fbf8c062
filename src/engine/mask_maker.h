// Masks of replies that are bound, made beside the steps.
//
// A mask takes some ten microseconds, but a hostile expression over a large vocabulary a fraction of a second, in which nothing
// can interrupt the grammar's library. So workers make masks, and a sequence whose mask is not there sits out a step
// instead of holding up the others. Replies whose masks are slow wait for each other: one worker at least is kept for quick ones.
//
// Workers have a lower priority than the threads that compute steps: where processors are short, slow masks take what is left.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/request.h"

namespace beryl {

struct Mask {
  TokenConstraint::Next next = TokenConstraint::Next::kAnything;
  std::vector<uint32_t> words;

  bool allows(int32_t id) const {
    return next == TokenConstraint::Next::kAnything ||
           (next == TokenConstraint::Next::kMasked && (words[static_cast<size_t>(id) / 32] >> (id % 32) & 1u) != 0);
  }
  // For SampleParams::allowed.
  const uint32_t* allowed() const { return next == TokenConstraint::Next::kAnything ? nullptr : words.data(); }
};

// A reply's constraint, what is asked of it, and what came of that. From ask() until it is ready a worker's, else the engine's.
struct BoundReply {
  explicit BoundReply(std::unique_ptr<TokenConstraint> its_constraint) : constraint(std::move(its_constraint)) {}

  std::unique_ptr<TokenConstraint> constraint;
  // Asked.
  std::vector<int32_t> fresh;     // have come since the last time
  std::vector<int32_t> guesses;   // may come next; what comes behind each is bound as if it had come
  // Made.
  std::vector<Mask> masks;        // of the next id, and behind each guess that may come
  int n_guesses = 0;              // of these guesses may come
  std::string error;              // what the constraint threw: the reply can not go on
  double seconds = 0;             // how long it takes: the longest of the last times

  bool is_ready() const { return ready_.load(std::memory_order_acquire); }

 private:
  friend class MaskMaker;
  std::atomic<bool> ready_ = true;
};

class MaskMaker {
 public:
  // Threads begin with the first reply that asks.
  MaskMaker(int n_workers, int64_t vocab) : n_workers_(n_workers), vocab_(vocab) {}
  // Waits for the masks that are being made; those that only wait are not made.
  ~MaskMaker();
  MaskMaker(const MaskMaker&) = delete;
  MaskMaker& operator=(const MaskMaker&) = delete;

  // All of one thread. A reply that nobody wants any more can be dropped at any time.
  void ask(std::shared_ptr<BoundReply> reply);
  // Until so many of these are ready, or the time is over.
  void wait(std::span<const BoundReply* const> replies, size_t n_ready, std::chrono::steady_clock::duration most);

 private:
  void begin();
  void work();
  std::shared_ptr<BoundReply> next();
  void make(BoundReply& reply) const;
  void fill(BoundReply& reply, size_t index) const;

  const int n_workers_;
  const int64_t vocab_;
  std::mutex mutex_;
  std::condition_variable work_, made_;
  std::deque<std::shared_ptr<BoundReply>> quick_, slow_;
  int n_slow_ = 0;   // workers that are with a slow one
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace beryl
