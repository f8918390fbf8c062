// The fast host backend: f32 activations and sums, parallel over rows, heads and tokens, vectorised by Highway with the
// instruction set chosen at run time. Weights are read where they lie in the mapped file.
#pragma once

#include <memory>

#include "ops/backend.h"

namespace beryl {

// n_threads 0: one a physical core that the process may use.
std::unique_ptr<Backend> make_cpu_backend(int n_threads);

}  // namespace beryl
