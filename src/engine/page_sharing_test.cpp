// What: sequences that share pages always find their own ids at every position that they may still read, whatever the
//       others do; a page is in as many tables as it has references, and nothing is lost; what can be found again is found.
// How:  thousands of random adoptions, steps, rejected drafts, releases on small pools that are always short, beside a
//       model of what each page holds, written position by position; and, without shortage, beside the set of all texts.
#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "engine/page_table.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

using Ids = std::vector<int32_t>;

// What stands at a position: a hash of all ids up to it.
uint64_t chained(uint64_t before, int32_t id) { return (before ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15u + 1; }

struct Shape {
  StepLimits limits;
  std::vector<int> windows;
  int chunk = 1;
  int64_t context = 0;
};

// Tables as an engine uses them, and the contents of all pages.
class Caches {
 public:
  explicit Caches(const Shape& shape) : shape_(shape), tables_(shape.limits, shape.windows) {
    texts_.resize(static_cast<size_t>(shape.limits.max_sequences));
    for (int n_pages : shape.limits.n_pages)
      contents_.emplace_back(static_cast<size_t>(n_pages) * kPageTokens, uint64_t{0});
  }

  PageTables& tables() { return tables_; }
  const Ids& text(int sequence) const { return texts_[static_cast<size_t>(sequence)]; }

  PrefixMatch begin(int sequence, const Ids& ids) {
    const PrefixMatch found = tables_.match(ids), adopted = tables_.adopt(sequence, ids);
    EXPECT_EQ(found.n_tokens, adopted.n_tokens);
    EXPECT_LT(adopted.n_tokens, static_cast<int64_t>(ids.size()));
    EXPECT_EQ(adopted.n_tokens % kPageTokens, 0);
    EXPECT_LE(adopted.n_tokens, adopted.n_known);
    texts_[static_cast<size_t>(sequence)].assign(ids.begin(), ids.begin() + adopted.n_tokens);
    return adopted;
  }
  // Reads `ids`, the last n_rejected of which turn out wrong. False: no pages.
  bool step(int sequence, const Ids& ids, size_t n_rejected) {
    Ids& text = texts_[static_cast<size_t>(sequence)];
    if (!tables_.reserve(sequence, static_cast<int64_t>(text.size() + ids.size()))) return false;
    uint64_t value = hash_of(text);
    for (size_t i = 0; i < ids.size(); ++i) {
      value = chained(value, ids[i]);
      for (size_t group = 0; group < contents_.size(); ++group)
        content(group, page_of(group, sequence, static_cast<int64_t>(text.size() + i)),
                static_cast<int64_t>(text.size() + i)) = value;
    }
    text.insert(text.end(), ids.begin(), ids.end() - static_cast<std::ptrdiff_t>(n_rejected));
    tables_.commit(sequence, text);
    return true;
  }
  void end(int sequence) {
    tables_.release(sequence);
    texts_[static_cast<size_t>(sequence)].clear();
  }

  void expect_whole() {
    for (size_t group = 0; group < contents_.size(); ++group) {
      const PagePool& pool = tables_.pool(static_cast<int>(group));
      std::map<int32_t, int> named;
      for (int32_t page : tables_.tables()[group])
        if (page >= 0) ++named[page];
      int n_in_use = 0;
      for (int32_t page = 0; page < pool.n_pages(); ++page) {
        ASSERT_EQ(pool.references(page), named[page]) << "group " << group << " page " << page;
        n_in_use += named[page] > 0;
      }
      ASSERT_EQ(pool.n_free() + pool.n_idle() + n_in_use, pool.n_pages()) << "group " << group;
      for (int sequence = 0; sequence < shape_.limits.max_sequences; ++sequence) {
        const Ids& text = texts_[static_cast<size_t>(sequence)];
        const auto length = static_cast<int64_t>(text.size());
        const int window = shape_.windows[group];
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, length - window + 1);
        uint64_t value = 0;
        for (int64_t position = 0; position < length; ++position) {
          value = chained(value, text[static_cast<size_t>(position)]);
          if (position < first) continue;
          const int32_t page = page_of(group, sequence, position);
          ASSERT_GE(page, 0) << "group " << group << " position " << position;
          ASSERT_EQ(content(group, page, position), value)
              << "group " << group << " sequence " << sequence << " position " << position << " of " << length;
        }
      }
    }
  }

 private:
  static uint64_t hash_of(const Ids& ids) {
    uint64_t value = 0;
    for (int32_t id : ids) value = chained(value, id);
    return value;
  }
  int32_t page_of(size_t group, int sequence, int64_t position) const {
    const int n_entries = shape_.limits.n_entries[group];
    return tables_.tables()[group][static_cast<size_t>(sequence * n_entries + page_entry(position, n_entries))];
  }
  uint64_t& content(size_t group, int32_t page, int64_t position) {
    return contents_[group][static_cast<size_t>(page) * kPageTokens + static_cast<size_t>(position % kPageTokens)];
  }

  Shape shape_;
  PageTables tables_;
  std::vector<Ids> texts_;
  std::vector<std::vector<uint64_t>> contents_;
};

// Global and sliding groups as limits_for makes them; pages from one whole context to plenty.
Shape random_shape(RandomStream& random) {
  Shape shape;
  shape.limits.max_sequences = 1 + random.below(5);
  shape.chunk = 1 + random.below(100);
  const int context_pages = 2 + random.below(10);
  shape.context = context_pages * kPageTokens;
  const int n_groups = 1 + random.below(3);
  for (int group = 0; group < n_groups; ++group) {
    const bool slides = group > 0 || random.below(6) == 0;
    int entries = context_pages;
    if (slides) {
      shape.windows.push_back(1 + random.below(200));
      entries = std::min(entries, (shape.windows.back() - 1 + shape.chunk + kPageTokens - 2) / kPageTokens + 1);
      shape.limits.n_pages.push_back(entries * shape.limits.max_sequences + random.below(4));
    } else {
      shape.windows.push_back(0);
      shape.limits.n_pages.push_back(entries + random.below(entries * shape.limits.max_sequences));
    }
    shape.limits.n_entries.push_back(entries);
  }
  return shape;
}

// Texts that begin alike: each is a walk in a tree with two ways on at each page.
Ids random_text(RandomStream& random, int64_t most) {
  Ids ids(static_cast<size_t>(1 + random.below(static_cast<int>(most))));
  int32_t way = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i % kPageTokens == 0) way = random.below(4) == 0;
    ids[i] = way;
  }
  return ids;
}

TEST(PageSharingTest, EverySequenceFindsItsOwnTextWhateverTheOthersDo) {
  RandomStream random(20261130);
  int n_adopted = 0, n_refused = 0, n_window = 0, n_shared = 0, n_given_up = 0;
  for (int round = 0; round < 150; ++round) {
    SCOPED_TRACE(round);
    const Shape shape = random_shape(random);
    Caches caches(shape);
    std::vector<Ids> targets(static_cast<size_t>(shape.limits.max_sequences));
    for (int action = 0; action < 120; ++action) {
      const int sequence = random.below(shape.limits.max_sequences);
      Ids& target = targets[static_cast<size_t>(sequence)];
      if (target.empty()) {
        target = random_text(random, shape.context);
        const PrefixMatch match = caches.begin(sequence, target);
        n_adopted += match.n_tokens > 0;
        n_window += match.n_known > match.n_tokens;
      } else if (caches.text(sequence).size() == target.size() || random.below(25) == 0) {
        if (random.below(10) == 0) caches.tables().hide_prefix(sequence);
        caches.end(sequence);
        target.clear();
      } else {
        const size_t held = caches.text(sequence).size();
        const size_t n = std::min(target.size() - held, static_cast<size_t>(1 + random.below(shape.chunk)));
        Ids ids(target.begin() + static_cast<std::ptrdiff_t>(held), target.begin() + static_cast<std::ptrdiff_t>(held + n));
        size_t n_rejected = 0;
        if (random.below(3) == 0) {
          // The last ones are guesses, and wrong.
          n_rejected = static_cast<size_t>(random.below(static_cast<int>(n)));
          for (size_t i = n - n_rejected; i < n; ++i) ids[i] = 7;
        }
        const int idle = caches.tables().pool(0).n_idle();
        if (!caches.step(sequence, ids, n_rejected)) ++n_refused;
        n_given_up += caches.tables().pool(0).n_idle() < idle;
        if (const int64_t pages = static_cast<int64_t>(caches.text(sequence).size()) / kPageTokens; pages > 0 && random.below(3) == 0)
          caches.tables().keep_window(sequence, pages * kPageTokens);
      }
      ASSERT_NO_FATAL_FAILURE(caches.expect_whole()) << "action " << action;
      for (int32_t page = 0; page < caches.tables().pool(0).n_pages(); ++page)
        n_shared += caches.tables().pool(0).references(page) > 1;
    }
    for (int sequence = 0; sequence < shape.limits.max_sequences; ++sequence) caches.end(sequence);
    ASSERT_NO_FATAL_FAILURE(caches.expect_whole());
    for (int group = 0; group < caches.tables().n_groups(); ++group)
      ASSERT_EQ(caches.tables().free_pages(group), caches.tables().pool(group).n_pages());
  }
  EXPECT_GT(n_adopted, 200);   // the rounds saw what they are there for
  EXPECT_GT(n_refused, 200);
  EXPECT_GT(n_window, 50);
  EXPECT_GT(n_shared, 500);
  EXPECT_GT(n_given_up, 200);
}

TEST(PageSharingTest, WithoutShortageAllThatWasEverReadIsFound) {
  RandomStream random(3);
  Shape shape;
  shape.limits.max_sequences = 3;
  shape.context = 20 * kPageTokens;
  shape.chunk = 50;
  shape.limits.n_entries = {20, 5};
  shape.windows = {0, 150};
  shape.limits.n_pages = {2000, 2000};
  Caches caches(shape);
  std::set<Ids> read;   // all beginnings in whole pages
  for (int text = 0; text < 60; ++text) {
    const Ids ids = random_text(random, shape.context);
    const int sequence = random.below(3);
    const PrefixMatch match = caches.begin(sequence, ids);
    int64_t expected = 0;
    while (expected + kPageTokens < static_cast<int64_t>(ids.size()) &&
           read.contains(Ids(ids.begin(), ids.begin() + expected + kPageTokens)))
      expected += kPageTokens;
    EXPECT_EQ(match.n_tokens, expected) << "text " << text;
    EXPECT_EQ(match.n_known, expected) << "text " << text;
    while (caches.text(sequence).size() < ids.size()) {
      const auto held = static_cast<std::ptrdiff_t>(caches.text(sequence).size());
      ASSERT_TRUE(caches.step(sequence, Ids(ids.begin() + held, ids.begin() + std::min<std::ptrdiff_t>(held + 50, std::ssize(ids))), 0));
    }
    for (int64_t end = kPageTokens; end <= std::ssize(ids); end += kPageTokens) read.insert(Ids(ids.begin(), ids.begin() + end));
    caches.end(sequence);
  }
  EXPECT_LE(caches.tables().n_prefix_nodes(), read.size());
}

TEST(PageSharingTest, AKeptWindowOutlastsTheOthers) {
  // One sequence, a window of two pages, a ring of four: what the ring comes round to is given up first, but for the window
  // that was kept.
  for (bool keeps : {false, true}) {
    Shape shape;
    shape.limits.max_sequences = 1;
    shape.context = 12 * kPageTokens;
    shape.chunk = kPageTokens;
    shape.limits.n_entries = {12, 4};
    shape.windows = {0, 2 * kPageTokens};
    shape.limits.n_pages = {24, 6};
    Caches caches(shape);
    const Ids ids(12 * kPageTokens, 5);
    caches.begin(0, ids);
    for (int page = 0; page < 12; ++page) {
      ASSERT_TRUE(caches.step(0, Ids(kPageTokens, 5), 0));
      if (keeps && page == 3) caches.tables().keep_window(0, 4 * kPageTokens);
    }
    caches.end(0);
    const Ids shorter(4 * kPageTokens + 1, 5);
    const PrefixMatch match = caches.tables().match(shorter);
    EXPECT_EQ(match.n_known, 4 * kPageTokens);
    EXPECT_EQ(match.n_tokens, (keeps ? 4 : 2) * kPageTokens);
    // The end of the text is there in any case.
    EXPECT_EQ(caches.tables().match(Ids(12 * kPageTokens + 1, 5)).n_tokens, 12 * kPageTokens);
  }
}

TEST(PageSharingTest, HiddenTextsAreNotFound) {
  Shape shape;
  shape.limits.max_sequences = 2;
  shape.context = 4 * kPageTokens;
  shape.chunk = kPageTokens;
  shape.limits.n_entries = {4};
  shape.windows = {0};
  shape.limits.n_pages = {8};
  Caches caches(shape);
  const Ids ids(2 * kPageTokens + 1, 1);
  caches.begin(0, ids);
  ASSERT_TRUE(caches.step(0, Ids(kPageTokens, 1), 0) && caches.step(0, Ids(kPageTokens, 1), 0));
  caches.begin(1, ids);
  EXPECT_EQ(caches.text(1).size(), 2u * kPageTokens);
  caches.tables().hide_prefix(1);
  EXPECT_EQ(caches.tables().match(ids).n_known, 0);
  // Those who have it go on, and a fresh copy can be found.
  ASSERT_TRUE(caches.step(0, Ids(kPageTokens, 1), 0));
  caches.end(1);
  caches.begin(1, ids);
  ASSERT_TRUE(caches.step(1, Ids(kPageTokens, 1), 0));
  ASSERT_NO_FATAL_FAILURE(caches.expect_whole());
  EXPECT_EQ(caches.tables().match(ids).n_known, kPageTokens);
  caches.end(0);
  caches.end(1);
  EXPECT_EQ(caches.tables().free_pages(0), 8);
}

}  // namespace
}  // namespace beryl
