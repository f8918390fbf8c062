// y = epilogue(W · norm(x)) for 5 to 64 rows of x (right for any number): batched decoding and short prompts, on the
// same packed tiles as the decode kernel, without expanding them.
//
// x is cut into digits (codec.cuh) once, in the order in which the tensor cores read them; the weights stream through
// shared memory once for every 64 rows, and each tile is decoded once. The same x row gives the same bits as in the
// decode kernel, whatever the other rows and their number.
#pragma once

#include <cstdint>

#include "cuda/decode_phase.h"
#include "cuda/kernels.h"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

inline constexpr int kBatchRows = 64;           // rows of x for one reading of the weights

struct BatchLinearArgs {
  const uint8_t* weights;           // [plan.packed_bytes], 128-byte aligned
  RowsView x;                       // [n_rows][cols]; rows 16-byte aligned
  int n_rows;                       // >= 1; more than kBatchRows read the weights again
  bool has_norm;                    // x := x / sqrt(mean(x²) + norm_eps) · norm_weight
  const float* norm_weight;         // [cols], null: 1
  float norm_eps;
  DecodeEpilogue epilogue;
  RowsView other;                   // [n_rows][outputs]; may be y itself
  float softcap;
  RowsView y;                       // [n_rows][outputs], written
  void* scratch;                    // [batch_scratch_bytes], 128-byte aligned; zeros before the first call
};

// Bytes of scratch for calls with up to n_rows rows. Calls on one stream may share one scratch, of whatever plans: what
// has to be zero lies at its begin and is zero again after each call.
int64_t batch_scratch_bytes(const MatvecPlan& plan, int n_rows, const MatvecDevice& device);

// Only launches, so it may be captured.
void launch_batch_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const MatvecDevice& device,
                         const LaunchContext& context);

}  // namespace beryl::cuda
