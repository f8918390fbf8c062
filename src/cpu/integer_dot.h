// Products of packed integer weights and activations of 8 bits: y[t][r] = Σ over groups of scale · Σ code · x.
//
// Activations: each group of 32 columns of a token has one f32 scale s = max |x| / 127 and integers q = round(x / s),
// ties to even. The sum over a group (or over each half of it, where the format has a scale for 16 columns) is made in
// integers and exact. Floats enter once a group, by this chain, which is the definition for every instruction set, for
// decoding and for prefill:
//   y = 0; for each group in ascending order:
//     y = fma(f32(Σ code · q), w · s, y)           for each half in turn where the format has scales of halves
//     y = fma(min, s · f32(Σ q), y)                where the format has mins (K formats: min = -(dmin · m))
// w: the weights' scale as weights/decode.h defines it; code: less the format's offset; E2M1's are doubled, w halved.
// A group whose x hold an infinity or a NaN has the scale NaN; one with no |x| above 2^-100 counts as zeros.
#pragma once

#include <cstdint>

#include "cpu/packed_matrix.h"

namespace beryl {

// Of one group of one token.
struct ActivationGroup {
  float scale;
  float scaled_sum;            // scale · f32(sum)
  int32_t sum, low_sum;        // Σ q, and of the first 16 columns
};

struct QuantizedTokens {
  int8_t* values = nullptr;          // [n_tokens][cols]: q, or q + 128 where the kernel for many tokens wants it so
  ActivationGroup* groups = nullptr; // [n_tokens][cols / 32]
  int64_t n_tokens = 0;
  int64_t cols = 0;

  // 64-byte aligned when `floats` is.
  static int64_t floats(int64_t n_tokens, int64_t cols) {
    return value_floats(n_tokens, cols) + n_tokens * (cols / kGroupCols) * 4;
  }
  static QuantizedTokens at(float* floats, int64_t n_tokens, int64_t cols) {
    return {reinterpret_cast<int8_t*>(floats), reinterpret_cast<ActivationGroup*>(floats + value_floats(n_tokens, cols)),
            n_tokens, cols};
  }

 private:
  static int64_t value_floats(int64_t n_tokens, int64_t cols) { return (n_tokens * cols / 4 + 15) / 16 * 16; }
};

inline constexpr int kFewQuantizedTokens = 4;   // up to these, codes are decoded in registers for each product
inline constexpr int kQuantizedTokenTile = 8;   // of more tokens, which share codes that were expanded once

// Bytes of one strip's expanded codes and scales: [groups] of {8 code vectors, and as f32 or int32 [16] each: sums of codes
// of 2 halves, scales of 2 halves, mins}.
inline constexpr int64_t kExpandedGroupBytes = 8 * 64 + 5 * 64;
inline int64_t expanded_strip_bytes(int64_t cols) { return cols / kGroupCols * kExpandedGroupBytes; }

// One instruction set's kernels. All give the same bits.
struct IntegerKernels {
  // Products of many tokens take q + 128.
  bool unsigned_tokens;
  // z[t * z_stride + r] for the 32 rows of a packed tile and tokens [first_token, first_token + n_tokens), n_tokens <= 4.
  void (*multiply_few)(Format format, const uint8_t* tile, const QuantizedTokens& x, int64_t first_token, int n_tokens,
                       float* z, int64_t z_stride);
  // A strip of a tile for multiply_many, 64-byte aligned.
  void (*expand)(Format format, const uint8_t* tile, int strip, int64_t cols, uint8_t* expanded);
  // As multiply_few, for the 16 rows of an expanded strip; n_tokens <= 8.
  void (*multiply_many)(Format format, const uint8_t* expanded, const QuantizedTokens& x, int64_t first_token,
                        int n_tokens, float* z, int64_t z_stride);
};

// Of the target that simd.h has chosen: AVX-512 with VNNI (and VBMI), AVX-512, AVX2, NEON with dot products, else plain C++.
const IntegerKernels& integer_kernels();

extern const IntegerKernels kPortableIntegerKernels;
#if defined(__x86_64__)
extern const IntegerKernels kAvx2IntegerKernels, kAvx512IntegerKernels, kAvx512VnniIntegerKernels, kAvx512VbmiIntegerKernels;
#elif defined(__aarch64__)
extern const IntegerKernels kNeonDotIntegerKernels;
#endif

}  // namespace beryl
