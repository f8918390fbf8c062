// Reading eight neighbouring weights of a plain matrix (plain_matrix.h).
#pragma once

#include "cuda/device.cuh"
#include "cuda/plain_matrix.h"

namespace beryl::cuda {

// Eight code values of a row from column `column`, a multiple of 8. Codes are exact in f32.
template <PlainCodes kKind>
__device__ __forceinline__ void load_codes8(const uint8_t* row, int64_t column, float (&w)[8]) {
  if constexpr (kKind == PlainCodes::kF32) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(row) + column / 4);
    const float4 b = __ldg(reinterpret_cast<const float4*>(row) + column / 4 + 1);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  } else if constexpr (kKind == PlainCodes::kF16 || kKind == PlainCodes::kBf16) {
    const uint4 packed = __ldg(reinterpret_cast<const uint4*>(row + 2 * column));
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kKind == PlainCodes::kBf16) {
        w[2 * i] = __uint_as_float(words[i] << 16);
        w[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      } else {
        w[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i])));
        w[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
      }
    }
  } else if constexpr (kKind == PlainCodes::kInt8 || kKind == PlainCodes::kE4m3) {
    const uint2 packed = __ldg(reinterpret_cast<const uint2*>(row + column));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t byte = (i < 4 ? packed.x : packed.y) >> (i % 4 * 8) & 0xffu;
      if constexpr (kKind == PlainCodes::kInt8)
        w[i] = static_cast<float>(static_cast<int8_t>(byte));
      else
        w[i] = decode_e4m3(static_cast<uint8_t>(byte));
    }
  } else {
    const uint32_t packed = __ldg(reinterpret_cast<const uint32_t*>(row + column / 2));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = packed >> (4 * i) & 0xfu;
      if constexpr (kKind == PlainCodes::kNibble) {
        w[i] = static_cast<float>(code);
      } else {
        // {0, 1, 2, 3, 4, 6, 8, 12}, a nibble each.
        const float magnitude = static_cast<float>(0xc8643210u >> (4 * (code & 7u)) & 0xfu);
        w[i] = code & 8u ? -magnitude : magnitude;
      }
    }
  }
}

// One row of one expert.
struct PlainRow {
  const uint8_t* codes;
  const float* scales;
  const float* mins;
};
__device__ __forceinline__ PlainRow plain_row(const PlainMatrix& matrix, int64_t row) {   // row: expert · rows + row
  return {matrix.codes + row * matrix.row_code_bytes,
          matrix.scales == nullptr ? nullptr : matrix.scales + row * matrix.row_groups,
          matrix.mins == nullptr ? nullptr : matrix.mins + row * matrix.row_groups};
}

// Eight weights, without the matrix's tensor_scale.
template <PlainCodes kKind>
__device__ __forceinline__ void load_weights8(const PlainMatrix& matrix, const PlainRow& row, int64_t column, float (&w)[8]) {
  load_codes8<kKind>(row.codes, column, w);
  if constexpr (kKind != PlainCodes::kF32 && kKind != PlainCodes::kF16 && kKind != PlainCodes::kBf16) {
    const int64_t group = column >> matrix.group_shift;
    const float scale = __ldg(row.scales + group);
    const float min = row.mins == nullptr ? 0.0f : __ldg(row.mins + group);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = __fmaf_rn(scale, w[i], -min);
  }
}

// Calls function.template operator()<kind>() for the matrix's kind of codes.
template <class Function>
void with_plain_codes(PlainCodes kind, Function&& function) {
  switch (kind) {
    case PlainCodes::kF32: return function.template operator()<PlainCodes::kF32>();
    case PlainCodes::kF16: return function.template operator()<PlainCodes::kF16>();
    case PlainCodes::kBf16: return function.template operator()<PlainCodes::kBf16>();
    case PlainCodes::kInt8: return function.template operator()<PlainCodes::kInt8>();
    case PlainCodes::kNibble: return function.template operator()<PlainCodes::kNibble>();
    case PlainCodes::kE2m1: return function.template operator()<PlainCodes::kE2m1>();
    case PlainCodes::kE4m3: return function.template operator()<PlainCodes::kE4m3>();
  }
}

}  // namespace beryl::cuda
