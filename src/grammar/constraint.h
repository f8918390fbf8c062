// What a reply may be: a JSON value of a schema, a text that a regular expression or a grammar describes, calls of tools.
// For each next token a constraint says which ids keep the reply within it, as the bits that SampleParams::allowed takes.
//
// The work is xgrammar's, which a build may lack: then everything here throws Error(kUnsupported) with one line.
//
// Nothing is dropped silently: a schema, regex or grammar is either enforced as a whole, or refused with the place and
// the reason (json_schema.h tells what of JSON Schema there is). What a schema says that is no constraint for anybody,
// an unknown "format" for example, is listed in notes().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "text/text_tools.h"
#include "text/tokenizer.h"

namespace beryl {

struct CallSpec {
  CallNotation notation = CallNotation::kTagged;
  std::string tools = {};   // OpenAI's list as JSON; a tool's name, and its arguments by its schema (tool_grammar.h)
  bool single = false;      // one call, else one or more
};

struct ConstraintSpec {
  enum class Kind : uint8_t {
    kNothing,     // calls only
    kText,        // any text; no call that `calls` does not describe is in it
    kJsonObject,  // any JSON object; text is not used
    kJsonSchema,  // text: the schema
    kRegex,       // text: matches the whole reply
    kGrammar,     // text: EBNF as xgrammar writes it (GBNF is much the same); the rule "root" is the reply. Not from
                  // strangers: a grammar of counts within counts may take for ever, and cannot be told from others
  };
  Kind kind = Kind::kJsonObject;
  std::string text = {};
  std::optional<CallSpec> calls = std::nullopt;   // may come instead; where calls are opened by tokens, also within text
};

// Whether this build has grammars.
bool has_constraints();

// One reply's state. Cheap to fork; one thread at a time.
class Constraint {
 public:
  Constraint(Constraint&&) noexcept;
  Constraint& operator=(Constraint&&) noexcept;
  ~Constraint();

  // Ids that may come next, [mask_words()], bit id % 32 of word id / 32. False, and no bit is set, when nothing may:
  // the reply is finished, or the vocabulary has no token that would go on.
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
  friend class ConstraintCompiler;
  std::unique_ptr<const Data> data_;
};

class ConstraintCompiler {
 public:
  // model_vocab: ids from there on are never allowed. The tokenizer outlives the compiler: what is made of it takes a
  // quarter of a second for a large vocabulary, so the first compilation makes it.
  ConstraintCompiler(const Tokenizer& tokenizer, int64_t model_vocab);
  ~ConstraintCompiler();
  ConstraintCompiler(const ConstraintCompiler&) = delete;
  ConstraintCompiler& operator=(const ConstraintCompiler&) = delete;

  // Makes what is made of the vocabulary, which the first compilation would else do. Throws nothing that matters: that tries again.
  void prepare();
  // Those that were used last are kept, within a bound of bytes. May be called by many threads at once. Throws
  // Error(kBadInput): no such thing as the text says, or nothing satisfies it; Error(kUnsupported): it cannot be expressed, or
  // its masks would take too long (of a grammar that is not looked at). is_tried: that has been looked at by another process.
  std::shared_ptr<const CompiledConstraint> compile(const ConstraintSpec& spec, bool is_tried = false);
  // Of those that are kept; null: it is not there.
  std::shared_ptr<const CompiledConstraint> find(const ConstraintSpec& spec);
  // Equal for equal specs only.
  static std::string key_of(const ConstraintSpec& spec);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace beryl
