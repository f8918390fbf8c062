// What: packing a matrix for the decode kernel loses nothing, and the plan of a launch covers all work once and fits.
// How:  unpack_row of the packed bytes equals decode_row of the file's blocks bit for bit, for every format, with odd
// shapes,
//       stacked and gated parts, packed whole and unit by unit; plans are checked for many shapes and devices.
#include "cuda/matvec_layout.h"

#include <cstring>
#include <set>

#include <gtest/gtest.h>

#include "base/float_formats.h"
#include "base/rng.h"

namespace beryl::cuda {
namespace {

constexpr Format kFormats[] = {Format::kFp4G128, Format::kMxfp4, Format::kNvfp4, Format::kQ4_0, Format::kQ4_1,
                               Format::kQ5_0,    Format::kQ5_1,  Format::kQ8_0,  Format::kQ4_K, Format::kQ5_K,
                               Format::kQ6_K,    Format::kFp8,   Format::kF16,   Format::kBf16};

// Random bytes are valid blocks of every format; non-finite scales and weights are likely among them.
HostMatrix random_matrix(Format format, int64_t rows, int64_t cols, uint64_t seed) {
  HostMatrix matrix;
  matrix.name = "random";
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  const int64_t code_bytes = rows * row_bytes(format, cols), scale_bytes = rows * row_scale_bytes(format, cols);
  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(code_bytes + scale_bytes));
  for (size_t i = 0; i < storage->size(); ++i) (*storage)[i] = static_cast<std::byte>(philox(seed, i).x[0]);
  matrix.codes = storage->data();
  matrix.scales = scale_bytes > 0 ? storage->data() + code_bytes : nullptr;
  matrix.storage = storage;
  return matrix;
}

// The same bits, but any NaN is as good as another.
::testing::AssertionResult same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], 4) != 0 && !(std::isnan(a[i]) && std::isnan(b[i])))
      return ::testing::AssertionFailure() << "column " << i << ": " << a[i] << " and " << b[i];
  }
  return ::testing::AssertionSuccess();
}

void expect_round_trip(const std::vector<HostMatrix>& parts, bool gated, int n_sms) {
  MatvecSource source;
  for (const HostMatrix& part : parts) source.parts.push_back(&part);
  source.gated = gated;
  const MatvecPlan plan = plan_matvec(source, n_sms);
  std::vector<std::byte> packed(static_cast<size_t>(plan.packed_bytes), std::byte{0xee});
  pack_matvec(plan, source, packed.data());
  int64_t row = 0;
  std::vector<float> unpacked(static_cast<size_t>(plan.cols)), decoded(unpacked.size());
  for (const HostMatrix& part : parts) {
    for (int64_t r = 0; r < part.rows; ++r, ++row) {
      unpack_row(plan, packed.data(), row, unpacked.data());
      decode_row(part, 0, r, decoded.data());
      ASSERT_TRUE(same_floats(unpacked, decoded)) << info(plan.format).name << " row " << row;
    }
  }
  std::vector<std::byte> unit(static_cast<size_t>(plan.unit_bytes));
  for (const int u : {0, plan.n_units / 2, plan.n_units - 1}) {
    pack_units(plan, source, u, u + 1, unit.data());
    EXPECT_EQ(std::memcmp(unit.data(), packed.data() + u * plan.unit_bytes, unit.size()), 0)
        << "unit " << u << " on its own";
  }
}

TEST(MatvecLayoutTest, UnpackingGivesTheDecodedRowsBitForBit) {
  uint64_t seed = 1;
  for (const Format format : kFormats) {
    for (const int64_t cols : {32, 64, 96, 128, 160, 256, 640, 1280, 2304, 4096}) {
      if (!fits(format, cols)) continue;
      for (const int n_sms : {2, 132}) expect_round_trip({random_matrix(format, 37, cols, ++seed)}, false, n_sms);
    }
  }
}

TEST(MatvecLayoutTest, StackedAndGatedPartsKeepTheirRows) {
  uint64_t seed = 1000;
  for (const Format format : kFormats) {
    expect_round_trip({random_matrix(format, 48, 512, ++seed), random_matrix(format, 5, 512, ++seed),
                       random_matrix(format, 11, 512, ++seed)},
                      false, 8);
    expect_round_trip({random_matrix(format, 43, 768, ++seed), random_matrix(format, 43, 768, ++seed)}, true, 8);
  }
}

TEST(MatvecLayoutTest, TensorScalesBecomeRowScales) {
  HostMatrix a = random_matrix(Format::kNvfp4, 20, 256, 5), b = random_matrix(Format::kNvfp4, 20, 256, 6);
  a.tensor_scale = 0.125f;
  b.tensor_scale = 3.0f;
  expect_round_trip({a, b}, false, 4);
  expect_round_trip({a, b}, true, 4);
}

TEST(MatvecLayoutTest, TellsWhichMatricesItTakes) {
  HostMatrix matrix = random_matrix(Format::kBf16, 4, 64, 1);
  EXPECT_TRUE(matvec_supports(matrix));
  matrix.cols = 48;
  EXPECT_FALSE(matvec_supports(matrix));
  matrix.cols = 64;
  matrix.stack = 2;
  EXPECT_FALSE(matvec_supports(matrix));
  EXPECT_FALSE(matvec_supports(random_matrix(Format::kF32, 4, 64, 1)));
}

HostMatrix shape_only(Format format, int64_t rows, int64_t cols) {
  HostMatrix matrix;
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  return matrix;
}

TEST(MatvecLayoutTest, PlansAreAlignedAndWasteLittle) {
  for (const Format format : kFormats) {
    for (const auto& [rows, cols] :
         {std::pair<int64_t, int64_t>{8192, 3840}, {3840, 4096}, {30720, 3840}, {3840, 15360}, {262144, 3840}}) {
      const HostMatrix matrix = shape_only(format, rows, cols);
      const MatvecPlan plan = plan_matvec({{&matrix}, false}, 132);
      EXPECT_LE(plan.k_warps * plan.row_warps, kMatvecWarps);
      EXPECT_EQ(plan.stage_bytes % 128, 0);
      EXPECT_EQ(plan.unit_bytes % 128, 0);
      EXPECT_GE(plan.n_units * plan.row_warps, plan.n_row_tiles);
      EXPECT_GE(plan.n_stages * plan.k_warps, plan.n_column_tiles);
      // Bytes for 6-bit scales are 5.5 % of Q4_K; 33 column tiles for 32 are 3 % of o.
      EXPECT_LE(static_cast<double>(plan.packed_bytes), 1.10 * static_cast<double>(matrix.bytes()))
          << info(format).name;
    }
  }
}

TEST(MatvecLayoutTest, BlocksShareUnitsEvenly) {
  for (const int n_units : {1, 5, 131, 132, 133, 512, 1920}) {
    for (const int n_blocks : {1, 5, 132}) {
      int next = 0;
      for (int b = 0; b < n_blocks; ++b) {
        const BlockUnits units = block_units(n_units / n_blocks, n_units % n_blocks, b);
        EXPECT_EQ(units.first, next);
        EXPECT_GE(units.count, n_units / n_blocks);
        EXPECT_LE(units.count, (n_units + n_blocks - 1) / n_blocks);
        next += units.count;
      }
      EXPECT_EQ(next, n_units);
    }
  }
}

TEST(MatvecLayoutTest, ColumnTilesOfAChunkAreNeighboursOfOneWarp) {
  for (const int k_warps : {1, 5, 15, 16}) {
    for (const int n_stages : {1, 2, 3, 4, 7, 8}) {
      std::set<int> seen;
      for (int stage = 0; stage < n_stages; ++stage) {
        for (int k = 0; k < k_warps; ++k) {
          const int tile = column_tile_of(n_stages, k_warps, stage, k);
          EXPECT_TRUE(seen.insert(tile).second);
          const StageWarp at = stage_of_column(n_stages, k_warps, tile);
          EXPECT_EQ(at.stage, stage);
          EXPECT_EQ(at.k, k);
          if (stage % 2 == 1) {
            EXPECT_EQ(tile, column_tile_of(n_stages, k_warps, stage - 1, k) + 1);
          }
        }
      }
      EXPECT_EQ(*seen.rbegin(), n_stages * k_warps - 1);
    }
  }
}

}  // namespace
}  // namespace beryl::cuda
