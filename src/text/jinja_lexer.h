// A template cut into tokens, with Jinja's treatment of white space: the newline after a block tag and the blanks
// before one at the begin of a line go (trim_blocks, lstrip_blocks), "-" takes all white space on its side, "+" keeps it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/jinja_value.h"

namespace beryl::jinja {

enum class TokenKind : uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kText,
  kNumber,
  kOperator,
  kEnd
};

struct Token {
  TokenKind kind = TokenKind::kEnd;
  int line = 1;
  std::string word;  // names and operators
  Text text;         // data and text literals
  Value number;
};

// The last token is a kEnd. Throws Error(kBadInput).
std::vector<Token> tokenize(std::string_view source);

}  // namespace beryl::jinja
