// What: a sliding layer's ring holds every key that a chunk may still read, with less than a page to spare; the
//       plan's text adds up and reads well.
// How:  brute force over windows, chunks and every place a chunk may begin at; a synthetic model of 48 layers.
#include "model/memory_plan.h"

#include <algorithm>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/system_memory.h"
#include "model/synthetic.h"

namespace beryl {
namespace {

constexpr int kLengths[] = {1, 2, 3, 8, 63, 64, 65, 100, 127, 128, 129, 200};

StepLimits limits_of(int window, const RunLimits& run) {
  Program program;
  program.groups = {{window}};
  return limits_for(program, run);
}

// True when the positions [first, end) lie in different rows of a table of n_entries pages.
bool all_distinct(int64_t first, int64_t end, int64_t n_entries) {
  std::vector<bool> taken(static_cast<size_t>(n_entries * kPageTokens));
  for (int64_t position = first; position < end; ++position) {
    const auto slot = static_cast<size_t>(position / kPageTokens % n_entries * kPageTokens + position % kPageTokens);
    if (taken[slot]) return false;
    taken[slot] = true;
  }
  return true;
}

// Keys that tokens of the chunk [begin, begin + chunk) read, after the whole chunk was appended.
bool ring_holds(int window, int chunk, int64_t begin, int64_t n_entries) {
  return all_distinct(std::max<int64_t>(0, begin - window + 1), begin + chunk, n_entries);
}

TEST(MemoryPlanTest, TheRingHoldsEveryLiveKeyOfEveryChunk) {
  for (int window : kLengths)
    for (int chunk : kLengths) {
      RunLimits run;
      run.context = 1 << 20;
      run.chunk_tokens = chunk;
      const int64_t n_entries = limits_of(window, run).n_entries[0];
      const int64_t turn = n_entries * kPageTokens;
      for (int64_t begin = 0; begin < 2 * turn + kPageTokens; ++begin)
        ASSERT_TRUE(ring_holds(window, chunk, begin, n_entries))
            << "window " << window << " chunk " << chunk << " from " << begin << " with " << n_entries << " pages";
      if (n_entries < 2) continue;
      bool holds = true;
      for (int64_t begin = 0; begin < 2 * turn && holds; ++begin)
        holds = ring_holds(window, chunk, begin, n_entries - 1);
      EXPECT_FALSE(holds) << "window " << window << " chunk " << chunk << ": a page fewer would do";
    }
}

TEST(MemoryPlanTest, ARingOfSharedPagesHasEveryPageThatAChunkTouches) {
  for (int window : kLengths)
    for (int chunk : kLengths) {
      RunLimits run;
      run.context = 1 << 20;
      run.chunk_tokens = chunk;
      run.shares_pages = true;
      run.n_sequences = 3;
      const StepLimits limits = limits_of(window, run);
      int64_t most = 0;
      for (int64_t begin = 1024; begin < 1024 + 2 * kPageTokens; ++begin)
        most = std::max(most, (begin + chunk - 1) / kPageTokens - (begin - window + 1) / kPageTokens + 1);
      EXPECT_EQ(limits.n_entries[0], most) << "window " << window << " chunk " << chunk;
      EXPECT_EQ(limits.n_pages[0], 3 * most);
      run.kept_windows = 2;   // the whole pages before a text's whole pages' end that its next token reads
      const int64_t kept = (20 * kPageTokens - 1) / kPageTokens - (20 * kPageTokens - window + 1) / kPageTokens + 1;
      EXPECT_EQ(limits_of(window, run).n_pages[0], 3 * most + 2 * std::min(most, window == 1 ? 0 : kept));
    }
}

TEST(MemoryPlanTest, AllSequencesMayShareWhatTheCachesHold) {
  RunLimits run;
  run.context = 1000;
  run.n_sequences = 5;
  run.cache_tokens = 2500;
  EXPECT_EQ(limits_of(0, run).n_entries[0], 16);
  EXPECT_EQ(limits_of(0, run).n_pages[0], 40);
  EXPECT_EQ(limits_of(100, run).n_pages[0], 5 * limits_of(100, run).n_entries[0]);
}

TEST(MemoryPlanTest, AContextShorterThanTheRingTakesNoMoreThanItself) {
  for (int64_t context : {1, 63, 64, 65, 200, 1000}) {
    RunLimits run;
    run.context = context;
    run.chunk_tokens = 128;
    const int global = limits_of(0, run).n_entries[0], sliding = limits_of(512, run).n_entries[0];
    EXPECT_EQ(global, (context + 63) / 64) << context;
    EXPECT_LE(sliding, global) << context;
    EXPECT_TRUE(all_distinct(0, std::min<int64_t>(context, sliding * kPageTokens), sliding)) << context;
    if (context <= 640) {
      EXPECT_EQ(sliding, global) << context;
    }
  }
}

TEST(MemoryPlanTest, EverySequenceHasPagesForItsWholeContext) {
  RunLimits run;
  run.context = 1000;
  run.chunk_tokens = 32;
  run.n_sequences = 5;
  for (int window : {0, 100}) {
    const StepLimits limits = limits_of(window, run);
    EXPECT_EQ(limits.n_pages[0], 5 * limits.n_entries[0]);
    EXPECT_EQ(limits.max_tokens, 32);
    EXPECT_EQ(limits.max_sequences, 5);
  }
  run.n_sequences = 50;
  EXPECT_EQ(limits_of(0, run).max_tokens, 50);   // a decode row of each
  run.step_tokens = 70;
  run.n_outputs = 100;
  EXPECT_EQ(limits_of(0, run).max_tokens, 70);
  EXPECT_EQ(limits_of(0, run).max_outputs, 70);
}

TEST(MemoryPlanTest, TextAddsUp) {
  const Model model = make_synthetic_model("gemma4-12b", {}, 1, false);
  const std::unique_ptr<Backend> reference = make_reference_backend(1);
  RunLimits run;
  run.context = 10000;
  run.n_sequences = 2;
  const MemoryPlan plan = plan_memory(model.program, run, *reference);
  int64_t sum = 0;
  for (const Allocation& allocation : plan.allocations)
    if (allocation.kind != MemoryKind::kMappedWeights) sum += allocation.bytes;
  EXPECT_EQ(plan.total(), sum);
  EXPECT_EQ(plan.total(MemoryKind::kWeights) + plan.total(MemoryKind::kCache) + plan.total(MemoryKind::kActivations) +
                plan.total(MemoryKind::kInputs), sum);

  const std::string text = to_text(plan, model.program);
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size(); begin = text.find('\n', begin) + 1)
    lines.push_back(text.substr(begin, text.find('\n', begin) - begin));
  const auto expect_line = [&](const std::string& label, int64_t bytes, const std::string& note) {
    const auto line = std::find_if(lines.begin(), lines.end(),
                                   [&](const std::string& each) { return each.starts_with("  " + label); });
    ASSERT_NE(line, lines.end()) << label << " in\n" << text;
    EXPECT_NE(line->find(fmt::format(" {}  {}", human_bytes(bytes), note)), std::string::npos)
        << *line << ", not " << human_bytes(bytes);
  };
  // 40 sliding layers of 8 heads of 256, 8 global ones of 1 head of 512; keys and values; 8 bytes a value here.
  const int64_t ring_pages = 2 * ((1023 + 256 + 63) / 64), pages = 2 * 157;
  expect_line("cache, layers of window 1024", 40 * ring_pages * 64 * 2 * 8 * 256 * 8,
              fmt::format("40 layers × {} pages", ring_pages));
  expect_line("cache, global layers", 8 * pages * 64 * 2 * 512 * 8, fmt::format("8 layers × {} pages", pages));
  expect_line("total without the mapped file", sum, "");
  expect_line("weights, read in the mapped file", plan.total(MemoryKind::kMappedWeights), "");
}

}  // namespace
}  // namespace beryl
