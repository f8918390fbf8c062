// integer_dot.h on AVX2 with FMA and F16C: 64 bytes are two registers.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "cpu/integer_dot.h"
#include "weights/blocks.h"
#include "weights/decode.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace beryl {
namespace {
namespace avx2 {

struct Simd {
  struct Codes {
    __m256i a, b;
  };
  using Ints = Codes;
  struct Floats {
    __m256 a, b;
  };
  static constexpr bool kUnsignedTokens = false;
  static constexpr int kWideOffset = 0;

  static __m256i load_part(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Codes load(const uint8_t* from) { return {load_part(from), load_part(from + 32)}; }
  static Codes load_next(const uint8_t* from) { return load(from); }
  static Codes low_nibbles(Codes c) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(c.a, mask), _mm256_and_si256(c.b, mask)};
  }
  static Codes high_nibbles(Codes c) { return low_nibbles({_mm256_srli_epi16(c.a, 4), _mm256_srli_epi16(c.b, 4)}); }
  template <int kShift>
  static __m256i shift(__m256i bits) {
    if constexpr (kShift > 0) return _mm256_slli_epi16(bits, kShift);
    if constexpr (kShift < 0) return _mm256_srli_epi16(bits, -kShift);
    return bits;
  }
  // codes | (bits << kShift & mask), a byte at a time; the mask keeps what crosses a byte out.
  template <int kShift>
  static Codes with_bits(Codes codes, Codes bits, char mask) {
    const __m256i m = _mm256_set1_epi8(mask);
    return {_mm256_or_si256(codes.a, _mm256_and_si256(shift<kShift>(bits.a), m)),
            _mm256_or_si256(codes.b, _mm256_and_si256(shift<kShift>(bits.b), m))};
  }
  static void look_up_nibbles(const uint8_t* table, Codes pairs, Codes& low, Codes& high) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    const Codes l = low_nibbles(pairs), h = high_nibbles(pairs);
    low = {_mm256_shuffle_epi8(t, l.a), _mm256_shuffle_epi8(t, l.b)};
    high = {_mm256_shuffle_epi8(t, h.a), _mm256_shuffle_epi8(t, h.b)};
  }
  static __m256i four(const int8_t* x) {
    int32_t bytes;
    __builtin_memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
  }
  static __m256i dot_part(__m256i sum, __m256i unsigned_bytes, __m256i signed_bytes) {
    const __m256i pairs = _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Ints dot(Ints sum, Codes codes, const int8_t* x) {
    const __m256i values = four(x);
    return {dot_part(sum.a, codes.a, values), dot_part(sum.b, codes.b, values)};
  }
  // |code| <= 128 times x with the code's sign: 2 · 128 · 127 fits 16 bits, where unsigned codes to 255 would not.
  static Ints dot_many(Ints sum, Codes codes, const int8_t* x) {
    const __m256i values = four(x);
    return {dot_part(sum.a, _mm256_abs_epi8(codes.a), _mm256_sign_epi8(values, codes.a)),
            dot_part(sum.b, _mm256_abs_epi8(codes.b), _mm256_sign_epi8(values, codes.b))};
  }
  static Ints dot_wide(Ints sum, Codes codes, const int8_t* x) { return dot_many(sum, minus(codes, 128), x); }
  static Codes minus(Codes codes, int offset) {
    const __m256i o = _mm256_set1_epi8(static_cast<char>(offset));
    return {_mm256_sub_epi8(codes.a, o), _mm256_sub_epi8(codes.b, o)};
  }
  static Ints add_codes(Ints sum, Codes codes) {  // signed
    const __m256i ones = _mm256_set1_epi8(1);
    return {dot_part(sum.a, ones, codes.a), dot_part(sum.b, ones, codes.b)};
  }
  static Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.a, b.a), _mm256_add_epi32(a.b, b.b)}; }
  static Ints times_minus_128(Ints a) {
    const __m256i zero = _mm256_setzero_si256();
    return {_mm256_sub_epi32(zero, _mm256_slli_epi32(a.a, 7)), _mm256_sub_epi32(zero, _mm256_slli_epi32(a.b, 7))};
  }
  static Ints set_int(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static Ints load_int(const int32_t* from) { return {load_part(from), load_part(from + 8)}; }
  static void store_part(__m256i part, void* to) { _mm256_storeu_si256(static_cast<__m256i*>(to), part); }
  static void store_int(Ints a, int32_t* to) {
    store_part(a.a, to);
    store_part(a.b, to + 8);
  }
  static void store_codes(Codes a, uint8_t* to) {
    store_part(a.a, to);
    store_part(a.b, to + 32);
  }

  static Floats set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
  static Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)};
  }
  static Floats negate(Floats a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(a.a, sign), _mm256_xor_ps(a.b, sign)};
  }
  static Floats to_float(Ints a) { return {_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }
  static Floats load_floats(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static void store(Floats a, float* to) {
    _mm256_storeu_ps(to, a.a);
    _mm256_storeu_ps(to + 8, a.b);
  }
  static __m128i eight_words(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m128i eight_bytes(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static Floats load_f16(const uint8_t* from) {
    return {_mm256_cvtph_ps(eight_words(from)), _mm256_cvtph_ps(eight_words(from + 16))};
  }
  static __m256 bf16_part(const uint8_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight_words(from)), 16));
  }
  static Floats load_bf16(const uint8_t* from) { return {bf16_part(from), bf16_part(from + 16)}; }
  static Floats load_u8(const uint8_t* from) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(from))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight_bytes(from + 8)))};
  }
  static Floats load_i8(const uint8_t* from) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(from))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(from + 8)))};
  }
  static __m256 e8m0_part(const uint8_t* from) {  // decode.h: mxfp4_half_scale
    const __m256i e = _mm256_cvtepu8_epi32(eight_bytes(from));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    const __m256i subnormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
  }
  static Floats load_e8m0_halved(const uint8_t* from) { return {e8m0_part(from), e8m0_part(from + 8)}; }
  // As f16 bits the value over 2^8 (exponent bias 15 instead of 7), subnormals included.
  static __m256 ue4m3_part(const uint8_t* from) {
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight_bytes(from)), 7)), _mm256_set1_ps(128.0f));
  }
  static Floats load_ue4m3_halved(const uint8_t* from) { return {ue4m3_part(from), ue4m3_part(from + 8)}; }
};

#include "cpu/integer_dot-inl.h"

}  // namespace avx2
}  // namespace

const IntegerKernels kAvx2IntegerKernels = {avx2::Simd::kUnsignedTokens, avx2::multiply_few, avx2::expand,
                                            avx2::multiply_many};

}  // namespace beryl
#pragma GCC pop_options
#endif
