#include "cli/chat_input.h"

#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace beryl::cli {
namespace {

constexpr std::string_view kBlock = "\"\"\"";

// Where a block begins in the first line of a message: at once, or as what a command is given. npos: nowhere.
size_t find_block(std::string_view line) {
  if (line.starts_with(kBlock)) return 0;
  if (!line.starts_with('/')) return std::string_view::npos;
  const size_t word = line.find_first_not_of(' ', std::min(line.find(' '), line.size()));
  return word != std::string_view::npos && line.substr(word).starts_with(kBlock) ? word : std::string_view::npos;
}

}  // namespace

bool MessageLines::add(std::string line) {
  if (line.ends_with('\r')) line.pop_back();
  if (!open_) {
    open_ = true;
    if (const size_t at = find_block(line); at != std::string::npos) {
      in_block_ = true;
      head_ = line.substr(0, at);
      line.erase(0, at + kBlock.size());
      if (line.empty()) return false;   // the text begins in the next line
    }
  }
  bool whole = !in_block_;
  if (in_block_ && line.ends_with(kBlock)) {
    line.resize(line.size() - kBlock.size());
    whole = true;
    if (line.empty()) return true;      // the text ended in the line before
  } else if (!in_block_ && line.ends_with('\\')) {
    line.pop_back();
    whole = false;
  }
  lines_.push_back(std::move(line));
  return whole;
}

std::string MessageLines::take() {
  open_ = in_block_ = false;
  std::string text = fmt::format("{}{}", std::exchange(head_, {}), fmt::join(lines_, "\n"));
  lines_.clear();
  return text;
}

ChatInput::ChatInput(const InterruptCatcher& interrupts, const std::string& history_file, std::vector<std::string> completions)
    : interactive_(is_terminal(kStandardInput)) {
  if (LineEditor::is_possible()) editor_.emplace(interrupts, history_file, std::move(completions));
}

Line ChatInput::read(const std::string& prompt) {
  if (editor_) return editor_->read(prompt);
  if (interactive_) write_error(prompt);
  return read_line();
}

Line ChatInput::next() {
  MessageLines lines;
  for (;;) {
    Line line = read(lines.is_open() ? ". " : "> ");
    if (line.end == LineEnd::kInterrupted || (line.end == LineEnd::kEndOfInput && !lines.is_open())) {
      if (interactive_) write_error("\n");
      return line;
    }
    // Where the input ends within a message, that was it.
    if (line.end == LineEnd::kLine && !lines.add(std::move(line.text))) continue;
    std::string text = lines.take();
    if (editor_ && text.find_first_not_of(" \t\n") != std::string::npos) editor_->remember(text);
    return {LineEnd::kLine, std::move(text)};
  }
}

}  // namespace beryl::cli
