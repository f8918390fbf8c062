// The x of a linear phase by the short path, which nearly every phase of a model in FP4 or Q4_0 takes: units of one row tile,
// 256 columns for each warp that has a tile, digits that are integers and need no sums, up to 4 rows (kShortX).
// What remains is straight-line code with all loads side by side; the results are those of LinearBlock, bit for bit.
#pragma once

#include "cuda/decode_linear_block.cuh"

namespace beryl::cuda {

__device__ __forceinline__ uint32_t flags_missing(uint4 v, uint32_t flag) {
  return ((v.x ^ flag) | (v.y ^ flag) | (v.z ^ flag) | (v.w ^ flag)) & 1u;
}
// Vectors of exchange rows, side by side. The warp waits for its very last one alone first: what all blocks load again and again until
// it is there takes the bandwidth of the L2. Then each lane asks again only for those that it lacks.
enum class Arrival {
  kAwaited,                         // they will come
  kHopedFor,                        // some blocks are so late that they are there: loaded once before the wait
  kExpected,                        // they are there
};
template <int kCount>
__device__ __forceinline__ void load_exchange_vectors(const float* const (&from)[kCount], const uint32_t (&flag)[kCount], float4 (&v)[kCount],
                                                      Arrival arrival = Arrival::kAwaited) {
  uint32_t polls = 0;
  uint4 bits[kCount];
  uint32_t missing = 0;             // bit i: vector i
  const auto load_all = [&] {
    missing = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = load_common_words(from[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) missing |= flags_missing(bits[i], flag[i]) << i;
  };
  if (arrival != Arrival::kAwaited) load_all();
  if (arrival == Arrival::kAwaited || (arrival == Arrival::kHopedFor && __any_sync(kAllLanes, missing != 0))) {
    const float* last = reinterpret_cast<const float*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(from[kCount - 1]), 31));
    while ((load_common_word(last + 3) ^ flag[kCount - 1]) & 1u) count_poll(polls);
    load_all();
  }
  while (missing != 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (missing >> i & 1u) bits[i] = load_common_words(from[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (missing >> i & 1u) missing ^= (flags_missing(bits[i], flag[i]) ^ 1u) << i;
    count_poll(polls);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = make_float4(without_flag(bits[i].x), without_flag(bits[i].y), without_flag(bits[i].z), without_flag(bits[i].w));
}

template <int kRows>
struct ShortPath {
  static constexpr int kLots = kRows == 1 ? 1 : 4;         // rows side by side
  const DecodeBlock& block;
  const LinearPhase& p;
  int n_rows;

  __device__ __forceinline__ ShortPath(const DecodeBlock& b, const LinearPhase& phase) : block(b), p(phase), n_rows(count_rows<kRows>(b.args)) {}
  __device__ __forceinline__ bool has_tile() const { return block.warp < p.k_warps; }
  // Beyond the last row there is the last row once more: the same values go to the same places.
  __device__ __forceinline__ int row_at(int row) const { return kRows == 1 ? 0 : min(row, n_rows - 1); }
  __device__ __forceinline__ int column(int chunk) const { return (chunk * p.k_warps + block.warp) * 256 + block.lane * 4; }

  // Digits of groups side by side; index: of the group in WarpX.
  template <int kCount>
  __device__ __forceinline__ void write_digits(int n_chunks, const float4 (&v)[kCount], const int (&index)[kCount]) const {
    const WarpX to(block, n_rows, 256, n_chunks, 0);
    unsigned char* codes = to.codes + integer_digit_offset(block.lane);
    IntegerDigits digits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) digits[i] = integer_digits(v[i], p.x_scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      *reinterpret_cast<uint32_t*>(codes + index[i] * 256) = digits[i].high;
      *reinterpret_cast<uint32_t*>(codes + index[i] * 256 + 64) = digits[i].low;
      if (block.lane == 0) to.scales[index[i]] = digits[i].scale;
    }
  }

  // x as it is: kCount lots from (row, chunk) on, of neighbouring rows or else of neighbouring chunks. Shared memory has n_held chunks
  // from first_held on.
  template <int kCount, bool kRowsApart>
  __device__ __forceinline__ void take_lots(int row, int chunk, int n_held, int first_held, Arrival arrival) const {
    const float* from[2 * kCount];
    uint32_t flag[2 * kCount];
    int index[2 * kCount];
    const uint32_t flags = block.small->flags;
    const int n_chunks = p.n_chunks;
#pragma unroll
    for (int lot = 0; lot < kCount; ++lot) {
      const int lot_row = kRowsApart ? row_at(row + lot) : row, lot_chunk = kRowsApart ? chunk : min(chunk + lot, n_chunks - 1);
      const float* begin = p.x.values + lot_row * int64_t{p.x.stride} + column(lot_chunk);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        from[2 * lot + i] = begin + i * 128;
        flag[2 * lot + i] = flags >> lot_row & 1u;
        index[2 * lot + i] = ((lot_chunk - first_held) * 2 + i) * n_rows + lot_row;
      }
    }
    float4 v[2 * kCount];
    if (p.x.exchange) {
      load_exchange_vectors(from, flag, v, arrival);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kCount; ++i) v[i] = __ldcg(reinterpret_cast<const float4*>(from[i]));
    }
    write_digits(n_held, v, index);
  }
  // All rows and chunks of x (LinearStart::x_all_bytes).
  __device__ __forceinline__ void take() const {
    if (!has_tile()) return;
    const int n_chunks = p.n_chunks;
    if (n_chunks == 1) {
      take_lots<kLots, true>(0, 0, 1, 0, Arrival::kHopedFor);
    } else {
#pragma unroll 1
      for (int row = 0; row < n_rows; ++row)
        if (n_chunks == 2) {
          take_lots<2, false>(row, 0, n_chunks, 0, Arrival::kHopedFor);
        } else {
#pragma unroll 1
          for (int chunk = 0; chunk < n_chunks; chunk += 4) take_lots<4, false>(row, chunk, n_chunks, 0, Arrival::kHopedFor);
        }
    }
    __syncwarp();
  }
  // All rows of one chunk.
  __device__ __forceinline__ void take_chunk(int chunk) const {
    if (!has_tile()) return;
    __syncwarp();                  // nobody reads the last chunk any more
    take_lots<kLots, true>(0, chunk, 1, chunk, chunk > 0 ? Arrival::kExpected : Arrival::kHopedFor);
    __syncwarp();
  }

  // The factors of an AddNorm's norm for the whole block, by the warp that most often has no tile: all warps would load as many sums of
  // squares as values of x.
  __device__ __forceinline__ void make_factors() const {
    constexpr int kVectors = 2;                            // for up to 4,096 columns
    const int n_tiles = p.cols / kTileRows;
    const float* from[kLots * kVectors];
    uint32_t flag[kLots * kVectors];
    float4 v[kLots * kVectors];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int tile = block.lane * 4 + i * 128;
        from[lot * kVectors + i] = p.add_squares + row_at(lot) * int64_t{p.add.stride} + (tile < n_tiles ? tile : 0);
        flag[lot * kVectors + i] = block.flag(row_at(lot));
      }
    load_exchange_vectors(from, flag, v);
    float sums[kLots];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot) {
      sums[lot] = 0;
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        sums[lot] = __fadd_rn(sums[lot], block.lane * 4 + i * 128 < n_tiles ? sum_of_four(v[lot * kVectors + i]) : 0.0f);
    }
    const float factor = rsqrtf(__fmaf_rn(lane_sums<kLots>(sums, block.lane), p.inverse_cols, p.add_eps));
    if (block.lane % (32 / kLots) == 0) block.small->factors[row_at(block.lane * kLots / 32)] = factor;
    __syncwarp();
    if (block.lane == 0) barrier_arrive(&block.small->has_factors);
  }

  // x is the residual with what is added to it, in one chunk: residual = (residual + norm(add)) · add_scale.
  __device__ __forceinline__ void add_to_residual(bool near_x) const {
    const bool add_norm = near_x || p.add_norm;
    if (add_norm && block.warp == kMatvecWarps - 1) make_factors();
    if (has_tile()) {
      if (near_x) add_to_columns<true>();
      else add_to_columns<false>();
    }
    if (!add_norm) return;
    __syncwarp();
    if (block.lane == 0) block.small->places[block.warp].factors ^= 1;
  }
  // kNear: there is an AddNorm and a norm, and residual and weights are in shared memory.
  template <bool kNear>
  __device__ __forceinline__ void add_to_columns() const {
    const bool has_norm = kNear || p.has_norm, add_norm = kNear || p.add_norm;
    float* const near_residual = reinterpret_cast<float*>(block.ring + block.args.residual_at);
    const int first_column = column(0);
    float4 weight[2];
    if (kNear) {
#pragma unroll
      for (int i = 0; i < 2; ++i) weight[i] = *reinterpret_cast<const float4*>(block.held_vector() + i * 128);
    } else {
      const bool held = p.norm_held && block.args.vectors_at != 0;
      const float* norm_weight = held ? block.held_vector() : p.norm_weight != nullptr && has_norm ? p.norm_weight + first_column : nullptr;
#pragma unroll
      for (int i = 0; i < 2; ++i) weight[i] = norm_weight != nullptr ? *reinterpret_cast<const float4*>(norm_weight + i * 128) : make_float4(1, 1, 1, 1);
    }
    // A residual in device memory is asked for before the wait.
    float4 residual[kLots][2];
    const auto load_residuals = [&] {
#pragma unroll
      for (int lot = 0; lot < kLots; ++lot) {
        const int row = row_at(lot);
        const float* own = near_residual + row * static_cast<int>(block.args.residual_cols) + first_column;
        const float* from = kNear ? own : p.residual_in != nullptr ? p.residual_in + row * int64_t{p.residual_stride} + first_column : block.residual(row, first_column);
#pragma unroll
        for (int i = 0; i < 2; ++i) residual[lot][i] = reinterpret_cast<const float4*>(from)[i * 32];
      }
    };
    if (!kNear) load_residuals();
    float4 v[2 * kLots];
    {
      const float* from[2 * kLots];
      uint32_t flag[2 * kLots];
      const uint32_t flags = block.small->flags;
#pragma unroll
      for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          from[2 * lot + i] = p.add.values + int64_t{row_at(lot)} * p.add.stride + first_column + i * 128;
          flag[2 * lot + i] = flags >> row_at(lot) & 1u;
        }
      load_exchange_vectors(from, flag, v);
    }
    if (kNear) load_residuals();
    float4 x[kLots][2];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) x[lot][i] = v[2 * lot + i];
    float factor[kLots];
    if (add_norm) {
      barrier_wait(&block.small->has_factors, block.small->places[block.warp].factors);
#pragma unroll
      for (int lot = 0; lot < kLots; ++lot) factor[lot] = block.small->factors[row_at(lot)];
    }
    float squares[2 * kLots];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 term = add_norm ? times(x[lot][i], factor[lot]) : x[lot][i];
        x[lot][i] = times(plus(residual[lot][i], term), p.add_scale);
        squares[2 * lot + i] = dot(x[lot][i], x[lot][i], 0.0f);
      }
    }
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* own = near_residual + row_at(lot) * static_cast<int>(block.args.residual_cols) + first_column;
        if (kNear) reinterpret_cast<float4*>(own)[i * 32] = x[lot][i];
        else reinterpret_cast<float4*>(block.residual(row_at(lot), first_column))[i * 32] = x[lot][i];
      }
    if (has_norm) {
      const float sum = lane_sums<2 * kLots>(squares, block.lane);
      const int mine = block.lane * (2 * kLots) / 32;
      if (block.lane % (16 / kLots) == 0) block.norm_sums()[row_at(mine / 2) * block.args.sum_groups + block.warp * 2 + mine % 2] = sum;
    }
    float4 normed[2 * kLots];
    int index[2 * kLots];
#pragma unroll
    for (int lot = 0; lot < kLots; ++lot)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        normed[2 * lot + i] = has_norm ? times(x[lot][i], weight[i]) : x[lot][i];
        index[2 * lot + i] = i * n_rows + row_at(lot);
      }
    write_digits(1, normed, index);
    __syncwarp();
  }
};

}  // namespace beryl::cuda
