// What: every model of the specifications has the right size, builds a step, and its plan is exact and follows the
//       window; and what is planned is what is allocated.
// How:  parameters are counted from the shapes and compared with the specification's totals; plans are compared over
//       contexts from 4K to 256K; a small synthetic model is prepared on every backend; where matrices lie is compared.
#include "model/synthetic.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.h"
#include "cpu/cpu_backend.h"
#include "model/memory_plan.h"

namespace beryl {
namespace {

int64_t count_parameters(const Model& model) {
  int64_t total = 0;
  for (const WeightMatrix& matrix : model.weights->set.matrices)
    total += matrix.rows() * matrix.cols() * matrix.stack();
  return total;
}

TEST(SyntheticTest, SizesAreThoseOfTheSpecification) {
  const std::map<std::string, double> known = {{"gemma4-e2b", 4.63e9},
                                               {"gemma4-e4b", 7.46e9},
                                               {"gemma4-12b", 11.91e9},
                                               {"gemma4-26b-a4b", 25.23e9},
                                               {"gemma4-31b", 30.70e9}};
  for (const auto& [name, parameters] : known) {
    const Model model = make_synthetic_model(name, {}, 1, false);
    EXPECT_NEAR(static_cast<double>(count_parameters(model)), parameters, 0.006e9) << name;
  }
  // Gemma 3 270M and SmolLM2 135M are named by their sizes, embedding included.
  EXPECT_NEAR(static_cast<double>(count_parameters(make_synthetic_model("gemma3-270m", {}, 1, false))), 268.1e6, 0.2e6);
  EXPECT_NEAR(static_cast<double>(count_parameters(make_synthetic_model("smollm2-135m", {}, 1, false))), 134.5e6,
              0.2e6);
}

TEST(SyntheticTest, EveryModelBuildsAStep) {
  for (const std::string& name : synthetic_names()) {
    const Model model = make_synthetic_model(name, {Format::kQ4_0, Format::kQ8_0}, 1, false);
    EXPECT_EQ(model.program.n_layers, model.config.n_layers()) << name;
    EXPECT_FALSE(to_text(model.program).empty()) << name;
  }
}

TEST(SyntheticTest, CachePlanFollowsTheWindowAndTheContext) {
  const Model model = make_synthetic_model("gemma4-12b", {}, 1, false);
  const std::unique_ptr<Backend> cpu = make_cpu_backend(1);
  constexpr int kChunk = 256;
  int64_t last_total = 0;
  for (int64_t context : {4096, 8192, 32768, 65536, 131072, 262144}) {
    RunLimits run;
    run.context = context;
    run.chunk_tokens = kChunk;
    const MemoryPlan plan = plan_memory(model.program, run, *cpu);
    // By hand, from the specification: values a position are 40 layers x 2 x 8 x 256 and 8 layers x 2 x 1 x 512.
    const int64_t ring_pages = (1023 + kChunk + 63) / 64;
    const int64_t values = 40 * 4096 * ring_pages * 64 + 8 * 1024 * context;
    EXPECT_EQ(plan.total(MemoryKind::kCache), values * 2) << context;   // f16
    EXPECT_GT(plan.total(), last_total);
    last_total = plan.total();
  }
}

TEST(SyntheticTest, SharingLayersOwnNoCache) {
  const Model model = make_synthetic_model("gemma4-e2b", {}, 1, false);
  EXPECT_EQ(model.program.caches.size(), 15u);
  for (int i = 15; i < 35; ++i)
    EXPECT_EQ(model.config.layers[static_cast<size_t>(i)].attention.cache_layer, (i + 1) % 5 == 0 ? 14 : 13);
}

TEST(SyntheticTest, WhatIsPlannedIsAllocated) {
  const Model model = make_synthetic_model("smollm2-135m", {Format::kQ4_0, Format::kQ8_0}, 7, true);
  RunLimits run;
  run.context = 200;
  run.chunk_tokens = 16;
  std::unique_ptr<Backend> backends[] = {make_cpu_backend(2), make_reference_backend(1)};
  for (const std::unique_ptr<Backend>& backend : backends) {
    const MemoryPlan plan = plan_memory(model.program, run, *backend);
    const std::vector<Allocation> taken = backend->prepare(model.program, plan.limits)->allocations();
    ASSERT_EQ(taken.size(), plan.allocations.size());
    for (size_t i = 0; i < taken.size(); ++i) {
      EXPECT_EQ(taken[i].label, plan.allocations[i].label);
      EXPECT_EQ(taken[i].bytes, plan.allocations[i].bytes) << taken[i].label;
    }
  }
}

TEST(SyntheticTest, SeparateMatricesShareNoByte) {
  SyntheticFormats formats{Format::kQ4_0, Format::kQ8_0};
  formats.separate = true;
  const Model model = make_synthetic_model("smollm2-135m", formats, 7, true);
  std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
  int64_t bytes = 0;
  for (const WeightMatrix& matrix : model.weights->set.matrices)
    for (const HostMatrix& part : matrix.parts) {
      ranges.emplace_back(part.codes, part.codes + part.rows * row_bytes(part.format, part.cols));
      bytes += part.rows * row_bytes(part.format, part.cols);
    }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LE(ranges[i - 1].second, ranges[i].first);
  EXPECT_GT(bytes, 80'000'000);   // 134 million weights of 4.5 bits and, in the head, 8.5
  const auto n_zeros = std::count(ranges.back().first, ranges.back().second, std::byte{0});
  EXPECT_LT(n_zeros, (ranges.back().second - ranges.back().first) / 8) << "the last matrix has data too";
}

TEST(SyntheticTest, SharedMatricesComeBackEveryFourthLayer) {
  const Model model = make_synthetic_model("smollm2-135m", {}, 7, true);
  std::set<const std::byte*> gates;
  const auto gate_of = [&](size_t layer) {
    const WeightMatrix& gate_up = model.weights->set.matrices[static_cast<size_t>(model.weights->layers[layer].gate_up.index)];
    EXPECT_EQ(gate_up.parts.size(), 2u);
    EXPECT_NE(gate_up.parts[0].codes, gate_up.parts[1].codes) << "gate and up are not copies of each other";
    return gate_up.parts[0].codes;
  };
  for (size_t layer = 0; layer < 30; ++layer) {
    gates.insert(gate_of(layer));
    if (layer >= 4) {
      EXPECT_EQ(gate_of(layer), gate_of(layer - 4));
    }
  }
  EXPECT_EQ(gates.size(), 4u);
}

TEST(SyntheticTest, UnknownNameListsTheKnownOnes) {
  try {
    synthetic_config("gemma5-1b");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kBadInput);
    EXPECT_NE(std::string(error.what()).find("gemma4-12b"), std::string::npos);
  }
}

}  // namespace
}  // namespace beryl
