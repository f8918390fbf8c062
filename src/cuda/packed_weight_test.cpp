// What: single weights read from packed tiles are those that unpack_row gives, for every format, gated
//       matrices and padding included.
// How:  random blocks are packed; every weight is compared with unpack_row, bit for bit or as NaN.
#include "cuda/packed_weight.h"

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace beryl::cuda {
namespace {

class PackedWeightTest : public testing::TestWithParam<Format> {};

TEST_P(PackedWeightTest, EqualsTheUnpackedRow) {
  const Format format = GetParam();
  std::mt19937 random(static_cast<unsigned>(format) * 7 + 1);
  const int64_t cols = info(format).block_weights == 256 ? 768 : info(format).block_weights == 128 ? 640 : 576;
  for (const bool gated : {false, true}) {
    const int64_t rows = gated ? 27 : 37;
    std::vector<std::vector<std::byte>> bytes;
    std::vector<HostMatrix> parts;
    for (int part = 0; part < (gated ? 2 : 1); ++part) {
      for (const int64_t row_size : {row_bytes(format, cols), row_scale_bytes(format, cols)}) {
        bytes.emplace_back(static_cast<size_t>(rows * row_size));
        for (std::byte& byte : bytes.back()) byte = static_cast<std::byte>(random() & 0x3f);   // keeps floats finite
      }
      parts.push_back({.name = "w", .format = format, .rows = rows, .cols = cols, .stack = 1,
                       .codes = bytes[bytes.size() - 2].data(), .scales = bytes.back().data(),
                       .stack_stride_bytes = 0, .stack_scale_stride_bytes = 0,
                       .tensor_scale = part == 0 ? 0.75f : 1.0f, .storage = nullptr});
    }
    MatvecSource source;
    source.gated = gated;
    for (const HostMatrix& part : parts) source.parts.push_back(&part);
    const MatvecPlan plan = plan_matvec(source, 5);
    std::vector<std::byte> packed(static_cast<size_t>(plan.packed_bytes));
    pack_matvec(plan, source, packed.data());
    const PackedMatrix matrix = packed_matrix(plan, reinterpret_cast<const uint8_t*>(packed.data()));
    std::vector<float> expected(static_cast<size_t>(cols));
    for (int64_t row = 0; row < plan.rows; ++row) {
      unpack_row(plan, packed.data(), row, expected.data());
      for (int64_t col = 0; col < cols; ++col) {
        const PackedTileRow at = packed_tile_row(matrix, row, static_cast<int>(col / matrix.tile_columns));
        const float got = packed_weight(format, at, static_cast<int>(col % matrix.tile_columns));
        ASSERT_EQ(got, expected[static_cast<size_t>(col)]) << "gated " << gated << " row " << row << " col " << col;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PackedWeightTest,
                         testing::Values(Format::kF16, Format::kBf16, Format::kQ4_0, Format::kQ4_1, Format::kQ5_0,
                                         Format::kQ5_1, Format::kQ8_0, Format::kQ4_K, Format::kQ5_K, Format::kQ6_K,
                                         Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8),
                         [](const auto& info_of) { return std::string(beryl::info(info_of.param).name); });

}  // namespace
}  // namespace beryl::cuda
