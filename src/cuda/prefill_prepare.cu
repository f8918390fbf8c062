// x for the product of many rows: norm, 16 bits, in the order of the format's operands; and the powers of two of rows
// of W.
//
// The first blocks have a row tile of W for each warp and read its meta data (2 bytes of 66 in FP4); they come first
// because each waits for several loads in turn. The others have a row of x each: it goes once through shared memory,
// where every 32 columns are followed by 4 unused ones, so that the gathers of all orders but two are free of
// conflicts.
//
// Moves cols · (4 + 2) bytes a row of x.
#include "cuda/prefill_prepare.h"

#include "cuda/device.cuh"
#include "cuda/index_math.h"
#include "cuda/prefill_widen.cuh"
#include "cuda/row_math.cuh"

namespace beryl::cuda {

namespace {

constexpr int kHeld = 4;  // loads of 16 bytes that a thread has under way

// Floats of a row in shared memory.
__host__ __device__ constexpr int padded_at(int column) { return column + column / 32 * 4; }

// 2^-e and 2^e with bound · 2^-e in [2^14, 2^15), as far as both are normal numbers; 1 for 0.
struct Power {
  float down, up;
};
__device__ __forceinline__ Power power_of(float bound) {
  const int exponent = static_cast<int>(__float_as_uint(bound) >> 23 & 0xffu);  // of 1.0: 127
  if (exponent == 0) return {1.0f, 1.0f};
  const int down = min(max(127 + 141 - exponent, 1), 253);
  return {__uint_as_float(static_cast<uint32_t>(down) << 23), __uint_as_float(static_cast<uint32_t>(254 - down) << 23)};
}

template <Format kFormat, int kThreads>
__device__ __forceinline__ void prepare_row(const PrefillPrepareArgs& a, int row, float* values) {
  constexpr XOrder kOrder = x_order(kFormat);
  constexpr bool kBf16 = kFormat == Format::kBf16;
  __shared__ float sums[32];
  __shared__ uint32_t largest[kThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), n_columns = a.n_slabs * 64;
  const bool live = row < a.n_rows;
  const float* x = a.x.values + int64_t{live ? row : 0} * a.x.stride;
  float squares = 0;
  uint32_t most = 0;
  for (int begin = 0; begin < n_columns; begin += kThreads * 4 * kHeld) {
    float4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int column = begin + (i * kThreads + thread) * 4;
      held[i] = live && column < a.cols ? __ldcg(reinterpret_cast<const float4*>(x + column)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int column = begin + (i * kThreads + thread) * 4;
      if (column >= n_columns) break;
      float4 v = held[i];
      if (a.has_norm) {
        squares = dot(v, v, squares);
        if (column < a.cols) v = times(v, load_weight4(a.norm_weight, column));
      }
      *reinterpret_cast<float4*>(values + padded_at(column)) = v;
      const float magnitude = max_or_nan(max_or_nan(fabsf(v.x), fabsf(v.y)), max_or_nan(fabsf(v.z), fabsf(v.w)));
      most = max(most, __float_as_uint(magnitude) & 0x7fffffffu);
    }
  }
  most = __reduce_max_sync(kAllLanes, most);
  if (thread % 32 == 0) largest[thread / 32] = most;
  // Its barriers are those of values and largest too.
  const float square_sum = block_sum(squares, sums);
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) most = max(most, largest[i]);
  float factor = 1.0f;
  if (a.has_norm && live) factor = rsqrtf(__fmaf_rn(square_sum, 1.0f / static_cast<float>(a.cols), a.norm_eps));
  float scale = 1.0f;
  if (!kBf16) {
    const float bound = __uint_as_float(most) * factor;
    const bool finite = bound < __uint_as_float(0x7f800000u);
    const Power power = power_of(bound);
    factor *= power.down;
    scale = finite ? power.up : __uint_as_float(0x7fc00000u);
  }
  if (thread == 0) a.x_scales[row] = scale;
  unsigned char* out = a.out + (int64_t{row / 128} * a.n_slabs * 128 + row % 128) * 128;
  for (int piece = thread; piece < a.n_slabs * 8; piece += kThreads) {
    const int slab = piece / 8, within = piece % 8, step = within / 2, half = within % 2;
    uint32_t words[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float low = values[padded_at(slab * 64 + x_column(kOrder, step, half, t, 0))] * factor;
      const float high = values[padded_at(slab * 64 + x_column(kOrder, step, half, t, 1))] * factor;
      if constexpr (kBf16) words[t] = pack_bf16(__float2bfloat16_rn(low), __float2bfloat16_rn(high));
      else words[t] = halves_of(low, high);
    }
    *reinterpret_cast<uint4*>(out + int64_t{slab} * (128 * 128) + (within ^ row % 8) * 16) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <Format kFormat>
__device__ __forceinline__ void prepare_row_tile(const PrefillPrepareArgs& a, int row_tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane % 16;
  float bound = 0;
  if constexpr (has_row_powers(kFormat)) {
    const uint8_t* unit = a.weights + row_tile / a.row_warps * a.unit_bytes + a.stage_code_bytes;
#pragma unroll 4
    for (int column = lane / 16; column < a.n_column_tiles; column += 2) {
      const StageWarp at = stage_of_column(a.n_stages, a.k_warps, column);
      const int index = at.k * a.row_warps + row_tile % a.row_warps;
      bound = fmaxf(bound, tile_row_bound<kFormat>(
                               unit + at.stage * a.stage_bytes + index * tile_shape(kFormat).meta_bytes, row));
    }
    bound = fmaxf(bound, __shfl_xor_sync(kAllLanes, bound, 16));
  }
  if (lane >= 16) return;
  const int at = row_tile * kTileRows + row;
  const float own = a.weight_scales != nullptr ? a.weight_scales[at] : 1.0f;
  Power power = {1.0f, 1.0f};
  if (has_row_powers(kFormat)) power = power_of(bound);
  a.row_powers[at] = power.down;
  a.row_factors[at] = own * power.up * (1.0f / widened_unit(kFormat));
}

template <Format kFormat, int kThreads>
__global__ void __launch_bounds__(kThreads, 1536 / kThreads) prefill_prepare_kernel(PrefillPrepareArgs args) {
  extern __shared__ __align__(16) float row_values[];
  grid_wait();
  const int block = static_cast<int>(blockIdx.x),
            n_tile_blocks = (args.n_row_tiles + kThreads / 32 - 1) / (kThreads / 32);
  if (block >= n_tile_blocks) return prepare_row<kFormat, kThreads>(args, block - n_tile_blocks, row_values);
  const int row_tile = block * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  if (row_tile < args.n_row_tiles) prepare_row_tile<kFormat>(args, row_tile);
}

template <Format kFormat, int kThreads>
void launch_with(const PrefillPrepareArgs& args, const LaunchContext& context) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.padded_rows + ceil_div(args.n_row_tiles, kThreads / 32)));
  shape.block = dim3(kThreads);
  shape.shared_bytes = padded_at(args.n_slabs * 64) * static_cast<int>(sizeof(float));
  shape.name = "Linear, preparing rows";
  launch(context, shape, prefill_prepare_kernel<kFormat, kThreads>, args);
}
// Wide rows leave room for few blocks on a multiprocessor.
template <Format kFormat>
void launch_of(const PrefillPrepareArgs& args, const LaunchContext& context) {
  if (args.n_slabs <= 128) launch_with<kFormat, 256>(args, context);
  else launch_with<kFormat, 512>(args, context);
}

}  // namespace

void launch_prefill_prepare(Format format, const PrefillPrepareArgs& args, const LaunchContext& context) {
  switch (format) {
    case Format::kFp4G128: return launch_of<Format::kFp4G128>(args, context);
    case Format::kMxfp4: return launch_of<Format::kMxfp4>(args, context);
    case Format::kNvfp4: return launch_of<Format::kNvfp4>(args, context);
    case Format::kQ4_0: return launch_of<Format::kQ4_0>(args, context);
    case Format::kQ4_1: return launch_of<Format::kQ4_1>(args, context);
    case Format::kQ4_K: return launch_of<Format::kQ4_K>(args, context);
    case Format::kQ5_0: return launch_of<Format::kQ5_0>(args, context);
    case Format::kQ5_1: return launch_of<Format::kQ5_1>(args, context);
    case Format::kQ5_K: return launch_of<Format::kQ5_K>(args, context);
    case Format::kQ6_K: return launch_of<Format::kQ6_K>(args, context);
    case Format::kQ8_0: return launch_of<Format::kQ8_0>(args, context);
    case Format::kFp8: return launch_of<Format::kFp8>(args, context);
    case Format::kF16: return launch_of<Format::kF16>(args, context);
    case Format::kBf16: return launch_of<Format::kBf16>(args, context);
    default: BERYL_CHECK(false, "a format without tiles");
  }
}

}  // namespace beryl::cuda
