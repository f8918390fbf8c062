// What: heads that go into a cache of f16 are those of f32, rounded to the nearest even; beyond the range they are its largest
//       values, and NaN stays NaN.
// How:  every instruction set, every f16 value and what lies a little beside the middle of two, beside the scalar conversion.
#include "cpu/elementwise.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/float_formats.h"
#include "cpu/simd.h"

namespace beryl {
namespace {

class HalvesTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(HalvesTest, AreTheRoundedFloats) {
  std::vector<float> values = {65504, 65519.9f, 65520, 1e6f, -1e30f, std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(), 0x1p-25f, 0x1.8p-25f, -0x1p-40f, 0.0f, -0.0f};
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = f16_to_f32(static_cast<uint16_t>(bits)), high = f16_to_f32(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;
    for (const float each : {low, middle, std::nextafter(middle, high), std::nextafter(middle, low)})
      values.push_back(bits % 2 == 0 ? each : -each);
  }
  for (const size_t head_dim : {size_t{1}, size_t{40}, size_t{64}}) {
    for (size_t begin = 0; begin + head_dim <= values.size(); begin += head_dim) {
      std::vector<uint16_t> halves(head_dim + 1, 0x1234);
      finish_head(values.data() + begin, static_cast<int64_t>(head_dim), RowNorm{}, nullptr, halves.data());
      for (size_t i = 0; i < head_dim; ++i)
        ASSERT_EQ(halves[i], f32_to_f16_in_range(values[begin + i])) << values[begin + i] << " of " << head_dim;
      ASSERT_EQ(halves[head_dim], 0x1234) << "written past the head";
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  uint16_t half = 0;
  finish_head(&nan, 1, RowNorm{}, nullptr, &half);
  EXPECT_TRUE(std::isnan(f16_to_f32(half)));
}

TEST(HalvesInRangeTest, OfTheLargestValuesAreFinite) {
  EXPECT_EQ(f16_to_f32(f32_to_f16_in_range(1e9f)), 65504.0f);
  EXPECT_EQ(f16_to_f32(f32_to_f16_in_range(-65520.0f)), -65504.0f);
}

INSTANTIATE_TEST_SUITE_P(Targets, HalvesTest, testing::ValuesIn(cpu_targets()));

}  // namespace
}  // namespace beryl
