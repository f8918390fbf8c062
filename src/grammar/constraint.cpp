#include "grammar/constraint.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "base/error.h"
#include "grammar/json_schema.h"
#include "grammar/regex_check.h"
#include "grammar/tool_grammar.h"
#include "weights/json_text.h"
#include "weights/quote.h"

#ifdef BERYL_HAS_XGRAMMAR
#include <xgrammar/xgrammar.h>

// The library's log, by its own hooks: what it calls fatal ends the operation, what it warns of is collected, since it is
// about to do something else than it was told.
namespace beryl {
namespace {
thread_local std::vector<std::string>* warnings_here = nullptr;
}
}  // namespace beryl
namespace xgrammar {
[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) { throw std::runtime_error(message); }
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
constexpr size_t kKept = 16;             // compiled specs

// The library's messages, as one printable line of ours.
std::string reason_of(std::string_view message) {
  // "Check failed: (…) is false: …" and positions in its own sources say nothing to a user.
  if (const size_t at = message.find("is false: "); message.starts_with("Check failed") && at != message.npos) message.remove_prefix(at + 10);
  const std::string quoted = quote(message, 300);
  std::string text = quoted.substr(1, quoted.size() - 2);
  for (size_t at; (at = text.find("\\x0a")) != text.npos;) text.replace(at, 4, " ");
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
    if (!warnings.empty()) refuse(ErrorCode::kUnsupported, name, fmt::format("cannot be expressed: {}", reason_of(warnings.front())));
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
    case ConstraintSpec::Kind::kGemma4ToolCalls:
    case ConstraintSpec::Kind::kLlama3ToolCall: return "tools";
  }
  return {};
}

DLTensor tensor_of(std::span<uint32_t> mask, int64_t& words) {
  words = static_cast<int64_t>(mask.size());
  DLTensor tensor = {};
  tensor.data = mask.data();
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 1;
  tensor.dtype = {kDLInt, 32, 1};
  tensor.shape = &words;
  return tensor;
}

}  // namespace

// The library takes ED A0…BF for characters (U+D800 and on, halves of pairs), which UTF-8 does not. So behind a token that
// ends with ED none that begins with A0…BF may come; one that has both within it never does (make_info).
struct SplitCharacters {
  std::vector<bool> ends_with_ed;            // by id
  std::vector<uint32_t> begins_with_half;    // a mask of ids
  static constexpr char kLead = '\xed';
  static bool is_half(char c) { return static_cast<unsigned char>(c) >= 0xa0 && static_cast<unsigned char>(c) <= 0xbf; }
};

struct CompiledConstraint::Data {
  xgrammar::CompiledGrammar grammar;
  std::shared_ptr<const SplitCharacters> split;
  std::vector<std::string> notes;
};

struct Constraint::State {
  xgrammar::GrammarMatcher matcher;
  std::shared_ptr<const SplitCharacters> split;
  size_t vocab = 0;
  std::vector<bool> ends_with_ed;            // of the accepted ids
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
  std::fill(mask.begin(), mask.end(), 0u);
  if (is_finished()) return false;
  int64_t words = 0;
  DLTensor tensor = tensor_of(mask, words);
  state_->matcher.FillNextTokenBitmask(&tensor);
  if (const size_t n = state_->vocab % 32; n != 0) mask.back() &= (1u << n) - 1;   // the library leaves bits behind the last id
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
  return Constraint(std::make_unique<State>(State{state_->matcher.Fork(), state_->split, state_->vocab, state_->ends_with_ed}));
}

CompiledConstraint::CompiledConstraint(std::unique_ptr<const Data> data) : data_(std::move(data)) {}
CompiledConstraint::~CompiledConstraint() = default;
const std::vector<std::string>& CompiledConstraint::notes() const { return data_->notes; }

Constraint CompiledConstraint::start() const {
  const auto vocab = static_cast<size_t>(data_->grammar.GetTokenizerInfo().GetVocabSize());
  return Constraint(std::make_unique<Constraint::State>(Constraint::State{xgrammar::GrammarMatcher(data_->grammar), data_->split, vocab, {}}));
}

struct ConstraintCompiler::Impl {
  Impl(const Tokenizer& tokenizer, int64_t model_vocab, int n_threads)
      : marks(find_tool_tokens(tokenizer)),
        split(make_split(tokenizer, model_vocab)),
        info(make_info(tokenizer, model_vocab, {})),
        compiler(info, n_threads, /*cache_enabled=*/false) {
    if (!marks.are_there()) return;
    info_with_marks.emplace(make_info(tokenizer, model_vocab, marks));
    compiler_with_marks.emplace(*info_with_marks, n_threads, /*cache_enabled=*/false);
  }

  // Control tokens are no text, so none is ever allowed but the stop ids and what `marks` names.
  static xgrammar::TokenizerInfo make_info(const Tokenizer& tokenizer, int64_t model_vocab, const ToolTokens& marks) {
    const int32_t n = static_cast<int32_t>(std::min<int64_t>(tokenizer.vocab_size(), model_vocab));
    std::vector<std::string> texts(static_cast<size_t>(n));
    for (int32_t id = 0; id < n; ++id)
      if (!tokenizer.is_special(id)) texts[static_cast<size_t>(id)] = tokenizer.token_bytes(id);
    // A text, or the library takes it for no token at all; none that any text of a grammar could match.
    for (const ToolTokens::Mark& mark : marks.marks)
      if (mark.id >= 0 && mark.id < n) texts[static_cast<size_t>(mark.id)] = fmt::format("\xff{}", mark.id);
    for (std::string& text : texts)
      for (size_t i = 0; i + 1 < text.size(); ++i)
        if (text[i] == SplitCharacters::kLead && SplitCharacters::is_half(text[i + 1])) text.clear();
    std::vector<int32_t> stops;
    for (const int32_t id : tokenizer.stop_ids())
      if (id < n) stops.push_back(id);
    return xgrammar::TokenizerInfo(texts, xgrammar::VocabType::RAW, static_cast<int>(model_vocab), stops);
  }

  static std::shared_ptr<const SplitCharacters> make_split(const Tokenizer& tokenizer, int64_t model_vocab) {
    auto split = std::make_shared<SplitCharacters>();
    split->ends_with_ed.resize(static_cast<size_t>(model_vocab));
    split->begins_with_half.resize(static_cast<size_t>((model_vocab + 31) / 32));
    for (int32_t id = 0; id < std::min<int64_t>(tokenizer.vocab_size(), model_vocab); ++id) {
      const std::string text = tokenizer.is_special(id) ? "" : tokenizer.token_bytes(id);
      if (text.empty()) continue;
      split->ends_with_ed[static_cast<size_t>(id)] = text.back() == SplitCharacters::kLead;
      if (SplitCharacters::is_half(text.front())) split->begins_with_half[static_cast<size_t>(id / 32)] |= 1u << (id % 32);
    }
    return split;
  }

  // What the library makes of a schema. Where a string has a length it forgets that JSON strings hold no control characters;
  // and a pattern that it cannot fit into a JSON string it writes as it is, quotes and all.
  static xgrammar::Grammar grammar_of_schema(const std::string& text) {
    const auto convert = [](const std::string& schema) {
      return xgrammar::Grammar::FromJSONSchema(schema, /*any_whitespace=*/true, std::nullopt, std::nullopt, /*strict_mode=*/false, kMaxBlanks);
    };
    for (const std::string& pattern : patterns_of(nlohmann::ordered_json::parse(text)))
      if (convert(nlohmann::ordered_json{{"type", "string"}, {"pattern", pattern}}.dump()).ToString().find("Regex(") == std::string::npos)
        throw Error(ErrorCode::kUnsupported, fmt::format("JSON schema: the pattern {} cannot be expressed within a JSON string, or is too large", quote(pattern)));
    const xgrammar::Grammar grammar = convert(text);
    static constexpr std::string_view kAnyCharacter = "[^\\\"\\\\\\r\\n]", kCharacter = "[^\\0-\\x1f\\\"\\\\]";
    std::string made = grammar.ToString();
    if (made.find(kAnyCharacter) == made.npos) return grammar;
    for (size_t at = 0; (at = made.find(kAnyCharacter, at)) != made.npos; at += kCharacter.size()) made.replace(at, kAnyCharacter.size(), kCharacter);
    return xgrammar::Grammar::FromEBNF(made);
  }

  static std::vector<std::string> patterns_of(const nlohmann::ordered_json& schema) {
    std::vector<std::string> patterns;
    const auto add = [&](const nlohmann::ordered_json& inner) {
      for (std::string& pattern : patterns_of(inner)) patterns.push_back(std::move(pattern));
    };
    if (schema.is_array())
      for (const auto& item : schema) add(item);
    if (!schema.is_object()) return patterns;
    for (const auto& [key, value] : schema.items()) {
      if (key == "pattern" && value.is_string()) patterns.push_back(value.get<std::string>());
      if (key == "patternProperties" && value.is_object())
        for (const auto& [pattern, inner] : value.items()) patterns.push_back(pattern);
      if (key != "const" && key != "enum") add(value);
    }
    return patterns;
  }

  xgrammar::Grammar grammar_of(const ConstraintSpec& spec, std::vector<std::string>& notes) const {
    const std::string_view name = name_of(spec.kind);
    const size_t most = spec.kind == ConstraintSpec::Kind::kRegex ? kMaxRegexBytes : kMaxTextBytes;
    if (spec.text.size() > most) refuse(ErrorCode::kBadInput, name, fmt::format("has {} bytes, at most {} are allowed", spec.text.size(), most));
    if (!is_utf8(spec.text)) refuse(ErrorCode::kBadInput, name, "is not UTF-8");
    const auto from_schema = [&](const nlohmann::ordered_json& schema) {
      const std::string text = checked_schema(std::string(name), schema, notes).dump();
      return translated(name, [&] { return grammar_of_schema(text); });
    };
    switch (spec.kind) {
      case ConstraintSpec::Kind::kJsonObject: return from_schema({{"type", "object"}});
      case ConstraintSpec::Kind::kJsonSchema: return from_schema(parse_json<nlohmann::ordered_json>(std::string(name), spec.text));
      case ConstraintSpec::Kind::kRegex: {
        const std::string regex = checked_regex(std::string(name), spec.text);
        return translated(name, [&] { return xgrammar::Grammar::FromRegex(regex); });
      }
      case ConstraintSpec::Kind::kGrammar:
        check_nesting(std::string(name), spec.text);
        return translated(name, [&] { return xgrammar::Grammar::FromEBNF(spec.text); });
      case ConstraintSpec::Kind::kLlama3ToolCall: return from_schema(llama3_call_schema(std::string(name), spec.text));
      case ConstraintSpec::Kind::kGemma4ToolCalls: {
        if (!marks.are_there()) refuse(ErrorCode::kUnsupported, name, "the vocabulary lacks the marks of Gemma 4's calls (<|tool_call>)");
        const std::string tag = gemma4_calls_tag(std::string(name), spec.text, notes).dump();
        return translated(name, [&] {
          auto made = xgrammar::Grammar::FromStructuralTag(tag, *info_with_marks);
          if (auto* error = std::get_if<xgrammar::StructuralTagError>(&made))
            throw std::runtime_error(std::visit([](const auto& one) { return std::string(one.what()); }, *error));
          return xgrammar::Grammar::FromEBNF(with_mark_tokens(std::get<xgrammar::Grammar>(made).ToString(), marks));
        });
      }
    }
    BERYL_CHECK(false, "a kind of constraint");
  }

  static constexpr int kMaxBlanks = 16;   // in a row: a model that likes blanks comes to an end

  ToolTokens marks;
  std::shared_ptr<const SplitCharacters> split;
  xgrammar::TokenizerInfo info;
  xgrammar::GrammarCompiler compiler;
  std::optional<xgrammar::TokenizerInfo> info_with_marks;        // where there are any
  std::optional<xgrammar::GrammarCompiler> compiler_with_marks;
  std::mutex mutex;                       // of what is kept
  std::deque<std::pair<ConstraintSpec, std::shared_ptr<const CompiledConstraint>>> kept;
};

ConstraintCompiler::ConstraintCompiler(const Tokenizer& tokenizer, int64_t model_vocab, int n_threads)
    : impl_(std::make_unique<Impl>(tokenizer, model_vocab, std::max(n_threads, 1))) {}
ConstraintCompiler::~ConstraintCompiler() = default;

std::shared_ptr<const CompiledConstraint> ConstraintCompiler::compile(const ConstraintSpec& spec) {
  {
    const std::lock_guard lock(impl_->mutex);
    for (const auto& [key, compiled] : impl_->kept)
      if (key.kind == spec.kind && key.text == spec.text) return compiled;
  }
  const std::string_view name = name_of(spec.kind);
  std::vector<std::string> notes;
  const xgrammar::Grammar grammar = impl_->grammar_of(spec, notes);
  const bool has_marks = spec.kind == ConstraintSpec::Kind::kGemma4ToolCalls;
  xgrammar::GrammarCompiler& compiler = has_marks ? *impl_->compiler_with_marks : impl_->compiler;
  auto data = std::make_unique<const CompiledConstraint::Data>(
      CompiledConstraint::Data{translated(name, [&] { return compiler.CompileGrammar(grammar); }), impl_->split, std::move(notes)});
  auto compiled = std::make_shared<const CompiledConstraint>(std::move(data));
  std::vector<uint32_t> mask;
  Constraint first = compiled->start();
  mask.resize(first.mask_words());
  if (!first.fill_mask(mask)) refuse(ErrorCode::kBadInput, name, "nothing satisfies it that this model's tokens can write");
  const std::lock_guard lock(impl_->mutex);
  impl_->kept.emplace_front(spec, compiled);
  if (impl_->kept.size() > kKept) impl_->kept.pop_back();
  return compiled;
}

#else   // a build without the library

namespace {
[[noreturn]] void refuse() {
  throw Error(ErrorCode::kUnsupported, "this build has no structured output: xgrammar's sources could not be had when it was configured");
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
ConstraintCompiler::ConstraintCompiler(const Tokenizer&, int64_t, int) { refuse(); }
ConstraintCompiler::~ConstraintCompiler() = default;
std::shared_ptr<const CompiledConstraint> ConstraintCompiler::compile(const ConstraintSpec&) { refuse(); }

#endif

}  // namespace beryl
