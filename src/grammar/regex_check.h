// Which regular expressions are taken: those that describe a regular language in the plain notation that ECMAScript, PCRE
// and Python share, without what looks at text around a match. The library reads some of the rest in ways of its own (an
// anchor in the middle is dropped, an unknown escape is a letter), so it never gets to see it.
//
//   literals  .  \d \D \w \W \s \S  \n \r \t \f \v \0 \xHH \uHHHH  \ and punctuation  [a-z] [^a-z]
//   (…) (?:…) (?<name>…)  |  * + ? {m} {m,} {m,n}, each lazy too
//   ^ as the first and $ as the last character
//
// Counts are bounded, also those within each other: a short expression must not become a large automaton. One pass, linear in
// the text.
#pragma once

#include <string>
#include <string_view>

namespace beryl {

// The expression as the library is to get it: "." is no end of a line, as in those languages. Throws Error(kBadInput): no
// regular expression; Error(kUnsupported): cannot be expressed, or too large. name: for the message, which gives the place as
// a byte offset.
std::string checked_regex(const std::string& name, std::string_view regex);

// Brackets of a grammar's text: at most 200 deep, since its reader works by recursion.
void check_nesting(const std::string& name, std::string_view text);

}  // namespace beryl
