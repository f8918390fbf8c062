#include "cli/conversation.h"

#include "base/error.h"

namespace beryl::cli {
namespace {

nlohmann::ordered_json message(const char* role, const std::string& text) {
  return {{"role", role}, {"content", text}};
}

}  // namespace

Conversation::Conversation(const ChatFormat& format, const Tokenizer& tokenizer, const std::string& system_text,
                           bool think)
    : format_(format), tokenizer_(tokenizer), system_text_(system_text), think_(think) {
  reset();
}

void Conversation::reset() {
  messages_ = nlohmann::ordered_json::array();
  if (!system_text_.empty()) messages_.push_back(message("system", system_text_));
  cache_holds_all_ = false;
  unread_.clear();
}

ChatOptions Conversation::options() const {
  ChatOptions options;
  options.enable_thinking = think_;
  return options;
}

ChatPrompt Conversation::between_replies(const std::string& user_text) const {
  // A conversation whose reply is known, written by the format; what follows the reply is wanted.
  const std::string reply = "REPLY";
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  messages.push_back(message("user", "-"));
  messages.push_back(message("assistant", reply));
  messages.push_back(message("user", user_text));
  ChatPrompt prompt = format_chat(format_, messages, options());
  for (size_t i = 0; i < prompt.pieces.size(); ++i) {
    PromptPiece& piece = prompt.pieces[i];
    const size_t at = piece.control ? std::string::npos : piece.text.find(reply);
    if (at == std::string::npos) continue;
    piece.text.erase(0, at + reply.size());
    prompt.pieces.erase(prompt.pieces.begin(),
                        prompt.pieces.begin() + static_cast<std::ptrdiff_t>(i + piece.text.empty()));
    return prompt;
  }
  BERYL_CHECK(false, "a chat format writes every reply");
}

Turn Conversation::next_turn(const std::string& user_text) const {
  Turn turn;
  if (!cache_holds_all_) {
    nlohmann::ordered_json messages = messages_;
    messages.push_back(message("user", user_text));
    const ChatPrompt prompt = format_chat(format_, messages, options());
    turn.ids = encode_prompt(tokenizer_, prompt);
    turn.in_thought = prompt.in_thought;
    return turn;
  }
  const ChatPrompt prompt = between_replies(user_text);
  std::vector<int32_t> ids = encode_prompt(tokenizer_, prompt);
  // It is no beginning, so the BOS that prompts get goes.
  if (tokenizer_.adds_bos() && tokenizer_.bos_id() && !ids.empty() && ids.front() == *tokenizer_.bos_id())
    ids.erase(ids.begin());
  turn.ids = unread_;
  turn.ids.insert(turn.ids.end(), ids.begin(), ids.end());
  turn.continues = true;
  turn.in_thought = prompt.in_thought;
  return turn;
}

void Conversation::add_reply(const std::string& user_text, const std::string& text, const GenerateResult& result,
                             bool has_thought) {
  messages_.push_back(message("user", user_text));
  messages_.push_back(message("assistant", text));
  cache_holds_all_ = result.finish != FinishReason::kFailed && !has_thought;
  // The id that ended the reply is the end of the turn, which the format writes itself (it may also be another id that
  // ends texts, and that has no place within one).
  unread_ = result.finish == FinishReason::kStop ? std::vector<int32_t>() : result.unseen;
}

}  // namespace beryl::cli
