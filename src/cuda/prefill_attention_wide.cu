// Attention of prompts for heads of 512.
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

__global__ void __launch_bounds__(WideAttentionShape::kThreads, 1) BERYL_CLUSTER(WideAttentionShape::kCluster)
    wide_attention_kernel(const __grid_constant__ PrefillAttentionArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  WideAttention(args, attention_shared).run();
#endif
}

PrefillAttentionKernel wide_attention() {
  using Shape = WideAttentionShape;
  return {wide_attention_kernel, kAttendedRows, Shape::kCluster, Shape::kThreads, Shape::kSharedBytes, Shape::kBoxRows};
}

}  // namespace beryl::cuda
