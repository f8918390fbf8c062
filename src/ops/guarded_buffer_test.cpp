// What: a buffer starts zeroed and aligned, and a write past its end is seen, whatever its size and after moves.
#include "ops/guarded_buffer.h"

#include <algorithm>
#include <cstdint>

#include <gtest/gtest.h>

namespace beryl {
namespace {

TEST(GuardedBuffer, StartsZeroedAlignedAndWhole) {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{4097}}) {
    const GuardedBuffer buffer("buffer", bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(buffer.label(), "buffer");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.as<char>()) % 64, 0u);
    EXPECT_TRUE(std::all_of(buffer.as<char>(), buffer.as<char>() + bytes, [](char c) { return c == 0; }));
    EXPECT_FALSE(buffer.damaged());
  }
}

TEST(GuardedBuffer, WritesWithinAreNoDamage) {
  const GuardedBuffer buffer("buffer", 100);
  std::fill_n(buffer.as<unsigned char>(), 100, static_cast<unsigned char>(0xff));
  EXPECT_FALSE(buffer.damaged());
}

TEST(GuardedBuffer, EveryGuardByteIsLookedAt) {
  const GuardedBuffer buffer("buffer", 10);
  for (size_t i = 0; i < GuardedBuffer::kGuardBytes; ++i) {
    unsigned char& byte = buffer.as<unsigned char>()[10 + i];
    const unsigned char before = byte;
    byte ^= 1;
    EXPECT_TRUE(buffer.damaged()) << i;
    byte = before;
    EXPECT_FALSE(buffer.damaged()) << i;
  }
}

TEST(GuardedBuffer, MovesTakeContentsAndGuardsAlong) {
  GuardedBuffer first("first", 8);
  first.as<int>()[1] = 7;
  first.as<unsigned char>()[8] = 0;
  GuardedBuffer second(std::move(first));
  EXPECT_EQ(second.label(), "first");
  EXPECT_EQ(second.as<int>()[1], 7);
  EXPECT_TRUE(second.damaged());
  GuardedBuffer third("third", 16);
  third = std::move(second);
  EXPECT_EQ(third.as<int>()[1], 7);
  EXPECT_TRUE(third.damaged());
  EXPECT_FALSE(GuardedBuffer().damaged());
}

TEST(GuardedBuffer, TooLargeIsAnErrorThatNamesTheBuffer) {
  try {
    const GuardedBuffer buffer("layer 3 keys", size_t{1} << 62);
    FAIL() << "allocated";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kOutOfMemory);
    EXPECT_NE(std::string(error.what()).find("out of memory: 4611686 TB for layer 3 keys, "), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace beryl
