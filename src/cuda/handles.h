// Owners of CUDA objects. Destructors free and neither throw nor wait.
#pragma once

#include <memory>
#include <type_traits>

#include <cuda_runtime_api.h>

#include "base/error.h"

namespace beryl::cuda {

// Throws Error(kDevice, or kOutOfMemory, "GPU, what: the runtime's words"). Out of line: nvcc cannot compile fmt's format strings.
[[noreturn]] void throw_device_error(cudaError_t status, const char* what);

// what: the op or the buffer, in our words.
inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw_device_error(status, what);
}

struct FreeDevice {
  void operator()(void* memory) const noexcept { cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const noexcept { cudaFreeHost(memory); }
};
struct DestroyStream {
  void operator()(cudaStream_t stream) const noexcept { cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(cudaEvent_t event) const noexcept { cudaEventDestroy(event); }
};
struct DestroyGraph {
  void operator()(cudaGraph_t graph) const noexcept { cudaGraphDestroy(graph); }
};
struct DestroyGraphExec {
  void operator()(cudaGraphExec_t graph) const noexcept { cudaGraphExecDestroy(graph); }
};

using DevicePtr = std::unique_ptr<void, FreeDevice>;
using PinnedPtr = std::unique_ptr<void, FreePinned>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, DestroyStream>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, DestroyEvent>;
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, DestroyGraph>;
using GraphExec = std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, DestroyGraphExec>;

inline Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return Stream(stream);
}

inline Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  return Event(event);
}

// With a time, for measuring.
inline Event make_clock_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "creating an event");
  return Event(event);
}

inline PinnedPtr make_pinned(size_t bytes, const char* what) {
  void* memory = nullptr;
  check(cudaMallocHost(&memory, bytes), what);
  return PinnedPtr(memory);
}

}  // namespace beryl::cuda
