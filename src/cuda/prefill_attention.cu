// Launches attention of prompts: from the op to the kernels' arguments, with the caches as the tensor copy engine sees
// them.
#include "cuda/prefill_attention.h"

#include "base/error.h"
#include "cuda/prefill_attention.cuh"

namespace beryl::cuda {

namespace {

// The driver's function, found through the runtime: nothing is linked against the driver.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found),
          "looking for tensor maps");
    if (found != cudaDriverEntryPointSuccess) throw Error(ErrorCode::kDevice, "the GPU driver has no tensor maps");
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

// A pool of rows of one head, [rows][head_dim], as slabs of 64 columns, read in boxes of so many rows and slabs.
CUtensorMap map_of(void* pool, int64_t rows, int head_dim, const int (&box)[2]) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {kSlabColumns, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(head_dim / kSlabColumns)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_dim) * 2, kSlabRowBytes};
  const cuuint32_t boxes[3] = {kSlabColumns, static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1])};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, pool, sizes, strides, boxes, steps,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(ErrorCode::kDevice, "the GPU driver refused the tensor map of a cache");
  return map;
}

bool is_multiple(RowsView rows, int floats) {
  return reinterpret_cast<uintptr_t>(rows.values) % (static_cast<uintptr_t>(floats) * 4) == 0 &&
         rows.stride % floats == 0;
}

}  // namespace

bool takes_prefill_attention(const AttentionArgs& args) {
  const int dim = args.cache.head_dim;
  return args.cache.element == CacheElement::kBf16 && (dim == 64 || dim == 128 || dim == 256 || dim == 512) &&
         args.cache_rows > 0 && is_multiple(args.q, 4) && is_multiple(args.out, 2);
}

void launch_prefill_attention(const LaunchContext& context, const AttentionArgs& args) {
  BERYL_CHECK(takes_prefill_attention(args) && args.first_token == 0, "attention that this kernel takes");
  const CacheView& cache = args.cache;
  const PrefillAttentionKernel kernel = cache.head_dim == 512 ? wide_attention() : narrow_attention(cache.head_dim);
  PrefillAttentionArgs attention = {};
  attention.keys = map_of(cache.keys, args.cache_rows, cache.head_dim, kernel.key_box);
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
  const int64_t rows = int64_t{args.n_tokens} * (args.n_heads / cache.n_kv_heads);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(round_up(int64_t{ceil_div(rows, kernel.rows)}, kernel.cluster)),
                    static_cast<unsigned>(cache.n_kv_heads));
  shape.block = dim3(static_cast<unsigned>(kernel.threads));
  shape.shared_bytes = kernel.shared_bytes;
  shape.name = "Attention";
  launch(context, shape, kernel.kernel, attention);
}

}  // namespace beryl::cuda
