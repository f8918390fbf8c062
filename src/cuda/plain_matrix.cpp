// Disk blocks to planes, on the host.
#include "cuda/plain_matrix.h"

#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl::cuda {

namespace {

template <class Block>
Block load_block(const std::byte* row, int64_t index) {
  Block block;
  std::memcpy(&block, row + index * static_cast<int64_t>(sizeof(Block)), sizeof(Block));
  return block;
}

// Code i of a block whose low nibbles are its first half.
template <size_t kBytes>
int half_nibble(const uint8_t (&codes)[kBytes], int i) {
  const int half = static_cast<int>(kBytes);
  return i < half ? codes[i] & 0xf : codes[i - half] >> 4;
}

int high_bit(const uint8_t (&bits)[4], int i) { return bits[i / 8] >> (i % 8) & 1; }

struct RowWriter {
  std::byte* codes;
  float* scales;
  float* mins;

  void put_int8(int64_t column, int code) { codes[column] = static_cast<std::byte>(static_cast<int8_t>(code)); }
  void put_nibble(int64_t column, int code) {
    const auto shifted = static_cast<std::byte>(code << (column % 2 * 4));
    codes[column / 2] = (codes[column / 2] & static_cast<std::byte>(column % 2 == 0 ? 0xf0 : 0x0f)) | shifted;
  }
};

// The blocks of one row, by format; n_blocks of them.
void import_blocks(Format format, const std::byte* row, int64_t n_blocks, RowWriter out) {
  for (int64_t b = 0; b < n_blocks; ++b) {
    switch (format) {
      case Format::kQ4_0: {
        const auto block = load_block<BlockQ4_0>(row, b);
        out.scales[b] = f16_to_f32(block.scale);
        out.mins[b] = 8.0f * out.scales[b];
        for (int i = 0; i < 32; ++i) out.put_nibble(b * 32 + i, half_nibble(block.codes, i));
        break;
      }
      case Format::kQ4_1: {
        const auto block = load_block<BlockQ4_1>(row, b);
        out.scales[b] = f16_to_f32(block.scale);
        out.mins[b] = -f16_to_f32(block.min);
        for (int i = 0; i < 32; ++i) out.put_nibble(b * 32 + i, half_nibble(block.codes, i));
        break;
      }
      case Format::kQ5_0: {
        const auto block = load_block<BlockQ5_0>(row, b);
        out.scales[b] = f16_to_f32(block.scale);
        for (int i = 0; i < 32; ++i)
          out.put_int8(b * 32 + i, (half_nibble(block.codes, i) | high_bit(block.high_bits, i) << 4) - 16);
        break;
      }
      case Format::kQ5_1: {
        const auto block = load_block<BlockQ5_1>(row, b);
        out.scales[b] = f16_to_f32(block.scale);
        out.mins[b] = -f16_to_f32(block.min);
        for (int i = 0; i < 32; ++i)
          out.put_int8(b * 32 + i, half_nibble(block.codes, i) | high_bit(block.high_bits, i) << 4);
        break;
      }
      case Format::kQ8_0: {
        const auto block = load_block<BlockQ8_0>(row, b);
        out.scales[b] = f16_to_f32(block.scale);
        for (int i = 0; i < 32; ++i) out.put_int8(b * 32 + i, block.codes[i]);
        break;
      }
      case Format::kQ4_K: {
        const auto block = load_block<BlockQ4_K>(row, b);
        const float scale = f16_to_f32(block.scale), min_scale = f16_to_f32(block.min_scale);
        const GroupScales groups = unpack_scales_and_mins(block.scales);
        for (int g = 0; g < 8; ++g) {
          out.scales[b * 8 + g] = scale * static_cast<float>(groups.scales[g]);
          out.mins[b * 8 + g] = min_scale * static_cast<float>(groups.mins[g]);
          for (int i = 0; i < 32; ++i)
            out.put_nibble(b * 256 + g * 32 + i, block.codes[g / 2 * 32 + i] >> (g % 2 * 4) & 0xf);
        }
        break;
      }
      case Format::kQ5_K: {
        const auto block = load_block<BlockQ5_K>(row, b);
        const float scale = f16_to_f32(block.scale), min_scale = f16_to_f32(block.min_scale);
        const GroupScales groups = unpack_scales_and_mins(block.scales);
        for (int g = 0; g < 8; ++g) {
          out.scales[b * 8 + g] = scale * static_cast<float>(groups.scales[g]);
          out.mins[b * 8 + g] = min_scale * static_cast<float>(groups.mins[g]);
          for (int i = 0; i < 32; ++i)
            out.put_int8(b * 256 + g * 32 + i,
                         (block.codes[g / 2 * 32 + i] >> (g % 2 * 4) & 0xf) | (block.high_bits[i] >> g & 1) << 4);
        }
        break;
      }
      case Format::kQ6_K: {
        const auto block = load_block<BlockQ6_K>(row, b);
        const float scale = f16_to_f32(block.scale);
        for (int g = 0; g < 16; ++g) out.scales[b * 16 + g] = scale * static_cast<float>(block.scales[g]);
        for (int i = 0; i < 256; ++i) {
          const int half = i / 128, within = i % 128;
          const int low = block.low_bits[half * 64 + within % 64] >> (within / 64 * 4) & 0xf;
          const int high = block.high_bits[half * 32 + within % 32] >> (within / 32 * 2) & 3;
          out.put_int8(b * 256 + i, (low | high << 4) - 32);
        }
        break;
      }
      case Format::kMxfp4: {
        const auto block = load_block<BlockMxfp4>(row, b);
        out.scales[b] = mxfp4_half_scale(block.exponent);
        for (int i = 0; i < 32; ++i) out.put_nibble(b * 32 + i, half_nibble(block.codes, i));
        break;
      }
      case Format::kNvfp4: {
        const auto block = load_block<BlockNvfp4>(row, b);
        for (int g = 0; g < 4; ++g) {
          out.scales[b * 4 + g] = nvfp4_half_scale(block.scales[g]);
          for (int i = 0; i < 16; ++i)
            out.put_nibble(b * 64 + g * 16 + i, block.codes[g * 8 + i % 8] >> (i / 8 * 4) & 0xf);
        }
        break;
      }
      default: BERYL_CHECK(false, "import_blocks takes block formats");
    }
  }
}

}  // namespace

PlainShape plain_shape(const HostMatrix& matrix) {
  PlainShape shape;
  shape.rows = matrix.rows;
  shape.stack = matrix.stack;
  shape.cols = matrix.cols;
  const auto set = [&](PlainCodes codes, int bits, int group_shift, bool has_scales, bool has_mins) {
    shape.codes = codes;
    shape.bits = bits;
    shape.group_shift = group_shift;
    shape.has_scales = has_scales;
    shape.has_mins = has_mins;
  };
  switch (matrix.format) {
    case Format::kF32: set(PlainCodes::kF32, 32, kWholeRow, false, false); break;
    case Format::kF16: set(PlainCodes::kF16, 16, kWholeRow, false, false); break;
    case Format::kBf16: set(PlainCodes::kBf16, 16, kWholeRow, false, false); break;
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ4_K: set(PlainCodes::kNibble, 4, 5, true, true); break;
    case Format::kQ5_0:
    case Format::kQ8_0: set(PlainCodes::kInt8, 8, 5, true, false); break;
    case Format::kQ5_1:
    case Format::kQ5_K: set(PlainCodes::kInt8, 8, 5, true, true); break;
    case Format::kQ6_K: set(PlainCodes::kInt8, 8, 4, true, false); break;
    case Format::kMxfp4: set(PlainCodes::kE2m1, 4, 5, true, false); break;
    case Format::kNvfp4: set(PlainCodes::kE2m1, 4, 4, true, false); break;
    case Format::kFp4G128: set(PlainCodes::kE2m1, 4, 7, true, false); break;
    case Format::kFp8: set(PlainCodes::kE4m3, 8, kWholeRow, true, false); break;
    case Format::kI32:
    case Format::kI64:
    case Format::kU8: BERYL_CHECK(false, "integers are no weights");
  }
  shape.padded_cols = (matrix.cols + kPlainColumns - 1) / kPlainColumns * kPlainColumns;
  shape.row_code_bytes = shape.padded_cols * shape.bits / 8;
  const int64_t group = int64_t{1} << shape.group_shift;
  shape.row_groups = shape.has_scales ? (shape.padded_cols + group - 1) / group : 0;
  return shape;
}

void import_plain_row(const HostMatrix& matrix, const PlainShape& shape, int64_t expert, int64_t row, std::byte* codes,
                      float* scales, float* mins) {
  const std::byte* from = matrix.row_codes(expert, row);
  std::memset(codes, 0, static_cast<size_t>(shape.row_code_bytes));
  for (int64_t g = 0; g < shape.row_groups; ++g) {
    scales[g] = 0;
    if (shape.has_mins) mins[g] = 0;
  }
  const FormatInfo& format = info(matrix.format);
  if (format.scale_group >= 0) {
    const std::byte* scale = matrix.row_scales(expert, row);
    std::memcpy(codes, from, static_cast<size_t>(row_bytes(matrix.format, matrix.cols)));
    if (matrix.format == Format::kFp8) {
      std::memcpy(scales, scale, sizeof(float));
    } else {
      for (int64_t g = 0; g < matrix.cols / kFp4GroupWeights; ++g) {
        uint16_t bits;
        std::memcpy(&bits, scale + 2 * g, sizeof(bits));
        scales[g] = 0.5f * bf16_to_f32(bits);
      }
    }
  } else if (!shape.has_scales) {
    std::memcpy(codes, from, static_cast<size_t>(row_bytes(matrix.format, matrix.cols)));
  } else {
    import_blocks(matrix.format, from, matrix.cols / format.block_weights, {codes, scales, mins});
  }
}

}  // namespace beryl::cuda
