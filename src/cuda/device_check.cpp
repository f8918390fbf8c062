#include "cuda/device_check.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

namespace beryl::cuda {

namespace {

std::string cuda_name(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

// The oldest driver of a CUDA generation; 0: not known here.
int oldest_driver(int cuda) {
  switch (cuda / 1000) {
    case 11: return 450;
    case 12: return 525;
    case 13: return 580;
    default: return 0;
  }
}

std::string device_words(const DeviceFacts& device) { return fmt::format("GPU {} ({})", device.index, device.name); }

int64_t megabytes(int64_t bytes) { return (bytes + 999'999) / 1'000'000; }

}  // namespace

void require_driver(const DriverFacts& driver, int device) {
  if (driver.status == cudaErrorInsufficientDriver && driver.driver_cuda > 0) {
    // The runtime's own words name no version, and the driver knows itself by another than its CUDA's.
    const std::string there = driver.driver_version.empty() ? fmt::format("it runs CUDA up to {}", cuda_name(driver.driver_cuda))
                                                            : fmt::format("{} is there, for CUDA up to {}", driver.driver_version,
                                                                          cuda_name(driver.driver_cuda));
    const int oldest = oldest_driver(driver.runtime_cuda);
    throw Error(ErrorCode::kDevice,
                fmt::format("the NVIDIA driver is too old: {}; this program needs CUDA {}{}", there, cuda_name(driver.runtime_cuda),
                            oldest > 0 ? fmt::format(", so driver {} or newer", oldest) : ""));
  }
  if (driver.status == cudaErrorInsufficientDriver || (driver.status == cudaSuccess && driver.driver_cuda == 0))
    throw AbsentGpu("no NVIDIA driver found (its library libcuda.so.1)");
  if (driver.status == cudaErrorNoDevice || (driver.status == cudaSuccess && driver.n_devices == 0))
    throw AbsentGpu(driver.chosen_by_environment ? "no NVIDIA GPU found (CUDA_VISIBLE_DEVICES may hide it)"
                                                 : "no NVIDIA GPU found");
  if (driver.status == cudaErrorSystemDriverMismatch || driver.status == cudaErrorCompatNotSupportedOnDevice)
    throw Error(ErrorCode::kDevice,
                fmt::format("the NVIDIA driver{}{} and its library are of different versions: after an update the machine must be "
                            "restarted",
                            driver.driver_version.empty() ? "" : " ", driver.driver_version));
  if (driver.status != cudaSuccess)
    throw Error(ErrorCode::kDevice, fmt::format("the NVIDIA driver fails: {}", cudaGetErrorString(driver.status)));
  if (device < 0 || device >= driver.n_devices)
    throw Error(ErrorCode::kDevice,
                fmt::format("GPU {} does not exist: {} found, counted from 0", device, driver.n_devices));
}

void require_capable(const DeviceFacts& device) {
  if (device.major < kOldestMajor)
    throw Error(ErrorCode::kDevice, fmt::format("{} is too old: its compute capability is {}.{}, {}.0 or later is needed",
                                                device_words(device), device.major, device.minor, kOldestMajor));
}

void require_opened(cudaError_t status, const DeviceFacts& device) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorMemoryAllocation)
    throw Error(ErrorCode::kOutOfMemory, fmt::format("{} has no memory left: other programs hold it all", device_words(device)));
  if (device.compute_mode == cudaComputeModeProhibited)
    throw Error(ErrorCode::kDevice,
                fmt::format("{} is closed to programs: its compute mode is Prohibited", device_words(device)));
  if (status == cudaErrorDevicesUnavailable)
    throw Error(ErrorCode::kDevice,
                fmt::format("{} is busy: another program holds it{}", device_words(device),
                            device.compute_mode == cudaComputeModeExclusiveProcess
                                ? ", and its compute mode, Exclusive Process, lets one in at a time"
                                : " for itself"));
  throw Error(ErrorCode::kDevice, fmt::format("{} cannot be opened: {}", device_words(device), cudaGetErrorString(status)));
}

void require_code(cudaError_t status, const DeviceFacts& device) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction || status == cudaErrorUnsupportedPtxVersion)
    throw Error(ErrorCode::kDevice,
                fmt::format("this program was built without code for {} of compute capability {}.{}: build it with "
                            "-DBERYL_CUDA_ARCHITECTURES={}{}",
                            device_words(device), device.major, device.minor, device.major, device.minor));
  throw Error(ErrorCode::kDevice, fmt::format("{} fails: {}", device_words(device), cudaGetErrorString(status)));
}

std::string driver_version_in(std::string_view text) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023": the first word of
  // digits and dots with at least one of each. Later lines tell of the compiler.
  text = text.substr(0, text.find('\n'));
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(" \t"), text.size());
    const std::string_view word = text.substr(0, end);
    const bool numeric = std::all_of(word.begin(), word.end(), [](char c) { return c == '.' || (c >= '0' && c <= '9'); });
    if (numeric && word.size() >= 3 && word.front() != '.' && word.find('.') != std::string_view::npos) return std::string(word);
    text = text.substr(std::min(end + 1, text.size()));
  }
  return {};
}

int64_t device_bytes(const std::vector<Allocation>& allocations, int64_t guard_bytes) {
  // Small ones share a block of 2 MiB, in steps of 512 bytes.
  constexpr int64_t kBlock = int64_t{2} << 20, kStep = 512, kLarge = int64_t{1} << 20;
  int64_t large = 0, small = 0;
  for (const Allocation& allocation : allocations) {
    const int64_t bytes = allocation.bytes + guard_bytes;
    if (bytes >= kLarge)
      large += (bytes + kBlock - 1) / kBlock * kBlock;
    else
      small += (bytes + kStep - 1) / kStep * kStep;
  }
  return large + (small + kBlock - 1) / kBlock * kBlock;
}

std::string too_small_message(const std::vector<Allocation>& allocations, int64_t needed_bytes, const DeviceMemory& memory,
                              std::string_view at) {
  int64_t weights = 0, cache = 0;
  for (const Allocation& allocation : allocations) {
    if (allocation.kind == MemoryKind::kWeights) weights += allocation.bytes;
    if (allocation.kind == MemoryKind::kCache) cache += allocation.bytes;
  }
  return fmt::format("the GPU's memory is too small: {} MB are needed (weights {} MB, cache {} MB), {} MB of {} MB are free{}",
                     megabytes(needed_bytes), megabytes(weights), megabytes(cache), megabytes(memory.free_bytes),
                     megabytes(memory.total_bytes), at.empty() ? std::string() : fmt::format("; it ended at '{}'", at));
}

}  // namespace beryl::cuda
