// bf16_dot.h on AVX2 with FMA: a strip is two registers, and a pair of columns two multiply-adds.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "cpu/bf16_dot.h"
#include "cpu/packed_matrix.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace beryl {
namespace {
namespace avx2 {

struct Simd {
  struct Floats {
    __m256 a, b;
  };
  struct Weights {
    Floats even, odd;
  };
  struct Value {
    __m256 even, odd;
  };
  using Token = const float*;
  static constexpr int kMostTokens = 4;
  static constexpr int strips_at_once(int n_tokens) { return n_tokens == 1 ? 2 : 1; }

  static Token token(const Bf16Tokens& x, int64_t index) { return x.as_f32(index); }
  static Value value(Token token, int64_t pair) { return {_mm256_set1_ps(token[2 * pair]), _mm256_set1_ps(token[2 * pair + 1])}; }
  static Floats zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Weights weights(const uint8_t* from) {
    const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
            {_mm256_castsi256_ps(_mm256_and_si256(a, odd)), _mm256_castsi256_ps(_mm256_and_si256(b, odd))}};
  }
  static Floats add(Floats y, const Weights& w, const Value& x) {
    return {_mm256_fmadd_ps(w.even.a, x.even, _mm256_fmadd_ps(w.odd.a, x.odd, y.a)),
            _mm256_fmadd_ps(w.even.b, x.even, _mm256_fmadd_ps(w.odd.b, x.odd, y.b))};
  }
  static void store(Floats a, float* to) {
    _mm256_storeu_ps(to, a.a);
    _mm256_storeu_ps(to + 8, a.b);
  }
};

#include "cpu/bf16_dot-inl.h"

}  // namespace avx2
}  // namespace

const Bf16Kernels kAvx2Bf16Kernels = {true, avx2::multiply};

}  // namespace beryl
#pragma GCC pop_options
#endif
