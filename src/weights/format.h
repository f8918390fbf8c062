// The weight formats that files hold: name, block size, bytes. Bit layouts are drawn in docs/formats.md;
// weights/decode.cpp is the one exact definition of what a block means.
//
// A format whose blocks hold their own scales (GGUF's) is one byte stream. Formats with separate planes
// (FP4 g128, NVFP4 of Hugging Face, FP8 by row) keep codes and scales in two tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace beryl {

enum class Format : uint8_t {
  kF32,
  kF16,
  kBf16,
  kQ4_0,      // int4, 32 weights a block, f16 scale
  kQ4_1,      // int4, 32, f16 scale and min
  kQ5_0,      // int5, 32, f16 scale
  kQ5_1,      // int5, 32, f16 scale and min
  kQ8_0,      // int8, 32, f16 scale
  kQ4_K,      // int4, 256 in 8 groups of 32, 6-bit scales and mins times f16
  kQ5_K,      // int5, the same
  kQ6_K,      // int6, 256 in 16 groups of 16, int8 scales times f16
  kMxfp4,     // E2M1, 32, E8M0 scale (GGUF block)
  kNvfp4,     // E2M1, groups of 16, UE4M3 scales (GGUF block of 64), times HostMatrix::tensor_scale
  kFp4G128,   // E2M1 codes [rows][cols/2], scales bf16 [rows][cols/128]: two planes
  kFp8,       // E4M3 codes [rows][cols], scales f32 [rows]: two planes
  kI32,       // not a weight: integer tensors (token orderings, golden ids)
  kI64,
  kU8,        // not a weight by itself: codes of a two-plane format, packed
};
inline constexpr int kFormatCount = 18;

struct FormatInfo {
  Format format;
  std::string_view name;     // "q4_k", as on the command line and in messages
  int block_weights;         // weights a block of the code plane holds along a row; rows are whole blocks
  int block_bytes;           // bytes of such a block
  int scale_group;           // two-plane formats: columns one scale covers (0: the whole row); else -1
  int scale_bytes;           // bytes of one such scale, else 0
};

const FormatInfo& info(Format format);
// Weights are integers times a scale (plus a min) that 16 or more columns of a row share; their rows are whole groups of 32
// columns. E2M1 counts: its values are integers when doubled.
constexpr bool has_integer_codes(Format format) {
  switch (format) {
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ5_0:
    case Format::kQ5_1:
    case Format::kQ8_0:
    case Format::kQ4_K:
    case Format::kQ5_K:
    case Format::kQ6_K:
    case Format::kMxfp4:
    case Format::kNvfp4:
    case Format::kFp4G128: return true;
    default: return false;
  }
}
std::optional<Format> format_by_name(std::string_view name);

// Bytes of the code plane of one row. Requires cols % block_weights == 0.
int64_t row_bytes(Format format, int64_t cols);
// Bytes of the scale plane of one row; 0 for formats of one plane.
int64_t row_scale_bytes(Format format, int64_t cols);
// True when a row of `cols` columns is whole blocks (and whole scale groups).
bool fits(Format format, int64_t cols);

}  // namespace beryl
