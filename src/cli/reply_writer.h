// A reply as the user sees it, token by token: the answer on standard output, thoughts apart from it on standard error.
#pragma once

#include <cstdint>
#include <string>

#include "text/reply_parser.h"
#include "text/text_stream.h"
#include "text/tokenizer.h"

namespace beryl::cli {

// One reply. The tokenizer must outlive it.
class ReplyWriter {
 public:
  // show_special: special tokens by name. in_thought: the prompt has opened a thought, so the reply begins inside it.
  ReplyWriter(const Tokenizer& tokenizer, bool show_special, bool in_thought);

  // Writes what this token completes. Throws Error(kIo).
  void push(int32_t id);
  // Writes what still waits, and ends the line. Also after an interruption.
  void finish();

  // Valid after finish. Without thoughts and special tokens.
  const std::string& answer() const { return answer_; }
  const std::string& thought() const { return thought_; }
  bool has_thought() const { return has_thought_; }

 private:
  // What came; named: the same as named_stream_ gives it.
  void take(const ReplyDelta& delta, const std::string& named, bool in_thought);
  void write(const std::string& text);
  void write_thought(const std::string& text);
  void end_line_of_thought();

  ReplyParser parser_;
  const bool show_special_;
  TextStream named_stream_;                    // with show_special: what is shown
  bool has_thought_ = false;
  bool line_open_ = false;                     // the last character shown, on either stream, was no newline
  bool to_terminal_ = false;
  bool dims_ = false;                          // thoughts
  std::string answer_, thought_;
};

}  // namespace beryl::cli
