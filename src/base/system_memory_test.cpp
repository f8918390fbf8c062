// What: the figures follow what a process does, and lie within what the machine has.
// How:  memory is taken and written; the machine's whole memory bounds both.
#include "base/system_memory.h"

#include <unistd.h>

#include <cstring>
#include <vector>

#include <gtest/gtest.h>

namespace beryl {
namespace {

TEST(SystemMemoryTest, ThePeakGrowsByWhatIsWritten) {
  constexpr int64_t kBytes = 96 << 20;
  const int64_t before = peak_memory_bytes();
  std::vector<char> memory(kBytes);
  std::memset(memory.data(), 1, memory.size());
  const int64_t during = peak_memory_bytes();
  EXPECT_GE(during, before + kBytes / 2) << memory[kBytes / 3];   // some of the peak before may have been free again
  memory = {};
  EXPECT_GE(peak_memory_bytes(), during);
}

TEST(SystemMemoryTest, SomeMemoryIsAvailable) {
  const int64_t whole = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  EXPECT_GT(available_memory_bytes(), 1 << 20);
  EXPECT_LT(peak_memory_bytes(), whole);
}

}  // namespace
}  // namespace beryl
