// Turns "these tokens of these sequences" into steps of a prepared program: positions, pages, which rows leave.
//
// Knows ids, never text; no policy (the scheduler has that). One thread.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/page_table.h"
#include "model/memory_plan.h"
#include "ops/backend.h"

namespace beryl {

enum class Outputs : uint8_t { kNone, kLast, kAll };   // which of a sequence's rows go through the head

// The next tokens of one sequence. Positions follow from how many it has seen.
struct SequenceRows {
  int sequence = 0;
  std::span<const int32_t> ids;
  Outputs outputs = Outputs::kLast;
  const SampleParams* sampling = nullptr;   // null: nothing is sampled; then it must be null for all rows of the step
};

class Stepper {
 public:
  // The program must outlive the stepper. Allocates everything; Error(kOutOfMemory) says which context would fit.
  Stepper(const Program& program, const RunLimits& run, Backend& backend);

  int64_t context() const { return run_.context; }
  int chunk_tokens() const { return run_.chunk_tokens; }
  int64_t length(int sequence) const { return lengths_[static_cast<size_t>(sequence)]; }
  // Pages for positions [0, end), so that later steps (advance too) need none. False when the pool is too small or end
  // is past the context.
  [[nodiscard]] bool reserve(int sequence, int64_t end) { return end <= run_.context && pages_.reserve(sequence, end); }
  // Forgets a sequence and frees its pages.
  void reset(int sequence);
  // Forgets a sequence's positions from `length` on and keeps its pages. False, and nothing is changed, when a sliding layer has
  // written over what the next token would read: after no more than a chunk's positions it never has.
  [[nodiscard]] bool rewind(int sequence, int64_t length);

  // One step of all these rows. Pages are reserved as needed; Error(kBadInput) past the context.
  void run(std::span<const SequenceRows> rows, OpRange range = {});
  // Uploads the rows without running, for op-by-op traces; run_ops then runs a range.
  void set_rows(std::span<const SequenceRows> rows);
  void run_ops(OpRange range) { executor_->run(range); }
  // After a step of one sampled row a sequence: the next one, fed by what was sampled, with no host work.
  void advance();

  std::vector<Sampled> samples() { return executor_->samples(); }
  Executor& executor() { return *executor_; }
  const Program& program() const { return program_; }

 private:
  const Program& program_;
  RunLimits run_;
  StepLimits limits_;
  std::unique_ptr<Executor> executor_;
  PageTables pages_;
  std::vector<int64_t> lengths_;
  std::vector<int64_t> written_;   // a sequence's longest length since its reset: what rewinding must look at
  std::vector<int> advancing_;   // sequences of the last step, when it can be advanced
  StepInput input_;              // kept, so that decoding allocates nothing
};

}  // namespace beryl
