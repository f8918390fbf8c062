// Rows of a step that do not leave are dropped where only rows that do are read any more (program.h: output_part). The others then lie
// one behind the other, in place, so that each op behind runs as in a step of so many rows: row i is output_rows[i] of the step's input,
// with its position and sequence.
#pragma once

#include <cstdint>

#include "cuda/kernels.h"
#include "ops/step_input.h"

namespace beryl::cuda {

// to[i] = from[rows[i]], of one column; rows null: from[i]. Rows ascend, so rows[i] >= i: to may be from, as what a turn of the loop
// writes no later turn reads.
inline constexpr int kMovedAtOnce = 8;    // loads that are in flight together
BERYL_HOST_DEVICE inline void move_column(RowsView to, RowsView from, const int32_t* rows, int n_rows) {
  for (int first = 0; first < n_rows; first += kMovedAtOnce) {
    float held[kMovedAtOnce];
    for (int i = 0; i < kMovedAtOnce; ++i) {
      const int row = first + i < n_rows ? first + i : n_rows - 1;
      held[i] = from.values[(rows == nullptr ? row : rows[row]) * from.stride];
    }
    for (int i = 0; i < kMovedAtOnce; ++i)
      if (first + i < n_rows) to.values[(first + i) * to.stride] = held[i];
  }
}

inline constexpr int kMaxMovedSlots = 8;
struct MoveRowsArgs {
  struct Slot {
    RowsView to, from;              // the same, or apart
    int64_t cols;
  } slots[kMaxMovedSlots];
  int n_slots;
  const int32_t* rows;              // [n_rows] ascending, or null: 0, 1, ...
  int n_rows;
};
void launch_move_rows(const LaunchContext& context, const MoveRowsArgs& args);

// Positions and sequences of the rows that leave, [n_outputs] each.
inline void place_outputs(const StepInput& step, int32_t* positions, int32_t* sequences) {
  for (size_t i = 0; i < step.output_rows.size(); ++i) {
    const auto row = static_cast<size_t>(step.output_rows[i]);
    positions[i] = step.positions[row];
    sequences[i] = step.sequences[row];
  }
}

// Whether the positions of each sequence that leave are neighbours, as they are in a step's input: attention of many rows wants that.
inline bool outputs_are_runs(const StepInput& step) {
  for (size_t i = 1; i < step.output_rows.size(); ++i) {
    const int32_t row = step.output_rows[i], before = step.output_rows[i - 1];
    if (row != before + 1 && step.sequences[static_cast<size_t>(row)] == step.sequences[static_cast<size_t>(before)]) return false;
  }
  return true;
}

}  // namespace beryl::cuda
