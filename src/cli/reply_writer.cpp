#include "cli/reply_writer.h"

#include <fmt/format.h>

#include "cli/console.h"

namespace beryl::cli {

// Gemma 4 is the only family that thinks aloud; others do not have these tokens.
ReplyWriter::ReplyWriter(const Tokenizer& tokenizer, bool show_special, bool in_thought)
    : tokenizer_(tokenizer),
      stream_(tokenizer, show_special),
      plain_(tokenizer, false),
      thought_begin_(tokenizer.find_special("<|channel>")),
      thought_end_(tokenizer.find_special("<channel|>")),
      in_thought_(in_thought),
      has_thought_(in_thought),
      to_terminal_(is_terminal(kStandardOutput)),
      dims_(takes_colour(kStandardError)) {}

void ReplyWriter::push(int32_t id) {
  if (thought_begin_ && id == *thought_begin_) {
    write(stream_.finish());
    answer_ += plain_.finish();
    in_thought_ = has_thought_ = true;
  }
  const std::string shown = stream_.push(id);
  if (in_thought_) {
    write_thought(shown);
  } else {
    write(shown);
    answer_ += plain_.push(id);
  }
  if (thought_end_ && id == *thought_end_ && in_thought_) {
    write_thought(stream_.finish());
    if (line_open_) write_thought("\n");
    in_thought_ = false;
  }
}

void ReplyWriter::finish() {
  const std::string rest = stream_.finish();
  if (in_thought_) {
    write_thought(rest);
    if (line_open_) write_thought("\n");
    return;
  }
  write(rest);
  answer_ += plain_.finish();
  if (line_open_) write("\n");
}

void ReplyWriter::write(const std::string& text) {
  if (text.empty()) return;
  write_output(to_terminal_ ? harmless_on_terminal(text) : text);
  line_open_ = text.back() != '\n';
}

void ReplyWriter::write_thought(const std::string& text) {
  if (text.empty()) return;
  const std::string harmless = harmless_on_terminal(text);
  write_error(dims_ ? fmt::format("\x1b[2m{}\x1b[0m", harmless) : harmless);
  line_open_ = text.back() != '\n';
}

}  // namespace beryl::cli
