// What: ids equal the references' on 58 texts and five real vocabularies, from GGUF files and from tokenizer.json; any
//       bytes go in; text comes back; user text never becomes a control token; malformed vocabularies are refused.
// How:  tests/golden/tokenizer_cases.json and tokenizer_edges.json (ids from the reference implementations). The
//       vocabularies are real files, found by environment variables or under $BERYL_HOME; tests skip without them.
#include "text/tokenizer.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <random>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "text/test_support.h"
#include "text/utf8.h"

namespace beryl {
namespace {

using test::error_of;
using test::MemoryCheckpoint;
using Ids = std::vector<int32_t>;

const std::vector<std::string> kNames = {"gemma4", "gemma3", "llama3", "smollm2", "gpt2"};

const Tokenizer* gguf_tokenizer(const std::string& name) {
  const test::RealModel* model = test::real_model(name);
  return model == nullptr ? nullptr : model->tokenizer.get();
}

std::filesystem::path json_folder(const std::string& name) {
  return std::filesystem::path(BERYL_BINARY_DIR) / "test-data/tokenizers" / name;
}

const Tokenizer* json_tokenizer(const std::string& name) {
  static std::map<std::string, std::unique_ptr<Tokenizer>> loaded;
  if (!loaded.contains(name)) {
    MemoryCheckpoint checkpoint;
    checkpoint.container_ = Container::kHuggingFace;
    checkpoint.path_ = json_folder(name).string();
    loaded[name] = load_tokenizer(checkpoint);
  }
  return loaded[name].get();
}

#define LOAD_OR_SKIP(variable, name)                                                                              \
  const Tokenizer* variable = gguf_tokenizer(name);                                                               \
  if (variable == nullptr)                                                                                        \
  GTEST_SKIP() << "no vocabulary of " << (name) << ": " << test::vocabulary_file(name) << " does not exist"

std::string from_hex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return bytes;
}

std::string random_bytes(std::mt19937& random, size_t length) {
  // Half ASCII, then two- to four-byte characters, then bytes that fit nowhere.
  std::string text;
  while (text.size() < length) {
    switch (random() % 10) {
      case 0: append_character(text, 0x80 + random() % 0x700); break;
      case 1: append_character(text, 0x3000 + random() % 0x7000); break;
      case 2: append_character(text, 0x10000 + random() % 0x10000); break;
      case 3: text += static_cast<char>(random() % 256); break;
      case 4: text += " \n\t\r"[random() % 4]; break;
      default: text += static_cast<char>(' ' + random() % 95);
    }
  }
  return text;
}

// The one recorded value that is not this engine's rule. Some converters give seven control tokens of Gemma 4 the type
// "user-defined", and the reference behind the record then finds them even in text that is not to be parsed. A user's
// "<|channel>" must stay text, as it does in the other reference; these ids are that one's (merges only).
const Ids kGemma4ControlTextIsText = {236820, 46757, 1798, 236909, 887,    236813, 2364,   107,    2202,   236820, 887,
                                      111038, 107,   236820, 236909, 12027, 236813, 45518,  107,    236820, 12027,
                                      236909, 1798,  153857, 236909, 1798,  236909, 3304,   111038};

void check_all_cases(const Tokenizer& tokenizer, const std::string& name) {
  const auto golden = test::read_golden("tokenizer_cases.json");
  int n_checked = 0, n_plain = 0;
  for (const auto& c : golden["cases"]) {
    const std::string text = c.contains("hex") ? from_hex(c["hex"]) : c["text"].get<std::string>();
    const Ids expected = c[name].get<Ids>();
    EXPECT_EQ(tokenizer.encode(text, true), expected) << name << ", case " << c["name"];
    Ids plain = c.contains(name + "_plain") ? c[name + "_plain"].get<Ids>() : expected;
    if (name == "gemma4" && c["name"] == "special_gemma4") plain = kGemma4ControlTextIsText;
    EXPECT_EQ(tokenizer.encode(text, false), plain) << name << "_plain, case " << c["name"];
    ++n_checked;
    if (c.contains(name + "_plain")) ++n_plain;
  }
  EXPECT_EQ(n_checked, 58);
  EXPECT_EQ(n_plain > 0, name != "gpt2");
}

class RealVocabulary : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Names, RealVocabulary, testing::ValuesIn(kNames), [](const auto& info) { return info.param; });

TEST_P(RealVocabulary, IdsEqualTheReferencesFromGguf) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  check_all_cases(*tokenizer, GetParam());
}

TEST_P(RealVocabulary, IdsEqualTheReferencesFromTokenizerJson) {
  if (!std::filesystem::exists(json_folder(GetParam()) / "tokenizer.json"))
    GTEST_SKIP() << "no " << json_folder(GetParam()) << "/tokenizer.json; tests/oracle/make_tokenizer_json.py makes it";
  check_all_cases(*json_tokenizer(GetParam()), GetParam());
}

TEST_P(RealVocabulary, BothFilesGiveTheSameTokenizer) {
  LOAD_OR_SKIP(gguf, GetParam());
  if (!std::filesystem::exists(json_folder(GetParam()) / "tokenizer.json"))
    GTEST_SKIP() << "no " << json_folder(GetParam()) << "/tokenizer.json; tests/oracle/make_tokenizer_json.py makes it";
  const Tokenizer* json = json_tokenizer(GetParam());
  ASSERT_EQ(gguf->vocab_size(), json->vocab_size());
  EXPECT_EQ(gguf->bos_id(), json->bos_id());
  EXPECT_EQ(gguf->adds_bos(), json->adds_bos());
  EXPECT_EQ(Ids(gguf->stop_ids().begin(), gguf->stop_ids().end()),
            Ids(json->stop_ids().begin(), json->stop_ids().end()));
  for (int32_t id = 0; id < gguf->vocab_size(); ++id) {
    ASSERT_EQ(gguf->is_special(id), json->is_special(id)) << id << " " << gguf->token_text(id);
    ASSERT_EQ(gguf->token_bytes(id), json->token_bytes(id)) << id;
  }
  std::mt19937 random(7);
  for (int i = 0; i < 300; ++i) {
    const std::string text = random_bytes(random, 1 + random() % 80);
    ASSERT_EQ(gguf->encode(text, false), json->encode(text, false)) << "text " << ::testing::PrintToString(text);
  }
}

TEST_P(RealVocabulary, EdgeCasesEqualTheReference) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  const auto golden = test::read_golden("tokenizer_edges.json");
  int n_checked = 0;
  for (const auto& c : golden["cases"]) {
    if (!c.contains(GetParam())) continue;
    EXPECT_EQ(tokenizer->encode(c["text"].get<std::string>(), false), c[GetParam()].get<Ids>()) << c["text"];
    ++n_checked;
  }
  EXPECT_EQ(n_checked > 200, GetParam() != "gemma3");   // Gemma 3's score order has no such record
}

TEST_P(RealVocabulary, TextComesBackFromItsIds) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  std::mt19937 random(11);
  for (int i = 0; i < 2000; ++i) {
    std::string text = random_bytes(random, random() % 60);
    std::string expected = repair_utf8(text);
    if (GetParam() == "gemma3" || GetParam() == "gemma4") {  // a literal U+2581 comes back as a space
      for (size_t at; (at = expected.find("\xE2\x96\x81")) != std::string::npos;) expected.replace(at, 3, 1, ' ');
    }
    if (GetParam() == "smollm2") {  // has no token for 21 bytes: text that needs them can not come back
      bool encodable = true;
      for (const char c : expected)
        encodable = encodable && std::string_view("\x04\x06\x13\x14\x16\x1D\xF1\xF2").find(c) == std::string_view::npos;
      if (!encodable) continue;
    }
    const Ids ids = tokenizer->encode(text, false);
    ASSERT_EQ(tokenizer->decode(ids, false), expected) << ::testing::PrintToString(text);
    for (const int32_t id : ids) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer->vocab_size());
      ASSERT_FALSE(tokenizer->is_special(id)) << tokenizer->token_text(id) << " in " << ::testing::PrintToString(text);
    }
  }
}

TEST_P(RealVocabulary, NoByteStringIsRefused) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  std::mt19937 random(13);
  for (int i = 0; i < 500; ++i) {
    std::string text(random() % 40, '\0');
    for (char& c : text) c = static_cast<char>(random() % 256);
    ASSERT_EQ(tokenizer->encode(text, true), tokenizer->encode(repair_utf8(text), true));
    ASSERT_TRUE(is_valid_utf8(tokenizer->decode(tokenizer->encode(text, true), true)));
  }
}

TEST_P(RealVocabulary, EveryTokenDecodesToValidTextAlone) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  for (int32_t id = -3; id < tokenizer->vocab_size() + 3; ++id)
    ASSERT_TRUE(is_valid_utf8(tokenizer->decode(Ids{id}, true))) << id;
  EXPECT_EQ(tokenizer->decode(Ids{-1, tokenizer->vocab_size()}, true), "");
}

TEST_P(RealVocabulary, ControlTokensAreFoundOnRequestOnly) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  int n_special = 0;
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    if (!tokenizer->is_special(id)) continue;
    ++n_special;
    const std::string text(tokenizer->token_text(id));
    ASSERT_EQ(tokenizer->encode(text, true), Ids{id}) << text;
    const std::string between = fmt::format("a{}b", text);
    const Ids plain = tokenizer->encode(between, false);
    for (const int32_t part : plain) ASSERT_FALSE(tokenizer->is_special(part)) << text;
    ASSERT_EQ(tokenizer->decode(plain, false), between);
    ASSERT_EQ(tokenizer->decode(Ids{id}, false), "");
    ASSERT_EQ(tokenizer->decode(Ids{id}, true), text);
  }
  EXPECT_GE(n_special, 1);
}

TEST_P(RealVocabulary, ManyThreadsGetTheSameIds) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  const std::string text = "Größe 価格 $5, it's 12345 <|im_end|>\n\n  done";
  const Ids expected = tokenizer->encode(text, true);
  std::vector<std::thread> threads;
  std::atomic<int> n_wrong = 0;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i)
        if (tokenizer->encode(text, true) != expected) ++n_wrong;
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(n_wrong, 0);
}

TEST_P(RealVocabulary, EndlessRunsAreTokenised) {
  LOAD_OR_SKIP(tokenizer, GetParam());
  for (const char c : {'\n', ' ', 'a', '7', '<'}) {
    const std::string text(1 << 20, c);
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text, true), true), text) << "2^20 of " << static_cast<int>(c);
  }
}

Ids stops(const Tokenizer& tokenizer) { return {tokenizer.stop_ids().begin(), tokenizer.stop_ids().end()}; }

TEST(Tokenizer, EndsOfTextComeFromTheVocabulary) {
  const std::map<std::string, Ids> expected = {{"gemma4", {1, 50, 106}},
                                               {"gemma3", {1, 106}},
                                               {"llama3", {128001, 128009}},   // Llama 3.0 has no <|eom_id|>
                                               {"smollm2", {0, 2}},
                                               {"gpt2", {50256}}};
  int n_loaded = 0;
  for (const auto& [name, ids] : expected) {
    const Tokenizer* tokenizer = gguf_tokenizer(name);
    if (tokenizer == nullptr) continue;
    ++n_loaded;
    EXPECT_EQ(stops(*tokenizer), ids) << name;
    for (const int32_t id : ids) EXPECT_TRUE(tokenizer->is_stop(id));
    EXPECT_FALSE(tokenizer->is_stop(100));
  }
  if (n_loaded == 0) GTEST_SKIP() << "no vocabularies under " << test::beryl_home();
}

TEST(Tokenizer, BosByDefault) {
  const std::map<std::string, std::pair<int32_t, bool>> expected = {
      {"gemma4", {2, true}}, {"gemma3", {2, true}}, {"llama3", {128000, true}}, {"smollm2", {1, false}},
      {"gpt2", {50256, false}}};
  int n_loaded = 0;
  for (const auto& [name, bos] : expected) {
    const Tokenizer* tokenizer = gguf_tokenizer(name);
    if (tokenizer == nullptr) continue;
    ++n_loaded;
    EXPECT_EQ(tokenizer->bos_id(), bos.first) << name;
    EXPECT_EQ(tokenizer->adds_bos(), bos.second) << name;
    EXPECT_TRUE(tokenizer->warnings().empty()) << name << ": " << fmt::format("{}", tokenizer->warnings());
  }
  if (n_loaded == 0) GTEST_SKIP() << "no vocabularies under " << test::beryl_home();
}

// --- small vocabularies, made here -----------------------------------------------------------------------------------

// A byte-level vocabulary: all bytes, some merges, two control tokens.
MemoryCheckpoint byte_level_checkpoint() {
  MemoryCheckpoint checkpoint;
  std::vector<std::string> tokens;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    tokens.emplace_back();
    append_character(tokens.back(), byte_to_character(static_cast<uint8_t>(byte)));
  }
  for (const char* token : {"ab", "abc", "Ġa", "<s>", "<|im_end|>"}) tokens.emplace_back(token);
  std::vector<int64_t> types(tokens.size(), 1);
  types[259] = types[260] = 3;
  auto& values = checkpoint.metadata_.values;
  values["tokenizer.ggml.model"] = std::string("gpt2");
  values["tokenizer.ggml.pre"] = std::string("gpt-2");
  values["tokenizer.ggml.tokens"] = tokens;
  values["tokenizer.ggml.token_type"] = types;
  values["tokenizer.ggml.merges"] = std::vector<std::string>{"a b", "ab c", "Ġ a"};
  values["tokenizer.ggml.bos_token_id"] = int64_t{259};
  values["tokenizer.ggml.eos_token_id"] = int64_t{260};
  return checkpoint;
}

// A SentencePiece vocabulary: byte tokens, some letters, scores.
MemoryCheckpoint sentencepiece_checkpoint() {
  MemoryCheckpoint checkpoint;
  std::vector<std::string> tokens = {"<pad>", "<eos>", "<bos>", "<unk>"};
  std::vector<int64_t> types = {3, 3, 3, 2};
  std::vector<float> scores = {0, 0, 0, 0};
  const auto add = [&](const std::string& token, int64_t type, float score) {
    tokens.push_back(token);
    types.push_back(type);
    scores.push_back(score);
  };
  for (int byte = 0; byte < 256; ++byte) add(fmt::format("<0x{:02X}>", byte), 6, 0);
  add("a", 1, -10);     // 260
  add("b", 1, -11);     // 261
  add("ab", 1, -1);     // 262
  add("ba", 1, -2);     // 263
  add("\xE2\x96\x81", 1, -12);   // 264
  add("  ", 4, 0);      // 265: two real spaces
  add("<b>", 4, 0);     // 266
  auto& values = checkpoint.metadata_.values;
  values["tokenizer.ggml.model"] = std::string("llama");
  values["tokenizer.ggml.tokens"] = tokens;
  values["tokenizer.ggml.token_type"] = types;
  values["tokenizer.ggml.scores"] = scores;
  values["tokenizer.ggml.add_space_prefix"] = false;
  values["tokenizer.ggml.bos_token_id"] = int64_t{2};
  values["tokenizer.ggml.eos_token_id"] = int64_t{1};
  values["tokenizer.ggml.unknown_token_id"] = int64_t{3};
  return checkpoint;
}

TEST(Tokenizer, MergesByRankInWords) {
  const auto tokenizer = load_tokenizer(byte_level_checkpoint());
  EXPECT_EQ(tokenizer->encode("abc ab", false), (Ids{257, ' ', 256}));   // "a b" ranks before "Ġ a"
  EXPECT_EQ(tokenizer->encode("abc ac", false), (Ids{257, 258, 'c'}));
  EXPECT_EQ(tokenizer->encode("a<s>b", false), (Ids{'a', '<', 's', '>', 'b'}));
  EXPECT_EQ(tokenizer->encode("a<s>b", true), (Ids{'a', 259, 'b'}));
}

TEST(Tokenizer, MergesByScoreAndFallsBackToBytes) {
  const auto tokenizer = load_tokenizer(sentencepiece_checkpoint());
  EXPECT_EQ(tokenizer->encode("abab", false), (Ids{262, 262}));
  EXPECT_EQ(tokenizer->encode("bab", false), (Ids{261, 262}));              // ab scores above ba
  EXPECT_EQ(tokenizer->encode("aba", false), (Ids{262, 260}));
  EXPECT_EQ(tokenizer->encode("   a", false), (Ids{265, 264, 260}));        // the run first, then the single space
  EXPECT_EQ(tokenizer->encode("a<b>a", false), (Ids{260, 266, 260}));       // user-defined: always
  EXPECT_EQ(tokenizer->encode("\xC3\xA9", false), (Ids{4 + 0xC3, 4 + 0xA9}));
  EXPECT_EQ(tokenizer->encode("<0x41>", true), (Ids{4 + '<', 4 + '0', 4 + 'x', 4 + '4', 4 + '1', 4 + '>'}));
  EXPECT_EQ(tokenizer->encode("<eos>", true), (Ids{1}));
  EXPECT_EQ(tokenizer->decode(Ids{2, 265, 260, 4 + 0xC3, 4 + 0xA9, 266, 1}, false), "  a\xC3\xA9<b>");
  EXPECT_EQ(tokenizer->decode(Ids{2, 260, 4 + 0xC3}, true), "<bos>a\xEF\xBF\xBD");
}

TEST(Tokenizer, MergesCrossNewlinesWhereATokenDoes) {
  MemoryCheckpoint checkpoint = sentencepiece_checkpoint();
  const auto add = [&](const std::string& token, float score) {
    auto& values = checkpoint.metadata_.values;
    std::get<std::vector<std::string>>(values["tokenizer.ggml.tokens"]).push_back(token);
    std::get<std::vector<int64_t>>(values["tokenizer.ggml.token_type"]).push_back(1);
    std::get<std::vector<float>>(values["tokenizer.ggml.scores"]).push_back(score);
  };
  add("\n", -5);     // 267
  add("\n\n", -3);   // 268
  EXPECT_EQ(load_tokenizer(checkpoint)->encode("ab\n\n\nab\n", false), (Ids{262, 268, 267, 262, 267}));
  EXPECT_EQ(load_tokenizer(checkpoint)->encode("\n\nab", false), (Ids{268, 262}));
  add("b\na", -0.5f);   // 269, unreachable by merging pairs, ...
  add("\na", -0.75f);   // 270, ... reachable
  EXPECT_EQ(load_tokenizer(checkpoint)->encode("ab\nab", false), (Ids{260, 269, 261}));
}

TEST(Tokenizer, MissingPretokenizerKeyWarnsAndNamesTheAssumption) {
  MemoryCheckpoint checkpoint = byte_level_checkpoint();
  EXPECT_TRUE(load_tokenizer(checkpoint)->warnings().empty());
  checkpoint.metadata_.values.erase("tokenizer.ggml.pre");
  const auto tokenizer = load_tokenizer(checkpoint);
  ASSERT_EQ(tokenizer->warnings().size(), 1u);
  EXPECT_NE(tokenizer->warnings()[0].find("tokenizer.ggml.pre is missing"), std::string::npos);
  EXPECT_NE(tokenizer->warnings()[0].find("gpt-2"), std::string::npos);
}

TEST(Tokenizer, WithoutABosKeyGemmasIsFoundByName) {
  MemoryCheckpoint checkpoint = sentencepiece_checkpoint();
  EXPECT_TRUE(load_tokenizer(checkpoint)->warnings().empty());
  checkpoint.metadata_.values.erase("tokenizer.ggml.bos_token_id");
  const auto tokenizer = load_tokenizer(checkpoint);
  EXPECT_EQ(tokenizer->bos_id(), 2);
  EXPECT_TRUE(tokenizer->adds_bos());
  ASSERT_EQ(tokenizer->warnings().size(), 1u);
  EXPECT_NE(tokenizer->warnings()[0].find("tokenizer.ggml.bos_token_id is missing; the token '<bos>' (2)"),
            std::string::npos);
  std::get<std::vector<std::string>>(checkpoint.metadata_.values["tokenizer.ggml.tokens"])[2] = "<start>";
  const auto nameless = load_tokenizer(checkpoint);
  EXPECT_EQ(nameless->bos_id(), std::nullopt);
  ASSERT_EQ(nameless->warnings().size(), 1u);
  EXPECT_NE(nameless->warnings()[0].find("without a BOS"), std::string::npos);
}

TEST(Tokenizer, UnknownPretokenizerIsRefusedWithTheKnownOnes) {
  MemoryCheckpoint checkpoint = byte_level_checkpoint();
  checkpoint.metadata_.values["tokenizer.ggml.pre"] = std::string("tekken");
  ErrorCode code = ErrorCode::kIo;
  const std::string message = error_of([&] { load_tokenizer(checkpoint); }, &code);
  EXPECT_EQ(code, ErrorCode::kUnsupported);
  for (const char* part : {"tekken", "llama-bpe", "smollm", "gpt-2", "memory.gguf"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Tokenizer, ACheckpointWithoutAVocabularyHasNone) {
  MemoryCheckpoint checkpoint;
  EXPECT_EQ(load_tokenizer(checkpoint), nullptr);
  checkpoint.metadata_.values["tokenizer.ggml.model"] = std::string("none");
  EXPECT_EQ(load_tokenizer(checkpoint), nullptr);
  checkpoint.container_ = Container::kHuggingFace;
  checkpoint.path_ = BERYL_SOURCE_DIR "/tests/golden";
  EXPECT_EQ(load_tokenizer(checkpoint), nullptr);
}

TEST(Tokenizer, MalformedVocabulariesAreOneLineErrors) {
  struct Fault {
    const char* what;
    bool sentencepiece;
    std::function<void(std::map<std::string, test::MetadataValue, std::less<>>&)> make;
    const char* message_part;
  };
  const auto tokens = [](auto& values) -> std::vector<std::string>& {
    return std::get<std::vector<std::string>>(values["tokenizer.ggml.tokens"]);
  };
  const Fault faults[] = {
      {"byte token -1", true, [&](auto& v) { tokens(v)[10] = "<0x-1>"; }, "<0x-1>"},
      {"byte token out of range", true, [&](auto& v) { tokens(v)[10] = "<0x100>"; }, "<0x100>"},
      {"byte token of one digit", true, [&](auto& v) { tokens(v)[10] = "<0xA>"; }, "<0xA>"},
      {"fewer scores", true, [](auto& v) { std::get<std::vector<float>>(v["tokenizer.ggml.scores"]).pop_back(); },
       "scores"},
      {"no scores", true, [](auto& v) { v.erase("tokenizer.ggml.scores"); }, "scores"},
      {"a score that is no number", true,
       [](auto& v) { std::get<std::vector<float>>(v["tokenizer.ggml.scores"])[261] = NAN; }, "261"},
      {"fewer types", true, [](auto& v) { std::get<std::vector<int64_t>>(v["tokenizer.ggml.token_type"]).pop_back(); },
       "token_type"},
      {"type 0", true, [](auto& v) { std::get<std::vector<int64_t>>(v["tokenizer.ggml.token_type"])[5] = 0; },
       "token_type[5]"},
      {"type 7", true, [](auto& v) { std::get<std::vector<int64_t>>(v["tokenizer.ggml.token_type"])[5] = 7; },
       "token_type[5]"},
      {"no tokens", true, [](auto& v) { v.erase("tokenizer.ggml.tokens"); }, "tokenizer.ggml.tokens"},
      {"empty tokens", false, [&](auto& v) { tokens(v).clear(); }, "tokenizer.ggml.tokens"},
      {"bos beyond the end", true, [](auto& v) { v["tokenizer.ggml.bos_token_id"] = int64_t{1000}; },
       "bos_token_id is 1000"},
      {"bos below 0", true, [](auto& v) { v["tokenizer.ggml.bos_token_id"] = int64_t{-1}; }, "bos_token_id is -1"},
      {"eot of 2^40", false, [](auto& v) { v["tokenizer.ggml.eot_token_id"] = int64_t{1} << 40; }, "eot_token_id"},
      {"a merge of one part", false,
       [](auto& v) { v["tokenizer.ggml.merges"] = std::vector<std::string>{"a b", "ab"}; }, "merges[1]"},
      {"a merge with an empty part", false,
       [](auto& v) { v["tokenizer.ggml.merges"] = std::vector<std::string>{"a "}; }, "merges[0]"},
      {"an empty merge", false, [](auto& v) { v["tokenizer.ggml.merges"] = std::vector<std::string>{""}; },
       "merges[0]"},
      {"a merge of no token", false, [](auto& v) { v["tokenizer.ggml.merges"] = std::vector<std::string>{"a zz"}; },
       "'zz'"},
      {"a merge to no token", false, [](auto& v) { v["tokenizer.ggml.merges"] = std::vector<std::string>{"a a"}; },
       "'aa'"},
      {"no merges", false, [](auto& v) { v.erase("tokenizer.ggml.merges"); }, "merges"},
      {"a space in front of everything", true, [](auto& v) { v["tokenizer.ggml.add_space_prefix"] = true; },
       "add_space_prefix"},
      {"another kind", true, [](auto& v) { v["tokenizer.ggml.model"] = std::string("rwkv"); }, "rwkv"},
      {"tokens of another type", true, [](auto& v) { v["tokenizer.ggml.tokens"] = std::string("x"); },
       "tokenizer.ggml.tokens"},
  };
  for (const Fault& fault : faults) {
    MemoryCheckpoint checkpoint = fault.sentencepiece ? sentencepiece_checkpoint() : byte_level_checkpoint();
    fault.make(checkpoint.metadata_.values);
    const std::string message = error_of([&] { load_tokenizer(checkpoint); });
    EXPECT_NE(message, "") << fault.what << " was accepted";
    EXPECT_NE(message.find(fault.message_part), std::string::npos) << fault.what << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << fault.what;
  }
}

// --- tokenizer.json, small ones --------------------------------------------------------------------------------------

// A folder that exists for one test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "beryl-tokenizer-XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }
  void write(const std::string& name, const std::string& text) const { std::ofstream(path_ / name) << text; }
  std::unique_ptr<Tokenizer> load() const {
    MemoryCheckpoint checkpoint;
    checkpoint.container_ = Container::kHuggingFace;
    checkpoint.path_ = path_.string();
    return load_tokenizer(checkpoint);
  }

 private:
  std::filesystem::path path_;
};

// Character BPE in Gemma's structure.
nlohmann::ordered_json small_gemma_json() {
  return nlohmann::ordered_json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 0, "content": "<pad>", "special": true}, {"id": 1, "content": "<eos>", "special": true},
                     {"id": 2, "content": "<bos>", "special": true}, {"id": 9, "content": "<b>", "special": false}],
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
    "post_processor": null,
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                                                 {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "fuse_unk": true, "byte_fallback": true,
              "vocab": {"<pad>": 0, "<eos>": 1, "<bos>": 2, "a": 3, "b": 4, "\u2581": 5, "ab": 6, "\u2581ab": 7,
                        "<0xC3>": 8, "<b>": 9, "<0xA9>": 11},
              "merges": [["a", "b"], "\u2581 ab"]}})");
}

TEST(TokenizerJson, ReadsBothFormsOfMerges) {
  TemporaryFolder folder;
  folder.write("tokenizer.json", small_gemma_json().dump());
  folder.write("generation_config.json", R"({"eos_token_id": [1, 0]})");
  const auto tokenizer = folder.load();
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->encode("ab ab<b>a", false), (Ids{6, 7, 9, 3}));
  EXPECT_EQ(tokenizer->encode("\xC3\xA9<eos>", true), (Ids{8, 11, 1}));
  EXPECT_EQ(tokenizer->decode(Ids{7, 8, 11}, false), " ab\xC3\xA9");
  EXPECT_EQ(tokenizer->vocab_size(), 12);              // id 10 is a hole: no token
  EXPECT_EQ(tokenizer->token_text(10), "");
  EXPECT_EQ(tokenizer->bos_id(), 2);
  EXPECT_TRUE(tokenizer->adds_bos());
  EXPECT_EQ(stops(*tokenizer), (Ids{0, 1}));
}

TEST(TokenizerJson, WhatIsNotKnownIsRefusedByName) {
  struct Fault {
    const char* pointer;       // what to change ...
    const char* value;         // ... to this JSON
    const char* message_part;
    ErrorCode code;
  };
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported, kBadInput = ErrorCode::kBadInput;
  const Fault faults[] = {
      {"/model/type", R"("Unigram")", "Unigram", kUnsupported},
      {"/model/type", R"("WordPiece")", "WordPiece", kUnsupported},
      {"/model/continuing_subword_prefix", R"("##")", "continuing_subword_prefix", kUnsupported},
      {"/model/dropout", "0.1", "dropout", kUnsupported},
      {"/normalizer", R"({"type": "NFC"})", "NFC", kUnsupported},
      {"/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}]})", "Prepend",
       kUnsupported},
      {"/normalizer", R"({"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"})", "Replace", kUnsupported},
      {"/pre_tokenizer", R"({"type": "Metaspace"})", "Metaspace", kUnsupported},
      {"/pre_tokenizer", R"({"type": "Digits", "individual_digits": true})", "ByteLevel", kUnsupported},
      {"/pre_tokenizer", R"({"type": "ByteLevel", "add_prefix_space": true})", "add_prefix_space", kUnsupported},
      {"/pre_tokenizer", R"({"type": "ByteLevel", "add_prefix_space": false})", "normalizer", kUnsupported},
      {"/pre_tokenizer", R"({"type": "Split", "pattern": {"String": "x"}, "behavior": "Contiguous"})", "Contiguous",
       kUnsupported},
      {"/decoder", R"({"type": "WordPiece"})", "WordPiece", kUnsupported},
      {"/decoder", R"({"type": "Replace", "pattern": {"String": "_"}, "content": " "})", "Replace", kUnsupported},
      {"/post_processor", R"({"type": "BertProcessing"})", "BertProcessing", kUnsupported},
      {"/added_tokens/0/lstrip", "true", "lstrip", kUnsupported},
      {"/added_tokens/0/id", "-1", "'<pad>'", kBadInput},
      {"/added_tokens/0/id", "99999999999", "'<pad>'", kBadInput},
      {"/added_tokens/0/id", "3", "share the id 3", kBadInput},
      {"/added_tokens/0/content", "7", "content", kBadInput},
      {"/added_tokens", "{}", "added_tokens", kBadInput},
      {"/model/vocab/a", "4", "share the id 4", kBadInput},
      {"/model/vocab/a", "-4", "'a'", kBadInput},
      {"/model/vocab/a", "1000000000000", "'a'", kBadInput},
      {"/model/vocab/a", "1.5", "'a'", kBadInput},
      {"/model/vocab/a", R"("x")", "'a'", kBadInput},
      {"/model/vocab/a", "[1]", "'a'", kBadInput},
      {"/model/vocab/<0xC3>", R"(null)", "<0xC3>", kBadInput},
      {"/model/vocab", R"({"<0xGG>": 3, "a": 0, "b": 1, "\u2581": 2, "ab": 4, "\u2581ab": 5})", "<0xGG>", kBadInput},
      {"/model/vocab", "[]", "vocab", kBadInput},
      {"/model/vocab/a", "1063", "'a' has the id 1063, expected 0 to 1054 for 15 tokens", kBadInput},
      {"/model/vocab/a", "16777215", "'a' has the id 16777215", kBadInput},
      {"/added_tokens/0/id", "16777215", "'<pad>' has the id 16777215", kBadInput},
      {"/model/merges/0", R"(["a"])", "merges[0]", kBadInput},
      {"/model/merges/0", "[]", "merges[0]", kBadInput},
      {"/model/merges/0", R"(["", "a"])", "merges[0]", kBadInput},
      {"/model/merges/0", R"(["a", ""])", "merges[0]", kBadInput},
      {"/model/merges/1", "[]", "merges[1]", kBadInput},
      {"/model/merges/1", R"(["a", "b", "c"])", "merges[1]", kBadInput},
      {"/model/merges/0", R"(["a", "b", "c"])", "merges[0]", kBadInput},
      {"/model/merges/0", R"(["a", 1])", "merges", kBadInput},
      {"/model/merges/0", R"(["a", ["b"]])", "merges", kBadInput},
      {"/model/merges/0", "7", "merges", kBadInput},
      {"/model/merges/0", R"({"a": "b"})", "merges", kBadInput},
      {"/model/merges/1", R"("ab")", "merges[1]", kBadInput},
      {"/model/merges/1", R"("ab ")", "merges[1]", kBadInput},
      {"/model/merges/1", R"("ab zz")", "'zz'", kBadInput},
      {"/model/merges", "{}", "merges", kBadInput},
      {"/model", "[]", "model", kBadInput},
      {"/model/byte_fallback", "3", "byte_fallback", kBadInput},
  };
  for (const Fault& fault : faults) {
    auto json = small_gemma_json();
    // added_tokens overlap with these, so that vocab alone decides
    if (std::string(fault.pointer) == "/model/vocab") json["added_tokens"] = nullptr;
    json[nlohmann::ordered_json::json_pointer(fault.pointer)] = nlohmann::ordered_json::parse(fault.value);
    TemporaryFolder folder;
    folder.write("tokenizer.json", json.dump());
    ErrorCode code = ErrorCode::kIo;
    const std::string message = error_of([&] { folder.load(); }, &code);
    EXPECT_NE(message.find(fault.message_part), std::string::npos)
        << fault.pointer << " = " << fault.value << ": " << message;
    EXPECT_EQ(code, fault.code) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(TokenizerJson, TextAfterANulIsNotIgnored) {
  TemporaryFolder folder;
  const std::string whole = small_gemma_json().dump();
  folder.write("tokenizer.json", whole + std::string("\0]", 2));
  EXPECT_NE(error_of([&] { folder.load(); }).find(fmt::format("a NUL at byte {}", whole.size())), std::string::npos);
}

TEST(TokenizerJson, AFifoIsRefusedAtOnce) {
  TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder.path() / "tokenizer.json").c_str(), 0600), 0);
  EXPECT_NE(error_of([&] { folder.load(); }).find("tokenizer.json: not a regular file"), std::string::npos);
}

TEST(TokenizerJson, ABadSplitPatternNamesTheFileAndStaysShort) {
  auto json = small_gemma_json();
  json["normalizer"] = nullptr;
  json["decoder"] = nullptr;
  json["model"]["byte_fallback"] = false;
  const auto split = nlohmann::ordered_json{{"type", "Split"},
                                            {"pattern", {{"Regex", std::string(5000, 'a') + "("}}},
                                            {"behavior", "Isolated"}};
  const auto bytes = nlohmann::ordered_json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  json["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}};
  TemporaryFolder folder;
  folder.write("tokenizer.json", json.dump());
  ErrorCode code = ErrorCode::kIo;
  const std::string message = error_of([&] { folder.load(); }, &code);
  EXPECT_TRUE(message.starts_with((folder.path() / "tokenizer.json").string() + ": pre-tokenizer pattern 'aaa"))
      << message;
  EXPECT_LT(message.size(), 400u);
  EXPECT_EQ(code, ErrorCode::kUnsupported);
}

TEST(TokenizerJson, ReplacementsThatMultiplyTextAreErrors) {
  const auto with = [](const std::string& from, const std::string& to, int times) {
    auto json = small_gemma_json();
    json["decoder"] = nullptr;
    json["pre_tokenizer"] = nullptr;
    auto list = nlohmann::ordered_json::array();
    for (int i = 0; i < times; ++i)
      list.push_back({{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}});
    json["normalizer"] = {{"type", "Sequence"}, {"normalizers", list}};
    TemporaryFolder folder;
    folder.write("tokenizer.json", json.dump());
    return folder.load();
  };
  const std::string hundred(100, 'a'), text(1000, 'a');
  for (const int times : {1, 4}) {
    const auto growing = with("a", hundred, times);
    EXPECT_NE(error_of([&] { growing->encode(text, false); }).find("longer than 17024 bytes"), std::string::npos);
  }
  EXPECT_NO_THROW(with("a", "aaaa", 2)->encode(text, false));
  // Decoding undoes them, so shrinking ones multiply there.
  const auto shrinking = with(hundred, "a", 4);
  EXPECT_NE(error_of([&] { shrinking->decode(Ids{3}, false); }).find("longer than"), std::string::npos);
  // One that deletes can not be undone; without care, looking for "" never ends.
  const auto deleting = with("b", "", 1);
  EXPECT_EQ(deleting->encode("bab", false), Ids{3});
  EXPECT_EQ(deleting->decode(Ids{3}, false), "a");
}

TEST(TokenizerJson, DamagedFilesAreErrorsNotCrashes) {
  const std::string whole = small_gemma_json().dump();
  std::mt19937 random(17);
  for (int round = 0; round < 600; ++round) {
    std::string damaged = whole;
    if (round % 3 == 0) damaged.resize(random() % damaged.size());
    for (int i = 0; i < 3 && round % 3 != 0; ++i) {
      const size_t at = random() % damaged.size();
      if (round % 3 == 1)
        damaged[at] = "{}[]\",:0a"[random() % 9];
      else
        damaged.erase(at, 1 + random() % 20);
    }
    TemporaryFolder folder;
    folder.write("tokenizer.json", damaged);
    const std::string message = error_of([&] {
      if (const auto tokenizer = folder.load()) tokenizer->encode("ab ab<b> <eos>\xFF", true);
    });
    ASSERT_EQ(message.find('\n'), std::string::npos) << message;
  }
  TemporaryFolder deep;
  deep.write("tokenizer.json", "{\"x\":" + std::string(100000, '['));
  EXPECT_NE(error_of([&] { deep.load(); }).find("nested"), std::string::npos);
}

TEST(TokenizerJson, OnlyASentencePieceModelIsRefused) {
  TemporaryFolder folder;
  EXPECT_EQ(folder.load(), nullptr);
  folder.write("tokenizer.model", "x");
  EXPECT_NE(error_of([&] { folder.load(); }).find("tokenizer.json"), std::string::npos);
}

TEST(TokenizerJson, EndsOfTextComeFromTheNeighbourFiles) {
  TemporaryFolder folder;
  folder.write("tokenizer.json", small_gemma_json().dump());
  folder.write("tokenizer_config.json", R"({"eos_token": {"content": "<eos>"}, "bos_token": "<pad>"})");
  folder.write("generation_config.json", R"({"eos_token_id": 9})");
  auto tokenizer = folder.load();
  EXPECT_EQ(tokenizer->bos_id(), 0);
  EXPECT_EQ(tokenizer->eos_id(), 1);
  EXPECT_EQ(stops(*tokenizer), (Ids{1, 9}));
  folder.write("generation_config.json", R"({"eos_token_id": 12})");
  EXPECT_NE(error_of([&] { folder.load(); }).find("12"), std::string::npos);
  folder.write("generation_config.json", "{");
  EXPECT_NE(error_of([&] { folder.load(); }).find("generation_config.json"), std::string::npos);
}

}  // namespace
}  // namespace beryl
