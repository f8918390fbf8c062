// Attention on tensor cores, for head widths 64, 128, 256, 512 and BF16 or FP8 caches.
//
// A tile is 16 query rows of one KV head: all heads of its group for one token (split form), or for as many neighbouring
// tokens as fit (whole form; tokens of another sequence start a new pass). Keys come in units of 64 positions, 32 for wide
// heads, so that a block fits into the shared memory of small GPUs and two fit on a large one:
//
//   1. scores     each warp multiplies its slice of head_dim, so that it keeps its part of q in registers
//   2. softmax    the slices are added up in shared memory in the order of the warps; weights go back as bf16 pairs
//   3. values     each warp owns the same slice of the output
//
// q and the weights are split into two bf16 each (high + low), so the products are as good as the cache's own values.
// Keys outside a row's band are never read (zeros take their place), so what lies there does not matter. Keys that are made from values
// (index_math.h) are put together as they are copied: their turned columns, and the values' others, whose vector is in q.
// Moves the live keys and values of the tile once. While one unit is computed the next one is in flight.
#pragma once

#include "cuda/attention_state.cuh"
#include "cuda/index_math.h"
#include "cuda/kernels.h"

namespace beryl::cuda {

template <int kDim, bool kFp8>
struct AttentionTile {
  static constexpr int kRows = 16;
  static constexpr int kKeys = kDim < 256 ? kPageTokens : kPageTokens / 2;
  static constexpr int kWarps = kDim / 16 < 8 ? kDim / 16 : 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kSlice = kDim / kWarps;                 // columns of a warp
  static constexpr int kSteps = kSlice / 16;                   // products of 16 columns
  static constexpr int kOutputs = kSlice / 8;                  // output tiles of 8 columns
  static constexpr int kRowThreads = kThreads / kRows;         // threads of a row in the softmax
  static constexpr int kRowKeys = kKeys / kRowThreads;         // keys of such a thread
  static constexpr int kScoreStride = kKeys + 8;               // spreads rows over the banks

  static constexpr int kTileBytes = kKeys * kDim * 2;
  static constexpr int kStageBytes = kFp8 ? kKeys * kDim : 0;  // codes before they are widened
  // FP8 widens keys and values one after the other into one tile.
  static constexpr int kKeysAt = 0;
  static constexpr int kValuesAt = kFp8 ? 0 : kTileBytes;
  static constexpr int kKeyStageAt = kValuesAt + kTileBytes;
  static constexpr int kValueStageAt = kKeyStageAt + kStageBytes;
  static constexpr int kScoresAt = kValueStageAt + kStageBytes;
  static constexpr int kWeightsAt = kScoresAt + kWarps * kRows * kScoreStride * 4;
  static constexpr int kScalesAt = kWeightsAt + 2 * kRows * kKeys * 2;
  static constexpr int kRowsAt = kScalesAt + (kFp8 ? 2 * 2 * kKeys * 4 : 0);
  static constexpr int kSharedBytes = kRowsAt + 5 * kRows * 4;
};

// Byte offset of a 16-byte chunk in a tile row, permuted so that equal chunks of eight rows lie in different banks.
template <int kRowBytes>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  static_assert(kRowBytes % 64 == 0);
  const int swapped = kRowBytes % 128 == 0 ? row & 7 : row >> 1 & 3;
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ swapped) * 16));
}

template <int kDim, bool kFp8, bool kWhole>
__global__ void __launch_bounds__(AttentionTile<kDim, kFp8>::kThreads) attention_mma_kernel(AttentionArgs args) {
  using T = AttentionTile<kDim, kFp8>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  float* scores = reinterpret_cast<float*>(shared + T::kScoresAt);       // [kWarps][kRows][kScoreStride]
  float* scales = reinterpret_cast<float*>(shared + T::kScalesAt);       // [2][keys, values][kKeys]
  float* row_factor = reinterpret_cast<float*>(shared + T::kRowsAt);     // [kRows] of the running sums
  float* row_older = row_factor + T::kRows;                              // merge factors; newer < 0: no merge
  float* row_newer = row_older + T::kRows;
  float* row_total = row_newer + T::kRows;                               // the sum of all weights, at the end

  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n_kv = args.cache.n_kv_heads, group = args.n_heads / n_kv;
  const int tile_heads = min(group, T::kRows), head_tiles = (group + tile_heads - 1) / tile_heads;
  const int kv_head = blockIdx.y / head_tiles;
  const int first_head = kv_head * group + blockIdx.y % head_tiles * tile_heads;
  const int live_heads = min(tile_heads, (kv_head + 1) * group - first_head);
  const int tile_tokens = kWhole ? T::kRows / tile_heads : 1;
  const int tile_begin = args.first_token + static_cast<int>(blockIdx.z) * tile_tokens;
  const int tile_end = min(tile_begin + tile_tokens, args.first_token + args.n_tokens);

  // Whether keys are made from values, whether this warp's columns then are.
  const bool from_values = kDim == kFromValuesDim && args.cache.key_weight != nullptr;
  const bool slice_from_values = from_values && !is_turned(warp * T::kSlice);
  static_assert(kDim != kFromValuesDim || kTurnedPairs % T::kSlice == 0);

  for (int token_begin = tile_begin, token_end; token_begin < tile_end; token_begin = token_end) {
    const int sequence = args.token.sequences[token_begin];
    token_end = token_begin + 1;
    while (token_end < tile_end && args.token.sequences[token_end] == sequence) ++token_end;

    // What a query row of the tile is: a token and a head of the group; rows beyond are dead.
    const auto row_token = [&](int row) { return token_begin + row / tile_heads; };
    const auto row_live = [&](int row) { return row_token(row) < token_end && row % tile_heads < live_heads; };
    const auto row_head = [&](int row) { return first_head + row % tile_heads; };

    Band band = {live_band(args.token.positions[token_begin], args.window).begin,
                 args.token.positions[token_end - 1] + 1};
    if constexpr (!kWhole) {
      const Splits splits = splits_of(band);
      if (static_cast<int>(blockIdx.x) >= splits.count) return;
      const int split_begin = (splits.first + static_cast<int>(blockIdx.x)) * splits.positions;
      band = {max(band.begin, split_begin), min(band.end, split_begin + splits.positions)};
    }

    // This warp's slice of q, as the left operand.
    uint32_t q_high[T::kSteps][4], q_low[T::kSteps][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + half * 8;
      const bool live = row_live(row);
      const float* q = args.q.values + int64_t{live ? row_token(row) : token_begin} * args.q.stride +
                       int64_t{row_head(live ? row : 0)} * kDim + warp * T::kSlice + lane % 4 * 2;
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step)
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const float* at = q + step * 16 + right * 8;
          float2 weight = make_float2(1, 1);
          if (slice_from_values) weight = *reinterpret_cast<const float2*>(args.cache.key_weight + warp * T::kSlice + lane % 4 * 2 + step * 16 + right * 8);
          const Bf16Pair a = split_bf16(live ? __fmul_rn(at[0], weight.x) : 0.0f), b = split_bf16(live ? __fmul_rn(at[1], weight.y) : 0.0f);
          q_high[step][right * 2 + half] = pack_bf16(a.high, b.high);
          q_low[step][right * 2 + half] = pack_bf16(a.low, b.low);
        }
    }

    // The row that this thread handles in the softmax.
    const int soft_row = threadIdx.x / T::kRowThreads, soft_part = threadIdx.x % T::kRowThreads;
    const bool soft_live = row_live(soft_row);
    Band soft_band = {0, 0};
    int soft_split = kMinSplitPositions;
    if (soft_live) {
      soft_band = live_band(args.token.positions[row_token(soft_row)], args.window);
      soft_split = split_positions(soft_band.end - soft_band.begin);
      if constexpr (!kWhole) soft_band = band;
    }
    RunningSoftmax running;
    float total_largest = -INFINITY, total_sum = 0;   // of the splits merged so far

    float sums[T::kOutputs][4] = {};
    float totals[kWhole ? T::kOutputs : 1][4] = {};

    const int unit_begin = band.begin / T::kKeys, unit_end = (band.end + T::kKeys - 1) / T::kKeys;
    const int32_t* table = args.token.table + int64_t{sequence} * args.token.n_entries;

    // Requests the keys or values of a unit; rows outside the band become zeros.
    const auto request = [&](int unit, bool is_values) {
      if (unit >= unit_end) return;
      constexpr int kChunks = kFp8 ? kDim / 16 : kDim / 8;
      constexpr int kElementBytes = kFp8 ? 1 : 2;
      const int64_t page = table[table_entry(unit * T::kKeys, args.token.n_entries)];
      const int first_slot = unit * T::kKeys % kPageTokens;
      const bool mixes = from_values && !is_values;
      const auto* from = static_cast<const uint8_t*>(is_values || mixes ? args.cache.values : args.cache.keys) +
                         cache_offset(page, first_slot, kv_head, n_kv, kDim) * kElementBytes;
      const auto* turned = static_cast<const uint8_t*>(args.cache.keys) + cache_offset(page, first_slot, kv_head, n_kv, kTurnedColumns) * kElementBytes;
      const uint32_t to = base + static_cast<uint32_t>(kFp8 ? (is_values ? T::kValueStageAt : T::kKeyStageAt)
                                                            : (is_values ? T::kValuesAt : T::kKeysAt));
#pragma unroll 4
      for (int i = threadIdx.x; i < T::kKeys * kChunks; i += T::kThreads) {
        const int row = i / kChunks, chunk = i % kChunks, position = unit * T::kKeys + row;
        const bool live = position >= band.begin && position < band.end;
        const uint8_t* source = from + i * 16;
        if (const int column = chunk * 16 / kElementBytes; mixes && is_turned(column))
          source = turned + (row * kTurnedColumns + turned_column(column)) * kElementBytes;
        copy16_async(to + (kFp8 ? static_cast<uint32_t>(i * 16) : tile_offset<kDim * 2>(row, chunk)), source, live ? 16 : 0);
      }
      if constexpr (kFp8) {
        // The softmax needs both kinds of scales, so they come with the keys. Those of rows outside the band are read
        // but never used.
        if (!is_values && threadIdx.x < T::kKeys / 2) {
          const int kind = static_cast<int>(threadIdx.x) / (T::kKeys / 4), at = static_cast<int>(threadIdx.x) % (T::kKeys / 4) * 4;
          const float* scale = (kind == 0 ? args.cache.key_scales : args.cache.value_scales) +
                               cache_scale_offset(page, unit * T::kKeys % kPageTokens, kv_head, n_kv);
          copy16_async(shared_address(scales + ((unit & 1) * 2 + kind) * T::kKeys + at), scale + at, 16);
        }
      }
    };
    // FP8: codes to bf16, into the one tile.
    const auto widen = [&](int stage_at) {
      for (int i = threadIdx.x; i < T::kKeys * kDim / 16; i += T::kThreads) {
        const int row = i / (kDim / 16), pair = i % (kDim / 16) * 2;
        const uint4 codes = *reinterpret_cast<const uint4*>(shared + stage_at + i * 16);
        const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        uint32_t wide[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          wide[2 * w] = widen_e4m3(__byte_perm(words[w], 0, 0x1404));
          wide[2 * w + 1] = widen_e4m3(__byte_perm(words[w], 0, 0x3424));
        }
        *reinterpret_cast<uint4*>(shared + tile_offset<kDim * 2>(row, pair)) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
        *reinterpret_cast<uint4*>(shared + tile_offset<kDim * 2>(row, pair + 1)) =
            make_uint4(wide[4], wide[5], wide[6], wide[7]);
      }
    };

    request(unit_begin, false);
    commit_copies();
    request(unit_begin, true);
    commit_copies();

    for (int unit = unit_begin; unit < unit_end; ++unit) {
      wait_copies<1>();
      __syncthreads();
      if constexpr (kFp8) {
        widen(T::kKeyStageAt);
        __syncthreads();
        request(unit + 1, false);
        commit_copies();
      }

      // 1. This warp's part of the scores of 16 rows and the unit's keys.
      float products[T::kKeys / 8][4] = {};
#pragma unroll
      for (int step = 0; step < T::kSteps; ++step)
#pragma unroll
        for (int pair = 0; pair < T::kKeys / 16; ++pair) {
          uint32_t keys[4];
          load_matrices(keys, base + T::kKeysAt +
                                  tile_offset<kDim * 2>(pair * 16 + lane % 8 + lane / 16 * 8,
                                                        (warp * T::kSlice + step * 16) / 8 + lane / 8 % 2));
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            mma_bf16(products[pair * 2 + n], q_low[step], keys[n * 2], keys[n * 2 + 1]);
            mma_bf16(products[pair * 2 + n], q_high[step], keys[n * 2], keys[n * 2 + 1]);
          }
        }
#pragma unroll
      for (int n = 0; n < T::kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(scores + (warp * T::kRows + lane / 4 + half * 8) * T::kScoreStride + n * 8 +
                                     lane % 4 * 2) = make_float2(products[n][half * 2], products[n][half * 2 + 1]);
      __syncthreads();
      if constexpr (!kFp8) {
        request(unit + 1, false);
        commit_copies();
      }

      // 2. Softmax.
      float score[T::kRowKeys];
      bool live[T::kRowKeys];
      float largest = -INFINITY;
#pragma unroll
      for (int k = 0; k < T::kRowKeys; ++k) {
        const int key = soft_part * T::kRowKeys + k, position = unit * T::kKeys + key;
        float product = 0, of_values = 0;
#pragma unroll
        for (int w = 0; w < T::kWarps; ++w) {
          const float part = scores[(w * T::kRows + soft_row) * T::kScoreStride + key];
          if (kFp8 && from_values && !is_turned(w * T::kSlice)) of_values += part;
          else product += part;
        }
        if constexpr (kFp8) product *= scales[(unit & 1) * 2 * T::kKeys + key];
        if (kFp8 && from_values) product = __fmaf_rn(of_values, scales[((unit & 1) * 2 + 1) * T::kKeys + key], product);
        live[k] = position >= soft_band.begin && position < soft_band.end;
        score[k] = live[k] ? attention_score(product, args.scale, args.softcap) : -INFINITY;
        largest = fmaxf(largest, score[k]);
      }
      const float factor = running.raise(lane_max<T::kRowThreads>(largest));
      float weight_sum = 0;
#pragma unroll
      for (int k = 0; k < T::kRowKeys; k += 2) {
        Bf16Pair pairs[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = soft_part * T::kRowKeys + k + i;
          float weight = live[k + i] ? running.weight(score[k + i]) : 0.0f;
          weight_sum += weight;
          if constexpr (kFp8) weight = live[k + i] ? weight * scales[((unit & 1) * 2 + 1) * T::kKeys + key] : 0.0f;
          pairs[i] = split_bf16(weight);
        }
        const int key = soft_part * T::kRowKeys + k;
        const uint32_t at = tile_offset<T::kKeys * 2>(soft_row, key / 8) + static_cast<uint32_t>(key % 8 * 2);
        *reinterpret_cast<uint32_t*>(shared + T::kWeightsAt + at) = pack_bf16(pairs[0].high, pairs[1].high);
        *reinterpret_cast<uint32_t*>(shared + T::kWeightsAt + T::kRows * T::kKeys * 2 + at) =
            pack_bf16(pairs[0].low, pairs[1].low);
      }
      weight_sum = lane_sum<T::kRowThreads>(weight_sum);
      running.sum = __fmaf_rn(running.sum, factor, weight_sum);
      MergeFactors merge = {1.0f, -1.0f};
      if constexpr (kWhole) {
        const int next = (unit + 1) * T::kKeys;
        if (soft_live && running.largest > -INFINITY && (next % soft_split == 0 || next >= soft_band.end)) {
          const float raised = fmaxf(total_largest, running.largest);
          merge = merge_factors(total_largest, running.largest, raised);
          total_sum = merge_value(total_sum, running.sum, merge);
          total_largest = raised;
          running = RunningSoftmax{};
        }
      }
      if (soft_part == 0) {
        row_factor[soft_row] = factor;
        row_older[soft_row] = merge.older;
        row_newer[soft_row] = merge.newer;
      }
      wait_copies<1>();
      __syncthreads();
      if constexpr (kFp8) {
        widen(T::kValueStageAt);
        __syncthreads();
        request(unit + 1, true);
        commit_copies();
      }

      // 3. The weighted sum of the values, this warp's columns.
#pragma unroll
      for (int n = 0; n < T::kOutputs; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= row_factor[lane / 4 + i / 2 * 8];
#pragma unroll
      for (int step = 0; step < T::kKeys / 16; ++step) {
        uint32_t high[4], low[4];
        const uint32_t at = base + T::kWeightsAt + tile_offset<T::kKeys * 2>(lane % 16, step * 2 + lane / 16);
        load_matrices(high, at);
        load_matrices(low, at + T::kRows * T::kKeys * 2);
#pragma unroll
        for (int pair = 0; pair < T::kOutputs / 2; ++pair) {
          uint32_t values[4];
          load_matrices_transposed(values, base + T::kValuesAt +
                                               tile_offset<kDim * 2>(step * 16 + lane % 16,
                                                                     warp * T::kSlice / 8 + pair * 2 + lane / 16));
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            mma_bf16(sums[pair * 2 + n], low, values[n * 2], values[n * 2 + 1]);
            mma_bf16(sums[pair * 2 + n], high, values[n * 2], values[n * 2 + 1]);
          }
        }
      }
      if constexpr (kWhole) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const MergeFactors factors = {row_older[lane / 4 + half * 8], row_newer[lane / 4 + half * 8]};
          if (factors.newer < 0.0f) continue;
#pragma unroll
          for (int n = 0; n < T::kOutputs; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& sum = sums[n][half * 2 + i];
              float& total = totals[n][half * 2 + i];
              total = merge_value(total, sum, factors);
              sum = 0;
            }
        }
      }
      __syncthreads();
      if constexpr (!kFp8) {
        request(unit + 1, true);
        commit_copies();
      }
    }
    wait_copies<0>();

    if constexpr (kWhole) {
      if (soft_part == 0) row_total[soft_row] = total_sum;
      __syncthreads();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        if (!row_live(row)) continue;
        float* out = args.out.values + int64_t{row_token(row)} * args.out.stride + int64_t{row_head(row)} * kDim +
                     warp * T::kSlice + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < T::kOutputs; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) out[n * 8 + i] = totals[n][half * 2 + i] / row_total[row];
      }
      __syncthreads();   // the next pass overwrites shared memory
    } else {
      const int split = blockIdx.x;
      const auto part = [&](int row) {
        return (int64_t{row_token(row) - args.first_token} * args.n_heads + row_head(row)) * args.max_splits + split;
      };
      if (soft_part == 0 && soft_live) args.partial_state[part(soft_row)] = make_float2(running.largest, running.sum);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + half * 8;
        if (!row_live(row)) continue;
        float* out = args.partial_sums + part(row) * kDim + warp * T::kSlice + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < T::kOutputs; ++n)
          *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[n][half * 2], sums[n][half * 2 + 1]);
      }
    }
  }
}

template <int kDim, bool kFp8, bool kWhole>
void launch_attention_mma(const LaunchContext& context, const AttentionArgs& args, int n_splits) {
  using T = AttentionTile<kDim, kFp8>;
  const int group = args.n_heads / args.cache.n_kv_heads, tile_heads = group < T::kRows ? group : T::kRows;
  const int head_tiles = (group + tile_heads - 1) / tile_heads, tile_tokens = kWhole ? T::kRows / tile_heads : 1;
  launch(context,
         {.grid = {static_cast<unsigned>(n_splits), static_cast<unsigned>(args.cache.n_kv_heads * head_tiles),
                   static_cast<unsigned>((args.n_tokens + tile_tokens - 1) / tile_tokens)},
          .block = T::kThreads,
          .shared_bytes = T::kSharedBytes,
          .name = "Attention"},
         attention_mma_kernel<kDim, kFp8, kWhole>, args);
}

// Instantiated in attention_mma_<head_dim>.cu, so that they compile side by side. n_splits 0: the whole form.
template <int kDim>
void launch_attention_dim(const LaunchContext& context, const AttentionArgs& args, int n_splits) {
  const bool fp8 = args.cache.element == CacheElement::kFp8;
  if (n_splits > 0) {
    fp8 ? launch_attention_mma<kDim, true, false>(context, args, n_splits)
        : launch_attention_mma<kDim, false, false>(context, args, n_splits);
  } else {
    fp8 ? launch_attention_mma<kDim, true, true>(context, args, 1) : launch_attention_mma<kDim, false, true>(context, args, 1);
  }
}

extern template void launch_attention_dim<64>(const LaunchContext&, const AttentionArgs&, int);
extern template void launch_attention_dim<128>(const LaunchContext&, const AttentionArgs&, int);
extern template void launch_attention_dim<256>(const LaunchContext&, const AttentionArgs&, int);
extern template void launch_attention_dim<512>(const LaunchContext&, const AttentionArgs&, int);

}  // namespace beryl::cuda
