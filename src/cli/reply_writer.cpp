#include "cli/reply_writer.h"

#include <fmt/format.h>

#include "cli/console.h"

namespace beryl::cli {

ReplyWriter::ReplyWriter(const Tokenizer& tokenizer, bool show_special, bool in_thought)
    : parser_(tokenizer, in_thought, false),
      show_special_(show_special),
      named_stream_(tokenizer, true),
      has_thought_(in_thought),
      to_terminal_(is_terminal(kStandardOutput)),
      dims_(takes_colour(kStandardError)) {}

void ReplyWriter::push(int32_t id) {
  const bool was_in_thought = parser_.in_thought();
  ReplyDelta delta;
  parser_.push(id, delta);
  has_thought_ = has_thought_ || parser_.in_thought();
  if (show_special_ && parser_.in_thought() && !was_in_thought) write(named_stream_.finish());
  // The tokens around a thought are shown as a part of it.
  take(delta, show_special_ ? named_stream_.push(id) : "", was_in_thought || parser_.in_thought());
  if (was_in_thought && !parser_.in_thought()) {
    if (show_special_) write_thought(named_stream_.finish());
    end_line_of_thought();
  }
}

void ReplyWriter::finish() {
  ReplyDelta delta;
  const bool in_thought = parser_.in_thought();
  parser_.finish(delta);
  take(delta, show_special_ ? named_stream_.finish() : "", in_thought);
  if (in_thought) {
    end_line_of_thought();
  } else if (line_open_) {
    write("\n");
  }
}

void ReplyWriter::take(const ReplyDelta& delta, const std::string& named, bool in_thought) {
  answer_ += delta.content;
  thought_ += delta.reasoning;
  if (!show_special_) {
    write(delta.content);
    write_thought(delta.reasoning);
  } else if (in_thought) {
    write_thought(named);
  } else {
    write(named);
  }
}

void ReplyWriter::end_line_of_thought() {
  if (line_open_) write_thought("\n");
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
