#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/threads.h"
#include "weights/quote.h"

namespace beryl {

namespace {

constexpr uint64_t kOpen = 1;
constexpr uint64_t kOneWorker = 2;
constexpr int kEpochShift = 32;
constexpr uint64_t kWorkersMask = (uint64_t{1} << kEpochShift) - 1 - kOpen;
// Longer than the serial stretches between the loops of a step, shorter than anything a user would see as load.
constexpr std::chrono::microseconds kSpinTime{100};
constexpr int kSpinsBetweenChecks = 32;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// The smallest quota of this process's control group and its ancestors, in CPUs; <= 0: none.
double cgroup_quota() {
  double smallest = 0;
  const auto consider = [&](double quota) {
    if (quota > 0 && (smallest <= 0 || quota < smallest)) smallest = quota;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "0::/a/b" (v2) or "4:cpu,cpuacct:/a/b" (v1)
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string group = line.substr(second + 1);
    const bool unified = controllers.empty();
    if (!unified && controllers.find("cpu") == std::string::npos) continue;
    for (;;) {
      if (unified) {
        consider(quota_of_cpu_max(read_file("/sys/fs/cgroup" + group + "/cpu.max")));
      } else {
        const std::string folder = "/sys/fs/cgroup/cpu" + group;
        consider(quota_of_cpu_max(read_file(folder + "/cpu.cfs_quota_us") + " " +
                                  read_file(folder + "/cpu.cfs_period_us")));
      }
      if (group.empty() || group == "/") break;
      group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
    }
  }
  return smallest;
}

}  // namespace

double quota_of_cpu_max(std::string_view text) {
  double numbers[2] = {0, 0};
  for (double& number : numbers) {
    text.remove_prefix(std::min(text.find_first_not_of(" \n"), text.size()));
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{}) return 0;  // "max", or no such file
    text.remove_prefix(static_cast<size_t>(rest - text.data()));
  }
  return numbers[0] > 0 && numbers[1] > 0 ? numbers[0] / numbers[1] : 0;
}

namespace {

// Of the affinity mask, by core: its hardware threads. Where the system does not tell which belong together, each counts as one.
std::vector<std::vector<int>> allowed_cores() {
  std::map<std::string, std::vector<int>> cores;   // by the list of their hardware threads
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return {};
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::string siblings = read_file(fmt::format("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list", cpu));
    cores[siblings.empty() ? fmt::format("cpu {}", cpu) : std::move(siblings)].push_back(cpu);
  }
  std::vector<std::vector<int>> list;
  for (auto& [siblings, cpus] : cores) list.push_back(std::move(cpus));
  std::sort(list.begin(), list.end());
  return list;
}

}  // namespace

namespace {

// n of the affinity mask (0: not known), cut to the quota.
int cut_to_quota(size_t n) {
  int usable = n > 0 ? static_cast<int>(n) : static_cast<int>(std::thread::hardware_concurrency());
  const double quota = cgroup_quota();
  if (quota > 0) usable = std::min(usable, static_cast<int>(std::ceil(quota)));
  return std::max(usable, 1);
}

}  // namespace

int usable_cores() { return cut_to_quota(allowed_cores().size()); }

int usable_processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  return cut_to_quota(sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? static_cast<size_t>(CPU_COUNT(&allowed)) : 0);
}

bool may_pin_threads() {
  const char* const wish = std::getenv("BERYL_PIN_THREADS");
  if (wish == nullptr || *wish == '\0' || std::string_view(wish) == "1") return true;
  if (std::string_view(wish) == "0") return false;
  throw Error(ErrorCode::kBadInput,
              fmt::format("BERYL_PIN_THREADS is {}, 1 (threads are bound to cores where that is of use: the default) or 0 was expected",
                          quote(wish)));
}

std::vector<std::vector<int>> cores_of_threads(int n_threads) {
  if (!may_pin_threads()) return {};
  std::vector<std::vector<int>> cores = allowed_cores();
  if (static_cast<int>(cores.size()) != n_threads || usable_cores() != n_threads) return {};
  cores.erase(cores.begin());
  return cores;
}

ThreadPool::ThreadPool(int n_threads) : stretches_(static_cast<size_t>(n_threads > 0 ? n_threads : usable_cores())) {
  n_threads = static_cast<int>(stretches_.size());
  const std::vector<std::vector<int>> cores = cores_of_threads(n_threads);
  const int n_processors = usable_processors();
  spin_time_ = n_threads > n_processors ? std::chrono::microseconds{0} : kSpinTime;
  n_to_wake_ = std::min(n_threads, n_processors) - 1;
  workers_.reserve(static_cast<size_t>(n_threads - 1));
  try {
    for (int thread = 1; thread < n_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error& error) {
    const size_t n_made = workers_.size() + 1;
    stop();
    throw Error(ErrorCode::kIo, fmt::format("the system lets this process have {} of {} threads to compute with: {}; --threads asks for fewer",
                                            n_made, n_threads, refusal_words(error.code().value())));
  }
  for (size_t i = 0; i < cores.size(); ++i) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cores[i]) CPU_SET(cpu, &set);
    pthread_setaffinity_np(workers_[i].native_handle(), sizeof(set), &set);   // refused: they run where the system likes
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t n_items, int64_t chunk, void* body, Call call) {
  BERYL_CHECK(chunk > 0, "a chunk holds at least one item");
  if (n_items <= 0) return;
  if (workers_.empty() || n_items <= chunk) {
    for (int64_t begin = 0; begin < n_items; begin += chunk) call(body, begin, std::min(begin + chunk, n_items), 0);
    return;
  }
  body_ = body;
  call_ = call;
  n_items_ = n_items;
  chunk_ = chunk;
  const int64_t n_chunks = (n_items + chunk - 1) / chunk, n = n_threads();
  for (int64_t i = 0; i < n; ++i) {
    Stretch& stretch = stretches_[static_cast<size_t>(i)];
    stretch.next.store(n_chunks * i / n * chunk, std::memory_order_relaxed);
    stretch.end = std::min(n_chunks * (i + 1) / n * chunk, n_items);
  }
  const uint64_t epoch = (state_.load(std::memory_order_relaxed) >> kEpochShift) + 1;
  // Sequentially consistent with the count of sleepers: either the worker sees the new loop before it sleeps, or this
  // thread sees that it sleeps.
  state_.store(epoch << kEpochShift | kOpen);
  if (n_sleeping_.load() > 0) {
    { const std::lock_guard lock(mutex_); }
    if (n_to_wake_ < static_cast<int>(workers_.size())) {
      for (int i = 0; i < n_to_wake_; ++i) wake_.notify_one();
    } else {
      wake_.notify_all();
    }
  }
  take_items(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int spins = 0; (state_.load(std::memory_order_acquire) & kWorkersMask) != 0; ++spins) {
    if (spins < 2000 && spin_time_.count() > 0) {
      pause_briefly();
    } else {
      std::this_thread::yield();  // more threads than cores: a worker may be waiting for this one
    }
  }
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void ThreadPool::take_items(int thread) noexcept {
  const int n = n_threads();
  for (int i = 0; i < n; ++i) {
    Stretch& stretch = stretches_[static_cast<size_t>((thread + i) % n)];
    for (;;) {
      if (stretch.next.load(std::memory_order_relaxed) >= stretch.end) break;
      const int64_t begin = stretch.next.fetch_add(chunk_, std::memory_order_relaxed);
      if (begin >= stretch.end) break;
      try {
        call_(body_, begin, std::min(begin + chunk_, stretch.end), thread);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
        for (Stretch& each : stretches_) each.next.store(each.end, std::memory_order_relaxed);
      }
    }
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen_epoch = 0;
  const auto is_news = [&](uint64_t state) { return state >> kEpochShift != seen_epoch; };
  for (;;) {
    uint64_t state = state_.load(std::memory_order_acquire);
    const auto spin_end = std::chrono::steady_clock::now() + spin_time_;
    while (!is_news(state) && !stop_.load(std::memory_order_relaxed)) {
      for (int i = 0; i < kSpinsBetweenChecks && !is_news(state); ++i) {
        pause_briefly();
        state = state_.load(std::memory_order_acquire);
      }
      if (is_news(state) || std::chrono::steady_clock::now() < spin_end) continue;
      std::unique_lock lock(mutex_);
      n_sleeping_.fetch_add(1);
      wake_.wait(lock, [&] { return is_news(state = state_.load()) || stop_.load(); });
      n_sleeping_.fetch_sub(1);
    }
    if (stop_.load(std::memory_order_relaxed)) return;
    seen_epoch = state >> kEpochShift;
    while ((state & kOpen) != 0 && state >> kEpochShift == seen_epoch) {
      if (!state_.compare_exchange_weak(state, state + kOneWorker, std::memory_order_acq_rel)) continue;
      take_items(thread);
      state_.fetch_sub(kOneWorker, std::memory_order_release);
      break;
    }
  }
}

}  // namespace beryl
