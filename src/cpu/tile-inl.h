// Products of 4 rows x up to 6 tokens out of registers: the inner loop of prefill and of attention scores.
//
//   w   row r at w + r * row_stride, its next 16 columns w_step floats on
//   x   [n16][n_tokens][16], as PackedTokens lays a tile out
//   z   z[t * z_stride + r] = sum over columns, in the order of vec16-inl.h
// Each target walks the tile in pieces that its registers hold: all of it on AVX-512 (24 sums of 32 registers), 2 x 3
// on AVX2 (12 of 16), 1 x 3 on SSE4 and NEON.
#if defined(BERYL_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BERYL_CPU_TILE_INL_H_
#undef BERYL_CPU_TILE_INL_H_
#else
#define BERYL_CPU_TILE_INL_H_
#endif

#include "cpu/linear.h"
#include "cpu/vec16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

constexpr int kPieceRows = kParts == 1 ? 4 : (kParts == 2 ? 2 : 1);
constexpr int kPieceTokens = kParts == 1 ? 6 : 3;

template <int kRows, int kTokens>
HWY_INLINE void multiply_piece(const float* w, int64_t row_stride, int64_t w_step, const float* x, int64_t x_step,
                               int64_t n16, float* z, int64_t z_stride) {
  const FloatTag d;
  Vec16 sums[kRows][kTokens];
  for (int r = 0; r < kRows; ++r)
    for (int t = 0; t < kTokens; ++t) sums[r][t] = zero16();
  for (int64_t i = 0; i < n16; ++i, w += w_step, x += x_step) {
    for (size_t p = 0; p < kParts; ++p) {
      FloatPart row[kRows];
      for (int r = 0; r < kRows; ++r) row[r] = hn::LoadU(d, w + r * row_stride + p * kPartLanes);
      for (int t = 0; t < kTokens; ++t) {
        const FloatPart token = hn::LoadU(d, x + 16 * t + p * kPartLanes);
        for (int r = 0; r < kRows; ++r) sums[r][t].part[p] = hn::MulAdd(row[r], token, sums[r][t].part[p]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    if constexpr (kRows == 4) {
      store_sums_of_4(sums[0][t], sums[1][t], sums[2][t], sums[3][t], z + t * z_stride);
    } else {
      for (int r = 0; r < kRows; ++r) z[t * z_stride + r] = sum16(sums[r][t]);
    }
  }
}

template <int kTokens>
HWY_NOINLINE void multiply_tokens(const float* w, int64_t row_stride, int64_t w_step, const float* x, int64_t x_step,
                                  int64_t n16, float* z, int64_t z_stride) {
  for (int r = 0; r < kRowTile; r += kPieceRows)
    multiply_piece<kPieceRows, kTokens>(w + r * row_stride, row_stride, w_step, x, x_step, n16, z + r, z_stride);
}

// w: four rows of any stride.
HWY_INLINE void multiply_strided_tile(const float* w, int64_t row_stride, int64_t w_step, const float* x, int64_t n16,
                                      int n_tokens, float* z, int64_t z_stride) {
  const int64_t x_step = 16 * n_tokens;
  for (int t = 0; t < n_tokens; t += kPieceTokens) {
    const float* from = x + 16 * t;
    float* to = z + t * z_stride;
    switch (n_tokens - t < kPieceTokens ? n_tokens - t : kPieceTokens) {
      case 1: multiply_tokens<1>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
      case 2: multiply_tokens<2>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
      case 3: multiply_tokens<3>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
      default:
        if constexpr (kPieceTokens == 6) {
          switch (n_tokens) {
            case 4: multiply_tokens<4>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
            case 5: multiply_tokens<5>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
            default: multiply_tokens<6>(w, row_stride, w_step, from, x_step, n16, to, z_stride); break;
          }
        }
    }
  }
}

// w: a panel tile, [n16][4][16].
HWY_INLINE void multiply_tile(const float* w, const float* x, int64_t n16, int n_tokens, float* z, int64_t z_stride) {
  multiply_strided_tile(w, 16, 16 * kRowTile, x, n16, n_tokens, z, z_stride);
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#endif  // BERYL_CPU_TILE_INL_H_
