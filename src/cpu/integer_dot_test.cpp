// What: activations are quantised as integer_dot.h says; packed products of every format are the double product of the
//       file's weights with these activations within the roundings of the stated chain; all instruction sets give the
//       same bits, and so do any number of tokens, any blocks of rows, and any place among other tokens.
// How:  random blocks (codes at odd addresses, zero, negative and subnormal scales) and shapes around the tile's edges. A
//       group adds at most four roundings of values no larger than its terms in absolute value.
#include "cpu/integer_dot.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/linear.h"
#include "cpu/simd.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr Format kIntegerFormats[] = {Format::kQ4_0, Format::kQ4_1, Format::kQ5_0,  Format::kQ5_1,  Format::kQ8_0,   Format::kQ4_K,
                                      Format::kQ5_K, Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128};

template <class T>
class Aligned {
 public:
  explicit Aligned(int64_t n) : storage_(static_cast<size_t>(n) * sizeof(T) + 64) {}
  T* data() {
    const size_t misaligned = reinterpret_cast<size_t>(storage_.data()) % 64;
    return reinterpret_cast<T*>(storage_.data() + (misaligned == 0 ? 0 : 64 - misaligned));
  }

 private:
  std::vector<unsigned char> storage_;
};

struct PackedOwner {
  explicit PackedOwner(const HostMatrix& matrix) : storage(packed_bytes(PackedForm::kCodes, matrix)) {
    packed = {storage.data(), packed_tile_bytes(PackedForm::kCodes, matrix.format, matrix.cols), (matrix.rows + kTileRows - 1) / kTileRows,
              PackedForm::kCodes, false};
    for (int64_t expert = 0; expert < matrix.stack; ++expert)
      for (int64_t tile = 0; tile < packed.n_tiles; ++tile)
        pack_tile(PackedForm::kCodes, matrix, expert, tile, storage.data() + (expert * packed.n_tiles + tile) * packed.tile_stride);
  }
  Aligned<uint8_t> storage;
  PackedMatrix packed;
};

// Activations with outliers and a group of zeros.
std::vector<float> random_tokens(uint64_t seed, int64_t n_tokens, int64_t cols) {
  RandomStream random(seed);
  std::vector<float> x(static_cast<size_t>(n_tokens * cols));
  for (float& value : x) value = random.between(-1, 1) * (random.below(50) == 0 ? 40.0f : 1.0f);
  for (int64_t c = 0; c < std::min<int64_t>(kGroupCols, cols); ++c) x[static_cast<size_t>((n_tokens - 1) * cols + c)] = 0;
  return x;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

// y of tokens [first, first + n_tokens), [n_tokens][rows], block_rows rows and block_tiles token tiles at a time.
std::vector<float> multiply(const HostMatrix& weight, const PackedMatrix& packed, int64_t expert, const std::vector<float>& x,
                            int64_t first, int64_t n_tokens, int64_t block_rows = kTileRows, int64_t block_tiles = 1000) {
  const int64_t cols = weight.cols, rows = weight.rows;
  Aligned<float> tokens(QuantizedTokens::floats(n_tokens, cols)), panel(expanded_floats(cols, false));
  Product product;
  product.weight = &weight;
  product.packed = &packed;
  product.expert = expert;
  product.quantized = QuantizedTokens::at(tokens.data(), n_tokens, cols);
  quantize_tokens(x.data() + first * cols, cols, nullptr, {}, product.quantized, 0, n_tokens);
  std::vector<float> y(static_cast<size_t>(n_tokens * rows), -77.5f);
  product.y = y.data();
  product.y_stride = rows;
  block_rows = product.has_few_tokens() ? (block_rows + kTileRows - 1) / kTileRows * kTileRows
                                        : std::min(block_rows, max_expanded_rows(cols, false));
  for (int64_t row = 0; row < rows; row += block_rows)
    for (int64_t tile = 0; tile < product.n_token_tiles(); tile += block_tiles)
      run_product(product, row, std::min(row + block_rows, rows), tile, std::min(tile + block_tiles, product.n_token_tiles()),
                  panel.data());
  return y;
}

// Codes and scales of a token, as few tokens have them (signed).
struct Quantized {
  explicit Quantized(const std::vector<float>& x, const RowNorm& norm = {})
      : tokens(QuantizedTokens::floats(1, static_cast<int64_t>(x.size()))),
        view(QuantizedTokens::at(tokens.data(), 1, static_cast<int64_t>(x.size()))) {
    quantize_tokens(x.data(), view.cols, nullptr, norm, view, 0, 1);
  }
  Aligned<float> tokens;
  QuantizedTokens view;
};

class IntegerDotTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(IntegerDotTest, ActivationsAreTheNearestOf255Steps) {
  std::vector<float> x = random_tokens(1, 1, 320);
  for (int c = 0; c < 32; ++c) {
    x[static_cast<size_t>(c)] = 0;                                                // zeros
    x[static_cast<size_t>(32 + c)] = 0x1p-101f;                                   // too small to count
    x[static_cast<size_t>(64 + c)] = static_cast<float>(c - 16) * 0x1p-99f;       // small
    x[static_cast<size_t>(96 + c)] = static_cast<float>(c - 16) * 2.1e37f;        // large
    x[static_cast<size_t>(128 + c)] = c == 0 ? 127 : static_cast<float>(c) + 0.5f;  // ties
  }
  const Quantized quantized(x);
  for (int64_t g = 0; g < 10; ++g) {
    const float* from = x.data() + 32 * g;
    float largest = 0;
    for (int c = 0; c < 32; ++c) largest = std::max(largest, std::abs(from[c]));
    const ActivationGroup& group = quantized.view.groups[g];
    const int8_t* q = quantized.view.values + 32 * g;
    if (g < 2) {
      EXPECT_EQ(group.scale, 0) << g;
      EXPECT_EQ(group.sum + group.low_sum + q[0], 0) << g;
      continue;
    }
    EXPECT_EQ(group.scale, largest / 127.0f);
    int sums[2] = {0, 0};
    for (int c = 0; c < 32; ++c) {
      EXPECT_LE(std::abs(q[c] - double{from[c]} / group.scale), 0.5 + 1e-4) << "group " << g << ", column " << c;
      sums[c / 16] += q[c];
    }
    EXPECT_EQ(group.low_sum, sums[0]);
    EXPECT_EQ(group.sum, sums[0] + sums[1]);
    EXPECT_EQ(group.scaled_sum, group.scale * static_cast<float>(sums[0] + sums[1]));
  }
  for (int c = 1; c < 32; ++c) EXPECT_EQ(quantized.view.values[128 + c], c % 2 == 0 ? c : c + 1) << "ties go to even numbers";
}

TEST_P(IntegerDotTest, WhatIsNotFiniteSpoilsItsTokenOnly) {
  const RandomMatrix weight = random_matrix(Format::kQ4_1, 20, 96, 1, 1.0f, 3);
  const PackedOwner packed(weight.matrix);
  for (const int64_t n_tokens : {3, 9})
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> x = random_tokens(2, n_tokens, 96);
      const std::vector<float> good = multiply(weight.matrix, packed.packed, 0, x, 0, n_tokens);
      x[96 + 40] = bad;
      const std::vector<float> y = multiply(weight.matrix, packed.packed, 0, x, 0, n_tokens);
      for (int64_t t = 0; t < n_tokens; ++t)
        for (int64_t r = 0; r < 20; ++r) {
          const auto i = static_cast<size_t>(t * 20 + r);
          if (t == 1) {
            EXPECT_TRUE(std::isnan(y[i]));
          } else {
            EXPECT_EQ(y[i], good[i]);
          }
        }
    }
}

TEST_P(IntegerDotTest, EqualsTheDoubleProductOfTheQuantisedActivations) {
  struct Shape {
    int64_t rows, cols, n_tokens;
  };
  for (const Format format : kIntegerFormats)
    for (const Shape shape : {Shape{1, 32, 1}, {16, 64, 2}, {17, 96, 3}, {5, 128, 4}, {33, 256, 5}, {40, 384, 8}, {100, 640, 9},
                              {20, 1024, 17}}) {
      if (!fits(format, shape.cols)) continue;
      SCOPED_TRACE(testing::Message() << info(format).name << " " << shape.rows << "x" << shape.cols << ", " << shape.n_tokens
                                      << " tokens");
      const RandomMatrix weight = random_matrix(format, shape.rows, shape.cols, 2, 0.7f, 5);
      const PackedOwner packed(weight.matrix);
      const std::vector<float> x = random_tokens(6, shape.n_tokens, shape.cols);
      const std::vector<float> y = multiply(weight.matrix, packed.packed, 1, x, 0, shape.n_tokens);
      const auto n_cols = static_cast<size_t>(shape.cols);
      std::vector<float> w(n_cols), w_without_mins(n_cols);
      for (int64_t t = 0; t < shape.n_tokens; ++t) {
        const Quantized token({x.begin() + t * shape.cols, x.begin() + (t + 1) * shape.cols});
        for (int64_t r = 0; r < shape.rows; ++r) {
          decode_row(weight.matrix, 1, r, w.data());
          decode_row(weight.without_mins, 1, r, w_without_mins.data());
          double exact = 0, magnitude = 0;
          for (size_t c = 0; c < n_cols; ++c) {
            const double value = static_cast<double>(token.view.values[c]) * token.view.groups[c / 32].scale;
            exact += w[c] * value;
            magnitude += (std::abs(w_without_mins[c]) + std::abs(w[c] - w_without_mins[c])) * std::abs(value);
          }
          const double bound = (static_cast<double>(shape.cols / 32) * 4 + 8) * 0x1p-24 * magnitude + 0x1p-130;
          ASSERT_NEAR(y[static_cast<size_t>(t * shape.rows + r)], exact, bound) << "token " << t << ", row " << r;
        }
      }
      for (const int64_t n : {1, 2, 3, 4, 5, 7, 8, 9}) {
        if (n > shape.n_tokens) continue;
        for (const int64_t first : {int64_t{0}, shape.n_tokens - n})
          for (const auto& [block_rows, block_tiles] : {std::pair<int64_t, int64_t>{64, 100}, {16, 1}, {48, 2}})
            ASSERT_EQ(bits_of(multiply(weight.matrix, packed.packed, 1, x, first, n, block_rows, block_tiles)),
                      bits_of({y.begin() + first * shape.rows, y.begin() + (first + n) * shape.rows}))
                << n << " tokens from " << first << ", blocks of " << block_rows << " rows x " << block_tiles << " tiles";
      }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, IntegerDotTest, testing::ValuesIn(cpu_targets()), [](const auto& param) { return param.param; });

// The kernels themselves, so that those whose processors round norms otherwise (SSE4) are compared as well.
TEST(IntegerKernelsTest, AllInstructionSetsGiveTheBitsOfThePortableOnes) {
  for (const Format format : kIntegerFormats) {
    constexpr int64_t kRows = 64, kCols = 768, kTokens = 8;
    const RandomMatrix weight = random_matrix(format, kRows, kCols, 1, 1.0f, 9);
    const PackedOwner packed(weight.matrix);
    const std::vector<float> x = random_tokens(10, kTokens, kCols);
    Aligned<float> few(QuantizedTokens::floats(4, kCols)), many(QuantizedTokens::floats(kTokens, kCols));
    Aligned<uint8_t> expanded(expanded_strip_bytes(kCols));
    const auto run = [&](const IntegerKernels& kernels) {
      std::vector<float> z(static_cast<size_t>((kTokens + 10) * kRows));
      const QuantizedTokens few_tokens = QuantizedTokens::at(few.data(), 4, kCols);
      const QuantizedTokens many_tokens = QuantizedTokens::at(many.data(), kTokens, kCols);
      quantize_tokens(x.data(), kCols, nullptr, {}, few_tokens, 0, 4);
      quantize_tokens(x.data(), kCols, nullptr, {}, many_tokens, 0, kTokens);
      if (kernels.unsigned_tokens != integer_kernels().unsigned_tokens)
        for (int64_t i = 0; i < kTokens * kCols; ++i) many_tokens.values[i] ^= static_cast<int8_t>(-128);
      float* to = z.data();
      for (int64_t tile = 0; tile < packed.packed.n_tiles; ++tile) {
        const uint8_t* codes = packed.packed.tile(0, tile);
        for (int n = 1; n <= 4; ++n, to += (n - 1) * kTileRows)
          kernels.multiply_few(format, codes, few_tokens, 4 - n, n, to, kTileRows);
        for (int strip = 0; strip < kStrips; ++strip) {
          kernels.expand(format, codes, strip, kCols, expanded.data());
          kernels.multiply_many(format, expanded.data(), many_tokens, 0, kTokens, to + strip * kStripRows, kTileRows);
        }
        to += kTokens * kTileRows;
      }
      EXPECT_EQ(to, z.data() + z.size());
      return bits_of(z);
    };
    const std::vector<uint32_t> expected = run(kPortableIntegerKernels);
    for (const std::string& target : cpu_targets()) {
      choose_cpu_target(target);
      EXPECT_EQ(run(integer_kernels()), expected) << target << ", " << info(format).name;
      choose_cpu_target("");
    }
  }
}

}  // namespace
}  // namespace beryl
