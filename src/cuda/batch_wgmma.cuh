// Integer products of four warps (wgmma, sm_90a): 64 rows of FP4 weights from registers, x from shared memory.
//
// A product of one codec multiplies positive and negative codes apart, because prmt fills one of the two with copies of
// sign bits. Here every weight is 12 larger: then both tables are positive, those copies are zeros, and one OR joins
// the two. The sum over a group is 12 times the sum of its x too large, an integer that comes with x (XScale).
#pragma once

#include <cstdint>

#include "cuda/async.cuh"
#include "cuda/codec.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define BERYL_WGMMA 1
#else
#define BERYL_WGMMA 0
#endif

namespace beryl::cuda {

// Tables as in codec.cuh, of 12 + 2 |code| for positive codes, and of 12 - 2 |code|, backwards, for negative ones.
constexpr int kE2m1Offset = 12;
constexpr uint32_t kOffsetPositiveLow = 0x0f0e0d0cu, kOffsetPositiveHigh = 0x18141210u;
constexpr uint32_t kOffsetNegativeLow = 0x08060400u, kOffsetNegativeHigh = 0x0c0b0a09u;

// The four registers of a of one k-step of 32: a0..a3 as for mma.m16n8k32, for each of the four warps' 16 rows.
struct OffsetOperands {
  uint32_t a[4];
  OffsetOperands() = default;
  __device__ __forceinline__ OffsetOperands(const E2m1Codes& codes, int step, const E2m1Tables& tables) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word = word_of(codes.rows[h], step), upper = upper_half(word);
      a[h] = byte_permute(tables.positive_low, kOffsetPositiveHigh, word) |
             byte_permute(tables.negative_low, kOffsetNegativeHigh, invert(word, tables.minus_one));
      a[2 + h] = byte_permute(tables.positive_low, kOffsetPositiveHigh, upper) |
                 byte_permute(tables.negative_low, kOffsetNegativeHigh, invert(upper, tables.minus_one));
    }
  }
};

#if BERYL_WGMMA

// d[64][8 · kTiles] = a[64][128] · b[128][8 · kTiles], int8 to s32. d[n] as for mma.m16n8k32, n-tile by n-tile.
// b: [8 k-halves][kTiles][8 columns][16 bytes] in shared memory, written by bulk copies.
template <int kTiles>
struct TeamProduct {
  int d[kTiles][4];
  __device__ __forceinline__ void start(const OffsetOperands (&a)[4], const unsigned char* b) {
    // Matrix descriptor without swizzle: from one k-half to the next, and from n-tile to n-tile, in 16 bytes.
    constexpr uint64_t kStrides = uint64_t{kTiles * 128 / 16} << 16 | uint64_t{128 / 16} << 32;
    const uint64_t descriptor = kStrides | (shared_address(b) & 0x3ffffu) >> 4;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    step<false>(a[0].a, descriptor);
    step<true>(a[1].a, descriptor + 1 * kTiles * 16);
    step<true>(a[2].a, descriptor + 2 * kTiles * 16);
    step<true>(a[3].a, descriptor + 3 * kTiles * 16);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
  // d belongs to the tensor cores until then: the compiler must not read it earlier.
  __device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      asm volatile("" : "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])::"memory");
  }

 private:
  template <bool kAdd>
  __device__ __forceinline__ void step(const uint32_t (&a)[4], uint64_t b);
};

#define BERYL_D4(n) "+r"(d[n][0]), "+r"(d[n][1]), "+r"(d[n][2]), "+r"(d[n][3])
#define BERYL_D16(n) BERYL_D4(n), BERYL_D4(n + 1), BERYL_D4(n + 2), BERYL_D4(n + 3)

template <>
template <bool kAdd>
__device__ __forceinline__ void TeamProduct<4>::step(const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, add; }"
      : BERYL_D16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
template <>
template <bool kAdd>
__device__ __forceinline__ void TeamProduct<8>::step(const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, add; }"
      : BERYL_D16(0), BERYL_D16(4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}
template <>
template <bool kAdd>
__device__ __forceinline__ void TeamProduct<16>::step(const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, add; }"
      : BERYL_D16(0), BERYL_D16(4), BERYL_D16(8), BERYL_D16(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int{kAdd}));
}

#undef BERYL_D16
#undef BERYL_D4
#endif

}  // namespace beryl::cuda
