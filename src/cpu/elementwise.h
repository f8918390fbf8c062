// The ops whose work is one pass over a row: AddNorm, QkvFinish, and the weighted sum at the end of Experts.
#pragma once

#include <cstdint>

#include "cpu/row_norm.h"

namespace beryl {

// out = (base + norm(y)) · scale, the norm over each group of columns. base may be null (0) and may be out.
void add_norm_row(const float* base, const float* y, int64_t cols, int64_t group, const RowNorm& norm, float scale,
                  float* out);

// One head of a query, key or value: out = rope(norm(x)), [head_dim]; out may be x. rope: [head_dim / 2] cosines, then
// as many sines; null: not turned. Pair j is (j, j + head_dim / 2).
void finish_head(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, float* out);
// The same, rounded to f16.
void finish_head(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, uint16_t* out);

// out = Σ over i < n_terms, in that order, of weights[i] · row indices[i] of terms; its rows are term_stride apart.
void weighted_sum_row(const float* terms, int64_t term_stride, const int32_t* indices, const float* weights,
                      int n_terms, int64_t cols, float* out);

}  // namespace beryl
