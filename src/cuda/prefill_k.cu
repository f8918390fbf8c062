// Products of many rows for the K formats.
#include "cuda/prefill_kernel.cuh"

namespace beryl::cuda {

PrefillKernels prefill_k_kernels(Format format) {
  switch (format) {
    case Format::kQ4_K: return prefill_kernels<GroupOf32K<4>, Format::kQ4_K>();
    case Format::kQ5_K: return prefill_kernels<GroupOf32K<5>, Format::kQ5_K>();
    case Format::kQ6_K: return prefill_kernels<Q6K, Format::kQ6_K>();
    default: return {};
  }
}

}  // namespace beryl::cuda
