// What: a stream of tensors is written as encoding each whole matrix would, for any number of threads; tensors in their
//       format already are copied; what fails or is stopped leaves nothing; chunks are small for tensors of any size.
// How:  bytes in the file are compared with encode_matrix and with the source; tensors span several pieces and chunks,
//       with rows that do not divide them; NaN lies where several threads could meet one first.
#include "weights/quantize.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "base/rng.h"
#include "weights/checkpoint.h"
#include "weights/encode.h"
#include "weights/test_files.h"

namespace beryl {
namespace {

const auto kGoOn = [](const QuantizeProgress&) { return true; };

std::vector<float> make_weights(int64_t n, uint64_t seed) {
  std::vector<float> weights(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    weights[static_cast<size_t>(i)] = to_unit_float(philox(seed, static_cast<uint64_t>(i)).x[0]) - 0.5f;
  return weights;
}

QuantizeTensor tensor_of(const HostMatrix& matrix, Format format) {
  QuantizeTensor tensor;
  tensor.entry = {matrix.name, format, {matrix.rows, matrix.cols}};
  if (matrix.stack > 1) tensor.entry.shape.insert(tensor.entry.shape.begin(), matrix.stack);
  tensor.source = matrix;
  return tensor;
}

std::string bytes_of(const std::byte* from, int64_t n) {
  return {reinterpret_cast<const char*>(from), static_cast<size_t>(n)};
}

// Codes and scales of the same bits.
void expect_same(const HostMatrix& found, const HostMatrix& expected) {
  EXPECT_EQ(found.format, expected.format);
  EXPECT_EQ(found.tensor_scale, expected.tensor_scale);
  const int64_t n_rows = expected.stack * expected.rows;
  ASSERT_EQ(found.stack * found.rows, n_rows);
  ASSERT_EQ(found.cols, expected.cols);
  const int64_t code_bytes = n_rows * row_bytes(expected.format, expected.cols);
  const int64_t scale_bytes = n_rows * row_scale_bytes(expected.format, expected.cols);
  EXPECT_TRUE(bytes_of(found.codes, code_bytes) == bytes_of(expected.codes, code_bytes));
  if (scale_bytes > 0) {
    EXPECT_TRUE(bytes_of(found.scales, scale_bytes) == bytes_of(expected.scales, scale_bytes));
  }
}

HostMatrix matrix_at(const Checkpoint& checkpoint, const std::string& name) {
  const TensorInfo* tensor = checkpoint.find(name);
  if (tensor == nullptr) throw std::runtime_error("no tensor " + name);
  return matrix_of(checkpoint, *tensor);
}

constexpr Format kFormats[] = {Format::kF32,  Format::kF16,  Format::kBf16,  Format::kQ4_0,  Format::kQ4_1,
                               Format::kQ5_0, Format::kQ5_1, Format::kQ8_0,  Format::kQ4_K,  Format::kQ5_K,
                               Format::kQ6_K, Format::kMxfp4, Format::kNvfp4, Format::kFp4G128, Format::kFp8};

TEST(QuantizeTest, EveryFormatIsWrittenAsItsEncoderWritesAMatrix) {
  const test::TempFolder folder;
  constexpr int64_t kStack = 3, kRows = 7, kCols = 512;
  const auto weights = make_weights(kStack * kRows * kCols, 1);
  const HostMatrix source = encode_matrix("experts", Format::kF32, weights.data(), kRows, kCols, kStack);
  for (const Format format : kFormats) {
    if (format == Format::kF32) continue;   // that is a copy: below
    SCOPED_TRACE(std::string(info(format).name));
    const QuantizeTensor tensor = tensor_of(source, format);
    const QuantizeResult result = write_quantized(folder.path("m"), {&tensor, 1}, 2, {{"format", "pt"}}, kGoOn);
    ASSERT_TRUE(result.finished);
    const auto file = open_safetensors(folder.path("m"));
    EXPECT_EQ(file->metadata().string("format"), "pt");
    EXPECT_EQ(file->find("experts")->shape, (std::vector{kStack, kRows, kCols}));
    const HostMatrix expected = encode_matrix("experts", format, weights.data(), kRows, kCols, kStack);
    expect_same(matrix_at(*file, "experts"), expected);

    double squared_error = 0, squared_weights = 0;
    std::vector<float> row(kCols);
    for (int64_t i = 0; i < kStack * kRows; ++i) {
      decode_row(expected, i / kRows, i % kRows, row.data());
      for (int64_t col = 0; col < kCols; ++col) {
        const double wanted = weights[static_cast<size_t>(i * kCols + col)];
        squared_error += (row[static_cast<size_t>(col)] - wanted) * (row[static_cast<size_t>(col)] - wanted);
        squared_weights += wanted * wanted;
      }
    }
    EXPECT_NEAR(result.errors[0].squared_error, squared_error, 1e-9 * squared_weights);
    EXPECT_NEAR(result.errors[0].squared_weights, squared_weights, 1e-9 * squared_weights);
  }
}

TEST(QuantizeTest, ThreadsAndChunksChangeNothing) {
  const test::TempFolder folder;
  constexpr int64_t kRows = 1801, kCols = 1280;   // 9 pieces of 204 rows, the last one short
  const auto weights = make_weights(kRows * kCols, 2);
  const HostMatrix source = encode_matrix("w", Format::kF32, weights.data(), kRows, kCols);
  for (const Format format : {Format::kQ8_0, Format::kNvfp4, Format::kFp8}) {
    const HostMatrix expected = encode_matrix("w", format, weights.data(), kRows, kCols);
    std::optional<double> error;
    for (const int n_threads : {1, 2, 7}) {
      const QuantizeTensor tensor = tensor_of(source, format);
      const QuantizeResult result = write_quantized(folder.path("m"), {&tensor, 1}, n_threads, {}, kGoOn);
      expect_same(matrix_at(*open_safetensors(folder.path("m")), "w"), expected);
      EXPECT_EQ(result.errors[0].squared_error, error.value_or(result.errors[0].squared_error));
      error = result.errors[0].squared_error;
    }
  }
}

TEST(QuantizeTest, WhatHasTheFormatAlreadyIsCopied) {
  const test::TempFolder folder;
  constexpr int64_t kRows = 5, kCols = 512;
  const auto weights = make_weights(kRows * kCols, 3);
  for (const Format format : kFormats) {
    SCOPED_TRACE(std::string(info(format).name));
    HostMatrix source = encode_matrix("w", format, weights.data(), kRows, kCols);
    if (info(format).block_weights > 1 && info(format).scale_group < 0) source.tensor_scale *= 0.3f;
    const QuantizeTensor tensor = tensor_of(source, format);
    const QuantizeResult result = write_quantized(folder.path("m"), {&tensor, 1}, 2, {}, kGoOn);
    EXPECT_EQ(result.errors[0].squared_weights, 0);
    expect_same(matrix_at(*open_safetensors(folder.path("m")), "w"), source);
  }
}

TEST(QuantizeTest, AFloatTensorIsMultipliedWithItsScale) {
  const test::TempFolder folder;
  const std::vector<float> weights = {1, -2, 3, 0.5f};
  HostMatrix source = encode_matrix("w", Format::kF32, weights.data(), 2, 2);
  source.tensor_scale = 0.25f;
  const QuantizeTensor tensor = tensor_of(source, Format::kF32);
  write_quantized(folder.path("m"), {&tensor, 1}, 1, {}, kGoOn);
  const auto file = open_safetensors(folder.path("m"));
  EXPECT_EQ(floats_of(*file, *file->find("w")), (std::vector<float>{0.25f, -0.5f, 0.75f, 0.125f}));
}

TEST(QuantizeTest, RowsCanBeMade) {
  const test::TempFolder folder;
  QuantizeTensor tensor;
  tensor.entry = {"made", Format::kF32, {300, 1000}};
  tensor.source.rows = 300;
  tensor.source.cols = 1000;
  tensor.make_row = [](int64_t row, float* out) {
    for (int64_t col = 0; col < 1000; ++col) out[col] = static_cast<float>(1000 * row + col);
  };
  write_quantized(folder.path("m"), {&tensor, 1}, 3, {}, kGoOn);
  const auto file = open_safetensors(folder.path("m"));
  const std::vector<float> values = floats_of(*file, *file->find("made"));
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], static_cast<float>(i));
}

TEST(QuantizeTest, PagesOfAMappedSourceComeBackWhenReadAgain) {
  const test::TempFolder folder;
  constexpr int64_t kRows = 700, kCols = 1024;
  const auto weights = make_weights(kRows * kCols, 4);
  const HostMatrix memory = encode_matrix("w", Format::kF32, weights.data(), kRows, kCols);
  QuantizeTensor first = tensor_of(memory, Format::kF32);
  write_quantized(folder.path("source"), {&first, 1}, 1, {}, kGoOn);
  const auto source = open_safetensors(folder.path("source"));
  QuantizeTensor tensor = tensor_of(matrix_at(*source, "w"), Format::kNvfp4);   // is read twice
  tensor.gives_pages_back = true;
  write_quantized(folder.path("m"), {&tensor, 1}, 2, {}, kGoOn);
  expect_same(matrix_at(*open_safetensors(folder.path("m")), "w"),
              encode_matrix("w", Format::kNvfp4, weights.data(), kRows, kCols));
  EXPECT_EQ(floats_of(*source, *source->find("w")), weights);
}

TEST(QuantizeTest, TheFirstWeightThatIsNotFiniteIsNamedAndNothingIsLeft) {
  constexpr int64_t kRows = 2000, kCols = 1024;
  auto weights = make_weights(kRows * kCols, 5);
  weights[static_cast<size_t>(300 * kCols + 17)] = std::numeric_limits<float>::quiet_NaN();
  weights[static_cast<size_t>(1500 * kCols + 3)] = std::numeric_limits<float>::infinity();
  const HostMatrix source = encode_matrix("placeholder", Format::kF32, std::vector<float>(2, 0.0f).data(), 1, 2);
  HostMatrix sick = source;
  sick.name = "blk.3.ffn_up.weight";
  sick.rows = kRows;
  sick.cols = kCols;
  sick.codes = reinterpret_cast<const std::byte*>(weights.data());
  for (const Format format : {Format::kF32, Format::kFp4G128, Format::kNvfp4, Format::kBf16})
    for (const int n_threads : {1, 8}) {
      const test::TempFolder folder;
      const QuantizeTensor tensor = tensor_of(sick, format);
      try {
        write_quantized(folder.path("m"), {&tensor, 1}, n_threads, {}, kGoOn);
        ADD_FAILURE() << "nothing was refused";
      } catch (const Error& error) {
        EXPECT_EQ(error.code, ErrorCode::kBadInput);
        EXPECT_NE(std::string(error.what()).find("tensor 'blk.3.ffn_up.weight' has nan at row 300, column 17"),
                  std::string::npos)
            << error.what();
      }
      EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    }
}

TEST(QuantizeTest, StoppingLeavesNothing) {
  constexpr int64_t kRows = 4000, kCols = 1024;
  QuantizeTensor tensor;
  tensor.entry = {"made", Format::kBf16, {kRows, kCols}};
  tensor.source.rows = kRows;
  tensor.source.cols = kCols;
  tensor.make_row = [](int64_t, float* out) { std::fill_n(out, kCols, 1.0f); };
  for (const Format format : {Format::kBf16, Format::kNvfp4})   // NVFP4 can be stopped in its first pass
    for (const int n_chunks : {1, 2}) {
      tensor.entry.format = format;
      const test::TempFolder folder;
      int n_calls = 0;
      const QuantizeResult result = write_quantized(folder.path("m"), {&tensor, 1}, 1, {},
                                                    [&](const QuantizeProgress&) { return ++n_calls < n_chunks; });
      EXPECT_FALSE(result.finished);
      EXPECT_EQ(n_calls, n_chunks);
      EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    }
}

// The bound on memory: between two calls no more than a chunk is held, however large the tensor.
TEST(QuantizeTest, ChunksAreSmallAndProgressReachesTheEnd) {
  const test::TempFolder folder;
  const auto tensor_with = [](const char* name, int64_t rows, int64_t cols) {
    QuantizeTensor tensor;
    tensor.entry = {name, Format::kBf16, {rows, cols}};
    tensor.source.rows = rows;
    tensor.source.cols = cols;
    tensor.make_row = [cols](int64_t, float* out) { std::fill_n(out, cols, 0.5f); };
    return tensor;
  };
  const QuantizeTensor tensors[] = {tensor_with("wide", 9, 1 << 20), tensor_with("tall", 1 << 20, 8),
                                    tensor_with("small", 1, 1)};
  constexpr int64_t kAll = (9 << 20) + (8 << 20) + 1;
  constexpr int kThreads = 2;
  int64_t done = 0, largest = 0;
  std::vector<std::string> names;
  write_quantized(folder.path("m"), tensors, kThreads, {}, [&](const QuantizeProgress& progress) {
    EXPECT_EQ(progress.n_weights, kAll);
    largest = std::max(largest, progress.n_done - done);
    done = progress.n_done;
    if (names.empty() || names.back() != progress.tensor) names.emplace_back(progress.tensor);
    return true;
  });
  EXPECT_EQ(done, kAll);
  EXPECT_EQ(names, (std::vector<std::string>{"wide", "tall", "small"}));
  EXPECT_LE(largest, int64_t{kThreads} * 4 * (1 << 20));   // four rows a thread where rows are this wide
}

}  // namespace
}  // namespace beryl
