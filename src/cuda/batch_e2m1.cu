// Batched linear layers for weights with E2M1 codes.
#include "cuda/batch_kernel.cuh"

namespace beryl::cuda {

BatchKernels batch_e2m1_kernels(Format format) {
  switch (format) {
    case Format::kFp4G128: return batch_kernels<Fp4G128, Format::kFp4G128, true>();
    case Format::kMxfp4: return batch_kernels<Mxfp4, Format::kMxfp4, false>();
    case Format::kNvfp4: return batch_kernels<Nvfp4, Format::kNvfp4, false>();
    default: return {};
  }
}

}  // namespace beryl::cuda
