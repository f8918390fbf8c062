// exp, tanh, gelu and silu on sixteen lanes; the same bits on every target with a fused multiply-add.
//
// Largest errors, measured against double over all magnitudes (math_test.cpp):
//   exp    1.5 ulp where the result is a normal number; 0 below -87.33654, infinity above 88.72283
//   tanh   2.5 ulp
//   gelu, silu   2^-24 · (6 + 4 |a|) relative, a the argument of the exponential in z / (1 + e^a); in absolute terms
//                never more than 2^-22 · max(1, |z|)
// NaN gives NaN.
#if defined(BERYL_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BERYL_CPU_MATH_INL_H_
#undef BERYL_CPU_MATH_INL_H_
#else
#define BERYL_CPU_MATH_INL_H_
#endif

#include "cpu/vec16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

// x = n · ln 2 + r with |r| <= ln 2 / 2; e^x = 2^n · P(r). P is the Taylor polynomial of degree 7: its first omitted
// term is r^8 / 8! < 5.2e-9 relative, below a tenth of an ulp.
HWY_INLINE FloatPart exp_part(FloatPart x) {
  const FloatTag df;
  const IntTag di;
  const auto clamped = hn::Min(hn::Max(x, hn::Set(df, -87.33654f)), hn::Set(df, 88.72283f));
  const auto n = hn::Round(hn::Mul(clamped, hn::Set(df, 1.44269504f)));
  auto r = hn::NegMulAdd(n, hn::Set(df, 0.693359375f), clamped);    // ln 2 in two parts; the first product is exact
  r = hn::NegMulAdd(n, hn::Set(df, -2.12194440e-4f), r);
  auto p = hn::Set(df, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(df, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(df, 0.5f));
  p = hn::MulAdd(p, hn::Mul(r, r), r);
  p = hn::Add(p, hn::Set(df, 1.0f));
  // n is in [-126, 128]; 2^128 is no float, so the factor is made of two.
  const auto n_int = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(n_int);
  const auto bias = hn::Set(di, 127);
  const auto first = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const auto second = hn::BitCast(df, hn::ShiftLeft<23>(hn::Add(hn::Sub(n_int, half), bias)));
  auto result = hn::Mul(hn::Mul(p, first), second);
  result = hn::IfThenElse(hn::Gt(x, hn::Set(df, 88.72283f)), hn::Inf(df), result);
  result = hn::IfThenZeroElse(hn::Lt(x, hn::Set(df, -87.33654f)), result);
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// Small |x|: x + x^3 · P(x^2), P fitted to tanh on Chebyshev points (2e-8 relative). Else 1 - 2 / (e^(2|x|) + 1), with
// the sign of x.
HWY_INLINE FloatPart tanh_part(FloatPart x) {
  const FloatTag df;
  const auto magnitude = hn::Abs(x);
  const auto square = hn::Mul(x, x);
  auto p = hn::Set(df, -6.10492e-3f);
  p = hn::MulAdd(p, square, hn::Set(df, 2.100362e-2f));
  p = hn::MulAdd(p, square, hn::Set(df, -5.385249e-2f));
  p = hn::MulAdd(p, square, hn::Set(df, 1.3332782e-1f));
  p = hn::MulAdd(p, square, hn::Set(df, -3.3333329e-1f));
  const auto small = hn::MulAdd(hn::Mul(p, square), x, x);
  const auto one = hn::Set(df, 1.0f);
  const auto e = exp_part(hn::Min(hn::Add(magnitude, magnitude), hn::Set(df, 40.0f)));
  const auto large = hn::Sub(one, hn::Div(hn::Set(df, 2.0f), hn::Add(e, one)));
  const auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(df, 0.625f)), small, hn::CopySign(large, x));
  return hn::IfThenElse(hn::IsNaN(x), x, result);
}

// gelu_tanh(z) = 0.5 z (1 + tanh u) = z / (1 + e^(-2u)), u = sqrt(2 / pi) (z + 0.044715 z^3)
HWY_INLINE FloatPart gelu_part(FloatPart z) {
  const FloatTag df;
  const auto one = hn::Set(df, 1.0f);
  const auto cubic = hn::MulAdd(hn::Mul(z, z), hn::Set(df, 0.044715f), one);
  const auto exponent = hn::Mul(hn::Mul(z, cubic), hn::Set(df, -1.5957691216057308f));
  return hn::Div(z, hn::Add(one, exp_part(exponent)));
}

// silu(z) = z / (1 + e^-z)
HWY_INLINE FloatPart silu_part(FloatPart z) {
  const FloatTag df;
  return hn::Div(z, hn::Add(hn::Set(df, 1.0f), exp_part(hn::Neg(z))));
}

HWY_INLINE Vec16 exp16(const Vec16& v) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = exp_part(v.part[p]);
  return r;
}
HWY_INLINE Vec16 tanh16(const Vec16& v) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = tanh_part(v.part[p]);
  return r;
}
HWY_INLINE Vec16 gelu16(const Vec16& v) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = gelu_part(v.part[p]);
  return r;
}
HWY_INLINE Vec16 silu16(const Vec16& v) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = silu_part(v.part[p]);
  return r;
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#endif  // BERYL_CPU_MATH_INL_H_
