// What: a stream's pieces are valid UTF-8 and together equal decode(ids), for any ids, cut anywhere.
// How:  a small vocabulary of all bytes, multi-byte and control tokens; random ids; every length of an emoji reply.
#include "text/text_stream.h"

#include <random>

#include <fmt/format.h>

#include "text/test_support.h"
#include "text/utf8.h"

namespace beryl {
namespace {

// Byte tokens 4 to 259 as <0xNN>, then whole characters, a broken half and a piece that ends inside a character.
std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerParts parts;
  parts.source = "test";
  for (const char* control : {"<pad>", "<eos>", "<bos>", "<|turn>"}) parts.vocabulary.add(control, TokenType::kControl);
  for (int byte = 0; byte < 256; ++byte) parts.vocabulary.add(fmt::format("<0x{:02X}>", byte), TokenType::kByte);
  for (const char* text : {"Hello", "\xE2\x96\x81world", "\xF0\x9F\x98\x80", "x\xE4\xBD", "\xA0y"})
    parts.vocabulary.add(text, TokenType::kNormal);
  parts.vocabulary.build_index();
  parts.scores.assign(parts.vocabulary.size(), 0.0f);
  parts.replacements = {{" ", "\xE2\x96\x81"}};
  return std::make_unique<Tokenizer>(std::move(parts));
}

TEST(TextStream, PiecesAreValidAndJoinToTheDecodedText) {
  const auto tokenizer = byte_tokenizer();
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const bool show_special = round % 2 == 0;
    std::vector<int32_t> ids(random() % 12);
    for (int32_t& id : ids) {
      // Mostly bytes that can start or go on a character, so that long sequences arise.
      const bool high = random() % 3 != 0;
      id = high ? 4 + 0x80 + static_cast<int32_t>(random() % 0x80)
                : static_cast<int32_t>(random() % static_cast<uint32_t>(tokenizer->vocab_size() + 2));
    }
    TextStream stream(*tokenizer, show_special);
    std::string joined;
    for (const int32_t id : ids) {
      const std::string piece = stream.push(id);
      ASSERT_TRUE(is_valid_utf8(piece));
      joined += piece;
      ASSERT_LE(stream.pending_bytes(), 3u);
    }
    const std::string rest = stream.finish();
    ASSERT_TRUE(is_valid_utf8(rest));
    ASSERT_EQ(joined + rest, tokenizer->decode(ids, show_special)) << testing::PrintToString(ids);
    ASSERT_EQ(stream.finish(), "");
  }
}

TEST(TextStream, AReplyCutAtAnyTokenIsValid) {
  const auto tokenizer = byte_tokenizer();
  const std::string reply = "😀日本語👍🏽é";
  for (size_t length = 0; length <= reply.size(); ++length) {
    TextStream stream(*tokenizer);
    std::string text;
    for (size_t i = 0; i < length; ++i) text += stream.push(4 + static_cast<uint8_t>(reply[i]));
    text += stream.finish();
    EXPECT_TRUE(is_valid_utf8(text));
    EXPECT_EQ(text, repair_utf8(reply.substr(0, length)));
  }
}

TEST(TextStream, ACharacterWaitsForItsLastByte) {
  const auto tokenizer = byte_tokenizer();
  TextStream stream(*tokenizer);
  EXPECT_EQ(stream.push(4 + 0xF0), "");
  EXPECT_EQ(stream.push(4 + 0x9F), "");
  EXPECT_EQ(stream.push(3), "");         // a hidden control token between the bytes changes nothing
  EXPECT_EQ(stream.push(4 + 0x98), "");
  EXPECT_EQ(stream.push(4 + 0x80), "😀");
  EXPECT_EQ(stream.push(4 + 0xE4), "");
  EXPECT_EQ(stream.push(260), std::string(kReplacementCharacter) + "Hello");   // E4 can no longer be completed
  EXPECT_EQ(stream.push(261), " world");
  EXPECT_EQ(stream.push(4 + 0xE4), "");
  EXPECT_EQ(stream.finish(), kReplacementCharacter);
}

}  // namespace
}  // namespace beryl
