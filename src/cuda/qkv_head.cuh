// One head of one token in the registers of a warp: norm, rope, and its way into the cache. What QkvFinish does, by
// itself (qkv_finish.cu) and within the decode kernel (decode_attend.cuh), with the same bits.
#pragma once

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace beryl::cuda {

inline constexpr int kHeadGroups = 2;         // of 4 pairs of a lane: head_dim up to 512

// Lane l holds pairs 4 l to 4 l + 3, and the same 128 further on: value j in `first`, value j + half in `second`. Pairs that a
// head does not have are 0. The weights of its norm and its cosines and sines lie likewise.
struct Head {
  float first[4 * kHeadGroups];
  float second[4 * kHeadGroups];
};

// function(i) for each pair that some lane has.
template <class Function>
__device__ __forceinline__ void for_pairs(int half, Function&& function) {
#pragma unroll
  for (int group = 0; group < kHeadGroups; ++group) {
    if (group * 128 >= half) break;
#pragma unroll
    for (int i = 4 * group; i < 4 * group + 4; ++i) function(i);
  }
}
__device__ __forceinline__ int first_pair(int group, int lane) { return group * 128 + lane * 4; }

__device__ __forceinline__ void fill_head(Head& head, float value) {
#pragma unroll
  for (int i = 0; i < 4 * kHeadGroups; ++i) head.first[i] = head.second[i] = value;
}
// Both halves of one row of floats, 16 bytes at a time. kAligned: half is a multiple of 4, and `from` of 16 bytes.
template <bool kAligned>
__device__ __forceinline__ void load_halves(Head& head, int half, int lane, const float* from) {
  fill_head(head, 0);
#pragma unroll
  for (int group = 0; group < kHeadGroups; ++group) {
    const int pair = first_pair(group, lane);
    if constexpr (kAligned) {
      if (pair >= half) continue;
      const float4 a = __ldg(reinterpret_cast<const float4*>(from + pair)), b = __ldg(reinterpret_cast<const float4*>(from + half + pair));
      float *first = head.first + 4 * group, *second = head.second + 4 * group;
      first[0] = a.x, first[1] = a.y, first[2] = a.z, first[3] = a.w;
      second[0] = b.x, second[1] = b.y, second[2] = b.z, second[3] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (pair + i < half) head.first[4 * group + i] = from[pair + i], head.second[4 * group + i] = from[half + pair + i];
    }
  }
}

__device__ __forceinline__ void norm_head(Head& head, int half, const Head& weight, float eps) {
  float sum = 0;
  for_pairs(half, [&](int i) {
    sum = __fmaf_rn(head.first[i], head.first[i], sum);
    sum = __fmaf_rn(head.second[i], head.second[i], sum);
  });
  sum = lane_sum(sum);
  const float factor = rsqrtf(__fmaf_rn(sum, __fdividef(1.0f, static_cast<float>(2 * half)), eps));
  for_pairs(half, [&](int i) {
    head.first[i] = __fmul_rn(__fmul_rn(head.first[i], factor), weight.first[i]);
    head.second[i] = __fmul_rn(__fmul_rn(head.second[i], factor), weight.second[i]);
  });
}

// turns: cosines, then sines.
__device__ __forceinline__ void turn_head(Head& head, int half, const Head& turns) {
  for_pairs(half, [&](int i) {
    const float cosine = turns.first[i], sine = turns.second[i], a = head.first[i], b = head.second[i];
    // Written out, so that every kernel rounds alike.
    head.first[i] = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
    head.second[i] = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
  });
}

// The scale of a row of an FP8 cache: absmax / 448.
__device__ __forceinline__ float cache_scale(const Head& head, int half) {
  float largest = 0;
  bool nan = false;                  // fmaxf would drop it
  for_pairs(half, [&](int i) {
    largest = fmaxf(largest, fmaxf(fabsf(head.first[i]), fabsf(head.second[i])));
    nan = nan || isnan(head.first[i]) || isnan(head.second[i]);
  });
  largest = lane_max(largest);
  if (__any_sync(kAllLanes, nan)) largest = NAN;
  return largest == 0.0f ? 1.0f : __fmul_rn(largest, 1.0f / 448.0f);
}

// One row of the cache, 2 · half codes from `to` on: the first `half` pairs. scale: of kFp8.
template <CacheElement kElement>
__device__ __forceinline__ void store_head(const Head& head, int half, int lane, void* to, float scale) {
  for_pairs(half, [&](int i) {
    const int pair = first_pair(i / 4, lane) + i % 4;
    if (pair >= half) return;
    if constexpr (kElement == CacheElement::kF32) {
      static_cast<float*>(to)[pair] = head.first[i];
      static_cast<float*>(to)[half + pair] = head.second[i];
    } else if constexpr (kElement == CacheElement::kBf16) {
      static_cast<__nv_bfloat16*>(to)[pair] = __float2bfloat16_rn(head.first[i]);
      static_cast<__nv_bfloat16*>(to)[half + pair] = __float2bfloat16_rn(head.second[i]);
    } else {
      static_cast<uint8_t*>(to)[pair] = encode_e4m3(__fdividef(head.first[i], scale));
      static_cast<uint8_t*>(to)[half + pair] = encode_e4m3(__fdividef(head.second[i], scale));
    }
  });
}

}  // namespace beryl::cuda
