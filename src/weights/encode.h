// Quantising: f32 weights into any weight format. Host only, single thread a call; callers spread rows over threads.
//
// Formats with group scales choose them by search, not by the largest weight alone: candidate scales, the best of them
// improved by least squares with the codes held; the least squared error as it will be decoded wins. The largest-weight
// scale is always a candidate, so the error is never larger than its. NVFP4's scales are so few that all are tried.
// Q4_K, Q5_K and Q6_K weigh the errors of large weights more (encode.cpp says how) and also search their groups'
// integer scales. FP8 scales each row's largest weight to 448.
//
// What a format can hold exactly comes back exactly: FP4, MXFP4, Q4_0 and Q5_0 always; the others when some code of
// each group (and some group's integer scale) is at the end of its range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "weights/format.h"
#include "weights/host_matrix.h"

namespace beryl {

// Encodes rows of W[n_rows][cols] into codes [n_rows][row_bytes] and, for two-plane formats, scales
// [n_rows][row_scale_bytes] (else null). NVFP4 alone uses tensor_scale: decoded weights are to be multiplied by it.
// name and first_row serve the message: a weight that is infinite, NaN, or beyond the format's range (65504 where
// scales are f16) is an Error(kBadInput) with the tensor, row and column. Requires fits(format, cols).
void encode_rows(const std::string& name, Format format, const float* weights, int64_t first_row, int64_t n_rows,
                 int64_t cols, std::byte* codes, std::byte* scales, float tensor_scale = 1.0f);

// The scale that lets NVFP4's group scales use their whole range: absmax / (6 * 448), 1 for a matrix of zeros.
float nvfp4_tensor_scale(const float* weights, int64_t n_weights);

// A whole matrix W[stack][rows][cols], held in the result's `storage`.
HostMatrix encode_matrix(const std::string& name, Format format, const float* weights, int64_t rows, int64_t cols,
                         int64_t stack = 1);

}  // namespace beryl
