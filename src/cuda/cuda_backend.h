// The backend for NVIDIA GPUs of compute capability 8.0 and later.
//
// Activations are f32 (they stay in L2), caches BF16 unless StepLimits asks for FP8 or F32. Steps of up to 64 rows are
// captured as CUDA graphs when their shape comes back; a captured step and one run op by op give the same bits.
#pragma once

#include <memory>

#include "ops/backend.h"

namespace beryl {

// device: as CUDA counts them, from 0. Throws Error(kDevice) in one line when there is no GPU or driver, when either is too
// old, or when another process holds the GPU for itself.
std::unique_ptr<Backend> make_cuda_backend(int device);

// How many GPUs the driver shows; 0 when there is no driver.
int cuda_device_count();

}  // namespace beryl
