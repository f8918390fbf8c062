// Text as templates handle it: Python's strings, code point by code point, each of which knows where it came from.
//
// A character is a code point whose top bit tells that it came from a conversation (a user, a tool, a model), not from
// the template. The bit travels with its character through every operation (slices, joins, replacements, formatting),
// so that no operation can forget it, and comparisons do not see it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace beryl::jinja {

using Character = char32_t;
inline constexpr Character kForeign = 0x80000000u;

constexpr Character code_point(Character c) { return c & ~kForeign; }
constexpr bool is_foreign(Character c) { return (c & kForeign) != 0; }

// std::char_traits that compares code points only.
struct CharacterTraits : std::char_traits<Character> {
  static constexpr bool eq(Character a, Character b) noexcept { return code_point(a) == code_point(b); }
  static constexpr bool lt(Character a, Character b) noexcept { return code_point(a) < code_point(b); }
  static constexpr int compare(const Character* a, const Character* b, size_t n) {
    for (size_t i = 0; i < n; ++i)
      if (!eq(a[i], b[i])) return lt(a[i], b[i]) ? -1 : 1;
    return 0;
  }
  static constexpr const Character* find(const Character* text, size_t n, const Character& wanted) {
    for (size_t i = 0; i < n; ++i)
      if (eq(text[i], wanted)) return text + i;
    return nullptr;
  }
};
using Text = std::basic_string<Character, CharacterTraits>;
using TextView = std::basic_string_view<Character, CharacterTraits>;

// Ill-formed UTF-8 becomes U+FFFD. origin: 0 or kForeign.
Text to_text(std::string_view utf8, Character origin = 0);
std::string to_utf8(TextView text);

// The characters' classes and cases as Python's str knows them.
bool is_space(Character c);
bool is_letter(Character c);
bool is_digit(Character c);  // str.isdigit: also superscripts
bool is_decimal(Character c);
bool is_number(Character c);  // str.isnumeric: also fractions
bool is_upper(Character c);
bool is_lower(Character c);
bool is_printable(Character c);  // shown as itself by repr()
Text upper(TextView text);
Text lower(TextView text);
Text title(TextView text);
Text capitalize(TextView text);
Text swap_case(TextView text);
Text case_fold(TextView text);

// The text between white space at both ends, or one of them.
TextView strip(TextView text, bool left = true, bool right = true);
TextView strip(TextView text, TextView characters, bool left = true, bool right = true);

}  // namespace beryl::jinja
