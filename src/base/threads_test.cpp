// What: helpers are numbered and joined, as many as the system allows; a thread that is refused is a line that names it and the limit.
// How:  refusals in processes of their own, whose address space has no room for many stacks.
#include "base/threads.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/system_memory.h"

namespace beryl {
namespace {

TEST(ThreadsTest, HelpersAreNumberedFromOneAndJoined) {
  for (const int n_threads : {-1, 0, 1, 2, 7}) {
    std::mutex mutex;
    std::set<int> seen;
    {
      const std::vector<std::jthread> helpers = start_helpers(n_threads, [&](int thread) {
        const std::lock_guard lock(mutex);
        EXPECT_TRUE(seen.insert(thread).second);
      });
      EXPECT_EQ(static_cast<int>(helpers.size()), std::max(n_threads - 1, 0));
    }
    std::set<int> expected;
    for (int thread = 1; thread < n_threads; ++thread) expected.insert(thread);
    EXPECT_EQ(seen, expected);
  }
}

TEST(ThreadsTest, AThreadRunsItsBody) {
  std::atomic<bool> ran = false;
  start_thread("a thread", [&] { ran = true; }).join();
  EXPECT_TRUE(ran);
}

void leave_little_room() {
  const rlim_t most = static_cast<rlim_t>(address_space_bytes()) + (rlim_t{100} << 20);
  const rlimit limit = {most, most};
  setrlimit(RLIMIT_AS, &limit);
}

TEST(ThreadsDeathTest, HelpersThatTheSystemRefusesAreTheLast) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto help = [] {
    leave_little_room();
    std::atomic<int> largest = 0, n_run = 0;
    std::atomic<bool> all_started = false;
    size_t n_helpers = 0;
    {
      const std::vector<std::jthread> helpers = start_helpers(1000, [&](int thread) {
        while (!all_started) std::this_thread::sleep_for(std::chrono::milliseconds(1));   // so that none makes room for another
        int known = largest;
        while (thread > known && !largest.compare_exchange_weak(known, thread)) {}
        ++n_run;
      });
      n_helpers = helpers.size();
      all_started = true;
    }
    std::exit(n_helpers > 0 && n_helpers < 999 && n_run == static_cast<int>(n_helpers) && largest == n_run ? 3 : 0);
  };
  EXPECT_EXIT(help(), testing::ExitedWithCode(3), "");
}

TEST(ThreadsDeathTest, ARefusedThreadIsALineWithItsNameAndTheLimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto start = [] {
    leave_little_room();
    std::vector<std::thread> threads;
    try {
      for (;;)
        threads.push_back(start_thread("the thousandth thread", [] {
          for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
        }));
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::_Exit(error.code == ErrorCode::kIo ? 3 : 0);
    }
  };
  EXPECT_EXIT(start(), testing::ExitedWithCode(3),
              "^the thousandth thread could not be started: .*; .*this process [0-9.]+ GB of address space .ulimit -v.: raise that");
}

TEST(ThreadsTest, OtherErrorsAreTheirOwnWord) { EXPECT_EQ(refusal_words(EPERM), "Operation not permitted"); }

}  // namespace
}  // namespace beryl
