// Attention of prompts for heads of 64, 128 and 256.
#include "base/error.h"
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

namespace {

template <int kDim>
PrefillAttentionKernel kernel_of() {
  using Shape = NarrowAttentionShape<kDim>;
  return {narrow_attention_kernel<kDim>,  Shape::kGroups * kAttendedRows, 1, Shape::kThreads, Shape::kSharedBytes,
          {kAttendedKeys, Shape::kSlabs}, {kAttendedKeys, Shape::kSlabs}};
}

}  // namespace

PrefillAttentionKernel narrow_attention(int head_dim) {
  switch (head_dim) {
    case 64: return kernel_of<64>();
    case 128: return kernel_of<128>();
    case 256: return kernel_of<256>();
    default: break;
  }
  BERYL_CHECK(false, "heads of 64, 128 or 256");
  return {};
}

}  // namespace beryl::cuda
