// What: every format decodes bit for bit as defined.
// How:  against the public Python package `gguf` on random blocks and blocks of real models (written beforehand by
//       tests/oracle/make_decode_cases.py); and, without any file, against each format's formula worked out here in
//       another way: bit by bit from the layout, in double, rounded as decode.h states.
#include "weights/decode.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_formats.h"
#include "base/rng.h"
#include "weights/host_matrix.h"
#include "weights/safetensors.h"

namespace beryl {
namespace {

std::vector<std::byte> random_bytes(size_t n, uint64_t seed) {
  std::vector<std::byte> bytes(n);
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::byte>(philox(seed, i).x[0]);
  return bytes;
}

void set_u16(std::byte* at, uint16_t value) { std::memcpy(at, &value, 2); }

// How many of the two differ in any bit.
int64_t count_differing(const float* a, const float* b, int64_t n) {
  int64_t differing = 0;
  for (int64_t i = 0; i < n; ++i) differing += std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i]);
  return differing;
}

TEST(DecodeTest, EqualsThePythonPackageBitForBit) {
  const char* given = std::getenv("BERYL_DECODE_CASES");
  const std::string path = given != nullptr ? given : BERYL_BINARY_DIR "/test-data/decode_cases.safetensors";
  if (!std::filesystem::exists(path))
    GTEST_SKIP() << path << " is absent; write it with tests/oracle/make_decode_cases.py " << path
                 << " [MODEL.gguf ...]";
  const SafetensorsFile file(path);
  constexpr std::string_view kBlocks = ".blocks";
  std::map<Format, int64_t> n_weights;
  for (const TensorInfo& blocks : file.tensors()) {
    if (!blocks.name.ends_with(kBlocks)) continue;
    const std::string stem = blocks.name.substr(0, blocks.name.size() - kBlocks.size());
    const TensorInfo* values = file.find(stem + ".values");
    const auto format = format_by_name(stem.substr(0, stem.find('.')));
    ASSERT_TRUE(values != nullptr && format) << stem;
    const int64_t n_blocks = blocks.shape.at(0);
    ASSERT_EQ(static_cast<int64_t>(blocks.data.size()), n_blocks * info(*format).block_bytes) << stem;
    const int64_t n = n_blocks * info(*format).block_weights;
    ASSERT_EQ(static_cast<int64_t>(values->data.size()), n * 4) << stem;
    std::vector<float> expected(n), decoded(n, NAN);
    std::memcpy(expected.data(), values->data.data(), values->data.size());
    decode_blocks(*format, blocks.data.data(), n_blocks, decoded.data());
    EXPECT_EQ(count_differing(expected.data(), decoded.data(), n), 0) << stem << ": of " << n << " weights";
    n_weights[*format] += n;
  }
  for (const Format format : {Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kQ8_0, Format::kQ4_K,
                              Format::kQ5_K, Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kBf16,
                              Format::kF16})
    EXPECT_GE(n_weights[format], 30000) << info(format).name << " is hardly tested";
}

// Bits [at, at + n) of a little-endian byte stream.
uint32_t bits_of(const std::byte* bytes, int at, int n) {
  uint32_t value = 0;
  for (int i = 0; i < n; ++i)
    value |= (static_cast<uint32_t>(bytes[(at + i) / 8]) >> ((at + i) % 8) & 1u) << i;
  return value;
}

float half_at(const std::byte* bytes, int at) { return f16_to_f32(static_cast<uint16_t>(bits_of(bytes, 8 * at, 16))); }

// Weight i of a block, from the drawing in docs/formats.md: exact in double, rounded where the definition rounds.
float weight_by_layout(Format format, const std::byte* block, int i) {
  const auto nibble_of_halves = [&](int at, int index) {  // 16 bytes from `at`, low nibbles first
    return bits_of(block, 8 * (at + index % 16) + 4 * (index / 16), 4);
  };
  switch (format) {
    case Format::kQ4_0: return half_at(block, 0) * (static_cast<float>(nibble_of_halves(2, i)) - 8.0f);
    case Format::kQ4_1:
      return static_cast<float>(double{half_at(block, 0)} * nibble_of_halves(4, i) + double{half_at(block, 2)});
    case Format::kQ5_0:
      return half_at(block, 0) *
             (static_cast<float>(nibble_of_halves(6, i) + 16 * bits_of(block, 16 + i, 1)) - 16.0f);
    case Format::kQ5_1:
      return static_cast<float>(double{half_at(block, 0)} * (nibble_of_halves(8, i) + 16 * bits_of(block, 32 + i, 1)) +
                                double{half_at(block, 2)});
    case Format::kQ8_0: return half_at(block, 0) * static_cast<float>(static_cast<int8_t>(block[2 + i]));
    case Format::kQ4_K:
    case Format::kQ5_K: {
      const int g = i / 32;
      const std::byte* packed = block + 4;
      const uint32_t scale = g < 4 ? bits_of(packed, 8 * g, 6)
                                   : bits_of(packed, 8 * (g + 4), 4) | bits_of(packed, 8 * (g - 4) + 6, 2) << 4;
      const uint32_t min = g < 4 ? bits_of(packed, 8 * (g + 4), 6)
                                 : bits_of(packed, 8 * (g + 4) + 4, 4) | bits_of(packed, 8 * g + 6, 2) << 4;
      const int codes = format == Format::kQ4_K ? 16 : 48;
      uint32_t code = bits_of(block, 8 * (codes + 32 * (g / 2) + i % 32) + 4 * (g % 2), 4);
      if (format == Format::kQ5_K) code |= bits_of(block, 8 * (16 + i % 32) + g, 1) << 4;
      return static_cast<float>(double{half_at(block, 0)} * scale * code - double{half_at(block, 2)} * min);
    }
    case Format::kQ6_K: {
      const int half = i / 128, within = i % 128;
      const uint32_t low = bits_of(block, 8 * (64 * half + within % 64) + 4 * (within / 64), 4);
      const uint32_t high = bits_of(block, 8 * (128 + 32 * half + within % 32) + 2 * (within / 32), 2);
      const auto scale = static_cast<int8_t>(block[192 + i / 16]);
      return static_cast<float>(double{half_at(block, 208)} * scale * (static_cast<int>(low | high << 4) - 32));
    }
    case Format::kMxfp4: {
      const double value = double{kE2m1Values[nibble_of_halves(1, i)]} + 0.0;  // -0 becomes +0
      return static_cast<float>(std::ldexp(value, static_cast<int>(block[0]) - 127));
    }
    case Format::kNvfp4: {
      const int g = i / 16;
      const auto scale = static_cast<uint8_t>(block[g]);
      const double scale_value = scale == 0x7f                 ? 0.0
                                 : (scale & 0x7f) == 0x7f ? 480.0  // 0xff: the sign is ignored, NaN is 0x7f alone
                                                          : std::fabs(double{e4m3_to_f32(scale)});
      const uint32_t code = bits_of(block, 8 * (4 + 8 * g + i % 8) + 4 * (i % 16 / 8), 4);
      return static_cast<float>(scale_value * (double{kE2m1Values[code]} + 0.0));
    }
    default: ADD_FAILURE() << "no layout"; return 0.0f;
  }
}

class LayoutTest : public testing::TestWithParam<Format> {};

TEST_P(LayoutTest, DecodesAsDrawn) {
  const Format format = GetParam();
  const FormatInfo& entry = info(format);
  constexpr int kBlocks = 300;
  // Unaligned on purpose: a file promises no alignment.
  auto bytes = random_bytes(static_cast<size_t>(kBlocks * entry.block_bytes + 1), 11);
  std::byte* blocks = bytes.data() + 1;
  for (int b = 0; b < kBlocks; ++b) {  // scales of moderate size
    std::byte* block = blocks + b * entry.block_bytes;
    const auto half = [&](uint64_t draw) {
      return f32_to_f16(to_unit_float(philox(12, draw).x[0]) - 0.5f);
    };
    if (format == Format::kQ6_K) {
      set_u16(block + 208, half(static_cast<uint64_t>(b)));
    } else if (format == Format::kMxfp4) {
      block[0] = static_cast<std::byte>(b % 253);
    } else if (format == Format::kNvfp4) {
      block[0] = static_cast<std::byte>(b);
    } else {
      set_u16(block, half(static_cast<uint64_t>(2 * b)));
      if (format != Format::kQ4_0 && format != Format::kQ5_0 && format != Format::kQ8_0)
        set_u16(block + 2, half(static_cast<uint64_t>(2 * b + 1)));
    }
  }
  std::vector<float> out(static_cast<size_t>(kBlocks * entry.block_weights));
  decode_blocks(format, blocks, kBlocks, out.data());
  for (int b = 0; b < kBlocks; ++b)
    for (int i = 0; i < entry.block_weights; ++i) {
      const float expected = weight_by_layout(format, blocks + b * entry.block_bytes, i);
      ASSERT_EQ(out[static_cast<size_t>(b * entry.block_weights + i)], expected) << "block " << b << " weight " << i;
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, LayoutTest,
                         testing::Values(Format::kQ4_0, Format::kQ4_1, Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,
                                         Format::kQ4_K, Format::kQ5_K, Format::kQ6_K, Format::kMxfp4, Format::kNvfp4),
                         [](const auto& one) { return std::string(beryl::info(one.param).name); });

TEST(DecodeTest, Mxfp4ScalesCoverAllExponentsTheLargestToo) {
  for (int exponent = 0; exponent < 256; ++exponent) {
    std::byte block[17] = {};
    block[0] = static_cast<std::byte>(exponent);
    block[1] = std::byte{0x82};  // weight 0: code 2 (1.0); weight 16: code 8 (zero)
    float out[32];
    decode_mxfp4(block, 1, out);
    // 1.0 at exponent 255 would be 2^128: infinite in f32.
    EXPECT_EQ(out[0], exponent == 255 ? INFINITY : std::ldexp(1.0f, exponent - 127)) << exponent;
    EXPECT_EQ(std::bit_cast<uint32_t>(out[16]), 0u) << exponent;
  }
}

TEST(DecodeTest, Fp4G128PairsNeighbouringColumnsAndScalesByGroup) {
  constexpr int kGroups = 3;
  auto codes = random_bytes(64 * kGroups + 1, 21);
  std::byte scales[2 * kGroups];
  const float scale_values[kGroups] = {0.375f, -3.0f, 0x1p-100f};
  for (int g = 0; g < kGroups; ++g) set_u16(scales + 2 * g, f32_to_bf16(scale_values[g]));
  float out[128 * kGroups];
  decode_fp4_g128(codes.data() + 1, scales, kGroups, out);
  for (int i = 0; i < 128 * kGroups; ++i) {
    const uint32_t code = bits_of(codes.data() + 1, 4 * i, 4);
    const float expected = kE2m1Values[code] * scale_values[i / 128];
    ASSERT_EQ(std::bit_cast<uint32_t>(out[i]), std::bit_cast<uint32_t>(expected)) << i;
  }
}

TEST(DecodeTest, Fp8MultipliesByTheRowsScale) {
  std::vector<std::byte> codes;
  for (int i = 0; i < 256; ++i) codes.push_back(static_cast<std::byte>(i));
  const float scale = 0.1f;  // not exact: the product rounds once
  float out[256];
  decode_fp8(codes.data(), reinterpret_cast<const std::byte*>(&scale), 256, out);
  for (int i = 0; i < 256; ++i) {
    if ((i & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(out[i]));
      continue;
    }
    const int exponent = i >> 3 & 15, mantissa = i & 7;
    const double magnitude = exponent == 0 ? mantissa * 0x1p-9 : std::ldexp(8.0 + mantissa, exponent - 10);
    EXPECT_EQ(out[i], static_cast<float>((i < 128 ? magnitude : -magnitude) * double{scale})) << i;
  }
}

// Equal, or NaN in both (random bytes make NaN scales).
void expect_same(const std::vector<float>& expected, const std::vector<float>& out, Format format) {
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(std::isnan(out[i]), std::isnan(expected[i])) << info(format).name << " column " << i;
    if (!std::isnan(expected[i])) {
      ASSERT_EQ(out[i], expected[i]) << info(format).name << " column " << i;
    }
  }
}

TEST(DecodeRowTest, FindsTheRowOfTheExpertAndAppliesTheTensorScaleLast) {
  constexpr int64_t kRows = 3, kCols = 256, kStack = 2;
  for (const Format format :
       {Format::kF32, Format::kBf16, Format::kQ4_0, Format::kQ6_K, Format::kFp4G128, Format::kFp8}) {
    const int64_t codes_stride = kRows * row_bytes(format, kCols) + 48;  // experts with something between them
    const int64_t scales_stride = kRows * row_scale_bytes(format, kCols) + 16;
    auto codes = random_bytes(static_cast<size_t>(kStack * codes_stride), 31);
    auto scales = random_bytes(static_cast<size_t>(kStack * scales_stride), 32);
    HostMatrix matrix;
    matrix.format = format;
    matrix.rows = kRows;
    matrix.cols = kCols;
    matrix.stack = kStack;
    matrix.codes = codes.data();
    matrix.scales = scales.data();
    matrix.stack_stride_bytes = codes_stride;
    matrix.stack_scale_stride_bytes = scales_stride;
    for (int64_t expert = 0; expert < kStack; ++expert)
      for (int64_t row = 0; row < kRows; ++row) {
        const std::byte* row_codes = codes.data() + expert * codes_stride + row * row_bytes(format, kCols);
        const std::byte* row_scales = scales.data() + expert * scales_stride + row * row_scale_bytes(format, kCols);
        std::vector<float> expected(kCols), out(kCols);
        if (format == Format::kFp4G128) {
          decode_fp4_g128(row_codes, row_scales, kCols / 128, expected.data());
        } else if (format == Format::kFp8) {
          decode_fp8(row_codes, row_scales, kCols, expected.data());
        } else {
          decode_blocks(format, row_codes, kCols / info(format).block_weights, expected.data());
        }
        matrix.tensor_scale = 1.0f;
        decode_row(matrix, expert, row, out.data());
        expect_same(expected, out, format);
        matrix.tensor_scale = 0.3f;
        decode_row(matrix, expert, row, out.data());
        for (float& value : expected) value *= 0.3f;
        expect_same(expected, out, format);
      }
  }
}

}  // namespace
}  // namespace beryl
