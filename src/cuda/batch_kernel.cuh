// The kernel of batch_linear.h.
//
// First the blocks together cut x into digits: each warp takes some groups of 128 columns of some rows, writes them to
// memory, and a counter tells when all are there. (So all blocks must be resident together.)
//
// A block is 8 warps. Its work are items: a block of row tiles times one chunk of columns (matvec_layout.h).
//   one team          an item has 8 row tiles, one a warp
//   2 or 4 teams      an item has 4 or 2 row tiles; one warp of each team has the same one, and the teams take turns by
//                     pairs of column tiles; the others hand their sums to the first. For matrices of few rows.
// Each warp fetches its own tiles, a few ahead, into a ring of its own in shared memory (cp.async), across items and
// before the previous kernel has finished. The digits of x for one step after the other go through a ring that a team
// shares, a bulk copy each, which one of its warps asks for. A warp decodes a tile once for all rows of x. FP4, which
// has one scale a row of a tile, uses the tensor core's instructions for 4 warps for more than 16 rows, where there are
// such (wgmma, batch_wgmma.cuh); all other formats go through their codec.
//
// Every sum has the order that matvec_layout.h describes: pairs of column tiles in order within a chunk, then the
// chunks. Where there are few items, the chunks of a row tile are multiplied by different blocks (split); whoever is
// last adds them, first to last.
//
// Moves the packed bytes of W from memory; from the L2 besides, for each item, the digits of x in its columns.
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/batch_linear.h"
#include "cuda/batch_wgmma.cuh"
#include "cuda/codec.cuh"
#include "cuda/device.cuh"
#include "cuda/row_math.cuh"

namespace beryl::cuda {

inline constexpr int kBatchWarps = 8;
inline constexpr int kBatchThreads = kBatchWarps * 32;
inline constexpr int kMaxTeams = 4;
inline constexpr int kBatchMaxSlots = 8;        // of a ring of x
inline constexpr int kMaxExchanges = 6;         // pairs of a row tile and a team that hands over
inline constexpr int kGroupRows = 16;           // rows of x that a codec multiplies at once: 4 n-tiles of 4 rows

// ---- x in memory: a tile for each column tile of W ----
//   digits   [rows][bytes]          as the codec reads them; or [8 k-halves][rows / 4][8 columns][16 bytes] for wgmma
//   FP4:     [rows] XScale
//   others:  [rows] f32 scales, then [rows][4] f32 sums of 32 columns for formats with mins
// rows: padded_rows of them; those that x does not have hold anything.
struct XScale {
  float scale;
  int offset;                       // for the integer sum: minus what the offset of the weights added to it
};
__host__ __device__ constexpr bool is_float_format(Format format) {
  return format == Format::kFp8 || format == Format::kF16 || format == Format::kBf16;
}
__host__ __device__ constexpr int x_row_bytes(Format format) { return format == Format::kFp8 ? 512 : 256; }
__host__ __device__ constexpr int x_scale_bytes(Format format) {
  return format == Format::kFp4G128 ? static_cast<int>(sizeof(XScale)) : needs_x_sums(format) ? 20 : 4;
}
__host__ __device__ constexpr int x_tile_bytes(Format format, int padded_rows) {
  return (padded_rows * (x_row_bytes(format) + x_scale_bytes(format)) + 127) / 128 * 128;
}
// Blocks on a multiprocessor, as registers and shared memory allow.
__host__ __device__ constexpr int blocks_an_sm(int padded_rows) {
  return padded_rows <= 16 ? 2 : 1;
}
// Whether the products are those of four warps together; for few rows these would wait more than multiply.
constexpr bool kernel_uses_wgmma(Format format, int padded_rows) {
  return BERYL_WGMMA && format == Format::kFp4G128 && padded_rows > 16;
}

// Column tiles that a warp multiplies at a time: a pair where x is narrow, or while the tensor cores multiply one tile
// the next is decoded.
__host__ __device__ constexpr int step_tiles(Format format, int padded_rows) {
  return format == Format::kFp4G128 || (!is_float_format(format) && padded_rows <= 16) ? 2 : 1;
}
__host__ __device__ constexpr int tile_bytes(Format format) {
  return tile_shape(format).code_bytes + tile_shape(format).meta_bytes;
}
// Steps of a warp's ring: enough bytes in flight for a multiprocessor's share of the memory, as far as x leaves room;
// with 16 rows of x everything has to fit into 99 KB, which is what a block has on small GPUs. A ring of x has no fewer
// slots.
__host__ __device__ constexpr int weight_slots(Format format, int padded_rows) {
  if (step_tiles(format, padded_rows) == 1) return format == Format::kFp8 && padded_rows <= 16 ? 3 : 4;
  return tile_bytes(format) <= 1280 && padded_rows <= 32 ? 3 : 2;
}
__host__ __device__ constexpr int weight_ring_bytes(Format format, int padded_rows) {        // of a block
  return kBatchWarps * weight_slots(format, padded_rows) * step_tiles(format, padded_rows) * tile_bytes(format);
}

// In the scratch, all zeros between calls.
inline constexpr int kMaxCountedTiles = 32768;
struct BatchControl {
  int ready;                        // blocks that have written their part of x
  int left;                         // blocks that need `ready` no more
  int unused[30];
  int chunks[kMaxCountedTiles];     // of each row tile: chunks that are done (split)
};

struct BatchKernelArgs {
  const uint8_t* weights;
  const float* row_scales;          // [n_row_tiles · 16], null: 1
  int64_t unit_bytes;
  int64_t stage_bytes;
  int stage_code_bytes;             // of all tiles of a stage
  int k_warps, row_warps, n_stages, n_chunks;
  int n_column_tiles, n_row_tiles;
  int stored_row_tiles;             // with those that fill the last unit

  RowsView x;
  const float* norm_weight;         // [cols], null: 1
  float norm_eps, inverse_cols;
  int cols;
  bool has_norm;
  int n_rows, padded_rows;
  int row_shift;                    // 2^row_shift >= n_rows

  BatchControl* control;
  float* squares;                   // [n_groups][kBatchRows]: sums of squares of groups of 128 columns, for the norm
  unsigned char* x_tiles;
  float* partials;                  // [n_chunks][tiles][padded_rows][16]: sums of a chunk; tiles: all row tiles (split),
  int64_t chunk_floats;             // or those that all blocks have at a time

  RowsView y, other;
  float softcap;
  int outputs;
  DecodeEpilogue epilogue;
  bool gated;

  int team_shift;                   // 2^team_shift teams
  bool split;
  int item_tiles;                   // row tiles of an item
  int n_row_blocks;                 // of item_tiles each
  int n_slots;                      // of a ring of x, step_tiles · x_tile_bytes each; the rings begin shared memory
  int weights_at;                   // the warps' rings
  int exchange_at;
  int staging_at;                   // [warps][padded_rows][16] f32: sums on their way to y
  int small_at;
};

struct BatchShared {
  alignas(8) uint64_t full[kMaxTeams][kBatchMaxSlots];       // of the teams' rings of x
  uint64_t empty[kMaxTeams][kBatchMaxSlots];
  uint64_t handed[kMaxExchanges][2];    // a buffer is full; all lanes arrive
  uint64_t taken[kMaxExchanges][2];
  uint32_t tables[3][32];           // of E2M1 decoding, a copy a lane
};

// ---- work ----

struct Slot {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int n_slots) {
    if (++index == n_slots) index = 0, parity ^= 1;
  }
};

// The steps of a team, item after item. A step is kStep column tiles; with several teams each has every second or
// fourth pair of them.
template <int kStep>
struct Walk {
  int row_block, chunk;             // the item
  int step, n_steps;                // of it; n_steps 0: there are no more items
  int pair;                         // column tiles of a pair: 2, or 1 in an odd last stage

  __device__ __forceinline__ static int first_column(const BatchKernelArgs& a, int chunk) {
    return chunk * kChunkStages * a.k_warps;
  }
  __device__ __forceinline__ static int pair_of(const BatchKernelArgs& a, int chunk) {
    return min(a.n_stages - chunk * kChunkStages, kChunkStages);
  }
  // Column tiles of a chunk that the matrix has.
  __device__ __forceinline__ static int n_columns(const BatchKernelArgs& a, int chunk) {
    return min(pair_of(a, chunk) * a.k_warps, a.n_column_tiles - first_column(a, chunk));
  }
  __device__ __forceinline__ void begin(const BatchKernelArgs& a, int team) {
    row_block = static_cast<int>(blockIdx.x);
    chunk = 0;
    if (a.split) wrap(a);
    enter(a, team);
  }
  __device__ __forceinline__ void next_item(const BatchKernelArgs& a, int team) {
    advance(a);
    enter(a, team);
  }
  // Of the step, within the chunk.
  __device__ __forceinline__ int column(const BatchKernelArgs& a, int team) const {
    const int shift = pair - 1, own = kStep == 1 ? step >> shift : step;
    return (((own << a.team_shift) + team) << shift) + (kStep == 1 ? step & shift : 0);
  }

 private:
  __device__ __forceinline__ void advance(const BatchKernelArgs& a) {
    if (!a.split) {
      if (++chunk < a.n_chunks) return;
      chunk = 0;
      row_block += static_cast<int>(gridDim.x);
    } else {
      row_block += static_cast<int>(gridDim.x);
      wrap(a);
    }
  }
  // The items of split work: chunk by chunk, all row blocks of each.
  __device__ __forceinline__ void wrap(const BatchKernelArgs& a) {
    while (row_block >= a.n_row_blocks && chunk < a.n_chunks) row_block -= a.n_row_blocks, ++chunk;
  }
  // The first item from here on in which the team has something.
  __device__ __forceinline__ void enter(const BatchKernelArgs& a, int team) {
    step = 0;
    for (;; advance(a)) {
      n_steps = 0;
      if (a.split ? chunk >= a.n_chunks : row_block >= a.n_row_blocks) return;
      pair = pair_of(a, chunk);
      const int columns = n_columns(a, chunk), pairs = (columns + pair - 1) >> (pair - 1);
      const int last_team = (1 << a.team_shift) - 1, own_pairs = (pairs - team + last_team) >> a.team_shift;
      n_steps = own_pairs;
      if (kStep == 1 && pair == 2) {
        const bool has_last = ((pairs - 1) & last_team) == team;
        n_steps = 2 * own_pairs - (has_last ? columns % 2 : 0);
      }
      if (n_steps > 0) return;
    }
  }
};

__device__ __forceinline__ int load_acquire(const int* from) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// Between plain stores and bulk copies of the same memory.
__device__ __forceinline__ void fence_bulk_copies() {
#if BERYL_BULK_COPY
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
#if BERYL_BULK_COPY
// By one thread: the barrier's phase waits for one arrival and the bytes. x is read again by other blocks: no hint.
__device__ __forceinline__ void copy_tile_of_x(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
               : "memory");
}
#endif
// Weights are read once a step: they should leave the L2 first.
__device__ __forceinline__ uint64_t streaming_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_streamed16(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
               : "memory");
}

template <class Codec, Format kFormat, int kGroups>
class BatchLinear {
 public:
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kTiles = 4 * kGroups;    // n-tiles: of 4 rows of x
  static constexpr bool kWgmma = kernel_uses_wgmma(kFormat, kGroups * kGroupRows);
  static constexpr int kTileBytes = tile_bytes(kFormat);
  static constexpr int kStep = step_tiles(kFormat, kGroups * kGroupRows);
  static constexpr int kSlotBytes = kStep * kTileBytes;      // of a warp's ring
  static constexpr int kMetaLanes = kTile.meta_bytes / 16;    // that copy the meta data of a tile
  static constexpr bool kOffset = kFormat == Format::kFp4G128 && (kWgmma || kGroups == 1);
  static constexpr int kWeightSlots = weight_slots(kFormat, kGroups * kGroupRows);

  __device__ __forceinline__ BatchLinear(const BatchKernelArgs& args, unsigned char* shared_memory)
      : a(args), shared(shared_memory), small(reinterpret_cast<BatchShared*>(shared_memory + args.small_at)),
        warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32),
        team_warps(kBatchWarps >> args.team_shift), team(warp / team_warps), own_tile(warp % team_warps),
        x_ring(shared_memory + team * args.n_slots * kStep * x_tile_bytes(kFormat, args.padded_rows)),
        staging(reinterpret_cast<float*>(shared_memory + args.staging_at) + warp * args.padded_rows * kTileRows),
        own_weights(shared_memory + args.weights_at + warp * kWeightSlots * kSlotBytes),
        x_bytes(x_tile_bytes(kFormat, args.padded_rows)) {}

  __device__ __forceinline__ void run() {
    grid_launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kMaxTeams * kBatchMaxSlots) {
      barrier_init(small->full[0] + thread, BERYL_BULK_COPY ? 1 : 32);
      barrier_init(small->empty[0] + thread, team_warps);
      barrier_init_fence();
    } else if (thread < kMaxTeams * kBatchMaxSlots + 2 * kMaxExchanges) {
      barrier_init(small->handed[0] + thread - kMaxTeams * kBatchMaxSlots, 32);
      barrier_init(small->taken[0] + thread - kMaxTeams * kBatchMaxSlots, 32);
    }
    if (warp == 7) {
      small->tables[0][lane] = kOffset ? kOffsetPositiveLow : kPositiveLow;
      small->tables[1][lane] = kOffset ? kOffsetNegativeLow : kNegativeLow;
      small->tables[2][lane] = ~0u;
    }
    policy = streaming_policy();
    ahead.begin(a, team);
    enter_item();
#pragma unroll 1
    for (int i = 0; i < kWeightSlots - 1; ++i) fetch(i);
    grid_wait_only();
    prepare_x();
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      atomicAdd(&a.control->ready, 1);
    }
    const volatile uint32_t* words = small->tables[0];
    tables = {words[lane], words[32 + lane], words[64 + lane]};
    if (own_tile == 0) {
      Walk<kStep> first;
      first.begin(a, team);
      if (first.n_steps > 0) await_x();
#pragma unroll 1
      for (int i = 0; i < kWeightSlots - 1 && first.n_steps > 0; ++i) {
        feed_x(first);
        feed.next(a.n_slots);
        if (++first.step == first.n_steps) first.next_item(a, team);
      }
    } else {
      for (int i = 0; i < kWeightSlots - 1; ++i) feed.next(a.n_slots);
    }
    // The first team has part of every item.
    Walk<kStep> item;
    for (item.begin(a, 0); item.n_steps > 0; item.next_item(a, 0)) {
      float sum[kTiles][2] = {};
      multiply(item.chunk, sum);
      const int row_tile = item.row_block * a.item_tiles + own_tile;
      if (row_tile < a.n_row_tiles && team == 0) finish(row_tile, item.chunk, sum);
    }
    if (thread == 0 && atomicAdd(&a.control->left, 1) == static_cast<int>(gridDim.x) - 1) {
      a.control->ready = 0;
      a.control->left = 0;
    }
  }

 private:
  // ---- x to digits ----

  // This block's part.
  __device__ __forceinline__ void prepare_x() const {
    constexpr int kAhead = 2;                   // loads in flight
    const int stride = static_cast<int>(gridDim.x) * kBatchWarps;
    const int n_tasks = (a.cols + 127) / 128 << a.row_shift;
#pragma unroll 1
    for (int first = static_cast<int>(blockIdx.x) * kBatchWarps + warp; first < n_tasks; first += kAhead * stride) {
      float4 v[kAhead], weight[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int task = first + i * stride, group = task >> a.row_shift, row = task - (group << a.row_shift);
        const int col = group * 128 + lane * 4;
        v[i] = make_float4(0, 0, 0, 0), weight[i] = make_float4(1, 1, 1, 1);
        if (col < a.cols && row < a.n_rows) {
          v[i] = __ldcg(reinterpret_cast<const float4*>(a.x.values + row * a.x.stride + col));
          if (a.has_norm) weight[i] = load_weight4(a.norm_weight, col);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int task = first + i * stride, group = task >> a.row_shift, row = task - (group << a.row_shift);
        if (task >= n_tasks || row >= a.n_rows) continue;
        if (a.has_norm) {
          const float squares = group_squares(v[i]);
          if (lane == 0) a.squares[group * kBatchRows + row] = squares;
          v[i] = times(v[i], weight[i]);
        }
        write_x(group, row, v[i]);
      }
    }
  }
  __device__ __forceinline__ void write_x(int group, int row, float4 v) const {
    unsigned char* tile = a.x_tiles + int64_t{group} * (128 / kTile.columns) * x_bytes;
    unsigned char* scales = tile + a.padded_rows * x_row_bytes(kFormat);
    if constexpr (kFormat == Format::kFp4G128) {
      const IntegerDigits digits = integer_digits(v, Codec::kXScale);
      if constexpr (kWgmma) {
        // Column 2 · row + digit of the tensor core's b, 16 neighbouring values of k in a row of 16 bytes.
        unsigned char* to = tile + (lane / 4 * (a.padded_rows / 4) + row / 4) * 128 + row % 4 * 32 + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(to) = digits.high;
        *reinterpret_cast<uint32_t*>(to + 16) = digits.low;
      } else {
        unsigned char* to = tile + row * 256 + integer_digit_offset(lane);
        *reinterpret_cast<uint32_t*>(to) = digits.high;
        *reinterpret_cast<uint32_t*>(to + 64) = digits.low;
      }
      const int sum = __reduce_add_sync(kAllLanes, digits.sum);
      if (lane == 0) reinterpret_cast<XScale*>(scales)[row] = {digits.scale, -kE2m1Offset * sum};
    } else if constexpr (kTile.columns == 64) {
      // Two tiles a group, of 256 bytes a row.
      const FloatDigits digits = float_digits(Codec::kX, v);
      const int half = lane / 16;
      unsigned char* to = tile + half * x_bytes + row * 256 + float_digit_offset(lane) % 256;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint32_t*>(to + i * 16) = digits.high[i];
        *reinterpret_cast<uint32_t*>(to + i * 16 + 64) = digits.low[i];
      }
      if (lane % 16 == 0) reinterpret_cast<float*>(scales + half * x_bytes)[row] = digits.scale;
    } else {
      float* scale = reinterpret_cast<float*>(scales);
      write_group(Codec::kX, Codec::kNeedsSums, Codec::kXScale, v, lane, tile + row * x_row_bytes(kFormat), scale + row,
                  scale + a.padded_rows + row * 4);
    }
  }
  // Until all blocks have written theirs.
  __device__ __forceinline__ void await_x() const {
    if (lane == 0)
      while (load_acquire(&a.control->ready) < static_cast<int>(gridDim.x)) {
      }
    __syncwarp();
    fence_bulk_copies();
  }
  // The norm's factors of rows `lane` and `lane + 32` of x; sums in the order of norm_factor_of (row_math.cuh).
  __device__ __forceinline__ void norm_factors(float (&factors)[2]) const {
    constexpr int kHalves = kGroups > 2 ? 2 : 1, kBatch = 32;
    const int n_groups = (a.cols + 127) / 128;
    static_assert(kBatch % 4 == 0);
    float parts[2][4] = {};
#pragma unroll 1
    for (int first = 0; first < n_groups; first += kBatch) {
      float squares[kHalves][kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* from = a.squares + (first + i) * kBatchRows;
#pragma unroll
        for (int h = 0; h < kHalves; ++h)
          squares[h][i] = first + i < n_groups ? __ldcg(from + min(lane + 32 * h, a.n_rows - 1)) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int h = 0; h < kHalves; ++h) parts[h][i % 4] = __fadd_rn(parts[h][i % 4], squares[h][i]);      // the last ones add nothing
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = __fadd_rn(__fadd_rn(parts[h][0], parts[h][1]), __fadd_rn(parts[h][2], parts[h][3]));
      factors[h] = rsqrtf(__fmaf_rn(sum, a.inverse_cols, a.norm_eps));
    }
  }

  // ---- copies ----

  // This lane's 16 bytes of the codes and meta data of the step that the walk stands on, the first of an item.
  __device__ __forceinline__ void enter_item() {
    if (ahead.n_steps == 0) return;
    // Row tiles beyond the stored ones have no results; they read the last one.
    const int row_tile = min(ahead.row_block * a.item_tiles + own_tile, a.stored_row_tiles - 1);
    int unit = row_tile, in_unit = 0;
    if (a.row_warps > 1) unit = row_tile / a.row_warps, in_unit = row_tile - unit * a.row_warps;
    const int in_stage = in_unit + team * a.row_warps;
    const uint8_t* stage = a.weights + unit * a.unit_bytes + ahead.chunk * kChunkStages * a.stage_bytes + lane * 16;
    codes_from = stage + in_stage * kTile.code_bytes;
    meta_from = stage + a.stage_code_bytes + in_stage * kTile.meta_bytes;
    // A pair's second tile lies a stage on. Where pairs have one tile, the place of the second one gets the first
    // again.
    second_at = ahead.pair == 2 ? static_cast<int>(a.stage_bytes) : 0;
    if (kStep == 2 && lane >= kMetaLanes) meta_from += second_at - kTile.meta_bytes;
  }
  // Asks for this warp's tiles of the next step, if there is one; a group of copies in any case.
  __device__ __forceinline__ void fetch(int slot) {
    if (ahead.n_steps > 0) {
      const uint32_t to = shared_address(own_weights) + slot * kSlotBytes + lane * 16;
      copy_codes(to, codes_from);
      if (kStep == 2) copy_codes(to + kTileBytes, codes_from + second_at);
      if (lane < kStep * kMetaLanes)
        copy_streamed16(to + kTile.code_bytes + (lane < kMetaLanes ? 0 : kTileBytes - kTile.meta_bytes), meta_from,
                        policy);
      if (++ahead.step == ahead.n_steps) {
        ahead.next_item(a, team);
        enter_item();
      } else {
        int tiles = a.row_warps << a.team_shift, stages = 0;
        if (kStep == 1 && ahead.pair == 2) {
          const bool second = ahead.step % 2 != 0;
          stages = second ? second_at : -second_at;
          if (second) tiles = 0;
        }
        codes_from += stages + tiles * kTile.code_bytes;
        meta_from += stages + tiles * kTile.meta_bytes;
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void copy_codes(uint32_t to, const uint8_t* from) const {
#pragma unroll
    for (int i = 0; i < kTile.code_bytes; i += 512)
      if (i + 512 <= kTile.code_bytes || lane * 16 + i < kTile.code_bytes) copy_streamed16(to + i, from + i, policy);
  }
  // This warp's weights of the next step, once they are there; asks for later ones.
  __device__ __forceinline__ const unsigned char* take_weights() {
    wait_copies<kWeightSlots - 2>();
    __syncwarp();
    if (ahead.n_steps > 0) {
      if (feeder == own_tile) feed_x(ahead);
      feed.next(a.n_slots);
      feeder = feeder + 1 == team_warps ? 0 : feeder + 1;
    }
    fetch(weight_slot == 0 ? kWeightSlots - 1 : weight_slot - 1);     // where the last step's were
    const unsigned char* weights = own_weights + weight_slot * kSlotBytes;
    if (++weight_slot == kWeightSlots) weight_slot = 0;
    return weights;
  }
  // x of a step into its ring. Waits until all have read what lies there. A pair's second tile comes along even where
  // the matrix ends with the first.
  __device__ __forceinline__ void feed_x(const Walk<kStep>& of) {
    uint64_t* full = small->full[team] + feed.index;
    barrier_wait(small->empty[team] + feed.index, feed.parity ^ 1);
    unsigned char* to = x_ring + feed.index * kStep * x_bytes;
    const int column = Walk<kStep>::first_column(a, of.chunk) + of.column(a, team);
    const unsigned char* from = a.x_tiles + int64_t{column} * x_bytes;
#if BERYL_BULK_COPY
    if (lane == 0) copy_tile_of_x(to, from, static_cast<uint32_t>(kStep * x_bytes), full);
#else
    for (int i = lane * 16; i < kStep * x_bytes; i += 512) copy16_async(shared_address(to + i), from + i, 16);
    barrier_arrive_after_copies(full);
#endif
  }

  // ---- products ----

  // The sums of an item's columns for this warp's row tile, in the first team.
  __device__ __forceinline__ void multiply(int chunk, float (&sum)[kTiles][2]) {
    const int n_columns = Walk<kStep>::n_columns(a, chunk), pair_tiles = Walk<kStep>::pair_of(a, chunk);
    const int n_pairs = (n_columns + pair_tiles - 1) >> (pair_tiles - 1), last_team = (1 << a.team_shift) - 1;
#pragma unroll 1
    for (int pair = team; pair < n_pairs; pair += last_team + 1) {
      const int n = min(pair_tiles, n_columns - pair * pair_tiles);
      float part[kTiles][2] = {};
#pragma unroll 1
      for (int i = 0; i < n; i += kStep) {
        const unsigned char* weights = take_weights();
        barrier_wait(small->full[team] + place.index, place.parity);
        const unsigned char* x = x_ring + place.index * kStep * x_bytes;
        if constexpr (kWgmma) {
          multiply_together(weights, x, n, part);
        } else if constexpr (kFormat == Format::kFp4G128 && kGroups == 1) {
          multiply_few(weights, x, part);
          if (n == 2) multiply_few(weights + kTileBytes, x + x_bytes, part);
        } else {
#pragma unroll 1
          for (int tile = 0; tile < min(kStep, n - i); ++tile)
            multiply_warp(weights + tile * kTileBytes, x + tile * x_bytes, part);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(small->empty[team] + place.index);
        place.next(a.n_slots);
      }
      if (team > 0) {
        hand_over(part);
        continue;
      }
      if (pair > 0) {
        take_over(last_team, sum);
        add(sum, part);
      } else {
#pragma unroll
        for (int n_tile = 0; n_tile < kTiles; ++n_tile)
          sum[n_tile][0] = part[n_tile][0], sum[n_tile][1] = part[n_tile][1];
      }
    }
    if (team == 0) take_over((n_pairs - 1) & last_team, sum);
  }
  __device__ __forceinline__ static void add(float (&sum)[kTiles][2], const float (&part)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n][0] = __fadd_rn(sum[n][0], part[n][0]);
      sum[n][1] = __fadd_rn(sum[n][1], part[n][1]);
    }
  }

  // From a warp of another team to that of the first with the same row tile: lane for lane, in two buffers by turns.
  __device__ __forceinline__ int exchange_of(int other_team) const {
    return own_tile * ((1 << a.team_shift) - 1) + other_team - 1;
  }
  __device__ __forceinline__ float4* exchange_buffer(int exchange, int buffer) const {
    return reinterpret_cast<float4*>(shared + a.exchange_at) + (exchange * 2 + buffer) * (kTiles / 2) * 32 + lane;
  }
  __device__ __forceinline__ void hand_over(const float (&part)[kTiles][2]) {
    const int exchange = exchange_of(team), buffer = handed[0].index;
    barrier_wait(&small->taken[exchange][buffer], handed[0].parity ^ 1);
    float4* to = exchange_buffer(exchange, buffer);
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i)
      to[i * 32] = make_float4(part[2 * i][0], part[2 * i][1], part[2 * i + 1][0], part[2 * i + 1][1]);
    barrier_arrive(&small->handed[exchange][buffer]);
    handed[0].next(2);
  }
  // Adds the next sums of teams 1 to last, in this order.
  __device__ __forceinline__ void take_over(int last, float (&sum)[kTiles][2]) {
#pragma unroll
    for (int other = 1; other < (kGroups == 1 ? kMaxTeams : 2); ++other) {
      if (other > last) break;
      const int exchange = exchange_of(other), buffer = handed[other - 1].index;
      barrier_wait(&small->handed[exchange][buffer], handed[other - 1].parity);
      const float4* from = exchange_buffer(exchange, buffer);
#pragma unroll
      for (int i = 0; i < kTiles / 2; ++i) {
        const float4 v = from[i * 32];
        sum[2 * i][0] = __fadd_rn(sum[2 * i][0], v.x);
        sum[2 * i][1] = __fadd_rn(sum[2 * i][1], v.y);
        sum[2 * i + 1][0] = __fadd_rn(sum[2 * i + 1][0], v.z);
        sum[2 * i + 1][1] = __fadd_rn(sum[2 * i + 1][1], v.w);
      }
      barrier_arrive(&small->taken[exchange][buffer]);
      handed[other - 1].next(2);
    }
  }

  // part += this warp's tile times all rows of x, by the format's codec.
  __device__ __forceinline__ void multiply_warp(const unsigned char* weights, const unsigned char* x_tile,
                                                float (&part)[kTiles][2]) const {
    constexpr int kRowBytes = x_row_bytes(kFormat);
    constexpr int kScaleStride = kFormat == Format::kFp4G128 ? static_cast<int>(sizeof(XScale)) : 4;
    typename Codec::Loaded tile;
    Codec::load(tile, weights, weights + kTile.code_bytes, lane);
    const int n_groups = a.padded_rows / kGroupRows;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (kGroups > 1 && g >= n_groups) break;
      LaneX<4> x;
      x.tables = {tables.positive_low, tables.negative_low, tables.minus_one};
      x.code_stride = x.scale_stride = 0;
      const int scales_at = a.padded_rows * kRowBytes;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = g * kGroupRows + 4 * n;
        x.codes[n] = (row + lane / 8) * kRowBytes + lane % 8 * 16;
        x.scales[n] = scales_at + (row + lane % 4) * kScaleStride;
        x.sums[n] = scales_at + a.padded_rows * 4 + (row + lane % 4) * 16;
      }
      typename Codec::template Product<4> product;
      product.start(tile, x_tile, x, 0);
#pragma unroll
      for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
      float acc[4][2];
#pragma unroll
      for (int n = 0; n < 4; ++n) acc[n][0] = part[4 * g + n][0], acc[n][1] = part[4 * g + n][1];
      product.finish(tile, acc);
#pragma unroll
      for (int n = 0; n < 4; ++n) part[4 * g + n][0] = acc[n][0], part[4 * g + n][1] = acc[n][1];
    }
  }

  // The same for FP4 and 16 rows.
  __device__ __forceinline__ void multiply_few(const unsigned char* weights, const unsigned char* x,
                                               float (&part)[kTiles][2]) const {
    Fp4G128::Loaded tile;
    Fp4G128::load(tile, weights, weights + kTile.code_bytes, lane);
    int d[4][4] = {};
    const unsigned char* own_x = x + lane / 8 * 256 + lane % 8 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 b[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) b[n] = *reinterpret_cast<const uint4*>(own_x + n * 1024 + half * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const OffsetOperands operands(tile.codes, 2 * half + i, tables);
        const uint32_t(&w)[4] = operands.a;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          mma_s8(d[n], w[0], w[1], w[2], w[3], word_of(b[n], 2 * i), word_of(b[n], 2 * i + 1));
      }
    }
    add_product<4>(d, tile.scales, x + 4 * 4 * 256, part);
  }
  // part += the sums d of a tile, scaled.
  template <int kN>
  __device__ __forceinline__ void add_product(const int (&d)[kN][4], uint32_t tile_scales,
                                              const unsigned char* x_scales, float (&part)[kTiles][2]) const {
    const XScale* scales = reinterpret_cast<const XScale*>(x_scales) + lane % 4;
    const float scale0 = bf16_at(tile_scales, 0), scale1 = bf16_at(tile_scales, 1);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const XScale of_x = scales[4 * n];
      const float digits0 = __int2float_rn(d[n][0] * 256 + d[n][1] + of_x.offset);
      const float digits1 = __int2float_rn(d[n][2] * 256 + d[n][3] + of_x.offset);
      part[n][0] = __fmaf_rn(digits0, __fmul_rn(scale0, of_x.scale), part[n][0]);
      part[n][1] = __fmaf_rn(digits1, __fmul_rn(scale1, of_x.scale), part[n][1]);
    }
  }
  // The same by the four warps of a team together: a pair of tiles, of which the first n count. There must be no branch
  // between start and wait: the compiler would lose sight of the registers that are being read.
  struct DecodedTile {
    OffsetOperands operands[4];
    uint32_t scales;
  };
  __device__ __forceinline__ void decode(const unsigned char* weights, DecodedTile& out) const {
    Fp4G128::Loaded tile;
    Fp4G128::load(tile, weights, weights + kTile.code_bytes, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) out.operands[i] = OffsetOperands(tile.codes, i, tables);
    out.scales = tile.scales;
  }
  __device__ __forceinline__ void multiply_together(const unsigned char* weights, const unsigned char* x, int n,
                                                float (&part)[kTiles][2]) const {
#if BERYL_WGMMA
    DecodedTile tiles[2];
    TeamProduct<kTiles> product;
    decode(weights, tiles[0]);
    product.start(tiles[0].operands, x);
    decode(weights + kTileBytes, tiles[1]);
    product.wait();
    add_product<kTiles>(product.d, tiles[0].scales, x + kTiles * 4 * 256, part);
    if (n == 1) return;
    x += x_bytes;
    product.start(tiles[1].operands, x);
    product.wait();
    add_product<kTiles>(product.d, tiles[1].scales, x + kTiles * 4 * 256, part);
#endif
  }

  // ---- y ----

  // A lane has rows lane / 4 and lane / 4 + 8 of the row tile for rows 4 n + lane % 4 of x. They go to y by way of
  // shared memory, so that what follows is a short loop: code that runs once costs what it takes to fetch it.
  __device__ __forceinline__ void finish(int row_tile, int chunk, const float (&sum)[kTiles][2]) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float* to = staging + (4 * n + lane % 4) * kTileRows + lane / 4;
      if (kGroups > 1 && 4 * n >= a.padded_rows) break;
      to[0] = sum[n][0], to[8] = sum[n][1];
    }
    __syncwarp();
    if (a.n_chunks > 1) {
      const int64_t at = a.split ? row_tile : static_cast<int>(blockIdx.x) * kBatchWarps + own_tile;
      float* mine = a.partials + at * a.padded_rows * kTileRows;
      float4* to = reinterpret_cast<float4*>(mine + chunk * a.chunk_floats);
#pragma unroll 2
      for (int i = lane; i < a.n_rows * kTileRows / 4; i += 32)
        __stcg(to + i, reinterpret_cast<const float4*>(staging)[i]);
      if (a.split) {
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane == 0) before = atomicAdd(a.control->chunks + row_tile, 1);
        if (__shfl_sync(kAllLanes, before, 0) != a.n_chunks - 1) return;
        if (lane == 0) a.control->chunks[row_tile] = 0;
        __threadfence();
      } else if (chunk != a.n_chunks - 1) {
        return;
      }
      add_chunks(mine);
      __syncwarp();
    }
    if (a.has_norm && !has_factors) norm_factors(factors), has_factors = true;
    switch (a.epilogue) {
      case DecodeEpilogue::kStore: return store_rows<4>(row_tile, [](float value, int, int) { return value; });
      case DecodeEpilogue::kGatedGelu:
        return store_rows<3>(row_tile, [](float value, float up) { return __fmul_rn(quick_gelu_tanh(value), up); });
      case DecodeEpilogue::kGatedSilu:
        return store_rows<3>(row_tile, [](float value, float up) { return __fmul_rn(quick_silu(value), up); });
      case DecodeEpilogue::kSoftcap:
        return store_rows<4>(row_tile, [&](float value, int, int) { return a.softcap * tanhf(__fdividef(value, a.softcap)); });
      case DecodeEpilogue::kGeluTimesOther:
        return store_rows<4>(row_tile,
                             [&](float value, int row, int col) { return quick_gelu_tanh(value) * other(row, col); });
      case DecodeEpilogue::kTimesGeluOther:
        return store_rows<4>(row_tile,
                             [&](float value, int row, int col) { return value * quick_gelu_tanh(other(row, col)); });
      case DecodeEpilogue::kTimesSiluOther:
        return store_rows<4>(row_tile,
                             [&](float value, int row, int col) { return value * quick_silu(other(row, col)); });
    }
  }
  // staging = the sums of all chunks, first to last.
  __device__ __forceinline__ void add_chunks(const float* mine) const {
    constexpr int kAhead = kGroups == 1 ? 2 : 4;
    const int n = a.n_rows * kTileRows / 4;
#pragma unroll 1
    for (int first = lane; first < n; first += kAhead * 32) {
      float4 totals[kAhead];
#pragma unroll 1
      for (int c = 0; c < a.n_chunks; ++c) {
        float4 v[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
          v[i] = __ldcg(reinterpret_cast<const float4*>(mine + c * a.chunk_floats) + min(first + i * 32, n - 1));
#pragma unroll
        for (int i = 0; i < kAhead; ++i) totals[i] = c == 0 ? v[i] : plus(totals[i], v[i]);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        if (first + i * 32 < n) reinterpret_cast<float4*>(staging)[first + i * 32] = totals[i];
    }
  }
  __device__ __forceinline__ float other(int row, int col) const {
    return __ldcg(a.other.values + row * a.other.stride + col);
  }
  // y of a row tile from staging; 2^kBits of its rows are outputs. epilogue: of value and up, or of value, row and
  // column. Factors and scales that do not exist are 1.
  template <int kBits, class Epilogue>
  __device__ __forceinline__ void store_rows(int row_tile, Epilogue&& epilogue) const {
    const int out = lane & ((1 << kBits) - 1), col = (row_tile << kBits) + out;
    float scale = 1, up_scale = 1;
    if (a.row_scales != nullptr) {
      scale = a.row_scales[row_tile * kTileRows + out];
      if (kBits == 3) up_scale = a.row_scales[row_tile * kTileRows + out + 8];
    }
    float* to = a.y.values + (lane >> kBits) * a.y.stride + col;
    const int64_t to_step = (32 >> kBits) * a.y.stride;
#pragma unroll 4
    for (int first = 0; first < a.n_rows; first += 32 >> kBits, to += to_step) {
      const int row = first + (lane >> kBits);
      const float factor = __shfl_sync(kAllLanes, kGroups <= 2 || row < 32 ? factors[0] : factors[1], row % 32);
      const float* from = staging + row * kTileRows + out;
      float value = __fmul_rn(__fmul_rn(from[0], factor), scale);
      if constexpr (kBits == 3) value = epilogue(value, __fmul_rn(__fmul_rn(from[8], factor), up_scale));
      else value = epilogue(value, min(row, a.n_rows - 1), min(col, a.outputs - 1));
      if (row < a.n_rows && col < a.outputs) *to = __uint_as_float(round_result(value));
    }
  }

  const BatchKernelArgs& a;
  unsigned char* shared;
  BatchShared* small;
  int warp, lane;
  int team_warps, team;
  int own_tile;                     // this warp's row tile of an item; the warps of a team feed its ring of x by turns
  unsigned char* x_ring;
  float* staging;                   // of this warp
  unsigned char* own_weights;       // this warp's ring
  int weight_slot = 0;              // in it
  int x_bytes;                      // of x for one column tile
  int second_at = 0;                // from a pair's first tile to its second
  uint64_t policy = 0;
  Walk<kStep> ahead;                       // what this warp fetches next
  const uint8_t* codes_from = nullptr;
  const uint8_t* meta_from = nullptr;
  Slot place;                       // in the ring of x
  Slot feed;                        // where feed_x goes on
  int feeder = 0;                   // whose turn it is
  Slot handed[kMaxTeams - 1];       // among the two buffers, of each other team; of another team: the first is its own
  float factors[2] = {1, 1};        // of the norm, rows `lane` and `lane + 32` of x
  bool has_factors = false;
  E2m1Tables tables;
};

template <class Codec, Format kFormat, int kGroups>
__global__ void __launch_bounds__(kBatchThreads, blocks_an_sm(kGroups * kGroupRows))
    batch_linear_kernel(const __grid_constant__ BatchKernelArgs args) {
  extern __shared__ __align__(128) unsigned char batch_shared[];
  BatchLinear<Codec, kFormat, kGroups>(args, batch_shared).run();
}

// A format's kernels: for up to 16, 32 and 64 rows of x (some formats have one for the latter two).
using BatchKernelPointer = void (*)(BatchKernelArgs);
struct BatchKernels {
  BatchKernelPointer kernels[3] = {};
};
template <class Codec, Format kFormat, bool kOwn32>
BatchKernels batch_kernels() {
  return {{batch_linear_kernel<Codec, kFormat, 1>, batch_linear_kernel<Codec, kFormat, kOwn32 ? 2 : 4>,
           batch_linear_kernel<Codec, kFormat, 4>}};
}

// In batch_FAMILY.cu, so that they compile side by side; empty for formats of another family.
BatchKernels batch_e2m1_kernels(Format format);
BatchKernels batch_integer_kernels(Format format);
BatchKernels batch_k_kernels(Format format);
BatchKernels batch_float_kernels(Format format);

}  // namespace beryl::cuda
