// Calls of tools in the notations that models were trained on, as schemas and grammars.
//
//   Gemma 4   <|tool_call>call:NAME{key:value,…}<tool_call|>, one or more; keys sorted and bare, strings between two
//             <|"|>, no blanks. The three marks are control tokens, and only they will do: the same letters as text do
//             not.
//   tagged    <tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>, one or more; the tags as tokens where the
//             vocabulary has such
//   bare      {"name": "NAME", "parameters": {…}}, one call
//
// A tool that is "strict" gets arguments of its schema or is refused. Other tools do where the schema can be expressed,
// else any object; that is noted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "grammar/json_schema.h"
#include "text/tokenizer.h"

namespace beryl {

// The marks of the notations that a vocabulary has as tokens: Gemma 4's first three or the two tags, or none.
struct ToolTokens {
  struct Mark {
    std::string_view text;
    int32_t id;
  };
  std::vector<Mark> marks = {};
  bool are_gemma4() const { return marks.size() == 3; }
  bool are_tags() const { return marks.size() == 2; }
};
ToolTokens find_tool_tokens(const Tokenizer& tokenizer);

// tools: OpenAI's list as JSON. name: for messages. All throw Error(kBadInput or kUnsupported).

// What the library calls a structural tag, with the marks as text.
nlohmann::ordered_json gemma4_calls_tag(const std::string& name, std::string_view tools, bool single,
                                        std::vector<SchemaPattern>& patterns, std::vector<std::string>& notes);
// The grammar that the library made of it, with the marks as tokens and without blanks between them.
std::string with_mark_tokens(const std::string& grammar, const ToolTokens& tokens);

// One call as an object with the members "name" and `arguments`.
nlohmann::ordered_json call_schema(const std::string& name, std::string_view tools, const std::string& arguments,
                                   std::vector<std::string>& notes);
// The grammar of such an object becomes that of calls between tags.
std::string tagged_calls(const std::string& call_grammar, const ToolTokens& tokens, bool single);
// Any text that no reader of replies takes for a call that is written as text: it does not begin with a tag or a brace.
std::string text_without_calls(bool tagged);

}  // namespace beryl
