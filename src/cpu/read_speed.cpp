#include "cpu/read_speed.h"

#include <atomic>
#include <chrono>
#include <cstring>

#include "cpu/huge_buffer.h"
#include "cpu/parallel.h"

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

std::vector<double> measure_read_speed(int n_threads, int64_t bytes, int n_repetitions) {
  ThreadPool pool(n_threads);
  const int64_t n_stretches = bytes / kStretchBytes > 0 ? bytes / kStretchBytes : 1;
  const HugeBuffer buffer("memory to read", static_cast<size_t>(n_stretches * kStretchBytes));
  pool.parallel_for(n_stretches, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(buffer.data() + begin * kStretchBytes, 1, static_cast<size_t>((end - begin) * kStretchBytes));
  });
  std::atomic<uint64_t> all{0};                   // so that no pass can be left out
  std::vector<double> speeds;
  for (int pass = 0; pass <= n_repetitions; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(n_stretches, 1, [&](int64_t begin, int64_t end, int) {
      all += sum_of(buffer.data() + begin * kStretchBytes, (end - begin) * kStretchBytes);
    });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (pass > 0) speeds.push_back(static_cast<double>(n_stretches * kStretchBytes) / taken.count());
  }
  return speeds;
}

}  // namespace beryl
