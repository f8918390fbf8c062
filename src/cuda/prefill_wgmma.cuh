// 16-bit products of four warps (wgmma, sm_90a): d[64][n] += a[64][16] · b[16][n], n = 64, 128 or 256, a from registers
// (each warp its 16 rows, as mma.m16n8k16 has them), b from shared memory, f32 sums.
//
// b is n rows of 64 values, 128 bytes each, whose 16-byte pieces are exchanged by the row: piece p of row n stands at
// p ^ (n % 8). A step of 16 columns is two pieces; descriptor() is that of step 0, kStepPieces on is the next.
//
// Between start and wait the registers of a and d belong to the tensor cores. hold() after the wait keeps the front end
// from moving what uses or replaces them before it; the assembler by itself knows about d, but not always about a: it
// has been seen to write the next operands into registers that were still being read. So tools/wgmma_hazards.py reads
// every build's machine code.
#pragma once

#include <cstdint>

#include "cuda/batch_wgmma.cuh"
#include "cuda/device.cuh"

namespace beryl::cuda {

#if BERYL_WGMMA

inline constexpr uint64_t kStepPieces = 2;  // 32 bytes, in units of 16

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
  for (int i = 0; i < kSteps; ++i)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
template <int kTiles>
__device__ __forceinline__ void hold(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

#define BERYL_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define BERYL_D16(n) BERYL_D4(n), BERYL_D4(n + 1), BERYL_D4(n + 2), BERYL_D4(n + 3)
#define BERYL_MULTIPLY_64(type)                                                          \
  asm volatile(                                                                          \
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                        \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"   \
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"                                    \
      : BERYL_D16(0), BERYL_D16(4)                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define BERYL_MULTIPLY_128(type)                                                         \
  asm volatile(                                                                          \
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0; }"                                    \
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12)                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define BERYL_MULTIPLY_256(type)                                                                              \
  asm volatile(                                                                                               \
      "{ .reg .pred add; setp.ne.b32 add, %133, 0;\n"                                                         \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                            \
      " {"                                                                                                    \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                      \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                      \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                      \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                      \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                      \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "          \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"        \
      "}, {%128, %129, %130, %131}, %132, add, 1, 1, 0; }"                                                    \
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12), BERYL_D16(16), BERYL_D16(20), BERYL_D16(24), \
        BERYL_D16(28)                                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))

// add 0: d = a · b.
template <bool kBf16>
__device__ __forceinline__ void multiply_step(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kBf16) BERYL_MULTIPLY_64("bf16");
  else BERYL_MULTIPLY_64("f16");
}
template <bool kBf16>
__device__ __forceinline__ void multiply_step(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kBf16) BERYL_MULTIPLY_128("bf16");
  else BERYL_MULTIPLY_128("f16");
}
template <bool kBf16>
__device__ __forceinline__ void multiply_step(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kBf16) BERYL_MULTIPLY_256("bf16");
  else BERYL_MULTIPLY_256("f16");
}

#undef BERYL_MULTIPLY_256
#undef BERYL_MULTIPLY_128
#undef BERYL_MULTIPLY_64
#undef BERYL_D16
#undef BERYL_D4

#endif

}  // namespace beryl::cuda
