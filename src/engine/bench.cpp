#include "engine/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/rng.h"
#include "engine/generate.h"

namespace beryl {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

// Ids spread over the vocabulary, the same for a stream in every repetition.
std::vector<int32_t> random_ids(int64_t n, int64_t vocab, int stream) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    ids[static_cast<size_t>(i)] =
        static_cast<int32_t>(philox(1, static_cast<uint64_t>(i), static_cast<uint64_t>(stream)).x[0] % static_cast<uint64_t>(vocab));
  return ids;
}

// Decode steps of all streams: the first is fed with ids, the others by what was sampled.
void decode(Stepper& stepper, int n_streams, int64_t n_steps, const std::vector<int32_t>& first) {
  const SampleParams greedy;
  std::vector<SequenceRows> rows;
  for (int s = 0; s < n_streams; ++s) {
    BERYL_CHECK(stepper.reserve(s, stepper.length(s) + n_steps), "the context was made for all steps");
    rows.push_back({s, {&first[static_cast<size_t>(s)], 1}, Outputs::kLast, &greedy});
  }
  stepper.run(rows);
  for (int64_t i = 1; i < n_steps; ++i) stepper.advance();
  stepper.executor().synchronize();
}

}  // namespace

double BenchResult::mean() const {
  return std::accumulate(tokens_per_second.begin(), tokens_per_second.end(), 0.0) / static_cast<double>(tokens_per_second.size());
}

double BenchResult::standard_deviation() const {
  if (tokens_per_second.size() < 2) return 0;
  const double average = mean();
  double squares = 0;
  for (double value : tokens_per_second) squares += (value - average) * (value - average);
  return std::sqrt(squares / static_cast<double>(tokens_per_second.size() - 1));
}

double BenchResult::median() const { return median_of(tokens_per_second); }

BenchResult run_bench_case(const Program& program, Backend& backend, const BenchCase& what, int chunk_tokens,
                           CacheType cache_type, int n_repetitions) {
  BERYL_CHECK((what.n_prompt > 0) != (what.n_gen > 0), "a case is prefill or decode");
  RunLimits run;
  run.context = std::max(what.allocated, what.n_depth + what.n_prompt + what.n_gen);
  run.chunk_tokens = chunk_tokens;
  run.n_sequences = what.n_streams;
  run.n_outputs = what.n_streams;
  run.cache_type = cache_type;
  Stepper stepper(program, run, backend);
  const std::vector<int32_t> first = random_ids(what.n_streams, program.vocab, -1);

  BenchResult result{what, {}};
  for (int repetition = -1; repetition < n_repetitions; ++repetition) {
    for (int s = 0; s < what.n_streams; ++s) {
      stepper.reset(s);
      if (what.n_depth > 0) prefill(stepper, s, random_ids(what.n_depth, program.vocab, s), nullptr);
    }
    stepper.executor().synchronize();
    const auto start = Clock::now();
    if (what.n_prompt > 0) {
      for (int s = 0; s < what.n_streams; ++s) prefill(stepper, s, random_ids(what.n_prompt, program.vocab, 1000 + s), nullptr);
      stepper.executor().synchronize();
    } else {
      decode(stepper, what.n_streams, what.n_gen, first);
    }
    const double seconds = seconds_since(start);
    const int64_t n_tokens = (what.n_prompt + what.n_gen) * what.n_streams;
    if (repetition >= 0) result.tokens_per_second.push_back(static_cast<double>(n_tokens) / seconds);
  }
  return result;
}

StepTiming time_ops(const Program& program, Backend& backend, int64_t depth, CacheType cache_type, int n_repetitions) {
  constexpr int kChunk = 512;
  const size_t n_ops = program.ops.size() - 1;   // without Advance, which would move the sequence on
  RunLimits run;
  run.context = depth + 1;
  run.chunk_tokens = kChunk;
  run.cache_type = cache_type;
  Stepper stepper(program, run, backend);
  if (depth > 0) prefill(stepper, 0, random_ids(depth, program.vocab, 0), nullptr);
  const int32_t id = 1;
  const SampleParams greedy;
  const SequenceRows rows{0, {&id, 1}, Outputs::kLast, &greedy};
  stepper.set_rows({&rows, 1});
  Executor& executor = stepper.executor();

  std::vector<std::vector<double>> op_times(n_ops);
  std::vector<double> step_times;
  for (int repetition = -1; repetition < n_repetitions; ++repetition) {
    executor.synchronize();
    const auto step_start = Clock::now();
    executor.run({0, n_ops});
    executor.synchronize();
    if (repetition >= 0) step_times.push_back(seconds_since(step_start));
    for (size_t op = 0; op < n_ops; ++op) {
      const auto start = Clock::now();
      executor.run({op, op + 1});
      executor.synchronize();
      if (repetition >= 0) op_times[op].push_back(seconds_since(start));
    }
  }
  StepTiming timing;
  timing.step_microseconds = median_of(step_times) * 1e6;
  for (size_t op = 0; op < n_ops; ++op)
    timing.ops.push_back({op, median_of(op_times[op]) * 1e6,
                          bytes_moved(program.ops[op], program, {1, 1, depth}, executor.cache_element_bytes())});
  return timing;
}

}  // namespace beryl
