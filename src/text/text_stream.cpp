#include "text/text_stream.h"

#include <utility>

#include "text/utf8.h"

namespace beryl {

std::string TextStream::push(int32_t id) {
  if (!show_special_ && tokenizer_.is_special(id)) return {};
  pending_ += tokenizer_.token_bytes(id);
  // What precedes an incomplete suffix divides into characters and ill-formed parts whatever follows, so repairing
  // piece by piece gives the same text as repairing the whole.
  const size_t kept = incomplete_suffix(pending_);
  std::string whole = pending_.substr(0, pending_.size() - kept);
  pending_.erase(0, whole.size());
  return is_valid_utf8(whole) ? whole : repair_utf8(whole);
}

std::string TextStream::finish() { return repair_utf8(std::exchange(pending_, {})); }

}  // namespace beryl
