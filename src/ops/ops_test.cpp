// What: every backend's ops equal the double result within a bound from the data, read nothing outside the live band,
//       write nothing that is not theirs, and give each row the same bits whatever stands beside it.
// How:  the table of op_cases.h, one test a backend and case. That the table's checks can fail is shown with backends
//       that are wrong in one way each; the oracle itself, by values computed by hand.
#include <cctype>
#include <cmath>
#include <functional>
#include <memory>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "base/float_formats.h"
#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "ops/forwarding_executor.h"
#include "ops/op_cases.h"

namespace beryl {
namespace {

const std::vector<OpCase>& cases() {
  static const std::vector<OpCase> table = op_cases();
  return table;
}

const OpCase& case_named(const std::string& name) {
  for (const OpCase& op_case : cases())
    if (op_case.name == name) return op_case;
  throw Error(ErrorCode::kBadInput, "no case named " + name);
}

Backend& reference() {
  static const std::unique_ptr<Backend> backend = make_reference_backend(1);
  return *backend;
}

std::string test_name(const testing::TestParamInfo<size_t>& info) {
  std::string name;
  for (char c : cases()[info.param].name) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
    else if (!name.empty() && name.back() != '_') name += '_';
  }
  return name;
}

// ---- the table on the host backends -----------------------------------------------------------------------------

class ReferenceOps : public testing::TestWithParam<size_t> {};

TEST_P(ReferenceOps, GiveTheExactResult) {
  const OpCase& op_case = cases()[GetParam()];
  const CaseResult result = run_case(op_case, reference(), reference());
  EXPECT_TRUE(result.passed) << op_case.name << ": " << result.message;
}

INSTANTIATE_TEST_SUITE_P(Table, ReferenceOps, testing::Range(size_t{0}, cases().size()), test_name);

class CpuOps : public testing::TestWithParam<size_t> {
 protected:
  void TearDown() override { choose_cpu_target(""); }
};

// On every instruction set that this processor has; those with fused multiply-add give the same bits.
void expect_within_the_bound(const OpCase& op_case, CpuPrecision precision) {
  const std::unique_ptr<Backend> backend = make_cpu_backend(2, precision);
  const CaseOptions options = options_for(backend->name());
  std::vector<uint32_t> fused_bits;
  for (const std::string& target : cpu_targets()) {
    choose_cpu_target(target);
    if (target != "sse4") {
      const std::vector<uint32_t> bits = output_bits(op_case, *backend);
      if (fused_bits.empty()) {
        fused_bits = bits;
      } else {
        EXPECT_EQ(bits, fused_bits) << op_case.name << " on " << target;
        continue;
      }
    }
    const CaseResult result = run_case(op_case, *backend, reference(), options);
    EXPECT_TRUE(result.passed) << op_case.name << " on " << target << ": " << result.message;
    testing::Test::RecordProperty("error of bound on " + target, std::to_string(result.worst));
  }
}

TEST_P(CpuOps, AreWithinTheBound) { expect_within_the_bound(cases()[GetParam()], CpuPrecision::kFast); }
TEST_P(CpuOps, AreWithinTheBoundOfF32WhenExact) { expect_within_the_bound(cases()[GetParam()], CpuPrecision::kExact); }

void expect_the_same_with_any_threads(const OpCase& op_case, CpuPrecision precision) {
  const std::vector<uint32_t> expected = output_bits(op_case, *make_cpu_backend(1, precision));
  for (int n_threads : {2, 3}) EXPECT_EQ(output_bits(op_case, *make_cpu_backend(n_threads, precision)), expected) << op_case.name;
}

TEST_P(CpuOps, GiveTheSameBitsWithAnyNumberOfThreads) {
  const OpCase& op_case = cases()[GetParam()];
  for (const CpuPrecision precision : {CpuPrecision::kFast, CpuPrecision::kExact}) expect_the_same_with_any_threads(op_case, precision);
}

INSTANTIATE_TEST_SUITE_P(Table, CpuOps, testing::Range(size_t{0}, cases().size()), test_name);

// Cases that activations in bf16 make a difference to, by name: the others are computed as above.
std::vector<size_t> bf16_cases() {
  std::vector<size_t> indices;
  for (size_t i = 0; i < cases().size(); ++i) {
    const OpCase& op_case = cases()[i];
    const bool names_bf16 = op_case.name.find("bf16") != std::string::npos && (op_case.op == "Linear" || op_case.op == "Experts");
    if (names_bf16 || op_case.op == "Step") indices.push_back(i);
  }
  return indices;
}

class CpuBf16Ops : public CpuOps {};
TEST_P(CpuBf16Ops, AreWithinTheBound) { expect_within_the_bound(cases()[GetParam()], CpuPrecision::kBf16); }
TEST_P(CpuBf16Ops, GiveTheSameBitsWithAnyNumberOfThreads) {
  expect_the_same_with_any_threads(cases()[GetParam()], CpuPrecision::kBf16);
}
INSTANTIATE_TEST_SUITE_P(Table, CpuBf16Ops, testing::ValuesIn(bf16_cases()), test_name);

TEST(OpCases, CoverEveryOpAndFormat) {
  std::set<std::string> names;
  std::set<size_t> ops, attention_ops;
  std::set<Format> formats;
  int n_attention = 0;
  for (const OpCase& op_case : cases()) {
    EXPECT_TRUE(names.insert(op_case.name).second) << op_case.name << " occurs twice";
    const std::unique_ptr<CaseData> data = op_case.build();
    for (const Op& op : data->program.ops) {
      ops.insert(op.index());
      if (const auto* linear = std::get_if<Linear>(&op))
        for (const HostMatrix& part : data->program.matrix(linear->weight).parts) formats.insert(part.format);
    }
    if (op_case.op == "Attention") ++n_attention;
  }
  EXPECT_EQ(ops.size(), std::variant_size_v<Op>);
  EXPECT_EQ(formats.size(), 15u);
  EXPECT_GE(n_attention, 60);
}

// ---- wrong backends are found -----------------------------------------------------------------------------------

// The reference with one fault.
struct Fault {
  std::function<void(Program&)> in_program = [](Program&) {};
  std::function<void(StepInput&)> in_input = [](StepInput&) {};
  std::function<void(Executor&, const StepInput&)> after_run = [](Executor&, const StepInput&) {};
  bool damages_guard = false;
  bool plans_less = false;
};

class FaultyExecutor final : public test::ForwardingExecutor {
 public:
  FaultyExecutor(std::unique_ptr<Executor> inner, const Fault& fault) : ForwardingExecutor(std::move(inner)), fault_(fault) {}
  void set_input(const StepInput& input) override {
    input_ = input;
    StepInput changed = input;
    fault_.in_input(changed);
    inner_->set_input(changed);
  }
  void run(OpRange range) override {
    inner_->run(range);
    fault_.after_run(*inner_, input_);
  }
  std::vector<std::string> damaged_guards() override {
    return fault_.damages_guard ? std::vector<std::string>{"a buffer"} : inner_->damaged_guards();
  }

 private:
  const Fault& fault_;
  StepInput input_;
};

class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(Fault fault) : fault_(std::move(fault)) {}
  std::string_view name() const override { return "faulty"; }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    std::vector<Allocation> plan = reference().plan(program, limits);
    if (fault_.plans_less) --plan.back().bytes;
    return plan;
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    Program changed = program;
    fault_.in_program(changed);
    return std::make_unique<FaultyExecutor>(reference().prepare(changed, limits), fault_);
  }

 private:
  Fault fault_;
};

constexpr const char* kLinear = "Linear/q4_0 33 x 576, 4 rows";
constexpr const char* kAttention = "Attention/Gemma 3 270M sliding, 2999+1";
constexpr const char* kChunk = "Attention/SmolLM2 135M, 58+13";
constexpr const char* kFinish = "QkvFinish/SmolLM2 135M, 63+3 0+5 127+1";
constexpr const char* kNorm = "AddNorm/640, norm, in place, 1 rows";

std::string message_for(const char* name, Fault fault) {
  FaultyBackend backend(std::move(fault));
  const CaseResult result = run_case(case_named(name), backend, reference());
  EXPECT_EQ(result.passed, result.message.empty());
  return result.message;
}

// Multiplies one value of a row by a factor.
void scale_value(Executor& executor, int slot, int64_t n_cols, int64_t row, int64_t col, float factor) {
  std::vector<float> values(static_cast<size_t>(n_cols));
  executor.read_rows(slot, row, 1, values.data());
  values[static_cast<size_t>(col)] *= factor;
  executor.write_rows(slot, row, 1, values.data());
}

TEST(WrongBackends, WithoutAFaultThereIsNothingToFind) {
  for (const char* name : {kLinear, kAttention, kChunk, kFinish, kNorm}) EXPECT_EQ(message_for(name, {}), "");
}

TEST(WrongBackends, AValueBeyondItsBoundIsFound) {
  const std::string message = message_for(kLinear, {.after_run = [](Executor& executor, const StepInput& input) {
    if (input.n_tokens() == 4) scale_value(executor, 1, 33, 2, 7, 1.001f);
  }});
  EXPECT_NE(message.find("y row 2 column 7"), std::string::npos) << message;
}

TEST(WrongBackends, AnOutputThatIsNotWrittenIsFound) {
  const std::string message = message_for(kLinear, {.after_run = [](Executor& executor, const StepInput& input) {
    scale_value(executor, 1, 33, input.n_tokens() - 1, 32, std::numeric_limits<float>::quiet_NaN());
  }});
  EXPECT_NE(message.find("y row 3 column 32: got nan"), std::string::npos) << message;
}

TEST(WrongBackends, AChangedInputIsFound) {
  const std::string message = message_for(kLinear, {.after_run = [](Executor& executor, const StepInput&) {
    scale_value(executor, 0, 576, 0, 0, -1);
  }});
  EXPECT_NE(message.find("x column 0 changed"), std::string::npos) << message;
}

TEST(WrongBackends, AKeyBeforeTheWindowIsFound) {
  const Fault fault{.in_program = [](Program& program) { ++program.groups[0].window; }};
  EXPECT_NE(message_for(kAttention, fault), "");   // in a full ring the token's own key stands there
  const std::string message = message_for("Attention/Gemma 3 270M sliding, 4000+1, slack", fault);
  EXPECT_NE(message.find("got nan"), std::string::npos) << message;
}

TEST(WrongBackends, AWindowOneKeyTooShortIsFound) {
  EXPECT_NE(message_for(kAttention, {.in_program = [](Program& program) { --program.groups[0].window; }}), "");
}

TEST(WrongBackends, AKeyAfterTheTokenIsFound) {
  const std::string message = message_for("Attention/SmolLM2 135M, 256+1", {.in_input = [](StepInput& input) {
    for (int32_t& position : input.positions) ++position;
  }});
  EXPECT_NE(message.find("got nan"), std::string::npos) << message;
}

TEST(WrongBackends, AKeyInAnotherPlaceIsFound) {
  EXPECT_NE(
      message_for(kFinish, {.in_input = [](StepInput& input) { std::swap(input.positions[1], input.positions[2]); }}),
      "");
}

TEST(WrongBackends, AStrayCacheRowIsFound) {
  const std::string message = message_for(kFinish, {.after_run = [](Executor& executor, const StepInput&) {
    const std::vector<float> zeros(3 * 64);
    executor.write_cache(0, CachePart::kValues, 0, 40, zeros.data());
  }});
  EXPECT_NE(message.find("page 0 row 40 is not what it should be"), std::string::npos) << message;
}

TEST(WrongBackends, ARowThatDependsOnItsNeighboursIsFound) {
  const std::string message = message_for(kNorm, {.after_run = [](Executor& executor, const StepInput& input) {
    if (input.n_tokens() > 1) scale_value(executor, 1, 640, 1, 0, 1 + 0x1p-23f);
  }});
  EXPECT_NE(message.find("neighbours gives other bits"), std::string::npos) << message;
}

TEST(WrongBackends, AnOutputThatDependsOnPagesIsFound) {
  const std::string message = message_for(kChunk, {.after_run = [](Executor& executor, const StepInput& input) {
    if (input.tables[0][0] % 2 == 0) scale_value(executor, 1, 576, 0, 0, 1 + 0x1p-22f);
  }});
  EXPECT_NE(message.find("gives other bits"), std::string::npos) << message;
}

TEST(WrongBackends, DamagedGuardsAndWrongPlansAreFound) {
  EXPECT_NE(message_for(kNorm, {.damages_guard = true}).find("past the end of a buffer"), std::string::npos);
  EXPECT_NE(message_for(kNorm, {.plans_less = true}).find("allocated something else"), std::string::npos);
}

// The reference with everything that a coarse backend stores rounded to bf16: right for a backend that says so.
TEST(CoarseBackends, AreWithinTheirOwnBoundButNotWithinThatOfF32) {
  const auto round = [](float& value) { value = bf16_to_f32(f32_to_bf16(value)); };
  const Program* program = nullptr;
  FaultyBackend backend({.after_run = [&](Executor& executor, const StepInput& input) {
    for (size_t slot = 0; slot < program->rows.size(); ++slot) {
      if (program->rows[slot].kind != RowsKind::kActivation) continue;
      const int64_t n = program->rows[slot].count == RowCount::kTokens ? input.n_tokens() : input.n_outputs();
      std::vector<float> values(static_cast<size_t>(n * program->rows[slot].cols));
      executor.read_rows(static_cast<int>(slot), 0, n, values.data());
      for (float& value : values) round(value);
      executor.write_rows(static_cast<int>(slot), 0, n, values.data());
    }
  }});
  const CaseOptions bf16{.tolerance = {.activation_roundoff = 0x1p-8, .cache_roundoff = 0x1p-8}};
  int n_refused = 0, n_run = 0;
  for (size_t i = 0; i < cases().size(); i += 5) {
    const OpCase& op_case = cases()[i];
    const std::unique_ptr<CaseData> data = op_case.build();
    if (data->program.ops.size() != 1) continue;   // only the last op of a list run at once would be rounded
    program = &data->program;
    ++n_run;
    const CaseResult result = run_case(op_case, backend, reference(), bf16);
    EXPECT_TRUE(result.passed) << op_case.name << ": " << result.message;
    if (!run_case(op_case, backend, reference()).passed) ++n_refused;
  }
  EXPECT_GT(n_refused, n_run / 2);
}

// ---- the oracle, by hand ----------------------------------------------------------------------------------------

class ByHand : public testing::Test {
 protected:
  ByHand() { program_.weights = &weights_; program_.vocab = 4; }

  int slot(int64_t cols) {
    program_.rows.push_back({"slot", cols, RowsKind::kActivation, RowCount::kTokens});
    return static_cast<int>(program_.rows.size()) - 1;
  }
  static HostMatrix f32_matrix(const std::vector<std::vector<float>>& rows) {
    auto bytes = std::make_shared<std::vector<std::byte>>();
    for (const std::vector<float>& row : rows) {
      const auto* from = reinterpret_cast<const std::byte*>(row.data());
      bytes->insert(bytes->end(), from, from + row.size() * sizeof(float));
    }
    HostMatrix matrix;
    matrix.rows = static_cast<int64_t>(rows.size());
    matrix.cols = static_cast<int64_t>(rows[0].size());
    matrix.codes = bytes->data();
    matrix.storage = bytes;
    return matrix;
  }
  MatrixRef matrix(std::vector<HostMatrix> parts) {
    weights_.matrices.push_back({"matrix", std::move(parts)});
    return {static_cast<int>(weights_.matrices.size()) - 1};
  }
  VectorRef vector(std::vector<float> values) {
    weights_.vectors.push_back({"vector", std::move(values)});
    return {static_cast<int>(weights_.vectors.size()) - 1};
  }

  // One token at `position` through one op.
  void run(Op op, const std::vector<std::pair<int, std::vector<float>>>& inputs, int position = 0, int id = 0) {
    program_.ops = {std::move(op)};
    program_.layer_of_op = {0};
    StepLimits limits;
    StepInput input;
    input.ids = {id};
    input.positions = {position};
    input.sequences = {0};
    for (size_t group = 0; group < program_.groups.size(); ++group) {
      limits.n_pages.push_back(1);
      limits.n_entries.push_back(1);
      input.tables.push_back({0});
    }
    executor_ = reference().prepare(program_, limits);
    for (const auto& [slot, values] : inputs) executor_->write_rows(slot, 0, 1, values.data());
    for (const auto& [row, part, values] : cached_) executor_->write_cache(0, part, 0, row, values.data());
    executor_->set_input(input);
    executor_->run();
  }
  void expect_row(int slot, const std::vector<double>& expected) {
    std::vector<float> got(static_cast<size_t>(program_.rows[static_cast<size_t>(slot)].cols));
    executor_->read_rows(slot, 0, 1, got.data());
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(got[i], expected[i], 1e-6 * std::abs(expected[i]) + 1e-9) << i;
  }
  void expect_cached(CachePart part, int row, const std::vector<double>& expected) {
    std::vector<float> got(expected.size());
    executor_->read_cache(0, part, 0, row, got.data());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-6 * std::abs(expected[i]) + 1e-9) << i;
  }

  struct Cached {
    int row;
    CachePart part;
    std::vector<float> values;
  };
  WeightSet weights_;
  Program program_;
  std::vector<Cached> cached_;
  std::unique_ptr<Executor> executor_;
};

TEST_F(ByHand, NormDividesByTheRootOfTheMeanSquare) {
  const int y = slot(2), residual = slot(2);
  const Norm norm{true, vector({1, 2}), 0};
  // mean of 9 and 16 is 12.5
  run(AddNorm{{residual, 0, 2}, {residual, 0, 2}, {y, 0, 2}, norm, 0, 10}, {{y, {3, 4}}, {residual, {1, -1}}});
  expect_row(residual, {10 * (1 + 3 / std::sqrt(12.5)), 10 * (-1 + 8 / std::sqrt(12.5))});
}

TEST_F(ByHand, NormByGroupsTakesEachGroupsOwnMean) {
  const int y = slot(4), out = slot(4);
  run(AddNorm{{out, 0, 4}, {}, {y, 0, 4}, {true, {}, 0}, 2, 1}, {{y, {5, 5, -7, 7}}});
  expect_row(out, {1, 1, -1, 1});
}

TEST_F(ByHand, EpsIsInsideTheRoot) {
  const int y = slot(1), out = slot(1);
  run(AddNorm{{out, 0, 1}, {}, {y, 0, 1}, {true, {}, 3}, 0, 1}, {{y, {1}}});
  expect_row(out, {0.5});
}

TEST_F(ByHand, RopeTurnsAPairByPositionTimesFrequency) {
  program_.groups = {{0}};
  program_.caches = {{"layer", 1, 4, 0}};
  program_.ropes = {{{std::numbers::pi / 4, 0}}};
  const int qkv = slot(12);
  QkvFinish op;
  op.qkv = {qkv, 0, 12};
  op.n_heads = op.n_kv_heads = 1;
  op.head_dim = 4;
  op.rope = op.cache = 0;
  run(op, {{qkv, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}}, 2);   // 90 degrees: (a, b) becomes (-b, a)
  expect_row(qkv, {-3, 2, 1, 4});
  expect_cached(CachePart::kKeys, 2, {-7, 6, 5, 8});
  expect_cached(CachePart::kValues, 2, {9, 10, 11, 12});
}

TEST_F(ByHand, ValuesFromKeysAreNormedBeforeRopeAndWithoutTheKeysWeight) {
  program_.groups = {{0}};
  program_.caches = {{"layer", 1, 2, 0}};
  program_.ropes = {{{std::numbers::pi}}};
  const int qkv = slot(4);
  QkvFinish op;
  op.qkv = {qkv, 0, 4};
  op.n_heads = op.n_kv_heads = 1;
  op.head_dim = 2;
  op.k_norm = {true, vector({2, 3}), 0};
  op.v_norm = {true, {}, 0};
  op.v_from_k = true;
  op.rope = op.cache = 0;
  run(op, {{qkv, {1, 1, 5, 5}}}, 1);   // half a turn
  expect_cached(CachePart::kKeys, 1, {-2, -3});
  expect_cached(CachePart::kValues, 1, {1, 1});
}

TEST_F(ByHand, AttentionWeighsValuesBySoftmax) {
  program_.groups = {{0}};
  program_.caches = {{"layer", 1, 2, 0}};
  const int q = slot(2), out = slot(2);
  cached_ = {{0, CachePart::kKeys, {std::log(3.0f), 9}}, {1, CachePart::kKeys, {0, 9}},
             {0, CachePart::kValues, {4, 0}}, {1, CachePart::kValues, {0, 8}}};
  const Attention op{{q, 0, 2}, {out, 0, 2}, 1, 0, 0.5f, 0};
  run(op, {{q, {2, 0}}}, 1);           // weights 3/4 and 1/4
  expect_row(out, {3, 2});
  run(op, {{q, {2, 0}}}, 0);           // the second key lies after the token
  expect_row(out, {4, 0});
  program_.groups = {{1}};
  run(op, {{q, {2, 0}}}, 1);           // the first lies before the window
  expect_row(out, {0, 8});
}

TEST_F(ByHand, AttentionCapsScoresBeforeTheSoftmax) {
  program_.groups = {{0}};
  program_.caches = {{"layer", 1, 2, 0}};
  const int q = slot(2), out = slot(2);
  cached_ = {{0, CachePart::kKeys, {2, 0}}, {1, CachePart::kKeys, {0, 0}},
             {0, CachePart::kValues, {1, 0}}, {1, CachePart::kValues, {0, 1}}};
  run(Attention{{q, 0, 2}, {out, 0, 2}, 1, 0, 1, 4}, {{q, {2, 0}}}, 1);
  const double first = 1 / (1 + std::exp(-4 * std::tanh(1.0)));
  expect_row(out, {first, 1 - first});
}

TEST_F(ByHand, QueryHeadsReadTheirOwnKeyHead) {
  program_.groups = {{0}};
  program_.caches = {{"layer", 2, 2, 0}};
  const int q = slot(8), out = slot(8);
  cached_ = {{0, CachePart::kKeys, {1, 1, 1, 1}}, {0, CachePart::kValues, {1, 2, 3, 4}}};
  run(Attention{{q, 0, 8}, {out, 0, 8}, 4, 0, 1, 0}, {{q, {1, 1, 1, 1, 1, 1, 1, 1}}});
  expect_row(out, {1, 2, 1, 2, 3, 4, 3, 4});
}

TEST_F(ByHand, LinearStacksPartsAndNormsItsInput) {
  const int x = slot(2), y = slot(3);
  const Linear op{.weight = matrix({f32_matrix({{1, 0}, {1, 1}}), f32_matrix({{0, 2}})}), .x = {x, 0, 2},
                  .norm = {true, vector({1, 0.5f}), 0}, .y = {y, 0, 3}};
  run(op, {{x, {6, 8}}});              // mean square 50; normed: 6 / sqrt 50, 4 / sqrt 50
  const double root = std::sqrt(50.0);
  expect_row(y, {6 / root, 10 / root, 8 / root});
}

TEST_F(ByHand, GatesAreGeluAndSilu) {
  const int x = slot(1), y = slot(1);
  Linear op{.weight = matrix({f32_matrix({{1}}), f32_matrix({{3}})}), .x = {x, 0, 1}, .norm = {}, .y = {y, 0, 1}};
  op.epilogue = Epilogue::kGatedGelu;
  run(op, {{x, {1}}});
  expect_row(y, {3 * 0.8411919906082768});
  op.epilogue = Epilogue::kGatedSilu;
  run(op, {{x, {1}}});
  expect_row(y, {3 * 0.7310585786300049});
  op.epilogue = Epilogue::kGatedGelu;
  run(op, {{x, {-2}}});
  expect_row(y, {-6 * -0.04540230591222});
}

TEST_F(ByHand, SoftcapAndTimesOther) {
  const int x = slot(1), y = slot(1), other = slot(1);
  Linear op{.weight = matrix({f32_matrix({{2}})}), .x = {x, 0, 1}, .norm = {}, .y = {y, 0, 1}};
  op.epilogue = Epilogue::kSoftcap;
  op.softcap = 2;
  run(op, {{x, {1}}});
  expect_row(y, {2 * 0.7615941559557649});
  op.epilogue = Epilogue::kGeluTimesOther;
  op.other = {other, 0, 1};
  run(op, {{x, {0.5f}}, {other, {-5}}});
  expect_row(y, {-5 * 0.8411919906082768});
}

TEST_F(ByHand, EmbedScalesARowOfTheTable) {
  const int out = slot(2);
  run(Embed{matrix({f32_matrix({{1, 2}, {3, 4}, {5, 6}, {7, 8}})}), {out, 0, 2}, 3}, {}, 0, 2);
  expect_row(out, {15, 18});
}

TEST_F(ByHand, RoutesAreTheLargestOfTheSoftmaxSharedAmongThemselves) {
  const int x = slot(1), routes = slot(4);
  Route op;
  op.x = {x, 0, 1};
  op.weight = matrix({f32_matrix({{0}, {std::log(2.0f)}, {std::log(5.0f)}, {std::log(2.0f)}})});
  op.expert_scale = vector({1, 1, 10, 1});
  op.routes = {routes, 0, 4};
  op.n_experts = 4;
  op.top_k = 2;
  run(op, {{x, {1}}});                 // p = 1, 2, 5, 2 tenths; of the equal ones the lower index
  expect_row(routes, {2, 1, 10 * 5.0 / 7, 2.0 / 7});
}

TEST_F(ByHand, ExpertsAddTheirWeightedOutputs) {
  const int x = slot(1), routes = slot(4), y = slot(1);
  const auto stacked = [](float first, float second) {
    HostMatrix matrix = f32_matrix({{first}, {second}});
    matrix.rows = 1;
    matrix.stack = 2;
    matrix.stack_stride_bytes = sizeof(float);
    return matrix;
  };
  Experts op;
  op.x = {x, 0, 1};
  op.routes = {routes, 0, 4};
  op.gate_up = matrix({stacked(1, 2), stacked(3, 1)});
  op.down = matrix({stacked(10, 100)});
  op.y = {y, 0, 1};
  op.top_k = 2;
  op.expert_dim = 1;
  run(op, {{x, {1}}, {routes, {1, 0, 0.25f, 0.5f}}});
  const double gelu1 = 0.8411919906082768, gelu2 = 1.954597694087775;
  expect_row(y, {0.5 * 10 * gelu1 * 3 + 0.25 * 100 * gelu2 * 1});
}

}  // namespace
}  // namespace beryl
