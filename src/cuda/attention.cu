// Attention: the choice of the kernel, the merge of the splits, and the plain kernel for head widths and caches that the
// tensor-core kernel does not take (small test models, F32 caches).
#include "cuda/attention_mma.cuh"

namespace beryl::cuda {

namespace {

// ---- the plain kernel: a block a token, head and split ----

constexpr int kThreads = 128;
constexpr int kMaxHeadDim = 512;
constexpr int kHeld = kMaxHeadDim / kThreads;

template <CacheElement kElement>
__device__ __forceinline__ float cache_value(const void* pool, int64_t index) {
  if constexpr (kElement == CacheElement::kF32) return static_cast<const float*>(pool)[index];
  if constexpr (kElement == CacheElement::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(pool)[index]);
  if constexpr (kElement == CacheElement::kFp8) return decode_e4m3(static_cast<const uint8_t*>(pool)[index]);
}

template <CacheElement kElement, bool kWhole>
__global__ void __launch_bounds__(kThreads) attention_plain_kernel(AttentionArgs args) {
  __shared__ float q[kMaxHeadDim];
  __shared__ float scores[kPageTokens];
  __shared__ float weights[kPageTokens];
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const int token = args.first_token + static_cast<int>(blockIdx.z);
  const int dim = args.cache.head_dim, n_kv = args.cache.n_kv_heads, kv_head = head / (args.n_heads / n_kv);
  const int sequence = args.token.sequences[token];
  Band band = live_band(args.token.positions[token], args.window);
  const Splits splits = splits_of(band);
  if constexpr (!kWhole) {
    if (static_cast<int>(blockIdx.x) >= splits.count) return;
    const int begin = (splits.first + static_cast<int>(blockIdx.x)) * splits.positions;
    band = {max(band.begin, begin), min(band.end, begin + splits.positions)};
  }
  for (int d = threadIdx.x; d < dim; d += kThreads) q[d] = args.q.values[token * args.q.stride + int64_t{head} * dim + d];

  RunningSoftmax running;
  float total_largest = -INFINITY, total_sum = 0;
  float sums[kHeld] = {}, totals[kHeld] = {};
  const int32_t* table = args.token.table + int64_t{sequence} * args.token.n_entries;
  for (int unit = band.begin / kPageTokens; unit * kPageTokens < band.end; ++unit) {
    const int64_t page = table[table_entry(unit * kPageTokens, args.token.n_entries)];
    const int64_t rows_at = cache_offset(page, 0, kv_head, n_kv, dim), scales_at = cache_scale_offset(page, 0, kv_head, n_kv);
    const int first = max(band.begin - unit * kPageTokens, 0), last = min(band.end - unit * kPageTokens, kPageTokens);
    __syncthreads();
    for (int key = warp; key < kPageTokens; key += kThreads / 32) {
      float score = -INFINITY;
      if (key >= first && key < last) {
        float product = 0;
        for (int d = lane; d < dim; d += 32)
          product = __fmaf_rn(q[d], cache_value<kElement>(args.cache.keys, rows_at + int64_t{key} * dim + d), product);
        product = lane_sum(product);
        if constexpr (kElement == CacheElement::kFp8) product *= args.cache.key_scales[scales_at + key];
        score = attention_score(product, args.scale, args.softcap);
      }
      if (lane == 0) scores[key] = score;
    }
    __syncthreads();
    // Every warp computes the same softmax, so that all threads hold its state.
    const float factor = running.raise(lane_max(fmaxf(scores[lane], scores[lane + 32])));
    const bool live_low = lane >= first && lane < last, live_high = lane + 32 >= first && lane + 32 < last;
    float low = live_low ? running.weight(scores[lane]) : 0.0f, high = live_high ? running.weight(scores[lane + 32]) : 0.0f;
    running.sum = __fmaf_rn(running.sum, factor, lane_sum(low + high));
    if constexpr (kElement == CacheElement::kFp8) {
      if (live_low) low *= args.cache.value_scales[scales_at + lane];
      if (live_high) high *= args.cache.value_scales[scales_at + lane + 32];
    }
    if (warp == 0) {
      weights[lane] = low;
      weights[lane + 32] = high;
    }
    __syncthreads();
    const int next = (unit + 1) * kPageTokens;
    const bool merges = kWhole && running.largest > -INFINITY && (next % splits.positions == 0 || next >= band.end);
    MergeFactors merge = {1.0f, 0.0f};
    if (merges) {
      const float raised = fmaxf(total_largest, running.largest);
      merge = merge_factors(total_largest, running.largest, raised);
      total_sum = merge_value(total_sum, running.sum, merge);
      total_largest = raised;
      running = RunningSoftmax{};
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int d = threadIdx.x + i * kThreads;
      if (d >= dim) break;
      sums[i] *= factor;
      for (int key = first; key < last; ++key)
        sums[i] = __fmaf_rn(weights[key], cache_value<kElement>(args.cache.values, rows_at + int64_t{key} * dim + d), sums[i]);
      if (merges) {
        totals[i] = merge_value(totals[i], sums[i], merge);
        sums[i] = 0;
      }
    }
  }
  const int64_t part = (int64_t{token - args.first_token} * args.n_heads + head) * args.max_splits + blockIdx.x;
  if (!kWhole && threadIdx.x == 0) args.partial_state[part] = make_float2(running.largest, running.sum);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int d = threadIdx.x + i * kThreads;
    if (d >= dim) break;
    if constexpr (kWhole)
      args.out.values[token * args.out.stride + int64_t{head} * dim + d] = totals[i] / total_sum;
    else
      args.partial_sums[part * dim + d] = sums[i];
  }
}

template <CacheElement kElement>
void launch_plain_element(const LaunchContext& context, const AttentionArgs& args, int n_splits) {
  const dim3 grid(static_cast<unsigned>(n_splits > 0 ? n_splits : 1), static_cast<unsigned>(args.n_heads),
                  static_cast<unsigned>(args.n_tokens));
  launch(context, {.grid = grid, .block = kThreads, .name = "Attention"},
         n_splits > 0 ? attention_plain_kernel<kElement, false> : attention_plain_kernel<kElement, true>, args);
}

void launch_keys(const LaunchContext& context, const AttentionArgs& args, int n_splits) {
  if (args.cache.element != CacheElement::kF32) {
    switch (args.cache.head_dim) {
      case 64: return launch_attention_dim<64>(context, args, n_splits);
      case 128: return launch_attention_dim<128>(context, args, n_splits);
      case 256: return launch_attention_dim<256>(context, args, n_splits);
      case 512: return launch_attention_dim<512>(context, args, n_splits);
      default: break;
    }
  }
  switch (args.cache.element) {
    case CacheElement::kF32: return launch_plain_element<CacheElement::kF32>(context, args, n_splits);
    case CacheElement::kBf16: return launch_plain_element<CacheElement::kBf16>(context, args, n_splits);
    case CacheElement::kFp8: return launch_plain_element<CacheElement::kFp8>(context, args, n_splits);
  }
}

// ---- the merge: a thread a column, splits in ascending order ----

constexpr int kMergeThreads = 64;

__global__ void __launch_bounds__(kMergeThreads) attention_merge_kernel(AttentionArgs args) {
  __shared__ float2 states[kMaxSplits + 1];
  __shared__ MergeFactors factors[kMaxSplits + 1];
  grid_wait();
  const int head = blockIdx.y, token = args.first_token + static_cast<int>(blockIdx.z), dim = args.cache.head_dim;
  const int n_splits = splits_of(live_band(args.token.positions[token], args.window)).count;
  const int64_t part = (int64_t{token - args.first_token} * args.n_heads + head) * args.max_splits;
  for (int split = threadIdx.x; split < n_splits; split += kMergeThreads) states[split] = args.partial_state[part + split];
  __syncthreads();
  for (int split = threadIdx.x; split < n_splits; split += kMergeThreads) {
    float before = -INFINITY;
    for (int i = 0; i < split; ++i) before = fmaxf(before, states[i].x);
    factors[split] = merge_factors(before, states[split].x, fmaxf(before, states[split].x));
  }
  __syncthreads();
  const int d = static_cast<int>(blockIdx.x) * kMergeThreads + static_cast<int>(threadIdx.x);
  if (d >= dim) return;
  const float* partial = args.partial_sums + part * dim + d;
  float sum = 0, weight = 0;
#pragma unroll 8
  for (int split = 0; split < n_splits; ++split) {
    sum = merge_value(sum, partial[int64_t{split} * dim], factors[split]);
    weight = merge_value(weight, states[split].y, factors[split]);
  }
  args.out.values[token * args.out.stride + int64_t{head} * dim + d] = sum / weight;
}

}  // namespace

void launch_attention_split(const LaunchContext& context, AttentionArgs args, int n_splits) {
  launch_keys(context, args, n_splits);
  const auto columns = static_cast<unsigned>((args.cache.head_dim + kMergeThreads - 1) / kMergeThreads);
  launch(context,
         {.grid = {columns, static_cast<unsigned>(args.n_heads), static_cast<unsigned>(args.n_tokens)},
          .block = kMergeThreads,
          .name = "Attention, merging"},
         attention_merge_kernel, args);
}

void launch_attention_whole(const LaunchContext& context, const AttentionArgs& args) { launch_keys(context, args, 0); }

}  // namespace beryl::cuda
