// The layout of matrices that the packed layout (matvec_layout.h) does not take: experts, odd shapes, F32.
//
// Codes, scales and mins are planes of their own, a row after the other: w = tensor_scale · (scale · code - min). Rows are
// padded with zero weights to a multiple of 32 columns, so that a lane always loads 8 codes at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl::cuda {

enum class PlainCodes : uint8_t {
  kF32,       // 32 bits, no scales
  kF16,       // 16 bits, no scales
  kBf16,      // 16 bits, no scales
  kInt8,      // signed
  kNibble,    // unsigned 0..15, two a byte, low nibble = even column
  kE2m1,      // doubled: code values 0, 1, 2, 3, 4, 6, 8, 12 and their negatives; scales are halved. Packed as kNibble
  kE4m3,
};

inline constexpr int kPlainColumns = 32;       // rows are padded to a multiple
inline constexpr int kWholeRow = 30;           // group_shift of one scale a row: every column >> 30 is 0

// Sizes that follow from a host matrix.
struct PlainShape {
  PlainCodes codes = PlainCodes::kF32;
  int bits = 32;                    // a code
  int group_shift = kWholeRow;      // columns a scale: 1 << group_shift
  bool has_scales = false;
  bool has_mins = false;
  int64_t rows = 0;                 // of one expert
  int64_t stack = 1;
  int64_t cols = 0;
  int64_t padded_cols = 0;
  int64_t row_code_bytes = 0;
  int64_t row_groups = 0;

  int64_t code_bytes() const { return stack * rows * row_code_bytes; }
  int64_t scale_bytes() const { return has_scales ? stack * rows * row_groups * 4 : 0; }
  int64_t min_bytes() const { return has_mins ? stack * rows * row_groups * 4 : 0; }
  int64_t bytes() const { return code_bytes() + scale_bytes() + min_bytes(); }
};
PlainShape plain_shape(const HostMatrix& matrix);

// One row of one expert: codes [row_code_bytes], scales and mins [row_groups], untouched where the shape has none.
void import_plain_row(const HostMatrix& matrix, const PlainShape& shape, int64_t expert, int64_t row, std::byte* codes,
                      float* scales, float* mins);

// The matrix on the device, as kernels see it.
struct PlainMatrix {
  const uint8_t* codes;             // [stack][rows][row_code_bytes]
  const float* scales;              // [stack][rows][row_groups], null: 1
  const float* mins;                // likewise, null: 0
  float tensor_scale;
  PlainCodes kind;
  int group_shift;
  int64_t rows;
  int64_t cols;
  int64_t padded_cols;
  int64_t row_code_bytes;
  int64_t row_groups;
};

}  // namespace beryl::cuda
