#include "cuda/handles.h"

#include <fmt/format.h>

namespace beryl::cuda {

void throw_device_error(cudaError_t status, const char* what) {
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDevice;
  throw Error(code, fmt::format("GPU, {}: {}", what, cudaGetErrorString(status)));
}

}  // namespace beryl::cuda
