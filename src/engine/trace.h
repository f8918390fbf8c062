// Everything a model computes for given ids, for comparing engines: logits at every position, the residual stream after
// every layer, the greedy continuation.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

struct TraceRequest {
  std::vector<std::vector<int32_t>> sequences;   // run as one ragged batch
  int chunk_tokens = 64;                         // rows of one sequence a step
  bool layers = false;
  int64_t n_greedy = 0;                          // ids to continue each sequence with
  CacheType cache_type = CacheType::kDefault;
};

struct SequenceTrace {
  std::vector<float> logits;                     // [n_ids][vocab]
  std::vector<float> embedded;                   // layers: [n_ids][model_dim], before the first layer
  std::vector<std::vector<float>> hidden;        // layers: [n_layers][n_ids][model_dim], after each layer
  std::vector<int32_t> greedy;                   // [n_greedy]
};

// [sequences]
std::vector<SequenceTrace> trace(const Program& program, Backend& backend, const TraceRequest& request);

}  // namespace beryl
