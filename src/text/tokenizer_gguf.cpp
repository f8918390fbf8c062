// A vocabulary from a GGUF file's tokenizer.ggml.* keys.
#include <algorithm>
#include <limits>

#include <fmt/format.h>

#include "base/error.h"
#include "text/tokenizer.h"
#include "weights/quote.h"

namespace beryl {

namespace {

constexpr std::string_view kMetaspace = "\xE2\x96\x81";  // U+2581, how Gemma's vocabulary writes a space

struct GgufVocabulary {
  const Metadata& metadata;
  const std::string& path;
  std::shared_ptr<const StringList> tokens;

  Error bad(const std::string& what) const { return {ErrorCode::kBadInput, fmt::format("{}: {}", path, what)}; }
  Error unsupported(const std::string& what) const {
    return {ErrorCode::kUnsupported, fmt::format("{}: {}", path, what)};
  }

  std::optional<int32_t> id(std::string_view key) const {
    const std::optional<int64_t> value = metadata.integer(key);
    if (!value) return std::nullopt;
    if (*value < 0 || static_cast<uint64_t>(*value) >= tokens->size())
      throw bad(fmt::format("{} is {}, but the vocabulary has {} tokens", key, *value, tokens->size()));
    return static_cast<int32_t>(*value);
  }
};

// spaces_as_metaspace: a space in a token's text is written U+2581, as everywhere else in such a vocabulary (Gemma 3
// stores its runs of spaces as they are).
void read_tokens(const GgufVocabulary& file, bool spaces_as_metaspace, TokenizerParts& parts) {
  constexpr std::string_view kTypesKey = "tokenizer.ggml.token_type";
  const StringList& tokens = *file.tokens;
  const auto types = file.metadata.integers(kTypesKey);
  if (types && types->size() != tokens.size())
    throw file.bad(fmt::format("{} has {} entries for {} tokens", kTypesKey, types->size(), tokens.size()));
  if (!types)
    parts.warnings.push_back(fmt::format(
        "{}: {} is missing; only the tokens that other keys name as special are taken as such", file.path, kTypesKey));

  parts.vocabulary.reserve(tokens.size(), tokens.size() * 8);
  std::string spaced;
  for (size_t i = 0; i < tokens.size(); ++i) {
    TokenType type = TokenType::kNormal;
    if (types) {
      const int64_t value = (*types)[i];
      if (value < 1 || value > 6)
        throw file.bad(fmt::format("{}[{}] is {}, expected 1 to 6", kTypesKey, i, value));
      type = static_cast<TokenType>(value);
    }
    std::string_view text = tokens[i];
    if (spaces_as_metaspace && text.find(' ') != std::string_view::npos) {
      spaced.clear();
      for (const char c : text) {
        if (c == ' ')
          spaced += kMetaspace;
        else
          spaced += c;
      }
      text = spaced;
    }
    parts.vocabulary.add(text, type);
  }
  parts.vocabulary.build_index();
}

void read_merges(const GgufVocabulary& file, TokenizerParts& parts) {
  constexpr std::string_view kKey = "tokenizer.ggml.merges";
  const auto merges = file.metadata.strings(kKey);
  if (!merges) throw file.bad(fmt::format("{} is missing; this kind of vocabulary needs it", kKey));
  if (merges->size() > std::numeric_limits<uint32_t>::max() / 4)
    throw file.bad(fmt::format("{} has {} entries, too many", kKey, merges->size()));
  parts.merges.reserve(merges->size());
  for (size_t rank = 0; rank < merges->size(); ++rank) {
    // "left right". The left part may begin with any character, so the separator is a space after the first byte.
    const std::string_view merge = (*merges)[rank];
    const size_t space = merge.empty() ? std::string_view::npos : merge.find(' ', 1);
    if (space == std::string_view::npos || space + 1 == merge.size())
      throw file.bad(fmt::format("{}[{}] is {}, expected two parts with a space between", kKey, rank, quote(merge)));
    add_merge(parts, merge.substr(0, space), merge.substr(space + 1), static_cast<uint32_t>(rank));
  }
}

// Sets the pre-tokenizer of a byte-level vocabulary, and what depends on it.
void choose_pretokenizer(const GgufVocabulary& file, TokenizerParts& parts) {
  constexpr std::string_view kKey = "tokenizer.ggml.pre";
  const std::optional<std::string> given = file.metadata.string(kKey);
  std::string name = given.value_or("default");
  if (name == "default") {  // what converters write that do not know the vocabulary
    name = parts.vocabulary.find("<|begin_of_text|>") >= 0 ? "llama-bpe" : "gpt-2";
    parts.warnings.push_back(fmt::format("{}: {} is {}; '{}' is assumed, and text may be split wrongly", file.path,
                                         kKey, given ? "'default'" : "missing", name));
  }
  if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") {
    parts.family = "Llama 3";
    parts.splits = {{std::string(llama3_pattern())}};
    parts.ignore_merges = true;
    parts.adds_bos = true;
  } else if (name == "smollm") {
    parts.family = "SmolLM";
    parts.splits = {{std::string(one_digit_pattern())}, {std::string(gpt2_pattern())}};
  } else if (name == "gpt-2") {
    parts.family = "GPT-2";
    parts.splits = {{std::string(gpt2_pattern())}};
  } else {
    throw file.unsupported(fmt::format("{} is {}; known are llama-bpe (llama3, llama-v3), smollm and gpt-2", kKey,
                                       quote(name)));
  }
}

}  // namespace

std::unique_ptr<Tokenizer> load_gguf_tokenizer(const Checkpoint& checkpoint) {
  constexpr std::string_view kModelKey = "tokenizer.ggml.model", kTokensKey = "tokenizer.ggml.tokens";
  const Metadata& metadata = checkpoint.metadata();
  const std::optional<std::string> model = metadata.string(kModelKey);
  if (!model || *model == "none" || *model == "no_vocab") return nullptr;

  GgufVocabulary file{metadata, checkpoint.path(), metadata.strings(kTokensKey)};
  if (*model != "llama" && *model != "gemma4" && *model != "gpt2")
    throw file.unsupported(fmt::format("{} is {}; known are llama (Gemma 3), gemma4, gpt2 and none", kModelKey,
                                       quote(*model)));
  if (!file.tokens || file.tokens->size() == 0) throw file.bad(fmt::format("{} is missing or empty", kTokensKey));

  TokenizerParts parts;
  parts.source = file.path;
  parts.byte_level = *model == "gpt2";
  if (!parts.byte_level) {
    // SentencePiece's other habit, a space put in front of every text, would need undoing in every decoder.
    if (metadata.boolean("tokenizer.ggml.add_space_prefix").value_or(true))
      throw file.unsupported("tokenizer.ggml.add_space_prefix is true or missing; only vocabularies without it are "
                             "supported (Gemma)");
    if (metadata.boolean("tokenizer.ggml.remove_extra_whitespaces").value_or(false))
      throw file.unsupported("tokenizer.ggml.remove_extra_whitespaces is true, which is not supported");
    parts.replacements = {{" ", std::string(kMetaspace)}};
    parts.adds_bos = true;
  }
  read_tokens(file, !parts.byte_level, parts);
  if (*model == "llama") {
    constexpr std::string_view kScoresKey = "tokenizer.ggml.scores";
    parts.family = "SentencePiece BPE (Gemma 3)";
    auto scores = metadata.floats(kScoresKey);
    if (!scores) throw file.bad(fmt::format("{} is missing; this kind of vocabulary needs it", kScoresKey));
    if (scores->size() != file.tokens->size())
      throw file.bad(fmt::format("{} has {} entries for {} tokens", kScoresKey, scores->size(), file.tokens->size()));
    parts.scores = std::move(*scores);
  } else {
    if (*model == "gemma4") {
      parts.family = "Gemma 4";
      parts.user_defined_on_request = true;
    } else {
      choose_pretokenizer(file, parts);
    }
    read_merges(file, parts);
  }

  parts.bos_id = file.id("tokenizer.ggml.bos_token_id");
  if (!parts.bos_id && !parts.byte_level) {
    // Gemma's answers are noise without a BOS, so the token is looked for by its name, as in a folder.
    constexpr std::string_view kBosName = "<bos>";
    if (const int32_t id = parts.vocabulary.find(kBosName); id >= 0) {
      parts.bos_id = id;
      parts.warnings.push_back(fmt::format("{}: tokenizer.ggml.bos_token_id is missing; the token '{}' ({}) is assumed",
                                           file.path, kBosName, id));
    } else {
      parts.warnings.push_back(fmt::format("{}: tokenizer.ggml.bos_token_id is missing, and no token is named '{}'; "
                                           "prompts start without a BOS",
                                           file.path, kBosName));
    }
  }
  parts.eos_id = file.id("tokenizer.ggml.eos_token_id");
  parts.unknown_id = file.id("tokenizer.ggml.unknown_token_id");
  if (parts.byte_level) parts.unknown_id.reset();  // bytes need none
  for (const std::string_view key : {"tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"})
    if (const auto id = file.id(key)) parts.stop_ids.push_back(*id);
  parts.adds_bos = metadata.boolean("tokenizer.ggml.add_bos_token").value_or(parts.adds_bos);
  // Ends of text are structure, whatever type the converter gave them.
  for (const std::optional<int32_t>& id : {parts.bos_id, parts.eos_id})
    if (id && parts.vocabulary.type(*id) == TokenType::kNormal) parts.vocabulary.set_type(*id, TokenType::kControl);
  for (const int32_t id : parts.stop_ids)
    if (parts.vocabulary.type(id) == TokenType::kNormal) parts.vocabulary.set_type(id, TokenType::kControl);
  return std::make_unique<Tokenizer>(std::move(parts));
}

}  // namespace beryl
