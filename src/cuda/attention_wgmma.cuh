// bf16 products of four warps for attention (wgmma, sm_90a): d[64][n] += a[64][16] · b[16][n], n = 64, 128 or 256, f32
// sums; a from registers (each warp its 16 rows, as mma.m16n8k16 has them) or from shared memory.
//
// Operands in shared memory are slabs: rows of 64 values, 128 bytes, whose 16-byte pieces are exchanged by the row
// (piece p of row r stands at p ^ (r % 8)), as the tensor copy engine writes them.
//   keys, q, weights   a slab's rows are the n (or m) of the product: slab_descriptor(); a step of 16 columns is
//                      kStepPieces
//   values             a slab's rows are the 16 of the product, its columns a part of n: values_descriptor(), and
//                      kTransposed; a step of 16 rows is kStepRows
// For what holds between start and wait see prefill_wgmma.cuh.
#pragma once

#include "cuda/prefill_wgmma.cuh"

namespace beryl::cuda {

#if BERYL_WGMMA

inline constexpr uint64_t kStepRows = 16 * 128 / 16;  // in units of 16 bytes

// slab_bytes: from 64 columns of n to the next 64.
template <int kSlabBytes>
__device__ __forceinline__ uint64_t values_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kEightRows | uint64_t{kSlabBytes / 16} << 16 | (address & 0x3ffffu) >> 4;
}

#define BERYL_D4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define BERYL_D16(n) BERYL_D4(n), BERYL_D4(n + 1), BERYL_D4(n + 2), BERYL_D4(n + 3)

// add 0: d = a · b.
template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38; }"
      : BERYL_D16(0), BERYL_D16(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70; }"
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[32][4], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, {%128, %129, %130, %131}, %132, add, 1, 1, %134; }"
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12), BERYL_D16(16), BERYL_D16(20),
        BERYL_D16(24), BERYL_D16(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[8][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, add, 1, 1, 0, %35; }"
      : BERYL_D16(0), BERYL_D16(4)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[16][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, %67; }"
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposed));
}

template <int kTransposed>
__device__ __forceinline__ void multiply_attention(float (&d)[32][4], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, add, 1, 1, 0, %131; }"
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12), BERYL_D16(16), BERYL_D16(20),
        BERYL_D16(24), BERYL_D16(28)
      : "l"(a), "l"(b), "r"(add), "n"(kTransposed));
}

#undef BERYL_D16
#undef BERYL_D4

#endif

}  // namespace beryl::cuda
