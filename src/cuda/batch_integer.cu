// Batched linear layers for integer weights in groups of 32.
#include "cuda/batch_kernel.cuh"

namespace beryl::cuda {

BatchKernels batch_integer_kernels(Format format) {
  switch (format) {
    case Format::kQ4_0: return batch_kernels<GroupOf32<4, false>, Format::kQ4_0, false>();
    case Format::kQ4_1: return batch_kernels<GroupOf32<4, true>, Format::kQ4_1, false>();
    case Format::kQ5_0: return batch_kernels<GroupOf32<5, false>, Format::kQ5_0, false>();
    case Format::kQ5_1: return batch_kernels<GroupOf32<5, true>, Format::kQ5_1, false>();
    case Format::kQ8_0: return batch_kernels<GroupOf32<8, false>, Format::kQ8_0, false>();
    default: return {};
  }
}

}  // namespace beryl::cuda
