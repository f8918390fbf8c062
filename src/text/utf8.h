// UTF-8: decode, check, repair, and the white space that Python's str.strip() removes.
//
// "Maximal ill-formed part" is the usual Unicode practice (and Python's errors="replace"): the longest prefix of a
// well-formed sequence, or one byte where no sequence can start. Each such part counts as one bad character.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace beryl {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

struct DecodedCharacter {
  uint32_t code_point = 0;   // valid only when well_formed
  uint32_t length = 0;       // bytes: of the character, or of the maximal ill-formed part; >= 1
  bool well_formed = false;
  bool truncated = false;    // ill-formed only because the text ends inside a sequence that is right so far
};

// Requires position < text.size().
DecodedCharacter decode_character(std::string_view text, size_t position);

// Requires a scalar value: code_point <= 0x10FFFF and not a surrogate.
void append_character(std::string& text, uint32_t code_point);

bool is_valid_utf8(std::string_view text);

// The text with each maximal ill-formed part replaced by one U+FFFD.
std::string repair_utf8(std::string_view text);

// Bytes at the end that begin a character which later bytes may complete (0 to 3).
size_t incomplete_suffix(std::string_view text);

// Removes white space at both ends exactly as Python's str.strip() does (Unicode White_Space and U+001C..U+001F).
std::string_view trim(std::string_view text);

}  // namespace beryl
