#include "grammar/reply_constraint.h"

#include <algorithm>

#include "base/error.h"
#include "grammar/tool_grammar.h"
#include "text/reply_parser.h"

namespace beryl {
namespace {

class ReplyConstraint final : public TokenConstraint {
 public:
  ReplyConstraint(const ReplyBounds& bounds, const ThoughtTokens& thoughts, const Tokenizer& tokenizer, int64_t n_ids)
      : thoughts_(thoughts), may_think_(bounds.may_think), n_ids_(n_ids) {
    state_.in_thought = bounds.in_thought;
    state_.left = bounds.thought_budget;
    if (bounds.content == nullptr) return;
    content_.emplace(bounds.content->start());
    // Neither ends the reply, nor opens a call.
    not_in_thoughts_.assign(tokenizer.stop_ids().begin(), tokenizer.stop_ids().end());
    if (const ToolTokens calls = find_tool_tokens(tokenizer); !calls.marks.empty()) not_in_thoughts_.push_back(calls.marks[0].id);
    std::erase_if(not_in_thoughts_, [&](int32_t id) { return id >= n_ids; });
  }

  Next fill(std::span<uint32_t> mask) override {
    if (state_.in_thought) {
      if (state_.left <= 0) {
        set(mask, *thoughts_.end);
        return Next::kMasked;
      }
      if (!content_) return Next::kAnything;
      const auto n_words = static_cast<std::ptrdiff_t>(n_ids_ / 32);
      std::fill(mask.begin(), mask.begin() + n_words, ~0u);
      if (n_ids_ % 32 != 0) mask[static_cast<size_t>(n_words)] = (1u << (n_ids_ % 32)) - 1;
      for (const int32_t id : not_in_thoughts_) mask[static_cast<size_t>(id) / 32] &= ~(1u << (id % 32));
      return Next::kMasked;
    }
    if (!content_) return Next::kAnything;
    if (!content_->fill_mask(mask.first(content_->mask_words()))) {
      if (content_->is_complete()) return Next::kNothing;
      throw Error(ErrorCode::kUnsupported, "none of the model's tokens goes on with what the reply must be here");
    }
    if (may_begin_thought()) set(mask, *thoughts_.begin);
    return Next::kMasked;
  }

  void accept(int32_t id) override {
    past_.push_back(state_);
    if (past_.size() > kMaxRollback) past_.pop_front();
    state_.in_content = false;
    if (state_.in_thought) {
      if (id == thoughts_.end) state_.in_thought = false;
      state_.left -= state_.in_thought;
    } else if (thoughts_.begin && id == *thoughts_.begin && (!content_ || may_begin_thought())) {
      state_.in_thought = state_.thought = true;
      --state_.left;
    } else if (content_) {
      if (!content_->accept(id)) throw Error(ErrorCode::kUnsupported, "a token came that the reply must not have here");
      state_.in_content = true;
    }
  }

  void rollback(int n) override {
    BERYL_CHECK(n >= 0 && static_cast<size_t>(n) <= past_.size(), "only what was accepted can be taken back");
    int n_content = 0;
    for (; n > 0; --n) {
      n_content += state_.in_content;
      state_ = past_.back();
      past_.pop_back();
    }
    if (n_content > 0) content_->rollback(n_content);
  }

 private:
  struct State {
    bool in_thought = false;
    bool thought = false;      // there was one that the reply itself has opened
    bool in_content = false;   // the last id was content's
    int64_t left = 0;          // tokens of thoughts
  };

  static void set(std::span<uint32_t> mask, int32_t id) { mask[static_cast<size_t>(id) / 32] |= 1u << (id % 32); }
  // Before the content, once.
  bool may_begin_thought() const {
    return may_think_ && thoughts_.begin && !state_.thought && state_.left > 0 && content_->n_accepted() == 0;
  }

  const ThoughtTokens thoughts_;
  const bool may_think_;
  const int64_t n_ids_;
  std::vector<int32_t> not_in_thoughts_;
  std::optional<Constraint> content_;
  State state_;
  std::deque<State> past_;     // before each of the last ids
};

}  // namespace

std::unique_ptr<TokenConstraint> bind_reply(const ReplyBounds& bounds, const Tokenizer& tokenizer, int64_t n_ids) {
  const ThoughtTokens thoughts = find_thought_tokens(tokenizer);
  ReplyBounds possible = bounds;
  if (!thoughts.end) {   // thoughts can not be told apart, so there are none
    possible.in_thought = possible.may_think = false;
    possible.thought_budget = INT64_MAX;
  }
  if (possible.content == nullptr && possible.thought_budget == INT64_MAX) return nullptr;
  return std::make_unique<ReplyConstraint>(possible, thoughts, tokenizer, n_ids);
}

}  // namespace beryl
