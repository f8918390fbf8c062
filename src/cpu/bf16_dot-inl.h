// The kernel of bf16_dot.h over a `Simd`, the operations of one instruction set on the 16 rows of a strip. Each bf16_*.cpp defines one,
// in a namespace of its own, and includes this behind it.
//
//   Floats        16 f32
//   Weights       a pair of columns of 16 rows as the products want it: weights(64 bytes)
//   Value         a pair of columns of one token, for all rows: value(token, pair)
//   add(y, w, x)  y and a pair's two products, as the definition says
//   kMostTokens   that the registers hold sums for; strips_at_once(n_tokens) likewise
// No include guard against other namespaces: one include a file.
#define BERYL_INLINE inline __attribute__((always_inline))

template <int kTokens>
__attribute__((noinline)) void multiply_tokens(const uint8_t* tile, const Bf16Tokens& x, int64_t first_token, float* z,
                                               int64_t z_stride) {
  constexpr int kAtOnce = Simd::strips_at_once(kTokens);
  constexpr int kVectorBytes = 64 * kStrips;
  const int64_t n_pairs = Bf16Tokens::padded(x.cols) / 2;
  Simd::Token tokens[kTokens];
  for (int t = 0; t < kTokens; ++t) tokens[t] = Simd::token(x, first_token + t);
  for (int first = 0; first < kStrips; first += kAtOnce) {
    Simd::Floats sums[kAtOnce][kTokens];
    for (auto& of_strip : sums)
      for (Simd::Floats& sum : of_strip) sum = Simd::zero();
    const uint8_t* at = tile + 64 * first;
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < n_pairs; ++pair, at += kVectorBytes) {
      Simd::Weights w[kAtOnce];
      for (int strip = 0; strip < kAtOnce; ++strip) w[strip] = Simd::weights(at + 64 * strip);
      for (int t = 0; t < kTokens; ++t) {
        const Simd::Value value = Simd::value(tokens[t], pair);
        for (int strip = 0; strip < kAtOnce; ++strip) sums[strip][t] = Simd::add(sums[strip][t], w[strip], value);
      }
    }
    for (int strip = 0; strip < kAtOnce; ++strip)
      for (int t = 0; t < kTokens; ++t) Simd::store(sums[strip][t], z + t * z_stride + kStripRows * (first + strip));
  }
}

template <int kTokens>
BERYL_INLINE void multiply_up_to(const uint8_t* tile, const Bf16Tokens& x, int64_t first_token, int n_tokens, float* z,
                                 int64_t z_stride) {
  if constexpr (kTokens > 1) {
    if (n_tokens < kTokens) return multiply_up_to<kTokens - 1>(tile, x, first_token, n_tokens, z, z_stride);
  }
  multiply_tokens<kTokens>(tile, x, first_token, z, z_stride);
}

inline void multiply(const uint8_t* tile, const Bf16Tokens& x, int64_t first_token, int n_tokens, float* z, int64_t z_stride) {
  for (int t = 0; t < n_tokens; t += Simd::kMostTokens)
    multiply_up_to<Simd::kMostTokens>(tile, x, first_token + t, n_tokens - t < Simd::kMostTokens ? n_tokens - t : Simd::kMostTokens,
                                      z + t * z_stride, z_stride);
}
