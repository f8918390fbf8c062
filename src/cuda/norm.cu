// Norms of whole rows: as a pass of its own before a matrix product of many rows (norm_rows), and between blocks
// (add_norm). One block a row (or a group of a row); everything stays in L2, so the time is latency: one round trip for
// the loads, two barriers for the sum, one round trip for the stores.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

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

__global__ void __launch_bounds__(kThreads) add_norm_kernel(AddNormArgs args) {
  __shared__ float scratch[32];
  const int64_t row = blockIdx.y, first = blockIdx.x * args.group;
  const float* y = args.y.values + row * args.y.stride + first;
  const float* base = args.base.values == nullptr ? nullptr : args.base.values + row * args.base.stride + first;
  float* out = args.out.values + row * args.out.stride + first;
  // Norm weights depend on nothing, so they are fetched before the wait.
  float weight[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = threadIdx.x + int64_t{i} * kThreads;
    weight[i] = args.normalise && args.weight != nullptr && column < args.group ? __ldg(args.weight + column) : 1.0f;
  }
  grid_wait();
  float held[kHeld], held_base[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = threadIdx.x + int64_t{i} * kThreads;
    held_base[i] = base != nullptr && column < args.group ? base[column] : 0.0f;
    if (!args.normalise) held[i] = column < args.group ? y[column] : 0.0f;
  }
  const float factor = args.normalise ? inverse_rms(y, args.group, args.eps, held, scratch) : 1.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int64_t column = threadIdx.x + int64_t{i} * kThreads;
    if (column < args.group) {
      const float value = args.normalise ? held[i] * factor * weight[i] : held[i];
      out[column] = (held_base[i] + value) * args.scale;
    }
  }
  for (int64_t column = threadIdx.x + int64_t{kHeld} * kThreads; column < args.group; column += kThreads) {
    float value = y[column];
    if (args.normalise) value = value * factor * (args.weight == nullptr ? 1.0f : __ldg(args.weight + column));
    out[column] = ((base == nullptr ? 0.0f : base[column]) + value) * args.scale;
  }
}

}  // namespace

void launch_norm_rows(const LaunchContext& context, const NormRowsArgs& args, int64_t n_rows) {
  launch(context, {.grid = static_cast<unsigned>(n_rows), .block = kThreads, .name = "norm of rows"}, norm_rows_kernel, args);
}

void launch_add_norm(const LaunchContext& context, const AddNormArgs& args, int64_t n_rows) {
  const auto groups = static_cast<unsigned>(args.cols / args.group);
  launch(context, {.grid = {groups, static_cast<unsigned>(n_rows)}, .block = kThreads, .name = "AddNorm"}, add_norm_kernel,
         args);
}

}  // namespace beryl::cuda
