// The x of a linear phase of the decode kernel: from other blocks' rows to digits in shared memory.
//
// Warp (k, r) multiplies two neighbouring column tiles of row tile r of each unit in each chunk (matvec_layout.h): so it
// needs 256 columns of x in a chunk, which it fetches, norms and cuts into digits (codec.cuh) by itself. Nobody waits for a norm:
// the factor of the norm multiplies the sums at the end, and what an AddNorm adds comes with the sums of squares of its tiles. Every
// sum has one order, whatever the number of rows, blocks, the batches and the speed of warps; there are no atomics.
//
// Nearly all of the time between two phases is executing instructions one after the other, so what runs once a phase is
// written for few of them in a row: no division, values of several rows (or chunks) side by side, the number of rows
// known to the compiler where it is 1 (kRows: 1, or up to 4 or 8). The usual case has a path of its own: decode_short.cuh. How long
// the last block takes from its last value to its first product is what everybody waits for (docs/performance.md).
#pragma once

#include "cuda/decode_block.cuh"

namespace beryl::cuda {

// Tensor-core tiles of 8 columns: 4 rows of x in two digits each.
constexpr int row_tiles(int rows) { return rows > 4 ? 2 : 1; }

__device__ __forceinline__ XForm x_form(Format format) {
  return format == Format::kBf16 ? XForm::kBf16 : format == Format::kF16 || format == Format::kFp8 ? XForm::kF16 : XForm::kInt16;
}
__device__ __forceinline__ int group_bytes(XForm form) { return x_group_bytes(form == XForm::kInt16 ? 0 : 1); }

// The x of one warp: digits of its groups (up to 2 a chunk) of each row, then sums of 32 columns, then scales. Of all
// chunks where LinearCut::x_bytes has room for them (of the phases without a residual), else of the one that is being multiplied.
struct WarpX {
  unsigned char* codes;             // [chunk][2][rows][bytes of a group]
  float* sums;                      // [chunk][2][rows][4]
  float* scales;                    // [chunk][2][rows]
  __device__ __forceinline__ WarpX(const DecodeBlock& block, int n_rows, int bytes_of_group, int n_chunks, int chunk) {
    const int groups = 2 * n_rows * n_chunks, first = 2 * n_rows * chunk;
    unsigned char* begin = block.scratch + block.warp * block.args.cuts[bytes_of_group == x_group_bytes(0) ? 0 : 1].x_bytes;
    codes = begin + first * bytes_of_group;
    sums = reinterpret_cast<float*>(begin + groups * bytes_of_group) + first * 4;
    scales = reinterpret_cast<float*>(begin + groups * (bytes_of_group + 16)) + first;
  }
};

// A warp's columns in a chunk.
struct ChunkColumns {
  int first;                        // column
  int n_groups;                     // of 128 columns: 1 or 2
  __device__ __forceinline__ ChunkColumns(const LinearPhase& p, int chunk, int k, bool full) {
    if (full) {
      first = (chunk * p.k_warps + k) * 256;
      n_groups = 2;
      return;
    }
    const int stage = chunk * kChunkStages, n_stages = min(p.stream.n_stages - stage, kChunkStages);
    first = column_tile_of(p.stream.n_stages, p.k_warps, stage, k) * p.tile_columns;
    n_groups = n_stages * p.tile_columns / 128;
  }
};

// ---- x ----

__device__ __forceinline__ float sum_of_four(float4 v) { return __fadd_rn(__fadd_rn(v.x, v.y), __fadd_rn(v.z, v.w)); }

// Sums over a warp's lanes, each with the bits of lane_sum(value[i]): while halves of the lanes still have the same work they
// share it. A lane gets the sum of value (lane * kValues / 32).
template <int kValues>
__device__ __forceinline__ float lane_sums(float (&value)[kValues], int lane) {
  int offset = 16;
#pragma unroll
  for (int n = kValues / 2; n > 0; n /= 2, offset /= 2)
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const bool upper = (lane & offset) != 0;
      const float keep = upper ? value[i + n] : value[i], give = upper ? value[i] : value[i + n];
      value[i] = keep + __shfl_xor_sync(kAllLanes, give, offset);
    }
  float sum = value[0];
#pragma unroll
  for (int rest = 16 / kValues; rest > 0; rest /= 2) sum += __shfl_xor_sync(kAllLanes, sum, rest);
  return sum;
}

// kSide lots of 256 columns side by side: of neighbouring rows, or of neighbouring chunks of one row.
template <int kSide>
struct SideBySide {
  float4 v[kSide][2];
};

// kFull: as LinearPhase::full.
template <int kRows, bool kFull>
struct LinearBlock {
  static constexpr int kSide = kRows == 1 ? 1 : 4;
  const DecodeBlock& block;
  const LinearPhase& p;
  int k, r, n_rows;
  bool has_tile, writes;            // writes: the one of the row warps that stores what all of them compute

  __device__ __forceinline__ LinearBlock(const DecodeBlock& b, const LinearPhase& phase) : block(b), p(phase), n_rows(count_rows<kRows>(b.args)) {
    k = kFull ? b.warp : static_cast<int>(static_cast<uint32_t>(b.warp) * phase.row_warps_inverse >> 16);
    r = kFull ? 0 : b.warp - k * phase.row_warps;
    has_tile = k < phase.k_warps;
    writes = has_tile && r == 0;
  }

  // Digits straight from what add_to_residual computes: only where no other warp writes the residual that this one reads.
  __device__ __forceinline__ bool direct() const { return p.n_chunks == 1 && (p.row_warps == 1 || n_rows == 1); }
  // Beyond the last row there is the last row once more: the same values go to the same places.
  __device__ __forceinline__ int row_at(int row) const { return kRows == 1 ? 0 : min(row, n_rows - 1); }
  __device__ __forceinline__ int lane_column(const ChunkColumns& columns, int i) const { return columns.first + i * 128 + block.lane * 4; }
  __device__ __forceinline__ bool is_live(const ChunkColumns& columns, int i) const {
    return kFull || (i < columns.n_groups && lane_column(columns, i) < p.cols);
  }

  // updated: the block's own copy, which exists once a phase has changed the residual or met its beginning.
  __device__ __forceinline__ float4 load_residual(int row, int col, bool updated) const {
    const float* from = p.residual_in != nullptr && !updated ? p.residual_in + row * int64_t{p.residual_stride} + col : block.residual(row, col);
    return *reinterpret_cast<const float4*>(from);
  }
  __device__ __forceinline__ float4 load_vector(const float* vector, const ChunkColumns& columns, int i, float nothing) const {
    return is_live(columns, i) ? load_weight4(vector, lane_column(columns, i)) : make_float4(nothing, nothing, nothing, nothing);
  }

  // Rows row, row + 1, ... of one chunk, or (rows_apart false) row `row` of chunks chunk, chunk + 1, ...; zeros where the matrix
  // has no column. Exchange rows are awaited by one word of the last lot, then all is loaded, until all of it is there.
  template <int kLots>
  __device__ __forceinline__ void load_lots(const PhaseRows& rows, int row, int chunk, bool rows_apart, SideBySide<kLots>& x) const {
    const float* from[kLots][2];
    bool live[kLots][2];
    uint32_t flag[kLots];
    const uint32_t flags = block.small->flags;
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot) {
      const int lot_row = rows_apart ? row_at(row + lot) : row;
      const ChunkColumns columns(p, rows_apart ? chunk : min(chunk + lot, p.n_chunks - 1), k, kFull);
      const float* begin = rows.values + lot_row * int64_t{rows.stride};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        live[lot][i] = is_live(columns, i);
        // Lanes without a column read the chunk's first one, or the row's.
        from[lot][i] = begin + (live[lot][i] ? lane_column(columns, i) : columns.first < p.cols ? columns.first : 0);
      }
      flag[lot] = flags >> lot_row & 1u;
    }
    if (rows.exchange) {
      {
        const ChunkColumns columns(p, rows_apart ? chunk : min(chunk + kLots - 1, p.n_chunks - 1), k, kFull);
        const int end = kFull ? columns.first + 256 : min(columns.first + columns.n_groups * 128, p.cols);
        const float* begin = rows.values + (rows_apart ? row_at(row + kLots - 1) : row) * int64_t{rows.stride};
        await_word(begin + (kFull || columns.first < p.cols ? end - 1 : 0), flag[kLots - 1]);
      }
      for (uint32_t polls = 0;;) {
        uint4 bits[kLots][2];
#pragma unroll
        for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
          for (int i = 0; i < 2; ++i) bits[lot][i] = load_common_words(from[lot][i]);
        uint32_t wrong = 0;
#pragma unroll
        for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 b = bits[lot][i];
            wrong |= (b.x ^ flag[lot]) | (b.y ^ flag[lot]) | (b.z ^ flag[lot]) | (b.w ^ flag[lot]);
            x.v[lot][i] = make_float4(without_flag(b.x), without_flag(b.y), without_flag(b.z), without_flag(b.w));
          }
        if ((wrong & 1u) == 0) break;
        count_poll(polls);
      }
    } else {
#pragma unroll
      for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
        for (int i = 0; i < 2; ++i) x.v[lot][i] = __ldcg(reinterpret_cast<const float4*>(from[lot][i]));
    }
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (!live[lot][i]) x.v[lot][i] = make_float4(0, 0, 0, 0);
  }

  // Sums of squares of groups, for the factor of the norm.
  template <int kLots>
  __device__ __forceinline__ void put_squares(int row, const ChunkColumns& columns, const SideBySide<kLots>& x) const {
    float squares[2 * kLots];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) squares[2 * lot + i] = dot(x.v[lot][i], x.v[lot][i], 0.0f);
    const float sum = lane_sums<2 * kLots>(squares, block.lane);
    const int mine = block.lane * (2 * kLots) / 32, group = columns.first / 128 + mine % 2;
    if (writes && block.lane % (16 / kLots) == 0 && (kFull || (mine % 2 < columns.n_groups && columns.first + mine % 2 * 128 < p.cols)))
      block.norm_sums()[row_at(row + mine / 2) * block.args.sum_groups + group] = sum;
  }
  // x_chunks, x_chunk: where it lies (WarpX).
  template <int kLots>
  __device__ __forceinline__ void write_digits(int row, int x_chunks, int x_chunk, bool rows_apart, const SideBySide<kLots>& x) const {
    const XForm form = x_form(p.format);
    const int bytes = group_bytes(form);
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot) {
      if (!rows_apart && x_chunk + lot >= x_chunks) break;
      const WarpX to(block, n_rows, bytes, x_chunks, rows_apart ? x_chunk : x_chunk + lot);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int index = i * n_rows + (rows_apart ? row_at(row + lot) : row);
        write_group(form, needs_x_sums(p.format), p.x_scale, x.v[lot][i], block.lane, to.codes + index * bytes, to.scales + index,
                    to.sums + index * 4);
      }
    }
  }

  // What an AddNorm adds to the residual: the values times its factor.
  template <int kLots>
  __device__ __forceinline__ void add_values(SideBySide<kLots>& x, const float (&factor)[kLots], const SideBySide<kLots>& residual) const {
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 term = p.add_norm ? times(x.v[lot][i], factor[lot]) : x.v[lot][i];
        x.v[lot][i] = times(plus(residual.v[lot][i], term), p.add_scale);
      }
  }
  template <int kLots>
  __device__ __forceinline__ void keep_residuals(int row, const ChunkColumns& columns, const SideBySide<kLots>& x) const {
    if (!writes || (p.add.values == nullptr && p.residual_in == nullptr)) return;
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (is_live(columns, i)) *reinterpret_cast<float4*>(block.residual(row_at(row + lot), lane_column(columns, i))) = x.v[lot][i];
  }
  template <int kLots>
  __device__ __forceinline__ void load_residuals(int row, const ChunkColumns& columns, bool updated, SideBySide<kLots>& x) const {
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        x.v[lot][i] = is_live(columns, i) ? load_residual(row_at(row + lot), lane_column(columns, i), updated) : make_float4(0, 0, 0, 0);
  }
  template <int kLots>
  __device__ __forceinline__ void apply_weight(const float4 (&weight)[2], SideBySide<kLots>& x) const {
    if (!p.has_norm) return;
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) x.v[lot][i] = times(x.v[lot][i], weight[i]);
  }
  // Of the norm of what is added: the sums of squares of its tiles come from those who made them.
  __device__ __forceinline__ float add_factor(int row) const {
    if (!p.add_norm) return 1.0f;
    const float* squares = p.add_squares + row * int64_t{p.add.stride};
    const int n_tiles = (p.cols + kTileRows - 1) / kTileRows;
    const uint32_t flag = block.flag(row);
    float sum = 0;
#pragma unroll 1
    for (int first = block.lane * 4; first < n_tiles; first += 128) {
      float4 four;
      four.x = load_exchange(squares + first, flag);
      four.y = first + 1 < n_tiles ? load_exchange(squares + first + 1, flag) : 0.0f;
      four.z = first + 2 < n_tiles ? load_exchange(squares + first + 2, flag) : 0.0f;
      four.w = first + 3 < n_tiles ? load_exchange(squares + first + 3, flag) : 0.0f;
      sum = __fadd_rn(sum, sum_of_four(four));
    }
    __syncwarp();
    return rsqrtf(__fmaf_rn(lane_sum(sum), p.inverse_cols, p.add_eps));
  }

  // x of one chunk, when a phase first meets it, or once more for another batch of units (again).
  __device__ __forceinline__ void prepare(int chunk, bool again) const {
    if (!has_tile) return;
    const ChunkColumns columns(p, chunk, k, kFull);
    float4 weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = load_vector(p.has_norm ? p.norm_weight : nullptr, columns, i, 1);
    __syncwarp();                  // nobody reads the last chunk any more
#pragma unroll 1
    for (int row = 0; row < n_rows; row += kSide) {
      SideBySide<kSide> x;
      if (p.residual) load_residuals(row, columns, again, x);
      else load_lots(p.x, row, chunk, true, x);
      if (!again) {
        if (p.has_norm) put_squares(row, columns, x);
        if (p.residual) keep_residuals(row, columns, x);
      }
      apply_weight(weight, x);
      write_digits(row, 1, 0, true, x);
    }
    __syncwarp();
  }
  // x of all chunks (LinearStart::x_all_bytes).
  __device__ __forceinline__ void prepare_all() const {
    if (!has_tile) return;
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < n_rows; ++row)
#pragma unroll 1
      for (int chunk = 0; chunk < p.n_chunks; chunk += 4) {
        SideBySide<4> x;
        load_lots(p.x, row, chunk, false, x);
        write_digits(row, p.n_chunks, chunk, false, x);
      }
    __syncwarp();
  }

  // One row of one chunk, which an AddNorm changes: all but its values is loaded before they are there.
  __device__ __forceinline__ void add_to_residual_row() const {
    if (!has_tile) {
      block.barrier();
      return;
    }
    const ChunkColumns columns(p, 0, k, kFull);
    const float* norm_weight = p.has_norm ? p.norm_weight : nullptr;
    const float4 weight[2] = {load_vector(norm_weight, columns, 0, 1), load_vector(norm_weight, columns, 1, 1)};
    SideBySide<1> x, residual;
    load_residuals(0, columns, false, residual);
    load_lots(p.add, 0, 0, true, x);
    const float factor[1] = {add_factor(0)};
    block.barrier();               // all warps have the residual that one of them changes
    add_values(x, factor, residual);
    keep_residuals(0, columns, x);
    if (p.has_norm) put_squares(0, columns, x);
    apply_weight(weight, x);
    write_digits(0, 1, 0, true, x);
    __syncwarp();
  }
  // Likewise, all rows and chunks. Digits are those of the only chunk, or are prepared from the residual later.
  __device__ __forceinline__ void add_to_residual() const {
    const bool straight = direct();
    if (!has_tile) return;
#pragma unroll 1
    for (int row = 0; row < n_rows; row += kSide) {
      float factor[kSide];
#pragma unroll
      for (int lot = 0; lot < kSide; ++lot) factor[lot] = add_factor(row_at(row + lot));
#pragma unroll 1
      for (int chunk = 0; chunk < p.n_chunks; ++chunk) {
        const ChunkColumns columns(p, chunk, k, kFull);
        SideBySide<kSide> x, residual;
        load_residuals(row, columns, false, residual);
        load_lots(p.add, row, chunk, true, x);
        add_values(x, factor, residual);
        keep_residuals(row, columns, x);
        if (p.has_norm) put_squares(row, columns, x);
        if (!straight) continue;
        const float* norm_weight = p.has_norm ? p.norm_weight : nullptr;
        const float4 weight[2] = {load_vector(norm_weight, columns, 0, 1), load_vector(norm_weight, columns, 1, 1)};
        apply_weight(weight, x);
        write_digits(row, 1, 0, true, x);
      }
    }
    __syncwarp();
  }
};

}  // namespace beryl::cuda
