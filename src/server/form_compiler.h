// Forms of strangers, compiled off the connections' threads: few at a time, within a time.
//
// Nothing can interrupt the grammar's library. So a form that takes too long goes on in its worker, and the worker counts as
// taken until it is done; who waits for the form hears 503, and finds it done when he asks again later. Workers have a
// lower priority: where processors are short, tokens come first.
#pragma once

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

namespace beryl::server {

struct FormLimits {
  int n_workers = 2;
  size_t max_waiting = 32;                       // forms, beside those that are being compiled
  std::chrono::milliseconds patience{10'000};    // of who asks
};

class FormCompiler {
 public:
  using Compile = std::function<std::shared_ptr<const CompiledConstraint>(const ConstraintSpec&)>;

  // The compiler outlives it.
  explicit FormCompiler(ConstraintCompiler& compiler, const FormLimits& limits = {})
      : FormCompiler([&](const ConstraintSpec& spec) { return compiler.find(spec); }, [&](const ConstraintSpec& spec) { return compiler.compile(spec); },
                     limits) {}
  // find: quick; null: it has to be compiled. Both are called by many threads.
  FormCompiler(Compile find, Compile compile, const FormLimits& limits) : find_(std::move(find)), compile_(std::move(compile)), limits_(limits) {}
  // Waits for what is being compiled.
  ~FormCompiler();
  FormCompiler(const FormCompiler&) = delete;
  FormCompiler& operator=(const FormCompiler&) = delete;

  // By any thread; who asks for the same form waits for the same work. Throws what ConstraintCompiler::compile throws, and
  // ApiError(503) when the time is over or too many forms wait.
  std::shared_ptr<const CompiledConstraint> compile(const ConstraintSpec& spec);
  bool is_idle() const;

 private:
  struct Job {
    ConstraintSpec spec;
    bool done = false;
    std::shared_ptr<const CompiledConstraint> compiled;
    std::exception_ptr error;
  };
  void require_worker();
  void work();

  const Compile find_, compile_;
  const FormLimits limits_;
  mutable std::mutex mutex_;
  std::condition_variable work_, done_;
  std::map<std::string, std::shared_ptr<Job>> jobs_;   // by key: those that wait and those that are being compiled
  std::deque<std::shared_ptr<Job>> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace beryl::server
