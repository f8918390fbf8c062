// Launches the batched linear layer: from a plan and the op to the two kernels' arguments.
#include "cuda/batch_linear.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "cuda/batch_kernel.cuh"

namespace beryl::cuda {

namespace {

constexpr int64_t kAlignment = 128;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
int ceil_div(int64_t value, int64_t by) { return static_cast<int>((value + by - 1) / by); }

BatchKernels find_kernels(Format format) {
  for (auto* family : {batch_e2m1_kernels, batch_integer_kernels, batch_k_kernels, batch_float_kernels}) {
    const BatchKernels kernels = family(format);
    if (kernels.prepare != nullptr) return kernels;
  }
  BERYL_CHECK(false, "a format without batch kernels");
  return {};
}

// For how many rows of x the kernel is: FP4 has none between 16, 32 and 64, since the width of its products is fixed.
int padded_rows(Format format, int n_rows) {
  const int rows = static_cast<int>(round_up(std::min(n_rows, kBatchRows), kGroupRows));
  return format == Format::kFp4G128 && rows == 48 ? 64 : rows;
}
int kernel_index(int rows) { return rows <= 16 ? 0 : rows <= 32 ? 1 : 2; }

// The parts of the scratch, in bytes from its begin.
struct ScratchLayout {
  int64_t factors, counters, partials, end;
};
ScratchLayout scratch_layout(const MatvecPlan& plan, int rows) {
  ScratchLayout layout = {};
  // Groups of 128 columns are whole: two tiles each where tiles have 64 columns.
  const int64_t n_tiles = ceil_div(plan.cols, 128) * int64_t{128 / tile_shape(plan.format).columns};
  layout.factors = n_tiles * x_tile_bytes(plan.format, rows);
  layout.counters = layout.factors + kBatchRows * 4;
  layout.partials = layout.counters;
  layout.end = layout.counters;
  if (plan.n_chunks() > 1) {
    layout.partials = round_up(layout.counters + plan.n_row_tiles * int64_t{4}, kAlignment);
    layout.end = layout.partials + int64_t{plan.n_chunks()} * plan.n_row_tiles * rows * kTileRows * 4;
  }
  layout.end = round_up(layout.end, kAlignment);
  return layout;
}

// How a product is cut (batch_kernel.cuh).
struct Cut {
  bool by_columns = false;
  int item_tiles = 0;
  int n_items = 0;
  int n_blocks = 0;
  int slot_x_at = 0;
  int slot_bytes = 0;
  int n_slots = 0;                  // 0: does not fit
  int exchange_at = 0;
  int small_at = 0;
  int shared_bytes = 0;
};
Cut cut_product(const MatvecPlan& plan, int rows, int n_tiles, bool by_columns, const MatvecDevice& device) {
  constexpr int kReserved = 1024;             // of a block, by the driver
  const TileShape tile = tile_shape(plan.format);
  const int blocks_an_sm = rows <= kGroupRows ? 2 : 1;
  Cut cut;
  cut.by_columns = by_columns;
  cut.item_tiles = by_columns ? kTeamWarps : kTeams * kTeamWarps;
  cut.n_items = ceil_div(plan.n_row_tiles, cut.item_tiles) * plan.n_chunks();
  cut.n_blocks = std::min(cut.n_items, device.n_sms * blocks_an_sm);
  cut.slot_x_at = static_cast<int>(round_up(cut.item_tiles * (tile.code_bytes + tile.meta_bytes), kAlignment));
  cut.slot_bytes = cut.slot_x_at + x_tile_bytes(plan.format, rows);
  const int exchange_bytes = by_columns ? kTeamWarps * 2 * (n_tiles / 2) * 32 * static_cast<int>(sizeof(float4)) : 0;
  const int budget = std::min(device.shared_per_sm / blocks_an_sm - kReserved, device.shared_per_block);
  const int fixed = exchange_bytes + static_cast<int>(sizeof(BatchShared));
  cut.n_slots = std::clamp((budget - fixed) / cut.slot_bytes, 0, kBatchMaxSlots);
  cut.exchange_at = cut.n_slots * cut.slot_bytes;
  cut.small_at = cut.exchange_at + exchange_bytes;
  cut.shared_bytes = cut.small_at + static_cast<int>(sizeof(BatchShared));
  return cut;
}
// By columns where more multiprocessors then have work: their items cost half, but x is read twice as often.
Cut choose_cut(const MatvecPlan& plan, int rows, int n_tiles, const MatvecDevice& device) {
  const Cut by_rows = cut_product(plan, rows, n_tiles, false, device);
  const Cut by_columns = cut_product(plan, rows, n_tiles, true, device);
  if (by_rows.n_slots < 2) return by_columns;
  if (const char* forced = std::getenv("BATCH_MODE")) return forced[0] == 'c' ? by_columns : by_rows;
  const int rounds_by_rows = ceil_div(by_rows.n_items, device.n_sms);
  const int rounds_by_columns = ceil_div(by_columns.n_items, device.n_sms);
  return rounds_by_columns < 2 * rounds_by_rows ? by_columns : by_rows;
}

RowsView from_row(RowsView rows, int row) {
  return rows.values == nullptr ? rows : RowsView{rows.values + row * rows.stride, rows.stride};
}

}  // namespace

int64_t batch_x_bytes(const MatvecPlan& plan, int n_rows) {
  return scratch_layout(plan, padded_rows(plan.format, n_rows)).factors;
}
int64_t batch_scratch_bytes(const MatvecPlan& plan, int n_rows) {
  return scratch_layout(plan, padded_rows(plan.format, n_rows)).end;
}

void launch_batch_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const MatvecDevice& device,
                         const LaunchContext& context) {
  const bool gated = args.epilogue == DecodeEpilogue::kGatedGelu || args.epilogue == DecodeEpilogue::kGatedSilu;
  BERYL_CHECK(gated == plan.gated, "gated epilogues go with gated plans");
  BERYL_CHECK(args.n_rows >= 1 && plan.cols <= kBatchMaxNormCols, "a batched linear layer has rows, not too wide");
  const int rows = padded_rows(plan.format, args.n_rows);
  const BatchKernels kernels = find_kernels(plan.format);
  const int index = kernel_index(rows);
  const int n_tiles = kernels.multiply[index] == kernels.multiply[2] ? kBatchRows / 4 : index == 0 ? 4 : 8;
  const Cut cut = choose_cut(plan, rows, n_tiles, device);
  if (args.n_rows > kBatchRows || cut.n_slots < 2) {
    BERYL_CHECK(args.n_rows > kGroupRows, "a multiprocessor's shared memory holds two slots with 16 rows of x");
    const int first = args.n_rows > kBatchRows ? kBatchRows : kGroupRows;
    BatchLinearArgs part = args;
    part.n_rows = first;
    launch_batch_linear(plan, part, device, context);
    part.n_rows = args.n_rows - first;
    part.x = from_row(args.x, first);
    part.other = from_row(args.other, first);
    part.y = from_row(args.y, first);
    launch_batch_linear(plan, part, device, context);
    return;
  }
  auto* scratch = static_cast<unsigned char*>(args.scratch);
  const ScratchLayout layout = scratch_layout(plan, rows);

  PrepareArgs prepare = {};
  prepare.x = args.x;
  prepare.norm_weight = args.norm_weight;
  prepare.has_norm = args.has_norm;
  prepare.norm_eps = args.norm_eps;
  prepare.inverse_cols = 1.0f / static_cast<float>(plan.cols);
  prepare.cols = static_cast<int>(plan.cols);
  prepare.padded_rows = rows;
  prepare.tiles = scratch;
  prepare.factors = reinterpret_cast<float*>(scratch + layout.factors);
  prepare.counters = reinterpret_cast<int*>(scratch + layout.counters);
  prepare.n_counters = plan.n_chunks() > 1 ? plan.n_row_tiles : 0;
  // A row that is normed is one block's; others are cut into pieces of 16 groups of columns.
  const int n_groups = ceil_div(plan.cols, 128);
  const int n_warps = std::min(n_groups, args.has_norm ? 32 : 16);
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(args.n_rows), static_cast<unsigned>(args.has_norm ? 1 : ceil_div(n_groups, n_warps)));
  shape.block = dim3(static_cast<unsigned>(n_warps) * 32);
  shape.name = "Linear, x";
  launch(context, shape, kernels.prepare, prepare);

  BatchKernelArgs product = {};
  product.weights = args.weights;
  product.row_scales = plan.scales_offset != 0 ? reinterpret_cast<const float*>(args.weights + plan.scales_offset) : nullptr;
  product.unit_bytes = plan.unit_bytes;
  product.stage_bytes = plan.stage_bytes;
  product.stage_code_bytes = plan.stage_tiles() * tile_shape(plan.format).code_bytes;
  product.k_warps = plan.k_warps;
  product.row_warps = plan.row_warps;
  product.n_stages = plan.n_stages;
  product.n_chunks = plan.n_chunks();
  product.n_column_tiles = plan.n_column_tiles;
  product.n_row_tiles = plan.n_row_tiles;
  product.stored_row_tiles = plan.n_units * plan.row_warps;
  product.x_tiles = prepare.tiles;
  product.factors = prepare.factors;
  product.counters = prepare.counters;
  product.partials = reinterpret_cast<float*>(scratch + layout.partials);
  product.n_rows = args.n_rows;
  product.padded_rows = rows;
  product.y = args.y;
  product.other = args.other;
  product.softcap = args.softcap;
  product.outputs = static_cast<int>(plan.outputs());
  product.epilogue = args.epilogue;
  product.gated = plan.gated;
  product.has_norm = args.has_norm;
  product.by_columns = cut.by_columns;
  product.item_tiles = cut.item_tiles;
  product.n_items = cut.n_items;
  product.n_slots = cut.n_slots;
  product.slot_bytes = cut.slot_bytes;
  product.slot_x_at = cut.slot_x_at;
  product.exchange_at = cut.exchange_at;
  product.small_at = cut.small_at;
  shape.grid = dim3(static_cast<unsigned>(cut.n_blocks));
  shape.block = dim3(kBatchThreads);
  shape.shared_bytes = cut.shared_bytes;
  shape.name = "Linear";
  launch(context, shape, kernels.multiply[index], product);
}

}  // namespace beryl::cuda
