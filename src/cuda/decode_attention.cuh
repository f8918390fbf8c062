// The attention phase of the decode kernel: QkvFinish and Attention of one layer, for 1 to 8 rows.
//
// The work is cut into units (index_math.h): a token, a KV head (at most 16 of its query heads, fewer where blocks would be
// idle) and a share of the keys, a page at a time. All warps of a block work on one unit:
//
//   copy     the copying warp puts keys and values into the ring, between the weights of the phases before and after: they depend
//            on nothing in this step, so they are there long before the queries
//   finish   a warp a head: norm and rope of q, two bf16 each (high, low), to shared memory. Keys and values of tokens
//            that are new in this launch are not in the cache yet: the unit makes them itself where it needs them, and
//            the unit that owns a token's newest page writes them to the cache
//   scores   keys times q: warp (key group, part of head_dim) multiplies 16 keys
//   softmax  a warp a head: adds the parts, keeps the running maximum and sum; weights to two bf16
//   values   values times weights: a warp owns 16 (32 of wide heads) columns of head_dim
//
// A token with one unit is done then. Else unnormalised sums go to global memory, and as a second step each column is
// merged by one warp, or by eight where there are many units. A sum that waits there is its own flag: nothing there means all
// ones, and the reader puts that back.
//
// q and the weights have 16 bits of mantissa, so products are as good as the cache's own values. Slots that hold no live
// key are never read. Moves the live keys and values once.
//
// All of this runs once a phase, so it takes as long as its code takes to arrive: loops are loops, one code serves all head sizes.
#pragma once

#include "cuda/attention_state.cuh"
#include "cuda/decode_block.cuh"
#include "cuda/index_math.h"
#include "cuda/mma.cuh"
#include "cuda/qkv_head.cuh"

namespace beryl::cuda {

inline constexpr int kUnitHeadBits = 4, kUnitHeads = 1 << kUnitHeadBits;
inline constexpr int kAttentionCopiers = 3;        // warps that copy keys and values
inline constexpr int kStateCopies = 16;            // of a unit's maximum and sum: one for each reader
inline constexpr int kMergeColumns = 32;
inline constexpr int kMergeWarps = 8;
inline constexpr int kMergeShare = (kMaxDecodeUnits + kMergeWarps - 1) / kMergeWarps;    // units that one warp merges

// Scratch of a unit, in bytes. q: [2 · heads][head_dim] bf16, high and low rows in turn; keys and values of new tokens.
struct AttentionScratch {
  static constexpr int kScoreStride = kPageTokens + 8;    // spreads heads over the banks
  static constexpr int kWeightBytes = kPageTokens * 2 + 16;   // a row of bf16, likewise
  static constexpr int kScoresAt = 0;                     // f32 [4 parts][16 heads][kScoreStride]
  static constexpr int kWeightsAt = kScoresAt + 4 * kUnitHeads * kScoreStride * 4;   // [2 · heads]
  static constexpr int kStateAt = kWeightsAt + 2 * kUnitHeads * kWeightBytes;         // f32 [3][16]: factor, maximum, sum
  static constexpr int kNewScalesAt = kStateAt + 3 * kUnitHeads * 4;                  // f32 [8 rows][2]
  static constexpr int kQueriesAt = kNewScalesAt + kDecodeRows * 2 * 4;
  BERYL_HOST_DEVICE static constexpr int query_bytes(int head_dim) { return head_dim * 2 + 16; }
  BERYL_HOST_DEVICE static constexpr int new_at(int head_dim, int heads) { return kQueriesAt + (heads + 3) / 4 * 8 * query_bytes(head_dim); }
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

// Calls function(unit) for all units of this block.
template <class Function>
__device__ __forceinline__ void for_units(const DecodeBlock& block, const AttentionPhase& p, Function&& function) {
  UnitPlace place = {0, block_index()};
#pragma unroll 1
  for (DecodeUnit unit; next_unit(block, p, place, unit);) function(unit);
}

// How the rows of a tile lie in the ring: pieces of 16, 32 or 64, a slot each; first all of the keys, then the values.
// Of an FP8 cache all scales of the tile are at the end of the slot where its values begin.
struct TileCut {
  static constexpr int kScaleBytes = 2 * kPageTokens * 4;
  int row_shift;                    // bytes of a row: 1 << row_shift
  int piece_shift;                  // rows of a piece
  __device__ __forceinline__ TileCut(const CacheView& cache, int slot_bytes) {
    const int row_bytes = cache.element == CacheElement::kFp8 ? cache.head_dim : 2 * cache.head_dim;
    row_shift = 31 - __clz(row_bytes);
    if (cache.element == CacheElement::kFp8) slot_bytes -= kScaleBytes;
    piece_shift = min(31 - __clz(slot_bytes) - row_shift, 6);
  }
  __device__ __forceinline__ int line_shift() const { return max(row_shift, 7); }
  __device__ __forceinline__ int pieces() const { return kPageTokens >> piece_shift; }
};

// ---- the copying warp ----

// 4 bytes to shared memory, asynchronous, or a zero where n_bytes is 0.
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from, int n_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n_bytes) : "memory");
}
__device__ __forceinline__ void copiers_barrier() { asm volatile("bar.sync 4, %0;" ::"n"(kAttentionCopiers * 32) : "memory"); }

// Copies keys and values of this block's units into the ring; by kAttentionCopiers warps, copier: which of them. They look up the
// phase, its first unit and where its tiles lie before it is their turn: then the warp that copies weights hands over the ring (decode.cu)
// and waits for it. What stays the same is kept in shared memory: these warps have few registers.
__device__ __forceinline__ void copy_attention(const DecodeBlock& block, int copier) {
  DecodeShared* small = block.small;
  const WeightStream* at = block.args.streams;
#pragma unroll 1
  for (uint32_t turn = 0;; turn ^= 1) {
    while (at->weights != nullptr && at->n_stages != 0) ++at;
    if (at->weights == nullptr) return;
    const AttentionPhase& p = *reinterpret_cast<const AttentionPhase*>((at++)->weights);
    UnitPlace place = {0, block_index()};
    DecodeUnit u;
    bool has_unit = next_unit(block, p, place, u), has_turn = false;
    RingPlace ring;
    bool filled = false;
    copiers_barrier();               // nobody reads the last phase's any more
    if (copier == 0 && block.lane == 0) {
      const TileCut cut(p.cache, block.args.slot_bytes);
      small->pools[0] = static_cast<const uint8_t*>(p.cache.keys);
      small->pools[1] = static_cast<const uint8_t*>(p.cache.values);
      small->row_shift = cut.row_shift;
      small->piece_shift = cut.piece_shift;
    }
#pragma unroll 1
    for (int first = 0;;) {
      // Where its tiles lie, a lane a tile.
      if (copier == 0 && has_unit && first + block.lane < u.units.tiles) {
        const int32_t* table = p.table + int64_t{small->sequences[u.row]} * p.n_entries;
        const DecodeTile tile = decode_tile(small->positions[u.row], p.window, u.units, u.unit, first + block.lane);
        const auto first_row = [&](int page) {
          return (__ldg(table + table_entry(page * kPageTokens, p.n_entries)) * p.cache.n_kv_heads + u.kv_head) * kPageTokens;
        };
        small->tiles[block.lane] =
            make_int4(tile.begin < tile.end ? first_row(tile.page) : 0, tile.older < 0 ? -1 : first_row(tile.older), tile.begin, tile.end);
      }
      if (!has_turn && copier == 0) barrier_wait_suspended(&small->hand_over, turn);
      copiers_barrier();
      if (!has_turn) {
        ring = {small->handed.slot, small->handed.parity};
        filled = small->handed.filled;
        has_turn = true;
      }
      const int n_pieces = has_unit ? 2 * min(u.units.tiles - first, 32) << (6 - small->piece_shift) : 0;
#pragma unroll 1
      for (int i = 0; i < n_pieces; ++i) {
        if (filled) barrier_wait_suspended(&small->empty[ring.slot], ring.parity ^ 1);
        const int piece_shift = small->piece_shift, row_shift = small->row_shift, line_shift = max(row_shift, 7), bytes = 1 << (piece_shift + row_shift);
        const int part = i >> (6 - piece_shift), row = (i << piece_shift) & 63;
        const int4 tile = small->tiles[part / 2];
        const uint8_t* pool = small->pools[part % 2];
        // Bytes from the piece's begin on: [begin, end) are of the newer page, those from there up to `limit` of the older one.
        const int begin = (tile.z - row) << row_shift, end = (tile.w - row) << row_shift, first_byte = (copier * 32 + block.lane) * 16;
        constexpr int kStep = kAttentionCopiers * 32 * 16;
        const uint8_t* newer = pool + (int64_t{tile.x + row} << row_shift);
        const uint32_t to = shared_address(block.ring + ring.slot * block.args.slot_bytes);
        if (begin <= 0 && end >= bytes) {
#pragma unroll 4
          for (int byte = first_byte; byte < bytes; byte += kStep) copy16_async(to + (byte ^ row_order(byte, line_shift)), newer + byte, 16);
        } else {
          const int limit = tile.y >= 0 ? bytes : end;
          const uint8_t* older = pool + (int64_t{tile.y + row} << row_shift);
#pragma unroll 2
          for (int byte = first_byte; byte < bytes; byte += kStep)
            copy16_async(to + (byte ^ row_order(byte, line_shift)), (byte < end ? newer : older) + byte, byte >= begin && byte < limit ? 16 : 0);
        }
        if (part % 2 != 0 && row == 0 && copier == 0 && p.cache.element == CacheElement::kFp8) {
#pragma unroll 1
          for (int slot = block.lane; slot < kPageTokens; slot += 32) {
            const int64_t from = int64_t{slot < tile.w ? tile.x : tile.y} + slot;
            const int n_bytes = slot >= tile.z && (slot < tile.w || tile.y >= 0) ? 4 : 0;
            const uint32_t scale = to + static_cast<uint32_t>(block.args.slot_bytes - TileCut::kScaleBytes + slot * 4);
            copy4_async(scale, p.cache.key_scales + from, n_bytes);
            copy4_async(scale + kPageTokens * 4, p.cache.value_scales + from, n_bytes);
          }
        }
        barrier_join_copies(&small->full[ring.slot]);
        copiers_barrier();
        if (copier == 0 && (!BERYL_BULK_COPY || block.lane == 0)) barrier_arrive(&small->full[ring.slot]);
        ring.next(block.args.n_slots);
        if (ring.slot == 0) filled = true;
      }
      if (!has_unit) break;
      first += 32;
      if (first < u.units.tiles) continue;
      first = 0;
      has_unit = next_unit(block, p, place, u);
      if (!has_unit) break;
    }
    copiers_barrier();               // all have read what was handed over
    if (copier == 0 && block.lane == 0) {
      small->handed.slot = ring.slot;
      small->handed.parity = ring.parity;
      small->handed.filled = filled;
      barrier_arrive(&small->hand_back);
    }
  }
}

// ---- nothing is all ones ----
__device__ __forceinline__ uint32_t never_all_ones(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits == ~0u ? 0x7fffffffu : bits;
}
__device__ __forceinline__ void store_common_pair(float2* at, uint32_t first, uint32_t second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(first), "r"(second) : "memory");
}
__device__ __forceinline__ uint2 load_common_pair(const float2* from) {
  uint2 bits;
  asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(from) : "memory");
  return bits;
}

// Two values as bf16, high parts and what they leave.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ SplitPair split_pair(float first, float second) {
  const Bf16Pair a = split_bf16(first), b = split_bf16(second);
  return {pack_bf16(a.high, b.high), pack_bf16(a.low, b.low)};
}

// One unit, by all warps of the block. What describes it lies in shared memory (WarpUnit, each warp its own), and each step looks up
// what it needs (a Step of its own): registers are for sums.
template <bool kFp8>
struct AttentionStep {
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  const DecodeBlock block;
  const AttentionPhase& p;
  WarpUnit& u;
  RingPlace& ring;
  TileCut cut;
  int dim, half;
  int group, third;                 // lane / 4, lane % 4
  int parts;                        // warps that share a key's columns
  int row_tiles;                    // of 16 columns of the output, of a warp
  unsigned char* scratch;

  __device__ __forceinline__ AttentionStep(uint32_t args_at, uint32_t shared_at, uint32_t phase_at, RingPlace& place)
      : block(*shared_object<const DecodeArgs>(args_at), shared_object<unsigned char>(shared_at)), p(*shared_object<const AttentionPhase>(phase_at)),
        u(block.small->units[block.warp]), ring(place), cut(p.cache, block.args.slot_bytes), dim(p.cache.head_dim), half(dim / 2),
        group(block.lane / 4), third(block.lane % 4), parts(dim >= 128 ? 4 : 2), row_tiles(dim > 16 * kMatvecWarps ? 2 : 1), scratch(block.scratch) {}

  __device__ __forceinline__ DecodeTile begin(const DecodeUnit& unit) const {
    const int position = block.small->positions[unit.row], sequence = block.small->sequences[unit.row];
    const DecodeTile tile = decode_tile(position, p.window, unit.units, unit.unit, 0);
    uint32_t new_rows = 0;
    if (p.kv.values != nullptr) {
      const int first_page = unit.unit * unit.units.tiles, n_pages = unit.units.tiles;
#pragma unroll 1
      for (int row = 0; row < block.args.n_rows; ++row) {
        const int at = block.small->positions[row];
        if (block.small->sequences[row] != sequence || at > position) continue;
        const bool holds = unit.units.neighbours ? static_cast<uint32_t>(at / kPageTokens - first_page) < static_cast<uint32_t>(n_pages) : tile_holds(tile, at);
        if (holds) new_rows |= 1u << row;
      }
    }
    __syncwarp();
    if (block.lane == 0)
      u = {unit.row, unit.kv_head, unit.first_head, unit.n_heads, unit.unit, unit.units.count, unit.units.tiles, unit.units.neighbours,
           unit.first_tile_of_heads, position, new_rows};
    __syncwarp();
    return tile;
  }
  __device__ __forceinline__ DecodeTile tile_of(int t) const {
    return decode_tile(u.position, p.window, {u.n_units, u.n_tiles, u.neighbours}, u.unit, t);
  }
  __device__ __forceinline__ static bool live(const DecodeTile& tile, int slot) {
    return slot >= tile.begin && (slot < tile.end || tile.older >= 0);
  }
  // The row of the pools that holds a slot of a page.
  __device__ __forceinline__ int64_t row_of(int page, int slot) const {
    const int32_t* table = p.table + int64_t{block.small->sequences[u.row]} * p.n_entries;
    return (int64_t{__ldg(table + table_entry(page * kPageTokens, p.n_entries))} * p.cache.n_kv_heads + u.kv_head) * kPageTokens + slot;
  }

  // ---- the ring ----
  __device__ __forceinline__ uint32_t slot_address(const RingPlace& place) const {
    return shared_address(block.ring) + static_cast<uint32_t>(place.slot * block.args.slot_bytes);
  }
  __device__ __forceinline__ void await() const { barrier_wait_suspended(&block.small->full[ring.slot], ring.parity); }
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (block.lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
    ring.next(block.args.n_slots);
  }

  // ---- queries, new keys and values ----
  __device__ __forceinline__ uint8_t* new_codes(int row, bool is_values) const {
    return scratch + AttentionScratch::new_at(dim, u.n_heads) + (row * 2 + (is_values ? 1 : 0)) * dim * kElementBytes;
  }
  __device__ __forceinline__ float& new_scale(int row, bool is_values) const {
    return reinterpret_cast<float*>(scratch + AttentionScratch::kNewScalesAt)[row * 2 + (is_values ? 1 : 0)];
  }
  // All values are asked for before the first is looked at.
  __device__ __forceinline__ void load_head(Head& head, const PhaseRows& rows, int row, int col) const {
    const float* from = rows.values + row * int64_t{rows.stride} + col + block.lane * 4;
    const uint32_t flag = rows.exchange ? block.flag(row) : 0, mask = rows.exchange ? ~1u : ~0u;
    uint4 bits[kHeadGroups][2] = {};
    for (uint32_t polls = 0;;) {
      uint32_t wrong = 0;
#pragma unroll
      for (int g = 0; g < kHeadGroups; ++g)
        if (first_pair(g, block.lane) < half) bits[g][0] = load_common_words(from + g * 128), bits[g][1] = load_common_words(from + half + g * 128);
#pragma unroll
      for (int g = 0; g < kHeadGroups; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 b = bits[g][h];
          if (first_pair(g, block.lane) < half) wrong |= (b.x ^ flag) | (b.y ^ flag) | (b.z ^ flag) | (b.w ^ flag);
        }
      if (!rows.exchange || !__any_sync(kAllLanes, (wrong & 1u) != 0)) break;
      count_poll(polls);
    }
#pragma unroll
    for (int g = 0; g < kHeadGroups; ++g)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* to = (h == 0 ? head.first : head.second) + 4 * g;
        const uint4 b = bits[g][h];
        to[0] = __uint_as_float(b.x & mask), to[1] = __uint_as_float(b.y & mask);
        to[2] = __uint_as_float(b.z & mask), to[3] = __uint_as_float(b.w & mask);
      }
  }
  // A lane's 4 neighbouring values of q. FP8 codes are widened in another order than they lie in (scores).
  __device__ __forceinline__ void put_query(int task, int col, const float* v) const {
    unsigned char* high = scratch + AttentionScratch::kQueriesAt + task * 2 * AttentionScratch::query_bytes(dim);
    unsigned char* low = high + AttentionScratch::query_bytes(dim);
    if constexpr (kFp8) {
      const SplitPair odd = split_pair(v[1], v[3]), even = split_pair(v[0], v[2]);
      const int at = (col / 16 * 16 + col % 16 / 2) * 2;
      *reinterpret_cast<uint32_t*>(high + at) = odd.high, *reinterpret_cast<uint32_t*>(high + at + 16) = even.high;
      *reinterpret_cast<uint32_t*>(low + at) = odd.low, *reinterpret_cast<uint32_t*>(low + at + 16) = even.low;
    } else {
      const SplitPair a = split_pair(v[0], v[1]), b = split_pair(v[2], v[3]);
      *reinterpret_cast<uint2*>(high + col * 2) = make_uint2(a.high, b.high);
      *reinterpret_cast<uint2*>(low + col * 2) = make_uint2(a.low, b.low);
    }
  }
  // Likewise of a new key or value, as codes.
  __device__ __forceinline__ static uint2 encode(const float* v, float scale) {
    if constexpr (kFp8) {
      uint32_t codes = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) codes |= uint32_t{encode_e4m3(__fdividef(v[i], scale))} << 8 * i;
      return make_uint2(codes, 0);
    }
    return make_uint2(pack_bf16(__float2bfloat16_rn(v[0]), __float2bfloat16_rn(v[1])), pack_bf16(__float2bfloat16_rn(v[2]), __float2bfloat16_rn(v[3])));
  }
  __device__ __forceinline__ static void put_codes(uint8_t* row, int col, uint2 codes) {
    if constexpr (kFp8) *reinterpret_cast<uint32_t*>(row + col) = codes.x;
    else *reinterpret_cast<uint2*>(row + col * 2) = codes;
  }
  // Norm and rope of queries, keys and values in turn are one piece of code, with other constants. These are asked for before the
  // values are there.
  __device__ __forceinline__ void finish_heads() const {
    const uint32_t new_rows = u.new_rows;
    const int n_tasks = u.n_heads + 2 * __popc(new_rows);
#pragma unroll 1
    for (int task = block.warp; task < n_tasks; task += kMatvecWarps) {
      const bool is_query = task < u.n_heads, is_values = !is_query && (task - u.n_heads) % 2 != 0;
      Head head;
      int row = u.row;
      if (!is_query) {
        uint32_t rows = new_rows;
        for (int skip = (task - u.n_heads) / 2; skip > 0; --skip) rows &= rows - 1;
        row = __ffs(static_cast<int>(rows)) - 1;
      }
      const int key_col = (p.kv_heads_before + u.kv_head) * dim;
      const int col = is_query ? (u.first_head + task) * dim : is_values && !p.v_from_k ? key_col + p.cache.n_kv_heads * dim : key_col;
      const bool norms = is_query ? p.finish && p.q_norm : is_values ? p.v_norm : p.k_norm;
      const float* weight = is_query ? p.q_weight : is_values ? p.v_weight : p.k_weight;
      const float eps = is_query ? p.q_eps : is_values ? p.v_eps : p.k_eps;
      const float* rope = is_query ? (p.finish ? p.q_rope : nullptr) : is_values ? nullptr : p.k_rope;
      Head weights, turns;
      if (norms && weight != nullptr) load_halves<true>(weights, half, block.lane, weight);
      else fill_head(weights, 1);
      if (rope != nullptr) load_halves<true>(turns, half, block.lane, rope + row * dim);
      load_head(head, is_query ? p.q : p.kv, row, col);
      if (norms) norm_head(head, half, weights, eps);
      if (rope != nullptr) turn_head(head, half, turns);
      const float scale = kFp8 && !is_query ? cache_scale(head, half) : 1.0f;
      const bool appends = !is_query && p.appends && row == u.row && u.first_tile_of_heads;
      const int64_t to_row = appends ? row_of(u.position / kPageTokens, u.position % kPageTokens) : 0;
      uint8_t* to = static_cast<uint8_t*>(is_values ? p.cache.values : p.cache.keys) + to_row * dim * kElementBytes;
#pragma unroll
      for (int g = 0; g < kHeadGroups; ++g) {
        if (first_pair(g, block.lane) >= half) continue;
#pragma unroll
        for (int second = 0; second < 2; ++second) {
          const float* v = (second != 0 ? head.second : head.first) + 4 * g;
          const int col = first_pair(g, block.lane) + second * half;
          if (is_query) {
            put_query(task, col, v);
          } else {
            const uint2 codes = encode(v, scale);
            put_codes(new_codes(row, is_values), col, codes);
            if (appends) put_codes(to, col, codes);
          }
        }
      }
      if (kFp8 && !is_query && block.lane == 0) {
        new_scale(row, is_values) = scale;
        if (appends) (is_values ? p.cache.value_scales : p.cache.key_scales)[to_row] = scale;
      }
    }
  }
  // Calls function(row, slot) for the new tokens of a tile.
  template <class Function>
  __device__ __forceinline__ void for_new(const DecodeTile& tile, Function&& function) const {
#pragma unroll 1
    for (uint32_t rows = u.new_rows; rows != 0; rows &= rows - 1) {
      const int row = __ffs(static_cast<int>(rows)) - 1, at = block.small->positions[row];
      if (tile_holds(tile, at)) function(row, at % kPageTokens);
    }
  }

  // ---- products ----
  // Keys are the rows of a, heads the columns of b: two each, high and low.
  __device__ __forceinline__ void score(const DecodeTile& tile) const {
    const int key_group = block.warp % 4, part = block.warp / 4, n_pieces = cut.pieces(), n_tiles = (u.n_heads + 3) / 4;
    const int slot = key_group * 16 + block.lane % 16, own_piece = key_group * 16 >> cut.piece_shift;
#pragma unroll 1
    for (int piece = 0; piece < n_pieces; ++piece) {
      await();
      if (piece == own_piece && part < parts) {
        // This lane's key row, for all lanes.
        int offset = (slot - (piece << cut.piece_shift)) << cut.row_shift;
        int order = row_order(offset, cut.line_shift());
        uint32_t keys = slot_address(ring);
        for_new(tile, [&](int row, int new_slot) {
          if (slot == new_slot) keys = shared_address(new_codes(row, false)), offset = order = 0;
        });
        const int first_col = part * (dim / parts), n_steps = dim / parts / 32;
        offset += first_col * kElementBytes + block.lane / 16 * 16;
        uint32_t queries = shared_address(scratch + AttentionScratch::kQueriesAt) +
                           static_cast<uint32_t>(block.lane % 8 * AttentionScratch::query_bytes(dim) + (first_col + block.lane / 8 * 8) * 2);
        float d[4][4] = {};
#pragma unroll 1
        for (int step = 0; step < n_steps; ++step) {
          uint32_t a[2][4];
          load_matrices(a[0], keys + static_cast<uint32_t>(offset ^ order));
          if constexpr (kFp8) {
            const uint32_t codes[4] = {a[0][0], a[0][1], a[0][2], a[0][3]};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              a[i][0] = widen_e4m3(codes[2 * i]), a[i][1] = widen_e4m3(codes[2 * i + 1]);
              a[i][2] = widen_e4m3(codes[2 * i] << 8), a[i][3] = widen_e4m3(codes[2 * i + 1] << 8);
            }
          } else {
            load_matrices(a[1], keys + static_cast<uint32_t>((offset + 32) ^ order));
          }
          offset += 32 * kElementBytes;
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            if (n >= n_tiles) break;
            uint32_t b[4];
            load_matrices(b, queries + static_cast<uint32_t>(n * 8 * AttentionScratch::query_bytes(dim)));
            mma_16bit<true>(d[n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
            mma_16bit<true>(d[n], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
          }
          queries += 64;
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
      release();
    }
  }

  // This warp's head; the running state stays in its registers.
  __device__ __forceinline__ void softmax(const DecodeTile& tile, float& largest, float& sum) const {
    const int head = block.warp;
    if (head >= u.n_heads) return;
    const float* scores = reinterpret_cast<const float*>(scratch + AttentionScratch::kScoresAt) + head * AttentionScratch::kScoreStride;
    float key_scales[2] = {1, 1}, value_scales[2] = {1, 1};
    if constexpr (kFp8) {
      await();                       // they come with the values
      const float* scales = reinterpret_cast<const float*>(block.ring + (ring.slot + 1) * block.args.slot_bytes - TileCut::kScaleBytes) + block.lane;
#pragma unroll
      for (int i = 0; i < 2; ++i) key_scales[i] = scales[32 * i], value_scales[i] = scales[kPageTokens + 32 * i];
      for_new(tile, [&](int row, int slot) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (slot == block.lane + 32 * i) key_scales[i] = new_scale(row, false), value_scales[i] = new_scale(row, true);
      });
    }
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = block.lane + 32 * i;
      constexpr int kPart = kUnitHeads * AttentionScratch::kScoreStride;
      float product = __fadd_rn(scores[slot], scores[kPart + slot]);
      if (parts == 4) product = __fadd_rn(__fadd_rn(product, scores[2 * kPart + slot]), scores[3 * kPart + slot]);
      if constexpr (kFp8) product = __fmul_rn(product, key_scales[i]);
      score[i] = live(tile, slot) ? attention_score(product, p.scale, p.softcap) : -INFINITY;
    }
    const float raised = fmaxf(largest, lane_max(fmaxf(score[0], score[1])));
    const float factor = raised == -INFINITY ? 1.0f : expf(largest - raised);
    largest = raised;
    unsigned char* weights = scratch + AttentionScratch::kWeightsAt + head * 2 * AttentionScratch::kWeightBytes;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = block.lane + 32 * i;
      float weight = live(tile, slot) && raised != -INFINITY ? expf(score[i] - raised) : 0.0f;
      total = __fadd_rn(total, weight);
      if constexpr (kFp8) weight = live(tile, slot) ? __fmul_rn(weight, value_scales[i]) : 0.0f;
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

  __device__ __forceinline__ int first_column() const { return block.warp * 16 * row_tiles; }

  // Columns of values are the rows of a, heads the columns of b.
  __device__ __forceinline__ void weigh(const DecodeTile& tile, float (&sums)[2][4][4]) const {
    const int n_tiles = (u.n_heads + 3) / 4, piece_rows = 1 << cut.piece_shift, first_byte = first_column() * kElementBytes;
    const bool works = first_column() < dim;
    const float* factors = reinterpret_cast<const float*>(scratch + AttentionScratch::kStateAt);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n >= n_tiles) break;
      const float factor = 4 * n + third < u.n_heads ? factors[4 * n + third] : 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= factor;
    }
    // Which key and column this lane says of four matrices of 8 keys; of FP8, 8 keys and 16 columns.
    const int upper = block.lane / 16, middle = block.lane / 8 % 2;
    const int key = block.lane % 8 + (kFp8 ? middle : upper) * 8, byte = first_byte + (kFp8 ? (row_tiles == 2 ? upper : 0) : middle) * 16;
    uint32_t weights = shared_address(scratch + AttentionScratch::kWeightsAt) +
                       static_cast<uint32_t>((block.lane % 8 + upper * 8) * AttentionScratch::kWeightBytes + middle * 16);
#pragma unroll 1
    for (int first_key = 0; first_key < kPageTokens; first_key += 16, weights += 32) {
      const int piece_key = first_key & (piece_rows - 1);
      if (piece_key == 0) {
        await();
        // Each warp puts in new values for itself.
        for_new(tile, [&](int row, int slot) {
          const int at = slot - first_key, lane_byte = block.lane * 16;
          if (works && at >= 0 && at < piece_rows && lane_byte < 16 * row_tiles * kElementBytes) {
            const int offset = (at << cut.row_shift) + first_byte + lane_byte;
            *reinterpret_cast<uint4*>(block.ring + ring.slot * block.args.slot_bytes + (offset ^ row_order(offset, cut.line_shift()))) =
                *reinterpret_cast<const uint4*>(new_codes(row, true) + first_byte + lane_byte);
          }
          __syncwarp();
        });
      }
      if (works) {
        const int offset = ((piece_key + key) << cut.row_shift) + byte, order = row_order(offset, cut.line_shift());
        const uint32_t values = slot_address(ring);
        uint32_t a[2][4];
        load_matrices_transposed(a[0], values + static_cast<uint32_t>(offset ^ order));
        if constexpr (kFp8) {
          const uint32_t codes[4] = {a[0][0], a[0][1], a[0][2], a[0][3]};
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            a[m][0] = widen_e4m3(codes[2 * m] << 8), a[m][1] = widen_e4m3(codes[2 * m]);
            a[m][2] = widen_e4m3(codes[2 * m + 1] << 8), a[m][3] = widen_e4m3(codes[2 * m + 1]);
          }
        } else if (row_tiles == 2) {
          load_matrices_transposed(a[1], values + static_cast<uint32_t>((offset + 32) ^ order));
        }
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          if (2 * pair >= n_tiles) break;
          uint32_t b[4];
          load_matrices(b, weights + static_cast<uint32_t>(pair * 16 * AttentionScratch::kWeightBytes));
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            mma_16bit<true>(sums[0][2 * pair + n], a[0][0], a[0][1], a[0][2], a[0][3], b[2 * n], b[2 * n + 1]);
            if (row_tiles == 2) mma_16bit<true>(sums[1][2 * pair + n], a[1][0], a[1][1], a[1][2], a[1][3], b[2 * n], b[2 * n + 1]);
          }
        }
      }
      if (piece_key + 16 == piece_rows) release();
    }
  }

  __device__ __forceinline__ void store(const float (&sums)[2][4][4]) const {
    const float* state = reinterpret_cast<const float*>(scratch + AttentionScratch::kStateAt);
    constexpr int kApart = kFp8 ? 1 : 8;         // a lane's two columns
    const bool whole = u.n_units == 1;
    if (first_column() < dim) {
      const int col = first_column() + group * (kFp8 ? 2 : 1), head_stride = whole ? dim : kMaxDecodeUnits * dim;
      float* to = whole ? p.out.values + u.row * int64_t{p.out.stride} + (u.first_head + third) * dim + col
                        : block.args.partial_sums + ((int64_t{u.row} * p.n_heads + u.first_head + third) * kMaxDecodeUnits + u.unit) * dim + col;
      const uint32_t flag = p.out.exchange ? block.flag(u.row) : 0u;
#pragma unroll
      for (int n = 0; n < 4; ++n, to += 4 * head_stride) {
        if (4 * n + third >= u.n_heads) break;
        const float inverse = __fdividef(1.0f, state[2 * kUnitHeads + 4 * n + third]);
        const auto put = [&](int at, float high, float low) {
          const float sum = __fadd_rn(high, low);
          store_common_word(to + at, whole ? round_result(__fmul_rn(sum, inverse)) | flag : never_all_ones(sum));
        };
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (m >= row_tiles) break;
          put(m * 16, sums[m][n][0], sums[m][n][1]);
          put(m * 16 + kApart, sums[m][n][2], sums[m][n][3]);
        }
      }
    }
    // As many as the merge has readers: one that nobody takes would wait for a layer with wider heads.
    if (!whole && block.warp < u.n_heads && block.lane < dim / kMergeColumns) {
      const int64_t at = (int64_t{u.row} * p.n_heads + u.first_head + block.warp) * kMaxDecodeUnits + u.unit;
      store_common_pair(block.args.partial_states + at * kStateCopies + block.lane, never_all_ones(state[kUnitHeads + block.warp]),
                        never_all_ones(state[2 * kUnitHeads + block.warp]));
    }
  }
};

// All units of this block. Not inlined: a function of its own has its own registers, and nothing of it lives on in the rest of the
// kernel. Its arguments are addresses of shared memory, so that the compiler knows them as such.
template <bool kFp8>
__device__ __noinline__ void attend(uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
  using Step = AttentionStep<kFp8>;
  RingPlace ring;
  {
    const DecodeBlock block(*shared_object<const DecodeArgs>(args_at), shared_object<unsigned char>(shared_at));
    const WarpPlace& place = block.small->places[block.warp];
    ring = {place.slot, place.parity};
  }
  const DecodeBlock all(*shared_object<const DecodeArgs>(args_at), shared_object<unsigned char>(shared_at));
  for_units(all, *shared_object<const AttentionPhase>(phase_at), [&](const DecodeUnit& unit) {
    const auto step = [&]() { return Step(args_at, shared_at, phase_at, ring); };
    DecodeTile tile;
    tile = step().begin(unit);
    DecodeBlock::barrier();              // the scratch changes hands
    step().finish_heads();
    DecodeBlock::barrier();
    float largest = -INFINITY, sum = 0;
    float sums[2][4][4] = {};
#pragma unroll 1
    for (int t = 0;;) {
      step().score(tile);
      DecodeBlock::barrier();
      step().softmax(tile, largest, sum);
      DecodeBlock::barrier();
      bool more;
      const DecodeTile last = tile;
      {
        const Step now = step();
        more = ++t < now.u.n_tiles;
        if (more) tile = now.tile_of(t);
      }
      step().weigh(last, sums);
      if (!more) break;
    }
    step().store(sums);
  });
  const DecodeBlock block(*shared_object<const DecodeArgs>(args_at), shared_object<unsigned char>(shared_at));
  WarpPlace& place = block.small->places[block.warp];
  __syncwarp();
  if (block.lane == 0) place.slot = ring.slot, place.parity = ring.parity;
  __syncwarp();
}

// The columns of one (row, head, 32 columns) from all units, by one warp, or by 8 that share the units: then the first adds up.
// first: this warp's first unit; the others are n_warps apart.
__device__ __forceinline__ void merge_columns(const DecodeBlock& block, const AttentionPhase& p, int row, int head, int column_block, int n_units,
                                              int first, int n_warps) {
  const int dim = p.cache.head_dim, lane = block.lane;
  const int n_own = n_warps == 1 ? n_units : (n_units - first + kMergeWarps - 1) / kMergeWarps;
  const int64_t at = (int64_t{row} * p.n_heads + head) * kMaxDecodeUnits + first;
  float2* states = block.args.partial_states + (at + lane * n_warps) * kStateCopies + column_block;
  float* sums = block.args.partial_sums + at * dim + column_block * kMergeColumns + lane;
  const int stride = n_warps * dim;
  // Steps from unit to unit; no address is kept.
  const auto for_sums = [&](auto&& function) {
    float* from = sums;
#pragma unroll
    for (int i = 0; i < kMergeShare; ++i, from += stride) {
      if (i >= n_own) break;
      asm volatile("" : "+l"(from));
      function(i, from);
    }
  };
  static_assert(kMergeShare <= 32);
  // Lane i takes the state of the warp's unit i. Few sums are asked for along with the states, many when all states are there:
  // a unit leaves its state last.
  uint2 state = make_uint2(~0u, ~0u);
  uint32_t bits[kMergeShare];
  for (uint32_t polls = 0;; count_poll(polls)) {
    if (lane < n_own && (state.x == ~0u || state.y == ~0u)) state = load_common_pair(states);
    const bool waits = __any_sync(kAllLanes, lane < n_own && (state.x == ~0u || state.y == ~0u));
    if (waits && n_own > 4) continue;
    bool missing = waits;
    for_sums([&](int i, const float* from) { bits[i] = load_common_word(from); });
#pragma unroll
    for (int i = 0; i < kMergeShare; ++i)
      if (i < n_own) missing = missing || bits[i] == ~0u;
    if (!__any_sync(kAllLanes, missing)) break;
  }
  if (lane < n_own) store_common_pair(states, ~0u, ~0u);
  const float own_largest = lane < n_own ? __uint_as_float(state.x) : -INFINITY, largest = lane_max(own_largest);
  const float factor = largest == -INFINITY ? 0.0f : expf(own_largest - largest);
  const float sum = lane_sum(lane < n_own ? __fmul_rn(__uint_as_float(state.y), factor) : 0.0f);
  float total = 0;
  for_sums([&](int i, float* from) {
    store_common_word(from, ~0u);
    total = __fmaf_rn(__uint_as_float(bits[i]), __shfl_sync(kAllLanes, factor, i), total);
  });
  const int64_t out = int64_t{head} * dim + column_block * kMergeColumns + lane;
  if (n_warps == 1) {
    store_row(p.out, row, out, __fdividef(total, sum), block.flag(row));
    return;
  }
  const int half = block.warp / kMergeWarps;
  float* parts = reinterpret_cast<float*>(block.scratch) + half * kMergeWarps * (kMergeColumns + 2);
  float* mine = parts + first * (kMergeColumns + 2);
  mine[lane] = total;
  if (lane == 0) mine[kMergeColumns] = largest, mine[kMergeColumns + 1] = sum;
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");
  if (first == 0) {
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
    store_row(p.out, row, out, __fdividef(value, weight), block.flag(row));
  }
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");   // the next one writes there
}

// Not inlined either.
__device__ __noinline__ void merge(uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
  const DecodeBlock block(*shared_object<const DecodeArgs>(args_at), shared_object<unsigned char>(shared_at));
  const AttentionPhase& p = *shared_object<const AttentionPhase>(phase_at);
  const int column_bits = 31 - __clz(p.cache.head_dim / kMergeColumns), n_tasks = p.n_heads << column_bits, n_blocks = static_cast<int>(gridDim.x);
  // The next task of this warp, and of its eight.
  int warp_task = block_index() + block.warp * n_blocks, eight_task = block_index() + block.warp / kMergeWarps * n_blocks;
#pragma unroll 1
  for (int row = 0; row < block.args.n_rows; ++row) {
    const int n_units = decode_units(block.small->positions[row], p.window).count;
    if (n_units == 1) continue;
    const bool alone = n_units <= kMergeShare;
    const int step = (alone ? kMatvecWarps : kMatvecWarps / kMergeWarps) * n_blocks;
    int task = alone ? warp_task : eight_task;
#pragma unroll 1
    for (; task < n_tasks; task += step)
      merge_columns(block, p, row, task >> column_bits, task & ((1 << column_bits) - 1), n_units, alone ? 0 : block.warp % kMergeWarps,
                    alone ? 1 : kMergeWarps);
    if (alone) warp_task = task - n_tasks;
    else eight_task = task - n_tasks;
  }
  // What was put back must be there before the next launch or layer leaves its sums.
  __threadfence();
}

template <class Function, class Stamp>
__device__ __forceinline__ void run_attention(const DecodeArgs& args, unsigned char* shared, const AttentionPhase& p, Function&& before_barrier,
                                              Stamp&& stamp) {
  const auto call = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    function(block, shared_address(&block.small->args), shared_address(shared), shared_address(&p));
  };
  call([&](const DecodeBlock&, uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
    if (p.cache.element == CacheElement::kFp8) attend<true>(args_at, shared_at, phase_at);
    else attend<false>(args_at, shared_at, phase_at);
  });
  stamp(1);
  call([&](const DecodeBlock& block, uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
    bool merges = false;
    for (int row = 0; row < block.args.n_rows; ++row) merges |= decode_units(block.small->positions[row], p.window).count > 1;
    if (!merges) return;
    DecodeBlock::barrier();              // the scratch changes hands
    merge(args_at, shared_at, phase_at);
  });
  stamp(2);
  before_barrier();
  DecodeBlock::barrier();
}

}  // namespace beryl::cuda
