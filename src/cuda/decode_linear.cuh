// The linear phase of the decode kernel: y = epilogue(W · norm(x)) for 1 to 8 rows of x.
//
// Warp (k, r) multiplies two neighbouring column tiles of row tile r of each unit in each chunk (matvec_layout.h): so it
// needs 256 columns of x in a chunk, which it fetches, norms and cuts into digits (codec.cuh) by itself: no barrier but
// the one that a norm's sum before x needs. Its sums go to shared memory; after a batch of units the block adds the warps'
// sums in order and stores y. The factor of the norm multiplies the sums at the end, so x does not wait for it. Every sum
// has one order, whatever the number of rows, blocks, the batches and the speed of warps; there are no atomics.
#pragma once

#include "cuda/decode_block.cuh"

namespace beryl::cuda {

__device__ __forceinline__ XForm x_form(Format format) {
  return format == Format::kBf16 ? XForm::kBf16 : format == Format::kF16 || format == Format::kFp8 ? XForm::kF16 : XForm::kInt16;
}
__device__ __forceinline__ int group_bytes(XForm form) { return form == XForm::kInt16 ? 256 : 512; }

// The x of one warp: digits of its groups (up to 2) of each row, then sums of 32 columns, then scales.
struct WarpX {
  unsigned char* codes;
  float* sums;                      // [2 · rows][4]
  float* scales;                    // [2 · rows]
  __device__ __forceinline__ WarpX(const DecodeBlock& block, int n_rows, int bytes_of_group) {
    codes = block.scratch + block.warp * block.args.x_bytes;
    sums = reinterpret_cast<float*>(codes + 2 * n_rows * bytes_of_group);
    scales = sums + 8 * n_rows;
  }
};

// A warp's columns in a chunk.
struct ChunkColumns {
  int first;                        // column
  int n_groups;                     // of 128 columns: 1 or 2
  int n_stages;
  __device__ __forceinline__ ChunkColumns(const LinearPhase& p, int chunk, int k) {
    const int tile_columns = p.format == Format::kF16 || p.format == Format::kBf16 ? 64 : 128;
    const int stage = chunk * kChunkStages;
    n_stages = min(p.stream.n_stages - stage, kChunkStages);
    first = column_tile_of(p.stream.n_stages, p.k_warps, stage, k) * tile_columns;
    n_groups = n_stages * tile_columns / 128;
  }
};

// ---- products: all units of a batch in one chunk ----

template <class Codec, int kTiles>
__device__ __forceinline__ LaneX<kTiles> make_lane_x(const DecodeBlock& block, int n_rows) {
  constexpr int kGroupBytes = Codec::kX == XForm::kInt16 ? 256 : 512;
  const WarpX x(block, n_rows, kGroupBytes);
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

// Where a phase's warps read and write; the same for all codecs.
struct Multiply {
  int n_units;
  int n_stages;                     // of the chunk
  int slot_stages;
  int stage_bytes;
  int tile_codes;
  int unit_floats;                  // from unit to unit of the partial sums
  float* partials;                  // of this warp's first unit
};

template <class Codec, Format kFormat, int kTiles>
__device__ __forceinline__ RingPlace multiply(const DecodeArgs& args, unsigned char* whole, const Multiply& m, RingPlace ring) {
  constexpr TileShape kTile = tile_shape(kFormat);
  constexpr bool kPairs = slot_stages(kFormat) == 2;      // two tiles of a slot side by side
  static_assert(Codec::kXScale == codec_x_scale(kFormat) && Codec::kNeedsSums == needs_x_sums(kFormat));
  unsigned char* shared = afresh(whole);
  const DecodeBlock block(args, shared);
  const int lane = block.lane, n_rows = args.n_rows;
  const LaneX<kTiles> lane_x = make_lane_x<Codec, kTiles>(block, n_rows);
  const unsigned char* const codes_at = shared + block.warp * kTile.code_bytes;
  const unsigned char* const meta_at = shared + m.tile_codes + block.warp * kTile.meta_bytes;
  float* to = m.partials;
#pragma unroll 1
  for (int unit = 0; unit < m.n_units; ++unit, to += m.unit_floats) {
    float acc[kTiles][2] = {};
#pragma unroll 1
    for (int stage = 0; stage < m.n_stages; stage += m.slot_stages) {
      const int at = ring.slot * args.slot_bytes;
      barrier_wait(&block.small->full[ring.slot], ring.parity);
      if (kPairs && m.slot_stages == 2 && stage + 2 <= m.n_stages) {
        typename Codec::Loaded tiles[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) Codec::load(tiles[s], codes_at + at + s * m.stage_bytes, meta_at + at + s * m.stage_bytes, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
        ring.next(args.n_slots);
        typename Codec::template Product<kTiles> products[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) products[s].start(tiles[s], shared, lane_x, stage + s);
#pragma unroll
        for (int i = 0; i < Codec::kSteps; ++i)
#pragma unroll
          for (int s = 0; s < 2; ++s) products[s].step(tiles[s], i);
#pragma unroll
        for (int s = 0; s < 2; ++s) products[s].finish(tiles[s], acc);
        continue;
      }
      const int n = kPairs ? min(m.slot_stages, m.n_stages - stage) : 1;
#pragma unroll 1
      for (int s = 0; s < n; ++s) {
        typename Codec::Loaded tile;
        Codec::load(tile, codes_at + at + s * m.stage_bytes, meta_at + at + s * m.stage_bytes, lane);
        if (s + 1 == n) {
          __syncwarp();
          if (lane == 0) barrier_arrive(&block.small->empty[ring.slot]);
        }
        typename Codec::template Product<kTiles> product;
        product.start(tile, shared, lane_x, stage + s);
#pragma unroll
        for (int i = 0; i < Codec::kSteps; ++i) product.step(tile, i);
        product.finish(tile, acc);
      }
      ring.next(args.n_slots);
    }
    store_partials(to, acc, n_rows, lane);
  }
  return ring;
}

template <int kTiles>
__device__ __forceinline__ RingPlace multiply_format(Format format, const DecodeArgs& args, unsigned char* shared, const Multiply& m,
                                                     RingPlace ring) {
  switch (format) {
    case Format::kFp4G128: return multiply<Fp4G128, Format::kFp4G128, kTiles>(args, shared, m, ring);
    case Format::kMxfp4: return multiply<Mxfp4, Format::kMxfp4, kTiles>(args, shared, m, ring);
    case Format::kNvfp4: return multiply<Nvfp4, Format::kNvfp4, kTiles>(args, shared, m, ring);
    case Format::kQ4_0: return multiply<GroupOf32<4, false>, Format::kQ4_0, kTiles>(args, shared, m, ring);
    case Format::kQ4_1: return multiply<GroupOf32<4, true>, Format::kQ4_1, kTiles>(args, shared, m, ring);
    case Format::kQ5_0: return multiply<GroupOf32<5, false>, Format::kQ5_0, kTiles>(args, shared, m, ring);
    case Format::kQ5_1: return multiply<GroupOf32<5, true>, Format::kQ5_1, kTiles>(args, shared, m, ring);
    case Format::kQ8_0: return multiply<GroupOf32<8, false>, Format::kQ8_0, kTiles>(args, shared, m, ring);
    case Format::kQ4_K: return multiply<GroupOf32K<4>, Format::kQ4_K, kTiles>(args, shared, m, ring);
    case Format::kQ5_K: return multiply<GroupOf32K<5>, Format::kQ5_K, kTiles>(args, shared, m, ring);
    case Format::kQ6_K: return multiply<Q6K, Format::kQ6_K, kTiles>(args, shared, m, ring);
    case Format::kFp8: return multiply<Fp8, Format::kFp8, kTiles>(args, shared, m, ring);
    case Format::kF16: return multiply<Float16<false>, Format::kF16, kTiles>(args, shared, m, ring);
    default: return multiply<Float16<true>, Format::kBf16, kTiles>(args, shared, m, ring);
  }
}

// ---- x ----

struct LinearBlock {
  const DecodeBlock& block;
  const LinearPhase& p;
  int k, r, n_rows, n_groups;       // n_groups: of 128 columns, of a whole row
  bool has_tile, writes;            // writes: the one of the row warps that stores what all of them compute
  float inverse_cols;

  __device__ __forceinline__ LinearBlock(const DecodeBlock& b, const LinearPhase& phase)
      : block(b), p(phase), k(b.warp / phase.row_warps), r(b.warp % phase.row_warps), n_rows(b.args.n_rows),
        n_groups((phase.cols + 127) / 128), has_tile(b.warp < phase.k_warps * phase.row_warps), writes(has_tile && r == 0),
        inverse_cols(1.0f / static_cast<float>(phase.cols)) {}

  // Digits straight from what add_to_residual computes: only where no other warp writes the residual that this one reads.
  __device__ __forceinline__ bool direct() const { return p.n_chunks == 1 && (p.row_warps == 1 || n_rows == 1); }
  __device__ __forceinline__ float* own_residual(int row, int col) const {
    return block.args.residual + (int64_t{blockIdx.x} * kDecodeRows + row) * block.args.residual_cols + col;
  }
  __device__ __forceinline__ float4 load_residual(int row, int col, bool updated) const {
    const float* from = p.residual_in != nullptr && !updated ? p.residual_in + row * int64_t{p.residual_stride} + col : own_residual(row, col);
    return *reinterpret_cast<const float4*>(from);
  }
  // The warp's columns of a row; zeros where the matrix has none. Waits for exchange rows by one word, then loads all.
  __device__ __forceinline__ TwoGroups load_columns(const PhaseRows& rows, int row, const ChunkColumns& columns) const {
    const int lane_col = columns.first + block.lane * 4, last_col = lane_col + (columns.n_groups - 1) * 128;
    const bool live[2] = {lane_col < p.cols, columns.n_groups > 1 && last_col < p.cols};
    TwoGroups x = {};
    if (columns.first >= p.cols) return x;
    const float* from = rows.values + row * int64_t{rows.stride};
    // Lanes without a column read the first one.
    const float* first = from + (live[0] ? lane_col : columns.first);
    const float* second = live[1] ? from + last_col : first;
    if (rows.exchange) {
      const uint32_t flag = block.flag(row);
      await_word(from + min(columns.first + columns.n_groups * 128, p.cols) - 4, flag);
      x = load_exchange_groups(first, second, flag);
    } else {
      x.v[0] = __ldcg(reinterpret_cast<const float4*>(first));
      x.v[1] = __ldcg(reinterpret_cast<const float4*>(second));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (!live[i]) x.v[i] = make_float4(0, 0, 0, 0);
    return x;
  }
  __device__ __forceinline__ void put_sum(float* sums, int row, int group, float value) const {
    if (writes && group < n_groups && block.lane == 0) sums[row * block.args.sum_groups + group] = value;
  }
  __device__ __forceinline__ void write_digits(int own_group, int row, float4 v) const {
    const XForm form = x_form(p.format);
    const int bytes = group_bytes(form), index = own_group * n_rows + row;
    const WarpX x(block, n_rows, bytes);
    write_group(form, needs_x_sums(p.format), p.x_scale, v, block.lane, x.codes + index * bytes, x.scales + index, x.sums + index * 4);
  }

  // The first time that a phase meets a chunk of x, or once more for another batch of units (again).
  __device__ __forceinline__ void prepare(int chunk, bool again) const {
    if (!has_tile) return;
    const ChunkColumns columns(p, chunk, k);
    __syncwarp();                  // nobody reads the last chunk any more
    float4 weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = columns.first + i * 128 + block.lane * 4;
      weight[i] = p.has_norm && i < columns.n_groups && col < p.cols ? load_weight4(p.norm_weight, col) : make_float4(1, 1, 1, 1);
    }
#pragma unroll 1
    for (int row = 0; row < n_rows; ++row) {
      TwoGroups x = {};
      if (p.residual) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int col = columns.first + i * 128 + block.lane * 4;
          if (i < columns.n_groups && col < p.cols) x.v[i] = load_residual(row, col, again);
        }
      } else {
        x = load_columns(p.x, row, columns);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= columns.n_groups) break;
        const int col = columns.first + i * 128 + block.lane * 4, group = col / 128;
        if (!again) {
          if (p.has_norm) put_sum(block.norm_sums, row, group, group_squares(x.v[i]));
          if (p.residual) keep_residual(row, col, x.v[i]);
        }
        write_digits(i, row, p.has_norm ? times(x.v[i], weight[i]) : x.v[i]);
      }
    }
    __syncwarp();
  }
  // The block's own copy, so that later phases need not ask where the residual began.
  __device__ __forceinline__ void keep_residual(int row, int col, float4 x) const {
    if (writes && col < p.cols && (p.add.values != nullptr || p.residual_in != nullptr))
      *reinterpret_cast<float4*>(own_residual(row, col)) = x;
  }

  // x of all chunks that an AddNorm changes: its sums, a barrier, then the new residual. Digits are those of the only
  // chunk, or are prepared from the residual later.
  __device__ __forceinline__ void add_to_residual() const {
    const bool one_chunk = direct();
    TwoGroups kept = {};
    float4 residual[2] = {}, weight[2] = {}, add_weight[2] = {};
    const auto load_constants = [&](const ChunkColumns& columns) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = columns.first + i * 128 + block.lane * 4;
        const bool live = i < columns.n_groups && col < p.cols;
        weight[i] = live && p.has_norm ? load_weight4(p.norm_weight, col) : make_float4(1, 1, 1, 1);
        add_weight[i] = live ? load_weight4(p.add_weight, col) : make_float4(0, 0, 0, 0);
        residual[i] = live ? load_residual(0, col, false) : make_float4(0, 0, 0, 0);
      }
    };
    if (has_tile) {
      if (one_chunk) load_constants(ChunkColumns(p, 0, k));
#pragma unroll 1
      for (int row = n_rows - 1; row >= 0; --row) {        // row 0 last: it stays in registers
#pragma unroll 1
        for (int chunk = 0; chunk < p.n_chunks; ++chunk) {
          const ChunkColumns columns(p, chunk, k);
          kept = load_columns(p.add, row, columns);
          if (p.add_norm) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (i < columns.n_groups)
                put_sum(block.add_sums, row, columns.first / 128 + i, group_squares(kept.v[i]));
          }
        }
      }
    }
    block.barrier();
    if (!has_tile) return;
    if (one_chunk) __syncwarp();
#pragma unroll 1
    for (int row = 0; row < n_rows; ++row) {
      const float factor = p.add_norm ? norm_factor_of(block.add_sums + row * block.args.sum_groups, n_groups, inverse_cols, p.add_eps) : 1.0f;
#pragma unroll 1
      for (int chunk = 0; chunk < p.n_chunks; ++chunk) {
        const ChunkColumns columns(p, chunk, k);
        if (!one_chunk) load_constants(columns);
        const bool load = row > 0 || !one_chunk;
        if (load) kept = load_columns(p.add, row, columns);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (i >= columns.n_groups) break;
          const int col = columns.first + i * 128 + block.lane * 4, group = col / 128;
          if (load && col < p.cols) residual[i] = load_residual(row, col, false);
          const float4 added = p.add_norm ? times(times(kept.v[i], factor), add_weight[i]) : kept.v[i];
          const float4 x = times(plus(residual[i], added), p.add_scale);
          keep_residual(row, col, x);
          if (p.has_norm) put_sum(block.norm_sums, row, group, group_squares(x));
          if (one_chunk) write_digits(i, row, p.has_norm ? times(x, weight[i]) : x);
        }
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
      if (n_rows > 1) tile = rest / n_rows, row = rest - tile * n_rows, unit = tile;
      if (p.row_warps > 1) unit = tile / p.row_warps, row_tile = tile - unit * p.row_warps;
      const int tile_index = first_unit * p.row_warps + tile;
      const int col = (tile_index << bits) + out;
      if (col >= p.outputs) continue;
      const float* from = partials + unit * p.stream.unit_partials * n_rows + (row_tile * n_rows + row) * kTileRows + out;
      if (p.has_norm && factor_row != row) {
        factor = norm_factor_of(block.norm_sums + row * block.args.sum_groups, n_groups, inverse_cols, p.norm_eps);
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
          case DecodeEpilogue::kSoftcap: value = p.softcap * tanhf(value / p.softcap); break;
          default: break;
        }
      }
      store_row(p.y, row, col, value, block.flag(row));
    }
  }
};

// Everything of one phase but the copies. before_barrier(): what the caller wants visible to all warps afterwards.
template <int kTiles, class Function>
__device__ __forceinline__ void run_linear(const DecodeArgs& args, unsigned char* shared, LinearPhase* phase, Function&& before_barrier) {
  // Each step with its own view of the block and the phase.
  const auto step = [&](auto&& function) {
    const DecodeBlock block(args, afresh(shared));
    function(LinearBlock(block, *afresh(phase)));
  };
  int first, n_units, batch, n_chunks, buffer;
  bool adds, direct;
  {
    const LinearPhase& p = *afresh(phase);
    const int n_blocks = static_cast<int>(gridDim.x), rotated = (static_cast<int>(blockIdx.x) + p.stream.rotation) % n_blocks;
    first = block_unit(p.stream.n_units, rotated, n_blocks);
    n_units = block_unit(p.stream.n_units, rotated + 1, n_blocks) - first;
    batch = max(1, args.partial_floats / (p.stream.unit_partials * args.n_rows));
    n_chunks = p.n_chunks;
    adds = p.residual && p.add.values != nullptr;
    direct = n_chunks == 1 && (p.row_warps == 1 || args.n_rows == 1);
    const DecodeBlock block(args, afresh(shared));
    buffer = block.small->places[block.warp].buffer;
  }
  if (adds) {
    step([](const LinearBlock& work) { work.add_to_residual(); });
    if (!direct) DecodeBlock::barrier();           // prepare() reads it back, in other warps too
  }
  // The residual is everybody's, so x is prepared even where there are no units.
#pragma unroll 1
  for (int unit = 0; unit == 0 || unit < n_units; unit += batch) {
    const int count = min(batch, n_units - unit);
    const auto partials_of = [&](const DecodeBlock& block) {
      return reinterpret_cast<float*>(block.scratch + args.partials_at) + buffer * args.partial_floats;
    };
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      if (unit == 0 || n_chunks > 1) {
        if (!(adds && unit == 0 && direct)) step([&](const LinearBlock& work) { work.prepare(chunk, adds || unit > 0); });
      }
      step([&](const LinearBlock& work) {
        const LinearPhase& p = work.p;
        const int n_stages = min(p.stream.n_stages - chunk * kChunkStages, kChunkStages);
        const int stages_a_slot = min(p.stream.slot_stages, args.slot_bytes / p.stream.stage_bytes);
        if (work.has_tile) {
          const Multiply m = {count,
                              n_stages,
                              stages_a_slot,
                              p.stream.stage_bytes,
                              p.tile_codes,
                              p.stream.unit_partials * args.n_rows,
                              partials_of(work.block) + (chunk * p.k_warps * p.row_warps + work.block.warp) * args.n_rows * kTileRows};
          WarpPlace& place = work.block.small->places[work.block.warp];
          const RingPlace ring = multiply_format<kTiles>(p.format, args, shared, m, {place.slot, place.parity});
          const DecodeBlock after(args, afresh(shared));
          if (after.lane == 0) after.small->places[after.warp].slot = ring.slot, after.small->places[after.warp].parity = ring.parity;
          __syncwarp();
          return;
        }
        // A warp without a tile passes over the slots, in step with the others: each slot waits for all warps.
        const int slots = (n_stages + stages_a_slot - 1) / stages_a_slot;
        WarpPlace& place = work.block.small->places[work.block.warp];
        RingPlace ring = {place.slot, place.parity};
        for (int i = 0; i < count * slots; ++i) {
          barrier_wait(&work.block.small->full[ring.slot], ring.parity);
          __syncwarp();
          if (work.block.lane == 0) barrier_arrive(&work.block.small->empty[ring.slot]);
          ring.next(args.n_slots);
        }
        __syncwarp();
        if (work.block.lane == 0) place.slot = ring.slot, place.parity = ring.parity;
        __syncwarp();
      });
    }
    if (unit + batch >= n_units) before_barrier();
    DecodeBlock::barrier();
    step([&](const LinearBlock& work) { work.finish(first + unit, count, partials_of(work.block)); });
    buffer ^= 1;
  }
  const DecodeBlock block(args, afresh(shared));
  if (block.lane == 0) block.small->places[block.warp].buffer = buffer;
}

}  // namespace beryl::cuda
