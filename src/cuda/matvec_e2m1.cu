// The decode matvec for weights with E2M1 codes.
#include "cuda/matvec_kernel.cuh"

namespace beryl::cuda {

MatvecKernel matvec_e2m1_kernel(Format format, int n_tiles) {
  switch (format) {
    case Format::kFp4G128: return kernel_for<Fp4G128, Format::kFp4G128>(n_tiles);
    case Format::kMxfp4: return kernel_for<Mxfp4, Format::kMxfp4>(n_tiles);
    case Format::kNvfp4: return kernel_for<Nvfp4, Format::kNvfp4>(n_tiles);
    default: return nullptr;
  }
}

}  // namespace beryl::cuda
