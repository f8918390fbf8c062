// What: philox is Philox 4x32-10, bit for bit, and its counters are independent streams.
// How:  the known answers published with the algorithm (Random123, kat_vectors); counts against theory.
#include "base/rng.h"

#include <cmath>
#include <set>

#include <gtest/gtest.h>

namespace beryl {
namespace {

void expect_words(const Random4& got, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  EXPECT_EQ(got.x[0], a);
  EXPECT_EQ(got.x[1], b);
  EXPECT_EQ(got.x[2], c);
  EXPECT_EQ(got.x[3], d);
}

TEST(Philox, GivesThePublishedAnswers) {
  expect_words(philox(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  expect_words(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  // Counter words 243f6a88 85a308d3 13198a2e 03707344, key words a4093822 299f31d0.
  expect_words(philox(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e), 0xd16cfe09, 0x94fdcceb, 0x5001e420,
               0x24126ea1);
}

TEST(Philox, IsAConstantFunctionOfItsArguments) {
  const Random4 first = philox(1, 2, 3), second = philox(1, 2, 3);
  expect_words(first, second.x[0], second.x[1], second.x[2], second.x[3]);
  EXPECT_NE(philox(1, 2, 3).x[0], philox(1, 3, 3).x[0]);
  EXPECT_NE(philox(1, 2, 3).x[0], philox(2, 2, 3).x[0]);
  EXPECT_NE(philox(1, 2, 3).x[0], philox(1, 2, 4).x[0]);
}

TEST(Philox, ConsecutiveCountersFillEveryBucketEvenly) {
  constexpr int kBuckets = 64, kDraws = 64000;
  int counts[kBuckets] = {};
  std::set<uint32_t> distinct;
  for (int i = 0; i < kDraws; ++i) {
    const uint32_t word = philox(7, static_cast<uint64_t>(i)).x[0];
    ++counts[word >> 26];
    distinct.insert(word);
  }
  double statistic = 0;
  for (int count : counts) statistic += (count - 1000.0) * (count - 1000.0) / 1000.0;
  EXPECT_LT(std::abs(statistic - (kBuckets - 1)), 6 * std::sqrt(2.0 * (kBuckets - 1)));
  EXPECT_GT(distinct.size(), kDraws - 20u);   // a collision or two among 2^32 are due
}

TEST(ToUnitFloat, StaysBelowOne) {
  EXPECT_EQ(to_unit_float(0), 0.0f);
  EXPECT_EQ(to_unit_float(0xffffffffu), 1 - 0x1p-24f);
  EXPECT_EQ(to_unit_float(0x80000000u), 0.5f);
}

}  // namespace
}  // namespace beryl
