// Calls of tools in the notations that models were trained on, as schemas and grammars.
//
//   Gemma 4   <|tool_call>call:NAME{key:value,…}<tool_call|>, one or more; keys sorted and bare, strings between two
//             <|"|>, no blanks. The three marks are control tokens, and only they will do: the same letters as text do not.
//   Llama 3   {"name": "NAME", "parameters": {…}}, one call
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "text/tokenizer.h"

namespace beryl {

// Gemma 4's marks; -1: the vocabulary has none.
struct ToolTokens {
  struct Mark {
    std::string_view text;
    int32_t id;
  };
  std::array<Mark, 3> marks = {Mark{"<|tool_call>", -1}, Mark{"<tool_call|>", -1}, Mark{"<|\"|>", -1}};
  bool are_there() const { return marks[0].id >= 0 && marks[1].id >= 0 && marks[2].id >= 0; }
};
ToolTokens find_tool_tokens(const Tokenizer& tokenizer);

// tools: OpenAI's list as JSON. name: for messages. All throw Error(kBadInput or kUnsupported).

// What the library calls a structural tag, with the marks as text.
nlohmann::ordered_json gemma4_calls_tag(const std::string& name, std::string_view tools, std::vector<std::string>& notes);
// The grammar that the library made of it, with the marks as tokens and without blanks between them.
std::string with_mark_tokens(const std::string& grammar, const ToolTokens& tokens);

nlohmann::ordered_json llama3_call_schema(const std::string& name, std::string_view tools);

}  // namespace beryl
