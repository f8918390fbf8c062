// For tests: what an executor needs that computes no numbers, of models whose cache holds ids or hashes instead.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "ops/step_input.h"

namespace beryl::test {

class NumberlessExecutor : public Executor {
 public:
  explicit NumberlessExecutor(const StepLimits& limits) : limits_(limits) {}
  void set_input(const StepInput& input) override { input_ = input; }
  void set_history(int, std::span<const int32_t>, std::span<const int32_t>) override {}
  void synchronize() override {}
  std::vector<Sampled> samples() override { return sampled_; }
  void read_rows(int, int64_t, int64_t, float*) override {}
  void write_rows(int, int64_t, int64_t, const float*) override {}
  void read_cache(int, CachePart, int, int, float*) override {}
  void write_cache(int, CachePart, int, int, const float*) override {}
  std::vector<Allocation> allocations() const override { return {}; }
  int cache_element_bytes() const override { return 1; }
  int64_t position_bytes(int) const override { return 1; }
  std::vector<std::string> damaged_guards() override { return {}; }

 protected:
  // Where a group's cache has a position, by the step's page tables; negative: on no page.
  int64_t slot_of(size_t group, int32_t sequence, int64_t position) const {
    const int n_entries = limits_.n_entries[group];
    const int64_t page = input_.tables[group][static_cast<size_t>(sequence * n_entries + position / kPageTokens % n_entries)];
    return page * kPageTokens + position % kPageTokens;
  }

  const StepLimits limits_;
  StepInput input_;
  std::vector<Sampled> sampled_;
};

}  // namespace beryl::test
