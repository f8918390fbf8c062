// integer_dot.h on 64-bit ARM with the dot product extension: 64 bytes are four registers.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/integer_dot.h"
#include "weights/blocks.h"
#include "weights/decode.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")

namespace beryl {
namespace {
namespace neondot {

struct Simd {
  struct Codes {
    uint8x16_t part[4];
  };
  struct Ints {
    int32x4_t part[4];
  };
  struct Floats {
    float32x4_t part[4];
  };
  static constexpr bool kUnsignedTokens = false;
  static constexpr int kWideOffset = 0;

#define BERYL_PARTS(result, expression)       \
  do {                                        \
    for (int p = 0; p < 4; ++p)               \
      (result).part[p] = (expression);        \
  } while (false)

  static Codes load(const uint8_t* from) {
    Codes r;
    BERYL_PARTS(r, vld1q_u8(from + 16 * p));
    return r;
  }
  static Codes load_next(const uint8_t* from) { return load(from); }
  static Codes low_nibbles(const Codes& c) {
    Codes r;
    BERYL_PARTS(r, vandq_u8(c.part[p], vdupq_n_u8(0x0f)));
    return r;
  }
  static Codes high_nibbles(const Codes& c) {
    Codes r;
    BERYL_PARTS(r, vshrq_n_u8(c.part[p], 4));
    return r;
  }
  template <int kShift>
  static uint8x16_t shift(uint8x16_t bits) {
    return vshlq_u8(bits, vdupq_n_s8(kShift));   // to the right where negative
  }
  template <int kShift>
  static Codes with_bits(const Codes& codes, const Codes& bits, int mask) {
    Codes r;
    BERYL_PARTS(r, vorrq_u8(codes.part[p], vandq_u8(shift<kShift>(bits.part[p]), vdupq_n_u8(static_cast<uint8_t>(mask)))));
    return r;
  }
  static void look_up_nibbles(const uint8_t* table, const Codes& pairs, Codes& low, Codes& high) {
    const uint8x16_t t = vld1q_u8(table);
    const Codes l = low_nibbles(pairs), h = high_nibbles(pairs);
    BERYL_PARTS(low, vqtbl1q_u8(t, l.part[p]));
    BERYL_PARTS(high, vqtbl1q_u8(t, h.part[p]));
  }
  static int8x16_t four(const int8_t* x) {
    int32_t bytes;
    std::memcpy(&bytes, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(bytes));
  }
  // Bytes as signed ones: codes below 128 are the same either way.
  static Ints dot(const Ints& sum, const Codes& codes, const int8_t* x) {
    const int8x16_t values = four(x);
    Ints r;
    BERYL_PARTS(r, vdotq_s32(sum.part[p], vreinterpretq_s8_u8(codes.part[p]), values));
    return r;
  }
  static Ints dot_many(const Ints& sum, const Codes& codes, const int8_t* x) { return dot(sum, codes, x); }
  static Ints dot_wide(const Ints& sum, const Codes& codes, const int8_t* x) { return dot(sum, minus(codes, 128), x); }
  static Codes minus(const Codes& codes, int offset) {
    Codes r;
    BERYL_PARTS(r, vsubq_u8(codes.part[p], vdupq_n_u8(static_cast<uint8_t>(offset))));
    return r;
  }
  static Ints add_codes(const Ints& sum, const Codes& codes) {  // signed
    Ints r;
    BERYL_PARTS(r, vdotq_s32(sum.part[p], vreinterpretq_s8_u8(codes.part[p]), vdupq_n_s8(1)));
    return r;
  }
  static Ints add(const Ints& a, const Ints& b) {
    Ints r;
    BERYL_PARTS(r, vaddq_s32(a.part[p], b.part[p]));
    return r;
  }
  static Ints times_minus_128(const Ints& a) {
    Ints r;
    BERYL_PARTS(r, vnegq_s32(vshlq_n_s32(a.part[p], 7)));
    return r;
  }
  static Ints set_int(int32_t value) {
    Ints r;
    BERYL_PARTS(r, vdupq_n_s32(value));
    return r;
  }
  static Ints load_int(const int32_t* from) {
    Ints r;
    BERYL_PARTS(r, vld1q_s32(from + 4 * p));
    return r;
  }
  static void store_int(const Ints& a, int32_t* to) {
    for (int p = 0; p < 4; ++p) vst1q_s32(to + 4 * p, a.part[p]);
  }
  static void store_codes(const Codes& a, uint8_t* to) {
    for (int p = 0; p < 4; ++p) vst1q_u8(to + 16 * p, a.part[p]);
  }

  static Floats set(float value) {
    Floats r;
    BERYL_PARTS(r, vdupq_n_f32(value));
    return r;
  }
  static Floats mul(const Floats& a, const Floats& b) {
    Floats r;
    BERYL_PARTS(r, vmulq_f32(a.part[p], b.part[p]));
    return r;
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    Floats r;
    BERYL_PARTS(r, vfmaq_f32(c.part[p], a.part[p], b.part[p]));
    return r;
  }
  static Floats negate(const Floats& a) {
    Floats r;
    BERYL_PARTS(r, vnegq_f32(a.part[p]));
    return r;
  }
  static Floats to_float(const Ints& a) {
    Floats r;
    BERYL_PARTS(r, vcvtq_f32_s32(a.part[p]));
    return r;
  }
  static Floats load_floats(const float* from) {
    Floats r;
    BERYL_PARTS(r, vld1q_f32(from + 4 * p));
    return r;
  }
  static void store(const Floats& a, float* to) {
    for (int p = 0; p < 4; ++p) vst1q_f32(to + 4 * p, a.part[p]);
  }
  static uint16x4_t four_words(const uint8_t* from) { return vreinterpret_u16_u8(vld1_u8(from)); }
  static Floats load_f16(const uint8_t* from) {
    Floats r;
    BERYL_PARTS(r, vcvt_f32_f16(vreinterpret_f16_u16(four_words(from + 8 * p))));
    return r;
  }
  static Floats load_bf16(const uint8_t* from) {
    Floats r;
    BERYL_PARTS(r, vreinterpretq_f32_u32(vshll_n_u16(four_words(from + 8 * p), 16)));
    return r;
  }
  // Sixteen bytes to lanes.
  struct Lanes {
    uint32x4_t part[4];
  };
  static Lanes widen(const uint8_t* from) {
    const uint8x16_t bytes = vld1q_u8(from);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
             vmovl_u16(vget_high_u16(high))}};
  }
  static Floats load_u8(const uint8_t* from) {
    const Lanes lanes = widen(from);
    Floats r;
    BERYL_PARTS(r, vcvtq_f32_u32(lanes.part[p]));
    return r;
  }
  static Floats load_i8(const uint8_t* from) {
    const Lanes lanes = widen(from);
    Floats r;
    BERYL_PARTS(r, vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(lanes.part[p]), 24), 24)));
    return r;
  }
  static float32x4_t e8m0_part(uint32x4_t e) {  // decode.h: mxfp4_half_scale
    const uint32x4_t normal = vshlq_n_u32(vsubq_u32(e, vdupq_n_u32(1)), 23);
    const uint32x4_t subnormal = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(e));
    return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(e, vdupq_n_u32(2)), subnormal, normal));
  }
  static Floats load_e8m0_halved(const uint8_t* from) {
    const Lanes lanes = widen(from);
    Floats r;
    BERYL_PARTS(r, e8m0_part(lanes.part[p]));
    return r;
  }
  // As f16 bits the value over 2^8 (exponent bias 15 instead of 7), subnormals included.
  static Floats load_ue4m3_halved(const uint8_t* from) {
    const Lanes lanes = widen(from);
    Floats r;
    BERYL_PARTS(r, vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16(vmovn_u32(lanes.part[p]), 7))), 128.0f));
    return r;
  }
#undef BERYL_PARTS
};

#include "cpu/integer_dot-inl.h"

}  // namespace neondot
}  // namespace

const IntegerKernels kNeonDotIntegerKernels = {neondot::Simd::kUnsignedTokens, neondot::multiply_few, neondot::expand,
                                               neondot::multiply_many};

}  // namespace beryl
#pragma GCC pop_options
#endif
