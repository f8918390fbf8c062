// What: whatever comes and goes, a step keeps its budgets, every page has one owner, decode rows never wait for prompts, the
//       oldest that is not held gets on in every step, requests are let in as they came, and all end.
// How:  a million random requests, sizes and cancels through plan_step and real page tables, no model.
#include "engine/scheduler.h"

#include <algorithm>
#include <deque>

#include <gtest/gtest.h>

#include "engine/page_table.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

struct Request {
  uint64_t arrival = 0;
  int64_t n_prompt = 0, n_reply = 0;   // wanted
  int64_t n_known = 0, n_read = 0;     // ids that there are, and those read
  int slot = -1;
  uint64_t last_chunk = 0;
  uint64_t waited_since = 0;           // step: it could have been let in or given rows since then
  int n_held = 0;                      // steps in which what comes next is not known yet
  bool admitted_before = false;
};

class Simulation {
 public:
  Simulation(uint64_t seed, const SchedulerLimits& limits, int64_t context, int n_pages, bool long_replies)
      : random_(seed), limits_(limits), context_(context), long_replies_(long_replies), tables_(step_limits(limits, context, n_pages)) {
    for (int slot = 0; slot < limits.n_sequences; ++slot) free_slots_.push_back(slot);
  }

  void run(int64_t n_requests) {
    int64_t n_arrived = 0;
    while (n_ended_ < n_requests) {
      // Bursts, so that the queue is long at times and empty at others.
      if (step_ % 64 == 0) burst_ = random_.below(3);
      const int n_arriving = burst_ == 0 ? 0 : random_.below(burst_ == 1 ? 3 : 12);
      for (int i = 0; i < n_arriving && n_arrived < n_requests && waiting_.size() < 64; ++i) arrive(n_arrived++);
      if (n_arrived < n_requests && running_.empty() && waiting_.empty()) arrive(n_arrived++);
      cancel_some();
      if (running_.empty() && waiting_.empty()) continue;
      ASSERT_NO_FATAL_FAILURE(one_step());
      ++step_;
    }
    EXPECT_EQ(tables_.free_pages(0), tables_.pool(0).n_pages());
  }

  int64_t n_preempted_ = 0, n_cancelled_ = 0, n_ended_ = 0, n_drafted_ = 0, n_full_steps_ = 0, n_held_ = 0;
  uint64_t step_ = 1;

 private:
  static StepLimits step_limits(const SchedulerLimits& limits, int64_t context, int n_pages) {
    StepLimits step;
    step.max_sequences = limits.n_sequences;
    step.n_entries = {static_cast<int>((context + kPageTokens - 1) / kPageTokens)};
    step.n_pages = {n_pages};
    return step;
  }

  void arrive(int64_t index) {
    Request request;
    request.arrival = static_cast<uint64_t>(index);
    // Most are short, some take all there is.
    const int64_t most = random_.below(50) == 0 ? context_ : 1 + context_ / (1 + random_.below(64));
    request.n_prompt = 1 + random_.below(static_cast<int>(long_replies_ ? std::min<int64_t>(most, 30) : most));
    const int longest = long_replies_ && random_.below(3) == 0 ? static_cast<int>(context_) : random_.below(8) == 0 ? 120 : 12;
    request.n_reply = std::min<int64_t>(1 + random_.below(longest), context_ - request.n_prompt + 1);
    request.n_known = request.n_prompt;
    waiting_.push_back(request);
  }

  void cancel_some() {
    if (random_.below(100) != 0) return;
    if (!waiting_.empty() && random_.below(2) == 0) {
      waiting_.erase(waiting_.begin() + random_.below(static_cast<int>(waiting_.size())));
    } else if (!running_.empty()) {
      release(static_cast<size_t>(random_.below(static_cast<int>(running_.size()))));
    } else {
      return;
    }
    ++n_cancelled_;
    ++n_ended_;
  }

  void release(size_t index) {
    tables_.release(running_[index].slot);
    free_slots_.push_back(running_[index].slot);
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  void one_step() {
    StepPlan plan;
    for (int n_preempted = 0;; ++n_preempted) {
      std::vector<RunningSequence> running;
      std::vector<WaitingSequence> waiting;
      for (const Request& each : running_) {
        const int64_t n_unread = each.n_known - each.n_read;
        const int64_t room = std::min(context_ - each.n_read - 1, each.n_prompt + each.n_reply - each.n_known - 1);
        running.push_back({each.n_read, tables_.n_pages(each.slot), n_unread, n_unread == 1 ? static_cast<int>(std::clamp<int64_t>(room, 0, random_.below(5))) : 0,
                           each.last_chunk, n_unread == 1 && each.n_held > 0});
      }
      for (size_t i = 0; i < std::min(waiting_.size(), free_slots_.size()); ++i) waiting.push_back({waiting_[i].n_known, 0, 0});
      plan_step(running, waiting, tables_.free_global_pages(), limits_, plan);
      if (plan.preempted < 0) break;
      // The youngest, and never the only one.
      ASSERT_EQ(plan.preempted, static_cast<int>(running_.size()) - 1);
      ASSERT_GT(running_.size(), 1u);
      Request back = running_.back();
      release(running_.size() - 1);
      back.slot = -1;
      back.n_read = 0;
      const auto place = std::find_if(waiting_.begin(), waiting_.end(), [&](const Request& each) { return each.arrival > back.arrival; });
      waiting_.insert(place, back);
      ++n_preempted_;
    }
    const size_t n_ran = running_.size();
    for (int i = 0; i < plan.n_admitted; ++i) {
      ASSERT_FALSE(free_slots_.empty());
      Request request = waiting_.front();
      waiting_.pop_front();
      // As they came: whoever was let in before is either older, or was put back since.
      if (!request.admitted_before) {
        ASSERT_GT(request.arrival + 1, next_arrival_);
        next_arrival_ = request.arrival + 1;
      }
      request.admitted_before = true;
      request.slot = free_slots_.back();
      free_slots_.pop_back();
      running_.push_back(request);
    }
    const auto is_held = [](const Request& each) { return each.n_held > 0 && each.n_known - each.n_read == 1; };
    const bool all_held = std::all_of(running_.begin(), running_.begin() + static_cast<std::ptrdiff_t>(n_ran), is_held);
    ASSERT_TRUE(!plan.rows.empty() || (n_ran > 0 && all_held) || std::any_of(running_.begin(), running_.end() - 1, is_held));

    int n_rows = 0, n_outputs = 0;
    std::vector<bool> has_rows(running_.size());
    for (const PlannedRows& row : plan.rows) {
      const auto index = static_cast<size_t>(row.sequence);
      ASSERT_LT(index, running_.size());
      ASSERT_FALSE(has_rows[index]);
      ASSERT_FALSE(index < n_ran && is_held(running_[index]));
      has_rows[index] = true;
      Request& each = running_[index];
      const int64_t n_unread = each.n_known - each.n_read;
      ASSERT_GE(row.n_ids, 1);
      ASSERT_LE(row.n_ids, n_unread);
      ASSERT_LE(row.n_ids + row.n_draft, limits_.chunk_tokens);
      ASSERT_TRUE(row.n_draft == 0 || n_unread == 1);
      n_rows += row.n_ids + row.n_draft;
      n_outputs += row.n_ids == n_unread ? 1 + row.n_draft : 0;
      n_drafted_ += row.n_draft;
      // No page is promised twice.
      ASSERT_TRUE(tables_.reserve(each.slot, each.n_read + row.n_ids + row.n_draft));
    }
    ASSERT_LE(n_rows, limits_.step_tokens);
    ASSERT_LE(n_outputs, limits_.n_outputs);
    n_full_steps_ += n_rows == limits_.step_tokens;
    // The oldest gets on. So does everyone who decodes, but for the youngest ones when pages are out.
    uint64_t oldest = 0;
    for (size_t i = 1; i < running_.size(); ++i)
      if (running_[i].arrival < running_[oldest].arrival) oldest = i;
    ASSERT_TRUE(has_rows[oldest] || running_[oldest].n_known - running_[oldest].n_read > 1 || is_held(running_[oldest]));
    for (size_t i = 0; i < n_ran; ++i) {
      Request& each = running_[i];
      const bool decodes = each.n_known - each.n_read == 1;
      if (has_rows[i]) each.waited_since = step_;
      if (is_held(each)) {
        --each.n_held;
        ++n_held_;
        each.waited_since = step_;
      } else if (decodes && !has_rows[i]) {
        ASSERT_EQ(i, n_ran - 1) << "only the youngest waits for a page";
      }
      // Prompts take turns: nobody is passed over for longer than all prompts of the others take.
      if (each.waited_since > 0) {
        ASSERT_LT(step_ - each.waited_since, static_cast<uint64_t>(limits_.n_sequences) * 40);
      }
    }
    for (const PlannedRows& row : plan.rows) {
      Request& each = running_[static_cast<size_t>(row.sequence)];
      const bool sampled = row.n_ids == each.n_known - each.n_read;
      each.n_read += row.n_ids;
      if (row.n_ids > 1) each.last_chunk = step_;
      if (!sampled) continue;
      const int n_right = row.n_draft > 0 ? random_.below(row.n_draft + 1) : 0;
      each.n_read += n_right;
      each.n_known += 1 + n_right;
      if (random_.below(10) == 0) each.n_held = 1 + random_.below(10);
    }
    for (size_t i = running_.size(); i-- > 0;)
      if (running_[i].n_known >= running_[i].n_prompt + running_[i].n_reply) {
        release(i);
        ++n_ended_;
      }
    std::sort(running_.begin(), running_.end(), [](const Request& a, const Request& b) { return a.arrival < b.arrival; });
    // Whose pages are whose, in full now and then.
    if (step_ % 1024 == 0) {
      std::vector<bool> taken(static_cast<size_t>(tables_.pool(0).n_pages()));
      for (int32_t page : tables_.tables()[0]) {
        if (page < 0) continue;
        ASSERT_FALSE(taken[static_cast<size_t>(page)]) << "page " << page << " has two owners";
        taken[static_cast<size_t>(page)] = true;
      }
    }
  }

  RandomStream random_;
  SchedulerLimits limits_;
  int64_t context_;
  bool long_replies_;   // to short prompts, so that pages run out behind those that were let in
  PageTables tables_;
  std::vector<Request> running_;
  std::deque<Request> waiting_;
  std::vector<int> free_slots_;
  uint64_t next_arrival_ = 0;
  int burst_ = 1;
};

TEST(SchedulerTest, AMillionRequestsComeAndGo) {
  struct Case {
    SchedulerLimits limits;
    int64_t context;
    int n_pages;
    int64_t n_requests;
    bool long_replies;
  };
  // Enough pages; few; one context for all; a budget that hardly exceeds the decode rows; one sequence.
  const Case cases[] = {{{16, 272, 256, 40}, 1024, 16 * 16, 400'000, false},
                        {{16, 272, 256, 40}, 1024, 40, 360'000, false},
                        {{8, 72, 64, 8}, 512, 8, 40'000, true},
                        {{32, 33, 16, 32}, 256, 40, 150'000, true},
                        {{1, 65, 64, 8}, 300, 5, 50'000, false}};
  int64_t n_preempted = 0, n_cancelled = 0, n_ended = 0, n_drafted = 0, n_full = 0, n_held = 0;
  uint64_t seed = 1;
  for (const Case& each : cases) {
    SCOPED_TRACE(seed);
    Simulation simulation(seed++, each.limits, each.context, each.n_pages, each.long_replies);
    ASSERT_NO_FATAL_FAILURE(simulation.run(each.n_requests));
    n_preempted += simulation.n_preempted_;
    n_cancelled += simulation.n_cancelled_;
    n_ended += simulation.n_ended_;
    n_drafted += simulation.n_drafted_;
    n_full += simulation.n_full_steps_;
    n_held += simulation.n_held_;
  }
  EXPECT_EQ(n_ended, 1'000'000);
  EXPECT_GT(n_preempted, 5'000);   // the runs saw what they are there for
  EXPECT_GT(n_cancelled, 10'000);
  EXPECT_GT(n_drafted, 100'000);
  EXPECT_GT(n_full, 10'000);
  EXPECT_GT(n_held, 100'000);
}

TEST(SchedulerTest, DecodeRowsComeFirstAndPromptsTakeTurns) {
  const SchedulerLimits limits = {8, 20, 16, 16};
  StepPlan plan;
  // Two that decode, three prompts of which the last has waited longest.
  const std::vector<RunningSequence> running = {
      {100, 2, 300, 0, 9}, {10, 1, 1, 3, 0}, {64, 1, 1, 0, 0}, {0, 0, 50, 0, 7}, {0, 0, 5, 0, 0}};
  plan_step(running, {}, 1000, limits, plan);
  const auto rows_of = [&](int sequence) {
    for (const PlannedRows& row : plan.rows)
      if (row.sequence == sequence) return row.n_ids;
    return 0;
  };
  EXPECT_EQ(plan.preempted, -1);
  EXPECT_EQ(rows_of(1), 1);
  EXPECT_EQ(rows_of(2), 1);
  EXPECT_EQ(rows_of(4), 5);
  EXPECT_EQ(rows_of(3), 13);   // what is left of 20
  EXPECT_EQ(rows_of(0), 0);
  for (const PlannedRows& row : plan.rows) EXPECT_EQ(row.n_draft, 0);   // nothing is left for guesses
}

TEST(SchedulerTest, NobodyPassesAnOlderOneThatDoesNotFit) {
  const SchedulerLimits limits = {8, 300, 256, 16};
  StepPlan plan;
  const std::vector<RunningSequence> running = {{640, 10, 1, 0, 0}};
  // 12 pages are free; the first takes 13, the second would fit.
  const std::vector<WaitingSequence> waiting = {{13 * 64, 0, 0}, {10, 0, 0}};
  plan_step(running, waiting, 12, limits, plan);
  EXPECT_EQ(plan.n_admitted, 0);
  // With six of its pages found, one of them idle, it fits too.
  const std::vector<WaitingSequence> reusing = {{13 * 64, 6 * 64, 1}, {10, 0, 0}};
  plan_step(running, reusing, 12, limits, plan);
  EXPECT_EQ(plan.n_admitted, 2);
}

}  // namespace
}  // namespace beryl
