#include "engine/stepper.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "engine/fit.h"

namespace beryl {
namespace {

std::unique_ptr<Executor> prepare(const Program& program, const RunLimits& run, const StepLimits& limits, Backend& backend) {
  require_memory(program, run, backend);
  try {
    return backend.prepare(program, limits);
  } catch (const Error& error) {
    // A host lends more than it has, so only its refusal shows what is too much.
    if (error.code != ErrorCode::kOutOfMemory || backend.memory()) throw;
    throw Error(error.code, error.what() + smaller_context_words(program, run, backend, available_memory_bytes()));
  }
}

std::vector<int> windows_of(const Program& program) {
  std::vector<int> windows;
  for (const PageGroup& group : program.groups) windows.push_back(group.window);
  return windows;
}

}  // namespace

Stepper::Stepper(const Program& program, const RunLimits& run, Backend& backend)
    : program_(program),
      run_(run),
      limits_(limits_for(program, run)),
      executor_(prepare(program, run, limits_, backend)),
      pages_(limits_, windows_of(program)),
      lengths_(static_cast<size_t>(run.n_sequences), 0),
      written_(static_cast<size_t>(run.n_sequences), 0) {}

void Stepper::reset(int sequence) {
  pages_.release(sequence);
  lengths_[static_cast<size_t>(sequence)] = 0;
  written_[static_cast<size_t>(sequence)] = 0;
  advancing_.clear();   // the uploaded tables name pages that are free now
}

PrefixMatch Stepper::adopt(int sequence, std::span<const int32_t> ids) {
  const PrefixMatch match = pages_.adopt(sequence, ids);
  const auto index = static_cast<size_t>(sequence);
  lengths_[index] = written_[index] = match.n_tokens;
  advancing_.clear();
  return match;
}

void Stepper::commit(int sequence, std::span<const int32_t> ids) {
  BERYL_CHECK(run_.shares_pages, "pages are shared where the run was made for it");
  BERYL_CHECK(static_cast<int64_t>(ids.size()) == length(sequence), "all ids that the sequence holds are committed");
  pages_.commit(sequence, ids);
}

bool Stepper::rewind(int sequence, int64_t length) {
  const auto index = static_cast<size_t>(sequence);
  BERYL_CHECK(length >= 0 && length <= lengths_[index], "rewinding goes back");
  for (size_t group = 0; group < limits_.n_entries.size(); ++group) {
    const int window = program_.groups[group].window;
    if (window == 0) continue;
    // A slot belongs to the last position written to it; the next token reads back to here.
    int64_t first_read = std::max<int64_t>(0, length - window + 1);
    if (run_.shares_pages) first_read -= kPageTokens - 1;   // a whole page went
    if (first_read + int64_t{limits_.n_entries[group]} * kPageTokens < written_[index]) return false;
  }
  lengths_[index] = length;
  advancing_.clear();   // the uploaded positions are another length's
  return true;
}

void Stepper::set_rows(std::span<const SequenceRows> rows) {
  input_.ids.clear();
  input_.positions.clear();
  input_.sequences.clear();
  input_.output_rows.clear();
  input_.sampling.clear();
  advancing_.clear();
  bool advances = true;
  for (const SequenceRows& each : rows) {
    const auto n = static_cast<int64_t>(each.ids.size());
    const int64_t begin = length(each.sequence);
    if (begin + n > run_.context)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{} tokens after {} do not fit the context of {}", n, begin, run_.context));
    // A longer chunk would write over keys of a sliding layer that its own first tokens still read.
    if (n > run_.chunk_tokens)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{} tokens of one sequence in a step, at most {} expected", n, run_.chunk_tokens));
    if (!pages_.reserve(each.sequence, begin + n))
      throw Error(ErrorCode::kOutOfMemory,
                  fmt::format("no cache pages left for {} positions of a sequence", begin + n));
    const auto first_row = static_cast<int32_t>(input_.ids.size());
    size_t n_left = 0;
    for (int64_t i = 0; i < n; ++i) {
      input_.ids.push_back(each.ids[static_cast<size_t>(i)]);
      input_.positions.push_back(static_cast<int32_t>(begin + i));
      input_.sequences.push_back(each.sequence);
      const bool leaves = each.outputs == Outputs::kAll || (each.outputs == Outputs::kLast && i == n - 1);
      if (!leaves) continue;
      input_.output_rows.push_back(first_row + static_cast<int32_t>(i));
      if (each.sampling != nullptr) {
        input_.sampling.push_back(*each.sampling);
        input_.sampling.back().draw = static_cast<uint64_t>(begin + i);
        if (!each.allowed.empty()) input_.sampling.back().allowed = each.allowed[n_left++];
      }
    }
    advances = advances && n == 1 && each.outputs == Outputs::kLast && each.sampling != nullptr;
    if (advances) advancing_.push_back(each.sequence);
  }
  if (!advances) advancing_.clear();
  input_.tables = pages_.tables();
  uploaded_tables_ = pages_.version();
  executor_->set_input(input_);
  for (const SequenceRows& each : rows) {
    const auto index = static_cast<size_t>(each.sequence);
    lengths_[index] += static_cast<int64_t>(each.ids.size());
    written_[index] = std::max(written_[index], lengths_[index]);
  }
}

void Stepper::run(std::span<const SequenceRows> rows, OpRange range) {
  set_rows(rows);
  // Advance is the last op; it makes sense only for steps of decode rows.
  if (advancing_.empty()) range.end = std::min(range.end, program_.ops.size() - 1);
  executor_->run(range);
}

bool Stepper::can_advance(std::span<const int> sequences) const {
  if (advancing_.empty() || !std::ranges::equal(sequences, advancing_) || uploaded_tables_ != pages_.version()) return false;
  for (int sequence : sequences) {
    if (length(sequence) >= run_.context) return false;
    for (size_t group = 0; group < limits_.n_entries.size(); ++group) {
      const int n_entries = limits_.n_entries[group];
      if (input_.tables[group][static_cast<size_t>(sequence * n_entries + page_entry(length(sequence), n_entries))] < 0)
        return false;
    }
  }
  return true;
}

void Stepper::advance() {
  BERYL_CHECK(!advancing_.empty(), "advance follows a step of one sampled row a sequence");
  for (int sequence : advancing_) {
    int64_t& length = lengths_[static_cast<size_t>(sequence)];
    for (size_t group = 0; group < limits_.n_entries.size(); ++group) {
      const int n_entries = limits_.n_entries[group];
      const auto entry = static_cast<size_t>(sequence * n_entries + page_entry(length, n_entries));
      BERYL_CHECK(length < run_.context && input_.tables[group][entry] >= 0,
                  "advance finds its pages in the uploaded tables: reserve them before the first decode row");
    }
    ++length;
    int64_t& written = written_[static_cast<size_t>(sequence)];
    written = std::max(written, length);
  }
  executor_->run();
}

}  // namespace beryl
