// Speed of a model as llama-bench states it: pp N (prefill N tokens), tg N (decode N tokens), each at a depth D of
// context and for B sequences at once.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/stepper.h"
#include "ops/backend.h"
#include "ops/program.h"

namespace beryl {

struct BenchCase {
  int64_t n_prompt = 0;          // tokens of one prefill, 0: a decode case
  int64_t n_gen = 0;             // tokens decoded by each stream, 0: a prefill case
  int64_t n_depth = 0;           // positions each sequence already holds
  int n_streams = 1;             // sequences at once
};

struct BenchResult {
  BenchCase what;
  int64_t n_allocated = 0;       // positions that the cache was made for
  std::vector<double> seconds;   // [repetitions]
  std::vector<double> read_speeds;   // [repetitions], bytes a second around each; empty: not measured
  int64_t step_bytes = 0;        // of decoding: what a step must move, weights and live cache, halfway through

  std::vector<double> tokens_per_second() const;   // [repetitions], over all streams
  std::vector<double> shares_of_read() const;      // [repetitions] of read_speeds that step_bytes were moved at; empty for prefill
};

double mean(const std::vector<double>& values);
double standard_deviation(const std::vector<double>& values);   // of the sample; 0 for one value
double median(std::vector<double> values);

// Measures cases of one program on one load of its weights, with caches for the largest of them.
class BenchRunner {
 public:
  // allocated: positions that each sequence's cache is made for, at least what the cases need; 0: that. chunk_tokens 0: as
  // fitting_chunk says.
  BenchRunner(const Program& program, Backend& backend, const std::vector<BenchCase>& cases, int64_t allocated, int chunk_tokens,
              CacheType cache_type);

  // Warm-ups that are not counted go first: memory is touched, and every shape of a step has come often enough to be captured where
  // the backend does so. Each repetition begins at the same depth. Token ids are random, the same in every repetition; decoding is
  // greedy and feeds itself (Stepper::advance): the host reads no id in between. Error(kBadInput) when the numbers behind a repetition
  // are not finite.
  // read, where given, is called before the first repetition that counts and behind each, and gives a speed of reading memory.
  BenchResult run(const BenchCase& what, int n_repetitions, const std::function<double()>& read = {});
  int chunk_tokens() const { return stepper_.chunk_tokens(); }
  int cache_element_bytes() { return stepper_.executor().cache_element_bytes(); }

 private:
  void bring_to(int sequence, int64_t depth);
  double time_prefill(const BenchCase& what);
  double time_decode(const BenchCase& what);
  void require_finite_logits();

  int64_t vocab_;
  Stepper stepper_;
  std::vector<int64_t> held_;    // a sequence's first positions that hold its own ids, which depths are made of
};

// One op of a step, timed alone. Times of asynchronous devices include waiting for each op, so they add up to more than
// a step takes; compare shares with shares.
struct OpTiming {
  size_t op = 0;                 // index into Program::ops
  double microseconds = 0;       // median
  int64_t bytes = 0;             // must-move bytes
};

// A part of a step as the backend runs it (StepPart), median of all repetitions.
struct PartTiming {
  StepPart part;
  int64_t bytes = 0;             // must-move bytes of its ops
};

struct StepTiming {
  std::vector<OpTiming> ops;
  std::vector<PartTiming> parts; // empty: the backend cannot tell
  double step_microseconds = 0;  // of whole steps, one after the other
};

// Where a step's time goes; the lines sum to the step.
struct LedgerLine {
  std::string what;              // "weights", "preparing and waiting", "attention", "norms", "head", "sampler", "other", "gaps"
  double microseconds = 0;
};
std::vector<LedgerLine> step_ledger(const Program& program, const StepTiming& timing);

// Positions behind `depth` that time_ops takes.
constexpr int kTimedSteps = 33;

// A decode step of one row at this depth. Throws as BenchRunner::run does.
StepTiming time_ops(const Program& program, Backend& backend, int64_t depth, CacheType cache_type, int n_repetitions);

}  // namespace beryl
