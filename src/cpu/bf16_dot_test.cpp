// What: products of packed BF16 weights have, on every instruction set, the bits of the chain that bf16_dot.h defines, for any number
//       of tokens, any blocks of rows and any place among other tokens; activations are rounded to the nearest bf16; what is not finite
//       spoils its token only; nothing is written outside the asked rows.
// How:  the definition as a plain loop with std::fma over weights and activations rounded by base/float_formats.h; shapes around the edges
//       of tiles, strips, groups and pairs; values from 2^-60 to 2^20 so that sums cancel and round in every way.
#include "cpu/bf16_dot.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/float_formats.h"
#include "cpu/linear.h"
#include "cpu/simd.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr float kUntouched = -77.5f;

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

// [stack][rows][cols], some of it zero, tiny or large.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, int64_t stack, uint64_t seed) : codes(static_cast<size_t>(rows * cols * stack)) {
    RandomStream random(seed);
    for (uint16_t& code : codes) {
      const float scale = random.below(20) == 0 ? 0x1p-60f : random.below(20) == 0 ? 0x1p10f : 1.0f;
      code = f32_to_bf16(random.below(30) == 0 ? -0.0f : random.between(-1, 1) * scale);
    }
    matrix.format = Format::kBf16;
    matrix.rows = rows;
    matrix.cols = cols;
    matrix.stack = stack;
    matrix.codes = reinterpret_cast<const std::byte*>(codes.data());
    matrix.stack_stride_bytes = rows * cols * 2;
    matrix.tensor_scale = 1;
    storage.resize(static_cast<size_t>(packed_bytes(PackedForm::kBf16, matrix)) + 64);
    uint8_t* to = storage.data() + (64 - reinterpret_cast<size_t>(storage.data()) % 64) % 64;
    packed = {to, packed_tile_bytes(PackedForm::kBf16, Format::kBf16, cols), (rows + kTileRows - 1) / kTileRows, PackedForm::kBf16, false};
    for (int64_t i = 0; i < stack * packed.n_tiles; ++i)
      pack_tile(PackedForm::kBf16, matrix, i / packed.n_tiles, i % packed.n_tiles, to + i * packed.tile_stride);
  }
  float weight(int64_t expert, int64_t r, int64_t c) const {
    const float w = bf16_to_f32(codes[static_cast<size_t>((expert * matrix.rows + r) * matrix.cols + c)]);
    return std::abs(w) < kSmallestBf16 ? 0 : w;
  }
  std::vector<uint16_t> codes;
  std::vector<uint8_t> storage;
  HostMatrix matrix;
  PackedMatrix packed;
};

std::vector<float> random_tokens(uint64_t seed, int64_t n) {
  RandomStream random(seed);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) {
    const uint64_t kind = random.below(40);
    value = random.between(-1, 1) * (kind == 0 ? 0x1p20f : kind == 1 ? 0x1p-57f : kind == 2 ? 0x1p-140f : 1.0f);
  }
  return x;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

float rounded(float x) { return std::abs(x) < kSmallestBf16 ? 0 : bf16_to_f32(f32_to_bf16(x)); }

// The definition. x is one token.
float chain(const Matrix& weight, int64_t expert, int64_t r, const float* x) {
  const int64_t cols = weight.matrix.cols;
  float y = 0;
  for (int64_t c = 0; c < cols; c += 2) {
    if (c + 1 < cols) y = std::fma(weight.weight(expert, r, c + 1), rounded(x[c + 1]), y);
    y = std::fma(weight.weight(expert, r, c), rounded(x[c]), y);
  }
  return y;
}

// y of tokens [first, first + n_tokens), [n_tokens][rows], block_rows rows and block_tiles token tiles at a time.
std::vector<float> multiply(const Matrix& weight, int64_t expert, const std::vector<float>& x, int64_t first, int64_t n_tokens,
                            int64_t block_rows = kMaxItemRows, int64_t block_tiles = 1000) {
  const int64_t cols = weight.matrix.cols, rows = weight.matrix.rows, y_stride = rows + 3;
  Aligned<float> tokens(Bf16Tokens::floats(n_tokens, cols));
  Product product;
  product.weight = &weight.matrix;
  product.packed = &weight.packed;
  product.expert = expert;
  product.rounded = {tokens.data(), n_tokens, cols};
  round_tokens(x.data() + first * cols, cols, nullptr, {}, product.rounded, 0, n_tokens);
  std::vector<float> y(static_cast<size_t>(n_tokens * y_stride), kUntouched), result;
  product.y = y.data();
  product.y_stride = y_stride;
  for (int64_t row = 0; row < rows; row += block_rows)
    for (int64_t tile = 0; tile < product.n_token_tiles(); tile += block_tiles)
      run_product(product, row, std::min(row + block_rows, rows), tile, std::min(tile + block_tiles, product.n_token_tiles()), nullptr);
  for (int64_t t = 0; t < n_tokens; ++t) {
    const float* from = y.data() + t * y_stride;
    result.insert(result.end(), from, from + rows);
    for (int64_t i = rows; i < y_stride; ++i) EXPECT_EQ(from[i], kUntouched) << "written behind token " << t;
  }
  return result;
}

class Bf16DotTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(Bf16DotTest, HasTheBitsOfTheDefinition) {
  struct Shape {
    int64_t rows, cols, n_tokens;
  };
  for (const Shape shape : {Shape{1, 1, 1}, {3, 2, 2}, {16, 31, 3}, {17, 33, 4}, {31, 64, 5}, {32, 96, 7}, {33, 200, 8}, {49, 257, 9},
                            {100, 640, 17}, {130, 100, 20}}) {
    SCOPED_TRACE(testing::Message() << shape.rows << "x" << shape.cols << ", " << shape.n_tokens << " tokens");
    const Matrix weight(shape.rows, shape.cols, 2, 7);
    const std::vector<float> x = random_tokens(8, shape.n_tokens * shape.cols);
    std::vector<float> expected;
    for (int64_t t = 0; t < shape.n_tokens; ++t)
      for (int64_t r = 0; r < shape.rows; ++r) expected.push_back(chain(weight, 1, r, x.data() + t * shape.cols));
    for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 20}) {
      if (n > shape.n_tokens) continue;
      for (const int64_t first : {int64_t{0}, shape.n_tokens - n})
        for (const auto& [block_rows, block_tiles] : {std::pair<int64_t, int64_t>{64, 100}, {32, 1}})
          ASSERT_EQ(bits_of(multiply(weight, 1, x, first, n, block_rows, block_tiles)),
                    bits_of({expected.begin() + first * shape.rows, expected.begin() + (first + n) * shape.rows}))
              << n << " tokens from " << first << ", blocks of " << block_rows << " rows x " << block_tiles << " tiles";
    }
  }
}

TEST_P(Bf16DotTest, ActivationsAreTheNearestBf16) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0.0f, -0.0f, 1.0f, std::bit_cast<float>(0x3f808000u), std::bit_cast<float>(0x3f818000u),
                          std::bit_cast<float>(0xbf808001u), kInfinity, -kInfinity, std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min(), 0x1p-56f, -0x1.fffffep-57f, 0x1.fffffep-57f};
  RandomStream random(3);
  while (x.size() < 1000) x.push_back(random.between(-3, 3));
  const auto cols = static_cast<int64_t>(x.size());
  Aligned<float> storage(Bf16Tokens::floats(1, cols));
  const Bf16Tokens tokens{storage.data(), 1, cols};
  round_tokens(x.data(), cols, nullptr, {}, tokens, 0, 1);
  for (int64_t c = 0; c < Bf16Tokens::padded(cols); ++c) {
    const float value = bf16_kernels().f32_tokens ? tokens.as_f32(0)[c] : bf16_to_f32(tokens.as_bf16(0)[c]);
    EXPECT_EQ(value, c < cols ? rounded(x[static_cast<size_t>(c)]) : 0.0f) << "column " << c;
  }
}

TEST_P(Bf16DotTest, WhatIsNotFiniteSpoilsItsTokenOnly) {
  const Matrix weight(40, 96, 1, 3);
  for (const int64_t n_tokens : {3, 9})
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> x = random_tokens(2, n_tokens * 96);
      const std::vector<float> good = multiply(weight, 0, x, 0, n_tokens);
      x[96 + 40] = bad;
      const std::vector<float> y = multiply(weight, 0, x, 0, n_tokens);
      for (int64_t t = 0; t < n_tokens; ++t)
        for (int64_t r = 0; r < 40; ++r) {
          const auto i = static_cast<size_t>(t * 40 + r);
          if (t == 1) {
            EXPECT_FALSE(std::isfinite(y[i])) << "row " << r;
          } else {
            EXPECT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(good[i])) << "token " << t << ", row " << r;
          }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Targets, Bf16DotTest, testing::ValuesIn(cpu_targets()), [](const auto& param) { return param.param; });

#if defined(__x86_64__)
// A processor that has the instruction and is not offered the target would be slow without a word.
TEST(Bf16TargetTest, IsOfferedWhereTheProcessorHasIt) {
  const bool has = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
  EXPECT_EQ(cpu_targets().front() == "avx512bf16", has && bf16_instruction_adds_as_defined());
}
#endif

}  // namespace
}  // namespace beryl
