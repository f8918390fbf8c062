// What the next step does, as a pure function of the sequences, the pages and the limits.
//
// Sequences run in the order in which their requests came, the oldest first, and so do their rights:
//   decode rows   one for each sequence whose prompt is read, unless it is held; they never wait for a prompt
//   prompts       chunks within what is left of the step's tokens, those that waited longest since their last chunk first
//   drafts        with rows and pages that nobody else needs
// When pages run out the youngest running sequence is put back and computed anew later (preemption by recompute), so the
// oldest that is not held always gets on: a pool holds one whole context at least. A waiting request is let in, never past
// an older one, when the pages that its prompt takes are there beside what running prompts still need.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace beryl {

struct SchedulerLimits {
  int n_sequences = 1;       // running at once
  int step_tokens = 1;       // rows of a step; more than n_sequences, so that prompts always get on
  int chunk_tokens = 1;      // of these, of one sequence
  int n_outputs = 1;         // rows that leave through the head; at least n_sequences
};

struct RunningSequence {
  int64_t n_read = 0;        // positions in the cache
  int64_t n_pages = 0;       // that it has; more than it needs after guesses that were wrong
  int64_t n_unread = 1;      // ids that are known but not read: 1, the last sampled one, when it decodes
  int n_draft = 0;           // further ids that are guessed; 0 unless it decodes
  uint64_t last_chunk = 0;   // when a chunk of its prompt was read last; any clock that grows
  bool is_held = false;      // decodes, but not in this step: what may come next is not known yet
};

struct WaitingSequence {
  int64_t n_ids = 0;         // to be read, those that can be reused included
  int64_t n_reused = 0;      // whole pages
  int n_idle_pages = 0;      // of the reused ones, those that count as free now
};

struct PlannedRows {
  int sequence = 0;          // index among the running ones, the admitted ones behind them
  int n_ids = 0;
  int n_draft = 0;           // rows behind the ids
};

struct StepPlan {
  int preempted = -1;        // index of a running sequence to put back; then nothing else is planned: plan again
  int n_admitted = 0;        // of the waiting ones, from the front
  std::vector<PlannedRows> rows;
};

// running: the oldest first. waiting: likewise; as many as might be let in. free_pages: of the scarcest pool.
void plan_step(std::span<const RunningSequence> running, std::span<const WaitingSequence> waiting, int free_pages,
               const SchedulerLimits& limits, StepPlan& plan);

}  // namespace beryl
