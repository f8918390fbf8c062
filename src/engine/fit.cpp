#include "engine/fit.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/system_memory.h"

namespace beryl {
namespace {

// Below this share of the whole it is the driver's own memory, not worth a word.
constexpr int64_t kWorthAWord = 16;

// Of prompts, measured (docs/performance.md).
constexpr int kLargestChunk = 2048;
constexpr int64_t kChunkShare = 16;

// Of a device's own memory; on a host without the pages of the file.
int64_t needed_bytes(const Program& program, const RunLimits& run, const Backend& backend) {
  const MemoryPlan plan = plan_memory(program, run, backend);
  return backend.memory() ? backend.taken_bytes(plan.allocations) : plan.total();
}

RunLimits with_context(RunLimits run, int64_t context) {
  run.context = context;
  run.chunk_tokens = static_cast<int>(std::min<int64_t>(run.chunk_tokens, context));
  return run;
}

std::string run_words(const RunLimits& run, int64_t context) {
  return run.n_sequences == 1 ? fmt::format("a context of {}", context)
                              : fmt::format("a context of {} for {} sequences at once", context, run.n_sequences);
}

}  // namespace

int64_t largest_context(const Program& program, RunLimits run, const Backend& backend, int64_t free_bytes) {
  const auto fits = [&](int64_t n_pages) {
    return needed_bytes(program, with_context(run, n_pages * kPageTokens), backend) <= free_bytes;
  };
  // Invariant: `most` pages fit (0 stands for none), `too_many` do not or are not asked for.
  int64_t most = 0, too_many = (run.context + kPageTokens - 1) / kPageTokens;
  while (too_many - most > 1) {
    const int64_t middle = most + (too_many - most) / 2;
    (fits(middle) ? most : too_many) = middle;
  }
  return most * kPageTokens;
}

void require_memory(const Program& program, const RunLimits& run, const Backend& backend) {
  const std::optional<DeviceMemory> memory = backend.memory();
  if (!memory) return;
  const MemoryPlan plan = plan_memory(program, run, backend);
  const int64_t needed = backend.taken_bytes(plan.allocations);
  if (needed <= memory->free_bytes) return;

  const int64_t weights = plan.total(MemoryKind::kWeights), cache = plan.total(MemoryKind::kCache);
  std::string text = fmt::format("the memory of {} is too small: {} takes {} (weights {}, cache {}, the rest {}); of {}, {} are free",
                                 backend.device_name(), run_words(run, run.context), human_bytes(needed), human_bytes(weights),
                                 human_bytes(cache), human_bytes(needed - weights - cache), human_bytes(memory->total_bytes),
                                 human_bytes(memory->free_bytes));
  const int64_t taken = memory->total_bytes - memory->free_bytes;
  if (taken > memory->total_bytes / kWorthAWord)
    text += fmt::format(" and {} are held by other programs and the driver", human_bytes(taken));
  const int64_t context = largest_context(program, run, backend, memory->free_bytes);
  text += context > 0 ? fmt::format("; {} would fit", run_words(run, context)) : "; no context fits";
  throw Error(ErrorCode::kOutOfMemory, text);
}

std::string smaller_context_words(const Program& program, const RunLimits& run, const Backend& backend, int64_t free_bytes) {
  if (needed_bytes(program, run, backend) <= free_bytes) return "";   // it is not the context that is too large
  const int64_t context = largest_context(program, run, backend, free_bytes);
  return context > 0 ? fmt::format("; {} would fit", run_words(run, context)) : "";
}

int fitting_chunk(const Program& program, RunLimits run, const Backend& backend, int otherwise) {
  const auto within = [&](int chunk) { return static_cast<int>(std::min<int64_t>(chunk, run.context)); };
  const std::optional<DeviceMemory> memory = backend.memory();
  if (!memory) return within(otherwise);
  const auto bytes = [&](int chunk) {
    run.chunk_tokens = within(chunk);
    return needed_bytes(program, run, backend);
  };
  const int64_t base = bytes(otherwise), most = std::min(memory->free_bytes, base + memory->total_bytes / kChunkShare);
  for (int chunk = kLargestChunk; chunk > otherwise; chunk /= 2)
    if (bytes(chunk) <= most) return within(chunk);
  return within(otherwise);
}

}  // namespace beryl
