// Launches attention of prompts: from the op to the kernels' arguments, with the caches as the tensor copy engine sees
// them.
#include "cuda/prefill_attention.h"

#include "base/error.h"
#include "cuda/prefill_attention.cuh"
#include "cuda/tensor_map.h"

namespace beryl::cuda {

namespace {

// A pool of rows of one head, [rows][head_dim], as slabs of 64 columns, read in boxes of so many rows and slabs.
CUtensorMap map_of(void* pool, int64_t rows, int head_dim, const int (&box)[2]) {
  return make_tensor_map(pool, {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                {kSlabColumns, rows, head_dim / kSlabColumns},
                                int64_t{head_dim} * 2,
                                kSlabRowBytes,
                                {kSlabColumns, box[0], box[1]}});
}

bool is_multiple(RowsView rows, int floats) {
  return reinterpret_cast<uintptr_t>(rows.values) % (static_cast<uintptr_t>(floats) * 4) == 0 &&
         rows.stride % floats == 0;
}

// FP8 caches: codes times their row's scale, as bf16 at the same place of the scratch. A warp takes a page of one KV
// head, keys or values, at a time; of the pages that some row reads, and of those only positions that are live.
struct WidenArgs {
  AttentionArgs attention;
  uint16_t *keys, *values;  // [cache_rows][key_cols], [cache_rows][head_dim]
};
constexpr int kWidenThreads = 256;
__global__ void __launch_bounds__(kWidenThreads) widen_cache_kernel(WidenArgs args) {
#if BERYL_WGMMA
  grid_wait();
  const AttentionArgs& a = args.attention;
  const int lane = static_cast<int>(threadIdx.x) % 32, n_kv = a.cache.n_kv_heads;
  const int n_warps = static_cast<int>(gridDim.x * blockDim.x) / 32;
  int item = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
#pragma unroll 1
  for (int token = 0; token < a.n_tokens;) {
    const RowSegment segment = segment_from(a, token, a.n_tokens);
    token = segment.token_end;
    const int32_t* table = a.token.table + int64_t{segment.sequence} * a.token.n_entries;
    const int n_items = (segment.unit_end - segment.unit_begin) * n_kv * 2;
#pragma unroll 1
    for (; item < n_items; item += n_warps) {
      const int unit = segment.unit_begin + item / (2 * n_kv), head = item / 2 % n_kv, is_value = item % 2;
      const int64_t first_row =
          (int64_t{table[table_entry(unit * kPageTokens, a.token.n_entries)]} * n_kv + head) * kPageTokens;
      const int cols = is_value ? a.cache.head_dim : a.cache.key_cols, pieces = cols / 16;
      const auto* codes = static_cast<const uint8_t*>(is_value ? a.cache.values : a.cache.keys) + first_row * cols;
      const float* scales = (is_value ? a.cache.value_scales : a.cache.key_scales) + first_row;
      uint16_t* out = (is_value ? args.values : args.keys) + first_row * cols;
#pragma unroll 4
      for (int i = lane; i < kPageTokens * pieces; i += 32) {
        const int row = i / pieces, position = unit * kPageTokens + row;
        if (position < segment.band.begin || position >= segment.band.end) continue;
        const uint4 four = __ldcg(reinterpret_cast<const uint4*>(codes) + i);
        const float scale = __ldcg(scales + row);
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        uint32_t wide[8];
#pragma unroll
        for (int w = 0; w < 8; ++w) {
          const uint32_t pair = widen_e4m3(__byte_perm(words[w / 2], 0, w % 2 == 0 ? 0x1404 : 0x3424));
          wide[w] = pair_of_bf16(__uint_as_float(pair << 16) * scale, __uint_as_float(pair & 0xffff0000u) * scale);
        }
        auto* to = reinterpret_cast<uint4*>(out) + 2 * i;
        to[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
        to[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
      }
    }
    item -= n_items;
  }
#endif
}

}  // namespace

bool takes_prefill_attention(const AttentionArgs& args, const void* scratch) {
  const bool element =
      args.cache.element == CacheElement::kBf16 || (args.cache.element == CacheElement::kFp8 && scratch != nullptr);
  return element && has_prefill_heads(args.cache.head_dim) && args.cache_rows > 0 && is_multiple(args.q, 4) &&
         is_multiple(args.out, 2);
}

void launch_prefill_attention(const LaunchContext& context, const AttentionArgs& args, void* scratch) {
  BERYL_CHECK(takes_prefill_attention(args, scratch) && args.first_token == 0, "attention that this kernel takes");
  CacheView cache = args.cache;
  int device = 0, n_sms = 0;
  check(cudaGetDevice(&device), "Attention");
  check(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device), "Attention");
  if (cache.element == CacheElement::kFp8) {
    auto* keys = static_cast<uint16_t*>(scratch);
    uint16_t* values = keys + args.cache_rows * cache.key_cols;
    launch(context,
           {.grid = static_cast<unsigned>(4 * n_sms), .block = kWidenThreads, .name = "Attention, widening the cache"},
           widen_cache_kernel, WidenArgs{args, keys, values});
    cache.keys = keys;
    cache.values = values;
  }
  const int64_t rows = int64_t{args.n_tokens} * (args.n_heads / cache.n_kv_heads);
  const int n_groups = ceil_div(rows, kAttendedRows) * cache.n_kv_heads <= n_sms ? 1 : 2;
  const PrefillAttentionKernel kernel =
      cache.head_dim == 512 ? wide_attention() : narrow_attention(cache.head_dim, n_groups);
  PrefillAttentionArgs attention = {};
  if (cache.key_weight == nullptr) {
    attention.keys = map_of(cache.keys, args.cache_rows, cache.head_dim, kernel.key_box);
  } else {
    attention.keys = map_of(cache.keys, args.cache_rows, cache.key_cols, {kernel.key_box[0], 1});
    attention.others = map_of(cache.values, args.cache_rows, cache.head_dim, {kernel.key_box[0], kernel.key_box[1] - 1});
    attention.key_weight = cache.key_weight;
  }
  attention.values = map_of(cache.values, args.cache_rows, cache.head_dim, kernel.value_box);
  attention.q = args.q;
  attention.out = args.out;
  attention.token = args.token;
  attention.n_tokens = args.n_tokens;
  attention.n_heads = args.n_heads;
  attention.n_kv_heads = cache.n_kv_heads;
  attention.window = args.window;
  attention.scale = args.scale;
  attention.softcap = args.softcap;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(round_up(int64_t{ceil_div(rows, kernel.rows)}, kernel.cluster)),
                    static_cast<unsigned>(cache.n_kv_heads));
  shape.block = dim3(static_cast<unsigned>(kernel.threads));
  shape.shared_bytes = kernel.shared_bytes;
  shape.name = "Attention";
  launch(context, shape, kernel.kernel, attention);
}

}  // namespace beryl::cuda
