// One head of one token in the registers of a warp: norm, rope, and its way into the cache. What QkvFinish does, by
// itself (qkv_finish.cu) and within the decode kernel (decode_attention.cuh), with the same bits.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace beryl::cuda {

inline constexpr int kMaxHeadPairs = 8;       // of a lane: head_dim up to 512

// Lane l holds pairs l, l + 32, ... : value j in first[i], value j + half in second[i], j = l + 32 i.
struct Head {
  float first[kMaxHeadPairs];
  float second[kMaxHeadPairs];
};

// half: an int, or std::integral_constant of a multiple of 32, for which nothing has to be asked.
template <class Half, class Function>
__device__ __forceinline__ void for_pairs(Half half, int lane, Function&& function) {
#pragma unroll
  for (int i = 0; i < kMaxHeadPairs; ++i) {
    const int pair = lane + 32 * i;
    if constexpr (std::is_same_v<Half, int>) {
      if (pair < half) function(i, pair);
    } else {
      static_assert(Half::value % 32 == 0);
      if (32 * i < Half::value) function(i, pair);
    }
  }
}

template <class Half>
__device__ __forceinline__ void norm_head(Head& head, Half half, int lane, const float* weight, float eps) {
  float sum = 0;
  for_pairs(half, lane, [&](int i, int) {
    sum = __fmaf_rn(head.first[i], head.first[i], sum);
    sum = __fmaf_rn(head.second[i], head.second[i], sum);
  });
  sum = lane_sum(sum);
  const float factor = rsqrtf(__fmaf_rn(sum, __fdividef(1.0f, static_cast<float>(2 * half)), eps));
  for_pairs(half, lane, [&](int i, int pair) {
    head.first[i] = head.first[i] * factor * (weight == nullptr ? 1.0f : __ldg(weight + pair));
    head.second[i] = head.second[i] * factor * (weight == nullptr ? 1.0f : __ldg(weight + half + pair));
  });
}

// table: cosines, then sines, [half] each.
template <class Half>
__device__ __forceinline__ void turn_head(Head& head, Half half, int lane, const float* table) {
  for_pairs(half, lane, [&](int i, int pair) {
    const float cosine = table[pair], sine = table[half + pair], a = head.first[i], b = head.second[i];
    // Written out, so that every kernel rounds alike.
    head.first[i] = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
    head.second[i] = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
  });
}

// The scale of a row of an FP8 cache: absmax / 448.
template <class Half>
__device__ __forceinline__ float cache_scale(const Head& head, Half half, int lane) {
  float largest = 0;
  bool nan = false;                  // fmaxf would drop it
  for_pairs(half, lane, [&](int i, int) {
    largest = fmaxf(largest, fmaxf(fabsf(head.first[i]), fabsf(head.second[i])));
    nan = nan || isnan(head.first[i]) || isnan(head.second[i]);
  });
  largest = lane_max(largest);
  if (__any_sync(kAllLanes, nan)) largest = NAN;
  return largest == 0.0f ? 1.0f : __fmul_rn(largest, 1.0f / 448.0f);
}

// One row of the cache, head_dim codes from `to` on. scale: of kFp8.
template <CacheElement kElement, class Half>
__device__ __forceinline__ void store_head(const Head& head, Half half, int lane, void* to, float scale) {
  for_pairs(half, lane, [&](int i, int pair) {
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
