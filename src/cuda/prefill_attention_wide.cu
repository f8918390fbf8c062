// Attention of prompts for heads of 512.
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

namespace {

template <int kVariant>
__global__ void __launch_bounds__(WideAttentionShapeOf<kVariant>::kThreads, 1) BERYL_CLUSTER(WideAttentionShapeOf<kVariant>::kCluster)
    wide_attention_kernel(const __grid_constant__ PrefillAttentionArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  WideAttention<kVariant>(args, attention_shared).run();
#endif
}

template <int kVariant>
PrefillAttentionKernel kernel_of() {
  using Shape = WideAttentionShapeOf<kVariant>;
  return {wide_attention_kernel<kVariant>, kAttendedRows, Shape::kCluster, Shape::kThreads, Shape::kSharedBytes,
          {kAttendedKeys, Shape::kOwnSlabs}, {Shape::kValueKeys, Shape::kOwnSlabs}};
}

}  // namespace

PrefillAttentionKernel wide_attention(int variant) { return variant == 2 ? kernel_of<2>() : kernel_of<1>(); }

}  // namespace beryl::cuda
