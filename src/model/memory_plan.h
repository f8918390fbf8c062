// How much memory a model needs for a given context, before any of it is taken. The plan is what the backend allocates:
// Backend::prepare is given these limits and allocates this list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

// What a run wants; see limits_for.
struct RunLimits {
  int64_t context = 4096;        // positions a sequence may reach
  int chunk_tokens = 256;        // rows of one sequence in a step, and so the slack of the sliding caches
  int step_tokens = 0;           // rows of a step over all sequences; 0: the larger of chunk_tokens and n_sequences
  int n_sequences = 1;           // at once
  int64_t cache_tokens = 0;      // positions that the global caches hold over all sequences, at least one whole context;
                                 // 0: a whole context for each sequence
  bool shares_pages = false;     // sequences may find pages of others (engine/page_table.h)
  int kept_windows = 0;          // of sliding caches, beyond those of n_sequences: for texts seen before
  int n_outputs = 1;             // rows of a step that leave through the head
  CacheType cache_type = CacheType::kDefault;
};

// A global table is as long as the context. A sliding layer's table wraps: a token at position p reads (p - window, p], and
// a chunk is appended before its first token is attended, so window - 1 + chunk consecutive positions are live at once.
// Two positions share a slot only if they are a multiple of the ring's size apart, so whole pages for that many suffice.
// Where pages are shared none is written over row by row, so the ring has all pages that so many positions can touch.
StepLimits limits_for(const Program& program, const RunLimits& run);

struct MemoryPlan {
  StepLimits limits;
  std::vector<Allocation> allocations;

  int64_t total(MemoryKind kind) const;
  int64_t total() const;         // without mapped weights, which are pages of the file
};

MemoryPlan plan_memory(const Program& program, const RunLimits& run, const Backend& backend);

// As `beryl inspect --plan` prints it: a line a kind, caches by group with their pages, the sum.
std::string to_text(const MemoryPlan& plan, const Program& program);

}  // namespace beryl
