// The backend: the device, its properties, and whether it can be used.
#include "cuda/cuda_backend.h"

#include <fmt/format.h>

#include "cuda/cuda_executor.h"

namespace beryl {

namespace cuda {

namespace {

constexpr int kOldestMajor = 8;       // compute capability 8.0: bf16 tensor cores, asynchronous copies

DeviceProperties find_device(int device) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  cudaGetLastError();
  if (status == cudaErrorInsufficientDriver) {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    throw Error(ErrorCode::kDevice,
                driver == 0 ? std::string("no NVIDIA driver found")
                            : fmt::format("the NVIDIA driver is too old: it supports CUDA {}.{}, this program needs {}.{}",
                                          driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10));
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) throw Error(ErrorCode::kDevice, "no NVIDIA GPU found");
  check(status, "looking for devices");
  if (device < 0 || device >= count)
    throw Error(ErrorCode::kDevice, fmt::format("GPU {} does not exist: {} found, counted from 0", device, count));
  cudaDeviceProp found;
  check(cudaGetDeviceProperties(&found, device), "reading its properties");
  if (found.major < kOldestMajor)
    throw Error(ErrorCode::kDevice, fmt::format("GPU {} ({}) is too old: compute capability {}.{}, {}.0 or later is needed", device,
                                                found.name, found.major, found.minor, kOldestMajor));
  const cudaError_t opened = [&] {
    const cudaError_t chosen = cudaSetDevice(device);
    return chosen == cudaSuccess ? cudaFree(nullptr) : chosen;   // makes the context
  }();
  if (opened == cudaErrorDevicesUnavailable)
    throw Error(ErrorCode::kDevice, fmt::format("GPU {} ({}) is busy: another process holds it for itself", device, found.name));
  if (opened == cudaErrorMemoryAllocation)
    throw Error(ErrorCode::kOutOfMemory, fmt::format("GPU {} ({}) has no memory free", device, found.name));
  check(opened, "opening it");
  DeviceProperties properties;
  properties.name = found.name;
  properties.device = device;
  properties.programmatic = has_programmatic_code();
  properties.matvec = matvec_device();
  return properties;
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device) : properties_(find_device(device)) {}
  std::string_view name() const override { return "cuda"; }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return make_layout(program, limits, properties_).allocations;
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    check(cudaSetDevice(properties_.device), "choosing the GPU");
    return std::make_unique<CudaExecutor>(program, limits, properties_);
  }

 private:
  const DeviceProperties properties_;
};

}  // namespace

}  // namespace cuda

std::unique_ptr<Backend> make_cuda_backend(int device) { return std::make_unique<cuda::CudaBackend>(device); }

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace beryl
