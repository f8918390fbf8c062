// bf16_dot.h in plain C++: for SSE4 and NEON, where the compiler makes four rows of each loop one instruction.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/bf16_dot.h"
#include "cpu/packed_matrix.h"

namespace beryl {
namespace {
namespace portable {

struct Simd {
  struct Floats {
    float lane[16];
  };
  struct Weights {
    Floats even, odd;
  };
  struct Value {
    float even, odd;
  };
  using Token = const float*;
  static constexpr int kMostTokens = 4;
  static constexpr int strips_at_once(int) { return 1; }

  static Token token(const Bf16Tokens& x, int64_t index) { return x.as_f32(index); }
  static Value value(Token token, int64_t pair) { return {token[2 * pair], token[2 * pair + 1]}; }
  static Floats zero() { return {}; }
  static Weights weights(const uint8_t* from) {
    uint32_t pairs[16], even[16], odd[16];
    std::memcpy(pairs, from, 64);
    for (int i = 0; i < 16; ++i) {
      even[i] = pairs[i] << 16;
      odd[i] = pairs[i] & 0xffff0000u;
    }
    Weights w;
    std::memcpy(w.even.lane, even, 64);
    std::memcpy(w.odd.lane, odd, 64);
    return w;
  }
  static Floats add(Floats y, const Weights& w, Value x) {
    for (int i = 0; i < 16; ++i) y.lane[i] += w.odd.lane[i] * x.odd;    // exact products: bf16_dot.h
    for (int i = 0; i < 16; ++i) y.lane[i] += w.even.lane[i] * x.even;
    return y;
  }
  static void store(const Floats& a, float* to) { std::memcpy(to, a.lane, 64); }
};

#include "cpu/bf16_dot-inl.h"

}  // namespace portable
}  // namespace

const Bf16Kernels kPortableBf16Kernels = {true, portable::multiply};

}  // namespace beryl
