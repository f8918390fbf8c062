// From the blocks of each format to f32 in registers, bit for bit as weights/decode.h defines them.
//
// A codec is a small struct. It decodes a block in units of 32 weights, two Vec16 of consecutive columns:
//   kUnits, kCodeBytes, kScaleBytes   of one block; kScaleBytes is 0 where the scales lie in the codes or in the row
//   Scales prepare(codes, scales)     what the block's units share
//   decode<kUnit>(codes, scales, low, high)
// with_codec(format, visitor) calls visitor(Codec{}).
//
// Where registers hold sixteen lanes, a four-bit format needs no arithmetic per weight: the sixteen values that a group
// can take are computed once by the definition's operations, and the codes index them.
//
// Compiled once for each instruction set (simd.h). Codes may lie at any address.
#if defined(BERYL_CPU_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BERYL_CPU_DECODE_INL_H_
#undef BERYL_CPU_DECODE_INL_H_
#else
#define BERYL_CPU_DECODE_INL_H_
#endif

#include <bit>

#include "base/error.h"
#include "base/float_formats.h"
#include "cpu/codec_tables.h"
#include "cpu/vec16-inl.h"
#include "weights/blocks.h"
#include "weights/decode.h"
#include "weights/format.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE T load_as(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// One f16 on all lanes.
HWY_INLINE Vec16 broadcast_half(const uint8_t* from) {
#if HWY_TARGET == HWY_SSE4
  return set16(f16_to_f32(load_as<uint16_t>(from)));
#else
  const hn::Rebind<uint16_t, FloatTag> d16;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const auto value = hn::PromoteTo(FloatTag(), hn::BitCast(df16, hn::Set(d16, load_as<uint16_t>(from))));
  Vec16 r;
  for (size_t p = 0; p < kParts; ++p) r.part[p] = value;
  return r;
#endif
}

HWY_INLINE Bytes load_bytes(const uint8_t* from) { return hn::LoadU(ByteTag(), from); }
HWY_INLINE Bytes low_nibbles(Bytes bytes) { return hn::And(bytes, hn::Set(ByteTag(), 0x0f)); }
HWY_INLINE Bytes high_nibbles(Bytes bytes) { return hn::ShiftRight<4>(bytes); }
HWY_INLINE SignedBytes minus(Bytes codes, int8_t offset) {
  return hn::Sub(hn::BitCast(SignedByteTag(), codes), hn::Set(SignedByteTag(), offset));
}

// As many bytes as an IntPart has lanes.
HWY_INLINE hn::Vec<hn::Rebind<uint8_t, IntTag>> first_bytes(const uint8_t* from) {
  return hn::LoadU(hn::Rebind<uint8_t, IntTag>(), from);
}

HWY_INLINE Vec16 iota16() {
  alignas(64) static constexpr float kIota[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load16(kIota);
}

// Where sixteen lanes fit a register, the values of all 4-bit codes do too, and a code selects its lane.
#if HWY_TARGET == HWY_AVX3
constexpr bool kHasLaneTable = true;

// table[code & 15]: what lies above the nibble does not matter.
HWY_INLINE Vec16 look_up(const Vec16& table, IntPart codes) {
  return {{FloatPart{_mm512_permutexvar_ps(codes.raw, table.part[0].raw)}}};
}
// Bit i of `bits` chooses the table of lane i.
HWY_INLINE Vec16 look_up(const Vec16& if_clear, const Vec16& if_set, uint16_t bits, IntPart codes) {
  const __m512 clear = _mm512_permutexvar_ps(codes.raw, if_clear.part[0].raw);
  return {{FloatPart{_mm512_mask_permutexvar_ps(clear, bits, codes.raw, if_set.part[0].raw)}}};
}
// Sixteen bytes of two nibbles each to lanes; low nibbles are weights 0..15, high nibbles 16..31.
HWY_INLINE void look_up_nibbles(const Vec16& table, const uint8_t* from, Vec16& low, Vec16& high) {
  const IntPart pairs = hn::PromoteTo(IntTag(), first_bytes(from));
  low = look_up(table, pairs);
  high = look_up(table, hn::ShiftRight<4>(pairs));
}
// code - 16 where its bit is clear, code where it is set: with the bit as fifth digit, code - 16.
HWY_INLINE Vec16 minus_16_where_clear(IntPart codes, uint16_t bits) {
  const __mmask16 is_clear = static_cast<__mmask16>(~bits);
  const __m512i moved = _mm512_mask_sub_epi32(codes.raw, is_clear, codes.raw, _mm512_set1_epi32(16));
  return {{FloatPart{_mm512_cvtepi32_ps(moved)}}};
}
#else
constexpr bool kHasLaneTable = false;

// Never called; lets both branches of `if constexpr` compile.
HWY_INLINE Vec16 look_up(const Vec16& table, IntPart) { return table; }
HWY_INLINE Vec16 look_up(const Vec16& if_clear, const Vec16&, uint16_t, IntPart) { return if_clear; }
HWY_INLINE void look_up_nibbles(const Vec16& table, const uint8_t*, Vec16& low, Vec16& high) { low = high = table; }
HWY_INLINE Vec16 minus_16_where_clear(IntPart, uint16_t) { return zero16(); }
#endif

// The first bytes of sixteen, one a lane of an IntPart.
HWY_INLINE IntPart lanes_of(Bytes bytes) {
#if HWY_MAX_BYTES >= 64
  return hn::PromoteTo(IntTag(), bytes);
#elif HWY_MAX_BYTES == 32
  return hn::PromoteTo(IntTag(), hn::LowerHalf(hn::Half<ByteTag>(), bytes));
#else
  const hn::Half<ByteTag> d8;
  return hn::PromoteTo(IntTag(), hn::LowerHalf(hn::Half<decltype(d8)>(), hn::LowerHalf(d8, bytes)));
#endif
}

// Bit i of two bytes as 16 in lane i.
HWY_INLINE Bytes fifth_bits(const uint8_t* from) {
  uint8_t bits[8] = {from[0], from[1]};
  return hn::IfThenElseZero(hn::LoadMaskBits(ByteTag(), bits), hn::Set(ByteTag(), 16));
}

struct CodecQ4_0 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockQ4_0);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale_or_table;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    const Vec16 scale = broadcast_half(codes);
    if constexpr (kHasLaneTable) return {scale * (iota16() - set16(8))};
    return {scale};
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    if constexpr (kHasLaneTable) {
      look_up_nibbles(scales.scale_or_table, codes + offsetof(BlockQ4_0, codes), low, high);
    } else {
      const Bytes bytes = load_bytes(codes + offsetof(BlockQ4_0, codes));
      low = scales.scale_or_table * bytes_to_float(minus(low_nibbles(bytes), 8));
      high = scales.scale_or_table * bytes_to_float(minus(high_nibbles(bytes), 8));
    }
  }
};

struct CodecQ4_1 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockQ4_1);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale_or_table, min;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    const Vec16 scale = broadcast_half(codes);
    const Vec16 min = broadcast_half(codes + offsetof(BlockQ4_1, min));
    if constexpr (kHasLaneTable) return {scale * iota16() + min, min};
    return {scale, min};
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    if constexpr (kHasLaneTable) {
      look_up_nibbles(scales.scale_or_table, codes + offsetof(BlockQ4_1, codes), low, high);
    } else {
      const Bytes bytes = load_bytes(codes + offsetof(BlockQ4_1, codes));
      low = scales.scale_or_table * bytes_to_float(low_nibbles(bytes)) + scales.min;
      high = scales.scale_or_table * bytes_to_float(high_nibbles(bytes)) + scales.min;
    }
  }
};

struct CodecQ5_0 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockQ5_0);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) { return {broadcast_half(codes)}; }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* nibbles = codes + offsetof(BlockQ5_0, codes);
    const uint8_t* high_bits = codes + offsetof(BlockQ5_0, high_bits);
    if constexpr (kHasLaneTable) {
      const IntPart pairs = hn::PromoteTo(IntTag(), first_bytes(nibbles));
      low = scales.scale * minus_16_where_clear(hn::And(pairs, hn::Set(IntTag(), 15)), load_as<uint16_t>(high_bits));
      high = scales.scale * minus_16_where_clear(hn::ShiftRight<4>(pairs), load_as<uint16_t>(high_bits + 2));
    } else {
      const Bytes bytes = load_bytes(nibbles);
      low = scales.scale * bytes_to_float(minus(hn::Or(low_nibbles(bytes), fifth_bits(high_bits)), 16));
      high = scales.scale * bytes_to_float(minus(hn::Or(high_nibbles(bytes), fifth_bits(high_bits + 2)), 16));
    }
  }
};

struct CodecQ5_1 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockQ5_1);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale, min;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    return {broadcast_half(codes), broadcast_half(codes + offsetof(BlockQ5_1, min))};
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* nibbles = codes + offsetof(BlockQ5_1, codes);
    const uint8_t* high_bits = codes + offsetof(BlockQ5_1, high_bits);
    if constexpr (kHasLaneTable) {
      const Vec16 if_clear = scales.scale * iota16() + scales.min;
      const Vec16 if_set = scales.scale * (iota16() + set16(16)) + scales.min;
      const IntPart pairs = hn::PromoteTo(IntTag(), first_bytes(nibbles));
      low = look_up(if_clear, if_set, load_as<uint16_t>(high_bits), pairs);
      high = look_up(if_clear, if_set, load_as<uint16_t>(high_bits + 2), hn::ShiftRight<4>(pairs));
    } else {
      const Bytes bytes = load_bytes(nibbles);
      low = scales.scale * bytes_to_float(hn::Or(low_nibbles(bytes), fifth_bits(high_bits))) + scales.min;
      high = scales.scale * bytes_to_float(hn::Or(high_nibbles(bytes), fifth_bits(high_bits + 2))) + scales.min;
    }
  }
};

struct CodecQ8_0 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockQ8_0);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) { return {broadcast_half(codes)}; }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* values = codes + offsetof(BlockQ8_0, codes);
    low = bytes_to_float(hn::BitCast(SignedByteTag(), load_bytes(values))) * scales.scale;
    high = bytes_to_float(hn::BitCast(SignedByteTag(), load_bytes(values + 16))) * scales.scale;
  }
};

// The eight scales times d and the eight mins times d_min of a Q4_K or Q5_K block.
struct GroupFactors {
  alignas(64) float scales[8];
  float mins[8];
};
HWY_INLINE void unpack_group_factors(const uint8_t* codes, GroupFactors& factors) {
  static_assert(offsetof(BlockQ4_K, scales) == offsetof(BlockQ5_K, scales));
  const uint8_t* packed = codes + offsetof(BlockQ4_K, scales);  // decode.h: unpack_scales_and_mins, four at a time
  const auto a = load_as<uint32_t>(packed), b = load_as<uint32_t>(packed + 4), c = load_as<uint32_t>(packed + 8);
  const uint32_t six_bits[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 2 & 0x30303030u), b & 0x3f3f3f3fu,
                                (c >> 4 & 0x0f0f0f0fu) | (b >> 2 & 0x30303030u)};
  const Vec16 numbers = bytes_to_float(load_bytes(reinterpret_cast<const uint8_t*>(six_bits)));
  const Vec16 d = broadcast_half(codes), d_min = broadcast_half(codes + offsetof(BlockQ4_K, min_scale));
  Vec16 both = d;
#if HWY_MAX_BYTES >= 64
  both.part[0] = hn::ConcatUpperLower(FloatTag(), d_min.part[0], d.part[0]);
#else
  for (size_t p = kParts / 2; p < kParts; ++p) both.part[p] = d_min.part[p];
#endif
  store16(both * numbers, factors.scales);
}

struct CodecQ4_K {
  static constexpr int kUnits = 8;
  static constexpr int kCodeBytes = sizeof(BlockQ4_K);
  static constexpr int kScaleBytes = 0;
  using Scales = GroupFactors;
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    Scales scales;
    unpack_group_factors(codes, scales);
    return scales;
  }
  template <int kUnit>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* from = codes + offsetof(BlockQ4_K, codes) + kUnit / 2 * 32;
    const Vec16 scale = set16(scales.scales[kUnit]), min = set16(scales.mins[kUnit]);
    if constexpr (kHasLaneTable) {
      const Vec16 table = scale * iota16() - min;
      IntPart first = hn::PromoteTo(IntTag(), first_bytes(from));
      IntPart second = hn::PromoteTo(IntTag(), first_bytes(from + 16));
      if constexpr (kUnit % 2 == 1) {
        first = hn::ShiftRight<4>(first);
        second = hn::ShiftRight<4>(second);
      }
      low = look_up(table, first);
      high = look_up(table, second);
    } else {
      const Bytes first = load_bytes(from), second = load_bytes(from + 16);
      low = scale * bytes_to_float(kUnit % 2 == 0 ? low_nibbles(first) : high_nibbles(first)) - min;
      high = scale * bytes_to_float(kUnit % 2 == 0 ? low_nibbles(second) : high_nibbles(second)) - min;
    }
  }
};

struct CodecQ5_K {
  static constexpr int kUnits = 8;
  static constexpr int kCodeBytes = sizeof(BlockQ5_K);
  static constexpr int kScaleBytes = 0;
  using Scales = GroupFactors;
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    Scales scales;
    unpack_group_factors(codes, scales);
    return scales;
  }
  template <int kUnit>
  static HWY_INLINE Bytes codes_of(const uint8_t* from, const uint8_t* high_bits) {
    const Bytes nibbles = kUnit % 2 == 0 ? low_nibbles(load_bytes(from)) : high_nibbles(load_bytes(from));
    const auto has_bit = hn::TestBit(load_bytes(high_bits), hn::Set(ByteTag(), static_cast<uint8_t>(1 << kUnit)));
    return hn::Or(nibbles, hn::IfThenElseZero(has_bit, hn::Set(ByteTag(), 16)));
  }
  template <int kUnit>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* from = codes + offsetof(BlockQ5_K, codes) + kUnit / 2 * 32;
    const uint8_t* high_bits = codes + offsetof(BlockQ5_K, high_bits);
    const Vec16 scale = set16(scales.scales[kUnit]), min = set16(scales.mins[kUnit]);
    low = scale * bytes_to_float(codes_of<kUnit>(from, high_bits)) - min;
    high = scale * bytes_to_float(codes_of<kUnit>(from + 16, high_bits + 16)) - min;
  }
};

struct CodecQ6_K {
  static constexpr int kUnits = 8;
  static constexpr int kCodeBytes = sizeof(BlockQ6_K);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    alignas(64) float scales[16];
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    Scales result;
    const Bytes scales = load_bytes(codes + offsetof(BlockQ6_K, scales));
    store16(broadcast_half(codes + offsetof(BlockQ6_K, scale)) * bytes_to_float(hn::BitCast(SignedByteTag(), scales)),
            result.scales);
    return result;
  }
  template <int kUnit>
  static HWY_INLINE SignedBytes codes_of(const uint8_t* low_bits, const uint8_t* high_bits) {
    constexpr int kQuarter = kUnit % 4;
    const Bytes nibbles = kQuarter < 2 ? low_nibbles(load_bytes(low_bits)) : high_nibbles(load_bytes(low_bits));
    Bytes two_bits = load_bytes(high_bits);
    if constexpr (kQuarter == 0) two_bits = hn::ShiftLeft<4>(two_bits);
    if constexpr (kQuarter == 1) two_bits = hn::ShiftLeft<2>(two_bits);
    if constexpr (kQuarter == 3) two_bits = hn::ShiftRight<2>(two_bits);
    return minus(hn::Or(nibbles, hn::And(two_bits, hn::Set(ByteTag(), 0x30))), 32);
  }
  template <int kUnit>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const uint8_t* low_bits = codes + offsetof(BlockQ6_K, low_bits) + kUnit / 4 * 64 + kUnit % 2 * 32;
    const uint8_t* high_bits = codes + offsetof(BlockQ6_K, high_bits) + kUnit / 4 * 32;
    low = set16(scales.scales[2 * kUnit]) * bytes_to_float(codes_of<kUnit>(low_bits, high_bits));
    high = set16(scales.scales[2 * kUnit + 1]) * bytes_to_float(codes_of<kUnit>(low_bits + 16, high_bits + 16));
  }
};

// E2M1 values times two; code 8 is +0.
HWY_INLINE Vec16 doubled_e2m1(Bytes codes) {
  alignas(16) static constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return bytes_to_float(hn::TableLookupBytes(hn::Load(SignedByteTag(), kDoubled), hn::BitCast(SignedByteTag(), codes)));
}
HWY_INLINE Vec16 doubled_e2m1_table() {
  alignas(64) static constexpr float kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return load16(kDoubled);
}

struct CodecMxfp4 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = sizeof(BlockMxfp4);
  static constexpr int kScaleBytes = 0;
  struct Scales {
    Vec16 scale_or_table;
  };
  static HWY_INLINE Scales prepare(const uint8_t* codes, const uint8_t*) {
    const uint32_t exponent = codes[0];  // decode.h: mxfp4_half_scale
    const uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1u) << 23;
    const Vec16 scale = set16(std::bit_cast<float>(bits));
    if constexpr (kHasLaneTable) return {scale * doubled_e2m1_table()};
    return {scale};
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    if constexpr (kHasLaneTable) {
      look_up_nibbles(scales.scale_or_table, codes + offsetof(BlockMxfp4, codes), low, high);
    } else {
      const Bytes bytes = load_bytes(codes + offsetof(BlockMxfp4, codes));
      low = scales.scale_or_table * doubled_e2m1(low_nibbles(bytes));
      high = scales.scale_or_table * doubled_e2m1(high_nibbles(bytes));
    }
  }
};

struct CodecNvfp4 {
  static constexpr int kUnits = 2;
  static constexpr int kCodeBytes = sizeof(BlockNvfp4);
  static constexpr int kScaleBytes = 0;
  struct Scales {};
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t*) { return {}; }
  static HWY_INLINE Vec16 group(const uint8_t* codes, int index) {
    const Bytes bytes = hn::LoadDup128(ByteTag(), codes + offsetof(BlockNvfp4, codes) + index / 2 * 16);
    const Bytes own = index % 2 == 0 ? bytes : hn::ShiftRightBytes<8>(ByteTag(), bytes);  // 8 bytes a group
    const Bytes in_order = hn::ConcatLowerLower(ByteTag(), high_nibbles(own), low_nibbles(own));
    return set16(kNvfp4HalfScales.values[codes[index]]) * doubled_e2m1(in_order);
  }
  template <int kUnit>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales&, Vec16& low, Vec16& high) {
    low = group(codes, 2 * kUnit);
    high = group(codes, 2 * kUnit + 1);
  }
};

struct CodecFp4G128 {
  static constexpr int kUnits = 4;
  static constexpr int kCodeBytes = kFp4GroupWeights / 2;
  static constexpr int kScaleBytes = 2;
  struct Scales {
    Vec16 scale_or_table;
  };
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t* scales) {
    const Vec16 scale = set16(bf16_to_f32(load_as<uint16_t>(scales)));
    if constexpr (kHasLaneTable) {
      alignas(64) static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
      return {load16(kValues) * scale};
    }
    return {scale};
  }
  // Code 8 is -0 here, so the sign is put on after the magnitude.
  static HWY_INLINE Vec16 values(Bytes codes) {
    const Vec16 magnitude = doubled_e2m1(hn::And(codes, hn::Set(ByteTag(), 7))) * set16(0.5f);
    const Vec16 sign = bytes_to_float(hn::And(codes, hn::Set(ByteTag(), 8)));  // 0 or 8
    Vec16 r;
    for (size_t p = 0; p < kParts; ++p) {
      const auto is_negative = hn::Gt(sign.part[p], hn::Zero(FloatTag()));
      r.part[p] = hn::IfThenElse(is_negative, hn::Neg(magnitude.part[p]), magnitude.part[p]);
    }
    return r;
  }
  template <int kUnit>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    const Bytes bytes = load_bytes(codes + 16 * kUnit);  // low nibble: the even column
    const Bytes odd = high_nibbles(bytes);
    const Bytes even = kHasLaneTable ? bytes : low_nibbles(bytes);
    const Bytes low_codes = hn::InterleaveLower(ByteTag(), even, odd);
    const Bytes high_codes = hn::InterleaveUpper(ByteTag(), even, odd);
    if constexpr (kHasLaneTable) {
      low = look_up(scales.scale_or_table, lanes_of(low_codes));
      high = look_up(scales.scale_or_table, lanes_of(high_codes));
    } else {
      low = values(low_codes) * scales.scale_or_table;
      high = values(high_codes) * scales.scale_or_table;
    }
  }
};

// Formats whose "block" is one weight: a unit is 32 of them, and a row may end within one (kWeightBytes).
// kPlain: no code is NaN, and a scale 256 times as large is finite (is_plain_fp8). Then weights come without their scale, which multiplies
// a row's sum instead (sum_factor).
template <bool kPlain>
struct CodecFp8Of {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = 32;
  static constexpr int kScaleBytes = 0;
  static constexpr int kWeightBytes = 1;
  static constexpr bool kScalesSums = kPlain;
  struct Scales {
    Vec16 scale;
  };
  static constexpr float kUnit = kPlain && HWY_TARGET != HWY_SSE4 ? 256.0f : 1.0f;   // of what values() gives
  static HWY_INLINE float sum_factor(const uint8_t* scales) { return kUnit * load_as<float>(scales); }
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t* scales) {
    if constexpr (kPlain) return {};
    return {set16(load_as<float>(scales))};
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales& scales, Vec16& low, Vec16& high) {
    low = values(codes);
    high = values(codes + 16);
    if constexpr (!kPlain) low = low * scales.scale, high = high * scales.scale;
  }
#if HWY_TARGET == HWY_SSE4
  static HWY_INLINE Vec16 values(const uint8_t* codes) {
    alignas(16) float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = kE4m3Values.values[codes[i]];
    return load16(lanes);
  }
#else
  // As f16 bits, exponent and mantissa shifted into place are the value over 2^8, subnormal codes included.
  static HWY_INLINE Vec16 values(const uint8_t* codes) {
    const FloatTag df;
    const hn::Rebind<int16_t, FloatTag> d16;
    const hn::Rebind<int8_t, FloatTag> d8;
    const hn::Rebind<hwy::float16_t, FloatTag> df16;
    Vec16 r;
    for (size_t p = 0; p < kParts; ++p) {
      const auto code = hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes + p * kPartLanes));
      const auto bits = hn::And(hn::ShiftLeft<7>(hn::PromoteTo(d16, code)), hn::Set(d16, static_cast<int16_t>(0xbf80)));
      const auto small = hn::PromoteTo(df, hn::BitCast(df16, bits));
      if constexpr (kPlain) {
        r.part[p] = small;
      } else {
        // Code 127 of either sign is NaN; as f16 it is the next number after the largest, 480.
        const auto value = hn::Mul(small, hn::Set(df, 256.0f));
        r.part[p] = hn::IfThenElse(hn::Eq(hn::Abs(value), hn::Set(df, 480.0f)), hn::NaN(df), value);
      }
    }
    return r;
  }
#endif
};

using CodecFp8 = CodecFp8Of<false>;
using CodecFp8Plain = CodecFp8Of<true>;

struct CodecBf16 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = 64;
  static constexpr int kScaleBytes = 0;
  static constexpr int kWeightBytes = 2;
  struct Scales {};
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t*) { return {}; }
  static HWY_INLINE Vec16 values(const uint8_t* codes) {
    const hn::Rebind<uint16_t, FloatTag> d16;
    const hn::RebindToUnsigned<FloatTag> d32;
    Vec16 r;
    for (size_t p = 0; p < kParts; ++p) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes + 2 * p * kPartLanes));
      r.part[p] = hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
    }
    return r;
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales&, Vec16& low, Vec16& high) {
    low = values(codes);
    high = values(codes + 32);
  }
};

struct CodecF16 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = 64;
  static constexpr int kScaleBytes = 0;
  static constexpr int kWeightBytes = 2;
  struct Scales {};
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t*) { return {}; }
  static HWY_INLINE Vec16 values(const uint8_t* codes) {
#if HWY_TARGET == HWY_SSE4
    alignas(16) float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = f16_to_f32(load_as<uint16_t>(codes + 2 * i));
    return load16(lanes);
#else
    const hn::Rebind<uint16_t, FloatTag> d16;
    const hn::Rebind<hwy::float16_t, FloatTag> df16;
    Vec16 r;
    for (size_t p = 0; p < kParts; ++p) {
      const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(codes + 2 * p * kPartLanes));
      r.part[p] = hn::PromoteTo(FloatTag(), hn::BitCast(df16, bits));
    }
    return r;
#endif
  }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales&, Vec16& low, Vec16& high) {
    low = values(codes);
    high = values(codes + 32);
  }
};

struct CodecF32 {
  static constexpr int kUnits = 1;
  static constexpr int kCodeBytes = 128;
  static constexpr int kScaleBytes = 0;
  static constexpr int kWeightBytes = 4;
  struct Scales {};
  static HWY_INLINE Scales prepare(const uint8_t*, const uint8_t*) { return {}; }
  template <int>
  static HWY_INLINE void decode(const uint8_t* codes, const Scales&, Vec16& low, Vec16& high) {
    low = load16(reinterpret_cast<const float*>(codes));
    high = load16(reinterpret_cast<const float*>(codes + 64));
  }
};

template <class Codec>
concept HasPartialUnits = requires { Codec::kWeightBytes; };

// Whether a row's scale multiplies its sum and not its weights.
template <class Codec>
concept ScalesSums = requires { requires Codec::kScalesSums; };

// The last columns of a row, fewer than 32, as a whole unit of codes that decode to 0 behind them.
struct PartialUnit {
  alignas(64) uint8_t codes[128] = {};
  template <class Codec>
  HWY_INLINE void fill(const uint8_t* from, int64_t n_columns) {
    std::memcpy(codes, from, static_cast<size_t>(n_columns * Codec::kWeightBytes));
  }
};

template <class Visitor>
HWY_INLINE void with_codec(Format format, Visitor&& visitor) {
  switch (format) {
    case Format::kF32: return visitor(CodecF32{});
    case Format::kF16: return visitor(CodecF16{});
    case Format::kBf16: return visitor(CodecBf16{});
    case Format::kQ4_0: return visitor(CodecQ4_0{});
    case Format::kQ4_1: return visitor(CodecQ4_1{});
    case Format::kQ5_0: return visitor(CodecQ5_0{});
    case Format::kQ5_1: return visitor(CodecQ5_1{});
    case Format::kQ8_0: return visitor(CodecQ8_0{});
    case Format::kQ4_K: return visitor(CodecQ4_K{});
    case Format::kQ5_K: return visitor(CodecQ5_K{});
    case Format::kQ6_K: return visitor(CodecQ6_K{});
    case Format::kMxfp4: return visitor(CodecMxfp4{});
    case Format::kNvfp4: return visitor(CodecNvfp4{});
    case Format::kFp4G128: return visitor(CodecFp4G128{});
    case Format::kFp8: return visitor(CodecFp8{});
    case Format::kI32:
    case Format::kI64:
    case Format::kU8: break;
  }
  BERYL_CHECK(false, "a weight format");
}

// Units kUnit.. of a block: use(unit, low, high).
template <class Codec, int kUnit = 0, class Use>
HWY_INLINE void decode_units(const uint8_t* codes, const typename Codec::Scales& scales, const Use& use) {
  if constexpr (kUnit < Codec::kUnits) {
    Vec16 low, high;
    Codec::template decode<kUnit>(codes, scales, low, high);
    use(kUnit, low, high);
    decode_units<Codec, kUnit + 1>(codes, scales, use);
  }
}

// One row to f32: 16 columns each at to, to + stride16, ...; writes ceil(cols / 32) whole units, zeros behind the end. Blocks of codes are
// code_step bytes apart.
template <class Codec>
HWY_INLINE void decode_row_to(const uint8_t* codes, const uint8_t* scales, int64_t cols, float* to, int64_t stride16,
                              int64_t code_step = Codec::kCodeBytes) {
  constexpr int kColumns = 32 * Codec::kUnits;
  for (int64_t block = 0; block < cols / kColumns; ++block) {
    const auto prepared = Codec::prepare(codes, scales);
    decode_units<Codec>(codes, prepared, [&](int unit, const Vec16& low, const Vec16& high) HWY_ATTR {
      store16(low, to + 2 * unit * stride16);
      store16(high, to + (2 * unit + 1) * stride16);
    });
    codes += code_step;
    scales += Codec::kScaleBytes;
    to += 2 * Codec::kUnits * stride16;
  }
  if constexpr (HasPartialUnits<Codec>) {
    if (const int64_t rest = cols % kColumns; rest > 0) {
      PartialUnit partial;
      partial.fill<Codec>(codes, rest);
      alignas(64) float values[32];
      const auto prepared = Codec::prepare(partial.codes, scales);
      decode_units<Codec>(partial.codes, prepared, [&](int, const Vec16& low, const Vec16& high) HWY_ATTR {
        store16(low, values);
        store16(high, values + 16);
      });
      for (int64_t c = rest; c < 32; ++c) values[c] = 0;  // an infinite FP8 scale would make them NaN
      std::memcpy(to, values, 16 * sizeof(float));
      std::memcpy(to + stride16, values + 16, 16 * sizeof(float));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#endif  // BERYL_CPU_DECODE_INL_H_
