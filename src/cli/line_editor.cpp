#include "cli/line_editor.h"

#include <fcntl.h>
#include <histedit.h>
#include <poll.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <utility>

#include "text/utf8.h"

namespace beryl::cli {
namespace {

constexpr int kHistoryEntries = 1000;
constexpr size_t kMaxPasteCharacters = 1 << 20;
// Terminals send these around what is pasted, once asked to.
constexpr const char* kPasteOn = "\x1b[?2004h";
constexpr const char* kPasteOff = "\x1b[?2004l";
constexpr std::wstring_view kPasteEnd = L"\x1b[201~";

static_assert(sizeof(wchar_t) == 4, "libedit's characters are code points");

// The terminal has another size, or was taken back after Ctrl-Z: a byte in here, whatever thread the signal finds.
int change_pipe[2] = {-1, -1};

extern "C" void note_change(int) {
  const int saved_errno = errno;
  [[maybe_unused]] const ssize_t n = ::write(change_pipe[1], "", 1);   // does not block; when it is full there is one to be seen
  errno = saved_errno;
}

// While a line is typed the terminal is raw; who ends the program then gets it back as it was.
constexpr int kDeadly[] = {SIGTERM, SIGHUP, SIGQUIT};
termios terminal_before = {};
volatile sig_atomic_t is_raw = 0;

extern "C" void die_of(int number, siginfo_t* info, void*) {
#ifdef SI_KERNEL
  // Ctrl-\ beside a key that was meant: the talk is worth more.
  if (is_raw != 0 && number == SIGQUIT && info->si_code == SI_KERNEL) return;
#endif
  if (is_raw != 0 && tcgetpgrp(kStandardInput) == getpgrp()) {   // in the background it is the shell's, and asking for it would stop this process
    tcsetattr(kStandardInput, TCSANOW, &terminal_before);
    [[maybe_unused]] const ssize_t n = ::write(kStandardError, kPasteOff, std::strlen(kPasteOff));
  }
  signal(number, SIG_DFL);
  raise(number);   // comes when this returns
}

bool take_change() {
  char bytes[64];
  bool any = false;
  while (::read(change_pipe[0], bytes, sizeof bytes) > 0) any = true;
  return any;
}

std::wstring widen(std::string_view text) {
  std::wstring wide;
  for (size_t at = 0; at < text.size();) {
    const DecodedCharacter character = decode_character(text, at);
    wide += character.well_formed ? static_cast<wchar_t>(character.code_point) : L'\xfffd';
    at += character.length;
  }
  return wide;
}

std::string narrow(std::wstring_view wide) {
  std::string text;
  for (wchar_t character : wide) {
    const auto code_point = static_cast<uint32_t>(character);
    const bool is_scalar = code_point <= 0x10ffff && (code_point < 0xd800 || code_point > 0xdfff);
    append_character(text, is_scalar ? code_point : 0xfffd);
  }
  return text;
}

}  // namespace

struct LineEditor::State {
  const InterruptCatcher& interrupts;
  std::string history_file;
  std::vector<std::string> completions;
  EditLine* editor = nullptr;
  HistoryW* history = nullptr;
  std::wstring prompt = {};
  LineEnd end = LineEnd::kLine;      // why the line that is read ends
  std::string bytes = {};            // of a character that has not all come

  static State& of(EditLine* editor) {
    State* state = nullptr;
    el_wget(editor, EL_CLIENTDATA, &state);
    return *state;
  }

  // libedit's questions: the next character, the prompt, and what some keys do.
  static int next_character(EditLine* editor, wchar_t* character) { return of(editor).wait_for_character(*character); }
  static wchar_t* show_prompt(EditLine* editor) { return of(editor).prompt.data(); }
  static unsigned char insert_newline(EditLine* editor, wint_t) {
    return el_winsertstr(editor, L"\n") == 0 ? CC_REFRESH : CC_ERROR;
  }
  static unsigned char paste(EditLine* editor, wint_t) { return of(editor).take_paste(); }
  static unsigned char complete(EditLine* editor, wint_t) { return of(editor).complete_command(); }

  int wait_for_character(wchar_t& character);
  unsigned char take_paste();
  unsigned char complete_command();
};

// 1: a character. Else the line ends here, as `end` says.
int LineEditor::State::wait_for_character(wchar_t& character) {
  for (;;) {
    if (!bytes.empty()) {
      const DecodedCharacter next = decode_character(bytes, 0);
      if (!next.truncated) {
        character = next.well_formed ? static_cast<wchar_t>(next.code_point) : L'\xfffd';
        bytes.erase(0, next.length);
        return 1;
      }
    }
    pollfd inputs[3] = {{kStandardInput, POLLIN, 0}, {interrupts.descriptor(), POLLIN, 0}, {change_pipe[0], POLLIN, 0}};
    if (::poll(inputs, 3, -1) < 0) continue;
    if (interrupts.interrupted()) {
      end = LineEnd::kInterrupted;
      return -1;
    }
    if (take_change()) {
      el_wset(editor, EL_PREP_TERM, 0);   // else it believes that the terminal is as it left it
      el_wset(editor, EL_PREP_TERM, 1);
      el_resize(editor);
      el_wset(editor, EL_REFRESH);
    }
    if (inputs[0].revents == 0) continue;
    char buffer[256];
    const ssize_t n = ::read(kStandardInput, buffer, sizeof buffer);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) {                                      // a terminal that is gone reads as EIO
      end = LineEnd::kEndOfInput;
      return -1;
    }
    bytes.append(buffer, static_cast<size_t>(n));
  }
}

unsigned char LineEditor::State::take_paste() {
  std::wstring text;
  wchar_t character;
  while (!text.ends_with(kPasteEnd)) {
    if (text.size() > kMaxPasteCharacters || wait_for_character(character) != 1) return CC_ERROR;
    text += character;
  }
  text.resize(text.size() - kPasteEnd.size());
  // For a newline terminals send what the Enter key sends. Other control characters have no place in a message.
  std::wstring clean;
  for (wchar_t each : text) {
    if (each == L'\r' || each == L'\n') {
      clean += L'\n';
    } else if (each == L'\t') {
      clean += L"  ";
    } else if (each >= 0x20 && each != 0x7f) {
      clean += each;
    }
  }
  return clean.empty() || el_winsertstr(editor, clean.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
}

unsigned char LineEditor::State::complete_command() {
  const LineInfoW* line = el_wline(editor);
  const std::string typed = narrow({line->buffer, static_cast<size_t>(line->cursor - line->buffer)});
  std::vector<std::string> fits;
  for (const std::string& each : completions)
    if (!typed.empty() && each.starts_with(typed)) fits.push_back(each);
  if (fits.empty()) return CC_ERROR;
  // As far as all that fit agree.
  std::string common = fits.front();
  for (const std::string& each : fits)
    common.erase(std::mismatch(common.begin(), common.end(), each.begin(), each.end()).first, common.end());
  const std::wstring rest = widen(common.substr(typed.size()) + (fits.size() == 1 ? " " : ""));
  if (rest.empty()) return CC_ERROR;
  return el_winsertstr(editor, rest.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
}

bool LineEditor::is_possible() {
  const char* terminal = std::getenv("TERM");
  return is_terminal(kStandardInput) && is_terminal(kStandardError) && terminal != nullptr && *terminal != '\0' &&
         std::string_view(terminal) != "dumb";
}

LineEditor::LineEditor(const InterruptCatcher& interrupts, std::string history_file, std::vector<std::string> completions)
    : state_(new State{.interrupts = interrupts, .history_file = std::move(history_file), .completions = std::move(completions)}) {
  State& state = *state_;
  // What terminals send is UTF-8, whatever the locale of the caller; libedit asks the C library for widths and bytes.
  if (std::setlocale(LC_CTYPE, "C.UTF-8") == nullptr) std::setlocale(LC_CTYPE, "");
  state.editor = el_init("beryl", stdin, stderr, stderr);
  if (state.editor == nullptr) return;   // then read() takes plain lines
  EditLine* editor = state.editor;
  el_wset(editor, EL_CLIENTDATA, &state);
  el_wset(editor, EL_SIGNAL, 0);
  el_wset(editor, EL_EDITOR, L"emacs");
  el_wset(editor, EL_PROMPT, &State::show_prompt);
  el_wset(editor, EL_GETCFN, &State::next_character);
  el_wset(editor, EL_ADDFN, L"beryl-newline", L"Insert a newline", &State::insert_newline);
  el_wset(editor, EL_ADDFN, L"beryl-paste", L"Insert what is pasted", &State::paste);
  el_wset(editor, EL_ADDFN, L"beryl-complete", L"Complete a command", &State::complete);
  const wchar_t* const bindings[][2] = {
      {L"\x1b\r", L"beryl-newline"},   {L"\x1b\n", L"beryl-newline"},      {L"\x1b[200~", L"beryl-paste"},
      {L"\t", L"beryl-complete"},      {L"^R", L"em-inc-search-prev"},     {L"^W", L"ed-delete-prev-word"},
      {L"\x1b[3~", L"ed-delete-next-char"}, {L"\x1b[H", L"ed-move-to-beg"}, {L"\x1b[F", L"ed-move-to-end"},
      {L"\x1b[1~", L"ed-move-to-beg"}, {L"\x1b[4~", L"ed-move-to-end"},    {L"\x1bOH", L"ed-move-to-beg"},
      {L"\x1bOF", L"ed-move-to-end"},  {L"\x1b[1;5C", L"em-next-word"},    {L"\x1b[1;5D", L"ed-prev-word"},
  };
  for (const auto& [keys, command] : bindings) el_wset(editor, EL_BIND, keys, command, nullptr);
  el_source(editor, nullptr);            // the user's own ~/.editrc

  state.history = history_winit();
  HistEventW event;
  history_w(state.history, &event, H_SETSIZE, kHistoryEntries);
  history_w(state.history, &event, H_SETUNIQUE, 1);
  if (!state.history_file.empty()) history_w(state.history, &event, H_LOAD, state.history_file.c_str());
  el_wset(editor, EL_HIST, &history_w, state.history);

  if (::pipe2(change_pipe, O_CLOEXEC | O_NONBLOCK) != 0) return;
  struct sigaction action = {};
  action.sa_handler = note_change;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGWINCH, &action, nullptr);
  sigaction(SIGCONT, &action, nullptr);
  struct sigaction deadly = {}, before = {};
  deadly.sa_sigaction = die_of;
  deadly.sa_flags = SA_RESTART | SA_SIGINFO;
  sigemptyset(&deadly.sa_mask);
  for (const int number : kDeadly)
    if (sigaction(number, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(number, &deadly, nullptr);   // nohup's stays
}

LineEditor::~LineEditor() {
  signal(SIGWINCH, SIG_DFL);
  signal(SIGCONT, SIG_DFL);
  for (const int number : kDeadly) {
    struct sigaction now = {};
    if (sigaction(number, nullptr, &now) == 0 && now.sa_handler != SIG_IGN) signal(number, SIG_DFL);
  }
  for (int& end : change_pipe)
    if (end >= 0) ::close(std::exchange(end, -1));
  if (state_->history != nullptr) history_wend(state_->history);
  if (state_->editor != nullptr) el_end(state_->editor);
}

Line LineEditor::read(const std::string& prompt) {
  State& state = *state_;
  if (state.editor == nullptr) {
    write_error(prompt);
    return read_line();
  }
  state.prompt = widen(prompt);
  state.end = LineEnd::kLine;
  take_change();
  is_raw = tcgetattr(kStandardInput, &terminal_before) == 0 ? 1 : 0;
  // Before the prompt, so that a key that answers it at once is a key already.
  el_wset(state.editor, EL_PREP_TERM, 1);
  el_resize(state.editor);
  write_error(kPasteOn);
  int n = 0;
  const wchar_t* line = el_wgets(state.editor, &n);
  is_raw = 0;
  write_error(kPasteOff);
  if (state.end == LineEnd::kInterrupted) state.bytes.clear();
  if (line == nullptr || n <= 0 || state.end != LineEnd::kLine)
    return {state.end == LineEnd::kLine ? LineEnd::kEndOfInput : state.end, {}};
  std::string text = narrow({line, static_cast<size_t>(n)});
  if (text.ends_with('\n')) text.pop_back();
  return {LineEnd::kLine, std::move(text)};
}

void LineEditor::remember(const std::string& text) {
  State& state = *state_;
  if (state.history == nullptr) return;
  HistEventW event;
  history_w(state.history, &event, H_ENTER, widen(text).c_str());
  if (state.history_file.empty()) return;
  // For its owner only, from its first moment on; libedit writes it as it finds it. Nobody misses it where it cannot be written.
  const int file = ::open(state.history_file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  ::close(file);
  history_w(state.history, &event, H_SAVE, state.history_file.c_str());
}

}  // namespace beryl::cli
