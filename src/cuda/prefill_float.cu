// Products of many rows for small floats.
#include "cuda/prefill_kernel.cuh"

namespace beryl::cuda {

PrefillKernels prefill_float_kernels(Format format) {
  switch (format) {
    case Format::kFp8: return prefill_kernels<Fp8, Format::kFp8>();
    case Format::kF16: return prefill_kernels<Float16<false>, Format::kF16>();
    case Format::kBf16: return prefill_kernels<Float16<true>, Format::kBf16>();
    default: return {};
  }
}

}  // namespace beryl::cuda
