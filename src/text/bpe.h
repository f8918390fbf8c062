// Byte-pair merging: from a row of symbols to the tokens that a merge order gives.
//
// The rule: while any adjacent pair can merge, merge the one of best priority, ties leftmost. A heap of candidate pairs
// with lazy deletion does that in O(n log n) for the whole row: a merge makes at most two new candidates, and a
// candidate whose symbols have since changed is dropped when it comes up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace beryl {

// A stretch of the text that is one symbol. id: its token, -1 when it is none.
struct Symbol {
  uint32_t begin = 0;    // bytes
  uint32_t length = 0;   // bytes, > 0
  int32_t id = -1;
};

struct Merge {
  uint32_t priority = 0;  // lower merges first
  int32_t id = -1;        // the token that both symbols become
};

// What merging cost; both are O(n) (times log n for the heap) whatever the text.
struct MergeCounts {
  uint64_t lookups = 0;   // pairs asked about
  uint64_t pops = 0;      // candidates taken from the heap
};

// Memory that merge_symbols reuses from call to call. One thread at a time.
struct MergeScratch {
  struct Candidate {
    uint64_t order = 0;          // priority << 32 | index of the left symbol
    uint32_t total_length = 0;   // bytes of both symbols when proposed; symbols only grow, so it dates the pair
    int32_t id = -1;
  };
  std::vector<Candidate> heap;
  std::vector<uint32_t> previous, next;   // neighbours by index
};

// Merges `symbols` in place. find_merge(left, right) returns std::optional<Merge> and must depend only on the pair.
// Requires fewer than 2^32 - 1 symbols.
template <class FindMerge>
MergeCounts merge_symbols(std::vector<Symbol>& symbols, const FindMerge& find_merge, MergeScratch& scratch) {
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  MergeCounts counts;
  const uint32_t n_symbols = static_cast<uint32_t>(symbols.size());
  if (n_symbols < 2) return counts;

  auto& heap = scratch.heap;
  auto& previous = scratch.previous;
  auto& next = scratch.next;
  heap.clear();
  previous.resize(n_symbols);
  next.resize(n_symbols);
  for (uint32_t i = 0; i < n_symbols; ++i) {
    previous[i] = i == 0 ? kNone : i - 1;
    next[i] = i + 1 == n_symbols ? kNone : i + 1;
  }

  using Candidate = MergeScratch::Candidate;
  const auto later = [](const Candidate& a, const Candidate& b) { return a.order > b.order; };
  const auto candidate = [&](uint32_t left, uint32_t right) -> std::optional<Candidate> {
    ++counts.lookups;
    const std::optional<Merge> merge = find_merge(symbols[left], symbols[right]);
    if (!merge) return std::nullopt;
    return Candidate{uint64_t{merge->priority} << 32 | left, symbols[left].length + symbols[right].length, merge->id};
  };
  const auto propose = [&](uint32_t left, uint32_t right) {
    if (const auto c = candidate(left, right)) {
      heap.push_back(*c);
      std::push_heap(heap.begin(), heap.end(), later);
    }
  };

  for (uint32_t i = 0; i + 1 < n_symbols; ++i)
    if (const auto c = candidate(i, i + 1)) heap.push_back(*c);
  std::make_heap(heap.begin(), heap.end(), later);

  while (!heap.empty()) {
    const Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), later);
    heap.pop_back();
    ++counts.pops;

    const uint32_t left = static_cast<uint32_t>(best.order);
    if (symbols[left].length == 0) continue;  // absorbed by its left neighbour
    const uint32_t right = next[left];
    if (right == kNone || symbols[left].length + symbols[right].length != best.total_length) continue;  // has grown

    symbols[left].length = best.total_length;
    symbols[left].id = best.id;
    symbols[right].length = 0;
    next[left] = next[right];
    if (next[left] != kNone) {
      previous[next[left]] = left;
      propose(left, next[left]);
    }
    if (previous[left] != kNone) propose(previous[left], left);
  }

  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.length == 0; });
  return counts;
}

// The merge list of a vocabulary: (left token, right token) -> rank and result. Open addressing; read-only once filled,
// so any number of threads may look up.
class MergeTable {
 public:
  // Room for n_merges; call before add.
  void reserve(size_t n_merges);
  // A pair that is there already keeps its first (better) rank. Requires ids >= 0 and no more pairs than reserved.
  void add(int32_t left, int32_t right, uint32_t rank, int32_t result);
  std::optional<Merge> find(int32_t left, int32_t right) const;
  size_t size() const { return size_; }

 private:
  struct Slot {
    int32_t left = -1;   // -1: empty
    int32_t right = -1;
    uint32_t rank = 0;
    int32_t result = -1;
  };
  size_t home(int32_t left, int32_t right) const;

  std::vector<Slot> slots_;   // a power of two, at most half full
  size_t mask_ = 0;
  size_t size_ = 0;
};

}  // namespace beryl
