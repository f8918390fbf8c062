#include "cli/console.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

volatile sig_atomic_t interrupt_seen = 0;
// Whatever thread the signal finds, a byte in here wakes the one that waits for a line.
int interrupt_pipe[2] = {-1, -1};

extern "C" void note_interrupt(int) {
  const int saved_errno = errno;
  if (interrupt_seen != 0) {
    // The first one has not been acted upon: whoever asks twice means it.
    signal(SIGINT, SIG_DFL);
    raise(SIGINT);
  }
  interrupt_seen = 1;
  // The pipe does not block and is never full: one byte, taken out before the next.
  [[maybe_unused]] const ssize_t n = ::write(interrupt_pipe[1], "", 1);
  errno = saved_errno;
}

// 0 when all was written, else errno.
int write_all(int stream, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(stream, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return 0;
}

std::string one_line(std::string_view text) {
  std::string line = harmless_on_terminal(text);   // names from files may hold anything
  std::replace_if(
      line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return line;
}

// Waits for standard input. False when a caught Ctrl-C came, be it before the call.
bool wait_for_input() {
  pollfd inputs[2] = {{kStandardInput, POLLIN, 0}, {interrupt_pipe[0], POLLIN, 0}};
  while (interrupt_seen == 0)
    if (::poll(inputs, 2, -1) > 0 && inputs[0].revents != 0) break;
  return interrupt_seen == 0;
}

[[noreturn]] void fail_to_read() {
  throw Error(ErrorCode::kIo, fmt::format("standard input cannot be read: {}", std::strerror(errno)));
}

}  // namespace

void open_missing_streams() {
  for (int stream = kStandardInput; stream <= kStandardError; ++stream)
    if (fcntl(stream, F_GETFD) == -1 && errno == EBADF)
      // Opened the wrong way round, so that its use fails as that of a closed one. open takes the lowest free number,
      // which is this one.
      if (::open("/dev/null", stream == kStandardInput ? O_WRONLY : O_RDONLY) < 0) std::abort();
}

bool is_terminal(int stream) { return isatty(stream) != 0; }

bool takes_colour(int stream) {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  return is_terminal(stream) && (no_colour == nullptr || *no_colour == '\0') && terminal != nullptr &&
         std::string_view(terminal) != "dumb";
}

void write_output(std::string_view text) {
  if (const int error = write_all(kStandardOutput, text))
    throw Error(ErrorCode::kIo, fmt::format("standard output cannot be written: {}", std::strerror(error)));
}

void write_error(std::string_view text) { write_all(kStandardError, text); }

void print_error(std::string_view message) { write_error(fmt::format("beryl: {}\n", one_line(message))); }

void print_warning(std::string_view message) { write_error(fmt::format("beryl: warning: {}\n", one_line(message))); }

void print_note(std::string_view line) {
  const std::string harmless = one_line(line);
  write_error(takes_colour(kStandardError) ? fmt::format("\x1b[2m{}\x1b[0m\n", harmless) : harmless + '\n');
}

std::string harmless_on_terminal(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = static_cast<size_t>(std::max(utf8_sequence(text.substr(0, 4)), 1));
    const auto lead = static_cast<uint8_t>(text[0]);
    const bool c0 = (lead < 0x20 && lead != '\n' && lead != '\t') || lead == 0x7f;
    const bool c1 = length == 2 && lead == 0xc2 && static_cast<uint8_t>(text[1]) < 0xa0;
    if (c0 || c1) {
      result += "\xef\xbf\xbd";
    } else {
      result += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  return result;
}

std::string read_input() {
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = ::read(kStandardInput, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_to_read();
    if (n == 0) return text;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > kMaxInputBytes)
      throw Error(ErrorCode::kBadInput, fmt::format("standard input holds more than the {} bytes that a prompt may have", kMaxInputBytes));
  }
}

Line read_line() {
  static std::string pending;   // read, but behind the line that was given
  size_t searched = 0;
  for (;;) {
    const size_t newline = pending.find('\n', searched);
    searched = pending.size();
    if (newline != std::string::npos) {
      Line line{LineEnd::kLine, pending.substr(0, newline)};
      pending.erase(0, newline + 1);
      return line;
    }
    if (!wait_for_input()) {
      pending.clear();
      return {LineEnd::kInterrupted, {}};
    }
    char buffer[4096];
    const ssize_t n = ::read(kStandardInput, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    // A terminal that is gone reads as EIO.
    if (n < 0 && errno != EIO) fail_to_read();
    if (n <= 0) {
      if (pending.empty()) return {LineEnd::kEndOfInput, {}};
      Line line{LineEnd::kLine, std::move(pending)};
      pending.clear();
      return line;
    }
    pending.append(buffer, static_cast<size_t>(n));
    if (searched > kMaxInputBytes)
      throw Error(ErrorCode::kBadInput, fmt::format("a line of standard input is longer than {} bytes", kMaxInputBytes));
  }
}

InterruptCatcher::InterruptCatcher() {
  interrupt_seen = 0;
  if (::pipe2(interrupt_pipe, O_CLOEXEC | O_NONBLOCK) != 0)
    throw Error(ErrorCode::kIo, fmt::format("no pipe for Ctrl-C: {}", std::strerror(errno)));
  struct sigaction action = {};
  action.sa_handler = note_interrupt;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
}

InterruptCatcher::~InterruptCatcher() {
  signal(SIGINT, SIG_DFL);
  for (int& end : interrupt_pipe) ::close(std::exchange(end, -1));
}

bool InterruptCatcher::interrupted() const { return interrupt_seen != 0; }

int InterruptCatcher::descriptor() const { return interrupt_pipe[0]; }

bool PromptInterrupts::is_second() {
  if (warned_) return true;
  print_note("Ctrl-C once more, Ctrl-D or /exit ends.");
  warned_ = true;
  return false;
}

void InterruptCatcher::clear() {
  // In this order, so that a signal in between leaves the flag set, which is what counts.
  interrupt_seen = 0;
  char byte;
  while (::read(interrupt_pipe[0], &byte, 1) > 0) {
  }
}

}  // namespace beryl::cli
