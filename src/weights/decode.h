// What the bits of each format mean: the one exact definition, scalar and plain. Every codec of a backend is tested
// bit for bit against these functions.
//
// For the GGUF formats the result is bit for bit that of the public Python package `gguf`, so the order of the float
// operations is part of the definition. All arithmetic is f32, nothing is contracted into a fused multiply-add.
//   Q4_0, Q5_0, Q8_0     f32(scale) * f32(code)                               exact
//   Q4_1, Q5_1           f32(scale) * f32(code) + f32(min)                    one rounding, in the sum
//   Q4_K, Q5_K           (d * s) * code - (dmin * m)                          one rounding, in the difference
//   Q6_K                 (d * s) * code                                       one rounding, in the last product
//   MXFP4, NVFP4         f32(scale) * E2M1(code)                              exact, or infinite; code 8 is +0
//   FP4 g128, FP8        f32(code) * f32(scale)                               one rounding; code 8 of FP4 is -0
// Where a matrix has a tensor_scale other than 1, decode_row multiplies by it afterwards: one more rounding.
//
// Inputs may lie at any address. Infinite and NaN scales give what IEEE arithmetic gives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/format.h"

namespace beryl {

// Each decodes n_blocks blocks of its format (a "block" of f32, f16 and bf16 is one weight) into
// out[n_blocks * info(format).block_weights].
void decode_f32(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_f16(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_bf16(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q4_0(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q4_1(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q5_0(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q5_1(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q8_0(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q4_k(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q5_k(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_q6_k(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_mxfp4(const std::byte* blocks, int64_t n_blocks, float* out);
void decode_nvfp4(const std::byte* blocks, int64_t n_blocks, float* out);

// The one of the above for a format of one plane. Must not be called for two-plane formats or integers.
void decode_blocks(Format format, const std::byte* blocks, int64_t n_blocks, float* out);

// codes: [n_groups][64] bytes; scales: [n_groups] bf16; out: [n_groups * 128].
void decode_fp4_g128(const std::byte* codes, const std::byte* scales, int64_t n_groups, float* out);
// codes: [n_weights] E4M3, all of one row; scale: one f32; out: [n_weights].
void decode_fp8(const std::byte* codes, const std::byte* scale, int64_t n_weights, float* out);

// The 6-bit scales and mins of a Q4_K or Q5_K block.
struct GroupScales {
  uint8_t scales[8];
  uint8_t mins[8];
};
GroupScales unpack_scales_and_mins(const uint8_t packed[12]);

// The scale of an MXFP4 block: 2^(exponent - 128), to be multiplied by E2M1 values times two (which are integers).
// Exponent 255 is NaN in the OCP definition; here it is the next power of two, as every GGUF reader has it.
float mxfp4_half_scale(uint8_t exponent);
// The scale of an NVFP4 group, halved likewise. Bit 7 is ignored except that 0x7f alone means 0.
float nvfp4_half_scale(uint8_t scale);

// E2M1 values times two.
inline constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace beryl
