// How the decode kernel (matvec.h) wants a weight matrix to lie in device memory, and how its work is cut: host code,
// tested without a GPU. docs/formats.md of the disk ends here; the kernel sees nothing but tiles.
//
// A tile is 16 rows x 128 columns (64 for 16-bit weights): the codes in the order in which the lanes of one warp feed
// them to the tensor cores, and its meta data (scales, mins). A stage is what the warps of a block multiply side by
// side: k_warps column tiles of row_warps row tiles; codes first, then meta data, padded to a multiple of 128 bytes:
// one bulk copy into the kernel's ring. Columns that the matrix does not have are tiles of zeros, so that all stages
// are alike. A unit is all columns of row_warps row tiles: whole stages. A matrix is its units, one after the other,
// then a scale for each row where the format (or a tensor scale) has one. So a block that owns a range of units reads
// one contiguous stream.
//
//   unit   [n_stages]  stage                      row_warps · 16 rows, all columns
//   stage  [tiles] codes, [tiles] meta, padding   tile (column tile k, row tile r): k · row_warps + r
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
inline constexpr int kMatvecWarps = 11;       // of a block that multiply; k_warps · row_warps of them have tiles
inline constexpr int kMatvecMaxStages = 9;    // of the ring
inline constexpr int kMatvecMaxRows = 8;      // rows of x for one reading of the weights

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
  int64_t outputs() const { return gated ? rows / 2 : rows; }   // columns of y
};

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
// decode.h, so that it can be compared bit for bit. tensor scales are applied as decode_row does. out: [cols].
void unpack_row(const MatvecPlan& plan, const std::byte* packed, int64_t row, float* out);

// How a launch is cut. The shared memory of a block: the ring, x, partial sums, small things.
struct MatvecDevice {
  int n_sms = 1;
  int shared_per_block = 0;         // bytes a block may use (cudaDevAttrMaxSharedMemoryPerBlockOptin)
  int shared_per_sm = 0;            // cudaDevAttrMaxSharedMemoryPerMultiprocessor
};
struct MatvecLaunch {
  int n_blocks = 0;
  int ring_stages = 0;
  int chunk_stages = 0;             // stages of a unit for which x is prepared at a time
  int n_chunks = 0;
  int batch_units = 0;              // units whose partial sums are kept before they are added up
  int x_bytes = 0;                  // codes of x for one chunk
  int scale_bytes = 0;              // scales of x, sums of x
  int partial_bytes = 0;            // of one of the two buffers
  int shared_bytes = 0;
};
// n_blocks == 0: so many rows of x do not fit beside the ring; launch fewer at a time (sums stay the same).
MatvecLaunch plan_launch(const MatvecPlan& plan, int n_rows, const MatvecDevice& device);

// Units of block `block`: [block_unit(block), block_unit(block + 1)).
BERYL_HOST_DEVICE inline int block_unit(int n_units, int block, int n_blocks) {
  return static_cast<int>(static_cast<int64_t>(n_units) * block / n_blocks);
}

// The order in which a block reads its stages: batches of units; in a batch the chunks of x; in a chunk the units; in a
// unit its stages. With one chunk that is the order in which they lie.
struct StageOrder {
  int n_units;                      // of the block
  int n_stages;                     // of a unit
  int batch_units;
  int chunk_stages;
};
struct StagePlace {
  int unit;                         // of the block
  int stage;                        // of the unit
};
BERYL_HOST_DEVICE inline StagePlace stage_place(const StageOrder& order, int index) {
  const int batch_stages = order.batch_units * order.n_stages;
  const int batch = index / batch_stages;
  index -= batch * batch_stages;
  const int first_unit = batch * order.batch_units;
  const int left = order.n_units - first_unit;
  const int n_units = left < order.batch_units ? left : order.batch_units;
  const int chunk = index / (n_units * order.chunk_stages);
  index -= chunk * n_units * order.chunk_stages;
  const int first_stage = chunk * order.chunk_stages;
  const int stages_left = order.n_stages - first_stage;
  const int stages = stages_left < order.chunk_stages ? stages_left : order.chunk_stages;
  return {first_unit + index / stages, first_stage + index % stages};
}

}  // namespace beryl::cuda
