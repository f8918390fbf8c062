// Regular expressions as rules of a grammar: those that describe a regular language in the plain notation that
// ECMAScript, PCRE and Python share, without what looks at text around a match.
//
//   literals  .  \d \D \w \W \s \S  \n \r \t \f \v \0 \xHH \uHHHH  \ and punctuation  [a-z] [^a-z]
//   (…) (?:…) (?<name>…)  |  * + ? {m} {m,} {m,n}, each lazy too
//   ^ as the first and $ as the last character
//
// Classes mean what ECMAScript's do: \d and \w are of ASCII, . is no end of a line. The library has readers of its own
// for these, but drops an anchor in the middle, takes an unknown escape for a letter, and lets "a(xb+)?" match "ab".
//
// Counts are bounded, also those within each other: a short expression must not become a large automaton. One pass,
// linear in the text. So is a reply: with more than one repetition without an end the rule is one automaton.
#pragma once

#include <string>
#include <string_view>

namespace beryl {

enum class RegexPlace : uint8_t {
  kText,        // the characters themselves
  kJsonString,  // within the quotes of a JSON string: what has to be escaped there is escaped
};

// The right side of a rule whose texts match the expression as a whole, in a JSON string with its quotes. Throws Error(kBadInput): no regular expression;
// Error(kUnsupported): cannot be expressed, or too large. name: for the message, which gives the place as a byte
// offset.
std::string rule_of_regex(const std::string& name, std::string_view regex, RegexPlace place);

// Brackets of a grammar's text: at most 200 deep, since its reader works by recursion. Throws Error(kUnsupported).
void check_nesting(const std::string& name, std::string_view text);

}  // namespace beryl
