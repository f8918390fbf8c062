// Decoding one row of a host matrix, whatever its format.
#include "weights/host_matrix.h"

#include "base/error.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl {

int64_t HostMatrix::bytes() const {
  return stack * rows * (row_bytes(format, cols) + row_scale_bytes(format, cols));
}

void decode_row(const HostMatrix& matrix, int64_t expert, int64_t row, float* out) {
  BERYL_CHECK(row >= 0 && row < matrix.rows && expert >= 0 && expert < matrix.stack, "row outside the matrix");
  const std::byte* codes =
      matrix.codes + expert * matrix.stack_stride_bytes + row * row_bytes(matrix.format, matrix.cols);
  const std::byte* scales = nullptr;
  if (info(matrix.format).scale_group >= 0)
    scales =
        matrix.scales + expert * matrix.stack_scale_stride_bytes + row * row_scale_bytes(matrix.format, matrix.cols);

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
