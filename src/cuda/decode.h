// The decode kernel: linear and attention ops as one launch, for up to kWholeStepRows rows any run of them that decode_plan.h puts
// together, even all of a step, and one op by itself for up to kDecodeRows.
//
// One block a multiprocessor stays there for the whole launch. One of its warps copies the block's share of the weights of
// all phases through a ring in shared memory, as fast as memory gives them and without waiting for anything but free
// slots; between them another one (three where there is no copy engine) has the keys and values of an attention phase copied there. The rest go
// through the phases. Between phases there are no barriers of the grid: results go from block to
// block as exchange rows (decode_phase.h). So memory does not idle while a phase ends and the next one begins.
//
// The blocks wait for each other, so all of them must be on the device at once: the launch is cooperative.
#pragma once

#include "cuda/decode_phase.h"

namespace beryl::cuda {

// How shared memory is cut; slots of a ring, or 0 where so many rows do not fit.
struct DecodeCut {
  int slot_bytes = 0;
  int n_slots = 0;
  LinearCut forms[2] = {};
  int scratch_bytes = 0;
  int residual_bytes = 0;           // 0: the residual is in device memory
  int vector_bytes = 0;
  int sum_groups = 0;
  int shared_bytes = 0;
  bool usual_formats = false;       // all weights are FP4 g128 or FP8: a kernel without code for others
  bool holds_weights = false;       // and nearly all phases of FP4 have kHolds: a kernel with HeldMultiply, whose code costs the others 1 to 3 %
};

// What a list of phases needs of shared memory; the largest of all phases.
struct DecodeNeeds {
  int slot_bytes = 0;               // of a slot with all the stages that a phase likes to have in one
  int stage_bytes = 0;              // of a slot with one stage
  struct Form {                     // of x
    bool used = false;
    int x_all_bytes = 0;            // of all chunks of the widest x without a norm, a warp and row
    int unit_partials = 0;          // floats, a row of x
    int batch_partials = 0;         // likewise, of all units of a block, where x comes in several chunks: then it need not be taken twice
  } forms[2];
  int attention_bytes = 0;          // without rows,
  int attention_row_bytes = 0;      // and for each row
  int attention_slot_bytes = 0;     // the least that a slot of the ring must hold for it
  int sum_groups = 0;
  int residual_cols = 0;            // 0: no phase has the residual
  bool holds_vectors = false;       // LinearPhase::norm_held of any
  bool other_formats = false;       // than FP4 g128 and FP8
  bool holds_weights = false;       // kHolds of nearly all phases of FP4: but the first one of a step
};
DecodeCut cut_decode(const DecodeNeeds& needs, int n_rows, int shared_per_block);

// Scratch of attention units without rows, and for each row; the smallest slot of the ring.
int attention_scratch_bytes(int head_dim, int heads_of_kv);
int attention_row_bytes(int head_dim);
// The form of x (LinearCut) that a format is multiplied with.
int decode_x_form(Format format);
// Formats whose x is integers without sums (kShortX).
bool decode_takes_plain_integers(Format format);
int attention_slot_bytes(int head_dim);
// Head widths and caches that the kernel attends to.
bool decode_attends(int head_dim, CacheElement element, int window);
// Floats and states of the partial sums of one row.
int64_t decode_partial_floats(int n_heads, int head_dim);
int64_t decode_partial_states(int n_heads);

// args.slot_bytes etc. are set from the cut.
void launch_decode(const LaunchContext& context, DecodeArgs args, const DecodeCut& cut, int n_blocks);

}  // namespace beryl::cuda
