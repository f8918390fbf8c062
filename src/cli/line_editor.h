// A line from a terminal, edited as it is typed: keys as in Emacs, history, search. The one file that knows libedit.
//
// libedit and not readline: readline's licence (GPL) would become the program's.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/console.h"

namespace beryl::cli {

class LineEditor {
 public:
  // history_file: read, and written after each remember(), for its owner's eyes only; empty: the history ends with the program.
  // completions: what Tab makes of the beginning of a line. `interrupts` must outlive it.
  LineEditor(const InterruptCatcher& interrupts, std::string history_file, std::vector<std::string> completions);
  ~LineEditor();
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  // Can lines be edited here? Standard input and standard error are a terminal that moves its cursor.
  static bool is_possible();

  // May hold newlines: Alt-Enter makes one, and what is pasted keeps its own. kInterrupted: Ctrl-C came; the line is lost.
  Line read(const std::string& prompt);
  void remember(const std::string& text);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace beryl::cli
