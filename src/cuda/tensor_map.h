// Memory as the tensor copy engine (compute capability 9.0 and later) sees it: rows of three dimensions, copied a box at a time to
// shared memory, where the 16-byte pieces of each 128 bytes are in an order of their own (index_math.h: swizzled).
#pragma once

#include <array>
#include <cstdint>

#include <cuda.h>

namespace beryl::cuda {

// Innermost dimension first: lines of 128 bytes that follow each other without a gap; then row_bytes, then slab_bytes from one to the next.
struct TensorShape {
  CUtensorMapDataType type;
  std::array<int64_t, 3> sizes;     // the first in elements
  int64_t row_bytes, slab_bytes;
  std::array<int, 3> box;
};
CUtensorMap make_tensor_map(void* memory, const TensorShape& shape);

// The keys or values of a cache, [n_rows][row_bytes], row_bytes a power of two from 64 on, in boxes of 16 rows as the decode kernel copies
// them (index_math.h: box_offset). A row of the map has 128 bytes or more.
CUtensorMap cache_tensor_map(void* pool, int64_t n_rows, int row_bytes);

}  // namespace beryl::cuda
