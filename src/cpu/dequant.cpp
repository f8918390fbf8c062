#include "cpu/dequant.h"

#include "base/error.h"
#include "cpu/matrix_view.h"
#include "cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/dequant.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "cpu/decode-inl.h"

HWY_BEFORE_NAMESPACE();
namespace beryl {
namespace HWY_NAMESPACE {

void dequantize(const MatrixView& view, int64_t row, float tensor_scale, float scale, float* out) {
  // Whole units straight into place; the columns of a last, partial unit through a buffer, as it writes zeros behind.
  const int64_t whole = view.cols / 32 * 32;
  with_codec(view.format, [&](auto codec) HWY_ATTR {
    using Codec = decltype(codec);
    if constexpr (HasPartialUnits<Codec>) {
      if (whole > 0) decode_row_to<Codec>(view.row_codes(row), view.row_scales(row), whole, out, 16);
      if (whole < view.cols) {
        alignas(64) float rest[32];
        decode_row_to<Codec>(view.row_codes(row) + whole * Codec::kWeightBytes, view.row_scales(row), view.cols - whole,
                             rest, 16);
        std::memcpy(out + whole, rest, static_cast<size_t>(view.cols - whole) * sizeof(float));
      }
    } else {
      decode_row_to<Codec>(view.row_codes(row), view.row_scales(row), view.cols, out, 16);
    }
  });
  for (const float factor : {tensor_scale, scale}) {
    if (factor == 1.0f) continue;
    for (int64_t i = 0; i < view.cols; i += 16)
      store16_some(load16_some(out + i, view.cols - i) * set16(factor), out + i, view.cols - i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace beryl
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace beryl {

HWY_EXPORT(dequantize);

void dequantize_row_scaled(const HostMatrix& matrix, int64_t expert, int64_t row, float scale, float* out) {
  BERYL_CHECK(row >= 0 && row < matrix.rows && expert >= 0 && expert < matrix.stack, "row outside the matrix");
  HWY_DYNAMIC_DISPATCH(dequantize)(view_of(matrix, nullptr, expert), row, matrix.tensor_scale, scale, out);
}

void dequantize_copy_scaled(const HostMatrix& matrix, const std::byte* codes, const std::byte* scales, float scale, float* out) {
  MatrixView view = view_of(matrix, nullptr, 0);
  view.codes = reinterpret_cast<const uint8_t*>(codes);
  view.scales = reinterpret_cast<const uint8_t*>(scales);
  HWY_DYNAMIC_DISPATCH(dequantize)(view, 0, matrix.tensor_scale, scale, out);
}

void dequantize_row(const HostMatrix& matrix, int64_t expert, int64_t row, float* out) {
  dequantize_row_scaled(matrix, expert, row, 1.0f, out);
}

}  // namespace beryl
#endif  // HWY_ONCE
