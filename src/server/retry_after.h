// When a client that hears 503 should come back: when those that wait now will have been let in, by the rate at which requests ended lately.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <mutex>

namespace beryl::server {

constexpr int kMostRetrySeconds = 60;   // nobody knows what comes later

// n_finished in so many seconds. Where none has ended, one may end now.
inline int retry_after_seconds(int64_t n_waiting, int64_t n_finished, double seconds) {
  const double wait = static_cast<double>(n_waiting) * seconds / static_cast<double>(std::max<int64_t>(n_finished, 1));
  return static_cast<int>(std::ceil(std::clamp(wait, 1.0, double{kMostRetrySeconds})));
}

// Remembers how many requests had ended at times of the last minute. Seconds are those in which the engine computed, so that a quiet hour does
// not look like a slow one. Any thread.
class FinishRate {
 public:
  // Both since the start; at least whenever a request comes.
  void note(int64_t n_finished, double busy_seconds) {
    const std::lock_guard lock(mutex_);
    if (busy_seconds >= marks_.back().busy_seconds + kStepSeconds) marks_.push_back({n_finished, busy_seconds});
    while (marks_.size() > 1 && marks_[1].busy_seconds <= busy_seconds - kWindowSeconds) marks_.pop_front();
  }
  int retry_after(int64_t n_waiting, int64_t n_finished, double busy_seconds) const {
    const std::lock_guard lock(mutex_);
    return retry_after_seconds(n_waiting, n_finished - marks_.front().n_finished, busy_seconds - marks_.front().busy_seconds);
  }

 private:
  struct Mark {
    int64_t n_finished = 0;
    double busy_seconds = 0;
  };
  static constexpr double kStepSeconds = 1, kWindowSeconds = 60;
  mutable std::mutex mutex_;
  std::deque<Mark> marks_ = {Mark()};   // never empty
};

}  // namespace beryl::server
