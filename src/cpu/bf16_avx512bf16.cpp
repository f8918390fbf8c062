// bf16_dot.h on AVX-512 with BF16: a pair of columns of sixteen rows is one instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "base/float_formats.h"
#include "cpu/bf16_dot.h"
#include "cpu/packed_matrix.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
// GCC 12 takes the deliberately undefined operands in its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,avx512bf16")

namespace beryl {
namespace {
namespace avx512bf16 {

struct Simd {
  using Floats = __m512;
  using Weights = __m512i;
  using Value = __m512i;
  using Token = const uint16_t*;
  static constexpr int kMostTokens = kBf16TokenTile;
  static constexpr int strips_at_once(int) { return 2; }

  static Token token(const Bf16Tokens& x, int64_t index) { return x.as_bf16(index); }
  static Value value(Token token, int64_t pair) {
    int32_t both;
    __builtin_memcpy(&both, token + 2 * pair, 4);
    return _mm512_set1_epi32(both);
  }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Weights weights(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static Floats add(Floats y, Weights w, Value x) { return _mm512_dpbf16_ps(y, (__m512bh)w, (__m512bh)x); }
  static void store(Floats a, float* to) { _mm512_storeu_ps(to, a); }
};

#include "cpu/bf16_dot-inl.h"

// A pair of each of 16 sums.
__attribute__((noinline)) void add_pairs(const uint16_t* w, const uint16_t* x, float* sums) {
  _mm512_storeu_ps(sums, _mm512_dpbf16_ps(_mm512_loadu_ps(sums), (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x)));
}

}  // namespace avx512bf16
}  // namespace

const Bf16Kernels kAvx512Bf16Kernels = {false, avx512bf16::multiply};

}  // namespace beryl
#pragma GCC pop_options

namespace beryl {

bool bf16_instruction_adds_as_defined() {
  constexpr int kSteps = 256;
  uint32_t state = 1;
  const auto random = [&] {   // exponents that differ by up to 15, so that sums round in every way
    state = state * 1664525u + 1013904223u;
    const uint32_t exponent = 118 + (state >> 28);
    return static_cast<uint16_t>((state >> 12 & 0x807fu) | exponent << 7);
  };
  float sums[16] = {}, expected[16] = {};
  for (int i = 0; i < kSteps; ++i) {
    uint16_t w[32], x[32];
    for (int lane = 0; lane < 32; ++lane) w[lane] = random(), x[lane] = random();
    avx512bf16::add_pairs(w, x, sums);
    for (int lane = 0; lane < 16; ++lane)
      for (const int column : {2 * lane + 1, 2 * lane})
        expected[lane] += bf16_to_f32(w[column]) * bf16_to_f32(x[column]);   // the product is exact
    if (std::memcmp(expected, sums, sizeof(sums)) != 0) return false;
  }
  return true;
}

}  // namespace beryl
#endif
