// The kernels of batch_linear.h: x to digits, and the product.
//
// The product. A block has two teams of 4 warps that multiply and a warp that copies. Its work are items: a block of row
// tiles times one chunk of columns (matvec_layout.h). For each column tile of an item, one slot of a ring in shared memory
// gets the row tiles' weights and the digits of x for these columns.
//   by rows      an item has 8 row tiles; each warp multiplies its own in every slot
//   by columns   an item has 4 row tiles; a warp of each team has the same one, and the teams take turns by pairs of column
//                tiles. The second team hands its sums of a pair to the first. For matrices of few rows.
// A warp decodes a tile once for all rows of x. Formats with one scale a tile of integers (FP4) use the tensor core's
// instructions for 4 warps (wgmma, batch_wgmma.cuh) where there are such; all others go through their codec.
//
// Every sum has the order that matvec_layout.h describes: pairs of column tiles in order within a chunk, then the chunks.
// Chunks of one row tile are multiplied by different blocks; whoever is last adds them, first to last.
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

inline constexpr int kTeams = 2;
inline constexpr int kTeamWarps = 4;
inline constexpr int kBatchConsumers = kTeams * kTeamWarps * 32;
inline constexpr int kBatchThreads = kBatchConsumers + 32;
inline constexpr int kBatchMaxSlots = 16;
inline constexpr int kGroupRows = 16;           // rows of x that a codec multiplies at once: 4 n-tiles of 4 rows

inline constexpr int kBatchMaxNormCols = 512 * 128;

// ---- x in memory: a tile for each column tile of W ----
//   digits   [rows][bytes]          as the codec reads them; or [8 k-halves][rows / 4][8 columns][16 bytes], as wgmma does
//   FP4:     [rows] XScale
//   others:  [rows] f32 scales, then [rows][4] f32 sums of 32 columns for formats with mins
// rows: padded_rows of them; those that x does not have hold anything.
struct XScale {
  float scale;
  int offset;                       // what the offset of the weights adds to the integer sum of the row
};
constexpr bool is_float_format(Format format) {
  return format == Format::kFp8 || format == Format::kF16 || format == Format::kBf16;
}
__host__ __device__ constexpr int x_row_bytes(Format format) { return format == Format::kFp8 ? 512 : 256; }
__host__ __device__ constexpr int x_scale_bytes(Format format) {
  return format == Format::kFp4G128 ? static_cast<int>(sizeof(XScale)) : needs_x_sums(format) ? 20 : 4;
}
__host__ __device__ constexpr int x_tile_bytes(Format format, int padded_rows) {
  return (padded_rows * (x_row_bytes(format) + x_scale_bytes(format)) + 127) / 128 * 128;
}
// Whether x is laid out for wgmma: decided where the kernels are compiled, alike for both.
constexpr bool kernel_uses_wgmma(Format format) { return BERYL_WGMMA && format == Format::kFp4G128; }

struct PrepareArgs {
  RowsView x;
  const float* norm_weight;         // [cols], null: 1
  bool has_norm;
  float norm_eps;
  float inverse_cols;
  int cols;
  int padded_rows;
  unsigned char* tiles;
  float* factors;                   // [rows] of the norm
  int* counters;                    // set to 0
  int n_counters;
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

  const unsigned char* x_tiles;
  const float* factors;
  int* counters;                    // [n_row_tiles]: chunks that are done
  float* partials;                  // [n_chunks][n_row_tiles][padded_rows / 4][2][32]: sums of a chunk as the lanes hold them
  int n_rows, padded_rows;

  RowsView y, other;
  float softcap;
  int outputs;
  DecodeEpilogue epilogue;
  bool gated;
  bool has_norm;

  bool by_columns;
  int item_tiles;                   // row tiles of an item
  int n_items;
  int n_slots, slot_bytes;
  int slot_x_at;                    // where in a slot x begins
  int exchange_at;                  // in shared memory, behind the ring
  int small_at;
};

struct BatchShared {
  alignas(8) uint64_t full[kBatchMaxSlots];
  uint64_t empty[kBatchMaxSlots];
  uint64_t handed[kTeamWarps][2];   // by columns: a buffer of the second team is full
  uint64_t taken[kTeamWarps][2];
  uint32_t tables[3][32];           // of E2M1 decoding, a copy a lane
};

// ---- x to digits ----

// A block has one row, all groups of it where there is a norm.
template <class Codec, Format kFormat>
__global__ void __launch_bounds__(1024) prepare_x_kernel(const __grid_constant__ PrepareArgs a) {
  __shared__ float sums[kBatchMaxNormCols / 128];   // the groups' squares
  constexpr int kTileColumns = tile_shape(kFormat).columns;
  grid_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int n_warps = static_cast<int>(blockDim.x) / 32, n_groups = (a.cols + 127) / 128, row = static_cast<int>(blockIdx.x);
  const int first = static_cast<int>(blockIdx.y) * n_warps + warp, step = n_warps * static_cast<int>(gridDim.y);
  auto weight_of = [&](int group) {
    const int col = group * 128 + lane * 4;
    return a.has_norm && col < a.cols ? load_weight4(a.norm_weight, col) : make_float4(1, 1, 1, 1);
  };
  float4 weight = weight_of(first);
  grid_wait_only();
  const int thread = static_cast<int>((blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x);
  if (thread < a.n_counters)
    for (int i = thread; i < a.n_counters; i += static_cast<int>(gridDim.x * gridDim.y * blockDim.x)) a.counters[i] = 0;
  for (int group = first; group < n_groups; group += step) {
    const int col = group * 128 + lane * 4;
    float4 v = make_float4(0, 0, 0, 0);
    if (col < a.cols) v = __ldcg(reinterpret_cast<const float4*>(a.x.values + row * a.x.stride + col));
    if (group != first) weight = weight_of(group);
    if (a.has_norm) {
      const float squares = group_squares(v);
      if (lane == 0) sums[group] = squares;
      v = times(v, weight);
    }
    unsigned char* tile = a.tiles + int64_t{group} * (128 / kTileColumns) * x_tile_bytes(kFormat, a.padded_rows);
    unsigned char* scales = tile + a.padded_rows * x_row_bytes(kFormat);
    if constexpr (kFormat == Format::kFp4G128) {
      const IntegerDigits digits = integer_digits(v, Codec::kXScale);
      if constexpr (kernel_uses_wgmma(kFormat)) {
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
    } else if constexpr (kTileColumns == 64) {
      // Two tiles a group, of 256 bytes a row.
      const FloatDigits digits = float_digits(Codec::kX, v);
      const int half = lane / 16;
      unsigned char* to = tile + half * x_tile_bytes(kFormat, a.padded_rows) + row * 256 + float_digit_offset(lane) % 256;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint32_t*>(to + i * 16) = digits.high[i];
        *reinterpret_cast<uint32_t*>(to + i * 16 + 64) = digits.low[i];
      }
      if (lane % 16 == 0)
        reinterpret_cast<float*>(scales + half * x_tile_bytes(kFormat, a.padded_rows))[row] = digits.scale;
    } else {
      float* scale = reinterpret_cast<float*>(scales);
      write_group(Codec::kX, Codec::kNeedsSums, Codec::kXScale, v, lane, tile + row * x_row_bytes(kFormat), scale + row,
                  scale + a.padded_rows + row * 4);
    }
  }
  if (!a.has_norm) return;
  __syncthreads();
  if (threadIdx.x == 0) a.factors[row] = norm_factor_of(sums, n_groups, a.inverse_cols, a.norm_eps);
}

// ---- the ring ----

struct Slot {
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int n_slots) {
    if (++index == n_slots) index = 0, parity ^= 1;
  }
};

// An item: row tiles from first_tile on, and the columns of a chunk: tiles first_column + t, where pairs begin at multiples
// of `pair`.
struct Item {
  int first_tile, chunk, first_column, n_columns, pair;
  __device__ __forceinline__ Item(const BatchKernelArgs& a, int index) {
    first_tile = index / a.n_chunks * a.item_tiles;
    chunk = index % a.n_chunks;
    pair = min(a.n_stages - chunk * kChunkStages, kChunkStages);
    first_column = chunk * kChunkStages * a.k_warps;
    n_columns = min(pair * a.k_warps, a.n_column_tiles - first_column);
  }
};

#if BERYL_BULK_COPY
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
}
// The bytes count for the phase that expect_bytes announced them to.
__device__ __forceinline__ void bulk_copy_expected(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(n_bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void bulk_copy_expected(void* to, const void* from, uint32_t n_bytes, uint64_t* barrier,
                                                   uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(n_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
#endif

template <class Codec, Format kFormat, int kGroups>
class BatchLinear {
 public:
  static constexpr TileShape kTile = tile_shape(kFormat);
  static constexpr int kTiles = 4 * kGroups;    // n-tiles: of 4 rows of x
  static constexpr bool kWgmma = kernel_uses_wgmma(kFormat);

  __device__ __forceinline__ BatchLinear(const BatchKernelArgs& args, unsigned char* shared_memory)
      : a(args), shared(shared_memory), small(reinterpret_cast<BatchShared*>(shared_memory + args.small_at)),
        warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32), team(warp / kTeamWarps),
        own_tile(args.by_columns ? warp % kTeamWarps : warp) {}

  __device__ __forceinline__ void run() {
    grid_launch_dependents();
    if (threadIdx.x == 0) {
      for (int s = 0; s < a.n_slots; ++s) {
        barrier_init(&small->full[s], BERYL_BULK_COPY ? 1 : 32);
        barrier_init(&small->empty[s], a.by_columns ? kTeamWarps : kTeams * kTeamWarps);
      }
      for (int w = 0; w < kTeamWarps; ++w)
        for (int b = 0; b < 2; ++b) barrier_init(&small->handed[w][b], 1), barrier_init(&small->taken[w][b], 1);
      barrier_init_fence();
    }
    if (warp == 0) {
      small->tables[0][lane] = kWgmma ? kOffsetPositiveLow : kPositiveLow;
      small->tables[1][lane] = kWgmma ? kOffsetNegativeLow : kNegativeLow;
      small->tables[2][lane] = ~0u;
    }
    __syncthreads();
    if (warp == kTeams * kTeamWarps) return copy_slots();
    const volatile uint32_t* words = small->tables[0];
    tables = {words[lane], words[32 + lane], words[64 + lane]};
    grid_wait_only();
    for (int index = static_cast<int>(blockIdx.x); index < a.n_items; index += static_cast<int>(gridDim.x)) {
      const Item item(a, index);
      float sum[kTiles][2] = {};
      multiply(item, sum);
      const int row_tile = item.first_tile + own_tile;
      if (row_tile < a.n_row_tiles && (!a.by_columns || team == 0)) finish(row_tile, item.chunk, sum);
    }
  }

 private:
  // ---- copies ----
  __device__ __forceinline__ void copy_slots() {
    const int code_bytes = kTile.code_bytes, meta_bytes = kTile.meta_bytes;
    const int x_bytes = x_tile_bytes(kFormat, a.padded_rows);
    Slot slot;
    int n_copied = 0;
#if BERYL_BULK_COPY
    const uint64_t policy = evict_first_policy();
    // Lanes 0 to 7 copy codes, 8 to 15 meta data, of a row tile each; lane 16 copies x. Weights need not wait for the
    // kernel before, x does: until then lane s remembers what slot s wants.
    const bool is_meta = lane >= 8;
    const int tile = lane % 8, piece = is_meta ? meta_bytes : code_bytes;
    bool waited = false;
    int wanted_x = 0;
    auto copy_x = [&](int at, int column) {
      bulk_copy_expected(shared + at * a.slot_bytes + a.slot_x_at, a.x_tiles + int64_t{column} * x_bytes,
                         static_cast<uint32_t>(x_bytes), &small->full[at]);
    };
    auto wait_for_x = [&](int n_slots) {
      grid_wait_only();
      if (lane < n_slots) copy_x(lane, wanted_x);
      waited = true;
    };
#endif
    for (int index = static_cast<int>(blockIdx.x); index < a.n_items; index += static_cast<int>(gridDim.x)) {
      const Item item(a, index);
      const int n_tiles = min(a.item_tiles, a.stored_row_tiles - item.first_tile);
#if BERYL_BULK_COPY
      const bool copies = lane < 16 && tile < n_tiles && piece > 0;
      const int row_tile = item.first_tile + tile;
      const uint8_t* from = a.weights + row_tile / a.row_warps * a.unit_bytes + item.chunk * kChunkStages * a.stage_bytes +
                            row_tile % a.row_warps * piece + (is_meta ? a.stage_code_bytes : 0);
      unsigned char* to = shared + (is_meta ? a.item_tiles * code_bytes : 0) + tile * piece;
      const uint32_t expected = static_cast<uint32_t>(n_tiles * (code_bytes + meta_bytes) + x_bytes);
#endif
      for (int t = 0; t < item.n_columns; ++t, ++n_copied) {
        const int k = t / item.pair, stage = t % item.pair;
        if (n_copied >= a.n_slots) barrier_wait(&small->empty[slot.index], slot.parity ^ 1);
#if BERYL_BULK_COPY
        if (lane == 16) expect_bytes(&small->full[slot.index], expected);
        __syncwarp();
        if (copies)
          bulk_copy_expected(to + slot.index * a.slot_bytes, from + stage * a.stage_bytes + k * a.row_warps * piece,
                             static_cast<uint32_t>(piece), &small->full[slot.index], policy);
        if (!waited) {
          if (lane == n_copied) wanted_x = item.first_column + t;
          if (n_copied + 1 == a.n_slots) wait_for_x(a.n_slots);
        } else if (lane == 16) {
          copy_x(slot.index, item.first_column + t);
        }
#else
        unsigned char* at = shared + slot.index * a.slot_bytes;
        auto copy = [&](unsigned char* to, const unsigned char* from, int n_bytes) {
          for (int i = lane * 16; i < n_bytes; i += 512) copy16_async(shared_address(to + i), from + i, 16);
        };
        for (int tile = 0; tile < n_tiles; ++tile) {
          const int row_tile = item.first_tile + tile, in_stage = k * a.row_warps + row_tile % a.row_warps;
          const uint8_t* from =
              a.weights + row_tile / a.row_warps * a.unit_bytes + (item.chunk * kChunkStages + stage) * a.stage_bytes;
          copy(at + tile * code_bytes, from + in_stage * code_bytes, code_bytes);
          copy(at + a.item_tiles * code_bytes + tile * meta_bytes, from + a.stage_code_bytes + in_stage * meta_bytes,
               meta_bytes);
        }
        copy(at + a.slot_x_at, a.x_tiles + int64_t{item.first_column + t} * x_bytes, x_bytes);
        barrier_arrive_after_copies(&small->full[slot.index]);
#endif
        slot.next(a.n_slots);
      }
    }
#if BERYL_BULK_COPY
    if (!waited) wait_for_x(n_copied);
#endif
  }

  // ---- products ----

  // The sums of an item's columns for this warp's row tile: in the first team where work is split by columns.
  __device__ __forceinline__ void multiply(const Item& item, float (&sum)[kTiles][2]) {
    int pair = 0;
#pragma unroll 1
    for (int t = 0; t < item.n_columns; t += item.pair, ++pair) {
      const int n = min(item.pair, item.n_columns - t);
      if (a.by_columns && pair % kTeams != team) {
        for (int i = 0; i < n; ++i) place.next(a.n_slots);
        continue;
      }
      float part[kTiles][2] = {};
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        barrier_wait(&small->full[place.index], place.parity);
        if constexpr (kWgmma) multiply_team(shared + place.index * a.slot_bytes, part);
        else multiply_warp(shared + place.index * a.slot_bytes, part);
        __syncwarp();
        if (lane == 0) barrier_arrive(&small->empty[place.index]);
        place.next(a.n_slots);
      }
      if (a.by_columns && team == 1) {
        hand_over(part);
        continue;
      }
      if (a.by_columns && pair > 0) take_over(sum);
      if (pair == 0) {
#pragma unroll
        for (int n_tile = 0; n_tile < kTiles; ++n_tile)
          sum[n_tile][0] = part[n_tile][0], sum[n_tile][1] = part[n_tile][1];
      } else {
        add(sum, part);
      }
    }
    if (a.by_columns && team == 0 && pair % kTeams == 0) take_over(sum);
  }
  __device__ __forceinline__ static void add(float (&sum)[kTiles][2], const float (&part)[kTiles][2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n][0] = __fadd_rn(sum[n][0], part[n][0]);
      sum[n][1] = __fadd_rn(sum[n][1], part[n][1]);
    }
  }

  // From a warp of the second team to that of the first with the same row tile: lane for lane, in two buffers by turns.
  __device__ __forceinline__ float4* exchange_buffer() const {
    return reinterpret_cast<float4*>(shared + a.exchange_at) +
           (own_tile * 2 + exchange.index) * (kTiles / 2) * 32 + lane;
  }
  __device__ __forceinline__ void hand_over(const float (&part)[kTiles][2]) {
    barrier_wait(&small->taken[own_tile][exchange.index], exchange.parity ^ 1);
    float4* to = exchange_buffer();
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i)
      to[i * 32] = make_float4(part[2 * i][0], part[2 * i][1], part[2 * i + 1][0], part[2 * i + 1][1]);
    __syncwarp();
    if (lane == 0) barrier_arrive(&small->handed[own_tile][exchange.index]);
    exchange.next(2);
  }
  __device__ __forceinline__ void take_over(float (&sum)[kTiles][2]) {
    barrier_wait(&small->handed[own_tile][exchange.index], exchange.parity);
    const float4* from = exchange_buffer();
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      const float4 v = from[i * 32];
      sum[2 * i][0] = __fadd_rn(sum[2 * i][0], v.x);
      sum[2 * i][1] = __fadd_rn(sum[2 * i][1], v.y);
      sum[2 * i + 1][0] = __fadd_rn(sum[2 * i + 1][0], v.z);
      sum[2 * i + 1][1] = __fadd_rn(sum[2 * i + 1][1], v.w);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&small->taken[own_tile][exchange.index]);
    exchange.next(2);
  }

  // part += this warp's tile times all rows of x, by the format's codec.
  __device__ __forceinline__ void multiply_warp(const unsigned char* slot, float (&part)[kTiles][2]) const {
    constexpr int kRowBytes = x_row_bytes(kFormat);
    constexpr int kScaleStride = kFormat == Format::kFp4G128 ? static_cast<int>(sizeof(XScale)) : 4;
    typename Codec::Loaded tile;
    Codec::load(tile, slot + own_tile * kTile.code_bytes,
                slot + a.item_tiles * kTile.code_bytes + own_tile * kTile.meta_bytes, lane);
    const int n_groups = a.padded_rows / kGroupRows;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (kGroups > 1 && g >= n_groups) break;
      LaneX<4> x;
      x.tables = {tables.positive_low, tables.negative_low, tables.minus_one};
      x.code_stride = x.scale_stride = 0;
      const int scales_at = a.slot_x_at + a.padded_rows * kRowBytes;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int row = g * kGroupRows + 4 * n;
        x.codes[n] = a.slot_x_at + (row + lane / 8) * kRowBytes + lane % 8 * 16;
        x.scales[n] = scales_at + (row + lane % 4) * kScaleStride;
        x.sums[n] = scales_at + a.padded_rows * 4 + (row + lane % 4) * 16;
      }
      typename Codec::template Product<4> product;
      product.start(tile, slot, x, 0);
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

  // The same by the four warps of a team together, for FP4.
  __device__ __forceinline__ void multiply_team(const unsigned char* slot, float (&part)[kTiles][2]) const {
#if BERYL_WGMMA
    Fp4G128::Loaded tile;
    Fp4G128::load(tile, slot + own_tile * kTile.code_bytes,
                  slot + a.item_tiles * kTile.code_bytes + own_tile * kTile.meta_bytes, lane);
    OffsetOperands weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = OffsetOperands(tile.codes, i, tables);
    TeamProduct<kTiles> product;
    product.multiply(weights, slot + a.slot_x_at);
    const XScale* scales = reinterpret_cast<const XScale*>(slot + a.slot_x_at + kTiles * 4 * 256) + lane % 4;
    const float scale0 = bf16_at(tile.scales, 0), scale1 = bf16_at(tile.scales, 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const XScale x = scales[4 * n];
      const float digits0 = __int2float_rn(product.d[n][0] * 256 + product.d[n][1] + x.offset);
      const float digits1 = __int2float_rn(product.d[n][2] * 256 + product.d[n][3] + x.offset);
      part[n][0] = __fmaf_rn(digits0, __fmul_rn(scale0, x.scale), part[n][0]);
      part[n][1] = __fmaf_rn(digits1, __fmul_rn(scale1, x.scale), part[n][1]);
    }
#endif
  }

  // ---- y ----

  // A lane has rows lane / 4 and lane / 4 + 8 of the row tile for rows 4 n + lane % 4 of x.
  __device__ __forceinline__ void finish(int row_tile, int chunk, float (&sum)[kTiles][2]) const {
    const int n_tiles = min(kTiles, (a.n_rows + 3) / 4);
    if (a.n_chunks > 1) {
      const int64_t tile_floats = a.padded_rows * 16, chunk_floats = a.n_row_tiles * tile_floats;
      float* mine = a.partials + row_tile * tile_floats + lane;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n >= n_tiles) break;
        __stcg(mine + chunk * chunk_floats + n * 64, sum[n][0]);
        __stcg(mine + chunk * chunk_floats + n * 64 + 32, sum[n][1]);
      }
      __threadfence();
      __syncwarp();
      int before = 0;
      if (lane == 0) before = atomicAdd(a.counters + row_tile, 1);
      if (__shfl_sync(kAllLanes, before, 0) != a.n_chunks - 1) return;
      __threadfence();
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (n >= n_tiles) break;
        const float* from = mine + n * 64;
        sum[n][0] = __ldcg(from), sum[n][1] = __ldcg(from + 32);
        for (int c = 1; c < a.n_chunks; ++c) {
          from += chunk_floats;
          sum[n][0] = __fadd_rn(sum[n][0], __ldcg(from));
          sum[n][1] = __fadd_rn(sum[n][1], __ldcg(from + 32));
        }
      }
    }
    float scale[2] = {1, 1};
    if (a.row_scales != nullptr) {
      scale[0] = a.row_scales[row_tile * kTileRows + lane / 4];
      scale[1] = a.row_scales[row_tile * kTileRows + lane / 4 + 8];
    }
    const int col = row_tile * (a.gated ? kTileRows / 2 : kTileRows) + lane / 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int row = 4 * n + lane % 4;
      if (row >= a.n_rows) break;
      float value[2] = {sum[n][0], sum[n][1]};
      if (a.has_norm) {
        const float factor = __ldcg(a.factors + row);
        value[0] = __fmul_rn(value[0], factor), value[1] = __fmul_rn(value[1], factor);
      }
      if (a.row_scales != nullptr) value[0] = __fmul_rn(value[0], scale[0]), value[1] = __fmul_rn(value[1], scale[1]);
      if (a.gated) {
        const float gate = a.epilogue == DecodeEpilogue::kGatedGelu ? quick_gelu_tanh(value[0]) : quick_silu(value[0]);
        if (col < a.outputs) store(row, col, __fmul_rn(gate, value[1]));
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (col + 8 * h < a.outputs) store(row, col + 8 * h, finished(value[h], row, col + 8 * h));
      }
    }
  }
  __device__ __forceinline__ float finished(float value, int row, int col) const {
    if (a.epilogue == DecodeEpilogue::kStore) return value;
    if (a.epilogue == DecodeEpilogue::kSoftcap) return a.softcap * tanhf(value / a.softcap);
    const float other = __ldcg(a.other.values + row * a.other.stride + col);
    switch (a.epilogue) {
      case DecodeEpilogue::kGeluTimesOther: return quick_gelu_tanh(value) * other;
      case DecodeEpilogue::kTimesGeluOther: return value * quick_gelu_tanh(other);
      default: return value * quick_silu(other);
    }
  }
  __device__ __forceinline__ void store(int row, int col, float value) const {
    a.y.values[row * a.y.stride + col] = __uint_as_float(round_result(value));
  }

  const BatchKernelArgs& a;
  unsigned char* shared;
  BatchShared* small;
  int warp, lane, team;
  int own_tile;                     // this warp's row tile of an item
  Slot place;                       // in the ring
  Slot exchange;                    // among the two buffers
  E2m1Tables tables;
};

// Two blocks share a multiprocessor where registers allow: 16 rows.
template <class Codec, Format kFormat, int kGroups>
__global__ void __launch_bounds__(kBatchThreads, kGroups == 1 ? 2 : 1)
    batch_linear_kernel(const __grid_constant__ BatchKernelArgs args) {
  extern __shared__ __align__(128) unsigned char batch_shared[];
  BatchLinear<Codec, kFormat, kGroups>(args, batch_shared).run();
}

// A format's kernels: for up to 16, 32 and 64 rows of x (some formats have one for the latter two).
struct BatchKernels {
  void (*prepare)(PrepareArgs) = nullptr;
  void (*multiply[3])(BatchKernelArgs) = {};
};
template <class Codec, Format kFormat, bool kOwn32>
BatchKernels batch_kernels() {
  return {prepare_x_kernel<Codec, kFormat>,
          {batch_linear_kernel<Codec, kFormat, 1>, batch_linear_kernel<Codec, kFormat, kOwn32 ? 2 : 4>,
           batch_linear_kernel<Codec, kFormat, 4>}};
}

// In batch_FAMILY.cu, so that they compile side by side; empty for formats of another family.
BatchKernels batch_e2m1_kernels(Format format);
BatchKernels batch_integer_kernels(Format format);
BatchKernels batch_k_kernels(Format format);
BatchKernels batch_float_kernels(Format format);

}  // namespace beryl::cuda
