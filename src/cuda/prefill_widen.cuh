// Packed tiles (matvec_layout.h) to operands of 16-bit tensor products: 16 rows of W, 16 columns at a time, in the
// registers of a warp as mma.m16n8k16 and wgmma want their a: lane 4 r + t has rows r (a0, a2) and r + 8 (a1, a3).
//
// Which columns stand where within a tile is free, as long as x is laid out alike: x_column() says it. So each format
// takes its codes out of a word where they are, without moving bits from lane to lane.
//
// Weights are f16: codes of 2 to 8 bits times their scale, one rounding (FP4 with its 8-bit scales has none), times a
// power of two for each row of W that brings its largest to about 2^15 (its inverse is in the row's factor, which is
// applied to sums). FP8 and F16 need none of that. BF16 stays as it is: the other form of the instruction.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

#include "cuda/codec.cuh"
#include "cuda/matvec_layout.h"

namespace beryl::cuda {

// How the columns of 64 neighbours are dealt out: step (16 columns) 0..3, half of a step, lane t = 0..3, j = 0, 1.
enum class XOrder : uint8_t { kE2m1, kNibbles, kBytes, kNatural };
BERYL_HOST_DEVICE constexpr XOrder x_order(Format format) {
  switch (format) {
    case Format::kFp4G128:
    case Format::kMxfp4:
    case Format::kNvfp4: return XOrder::kE2m1;
    case Format::kQ8_0: return XOrder::kBytes;
    case Format::kFp8:
    case Format::kF16:
    case Format::kBf16: return XOrder::kNatural;
    default: return XOrder::kNibbles;
  }
}
BERYL_HOST_DEVICE constexpr int x_column(XOrder order, int step, int half, int t, int j) {
  switch (order) {
    case XOrder::kE2m1: return step / 2 * 32 + 16 * j + 4 * t + step % 2 * 2 + half;
    case XOrder::kNibbles: return step * 16 + 4 * t + half + 2 * j;
    case XOrder::kBytes: return step * 16 + 4 * t + 2 * half + j;
    case XOrder::kNatural: break;
  }
  return step * 16 + 8 * half + 2 * t + j;
}
// What E2M1 codes come out as: the bits of a code at f16's place are 2^-14 times its value, subnormals too.
BERYL_HOST_DEVICE constexpr float widened_unit(Format format) {
  return x_order(format) == XOrder::kE2m1 ? 0x1p-14f : 1.0f;
}
// Formats whose rows are brought to f16's range.
BERYL_HOST_DEVICE constexpr bool has_row_powers(Format format) {
  return format != Format::kFp8 && format != Format::kF16 && format != Format::kBf16;
}

// ---- bounds of a row ----

// At least the largest |scale| that step() makes (E2M1), or the largest |weight| (others), of row `row` of a tile.
template <Format kFormat>
__device__ __forceinline__ float tile_row_bound(const uint8_t* meta, int row) {
  float most = 0;
  const auto half_bits = [](uint32_t word, int index) { return half_at(word, index); };
  if constexpr (kFormat == Format::kFp4G128) {
    most = fabsf(bf16_at(reinterpret_cast<const uint32_t*>(meta)[row % 8], row / 8));
  } else if constexpr (kFormat == Format::kMxfp4) {
    const uint32_t exponents = reinterpret_cast<const uint32_t*>(meta)[row];
#pragma unroll
    for (int g = 0; g < 4; ++g) most = fmaxf(most, 2.0f * Mxfp4::scale(exponents, g));
  } else if constexpr (kFormat == Format::kNvfp4) {
    const uint2 scales = reinterpret_cast<const uint2*>(meta)[row];
#pragma unroll
    for (int g = 0; g < 8; ++g) most = fmaxf(most, Nvfp4::scale(scales, g));
  } else if constexpr (kFormat == Format::kQ4_0 || kFormat == Format::kQ5_0 || kFormat == Format::kQ8_0) {
    constexpr float kMost = kFormat == Format::kQ4_0 ? 8 : kFormat == Format::kQ5_0 ? 16 : 128;
    const uint2 scales = reinterpret_cast<const uint2*>(meta)[row];
#pragma unroll
    for (int g = 0; g < 4; ++g) most = fmaxf(most, kMost * fabsf(half_bits(g < 2 ? scales.x : scales.y, g % 2)));
  } else if constexpr (kFormat == Format::kQ4_1 || kFormat == Format::kQ5_1) {
    constexpr float kMost = kFormat == Format::kQ4_1 ? 15 : 31;
    const uint4 both = reinterpret_cast<const uint4*>(meta)[row];
#pragma unroll
    for (int g = 0; g < 4; ++g)
      most = fmaxf(most, kMost * fabsf(half_bits(g < 2 ? both.x : both.y, g % 2)) +
                             fabsf(half_bits(g < 2 ? both.z : both.w, g % 2)));
  } else if constexpr (kFormat == Format::kQ4_K || kFormat == Format::kQ5_K) {
    constexpr float kMost = kFormat == Format::kQ4_K ? 15 : 31;
    const uint2 groups = reinterpret_cast<const uint2*>(meta)[row];
    const uint32_t block = reinterpret_cast<const uint32_t*>(meta + 128)[row];
#pragma unroll
    for (int g = 0; g < 4; ++g)
      most = fmaxf(most, kMost * fabsf(half_at(block, 0)) * byte_at(groups.x, g) +
                             fabsf(half_at(block, 1)) * byte_at(groups.y, g));
  } else if constexpr (kFormat == Format::kQ6_K) {
    const uint2 groups = reinterpret_cast<const uint2*>(meta)[row];
    const float block = fabsf(__half2float(__ushort_as_half(reinterpret_cast<const uint16_t*>(meta + 128)[row])));
#pragma unroll
    for (int g = 0; g < 8; ++g) most = fmaxf(most, 32 * block * fabsf(static_cast<float>(Q6K::scale(groups, g))));
  }
  return most;
}

// ---- codes to operands ----

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
__device__ __forceinline__ uint32_t halves_of(float low, float high) {
  uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
__device__ __forceinline__ uint32_t both_halves(float value) { return halves_of(value, value); }

// Codes i and i + 4 (0..3) of a word of eight E2M1 codes, times 2^-14.
__device__ __forceinline__ uint32_t e2m1_halves(uint32_t word, int i) {
  const uint32_t top = word << (12 - 4 * i);  // the code's sign is the half's
  const uint32_t magnitude = i == 3 ? word >> 3 : word << (9 - 4 * i);
  return (top & 0x80008000u) | (magnitude & 0x0e000e00u);
}

// step(): operands of 16 columns (step 0..7 of a tile of 128), `power`: those of the lane's two rows. 16-bit weights
// are operands as they lie in a tile.
template <class Codec>
struct Widen;

template <>
struct Widen<Fp4G128> {
  __device__ static __forceinline__ void step(const Fp4G128::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t scale = both_halves(bf16_at(tile.scales, h) * power[h]);
      const uint32_t word = word_of(tile.codes.rows[h], step / 2);
      a[h] = multiply_halves(e2m1_halves(word, step % 2 * 2), scale);
      a[2 + h] = multiply_halves(e2m1_halves(word, step % 2 * 2 + 1), scale);
    }
  }
};
template <>
struct Widen<Mxfp4> {
  __device__ static __forceinline__ void step(const Mxfp4::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t scale = both_halves(2.0f * Mxfp4::scale(tile.exponents[h], step / 2) * power[h]);
      const uint32_t word = word_of(tile.codes.rows[h], step / 2);
      a[h] = multiply_halves(e2m1_halves(word, step % 2 * 2), scale);
      a[2 + h] = multiply_halves(e2m1_halves(word, step % 2 * 2 + 1), scale);
    }
  }
};
template <>
struct Widen<Nvfp4> {
  // The two codes of a register are 16 columns apart: of two groups.
  __device__ static __forceinline__ void step(const Nvfp4::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int group = step / 2 * 2;
      const uint32_t scales =
          halves_of(Nvfp4::scale(tile.scales[h], group) * power[h], Nvfp4::scale(tile.scales[h], group + 1) * power[h]);
      const uint32_t word = word_of(tile.codes.rows[h], step / 2);
      a[h] = multiply_halves(e2m1_halves(word, step % 2 * 2), scales);
      a[2 + h] = multiply_halves(e2m1_halves(word, step % 2 * 2 + 1), scales);
    }
  }
};

// Integer codes as halves: row half h, step 0..7 of 16 columns, half of the step. Codes without a sign come out smaller
// by half their range (kCentre), so that what is added for a min is small.
template <int kBits>
constexpr int kCentre = 1 << (kBits - 1);
template <int kBits, bool kSigned>
__device__ __forceinline__ uint32_t integer_halves(const IntegerCodes<kBits>& codes, int h, int step, int half) {
  const int slab = step / 4, odd = step % 4 / 2, word_half = step % 2;
  if constexpr (kBits == 8) {
    const uint32_t word = word_of(codes.words[2 * h + slab], step % 4) ^ 0x80808080u;
    return add_halves(byte_permute(word, 0x64646464u, half ? 0x4342 : 0x4140), 0xe480e480u);  // - 1152
  } else if constexpr (kBits == 4) {
    // 1024 + code, or 1024 + 16 code, which one fused operation brings back: exact.
    const uint32_t word = word_of(codes.nibbles[h], 2 * slab + word_half) >> (half ? 8 : 0);
    if (odd) return fma_halves((word & 0x00f000f0u) ^ (kSigned ? 0x64806480u : 0x64006400u), 0x2c002c00u, 0xd480d480u);
    return add_halves((word & 0x000f000fu) ^ (kSigned ? 0x64086408u : 0x64006400u), 0xe408e408u);
  } else {
    constexpr int kLow = kBits - 4;  // bits below the nibble
    constexpr uint32_t kLowMask = (1u << kLow) - 1, kMask = 0xfu << kLow;
    const uint32_t word = word_of(codes.nibbles[h], 2 * slab + word_half);
    const int shift = 8 * half + 4 * odd - kLow;  // of the nibble, down to its place
    const uint32_t high = shift < 0 ? word << -shift : word >> shift;
    const uint32_t low =
        kBits == 5 ? codes.low[h] >> (8 * half + step) : codes.low[h * 2 + slab] >> (8 * half + 2 * (step % 4));
    constexpr uint32_t kBase = 0x6400u + (kSigned ? kCentre<kBits> : 0);
    const uint32_t value = ((high & (kMask * 0x10001u)) ^ (kBase * 0x10001u)) | (low & (kLowMask * 0x10001u));
    return add_halves(value, kBits == 5 ? 0xe410e410u : 0xe420e420u);  // - 1024 - kCentre
  }
}

template <int kBits, bool kMins>
struct Widen<GroupOf32<kBits, kMins>> {
  using Codec = GroupOf32<kBits, kMins>;
  __device__ static __forceinline__ void step(const typename Codec::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = Codec::at(tile.scales[h], step / 2) * power[h];
      uint32_t min = 0;
      if constexpr (kMins)
        min = both_halves(
            __fmaf_rn(scale, static_cast<float>(kCentre<kBits>), Codec::at(tile.mins[h], step / 2) * power[h]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t code = integer_halves<kBits, !kMins>(tile.codes, h, step, half);
        a[2 * half + h] = kMins ? fma_halves(code, both_halves(scale), min) : multiply_halves(code, both_halves(scale));
      }
    }
  }
};
template <int kBits>
struct Widen<GroupOf32K<kBits>> {
  using Codec = GroupOf32K<kBits>;
  __device__ static __forceinline__ void step(const typename Codec::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = half_at(tile.block[h], 0) * power[h] * byte_at(tile.groups[h].x, step / 2);
      const float min = half_at(tile.block[h], 1) * power[h] * byte_at(tile.groups[h].y, step / 2);
      const uint32_t scales = both_halves(scale);
      const uint32_t mins = both_halves(__fmaf_rn(scale, static_cast<float>(kCentre<kBits>), -min));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[2 * half + h] = fma_halves(integer_halves<kBits, false>(tile.codes, h, step, half), scales, mins);
    }
  }
};
template <>
struct Widen<Q6K> {
  __device__ static __forceinline__ void step(const Q6K::Loaded& tile, const float (&power)[2], int step,
                                              uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float block = __half2float(__ushort_as_half(tile.block[h])) * power[h];
      const uint32_t scale = both_halves(block * static_cast<float>(Q6K::scale(tile.groups[h], step)));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        a[2 * half + h] = multiply_halves(integer_halves<6, true>(tile.codes, h, step, half), scale);
    }
  }
};
template <>
struct Widen<Fp8> {
  __device__ static __forceinline__ void step(const Fp8::Loaded& tile, const float (&)[2], int step, uint32_t (&a)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word = word_of(tile.codes.words[2 * h + step / 4], step % 4);
      a[h] = e4m3_to_f16(word);
      a[2 + h] = e4m3_to_f16(word >> 16);
    }
  }
};

}  // namespace beryl::cuda
