// What the parts of an attention phase of the decode kernel share: which units there are and whose they are, how a unit lies in shared memory,
// and how its sums wait for the merge.
#pragma once

#include "cuda/decode_block.cuh"
#include "cuda/index_math.h"

namespace beryl::cuda {

inline constexpr int kUnitHeadBits = 4, kUnitHeads = 1 << kUnitHeadBits;
// Warps that copy keys and values: one for a copy engine, three where each lane copies 16 bytes at a time.
inline constexpr int kAttentionCopiers = BERYL_BULK_COPY ? 1 : 3;
inline constexpr int kStateCopies = 16;            // of a unit's maximum and sum: one for each reader
inline constexpr int kMergeColumns = 32;
inline constexpr int kMergeLanes = kMergeColumns / 4, kMergeGroups = 32 / kMergeLanes;   // a lane has four columns of one of so many units
inline constexpr int kMergeWarps = 8;
inline constexpr int kMergeShare = (kMaxDecodeUnits + kMergeWarps - 1) / kMergeWarps;    // units that one warp merges
inline constexpr int kMergeSums = (kMergeShare + kMergeGroups - 1) / kMergeGroups;       // and one lane

// Scratch of a unit, in bytes. q: [2 · heads][head_dim] bf16, high and low rows in turn; keys and values of new tokens.
struct AttentionScratch {
  static constexpr int kScoreStride = kPageTokens + 8;    // spreads heads over the banks
  static constexpr int kWeightBytes = kPageTokens * 2 + 16;   // a row of bf16, likewise
  static constexpr int kScoresAt = 0;                     // f32 [4 parts][16 heads][kScoreStride]
  static constexpr int kWeightsAt = kScoresAt + 4 * kUnitHeads * kScoreStride * 4;   // [2 · heads]
  static constexpr int kStateAt = kWeightsAt + 2 * kUnitHeads * kWeightBytes;         // f32 [2][16]: factors, and what sums are multiplied by
  static constexpr int kNewScalesAt = kStateAt + 2 * kUnitHeads * 4;                  // f32 [8 rows][2]
  static constexpr int kQueriesAt = kNewScalesAt + kDecodeRows * 2 * 4;
  BERYL_HOST_DEVICE static constexpr int query_bytes(int head_dim) { return head_dim * 2 + 16; }
  BERYL_HOST_DEVICE static constexpr int query_rows(int heads) { return heads <= 4 ? 8 : (heads + 7) / 8 * 16; }
  BERYL_HOST_DEVICE static constexpr int new_at(int head_dim, int heads) { return kQueriesAt + query_rows(heads) * query_bytes(head_dim); }
  static constexpr int bytes(int head_dim, int heads, int n_rows) { return new_at(head_dim, heads) + n_rows * 2 * head_dim * 2; }
  // The merge: [2 groups][8 warps][34] f32.
  static constexpr int kMergeBytes = 2 * kMergeWarps * (kMergeColumns + 2) * 4;
};

// ---- what the copying warp and the others agree on ----

struct DecodeUnit {
  int row;
  int kv_head;
  int first_head;
  int n_heads;
  int unit;
  DecodeUnits units;
  bool first_tile_of_heads;         // of the KV head's query heads
};

// floor(a / b) for a below 2^16 and few b, without the instructions of a division.
__device__ __forceinline__ int quick_quotient(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// Where this block is among a phase's units.
struct UnitPlace {
  int row, index;
};
// The next unit of this block; false if there is none.
__device__ __forceinline__ bool next_unit(const DecodeBlock& block, const AttentionPhase& p, UnitPlace& at, DecodeUnit& unit) {
  const int heads = p.heads_of_kv, n_kv_heads = p.cache.n_kv_heads;
#pragma unroll 1
  for (; at.row < block.args.n_rows; ++at.row) {
    const DecodeUnits units = decode_units(block.small->positions[at.row], p.window);
    // Fewer heads in a unit where that gives work to more blocks: of each head it is the same work.
    const auto tiles_of = [&](int bits) { return (heads + (1 << bits) - 1) >> bits; };
    int bits = kUnitHeadBits;
    while (bits > 2 && units.count * n_kv_heads * block.args.n_rows * tiles_of(bits - 1) <= static_cast<int>(gridDim.x)) --bits;
    const int head_tiles = tiles_of(bits), n_items = n_kv_heads * head_tiles;
    if (at.index < units.count * n_items) {
      // Neighbouring blocks have neighbouring KV heads of one page.
      const int number = quick_quotient(at.index, n_items), item = at.index - number * n_items, kv_head = quick_quotient(item, head_tiles),
                head_tile = item - kv_head * head_tiles;
      unit = {at.row, kv_head, kv_head * heads + (head_tile << bits), min(heads - (head_tile << bits), 1 << bits), number, units, head_tile == 0};
      at.index += static_cast<int>(gridDim.x);
      return true;
    }
    at.index -= units.count * n_items;
  }
  return false;
}

// How the keys or the values of a tile lie in the ring: pieces of 16, 32 or 64 rows, a slot each; first all of the keys, then the values
// (boxes: index_math.h). Of an FP8 cache all scales of the tile are at the end of the slot where its values begin.
struct TileCut {
  static constexpr int kScaleBytes = 2 * kPageTokens * 4;
  int row_shift;                    // bytes of a row: 1 << row_shift
  int piece_shift;                  // rows of a piece
  __device__ __forceinline__ TileCut(const CacheView& cache, int cols, int slot_bytes) {
    const bool is_fp8 = cache.element == CacheElement::kFp8;
    row_shift = 31 - __clz(is_fp8 ? cols : 2 * cols);
    piece_shift = min(31 - __clz(is_fp8 ? slot_bytes - kScaleBytes : slot_bytes) - row_shift, 6);
  }
  __device__ __forceinline__ static TileCut of_keys(const CacheView& cache, int slot_bytes) { return {cache, cache.key_cols, slot_bytes}; }
  __device__ __forceinline__ static TileCut of_values(const CacheView& cache, int slot_bytes) { return {cache, cache.head_dim, slot_bytes}; }
};

// A tile of a task (AttentionTask::tiles).
struct TaskTile {
  int row, older;
  int begin, end;
  uint32_t held;                    // new rows
  int boxes;                        // bit b: box b has a live key
  __device__ __forceinline__ explicit TaskTile(const int4& from)
      : row(from.x), older(from.y), begin(from.z & 0xff), end(from.z >> 8 & 0xff), held(static_cast<uint32_t>(from.z) >> 16), boxes(from.w) {}
  __device__ __forceinline__ bool live(int slot) const { return slot >= begin && (slot < end || older >= 0); }
  __device__ __forceinline__ bool empty(int box) const { return (boxes >> box & 1) == 0; }
};

// ---- nothing is all ones ----
__device__ __forceinline__ uint32_t never_all_ones(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits == ~0u ? 0x7fffffffu : bits;
}
__device__ __forceinline__ void store_common_pair(float2* at, uint32_t first, uint32_t second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(first), "r"(second) : "memory");
}
__device__ __forceinline__ void store_common_words(float* at, uint4 bits) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w) : "memory");
}
// Without a branch: behind one that lanes take differently each store would look up again what it needs.
__device__ __forceinline__ void store_common_word_if(bool condition, float* to, uint32_t bits) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.relaxed.gpu.global.b32 [%0], %1;}" ::"l"(to), "r"(bits), "r"(condition ? 1 : 0) : "memory");
}
__device__ __forceinline__ void store_common_pair_if(bool condition, float* to, uint32_t first, uint32_t second) {
  asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};}" ::"l"(to), "r"(first), "r"(second),
               "r"(condition ? 1 : 0)
               : "memory");
}
__device__ __forceinline__ uint2 load_common_pair(const float2* from) {
  uint2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(from) : "memory");
  return bits;
}

}  // namespace beryl::cuda
