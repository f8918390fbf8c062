// What: words are cut as the references cut them, and the work grows linearly with the text.
// How:  expected pieces written by hand from the patterns' definitions, with the characters on which engines disagree;
//       PCRE2's steps are counted at n and 2n for texts that make patterns backtrack.
#include "text/pretokenize.h"

#include <gtest/gtest.h>

#include "text/test_support.h"

namespace beryl {
namespace {

using Pieces = std::vector<std::string>;

Pieces split(const Pretokenizer& pretokenizer, std::string_view text) {
  std::vector<std::string_view> views;
  pretokenizer.split(text, views);
  return Pieces(views.begin(), views.end());
}

const Pretokenizer& llama3() {
  static const Pretokenizer pretokenizer({{std::string(llama3_pattern())}});
  return pretokenizer;
}
const Pretokenizer& gpt2() {
  static const Pretokenizer pretokenizer({{std::string(gpt2_pattern())}});
  return pretokenizer;
}
const Pretokenizer& smollm() {
  static const Pretokenizer pretokenizer({{std::string(one_digit_pattern())}, {std::string(gpt2_pattern())}});
  return pretokenizer;
}

TEST(Pretokenizer, CutsWordsAsTheirModelsDo) {
  EXPECT_EQ(split(llama3(), "Hello world"), (Pieces{"Hello", " world"}));
  EXPECT_EQ(split(llama3(), "12345 a1"), (Pieces{"123", "45", " a", "1"}));
  EXPECT_EQ(split(llama3(), "he'LL don't"), (Pieces{"he", "'LL", " don", "'t"}));
  EXPECT_EQ(split(llama3(), "a   b"), (Pieces{"a", "  ", " b"}));
  EXPECT_EQ(split(llama3(), "a \n\n  b"), (Pieces{"a", " \n\n", " ", " b"}));
  EXPECT_EQ(split(llama3(), "x!?\n\ny"), (Pieces{"x", "!?\n\n", "y"}));
  EXPECT_EQ(split(gpt2(), "he'LL don't"), (Pieces{"he", "'", "LL", " don", "'t"}));
  EXPECT_EQ(split(gpt2(), "12345 a1"), (Pieces{"12345", " a", "1"}));
  EXPECT_EQ(split(gpt2(), "a\n\nb"), (Pieces{"a", "\n", "\n", "b"}));
  EXPECT_EQ(split(smollm(), "v12 3"), (Pieces{"v", "1", "2", " ", "3"}));
  EXPECT_EQ(split(llama3(), ""), Pieces{});
  EXPECT_EQ(split(llama3(), "   "), Pieces{"   "});
}

TEST(Pretokenizer, WhiteSpaceIsUnicodesAndNotPcres) {
  // White_Space: U+0085, U+00A0, U+2003, U+3000. Not: U+180E, U+001C, U+200B, U+FEFF.
  for (const char* space : {"\xC2\x85", "\xC2\xA0", "\xE2\x80\x83", "\xE3\x80\x80", "\xE2\x80\xA8"})
    EXPECT_EQ(split(gpt2(), std::string("a") + space + "b"), (Pieces{"a", space, "b"})) << space;
  for (const char* other : {"\xE1\xA0\x8E", "\x1C", "\xE2\x80\x8B", "\xEF\xBB\xBF"}) {
    EXPECT_EQ(split(gpt2(), std::string("a ") + other + "b"), (Pieces{"a", std::string(" ") + other, "b"})) << other;
    EXPECT_EQ(split(llama3(), std::string("a") + other + "b"), (Pieces{"a", other + std::string("b")})) << other;
  }
}

TEST(Pretokenizer, LettersMarksAndNumbersAreUnicodes) {
  EXPECT_EQ(split(gpt2(), "e\xCC\x81n"), (Pieces{"e", "\xCC\x81", "n"}));     // a combining mark is no letter
  EXPECT_EQ(split(gpt2(), "x\xC2\xB2y"), (Pieces{"x", "\xC2\xB2", "y"}));     // superscript two is a number
  EXPECT_EQ(split(gpt2(), "\xF0\x9D\x90\x80z"), (Pieces{"\xF0\x9D\x90\x80z"}));  // U+1D400, a letter beyond 16 bits
  EXPECT_EQ(split(smollm(), "\xD9\xA1\xD9\xA2"), (Pieces{"\xD9\xA1", "\xD9\xA2"}));  // Arabic digits, one by one
  EXPECT_EQ(split(llama3(), "\xE4\xBD\xA0\xE5\xA5\xBD\xEF\xBC\x8C"),
            (Pieces{"\xE4\xBD\xA0\xE5\xA5\xBD", "\xEF\xBC\x8C"}));
}

TEST(Pretokenizer, PiecesJoinToTheText) {
  std::string text;
  for (int i = 0; i < 400; ++i) text += std::string(1, static_cast<char>((i * 37) % 127 + 1)) + " é\n";
  for (const Pretokenizer* pretokenizer : {&llama3(), &gpt2(), &smollm()}) {
    std::string joined;
    for (const std::string& piece : split(*pretokenizer, text)) {
      ASSERT_NE(piece, "");
      joined += piece;
    }
    EXPECT_EQ(joined, text);
  }
}

TEST(Pretokenizer, BehavioursOfTokenizerJson) {
  const auto dashes = [](SplitBehavior behavior, bool invert = false) {
    return split(Pretokenizer({{"-", behavior, invert}}), "ab--c-");
  };
  EXPECT_EQ(dashes(SplitBehavior::kIsolated), (Pieces{"ab", "-", "-", "c", "-"}));
  EXPECT_EQ(dashes(SplitBehavior::kRemoved), (Pieces{"ab", "c"}));
  EXPECT_EQ(dashes(SplitBehavior::kRemoved, true), (Pieces{"-", "-", "-"}));
  EXPECT_EQ(dashes(SplitBehavior::kMergedWithPrevious), (Pieces{"ab-", "-", "c-"}));
  EXPECT_EQ(dashes(SplitBehavior::kMergedWithNext), (Pieces{"ab", "-", "-c", "-"}));
  EXPECT_EQ(split(Pretokenizer({{"x*"}}), "axxé"), (Pieces{"a", "xx", "é"}));   // empty matches end nothing
}

TEST(Pretokenizer, WorkGrowsLinearly) {
  struct Named {
    const char* name;
    std::vector<SplitStep> steps;
  };
  const Named patterns[] = {{"llama3", {{std::string(llama3_pattern())}}},
                            {"gpt2", {{std::string(gpt2_pattern())}}},
                            {"smollm", {{std::string(one_digit_pattern())}, {std::string(gpt2_pattern())}}}};
  const char* units[] = {"\n", " ", "a", "1", "!", " \n", "a ", "\xC2\xA0", "'", "é "};
  for (const Named& pattern : patterns) {
    const Pretokenizer counting(pattern.steps, /*count_steps=*/true);
    for (const char* unit : units) {
      const auto steps = [&](size_t n) {
        std::string text;
        for (size_t i = 0; i < n; ++i) text += unit;
        text += "x";   // so that a run is followed by something
        std::vector<std::string_view> pieces;
        uint64_t count = 0;
        counting.split(text, pieces, &count);
        return count;
      };
      const uint64_t once = steps(2000), twice = steps(4000);
      EXPECT_GT(once, 0u);
      EXPECT_LE(twice, once * 21 / 10) << pattern.name << ", runs of " << testing::PrintToString(unit);
      EXPECT_LE(twice, 4000u * 60) << pattern.name << ", runs of " << testing::PrintToString(unit);
    }
  }
}

TEST(Pretokenizer, AMillionOfTheSameCharacterIsFine) {
  for (const Pretokenizer* pretokenizer : {&llama3(), &gpt2(), &smollm()}) {
    for (const char c : {'\n', ' ', 'a', '7', '!'}) {
      const std::string text(1 << 20, c);
      size_t total = 0;
      for (const std::string& piece : split(*pretokenizer, text)) total += piece.size();
      EXPECT_EQ(total, text.size());
    }
  }
}

TEST(Pretokenizer, APatternThatExplodesIsAnError) {
  const Pretokenizer pretokenizer({{"(a+)+b"}});
  ErrorCode code = ErrorCode::kIo;
  const std::string message = test::error_of([&] { split(pretokenizer, std::string(4000, 'a') + "cb"); }, &code);
  EXPECT_NE(message.find("limit"), std::string::npos) << message;
  EXPECT_EQ(code, ErrorCode::kBadInput);
}

// Each attempt ends in reasonable time; all of them together take minutes to hours. The first two need many steps, the
// others read far in few.
TEST(Pretokenizer, WorkOverAllPlacesIsLimited) {
  const std::pair<const char*, size_t> cases[] = {{"(a|aa)+$|zzz", 93'000},
                                                  {"a*a*[bc]", 93'000},
                                                  {R"((?:\p{L}+\d|\p{L})*)", 93'000},
                                                  {R"(\p{L}+\d|\p{L})", 250'000}};
  for (const auto& [pattern, n_letters] : cases) {
    const Pretokenizer pretokenizer({{pattern}});
    ErrorCode code = ErrorCode::kIo;
    const std::string message =
        test::error_of([&] { split(pretokenizer, std::string(n_letters, 'a') + "-b"); }, &code);
    EXPECT_NE(message.find("passes its limit"), std::string::npos) << pattern << ": " << message;
    EXPECT_EQ(code, ErrorCode::kBadInput) << pattern;
  }
}

TEST(Pretokenizer, MatchesAreFoundWhereverTheSearchIsInterrupted) {
  // Far between matches, with characters of two bytes at even and odd places.
  for (size_t n = 120; n < 140; ++n) {
    for (const char* lead : {"", "-"}) {
      std::string gap = lead;
      for (size_t i = 0; i < n; ++i) gap += "é";
      EXPECT_EQ(split(Pretokenizer({{"x+"}}), gap + "xx" + gap + gap + "x" + gap),
                (Pieces{gap, "xx", gap + gap, "x", gap}));
      EXPECT_EQ(split(Pretokenizer({{"$"}}), gap + gap), Pieces{gap + gap});
    }
  }
  // More steps than an attempt has at first, where it matches and where it does not.
  std::string ab150, ab300;
  for (int i = 0; i < 300; ++i) (i < 150 ? ab150 : ab300) += "ab";
  ab300 += ab300;
  EXPECT_EQ(split(Pretokenizer({{"(?:a|b)+c"}}), ab150 + "d" + ab300 + "c!"), (Pieces{ab150 + "d", ab300 + "c", "!"}));
}

TEST(Pretokenizer, UnknownSyntaxIsRefusedByName) {
  for (const auto& [pattern, part] : std::vector<std::pair<std::string, std::string>>{{R"(\w+)", "\\w"},
                                                                                      {R"(\h)", "\\h"},
                                                                                      {R"([\S])", "\\S"},
                                                                                      {R"([a[b]])", "class"},
                                                                                      {R"([a&&b])", "intersection"},
                                                                                      {R"((a)", "PCRE2"},
                                                                                      {"(*COMMIT)a", "verb"},
                                                                                      {"a\\", "backslash"}}) {
    ErrorCode code = ErrorCode::kIo;
    const std::string message = test::error_of([&] { Pretokenizer({{pattern}}); }, &code);
    EXPECT_EQ(code, ErrorCode::kUnsupported) << pattern;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  const std::string message = test::error_of([] { Pretokenizer({{std::string(300, 'a') + "\n("}}); });
  EXPECT_NE(message.find("'" + std::string(80, 'a') + "...'"), std::string::npos) << message;
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace
}  // namespace beryl
