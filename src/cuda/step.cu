// The small ops that move rows, pages and inputs: GatherRows, CopyPages, Advance, and the tables of cosines and sines
// that a step's positions ask for.
#include "cuda/device.cuh"
#include "cuda/kernels.h"

namespace beryl::cuda {

namespace {

__global__ void __launch_bounds__(256) gather_rows_kernel(GatherRowsArgs args) {
  grid_wait();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (column >= args.cols) return;
  args.out.values[row * args.out.stride + column] = args.x.values[args.output_rows[row] * args.x.stride + column];
}

// Angles reach 262,144 radians and more, so the product and the reduction are in double; only the results are rounded.
__global__ void __launch_bounds__(128) turn_ropes_kernel(TurnRopesArgs args) {
  grid_wait();
  const int64_t token = blockIdx.x;
  const int rope = blockIdx.y, n_pairs = args.n_pairs[rope];
  float* table = args.tables[rope] + token * 2 * n_pairs;
  for (int pair = threadIdx.x; pair < n_pairs; pair += blockDim.x) {
    double sine, cosine;
    sincos(args.positions[token] * args.frequencies[rope][pair], &sine, &cosine);
    table[pair] = static_cast<float>(cosine);
    table[n_pairs + pair] = static_cast<float>(sine);
  }
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

__global__ void advance_kernel(AdvanceArgs args) {
  grid_wait();
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= args.n_outputs) return;
  if (args.sampled[row].valid != 0) args.ids[row] = args.sampled[row].id;
  args.positions[row] += 1;
  args.sampling[row].draw += 1;
}

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
  const auto blocks = static_cast<unsigned>((args.n_outputs + 127) / 128);
  launch(context, {.grid = blocks, .block = 128, .name = "Advance"}, advance_kernel, args);
}

bool has_programmatic_code() {
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, advance_kernel), "reading its code");
  return attributes.ptxVersion >= 90;
}

}  // namespace beryl::cuda
