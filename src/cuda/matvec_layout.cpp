// Disk blocks to tiles and back, and the plan of a launch.
#include "cuda/matvec_layout.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "base/float_formats.h"
#include "cuda/index_math.h"
#include "weights/blocks.h"
#include "weights/decode.h"

namespace beryl::cuda {

namespace {

constexpr int kColumns = 128;                 // of a tile of integer or 8-bit codes
constexpr int kHalfColumns = 64;              // of a tile of 16-bit weights
constexpr int64_t kStageAlignment = 128;      // bulk copies of anything else lose a quarter of the bandwidth

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// The codes of one row of a tile, decoded from their disk block but not scaled, and its meta data as the tile holds it.
//   FP4, MXFP4, NVFP4  4 bits    Q4_0  4 bits, signed    Q4_1, Q4_K  4 bits    Q5_0  5 bits, signed    Q5_1, Q5_K  5
//                      bits
//   Q6_K  6 bits, signed         Q8_0  8 bits, signed    FP8  8 bits           F16, BF16  16 bits, kHalfColumns of them
struct TileRow {
  uint16_t codes[kColumns] = {};
  uint8_t meta[16] = {};            // meta_row_bytes(format)
};

// What a codec stores: where in a tile the codes lie.
enum class Packing { kE2m1, kInt4, kInt5, kInt6, kInt8, kFloat8, kFloat16 };

Packing packing(Format format) {
  switch (format) {
    case Format::kFp4G128:
    case Format::kMxfp4:
    case Format::kNvfp4: return Packing::kE2m1;
    case Format::kQ4_0:
    case Format::kQ4_1:
    case Format::kQ4_K: return Packing::kInt4;
    case Format::kQ5_0:
    case Format::kQ5_1:
    case Format::kQ5_K: return Packing::kInt5;
    case Format::kQ6_K: return Packing::kInt6;
    case Format::kQ8_0: return Packing::kInt8;
    case Format::kFp8: return Packing::kFloat8;
    case Format::kF16:
    case Format::kBf16: return Packing::kFloat16;
    default: break;
  }
  BERYL_CHECK(false, "a format without tiles");
  return Packing::kE2m1;
}

int meta_row_bytes(Format format) {
  switch (format) {
    case Format::kFp4G128: return 2;          // bf16 scale
    case Format::kMxfp4: return 4;            // 4 E8M0 exponents
    case Format::kNvfp4: return 8;            // 8 UE4M3 scales
    case Format::kQ4_0:
    case Format::kQ5_0:
    case Format::kQ8_0: return 8;             // 4 f16 scales
    case Format::kQ4_1:
    case Format::kQ5_1: return 16;            // 4 f16 scales, 4 f16 mins
    case Format::kQ4_K:
    case Format::kQ5_K: return 12;            // 4 scales, 4 mins, a byte each; f16 scale and min of the block
    case Format::kQ6_K: return 10;            // 8 scales, a byte each; f16 scale of the block
    default: return 0;
  }
}

// Meta data of a tile is one plane for each field, so that lanes load whole words: bytes of the first plane a row.
int meta_first_bytes(Format format) {
  if (format == Format::kQ4_K || format == Format::kQ5_K || format == Format::kQ6_K) return 8;
  return meta_row_bytes(format);
}

// Position of a row's meta data in the first plane. FP4 keeps rows r and r + 8 side by side: one word a lane.
int meta_index(Format format, int row) { return format == Format::kFp4G128 ? row % 8 * 2 + row / 8 : row; }

void read_tile_row(const HostMatrix& matrix, int64_t row, int column_tile, TileRow& out) {
  out = TileRow{};
  const std::byte* codes = matrix.row_codes(0, row);
  const int64_t first = int64_t{column_tile} * tile_shape(matrix.format).columns;
  const int64_t n_columns = std::min<int64_t>(tile_shape(matrix.format).columns, matrix.cols - first);
  const int n_groups = static_cast<int>(n_columns / 32);      // groups of 32 that exist
  auto put16 = [&](int index, uint16_t value) { std::memcpy(out.meta + 2 * index, &value, 2); };
  auto nibble = [](const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 0xf : bytes[i - 16] >> 4; };
  auto high_bit = [](const uint8_t* bytes, int i) { return bytes[i / 8] >> (i % 8) & 1; };
  switch (matrix.format) {
    case Format::kFp4G128: {
      const std::byte* group = codes + first / 2;
      for (int i = 0; i < kColumns / 2; ++i) {
        const auto pair = static_cast<uint8_t>(group[i]);
        out.codes[2 * i] = pair & 0xf;
        out.codes[2 * i + 1] = pair >> 4;
      }
      put16(0, load<uint16_t>(matrix.row_scales(0, row) + 2 * column_tile));
      break;
    }
    case Format::kMxfp4:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockMxfp4>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockMxfp4)));
        for (int i = 0; i < 32; ++i) out.codes[32 * g + i] = static_cast<uint16_t>(nibble(block.codes, i));
        out.meta[g] = block.exponent;
      }
      break;
    case Format::kNvfp4:
      for (int b = 0; b < n_columns / 64; ++b) {
        const auto block = load<BlockNvfp4>(codes + (first / 64 + b) * static_cast<int64_t>(sizeof(BlockNvfp4)));
        for (int g = 0; g < 4; ++g) {
          for (int i = 0; i < 8; ++i) {
            out.codes[64 * b + 16 * g + i] = block.codes[8 * g + i] & 0xf;
            out.codes[64 * b + 16 * g + 8 + i] = block.codes[8 * g + i] >> 4;
          }
          out.meta[4 * b + g] = block.scales[g] == 0x7f ? 0 : block.scales[g] & 0x7f;
        }
      }
      break;
    case Format::kQ4_0:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockQ4_0>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockQ4_0)));
        for (int i = 0; i < 32; ++i) out.codes[32 * g + i] = static_cast<uint16_t>((nibble(block.codes, i) - 8) & 0xf);
        put16(g, block.scale);
      }
      break;
    case Format::kQ4_1:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockQ4_1>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockQ4_1)));
        for (int i = 0; i < 32; ++i) out.codes[32 * g + i] = static_cast<uint16_t>(nibble(block.codes, i));
        put16(g, block.scale);
        put16(4 + g, block.min);
      }
      break;
    case Format::kQ5_0:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockQ5_0>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockQ5_0)));
        for (int i = 0; i < 32; ++i) {
          const int code = nibble(block.codes, i) | high_bit(block.high_bits, i) << 4;
          out.codes[32 * g + i] = static_cast<uint16_t>((code - 16) & 0x1f);
        }
        put16(g, block.scale);
      }
      break;
    case Format::kQ5_1:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockQ5_1>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockQ5_1)));
        for (int i = 0; i < 32; ++i)
          out.codes[32 * g + i] = static_cast<uint16_t>(nibble(block.codes, i) | high_bit(block.high_bits, i) << 4);
        put16(g, block.scale);
        put16(4 + g, block.min);
      }
      break;
    case Format::kQ8_0:
      for (int g = 0; g < n_groups; ++g) {
        const auto block = load<BlockQ8_0>(codes + (first / 32 + g) * static_cast<int64_t>(sizeof(BlockQ8_0)));
        for (int i = 0; i < 32; ++i) out.codes[32 * g + i] = static_cast<uint8_t>(block.codes[i]);
        put16(g, block.scale);
      }
      break;
    case Format::kQ4_K:
    case Format::kQ5_K: {
      // The two formats differ in the bits above the nibbles alone.
      const bool five = matrix.format == Format::kQ5_K;
      BlockQ5_K block = {};
      const std::byte* from = codes + first / 256 * static_cast<int64_t>(five ? sizeof(BlockQ5_K) : sizeof(BlockQ4_K));
      if (five) {
        block = load<BlockQ5_K>(from);
      } else {
        const auto four = load<BlockQ4_K>(from);
        block.scale = four.scale;
        block.min_scale = four.min_scale;
        std::memcpy(block.scales, four.scales, sizeof(block.scales));
        std::memcpy(block.codes, four.codes, sizeof(block.codes));
      }
      const GroupScales groups = unpack_scales_and_mins(block.scales);
      const int half = static_cast<int>(first % 256 / kColumns);
      for (int g = 0; g < 4; ++g) {
        const int group = half * 4 + g;
        for (int i = 0; i < 32; ++i)
          out.codes[32 * g + i] = static_cast<uint16_t>((block.codes[group / 2 * 32 + i] >> (group % 2 * 4) & 0xf) |
                                                        (block.high_bits[i] >> group & 1) << 4);
        out.meta[g] = groups.scales[group];
        out.meta[4 + g] = groups.mins[group];
      }
      put16(4, block.scale);
      put16(5, block.min_scale);
      break;
    }
    case Format::kQ6_K: {
      const auto block = load<BlockQ6_K>(codes + first / 256 * static_cast<int64_t>(sizeof(BlockQ6_K)));
      const int half = static_cast<int>(first % 256 / kColumns);
      for (int i = 0; i < kColumns; ++i) {
        const int low = block.low_bits[half * 64 + i % 64] >> (i / 64 * 4) & 0xf;
        const int high = block.high_bits[half * 32 + i % 32] >> (i / 32 * 2) & 3;
        out.codes[i] = static_cast<uint16_t>(((low | high << 4) - 32) & 0x3f);
      }
      std::memcpy(out.meta, block.scales + half * 8, 8);
      put16(4, block.scale);
      break;
    }
    case Format::kFp8:
      for (int64_t i = 0; i < n_columns; ++i) out.codes[i] = static_cast<uint8_t>(codes[first + i]);
      break;
    case Format::kF16:
    case Format::kBf16:
      std::memcpy(out.codes, codes + 2 * first, static_cast<size_t>(2 * n_columns));
      break;
    default: BERYL_CHECK(false, "a format without tiles");
  }
}

// Where the code of one column of one row lies. In the tensor core's order of a warp's lanes, row r of a tile belongs
// to lanes 4 (r % 8) + t, t = 0..3; t and the rest of the position follow from the column.
struct BitPlace {
  int byte = 0;
  int shift = 0;
};

// 8-bit operands: column 32 step + 16 half + 4 t + i is byte i of register `half` of k-step `step`.
struct IntegerColumn {
  int step, half, lane, i;
  IntegerColumn(int row, int column)
      : step(column / 32), half(column / 16 % 2), lane(row % 8 * 4 + column / 4 % 4), i(column % 4) {}
};

// Codes as E2M1: a lane's word of a k-step holds its 4 codes of half 0 below, those of half 1 above.
BitPlace e2m1_place(int row, int column) {
  const IntegerColumn at(row, column);
  const int nibble = at.half * 4 + at.i;
  return {row / 8 * 512 + at.lane * 16 + at.step * 4 + nibble / 2, nibble % 2 * 4};
}
// The 4 upper bits of an integer code: low nibbles are the even k-step of a pair, high nibbles the odd one.
BitPlace nibble_place(int row, int column) {
  const IntegerColumn at(row, column);
  return {row / 8 * 512 + at.lane * 16 + (at.step / 2 * 2 + at.half) * 4 + at.i, at.step % 2 * 4};
}
// The lowest bit of a 5-bit code: a word a row and lane.
BitPlace low_bit_place(int row, int column) {
  const IntegerColumn at(row, column);
  return {1024 + at.lane * 8 + row / 8 * 4 + at.i, at.step * 2 + at.half};
}
// The two lowest bits of a 6-bit code: two words a row and lane.
BitPlace low_pair_place(int row, int column) {
  const IntegerColumn at(row, column);
  return {1024 + at.lane * 16 + row / 8 * 8 + at.step / 2 * 4 + at.i, (at.step % 2 * 2 + at.half) * 2};
}
int byte_place(int row, int column) {
  const IntegerColumn at(row, column);
  return (row / 8 * 2 + at.step / 2) * 512 + at.lane * 16 + (at.step % 2 * 2 + at.half) * 4 + at.i;
}
// 16-bit operands: column 16 step + 8 half + 2 t + i is element i of register `half` of k-step `step`.
int float8_place(int row, int column) {
  const int step = column / 16, half = column / 8 % 2, lane = row % 8 * 4 + column / 2 % 4, i = column % 2;
  return (row / 8 * 2 + step / 4) * 512 + lane * 16 + step % 4 * 4 + half * 2 + i;
}
int float16_place(int row, int column) {
  const int step = column / 16, half = column / 8 % 2, lane = row % 8 * 4 + column / 2 % 4, i = column % 2;
  return (row / 8 * 2 + step / 2) * 512 + lane * 16 + (step % 2 * 2 + half) * 4 + i * 2;
}

void put_bits(uint8_t* tile, BitPlace at, int bits) { tile[at.byte] |= static_cast<uint8_t>(bits << at.shift); }
int get_bits(const uint8_t* tile, BitPlace at, int mask) { return tile[at.byte] >> at.shift & mask; }

// codes must be zero before.
void write_codes(Packing kind, int row, const uint16_t* from, uint8_t* tile) {
  if (kind == Packing::kFloat16) {
    for (int c = 0; c < kHalfColumns; ++c) std::memcpy(tile + float16_place(row, c), from + c, 2);
    return;
  }
  for (int c = 0; c < kColumns; ++c) {
    const int code = from[c];
    switch (kind) {
      case Packing::kE2m1: put_bits(tile, e2m1_place(row, c), code); break;
      case Packing::kInt4: put_bits(tile, nibble_place(row, c), code); break;
      case Packing::kInt5:
        put_bits(tile, nibble_place(row, c), code >> 1);
        put_bits(tile, low_bit_place(row, c), code & 1);
        break;
      case Packing::kInt6:
        put_bits(tile, nibble_place(row, c), code >> 2);
        put_bits(tile, low_pair_place(row, c), code & 3);
        break;
      case Packing::kInt8: tile[byte_place(row, c)] = static_cast<uint8_t>(code); break;
      case Packing::kFloat8: tile[float8_place(row, c)] = static_cast<uint8_t>(code); break;
      case Packing::kFloat16: break;
    }
  }
}

void read_codes(Packing kind, int row, const uint8_t* tile, uint16_t* to) {
  if (kind == Packing::kFloat16) {
    for (int c = 0; c < kHalfColumns; ++c) std::memcpy(to + c, tile + float16_place(row, c), 2);
    return;
  }
  for (int c = 0; c < kColumns; ++c) {
    int code = 0;
    switch (kind) {
      case Packing::kE2m1: code = get_bits(tile, e2m1_place(row, c), 15); break;
      case Packing::kInt4: code = get_bits(tile, nibble_place(row, c), 15); break;
      case Packing::kInt5:
        code = get_bits(tile, nibble_place(row, c), 15) << 1 | get_bits(tile, low_bit_place(row, c), 1);
        break;
      case Packing::kInt6:
        code = get_bits(tile, nibble_place(row, c), 15) << 2 | get_bits(tile, low_pair_place(row, c), 3);
        break;
      case Packing::kInt8: code = tile[byte_place(row, c)]; break;
      case Packing::kFloat8: code = tile[float8_place(row, c)]; break;
      case Packing::kFloat16: break;
    }
    to[c] = static_cast<uint16_t>(code);
  }
}

void write_meta(Format format, int row, const uint8_t* from, uint8_t* meta) {
  const int first = meta_first_bytes(format), rest = meta_row_bytes(format) - first;
  if (first == 0) return;
  std::memcpy(meta + meta_index(format, row) * first, from, static_cast<size_t>(first));
  std::memcpy(meta + kTileRows * first + row * rest, from + first, static_cast<size_t>(rest));
}
void read_meta(Format format, int row, const uint8_t* meta, uint8_t* to) {
  const int first = meta_first_bytes(format), rest = meta_row_bytes(format) - first;
  if (first == 0) return;
  std::memcpy(to, meta + meta_index(format, row) * first, static_cast<size_t>(first));
  std::memcpy(to + first, meta + kTileRows * first + row * rest, static_cast<size_t>(rest));
}

// One row of a tile to f32, in the order of float operations that decode.h states.
void decode_tile_row(Format format, const TileRow& row, float row_scale, float* out) {
  auto f16_at = [&](int index) {
    return f16_to_f32(load<uint16_t>(reinterpret_cast<const std::byte*>(row.meta) + 2 * index));
  };
  auto bf16_at = [&](int index) {
    return bf16_to_f32(load<uint16_t>(reinterpret_cast<const std::byte*>(row.meta) + 2 * index));
  };
  auto sign_extend = [](int code, int bits) {
    return static_cast<float>((code ^ 1 << (bits - 1)) - (1 << (bits - 1)));
  };
  for (int c = 0; c < tile_shape(format).columns; ++c) {
    const int code = row.codes[c], group = c / 32;
    switch (format) {
      case Format::kFp4G128: out[c] = kE2m1Values[code] * bf16_at(0); break;
      case Format::kMxfp4: out[c] = mxfp4_half_scale(row.meta[group]) * static_cast<float>(kE2m1Doubled[code]); break;
      case Format::
          kNvfp4: {  // with bit 7 set, which means nothing, 0x7f is a number; on disk it is 0, and so it was packed
        const float half_scale = nvfp4_half_scale(static_cast<uint8_t>(row.meta[c / 16] | 0x80));
        out[c] = half_scale * static_cast<float>(kE2m1Doubled[code]);
        break;
      }
      case Format::kQ4_0: out[c] = f16_at(group) * sign_extend(code, 4); break;
      case Format::kQ5_0: out[c] = f16_at(group) * sign_extend(code, 5); break;
      case Format::kQ8_0: out[c] = sign_extend(code, 8) * f16_at(group); break;
      case Format::kQ4_1:
      case Format::kQ5_1: out[c] = f16_at(group) * static_cast<float>(code) + f16_at(4 + group); break;
      case Format::kQ4_K:
      case Format::kQ5_K: {
        const float scale = f16_at(4) * static_cast<float>(row.meta[group]);
        const float min = f16_at(5) * static_cast<float>(row.meta[4 + group]);
        out[c] = scale * static_cast<float>(code) - min;
        break;
      }
      case Format::kQ6_K: {
        const float scale = f16_at(4) * static_cast<float>(static_cast<int8_t>(row.meta[c / 16]));
        out[c] = scale * sign_extend(code, 6);
        break;
      }
      case Format::kFp8: out[c] = e4m3_to_f32(static_cast<uint8_t>(code)) * row_scale; break;
      case Format::kF16: out[c] = f16_to_f32(static_cast<uint16_t>(code)); break;
      case Format::kBf16: out[c] = bf16_to_f32(static_cast<uint16_t>(code)); break;
      default: BERYL_CHECK(false, "a format without tiles");
    }
  }
}

bool has_row_scales(const MatvecSource& source) {
  if (source.parts.front()->format == Format::kFp8) return true;
  return std::any_of(source.parts.begin(), source.parts.end(),
                     [](const HostMatrix* part) { return part->tensor_scale != 1; });
}

// Row of the source that row `r` of row tile `tile` holds; part null: padding.
struct SourceRow {
  const HostMatrix* part = nullptr;
  int64_t row = 0;
};
SourceRow source_row(const MatvecPlan& plan, const MatvecSource& source, int tile, int r) {
  if (plan.gated) {
    const int64_t row = int64_t{tile} * 8 + r % 8;
    return row < plan.rows / 2 ? SourceRow{source.parts[static_cast<size_t>(r / 8)], row} : SourceRow{};
  }
  int64_t row = int64_t{tile} * kTileRows + r;
  for (const HostMatrix* part : source.parts) {
    if (row < part->rows) return {part, row};
    row -= part->rows;
  }
  return {};
}

struct TilePlace {
  int stage = 0;
  int tile = 0;                     // within the stage
};
TilePlace tile_place(const MatvecPlan& plan, int column_tile, int row_tile_of_unit) {
  const StageWarp at = stage_of_column(plan.n_stages, plan.k_warps, column_tile);
  return {at.stage, at.k * plan.row_warps + row_tile_of_unit};
}

}  // namespace

bool matvec_supports(const HostMatrix& matrix) {
  return tile_shape(matrix.format).columns > 0 && matrix.stack == 1 && matrix.cols % 32 == 0 &&
         fits(matrix.format, matrix.cols) && matrix.rows < INT32_MAX / 2 && matrix.cols < INT32_MAX / 2;
}

MatvecPlan plan_matvec(const MatvecSource& source, int n_sms) {
  BERYL_CHECK(!source.parts.empty() && n_sms > 0, "a matvec needs a matrix and multiprocessors");
  MatvecPlan plan;
  plan.format = source.parts.front()->format;
  plan.gated = source.gated;
  plan.cols = source.parts.front()->cols;
  for (const HostMatrix* part : source.parts) {
    BERYL_CHECK(matvec_supports(*part) && part->format == plan.format && part->cols == plan.cols,
                "parts of a matvec have one format and width");
    plan.rows += part->rows;
  }
  BERYL_CHECK(!plan.gated || (source.parts.size() == 2 && source.parts[0]->rows == source.parts[1]->rows),
              "gate and up have as many rows");
  const TileShape tile = tile_shape(plan.format);
  plan.n_row_tiles = ceil_div(plan.gated ? plan.rows / 2 : plan.rows, plan.gated ? kTileRows / 2 : kTileRows);
  plan.n_column_tiles = ceil_div(plan.cols, tile.columns);
  // The time of the busiest block decides: a stage costs what its tiles take to arrive, and something on top; x is
  // prepared once, by each warp for its own columns.
  constexpr int64_t kStageCost = 5;           // tiles' worth
  constexpr int64_t kPrepareCost = 3;
  int64_t best = INT64_MAX;
  for (int row_warps = 1; row_warps <= kMatvecWarps; ++row_warps) {
    for (int k_warps = 1; k_warps * row_warps <= kMatvecWarps; ++k_warps) {
      // Half tiles come in pairs, so that a warp's columns are whole groups of x.
      const int64_t stages = tile.columns < kColumns ? round_up(ceil_div(plan.n_column_tiles, k_warps), 2) : ceil_div(plan.n_column_tiles, k_warps);
      const int64_t units = ceil_div(ceil_div(plan.n_row_tiles, row_warps), n_sms);
      const int64_t cost = units * stages * (k_warps * row_warps + kStageCost) + stages * kPrepareCost;
      if (cost < best) {
        best = cost;
        plan.row_warps = row_warps;
        plan.k_warps = k_warps;
        plan.n_stages = static_cast<int>(stages);
      }
    }
  }
  plan.n_units = ceil_div(plan.n_row_tiles, plan.row_warps);
  const int64_t tile_bytes = tile.code_bytes + tile.meta_bytes;
  plan.stage_bytes = static_cast<int>(round_up(plan.stage_tiles() * tile_bytes, kStageAlignment));
  plan.unit_bytes = int64_t{plan.n_stages} * plan.stage_bytes;
  plan.packed_bytes = plan.n_units * plan.unit_bytes;
  if (has_row_scales(source)) {
    plan.scales_offset = plan.packed_bytes;
    plan.packed_bytes += round_up(int64_t{plan.n_units} * plan.row_warps * kTileRows * 4, kStageAlignment);
  }
  return plan;
}

void pack_units(const MatvecPlan& plan, const MatvecSource& source, int unit_begin, int unit_end, std::byte* out) {
  const TileShape shape = tile_shape(plan.format);
  const Packing kind = packing(plan.format);
  std::memset(out, 0, static_cast<size_t>(unit_end - unit_begin) * static_cast<size_t>(plan.unit_bytes));
  TileRow values;
  for (int unit = unit_begin; unit < unit_end; ++unit, out += plan.unit_bytes) {
    for (int column_tile = 0; column_tile < plan.n_column_tiles; ++column_tile) {
      for (int t = 0; t < plan.row_warps; ++t) {
        const TilePlace place = tile_place(plan, column_tile, t);
        auto* stage = reinterpret_cast<uint8_t*>(out + int64_t{place.stage} * plan.stage_bytes);
        uint8_t* codes = stage + place.tile * shape.code_bytes;
        uint8_t* meta = stage + plan.stage_tiles() * shape.code_bytes + place.tile * shape.meta_bytes;
        for (int r = 0; r < kTileRows; ++r) {
          const SourceRow from = source_row(plan, source, unit * plan.row_warps + t, r);
          if (!from.part) continue;
          read_tile_row(*from.part, from.row, column_tile, values);
          write_codes(kind, r, values.codes, codes);
          write_meta(plan.format, r, values.meta, meta);
        }
      }
    }
  }
}

void pack_row_scales(const MatvecPlan& plan, const MatvecSource& source, float* out) {
  BERYL_CHECK(plan.scales_offset != 0, "row scales of a format that has none");
  const int n_tiles = plan.n_units * plan.row_warps;
  for (int tile = 0; tile < n_tiles; ++tile) {
    for (int r = 0; r < kTileRows; ++r) {
      const SourceRow from = source_row(plan, source, tile, r);
      float scale = 0;
      if (from.part) {
        scale = from.part->tensor_scale;
        if (plan.format == Format::kFp8) scale *= load<float>(from.part->row_scales(0, from.row));
      }
      out[tile * kTileRows + r] = scale;
    }
  }
}

void pack_matvec(const MatvecPlan& plan, const MatvecSource& source, std::byte* packed) {
  pack_units(plan, source, 0, plan.n_units, packed);
  if (plan.scales_offset == 0) return;
  std::vector<float> scales(static_cast<size_t>(plan.n_units * plan.row_warps * kTileRows));
  pack_row_scales(plan, source, scales.data());
  std::memset(packed + plan.scales_offset, 0, static_cast<size_t>(plan.packed_bytes - plan.scales_offset));
  std::memcpy(packed + plan.scales_offset, scales.data(), scales.size() * sizeof(float));
}

void unpack_row(const MatvecPlan& plan, const std::byte* packed, int64_t row, float* out) {
  const TileShape shape = tile_shape(plan.format);
  const Packing kind = packing(plan.format);
  const int64_t half = plan.rows / 2;
  const int tile = static_cast<int>(plan.gated ? row % half / 8 : row / kTileRows);
  const int r = static_cast<int>(plan.gated ? row % half % 8 + row / half * 8 : row % kTileRows);
  float row_scale = 1;
  if (plan.scales_offset != 0)
    row_scale = load<float>(packed + plan.scales_offset + (int64_t{tile} * kTileRows + r) * 4);
  const std::byte* unit = packed + tile / plan.row_warps * plan.unit_bytes;
  TileRow values;
  float decoded[kColumns];
  for (int column_tile = 0; column_tile < plan.n_column_tiles; ++column_tile) {
    const TilePlace place = tile_place(plan, column_tile, tile % plan.row_warps);
    auto* stage = reinterpret_cast<const uint8_t*>(unit + int64_t{place.stage} * plan.stage_bytes);
    read_codes(kind, r, stage + place.tile * shape.code_bytes, values.codes);
    read_meta(plan.format, r, stage + plan.stage_tiles() * shape.code_bytes + place.tile * shape.meta_bytes,
              values.meta);
    decode_tile_row(plan.format, values, row_scale, decoded);
    const int64_t first = int64_t{column_tile} * shape.columns;
    const int64_t n = std::min<int64_t>(shape.columns, plan.cols - first);
    for (int64_t c = 0; c < n; ++c)
      out[first + c] = plan.format == Format::kFp8 || row_scale == 1 ? decoded[c] : decoded[c] * row_scale;
  }
}

}  // namespace beryl::cuda
