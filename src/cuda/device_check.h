// Why a GPU cannot be used, in one line each: made from what driver and runtime answered, without asking them again, so
// that machines without a GPU test every one of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/cuda_backend.h"
#include "ops/backend.h"

namespace beryl::cuda {

inline constexpr int kOldestMajor = 8;   // compute capability 8.0: bf16 tensor cores, asynchronous copies

struct DriverFacts {
  cudaError_t status = cudaSuccess;      // of counting the GPUs
  int n_devices = 0;
  int driver_cuda = 0;                   // the newest CUDA that the driver runs, 12040 for 12.4; 0: no driver
  int runtime_cuda = 0;                  // the CUDA that this program was built with, likewise
  std::string driver_version;            // "535.104.05"; empty: unknown
  bool chosen_by_environment = false;    // CUDA_VISIBLE_DEVICES is set: it may hide all of them
};

struct DeviceFacts {
  int index = 0;
  std::string name;
  int major = 0, minor = 0;              // compute capability
  cudaComputeMode compute_mode = cudaComputeModeDefault;
};

// Each returns when there is nothing to say. Throws AbsentGpu for no driver and no GPU, else Error(kDevice).
void require_driver(const DriverFacts& driver, int device);
void require_capable(const DeviceFacts& device);
// status: of making a context. Error(kOutOfMemory) when there is no memory for even that.
void require_opened(cudaError_t status, const DeviceFacts& device);
// status: of asking for a kernel's properties; another than success means that the program holds no code for this GPU.
void require_code(cudaError_t status, const DeviceFacts& device);

// The driver's version in the text of /proc/driver/nvidia/version; empty when there is none.
std::string driver_version_in(std::string_view text);

// What the device's allocator takes for these, guard bytes included: it hands out large ones in whole blocks.
int64_t device_bytes(const std::vector<Allocation>& allocations, int64_t guard_bytes);

// One line for allocations that do not fit. at: the buffer at which it was noticed; empty: before any was allocated.
std::string too_small_message(const std::vector<Allocation>& allocations, int64_t needed_bytes, const DeviceMemory& memory,
                              std::string_view at);

}  // namespace beryl::cuda
