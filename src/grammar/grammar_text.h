// Changing a grammar that the library has made, in the text that it prints and reads.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace beryl {

struct LiteralPart {
  std::string text;         // as a literal writes it, escapes and all
  std::string replacement;  // an expression: a rule's name, Token(…)
};

// In literals, but not within Regex(…) and other macros, each part gives way to its replacement: "ab" with b -> rule is
// "a" rule.
std::string with_literal_parts(const std::string& grammar, const std::vector<LiteralPart>& parts);

// Rules have another name, wherever they are named.
std::string with_rule_renamed(const std::string& grammar, std::string_view rule, std::string_view name);

}  // namespace beryl
