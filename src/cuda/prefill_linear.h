// y = epilogue(W · norm(x)) for many rows of x on Hopper's tensor cores, straight from the packed tiles that decoding
// uses: prompts. For fewer than about 65 rows batch_linear.h is the better one; any number is right.
//
// Two launches. prefill_prepare.cu puts norm(x) into 16 bits, in the order in which the product reads it, each row
// times a power of two that brings its largest to 2^14 .. 2^15 (f16; BF16 weights: bf16, no power), and finds the power
// of two of each row of W. prefill_kernel.cuh multiplies. Weights are f16 after one rounding of code · scale (FP4, FP8,
// F16 and BF16: exact); sums are f32 from left to right.
#pragma once

#include <cstdint>

#include "cuda/batch_linear.h"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

// Whether the device runs code for it (compute capability 9.0, compiled for sm_90a), which the product alone has.
bool has_prefill_linear();

// Bytes of scratch for calls with up to n_rows rows; nothing has to be zero. Calls on one stream may share one scratch.
int64_t prefill_scratch_bytes(const MatvecPlan& plan, int64_t n_rows);

// What measurements and checks choose by hand; the results are the same bits.
struct PrefillTuning {
  int tokens = 0;       // of a block, 128 or 256; 0: chosen
  int head_start = -1;  // cycles that half of a block goes ahead; -1: chosen
};

// Only launches, so it may be captured. args.scratch: [prefill_scratch_bytes], 128-byte aligned; rows of x 16-byte
// aligned.
void launch_prefill_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const MatvecDevice& device,
                           const LaunchContext& context, PrefillTuning tuning = {});

// The first of its two launches alone, for measurements.
void prepare_prefill_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const LaunchContext& context);

}  // namespace beryl::cuda
