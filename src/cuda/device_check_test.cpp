// What: every reason why a GPU cannot be used becomes one line that names the GPU, what was found and what is needed; a GPU
//       that is just not there is told apart; the bytes that allocations take are never fewer than their sum.
// How:  the answers of driver and runtime are made up, so no GPU is needed.
#include "cuda/device_check.h"

#include <functional>

#include <gtest/gtest.h>

namespace beryl::cuda {
namespace {

struct Complaint {
  std::string message;      // empty: none
  ErrorCode code = ErrorCode::kBadInput;
  bool absent = false;
};

Complaint complaint(const std::function<void()>& ask) {
  try {
    ask();
  } catch (const AbsentGpu& error) {
    return {error.what(), error.code, true};
  } catch (const Error& error) {
    return {error.what(), error.code, false};
  }
  return {};
}

void expect_line(const Complaint& found, const std::vector<std::string>& parts) {
  EXPECT_FALSE(found.message.empty());
  EXPECT_EQ(found.message.find('\n'), std::string::npos) << found.message;
  for (const std::string& part : parts)
    EXPECT_NE(found.message.find(part), std::string::npos) << "'" << part << "' is missing in: " << found.message;
}

DriverFacts sound_driver() { return {cudaSuccess, 2, 13000, 13000, "580.65.06", false}; }
DeviceFacts sound_device() { return {1, "NVIDIA A100", 8, 0, cudaComputeModeDefault}; }

Complaint driver_complaint(const DriverFacts& facts, int device = 0) {
  return complaint([&] { require_driver(facts, device); });
}

TEST(DeviceCheckTest, ASoundMachineIsNoReasonToComplain) {
  EXPECT_EQ(driver_complaint(sound_driver()).message, "");
  EXPECT_EQ(driver_complaint(sound_driver(), 1).message, "");
  EXPECT_EQ(complaint([] { require_capable(sound_device()); }).message, "");
  EXPECT_EQ(complaint([] { require_opened(cudaSuccess, sound_device()); }).message, "");
  EXPECT_EQ(complaint([] { require_code(cudaSuccess, sound_device()); }).message, "");
}

TEST(DeviceCheckTest, AnAbsentDriverOrGpuIsToldApartFromABrokenOne) {
  DriverFacts none = {cudaErrorInsufficientDriver, 0, 0, 13000, "", false};
  expect_line(driver_complaint(none), {"no NVIDIA driver"});
  EXPECT_TRUE(driver_complaint(none).absent);

  DriverFacts no_gpu = sound_driver();
  no_gpu.n_devices = 0;
  for (cudaError_t status : {cudaErrorNoDevice, cudaSuccess}) {
    no_gpu.status = status;
    const Complaint found = driver_complaint(no_gpu);
    expect_line(found, {"no NVIDIA GPU"});
    EXPECT_TRUE(found.absent);
    EXPECT_EQ(found.code, ErrorCode::kDevice);
    EXPECT_EQ(found.message.find("CUDA_VISIBLE_DEVICES"), std::string::npos);
  }
  no_gpu.chosen_by_environment = true;
  expect_line(driver_complaint(no_gpu), {"no NVIDIA GPU", "CUDA_VISIBLE_DEVICES"});

  for (cudaError_t status : {cudaErrorSystemDriverMismatch, cudaErrorInitializationError, cudaErrorUnknown}) {
    DriverFacts broken = sound_driver();
    broken.status = status;
    const Complaint found = driver_complaint(broken);
    expect_line(found, {"driver"});
    EXPECT_FALSE(found.absent);
  }
}

TEST(DeviceCheckTest, AnOldDriverIsNamedWithTheOneThatIsNeeded) {
  DriverFacts old = {cudaErrorInsufficientDriver, 0, 12020, 13000, "535.104.05", false};
  const Complaint found = driver_complaint(old);
  expect_line(found, {"535.104.05", "12.2", "13.0", "driver 580 or newer"});
  EXPECT_FALSE(found.absent);
  EXPECT_EQ(found.code, ErrorCode::kDevice);
  old.driver_version = "";
  expect_line(driver_complaint(old), {"too old", "12.2", "13.0", "580"});
  old.runtime_cuda = 12040;
  old.driver_cuda = 11080;
  expect_line(driver_complaint(old), {"11.8", "12.4", "525"});
}

TEST(DeviceCheckTest, AGpuThatDoesNotExistIsNamedWithTheirNumber) {
  expect_line(driver_complaint(sound_driver(), 2), {"GPU 2", "2 found"});
  expect_line(driver_complaint(sound_driver(), -1), {"GPU -1"});
}

TEST(DeviceCheckTest, AnOldGpuIsNamedWithItsCapability) {
  DeviceFacts old = {0, "Tesla T4", 7, 5, cudaComputeModeDefault};
  expect_line(complaint([&] { require_capable(old); }), {"GPU 0", "Tesla T4", "7.5", "8.0 or later"});
}

TEST(DeviceCheckTest, ABusyOrClosedOrFullGpuSaysSo) {
  DeviceFacts device = sound_device();
  expect_line(complaint([&] { require_opened(cudaErrorDevicesUnavailable, device); }), {"GPU 1", "NVIDIA A100", "busy"});
  device.compute_mode = cudaComputeModeExclusiveProcess;
  expect_line(complaint([&] { require_opened(cudaErrorDevicesUnavailable, device); }), {"busy", "Exclusive"});
  device.compute_mode = cudaComputeModeProhibited;
  expect_line(complaint([&] { require_opened(cudaErrorDevicesUnavailable, device); }), {"GPU 1", "Prohibited"});
  device.compute_mode = cudaComputeModeDefault;
  const Complaint full = complaint([&] { require_opened(cudaErrorMemoryAllocation, device); });
  expect_line(full, {"GPU 1", "memory"});
  EXPECT_EQ(full.code, ErrorCode::kOutOfMemory);
  expect_line(complaint([&] { require_opened(cudaErrorECCUncorrectable, device); }), {"GPU 1", "ECC"});
}

TEST(DeviceCheckTest, MissingCodeNamesWhatToBuild) {
  expect_line(complaint([&] { require_code(cudaErrorNoKernelImageForDevice, sound_device()); }),
              {"NVIDIA A100", "8.0", "BERYL_CUDA_ARCHITECTURES=80"});
  expect_line(complaint([&] { require_code(cudaErrorUnknown, sound_device()); }), {"NVIDIA A100"});
}

TEST(DeviceCheckTest, FindsTheDriversVersion) {
  EXPECT_EQ(driver_version_in("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
                              "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0)\n"),
            "535.104.05");
  EXPECT_EQ(driver_version_in("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"), "580.65.06");
  for (const char* text : {"", "\n", "no version", "NVRM version: 535", "GCC\nversion 11.4.0", "a.b 1x.2 ."})
    EXPECT_EQ(driver_version_in(text), "") << text;
}

TEST(DeviceCheckTest, AllocationsTakeAtLeastTheirSumAndWholeBlocks) {
  constexpr int64_t kBlock = int64_t{2} << 20;
  EXPECT_EQ(device_bytes({}, 256), 0);
  std::vector<Allocation> allocations;
  int64_t sum = 0;
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{511}, int64_t{4096}, (int64_t{1} << 20) - 257, int64_t{1} << 20, kBlock - 256,
                        kBlock - 255, int64_t{1} << 32}) {
    allocations.push_back({MemoryKind::kWeights, "w", bytes});
    sum += bytes + 256;
    const int64_t taken = device_bytes(allocations, 256);
    EXPECT_GE(taken, sum);
    EXPECT_LE(taken, sum + static_cast<int64_t>(allocations.size() + 1) * kBlock);
    EXPECT_EQ(taken % kBlock, 0);
  }
  EXPECT_EQ(device_bytes({{MemoryKind::kCache, "K", kBlock - 255}}, 256), 2 * kBlock);
}

TEST(DeviceCheckTest, TooLittleMemorySaysHowMuchOfWhat) {
  const std::vector<Allocation> allocations = {{MemoryKind::kWeights, "w", 7'000'000'000},
                                               {MemoryKind::kCache, "layer 0 K", 2'000'000'000},
                                               {MemoryKind::kActivations, "x", 500'000'000}};
  const std::string before = too_small_message(allocations, 9'500'000'001, {8'000'000'000, 7'500'000'000}, "");
  expect_line({before}, {"9501 MB are needed", "weights 7000 MB", "cache 2000 MB", "7500 MB of 8000 MB are free"});
  EXPECT_EQ(before.find("ended"), std::string::npos);
  expect_line({too_small_message(allocations, 9'500'000'000, {8'000'000'000, 7'500'000'000}, "layer 0 K")}, {"'layer 0 K'"});
}

}  // namespace
}  // namespace beryl::cuda
