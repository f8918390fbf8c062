// What: encoding is accurate, exact where the format is exact, and refuses what it cannot hold.
// How:  every group's squared error is at most that of the plain largest-weight encoder (written here, independently)
//       and at most the bound that follows from the step; FP4's is close to the best of all bf16 scales, found by
//       trying them all; random representable blocks come back bit for bit; NaN and infinities are named.
#include "weights/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "base/rng.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl {
namespace {

constexpr int64_t kRows = 8, kCols = 1024;

float as_f16(float x) { return f16_to_f32(f32_to_f16(x)); }

// Nearly normal weights of standard deviation 0.02 with a few outliers, as in real models. [n]
std::vector<float> make_weights(int64_t n, uint64_t seed) {
  std::vector<float> weights(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const Random4 a = philox(seed, static_cast<uint64_t>(i)), b = philox(seed, static_cast<uint64_t>(i), 1);
    float sum = 0.0f;
    for (int j = 0; j < 4; ++j) sum += to_unit_float(a.x[j]) + to_unit_float(b.x[j]) - 1.0f;
    weights[static_cast<size_t>(i)] = 0.02f * sum * (a.x[0] % 500 == 0 ? 4.0f : 1.0f);
  }
  return weights;
}

// Weights whose sizes differ by orders of magnitude within a group: quotients of normal-like numbers. [n]
std::vector<float> make_heavy_tails(int64_t n, uint64_t seed) {
  const std::vector<float> above = make_weights(n, seed), below = make_weights(n, seed + 1000);
  std::vector<float> weights(static_cast<size_t>(n));
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = std::clamp(0.02f * above[i] / (std::fabs(below[i]) + 1e-6f), -1000.0f, 1000.0f);
  return weights;
}

std::vector<float> decode_all(const HostMatrix& matrix) {
  std::vector<float> out(static_cast<size_t>(matrix.stack * matrix.rows * matrix.cols));
  for (int64_t expert = 0; expert < matrix.stack; ++expert)
    for (int64_t row = 0; row < matrix.rows; ++row)
      decode_row(matrix, expert, row, out.data() + (expert * matrix.rows + row) * matrix.cols);
  return out;
}

double squared_error(const float* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

float peak_of(const float* x, int64_t n) {
  float peak = 0.0f;
  for (int64_t i = 0; i < n; ++i)
    if (std::fabs(x[i]) > std::fabs(peak)) peak = x[i];
  return peak;
}

// The plain encoder: the largest weight sets the scale. Returns the decoded group. `bound` becomes an upper bound on
// the error of one weight that follows from the step and the rounding of the scale.
std::vector<float> encode_plainly(Format format, const float* x, int64_t n, double* bound) {
  std::vector<float> out(static_cast<size_t>(n));
  const float peak = peak_of(x, n);
  const auto symmetric = [&](float scale, float low, float high) {
    for (int64_t i = 0; i < n; ++i)
      out[static_cast<size_t>(i)] = scale * std::clamp(std::nearbyint(scale == 0 ? 0 : x[i] / scale), low, high);
  };
  const auto affine = [&](float high) {
    const float low = *std::min_element(x, x + n), top = *std::max_element(x, x + n);
    const float scale = as_f16((top - low) / high), min = as_f16(low);
    for (int64_t i = 0; i < n; ++i)
      out[static_cast<size_t>(i)] =
          scale * std::clamp(std::nearbyint(scale == 0 ? 0 : (x[i] - min) / scale), 0.0f, high) + min;
    *bound = 0.5 * (double{top} - low) / high * 1.001 + (double{top} - low + std::fabs(low)) * 0x1p-11;
  };
  const auto e2m1 = [&](float scale) {
    for (int64_t i = 0; i < n; ++i) {
      float best = 0.0f;
      for (const float value : kE2m1Values)
        if (std::fabs(scale * value - x[i]) < std::fabs(scale * best - x[i])) best = value;
      out[static_cast<size_t>(i)] = scale * best;
    }
  };
  const double top = std::fabs(peak);
  switch (format) {
    case Format::kQ4_0: symmetric(as_f16(peak / -8), -8, 7); *bound = top / 8 * 1.01; break;    // +8 is cut to 7
    case Format::kQ5_0: symmetric(as_f16(peak / -16), -16, 15); *bound = top / 16 * 1.01; break;
    case Format::kQ8_0: symmetric(as_f16(peak / 127), -127, 127); *bound = top / 127 * 0.57; break;
    case Format::kQ4_1: affine(15); break;
    case Format::kQ5_1: affine(31); break;
    case Format::kFp4G128:                            // the widest step is 2, from 4 to 6
      e2m1(bf16_to_f32(f32_to_bf16(static_cast<float>(top / 6))));
      *bound = top / 6 * 1.03;
      break;
    case Format::kMxfp4: {
      int exponent = 0;
      std::frexp(peak, &exponent);
      e2m1(std::ldexp(1.0f, exponent - 1 - 2));       // the largest lies in [4, 8) and may be cut to 6
      *bound = top / 4;
      break;
    }
    default: ADD_FAILURE() << "no plain encoder";
  }
  return out;
}

struct GroupCase {
  Format format;
  int group;
  double gain;  // the searched error must be below this share of the plain one, over all groups
};

class GroupTest : public testing::TestWithParam<GroupCase> {};

TEST_P(GroupTest, ErrsNoMoreThanTheLargestWeightEncoder) {
  const GroupCase one = GetParam();
  for (const bool heavy : {false, true}) {
    const auto weights = heavy ? make_heavy_tails(kRows * kCols, 1) : make_weights(kRows * kCols, 1);
    const auto decoded = decode_all(encode_matrix("w", one.format, weights.data(), kRows, kCols));
    double total = 0.0, total_plain = 0.0;
    for (int64_t at = 0; at < kRows * kCols; at += one.group) {
      double bound = 0.0;
      const auto plain = encode_plainly(one.format, weights.data() + at, one.group, &bound);
      const double plain_error = squared_error(plain.data(), weights.data() + at, one.group);
      const double error = squared_error(decoded.data() + at, weights.data() + at, one.group);
      ASSERT_LE(plain_error, one.group * bound * bound) << "the bound is wrong";
      ASSERT_LE(error, plain_error * (1 + 1e-5)) << "group at " << at << (heavy ? ", heavy tails" : "");
      total += error;
      total_plain += plain_error;
    }
    if (heavy) {
      EXPECT_LT(total, total_plain) << total / total_plain;
    } else {
      EXPECT_LT(total, one.gain * total_plain) << total / total_plain;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, GroupTest,
    testing::Values(GroupCase{Format::kQ4_0, 32, 0.95}, GroupCase{Format::kQ4_1, 32, 0.95},
                    GroupCase{Format::kQ5_0, 32, 0.97}, GroupCase{Format::kQ5_1, 32, 0.97},
                    GroupCase{Format::kQ8_0, 32, 1.0}, GroupCase{Format::kFp4G128, 128, 0.97},
                    GroupCase{Format::kMxfp4, 32, 0.97}),
    [](const auto& one) { return std::string(beryl::info(one.param.format).name); });

TEST(EncodeTest, Fp4ScalesAreNearlyTheBestOfAllScales) {
  constexpr int kGroups = 24;
  const auto weights = make_weights(kGroups * 128, 2);
  const auto decoded = decode_all(encode_matrix("w", Format::kFp4G128, weights.data(), 1, kGroups * 128));
  double total = 0.0, total_best = 0.0;
  for (int g = 0; g < kGroups; ++g) {
    const float* x = weights.data() + g * 128;
    const float peak = std::fabs(peak_of(x, 128));
    double best = std::numeric_limits<double>::infinity();
    for (uint32_t bits = f32_to_bf16(peak / 12); bits <= f32_to_bf16(peak / 2); ++bits) {
      const float scale = bf16_to_f32(static_cast<uint16_t>(bits));
      double error = 0.0;
      for (int i = 0; i < 128; ++i) {
        double nearest = std::numeric_limits<double>::infinity();
        for (const float value : kE2m1Values)
          nearest = std::min(nearest, std::fabs(double{scale} * value - x[i]));
        error += nearest * nearest;
      }
      best = std::min(best, error);
    }
    const double error = squared_error(decoded.data() + g * 128, x, 128);
    EXPECT_GE(error, best * (1 - 1e-6)) << "better than the best: the exhaustive search is wrong";
    EXPECT_LE(error, best * 1.05) << "group " << g;
    total += error;
    total_best += best;
  }
  EXPECT_LE(total, total_best * 1.01);
}

// Q4_K and Q5_K as the plain encoder would: range of each group over its steps, 6-bit scales and mins.
double plain_affine_super_error(const float* x, float high) {
  float scales[8], mins[8], largest_scale = 0.0f, largest_min = 0.0f;
  for (int g = 0; g < 8; ++g) {
    const float low = std::min(*std::min_element(x + 32 * g, x + 32 * g + 32), 0.0f);
    scales[g] = (*std::max_element(x + 32 * g, x + 32 * g + 32) - low) / high;
    mins[g] = -low;
    largest_scale = std::max(largest_scale, scales[g]);
    largest_min = std::max(largest_min, mins[g]);
  }
  const float d = as_f16(largest_scale / 63), d_min = as_f16(largest_min / 63);
  double error = 0.0;
  for (int i = 0; i < 256; ++i) {
    const float scale = d * std::nearbyint(scales[i / 32] / d), min = d_min * std::nearbyint(mins[i / 32] / d_min);
    const float value = scale * std::clamp(std::nearbyint((x[i] + min) / scale), 0.0f, high) - min;
    error += (double{value} - x[i]) * (double{value} - x[i]);
  }
  return error;
}

double plain_q6_k_error(const float* x) {
  float scales[16];
  for (int g = 0; g < 16; ++g) scales[g] = peak_of(x + 16 * g, 16) / -32;
  const float d = as_f16(peak_of(scales, 16) / -128);
  double error = 0.0;
  for (int i = 0; i < 256; ++i) {
    const float scale = d * std::clamp(std::nearbyint(scales[i / 16] / d), -128.0f, 127.0f);
    const float value = scale == 0 ? 0 : scale * std::clamp(std::nearbyint(x[i] / scale), -32.0f, 31.0f);
    error += (double{value} - x[i]) * (double{value} - x[i]);
  }
  return error;
}

TEST(EncodeTest, BlocksOf256ErrLessThanPlainOnes) {
  const auto weights = make_weights(kRows * kCols, 3);
  for (const Format format : {Format::kQ4_K, Format::kQ5_K, Format::kQ6_K}) {
    const auto decoded = decode_all(encode_matrix("w", format, weights.data(), kRows, kCols));
    double error = 0.0, plain = 0.0;
    for (int64_t at = 0; at < kRows * kCols; at += 256) {
      error += squared_error(decoded.data() + at, weights.data() + at, 256);
      const float* x = weights.data() + at;
      plain += format == Format::kQ6_K ? plain_q6_k_error(x)
                                       : plain_affine_super_error(x, format == Format::kQ4_K ? 15 : 31);
    }
    EXPECT_LT(error, 0.92 * plain) << info(format).name << " " << error / plain;
    double energy = 0.0;
    for (const float weight : weights) energy += double{weight} * weight;
    // Relative error of the whole: about 0.08 at 4 bits, halved with each further bit.
    const double most = format == Format::kQ4_K ? 0.085 : format == Format::kQ5_K ? 0.043 : 0.024;
    EXPECT_LT(std::sqrt(error / energy), most) << info(format).name;
  }
}

TEST(EncodeTest, Nvfp4UsesTheTensorScaleForTheRangeOfItsGroupScales) {
  const auto weights = make_weights(kRows * kCols, 4);
  const HostMatrix matrix = encode_matrix("w", Format::kNvfp4, weights.data(), kRows, kCols);
  for (int64_t i = 0; i < kRows * kCols / 64; ++i)
    for (int g = 0; g < 4; ++g) ASSERT_LT(static_cast<uint8_t>(matrix.codes[36 * i + g]), 0x7f) << "sign bit or NaN";
  EXPECT_FLOAT_EQ(matrix.tensor_scale, std::fabs(peak_of(weights.data(), kRows * kCols)) / (6 * 448));
  const auto decoded = decode_all(matrix);
  double energy = 0.0;
  for (const float weight : weights) energy += double{weight} * weight;
  EXPECT_LT(std::sqrt(squared_error(decoded.data(), weights.data(), kRows * kCols) / energy), 0.1);
  for (int64_t at = 0; at < kRows * kCols; at += 16)  // half the widest step, widened by the rounding of the scale
    for (int64_t i = at; i < at + 16; ++i)
      ASSERT_LE(std::fabs(decoded[i] - weights[i]), std::fabs(peak_of(weights.data() + at, 16)) / 3) << i;
}

TEST(EncodeTest, Nvfp4ScalesAreTheBestOfAllScales) {
  constexpr int64_t kGroups = 4 * 32;
  for (const bool heavy : {false, true}) {
    const auto weights = heavy ? make_heavy_tails(kGroups * 16, 5) : make_weights(kGroups * 16, 5);
    const HostMatrix matrix = encode_matrix("w", Format::kNvfp4, weights.data(), 1, kGroups * 16);
    const auto decoded = decode_all(matrix);
    double total = 0.0, total_plain = 0.0;
    for (int64_t g = 0; g < kGroups; ++g) {
      const float* x = weights.data() + g * 16;
      const auto error_of = [&](uint8_t code) {
        double error = 0.0;
        for (int i = 0; i < 16; ++i) {
          double nearest = std::numeric_limits<double>::infinity();
          for (const float value : kE2m1Values)
            nearest = std::min(nearest, std::fabs(double{matrix.tensor_scale} * e4m3_to_f32(code) * value - x[i]));
          error += nearest * nearest;
        }
        return error;
      };
      double best = std::numeric_limits<double>::infinity();
      for (uint8_t code = 0; code <= 0x7e; ++code) best = std::min(best, error_of(code));
      const double plain = error_of(f32_to_e4m3(std::fabs(peak_of(x, 16)) / matrix.tensor_scale / 6));
      const double error = squared_error(decoded.data() + g * 16, x, 16);
      EXPECT_GE(error, best * (1 - 1e-5)) << "better than the best: the exhaustive search is wrong";
      EXPECT_LE(error, best * (1 + 1e-4)) << "group " << g << (heavy ? ", heavy tails" : "");
      total += error;
      total_plain += plain;
    }
    EXPECT_LT(total, total_plain) << total / total_plain;
  }
}

TEST(EncodeTest, Fp8ErrsAtMostHalfAStepOfItsFloat) {
  const auto weights = make_weights(kRows * kCols, 5);
  const auto decoded = decode_all(encode_matrix("w", Format::kFp8, weights.data(), kRows, kCols));
  for (int64_t row = 0; row < kRows; ++row) {
    const double scale = std::fabs(peak_of(weights.data() + row * kCols, kCols)) / 448.0;
    for (int64_t i = row * kCols; i < (row + 1) * kCols; ++i)
      ASSERT_LE(std::fabs(double{decoded[i]} - weights[i]),
                std::max(std::fabs(double{weights[i]}) * 0x1p-4, scale * 0x1p-10) * (1 + 1e-6))
          << i;
  }
}

TEST(EncodeTest, FloatsRoundToNearest) {
  const auto weights = make_weights(512, 6);
  const auto f32 = decode_all(encode_matrix("w", Format::kF32, weights.data(), 1, 512));
  const auto f16 = decode_all(encode_matrix("w", Format::kF16, weights.data(), 1, 512));
  const auto bf16 = decode_all(encode_matrix("w", Format::kBf16, weights.data(), 1, 512));
  EXPECT_EQ(f32, weights);
  for (size_t i = 0; i < weights.size(); ++i) {
    EXPECT_EQ(f16[i], as_f16(weights[i]));
    EXPECT_LE(std::fabs(bf16[i] - weights[i]), std::fabs(weights[i]) * 0x1p-8f);
  }
}

// Random blocks that the format holds, with scales of ordinary size and, where the format needs it to be found again,
// codes and integer scales at the ends of their ranges.
std::vector<std::byte> representable_blocks(Format format, int64_t n_blocks, uint64_t seed) {
  const int64_t block_bytes = info(format).block_bytes;
  std::vector<std::byte> blocks(static_cast<size_t>(n_blocks * block_bytes));
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(philox(seed, i).x[0]);
  for (int64_t b = 0; b < n_blocks; ++b) {
    std::byte* block = blocks.data() + b * block_bytes;
    const auto draw = [&](uint32_t stream) { return philox(seed, static_cast<uint64_t>(b), 7 + stream).x[0]; };
    const auto put_half = [&](int64_t at, uint32_t stream, bool positive) {
      const float magnitude = 0.001f + 0.1f * to_unit_float(draw(stream));
      const uint16_t bits = f32_to_f16(!positive && draw(stream + 100) % 2 == 0 ? -magnitude : magnitude);
      std::memcpy(block + at, &bits, 2);
    };
    switch (format) {
      case Format::kQ4_0:
      case Format::kQ5_0: put_half(0, 0, false); break;
      case Format::kQ8_0:
        put_half(0, 0, true);
        for (int i = 2; i < 34; ++i)
          if (block[i] == std::byte{0x80}) block[i] = std::byte{0};
        block[2 + draw(1) % 32] = std::byte{127};
        break;
      case Format::kQ4_1:
      case Format::kQ5_1: {
        put_half(0, 0, true);
        put_half(2, 1, false);
        const int codes = format == Format::kQ4_1 ? 4 : 8;  // weights 0 and 16: the lowest and the highest code
        block[codes] = std::byte{0xf0};
        if (format == Format::kQ5_1) {
          block[4] &= std::byte{0xfe};
          block[6] |= std::byte{0x01};
        }
        break;
      }
      case Format::kQ4_K:
      case Format::kQ5_K: {
        put_half(0, 0, true);
        put_half(2, 1, true);
        // Group 0 has scale 63 and min 63; the others between 32 and 63, so that no scale is zero.
        for (int g = 0; g < 4; ++g) {
          block[4 + g] |= std::byte{0xa0};   // bit 5 of scales 0..3, bit 5 of scales 4..7
          block[8 + g] |= std::byte{0xa0};
        }
        block[4] |= std::byte{0x3f};
        block[8] |= std::byte{0x3f};
        const int codes = format == Format::kQ4_K ? 16 : 48;
        for (int pair = 0; pair < 4; ++pair) {  // weights 0 and 1 of every group: the lowest and the highest code
          block[codes + 32 * pair] = std::byte{0x00};
          block[codes + 32 * pair + 1] = std::byte{0xff};
        }
        if (format == Format::kQ5_K) {
          block[16] = std::byte{0x00};
          block[17] = std::byte{0xff};
        }
        break;
      }
      case Format::kQ6_K: {
        put_half(208, 0, true);
        for (int g = 0; g < 16; ++g) block[192 + g] |= std::byte{1};  // no zero scale
        block[192 + draw(1) % 16] = std::byte{0x80};                 // -128
        // Code 0, the lowest, for weight 0 of every group: low nibble and two high bits zero.
        for (int half = 0; half < 2; ++half) {
          for (int i = 0; i < 64; i += 16) block[64 * half + i] = std::byte{0};
          for (int i = 0; i < 32; i += 16) block[128 + 32 * half + i] = std::byte{0};
        }
        break;
      }
      case Format::kMxfp4: block[0] = static_cast<std::byte>(100 + draw(0) % 50); break;
      default: break;
    }
  }
  return blocks;
}

class ExactTest : public testing::TestWithParam<Format> {};

TEST_P(ExactTest, WhatTheFormatHoldsComesBackExactly) {
  const Format format = GetParam();
  constexpr int64_t kBlocks = 64;
  const int64_t cols = kBlocks * info(format).block_weights;
  const auto blocks = representable_blocks(format, kBlocks, 8);
  std::vector<float> values(static_cast<size_t>(cols));
  decode_blocks(format, blocks.data(), kBlocks, values.data());
  const auto decoded = decode_all(encode_matrix("w", format, values.data(), 1, cols));
  for (int64_t i = 0; i < cols; ++i)
    ASSERT_EQ(decoded[i], values[i]) << "block " << i / info(format).block_weights << " weight " << i;
}

INSTANTIATE_TEST_SUITE_P(Formats, ExactTest,
                         testing::Values(Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,
                                         Format::kQ4_K, Format::kQ5_K, Format::kQ6_K, Format::kMxfp4),
                         [](const auto& one) { return std::string(beryl::info(one.param).name); });

TEST(EncodeTest, WhatFp4AndFp8HoldComesBackExactly) {
  constexpr int64_t kGroups = 64;
  std::vector<std::byte> codes(64 * kGroups), scales(2 * kGroups);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::byte>(philox(9, i).x[0]);
  for (int64_t g = 0; g < kGroups; ++g) {
    // Any bf16 scale of ordinary size; in the last groups also ones whose squares leave the range of f32.
    const float size = g < 48 ? 0.02f : g < 56 ? 1e30f : 1e-30f;
    const uint16_t bits = f32_to_bf16(size * (0.5f + to_unit_float(philox(10, static_cast<uint64_t>(g)).x[0])));
    std::memcpy(scales.data() + 2 * g, &bits, 2);
    if (g % 3 == 0)  // groups without large codes: at most 1.5
      for (int i = 0; i < 64; ++i) codes[static_cast<size_t>(64 * g + i)] &= std::byte{0xbb};
  }
  std::vector<float> values(128 * kGroups);
  decode_fp4_g128(codes.data(), scales.data(), kGroups, values.data());
  EXPECT_EQ(decode_all(encode_matrix("w", Format::kFp4G128, values.data(), 1, 128 * kGroups)), values);

  std::vector<float> row(256);
  const float scale = 0x1.8p-9f;
  for (int i = 0; i < 256; ++i) row[static_cast<size_t>(i)] = scale * ((i & 0x7f) == 0x7f ? 0.0f : e4m3_to_f32(i));
  EXPECT_EQ(decode_all(encode_matrix("w", Format::kFp8, row.data(), 1, 256)), row);
}

constexpr Format kAllFormats[] = {Format::kF32,  Format::kF16,  Format::kBf16, Format::kQ4_0,    Format::kQ4_1,
                                  Format::kQ5_0, Format::kQ5_1, Format::kQ8_0, Format::kQ4_K,    Format::kQ5_K,
                                  Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8};

TEST(EncodeTest, ZerosConstantsAndTinyWeightsStayFinite) {
  for (const Format format : kAllFormats) {
    for (const float constant : {0.0f, -0.0f, 1.0f, -0.37f, 60000.0f, 1e-7f, -1e-20f, 1e-40f, 1e-45f}) {
      std::vector<float> weights(512, constant);
      const auto decoded = decode_all(encode_matrix("w", format, weights.data(), 1, 512));
      for (const float value : decoded) {
        ASSERT_TRUE(std::isfinite(value)) << info(format).name << " of " << constant;
        // One constant fills the range of every group: it is met within the scale's own precision.
        const double tolerance = std::max(std::fabs(double{constant}) * 0x1p-3, format == Format::kFp8 ? 1e-42 : 1e-4);
        ASSERT_LE(std::fabs(double{value} - constant), tolerance) << info(format).name << " of " << constant;
        if (constant == 0.0f) {
          ASSERT_EQ(value, 0.0f);
        }
      }
    }
    std::vector<float> mixed(512, 0.0f);  // one weight among zeros
    mixed[300] = -0.5f;
    const auto decoded = decode_all(encode_matrix("w", format, mixed.data(), 1, 512));
    for (int i = 0; i < 512; ++i)
      ASSERT_LE(std::fabs(decoded[static_cast<size_t>(i)] - mixed[static_cast<size_t>(i)]), i == 300 ? 0.01f : 1e-3f)
          << info(format).name << " " << i;
  }
}

TEST(EncodeTest, WeightsTheFormatCannotHoldAreNamed) {
  const auto message = [](Format format, float bad) {
    std::vector<float> weights(3 * 256, 0.5f);
    weights[256 + 17] = bad;
    try {
      encode_matrix("blk.3.ffn_up.weight", format, weights.data(), 3, 256);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kBadInput);
      return std::string(error.what());
    }
    return std::string("no error");
  };
  for (const Format format : kAllFormats) {
    const std::string name(info(format).name);
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      const std::string text = message(format, bad);
      EXPECT_NE(text.find(fmt::format("tensor 'blk.3.ffn_up.weight' has {} at row 1, column 17; {}", bad, name)),
                std::string::npos)
          << text;
    }
  }
  for (const Format format : {Format::kF16, Format::kQ4_0, Format::kQ4_K, Format::kQ6_K})
    EXPECT_NE(message(format, -65505.0f).find("has -65505 at row 1, column 17"), std::string::npos);
  EXPECT_NE(message(Format::kBf16, 3.4e38f).find("has 3.4e+38"), std::string::npos);
  EXPECT_EQ(message(Format::kQ4_0, 65504.0f), "no error");
  EXPECT_EQ(message(Format::kFp4G128, 3.3e38f), "no error");
  EXPECT_EQ(message(Format::kFp8, 3.4e38f), "no error");
}

TEST(EncodeTest, RowsAreIndependentOfEachOtherAndLieAsTheMatrixSays) {
  constexpr int64_t kStack = 2;
  const auto weights = make_weights(kStack * 3 * 256, 11);
  for (const Format format : {Format::kQ4_K, Format::kFp4G128, Format::kFp8, Format::kQ8_0}) {
    const HostMatrix matrix = encode_matrix("experts", format, weights.data(), 3, 256, kStack);
    EXPECT_EQ(matrix.bytes(), static_cast<int64_t>(matrix.storage->size()));
    for (int64_t expert = 0; expert < kStack; ++expert)
      for (int64_t row = 0; row < 3; ++row) {
        const HostMatrix alone =
            encode_matrix("row", format, weights.data() + (expert * 3 + row) * 256, 1, 256);
        std::vector<float> expected(256), out(256);
        decode_row(alone, 0, 0, expected.data());
        decode_row(matrix, expert, row, out.data());
        EXPECT_EQ(out, expected) << info(format).name;
      }
  }
}

}  // namespace
}  // namespace beryl
