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

#include "base/float_formats.h"
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

// Sixteen f16. Stored: rounded to the nearest even, what is beyond their range as 65504, NaN as a NaN.
HWY_INLINE FloatPart load_part(const float* from) { return hn::LoadU(FloatTag(), from); }
HWY_INLINE FloatPart load_part(const uint16_t* from) {
#if HWY_TARGET == HWY_SSE4
  alignas(16) float lanes[kPartLanes];
  for (size_t i = 0; i < kPartLanes; ++i) lanes[i] = f16_to_f32(from[i]);
  return hn::Load(FloatTag(), lanes);
#else
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  return hn::PromoteTo(FloatTag(), hn::BitCast(df16, hn::LoadU(d16, from)));
#endif
}
HWY_INLINE Vec16 load16_halves(const uint16_t* from) {
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = load_part(from + p * kPartLanes);
  return r;
}
HWY_INLINE void store16_halves(const Vec16& v, uint16_t* to) {
#if HWY_TARGET == HWY_SSE4
  alignas(16) float lanes[16];
  store16(v, lanes);
  for (int i = 0; i < 16; ++i) to[i] = f32_to_f16_in_range(lanes[i]);
#else
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const auto largest = hn::Set(FloatTag(), 65504.0f);
  for (size_t p = 0; p < kParts; ++p) {
    const auto in_range = hn::Clamp(v.part[p], hn::Neg(largest), largest);
    const auto value = hn::IfThenElse(hn::IsNaN(v.part[p]), v.part[p], in_range);
    hn::StoreU(hn::BitCast(d16, hn::DemoteTo(df16, value)), d16, to + p * kPartLanes);
  }
#endif
}
HWY_INLINE Vec16 load16_some(const uint16_t* from, int64_t count) {
  if (count >= 16) return load16_halves(from);
  alignas(32) uint16_t lanes[16] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(uint16_t));
  return load16_halves(lanes);
}
HWY_INLINE void store16_some(const Vec16& v, uint16_t* to, int64_t count) {
  if (count >= 16) return store16_halves(v, to);
  alignas(32) uint16_t lanes[16];
  store16_halves(v, lanes);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(uint16_t));
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

#if HWY_MAX_BYTES >= 64
// The first two halvings of four vectors at once: the four partial sums of a, c, b and d, in the 128-bit blocks in that order.
HWY_INLINE FloatPart fold_4_to_blocks(FloatPart a, FloatPart b, FloatPart c, FloatPart d) {
  const FloatTag tag;
  const auto ab = hn::Add(hn::ConcatUpperLower(tag, b, a), hn::ConcatLowerUpper(tag, b, a));   // a a b b
  const auto cd = hn::Add(hn::ConcatUpperLower(tag, d, c), hn::ConcatLowerUpper(tag, d, c));
  return hn::Add(hn::OddEvenBlocks(cd, ab), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(ab, cd)));
}
// The other two halvings of what four calls of it gave: lane 4 j + i is the sum that is block j of the i-th of (a, c, b, d).
HWY_INLINE FloatPart fold_blocks_to_sums(FloatPart a, FloatPart b, FloatPart c, FloatPart d) {
  const FloatTag tag;
  const hn::Repartition<double, FloatTag> pairs;
  const auto halve = [&](FloatPart x, FloatPart y) HWY_ATTR {   // x x y y in each block
    const auto px = hn::BitCast(pairs, x), py = hn::BitCast(pairs, y);
    return hn::Add(hn::BitCast(tag, hn::OddEven(py, px)), hn::BitCast(tag, hn::Shuffle01(hn::OddEven(px, py))));
  };
  const auto ab = halve(a, b), cd = halve(c, d);
  return hn::Add(hn::OddEven(cd, ab), hn::Shuffle2301(hn::OddEven(ab, cd)));
}
#endif

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
