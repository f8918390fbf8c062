// What: a row of logits becomes the token that its parameters say.
// How:  draws are counted against the exact probabilities; every filter is compared with a model that sorts everything
//       and keeps whole lists; the corners (ties, NaN, bans, history) by hand.
#include "ops/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "ops/random_matrix.h"

namespace beryl {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Sampled sample(const std::vector<float>& logits, const SampleParams& params,
               const std::vector<uint32_t>& history = {}) {
  SampleScratch scratch;
  return sample_row(logits.data(), static_cast<int64_t>(logits.size()), params,
                    history.empty() ? nullptr : history.data(), scratch);
}

// ---- the model: all tokens with their weights, sorted, then cut ---------------------------------------------------

struct Candidate {
  int32_t id;
  double value;
  double weight;
};

// Kept tokens by ascending id with their unnormalised weights; empty when all are banned.
std::vector<Candidate> model(const std::vector<float>& logits, const SampleParams& params,
                             const std::vector<uint32_t>& history = {}) {
  std::vector<Candidate> all;
  for (size_t i = 0; i < logits.size(); ++i) {
    const auto id = static_cast<int32_t>(i);
    float value = logits[i];
    for (const auto& [biased, bias] : params.logit_bias)
      if (biased == id) value += bias;
    if (params.allowed != nullptr && (params.allowed[i / 32] >> (i % 32)) % 2 == 0) continue;
    if (value == -kInfinity) continue;
    if (!history.empty() && history[i] != 0) {
      const auto count = static_cast<float>(history[i] % kInPrompt);
      value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
      if (count > 0) value -= params.presence_penalty + params.frequency_penalty * count;
    }
    all.push_back({id, value, 0});
  }
  if (all.empty()) return all;
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.value > b.value; });
  if (params.temperature == 0) {
    all.resize(1);
    all[0].weight = 1;
    return all;
  }
  if (params.top_k > 0) all.resize(std::min(all.size(), static_cast<size_t>(params.top_k)));
  const double largest = all[0].value;
  double total = 0;
  for (Candidate& candidate : all) {
    candidate.weight = std::exp((candidate.value - largest) / params.temperature);
    total += candidate.weight;
  }
  if (params.top_p < 1) {
    double running = 0;
    size_t n = 0;
    do running += all[n++].weight;
    while (n < all.size() && running < static_cast<double>(params.top_p) * total);
    all.resize(n);
  }
  std::erase_if(all, [&](const Candidate& candidate) { return candidate.weight < params.min_p; });
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return all;
}

int32_t draw(const std::vector<Candidate>& kept, const SampleParams& params) {
  double total = 0, running = 0;
  for (const Candidate& candidate : kept) total += candidate.weight;
  const double target = static_cast<double>(philox(params.seed, params.draw).x[0]) / 4294967296.0 * total;
  for (const Candidate& candidate : kept)
    if ((running += candidate.weight) > target) return candidate.id;
  return kept.back().id;
}

std::vector<float> random_logits(RandomStream& random, int vocab, bool tied) {
  std::vector<float> logits;
  for (int i = 0; i < vocab; ++i)
    logits.push_back(tied ? static_cast<float>(random.below(6)) : random.between(-5, 5) + random.between(-3, 3));
  return logits;
}

TEST(Sample, AgreesWithTheSortingModelOnRandomRows) {
  RandomStream random(11);
  for (int round = 0; round < 3000; ++round) {
    const int vocab = 1 + random.below(round % 10 == 0 ? 2000 : 60);
    const std::vector<float> logits = random_logits(random, vocab, round % 3 == 0);
    SampleParams params;
    params.seed = random.bits();
    params.draw = random.bits();
    if (random.below(5) > 0) params.temperature = random.between(0.1f, 3.0f);
    if (random.below(2) == 0) params.top_k = 1 + random.below(vocab + 5);
    if (random.below(2) == 0) params.top_p = random.between(0, 1);
    if (random.below(2) == 0) params.min_p = random.between(0, 0.5f);
    if (random.below(2) == 0)
      for (int i = 0; i < 5; ++i)
        params.logit_bias.emplace_back(random.below(vocab), random.below(3) == 0 ? -kInfinity : random.between(-9, 9));
    std::vector<uint32_t> mask(static_cast<size_t>(vocab + 31) / 32);
    for (uint32_t& word : mask) word = static_cast<uint32_t>(random.bits());
    if (random.below(3) == 0) params.allowed = mask.data();
    std::vector<uint32_t> history;
    if (random.below(3) == 0) {
      for (int i = 0; i < vocab; ++i)
        history.push_back(random.below(2) == 0 ? 0
                                               : static_cast<uint32_t>(random.below(4)) |
                                                     (random.below(2) == 0 ? kInPrompt : 0));
      params.repetition_penalty = random.between(0.7f, 1.8f);
      params.presence_penalty = random.between(-1, 1);
      params.frequency_penalty = random.between(-1, 1);
    }
    const std::vector<Candidate> kept = model(logits, params, history);
    const Sampled sampled = sample(logits, params, history);
    ASSERT_EQ(sampled.valid, !kept.empty()) << round;
    ASSERT_EQ(sampled.id, kept.empty() ? -1 : draw(kept, params)) << round;
  }
}

// ---- the draw ----------------------------------------------------------------------------------------------------

// Pearson's statistic of n draws with counters 0 to n - 1. With k kept tokens it has mean k - 1 and variance 2 (k - 1);
// the test allows six deviations more. (k kept tokens, every one expected at least five times.)
void expect_distribution(const std::vector<float>& logits, SampleParams params, int n) {
  const std::vector<Candidate> kept = model(logits, params);
  double total = 0;
  for (const Candidate& candidate : kept) total += candidate.weight;
  std::map<int32_t, int> counts;
  for (int i = 0; i < n; ++i) {
    params.draw = static_cast<uint64_t>(i);
    ++counts[sample(logits, params).id];
  }
  double statistic = 0;
  int n_drawn = 0;
  for (const Candidate& candidate : kept) {
    const double expected = n * candidate.weight / total;
    ASSERT_GE(expected, 5) << candidate.id;
    const int drawn = counts[candidate.id];
    statistic += (drawn - expected) * (drawn - expected) / expected;
    n_drawn += drawn;
  }
  EXPECT_EQ(n_drawn, n) << "a token was drawn that the filters drop";
  const double mean = static_cast<double>(kept.size()) - 1;
  EXPECT_LT(statistic, mean + 6 * std::sqrt(2 * mean));
}

TEST(Sample, DrawsFollowTheSoftmax) {
  const std::vector<float> logits = {0.5f, 2, -1, 1.5f, 0, 1, -0.5f, 2.25f, 0.75f, -1.5f};
  expect_distribution(logits, {.temperature = 1, .seed = 1234}, 40000);
  expect_distribution(logits, {.temperature = 2.5f, .seed = 99}, 40000);
  expect_distribution(logits, {.temperature = 0.5f, .seed = 5}, 100000);
}

TEST(Sample, DrawsFollowTheSoftmaxOfWhatTheFiltersKeep) {
  const std::vector<float> logits = {0.5f, 2, -1, 1.5f, 0, 1, -0.5f, 2.25f, 0.75f, -1.5f};
  expect_distribution(logits, {.temperature = 1, .top_k = 4, .seed = 3}, 20000);
  expect_distribution(logits, {.temperature = 1, .top_p = 0.7f, .seed = 4}, 20000);
  expect_distribution(logits, {.temperature = 1, .min_p = 0.2f, .seed = 5}, 20000);
  expect_distribution(logits, {.temperature = 1.5f, .top_k = 7, .top_p = 0.9f, .min_p = 0.3f, .seed = 6}, 20000);
}

TEST(Sample, TheSameSeedAndCounterGiveTheSameToken) {
  RandomStream random(3);
  const std::vector<float> logits = random_logits(random, 500, false);
  int n_different_counters = 0, n_different_seeds = 0;
  for (uint64_t draw = 0; draw < 200; ++draw) {
    const SampleParams params{.temperature = 2, .seed = 8, .draw = draw};
    const int32_t id = sample(logits, params).id;
    EXPECT_EQ(sample(logits, params).id, id);
    SampleParams other = params;
    other.draw = draw + 1000;
    n_different_counters += sample(logits, other).id != id ? 1 : 0;
    other = params;
    other.seed = 9;
    n_different_seeds += sample(logits, other).id != id ? 1 : 0;
  }
  EXPECT_GT(n_different_counters, 100);
  EXPECT_GT(n_different_seeds, 100);
}

TEST(Sample, ScratchOfAnotherRowDoesNotMatter) {
  RandomStream random(4);
  SampleScratch scratch;
  for (int i = 0; i < 200; ++i) {
    const std::vector<float> logits = random_logits(random, 1 + random.below(300), i % 2 == 0);
    const SampleParams params{.temperature = 1, .top_k = random.below(30), .top_p = 0.9f, .seed = 1,
                              .draw = static_cast<uint64_t>(i), .n_logprobs = random.below(5)};
    const Sampled fresh = sample(logits, params);
    const Sampled reused = sample_row(logits.data(), static_cast<int64_t>(logits.size()), params, nullptr, scratch);
    EXPECT_EQ(fresh.id, reused.id);
    EXPECT_EQ(fresh.logprob, reused.logprob);
    EXPECT_EQ(fresh.top, reused.top);
  }
}

// ---- corners -----------------------------------------------------------------------------------------------------

TEST(Sample, GreedyTakesTheLowestIdOfEquals) {
  EXPECT_EQ(sample({1, 3, 2, 3, 3}, {}).id, 1);
  EXPECT_EQ(sample({-kInfinity, -5}, {}).id, 1);
}

TEST(Sample, TopKKeepsTheLowerIdsAmongEquals) {
  std::map<int32_t, int> counts;
  for (uint64_t draw = 0; draw < 500; ++draw)
    ++counts[sample({1, 2, 2, 2, 2, 0}, {.temperature = 1, .top_k = 2, .seed = 1, .draw = draw}).id];
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_GT(counts[1], 150);
  EXPECT_GT(counts[2], 150);
}

TEST(Sample, TopPKeepsTheTokenThatReachesTheSumAndAtLeastOne) {
  // Four equal tokens: half of the mass is exactly the first two.
  for (uint64_t draw = 0; draw < 300; ++draw) {
    EXPECT_LE(sample({0, 0, 0, 0}, {.temperature = 1, .top_p = 0.5f, .seed = 2, .draw = draw}).id, 1);
    EXPECT_EQ(sample({0, 1, 0, 0}, {.temperature = 1, .top_p = 0, .seed = 2, .draw = draw}).id, 1);
  }
}

TEST(Sample, NanOrPlusInfinityMakesTheRowInvalid) {
  for (float bad : {kNan, -kNan, kInfinity})
    for (size_t at : {size_t{0}, size_t{2}, size_t{4}}) {
      std::vector<float> logits = {1, 2, 3, 4, 5};
      logits[at] = bad;
      for (float temperature : {0.0f, 1.0f}) {
        const Sampled sampled = sample(logits, {.temperature = temperature, .n_logprobs = 2});
        EXPECT_FALSE(sampled.valid);
        EXPECT_EQ(sampled.id, -1);
        EXPECT_TRUE(sampled.top.empty());
      }
    }
}

TEST(Sample, ARowWithEveryTokenBannedIsInvalid) {
  const uint32_t none = 0;
  EXPECT_FALSE(sample({1, 2}, {.allowed = &none}).valid);
  EXPECT_FALSE(sample({1, 2}, {.temperature = 1, .logit_bias = {{0, -kInfinity}, {1, -kInfinity}}}).valid);
  EXPECT_FALSE(sample({-kInfinity, -kInfinity}, {}).valid);
}

TEST(Sample, BiasOfAnIdOutsideTheVocabularyIsIgnored) {
  EXPECT_EQ(sample({1, 2}, {.logit_bias = {{-1, 100}, {2, 100}, {0, 3}}}).id, 0);
}

TEST(Sample, PenaltiesReachPromptAndReplyAsStated) {
  // Repetition: positive logits are divided, negative ones multiplied, in the prompt or in the reply.
  EXPECT_EQ(sample({4, 3, 1}, {.repetition_penalty = 2}, {kInPrompt, 0, 0}).id, 1);
  EXPECT_EQ(sample({4, 3, 1}, {.repetition_penalty = 2}, {1, 0, 0}).id, 1);
  EXPECT_EQ(sample({-2, -3}, {.repetition_penalty = 2}, {kInPrompt, 0}).id, 1);
  // Presence counts the reply only, and once; frequency counts each time.
  EXPECT_EQ(sample({4, 3}, {.presence_penalty = 2}, {kInPrompt, 0}).id, 0);
  EXPECT_EQ(sample({4, 3}, {.presence_penalty = 2}, {5, 0}).id, 1);
  EXPECT_EQ(sample({4, 3}, {.presence_penalty = 0.75f}, {5, 0}).id, 0);
  EXPECT_EQ(sample({4, 3}, {.frequency_penalty = 0.75f}, {kInPrompt | 1, 0}).id, 0);
  EXPECT_EQ(sample({4, 3}, {.frequency_penalty = 0.75f}, {kInPrompt | 2, 0}).id, 1);
}

TEST(Sample, LogProbabilitiesAreOfTheUnmodifiedLogits) {
  // Probabilities 1/8, 5/8, 2/8; the bias makes the first one win.
  const std::vector<float> logits = {0, std::log(5.0f), std::log(2.0f)};
  const Sampled sampled =
      sample(logits, {.temperature = 0, .n_logprobs = 2, .logit_bias = {{0, 100}, {1, -kInfinity}}});
  EXPECT_EQ(sampled.id, 0);
  EXPECT_NEAR(sampled.logprob, std::log(0.125), 1e-6);
  ASSERT_EQ(sampled.top.size(), 2u);
  EXPECT_EQ(sampled.top[0].first, 1);
  EXPECT_NEAR(sampled.top[0].second, std::log(0.625), 1e-6);
  EXPECT_EQ(sampled.top[1].first, 2);
  EXPECT_NEAR(sampled.top[1].second, std::log(0.25), 1e-6);
}

TEST(Sample, LogProbabilitiesOfEqualsListTheLowerIdFirstAndNeverMoreThanThereAre) {
  const Sampled sampled = sample({1, 2, 2}, {.n_logprobs = 20});
  ASSERT_EQ(sampled.top.size(), 3u);
  EXPECT_EQ(sampled.top[0].first, 1);
  EXPECT_EQ(sampled.top[1].first, 2);
  EXPECT_EQ(sampled.top[2].first, 0);
  EXPECT_TRUE(sample({1, 2, 2}, {.n_logprobs = 0}).top.empty());
}

TEST(Sample, LargeLogitsDoNotOverflow) {
  const Sampled sampled = sample({3e38f, 3e38f, -3e38f}, {.temperature = 1, .seed = 1, .n_logprobs = 1});
  EXPECT_TRUE(sampled.valid);
  EXPECT_LE(sampled.id, 1);
  EXPECT_NEAR(sampled.logprob, std::log(0.5), 1e-6);
}

}  // namespace
}  // namespace beryl
