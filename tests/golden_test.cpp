// What: whole models, from file to logits and greedy ids, are those of the reference implementation (Hugging Face
//       transformers in fp32, tests/golden), on every host backend, from a Hugging Face folder and from GGUF.
// How:  logits at every position of `one` and `long`, the ragged batch b0|b1|b2 run as one batch, the residual stream at
//       every probe, and greedy ids for every chunk size from 1 to 41. The bound on the double-precision backend is the
//       golden data's own (2e-4, fp32 against double). The CPU's bound comes from the data: its sums are fp32 like the
//       golden run's, so it may be off the double result by a few times what that run is off ("cpu_exact"); with caches
//       of f16 ("cpu"), whose roundings are 2^13 times as large, by as many times that; with operands of bf16 for matrices of BF16
//       (the folders', and some GGUF files'), which have to be asked for ("cpu_bf16"), by 2^16 times.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "engine/generate.h"
#include "engine/trace.h"
#include "model/model.h"
#include "ops/backend.h"
#include "weights/safetensors.h"

namespace beryl {
namespace {

constexpr double kReferenceBound = 2e-4;
constexpr double kFp32Runs = 8;        // the CPU's error in units of the golden fp32 run's own
constexpr double kF16Runs = 0x1p13;    // with caches of f16: 2^-11 / 2^-24
constexpr double kBf16Runs = 0x1p16;   // with operands of bf16: 2^-8 / 2^-24
constexpr int kMaxChunk = 41;
constexpr const char* kModels[] = {"gemma4_dense", "gemma4_dense_hd512", "gemma4_e2b", "gemma4_moe", "gemma3", "llama"};

std::string golden_path(const std::string& model) { return std::string(BERYL_SOURCE_DIR) + "/tests/golden/" + model; }

struct Golden {
  explicit Golden(const std::string& model) : file(golden_path(model) + "/golden.safetensors") {}

  std::vector<int32_t> ids(const std::string& name) const {
    const TensorInfo& tensor = find(name);
    const auto* values = reinterpret_cast<const int32_t*>(tensor.data.data());
    return {values, values + tensor.data.size() / sizeof(int32_t)};
  }
  std::vector<float> floats(const std::string& name) const {
    const TensorInfo& tensor = find(name);
    const auto* values = reinterpret_cast<const float*>(tensor.data.data());
    return {values, values + tensor.data.size() / sizeof(float)};
  }
  const TensorInfo& find(const std::string& name) const {
    const TensorInfo* tensor = file.find(name);
    if (tensor == nullptr) throw std::runtime_error("golden file lacks " + name);
    return *tensor;
  }
  SafetensorsFile file;
};

double worst_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
  }
  return worst;
}

enum class Source { kFolder, kGgufF32, kGgufBf16 };

struct Case {
  std::string model;
  Source source;
  std::string backend;
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const char* source = info.param.source == Source::kFolder ? "folder" : info.param.source == Source::kGgufF32 ? "gguf_f32" : "gguf_bf16";
  return fmt::format("{}_{}_{}", info.param.model, source, info.param.backend);
}

class GoldenTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    std::string path = golden_path(c.model);
    if (c.source != Source::kFolder) {
      path = fmt::format("{}/test-data/golden-gguf/{}/{}.gguf", BERYL_BINARY_DIR, c.source == Source::kGgufF32 ? "f32" : "bf16", c.model);
      if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there: the test data needs Python packages (./test makes it)";
    }
    model_ = open_model(path);
    golden_ = std::make_unique<Golden>(c.model);
    backend_ = c.backend == "reference" ? make_reference_backend(1)
                                        : make_cpu_backend(2, c.backend == "cpu"        ? CpuPrecision::kFast
                                                              : c.backend == "cpu_bf16" ? CpuPrecision::kBf16
                                                                                        : CpuPrecision::kExact);
    reference_ = make_reference_backend(1);
  }

  std::vector<SequenceTrace> run(Backend& backend, const std::vector<std::string>& keys, int chunk, bool layers = false) {
    TraceRequest request;
    for (const std::string& key : keys) request.sequences.push_back(golden_->ids(key + ".ids"));
    request.chunk_tokens = chunk;
    request.layers = layers;
    return trace(model_.program, backend, request);
  }

  // For the reference the golden bound; for the CPU a multiple of what the golden fp32 run itself is off.
  double bound(std::span<const float> golden, std::span<const float> exact) const {
    if (GetParam().backend == "reference") return kReferenceBound;
    double largest = 0;
    for (float value : golden) largest = std::max(largest, std::abs(static_cast<double>(value)));
    return runs() * std::max(worst_difference(golden, exact), largest * 0x1p-23);
  }
  double runs() const {
    return GetParam().backend == "cpu_bf16" ? kBf16Runs : GetParam().backend == "cpu" ? kF16Runs : kFp32Runs;
  }

  Model model_;
  std::unique_ptr<Golden> golden_;
  std::unique_ptr<Backend> backend_, reference_;
};

TEST_P(GoldenTest, LogitsAtEveryPosition) {
  for (const char* key : {"one", "long"}) {
    const std::vector<float> golden = golden_->floats(std::string(key) + ".logits");
    const std::vector<float> exact = run(*reference_, {key}, kMaxChunk)[0].logits;
    const std::vector<float> logits = run(*backend_, {key}, kMaxChunk)[0].logits;
    EXPECT_LE(worst_difference(exact, golden), kReferenceBound) << key;
    const double limit = bound(golden, exact);
    EXPECT_LE(worst_difference(logits, exact), limit) << key;
    RecordProperty(std::string(key) + "_difference", fmt::format("{:.2e} of {:.2e}", worst_difference(logits, exact), limit));
  }
}

TEST_P(GoldenTest, RaggedBatchAsOneBatch) {
  const std::vector<std::string> keys = {"b0", "b1", "b2"};
  const std::vector<SequenceTrace> exact = run(*reference_, keys, kMaxChunk);
  for (int chunk : {1, 4, kMaxChunk}) {
    const std::vector<SequenceTrace> traces = run(*backend_, keys, chunk);
    for (size_t s = 0; s < keys.size(); ++s) {
      const std::vector<float> golden = golden_->floats(keys[s] + ".last_logits");
      const auto last = [&](const SequenceTrace& t) { return std::span(t.logits).last(golden.size()); };
      EXPECT_LE(worst_difference(last(exact[s]), golden), kReferenceBound) << keys[s];
      EXPECT_LE(worst_difference(last(traces[s]), last(exact[s])), bound(golden, last(exact[s]))) << keys[s] << " chunk " << chunk;
    }
  }
}

TEST_P(GoldenTest, ResidualStreamAtEveryProbe) {
  const std::vector<int32_t> probes = golden_->ids("long.probe_positions");
  const std::vector<float> golden = golden_->floats("long.hidden");   // [n_layers + 1][probes][model_dim]
  const auto width = static_cast<size_t>(model_.config.model_dim);
  const SequenceTrace exact = run(*reference_, {"long"}, kMaxChunk, true)[0];
  const SequenceTrace traced = run(*backend_, {"long"}, kMaxChunk, true)[0];
  const std::vector<float>& final_norm =
      model_.weights->set.vectors[static_cast<size_t>(model_.weights->output_norm.index)].values;
  const auto state = [&](const SequenceTrace& t, int entry, int32_t position) {
    const std::vector<float>& rows = entry == 0 ? t.embedded : t.hidden[static_cast<size_t>(entry - 1)];
    std::vector<float> x(rows.begin() + position * static_cast<int64_t>(width), rows.begin() + (position + 1) * static_cast<int64_t>(width));
    if (entry == model_.config.n_layers()) {   // the golden file has the last one after the final norm
      double squares = 0;
      for (float value : x) squares += static_cast<double>(value) * value;
      const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + model_.config.norm_eps);
      for (size_t c = 0; c < width; ++c) x[c] = static_cast<float>(x[c] * factor * final_norm[c]);
    }
    return x;
  };
  for (int entry = 0; entry <= model_.config.n_layers(); ++entry)
    for (size_t p = 0; p < probes.size(); ++p) {
      const std::span<const float> want = std::span(golden).subspan((static_cast<size_t>(entry) * probes.size() + p) * width, width);
      const std::vector<float> sure = state(exact, entry, probes[p]);
      EXPECT_LE(worst_difference(sure, want), kReferenceBound) << "entry " << entry << " position " << probes[p];
      // Single rows have few values, so the golden run may be off by less than a rounding there: its worst over all counts.
      if (GetParam().backend != "reference") {
        double largest = 0;
        for (float value : want) largest = std::max(largest, std::abs(static_cast<double>(value)));
        const double fp32 = std::max(worst_difference(sure, want), largest * 0x1p-20);
        EXPECT_LE(worst_difference(state(traced, entry, probes[p]), sure), runs() * fp32) << "entry " << entry << " position " << probes[p];
      }
    }
}

TEST_P(GoldenTest, GreedyIdsForEveryChunkSize) {
  const std::vector<int32_t> ids = golden_->ids("greedy.ids");
  const auto n_prompt = static_cast<size_t>(golden_->ids("greedy.prompt_len").front());
  GenerateRequest request;
  request.prompt.assign(ids.begin(), ids.begin() + static_cast<int64_t>(n_prompt));
  request.max_new = static_cast<int64_t>(ids.size() - n_prompt);
  const std::vector<int32_t> want(ids.begin() + static_cast<int64_t>(n_prompt), ids.end());
  for (int chunk = 1; chunk <= kMaxChunk; ++chunk) {
    RunLimits run;
    run.context = static_cast<int64_t>(ids.size());
    run.chunk_tokens = chunk;
    Stepper stepper(model_.program, run, *backend_);
    const GenerateResult result = generate(stepper, 0, request, [](const Sampled&) { return true; });
    EXPECT_EQ(result.reply, want) << "chunk " << chunk;
    // The whole continuation as a prompt, so that chunks of up to 41 cross the window: the same last id.
    Stepper again(model_.program, run, *backend_);
    GenerateRequest teacher = request;
    teacher.prompt.assign(ids.begin(), ids.end() - 1);
    teacher.max_new = 1;
    EXPECT_EQ(generate(again, 0, teacher, [](const Sampled&) { return true; }).reply.front(), ids.back()) << "chunk " << chunk;
    EXPECT_TRUE(stepper.executor().damaged_guards().empty());
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* model : kModels)
    for (Source source : {Source::kFolder, Source::kGgufF32, Source::kGgufBf16})
      for (const std::string backend : {"reference", "cpu", "cpu_bf16", "cpu_exact"})
        if (source == Source::kFolder || (backend != "cpu" && backend != "cpu_bf16")) all.push_back({model, source, backend});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenTest, testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace beryl
