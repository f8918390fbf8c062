// 16-bit products of four warps (wgmma, sm_90a): d[64][128] += a[64][16] · b[16][128], a from registers (each warp its 16
// rows, as mma.m16n8k16 has them), b from shared memory, f32 sums.
//
// b is 128 rows of 64 values, 128 bytes each, whose 16-byte pieces are exchanged by the row: piece p of row n stands at
// p ^ (n % 8). A step of 16 columns is two pieces; descriptor() is that of step 0, kStepPieces on is the next.
//
// Between start and wait the registers of a and d belong to the tensor cores. hold() after the wait keeps the front end from
// moving what uses or replaces them before it; the assembler by itself knows about d, but not always about a: it has been seen to
// write the next operands into registers that were still being read. So tools/wgmma_hazards.py reads every build's machine
// code.
#pragma once

#include <cstdint>

#include "cuda/batch_wgmma.cuh"
#include "cuda/device.cuh"

namespace beryl::cuda {

#if BERYL_WGMMA

inline constexpr int kSlabColumns = 64;
inline constexpr int kPrefillTokens = 128;          // columns of d
inline constexpr int kSlabBytes = kPrefillTokens * kSlabColumns * 2;
inline constexpr uint64_t kStepPieces = 2;          // 32 bytes, in units of 16

__device__ __forceinline__ uint64_t slab_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (address & 0x3ffffu) >> 4;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kSteps>
__device__ __forceinline__ void hold(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
__device__ __forceinline__ void hold(float (&d)[16][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

#define BERYL_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define BERYL_D16(n) BERYL_D4(n), BERYL_D4(n + 1), BERYL_D4(n + 2), BERYL_D4(n + 3)
#define BERYL_MULTIPLY(type)                                                                      \
  asm volatile(                                                                                   \
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"                                              \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {"                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                    \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "          \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "          \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"            \
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0; }"                                             \
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12)                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

// add 0: d = a · b.
template <bool kBf16>
__device__ __forceinline__ void multiply_step(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kBf16) BERYL_MULTIPLY("bf16");
  else BERYL_MULTIPLY("f16");
}

#undef BERYL_MULTIPLY
#undef BERYL_D16
#undef BERYL_D4

#endif

}  // namespace beryl::cuda
