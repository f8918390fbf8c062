// Route and Experts: the gate's top k, pairs (token, k) grouped by expert, grouped linear layers, the weighted sum.
//
// An expert's matrix is read once for eight of its pairs. Every sum has a fixed order (columns, then k), so a token's
// result does not depend on who shares its experts.
#include "cuda/kernels.h"
#include "cuda/plain_codec.cuh"
#include "cuda/plain_linear.cuh"

namespace beryl::cuda {

namespace {

constexpr int kWarps = 8;

// A warp a token: softmax over all experts, then top_k times the largest that is left (ties: the lower index).
__global__ void __launch_bounds__(32) route_select_kernel(RouteSelectArgs args) {
  __shared__ float left[kMaxExperts];
  __shared__ float chosen[kMaxExperts];
  __shared__ int chosen_expert[kMaxExperts];
  grid_wait();
  const int lane = threadIdx.x;
  const int64_t token = blockIdx.x;
  const float* logits = args.logits.values + token * args.logits.stride;
  float largest = -INFINITY;
  for (int e = lane; e < args.n_experts; e += 32) {
    left[e] = logits[e];
    largest = fmaxf(largest, left[e]);
  }
  largest = lane_max(largest);
  __syncwarp();
  float sum = 0;
  for (int k = 0; k < args.top_k; ++k) {
    float best = -INFINITY;
    int best_expert = args.n_experts;
    for (int e = lane; e < args.n_experts; e += 32)
      if (best_expert == args.n_experts || left[e] > best) {
        // NaN scores count as -infinity, so that every round finds an expert.
        best = isnan(left[e]) ? -INFINITY : left[e];
        best_expert = e;
      }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, offset);
      const int other_expert = __shfl_xor_sync(kAllLanes, best_expert, offset);
      if (other_expert < args.n_experts &&
          (best_expert == args.n_experts || other > best || (other == best && other_expert < best_expert))) {
        best = other;
        best_expert = other_expert;
      }
    }
    // The softmax's own sum cancels in g, so only the kept ones are summed.
    const float weight = expf(logits[best_expert] - largest);
    sum += weight;
    if (lane == 0) {
      left[best_expert] = -INFINITY;
      chosen[k] = weight;
      chosen_expert[k] = best_expert;
    }
    __syncwarp();
  }
  float* routes = args.routes.values + token * args.routes.stride;
  for (int k = lane; k < args.top_k; k += 32) {
    const int expert = chosen_expert[k];
    routes[k] = static_cast<float>(expert);
    routes[args.top_k + k] = chosen[k] / sum * (args.expert_scale == nullptr ? 1.0f : args.expert_scale[expert]);
  }
}

// One block: a counting sort that keeps the order of pairs within an expert; thread e gathers expert e's.
__global__ void __launch_bounds__(kMaxExperts) route_group_kernel(RouteGroupArgs args) {
  __shared__ int count[kMaxExperts];
  __shared__ int begin[kMaxExperts + 1];
  __shared__ int tile[kMaxExperts];
  grid_wait();
  const int expert = threadIdx.x;
  count[expert] = 0;
  __syncthreads();
  const auto expert_of = [&](int64_t pair) {
    return static_cast<int>(args.routes.values[pair / args.top_k * args.routes.stride + pair % args.top_k]);
  };
  for (int64_t pair = threadIdx.x; pair < args.n_pairs; pair += blockDim.x) atomicAdd(&count[expert_of(pair)], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0, n_active = 0;
    for (int e = 0; e < args.n_experts; ++e) {
      begin[e] = sum;
      sum += count[e];
      if (count[e] > 0) args.active[n_active++] = e;
    }
    begin[args.n_experts] = sum;
    for (; n_active < args.n_experts; ++n_active) args.active[n_active] = -1;
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= args.n_experts; e += blockDim.x) args.begin[e] = begin[e];
  int next = expert < args.n_experts ? begin[expert] : 0;
  for (int64_t first = 0; first < args.n_pairs; first += blockDim.x) {
    __syncthreads();
    const int64_t mine = first + threadIdx.x;
    tile[threadIdx.x] = mine < args.n_pairs ? expert_of(mine) : -1;
    __syncthreads();
    if (expert < args.n_experts)
      for (int i = 0; i < blockDim.x && first + i < args.n_pairs; ++i)
        if (tile[i] == expert) args.pairs[next++] = static_cast<int32_t>(first + i);
  }
}

template <PlainCodes kKind, int kRows>
__device__ __forceinline__ void expert_rows(const ExpertLinearArgs& args, int64_t row, int64_t output, int begin, int end) {
  int64_t pairs[kRows], x_rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    pairs[r] = args.pairs[min(begin + r, end - 1)];
    x_rows[r] = pairs[r] / args.x_divisor;
  }
  float sums[kRows];
  dot_rows<kKind, kRows>(args.weight, row, args.x, x_rows, sums);
  if (threadIdx.x % 32 != 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (begin + r >= end) break;
    const float other = args.other.values == nullptr ? 0.0f : args.other.values[pairs[r] * args.other.stride + output];
    args.y.values[pairs[r] * args.y.stride + output] =
        plain_epilogue(args.epilogue, sums[r] * args.weight.tensor_scale, other, 0.0f);
  }
}

template <PlainCodes kKind>
__global__ void __launch_bounds__(kWarps * 32) expert_linear_kernel(ExpertLinearArgs args) {
  grid_wait();
  const int expert = args.active[blockIdx.y];
  if (expert < 0) return;
  const int64_t output = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (output >= args.weight.rows) return;
  const int64_t row = expert * args.weight.rows + output;
  const int begin = args.begin[expert], end = args.begin[expert + 1];
  if (end - begin == 1) {
    expert_rows<kKind, 1>(args, row, output, begin, end);
  } else {
    for (int i = begin; i < end; i += 8) expert_rows<kKind, 8>(args, row, output, i, end);
  }
}

__global__ void __launch_bounds__(256) expert_combine_kernel(ExpertCombineArgs args) {
  grid_wait();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (column >= args.cols) return;
  const float* routes = args.routes.values + token * args.routes.stride;
  float sum = 0;
  for (int k = 0; k < args.top_k; ++k)
    sum = __fmaf_rn(routes[args.top_k + k], args.values[(token * args.top_k + k) * args.cols + column], sum);
  args.y.values[token * args.y.stride + column] = sum;
}

}  // namespace

void launch_route_select(const LaunchContext& context, const RouteSelectArgs& args, int64_t n_tokens) {
  launch(context, {.grid = static_cast<unsigned>(n_tokens), .block = 32, .name = "Route"}, route_select_kernel, args);
}

void launch_route_group(const LaunchContext& context, const RouteGroupArgs& args) {
  const int threads = (args.n_experts + 31) / 32 * 32;
  launch(context, {.grid = 1, .block = static_cast<unsigned>(threads), .name = "Experts, grouping"}, route_group_kernel, args);
}

void launch_expert_linear(const LaunchContext& context, const ExpertLinearArgs& args) {
  const auto blocks = static_cast<unsigned>((args.weight.rows + kWarps - 1) / kWarps);
  with_plain_codes(args.weight.kind, [&]<PlainCodes kKind>() {
    launch(context, {.grid = {blocks, static_cast<unsigned>(args.max_active)}, .block = kWarps * 32, .name = "Experts"},
           expert_linear_kernel<kKind>, args);
  });
}

void launch_expert_combine(const LaunchContext& context, const ExpertCombineArgs& args, int64_t n_tokens) {
  const auto blocks = static_cast<unsigned>((args.cols + 255) / 256);
  launch(context, {.grid = {blocks, static_cast<unsigned>(n_tokens)}, .block = 256, .name = "Experts, sum"},
         expert_combine_kernel, args);
}

}  // namespace beryl::cuda
