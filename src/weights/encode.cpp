// Encoders. Two searches serve all group formats:
//   fit_scale    x ~ scale * v,          v the nearest of the format's values (integers in a range, or E2M1)
//   fit_affine   x ~ scale * q + offset, q an integer from 0
// Both try start values, then alternate: codes for the scale, least-squares scale for the codes, rounded as stored.
#include "weights/encode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "weights/blocks.h"
#include "weights/decode.h"
#include "weights/quote.h"

namespace beryl {

namespace {

// The searches spend their time in sums over a group, which are kept in four lanes: a vector of GCC and Clang, which
// every instruction set has or imitates, always with the same result. Functions of T below take float or Lanes.
constexpr int kLanes = 4;
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Lanes load_lanes(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline float sum(Lanes lanes) { return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]); }

template <class T>
T broadcast(float value) {
  return T{} + value;
}

// To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits below 1.
template <class T>
T round_to_integer(T x) {
  return (x + broadcast<T>(0x1.8p23f)) - broadcast<T>(0x1.8p23f);
}

template <class T>
T clamp_between(T x, T low, T high) {
  x = x < low ? low : x;
  return x < high ? x : high;
}

float as_f16(float x) { return f16_to_f32(f32_to_f16(x)); }
float as_bf16(float x) { return bf16_to_f32(f32_to_bf16(x)); }
float as_is(float x) { return x; }

// The values that codes stand for before scaling. Where they are symmetric, scales are made positive.
template <int kLow, int kHigh>
struct Integers {
  static constexpr bool kSymmetric = kLow == -kHigh;
  template <class T>
  T operator()(T x) const {
    return round_to_integer(clamp_between(x, broadcast<T>(kLow), broadcast<T>(kHigh)));
  }
};

struct E2m1 {
  static constexpr bool kSymmetric = true;
  template <class T>
  T operator()(T x) const {
    const T zero = broadcast<T>(0.0f), half = broadcast<T>(0.5f), one = broadcast<T>(1.0f), two = broadcast<T>(2.0f);
    const T four = broadcast<T>(4.0f), six = broadcast<T>(6.0f);
    T magnitude = x < zero ? -x : x;
    magnitude = magnitude < six ? magnitude : six;
    const T wide_step = magnitude < four ? one : two, wide_per_step = magnitude < four ? one : half;
    const T step = magnitude < two ? half : wide_step, per_step = magnitude < two ? two : wide_per_step;
    const T value = round_to_integer(magnitude * per_step) * step;
    return x < zero ? -value : value;
  }
};

uint8_t e2m1_code(float value) {
  constexpr uint8_t kCodeOfDoubled[13] = {0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7};   // values between codes do not occur
  const uint8_t code = kCodeOfDoubled[static_cast<int>(2.0f * std::fabs(value))];
  return value < 0.0f ? code | 8 : code;  // zero is code 0, whatever its sign
}

float inverse_of(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

float peak_of(const float* x, int n) {
  float peak = 0.0f;
  for (int i = 0; i < n; ++i)
    if (std::fabs(x[i]) > std::fabs(peak)) peak = x[i];
  return peak;
}

// --- one scale -------------------------------------------------------------------------------------------------------

struct ScaleSums {
  float error = 0.0f;  // sum of w (x - scale v)^2
  float xv = 0.0f;     // sum of w x v
  float vv = 0.0f;     // sum of w v^2
};

// x, w: [n], n a multiple of kLanes. Stops early, with an error of at least `limit`, once it has gone so far.
template <class Nearest>
ScaleSums measure_scale(const float* x, const float* w, int n, float scale, Nearest nearest, float limit = kInfinity) {
  constexpr int kLook = 32;   // weights between two looks at the error
  const float inverse = inverse_of(scale);
  Lanes error{}, xv{}, vv{};
  for (int begin = 0; begin < n; begin += kLook) {
    for (int i = begin; i < std::min(begin + kLook, n); i += kLanes) {
      const Lanes weight = load_lanes(w + i), wanted = load_lanes(x + i);
      const Lanes value = nearest(wanted * inverse);
      const Lanes off = wanted - scale * value;
      error += weight * off * off;
      xv += weight * wanted * value;
      vv += weight * value * value;
    }
    if (sum(error) >= limit) break;
  }
  return {sum(error), sum(xv), sum(vv)};
}

struct ScaleFit {
  float scale = 0.0f;
  float error = kInfinity;
};

// targets: the values that the largest weight is tried on; every one's scale is measured, and those that err least are
// improved. `round` rounds a scale as it is stored.
template <class Nearest, class Round>
ScaleFit fit_scale(const float* x, const float* w, int n, std::span<const float> targets, Nearest nearest,
                   Round round) {
  // Improving all of them takes more than twice as long and lowers FP4's error by a thousandth.
  constexpr int kImproved = 3, kPasses = 2;
  const float peak = Nearest::kSymmetric ? std::fabs(peak_of(x, n)) : peak_of(x, n);
  ScaleFit best;
  if (peak == 0.0f) return {0.0f, 0.0f};
  const auto measure = [&](float scale, float limit) {
    const ScaleSums sums = measure_scale(x, w, n, scale, nearest, limit);
    if (sums.error < best.error) best = {scale, sums.error};
    return sums;
  };
  const auto is_usable = [](float scale) {
    return scale != 0.0f && std::isfinite(scale) && std::isfinite(inverse_of(scale));
  };
  const auto better_scale = [&](const ScaleSums& sums) { return sums.vv == 0.0f ? 0.0f : round(sums.xv / sums.vv); };

  struct Start {
    float error = kInfinity, scale = 0.0f, better = 0.0f;
  };
  std::array<Start, kImproved> starts;   // the best ones, the best first
  for (const float target : targets) {
    const float scale = round(peak / target);
    if (!is_usable(scale)) continue;
    const ScaleSums sums = measure(scale, starts.back().error);
    if (best.error == 0.0f) return best;
    Start start{sums.error, scale, better_scale(sums)};
    for (Start& place : starts)
      if (start.error < place.error) std::swap(start, place);
  }
  for (const Start& start : starts) {
    float scale = start.scale, next = start.better;
    for (int pass = 0; pass < kPasses && next != scale && is_usable(next); ++pass) {
      scale = next;
      next = better_scale(measure(scale, kInfinity));
      if (best.error == 0.0f) return best;
    }
  }
  return best;
}

// --- scale and offset ------------------------------------------------------------------------------------------------

struct AffineSums {
  float error = 0.0f;  // sum of w (x - scale q - offset)^2
  float w = 0.0f, q = 0.0f, qq = 0.0f, x = 0.0f, xq = 0.0f;  // weighted sums of 1, q, q^2, x, x q
};

template <int kHigh>
AffineSums measure_affine(const float* x, const float* w, int n, float scale, float offset) {
  const float inverse = inverse_of(scale);
  const Integers<0, kHigh> nearest;
  Lanes error{}, sw{}, sq{}, sqq{}, sx{}, sxq{};
  for (int i = 0; i < n; i += kLanes) {
    const Lanes weight = load_lanes(w + i), wanted = load_lanes(x + i);
    const Lanes q = nearest((wanted - offset) * inverse);
    const Lanes off = wanted - (scale * q + offset);
    error += weight * off * off;
    sw += weight;
    sq += weight * q;
    sqq += weight * q * q;
    sx += weight * wanted;
    sxq += weight * wanted * q;
  }
  return {sum(error), sum(sw), sum(sq), sum(sqq), sum(sx), sum(sxq)};
}

struct AffineFit {
  float scale = 0.0f;
  float offset = 0.0f;
  float error = kInfinity;
};

// kBelowZero: the offset must not be positive (the K formats subtract an unsigned min).
template <int kHigh, bool kBelowZero, class Round>
AffineFit fit_affine(const float* x, const float* w, int n, Round round) {
  float low = *std::min_element(x, x + n);
  const float high = *std::max_element(x, x + n);
  if (kBelowZero) low = std::min(low, 0.0f);
  AffineFit best;
  const auto consider = [&](float scale, float offset) {
    const AffineSums sums = measure_affine<kHigh>(x, w, n, scale, offset);
    if (sums.error < best.error) best = {scale, offset, sums.error};
    return sums;
  };
  if (high <= low) {
    consider(0.0f, round(low));
    return best;
  }
  // Steps the range is divided into: kHigh spans it exactly; fewer clip nothing but coarsen, more clip its ends.
  for (const float extra : {0.0f, -1.0f, -0.75f, -0.5f, -0.25f, 0.25f, 0.5f, 0.75f, 1.0f}) {
    float scale = round((high - low) / (static_cast<float>(kHigh) + extra));
    float offset = round(low);
    for (int pass = 0; pass < 3; ++pass) {
      if (!(scale > 0.0f) || !std::isfinite(inverse_of(scale))) break;
      const AffineSums sums = consider(scale, offset);
      if (sums.error == 0.0f || sums.qq <= 0.0f) break;
      const double determinant = double{sums.w} * sums.qq - double{sums.q} * sums.q;
      double better_scale = sums.xq / sums.qq, better_offset = 0.0;
      if (determinant > 1e-6 * sums.w * sums.qq) {
        better_scale = (double{sums.w} * sums.xq - double{sums.x} * sums.q) / determinant;
        better_offset = (double{sums.qq} * sums.x - double{sums.q} * sums.xq) / determinant;
        if (kBelowZero && better_offset > 0.0) {
          better_offset = 0.0;
          better_scale = sums.xq / sums.qq;
        }
      }
      const float next_scale = round(static_cast<float>(better_scale));
      const float next_offset = round(static_cast<float>(better_offset));
      if (next_scale == scale && next_offset == offset) break;
      scale = next_scale;
      offset = next_offset;
    }
    if (best.error == 0.0f) break;
  }
  if (best.error == kInfinity) consider(0.0f, round(low));  // the range is below the smallest scale
  return best;
}

// --- blocks ----------------------------------------------------------------------------------------------------------

constexpr std::array<float, 256> kOnes = [] {
  std::array<float, 256> ones{};
  ones.fill(1.0f);
  return ones;
}();

// Targets for symmetric integers from -half to half - 1: the ends first, then a grid around them, then all smaller
// integers, which make any block that the format holds exactly come back exactly.
constexpr float kTargets4[] = {-8.0f,  7.0f,  -8.75f, -8.5f, -8.25f, -7.75f, -7.5f, -7.25f, 7.75f, 7.5f,
                               7.25f, -7.0f, 6.0f,   5.0f,  4.0f,   3.0f,   2.0f,  1.0f};
constexpr float kTargets5[] = {-16.0f, 15.0f, -16.5f, -15.5f, 15.5f, -15.0f, 14.0f, 13.0f, 12.0f, 11.0f, 10.0f,
                               9.0f,   8.0f,  7.0f,   6.0f,   5.0f,  4.0f,   3.0f,  2.0f,  1.0f};
constexpr float kTargets6[] = {-32.0f, 31.0f, -33.0f, -32.5f, -31.5f, 31.5f, -31.0f, 30.5f, -30.0f};
constexpr float kTargets8[] = {127.0f, 126.5f, 127.5f, 126.0f};  // -128 is left alone: some integer kernels negate
constexpr float kTargetsE2m1[] = {6.0f, 4.0f, 4.5f, 5.0f, 5.5f, 6.5f, 7.0f, 7.5f, 8.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f};

void pack_nibbles(const uint8_t codes[32], uint8_t out[16]) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>((codes[i] & 0xf) | (codes[i + 16] & 0xf) << 4);
}

void pack_high_bits(const uint8_t codes[32], uint8_t out[4]) {
  std::memset(out, 0, 4);
  for (int i = 0; i < 32; ++i) out[i / 8] = static_cast<uint8_t>(out[i / 8] | (codes[i] >> 4 & 1) << (i % 8));
}

template <class Block, int kHalf>
void encode_symmetric(const float* x, std::byte* out, std::span<const float> targets) {
  constexpr Integers<-kHalf, kHalf - 1> nearest;
  const ScaleFit fit = fit_scale(x, kOnes.data(), 32, targets, nearest, as_f16);
  const float inverse = inverse_of(fit.scale);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(static_cast<int>(nearest(x[i] * inverse)) + kHalf);
  Block block{};
  block.scale = f32_to_f16(fit.scale);
  pack_nibbles(codes, block.codes);
  if constexpr (requires { block.high_bits; }) pack_high_bits(codes, block.high_bits);
  std::memcpy(out, &block, sizeof(block));
}

template <class Block, int kHigh>
void encode_affine(const float* x, std::byte* out) {
  const AffineFit fit = fit_affine<kHigh, false>(x, kOnes.data(), 32, as_f16);
  const float inverse = inverse_of(fit.scale);
  uint8_t codes[32];
  for (int i = 0; i < 32; ++i)
    codes[i] = static_cast<uint8_t>(Integers<0, kHigh>{}((x[i] - fit.offset) * inverse));
  Block block{};
  block.scale = f32_to_f16(fit.scale);
  block.min = f32_to_f16(fit.offset);
  pack_nibbles(codes, block.codes);
  if constexpr (requires { block.high_bits; }) pack_high_bits(codes, block.high_bits);
  std::memcpy(out, &block, sizeof(block));
}

void encode_q8_0(const float* x, std::byte* out) {
  constexpr Integers<-127, 127> nearest;
  const ScaleFit fit = fit_scale(x, kOnes.data(), 32, kTargets8, nearest, as_f16);
  const float inverse = inverse_of(fit.scale);
  BlockQ8_0 block;
  block.scale = f32_to_f16(fit.scale);
  for (int i = 0; i < 32; ++i) block.codes[i] = static_cast<int8_t>(nearest(x[i] * inverse));
  std::memcpy(out, &block, sizeof(block));
}

// --- blocks of 256 with integer scales -------------------------------------------------------------------------------

// Errors of large weights count more, since large products dominate a dot product; the mean keeps small ones in sight.
void weigh_by_magnitude(const float* x, float* w) {
  float squares = 0.0f;
  for (int i = 0; i < 256; ++i) squares += x[i] * x[i];
  const float mean = std::sqrt(squares / 256.0f);
  for (int i = 0; i < 256; ++i) w[i] = mean + std::fabs(x[i]);
}

struct AffineSuper {
  float d = 0.0f;
  float d_min = 0.0f;
  int scales[8] = {};
  int mins[8] = {};
  float error = kInfinity;
};

// Q4_K and Q5_K: x ~ (d * scales[g]) q - d_min * mins[g]; kHigh 15 or 31.
template <int kHigh>
AffineSuper fit_affine_super(const float* x) {
  float w[256];
  weigh_by_magnitude(x, w);
  AffineFit groups[8];
  float largest_scale = 0.0f, largest_min = 0.0f;
  for (int g = 0; g < 8; ++g) {
    groups[g] = fit_affine<kHigh, true>(x + 32 * g, w + 32 * g, 32, as_is);
    largest_scale = std::max(largest_scale, groups[g].scale);
    largest_min = std::max(largest_min, -groups[g].offset);
  }

  AffineSuper best;
  float d = as_f16(largest_scale / 63.0f), d_min = as_f16(largest_min / 63.0f);
  for (int pass = 0; pass < 4; ++pass) {
    AffineSuper now;
    now.d = d;
    now.d_min = d_min;
    now.error = 0.0f;
    double aa = 0.0, ab = 0.0, bb = 0.0, xa = 0.0, xb = 0.0;  // for x ~ d a - d_min b: a = scale q, b = min
    for (int g = 0; g < 8; ++g) {
      const float* gx = x + 32 * g;
      const float* gw = w + 32 * g;
      const int scale = static_cast<int>(std::lround(std::clamp(groups[g].scale * inverse_of(d), 0.0f, 63.0f)));
      const int min = static_cast<int>(std::lround(std::clamp(-groups[g].offset * inverse_of(d_min), 0.0f, 63.0f)));
      AffineSums chosen;
      chosen.error = kInfinity;
      // Rounding each to the nearest is not best for the pair: the neighbours are tried too.
      for (int s = std::max(scale - 1, 0); s <= std::min(scale + 1, 63); ++s) {
        for (int m = std::max(min - 1, 0); m <= std::min(min + 1, 63); ++m) {
          const AffineSums sums =
              measure_affine<kHigh>(gx, gw, 32, d * static_cast<float>(s), -(d_min * static_cast<float>(m)));
          if (sums.error >= chosen.error) continue;
          chosen = sums;
          now.scales[g] = s;
          now.mins[g] = m;
        }
      }
      now.error += chosen.error;
      const double s = now.scales[g], m = now.mins[g];
      aa += s * s * chosen.qq;
      ab += s * m * chosen.q;
      bb += m * m * chosen.w;
      xa += s * chosen.xq;
      xb += m * chosen.x;
    }
    if (now.error < best.error) best = now;
    if (now.error == 0.0f || aa == 0.0) break;
    const double determinant = aa * bb - ab * ab;
    double better_d = xa / aa, better_d_min = 0.0;
    if (determinant > 1e-9 * aa * bb) {
      better_d = (xa * bb - xb * ab) / determinant;
      better_d_min = (xa * ab - xb * aa) / determinant;
    }
    if (better_d <= 0.0 || better_d_min < 0.0) break;
    const float next_d = as_f16(static_cast<float>(better_d)), next_d_min = as_f16(static_cast<float>(better_d_min));
    if (next_d == d && next_d_min == d_min) break;
    d = next_d;
    d_min = next_d_min;
  }
  return best;
}

void pack_scales_and_mins(const AffineSuper& fit, uint8_t out[12]) {
  for (int g = 0; g < 4; ++g) {
    out[g] = static_cast<uint8_t>(fit.scales[g] | (fit.scales[4 + g] & 0x30) << 2);
    out[4 + g] = static_cast<uint8_t>(fit.mins[g] | (fit.mins[4 + g] & 0x30) << 2);
    out[8 + g] = static_cast<uint8_t>((fit.scales[4 + g] & 0xf) | (fit.mins[4 + g] & 0xf) << 4);
  }
}

template <class Block, int kHigh>
void encode_affine_super(const float* x, std::byte* out) {
  const AffineSuper fit = fit_affine_super<kHigh>(x);
  Block block{};
  block.scale = f32_to_f16(fit.d);
  block.min_scale = f32_to_f16(fit.d_min);
  pack_scales_and_mins(fit, block.scales);
  for (int i = 0; i < 256; ++i) {
    const int g = i / 32;
    const float scale = fit.d * static_cast<float>(fit.scales[g]);
    const float offset = -(fit.d_min * static_cast<float>(fit.mins[g]));
    const auto code = static_cast<int>(Integers<0, kHigh>{}((x[i] - offset) * inverse_of(scale)));
    block.codes[g / 2 * 32 + i % 32] |= static_cast<uint8_t>((code & 0xf) << (g % 2 * 4));
    if constexpr (requires { block.high_bits; }) block.high_bits[i % 32] |= static_cast<uint8_t>(code >> 4 << g);
  }
  std::memcpy(out, &block, sizeof(block));
}

void encode_q6_k(const float* x, std::byte* out) {
  constexpr Integers<-32, 31> nearest;
  float w[256];
  weigh_by_magnitude(x, w);
  float scales[16];
  for (int g = 0; g < 16; ++g) scales[g] = fit_scale(x + 16 * g, w + 16 * g, 16, kTargets6, nearest, as_is).scale;
  const float largest = peak_of(scales, 16);

  float best_d = 0.0f, best_error = kInfinity;
  int best_scales[16] = {};
  for (const float end : {-128.0f, 127.0f}) {
    float d = as_f16(largest / end);
    for (int pass = 0; pass < 4 && d != 0.0f; ++pass) {
      int now[16];
      float error = 0.0f;
      double aa = 0.0, xa = 0.0;  // for x ~ d a, a = scale * q
      for (int g = 0; g < 16; ++g) {
        const int start = static_cast<int>(std::lround(std::clamp(scales[g] / d, -128.0f, 127.0f)));
        ScaleSums chosen;
        chosen.error = kInfinity;
        for (int s = std::max(start - 1, -128); s <= std::min(start + 1, 127); ++s) {
          const ScaleSums sums = measure_scale(x + 16 * g, w + 16 * g, 16, d * static_cast<float>(s), nearest);
          if (sums.error >= chosen.error) continue;
          chosen = sums;
          now[g] = s;
        }
        error += chosen.error;
        aa += double(now[g]) * now[g] * chosen.vv;
        xa += double(now[g]) * chosen.xv;
      }
      if (error < best_error) {
        best_error = error;
        best_d = d;
        std::copy(std::begin(now), std::end(now), std::begin(best_scales));
      }
      if (error == 0.0f || aa == 0.0) break;
      const float better = as_f16(static_cast<float>(xa / aa));
      if (better == d) break;
      d = better;
    }
  }

  BlockQ6_K block{};
  block.scale = f32_to_f16(best_d);
  for (int g = 0; g < 16; ++g) block.scales[g] = static_cast<int8_t>(best_scales[g]);
  for (int i = 0; i < 256; ++i) {
    const float scale = best_d * static_cast<float>(best_scales[i / 16]);
    const int code = static_cast<int>(nearest(x[i] * inverse_of(scale))) + 32;
    const int half = i / 128, within = i % 128;
    block.low_bits[half * 64 + within % 64] |= static_cast<uint8_t>((code & 0xf) << (within / 64 * 4));
    block.high_bits[half * 32 + within % 32] |= static_cast<uint8_t>(code >> 4 << (within / 32 * 2));
  }
  std::memcpy(out, &block, sizeof(block));
}

// --- FP4 -------------------------------------------------------------------------------------------------------------

void encode_fp4_group(const float* x, std::byte* codes, std::byte* scale_out) {
  constexpr E2m1 nearest;
  // bf16 scales reach as far as f32, squares of weights do not: measure with the largest weight in [1, 2).
  float scaled[kFp4GroupWeights];
  int exponent = 0;
  std::frexp(peak_of(x, kFp4GroupWeights), &exponent);
  // 2^(1 - exponent) in two factors: it may itself be beyond f32.
  const float factor = std::ldexp(1.0f, (1 - exponent) / 2);
  const float other_factor = std::ldexp(1.0f, 1 - exponent - (1 - exponent) / 2);
  for (int i = 0; i < kFp4GroupWeights; ++i) scaled[i] = x[i] * factor * other_factor;
  const ScaleFit fit = fit_scale(scaled, kOnes.data(), kFp4GroupWeights, kTargetsE2m1, nearest, as_bf16);
  const uint16_t stored = f32_to_bf16(std::ldexp(fit.scale, exponent - 1));
  // Where that scale is subnormal, and so coarser, the codes must follow the scale that is stored.
  const float scale = std::ldexp(bf16_to_f32(stored), 1 - exponent);
  const float inverse = inverse_of(scale);
  std::memcpy(scale_out, &stored, sizeof(stored));
  for (int i = 0; i < kFp4GroupWeights / 2; ++i) {
    const uint8_t low = e2m1_code(nearest(scaled[2 * i] * inverse));
    const uint8_t high = e2m1_code(nearest(scaled[2 * i + 1] * inverse));
    codes[i] = static_cast<std::byte>(low | high << 4);
  }
}

void encode_mxfp4(const float* x, std::byte* out) {
  constexpr E2m1 nearest;
  BlockMxfp4 block{};
  const float peak = peak_of(x, 32);
  if (peak != 0.0f) {
    int exponent = 0;
    std::frexp(peak, &exponent);
    float scaled[32];
    for (int i = 0; i < 32; ++i) scaled[i] = std::ldexp(x[i], 1 - exponent);  // the largest in [1, 2)
    // In units of the scaled weights, scale 2^-2 puts the largest in [4, 8) and 2^-1 in [2, 4); smaller scales clip
    // more than half of it, and larger ones only serve to give back exactly what small codes hold.
    float best_error = kInfinity;
    int best = 0;
    for (int power = -3; power <= 1; ++power) {
      const int stored = power + exponent - 1 + 127;
      if (stored < 0 || stored > 254) continue;
      const float error = measure_scale(scaled, kOnes.data(), 32, std::ldexp(1.0f, power), nearest).error;
      if (error < best_error) {
        best_error = error;
        best = power;
        block.exponent = static_cast<uint8_t>(stored);
      }
    }
    uint8_t codes[32] = {};
    if (best_error < kInfinity)
      for (int i = 0; i < 32; ++i) codes[i] = e2m1_code(nearest(scaled[i] * std::ldexp(1.0f, -best)));
    pack_nibbles(codes, block.codes);
  }
  std::memcpy(out, &block, sizeof(block));
}

// The best of the scales that UE4M3 holds. They are few: all that put the largest of the 16 weights on 3 to 12, and
// those that put it on the small codes, for groups that they hold exactly.
ScaleFit fit_ue4m3_scale(const float* x) {
  constexpr E2m1 nearest;
  ScaleFit best;
  const float peak = std::fabs(peak_of(x, BlockNvfp4::kWeights / 4));
  if (peak == 0.0f) return {0.0f, 0.0f};
  const auto consider = [&](uint8_t code) {
    const float scale = e4m3_to_f32(code);
    const float error = measure_scale(x, kOnes.data(), BlockNvfp4::kWeights / 4, scale, nearest, best.error).error;
    if (error < best.error) best = {scale, error};
  };
  const int least = f32_to_e4m3(peak / 12.0f), most = f32_to_e4m3(peak / 3.0f);
  for (int code = least; code <= most && best.error > 0.0f; ++code) consider(static_cast<uint8_t>(code));
  for (const float target : {2.0f, 1.5f, 1.0f, 0.5f})
    if (best.error > 0.0f) consider(f32_to_e4m3(peak / target));
  return best;
}

// x: [64], already divided by the tensor's scale.
void encode_nvfp4(const float* x, std::byte* out) {
  constexpr E2m1 nearest;
  BlockNvfp4 block{};
  for (int g = 0; g < 4; ++g) {
    const float* gx = x + 16 * g;
    const ScaleFit fit = fit_ue4m3_scale(gx);
    block.scales[g] = f32_to_e4m3(fit.scale);
    const float inverse = inverse_of(fit.scale);
    for (int i = 0; i < 8; ++i) {
      const uint8_t low = e2m1_code(nearest(gx[i] * inverse));
      const uint8_t high = e2m1_code(nearest(gx[i + 8] * inverse));
      block.codes[g * 8 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
  std::memcpy(out, &block, sizeof(block));
}

void encode_fp8_row(const float* x, int64_t cols, std::byte* codes, std::byte* scale_out) {
  float largest = 0.0f;
  for (int64_t i = 0; i < cols; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float scale = largest / 448.0f;
  std::memcpy(scale_out, &scale, sizeof(scale));
  // Divides rather than multiplies by the inverse, which is infinite for the smallest scales.
  for (int64_t i = 0; i < cols; ++i)
    codes[i] = static_cast<std::byte>(scale == 0.0f ? 0 : f32_to_e4m3(x[i] / scale));
}

void encode_block(Format format, const float* x, std::byte* out, float tensor_scale) {
  switch (format) {
    case Format::kF32: std::memcpy(out, x, 4); return;
    case Format::kF16: {
      const uint16_t bits = f32_to_f16(*x);
      std::memcpy(out, &bits, 2);
      return;
    }
    case Format::kBf16: {
      const uint16_t bits = f32_to_bf16(*x);
      std::memcpy(out, &bits, 2);
      return;
    }
    case Format::kQ4_0: return encode_symmetric<BlockQ4_0, 8>(x, out, kTargets4);
    case Format::kQ4_1: return encode_affine<BlockQ4_1, 15>(x, out);
    case Format::kQ5_0: return encode_symmetric<BlockQ5_0, 16>(x, out, kTargets5);
    case Format::kQ5_1: return encode_affine<BlockQ5_1, 31>(x, out);
    case Format::kQ8_0: return encode_q8_0(x, out);
    case Format::kQ4_K: return encode_affine_super<BlockQ4_K, 15>(x, out);
    case Format::kQ5_K: return encode_affine_super<BlockQ5_K, 31>(x, out);
    case Format::kQ6_K: return encode_q6_k(x, out);
    case Format::kMxfp4: return encode_mxfp4(x, out);
    case Format::kNvfp4: {
      float scaled[BlockNvfp4::kWeights];
      for (int i = 0; i < BlockNvfp4::kWeights; ++i) scaled[i] = x[i] / tensor_scale;
      return encode_nvfp4(scaled, out);
    }
    case Format::kFp4G128:
    case Format::kFp8:
    case Format::kI32:
    case Format::kI64:
    case Format::kU8: break;
  }
  BERYL_CHECK(false, "encode_block takes weight formats of one plane");
}

// The largest magnitude a format takes. Where scales or mins are f16, weights up to the largest f16 never overflow one.
float largest_weight(Format format) {
  switch (format) {
    case Format::kF32:
    case Format::kFp8:
    case Format::kMxfp4:
    case Format::kNvfp4: return std::numeric_limits<float>::max();
    case Format::kBf16:
    case Format::kFp4G128: return bf16_to_f32(0x7f7f);
    default: return 65504.0f;
  }
}

void check_weights(const std::string& name, Format format, const float* weights, int64_t first_row, int64_t n_rows,
                   int64_t cols) {
  const float limit = largest_weight(format);
  for (int64_t i = 0; i < n_rows * cols; ++i) {
    if (std::fabs(weights[i]) <= limit) continue;  // false for NaN
    throw Error(ErrorCode::kBadInput,
                fmt::format("tensor {} has {} at row {}, column {}; {} takes finite weights up to {:g}", quote(name),
                            weights[i], first_row + i / cols, i % cols, info(format).name, limit));
  }
}

}  // namespace

void encode_rows(const std::string& name, Format format, const float* weights, int64_t first_row, int64_t n_rows,
                 int64_t cols, std::byte* codes, std::byte* scales, float tensor_scale) {
  BERYL_CHECK(fits(format, cols), "a row to encode must be whole blocks");
  check_weights(name, format, weights, first_row, n_rows, cols);
  const FormatInfo& entry = info(format);
  for (int64_t row = 0; row < n_rows; ++row) {
    const float* x = weights + row * cols;
    std::byte* row_codes = codes + row * row_bytes(format, cols);
    std::byte* row_scales = scales == nullptr ? nullptr : scales + row * row_scale_bytes(format, cols);
    if (format == Format::kFp4G128) {
      for (int64_t g = 0; g < cols / kFp4GroupWeights; ++g)
        encode_fp4_group(x + g * kFp4GroupWeights, row_codes + g * (kFp4GroupWeights / 2), row_scales + 2 * g);
    } else if (format == Format::kFp8) {
      encode_fp8_row(x, cols, row_codes, row_scales);
    } else {
      for (int64_t b = 0; b < cols / entry.block_weights; ++b)
        encode_block(format, x + b * entry.block_weights, row_codes + b * entry.block_bytes, tensor_scale);
    }
  }
}

float nvfp4_tensor_scale(const float* weights, int64_t n_weights) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n_weights; ++i) largest = std::max(largest, std::fabs(weights[i]));
  const float scale = largest / (6.0f * 448.0f);
  return scale > 0.0f && std::isfinite(scale) ? scale : 1.0f;
}

HostMatrix encode_matrix(const std::string& name, Format format, const float* weights, int64_t rows, int64_t cols,
                         int64_t stack) {
  HostMatrix matrix;
  matrix.name = name;
  matrix.format = format;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.stack = stack;
  matrix.stack_stride_bytes = rows * row_bytes(format, cols);
  matrix.stack_scale_stride_bytes = rows * row_scale_bytes(format, cols);
  if (format == Format::kNvfp4) matrix.tensor_scale = nvfp4_tensor_scale(weights, stack * rows * cols);
  const int64_t codes_bytes = stack * matrix.stack_stride_bytes;
  auto storage = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(matrix.bytes()));
  std::byte* scales = matrix.stack_scale_stride_bytes > 0 ? storage->data() + codes_bytes : nullptr;
  encode_rows(name, format, weights, 0, stack * rows, cols, storage->data(), scales, matrix.tensor_scale);
  matrix.codes = storage->data();
  matrix.scales = scales;
  matrix.storage = std::move(storage);
  return matrix;
}

}  // namespace beryl
