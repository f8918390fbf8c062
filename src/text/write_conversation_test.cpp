// What: conversations as agents send them become prompts of formats that alternate; what a format takes as it is stays as it is; what
//       is refused all the same is named by the client's number.
// How:  the built-in formats, and a template that refuses as Gemma 3's does.
#include "text/write_conversation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "text/test_support.h"
#include "text/text_tools.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;
using test::error_of;

constexpr const char* kAlternating = R"({%- if messages[0]['role'] == 'system' -%}
{%- set first = messages[0]['content'] + '\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for message in rest -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate") }}{%- endif -%}
{{ '<' + message['role'] + '>' + (first if loop.first else '') + message['content'] | trim }}
{%- endfor -%})";

std::unique_ptr<Tokenizer> byte_tokenizer() {
  TokenizerParts parts;
  parts.source = parts.family = "test";
  for (int byte = 0; byte < 256; ++byte) parts.vocabulary.add(fmt::format("<0x{:02X}>", byte), TokenType::kByte);
  parts.vocabulary.build_index();
  parts.scores.assign(parts.vocabulary.size(), 0.0f);
  return std::make_unique<Tokenizer>(std::move(parts));
}

const std::vector<const char*> kConversations = {
    R"([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])",
    R"([{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, {"role": "user", "content": "a"}])",
    R"([{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "system", "content": "late"}, {"role": "user", "content": "b"}])",
    R"([{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "b"}])",
    R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "x"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "d"}])",
    R"([{"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                                                              {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "one"}, {"role": "tool", "tool_call_id": "2", "content": "two"}, {"role": "user", "content": "b"}])"};
const std::vector<const char*> kInTurns = {
    "<user>a\n\nb", "<user>s\n\nd\n\na", "<user>late\n\na<assistant>x<user>b", "<user><assistant>Hello.<user>b", "<user>ab\n\nc<assistant>x<user>d",
    "<user>a<assistant><tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>"
    "<user><tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>\n\nb"};

TEST(WriteConversation, NeighboursAreJoinedWhereTheFormatAlternates) {
  const std::unique_ptr<Tokenizer> tokenizer = byte_tokenizer();
  const std::unique_ptr<ChatWriter> alternating = make_template_writer("test", kAlternating, *tokenizer);
  const std::unique_ptr<ChatWriter> gemma3 = make_built_in_writer({ChatFamily::kGemma3}), chatml = make_built_in_writer({ChatFamily::kChatMl});
  for (size_t i = 0; i < kConversations.size(); ++i) {
    const Json messages = Json::parse(kConversations[i]);
    const ChatPrompt prompt = write_conversation(*alternating, false, messages, {});
    EXPECT_EQ(prompt.text(), kInTurns[i]);
    EXPECT_EQ(prompt.warnings.size(), 1u);
    EXPECT_NO_THROW(write_conversation(*gemma3, false, messages, {})) << i;
    // As they are where they are taken so.
    const ChatPrompt plain = write_conversation(*chatml, false, messages, {});
    EXPECT_EQ(plain.text(), chatml->write(with_tools_as_text(messages, nullptr), {}).text());
    EXPECT_TRUE(plain.warnings.empty());
  }
  const Json good = Json::parse(R"([{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}])");
  EXPECT_EQ(write_conversation(*alternating, false, good, {}).text(), "<user>s\n\na<assistant>x<user>b");
  EXPECT_TRUE(write_conversation(*alternating, false, good, {}).warnings.empty());
}

TEST(WriteConversation, WhatIsRefusedIsNamedByTheClientsNumber) {
  const std::unique_ptr<Tokenizer> tokenizer = byte_tokenizer();
  const std::string source = std::string("{% for m in messages %}{% if 'no-no' in m['content'] %}{{ raise_exception('not that') }}{% endif %}{% endfor %}") + kAlternating;
  const std::unique_ptr<ChatWriter> writer = make_template_writer("test", source, *tokenizer);
  const Json tools = Json::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])");
  ChatOptions options;
  options.tools = tools;   // a declaration goes before the messages, and results are joined
  Json messages = Json::parse(kConversations[5]);
  messages.push_back({{"role", "assistant"}, {"content", "x"}});
  messages.push_back({{"role", "user"}, {"content", "no-no"}});
  EXPECT_EQ(error_of([&] { write_conversation(*writer, false, messages, options); }), "message 6: test: line 1: not that");
  messages.push_back({{"role", "user"}, {"content", "b"}});
  EXPECT_EQ(error_of([&] { write_conversation(*writer, false, messages, options); }), "message 6: test: line 1: not that");
  messages = Json::parse(kConversations[0]);
  messages.push_back({{"role", "user"}, {"content", Json::array({{{"type", "image_url"}}})}});
  EXPECT_TRUE(error_of([&] { write_conversation(*writer, true, messages, {}); }).starts_with("message 2: it holds a part of type"));
}

}  // namespace
}  // namespace beryl
