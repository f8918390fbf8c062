#ifdef BERYL_HAS_XGRAMMAR
#include "grammar/mask_trial.h"

#include <ctime>

#include <algorithm>
#include <limits>

#include "base/rng.h"
#include "grammar/token_mask.h"

namespace beryl {
namespace {

constexpr size_t kTokens = 4096;          // that are tried, about
constexpr int kReplies = 4, kSteps = 60;  // of each
constexpr double kMostLongest = 28, kMostSum = 900;   // times the longest mask of the plain expression
constexpr double kLeastSeconds = 25e-3;   // below this no mask is slow: vocabularies of bytes
constexpr double kClear = 4;              // times the limit: that is no hiccup of the machine
constexpr double kWorthALook = 0.1, kHopeless = 40;   // times the limit, between which it is asked what of it bytes alone take
constexpr double kShareOfPlace = 0.5;     // of a mask's time: then it is the place's, not the tokens'. Of 128 tools it is 0.83 to 1.3, of forms that are refused below 0.23
constexpr const char* kPlainGrammar = "root ::= [^,]* \",\" [^,]* \",\" [^,]* \",\"";

double processor_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Characters' first tokens are their bytes: every text can be written.
std::vector<std::string> some_of(const std::vector<std::string>& texts, const std::vector<int32_t>& kept, bool only_bytes) {
  std::vector<std::string> some(texts.size());
  const size_t every = std::max<size_t>(1, texts.size() / kTokens);
  for (size_t id = 0; id < texts.size(); ++id)
    if (texts[id].size() == 1 || (!only_bytes && id % every == 0)) some[id] = texts[id];
  for (const int32_t id : kept) some[static_cast<size_t>(id)] = texts[static_cast<size_t>(id)];
  return some;
}

xgrammar::CompiledGrammar compiled_for(const xgrammar::TokenizerInfo& info, const xgrammar::Grammar& grammar) {
  return xgrammar::GrammarCompiler(info, 1, /*cache_enabled=*/false, -1, /*enable_dynamic_compilation=*/true).CompileGrammar(grammar);
}

}  // namespace

MaskTrial::MaskTrial(const std::vector<std::string>& texts, const std::vector<int32_t>& kept, const std::vector<int32_t>& stop_ids)
    : stop_ids_(stop_ids), texts_(some_of(texts, kept, false)), n_ids_(texts.size()) {
  info_.emplace(texts_, xgrammar::VocabType::RAW, static_cast<int>(n_ids_), stop_ids);
  bytes_.emplace(some_of(texts, kept, true), xgrammar::VocabType::RAW, static_cast<int>(n_ids_), stop_ids);
  const xgrammar::Grammar plain = xgrammar::Grammar::FromEBNF(kPlainGrammar);
  constexpr double kAny = std::numeric_limits<double>::infinity();
  time_of(plain, kAny, kAny);   // the first touch of memory and code
  double unit = kAny;
  for (int i = 0; i < 3; ++i) unit = std::min(unit, time_of(plain, kAny, kAny).longest);   // a busy machine has slow moments
  most_longest_ = std::max(kMostLongest * unit, kLeastSeconds);
  most_sum_ = std::max(kMostSum * unit, kLeastSeconds * kMostSum / kMostLongest);
}

bool MaskTrial::is_quick(const xgrammar::Grammar& grammar) const {
  const auto is_quick = [&](const Time& time) { return time.longest <= most_longest_ && time.sum <= most_sum_; };
  const Time time = time_of(grammar, most_longest_, most_sum_);
  if (is_quick(time) || time.longest > kClear * most_longest_) return is_quick(time);
  return is_quick(time_of(grammar, most_longest_, most_sum_));
}

MaskTrial::Time MaskTrial::time_of(const xgrammar::Grammar& grammar, double most_longest, double most_sum) const {
  Time time;
  // What is compiled at one place helps at the next ones, so bytes have what this trial has.
  const xgrammar::CompiledGrammar compiled = compiled_for(*info_, grammar);
  std::optional<xgrammar::CompiledGrammar> compiled_bytes;
  std::vector<uint32_t> mask((n_ids_ + 31) / 32), byte_mask(mask.size());
  std::vector<int32_t> allowed;
  uint64_t draw = 0;
  for (int reply = 0; reply < kReplies; ++reply) {
    xgrammar::GrammarMatcher matcher(compiled);
    std::string text;
    // What a mask at this place takes with a vocabulary of bytes alone; 0: the text is not how the place is told.
    const auto seconds_of_bytes = [&] {
      if (!compiled_bytes) compiled_bytes.emplace(compiled_for(*bytes_, grammar));
      xgrammar::GrammarMatcher follower(*compiled_bytes);
      if (!text.empty() && !follower.AcceptString(text)) return 0.0;
      const double begin = processor_seconds();
      fill_token_mask(follower, byte_mask, n_ids_);
      return processor_seconds() - begin;
    };
    for (int step = 0; step < kSteps; ++step) {
      const double begin = processor_seconds();
      fill_token_mask(matcher, mask, n_ids_);
      // A stop would end the reply.
      for (const int32_t id : stop_ids_) mask[static_cast<size_t>(id) / 32] &= ~(1u << (id % 32));
      allowed.clear();
      for (size_t word = 0; word < mask.size(); ++word)
        for (uint32_t bits = mask[word]; bits != 0; bits &= bits - 1) allowed.push_back(static_cast<int32_t>(32 * word) + __builtin_ctz(bits));
      const int32_t id = allowed.empty() ? -1 : allowed[philox(1, draw++).x[0] % allowed.size()];
      const bool goes_on = id >= 0 && matcher.AcceptToken(id);
      double seconds = processor_seconds() - begin;
      if (seconds > kWorthALook * most_longest_ && seconds < kHopeless * most_longest_) {
        if (seconds_of_bytes() > kShareOfPlace * seconds) seconds = 0;
      }
      if (goes_on) text += texts_[static_cast<size_t>(id)];
      time.longest = std::max(time.longest, seconds);
      time.sum += seconds;
      if (time.longest > most_longest || time.sum > most_sum) return time;
      if (!goes_on) break;
    }
  }
  return time;
}

}  // namespace beryl
#endif
