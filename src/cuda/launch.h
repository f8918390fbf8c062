// The one place that launches a kernel: shared-memory opt-in and programmatic dependent launch are set here, for all.
//
// Every kernel takes one struct by value and calls grid_wait() (device.cuh) before it touches anything that an earlier
// kernel writes: with programmatic launch it may start while its predecessor still runs. Weights may be read before.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/handles.h"

namespace beryl::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  int shared_bytes = 0;             // dynamic
  bool cooperative = false;         // all blocks are on the device at once
  const char* name = "";            // for error messages: the op
};

// What a launch needs to know of its surroundings.
struct LaunchContext {
  cudaStream_t stream = nullptr;
  bool programmatic = false;        // the device has programmatic dependent launch (compute capability 9.0 or later),
  bool programmatic_grids = false;  // and for cooperative kernels too: else these wait for their predecessor's end
};

inline void launch_raw(const LaunchContext& context, const LaunchShape& shape, const void* kernel, void* args) {
  // All kernels split L1 and shared memory alike: a multiprocessor that has to change its split runs empty first, and nothing
  // would overlap.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), shape.name);
  if (shape.shared_bytes > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes), shape.name);
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = context.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (shape.cooperative ? context.programmatic_grids : context.programmatic) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  void* arguments[] = {args};
  check(cudaLaunchKernelExC(&config, kernel, arguments), shape.name);
}

template <class Args>
void launch(const LaunchContext& context, const LaunchShape& shape, void (*kernel)(Args), Args args) {
  launch_raw(context, shape, reinterpret_cast<const void*>(kernel), &args);
}

}  // namespace beryl::cuda
