// The decode matvec for integer weights in groups of 32.
#include "cuda/matvec_kernel.cuh"

namespace beryl::cuda {

MatvecKernel matvec_integer_kernel(Format format, int n_tiles) {
  switch (format) {
    case Format::kQ4_0: return kernel_for<GroupOf32<4, false>, Format::kQ4_0>(n_tiles);
    case Format::kQ4_1: return kernel_for<GroupOf32<4, true>, Format::kQ4_1>(n_tiles);
    case Format::kQ5_0: return kernel_for<GroupOf32<5, false>, Format::kQ5_0>(n_tiles);
    case Format::kQ5_1: return kernel_for<GroupOf32<5, true>, Format::kQ5_1>(n_tiles);
    case Format::kQ8_0: return kernel_for<GroupOf32<8, false>, Format::kQ8_0>(n_tiles);
    default: return nullptr;
  }
}

}  // namespace beryl::cuda
