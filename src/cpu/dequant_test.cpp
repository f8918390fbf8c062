// What: the vectorised decoders give the same bits as the scalar definition (weights/decode.h), for every format, every
//       value of a scale, odd numbers of columns where the format allows them, on every instruction set of the machine.
// How:  rows of random bytes, so all codes occur, and scales are of any kind: subnormal, infinite, NaN. Any NaN equals
//       any other (the payload of a NaN is not defined). Guard values behind each row.
#include "cpu/dequant.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "cpu/simd.h"
#include "weights/format.h"

namespace beryl {
namespace {

constexpr Format kWeightFormats[] = {Format::kF32,  Format::kF16,  Format::kBf16,  Format::kQ4_0,    Format::kQ4_1,
                                     Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,  Format::kQ4_K,    Format::kQ5_K,
                                     Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8};

std::vector<std::byte> random_bytes(uint64_t seed, int64_t n_bytes) {
  std::vector<std::byte> bytes(static_cast<size_t>(n_bytes));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(philox(seed, i).x[0] >> 24);
  return bytes;
}

struct OwnedMatrix {
  HostMatrix matrix;
  std::vector<std::byte> codes, scales;
};

// misalignment: codes and scales start at an odd address, as they may in a file.
OwnedMatrix random_matrix(Format format, int64_t stack, int64_t rows, int64_t cols, uint64_t seed) {
  constexpr size_t kMisalignment = 1;
  OwnedMatrix owned;
  const int64_t code_bytes = rows * row_bytes(format, cols), scale_bytes = rows * row_scale_bytes(format, cols);
  owned.codes = random_bytes(seed, stack * code_bytes + static_cast<int64_t>(kMisalignment));
  owned.scales = random_bytes(seed + 1, stack * scale_bytes + static_cast<int64_t>(kMisalignment));
  owned.matrix.format = format;
  owned.matrix.rows = rows;
  owned.matrix.cols = cols;
  owned.matrix.stack = stack;
  owned.matrix.codes = owned.codes.data() + kMisalignment;
  owned.matrix.scales = info(format).scale_group >= 0 ? owned.scales.data() + kMisalignment : nullptr;
  owned.matrix.stack_stride_bytes = code_bytes;
  owned.matrix.stack_scale_stride_bytes = scale_bytes;
  return owned;
}

void expect_same_bits(const std::vector<float>& got, const std::vector<float>& expected, int64_t cols) {
  for (int64_t c = 0; c < cols; ++c) {
    const float a = got[static_cast<size_t>(c)], b = expected[static_cast<size_t>(c)];
    if (std::isnan(a) && std::isnan(b)) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(a), std::bit_cast<uint32_t>(b)) << "column " << c << ": " << a << ", not " << b;
  }
}

class DequantTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(DequantTest, EqualsTheScalarDefinition) {
  constexpr float kGuard = 12345.5f;
  for (const Format format : kWeightFormats) {
    for (const int64_t cols : {1, 7, 15, 16, 17, 31, 32, 33, 64, 95, 96, 128, 160, 256, 384, 512, 1024}) {
      if (!fits(format, cols)) continue;
      for (const float tensor_scale : {1.0f, 0.3f}) {
        OwnedMatrix owned = random_matrix(format, 2, 40, cols, 17 * static_cast<uint64_t>(cols));
        owned.matrix.tensor_scale = tensor_scale;
        SCOPED_TRACE(testing::Message() << info(format).name << ", " << cols << " columns, x " << tensor_scale);
        for (int64_t expert = 0; expert < 2; ++expert)
          for (int64_t row = 0; row < owned.matrix.rows; ++row) {
            std::vector<float> expected(static_cast<size_t>(cols)), got(static_cast<size_t>(cols) + 16, kGuard);
            decode_row(owned.matrix, expert, row, expected.data());
            dequantize_row(owned.matrix, expert, row, got.data());
            expect_same_bits(got, expected, cols);
            for (size_t c = static_cast<size_t>(cols); c < got.size(); ++c) ASSERT_EQ(got[c], kGuard);
            for (float& value : expected) value *= 25.3f;
            dequantize_row_scaled(owned.matrix, expert, row, 25.3f, got.data());
            expect_same_bits(got, expected, cols);
          }
      }
    }
  }
}

TEST_P(DequantTest, CoversEveryCodeOfTheByteAndHalfFormats) {
  // All 65,536 halves and all 256 FP8 codes, in order.
  std::vector<uint16_t> halves(65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  for (const Format format : {Format::kF16, Format::kBf16}) {
    HostMatrix matrix;
    matrix.format = format;
    matrix.rows = 1;
    matrix.cols = 65536;
    matrix.codes = reinterpret_cast<const std::byte*>(halves.data());
    std::vector<float> expected(65536), got(65536);
    decode_row(matrix, 0, 0, expected.data());
    dequantize_row(matrix, 0, 0, got.data());
    SCOPED_TRACE(info(format).name);
    expect_same_bits(got, expected, matrix.cols);
  }
  std::vector<uint8_t> bytes(256);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i);
  for (const float scale : {1.0f, 0.0123f, 0x1p-120f}) {
    HostMatrix matrix;
    matrix.format = Format::kFp8;
    matrix.rows = 1;
    matrix.cols = 256;
    matrix.codes = reinterpret_cast<const std::byte*>(bytes.data());
    matrix.scales = reinterpret_cast<const std::byte*>(&scale);
    std::vector<float> expected(256), got(256);
    decode_row(matrix, 0, 0, expected.data());
    dequantize_row(matrix, 0, 0, got.data());
    SCOPED_TRACE(scale);
    expect_same_bits(got, expected, matrix.cols);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, DequantTest, testing::ValuesIn(cpu_targets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace beryl
