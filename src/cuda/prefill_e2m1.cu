// Products of many rows for E2M1 weights.
#include "cuda/prefill_kernel.cuh"

namespace beryl::cuda {

PrefillKernels prefill_e2m1_kernels(Format format) {
  switch (format) {
    case Format::kFp4G128: return prefill_kernels<Fp4G128, Format::kFp4G128>();
    case Format::kMxfp4: return prefill_kernels<Mxfp4, Format::kMxfp4>();
    case Format::kNvfp4: return prefill_kernels<Nvfp4, Format::kNvfp4>();
    default: return {};
  }
}

}  // namespace beryl::cuda
