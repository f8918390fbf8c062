// Rows out of the tiles of packed weights: Embed from a table that is the head as well, and weights expanded into bf16
// pairs for the matrix product. A warp reads one row of one tile.
#include "cuda/device.cuh"
#include "cuda/packed_rows.h"

namespace beryl::cuda {

namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(kWarps * 32) packed_embed_kernel(PackedEmbedArgs args) {
  grid_wait();
  const int column_tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (column_tile >= args.table.n_column_tiles) return;
  const int64_t token = blockIdx.y;
  const PackedTileRow row = packed_tile_row(args.table, args.table_row + args.ids[token], column_tile);
  float* out = args.out.values + token * args.out.stride;
  for (int column = threadIdx.x % 32; column < args.table.tile_columns; column += 32) {
    const int64_t at = int64_t{column_tile} * args.table.tile_columns + column;
    if (at < args.table.cols) out[at] = packed_weight(args.table.format, row, column) * args.scale;
  }
}

__global__ void __launch_bounds__(kWarps * 32) packed_panel_kernel(PackedPanelArgs args) {
  grid_wait();
  const int column_tile = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  const int64_t first = int64_t{column_tile} * args.weight.tile_columns;
  if (first >= args.panel_cols) return;
  const int64_t row = blockIdx.y;
  const bool in_matrix = column_tile < args.weight.n_column_tiles;
  PackedTileRow from = {};
  if (in_matrix) from = packed_tile_row(args.weight, args.row_begin + row, column_tile);
  for (int column = threadIdx.x % 32 * 2; column < args.weight.tile_columns; column += 64) {
    if (first + column >= args.panel_cols) break;
    Bf16Pair pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool live = in_matrix && first + column + i < args.weight.cols;
      pair[i] = split_bf16(live ? packed_weight(args.weight.format, from, column + i) : 0.0f);
    }
    const int64_t at = row * args.panel_cols + first + column;
    *reinterpret_cast<uint32_t*>(args.high + at) = pack_bf16(pair[0].high, pair[1].high);
    *reinterpret_cast<uint32_t*>(args.low + at) = pack_bf16(pair[0].low, pair[1].low);
  }
}

}  // namespace

void launch_packed_embed(const LaunchContext& context, const PackedEmbedArgs& args, int64_t n_tokens) {
  const auto blocks = static_cast<unsigned>((args.table.n_column_tiles + kWarps - 1) / kWarps);
  launch(context, {.grid = {blocks, static_cast<unsigned>(n_tokens)}, .block = kWarps * 32, .name = "Embed"},
         packed_embed_kernel, args);
}

void launch_packed_panel(const LaunchContext& context, const PackedPanelArgs& args) {
  const int64_t tiles = (args.panel_cols + args.weight.tile_columns - 1) / args.weight.tile_columns;
  const auto blocks = static_cast<unsigned>((tiles + kWarps - 1) / kWarps);
  launch(context,
         {.grid = {blocks, static_cast<unsigned>(args.n_rows)}, .block = kWarps * 32, .name = "Linear, expanding weights"},
         packed_panel_kernel, args);
}

}  // namespace beryl::cuda
