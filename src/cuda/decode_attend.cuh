// What the computing warps of the decode kernel do with a task: queries, new keys and values, scores, softmax, weighted values, and the sums'
// way out.
#pragma once

#include "cuda/attention_state.cuh"
#include "cuda/decode_attention_block.cuh"
#include "cuda/mma.cuh"
#include "cuda/qkv_head.cuh"

namespace beryl::cuda {

// A value as two numbers of 16 bits, the high part and what it leaves: bf16, or f16 of a query beside an FP8 cache, whose keys are f16 in
// one instruction. Weights are bf16 always: they may be smaller than any f16.
struct SplitValue {
  uint16_t high, low;
};
template <bool kHalf>
__device__ __forceinline__ SplitValue split_value(float value) {
  if constexpr (kHalf) {
    const __half high = __float2half_rn(value);
    return {__half_as_ushort(high), __half_as_ushort(__float2half_rn(value - __half2float(high)))};
  } else {
    const Bf16Pair pair = split_bf16(value);
    return {__bfloat16_as_ushort(pair.high), __bfloat16_as_ushort(pair.low)};
  }
}
// Two of them.
struct SplitPair {
  uint32_t high, low;
};
template <bool kHalf>
__device__ __forceinline__ SplitPair split_pair(float first, float second) {
  const SplitValue a = split_value<kHalf>(first), b = split_value<kHalf>(second);
  return {uint32_t{a.high} | uint32_t{b.high} << 16, uint32_t{a.low} | uint32_t{b.low} << 16};
}

// Where things lie, as addresses of shared memory, so that the compiler knows them as such.
struct AttentionPlace {
  uint32_t args, ring, small, scratch, phase;
  __device__ __forceinline__ AttentionPlace(uint32_t args_at, uint32_t shared_at, uint32_t phase_at) : args(args_at), ring(shared_at), phase(phase_at) {
    const DecodeArgs& a = *shared_object<const DecodeArgs>(args_at);
    small = shared_at + static_cast<uint32_t>(a.small_at);
    scratch = shared_at + static_cast<uint32_t>(a.scratch_at);
  }
};

// ---- what few tiles need ----
// Functions, so that all others need not jump over their code: behind a jump instructions come late.

// New keys or values, at `codes` in the scratch (two rows of 1 << from_shift bytes each), of the rows in `held` go into their slots, where
// these are among n_slots from first_slot on, which lie at `at`: n_bytes from first_byte on. Each warp does this for what it reads.
__device__ __noinline__ void put_new(uint32_t small_at, uint32_t codes, uint32_t held, uint32_t at, int first_slot, int n_slots, int first_byte,
                                     int n_bytes, int from_shift, int row_shift) {
  const DecodeShared* small = shared_object<const DecodeShared>(small_at);
  const int lane = thread_afresh() % 32;
#pragma unroll 1
  for (; held != 0; held &= held - 1) {
    const int row = __ffs(static_cast<int>(held)) - 1;
    const int local = small->positions[row] % kPageTokens - first_slot, byte = first_byte + lane * 16;
    if (local >= 0 && local < n_slots && lane * 16 < n_bytes) {
      const uint4 from = *shared_object<const uint4>(codes + static_cast<uint32_t>((row * 2 << from_shift) + byte));
      const uint32_t to = at + static_cast<uint32_t>((local / kBoxRows * kBoxRows << row_shift) + box_offset(local % kBoxRows, byte, row_shift));
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(swizzled(to)), "r"(from.x), "r"(from.y), "r"(from.z), "r"(from.w) : "memory");
    }
    __syncwarp();
  }
}
__device__ __noinline__ float cap_score_apart(float score, float softcap) { return cap_score(score, softcap); }

// What heads without a weight are multiplied by: a load more takes less time than the instructions for having none. And what keys are that
// are made from values: 1 where they have a column.
struct HeadConstants {
  float ones[kFromValuesDim], turned[kFromValuesDim];
};
constexpr HeadConstants make_head_constants() {
  HeadConstants constants = {};
  for (int column = 0; column < kFromValuesDim; ++column) constants.ones[column] = 1, constants.turned[column] = is_turned(column) ? 1.0f : 0.0f;
  return constants;
}
__device__ const HeadConstants kHeadConstants = make_head_constants();

// What code for one kind of tile knows: the head's size, 0 for any; whether a KV head has more than 4 query heads (AttentionStep::wide).
struct TileKind {
  int dim;
  bool wide;
};
inline constexpr TileKind kAnyTile = {0, false};

// One task, by all warps of the block. It lies in shared memory, and each step looks up what it needs (a Step of its own): registers are
// for sums.
template <bool kFp8, TileKind kKind = kAnyTile>
struct AttentionStep {
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  // Values of an FP8 cache are multiplied as small_of_e4m3 has them, and weights, which have the values' scales in them, by this: sums are
  // right but for a factor of 2^8, and a value's scale may be up to 2^15.
  static constexpr float kWeightUnit = kFp8 ? 0x1p112f : 1.0f, kSumUnit = kFp8 ? 0x1p8f : 1.0f;
  static constexpr bool kAny = kKind.dim == 0;
  const DecodeArgs& args;
  DecodeShared* small;
  unsigned char* scratch;
  uint32_t ring_at;
  int warp, lane;
  const AttentionPhase& p;
  const AttentionTask& u;
  RingPlace& ring;
  int dim;
  int group, third;                 // lane / 4, lane % 4
  int parts;                        // warps that share a key's columns
  int row_tiles;                    // of 16 columns of the output, of a warp
  int row_shift, piece_shift;       // of the task's values

  __device__ __forceinline__ AttentionStep(const AttentionPlace& at, RingPlace& place, uint32_t n_tasks)
      : args(*shared_object<const DecodeArgs>(at.args)), small(shared_object<DecodeShared>(at.small)), scratch(shared_object<unsigned char>(at.scratch)),
        ring_at(at.ring), warp(thread_afresh() / 32), lane(thread_afresh() % 32), p(*shared_object<const AttentionPhase>(at.phase)),
        u(small->tasks[n_tasks & 1]), ring(place), dim(kAny ? p.cache.head_dim : kKind.dim), group(lane / 4), third(lane % 4),
        parts(dim >= 128 ? 4 : 2), row_tiles(dim > 16 * kMatvecWarps ? 2 : 1), row_shift(kAny ? u.row_shift[1] : own_row_shift()),
        piece_shift(kAny ? u.piece_shift[1] : own_piece_shift()) {}

  // Of a kind's tiles, where slots of the ring have 32 KB or more, but less than 64 (fits).
  __device__ __forceinline__ static constexpr int own_row_shift() { return (kKind.dim == 512 ? 9 : 8) + (kFp8 ? 0 : 1); }
  __device__ __forceinline__ static constexpr int own_piece_shift() { return own_row_shift() > 9 ? 15 - own_row_shift() : 6; }
  // Whether this code is for the phase.
  __device__ __forceinline__ static bool fits(const DecodeArgs& args, const AttentionPhase& p) {
    return p.cache.head_dim == kKind.dim && (p.heads_of_kv > 4) == kKind.wide &&
           TileCut::of_values(p.cache, args.slot_bytes).piece_shift == own_piece_shift();
  }
  // Keys from values: whether they are, and how the keys' own columns lie, of which a slot has 16 KB.
  __device__ __forceinline__ bool from_values() const { return (kAny ? dim : kKind.dim) == kFromValuesDim && p.cache.key_weight != nullptr; }
  __device__ __forceinline__ int key_row_shift() const { return kAny ? u.row_shift[0] : from_values() ? (kFp8 ? 7 : 8) : own_row_shift(); }
  __device__ __forceinline__ int key_piece_shift() const { return kAny ? u.piece_shift[0] : from_values() ? 6 : own_piece_shift(); }

  __device__ __forceinline__ uint32_t flag_of(int row) const { return small->flags >> row & 1u; }

  // ---- the ring ----
  __device__ __forceinline__ uint32_t slot_address(const RingPlace& place) const {
    return ring_at + static_cast<uint32_t>(place.slot * args.slot_bytes);
  }
  __device__ __forceinline__ void await() const { barrier_wait_suspended(&small->full[ring.slot], ring.parity); }
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane == 0) barrier_arrive(&small->empty[ring.slot]);
    ring.next(args.n_slots);
  }

  // All slots of a tile, without a look at them.
  __device__ __forceinline__ void pass_over() const {
#pragma unroll 1
    for (int n = (kPageTokens >> u.piece_shift[0]) + (kPageTokens >> u.piece_shift[1]); n > 0; --n) await(), release();
  }

  // ---- tasks ----
  // Whether there is something to do.
  __device__ __forceinline__ bool take_task(uint32_t n_tasks) const {
    barrier_wait_suspended(&small->task_full[n_tasks & 1], n_tasks >> 1 & 1);
    return u.n_tiles > 0;
  }
  // Whether another one follows.
  __device__ __forceinline__ bool finish_task(uint32_t n_tasks) const {
    const bool more = u.more;
    __syncwarp();
    if (lane == 0) barrier_arrive(&small->task_empty[n_tasks & 1]);
    return more;
  }

  // ---- queries, new keys and values ----
  __device__ __forceinline__ uint8_t* new_codes(int row, bool is_values) const {
    return scratch + AttentionScratch::new_at(dim, !kAny && !kKind.wide ? 4 : u.n_heads) + (row * 2 + (is_values ? 1 : 0)) * dim * kElementBytes;
  }
  __device__ __forceinline__ float& new_scale(int row, bool is_values) const {
    return reinterpret_cast<float*>(scratch + AttentionScratch::kNewScalesAt)[row * 2 + (is_values ? 1 : 0)];
  }
  // All values are asked for before the first is looked at. Where many blocks ask, they wait for one word first: what they all load again and
  // again takes the bandwidth of the L2.
  __device__ __forceinline__ void load_head(Head& head, int half, const PhaseRows& rows, int row, int col) const {
    constexpr int kManyUnits = 8;
    const float* from = rows.values + row * int64_t{rows.stride} + col + lane * 4;
    const uint32_t flag = rows.exchange ? flag_of(row) : 0, mask = rows.exchange ? ~1u : ~0u;
    if (rows.exchange && u.n_units > kManyUnits) await_word(rows.values + row * int64_t{rows.stride} + col + 2 * half - 1, flag);
    uint4 bits[kHeadGroups][2] = {};
    for (uint32_t polls = 0;;) {
      uint32_t wrong = 0;
#pragma unroll
      for (int g = 0; g < kHeadGroups; ++g)
        if (first_pair(g, lane) < half) bits[g][0] = load_common_words(from + g * 128), bits[g][1] = load_common_words(from + half + g * 128);
#pragma unroll
      for (int g = 0; g < kHeadGroups; ++g)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 b = bits[g][h];
          if (first_pair(g, lane) < half) wrong |= (b.x ^ flag) | (b.y ^ flag) | (b.z ^ flag) | (b.w ^ flag);
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
  // A lane's 4 neighbouring values of q. A lane has four neighbouring FP8 codes where it has two and two of bf16.
  __device__ __forceinline__ void put_query(int task, int col, const float* v) const {
    unsigned char* high = scratch + AttentionScratch::kQueriesAt + task * 2 * AttentionScratch::query_bytes(dim);
    unsigned char* low = high + AttentionScratch::query_bytes(dim);
    const SplitPair a = split_pair<kFp8>(v[0], v[1]), b = split_pair<kFp8>(v[2], v[3]);
    if constexpr (kFp8) {
      const int at = (col / 16 * 16 + col % 16 / 2) * 2;
      *reinterpret_cast<uint32_t*>(high + at) = a.high, *reinterpret_cast<uint32_t*>(high + at + 16) = b.high;
      *reinterpret_cast<uint32_t*>(low + at) = a.low, *reinterpret_cast<uint32_t*>(low + at + 16) = b.low;
    } else {
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
  // values are there. kHalf: half of head_dim, or 0: any.
  template <int kHalf>
  __device__ __forceinline__ void finish_heads() const {
    const int half = kHalf != 0 ? kHalf : dim / 2;
    const uint32_t new_rows = u.new_rows;
    const int n_tasks = u.n_heads + 2 * __popc(new_rows);
    // The last warps first: the first ones may still be storing what this block made of q.
    const int first_task = kMatvecWarps - 1 - warp;
#pragma unroll 1
    for (int task = first_task; task < n_tasks; task += kMatvecWarps) {
      const bool is_query = task < u.n_heads, is_values = !is_query && (task - u.n_heads) % 2 != 0;
      Head head;
      int row = u.row;
      if (!is_query) {
        uint32_t rows = new_rows;
#pragma unroll 1
        for (int skip = (task - u.n_heads) / 2; skip > 0; --skip) rows &= rows - 1;
        row = __ffs(static_cast<int>(rows)) - 1;
      }
      const int key_col = (p.kv_heads_before + u.kv_head) * dim;
      const int col = is_query ? (u.first_head + task) * dim : is_values && !p.v_from_k ? key_col + p.cache.n_kv_heads * dim : key_col;
      const bool norms = is_query ? p.finish && p.q_norm : is_values ? p.v_norm : p.k_norm;
      const float* weight = is_query ? p.q_weight : is_values ? p.v_weight : p.k_weight;
      const float eps = is_query ? p.q_eps : is_values ? p.v_eps : p.k_eps;
      const float* rope = is_query ? (p.finish ? p.q_rope : nullptr) : is_values ? nullptr : p.k_rope;
      // Keys from values: what the columns that are not turned are multiplied by. Keys have none of these.
      const bool from_values = kHalf * 2 == kFromValuesDim && p.cache.key_weight != nullptr;
      const int stored = from_values && !is_query && !is_values ? kTurnedPairs : half;
      Head weights, turns, factors;
      if constexpr (kHalf * 2 == kFromValuesDim)
        load_halves<true>(factors, half, lane, from_values && is_query ? p.cache.key_weight : stored == half ? kHeadConstants.ones : kHeadConstants.turned);
      load_halves<true>(weights, half, lane, weight != nullptr ? weight : kHeadConstants.ones);
      if (rope != nullptr) load_halves<true>(turns, half, lane, rope + row * dim);
      else fill_head(turns, 0);
      load_head(head, half, is_query ? p.q : p.kv, row, col);
      if (norms) norm_head(head, half, weights, eps);
      if (rope != nullptr) turn_head(head, half, turns);
      if constexpr (kHalf * 2 == kFromValuesDim)
        for_pairs(half, [&](int i) {
          if (i < 4 && lane * 4 < kTurnedPairs) return;
          head.first[i] = __fmul_rn(head.first[i], factors.first[i]), head.second[i] = __fmul_rn(head.second[i], factors.second[i]);
        });
      if (task == first_task) DecodeBlock::barrier();     // the scratch changes hands
      // function(column, four values from there on)
      const auto for_columns = [&](auto&& function) {
#pragma unroll
        for (int g = 0; g < kHeadGroups; ++g) {
          const int pair = first_pair(g, lane);
          if (pair >= stored) continue;
          function(pair, head.first + 4 * g);
          function(stored + pair, head.second + 4 * g);
        }
      };
      if (is_query) {
        for_columns([&](int to_col, const float* v) { put_query(task, to_col, v); });
        continue;
      }
      const float scale = kFp8 ? cache_scale(head, half) : 1.0f;
      const bool appends = row == u.row && u.append_row >= 0;
      const int64_t to_row = appends ? u.append_row : 0;
      uint8_t* to = static_cast<uint8_t*>(is_values ? p.cache.values : p.cache.keys) + to_row * 2 * stored * kElementBytes;
      for_columns([&](int to_col, const float* v) {
        const uint2 codes = encode(v, scale);
        put_codes(new_codes(row, is_values), to_col, codes);
        if (appends) put_codes(to, to_col, codes);
      });
      if (kFp8 && lane == 0) {
        new_scale(row, is_values) = scale;
        if (appends) (is_values ? p.cache.value_scales : p.cache.key_scales)[to_row] = scale;
      }
    }
    if (first_task >= n_tasks) DecodeBlock::barrier();
  }
  // Calls function(row, slot) for the new tokens of a tile.
  template <class Function>
  __device__ __forceinline__ void for_new(const TaskTile& tile, Function&& function) const {
#pragma unroll 1
    for (uint32_t rows = tile.held; rows != 0; rows &= rows - 1) {
      const int row = __ffs(static_cast<int>(rows)) - 1;
      function(row, small->positions[row] % kPageTokens);
    }
  }
  __device__ __forceinline__ uint32_t new_codes_at(bool is_values) const { return shared_address(new_codes(0, is_values)); }

  // ---- products ----
  // A tile of 8 columns of b: where a KV head has up to 4 heads, their high and low parts in turn; else the high parts of 8 heads, and once
  // more their low ones. Not by the heads of the unit, of which there are fewer with fewer rows: the order of sums would change.
  __device__ __forceinline__ bool wide() const { return kAny ? p.heads_of_kv > 4 : kKind.wide; }
  __device__ __forceinline__ int head_tiles() const { return !kAny && !kKind.wide ? 1 : u.n_heads > 8 ? 2 : 1; }

  // Keys are the rows of a, heads the columns of b. A warp has the keys of a box, and some of their columns.
  __device__ __forceinline__ void score(const TaskTile& tile) const {
    const int box = warp % 4, part = warp / 4, n_pieces = kPageTokens >> key_piece_shift();
    const bool works = part < parts && !tile.empty(box), reads_values = from_values() && part != 0;
    // Where its keys are in the ring: keys of their own are handed on here, values by weigh().
    const int shift = reads_values ? row_shift : key_row_shift(), own_pieces = reads_values ? piece_shift : key_piece_shift();
    const int own_piece = box * kBoxRows >> own_pieces;
    const auto skip = [&](int n) {
#pragma unroll 1
      for (; n > 0; --n) await(), release();
    };
    skip(reads_values ? n_pieces : own_piece);
    RingPlace place = ring;
    for (int n = reads_values ? own_piece : 0; n > 0; --n) place.next(args.n_slots);
    barrier_wait_suspended(&small->full[place.slot], place.parity);
    if (works) {
      // Its columns are two slabs of 64 (one of 64 or 32 in narrower heads): neighbours in the row, but for some values.
      const int part_bits = parts == 4 ? 2 : 1, n_steps = dim >> part_bits >> 5;
      const int first_slab = reads_values ? (5 * part - 3) / 2 : from_values() ? 0 : part * dim >> part_bits >> 6, apart = reads_values && part == 2 ? 2 : 1;
      const int first_byte = reads_values || from_values() ? first_slab * 64 * kElementBytes : (part * dim >> part_bits) * kElementBytes;
      const uint32_t box_at = slot_address(place) + static_cast<uint32_t>((box * kBoxRows & ((1 << own_pieces) - 1)) << shift);
      if (tile.held != 0)
        put_new(shared_address(small), new_codes_at(reads_values), tile.held, box_at, box * kBoxRows, kBoxRows, first_byte,
                reads_values ? (apart + 1) * 64 * kElementBytes : dim * kElementBytes >> part_bits, row_shift, shift);
      // Of 4 steps of 32 columns. What is set under a condition only would take registers from all that runs before.
      const uint32_t first_at = swizzled(box_at + static_cast<uint32_t>(box_offset(lane % 16, first_byte + lane / 16 * 16, shift)));
      const int line = kFp8 ? (first_slab + apart) / 2 - first_slab / 2 : apart;       // of 128 bytes, from the first slab's to the second's
      const uint32_t second_at = (first_at + static_cast<uint32_t>(line * kBoxRows * 128)) ^ (kFp8 ? apart % 2 * 64u : 0u);
      uint32_t a[4][2][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        if (step >= n_steps) break;
        const uint32_t at = step < 2 ? first_at : second_at;
        if constexpr (kFp8) {
          uint32_t codes[4];
          load_matrices(codes, at ^ static_cast<uint32_t>(step % 2 * 32));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            a[step][i][0] = halves_of_e4m3(codes[2 * i]), a[step][i][1] = halves_of_e4m3(codes[2 * i + 1]);
            a[step][i][2] = halves_of_e4m3(codes[2 * i] >> 16), a[step][i][3] = halves_of_e4m3(codes[2 * i + 1] >> 16);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            load_matrices(a[step][i], at ^ static_cast<uint32_t>(step % 2 * 64 + i * 32));
        }
      }
      // Queries have their columns in order: of what is turned the second slab is in the other half of the head.
      const int first_query = from_values() ? first_slab * 128 : (part * dim >> part_bits) * 2;
      const uint32_t second_query = static_cast<uint32_t>(from_values() && !reads_values ? kFromValuesDim / 2 * 2 : apart * 128);
      const uint32_t row_bytes = static_cast<uint32_t>(AttentionScratch::query_bytes(dim));
      const bool is_wide = wide();
      uint32_t queries = shared_address(scratch + AttentionScratch::kQueriesAt) + static_cast<uint32_t>(lane % 8 * (is_wide ? 2 : 1)) * row_bytes +
                         static_cast<uint32_t>(first_query + lane / 8 * 16);
      float* to = reinterpret_cast<float*>(scratch + AttentionScratch::kScoresAt) +
                  (part * kUnitHeads + third * (is_wide ? 2 : 1)) * AttentionScratch::kScoreStride + box * kBoxRows + group;
      float d[2][4] = {};
      const int n_parts = is_wide ? 2 : 1;       // high and low ones, one after the other
#pragma unroll 1
      for (int n = head_tiles(); n > 0; --n) {
#pragma unroll (kAny ? 1 : 2)
        for (int low = 0; low < n_parts; ++low, queries += row_bytes) {
          // Two loads before the first product of either; beyond the last step there is the last one once more.
#pragma unroll
          for (int first = 0; first < 4; first += 2) {
            if (first >= n_steps) break;
            uint32_t b[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
              load_matrices(b[i], queries + (first != 0 ? second_query : 0u) + static_cast<uint32_t>(min(i, n_steps - 1) * 64));
#pragma unroll
            for (int step = 0; step < 2; ++step) {
              if (first + step >= n_steps) break;
#pragma unroll
              for (int i = 0; i < 2; ++i)
                mma_16bit<!kFp8>(d[i], a[first + step][i][0], a[first + step][i][1], a[first + step][i][2], a[first + step][i][3], b[step][2 * i],
                                b[step][2 * i + 1]);
            }
          }
        }
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fadd_rn(d[0][i], d[1][i]), d[0][i] = d[1][i] = 0;
        if (is_wide) {
          to[0] = v[0], to[8] = v[2];
          to[AttentionScratch::kScoreStride] = v[1], to[AttentionScratch::kScoreStride + 8] = v[3];
        } else {
          to[0] = __fadd_rn(v[0], v[1]), to[8] = __fadd_rn(v[2], v[3]);
        }
        queries += 14 * row_bytes;
        to += 8 * AttentionScratch::kScoreStride;
      }
    }
    if (reads_values) return;
    release();
    skip(n_pieces - 1 - own_piece);
  }

  // This warp's head; the running state stays in its registers, the sum of each lane's keys by itself.
  __device__ __forceinline__ void softmax(const TaskTile& tile, float& largest, float& sum) const {
    const int head = warp;
    if (head >= u.n_heads) return;
    const float* scores = reinterpret_cast<const float*>(scratch + AttentionScratch::kScoresAt) + head * AttentionScratch::kScoreStride + lane;
    float score[2], others[2], value_scales[2] = {1, 1};      // of the first part, of the other parts
    constexpr int kPart = kUnitHeads * AttentionScratch::kScoreStride;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[i] = scores[32 * i];
      others[i] = scores[kPart + 32 * i];
      if (parts == 4) others[i] = __fadd_rn(__fadd_rn(others[i], scores[2 * kPart + 32 * i]), scores[3 * kPart + 32 * i]);
    }
    if constexpr (kFp8) {
      await();                       // they come with the values
      const float* scales = shared_object<const float>(slot_address(ring) + static_cast<uint32_t>(args.slot_bytes - TileCut::kScaleBytes + lane * 4));
      float key_scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) key_scales[i] = scales[32 * i], value_scales[i] = scales[kPageTokens + 32 * i];
      for_new(tile, [&](int row, int slot) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (slot == lane + 32 * i) key_scales[i] = new_scale(row, false), value_scales[i] = new_scale(row, true);
      });
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] = __fmaf_rn(others[i], from_values() ? value_scales[i] : key_scales[i], __fmul_rn(score[i], key_scales[i]));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] = __fadd_rn(score[i], others[i]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) score[i] *= p.scale;
    if (p.softcap > 0) score[0] = cap_score_apart(score[0], p.softcap), score[1] = cap_score_apart(score[1], p.softcap);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (!tile.live(lane + 32 * i)) score[i] = -INFINITY;
    const float raised = fmaxf(largest, lane_max(fmaxf(score[0], score[1])));
    // Of no live key at all the weights and the factor are 0.
    const float reference = raised == -INFINITY ? 0.0f : raised;
    const float factor = expf(largest - reference);
    largest = raised;
    unsigned char* weights = scratch + AttentionScratch::kWeightsAt + head * 2 * AttentionScratch::kWeightBytes + lane * 2;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float weight = expf(score[i] - reference);
      total = __fadd_rn(total, weight);
      if constexpr (kFp8) weight = tile.live(lane + 32 * i) ? __fmul_rn(weight, __fmul_rn(value_scales[i], kWeightUnit)) : 0.0f;
      const SplitValue pair = split_value<false>(weight);
      *reinterpret_cast<uint16_t*>(weights + 64 * i) = pair.high;
      *reinterpret_cast<uint16_t*>(weights + 64 * i + AttentionScratch::kWeightBytes) = pair.low;
    }
    sum = __fmaf_rn(sum, factor, total);
    if (lane == 0) reinterpret_cast<float*>(scratch + AttentionScratch::kStateAt)[head] = factor;
  }

  __device__ __forceinline__ int first_column() const { return warp * 16 * row_tiles; }

  // Columns of values are the rows of a, heads the columns of b.
  __device__ __forceinline__ void weigh(const TaskTile& tile, float (&sums)[2][2][4]) const {
    const int n_tiles = head_tiles(), first_byte = first_column() * kElementBytes, n_boxes = 1 << piece_shift >> 4;
    const bool works = !kAny || first_column() < dim, is_wide = wide();
    // Factors of heads that there are not multiply columns that nobody reads.
    const float* factors = reinterpret_cast<const float*>(scratch + AttentionScratch::kStateAt) + third * (is_wide ? 2 : 1);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (n >= n_tiles) break;
      const float even = factors[8 * n], odd = is_wide ? factors[8 * n + 1] : even;
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= i % 2 == 0 ? even : odd;
    }
    // Which key and column this lane says of four matrices of 8 keys; of FP8, 8 keys and 16 columns.
    const int upper = lane / 16, middle = lane / 8 % 2;
    const int key = lane % 8 + (kFp8 ? middle : upper) * 8, byte = first_byte + (kFp8 ? (row_tiles == 2 ? upper : 0) : middle) * 16;
    const uint32_t lane_at = static_cast<uint32_t>(box_offset(key, byte, row_shift));
    // Two matrices of high parts, two of low ones, of 8 keys each.
    uint32_t weights = shared_address(scratch + AttentionScratch::kWeightsAt) +
                       static_cast<uint32_t>((is_wide ? lane % 8 * 2 + upper : lane % 8) * AttentionScratch::kWeightBytes + middle * 16);
    const auto load = [&](uint32_t (&a)[2][4], uint32_t (&b)[2][4], uint32_t address, uint32_t weights_at) {
      load_matrices_transposed(a[0], address);
      if (!kFp8 && row_tiles == 2) load_matrices_transposed(a[1], address ^ 32);
      load_matrices(b[0], weights_at);
      if (n_tiles == 2) load_matrices(b[1], weights_at + 16 * AttentionScratch::kWeightBytes);
    };
    const auto multiply = [&](uint32_t (&a)[2][4], const uint32_t (&b)[2][4]) {
      if constexpr (kFp8) {
        const uint32_t codes[4] = {a[0][0], a[0][1], a[0][2], a[0][3]};
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) a[m][2 * i] = small_of_e4m3(codes[2 * m + i] << 8), a[m][2 * i + 1] = small_of_e4m3(codes[2 * m + i]);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (n >= n_tiles) break;
#pragma unroll
        for (int low = 0; low < 2; ++low) {
          if (low != 0 && !is_wide) break;
#pragma unroll
          for (int m = 0; m < 2; ++m)
            if (m < row_tiles) mma_16bit<true>(sums[m][n], a[m][0], a[m][1], a[m][2], a[m][3], b[n][2 * low], b[n][2 * low + 1]);
        }
      }
    };
    // A box's bytes are a multiple of 1024, so that the order of its pieces is the same in all. A box that was not copied is not looked at:
    // its weights are zeros, and multiply a live one's values.
    const uint32_t box_bytes = static_cast<uint32_t>(kBoxRows << row_shift);
#pragma unroll 1
    for (int box = 0; box < kBoxes; box += n_boxes) {
      await();
      uint32_t at = slot_address(ring);
      if (tile.held != 0 && works)
        put_new(shared_address(small), new_codes_at(true), tile.held, at, box * kBoxRows, n_boxes * kBoxRows, first_byte, 16 * row_tiles * kElementBytes,
                row_shift, row_shift);
      at = swizzled(at + lane_at);
      const uint32_t boxes = works ? static_cast<uint32_t>(tile.boxes) >> box & ((1u << n_boxes) - 1) : 0;
      if (boxes != 0) {
        const uint32_t live = static_cast<uint32_t>(__ffs(static_cast<int>(boxes)) - 1);
        const auto box_at = [&](int i) { return at + ((boxes >> i & 1u) != 0 ? static_cast<uint32_t>(i) : live) * box_bytes; };
        // The next box is loaded before this one is multiplied.
        uint32_t a[2][2][4] = {}, b[2][2][4] = {};
        load(a[0], b[0], box_at(0), weights);
#pragma unroll (kAny ? 1 : 2)
        for (int i = 0; i < n_boxes; i += 2) {
          if (n_boxes > 1) load(a[1], b[1], box_at(i + 1), weights + static_cast<uint32_t>(i * 32 + 32));
          multiply(a[0], b[0]);
          if (i + 2 < n_boxes) load(a[0], b[0], box_at(i + 2), weights + static_cast<uint32_t>(i * 32 + 64));
          if (n_boxes > 1) multiply(a[1], b[1]);
        }
      }
      weights += static_cast<uint32_t>(n_boxes * 32);
      release();
    }
  }

  // Where the unit is all of the token, sums over the heads' weights; else the unit's sums, and last its state, for the merge.
  __device__ __forceinline__ void store(const float (&sums)[2][2][4], float largest, float sum) const {
    const bool is_wide = wide(), works = !kAny || first_column() < dim;
    constexpr int kApart = kFp8 ? 1 : 8;         // a lane's two columns: neighbours are stored together, for half of a sector costs as much as all
    const auto store_two = [](bool live, float* to, uint32_t a, uint32_t b) {
      if constexpr (kFp8) store_common_pair_if(live, to, a, b);
      else store_common_word_if(live, to, a), store_common_word_if(live, to + kApart, b);
    };
    const int64_t row_head = int64_t{u.row} * p.n_heads + u.first_head;
    const int first = third * (is_wide ? 2 : 1), column = first_column() + group * (kFp8 ? 2 : 1);
    // function(whether there is such a head; it, from `first` on; column; its value and the one kApart on). A product's NaN is never all ones.
    float unit = kSumUnit;
    asm volatile("" : "+f"(unit));
    const auto for_sums = [&](auto&& function) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (odd != 0 && !is_wide) break;
          const bool live = 8 * n + first + odd < u.n_heads;
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            if (m >= row_tiles) break;
            float v[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) v[i] = __fmul_rn(is_wide ? sums[m][n][2 * i + odd] : __fadd_rn(sums[m][n][2 * i], sums[m][n][2 * i + 1]), unit);
            function(live, 8 * n + odd, m * 16, v[0], v[1]);
          }
        }
        if (n + 1 >= head_tiles()) break;
      }
    };
    if (u.n_units != 1) {
      float* to = p.partial_sums + ((row_head + first) * kMaxDecodeUnits + u.unit) * dim + column;
      if (works)
        for_sums([&](bool live, int head, int col, float a, float b) {
          store_two(live, to + head * kMaxDecodeUnits * dim + col, __float_as_uint(a), __float_as_uint(b));
        });
      if (warp < u.n_heads) {
        sum = lane_sum(sum);
        // As many states as the merge has readers: one that nobody takes would wait for a layer with wider heads.
        if (lane < dim / kMergeColumns)
          store_common_pair(p.partial_states + ((row_head + warp) * kMaxDecodeUnits + u.unit) * kStateCopies + lane, never_all_ones(largest),
                            never_all_ones(sum));
      }
      return;
    }
    float* inverses = reinterpret_cast<float*>(scratch + AttentionScratch::kStateAt) + kUnitHeads;
    if (warp < u.n_heads) inverses[warp] = __fdividef(1.0f, lane_sum(sum));
    DecodeBlock::barrier();
    float* to = p.out.values + u.row * int64_t{p.out.stride} + (u.first_head + first) * dim + column;
    const uint32_t flag = p.out.exchange ? flag_of(u.row) : 0u;
    if (works)
      for_sums([&](bool live, int head, int col, float a, float b) {
        const float inverse = inverses[first + head];
        store_two(live, to + head * dim + col, round_result(__fmul_rn(a, inverse)) | flag, round_result(__fmul_rn(b, inverse)) | flag);
      });
  }
};

// Not inlined: a function of its own has its own registers, and nothing of it lives on in the rest of the kernel. For the usual
// widths it has half of the instructions: all of them run once, so they take as long as they take to arrive.
template <bool kFp8>
__device__ __noinline__ void finish(uint32_t args_at, uint32_t shared_at, uint32_t phase_at, uint32_t n_tasks) {
  RingPlace ring;
  const AttentionStep<kFp8> step(AttentionPlace(args_at, shared_at, phase_at), ring, n_tasks);
  if (step.dim == 256) step.template finish_heads<128>();
  else if (step.dim == 512) step.template finish_heads<256>();
  else step.template finish_heads<0>();
}

// All tasks of this block. Not inlined either. kReads: a plain read in its place (PlainReads): slots are awaited and freed, nothing is
// multiplied, and sums are zeros.
template <bool kFp8, TileKind kKind, bool kReads = false>
__device__ __noinline__ void attend(uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
  using Step = AttentionStep<kFp8, kKind>;
  const AttentionPlace at(args_at, shared_at, phase_at);
  RingPlace ring;
  uint32_t n_tasks;
  {
    const WarpPlace& place = shared_object<DecodeShared>(at.small)->places[thread_afresh() / 32];
    ring = {place.slot, place.parity};
    n_tasks = place.tasks;
  }
  const auto step = [&]() { return Step(at, ring, n_tasks); };
  bool more;
  do {
    if (step().take_task(n_tasks)) {
      finish<kFp8>(args_at, shared_at, phase_at, n_tasks);
      DecodeBlock::barrier();
      float largest = -INFINITY, sum = 0;
      float sums[2][2][4] = {};
#pragma unroll 1
      for (int t = 0;;) {
        if constexpr (kReads) {
          const Step now = step();
          now.pass_over();
          largest = 0, sum = 1;
        } else {
          {
            const Step now = step();
            now.score(TaskTile(now.u.tiles[t]));
          }
          DecodeBlock::barrier();
          {
            const Step now = step();
            now.softmax(TaskTile(now.u.tiles[t]), largest, sum);
          }
          DecodeBlock::barrier();
          const Step now = step();
          now.weigh(TaskTile(now.u.tiles[t]), sums);
        }
        const Step now = step();
        if (++t < now.u.n_tiles) continue;
        if (now.u.ends) break;
        now.finish_task(n_tasks++);      // the unit goes on
        step().take_task(n_tasks);
        t = 0;
      }
      step().store(sums, largest, sum);
    }
    more = step().finish_task(n_tasks++);
  } while (more);
  WarpPlace& place = shared_object<DecodeShared>(at.small)->places[thread_afresh() / 32];
  __syncwarp();
  if (thread_afresh() % 32 == 0) place.slot = ring.slot, place.parity = ring.parity, place.tasks = n_tasks;
  __syncwarp();
}

}  // namespace beryl::cuda
