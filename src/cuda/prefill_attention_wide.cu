// Attention of prompts for heads of 512.
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

namespace {

using Shape = WideAttentionShape;

__global__ void __launch_bounds__(Shape::kThreads, 1) BERYL_CLUSTER(Shape::kCluster)
    wide_attention_kernel(const __grid_constant__ PrefillAttentionArgs args) {
#if BERYL_WGMMA
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  WideAttention(args, attention_shared).run();
#endif
}

}  // namespace

PrefillAttentionKernel wide_attention() {
  return {wide_attention_kernel,
          kAttendedRows,
          Shape::kCluster,
          Shape::kThreads,
          Shape::kSharedBytes,
          {kAttendedKeys, Shape::kOwnSlabs},
          {Shape::kValueKeys, Shape::kOwnSlabs}};
}

}  // namespace beryl::cuda
