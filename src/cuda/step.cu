// The small ops that move rows, pages and inputs: GatherRows, CopyPages, Advance, and the tables of cosines and sines
// that a step's positions ask for.
#include "cuda/kernels.h"
#include "cuda/next_step.cuh"

namespace beryl::cuda {

namespace {

__global__ void __launch_bounds__(256) gather_rows_kernel(GatherRowsArgs args) {
  grid_wait();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (column >= args.cols) return;
  args.out.values[row * args.out.stride + column] = args.x.values[args.output_rows[row] * args.x.stride + column];
}

__global__ void __launch_bounds__(128) turn_ropes_kernel(TurnRopesArgs args) {
  grid_wait();
  turn_rope(args, static_cast<int>(blockIdx.y), blockIdx.x, args.positions[blockIdx.x]);
}

// A thread always handles the same bytes of a page, so copies that build on each other run in the order given.
__global__ void __launch_bounds__(256) copy_pages_kernel(CopyPagesArgs args) {
  grid_wait();
  const int64_t words = args.page_bytes / 16;
  for (int i = 0; i < args.n_copies; ++i) {
    const int32_t* copy = args.copies + 3 * i;
    if (copy[0] != args.group) continue;
    const uint4* from = args.pool + copy[1] * words;
    uint4* to = args.pool + copy[2] * words;
    for (int64_t word = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; word < words; word += int64_t{gridDim.x} * blockDim.x)
      to[word] = from[word];
  }
}

// A block a row.
__global__ void __launch_bounds__(256) advance_kernel(AdvanceArgs args) {
  grid_wait();
  const int64_t row = blockIdx.x;
  const int32_t next = args.positions[row] + 1;
  __syncthreads();
  if (threadIdx.x == 0) advance_row(args, row, args.sampled[row].valid != 0, args.sampled[row].id);
  for (int rope = 0; rope < args.ropes.n_ropes; ++rope) turn_rope(args.ropes, rope, row, next);
}

struct NothingArgs {};
__global__ void nothing_kernel(NothingArgs) { grid_wait(); }

}  // namespace

void launch_gather_rows(const LaunchContext& context, const GatherRowsArgs& args, int64_t n_outputs) {
  const auto blocks = static_cast<unsigned>((args.cols + 255) / 256);
  launch(context, {.grid = {blocks, static_cast<unsigned>(n_outputs)}, .block = 256, .name = "GatherRows"},
         gather_rows_kernel, args);
}

void launch_turn_ropes(const LaunchContext& context, const TurnRopesArgs& args, int64_t n_tokens) {
  launch(context,
         {.grid = {static_cast<unsigned>(n_tokens), static_cast<unsigned>(args.n_ropes)}, .block = 128, .name = "rope tables"},
         turn_ropes_kernel, args);
}

void launch_copy_pages(const LaunchContext& context, const CopyPagesArgs& args) {
  launch(context, {.grid = 32, .block = 256, .name = "CopyPages"}, copy_pages_kernel, args);
}

void launch_advance(const LaunchContext& context, const AdvanceArgs& args) {
  launch(context, {.grid = static_cast<unsigned>(args.n_outputs), .block = 256, .name = "Advance"}, advance_kernel, args);
}

bool has_programmatic_code() {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, advance_kernel), "reading its code");
  return attributes.ptxVersion >= 90;
}

bool has_programmatic_grids() {
  try {
    launch(LaunchContext{nullptr, true, true}, {.grid = 1, .block = 32, .cooperative = true, .name = "a dependent cooperative launch"}, nothing_kernel,
           NothingArgs{});
  } catch (const Error&) {
    cudaGetLastError();               // it is no error of what comes next
    return false;
  }
  return true;
}

}  // namespace beryl::cuda
