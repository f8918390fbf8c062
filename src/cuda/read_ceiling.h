// What a plain read of this GPU's memory reaches: the ceiling that `bench --ops` compares with.
#pragma once

namespace beryl::cuda {

// Bytes a second, the median of several reads of a buffer that no cache holds; needs 1 GiB of free memory for a moment. 0: there
// is not enough. Throws Error(kDevice).
double measure_read_ceiling();

}  // namespace beryl::cuda
