#include "server/form_judge.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "server/api_error.h"
#include "server/lent_priority.h"

extern char** environ;

namespace beryl::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTickMs = 20;                  // between looks at what the process has taken
constexpr size_t kMaxPart = 16 << 20;        // bytes of a form's text, or of an answer: far beyond what passes the checks before

// Numbers with blanks between them and a line's end; then texts of the last numbers' lengths. A form: kind, whether there are calls, their
// notation, whether one only, lengths of the text and of the tools. An answer: 0, or 1 + ErrorCode; the message's length.
std::string form_text(const ConstraintSpec& spec) {
  const CallSpec calls = spec.calls.value_or(CallSpec());
  return fmt::format("{} {:d} {} {:d} {} {}\n", static_cast<int>(spec.kind), spec.calls.has_value(), static_cast<int>(calls.notation), calls.single,
                     spec.text.size(), calls.tools.size()) +
         spec.text + calls.tools;
}

std::string answer_text(int code, std::string_view message) { return fmt::format("{} {}\n{}", code, message.size(), message); }

// The judge's end of the socket. False: the other one is closed.
bool send_all(int socket, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = send(socket, text.data(), text.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

class Reader {
 public:
  explicit Reader(int socket) : socket_(socket) {}
  std::optional<std::string> line() {
    for (;;) {
      if (const size_t at = buffer_.find('\n'); at != std::string::npos) {
        std::string line = buffer_.substr(0, at);
        buffer_.erase(0, at + 1);
        return line;
      }
      if (!more()) return std::nullopt;
    }
  }
  std::optional<std::string> bytes(size_t n) {
    while (buffer_.size() < n)
      if (!more()) return std::nullopt;
    std::string text = buffer_.substr(0, n);
    buffer_.erase(0, n);
    return text;
  }

 private:
  bool more() {
    char bytes[1 << 14];
    for (;;) {
      const ssize_t n = recv(socket_, bytes, sizeof bytes, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
      return n > 0;
    }
  }
  const int socket_;
  std::string buffer_;
};

}  // namespace

void FormJudge::end() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
  close(socket_);
  pid_ = socket_ = -1;
}

bool FormJudge::is_alive() {
  if (pid_ < 0) return false;
  siginfo_t state = {};
  return waitid(P_PID, static_cast<id_t>(pid_), &state, WEXITED | WNOHANG | WNOWAIT) == 0 && state.si_pid == 0;
}

double FormJudge::processor_seconds() const {
  clockid_t clock = 0;
  timespec time = {};
  if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;   // it has just ended
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int64_t FormJudge::resident_bytes() const {
  std::ifstream file(fmt::format("/proc/{}/statm", pid_));
  int64_t all = 0, resident = 0;
  return file >> all >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

void FormJudge::start(const std::atomic<bool>& stopping) {
  end();
  int sockets[2] = {-1, -1};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0)
    throw ApiError(503, fmt::format("no process can be started to compile the reply's form: {}: try again later", std::strerror(errno)));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, sockets[1], 0);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  std::vector<char*> arguments;
  for (const std::string& each : command_) arguments.push_back(const_cast<char*>(each.c_str()));
  arguments.push_back(nullptr);
  const int error = posix_spawn(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(sockets[1]);
  if (error != 0) {
    pid_ = -1;
    close(sockets[0]);
    throw ApiError(503, fmt::format("no process can be started to compile the reply's form: {}: try again later", std::strerror(error)));
  }
  socket_ = sockets[0];
  fcntl(socket_, F_SETFL, O_NONBLOCK);
  if (ask("", /*is_form=*/false, stopping).empty()) throw ApiError(503, "the process that compiles replies' forms does not start: try again later");
  first_bytes_ = resident_bytes();
}

void FormJudge::prepare(const std::atomic<bool>& stopping) {
  if (!is_alive()) start(stopping);
}

void FormJudge::judge(const ConstraintSpec& spec, const std::atomic<bool>& stopping) {
  const bool is_fresh = !is_alive();
  if (is_fresh) start(stopping);
  std::string answer = ask(form_text(spec), /*is_form=*/true, stopping);
  if (answer.empty() && !is_fresh) {   // perhaps it ended for a reason of its own
    start(stopping);
    answer = ask(form_text(spec), /*is_form=*/true, stopping);
  }
  if (answer.empty()) throw HostileForm("compiling it ends the process that does so: it needs too much memory, or nests too deeply");
  if (answer[0] != '0') throw Error(static_cast<ErrorCode>(answer[0] - '1'), answer.substr(answer.find('\n') + 1));
}

std::string FormJudge::ask(std::string request, bool is_form, const std::atomic<bool>& stopping) {
  const double before = processor_seconds();
  const auto begin = Clock::now();
  const auto refuse = [&](const std::string& why) {
    end();
    if (is_form) throw HostileForm(why);
  };
  std::string answer;
  for (;;) {
    if (stopping) {
      end();
      throw ApiError(503, "the server is about to end");
    }
    if (is_form && processor_seconds() - before > limits_.processor_seconds)
      refuse(fmt::format("compiling it takes more than {:g} s of a processor", limits_.processor_seconds));
    if (is_form && resident_bytes() - first_bytes_ > limits_.memory_bytes)
      refuse(fmt::format("compiling it takes more than {} MB", limits_.memory_bytes >> 20));
    if (std::chrono::duration<double>(Clock::now() - begin).count() > limits_.seconds) {
      refuse(fmt::format("it is not compiled within {:g} s", limits_.seconds));
      return "";
    }

    pollfd state = {socket_, static_cast<short>(request.empty() ? POLLIN : POLLIN | POLLOUT), 0};
    if (poll(&state, 1, kTickMs) <= 0) continue;
    if ((state.revents & POLLOUT) != 0) {
      const ssize_t n = send(socket_, request.data(), request.size(), MSG_NOSIGNAL);
      if (n > 0) request.erase(0, static_cast<size_t>(n));
    }
    if ((state.revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
    char bytes[4096];
    const ssize_t n = recv(socket_, bytes, sizeof bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) {
      end();
      return "";
    }
    answer.append(bytes, static_cast<size_t>(n));
    const size_t line = answer.find('\n');
    int code = 0;
    size_t length = 0;
    if (line == std::string::npos || std::sscanf(answer.c_str(), "%d %zu", &code, &length) != 2) continue;
    if (answer.size() >= line + 1 + length) return answer;
  }
}

void judge_forms(ConstraintCompiler& constraints, int socket) {
#ifdef __linux__
  // Whoever started it may be gone already: then the socket is closed.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Where memory runs out, rather this process than the server.
  std::ofstream("/proc/self/oom_score_adj") << "1000";
#endif
  constraints.prepare();
  LentPriority priority;
  Reader reader(socket);
  if (!send_all(socket, answer_text(0, ""))) return;
  while (const std::optional<std::string> line = reader.line()) {
    int kind = 0, has_calls = 0, notation = 0, single = 0;
    size_t n_text = 0, n_tools = 0;
    if (std::sscanf(line->c_str(), "%d %d %d %d %zu %zu", &kind, &has_calls, &notation, &single, &n_text, &n_tools) != 6 || n_text > kMaxPart ||
        n_tools > kMaxPart)
      return;
    std::optional<std::string> text = reader.bytes(n_text), tools = reader.bytes(n_tools);
    if (!text || !tools) return;
    ConstraintSpec spec{static_cast<ConstraintSpec::Kind>(kind), std::move(*text), std::nullopt};
    if (has_calls != 0) spec.calls = CallSpec{static_cast<CallNotation>(notation), std::move(*tools), single != 0};
    std::string answer = answer_text(0, "");
    try {
      priority.run([&] { constraints.compile(spec); });
    } catch (const Error& error) {
      answer = answer_text(1 + static_cast<int>(error.code), error.what());
    }
    if (!send_all(socket, answer)) return;
  }
}

}  // namespace beryl::server
