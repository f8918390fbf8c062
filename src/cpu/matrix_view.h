// Where the rows of one expert of a host matrix lie: what kernels need to know of a HostMatrix.
#pragma once

#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl {

struct MatrixView {
  Format format;
  int64_t cols;
  const uint8_t* codes;           // of row 0
  const uint8_t* scales;          // of row 0; null for formats of one plane
  int64_t code_stride;            // bytes from row to row
  int64_t scale_stride;

  const uint8_t* row_codes(int64_t row) const { return codes + row * code_stride; }
  const uint8_t* row_scales(int64_t row) const { return scales == nullptr ? nullptr : scales + row * scale_stride; }
};

inline MatrixView view_of(const HostMatrix& matrix, int64_t expert) {
  MatrixView view{matrix.format, matrix.cols, nullptr, nullptr, row_bytes(matrix.format, matrix.cols),
                  row_scale_bytes(matrix.format, matrix.cols)};
  view.codes = reinterpret_cast<const uint8_t*>(matrix.codes) + expert * matrix.stack_stride_bytes;
  if (matrix.scales != nullptr)
    view.scales = reinterpret_cast<const uint8_t*>(matrix.scales) + expert * matrix.stack_scale_stride_bytes;
  return view;
}

}  // namespace beryl
