// Single weights out of packed tiles (matvec_layout.h), for what reads rows instead of streams: Embed, and
// the expansion of weights for matrix products. The same on the host and in kernels; tested on the host against unpack_row.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/rng.h"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

// The numbers of a MatvecPlan that finding a weight takes.
struct PackedMatrix {
  const uint8_t* packed;            // [packed_bytes]
  Format format;
  bool gated;
  int64_t rows;
  int64_t cols;
  int row_warps;
  int k_warps;
  int n_stages;
  int n_column_tiles;
  int tile_columns;
  int code_bytes;
  int meta_bytes;
  int64_t stage_bytes;
  int64_t unit_bytes;
  int64_t scales_offset;            // 0: no row scales
};

inline PackedMatrix packed_matrix(const MatvecPlan& plan, const uint8_t* packed) {
  const TileShape tile = tile_shape(plan.format);
  return {packed,         plan.format,       plan.gated,      plan.rows,       plan.cols,
          plan.row_warps, plan.k_warps,      plan.n_stages,   plan.n_column_tiles, tile.columns, tile.code_bytes,
          tile.meta_bytes, plan.stage_bytes, plan.unit_bytes, plan.scales_offset};
}

// Row r of one tile.
struct PackedTileRow {
  const uint8_t* codes;             // of the tile
  const uint8_t* meta;
  int r;
  float row_scale;                  // 1: none
};

BERYL_HOST_DEVICE inline PackedTileRow packed_tile_row(const PackedMatrix& matrix, int64_t row, int column_tile) {
  const int64_t half = matrix.rows / 2;
  const int64_t tile = matrix.gated ? row % half / 8 : row / kTileRows;
  const int r = static_cast<int>(matrix.gated ? row % half % 8 + row / half * 8 : row % kTileRows);
  const StageWarp place = stage_of_column(matrix.n_stages, matrix.k_warps, column_tile);
  const int index = place.k * matrix.row_warps + static_cast<int>(tile % matrix.row_warps);
  const uint8_t* at = matrix.packed + tile / matrix.row_warps * matrix.unit_bytes + place.stage * matrix.stage_bytes;
  PackedTileRow result = {at + index * matrix.code_bytes,
                          at + matrix.k_warps * matrix.row_warps * matrix.code_bytes + index * matrix.meta_bytes, r, 1.0f};
  if (matrix.scales_offset != 0)
    memcpy(&result.row_scale, matrix.packed + matrix.scales_offset + (tile * kTileRows + r) * 4, 4);
  return result;
}

namespace packed_detail {

BERYL_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
BERYL_HOST_DEVICE inline uint32_t load16(const uint8_t* from) { return uint32_t{from[0]} | uint32_t{from[1]} << 8; }
BERYL_HOST_DEVICE inline float half_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return float_of(sign | magnitude << 13) * 0x1p112f;
}
BERYL_HOST_DEVICE inline float e4m3_float(uint32_t bits) {
  const uint32_t sign = (bits & 0x80u) << 24, magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return float_of(sign | 0x7fc00000u);
  return float_of(sign | magnitude << 20) * 0x1p120f;
}
BERYL_HOST_DEVICE inline float e2m1_doubled(int code) {
  const auto magnitude = static_cast<float>(0xc8643210u >> (4 * (code & 7)) & 0xfu);
  return (code & 8) != 0 ? -magnitude : magnitude;
}
BERYL_HOST_DEVICE inline float mxfp4_scale(uint32_t exponent) {   // half of it, as weights/decode.h has it
  return float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}
BERYL_HOST_DEVICE inline float nvfp4_scale(uint32_t scale) {      // likewise
  if (scale == 0x7f) return 0.0f;
  const uint32_t exponent = scale >> 3 & 0xfu;
  const auto mantissa = static_cast<float>(scale & 7u);
  return exponent == 0 ? mantissa * 0x1p-10f : (8.0f + mantissa) * float_of((exponent + 116u) << 23);
}

// Code places within a tile, as matvec_layout.cpp writes them.
struct IntegerPlace {
  int step, half, lane, i;
};
BERYL_HOST_DEVICE inline IntegerPlace integer_place(int r, int column) {
  return {column / 32, column / 16 % 2, r % 8 * 4 + column / 4 % 4, column % 4};
}
BERYL_HOST_DEVICE inline int e2m1_code(const uint8_t* tile, int r, int column) {
  const IntegerPlace at = integer_place(r, column);
  const int nibble = at.half * 4 + at.i;
  return tile[r / 8 * 512 + at.lane * 16 + at.step * 4 + nibble / 2] >> (nibble % 2 * 4) & 15;
}
BERYL_HOST_DEVICE inline int nibble_code(const uint8_t* tile, int r, int column) {
  const IntegerPlace at = integer_place(r, column);
  return tile[r / 8 * 512 + at.lane * 16 + (at.step / 2 * 2 + at.half) * 4 + at.i] >> (at.step % 2 * 4) & 15;
}
BERYL_HOST_DEVICE inline int low_bit(const uint8_t* tile, int r, int column) {
  const IntegerPlace at = integer_place(r, column);
  return tile[1024 + at.lane * 8 + r / 8 * 4 + at.i] >> (at.step * 2 + at.half) & 1;
}
BERYL_HOST_DEVICE inline int low_pair(const uint8_t* tile, int r, int column) {
  const IntegerPlace at = integer_place(r, column);
  return tile[1024 + at.lane * 16 + r / 8 * 8 + at.step / 2 * 4 + at.i] >> ((at.step % 2 * 2 + at.half) * 2) & 3;
}
BERYL_HOST_DEVICE inline int byte_code(const uint8_t* tile, int r, int column) {
  const IntegerPlace at = integer_place(r, column);
  return tile[(r / 8 * 2 + at.step / 2) * 512 + at.lane * 16 + (at.step % 2 * 2 + at.half) * 4 + at.i];
}
BERYL_HOST_DEVICE inline uint32_t float8_code(const uint8_t* tile, int r, int column) {
  const int step = column / 16, half = column / 8 % 2, lane = r % 8 * 4 + column / 2 % 4;
  return tile[(r / 8 * 2 + step / 4) * 512 + lane * 16 + step % 4 * 4 + half * 2 + column % 2];
}
BERYL_HOST_DEVICE inline uint32_t float16_code(const uint8_t* tile, int r, int column) {
  const int step = column / 16, half = column / 8 % 2, lane = r % 8 * 4 + column / 2 % 4;
  return load16(tile + (r / 8 * 2 + step / 2) * 512 + lane * 16 + (step % 2 * 2 + half) * 4 + column % 2 * 2);
}
BERYL_HOST_DEVICE inline float signed_code(int code, int bits) {
  return static_cast<float>((code ^ 1 << (bits - 1)) - (1 << (bits - 1)));
}

}  // namespace packed_detail

// The weight in column `column` of the tile (not of the matrix), in the float operations of weights/decode.h.
BERYL_HOST_DEVICE inline float packed_weight(Format format, const PackedTileRow& row, int column) {
  namespace d = packed_detail;
  const int r = row.r, group = column / 32;
  float value = 0;
  switch (format) {
    case Format::kFp4G128:
      value = 0.5f * d::e2m1_doubled(d::e2m1_code(row.codes, r, column)) *
              d::float_of(d::load16(row.meta + (r % 8 * 2 + r / 8) * 2) << 16);
      break;
    case Format::kMxfp4:
      value = d::mxfp4_scale(row.meta[r * 4 + group]) * d::e2m1_doubled(d::e2m1_code(row.codes, r, column));
      break;
    case Format::kNvfp4:
      value = d::nvfp4_scale(row.meta[r * 8 + column / 16]) * d::e2m1_doubled(d::e2m1_code(row.codes, r, column));
      break;
    case Format::kQ4_0:
      value = d::half_float(d::load16(row.meta + r * 8 + group * 2)) * d::signed_code(d::nibble_code(row.codes, r, column), 4);
      break;
    case Format::kQ5_0: {
      const int code = d::nibble_code(row.codes, r, column) << 1 | d::low_bit(row.codes, r, column);
      value = d::half_float(d::load16(row.meta + r * 8 + group * 2)) * d::signed_code(code, 5);
      break;
    }
    case Format::kQ8_0:
      value = d::signed_code(d::byte_code(row.codes, r, column), 8) * d::half_float(d::load16(row.meta + r * 8 + group * 2));
      break;
    case Format::kQ4_1:
    case Format::kQ5_1: {
      int code = d::nibble_code(row.codes, r, column);
      if (format == Format::kQ5_1) code = code << 1 | d::low_bit(row.codes, r, column);
      value = d::half_float(d::load16(row.meta + r * 16 + group * 2)) * static_cast<float>(code) +
              d::half_float(d::load16(row.meta + r * 16 + 8 + group * 2));
      break;
    }
    case Format::kQ4_K:
    case Format::kQ5_K: {
      int code = d::nibble_code(row.codes, r, column);
      if (format == Format::kQ5_K) code = code << 1 | d::low_bit(row.codes, r, column);
      const uint8_t* block = row.meta + kTileRows * 8 + r * 4;
      const float scale = d::half_float(d::load16(block)) * static_cast<float>(row.meta[r * 8 + group]);
      const float min = d::half_float(d::load16(block + 2)) * static_cast<float>(row.meta[r * 8 + 4 + group]);
      value = scale * static_cast<float>(code) - min;
      break;
    }
    case Format::kQ6_K: {
      const int code = d::nibble_code(row.codes, r, column) << 2 | d::low_pair(row.codes, r, column);
      const float scale = d::half_float(d::load16(row.meta + kTileRows * 8 + r * 2)) *
                          static_cast<float>(static_cast<int8_t>(row.meta[r * 8 + column / 16]));
      value = scale * d::signed_code(code, 6);
      break;
    }
    case Format::kFp8: value = d::e4m3_float(d::float8_code(row.codes, r, column)); break;
    case Format::kF16: value = d::half_float(d::float16_code(row.codes, r, column)); break;
    case Format::kBf16: value = d::float_of(d::float16_code(row.codes, r, column) << 16); break;
    default: break;
  }
  return row.row_scale == 1.0f ? value : value * row.row_scale;
}

}  // namespace beryl::cuda
