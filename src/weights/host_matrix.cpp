// Decoding one row of a host matrix, whatever its format.
#include "weights/host_matrix.h"

#include "base/error.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl {

const std::byte* HostMatrix::row_codes(int64_t expert, int64_t row) const {
  return codes + expert * stack_stride_bytes + row_in_file(row, interleaved_rows) * row_bytes(format, cols);
}

const std::byte* HostMatrix::row_scales(int64_t expert, int64_t row) const {
  if (scales == nullptr) return nullptr;
  return scales + expert * stack_scale_stride_bytes + row_in_file(row, interleaved_rows) * row_scale_bytes(format, cols);
}

int64_t HostMatrix::bytes() const {
  return stack * rows * (row_bytes(format, cols) + row_scale_bytes(format, cols));
}

void decode_row(const HostMatrix& matrix, int64_t expert, int64_t row, float* out) {
  BERYL_CHECK(row >= 0 && row < matrix.rows && expert >= 0 && expert < matrix.stack, "row outside the matrix");
  const std::byte *codes = matrix.row_codes(expert, row), *scales = matrix.row_scales(expert, row);
  if (matrix.format == Format::kFp4G128) {
    decode_fp4_g128(codes, scales, matrix.cols / kFp4GroupWeights, out);
  } else if (matrix.format == Format::kFp8) {
    decode_fp8(codes, scales, matrix.cols, out);
  } else {
    decode_blocks(matrix.format, codes, matrix.cols / info(matrix.format).block_weights, out);
  }
  if (matrix.tensor_scale != 1.0f)
    for (int64_t i = 0; i < matrix.cols; ++i) out[i] *= matrix.tensor_scale;
}

}  // namespace beryl
