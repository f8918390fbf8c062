// A reply's ids as content, reasoning and tool calls. Every byte that the model produced ends up in one of the three.
//
// Thoughts and calls are opened and closed by tokens of the vocabulary, never by text that spells them: Gemma 4's
// <|channel> and <|tool_call>, <think> and <tool_call> of models that have these as tokens. A model without a token for calls
// writes them as text (ToolSyntax), and only where nothing but white space or another call stands before. A call that can
// not be read is content.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/text_stream.h"
#include "text/tokenizer.h"

namespace beryl {

struct ParsedCall {
  std::string name;
  std::string arguments;    // a JSON object, as text
};

struct ReplyDelta {
  std::string content;
  std::string reasoning;
  std::vector<ParsedCall> calls;
  bool empty() const { return content.empty() && reasoning.empty() && calls.empty(); }
};

// The tokens that open and close a thought; both or none.
struct ThoughtTokens {
  std::optional<int32_t> begin, end;
};
ThoughtTokens find_thought_tokens(const Tokenizer& tokenizer);

class ReplyParser {
 public:
  // in_thought: the prompt has opened a thought. finds_calls: false: there are no tools, so what looks like a call is content.
  // tool_names: an object without a tag is a call of one of these, else content; none: of any.
  ReplyParser(const Tokenizer& tokenizer, bool in_thought, bool finds_calls, std::vector<std::string> tool_names = {});

  // Appends what this id, or the end of the reply, decides. Content is held back while it may be the beginning of a call.
  void push(int32_t id, ReplyDelta& delta);
  void finish(ReplyDelta& delta);
  bool in_thought() const { return state_ == State::kThought; }

 private:
  enum class State : uint8_t { kContent, kThought, kCall };
  void add(const std::string& text, ReplyDelta& delta);
  void add_content(const std::string& text, ReplyDelta& delta);
  std::vector<ParsedCall> parse_call(std::string_view text) const;
  void end_call(bool closed, ReplyDelta& delta);
  void decide_text_call(bool at_end, ReplyDelta& delta);

  const Tokenizer& tokenizer_;
  TextStream stream_, named_stream_;          // without and with the names of special tokens
  ThoughtTokens thought_;
  std::optional<int32_t> call_begin_, call_end_;
  std::string call_begin_text_, call_end_text_;
  std::vector<std::string> tool_names_;
  bool gemma_calls_ = false;                  // call:NAME{...}; else JSON
  bool text_calls_ = false;                   // by text, for want of tokens
  bool undecided_ = false;                    // text_calls_: all content so far was white space or calls
  State state_ = State::kContent;
  bool names_thought_ = false;                // the thought's first line is its channel's name
  std::string held_;                          // of the thought's name, or of content that may be a call
  std::string call_;                          // its text so far
};

// What keys in Gemma 4's grammar can not hold, which stand there without quotes.
inline constexpr std::string_view kNotInGemmaKeys = ":,{}[]<>|'\" \t\r\n";

// One call in Gemma 4's grammar: call:NAME{key:value,...}, also with strings in other quotes or none where these can mean one thing only;
// or one or several as JSON: {"name": ..., "arguments": {...}}. Empty: it can not be read.
std::vector<ParsedCall> parse_gemma_call(std::string_view text);
std::vector<ParsedCall> parse_json_calls(std::string_view text);

}  // namespace beryl
