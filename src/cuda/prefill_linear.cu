// Launches the product of many rows: from a plan and the op to the kernels' arguments.
#include "cuda/prefill_linear.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/index_math.h"
#include "cuda/prefill_kernel.cuh"
#include "cuda/prefill_prepare.h"

namespace beryl::cuda {

namespace {

constexpr int64_t kAlignment = 1024;
constexpr int kHeadStart = 1000;  // cycles: about a column tile

PrefillKernels find_kernels(Format format) {
  for (auto* family : {prefill_e2m1_kernels, prefill_integer_kernels, prefill_k_kernels, prefill_float_kernels}) {
    const PrefillKernels kernels = family(format);
    if (kernels.kernels[0].kernel != nullptr) return kernels;
  }
  BERYL_CHECK(false, "a format without prefill kernels");
  return {};
}

// Which architecture's code the device has taken: only sm_90a's has a body.
__global__ void probe_kernel(int* has_code) { *has_code = BERYL_WGMMA; }

struct ScratchLayout {
  int64_t x, x_scales, row_powers, row_factors, end;  // bytes
};
ScratchLayout scratch_layout(const MatvecPlan& plan, int64_t n_rows) {
  const int64_t padded = round_up(n_rows, kPrefillBlockTokens), rows = int64_t{plan.n_row_tiles} * kTileRows;
  const int64_t n_slabs = int64_t{plan.n_column_tiles} * (tile_shape(plan.format).columns / 64);
  ScratchLayout layout = {};
  layout.x = 0;
  layout.x_scales = layout.x + padded * n_slabs * 128;
  layout.row_powers = layout.x_scales + padded * 4;
  layout.row_factors = layout.row_powers + round_up(rows * 4, 128);
  layout.end = round_up(layout.row_factors + rows * 4, kAlignment);
  return layout;
}

// The cost of a product with this kernel, in tiles of 128 x 128 one after the other. Where a tile of W is widened for
// fewer tokens, or x read for fewer rows, they cost more each; but small tiles give more multiprocessors something to do.
double cost(const MatvecPlan& plan, int n_rows, const PrefillKernel& kernel, int n_sms) {
  const int tiles = ceil_div(plan.n_row_tiles, kPrefillRowTiles * kernel.cluster) * ceil_div(n_rows, kernel.tokens);
  const double dearer = kernel.tokens == 256 ? 1.0 : kernel.tokens == 128 ? 1.15 : 1.35;
  return ceil_div(tiles, n_sms / kernel.cluster) * (kernel.tokens / 128.0) * dearer;
}

}  // namespace

bool has_prefill_linear() {
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "asking for the device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "reading its properties");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "reading its properties");
  if (major != 9 || minor != 0) return false;
  // The same fat binary may lack sm_90a and bring sm_80's code through PTX.
  void* memory = nullptr;
  check(cudaMalloc(&memory, sizeof(int)), "asking for code");
  const DevicePtr flag(memory);
  probe_kernel<<<1, 1>>>(static_cast<int*>(memory));
  int has_code = 0;
  check(cudaGetLastError(), "asking for code");
  check(cudaMemcpy(&has_code, memory, sizeof(int), cudaMemcpyDeviceToHost), "asking for code");
  return has_code != 0;
}

int64_t prefill_scratch_bytes(const MatvecPlan& plan, int64_t n_rows) { return scratch_layout(plan, n_rows).end; }

void prepare_prefill_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const LaunchContext& context) {
  BERYL_CHECK(args.n_rows >= 1, "a linear layer has rows");
  auto* scratch = static_cast<unsigned char*>(args.scratch);
  const ScratchLayout layout = scratch_layout(plan, args.n_rows);
  PrefillPrepareArgs prepare = {};
  prepare.x = args.x;
  prepare.norm_weight = args.norm_weight;
  prepare.norm_eps = args.norm_eps;
  prepare.has_norm = args.has_norm;
  prepare.n_rows = args.n_rows;
  prepare.padded_rows = static_cast<int>(round_up(args.n_rows, kPrefillBlockTokens));
  prepare.cols = static_cast<int>(plan.cols);
  prepare.n_slabs = plan.n_column_tiles * (tile_shape(plan.format).columns / 64);
  prepare.out = scratch + layout.x;
  prepare.x_scales = reinterpret_cast<float*>(scratch + layout.x_scales);
  prepare.weights = args.weights;
  prepare.weight_scales =
      plan.scales_offset != 0 ? reinterpret_cast<const float*>(args.weights + plan.scales_offset) : nullptr;
  prepare.unit_bytes = plan.unit_bytes;
  prepare.stage_bytes = plan.stage_bytes;
  prepare.stage_code_bytes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  prepare.k_warps = plan.k_warps;
  prepare.row_warps = plan.row_warps;
  prepare.n_stages = plan.n_stages;
  prepare.n_column_tiles = plan.n_column_tiles;
  prepare.n_row_tiles = plan.n_row_tiles;
  prepare.row_powers = reinterpret_cast<float*>(scratch + layout.row_powers);
  prepare.row_factors = reinterpret_cast<float*>(scratch + layout.row_factors);
  launch_prefill_prepare(plan.format, prepare, context);
}

void launch_prefill_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const MatvecDevice& device,
                           const LaunchContext& context, PrefillTuning tuning) {
  const bool gated = args.epilogue == DecodeEpilogue::kGatedGelu || args.epilogue == DecodeEpilogue::kGatedSilu;
  BERYL_CHECK(gated == plan.gated, "gated epilogues go with gated plans");
  prepare_prefill_linear(plan, args, context);

  auto* scratch = static_cast<unsigned char*>(args.scratch);
  const ScratchLayout layout = scratch_layout(plan, args.n_rows);
  const PrefillKernels kernels = find_kernels(plan.format);
  PrefillKernel kernel = kernels.kernels[0];
  for (const PrefillKernel& other : kernels.kernels) {
    const bool cheaper = cost(plan, args.n_rows, other, device.n_sms) < cost(plan, args.n_rows, kernel, device.n_sms);
    if (tuning.tokens == 0 ? cheaper : other.tokens == tuning.tokens) kernel = other;
  }
  PrefillKernelArgs product = {};
  product.weights = args.weights;
  product.unit_bytes = plan.unit_bytes;
  product.stage_bytes = plan.stage_bytes;
  product.stage_code_bytes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  product.k_warps = plan.k_warps;
  product.row_warps = plan.row_warps;
  product.n_stages = plan.n_stages;
  product.n_column_tiles = plan.n_column_tiles;
  product.n_row_tiles = plan.n_row_tiles;
  product.x = scratch + layout.x;
  product.x_scales = reinterpret_cast<const float*>(scratch + layout.x_scales);
  product.row_powers = reinterpret_cast<const float*>(scratch + layout.row_powers);
  product.row_factors = reinterpret_cast<const float*>(scratch + layout.row_factors);
  product.y = args.y;
  product.other = args.other;
  product.n_rows = args.n_rows;
  product.outputs = static_cast<int>(plan.outputs());
  product.softcap = args.softcap;
  product.head_start = tuning.head_start >= 0 ? tuning.head_start : kHeadStart;
  product.epilogue = args.epilogue;
  const bool aligned =
      reinterpret_cast<uintptr_t>(args.y.values) % 16 == 0 && args.y.stride % 4 == 0 && product.outputs % 4 == 0;
  product.staged = aligned && (gated || args.epilogue == DecodeEpilogue::kStore);
  product.n_token_blocks = ceil_div(args.n_rows, kernel.tokens);
  product.n_row_blocks = ceil_div(plan.n_row_tiles, kPrefillRowTiles * kernel.cluster);
  product.n_stored_blocks = ceil_div(args.n_rows, kPrefillBlockTokens);
  product.group_blocks = std::min(product.n_token_blocks, 2048 / kernel.tokens);
  LaunchShape shape;
  const int n_clusters = std::min(product.n_row_blocks * product.n_token_blocks, device.n_sms / kernel.cluster);
  shape.grid = dim3(static_cast<unsigned>(n_clusters * kernel.cluster));
  shape.block = dim3(kPrefillThreads);
  shape.shared_bytes = kernel.shared_bytes;
  shape.name = "Linear";
  launch(context, shape, kernel.kernel, product);
}

}  // namespace beryl::cuda
