// Products of packed FP8 weights without NaNs (packed_matrix.h: kFloats, is_plain_fp8) and f32 activations of few tokens, for processors
// that look bytes up faster than they convert them to floats.
//
// Row scales are left to the caller: they multiply a row's sum. Lane i of a row's sums takes columns i, 16 + i, ... in ascending order, each
// by one fused multiply-add, as the codecs of decode-inl.h do: the bits are theirs.
#pragma once

#include <cstdint>

namespace beryl {

// sums[t][r][lane] for a group of kFloatRows rows: n_units units of 32 columns, each [kFloatRows][32] codes. x: a tile of PackedTokens,
// [2 n_units][n_tokens][16]; 1 <= n_tokens <= kFewTokens.
using DotFp8 = void (*)(const uint8_t* group, int64_t n_units, const float* x, int n_tokens, float* sums);

// Of the target that simd.h has chosen; null: it has none.
DotFp8 fp8_kernel();

#if defined(__x86_64__)
void dot_fp8_avx512vbmi(const uint8_t* group, int64_t n_units, const float* x, int n_tokens, float* sums);
#endif

}  // namespace beryl
