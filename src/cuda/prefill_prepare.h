// What stands before the product of prefill_kernel.cuh: x in 16 bits, and the powers of two of rows of W.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

struct PrefillPrepareArgs {
  RowsView x;                // [n_rows][cols], rows 16-byte aligned
  const float* norm_weight;  // [cols], null: 1
  float norm_eps;
  bool has_norm;
  int n_rows;
  int padded_rows;     // a multiple of 128; rows beyond n_rows become zeros
  int cols;            // a multiple of 4
  int n_slabs;         // of 64 columns; columns beyond cols become zeros
  unsigned char* out;  // as prefill_kernel.cuh says
  float* x_scales;     // [padded_rows]

  const uint8_t* weights;
  const float* weight_scales;  // [n_row_tiles · 16], null: 1
  int64_t unit_bytes, stage_bytes;
  int stage_code_bytes;
  int k_warps, row_warps, n_stages, n_column_tiles, n_row_tiles;
  float* row_powers;   // [n_row_tiles · 16]
  float* row_factors;  // [n_row_tiles · 16]
};
void launch_prefill_prepare(Format format, const PrefillPrepareArgs& args, const LaunchContext& context);

}  // namespace beryl::cuda
