// What: the pool runs each item exactly once whatever the thread count, hands exceptions to the caller, survives them,
//       and uses no CPU when idle; its workers are bound to cores exactly where parallel.h says so.
// How:  counters per item; loops of all sizes in quick succession (so that late workers meet the next loop); CPU time
//       of the process over a pause.
#include "cpu/parallel.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <sys/resource.h>
#include <time.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <stdexcept>
#include <vector>

#include "base/error.h"

namespace beryl {
namespace {

double process_cpu_seconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(ThreadPoolTest, RunsEachItemOnce) {
  for (const int n_threads : {1, 2, 3, 5}) {
    ThreadPool pool(n_threads);
    ASSERT_EQ(pool.n_threads(), n_threads);
    for (const int64_t n_items : {0, 1, 2, 3, 7, 64, 1000}) {
      for (const int64_t chunk : {1, 3, 64}) {
        std::vector<int> count(static_cast<size_t>(n_items), 0);
        pool.parallel_for(n_items, chunk, [&](int64_t begin, int64_t end, int thread) {
          EXPECT_LT(begin, end);
          EXPECT_LE(end - begin, chunk);
          EXPECT_TRUE(thread >= 0 && thread < n_threads);
          for (int64_t i = begin; i < end; ++i) ++count[static_cast<size_t>(i)];
        });
        EXPECT_EQ(count, std::vector<int>(static_cast<size_t>(n_items), 1)) << n_threads << " threads, " << n_items;
      }
    }
  }
}

TEST(ThreadPoolTest, ManyShortLoopsInARow) {
  ThreadPool pool(4);
  std::vector<int64_t> per_thread(4 * 16, 0);  // one cache line each: a thread's number is its own while it runs
  int64_t expected = 0;
  for (int loop = 0; loop < 20000; ++loop) {
    const int64_t n_items = loop % 9;
    expected += n_items;
    pool.parallel_for(n_items, 1, [&](int64_t begin, int64_t end, int thread) {
      per_thread[static_cast<size_t>(thread) * 16] += end - begin;
    });
  }
  int64_t total = 0;
  for (const int64_t n : per_thread) total += n;
  EXPECT_EQ(total, expected);
}

TEST(ThreadPoolTest, ResultsOfALoopAreVisibleToTheNext) {
  ThreadPool pool(3);
  std::vector<int64_t> values(97, 1);
  for (int loop = 0; loop < 500; ++loop) {
    std::vector<int64_t> next(values.size());
    pool.parallel_for(97, 5, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        next[static_cast<size_t>(i)] =
            (values[static_cast<size_t>(i)] + values[static_cast<size_t>((i + 1) % 97)]) % 1009;
    });
    std::vector<int64_t> expected(values.size());
    for (size_t i = 0; i < values.size(); ++i) expected[i] = (values[i] + values[(i + 1) % 97]) % 1009;
    ASSERT_EQ(next, expected) << "loop " << loop;
    values = next;
    values[static_cast<size_t>(loop % 97)] += loop;
  }
}

TEST(ThreadPoolTest, ThrowsTheFirstExceptionAndGoesOn) {
  for (const int n_threads : {1, 4}) {
    ThreadPool pool(n_threads);
    for (int round = 0; round < 50; ++round) {
      EXPECT_THROW(pool.parallel_for(100, 1,
                                     [&](int64_t begin, int64_t, int) {
                                       if (begin == round) throw std::runtime_error("item");
                                     }),
                   std::runtime_error);
      std::atomic<int> n_run{0};
      pool.parallel_for(100, 1, [&](int64_t, int64_t, int) { ++n_run; });
      EXPECT_EQ(n_run.load(), 100);
    }
  }
}

TEST(ThreadPoolTest, SleepsWhenIdle) {
  ThreadPool pool(4);
  pool.parallel_for(100, 1, [](int64_t, int64_t, int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // more than the spinning time, on a busy machine too
  const double before = process_cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_LT(process_cpu_seconds() - before, 0.02);
  std::atomic<int> n_run{0};
  pool.parallel_for(100, 1, [&](int64_t, int64_t, int) { ++n_run; });
  EXPECT_EQ(n_run.load(), 100);
}

// The hardware threads that each worker may run on, seen from within; none of workers that were not woken because there are fewer
// processors than threads.
std::vector<std::vector<int>> cpus_of_workers(int n_threads) {
  const int n_awake = std::min(n_threads, usable_processors());
  ThreadPool pool(n_threads);
  std::vector<std::vector<int>> cpus(static_cast<size_t>(n_threads));
  std::atomic<int> n_seen{0};
  pool.parallel_for(n_threads, 1, [&](int64_t, int64_t, int thread) {
    cpu_set_t set;
    sched_getaffinity(0, sizeof(set), &set);
    std::vector<int>& seen = cpus[static_cast<size_t>(thread)];
    if (seen.empty()) ++n_seen;
    seen.clear();
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) seen.push_back(cpu);
    // Holds the thread until all have come, so that each takes an item; not for ever, should the system hold one back.
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (n_seen.load() < n_awake && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  cpus.erase(cpus.begin());
  return cpus;
}

TEST(PinningTest, BindsEachWorkerToACoreOfItsOwnWhereThereAreAsManyAsThreads) {
  const int n_cores = usable_cores();
  const std::vector<std::vector<int>> cores = cores_of_threads(n_cores);
  if (cores.empty()) GTEST_SKIP() << "one core, or a quota below the number of cores";
  ASSERT_EQ(cores.size(), static_cast<size_t>(n_cores) - 1);
  EXPECT_EQ(cpus_of_workers(n_cores), cores);
  std::set<int> all;
  for (const std::vector<int>& core : cores)
    for (const int cpu : core) EXPECT_TRUE(all.insert(cpu).second) << "two cores have CPU " << cpu;
}

TEST(PinningTest, LeavesOtherPoolsToTheSystem) {
  const int n_cores = usable_cores();
  EXPECT_TRUE(cores_of_threads(n_cores + 1).empty());
  cpu_set_t own;
  sched_getaffinity(0, sizeof(own), &own);
  int n_awake = 0;
  for (const std::vector<int>& cpus : cpus_of_workers(n_cores + 2))
    if (!cpus.empty()) {
      EXPECT_EQ(cpus.size(), static_cast<size_t>(CPU_COUNT(&own)));
      ++n_awake;
    }
  EXPECT_GE(n_awake, std::min(n_cores + 2, usable_processors()) - 1);
  setenv("BERYL_PIN_THREADS", "0", 1);
  EXPECT_TRUE(cores_of_threads(n_cores).empty());
  for (const char* wrong : {"banana", "2", "01", " "}) {
    setenv("BERYL_PIN_THREADS", wrong, 1);
    EXPECT_THROW(may_pin_threads(), Error) << wrong;
    EXPECT_THROW(ThreadPool pool(n_cores + 1), Error) << wrong;
  }
  for (const char* right : {"1", ""}) {
    setenv("BERYL_PIN_THREADS", right, 1);
    EXPECT_TRUE(may_pin_threads());
  }
  unsetenv("BERYL_PIN_THREADS");
}

TEST(UsableCoresTest, ReadsQuotas) {
  EXPECT_DOUBLE_EQ(quota_of_cpu_max("150000 100000\n"), 1.5);
  EXPECT_DOUBLE_EQ(quota_of_cpu_max("200000\n 100000\n"), 2.0);  // the two files of cgroup v1, joined
  EXPECT_LE(quota_of_cpu_max("max 100000\n"), 0);
  EXPECT_LE(quota_of_cpu_max("-1\n 100000\n"), 0);
  EXPECT_LE(quota_of_cpu_max(""), 0);
  EXPECT_LE(quota_of_cpu_max("100000"), 0);
}

// In a process of its own, whose address space has no room for so many stacks.
TEST(ThreadPoolDeathTest, ThreadsThatTheSystemRefusesAreAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto make = [] {
    std::ifstream file("/proc/self/statm");
    rlim_t pages = 0;
    file >> pages;
    const rlim_t most = pages * 4096 + (rlim_t{100} << 20);
    const rlimit limit = {most, most};
    setrlimit(RLIMIT_AS, &limit);
    try {
      ThreadPool pool(1000);
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::exit(3);
    }
    std::exit(0);
  };
  EXPECT_EXIT(make(), testing::ExitedWithCode(3), "lets this process have .* of 1000 threads to compute with: .*ulimit -v.*--threads");
}

TEST(UsableCoresTest, AreBetweenOneAndAllHardwareThreads) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_LE(usable_cores(), static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace
}  // namespace beryl
