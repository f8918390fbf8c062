// The mergeable state of a softmax-weighted sum, and how two are joined. Both forms of attention (split over blocks, and
// one block for all keys) join the same splits in the same order with these functions, so their bits agree.
#pragma once

#include "cuda/device.cuh"

namespace beryl::cuda {

// Factors of the older and the newer state: sums = sums · older + new_sums · newer.
struct MergeFactors {
  float older;
  float newer;
};

// largest: the largest score of all states before and including the new one.
__device__ __forceinline__ MergeFactors merge_factors(float before, float added, float largest) {
  if (largest == -INFINITY) return {1.0f, 0.0f};
  return {expf(before - largest), expf(added - largest)};
}

__device__ __forceinline__ float merge_value(float sum, float added, MergeFactors factors) {
  return __fmaf_rn(sum, factors.older, __fmul_rn(added, factors.newer));
}

// One step of the running softmax within a split.
struct RunningSoftmax {
  float largest = -INFINITY;
  float sum = 0;

  // The factor for all that was summed so far, given the largest of the new scores.
  __device__ __forceinline__ float raise(float new_largest) {
    const float before = largest;
    largest = fmaxf(largest, new_largest);
    return largest == -INFINITY ? 1.0f : expf(before - largest);
  }
  __device__ __forceinline__ float weight(float score) const { return largest == -INFINITY ? 0.0f : expf(score - largest); }
};

__device__ __forceinline__ float cap_score(float score, float softcap) { return softcap * tanhf(__fdividef(score, softcap)); }
__device__ __forceinline__ float attention_score(float product, float scale, float softcap) {
  const float score = product * scale;
  return softcap > 0.0f ? cap_score(score, softcap) : score;
}

}  // namespace beryl::cuda
