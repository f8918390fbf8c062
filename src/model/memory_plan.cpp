#include "model/memory_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/system_memory.h"

namespace beryl {

StepLimits limits_for(const Program& program, const RunLimits& run) {
  BERYL_CHECK(run.context >= 1 && run.chunk_tokens >= 1 && run.n_sequences >= 1 && run.n_outputs >= 1,
              "positive limits");
  BERYL_CHECK(run.cache_tokens == 0 || run.cache_tokens >= run.context, "the caches hold one whole context at least");
  StepLimits limits;
  limits.max_sequences = run.n_sequences;
  limits.max_tokens = run.step_tokens > 0 ? run.step_tokens : std::max(run.chunk_tokens, run.n_sequences);
  limits.max_outputs = std::min(run.n_outputs, limits.max_tokens);
  limits.cache_type = run.cache_type;
  const int64_t global_entries = (run.context + kPageTokens - 1) / kPageTokens;
  for (const PageGroup& group : program.groups) {
    int64_t entries = global_entries, n_pages = entries * run.n_sequences;
    if (group.window > 0) {
      const int64_t live = int64_t{group.window} - 1 + run.chunk_tokens;
      entries = std::min(entries, run.shares_pages ? (live + kPageTokens - 2) / kPageTokens + 1
                                                   : (live + kPageTokens - 1) / kPageTokens);
      const int64_t kept = (group.window + kPageTokens - 2) / kPageTokens;   // whole pages, which end where texts part
      n_pages = entries * run.n_sequences + std::min(entries, kept) * run.kept_windows;
    } else if (run.cache_tokens > 0) {
      n_pages = (run.cache_tokens + kPageTokens - 1) / kPageTokens;
    }
    limits.n_entries.push_back(static_cast<int>(entries));
    limits.n_pages.push_back(static_cast<int>(n_pages));
  }
  return limits;
}

int64_t MemoryPlan::total(MemoryKind kind) const {
  int64_t sum = 0;
  for (const Allocation& allocation : allocations)
    if (allocation.kind == kind) sum += allocation.bytes;
  return sum;
}

int64_t MemoryPlan::total() const {
  int64_t sum = 0;
  for (const Allocation& allocation : allocations)
    if (allocation.kind != MemoryKind::kMappedWeights) sum += allocation.bytes;
  return sum;
}

MemoryPlan plan_memory(const Program& program, const RunLimits& run, const Backend& backend) {
  MemoryPlan plan;
  plan.limits = limits_for(program, run);
  plan.allocations = backend.plan(program, plan.limits);
  return plan;
}

std::string to_text(const MemoryPlan& plan, const Program& program) {
  std::string text;
  const auto line = [&](const std::string& what, int64_t bytes, const std::string& note) {
    text += fmt::format("  {:<34}{:>10}  {}\n", what, human_bytes(bytes), note);
  };
  line("weights, read in the mapped file", plan.total(MemoryKind::kMappedWeights), "page cache, shared");
  line("weights, in memory", plan.total(MemoryKind::kWeights), "");
  for (size_t group = 0; group < program.groups.size(); ++group) {
    int64_t bytes = 0;
    int n_layers = 0;
    for (const CacheDecl& cache : program.caches) {
      if (cache.group != static_cast<int>(group)) continue;
      ++n_layers;
      for (const Allocation& allocation : plan.allocations)
        if (allocation.kind == MemoryKind::kCache && allocation.label.starts_with(cache.name + " "))
          bytes += allocation.bytes;
    }
    const int window = program.groups[group].window;
    line(window == 0 ? "cache, global layers" : fmt::format("cache, layers of window {}", window), bytes,
         fmt::format("{} layers × {} pages of {} positions", n_layers, plan.limits.n_pages[group], kPageTokens));
  }
  line("activations", plan.total(MemoryKind::kActivations),
       fmt::format("{} rows a step, {} through the head", plan.limits.max_tokens, plan.limits.max_outputs));
  line("inputs, tables, counts", plan.total(MemoryKind::kInputs), "");
  line("total without the mapped file", plan.total(), "");
  return text;
}

}  // namespace beryl
