#include "grammar/constraint.h"

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/grammar_text.h"
#include "grammar/json_schema.h"
#include "grammar/mask_trial.h"
#include "grammar/regex.h"
#include "grammar/token_mask.h"
#include "grammar/tool_grammar.h"
#include "weights/json_text.h"
#include "weights/quote.h"

#ifdef BERYL_HAS_XGRAMMAR
#include <xgrammar/xgrammar.h>

// The library's log, by its own hooks: what it calls fatal ends the operation, what it warns of is collected, since it
// is about to do something else than it was told.
namespace beryl {
namespace {
thread_local std::vector<std::string>* warnings_here = nullptr;
}
}  // namespace beryl
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 1;
  if (level >= kWarning && beryl::warnings_here != nullptr) beryl::warnings_here->push_back(message);
}
}  // namespace xgrammar
#endif

namespace beryl {

#ifdef BERYL_HAS_XGRAMMAR
namespace {

constexpr size_t kMaxTextBytes = 1 << 20;
constexpr size_t kMaxRegexBytes = 16 << 10;
constexpr size_t kMaxGrammarBytes = 256 << 10;  // as the library prints it; more would take many seconds
constexpr size_t kMaxKept = 64;                 // compiled specs, and their bytes
constexpr size_t kMaxKeptBytes = 64 << 20;

// The library's messages, as one printable line of ours.
std::string reason_of(std::string_view message) {
  // "Check failed: (…) is false: …" and positions in its own sources say nothing to a user.
  if (const size_t at = message.find("is false: "); message.starts_with("Check failed") && at != message.npos)
    message.remove_prefix(at + 10);
  const std::string quoted = quote(message, 300);
  std::string text = quoted.substr(1, quoted.size() - 2);
  for (size_t at; (at = text.find("\\x0a")) != text.npos;) text.replace(at, 4, 1, ' ');
  return text;
}

[[noreturn]] void refuse(ErrorCode code, std::string_view name, std::string_view why) {
  throw Error(code, fmt::format("{}: {}", name, why));
}

// call(), with what the library throws and warns of as Errors.
template <class Call>
auto translated(std::string_view name, const Call& call) {
  std::vector<std::string> warnings;
  std::vector<std::string>* const outer = std::exchange(warnings_here, &warnings);
  struct Restore {
    std::vector<std::string>* outer;
    ~Restore() { warnings_here = outer; }
  } restore{outer};
  try {
    auto result = call();
    if (!warnings.empty())
      refuse(ErrorCode::kUnsupported, name, fmt::format("cannot be expressed: {}", reason_of(warnings.front())));
    return result;
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    refuse(ErrorCode::kBadInput, name, reason_of(error.what()));
  }
}

std::string_view name_of(ConstraintSpec::Kind kind) {
  switch (kind) {
    case ConstraintSpec::Kind::kJsonObject: return "JSON object";
    case ConstraintSpec::Kind::kJsonSchema: return "JSON schema";
    case ConstraintSpec::Kind::kRegex: return "regular expression";
    case ConstraintSpec::Kind::kGrammar: return "grammar";
    case ConstraintSpec::Kind::kText:
    case ConstraintSpec::Kind::kNothing: break;
  }
  return "tools";
}

}  // namespace

// The library takes ED A0…BF for characters (U+D800 and on, halves of pairs), which UTF-8 does not. So behind a token
// that ends with ED none that begins with A0…BF may come; one that has both within it never does (make_info).
struct SplitCharacters {
  std::vector<bool> ends_with_ed;          // by id
  std::vector<uint32_t> begins_with_half;  // a mask of ids
  static constexpr char kLead = '\xed';
  static bool is_half(char c) { return static_cast<unsigned char>(c) >= 0xa0 && static_cast<unsigned char>(c) <= 0xbf; }
};

struct CompiledConstraint::Data {
  // Masks of its states are made when they are first wanted, and kept: all of them at once would take up to 20 s, in which nothing
  // can interrupt the library.
  xgrammar::CompiledGrammar grammar;
  std::shared_ptr<const SplitCharacters> split;
  std::vector<std::string> notes;
};

struct Constraint::State {
  xgrammar::GrammarMatcher matcher;
  std::shared_ptr<const SplitCharacters> split;
  size_t vocab = 0;
  std::vector<bool> ends_with_ed;  // of the accepted ids
  bool is_split() const { return !ends_with_ed.empty() && ends_with_ed.back(); }
};

bool has_constraints() { return true; }

Constraint::Constraint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Constraint::Constraint(Constraint&&) noexcept = default;
Constraint& Constraint::operator=(Constraint&&) noexcept = default;
Constraint::~Constraint() = default;

size_t Constraint::mask_words() const { return (state_->vocab + 31) / 32; }
int Constraint::n_accepted() const { return static_cast<int>(state_->ends_with_ed.size()); }
bool Constraint::is_complete() const { return state_->matcher.IsCompleted(); }
bool Constraint::is_finished() const { return state_->matcher.IsTerminated(); }

bool Constraint::fill_mask(std::span<uint32_t> mask) {
  BERYL_CHECK(mask.size() == mask_words(), "a mask has mask_words() words");
  if (is_finished()) {
    std::fill(mask.begin(), mask.end(), 0u);
    return false;
  }
  fill_token_mask(state_->matcher, mask, state_->vocab);
  if (state_->is_split())
    for (size_t i = 0; i < mask.size(); ++i) mask[i] &= ~state_->split->begins_with_half[i];
  return std::any_of(mask.begin(), mask.end(), [](uint32_t word) { return word != 0; });
}

bool Constraint::accept(int32_t id) {
  if (id < 0 || static_cast<size_t>(id) >= state_->vocab || is_finished()) return false;
  const auto index = static_cast<size_t>(id);
  if (state_->is_split() && (state_->split->begins_with_half[index / 32] >> (index % 32) & 1u) != 0) return false;
  if (!state_->matcher.AcceptToken(id)) return false;
  state_->ends_with_ed.push_back(state_->split->ends_with_ed[index]);
  return true;
}

void Constraint::rollback(int n) {
  BERYL_CHECK(n >= 0 && n <= n_accepted(), "only what was accepted can be taken back");
  if (n > 0) state_->matcher.Rollback(n);
  state_->ends_with_ed.resize(state_->ends_with_ed.size() - static_cast<size_t>(n));
}

Constraint Constraint::fork() const {
  return Constraint(
      std::make_unique<State>(State{state_->matcher.Fork(), state_->split, state_->vocab, state_->ends_with_ed}));
}

CompiledConstraint::CompiledConstraint(std::unique_ptr<const Data> data) : data_(std::move(data)) {}
CompiledConstraint::~CompiledConstraint() = default;
const std::vector<std::string>& CompiledConstraint::notes() const { return data_->notes; }

Constraint CompiledConstraint::start() const {
  const auto vocab = static_cast<size_t>(data_->grammar.GetTokenizerInfo().GetVocabSize());
  return Constraint(std::make_unique<Constraint::State>(
      Constraint::State{xgrammar::GrammarMatcher(data_->grammar), data_->split, vocab, {}}));
}

struct ConstraintCompiler::Impl {
  // What is made of the vocabulary.
  struct Vocabulary {
    Vocabulary(const Tokenizer& tokenizer, int64_t model_vocab)
        : marks(find_tool_tokens(tokenizer)),
          split(make_split(tokenizer, model_vocab)),
          stops(stops_of(tokenizer, model_vocab)),
          texts(texts_of(tokenizer, model_vocab, marks)),
          info(texts, xgrammar::VocabType::RAW, static_cast<int>(model_vocab), stops),
          compiler(info, /*max_threads=*/1, /*cache_enabled=*/false, /*max_memory_bytes=*/-1, /*enable_dynamic_compilation=*/true),
          trial(texts, ids_of(marks, model_vocab), stops) {
      texts = {};
    }

    ToolTokens marks;
    std::shared_ptr<const SplitCharacters> split;
    std::vector<int32_t> stops;
    std::vector<std::string> texts;   // as the library is told them; only while this is made
    xgrammar::TokenizerInfo info;
    xgrammar::GrammarCompiler compiler;
    MaskTrial trial;
  };

  // Control tokens are no text, so none is ever allowed but the stop ids and what `marks` names.
  static std::vector<std::string> texts_of(const Tokenizer& tokenizer, int64_t model_vocab, const ToolTokens& marks) {
    const int32_t n = static_cast<int32_t>(std::min<int64_t>(tokenizer.vocab_size(), model_vocab));
    std::vector<std::string> texts(static_cast<size_t>(model_vocab));
    for (int32_t id = 0; id < n; ++id)
      if (!tokenizer.is_special(id)) texts[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
    // A text, or the library takes it for no token at all; none that any text of a grammar could match.
    for (const int32_t id : ids_of(marks, n)) texts[static_cast<size_t>(id)] = fmt::format("\xff{}", id);
    for (std::string& text : texts)
      for (size_t i = 0; i + 1 < text.size(); ++i)
        if (text[i] == SplitCharacters::kLead && SplitCharacters::is_half(text[i + 1])) text.clear();
    return texts;
  }

  static std::vector<int32_t> ids_of(const ToolTokens& marks, int64_t n) {
    std::vector<int32_t> ids;
    for (const ToolTokens::Mark& mark : marks.marks)
      if (mark.id >= 0 && mark.id < n) ids.push_back(mark.id);
    return ids;
  }

  static std::vector<int32_t> stops_of(const Tokenizer& tokenizer, int64_t model_vocab) {
    std::vector<int32_t> stops;
    for (const int32_t id : tokenizer.stop_ids())
      if (id < std::min<int64_t>(tokenizer.vocab_size(), model_vocab)) stops.push_back(id);
    return stops;
  }

  static std::shared_ptr<const SplitCharacters> make_split(const Tokenizer& tokenizer, int64_t model_vocab) {
    auto split = std::make_shared<SplitCharacters>();
    split->ends_with_ed.resize(static_cast<size_t>(model_vocab));
    split->begins_with_half.resize(static_cast<size_t>((model_vocab + 31) / 32));
    for (int32_t id = 0; id < std::min<int64_t>(tokenizer.vocab_size(), model_vocab); ++id) {
      const std::string text = tokenizer.is_special(id) ? "" : tokenizer.token_bytes(id);
      if (text.empty()) continue;
      split->ends_with_ed[static_cast<size_t>(id)] = text.back() == SplitCharacters::kLead;
      if (SplitCharacters::is_half(text.front()))
        split->begins_with_half[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
    }
    return split;
  }

  // The constants that stand for patterns become rules, one for equal ones. In JSON with their quotes: a count that ends
  // where its rule ends would take the library seconds.
  static std::string with_patterns(const std::string& grammar, const std::vector<SchemaPattern>& patterns,
                                   RegexPlace place) {
    std::vector<LiteralPart> parts;
    std::string rules;
    std::map<std::string, std::string> rule_of;  // by expression
    for (const SchemaPattern& pattern : patterns) {
      const auto [at, is_new] = rule_of.emplace(pattern.regex, fmt::format("pattern_of_string_{}", rule_of.size()));
      const std::string mark = place == RegexPlace::kJsonString ? "\\\"" : "";
      if (is_new) rules += fmt::format("{} ::= {}\n", at->second, rule_of_regex(pattern.place, pattern.regex, place));
      parts.push_back({mark + pattern.constant + mark, at->second});
    }
    return with_literal_parts(grammar, parts) + rules;
  }

  xgrammar::Grammar from_schema(std::string_view name, const nlohmann::ordered_json& schema,
                                std::vector<std::string>& notes) const {
    const CheckedSchema checked = checked_schema(std::string(name), schema, notes);
    return translated(name, [&] {
      const xgrammar::Grammar grammar =
          xgrammar::Grammar::FromJSONSchema(checked.schema.dump(), /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                            /*strict_mode=*/false, kMaxBlanks);
      if (checked.patterns.empty()) return grammar;
      return xgrammar::Grammar::FromEBNF(with_patterns(grammar.ToString(), checked.patterns, RegexPlace::kJsonString));
    });
  }

  // Requires a kind of content, kText not among them.
  xgrammar::Grammar content_of(const ConstraintSpec& spec, std::vector<std::string>& notes) const {
    const std::string_view name = name_of(spec.kind);
    const size_t most = spec.kind == ConstraintSpec::Kind::kRegex ? kMaxRegexBytes : kMaxTextBytes;
    check_text(name, spec.text, most);
    if (spec.kind == ConstraintSpec::Kind::kJsonObject) return from_schema(name, {{"type", "object"}}, notes);
    if (spec.kind == ConstraintSpec::Kind::kJsonSchema)
      return from_schema(name, parse_json<nlohmann::ordered_json>(std::string(name), spec.text), notes);
    if (spec.kind == ConstraintSpec::Kind::kRegex) {
      const std::string rule = rule_of_regex(std::string(name), spec.text, RegexPlace::kText);
      return translated(name, [&] { return xgrammar::Grammar::FromEBNF("root ::= " + rule); });
    }
    check_nesting(std::string(name), spec.text);
    return translated(name, [&] { return xgrammar::Grammar::FromEBNF(spec.text); });
  }

  xgrammar::Grammar calls_of(const CallSpec& spec, std::vector<std::string>& notes) const {
    static constexpr const char* kName = "tools";
    check_text(kName, spec.tools, kMaxTextBytes);
    if (spec.notation == CallNotation::kBare)
      return from_schema(kName, call_schema(kName, spec.tools, "parameters", notes), notes);
    if (spec.notation == CallNotation::kTagged) {
      const xgrammar::Grammar call = from_schema(kName, call_schema(kName, spec.tools, "arguments", notes), notes);
      return translated(kName, [&] {
        return xgrammar::Grammar::FromEBNF(tagged_calls(call.ToString(), vocabulary->marks, spec.single));
      });
    }
    if (!vocabulary->marks.are_gemma4())
      refuse(ErrorCode::kUnsupported, kName, "the vocabulary lacks the marks of Gemma 4's calls (<|tool_call>)");
    std::vector<SchemaPattern> patterns;
    const std::string tag = gemma4_calls_tag(kName, spec.tools, spec.single, patterns, notes).dump();
    return translated(kName, [&] {
      auto made = xgrammar::Grammar::FromStructuralTag(tag, vocabulary->info);
      if (auto* error = std::get_if<xgrammar::StructuralTagError>(&made))
        throw std::runtime_error(std::visit([](const auto& one) { return std::string(one.what()); }, *error));
      const std::string grammar = with_mark_tokens(std::get<xgrammar::Grammar>(made).ToString(), vocabulary->marks);
      return xgrammar::Grammar::FromEBNF(with_patterns(grammar, patterns, RegexPlace::kText));
    });
  }

  xgrammar::Grammar grammar_of(const ConstraintSpec& spec, std::vector<std::string>& notes) const {
    using Kind = ConstraintSpec::Kind;
    using xgrammar::Grammar;
    if (!spec.calls) {
      BERYL_CHECK(spec.kind != Kind::kText && spec.kind != Kind::kNothing, "a constraint constrains");
      return content_of(spec, notes);
    }
    const Grammar calls = calls_of(*spec.calls, notes);
    if (spec.kind == Kind::kNothing) return calls;
    return translated("tools", [&] {
      if (spec.kind != Kind::kText) return Grammar::Union({content_of(spec, notes), calls});
      const bool tagged = spec.calls->notation == CallNotation::kTagged;
      if (spec.calls->notation == CallNotation::kBare || (tagged && !vocabulary->marks.are_tags()))
        return Grammar::Union({Grammar::FromEBNF(text_without_calls(tagged)), calls});
      const Grammar text = Grammar::FromEBNF("root ::= [^\\0]*");
      return Grammar::Concat({text, Grammar::Union({Grammar::FromEBNF("root ::= \"\""), calls}), text});
    });
  }

  void prepare() {
    std::call_once(has_vocabulary, [&] { vocabulary.emplace(tokenizer, model_vocab); });
  }

  std::shared_ptr<const CompiledConstraint> make(const ConstraintSpec& spec, bool is_tried) {
    prepare();
    const std::string_view name = name_of(spec.kind);
    std::vector<std::string> notes;
    const xgrammar::Grammar grammar = grammar_of(spec, notes);
    const size_t grammar_bytes = grammar.ToString().size();
    if (grammar_bytes > kMaxGrammarBytes)
      refuse(ErrorCode::kUnsupported, name,
             fmt::format("is too large: its grammar has {} bytes, at most {} are allowed", grammar_bytes, kMaxGrammarBytes));
    if (!is_tried && spec.kind != ConstraintSpec::Kind::kGrammar && !translated(name, [&] { return vocabulary->trial.is_quick(grammar); }))
      refuse(ErrorCode::kUnsupported, name, "a text can be read in too many ways at once: each token would take seconds");
    auto data = std::make_unique<const CompiledConstraint::Data>(CompiledConstraint::Data{
        translated(name, [&] { return vocabulary->compiler.CompileGrammar(grammar); }), vocabulary->split, std::move(notes)});
    auto compiled = std::make_shared<const CompiledConstraint>(std::move(data));
    std::vector<uint32_t> mask;
    Constraint first = compiled->start();
    mask.resize(first.mask_words());
    if (!first.fill_mask(mask))
      refuse(ErrorCode::kBadInput, name, "nothing satisfies it that this model's tokens can write");
    return compiled;
  }

  static void check_text(std::string_view name, const std::string& text, size_t most) {
    if (text.size() > most)
      refuse(ErrorCode::kBadInput, name, fmt::format("has {} bytes, at most {} are allowed", text.size(), most));
    if (!is_utf8(text)) refuse(ErrorCode::kBadInput, name, "is not UTF-8");
  }

  // Null: it is not there. What is found becomes the last to go.
  std::shared_ptr<const CompiledConstraint> find(const std::string& key) {
    const std::lock_guard lock(mutex);
    const auto at = std::find_if(kept.begin(), kept.end(), [&](const Kept& each) { return each.key == key; });
    if (at == kept.end()) return nullptr;
    kept.splice(kept.begin(), kept, at);
    drop_some();
    return kept.front().compiled;
  }

  void keep(std::string key, std::shared_ptr<const CompiledConstraint> compiled) {
    const std::lock_guard lock(mutex);
    std::erase_if(kept, [&](const Kept& each) { return each.key == key; });
    kept.push_front({std::move(key), std::move(compiled)});
    drop_some();
  }

  // Masks make the kept ones grow, so their sizes are looked at anew. The first one stays.
  void drop_some() {
    size_t n_bytes = 0, n = 0;
    auto each = kept.begin();
    for (; each != kept.end() && n < kMaxKept; ++each, ++n) {
      n_bytes += each->key.size() + each->compiled->data_->grammar.MemorySizeBytes();
      if (n_bytes > kMaxKeptBytes && n > 0) break;
    }
    kept.erase(each, kept.end());
  }

  static constexpr int kMaxBlanks = 16;  // in a row: a model that likes blanks comes to an end

  struct Kept {
    std::string key;
    std::shared_ptr<const CompiledConstraint> compiled;
  };

  const Tokenizer& tokenizer;
  const int64_t model_vocab;
  std::once_flag has_vocabulary;
  std::optional<Vocabulary> vocabulary;
  std::mutex mutex;      // of what is kept
  std::list<Kept> kept;  // the last used first
};

ConstraintCompiler::ConstraintCompiler(const Tokenizer& tokenizer, int64_t model_vocab) : impl_(new Impl{tokenizer, model_vocab, {}, {}, {}, {}}) {}
ConstraintCompiler::~ConstraintCompiler() = default;

void ConstraintCompiler::prepare() {
  try {
    impl_->prepare();
  } catch (const std::exception&) {
  }
}

std::shared_ptr<const CompiledConstraint> ConstraintCompiler::find(const ConstraintSpec& spec) { return impl_->find(key_of(spec)); }

std::shared_ptr<const CompiledConstraint> ConstraintCompiler::compile(const ConstraintSpec& spec, bool is_tried) {
  std::string key = key_of(spec);
  if (auto compiled = impl_->find(key)) return compiled;
  std::shared_ptr<const CompiledConstraint> compiled = impl_->make(spec, is_tried);
  impl_->keep(std::move(key), compiled);
  return compiled;
}

#else  // a build without the library

namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported,
              "this build has no structured output: xgrammar's sources could not be had when it was configured");
}
}  // namespace

struct CompiledConstraint::Data {
  std::vector<std::string> notes;
};
struct Constraint::State {};
struct ConstraintCompiler::Impl {};

bool has_constraints() { return false; }
Constraint::Constraint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Constraint::Constraint(Constraint&&) noexcept = default;
Constraint& Constraint::operator=(Constraint&&) noexcept = default;
Constraint::~Constraint() = default;
bool Constraint::fill_mask(std::span<uint32_t>) { refuse(); }
size_t Constraint::mask_words() const { refuse(); }
bool Constraint::accept(int32_t) { refuse(); }
void Constraint::rollback(int) { refuse(); }
int Constraint::n_accepted() const { refuse(); }
Constraint Constraint::fork() const { refuse(); }
bool Constraint::is_complete() const { refuse(); }
bool Constraint::is_finished() const { refuse(); }
CompiledConstraint::CompiledConstraint(std::unique_ptr<const Data> data) : data_(std::move(data)) {}
CompiledConstraint::~CompiledConstraint() = default;
Constraint CompiledConstraint::start() const { refuse(); }
const std::vector<std::string>& CompiledConstraint::notes() const { return data_->notes; }
ConstraintCompiler::ConstraintCompiler(const Tokenizer&, int64_t) {}
ConstraintCompiler::~ConstraintCompiler() = default;
std::shared_ptr<const CompiledConstraint> ConstraintCompiler::compile(const ConstraintSpec&, bool) { refuse(); }
std::shared_ptr<const CompiledConstraint> ConstraintCompiler::find(const ConstraintSpec&) { return nullptr; }
void ConstraintCompiler::prepare() {}

#endif

std::string ConstraintCompiler::key_of(const ConstraintSpec& spec) {
  std::string key = fmt::format("{} {} ", static_cast<int>(spec.kind), spec.text.size()) + spec.text;
  if (spec.calls) key += fmt::format("{} {} ", static_cast<int>(spec.calls->notation), spec.calls->single) + spec.calls->tools;
  return key;
}

}  // namespace beryl
