#include "text/jinja_text.h"

#include <locale.h>

#include <array>
#include <clocale>
#include <cwctype>
#include <memory>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.h"
#include "text/utf8.h"

namespace beryl::jinja {

namespace {

// A Unicode class by its PCRE2 pattern: that library's tables are the ones at hand. Used beyond ASCII only.
class CharacterClass {
 public:
  explicit CharacterClass(const char* pattern) {
    int error = 0;
    PCRE2_SIZE where = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern), PCRE2_ZERO_TERMINATED,
                              PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &error, &where, nullptr));
    BERYL_CHECK(code_ != nullptr, "the pattern of a character class compiles");
  }
  bool has(Character c) const {
    const uint32_t code = code_point(c);
    if (code >= 0xD800 && code <= 0xDFFF) return false;
    std::string utf8;
    append_character(utf8, code);
    const std::unique_ptr<pcre2_match_data, FreeMatch> match(pcre2_match_data_create(1, nullptr));
    BERYL_CHECK(match != nullptr, "memory for a match");
    return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(utf8.data()), utf8.size(), 0, PCRE2_NO_UTF_CHECK,
                       match.get(), nullptr) > 0;
  }

 private:
  struct FreeCode {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  struct FreeMatch {
    void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
  };
  std::unique_ptr<pcre2_code, FreeCode> code_;
};

bool in_range(uint32_t code, uint32_t first, uint32_t last) { return code >= first && code <= last; }

// The simple case mappings of the C library, whatever the program's locale is.
locale_t unicode_locale() {
  static const locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", static_cast<locale_t>(nullptr));
  return locale;
}

Character with_origin(uint32_t code, Character of) { return code | (of & kForeign); }

Character simple_upper(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, 'a', 'z') ? with_origin(code - 32, c) : c;
  if (in_range(code, 0x10D0, 0x10FF)) {  // Georgian: the C library may know only the older letters
    if (code == 0x10FB || code == 0x10FC) return c;
    return with_origin(code - 0x10D0 + 0x1C90, c);
  }
  if (unicode_locale() == nullptr) return c;
  return with_origin(static_cast<uint32_t>(towupper_l(static_cast<wint_t>(code), unicode_locale())), c);
}

Character simple_lower(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, 'A', 'Z') ? with_origin(code + 32, c) : c;
  if (in_range(code, 0x1C90, 0x1CBF) && code != 0x1CBB && code != 0x1CBC) return with_origin(code - 0x1C90 + 0x10D0, c);
  if (unicode_locale() == nullptr) return c;
  return with_origin(static_cast<uint32_t>(towlower_l(static_cast<wint_t>(code), unicode_locale())), c);
}

// Characters whose upper case is several, after Unicode's SpecialCasing; the Greek ones with iota are left out.
std::u32string_view several_upper(uint32_t code) {
  switch (code) {
    case 0xDF: return U"SS";
    case 0x149: return U"\u02BCN";
    case 0x1F0: return U"J\u030C";
    case 0x390: return U"\u0399\u0308\u0301";
    case 0x3B0: return U"\u03A5\u0308\u0301";
    case 0x587: return U"\u0535\u0552";
    case 0x1E96: return U"H\u0331";
    case 0x1E97: return U"T\u0308";
    case 0x1E98: return U"W\u030A";
    case 0x1E99: return U"Y\u030A";
    case 0x1E9A: return U"A\u02BE";
    case 0xFB00: return U"FF";
    case 0xFB01: return U"FI";
    case 0xFB02: return U"FL";
    case 0xFB03: return U"FFI";
    case 0xFB04: return U"FFL";
    case 0xFB05:
    case 0xFB06: return U"ST";
    default: return {};
  }
}

void append_upper(Text& out, Character c, bool only_first = false) {
  const std::u32string_view several = several_upper(code_point(c));
  if (several.empty()) {
    out += simple_upper(c);
    return;
  }
  bool first = true;
  // A title's first letter: "Ss", "Ffi"; U+0149 begins with an apostrophe, its letter is the second.
  const bool lower_rest = only_first && code_point(c) != 0x149;
  for (const char32_t code : several) {
    out += lower_rest && !first ? simple_lower(with_origin(code, c)) : with_origin(code, c);
    first = false;
  }
}

bool is_cased(Character c) { return is_upper(c) || is_lower(c); }

// Marks and signs that a Greek sigma looks through when it decides whether it ends a word.
bool is_case_ignorable(Character c) {
  static const CharacterClass ignorable(
      "[\\p{Mn}\\p{Me}\\p{Cf}\\p{Lm}\\p{Sk}'.:^`\\x{B7}\\x{2018}\\x{2019}\\x{2024}\\x{2027}]");
  return ignorable.has(c);
}

void append_lower(Text& out, TextView text, size_t index) {
  const Character c = text[index];
  const uint32_t code = code_point(c);
  if (code == 0x130) {
    out += with_origin('i', c);
    out += with_origin(0x307, c);
  } else if (code == 0x3A3) {  // a sigma at the end of a word
    size_t before = index, after = index + 1;
    while (before > 0 && is_case_ignorable(text[before - 1])) --before;
    while (after < text.size() && is_case_ignorable(text[after])) ++after;
    const bool is_final = before > 0 && is_cased(text[before - 1]) && !(after < text.size() && is_cased(text[after]));
    out += with_origin(is_final ? 0x3C2 : 0x3C3, c);
  } else {
    out += simple_lower(c);
  }
}

}  // namespace

Text to_text(std::string_view utf8, Character origin) {
  Text text;
  text.reserve(utf8.size());
  for (size_t position = 0; position < utf8.size();) {
    const DecodedCharacter c = decode_character(utf8, position);
    text += (c.well_formed ? c.code_point : 0xFFFD) | origin;
    position += c.length;
  }
  return text;
}

std::string to_utf8(TextView text) {
  std::string utf8;
  utf8.reserve(text.size());
  for (const Character c : text) append_character(utf8, code_point(c));
  return utf8;
}

bool is_space(Character c) {
  const uint32_t code = code_point(c);
  return in_range(code, 0x09, 0x0D) || in_range(code, 0x1C, 0x20) || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         in_range(code, 0x2000, 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F ||
         code == 0x3000;
}

bool is_letter(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code | 0x20, 'a', 'z');
  static const CharacterClass letters("\\p{L}");
  return letters.has(c);
}

bool is_decimal(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, '0', '9');
  static const CharacterClass digits("\\p{Nd}");
  return digits.has(c);
}

bool is_digit(Character c) {
  const uint32_t code = code_point(c);
  return is_decimal(c) || code == 0xB2 || code == 0xB3 || code == 0xB9 || code == 0x2070 ||
         in_range(code, 0x2074, 0x2079) || in_range(code, 0x2080, 0x2089) || in_range(code, 0x2460, 0x2468) ||
         in_range(code, 0x2474, 0x247C) || in_range(code, 0x2488, 0x2490) || code == 0x24EA ||
         in_range(code, 0x24F5, 0x24FD) || code == 0x24FF || in_range(code, 0x2776, 0x277E) ||
         in_range(code, 0x2780, 0x2788) || in_range(code, 0x278A, 0x2792);
}

bool is_number(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, '0', '9');
  static const CharacterClass numbers("\\p{N}");
  return numbers.has(c);
}

bool is_upper(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, 'A', 'Z');
  static const CharacterClass letters("\\p{Lu}");
  return letters.has(c) || in_range(code, 0x2160, 0x216F) || in_range(code, 0x24B6, 0x24CF);
}

bool is_lower(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x80) return in_range(code, 'a', 'z');
  static const CharacterClass letters("\\p{Ll}");
  return letters.has(c) || code == 0xAA || code == 0xBA || in_range(code, 0x2170, 0x217F) ||
         in_range(code, 0x24D0, 0x24E9);
}

bool is_printable(Character c) {
  const uint32_t code = code_point(c);
  if (code < 0x7F) return code >= 0x20;
  static const CharacterClass hidden("[\\p{C}\\p{Z}]");
  return !(code >= 0xD800 && code <= 0xDFFF) && !hidden.has(c);
}

Text upper(TextView text) {
  Text out;
  out.reserve(text.size());
  for (const Character c : text) append_upper(out, c);
  return out;
}

Text lower(TextView text) {
  Text out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) append_lower(out, text, i);
  return out;
}

Text title(TextView text) {
  Text out;
  bool in_word = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_word)
      append_lower(out, text, i);
    else
      append_upper(out, text[i], true);
    in_word = is_cased(text[i]);
  }
  return out;
}

Text capitalize(TextView text) {
  Text out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i == 0)
      append_upper(out, text[i], true);
    else
      append_lower(out, text, i);
  }
  return out;
}

Text swap_case(TextView text) {
  Text out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_upper(text[i]))
      append_lower(out, text, i);
    else if (is_lower(text[i]))
      append_upper(out, text[i]);
    else
      out += text[i];
  }
  return out;
}

Text case_fold(TextView text) {
  Text out;
  for (const Character c : text) {
    const std::u32string_view several = several_upper(code_point(c));
    if (code_point(c) == 0x3C2) {
      out += with_origin(0x3C3, c);
    } else if (code_point(c) == 0x130) {
      out += with_origin('i', c);
      out += with_origin(0x307, c);
    } else if (several.empty()) {
      out += simple_lower(c);
    } else {
      for (const char32_t code : several) out += simple_lower(with_origin(code, c));
    }
  }
  return out;
}

TextView strip(TextView text, bool left, bool right) {
  while (left && !text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (right && !text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

TextView strip(TextView text, TextView characters, bool left, bool right) {
  const auto listed = [&](Character c) { return characters.find(c) != TextView::npos; };
  while (left && !text.empty() && listed(text.front())) text.remove_prefix(1);
  while (right && !text.empty() && listed(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace beryl::jinja
