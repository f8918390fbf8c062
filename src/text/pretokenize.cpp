#include "text/pretokenize.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <time.h>

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl {

namespace {

struct FreeCode {
  void operator()(pcre2_code* code) const noexcept { pcre2_code_free(code); }
};
struct FreeMatchData {
  void operator()(pcre2_match_data* data) const noexcept { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
  void operator()(pcre2_match_context* context) const noexcept { pcre2_match_context_free(context); }
};
struct FreeJitStack {
  void operator()(pcre2_jit_stack* stack) const noexcept { pcre2_jit_stack_free(stack); }
};

std::string pcre2_message(int code) {
  PCRE2_UCHAR buffer[256];
  if (pcre2_get_error_message(code, buffer, sizeof(buffer)) < 0) return fmt::format("PCRE2 error {}", code);
  return reinterpret_cast<const char*>(buffer);
}

// Unicode White_Space as the inside of a character class.
constexpr std::string_view kWhiteSpace =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";

[[noreturn]] void refuse(std::string_view pattern, std::string_view what) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("pre-tokenizer pattern {}: {} is not supported", quote(pattern), what));
}

// The reference pattern in PCRE2's words. Only what both read alike passes; the rest is refused by name.
std::string to_pcre2(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      if (i + 1 == pattern.size()) refuse(pattern, "a final backslash");
      const char escaped = pattern[++i];
      switch (escaped) {
        case 's':
          out += in_class ? std::string(kWhiteSpace) : fmt::format("[{}]", kWhiteSpace);
          break;
        case 'S':
          if (in_class) refuse(pattern, "\\S inside a character class");
          out += fmt::format("[^{}]", kWhiteSpace);
          break;
        case 'd':
          out += "\\p{Nd}";
          break;
        case 'p': case 'P': case 'r': case 'n': case 't': case 'f':
          out += '\\';
          out += escaped;
          break;
        default:
          if (std::string_view("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789").find(escaped) !=
              std::string_view::npos)
            refuse(pattern, fmt::format("\\{}", escaped));
          out += '\\';
          out += escaped;
      }
    } else {
      if (in_class && c == '[') refuse(pattern, "a class inside a class");
      if (in_class && c == '&' && pattern.substr(i, 2) == "&&") refuse(pattern, "an intersection of classes");
      // PCRE2's verbs change how the search goes on; the references have none.
      if (!in_class && pattern.substr(i, 2) == "(*") refuse(pattern, "a verb '(*'");
      if (c == '[') in_class = true;
      if (c == ']') in_class = false;
      out += c;
    }
  }
  return out;
}

int count_callout(pcre2_callout_block*, void* counter) {
  ++*static_cast<uint64_t*>(counter);
  return 0;
}

// PCRE2 counts the steps of an attempt to match at one place, and its limit is by attempt. The built-in patterns take
// under 20 (by either engine), apart from a run of white space, where Llama 3's takes one or two a character and then
// matches the run. So attempts are free up to kFreeSteps, which bounds their sum by the text's length; one that needs
// more is repeated with more, and pays from a budget that the whole text shares.
constexpr uint64_t kFreeSteps = 256;
constexpr uint64_t kBudgetSteps = 100'000, kBudgetStepsPerByte = 64;
// Reading on through a run of one class of characters is no step, so a pattern that reads far at every place is slow
// in few steps. That takes the clock: the built-in patterns stay far below 0.1 us a byte.
constexpr uint64_t kBudgetNanoseconds = 1'000'000'000, kBudgetNanosecondsPerByte = 5'000;
constexpr size_t kStartsBetweenClocks = 256;   // places to start at that one call tries
constexpr uint64_t kMatchesBetweenClocks = 64;

// What matching one text may cost.
class WorkBudget {
 public:
  explicit WorkBudget(size_t text_bytes)
      : steps_(kBudgetSteps + kBudgetStepsPerByte * text_bytes),
        end_(now() + kBudgetNanoseconds + kBudgetNanosecondsPerByte * text_bytes) {}

  // For an attempt that came to its limit of `steps` without an end. False when that is more than is left.
  bool pay(uint64_t steps) {
    if (steps > steps_) return false;
    steps_ -= steps;
    return in_time();
  }
  bool in_time() const { return now() <= end_; }
  bool count_match() { return ++n_matches_ % kMatchesBetweenClocks != 0 || in_time(); }

 private:
  // This thread's own time, so that a busy machine changes nothing.
  static uint64_t now() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(time.tv_nsec);
  }

  uint64_t steps_;
  uint64_t end_;
  uint64_t n_matches_ = 0;
};

// The place of the next character after `at`, or the end.
size_t next_character(std::string_view text, size_t at) {
  ++at;
  while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) ++at;
  return at;
}

// One caller's working memory for matching.
struct Matcher {
  std::unique_ptr<pcre2_match_data, FreeMatchData> data;
  std::unique_ptr<pcre2_match_context, FreeMatchContext> context;
  std::unique_ptr<pcre2_jit_stack, FreeJitStack> jit_stack;   // only once the default 32 KiB did not do
};

}  // namespace

std::string_view gpt2_pattern() {
  return R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
}

std::string_view llama3_pattern() {
  return R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
         R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
}

std::string_view one_digit_pattern() { return R"(\p{N})"; }

struct Pretokenizer::Step {
  std::unique_ptr<pcre2_code, FreeCode> code;
  SplitBehavior behavior;
  bool invert;
};

Pretokenizer::Pretokenizer(const std::vector<SplitStep>& steps, bool count_steps) : count_steps_(count_steps) {
  for (const SplitStep& step : steps) {
    const std::string pattern = to_pcre2(step.pattern);
    int error = 0;
    PCRE2_SIZE offset = 0;
    const uint32_t options = PCRE2_UTF | PCRE2_UCP | PCRE2_USE_OFFSET_LIMIT | (count_steps ? PCRE2_AUTO_CALLOUT : 0u);
    pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options, &error,
                                     &offset, nullptr);
    if (code == nullptr) refuse(step.pattern, fmt::format("what PCRE2 calls '{}'", pcre2_message(error)));
    steps_.push_back(std::make_unique<Step>());
    steps_.back()->code.reset(code);
    steps_.back()->behavior = step.behavior;
    steps_.back()->invert = step.invert;
    // Without a JIT compiler (not built in, or the system forbids it) pcre2_match interprets: slower, the same result.
    if (!count_steps) pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  }
}

Pretokenizer::~Pretokenizer() = default;

void Pretokenizer::split(std::string_view text, std::vector<std::string_view>& pieces, uint64_t* steps) const {
  if (text.empty()) return;
  Matcher matcher;
  matcher.context.reset(pcre2_match_context_create(nullptr));
  if (!matcher.context) throw Error(ErrorCode::kOutOfMemory, "no memory to match a pre-tokenizer pattern");
  if (count_steps_ && steps != nullptr) pcre2_set_callout(matcher.context.get(), count_callout, steps);

  WorkBudget budget(text.size());
  // The first match of one piece from `start` on: [begin, end), or false.
  const auto find = [&](const Step& step, std::string_view subject, size_t start, size_t& begin, size_t& end) {
    const auto stopped = [&](size_t at, const std::string& why) {
      return Error(ErrorCode::kBadInput,
                   fmt::format("pre-tokenizer: matching stopped at byte {} of {}: {}", at, subject.size(), why));
    };
    const auto over_budget = [&](size_t at) { return stopped(at, "the work passes its limit for such a text"); };
    // Attempts that start at `first` ... `last`.
    const auto run = [&](size_t first, size_t last, uint64_t limit) {
      pcre2_set_match_limit(matcher.context.get(), static_cast<uint32_t>(std::min<uint64_t>(limit, 0xFFFFFFFFu)));
      pcre2_set_offset_limit(matcher.context.get(), last);
      const auto match = [&] {
        return pcre2_match(step.code.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(), first,
                           PCRE2_NO_UTF_CHECK, matcher.data.get(), matcher.context.get());
      };
      int found = match();
      if (found == PCRE2_ERROR_JIT_STACKLIMIT && !matcher.jit_stack) {
        matcher.jit_stack.reset(pcre2_jit_stack_create(64 << 10, 16 << 20, nullptr));
        pcre2_jit_stack_assign(matcher.context.get(), nullptr, matcher.jit_stack.get());
        found = match();
      }
      if (found < 0 && found != PCRE2_ERROR_NOMATCH && found != PCRE2_ERROR_MATCHLIMIT)
        throw stopped(first, pcre2_message(found));
      return found;
    };

    int found = PCRE2_ERROR_NOMATCH;
    for (size_t at = start; at <= subject.size() && found == PCRE2_ERROR_NOMATCH;) {
      const size_t last = std::min(at + kStartsBetweenClocks, subject.size());
      found = run(at, last, kFreeSteps);
      if (found == PCRE2_ERROR_MATCHLIMIT) {  // at one of these places: each by itself
        found = PCRE2_ERROR_NOMATCH;
        for (; at <= last && found == PCRE2_ERROR_NOMATCH; at = next_character(subject, at)) {
          uint64_t limit = kFreeSteps;
          while ((found = run(at, at, limit)) == PCRE2_ERROR_MATCHLIMIT) {
            if (!budget.pay(limit)) throw over_budget(at);
            limit *= 2;
          }
        }
      } else {
        at = next_character(subject, last);
      }
      if (found == PCRE2_ERROR_NOMATCH && !budget.in_time()) throw over_budget(at);
    }
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (!budget.count_match()) throw over_budget(start);
    const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(matcher.data.get());
    begin = bounds[0];
    end = bounds[1];
    return true;
  };

  std::vector<std::string_view> input = {text}, output;
  for (size_t s = 0; s < steps_.size(); ++s) {
    const Step& step = *steps_[s];
    matcher.data.reset(pcre2_match_data_create_from_pattern(step.code.get(), nullptr));
    if (!matcher.data) throw Error(ErrorCode::kOutOfMemory, "no memory to match a pre-tokenizer pattern");
    output.clear();
    for (const std::string_view subject : input) {
      size_t piece_begin = 0;   // kMergedWith...: where the piece that is being gathered began
      const auto emit = [&](size_t begin, size_t end) {
        if (end > begin) output.push_back(subject.substr(begin, end - begin));
      };
      const auto stretch = [&](size_t begin, size_t end, bool matched) {
        if (end <= begin) return;
        const bool delimiter = matched != step.invert;
        switch (step.behavior) {
          case SplitBehavior::kIsolated:
            emit(begin, end);
            break;
          case SplitBehavior::kRemoved:
            if (!delimiter) emit(begin, end);
            break;
          case SplitBehavior::kMergedWithPrevious:
            if (delimiter) {
              emit(piece_begin, end);
              piece_begin = end;
            }
            break;
          case SplitBehavior::kMergedWithNext:
            if (delimiter) {
              emit(piece_begin, begin);
              piece_begin = begin;
            }
            break;
        }
      };
      size_t done = 0, search = 0, begin = 0, end = 0;
      while (search <= subject.size() && find(step, subject, search, begin, end)) {
        stretch(done, begin, false);
        stretch(begin, end, true);
        done = end;
        search = end;
        if (end == begin) {  // an empty match: go on at the next character
          search = next_character(subject, search);
        }
      }
      stretch(done, subject.size(), false);
      if (step.behavior == SplitBehavior::kMergedWithPrevious || step.behavior == SplitBehavior::kMergedWithNext)
        emit(piece_begin, subject.size());
    }
    input.swap(output);
  }
  pieces.insert(pieces.end(), input.begin(), input.end());
}

}  // namespace beryl
