// Conversations as prompts, for one model: through the model's own Jinja template where it has one, else in a built-in
// format (chat_format.h).
//
// In what a template writes, only its own text is searched for control tokens. Each character of the output knows
// whether it came from the conversation, so whatever users, tools and models write stays text.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat_format.h"
#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl {

class ChatWriter {
 public:
  virtual ~ChatWriter() = default;

  // messages: OpenAI's list, as for format_chat. Throws Error(kBadInput) for what the model's format can not hold. May
  // be called by several threads at once.
  virtual ChatPrompt write(const nlohmann::ordered_json& messages, const ChatOptions& options) const = 0;

  // "the model's template", "Gemma 4": for people.
  virtual std::string_view name() const = 0;
  // Whether ChatOptions::enable_thinking changes anything.
  virtual bool can_think() const = 0;
  // What was assumed, one line each.
  const std::vector<std::string>& warnings() const { return warnings_; }

 protected:
  std::vector<std::string> warnings_;
};

// The format that `format` describes.
std::unique_ptr<ChatWriter> make_built_in_writer(ChatFormat format);

// A template's text, from a model or a file. name: for people and messages. The tokenizer must outlive the writer.
// Throws Error(kBadInput) for a template that Jinja would not compile, and for what is not supported.
//
// The template sees what Hugging Face's transformers would give it: messages without members that are null, reasoning
// under its three names, tools, documents (none), add_generation_prompt, bos_token, eos_token; also enable_thinking and
// thinking, and options.template_variables. Templates differ in the form that they expect; the writer finds out with
// small conversations of its own whether
//   * arguments of tool calls are objects, or JSON as text. Text that is no JSON, which models write at times, is given as it
//     is; where the template can not show that, write() throws Error(kBadInput);
//   * content may be a list of parts, must be one, or must be a string.
// Likewise it finds the turn markers that the template writes and the vocabulary lacks; they become ordinary text, with a
// warning. A prompt's warnings name what a tool's schema says and the template leaves out.
std::unique_ptr<ChatWriter> make_template_writer(std::string name, std::string_view source, const Tokenizer& tokenizer);

enum class TemplateChoice { kAuto, kBuiltIn, kFile };

// The writer for a model. kAuto: the checkpoint's own template; where it has none, or one that can not be used or is made
// for another vocabulary (with a warning), the built-in format. Null when there is neither. Throws Error for a file that
// can not be used.
std::unique_ptr<ChatWriter> make_chat_writer(const Checkpoint& checkpoint, const Tokenizer& tokenizer,
                                             TemplateChoice choice = TemplateChoice::kAuto,
                                             const std::string& file = {});

}  // namespace beryl
