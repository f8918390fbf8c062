// integer_dot.h in plain C++: for processors without a kernel of their own, and what the others are tested against. Where
// there is no fused multiply-add, std::fma gives its bits in software.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/float_formats.h"
#include "cpu/integer_dot.h"
#include "weights/decode.h"

namespace beryl {
namespace {
namespace portable {

struct Simd {
  struct Codes {
    uint8_t byte[64];
  };
  struct Ints {
    int32_t lane[16];
  };
  struct Floats {
    float lane[16];
  };
  static constexpr bool kUnsignedTokens = false;
  static constexpr int kWideOffset = 128;

  template <class Function>
  static Codes codes_of(const Function& function) {
    Codes r;
    for (int i = 0; i < 64; ++i) r.byte[i] = static_cast<uint8_t>(function(i));
    return r;
  }
  template <class Function>
  static Ints ints_of(const Function& function) {
    Ints r;
    for (int i = 0; i < 16; ++i) r.lane[i] = function(i);
    return r;
  }
  template <class Function>
  static Floats floats_of(const Function& function) {
    Floats r;
    for (int i = 0; i < 16; ++i) r.lane[i] = function(i);
    return r;
  }
  static uint16_t word(const uint8_t* from, int i) {
    uint16_t value;
    std::memcpy(&value, from + 2 * i, 2);
    return value;
  }

  static Codes load(const uint8_t* from) {
    Codes r;
    std::memcpy(r.byte, from, 64);
    return r;
  }
  static Codes load_next(const uint8_t* from) { return load(from); }
  static Codes low_nibbles(const Codes& c) {
    return codes_of([&](int i) { return c.byte[i] & 15; });
  }
  static Codes high_nibbles(const Codes& c) {
    return codes_of([&](int i) { return c.byte[i] >> 4; });
  }
  template <int kShift>
  static Codes with_bits(const Codes& codes, const Codes& bits, int mask) {
    return codes_of([&](int i) {
      return codes.byte[i] | ((kShift > 0 ? bits.byte[i] << (kShift > 0 ? kShift : 0) : bits.byte[i] >> (kShift < 0 ? -kShift : 0)) & mask);
    });
  }
  static void look_up_nibbles(const uint8_t* table, const Codes& pairs, Codes& low, Codes& high) {
    low = codes_of([&](int i) { return table[pairs.byte[i] & 15]; });
    high = codes_of([&](int i) { return table[pairs.byte[i] >> 4]; });
  }
  static Ints dot(const Ints& sum, const Codes& codes, const int8_t* x) {
    return ints_of([&](int i) {
      const uint8_t* c = codes.byte + 4 * i;
      return sum.lane[i] + c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3];
    });
  }
  static Ints dot_wide(const Ints& sum, const Codes& codes, const int8_t* x) { return dot(sum, codes, x); }
  static Ints dot_many(const Ints& sum, const Codes& codes, const int8_t* x) {
    return ints_of([&](int i) {
      int32_t result = sum.lane[i];
      for (int b = 0; b < 4; ++b) result += static_cast<int8_t>(codes.byte[4 * i + b]) * x[b];
      return result;
    });
  }
  static Codes minus(const Codes& codes, int offset) {
    return codes_of([&](int i) { return codes.byte[i] - offset; });
  }
  static Ints add_codes(const Ints& sum, const Codes& codes) {  // signed
    constexpr int8_t kOnes[4] = {1, 1, 1, 1};
    return dot_many(sum, codes, kOnes);
  }
  static Ints add(const Ints& a, const Ints& b) {
    return ints_of([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Ints times_minus_128(const Ints& a) {
    return ints_of([&](int i) { return -128 * a.lane[i]; });
  }
  static Ints set_int(int32_t value) {
    return ints_of([&](int) { return value; });
  }
  static Ints load_int(const int32_t* from) {
    return ints_of([&](int i) { return from[i]; });
  }
  static void store_int(const Ints& a, int32_t* to) { std::memcpy(to, a.lane, 64); }
  static void store_codes(const Codes& a, uint8_t* to) { std::memcpy(to, a.byte, 64); }

  static Floats set(float value) {
    return floats_of([&](int) { return value; });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return floats_of([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return floats_of([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static Floats negate(const Floats& a) {
    return floats_of([&](int i) { return -a.lane[i]; });
  }
  static Floats to_float(const Ints& a) {
    return floats_of([&](int i) { return static_cast<float>(a.lane[i]); });
  }
  static Floats load_floats(const float* from) {
    return floats_of([&](int i) { return from[i]; });
  }
  static void store(const Floats& a, float* to) { std::memcpy(to, a.lane, 64); }
  static Floats load_f16(const uint8_t* from) {
    return floats_of([&](int i) { return f16_to_f32(word(from, i)); });
  }
  static Floats load_bf16(const uint8_t* from) {
    return floats_of([&](int i) { return bf16_to_f32(word(from, i)); });
  }
  static Floats load_u8(const uint8_t* from) {
    return floats_of([&](int i) { return static_cast<float>(from[i]); });
  }
  static Floats load_i8(const uint8_t* from) {
    return floats_of([&](int i) { return static_cast<float>(static_cast<int8_t>(from[i])); });
  }
  static Floats load_e8m0_halved(const uint8_t* from) {
    return floats_of([&](int i) { return mxfp4_half_scale(from[i]); });
  }
  // Packed scales have no sign and no NaN; 0xff, whose sign alone is ignored, was packed as 0x7f.
  static Floats load_ue4m3_halved(const uint8_t* from) {
    return floats_of([&](int i) { return nvfp4_half_scale(from[i] == 0x7f ? 0xff : from[i]); });
  }
};

#include "cpu/integer_dot-inl.h"

}  // namespace portable
}  // namespace

const IntegerKernels kPortableIntegerKernels = {portable::Simd::kUnsignedTokens, portable::multiply_few, portable::expand,
                                                portable::multiply_many};

}  // namespace beryl
