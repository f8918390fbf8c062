// The kernels of integer_dot.h over a `Simd`, the operations of one instruction set on 16 lanes of 32 bits. Each
// integer_*.cpp defines one, in a namespace of its own, and includes this behind it.
//
//   Codes, Ints, Floats   64 bytes; 16 int32; 16 f32
//   dot(a, codes, x)      a + Σ over the four bytes of a lane of codes · x[0..3]; codes unsigned, below 64, x signed
//   dot_wide              likewise, codes any (Q8_0: sign bit flipped; the lane's sum is of code - kWideOffset)
//   dot_many              likewise for expanded codes, signed, and x signed or, with kUnsignedTokens, q + 128
//   load_next             load, not moved before an earlier one: memory is read slower when compilers change the order of addresses
//   look_up_nibbles       of a table of 16 bytes: by the low nibbles of each byte, and by the high ones
// No include guard against other namespaces: one include a file.
#include "cpu/integer_dot.h"
#include "weights/blocks.h"
#include "weights/decode.h"

#define BERYL_INLINE inline __attribute__((always_inline))

// Nibbles of four vectors: w[0..3] the low ones, w[4..7] the high ones.
BERYL_INLINE void split_nibbles(const uint8_t* from, Simd::Codes (&w)[8]) {
  for (int v = 0; v < 4; ++v) {
    const Simd::Codes pairs = Simd::load_next(from + 64 * v);
    w[v] = Simd::low_nibbles(pairs);
    w[4 + v] = Simd::high_nibbles(pairs);
  }
}
BERYL_INLINE void add_fifth_bits(const uint8_t* from, Simd::Codes (&w)[8]) {
  const Simd::Codes bits = Simd::load_next(from);
  w[0] = Simd::with_bits<4>(w[0], bits, 0x10);
  w[1] = Simd::with_bits<3>(w[1], bits, 0x10);
  w[2] = Simd::with_bits<2>(w[2], bits, 0x10);
  w[3] = Simd::with_bits<1>(w[3], bits, 0x10);
  w[4] = Simd::with_bits<0>(w[4], bits, 0x10);
  w[5] = Simd::with_bits<-1>(w[5], bits, 0x10);
  w[6] = Simd::with_bits<-2>(w[6], bits, 0x10);
  w[7] = Simd::with_bits<-3>(w[7], bits, 0x10);
}
// The same, nibbles as E2M1: their doubled values plus 12.
BERYL_INLINE void split_e2m1(const uint8_t* from, Simd::Codes (&w)[8]) {
  alignas(16) static constexpr uint8_t kDoubledPlus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  for (int v = 0; v < 4; ++v) Simd::look_up_nibbles(kDoubledPlus12, Simd::load_next(from + 64 * v), w[v], w[4 + v]);
}

// A format's policy: kOffset is subtracted from its codes; kHalves scales a group. What a strip's groups share is loaded once a block,
// head(block's head, strip); load(head, block's head, group's head, strip, i) gives those of group i of the block.
struct NoHead {};
struct HalfScales {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE NoHead head(const uint8_t*, int) { return {}; }
  static BERYL_INLINE void load(NoHead, const uint8_t*, const uint8_t* group, int strip, int, Simd::Floats (&scale)[2], Simd::Floats&) {
    scale[0] = Simd::load_f16(group + 32 * strip);
  }
};
struct HalfScalesOfTwoGroups {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE NoHead head(const uint8_t*, int) { return {}; }
  static BERYL_INLINE void load(NoHead, const uint8_t* block, const uint8_t*, int, int i, Simd::Floats (&scale)[2], Simd::Floats&) {
    scale[0] = Simd::load_f16(block + 32 * i);
  }
};
struct HalfScalesAndMins {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = true;
  static BERYL_INLINE NoHead head(const uint8_t*, int) { return {}; }
  static BERYL_INLINE void load(NoHead, const uint8_t*, const uint8_t* group, int strip, int, Simd::Floats (&scale)[2], Simd::Floats& min) {
    scale[0] = Simd::load_f16(group + 64 * strip);
    min = Simd::load_f16(group + 64 * strip + 32);
  }
};
struct KScales {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = true;
  struct Head {
    Simd::Floats d, negative_dmin;
  };
  static BERYL_INLINE Head head(const uint8_t* block, int strip) {
    return {Simd::load_f16(block + 64 * strip), Simd::negate(Simd::load_f16(block + 64 * strip + 32))};
  }
  static BERYL_INLINE void load(const Head& head, const uint8_t*, const uint8_t* group, int strip, int, Simd::Floats (&scale)[2],
                                Simd::Floats& min) {
    scale[0] = Simd::mul(head.d, Simd::load_u8(group + 32 * strip));
    min = Simd::mul(head.negative_dmin, Simd::load_u8(group + 32 * strip + 16));
  }
};
struct Q6KScales {
  static constexpr int kHalves = 2;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE Simd::Floats head(const uint8_t* block, int strip) { return Simd::load_f16(block + 32 * strip); }
  static BERYL_INLINE void load(const Simd::Floats& d, const uint8_t*, const uint8_t* group, int strip, int, Simd::Floats (&scale)[2],
                                Simd::Floats&) {
    for (int half = 0; half < 2; ++half) scale[half] = Simd::mul(d, Simd::load_i8(group + 32 * strip + 16 * half));
  }
};
struct Mxfp4Scales {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE NoHead head(const uint8_t*, int) { return {}; }
  static BERYL_INLINE void load(NoHead, const uint8_t* block, const uint8_t*, int strip, int i, Simd::Floats (&scale)[2], Simd::Floats&) {
    scale[0] = Simd::load_e8m0_halved(block + 32 * i + 16 * strip);
  }
};
struct Nvfp4Scales {
  static constexpr int kHalves = 2;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE NoHead head(const uint8_t*, int) { return {}; }
  static BERYL_INLINE void load(NoHead, const uint8_t*, const uint8_t* group, int strip, int, Simd::Floats (&scale)[2], Simd::Floats&) {
    for (int half = 0; half < 2; ++half) scale[half] = Simd::load_ue4m3_halved(group + 32 * strip + 16 * half);
  }
};
struct Fp4G128Scales {
  static constexpr int kHalves = 1;
  static constexpr bool kHasMins = false;
  static BERYL_INLINE Simd::Floats head(const uint8_t* block, int strip) {
    return Simd::mul(Simd::load_bf16(block + 32 * strip), Simd::set(0.5f));
  }
  static BERYL_INLINE void load(const Simd::Floats& halved, const uint8_t*, const uint8_t*, int, int, Simd::Floats (&scale)[2], Simd::Floats&) {
    scale[0] = halved;
  }
};

template <class ScalesType, int kOffsetOfCodes>
struct FourBits {
  using Scales = ScalesType;
  static constexpr int kOffset = kOffsetOfCodes;
  static constexpr bool kWide = false;
  static BERYL_INLINE void codes(const uint8_t* from, Simd::Codes (&w)[8]) { split_nibbles(from, w); }
};
template <class ScalesType, int kOffsetOfCodes>
struct FiveBits {
  using Scales = ScalesType;
  static constexpr int kOffset = kOffsetOfCodes;
  static constexpr bool kWide = false;
  static BERYL_INLINE void codes(const uint8_t* from, Simd::Codes (&w)[8]) {
    split_nibbles(from, w);
    add_fifth_bits(from + 256, w);
  }
};
struct SixBits {
  using Scales = Q6KScales;
  static constexpr int kOffset = 32;
  static constexpr bool kWide = false;
  static BERYL_INLINE void codes(const uint8_t* from, Simd::Codes (&w)[8]) {
    split_nibbles(from, w);
    for (int h = 0; h < 2; ++h) {
      const Simd::Codes bits = Simd::load_next(from + 256 + 64 * h);
      w[4 * h] = Simd::with_bits<4>(w[4 * h], bits, 0x30);
      w[4 * h + 1] = Simd::with_bits<2>(w[4 * h + 1], bits, 0x30);
      w[4 * h + 2] = Simd::with_bits<0>(w[4 * h + 2], bits, 0x30);
      w[4 * h + 3] = Simd::with_bits<-2>(w[4 * h + 3], bits, 0x30);
    }
  }
};
struct EightBits {
  using Scales = HalfScalesOfTwoGroups;
  static constexpr int kOffset = Simd::kWideOffset;
  static constexpr bool kWide = true;
  static BERYL_INLINE void codes(const uint8_t* from, Simd::Codes (&w)[8]) {
    for (int v = 0; v < 8; ++v) w[v] = Simd::load_next(from + 64 * v);
  }
};
template <class ScalesType>
struct E2m1 {
  using Scales = ScalesType;
  static constexpr int kOffset = 12;
  static constexpr bool kWide = false;
  static BERYL_INLINE void codes(const uint8_t* from, Simd::Codes (&w)[8]) {
    split_e2m1(from, w);
  }
};

// A format's policy with its layout.
template <Format kFormat, class Policy>
struct Packed : Policy {
  static constexpr PackedLayout kLayout = packed_layout(kFormat);
};

template <class Visitor>
BERYL_INLINE void with_format(Format format, const Visitor& visitor) {
  switch (format) {
    case Format::kQ4_0: return visitor(Packed<Format::kQ4_0, FourBits<HalfScales, 8>>());
    case Format::kQ4_1: return visitor(Packed<Format::kQ4_1, FourBits<HalfScalesAndMins, 0>>());
    case Format::kQ5_0: return visitor(Packed<Format::kQ5_0, FiveBits<HalfScales, 16>>());
    case Format::kQ5_1: return visitor(Packed<Format::kQ5_1, FiveBits<HalfScalesAndMins, 0>>());
    case Format::kQ8_0: return visitor(Packed<Format::kQ8_0, EightBits>());
    case Format::kQ4_K: return visitor(Packed<Format::kQ4_K, FourBits<KScales, 0>>());
    case Format::kQ5_K: return visitor(Packed<Format::kQ5_K, FiveBits<KScales, 0>>());
    case Format::kQ6_K: return visitor(Packed<Format::kQ6_K, SixBits>());
    case Format::kMxfp4: return visitor(Packed<Format::kMxfp4, E2m1<Mxfp4Scales>>());
    case Format::kNvfp4: return visitor(Packed<Format::kNvfp4, E2m1<Nvfp4Scales>>());
    case Format::kFp4G128: return visitor(Packed<Format::kFp4G128, E2m1<Fp4G128Scales>>());
    default: break;
  }
}

// ---- few tokens: codes are decoded in registers ---------------------------------------------------------------------

template <bool kWide>
BERYL_INLINE Simd::Ints dot_some(Simd::Ints sum, const Simd::Codes* w, int begin, int end, const int8_t* x) {
#pragma GCC unroll 8
  for (int v = begin; v < end; ++v) {
    if constexpr (kWide) {
      sum = Simd::dot_wide(sum, w[v], x + 4 * v);
    } else {
      sum = Simd::dot(sum, w[v], x + 4 * v);
    }
  }
  return sum;
}

constexpr int kGroupsAhead = 4;

// One stream of a tile: all of its strips, or the one.
template <class P, int kTokens>
__attribute__((noinline)) void multiply_packed(const uint8_t* stream, const QuantizedTokens& x, int64_t first_token,
                                               float* z, int64_t z_stride) {
  constexpr int kTogether = P::kLayout.strips_together;
  using Scales = typename P::Scales;
  using Head = decltype(Scales::head(nullptr, 0));
  const int64_t n_groups = x.cols / kGroupCols;
  const int8_t* values = x.values + first_token * x.cols;
  const ActivationGroup* groups = x.groups + first_token * n_groups;
  Simd::Floats sums[kTogether][kTokens];
  for (auto& of_strip : sums)
    for (Simd::Floats& sum : of_strip) sum = Simd::set(0.0f);
  const uint8_t* at = stream;
  for (int64_t first = 0; first < n_groups; first += P::kLayout.block_groups) {
    const uint8_t* const block = at;
    at += P::kLayout.block_head_bytes;
    Head heads[kTogether];
    for (int strip = 0; strip < kTogether; ++strip) heads[strip] = Scales::head(block, strip);
    const int n_in_block = n_groups - first < P::kLayout.block_groups ? static_cast<int>(n_groups - first)
                                                                      : P::kLayout.block_groups;
#pragma GCC unroll 1
    for (int i = 0; i < n_in_block; ++i, at += P::kLayout.group_bytes()) {
      const int64_t g = first + i;
      Simd::Floats x_scale[kTokens];
      Simd::Ints start[kTokens][2];
      for (int t = 0; t < kTokens; ++t) {
        const ActivationGroup& group = groups[t * n_groups + g];
        // Weights stream through the L1 cache and drive x out of it where columns are many.
        __builtin_prefetch(values + t * x.cols + kGroupCols * (g + kGroupsAhead));
        __builtin_prefetch(&group + kGroupsAhead);
        x_scale[t] = Simd::set(group.scale);
        start[t][0] = Simd::set_int(-P::kOffset * (Scales::kHalves == 1 ? group.sum : group.low_sum));
        start[t][1] = Simd::set_int(Scales::kHalves == 1 ? 0 : -P::kOffset * (group.sum - group.low_sum));
      }
#pragma GCC unroll 2
      for (int strip = 0; strip < kTogether; ++strip) {
        Simd::Codes w[8];
        P::codes(at + P::kLayout.group_head_bytes + strip * P::kLayout.strip_code_bytes, w);
        Simd::Floats scale[2], min;
        Scales::load(heads[strip], block, at, strip, i, scale, min);
        for (int t = 0; t < kTokens; ++t) {
          const int8_t* q = values + t * x.cols + kGroupCols * g;
          Simd::Floats& sum = sums[strip][t];
          // Two chains for halves, whether they have scales of their own or not: each is half as long.
          const Simd::Ints low = dot_some<P::kWide>(start[t][0], w, 0, 4, q);
          const Simd::Ints high = dot_some<P::kWide>(start[t][1], w, 4, 8, q);
          if constexpr (Scales::kHalves == 1) {
            sum = Simd::fma(Simd::to_float(Simd::add(low, high)), Simd::mul(scale[0], x_scale[t]), sum);
          } else {
            sum = Simd::fma(Simd::to_float(low), Simd::mul(scale[0], x_scale[t]), sum);
            sum = Simd::fma(Simd::to_float(high), Simd::mul(scale[1], x_scale[t]), sum);
          }
          if constexpr (Scales::kHasMins) sum = Simd::fma(min, Simd::set(groups[t * n_groups + g].scaled_sum), sum);
        }
      }
    }
  }
  for (int strip = 0; strip < kTogether; ++strip)
    for (int t = 0; t < kTokens; ++t) Simd::store(sums[strip][t], z + t * z_stride + kStripRows * strip);
}

inline void multiply_few(Format format, const uint8_t* tile, const QuantizedTokens& x, int64_t first_token, int n_tokens,
                         float* z, int64_t z_stride) {
  with_format(format, [&](auto policy) {
    using P = decltype(policy);
    for (int strip = 0; strip < kStrips; strip += P::kLayout.strips_together) {
      const uint8_t* const stream = tile + (strip == 0 ? 0 : P::kLayout.stream_bytes(x.cols / kGroupCols));
      float* const to = z + kStripRows * strip;
      switch (n_tokens) {
        case 1: multiply_packed<P, 1>(stream, x, first_token, to, z_stride); break;
        case 2: multiply_packed<P, 2>(stream, x, first_token, to, z_stride); break;
        case 3: multiply_packed<P, 3>(stream, x, first_token, to, z_stride); break;
        default: multiply_packed<P, 4>(stream, x, first_token, to, z_stride);
      }
    }
  });
}

// ---- many tokens: codes and scales of a strip are expanded once -----------------------------------------------------

template <class P>
__attribute__((noinline)) void expand_strip(const uint8_t* tile, int strip, int64_t cols, uint8_t* to) {
  using Scales = typename P::Scales;
  const int64_t n_groups = cols / kGroupCols;
  if (P::kLayout.strips_together == 1) {
    tile += strip * P::kLayout.stream_bytes(n_groups);
    strip = 0;
  }
  for (int64_t g = 0; g < n_groups; ++g, to += kExpandedGroupBytes) {
    const uint8_t* block = tile + g / P::kLayout.block_groups * P::kLayout.block_bytes();
    const int i = static_cast<int>(g % P::kLayout.block_groups);
    const uint8_t* group = block + P::kLayout.block_head_bytes + i * P::kLayout.group_bytes();
    Simd::Codes w[8];
    P::codes(group + P::kLayout.group_head_bytes + strip * P::kLayout.strip_code_bytes, w);
    auto* sums = reinterpret_cast<int32_t*>(to + 8 * 64);
    auto* floats = reinterpret_cast<float*>(to + 10 * 64);
    Simd::Ints halves[2];
    for (int half = 0; half < 2; ++half) {
      Simd::Ints sum = Simd::set_int(0);
      for (int v = 4 * half; v < 4 * half + 4; ++v) {
        const Simd::Codes code = Simd::minus(w[v], P::kWide ? 128 : P::kOffset);
        Simd::store_codes(code, to + 64 * v);
        sum = Simd::add_codes(sum, code);
      }
      halves[half] = sum;
    }
    // What q + 128 adds too much.
    Simd::store_int(Simd::times_minus_128(Scales::kHalves == 1 ? Simd::add(halves[0], halves[1]) : halves[0]), sums);
    Simd::store_int(Simd::times_minus_128(halves[1]), sums + 16);
    Simd::Floats scale[2], min;
    Scales::load(Scales::head(block, strip), block, group, strip, i, scale, min);
    for (int half = 0; half < Scales::kHalves; ++half) Simd::store(scale[half], floats + 16 * half);
    if constexpr (Scales::kHasMins) Simd::store(min, floats + 32);
  }
}

inline void expand(Format format, const uint8_t* tile, int strip, int64_t cols, uint8_t* expanded) {
  with_format(format, [&](auto policy) { expand_strip<decltype(policy)>(tile, strip, cols, expanded); });
}

template <int kHalves, bool kHasMins, int kTokens>
__attribute__((noinline)) void multiply_expanded(const uint8_t* from, const QuantizedTokens& x, int64_t first_token,
                                                 float* z, int64_t z_stride) {
  const int64_t n_groups = x.cols / kGroupCols;
  const int8_t* values = x.values + first_token * x.cols;
  const ActivationGroup* groups = x.groups + first_token * n_groups;
  Simd::Floats sums[kTokens];
  for (int t = 0; t < kTokens; ++t) sums[t] = Simd::set(0.0f);
  for (int64_t g = 0; g < n_groups; ++g, from += kExpandedGroupBytes, values += kGroupCols, ++groups) {
    const auto* too_much = reinterpret_cast<const int32_t*>(from + 8 * 64);
    const auto* floats = reinterpret_cast<const float*>(from + 10 * 64);
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      Simd::Ints ints[kTokens];
      const Simd::Ints first = Simd::kUnsignedTokens ? Simd::load_int(too_much + 16 * half) : Simd::set_int(0);
      for (int t = 0; t < kTokens; ++t) ints[t] = first;
#pragma GCC unroll 8
      for (int v = 8 / kHalves * half; v < 8 / kHalves * (half + 1); ++v) {
        const Simd::Codes w = Simd::load(from + 64 * v);
        for (int t = 0; t < kTokens; ++t) ints[t] = Simd::dot_many(ints[t], w, values + t * x.cols + 4 * v);
      }
      const Simd::Floats scale = Simd::load_floats(floats + 16 * half);
      for (int t = 0; t < kTokens; ++t)
        sums[t] = Simd::fma(Simd::to_float(ints[t]), Simd::mul(scale, Simd::set(groups[t * n_groups].scale)), sums[t]);
    }
    if constexpr (kHasMins) {
      const Simd::Floats min = Simd::load_floats(floats + 32);
      for (int t = 0; t < kTokens; ++t) sums[t] = Simd::fma(min, Simd::set(groups[t * n_groups].scaled_sum), sums[t]);
    }
  }
  for (int t = 0; t < kTokens; ++t) Simd::store(sums[t], z + t * z_stride);
}

template <int kHalves, bool kHasMins>
inline void multiply_expanded_tokens(const uint8_t* from, const QuantizedTokens& x, int64_t first_token, int n_tokens,
                                     float* z, int64_t z_stride) {
  switch (n_tokens) {
    case 1: return multiply_expanded<kHalves, kHasMins, 1>(from, x, first_token, z, z_stride);
    case 2: return multiply_expanded<kHalves, kHasMins, 2>(from, x, first_token, z, z_stride);
    case 3: return multiply_expanded<kHalves, kHasMins, 3>(from, x, first_token, z, z_stride);
    case 4: return multiply_expanded<kHalves, kHasMins, 4>(from, x, first_token, z, z_stride);
    case 5: return multiply_expanded<kHalves, kHasMins, 5>(from, x, first_token, z, z_stride);
    case 6: return multiply_expanded<kHalves, kHasMins, 6>(from, x, first_token, z, z_stride);
    case 7: return multiply_expanded<kHalves, kHasMins, 7>(from, x, first_token, z, z_stride);
    default: return multiply_expanded<kHalves, kHasMins, 8>(from, x, first_token, z, z_stride);
  }
}

inline void multiply_many(Format format, const uint8_t* expanded, const QuantizedTokens& x, int64_t first_token,
                          int n_tokens, float* z, int64_t z_stride) {
  with_format(format, [&](auto policy) {
    using Scales = typename decltype(policy)::Scales;
    multiply_expanded_tokens<Scales::kHalves, Scales::kHasMins>(expanded, x, first_token, n_tokens, z, z_stride);
  });
}
