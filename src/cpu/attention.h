// Attention over the paged cache, for the rows of one step.
//
// The keys of a token are cut at absolute positions that are multiples of split_keys(its position). Each split gives an
// unnormalised sum: o = Σ e^(s_m - m_max) · v_m, l = Σ e^(s_m - m_max), over the token's live keys in ascending order;
// splits are merged from left to right. That order is fixed by the token's position alone, so the result depends
// neither on the other tokens, nor on the chunk that the token came in, nor on threads. Only live keys are read: no row
// of the cache that no token of the step may see, and a token's sums hold nothing but its own live keys.
#pragma once

#include <cstdint>

namespace beryl {

// Short enough for the threads to share one token's keys, long enough that there are at most some hundred splits.
inline constexpr int kMinSplitKeys = 128, kMaxSplitKeys = 1024;
inline int split_keys(int64_t position, int window) {
  const int64_t live = window == 0 || position < window ? position : window;
  return live < 8192 ? kMinSplitKeys : live < 32768 ? 512 : kMaxSplitKeys;
}
// At most so many splits hold live keys of the tokens of a task of n_tokens, in a cache of `context` positions.
inline int64_t max_splits(int64_t context, int window, int n_tokens) {
  const int64_t live = (window == 0 || context < window ? context : window) + n_tokens;
  const int64_t longest = live <= 32768 ? 64 : live / kMaxSplitKeys;
  return longest + 2;
}

// Consecutive tokens of one sequence with equal split_keys, for one KV head and the query heads that read it.
struct AttentionTask {
  const float* q = nullptr;         // of the first token and the first of the query heads: [n_tokens][group][head_dim]
  int64_t q_stride = 0;             // floats from token to token
  float* out = nullptr;             // like q
  int64_t out_stride = 0;
  int n_tokens = 0;
  int group = 0;                    // query heads on this KV head
  int head_dim = 0;
  const void* keys = nullptr;       // of this KV head in page 0: [64][head_dim], f32 or f16; in other pages page_stride_bytes on
  const void* values = nullptr;
  bool cache_is_f16 = false;
  int64_t page_stride_bytes = 0;
  const int32_t* table = nullptr;   // of the sequence: [n_entries]
  int n_entries = 0;
  int64_t position = 0;             // of the first token; the others follow
  int window = 0;                   // 0: none
  int split_keys = 0;               // of its tokens
  float scale = 1;
  float softcap = 0;
};

// Most rows (tokens x heads of a group) of a task, unless one token alone has more.
inline constexpr int kAttentionRows = 24;

// Live keys of the token at `position`: [first_live_key, position].
inline int64_t first_live_key(int64_t position, int window) {
  return window == 0 || position < window ? 0 : position - window + 1;
}

// Floats of scratch for a task of n_rows = n_tokens · group rows; 64-byte aligned.
int64_t attention_scratch_floats(int64_t n_rows, int head_dim);

// The whole task.
void run_attention(const AttentionTask& task, float* scratch);

// For few tokens and long contexts: one split at a time, by different threads, and then the merge.
// partial: [n_rows][partial_floats(head_dim)] of this split.
inline int64_t partial_floats(int head_dim) { return (head_dim + 15) / 16 * 16 + 16; }  // o, m_max, l
void run_attention_split(const AttentionTask& task, int64_t split, float* partial, float* scratch);
// partials: [splits][n_rows][partial_floats(head_dim)], of the splits from first_split(task) to last_split(task).
void merge_attention_splits(const AttentionTask& task, float* partials);
inline int64_t first_split(const AttentionTask& task) {
  return first_live_key(task.position, task.window) / task.split_keys;
}
inline int64_t last_split(const AttentionTask& task) { return (task.position + task.n_tokens - 1) / task.split_keys; }

}  // namespace beryl
