#include "engine/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/rng.h"
#include "engine/fit.h"
#include "engine/generate.h"

namespace beryl {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Ids spread over the vocabulary; those of a stream begin alike whatever n is.
std::vector<int32_t> random_ids(int64_t n, int64_t vocab, int stream) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    ids[static_cast<size_t>(i)] =
        static_cast<int32_t>(philox(1, static_cast<uint64_t>(i), static_cast<uint64_t>(stream)).x[0] % static_cast<uint64_t>(vocab));
  return ids;
}

constexpr int kPromptStreams = 1 << 20;   // the timed prompts' ids: other streams than those of the depths

constexpr int kHostChunk = 512;

RunLimits limits_of(const Program& program, const Backend& backend, const std::vector<BenchCase>& cases, int64_t allocated,
                    int chunk_tokens, CacheType cache_type) {
  RunLimits run;
  run.context = std::max<int64_t>(allocated, 1);
  for (const BenchCase& what : cases) {
    run.context = std::max(run.context, what.n_depth + what.n_prompt + what.n_gen);
    run.n_sequences = std::max(run.n_sequences, what.n_streams);
  }
  run.n_outputs = run.n_sequences;
  run.cache_type = cache_type;
  run.chunk_tokens = chunk_tokens > 0 ? chunk_tokens : fitting_chunk(program, run, backend, kHostChunk);
  return run;
}

// Speeds of a model whose numbers have become NaN would be those of another computation (and look as good).
[[noreturn]] void refuse_numbers() {
  throw NotFinite("computes no finite numbers, so its speed would mean nothing: the file is broken");
}

// After a step that sampled.
void require_finite(Stepper& stepper) {
  for (const Sampled& each : stepper.samples())
    if (!each.valid) refuse_numbers();
}

}  // namespace

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double standard_deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  const double average = mean(values);
  double squares = 0;
  for (double value : values) squares += (value - average) * (value - average);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

std::vector<double> BenchResult::tokens_per_second() const {
  const auto n_tokens = static_cast<double>((what.n_prompt + what.n_gen) * what.n_streams);
  std::vector<double> speeds;
  for (double each : seconds) speeds.push_back(n_tokens / each);
  return speeds;
}

std::vector<double> BenchResult::shares_of_read() const {
  std::vector<double> shares;
  if (what.n_gen > 0)
    for (size_t i = 0; i < read_speeds.size(); ++i)
      shares.push_back(static_cast<double>(step_bytes * what.n_gen) / seconds[i] / read_speeds[i]);
  return shares;
}

BenchRunner::BenchRunner(const Program& program, Backend& backend, const std::vector<BenchCase>& cases, int64_t allocated,
                         int chunk_tokens, CacheType cache_type)
    : vocab_(program.vocab),
      stepper_(program, limits_of(program, backend, cases, allocated, chunk_tokens, cache_type), backend) {
  int n_sequences = 1;
  for (const BenchCase& what : cases) n_sequences = std::max(n_sequences, what.n_streams);
  held_.resize(static_cast<size_t>(n_sequences), 0);
}

// Deep contexts take long to read, so what a sequence holds already is kept where its caches allow it.
void BenchRunner::bring_to(int sequence, int64_t depth) {
  int64_t& held = held_[static_cast<size_t>(sequence)];
  const int64_t kept = std::min(held, depth);
  if (!stepper_.rewind(sequence, kept)) stepper_.reset(sequence);
  const int64_t length = stepper_.length(sequence);
  const std::vector<int32_t> ids = random_ids(depth, vocab_, sequence);
  prefill(stepper_, sequence, std::span(ids).subspan(static_cast<size_t>(length)), nullptr);
  held = depth;
}

double BenchRunner::time_prefill(const BenchCase& what) {
  std::vector<std::vector<int32_t>> prompts;
  for (int s = 0; s < what.n_streams; ++s) prompts.push_back(random_ids(what.n_prompt, vocab_, kPromptStreams + s));
  const auto start = Clock::now();
  for (int s = 0; s < what.n_streams; ++s) prefill(stepper_, s, prompts[static_cast<size_t>(s)], nullptr);
  stepper_.executor().synchronize();
  return seconds_since(start);
}

// The first step is fed with ids, the others by what was sampled.
double BenchRunner::time_decode(const BenchCase& what) {
  const SampleParams greedy;
  const std::vector<int32_t> first = random_ids(what.n_streams, vocab_, kPromptStreams);
  std::vector<SequenceRows> rows;
  for (int s = 0; s < what.n_streams; ++s) {
    BERYL_CHECK(stepper_.reserve(s, stepper_.length(s) + what.n_gen), "the context was made for all steps");
    rows.push_back({s, {&first[static_cast<size_t>(s)], 1}, Outputs::kLast, &greedy});
  }
  const auto start = Clock::now();
  stepper_.run(rows);
  for (int64_t i = 1; i < what.n_gen; ++i) stepper_.advance();
  stepper_.executor().synchronize();
  return seconds_since(start);
}

// Of the last row of the last prompt, which no one samples.
void BenchRunner::require_finite_logits() {
  std::vector<float> logits(static_cast<size_t>(vocab_));
  stepper_.executor().read_rows(logits_slot(stepper_.program()), 0, 1, logits.data());
  if (!std::all_of(logits.begin(), logits.end(), [](float value) { return std::isfinite(value); })) refuse_numbers();
}

BenchResult BenchRunner::run(const BenchCase& what, int n_repetitions, const std::function<double()>& read) {
  BERYL_CHECK((what.n_prompt > 0) != (what.n_gen > 0), "a case is prefill or decode");
  // A shape of a step is captured when it comes for the second time, which in one warm-up it need not: the last steps of a decode
  // may be the first of their length. Long prompts are never captured.
  const int n_warm_ups = what.n_prompt > stepper_.chunk_tokens() ? 1 : 2;
  BenchResult result;
  result.what = what;
  result.n_allocated = stepper_.context();
  if (what.n_gen > 0)
    for (const Op& op : stepper_.program().ops)
      result.step_bytes += bytes_moved(op, stepper_.program(), {what.n_streams, what.n_streams, what.n_depth + what.n_gen / 2},
                                       [this](int cache) { return stepper_.executor().position_bytes(cache); });
  double speed_before = 0;
  for (int repetition = -n_warm_ups; repetition < n_repetitions; ++repetition) {
    for (int s = 0; s < what.n_streams; ++s) bring_to(s, what.n_depth);
    stepper_.executor().synchronize();
    if (read && repetition == 0) speed_before = read();
    const double seconds = what.n_prompt > 0 ? time_prefill(what) : time_decode(what);
    if (what.n_prompt > 0)
      require_finite_logits();
    else
      require_finite(stepper_);
    if (repetition < 0) continue;
    result.seconds.push_back(seconds);
    if (!read) continue;
    const double speed = read();
    result.read_speeds.push_back((speed_before + speed) / 2);
    speed_before = speed;
  }
  return result;
}

StepTiming time_ops(const Program& program, Backend& backend, int64_t depth, CacheType cache_type, int n_repetitions) {
  constexpr int kChunk = 512, kSteps = kTimedSteps - 1;
  const size_t n_ops = program.ops.size() - 1;   // without Advance, which would move the sequence on
  RunLimits run;
  run.context = depth + kTimedSteps;
  run.chunk_tokens = kChunk;
  run.cache_type = cache_type;
  Stepper stepper(program, run, backend);
  if (depth > 0) prefill(stepper, 0, random_ids(depth, program.vocab, 0), nullptr);
  const int32_t id = 1;
  const SampleParams greedy;
  const SequenceRows rows{0, {&id, 1}, Outputs::kLast, &greedy};
  BERYL_CHECK(stepper.reserve(0, run.context), "the context was made for all steps");
  stepper.set_rows({&rows, 1});
  Executor& executor = stepper.executor();

  std::vector<std::vector<double>> op_times(n_ops);
  std::vector<std::vector<StepPart>> parts;
  for (int repetition = -1; repetition < n_repetitions; ++repetition) {
    for (size_t op = 0; op < n_ops; ++op) {
      executor.synchronize();
      const auto start = Clock::now();
      executor.run({op, op + 1});
      executor.synchronize();
      if (repetition >= 0) op_times[op].push_back(seconds_since(start));
    }
    std::vector<StepPart> timed = executor.time_step(n_ops);
    if (repetition >= 0) parts.push_back(std::move(timed));
  }
  // Whole steps feed themselves; the first two are for what a backend keeps of a step's shape.
  StepTiming timing;
  for (int step = 0; step < 2; ++step) stepper.advance();
  executor.synchronize();
  const auto start = Clock::now();
  for (int step = 2; step < kSteps; ++step) stepper.advance();
  executor.synchronize();
  timing.step_microseconds = seconds_since(start) * 1e6 / (kSteps - 2);
  require_finite(stepper);
  const auto bytes_of = [&](size_t op) {
    return bytes_moved(program.ops[op], program, {1, 1, depth}, [&](int cache) { return executor.position_bytes(cache); });
  };
  for (size_t op = 0; op < n_ops; ++op) timing.ops.push_back({op, median(op_times[op]) * 1e6, bytes_of(op)});
  for (size_t i = 0; i < parts.front().size(); ++i) {
    std::vector<double> all, preparing, reading;
    for (const std::vector<StepPart>& run_parts : parts) {
      all.push_back(run_parts[i].microseconds);
      preparing.push_back(run_parts[i].preparing);
      reading.push_back(run_parts[i].reading);
    }
    PartTiming part = {parts.front()[i], 0};
    part.part.microseconds = median(all);
    part.part.preparing = median(preparing);
    part.part.reading = median(reading);
    for (size_t op = part.part.op_begin; op < part.part.op_end; ++op) part.bytes += bytes_of(op);
    timing.parts.push_back(part);
  }
  return timing;
}

std::vector<LedgerLine> step_ledger(const Program& program, const StepTiming& timing) {
  std::vector<LedgerLine> lines = {{"weights", 0}, {"preparing and waiting", 0}, {"attention", 0}, {"norms", 0},
                                   {"head", 0},    {"sampler", 0},               {"other", 0},     {"gaps", 0}};
  const auto line = [&](std::string_view what) -> double& {
    return std::find_if(lines.begin(), lines.end(), [&](const LedgerLine& each) { return each.what == what; })->microseconds;
  };
  double sum = 0;
  for (const PartTiming& timed : timing.parts) {
    const StepPart& part = timed.part;
    sum += part.microseconds;
    // The op that names a part is its last: what comes before it prepares its input.
    const Op& op = program.ops[part.op_end - 1];
    if (const auto* linear = std::get_if<Linear>(&op)) {
      const bool head = program.rows[static_cast<size_t>(linear->y.slot)].kind == RowsKind::kLogits;
      line("preparing and waiting") += part.preparing;
      line(head ? "head" : "weights") += part.microseconds - part.preparing;
    } else if (std::holds_alternative<Attention>(op) || std::holds_alternative<QkvFinish>(op)) {
      line("attention") += part.microseconds;
    } else if (std::holds_alternative<AddNorm>(op)) {
      line("norms") += part.microseconds;
    } else if (std::holds_alternative<Sample>(op)) {
      line("sampler") += part.microseconds;
    } else {
      line("other") += part.microseconds;
    }
  }
  line("gaps") = timing.step_microseconds - sum;
  return lines;
}

}  // namespace beryl
