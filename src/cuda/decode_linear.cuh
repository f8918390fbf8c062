// The linear phase of the decode kernel: y = epilogue(W · norm(x)) for 1 to 8 rows of x.
//
// Warp (k, r) multiplies two neighbouring column tiles of row tile r of each unit in each chunk (matvec_layout.h): so it
// needs 256 columns of x in a chunk, which it fetches, norms and cuts into digits (codec.cuh) by itself: no barrier but
// the one that a norm's sum before x needs. Its sums go to shared memory; after a batch of units the block adds the warps'
// sums in order and stores y. The factor of the norm multiplies the sums at the end, so x does not wait for it. Every sum
// has one order, whatever the number of rows, blocks, the batches and the speed of warps; there are no atomics.
//
// Nearly all of the time between two phases is executing instructions one after the other, so what runs once a phase is
// written for few of them in a row: no division, values of several rows (or chunks) side by side, the number of rows
// known to the compiler where it is 1 (kRows: 1, or up to 4 or 8).
#pragma once

#include "cuda/decode_block.cuh"

namespace beryl::cuda {

// Tensor-core tiles of 8 columns: 4 rows of x in two digits each.
constexpr int row_tiles(int rows) { return rows > 4 ? 2 : 1; }

__device__ __forceinline__ XForm x_form(Format format) {
  return format == Format::kBf16 ? XForm::kBf16 : format == Format::kF16 || format == Format::kFp8 ? XForm::kF16 : XForm::kInt16;
}
__device__ __forceinline__ int group_bytes(XForm form) { return form == XForm::kInt16 ? 256 : 512; }

// The x of one warp: digits of its groups (up to 2 a chunk) of each row, then sums of 32 columns, then scales. Of all
// chunks where args.x_bytes has room for them (of the phases without a residual), else of the one that is being multiplied.
struct WarpX {
  unsigned char* codes;             // [chunk][2][rows][bytes of a group]
  float* sums;                      // [chunk][2][rows][4]
  float* scales;                    // [chunk][2][rows]
  __device__ __forceinline__ WarpX(const DecodeBlock& block, int n_rows, int bytes_of_group, int n_chunks, int chunk) {
    const int groups = 2 * n_rows * n_chunks, first = 2 * n_rows * chunk;
    unsigned char* begin = block.scratch + block.warp * block.args.x_bytes;
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

// ---- products: all units of a batch in one chunk ----

template <class Codec, int kTiles>
__device__ __forceinline__ LaneX<kTiles> make_lane_x(const DecodeBlock& block, int n_rows, int x_chunks, int x_chunk) {
  constexpr int kGroupBytes = Codec::kX == XForm::kInt16 ? 256 : 512;
  const WarpX x(block, n_rows, kGroupBytes, x_chunks, x_chunk);
  const int codes_at = static_cast<int>(x.codes - block.ring), sums_at = static_cast<int>(reinterpret_cast<unsigned char*>(x.sums) - block.ring),
            scales_at = static_cast<int>(reinterpret_cast<unsigned char*>(x.scales) - block.ring);
  LaneX<kTiles> lane_x;
  const volatile uint32_t* tables = block.small->tables[0];
  lane_x.tables = {tables[block.lane], tables[32 + block.lane], tables[64 + block.lane]};
  lane_x.code_stride = n_rows * kGroupBytes;
  lane_x.scale_stride = n_rows * 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    // Rows that do not exist read the last one: their columns of d are not used.
    const int code_row = min(4 * n + block.lane / 8, n_rows - 1), scale_row = min(4 * n + block.lane % 4, n_rows - 1);
    lane_x.codes[n] = codes_at + code_row * kGroupBytes + block.lane % 8 * 16;
    lane_x.sums[n] = sums_at + scale_row * 16;
    lane_x.scales[n] = scales_at + scale_row * 4;
  }
  return lane_x;
}

template <int kTiles>
__device__ __forceinline__ void store_partials(float* to, const float (&acc)[kTiles][2], int n_rows, int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = 4 * n + lane % 4;
    if (row < n_rows) {
      to[row * kTileRows + lane / 4] = acc[n][0];
      to[row * kTileRows + lane / 4 + 8] = acc[n][1];
    }
  }
}

__device__ __forceinline__ int stages_of_slot(const DecodeArgs& args, const WeightStream& s) {
  return s.slot_stages == 2 && 2 * s.stage_bytes <= args.slot_bytes ? 2 : 1;
}

// What a phase's warps multiply in one go.
struct Multiply {
  int n_units;                      // all that are in the batch
  int first_chunk, n_chunks;        // one chunk after the other, each with all units
  int buffer;                       // of partial sums
};

// By one warp. args_at etc.: addresses of shared memory, from which all is computed anew (afresh).
template <class Codec, Format kFormat, int kRows>
__device__ __forceinline__ void multiply(uint32_t args_at, uint32_t shared_at, uint32_t phase_at, const Multiply& m) {
  constexpr TileShape kTile = tile_shape(kFormat);
  constexpr int kTiles = row_tiles(kRows);
  constexpr bool kPairs = slot_stages(kFormat) == 2;      // two tiles of a slot side by side
  static_assert(Codec::kXScale == codec_x_scale(kFormat) && Codec::kNeedsSums == needs_x_sums(kFormat));
  const DecodeArgs& args = *shared_object<const DecodeArgs>(args_at);
  unsigned char* shared = shared_object<unsigned char>(shared_at);
  const LinearPhase& p = *shared_object<const LinearPhase>(phase_at);
  const DecodeBlock block(args, shared);
  WarpPlace& place = block.small->places[block.warp];
  RingPlace ring = {place.slot, place.parity};
  const int lane = block.lane, n_rows = count_rows<kRows>(args), n_slots = args.n_slots, slot_bytes = args.slot_bytes, stage_bytes = p.stream.stage_bytes;
  const int slot_stages = stages_of_slot(args, p.stream), unit_floats = p.stream.unit_partials * n_rows;
  float* partials = reinterpret_cast<float*>(block.scratch + args.partials_at) + m.buffer * args.partial_floats + block.warp * n_rows * kTileRows;
  const unsigned char* const codes_at = shared + block.warp * kTile.code_bytes;
  const unsigned char* const meta_at = shared + p.tile_codes + block.warp * kTile.meta_bytes;
#pragma unroll 1
  for (int chunk = 0; chunk < m.n_chunks; ++chunk) {
    const int n_stages = min(p.stream.n_stages - (m.first_chunk + chunk) * kChunkStages, kChunkStages);
    const LaneX<kTiles> lane_x = make_lane_x<Codec, kTiles>(block, n_rows, m.n_chunks, chunk);
    float* to = partials + (m.first_chunk + chunk) * p.k_warps * p.row_warps * n_rows * kTileRows;
    if constexpr (kPairs) {
      static_assert(kChunkStages == 2);
      if (slot_stages == 2 && n_stages == 2) {
#pragma unroll 1
        for (int unit = 0; unit < m.n_units; ++unit, to += unit_floats) {
          const int at = ring.slot * slot_bytes;
          barrier_wait_suspended(&block.small->full[ring.slot], ring.parity);
          typename Codec::Loaded tiles[2];
#pragma unroll
          for (int s = 0; s < 2; ++s) Codec::load(tiles[s], codes_at + at + s * stage_bytes, meta_at + at + s * stage_bytes, lane);
          __syncwarp();
          if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
          ring.next(n_slots);
          typename Codec::template Product<kTiles> products[2];
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].start(tiles[s], shared, lane_x, s);
#pragma unroll
          for (int i = 0; i < Codec::kSteps; ++i)
#pragma unroll
            for (int s = 0; s < 2; ++s) products[s].step(tiles[s], i);
          float acc[kTiles][2] = {};
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].finish(tiles[s], acc);
          store_partials(to, acc, n_rows, lane);
        }
        continue;
      }
    }
#pragma unroll 1
    for (int unit = 0; unit < m.n_units; ++unit, to += unit_floats) {
      float acc[kTiles][2] = {};
#pragma unroll 1
      for (int stage = 0; stage < n_stages; ++stage) {
        const bool second = stage > 0 && slot_stages == 2, last = slot_stages != 2 || stage + 1 == n_stages;     // of its slot
        const int at = ring.slot * slot_bytes + (second ? stage_bytes : 0);
        if (!second) barrier_wait_suspended(&block.small->full[ring.slot], ring.parity);
        typename Codec::Loaded tile;
        Codec::load(tile, codes_at + at, meta_at + at, lane);
        if (last) {
          __syncwarp();
          if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
          ring.next(n_slots);
        }
        typename Codec::template Product<kTiles> product;
        product.start(tile, shared, lane_x, stage);
#pragma unroll
        for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
        product.finish(tile, acc);
      }
      store_partials(to, acc, n_rows, lane);
    }
  }
  if (lane == 0) place.slot = ring.slot, place.parity = ring.parity;
  __syncwarp();
}

template <int kRows>
__device__ __forceinline__ void multiply_format(Format format, const DecodeBlock& block, const LinearPhase& p, const Multiply& m) {
  const uint32_t args_at = shared_address(&block.small->args), shared_at = shared_address(block.ring), phase_at = shared_address(&p);
  switch (format) {
    case Format::kFp4G128: return multiply<Fp4G128, Format::kFp4G128, kRows>(args_at, shared_at, phase_at, m);
    case Format::kMxfp4: return multiply<Mxfp4, Format::kMxfp4, kRows>(args_at, shared_at, phase_at, m);
    case Format::kNvfp4: return multiply<Nvfp4, Format::kNvfp4, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_0: return multiply<GroupOf32<4, false>, Format::kQ4_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_1: return multiply<GroupOf32<4, true>, Format::kQ4_1, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_0: return multiply<GroupOf32<5, false>, Format::kQ5_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_1: return multiply<GroupOf32<5, true>, Format::kQ5_1, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ8_0: return multiply<GroupOf32<8, false>, Format::kQ8_0, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ4_K: return multiply<GroupOf32K<4>, Format::kQ4_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ5_K: return multiply<GroupOf32K<5>, Format::kQ5_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kQ6_K: return multiply<Q6K, Format::kQ6_K, kRows>(args_at, shared_at, phase_at, m);
    case Format::kFp8: return multiply<Fp8, Format::kFp8, kRows>(args_at, shared_at, phase_at, m);
    case Format::kF16: return multiply<Float16<false>, Format::kF16, kRows>(args_at, shared_at, phase_at, m);
    default: return multiply<Float16<true>, Format::kBf16, kRows>(args_at, shared_at, phase_at, m);
  }
}

// ---- x ----

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
  // All chunks of x at once: of rows that are neither normed nor the residual.
  __device__ __forceinline__ bool all_chunks() const {
    return !p.residual && !p.has_norm && p.n_chunks * x_chunk_bytes(n_rows, group_bytes(x_form(p.format))) <= block.args.x_bytes;
  }
  // Beyond the last row there is the last row once more: the same values go to the same places.
  __device__ __forceinline__ int row_at(int row) const { return kRows == 1 ? 0 : min(row, n_rows - 1); }
  __device__ __forceinline__ int lane_column(const ChunkColumns& columns, int i) const { return columns.first + i * 128 + block.lane * 4; }
  __device__ __forceinline__ bool is_live(const ChunkColumns& columns, int i) const {
    return kFull || (i < columns.n_groups && lane_column(columns, i) < p.cols);
  }

  __device__ __forceinline__ float* own_residual(int row, int col) const {
    return block.args.residual + (int64_t{block_index()} * kDecodeRows + row) * block.args.residual_cols + col;
  }
  // updated: the block's own copy, which exists once a phase has changed the residual or met its beginning.
  __device__ __forceinline__ float4 load_residual(int row, int col, bool updated) const {
    const float* from = p.residual_in != nullptr && !updated ? p.residual_in + row * int64_t{p.residual_stride} + col : own_residual(row, col);
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

  // Sums of squares of groups, to sums[row][group].
  template <int kLots>
  __device__ __forceinline__ void put_squares(float* sums, int row, const ChunkColumns& columns, const SideBySide<kLots>& x) const {
    float squares[2 * kLots];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) squares[2 * lot + i] = dot(x.v[lot][i], x.v[lot][i], 0.0f);
    const float sum = lane_sums<2 * kLots>(squares, block.lane);
    const int mine = block.lane * (2 * kLots) / 32, group = columns.first / 128 + mine % 2;
    if (writes && block.lane % (16 / kLots) == 0 && (kFull || (mine % 2 < columns.n_groups && columns.first + mine % 2 * 128 < p.cols)))
      sums[row_at(row + mine / 2) * block.args.sum_groups + group] = sum;
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

  // What an AddNorm adds to the residual: the values times its factor and weight.
  template <int kLots>
  __device__ __forceinline__ void add_values(SideBySide<kLots>& x, const float (&factor)[kLots], const float4 (&add_weight)[2],
                                             const SideBySide<kLots>& residual) const {
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 term = p.add_norm ? times(times(x.v[lot][i], factor[lot]), add_weight[i]) : x.v[lot][i];
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
        if (is_live(columns, i)) *reinterpret_cast<float4*>(own_residual(row_at(row + lot), lane_column(columns, i))) = x.v[lot][i];
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
  __device__ __forceinline__ float add_factor(int row) const {
    return p.add_norm ? norm_factor_of(block.add_sums + row * block.args.sum_groups, p.n_groups, p.inverse_cols, p.add_eps) : 1.0f;
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
        if (p.has_norm) put_squares(block.norm_sums, row, columns, x);
        if (p.residual) keep_residuals(row, columns, x);
      }
      apply_weight(weight, x);
      write_digits(row, 1, 0, true, x);
    }
    __syncwarp();
  }
  // x of all chunks (all_chunks).
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
    const float4 add_weight[2] = {load_vector(p.add_weight, columns, 0, 0), load_vector(p.add_weight, columns, 1, 0)};
    SideBySide<1> x, residual;
    load_residuals(0, columns, false, residual);
    load_lots(p.add, 0, 0, true, x);
    if (p.add_norm) put_squares(block.add_sums, 0, columns, x);
    block.barrier();
    const float factor[1] = {add_factor(0)};
    add_values(x, factor, add_weight, residual);
    keep_residuals(0, columns, x);
    if (p.has_norm) put_squares(block.norm_sums, 0, columns, x);
    apply_weight(weight, x);
    write_digits(0, 1, 0, true, x);
    __syncwarp();
  }
  // Likewise, all rows and chunks. Digits are those of the only chunk, or are prepared from the residual later.
  __device__ __forceinline__ void add_to_residual() const {
    const bool straight = direct();
    if (has_tile && p.add_norm) {
#pragma unroll 1
      for (int row = 0; row < n_rows; row += kSide) {
#pragma unroll 1
        for (int chunk = 0; chunk < p.n_chunks; ++chunk) {
          SideBySide<kSide> x;
          load_lots(p.add, row, chunk, true, x);
          put_squares(block.add_sums, row, ChunkColumns(p, chunk, k, kFull), x);
        }
      }
    }
    block.barrier();
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
        const float4 add_weight[2] = {load_vector(p.add_weight, columns, 0, 0), load_vector(p.add_weight, columns, 1, 0)};
        add_values(x, factor, add_weight, residual);
        keep_residuals(row, columns, x);
        if (p.has_norm) put_squares(block.norm_sums, row, columns, x);
        if (!straight) continue;
        const float* norm_weight = p.has_norm ? p.norm_weight : nullptr;
        const float4 weight[2] = {load_vector(norm_weight, columns, 0, 1), load_vector(norm_weight, columns, 1, 1)};
        apply_weight(weight, x);
        write_digits(row, 1, 0, true, x);
      }
    }
    __syncwarp();
  }
  // ---- y ----
  __device__ __forceinline__ float sum_of(const float* from) const {
    const int stride = p.row_warps * n_rows * kTileRows, k_warps = p.k_warps;
    float total = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < p.n_chunks; ++chunk) {
      // All loads before the first sum; adding -0 changes nothing.
      float parts[kMatvecWarps];
#pragma unroll
      for (int i = 0; i < kMatvecWarps; ++i) parts[i] = i < k_warps ? from[i * stride] : -0.0f;
      float sum = parts[0];
#pragma unroll
      for (int i = 1; i < kMatvecWarps; ++i) sum = __fadd_rn(sum, parts[i]);
      from += k_warps * stride;
      total = chunk == 0 ? sum : __fadd_rn(total, sum);
    }
    return total;
  }
  __device__ __forceinline__ void finish(int first_unit, int count, const float* partials) const {
    const int bits = p.gated ? 3 : 4;            // rows of a tile that are outputs: 8 or 16
    const int n_items = count * p.row_warps * n_rows << bits;
    float factor = 1.0f;
    int factor_row = -1;
#pragma unroll 1
    for (int item = block.thread; item < n_items; item += kDecodeConsumers) {
      const int out = item & ((1 << bits) - 1), rest = item >> bits;
      int tile = rest, row = 0, unit = rest, row_tile = 0;
      if (kRows > 1) {
        tile = static_cast<int>(static_cast<uint32_t>(rest) * block.args.rows_inverse >> 16);
        row = rest - tile * n_rows;
        unit = tile;
      }
      if (p.row_warps > 1) {
        unit = static_cast<int>(static_cast<uint32_t>(tile) * p.row_warps_inverse >> 16);
        row_tile = tile - unit * p.row_warps;
      }
      const int tile_index = first_unit * p.row_warps + tile;
      const int col = (tile_index << bits) + out;
      if (col >= p.outputs) continue;
      const float* from = partials + unit * p.stream.unit_partials * n_rows + (row_tile * n_rows + row) * kTileRows + out;
      if (p.has_norm && factor_row != row) {
        factor = norm_factor_of(block.norm_sums + row * block.args.sum_groups, p.n_groups, p.inverse_cols, p.norm_eps);
        factor_row = row;
      }
      const float* scales = p.row_scales != nullptr ? p.row_scales + tile_index * kTileRows + out : nullptr;
      float value = sum_of(from);
      if (p.has_norm) value = __fmul_rn(value, factor);
      if (scales != nullptr) value = __fmul_rn(value, scales[0]);
      if (p.gated) {
        float up = sum_of(from + 8);
        if (p.has_norm) up = __fmul_rn(up, factor);
        if (scales != nullptr) up = __fmul_rn(up, scales[8]);
        value = __fmul_rn(p.epilogue == DecodeEpilogue::kGatedGelu ? quick_gelu_tanh(value) : quick_silu(value), up);
      } else if (p.epilogue != DecodeEpilogue::kStore) {
        switch (p.epilogue) {
          case DecodeEpilogue::kGeluTimesOther: value = quick_gelu_tanh(value) * load_row(p.other, row, col, block.flag(row)); break;
          case DecodeEpilogue::kTimesGeluOther: value *= quick_gelu_tanh(load_row(p.other, row, col, block.flag(row))); break;
          case DecodeEpilogue::kTimesSiluOther: value *= quick_silu(load_row(p.other, row, col, block.flag(row))); break;
          case DecodeEpilogue::kSoftcap: value = p.softcap * tanhf(__fdividef(value, p.softcap)); break;
          default: break;
        }
      }
      store_row(p.y, row, col, value, block.flag(row));
    }
  }
};

// What a phase is for this block and launch.
struct LinearShare {
  int first, n_units;
  int batch;                        // units whose partial sums fit at once
};
__device__ __forceinline__ LinearShare linear_share(const DecodeArgs& args, const WeightStream& s) {
  int block = block_index() + s.rotation;
  if (block >= static_cast<int>(gridDim.x)) block -= static_cast<int>(gridDim.x);
  const BlockUnits units = block_units(s.units_each, s.units_more, block);
  // The division is for matrices with very many rows, as the head's.
  const int batch = units.count * s.unit_partials <= args.partial_row_floats ? units.count : args.partial_row_floats / s.unit_partials;
  return {units.first, units.count, max(batch, 1)};
}

// Everything of one phase but the copies. before_barrier(): what the caller wants visible to all warps afterwards. stamp(i): takes
// the time, 1 when (the first) x is ready, 2 when the products are.
template <int kRows, class Function, class Stamp>
__device__ __forceinline__ void run_linear(const DecodeArgs& args, unsigned char* shared, LinearPhase* phase, Function&& before_barrier,
                                           Stamp&& stamp) {
  // Each step with its own view of the block and the phase.
  const auto step = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    function(LinearBlock<kRows, false>(block, *afresh(phase)));
  };
  const auto x_step = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    const LinearPhase& p = *afresh(phase);
    if (p.full) function(LinearBlock<kRows, true>(block, p));
    else function(LinearBlock<kRows, false>(block, p));
  };
  bool adds, direct = false, all = false;
  LinearShare share;
  int n_chunks, buffer;
  {
    const DecodeBlock block(args, afresh(shared));
    const LinearBlock<kRows, false> work(block, *afresh(phase));
    share = linear_share(args, work.p.stream);
    n_chunks = work.p.n_chunks;
    adds = work.p.residual && work.p.add.values != nullptr;
    direct = adds && work.direct();
    all = n_chunks > 1 && work.all_chunks();
    buffer = block.small->places[block.warp].buffer;
  }
  if (adds) {
    x_step([](const auto& work) {
      if (kRows == 1 && work.p.n_chunks == 1) work.add_to_residual_row();
      else work.add_to_residual();
    });
    if (!direct) DecodeBlock::barrier();           // prepare() reads it back, in other warps too
  }
  if (all) x_step([](const auto& work) { work.prepare_all(); });
  // The residual is everybody's, so x is prepared even where there are no units.
#pragma unroll 1
  for (int unit = 0; unit == 0 || unit < share.n_units; unit += share.batch) {
    const int count = min(share.batch, share.n_units - unit);
    const int at_once = all ? n_chunks : 1;
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk += at_once) {
      if (!all && !(direct && unit == 0) && (unit == 0 || n_chunks > 1))
        x_step([&](const auto& work) { work.prepare(chunk, adds || unit > 0); });
      if (unit == 0 && chunk == 0) stamp(1);
      step([&](const LinearBlock<kRows, false>& work) {
        const LinearPhase& p = work.p;
        if (work.has_tile) {
          multiply_format<kRows>(p.format, work.block, p, {count, chunk, at_once, buffer});
          return;
        }
        const int n_stages = p.stream.n_stages - chunk * kChunkStages, stages_a_slot = stages_of_slot(args, p.stream);
        // A warp without a tile passes over the slots, in step with the others: each slot waits for all warps.
        const int stages = min(n_stages, at_once * kChunkStages), slots = stages_a_slot == 2 ? (stages + 1) / 2 : stages;
        WarpPlace& place = work.block.small->places[work.block.warp];
        RingPlace ring = {place.slot, place.parity};
        for (int i = 0; i < count * slots; ++i) {
          barrier_wait_suspended(&work.block.small->full[ring.slot], ring.parity);
          __syncwarp();
          if (work.block.lane == 0) barrier_arrive(&work.block.small->empty[ring.slot]);
          ring.next(args.n_slots);
        }
        __syncwarp();
        if (work.block.lane == 0) place.slot = ring.slot, place.parity = ring.parity;
        __syncwarp();
      });
    }
    if (unit + share.batch >= share.n_units) before_barrier();
    DecodeBlock::barrier();
    stamp(2);
    step([&](const LinearBlock<kRows, false>& work) {
      work.finish(share.first + unit, count, reinterpret_cast<float*>(work.block.scratch + args.partials_at) + buffer * args.partial_floats);
    });
    buffer ^= 1;
  }
  const DecodeBlock block(args, afresh(shared));
  if (block.lane == 0) block.small->places[block.warp].buffer = buffer;
}

}  // namespace beryl::cuda
