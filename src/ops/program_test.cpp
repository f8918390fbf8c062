// What: a program with disagreeing shapes never runs; costs are what one counts by hand; the text says what an op does.
#include "ops/program.h"

#include <algorithm>
#include <functional>
#include <optional>

#include <gtest/gtest.h>

#include "base/error.h"
#include "ops/backend.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

// One layer of a small model: 4 heads on 2 KV heads of 16, window 128, experts, and a head.
class LayerProgram {
 public:
  LayerProgram() {
    program.weights = &weights;
    program.vocab = 300;
    program.n_layers = 1;
    const int residual = slot("residual", 64, RowsKind::kResidual), qkv = slot("qkv", 128),
              attended = slot("attended", 64);
    const int gated = slot("gated", 96), y = slot("y", 64), routes = slot("routes", 4);
    const int last = slot("last", 64, RowsKind::kResidual, RowCount::kOutputs);
    const int logits = slot("logits", 300, RowsKind::kLogits, RowCount::kOutputs);
    program.residual_slot = residual;
    program.groups = {{0}, {128}};
    program.caches = {{"layer 0", 2, 16, 1}};
    program.ropes = {{std::vector<double>(8, 0.5)}};
    const VectorRef norm_weight = vector(64), head_weight = vector(16), expert_scale = vector(8);
    const Norm norm{true, norm_weight, 1e-6f}, head_norm{true, head_weight, 1e-6f};
    const auto rows = [this](int slot) { return Rows{slot, 0, program.rows[static_cast<size_t>(slot)].cols}; };

    op(-1, Embed{matrix("embedding", {{Format::kQ8_0, 300}}, 64), rows(residual), 8});
    op(0, Linear{matrix("qkv", {{Format::kQ4_0, 64}, {Format::kQ4_0, 32}, {Format::kQ8_0, 32}}, 64), rows(residual),
                 norm, rows(qkv)});
    QkvFinish finish{rows(qkv), 4, 2, 16, head_norm, head_norm, {true, {}, 1e-6f}, false, 0, 0};
    op(0, finish);
    op(0, Attention{rows(qkv).slice(0, 64), rows(attended), 4, 0, 0.25f, 50});
    op(0, Linear{matrix("o", {{Format::kBf16, 64}}, 64), rows(attended), {}, rows(y)});
    op(0, AddNorm{rows(residual), rows(residual), rows(y), norm, 0, 0.5f});
    op(0, Linear{matrix("gate up", {{Format::kQ4_0, 96}, {Format::kQ4_0, 96}}, 64), rows(residual), norm, rows(gated),
                 Epilogue::kGatedGelu});
    op(0, Route{rows(residual),
                {true, {}, 1e-6f},
                matrix("router", {{Format::kF32, 8}}, 64),
                expert_scale,
                rows(routes),
                8,
                2});
    op(0, Experts{rows(residual), norm, rows(routes),
                  matrix("experts gate up", {{Format::kQ4_0, 32}, {Format::kQ4_0, 32}}, 64, 8),
                  matrix("experts down", {{Format::kQ8_0, 64}}, 32, 8), rows(y), 2, 32});
    op(1, GatherRows{rows(residual), rows(last)});
    op(1,
       Linear{matrix("head", {{Format::kFp8, 300}}, 64), rows(last), norm, rows(logits), Epilogue::kSoftcap, {}, 30});
    op(1, Sample{rows(logits)});
    op(1, Advance{});
    op(1, CopyPages{});
  }

  template <class T>
  T& get(size_t index) { return std::get<T>(program.ops[index]); }

  WeightSet weights;
  Program program;

 private:
  int slot(const char* name, int64_t cols, RowsKind kind = RowsKind::kActivation, RowCount count = RowCount::kTokens) {
    program.rows.push_back({name, cols, kind, count});
    return static_cast<int>(program.rows.size()) - 1;
  }
  MatrixRef matrix(const char* name, const std::vector<std::pair<Format, int64_t>>& parts, int64_t cols,
                   int64_t stack = 1) {
    WeightMatrix matrix{name, {}};
    for (const auto& [format, rows] : parts)
      matrix.parts.push_back(random_matrix(format, rows, cols, stack, 1, 2).matrix);
    weights.matrices.push_back(std::move(matrix));
    return {static_cast<int>(weights.matrices.size()) - 1};
  }
  VectorRef vector(int64_t n) {
    weights.vectors.push_back({"vector", std::vector<float>(static_cast<size_t>(n), 1.0f)});
    return {static_cast<int>(weights.vectors.size()) - 1};
  }
  void op(int layer, Op op) {
    program.ops.push_back(std::move(op));
    program.layer_of_op.push_back(layer);
  }
};

TEST(CheckShapes, AcceptsAWholeLayer) {
  const LayerProgram layer;
  check_shapes(layer.program);
  EXPECT_EQ(layer.program.ops.size(), 14u);
}

TEST(OutputPartTest, BeginsBehindTheLastOpThatFillsACache) {
  LayerProgram layer;
  Program& program = layer.program;
  const auto slots = [&] {
    std::vector<std::string> names;
    const OutputPart part = output_part(program).value();
    for (int slot : part.slots) names.push_back(program.rows[static_cast<size_t>(slot)].name);
    std::sort(names.begin(), names.end());
    return names;
  };
  ASSERT_STREQ(op_name(program.ops[2]), "QkvFinish");
  EXPECT_EQ(output_part(program).value().begin, 3u);
  EXPECT_EQ(slots(), (std::vector<std::string>{"qkv", "residual"}));
  // A layer that shares a cache fills none. Rows of which only a part is made again are still read.
  layer.get<QkvFinish>(2).n_kv_heads = 0;
  layer.get<Linear>(4).y.cols = 63;
  EXPECT_EQ(output_part(program).value().begin, 1u);
  EXPECT_EQ(slots(), (std::vector<std::string>{"residual", "y"}));
  // Without a head all rows may be read by whoever runs the list.
  program.ops.erase(program.ops.begin() + 9, program.ops.end());
  EXPECT_FALSE(output_part(program).has_value());
}

TEST(CheckShapesDeathTest, RefusesEveryDisagreementByName) {
  testing::FLAGS_gtest_death_test_style = "fast";
  using Change = std::function<void(LayerProgram&)>;
  const std::pair<const char*, Change> kChanges[] = {
      {"a program has weights", [](auto& p) { p.program.weights = nullptr; }},
      {"every op knows its layer", [](auto& p) { p.program.layer_of_op.pop_back(); }},
      {"cache shape", [](auto& p) { p.program.caches[0].group = 2; }},
      {"cache shape", [](auto& p) { p.program.caches[0].head_dim = 15; }},
      {"rows: slot", [](auto& p) { p.template get<Embed>(0).out.slot = 8; }},
      {"rows: columns", [](auto& p) { p.template get<Embed>(0).out.col = 1; }},
      {"Embed: table columns", [](auto& p) { p.template get<Embed>(0).out.cols = 63; }},
      {"matrix index", [](auto& p) { p.template get<Embed>(0).table.index = -1; }},
      {"Linear: weight columns", [](auto& p) { p.template get<Linear>(1).x.cols = 32; }},
      {"Linear: weight rows", [](auto& p) { p.template get<Linear>(1).y.cols = 96; }},
      {"norm: weight length", [](auto& p) { p.template get<Linear>(1).norm.weight.index = 1; }},
      {"Linear: x and y have the same rows", [](auto& p) { p.template get<Linear>(10).x = {0, 0, 64}; }},
      {"Linear: gate and up", [](auto& p) { p.template get<Linear>(6).y.cols = 48; }},
      {"matrix: equal columns", [](auto& p) { p.weights.matrices[1].parts[1].cols = 32; }},
      {"rows: slot", [](auto& p) { p.template get<Linear>(4).epilogue = Epilogue::kGeluTimesOther; }},
      {"Linear: other", [](auto& p) {
         p.template get<Linear>(4).epilogue = Epilogue::kGeluTimesOther;
         p.template get<Linear>(4).other = {1, 0, 65};
       }},
      {"QkvFinish: columns", [](auto& p) { p.template get<QkvFinish>(2).v_from_k = true; }},
      {"QkvFinish: rope index", [](auto& p) { p.template get<QkvFinish>(2).rope = 1; }},
      {"QkvFinish: rope pairs", [](auto& p) { p.program.ropes[0].frequencies.pop_back(); }},
      {"QkvFinish: cache shape", [](auto& p) { p.program.caches[0].n_kv_heads = 4; }},
      {"cache index", [](auto& p) { p.template get<QkvFinish>(2).cache = 1; }},
      {"Attention: heads", [](auto& p) { p.template get<Attention>(3).n_heads = 3; }},
      {"Attention: columns", [](auto& p) { p.template get<Attention>(3).q.cols = 32; }},
      {"AddNorm: out and y", [](auto& p) { p.template get<AddNorm>(5).out.cols = 32; }},
      {"AddNorm: base and y", [](auto& p) { p.template get<AddNorm>(5).base = {6, 0, 64}; }},
      {"AddNorm: whole groups", [](auto& p) { p.template get<AddNorm>(5).group = 48; }},
      {"Route: weight shape", [](auto& p) { p.template get<Route>(7).n_experts = 9; }},
      {"Route: top_k", [](auto& p) { p.template get<Route>(7).top_k = 3; }},
      {"Route: scales", [](auto& p) { p.template get<Route>(7).expert_scale.index = 1; }},
      {"Experts: gate and up", [](auto& p) { p.template get<Experts>(8).expert_dim = 64; }},
      {"Experts: down", [](auto& p) { p.template get<Experts>(8).y.cols = 32; }},
      {"Experts: routes", [](auto& p) { p.template get<Experts>(8).top_k = 1; }},
      {"GatherRows", [](auto& p) { p.template get<GatherRows>(9).out = {4, 0, 64}; }},
      {"Sample: logits", [](auto& p) { p.template get<Sample>(11).logits = {4, 0, 64}; }},
      {"Sample: logits", [](auto& p) { p.program.vocab = 299; }},
  };
  for (const auto& [message, change] : kChanges) {
    LayerProgram layer;
    change(layer);
    EXPECT_DEATH(check_shapes(layer.program), message);
  }
}

TEST(CheckShapesDeathTest, IsAskedBeforeAnythingIsAllocated) {
  testing::FLAGS_gtest_death_test_style = "fast";
  LayerProgram layer;
  layer.get<Embed>(0).out.cols = 63;
  EXPECT_DEATH(make_reference_backend(1)->prepare(layer.program, {}), "Embed: table columns");
}

TEST(Costs, BytesAreWeightsOnceAndTheLiveCache) {
  const LayerProgram layer;
  const auto bytes = [&](size_t index, const StepShape& shape, int element_bytes = 2) {
    return bytes_moved(layer.program.ops[index], layer.program, shape, [&](int cache) {
      EXPECT_EQ(cache, 0);
      return 2 * 2 * 16 * element_bytes;                                  // keys and values of two heads
    });
  };
  const StepShape decode{1, 1, 99};
  EXPECT_EQ(bytes(0, decode), 2 * 34);                                    // a row of q8_0: 64 weights
  EXPECT_EQ(bytes(0, {7, 1, 0}), 7 * 2 * 34);
  EXPECT_EQ(bytes(1, decode), 64 * 36 + 32 * 36 + 32 * 68);               // q4_0: 18 bytes a block; q8_0: 34
  EXPECT_EQ(bytes(1, {5, 1, 0}), bytes(1, decode));                       // weights once, whatever the rows
  EXPECT_EQ(bytes(2, decode), 2 * 2 * 16 * 2);                            // k and v of two heads, bf16
  EXPECT_EQ(bytes(3, decode), 100 * 2 * 2 * 16 * 2);                      // a hundred positions
  EXPECT_EQ(bytes(3, {1, 1, 5000}), 128 * 2 * 2 * 16 * 2);                // the window's
  EXPECT_EQ(bytes(3, {3, 3, 5000}, 4), 3 * 128 * 2 * 2 * 16 * 4);         // three sequences, f32
  EXPECT_EQ(bytes(4, decode), 64 * 64 * 2);
  EXPECT_EQ(bytes(5, decode), 0);
  EXPECT_EQ(bytes(6, decode), 2 * 96 * 36);
  EXPECT_EQ(bytes(7, decode), 8 * 64 * 4);
  const int64_t expert = 2 * 32 * 36 + 64 * 34;
  EXPECT_EQ(bytes(8, decode), 2 * expert);                                // two of the eight
  EXPECT_EQ(bytes(8, {3, 3, 0}), 6 * expert);
  EXPECT_EQ(bytes(8, {30, 1, 0}), 8 * expert);                            // at most all of them
  EXPECT_EQ(bytes(10, decode), 300 * (64 + 4));                           // fp8 with an f32 scale a row
  EXPECT_EQ(bytes(11, decode), 0);
}

TEST(Costs, FlopsAreTwoAMultiplication) {
  const LayerProgram layer;
  const auto count = [&](size_t index, const StepShape& shape) {
    return flops(layer.program.ops[index], layer.program, shape);
  };
  const StepShape prefill{10, 1, 0};
  EXPECT_EQ(count(0, prefill), 0);
  EXPECT_EQ(count(1, prefill), 10 * 2 * 128 * 64);
  EXPECT_EQ(count(3, {1, 1, 99}), 100 * 4 * 16 * 2 * 2);                  // q·k and p·v, four heads
  EXPECT_EQ(count(3, {1, 1, 5000}), 128 * 4 * 16 * 2 * 2);
  EXPECT_EQ(count(6, prefill), 10 * 2 * 192 * 64);
  EXPECT_EQ(count(7, prefill), 10 * 2 * 8 * 64);
  EXPECT_EQ(count(8, prefill), 10 * 2 * 2 * (64 * 64 + 32 * 64));
  EXPECT_EQ(count(10, prefill), 2 * 300 * 64);                            // the head: output rows only
}

TEST(ToText, SaysEachOpInOneLine) {
  EXPECT_EQ(
      to_text(LayerProgram().program),
      "before the layers\n"
      "  Embed      residual[64] = 'embedding' (300 q8_0 × 64)[ids] · 8\n"
      "layer 0\n"
      "  Linear     qkv[128] = 'qkv' (64 q4_0 | 32 q4_0 | 32 q8_0 × 64) · norm(residual[64])\n"
      "  QkvFinish  qkv[128]: 4 q heads × 16 normed, rope 0; 2 k heads normed, v = v normed → cache 'layer 0'\n"
      "  Attention  attended[64] = attention(qkv[0:64], cache 'layer 0'), 4 q on 2 kv heads × 16, window 128, "
      "scale 0.25, softcap 50\n"
      "  Linear     y[64] = 'o' (64 bf16 × 64) · attended[64]\n"
      "  AddNorm    residual[64] = (residual[64] + norm(y[64])) · 0.5\n"
      "  Linear     gated[96] = gelu(gate) · up, gate|up = 'gate up' (96 q4_0 | 96 q4_0 × 64) · norm(residual[64])\n"
      "  Route      routes[4] = top 2 of softmax('router' (8 f32 × 64) · norm(residual[64], no weight))\n"
      "  Experts    y[64] = Σ g · 'experts down' (8 × 64 q8_0 × 32) · gelu-gated 'experts gate up' "
      "(8 × 32 q4_0 | 32 q4_0 × 64) · norm(residual[64]), 2 routes each\n"
      "after the layers\n"
      "  GatherRows last[64] = residual[64][output rows]\n"
      "  Linear     logits[300] = softcap_30('head' (300 fp8 × 64) · norm(last[64]))\n"
      "  Sample     ids = sample(logits[300])\n"
      "  Advance    ids → next step's input, positions + 1\n"
      "  CopyPages  copy cache pages\n");
}

TEST(ToText, SharingAndGlobalLayersSaySo) {
  LayerProgram layer;
  auto& finish = layer.get<QkvFinish>(2);
  finish.n_kv_heads = 0;
  finish.qkv = finish.qkv.slice(0, 64);
  auto& attention = layer.get<Attention>(3);
  attention.softcap = 0;
  layer.program.caches[0].group = 0;
  const std::string text = to_text(layer.program);
  EXPECT_NE(text.find("qkv[0:64]: 4 q heads × 16 normed, rope 0, no k and v of its own\n"), std::string::npos) << text;
  EXPECT_NE(text.find("× 16, global, scale 0.25\n"), std::string::npos) << text;
}

TEST(StepInputCheck, RefusesWhatTheProgramCannotRunInOneLine) {
  const LayerProgram layer;
  StepLimits limits;
  limits.max_tokens = 3;
  limits.max_outputs = 2;
  limits.max_sequences = 2;
  limits.n_pages = {4, 4};
  limits.n_entries = {2, 2};
  const std::unique_ptr<Executor> executor = make_reference_backend(1)->prepare(layer.program, limits);
  StepInput good;
  good.ids = {1, 299};
  good.positions = {5, 6};
  good.sequences = {1, 1};
  good.output_rows = {1};
  good.sampling = {SampleParams{}};
  good.tables = {{-1, -1, 2, -1}, {-1, -1, 0, 1}};
  executor->set_input(good);

  const std::pair<const char*, std::function<void(StepInput&)>> kChanges[] = {
      {"0 tokens", [](StepInput& in) { in = StepInput{}; }},
      {"4 tokens, between 1 and 3 expected", [](StepInput& in) { in.ids.resize(4); }},
      {"differ in length", [](StepInput& in) { in.positions.pop_back(); }},
      {"3 output rows", [](StepInput& in) { in.output_rows = {0, 1, 1}; }},
      {"ascending", [](StepInput& in) { in.output_rows = {1, 0}; in.sampling.resize(2); }},
      {"output row 2 of 2", [](StepInput& in) { in.output_rows = {2}; }},
      {"2 sampling parameters for 1", [](StepInput& in) { in.sampling.resize(2); }},
      {"1 page tables, 2 expected", [](StepInput& in) { in.tables.pop_back(); }},
      {"page table 1 has 3 entries, 4 expected", [](StepInput& in) { in.tables[1].pop_back(); }},
      {"names page 4, the pool has 4", [](StepInput& in) { in.tables[0][0] = 4; }},
      {"names page -2", [](StepInput& in) { in.tables[0][0] = -2; }},
      {"token id 300 at row 1", [](StepInput& in) { in.ids[1] = 300; }},
      {"token id -1 at row 0", [](StepInput& in) { in.ids[0] = -1; }},
      {"sequence 2 at row 0", [](StepInput& in) { in.sequences[0] = 2; }},
      {"position -1 at row 0", [](StepInput& in) { in.positions[0] = -1; }},
      {"position 128 at row 1 is past the context of 128", [](StepInput& in) { in.positions[1] = 128; }},
      {"position 64 of sequence 1 has no page in group 0", [](StepInput& in) { in.positions[1] = 64; }},
      {"page copy in group 2", [](StepInput& in) { in.page_copies = {{2, 0, 1}}; }},
      {"page copy from 0 to 4", [](StepInput& in) { in.page_copies = {{0, 0, 4}}; }},
  };
  for (const auto& [message, change] : kChanges) {
    StepInput input = good;
    change(input);
    try {
      executor->set_input(input);
      ADD_FAILURE() << "accepted: " << message;
    } catch (const Error& error) {
      const std::string what = error.what();
      EXPECT_EQ(error.code, ErrorCode::kBadInput);
      EXPECT_NE(what.find(message), std::string::npos) << what;
      EXPECT_EQ(what.find('\n'), std::string::npos);
    }
  }
}

// Only where both are norms of one vector and the values' has no weight; which columns are turned is what the frequencies say.
TEST(Program, KeysCanBeMadeFromValues) {
  LayerProgram layer;
  const auto finish = std::find_if(layer.program.ops.begin(), layer.program.ops.end(), [](const Op& op) { return std::holds_alternative<QkvFinish>(op); });
  QkvFinish& op = std::get<QkvFinish>(*finish);
  EXPECT_FALSE(keys_from_values(layer.program, 0)) << "values have a projection of their own";
  op.v_from_k = true;
  layer.program.ropes[0].frequencies = {1, 0.5, 0, 0, 0, 0, 0, 0};
  const std::optional<KeysFromValues> keys = keys_from_values(layer.program, 0);
  ASSERT_TRUE(keys);
  EXPECT_EQ(keys->weight.index, op.k_norm.weight.index);
  for (size_t column = 0; column < 16; ++column) EXPECT_EQ(keys->is_turned[column], column % 8 < 2) << column;
  EXPECT_FALSE(keys_from_values(layer.program, 1)) << "no op appends to it";

  const QkvFinish good = op;
  op.v_norm.weight = op.k_norm.weight;
  EXPECT_FALSE(keys_from_values(layer.program, 0)) << "values have a weight";
  op = good;
  op.v_norm.eps = 1e-5f;
  EXPECT_FALSE(keys_from_values(layer.program, 0)) << "another epsilon";
  op = good;
  op.k_norm.present = false;
  EXPECT_FALSE(keys_from_values(layer.program, 0)) << "keys are not normed";
  op = good;
  op.n_kv_heads = 0;
  EXPECT_FALSE(keys_from_values(layer.program, 0)) << "it only finishes q";
}

}  // namespace
}  // namespace beryl
