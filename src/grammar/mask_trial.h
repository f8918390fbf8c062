// Whether masks of a grammar are made in a time that can be waited for, found out by making some.
//
// Where a text can be read in many ways at once (".?.?.?.?", anyOf of thirty patterns alike), the library follows all of them through
// each token of the vocabulary: minutes for a mask, which nothing can interrupt, and no text of a grammar says so by its
// size. So a grammar is tried first with a few thousand of the tokens: random replies, some hundred masks. What they take is
// measured in processor time of this thread, as a multiple of what a plain expression takes here, so neither a busy
// machine nor a slow build changes what is let in: what people write is below 6, ".{1,280}" at 13, what has masks of a second
// and more (262,144 tokens) above 35; the limit is 28. Large forms (128 tools, thousands of values) take as long and are none of these:
// theirs is the time of a place in the grammar, once, whatever the number of tokens: a vocabulary of bytes alone takes it as well. It does not count.
#pragma once

#ifdef BERYL_HAS_XGRAMMAR
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <xgrammar/xgrammar.h>

namespace beryl {

class MaskTrial {
 public:
  // texts: of all ids, as the library is told them. kept: ids that grammars name.
  MaskTrial(const std::vector<std::string>& texts, const std::vector<int32_t>& kept, const std::vector<int32_t>& stop_ids);
  // Stops where it knows. Throws what the library throws.
  bool is_quick(const xgrammar::Grammar& grammar) const;

 private:
  struct Time {
    double longest = 0, sum = 0;   // seconds of a step, and of all
  };
  Time time_of(const xgrammar::Grammar& grammar, double most_longest, double most_sum) const;

  std::vector<int32_t> stop_ids_;
  std::vector<std::string> texts_;                        // of the tokens that are tried
  std::optional<xgrammar::TokenizerInfo> info_, bytes_;   // of those, and of bytes alone
  size_t n_ids_;
  double most_longest_ = 0, most_sum_ = 0;
};

}  // namespace beryl
#endif
