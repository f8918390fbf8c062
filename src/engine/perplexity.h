// How well a model predicts a text, and how far two backends' predictions of it lie apart.
//
// The text is cut into windows of equally many ids, each read from an empty cache; what is left at the end is not read.
// A window's first ids have too little before them to be predicted well, so only rows from `first_scored` on count.
// With half a window there, and BOS in the place of each window's first id, this is how llama.cpp's perplexity tool
// does it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

struct PerplexityRequest {
  std::span<const int32_t> ids;          // with a BOS of its own in front where the vocabulary asks for one
  std::optional<int32_t> bos;            // takes the place of the first id of each window
  int64_t window_tokens = 512;           // at least 2
  int64_t first_scored = 256;            // row r of a window predicts id r + 1; at most window_tokens - 2
  int chunk_tokens = 64;                 // rows of a step, and so the most rows of logits held at once
  double margin = 0.1;                   // see Comparison::n_flips_below_margin
};

// What one backend made of the text.
struct TextScore {
  double mean_nll = 0;                   // of the true next id, in nats
  double nll_error = 0;                  // standard error of that mean; 0 for a single prediction
  double seconds = 0;                    // in steps, with logits copied to the host

  double perplexity() const;
  double perplexity_error() const;       // to first order
};

// The other backend's distributions p against the first one's q.
struct Comparison {
  TextScore score;                       // of the other backend
  double mean_kl = 0;                    // sum of p log(p / q), in nats
  double largest_kl = 0;
  int64_t largest_kl_window = 0;         // where: the window, and which of its rows
  int64_t largest_kl_row = 0;
  int64_t n_flips = 0;                   // the likeliest ids differ
  int64_t n_flips_below_margin = 0;      // of those, less than margin between the first backend's two largest logits
  double largest_flip_margin = 0;        // the most that they are apart in any flip
};

struct PerplexityResult {
  int64_t n_windows = 0;
  int64_t n_read = 0;                    // ids that went through the model
  int64_t n_scored = 0;                  // predictions that count
  TextScore score;
  std::optional<Comparison> against;
};

// against: null, or the backend to compare with, which reads the same chunks in turn. Throws Error(kBadInput) when the
// ids do not fill a window, and for logits that are not finite, naming where.
PerplexityResult measure_perplexity(const Program& program, Backend& backend, Backend* against,
                                    const PerplexityRequest& request);

}  // namespace beryl
