// The kernels of prefill_attention.h.
//
// Rows are (token, head) pairs: a KV head's query heads for one token, then for the next. A group of four warps has 64
// of them, a tile of keys is a page of 64 positions, and tiles come by the tensor copy engine in slabs of 64 columns
// (attention_wgmma.cuh). Tiles begin at absolute positions; a row that has no key in a tile is not changed by it.
//
// Heads of up to 256 (NarrowAttention): two groups (or, for few rows, one) with rows of their own share the tiles.
// While a group's tensor products with the values run, it computes the softmax of the next scores.
//
// Heads of 512 (WideAttention): 64 x 512 sums are half of the registers, so roles are split. One group keeps most of q
// in registers and makes weights, two multiply them with half of the columns each; weights go through shared memory.
// Two blocks of a cluster have neighbouring rows and share all tiles: each copies half of the slabs to both. There are
// no warps that only copy: with more than 12 the assembler has 128 registers a thread, which is too few for 128 sums,
// whatever setmaxnreg says later. The first warp of each summing group copies while it waits; all it takes is one
// instruction for half of a tile, since what that warp does its group waits for.
//
// A tile of heads of 512, in cycles: tensor cores 2,048; shared memory 2,400 (128 KB copied, 80 KB read for scores, 80
// KB for values, 16 KB of weights); from the L2 64 KB a block.
//
// The softmax's reference is not the largest score but one that makes no weight larger than 2^8: sums are scaled when
// a row leaves that range, which is rare.
#pragma once

#include <cuda.h>

#include "cuda/async.cuh"
#include "cuda/attention_state.cuh"
#include "cuda/attention_wgmma.cuh"
#include "cuda/index_math.h"
#include "cuda/prefill_kernel.cuh"

namespace beryl::cuda {

struct PrefillAttentionArgs {
  CUtensorMap keys, values;  // [head_dim / 64][rows of the pool][64] bf16, in boxes as kernels copy at a time
  // Keys from values (index_math.h): `keys` has the turned columns, one slab a half of the head, `others` the values in
  // boxes of the slabs behind them.
  CUtensorMap others;
  const float* key_weight;   // CacheView::key_weight
  RowsView q, out;           // [n_tokens][n_heads][head_dim]
  TokenView token;
  int n_tokens, n_heads, n_kv_heads;
  int window;
  float scale, softcap;
};

inline constexpr int kAttendedKeys = kPageTokens;  // of a tile
inline constexpr int kAttendedRows = 64;           // of a group of warps
inline constexpr int kSlabColumns = 64, kSlabRowBytes = 128;

template <int kDim, int kRowGroups>
struct NarrowAttentionShape {
  static constexpr int kGroups = kRowGroups, kThreads = (kGroups + 1) * 128;
  static constexpr int kSlabs = kDim / kSlabColumns, kTileBytes = kAttendedKeys * kDim * 2;
  static constexpr int kStages = kDim == 256 ? 2 : 4;
  static constexpr int kQueryBytes = kAttendedRows * kDim * 2;  // of a group
  static constexpr int kKeysAt = kGroups * kQueryBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kTileBytes;
  static constexpr int kSharedBytes = kBarriersAt + 4 * kStages * 8;
};

struct WideAttentionShape {
  static constexpr int kDim = 512, kCluster = 2;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kSlabs = kDim / kSlabColumns;
  static constexpr int kHeldSlabs = 6;                 // of q in registers, the others in shared memory
  static constexpr int kOwnSlabs = kSlabs / kCluster;  // of a tile, that a block copies to both
  static_assert(kDim == kFromValuesDim && kTurnedPairs == kSlabColumns && kOwnSlabs * kSlabColumns == kDim / 2);
  static constexpr int kSlabBytes = kAttendedKeys * kSlabRowBytes;
  static constexpr int kKeySlots = 2, kKeyBytes = kOwnSlabs * kSlabBytes;  // what one block copies
  static constexpr int kValueKeys = 32, kValueSlots = 4;                   // keys whose values are a slot
  static constexpr int kValueSlabBytes = kValueKeys * kSlabRowBytes, kValueBytes = kSlabs * kValueSlabBytes;
  static constexpr int kWeightSlots = 2;
  static constexpr int kValuesAt = kKeySlots * kKeyBytes, kWeightsAt = kValuesAt + kValueSlots * kValueBytes;
  static constexpr int kQueriesAt = kWeightsAt + kWeightSlots * kSlabBytes;
  static constexpr int kFactorsAt = kQueriesAt + (kSlabs - kHeldSlabs) * kSlabBytes;
  static constexpr int kBarriersAt = kFactorsAt + kWeightSlots * kAttendedRows * 4;
  static constexpr int kSharedBytes = kBarriersAt + 2 * (kKeySlots + kValueSlots + kWeightSlots) * 8;
};
static_assert(NarrowAttentionShape<256, 2>::kSharedBytes <= kPrefillSharedBytes);
static_assert(WideAttentionShape::kSharedBytes <= kPrefillSharedBytes);

#if BERYL_WGMMA

// Neighbouring rows of one sequence, [token_begin, token_end), and the tiles that hold keys of any of them.
struct RowSegment {
  int token_begin, token_end;
  int sequence;
  Band band;
  int unit_begin, unit_end;
};
// All lanes of a warp, with the same arguments. Args: has token and window.
template <class Args>
__device__ __forceinline__ RowSegment segment_from(const Args& a, int token_begin, int last) {
  RowSegment segment = {token_begin, last, a.token.sequences[token_begin], {}, 0, 0};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int base = token_begin; base < last; base += 32) {
    const bool other = base + lane < last && a.token.sequences[base + lane] != segment.sequence;
    const unsigned found = __ballot_sync(kAllLanes, other);
    if (found == 0) continue;
    segment.token_end = base + __ffs(static_cast<int>(found)) - 1;
    break;
  }
  segment.band = {live_band(a.token.positions[token_begin], a.window).begin,
                  a.token.positions[segment.token_end - 1] + 1};
  segment.unit_begin = segment.band.begin / kAttendedKeys;
  segment.unit_end = (segment.band.end + kAttendedKeys - 1) / kAttendedKeys;
  return segment;
}

// Goes through the tiles of all segments of tokens [token, last), kPieces a tile, with their rows of the pool. Pages
// are read 32 at a time into the lanes of a warp.
template <int kPieces>
class TileCursor {
 public:
  int piece = 0;
  int row;  // of the pool: the tile's first

  __device__ __forceinline__ TileCursor(const PrefillAttentionArgs& args, int token, int last) : a(args) {
    enter(token, last);
  }
  __device__ __forceinline__ bool done() const { return unit == unit_end; }
  __device__ __forceinline__ void next(int last) {
    if (++piece < kPieces) return;
    piece = 0;
    if (++unit < unit_end)
      find_row();
    else if (token_end < last)
      enter(token_end, last);
  }

 private:
  __device__ __forceinline__ void enter(int token, int last) {
    const RowSegment segment = segment_from(a, token, last);
    unit = segment.unit_begin, unit_end = segment.unit_end, token_end = segment.token_end, sequence = segment.sequence;
    read_pages();
    find_row();
  }
  __device__ __forceinline__ void read_pages() {
    const int mine = min(unit / 32 * 32 + static_cast<int>(threadIdx.x) % 32, unit_end - 1);
    held = a.token.table[int64_t{sequence} * a.token.n_entries + table_entry(mine * kAttendedKeys, a.token.n_entries)];
  }
  __device__ __forceinline__ void find_row() {
    if (unit % 32 == 0) read_pages();
    row = (__shfl_sync(kAllLanes, held, unit % 32) * a.n_kv_heads + static_cast<int>(blockIdx.y)) * kPageTokens;
  }

  const PrefillAttentionArgs& a;
  int unit, unit_end, token_end, sequence, held;
};

// A box of the pool, slabs one after the other, into one block or the same place of all blocks of the cluster.
template <int kCluster>
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int row, int slab, uint64_t* barrier) {
  if constexpr (kCluster == 1) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, %2, %3}], "
        "[%4];" ::"r"(shared_address(to)),
        "l"(&map), "r"(row), "r"(slab), "r"(shared_address(barrier))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {0, %2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(row), "r"(slab), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << kCluster) - 1))
        : "memory");
  }
}
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
               : "memory");
}
// All lanes get the same answer.
__device__ __forceinline__ bool is_complete(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return __any_sync(kAllLanes, done != 0);
}
__device__ __forceinline__ void shared_writes_to_engines() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Two rows of a lane in its group's 64: row(0) and row(0) + 8.
struct LaneRows {
  int begin[2], end[2];        // their bands; none: [0, 0)
  int whole_begin, whole_end;  // keys that all live rows of the group have: no masks within
  __device__ __forceinline__ bool needs_masks(int unit) const {
    return unit * kAttendedKeys < whole_begin || (unit + 1) * kAttendedKeys > whole_end;
  }
};
__device__ __forceinline__ int lane_row() {
  return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ __forceinline__ LaneRows lane_rows(const PrefillAttentionArgs& a, const RowSegment& segment, int first_row,
                                              int heads) {
  LaneRows rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = (first_row + lane_row() + 8 * h) / heads;
    Band band = {0, 0};
    if (token >= segment.token_begin && token < segment.token_end) band = live_band(a.token.positions[token], a.window);
    rows.begin[h] = band.begin, rows.end[h] = band.end;
  }
  const int first = max(segment.token_begin, first_row / heads);
  const int last = min(segment.token_end - 1, (first_row + kAttendedRows - 1) / heads);
  rows.whole_begin = 0, rows.whole_end = INT_MAX;
  if (first <= last) {
    rows.whole_begin = live_band(a.token.positions[last], a.window).begin;
    rows.whole_end = a.token.positions[first] + 1;
  }
  return rows;
}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The softmax of a lane's two rows. Weights are 2^(score · factor - reference).
struct LaneSoftmax {
  static constexpr float kHeadroom = 8;
  float reference[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};  // this lane's columns

  // Scores of a tile to weights. factor: of all sums so far, 1 unless a row's reference is raised.
  __device__ __forceinline__ void weigh(float (&scores)[8][4], const PrefillAttentionArgs& a, const LaneRows& rows,
                                        int unit, float (&factor)[2]) {
    constexpr float kLog2E = 1.4426950408889634f;
    float to_exponent = a.scale * kLog2E;
    if (a.softcap > 0.0f) {
      to_exponent = kLog2E;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[n][i] = attention_score(scores[n][i], a.scale, a.softcap);
    }
    if (rows.needs_masks(unit)) {
      const int first = unit * kAttendedKeys + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = first + n * 8 + i % 2;
          if (position < rows.begin[i / 2] || position >= rows.end[i / 2]) scores[n][i] = -INFINITY;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; ++n) most = fmaxf(most, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      most = lane_max<4>(most) * to_exponent;
      const bool raises = most > reference[h] + kHeadroom;
      factor[h] = raises ? fast_exp2(reference[h] - most) : 1.0f;
      if (raises) reference[h] = most;
      const float base = reference[h] == -INFINITY ? 0.0f : reference[h];
      float added = 0;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          scores[n][i] = fast_exp2(__fmaf_rn(scores[n][i], to_exponent, -base));
          added += scores[n][i];
        }
      sum[h] = __fmaf_rn(sum[h], factor[h], added);
    }
  }
};
__device__ __forceinline__ uint32_t pair_of_bf16(float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <int kTiles>
__device__ __forceinline__ void scale_rows(float (&sums)[kTiles][4], const float (&factor)[2]) {
  if (!__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] *= factor[i / 2];
}
// Values outside the band may be anything, and 0 · NaN is NaN: zeros instead. By the 128 threads of a group, then seen
// by the tensor cores. Keys [first_key, first_key + n_keys) of n_slabs slabs.
__device__ __forceinline__ void clear_dead_values(unsigned char* slabs, int n_slabs, int first_key, int n_keys,
                                                  Band band, int barrier) {
  for (int i = static_cast<int>(threadIdx.x) % 128; i < n_slabs * n_keys * 8; i += 128) {
    const int key = first_key + i / 8 % n_keys;
    if (key < band.begin || key >= band.end) reinterpret_cast<uint4*>(slabs)[i] = make_uint4(0, 0, 0, 0);
  }
  shared_writes_to_engines();
  asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void warp_arrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
// A lane's columns of a row: 2 · (lane % 4) and the next of each 8.
template <int kTiles>
__device__ __forceinline__ void store_row(float* out, const float (&sums)[kTiles][4], int half, float factor) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
    *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
}

// What a query is multiplied by where keys are made from values. column: of 64 from which all are turned or none.
template <class Vector>
__device__ __forceinline__ Vector query_weight(const PrefillAttentionArgs& a, int column, Vector one) {
  if (a.key_weight == nullptr || is_turned(column)) return one;
  return __ldg(reinterpret_cast<const Vector*>(a.key_weight + column));
}

// Columns [kFirst, kDim) of q of a group's rows as bf16, in slabs of 64 columns; by its 128 threads.
template <int kDim, int kFirst>
__device__ __forceinline__ void load_queries(const PrefillAttentionArgs& a, unsigned char* to, int row_begin,
                                             int kv_head, int heads) {
  constexpr int kPieces = (kDim - kFirst) / 8;  // of a row
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) % 128; i < kAttendedRows * kPieces; i += 128) {
    const int row = i / kPieces, piece = i % kPieces, token = min((row_begin + row) / heads, a.n_tokens - 1);
    const auto* q = reinterpret_cast<const float4*>(
        a.q.values + token * a.q.stride + (kv_head * heads + (row_begin + row) % heads) * kDim + kFirst + piece * 8);
    float4 low = __ldcg(q), high = __ldcg(q + 1);
    if constexpr (kDim == kFromValuesDim) {
      const float4 one = make_float4(1, 1, 1, 1);
      low = times(low, query_weight(a, kFirst + piece * 8, one)), high = times(high, query_weight(a, kFirst + piece * 8 + 4, one));
    }
    *reinterpret_cast<uint4*>(to + piece / 8 * (kAttendedRows * kSlabRowBytes) + row * kSlabRowBytes +
                              (piece % 8 ^ row % 8) * 16) =
        make_uint4(pair_of_bf16(low.x, low.y), pair_of_bf16(low.z, low.w), pair_of_bf16(high.x, high.y),
                   pair_of_bf16(high.z, high.w));
  }
  shared_writes_to_engines();
}

template <int kDim, int kGroups>
class NarrowAttention {
 public:
  using Shape = NarrowAttentionShape<kDim, kGroups>;
  static constexpr int kStages = Shape::kStages, kSlabBytes = kAttendedKeys * kSlabRowBytes;

  __device__ __forceinline__ NarrowAttention(const PrefillAttentionArgs& args, unsigned char* shared_memory)
      : a(args),
        shared(shared_memory),
        keys_full(reinterpret_cast<uint64_t*>(shared_memory + Shape::kBarriersAt)),
        keys_empty(keys_full + kStages),
        values_full(keys_full + 2 * kStages),
        values_empty(keys_full + 3 * kStages),
        heads(args.n_heads / args.n_kv_heads),
        kv_head(static_cast<int>(blockIdx.y)),
        first_row((static_cast<int>(gridDim.x - 1 - blockIdx.x)) * Shape::kGroups * kAttendedRows) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(keys_full + i, 1), barrier_init(values_full + i, 1);
        barrier_init(keys_empty + i, Shape::kGroups * 4), barrier_init(values_empty + i, Shape::kGroups * 4);
      }
      barrier_init_fence();
    }
    __syncthreads();
    grid_wait();
    const int group = static_cast<int>(threadIdx.x) / 128;
    if (group == Shape::kGroups) {
      // With one group there are enough for all.
      if constexpr (kGroups == 2) give_registers<24>();
      if (threadIdx.x % 128 < 32) copy();
    } else {
      if constexpr (kGroups == 2) take_registers<240>();
      attend(group);
    }
  }

 private:
  __device__ __forceinline__ int first_token() const { return first_row / heads; }
  __device__ __forceinline__ int last_token() const {
    return min((first_row + Shape::kGroups * kAttendedRows - 1) / heads + 1, a.n_tokens);
  }
  __device__ __forceinline__ unsigned char* keys_of(int slot) const {
    return shared + Shape::kKeysAt + slot * Shape::kTileBytes;
  }
  __device__ __forceinline__ unsigned char* values_of(int slot) const {
    return shared + Shape::kValuesAt + slot * Shape::kTileBytes;
  }

  __device__ __forceinline__ void copy() {
    const int lane = static_cast<int>(threadIdx.x) % 32, last = last_token();
    RingPlace<kStages> slot = {0, 1};  // the first round waits for nothing
#pragma unroll 1
    for (TileCursor<1> tile(a, first_token(), last); !tile.done(); tile.next(last)) {
      barrier_wait(keys_empty + slot.index, slot.parity);
      if (lane == 0) {
        expect_bytes(keys_full + slot.index, Shape::kTileBytes);
        copy_box<1>(keys_of(slot.index), a.keys, tile.row, 0, keys_full + slot.index);
      }
      barrier_wait(values_empty + slot.index, slot.parity);
      if (lane == 0) {
        expect_bytes(values_full + slot.index, Shape::kTileBytes);
        copy_box<1>(values_of(slot.index), a.values, tile.row, 0, values_full + slot.index);
      }
      __syncwarp();
      slot.next();
    }
  }

  __device__ __forceinline__ void attend(int group) {
    const int row_begin = first_row + group * kAttendedRows, last = last_token();
    unsigned char* queries = shared + group * Shape::kQueryBytes;
    load_queries<kDim, 0>(a, queries, row_begin, kv_head, heads);
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
    const uint64_t query = slab_descriptor(shared_address(queries));

    RingPlace<kStages> key_slot, value_slot;
    float scores[8][4], sums[kDim / 8][4];
    uint32_t weights[4][4];
    const auto multiply_keys = [&](int slot) {
      const uint64_t key = slab_descriptor(shared_address(keys_of(slot)));
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const uint64_t at = step / 4 * (kSlabBytes / 16) + step % 4 * kStepPieces;
        multiply_attention<0>(scores, query + at, key + at, step);
      }
      products_commit();
    };
    const auto multiply_values = [&](int slot, int add) {
      const uint64_t value = values_descriptor<kSlabBytes>(shared_address(values_of(slot)));
#pragma unroll
      for (int step = 0; step < kAttendedKeys / 16; ++step)
        multiply_attention<1>(sums, weights[step], value + step * kStepRows, step > 0 ? 1 : add);
      products_commit();
    };
    const auto pack = [&] {
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          weights[step][i] = pair_of_bf16(scores[2 * step + i / 2][i % 2 * 2], scores[2 * step + i / 2][i % 2 * 2 + 1]);
    };
#pragma unroll 1
    for (int token = first_token(); token < last;) {
      const RowSegment segment = segment_from(a, token, last);
      token = segment.token_end;
      const LaneRows rows = lane_rows(a, segment, row_begin, heads);
      LaneSoftmax softmax;
      float factor[2];
      // Waits for values of a tile, and clears those that are nobody's.
      const auto await_values = [&](int unit) {
        barrier_wait(values_full + value_slot.index, value_slot.parity);
        if (unit * kAttendedKeys < segment.band.begin || (unit + 1) * kAttendedKeys > segment.band.end)
          clear_dead_values(values_of(value_slot.index), Shape::kSlabs, unit * kAttendedKeys, kAttendedKeys,
                            segment.band, group + 1);
      };

      barrier_wait(keys_full + key_slot.index, key_slot.parity);
      products_begin();
      multiply_keys(key_slot.index);
      products_wait<0>();
      hold(scores);
      warp_arrive(keys_empty + key_slot.index);
      key_slot.next();
      softmax.weigh(scores, a, rows, segment.unit_begin, factor);
      pack();
      int add = 0;
#pragma unroll 1
      for (int unit = segment.unit_begin + 1; unit < segment.unit_end; ++unit) {
        await_values(unit - 1);
        barrier_wait(keys_full + key_slot.index, key_slot.parity);
        products_begin();
        multiply_keys(key_slot.index);
        multiply_values(value_slot.index, add);
        add = 1;
        products_wait<1>();
        hold(scores);
        warp_arrive(keys_empty + key_slot.index);
        key_slot.next();
        softmax.weigh(scores, a, rows, unit, factor);
        products_wait<0>();
        hold(weights);
        hold(sums);
        warp_arrive(values_empty + value_slot.index);
        value_slot.next();
        scale_rows(sums, factor);
        pack();
      }
      await_values(segment.unit_end - 1);
      products_begin();
      multiply_values(value_slot.index, add);
      products_wait<0>();
      hold(weights);
      hold(sums);
      warp_arrive(values_empty + value_slot.index);
      value_slot.next();

#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float total = lane_sum<4>(softmax.sum[h]);
        const int row = row_begin + lane_row() + 8 * h, of = row / heads;
        if (of < segment.token_begin || of >= segment.token_end) continue;
        store_row(a.out.values + of * a.out.stride + (kv_head * heads + row % heads) * kDim + threadIdx.x % 4 * 2, sums,
                  h, 1.0f / total);
      }
    }
  }

  const PrefillAttentionArgs& a;
  unsigned char* shared;
  uint64_t *keys_full, *keys_empty, *values_full, *values_empty;
  int heads, kv_head, first_row;
};

class WideAttention {
 public:
  using Shape = WideAttentionShape;
  static constexpr int kDim = Shape::kDim, kCluster = Shape::kCluster;
  static constexpr int kKeySlots = Shape::kKeySlots, kValueSlots = Shape::kValueSlots,
                       kWeightSlots = Shape::kWeightSlots;
  static constexpr int kParts = kAttendedKeys / Shape::kValueKeys;  // slots of values of a tile

  __device__ __forceinline__ WideAttention(const PrefillAttentionArgs& args, unsigned char* shared_memory)
      : a(args),
        shared(shared_memory),
        keys_full(reinterpret_cast<uint64_t*>(shared_memory + Shape::kBarriersAt)),
        keys_empty(keys_full + kKeySlots),
        values_full(keys_empty + kKeySlots),
        values_empty(values_full + kValueSlots),
        weights_full(values_empty + kValueSlots),
        weights_empty(weights_full + kWeightSlots),
        heads(args.n_heads / args.n_kv_heads),
        kv_head(static_cast<int>(blockIdx.y)),
        rank(static_cast<int>(blockIdx.x) % kCluster),
        first_row(static_cast<int>((gridDim.x - 1 - blockIdx.x) / kCluster) * kCluster * kAttendedRows) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kKeySlots; ++i) barrier_init(keys_full + i, 1), barrier_init(keys_empty + i, kCluster * 4);
      for (int i = 0; i < kValueSlots; ++i)
        barrier_init(values_full + i, 1), barrier_init(values_empty + i, kCluster * 8);
      for (int i = 0; i < kWeightSlots; ++i) barrier_init(weights_full + i, 128), barrier_init(weights_empty + i, 8);
      barrier_init_fence();
    }
    cluster_barrier();
    grid_wait();
    const int group = static_cast<int>(threadIdx.x) / 128;
    if (group == 0)
      make_weights();
    else if (group == 1)
      sum_values<0>();
    else
      sum_values<1>();
    __syncwarp();
    // The other block's copies and arrivals reach into this one's shared memory.
    cluster_barrier();
  }

 private:
  __device__ __forceinline__ static void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }
  // The cluster's tokens: both blocks go through the same segments and tiles.
  __device__ __forceinline__ int first_token() const { return first_row / heads; }
  __device__ __forceinline__ int last_token() const {
    return min((first_row + kCluster * kAttendedRows - 1) / heads + 1, a.n_tokens);
  }
  __device__ __forceinline__ unsigned char* keys_of(int slot) const { return shared + slot * Shape::kKeyBytes; }
  __device__ __forceinline__ unsigned char* values_of(int slot) const {
    return shared + Shape::kValuesAt + slot * Shape::kValueBytes;
  }
  __device__ __forceinline__ unsigned char* weights_of(int slot) const {
    return shared + Shape::kWeightsAt + slot * Shape::kSlabBytes;
  }
  __device__ __forceinline__ float* factors_of(int slot) const {
    return reinterpret_cast<float*>(shared + Shape::kFactorsAt) + slot * kAttendedRows;
  }
  // A slot that both blocks fill is free when the readers of both are done. Nothing was written: no fence.
  __device__ __forceinline__ static void release(uint64_t* barrier) {
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kCluster)
      asm volatile(
          "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
          "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
          "r"(lane)
          : "memory");
  }

  // What a warp does while it waits: it fills a ring, of keys (a half of a tile's slabs, copied by one of the blocks)
  // or of values (some keys', half of the slabs by each block).
  template <bool kOfKeys>
  struct Feeder {
    const WideAttention& of;
    TileCursor<kOfKeys ? kCluster : kParts> cursor;
    RingPlace<kOfKeys ? kKeySlots : kValueSlots> slot = {0, 1};  // the first round waits for nothing
    __device__ __forceinline__ explicit Feeder(const WideAttention& attention)
        : of(attention), cursor(attention.a, attention.first_token(), attention.last_token()) {}
    // As far as there is room.
    __device__ __forceinline__ void feed() {
      uint64_t *full = kOfKeys ? of.keys_full : of.values_full, *empty = kOfKeys ? of.keys_empty : of.values_empty;
#pragma unroll 1
      while (!cursor.done() && is_complete(empty + slot.index, slot.parity)) {
        if (threadIdx.x % 32 == 0) {
          expect_bytes(full + slot.index, kOfKeys ? Shape::kKeyBytes : Shape::kValueBytes);
          if constexpr (kOfKeys) {
            if (cursor.piece == of.rank) {
              const bool from_values = of.a.key_weight != nullptr;
              copy_box<kCluster>(of.keys_of(slot.index), of.a.keys, cursor.row, from_values ? of.rank : of.rank * Shape::kOwnSlabs,
                                 full + slot.index);
              if (from_values)
                copy_box<kCluster>(of.keys_of(slot.index) + Shape::kSlabBytes, of.a.others, cursor.row,
                                   of.rank * Shape::kOwnSlabs + 1, full + slot.index);
            }
          } else {
            copy_box<kCluster>(of.values_of(slot.index) + of.rank * Shape::kOwnSlabs * Shape::kValueSlabBytes,
                               of.a.values, cursor.row + cursor.piece * Shape::kValueKeys, of.rank * Shape::kOwnSlabs,
                               full + slot.index);
          }
        }
        __syncwarp();
        cursor.next(of.last_token());
        slot.next();
      }
    }
    // Of the group's warps the first one feeds.
    __device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
      if (threadIdx.x % 128 >= 32) return barrier_wait(barrier, parity);
#pragma unroll 1
      do feed();
      while (!is_complete(barrier, parity));
    }
  };

  // q stays in registers; a tile's scores become weights in shared memory, and factors of the sums so far. At the end
  // of a segment a last message has what the sums must be multiplied by.
  __device__ __forceinline__ void make_weights() {
    const int row_begin = first_row + rank * kAttendedRows, last = last_token(),
              lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kHeld = Shape::kHeldSlabs;
    unsigned char* queries = shared + Shape::kQueriesAt;
    load_queries<kDim, kHeld * kSlabColumns>(a, queries, row_begin, kv_head, heads);
    asm volatile("bar.sync 3, 128;" ::: "memory");
    const uint64_t others = slab_descriptor(shared_address(queries));
    uint32_t query[kHeld * 4][4];
    const auto row_of_q = [&](int row) {
      return a.q.values + min(row / heads, a.n_tokens - 1) * a.q.stride + (kv_head * heads + row % heads) * kDim +
             lane % 4 * 2;
    };
    const float *upper = row_of_q(row_begin + lane_row()), *lower = row_of_q(row_begin + lane_row() + 8);
#pragma unroll
    for (int i = 0; i < kHeld * 8; ++i) {
      const float2 first = __ldcg(reinterpret_cast<const float2*>(upper + i * 8));
      const float2 second = __ldcg(reinterpret_cast<const float2*>(lower + i * 8));
      const float2 weight = query_weight(a, i * 8 + lane % 4 * 2, make_float2(1, 1));
      query[i / 2][i % 2 * 2] = pair_of_bf16(first.x * weight.x, first.y * weight.y);
      query[i / 2][i % 2 * 2 + 1] = pair_of_bf16(second.x * weight.x, second.y * weight.y);
    }
    RingPlace<kKeySlots> key_slot;
    RingPlace<kWeightSlots> slot = {0, 1};
    // Where this lane's weights stand: its row's piece n, exchanged by the row.
    const int own_at = lane_row() * kSlabRowBytes + lane % 4 * 4;
    float scores[8][4];
#pragma unroll 1
    for (int token = first_token(); token < last;) {
      const RowSegment segment = segment_from(a, token, last);
      token = segment.token_end;
      const LaneRows rows = lane_rows(a, segment, row_begin, heads);
      LaneSoftmax softmax;
#pragma unroll 1
      for (int unit = segment.unit_begin; unit < segment.unit_end; ++unit) {
        int before = 0;
#pragma unroll
        for (int part = 0; part < kCluster; ++part) {
          barrier_wait(keys_full + key_slot.index, key_slot.parity);
          const uint64_t key = slab_descriptor(shared_address(keys_of(key_slot.index)));
          products_begin();
#pragma unroll
          for (int i = 0; i < Shape::kOwnSlabs * 4; ++i) {
            const int slab = part * Shape::kOwnSlabs + i / 4, step = i % 4;
            const uint64_t at = key + i / 4 * (Shape::kSlabBytes / 16) + step * kStepPieces;
            if (slab < kHeld)
              multiply_attention<0>(scores, query[slab < kHeld ? slab * 4 + step : 0], at, part + i);
            else
              multiply_attention<0>(scores, others + (slab - kHeld) * (Shape::kSlabBytes / 16) + step * kStepPieces, at,
                                    1);
          }
          products_commit();
          if (part > 0) {
            products_wait<1>();
            release(keys_empty + before);
          }
          before = key_slot.index;
          key_slot.next();
        }
        products_wait<0>();
        hold(scores);
        release(keys_empty + before);
        float factor[2];
        softmax.weigh(scores, a, rows, unit, factor);
        barrier_wait(weights_empty + slot.index, slot.parity);
        unsigned char* to = weights_of(slot.index) + own_at;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            *reinterpret_cast<uint32_t*>(to + h * 8 * kSlabRowBytes + (n ^ lane / 4) * 16) =
                pair_of_bf16(scores[n][2 * h], scores[n][2 * h + 1]);
        if (lane % 4 < 2) factors_of(slot.index)[lane_row() + lane % 4 * 8] = lane % 4 == 0 ? factor[0] : factor[1];
        shared_writes_to_engines();
        barrier_arrive(weights_full + slot.index);
        slot.next();
      }
      const float total[2] = {lane_sum<4>(softmax.sum[0]), lane_sum<4>(softmax.sum[1])};
      barrier_wait(weights_empty + slot.index, slot.parity);
      if (lane % 4 < 2)
        factors_of(slot.index)[lane_row() + lane % 4 * 8] = 1.0f / (lane % 4 == 0 ? total[0] : total[1]);
      barrier_arrive(weights_full + slot.index);
      slot.next();
    }
  }

  // The products of weights and values, columns [256 · half, 256 · half + 256).
  template <int half>
  __device__ __forceinline__ void sum_values() {
    constexpr int kOwnAt = Shape::kSlabs / 2 * Shape::kValueSlabBytes;
    const int last = last_token();
    Feeder<half == 1> feeder(*this);
    RingPlace<kValueSlots> value_slot;
    RingPlace<kWeightSlots> slot;
    float sums[32][4];
#pragma unroll 1
    for (int token = first_token(); token < last;) {
      const RowSegment segment = segment_from(a, token, last);
      token = segment.token_end;
#pragma unroll 1
      for (int unit = segment.unit_begin; unit < segment.unit_end; ++unit) {
        feeder.wait(weights_full + slot.index, slot.parity);
        if (unit > segment.unit_begin) {
          const float factor[2] = {factors_of(slot.index)[lane_row()], factors_of(slot.index)[lane_row() + 8]};
          scale_rows(sums, factor);
        }
        if (unit * kAttendedKeys < segment.band.begin || (unit + 1) * kAttendedKeys > segment.band.end) {
          RingPlace<kValueSlots> at = value_slot;
#pragma unroll 1
          for (int part = 0; part < kParts; ++part) {
            feeder.wait(values_full + at.index, at.parity);
            clear_dead_values(values_of(at.index) + half * kOwnAt, Shape::kSlabs / 2,
                              unit * kAttendedKeys + part * Shape::kValueKeys, Shape::kValueKeys, segment.band,
                              half + 1);
            at.next();
          }
        }
        const uint64_t weight = slab_descriptor(shared_address(weights_of(slot.index)));
        int before = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          feeder.wait(values_full + value_slot.index, value_slot.parity);
          const uint64_t value =
              values_descriptor<Shape::kValueSlabBytes>(shared_address(values_of(value_slot.index) + half * kOwnAt));
          products_begin();
#pragma unroll
          for (int step = 0; step < Shape::kValueKeys / 16; ++step)
            multiply_attention<1>(sums, weight + (part * (Shape::kValueKeys / 16) + step) * kStepPieces,
                                  value + step * kStepRows, part + step > 0 ? 1 : unit - segment.unit_begin);
          products_commit();
          if (part > 0) {
            products_wait<1>();
            release(values_empty + before);
            if (threadIdx.x % 128 < 32) feeder.feed();
          }
          before = value_slot.index;
          value_slot.next();
        }
        products_wait<0>();
        hold(sums);
        release(values_empty + before);
        warp_arrive(weights_empty + slot.index);
        slot.next();
      }
      feeder.wait(weights_full + slot.index, slot.parity);
      const int row_begin = first_row + rank * kAttendedRows;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float factor = factors_of(slot.index)[lane_row() + 8 * h];
        const int row = row_begin + lane_row() + 8 * h, of = row / heads;
        if (of < segment.token_begin || of >= segment.token_end) continue;
        float* out = a.out.values + of * a.out.stride + (kv_head * heads + row % heads) * kDim + half * 256 +
                     threadIdx.x % 4 * 2;
        store_row(out, sums, h, factor);
      }
      warp_arrive(weights_empty + slot.index);
      slot.next();
    }
  }

  const PrefillAttentionArgs& a;
  unsigned char* shared;
  uint64_t *keys_full, *keys_empty, *values_full, *values_empty, *weights_full, *weights_empty;
  int heads, kv_head, rank, first_row;
};

#endif

template <int kDim, int kGroups>
__global__ void __launch_bounds__(NarrowAttentionShape<kDim, kGroups>::kThreads, 1)
    narrow_attention_kernel(const __grid_constant__ PrefillAttentionArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  NarrowAttention<kDim, kGroups>(args, attention_shared).run();
#endif
}

// In prefill_attention_narrow.cu and prefill_attention_wide.cu, so that they compile side by side.
struct PrefillAttentionKernel {
  void (*kernel)(PrefillAttentionArgs);
  int rows;     // of a block
  int cluster;  // blocks
  int threads, shared_bytes;
  int key_box[2], value_box[2];  // rows, slabs
};
// n_groups: of 64 rows a block, 1 or 2; two share tiles, one gives more multiprocessors something to do.
PrefillAttentionKernel narrow_attention(int head_dim, int n_groups);
PrefillAttentionKernel wide_attention();

}  // namespace beryl::cuda
