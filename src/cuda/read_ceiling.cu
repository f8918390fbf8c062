// A plain read, as fast as loads go: two blocks of 512 threads a multiprocessor, 16 bytes a thread, several in flight.
#include "cuda/read_ceiling.h"

#include <algorithm>
#include <vector>

#include "cuda/device.cuh"
#include "cuda/handles.h"
#include "cuda/launch.h"

namespace beryl::cuda {

namespace {

constexpr int64_t kBytes = int64_t{1} << 30;
constexpr int kThreads = 512;
constexpr int kReads = 9;

struct ReadArgs {
  const uint4* from;
  int64_t n_words;
  uint32_t* to;                     // never written: the sum is not what it is compared with
};

__global__ void __launch_bounds__(kThreads) read_kernel(ReadArgs args) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  uint32_t sum = 0;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + 7 * stride < args.n_words; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = __ldcs(args.from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < args.n_words; i += stride) sum ^= __ldcs(args.from + i).x;
  if (sum == 0x12345678u) *args.to = sum;
}

}  // namespace

double measure_read_ceiling() {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(kBytes)) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  const DevicePtr buffer(memory);
  int device = 0, n_sms = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, device), "device");
  const Stream stream = make_stream();
  // Not zeros: some memories move those faster.
  check(cudaMemsetAsync(buffer.get(), 0x5a, static_cast<size_t>(kBytes), stream.get()), "reading memory");
  const Event before = make_clock_event(), after = make_clock_event();
  std::vector<float> times;
  for (int read = -2; read < kReads; ++read) {
    check(cudaEventRecord(before.get(), stream.get()), "reading memory");
    launch(LaunchContext{stream.get(), false}, {.grid = static_cast<unsigned>(2 * n_sms), .block = kThreads, .name = "reading memory"},
           read_kernel, ReadArgs{static_cast<const uint4*>(buffer.get()), kBytes / 16, static_cast<uint32_t*>(buffer.get())});
    check(cudaEventRecord(after.get(), stream.get()), "reading memory");
    check(cudaStreamSynchronize(stream.get()), "reading memory");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, before.get(), after.get()), "reading memory");
    if (read >= 0) times.push_back(milliseconds);
  }
  std::nth_element(times.begin(), times.begin() + kReads / 2, times.end());
  return static_cast<double>(kBytes) / (times[kReads / 2] * 1e-3);
}

}  // namespace beryl::cuda
