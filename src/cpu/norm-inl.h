// The root-mean-square norm: x · f · weight with f = 1 / sqrt(mean(x²) + eps), the squares summed as in vec16-inl.h.
//
// Compiled once for each instruction set (simd.h).
#if defined(BERYL_CPU_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BERYL_CPU_NORM_INL_H_
#undef BERYL_CPU_NORM_INL_H_
#else
#define BERYL_CPU_NORM_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cpu/row_norm.h"
#include "cpu/vec16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

// f of x[n]; 1 when there is no norm.
HWY_INLINE float norm_factor(const float* x, int64_t n, const RowNorm& norm) {
  if (!norm.present) return 1;
  Vec16 squares = zero16();
  for (int64_t i = 0; i < n; i += 16) {
    const Vec16 v = load16_some(x + i, n - i);
    squares = mul_add(v, v, squares);
  }
  return 1 / std::sqrt(sum16(squares) / static_cast<float>(n) + norm.eps);
}

// Columns i .. i + 15 of the normed row, as many as there are (the rest 0).
HWY_INLINE Vec16 normed16(const float* x, int64_t i, int64_t n, const RowNorm& norm, float factor) {
  Vec16 v = load16_some(x + i, n - i);
  if (!norm.present) return v;
  v = v * set16(factor);
  return norm.weight == nullptr ? v : v * load16_some(norm.weight + i, n - i);
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#endif  // BERYL_CPU_NORM_INL_H_
