#include "engine/draft.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace beryl {
namespace {

constexpr double kOlderSteps = 0.98;    // some fifty steps count
constexpr double kOlderGuesses = 0.95;  // some twenty guesses count
// Until steps of different sizes were seen: a row costs this much of the smallest step.
constexpr double kAssumedRow = 0.2;

uint64_t key_of(const int32_t* ids) {
  uint64_t key = 0;
  for (size_t i = 0; i < Drafter::kKeyTokens; ++i)
    key = (key ^ static_cast<uint32_t>(ids[i])) * 0x9E3779B97F4A7C15u, key ^= key >> 29;
  return key;
}

}  // namespace

void StepCost::add(int n_rows, double seconds) {
  for (double* sum : {&weight_, &rows_, &seconds_, &rows_rows_, &rows_seconds_}) *sum *= kOlderSteps;
  const double n = n_rows;
  weight_ += 1;
  rows_ += n;
  seconds_ += seconds;
  rows_rows_ += n * n;
  rows_seconds_ += n * seconds;
}

double StepCost::of(int n_rows) const {
  const double n = n_rows;
  if (weight_ == 0 || seconds_ <= 0) return 1 + kAssumedRow * (n - 1);
  const double mean_rows = rows_ / weight_, mean_seconds = seconds_ / weight_;
  const double spread = rows_rows_ / weight_ - mean_rows * mean_rows;
  double slope = kAssumedRow * mean_seconds / (1 + kAssumedRow * (mean_rows - 1));
  if (spread > 0.01) slope = (rows_seconds_ / weight_ - mean_rows * mean_seconds) / spread;
  // More rows are never cheaper, and a row never dearer than a step of its own.
  slope = std::clamp(slope, 0.0, mean_seconds / mean_rows);
  return mean_seconds + slope * (n - mean_rows);
}

void Drafter::read(std::span<const int32_t> ids) {
  BERYL_CHECK(ids.size() >= n_read_, "a text only grows");
  for (size_t end = std::max(n_read_, kKeyTokens); end < ids.size(); ++end) next_[key_of(&ids[end - kKeyTokens])] = end;
  n_read_ = ids.size();
}

std::span<const int32_t> Drafter::propose(std::span<const int32_t> ids, size_t most) const {
  if (ids.size() < kKeyTokens) return {};
  const int32_t* const key = ids.data() + ids.size() - kKeyTokens;
  const auto found = next_.find(key_of(key));
  if (found == next_.end()) return {};
  const size_t at = found->second;
  if (!std::equal(key, key + kKeyTokens, &ids[at - kKeyTokens])) return {};
  return ids.subspan(at, std::min(most, ids.size() - at));
}

void Drafter::learn(size_t n_right, size_t n_seen) {
  for (size_t i = 0; i < std::min(n_right + 1, n_seen); ++i) {
    hits_ = hits_ * kOlderGuesses + (i < n_right ? 1 : 0);
    trials_ = trials_ * kOlderGuesses + 1;
  }
}

int Drafter::worthwhile(size_t n_proposed, int n_rows, const StepCost& cost) const {
  const double p = hit_rate();
  double tokens = n_rows, chance = 1, best = tokens / cost.of(n_rows);
  int chosen = 0;
  for (int n = 1; n <= static_cast<int>(n_proposed); ++n) {
    chance *= p;
    tokens += chance;
    const double speed = tokens / cost.of(n_rows + n);
    if (speed > best) {
      best = speed;
      chosen = n;
    }
  }
  return chosen;
}

}  // namespace beryl
