// Whether the compilation of a stranger's form comes to an end, in a time and memory that can be had: a process of its own
// compiles it first. Nothing can interrupt the grammar's library within a thread, and no form says by its text what it will take;
// but a process can be ended. What it has compiled within its limits, this process compiles again without a risk, since the library does
// the same work for the same form.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "grammar/constraint.h"

namespace beryl::server {

// The form is refused for what compiling it took, not for what it says.
struct HostileForm : Error {
  explicit HostileForm(const std::string& message) : Error(ErrorCode::kUnsupported, message) {}
};

struct JudgeLimits {
  double processor_seconds = 10;        // of one form: what people write takes 0.15 at most, 128 tools 2 to 4, what the trial of masks refuses 3
  int64_t memory_bytes = 1 << 30;       // resident, beyond what the process had before the first form
  double seconds = 120;                 // of one form, or to begin: a process that does nothing. Busy machines are not meant
};

class FormJudge {
 public:
  // command: a program that calls judge_forms with the socket that is its standard input. It is started when it is first needed, or by
  // prepare, and anew after it has ended.
  FormJudge(std::vector<std::string> command, const JudgeLimits& limits) : command_(std::move(command)), limits_(limits) {}
  ~FormJudge() { end(); }
  FormJudge(const FormJudge&) = delete;
  FormJudge& operator=(const FormJudge&) = delete;

  // Returns when the form compiles within the limits. Throws what ConstraintCompiler::compile throws; HostileForm: it is beyond the
  // limits, or has brought a fresh process down; ApiError(503): there is no process to be had, or `stopping` has become true. By one
  // thread at a time.
  void judge(const ConstraintSpec& spec, const std::atomic<bool>& stopping);
  // Starts the process where there is none, so that the next form need not wait for it. Throws as judge does; where that fails judge tries again.
  void prepare(const std::atomic<bool>& stopping);
  // Ends the process, if there is one. Its memory is the vocabulary's once more.
  void end();
  pid_t process() const { return pid_; }   // -1: none

 private:
  void start(const std::atomic<bool>& stopping);
  bool is_alive();
  // Sends a text and waits for an answer's line and the text behind it; empty: the process has ended. Throws as judge does.
  std::string ask(std::string request, bool is_form, const std::atomic<bool>& stopping);
  double processor_seconds() const;
  int64_t resident_bytes() const;

  const std::vector<std::string> command_;
  const JudgeLimits limits_;
  pid_t pid_ = -1;
  int socket_ = -1;
  int64_t first_bytes_ = 0;   // resident before the first form
};

// The other side: answers until the socket closes, and ends with the process that started this one.
void judge_forms(ConstraintCompiler& constraints, int socket);

}  // namespace beryl::server
