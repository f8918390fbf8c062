// A pool of threads that run the loop of one op at a time.
//
// An op lasts from a few µs to a few ms and there are some hundred of them in a token, so a dispatch must cost little
// more than a cache miss: workers spin for a short while after a loop and only then sleep; the calling thread takes
// part; a worker that is still waking up is not waited for, because items are handed out one by one and the others
// finish those that nobody took. When nothing runs, all workers sleep and use no CPU.
//
// With more threads than processors that the process may use nobody spins, and a loop wakes no more workers than there are processors:
// others would only take them away from those that have work.
//
// Each thread begins with a stretch of items of its own, so that it reads the memory behind them as one stream, and then
// helps the others with theirs. Which thread computes an item is a matter of chance: its result must not depend on it.
//
// Where there are as many threads as physical cores that the process may use, each worker is bound to a core of its own. With
// fewer, or more, or a CPU quota, the system places them: which cores are free it knows better. BERYL_PIN_THREADS=0 in the environment:
// never; 1, or nothing: as said; another value is refused.
//
// The calling thread is never bound: threads that it starts later, and pools that ask which cores there are, would take over its one core;
// who calls may be another thread than who made the pool; and it was measured to gain nothing (docs/performance.md).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

namespace beryl {

class ThreadPool {
 public:
  // n_threads counts the calling thread; 0: usable_cores(). Error(kIo) where the system does not allow so many, Error(kBadInput) for a
  // wrong BERYL_PIN_THREADS.
  explicit ThreadPool(int n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int n_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(begin, end, thread) for ranges that cover [0, n_items) once, each at most `chunk` items long; thread is in
  // [0, n_threads()) and no two calls at the same time have the same one. Returns when all are done. The first
  // exception of a body is thrown here, after the other threads have stopped. One caller at a time; not reentrant.
  template <class Body>
  void parallel_for(int64_t n_items, int64_t chunk, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    run(n_items, chunk, const_cast<void*>(static_cast<const void*>(std::addressof(body))),
        [](void* callable, int64_t begin, int64_t end, int thread) {
          (*static_cast<Callable*>(callable))(begin, end, thread);
        });
  }

 private:
  void stop();                      // ends and joins the workers
  using Call = void (*)(void* body, int64_t begin, int64_t end, int thread);

  void run(int64_t n_items, int64_t chunk, void* body, Call call);
  void work(int thread);
  void take_items(int thread) noexcept;

  // The loop that is running: its number in the high 32 bits, how many workers are inside in bits 1..31, and bit 0:
  // it still admits workers. A worker reads the fields below only between entering and leaving.
  std::atomic<uint64_t> state_{0};
  void* body_ = nullptr;
  Call call_ = nullptr;
  int64_t n_items_ = 0;
  int64_t chunk_ = 1;
  std::exception_ptr error_;           // guarded by mutex_
  // A thread's stretch: items [next, end) are still to be taken, by whomever.
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Stretch> stretches_;     // [n_threads]
  std::chrono::microseconds spin_time_;  // of a worker that waits
  int n_to_wake_;                        // workers that a loop wakes
  alignas(64) std::atomic<int> n_sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Physical cores that this process may use: the affinity mask, one thread a core, cut to the CPU quota of its control
// group (rounded up). At least 1.
int usable_cores();

// Hardware threads that this process may use, cut in the same way.
int usable_processors();

// Whether the environment lets threads be bound to cores: false for BERYL_PIN_THREADS=0. Error(kBadInput) for a value but 0 and 1.
bool may_pin_threads();

// The cores that workers 1, 2, ... of a pool of n_threads are bound to, each as the hardware threads of it that the process may
// use; the calling thread, 0, is left the first one. Empty: they are not bound. Throws as may_pin_threads does.
std::vector<std::vector<int>> cores_of_threads(int n_threads);

// CPUs of a quota, from the text of cgroup v2's cpu.max ("150000 100000": 1.5; "max 100000": none). <= 0: no limit.
double quota_of_cpu_max(std::string_view text);

}  // namespace beryl
