#include "ops/random_matrix.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/float_formats.h"
#include "weights/blocks.h"

namespace beryl {
namespace {

void fill_bytes(RandomStream& random, void* out, size_t n_bytes) {
  auto* to = static_cast<unsigned char*>(out);
  for (size_t i = 0; i < n_bytes; i += 8) {
    const uint64_t bits = random.bits();
    std::memcpy(to + i, &bits, std::min<size_t>(8, n_bytes - i));
  }
}

// An f16 scale near `typical`; one in sixteen is an edge: zero, negative, subnormal.
uint16_t random_scale(RandomStream& random, float typical) {
  const uint16_t usual = f32_to_f16(typical * random.between(0.5f, 1.5f));
  switch (random.below(48)) {
    case 0: return 0;
    case 1: return usual | 0x8000u;
    case 2: return static_cast<uint16_t>(1 + random.below(0x3ff));
    default: return usual;
  }
}

template <class Block>
Block with_random_bytes(RandomStream& random) {
  Block block;
  fill_bytes(random, &block, sizeof(block));
  return block;
}

// One block of the code plane. amplitude: the weights' order of magnitude.
void fill_block(Format format, RandomStream& random, float amplitude, std::byte* out) {
  const auto put = [out](const auto& block) { std::memcpy(out, &block, sizeof(block)); };
  switch (format) {
    case Format::kF32: return put(random.between(-amplitude, amplitude));
    case Format::kF16: return put(f32_to_f16(random.between(-amplitude, amplitude)));
    case Format::kBf16: return put(f32_to_bf16(random.between(-amplitude, amplitude)));
    case Format::kQ4_0: {
      auto block = with_random_bytes<BlockQ4_0>(random);
      block.scale = random_scale(random, amplitude / 8);
      return put(block);
    }
    case Format::kQ4_1: {
      auto block = with_random_bytes<BlockQ4_1>(random);
      block.scale = random_scale(random, amplitude / 8);
      block.min = random_scale(random, -amplitude);
      return put(block);
    }
    case Format::kQ5_0: {
      auto block = with_random_bytes<BlockQ5_0>(random);
      block.scale = random_scale(random, amplitude / 16);
      return put(block);
    }
    case Format::kQ5_1: {
      auto block = with_random_bytes<BlockQ5_1>(random);
      block.scale = random_scale(random, amplitude / 16);
      block.min = random_scale(random, -amplitude);
      return put(block);
    }
    case Format::kQ8_0: {
      auto block = with_random_bytes<BlockQ8_0>(random);
      block.scale = random_scale(random, amplitude / 128);
      return put(block);
    }
    case Format::kQ4_K: {  // codes up to 15 times scales of about 32; mins of about 32
      auto block = with_random_bytes<BlockQ4_K>(random);
      block.scale = random_scale(random, amplitude / (8 * 32));
      block.min_scale = random_scale(random, amplitude / 32);
      return put(block);
    }
    case Format::kQ5_K: {
      auto block = with_random_bytes<BlockQ5_K>(random);
      block.scale = random_scale(random, amplitude / (16 * 32));
      block.min_scale = random_scale(random, amplitude / 32);
      return put(block);
    }
    case Format::kQ6_K: {
      auto block = with_random_bytes<BlockQ6_K>(random);
      block.scale = random_scale(random, amplitude / (32 * 64));
      return put(block);
    }
    case Format::kMxfp4: {
      auto block = with_random_bytes<BlockMxfp4>(random);
      const int exponent = 127 + static_cast<int>(std::lround(std::log2(amplitude / 4))) + random.below(3) - 1;
      block.exponent = random.below(32) == 0 ? static_cast<uint8_t>(random.below(2)) : static_cast<uint8_t>(exponent);
      return put(block);
    }
    case Format::kNvfp4: {  // group scales 0.5 to 2, some zero, 0x7f (which means zero), subnormal or with a sign bit
      auto block = with_random_bytes<BlockNvfp4>(random);
      for (uint8_t& scale : block.scales) {
        scale = static_cast<uint8_t>(0x30 + random.below(0x11));
        switch (random.below(48)) {
          case 0: scale = 0; break;
          case 1: scale = 0x7f; break;
          case 2: scale = static_cast<uint8_t>(1 + random.below(7)); break;
          case 3: scale |= 0x80; break;
          default: break;
        }
      }
      return put(block);
    }
    case Format::kFp4G128: return fill_bytes(random, out, kFp4GroupWeights / 2);
    case Format::kFp8: {
      auto code = static_cast<uint8_t>(random.bits() >> 56);
      if ((code & 0x7f) == 0x7f) code ^= 1;   // NaN
      return put(code);
    }
    case Format::kI32:
    case Format::kI64:
    case Format::kU8: break;
  }
  BERYL_CHECK(false, "random_matrix takes weight formats");
}

void clear_mins(Format format, std::byte* block) {
  constexpr uint16_t kZero = 0;
  if (format == Format::kQ4_1) std::memcpy(block + offsetof(BlockQ4_1, min), &kZero, 2);
  if (format == Format::kQ5_1) std::memcpy(block + offsetof(BlockQ5_1, min), &kZero, 2);
  if (format == Format::kQ4_K) std::memcpy(block + offsetof(BlockQ4_K, min_scale), &kZero, 2);
  if (format == Format::kQ5_K) std::memcpy(block + offsetof(BlockQ5_K, min_scale), &kZero, 2);
}

bool has_mins(Format format) {
  return format == Format::kQ4_1 || format == Format::kQ5_1 || format == Format::kQ4_K || format == Format::kQ5_K;
}

}  // namespace

RandomMatrix random_matrix(Format format, int64_t rows, int64_t cols, int64_t stack, float tensor_scale,
                           uint64_t seed) {
  BERYL_CHECK(fits(format, cols), "random_matrix: rows are whole blocks");
  RandomStream random(seed);
  const FormatInfo& entry = info(format);
  const float amplitude = 2 / std::sqrt(static_cast<float>(cols)) / tensor_scale;
  const int64_t n_code_bytes = stack * rows * row_bytes(format, cols);
  const int64_t n_scale_bytes = stack * rows * row_scale_bytes(format, cols);
  const int64_t offset = static_cast<int64_t>(seed % 2);

  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(offset + n_code_bytes + n_scale_bytes));
  std::byte* codes = storage->data() + offset;
  for (int64_t at = 0; at < n_code_bytes; at += entry.block_bytes) fill_block(format, random, amplitude, codes + at);
  std::byte* scales = codes + n_code_bytes;
  for (int64_t at = 0; at < n_scale_bytes; at += entry.scale_bytes) {
    if (format == Format::kFp4G128) {
      const uint16_t scale = f32_to_bf16(random.below(32) == 0 ? 0.0f : amplitude / 4 * random.between(0.5f, 1.5f));
      std::memcpy(scales + at, &scale, 2);
    } else {
      const float scale = amplitude / 200 * random.between(0.5f, 1.5f);
      std::memcpy(scales + at, &scale, 4);
    }
  }

  HostMatrix matrix;
  matrix.name = std::string(entry.name);
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.stack = stack;
  matrix.codes = codes;
  matrix.scales = n_scale_bytes > 0 ? scales : nullptr;
  matrix.stack_stride_bytes = rows * row_bytes(format, cols);
  matrix.stack_scale_stride_bytes = rows * row_scale_bytes(format, cols);
  matrix.tensor_scale = tensor_scale;
  matrix.storage = storage;

  HostMatrix without_mins = matrix;
  if (has_mins(format)) {
    auto copy = std::make_shared<std::vector<std::byte>>(*storage);
    without_mins.codes = copy->data() + offset;
    for (int64_t at = 0; at < n_code_bytes; at += entry.block_bytes) clear_mins(format, copy->data() + offset + at);
    without_mins.storage = copy;
  }
  return {std::move(matrix), std::move(without_mins)};
}

}  // namespace beryl
