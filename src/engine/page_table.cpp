#include "engine/page_table.h"

#include <algorithm>

#include "base/error.h"

namespace beryl {

PageTables::PageTables(const StepLimits& limits, std::vector<int> windows)
    : sequences_(static_cast<size_t>(limits.max_sequences)), index_(limits.n_pages.size()) {
  windows.resize(limits.n_pages.size());
  for (size_t group = 0; group < limits.n_pages.size(); ++group) {
    const auto n_pages = static_cast<size_t>(limits.n_pages[group]);
    groups_.push_back({limits.n_entries[group], windows[group], PagePool(limits.n_pages[group]),
                       std::vector<int>(n_pages, PrefixIndex::kNone), std::vector<bool>(n_pages)});
    tables_.emplace_back(static_cast<size_t>(limits.max_sequences) * static_cast<size_t>(limits.n_entries[group]), -1);
  }
}

int32_t PageTables::take(size_t group) {
  Group& each = groups_[group];
  if (each.pool.n_free() == 0) forget(group, each.pool.oldest_idle());
  const int32_t page = each.pool.take();
  each.lasting[static_cast<size_t>(page)] = false;
  return page;
}

void PageTables::drop(size_t group, int32_t page, PagePool::GiveUp when) { groups_[group].pool.drop(page, when); }

// A node without its page in a global group can not be adopted, so the pages of sliding groups that it names go too.
void PageTables::forget(size_t group, int32_t page) {
  const auto unname = [&](size_t which, int32_t named) {
    int& node = groups_[which].node[static_cast<size_t>(named)];
    groups_[which].pool.forget(named);
    const int was = node;
    node = PrefixIndex::kNone;
    index_.clear_page(was, which);
  };
  const int node = groups_[group].node[static_cast<size_t>(page)];
  if (groups_[group].window == 0) {
    index_.hold(node);
    for (size_t other = 0; other < groups_.size(); ++other)
      if (const int32_t named = index_.page(node, other); named != PagePool::kNone) unname(other, named);
    index_.let_go(node);
  } else {
    unname(group, page);
  }
}

bool PageTables::reserve(int sequence, int64_t end) {
  Sequence& self = sequences_[static_cast<size_t>(sequence)];
  const int64_t n_wanted = (end + kPageTokens - 1) / kPageTokens;
  if (n_wanted <= self.n_begun) return true;
  // A page of this sequence alone is written over, or, if it is known, let go and then at hand for the next.
  for (size_t group = 0; group < groups_.size(); ++group) {
    const Group& each = groups_[group];
    int n_taken = 0;
    const int64_t n_looked_at = std::min<int64_t>(n_wanted - self.n_begun, each.n_entries);
    for (int64_t block = self.n_begun; block < self.n_begun + n_looked_at; ++block) {
      const int32_t page = entry(group, sequence, block);
      if (page < 0 || each.pool.references(page) > 1) ++n_taken;
    }
    if (n_taken > each.pool.available()) return false;
  }
  for (size_t group = 0; group < groups_.size(); ++group) {
    Group& each = groups_[group];
    for (int64_t block = self.n_begun; block < n_wanted; ++block) {
      int32_t& page = entry(group, sequence, block);
      if (page >= 0 && each.pool.references(page) == 1 && !each.pool.known(page)) continue;
      if (page >= 0) drop(group, page, each.lasting[static_cast<size_t>(page)] ? PagePool::GiveUp::kLast : PagePool::GiveUp::kSoon);
      page = take(group);
      ++version_;
    }
  }
  self.n_begun = n_wanted;
  return true;
}

void PageTables::release(int sequence) {
  Sequence& self = sequences_[static_cast<size_t>(sequence)];
  for (size_t group = 0; group < groups_.size(); ++group) {
    const int64_t first = std::max<int64_t>(0, self.n_begun - groups_[group].n_entries);
    // The deepest first: a page without those before it is of no use.
    for (int64_t block = self.n_begun - 1; block >= first; --block) {
      int32_t& page = entry(group, sequence, block);
      if (page < 0) continue;
      drop(group, page, PagePool::GiveUp::kLast);
      page = -1;
      ++version_;
    }
  }
  if (self.tip != PrefixIndex::kNone) index_.let_go(self.tip);
  self = Sequence();
}

// The nodes of a text's pages, as far as every global group has its page. Its last id is left to be read.
std::vector<int> PageTables::find_chain(std::span<const int32_t> ids) const {
  std::vector<int> chain;
  int parent = PrefixIndex::kNone;
  for (size_t end = kPageTokens; end < ids.size(); end += kPageTokens) {
    const int node = index_.find(parent, ids.subspan(end - kPageTokens).first<kPageTokens>());
    if (node == PrefixIndex::kNone) break;
    const auto lacks = [&](size_t group) {
      return groups_[group].window == 0 && index_.page(node, group) == PagePool::kNone;
    };
    bool whole = true;
    for (size_t group = 0; group < groups_.size(); ++group) whole = whole && !lacks(group);
    if (!whole) break;
    chain.push_back(node);
    parent = node;
  }
  return chain;
}

PrefixMatch PageTables::match_chain(const std::vector<int>& chain) const {
  PrefixMatch match;
  match.n_known = static_cast<int64_t>(chain.size()) * kPageTokens;
  auto n_blocks = static_cast<int64_t>(chain.size());
  // Down from the longest until every sliding group has all that the next token reads.
  for (bool whole = false; !whole && n_blocks > 0;) {
    whole = true;
    for (size_t group = 0; group < groups_.size() && whole; ++group) {
      if (groups_[group].window == 0) continue;
      for (int64_t block = n_blocks - 1; block >= first_live_block(n_blocks, groups_[group].window); --block) {
        if (index_.page(chain[static_cast<size_t>(block)], group) != PagePool::kNone) continue;
        n_blocks = block;   // no longer beginning reads past the gap
        whole = false;
        break;
      }
    }
  }
  match.n_tokens = n_blocks * kPageTokens;
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (groups_[group].window != 0) continue;
    for (int64_t block = 0; block < n_blocks; ++block)
      match.n_idle += pool(static_cast<int>(group)).references(index_.page(chain[static_cast<size_t>(block)], group)) == 0;
    break;
  }
  return match;
}

PrefixMatch PageTables::match(std::span<const int32_t> ids) const { return match_chain(find_chain(ids)); }

PrefixMatch PageTables::adopt(int sequence, std::span<const int32_t> ids) {
  Sequence& self = sequences_[static_cast<size_t>(sequence)];
  BERYL_CHECK(self.n_begun == 0, "a sequence begins with what it adopts");
  const std::vector<int> chain = find_chain(ids);
  const PrefixMatch match = match_chain(chain);
  const int64_t n_blocks = match.n_tokens / kPageTokens;
  if (n_blocks == 0) return match;
  for (size_t group = 0; group < groups_.size(); ++group)
    for (int64_t block = first_live_block(n_blocks, groups_[group].window); block < n_blocks; ++block) {
      const int32_t page = index_.page(chain[static_cast<size_t>(block)], group);
      groups_[group].pool.share(page);
      entry(group, sequence, block) = page;
    }
  self.n_begun = self.n_committed = n_blocks;
  self.tip = chain[static_cast<size_t>(n_blocks - 1)];
  index_.hold(self.tip);
  ++version_;
  return match;
}

void PageTables::commit(int sequence, std::span<const int32_t> ids) {
  Sequence& self = sequences_[static_cast<size_t>(sequence)];
  const auto n_full = static_cast<int64_t>(ids.size()) / kPageTokens;
  BERYL_CHECK(n_full <= self.n_begun, "what is committed was reserved");
  for (; self.n_committed < n_full; ++self.n_committed) {
    const int64_t block = self.n_committed;
    const int node =
        index_.find_or_add(self.tip, ids.subspan(static_cast<size_t>(block * kPageTokens)).first<kPageTokens>());
    if (self.tip != PrefixIndex::kNone) index_.let_go(self.tip);
    self.tip = node;
    for (size_t group = 0; group < groups_.size(); ++group) {
      Group& each = groups_[group];
      if (block + each.n_entries < self.n_begun) continue;   // the ring has come round
      int32_t& own = entry(group, sequence, block);
      const int32_t known = index_.page(node, group);
      if (known == PagePool::kNone) {
        index_.set_page(node, group, own);
        each.pool.remember(own);
        each.node[static_cast<size_t>(own)] = node;
      } else if (known != own) {
        each.pool.share(known);
        each.pool.drop(own, PagePool::GiveUp::kSoon);
        own = known;
        ++version_;
      }
    }
  }
}

void PageTables::keep_window(int sequence, int64_t position) {
  const int64_t end = position / kPageTokens;
  for (size_t group = 0; group < groups_.size(); ++group) {
    Group& each = groups_[group];
    if (each.window == 0) continue;
    const Sequence& self = sequences_[static_cast<size_t>(sequence)];
    BERYL_CHECK(end <= self.n_committed, "a window that is kept was committed");
    for (int64_t block = std::max(first_live_block(end, each.window), self.n_begun - each.n_entries); block < end; ++block)
      if (const int32_t page = entry(group, sequence, block); page >= 0) each.lasting[static_cast<size_t>(page)] = true;
  }
}

void PageTables::hide_prefix(int sequence) {
  for (int node = sequences_[static_cast<size_t>(sequence)].tip; node != PrefixIndex::kNone; node = index_.parent(node))
    index_.hide(node);
}

int PageTables::free_global_pages() const {
  int least = INT32_MAX;
  for (const Group& group : groups_)
    if (group.window == 0) least = std::min(least, group.pool.available());
  return least;
}

}  // namespace beryl
