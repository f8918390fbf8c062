// What the program says and hears: its standard streams, terminals, Ctrl-C.
//
// Standard output is written at once and every failure counts (a full disk, a closed pipe). Standard error takes
// warnings and statistics, a line each; when it cannot be written there is nobody to tell.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace beryl::cli {

inline constexpr int kStandardInput = 0;
inline constexpr int kStandardOutput = 1;
inline constexpr int kStandardError = 2;

// Call first in main. A standard stream that the caller has closed becomes one that fails, so that no file opened later
// takes its number and is written to by mistake.
void open_missing_streams();

bool is_terminal(int stream);
// Escape codes for colour are welcome: a terminal, and neither NO_COLOR nor TERM=dumb.
bool takes_colour(int stream);

// Throws Error(kIo).
void write_output(std::string_view text);
void write_error(std::string_view text);
// One line each; line breaks within become spaces.
void print_error(std::string_view message);     // "beryl: MESSAGE"
void print_warning(std::string_view message);   // "beryl: warning: MESSAGE"
// A line of side information, dim on a terminal.
void print_note(std::string_view line);

// What a model wrote, for a terminal: control characters that could steer it (all but newline and tab) become U+FFFD.
// Elsewhere text goes out as it is.
std::string harmless_on_terminal(std::string_view text);

inline constexpr size_t kMaxInputBytes = 64 << 20;   // longer than any context; /dev/zero has no end
// All of standard input, byte for byte. Throws Error(kIo), or Error(kBadInput) for more than kMaxInputBytes.
std::string read_input();

enum class LineEnd : uint8_t { kLine, kEndOfInput, kInterrupted };
struct Line {
  LineEnd end = LineEnd::kLine;
  std::string text;      // without the newline
};
// The next line of standard input. kInterrupted: a caught Ctrl-C came; what was typed is lost. Throws Error(kIo), or Error(kBadInput)
// for more than kMaxInputBytes.
Line read_line();

// While one lives, Ctrl-C only sets a flag, except that a second one before the flag is cleared ends the program as
// usual. At most one at a time.
class InterruptCatcher {
 public:
  InterruptCatcher();
  ~InterruptCatcher();
  InterruptCatcher(const InterruptCatcher&) = delete;
  InterruptCatcher& operator=(const InterruptCatcher&) = delete;

  bool interrupted() const;
  void clear();
  int descriptor() const;   // can be read from once interrupted
};

// Ctrl-C where a line is awaited: the first is answered with a hint, a second with nothing in between ends the program.
class PromptInterrupts {
 public:
  bool is_second();
  void reset() { warned_ = false; }

 private:
  bool warned_ = false;
};

inline constexpr int kExitError = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitInterrupted = 130;   // as a shell reports a program that SIGINT ended

}  // namespace beryl::cli
