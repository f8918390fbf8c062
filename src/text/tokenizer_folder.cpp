// A vocabulary from a Hugging Face folder: tokenizer.json, with tokenizer_config.json, generation_config.json and
// config.json for the ids of the ends of text.
//
// Of tokenizer.json's many pipelines those of Gemma, Llama 3, SmolLM2 and GPT-2 are read, part by part; a part that is
// not known is refused by name rather than skipped, since a skipped part means other ids. The vocabulary and the merges
// (98 % of the file, 33 MB for Gemma) go into flat arrays while the file is parsed; only the rest becomes a tree.
#include <algorithm>
#include <filesystem>
#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/mapped_file.h"
#include "text/tokenizer.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {

namespace {

using Json = nlohmann::json;

constexpr size_t kMaxSmallFileBytes = 16 << 20;   // tokenizer_config.json and the like; real ones stay below 2 MB
constexpr int64_t kMaxTokenId = (1 << 24) - 1;
// Ids that no token has become empty entries of the vocabulary. Vocabularies have few such holes; without a limit in
// proportion to the tokens a file of a few bytes could claim all 2^24 ids.
constexpr size_t kMaxIdsPerToken = 2, kMaxExtraIds = 1024;
constexpr size_t kMaxTokenizerBytes = size_t{1} << 30;

// Strings one after the other in one buffer.
class FlatStrings {
 public:
  void add(std::string_view text) {
    text_ += text;
    ends_.push_back(text_.size());
  }
  size_t size() const { return ends_.size() - 1; }
  std::string_view operator[](size_t i) const {
    return std::string_view(text_).substr(ends_[i], ends_[i + 1] - ends_[i]);
  }

 private:
  std::string text_;
  std::vector<size_t> ends_ = {0};
};

// Receives the parser's events of tokenizer.json.
class TokenizerJsonReader {
 public:
  explicit TokenizerJsonReader(std::string path) : path_(std::move(path)) {}

  Json root;                        // everything but model.vocab and model.merges
  FlatStrings vocab;                // model.vocab's keys, in file order, ...
  std::vector<int64_t> vocab_ids;   // ... and its values
  FlatStrings merge_parts;          // two a merge
  bool has_vocab = false, has_merges = false;

  bool null() { return value(nullptr); }
  bool boolean(bool v) { return value(v); }
  bool number_integer(int64_t v) { return number(v); }
  bool number_unsigned(uint64_t v) {
    return number(static_cast<int64_t>(std::min<uint64_t>(v, std::numeric_limits<int64_t>::max())));
  }
  bool number_float(double v, const std::string&) { return value(v); }
  bool binary(Json::binary_t&) { return false; }

  bool string(std::string& v) {
    if (place_ == Place::kMerges) {  // "left right"
      const size_t space = v.empty() ? std::string::npos : v.find(' ', 1);
      if (space == std::string::npos || space + 1 == v.size())
        throw bad(fmt::format("model.merges[{}] is {}, expected two parts with a space between", merge_parts.size() / 2,
                              quote(v)));
      merge_parts.add(std::string_view(v).substr(0, space));
      merge_parts.add(std::string_view(v).substr(space + 1));
      return true;
    }
    if (place_ == Place::kMerge) {  // one of ["left", "right"]
      if (++parts_of_merge_ > 2 || v.empty()) throw bad_merge();
      merge_parts.add(v);
      return true;
    }
    return value(v);
  }

  bool start_object(size_t) { return open(Json::object()); }
  bool end_object() { return close(); }
  bool start_array(size_t) {
    if (place_ == Place::kMerges) {
      place_ = Place::kMerge;
      merge_index_ = merge_parts.size() / 2;   // all merges before this one have two parts
      parts_of_merge_ = 0;
      return true;
    }
    return open(Json::array());
  }
  bool end_array() {
    if (place_ == Place::kMerge) {
      if (parts_of_merge_ != 2) throw bad_merge();
      place_ = Place::kMerges;
      return true;
    }
    return close();
  }
  bool key(std::string& v) {
    if (place_ == Place::kVocab)
      vocab.add(v);
    else
      key_ = v;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const Json::exception& exception) {
    throw bad(fmt::format("not valid JSON at byte {}: {}", position, json_reason(exception)));
  }

  Error bad(const std::string& what) const { return {ErrorCode::kBadInput, fmt::format("{}: {}", path_, what)}; }

 private:
  enum class Place { kTree, kVocab, kMerges, kMerge };

  Error bad_merge() const {
    return bad(fmt::format("model.merges[{}] is not two strings that are not empty", merge_index_));
  }

  bool number(int64_t v) {
    if (place_ == Place::kVocab) {
      vocab_ids.push_back(v);
      return true;
    }
    return value(v);
  }

  // Puts a value where the tree stands.
  Json* put(Json v) {
    if (open_.empty()) {
      root = std::move(v);
      return &root;
    }
    Json& parent = *open_.back();
    if (parent.is_array()) {
      parent.push_back(std::move(v));
      return &parent.back();
    }
    return &(parent[key_] = std::move(v));
  }
  bool value(Json v) {
    if (place_ == Place::kVocab)
      throw bad(fmt::format("model.vocab[{}] is not an integer", quote(vocab[vocab.size() - 1])));
    if (place_ != Place::kTree) throw bad("model.merges holds something that is no string and no pair of strings");
    put(std::move(v));
    return true;
  }
  bool open(Json container) {
    if (place_ != Place::kTree) return value(nullptr);  // throws
    const bool in_model = open_.size() == 2 && open_[0] == &root && model_ == open_[1];
    if (in_model && container.is_object() && key_ == "vocab") {
      if (has_vocab) throw bad("model.vocab occurs twice");
      has_vocab = true;
      place_ = Place::kVocab;
      return true;
    }
    if (in_model && container.is_array() && key_ == "merges") {
      if (has_merges) throw bad("model.merges occurs twice");
      has_merges = true;
      place_ = Place::kMerges;
      return true;
    }
    if (open_.size() >= static_cast<size_t>(kMaxJsonDepth))
      throw bad(fmt::format("JSON nested deeper than {} levels", kMaxJsonDepth));
    const bool is_model = open_.size() == 1 && key_ == "model";
    open_.push_back(put(std::move(container)));
    if (is_model) model_ = open_.back();
    return true;
  }
  bool close() {
    if (place_ != Place::kTree) {
      place_ = Place::kTree;
      return true;
    }
    open_.pop_back();
    return true;
  }

  std::string path_;
  Place place_ = Place::kTree;
  std::vector<Json*> open_;   // containers from the root to here; a parent's pointer stays valid while a child is open
  Json* model_ = nullptr;
  std::string key_;
  size_t merge_index_ = 0;   // of the merge that parts_of_merge_ is about
  int parts_of_merge_ = 0;
};

// What the pipeline's sections are read with. Every accessor names the file and the place in its errors.
class Pipeline {
 public:
  Pipeline(std::string path, const Json& root) : path_(std::move(path)), root_(root) {}

  Error unsupported(const std::string& what) const {
    return {ErrorCode::kUnsupported, fmt::format("{}: {} is not supported", path_, what)};
  }
  Error bad(const std::string& what) const { return {ErrorCode::kBadInput, fmt::format("{}: {}", path_, what)}; }

  const Json& section(const char* name) const {
    static const Json kNull;
    const auto found = root_.find(name);
    return found == root_.end() ? kNull : *found;
  }
  std::string type(const Json& part, std::string_view where) const {
    const auto found = part.is_object() ? part.find("type") : part.end();
    if (!part.is_object() || found == part.end() || !found->is_string())
      throw bad(fmt::format("{} has no type", where));
    return found->get<std::string>();
  }
  bool flag(const Json& part, const char* name, bool missing) const {
    const auto found = part.find(name);
    if (found == part.end() || found->is_null()) return missing;
    if (!found->is_boolean()) throw bad(fmt::format("'{}' is not true or false", name));
    return found->get<bool>();
  }
  std::string text(const Json& part, const char* name) const {
    const auto found = part.find(name);
    if (found == part.end() || !found->is_string()) throw bad(fmt::format("'{}' is missing or not a string", name));
    return found->get<std::string>();
  }
  // The members of a Sequence, or the part itself.
  std::vector<const Json*> members(const Json& part, std::string_view where, const char* list) const {
    if (part.is_null()) return {};
    if (type(part, where) != "Sequence") return {&part};
    const auto found = part.find(list);
    if (found == part.end() || !found->is_array()) throw bad(fmt::format("{}: the Sequence has no {}", where, list));
    std::vector<const Json*> all;
    for (const Json& member : *found)
      for (const Json* inner : members(member, where, list)) all.push_back(inner);
    return all;
  }

 private:
  std::string path_;
  const Json& root_;
};

// The string or the regular expression of a Replace or a Split.
struct Pattern {
  std::string text;
  bool is_regex = false;
};

Pattern read_pattern(const Pipeline& pipeline, const Json& part, std::string_view where) {
  const auto found = part.find("pattern");
  if (found != part.end() && found->is_object()) {
    if (found->contains("String")) return {pipeline.text(*found, "String"), false};
    if (found->contains("Regex")) return {pipeline.text(*found, "Regex"), true};
  }
  throw pipeline.bad(fmt::format("{}: a pattern is neither a String nor a Regex", where));
}

void read_normalizer(const Pipeline& pipeline, TokenizerParts& parts) {
  for (const Json* part : pipeline.members(pipeline.section("normalizer"), "normalizer", "normalizers")) {
    const std::string type = pipeline.type(*part, "normalizer");
    if (type != "Replace") throw pipeline.unsupported(fmt::format("normalizer {}", quote(type)));
    const Pattern pattern = read_pattern(pipeline, *part, "normalizer");
    if (pattern.is_regex || pattern.text.empty())
      throw pipeline.unsupported(fmt::format("normalizer Replace of the pattern {}", quote(pattern.text)));
    parts.replacements.emplace_back(pattern.text, pipeline.text(*part, "content"));
  }
}

SplitBehavior read_behavior(const Pipeline& pipeline, const Json& part) {
  const std::string name = pipeline.text(part, "behavior");
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  throw pipeline.unsupported(fmt::format("pre_tokenizer Split with behavior {}", quote(name)));
}

void read_pre_tokenizer(const Pipeline& pipeline, TokenizerParts& parts) {
  bool splits_text = false;   // by something else than a pattern that can not occur
  for (const Json* part : pipeline.members(pipeline.section("pre_tokenizer"), "pre_tokenizer", "pretokenizers")) {
    const std::string type = pipeline.type(*part, "pre_tokenizer");
    if (parts.byte_level) throw pipeline.unsupported(fmt::format("pre_tokenizer {} after ByteLevel", quote(type)));
    if (type == "ByteLevel") {
      if (pipeline.flag(*part, "add_prefix_space", true))
        throw pipeline.unsupported("pre_tokenizer ByteLevel with add_prefix_space");
      if (pipeline.flag(*part, "use_regex", true)) parts.splits.push_back({std::string(gpt2_pattern())});
      parts.byte_level = true;
    } else if (type == "Digits") {
      const bool individual = pipeline.flag(*part, "individual_digits", false);
      parts.splits.push_back({individual ? std::string(one_digit_pattern()) : R"(\p{N}+)"});
      splits_text = true;
    } else if (type == "Split") {
      const Pattern pattern = read_pattern(pipeline, *part, "pre_tokenizer");
      // Gemma's files split at spaces although the normalizer has left none.
      const bool never_matches =
          !pattern.is_regex && std::any_of(parts.replacements.begin(), parts.replacements.end(),
                                           [&](const auto& r) { return r.first == pattern.text; });
      if (never_matches) continue;
      SplitStep step;
      if (pattern.is_regex) {
        step.pattern = pattern.text;
      } else {
        for (const char c : pattern.text) {  // the string as a pattern: punctuation escaped
          if (std::string_view("\\^$.[|()?*+{}#-]").find(c) != std::string_view::npos) step.pattern += '\\';
          step.pattern += c;
        }
      }
      step.behavior = read_behavior(pipeline, *part);
      step.invert = pipeline.flag(*part, "invert", false);
      parts.splits.push_back(std::move(step));
      splits_text = true;
    } else {
      throw pipeline.unsupported(fmt::format("pre_tokenizer {}", quote(type)));
    }
  }
  if (parts.byte_level && !parts.replacements.empty())
    throw pipeline.unsupported("a normalizer together with the pre_tokenizer ByteLevel");
  if (!parts.byte_level && splits_text)
    throw pipeline.unsupported("a pre_tokenizer that splits text without ByteLevel");
}

// Decoding is the reverse of encoding here; a decoder that would do anything else is refused.
void check_decoder(const Pipeline& pipeline, const TokenizerParts& parts) {
  for (const Json* part : pipeline.members(pipeline.section("decoder"), "decoder", "decoders")) {
    const std::string type = pipeline.type(*part, "decoder");
    const bool known =
        parts.byte_level ? type == "ByteLevel" : type == "Replace" || type == "ByteFallback" || type == "Fuse";
    if (!known) throw pipeline.unsupported(fmt::format("decoder {}", quote(type)));
    if (type == "Replace") {
      const Pattern pattern = read_pattern(pipeline, *part, "decoder");
      const std::pair reverse(pipeline.text(*part, "content"), pattern.text);
      if (std::find(parts.replacements.begin(), parts.replacements.end(), reverse) == parts.replacements.end())
        throw pipeline.unsupported(fmt::format("decoder Replace of {}, which the normalizer does not write",
                                               quote(pattern.text)));
    }
  }
}

// The special token that the post-processor puts in front of a text; empty when none.
std::string read_post_processor(const Pipeline& pipeline) {
  std::string front;
  for (const Json* part : pipeline.members(pipeline.section("post_processor"), "post_processor", "processors")) {
    const std::string type = pipeline.type(*part, "post_processor");
    if (type == "ByteLevel") continue;   // offsets only
    if (type != "TemplateProcessing") throw pipeline.unsupported(fmt::format("post_processor {}", quote(type)));
    const auto single = part->find("single");
    if (single == part->end() || !single->is_array()) throw pipeline.bad("post_processor: 'single' is not a list");
    if (single->empty() || !single->front().is_object() || !single->front().contains("SpecialToken")) continue;
    front = pipeline.text(single->front()["SpecialToken"], "id");
  }
  return front;
}

void check_model(const Pipeline& pipeline, const Json& model, TokenizerParts& parts) {
  if (!model.is_object()) throw pipeline.bad("there is no model");
  if (const std::string type = model.contains("type") ? pipeline.type(model, "model") : "BPE"; type != "BPE")
    throw pipeline.unsupported(fmt::format("model type {}", quote(type)));
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (model.contains(name) && !model[name].is_null() &&
        !(model[name].is_string() && model[name].get<std::string>().empty()))
      throw pipeline.unsupported(fmt::format("model with a {}", name));
  if (model.contains("dropout") && !model["dropout"].is_null() &&
      !(model["dropout"].is_number() && model["dropout"] == 0))
    throw pipeline.unsupported("model with dropout");
  parts.ignore_merges = pipeline.flag(model, "ignore_merges", false);
}

// model.vocab and added_tokens by id, with types.
void build_vocabulary(const Pipeline& pipeline, const TokenizerJsonReader& reader, bool byte_fallback,
                      TokenizerParts& parts) {
  struct Entry {
    std::string_view text;
    TokenType type = TokenType::kUnused;   // ids that no token has
    bool taken = false;
  };
  std::vector<Entry> entries;
  const Json& added = pipeline.section("added_tokens");
  if (!added.is_null() && !added.is_array()) throw pipeline.bad("added_tokens is not a list");
  const int64_t max_id = std::min<int64_t>(
      kMaxTokenId, static_cast<int64_t>((reader.vocab.size() + added.size()) * kMaxIdsPerToken + kMaxExtraIds));
  const auto entry = [&](int64_t id, std::string_view text) -> Entry& {
    if (id < 0 || id > max_id)
      throw pipeline.bad(fmt::format("token {} has the id {}, expected 0 to {} for {} tokens", quote(text), id, max_id,
                                     reader.vocab.size() + added.size()));
    if (static_cast<size_t>(id) >= entries.size()) entries.resize(static_cast<size_t>(id) + 1);
    return entries[static_cast<size_t>(id)];
  };
  entries.reserve(reader.vocab.size());
  for (size_t i = 0; i < reader.vocab.size(); ++i) {
    const std::string_view text = reader.vocab[i];
    Entry& slot = entry(reader.vocab_ids[i], text);
    if (slot.taken)
      throw pipeline.bad(fmt::format("tokens {} and {} share the id {}", quote(slot.text), quote(text),
                                     reader.vocab_ids[i]));
    const bool byte = byte_fallback && text.size() == 6 && text.starts_with("<0x") && text[5] == '>';
    slot = {text, byte ? TokenType::kByte : TokenType::kNormal, true};
  }

  std::vector<std::string> added_texts;   // owns the text of entries until the vocabulary has copied it
  added_texts.reserve(added.size());
  for (const Json& token : added) {
    if (!token.is_object()) throw pipeline.bad("added_tokens holds something that is no object");
    added_texts.push_back(pipeline.text(token, "content"));
    const std::string& text = added_texts.back();
    for (const char* name : {"lstrip", "rstrip", "single_word"})
      if (pipeline.flag(token, name, false))
        throw pipeline.unsupported(fmt::format("added token {} with {}", quote(text), name));
    const auto id = token.find("id");
    if (id == token.end() || !id->is_number_integer())
      throw pipeline.bad(fmt::format("added token {} has no id", quote(text)));
    Entry& slot = entry(id->get<int64_t>(), text);
    if (slot.taken && slot.text != text)
      throw pipeline.bad(fmt::format("tokens {} and {} share the id {}", quote(slot.text), quote(text), id->dump()));
    slot = {text, pipeline.flag(token, "special", false) ? TokenType::kControl : TokenType::kUserDefined, true};
  }

  size_t text_bytes = 0;
  for (const Entry& slot : entries) text_bytes += slot.text.size();
  parts.vocabulary.reserve(entries.size(), text_bytes);
  for (const Entry& slot : entries) parts.vocabulary.add(slot.text, slot.type);
  parts.vocabulary.build_index();
}

// A small JSON file of the folder; null when it is absent.
Json read_small_file(const std::filesystem::path& path) {
  if (!std::filesystem::exists(path)) return nullptr;
  const MappedFile file(path.string());
  if (file.bytes().size() > kMaxSmallFileBytes)
    throw Error(ErrorCode::kBadInput, fmt::format("{}: {} bytes, expected at most {}", path.string(),
                                                  file.bytes().size(), kMaxSmallFileBytes));
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  return parse_json<Json>(path.string(), text, kMaxTokenId);
}

// "bos_token": "<bos>" or {"content": "<bos>", ...}; empty when absent.
std::string token_name(const Json& config, const char* key) {
  if (!config.is_object() || !config.contains(key)) return {};
  const Json& value = config[key];
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string())
    return value["content"].get<std::string>();
  return {};
}

}  // namespace

std::unique_ptr<Tokenizer> load_folder_tokenizer(const Checkpoint& checkpoint) {
  namespace fs = std::filesystem;
  const fs::path folder = checkpoint.path();
  const fs::path path = folder / "tokenizer.json";
  if (!fs::exists(path)) {
    for (const char* other : {"tokenizer.model", "vocab.json"})
      if (fs::exists(folder / other))
        throw Error(ErrorCode::kUnsupported, fmt::format("{}: only tokenizer.json is supported, and it is missing",
                                                         (folder / other).string()));
    return nullptr;
  }

  TokenizerJsonReader reader(path.string());
  {
    const MappedFile file(path.string());
    if (file.bytes().size() > kMaxTokenizerBytes)
      throw reader.bad(fmt::format("{} bytes, expected at most {}", file.bytes().size(), kMaxTokenizerBytes));
    const char* text = reinterpret_cast<const char*>(file.bytes().data());
    refuse_nul(path.string(), {text, file.bytes().size()});
    Json::sax_parse(text, text + file.bytes().size(), &reader);
  }
  if (!reader.root.is_object()) throw reader.bad("not a JSON object");
  const Pipeline pipeline(path.string(), reader.root);

  TokenizerParts parts;
  parts.source = path.string();
  const Json& model = pipeline.section("model");
  check_model(pipeline, model, parts);
  if (!reader.has_vocab || !reader.has_merges) throw pipeline.bad("the model lacks vocab or merges");
  read_normalizer(pipeline, parts);
  read_pre_tokenizer(pipeline, parts);
  check_decoder(pipeline, parts);
  const bool byte_fallback = pipeline.flag(model, "byte_fallback", false);
  if (parts.byte_level && byte_fallback) throw pipeline.unsupported("byte_fallback together with ByteLevel");
  if (!parts.byte_level && parts.ignore_merges) throw pipeline.unsupported("ignore_merges without ByteLevel");
  parts.family = parts.byte_level ? "byte-level BPE" : "character BPE";
  build_vocabulary(pipeline, reader, byte_fallback, parts);

  const size_t n_merges = reader.merge_parts.size() / 2;
  parts.merges.reserve(n_merges);
  for (size_t rank = 0; rank < n_merges; ++rank)
    add_merge(parts, reader.merge_parts[2 * rank], reader.merge_parts[2 * rank + 1], static_cast<uint32_t>(rank));

  const auto id_of = [&](const std::string& name) -> std::optional<int32_t> {
    const int32_t id = name.empty() ? -1 : parts.vocabulary.find(name);
    return id < 0 ? std::nullopt : std::optional(id);
  };
  const Json tokenizer_config = read_small_file(folder / "tokenizer_config.json");
  const Json generation_config = read_small_file(folder / "generation_config.json");
  if (model.contains("unk_token") && model["unk_token"].is_string() && !parts.byte_level)
    parts.unknown_id = id_of(model["unk_token"].get<std::string>());

  const std::string front = read_post_processor(pipeline);
  parts.bos_id = id_of(token_name(tokenizer_config, "bos_token"));
  if (!parts.bos_id) parts.bos_id = id_of(front);
  for (const char* name : {"<bos>", "<|begin_of_text|>"})
    if (!parts.bos_id) parts.bos_id = id_of(name);
  // Gemma needs a BOS whatever the files say (Gemma 4's instruct tokenizer leaves it to the chat template).
  const bool gemma = !parts.byte_level && parts.vocabulary.find("<bos>") >= 0;
  const Json& add_bos = tokenizer_config.is_object() && tokenizer_config.contains("add_bos_token")
                            ? tokenizer_config["add_bos_token"]
                            : Json();
  parts.adds_bos = gemma || (add_bos.is_boolean() ? add_bos.get<bool>() : !front.empty());

  parts.eos_id = id_of(token_name(tokenizer_config, "eos_token"));
  const auto add_stop = [&](int64_t id, const char* where) {
    if (!parts.vocabulary.contains(id))
      throw pipeline.bad(fmt::format("eos_token_id of {} is {}, but the vocabulary has {} tokens", where, id,
                                     parts.vocabulary.size()));
    parts.stop_ids.push_back(static_cast<int32_t>(id));
    if (!parts.eos_id) parts.eos_id = static_cast<int32_t>(id);
  };
  if (generation_config.is_object() && generation_config.contains("eos_token_id")) {
    const Json& ids = generation_config["eos_token_id"];
    if (ids.is_number_integer()) add_stop(ids.get<int64_t>(), "generation_config.json");
    if (ids.is_array())
      for (const Json& id : ids)
        if (id.is_number_integer()) add_stop(id.get<int64_t>(), "generation_config.json");
  }
  const Metadata& metadata = checkpoint.metadata();
  for (const char* key : {"eos_token_id", "text_config.eos_token_id"}) {
    if (!metadata.has(key)) continue;
    if (metadata.is_array(key)) {
      const auto ids = metadata.integers(key).value_or(std::vector<int64_t>());
      for (const int64_t id : ids) add_stop(id, "config.json");
    } else if (const auto id = metadata.integer(key)) {
      add_stop(*id, "config.json");
    }
  }
  return std::make_unique<Tokenizer>(std::move(parts));
}

}  // namespace beryl
