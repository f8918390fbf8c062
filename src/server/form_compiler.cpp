#include "server/form_compiler.h"

#include <optional>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "server/api_error.h"
#include "server/lent_priority.h"

namespace beryl::server {

constexpr size_t kMaxHostileBytes = 4 << 20;   // of keys

FormCompiler::~FormCompiler() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<const CompiledConstraint> FormCompiler::compile(const ConstraintSpec& spec) {
  if (auto compiled = find_(spec)) return compiled;
  const std::string key = ConstraintCompiler::key_of(spec);
  std::unique_lock lock(mutex_);
  for (const auto& [its_key, form] : hostile_)
    if (its_key == key) throw form;
  require_worker();
  std::shared_ptr<Job>& place = jobs_[key];
  if (place == nullptr) {
    if (waiting_.size() >= limits_.max_waiting) {
      jobs_.erase(key);
      throw ApiError(503, "too many other forms of replies are being compiled: try again later");
    }
    place = std::make_shared<Job>(Job{spec, false, nullptr, nullptr});
    waiting_.push_back(place);
    work_.notify_all();
  }
  const std::shared_ptr<Job> job = place;
  if (!done_.wait_for(lock, limits_.patience, [&] { return job->done; }))
    throw ApiError(503, fmt::format("the form of the reply is not compiled within {} seconds; that goes on, try again later",
                                    std::chrono::duration_cast<std::chrono::seconds>(limits_.patience).count()));
  if (job->error != nullptr) std::rethrow_exception(job->error);
  return job->compiled;
}

void FormCompiler::prepare() {
  const std::lock_guard lock(mutex_);
  try {
    require_worker();
  } catch (const ApiError&) {   // who asks first hears of it
  }
}

void FormCompiler::require_worker() {
  try {
    while (static_cast<int>(threads_.size()) < limits_.n_workers) threads_.emplace_back([this, is_first = threads_.empty()] { work(is_first); });
  } catch (const std::system_error&) {
    if (threads_.empty()) throw ApiError(503, "the system lets this server have no thread to compile the reply's form: try again later");
  }
}

void FormCompiler::remember(const std::string& key, const HostileForm& form) {
  hostile_.emplace_back(key, form);
  hostile_bytes_ += key.size();
  for (; hostile_bytes_ > kMaxHostileBytes; hostile_.pop_front()) hostile_bytes_ -= hostile_.front().first.size();
}

void FormCompiler::work(bool is_first) {
  FormJudge judge(judge_, limits_.judge);
  LentPriority priority;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_first) is_first_idle_ = true;
    if (is_first && !judge_.empty()) {
      lock.unlock();
      try {
        judge.prepare(stopping_);
      } catch (const std::exception&) {   // the next form tries again
      }
      lock.lock();
    }
    if (!work_.wait_for(lock, limits_.judge_idle, [&] { return stopping_ || waiting_.size() > (is_first || !is_first_idle_ ? 0 : 1); })) {
      if (!is_first) judge.end();
      continue;
    }
    if (stopping_) return;
    const std::shared_ptr<Job> job = std::move(waiting_.front());
    waiting_.pop_front();
    if (is_first) {
      is_first_idle_ = false;
      work_.notify_all();   // what waits for this one need not
    }
    lock.unlock();
    std::shared_ptr<const CompiledConstraint> compiled;
    std::exception_ptr error;
    std::optional<HostileForm> hostile;
    try {
      if (!judge_.empty()) judge.judge(job->spec, stopping_);
      priority.run([&] { compiled = compile_(job->spec); });
    } catch (const HostileForm& form) {
      hostile = form;
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (hostile) remember(ConstraintCompiler::key_of(job->spec), *hostile);
    job->compiled = std::move(compiled);
    job->error = error;
    job->done = true;
    jobs_.erase(ConstraintCompiler::key_of(job->spec));
    done_.notify_all();
  }
}

}  // namespace beryl::server
