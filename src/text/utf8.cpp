// UTF-8 decoding after table 3-7 of the Unicode standard: the second byte's range depends on the first, which excludes
// overlong forms, surrogates and values beyond U+10FFFF; all later bytes are 80..BF.
#include "text/utf8.h"

namespace beryl {

namespace {

// White space for str.strip(): Unicode White_Space plus the four ASCII separators.
bool is_python_space(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

}  // namespace

DecodedCharacter decode_character(std::string_view text, size_t position) {
  const auto byte = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  const uint8_t first = byte(position);
  if (first < 0x80) return {first, 1, true, false};

  uint32_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // range of the second byte
  if (first >= 0xC2 && first <= 0xDF) {
    length = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    length = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    length = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return {0, 1, false, false};  // a continuation byte, C0, C1 or F5..FF: starts nothing
  }

  uint32_t code_point = first & (0xFFu >> (length + 1));
  for (uint32_t i = 1; i < length; ++i) {
    if (position + i >= text.size()) return {0, i, false, true};
    const uint8_t next = byte(position + i);
    if (next < low || next > high) return {0, i, false, false};
    code_point = (code_point << 6) | (next & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {code_point, length, true, false};
}

void append_character(std::string& text, uint32_t code_point) {
  const auto push = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    push(code_point);
  } else if (code_point < 0x800) {
    push(0xC0 | (code_point >> 6));
    push(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    push(0xE0 | (code_point >> 12));
    push(0x80 | ((code_point >> 6) & 0x3F));
    push(0x80 | (code_point & 0x3F));
  } else {
    push(0xF0 | (code_point >> 18));
    push(0x80 | ((code_point >> 12) & 0x3F));
    push(0x80 | ((code_point >> 6) & 0x3F));
    push(0x80 | (code_point & 0x3F));
  }
}

bool is_valid_utf8(std::string_view text) {
  for (size_t position = 0; position < text.size();) {
    if (static_cast<uint8_t>(text[position]) < 0x80) {  // most text
      ++position;
      continue;
    }
    const DecodedCharacter c = decode_character(text, position);
    if (!c.well_formed) return false;
    position += c.length;
  }
  return true;
}

std::string repair_utf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const DecodedCharacter c = decode_character(text, position);
    repaired += c.well_formed ? text.substr(position, c.length) : kReplacementCharacter;
    position += c.length;
  }
  return repaired;
}

size_t incomplete_suffix(std::string_view text) {
  // A truncated sequence is 1 to 3 bytes long. The longest candidate that decodes as truncated up to the very end wins:
  // a shorter one would start at a continuation byte, which starts nothing.
  for (size_t length = text.size() < 3 ? text.size() : 3; length > 0; --length) {
    const DecodedCharacter c = decode_character(text, text.size() - length);
    if (c.truncated && c.length == length) return length;
  }
  return 0;
}

std::string_view trim(std::string_view text) {
  size_t begin = 0;
  while (begin < text.size()) {
    const DecodedCharacter c = decode_character(text, begin);
    if (!c.well_formed || !is_python_space(c.code_point)) break;
    begin += c.length;
  }
  size_t end = text.size();
  while (end > begin) {
    size_t start = end - 1;  // step back over continuation bytes to the start of the last character
    while (start > begin && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
    const DecodedCharacter c = decode_character(text, start);
    if (!c.well_formed || start + c.length != end || !is_python_space(c.code_point)) break;
    end = start;
  }
  return text.substr(begin, end - begin);
}

}  // namespace beryl
