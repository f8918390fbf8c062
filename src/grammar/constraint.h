// What a reply may be: a JSON value of a schema, a text that a regular expression or a grammar describes. For each next
// token a constraint says which ids keep the reply within it, as the bits that SampleParams::allowed takes.
//
// The work is xgrammar's, which a build may lack: then everything here throws Error(kUnsupported) with one line.
//
// Nothing is dropped silently: a schema, regex or grammar is either enforced as a whole, or refused with the place and the
// reason (json_schema.h tells what of JSON Schema there is). What a schema says that is no constraint for anybody, an
// unknown "format" for example, is listed in notes().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace beryl {

struct ConstraintSpec {
  enum class Kind : uint8_t {
    kJsonObject,       // any JSON object; text is not used
    kJsonSchema,       // text: the schema
    kRegex,            // text: matches the whole reply
    kGrammar,          // text: EBNF as xgrammar writes it (GBNF is much the same); the rule "root" is the reply
    kGemma4ToolCalls,  // text: OpenAI's tools list; one or more calls in Gemma 4's own notation, control tokens included
    kLlama3ToolCall,   // text: likewise; one call as Llama 3 writes it: {"name": …, "parameters": {…}}
  };
  Kind kind = Kind::kJsonObject;
  std::string text = {};
};

// Whether this build has grammars.
bool has_constraints();

// One reply's state. Cheap to fork; one thread at a time.
class Constraint {
 public:
  Constraint(Constraint&&) noexcept;
  Constraint& operator=(Constraint&&) noexcept;
  ~Constraint();

  // Ids that may come next, [mask_words()], bit id % 32 of word id / 32. False, and no bit is set, when nothing may: the
  // reply is finished, or the vocabulary has no token that would go on.
  bool fill_mask(std::span<uint32_t> mask);
  size_t mask_words() const;
  // False: the id is not allowed, and nothing has changed.
  [[nodiscard]] bool accept(int32_t id);
  // Takes back the last n accepted ids. Requires n <= n_accepted().
  void rollback(int n);
  int n_accepted() const;
  Constraint fork() const;
  // What was accepted is whole: a stop id may come next. (Something else may, too.)
  bool is_complete() const;
  // A stop id was accepted.
  bool is_finished() const;

 private:
  friend class CompiledConstraint;
  struct State;
  explicit Constraint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// A spec, made ready for one vocabulary. Shared by all replies that it binds; immutable.
class CompiledConstraint {
 public:
  struct Data;
  explicit CompiledConstraint(std::unique_ptr<const Data> data);
  ~CompiledConstraint();
  Constraint start() const;
  // What the spec says that constrains nothing, one line each.
  const std::vector<std::string>& notes() const;

 private:
  std::unique_ptr<const Data> data_;
};

class ConstraintCompiler {
 public:
  // model_vocab: ids from there on are never allowed. n_threads: for one compilation. The tokenizer is not kept.
  ConstraintCompiler(const Tokenizer& tokenizer, int64_t model_vocab, int n_threads);
  ~ConstraintCompiler();
  ConstraintCompiler(const ConstraintCompiler&) = delete;
  ConstraintCompiler& operator=(const ConstraintCompiler&) = delete;

  // The last few are kept. May be called by many threads at once. Throws Error(kBadInput): no such thing as the text
  // says, or nothing satisfies it; Error(kUnsupported): it cannot be expressed.
  std::shared_ptr<const CompiledConstraint> compile(const ConstraintSpec& spec);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace beryl
