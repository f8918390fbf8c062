// Weights as products read them: tiles of 32 rows. What a tile holds depends on the activations (PackedForm).
//
// In kCodes and kBf16 all rows lie side by side, in two strips of 16. Columns come in groups of 32; the codes of a group and strip are
// vectors of 64 bytes, in which lane r (4 bytes) holds consecutive columns of row r. So a dot instruction that adds four products
// of bytes to a 32-bit lane needs no shuffle, a lane's sum belongs to one row, and no sum is ever folded across lanes.
//
//   code vectors of a group and strip, columns of byte b of a lane
//     8 bits   8 vectors: vector v holds column 4 v + b
//     4 bits   4 vectors: vector v holds column 4 v + b in the low nibble, 16 + 4 v + b in the high one
//     5 bits   as 4 bits, and 1 vector more: its bit v is the fifth bit of column 4 v + b
//     6 bits   as 4 bits, and 2 more: bits 2 f, 2 f + 1 of vector h are the high bits of column 4 (4 h + f) + b
//
//   BF16       16 vectors: vector v holds columns 2 v and 2 v + 1; vector v of strip 1 lies behind that of strip 0
//
// Memory is read fastest as one stream without gaps and without steps back, so a tile is a row of blocks: what several groups share
// (a block's head), then for each group its own scales (the group's head) and its codes, strip 0 before strip 1. Heads are whole
// lines of 64 bytes. Two strips in one stream share the activations: they come to the registers half as often, and where columns are
// many the weights drive them out of the L1 cache (docs/performance.md). Of Q8_0, where that weighs least, the strips lie one behind the
// other: read together they were slower. The last block of a tile may have fewer groups.
//                      groups  head of a block             head of a group
//     Q4_0 Q5_0          1                                 f16[2][16]
//     Q8_0               2     f16[2 groups][16]
//     Q4_1 Q5_1          1                                 a strip: f16[16] scales, f16[16] mins
//     Q4_K Q5_K          8     a strip: f16[16] d,         a strip: u8[16] scales, u8[16] mins
//                              f16[16] dmin
//     Q6_K               8     f16[2][16] d                a strip: i8[2][16], a row for each half of its columns
//     MXFP4              2     E8M0[2 groups][2][16]
//     NVFP4              1                                 a strip: UE4M3[2][16], for halves; NaN (0x7f) as 0
//     FP4 g128           4     bf16[2][16]
//     BF16               1
//
// As many bits a weight as in the file, but for the K formats, where scales of 6 bits take 8 (2.8 % of Q4_K). Codes are unsigned:
// Q8_0's have their sign bit flipped. Rows behind the last are zeros; columns too (BF16's rows need not be whole groups).
//
// In kFloats a tile is eight groups of four rows, which products in f32 decode side by side: for each 32 columns those of the four
// rows, as they are in the file, zeros behind the last row and column. Read from the mapped file itself, four rows are four streams in
// small pages: less than half of the speed (docs/performance.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl {

inline constexpr int kStripRows = 16;
inline constexpr int kStrips = 2;
inline constexpr int kTileRows = kStrips * kStripRows;
inline constexpr int kGroupCols = 32;

struct PackedLayout {
  int strip_code_bytes;     // of a group and strip
  int block_groups;
  int block_head_bytes;
  int group_head_bytes;
  int strips_together = kStrips;   // 1: the whole of strip 0, then the whole of strip 1

  constexpr int group_bytes() const { return group_head_bytes + strips_together * strip_code_bytes; }
  constexpr int64_t block_bytes() const { return block_head_bytes + int64_t{block_groups} * group_bytes(); }
  // Of one stream: a tile's, or a strip's where strips are apart.
  constexpr int64_t stream_bytes(int64_t n_groups) const {
    return (n_groups + block_groups - 1) / block_groups * block_head_bytes + n_groups * group_bytes();
  }
  constexpr int64_t tile_bytes(int64_t n_groups) const { return kStrips / strips_together * stream_bytes(n_groups); }
};
constexpr PackedLayout packed_layout(Format format) {
  switch (format) {
    case Format::kQ8_0: return {512, 2, 64, 0, 1};
    case Format::kQ4_1: return {256, 1, 0, 128};
    case Format::kQ5_0: return {320, 1, 0, 64};
    case Format::kQ5_1: return {320, 1, 0, 128};
    case Format::kQ4_K: return {256, 8, 128, 64};
    case Format::kQ5_K: return {320, 8, 128, 64};
    case Format::kQ6_K: return {384, 8, 64, 64};
    case Format::kMxfp4: return {256, 2, 64, 0};
    case Format::kFp4G128: return {256, 4, 64, 0};
    case Format::kBf16: return {1024, 1, 0, 0};
    default: return {256, 1, 0, 64};   // Q4_0, NVFP4
  }
}

// By what a packed matrix is multiplied with.
enum class PackedForm : uint8_t {
  kNone,     // not packed: f32, with the file's blocks
  kCodes,    // integers, as integer_dot.h has it
  kBf16,     // bf16, as bf16_dot.h has it; weights are BF16
  kFloats,   // f32; weights are one of F32, F16, BF16, FP8
};

inline constexpr int kFloatRows = 4;   // of a group of kFloats

struct PackedMatrix {
  const uint8_t* data = nullptr;   // [stack][tiles], 64-byte aligned; null: not packed
  int64_t tile_stride = 0;         // bytes from a tile to the next, a multiple of 64; between a gate's tiles lie those of its up
  int64_t n_tiles = 0;             // of one expert
  PackedForm form = PackedForm::kNone;
  bool is_plain_fp8 = false;       // all its tiles are (is_plain_fp8)

  const uint8_t* tile(int64_t expert, int64_t index) const { return data + (expert * n_tiles + index) * tile_stride; }
};

// Bytes of 32 columns of a row of a float format, and of a group of rows of kFloats.
inline int64_t float_unit_bytes(Format format) { return row_bytes(format, kGroupCols); }
inline int64_t float_group_bytes(Format format, int64_t cols) {
  return (cols + kGroupCols - 1) / kGroupCols * kFloatRows * float_unit_bytes(format);
}

int64_t packed_tile_bytes(PackedForm form, Format format, int64_t cols);
// Bytes of the whole matrix, packed. Requires a form that the format has.
int64_t packed_bytes(PackedForm form, const HostMatrix& matrix);

// Whether a tile of FP8 holds no NaN, and scales far from overflow: it is decoded with half of the instructions then.
bool is_plain_fp8(const HostMatrix& matrix, int64_t expert, int64_t tile);

// One tile of a matrix to `to` (packed_tile_bytes).
void pack_tile(PackedForm form, const HostMatrix& matrix, int64_t expert, int64_t tile, uint8_t* to);

}  // namespace beryl
