// The decode kernel's frame: the warp that copies weights, the walk through the phases, and the launch.
#include "cuda/decode.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "cuda/decode_attention.cuh"
#include "cuda/decode_linear.cuh"
#include "cuda/index_math.h"

namespace beryl::cuda {

namespace {

// ---- the copying warp ----

// Without bulk copies the lanes copy 16 bytes each, and a slot is full when all their copies have landed.
__device__ __forceinline__ void copy_slot(unsigned char* to, const unsigned char* from, int n_bytes, uint64_t* full, uint64_t policy, int lane) {
#if BERYL_BULK_COPY
  if (lane == 0) bulk_copy(to, from, static_cast<uint32_t>(n_bytes), full, policy);
#else
  (void)policy;
  for (int i = lane * 16; i < n_bytes; i += 32 * 16) copy16_async(shared_address(to + i), from + i, 16);
  barrier_arrive_after_copies(full);
#endif
}

// To the warps that copy keys and values (decode_copy.cuh).
__device__ __forceinline__ void hand_ring(const DecodeBlock& block, const RingPlace& ring, bool filled) {
#if !BERYL_BULK_COPY
  __syncwarp();
#endif
  if (block.lane == 0) {
    block.small->handed = {ring.slot, ring.parity, filled};
    barrier_arrive(&block.small->hand_over);
  }
}

// The same order as run_linear_row: batches of units, in a batch the chunks, in a chunk the units, in a unit its stages.
__device__ __forceinline__ void copy_weights(const DecodeBlock& block) {
#if BERYL_BULK_COPY
  if (block.lane != 0) return;
  const uint64_t policy = evict_first_policy();
#else
  const uint64_t policy = 0;
#endif
  RingPlace ring;
  bool filled = false;                             // the ring has been full once: slots must be free again
  uint32_t turn = 0;
  const WeightStream* at = block.args.streams;
  WeightStream next = *at;
  while (next.weights != nullptr) {
    const WeightStream s = next;
    next = *++at;                                  // here, so that it is there in time
    if (s.n_stages == 0) {
      hand_ring(block, ring, filled);
      barrier_wait_suspended(&block.small->hand_back, turn);
      turn ^= 1;
      ring = {block.small->handed.slot, block.small->handed.parity};
      filled = block.small->handed.filled;
      continue;
    }
    const LinearShare share = linear_share(block.args, s.share);
    const int stages_a_slot = stages_of_slot(block.args, s);
    for (int unit = 0; unit < share.n_units; unit += share.batch) {
      const int count = min(share.batch, share.n_units - unit);
      for (int stage = 0; stage < s.n_stages; stage += kChunkStages) {
        const int end = min(stage + kChunkStages, s.n_stages);
        for (int u = 0; u < count; ++u) {
          const unsigned char* from = s.weights + (share.first + unit + u) * s.unit_bytes;
          for (int i = stage; i < end; i += stages_a_slot) {
            if (filled) barrier_wait_suspended(&block.small->empty[ring.slot], ring.parity ^ 1);
            copy_slot(block.ring + ring.slot * block.args.slot_bytes, from + i * int64_t{s.stage_bytes},
                      min(stages_a_slot, end - i) * s.stage_bytes, &block.small->full[ring.slot], policy, block.lane);
            ring.next(block.args.n_slots);
            if (ring.slot == 0) filled = true;
          }
        }
      }
    }
  }
#if !BERYL_BULK_COPY
  commit_copies();
  wait_copies<0>();
#endif
}

// kTimed: takes times, for args.timeline. kHeld: DecodeCut::holds_weights, of one row.
template <int kRows, KernelFormats kFormats, bool kTimed, bool kHeld = false>
__global__ void __launch_bounds__(kDecodeThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs args) {
  const DecodeBlock block(args, decode_shared);
  DecodeShared* small = block.small;
  const int lane = block.lane;
  if (threadIdx.x == kDecodeConsumers) {
    for (int s = 0; s < args.n_slots; ++s) {
      barrier_init(&small->full[s], BERYL_BULK_COPY ? 1 : 32);
      barrier_init(&small->empty[s], kMatvecWarps);
    }
    barrier_init(&small->has_factors, 1);
    barrier_init(&small->hand_over, 1);
    barrier_init(&small->hand_back, 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(&small->task_full[i], 1);
      barrier_init(&small->task_empty[i], kMatvecWarps);
    }
    barrier_init_fence();
  }
  constexpr int kPhaseWords = sizeof(DecodePhase) / 16;
  static_assert(kPhaseWords <= 32);
  if (block.warp == 0) {
    if (lane < kMatvecWarps) small->places[lane] = {};
    small->tables[0][lane] = kPositiveLow;
    small->tables[1][lane] = kNegativeLow;
    small->tables[2][lane] = ~0u;
    // The first two; behind any phase there is another one or the end.
    for (int i = 0; i < 2; ++i)
      if (lane < kPhaseWords) reinterpret_cast<uint4*>(&small->phases[i])[lane] = reinterpret_cast<const uint4*>(args.phases + i)[lane];
    for (int i = lane; i < static_cast<int>(sizeof(DecodeArgs) / 4); i += 32)
      reinterpret_cast<uint32_t*>(&small->args)[i] = reinterpret_cast<const uint32_t*>(&args)[i];
  }
  __syncthreads();
  // Nothing above comes from an earlier kernel, nor do the weights, whose warp goes ahead; all others wait for what does.
  const auto await_input = [&] {
    grid_wait();
    if (block.warp == 0) {
      if (lane < args.n_rows) {
        small->positions[lane] = args.positions[lane];
        small->sequences[lane] = args.sequences[lane];
      }
      const uint32_t odd = lane < kDecodeRows ? ~args.flags[lane] & 1u : 0u;
      const uint32_t flags = __ballot_sync(kAllLanes, odd != 0);
      if (lane == 0) small->flags = flags;
    }
    partial_block_barrier<kDecodeThreads - 32>();
  };
  if (block.warp >= kMatvecWarps) {
    give_registers<32>();
    // The last of four schedulers has the fewest warps that compute, where there are not 16 of them.
    if (block.warp == kMatvecWarps + 3) {
      copy_weights(block);
    } else {
      await_input();
      if (block.warp - kMatvecWarps < kAttentionCopiers) copy_attention(args, decode_shared, block.warp - kMatvecWarps);
    }
  } else {
    take_registers<112>();
    await_input();
#pragma unroll 1
    for (;;) {
      // Everything afresh in each turn: what is kept in registers from phase to phase is not there for the work within.
      const DecodeBlock now(args, shared_now<kRows>(decode_shared));
      const int index = now.small->places[now.warp].phase;
      DecodePhase& phase = now.small->phases[index % kHeldPhases];
      if (phase.kind == PhaseKind::kEnd) break;
      // The phase after the next comes while this one runs, and is there for all behind its last barrier.
      if (now.thread < kPhaseWords && now.small->phases[(index + 1) % kHeldPhases].kind != PhaseKind::kEnd)
        copy16_async(shared_address(reinterpret_cast<uint4*>(&now.small->phases[(index + 2) % kHeldPhases]) + now.thread),
                     reinterpret_cast<const uint4*>(args.phases + index + 2) + now.thread, 16);
      commit_copies();
      const auto hold_next = [] { wait_copies<0>(); };
      const auto stamp = [&](int which) {
        if constexpr (!kTimed) return;
        const DecodeBlock block(args, shared_now<kRows>(decode_shared));
        if (block.thread != 0) return;
        uint64_t cycles;
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
        args.timeline[(int64_t{block.small->places[0].phase} * gridDim.x + block_index()) * kDecodeStamps + which] = cycles;
      };
      stamp(0);
      if (phase.kind == PhaseKind::kLinear) {
        if constexpr (kRows == 1) run_linear_row<kFormats, kTimed, kHeld>(args, decode_shared, &phase.linear, hold_next, stamp);
        else run_linear_rows<kRows, kFormats>(args, &phase.linear, hold_next, stamp);
      } else {
        run_attention<kTimed>(args, decode_shared, phase.attention, hold_next, stamp);
      }
      stamp(3);
      const DecodeBlock then(args, shared_now<kRows>(decode_shared));
      __syncwarp();
      if (then.lane == 0) ++then.small->places[then.warp].phase;
      __syncwarp();
    }
  }
  // The last block counts the launch and stores the residual: by then all have read the flags and the old residual.
  __syncthreads();
  uint32_t* finished = args.flags + kDecodeRows;
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(finished, 1u) + 1 == gridDim.x;
  }
  if (!__syncthreads_or(last)) return;
  if (threadIdx.x == 0) *finished = 0;
  if (static_cast<int>(threadIdx.x) < args.n_rows) args.flags[threadIdx.x] += 1;
  if (args.residual_out == nullptr) return;
  const int64_t n = args.n_rows * args.residual_cols;
  const float* from = block.residual(0, 0);
  for (int64_t i = threadIdx.x; i < n; i += kDecodeThreads) args.residual_out[i] = from[i];
}

int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&value, which, device), "device");
  return value;
}

}  // namespace

MatvecDevice matvec_device() {
  return {attribute(cudaDevAttrMultiProcessorCount), attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)};
}

int attention_scratch_bytes(int head_dim, int heads_of_kv) {
  return AttentionScratch::bytes(head_dim, heads_of_kv < kUnitHeads ? heads_of_kv : kUnitHeads, 0);
}
int attention_slot_bytes(int head_dim) { return 16 * head_dim * 2; }
int attention_row_bytes(int head_dim) { return 2 * head_dim * 2; }

int decode_x_form(Format format) { return tile_shape(format).columns == 64 || format == Format::kFp8 ? 1 : 0; }
bool decode_takes_plain_integers(Format format) {
  return !needs_x_sums(format) && format != Format::kBf16 && format != Format::kF16 && format != Format::kFp8;
}
bool decode_attends(int head_dim, CacheElement element, int window) {
  return (head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512) && element != CacheElement::kF32 && decodes_window(window);
}
int64_t decode_partial_floats(int n_heads, int head_dim) { return int64_t{n_heads} * kMaxDecodeUnits * head_dim; }
int64_t decode_partial_states(int n_heads) { return int64_t{n_heads} * kMaxDecodeUnits * kStateCopies; }

namespace {

// What may have room or not.
struct CutWish {
  bool x_at_once;                   // x of all chunks
  bool whole_batches;               // DecodeNeeds::Form::batch_partials
  bool near_by;                     // the residual and the norms' vectors
};

DecodeCut cut_with(const DecodeNeeds& needs, int n_rows, int shared_per_block, const CutWish& wish) {
  constexpr int kPartialBytes = 8 * 1024;          // of one buffer, so that a batch has several units
  DecodeCut cut;
  cut.sum_groups = needs.sum_groups;
  cut.usual_formats = !needs.other_formats;
  cut.holds_weights = cut.usual_formats && needs.holds_weights;
  if (wish.near_by) {
    cut.residual_bytes = round_up(n_rows * needs.residual_cols * 4, 128);
    cut.vector_bytes = needs.holds_vectors ? kMatvecWarps * 1024 : 0;
  }
  int scratch = AttentionScratch::kMergeBytes;
  for (int form = 0; form < 2; ++form) {
    const DecodeNeeds::Form& need = needs.forms[form];
    if (!need.used) continue;
    const int one_chunk = x_chunk_bytes(n_rows, x_group_bytes(form));
    LinearCut& linear = cut.forms[form];
    linear.x_bytes = round_up(wish.x_at_once ? std::max(one_chunk, n_rows * need.x_all_bytes) : one_chunk, 16);
    linear.partials_at = round_up(kMatvecWarps * linear.x_bytes, 128);
    const int partials = std::max(need.unit_partials, wish.whole_batches ? need.batch_partials : 0);
    scratch = std::max(scratch, linear.partials_at + 2 * std::max(partials * n_rows * 4, kPartialBytes));
  }
  const int attention = needs.attention_bytes > 0 ? needs.attention_bytes + n_rows * needs.attention_row_bytes : 0;
  const int small = static_cast<int>(sizeof(DecodeShared)) + 2 * n_rows * round_up(needs.sum_groups, 4) * 4 +
                    (n_rows > 1 ? kMatvecWarps * static_cast<int>(sizeof(LinearPlace)) : 0);
  cut.scratch_bytes = round_up(std::max(scratch, attention), 128);
  // What another form or attention needs anyway is room for partial sums.
  for (LinearCut& linear : cut.forms) {
    linear.partial_floats = (cut.scratch_bytes - linear.partials_at) / 2 / 16 * 4;
    linear.partial_row_floats = linear.partial_floats / n_rows;
  }
  const int left = shared_per_block - cut.scratch_bytes - cut.residual_bytes - cut.vector_bytes - small;
  // Slots with all the stages that phases like to have in one, if there are three of them, else with one stage. Attention by itself has no
  // weights.
  const bool alone = needs.slot_bytes == 0;
  const int most = alone ? 2 * needs.attention_slot_bytes : std::max(needs.slot_bytes, needs.attention_slot_bytes);
  const int least = alone ? needs.attention_slot_bytes : std::max(needs.stage_bytes, needs.attention_slot_bytes);
  if (least > 0 && left > 0) {
    cut.slot_bytes = left / most >= 3 ? most : least;
    cut.n_slots = std::min(left / cut.slot_bytes, kDecodeMaxSlots);
  }
  if (cut.n_slots < 2) return {};
  cut.shared_bytes = cut.n_slots * cut.slot_bytes + cut.scratch_bytes + cut.residual_bytes + cut.vector_bytes + small;
  return cut;
}

}  // namespace

// The residual and the norms' vectors in shared memory where three slots of the ring remain; then x of all chunks at once, and partial sums of
// all units of a block, where each costs at most one of them.
DecodeCut cut_decode(const DecodeNeeds& needs, int n_rows, int shared_per_block) {
  constexpr int kSlots = 3;
  const int slot_bytes = std::max(needs.slot_bytes, needs.attention_slot_bytes);
  const auto cut = [&](bool x_at_once, bool whole_batches, bool near_by) {
    return cut_with(needs, n_rows, shared_per_block, {x_at_once, whole_batches, near_by});
  };
  const auto affords = [&](const DecodeCut& more, const DecodeCut& less) {
    return more.n_slots >= kSlots && more.slot_bytes == less.slot_bytes && more.n_slots + 1 >= less.n_slots;
  };
  for (const bool near_by : {true, false}) {
    const DecodeCut one = cut(false, false, near_by), all = cut(true, false, near_by);
    const bool at_once = affords(all, one);
    const DecodeCut& chosen = at_once ? all : one;
    const DecodeCut whole = cut(at_once, true, near_by);
    if (near_by && !at_once && !(one.n_slots >= kSlots && one.slot_bytes == slot_bytes)) continue;
    return affords(whole, chosen) ? whole : chosen;
  }
  return {};
}

void launch_decode(const LaunchContext& context, DecodeArgs args, const DecodeCut& cut, int n_blocks) {
  BERYL_CHECK(args.n_rows >= 1 && args.n_rows <= kDecodeRows && cut.n_slots > 0, "the decode kernel takes 1 to 8 rows");
  args.slot_bytes = cut.slot_bytes;
  args.n_slots = cut.n_slots;
  std::copy(std::begin(cut.forms), std::end(cut.forms), args.cuts);
  args.scratch_at = cut.n_slots * cut.slot_bytes;
  args.residual_at = cut.residual_bytes > 0 ? args.scratch_at + cut.scratch_bytes : 0;
  args.vectors_at = cut.vector_bytes > 0 ? args.scratch_at + cut.scratch_bytes + cut.residual_bytes : 0;
  args.small_at = args.scratch_at + cut.scratch_bytes + cut.residual_bytes + cut.vector_bytes;
  args.sum_groups = round_up(cut.sum_groups, 4);
  args.row_sums = args.n_rows * args.sum_groups;
  args.rows_inverse = static_cast<uint32_t>((65536 + args.n_rows - 1) / args.n_rows);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(n_blocks));
  shape.block = dim3(kDecodeThreads);
  shape.shared_bytes = cut.shared_bytes;
  shape.cooperative = true;
  shape.name = "decode step";
  const auto kernel_of = [&]<KernelFormats kFormats>() {
    if (args.n_rows > 1) return decode_kernel<4, kFormats, false>;
    if constexpr (kFormats == KernelFormats::kUsual)
      if (cut.holds_weights) return args.timeline != nullptr ? decode_kernel<1, kFormats, true, true> : decode_kernel<1, kFormats, false, true>;
    return args.timeline != nullptr ? decode_kernel<1, kFormats, true> : decode_kernel<1, kFormats, false>;
  };
  launch(context, shape,
         args.n_rows > 4       ? decode_kernel<8, KernelFormats::kAll, false>
         : cut.usual_formats ? kernel_of.template operator()<KernelFormats::kUsual>()
                             : kernel_of.template operator()<KernelFormats::kAll>(),
         args);
}

}  // namespace beryl::cuda
