// Scalar arithmetic that every kernel for packed weights shares, bit for bit: the same row of x gives the same y
// whether it is computed with 1 row or with 8, by whichever kernel.
//
//   digits   a group of 128 columns of x as a tensor core takes it (codec.cuh): write_group
//   norm     the factor of a norm from the sums of squares of its groups: group_squares, norm_factor_of
//   y        activations in few instructions, and the rounding of every result: round_result
#pragma once

#include <cstdint>

#include "cuda/codec.cuh"
#include "cuda/device.cuh"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

__device__ __forceinline__ float4 load_weight4(const float* weight, int col) {
  return weight != nullptr ? __ldg(reinterpret_cast<const float4*>(weight + col)) : make_float4(1, 1, 1, 1);
}
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w));
}
__device__ __forceinline__ float4 times(float4 a, float b) { return times(a, make_float4(b, b, b, b)); }
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmaf_rn(a.x, b.x, sum))));
}

// ---- norms ----

// The sum of squares of a group of 128 columns, in every lane of the warp; a lane has 4 neighbouring columns.
__device__ __forceinline__ float group_squares(float4 x) { return lane_sum(dot(x, x, 0.0f)); }
// 1 / sqrt(mean of squares + eps) from the groups' sums, which stand at a multiple of 16 bytes: every fourth group to one sum, then
// those four.
__device__ __forceinline__ float norm_factor_of(const float* sums, int n_groups, float inverse_cols, float eps) {
  float parts[4] = {};
  const int whole = n_groups & ~3;
#pragma unroll 4
  for (int group = 0; group < whole; group += 4) {
    const float4 four = *reinterpret_cast<const float4*>(sums + group);
    parts[0] = __fadd_rn(parts[0], four.x);
    parts[1] = __fadd_rn(parts[1], four.y);
    parts[2] = __fadd_rn(parts[2], four.z);
    parts[3] = __fadd_rn(parts[3], four.w);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (whole + i < n_groups) parts[i] = __fadd_rn(parts[i], sums[whole + i]);
  return rsqrtf(__fmaf_rn(__fadd_rn(__fadd_rn(parts[0], parts[1]), __fadd_rn(parts[2], parts[3])), inverse_cols, eps));
}

// ---- activations and results ----

// Relative error about 1e-6.
__device__ __forceinline__ float quick_gelu_tanh(float z) {
  const float exponent = 1.5957691216057308f * (z + 0.044715f * z * z * z);
  return z - __fdividef(z, 1.0f + __expf(exponent));
}
__device__ __forceinline__ float quick_silu(float z) { return __fdividef(z, 1.0f + __expf(-z)); }

// Results have 23 bits: rounded to even, the lowest bit is 0 (it is a flag where rows are exchanged within a launch).
__device__ __forceinline__ uint32_t round_result(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (isnan(value) ? bits : bits + (bits >> 1 & 1u)) & ~1u;
}

// ---- digits ----

__host__ __device__ constexpr bool needs_x_sums(Format format) {
  return format == Format::kQ4_1 || format == Format::kQ5_1 || format == Format::kQ4_K || format == Format::kQ5_K;
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}
// The largest magnitude of a warp's 128 columns, as bits, so that a NaN anywhere is the largest and makes every result
// a NaN.
__device__ __forceinline__ uint32_t group_range(float4 v) {
  const float largest = max_or_nan(max_or_nan(fabsf(v.x), fabsf(v.y)), max_or_nan(fabsf(v.z), fabsf(v.w)));
  return __reduce_max_sync(kAllLanes, __float_as_uint(largest) & 0x7fffffffu);
}

// A lane's 4 columns of a group as integers: value = scale · (256 · high + low), each word 4 int8.
struct IntegerDigits {
  uint32_t high, low;
  int sum;                          // of the lane's 4 integers
  float scale;                      // of the group, times x_scale (a power of two)
};
__device__ __forceinline__ IntegerDigits integer_digits(float4 v, float x_scale) {
  constexpr float kLargest = 32512.0f;        // 127 · 256
  constexpr float kRounder = 12582912.0f;     // 1.5 · 2^23: adding it leaves the rounded integer in the low bits
  const float range = __uint_as_float(group_range(v));
  const float inverse = range > 0x1p-110f ? __fmul_rn(kLargest, approximate_reciprocal(range)) : 0.0f;
  const uint32_t q0 = __float_as_uint(__fmaf_rn(v.x, inverse, kRounder)),
                 q1 = __float_as_uint(__fmaf_rn(v.y, inverse, kRounder));
  const uint32_t q2 = __float_as_uint(__fmaf_rn(v.z, inverse, kRounder)),
                 q3 = __float_as_uint(__fmaf_rn(v.w, inverse, kRounder));
  IntegerDigits digits;
  digits.high =
      byte_permute(byte_permute(q0 + 128, q1 + 128, 0x0051), byte_permute(q2 + 128, q3 + 128, 0x0051), 0x5410);
  digits.low = byte_permute(byte_permute(q0, q1, 0x0040), byte_permute(q2, q3, 0x0040), 0x5410);
  digits.sum = static_cast<int>(q0 + q1 + q2 + q3 - 4u * 0x4b400000u);
  digits.scale = __fmul_rn(range, x_scale * (1.0f / kLargest));
  return digits;
}

// A lane's 4 columns as two digits of 16-bit floats, two a word.
struct FloatDigits {
  uint32_t high[2], low[2];
  float scale;                      // of the group
};
__device__ __forceinline__ FloatDigits float_digits(XForm form, float4 v) {
  FloatDigits digits;
  float inverse = 1.0f;
  digits.scale = 1.0f;
  const uint32_t bits = group_range(v);
  if (form == XForm::kF16 && bits >= 0x00800000u) {
    const uint32_t exponent = bits & 0x7f800000u;          // the largest becomes 1 to 2
    digits.scale = __uint_as_float(exponent);
    inverse = exponent < 0x7f000000u ? __uint_as_float(0x7f000000u - exponent) : 0x1p-127f;
    if (exponent == 0x7f800000u) digits.scale = __uint_as_float(0x7fc00000u);
  }
  const float values[4] = {__fmul_rn(v.x, inverse), __fmul_rn(v.y, inverse), __fmul_rn(v.z, inverse),
                           __fmul_rn(v.w, inverse)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float a = values[2 * i], b = values[2 * i + 1];
    if (form == XForm::kF16) {
      const __half ha = __float2half_rn(a), hb = __float2half_rn(b);
      const __half la = __float2half_rn(__fmul_rn(__fsub_rn(a, __half2float(ha)), 2048.0f));
      const __half lb = __float2half_rn(__fmul_rn(__fsub_rn(b, __half2float(hb)), 2048.0f));
      digits.high[i] = uint32_t{__half_as_ushort(ha)} | uint32_t{__half_as_ushort(hb)} << 16;
      digits.low[i] = uint32_t{__half_as_ushort(la)} | uint32_t{__half_as_ushort(lb)} << 16;
    } else {
      const Bf16Pair pa = split_bf16(a), pb = split_bf16(b);
      digits.high[i] = pack_bf16(pa.high, pb.high);
      digits.low[i] = pack_bf16(pa.low, pb.low);
    }
  }
  return digits;
}

// Byte offset of a lane's words in the digits of one row and group of 128 columns, as the codecs read them:
// [pair of k-steps][digit][t][16 bytes], 256 bytes of integers (the low digit 64 bytes on) or 512 of floats (likewise;
// the second word 16 bytes on).
__device__ __forceinline__ int integer_digit_offset(int lane) {
  const int word = lane / 4, t = lane % 4;    // word = 2 · k-step + half
  return word / 4 * 128 + t * 16 + word % 4 * 4;
}
__device__ __forceinline__ int float_digit_offset(int lane) {
  const int step = lane / 4, half = lane / 2 % 2, t = lane % 2 * 2;
  return step / 2 * 128 + t * 16 + (step % 2 * 2 + half) * 4;
}

// Sums of 32 neighbouring columns, in lanes 0, 8, 16 and 24 (and the others of their eight): the 4 sums of formats with
// mins, in units of the group's scale.
__device__ __forceinline__ float sum_of_32(int lane_sum_of_4, float x_scale) {
  int sum = lane_sum_of_4;
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return __int2float_rn(sum) * __uint_as_float(0x7f000000u - __float_as_uint(x_scale));      // 1 / a power of two
}

// A warp writes a group of 128 columns of one row in digits; a lane has 4 neighbouring columns. needs_sums: sums[4].
__device__ __forceinline__ void write_group(XForm form, bool needs_sums, float x_scale, float4 v, int lane,
                                            unsigned char* codes, float* scale, float* sums) {
  if (form == XForm::kInt16) {
    const IntegerDigits digits = integer_digits(v, x_scale);
    unsigned char* to = codes + integer_digit_offset(lane);
    *reinterpret_cast<uint32_t*>(to) = digits.high;
    *reinterpret_cast<uint32_t*>(to + 64) = digits.low;
    if (needs_sums) {
      const float sum = sum_of_32(digits.sum, x_scale);
      if (lane % 8 == 0) sums[lane / 8] = sum;
    }
    if (lane == 0) *scale = digits.scale;
  } else {
    const FloatDigits digits = float_digits(form, v);
    unsigned char* to = codes + float_digit_offset(lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint32_t*>(to + i * 16) = digits.high[i];
      *reinterpret_cast<uint32_t*>(to + i * 16 + 64) = digits.low[i];
    }
    if (lane == 0) *scale = digits.scale;
  }
}

}  // namespace beryl::cuda
