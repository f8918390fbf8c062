#include "cpu/elementwise.h"

#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/elementwise.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

void add_norm(const float* base, const float* y, int64_t cols, int64_t group, const RowNorm& norm, float scale,
              float* out) {
  for (int64_t begin = 0; begin < cols; begin += group) {
    const float* from = y + begin;
    const float factor = norm_factor(from, group, norm);
    for (int64_t i = 0; i < group; i += 16) {
      Vec16 value = normed16(from, i, group, norm, factor);
      if (base != nullptr) value = load16_some(base + begin + i, group - i) + value;
      if (scale != 1.0f) value = value * set16(scale);
      store16_some(value, out + begin + i, group - i);
    }
  }
}

template <class T>
HWY_INLINE void finish_as(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, T* out) {
  const float factor = norm_factor(x, head_dim, norm);
  if (rope == nullptr) {
    for (int64_t i = 0; i < head_dim; i += 16)
      store16_some(normed16(x, i, head_dim, norm, factor), out + i, head_dim - i);
    return;
  }
  const int64_t half = head_dim / 2;
  RowNorm low_norm = norm, high_norm = norm;
  if (norm.weight != nullptr) high_norm.weight = norm.weight + half;
  for (int64_t i = 0; i < half; i += 16) {
    const Vec16 low = normed16(x, i, half, low_norm, factor), high = normed16(x + half, i, half, high_norm, factor);
    const Vec16 cosine = load16_some(rope + i, half - i), sine = load16_some(rope + half + i, half - i);
    store16_some(low * cosine - high * sine, out + i, half - i);
    store16_some(high * cosine + low * sine, out + half + i, half - i);
  }
}

void finish(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, float* out) {
  finish_as(x, head_dim, norm, rope, out);
}
void finish_f16(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, uint16_t* out) {
  finish_as(x, head_dim, norm, rope, out);
}

void weighted_sum(const float* terms, int64_t term_stride, const int32_t* indices, const float* weights, int n_terms,
                  int64_t cols, float* out) {
  for (int64_t c = 0; c < cols; c += 16) {
    Vec16 sum = zero16();
    for (int i = 0; i < n_terms; ++i)
      sum = mul_add(set16(weights[i]), load16_some(terms + indices[i] * term_stride + c, cols - c), sum);
    store16_some(sum, out + c, cols - c);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace beryl {

HWY_EXPORT(add_norm);
HWY_EXPORT(finish);
HWY_EXPORT(finish_f16);
HWY_EXPORT(weighted_sum);

void add_norm_row(const float* base, const float* y, int64_t cols, int64_t group, const RowNorm& norm, float scale,
                  float* out) {
  HWY_DYNAMIC_DISPATCH(add_norm)(base, y, cols, group, norm, scale, out);
}

void finish_head(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, float* out) {
  HWY_DYNAMIC_DISPATCH(finish)(x, head_dim, norm, rope, out);
}

void finish_head(const float* x, int64_t head_dim, const RowNorm& norm, const float* rope, uint16_t* out) {
  HWY_DYNAMIC_DISPATCH(finish_f16)(x, head_dim, norm, rope, out);
}

void weighted_sum_row(const float* terms, int64_t term_stride, const int32_t* indices, const float* weights,
                      int n_terms, int64_t cols, float* out) {
  HWY_DYNAMIC_DISPATCH(weighted_sum)(terms, term_stride, indices, weights, n_terms, cols, out);
}

}  // namespace beryl
#endif  // HWY_ONCE
