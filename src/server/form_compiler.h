// Forms of strangers, compiled off the connections' threads: few at a time, within a time.
//
// Nothing can interrupt the grammar's library. So a worker has a process of its own compile a form first, which it can end
// (form_judge.h): no form holds a worker for longer than its share of processor time, and one that was too much is refused at once the next
// time. Who waits for longer than his patience hears 503; that goes on, and he finds it done when he asks again later. What takes long, or
// comes often, goes on at a lower priority: where processors are short, tokens come first, but not before what takes a moment
// (lent_priority.h). The first worker has its process from the start on, and whenever it waits; another's ends after a while.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "grammar/constraint.h"
#include "server/form_judge.h"

namespace beryl::server {

struct FormLimits {
  int n_workers = 2;
  size_t max_waiting = 32;                       // forms, beside those that are being compiled
  std::chrono::milliseconds patience{60'000};    // of who asks. What a form may take is counted in processor time
  std::chrono::seconds judge_idle{60};           // then a worker's process ends, for its memory, but the first one's
  JudgeLimits judge;
};

class FormCompiler {
 public:
  using Compile = std::function<std::shared_ptr<const CompiledConstraint>(const ConstraintSpec&)>;

  // The compiler outlives it. judge: the command of FormJudge for the same compiler; empty: nothing is judged, for forms of friends.
  explicit FormCompiler(ConstraintCompiler& compiler, const FormLimits& limits = {}, const std::vector<std::string>& judge = {})
      : FormCompiler([&](const ConstraintSpec& spec) { return compiler.find(spec); },
                     [&, is_tried = !judge.empty()](const ConstraintSpec& spec) { return compiler.compile(spec, is_tried); }, limits, judge) {}
  // find: quick; null: it has to be compiled. Both are called by many threads.
  FormCompiler(Compile find, Compile compile, const FormLimits& limits, std::vector<std::string> judge = {})
      : find_(std::move(find)), compile_(std::move(compile)), limits_(limits), judge_(std::move(judge)) {}
  // Waits for what is being compiled; what is being judged is given up.
  ~FormCompiler();
  FormCompiler(const FormCompiler&) = delete;
  FormCompiler& operator=(const FormCompiler&) = delete;

  // Starts the workers and the first one's process, which the first form would else wait for.
  void prepare();
  // By any thread; who asks for the same form waits for the same work. Throws what ConstraintCompiler::compile throws, and
  // ApiError(503) when the time is over or too many forms wait.
  std::shared_ptr<const CompiledConstraint> compile(const ConstraintSpec& spec);

 private:
  struct Job {
    ConstraintSpec spec;
    bool done = false;
    std::shared_ptr<const CompiledConstraint> compiled;
    std::exception_ptr error;
  };
  void require_worker();
  void work(bool is_first);
  void remember(const std::string& key, const HostileForm& form);

  const Compile find_, compile_;
  const FormLimits limits_;
  const std::vector<std::string> judge_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::map<std::string, std::shared_ptr<Job>> jobs_;   // by key: those that wait and those that are being compiled
  std::deque<std::shared_ptr<Job>> waiting_;
  std::deque<std::pair<std::string, HostileForm>> hostile_;   // those that came last, by key
  bool is_first_idle_ = true;   // or about to be: then a single form waits for it, not for another's process
  size_t hostile_bytes_ = 0;                                  // of their keys
  std::atomic<bool> stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace beryl::server
