// Counter-based random numbers (Philox 4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// A draw is a pure function of (seed, counter): no state, so a request's tokens do not depend on its neighbours, on
// the order of evaluation or on the device. The same function runs on the host and in CUDA kernels.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define BERYL_HOST_DEVICE __host__ __device__
#else
#define BERYL_HOST_DEVICE
#endif

namespace beryl {

struct Random4 {
  uint32_t x[4];
};

BERYL_HOST_DEVICE inline Random4 philox(uint64_t seed, uint64_t counter, uint64_t stream = 0) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Uniform in [0, 1) with 24 bits, exact in f32.
BERYL_HOST_DEVICE inline float to_unit_float(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }

}  // namespace beryl
