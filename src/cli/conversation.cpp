#include "cli/conversation.h"

namespace beryl::cli {
namespace {

constexpr const char* kThought = "reasoning_content";

nlohmann::ordered_json message(const char* role, const std::string& text) {
  return {{"role", role}, {"content", text}};
}

}  // namespace

Conversation::Conversation(const ChatWriter& writer, const Tokenizer& tokenizer, const std::string& system_text,
                           bool think)
    : writer_(writer), tokenizer_(tokenizer), system_text_(system_text), think_(think) {}

void Conversation::forget_cache() {
  cache_holds_all_ = false;
  unread_.clear();
}

void Conversation::set_messages(Json messages) {
  messages_ = std::move(messages);
  forget_cache();
}

void Conversation::set_system_text(const std::string& text) {
  system_text_ = text;
  forget_cache();
}

void Conversation::set_thinking(bool think) {
  think_ = think;
  forget_cache();
}

void Conversation::drop_first(size_t n_exchanges) {
  messages_.erase(messages_.begin(), messages_.begin() + static_cast<std::ptrdiff_t>(2 * n_exchanges));
  forget_cache();
}

std::string Conversation::drop_last() {
  const std::string user_text = messages_[messages_.size() - 2]["content"].get<std::string>();
  messages_.erase(messages_.end() - 2, messages_.end());
  forget_cache();
  return user_text;
}

ChatPrompt Conversation::write(const Json& messages) const {
  ChatOptions options;
  options.enable_thinking = think_;
  Json all = messages;
  for (Json& each : all) each.erase(kThought);
  if (!system_text_.empty()) all.insert(all.begin(), message("system", system_text_));
  return writer_.write(all, options);
}

std::optional<ChatPrompt> Conversation::between_replies(const std::string& user_text) const {
  // The conversation with a reply that is easily found; what follows it is wanted. What lies before it must be what was
  // written before that reply, but for the opening of a thought that the reply did not have (Gemma 4 drops it).
  const std::string reply = "beryl's reply";
  Json messages = messages_;
  messages.back() = message("assistant", reply);
  messages.push_back(message("user", user_text));
  ChatPrompt prompt = write(messages);
  std::string before;
  for (size_t i = 0; i < prompt.pieces.size(); ++i) {
    PromptPiece& piece = prompt.pieces[i];
    const size_t at = piece.control ? std::string::npos : piece.text.find(reply);
    if (at == std::string::npos) {
      before += piece.text;
      continue;
    }
    before += piece.text.substr(0, at);
    if (!written_.starts_with(before)) return std::nullopt;
    piece.text.erase(0, at + reply.size());
    prompt.pieces.erase(prompt.pieces.begin(),
                        prompt.pieces.begin() + static_cast<std::ptrdiff_t>(i + piece.text.empty()));
    return prompt;
  }
  return std::nullopt;
}

Turn Conversation::next_turn(const std::string& user_text) const {
  Turn turn;
  const std::optional<ChatPrompt> more = cache_holds_all_ ? between_replies(user_text) : std::nullopt;
  if (!more) {
    Json messages = messages_;
    messages.push_back(message("user", user_text));
    const ChatPrompt prompt = write(messages);
    turn.ids = encode_prompt(tokenizer_, prompt);
    turn.in_thought = prompt.in_thought;
    return turn;
  }
  std::vector<int32_t> ids = encode_prompt(tokenizer_, *more);
  // It is no beginning, so the BOS that prompts get goes.
  if (tokenizer_.adds_bos() && tokenizer_.bos_id() && !ids.empty() && ids.front() == *tokenizer_.bos_id())
    ids.erase(ids.begin());
  turn.ids = unread_;
  turn.ids.insert(turn.ids.end(), ids.begin(), ids.end());
  turn.continues = true;
  turn.in_thought = more->in_thought;
  return turn;
}

void Conversation::add_reply(const std::string& user_text, const std::string& text, const std::string& thought,
                             const GenerateResult& result, bool has_thought) {
  messages_.push_back(message("user", user_text));
  written_ = write(messages_).text();
  messages_.push_back(message("assistant", text));
  if (!thought.empty()) messages_.back()[kThought] = thought;
  cache_holds_all_ = result.finish != FinishReason::kFailed && !has_thought;
  // The id that ended the reply is the end of the turn, which the format writes itself (it may also be another id that
  // ends texts, and that has no place within one).
  unread_ = result.finish == FinishReason::kStop ? std::vector<int32_t>() : result.unseen;
}

}  // namespace beryl::cli
