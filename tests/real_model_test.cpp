// What: the two real models give the known logits and greedy ids, on both host backends.
// How:  tests/golden/real_models.json holds the 8 largest logits after a prompt, computed in double from the exactly
//       decoded weights by another program, and greedy ids that llama.cpp gives; the first `agree_first` of those agree
//       with the double computation. With activations of 8 bits the CPU may choose another id only where the double
//       computation's two best logits are closer than the error that docs/numerics.md states; what follows is another text.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cpu/cpu_backend.h"
#include "engine/generate.h"
#include "engine/trace.h"
#include "model/model.h"
#include "ops/backend.h"
#include "test_models.h"

namespace beryl {
namespace {

constexpr double kLogitBound = 1e-3;
constexpr double kEightBitLogitBound = 0.7;   // docs/numerics.md

struct RealModel {
  const char* key;
  std::string (*path)();
};

void PrintTo(const RealModel& model, std::ostream* stream) { *stream << model.key; }

class RealModelTest : public testing::TestWithParam<std::tuple<RealModel, const char*>> {
 protected:
  void SetUp() override {
    const RealModel& real = std::get<0>(GetParam());
    BERYL_SKIP_WITHOUT(real.path());
    std::ifstream stream(std::string(BERYL_SOURCE_DIR) + "/tests/golden/real_models.json");
    known_ = nlohmann::json::parse(stream)["models"][real.key];
    prompt_ = known_["prompt"].get<std::vector<int32_t>>();
    model_ = open_model(real.path());
    const std::string name = std::get<1>(GetParam());
    is_coarse_ = name == "cpu";
    backend_ = name == "reference" ? make_reference_backend(0)
                                   : make_cpu_backend(0, is_coarse_ ? CpuPrecision::kFast : CpuPrecision::kExact);
  }
  nlohmann::json known_;
  std::vector<int32_t> prompt_;
  Model model_;
  std::unique_ptr<Backend> backend_;
  bool is_coarse_ = false;
};

TEST_P(RealModelTest, LargestLogitsAfterThePrompt) {
  TraceRequest request;
  request.sequences = {prompt_};
  request.chunk_tokens = static_cast<int>(prompt_.size());
  const std::vector<float> logits = trace(model_.program, *backend_, request)[0].logits;
  const std::span<const float> last = std::span(logits).last(static_cast<size_t>(model_.config.vocab));
  std::vector<int32_t> order(last.size());
  std::iota(order.begin(), order.end(), 0);
  const nlohmann::json& top = known_["top_fp64"];
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(top.size()), order.end(),
                    [&](int32_t a, int32_t b) { return last[static_cast<size_t>(a)] > last[static_cast<size_t>(b)]; });
  for (size_t i = 0; i < top.size(); ++i) {
    if (!is_coarse_) {
      EXPECT_EQ(order[i], top[i][0].get<int32_t>()) << "rank " << i;
    }
    EXPECT_NEAR(last[static_cast<size_t>(top[i][0].get<int32_t>())], top[i][1].get<double>(),
                is_coarse_ ? kEightBitLogitBound : kLogitBound)
        << "rank " << i;
  }
}

TEST_P(RealModelTest, FirstGreedyIds) {
  const auto n = known_["agree_first"].get<int64_t>();
  GenerateRequest request;
  request.prompt = prompt_;
  request.max_new = n;
  RunLimits run;
  run.context = 64;
  run.chunk_tokens = 5;
  Stepper stepper(model_.program, run, *backend_);
  const std::vector<int32_t> reply = generate(stepper, 0, request, [](const Sampled&) { return true; }).reply;
  std::vector<int32_t> want = known_["greedy_llamacpp"].get<std::vector<int32_t>>();
  want.resize(static_cast<size_t>(n));
  if (is_coarse_) {
    const auto [mine, theirs] = std::mismatch(reply.begin(), reply.end(), want.begin(), want.end());
    if (theirs == want.end()) return;
    const auto first = static_cast<size_t>(theirs - want.begin());
    EXPECT_LT(known_["margins"][first].get<double>(), kEightBitLogitBound) << "flip at " << first;
    return;
  }
  EXPECT_EQ(reply, want);
}

INSTANTIATE_TEST_SUITE_P(Real, RealModelTest,
                         testing::Combine(testing::Values(RealModel{"gemma3-270m-q4_k_m", gemma3_path},
                                                          RealModel{"smollm2-135m-instruct-q4_1", smollm2_path}),
                                          testing::Values("reference", "cpu_exact", "cpu")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).key).substr(0, 6) + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace beryl
