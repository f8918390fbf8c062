// y = epilogue(x · Wᵀ) for many rows, on tensor cores, where prefill_linear.h does not go (other GPUs than Hopper, weights that are
// not packed): weights are first expanded into a panel of bf16 pairs
// (high + low, 16 bits of mantissa), x is such a pair too, and three products (high·high, high·low, low·high) give sums
// that are nearly those of f32.
//
// A block makes 64 rows x 128 outputs; 8 warps of 32 x 32; three stages of 32 columns by cp.async. The order of each sum
// depends on the columns alone.
#include "cuda/kernels.h"
#include "cuda/plain_codec.cuh"
#include "cuda/plain_linear.cuh"

namespace beryl::cuda {

namespace {

template <PlainCodes kKind>
__global__ void __launch_bounds__(128) plain_panel_kernel(PlainPanelArgs args) {
  grid_wait();
  const int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 8;
  if (column >= args.panel_cols) return;
  const int64_t row = blockIdx.y;
  float w[8] = {};
  if (column < args.weight.padded_cols)
    load_weights8<kKind>(args.weight, plain_row(args.weight, args.row_begin + row), column, w);
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Bf16Pair a = split_bf16(w[2 * i] * args.weight.tensor_scale);
    const Bf16Pair b = split_bf16(w[2 * i + 1] * args.weight.tensor_scale);
    high[i] = pack_bf16(a.high, b.high);
    low[i] = pack_bf16(a.low, b.low);
  }
  const int64_t at = row * args.panel_cols + column;
  *reinterpret_cast<uint4*>(args.high + at) = make_uint4(high[0], high[1], high[2], high[3]);
  *reinterpret_cast<uint4*>(args.low + at) = make_uint4(low[0], low[1], low[2], low[3]);
}

constexpr int kBlockRows = 64, kBlockOutputs = 128, kStages = 3, kThreads = 256;
constexpr int kRowBytes = kGemmColumns * 2;                                  // of one plane in shared memory
constexpr int kPlaneRows = kBlockRows + kBlockOutputs;
constexpr int kStageBytes = kPlaneRows * kRowBytes * 2;                      // high and low
constexpr int kChunks = kRowBytes / 16;

// Byte offset of a 16-byte chunk of a plane's row, permuted so that eight rows' equal chunks lie in different banks.
__device__ __forceinline__ int chunk_offset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ (row >> 1 & 3)) * 16);
}

__global__ void __launch_bounds__(kThreads) gemm_kernel(GemmArgs args) {
  extern __shared__ __align__(128) uint8_t shared[];
  grid_wait();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_row = int64_t{blockIdx.x} * kBlockRows, first_output = int64_t{blockIdx.y} * kBlockOutputs;
  const uint32_t base = shared_address(shared);
  const int n_steps = static_cast<int>(args.cols / kGemmColumns);

  const auto load_stage = [&](int step) {
    const uint32_t stage = base + static_cast<uint32_t>(step % kStages * kStageBytes);
    for (int i = threadIdx.x; i < 2 * kPlaneRows * kChunks; i += kThreads) {
      const int plane = i / (kPlaneRows * kChunks), row = i / kChunks % kPlaneRows, chunk = i % kChunks;
      const bool is_x = row < kBlockRows;
      const int64_t index = is_x ? first_row + row : first_output + row - kBlockRows;
      const bool live = index < (is_x ? args.n_rows : args.n_outputs);
      const uint16_t* from = is_x ? (plane == 0 ? args.x_high : args.x_low) : (plane == 0 ? args.w_high : args.w_low);
      copy16_async(stage + static_cast<uint32_t>(plane * kPlaneRows * kRowBytes + chunk_offset(row, chunk)),
                   from + (live ? index * args.cols : 0) + int64_t{step} * kGemmColumns + chunk * 8, live ? 16 : 0);
    }
  };

  float sums[2][4][4] = {};
  const int warp_row = warp % 2 * 32, warp_output = warp / 2 * 32;
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < n_steps) load_stage(step);
    commit_copies();
  }
  for (int step = 0; step < n_steps; ++step) {
    wait_copies<kStages - 2>();
    __syncthreads();
    if (step + kStages - 1 < n_steps) load_stage(step + kStages - 1);
    commit_copies();
    const uint32_t stage = base + static_cast<uint32_t>(step % kStages * kStageBytes);
#pragma unroll
    for (int k = 0; k < kGemmColumns / 16; ++k) {
      uint32_t a[2][2][4], b[2][2][4];    // [plane][tile of 16][registers]
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const uint32_t plane_base = stage + static_cast<uint32_t>(plane * kPlaneRows * kRowBytes);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          load_matrices(a[plane][tile], plane_base + static_cast<uint32_t>(chunk_offset(
                                                         warp_row + tile * 16 + lane % 16, k * 2 + lane / 16)));
          load_matrices(b[plane][tile],
                        plane_base + static_cast<uint32_t>(chunk_offset(
                                         kBlockRows + warp_output + tile * 16 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2)));
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint32_t* high = b[0][n / 2] + n % 2 * 2;
          const uint32_t* low = b[1][n / 2] + n % 2 * 2;
          mma_bf16(sums[m][n], a[1][m], high[0], high[1]);
          mma_bf16(sums[m][n], a[0][m], low[0], low[1]);
          mma_bf16(sums[m][n], a[0][m], high[0], high[1]);
        }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = first_row + warp_row + m * 16 + lane / 4 + i / 2 * 8;
        const int64_t output = first_output + warp_output + n * 8 + lane % 4 * 2 + i % 2;
        if (row >= args.n_rows || output >= args.n_outputs) continue;
        const float other = args.other.values == nullptr ? 0.0f : args.other.values[row * args.other.stride + output];
        args.y.values[row * args.y.stride + output] = plain_epilogue(args.epilogue, sums[m][n][i], other, args.softcap);
      }
}

}  // namespace

void launch_plain_panel(const LaunchContext& context, const PlainPanelArgs& args) {
  const auto blocks = static_cast<unsigned>((args.panel_cols + 1023) / 1024);
  with_plain_codes(args.weight.kind, [&]<PlainCodes kKind>() {
    launch(context, {.grid = {blocks, static_cast<unsigned>(args.n_rows)}, .block = 128, .name = "Linear, expanding weights"},
           plain_panel_kernel<kKind>, args);
  });
}

void launch_gemm(const LaunchContext& context, const GemmArgs& args) {
  const auto row_tiles = static_cast<unsigned>((args.n_rows + kBlockRows - 1) / kBlockRows);
  const auto output_tiles = static_cast<unsigned>((args.n_outputs + kBlockOutputs - 1) / kBlockOutputs);
  launch(context,
         {.grid = {row_tiles, output_tiles}, .block = kThreads, .shared_bytes = kStages * kStageBytes, .name = "Linear"},
         gemm_kernel, args);
}

}  // namespace beryl::cuda
