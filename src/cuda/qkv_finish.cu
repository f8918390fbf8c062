// Per head: q = rope(norm(q)) in place; k = rope(norm(k)) and v = norm(v) into the cache at the token's position.
//
// A warp owns one head of one token and holds it in registers, so each value is read once and written once. The FP8 cache
// keeps one f32 scale a row and head, absmax / 448.
#include "cuda/device.cuh"
#include "cuda/index_math.h"
#include "cuda/kernels.h"
#include "cuda/qkv_head.cuh"

namespace beryl::cuda {

namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32) qkv_finish_kernel(QkvFinishArgs args) {
  grid_wait();
  const int64_t token = blockIdx.y;
  const int n_kv = args.cache.n_kv_heads, half = args.head_dim / 2, lane = static_cast<int>(threadIdx.x % 32);
  const int item = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);   // q heads, k heads, v heads
  if (item >= args.n_heads + 2 * n_kv) return;
  const bool is_q = item < args.n_heads, is_v = item >= args.n_heads + n_kv;
  const int source = is_v && args.v_from_k ? item - n_kv : item;
  float* values = args.qkv.values + token * args.qkv.stride + int64_t{source} * args.head_dim;
  // Two loads in turn, asked for before the head's own.
  int position = 0;
  int64_t page = 0;
  if (!is_q) {
    position = args.token.positions[token];
    page = args.token.table[int64_t{args.token.sequences[token]} * args.token.n_entries +
                            table_entry(position, args.token.n_entries)];
  }
  // Of heads that allow it, 16 bytes at a time; scales and rope tables lie as well as the values do.
  const bool aligned = half % 4 == 0 && reinterpret_cast<uintptr_t>(values) % 16 == 0;
  const auto load = [&](Head& to, const float* from) {
    if (aligned) load_halves<true>(to, half, lane, from);
    else load_halves<false>(to, half, lane, from);
  };
  Head head, factors;
  load(head, values);
  const bool norms = is_q ? args.q_norm : is_v ? args.v_norm : args.k_norm;
  if (norms) {
    const float* weight = is_q ? args.q_weight : is_v ? args.v_weight : args.k_weight;
    if (weight != nullptr) load(factors, weight);
    else fill_head(factors, 1);
    norm_head(head, half, factors, is_q ? args.q_eps : is_v ? args.v_eps : args.k_eps);
  }
  if (args.rope != nullptr && !is_v) {
    load(factors, args.rope + token * args.head_dim);
    turn_head(head, half, factors);
  }
  if (is_q) {
    for_pairs(half, [&](int i) {
      const int pair = first_pair(i / 4, lane) + i % 4;
      if (pair < half) values[pair] = head.first[i], values[half + pair] = head.second[i];
    });
    return;
  }
  const int kv_head = (item - args.n_heads) % n_kv, row = position % kPageTokens;
  // Of keys that are made from values, the pairs that rope turns.
  const int columns = is_v ? args.head_dim : args.cache.key_cols, stored = columns / 2;
  const int64_t offset = cache_offset(page, row, kv_head, n_kv, columns);
  const bool fp8 = args.cache.element == CacheElement::kFp8;
  for_pairs(half, [&](int i) {
    if (first_pair(i / 4, lane) + i % 4 >= stored) head.first[i] = head.second[i] = 0;
  });
  const float scale = fp8 ? cache_scale(head, half) : 1.0f;
  void* pool = is_v ? args.cache.values : args.cache.keys;
  switch (args.cache.element) {
    case CacheElement::kF32: store_head<CacheElement::kF32>(head, stored, lane, static_cast<float*>(pool) + offset, scale); break;
    case CacheElement::kBf16: store_head<CacheElement::kBf16>(head, stored, lane, static_cast<uint16_t*>(pool) + offset, scale); break;
    case CacheElement::kFp8: store_head<CacheElement::kFp8>(head, stored, lane, static_cast<uint8_t*>(pool) + offset, scale); break;
  }
  if (fp8 && threadIdx.x % 32 == 0)
    (is_v ? args.cache.value_scales : args.cache.key_scales)[cache_scale_offset(page, row, kv_head, n_kv)] = scale;
}

}  // namespace

void launch_qkv_finish(const LaunchContext& context, const QkvFinishArgs& args, int64_t n_tokens) {
  const int items = args.n_heads + 2 * args.cache.n_kv_heads;
  const auto blocks = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  launch(context, {.grid = {blocks, static_cast<unsigned>(n_tokens)}, .block = kWarps * 32, .name = "QkvFinish"},
         qkv_finish_kernel, args);
}

}  // namespace beryl::cuda
