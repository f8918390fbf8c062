// For tests: a backend without numbers. A cache row holds the hash of all ids up to its position, a token's reply is a
// function of that hash, and every row that a token reads is checked: a wrong page, a page written over too early or a
// position out of order ends the test. So an engine can be tested with thousands of requests a second.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/rng.h"
#include "engine/numberless_executor.h"
#include "model/memory_plan.h"
#include "ops/backend.h"
#include "ops/program.h"

namespace beryl::test {

inline constexpr int kTextVocab = 24;
inline constexpr int32_t kPoison = kTextVocab - 1;   // a text that holds it gives no finite numbers from there on

inline uint64_t text_hash(uint64_t before, int32_t id) {
  uint64_t z = (before ^ (static_cast<uint64_t>(id) + 1)) * 0x9E3779B97F4A7C15u;
  return z ^ (z >> 31);
}

// What follows a text: mostly decided by its last two ids, so that texts repeat themselves; at times by all of it.
inline int32_t text_reply(uint64_t hash, int32_t last, int32_t second_last, const SampleParams& params, int64_t position) {
  uint64_t choice = hash % 6 == 0 ? hash / 6 : text_hash(text_hash(7, second_last), last);
  if (params.temperature > 0) choice += philox(params.seed, static_cast<uint64_t>(position)).x[0] % 3;
  for (uint64_t i = 0; i < kTextVocab; ++i) {
    const auto id = static_cast<int32_t>((choice + i) % (kTextVocab - 1));
    if (params.allowed == nullptr || (params.allowed[0] >> id & 1) != 0) return id;
  }
  return -1;
}

// The reply to a prompt, one id after the other; without the stop id.
inline std::vector<int32_t> text_model_reply(const std::vector<int32_t>& prompt, int64_t max_new, const SampleParams& params,
                                             const std::vector<int32_t>& stop_ids, int64_t context) {
  std::vector<int32_t> ids = prompt;
  uint64_t hash = 0;
  for (int32_t id : ids) hash = text_hash(hash, id);
  while (static_cast<int64_t>(ids.size() - prompt.size()) < max_new && static_cast<int64_t>(ids.size()) <= context) {
    const int32_t id = text_reply(hash, ids.back(), ids.size() > 1 ? ids[ids.size() - 2] : -1, params,
                                  static_cast<int64_t>(ids.size()) - 1);
    if (std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end()) break;
    ids.push_back(id);
    hash = text_hash(hash, id);
  }
  return {ids.begin() + static_cast<std::ptrdiff_t>(prompt.size()), ids.end()};
}

// One global group and, unless window is 0, a sliding one.
inline Program text_program(int window) {
  static const WeightSet weights;
  Program program;
  program.weights = &weights;
  program.vocab = kTextVocab;
  program.groups.push_back({0});
  if (window > 0) program.groups.push_back({window});
  program.ops = {Sample{}, Advance{}};
  return program;
}

class TextExecutor final : public NumberlessExecutor {
 public:
  TextExecutor(const Program& program, const StepLimits& limits, std::atomic<int>& fails_at, std::atomic<int64_t>& n_rows,
               const std::atomic<int64_t>& most_rows)
      : NumberlessExecutor(limits), program_(program), fails_at_(fails_at), n_rows_(n_rows), most_rows_(most_rows) {
    for (int n_pages : limits.n_pages) pages_.emplace_back(static_cast<size_t>(n_pages) * kPageTokens);
  }

  void set_input(const StepInput& input) override {
    NumberlessExecutor::set_input(input);
    EXPECT_LE(input.n_tokens(), limits_.max_tokens);
    EXPECT_LE(input.n_outputs(), limits_.max_outputs);
  }
  void run(OpRange range) override {
    if (fails_at_ > 0 && --fails_at_ == 0) throw Error(ErrorCode::kDevice, "the device has failed, as the test wanted");
    while (n_rows_ + input_.n_tokens() > most_rows_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    n_rows_ += input_.n_tokens();
    sampled_.clear();
    size_t next_output = 0;
    for (size_t i = 0; i < input_.ids.size(); ++i) {
      const Row row = write(i);
      if (next_output >= input_.output_rows.size() || input_.output_rows[next_output] != static_cast<int32_t>(i)) continue;
      if (!input_.sampling.empty()) sample(row, input_.sampling[next_output], input_.positions[i]);
      ++next_output;
    }
    if (range.end >= program_.ops.size())
      for (size_t i = 0; i < input_.ids.size(); ++i) {
        if (sampled_[i].valid) input_.ids[i] = sampled_[i].id;
        ++input_.positions[i];
        ++input_.sampling[i].draw;
      }
  }

 private:
  struct Row {
    uint64_t hash = 0;        // of all ids up to this one
    int64_t position = -1;
    int32_t id = -1, before = -1;
    bool poisoned = false;
  };

  Row& row_at(size_t group, int32_t sequence, int64_t position) {
    const int64_t slot = slot_of(group, sequence, position);
    EXPECT_GE(slot, 0);
    return pages_[group][static_cast<size_t>(slot)];
  }
  // Appends a token's row in every group, once all that it reads there has been looked at.
  Row write(size_t index) {
    const int32_t id = input_.ids[index], sequence = input_.sequences[index];
    const int64_t position = input_.positions[index];
    Row row;
    for (size_t group = 0; group < program_.groups.size(); ++group) {
      const int window = program_.groups[group].window;
      const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
      uint64_t before = 0;
      for (int64_t read = first; read < position; ++read) {
        const Row& each = row_at(group, sequence, read);
        EXPECT_EQ(each.position, read) << "group " << group << ", read from position " << position;
        if (read > first) {
          EXPECT_EQ(each.hash, text_hash(before, each.id)) << "group " << group << " position " << read;
        }
        before = each.hash;
      }
      if (group == 0) {
        row = {text_hash(before, id), position, id, position > 0 ? row_at(0, sequence, position - 1).id : -1, id == kPoison};
        if (position > 0) row.poisoned = row.poisoned || row_at(0, sequence, position - 1).poisoned;
      } else if (first < position) {
        EXPECT_EQ(text_hash(before, id), row.hash) << "group " << group << " holds another text than group 0";
      }
    }
    for (size_t group = 0; group < program_.groups.size(); ++group) row_at(group, sequence, position) = row;
    return row;
  }
  void sample(const Row& row, const SampleParams& params, int64_t position) {
    EXPECT_EQ(params.draw, static_cast<uint64_t>(position));
    Sampled sampled;
    sampled.id = row.poisoned ? -1 : text_reply(row.hash, row.id, row.before, params, position);
    sampled.valid = sampled.id >= 0;
    sampled_.push_back(sampled);
  }

  const Program program_;
  std::atomic<int>& fails_at_;
  std::atomic<int64_t>& n_rows_;
  const std::atomic<int64_t>& most_rows_;
  std::vector<std::vector<Row>> pages_;
};

class TextBackend final : public Backend {
 public:
  std::string_view name() const override { return "text"; }
  std::vector<Allocation> plan(const Program&, const StepLimits&) const override { return {}; }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    return std::make_unique<TextExecutor>(program, limits, fails_at, n_rows, most_rows);
  }
  std::atomic<int> fails_at = 0;       // the n-th step from now fails; 0: none
  std::atomic<int64_t> n_rows = 0;     // run so far
  std::atomic<int64_t> most_rows = INT64_MAX;   // the step that would go beyond waits
};

}  // namespace beryl::test
