// y[t][r] = epilogue(W[r] · x[t]) from the plain layout: the path of matrices that are not packed.
//
// A warp owns a row of W and kRows rows of x; a lane reads 8 weights at a time. The order of each sum depends on the
// columns alone, so a row's bits are the same in any batch. Moves W once for every kRows rows of x.
#include "cuda/kernels.h"
#include "cuda/plain_codec.cuh"
#include "cuda/plain_linear.cuh"

namespace beryl::cuda {

namespace {

constexpr int kWarps = 8;

template <PlainCodes kKind, int kRows>
__global__ void __launch_bounds__(kWarps * 32) plain_linear_kernel(PlainLinearArgs args) {
  grid_wait();
  const int lane = threadIdx.x % 32;
  const int64_t output = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (output >= args.weight.rows) return;
  const int64_t first = int64_t{blockIdx.y} * kRows;
  int64_t rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = min(first + r, args.n_rows - 1);   // a spare row repeats the last
  float sums[kRows];
  dot_rows<kKind, kRows>(args.weight, output, args.x, rows, sums);
  if (lane != 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r >= args.n_rows) break;
    const float other = args.other.values == nullptr ? 0.0f : args.other.values[rows[r] * args.other.stride + output];
    args.y.values[rows[r] * args.y.stride + output] =
        plain_epilogue(args.epilogue, sums[r] * args.weight.tensor_scale, other, args.softcap);
  }
}

}  // namespace

void launch_plain_linear(const LaunchContext& context, const PlainLinearArgs& args) {
  const auto blocks = static_cast<unsigned>((args.weight.rows + kWarps - 1) / kWarps);
  with_plain_codes(args.weight.kind, [&]<PlainCodes kKind>() {
    if (args.n_rows == 1) {
      launch(context, {.grid = {blocks, 1}, .block = kWarps * 32, .name = "Linear"}, plain_linear_kernel<kKind, 1>, args);
    } else {
      const auto batches = static_cast<unsigned>((args.n_rows + 7) / 8);
      launch(context, {.grid = {blocks, batches}, .block = kWarps * 32, .name = "Linear"}, plain_linear_kernel<kKind, 8>,
             args);
    }
  });
}

}  // namespace beryl::cuda
