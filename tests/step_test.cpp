// What: in a whole step of a whole model, every op of the CPU backend is within its bound of the exact result.
// How:  the golden models, steps of a ragged batch that fill caches across windows and pages. Before each op both
//       backends are given the reference's values, rounded to f32, so no error is carried from op to op; each value that
//       the op must write is then held against ops/op_case_bounds.h, whose bounds come from the data.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "engine/page_table.h"
#include "model/memory_plan.h"
#include "model/model.h"
#include "model/test_checkpoints.h"
#include "ops/op_case_bounds.h"

namespace beryl {
namespace {

// One executor of each backend, kept at equal values.
class StepRun {
 public:
  // With caches of f32, so that both start from the same values.
  StepRun(const Model& model, const RunLimits& run, CpuPrecision precision, const Tolerance& tolerance)
      : limits_(limits_for(model.program, run)),
        pages_(limits_),
        image_(model.program, limits_),
        tolerance_(tolerance),
        exact_(make_reference_backend(1)->prepare(model.program, limits_)),
        fast_(make_cpu_backend(2, precision)->prepare(model.program, limits_)) {
    data_.program = model.program;
    // Golden weights are floats: no block has a min.
    for (const WeightMatrix& matrix : model.weights->set.matrices) data_.without_mins.push_back(matrix.parts);
    lengths_.resize(static_cast<size_t>(run.n_sequences));
  }

  // ids: of each sequence, its next tokens; all of them leave through the head.
  void step(const std::vector<std::vector<int32_t>>& ids) {
    StepInput input;
    for (size_t s = 0; s < ids.size(); ++s) {
      ASSERT_TRUE(pages_.reserve(static_cast<int>(s), lengths_[s] + static_cast<int64_t>(ids[s].size())));
      for (int32_t id : ids[s]) {
        input.output_rows.push_back(static_cast<int32_t>(input.ids.size()));
        input.ids.push_back(id);
        input.positions.push_back(static_cast<int32_t>(lengths_[s]++));
        input.sequences.push_back(static_cast<int32_t>(s));
      }
    }
    input.tables = pages_.tables();
    exact_->set_input(input);
    fast_->set_input(input);
    for (size_t i = 0; i < program().ops.size(); ++i) {
      SCOPED_TRACE(fmt::format("op {} {} of layer {}", i, op_name(program().ops[i]), program().layer_of_op[i]));
      compare_op(i, input);
    }
  }

  const std::map<std::string, int64_t>& n_values() const { return n_values_; }
  double worst() const { return worst_; }
  std::vector<std::string> damaged_guards() { return fast_->damaged_guards(); }

 private:
  const Program& program() const { return data_.program; }
  int64_t live(int slot, const StepInput& input) const {
    return program().rows[static_cast<size_t>(slot)].count == RowCount::kTokens ? input.n_tokens() : input.n_outputs();
  }

  std::vector<std::vector<float>> rows_of(Executor& executor, const StepInput& input) const {
    std::vector<std::vector<float>> rows;
    for (size_t slot = 0; slot < program().rows.size(); ++slot) {
      const int64_t n = live(static_cast<int>(slot), input);
      rows.emplace_back(static_cast<size_t>(n * program().rows[slot].cols));
      executor.read_rows(static_cast<int>(slot), 0, n, rows.back().data());
    }
    return rows;
  }

  void compare_op(size_t index, const StepInput& input) {
    const Op& op = program().ops[index];
    const std::vector<std::vector<float>> before = rows_of(*exact_, input);
    for (size_t slot = 0; slot < before.size(); ++slot)
      for (Executor* each : {exact_.get(), fast_.get()})
        each->write_rows(static_cast<int>(slot), 0, live(static_cast<int>(slot), input), before[slot].data());
    const Expected expected = expect(data_, op, limits_, input, before, image_, tolerance_);
    exact_->run({index, index + 1});
    fast_->run({index, index + 1});
    const std::vector<std::vector<float>> exact = rows_of(*exact_, input), fast = rows_of(*fast_, input);
    for (const ExpectedRows& rows : expected.rows) {
      const int64_t stride = program().rows[static_cast<size_t>(rows.rows.slot)].cols;
      for (size_t i = 0; i < rows.values.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i) / rows.rows.cols,
                      col = rows.rows.col + static_cast<int64_t>(i) % rows.rows.cols;
        const auto at = static_cast<size_t>(row * stride + col), slot = static_cast<size_t>(rows.rows.slot);
        compare(op, rows.values[i], rows.bounds[i], fast[slot][at], exact[slot][at]);
      }
    }
    for (const ExpectedRoutes& routes : expected.routes) compare_routes(op, routes, fast, exact);
    for (const ExpectedCacheRow& row : expected.cache) compare_cache(op, row);
  }

  void compare(const Op& op, double value, double bound, float fast, float exact) {
    ++n_values_[op_name(op)];
    const double error = std::abs(double{fast} - value);
    if (!(error <= bound)) ADD_FAILURE() << "cpu has " << fast << ", exact is " << value << ", bound " << bound;
    if (!(std::abs(double{exact} - value) <= 0x1.01p-24 * std::abs(value) + 1e-5 * bound))
      ADD_FAILURE() << "the reference has " << exact << ", exact is " << value;
    if (bound > 0) worst_ = std::max(worst_, error / bound);
  }

  // The golden routers have no near ties, so the experts must be the same.
  void compare_routes(const Op& op, const ExpectedRoutes& routes, const std::vector<std::vector<float>>& fast,
                      const std::vector<std::vector<float>>& exact) {
    const auto slot = static_cast<size_t>(routes.rows.slot);
    const int64_t stride = program().rows[slot].cols;
    for (int64_t t = 0; t < static_cast<int64_t>(routes.logits.size()) / routes.n_experts; ++t) {
      const double* z = routes.logits.data() + t * routes.n_experts;
      const double* e = routes.errors.data() + t * routes.n_experts;
      const float *got = fast[slot].data() + t * stride + routes.rows.col,
                  *want = exact[slot].data() + t * stride + routes.rows.col;
      double total = 0, largest_error = 0;
      for (int i = 0; i < routes.top_k; ++i) {
        ASSERT_EQ(got[i], want[i]) << "token " << t << " route " << i;
        total += std::exp(z[static_cast<int>(want[i])]);
        largest_error = std::max(largest_error, e[static_cast<int>(want[i])]);
      }
      for (int i = 0; i < routes.top_k; ++i) {
        const auto expert = static_cast<int>(want[i]);
        const double g = std::exp(z[expert]) / total * routes.scales[static_cast<size_t>(expert)];
        compare(op, g, std::abs(g) * (std::expm1(2 * largest_error) + routes.relative_bound), got[routes.top_k + i],
                want[routes.top_k + i]);
      }
    }
  }

  // What the reference appended, rounded to f32, goes on as what all three hold.
  void compare_cache(const Op& op, const ExpectedCacheRow& row) {
    std::vector<float> fast(row.values.size());
    fast_->read_cache(row.cache, row.part, row.page, row.row, fast.data());
    float* held = image_.row(row.cache, row.part, row.page, row.row);
    exact_->read_cache(row.cache, row.part, row.page, row.row, held);
    for (size_t i = 0; i < row.values.size(); ++i) compare(op, row.values[i], row.bounds[i], fast[i], held[i]);
    for (Executor* each : {exact_.get(), fast_.get()}) each->write_cache(row.cache, row.part, row.page, row.row, held);
  }

  CaseData data_;
  StepLimits limits_;
  PageTables pages_;
  CacheImage image_;
  const Tolerance tolerance_;
  std::unique_ptr<Executor> exact_, fast_;
  std::vector<int64_t> lengths_;
  std::map<std::string, int64_t> n_values_;   // compared, by op
  double worst_ = 0;                          // error relative to its bound
};

class StepTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Golden, StepTest, testing::ValuesIn(test::golden_models()),
                         [](const auto& info) { return info.param; });

void expect_every_op_within_its_bound(const std::string& name, CpuPrecision precision, const Tolerance& tolerance) {
  const Model model = open_model(test::golden_folder(name));
  const std::vector<int32_t> a = test::golden_ids(name, "long"), b = test::golden_ids(name, "b1");
  RunLimits run;
  run.context = 96;
  run.chunk_tokens = 37;
  run.n_sequences = 2;
  run.cache_type = CacheType::kF32;
  run.step_tokens = run.n_outputs = 74;
  StepRun step(model, run, precision, tolerance);
  const auto slice = [](const std::vector<int32_t>& ids, int begin, int end) {
    return std::vector<int32_t>(ids.begin() + begin, ids.begin() + end);
  };
  // A chunk longer than the window beside a short one; decode rows; one sequence alone; past the first page.
  step.step({slice(a, 0, 19), slice(b, 0, 3)});
  step.step({slice(a, 19, 20), slice(b, 3, 4)});
  step.step({slice(a, 20, 40), {}});
  step.step({slice(a, 0, 30), slice(b, 4, 13)});
  EXPECT_TRUE(step.damaged_guards().empty());
  for (const Op& op : model.program.ops) {
    const std::string op_is = op_name(op);
    if (op_is == "Sample" || op_is == "Advance" || op_is == "CopyPages") continue;   // they have tests of their own
    EXPECT_TRUE(step.n_values().contains(op_is)) << op_is << " was not compared";
  }
  EXPECT_GT(step.worst(), 1e-3);   // a bound that nothing comes near would show nothing
  testing::Test::RecordProperty("worst_error_of_bound", fmt::format("{:.3f}", step.worst()));
}

TEST_P(StepTest, EveryOpIsWithinItsBound) { expect_every_op_within_its_bound(GetParam(), CpuPrecision::kFast, Tolerance{}); }
// The golden weights are BF16.
TEST_P(StepTest, EveryOpIsWithinItsBoundWithBf16Activations) {
  expect_every_op_within_its_bound(GetParam(), CpuPrecision::kBf16, options_for("cpu-bf16", CacheType::kF32).tolerance);
}

}  // namespace
}  // namespace beryl
