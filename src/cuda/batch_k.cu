// Batched linear layers for the K formats.
#include "cuda/batch_kernel.cuh"

namespace beryl::cuda {

BatchKernels batch_k_kernels(Format format) {
  switch (format) {
    case Format::kQ4_K: return batch_kernels<GroupOf32K<4>, Format::kQ4_K, false>();
    case Format::kQ5_K: return batch_kernels<GroupOf32K<5>, Format::kQ5_K, false>();
    case Format::kQ6_K: return batch_kernels<Q6K, Format::kQ6_K, false>();
    default: return {};
  }
}

}  // namespace beryl::cuda
