// Cutting text into words before byte-level BPE, by the regular expressions that vocabularies were trained with.
//
// PCRE2 with its JIT compiler matches them, with Unicode character classes. \s means Unicode White_Space here, as in
// the references (PCRE2's own \s differs: it has U+180E). Matching is linear in the text for the built-in patterns; a
// limit on the work for one text turns a pattern of a user's file that is not into an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace beryl {

// What happens to a match of a step's pattern, in the names of tokenizer.json.
enum class SplitBehavior {
  kIsolated,             // the match is a piece, and so is the text between matches
  kRemoved,              // the match goes, the text between matches is pieces
  kMergedWithPrevious,   // the match ends the piece before it
  kMergedWithNext,       // the match begins the piece after it
};

struct SplitStep {
  std::string pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;   // the text between matches counts as the match, and the other way round
};

// The built-in patterns.
std::string_view gpt2_pattern();      // GPT-2; also what ByteLevel with use_regex means
std::string_view llama3_pattern();
std::string_view one_digit_pattern(); // each number character by itself

class Pretokenizer {
 public:
  // Steps run one after the other, each on the pieces of the step before it (look-ahead sees only its own piece).
  // Throws Error(kUnsupported) for a pattern that PCRE2 would read differently from the reference, or rejects.
  // count_steps: split() reports PCRE2's steps; slow, for tests of complexity.
  explicit Pretokenizer(const std::vector<SplitStep>& steps, bool count_steps = false);
  ~Pretokenizer();
  Pretokenizer(const Pretokenizer&) = delete;
  Pretokenizer& operator=(const Pretokenizer&) = delete;

  // Appends the pieces of `text` to `pieces`; none is empty. Requires valid UTF-8. Throws Error(kBadInput) when
  // the work for the text passes its limit. May be called by many threads at once.
  void split(std::string_view text, std::vector<std::string_view>& pieces, uint64_t* steps = nullptr) const;

 private:
  struct Step;
  std::vector<std::unique_ptr<Step>> steps_;
  bool count_steps_ = false;
};

}  // namespace beryl
