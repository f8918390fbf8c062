// Launches the batched linear layer: from a plan and the op to the kernel's arguments.
#include "cuda/batch_linear.h"

#include <algorithm>

#include "base/error.h"
#include "cuda/batch_kernel.cuh"
#include "cuda/index_math.h"

namespace beryl::cuda {

namespace {

constexpr int64_t kAlignment = 128;

BatchKernels find_kernels(Format format) {
  for (auto* family : {batch_e2m1_kernels, batch_integer_kernels, batch_k_kernels, batch_float_kernels}) {
    const BatchKernels kernels = family(format);
    if (kernels.kernels[0] != nullptr) return kernels;
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

// The parts of the scratch, in bytes from its begin, where the control words are.
struct ScratchLayout {
  int64_t squares, x_tiles, partials, end;
};
// partial_tiles: row tiles whose chunks wait to be added.
ScratchLayout scratch_layout(const MatvecPlan& plan, int rows, int64_t partial_tiles) {
  const int64_t n_groups = ceil_div(plan.cols, 128);
  // Groups are whole: two tiles each where tiles have 64 columns.
  const int64_t n_tiles = n_groups * (128 / tile_shape(plan.format).columns);
  ScratchLayout layout = {};
  layout.squares = round_up(sizeof(BatchControl), kAlignment);
  layout.x_tiles = layout.squares + n_groups * kBatchRows * int64_t{sizeof(float)};
  // A step reads pairs of tiles, even beyond the last one.
  layout.partials = layout.x_tiles + (n_tiles + 1) * x_tile_bytes(plan.format, rows);
  layout.end = layout.partials;
  if (plan.n_chunks() > 1) layout.end += plan.n_chunks() * partial_tiles * rows * kTileRows * int64_t{sizeof(float)};
  return layout;
}

// How a product is cut (batch_kernel.cuh).
struct Cut {
  int team_shift = 0;
  bool split = false;
  int item_tiles = 0;
  int n_row_blocks = 0;
  int n_items = 0;
  int n_blocks = 0;
  int64_t partial_tiles = 0;
  int n_slots = 0;                  // of a ring of x
  bool fits = false;
  int weights_at = 0;
  int exchange_at = 0;
  int staging_at = 0;
  int small_at = 0;
  int shared_bytes = 0;
};
Cut cut_product(const MatvecPlan& plan, int rows, int n_tiles, int team_shift, int n_resident,
                const MatvecDevice& device) {
  constexpr int kReserved = 1024;             // of a block, by the driver
  const int kernel_rows = n_tiles * 4;
  Cut cut;
  cut.team_shift = team_shift;
  cut.item_tiles = kBatchWarps >> team_shift;
  cut.n_row_blocks = ceil_div(plan.n_row_tiles, cut.item_tiles);
  // Chunks by different blocks where the row blocks alone would leave some blocks with much more than others.
  cut.split =
      plan.n_chunks() > 1 && cut.n_row_blocks < 4 * device.n_sms * n_resident && plan.n_row_tiles <= kMaxCountedTiles;
  cut.n_items = cut.split ? cut.n_row_blocks * plan.n_chunks() : cut.n_row_blocks;
  cut.n_blocks = std::min(cut.n_items, device.n_sms * n_resident);
  cut.partial_tiles = cut.split ? plan.n_row_tiles : int64_t{cut.n_blocks} * kBatchWarps;
  const int n_teams = 1 << team_shift;
  const int exchange_bytes = cut.item_tiles * (n_teams - 1) * 2 * (n_tiles / 2) * 32 * static_cast<int>(sizeof(float4));
  // Two blocks on one multiprocessor while another has none would take twice the time: then a block takes so much that
  // only one fits.
  const bool alone = cut.n_blocks <= device.n_sms;
  const int budget = std::min(device.shared_per_sm / (alone ? 1 : n_resident) - kReserved, device.shared_per_block);
  const int staging_bytes = cut.item_tiles * rows * kTileRows * static_cast<int>(sizeof(float));
  const int fixed = weight_ring_bytes(plan.format, kernel_rows) + exchange_bytes + staging_bytes +
                    static_cast<int>(sizeof(BatchShared));
  const int slot_bytes = step_tiles(plan.format, kernel_rows) * x_tile_bytes(plan.format, rows);
  cut.n_slots = std::clamp((budget - fixed) / (n_teams * slot_bytes), 0, kBatchMaxSlots);
  cut.weights_at = n_teams * cut.n_slots * slot_bytes;
  cut.fits = cut.n_slots >= weight_slots(plan.format, kernel_rows);
  cut.exchange_at = cut.weights_at + weight_ring_bytes(plan.format, kernel_rows);
  cut.staging_at = cut.exchange_at + exchange_bytes;
  cut.small_at = cut.staging_at + staging_bytes;
  cut.shared_bytes = cut.small_at + static_cast<int>(sizeof(BatchShared));
  if (alone) cut.shared_bytes = std::max(cut.shared_bytes, device.shared_per_sm / 2);
  return cut;
}
// More teams where more multiprocessors then have work: their items cost less, but x is read more often.
Cut choose_cut(const MatvecPlan& plan, int rows, int n_tiles, const MatvecDevice& device) {
  Cut best;
  for (int n_resident = blocks_an_sm(n_tiles * 4); n_resident >= 1 && !best.fits; --n_resident) {
    const int n_places = device.n_sms * n_resident;
    int least_cost = 0;
    // wgmma, which more rows use, takes teams of 4 warps.
    for (int team_shift = 0; team_shift <= (n_tiles * 4 <= kGroupRows ? 2 : 1); ++team_shift) {
      const Cut cut = cut_product(plan, rows, n_tiles, team_shift, n_resident, device);
      const int cost = ceil_div(cut.n_items, n_places) * cut.item_tiles;
      if (!cut.fits || (team_shift == 2 && cut.n_items > device.n_sms) || (best.fits && cost >= least_cost)) continue;
      best = cut;
      least_cost = cost;
    }
  }
  return best;
}

RowsView from_row(RowsView rows, int row) {
  return rows.values == nullptr ? rows : RowsView{rows.values + row * rows.stride, rows.stride};
}

struct Choice {
  int rows;                         // padded
  BatchKernelPointer kernel;
  Cut cut;
};
Choice choose(const MatvecPlan& plan, int n_rows, const MatvecDevice& device) {
  Choice choice = {};
  choice.rows = padded_rows(plan.format, n_rows);
  const BatchKernels kernels = find_kernels(plan.format);
  const int index = kernel_index(choice.rows);
  choice.kernel = kernels.kernels[index];
  const int n_tiles = choice.kernel == kernels.kernels[2] ? kBatchRows / 4 : index == 0 ? 4 : 8;
  choice.cut = choose_cut(plan, choice.rows, n_tiles, device);
  return choice;
}

}  // namespace

int64_t batch_scratch_bytes(const MatvecPlan& plan, int n_rows, const MatvecDevice& device) {
  // Fewer rows may be cut in another way, so the most of all.
  int64_t most = 0;
  for (int rows = kGroupRows; rows < std::min(n_rows, kBatchRows) + kGroupRows; rows += kGroupRows) {
    const Choice choice = choose(plan, rows, device);
    most = std::max(most, scratch_layout(plan, choice.rows, choice.cut.partial_tiles).end);
  }
  return most;
}

void launch_batch_linear(const MatvecPlan& plan, const BatchLinearArgs& args, const MatvecDevice& device,
                         const LaunchContext& context) {
  const bool gated = args.epilogue == DecodeEpilogue::kGatedGelu || args.epilogue == DecodeEpilogue::kGatedSilu;
  BERYL_CHECK(gated == plan.gated, "gated epilogues go with gated plans");
  BERYL_CHECK(args.n_rows >= 1, "a batched linear layer has rows");
  const Choice choice = choose(plan, args.n_rows, device);
  const Cut& cut = choice.cut;
  const int rows = choice.rows;
  if (args.n_rows > kBatchRows || !cut.fits) {
    BERYL_CHECK(args.n_rows > kGroupRows, "a multiprocessor's shared memory holds a ring for 16 rows of x");
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
  const ScratchLayout layout = scratch_layout(plan, rows, cut.partial_tiles);

  BatchKernelArgs product = {};
  product.weights = args.weights;
  product.row_scales =
      plan.scales_offset != 0 ? reinterpret_cast<const float*>(args.weights + plan.scales_offset) : nullptr;
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
  product.x = args.x;
  product.norm_weight = args.norm_weight;
  product.norm_eps = args.norm_eps;
  product.inverse_cols = 1.0f / static_cast<float>(plan.cols);
  product.cols = static_cast<int>(plan.cols);
  product.has_norm = args.has_norm;
  product.n_rows = args.n_rows;
  product.padded_rows = rows;
  while (1 << product.row_shift < args.n_rows) ++product.row_shift;
  product.control = reinterpret_cast<BatchControl*>(scratch);
  product.squares = reinterpret_cast<float*>(scratch + layout.squares);
  product.x_tiles = scratch + layout.x_tiles;
  product.partials = reinterpret_cast<float*>(scratch + layout.partials);
  product.chunk_floats = cut.partial_tiles * rows * kTileRows;
  product.y = args.y;
  product.other = args.other;
  product.softcap = args.softcap;
  product.outputs = static_cast<int>(plan.outputs());
  product.epilogue = args.epilogue;
  product.gated = plan.gated;
  product.team_shift = cut.team_shift;
  product.split = cut.split;
  product.item_tiles = cut.item_tiles;
  product.n_row_blocks = cut.n_row_blocks;
  product.n_slots = cut.n_slots;
  product.weights_at = cut.weights_at;
  product.exchange_at = cut.exchange_at;
  product.staging_at = cut.staging_at;
  product.small_at = cut.small_at;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(cut.n_blocks));
  shape.block = dim3(kBatchThreads);
  shape.shared_bytes = cut.shared_bytes;
  shape.name = "Linear";
  launch(context, shape, choice.kernel, product);
}

}  // namespace beryl::cuda
