// For tests: a step of several sequences from which any rows leave, and one after it, which shows what the first has left in the caches.
#pragma once

#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "engine/page_table.h"
#include "ops/backend.h"

namespace beryl::test {

struct TwoSteps {
  std::vector<std::vector<int32_t>> first, second;   // ids, [sequences]

  std::vector<int32_t> all_rows() const {            // of the first
    size_t n = 0;
    for (const std::vector<int32_t>& ids : first) n += ids.size();
    std::vector<int32_t> rows(n);
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
};

struct TwoLogits {
  std::vector<float> first, second;   // [rows that leave][vocab]; of the second step all do
};

inline std::vector<float> rows_of(const std::vector<float>& logits, const std::vector<int32_t>& rows, int64_t vocab) {
  std::vector<float> chosen;
  for (int32_t row : rows) chosen.insert(chosen.end(), logits.begin() + row * vocab, logits.begin() + (row + 1) * vocab);
  return chosen;
}

// Each step is run three times, so that a backend that records steps replays it: it appends the same, and has the same bits.
inline TwoLogits run_two_steps(const Program& program, Backend& backend, const StepLimits& limits, const TwoSteps& steps,
                               const std::vector<int32_t>& output_rows, bool op_by_op) {
  PageTables pages(limits);
  const std::unique_ptr<Executor> executor = backend.prepare(program, limits);
  std::vector<int64_t> lengths(steps.first.size());
  const auto run = [&](const std::vector<std::vector<int32_t>>& step, const std::vector<int32_t>* rows) {
    StepInput input;
    for (size_t s = 0; s < step.size(); ++s) {
      EXPECT_TRUE(pages.reserve(static_cast<int>(s), lengths[s] + static_cast<int64_t>(step[s].size())));
      for (int32_t id : step[s]) {
        if (rows == nullptr) input.output_rows.push_back(static_cast<int32_t>(input.ids.size()));
        input.ids.push_back(id);
        input.positions.push_back(static_cast<int32_t>(lengths[s]++));
        input.sequences.push_back(static_cast<int32_t>(s));
      }
    }
    if (rows != nullptr) input.output_rows = *rows;
    input.tables = pages.tables();
    executor->set_input(input);
    std::vector<float> logits(input.output_rows.size() * static_cast<size_t>(program.vocab)), before;
    for (int n = 0; n < 3; ++n) {
      if (!op_by_op) executor->run();
      for (size_t i = 0; op_by_op && i < program.ops.size(); ++i) executor->run({i, i + 1});
      executor->read_rows(logits_slot(program), 0, input.n_outputs(), logits.data());
      EXPECT_TRUE(n == 0 || logits.empty() || std::memcmp(logits.data(), before.data(), logits.size() * sizeof(float)) == 0) << "run " << n;
      before = logits;
    }
    return logits;
  };
  TwoLogits logits;
  logits.first = run(steps.first, &output_rows);
  logits.second = run(steps.second, nullptr);
  EXPECT_TRUE(executor->damaged_guards().empty());
  return logits;
}

}  // namespace beryl::test
