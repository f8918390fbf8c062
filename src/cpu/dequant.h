// Rows of weights to f32, vectorised; the same bits as decode_row of weights/host_matrix.h (which is scalar).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weights/host_matrix.h"

namespace beryl {

// A row, tensor_scale included. out: [cols], any alignment. Any thread.
void dequantize_row(const HostMatrix& matrix, int64_t expert, int64_t row, float* out);

// The row times `scale`: one more rounding. What Embed stores.
void dequantize_row_scaled(const HostMatrix& matrix, int64_t expert, int64_t row, float scale, float* out);
// The same of a row that lies elsewhere in the matrix's format; scales: null for formats of one plane.
void dequantize_copy_scaled(const HostMatrix& matrix, const std::byte* codes, const std::byte* scales, float scale, float* out);

}  // namespace beryl
