#include "cuda/handles.h"

#include <fmt/format.h>

namespace beryl::cuda {

void throw_device_error(cudaError_t status, const char* what) {
  throw Error(ErrorCode::kDevice, fmt::format("GPU, {}: {}", what, cudaGetErrorString(status)));
}

}  // namespace beryl::cuda
