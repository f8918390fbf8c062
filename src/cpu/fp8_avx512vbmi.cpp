// fp8_dot.h on AVX-512 with VBMI: the upper two bytes of a value's f32 (the others are zero) come from two tables of 128 bytes, for 64 codes
// at once; a permutation of bytes puts those of sixteen columns into place.
#if defined(__x86_64__)
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>

#include "base/float_formats.h"
#include "cpu/fp8_dot.h"
#include "cpu/linear.h"
#include "cpu/packed_matrix.h"

namespace beryl {
namespace {

struct Tables {
  alignas(64) std::array<uint8_t, 128> byte2, byte3;              // of the f32 of each code without sign
  // Columns 16 i .. 16 i + 15 of 64: byte 2 from the first operand of the permutation, byte 3 from the second.
  alignas(64) std::array<std::array<uint8_t, 64>, 4> places{};
};
const Tables kTables = [] {
  Tables tables;
  for (size_t code = 0; code < 128; ++code) {
    const auto bits = std::bit_cast<uint32_t>(e4m3_to_f32(static_cast<uint8_t>(code)));
    tables.byte2[code] = static_cast<uint8_t>(bits >> 16);
    tables.byte3[code] = static_cast<uint8_t>(bits >> 24);
  }
  for (size_t i = 0; i < 64; ++i) {
    tables.places[i / 16][i % 16 * 4 + 2] = static_cast<uint8_t>(i);
    tables.places[i / 16][i % 16 * 4 + 3] = static_cast<uint8_t>(64 + i);
  }
  return tables;
}();

}  // namespace
}  // namespace beryl

// Behind all standard headers, so that no shared inline function is compiled for this instruction set.
#pragma GCC push_options
// GCC 12 takes the deliberately undefined operands in its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,avx512vbmi")

namespace beryl {
namespace {

template <int kTokens>
void dot(const uint8_t* group, int64_t n_units, const float* x, float* sums) {
  static_assert(kFloatRows == 4, "two rows fill a register");
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i low2 = _mm512_load_si512(&kTables.byte2[0]), high2 = _mm512_load_si512(&kTables.byte2[64]);
  const __m512i low3 = _mm512_load_si512(&kTables.byte3[0]), high3 = _mm512_load_si512(&kTables.byte3[64]);
  const __m512i place[4] = {_mm512_load_si512(&kTables.places[0]), _mm512_load_si512(&kTables.places[1]),
                            _mm512_load_si512(&kTables.places[2]), _mm512_load_si512(&kTables.places[3])};
  constexpr __mmask64 kUpperBytes = 0xccccccccccccccccu;
  __m512 sum[4][kTokens];
  for (int r = 0; r < 4; ++r)
    for (int t = 0; t < kTokens; ++t) sum[r][t] = _mm512_setzero_ps();
  for (int64_t unit = 0; unit < n_units; ++unit, group += 128, x += 32 * kTokens)
    for (int pair = 0; pair < 4; pair += 2) {
      const __m512i codes = _mm512_loadu_si512(group + 32 * pair);
      const __m512i byte2 = _mm512_permutex2var_epi8(low2, codes, high2);
      // Table entry | (code & sign).
      const __m512i byte3 = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(low3, codes, high3), codes, sign, 0xf8);
      for (int i = 0; i < 4; ++i) {   // half i % 2 of a unit, of row pair + i / 2
        const __m512 w = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(kUpperBytes, byte2, place[i], byte3));
        for (int t = 0; t < kTokens; ++t)
          sum[pair + i / 2][t] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x + 16 * (i % 2 * kTokens + t)), sum[pair + i / 2][t]);
      }
    }
  for (int t = 0; t < kTokens; ++t)
    for (int r = 0; r < 4; ++r) _mm512_storeu_ps(sums + 16 * (t * 4 + r), sum[r][t]);
}

}  // namespace

void dot_fp8_avx512vbmi(const uint8_t* group, int64_t n_units, const float* x, int n_tokens, float* sums) {
  switch (n_tokens) {
    case 1: return dot<1>(group, n_units, x, sums);
    case 2: return dot<2>(group, n_units, x, sums);
    case 3: return dot<3>(group, n_units, x, sums);
    default: return dot<4>(group, n_units, x, sums);
  }
}

}  // namespace beryl
#pragma GCC pop_options
#endif
