// The second step of an attention phase of the decode kernel, where a token has several units: their sums become the output.
#pragma once

#include "cuda/decode_attention_block.cuh"

namespace beryl::cuda {

// The columns of one (row, head, 32 columns) from all units, by one warp, or by 8 that share the units: then the first adds up.
// first: this warp's first unit; the others are n_warps apart.
__device__ __forceinline__ void merge_columns(const DecodeBlock& block, const AttentionPhase& p, int row, int head, int column_block, int n_units,
                                              int first, int n_warps) {
  const int dim = p.cache.head_dim, lane = block.lane, group = lane / kMergeLanes;
  const int n_own = n_warps == 1 ? n_units : (n_units - first + kMergeWarps - 1) / kMergeWarps;
  const int64_t at = (int64_t{row} * p.n_heads + head) * kMaxDecodeUnits + first;
  float2* states = p.partial_states + (at + lane * n_warps) * kStateCopies + column_block;
  float* sums = p.partial_sums + (at + group * n_warps) * dim + column_block * kMergeColumns + lane % kMergeLanes * 4;
  const int stride = kMergeGroups * n_warps * dim;
  // The lane's units, one of each kMergeGroups: function(i, address, whether there is such a unit). Steps from unit to unit; no address is kept.
  const auto for_sums = [&](auto&& function) {
    float* from = sums;
#pragma unroll
    for (int i = 0; i < kMergeSums; ++i, from += stride) {
      if (kMergeGroups * i >= n_own) break;
      asm volatile("" : "+l"(from));
      function(i, from, kMergeGroups * i + group < n_own);
    }
  };
  static_assert(kMergeShare <= 32);
  // Lane i takes the state of the warp's unit i. The sums are asked for along with the states, by eight warps when all states are there:
  // a unit leaves its state last.
  uint2 state = make_uint2(~0u, ~0u);
  uint4 bits[kMergeSums] = {};
  for (uint32_t polls = 0;; count_poll(polls)) {
    if (lane < n_own && (state.x == ~0u || state.y == ~0u)) state = load_common_pair(states);
    const bool waits = __any_sync(kAllLanes, lane < n_own && (state.x == ~0u || state.y == ~0u));
    if (waits && n_warps != 1) continue;
    bool missing = waits;
    for_sums([&](int i, const float* from, bool has) {
      if (has) bits[i] = load_common_words(from);
    });
#pragma unroll
    for (int i = 0; i < kMergeSums; ++i) missing = missing || bits[i].x == ~0u || bits[i].y == ~0u || bits[i].z == ~0u || bits[i].w == ~0u;
    if (!__any_sync(kAllLanes, missing)) break;
  }
  if (lane < n_own) store_common_pair(states, ~0u, ~0u);
  const float own_largest = lane < n_own ? __uint_as_float(state.x) : -INFINITY, largest = lane_max(own_largest);
  const float factor = largest == -INFINITY ? 0.0f : expf(own_largest - largest);
  const float sum = lane_sum(lane < n_own ? __fmul_rn(__uint_as_float(state.y), factor) : 0.0f);
  float totals[4] = {};
  for_sums([&](int i, float* from, bool has) {
    const float f = __shfl_sync(kAllLanes, factor, kMergeGroups * i + group);
    if (has) store_common_words(from, make_uint4(~0u, ~0u, ~0u, ~0u));
    totals[0] = __fmaf_rn(__uint_as_float(bits[i].x), f, totals[0]);
    totals[1] = __fmaf_rn(__uint_as_float(bits[i].y), f, totals[1]);
    totals[2] = __fmaf_rn(__uint_as_float(bits[i].z), f, totals[2]);
    totals[3] = __fmaf_rn(__uint_as_float(bits[i].w), f, totals[3]);
  });
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int offset = kMergeLanes; offset < 32; offset *= 2) totals[i] = __fadd_rn(totals[i], __shfl_xor_sync(kAllLanes, totals[i], offset));
  // All groups have the sums of four columns now: each stores one of them.
  static_assert(kMergeGroups == 4);
  const float total = group == 0 ? totals[0] : group == 1 ? totals[1] : group == 2 ? totals[2] : totals[3];
  const int col = lane % kMergeLanes * 4 + group;
  const int64_t out = int64_t{head} * dim + column_block * kMergeColumns;
  if (n_warps == 1) {
    store_row(p.out, row, out + col, __fdividef(total, sum), block.flag(row));
    return;
  }
  const int half = block.warp / kMergeWarps;
  float* parts = reinterpret_cast<float*>(block.scratch) + half * kMergeWarps * (kMergeColumns + 2);
  float* mine = parts + first * (kMergeColumns + 2);
  mine[col] = total;
  if (lane == 0) mine[kMergeColumns] = largest, mine[kMergeColumns + 1] = sum;
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");
  if (first == 0) {
    const float* own = parts + lane % kMergeWarps * (kMergeColumns + 2);
    const float part_largest = own[kMergeColumns], all = lane_max<kMergeWarps>(part_largest);
    const float f = all == -INFINITY ? 0.0f : expf(part_largest - all);
    const float weight = lane_sum<kMergeWarps>(__fmul_rn(own[kMergeColumns + 1], f));
    float value = 0;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) value = __fmaf_rn(parts[w * (kMergeColumns + 2) + lane], __shfl_sync(kAllLanes, f, w), value);
    store_row(p.out, row, out + lane, __fdividef(value, weight), block.flag(row));
  }
  asm volatile("bar.sync %0, 256;" ::"r"(2 + half) : "memory");   // the next one writes there
}

// Not inlined, as attend() is not.
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
}

}  // namespace beryl::cuda
