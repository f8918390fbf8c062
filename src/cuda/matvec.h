// y = epilogue(W · norm(x)) for 1 to 8 rows of x: the weight stream of decoding. Reads W once, whatever the number of
// rows.
//
// Usage: plan = plan_matvec(source, n_sms); device memory of plan.packed_bytes, aligned to 128 bytes; pack_units /
// pack_row_scales (matvec_layout.h) from as many threads as you like into staging buffers; then launch_matvec, which
// only launches one kernel and may be captured. The same x row gives the same bits whatever the other rows and their
// number.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/matvec_layout.h"
#include "ops/op.h"

namespace beryl::cuda {

enum class MatvecEpilogue : uint8_t {
  kStore,
  kGatedGelu,                       // gelu_tanh(gate) · up; a gated plan
  kGatedSilu,                       // silu(gate) · up; a gated plan
  kGeluTimesOther,                  // gelu_tanh(W h) · other
  kSoftcap,                         // softcap · tanh(W h / softcap)
  kTimesGeluOther,                  // (W h) · gelu_tanh(other): up, where gate has another format and was stored before
  kTimesSiluOther,                  // (W h) · silu(other)
};

// Rows of f32 or bf16 values, `stride` values apart.
struct MatvecRows {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_bf16 = false;
};

struct MatvecArgs {
  const uint8_t* weights;           // [plan.packed_bytes], 128-byte aligned
  MatvecRows x;                     // [n_rows][cols]; rows 16-byte aligned
  int n_rows;                       // 1..8
  bool has_norm;                    // x := x / sqrt(mean(x²) + norm_eps) · norm_weight
  const float* norm_weight;         // [cols], null: 1
  float norm_eps;

  // Optional AddNorm before it: x := (x + add / sqrt(mean(add²) + add_eps) · add_weight) · add_scale, then the norm
  // above.
  MatvecRows add;                   // [n_rows][cols], data null: none
  const float* add_weight;          // [cols], null: 1
  float add_eps;
  float add_scale;
  float* sum;                       // [n_rows][cols] f32, the new x is stored here; must not overlap x (blocks read x)
  int64_t sum_stride;

  MatvecEpilogue epilogue;
  MatvecRows other;                 // [n_rows][outputs]; may be y itself
  float softcap;
  MatvecRows y;                     // [n_rows][outputs], written
};

void launch_matvec(const MatvecPlan& plan, const MatvecArgs& args, const MatvecDevice& device,
                   const LaunchContext& context);

// The device's numbers that launch_matvec needs; throws Error(kDevice).
MatvecDevice matvec_device();

}  // namespace beryl::cuda
