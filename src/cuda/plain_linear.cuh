// What the kernels over plain matrices share: a warp's dot products of one row of W, and the epilogues.
#pragma once

#include "cuda/kernels.h"
#include "cuda/plain_codec.cuh"

namespace beryl::cuda {

__device__ __forceinline__ float plain_epilogue(PlainEpilogue epilogue, float value, float other, float softcap) {
  switch (epilogue) {
    case PlainEpilogue::kStore: return value;
    case PlainEpilogue::kGeluTimesOther: return gelu_tanh(value) * other;
    case PlainEpilogue::kTimesGeluOther: return value * gelu_tanh(other);
    case PlainEpilogue::kTimesSiluOther: return value * silu(other);
    case PlainEpilogue::kSoftcap: return softcap * tanhf(value / softcap);
  }
  return value;
}

// sums[r] = W[row] · x[rows[r]], without the tensor scale; all lanes get the sums. row: expert · rows + row.
template <PlainCodes kKind, int kRows>
__device__ __forceinline__ void dot_rows(const PlainMatrix& weight, int64_t row, const RowsView& x,
                                         const int64_t (&rows)[kRows], float (&sums)[kRows]) {
  const int lane = threadIdx.x % 32;
  const PlainRow from = plain_row(weight, row);
  const bool vector = x.stride % 4 == 0 && reinterpret_cast<uintptr_t>(x.values) % 16 == 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = 0;
  for (int64_t column = lane * 8; column < weight.cols; column += 256) {
    float w[8];
    load_weights8<kKind>(weight, from, column, w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float* values = x.values + rows[r] * x.stride + column;
      float v[8];
      if (vector && column + 8 <= weight.cols) {
        const float4 a = *reinterpret_cast<const float4*>(values), b = *reinterpret_cast<const float4*>(values + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = column + i < weight.cols ? values[i] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] = __fmaf_rn(w[i], v[i], sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) sums[r] = lane_sum(sums[r]);
}

}  // namespace beryl::cuda
