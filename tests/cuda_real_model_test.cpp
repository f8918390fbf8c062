// What: the two real models on the GPU: the known logits after a prompt and the known greedy ids (tests/golden/real_models.json,
//       computed in double), for several chunk sizes, caches and numbers of sequences at once.
// How:  an id may differ only where the double computation's two best logits are closer than the bound that docs/numerics.md
//       states for the cache; what follows is another text. Skipped where there is no GPU or no model.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <ostream>
#include <string>
#include <tuple>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "cuda/cuda_backend.h"
#include "engine/trace.h"
#include "model/model.h"
#include "test_models.h"

namespace beryl {
namespace {

struct RealModel {
  const char* key;
  std::string (*path)();
};
struct Cache {
  CacheType type;
  double logit_bound;               // docs/numerics.md
  const char* name;
};

void PrintTo(const RealModel& model, std::ostream* stream) { *stream << model.key; }
void PrintTo(const Cache& cache, std::ostream* stream) { *stream << cache.name; }

class CudaRealModel : public testing::TestWithParam<std::tuple<RealModel, Cache>> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
    const RealModel& real = std::get<0>(GetParam());
    BERYL_SKIP_WITHOUT(real.path());
    const char* folder = std::getenv("BERYL_SOURCE_DIR");        // where it runs on another machine than the one that built it
    std::ifstream stream(std::string(folder == nullptr ? BERYL_SOURCE_DIR : folder) + "/tests/golden/real_models.json");
    known_ = nlohmann::json::parse(stream)["models"][real.key];
    prompt_ = known_["prompt"].get<std::vector<int32_t>>();
    model_ = open_model(real.path());
    backend_ = make_cuda_backend(0);
  }
  const Cache& cache() const { return std::get<1>(GetParam()); }

  nlohmann::json known_;
  std::vector<int32_t> prompt_;
  Model model_;
  std::unique_ptr<Backend> backend_;
};

TEST_P(CudaRealModel, LargestLogitsAfterThePrompt) {
  for (const int chunk : {static_cast<int>(prompt_.size()), 1, 3}) {
    TraceRequest request;
    request.sequences = {prompt_};
    request.chunk_tokens = chunk;
    request.cache_type = cache().type;
    const std::vector<float> logits = trace(model_.program, *backend_, request)[0].logits;
    const std::span<const float> last = std::span(logits).last(static_cast<size_t>(model_.config.vocab));
    double largest = 0;
    for (const nlohmann::json& known : known_["top_fp64"]) {
      const double error = last[known[0].get<size_t>()] - known[1].get<double>();
      largest = std::max(largest, std::abs(error));
    }
    EXPECT_LT(largest, cache().logit_bound) << "chunks of " << chunk;
    std::printf("largest error %.2g, chunks of %d\n", largest, chunk);
  }
}

TEST_P(CudaRealModel, FirstGreedyIds) {
  const auto n = known_["agree_first"].get<int64_t>();
  std::vector<int32_t> want = known_["greedy_llamacpp"].get<std::vector<int32_t>>();
  want.resize(static_cast<size_t>(n));
  for (const size_t n_sequences : {1, 3, 8, 20}) {
    for (const int chunk : {static_cast<int>(prompt_.size()), 5, 1}) {
      TraceRequest request;
      request.sequences.assign(n_sequences, prompt_);
      request.chunk_tokens = chunk;
      request.cache_type = cache().type;
      request.n_greedy = n;
      for (const SequenceTrace& sequence : trace(model_.program, *backend_, request)) {
        const auto [mine, theirs] = std::mismatch(sequence.greedy.begin(), sequence.greedy.end(), want.begin(), want.end());
        if (theirs == want.end()) continue;
        const auto first = static_cast<size_t>(theirs - want.begin());
        EXPECT_LT(known_["margins"][first].get<double>(), cache().logit_bound)
            << "flip at " << first << ", chunks of " << chunk << ", " << n_sequences << " sequences";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Real, CudaRealModel,
                         testing::Combine(testing::Values(RealModel{"gemma3-270m-q4_k_m", gemma3_path},
                                                          RealModel{"smollm2-135m-instruct-q4_1", smollm2_path}),
                                          testing::Values(Cache{CacheType::kF32, 0.01, "f32"}, Cache{CacheType::kBf16, 0.1, "bf16"},
                                                          Cache{CacheType::kFp8, 1.0, "fp8"})),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).key).substr(0, 6) + "_" + std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace beryl
