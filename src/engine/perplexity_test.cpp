// What: perplexity, its error, KL and flips are those of a trivially right computation, whatever the chunks, windows
//       and BOS; texts that fill no window and logits that are not finite are refused with their numbers.
// How:  golden models on both host backends; the same windows traced whole, then log-softmax of every logit in double
//       without any care for range, which these small models do not need.
#include "engine/perplexity.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "base/error.h"
#include "engine/golden_engine.h"
#include "engine/trace.h"
#include "ops/forwarding_executor.h"

namespace beryl {
namespace {

using test::random_ids;

class PerplexityTest : public test::GoldenEngine {};
BERYL_INSTANTIATE_GOLDEN_ENGINE(PerplexityTest);

// [predictions][vocab]: log-probabilities of the rows that count, and the ids that came.
struct Predictions {
  std::vector<std::vector<double>> log_probabilities;
  std::vector<int32_t> next;
};

Predictions predictions_of(const Program& program, Backend& backend, const PerplexityRequest& request) {
  Predictions all;
  const auto vocab = static_cast<size_t>(program.vocab);
  const auto window_tokens = static_cast<size_t>(request.window_tokens);
  for (size_t begin = 0; begin + window_tokens <= request.ids.size(); begin += window_tokens) {
    const auto window = request.ids.subspan(begin, window_tokens);
    TraceRequest whole;
    whole.sequences = {{window.begin(), window.end()}};
    if (request.bos) whole.sequences[0][0] = *request.bos;
    whole.chunk_tokens = static_cast<int>(window_tokens);
    const std::vector<float> logits = trace(program, backend, whole)[0].logits;
    for (size_t row = static_cast<size_t>(request.first_scored); row + 1 < window_tokens; ++row) {
      double sum = 0;
      std::vector<double> values(vocab);
      for (size_t id = 0; id < vocab; ++id) values[id] = std::exp(static_cast<double>(logits[row * vocab + id]));
      for (double value : values) sum += value;
      for (double& value : values) value = std::log(value / sum);
      all.log_probabilities.push_back(values);
      all.next.push_back(window[row + 1]);
    }
  }
  return all;
}

void expect_score(const TextScore& score, const Predictions& predictions) {
  const auto n = static_cast<double>(predictions.next.size());
  double mean = 0, squares = 0;
  for (size_t i = 0; i < predictions.next.size(); ++i)
    mean -= predictions.log_probabilities[i][static_cast<size_t>(predictions.next[i])] / n;
  for (size_t i = 0; i < predictions.next.size(); ++i) {
    const double distance = -predictions.log_probabilities[i][static_cast<size_t>(predictions.next[i])] - mean;
    squares += distance * distance;
  }
  const double error = n > 1 ? std::sqrt(squares / (n - 1) / n) : 0;
  EXPECT_NEAR(score.mean_nll, mean, 1e-12 * mean);
  EXPECT_NEAR(score.nll_error, error, 1e-9 * error);
  EXPECT_NEAR(score.perplexity(), std::exp(mean), 1e-11 * std::exp(mean));
  EXPECT_NEAR(score.perplexity_error(), error * std::exp(mean), 1e-8 * error * std::exp(mean));
  EXPECT_GT(score.seconds, 0);
}

TEST_P(PerplexityTest, EqualsWhatTracedLogitsSay) {
  const std::vector<int32_t> ids = random_ids(150, 21);
  struct Shape {
    int64_t window_tokens, first_scored;
    int chunk_tokens;
    std::optional<int32_t> bos;
  };
  for (const Shape& shape : {Shape{50, 25, 64, {}}, Shape{50, 25, 7, 3}, Shape{50, 0, 1, {}}, Shape{149, 74, 13, 200},
                             Shape{150, 148, 40, {}}, Shape{2, 0, 5, 9}, Shape{40, 20, 20, {}}, Shape{33, 31, 8, 77}}) {
    PerplexityRequest request;
    request.ids = ids;
    request.bos = shape.bos;
    request.window_tokens = shape.window_tokens;
    request.first_scored = shape.first_scored;
    request.chunk_tokens = shape.chunk_tokens;
    SCOPED_TRACE(testing::Message() << "window " << shape.window_tokens << " from " << shape.first_scored << " chunk "
                                    << shape.chunk_tokens);
    const PerplexityResult result = measure_perplexity(model_.program, *backend_, nullptr, request);
    const Predictions predictions = predictions_of(model_.program, *backend_, request);
    EXPECT_EQ(result.n_windows, 150 / shape.window_tokens);
    EXPECT_EQ(result.n_read, 150 / shape.window_tokens * (shape.window_tokens - 1));
    EXPECT_EQ(result.n_scored, static_cast<int64_t>(predictions.next.size()));
    EXPECT_FALSE(result.against);
    expect_score(result.score, predictions);
  }
}

TEST_P(PerplexityTest, ChunksAndALeftoverEndChangeNoBit) {
  const std::vector<int32_t> ids = random_ids(129, 22);
  PerplexityRequest request;
  request.ids = std::span(ids).first(120);
  request.window_tokens = 60;
  request.first_scored = 30;
  const double expected = measure_perplexity(model_.program, *backend_, nullptr, request).score.mean_nll;
  request.ids = ids;
  for (int chunk : {1, 7, 29, 30, 31, 1000}) {
    request.chunk_tokens = chunk;
    EXPECT_EQ(measure_perplexity(model_.program, *backend_, nullptr, request).score.mean_nll, expected)
        << "chunk " << chunk;
  }
  request.bos = ids[0] == 5 ? 6 : 5;
  EXPECT_NE(measure_perplexity(model_.program, *backend_, nullptr, request).score.mean_nll, expected);
}

TEST_P(PerplexityTest, ABackendAgainstItselfDiffersNowhere) {
  const std::vector<int32_t> ids = random_ids(60, 23);
  const std::unique_ptr<Backend> same = test::host_backend(std::get<1>(GetParam()));
  PerplexityRequest request;
  request.ids = ids;
  request.window_tokens = 30;
  request.first_scored = 0;
  const PerplexityResult result = measure_perplexity(model_.program, *backend_, same.get(), request);
  ASSERT_TRUE(result.against);
  EXPECT_EQ(result.against->score.mean_nll, result.score.mean_nll);
  EXPECT_EQ(result.against->mean_kl, 0);
  EXPECT_EQ(result.against->largest_kl, 0);
  EXPECT_EQ(result.against->n_flips, 0);
  EXPECT_EQ(result.against->n_flips_below_margin, 0);
}

// Passes all on to a reference executor; logits come out times a factor that changes from id to id, so that this
// backend has distributions that are far away and often another likeliest id.
class TiltedExecutor : public test::ForwardingExecutor {
 public:
  TiltedExecutor(std::unique_ptr<Executor> inner, const Program& program)
      : ForwardingExecutor(std::move(inner)), slot_(logits_slot(program)), vocab_(program.vocab) {}
  void read_rows(int slot, int64_t begin, int64_t n, float* out) override {
    inner_->read_rows(slot, begin, n, out);
    if (slot != slot_) return;
    for (int64_t i = 0; i < n * vocab_; ++i) out[i] *= 1 + 0.25F * static_cast<float>(i % vocab_ % 5 - 2);
  }

 private:
  int slot_;
  int64_t vocab_;
};

class TiltedBackend : public Backend {
 public:
  std::string_view name() const override { return "tilted"; }
  std::vector<Allocation> plan(const Program& program, const StepLimits& limits) const override {
    return inner_->plan(program, limits);
  }
  std::unique_ptr<Executor> prepare(const Program& program, const StepLimits& limits) override {
    return std::make_unique<TiltedExecutor>(inner_->prepare(program, limits), program);
  }

 private:
  std::unique_ptr<Backend> inner_ = make_reference_backend(1);
};

TEST_P(PerplexityTest, ComparesDistributionsAndTheirLikeliestIds) {
  const std::vector<int32_t> ids = random_ids(120, 24);
  TiltedBackend tilted;
  PerplexityRequest request;
  request.ids = ids;
  request.window_tokens = 40;
  request.first_scored = 10;
  request.chunk_tokens = 11;
  request.bos = 17;

  const Predictions q = predictions_of(model_.program, *backend_, request);
  const Predictions p = predictions_of(model_.program, tilted, request);
  double sum_kl = 0, largest_kl = 0;
  size_t largest_at = 0;
  std::vector<double> flip_margins;
  for (size_t i = 0; i < q.next.size(); ++i) {
    double kl = 0;
    for (size_t id = 0; id < q.log_probabilities[i].size(); ++id)
      kl += std::exp(p.log_probabilities[i][id]) * (p.log_probabilities[i][id] - q.log_probabilities[i][id]);
    sum_kl += kl;
    if (kl > largest_kl) {
      largest_kl = kl;
      largest_at = i;
    }
    const auto likeliest = [&](const Predictions& of) {
      const std::vector<double>& values = of.log_probabilities[i];
      return std::max_element(values.begin(), values.end()) - values.begin();
    };
    if (likeliest(p) == likeliest(q)) continue;
    std::vector<double> sorted = q.log_probabilities[i];
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    flip_margins.push_back(sorted[0] - sorted[1]);
  }
  // Between two flips' margins, so that some lie on each side.
  std::sort(flip_margins.begin(), flip_margins.end());
  ASSERT_GE(flip_margins.size(), 2U);
  const size_t half = flip_margins.size() / 2;
  request.margin = (flip_margins[half - 1] + flip_margins[half]) / 2;
  ASSERT_GT(flip_margins[half] - flip_margins[half - 1], 1e-9);

  const PerplexityResult result = measure_perplexity(model_.program, *backend_, &tilted, request);
  ASSERT_TRUE(result.against);
  expect_score(result.score, q);
  expect_score(result.against->score, p);
  const auto n = static_cast<double>(q.next.size());
  EXPECT_NEAR(result.against->mean_kl, sum_kl / n, 1e-11 * sum_kl / n);
  EXPECT_NEAR(result.against->largest_kl, largest_kl, 1e-11 * largest_kl);
  EXPECT_EQ(result.against->largest_kl_window, static_cast<int64_t>(largest_at) / 29);
  EXPECT_EQ(result.against->largest_kl_row, static_cast<int64_t>(largest_at) % 29 + 10);
  EXPECT_EQ(result.against->n_flips, static_cast<int64_t>(flip_margins.size()));
  EXPECT_EQ(result.against->n_flips_below_margin, static_cast<int64_t>(half));
  EXPECT_NEAR(result.against->largest_flip_margin, flip_margins.back(), 1e-11);
}

std::string message_of(const Program& program, Backend& backend, Backend* against, const PerplexityRequest& request) {
  try {
    measure_perplexity(program, backend, against, request);
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kBadInput);
    return error.what();
  }
  return {};
}

TEST_P(PerplexityTest, RefusesATextThatFillsNoWindow) {
  const std::vector<int32_t> ids = random_ids(49, 25);
  PerplexityRequest request;
  request.window_tokens = 50;
  request.first_scored = 25;
  for (size_t n : {size_t{0}, size_t{1}, size_t{49}}) {
    request.ids = std::span(ids).first(n);
    const std::string message = message_of(model_.program, *backend_, nullptr, request);
    EXPECT_NE(message.find("too short: it has " + std::to_string(n) + " tokens, at least the 50"), std::string::npos)
        << message;
  }
}

TEST_P(PerplexityTest, LogitsThatAreNotFiniteAreNamed) {
  constexpr int32_t kPoisoned = 91;
  test::poison_token(model_, kPoisoned);
  std::vector<int32_t> ids = random_ids(60, 26);
  std::replace(ids.begin(), ids.end(), kPoisoned, 90);
  PerplexityRequest request;
  request.ids = ids;
  request.window_tokens = 20;
  request.first_scored = 10;
  request.chunk_tokens = 4;
  EXPECT_EQ(message_of(model_.program, *backend_, nullptr, request), "");
  // Poisoned before counting begins, in the middle, and last: where it is only predicted.
  const auto refused = [&](size_t at) {
    std::vector<int32_t> poisoned = ids;
    poisoned[at] = kPoisoned;
    request.ids = poisoned;
    return message_of(model_.program, *backend_, nullptr, request);
  };
  const std::string name(backend_->name());
  EXPECT_EQ(refused(20 + 3), "the logits after token 10 of window 1 are not finite on " + name + "; both count from 0");
  EXPECT_EQ(refused(40 + 17), "the logits after token 17 of window 2 are not finite on " + name + "; both count from 0");
  EXPECT_EQ(refused(59), "");
}

}  // namespace
}  // namespace beryl
