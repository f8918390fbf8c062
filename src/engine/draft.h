// Guesses of the next ids (prompt lookup): what followed the last time the text had its last three ids. A step checks the
// guess by sampling at each of its rows as if it were true; so what comes out is what would have come without it.
//
// Guessing pays where texts repeat and costs where they do not, so it is decided anew for every step: how often guesses of
// this text came true, and what a row more costs this machine, both measured. While no guess is run the lookup still is,
// and tells whether it would have been right.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace beryl {

// What a step of some rows takes: a line through the steps so far, the older the less they count.
class StepCost {
 public:
  void add(int n_rows, double seconds);
  // In any unit: only ratios matter.
  double of(int n_rows) const;

 private:
  double weight_ = 0, rows_ = 0, seconds_ = 0, rows_rows_ = 0, rows_seconds_ = 0;   // sums
};

class Drafter {
 public:
  static constexpr size_t kKeyTokens = 3;

  // Reads a text from the beginning; ids are a prefix of those of the last call, and some more.
  void read(std::span<const int32_t> ids);
  // What may follow these ids (all that were read), at most `most`; empty: nothing is known.
  std::span<const int32_t> propose(std::span<const int32_t> ids, size_t most) const;
  // n_right of the proposal's ids came true, and the next one, if n_right < n_seen, did not.
  void learn(size_t n_right, size_t n_seen);
  // How many of n_proposed ids to check, in a step that has n_rows rows beside them, each of which yields a token: as many
  // as make tokens a second the most.
  int worthwhile(size_t n_proposed, int n_rows, const StepCost& cost) const;
  double hit_rate() const { return (hits_ + 1) / (trials_ + 2); }

 private:
  std::unordered_map<uint64_t, size_t> next_;   // hash of three ids -> where the id behind them stands, the last time
  size_t n_read_ = 0;
  double hits_ = 0, trials_ = 0;                // the older the less they count
};

}  // namespace beryl
