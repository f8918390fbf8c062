// Conversions between f32 and the small float formats: bf16, f16, E4M3 (FP8), UE4M3, E8M0, E2M1 (FP4).
//
// All are exact towards f32. Towards the small format they round to nearest, ties to even; NaN stays NaN.
// Bit layouts are drawn in docs/formats.md.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace beryl {

inline float bf16_to_f32(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN, kept quiet
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float magnitude = std::ldexp(static_cast<float>(mantissa), -24);  // subnormal: mantissa * 2^-24
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;               // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;              // rounds to infinity (>= 65520)
  if (magnitude < 0x38800000u) {                                    // below 2^-14: subnormal, a multiple of 2^-24
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p24f;  // exact
    return sign | static_cast<uint16_t>(std::nearbyintf(scaled));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

// A finite or infinite value beyond the largest finite f16, 65504, becomes that; NaN stays NaN.
inline uint16_t f32_to_f16_in_range(float value) {
  constexpr float kLargest = 65504;
  return f32_to_f16(value > kLargest ? kLargest : value < -kLargest ? -kLargest : value);
}

// E8M0: 2^(bits - 127), no sign; 255 is NaN.
inline float e8m0_to_f32(uint8_t bits) {
  if (bits == 255) return std::bit_cast<float>(0x7fc00000u);
  return bits == 0 ? 0x1p-127f : std::bit_cast<float>(uint32_t{bits} << 23);
}

// E4M3 as in the "fn" variant: bias 7, no infinity, S.1111.111 is NaN, largest 448.
inline float e4m3_to_f32(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80u) << 24;
  const uint32_t exponent = (bits >> 3) & 0xfu;
  const uint32_t mantissa = bits & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                        : std::bit_cast<float>(((exponent + 120u) << 23) | (mantissa << 20));
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Saturates to +-448; NaN becomes S.1111.111.
inline uint8_t f32_to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  const float absolute = std::bit_cast<float>(magnitude);
  if (absolute >= 448.0f) return sign | 0x7eu;
  if (absolute < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyintf(absolute * 0x1p9f));  // subnormal
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code > 0x7e ? 0x7e : code);
}

// E2M1: sign, 2 exponent bits (bias 1), 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
inline constexpr float kE2m1Values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

}  // namespace beryl
