// Text out of ids as they come: every piece is whole UTF-8, and all pieces together are the decoded text.
#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace beryl {

// One reply's detokeniser. Used by one thread; the tokenizer must outlive it.
class TextStream {
 public:
  // show_special: control tokens appear by name, else they add nothing.
  explicit TextStream(const Tokenizer& tokenizer, bool show_special = false)
      : tokenizer_(tokenizer), show_special_(show_special) {}

  // The text that this id completes; often empty when a character comes as several byte tokens. Bytes that can no
  // longer become a character come out as U+FFFD at once.
  std::string push(int32_t id);
  // The rest: bytes that waited for their character become one U+FFFD. The stream is empty again afterwards.
  std::string finish();
  // Bytes that wait (0 to 3).
  size_t pending_bytes() const { return pending_.size(); }

 private:
  const Tokenizer& tokenizer_;
  bool show_special_;
  std::string pending_;   // a prefix of one character
};

}  // namespace beryl
