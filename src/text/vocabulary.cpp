#include "text/vocabulary.h"

#include <bit>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace beryl {

namespace {

uint64_t multiply_fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Eight bytes a step; tokens are a handful of bytes long, so this is one or two multiplications.
uint64_t hash_text(std::string_view text) {
  uint64_t hash = (text.size() + 1) * 0x9E3779B97F4A7C15u;
  const char* data = text.data();
  size_t left = text.size();
  for (; left >= 8; data += 8, left -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    hash = multiply_fold(hash ^ word, 0xD6E8FEB86659FD93u);
  }
  uint64_t word = 0;
  if (left > 0) std::memcpy(&word, data, left);
  return multiply_fold(hash ^ word, 0xA0761D6478BD642Fu);
}

}  // namespace

void Vocabulary::reserve(size_t n_tokens, size_t text_bytes) {
  text_.reserve(text_bytes);
  ends_.reserve(n_tokens + 1);
  types_.reserve(n_tokens);
}

void Vocabulary::add(std::string_view text, TokenType type) {
  if (text.size() > std::numeric_limits<uint32_t>::max() - text_.size())
    throw Error(ErrorCode::kBadInput, "the tokens of the vocabulary hold more than 4 GiB of text");
  text_ += text;
  ends_.push_back(static_cast<uint32_t>(text_.size()));
  types_.push_back(type);
  if (text.size() > longest_) longest_ = text.size();
}

void Vocabulary::build_index() {
  slots_.assign(std::bit_ceil(size() * 2 + 2), Slot{});
  const size_t mask = slots_.size() - 1;
  for (size_t i = 0; i < size(); ++i) {
    const std::string_view wanted = text(static_cast<int32_t>(i));
    const uint64_t hash = hash_text(wanted);
    const uint32_t tag = static_cast<uint32_t>(hash >> 32);
    for (size_t index = hash & mask;; index = (index + 1) & mask) {
      Slot& slot = slots_[index];
      if (slot.id < 0) {
        slot = {tag, static_cast<int32_t>(i)};
        break;
      }
      if (slot.tag == tag && text(slot.id) == wanted) break;  // the lower id keeps the text
    }
  }
}

int32_t Vocabulary::find(std::string_view wanted) const {
  if (slots_.empty()) return -1;
  const size_t mask = slots_.size() - 1;
  const uint64_t hash = hash_text(wanted);
  const uint32_t tag = static_cast<uint32_t>(hash >> 32);
  for (size_t index = hash & mask;; index = (index + 1) & mask) {
    const Slot& slot = slots_[index];
    if (slot.id < 0) return -1;
    if (slot.tag == tag && text(slot.id) == wanted) return slot.id;
  }
}

void TokenMatcher::add(std::string_view text, int32_t id) {
  BERYL_CHECK(!text.empty(), "a matcher's string holds at least one byte");
  uint32_t parent = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t byte = static_cast<uint8_t>(text[i]);
    uint32_t node = i == 0 ? roots_[byte] : nodes_[parent - 1].first_child;
    while (node != 0 && nodes_[node - 1].byte != byte) node = nodes_[node - 1].next_sibling;
    if (node == 0) {
      Node made;
      made.byte = byte;
      if (i > 0) made.next_sibling = nodes_[parent - 1].first_child;
      nodes_.push_back(made);
      node = static_cast<uint32_t>(nodes_.size());
      if (i == 0)
        roots_[byte] = node;
      else
        nodes_[parent - 1].first_child = node;
    }
    parent = node;
  }
  if (nodes_[parent - 1].id < 0) nodes_[parent - 1].id = id;
}

std::optional<TokenMatcher::Match> TokenMatcher::match(std::string_view text, size_t position) const {
  std::optional<Match> longest;
  uint32_t node = roots_[static_cast<uint8_t>(text[position])];
  for (size_t length = 1; node != 0; ++length) {
    const Node& reached = nodes_[node - 1];
    if (reached.id >= 0) longest = Match{reached.id, length};
    if (position + length >= text.size()) break;
    const uint8_t byte = static_cast<uint8_t>(text[position + length]);
    node = reached.first_child;
    while (node != 0 && nodes_[node - 1].byte != byte) node = nodes_[node - 1].next_sibling;
  }
  return longest;
}

}  // namespace beryl
