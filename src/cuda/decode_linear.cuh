// The linear phase of the decode kernel: y = epilogue(W · norm(x)) for 1 to 8 rows of x. x (decode_linear_block.cuh, decode_short.cuh),
// products (decode_multiply.cuh), then the block adds its warps' sums in order and stores y (decode_finish.cuh).
#pragma once

#include "cuda/decode_finish.cuh"
#include "cuda/decode_multiply.cuh"
#include "cuda/decode_short.cuh"

namespace beryl::cuda {

// What a phase is for this block and launch.
struct LinearShare {
  int first, n_units;
  int batch;                        // units whose partial sums fit at once
};
__device__ __forceinline__ LinearShare linear_share(const DecodeArgs& args, const WorkShare& s) {
  int block = block_index() + s.rotation;
  if (block >= static_cast<int>(gridDim.x)) block -= static_cast<int>(gridDim.x);
  const BlockUnits units = block_units(s.units_each, s.units_more, block);
  const int fit = static_cast<int>(__umulhi(static_cast<uint32_t>(args.cuts[s.form].partial_row_floats), s.unit_partials_inverse));
  return {units.first, units.count, max(min(units.count, fit), 1)};
}

// What will be wanted at the end of this phase and at the beginning of the next one comes while the products are made.
__device__ __forceinline__ void fetch_ahead(const DecodeBlock& block, const LinearPhase& p, const LinearShare& share) {
  if (p.next_norm != nullptr && block.args.vectors_at != 0 && block.warp < p.next_k_warps)
#pragma unroll
    for (int i = 0; i < 2; ++i) copy16_async(shared_address(block.held_vector() + i * 128), p.next_norm + block.warp * 256 + block.lane * 4 + i * 128, 16);
  // The rest by the warp that most often has no tile.
  if (block.warp == kMatvecWarps - 1) {
    const int first_row = share.first * p.row_warps * kTileRows, n_rows = share.n_units * p.row_warps * kTileRows;
    if (p.y_weight != nullptr && block.lane * 4 < min(n_rows, kHeldWeights) && first_row + block.lane * 4 < p.outputs)
      copy16_async(shared_address(block.y_weights() + block.lane * 4), p.y_weight + first_row + block.lane * 4, 16);
    if (p.row_scales != nullptr)
#pragma unroll
      for (int i = block.lane * 4; i < kHeldScales; i += 128)
        if (i < n_rows) copy16_async(shared_address(block.row_scales() + i), p.row_scales + first_row + i, 16);
  }
  commit_copies();
}

// A warp without a tile passes over the slots, in step with the others: each slot waits for all warps.
__device__ __forceinline__ void pass_over_slots(const DecodeArgs& args, const DecodeBlock& block, const LinearPhase& p, const Multiply& m) {
  const int n_stages = p.stream.n_stages - m.first_chunk * kChunkStages, stages_a_slot = stages_of_slot(args, p.stream);
  const int stages = min(n_stages, m.n_chunks * kChunkStages), slots = stages_a_slot == 2 ? (stages + 1) / 2 : stages;
  WarpPlace& place = block.small->places[block.warp];
  RingPlace ring = {place.slot, place.parity};
  for (int i = 0; i < m.n_units * slots; ++i) {
    barrier_wait_suspended(&block.small->full[ring.slot], ring.parity);
    __syncwarp();
    if (block.lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
    ring.next(args.n_slots);
  }
  __syncwarp();
  if (block.lane == 0) place.slot = ring.slot, place.parity = ring.parity;
  __syncwarp();
}

// The usual phases of a model in FP4 (kHolds): all that run_linear_row would choose from is known, and the first weights are taken before x is
// awaited.
template <bool kTimed, class Function, class Stamp>
__device__ __forceinline__ void run_held_row(const DecodeArgs& args, unsigned char* shared, LinearPhase* phase, const LinearStart& start,
                                             const LinearShare& share, Function&& before_barrier, Stamp&& stamp) {
  const bool reads = kTimed && args.plain_reads == PlainReads::kLinear;
  if (start.path & kOtherForm) DecodeBlock::barrier();      // partial sums are still read where x comes
  const DecodeBlock early(args, afresh(shared));
  const bool multiplies = early.warp < afresh(phase)->k_warps && !reads;
  HeldMultiply multiply(early, *afresh(phase));
  if (multiplies && share.n_units > 0) multiply.take();
  {
    const DecodeBlock block(args, afresh(shared));
    const ShortPath<1> work(block, *afresh(phase));
    const bool adds = start.path & kAdds;
    if (!adds) fetch_ahead(block, work.p, share);      // else norm weights would come to where x still needs the last ones
    if (adds) work.add_to_residual((start.path & kNearX) && args.vectors_at != 0);
    else work.take();
    if (adds) fetch_ahead(block, work.p, share);
  }
  int buffer;
  {
    const DecodeBlock block(args, afresh(shared));
    buffer = block.small->places[block.warp].buffer;
  }
  stamp(1);
  // The residual is everybody's, so x is prepared even where there are no units.
#pragma unroll 1
  for (int unit = 0; unit == 0 || unit < share.n_units; unit += share.batch) {
    const int count = min(share.batch, share.n_units - unit);
    {
      const DecodeBlock block(args, afresh(shared));
      const LinearPhase& p = *afresh(phase);
      if (multiplies) {
        multiply.run(block, p, count, buffer, unit + count < share.n_units);
      } else {
        pass_over_slots(args, block, p, {count, 0, p.n_chunks, buffer});
      }
    }
    const DecodeBlock block(args, afresh(shared));
    const float* partials = reinterpret_cast<const float*>(block.scratch + args.cuts[0].partials_at) + buffer * args.cuts[0].partial_floats;
    const ShortFinish<1> finish(block, *afresh(phase));
    before_barrier();
    DecodeBlock::barrier();
    stamp(2);
    finish.run(share.first + unit, unit, count, partials);
    buffer ^= 1;
  }
  const DecodeBlock block(args, afresh(shared));
  if (multiplies) multiply.leave(block);
  if (block.lane == 0) block.small->places[block.warp].buffer = buffer;
}

// Everything of one phase but the copies, for one row. before_barrier(): what the caller wants visible to all warps afterwards. stamp(i): takes
// the time, 1 when (the first) x is ready, 2 when the products are. kTimed: DecodeArgs::plain_reads may be set.
// kHeld: DecodeCut::holds_weights.
template <KernelFormats kFormats, bool kTimed, bool kHeld, class Function, class Stamp>
__device__ __forceinline__ void run_linear_row(const DecodeArgs& args, unsigned char* shared, LinearPhase* phase, Function&& before_barrier,
                                           Stamp&& stamp) {
  // Each step with its own view of the block and the phase.
  const auto step = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    function(LinearBlock<1, false>(block, *afresh(phase)));
  };
  const auto x_step = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    const LinearPhase& p = *afresh(phase);
    if (p.full) function(LinearBlock<1, true>(block, p));
    else function(LinearBlock<1, false>(block, p));
  };
  LinearShare share;
  LinearStart start;
  int buffer;
  {
    const DecodeBlock block(args, afresh(shared));
    start = afresh(phase)->start;
    share = linear_share(args, start.share);
    buffer = block.small->places[block.warp].buffer;
  }
  if constexpr (kHeld) {
    if ((start.path & kHolds) && stages_of_slot(args, afresh(phase)->stream) == 2 &&
        (start.n_chunks == 1 || start.x_all_bytes <= args.cuts[start.share.form].x_bytes)) {
      run_held_row<kTimed>(args, shared, phase, start, share, before_barrier, stamp);
      return;
    }
  }
  const bool adds = start.path & kAdds, is_short = (start.path & kShortX), ends_short = (start.path & kShortFinish);
  if (start.path & kOtherForm) DecodeBlock::barrier();      // partial sums are still read where x comes
  const int n_chunks = start.n_chunks, form = start.share.form;
  const bool all = (n_chunks > 1 || (is_short && !adds)) && start.x_all_bytes <= args.cuts[form].x_bytes;
  const bool direct = adds && (is_short || LinearBlock<1, false>(DecodeBlock(args, afresh(shared)), *afresh(phase)).direct());
  if (is_short) {
    const DecodeBlock block(args, afresh(shared));
    const ShortPath<1> work(block, *afresh(phase));
    if (adds) work.add_to_residual((start.path & kNearX) && args.vectors_at != 0);
    else if (all) work.take();
  } else if (adds) {
    x_step([](const auto& work) {
      if (work.p.n_chunks == 1) work.add_to_residual_row();
      else work.add_to_residual();
    });
    if (!direct) DecodeBlock::barrier();           // prepare() reads it back, in other warps too
  }
  if (all && !is_short) x_step([](const auto& work) { work.prepare_all(); });
  fetch_ahead(DecodeBlock(args, afresh(shared)), *afresh(phase), share);
  // The residual is everybody's, so x is prepared even where there are no units.
#pragma unroll 1
  for (int unit = 0; unit == 0 || unit < share.n_units; unit += share.batch) {
    const int count = min(share.batch, share.n_units - unit);
    const int at_once = all ? n_chunks : 1;
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk += at_once) {
      if (!all && !(direct && unit == 0) && (unit == 0 || n_chunks > 1)) {
        if (is_short) ShortPath<1>(DecodeBlock(args, afresh(shared)), *afresh(phase)).take_chunk(chunk);
        else x_step([&](const auto& work) { work.prepare(chunk, adds || unit > 0); });
      }
      if (unit == 0 && chunk == 0) stamp(1);
      step([&](const LinearBlock<1, false>& work) {
        const LinearPhase& p = work.p;
        if (work.has_tile && !(kTimed && args.plain_reads == PlainReads::kLinear)) {
          multiply_format<1, kFormats>(p.format, work.block, p, {count, chunk, at_once, buffer});
          return;
        }
        pass_over_slots(args, work.block, p, {count, chunk, at_once, buffer});
      });
    }
    const DecodeBlock block(args, afresh(shared));
    const float* partials = reinterpret_cast<const float*>(block.scratch + args.cuts[form].partials_at) + buffer * args.cuts[form].partial_floats;
    if (ends_short) {
      const ShortFinish<1> finish(block, *afresh(phase));
      before_barrier();
      DecodeBlock::barrier();
      stamp(2);
      finish.run(share.first + unit, unit, count, partials);
    } else {
      before_barrier();
      DecodeBlock::barrier();
      stamp(2);
      Finish<1>(block, *afresh(phase)).run(share.first, share.first + unit, count, partials);
    }
    buffer ^= 1;
  }
  const DecodeBlock block(args, afresh(shared));
  if (block.lane == 0) block.small->places[block.warp].buffer = buffer;
}

// The same for several rows: products leave no registers for where the warp is, and what is spilled comes back from the L2. So that is in
// shared memory, and the address from which all is computed comes from nothing. One row has the registers.
template <int kRows, KernelFormats kFormats, class Function, class Stamp>
__device__ __forceinline__ void run_linear_rows(const DecodeArgs& args, LinearPhase* phase, Function&& before_barrier, Stamp&& stamp) {
  // Each step with its own view of the block and the phase.
  const auto step = [&](auto&& function) {
    const DecodeBlock block(args, shared_afresh());
    function(LinearBlock<kRows, false>(block, *afresh(phase)));
  };
  const auto x_step = [&](auto&& function) {
    const DecodeBlock block(args, shared_afresh());
    const LinearPhase& p = *afresh(phase);
    if (p.full) function(LinearBlock<kRows, true>(block, p));
    else function(LinearBlock<kRows, false>(block, p));
  };
  const auto place_now = [&]() -> LinearPlace {
    const DecodeBlock block(args, shared_afresh());
    return block.linear_place();
  };
  const auto put_place = [&](const LinearPlace& place) {
    const DecodeBlock block(args, shared_afresh());
    __syncwarp();
    if (block.lane == 0) block.linear_place() = place;
    __syncwarp();
  };
  bool is_short, adds;
  {
    const DecodeBlock block(args, shared_afresh());
    const LinearStart start = afresh(phase)->start;
    const LinearShare share = linear_share(args, start.share);
    adds = start.path & kAdds, is_short = kRows <= 4 && (start.path & kShortX);
    if (start.path & kOtherForm) DecodeBlock::barrier();      // partial sums are still read where x comes
    const bool all = (start.n_chunks > 1 || (is_short && !adds)) && start.x_all_bytes * count_rows<kRows>(args) <= args.cuts[start.share.form].x_bytes;
    const bool direct = adds && (is_short || LinearBlock<kRows, false>(block, *afresh(phase)).direct());
    const uint32_t taken = (all ? kTakenAll : 0u) | (direct ? kTakenDirect : 0u);
    put_place({share.first, share.n_units, share.batch, 0, 0, start.n_chunks, all ? start.n_chunks : 1, start.path | taken});
  }
  if (is_short) {
    const LinearPlace at = place_now();
    const DecodeBlock block(args, shared_afresh());
    const ShortPath<kRows> work(block, *afresh(phase));
    if (adds) work.add_to_residual((at.path & kNearX) && args.vectors_at != 0);
    else if (at.path & kTakenAll) work.take();
  } else {
    if (adds) {
      x_step([](const auto& work) { work.add_to_residual(); });
      if (!(place_now().path & kTakenDirect)) DecodeBlock::barrier();           // prepare() reads it back, in other warps too
    }
    if (place_now().path & kTakenAll) x_step([](const auto& work) { work.prepare_all(); });
  }
  {
    const LinearPlace at = place_now();
    fetch_ahead(DecodeBlock(args, shared_afresh()), *afresh(phase), {at.first, at.n_units, at.batch});
  }
  // The residual is everybody's, so x is prepared even where there are no units.
#pragma unroll 1
  for (bool more = true; more;) {
    LinearPlace at = place_now();
    if (!(at.path & kTakenAll) && !((at.path & kTakenDirect) && at.unit == 0) && (at.unit == 0 || at.n_chunks > 1)) {
      if (kRows <= 4 && (at.path & kShortX)) ShortPath<kRows>(DecodeBlock(args, shared_afresh()), *afresh(phase)).take_chunk(at.chunk);
      else x_step([&](const auto& work) { work.prepare(at.chunk, (at.path & kAdds) || at.unit > 0); });
      at = place_now();
    }
    if (at.unit == 0 && at.chunk == 0) stamp(1);
    step([&](const LinearBlock<kRows, false>& work) {
      const LinearPhase& p = work.p;
      if (work.has_tile) {
        multiply_format<kRows, kFormats>(p.format, work.block, p, Multiply::of(at, work.block.small->places[work.block.warp]));
        return;
      }
      pass_over_slots(args, work.block, p, Multiply::of(at, work.block.small->places[work.block.warp]));
    });
    at = place_now();
    at.chunk += at.at_once;
    if (at.chunk < at.n_chunks) {
      put_place(at);
      continue;
    }
    const DecodeBlock block(args, shared_afresh());
    const int count = min(at.batch, at.n_units - at.unit), buffer = block.small->places[block.warp].buffer;
    const LinearCut& cut = args.cuts[afresh(phase)->start.share.form];
    const float* partials = reinterpret_cast<const float*>(block.scratch + cut.partials_at) + buffer * cut.partial_floats;
    if (kRows <= 4 && (at.path & kShortFinish)) {
      const ShortFinish<kRows> finish(block, *afresh(phase));
      before_barrier();
      DecodeBlock::barrier();
      stamp(2);
      finish.run(at.first + at.unit, at.unit, count, partials);
    } else {
      before_barrier();
      DecodeBlock::barrier();
      stamp(2);
      Finish<kRows>(block, *afresh(phase)).run(at.first, at.first + at.unit, count, partials);
    }
    at = place_now();
    at.unit += at.batch, at.chunk = 0;
    more = at.unit < at.n_units;
    put_place(at);
    const DecodeBlock then(args, shared_afresh());
    __syncwarp();
    if (then.lane == 0) then.small->places[then.warp].buffer ^= 1;
    __syncwarp();
  }
}

}  // namespace beryl::cuda
