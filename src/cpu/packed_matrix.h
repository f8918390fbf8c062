// Weights of the integer formats as the integer kernels read them: sixteen rows side by side.
//
// A tile holds 16 rows. Its columns come in groups of 32; the codes of a group are vectors of 64 bytes, in which lane r
// (4 bytes) holds consecutive columns of row r. So a dot instruction that adds four products of bytes to a 32-bit
// lane needs no shuffle, a lane's sum belongs to one row, and no sum is ever folded across lanes.
//
//   code vectors of a group, columns of byte b of a lane
//     8 bits   8 vectors: vector v holds column 4 v + b
//     4 bits   4 vectors: vector v holds column 4 v + b in the low nibble, 16 + 4 v + b in the high one
//     5 bits   as 4 bits, and 1 vector more: its bit v is the fifth bit of column 4 v + b
//     6 bits   as 4 bits, and 2 more: bits 2 f, 2 f + 1 of vector h are the high bits of column 4 (4 h + f) + b
//
// Memory is read fastest as one stream without gaps, so a tile is a row of blocks: the scales of a few groups in whole
// lines of 64 bytes, then the codes of these groups. The last block of a tile may have fewer groups.
//                      groups  scales of a block
//     Q4_0 Q5_0 Q8_0     2     a group: f16[16]
//     Q4_1 Q5_1          1     f16[16] scales, f16[16] mins
//     Q4_K Q5_K          8     f16[16] d, f16[16] dmin, then a group: u8[16] scales, u8[16] mins
//     Q6_K               8     f16[16] d, 32 bytes unused, then a group: i8[2][16], a row for each half of its columns
//     MXFP4              4     a group: E8M0[16]
//     NVFP4              2     a group: UE4M3[2][16], NaN (0x7f) as 0
//     FP4 g128           8     each 4 groups: bf16[16]
//
// As many bits a weight as in the file, but for the K formats, where scales of 6 bits take 8 (2.8 % of Q4_K), and Q6_K
// (1 %). Codes are unsigned: Q8_0's have their sign bit flipped. Rows behind the last are zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl {

inline constexpr int kTileRows = 16;
inline constexpr int kGroupCols = 32;

struct PackedLayout {
  int group_code_bytes;
  int block_groups;
  int block_scale_bytes;

  constexpr int64_t block_bytes() const { return block_scale_bytes + int64_t{block_groups} * group_code_bytes; }
  constexpr int64_t tile_bytes(int64_t n_groups) const {
    return (n_groups + block_groups - 1) / block_groups * block_scale_bytes + n_groups * group_code_bytes;
  }
};
constexpr PackedLayout packed_layout(Format format) {
  switch (format) {
    case Format::kQ8_0: return {512, 2, 64};
    case Format::kQ4_1: return {256, 1, 64};
    case Format::kQ5_0: return {320, 2, 64};
    case Format::kQ5_1: return {320, 1, 64};
    case Format::kQ4_K: return {256, 8, 64 + 8 * 32};
    case Format::kQ5_K: return {320, 8, 64 + 8 * 32};
    case Format::kQ6_K: return {384, 8, 64 + 8 * 32};
    case Format::kMxfp4: return {256, 4, 64};
    case Format::kFp4G128: return {256, 8, 64};
    default: return {256, 2, 64};   // Q4_0, NVFP4
  }
}

struct PackedMatrix {
  const uint8_t* data = nullptr;   // [stack][tiles][tile_bytes], 64-byte aligned; null: not packed
  int64_t tile_bytes = 0;          // a multiple of 64
  int64_t n_tiles = 0;             // of one expert

  const uint8_t* tile(int64_t expert, int64_t index) const { return data + (expert * n_tiles + index) * tile_bytes; }
};

int64_t packed_tile_bytes(Format format, int64_t cols);
// Bytes of the whole matrix, packed. Requires has_integer_codes.
int64_t packed_bytes(const HostMatrix& matrix);

// One tile of a matrix to `to` (packed_tile_bytes).
void pack_tile(const HostMatrix& matrix, int64_t expert, int64_t tile, uint8_t* to);

}  // namespace beryl
