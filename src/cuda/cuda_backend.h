// The backend for NVIDIA GPUs of compute capability 8.0 and later.
//
// Activations are f32 (they stay in L2), caches BF16 unless StepLimits asks for FP8 or F32. Steps of up to 64 rows are
// captured as CUDA graphs when their shape comes back; a captured step and one run op by op give the same bits.
#pragma once

#include <memory>
#include <string>

#include "base/error.h"
#include "ops/backend.h"

namespace beryl {

// No driver, or no GPU: nothing is wrong with the machine, it just has none.
struct AbsentGpu : Error {
  explicit AbsentGpu(const std::string& message) : Error(ErrorCode::kDevice, message) {}
};

// device: as CUDA counts them, from 0. Throws in one line: AbsentGpu; Error(kDevice) when GPU or driver is too old, or when
// another process holds the GPU for itself; Error(kOutOfMemory) when others left no memory to open it with.
std::unique_ptr<Backend> make_cuda_backend(int device);

// How many GPUs the driver shows; 0 when there is no driver.
int cuda_device_count();

}  // namespace beryl
