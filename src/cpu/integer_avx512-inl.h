// AVX-512 for integer_dot-inl.h, with VNNI where BERYL_VNNI is 1 and with VBMI where BERYL_VBMI is 1.
struct Simd {
  using Codes = __m512i;
  using Ints = __m512i;
  using Floats = __m512;
  static constexpr bool kUnsignedTokens = BERYL_VNNI;
  static constexpr int kWideOffset = BERYL_VNNI ? 128 : 0;

  static Codes load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static Codes load_next(const uint8_t* from) {
    Codes codes = load(from);
    asm volatile("" : "+v"(codes));
    return codes;
  }
  static Codes low_nibbles(Codes c) { return _mm512_and_si512(c, _mm512_set1_epi8(0x0f)); }
  static Codes high_nibbles(Codes c) { return _mm512_and_si512(_mm512_srli_epi16(c, 4), _mm512_set1_epi8(0x0f)); }
  // codes | (bits << kShift & mask), a byte at a time; the mask keeps what crosses a byte out.
  template <int kShift>
  static Codes with_bits(Codes codes, Codes bits, char mask) {
    const Codes shifted = kShift > 0   ? _mm512_slli_epi16(bits, kShift > 0 ? kShift : 0)
                          : kShift < 0 ? _mm512_srli_epi16(bits, kShift < 0 ? -kShift : 0)
                                       : bits;
    return _mm512_ternarylogic_epi32(codes, shifted, _mm512_set1_epi8(mask), 0xf8);
  }
  // High nibbles come down on the multiplier, which has less to do here than the shuffle unit. VBMI's permutation looks at six bits of
  // each byte, so a table that repeats itself needs no mask.
  static void look_up_nibbles(const uint8_t* table, Codes pairs, Codes& low, Codes& high) {
    const Codes values = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
    const Codes down = _mm512_mulhi_epu16(pairs, _mm512_set1_epi16(1 << 12));
#if BERYL_VBMI
    low = _mm512_permutexvar_epi8(pairs, values);
    high = _mm512_permutexvar_epi8(down, values);
#else
    low = _mm512_shuffle_epi8(values, low_nibbles(pairs));
    high = _mm512_shuffle_epi8(values, low_nibbles(down));
#endif
  }
  static Codes four(const int8_t* x) {
    int32_t bytes;
    __builtin_memcpy(&bytes, x, 4);
    return _mm512_set1_epi32(bytes);
  }
#if BERYL_VNNI
  static Ints dot(Ints sum, Codes codes, const int8_t* x) { return _mm512_dpbusd_epi32(sum, codes, four(x)); }
  static Ints dot_wide(Ints sum, Codes codes, const int8_t* x) { return _mm512_dpbusd_epi32(sum, codes, four(x)); }
  static Ints dot_many(Ints sum, Codes codes, const int8_t* x) { return _mm512_dpbusd_epi32(sum, four(x), codes); }
#else
  static Ints dot_bytes(Ints sum, Codes unsigned_bytes, Codes signed_bytes) {
    const Ints pairs = _mm512_maddubs_epi16(unsigned_bytes, signed_bytes);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static Ints dot(Ints sum, Codes codes, const int8_t* x) { return dot_bytes(sum, codes, four(x)); }
  // |code| <= 128 times x with the code's sign: 2 · 128 · 127 fits 16 bits, where unsigned codes to 255 would not.
  static Ints dot_many(Ints sum, Codes codes, const int8_t* x) {
    const Codes values = four(x);
    const Codes turned = _mm512_mask_sub_epi8(values, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), values);
    return dot_bytes(sum, _mm512_abs_epi8(codes), turned);
  }
  static Ints dot_wide(Ints sum, Codes codes, const int8_t* x) { return dot_many(sum, minus(codes, 128), x); }
#endif
  static Codes minus(Codes codes, int offset) { return _mm512_sub_epi8(codes, _mm512_set1_epi8(static_cast<char>(offset))); }
  static Ints add_codes(Ints sum, Codes codes) {  // signed
    const Ints pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), codes);
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints times_minus_128(Ints a) { return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(a, 7)); }
  static Ints set_int(int32_t value) { return _mm512_set1_epi32(value); }
  static Ints load_int(const int32_t* from) { return _mm512_loadu_si512(from); }
  static void store_int(Ints a, int32_t* to) { _mm512_storeu_si512(to, a); }
  static void store_codes(Codes a, uint8_t* to) { _mm512_storeu_si512(to, a); }

  static Floats set(float value) { return _mm512_set1_ps(value); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats negate(Floats a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a); }
  static Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
  static void store(Floats a, float* to) { _mm512_storeu_ps(to, a); }
  static __m128i bytes16(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m256i words16(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static Floats load_f16(const uint8_t* from) { return _mm512_cvtph_ps(words16(from)); }
  static Floats load_bf16(const uint8_t* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words16(from)), 16));
  }
  static Floats load_u8(const uint8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes16(from))); }
  static Floats load_i8(const uint8_t* from) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes16(from))); }
  static Floats load_e8m0_halved(const uint8_t* from) {  // decode.h: mxfp4_half_scale
    const __m512i e = _mm512_cvtepu8_epi32(bytes16(from));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __m512i subnormal = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), normal, subnormal));
  }
  // As f16 bits the value over 2^8 (exponent bias 15 instead of 7), subnormals included.
  static Floats load_ue4m3_halved(const uint8_t* from) {
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes16(from)), 7);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(128.0f));
  }
};
