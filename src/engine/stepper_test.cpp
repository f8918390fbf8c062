// What: a step's rows have the same bits whatever chunk they come in, whatever stands beside them, whichever of them leave, wherever
//       their pages lie and whatever those held before, and however much is allocated; what does not fit is refused with its numbers.
// How:  the golden models on both host backends, logits compared bit for bit; stale pages are real ones or NaN.
#include "engine/stepper.h"

#include <algorithm>

#include "engine/golden_engine.h"
#include "engine/two_steps.h"

namespace beryl {
namespace {

using test::feed;
using test::random_ids;
using test::run_limits;
using test::same_bits;

class StepperTest : public test::GoldenEngine {};
BERYL_INSTANTIATE_GOLDEN_ENGINE(StepperTest);

TEST_P(StepperTest, ChunksGiveTheSameBits) {
  constexpr size_t kChunk = 64;
  const std::vector<int32_t> ids = random_ids(3 * kChunk + 7, 1);
  const auto context = static_cast<int64_t>(ids.size());
  Stepper whole = stepper(run_limits(context, static_cast<int>(ids.size())));
  const std::vector<float> expected = feed(whole, 0, ids, ids.size());
  for (float value : expected) ASSERT_TRUE(std::isfinite(value));
  for (size_t chunk : {size_t{1}, size_t{7}, size_t{63}, kChunk, size_t{65}, size_t{128}}) {
    Stepper each = stepper(run_limits(context, static_cast<int>(chunk)));
    EXPECT_TRUE(same_bits(feed(each, 0, ids, chunk), expected)) << "chunk " << chunk;
    EXPECT_TRUE(each.executor().damaged_guards().empty());
  }
  // Prompts that end in, at and past a chunk's end.
  const auto vocab = static_cast<size_t>(model_.program.vocab);
  for (size_t length : {63, 64, 65, 71, 127, 128, 129, 2 * 64 + 7}) {
    Stepper each = stepper(run_limits(context, kChunk));
    const std::vector<int32_t> prompt(ids.begin(), ids.begin() + static_cast<int64_t>(length));
    const std::vector<float> logits = feed(each, 0, prompt, kChunk);
    EXPECT_TRUE(same_bits(logits, {expected.begin(), expected.begin() + static_cast<int64_t>(length * vocab)}))
        << "length " << length;
  }
}

TEST_P(StepperTest, NeighboursDoNotChangeARowsBits) {
  const std::vector<test::Feed> feeds = {
      {0, random_ids(5, 1)}, {1, random_ids(40, 2)}, {2, random_ids(13, 3)}, {3, random_ids(1, 4)}};
  for (size_t chunk : {size_t{3}, size_t{40}}) {
    Stepper together = stepper(run_limits(40, static_cast<int>(chunk), 4));
    const std::vector<std::vector<float>> logits = feed(together, feeds, chunk);
    for (size_t i = 0; i < feeds.size(); ++i) {
      Stepper alone = stepper(run_limits(40, static_cast<int>(chunk)));
      EXPECT_TRUE(same_bits(logits[i], feed(alone, 0, feeds[i].ids, chunk))) << "sequence " << i << " chunk " << chunk;
    }
    // The other way round, in other rows of the tables.
    Stepper reversed = stepper(run_limits(40, static_cast<int>(chunk), 4));
    std::vector<test::Feed> turned;
    for (size_t i = 4; i-- > 0;) turned.push_back({static_cast<int>(3 - i), feeds[i].ids});
    const std::vector<std::vector<float>> again = feed(reversed, turned, chunk);
    for (size_t i = 0; i < feeds.size(); ++i)
      EXPECT_TRUE(same_bits(logits[i], again[3 - i])) << "sequence " << i << " chunk " << chunk;
  }
}

// Rows that do not leave through the head, which the last ops may drop.
TEST_P(StepperTest, WhichRowsLeaveChangesNoBit) {
  const test::TwoSteps steps = {{random_ids(70, 14), random_ids(9, 15), random_ids(1, 16)},
                                {random_ids(3, 17), random_ids(1, 18), random_ids(2, 19)}};
  const StepLimits limits = limits_for(model_.program, run_limits(80, 80, 3));
  const auto run = [&](const std::vector<int32_t>& output_rows, bool op_by_op) {
    return test::run_two_steps(model_.program, *backend_, limits, steps, output_rows, op_by_op);
  };
  const test::TwoLogits expected = run(steps.all_rows(), false);
  for (float value : expected.first) ASSERT_TRUE(std::isfinite(value));
  for (const std::vector<int32_t>& some : {std::vector<int32_t>{}, {79}, {69, 78, 79}, {0}, {3, 7, 8, 20, 66, 67, 68, 69, 70, 72, 78}})
    for (bool op_by_op : {false, true}) {
      const test::TwoLogits logits = run(some, op_by_op);
      EXPECT_TRUE(same_bits(logits.first, test::rows_of(expected.first, some, model_.program.vocab))) << some.size() << " rows of 80";
      EXPECT_TRUE(same_bits(logits.second, expected.second)) << "after " << some.size() << " rows of 80";
    }
}

TEST_P(StepperTest, TheAllocationDoesNotChangeTheBits) {
  const std::vector<int32_t> ids = random_ids(64, 5);
  Stepper tight = stepper(run_limits(64, 16));
  const std::vector<float> expected = feed(tight, 0, ids, 16);
  Stepper large = stepper(run_limits(4096, 16));
  EXPECT_TRUE(same_bits(feed(large, 0, ids, 16), expected));
  Stepper wide = stepper(run_limits(4096, 50, 3));
  EXPECT_TRUE(same_bits(feed(wide, 2, ids, 16), expected));
}

TEST_P(StepperTest, AResetSequenceIsAsGoodAsAFreshOne) {
  const std::vector<int32_t> ids = random_ids(150, 6), others = random_ids(200, 7);
  const RunLimits run = run_limits(200, 50);
  Stepper fresh = stepper(run);
  const std::vector<float> expected = feed(fresh, 0, ids, 50);
  Stepper used = stepper(run);
  feed(used, 0, others, 50);
  EXPECT_EQ(used.length(0), 200);
  used.reset(0);
  EXPECT_EQ(used.length(0), 0);
  EXPECT_TRUE(same_bits(feed(used, 0, ids, 50), expected));
}

TEST_P(StepperTest, ARewoundSequenceGoesOnAsIfTheRestHadNotBeen) {
  constexpr int kChunk = 50;
  const std::vector<int32_t> ids = random_ids(300, 12), others = random_ids(300, 13);
  const RunLimits run = run_limits(300, kChunk);
  const auto part = [](const std::vector<int32_t>& from, int64_t begin, int64_t end) {
    return std::vector<int32_t>(from.begin() + begin, from.begin() + end);
  };
  int n_refused = 0;
  for (int64_t length : {0, 1, 49, 130, 249}) {
    Stepper fresh = stepper(run);
    feed(fresh, 0, part(ids, 0, length), kChunk);
    const std::vector<float> expected = feed(fresh, 0, part(ids, length, length + 40), kChunk);
    for (int64_t n_more : {0, 1, 37, kChunk, 2 * kChunk + 29, 300}) {
      if (length + n_more > 300) continue;
      Stepper each = stepper(run);
      feed(each, 0, part(ids, 0, length), kChunk);
      feed(each, 0, part(others, 0, n_more), kChunk);
      const bool rewound = each.rewind(0, length);
      EXPECT_EQ(each.length(0), rewound ? length : length + n_more);
      if (n_more <= kChunk) {
        EXPECT_TRUE(rewound) << n_more << " positions after " << length;
      }
      n_refused += rewound ? 0 : 1;
      if (rewound) {
        EXPECT_TRUE(same_bits(feed(each, 0, part(ids, length, length + 40), kChunk), expected))
            << n_more << " positions after " << length;
      }
    }
  }
  const auto& groups = model_.program.groups;
  const bool slides = std::any_of(groups.begin(), groups.end(), [](const PageGroup& group) { return group.window > 0; });
  EXPECT_EQ(n_refused > 0, slides);
}

TEST_P(StepperTest, WhatPagesHeldBeforeIsNeverRead) {
  const std::vector<int32_t> ids = random_ids(150, 8);
  const RunLimits run = run_limits(200, 50);
  Stepper clean = stepper(run), poisoned = stepper(run);
  test::poison_caches(poisoned.executor(), model_.program, limits_for(model_.program, run));
  EXPECT_TRUE(same_bits(feed(poisoned, 0, ids, 50), feed(clean, 0, ids, 50)));
}

TEST_P(StepperTest, TheOrderOfPagesDoesNotMatter) {
  const std::vector<int32_t> ids = random_ids(150, 9);
  const RunLimits run = run_limits(200, 50, 3);
  const StepLimits limits = limits_for(model_.program, run);
  size_t cache = 0;   // of a global layer
  while (model_.program.groups[static_cast<size_t>(model_.program.caches[cache].group)].window > 0) ++cache;
  const int n_pages = limits.n_pages[static_cast<size_t>(model_.program.caches[cache].group)];
  // The pages that the sequence was given: those that the run wrote.
  const auto written_pages = [&](Stepper& each) {
    std::vector<int> pages;
    std::vector<float> row(
        static_cast<size_t>(model_.program.caches[cache].n_kv_heads * model_.program.caches[cache].head_dim));
    for (int page = 0; page < n_pages; ++page) {
      each.executor().read_cache(static_cast<int>(cache), CachePart::kKeys, page, 0, row.data());
      if (!std::isnan(row[0])) pages.push_back(page);
    }
    return pages;
  };
  Stepper in_order = stepper(run);
  test::poison_caches(in_order.executor(), model_.program, limits);
  const std::vector<float> expected = feed(in_order, 0, ids, 50);

  Stepper scrambled = stepper(run);
  test::poison_caches(scrambled.executor(), model_.program, limits);
  ASSERT_TRUE(scrambled.reserve(0, 70) && scrambled.reserve(2, 130) && scrambled.reserve(0, 200) &&
              scrambled.reserve(1, 10));
  scrambled.reset(2);
  scrambled.reset(1);
  ASSERT_TRUE(scrambled.reserve(1, 70));
  scrambled.reset(0);
  EXPECT_TRUE(same_bits(feed(scrambled, 2, ids, 50), expected));
  EXPECT_EQ(written_pages(in_order).size(), 3u);
  EXPECT_EQ(written_pages(scrambled).size(), 3u);
  EXPECT_NE(written_pages(in_order), written_pages(scrambled));
}

TEST_P(StepperTest, AdvanceIsAStepFromTheHost) {
  const std::vector<int32_t> a = random_ids(60, 10), b = random_ids(7, 11);
  const RunLimits run = run_limits(80, 60, 2);
  Stepper by_host = stepper(run), by_device = stepper(run);
  const SampleParams greedy;
  SampleParams drawn;
  drawn.temperature = 1;
  drawn.seed = 3;
  const std::vector<SequenceRows> prompts = {{0, a, Outputs::kLast, &greedy}, {1, b, Outputs::kLast, &drawn}};
  const int slot = logits_slot(model_.program);
  std::vector<float> host_logits(static_cast<size_t>(2 * model_.program.vocab)), device_logits(host_logits.size());
  for (Stepper* each : {&by_host, &by_device}) {
    each->run(prompts);
    ASSERT_TRUE(each->reserve(0, 80) && each->reserve(1, 27));
  }
  for (int step = 0; step < 20; ++step) {
    const std::vector<Sampled> samples = by_host.samples();
    ASSERT_EQ(samples.size(), 2u);
    const std::vector<Sampled> others = by_device.samples();
    EXPECT_EQ(samples[0].id, others[0].id) << step;
    EXPECT_EQ(samples[1].id, others[1].id) << step;
    const std::vector<SequenceRows> next = {{0, {&samples[0].id, 1}, Outputs::kLast, &greedy},
                                            {1, {&samples[1].id, 1}, Outputs::kLast, &drawn}};
    by_host.run(next);
    if (step == 0) {
      by_device.run(next);
    } else {
      by_device.advance();
    }
    by_host.executor().read_rows(slot, 0, 2, host_logits.data());
    by_device.executor().read_rows(slot, 0, 2, device_logits.data());
    EXPECT_TRUE(same_bits(host_logits, device_logits)) << step;
    EXPECT_EQ(by_host.length(0), by_device.length(0));
  }
  EXPECT_EQ(by_device.length(0), 80);
}

TEST_P(StepperTest, WhatDoesNotFitIsRefusedAndChangesNothing) {
  const std::vector<int32_t> ids = random_ids(40, 12);
  Stepper each = stepper(run_limits(40, 16));
  Stepper untouched = stepper(run_limits(40, 16));
  const std::vector<int32_t> first(ids.begin(), ids.begin() + 30), rest(ids.begin() + 30, ids.end());
  std::vector<float> logits = feed(each, 0, first, 16);
  const auto run_rows = [&](std::span<const int32_t> rows) {
    const SequenceRows row{0, rows, Outputs::kLast, nullptr};
    each.run({&row, 1});
  };
  test::expect_refused([&] { run_rows(std::span(ids).first(11)); }, ErrorCode::kBadInput,
                       {"11 tokens after 30", "context of 40"});
  test::expect_refused([&] { run_rows(std::span(ids).first(17)); }, ErrorCode::kBadInput, {"17", "40"});
  const std::vector<int32_t> unknown = {1, static_cast<int32_t>(model_.program.vocab)};
  test::expect_refused([&] { run_rows(unknown); }, ErrorCode::kBadInput, {"256"});
  test::expect_refused([&] { run_rows({}); }, ErrorCode::kBadInput, {"0 tokens"});
  EXPECT_EQ(each.length(0), 30);
  const std::vector<float> more = feed(each, 0, rest, 16);
  logits.insert(logits.end(), more.begin(), more.end());
  EXPECT_TRUE(same_bits(logits, feed(untouched, 0, ids, 16)));
  EXPECT_FALSE(each.reserve(0, 41));
  EXPECT_TRUE(each.reserve(0, 40));
}

TEST_P(StepperTest, AChunkLongerThanTheCachesWereMadeForIsRefused) {
  const std::vector<int32_t> ids = random_ids(17, 13);
  Stepper each = stepper(run_limits(100, 16, 2));
  const SequenceRows row{0, ids, Outputs::kLast, nullptr};
  test::expect_refused([&] { each.run({&row, 1}); }, ErrorCode::kBadInput, {"17 tokens", "at most 16"});
  EXPECT_EQ(each.length(0), 0);
}

using StepperDeathTest = StepperTest;
INSTANTIATE_TEST_SUITE_P(Golden, StepperDeathTest,
                         testing::Values(std::tuple<std::string, std::string>("llama", "reference")),
                         [](const auto&) { return "llama"; });

TEST_P(StepperDeathTest, AdvancingAResetSequenceIsABrokenContract) {
  Stepper each = stepper(run_limits(100, 16));
  const std::vector<int32_t> ids = random_ids(3, 14);
  const SampleParams greedy;
  for (int32_t id : ids) {
    const SequenceRows row{0, {&id, 1}, Outputs::kLast, &greedy};
    each.run({&row, 1});
  }
  each.advance();
  each.reset(0);
  EXPECT_DEATH(each.advance(), "advance follows a step");
}

}  // namespace
}  // namespace beryl
