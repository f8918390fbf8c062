// Scalar decoding of every format; the float operations are in the order that decode.h states.
#include "weights/decode.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "weights/blocks.h"

namespace beryl {

namespace {

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Weight i of a 32-weight block with nibbles split in halves: low nibbles first.
inline int nibble(const uint8_t codes[16], int i) { return i < 16 ? codes[i] & 0xf : codes[i - 16] >> 4; }

// Bit i of four little-endian bytes.
inline int bit_of(const uint8_t bits[4], int i) { return (bits[i / 8] >> (i % 8)) & 1; }

}  // namespace

void decode_f32(const std::byte* blocks, int64_t n_blocks, float* out) {
  if (n_blocks > 0) std::memcpy(out, blocks, static_cast<size_t>(n_blocks) * sizeof(float));
}

void decode_f16(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t i = 0; i < n_blocks; ++i) out[i] = f16_to_f32(load<uint16_t>(blocks + 2 * i));
}

void decode_bf16(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t i = 0; i < n_blocks; ++i) out[i] = bf16_to_f32(load<uint16_t>(blocks + 2 * i));
}

void decode_q4_0(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockQ4_0>(blocks + b * static_cast<int64_t>(sizeof(BlockQ4_0)));
    const float scale = f16_to_f32(block.scale);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(nibble(block.codes, i) - 8);
  }
}

void decode_q4_1(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockQ4_1>(blocks + b * static_cast<int64_t>(sizeof(BlockQ4_1)));
    const float scale = f16_to_f32(block.scale);
    const float min = f16_to_f32(block.min);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(nibble(block.codes, i)) + min;
  }
}

void decode_q5_0(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockQ5_0>(blocks + b * static_cast<int64_t>(sizeof(BlockQ5_0)));
    const float scale = f16_to_f32(block.scale);
    for (int i = 0; i < 32; ++i) {
      const int code = nibble(block.codes, i) | bit_of(block.high_bits, i) << 4;
      out[i] = scale * static_cast<float>(code - 16);
    }
  }
}

void decode_q5_1(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockQ5_1>(blocks + b * static_cast<int64_t>(sizeof(BlockQ5_1)));
    const float scale = f16_to_f32(block.scale);
    const float min = f16_to_f32(block.min);
    for (int i = 0; i < 32; ++i) {
      const int code = nibble(block.codes, i) | bit_of(block.high_bits, i) << 4;
      out[i] = scale * static_cast<float>(code) + min;
    }
  }
}

void decode_q8_0(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockQ8_0>(blocks + b * static_cast<int64_t>(sizeof(BlockQ8_0)));
    const float scale = f16_to_f32(block.scale);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(block.codes[i]) * scale;
  }
}

GroupScales unpack_scales_and_mins(const uint8_t packed[12]) {
  // Bytes 0..3: low 6 bits scales 0..3, top 2 bits the high bits of scales 4..7. Bytes 4..7: the same for mins.
  // Bytes 8..11: low nibbles of scales 4..7 below, low nibbles of mins 4..7 above.
  GroupScales groups;
  for (int g = 0; g < 4; ++g) {
    groups.scales[g] = packed[g] & 0x3f;
    groups.mins[g] = packed[4 + g] & 0x3f;
    groups.scales[4 + g] = static_cast<uint8_t>((packed[8 + g] & 0x0f) | (packed[g] >> 2 & 0x30));
    groups.mins[4 + g] = static_cast<uint8_t>(packed[8 + g] >> 4 | (packed[4 + g] >> 2 & 0x30));
  }
  return groups;
}

void decode_q4_k(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 256) {
    const auto block = load<BlockQ4_K>(blocks + b * static_cast<int64_t>(sizeof(BlockQ4_K)));
    const float d = f16_to_f32(block.scale);
    const float d_min = f16_to_f32(block.min_scale);
    const GroupScales groups = unpack_scales_and_mins(block.scales);
    for (int g = 0; g < 8; ++g) {
      const float scale = d * static_cast<float>(groups.scales[g]);
      const float min = d_min * static_cast<float>(groups.mins[g]);
      for (int i = 0; i < 32; ++i) {
        const int code = block.codes[g / 2 * 32 + i] >> (g % 2 * 4) & 0xf;
        out[g * 32 + i] = scale * static_cast<float>(code) - min;
      }
    }
  }
}

void decode_q5_k(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 256) {
    const auto block = load<BlockQ5_K>(blocks + b * static_cast<int64_t>(sizeof(BlockQ5_K)));
    const float d = f16_to_f32(block.scale);
    const float d_min = f16_to_f32(block.min_scale);
    const GroupScales groups = unpack_scales_and_mins(block.scales);
    for (int g = 0; g < 8; ++g) {
      const float scale = d * static_cast<float>(groups.scales[g]);
      const float min = d_min * static_cast<float>(groups.mins[g]);
      for (int i = 0; i < 32; ++i) {
        const int code = (block.codes[g / 2 * 32 + i] >> (g % 2 * 4) & 0xf) | (block.high_bits[i] >> g & 1) << 4;
        out[g * 32 + i] = scale * static_cast<float>(code) - min;
      }
    }
  }
}

void decode_q6_k(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 256) {
    const auto block = load<BlockQ6_K>(blocks + b * static_cast<int64_t>(sizeof(BlockQ6_K)));
    const float d = f16_to_f32(block.scale);
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128;
      const int within = i % 128;
      const int low = block.low_bits[half * 64 + within % 64] >> (within / 64 * 4) & 0xf;
      const int high = block.high_bits[half * 32 + within % 32] >> (within / 32 * 2) & 3;
      const float scale = d * static_cast<float>(block.scales[i / 16]);
      out[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
}

float mxfp4_half_scale(uint8_t exponent) {
  // 2^-128 and 2^-127 are subnormal.
  const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (uint32_t{exponent} - 1u) << 23;
  return std::bit_cast<float>(bits);
}

void decode_mxfp4(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 32) {
    const auto block = load<BlockMxfp4>(blocks + b * static_cast<int64_t>(sizeof(BlockMxfp4)));
    const float scale = mxfp4_half_scale(block.exponent);
    for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(kE2m1Doubled[nibble(block.codes, i)]);
  }
}

float nvfp4_half_scale(uint8_t scale) {
  if (scale == 0x7f) return 0.0f;
  const int exponent = scale >> 3 & 0xf;
  const float mantissa = static_cast<float>(scale & 7);
  if (exponent == 0) return mantissa * 0x1p-10f;
  // (1 + mantissa / 8) * 2^(exponent - 7) / 2
  return (8.0f + mantissa) * std::bit_cast<float>(static_cast<uint32_t>(exponent - 11 + 127) << 23);
}

void decode_nvfp4(const std::byte* blocks, int64_t n_blocks, float* out) {
  for (int64_t b = 0; b < n_blocks; ++b, out += 64) {
    const auto block = load<BlockNvfp4>(blocks + b * static_cast<int64_t>(sizeof(BlockNvfp4)));
    for (int g = 0; g < 4; ++g) {
      const float scale = nvfp4_half_scale(block.scales[g]);
      for (int i = 0; i < 8; ++i) {
        const uint8_t pair = block.codes[g * 8 + i];
        out[g * 16 + i] = scale * static_cast<float>(kE2m1Doubled[pair & 0xf]);
        out[g * 16 + 8 + i] = scale * static_cast<float>(kE2m1Doubled[pair >> 4]);
      }
    }
  }
}

void decode_blocks(Format format, const std::byte* blocks, int64_t n_blocks, float* out) {
  switch (format) {
    case Format::kF32: return decode_f32(blocks, n_blocks, out);
    case Format::kF16: return decode_f16(blocks, n_blocks, out);
    case Format::kBf16: return decode_bf16(blocks, n_blocks, out);
    case Format::kQ4_0: return decode_q4_0(blocks, n_blocks, out);
    case Format::kQ4_1: return decode_q4_1(blocks, n_blocks, out);
    case Format::kQ5_0: return decode_q5_0(blocks, n_blocks, out);
    case Format::kQ5_1: return decode_q5_1(blocks, n_blocks, out);
    case Format::kQ8_0: return decode_q8_0(blocks, n_blocks, out);
    case Format::kQ4_K: return decode_q4_k(blocks, n_blocks, out);
    case Format::kQ5_K: return decode_q5_k(blocks, n_blocks, out);
    case Format::kQ6_K: return decode_q6_k(blocks, n_blocks, out);
    case Format::kMxfp4: return decode_mxfp4(blocks, n_blocks, out);
    case Format::kNvfp4: return decode_nvfp4(blocks, n_blocks, out);
    case Format::kFp4G128:
    case Format::kFp8:
    case Format::kI32:
    case Format::kI64:
    case Format::kU8: break;
  }
  BERYL_CHECK(false, "decode_blocks takes weight formats of one plane");
}

void decode_fp4_g128(const std::byte* codes, const std::byte* scales, int64_t n_groups, float* out) {
  for (int64_t g = 0; g < n_groups; ++g, out += kFp4GroupWeights) {
    const float scale = bf16_to_f32(load<uint16_t>(scales + 2 * g));
    const std::byte* group = codes + g * (kFp4GroupWeights / 2);
    for (int i = 0; i < kFp4GroupWeights / 2; ++i) {
      const auto pair = static_cast<uint8_t>(group[i]);
      out[2 * i] = kE2m1Values[pair & 0xf] * scale;
      out[2 * i + 1] = kE2m1Values[pair >> 4] * scale;
    }
  }
}

void decode_fp8(const std::byte* codes, const std::byte* scale, int64_t n_weights, float* out) {
  const auto row_scale = load<float>(scale);
  for (int64_t i = 0; i < n_weights; ++i) out[i] = e4m3_to_f32(static_cast<uint8_t>(codes[i])) * row_scale;
}

}  // namespace beryl
