// The attention phase of the decode kernel: QkvFinish and Attention of one layer, for 1 to 8 rows.
//
// The work is cut into units (index_math.h): a token, a KV head (at most 16 of its query heads, fewer where blocks would be
// idle) and a share of the keys, a page at a time. All warps of a block work on one unit:
//
//   load     keys and values of a page go from the cache straight into registers, in the order in which the tensor cores
//            want them; the first keys before anything else, because they depend on nothing in this step
//   finish   a warp a head: norm and rope of q, two bf16 each (high, low), to shared memory. Keys and values of tokens
//            that are new in this launch are not in the cache yet: the unit makes them itself where it needs them, and
//            the unit that owns a token's newest page writes them to the cache
//   scores   keys times q: warp (key group, part of head_dim) multiplies 16 keys
//   softmax  a warp a head: adds the parts, keeps the running maximum and sum; weights to two bf16
//   values   values times weights: a warp owns 16 (32 of wide heads) columns of head_dim
//
// A token with one unit is done then. Else unnormalised sums go to global memory, and as a second step each column is
// merged by one warp group. A sum that waits there is its own flag: nothing there means all ones, and the reader puts that
// back.
//
// q and the weights have 16 bits of mantissa, so products are as good as the cache's own values. Slots that hold no live
// key are never read. Moves the live keys and values once.
#pragma once

#include "cuda/attention_state.cuh"
#include "cuda/decode_block.cuh"
#include "cuda/index_math.h"
#include "cuda/mma.cuh"
#include "cuda/qkv_head.cuh"

namespace beryl::cuda {

inline constexpr int kUnitHeadBits = 4, kUnitHeads = 1 << kUnitHeadBits;
inline constexpr int kStateCopies = 16;            // of a unit's maximum and sum: one for each reader
inline constexpr int kMergeColumns = 32;
inline constexpr int kMergeWarps = 8;

// Scratch of a unit, in bytes. q: [2 · heads][head_dim] bf16, high and low rows in turn; keys and values of new tokens.
struct AttentionScratch {
  static constexpr int kScoreStride = kPageTokens + 8;    // spreads heads over the banks
  static constexpr int kWeightBytes = 160;                // a row of 64 bf16, likewise
  static constexpr int kScoresAt = 0;                     // f32 [4 parts][16 heads][kScoreStride]
  static constexpr int kWeightsAt = kScoresAt + 4 * kUnitHeads * kScoreStride * 4;   // [2 · heads]
  static constexpr int kStateAt = kWeightsAt + 2 * kUnitHeads * kWeightBytes;         // f32 [3][16]: factor, maximum, sum
  static constexpr int kNewScalesAt = kStateAt + 3 * kUnitHeads * 4;                  // f32 [8 rows][2]
  static constexpr int kQueriesAt = kNewScalesAt + kDecodeRows * 2 * 4;
  static constexpr int query_bytes(int head_dim) { return head_dim * 2 + 64; }
  static constexpr int new_at(int head_dim, int heads) { return kQueriesAt + (heads + 3) / 4 * 8 * query_bytes(head_dim); }
  static constexpr int bytes(int head_dim, int heads, int n_rows) { return new_at(head_dim, heads) + n_rows * 2 * head_dim * 2; }
  // The merge: [2 groups][8 warps][34] f32.
  static constexpr int kMergeBytes = 2 * kMergeWarps * (kMergeColumns + 2) * 4;
};

// ---- nothing is all ones ----
__device__ __forceinline__ float2 take_pair(float2* from) {
  uint2 bits;
  for (uint32_t polls = 0;;) {
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(from) : "memory");
    if (bits.x != ~0u && bits.y != ~0u) break;
    count_poll(polls);
  }
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %1};" ::"l"(from), "r"(~0u) : "memory");
  return make_float2(__uint_as_float(bits.x), __uint_as_float(bits.y));
}
__device__ __forceinline__ uint32_t never_all_ones(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits == ~0u ? 0x7fffffffu : bits;
}
__device__ __forceinline__ void leave_pair(float2* at, float first, float second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(never_all_ones(first)), "r"(never_all_ones(second))
               : "memory");
}

struct DecodeUnit {
  int row;
  int kv_head;
  int first_head;
  int n_heads;
  int unit;
  DecodeUnits units;
  bool first_tile_of_heads;         // of the KV head's query heads
};

template <int kDim, bool kFp8>
struct UnitShape {
  static constexpr int kParts = kDim >= 128 ? 4 : 2;          // warps that share a key's columns
  static constexpr int kBlocks = kDim / kParts / 32;          // of 32 columns: a lane has 8 of a key
  static constexpr int kRowTiles = kDim == 512 ? 2 : 1;       // of 16 columns of the output
  static constexpr int kColumns = 16 * kRowTiles;             // of the output, of a warp
  static constexpr int kValueWarps = kDim / kColumns;
  static constexpr int kKeyWords = kFp8 ? 2 : 4;              // 8 codes
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
};

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&to)[kWords], const uint8_t* from) {
  static_assert(kWords == 2 || kWords == 4);
  if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}
// 2 or 4 codes of a value row as one word: bf16 pairs, or 2 or 4 bytes.
template <int kBytes>
__device__ __forceinline__ uint2 load_codes(const uint8_t* from) {
  if constexpr (kBytes == 2) return make_uint2(*reinterpret_cast<const uint16_t*>(from), 0);
  if constexpr (kBytes == 4) return make_uint2(*reinterpret_cast<const uint32_t*>(from), 0);
  if constexpr (kBytes == 8) return *reinterpret_cast<const uint2*>(from);
}
// E4M3 codes in bytes 0 and 1 of a word to two bf16; exact.
__device__ __forceinline__ uint32_t codes_to_bf16(uint32_t two_bytes) { return widen_e4m3(byte_permute(two_bytes, 0, 0x1404)); }

template <int kDim, bool kFp8>
struct AttentionUnit {
  using S = UnitShape<kDim, kFp8>;
  const DecodeBlock& block;
  const AttentionPhase& p;
  const DecodeUnit u;
  int position;
  const int32_t* table;
  uint32_t new_rows;                // rows of this launch whose keys the unit needs from registers, not from the cache
  // Of this lane.
  int group, third;                 // lane / 4, lane % 4
  int key_group, part;              // of the scores
  unsigned char* scratch;

  __device__ __forceinline__ AttentionUnit(const DecodeBlock& b, const AttentionPhase& phase, const DecodeUnit& unit)
      : block(b), p(phase), u(unit), group(b.lane / 4), third(b.lane % 4), key_group(b.warp % 4), part(b.warp / 4), scratch(b.scratch) {
    position = block.small->positions[u.row];
    const int sequence = block.small->sequences[u.row];
    table = p.table + int64_t{sequence} * p.n_entries;
    new_rows = 0;
    if (p.kv.values == nullptr) return;
    const DecodeTile first = tile_of(0);
#pragma unroll 1
    for (int row = 0; row < block.args.n_rows; ++row) {
      const int at = block.small->positions[row];
      if (block.small->sequences[row] != sequence || at > position) continue;
      const bool holds = p.window > 0 ? tile_holds(first, at) : at / kPageTokens / u.units.tiles == u.unit;
      if (holds) new_rows |= 1u << row;
    }
  }

  __device__ __forceinline__ DecodeTile tile_of(int t) const { return decode_tile(position, p.window, u.units, u.unit, t); }
  __device__ __forceinline__ int page_of(int page) const { return page < 0 ? 0 : __ldg(table + table_entry(page * kPageTokens, p.n_entries)); }

  // A tile's slots: which are live, and where its pages begin. The same in all lanes.
  struct TilePages {
    DecodeTile tile;
    int64_t page, older;            // of this KV head, in rows of the pools
    uint64_t live;                  // bit i: slot i
  };
  __device__ __forceinline__ static uint64_t bits_below(int n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }
  __device__ __forceinline__ TilePages pages_of(int t) const {
    TilePages pages = {tile_of(t), 0, 0, 0};
    const auto first_row = [&](int page) { return (int64_t{page_of(page)} * p.cache.n_kv_heads + u.kv_head) * kPageTokens; };
    if (pages.tile.begin < pages.tile.end) pages.page = first_row(pages.tile.page);
    pages.live = bits_below(pages.tile.end) & ~bits_below(pages.tile.begin);
    if (pages.tile.older >= 0) {
      pages.older = first_row(pages.tile.older);
      pages.live |= ~bits_below(pages.tile.end);
    }
    return pages;
  }
  __device__ __forceinline__ static bool live(const TilePages& pages, int slot) { return (pages.live >> slot & 1) != 0; }
  // The row of the pools that holds a live slot.
  __device__ __forceinline__ static int64_t row_of(const TilePages& pages, int slot) {
    return (slot < pages.tile.end ? pages.page : pages.older) + slot;
  }

  // ---- loads ----
  struct Keys {
    uint32_t words[S::kBlocks][2][S::kKeyWords];   // [32 columns][key group, key group + 8]
  };
  __device__ __forceinline__ void load_keys(const TilePages& pages, Keys& keys) const {
    const uint8_t* pool = static_cast<const uint8_t*>(p.cache.keys) + (part * (kDim / S::kParts) + third * 8) * S::kElementBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = key_group * 16 + group + 8 * h;
      const bool reads = part < S::kParts && live(pages, slot);
      const uint8_t* from = pool + row_of(pages, slot) * (kDim * S::kElementBytes);
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) {
#pragma unroll
        for (int w = 0; w < S::kKeyWords; ++w) keys.words[b][h][w] = 0;
        if (reads) load_words(keys.words[b][h], from + b * 32 * S::kElementBytes);
      }
    }
  }
  static constexpr int kLaneColumns = S::kColumns / 8;
  struct Values {
    uint2 codes[4][4];              // [16 keys][key 4 third + i]: this lane's 2 or 4 columns
  };
  __device__ __forceinline__ void load_values(const TilePages& pages, Values& values) const {
    constexpr int kRowBytes = kDim * S::kElementBytes;
    const int first = third * 4;
    const uint8_t* pool = static_cast<const uint8_t*>(p.cache.values) + (block.warp * S::kColumns + group * kLaneColumns) * S::kElementBytes;
    const uint8_t* newer = pool + (pages.page + first) * kRowBytes;
    const uint8_t* older = pool + (pages.older + first) * kRowBytes;
    const uint64_t lanes_live = block.warp < S::kValueWarps ? pages.live >> first : 0;
    const int end = pages.tile.end - first;
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int slot = s * 16 + i;
        values.codes[s][i] = make_uint2(0, 0);
        if ((static_cast<uint32_t>(lanes_live >> (slot / 32 * 32)) & (1u << slot % 32)) != 0)
          values.codes[s][i] = load_codes<kLaneColumns * S::kElementBytes>((slot < end ? newer : older) + slot * kRowBytes);
      }
  }
  // Scales of this lane's two keys in the softmax.
  struct KeyScales {
    float keys[2], values[2];
  };
  __device__ __forceinline__ void load_scales(const TilePages& pages, KeyScales& scales) const {
    if constexpr (kFp8) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int slot = block.lane + 32 * i;
        scales.keys[i] = scales.values[i] = 1.0f;
        if (live(pages, slot)) {
          scales.keys[i] = p.cache.key_scales[row_of(pages, slot)];
          scales.values[i] = p.cache.value_scales[row_of(pages, slot)];
        }
      }
    }
  }

  // ---- queries, new keys and values ----
  __device__ __forceinline__ uint8_t* new_codes(int row, bool is_values) const {
    return scratch + AttentionScratch::new_at(kDim, u.n_heads) + (row * 2 + (is_values ? 1 : 0)) * kDim * S::kElementBytes;
  }
  __device__ __forceinline__ float& new_scale(int row, bool is_values) const {
    return reinterpret_cast<float*>(scratch + AttentionScratch::kNewScalesAt)[row * 2 + (is_values ? 1 : 0)];
  }
  static constexpr CacheElement kElement = kFp8 ? CacheElement::kFp8 : CacheElement::kBf16;
  static constexpr std::integral_constant<int, kDim / 2> kHalf = {};
  // All values are asked for before the first is looked at.
  __device__ __forceinline__ void load_head(Head& head, const PhaseRows& rows, int row, int col) const {
    const float* from = rows.values + row * int64_t{rows.stride} + col;
    const uint32_t flag = block.flag(row);
    for (uint32_t polls = 0;;) {
      uint32_t wrong = 0;
      for_pairs(kHalf, block.lane, [&](int i, int pair) {
        const uint32_t first = load_common_word(from + pair), second = load_common_word(from + kHalf + pair);
        head.first[i] = __uint_as_float(first);
        head.second[i] = __uint_as_float(second);
        wrong |= (first ^ flag) | (second ^ flag);
      });
      if (!rows.exchange) return;
      if ((wrong & 1u) == 0) break;
      count_poll(polls);
    }
    for_pairs(kHalf, block.lane, [&](int i, int) {
      head.first[i] = without_flag(__float_as_uint(head.first[i]));
      head.second[i] = without_flag(__float_as_uint(head.second[i]));
    });
  }
  // Norm and rope of queries, keys and values in turn are one piece of code, with other constants.
  __device__ __forceinline__ void finish_heads() const {
    const int n_tasks = u.n_heads + 2 * __popc(new_rows);
#pragma unroll 1
    for (int task = block.warp; task < n_tasks; task += kMatvecWarps) {
      const bool is_query = task < u.n_heads, is_values = !is_query && (task - u.n_heads) % 2 != 0;
      int row = u.row;
      if (!is_query) {
        uint32_t rows = new_rows;
        for (int skip = (task - u.n_heads) / 2; skip > 0; --skip) rows &= rows - 1;
        row = __ffs(static_cast<int>(rows)) - 1;
      }
      const int key_col = (p.kv_heads_before + u.kv_head) * kDim;
      const int col = is_query ? (u.first_head + task) * kDim : is_values && !p.v_from_k ? key_col + p.cache.n_kv_heads * kDim : key_col;
      const bool norms = is_query ? p.finish && p.q_norm : is_values ? p.v_norm : p.k_norm;
      const float* weight = is_query ? p.q_weight : is_values ? p.v_weight : p.k_weight;
      const float eps = is_query ? p.q_eps : is_values ? p.v_eps : p.k_eps;
      const float* rope = is_query ? (p.finish ? p.q_rope : nullptr) : is_values ? nullptr : p.k_rope;
      Head head;
      load_head(head, is_query ? p.q : p.kv, row, col);
      if (norms) norm_head(head, kHalf, block.lane, weight, eps);
      if (rope != nullptr) turn_head(head, kHalf, block.lane, rope + row * kDim);
      if (is_query) {
        auto* high = reinterpret_cast<__nv_bfloat16*>(scratch + AttentionScratch::kQueriesAt + task * 2 * AttentionScratch::query_bytes(kDim));
        auto* low = high + AttentionScratch::query_bytes(kDim) / 2;
        for_pairs(kHalf, block.lane, [&](int i, int pair) {
          const Bf16Pair a = split_bf16(head.first[i]), b = split_bf16(head.second[i]);
          high[pair] = a.high, high[kHalf + pair] = b.high;
          low[pair] = a.low, low[kHalf + pair] = b.low;
        });
        continue;
      }
      const float scale = kFp8 ? cache_scale(head, kHalf, block.lane) : 1.0f;
      uint8_t* codes = new_codes(row, is_values);
      store_head<kElement>(head, kHalf, block.lane, codes, scale);
      if (kFp8 && block.lane == 0) new_scale(row, is_values) = scale;
      if (!p.appends || row != u.row || !u.first_tile_of_heads) continue;
      __syncwarp();
      const int64_t to_row = (int64_t{page_of(position / kPageTokens)} * p.cache.n_kv_heads + u.kv_head) * kPageTokens + position % kPageTokens;
      uint8_t* to = static_cast<uint8_t*>(is_values ? p.cache.values : p.cache.keys) + to_row * (kDim * S::kElementBytes);
      for (int i = block.lane * 16; i < kDim * S::kElementBytes; i += 32 * 16)
        *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(codes + i);
      if (kFp8 && block.lane == 0) (is_values ? p.cache.value_scales : p.cache.key_scales)[to_row] = scale;
    }
  }
  // Calls function(row, slot) for the new tokens of a tile.
  template <class Function>
  __device__ __forceinline__ void for_new(const DecodeTile& tile, Function&& function) const {
#pragma unroll 1
    for (uint32_t rows = new_rows; rows != 0; rows &= rows - 1) {
      const int row = __ffs(static_cast<int>(rows)) - 1, at = block.small->positions[row];
      if (tile_holds(tile, at)) function(row, at % kPageTokens);
    }
  }
  __device__ __forceinline__ void put_new_keys(const DecodeTile& tile, Keys& keys) const {
    for_new(tile, [&](int row, int slot) {
      const uint8_t* from = new_codes(row, false) + (part * (kDim / S::kParts) + third * 8) * S::kElementBytes;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (part < S::kParts && slot == key_group * 16 + group + 8 * h)
#pragma unroll
          for (int b = 0; b < S::kBlocks; ++b) load_words(keys.words[b][h], from + b * 32 * S::kElementBytes);
    });
  }
  __device__ __forceinline__ void put_new_values(const DecodeTile& tile, Values& values) const {
    for_new(tile, [&](int row, int slot) {
      const uint8_t* from = new_codes(row, true) + (block.warp * S::kColumns + group * kLaneColumns) * S::kElementBytes;
#pragma unroll
      for (int s = 0; s < 4; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (block.warp < S::kValueWarps && slot == s * 16 + third * 4 + i)
            values.codes[s][i] = load_codes<kLaneColumns * S::kElementBytes>(from);
    });
  }

  // ---- products ----
  __device__ __forceinline__ void score(const Keys& keys) const {
    if (part >= S::kParts) return;
    const int n_tiles = (u.n_heads + 3) / 4;
    float d[4][4] = {};
    const unsigned char* q = scratch + AttentionScratch::kQueriesAt + group * AttentionScratch::query_bytes(kDim) +
                             (part * (kDim / S::kParts) + third * 8) * 2;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (kFp8)
            a[h][w] = codes_to_bf16(w % 2 == 0 ? keys.words[b][h][w / 2] & 0xffffu : keys.words[b][h][w / 2] >> 16);
          else
            a[h][w] = keys.words[b][h][w];
        }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n >= n_tiles) break;
        const uint4 x = *reinterpret_cast<const uint4*>(q + n * 8 * AttentionScratch::query_bytes(kDim) + b * 64);
        mma_16bit<true>(d[n], a[0][0], a[1][0], a[0][1], a[1][1], x.x, x.y);
        mma_16bit<true>(d[n], a[0][2], a[1][2], a[0][3], a[1][3], x.z, x.w);
      }
    }
    float* scores = reinterpret_cast<float*>(scratch + AttentionScratch::kScoresAt);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n >= n_tiles) break;
      float* to = scores + (part * kUnitHeads + 4 * n + third) * AttentionScratch::kScoreStride + key_group * 16 + group;
      to[0] = __fadd_rn(d[n][0], d[n][1]);
      to[8] = __fadd_rn(d[n][2], d[n][3]);
    }
  }

  // This warp's head; the running state stays in its registers.
  __device__ __forceinline__ void softmax(const TilePages& pages, KeyScales scales, float& largest, float& sum) const {
    const int head = block.warp;
    if (head >= u.n_heads) return;
    const float* scores = reinterpret_cast<const float*>(scratch + AttentionScratch::kScoresAt) + head * AttentionScratch::kScoreStride;
    if constexpr (kFp8) {
      for_new(pages.tile, [&](int row, int slot) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (slot == block.lane + 32 * i) scales.keys[i] = new_scale(row, false), scales.values[i] = new_scale(row, true);
      });
    }
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = block.lane + 32 * i;
      float product = scores[slot];
#pragma unroll
      for (int w = 1; w < S::kParts; ++w) product = __fadd_rn(product, scores[w * kUnitHeads * AttentionScratch::kScoreStride + slot]);
      if constexpr (kFp8) product = __fmul_rn(product, scales.keys[i]);
      score[i] = live(pages, slot) ? attention_score(product, p.scale, p.softcap) : -INFINITY;
    }
    const float raised = fmaxf(largest, lane_max(fmaxf(score[0], score[1])));
    const float factor = raised == -INFINITY ? 1.0f : expf(largest - raised);
    largest = raised;
    unsigned char* weights = scratch + AttentionScratch::kWeightsAt + head * 2 * AttentionScratch::kWeightBytes;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = block.lane + 32 * i;
      float weight = live(pages, slot) && raised != -INFINITY ? expf(score[i] - raised) : 0.0f;
      total = __fadd_rn(total, weight);
      if constexpr (kFp8) weight = live(pages, slot) ? __fmul_rn(weight, scales.values[i]) : 0.0f;
      const Bf16Pair pair = split_bf16(weight);
      reinterpret_cast<__nv_bfloat16*>(weights)[slot] = pair.high;
      reinterpret_cast<__nv_bfloat16*>(weights + AttentionScratch::kWeightBytes)[slot] = pair.low;
    }
    sum = __fmaf_rn(sum, factor, lane_sum(total));
    if (block.lane == 0) {
      float* state = reinterpret_cast<float*>(scratch + AttentionScratch::kStateAt) + head;
      state[0] = factor;
      state[kUnitHeads] = largest;
      state[2 * kUnitHeads] = sum;
    }
  }

  __device__ __forceinline__ void weigh(const Values& values, float (&sums)[S::kRowTiles][4][4]) const {
    if (block.warp >= S::kValueWarps) return;
    const int n_tiles = (u.n_heads + 3) / 4;
    const float* factors = reinterpret_cast<const float*>(scratch + AttentionScratch::kStateAt);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n >= n_tiles) break;
      const float factor = 4 * n + third < u.n_heads ? factors[4 * n + third] : 0.0f;
#pragma unroll
      for (int m = 0; m < S::kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= factor;
    }
    const unsigned char* weights = scratch + AttentionScratch::kWeightsAt + group * AttentionScratch::kWeightBytes + third * 8;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t a[S::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < S::kRowTiles; ++m) {
        uint32_t pairs[4];                       // of key i: two columns
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint2 codes = values.codes[s][i];
          if constexpr (kFp8) pairs[i] = codes_to_bf16(m == 0 ? codes.x & 0xffffu : codes.x >> 16);
          else pairs[i] = m == 0 ? codes.x : codes.y;
        }
        a[m][0] = byte_permute(pairs[0], pairs[1], 0x5410);
        a[m][1] = byte_permute(pairs[0], pairs[1], 0x7632);
        a[m][2] = byte_permute(pairs[2], pairs[3], 0x5410);
        a[m][3] = byte_permute(pairs[2], pairs[3], 0x7632);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n >= n_tiles) break;
        const uint2 b = *reinterpret_cast<const uint2*>(weights + n * 8 * AttentionScratch::kWeightBytes + s * 32);
#pragma unroll
        for (int m = 0; m < S::kRowTiles; ++m) mma_16bit<true>(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b.x, b.y);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[S::kRowTiles][4][4]) const {
    const float* state = reinterpret_cast<const float*>(scratch + AttentionScratch::kStateAt);
    if (block.warp < S::kValueWarps) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int head = 4 * n + third;
        if (head >= u.n_heads) break;
#pragma unroll
        for (int m = 0; m < S::kRowTiles; ++m) {
          const float first = __fadd_rn(sums[m][n][0], sums[m][n][1]), second = __fadd_rn(sums[m][n][2], sums[m][n][3]);
          const int col = block.warp * S::kColumns + group * kLaneColumns + 2 * m;
          if (u.units.count == 1) {
            const float inverse = __fdividef(1.0f, state[2 * kUnitHeads + head]);
            const int64_t out = int64_t{u.first_head + head} * kDim + col;
            store_row(p.out, u.row, out, __fmul_rn(first, inverse), block.flag(u.row));
            store_row(p.out, u.row, out + 1, __fmul_rn(second, inverse), block.flag(u.row));
          } else {
            const int64_t at = (int64_t{u.row} * p.n_heads + u.first_head + head) * kMaxDecodeUnits + u.unit;
            leave_pair(reinterpret_cast<float2*>(block.args.partial_sums + at * kDim + col), first, second);
          }
        }
      }
    }
    // As many as the merge has readers: one that nobody takes would wait for a layer with wider heads.
    if (u.units.count > 1 && block.warp < u.n_heads && block.lane < kDim / kMergeColumns) {
      const int64_t at = (int64_t{u.row} * p.n_heads + u.first_head + block.warp) * kMaxDecodeUnits + u.unit;
      leave_pair(block.args.partial_states + at * kStateCopies + block.lane, state[kUnitHeads + block.warp],
                 state[2 * kUnitHeads + block.warp]);
    }
  }

  // Keys of a tile are asked for while the values of the one before it are multiplied, values while their weights are
  // made: so a lane holds only one of both.
  __device__ __forceinline__ void run() const {
    TilePages pages = pages_of(0);
    Keys keys;
    KeyScales scales;
    load_keys(pages, keys);
    load_scales(pages, scales);
    DecodeBlock::barrier();
    finish_heads();
    DecodeBlock::barrier();
    float largest = -INFINITY, sum = 0;
    float sums[S::kRowTiles][4][4] = {};
#pragma unroll 1
    for (int t = 0;;) {
      put_new_keys(pages.tile, keys);
      score(keys);
      Values values;
      load_values(pages, values);
      DecodeBlock::barrier();
      softmax(pages, scales, largest, sum);
      put_new_values(pages.tile, values);
      DecodeBlock::barrier();
      const bool more = ++t < u.units.tiles;
      const auto load_next = [&] {
        if (!more) return;
        pages = pages_of(t);
        load_keys(pages, keys);
        load_scales(pages, scales);
      };
      constexpr bool kTight = kDim == 512 && !kFp8;      // registers for both would not do
      if (!kTight) load_next();
      weigh(values, sums);
      if (kTight) load_next();
      if (!more) break;
    }
    store(sums);
  }
};

// All units of this block. Not inlined: a function of its own has its own registers, and nothing of it lives on in the rest of the
// kernel. Its arguments are addresses of shared memory, so that the compiler knows them as such.
template <int kDim, bool kFp8>
__device__ __noinline__ void attend(uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
  const DecodeArgs& args = *shared_object<const DecodeArgs>(args_at);
  unsigned char* shared = shared_object<unsigned char>(shared_at);
  const AttentionPhase* phase = shared_object<const AttentionPhase>(phase_at);
  int index = block_index();
#pragma unroll 1
  for (int row = 0; row < args.n_rows; ++row) {
#pragma unroll 1
    for (;; index += static_cast<int>(gridDim.x)) {
      // In here, so that nothing is computed before the loop and kept for all of it.
      const DecodeBlock block(args, afresh(shared));
      const AttentionPhase& p = *afresh(phase);
      const int heads = p.heads_of_kv;
      const DecodeUnits units = decode_units(block.small->positions[row], p.window);
      // Fewer heads in a unit where that gives work to more blocks: of each head it is the same work.
      const auto tiles_of = [&](int bits) { return (heads + (1 << bits) - 1) >> bits; };
      int bits = kUnitHeadBits;
      while (bits > 2 && units.count * p.cache.n_kv_heads * args.n_rows * tiles_of(bits - 1) <= static_cast<int>(gridDim.x)) --bits;
      const int unit_heads = 1 << bits, head_tiles = tiles_of(bits);
      const int n_items = p.cache.n_kv_heads * head_tiles;
      if (index >= units.count * n_items) {
        index -= units.count * n_items;
        break;
      }
      // Neighbouring blocks have neighbouring KV heads of one page.
      const int unit = index / n_items, item = index - unit * n_items, kv_head = item / head_tiles, head_tile = item - kv_head * head_tiles;
      const DecodeUnit one = {row,  kv_head, kv_head * heads + head_tile * unit_heads, min(heads - head_tile * unit_heads, unit_heads),
                              unit, units,   head_tile == 0};
      AttentionUnit<kDim, kFp8>(block, p, one).run();
    }
  }
}

// The columns of one (row, head, 32 columns) from all units: 8 warps share the units, then one adds up.
__device__ __forceinline__ void merge_columns(const DecodeBlock& block, const AttentionPhase& p, int row, int head, int column_block, int n_units) {
  const int dim = p.cache.head_dim, half = block.warp / kMergeWarps, warp = block.warp % kMergeWarps, lane = block.lane;
  const int64_t first = (int64_t{row} * p.n_heads + head) * kMaxDecodeUnits;
  float largest = -INFINITY, sum = 0, total = 0;
  constexpr int kMost = (kMaxDecodeUnits + kMergeWarps - 1) / kMergeWarps;
  // Lane i takes the state of the warp's unit i.
  const int own = warp + lane * kMergeWarps;
  float2 state = make_float2(-INFINITY, 0);
  if (own < n_units) state = take_pair(block.args.partial_states + (first + own) * kStateCopies + column_block);
  largest = lane_max(state.x);
  const float factor = largest == -INFINITY ? 0.0f : expf(state.x - largest);
  static_assert(kMost <= 32);
#pragma unroll 4
  for (int i = 0; i < kMost; ++i) {
    const int unit = warp + i * kMergeWarps;
    if (unit >= n_units) break;
    float* from = block.args.partial_sums + (first + unit) * dim + column_block * kMergeColumns + lane;
    uint32_t bits;
    for (uint32_t polls = 0; (bits = load_common_word(from)) == ~0u;) count_poll(polls);
    store_common_word(from, ~0u);
    const float f = __shfl_sync(kAllLanes, factor, i);
    total = __fmaf_rn(__uint_as_float(bits), f, total);
    sum = __fmaf_rn(__shfl_sync(kAllLanes, state.y, i), f, sum);
  }
  float* mine = reinterpret_cast<float*>(block.scratch) + (half * kMergeWarps + warp) * (kMergeColumns + 2);
  mine[lane] = total;
  if (lane == 0) mine[kMergeColumns] = largest, mine[kMergeColumns + 1] = sum;
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");
  if (warp == 0) {
    const float* parts = reinterpret_cast<const float*>(block.scratch) + half * kMergeWarps * (kMergeColumns + 2);
    float all = -INFINITY;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) all = fmaxf(all, parts[w * (kMergeColumns + 2) + kMergeColumns]);
    float weight = 0, value = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) {
      const float* from = parts + w * (kMergeColumns + 2);
      const float f = all == -INFINITY ? 0.0f : expf(from[kMergeColumns] - all);
      value = __fmaf_rn(from[lane], f, value);
      weight = __fmaf_rn(from[kMergeColumns + 1], f, weight);
    }
    store_row(p.out, row, int64_t{head} * dim + column_block * kMergeColumns + lane, __fdividef(value, weight), block.flag(row));
  }
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");   // the next one writes there
}

template <int kRows>
__device__ __forceinline__ void merge(const DecodeArgs& args, unsigned char* shared, const AttentionPhase& phase) {
  const DecodeBlock block(args, afresh(shared));
  const AttentionPhase& p = *afresh(&phase);
  const int column_blocks = p.cache.head_dim / kMergeColumns, n_tasks = p.n_heads * column_blocks, n_blocks = static_cast<int>(gridDim.x);
  int task = block_index() + block.warp / kMergeWarps * n_blocks;
#pragma unroll 1
  for (int row = 0; row < count_rows<kRows>(args); ++row) {
    const int n_units = decode_units(block.small->positions[row], p.window).count;
    if (n_units == 1) continue;
#pragma unroll 1
    for (; task < n_tasks; task += 2 * n_blocks) merge_columns(block, p, row, task / column_blocks, task % column_blocks, n_units);
    task -= n_tasks;
  }
  // What was put back must be there before the next launch or layer leaves its sums.
  __threadfence();
}

template <int kRows, class Function, class Stamp>
__device__ __forceinline__ void run_attention(const DecodeArgs& args, unsigned char* shared, const AttentionPhase& p, Function&& before_barrier,
                                              Stamp&& stamp) {
  {
    const DecodeBlock block(args, afresh(shared));
    const uint32_t args_at = shared_address(&block.small->args), shared_at = shared_address(shared), phase_at = shared_address(&p);
    const bool fp8 = p.cache.element == CacheElement::kFp8;
    switch (p.cache.head_dim) {
      case 64: fp8 ? attend<64, true>(args_at, shared_at, phase_at) : attend<64, false>(args_at, shared_at, phase_at); break;
      case 128: fp8 ? attend<128, true>(args_at, shared_at, phase_at) : attend<128, false>(args_at, shared_at, phase_at); break;
      case 256: fp8 ? attend<256, true>(args_at, shared_at, phase_at) : attend<256, false>(args_at, shared_at, phase_at); break;
      default: fp8 ? attend<512, true>(args_at, shared_at, phase_at) : attend<512, false>(args_at, shared_at, phase_at); break;
    }
  }
  stamp(1);
  bool merges = false;
  {
    const DecodeBlock block(args, afresh(shared));
    for (int row = 0; row < count_rows<kRows>(args); ++row) merges |= decode_units(block.small->positions[row], p.window).count > 1;
  }
  if (merges) {
    DecodeBlock::barrier();              // the scratch changes hands
    merge<kRows>(args, shared, p);
  }
  stamp(2);
  before_barrier();
  DecodeBlock::barrier();
}

}  // namespace beryl::cuda
