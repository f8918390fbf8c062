// How the kernels for few rows (decode.h, batch_linear.h) want a weight matrix to lie in device memory: host code, tested
// without a GPU. docs/formats.md of the disk ends here; the kernels see nothing but tiles.
//
// A tile is 16 rows x 128 columns (64 for 16-bit weights): the codes in the order in which the lanes of one warp feed
// them to the tensor cores, and its meta data (scales, mins). A stage is a tile for each warp that multiplies: k_warps
// column tiles of row_warps row tiles; codes first, then meta data, padded to a multiple of 128 bytes. Two stages are a
// chunk, in which each warp has two neighbouring column tiles (an odd last stage is a chunk by itself). Columns that
// the matrix does not have are tiles of zeros, so that all stages are alike. A unit is all columns of row_warps row
// tiles: whole stages. A matrix is its units, one after the other, then a scale for each row where the format (or a
// tensor scale) has one. So a block that owns a range of units reads one contiguous stream.
//
//   unit   [n_stages]  stage                      row_warps · 16 rows, all columns
//   stage  [tiles] codes, [tiles] meta, padding   warp (k, row tile r): k · row_warps + r; its column: column_tile_of
//
// The order of every sum follows from it, whoever computes it: a warp's tiles of a chunk from left to right, the warps
// of a chunk by ascending k, then the chunks.
//
// In a gated matrix (gate and up, Epilogue::kGated*) rows 0..7 of a row tile are gate rows and rows 8..15 the up rows
// of the same outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/rng.h"
#include "weights/host_matrix.h"

namespace beryl::cuda {

// Bytes of a tile's two parts.
struct TileShape {
  int columns = 0;                  // 0: the format has no tiles
  int code_bytes = 0;
  int meta_bytes = 0;
};
BERYL_HOST_DEVICE constexpr TileShape tile_shape(Format format) {
  switch (format) {
    case Format::kFp4G128: return {128, 1024, 32};
    case Format::kMxfp4: return {128, 1024, 64};
    case Format::kNvfp4: return {128, 1024, 128};
    case Format::kQ4_0: return {128, 1024, 128};
    case Format::kQ4_1: return {128, 1024, 256};
    case Format::kQ4_K: return {128, 1024, 192};
    case Format::kQ5_0: return {128, 1280, 128};
    case Format::kQ5_1: return {128, 1280, 256};
    case Format::kQ5_K: return {128, 1280, 192};
    case Format::kQ6_K: return {128, 1536, 160};
    case Format::kQ8_0: return {128, 2048, 128};
    case Format::kFp8: return {128, 2048, 0};
    case Format::kF16:
    case Format::kBf16: return {64, 2048, 0};
    default: return {};
  }
}

inline constexpr int kTileRows = 16;
inline constexpr int kMatvecWarps = 16;       // of a block that multiply; k_warps · row_warps of them have tiles
inline constexpr int kChunkStages = 2;

// One matrix of one format: parts stacked one under the other (q, k, v), or gate and up.
struct MatvecSource {
  std::vector<const HostMatrix*> parts;       // same format and cols, stack 1
  bool gated = false;                         // two parts of equal rows
};

// False: the matrix needs another kernel (F32, experts, columns that are no multiple of 32).
bool matvec_supports(const HostMatrix& matrix);

struct MatvecPlan {
  Format format = Format::kF32;
  bool gated = false;
  int64_t rows = 0;                 // of W, all parts
  int64_t cols = 0;
  int n_row_tiles = 0;
  int n_column_tiles = 0;
  int k_warps = 1;
  int row_warps = 1;
  int n_stages = 0;                 // of a unit: ceil(n_column_tiles / k_warps)
  int n_units = 0;
  int stage_bytes = 0;
  int64_t unit_bytes = 0;
  int64_t scales_offset = 0;        // where the row scales begin, f32 [n_row_tiles · 16]; 0: none
  int64_t packed_bytes = 0;         // of device memory, to be aligned to 128 bytes

  int stage_tiles() const { return k_warps * row_warps; }
  int n_chunks() const { return (n_stages + kChunkStages - 1) / kChunkStages; }
  int64_t outputs() const { return gated ? rows / 2 : rows; }   // columns of y
};

// What the scales of x are multiplied by (codec.cuh: kXScale of each format).
constexpr float codec_x_scale(Format format) {
  switch (format) {
    case Format::kFp4G128:
    case Format::kNvfp4: return 0.5f;
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ4_K: return 1.0f / 16;
    case Format::kQ5_0:
    case Format::kQ5_1:
    case Format::kQ5_K: return 1.0f / 8;
    case Format::kQ6_K: return 0.25f;
    default: return 1.0f;
  }
}
// Stages that the decode kernel likes to copy at a time: both of a chunk where its tiles are small.
BERYL_HOST_DEVICE constexpr int slot_stages(Format format) {
  const TileShape tile = tile_shape(format);
  return tile.code_bytes + tile.meta_bytes <= 1280 ? kChunkStages : 1;
}
// Which column tile warp k has in a stage, and the other way round.
BERYL_HOST_DEVICE constexpr int column_tile_of(int n_stages, int k_warps, int stage, int k) {
  const bool paired = stage < n_stages / kChunkStages * kChunkStages;
  return paired ? (stage / kChunkStages * k_warps + k) * kChunkStages + stage % kChunkStages : stage * k_warps + k;
}
struct StageWarp {
  int stage;
  int k;
};
BERYL_HOST_DEVICE constexpr StageWarp stage_of_column(int n_stages, int k_warps, int column_tile) {
  const int paired = n_stages / kChunkStages * kChunkStages * k_warps;
  if (column_tile >= paired) return {n_stages - 1, column_tile - paired};
  const int chunk = column_tile / (kChunkStages * k_warps), within = column_tile % (kChunkStages * k_warps);
  return {chunk * kChunkStages + within % kChunkStages, within / kChunkStages};
}

// n_sms only weighs how evenly units spread; the layout (and with it the order of every sum) depends on it.
MatvecPlan plan_matvec(const MatvecSource& source, int n_sms);

// The bytes of units [unit_begin, unit_end), to out[(unit_end - unit_begin) · unit_bytes]. Units are independent: call
// it from many threads, or piece by piece into a staging buffer.
void pack_units(const MatvecPlan& plan, const MatvecSource& source, int unit_begin, int unit_end, std::byte* out);
// The row scales, [n_row_tiles · 16]; only when plan.scales_offset != 0.
void pack_row_scales(const MatvecPlan& plan, const MatvecSource& source, float* out);
// All of it: packed[plan.packed_bytes].
void pack_matvec(const MatvecPlan& plan, const MatvecSource& source, std::byte* packed);

// Row `row` of W (of all parts; the rows of gate come first) out of the packed bytes, with the same float operations as
// weights/decode.h, so that it can be compared bit for bit. tensor scales are applied as decode_row does. out: [cols].
void unpack_row(const MatvecPlan& plan, const std::byte* packed, int64_t row, float* out);

struct MatvecDevice {
  int n_sms = 1;
  int shared_per_block = 0;         // bytes a block may use (cudaDevAttrMaxSharedMemoryPerBlockOptin)
  int shared_per_sm = 0;            // cudaDevAttrMaxSharedMemoryPerMultiprocessor
};
// The device's numbers; throws Error(kDevice).
MatvecDevice matvec_device();

// The units of one block: `each` = n_units / n_blocks for all, and one more for the first `more` = n_units % n_blocks. Divided on
// the host: in a kernel it would cost more than the rest of the bookkeeping.
struct BlockUnits {
  int first;
  int count;
};
BERYL_HOST_DEVICE inline BlockUnits block_units(int each, int more, int block) {
  return {block * each + (block < more ? block : more), each + (block < more ? 1 : 0)};
}

}  // namespace beryl::cuda
