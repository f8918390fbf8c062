// What the programs that measure or check linear layers share: random weights and rows, device memory, timing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/float_formats.h"
#include "base/rng.h"
#include "cuda/handles.h"
#include "cuda/matvec_layout.h"
#include "weights/format.h"

namespace beryl::cuda {

inline void parallel(int n, const std::function<void(int)>& work) {
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  const unsigned n_threads = std::max(1u, std::thread::hardware_concurrency());
  for (unsigned t = 0; t < n_threads; ++t)
    threads.emplace_back([&] {
      for (int i; (i = next++) < n;) work(i);
    });
  for (std::thread& thread : threads) thread.join();
}

// ---- random weights and rows ----

// Random bits are random codes; scales are set so that a row's dot product with a row of x of size 1 is about 1.
inline HostMatrix random_matrix(Format format, int64_t rows, int64_t cols, uint64_t seed) {
  HostMatrix matrix;
  matrix.name = "random";
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  const int64_t row = row_bytes(format, cols), scale_row = row_scale_bytes(format, cols);
  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(rows * (row + scale_row)));
  std::byte* codes = storage->data();
  std::byte* scales = codes + rows * row;
  const float size = 1.0f / std::sqrt(static_cast<float>(cols));
  const FormatInfo& about = info(format);
  parallel(static_cast<int>(rows), [&](int r) {
    std::byte* bytes = codes + r * row;
    const Random4 start = philox(seed, static_cast<uint64_t>(r));
    uint64_t state = start.x[0] | uint64_t{start.x[1]} << 32 | 1;
    const auto next = [&] {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      return static_cast<uint32_t>(state >> 32);
    };
    const auto unit = [&] { return 0.5f + to_unit_float(next()); };
    const auto put16 = [](std::byte* at, uint16_t value) { std::memcpy(at, &value, 2); };
    for (int64_t i = 0; i < row; ++i) bytes[i] = static_cast<std::byte>(next());
    for (int64_t b = 0; b < cols / about.block_weights; ++b) {
      std::byte* block = bytes + b * about.block_bytes;
      const float f = size * unit();
      switch (format) {
        case Format::kQ4_0: put16(block, f32_to_f16(f / 5)); break;
        case Format::kQ5_0: put16(block, f32_to_f16(f / 10)); break;
        case Format::kQ8_0: put16(block, f32_to_f16(f / 80)); break;
        case Format::kQ4_1: put16(block, f32_to_f16(f / 5)), put16(block + 2, f32_to_f16(-1.4f * f)); break;
        case Format::kQ5_1: put16(block, f32_to_f16(f / 10)), put16(block + 2, f32_to_f16(-1.5f * f)); break;
        case Format::kQ4_K: put16(block, f32_to_f16(f / 160)), put16(block + 2, f32_to_f16(f / 25)); break;
        case Format::kQ5_K: put16(block, f32_to_f16(f / 320)), put16(block + 2, f32_to_f16(f / 25)); break;
        case Format::kQ6_K: put16(block + 208, f32_to_f16(f / 1500)); break;
        case Format::kMxfp4: block[0] = static_cast<std::byte>(127 - 7 + next() % 3); break;
        case Format::kNvfp4:
          for (int g = 0; g < 4; ++g) block[g] = static_cast<std::byte>(f32_to_e4m3(size * unit() / 2 * 8));
          break;
        case Format::kFp8: block[0] &= static_cast<std::byte>(0xbf); break;  // below 2, no NaN
        case Format::kF16: put16(block, f32_to_f16(size * 3.4f * (to_unit_float(next()) - 0.5f))); break;
        case Format::kBf16: put16(block, f32_to_bf16(size * 3.4f * (to_unit_float(next()) - 0.5f))); break;
        default: break;
      }
    }
    for (int64_t s = 0; scale_row > 0 && s < scale_row / about.scale_bytes; ++s) {
      std::byte* at = scales + r * scale_row + s * about.scale_bytes;
      const float f = size * unit();
      if (format == Format::kFp4G128) put16(at, f32_to_bf16(f / 3));
      else std::memcpy(at, &f, 4);
    }
  });
  matrix.codes = codes;
  matrix.scales = scale_row > 0 ? scales : nullptr;
  if (format == Format::kNvfp4) matrix.tensor_scale = 0.125f;
  matrix.storage = storage;
  return matrix;
}

inline std::vector<float> random_values(size_t n, uint64_t seed, float outlier = 1) {
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    const Random4 r = philox(seed, i);
    const float u = to_unit_float(r.x[0]) + to_unit_float(r.x[1]) + to_unit_float(r.x[2]) - 1.5f;
    values[i] = 2 * u * (r.x[3] % 97 == 0 ? outlier : 1.0f);
  }
  return values;
}

// ---- device memory ----
template <class T>
struct Device {
  DevicePtr memory;
  size_t n = 0;
  explicit Device(size_t count) : n(count) {
    void* p = nullptr;
    check(cudaMalloc(&p, std::max<size_t>(16, count * sizeof(T))), "bench memory");
    memory.reset(p);
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) {
    check(cudaMemcpy(data(), host.data(), n * sizeof(T), cudaMemcpyHostToDevice), "bench copy");
  }
  T* data() const { return static_cast<T*>(memory.get()); }
  std::vector<T> host() const {
    std::vector<T> out(n);
    check(cudaMemcpy(out.data(), data(), n * sizeof(T), cudaMemcpyDeviceToHost), "bench copy");
    return out;
  }
  void poison() const { check(cudaMemset(data(), 0xff, n * sizeof(T)), "bench poison"); }
};

struct Packed {
  std::vector<HostMatrix> parts;
  MatvecSource source;
  MatvecPlan plan;
  std::vector<std::byte> bytes;
};
inline std::unique_ptr<Packed> pack(Format format, const std::vector<int64_t>& rows, int64_t cols, bool gated,
                                    int n_sms, uint64_t seed) {
  auto packed = std::make_unique<Packed>();
  for (size_t i = 0; i < rows.size(); ++i) packed->parts.push_back(random_matrix(format, rows[i], cols, seed * 16 + i));
  for (const HostMatrix& part : packed->parts) packed->source.parts.push_back(&part);
  packed->source.gated = gated;
  packed->plan = plan_matvec(packed->source, n_sms);
  const MatvecPlan& plan = packed->plan;
  packed->bytes.resize(static_cast<size_t>(plan.packed_bytes));
  parallel(plan.n_units, [&](int unit) {
    pack_units(plan, packed->source, unit, unit + 1, packed->bytes.data() + unit * plan.unit_bytes);
  });
  if (plan.scales_offset != 0)
    pack_row_scales(plan, packed->source, reinterpret_cast<float*>(packed->bytes.data() + plan.scales_offset));
  return packed;
}

// Median, in ms, of graph replays.
inline double time_graph(cudaStream_t stream, const std::function<void()>& capture, int n_replays = 15) {
  cudaGraph_t raw = nullptr;
  cudaGraphExec_t raw_exec = nullptr;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  capture();
  check(cudaStreamEndCapture(stream, &raw), "capture");
  const Graph graph(raw);
  check(cudaGraphInstantiate(&raw_exec, raw, 0), "graph");
  const GraphExec exec(raw_exec);
  const auto event = [] {
    cudaEvent_t e;
    check(cudaEventCreate(&e), "event");
    return Event(e);
  };
  const Event begin = event(), end = event();
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(exec.get(), stream), "replay");
  std::vector<float> times;
  for (int i = 0; i < n_replays; ++i) {
    check(cudaEventRecord(begin.get(), stream), "event");
    check(cudaGraphLaunch(exec.get(), stream), "replay");
    check(cudaEventRecord(end.get(), stream), "event");
    check(cudaEventSynchronize(end.get()), "replay");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin.get(), end.get()), "event");
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

inline MatvecDevice this_device() {
  MatvecDevice device;
  int id = 0;
  check(cudaGetDevice(&id), "device");
  check(cudaDeviceGetAttribute(&device.n_sms, cudaDevAttrMultiProcessorCount, id), "device");
  check(cudaDeviceGetAttribute(&device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id), "device");
  check(cudaDeviceGetAttribute(&device.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id), "device");
  return device;
}

}  // namespace beryl::cuda
