// Attention of many rows on Hopper's tensor cores (sm_90a), for BF16 caches and heads of 64, 128, 256 and 512: for
// prompts. attention.cu has what serves everything else.
//
// Keys, values, q and the softmax's weights are bf16 operands, sums and the softmax f32 (docs/numerics.md). A row's
// bits depend on its own sequence alone: not on the number of rows, on their order, or on the pages.
#pragma once

#include "cuda/kernels.h"

namespace beryl::cuda {

// Whether it takes this op on this device: has_prefill_linear() and the shapes above.
bool takes_prefill_attention(const AttentionArgs& args);

// args.cache_rows: rows of the pool. The result for args.n_tokens tokens from the first.
void launch_prefill_attention(const LaunchContext& context, const AttentionArgs& args);

}  // namespace beryl::cuda
