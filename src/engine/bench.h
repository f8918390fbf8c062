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
  int64_t allocated = 0;         // positions the cache is made for; 0: as many as the case needs
};

struct BenchResult {
  BenchCase what;
  std::vector<double> tokens_per_second;   // [repetitions], over all streams
  double mean() const;
  double standard_deviation() const;       // of the sample; 0 for one repetition
  double median() const;
};

// Runs each repetition on a fresh sequence after one warm-up that is not counted. Token ids are random but the same in
// every repetition. Decoding is greedy and feeds itself (Stepper::advance): the host reads no id in between.
BenchResult run_bench_case(const Program& program, Backend& backend, const BenchCase& what, int chunk_tokens,
                           CacheType cache_type, int n_repetitions);

// One op of a step, timed alone. Times of asynchronous devices include waiting for each op, so they add up to more than
// a step takes; `share` compares like with like.
struct OpTiming {
  size_t op = 0;                 // index into Program::ops
  double microseconds = 0;       // median
  int64_t bytes = 0;             // must-move bytes
};

struct StepTiming {
  std::vector<OpTiming> ops;
  double step_microseconds = 0;  // median of whole steps, run as one
};

// A decode step of one row at this depth.
StepTiming time_ops(const Program& program, Backend& backend, int64_t depth, CacheType cache_type, int n_repetitions);

}  // namespace beryl
