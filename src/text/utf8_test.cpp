// What: decoding, repair and trimming follow Unicode's table of well-formed UTF-8 and Python's str.strip().
// How:  every scalar value round-trips; all strings of up to three bytes from the boundary bytes are compared with a
//       trivially right model (a list of what is well-formed); recorded results of Python for repair and strip.
#include "text/utf8.h"

#include <vector>

#include <gtest/gtest.h>

namespace beryl {
namespace {

std::string encode(uint32_t code_point) {
  std::string text;
  append_character(text, code_point);
  return text;
}

bool is_scalar(uint32_t c) { return c <= 0x10FFFF && !(c >= 0xD800 && c <= 0xDFFF); }

TEST(Utf8, EveryScalarValueRoundTrips) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (!is_scalar(c)) continue;
    const std::string text = encode(c);
    const DecodedCharacter decoded = decode_character(text, 0);
    ASSERT_TRUE(decoded.well_formed) << c;
    ASSERT_EQ(decoded.code_point, c);
    ASSERT_EQ(decoded.length, text.size());
    ASSERT_EQ(text.size(), c < 0x80 ? 1u : c < 0x800 ? 2u : c < 0x10000 ? 3u : 4u);
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const DecodedCharacter part = decode_character(text.substr(0, cut), 0);
      ASSERT_TRUE(!part.well_formed && part.truncated && part.length == cut) << c;
      ASSERT_EQ(incomplete_suffix("ab" + text.substr(0, cut)), cut);
    }
    ASSERT_EQ(incomplete_suffix(text), 0u);
  }
}

TEST(Utf8, RepairEqualsPythonsReplacement) {
  const std::string bad(kReplacementCharacter);
  const std::pair<std::string, std::string> cases[] = {   // bytes, bytes.decode("utf-8", "replace")
      {"", ""},
      {"ok \xE4\xBD", "ok " + bad},
      {"a\xFF" "b", "a" + bad + "b"},
      {"\xED\xA0\x80", bad + bad + bad},             // a surrogate: no part of it is a prefix of anything
      {"\xC0\xAF", bad + bad},                       // overlong
      {"\xE0\x80\xAF", bad + bad + bad},
      {"\xF0\x80\x80\xAF", bad + bad + bad + bad},
      {"\xF0\x9F\x98" "x", bad + "x"},               // three right bytes are one part
      {"\xF4\x90\x80\x80", bad + bad + bad + bad},   // beyond U+10FFFF
      {"\xF5\x80", bad + bad},
      {"\xE2\x82\xE2\x82\xAC", bad + "\xE2\x82\xAC"},
      {"\x80\xBF", bad + bad},
      {"\xC3\xC3\xA9", bad + "\xC3\xA9"},
  };
  for (const auto& [bytes, repaired] : cases) {
    EXPECT_EQ(repair_utf8(bytes), repaired) << testing::PrintToString(bytes);
    EXPECT_TRUE(is_valid_utf8(repaired));
    EXPECT_EQ(is_valid_utf8(bytes), bytes == repaired);
  }
}

// A sequence is well-formed if and only if it is the encoding of a scalar value: so the model re-encodes.
TEST(Utf8, AgreesWithEnumerationOnAllBoundaryBytes) {
  const std::vector<uint8_t> bytes = {0x00, 0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF,
                                      0xE0, 0xE1, 0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF};
  const auto model = [](const std::string& text) {   // one whole character?
    const uint8_t first = static_cast<uint8_t>(text[0]);
    const size_t length = first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    if (text.size() != length) return false;
    uint32_t c = length == 1 ? first : first & (0x7Fu >> length);
    for (size_t i = 1; i < length; ++i) c = c << 6 | (static_cast<uint8_t>(text[i]) & 0x3Fu);
    return is_scalar(c) && encode(c) == text;   // re-encoding is the proof
  };
  for (const uint8_t a : bytes)
    for (const uint8_t b : bytes)
      for (const uint8_t c : bytes)
        for (const uint8_t d : bytes)
          for (size_t length = 1; length <= 4; ++length) {
            const char all[] = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(c), static_cast<char>(d)};
            const std::string text(all, length);
            const DecodedCharacter decoded = decode_character(text, 0);
            ASSERT_EQ(decoded.well_formed && decoded.length == length, model(text)) << testing::PrintToString(text);
            ASSERT_GE(decoded.length, 1u);
            ASSERT_LE(decoded.length, length);
          }
}

TEST(Utf8, TrimEqualsPythonsStrip) {
  EXPECT_EQ(trim("  padded \n"), "padded");
  EXPECT_EQ(trim(""), "");
  EXPECT_EQ(trim(" \t\r\n\v\f"), "");
  for (const uint32_t space :
       {0x1Cu, 0x1Fu, 0x85u, 0xA0u, 0x1680u, 0x2000u, 0x200Au, 0x2028u, 0x2029u, 0x202Fu, 0x205Fu, 0x3000u})
    EXPECT_EQ(trim(encode(space) + "é x é" + encode(space) + " "), "é x é") << space;
  for (const uint32_t kept : {0x00u, 0x1Bu, 0x180Eu, 0x200Bu, 0x2060u, 0xFEFFu})
    EXPECT_EQ(trim(encode(kept) + "x" + encode(kept)), encode(kept) + "x" + encode(kept)) << kept;
  EXPECT_EQ(trim("\x85x\xA0"), "\x85x\xA0");   // lone bytes are no characters
}

}  // namespace
}  // namespace beryl
