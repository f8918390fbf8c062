// The only transformer in the project: a model's config becomes the list of ops of one step.
//
// Prefill, decode, speculative verification and batches are the same list with other row counts.
#pragma once

#include "model/config.h"
#include "model/weights.h"
#include "ops/program.h"

namespace beryl {

// The weights must outlive the program.
Program build_step(const ModelConfig& config, const ModelWeights& weights);

}  // namespace beryl
