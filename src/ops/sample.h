// One row of logits to one token: the exact algorithm that every backend follows.
//
// 1. value v_i = logit_i + bias_i; tokens outside the mask or with bias -infinity are out.
// 2. repetition: tokens of prompt or reply: v > 0 ? v / r : v · r.  presence, frequency: v -= presence + frequency · count.
// 3. temperature 0: the largest v (ties: the lowest id). Otherwise, in this order:
//    top-k keeps the k largest (ties: lower ids first); weight w_i = exp((v_i - v_max) / temperature);
//    top-p keeps the shortest prefix of the kept ones, by (w descending, id ascending), whose sum reaches top_p · Σ w;
//    min-p drops w_i < min_p (the largest weight is 1).
// 4. u = philox(seed, draw).x[0] / 2^32; the token is the first kept id, by ascending id, whose running sum exceeds
//    u · Σ w. All sums are double and run in the order stated, so the result depends on this row alone.
// Log-probabilities are of the unmodified logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "ops/step_input.h"

namespace beryl {

// History of one sequence, one word a token: bit 31 set when the prompt holds it, the rest counts it in the reply.
inline constexpr uint32_t kInPrompt = 0x80000000u;

inline bool uses_history(const SampleParams& params) {
  return params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
}

// Buffers that are kept between rows; sized by the first use.
struct SampleScratch {
  std::vector<float> values;              // [vocab]; banned: -infinity
  std::vector<int32_t> kept;              // ids
  std::vector<int32_t> order;
};

template <class Real>
void log_probabilities(const Real* logits, int64_t vocab, const SampleParams& params, Sampled& result,
                       SampleScratch& scratch) {
  double largest = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < vocab; ++i) largest = std::max(largest, static_cast<double>(logits[i]));
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  const double log_sum = std::log(sum);
  const auto log_probability = [&](int32_t id) {   // difference first: it is exact however large the logits are
    return static_cast<float>(static_cast<double>(logits[id]) - largest - log_sum);
  };
  result.logprob = log_probability(result.id);
  const int64_t n_top = std::min<int64_t>(params.n_logprobs, vocab);
  scratch.order.resize(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < vocab; ++i) scratch.order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  std::partial_sort(scratch.order.begin(), scratch.order.begin() + n_top, scratch.order.end(),
                    [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); });
  for (int64_t i = 0; i < n_top; ++i) {
    const int32_t id = scratch.order[static_cast<size_t>(i)];
    result.top.emplace_back(id, log_probability(id));
  }
}

// The first of the largest; values hold no NaN, and at least one value.
inline int32_t index_of_largest(const std::vector<float>& values) {
  constexpr size_t kBlock = 1024, kLanes = 16;
  size_t best_block = 0;
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const size_t end = std::min(begin + kBlock, values.size());
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, values[begin]);
    size_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = lanes[lane] < values[i + lane] ? values[i + lane] : lanes[lane];
    for (; i < end; ++i) lanes[0] = lanes[0] < values[i] ? values[i] : lanes[0];
    const float block_largest = *std::max_element(lanes, lanes + kLanes);
    if (block_largest > largest) {
      largest = block_largest;
      best_block = begin;
    }
  }
  return static_cast<int32_t>(std::find(values.begin() + static_cast<std::ptrdiff_t>(best_block), values.end(), largest) -
                              values.begin());
}

// logits: [vocab]; history: [vocab] or null when no penalty needs it.
template <class Real>
Sampled sample_row(const Real* logits, int64_t vocab, const SampleParams& params, const uint32_t* history,
                   SampleScratch& scratch) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  Sampled result;
  scratch.values.resize(static_cast<size_t>(vocab));
  std::vector<float>& values = scratch.values;
  int n_invalid = 0;   // loops without an early end, which compilers vectorise
  for (int64_t i = 0; i < vocab; ++i) {
    const float value = static_cast<float>(logits[i]);
    n_invalid += value < std::numeric_limits<float>::infinity() ? 0 : 1;   // NaN too
    values[static_cast<size_t>(i)] = value;
  }
  if (n_invalid > 0) {
    result.valid = false;
    return result;
  }
  for (const auto& [id, bias] : params.logit_bias)
    if (id >= 0 && id < vocab) values[static_cast<size_t>(id)] += bias;
  if (params.allowed != nullptr)
    for (int64_t i = 0; i < vocab; ++i)
      if ((params.allowed[i / 32] >> (i % 32) & 1u) == 0) values[static_cast<size_t>(i)] = kBanned;
  if (history != nullptr && uses_history(params))
    for (int64_t i = 0; i < vocab; ++i) {
      if (history[i] == 0) continue;
      float& value = values[static_cast<size_t>(i)];
      const float count = static_cast<float>(history[i] & ~kInPrompt);
      value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
      if (count > 0) value -= params.presence_penalty + params.frequency_penalty * count;
    }

  const int32_t best = index_of_largest(values);
  const float largest = values[static_cast<size_t>(best)];
  if (largest == kBanned) {
    result.valid = false;
    return result;
  }
  result.id = best;
  if (params.temperature > 0) {
    const auto before = [&](int32_t a, int32_t b) {
      const float va = values[static_cast<size_t>(a)], vb = values[static_cast<size_t>(b)];
      return va > vb || (va == vb && a < b);
    };
    const auto weight = [&](int32_t id) {
      return std::exp((static_cast<double>(values[static_cast<size_t>(id)]) - largest) / params.temperature);
    };
    std::vector<int32_t>& kept = scratch.kept;
    kept.clear();
    for (int64_t i = 0; i < vocab; ++i)
      if (values[static_cast<size_t>(i)] != kBanned) kept.push_back(static_cast<int32_t>(i));
    if (params.top_k > 0 && params.top_k < static_cast<int64_t>(kept.size())) {
      std::nth_element(kept.begin(), kept.begin() + params.top_k, kept.end(), before);
      kept.resize(static_cast<size_t>(params.top_k));
      std::sort(kept.begin(), kept.end());
    }
    double total = 0;
    for (int32_t id : kept) total += weight(id);
    if (params.top_p < 1) {
      // A heap gives the order lazily: only the tokens of the nucleus are ever popped.
      const auto after = [&](int32_t a, int32_t b) { return before(b, a); };
      std::vector<int32_t>& heap = scratch.order;
      heap = kept;
      std::make_heap(heap.begin(), heap.end(), after);
      kept.clear();
      double running = 0;
      while (!heap.empty() && (kept.empty() || running < static_cast<double>(params.top_p) * total)) {
        std::pop_heap(heap.begin(), heap.end(), after);
        kept.push_back(heap.back());
        running += weight(heap.back());
        heap.pop_back();
      }
      std::sort(kept.begin(), kept.end());
    }
    if (params.min_p > 0) std::erase_if(kept, [&](int32_t id) { return weight(id) < params.min_p; });
    total = 0;
    for (int32_t id : kept) total += weight(id);
    const double target = static_cast<double>(philox(params.seed, params.draw).x[0]) * 0x1p-32 * total;
    double running = 0;
    result.id = kept.back();
    for (int32_t id : kept) {
      running += weight(id);
      if (running > target) {
        result.id = id;
        break;
      }
    }
  }
  if (params.n_logprobs >= 0) log_probabilities(logits, vocab, params, result, scratch);
  return result;
}

}  // namespace beryl
