// The tokens of a model: text and type by id, id by text. Owns a copy of all text, so it outlives the file.
//
// Filled once (add..., then build_index), then read-only: any number of threads may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace beryl {

enum class TokenType : uint8_t {   // GGUF's numbers
  kNormal = 1,
  kUnknown = 2,
  kControl = 3,       // structure, never text: <bos>, <|turn>
  kUserDefined = 4,   // a string that is always one token: runs of newlines, HTML tags
  kUnused = 5,        // never produced from text
  kByte = 6,          // <0xNN>: one byte of a character that has no token
};

class Vocabulary {
 public:
  void reserve(size_t n_tokens, size_t text_bytes);
  // Appends a token; its id is the old size(). Throws Error(kBadInput) beyond 4 GiB of text.
  void add(std::string_view text, TokenType type);
  void set_type(int32_t id, TokenType type) { types_[static_cast<size_t>(id)] = type; }
  void build_index();

  size_t size() const { return types_.size(); }
  bool contains(int64_t id) const { return id >= 0 && static_cast<uint64_t>(id) < types_.size(); }
  // Require contains(id).
  std::string_view text(int32_t id) const {
    const size_t i = static_cast<size_t>(id);
    return std::string_view(text_).substr(ends_[i], ends_[i + 1] - ends_[i]);
  }
  TokenType type(int32_t id) const { return types_[static_cast<size_t>(id)]; }

  // The token of exactly this text, -1 when there is none; the lowest id where several have it.
  int32_t find(std::string_view text) const;
  // Bytes of the longest token.
  size_t longest() const { return longest_; }

 private:
  std::string text_;                       // all tokens, one after the other
  std::vector<uint32_t> ends_ = {0};       // token i is text_[ends_[i], ends_[i + 1])
  std::vector<TokenType> types_;
  struct Slot {
    uint32_t tag = 0;   // high half of the hash, so that most misses need no look at the text
    int32_t id = -1;    // -1: empty
  };
  std::vector<Slot> slots_;                // open addressing; a power of two, at most half full
  size_t longest_ = 0;
};

// Finds which of a set of strings starts at a place in a text, the longest first. A trie, so a look costs no more steps
// than the longest string has bytes, however many strings there are.
class TokenMatcher {
 public:
  struct Match {
    int32_t id = -1;
    size_t length = 0;   // bytes
  };
  // Requires a text that is not empty. The first id wins where two tokens have the same text.
  void add(std::string_view text, int32_t id);
  std::optional<Match> match(std::string_view text, size_t position) const;
  bool empty() const { return nodes_.empty(); }

 private:
  struct Node {
    uint8_t byte = 0;
    int32_t id = -1;             // a string that ends here
    uint32_t first_child = 0;    // 0: none (nodes are numbered from 1)
    uint32_t next_sibling = 0;
  };
  uint32_t roots_[256] = {};     // by first byte
  std::vector<Node> nodes_;      // node n is nodes_[n - 1]
};

}  // namespace beryl
