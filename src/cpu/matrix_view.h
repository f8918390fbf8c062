// Where the rows of one expert of a host matrix lie, in the file or packed: what products in f32 need to know of it.
#pragma once

#include <cstdint>

#include "cpu/packed_matrix.h"
#include "weights/host_matrix.h"

namespace beryl {

struct MatrixView {
  Format format;
  int64_t cols;
  const uint8_t* codes;           // of row 0
  const uint8_t* scales;          // of row 0; null for formats of one plane
  int64_t code_stride;            // bytes from row to row
  int64_t scale_stride;
  // PackedForm::kFloats: where a tile of rows and a group of a tile begin; 32 columns of a row are code_stride from those of the next.
  bool is_packed = false;
  bool is_plain_fp8 = false;
  int64_t tile_stride = 0;
  int64_t group_stride = 0;
  int64_t interleaved_rows = 0;   // HostMatrix's; packed rows are in order, though their scales are not

  const uint8_t* row_codes(int64_t row) const {
    if (!is_packed) return codes + row_in_file(row, interleaved_rows) * code_stride;
    return codes + row / kTileRows * tile_stride + row % kTileRows / kFloatRows * group_stride + row % kFloatRows * code_stride;
  }
  const uint8_t* row_scales(int64_t row) const {
    return scales == nullptr ? nullptr : scales + row_in_file(row, interleaved_rows) * scale_stride;
  }
};

// packed: of form kFloats, or null.
inline MatrixView view_of(const HostMatrix& matrix, const PackedMatrix* packed, int64_t expert) {
  MatrixView view{matrix.format, matrix.cols, nullptr, nullptr, row_bytes(matrix.format, matrix.cols),
                  row_scale_bytes(matrix.format, matrix.cols)};
  view.codes = reinterpret_cast<const uint8_t*>(matrix.codes) + expert * matrix.stack_stride_bytes;
  if (matrix.scales != nullptr)
    view.scales = reinterpret_cast<const uint8_t*>(matrix.scales) + expert * matrix.stack_scale_stride_bytes;
  view.interleaved_rows = matrix.interleaved_rows;
  if (packed != nullptr) {
    view.is_packed = true;
    view.is_plain_fp8 = packed->is_plain_fp8;
    view.codes = packed->tile(expert, 0);
    view.code_stride = float_unit_bytes(matrix.format);
    view.tile_stride = packed->tile_stride;
    view.group_stride = float_group_bytes(matrix.format, matrix.cols);
  }
  return view;
}

}  // namespace beryl
