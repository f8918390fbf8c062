#include "server/lent_priority.h"

#ifdef __linux__
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <condition_variable>
#include <ctime>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace beryl::server {

#ifdef __linux__
namespace {
// A tenth of the processor time of a thread of plain priority that wants the same processor.
constexpr int kNice = 10;
constexpr std::chrono::milliseconds kTick{10};   // between looks at what it has taken
}  // namespace
#endif

void LentPriority::refill() {
  const Clock::time_point now = Clock::now();
  seconds_ = std::min(most_, seconds_ + share_ * std::chrono::duration<double>(now - refilled_).count());
  refilled_ = now;
}

void LentPriority::run(const std::function<void()>& work) {
#ifdef __linux__
  std::mutex mutex;
  std::condition_variable changed;
  pid_t id = 0;
  bool done = false;
  double used = 0;
  std::exception_ptr error;
  std::thread thread;
  try {
    thread = std::thread([&] {
      {
        const std::lock_guard lock(mutex);
        id = gettid();
      }
      try {
        work();
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(mutex);
      timespec time = {};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
      used = static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
      done = true;
      changed.notify_one();
    });
  } catch (const std::system_error&) {
    return work();
  }
  refill();
  {
    std::unique_lock lock(mutex);
    clockid_t clock = 0;
    const bool has_clock = pthread_getcpuclockid(thread.native_handle(), &clock) == 0;
    for (bool is_low = false; !changed.wait_for(lock, kTick, [&] { return done; });) {
      timespec time = {};
      if (is_low || id == 0 || !has_clock || clock_gettime(clock, &time) != 0) continue;
      if (static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec) < seconds_) continue;
      setpriority(PRIO_PROCESS, static_cast<id_t>(id), getpriority(PRIO_PROCESS, static_cast<id_t>(id)) + kNice);   // on Linux: of this thread
      is_low = true;
    }
  }
  thread.join();
  seconds_ = std::max(0.0, seconds_ - used);
  if (error != nullptr) std::rethrow_exception(error);
#else
  work();
#endif
}

}  // namespace beryl::server
