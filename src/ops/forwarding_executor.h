// For tests: an executor that hands everything on to another one; what a test watches or changes it overrides.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/backend.h"

namespace beryl::test {

class ForwardingExecutor : public Executor {
 public:
  explicit ForwardingExecutor(std::unique_ptr<Executor> inner) : inner_(std::move(inner)) {}
  void set_input(const StepInput& input) override { inner_->set_input(input); }
  void set_history(int sequence, std::span<const int32_t> prompt, std::span<const int32_t> reply) override {
    inner_->set_history(sequence, prompt, reply);
  }
  void run(OpRange range) override { inner_->run(range); }
  void synchronize() override { inner_->synchronize(); }
  std::vector<Sampled> samples() override { return inner_->samples(); }
  void read_rows(int slot, int64_t begin, int64_t n, float* out) override { inner_->read_rows(slot, begin, n, out); }
  void write_rows(int slot, int64_t begin, int64_t n, const float* values) override {
    inner_->write_rows(slot, begin, n, values);
  }
  void read_cache(int cache, CachePart part, int page, int row, float* out) override {
    inner_->read_cache(cache, part, page, row, out);
  }
  void write_cache(int cache, CachePart part, int page, int row, const float* values) override {
    inner_->write_cache(cache, part, page, row, values);
  }
  std::vector<Allocation> allocations() const override { return inner_->allocations(); }
  int cache_element_bytes() const override { return inner_->cache_element_bytes(); }
  int64_t position_bytes(int cache) const override { return inner_->position_bytes(cache); }
  std::vector<std::string> damaged_guards() override { return inner_->damaged_guards(); }

 protected:
  std::unique_ptr<Executor> inner_;
};

}  // namespace beryl::test
