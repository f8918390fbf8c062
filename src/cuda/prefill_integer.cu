// Products of many rows for integer weights in groups of 32.
#include "cuda/prefill_kernel.cuh"

namespace beryl::cuda {

PrefillKernels prefill_integer_kernels(Format format) {
  switch (format) {
    case Format::kQ4_0: return prefill_kernels<GroupOf32<4, false>, Format::kQ4_0>();
    case Format::kQ4_1: return prefill_kernels<GroupOf32<4, true>, Format::kQ4_1>();
    case Format::kQ5_0: return prefill_kernels<GroupOf32<5, false>, Format::kQ5_0>();
    case Format::kQ5_1: return prefill_kernels<GroupOf32<5, true>, Format::kQ5_1>();
    case Format::kQ8_0: return prefill_kernels<GroupOf32<8, false>, Format::kQ8_0>();
    default: return {};
  }
}

}  // namespace beryl::cuda
