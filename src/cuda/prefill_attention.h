// Attention of many rows on Hopper's tensor cores (sm_90a), for heads of 64, 128, 256 and 512 and caches of BF16 or
// FP8: for prompts. attention.cu has what serves everything else.
//
// Keys, values, q and the softmax's weights are bf16 operands, sums and the softmax f32 (docs/numerics.md). A row's
// bits depend on its own sequence alone: not on the number of rows, on their order, or on the pages. FP8 caches: the
// pages that the rows read are widened first, into scratch of one layer's pool.
#pragma once

#include "cuda/kernels.h"

namespace beryl::cuda {

inline bool has_prefill_heads(int head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512;
}
// Of the scratch of an FP8 cache; cache_rows: of the pool.
inline int64_t widened_bytes(int64_t cache_rows, int head_dim, int key_cols) { return 2 * cache_rows * (head_dim + key_cols); }

// Whether it takes this op, on a device with has_prefill_linear(). scratch: of widened_bytes(), for FP8 caches.
bool takes_prefill_attention(const AttentionArgs& args, const void* scratch = nullptr);

// The result for args.n_tokens tokens from the first.
void launch_prefill_attention(const LaunchContext& context, const AttentionArgs& args, void* scratch = nullptr);

}  // namespace beryl::cuda
