// What: the plain layout means what weights/decode.h says, for every format, weight by weight.
// How:  random blocks (finite scales) are imported and the planes read back by the layout's formula in double; the
//       difference from decode_row must be within the one or two roundings that decode_row itself makes.
#include "cuda/plain_matrix.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/float_formats.h"
#include "weights/decode.h"

namespace beryl::cuda {
namespace {

double plain_weight(const PlainShape& shape, const std::byte* codes, const float* scales, const float* mins, int64_t col) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
  double code = 0;
  switch (shape.codes) {
    case PlainCodes::kF32: {
      float value;
      std::memcpy(&value, bytes + 4 * col, 4);
      code = value;
      break;
    }
    case PlainCodes::kF16:
    case PlainCodes::kBf16: {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * col, 2);
      code = shape.codes == PlainCodes::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
      break;
    }
    case PlainCodes::kInt8: code = static_cast<int8_t>(bytes[col]); break;
    case PlainCodes::kNibble: code = bytes[col / 2] >> (col % 2 * 4) & 0xf; break;
    case PlainCodes::kE2m1: code = kE2m1Doubled[bytes[col / 2] >> (col % 2 * 4) & 0xf]; break;
    case PlainCodes::kE4m3: code = e4m3_to_f32(bytes[col]); break;
  }
  const int64_t group = col >> shape.group_shift;
  const double scale = shape.has_scales ? static_cast<double>(scales[group]) : 1.0;
  return scale * code - (shape.has_mins ? static_cast<double>(mins[group]) : 0.0);
}

class PlainMatrixTest : public testing::TestWithParam<Format> {};

TEST_P(PlainMatrixTest, EveryWeightMeansWhatDecodeRowSays) {
  const Format format = GetParam();
  const int64_t rows = 3, cols = info(format).block_weights == 1 ? 40 : 512, stack = 2;
  std::mt19937 random(static_cast<unsigned>(format) + 1);
  const int64_t code_bytes = row_bytes(format, cols), scale_bytes = row_scale_bytes(format, cols);
  std::vector<std::byte> codes(static_cast<size_t>(stack * rows * code_bytes));
  std::vector<std::byte> scales(static_cast<size_t>(stack * rows * scale_bytes));
  for (std::byte& byte : codes) byte = static_cast<std::byte>(random() & 0xff);
  // Floats of blocks and planes must be finite: clear the top exponent bits that could make them infinite.
  if (format == Format::kF32)
    for (size_t i = 3; i < codes.size(); i += 4) codes[i] &= std::byte{0xbf};
  if (format == Format::kF16 || format == Format::kBf16)
    for (size_t i = 1; i < codes.size(); i += 2) codes[i] &= std::byte{0xbf};
  if (format == Format::kFp8)
    for (std::byte& byte : codes) byte &= std::byte{0xbf};
  for (size_t i = 0; i < scales.size(); i += static_cast<size_t>(info(format).scale_bytes)) {
    const float value = 0.001f * static_cast<float>(1 + random() % 1000);
    if (format == Format::kFp8) {
      std::memcpy(scales.data() + i, &value, 4);
    } else {
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(scales.data() + i, &bits, 2);
    }
  }
  HostMatrix matrix{.name = "w", .format = format, .rows = rows, .cols = cols, .stack = stack, .codes = codes.data(),
                    .scales = scales.data(), .stack_stride_bytes = rows * code_bytes,
                    .stack_scale_stride_bytes = rows * scale_bytes, .tensor_scale = 1.0f, .storage = nullptr};
  const PlainShape shape = plain_shape(matrix);
  EXPECT_EQ(shape.padded_cols % kPlainColumns, 0);
  std::vector<std::byte> plain(static_cast<size_t>(shape.row_code_bytes), std::byte{0x5a});
  std::vector<float> plain_scales(static_cast<size_t>(shape.row_groups) + 1, -1.0f), plain_mins = plain_scales;
  std::vector<float> expected(static_cast<size_t>(cols));
  int compared = 0;
  for (int64_t expert = 0; expert < stack; ++expert)
    for (int64_t row = 0; row < rows; ++row) {
      decode_row(matrix, expert, row, expected.data());
      import_plain_row(matrix, shape, expert, row, plain.data(), plain_scales.data(), plain_mins.data());
      for (int64_t col = 0; col < cols; ++col) {
        const double got = plain_weight(shape, plain.data(), plain_scales.data(), plain_mins.data(), col);
        const double want = expected[static_cast<size_t>(col)];
        if (!std::isfinite(want)) continue;   // a random f16 scale that is not finite
        ++compared;
        ASSERT_NEAR(got, want, 1.2e-7 * (std::abs(want) + (shape.has_mins ? std::abs(plain_mins[static_cast<size_t>(
                                                                                 col >> shape.group_shift)])
                                                                          : 0)))
            << info(format).name << " expert " << expert << " row " << row << " col " << col;
      }
      for (int64_t col = cols; col < shape.padded_cols; ++col)
        ASSERT_EQ(plain_weight(shape, plain.data(), plain_scales.data(), plain_mins.data(), col), 0.0);
    }
  EXPECT_GT(compared, stack * rows * cols / 2);
}

INSTANTIATE_TEST_SUITE_P(Formats, PlainMatrixTest,
                         testing::Values(Format::kF32, Format::kF16, Format::kBf16, Format::kQ4_0, Format::kQ4_1,
                                         Format::kQ5_0, Format::kQ5_1, Format::kQ8_0, Format::kQ4_K, Format::kQ5_K,
                                         Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8),
                         [](const auto& info_of) { return std::string(beryl::info(info_of.param).name); });

}  // namespace
}  // namespace beryl::cuda
