#include "text/tokenizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "base/error.h"
#include "text/utf8.h"
#include "weights/quote.h"

namespace beryl {

namespace {

constexpr uint32_t kNeverMerged = std::numeric_limits<uint32_t>::max();
// A matcher's walk is as long as the longest string it holds; real ones are under 60 bytes.
constexpr size_t kLongestSpecialBytes = 1024;

// Tokens that end a reply, by name. A name counts only where the vocabulary has it as a special token.
constexpr std::string_view kStopNames[] = {
    "<eos>", "<end_of_turn>", "<turn|>", "<|tool_response>",          // Gemma 3, Gemma 4
    "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>",                    // Llama 3
    "<|im_end|>", "<|endoftext|>",                                    // ChatML, GPT-2
};

// Bytes that byte-level BPE writes as themselves: the printable ones of Latin-1 without the soft hyphen.
constexpr bool is_printable(uint32_t byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
}

constexpr std::array<uint16_t, 256> make_byte_characters() {
  std::array<uint16_t, 256> characters{};
  uint16_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte)
    characters[byte] = is_printable(byte) ? static_cast<uint16_t>(byte) : next++;
  return characters;
}
constexpr std::array<uint16_t, 256> kByteCharacters = make_byte_characters();

constexpr std::array<int16_t, 0x144> make_character_bytes() {
  std::array<int16_t, 0x144> bytes{};
  for (int16_t& byte : bytes) byte = -1;
  for (uint32_t byte = 0; byte < 256; ++byte) bytes[kByteCharacters[byte]] = static_cast<int16_t>(byte);
  return bytes;
}
constexpr std::array<int16_t, 0x144> kCharacterBytes = make_character_bytes();

// A replacement may lengthen a text, and several in a row multiply. Gemma's makes a space three bytes.
constexpr size_t kMaxGrowth = 16, kMaxExtraBytes = 1024;

// The most bytes that replacements may make of a text of `bytes`.
size_t grown_limit(size_t bytes) { return bytes * kMaxGrowth + kMaxExtraBytes; }

// Requires that `from` is not empty. Throws Error(kBadInput) rather than grow beyond max_bytes.
std::string replace_all(std::string_view text, std::string_view from, std::string_view to, size_t max_bytes) {
  std::string out;
  out.reserve(text.size());
  const auto check_size = [&](size_t more) {
    if (out.size() + more > max_bytes)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("the normalizer's replacement of {} by {} makes a text longer than {} bytes, {} times "
                              "its length",
                              quote(from, 40), quote(to, 40), max_bytes, kMaxGrowth));
  };
  size_t done = 0;
  for (size_t at = text.find(from); at != std::string_view::npos; at = text.find(from, done)) {
    check_size(at - done + to.size());
    out += text.substr(done, at - done);
    out += to;
    done = at + from.size();
  }
  check_size(text.size() - done);
  out += text.substr(done);
  return out;
}

// "<0x0A>" -> 10; nullopt for anything else.
std::optional<uint8_t> byte_of_name(std::string_view name) {
  if (name.size() != 6 || !name.starts_with("<0x") || name[5] != '>') return std::nullopt;
  uint32_t value = 0;
  for (const char c : name.substr(3, 2)) {
    const uint32_t digit = c >= '0' && c <= '9'   ? static_cast<uint32_t>(c - '0')
                           : c >= 'A' && c <= 'F' ? static_cast<uint32_t>(c - 'A' + 10)
                           : c >= 'a' && c <= 'f' ? static_cast<uint32_t>(c - 'a' + 10)
                                                  : 16u;
    if (digit == 16) return std::nullopt;
    value = value * 16 + digit;
  }
  return static_cast<uint8_t>(value);
}

// A score as a merge priority: the higher the score, the lower the number. Requires a number, not NaN.
uint32_t score_priority(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);  // + 0: -0 and 0 are one score
  const uint32_t ascending = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return ~ascending;
}

}  // namespace

uint32_t byte_to_character(uint8_t byte) { return kByteCharacters[byte]; }

std::optional<uint8_t> character_to_byte(uint32_t code_point) {
  if (code_point >= kCharacterBytes.size() || kCharacterBytes[code_point] < 0) return std::nullopt;
  return static_cast<uint8_t>(kCharacterBytes[code_point]);
}

void add_merge(TokenizerParts& parts, std::string_view left, std::string_view right, uint32_t rank) {
  const auto id_of = [&](std::string_view text) {
    const int32_t id = parts.vocabulary.find(text);
    if (id < 0)
      throw Error(ErrorCode::kBadInput, fmt::format("{}: merge {} ({} + {}): {} is not in the vocabulary",
                                                    parts.source, rank, quote(left), quote(right), quote(text)));
    return id;
  };
  std::string both;
  both.reserve(left.size() + right.size());
  both += left;
  both += right;
  parts.merges.add(id_of(left), id_of(right), rank, id_of(both));
}

Tokenizer::Tokenizer(TokenizerParts parts) : parts_(std::move(parts)) {
  const Vocabulary& vocabulary = parts_.vocabulary;
  const auto bad = [&](const std::string& what) {
    return Error(ErrorCode::kBadInput, fmt::format("{}: {}", parts_.source, what));
  };
  if (vocabulary.size() == 0) throw bad("the vocabulary is empty");
  if (vocabulary.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max()))
    throw bad(fmt::format("the vocabulary has {} tokens, too many for ids of 32 bits", vocabulary.size()));
  const auto check_id = [&](const std::optional<int32_t>& id, const char* what) {
    if (id && !vocabulary.contains(*id))
      throw bad(fmt::format("{} is {}, but the vocabulary has {} tokens", what, *id, vocabulary.size()));
  };
  check_id(parts_.bos_id, "the id of the beginning-of-text token");
  check_id(parts_.eos_id, "the id of the end-of-text token");
  check_id(parts_.unknown_id, "the id of the unknown token");
  for (const int32_t id : parts_.stop_ids) check_id(id, "the id of an end token");
  if (!parts_.bos_id) parts_.adds_bos = false;

  byte_ids_.fill(-1);
  newlines_stand_alone_ = !parts_.byte_level;
  if (!parts_.scores.empty()) {
    if (parts_.scores.size() != vocabulary.size())
      throw bad(fmt::format("{} scores for {} tokens", parts_.scores.size(), vocabulary.size()));
    priorities_.assign(vocabulary.size(), kNeverMerged);
  }
  for (int32_t id = 0; id < vocab_size(); ++id) {
    const std::string_view text = vocabulary.text(id);
    const TokenType type = vocabulary.type(id);
    if (type == TokenType::kByte && !parts_.byte_level) {
      const std::optional<uint8_t> byte = byte_of_name(text);
      if (!byte) throw bad(fmt::format("byte token {} is named {}, expected '<0x00>' to '<0xFF>'", id, quote(text)));
      byte_ids_[*byte] = id;
    }
    const bool control = type == TokenType::kControl || type == TokenType::kUnknown;
    if (!control && text.find('\n') != std::string_view::npos && text.find_first_not_of('\n') != std::string_view::npos)
      newlines_stand_alone_ = false;
    if ((control || type == TokenType::kUserDefined) && !text.empty()) {
      if (text.size() > kLongestSpecialBytes)
        throw bad(fmt::format("special token {} has {} bytes, at most {} are supported", id, text.size(),
                              kLongestSpecialBytes));
      on_request_.add(text, id);
      if (!control && !parts_.user_defined_on_request) always_.add(text, id);
    }
    if (!priorities_.empty() && (type == TokenType::kNormal || type == TokenType::kUserDefined)) {
      const float score = parts_.scores[static_cast<size_t>(id)];
      if (std::isnan(score)) throw bad(fmt::format("the score of token {} is not a number", id));
      priorities_[static_cast<size_t>(id)] = score_priority(score);
    }
  }
  if (parts_.byte_level) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      std::string character;
      append_character(character, byte_to_character(static_cast<uint8_t>(byte)));
      const int32_t id = vocabulary.find(character);
      if (id >= 0 && vocabulary.type(id) == TokenType::kNormal) byte_ids_[byte] = id;
    }
    try {
      pretokenizer_ = std::make_unique<Pretokenizer>(parts_.splits);
    } catch (const Error& error) {   // it knows the pattern, not the file
      throw Error(error.code, fmt::format("{}: {}", parts_.source, error.what()));
    }
  }

  if (parts_.eos_id) stop_ids_.push_back(*parts_.eos_id);
  stop_ids_.insert(stop_ids_.end(), parts_.stop_ids.begin(), parts_.stop_ids.end());
  for (const std::string_view name : kStopNames)
    if (const auto id = find_special(name)) stop_ids_.push_back(*id);
  std::sort(stop_ids_.begin(), stop_ids_.end());
  stop_ids_.erase(std::unique(stop_ids_.begin(), stop_ids_.end()), stop_ids_.end());
}

Tokenizer::~Tokenizer() = default;

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool parse_special) const {
  std::string rewritten;
  if (!is_valid_utf8(text)) {
    rewritten = repair_utf8(text);
    text = rewritten;
  }
  const size_t max_bytes = grown_limit(text.size());
  for (const auto& [from, to] : parts_.replacements) {
    std::string replaced = replace_all(text, from, to, max_bytes);
    rewritten.swap(replaced);
    text = rewritten;
  }
  if (text.size() >= std::numeric_limits<uint32_t>::max())
    throw Error(ErrorCode::kBadInput, fmt::format("a text of {} bytes is too long to tokenise", text.size()));

  std::vector<int32_t> ids;
  std::vector<Symbol> symbols;
  MergeScratch scratch;
  const auto encode_piece = [&](std::string_view piece) {
    if (piece.empty()) return;
    if (parts_.byte_level) {
      encode_words(piece, ids, symbols, scratch);
      return;
    }
    // Where no token holds a newline and anything else, no merge crosses the edge of a run of newlines: line by line is
    // the same, and the heap of a line stays in the cache.
    while (newlines_stand_alone_ && !piece.empty()) {
      const size_t newline = piece.find('\n');
      const size_t edge = newline == 0 ? piece.find_first_not_of('\n') : newline;
      if (edge == std::string_view::npos) break;
      encode_characters(piece.substr(0, edge), ids, symbols, scratch);
      piece.remove_prefix(edge);
    }
    encode_characters(piece, ids, symbols, scratch);
  };
  const TokenMatcher& matcher = parse_special ? on_request_ : always_;
  size_t piece_begin = 0;
  if (!matcher.empty()) {
    for (size_t position = 0; position < text.size();) {
      const auto match = matcher.match(text, position);
      if (!match) {
        ++position;
        continue;
      }
      encode_piece(text.substr(piece_begin, position - piece_begin));
      ids.push_back(match->id);
      position += match->length;
      piece_begin = position;
    }
  }
  encode_piece(text.substr(piece_begin));
  return ids;
}

std::vector<Tokenizer::SpecialSpan> Tokenizer::find_specials(std::string_view text) const {
  std::vector<SpecialSpan> found;
  for (size_t position = 0; position < text.size() && !on_request_.empty();) {
    const auto match = on_request_.match(text, position);
    if (!match) {
      ++position;
      continue;
    }
    // What is a token in any text needs no asking for.
    const auto in_any_text = always_.match(text.substr(position, match->length), 0);
    if (!in_any_text || in_any_text->length != match->length) found.push_back({position, match->length});
    position += match->length;
  }
  return found;
}

void Tokenizer::encode_characters(std::string_view piece, std::vector<int32_t>& ids, std::vector<Symbol>& symbols,
                                  MergeScratch& scratch) const {
  const Vocabulary& vocabulary = parts_.vocabulary;
  const auto token_of = [&](std::string_view text) {
    const int32_t id = vocabulary.find(text);
    if (id < 0) return -1;
    const TokenType type = vocabulary.type(id);
    return type == TokenType::kNormal || type == TokenType::kUserDefined ? id : -1;
  };
  symbols.clear();
  for (size_t position = 0; position < piece.size();) {
    const uint32_t length = decode_character(piece, position).length;
    symbols.push_back({static_cast<uint32_t>(position), length, token_of(piece.substr(position, length))});
    position += length;
  }
  if (priorities_.empty()) {
    merge_symbols(
        symbols, [&](const Symbol& left, const Symbol& right) { return parts_.merges.find(left.id, right.id); },
        scratch);
  } else {
    const size_t longest = vocabulary.longest();
    const auto merge_by_score = [&](const Symbol& left, const Symbol& right) -> std::optional<Merge> {
      const size_t length = size_t{left.length} + right.length;
      if (length > longest) return std::nullopt;
      const int32_t id = vocabulary.find(piece.substr(left.begin, length));
      if (id < 0 || priorities_[static_cast<size_t>(id)] == kNeverMerged) return std::nullopt;
      return Merge{priorities_[static_cast<size_t>(id)], id};
    };
    merge_symbols(symbols, merge_by_score, scratch);
  }
  for (const Symbol& symbol : symbols) {
    if (symbol.id >= 0) {
      ids.push_back(symbol.id);
      continue;
    }
    for (const char c : piece.substr(symbol.begin, symbol.length)) {
      const int32_t byte_id = byte_ids_[static_cast<uint8_t>(c)];
      if (byte_id >= 0)
        ids.push_back(byte_id);
      else if (parts_.unknown_id)
        ids.push_back(*parts_.unknown_id);
    }
  }
}

void Tokenizer::encode_words(std::string_view piece, std::vector<int32_t>& ids, std::vector<Symbol>& symbols,
                             MergeScratch& scratch) const {
  const Vocabulary& vocabulary = parts_.vocabulary;
  std::vector<std::string_view> words;
  pretokenizer_->split(piece, words);
  std::string name;
  for (const std::string_view word : words) {
    if (parts_.ignore_merges && word.size() <= vocabulary.longest()) {
      name.clear();
      for (const char c : word) append_character(name, byte_to_character(static_cast<uint8_t>(c)));
      const int32_t id = vocabulary.find(name);
      if (id >= 0 && vocabulary.type(id) == TokenType::kNormal) {
        ids.push_back(id);
        continue;
      }
    }
    symbols.clear();
    for (size_t i = 0; i < word.size(); ++i) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(word[i])];
      if (id >= 0) symbols.push_back({static_cast<uint32_t>(i), 1, id});
    }
    merge_symbols(
        symbols, [&](const Symbol& left, const Symbol& right) { return parts_.merges.find(left.id, right.id); },
        scratch);
    for (const Symbol& symbol : symbols) ids.push_back(symbol.id);
  }
}

std::string_view Tokenizer::token_text(int32_t id) const {
  return parts_.vocabulary.contains(id) ? parts_.vocabulary.text(id) : std::string_view();
}

std::string Tokenizer::token_bytes(int32_t id) const {
  if (!parts_.vocabulary.contains(id)) return {};
  const std::string_view text = parts_.vocabulary.text(id);
  if (is_special(id)) return std::string(text);
  const TokenType type = parts_.vocabulary.type(id);
  if (!parts_.byte_level) {
    if (type == TokenType::kByte) return std::string(1, static_cast<char>(*byte_of_name(text)));
    std::string bytes(text);
    const size_t max_bytes = grown_limit(text.size());
    for (auto replacement = parts_.replacements.rbegin(); replacement != parts_.replacements.rend(); ++replacement)
      if (!replacement->second.empty())   // what was deleted can not come back
        bytes = replace_all(bytes, replacement->second, replacement->first, max_bytes);
    return bytes;
  }
  if (type == TokenType::kUserDefined) return std::string(text);
  std::string bytes;
  for (size_t position = 0; position < text.size();) {
    const DecodedCharacter c = decode_character(text, position);
    const auto byte = c.well_formed ? character_to_byte(c.code_point) : std::nullopt;
    if (byte)
      bytes.push_back(static_cast<char>(*byte));
    else  // a name that byte-level BPE would not write: it stands for itself
      bytes += text.substr(position, c.length);
    position += c.length;
  }
  return bytes;
}

bool Tokenizer::is_special(int32_t id) const {
  if (!parts_.vocabulary.contains(id)) return false;
  const TokenType type = parts_.vocabulary.type(id);
  return type == TokenType::kControl || type == TokenType::kUnknown ||
         (type == TokenType::kUserDefined && parts_.user_defined_on_request);
}

std::optional<int32_t> Tokenizer::find_token(std::string_view text) const {
  const int32_t id = parts_.vocabulary.find(text);
  return id < 0 ? std::nullopt : std::optional(id);
}

std::optional<int32_t> Tokenizer::find_special(std::string_view text) const {
  const auto id = find_token(text);
  return id && is_special(*id) ? id : std::nullopt;
}

bool Tokenizer::is_stop(int32_t id) const { return std::binary_search(stop_ids_.begin(), stop_ids_.end(), id); }

std::string Tokenizer::decode(std::span<const int32_t> ids, bool show_special) const {
  std::string bytes;
  for (const int32_t id : ids)
    if (show_special || !is_special(id)) bytes += token_bytes(id);
  return is_valid_utf8(bytes) ? bytes : repair_utf8(bytes);
}

std::unique_ptr<Tokenizer> load_tokenizer(const Checkpoint& checkpoint) {
  return checkpoint.container() == Container::kGguf ? load_gguf_tokenizer(checkpoint)
                                                    : load_folder_tokenizer(checkpoint);
}

}  // namespace beryl
