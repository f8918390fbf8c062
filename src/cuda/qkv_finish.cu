// Per head: q = rope(norm(q)) in place; k = rope(norm(k)) and v = norm(v) into the cache at the token's position.
//
// A warp owns one head of one token and holds it in registers, so each value is read once and written once. The FP8 cache
// keeps one f32 scale a row and head, absmax / 448.
#include "cuda/device.cuh"
#include "cuda/index_math.h"
#include "cuda/kernels.h"

namespace beryl::cuda {

namespace {

constexpr int kWarps = 4;
constexpr int kMaxPairs = 8;        // of a lane: head_dim up to 512

// Lane l holds pairs l, l + 32, ... : value j in first[i], value j + half in second[i], j = l + 32 i.
struct Head {
  float first[kMaxPairs];
  float second[kMaxPairs];
};

template <class Function>
__device__ __forceinline__ void for_pairs(int half, Function&& function) {
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int pair = threadIdx.x % 32 + 32 * i;
    if (pair < half) function(i, pair);
  }
}

__device__ __forceinline__ void norm_head(Head& head, int half, const float* weight, float eps) {
  float sum = 0;
  for_pairs(half, [&](int i, int) {
    sum = __fmaf_rn(head.first[i], head.first[i], sum);
    sum = __fmaf_rn(head.second[i], head.second[i], sum);
  });
  sum = lane_sum(sum);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(2 * half) + eps);
  for_pairs(half, [&](int i, int pair) {
    head.first[i] = head.first[i] * factor * (weight == nullptr ? 1.0f : __ldg(weight + pair));
    head.second[i] = head.second[i] * factor * (weight == nullptr ? 1.0f : __ldg(weight + half + pair));
  });
}

__device__ __forceinline__ void turn_head(Head& head, int half, const float* table) {
  for_pairs(half, [&](int i, int pair) {
    const float cosine = table[pair], sine = table[half + pair], a = head.first[i], b = head.second[i];
    head.first[i] = a * cosine - b * sine;
    head.second[i] = b * cosine + a * sine;
  });
}

__device__ __forceinline__ void append(const Head& head, int half, void* pool, float* scales, CacheElement element,
                                       int64_t offset, int64_t scale_offset) {
  if (element == CacheElement::kF32) {
    float* to = static_cast<float*>(pool) + offset;
    for_pairs(half, [&](int i, int pair) {
      to[pair] = head.first[i];
      to[half + pair] = head.second[i];
    });
  } else if (element == CacheElement::kBf16) {
    auto* to = static_cast<__nv_bfloat16*>(pool) + offset;
    for_pairs(half, [&](int i, int pair) {
      to[pair] = __float2bfloat16_rn(head.first[i]);
      to[half + pair] = __float2bfloat16_rn(head.second[i]);
    });
  } else {
    float largest = 0;
    bool nan = false;                // fmaxf would drop it
    for_pairs(half, [&](int i, int) {
      largest = fmaxf(largest, fmaxf(fabsf(head.first[i]), fabsf(head.second[i])));
      nan = nan || isnan(head.first[i]) || isnan(head.second[i]);
    });
    largest = lane_max(largest);
    if (__any_sync(kAllLanes, nan)) largest = NAN;
    const float scale = largest == 0.0f ? 1.0f : largest / 448.0f;
    auto* to = static_cast<uint8_t*>(pool) + offset;
    for_pairs(half, [&](int i, int pair) {
      to[pair] = encode_e4m3(head.first[i] / scale);
      to[half + pair] = encode_e4m3(head.second[i] / scale);
    });
    if (threadIdx.x % 32 == 0) scales[scale_offset] = scale;
  }
}

__global__ void __launch_bounds__(kWarps * 32) qkv_finish_kernel(QkvFinishArgs args) {
  grid_wait();
  const int64_t token = blockIdx.y;
  const int n_kv = args.cache.n_kv_heads, half = args.head_dim / 2;
  const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);   // q heads, k heads, v heads
  if (item >= args.n_heads + 2 * n_kv) return;
  const bool is_q = item < args.n_heads, is_v = item >= args.n_heads + n_kv;
  const int source = is_v && args.v_from_k ? item - n_kv : item;
  float* values = args.qkv.values + token * args.qkv.stride + int64_t{source} * args.head_dim;
  Head head;
  for_pairs(half, [&](int i, int pair) {
    head.first[i] = values[pair];
    head.second[i] = values[half + pair];
  });
  const float* rope = args.rope == nullptr ? nullptr : args.rope + token * args.head_dim;
  if (is_q) {
    if (args.q_norm) norm_head(head, half, args.q_weight, args.q_eps);
    if (rope != nullptr) turn_head(head, half, rope);
    for_pairs(half, [&](int i, int pair) {
      values[pair] = head.first[i];
      values[half + pair] = head.second[i];
    });
    return;
  }
  if (is_v) {
    if (args.v_norm) norm_head(head, half, args.v_weight, args.v_eps);
  } else {
    if (args.k_norm) norm_head(head, half, args.k_weight, args.k_eps);
    if (rope != nullptr) turn_head(head, half, rope);
  }
  const int position = args.token.positions[token];
  const int64_t page = args.token.table[int64_t{args.token.sequences[token]} * args.token.n_entries +
                                        table_entry(position, args.token.n_entries)];
  const int kv_head = (item - args.n_heads) % n_kv, row = position % kPageTokens;
  const int64_t offset = cache_offset(page, row, kv_head, n_kv, args.head_dim);
  const int64_t scale_offset = cache_scale_offset(page, row, kv_head, n_kv);
  if (is_v)
    append(head, half, args.cache.values, args.cache.value_scales, args.cache.element, offset, scale_offset);
  else
    append(head, half, args.cache.keys, args.cache.key_scales, args.cache.element, offset, scale_offset);
}

}  // namespace

void launch_qkv_finish(const LaunchContext& context, const QkvFinishArgs& args, int64_t n_tokens) {
  const int items = args.n_heads + 2 * args.cache.n_kv_heads;
  const auto blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  launch(context, {.grid = {blocks, static_cast<unsigned>(n_tokens)}, .block = kWarps * 32, .name = "QkvFinish"},
         qkv_finish_kernel, args);
}

}  // namespace beryl::cuda
