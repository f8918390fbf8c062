// What: the figures follow what a process does, and lie within what the machine has.
// How:  memory is taken and written; the machine's whole memory bounds both.
#include "base/system_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
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

TEST(SystemMemoryTest, BytesReadAsThreeDigits) {
  const std::pair<int64_t, const char*> known[] = {
      {0, "0 B"}, {1, "1 B"}, {999, "999 B"}, {1000, "1.00 kB"}, {1234, "1.23 kB"}, {9994, "9.99 kB"},
      {9996, "10.0 kB"}, {99'940, "99.9 kB"}, {99'960, "100 kB"}, {999'499, "999 kB"}, {999'500, "1.00 MB"},
      {12'345'678, "12.3 MB"}, {1'250'000'000, "1.25 GB"}, {7'000'000'000'000, "7.00 TB"},
      {5'000'000'000'000'000, "5000 TB"}};
  for (const auto& [bytes, text] : known) EXPECT_EQ(human_bytes(bytes), text) << bytes;
}

TEST(SystemMemoryTest, ALimitOnAddressSpaceCounts) {
  const int64_t before = available_memory_bytes();
  rlimit old = {};
  getrlimit(RLIMIT_AS, &old);
  const rlimit tight = {static_cast<rlim_t>(address_space_bytes()) + (64 << 20), old.rlim_max};
  setrlimit(RLIMIT_AS, &tight);
  const int64_t within = available_memory_bytes();
  const std::string message = out_of_memory("layer 3 keys", int64_t{3} << 40).what();
  setrlimit(RLIMIT_AS, &old);
  EXPECT_LE(within, std::min<int64_t>(before, 64 << 20));
  EXPECT_GT(within, 0);
  EXPECT_NE(message.find("out of memory: 3.30 TB for layer 3 keys, "), std::string::npos) << message;
  EXPECT_TRUE(message.ends_with("MB are free")) << message;
}

}  // namespace
}  // namespace beryl
