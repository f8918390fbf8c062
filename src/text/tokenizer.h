// Text to token ids and back, for the two families of vocabularies that Gemma and Llama models have:
//
//   character BPE (Gemma): spaces become U+2581, symbols are characters, merges may cross words; a character without a
//                          token becomes its bytes, as <0xNN> tokens.
//   byte-level BPE (Llama 3, SmolLM2, GPT-2): a pattern cuts words, symbols are bytes, each written as one character.
//
// The vocabulary comes from a GGUF file's tokenizer.ggml.* keys or from a folder's tokenizer.json. A Tokenizer owns all
// it needs: the checkpoint may be closed. Every const function may be called by many threads at once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/bpe.h"
#include "text/pretokenize.h"
#include "text/vocabulary.h"
#include "weights/checkpoint.h"

namespace beryl {

// What both file formats are read into; Tokenizer checks it and builds its tables from it.
struct TokenizerParts {
  std::string source;           // the file, for messages
  std::string family;           // "Gemma 4", "llama-bpe", ...: for people
  Vocabulary vocabulary;
  bool byte_level = false;
  bool user_defined_on_request = false;   // user-defined tokens are control tokens in all but type (Gemma 4)

  // The merge order: a list (add_merge), or one score a token, the higher the earlier (SentencePiece). One is filled.
  MergeTable merges;
  std::vector<float> scores;

  // Character BPE: replacements before all else, in order; decoding undoes them.
  std::vector<std::pair<std::string, std::string>> replacements;

  // Byte-level BPE.
  std::vector<SplitStep> splits;
  bool ignore_merges = false;   // a word that is a token is taken whole

  std::optional<int32_t> bos_id;
  bool adds_bos = false;
  std::optional<int32_t> eos_id;
  std::vector<int32_t> stop_ids;          // beyond eos_id and those known by name
  std::optional<int32_t> unknown_id;
  std::vector<std::string> warnings;
};

// One line of a merge list: `left` and `right` become their concatenation. Requires the vocabulary's index and room in
// the merge table. Throws Error(kBadInput) when a part or the result is no token.
void add_merge(TokenizerParts& parts, std::string_view left, std::string_view right, uint32_t rank);

class Tokenizer {
 public:
  // Throws Error(kBadInput) when the parts contradict each other.
  explicit Tokenizer(TokenizerParts parts);
  ~Tokenizer();

  // Ids of any bytes; never a BOS. Ill-formed UTF-8 counts as U+FFFD (see utf8.h). parse_special: text that spells a
  // control token becomes that token; otherwise never. A byte that has no token at all (SmolLM2 lacks 21) is left out,
  // as the references do. Throws Error(kBadInput) for 4 GiB of text or more.
  std::vector<int32_t> encode(std::string_view text, bool parse_special) const;

  // Where a text spells special tokens, as encode(text, true) would find them: from left to right, the longest first.
  struct SpecialSpan {
    size_t begin = 0, length = 0;   // bytes
  };
  std::vector<SpecialSpan> find_specials(std::string_view text) const;

  // The text of ids: valid UTF-8, each ill-formed part one U+FFFD. Special tokens are left out, or shown by name.
  // Ids outside the vocabulary (a model's padding rows) stand for nothing.
  std::string decode(std::span<const int32_t> ids, bool show_special) const;

  // The name in the vocabulary ("▁Hello", "Ġworld", "<bos>"); empty outside it.
  std::string_view token_text(int32_t id) const;
  // The bytes that a token adds to decoded text, special tokens shown. May end inside a character.
  std::string token_bytes(int32_t id) const;
  // Not text: control and unknown tokens.
  bool is_special(int32_t id) const;
  // The token of exactly this name.
  std::optional<int32_t> find_token(std::string_view text) const;
  // The same, but only a special token.
  std::optional<int32_t> find_special(std::string_view text) const;

  int32_t vocab_size() const { return static_cast<int32_t>(parts_.vocabulary.size()); }
  std::optional<int32_t> bos_id() const { return parts_.bos_id; }
  // A raw prompt starts with bos_id(); text that a chat format wrote has it already.
  bool adds_bos() const { return parts_.adds_bos; }
  std::optional<int32_t> eos_id() const { return parts_.eos_id; }
  // Every id that ends a reply, ascending.
  std::span<const int32_t> stop_ids() const { return stop_ids_; }
  bool is_stop(int32_t id) const;
  std::string_view family() const { return parts_.family; }
  // What was assumed or tolerated, one line each.
  std::span<const std::string> warnings() const { return parts_.warnings; }

 private:
  void encode_characters(std::string_view piece, std::vector<int32_t>& ids, std::vector<Symbol>& symbols,
                         MergeScratch& scratch) const;
  void encode_words(std::string_view piece, std::vector<int32_t>& ids, std::vector<Symbol>& symbols,
                    MergeScratch& scratch) const;

  TokenizerParts parts_;
  std::unique_ptr<Pretokenizer> pretokenizer_;    // byte-level only
  TokenMatcher always_, on_request_;              // on_request_ holds those of always_ too
  std::array<int32_t, 256> byte_ids_;             // byte-level: the byte's token; characters: <0xNN>; -1: none
  std::vector<uint32_t> priorities_;              // scores as merge priorities, by id; kNeverMerged
  bool newlines_stand_alone_ = false;             // characters: no token holds a newline and anything else
  std::vector<int32_t> stop_ids_;
};

// The tokenizer of a checkpoint. Null when it has none (golden models: tokenizer.ggml.model is absent or "none", or the
// folder has no tokenizer.json): then programs work on ids. Throws Error(kUnsupported) for kinds that are not built,
// by name, and Error(kBadInput) for a malformed vocabulary.
std::unique_ptr<Tokenizer> load_tokenizer(const Checkpoint& checkpoint);

// The two halves of load_tokenizer.
std::unique_ptr<Tokenizer> load_gguf_tokenizer(const Checkpoint& checkpoint);
std::unique_ptr<Tokenizer> load_folder_tokenizer(const Checkpoint& checkpoint);

// Byte-level BPE writes each byte as one character: printable ones as themselves, the others as U+0100...
uint32_t byte_to_character(uint8_t byte);
std::optional<uint8_t> character_to_byte(uint32_t code_point);

}  // namespace beryl
