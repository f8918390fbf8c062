// Random weights of any format, made block by block: every bit pattern of the codes, sane scales. For op cases and
// benchmarks, which need weights that no encoder has smoothed.
#pragma once

#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl {

// SplitMix64: a fast stream for test data (draws that users see come from base/rng.h).
class RandomStream {
 public:
  explicit RandomStream(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  int below(int count) { return static_cast<int>((bits() >> 32) * static_cast<uint64_t>(count) >> 32); }
  float between(float low, float high) { return low + (high - low) * (static_cast<float>(bits() >> 40) * 0x1p-24f); }

 private:
  uint64_t state_;
};

struct RandomMatrix {
  HostMatrix matrix;        // owns its storage; codes lie at an odd address for odd seeds, as a file may have them
  HostMatrix without_mins;  // the same with every block's min zeroed: |w0| + |w - w0| bounds what w is the sum of
};

// Weights are of the order 2 / sqrt(cols), so that a product with inputs of order 1 is of order 1. One scale in
// sixteen is zero, negative or subnormal where the format has such. Requires fits(format, cols).
RandomMatrix random_matrix(Format format, int64_t rows, int64_t cols, int64_t stack, float tensor_scale, uint64_t seed);

}  // namespace beryl
