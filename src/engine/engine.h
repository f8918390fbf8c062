// Many requests at once on one model: one thread owns sequences, pages and the stepper, and runs step after step.
//
// Clients submit from threads of their own and read from channels; the engine waits for none of them. A request's tokens
// do not depend on its neighbours, on chunks, on reused prefixes, on drafts, or on being put back and computed anew: bit for
// bit where the backend's rows do not depend on the other rows of a step (the CPU; on a GPU see docs/numerics.md).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/channel.h"
#include "engine/draft.h"
#include "engine/mask_maker.h"
#include "engine/request.h"
#include "engine/scheduler.h"
#include "engine/stepper.h"

namespace beryl {

struct EngineLimits {
  RunLimits run;             // context, chunk_tokens, n_sequences, cache_tokens, kept_windows; see complete()
  int max_waiting = 64;      // requests beyond those that can be computed at once (run.n_sequences)
  int max_followers = 256;   // beyond these: of requests that belong to one that had room (Request::follows)
  int max_draft = 7;         // guesses a step and sequence; 0: none
  bool always_draft = false; // check all guesses, whether it pays or not: for tests and measurements
  int mask_workers = 2;      // threads that make the masks of bound replies; with one, slow masks hold up the quick ones of others

  // With the limits that follow from the others where they are not given: shares_pages, step_tokens, n_outputs.
  EngineLimits complete() const;
};

// Since the start, except where it says now.
struct EngineCounts {
  int n_running = 0, n_waiting = 0;                          // now
  int64_t n_pages = 0, n_free_pages = 0, n_known_pages = 0;  // now, of all pools; known: free, but found by a text that begins so
  int64_t finished[5] = {};                                  // by FinishReason
  int64_t prompt_tokens = 0, reused_tokens = 0, reply_tokens = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  int64_t preemptions = 0, recomputed_tokens = 0;
  int64_t steps = 0;
  double step_seconds = 0;
};

class Engine {
 public:
  // Allocates everything; throws what Stepper throws. The program must outlive the engine.
  Engine(const Program& program, const EngineLimits& limits, Backend& backend);
  // Cancels what runs.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // By any thread. Null: as many as may be are there already, or the engine is draining. Throws Error(kBadInput) for a prompt that is empty,
  // does not fit the context, or names an id that the model lacks.
  std::shared_ptr<Channel> submit(Request request);
  // Takes no more requests, and returns when the last one has ended.
  void drain();
  EngineCounts counts() const;
  int64_t context() const { return limits_.run.context; }
  int n_sequences() const { return limits_.run.n_sequences; }

 private:
  struct Sequence;
  using SequencePtr = std::unique_ptr<Sequence>;

  void run();
  bool take_inbox();
  void end_cancelled();
  void step();
  void propose_drafts();
  void ask_for_masks();
  void await_masks();
  void take_masks();
  void await_any_mask();
  void plan();
  void put_back(size_t index);
  void admit(int n);
  void run_rows();
  void take_samples(Sequence& sequence, const PlannedRows& row, std::span<const Sampled> samples);
  void after_reading(Sequence& sequence, int64_t n_before);
  void end(Sequence& sequence, FinishReason finish);
  void fail(Sequence& sequence, Failure failure, const std::string& error);
  void end_failed_step(const std::string& error);
  void remove_ended();
  void publish();

  const EngineLimits limits_;
  const int64_t vocab_;
  Stepper stepper_;

  // Of the engine's thread.
  std::vector<SequencePtr> running_;      // the oldest first
  std::deque<SequencePtr> waiting_;       // likewise
  std::vector<int> free_slots_;           // rows of the page tables
  StepCost cost_;
  double decode_seconds_ = 0;             // of the last step without prompts
  MaskMaker masks_;
  uint64_t n_steps_ = 0;
  StepPlan plan_;
  std::vector<RunningSequence> running_views_;
  std::vector<WaitingSequence> waiting_views_;
  std::vector<SequenceRows> rows_;
  std::vector<int> slots_;
  std::vector<std::vector<const uint32_t*>> allowed_;   // [rows of the plan][sampled rows]
  std::vector<const BoundReply*> awaited_;
  EngineCounts totals_;

  // Shared.
  mutable std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::vector<SequencePtr> inbox_;
  uint64_t next_arrival_ = 0;
  bool draining_ = false, stopping_ = false, busy_ = false;
  EngineCounts published_;

  std::thread thread_;
};

}  // namespace beryl
