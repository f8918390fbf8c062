// What somebody says in a chat, one message after the other: typed on a terminal or piped in, of one line or several.
//
// A message goes on in the next line where it ends in a backslash, and over all lines between """ and """. On a terminal that can edit
// also Alt-Enter makes a line, and what is pasted stays together.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/console.h"
#include "cli/line_editor.h"

namespace beryl::cli {

// Lines put together. Knows no terminal.
class MessageLines {
 public:
  // True: the message is whole, and take() has it.
  bool add(std::string line);
  // Has a message begun that is not whole?
  bool is_open() const { return open_; }
  std::string take();

 private:
  std::string head_;                  // a command's name before a block
  std::vector<std::string> lines_;
  bool open_ = false;
  bool in_block_ = false;    // between """ and """
};

class ChatInput {
 public:
  // history_file, completions: as LineEditor has them. `interrupts` must outlive it.
  ChatInput(const InterruptCatcher& interrupts, const std::string& history_file, std::vector<std::string> completions);

  // The next message or command. kEndOfInput: there is none; kInterrupted: Ctrl-C came, and what was said so far is lost.
  Line next();
  // Somebody sits there, and is prompted.
  bool is_interactive() const { return interactive_; }

 private:
  Line read(const std::string& prompt);

  const bool interactive_;
  std::optional<LineEditor> editor_;   // where lines can be edited
};

}  // namespace beryl::cli
