#include "weights/quote.h"

#include <algorithm>
#include <cstdint>

#include <fmt/format.h>

namespace beryl {

int utf8_sequence(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (text.size() < length) return 0;
  // The second byte's range excludes overlong forms (E0, F0), surrogates (ED) and values past U+10FFFF (F4).
  const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < length; ++i)
    if (byte(i) < 0x80 || byte(i) > 0xbf) return 0;
  return static_cast<int>(length);
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const int length = utf8_sequence(text);
    if (length == 0) return false;
    text.remove_prefix(static_cast<size_t>(length));
  }
  return true;
}

std::string quote(std::string_view text, size_t max_bytes) {
  std::string out = "'";
  size_t at = 0;
  while (at < text.size()) {
    const int length = utf8_sequence(text.substr(at, 4));
    const size_t step = static_cast<size_t>(std::max(length, 1));
    if (at + step > max_bytes) break;
    const auto lead = static_cast<uint8_t>(text[at]);
    // C1 controls are C2 80 .. C2 9F; U+2028 and U+2029 (E2 80 A8, A9) end a line for some readers.
    const std::string_view character = text.substr(at, step);
    const bool control = lead < 0x20 || lead == 0x7f ||
                         (lead == 0xc2 && length == 2 && static_cast<uint8_t>(text[at + 1]) < 0xa0) ||
                         character == "\xe2\x80\xa8" || character == "\xe2\x80\xa9";
    if (length == 0 || control) {
      for (size_t i = at; i < at + step; ++i) out += fmt::format("\\x{:02x}", static_cast<uint8_t>(text[i]));
    } else {
      out += text.substr(at, step);
    }
    at += step;
  }
  out += at < text.size() ? "...'" : "'";
  return out;
}

}  // namespace beryl
