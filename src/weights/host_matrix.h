// A weight matrix where it lies in host memory (most often in a mapped file), before a backend imports it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weights/format.h"

namespace beryl {

// W[stack][rows][cols], row-major. stack > 1 only for experts, which lie stack_stride_bytes apart. codes and scales may
// lie at any address (files promise no alignment): read them with memcpy or unaligned loads.
struct HostMatrix {
  std::string name;                       // the tensor's name in its file, for messages
  Format format = Format::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stack = 1;
  const std::byte* codes = nullptr;       // row_bytes(format, cols) a row
  const std::byte* scales = nullptr;      // two-plane formats: row_scale_bytes(format, cols) a row
  int64_t stack_stride_bytes = 0;         // from one expert's codes to the next
  int64_t stack_scale_stride_bytes = 0;   // likewise for scales
  // Rows come in runs of this many, a head, in which row 2 b + a of the file is row a · (run / 2) + b of the matrix: GGUF's order of
  // llama's q and k, by interleaved rope pairs. 0: rows are in order.
  int64_t interleaved_rows = 0;
  float tensor_scale = 1.0f;              // multiplies every weight (NVFP4's second scale, folded constants)
  std::shared_ptr<const std::vector<std::byte>> storage;  // owns codes (and scales) when they are not in a mapped file

  // Where a row lies. row_scales: null for formats of one plane. Requires 0 <= row < rows, 0 <= expert < stack.
  const std::byte* row_codes(int64_t expert, int64_t row) const;
  const std::byte* row_scales(int64_t expert, int64_t row) const;

  // Bytes of codes and scales: what reading the whole matrix once moves.
  int64_t bytes() const;
};

// The place in the file of a row of the matrix.
inline int64_t row_in_file(int64_t row, int64_t interleaved_rows) {
  if (interleaved_rows == 0) return row;
  const int64_t in_head = row % interleaved_rows, half = interleaved_rows / 2;
  return row - in_head + in_head % half * 2 + in_head / half;
}

// One row, exact in f32 but for the one rounding of the product code * scale (decode.h). out: [cols].
// Requires 0 <= row < rows, 0 <= expert < stack.
void decode_row(const HostMatrix& matrix, int64_t expert, int64_t row, float* out);

}  // namespace beryl
