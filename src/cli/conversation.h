// A conversation in a model's chat format, as the ids that each turn adds to what the sequence holds.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/generate.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace beryl::cli {

struct Turn {
  std::vector<int32_t> ids;
  bool continues = false;    // appended to what the sequence holds; else these are all ids
  bool in_thought = false;   // the reply begins inside a thought
};

// The sequence keeps what it has read: a turn is the end of the last reply, the user's message, and the opening of the
// next reply. A conversation is written anew, in full, only when what lies back is to be written in another way (a reply's
// thoughts are dropped from history, a system text moves to the last message, somebody has changed it), or when the last reply
// failed. The tokenizer and the writer must outlive it.
class Conversation {
 public:
  using Json = nlohmann::ordered_json;
  Conversation(const ChatWriter& writer, const Tokenizer& tokenizer, const std::string& system_text, bool think);

  // What to feed for this message; nothing changes until the reply is added. Throws Error(kBadInput) when the format
  // cannot express it.
  Turn next_turn(const std::string& user_text) const;
  // The message was fed and answered. text: the reply without thoughts; thought: these. (A thought that was opened may be empty.)
  void add_reply(const std::string& user_text, const std::string& text, const std::string& thought, const GenerateResult& result,
                 bool has_thought);

  // The user's messages and the replies, in turn, as OpenAI's list; thoughts, which the model is not told again, are
  // reasoning_content beside the reply.
  const Json& messages() const { return messages_; }
  size_t n_exchanges() const { return messages_.size() / 2; }
  const std::string& system_text() const { return system_text_; }
  bool thinks() const { return think_; }

  // What changes the conversation. After each the next turn writes it whole.
  void set_messages(Json messages);
  void set_system_text(const std::string& text);
  void set_thinking(bool think);
  void drop_first(size_t n_exchanges);      // no more than there are
  std::string drop_last();                  // one exchange, and there must be one; returns the user's message
  void reset() { set_messages(Json::array()); }
  // The sequence does not hold what add_reply believes.
  void forget_cache();

 private:
  // The prompt for these messages behind the system text.
  ChatPrompt write(const Json& messages) const;
  // What lies between the last reply and the next one in the format: the end of the turn, the user's, the opening.
  // nullopt when the format writes what comes before in another way than the sequence holds it.
  std::optional<ChatPrompt> between_replies(const std::string& user_text) const;

  const ChatWriter& writer_;
  const Tokenizer& tokenizer_;
  std::string system_text_;             // empty: none
  bool think_ = false;
  Json messages_ = Json::array();
  bool cache_holds_all_ = false;        // the sequence holds all turns so far, as the format would write them
  std::string written_;                 // the prompt that the last reply answered, in full
  std::vector<int32_t> unread_;         // sampled, not yet read by the model; belongs before the next turn
};

}  // namespace beryl::cli
