// What: whatever ids a model makes, every byte of its text ends up in content, reasoning or calls, all valid UTF-8; where there
//       is a token for calls only it opens one; what can not be read is content.
// How:  vocabularies of bytes and the control tokens of Gemma 4, or none; scripted replies, and thousands of random ones.
#include "text/reply_parser.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <random>
#include <utility>

#include "text/text_tools.h"
#include "text/utf8.h"

namespace beryl {
namespace {

const std::vector<std::string> kGemma = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|\"|>", "<turn|>"};
const std::vector<std::string> kHermes = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"};

// Ids 0 to 255 are bytes, the named tokens follow.
std::unique_ptr<Tokenizer> byte_tokenizer(const std::vector<std::string>& named) {
  TokenizerParts parts;
  parts.source = "test";
  for (int byte = 0; byte < 256; ++byte) parts.vocabulary.add(fmt::format("<0x{:02X}>", byte), TokenType::kByte);
  for (const std::string& name : named) parts.vocabulary.add(name, TokenType::kControl);
  parts.vocabulary.build_index();
  parts.scores.assign(parts.vocabulary.size(), 0.0f);
  return std::make_unique<Tokenizer>(std::move(parts));
}

// Text in which control tokens are spelt and meant.
std::vector<int32_t> ids_of(const Tokenizer& tokenizer, std::string_view script) { return tokenizer.encode(script, true); }

struct Parsed {
  std::string content, reasoning;
  std::vector<ParsedCall> calls;
  std::string all;          // content and reasoning in the order in which they came
  size_t n_content_pieces = 0;
};

Parsed parse(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool finds_calls = true, bool in_thought = false) {
  ReplyParser parser(tokenizer, in_thought, finds_calls);
  Parsed parsed;
  const auto take = [&](const ReplyDelta& delta) {
    EXPECT_TRUE(is_valid_utf8(delta.content) && is_valid_utf8(delta.reasoning));
    parsed.all += delta.reasoning + delta.content;
    parsed.reasoning += delta.reasoning;
    parsed.content += delta.content;
    parsed.n_content_pieces += !delta.content.empty();
    for (const ParsedCall& call : delta.calls) {
      EXPECT_TRUE(is_valid_utf8(call.name) && is_valid_utf8(call.arguments));
      EXPECT_TRUE(nlohmann::json::parse(call.arguments).is_object());
      parsed.calls.push_back(call);
    }
  };
  for (int32_t id : ids) {
    ReplyDelta delta;
    parser.push(id, delta);
    take(delta);
  }
  ReplyDelta delta;
  parser.finish(delta);
  take(delta);
  return parsed;
}

TEST(ReplyParser, Gemma4ThinksCallsAndAnswers) {
  const auto tokenizer = byte_tokenizer(kGemma);
  const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer,
      "<|channel>thought\nIt is asked for weather.\n<channel|>Let me see."
      "<|tool_call>call:get_weather{city:<|\"|>Saint-Denis, \"93\" {}<|\"|>,days:3,units:[<|\"|>c<|\"|>,true],at:{x:1.5,y:null}}<tool_call|>"
      "<|tool_call>call:now{}<tool_call|>"));
  EXPECT_EQ(parsed.reasoning, "It is asked for weather.\n");
  EXPECT_EQ(parsed.content, "Let me see.");
  ASSERT_EQ(parsed.calls.size(), 2u);
  EXPECT_EQ(parsed.calls[0].name, "get_weather");
  EXPECT_EQ(parsed.calls[0].arguments, R"({"city":"Saint-Denis, \"93\" {}","days":3,"units":["c",true],"at":{"x":1.5,"y":null}})");
  EXPECT_EQ(parsed.calls[1].name, "now");
  EXPECT_EQ(parsed.calls[1].arguments, "{}");
}

TEST(ReplyParser, OnlyTheTokenOpensACall) {
  const auto tokenizer = byte_tokenizer(kGemma);
  for (const std::string text : {"call:Write{path:x}", "[1]", "Use <|tool_call>call:x{}<tool_call|> to call.", "<think>no</think>", "{\"name\": \"f\"}"}) {
    const std::vector<int32_t> ids = tokenizer->encode(text, false);   // spelt, not meant
    const Parsed parsed = parse(*tokenizer, ids);
    EXPECT_EQ(parsed.content, text);
    EXPECT_TRUE(parsed.calls.empty() && parsed.reasoning.empty());
    EXPECT_GT(parsed.n_content_pieces, 2u);   // and nothing is held back for it
  }
  const Parsed without = parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>call:x{}<tool_call|>"), false);
  EXPECT_EQ(without.content, "call:x{}");
}

TEST(ReplyParser, WhatCanNotBeReadIsContent) {
  const auto tokenizer = byte_tokenizer(kGemma);
  for (const std::string inner : {"", "call:", "call:x", "call:x{", "call:x{a}", "call:x{a:", "x{}", "call:x{a:1}y", "call:x{a:<|\"|>b}",
                                  "call:x{a:[1,}", "call:{}"}) {
    const Parsed closed = parse(*tokenizer, ids_of(*tokenizer, "A<|tool_call>" + inner + "<tool_call|>B"));
    EXPECT_EQ(closed.content, "A<|tool_call>" + inner + "<tool_call|>B");
    EXPECT_TRUE(closed.calls.empty());
    EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "A<|tool_call>" + inner)).content, "A<|tool_call>" + inner);
  }
  // A NUL does not end it, and no value is lost for a later one of the same name.
  for (const std::string& inner : {std::string("call:x{a:1\0b}", 13), std::string("call:x{a:1}\0b", 13), std::string("call:x{a:1,a:2}")}) {
    const std::string text = "<|tool_call>" + inner + "<tool_call|>";
    const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer, text));
    EXPECT_TRUE(parsed.content == text || (parsed.calls.size() == 1 && parsed.calls[0].arguments.find('b') != std::string::npos)) << text;
  }
  // Whatever the grammar lets a property be called.
  EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>call:x{a@b/c(d):<|\"|>v<|\"|>}<tool_call|>")).calls.at(0).arguments, R"x({"a@b/c(d)":"v"})x");
  // One that is not closed but whole is a call.
  EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>call:x{a:b c}")).calls.at(0).arguments, R"({"a":"b c"})");
  const Parsed two = parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>call:x{a:1}<|tool_call>call:y{b:<|\"|><|tool_call><|\"|>}<tool_call|>"));
  ASSERT_EQ(two.calls.size(), 2u);
  EXPECT_EQ(two.calls[0].arguments, R"({"a":1})");
  EXPECT_EQ(two.calls[1].arguments, R"({"b":"<|tool_call>"})");
  const std::string deep = "call:x{a:" + std::string(100, '[') + "1" + std::string(100, ']') + "}";
  EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>" + deep + "<tool_call|>")).content, "<|tool_call>" + deep + "<tool_call|>");
}

// Case 21: a call with faults is the call that it plainly means, or content; never one with other arguments.
TEST(ReplyParser, FaultyCallsAreReadAsMeantOrNotAtAll) {
  const auto tokenizer = byte_tokenizer(kGemma);
  const std::string q = "<|\"|>";
  const std::pair<std::string, const char*> readable[] = {
      {"{city:'Paris'}", R"({"city":"Paris"})"},
      {"{city:'at 10:30, gate: B'}", R"({"city":"at 10:30, gate: B"})"},
      {"{city:'', units:['c', 'it\'s {x}']}", R"({"city":"","units":["c","it's {x}"]})"},
      {"{'city':'a \"b\"', \"to\" : \"'c'\", " + q + "x y" + q + ":1}", R"({"city":"a \"b\"","to":"'c'","x y":1})"},
      {"{text:'first line\nsecond, line\nthird: x'}", R"({"text":"first line\nsecond, line\nthird: x"})"},
      {"{text:\"a\nb\"}", R"({"text":"a\nb"})"},
      {R"({text:"say \"a, b:c\"\n", other:'it\'s \u00e9 "x"\t'})", R"({"text":"say \"a, b:c\"\n","other":"it's é \"x\"\t"})"},
      {"{text:it's fine, name:O'Neil}", R"({"text":"it's fine","name":"O'Neil"})"},
      {"{at:10:30, on:Mon 11:00 (noon), url:http://x.org/a?b=c, path:C:\\new}",
       R"x({"at":"10:30","on":"Mon 11:00 (noon)","url":"http://x.org/a?b=c","path":"C:\\new"})x"},
      {"{\n  a-b.c: 1,\n  $d_2: true,\n  gr\u00F6\u00DFe: null\n}", R"({"a-b.c":1,"$d_2":true,"größe":null})"},
      {"{\"city\": \"Paris\", \"at\": {\"x\": [1, \"}\"]}}", R"({"city":"Paris","at":{"x":[1,"}"]}})"},
  };
  for (const auto& [inner, arguments] : readable) {
    const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer, "<|tool_call>call:f" + inner + "<tool_call|>"));
    ASSERT_EQ(parsed.calls.size(), 1u) << inner;
    EXPECT_EQ(parsed.calls[0].arguments, arguments) << inner;
    EXPECT_EQ(parsed.content, "");
  }
  for (const std::string& inner : {
           std::string("{city:first line\nsecond, line\nthird: x}"), std::string("{city:first line\nsecond}"), std::string("{city:a,line\nthird:x}"),
           std::string("{city:Paris, the gate: B}"), std::string("{it's:1}"), std::string("{a'b':1}"), std::string("{\u201Ca\u201D:1}"),
           std::string("{city:'at 10:30, gate: B}"), std::string("{city:at 10:30', gate: B}"), std::string("{city:the 'x, b: y' z}"),
           std::string("{city:'the dogs' bowl, b:1'}"), std::string("{city:'a' b}"), std::string("{city:'a'b:'c'}"), std::string("{city:'a\\'}"),
           std::string("{text:He said \"a, b:c\" twice}"), std::string("{text:\"a \"b, c:d\" e\"}"), std::string("{text:\"C:\\Users\"}"),
           std::string("{text:`a, b:c`}"), std::string("{text:\u201Ca, b:c\u201D}"), std::string("{text:\u2018a\u2019}"),
           std::string("{text:f(a, b:c)}"), std::string("{text:f [a, b:c}"), std::string("{text:f {a}}"),
           std::string("{city:Paris days:3}"), std::string("{city:Paris days : 3}"), std::string("{a:1\nb:2}"), std::string("{a:1 b:2}"),
           "{city:Paris" + q + ",b:1}", "{city:" + q + "Paris, b:" + q + "x" + q + "}", "{city:" + q + "a" + q + "b" + q + "}",
           std::string("{city:'Paris'"), std::string("{city:Paris,}"), std::string("{a:'x',a:'y'}"), std::string("{'':1}")}) {
    const std::string text = "<|tool_call>call:f" + inner + "<tool_call|>";
    const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer, text));
    EXPECT_TRUE(parsed.calls.empty()) << inner << " became " << parsed.calls.front().arguments;
    EXPECT_EQ(parsed.content, text);
  }
}

TEST(ReplyParser, ThoughtsBeginWhereThePromptEnded) {
  const auto tokenizer = byte_tokenizer(kGemma);
  const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer, "thinking on<channel|>answer"), true, true);
  EXPECT_EQ(parsed.reasoning, "thinking on");
  EXPECT_EQ(parsed.content, "answer");
  EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "<|channel>th")).reasoning, "th");
  EXPECT_EQ(parse(*tokenizer, ids_of(*tokenizer, "<|channel>though it is<channel|>x")).reasoning, "though it is");
}

TEST(ReplyParser, CallsAsJsonBetweenTokens) {
  const auto tokenizer = byte_tokenizer(kHermes);
  const Parsed parsed = parse(*tokenizer, ids_of(*tokenizer,
      "<think>\nhm\n</think>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, 2]}}\n</tool_call>\n"
      "<tool_call>{\"name\": \"g\", \"arguments\": \"{\\\"b\\\": 1}\"}</tool_call><tool_call>{\"name\": 5}</tool_call>"));
  EXPECT_EQ(parsed.reasoning, "\nhm\n");
  ASSERT_EQ(parsed.calls.size(), 2u);
  EXPECT_EQ(parsed.calls[0].arguments, R"({"a":[1,2]})");
  EXPECT_EQ(parsed.calls[1].arguments, R"({"b":1})");
  EXPECT_EQ(parsed.content, "\n\n<tool_call>{\"name\": 5}</tool_call>");
}

TEST(ReplyParser, CallsAsTextStandAlone) {
  const auto tokenizer = byte_tokenizer({});
  const auto parse_text = [&](const std::string& text) { return parse(*tokenizer, tokenizer->encode(text, false)); };
  Parsed parsed = parse_text(" \n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>[{\"name\": \"g\"}, {\"name\": \"h\"}]</tool_call>");
  ASSERT_EQ(parsed.calls.size(), 3u);
  EXPECT_EQ(parsed.calls[2].name, "h");
  EXPECT_EQ(parsed.content, "");
  parsed = parse_text("{\"name\": \"f\", \"parameters\": {\"x\": 1}}");   // Llama 3's form
  ASSERT_EQ(parsed.calls.size(), 1u);
  EXPECT_EQ(parsed.calls[0].arguments, R"({"x":1})");
  for (const std::string& text : {std::string("{\"name\": \"f\"}\0 and more", 23), std::string("{\"name\": \"f\", \"arguments\": {\"x\": 1, \"x\": 2}}")}) {
    parsed = parse_text(text);
    EXPECT_TRUE(parsed.calls.empty()) << text;
    EXPECT_EQ(parsed.content, text);
  }
  for (const std::string text : {"I would write <tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>nothing</tool_call> more", "<tool_cal", "<tool_call>",
                                 "{\"x\": 1}", "{\"name\": \"f\"} is a call", "  ", "[1]", "<"}) {
    parsed = parse_text(text);
    EXPECT_TRUE(parsed.calls.empty()) << text;
    EXPECT_EQ(parsed.content, text);
  }
  parsed = parse_text("<tool_call>{\"name\": \"f\"}</tool_call> and then this");
  EXPECT_EQ(parsed.calls.size(), 1u);
  EXPECT_EQ(parsed.content, " and then this");
}

constexpr std::string_view kYou = "\xE4\xBD\xA0";   // one character of three bytes

int count(std::string_view text, std::string_view part) {
  int n = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

// How often these bytes stand in the ids with no control token between them.
int count_of_bytes(const std::vector<int32_t>& ids, std::string_view part) {
  int n = 0;
  for (size_t at = 0; at + part.size() <= ids.size(); ++at)
    n += std::equal(part.begin(), part.end(), ids.begin() + static_cast<std::ptrdiff_t>(at),
                    [](char byte, int32_t id) { return static_cast<unsigned char>(byte) == id; });
  return n;
}

std::string ascii(const std::string& text) {
  std::string kept;
  for (char c : text)
    if (static_cast<unsigned char>(c) < 0x80) kept += c;
  return kept;
}

// A value's keys, strings and numbers without notation and escapes.
std::string plain_text(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (!value.is_structured()) return value.dump();
  std::string text;
  for (const auto& item : value.items()) text += (value.is_object() ? item.key() : "") + plain_text(item.value());
  return text;
}

// How often each ASCII letter and digit stands in a text.
std::array<int, 128> letters(const std::string& text) {
  std::array<int, 128> n{};
  for (char c : ascii(text)) n[static_cast<size_t>(c)] += std::isalnum(static_cast<unsigned char>(c)) != 0;
  return n;
}

TEST(ReplyParser, AnyIdsKeepEveryByte) {
  std::mt19937 random(5);
  int n_calls = 0, n_thoughts = 0;
  const std::vector<std::string> scraps = {"call:f{", "a:1", "}", "{\"name\":\"f\",\"arguments\":{", "}}", "thought\n", "<tool_call>", "</tool_call>",
                                           ",", std::string(kYou), "\xF0\x9F", " ", "\n"};
  for (const std::vector<std::string>& named : {kGemma, kHermes, std::vector<std::string>()}) {
    const auto tokenizer = byte_tokenizer(named);
    for (int round = 0; round < 4000; ++round) {
      std::vector<int32_t> ids;
      for (unsigned n = random() % 14; n > 0; --n) {
        const unsigned kind = random() % 4;
        if (kind == 0 && random() % 3 == 0) {
          // Something like a call; the third and fourth of the names open and close one.
          const char* const calls[] = {"call:f{a:1}", "{\"name\": \"f\"}", "call:f{", "{\"name\": \"f\""};
          if (!named.empty()) ids.push_back(256 + 2);
          for (unsigned char byte : std::string_view(calls[random() % 4])) ids.push_back(byte);
          if (!named.empty()) ids.push_back(256 + 3);
        } else if (kind == 0 && !named.empty()) {
          ids.push_back(256 + static_cast<int32_t>(random() % named.size()));
        } else if (kind == 1) {
          ids.push_back(static_cast<int32_t>(random() % 256));
        } else {
          for (unsigned char byte : scraps[random() % scraps.size()]) ids.push_back(byte);
        }
      }
      const bool finds_calls = round % 3 != 0;
      const Parsed parsed = parse(*tokenizer, ids, finds_calls, round % 5 == 0);
      n_calls += !parsed.calls.empty();
      n_thoughts += !parsed.reasoning.empty();
      // Names of control tokens may be shown or not, and so may the name of a thought.
      const auto bare = [&](std::string text) {
        for (const std::string& name : {std::string("<|channel>"), std::string("<channel|>"), std::string("<|tool_call>"), std::string("<tool_call|>"),
                                        std::string("<|\"|>"), std::string("<turn|>"), std::string("<tool_call>"), std::string("</tool_call>"),
                                        std::string("<think>"), std::string("</think>"), std::string("<|im_end|>"), std::string("thought\n"), std::string("thought")})
          for (size_t at = text.find(name); at != std::string::npos; at = text.find(name)) text.erase(at, name.size());
        return text;
      };
      EXPECT_TRUE(finds_calls || parsed.calls.empty());
      std::string in_calls;
      for (const ParsedCall& call : parsed.calls) in_calls += bare(call.name + plain_text(nlohmann::ordered_json::parse(call.arguments)));
      EXPECT_EQ(count(parsed.all + in_calls, kYou), count_of_bytes(ids, kYou)) << "round " << round;
      const std::string expected = bare(tokenizer->decode(ids, true)), got = bare(parsed.all);
      if (parsed.calls.empty()) {
        // Characters are not put together across a control token that separates what they belong to; so the order is compared of ASCII.
        EXPECT_EQ(ascii(got), ascii(expected)) << "round " << round;
      } else {
        // A call's own bytes are in its name and arguments; what else is gone are the words of the notation.
        std::array<int, 128> gone = letters(expected);
        for (const auto& found : {letters(got), letters(in_calls)})
          for (size_t c = 0; c < gone.size(); ++c) gone[c] -= found[c];
        const int n_gemma = gone['c'], n_arguments = gone['g'], n_json = static_cast<int>(parsed.calls.size()) - n_gemma;
        std::array<int, 128> words{};
        for (const auto& [word, n] : {std::pair("call", n_gemma), std::pair("name", n_json), std::pair("arguments", n_arguments)})
          for (const char* c = word; *c != '\0'; ++c) words[static_cast<size_t>(*c)] += n;
        EXPECT_EQ(gone, words) << "round " << round << ": " << expected << " became " << got << " and " << in_calls;
        EXPECT_TRUE(n_gemma >= 0 && n_json >= 0 && n_arguments >= 0) << "round " << round;
      }
    }
  }
  EXPECT_GT(n_calls, 50);
  EXPECT_GT(n_thoughts, 500);
}

TEST(TextTools, ToolsCallsAndResultsBecomeText) {
  using Json = nlohmann::ordered_json;
  const Json tools = Json::parse(R"([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}])");
  const Json messages = Json::parse(R"([
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ask."},
    {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
                                                          {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "tool_call_id": "2", "content": "two"}])");
  const Json all = with_tools_as_text(messages, tools);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_TRUE(all[0]["content"].get<std::string>().starts_with("Be brief.\n\nYou can call functions."));
  EXPECT_NE(all[0]["content"].get<std::string>().find("\"name\":\"f\""), std::string::npos);
  EXPECT_EQ(all[2]["content"], "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n</tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>");
  EXPECT_EQ(all[3]["role"], "user");
  EXPECT_EQ(all[3]["content"], "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>");
  // What is written that way is read back.
  EXPECT_EQ(parse_json_calls("\n{\"name\":\"f\",\"arguments\":{\"a\":1}}\n").at(0).arguments, "{\"a\":1}");
  // Without tools nothing changes.
  const Json plain = Json::array({messages[0], messages[1]});
  EXPECT_EQ(with_tools_as_text(plain, nullptr), plain);
  EXPECT_FALSE(writes_tools(*make_built_in_writer({ChatFamily::kGemma3})));
  EXPECT_TRUE(writes_tools(*make_built_in_writer({ChatFamily::kGemma4})));
}

}  // namespace
}  // namespace beryl
