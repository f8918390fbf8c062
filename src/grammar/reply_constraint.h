// What binds one reply, as the engine asks for it: a constraint on what is said behind the thoughts, and a number of tokens
// after which a thought is closed.
//
// A thought is bound by nothing but its budget: it ends by its own token, and only then the constraint begins. A reply that
// must satisfy something can not end within a thought.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/request.h"
#include "grammar/constraint.h"
#include "text/tokenizer.h"

namespace beryl {

struct ReplyBounds {
  std::shared_ptr<const CompiledConstraint> content;   // null: anything
  bool in_thought = false;               // the prompt has opened a thought
  bool may_think = false;                // content: a thought may be opened before it
  int64_t thought_budget = INT64_MAX;    // tokens of thoughts
};

// Null: nothing is bound. n_ids: the model's.
std::unique_ptr<TokenConstraint> bind_reply(const ReplyBounds& bounds, const Tokenizer& tokenizer, int64_t n_ids);

}  // namespace beryl
