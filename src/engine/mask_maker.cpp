#include "engine/mask_maker.h"

#ifdef __linux__
#include <sys/resource.h>
#endif

#include <algorithm>
#include <exception>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace beryl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSlowSeconds = 5e-3;
constexpr int kNice = 5;   // a third of the processor time of a thread of plain priority that wants the same processor

void lower_priority() {
#ifdef __linux__
  setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + kNice);   // on Linux: of this thread
#endif
}

}  // namespace

MaskMaker::~MaskMaker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void MaskMaker::ask(std::shared_ptr<BoundReply> reply) {
  BERYL_CHECK(reply->is_ready(), "a reply is asked once at a time");
  if (threads_.empty()) begin();
  if (threads_.empty()) return make(*reply);
  reply->ready_.store(false, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    (reply->seconds > kSlowSeconds ? slow_ : quick_).push_back(std::move(reply));
  }
  work_.notify_one();
}

// As many as the system lets this process have; none: masks are made by whoever asks.
void MaskMaker::begin() {
  try {
    while (static_cast<int>(threads_.size()) < n_workers_) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
  }
}

void MaskMaker::wait(std::span<const BoundReply* const> replies, size_t n_ready, Clock::duration most) {
  const auto are_ready = [&] {
    return static_cast<size_t>(std::count_if(replies.begin(), replies.end(), [](const BoundReply* each) { return each->is_ready(); })) >= n_ready;
  };
  if (are_ready()) return;
  std::unique_lock lock(mutex_);
  made_.wait_for(lock, most, are_ready);
}

// The next one to make; null: none, the maker ends.
std::shared_ptr<BoundReply> MaskMaker::next() {
  std::unique_lock lock(mutex_);
  const int most_slow = std::max(1, n_workers_ - 1);
  work_.wait(lock, [&] { return stopping_ || !quick_.empty() || (!slow_.empty() && n_slow_ < most_slow); });
  if (stopping_) return nullptr;
  const bool is_slow = quick_.empty();
  std::deque<std::shared_ptr<BoundReply>>& queue = is_slow ? slow_ : quick_;
  std::shared_ptr<BoundReply> reply = std::move(queue.front());
  queue.pop_front();
  n_slow_ += is_slow;
  return reply;
}

void MaskMaker::work() {
  lower_priority();
  while (const std::shared_ptr<BoundReply> reply = next()) {
    const bool was_slow = reply->seconds > kSlowSeconds;
    // Held by nobody else: the request has ended meanwhile.
    if (reply.use_count() > 1) make(*reply);
    {
      const std::lock_guard lock(mutex_);
      n_slow_ -= was_slow;
      reply->ready_.store(true, std::memory_order_release);
    }
    made_.notify_one();
    if (was_slow) work_.notify_one();   // for another slow one
  }
}

void MaskMaker::make(BoundReply& reply) const {
  const Clock::time_point begin = Clock::now();
  TokenConstraint& constraint = *reply.constraint;
  try {
    for (const int32_t id : reply.fresh) constraint.accept(id);
    fill(reply, 0);
    reply.n_guesses = 0;
    const auto n_most = static_cast<int>(std::min<size_t>(reply.guesses.size(), TokenConstraint::kMaxRollback));
    int n_accepted = 0;
    while (reply.n_guesses < n_most) {
      const auto index = static_cast<size_t>(reply.n_guesses);
      if (!reply.masks[index].allows(reply.guesses[index])) break;
      constraint.accept(reply.guesses[index]);
      ++n_accepted;
      fill(reply, index + 1);
      if (reply.masks[index + 1].next == TokenConstraint::Next::kNothing) break;
      ++reply.n_guesses;
    }
    if (n_accepted > 0) constraint.rollback(n_accepted);
  } catch (const std::exception& exception) {
    reply.error = exception.what();
  }
  reply.fresh.clear();
  reply.seconds = std::max(std::chrono::duration<double>(Clock::now() - begin).count(), 0.75 * reply.seconds);
}

void MaskMaker::fill(BoundReply& reply, size_t index) const {
  if (reply.masks.size() <= index) reply.masks.resize(index + 1);
  Mask& mask = reply.masks[index];
  mask.words.assign(static_cast<size_t>((vocab_ + 31) / 32), 0);
  mask.next = reply.constraint->fill(mask.words);
}

}  // namespace beryl
