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
  // SampleParams::allowed of each row that leaves; empty: as sampling has it.
  std::span<const uint32_t* const> allowed = {};
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

  // Pages that sequences share (page_table.h). What the caches hold of a text:
  PrefixMatch match(std::span<const int32_t> ids) const { return pages_.match(ids); }
  // The same, and an empty sequence begins with it: its length is then n_tokens.
  PrefixMatch adopt(int sequence, std::span<const int32_t> ids);
  // The sequence's ids, all that it holds and no draft among them: later sequences may adopt them. It can not be rewound to
  // before them then.
  void commit(int sequence, std::span<const int32_t> ids);
  void keep_window(int sequence, int64_t position) { pages_.keep_window(sequence, position); }
  void hide_prefix(int sequence) { pages_.hide_prefix(sequence); }
  const PageTables& pages() const { return pages_; }
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
  // Whether the last step was one of these sequences, in this order, and the device has all that the next needs.
  bool can_advance(std::span<const int> sequences) const;

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
  uint64_t uploaded_tables_ = 0;   // PageTables::version of input_
};

}  // namespace beryl
