// What: products of every format equal the double result within a bound from the data; a row's bits depend neither on
//       how many tokens there are, nor on which rows and tiles one call computes, nor on the number of threads, nor on
//       the instruction set (those with fused multiply-add); nothing is written outside the asked rows.
// How:  random blocks and inputs, shapes around each tile's edges. With K columns each of the sixteen sums takes K / 16
//       roundings, four more follow in the fold: |error| <= (K / 16 + 8) · 2^-24 · Σ |w · x|.
#include "cpu/linear.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "ops/backend.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr Format kWeightFormats[] = {Format::kF32,  Format::kF16,  Format::kBf16,  Format::kQ4_0,    Format::kQ4_1,
                                     Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,  Format::kQ4_K,    Format::kQ5_K,
                                     Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8};
constexpr float kUntouched = -77.5f;

struct AlignedFloats {
  explicit AlignedFloats(int64_t n) : storage(static_cast<size_t>(n) + 16, 0.0f) {}
  float* data() {
    const size_t misaligned = reinterpret_cast<size_t>(storage.data()) % 64;
    return storage.data() + (misaligned == 0 ? 0 : (64 - misaligned) / sizeof(float));
  }
  std::vector<float> storage;
};

std::vector<float> random_floats(uint64_t seed, int64_t n) {
  RandomStream random(seed);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = random.between(-1, 1);
  return values;
}

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

// y of the tokens [first_token, first_token + n_tokens) of x, [n_tokens][rows], computed block_rows rows and
// block_tiles tiles at a time.
std::vector<float> multiply(Product product, const std::vector<float>& x, int64_t first_token, int64_t n_tokens,
                            const RowNorm& norm, int64_t block_rows, int64_t block_tiles) {
  const int64_t rows = product.weight->rows, cols = product.weight->cols;
  AlignedFloats packed(PackedTokens::packed_floats(n_tokens, cols));
  AlignedFloats panel(panel_floats(cols, product.up != nullptr));
  product.x = {packed.data(), n_tokens, cols};
  pack_tokens(x.data() + first_token * cols, cols, nullptr, norm, product.x, 0, product.x.n_tiles());
  const int64_t y_stride = rows + 3;
  std::vector<float> y(static_cast<size_t>(n_tokens * y_stride), kUntouched);
  product.y = y.data();
  product.y_stride = y_stride;
  if (product.other != nullptr) product.other += first_token * product.other_stride;
  block_rows = std::min(block_rows, n_tokens > kFewTokens ? max_panel_rows(cols, product.up != nullptr) : kMaxItemRows);
  for (int64_t row = 0; row < rows; row += block_rows)
    for (int64_t tile = 0; tile < product.x.n_tiles(); tile += block_tiles)
      run_product(product, row, std::min(row + block_rows, rows), tile,
                  std::min(tile + block_tiles, product.x.n_tiles()), panel.data());
  std::vector<float> result;
  for (int64_t t = 0; t < n_tokens; ++t) {
    const float* from = y.data() + t * y_stride;
    result.insert(result.end(), from, from + rows);
    for (int64_t i = rows; i < y_stride; ++i) EXPECT_EQ(from[i], kUntouched) << "written behind token " << t;
  }
  return result;
}

std::vector<float> slice(const std::vector<float>& y, int64_t rows, int64_t first_token, int64_t n_tokens) {
  return {y.begin() + first_token * rows, y.begin() + (first_token + n_tokens) * rows};
}

// The same tokens in all sizes of step must give the bits that they have among all.
void expect_independent(const Product& product, const std::vector<float>& x, const RowNorm& norm,
                        const std::vector<float>& all, int64_t n_all) {
  const int64_t rows = product.weight->rows;
  for (const int64_t n : {1, 2, 3, 4, 5, 6, 7, 13}) {
    if (n > n_all) continue;
    for (const int64_t first : {int64_t{0}, (n_all - n) / 2, n_all - n})
      for (const auto& [block_rows, block_tiles] : {std::pair<int64_t, int64_t>{64, 100}, {8, 1}, {5, 2}})
        ASSERT_EQ(bits_of(multiply(product, x, first, n, norm, block_rows, block_tiles)),
                  bits_of(slice(all, rows, first, n)))
            << n << " tokens from " << first << ", blocks of " << block_rows << " rows x " << block_tiles << " tiles";
  }
}

double gelu(double z) { return 0.5 * z * (1 + std::tanh(0.79788456080286535588 * (z + 0.044715 * z * z * z))); }
double silu(double z) { return z / (1 + std::exp(-z)); }

class LinearTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { choose_cpu_target(GetParam()); }
  void TearDown() override { choose_cpu_target(""); }
};

TEST_P(LinearTest, EqualsTheDoubleProductWithinRoundoff) {
  struct Shape {
    int64_t rows, cols, n_tokens;
  };
  for (const Format format : kWeightFormats)
    for (const Shape shape : {Shape{1, 256, 1}, {3, 1, 2}, {5, 17, 9}, {7, 32, 6}, {70, 96, 13}, {64, 128, 12},
                              {13, 512, 31}, {33, 640, 7}, {6, 2048, 130}, {130, 256, 25}}) {
      if (!fits(format, shape.cols)) continue;
      for (const float tensor_scale : {1.0f, 0.37f}) {
        SCOPED_TRACE(testing::Message() << info(format).name << " " << shape.rows << "x" << shape.cols << ", "
                                        << shape.n_tokens << " tokens, x " << tensor_scale);
        const RandomMatrix weight = random_matrix(format, shape.rows, shape.cols, 2, tensor_scale, 5);
        const std::vector<float> x = random_floats(6, shape.n_tokens * shape.cols);
        Product product;
        product.weight = &weight.matrix;
        product.expert = 1;
        const std::vector<float> y = multiply(product, x, 0, shape.n_tokens, {}, kMaxItemRows, 1000);
        std::vector<float> w(static_cast<size_t>(shape.cols));
        for (int64_t r = 0; r < shape.rows; ++r) {
          decode_row(weight.matrix, 1, r, w.data());
          for (int64_t t = 0; t < shape.n_tokens; ++t) {
            double exact = 0, magnitude = 0;
            for (int64_t c = 0; c < shape.cols; ++c) {
              const double term = double{w[static_cast<size_t>(c)]} * x[static_cast<size_t>(t * shape.cols + c)];
              exact += term;
              magnitude += std::abs(term);
            }
            const double bound = (static_cast<double>(shape.cols) / 16 + 8) * 0x1p-24 * magnitude + 0x1p-140;
            ASSERT_NEAR(y[static_cast<size_t>(t * shape.rows + r)], exact, bound) << "token " << t << ", row " << r;
          }
        }
        expect_independent(product, x, {}, y, shape.n_tokens);
      }
    }
}

// Two matrices in one stream, as gate and up are; or one.
struct PackedFloats {
  PackedFloats(const std::vector<const HostMatrix*>& parts, int64_t stack)
      : n_tiles((parts[0]->rows + kTileRows - 1) / kTileRows), matrices(parts.size()) {
    int64_t stride = 0;
    for (const HostMatrix* part : parts) stride += packed_tile_bytes(PackedForm::kFloats, part->format, part->cols);
    storage.assign(static_cast<size_t>(stack * n_tiles * stride), 0xff);   // NaN in most formats: whatever is not written shows
    int64_t offset = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      matrices[i] = {storage.data() + offset, stride, n_tiles, PackedForm::kFloats, false};
      for (int64_t tile = 0; tile < stack * n_tiles; ++tile)
        pack_tile(PackedForm::kFloats, *parts[i], tile / n_tiles, tile % n_tiles, storage.data() + offset + tile * stride);
      offset += packed_tile_bytes(PackedForm::kFloats, parts[i]->format, parts[i]->cols);
    }
  }
  int64_t n_tiles;
  std::vector<uint8_t> storage;
  std::vector<PackedMatrix> matrices;
};

TEST_P(LinearTest, PackedFloatsHaveTheBitsOfTheFiles) {
  struct Shape {
    int64_t rows, cols, n_tokens;
  };
  for (const Format format : {Format::kF32, Format::kF16, Format::kBf16, Format::kFp8})
    for (const Shape shape : {Shape{1, 1, 1}, {5, 17, 9}, {31, 96, 1}, {33, 64, 2}, {70, 100, 3}, {130, 640, 4}, {97, 512, 19}}) {
      SCOPED_TRACE(testing::Message() << info(format).name << " " << shape.rows << "x" << shape.cols << ", " << shape.n_tokens << " tokens");
      const RandomMatrix gate = random_matrix(format, shape.rows, shape.cols, 2, 0.37f, 5);
      const RandomMatrix up = random_matrix(Format::kF16, shape.rows, shape.cols, 2, 1.0f, 6);
      const std::vector<float> x = random_floats(7, shape.n_tokens * shape.cols);
      for (const bool gated : {false, true}) {
        Product product;
        product.weight = &gate.matrix;
        product.expert = 1;
        if (gated) product.up = &up.matrix, product.epilogue = Epilogue::kGatedSilu;
        const std::vector<float> expected = multiply(product, x, 0, shape.n_tokens, {}, kMaxItemRows, 1000);
        const PackedFloats packed(gated ? std::vector{&gate.matrix, &up.matrix} : std::vector{&gate.matrix}, 2);
        product.packed = &packed.matrices[0];
        if (gated) product.packed_up = &packed.matrices[1];
        for (const int64_t block_rows : {kTileRows, kMaxItemRows})
          ASSERT_EQ(bits_of(multiply(product, x, 0, shape.n_tokens, {}, block_rows, 2)), bits_of(expected)) << block_rows << " rows at once";
        if (format != Format::kFp8 || gated) continue;
        PackedMatrix plain = packed.matrices[0];
        plain.is_plain_fp8 = true;
        for (int64_t tile = 0; tile < plain.n_tiles; ++tile) ASSERT_TRUE(is_plain_fp8(gate.matrix, 1, tile));
        product.packed = &plain;
        // The scale of a row multiplies its sum: what scales of one give, times it.
        std::vector<float> ones(static_cast<size_t>(2 * shape.rows), 1.0f);
        HostMatrix unscaled = gate.matrix;
        unscaled.scales = reinterpret_cast<const std::byte*>(ones.data());
        unscaled.tensor_scale = 1;
        Product of_codes;
        of_codes.weight = &unscaled;
        of_codes.expert = 1;
        std::vector<float> scaled = multiply(of_codes, x, 0, shape.n_tokens, {}, kMaxItemRows, 1000);
        for (int64_t t = 0; t < shape.n_tokens; ++t)
          for (int64_t r = 0; r < shape.rows; ++r) {
            float scale = 0;
            std::memcpy(&scale, gate.matrix.row_scales(1, r), sizeof(scale));
            scaled[static_cast<size_t>(t * shape.rows + r)] *= scale;
            scaled[static_cast<size_t>(t * shape.rows + r)] *= gate.matrix.tensor_scale;
          }
        for (const int64_t block_rows : {kTileRows, kMaxItemRows})
          ASSERT_EQ(bits_of(multiply(product, x, 0, shape.n_tokens, {}, block_rows, 2)), bits_of(scaled)) << "plain";
      }
    }
}

TEST(PackedMatrixTest, Fp8IsPlainWithoutNansAndWithSmallScales) {
  constexpr int64_t kRows = 40, kCols = 7;
  std::vector<std::byte> codes(kRows * kCols, std::byte{0x7e});
  std::vector<float> scales(kRows, -1.5f);
  HostMatrix matrix;
  matrix.format = Format::kFp8;
  matrix.rows = kRows;
  matrix.cols = kCols;
  matrix.codes = codes.data();
  matrix.scales = reinterpret_cast<const std::byte*>(scales.data());
  const auto plain = [&](int64_t tile) { return is_plain_fp8(matrix, 0, tile); };
  EXPECT_TRUE(plain(0) && plain(1));
  codes.back() = std::byte{0xff};
  EXPECT_TRUE(plain(0) && !plain(1));
  codes.back() = std::byte{0xfe};
  scales[31] = 0x1p100f;
  EXPECT_TRUE(!plain(0) && plain(1));
  scales[31] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(!plain(0) && plain(1));
}

TEST_P(LinearTest, NormsAndEpiloguesAreExactWithinRoundoff) {
  constexpr int64_t kRows = 37, kCols = 160, kTokens = 14;
  const RandomMatrix gate = random_matrix(Format::kQ4_1, kRows, kCols, 1, 1.0f, 1);
  const RandomMatrix up = random_matrix(Format::kQ8_0, kRows, kCols, 1, 1.0f, 2);
  const std::vector<float> x = random_floats(3, kTokens * kCols), other = random_floats(4, kTokens * kRows);
  const std::vector<float> norm_weight = random_floats(5, kCols);
  const RowNorm norm{true, norm_weight.data(), 1e-6f};
  std::vector<float> w(kCols);
  // W · norm(x) in double, and how far the f32 result may be from it.
  const auto exact = [&](const HostMatrix& matrix, int64_t t, int64_t r, double& bound) {
    decode_row(matrix, 0, r, w.data());
    double squares = 0, sum = 0, magnitude = 0;
    for (int64_t c = 0; c < kCols; ++c) squares += std::pow(double{x[static_cast<size_t>(t * kCols + c)]}, 2);
    const double factor = 1 / std::sqrt(squares / kCols + 1e-6);
    for (int64_t c = 0; c < kCols; ++c) {
      const double term = double{w[static_cast<size_t>(c)]} * x[static_cast<size_t>(t * kCols + c)] * factor *
                          norm_weight[static_cast<size_t>(c)];
      sum += term;
      magnitude += std::abs(term);
    }
    bound = (2.0 * kCols / 16 + 20) * 0x1p-24 * magnitude;
    return sum;
  };
  for (const Epilogue epilogue : {Epilogue::kStore, Epilogue::kGatedGelu, Epilogue::kGatedSilu,
                                  Epilogue::kGeluTimesOther, Epilogue::kSoftcap}) {
    SCOPED_TRACE(static_cast<int>(epilogue));
    Product product;
    product.weight = &gate.matrix;
    product.epilogue = epilogue;
    if (epilogue == Epilogue::kGatedGelu || epilogue == Epilogue::kGatedSilu) product.up = &up.matrix;
    if (epilogue == Epilogue::kGeluTimesOther) {
      product.other = other.data();
      product.other_stride = kRows;
    }
    product.softcap = epilogue == Epilogue::kSoftcap ? 0.7f : 0.0f;
    const std::vector<float> y = multiply(product, x, 0, kTokens, norm, kMaxItemRows, 1000);
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t r = 0; r < kRows; ++r) {
        double bound = 0, up_bound = 0, expected = exact(gate.matrix, t, r, bound);
        const double slope = 1.13;  // of gelu; silu's is smaller, tanh's 1
        if (epilogue == Epilogue::kGatedGelu || epilogue == Epilogue::kGatedSilu) {
          const double u = exact(up.matrix, t, r, up_bound);
          const double g = epilogue == Epilogue::kGatedGelu ? gelu(expected) : silu(expected);
          bound = slope * bound * (std::abs(u) + up_bound) + std::abs(g) * up_bound + 0x1p-20 * std::abs(g * u) +
                  0x1p-40;
          expected = g * u;
        } else if (epilogue == Epilogue::kGeluTimesOther) {
          const double o = other[static_cast<size_t>(t * kRows + r)];
          bound = slope * bound * std::abs(o) + 0x1p-20 * std::abs(gelu(expected) * o) + 0x1p-40;
          expected = gelu(expected) * o;
        } else if (epilogue == Epilogue::kSoftcap) {
          expected = 0.7f * std::tanh(expected / 0.7f);
          bound += 0x1p-21 * std::abs(expected);
        }
        ASSERT_NEAR(y[static_cast<size_t>(t * kRows + r)], expected, bound) << "token " << t << ", row " << r;
      }
    expect_independent(product, x, norm, y, kTokens);
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, LinearTest, testing::ValuesIn(cpu_targets()),
                         [](const auto& param) { return param.param; });

TEST(LinearTargetsTest, FusedTargetsGiveTheSameBits) {
  for (const Format format : kWeightFormats) {
    const RandomMatrix weight = random_matrix(format, 21, 512, 1, 1.0f, 5);
    const std::vector<float> x = random_floats(6, 9 * 512);
    Product product;
    product.weight = &weight.matrix;
    for (const int64_t n_tokens : {1, 3, 9}) {
      std::map<std::string, std::vector<uint32_t>> bits;
      for (const std::string& target : cpu_targets()) {
        if (target == "sse4") continue;  // rounds each product
        choose_cpu_target(target);
        bits[target] = bits_of(multiply(product, x, 0, n_tokens, {}, kMaxItemRows, 1000));
      }
      choose_cpu_target("");
      for (const auto& [target, each] : bits)
        EXPECT_EQ(each, bits.begin()->second) << target << ", " << info(format).name << ", " << n_tokens << " tokens";
    }
  }
}

// A Linear of three parts in three formats through the backend: the same bits for every number of threads.
TEST(LinearThreadsTest, ResultsDoNotDependOnTheThreadCount) {
  constexpr int64_t kCols = 512;
  WeightSet weights;
  weights.matrices.push_back({"qkv",
                              {random_matrix(Format::kQ4_K, 200, kCols, 1, 1.0f, 1).matrix,
                               random_matrix(Format::kQ6_K, 65, kCols, 1, 1.0f, 2).matrix,
                               random_matrix(Format::kQ8_0, 31, kCols, 1, 1.0f, 3).matrix}});
  Program program;
  program.weights = &weights;
  program.rows = {{"x", kCols, RowsKind::kActivation, RowCount::kTokens},
                  {"y", 296, RowsKind::kActivation, RowCount::kTokens}};
  program.vocab = 1;
  Linear op;
  op.weight = {0};
  op.x = {0, 0, kCols};
  op.y = {1, 0, 296};
  program.ops = {op};
  program.layer_of_op = {0};
  program.n_layers = 1;
  for (const int n_tokens : {1, 4, 5, 130, 400}) {
    const std::vector<float> x = random_floats(9, n_tokens * kCols);
    StepInput input;
    for (int t = 0; t < n_tokens; ++t) {
      input.ids.push_back(0);
      input.positions.push_back(t);
      input.sequences.push_back(0);
    }
    StepLimits limits;
    limits.max_tokens = n_tokens;
    std::vector<uint32_t> expected;
    for (const int n_threads : {1, 2, 3, 8}) {
      const std::unique_ptr<Executor> executor = make_cpu_backend(n_threads)->prepare(program, limits);
      executor->set_input(input);
      executor->write_rows(0, 0, n_tokens, x.data());
      executor->run();
      std::vector<float> y(static_cast<size_t>(n_tokens) * 296);
      executor->read_rows(1, 0, n_tokens, y.data());
      if (expected.empty()) expected = bits_of(y);
      EXPECT_EQ(bits_of(y), expected) << n_threads << " threads, " << n_tokens << " tokens";
      EXPECT_TRUE(executor->damaged_guards().empty());
    }
  }
}

}  // namespace
}  // namespace beryl
