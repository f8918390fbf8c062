// Opening a checkpoint by what lies at a path, and turning its tensors into matrices.
#include "weights/checkpoint.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include <fmt/format.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "weights/gguf.h"
#include "weights/hugging_face.h"
#include "weights/quote.h"
#include "weights/safetensors.h"

namespace beryl {

namespace {

[[noreturn]] void bad(const Checkpoint& checkpoint, const std::string& what) {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: {}", checkpoint.path(), what));
}

[[noreturn]] void unsupported(const Checkpoint& checkpoint, const std::string& what) {
  throw Error(ErrorCode::kUnsupported, fmt::format("{}: {}", checkpoint.path(), what));
}

std::string shape_text(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// The readers limit shapes; a product that overflows all the same counts as more than any tensor has.
int64_t count_of(const TensorInfo& tensor) {
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return 0;
  int64_t n = 1;
  for (const int64_t dim : tensor.shape)
    if (__builtin_mul_overflow(n, dim, &n)) return INT64_MAX;
  return n;
}

bool is_float(Format format) {
  return format == Format::kF32 || format == Format::kF16 || format == Format::kBf16;
}

float float_at(const TensorInfo& tensor, int64_t index) {
  if (tensor.format == Format::kF32) {
    float value;
    std::memcpy(&value, tensor.data.data() + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, tensor.data.data() + 2 * index, 2);
  return tensor.format == Format::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// GGUF's "X.scale" beside "X.weight", when it is one number: it multiplies the whole matrix. Longer ones belong to the
// model (Gemma 4's router has one a column, its experts one an expert).
const TensorInfo* gguf_scale_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  constexpr std::string_view kWeight = ".weight";
  if (checkpoint.container() != Container::kGguf || tensor.shape.size() != 2 || !tensor.name.ends_with(kWeight))
    return nullptr;
  const std::string base = tensor.name.substr(0, tensor.name.size() - kWeight.size());
  const TensorInfo* scale = checkpoint.find(base + ".scale");
  return scale != nullptr && count_of(*scale) == 1 ? scale : nullptr;
}

// Our own files' "NAME_scale" beside a block-quantised NAME: one number that multiplies the whole tensor (NVFP4's).
const TensorInfo* own_scale_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  const FormatInfo& format = info(tensor.format);
  if (format.block_weights == 1 || format.scale_group >= 0) return nullptr;
  const TensorInfo* scale = checkpoint.find(tensor.name + std::string(kScaleSuffix));
  return scale != nullptr && count_of(*scale) == 1 ? scale : nullptr;
}

const TensorInfo* scale_plane_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  if (info(tensor.format).scale_group < 0) return nullptr;
  return checkpoint.find(tensor.name + std::string(kScaleSuffix));
}

void attach_fp4_scales(const Checkpoint& checkpoint, const TensorInfo& tensor, const TensorInfo& scale,
                       HostMatrix& matrix) {
  std::vector<int64_t> wanted = tensor.shape;
  wanted.back() = matrix.cols / info(tensor.format).scale_group;
  if (scale.format != Format::kBf16 || scale.shape != wanted)
    bad(checkpoint, fmt::format("tensor {} is {} {}, expected bf16 {}", quote(scale.name), info(scale.format).name,
                                shape_text(scale.shape), shape_text(wanted)));
  matrix.scales = scale.data.data();
  matrix.stack_scale_stride_bytes = matrix.rows * row_scale_bytes(matrix.format, matrix.cols);
}

// A scale a row ([rows], [rows, 1], [stack, rows, 1]) or one for all; f32, or bf16 and f16, which are widened.
void attach_fp8_scales(const Checkpoint& checkpoint, const TensorInfo& scale, HostMatrix& matrix) {
  const int64_t n_rows = matrix.stack * matrix.rows;
  const int64_t n_scales = count_of(scale);
  if (!is_float(scale.format) || (n_scales != n_rows && n_scales != 1))
    bad(checkpoint, fmt::format("tensor {} is {} {}, expected {} floats, one a row, or one for the tensor",
                                quote(scale.name), info(scale.format).name, shape_text(scale.shape), n_rows));
  if (n_scales > 1 && scale.shape.back() != 1 && scale.shape.back() != matrix.rows)
    unsupported(checkpoint, fmt::format("tensor {} is {}: scales along the columns are not supported",
                                        quote(scale.name), shape_text(scale.shape)));
  matrix.stack_scale_stride_bytes = matrix.rows * row_scale_bytes(matrix.format, matrix.cols);
  if (scale.format == Format::kF32 && n_scales == n_rows) {
    matrix.scales = scale.data.data();
    return;
  }
  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(n_rows) * sizeof(float));
  for (int64_t row = 0; row < n_rows; ++row) {
    const float value = float_at(scale, n_scales == 1 ? 0 : row);
    std::memcpy(storage->data() + row * static_cast<int64_t>(sizeof(float)), &value, sizeof(float));
  }
  matrix.scales = storage->data();
  matrix.storage = std::move(storage);
}

}  // namespace

std::unique_ptr<Checkpoint> open_checkpoint(const std::string& path) {
  std::error_code failure;
  const auto status = std::filesystem::status(path, failure);
  if (!std::filesystem::exists(status))
    throw Error(ErrorCode::kIo, fmt::format("{}: cannot open: {}", path, failure.message()));
  if (std::filesystem::is_directory(status)) {
    const std::filesystem::path folder = path;
    const bool of_gguf = std::filesystem::exists(folder / kGgufMetadataFile, failure) &&
                         !std::filesystem::exists(folder / "config.json", failure);
    return of_gguf ? open_gguf_folder(path) : open_hugging_face(path);
  }
  if (path.ends_with(".safetensors"))
    throw Error(ErrorCode::kBadInput,
                fmt::format("{}: give the folder with config.json, not the safetensors file", path));
  return open_gguf(path);
}

HostMatrix matrix_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  HostMatrix matrix;
  matrix.name = tensor.name;
  matrix.format = tensor.format;
  if (tensor.format == Format::kI32 || tensor.format == Format::kI64 || tensor.format == Format::kU8)
    unsupported(checkpoint, fmt::format("tensor {} holds {} and no known weight format", quote(tensor.name),
                                        info(tensor.format).name));
  const std::vector<int64_t>& shape = tensor.shape;
  if (shape.size() > 3)
    unsupported(checkpoint, fmt::format("tensor {} is {}, expected at most 3 dimensions", quote(tensor.name),
                                        shape_text(shape)));
  matrix.cols = shape.empty() ? 1 : shape.back();
  matrix.rows = shape.size() < 2 ? 1 : shape[shape.size() - 2];
  matrix.stack = shape.size() < 3 ? 1 : shape[0];
  if (matrix.cols <= 0 || matrix.rows <= 0 || matrix.stack <= 0 || !fits(matrix.format, matrix.cols))
    bad(checkpoint, fmt::format("tensor {} is {} {}, which is empty or no whole blocks", quote(tensor.name),
                                info(tensor.format).name, shape_text(shape)));
  matrix.codes = tensor.data.data();
  matrix.stack_stride_bytes = matrix.rows * row_bytes(matrix.format, matrix.cols);
  if (matrix.stack * matrix.stack_stride_bytes != static_cast<int64_t>(tensor.data.size()))
    bad(checkpoint, fmt::format("tensor {} has {} bytes, expected {}", quote(tensor.name), tensor.data.size(),
                                matrix.stack * matrix.stack_stride_bytes));

  if (info(tensor.format).scale_group >= 0) {
    if (checkpoint.find(tensor.name + "_scale_inv") != nullptr)
      unsupported(checkpoint, fmt::format("tensor {} has block scales ('_scale_inv'); only scales by row are supported",
                                          quote(tensor.name)));
    const TensorInfo* scale = scale_plane_of(checkpoint, tensor);
    if (scale == nullptr)
      bad(checkpoint, fmt::format("tensor {} is {}, but its scales {} are missing", quote(tensor.name),
                                  info(tensor.format).name, quote(tensor.name + std::string(kScaleSuffix))));
    if (tensor.format == Format::kFp4G128) {
      attach_fp4_scales(checkpoint, tensor, *scale, matrix);
    } else {
      attach_fp8_scales(checkpoint, *scale, matrix);
    }
  }
  for (const TensorInfo* scale : {gguf_scale_of(checkpoint, tensor), own_scale_of(checkpoint, tensor)}) {
    if (scale == nullptr) continue;
    const float value = is_float(scale->format) ? float_at(*scale, 0) : NAN;
    if (!std::isfinite(value))
      bad(checkpoint, fmt::format("tensor {} is {} {}, expected one finite float", quote(scale->name),
                                  info(scale->format).name, value));
    matrix.tensor_scale *= value;
  }
  return matrix;
}

std::vector<std::string> companions_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  std::vector<std::string> names;
  const auto add = [&](const TensorInfo* found) {
    if (found != nullptr) names.push_back(found->name);
  };
  add(scale_plane_of(checkpoint, tensor));
  add(gguf_scale_of(checkpoint, tensor));
  add(own_scale_of(checkpoint, tensor));
  constexpr std::string_view kWeight = ".weight";
  if (tensor.name.ends_with(kWeight)) {
    // Scales for quantised activations, which beryl does not use: activations stay wide.
    const std::string base = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    add(checkpoint.find(base + ".input_scale"));
  }
  return names;
}

std::vector<float> floats_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  const HostMatrix matrix = matrix_of(checkpoint, tensor);
  std::vector<float> out(static_cast<size_t>(matrix.stack * matrix.rows * matrix.cols));
  for (int64_t expert = 0; expert < matrix.stack; ++expert)
    for (int64_t row = 0; row < matrix.rows; ++row)
      decode_row(matrix, expert, row, out.data() + (expert * matrix.rows + row) * matrix.cols);
  return out;
}

}  // namespace beryl
