// What a row of the next step needs besides its embedding: its id and position, and the cosines and sines that the position asks for.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace beryl::cuda {

// One rope of a token, by all threads of a block. Angles reach 262,144 radians and more, so the product and the reduction are in double;
// only the results are rounded.
__device__ __forceinline__ void turn_rope(const TurnRopesArgs& args, int rope, int64_t token, int32_t position) {
  const int n_pairs = args.n_pairs[rope];
  float* table = args.tables[rope] + token * 2 * n_pairs;
  for (int pair = threadIdx.x; pair < n_pairs; pair += blockDim.x) {
    double sine, cosine;
    sincos(position * args.frequencies[rope][pair], &sine, &cosine);
    table[pair] = static_cast<float>(cosine);
    table[n_pairs + pair] = static_cast<float>(sine);
  }
}

// By one thread.
__device__ __forceinline__ void advance_row(const AdvanceArgs& args, int64_t row, bool valid, int32_t id) {
  if (valid) args.ids[row] = id;
  args.positions[row] += 1;
  args.sampling[row].draw += 1;
}

}  // namespace beryl::cuda
