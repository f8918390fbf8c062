// What: on real transformers, a reply given among others is bit for bit the one given alone: with neighbours that come and go,
//       a prefix found in the caches, being put back and computed anew, guesses; NaN ends one request only.
// How:  the golden models on the CPU backend; ids and the log-probabilities of each token against generate() on a
//       stepper of its own.
#include <malloc.h>

#include <fstream>
#include <iterator>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "engine/engine.h"
#include "engine/generate.h"
#include "engine/golden_engine.h"

namespace beryl {
namespace {

using test::random_ids;
using Ids = std::vector<int32_t>;

struct Asked {
  Ids prompt;
  int64_t max_new = 1;
  SampleParams sampling;
};

struct Told {
  Ids ids;
  std::vector<float> logprobs;
  RequestResult result;
};

// Lets everything come, and nothing of its request be sampled before `go`: so requests meet however slowly they are submitted.
class WaitsFor : public TokenConstraint {
 public:
  explicit WaitsFor(const std::atomic<bool>& go) : go_(go) {}
  Next fill(std::span<uint32_t>) override {
    while (!go_) std::this_thread::yield();
    return Next::kAnything;
  }
  void accept(int32_t) override {}
  void rollback(int) override {}

 private:
  const std::atomic<bool>& go_;
};

class EngineGoldenTest : public testing::TestWithParam<std::string> {
 protected:
  EngineGoldenTest() : model_(open_model(test::golden_folder(GetParam()))), backend_(test::host_backend("cpu")) {}

  EngineLimits limits(int n_sequences, int chunk, int64_t cache_tokens = 0) const {
    EngineLimits limits;
    limits.run.context = kContext;
    limits.run.n_sequences = n_sequences;
    limits.run.chunk_tokens = chunk;
    limits.run.cache_tokens = cache_tokens;
    limits.run.kept_windows = 1;
    return limits;
  }

  static std::shared_ptr<Channel> submit(Engine& engine, const Asked& asked, const std::atomic<bool>* go = nullptr) {
    Request request;
    if (go != nullptr) request.constraint = std::make_unique<WaitsFor>(*go);
    request.prompt = asked.prompt;
    request.max_new = asked.max_new;
    request.sampling = asked.sampling;
    return engine.submit(std::move(request));
  }
  static Told read(Channel& channel) {
    Told told;
    std::vector<Sampled> tokens;
    while (channel.read(tokens, std::chrono::seconds(10))) {
      for (const Sampled& token : tokens) {
        told.ids.push_back(token.id);
        told.logprobs.push_back(token.logprob);
      }
      tokens.clear();
    }
    told.result = channel.result();
    return told;
  }
  Told alone(const Asked& asked) {
    RunLimits run = test::run_limits(kContext, 64);
    Stepper stepper(model_.program, run, *backend_);
    Told told;
    told.result.finish = generate(stepper, 0, {.prompt = asked.prompt, .max_new = asked.max_new, .sampling = asked.sampling, .stop_ids = {}},
                                  [&](const Sampled& token) {
                                    told.ids.push_back(token.id);
                                    told.logprobs.push_back(token.logprob);
                                    return true;
                                  })
                             .finish;
    return told;
  }
  static void expect_same(const Told& told, const Told& expected, size_t index) {
    EXPECT_EQ(told.ids, expected.ids) << "request " << index;
    EXPECT_TRUE(test::same_bits(told.logprobs, expected.logprobs)) << "request " << index;
    EXPECT_EQ(told.result.finish, expected.result.finish) << "request " << index;
  }

  // Greedy ones, drawn ones, some with penalties; prompts that begin alike.
  static std::vector<Asked> mixed(size_t n) {
    std::vector<Asked> all(n);
    const Ids shared = random_ids(200, 99);
    for (size_t i = 0; i < n; ++i) {
      Asked& each = all[i];
      if (i % 2 == 0) each.prompt.assign(shared.begin(), shared.begin() + static_cast<std::ptrdiff_t>(65 + 13 * i));
      const Ids own = random_ids(3 + 11 * i, 100 + i);
      each.prompt.insert(each.prompt.end(), own.begin(), own.end());
      each.max_new = i < 5 ? 150 : 30;
      each.sampling.n_logprobs = 0;
      each.sampling.seed = i;
      if (i % 3 == 1) each.sampling.temperature = 0.9f;
      if (i % 4 == 3) each.sampling.repetition_penalty = 1.3f, each.sampling.frequency_penalty = 0.2f;
    }
    return all;
  }

  static constexpr int64_t kContext = 400;
  Model model_;
  std::unique_ptr<Backend> backend_;
};
INSTANTIATE_TEST_SUITE_P(Golden, EngineGoldenTest, testing::ValuesIn(test::golden_models()),
                         [](const auto& info) { return info.param; });

TEST_P(EngineGoldenTest, RepliesAmongOthersAreThoseGivenAlone) {
  const std::vector<Asked> asked = mixed(9);
  std::vector<Told> expected;
  for (const Asked& each : asked) expected.push_back(alone(each));
  int64_t n_reused = 0, n_preempted = 0;
  // Enough pages, and a chunk that divides nothing; then pages for hardly more than one.
  for (const EngineLimits& limits : {limits(4, 29), limits(5, 48, kContext + 100)}) {
    Engine engine(model_.program, limits, *backend_);
    for (int round = 0; round < 2; ++round) {   // the second round finds what the first has left
      std::atomic<bool> go = false;
      std::vector<std::shared_ptr<Channel>> channels;
      for (const Asked& each : asked) channels.push_back(submit(engine, each, channels.size() % 2 == 0 ? &go : nullptr));
      go = true;
      for (size_t i = 0; i < asked.size(); ++i) {
        const Told told = read(*channels[i]);
        expect_same(told, expected[i], i);
        n_reused += told.result.timings.reused_tokens;
        n_preempted += told.result.timings.preemptions;
      }
    }
    const EngineCounts counts = engine.counts();
    EXPECT_EQ(counts.n_free_pages, counts.n_pages);
  }
  EXPECT_GT(n_reused, 500);
  EXPECT_GT(n_preempted, 0);
}

TEST_P(EngineGoldenTest, GuessesChangeNothing) {
  Asked asked;
  // A text of one short period: models of random weights fall into step with it.
  for (int i = 0; i < 60; ++i) asked.prompt.push_back(10 + i % 4);
  asked.max_new = 80;
  asked.sampling.n_logprobs = 0;
  const Told expected = alone(asked);
  EngineLimits guessing = limits(2, 32);
  guessing.max_draft = 5;
  guessing.always_draft = true;
  Engine engine(model_.program, guessing, *backend_);
  for (int round = 0; round < 3; ++round) {
    const Told told = read(*submit(engine, asked));
    expect_same(told, expected, static_cast<size_t>(round));
    EXPECT_LE(told.result.timings.accepted_tokens, told.result.timings.drafted_tokens);
  }
  EXPECT_GT(engine.counts().drafted_tokens, 0);
}

TEST_P(EngineGoldenTest, NumbersThatAreNoneEndOneRequestOnly) {
  constexpr int32_t kPoisoned = 200;
  Model poisoned = open_model(test::golden_folder(GetParam()));
  test::poison_token(poisoned, kPoisoned);
  Asked good;
  good.prompt = random_ids(90, 5);
  std::replace(good.prompt.begin(), good.prompt.end(), kPoisoned, 0);
  good.max_new = 20;
  good.sampling.logit_bias = {{kPoisoned, -std::numeric_limits<float>::infinity()}};
  good.sampling.n_logprobs = 0;
  Asked bad = good;
  bad.prompt[80] = kPoisoned;
  RunLimits run = test::run_limits(kContext, 64);
  Stepper stepper(poisoned.program, run, *backend_);
  const GenerateResult expected = generate(stepper, 0, {.prompt = good.prompt, .max_new = 20, .sampling = good.sampling, .stop_ids = {}},
                                           [](const Sampled&) { return true; });
  Engine engine(poisoned.program, limits(3, 32), *backend_);
  const auto first = submit(engine, good), failing = submit(engine, bad), second = submit(engine, good);
  const Told failed = read(*failing);
  EXPECT_EQ(failed.result.finish, FinishReason::kFailed);
  EXPECT_EQ(failed.result.failure, Failure::kNoToken);
  EXPECT_TRUE(failed.ids.empty());
  EXPECT_NE(failed.result.error.find("finite"), std::string::npos);
  EXPECT_EQ(read(*first).ids, expected.reply);
  EXPECT_EQ(read(*second).ids, expected.reply);
  EXPECT_EQ(read(*submit(engine, good)).ids, expected.reply);
  EXPECT_EQ(read(*submit(engine, bad)).result.finish, FinishReason::kFailed);
}

// Bytes in use, and the number of mappings. (A sanitizer that brings its own heap says 0, and looks for leaks itself.)
std::pair<size_t, size_t> memory_in_use() {
  const struct mallinfo2 heap = mallinfo2();
  std::ifstream maps("/proc/self/maps");
  return {heap.uordblks + heap.hblkhd, static_cast<size_t>(std::count(std::istreambuf_iterator<char>(maps), {}, '\n'))};
}

TEST_P(EngineGoldenTest, LoadedAndUnloadedFiftyTimesItLeavesNothing) {
  const auto cycle = [&] {
    const Model model = open_model(test::golden_folder(GetParam()));
    const std::unique_ptr<Backend> backend = test::host_backend("cpu");
    Engine engine(model.program, limits(2, 32), *backend);
    const Told told = read(*submit(engine, {{1, 2, 3, 4, 5}, 4, {}}));
    EXPECT_FALSE(told.ids.empty() && told.result.finish == FinishReason::kLength);
  };
  for (int i = 0; i < 5; ++i) cycle();
  const auto [bytes, mappings] = memory_in_use();
  for (int i = 0; i < 50; ++i) cycle();
  const auto [bytes_after, mappings_after] = memory_in_use();
  EXPECT_LE(bytes_after, bytes + (64 << 10));
  EXPECT_LE(mappings_after, mappings + 8);
}

}  // namespace
}  // namespace beryl
