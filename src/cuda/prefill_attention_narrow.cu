// Attention of prompts for heads of 64, 128 and 256.
#include "base/error.h"
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

namespace {

template <int kDim, int kGroups>
PrefillAttentionKernel kernel_of() {
  using Shape = NarrowAttentionShape<kDim, kGroups>;
  return {
      narrow_attention_kernel<kDim, kGroups>, kGroups * kAttendedRows,       1, Shape::kThreads, Shape::kSharedBytes,
      {kAttendedKeys, Shape::kSlabs},         {kAttendedKeys, Shape::kSlabs}};
}

}  // namespace

PrefillAttentionKernel narrow_attention(int head_dim, int n_groups) {
  switch (head_dim) {
    case 64: return n_groups == 1 ? kernel_of<64, 1>() : kernel_of<64, 2>();
    case 128: return n_groups == 1 ? kernel_of<128, 1>() : kernel_of<128, 2>();
    case 256: return n_groups == 1 ? kernel_of<256, 1>() : kernel_of<256, 2>();
    default: break;
  }
  BERYL_CHECK(false, "heads of 64, 128 or 256");
  return {};
}

}  // namespace beryl::cuda
