// What: merging with a heap gives what the rule says (best pair first, ties leftmost), and costs O(n) lookups and pops.
// How:  random merge lists and random rows, compared with a model that searches the whole row before each merge; the
//       costs are counted, at n and at 2n, so that no clock is involved.
#include "text/bpe.h"

#include <random>
#include <string>

#include <gtest/gtest.h>

#include "text/vocabulary.h"

namespace beryl {
namespace {

// The rule, word for word.
std::vector<int32_t> merge_naively(std::vector<int32_t> row, const MergeTable& merges) {
  for (;;) {
    std::optional<Merge> best;
    size_t where = 0;
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      const auto merge = merges.find(row[i], row[i + 1]);
      if (merge && (!best || merge->priority < best->priority)) {
        best = merge;
        where = i;
      }
    }
    if (!best) return row;
    row[where] = best->id;
    row.erase(row.begin() + static_cast<ptrdiff_t>(where) + 1);
  }
}

std::vector<Symbol> symbols_of(const std::vector<int32_t>& row) {
  std::vector<Symbol> symbols;
  for (size_t i = 0; i < row.size(); ++i) symbols.push_back({static_cast<uint32_t>(i), 1, row[i]});
  return symbols;
}

MergeCounts run(std::vector<Symbol>& symbols, const MergeTable& merges) {
  MergeScratch scratch;
  return merge_symbols(symbols, [&](const Symbol& a, const Symbol& b) { return merges.find(a.id, b.id); }, scratch);
}

TEST(Bpe, EqualsTheNaiveRuleOnRandomLists) {
  std::mt19937 random(1);
  size_t n_merged = 0;
  for (int round = 0; round < 4000; ++round) {
    // Few letters and many merges of earlier results, so that merges compete and cascade. Ranks repeat: ties.
    const int32_t n_letters = 2 + static_cast<int32_t>(random() % 4);
    MergeTable merges;
    merges.reserve(30);
    int32_t n_tokens = n_letters;
    for (int m = 0; m < 30; ++m) {
      const auto token = [&] { return static_cast<int32_t>(random() % static_cast<uint32_t>(n_tokens)); };
      merges.add(token(), token(), static_cast<uint32_t>(random() % 12), n_tokens);
      ++n_tokens;
    }
    std::vector<int32_t> row(random() % 40);
    for (int32_t& id : row)
      id = static_cast<int32_t>(random() % static_cast<uint32_t>(n_letters + 1)) - 1;   // -1: no token
    std::vector<Symbol> symbols = symbols_of(row);
    run(symbols, merges);
    std::vector<int32_t> merged;
    uint32_t end = 0;
    for (const Symbol& symbol : symbols) {
      merged.push_back(symbol.id);
      ASSERT_EQ(symbol.begin, end);   // symbols tile the row
      end += symbol.length;
    }
    ASSERT_EQ(end, row.size());
    ASSERT_EQ(merged, merge_naively(row, merges)) << testing::PrintToString(row);
    n_merged += row.size() - merged.size();
  }
  EXPECT_GT(n_merged, 10000u);   // the rounds do merge
}

TEST(Bpe, CostGrowsLinearlyWithTheRow) {
  MergeTable merges;   // a, aa, aaaa, ...: every pair merges, at every level
  merges.reserve(24);
  for (int32_t i = 0; i < 24; ++i) merges.add(i, i, static_cast<uint32_t>(i), i + 1);
  const auto cost = [&](size_t n) {
    std::vector<Symbol> symbols = symbols_of(std::vector<int32_t>(n, 0));
    const MergeCounts counts = run(symbols, merges);
    EXPECT_LE(counts.lookups, 3 * n);   // one a pair at first, two a merge
    EXPECT_LE(counts.pops, counts.lookups);
    return counts.lookups + counts.pops;
  };
  for (const size_t n : {1000u, 100000u}) EXPECT_LE(cost(2 * n), cost(n) * 21 / 10);
}

TEST(Bpe, RowsWithoutMergesStay) {
  MergeTable merges;
  for (const size_t n : {0u, 1u, 2u, 7u}) {
    std::vector<Symbol> symbols = symbols_of(std::vector<int32_t>(n, 3));
    run(symbols, merges);
    EXPECT_EQ(symbols.size(), n);
  }
}

TEST(MergeTable, FindsWhatWasAddedAndNothingElse) {
  MergeTable merges;
  constexpr int32_t kCount = 20000;
  merges.reserve(kCount);
  for (int32_t i = 0; i < kCount; ++i) merges.add(i, i * 7 % kCount, static_cast<uint32_t>(i), i + 5);
  merges.add(3, 21, 99999, 1);   // there already: the first rank stays
  EXPECT_EQ(merges.size(), size_t{kCount});
  for (int32_t i = 0; i < kCount; ++i) {
    const auto found = merges.find(i, i * 7 % kCount);
    ASSERT_TRUE(found);
    ASSERT_EQ(found->priority, static_cast<uint32_t>(i));
    ASSERT_EQ(found->id, i + 5);
    ASSERT_FALSE(merges.find(i, i * 7 % kCount + 1));
  }
  EXPECT_FALSE(merges.find(-1, 0));
  EXPECT_FALSE(merges.find(0, -1));
}

TEST(Vocabulary, FindsEveryTokenByItsText) {
  Vocabulary vocabulary;
  EXPECT_EQ(vocabulary.find("x"), -1);
  std::vector<std::string> texts;
  for (int i = 0; i < 3000; ++i) texts.push_back(std::string(static_cast<size_t>(i % 40), 'a') + std::to_string(i));
  texts.push_back("");
  texts.push_back(texts[5]);   // again: the lower id keeps the text
  for (const std::string& text : texts) vocabulary.add(text, TokenType::kNormal);
  vocabulary.build_index();
  for (size_t i = 0; i + 1 < texts.size(); ++i) {
    ASSERT_EQ(vocabulary.find(texts[i]), static_cast<int32_t>(i));
    ASSERT_EQ(vocabulary.text(static_cast<int32_t>(i)), texts[i]);
    ASSERT_EQ(vocabulary.find(texts[i] + "!"), -1);
  }
}

TEST(TokenMatcher, TakesTheLongestStringThatStartsHere) {
  TokenMatcher matcher;
  EXPECT_TRUE(matcher.empty());
  matcher.add("<a>", 1);
  matcher.add("<a>b", 2);
  matcher.add("<abc>", 3);
  matcher.add("\n", 4);
  matcher.add("\n\n\n", 5);
  const auto id = [&](std::string_view text, size_t position) {
    const auto match = matcher.match(text, position);
    return match ? match->id : -1;
  };
  EXPECT_EQ(id("<a>b", 0), 2);
  EXPECT_EQ(id("<a>c", 0), 1);
  EXPECT_EQ(id("<abc", 0), -1);
  EXPECT_EQ(id("<abc>", 0), 3);
  EXPECT_EQ(id("x<a>", 0), -1);
  EXPECT_EQ(id("x<a>", 1), 1);
  EXPECT_EQ(id("\n\n", 0), 4);      // no token of two
  EXPECT_EQ(id("\n\n\n\n", 0), 5);
  EXPECT_EQ(matcher.match("<a>b", 0)->length, 4u);
}

}  // namespace
}  // namespace beryl
