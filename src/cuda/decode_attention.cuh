// The attention phase of the decode kernel: QkvFinish and Attention of one layer, for 1 to 8 rows.
//
// The work is cut into units (index_math.h): a token, a KV head (at most 16 of its query heads, fewer where blocks would be
// idle) and a share of the keys, a page at a time. All warps of a block work on one unit:
//
//   copy     a warp of its own finds the unit (AttentionTask) and has its keys and values copied into the ring, between the weights of
//            the phases before and after: they depend on nothing in this step, so they are there long before the queries
//   finish   a warp a head: norm and rope of q, two numbers of 16 bits each (high, low), to shared memory. Keys and values of tokens
//            that are new in this launch are not in the cache yet: the unit makes them itself where it needs them, and
//            the unit that owns a token's newest page writes them to the cache
//   scores   keys times q: warp (box, part of head_dim) multiplies 16 keys. Where keys are made from values (index_math.h) the first part
//            is what rope turns, the others are columns of the values, and the vector is in q
//   softmax  a warp a head: adds the parts, keeps the running maximum and sum; weights to two such numbers
//   values   values times weights: a warp owns 16 (32 of wide heads) columns of head_dim
//   store    the sums
//
// A token with one unit is done then. Else unnormalised sums go to global memory, and as a second step each column is
// merged by one warp, or by eight where there are many units. A sum that waits there is its own flag: nothing there means all
// ones, and the reader puts that back.
//
// q and the weights have 16 bits of mantissa or more, so products are as good as the cache's own values. Slots that hold no live
// key are never multiplied; values there are zeros or their box is left out. Moves the live keys and values once.
//
// All of this runs once a phase, so it takes as long as its code takes to arrive, most of all behind jumps. So there is one code for any
// head, with loops, and the same code with constants for the two kinds of tiles that large models have (TileKind): two thirds fewer
// instructions; what few tiles need is in functions.
#pragma once

#include "cuda/decode_attend.cuh"
#include "cuda/decode_copy.cuh"
#include "cuda/decode_merge.cuh"

namespace beryl::cuda {

// kTimed: DecodeArgs::plain_reads may be set.
template <bool kTimed, class Function, class Stamp>
__device__ __forceinline__ void run_attention(const DecodeArgs& args, unsigned char* shared, const AttentionPhase& p, Function&& before_barrier,
                                              Stamp&& stamp) {
  const auto call = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    function(block, shared_address(&block.small->args), shared_address(shared), shared_address(&p));
  };
  call([&](const DecodeBlock& block, uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
    const auto attend_by_kind = [&]<bool kFp8, bool kReads>() {
      constexpr TileKind kNarrow = {256, false}, kWide = {512, true};
      if (AttentionStep<kFp8, kNarrow>::fits(block.args, p)) attend<kFp8, kNarrow, kReads>(args_at, shared_at, phase_at);
      else if (AttentionStep<kFp8, kWide>::fits(block.args, p)) attend<kFp8, kWide, kReads>(args_at, shared_at, phase_at);
      else attend<kFp8, kAnyTile, kReads>(args_at, shared_at, phase_at);
    };
    const auto attend_by_cache = [&]<bool kReads>() {
      if (p.cache.element == CacheElement::kFp8) attend_by_kind.template operator()<true, kReads>();
      else attend_by_kind.template operator()<false, kReads>();
    };
    if (kTimed && block.args.plain_reads == PlainReads::kAttention) attend_by_cache.template operator()<kTimed>();
    else attend_by_cache.template operator()<false>();
  });
  stamp(1);
  call([&](const DecodeBlock& block, uint32_t args_at, uint32_t shared_at, uint32_t phase_at) {
    int most = 1;
    for (int row = 0; row < block.args.n_rows; ++row) most = max(most, decode_units(block.small->positions[row], p.window).count);
    if (most == 1) return;
    if (most > kMergeShare) DecodeBlock::barrier();      // the scratch changes hands
    merge(args_at, shared_at, phase_at);
  });
  stamp(2);
  before_barrier();
  DecodeBlock::barrier();
}

}  // namespace beryl::cuda
