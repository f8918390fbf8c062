#include "cuda/tensor_map.h"

#include <algorithm>

#include <cuda_runtime.h>

#include "base/error.h"
#include "cuda/decode_phase.h"
#include "cuda/handles.h"
#include "cuda/index_math.h"

namespace beryl::cuda {

namespace {

static_assert(sizeof(CUtensorMap) == kTensorMapBytes);

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

}  // namespace

CUtensorMap make_tensor_map(void* memory, const TensorShape& shape) {
  CUtensorMap map;
  std::array<cuuint64_t, 3> sizes;
  std::array<cuuint32_t, 3> box;
  std::copy(shape.sizes.begin(), shape.sizes.end(), sizes.begin());
  std::copy(shape.box.begin(), shape.box.end(), box.begin());
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(shape.row_bytes), static_cast<cuuint64_t>(shape.slab_bytes)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode_tiled()(&map, shape.type, 3, memory, sizes.data(), strides, box.data(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw Error(ErrorCode::kDevice, "the GPU driver refused the tensor map of a cache");
  return map;
}

CUtensorMap cache_tensor_map(void* pool, int64_t n_rows, int row_bytes) {
  const int line_rows = std::max(128 / row_bytes, 1), line_bytes = line_rows * row_bytes;
  return make_tensor_map(pool, {CU_TENSOR_MAP_DATA_TYPE_UINT8, {128, n_rows / line_rows, line_bytes / 128}, line_bytes, 128,
                                {128, kBoxRows / line_rows, line_bytes / 128}});
}

}  // namespace beryl::cuda
