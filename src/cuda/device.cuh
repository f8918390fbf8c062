// Small device helpers that all kernels share.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace beryl::cuda {

// Programmatic dependent launch: everything that an earlier kernel wrote is visible after grid_wait(), and the next
// kernel may be put on free multiprocessors from then on. Every kernel calls it once, first.
__device__ __forceinline__ void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline constexpr unsigned kAllLanes = 0xffffffffu;

// Butterfly sums: every lane ends with the same bits.
template <int kLanes = 32>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}
template <int kLanes = 32>
__device__ __forceinline__ float lane_max(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

// Sum over a block of whole warps in a fixed order; every thread gets it. scratch: [32] floats of shared memory that
// nothing else uses between two calls' barriers.
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
  value = lane_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane_sum(lane < n_warps ? scratch[lane] : 0.0f);
  __syncthreads();
  return value;
}

__device__ __forceinline__ float gelu_tanh(float z) {
  const float inner = 0.7978845608028654f * (z + 0.044715f * z * z * z);
  return 0.5f * z * (1.0f + tanhf(inner));
}
__device__ __forceinline__ float silu(float z) { return z / (1.0f + expf(-z)); }

// value = high + low with 16 bits of mantissa in all.
struct Bf16Pair {
  __nv_bfloat16 high;
  __nv_bfloat16 low;
};
__device__ __forceinline__ Bf16Pair split_bf16(float value) {
  const __nv_bfloat16 high = __float2bfloat16_rn(value);
  return {high, __float2bfloat16_rn(value - __bfloat162float(high))};
}
__device__ __forceinline__ uint32_t pack_bf16(__nv_bfloat16 first, __nv_bfloat16 second) {
  return uint32_t{__bfloat16_as_ushort(first)} | uint32_t{__bfloat16_as_ushort(second)} << 16;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Shared memory by its address.
__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared4(uint32_t to, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory"); }

// 16 bytes to shared memory, asynchronous; only the first n_bytes are read, the rest become zero.
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from, int n_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n_bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16][8] += a[16][16] · b[16][8], bf16 with f32 sums.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// E4M3 as in base/float_formats.h; NaN codes are never written by this backend's own encoder.
__device__ __forceinline__ float decode_e4m3(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7f) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(uint32_t{bits & 0x80u} << 24 | magnitude << 20) * 0x1p120f;
}
// Rounds to nearest even, saturates at 448.
__device__ __forceinline__ uint8_t encode_e4m3(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(pair) : "f"(value));
  return static_cast<uint8_t>(pair);
#else
  const uint32_t bits = __float_as_uint(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const float absolute = fabsf(value);
  if (!(absolute < 448.0f)) return sign | (absolute >= 448.0f ? 0x7e : 0x7f);
  if (absolute < 0x1p-6f) return sign | static_cast<uint8_t>(rintf(absolute * 0x1p9f));
  const uint32_t rounded = (bits & 0x7fffffffu) + 0x7ffffu + (bits >> 20 & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code > 0x7e ? 0x7e : code);
#endif
}

// Two E4M3 codes in the high bytes of two halves to two bf16, 2^-120 times their values, subnormals included: the bits of a code,
// moved down by four.
__device__ __forceinline__ uint32_t small_of_e4m3(uint32_t high_bytes) { return (high_bytes & 0x80008000u) | (high_bytes >> 4 & 0x07f007f0u); }
// Their values.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t high_bytes) {
  const uint32_t bits = small_of_e4m3(high_bytes);
  const __nv_bfloat162 scale = __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80));   // 2^120
  __nv_bfloat162 value;
  memcpy(&value, &bits, sizeof(bits));
  value = __hmul2(value, scale);
  uint32_t result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

// Two E4M3 codes, in the lower half of `codes`, to two f16, which hold them exactly.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(codes));
  return halves;
#else
  // The bits of a code, moved down by one, are an f16 number 2^-8 times its value, subnormals included.
  const uint32_t high_bytes = __byte_perm(codes, 0, 0x1404);
  const uint32_t bits = (high_bytes & 0x80008000u) | ((high_bytes & 0x7f007f00u) >> 1);
  uint32_t halves;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(bits), "r"(0x5c005c00u));
  return halves;
#endif
}

}  // namespace beryl::cuda
