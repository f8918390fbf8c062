// Sixteen f32 lanes, whatever the width of the registers: 1 x 16 on AVX-512, 2 x 8 on AVX2, 4 x 4 on SSE4 and NEON.
//
// A dot product is sixteen running sums (lane j takes the columns j, j + 16, ...), each a chain of multiply-adds in the
// order of the columns, added up at the end by halves: 16 -> 8 -> 4 -> 2 -> 1. That order is the definition of every
// product on the CPU; so a token's result depends neither on the other tokens of the step, nor on the tile shape, nor
// on the width of the registers.
//
// Compiled once for each instruction set (simd.h).
#if defined(BERYL_CPU_VEC16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BERYL_CPU_VEC16_INL_H_
#undef BERYL_CPU_VEC16_INL_H_
#else
#define BERYL_CPU_VEC16_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;
using IntTag = hn::RebindToSigned<FloatTag>;
using FloatPart = hn::Vec<FloatTag>;
using IntPart = hn::Vec<IntTag>;
constexpr size_t kPartLanes = HWY_MIN(HWY_MAX_BYTES / sizeof(float), 16);
constexpr size_t kParts = 16 / kPartLanes;

using ByteTag = hn::Full128<uint8_t>;
using SignedByteTag = hn::Full128<int8_t>;
using Bytes = hn::Vec<ByteTag>;              // 16 codes, one a lane
using SignedBytes = hn::Vec<SignedByteTag>;

struct Vec16 {
  FloatPart part[kParts];
};

HWY_INLINE Vec16 zero16() {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::Zero(FloatTag());
  return r;
}
HWY_INLINE Vec16 set16(float value) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::Set(FloatTag(), value);
  return r;
}
HWY_INLINE Vec16 load16(const float* from) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::LoadU(FloatTag(), from + p * kPartLanes);
  return r;
}
HWY_INLINE void store16(const Vec16& v, float* to) {
  for (size_t p = 0; p < kParts; ++p) hn::StoreU(v.part[p], FloatTag(), to + p * kPartLanes);
}
// The first `count` lanes, 0 < count <= 16; the others are 0.
HWY_INLINE Vec16 load16_some(const float* from, int64_t count) {
  if (count >= 16) return load16(from);
  alignas(64) float lanes[16] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(float));
  return load16(lanes);
}
HWY_INLINE void store16_some(const Vec16& v, float* to, int64_t count) {
  if (count >= 16) return store16(v, to);
  alignas(64) float lanes[16];
  store16(v, lanes);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(float));
}

HWY_INLINE Vec16 operator+(const Vec16& a, const Vec16& b) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::Add(a.part[p], b.part[p]);
  return r;
}
HWY_INLINE Vec16 operator-(const Vec16& a, const Vec16& b) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::Sub(a.part[p], b.part[p]);
  return r;
}
HWY_INLINE Vec16 operator*(const Vec16& a, const Vec16& b) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::Mul(a.part[p], b.part[p]);
  return r;
}
// a * b + c, fused where the target can
HWY_INLINE Vec16 mul_add(const Vec16& a, const Vec16& b, const Vec16& c) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = hn::MulAdd(a.part[p], b.part[p], c.part[p]);
  return r;
}

// Lanes i + 8 onto i, then i + 4 onto i: the first two halvings.
HWY_INLINE hn::Vec<hn::Full128<float>> fold_to_4(const Vec16& v) {
#if HWY_MAX_BYTES >= 64
  const hn::Half<FloatTag> d8;
  const hn::Half<decltype(d8)> d4;
  const auto eight = hn::Add(hn::LowerHalf(d8, v.part[0]), hn::UpperHalf(d8, v.part[0]));
  return hn::Add(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
#elif HWY_MAX_BYTES == 32
  const hn::Half<FloatTag> d4;
  const auto eight = hn::Add(v.part[0], v.part[1]);
  return hn::Add(hn::LowerHalf(d4, eight), hn::UpperHalf(d4, eight));
#else
  return hn::Add(hn::Add(v.part[0], v.part[2]), hn::Add(v.part[1], v.part[3]));
#endif
}
HWY_INLINE float sum16(const Vec16& v) {
  const auto four = fold_to_4(v);
  const auto two = hn::Add(four, hn::Shuffle1032(four));
  return hn::GetLane(hn::Add(two, hn::Shuffle2301(two)));
}
// The sums of four vectors at once, each in the order of sum16.
HWY_INLINE void store_sums_of_4(const Vec16& a, const Vec16& b, const Vec16& c, const Vec16& d, float* to) {
  const hn::Full128<float> d4;
  const auto fa = fold_to_4(a), fb = fold_to_4(b), fc = fold_to_4(c), fd = fold_to_4(d);
  const auto ab = hn::Add(hn::InterleaveLower(d4, fa, fb), hn::InterleaveUpper(d4, fa, fb));  // a02 b02 a13 b13
  const auto cd = hn::Add(hn::InterleaveLower(d4, fc, fd), hn::InterleaveUpper(d4, fc, fd));
  hn::StoreU(hn::Add(hn::ConcatLowerLower(d4, cd, ab), hn::ConcatUpperUpper(d4, cd, ab)), d4, to);
}

// Sixteen bytes, signed or not, to sixteen floats.
template <class V>
HWY_INLINE Vec16 bytes_to_float(V bytes) {
  const FloatTag df;
  const IntTag di;
  Vec16 r;
#if HWY_MAX_BYTES >= 64
  r.part[0] = hn::ConvertTo(df, hn::PromoteTo(di, bytes));
#elif HWY_MAX_BYTES == 32
  const hn::Half<hn::DFromV<V>> d8;
  r.part[0] = hn::ConvertTo(df, hn::PromoteTo(di, hn::LowerHalf(d8, bytes)));
  r.part[1] = hn::ConvertTo(df, hn::PromoteTo(di, hn::UpperHalf(d8, bytes)));
#else
  const hn::DFromV<V> d16;
  const auto first_four = [&](V from) HWY_ATTR {
    const hn::Half<decltype(d16)> d8;
    const hn::Half<decltype(d8)> d4;
    return hn::ConvertTo(df, hn::PromoteTo(di, hn::LowerHalf(d4, hn::LowerHalf(d8, from))));
  };
  r.part[0] = first_four(bytes);
  r.part[1] = first_four(hn::ShiftRightBytes<4>(d16, bytes));
  r.part[2] = first_four(hn::ShiftRightBytes<8>(d16, bytes));
  r.part[3] = first_four(hn::ShiftRightBytes<12>(d16, bytes));
#endif
  return r;
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#endif  // BERYL_CPU_VEC16_INL_H_
