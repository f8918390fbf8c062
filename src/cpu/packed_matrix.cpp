#include "cpu/packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "cpu/bf16_dot.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl {

namespace {

constexpr uint32_t kLowNibbles = 0x0f0f0f0fu;

template <class T>
T load_as(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// Where one row of a tile goes: dword `lane` of each vector of its strip. The format is known to the compiler, since a division for each
// word would take most of the time.
template <Format kFormat>
struct RowTarget {
  static constexpr PackedLayout layout = packed_layout(kFormat);
  uint8_t* stream;
  int strip;               // of the stream
  int lane;

  uint8_t* block_head(int64_t group) const { return stream + group / layout.block_groups * layout.block_bytes(); }
  int in_block(int64_t group) const { return static_cast<int>(group % layout.block_groups); }
  uint8_t* group_head(int64_t group) const {
    return block_head(group) + layout.block_head_bytes + in_block(group) * layout.group_bytes();
  }
  void put(int64_t group, int vector, uint32_t value) const {
    std::memcpy(group_head(group) + layout.group_head_bytes + strip * layout.strip_code_bytes + 64 * vector + 4 * lane, &value, 4);
  }
};

// Bits 4 v .. 4 v + 3 of `bits` to bit v of the four bytes: one bit for each column of a group, in its order.
uint32_t spread_fifth_bits(uint32_t bits) {
  uint32_t result = 0;
  for (int v = 0; v < 8; ++v) result |= ((bits >> 4 * v & 15u) * 0x00204081u & 0x01010101u) << v;
  return result;
}

// Two bytes of two nibbles each to four bytes of one.
uint32_t spread_nibbles(uint32_t pairs) {
  pairs = (pairs | pairs << 8) & 0x00ff00ffu;
  return (pairs | pairs << 4) & kLowNibbles;
}

// Blocks of 32 weights with nibbles in GGUF's usual order: bytes 4 v .. 4 v + 3 are already what vector v holds.
template <class Block, class Target>
void pack_nibbles(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g) {
    const uint8_t* codes = row + g * static_cast<int64_t>(sizeof(Block)) + offsetof(Block, codes);
    for (int v = 0; v < 4; ++v) to.put(g, v, load_as<uint32_t>(codes + 4 * v));
  }
}
template <class Block, class Target>
void pack_fifth_bits(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g)
    to.put(g, 4,
           spread_fifth_bits(load_as<uint32_t>(row + g * static_cast<int64_t>(sizeof(Block)) +
                                               offsetof(Block, high_bits))));
}
// f16 scales, and mins behind them where the format has such.
template <class Block, bool kMins, class Target>
void pack_half_scales(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g) {
    const uint8_t* block = row + g * static_cast<int64_t>(sizeof(Block));
    uint8_t* scales = to.group_head(g) + to.strip * (kMins ? 64 : 32) + 2 * to.lane;
    std::memcpy(scales, block, 2);
    if constexpr (kMins) std::memcpy(scales + 32, block + offsetof(Block, min), 2);
  }
}

template <class Target>
void pack_q8_0(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g) {
    const uint8_t* codes = row + g * static_cast<int64_t>(sizeof(BlockQ8_0)) + offsetof(BlockQ8_0, codes);
    for (int v = 0; v < 8; ++v) to.put(g, v, load_as<uint32_t>(codes + 4 * v) ^ 0x80808080u);
    std::memcpy(to.block_head(g) + 32 * to.in_block(g) + 2 * to.lane, codes - offsetof(BlockQ8_0, codes) + offsetof(BlockQ8_0, scale), 2);
  }
}

// Q4_K and Q5_K: a byte holds column i of groups 2 p (low nibble) and 2 p + 1.
template <class Block, class Target>
void pack_k(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t b = 0; b < cols / Block::kWeights; ++b) {
    const uint8_t* block = row + b * static_cast<int64_t>(sizeof(Block));
    const uint8_t* codes = block + offsetof(Block, codes);
    for (int p = 0; p < 4; ++p)
      for (int v = 0; v < 4; ++v) {
        const auto first = load_as<uint32_t>(codes + 32 * p + 4 * v), second = load_as<uint32_t>(codes + 32 * p + 16 + 4 * v);
        to.put(8 * b + 2 * p, v, (first & kLowNibbles) | (second & kLowNibbles) << 4);
        to.put(8 * b + 2 * p + 1, v, (first >> 4 & kLowNibbles) | (second & ~kLowNibbles));
      }
    uint8_t* head = to.block_head(8 * b) + 64 * to.strip + 2 * to.lane;
    std::memcpy(head, block + offsetof(Block, scale), 2);
    std::memcpy(head + 32, block + offsetof(Block, min_scale), 2);
    const GroupScales groups = unpack_scales_and_mins(block + offsetof(Block, scales));
    for (int g = 0; g < 8; ++g) {
      uint8_t* scales = to.group_head(8 * b + g) + 32 * to.strip + to.lane;
      scales[0] = groups.scales[g];
      scales[16] = groups.mins[g];
    }
  }
}
template <class Target>
void pack_fifth_bits_q5_k(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t b = 0; b < cols / BlockQ5_K::kWeights; ++b) {
    const uint8_t* high = row + b * static_cast<int64_t>(sizeof(BlockQ5_K)) + offsetof(BlockQ5_K, high_bits);
    for (int g = 0; g < 8; ++g) {
      uint32_t bits = 0;
      for (int v = 0; v < 8; ++v) bits |= (load_as<uint32_t>(high + 4 * v) >> g & 0x01010101u) << v;
      to.put(8 * b + g, 4, bits);
    }
  }
}

template <class Target>
void pack_q6_k(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t b = 0; b < cols / BlockQ6_K::kWeights; ++b) {
    const uint8_t* block = row + b * static_cast<int64_t>(sizeof(BlockQ6_K));
    for (int g = 0; g < 8; ++g) {
      const uint8_t* low = block + offsetof(BlockQ6_K, low_bits) + g / 4 * 64 + g % 2 * 32;
      const uint8_t* high = block + offsetof(BlockQ6_K, high_bits) + g / 4 * 32;
      const int shift = g % 4 < 2 ? 0 : 4;
      for (int v = 0; v < 4; ++v)
        to.put(8 * b + g, v,
               (load_as<uint32_t>(low + 4 * v) >> shift & kLowNibbles) |
                   (load_as<uint32_t>(low + 16 + 4 * v) >> shift & kLowNibbles) << 4);
      for (int h = 0; h < 2; ++h) {
        uint32_t bits = 0;
        for (int f = 0; f < 4; ++f)
          bits |= (load_as<uint32_t>(high + 4 * (4 * h + f)) >> 2 * (g % 4) & 0x03030303u) << 2 * f;
        to.put(8 * b + g, 4 + h, bits);
      }
    }
    std::memcpy(to.block_head(8 * b) + 32 * to.strip + 2 * to.lane, block + offsetof(BlockQ6_K, scale), 2);
    for (int i = 0; i < 16; ++i)
      to.group_head(8 * b + i / 2)[32 * to.strip + 16 * (i % 2) + to.lane] =
          block[offsetof(BlockQ6_K, scales) + static_cast<size_t>(i)];
  }
}

template <class Target>
void pack_mxfp4(const uint8_t* row, int64_t cols, const Target& to) {
  pack_nibbles<BlockMxfp4>(row, cols, to);
  for (int64_t g = 0; g < cols / kGroupCols; ++g)
    to.block_head(g)[32 * to.in_block(g) + 16 * to.strip + to.lane] =
        row[g * static_cast<int64_t>(sizeof(BlockMxfp4)) + offsetof(BlockMxfp4, exponent)];
}

template <class Target>
void pack_nvfp4(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g) {
    const uint8_t* block = row + g / 2 * static_cast<int64_t>(sizeof(BlockNvfp4));
    const uint8_t* codes = block + offsetof(BlockNvfp4, codes) + g % 2 * 16;
    for (int v = 0; v < 4; ++v) {  // low nibbles of 8 bytes: weights 0 .. 7 of 16, high nibbles: 8 .. 15
      const int shift = v < 2 ? 0 : 4;
      to.put(g, v,
             (load_as<uint32_t>(codes + 4 * (v % 2)) >> shift & kLowNibbles) |
                 (load_as<uint32_t>(codes + 8 + 4 * (v % 2)) >> shift & kLowNibbles) << 4);
    }
    for (int half = 0; half < 2; ++half) {
      const uint8_t scale = block[offsetof(BlockNvfp4, scales) + static_cast<size_t>(g % 2 * 2 + half)];
      // decode.h: bit 7 is ignored except that 0x7f alone means 0; 0xff is then no special value.
      to.group_head(g)[32 * to.strip + 16 * half + to.lane] = scale == 0x7f ? 0 : scale & 0x7f;
    }
  }
}

template <class Target>
void pack_fp4_g128(const uint8_t* row, const uint8_t* row_scales, int64_t cols, const Target& to) {
  for (int64_t g = 0; g < cols / kGroupCols; ++g)
    for (int v = 0; v < 4; ++v)
      to.put(g, v, spread_nibbles(load_as<uint16_t>(row + 16 * g + 2 * v)) |
                       spread_nibbles(load_as<uint16_t>(row + 16 * g + 8 + 2 * v)) << 4);
  for (int64_t i = 0; i < cols / kFp4GroupWeights; ++i)
    std::memcpy(to.block_head(4 * i) + 32 * to.strip + 2 * to.lane, row_scales + 2 * i, 2);
}

template <class Target>
void pack_bf16(const uint8_t* row, int64_t cols, const Target& to) {
  for (int64_t pair = 0; pair < (cols + 1) / 2; ++pair) {
    uint32_t bits = load_as<uint16_t>(row + 4 * pair);
    if (2 * pair + 1 < cols) bits |= uint32_t{load_as<uint16_t>(row + 4 * pair + 2)} << 16;
    for (const int shift : {0, 16})
      if (std::abs(bf16_to_f32(static_cast<uint16_t>(bits >> shift))) < kSmallestBf16) bits &= 0xffff0000u >> shift;
    std::memcpy(to.group_head(pair / 16) + (pair % 16 * kStrips + to.strip) * 64 + 4 * to.lane, &bits, 4);
  }
}

template <Format kFormat>
void pack_row(const uint8_t* row, const uint8_t* row_scales, int64_t cols, const RowTarget<kFormat>& to) {
  if constexpr (kFormat == Format::kQ4_0) {
    pack_nibbles<BlockQ4_0>(row, cols, to);
    pack_half_scales<BlockQ4_0, false>(row, cols, to);
  } else if constexpr (kFormat == Format::kQ4_1) {
    pack_nibbles<BlockQ4_1>(row, cols, to);
    pack_half_scales<BlockQ4_1, true>(row, cols, to);
  } else if constexpr (kFormat == Format::kQ5_0) {
    pack_nibbles<BlockQ5_0>(row, cols, to);
    pack_fifth_bits<BlockQ5_0>(row, cols, to);
    pack_half_scales<BlockQ5_0, false>(row, cols, to);
  } else if constexpr (kFormat == Format::kQ5_1) {
    pack_nibbles<BlockQ5_1>(row, cols, to);
    pack_fifth_bits<BlockQ5_1>(row, cols, to);
    pack_half_scales<BlockQ5_1, true>(row, cols, to);
  } else if constexpr (kFormat == Format::kQ8_0) {
    pack_q8_0(row, cols, to);
  } else if constexpr (kFormat == Format::kQ4_K) {
    pack_k<BlockQ4_K>(row, cols, to);
  } else if constexpr (kFormat == Format::kQ5_K) {
    pack_k<BlockQ5_K>(row, cols, to);
    pack_fifth_bits_q5_k(row, cols, to);
  } else if constexpr (kFormat == Format::kQ6_K) {
    pack_q6_k(row, cols, to);
  } else if constexpr (kFormat == Format::kMxfp4) {
    pack_mxfp4(row, cols, to);
  } else if constexpr (kFormat == Format::kNvfp4) {
    pack_nvfp4(row, cols, to);
  } else if constexpr (kFormat == Format::kFp4G128) {
    pack_fp4_g128(row, row_scales, cols, to);
  } else {
    static_assert(kFormat == Format::kBf16);
    pack_bf16(row, cols, to);
  }
}

const uint8_t* as_bytes(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }

// All rows of a tile, side by side.
template <Format kFormat>
void pack_rows(const HostMatrix& matrix, int64_t expert, int64_t row_begin, int64_t n_rows, uint8_t* to) {
  constexpr PackedLayout layout = packed_layout(kFormat);
  constexpr int kStreamRows = layout.strips_together * kStripRows;
  const int64_t stream_bytes = layout.stream_bytes((matrix.cols + kGroupCols - 1) / kGroupCols);
  for (int r = 0; r < n_rows; ++r)
    pack_row<kFormat>(as_bytes(matrix.row_codes(expert, row_begin + r)), as_bytes(matrix.row_scales(expert, row_begin + r)), matrix.cols,
                      {to + r / kStreamRows * stream_bytes, r % kStreamRows / kStripRows, r % kStripRows});
}

void pack_floats(Format format, const uint8_t* row, int64_t cols, int row_of_tile, uint8_t* tile) {
  const int64_t unit = float_unit_bytes(format), n_bytes = row_bytes(format, cols);
  uint8_t* to = tile + row_of_tile / kFloatRows * float_group_bytes(format, cols) + row_of_tile % kFloatRows * unit;
  for (int64_t done = 0; done < n_bytes; done += unit, to += kFloatRows * unit)
    std::memcpy(to, row + done, static_cast<size_t>(std::min(unit, n_bytes - done)));
}

}  // namespace

int64_t packed_tile_bytes(PackedForm form, Format format, int64_t cols) {
  if (form == PackedForm::kFloats) return kTileRows / kFloatRows * float_group_bytes(format, cols);
  return packed_layout(format).tile_bytes((cols + kGroupCols - 1) / kGroupCols);
}

int64_t packed_bytes(PackedForm form, const HostMatrix& matrix) {
  return matrix.stack * ((matrix.rows + kTileRows - 1) / kTileRows) * packed_tile_bytes(form, matrix.format, matrix.cols);
}

bool is_plain_fp8(const HostMatrix& matrix, int64_t expert, int64_t tile) {
  const int64_t row_end = std::min<int64_t>((tile + 1) * kTileRows, matrix.rows);
  for (int64_t row = tile * kTileRows; row < row_end; ++row) {
    const uint8_t* codes = as_bytes(matrix.row_codes(expert, row));
    int n_nans = 0;
    for (int64_t c = 0; c < matrix.cols; ++c) n_nans += (codes[c] & 0x7f) == 0x7f ? 1 : 0;
    if (n_nans > 0 || !(std::abs(load_as<float>(as_bytes(matrix.row_scales(expert, row)))) < 0x1p100f)) return false;
  }
  return true;
}

void pack_tile(PackedForm form, const HostMatrix& matrix, int64_t expert, int64_t tile, uint8_t* to) {
  const int64_t row_begin = tile * kTileRows, n_rows = std::min<int64_t>(kTileRows, matrix.rows - row_begin);
  const int64_t tile_bytes = packed_tile_bytes(form, matrix.format, matrix.cols);
  if (n_rows < kTileRows || matrix.cols % kGroupCols != 0) std::memset(to, 0, static_cast<size_t>(tile_bytes));
  if (form == PackedForm::kFloats) {
    for (int r = 0; r < n_rows; ++r)
      pack_floats(matrix.format, as_bytes(matrix.row_codes(expert, row_begin + r)), matrix.cols, r, to);
    return;
  }
  switch (matrix.format) {
    case Format::kQ4_0: return pack_rows<Format::kQ4_0>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ4_1: return pack_rows<Format::kQ4_1>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ5_0: return pack_rows<Format::kQ5_0>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ5_1: return pack_rows<Format::kQ5_1>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ8_0: return pack_rows<Format::kQ8_0>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ4_K: return pack_rows<Format::kQ4_K>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ5_K: return pack_rows<Format::kQ5_K>(matrix, expert, row_begin, n_rows, to);
    case Format::kQ6_K: return pack_rows<Format::kQ6_K>(matrix, expert, row_begin, n_rows, to);
    case Format::kMxfp4: return pack_rows<Format::kMxfp4>(matrix, expert, row_begin, n_rows, to);
    case Format::kNvfp4: return pack_rows<Format::kNvfp4>(matrix, expert, row_begin, n_rows, to);
    case Format::kFp4G128: return pack_rows<Format::kFp4G128>(matrix, expert, row_begin, n_rows, to);
    case Format::kBf16: return pack_rows<Format::kBf16>(matrix, expert, row_begin, n_rows, to);
    default: BERYL_CHECK(false, "a format that is packed");
  }
}

}  // namespace beryl
