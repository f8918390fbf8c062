// Work of strangers that begins at plain priority and goes on at a lower one: what is short is done soon however busy the processors
// are, and what is long leaves them to others.
#pragma once

#include <chrono>
#include <functional>

namespace beryl::server {

// By one thread at a time.
class LentPriority {
 public:
  // What is in hand is processor time at plain priority: `most` seconds at first and at most, and what is used comes back by `share`
  // seconds a second.
  explicit LentPriority(double most = 1, double share = 0.1) : most_(most), share_(share), seconds_(most) {}

  // Runs `work` in a thread of its own (here, where the system has none, or no such priorities) and waits for it. Throws what it throws.
  void run(const std::function<void()>& work);
  double seconds_in_hand() const { return seconds_; }

 private:
  using Clock = std::chrono::steady_clock;
  void refill();

  const double most_, share_;
  double seconds_;
  Clock::time_point refilled_ = Clock::now();
};

}  // namespace beryl::server
