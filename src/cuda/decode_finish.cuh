// What a block makes of its warps' partial sums: y = epilogue(sums · norm factor · row scales), to rows that other blocks wait for.
//
// Partial sums of a unit: [chunk][k_warps][row_warps][row][16]. A value is the sum over the warps of each chunk, in order, then over the
// chunks, in order, whichever way it is made. This is the longest stretch of a phase that few warps walk while all others wait, so the usual
// case (ShortFinish) is straight-line code in which all loads stand side by side, and what it needs of the phase is loaded before the barrier.
#pragma once

#include "cuda/decode_linear_block.cuh"

namespace beryl::cuda {

// Any phase.
template <int kRows>
struct Finish {
  const DecodeBlock& block;
  const LinearPhase& p;
  int n_rows;

  __device__ __forceinline__ Finish(const DecodeBlock& b, const LinearPhase& phase) : block(b), p(phase), n_rows(count_rows<kRows>(b.args)) {}

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
  // One value of y; factor: of the norm of row factor_row.
  __device__ __forceinline__ float output(int unit, int row_tile, int tile_index, int row, int col, int out, const float* partials, float& factor,
                                          int& factor_row) const {
    const float* from = partials + unit * p.stream.unit_partials * n_rows + (row_tile * n_rows + row) * kTileRows + out;
    if (p.has_norm && factor_row != row) {
      factor = norm_factor_of(block.norm_sums() + row * block.args.sum_groups, p.n_groups, p.inverse_cols, p.norm_eps);
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
      return __fmul_rn(p.epilogue == DecodeEpilogue::kGatedGelu ? quick_gelu_tanh(value) : quick_silu(value), up);
    }
    switch (p.epilogue) {
      case DecodeEpilogue::kGeluTimesOther: return quick_gelu_tanh(value) * load_row(p.other, row, col, block.flag(row));
      case DecodeEpilogue::kTimesGeluOther: return value * quick_gelu_tanh(load_row(p.other, row, col, block.flag(row)));
      case DecodeEpilogue::kTimesSiluOther: return value * quick_silu(load_row(p.other, row, col, block.flag(row)));
      case DecodeEpilogue::kSoftcap: return p.softcap * tanhf(__fdividef(value, p.softcap));
      default: return value;
    }
  }
  // The sum of squares of a row tile's 16 outputs for the norm of what they are added to; by half a warp.
  __device__ __forceinline__ void store_squares(int row, int tile, float value) const {
    const uint32_t half = 0xffffu << (block.lane & 16);
    float sum = __fmul_rn(value, value);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(half, sum, offset));
    if (block.lane % 16 == 0 && tile * kTileRows < p.outputs)
      store_common_word(p.squares + row * int64_t{p.y.stride} + tile, round_result(sum) | block.flag(row));
  }
  // own_unit: the block's first.
  __device__ __forceinline__ void run(int own_unit, int first_unit, int count, const float* partials) const {
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
      const bool live = col < p.outputs;
      float value = 0.0f;
      if (live) {
        value = output(unit, row_tile, tile_index, row, col, out, partials, factor, factor_row);
        if (p.squares != nullptr) {
          value = __uint_as_float(round_result(value));
          const int held = tile * kTileRows + out;         // of the block's outputs
          const float weight = p.y_weight == nullptr ? 1.0f : first_unit == own_unit && held < kHeldWeights ? block.y_weights()[held] : __ldg(p.y_weight + col);
          store_row(p.y, row, col, __fmul_rn(value, weight), block.flag(row));
        } else {
          store_row(p.y, row, col, value, block.flag(row));
        }
      }
      if (p.squares != nullptr) store_squares(row, tile_index, value);
    }
  }
};

// One row tile a unit, 15 or 16 warps that multiply, up to 4 chunks, no epilogue but gating, up to 4 rows (kShortFinish).
template <int kRows>
struct ShortFinish {
  const DecodeBlock& block;
  int n_rows, n_chunks, n_groups, outputs, unit_floats, y_stride;
  bool gated, gelu, has_norm, sixteen, exchange;
  float inverse_cols, norm_eps;
  float* y;
  float* squares;
  const float* y_weight;
  const float* row_scales;

  __device__ __forceinline__ ShortFinish(const DecodeBlock& b, const LinearPhase& p)
      : block(b), n_rows(count_rows<kRows>(b.args)), n_chunks(p.n_chunks), n_groups(p.n_groups), outputs(p.outputs),
        unit_floats(p.stream.unit_partials * n_rows), y_stride(p.y.stride), gated(p.gated), gelu(p.epilogue == DecodeEpilogue::kGatedGelu),
        has_norm(p.has_norm), sixteen(p.k_warps == 16), exchange(p.y.exchange), inverse_cols(p.inverse_cols), norm_eps(p.norm_eps), y(p.y.values),
        squares(p.squares), y_weight(p.y_weight), row_scales(p.row_scales) {}

  __device__ __forceinline__ float sum_of_warps(const float* from) const {
    const int stride = n_rows * kTileRows;
    float parts[kMatvecWarps];
#pragma unroll
    for (int i = 0; i + 1 < kMatvecWarps; ++i) parts[i] = from[i * stride];
    parts[kMatvecWarps - 1] = sixteen ? from[(kMatvecWarps - 1) * stride] : -0.0f;     // adding -0 changes nothing
    float sum = parts[0];
#pragma unroll
    for (int i = 1; i < kMatvecWarps; ++i) sum = __fadd_rn(sum, parts[i]);
    return sum;
  }
  // norm_factor_of, by the four lanes whose numbers differ in the last two bits.
  __device__ __forceinline__ float norm_factor(int row) const {
    constexpr int kAtOnce = 8;
    const float* sums = block.norm_sums() + row * block.args.sum_groups;
    float part = 0;
#pragma unroll 1
    for (int first = block.lane & 3; first < n_groups; first += 4 * kAtOnce) {
      float v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) v[i] = first + 4 * i < n_groups ? sums[first + 4 * i] : 0.0f;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) part = __fadd_rn(part, v[i]);
    }
    __syncwarp();
    part = __fadd_rn(part, __shfl_xor_sync(kAllLanes, part, 1));
    part = __fadd_rn(part, __shfl_xor_sync(kAllLanes, part, 2));
    return rsqrtf(__fmaf_rn(part, inverse_cols, norm_eps));
  }
  // Half a warp for a tile and row: a lane for each of 16 outputs, or 8 gates and 8 ups; of several chunks both halves, even and odd ones.
  // held: the place of the first unit among the block's.
  __device__ __forceinline__ void run(int first_unit, int held, int count, const float* partials) const {
    const bool chunked = n_chunks > 1;
    const int bits = chunked ? 5 : 4, n_items = count * n_rows << bits;
    const int place = block.lane & 15, half = block.lane >> 4;
    // Whole warps, for their shuffles; lanes beyond do the last one's work once more.
#pragma unroll 1
    for (int item = block.thread; item - block.lane < n_items; item += kDecodeConsumers) {
      const int rest = min(item, n_items - 1) >> bits;
      int unit = rest, row = 0;
      if (kRows > 1) {
        unit = static_cast<int>(static_cast<uint32_t>(rest) * block.args.rows_inverse >> 16);
        row = rest - unit * n_rows;
      }
      const int held_row = (held + unit) * kTileRows + place;
      const float scale = row_scales == nullptr ? 1.0f : held_row < kHeldScales ? block.row_scales()[held_row] : __ldg(row_scales + (first_unit + unit) * kTileRows + place);
      const float factor = has_norm ? norm_factor(row) : 1.0f;
      const float* from = partials + unit * unit_floats + row * kTileRows + place;
      float value;
      if (!chunked) {
        value = sum_of_warps(from);
      } else {
        const int chunk_floats = (sixteen ? 16 : 15) * n_rows * kTileRows;
        const float* mine = from + half * chunk_floats;
        const float early = sum_of_warps(mine), late = half + 2 < n_chunks ? sum_of_warps(mine + 2 * chunk_floats) : -0.0f;
        const float other_early = __shfl_xor_sync(kAllLanes, early, 16), other_late = __shfl_xor_sync(kAllLanes, late, 16);
        value = __fadd_rn(__fadd_rn(half ? other_early : early, half ? early : other_early), half ? other_late : late);
        value = __fadd_rn(value, half ? late : other_late);
      }
      if (has_norm) value = __fmul_rn(value, factor);
      value = __fmul_rn(value, scale);
      int col = (first_unit + unit) * kTileRows + place;
      bool stores = item < n_items && (!chunked || half == 0);
      if (gated) {
        const float up = __shfl_xor_sync(kAllLanes, value, 8);
        value = __fmul_rn(gelu ? quick_gelu_tanh(value) : quick_silu(value), up);
        col = (first_unit + unit) * 8 + (place & 7);
        stores = stores && place < 8;
      }
      stores = stores && col < outputs;
      const uint32_t flag = block.flag(row);
      float* to = y + row * int64_t{y_stride} + col;
      if (squares == nullptr) {
        if (stores) store_common_word(to, round_result(value) | (exchange ? flag : 0u));
        continue;
      }
      value = col < outputs ? __uint_as_float(round_result(value)) : 0.0f;
      const float weight = y_weight == nullptr || !stores ? 1.0f : held_row < kHeldWeights ? block.y_weights()[held_row] : __ldg(y_weight + col);
      if (stores) store_common_word(to, round_result(__fmul_rn(value, weight)) | (exchange ? flag : 0u));
      float sum = __fmul_rn(value, value);
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, offset));
      if (place == 0 && stores) store_common_word(squares + row * int64_t{y_stride} + first_unit + unit, round_result(sum) | flag);
    }
  }
};

}  // namespace beryl::cuda
