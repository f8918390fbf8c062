// Which cache page holds which positions of which sequence. Knows no device and no model: only groups of caches, each
// with a pool of pages and a table a sequence.
//
// Position m of a sequence lies on page table[(m / 64) % n_entries], row m % 64. A global group's table is as long as
// the context; a sliding group's wraps, so its old pages are written over: a ring is a page table that wraps.
//
// Sequences may share pages that are full: commit() tells which ids a sequence's full pages hold, match() finds them for
// another text that begins so, adopt() puts them into its tables. A page that others may still want is never written
// over: where the ring comes round to it, the sequence lets it go and takes another. So a ring of shared pages has an entry
// for every page that a step's live positions may touch (limits_for, RunLimits::shares_pages).
// Invariant: a page is in the tables of as many sequences as it has references, and free, or idle, or in use.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/page_pool.h"
#include "engine/prefix_index.h"
#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

// The entry of a table that holds a position.
constexpr int page_entry(int64_t position, int n_entries) {
  return static_cast<int>((position / kPageTokens) % n_entries);
}

// How much of a text the caches already hold.
struct PrefixMatch {
  int64_t n_tokens = 0;     // can be adopted: whole pages, and less than the text, whose last id is still to be read
  int64_t n_known = 0;      // as far as the global groups have it; more than n_tokens where a sliding group has let its window go
  int n_idle = 0;           // pages in the first global group that nobody else uses: adopting them makes these unavailable
};

class PageTables {
 public:
  // windows: [groups], 0: global. Left out: all are.
  explicit PageTables(const StepLimits& limits, std::vector<int> windows = {});

  // Makes sure that positions [0, end) of a sequence have pages. False, and nothing is taken, when a pool is too small.
  // After commit(), end may be no further beyond the committed ids than the ring has room.
  [[nodiscard]] bool reserve(int sequence, int64_t end);
  // Gives all pages of a sequence back. Those that commit() named stay findable until their place is needed.
  void release(int sequence);

  // What the caches hold of a text, of at least one id.
  PrefixMatch match(std::span<const int32_t> ids) const;
  // Puts match(ids).n_tokens positions into the tables of a sequence that has none.
  PrefixMatch adopt(int sequence, std::span<const int32_t> ids);
  // The sequence's positions [0, ids.size()) are written and final, and hold these ids. Full pages become findable; where
  // another sequence has brought the same page already, that one takes the place of this sequence's own.
  void commit(int sequence, std::span<const int32_t> ids);
  // The sliding groups' windows before this position (a multiple of 64), which was just committed, are as good as the
  // end of a text: once let go they are not given up before others.
  void keep_window(int sequence, int64_t position);
  // Nothing of what this sequence holds is found any more.
  void hide_prefix(int sequence);

  int n_groups() const { return static_cast<int>(groups_.size()); }
  const PagePool& pool(int group) const { return groups_[static_cast<size_t>(group)].pool; }
  // That a sequence has in a global group: reserving fewer positions than they hold takes none.
  int64_t n_pages(int sequence) const { return sequences_[static_cast<size_t>(sequence)].n_begun; }
  // Pages that a reservation may take.
  int free_pages(int group) const { return pool(group).available(); }
  size_t n_prefix_nodes() const { return index_.n_nodes(); }
  // Of the groups that do not slide, those of the scarcest; INT32_MAX without such groups. Sliding groups have a full ring
  // for each sequence.
  int free_global_pages() const;
  // [groups][max_sequences · n_entries], as StepInput wants them.
  const std::vector<std::vector<int32_t>>& tables() const { return tables_; }
  uint64_t version() const { return version_; }   // another one whenever tables() changes

 private:
  struct Group {
    int n_entries = 0;
    int window = 0;
    PagePool pool;
    std::vector<int> node;       // [pages] that knows the page; PrefixIndex::kNone
    std::vector<bool> lasting;   // [pages] see keep_window
  };
  struct Sequence {
    int64_t n_begun = 0;         // pages of positions that have a place in the tables
    int64_t n_committed = 0;     // of these, findable
    int tip = PrefixIndex::kNone;   // the node of the last committed page, held
  };

  int32_t& entry(size_t group, int sequence, int64_t block) {
    const Group& each = groups_[group];
    return tables_[group][static_cast<size_t>(sequence) * static_cast<size_t>(each.n_entries) +
                          static_cast<size_t>(block % each.n_entries)];
  }
  // Of the pages before `block`, the first that a sliding group's next token still reads.
  static int64_t first_live_block(int64_t block, int window) {
    const int64_t first = block * kPageTokens - window + 1;
    return window == 0 || first <= 0 ? 0 : first / kPageTokens;
  }
  int32_t take(size_t group);
  void drop(size_t group, int32_t page, PagePool::GiveUp when);
  void forget(size_t group, int32_t page);
  std::vector<int> find_chain(std::span<const int32_t> ids) const;
  PrefixMatch match_chain(const std::vector<int>& chain) const;

  std::vector<Group> groups_;
  std::vector<Sequence> sequences_;
  std::vector<std::vector<int32_t>> tables_;
  PrefixIndex index_;
  uint64_t version_ = 0;
};

}  // namespace beryl
