// Products of BF16 weights and activations rounded to bf16: y[t][r] = Σ w · x, sums in f32.
//
// The definition, for every instruction set, for decoding and for prefill, is one chain a row over pairs of columns in ascending order,
// the odd column of a pair first, as AVX-512's vdpbf16ps adds:
//   y = 0; for each pair (c, c + 1): y = fma(w[c + 1], x[c + 1], y); y = fma(w[c], x[c], y)
// A product of two bf16 is exact in f32, so a multiplication and an addition give the same bits where there is no fused
// multiply-add. That instruction takes subnormal numbers for zeros. So that there are none, weights and activations below 2^-56 in absolute
// value count as zeros: all others are multiples of 2^-63, hence every sum is zero or at least 2^-126.
#pragma once

#include <cstdint>

namespace beryl {

inline constexpr float kSmallestBf16 = 0x1p-56f;   // below it, 0
inline constexpr int kBf16TokenTile = 8;

// Tokens as these products read them, whole groups of 32 columns, zeros behind the last: bf16 [n_tokens][padded cols], or with the same
// values f32, as the kernels want it.
struct Bf16Tokens {
  float* data = nullptr;   // floats(n_tokens, cols), 64-byte aligned
  int64_t n_tokens = 0;
  int64_t cols = 0;

  static int64_t padded(int64_t cols) { return (cols + 31) / 32 * 32; }
  static int64_t floats(int64_t n_tokens, int64_t cols) { return n_tokens * padded(cols); }
  const float* as_f32(int64_t token) const { return data + token * padded(cols); }
  uint16_t* as_bf16(int64_t token) const { return reinterpret_cast<uint16_t*>(data) + token * padded(cols); }
};

struct Bf16Kernels {
  bool f32_tokens;
  // z[t * z_stride + r] for the 32 rows of a packed tile (packed_matrix.h) and tokens [first_token, first_token + n_tokens),
  // n_tokens <= kBf16TokenTile.
  void (*multiply)(const uint8_t* tile, const Bf16Tokens& x, int64_t first_token, int n_tokens, float* z, int64_t z_stride);
};

// Of the target that simd.h has chosen: AVX-512 with BF16, AVX-512, AVX2, else plain C++.
const Bf16Kernels& bf16_kernels();

extern const Bf16Kernels kPortableBf16Kernels;
#if defined(__x86_64__)
extern const Bf16Kernels kAvx2Bf16Kernels, kAvx512Bf16InF32Kernels, kAvx512Bf16Kernels;
// Whether vdpbf16ps adds as above on this processor, tried with some thousand sums. Requires that it has the instruction.
bool bf16_instruction_adds_as_defined();
#endif

}  // namespace beryl
