// Batched linear layers for small floats.
#include "cuda/batch_kernel.cuh"

namespace beryl::cuda {

BatchKernels batch_float_kernels(Format format) {
  switch (format) {
    case Format::kFp8: return batch_kernels<Fp8, Format::kFp8, true>();
    case Format::kF16: return batch_kernels<Float16<false>, Format::kF16, false>();
    case Format::kBf16: return batch_kernels<Float16<true>, Format::kBf16, false>();
    default: return {};
  }
}

}  // namespace beryl::cuda
