// A thread a column: it moves all rows of its column in turn, so that they can move in place. Moves 8 · n_rows bytes a column.
#include "cuda/device.cuh"
#include "cuda/dropped_rows.h"

namespace beryl::cuda {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) move_rows_kernel(MoveRowsArgs args) {
  grid_wait();
  const MoveRowsArgs::Slot& slot = args.slots[blockIdx.y];
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= slot.cols) return;
  move_column({slot.to.values + column, slot.to.stride}, {slot.from.values + column, slot.from.stride}, args.rows, args.n_rows);
}

}  // namespace

void launch_move_rows(const LaunchContext& context, const MoveRowsArgs& args) {
  int64_t widest = 0;
  for (int i = 0; i < args.n_slots; ++i) widest = widest < args.slots[i].cols ? args.slots[i].cols : widest;
  const auto blocks = static_cast<unsigned>((widest + kThreads - 1) / kThreads);
  launch(context, {.grid = {blocks, static_cast<unsigned>(args.n_slots)}, .block = kThreads, .name = "rows that leave"}, move_rows_kernel, args);
}

}  // namespace beryl::cuda
