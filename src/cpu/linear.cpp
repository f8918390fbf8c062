#include "cpu/linear.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <type_traits>

#include "base/error.h"
#include "cpu/fp8_dot.h"
#include "cpu/matrix_view.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/linear.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/decode-inl.h"
#include "cpu/math-inl.h"
#include "cpu/norm-inl.h"
#include "cpu/tile-inl.h"
#include "hwy/cache_control.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

void pack(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const PackedTokens& packed,
          int64_t tile_begin, int64_t tile_end) {
  const int64_t cols = packed.cols, padded = PackedTokens::padded(cols);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int n_tokens = packed.tokens_of(tile);
    for (int t = 0; t < n_tokens; ++t) {
      const int64_t token = tile * kTokenTile + t;
      const float* from = x + (rows == nullptr ? token : rows[token]) * x_stride;
      const float factor = norm_factor(from, cols, norm);
      float* to = packed.tile(tile) + 16 * t;
      for (int64_t c = 0; c < padded; c += 16, to += 16 * n_tokens)
        store16(c < cols ? normed16(from, c, cols, norm, factor) : zero16(), to);
    }
  }
}

// Bit patterns of |x| order as the numbers do, with infinities and NaNs on top.
HWY_INLINE IntPart magnitude_bits(const Vec16& a, const Vec16& b) {
  const IntTag di;
  const auto mask = hn::Set(di, 0x7fffffff);
  IntPart most = hn::Zero(di);
  for (size_t p = 0; p < kParts; ++p) {
    most = hn::Max(most, hn::And(hn::BitCast(di, a.part[p]), mask));
    most = hn::Max(most, hn::And(hn::BitCast(di, b.part[p]), mask));
  }
  return most;
}

// q of sixteen columns, and their sum.
HWY_INLINE int32_t quantize16(const Vec16& v, float inverse, uint8_t flip, int8_t* to) {
  const IntTag di;
  const hn::Rebind<int8_t, IntTag> d8;
  IntPart sums = hn::Zero(di);
  for (size_t p = 0; p < kParts; ++p) {
    const IntPart q = hn::NearestInt(hn::Mul(v.part[p], hn::Set(FloatTag(), inverse)));
    sums = hn::Add(sums, q);
    hn::StoreU(hn::Xor(hn::DemoteTo(d8, q), hn::Set(d8, static_cast<int8_t>(flip))), d8, to + p * kPartLanes);
  }
  return hn::GetLane(hn::SumOfLanes(di, sums));
}

// q + 128 where `flip` is 128.
void quantize(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const QuantizedTokens& tokens,
              uint8_t flip, int64_t begin, int64_t end) {
  const int64_t cols = tokens.cols, n_groups = cols / kGroupCols;
  for (int64_t t = begin; t < end; ++t) {
    const float* from = x + (rows == nullptr ? t : rows[t]) * x_stride;
    const float factor = norm_factor(from, cols, norm);
    for (int64_t g = 0; g < n_groups; ++g) {
      const int64_t c = g * kGroupCols;
      const Vec16 low = normed16(from, c, cols, norm, factor), high = normed16(from, c + 16, cols, norm, factor);
      const auto bits = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(IntTag(), magnitude_bits(low, high))));
      const float largest = std::bit_cast<float>(bits);
      ActivationGroup& group = tokens.groups[t * n_groups + g];
      int8_t* to = tokens.values + t * cols + c;
      if (!(largest > 0x1p-100f) || bits >= 0x7f800000u) {
        std::memset(to, flip, kGroupCols);
        const float scale = bits >= 0x7f800000u ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        group = {scale, scale, 0, 0};
        continue;
      }
      const float inverse = 127.0f / largest;
      group.scale = largest / 127.0f;
      group.low_sum = quantize16(low, inverse, flip, to);
      group.sum = group.low_sum + quantize16(high, inverse, flip, to + 16);
      group.scaled_sum = group.scale * static_cast<float>(group.sum);
    }
  }
}

// Rounded to bf16, ties to even, as f32. Too small a value: see bf16_dot.h. NaN stays NaN.
HWY_INLINE IntPart bf16_bits(FloatPart v) {
  const IntTag di;
  const auto bits = hn::BitCast(di, v);
  const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
  const auto tie = hn::And(hn::ShiftRight<16>(bits), hn::Set(di, 1));
  const auto is_nan = hn::Gt(magnitude, hn::Set(di, 0x7f800000));
  const auto rounded = hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(di, 0x00400000)), hn::Add(bits, hn::Add(tie, hn::Set(di, 0x7fff))));
  const auto kept = hn::And(rounded, hn::Set(di, static_cast<int32_t>(0xffff0000)));
  const auto is_small = hn::Lt(magnitude, hn::Set(di, static_cast<int32_t>(std::bit_cast<uint32_t>(kSmallestBf16))));
  return hn::IfThenElse(is_small, hn::Zero(di), kept);
}

void round_to_bf16(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const Bf16Tokens& tokens, bool as_f32,
                   int64_t begin, int64_t end) {
  const hn::Rebind<uint16_t, IntTag> d16;
  const int64_t cols = tokens.cols, padded = Bf16Tokens::padded(cols);
  for (int64_t t = begin; t < end; ++t) {
    const float* from = x + (rows == nullptr ? t : rows[t]) * x_stride;
    const float factor = norm_factor(from, cols, norm);
    float* wide = tokens.data + t * padded;
    uint16_t* narrow = tokens.as_bf16(t);
    for (int64_t c = 0; c < padded; c += 16) {
      const Vec16 v = c < cols ? normed16(from, c, cols, norm, factor) : zero16();
      for (size_t p = 0; p < kParts; ++p) {
        const IntPart bits = bf16_bits(v.part[p]);
        const int64_t at = c + static_cast<int64_t>(p * kPartLanes);
        if (as_f32) {
          hn::StoreU(hn::BitCast(FloatTag(), bits), FloatTag(), wide + at);
        } else {
          hn::StoreU(hn::TruncateTo(d16, hn::BitCast(hn::RebindToUnsigned<IntTag>(), hn::ShiftRight<16>(bits))), d16, narrow + at);
        }
      }
    }
  }
}

// ---- few tokens: decode in registers ------------------------------------------------------------------------------

// Rows that are decoded side by side are read here and there, and the hardware's prefetcher loses track of them. So the
// next group of rows is fetched in plain address order while this one is computed: twice the speed of cold weights.
constexpr int64_t kLeastPrefetchBytes = 4096;

// Rows that are decoded side by side, so that their chains of sums overlap; limited by the registers.
template <int kTokens>
constexpr int kSideBySide = kParts == 1 ? (kTokens == 1 ? 4 : 2) : (kParts == 2 && kTokens <= 2 ? 2 : 1);

template <class Codec, int kUnit, int kRows, int kTokens>
HWY_INLINE void dot_units(const uint8_t* const (&codes)[kRows], const typename Codec::Scales (&scales)[kRows],
                          const float* x, Vec16 (&sums)[kRows][kTokens]) {
  if constexpr (kUnit < Codec::kUnits) {
    for (int r = 0; r < kRows; ++r) {
      Vec16 low, high;
      Codec::template decode<kUnit>(codes[r], scales[r], low, high);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = mul_add(low, load16(x + 16 * t), sums[r][t]);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = mul_add(high, load16(x + 16 * (kTokens + t)), sums[r][t]);
    }
    dot_units<Codec, kUnit + 1>(codes, scales, x + 32 * kTokens, sums);
  }
}

// z[t][r] = W[row_begin + r] · x[t], r < n_rows; x packed as one tile of kTokens tokens. z rows are kMaxItemRows apart.
// kPacked: weights in PackedForm::kFloats, one stream, which the hardware follows.
template <class Codec, int kTokens, bool kPacked>
HWY_NOINLINE void dot_rows(const MatrixView& view, int64_t row_begin, int64_t n_rows, const float* x_begin, float* z) {
  constexpr int kRows = kSideBySide<kTokens>;
  constexpr int kColumns = 32 * Codec::kUnits;
  constexpr int kCodeStep = kPacked ? kFloatRows * Codec::kCodeBytes : Codec::kCodeBytes;
  const int64_t ahead = std::max(kRows * view.code_stride, kLeastPrefetchBytes);
  for (int64_t r0 = 0; r0 < n_rows; r0 += kRows) {
    const uint8_t* codes[kRows];
    const uint8_t* row_scales[kRows];
    Vec16 sums[kRows][kTokens];
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = row_begin + std::min(r0 + r, n_rows - 1);  // an odd last row is computed twice
      codes[r] = view.row_codes(row);
      row_scales[r] = view.row_scales(row);
      for (int t = 0; t < kTokens; ++t) sums[r][t] = zero16();
    }
    const float* x = x_begin;
    const uint8_t* next_group = codes[0] + ahead;
    typename Codec::Scales scales[kRows];
    for (int64_t block = 0; block < view.cols / kColumns; ++block) {
      if constexpr (!kPacked) {
        for (int offset = 0; offset < kRows * Codec::kCodeBytes; offset += 64) hwy::Prefetch(next_group + offset);
        next_group += kRows * Codec::kCodeBytes;
      }
      for (int r = 0; r < kRows; ++r) scales[r] = Codec::prepare(codes[r], row_scales[r]);
      dot_units<Codec, 0, kRows, kTokens>(codes, scales, x, sums);
      for (int r = 0; r < kRows; ++r) {
        codes[r] += kCodeStep;
        row_scales[r] += Codec::kScaleBytes;
      }
      x += kColumns * kTokens;
    }
    if constexpr (HasPartialUnits<Codec>) {
      if (const int64_t rest = view.cols % kColumns; rest > 0) {
        PartialUnit partial[kRows];
        for (int r = 0; r < kRows; ++r) {
          partial[r].template fill<Codec>(codes[r], rest);
          codes[r] = partial[r].codes;
          scales[r] = Codec::prepare(codes[r], row_scales[r]);
        }
        dot_units<Codec, 0, kRows, kTokens>(codes, scales, x, sums);
      }
    }
    for (int r = 0; r < kRows && r0 + r < n_rows; ++r) {
      float factor = 1;
      if constexpr (ScalesSums<Codec>) factor = Codec::sum_factor(row_scales[r]);
      for (int t = 0; t < kTokens; ++t) z[t * kMaxItemRows + r0 + r] = sum16(sums[r][t]) * factor;
    }
  }
}

template <class Visitor>
HWY_INLINE void with_codec_of(const MatrixView& view, const Visitor& visitor) {
  if (view.is_plain_fp8) return visitor(CodecFp8Plain{});
  with_codec(view.format, visitor);
}

// The same by a target's own kernel for plain FP8. Rows behind a matrix's last one are zeros in its packed groups.
void dot_rows_fp8(const MatrixView& view, DotFp8 dot, int64_t row_begin, int64_t n_rows, const float* x, int n_tokens, float* z) {
  alignas(64) float sums[kFewTokens * kFloatRows * 16];
  const int64_t n_units = PackedTokens::padded(view.cols) / 32;
  for (int64_t r0 = 0; r0 < n_rows; r0 += kFloatRows) {
    dot(view.row_codes(row_begin + r0), n_units, x, n_tokens, sums);
    for (int t = 0; t < n_tokens; ++t) {
      const float* from = sums + t * kFloatRows * 16;
      store_sums_of_4(load16(from), load16(from + 16), load16(from + 32), load16(from + 48), z + t * kMaxItemRows + r0);
    }
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    const auto scale = load_as<float>(view.row_scales(row_begin + r));
    for (int t = 0; t < n_tokens; ++t) z[t * kMaxItemRows + r] *= scale;
  }
}

void dot_few_tokens(const MatrixView& view, int64_t row_begin, int64_t n_rows, const float* x, int n_tokens, float* z) {
  if (const DotFp8 dot = view.is_plain_fp8 ? fp8_kernel() : nullptr; dot != nullptr)
    return dot_rows_fp8(view, dot, row_begin, n_rows, x, n_tokens, z);
  with_codec_of(view, [&](auto codec) HWY_ATTR {
    using Codec = decltype(codec);
    const auto dot = [&](auto is_packed) HWY_ATTR {
      constexpr bool kPacked = decltype(is_packed)::value;
      switch (n_tokens) {
        case 1: return dot_rows<Codec, 1, kPacked>(view, row_begin, n_rows, x, z);
        case 2: return dot_rows<Codec, 2, kPacked>(view, row_begin, n_rows, x, z);
        case 3: return dot_rows<Codec, 3, kPacked>(view, row_begin, n_rows, x, z);
        default: return dot_rows<Codec, 4, kPacked>(view, row_begin, n_rows, x, z);
      }
    };
    if constexpr (HasPartialUnits<Codec>) {
      if (view.is_packed) return dot(std::true_type());
    }
    dot(std::false_type());
  });
}

// ---- many tokens: a panel of decoded rows --------------------------------------------------------------------------

// panel: [ceil(n_rows / 4)][padded_cols / 16][4][16]; rows behind the last are copies of it.
void decode_panel(const MatrixView& view, int64_t row_begin, int64_t n_rows, float* panel) {
  const int64_t padded = PackedTokens::padded(view.cols);
  with_codec_of(view, [&](auto codec) HWY_ATTR {
    using Codec = decltype(codec);
    for (int64_t r = 0; r < (n_rows + kRowTile - 1) / kRowTile * kRowTile; ++r) {
      const int64_t row = row_begin + std::min(r, n_rows - 1);
      float* to = panel + r / kRowTile * kRowTile * padded + r % kRowTile * 16;
      const int64_t step = view.is_packed ? kFloatRows * Codec::kCodeBytes : Codec::kCodeBytes;
      decode_row_to<Codec>(view.row_codes(row), view.row_scales(row), view.cols, to, 16 * kRowTile, step);
    }
  });
}

// What the sums of rows must be multiplied with, where those are scaled and not the weights.
void sum_factors(const MatrixView& view, int64_t row_begin, int64_t n_rows, float* factors) {
  for (int64_t r = 0; r < n_rows; ++r) factors[r] = CodecFp8Plain::sum_factor(view.row_scales(row_begin + r));
}
// z[t][r] *= factors[r], whole vectors of rows.
void scale_sums(const float* factors, int64_t n_rows, int n_tokens, float* z) {
  for (int t = 0; t < n_tokens; ++t)
    for (int64_t r = 0; r < n_rows; r += 16) {
      float* at = z + t * kMaxItemRows + r;
      store16(load16(at) * load16(factors + r), at);
    }
}

// ---- both ----------------------------------------------------------------------------------------------------------

// z of one or two parts, [n_tokens][kMaxItemRows] each, to y.
void finish(const Product& product, int64_t row_begin, int64_t n_rows, int64_t token_begin, int n_tokens, float* z,
            float* z_up) {
  const Vec16 scale = set16(product.weight->tensor_scale);
  const Vec16 up_scale = set16(product.up == nullptr ? 1.0f : product.up->tensor_scale);
  const Vec16 cap = set16(product.softcap);
  const Vec16 inverse_cap = set16(product.softcap == 0 ? 0 : 1 / product.softcap);
  for (int t = 0; t < n_tokens; ++t) {
    float* y = product.y + (token_begin + t) * product.y_stride + row_begin;
    for (int64_t r = 0; r < n_rows; r += 16) {
      const int64_t left = n_rows - r;
      Vec16 value = load16(z + t * kMaxItemRows + r) * scale;
      switch (product.epilogue) {
        case Epilogue::kStore: break;
        case Epilogue::kGatedGelu:
          value = gelu16(value) * (load16(z_up + t * kMaxItemRows + r) * up_scale);
          break;
        case Epilogue::kGatedSilu:
          value = silu16(value) * (load16(z_up + t * kMaxItemRows + r) * up_scale);
          break;
        case Epilogue::kGeluTimesOther:
          value = gelu16(value) *
                  load16_some(product.other + (token_begin + t) * product.other_stride + row_begin + r, left);
          break;
        case Epilogue::kSoftcap: value = cap * tanh16(value * inverse_cap); break;
      }
      store16_some(value, y + r, left);
    }
  }
}

void run(const Product& product, int64_t row_begin, int64_t row_end, int64_t tile_begin, int64_t tile_end,
         float* panel) {
  alignas(64) float z[2][kTokenTile * kMaxItemRows];
  const int64_t n_rows = row_end - row_begin;
  const int n_parts = product.up == nullptr ? 1 : 2;
  MatrixView views[2];
  views[0] = views[1] = view_of(*product.weight, product.packed, product.expert);
  if (product.up != nullptr) views[1] = view_of(*product.up, product.packed_up, product.expert);
  const PackedTokens& x = product.x;
  // Lanes of z behind the last row are computed with and never stored; they hold zeros, not garbage, so that no
  // denormals or NaNs slow the epilogue down.
  std::memset(z, 0, sizeof(z));
  if (x.n_tokens <= kFewTokens) {
    const int64_t rows_at_once = views[0].is_packed ? kTileRows : n_rows;   // tiles of gate and up take turns
    for (int64_t r = 0; r < n_rows; r += rows_at_once)
      for (int part = 0; part < n_parts; ++part)
        dot_few_tokens(views[part], row_begin + r, std::min(rows_at_once, n_rows - r), x.tile(0), x.tokens_of(0), z[part] + r);
    return finish(product, row_begin, n_rows, 0, x.tokens_of(0), z[0], z[1]);
  }
  const int64_t padded = PackedTokens::padded(x.cols);
  const int64_t n_groups = (n_rows + kRowTile - 1) / kRowTile;
  float* panels[2] = {panel, panel + n_groups * kRowTile * padded};
  alignas(64) float factors[2][kMaxItemRows] = {};
  for (int part = 0; part < n_parts; ++part) {
    decode_panel(views[part], row_begin, n_rows, panels[part]);
    if (views[part].is_plain_fp8) sum_factors(views[part], row_begin, n_rows, factors[part]);
  }
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int n_tokens = x.tokens_of(tile);
    for (int part = 0; part < n_parts; ++part) {
      for (int64_t group = 0; group < n_groups; ++group)
        multiply_tile(panels[part] + group * kRowTile * padded, x.tile(tile), padded / 16, n_tokens,
                      z[part] + group * kRowTile, kMaxItemRows);
      if (views[part].is_plain_fp8) scale_sums(factors[part], n_rows, n_tokens, z[part]);
    }
    finish(product, row_begin, n_rows, tile * kTokenTile, n_tokens, z[0], z[1]);
  }
}

// The same for packed weights. The integer kernels are compiled apart (integer_*.cpp).
void run_packed(const Product& product, const IntegerKernels& kernels, int64_t row_begin, int64_t row_end,
                int64_t tile_begin, int64_t tile_end, uint8_t* panel) {
  alignas(64) float z[2][kQuantizedTokenTile * kMaxItemRows];
  const QuantizedTokens& x = product.quantized;
  const int n_parts = product.up == nullptr ? 1 : 2;
  const HostMatrix* weights[2] = {product.weight, product.up};
  const PackedMatrix* packed[2] = {product.packed, product.packed_up};
  const int64_t n_rows = row_end - row_begin;
  if (product.has_few_tokens()) {
    const int n_tokens = static_cast<int>(x.n_tokens);
    for (int64_t r = 0; r < n_rows; r += kTileRows)   // in the order of the tiles in memory
      for (int part = 0; part < n_parts; ++part)
        kernels.multiply_few(weights[part]->format, packed[part]->tile(product.expert, (row_begin + r) / kTileRows), x, 0, n_tokens,
                             z[part] + r, kMaxItemRows);
    return finish(product, row_begin, n_rows, 0, n_tokens, z[0], z[1]);
  }
  const int64_t n_strips = (n_rows + kStripRows - 1) / kStripRows, first_strip = row_begin / kStripRows;
  const int64_t expanded_bytes = expanded_strip_bytes(x.cols);
  const auto expanded = [&](int part, int64_t i) { return panel + (part * n_strips + i) * expanded_bytes; };
  for (int part = 0; part < n_parts; ++part)
    for (int64_t i = 0; i < n_strips; ++i)
      kernels.expand(weights[part]->format, packed[part]->tile(product.expert, (first_strip + i) / kStrips),
                     static_cast<int>((first_strip + i) % kStrips), x.cols, expanded(part, i));
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first_token = tile * kQuantizedTokenTile;
    const int n_tokens = static_cast<int>(std::min<int64_t>(kQuantizedTokenTile, x.n_tokens - first_token));
    for (int part = 0; part < n_parts; ++part)
      for (int64_t i = 0; i < n_strips; ++i)
        kernels.multiply_many(weights[part]->format, expanded(part, i), x, first_token, n_tokens, z[part] + i * kStripRows,
                              kMaxItemRows);
    finish(product, row_begin, n_rows, first_token, n_tokens, z[0], z[1]);
  }
}

// The same for packed weights of BF16, which need nothing expanded.
void run_bf16(const Product& product, const Bf16Kernels& kernels, int64_t row_begin, int64_t row_end, int64_t tile_begin,
              int64_t tile_end) {
  alignas(64) float z[2][kBf16TokenTile * kMaxItemRows];
  const Bf16Tokens& x = product.rounded;
  const PackedMatrix* packed[2] = {product.packed, product.packed_up};
  const int n_parts = product.up == nullptr ? 1 : 2;
  const int64_t n_rows = row_end - row_begin;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    const int64_t first_token = tile * kBf16TokenTile;
    const int n_tokens = static_cast<int>(std::min<int64_t>(kBf16TokenTile, x.n_tokens - first_token));
    for (int64_t r = 0; r < n_rows; r += kTileRows)
      for (int part = 0; part < n_parts; ++part)
        kernels.multiply(packed[part]->tile(product.expert, (row_begin + r) / kTileRows), x, first_token, n_tokens, z[part] + r,
                         kMaxItemRows);
    finish(product, row_begin, n_rows, first_token, n_tokens, z[0], z[1]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace beryl {

namespace {

// 512 KB: half of the L2 cache of a core; what it must at least hold is one tile of rows of each part.
constexpr int64_t kPanelFloats = 128 * 1024;
// A quarter of the L2 cache: the tokens of a packed product want room beside it.
constexpr int64_t kExpandedBytes = 256 * 1024;

}  // namespace

HWY_EXPORT(pack);
HWY_EXPORT(quantize);
HWY_EXPORT(run);
HWY_EXPORT(run_packed);
HWY_EXPORT(round_to_bf16);
HWY_EXPORT(run_bf16);

int64_t max_panel_rows(int64_t cols, bool gated) {
  const int64_t row_floats = PackedTokens::padded(cols) * (gated ? 2 : 1);
  return std::clamp<int64_t>(kPanelFloats / row_floats / kRowTile * kRowTile, kRowTile, kMaxItemRows);
}

int64_t max_expanded_rows(int64_t cols, bool gated) {
  const int64_t strip_bytes = expanded_strip_bytes(cols) * (gated ? 2 : 1);
  return std::clamp<int64_t>(kExpandedBytes / strip_bytes * kStripRows, kStripRows, kMaxItemRows);
}

int64_t max_bf16_rows(int64_t cols, bool gated) {
  const int64_t tile_bytes = packed_tile_bytes(PackedForm::kBf16, Format::kBf16, cols) * (gated ? 2 : 1);
  return std::clamp<int64_t>(kExpandedBytes / tile_bytes * kTileRows, kTileRows, kMaxItemRows);
}

int64_t expanded_floats(int64_t cols, bool gated) {
  return max_expanded_rows(cols, gated) / kStripRows * expanded_strip_bytes(cols) * (gated ? 2 : 1) / 4;
}

int64_t panel_floats(int64_t cols, bool gated) {
  return max_panel_rows(cols, gated) * PackedTokens::padded(cols) * (gated ? 2 : 1);
}

void pack_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const PackedTokens& packed,
                 int64_t tile_begin, int64_t tile_end) {
  HWY_DYNAMIC_DISPATCH(pack)(x, x_stride, rows, norm, packed, tile_begin, tile_end);
}

void quantize_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const QuantizedTokens& to,
                     int64_t begin, int64_t end) {
  const bool is_unsigned = to.n_tokens > kFewQuantizedTokens && integer_kernels().unsigned_tokens;
  HWY_DYNAMIC_DISPATCH(quantize)(x, x_stride, rows, norm, to, is_unsigned ? 128 : 0, begin, end);
}

void round_tokens(const float* x, int64_t x_stride, const int32_t* rows, const RowNorm& norm, const Bf16Tokens& to, int64_t begin,
                  int64_t end) {
  HWY_DYNAMIC_DISPATCH(round_to_bf16)(x, x_stride, rows, norm, to, bf16_kernels().f32_tokens, begin, end);
}

void run_product(const Product& product, int64_t row_begin, int64_t row_end, int64_t tile_begin, int64_t tile_end,
                 float* panel) {
  BERYL_CHECK(row_end - row_begin <= kMaxItemRows, "rows of one item");
  BERYL_CHECK(product.packed == nullptr || row_begin % product.row_tile() == 0, "packed rows come in whole tiles, strips or groups");
  if (!product.is_f32()) {
    if (product.is_bf16())
      return HWY_DYNAMIC_DISPATCH(run_bf16)(product, bf16_kernels(), row_begin, row_end, tile_begin, tile_end);
    return HWY_DYNAMIC_DISPATCH(run_packed)(product, integer_kernels(), row_begin, row_end, tile_begin, tile_end,
                                            reinterpret_cast<uint8_t*>(panel));
  }
  HWY_DYNAMIC_DISPATCH(run)(product, row_begin, row_end, tile_begin, tile_end, panel);
}

}  // namespace beryl
#endif  // HWY_ONCE
