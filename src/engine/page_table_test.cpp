// What: pages are handed out and taken back so that no page has two owners, nothing is lost, a reservation that cannot
//       be met takes nothing, and a sliding group's table wraps.
// How:  thousands of random reservations and releases beside a trivially right model: a map from entry to page.
#include "engine/page_table.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include "ops/random_matrix.h"

namespace beryl {
namespace {

// What PageTables should do, said with sets: which entries are owned is all that matters, not which page each has.
class Ledger {
 public:
  explicit Ledger(const StepLimits& limits) : limits_(limits) {}

  bool reserve(int sequence, int64_t end) {
    std::set<std::tuple<size_t, int, int>> wanted = owned_;
    for (size_t group = 0; group < limits_.n_pages.size(); ++group)
      for (int64_t position = 0; position < end; ++position)
        wanted.insert({group, sequence, static_cast<int>(position / kPageTokens % limits_.n_entries[group])});
    for (size_t group = 0; group < limits_.n_pages.size(); ++group)
      if (count(wanted, group) > limits_.n_pages[group]) return false;
    owned_ = std::move(wanted);
    return true;
  }
  void release(int sequence) {
    std::erase_if(owned_, [&](const auto& entry) { return std::get<1>(entry) == sequence; });
  }
  bool owns(size_t group, int sequence, int entry) const { return owned_.contains({group, sequence, entry}); }
  int free_pages(size_t group) const { return limits_.n_pages[group] - count(owned_, group); }

 private:
  static int count(const std::set<std::tuple<size_t, int, int>>& entries, size_t group) {
    return static_cast<int>(
        std::count_if(entries.begin(), entries.end(), [&](const auto& e) { return std::get<0>(e) == group; }));
  }
  StepLimits limits_;
  std::set<std::tuple<size_t, int, int>> owned_;
};

void expect_agrees(const PageTables& tables, const Ledger& ledger, const StepLimits& limits) {
  ASSERT_EQ(tables.tables().size(), limits.n_pages.size());
  for (size_t group = 0; group < limits.n_pages.size(); ++group) {
    const std::vector<int32_t>& table = tables.tables()[group];
    ASSERT_EQ(table.size(), static_cast<size_t>(limits.max_sequences * limits.n_entries[group]));
    std::set<int32_t> taken;
    for (int sequence = 0; sequence < limits.max_sequences; ++sequence)
      for (int entry = 0; entry < limits.n_entries[group]; ++entry) {
        const int32_t page = table[static_cast<size_t>(sequence * limits.n_entries[group] + entry)];
        ASSERT_EQ(page >= 0, ledger.owns(group, sequence, entry))
            << "group " << group << " sequence " << sequence << " entry " << entry;
        if (page < 0) continue;
        ASSERT_LT(page, limits.n_pages[group]);
        ASSERT_TRUE(taken.insert(page).second) << "page " << page << " of group " << group << " has two owners";
      }
    ASSERT_EQ(tables.free_pages(static_cast<int>(group)), ledger.free_pages(group));
  }
}

TEST(PageTableTest, RandomReservationsAndReleasesAgreeWithTheLedger) {
  RandomStream random(20240611);
  int n_refused = 0, n_wrapped = 0;
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    StepLimits limits;
    limits.max_sequences = 1 + random.below(5);
    const int n_groups = 1 + random.below(3);
    for (int group = 0; group < n_groups; ++group) {
      limits.n_entries.push_back(1 + random.below(6));
      // From one page to more than all sequences can want.
      limits.n_pages.push_back(1 + random.below(limits.max_sequences * limits.n_entries.back() + 2));
    }
    PageTables tables(limits);
    Ledger ledger(limits);
    expect_agrees(tables, ledger, limits);
    for (int step = 0; step < 60; ++step) {
      const int sequence = random.below(limits.max_sequences);
      if (random.below(4) == 0) {
        tables.release(sequence);
        ledger.release(sequence);
      } else {
        const int64_t end = random.below(8 * kPageTokens + 2);
        const auto before = tables.tables();
        const bool reserved = tables.reserve(sequence, end);
        ASSERT_EQ(reserved, ledger.reserve(sequence, end)) << "sequence " << sequence << " end " << end;
        if (!reserved) {
          ASSERT_EQ(tables.tables(), before) << "a refusal took pages";
          ++n_refused;
        }
        if (reserved && end > limits.n_entries[0] * kPageTokens) ++n_wrapped;
      }
      ASSERT_NO_FATAL_FAILURE(expect_agrees(tables, ledger, limits)) << "step " << step;
    }
    for (int sequence = 0; sequence < limits.max_sequences; ++sequence) tables.release(sequence);
    for (int group = 0; group < n_groups; ++group)
      ASSERT_EQ(tables.free_pages(group), limits.n_pages[static_cast<size_t>(group)]);
  }
  EXPECT_GT(n_refused, 100);   // the rounds saw what they are there for
  EXPECT_GT(n_wrapped, 100);
}

TEST(PageTableTest, PagesOfASequenceStayWhenItGrows) {
  StepLimits limits;
  limits.max_sequences = 2;
  limits.n_entries = {4, 2};
  limits.n_pages = {8, 4};
  PageTables tables(limits);
  ASSERT_TRUE(tables.reserve(1, 1));
  const int32_t first = tables.tables()[0][4];
  EXPECT_GE(first, 0);
  ASSERT_TRUE(tables.reserve(0, 100));
  ASSERT_TRUE(tables.reserve(1, 4 * kPageTokens));
  EXPECT_EQ(tables.tables()[0][4], first);
  EXPECT_EQ(tables.free_pages(0), 8 - 2 - 4);
  EXPECT_EQ(tables.free_pages(1), 0);           // the short table wraps: two pages are all it ever takes
  ASSERT_TRUE(tables.reserve(1, 1));            // nothing is given back by asking for less
  EXPECT_EQ(tables.free_pages(0), 8 - 2 - 4);
}

TEST(PageTableTest, APositionsEntryWraps) {
  EXPECT_EQ(page_entry(0, 3), 0);
  EXPECT_EQ(page_entry(63, 3), 0);
  EXPECT_EQ(page_entry(64, 3), 1);
  EXPECT_EQ(page_entry(3 * 64 - 1, 3), 2);
  EXPECT_EQ(page_entry(3 * 64, 3), 0);
  EXPECT_EQ(page_entry(int64_t{1} << 40, 3), static_cast<int>((int64_t{1} << 34) % 3));
}

}  // namespace
}  // namespace beryl
