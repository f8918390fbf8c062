#include "cpu/read_speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace beryl {

namespace {

constexpr int64_t kLanes = 32;                    // 64-bit words: four cache lines a turn
constexpr int64_t kStretchBytes = 1 << 20;

uint64_t sum_of(const uint8_t* data, int64_t bytes) {
  uint64_t sums[kLanes] = {};
  for (int64_t i = 0; i + kLanes * 8 <= bytes; i += kLanes * 8) {
    uint64_t words[kLanes];
    std::memcpy(words, data + i, sizeof(words));
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] ^= words[lane];
  }
  uint64_t sum = 0;
  for (const uint64_t each : sums) sum ^= each;
  return sum;
}

}  // namespace

ReadMeter::ReadMeter(int n_threads, int64_t bytes)
    : pool_(n_threads),
      n_stretches_(std::max<int64_t>(bytes / kStretchBytes, 1)),
      buffer_("memory to read", static_cast<size_t>(n_stretches_ * kStretchBytes)) {
  pool_.parallel_for(n_stretches_, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(buffer_.data() + begin * kStretchBytes, 1, static_cast<size_t>((end - begin) * kStretchBytes));
  });
  measure();
}

double ReadMeter::measure() {
  std::atomic<uint64_t> all{0};                   // so that the pass can not be left out
  const auto start = std::chrono::steady_clock::now();
  pool_.parallel_for(n_stretches_, 1, [&](int64_t begin, int64_t end, int) {
    all += sum_of(buffer_.data() + begin * kStretchBytes, (end - begin) * kStretchBytes);
  });
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return static_cast<double>(n_stretches_ * kStretchBytes) / taken.count();
}

std::vector<double> measure_read_speed(int n_threads, int64_t bytes, int n_repetitions) {
  ReadMeter meter(n_threads, bytes);
  std::vector<double> speeds;
  for (int pass = 0; pass < n_repetitions; ++pass) speeds.push_back(meter.measure());
  return speeds;
}

}  // namespace beryl
