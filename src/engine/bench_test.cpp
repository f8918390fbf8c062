// What: a bench reads a depth once and not for every repetition, times what it says, and makes its caches for the largest case; means
//       and deviations are right.
// How:  a golden model on the reference backend, behind an executor that notes what it is given.
#include "engine/bench.h"

#include <map>
#include <algorithm>

#include "engine/golden_engine.h"
#include "ops/forwarding_executor.h"

namespace beryl {
namespace {

struct Record {
  int64_t n_rows = 0;              // of all steps' inputs
  int64_t n_runs = 0;              // steps, advanced ones among them
  std::vector<int32_t> first;      // each step's first position
  std::vector<std::vector<int32_t>> tables;   // of the last input, of one sequence
};

class RecordingExecutor : public test::ForwardingExecutor {
 public:
  RecordingExecutor(std::unique_ptr<Executor> inner, Record& record)
      : ForwardingExecutor(std::move(inner)), record_(record) {}
  void set_input(const StepInput& input) override {
    record_.n_rows += input.n_tokens();
    record_.first.push_back(input.positions.front());
    record_.tables = input.tables;
    inner_->set_input(input);
  }
  void run(OpRange range) override {
    ++record_.n_runs;
    inner_->run(range);
  }

 private:
  Record& record_;
};

class RecordingBackend : public Backend {
 public:
  std::string_view name() const override { return "recording"; }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return inner_->plan(program, limits);
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    ++n_prepared;
    return std::make_unique<RecordingExecutor>(inner_->prepare(program, limits), record);
  }

  Record record;
  int n_prepared = 0;

 private:
  std::unique_ptr<Backend> inner_ = make_reference_backend(1);
};

class BenchTest : public testing::Test {
 protected:
  BenchTest() : model_(open_model(test::golden_folder("gemma3"))) {}
  const Model model_;
  RecordingBackend backend_;
};

TEST_F(BenchTest, ReadsADepthOnceForAllRepetitionsAndCases) {
  const std::vector<BenchCase> cases = {{0, 9, 100, 1}, {0, 9, 130, 1}, {0, 9, 130, 2}, {20, 0, 130, 1}};
  BenchRunner runner(model_.program, backend_, cases, 0, 32, CacheType::kDefault);
  constexpr int kRepetitions = 3, kAll = kRepetitions + 2;

  const BenchResult at_100 = runner.run(cases[0], kRepetitions);
  EXPECT_EQ(at_100.seconds.size(), size_t{kRepetitions});
  EXPECT_EQ(at_100.n_allocated, 150);
  EXPECT_EQ(backend_.record.n_rows, 100 + kAll);            // a decode step's input is one row, the others are advanced
  EXPECT_EQ(backend_.record.n_runs, 4 + kAll * 9);          // chunks of 32
  EXPECT_EQ(std::count(backend_.record.first.begin(), backend_.record.first.end(), 100), kAll) << "each begins at the depth";

  backend_.record = {};
  runner.run(cases[1], kRepetitions);
  EXPECT_EQ(backend_.record.n_rows, 30 + kAll);             // goes on from 100
  backend_.record = {};
  runner.run(cases[2], kRepetitions);
  EXPECT_EQ(backend_.record.n_rows, 130 + 2 * kAll);        // the second stream's
  backend_.record = {};
  const BenchResult prefill = runner.run(cases[3], kRepetitions);
  EXPECT_EQ(backend_.record.n_rows, 20 * kAll);
  EXPECT_EQ(backend_.n_prepared, 1);
  for (double seconds : prefill.seconds) EXPECT_GT(seconds, 0);
}

TEST_F(BenchTest, AWindowThatWasWrittenOverIsReadAgain) {
  const std::vector<BenchCase> cases = {{0, 200, 100, 1}};
  BenchRunner runner(model_.program, backend_, cases, 1000, 32, CacheType::kDefault);
  const BenchResult result = runner.run(cases[0], 1);
  EXPECT_EQ(result.n_allocated, 1000);
  EXPECT_EQ(backend_.record.n_rows, 3 * (100 + 1));
}

// The steps are behind one input and cross into another page, which must be in its tables.
TEST_F(BenchTest, OpsAreTimedWithPagesForAllSteps) {
  const StepTiming timing = time_ops(model_.program, backend_, 40, CacheType::kDefault, 1);
  EXPECT_EQ(timing.ops.size(), model_.program.ops.size() - 1);
  ASSERT_FALSE(backend_.record.tables.empty());
  for (const std::vector<int32_t>& table : backend_.record.tables)
    for (int position = 40; position < 40 + 32; ++position)
      EXPECT_GE(table[static_cast<size_t>(position / 64) % table.size()], 0) << "position " << position;
}

TEST(BenchResultTest, SpeedsMeansAndDeviations) {
  BenchResult result;
  result.what = {0, 100, 0, 4};
  result.seconds = {1, 2, 4};
  EXPECT_EQ(result.tokens_per_second(), (std::vector<double>{400, 200, 100}));
  EXPECT_DOUBLE_EQ(mean(result.tokens_per_second()), 700.0 / 3);
  EXPECT_DOUBLE_EQ(median(result.tokens_per_second()), 200);
  EXPECT_DOUBLE_EQ(median({1, 3}), 2);
  EXPECT_DOUBLE_EQ(standard_deviation({2, 4, 6}), 2);
  EXPECT_EQ(standard_deviation({5}), 0);
}

TEST(StepLedgerTest, LinesSumToTheStepAndTellWhatIsWhat) {
  Program program;
  program.rows = {{"residual", 4}, {"logits", 8, RowsKind::kLogits, RowCount::kOutputs}};
  const Rows residual{0, 0, 4}, logits{1, 0, 8};
  Linear inner, head;
  inner.y = residual;
  head.y = logits;
  program.ops = {Embed{{}, residual, 1}, inner, QkvFinish{}, Attention{}, AddNorm{}, inner, GatherRows{}, head, Sample{}, Advance{}};
  StepTiming timing;
  timing.step_microseconds = 100;
  timing.parts = {{{0, 1, 2, 0}, 0}, {{1, 2, 20, 5}, 0}, {{2, 4, 10, 0}, 0}, {{4, 6, 30, 8}, 0}, {{6, 8, 25, 1}, 0}, {{8, 9, 3, 0}, 0}};
  double sum = 0;
  std::map<std::string, double> lines;
  for (const LedgerLine& line : step_ledger(program, timing)) {
    sum += line.microseconds;
    lines[line.what] = line.microseconds;
  }
  EXPECT_DOUBLE_EQ(sum, 100);
  EXPECT_DOUBLE_EQ(lines["weights"], 15 + 22);
  EXPECT_DOUBLE_EQ(lines["preparing and waiting"], 5 + 8 + 1);
  EXPECT_DOUBLE_EQ(lines["attention"], 10);
  EXPECT_DOUBLE_EQ(lines["head"], 24);
  EXPECT_DOUBLE_EQ(lines["sampler"], 3);
  EXPECT_DOUBLE_EQ(lines["other"], 2);
  EXPECT_DOUBLE_EQ(lines["gaps"], 10);
}

}  // namespace
}  // namespace beryl
