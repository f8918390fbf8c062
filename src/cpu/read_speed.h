// How fast host memory can be read: the ceiling of decoding on a CPU, whose time is that of reading all weights once.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/huge_buffer.h"
#include "cpu/parallel.h"

namespace beryl {

// Reads `bytes` of memory in huge pages, each thread a stretch of its own. bytes should exceed the caches by far.
class ReadMeter {
 public:
  // n_threads 0: one a core. The memory is written once and read once.
  ReadMeter(int n_threads, int64_t bytes);
  // Bytes a second of one pass over it.
  double measure();

 private:
  ThreadPool pool_;
  int64_t n_stretches_;
  HugeBuffer buffer_;
};

// Of n_repetitions passes of a meter.
std::vector<double> measure_read_speed(int n_threads, int64_t bytes, int n_repetitions);

}  // namespace beryl
