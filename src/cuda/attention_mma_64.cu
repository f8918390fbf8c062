// Attention on tensor cores for head width 64.
#include "cuda/attention_mma.cuh"

namespace beryl::cuda {

template void launch_attention_dim<64>(const LaunchContext&, const AttentionArgs&, int);

}  // namespace beryl::cuda
