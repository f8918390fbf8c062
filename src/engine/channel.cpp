#include "engine/channel.h"

#include <iterator>
#include <utility>

#include "base/error.h"

namespace beryl {

bool Channel::read(std::vector<Sampled>& tokens, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [&] { return !tokens_.empty() || result_; });
  if (tokens_.empty()) return !result_;
  if (tokens.empty()) {
    tokens.swap(tokens_);
  } else {
    tokens.insert(tokens.end(), std::make_move_iterator(tokens_.begin()), std::make_move_iterator(tokens_.end()));
    tokens_.clear();
  }
  return true;
}

void Channel::push(std::span<const Sampled> tokens) {
  {
    const std::lock_guard lock(mutex_);
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }
  changed_.notify_one();
}

void Channel::finish(RequestResult result) {
  // Notified under the lock: a reader that sees the result may end the channel at once.
  const std::lock_guard lock(mutex_);
  BERYL_CHECK(!result_, "a reply ends once");
  result_ = std::move(result);
  changed_.notify_one();
}

}  // namespace beryl
