#include "engine/perplexity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "engine/stepper.h"

namespace beryl {
namespace {

// Welford's: the difference of two large sums would lose what little the values scatter.
struct RunningMean {
  int64_t n = 0;
  double mean = 0;
  double squares = 0;   // of the distances from the mean

  void add(double value) {
    const double distance = value - mean;
    mean += distance / static_cast<double>(++n);
    squares += distance * (value - mean);
  }
  double standard_error() const {
    return n < 2 ? 0 : std::sqrt(squares / static_cast<double>(n - 1) / static_cast<double>(n));
  }
};

// One row of logits as a distribution.
struct Distribution {
  std::span<const float> logits;   // [vocab]
  double log_sum = 0;              // log of the sum of exp(logit)
  size_t likeliest = 0;            // the first of equals
  double margin = 0;               // its logit less the next largest

  double log_probability(size_t id) const { return static_cast<double>(logits[id]) - log_sum; }
};

// Nothing when a logit is NaN or infinite.
std::optional<Distribution> distribution_of(std::span<const float> logits) {
  Distribution row{logits};
  if (!std::all_of(logits.begin(), logits.end(), [](float value) { return std::isfinite(value); })) return std::nullopt;
  float second = -std::numeric_limits<float>::infinity();
  for (size_t id = 1; id < logits.size(); ++id) {
    if (logits[id] > logits[row.likeliest]) {
      second = logits[row.likeliest];
      row.likeliest = id;
    } else {
      second = std::max(second, logits[id]);
    }
  }
  const double largest = logits[row.likeliest];
  row.margin = largest - static_cast<double>(second);
  double sum = 0;
  for (float logit : logits) sum += std::exp(static_cast<double>(logit) - largest);
  row.log_sum = largest + std::log(sum);
  return row;
}

// KL(p || q) = sum of p log(p / q), in nats.
double divergence(const Distribution& p, const Distribution& q) {
  double sum = 0;
  for (size_t id = 0; id < p.logits.size(); ++id) {
    const double log_p = p.log_probability(id);
    sum += std::exp(log_p) * (log_p - q.log_probability(id));
  }
  return std::max(sum, 0.0);   // it is none below, but for rounding
}

// Reads windows on one backend and adds up what it makes of them.
class Reader {
 public:
  Reader(const Program& program, const RunLimits& run, Backend& backend, int logits_slot)
      : name_(backend.name()),
        vocab_(program.rows[static_cast<size_t>(logits_slot)].cols),
        logits_slot_(logits_slot),
        stepper_(program, run, backend),
        logits_(static_cast<size_t>(run.n_outputs * vocab_)) {}

  void begin_window() { stepper_.reset(0); }

  // The window's next rows. With `scored`, row() has their logits until the next call.
  void read(std::span<const int32_t> ids, bool scored) {
    const auto begin = std::chrono::steady_clock::now();
    const SequenceRows rows{0, ids, scored ? Outputs::kAll : Outputs::kLast, nullptr};
    stepper_.run({&rows, 1});
    if (scored)
      stepper_.executor().read_rows(logits_slot_, 0, static_cast<int64_t>(ids.size()), logits_.data());
    else
      stepper_.executor().synchronize();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // Row `row` of the last read, which is row `window_row` of this window, as a distribution; counts what it says of
  // `next`.
  Distribution score(size_t row, int32_t next, int64_t window, int64_t window_row) {
    const auto vocab = static_cast<size_t>(vocab_);
    const std::optional<Distribution> distribution = distribution_of(std::span(logits_).subspan(row * vocab, vocab));
    if (!distribution)
      throw NotFinite(fmt::format("the logits after token {} of window {} are not finite on {}; both count from 0",
                                  window_row, window, name_));
    nll_.add(-distribution->log_probability(static_cast<size_t>(next)));
    return *distribution;
  }

  TextScore total() const { return {nll_.mean, nll_.standard_error(), seconds_}; }

 private:
  std::string name_;
  int64_t vocab_;
  int logits_slot_;
  Stepper stepper_;
  std::vector<float> logits_;   // [chunk_tokens][vocab]
  RunningMean nll_;
  double seconds_ = 0;
};

class Comparer {
 public:
  explicit Comparer(double margin) : margin_(margin) {}

  void add(const Distribution& first, const Distribution& other, int64_t window, int64_t window_row) {
    const double kl = divergence(other, first);
    kl_.add(kl);
    if (kl > result_.largest_kl) {
      result_.largest_kl = kl;
      result_.largest_kl_window = window;
      result_.largest_kl_row = window_row;
    }
    if (first.likeliest == other.likeliest) return;
    ++result_.n_flips;
    if (first.margin < margin_) ++result_.n_flips_below_margin;
    result_.largest_flip_margin = std::max(result_.largest_flip_margin, first.margin);
  }

  Comparison total(const TextScore& score) const {
    Comparison result = result_;
    result.score = score;
    result.mean_kl = kl_.mean;
    return result;
  }

 private:
  double margin_;
  RunningMean kl_;
  Comparison result_;
};

}  // namespace

double TextScore::perplexity() const { return std::exp(mean_nll); }

double TextScore::perplexity_error() const { return nll_error * perplexity(); }

PerplexityResult measure_perplexity(const Program& program, Backend& backend, Backend* against,
                                    const PerplexityRequest& request) {
  const int64_t window_tokens = request.window_tokens, first_scored = request.first_scored;
  BERYL_CHECK(window_tokens >= 2 && first_scored >= 0 && first_scored <= window_tokens - 2 && request.chunk_tokens > 0,
              "a window holds a prediction that counts");
  const auto n_ids = static_cast<int64_t>(request.ids.size());
  if (n_ids < window_tokens)
    throw Error(ErrorCode::kBadInput,
                fmt::format("the text is too short: it has {} tokens, at least the {} of a window are expected", n_ids,
                            window_tokens));
  // The last id is only predicted.
  const int64_t n_rows = window_tokens - 1;
  RunLimits run;
  run.context = window_tokens;
  run.chunk_tokens = static_cast<int>(std::min<int64_t>(request.chunk_tokens, n_rows));
  run.step_tokens = run.n_outputs = run.chunk_tokens;
  const int logits = logits_slot(program);
  Reader first(program, run, backend, logits);
  const std::unique_ptr<Reader> other =
      against == nullptr ? nullptr : std::make_unique<Reader>(program, run, *against, logits);
  Comparer comparer(request.margin);

  PerplexityResult result;
  result.n_windows = n_ids / window_tokens;
  result.n_read = result.n_windows * n_rows;
  result.n_scored = result.n_windows * (n_rows - first_scored);
  std::vector<int32_t> ids;
  for (int64_t window = 0; window < result.n_windows; ++window) {
    const auto window_begin = request.ids.begin() + window * window_tokens;
    ids.assign(window_begin, window_begin + window_tokens);
    if (request.bos) ids.front() = *request.bos;
    first.begin_window();
    if (other) other->begin_window();
    for (int64_t begin = 0, end = 0; begin < n_rows; begin = end) {
      // A chunk ends where counting begins: the head is the larger part of a small model, and no row before needs it.
      const bool scored = begin >= first_scored;
      end = std::min(begin + run.chunk_tokens, scored ? n_rows : first_scored);
      const auto chunk = std::span(ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      first.read(chunk, scored);
      if (other) other->read(chunk, scored);
      if (!scored) continue;
      for (int64_t row = begin; row < end; ++row) {
        const int32_t next = ids[static_cast<size_t>(row + 1)];
        const Distribution of_first = first.score(static_cast<size_t>(row - begin), next, window, row);
        if (!other) continue;
        const Distribution of_other = other->score(static_cast<size_t>(row - begin), next, window, row);
        comparer.add(of_first, of_other, window, row);
      }
    }
  }
  result.score = first.total();
  if (other) result.against = comparer.total(other->total());
  return result;
}

}  // namespace beryl
