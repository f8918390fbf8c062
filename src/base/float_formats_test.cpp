// What: conversions are exact towards f32 and round to nearest, ties to even, towards the small format.
// How:  every bit pattern of every format there and back; values between two neighbours against a search of the table.
#include "base/float_formats.h"

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace beryl {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// sign · 2^(exponent - bias) · 1.mantissa, or subnormal, from the definition.
double by_definition(uint32_t bits, int n_exponent_bits, int n_mantissa_bits, int bias) {
  const uint32_t mantissa = bits & ((1u << n_mantissa_bits) - 1);
  const auto exponent = static_cast<int>(bits >> n_mantissa_bits & ((1u << n_exponent_bits) - 1));
  const double fraction = std::ldexp(mantissa, -n_mantissa_bits);
  const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return bits >> (n_exponent_bits + n_mantissa_bits) & 1 ? -magnitude : magnitude;
}

TEST(FloatFormats, EveryF16IsItsDefinitionAndSurvivesTheWayBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = f16_to_f32(half);
    if ((bits & 0x7c00u) == 0x7c00u) {
      EXPECT_EQ(std::isnan(value), (bits & 0x3ffu) != 0);
      if (std::isnan(value)) EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(value))));
      else EXPECT_EQ(f32_to_f16(value), half);
    } else {
      ASSERT_EQ(double{value}, by_definition(bits, 5, 10, 15)) << bits;
      ASSERT_EQ(f32_to_f16(value), half);
    }
  }
}

TEST(FloatFormats, EveryBf16IsItsDefinitionAndSurvivesTheWayBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = bf16_to_f32(half);
    if ((bits & 0x7f80u) == 0x7f80u) {
      EXPECT_EQ(std::isnan(value), (bits & 0x7fu) != 0);
      if (std::isnan(value)) EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(value))));
      else EXPECT_EQ(f32_to_bf16(value), half);
    } else {
      ASSERT_EQ(double{value}, by_definition(bits, 8, 7, 127)) << bits;
      ASSERT_EQ(f32_to_bf16(value), half);
    }
  }
}

TEST(FloatFormats, EveryE4m3IsItsDefinitionAndSurvivesTheWayBack) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const auto code = static_cast<uint8_t>(bits);
    const float value = e4m3_to_f32(code);
    if ((bits & 0x7fu) == 0x7fu) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(double{value}, by_definition(bits, 4, 3, 7)) << bits;
      EXPECT_EQ(f32_to_e4m3(value), code);
    }
  }
}

TEST(FloatFormats, EveryE2m1IsItsDefinition) {
  for (uint32_t bits = 0; bits < 16; ++bits) EXPECT_EQ(double{kE2m1Values[bits]}, by_definition(bits, 2, 1, 1)) << bits;
  EXPECT_TRUE(std::signbit(kE2m1Values[8]));
}

TEST(FloatFormats, EveryE8m0IsAPowerOfTwo) {
  for (int bits = 0; bits < 255; ++bits)
    EXPECT_EQ(double{e8m0_to_f32(static_cast<uint8_t>(bits))}, std::ldexp(1.0, bits - 127));
  EXPECT_TRUE(std::isnan(e8m0_to_f32(255)));
}

// Below, at and above the middle between two neighbouring codes (n_codes non-negative finite ones, ascending).
void expect_nearest(uint32_t n_codes, const std::function<float(uint32_t)>& decode,
                    const std::function<uint32_t(float)>& encode, uint32_t sign) {
  for (uint32_t low = 0; low + 1 < n_codes; ++low) {
    const float middle = 0.5f * decode(low) + 0.5f * decode(low + 1);   // exact: more bits than the small format has
    const uint32_t even = low % 2 == 0 ? low : low + 1;
    ASSERT_EQ(encode(middle), even) << low;
    ASSERT_EQ(encode(std::nextafter(middle, 0.0f)), low);
    ASSERT_EQ(encode(std::nextafter(middle, kInfinity)), low + 1);
    ASSERT_EQ(encode(-middle), even | sign);
    ASSERT_EQ(encode(-std::nextafter(middle, kInfinity)), (low + 1) | sign);
  }
}

TEST(FloatFormats, RoundingIsToTheNearestAndTiesToEven) {
  expect_nearest(0x7c00, [](uint32_t b) { return f16_to_f32(static_cast<uint16_t>(b)); },
                 [](float v) { return f32_to_f16(v); }, 0x8000);
  expect_nearest(0x7f80, [](uint32_t b) { return bf16_to_f32(static_cast<uint16_t>(b)); },
                 [](float v) { return f32_to_bf16(v); }, 0x8000);
  expect_nearest(0x7f, [](uint32_t b) { return e4m3_to_f32(static_cast<uint8_t>(b)); },
                 [](float v) { return f32_to_e4m3(v); }, 0x80);
}

TEST(FloatFormats, BeyondTheLargestValue) {
  EXPECT_EQ(f32_to_f16(65504), 0x7bff);
  EXPECT_EQ(f32_to_f16(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520), 0x7c00);               // rounds to infinity
  EXPECT_EQ(f32_to_f16(-kInfinity), 0xfc00);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_bf16(-kInfinity), 0xff80);
  EXPECT_EQ(f32_to_e4m3(448), 0x7e);
  EXPECT_EQ(f32_to_e4m3(1e30f), 0x7e);                // saturates: there is no infinity
  EXPECT_EQ(f32_to_e4m3(-kInfinity), 0xfe);
}

TEST(FloatFormats, NanStaysNanWhereverItsBitsAre) {
  for (float nan : {kNan, -kNan, std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu)}) {
    EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
    EXPECT_TRUE(std::isnan(e4m3_to_f32(f32_to_e4m3(nan))));
  }
}

}  // namespace
}  // namespace beryl
