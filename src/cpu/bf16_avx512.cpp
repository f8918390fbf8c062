// bf16_dot.h on AVX-512 without BF16: a pair of columns is two multiply-adds.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>

#include "cpu/bf16_dot.h"
#include "cpu/packed_matrix.h"

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
// GCC 12 takes the deliberately undefined operands in its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace beryl {
namespace {
namespace avx512 {

struct Simd {
  using Floats = __m512;
  struct Weights {
    __m512 even, odd;
  };
  struct Value {
    __m512 even, odd;
  };
  using Token = const float*;
  static constexpr int kMostTokens = kBf16TokenTile;
  static constexpr int strips_at_once(int) { return 2; }

  static Token token(const Bf16Tokens& x, int64_t index) { return x.as_f32(index); }
  static Value value(Token token, int64_t pair) { return {_mm512_set1_ps(token[2 * pair]), _mm512_set1_ps(token[2 * pair + 1])}; }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Weights weights(const uint8_t* from) {
    const __m512i pairs = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static Floats add(Floats y, const Weights& w, const Value& x) {
    return _mm512_fmadd_ps(w.even, x.even, _mm512_fmadd_ps(w.odd, x.odd, y));
  }
  static void store(Floats a, float* to) { _mm512_storeu_ps(to, a); }
};

#include "cpu/bf16_dot-inl.h"

}  // namespace avx512
}  // namespace

const Bf16Kernels kAvx512Bf16InF32Kernels = {true, avx512::multiply};

}  // namespace beryl
#pragma GCC pop_options
#endif
