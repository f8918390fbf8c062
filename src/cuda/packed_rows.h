// Launches that read rows out of the tiles of packed weights (packed_rows.cu); as kernels.h.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/packed_weight.h"

namespace beryl::cuda {

struct PackedEmbedArgs {
  PackedMatrix table;
  int64_t table_row;                // row of the packed matrix that is row 0 of the table
  const int32_t* ids;
  RowsView out;
  float scale;
};
void launch_packed_embed(const LaunchContext& context, const PackedEmbedArgs& args, int64_t n_tokens);

struct PackedPanelArgs {            // as PlainPanelArgs
  PackedMatrix weight;
  int64_t row_begin;
  int64_t n_rows;
  uint16_t* high;
  uint16_t* low;
  int64_t panel_cols;
};
void launch_packed_panel(const LaunchContext& context, const PackedPanelArgs& args);

}  // namespace beryl::cuda
