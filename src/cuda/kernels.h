// The launches of this backend, a function an op, with its arguments as the kernel gets them. Rows are f32 on the device
// and start `stride` values apart. All work is queued on the context's stream; nothing waits, nothing is allocated.
#pragma once

#include <cstdint>

#include "base/rng.h"
#include "cuda/launch.h"
#include "cuda/plain_matrix.h"
#include "ops/op.h"

namespace beryl::cuda {

struct RowsView {
  float* values = nullptr;          // row 0, first column of the slice
  int64_t stride = 0;               // values from row to row
};

// ---- embed.cu ----
struct EmbedArgs {
  PlainMatrix table;
  const int32_t* ids;               // [n_tokens]
  RowsView out;
  float scale;
  int64_t cols;
};
void launch_embed(const LaunchContext& context, const EmbedArgs& args, int64_t n_tokens);

// ---- norm.cu ----
// out = norm(x), or x where there is no norm: f32, or split into two bf16 planes padded to `padded_cols` with zeros.
struct NormRowsArgs {
  RowsView x;
  const float* weight;              // [cols], null: 1
  bool normalise;
  float eps;
  int64_t cols;
  float* out;                       // [n_rows][cols], or null
  uint16_t* high;                   // [n_rows][padded_cols] bf16, or null
  uint16_t* low;
  int64_t padded_cols;
};
void launch_norm_rows(const LaunchContext& context, const NormRowsArgs& args, int64_t n_rows);

struct AddNormArgs {
  RowsView out;
  RowsView base;                    // values null: 0
  RowsView y;
  const float* weight;              // [group], null: 1
  bool normalise;
  float eps;
  int64_t cols;
  int64_t group;                    // columns of one norm
  float scale;
};
void launch_add_norm(const LaunchContext& context, const AddNormArgs& args, int64_t n_rows);

// ---- linear_plain.cu ----
enum class PlainEpilogue : uint8_t {
  kStore,
  kGeluTimesOther,                  // gelu_tanh(W x) · other
  kTimesGeluOther,                  // (W x) · gelu_tanh(other): up, after gate was stored
  kTimesSiluOther,                  // (W x) · silu(other)
  kSoftcap,
};

// y[t][r] = epilogue(W[r] · x[t]), any number of rows.
struct PlainLinearArgs {
  PlainMatrix weight;
  RowsView x;
  RowsView y;
  RowsView other;                   // of the epilogues that take another
  PlainEpilogue epilogue;
  float softcap;
  int64_t n_rows;
};
void launch_plain_linear(const LaunchContext& context, const PlainLinearArgs& args);

// ---- gemm.cu ----
// Weights of `n_rows` rows from row_begin as two bf16 planes [n_rows][padded_cols], high + low.
struct PlainPanelArgs {
  PlainMatrix weight;
  int64_t row_begin;
  int64_t n_rows;
  uint16_t* high;
  uint16_t* low;
  int64_t panel_cols;               // a multiple of kGemmColumns; columns past the matrix become 0
};
void launch_plain_panel(const LaunchContext& context, const PlainPanelArgs& args);

inline constexpr int kGemmColumns = 32;
// y[t][r] = epilogue(sum over k of x[t][k] · w[r][k]), x and w as pairs of bf16 planes.
struct GemmArgs {
  const uint16_t* x_high;           // [n_rows][cols]
  const uint16_t* x_low;
  const uint16_t* w_high;           // [n_outputs][cols]
  const uint16_t* w_low;
  int64_t cols;                     // a multiple of kGemmColumns
  int64_t n_rows;
  int64_t n_outputs;
  RowsView y;
  RowsView other;
  PlainEpilogue epilogue;
  float softcap;
};
void launch_gemm(const LaunchContext& context, const GemmArgs& args);

// ---- experts.cu ----
inline constexpr int kMaxExperts = 1024;

struct RouteSelectArgs {
  RowsView logits;                  // [n_tokens][n_experts]
  const float* expert_scale;        // [n_experts], null: 1
  RowsView routes;                  // [n_tokens][2 · top_k]
  int n_experts;
  int top_k;
};
void launch_route_select(const LaunchContext& context, const RouteSelectArgs& args, int64_t n_tokens);

// Pairs (token, k) sorted by expert: pair numbers are token · top_k + k, ascending within an expert.
struct RouteGroupArgs {
  RowsView routes;
  int64_t n_pairs;
  int n_experts;
  int top_k;
  int32_t* begin;                   // [n_experts + 1]: an expert's pairs are pairs[begin[e]] to pairs[begin[e + 1] - 1]
  int32_t* pairs;                   // [n_pairs]
  int32_t* active;                  // [n_experts]: experts that have pairs, ascending, then -1
};
void launch_route_group(const LaunchContext& context, const RouteGroupArgs& args);

// y[pair][r] = epilogue(W_e[r] · x[row]) for the pairs of each expert e; row = pair / x_divisor.
struct ExpertLinearArgs {
  PlainMatrix weight;               // stack = n_experts
  const int32_t* begin;
  const int32_t* pairs;
  const int32_t* active;
  int max_active;                   // min(n_experts, n_pairs)
  RowsView x;
  int x_divisor;                    // top_k when x has a row a token, 1 when it has a row a pair
  RowsView y;
  RowsView other;
  PlainEpilogue epilogue;
};
void launch_expert_linear(const LaunchContext& context, const ExpertLinearArgs& args);

// y[t] = sum over k of g · values[t · top_k + k]
struct ExpertCombineArgs {
  const float* values;              // [n_tokens · top_k][cols]
  RowsView routes;
  RowsView y;
  int64_t cols;
  int top_k;
};
void launch_expert_combine(const LaunchContext& context, const ExpertCombineArgs& args, int64_t n_tokens);

// ---- attention ----
enum class CacheElement : uint8_t { kF32, kBf16, kFp8 };

struct CacheView {
  void* keys;                       // [n_pages][n_kv_heads][kPageTokens][key_cols]
  void* values;                     // [n_pages][n_kv_heads][kPageTokens][head_dim]
  float* key_scales;                // kFp8: [n_pages][n_kv_heads][kPageTokens]
  float* value_scales;
  // Not null: keys are these times values but for the columns that key rows have (index_math.h: keys from values). [head_dim]
  const float* key_weight;
  CacheElement element;
  int n_kv_heads;
  int head_dim;
  int key_cols;                     // head_dim, or kTurnedColumns
};

struct TokenView {
  const int32_t* positions;         // [n_tokens]
  const int32_t* sequences;         // [n_tokens]
  const int32_t* table;             // [max_sequences][n_entries]
  int n_entries;
};

// ---- qkv_finish.cu ----
struct QkvFinishArgs {
  RowsView qkv;
  TokenView token;
  CacheView cache;                  // n_kv_heads 0: nothing is appended
  const float* rope;                // [n_tokens][2][head_dim / 2]: cosines, then sines; null: not turned
  const float* q_weight;            // [head_dim], null: 1
  const float* k_weight;
  const float* v_weight;
  bool q_norm, k_norm, v_norm;
  float q_eps, k_eps, v_eps;
  int n_heads;
  int head_dim;
  bool v_from_k;
};
void launch_qkv_finish(const LaunchContext& context, const QkvFinishArgs& args, int64_t n_tokens);

// ---- attention.cu, attention_mma.cuh; prefill_attention.h has another for many rows ----
struct AttentionArgs {
  RowsView q;
  RowsView out;
  TokenView token;                  // of all tokens
  CacheView cache;
  int n_heads;
  int window;
  float scale;
  float softcap;
  int first_token;                  // the launch handles n_tokens from here
  int n_tokens;
  // Split mode: unnormalised sums, largest score and sum of weights of each split of each token and head.
  float* partial_sums;              // [n_tokens][n_heads][max_splits][head_dim]
  float2* partial_state;            // [n_tokens][n_heads][max_splits]
  int max_splits;
  int64_t cache_rows;               // of the pool: pages · KV heads · kPageTokens
};
// Splits the keys over blocks and merges: for up to as many tokens as the partials hold. n_splits: how many splits the
// grid holds, at least those of every token (index_math.h: most_splits).
void launch_attention_split(const LaunchContext& context, AttentionArgs args, int n_splits);
// A block walks all keys of its tokens; the same bits as the split form.
void launch_attention_whole(const LaunchContext& context, const AttentionArgs& args);

// ---- step.cu ----
struct GatherRowsArgs {
  RowsView x;
  RowsView out;
  const int32_t* output_rows;
  int64_t cols;
};
void launch_gather_rows(const LaunchContext& context, const GatherRowsArgs& args, int64_t n_outputs);

inline constexpr int kMaxRopes = 8;
struct TurnRopesArgs {
  const int32_t* positions;
  int n_ropes;
  const double* frequencies[kMaxRopes];   // [n_pairs]
  float* tables[kMaxRopes];               // [n_tokens][2][n_pairs]
  int n_pairs[kMaxRopes];
};
void launch_turn_ropes(const LaunchContext& context, const TurnRopesArgs& args, int64_t n_tokens);

struct CopyPagesArgs {
  const int32_t* copies;            // [n_copies][3]: group, from, to
  int n_copies;
  int group;
  uint4* pool;
  int64_t page_bytes;               // a multiple of 16
};
void launch_copy_pages(const LaunchContext& context, const CopyPagesArgs& args);

// ---- sample.cu ----
// SampleParams as the device reads them.
struct DeviceSampling {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t n_logprobs;
  uint64_t seed;
  uint64_t draw;
  int32_t bias_begin;               // range of the bias lists
  int32_t bias_end;
  int32_t mask;                     // which row of the masks; -1: all tokens are allowed
  int32_t uses_history;
};

inline constexpr int kMaxLogprobs = 128;
inline constexpr int kMaxVocab = 524288;

struct DeviceSampled {
  int32_t id;
  int32_t valid;
  float logprob;
  int32_t n_top;
};

struct SampleArgs {
  RowsView logits;                  // [n_outputs][vocab]
  int64_t vocab;
  DeviceSampling* sampling;         // [n_outputs]
  const int32_t* bias_ids;          // ascending within a row
  const float* bias_values;
  const uint32_t* masks;            // [n][mask_words]
  int64_t mask_words;
  uint32_t* history;                // [max_sequences][vocab]
  const int32_t* sequences;         // [n_tokens]
  const int32_t* output_rows;       // [n_outputs]
  // Scratch, a row an output.
  float* values;                    // [vocab]; -infinity: banned
  float* group_max;                 // [kMaxSampleGroups] of values
  float* raw_group_max;             // [kMaxSampleGroups] of the unmodified logits
  float* chunk_max;                 // [n_chunks]
  int32_t* chunk_best;              // [n_chunks]
  int32_t* chunk_invalid;           // [n_chunks]
  double* chunk_weight;             // [n_chunks] sum of exp((v - v_max) / temperature), w >= min_p
  double* chunk_kept_weight;        // [n_chunks] the same without min_p
  double* chunk_raw_sum;            // [n_chunks] sum of exp(logit - chunk_raw_max)
  float* chunk_raw_max;             // [n_chunks]
  uint32_t* finished;               // [n_outputs] blocks of this launch that are done with the row; 0 between launches
  DeviceSampled* sampled;           // [n_outputs]
  int32_t* top_ids;                 // [n_outputs][kMaxLogprobs]
  float* top_logprobs;
};
// Ids of one chunk of a row of logits.
inline constexpr int kSampleChunk = 2048;
BERYL_HOST_DEVICE inline int64_t sample_chunks(int64_t vocab) { return (vocab + kSampleChunk - 1) / kSampleChunk; }

struct SampleFeatures {
  bool draws = false;               // some row has a temperature
  bool logprobs = false;            // some row wants log-probabilities
  bool operator==(const SampleFeatures&) const = default;
};
void launch_sample(const LaunchContext& context, const SampleArgs& args, int64_t n_outputs, SampleFeatures features);

// The sampled ids become the next step's input: rows are those of the outputs. Turns the ropes of the new positions.
struct AdvanceArgs {
  int32_t* ids;
  int32_t* positions;
  DeviceSampling* sampling;
  const DeviceSampled* sampled;
  TurnRopesArgs ropes;
  int n_outputs;
};
// Sample and Advance in one launch, for rows that neither draw nor want log-probabilities: between two steps launches wait for each other.
void launch_sample_and_advance(const LaunchContext& context, const SampleArgs& args, const AdvanceArgs& advance);
void launch_advance(const LaunchContext& context, const AdvanceArgs& args);

// Whether the code that this device runs was compiled with programmatic dependent launch: a newer device may run code made
// for an older one, whose kernels do not wait.
bool has_programmatic_code();
// Whether the driver takes a cooperative kernel as a dependent one; tries it.
bool has_programmatic_grids();

}  // namespace beryl::cuda
