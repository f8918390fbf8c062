#include "engine/scheduler.h"

#include <algorithm>

#include "ops/program.h"

namespace beryl {
namespace {

int64_t pages_for(int64_t n_tokens) { return (n_tokens + kPageTokens - 1) / kPageTokens; }

// Where a sequence stands.
struct Place {
  int64_t n_read = 0, n_pages = 0;
  // Pages that it takes when it grows by n_tokens.
  int64_t needed(int64_t n_tokens) const { return std::max<int64_t>(0, pages_for(n_read + n_tokens) - n_pages); }
  // The most tokens that it can grow by within so many pages more.
  int64_t room(int64_t more_pages) const { return (n_pages + more_pages) * kPageTokens - n_read; }
};

}  // namespace

void plan_step(std::span<const RunningSequence> running, std::span<const WaitingSequence> waiting, int free_pages,
               const SchedulerLimits& limits, StepPlan& plan) {
  plan.preempted = -1;
  plan.n_admitted = 0;
  plan.rows.clear();
  int64_t pages = free_pages;
  int tokens = limits.step_tokens, outputs = limits.n_outputs;
  const auto n_running = static_cast<int>(running.size());
  const auto preempt_youngest = [&] {
    plan.rows.clear();
    plan.preempted = n_running - 1;
  };

  for (int i = 0; i < n_running; ++i) {
    const RunningSequence& each = running[static_cast<size_t>(i)];
    if (each.n_unread != 1 || each.is_held) continue;
    const int64_t needed = Place{each.n_read, each.n_pages}.needed(1);
    if (needed > pages) {
      if (i + 1 < n_running) return preempt_youngest();
      break;   // the youngest waits until an older one ends
    }
    pages -= needed;
    --tokens;
    --outputs;
    plan.rows.push_back({i, 1, 0});
  }
  const size_t n_decoding = plan.rows.size();

  // Prompts. committed: pages that running prompts take until they are read.
  std::vector<int> prompts;
  int64_t committed = 0;
  for (int i = 0; i < n_running; ++i) {
    const RunningSequence& each = running[static_cast<size_t>(i)];
    if (each.n_unread == 1) continue;
    prompts.push_back(i);
    committed += Place{each.n_read, each.n_pages}.needed(each.n_unread);
  }
  std::stable_sort(prompts.begin(), prompts.end(), [&](int a, int b) {
    return running[static_cast<size_t>(a)].last_chunk < running[static_cast<size_t>(b)].last_chunk;
  });
  const auto add_chunk = [&](int sequence, const Place& place, int64_t n_unread) {
    const int64_t n = std::min({n_unread, int64_t{limits.chunk_tokens}, int64_t{tokens}, place.room(pages)});
    if (n <= 0 || (n == n_unread && outputs == 0)) return false;
    const int64_t taken = place.needed(n);
    pages -= taken;
    committed -= taken;
    tokens -= static_cast<int>(n);
    if (n == n_unread) --outputs;
    plan.rows.push_back({sequence, static_cast<int>(n), 0});
    return true;
  };
  for (int i : prompts) {
    const RunningSequence& each = running[static_cast<size_t>(i)];
    const Place place = {each.n_read, each.n_pages};
    if (tokens == 0 || add_chunk(i, place, each.n_unread)) continue;
    // No page: younger ones that decode have taken what was set aside.
    if (i + 1 < n_running && place.room(pages) <= 0) return preempt_youngest();
  }

  // Waiting requests. Each running sequence may soon want one page more.
  int n_slots = limits.n_sequences - n_running;
  for (const WaitingSequence& each : waiting) {
    if (n_slots == 0 || tokens == 0) break;
    const Place place = {each.n_reused, pages_for(each.n_reused)};
    const int64_t needed = place.needed(each.n_ids - each.n_reused);
    const int n_before = n_running + plan.n_admitted;
    if (needed + each.n_idle_pages + committed + n_before > pages && n_before > 0) break;
    pages -= each.n_idle_pages;
    committed += needed;
    --n_slots;
    ++plan.n_admitted;
    add_chunk(n_before, place, each.n_ids - each.n_reused);
  }

  for (size_t i = 0; i < n_decoding; ++i) {
    PlannedRows& row = plan.rows[i];
    const RunningSequence& each = running[static_cast<size_t>(row.sequence)];
    // Its own row has been given its page.
    const Place place = {each.n_read + 1, std::max(each.n_pages, pages_for(each.n_read + 1))};
    const int64_t spare = std::max<int64_t>(0, pages - committed);
    const int64_t n = std::min({int64_t{each.n_draft}, int64_t{limits.chunk_tokens - 1}, int64_t{tokens}, int64_t{outputs},
                                place.room(spare)});
    if (n <= 0) continue;
    pages -= place.needed(n);
    tokens -= static_cast<int>(n);
    outputs -= static_cast<int>(n);
    row.n_draft = static_cast<int>(n);
  }
}

}  // namespace beryl
