// The table of formats. Sizes of the block structs themselves are asserted in weights/blocks.h.
#include "weights/format.h"

#include <array>

#include "base/error.h"
#include "weights/blocks.h"

namespace beryl {

namespace {

template <class Block>
constexpr FormatInfo of_block(Format format, std::string_view name) {
  return {format, name, Block::kWeights, static_cast<int>(sizeof(Block)), -1, 0};
}

constexpr std::array<FormatInfo, kFormatCount> kFormats = {{
    {Format::kF32, "f32", 1, 4, -1, 0},
    {Format::kF16, "f16", 1, 2, -1, 0},
    {Format::kBf16, "bf16", 1, 2, -1, 0},
    of_block<BlockQ4_0>(Format::kQ4_0, "q4_0"),
    of_block<BlockQ4_1>(Format::kQ4_1, "q4_1"),
    of_block<BlockQ5_0>(Format::kQ5_0, "q5_0"),
    of_block<BlockQ5_1>(Format::kQ5_1, "q5_1"),
    of_block<BlockQ8_0>(Format::kQ8_0, "q8_0"),
    of_block<BlockQ4_K>(Format::kQ4_K, "q4_k"),
    of_block<BlockQ5_K>(Format::kQ5_K, "q5_k"),
    of_block<BlockQ6_K>(Format::kQ6_K, "q6_k"),
    of_block<BlockMxfp4>(Format::kMxfp4, "mxfp4"),
    of_block<BlockNvfp4>(Format::kNvfp4, "nvfp4"),
    {Format::kFp4G128, "fp4_g128", kFp4GroupWeights, kFp4GroupWeights / 2, kFp4GroupWeights, 2},
    {Format::kFp8, "fp8", 1, 1, 0, 4},
    {Format::kI32, "i32", 1, 4, -1, 0},
    {Format::kI64, "i64", 1, 8, -1, 0},
    {Format::kU8, "u8", 1, 1, -1, 0},
}};

constexpr bool in_order() {
  for (int i = 0; i < kFormatCount; ++i)
    if (static_cast<int>(kFormats[i].format) != i) return false;
  return true;
}
static_assert(in_order(), "kFormats is indexed by Format");

}  // namespace

const FormatInfo& info(Format format) {
  const auto index = static_cast<size_t>(format);
  BERYL_CHECK(index < kFormats.size(), "format out of range");
  return kFormats[index];
}

std::optional<Format> format_by_name(std::string_view name) {
  for (const FormatInfo& entry : kFormats)
    if (entry.name == name) return entry.format;
  return std::nullopt;
}

int64_t row_bytes(Format format, int64_t cols) {
  const FormatInfo& entry = info(format);
  BERYL_CHECK(cols >= 0 && cols % entry.block_weights == 0, "a row must be whole blocks");
  return cols / entry.block_weights * entry.block_bytes;
}

int64_t row_scale_bytes(Format format, int64_t cols) {
  const FormatInfo& entry = info(format);
  if (entry.scale_group < 0) return 0;
  if (entry.scale_group == 0) return entry.scale_bytes;
  BERYL_CHECK(cols >= 0 && cols % entry.scale_group == 0, "a row must be whole scale groups");
  return cols / entry.scale_group * entry.scale_bytes;
}

bool fits(Format format, int64_t cols) {
  const FormatInfo& entry = info(format);
  return cols >= 0 && cols % entry.block_weights == 0 && (entry.scale_group <= 0 || cols % entry.scale_group == 0);
}

}  // namespace beryl
