// The decode matvec for the K formats.
#include "cuda/matvec_kernel.cuh"

namespace beryl::cuda {

MatvecKernel matvec_k_kernel(Format format, int n_tiles) {
  switch (format) {
    case Format::kQ4_K: return kernel_for<GroupOf32K<4>, Format::kQ4_K>(n_tiles);
    case Format::kQ5_K: return kernel_for<GroupOf32K<5>, Format::kQ5_K>(n_tiles);
    case Format::kQ6_K: return kernel_for<Q6K, Format::kQ6_K>(n_tiles);
    default: return nullptr;
  }
}

}  // namespace beryl::cuda
