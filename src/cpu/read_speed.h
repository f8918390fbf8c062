// How fast host memory can be read: the ceiling of decoding on a CPU, whose time is that of reading all weights once.
#pragma once

#include <cstdint>
#include <vector>

namespace beryl {

// Bytes a second of n_repetitions passes over `bytes` of memory in huge pages, each thread reading a stretch of its own; one
// pass before them is not counted. bytes should exceed the caches by far. n_threads 0: one a core.
std::vector<double> measure_read_speed(int n_threads, int64_t bytes, int n_repetitions);

}  // namespace beryl
