// The fast host backend: parallel over rows, heads and tokens, vectorised with the instruction set chosen at run time.
//
// Matrices are packed when a program is prepared (packed_matrix.h). Those of 4- to 8-bit codes are multiplied in integers with
// activations of 8 bits a group of 32 (integer_dot.h); all else is f32. The cache is f16 unless f32 is asked for. With kBf16
// matrices of BF16 are multiplied with activations rounded to bf16 (bf16_dot.h). With kExact nothing is packed: all products have
// f32 activations and read the file's blocks, and the cache is f32 by default.
#pragma once

#include <cstdint>
#include <memory>

#include "ops/backend.h"

namespace beryl {

enum class CpuPrecision : uint8_t { kFast, kBf16, kExact };

// n_threads 0: one a physical core that the process may use.
std::unique_ptr<Backend> make_cpu_backend(int n_threads, CpuPrecision precision = CpuPrecision::kFast);

}  // namespace beryl
