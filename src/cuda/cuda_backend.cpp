// The backend: the device, its properties, its memory, and whether it can be used.
#include "cuda/cuda_backend.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <fstream>

#include "cuda/cuda_executor.h"
#include "cuda/read_ceiling.h"
#include "cuda/device_check.h"

namespace beryl {

namespace cuda {

namespace {

// What the driver takes beside a program's buffers: code, which it loads at a kernel's first launch, and graphs.
constexpr int64_t kDriverBytes = int64_t{256} << 20;

DriverFacts ask_driver() {
  DriverFacts facts;
  facts.status = cudaGetDeviceCount(&facts.n_devices);
  cudaGetLastError();   // it was told
  cudaDriverGetVersion(&facts.driver_cuda);
  cudaRuntimeGetVersion(&facts.runtime_cuda);
  std::string line;
  std::getline(std::ifstream("/proc/driver/nvidia/version"), line);
  facts.driver_version = driver_version_in(line);
  facts.chosen_by_environment = std::getenv("CUDA_VISIBLE_DEVICES") != nullptr;
  return facts;
}

DeviceProperties find_device(int device) {
  require_driver(ask_driver(), device);
  cudaDeviceProp found;
  check(cudaGetDeviceProperties(&found, device), "reading its properties");
  int compute_mode = cudaComputeModeDefault;
  check(cudaDeviceGetAttribute(&compute_mode, cudaDevAttrComputeMode, device), "reading its properties");
  const DeviceFacts facts = {device, found.name, found.major, found.minor, static_cast<cudaComputeMode>(compute_mode)};
  require_capable(facts);
  const cudaError_t opened = [&] {
    const cudaError_t chosen = cudaSetDevice(device);
    return chosen == cudaSuccess ? cudaFree(nullptr) : chosen;   // makes the context
  }();
  cudaGetLastError();
  require_opened(opened, facts);
  DeviceProperties properties;
  properties.name = found.name;
  properties.device = device;
  const char* whole_steps = std::getenv("BERYL_WHOLE_STEPS");
  properties.whole_steps = whole_steps == nullptr || std::string_view(whole_steps) != "0";
  try {
    properties.programmatic = has_programmatic_code();
    properties.programmatic_grids = properties.programmatic && has_programmatic_grids();
  } catch (const Error&) {
    require_code(cudaGetLastError(), facts);
    throw;
  }
  properties.matvec = matvec_device();
  const char* prefill = std::getenv("BERYL_PREFILL");
  properties.prefill_products = (prefill == nullptr || std::string_view(prefill) != "0") && has_prefill_linear();
  return properties;
}

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(int device) : properties_(find_device(device)) {}
  std::string_view name() const override { return "cuda"; }
  std::string device_name() const override { return properties_.name; }
  double read_ceiling() override {
    check(cudaSetDevice(properties_.device), "choosing the GPU");
    return measure_read_ceiling();
  }
  std::optional<DeviceMemory> memory() const override {
    check(cudaSetDevice(properties_.device), "choosing the GPU");
    size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
    return DeviceMemory{static_cast<int64_t>(total_bytes), std::max<int64_t>(static_cast<int64_t>(free_bytes) - kDriverBytes, 0)};
  }
  int64_t taken_bytes(const std::vector<Allocation>& allocations) const override {
    return device_bytes(allocations, DeviceBuffers::kGuardBytes);
  }
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
