// Norms of whole rows: as a pass of its own before a matrix product of many rows (norm_rows), and between blocks
// (add_norm). One block a row (or a group of a row); everything stays in L2, so the time is latency: one round trip for
// the loads, two barriers for the sum, one round trip for the stores.
#include "base/error.h"
#include "cuda/device.cuh"
#include "cuda/kernels.h"
#include "cuda/row_math.cuh"

namespace beryl::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kHeld = 16;           // values a thread keeps in registers: rows up to kThreads · kHeld are read once

// 1 / sqrt(mean(x²) + eps) of `cols` values; the first kHeld of each thread stay in `held`.
__device__ float inverse_rms(const float* x, int64_t cols, float eps, float (&held)[kHeld], float* scratch) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = threadIdx.x + int64_t{i} * kThreads;
    held[i] = column < cols ? x[column] : 0.0f;
    sum = __fmaf_rn(held[i], held[i], sum);
  }
  for (int64_t column = threadIdx.x + int64_t{kHeld} * kThreads; column < cols; column += kThreads)
    sum = __fmaf_rn(x[column], x[column], sum);
  sum = block_sum(sum, scratch);
  return 1.0f / sqrtf(sum / static_cast<float>(cols) + eps);
}

__global__ void __launch_bounds__(kThreads) norm_rows_kernel(NormRowsArgs args) {
  __shared__ float scratch[32];
  grid_wait();
  const int64_t row = blockIdx.x;
  const float* x = args.x.values + row * args.x.stride;
  float held[kHeld];
  const float factor = args.normalise ? inverse_rms(x, args.cols, args.eps, held, scratch) : 1.0f;
  const int64_t end = args.high != nullptr ? args.padded_cols : args.cols;
  for (int64_t column = threadIdx.x; column < end; column += kThreads) {
    float value = 0;
    if (column < args.cols) {
      value = x[column];
      if (args.normalise) value = value * factor * (args.weight == nullptr ? 1.0f : __ldg(args.weight + column));
      if (args.out != nullptr) args.out[row * args.cols + column] = value;
    }
    if (args.high != nullptr) {
      const Bf16Pair pair = split_bf16(value);
      args.high[row * args.padded_cols + column] = __bfloat16_as_ushort(pair.high);
      args.low[row * args.padded_cols + column] = __bfloat16_as_ushort(pair.low);
    }
  }
}

// Sums and results exactly as where the decode kernel has this op within a Linear: there a row tile of 16 outputs comes with the sum of
// its squares and multiplied with the norm's weight, and a warp adds the sums (decode_finish.cuh, decode_linear_block.cuh: add_factor).
constexpr int kMaxSums = 8192;      // tiles of one norm

// The factor of the norm from the sums of its tiles, in every lane of a warp.
__device__ __forceinline__ float factor_of_tiles(const float* sums, int n_tiles, int lane, const AddNormArgs& args) {
  float sum = 0;
  for (int first = lane * 4; first < n_tiles; first += 128) {
    const float4 four = *reinterpret_cast<const float4*>(sums + first);
    sum = __fadd_rn(sum, __fadd_rn(__fadd_rn(four.x, four.y), __fadd_rn(four.z, four.w)));
  }
  return rsqrtf(__fmaf_rn(lane_sum(sum), 1.0f / static_cast<float>(args.group), args.eps));
}
__device__ __forceinline__ float weighted(float value, float weight) { return __uint_as_float(round_result(__fmul_rn(value, weight))); }

__global__ void __launch_bounds__(kThreads) add_norm_kernel(AddNormArgs args) {
  __shared__ __align__(16) float sums[kMaxSums];
  grid_wait();
  const int64_t row = blockIdx.y, first = blockIdx.x * args.group;
  const float* y = args.y.values + row * args.y.stride + first;
  const float* base = args.base.values == nullptr ? nullptr : args.base.values + row * args.base.stride + first;
  float* out = args.out.values + row * args.out.stride + first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_tiles = static_cast<int>((args.group + kTileRows - 1) / kTileRows);
  float factor = 1.0f;
  if (args.normalise) {
    for (int tile = static_cast<int>(threadIdx.x) / kTileRows; tile < (n_tiles + 1) / 2 * 2; tile += kThreads / kTileRows) {
      const int64_t column = int64_t{tile} * kTileRows + lane % kTileRows;
      const float x = column < args.group ? y[column] : 0.0f;
      float sum = __fmul_rn(x, x);
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAllLanes, sum, offset));
      if (lane % kTileRows == 0) sums[tile] = __uint_as_float(round_result(sum));
    }
    if (warp == 0)
      for (int i = (n_tiles + 1) / 2 * 2 + lane; i < (n_tiles + 3) / 4 * 4; i += 32) sums[i] = 0;
    __syncthreads();
    factor = factor_of_tiles(sums, n_tiles, lane, args);
  }
  for (int64_t column = threadIdx.x; column < args.group; column += kThreads) {
    float value = y[column];
    if (args.normalise) {
      if (args.weight != nullptr) value = weighted(value, __ldg(args.weight + column));
      value = __fmul_rn(value, factor);
    }
    out[column] = __fmul_rn(__fadd_rn(base == nullptr ? 0.0f : base[column], value), args.scale);
  }
}

// The same, bit for bit, for rows that can be read 16 bytes at a time and fit into registers: read once, the residual too, before
// the norm is known. kGroups: of 128 columns, of a warp.
constexpr int kQuadThreads = 256, kMaxQuadGroups = 8;

// The sums of squares of a warp's 8 tiles of 16 columns, each in its four lanes; a lane has 4 neighbouring columns.
__device__ __forceinline__ float tile_squares(float4 x) {
  float4 squares = times(x, x);
#pragma unroll
  for (int offset = 2; offset > 0; offset /= 2)
    squares = plus(squares, make_float4(__shfl_xor_sync(kAllLanes, squares.x, offset), __shfl_xor_sync(kAllLanes, squares.y, offset),
                                        __shfl_xor_sync(kAllLanes, squares.z, offset), __shfl_xor_sync(kAllLanes, squares.w, offset)));
  return __fadd_rn(__fadd_rn(squares.x, squares.z), __fadd_rn(squares.y, squares.w));
}
template <int kGroups>
__global__ void __launch_bounds__(kQuadThreads) add_norm_quads_kernel(AddNormArgs args) {
  __shared__ __align__(16) float sums[kGroups * kQuadThreads / 32 * 8];
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_groups = static_cast<int>(args.group) / 128;
  const int64_t first = blockIdx.x * args.group + warp * 128 + lane * 4;
  const float* y = args.y.values + blockIdx.y * args.y.stride + first;
  const float* base = args.base.values == nullptr ? nullptr : args.base.values + blockIdx.y * args.base.stride + first;
  constexpr int kStep = kQuadThreads / 32 * 128;   // columns
  float4 held[kGroups], residual[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
    if (warp + i * (kQuadThreads / 32) < n_groups) {
      held[i] = __ldcg(reinterpret_cast<const float4*>(y + i * kStep));
      residual[i] = make_float4(0, 0, 0, 0);
      if (base != nullptr) residual[i] = __ldcg(reinterpret_cast<const float4*>(base + i * kStep));
    }
  float factor = 1.0f;
  if (args.normalise) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int group = warp + i * (kQuadThreads / 32);
      if (group >= n_groups) break;
      const float sum = tile_squares(held[i]);
      if (lane % 4 == 0) sums[group * 8 + lane / 4] = __uint_as_float(round_result(sum));
    }
    __syncthreads();
    factor = factor_of_tiles(sums, n_groups * 8, lane, args);
  }
  float* out = args.out.values + blockIdx.y * args.out.stride + first;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (warp + i * (kQuadThreads / 32) >= n_groups) break;
    float4 value = held[i];
    if (args.normalise) {
      if (args.weight != nullptr) {
        const float4 weight = load_weight4(args.weight, warp * 128 + lane * 4 + i * kStep);
        value = make_float4(weighted(value.x, weight.x), weighted(value.y, weight.y), weighted(value.z, weight.z), weighted(value.w, weight.w));
      }
      value = times(value, factor);
    }
    *reinterpret_cast<float4*>(out + i * kStep) = times(plus(residual[i], value), args.scale);
  }
}

bool has_quads(RowsView rows) { return reinterpret_cast<uintptr_t>(rows.values) % 16 == 0 && rows.stride % 4 == 0; }

}  // namespace

void launch_norm_rows(const LaunchContext& context, const NormRowsArgs& args, int64_t n_rows) {
  launch(context, {.grid = static_cast<unsigned>(n_rows), .block = kThreads, .name = "norm of rows"}, norm_rows_kernel, args);
}

void launch_add_norm(const LaunchContext& context, const AddNormArgs& args, int64_t n_rows) {
  BERYL_CHECK(args.group <= int64_t{kMaxSums} * kTileRows, "a norm of up to 131,072 columns");
  const auto groups = static_cast<unsigned>(args.cols / args.group);
  const int64_t warp_groups = (args.group / 128 + kQuadThreads / 32 - 1) / (kQuadThreads / 32);
  if (args.group % 128 == 0 && warp_groups <= kMaxQuadGroups && has_quads(args.y) && has_quads(args.base) && has_quads(args.out) &&
      reinterpret_cast<uintptr_t>(args.weight) % 16 == 0) {
    const LaunchShape shape = {.grid = {groups, static_cast<unsigned>(n_rows)}, .block = kQuadThreads, .name = "AddNorm"};
    if (warp_groups <= 2) launch(context, shape, add_norm_quads_kernel<2>, args);
    else if (warp_groups <= 4) launch(context, shape, add_norm_quads_kernel<4>, args);
    else launch(context, shape, add_norm_quads_kernel<kMaxQuadGroups>, args);
    return;
  }
  launch(context, {.grid = {groups, static_cast<unsigned>(n_rows)}, .block = kThreads, .name = "AddNorm"}, add_norm_kernel,
         args);
}

}  // namespace beryl::cuda
