// The decode matvec for small floats.
#include "cuda/matvec_kernel.cuh"

namespace beryl::cuda {

MatvecKernel matvec_float_kernel(Format format, int n_tiles) {
  switch (format) {
    case Format::kFp8: return kernel_for<Fp8, Format::kFp8>(n_tiles);
    case Format::kF16: return kernel_for<Float16<false>, Format::kF16>(n_tiles);
    case Format::kBf16: return kernel_for<Float16<true>, Format::kBf16>(n_tiles);
    default: return nullptr;
  }
}

}  // namespace beryl::cuda
