// What: guesses are what followed the same three ids the last time; they are checked where they pay and not where they cost.
// How:  texts that repeat and texts that do not, beside a search from the end; costs of steps that are known.
#include "engine/draft.h"

#include <gtest/gtest.h>

#include "ops/random_matrix.h"

namespace beryl {
namespace {

using Ids = std::vector<int32_t>;

TEST(DraftTest, GuessesAreWhatFollowedTheLastTime) {
  RandomStream random(1);
  Ids ids;
  Drafter drafter;
  int n_found = 0;
  for (int i = 0; i < 3000; ++i) {
    ids.push_back(random.below(8));
    if (random.below(3) == 0 || i + 1 == 3000) drafter.read(ids);
    drafter.read(ids);
    Ids expected;
    for (size_t at = ids.size() - 1; at >= 3 && ids.size() > 3; --at)
      if (std::equal(ids.begin() + static_cast<std::ptrdiff_t>(at) - 3, ids.begin() + static_cast<std::ptrdiff_t>(at), ids.end() - 3)) {
        expected.assign(ids.begin() + static_cast<std::ptrdiff_t>(at),
                        ids.begin() + static_cast<std::ptrdiff_t>(std::min(at + 5, ids.size())));
        break;
      }
    const std::span<const int32_t> guesses = drafter.propose(ids, 5);
    ASSERT_EQ(Ids(guesses.begin(), guesses.end()), expected) << i;
    n_found += !expected.empty();
  }
  EXPECT_GT(n_found, 2000);
  EXPECT_TRUE(Drafter().propose(Ids{1, 2}, 5).empty());
}

StepCost cost_of(double first, double further) {
  StepCost cost;
  for (int i = 0; i < 100; ++i) cost.add(1 + i % 8, first + further * (i % 8));
  return cost;
}

TEST(DraftTest, WhatPaysIsChecked) {
  const StepCost cheap = cost_of(1, 0.01), dear = cost_of(1, 0.6);
  Drafter right, wrong;
  for (int i = 0; i < 50; ++i) {
    right.learn(7, 7);
    wrong.learn(0, 7);
  }
  EXPECT_EQ(right.worthwhile(7, 1, cheap), 7);
  EXPECT_EQ(wrong.worthwhile(7, 1, cost_of(1, 0.2)), 0);
  EXPECT_EQ(wrong.worthwhile(7, 1, dear), 0);
  EXPECT_GT(right.worthwhile(7, 1, dear), 0);          // 1.6 for two tokens beat 1 for one
  EXPECT_EQ(right.worthwhile(7, 1, cost_of(1, 1)), 0);  // a row costs a step
  EXPECT_EQ(right.worthwhile(0, 1, cheap), 0);
  // What turns out wrong is given up, and what turns out right is taken up again, guesses run or not.
  int n_until_off = 0;
  while (right.worthwhile(7, 1, dear) > 0) {
    right.learn(0, 7);
    ASSERT_LT(++n_until_off, 20);
  }
  int n_until_on = 0;
  while (right.worthwhile(7, 1, dear) == 0) {
    right.learn(1, 1);
    ASSERT_LT(++n_until_on, 60);
  }
  // Of many rows a step costs more in all, and a guess yields less than a row of its own would.
  EXPECT_EQ(right.worthwhile(7, 64, cost_of(1, 0.9)), 0);
}

TEST(DraftTest, TheCostOfAStepIsALineThroughTheSteps) {
  const StepCost cost = cost_of(2, 0.5);
  EXPECT_NEAR(cost.of(1), 2, 1e-6);
  EXPECT_NEAR(cost.of(9), 6, 1e-6);
  StepCost one_size;
  for (int i = 0; i < 10; ++i) one_size.add(4, 3);
  EXPECT_NEAR(one_size.of(4), 3, 1e-9);
  EXPECT_GT(one_size.of(8), 3);
  StepCost falling;
  for (int i = 0; i < 20; ++i) falling.add(1 + i % 2, i % 2 == 0 ? 3 : 2);
  EXPECT_GE(falling.of(8), falling.of(1));
  EXPECT_LT(StepCost().of(1), StepCost().of(2));
}

}  // namespace
}  // namespace beryl
