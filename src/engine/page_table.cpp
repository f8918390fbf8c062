#include "engine/page_table.h"

#include <algorithm>

#include "base/error.h"

namespace beryl {

PageTables::PageTables(const StepLimits& limits) {
  for (size_t group = 0; group < limits.n_pages.size(); ++group) {
    Pool pool;
    pool.n_entries = limits.n_entries[group];
    for (int page = limits.n_pages[group] - 1; page >= 0; --page) pool.free.push_back(page);
    pools_.push_back(std::move(pool));
    tables_.emplace_back(static_cast<size_t>(limits.max_sequences) * static_cast<size_t>(limits.n_entries[group]), -1);
  }
}

bool PageTables::reserve(int sequence, int64_t end) {
  const auto table_of = [&](size_t group) {
    return tables_[group].begin() + int64_t{sequence} * pools_[group].n_entries;
  };
  const int64_t n_wanted = (end + kPageTokens - 1) / kPageTokens;
  std::vector<int> missing(pools_.size());
  for (size_t group = 0; group < pools_.size(); ++group) {
    const int64_t n_entries = std::min<int64_t>(n_wanted, pools_[group].n_entries);
    missing[group] = static_cast<int>(std::count(table_of(group), table_of(group) + n_entries, -1));
    if (missing[group] > static_cast<int>(pools_[group].free.size())) return false;
  }
  for (size_t group = 0; group < pools_.size(); ++group) {
    auto entry = table_of(group);
    for (int left = missing[group]; left > 0; ++entry) {
      if (*entry >= 0) continue;
      *entry = pools_[group].free.back();
      pools_[group].free.pop_back();
      --left;
    }
  }
  return true;
}

void PageTables::release(int sequence) {
  for (size_t group = 0; group < pools_.size(); ++group) {
    Pool& pool = pools_[group];
    for (int entry = pool.n_entries - 1; entry >= 0; --entry) {
      int32_t& page = tables_[group][static_cast<size_t>(sequence) * static_cast<size_t>(pool.n_entries) +
                                     static_cast<size_t>(entry)];
      if (page >= 0) pool.free.push_back(page);
      page = -1;
    }
  }
}

}  // namespace beryl
