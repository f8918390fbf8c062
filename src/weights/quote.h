// Text from files in messages: whatever bytes a file holds, an error stays one short printable line.
#pragma once

#include <string>
#include <string_view>

namespace beryl {

// 'text' in quotes: control characters and bytes that are not UTF-8 as \xNN, at most max_bytes of it, then "...".
std::string quote(std::string_view text, size_t max_bytes = 80);

// Length in bytes of the valid UTF-8 sequence at the start of text (1 to 4), 0 when there is none.
// Overlong forms, surrogates and values past U+10FFFF are not valid.
int utf8_sequence(std::string_view text);

bool is_utf8(std::string_view text);

}  // namespace beryl
