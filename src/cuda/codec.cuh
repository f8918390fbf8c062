// How one warp multiplies a tile of weights (matvec_layout.h) with the rows of x, format by format.
//
// A codec has
//   Loaded                      a lane's share of a tile in registers, codes and meta data
//   load(...)                   shared memory to Loaded
//   Product<kTiles>             one tile times x, in steps: start,
//                               step 0..3 (kSteps), and finish: acc[n][0 and 1] += rows lane / 4 and lane / 4 + 8 of
//                               the tile times row 4 n + lane % 4 of x
//   kX, kXScale, kNeedsSums     in which form it wants x (below), what the scales of x are multiplied by, and whether
//                               it has mins
//
// x as integers (kInt16): for each row and group of 128 columns a scale, and 16-bit integers in two int8 digits that
// are two columns of the tensor core's b: 256 · high + low. Sums over a group are exact integers, so their order does
// not matter; what has an order is the float sum over groups, the columns of a warp from left to right. x as floats
// (kF16, kBf16): two digits as well, high + low: 22 bits for f16 (scaled by a power of two; low counts 2^-11), 16 for
// bf16 (not scaled). Products with the weights are exact in f32.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/mma.cuh"

namespace beryl::cuda {

enum class XForm : uint8_t { kInt16, kF16, kBf16 };

// Constants that must be in each lane's own registers: from uniform ones they would come back by a move for every use.
struct E2m1Tables {
  uint32_t positive_low, negative_low;
  uint32_t minus_one;
};

// What a lane reads of x, as offsets into shared memory: its row's digits, and scales and sums of the rows of its
// columns of d.
template <int kTiles>
struct LaneX {
  int codes[kTiles];                // + group · code_stride (+ 128 a piece of 16 bytes)
  int scales[kTiles];               // f32, + group · scale_stride
  int sums[kTiles];                 // f32 [4]: sums of the group's 4 parts of 32 columns, + group · 4 · scale_stride
  int code_stride;
  int scale_stride;
  E2m1Tables tables;
};

template <int kTiles>
struct IntegerX {
  uint32_t b[kTiles][8];            // [k-step][half]
  float scale[kTiles];
  E2m1Tables tables;
};

template <int kTiles>
__device__ __forceinline__ void load_x(const unsigned char* shared, const LaneX<kTiles>& x, int group,
                                       IntegerX<kTiles>& out) {
  out.tables = x.tables;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const uint4* from = reinterpret_cast<const uint4*>(shared + x.codes[n] + group * x.code_stride);
    const uint4 low = from[0], high = from[8];
    out.b[n][0] = low.x, out.b[n][1] = low.y, out.b[n][2] = low.z, out.b[n][3] = low.w;
    out.b[n][4] = high.x, out.b[n][5] = high.y, out.b[n][6] = high.z, out.b[n][7] = high.w;
    out.scale[n] = *reinterpret_cast<const float*>(shared + x.scales[n] + group * x.scale_stride);
  }
}
__device__ __forceinline__ void clear(int (&d)[4]) { d[0] = d[1] = d[2] = d[3] = 0; }
template <int kTiles>
__device__ __forceinline__ float4 load_x_sums(const unsigned char* shared, const LaneX<kTiles>& x, int group, int n) {
  return *reinterpret_cast<const float4*>(shared + x.sums[n] + group * 4 * x.scale_stride);
}

__device__ __forceinline__ uint32_t word_of(uint4 v, int index) {
  return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}
__device__ __forceinline__ uint32_t byte_permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}
// Sums of the two digits' columns to one float.
__device__ __forceinline__ float join_digits(int high, int low) { return __int2float_rn(high * 256 + low); }
__device__ __forceinline__ float half_at(uint32_t word, int index) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(index ? word >> 16 : word & 0xffffu)));
}
__device__ __forceinline__ float bf16_at(uint32_t word, int index) {
  return __uint_as_float(index ? word & 0xffff0000u : word << 16);
}
// Byte `index` as a float: the bytes of 2^23 + value.
__device__ __forceinline__ float byte_at(uint32_t word, int index) {
  return __uint_as_float(byte_permute(word, 0x4b000000u, 0x7650u + index)) - 8388608.0f;
}

// The products of formats with several scales a tile: sums of scale · (exact sum of a group), times the scale of x at
// the end.
template <int kTiles>
struct FloatSums {
  IntegerX<kTiles> x;
  float sum[kTiles][2];
  template <class Loaded>
  __device__ __forceinline__ void start(const Loaded&, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                        int group) {
    load_x(shared, lane_x, group, x);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) sum[n][0] = sum[n][1] = 0.0f;
  }
  __device__ __forceinline__ void add(int n, const int (&d)[4], float scale0, float scale1) {
    sum[n][0] = __fmaf_rn(join_digits(d[0], d[1]), scale0, sum[n][0]);
    sum[n][1] = __fmaf_rn(join_digits(d[2], d[3]), scale1, sum[n][1]);
  }
  template <class Loaded>
  __device__ __forceinline__ void finish(const Loaded&, float (&acc)[kTiles][2]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      acc[n][0] = __fmaf_rn(sum[n][0], x.scale[n], acc[n][0]);
      acc[n][1] = __fmaf_rn(sum[n][1], x.scale[n], acc[n][1]);
    }
  }
};

// ---- E2M1
// ------------------------------------------------------------------------------------------------------------------ A
// nibble of the selector of prmt takes one of 8 bytes, or, with its upper bit set, 8 copies of that byte's sign. So a
// word of codes s·mmm is its own selector: from a table without negative bytes negative codes give 0; from a table of
// negative bytes, with the inverted word as selector (so the table stands backwards), positive codes give -1, or 0 for
// magnitude 0. The first table holds m + 1, the second -m, and their sum, which the tensor core forms, is the doubled
// value.
constexpr uint32_t kPositiveLow = 0x04030200u, kPositiveHigh = 0x0d090705u;   // 0, 2, 3, 4, 5, 7, 9, 13
constexpr uint32_t kNegativeLow = 0xfcfaf8f4u, kNegativeHigh = 0x00fffefdu;   // -12, -8, -6, -4, -3, -2, -1, 0

// prmt fills the pipe of logic and shifts, so these two run on that of the multiplications: the upper half of a word
// (in the lower half of the result), and ~word = word · -1 - 1.
__device__ __forceinline__ uint32_t upper_half(uint32_t word) {
  return static_cast<uint32_t>(__dp2a_lo(static_cast<int>(word), 0x0100, 0));
}
__device__ __forceinline__ uint32_t invert(uint32_t word, uint32_t minus_one) {
  uint32_t result;
  asm("mad.lo.u32 %0, %1, %2, %2;" : "=r"(result) : "r"(word), "r"(minus_one));
  return result;
}

struct E2m1Codes {
  uint4 rows[2];                    // rows lane / 4 and lane / 4 + 8; a word a k-step: half 0 below, half 1 above
  __device__ __forceinline__ void load(const unsigned char* codes, int lane) {
    rows[0] = reinterpret_cast<const uint4*>(codes)[lane];
    rows[1] = reinterpret_cast<const uint4*>(codes)[lane + 32];
  }
};
struct E2m1Operands {
  uint32_t positive[4], negative[4];   // a0..a3 of mma.m16n8k32; a0, a1 and a2, a3 are those of two mma.m16n8k16
  __device__ __forceinline__ E2m1Operands(const E2m1Codes& codes, int step, const E2m1Tables& tables) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t word = word_of(codes.rows[h], step), upper = upper_half(word);
      positive[h] = byte_permute(tables.positive_low, kPositiveHigh, word);
      positive[2 + h] = byte_permute(tables.positive_low, kPositiveHigh, upper);
      negative[h] = byte_permute(tables.negative_low, kNegativeHigh, invert(word, tables.minus_one));
      negative[2 + h] = byte_permute(tables.negative_low, kNegativeHigh, invert(upper, tables.minus_one));
    }
  }
};

struct Fp4G128 {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 0.5f;
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    E2m1Codes codes;
    uint32_t scales;                // bf16 of rows lane / 4 and lane / 4 + 8
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
    tile.scales = reinterpret_cast<const uint32_t*>(meta)[lane / 4];
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product {
    IntegerX<kTiles> x;
    int d[kTiles][4];
    __device__ __forceinline__ void start(const Loaded&, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int group) {
      load_x(shared, lane_x, group, x);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) clear(d[n]);
    }
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
      const E2m1Operands a(tile.codes, i, this->x.tables);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint32_t b0 = x.b[n][2 * i], b1 = x.b[n][2 * i + 1];
        mma_s8(d[n], a.positive[0], a.positive[1], a.positive[2], a.positive[3], b0, b1);
        mma_s8(d[n], a.negative[0], a.negative[1], a.negative[2], a.negative[3], b0, b1);
      }
    }
    __device__ __forceinline__ void finish(const Loaded& tile, float (&acc)[kTiles][2]) const {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        acc[n][0] = __fmaf_rn(join_digits(d[n][0], d[n][1]), __fmul_rn(bf16_at(tile.scales, 0), x.scale[n]), acc[n][0]);
        acc[n][1] = __fmaf_rn(join_digits(d[n][2], d[n][3]), __fmul_rn(bf16_at(tile.scales, 1), x.scale[n]), acc[n][1]);
      }
    }
  };
};

struct Mxfp4 {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 1.0f;       // scale() is that of doubled codes
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    E2m1Codes codes;
    uint32_t exponents[2];
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
    tile.exponents[0] = reinterpret_cast<const uint32_t*>(meta)[lane / 4];
    tile.exponents[1] = reinterpret_cast<const uint32_t*>(meta)[lane / 4 + 8];
  }
  // 2^(e - 128); the two that are subnormal (weights under 2^-124) count as 0.
  __device__ static __forceinline__ float scale(uint32_t exponents, int group) {
    const uint32_t exponent = exponents >> (8 * group) & 0xffu;
    return exponent < 2 ? 0.0f : __uint_as_float((exponent - 1) << 23);
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product : FloatSums<kTiles> {
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
      const E2m1Operands a(tile.codes, i, this->x.tables);
      const float scale0 = scale(tile.exponents[0], i), scale1 = scale(tile.exponents[1], i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint32_t b0 = this->x.b[n][2 * i], b1 = this->x.b[n][2 * i + 1];
        int d[4] = {};
        mma_s8(d, a.positive[0], a.positive[1], a.positive[2], a.positive[3], b0, b1);
        mma_s8(d, a.negative[0], a.negative[1], a.negative[2], a.negative[3], b0, b1);
        this->add(n, d, scale0, scale1);
      }
    }
  };
};

struct Nvfp4 {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 0.5f;
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    E2m1Codes codes;
    uint2 scales[2];                // 8 UE4M3 a row
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
    tile.scales[0] = reinterpret_cast<const uint2*>(meta)[lane / 4];
    tile.scales[1] = reinterpret_cast<const uint2*>(meta)[lane / 4 + 8];
  }
  // Without a sign bit the bits of UE4M3, moved to those of f32, are the value times 2^-120, subnormals too.
  __device__ static __forceinline__ float scale(uint2 scales, int group) {
    const uint32_t byte = (group < 4 ? scales.x : scales.y) >> (8 * (group % 4)) & 0xffu;
    return __uint_as_float(byte << 20) * 0x1p120f;
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product : FloatSums<kTiles> {
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
      const E2m1Operands a(tile.codes, i, this->x.tables);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale0 = scale(tile.scales[0], 2 * i + half), scale1 = scale(tile.scales[1], 2 * i + half);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint32_t b = this->x.b[n][2 * i + half];
          int d[4] = {};
          mma_s8_k16(d, a.positive[2 * half], a.positive[2 * half + 1], b);
          mma_s8_k16(d, a.negative[2 * half], a.negative[2 * half + 1], b);
          this->add(n, d, scale0, scale1);
        }
      }
    }
  };
};

// ---- Integers of 4, 5, 6 and 8 bits
// ----------------------------------------------------------------------------------------- The code stands in the
// upper bits of each int8, so that one mask takes it out of a word of nibbles (after a shift by 4 for the even
// k-steps); what lies below it, the lowest 1 or 2 bits, comes from a plane of its own. The factor 2^(8 - bits) goes
// into the scales of x.
template <int kBits>
struct IntegerCodes {
  static constexpr int kFactor = 1 << (8 - kBits);
  uint4 nibbles[2];                 // a row: [pair of k-steps][half]
  uint32_t low[kBits == 4 ? 1 : kBits == 5 ? 2 : 4];
  __device__ __forceinline__ void load(const unsigned char* codes, int lane) {
    nibbles[0] = reinterpret_cast<const uint4*>(codes)[lane];
    nibbles[1] = reinterpret_cast<const uint4*>(codes)[lane + 32];
    if constexpr (kBits == 5) {
      const uint2 words = reinterpret_cast<const uint2*>(codes + 1024)[lane];
      low[0] = words.x, low[1] = words.y;
    }
    if constexpr (kBits == 6) {
      const uint4 words = reinterpret_cast<const uint4*>(codes + 1024)[lane];
      low[0] = words.x, low[1] = words.y, low[2] = words.z, low[3] = words.w;
    }
  }
  // Row lane / 4 + 8 · row_half, k-step, half: 4 codes times kFactor.
  __device__ __forceinline__ uint32_t operand(int row_half, int step, int half) const {
    const uint32_t word = word_of(nibbles[row_half], step / 2 * 2 + half);
    uint32_t bytes = (step % 2 ? word : word << 4) & 0xf0f0f0f0u;
    if constexpr (kBits == 5) {
      const int bit = step * 2 + half;        // to bit 3
      bytes |= (bit < 3 ? low[row_half] << (3 - bit) : low[row_half] >> (bit - 3)) & 0x08080808u;
    }
    if constexpr (kBits == 6) {
      const int bit = (step % 2 * 2 + half) * 2;   // to bits 2 and 3
      const uint32_t pairs = low[row_half * 2 + step / 2];
      bytes |= (bit < 2 ? pairs << (2 - bit) : pairs >> (bit - 2)) & 0x0c0c0c0cu;
    }
    return bytes;
  }
};
template <>
struct IntegerCodes<8> {
  static constexpr int kFactor = 1;
  uint4 words[4];
  __device__ __forceinline__ void load(const unsigned char* codes, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const uint4*>(codes)[lane + 32 * i];
  }
  __device__ __forceinline__ uint32_t operand(int row_half, int step, int half) const {
    return word_of(words[row_half * 2 + step / 2], step % 2 * 2 + half);
  }
};

template <bool kSigned>
__device__ __forceinline__ void mma_step(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  if constexpr (kSigned) mma_s8(d, a0, a1, a2, a3, b0, b1);
  else mma_u8(d, a0, a1, a2, a3, b0, b1);
}

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: groups of 32 with a scale, and a min where codes are unsigned.
template <int kBits, bool kMins>
struct GroupOf32 {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 1.0f / IntegerCodes<kBits>::kFactor;
  static constexpr bool kNeedsSums = kMins;
  struct Loaded {
    IntegerCodes<kBits> codes;
    uint2 scales[2];                // 4 f16 a row
    uint2 mins[kMins ? 2 : 1];
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      if constexpr (kMins) {
        const uint4 both = reinterpret_cast<const uint4*>(meta)[row];
        tile.scales[h] = make_uint2(both.x, both.y);
        tile.mins[h] = make_uint2(both.z, both.w);
      } else {
        tile.scales[h] = reinterpret_cast<const uint2*>(meta)[row];
      }
    }
  }
  __device__ static __forceinline__ float at(uint2 halves, int index) {
    return half_at(index < 2 ? halves.x : halves.y, index % 2);
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product : FloatSums<kTiles> {
    __device__ __forceinline__ void start(const Loaded& tile, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int group) {
      FloatSums<kTiles>::start(tile, shared, lane_x, group);
      if constexpr (kMins) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float4 x_sums = load_x_sums(shared, lane_x, group, n);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float mins = __fmul_rn(at(tile.mins[h], 0), x_sums.x);
            mins = __fmaf_rn(at(tile.mins[h], 1), x_sums.y, mins);
            mins = __fmaf_rn(at(tile.mins[h], 2), x_sums.z, mins);
            this->sum[n][h] = __fmaf_rn(at(tile.mins[h], 3), x_sums.w, mins);
          }
        }
      }
    }
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
      const uint32_t a0 = tile.codes.operand(0, i, 0), a1 = tile.codes.operand(1, i, 0);
      const uint32_t a2 = tile.codes.operand(0, i, 1), a3 = tile.codes.operand(1, i, 1);
      const float scale0 = at(tile.scales[0], i), scale1 = at(tile.scales[1], i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        int d[4] = {};
        mma_step<!kMins>(d, a0, a1, a2, a3, this->x.b[n][2 * i], this->x.b[n][2 * i + 1]);
        this->add(n, d, scale0, scale1);
      }
    }
  };
};

// Q4_K, Q5_K: groups of 32 with 6-bit scales and mins, times the block's two f16.
template <int kBits>
struct GroupOf32K {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 1.0f / IntegerCodes<kBits>::kFactor;
  static constexpr bool kNeedsSums = true;
  struct Loaded {
    IntegerCodes<kBits> codes;
    uint2 groups[2];                // a row: 4 scales, 4 mins
    uint32_t block[2];              // a row: scale, min_scale
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tile.groups[h] = reinterpret_cast<const uint2*>(meta)[lane / 4 + 8 * h];
      tile.block[h] = reinterpret_cast<const uint32_t*>(meta + 128)[lane / 4 + 8 * h];
    }
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product : FloatSums<kTiles> {
    float mins[kTiles][2];
    __device__ __forceinline__ void start(const Loaded& tile, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int group) {
      FloatSums<kTiles>::start(tile, shared, lane_x, group);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float4 x_sums = load_x_sums(shared, lane_x, group, n);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float total = __fmul_rn(byte_at(tile.groups[h].y, 0), x_sums.x);
          total = __fmaf_rn(byte_at(tile.groups[h].y, 1), x_sums.y, total);
          total = __fmaf_rn(byte_at(tile.groups[h].y, 2), x_sums.z, total);
          total = __fmaf_rn(byte_at(tile.groups[h].y, 3), x_sums.w, total);
          mins[n][h] = __fmul_rn(half_at(tile.block[h], 1), total);
        }
      }
    }
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
      const uint32_t a0 = tile.codes.operand(0, i, 0), a1 = tile.codes.operand(1, i, 0);
      const uint32_t a2 = tile.codes.operand(0, i, 1), a3 = tile.codes.operand(1, i, 1);
      const float scale0 = byte_at(tile.groups[0].x, i), scale1 = byte_at(tile.groups[1].x, i);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        int d[4] = {};
        mma_u8(d, a0, a1, a2, a3, this->x.b[n][2 * i], this->x.b[n][2 * i + 1]);
        this->add(n, d, scale0, scale1);
      }
    }
    __device__ __forceinline__ void finish(const Loaded& tile, float (&acc)[kTiles][2]) const {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float both = __fmaf_rn(half_at(tile.block[h], 0), this->sum[n][h], -mins[n][h]);
          acc[n][h] = __fmaf_rn(both, this->x.scale[n], acc[n][h]);
        }
      }
    }
  };
};

// Q6_K: groups of 16 with int8 scales, times the block's f16.
struct Q6K {
  static constexpr XForm kX = XForm::kInt16;
  static constexpr float kXScale = 0.25f;
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    IntegerCodes<6> codes;
    uint2 groups[2];                // a row: 8 scales
    uint16_t block[2];
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char* meta,
                                              int lane) {
    tile.codes.load(codes, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tile.groups[h] = reinterpret_cast<const uint2*>(meta)[lane / 4 + 8 * h];
      tile.block[h] = reinterpret_cast<const uint16_t*>(meta + 128)[lane / 4 + 8 * h];
    }
  }
  __device__ static __forceinline__ int scale(uint2 scales, int group) {
    const uint32_t word = group < 4 ? scales.x : scales.y;
    return static_cast<int>(byte_permute(word, 0, 0x8880u + 0x1111u * (group % 4)));   // sign-extended
  }
  // scale · sum fits: a digit's sum over 16 columns has 19 bits, a scale 8, 8 groups 3 more. So a tile's sum is one
  // exact integer.
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product {
    IntegerX<kTiles> x;
    int sum[kTiles][4];
    __device__ __forceinline__ void start(const Loaded&, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int group) {
      load_x(shared, lane_x, group, x);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) clear(sum[n]);
    }
    __device__ __forceinline__ void step(const Loaded& tile, int i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t a0 = tile.codes.operand(0, i, half), a1 = tile.codes.operand(1, i, half);
        const int scale0 = scale(tile.groups[0], 2 * i + half), scale1 = scale(tile.groups[1], 2 * i + half);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          int d[4] = {};
          mma_s8_k16(d, a0, a1, x.b[n][2 * i + half]);
          sum[n][0] += d[0] * scale0;
          sum[n][1] += d[1] * scale0;
          sum[n][2] += d[2] * scale1;
          sum[n][3] += d[3] * scale1;
        }
      }
    }
    __device__ __forceinline__ void finish(const Loaded& tile, float (&acc)[kTiles][2]) const {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float digits = __fmaf_rn(__int2float_rn(sum[n][2 * h]), 256.0f, __int2float_rn(sum[n][2 * h + 1]));
          const float block = __half2float(__ushort_as_half(tile.block[h]));
          acc[n][h] = __fmaf_rn(digits, __fmul_rn(block, x.scale[n]), acc[n][h]);
        }
      }
    }
  };
};

// ---- Floats
// -----------------------------------------------------------------------------------------------------------------
struct Float8Codes {
  uint4 words[4];                   // [row half][4 k-steps of 16]: a word a k-step, half 0 below
  __device__ __forceinline__ void load(const unsigned char* codes, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const uint4*>(codes)[lane + 32 * i];
  }
};
// Two E4M3 to two f16, exact.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(static_cast<unsigned short>(pair & 0xffffu)));
  return result;
#else
  // The bits of E4M3 at f16's place are the value times 2^-8, subnormals too; NaN needs a look.
  const uint32_t spread = (pair & 0xffu) << 8 | (pair & 0xff00u) << 16;
  const uint32_t scaled = (spread & 0x80008000u) | (spread & 0x7f007f00u) >> 1;
  const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&scaled), __half2half2(__ushort_as_half(0x5c00)));
  uint32_t result = *reinterpret_cast<const uint32_t*>(&value);
  if ((spread & 0x7f00u) == 0x7f00u) result |= 0x7fffu;
  if ((spread & 0x7f000000u) == 0x7f000000u) result |= 0x7fff0000u;
  return result;
#endif
}

// Products in floats. x: [q][digit][t] 16 bytes, halves 0 and 1 of k-steps 2 q and 2 q + 1; a group of 128 columns has
// q = 0..3.
template <int kTiles>
struct FloatProduct {
  const unsigned char* from[kTiles];
  float scale[kTiles];
  float d[kTiles][4];
  __device__ __forceinline__ void begin(const unsigned char* shared, const LaneX<kTiles>& x, int group, int offset) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      from[n] = shared + x.codes[n] + group * x.code_stride + offset;
      scale[n] = *reinterpret_cast<const float*>(shared + x.scales[n] + group * x.scale_stride);
      d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
    }
  }
  // low: what the second digit counts.
  __device__ __forceinline__ void add_to(float (&acc)[kTiles][2], float low) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      acc[n][0] = __fmaf_rn(__fmaf_rn(d[n][1], low, d[n][0]), scale[n], acc[n][0]);
      acc[n][1] = __fmaf_rn(__fmaf_rn(d[n][3], low, d[n][2]), scale[n], acc[n][1]);
    }
  }
};

struct Fp8 {
  static constexpr XForm kX = XForm::kF16;
  static constexpr float kXScale = 1.0f;
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    Float8Codes codes;
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char*,
                                              int lane) {
    tile.codes.load(codes, lane);
  }
  static constexpr int kSteps = 4;
  template <int kTiles>
  struct Product : FloatProduct<kTiles> {
    __device__ __forceinline__ void start(const Loaded&, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int group) {
      this->begin(shared, lane_x, group, 0);
    }
    __device__ __forceinline__ void step(const Loaded& tile, int q) {
      uint4 b[kTiles];
#pragma unroll
      for (int n = 0; n < kTiles; ++n) b[n] = *reinterpret_cast<const uint4*>(this->from[n] + q * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = 2 * q + i;
        const uint32_t row0 = word_of(tile.codes.words[k / 4], k % 4),
                       row8 = word_of(tile.codes.words[2 + k / 4], k % 4);
        const uint32_t a0 = e4m3_to_f16(row0), a1 = e4m3_to_f16(row8), a2 = e4m3_to_f16(row0 >> 16),
                       a3 = e4m3_to_f16(row8 >> 16);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
          mma_16bit<false>(this->d[n], a0, a1, a2, a3, word_of(b[n], 2 * i), word_of(b[n], 2 * i + 1));
      }
    }
    __device__ __forceinline__ void finish(const Loaded&, float (&acc)[kTiles][2]) const {
      this->add_to(acc, 0x1p-11f);
    }
  };
};

// F16, BF16: tiles of 64 columns, so `group` counts half groups of x.
template <bool kBf16>
struct Float16 {
  static constexpr XForm kX = kBf16 ? XForm::kBf16 : XForm::kF16;
  static constexpr float kXScale = 1.0f;
  static constexpr bool kNeedsSums = false;
  struct Loaded {
    uint4 words[4];                 // [row half][2 k-steps of 16]: halves 0 and 1 of each
  };
  __device__ static __forceinline__ void load(Loaded& tile, const unsigned char* codes, const unsigned char*,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile.words[i] = reinterpret_cast<const uint4*>(codes)[lane + 32 * i];
  }
  static constexpr int kSteps = 2;
  template <int kTiles>
  struct Product : FloatProduct<kTiles> {
    __device__ __forceinline__ void start(const Loaded&, const unsigned char* shared, const LaneX<kTiles>& lane_x,
                                          int half_group) {
      this->begin(shared, lane_x, half_group / 2, half_group % 2 * 256);
    }
    __device__ __forceinline__ void step(const Loaded& tile, int q) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const uint4 b = *reinterpret_cast<const uint4*>(this->from[n] + q * 128);
        mma_16bit<kBf16>(this->d[n], tile.words[q].x, tile.words[2 + q].x, tile.words[q].y, tile.words[2 + q].y, b.x,
                         b.y);
        mma_16bit<kBf16>(this->d[n], tile.words[q].z, tile.words[2 + q].z, tile.words[q].w, tile.words[2 + q].w, b.z,
                         b.w);
      }
    }
    __device__ __forceinline__ void finish(const Loaded&, float (&acc)[kTiles][2]) const {
      this->add_to(acc, kBf16 ? 1.0f : 0x1p-11f);
    }
  };
};

}  // namespace beryl::cuda
