// Launches the decode matvec: from a plan and the op to the kernel's arguments.
#include "cuda/matvec.h"

#include "base/error.h"
#include "cuda/matvec_kernel.cuh"

namespace beryl::cuda {

namespace {

MatvecKernel find_kernel(Format format, int n_tiles) {
  for (auto* family : {matvec_e2m1_kernel, matvec_integer_kernel, matvec_k_kernel, matvec_float_kernel})
    if (MatvecKernel kernel = family(format, n_tiles)) return kernel;
  BERYL_CHECK(false, "a format without a matvec kernel");
  return nullptr;
}

// Rows [row, row + n) of the op.
MatvecRows rows_from(const MatvecRows& rows, int row) {
  if (!rows.data) return rows;
  const int64_t bytes = row * rows.stride * (rows.is_bf16 ? 2 : 4);
  return {static_cast<const unsigned char*>(rows.data) + bytes, rows.stride, rows.is_bf16};
}
MatvecArgs slice_rows(const MatvecArgs& args, int row, int n) {
  MatvecArgs part = args;
  part.n_rows = n;
  part.x = rows_from(args.x, row);
  part.add = rows_from(args.add, row);
  part.other = rows_from(args.other, row);
  part.y = rows_from(args.y, row);
  if (args.sum) part.sum = args.sum + row * args.sum_stride;
  return part;
}

}  // namespace

MatvecDevice matvec_device() {
  int id = 0;
  MatvecDevice device;
  check(cudaGetDevice(&id), "device");
  check(cudaDeviceGetAttribute(&device.n_sms, cudaDevAttrMultiProcessorCount, id), "device");
  check(cudaDeviceGetAttribute(&device.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, id), "device");
  check(cudaDeviceGetAttribute(&device.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, id), "device");
  return device;
}

void launch_matvec(const MatvecPlan& plan, const MatvecArgs& args, const MatvecDevice& device,
                   const LaunchContext& context) {
  BERYL_CHECK(args.n_rows >= 1 && args.n_rows <= kMatvecMaxRows, "a matvec takes 1 to 8 rows");
  BERYL_CHECK(!args.add.data || (args.sum && args.sum != args.x.data), "the sum of an AddNorm needs rows of its own");
  const bool gated = args.epilogue == MatvecEpilogue::kGatedGelu || args.epilogue == MatvecEpilogue::kGatedSilu;
  BERYL_CHECK(gated == plan.gated, "gated epilogues go with gated plans");
  const MatvecLaunch cut = plan_launch(plan, args.n_rows, device);
  if (cut.n_blocks == 0) {
    BERYL_CHECK(args.n_rows > 1, "a multiprocessor's shared memory holds one row of x and two stages of weights");
    const int half = args.n_rows / 2;
    launch_matvec(plan, slice_rows(args, 0, half), device, context);
    launch_matvec(plan, slice_rows(args, half, args.n_rows - half), device, context);
    return;
  }
  MatvecKernelArgs kernel_args = {};
  kernel_args.op = args;
  kernel_args.row_scales =
      plan.scales_offset ? reinterpret_cast<const float*>(args.weights + plan.scales_offset) : nullptr;
  kernel_args.unit_bytes = plan.unit_bytes;
  kernel_args.outputs = static_cast<int>(plan.outputs());
  kernel_args.cols = static_cast<int>(plan.cols);
  kernel_args.inverse_cols = 1.0f / static_cast<float>(plan.cols);
  kernel_args.n_units = plan.n_units;
  kernel_args.n_stages = plan.n_stages;
  kernel_args.stage_bytes = plan.stage_bytes;
  kernel_args.k_warps = plan.k_warps;
  kernel_args.row_warps = plan.row_warps;
  kernel_args.ring_stages = cut.ring_stages;
  kernel_args.chunk_stages = cut.chunk_stages;
  kernel_args.n_chunks = cut.n_chunks;
  kernel_args.batch_units = cut.batch_units;
  kernel_args.x_bytes = cut.x_bytes;
  kernel_args.scale_bytes = cut.scale_bytes;
  kernel_args.partial_bytes = cut.partial_bytes;
  kernel_args.tiles_bytes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  kernel_args.gated = plan.gated;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(cut.n_blocks));
  shape.block = dim3(kMatvecThreads);
  shape.shared_bytes = cut.shared_bytes;
  shape.name = "Linear";
  launch(context, shape, find_kernel(plan.format, args.n_rows <= 4 ? 1 : 2), kernel_args);
}

}  // namespace beryl::cuda
