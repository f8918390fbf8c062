// What: exp, tanh, gelu and silu stay within the error bounds that math-inl.h states, on every instruction set, and
//       give the same bits on all that have a fused multiply-add.
// How:  against double, on a dense sweep of magnitudes of both signs and on the special values.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/math_test.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

void apply(int function, const float* x, float* y, size_t n) {
  for (size_t i = 0; i < n; i += 16) {
    const Vec16 v = load16(x + i);
    store16(function == 0 ? exp16(v) : function == 1 ? tanh16(v) : function == 2 ? gelu16(v) : silu16(v), y + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace beryl {
namespace {

HWY_EXPORT(apply);

enum Function { kExp, kTanh, kGelu, kSilu };

std::vector<float> apply_all(Function function, const std::vector<float>& x) {
  std::vector<float> padded = x;
  padded.resize((x.size() + 15) / 16 * 16, 0.0f);
  std::vector<float> y(padded.size());
  HWY_DYNAMIC_DISPATCH(apply)(function, padded.data(), y.data(), padded.size());
  y.resize(x.size());
  return y;
}

double ulp_of(double value) {
  const double magnitude = std::max(std::abs(value), 0x1p-126);
  return std::ldexp(1.0, std::ilogb(magnitude) - 23);
}

// Both signs, every magnitude from 2^-30 to `largest`, some thousand a power of two.
std::vector<float> sweep(float largest) {
  std::vector<float> x = {0.0f, -0.0f};
  for (uint32_t bits = std::bit_cast<uint32_t>(0x1p-30f); bits <= std::bit_cast<uint32_t>(largest); bits += 4099) {
    x.push_back(std::bit_cast<float>(bits));
    x.push_back(-x.back());
  }
  return x;
}

// As z / (1 + e^-2u): 0.5 z (1 + tanh u) cancels in double where z is very negative.
double exact_gelu(double z) { return z / (1 + std::exp(-2 * 0.79788456080286535588 * (z + 0.044715 * z * z * z))); }
double exact_silu(double z) { return z / (1 + std::exp(-z)); }

class MathTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(MathTest, ExpIsNearAnUlp) {
  const std::vector<float> x = sweep(87.3f);
  const std::vector<float> y = apply_all(kExp, x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(y[i] - exact) / ulp_of(exact));
  }
  RecordProperty("worst_ulp", std::to_string(worst));
  EXPECT_LE(worst, 1.5);
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> special = apply_all(kExp, {0.0f, -0.0f, inf, -inf, 89.0f, 88.7f, -87.4f, -200.0f, NAN});
  EXPECT_EQ(special[0], 1.0f);
  EXPECT_EQ(special[1], 1.0f);
  EXPECT_EQ(special[2], inf);
  EXPECT_EQ(special[3], 0.0f);
  EXPECT_EQ(special[4], inf);
  EXPECT_NEAR(special[5] / std::exp(88.7), 1.0, 1e-5);
  EXPECT_EQ(special[6], 0.0f);
  EXPECT_EQ(special[7], 0.0f);
  EXPECT_TRUE(std::isnan(special[8]));
}

TEST_P(MathTest, TanhIsWithinAFewUlp) {
  const std::vector<float> x = sweep(100.0f);
  const std::vector<float> y = apply_all(kTanh, x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::tanh(static_cast<double>(x[i]));
    worst = std::max(worst, std::abs(y[i] - exact) / ulp_of(exact));
  }
  RecordProperty("worst_ulp", std::to_string(worst));
  EXPECT_LE(worst, 2.5);
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> special = apply_all(kTanh, {inf, -inf, NAN});
  EXPECT_EQ(special[0], 1.0f);
  EXPECT_EQ(special[1], -1.0f);
  EXPECT_TRUE(std::isnan(special[2]));
}

TEST_P(MathTest, GatesAreNearRoundoff) {
  const std::vector<float> x = sweep(200.0f);
  for (const Function function : {kGelu, kSilu}) {
    const std::vector<float> y = apply_all(function, x);
    double worst_absolute = 0, worst_relative = 0;  // in the units of the stated bounds
    for (size_t i = 0; i < x.size(); ++i) {
      const double z = x[i];
      const double exact = function == kGelu ? exact_gelu(z) : exact_silu(z);
      const double error = std::abs(y[i] - exact);
      worst_absolute = std::max(worst_absolute, error / std::max(1.0, std::abs(z)));
      const double argument = function == kGelu ? 2 * 0.79788456080286535588 * (z + 0.044715 * z * z * z) : z;
      if (std::abs(exact) > 1e-30)  // the exponential overflows only where the result is smaller
        worst_relative = std::max(worst_relative, error / std::abs(exact) * 0x1p24 / (6 + 4 * std::abs(argument)));
    }
    SCOPED_TRACE(function == kGelu ? "gelu" : "silu");
    RecordProperty(function == kGelu ? "gelu_relative" : "silu_relative", std::to_string(worst_relative));
    EXPECT_LE(worst_absolute, 0x1p-22);
    EXPECT_LE(worst_relative, 1);
    EXPECT_TRUE(std::isnan(apply_all(function, {NAN})[0]));
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, MathTest, testing::ValuesIn(cpu_targets()),
                         [](const auto& param) { return param.param; });

TEST(MathTargetsTest, FusedTargetsGiveTheSameBits) {
  const std::vector<float> x = sweep(120.0f);
  for (const Function function : {kExp, kTanh, kGelu, kSilu}) {
    std::vector<float> first;
    for (const std::string& target : cpu_targets()) {
      if (target == "sse4") continue;  // rounds each product
      choose_cpu_target(target);
      const std::vector<float> y = apply_all(function, x);
      if (first.empty()) first = y;
      EXPECT_TRUE(std::equal(y.begin(), y.end(), first.begin(),
                             [](float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }))
          << target << ", function " << function;
    }
    choose_cpu_target("");
  }
}

}  // namespace
}  // namespace beryl
#endif  // HWY_ONCE
