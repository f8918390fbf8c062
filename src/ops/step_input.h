// What changes from step to step. A backend keeps it in device memory; ops read it from there.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace beryl {

// How one output row becomes a token. Order: bias and mask, penalties, temperature, top-k, top-p, min-p, draw.
struct SampleParams {
  float temperature = 0;            // 0: the largest logit (ties: the lowest id), nothing is drawn
  int32_t top_k = 0;                // 0: all
  float top_p = 1;                  // smallest set of the most likely tokens whose probabilities sum to at least top_p
  float min_p = 0;                  // tokens below min_p times the largest probability are dropped
  float repetition_penalty = 1;     // logits of tokens in the prompt or the reply: divided if > 0, else multiplied
  float presence_penalty = 0;       // subtracted once from tokens in the reply
  float frequency_penalty = 0;      // subtracted for each occurrence in the reply
  uint64_t seed = 0;
  uint64_t draw = 0;                // counter of this draw (the row's position): the random number is philox(seed, draw)
  int32_t n_logprobs = -1;          // -1: none; n >= 0: the chosen token's log-probability and the n best, of the
                                    // unmodified logits (before bias, mask, penalties and temperature)
  std::vector<std::pair<int32_t, float>> logit_bias = {};   // (id, added value); -infinity bans
  const uint32_t* allowed = nullptr;   // bit mask [ceil(vocab / 32)], bit id%32 of word id/32 set: allowed; null: all
};

struct Sampled {
  int32_t id = -1;
  bool valid = true;                // false: the row's logits held NaN, or every token was banned; id is then -1
  float logprob = 0;                // when n_logprobs >= 0
  std::vector<std::pair<int32_t, float>> top;   // n_logprobs entries, best first (ties: the lower id)
};

struct PageCopy {
  int32_t group;
  int32_t from;
  int32_t to;
};

// Rows of one sequence are consecutive and their positions ascend by one.
struct StepInput {
  std::vector<int32_t> ids;         // [n_tokens]
  std::vector<int32_t> positions;   // [n_tokens], from 0
  std::vector<int32_t> sequences;   // [n_tokens], < StepLimits::max_sequences: which row of the page tables
  std::vector<int32_t> output_rows; // [n_outputs], indices of token rows, ascending
  std::vector<SampleParams> sampling;   // [n_outputs], or empty: Sample does nothing
  std::vector<PageCopy> page_copies;
  // [group][max_sequences · n_entries]: page of entry e of sequence s at [s · n_entries + e]; -1: none.
  // Position m of s lies on page tables[group][s · n_entries + (m / 64) % n_entries], row m % 64.
  std::vector<std::vector<int32_t>> tables;

  int64_t n_tokens() const { return static_cast<int64_t>(ids.size()); }
  int64_t n_outputs() const { return static_cast<int64_t>(output_rows.size()); }
};

}  // namespace beryl
