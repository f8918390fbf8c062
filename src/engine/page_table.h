// Which cache page holds which positions of which sequence. Knows no device and no model: only groups of caches, each
// with a pool of pages and a table a sequence.
//
// Position m of a sequence lies on page table[(m / 64) % n_entries], row m % 64. A global group's table is as long as
// the context; a sliding group's wraps, so its old pages are written over: a ring is a page table that wraps.
// Invariant: a page belongs to at most one sequence, or to the free list.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

// The entry of a table that holds a position.
constexpr int page_entry(int64_t position, int n_entries) {
  return static_cast<int>((position / kPageTokens) % n_entries);
}

class PageTables {
 public:
  explicit PageTables(const StepLimits& limits);

  // Makes sure that positions [0, end) of a sequence have pages. False, and nothing is taken, when a pool is too small.
  [[nodiscard]] bool reserve(int sequence, int64_t end);
  // Gives all pages of a sequence back.
  void release(int sequence);

  int free_pages(int group) const { return static_cast<int>(pools_[static_cast<size_t>(group)].free.size()); }
  // [groups][max_sequences · n_entries], as StepInput wants them.
  const std::vector<std::vector<int32_t>>& tables() const { return tables_; }

 private:
  struct Pool {
    int n_entries = 0;
    std::vector<int32_t> free;   // taken from the back
  };
  std::vector<Pool> pools_;
  std::vector<std::vector<int32_t>> tables_;
};

}  // namespace beryl
