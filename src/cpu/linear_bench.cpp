// How fast a Linear is: GB/s of weight bytes when decoding (one token), GFLOP/s in prefill.
//
// Weights are cold, as in a model: each run goes through copies that together exceed the last-level cache. Threads: one
// a core that the process may use, or the environment variable BERYL_BENCH_THREADS.
//   cpu_bench --benchmark_filter=decode
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "cpu/cpu_backend.h"
#include "cpu/simd.h"
#include "ops/random_matrix.h"

namespace beryl {
namespace {

struct Case {
  std::string name;
  Format format;
  int64_t rows;
  int64_t cols;
  bool gated = false;          // two parts of `rows` each
  int n_tokens = 1;
};

constexpr int64_t kColdBytes = 128 << 20;

void linear_bench(benchmark::State& state, const Case& c) {
  WeightSet weights;
  Program program;
  program.rows = {{"x", c.cols, RowsKind::kActivation, RowCount::kTokens},
                  {"y", c.rows, RowsKind::kActivation, RowCount::kTokens}};
  program.vocab = 1;
  program.n_layers = 1;
  const int n_parts = c.gated ? 2 : 1;
  int64_t copies = 0;
  for (int64_t bytes = 0; bytes < kColdBytes && copies < 400; ++copies) {
    WeightMatrix matrix{fmt::format("copy {}", copies), {}};
    for (int part = 0; part < n_parts; ++part)
      matrix.parts.push_back(
          random_matrix(c.format, c.rows, c.cols, 1, 1.0f, static_cast<uint64_t>(2 * copies + part)).matrix);
    bytes += matrix.bytes();
    weights.matrices.push_back(std::move(matrix));
    Linear op;
    op.weight = {static_cast<int>(copies)};
    op.x = {0, 0, c.cols};
    op.y = {1, 0, c.rows};
    if (c.gated) op.epilogue = Epilogue::kGatedGelu;
    program.ops.emplace_back(op);
    program.layer_of_op.push_back(0);
  }
  program.weights = &weights;
  StepLimits limits;
  limits.max_tokens = c.n_tokens;
  const char* threads = std::getenv("BERYL_BENCH_THREADS");
  const std::unique_ptr<Backend> backend = make_cpu_backend(threads == nullptr ? 0 : std::atoi(threads));
  const std::unique_ptr<Executor> executor = backend->prepare(program, limits);
  StepInput input;
  for (int t = 0; t < c.n_tokens; ++t) {
    input.ids.push_back(0);
    input.positions.push_back(t);
    input.sequences.push_back(0);
  }
  executor->set_input(input);
  RandomStream random(1);
  std::vector<float> x(static_cast<size_t>(c.n_tokens * c.cols));
  for (float& value : x) value = random.between(-1, 1);
  executor->write_rows(0, 0, c.n_tokens, x.data());
  for (auto _ : state) executor->run();
  const double runs = static_cast<double>(state.iterations()) * static_cast<double>(copies);
  state.SetBytesProcessed(static_cast<int64_t>(runs * static_cast<double>(weights.matrices[0].bytes())));
  state.counters["us"] = benchmark::Counter(runs, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["GFLOP/s"] =
      benchmark::Counter(runs * 2e-9 * static_cast<double>(c.n_tokens * c.rows * c.cols * n_parts),
                         benchmark::Counter::kIsRate);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Format format : {Format::kF32, Format::kF16, Format::kBf16, Format::kQ4_0, Format::kQ4_1, Format::kQ5_0,
                              Format::kQ5_1, Format::kQ8_0, Format::kQ4_K, Format::kQ5_K, Format::kQ6_K, Format::kMxfp4,
                              Format::kNvfp4, Format::kFp4G128, Format::kFp8})
    all.push_back({fmt::format("decode/{}/2048x2048", info(format).name), format, 2048, 2048});
  const std::vector<Case> layers = {
      {"gemma3-270m/q", Format::kQ5_0, 1024, 640},
      {"gemma3-270m/o", Format::kQ4_K, 640, 1024},
      {"gemma3-270m/gate_up", Format::kQ5_0, 2048, 640, true},
      {"gemma3-270m/down", Format::kQ6_K, 640, 2048},
      {"smollm2-135m/q", Format::kQ4_1, 576, 576},
      {"smollm2-135m/gate_up", Format::kQ4_1, 1536, 576, true},
      {"smollm2-135m/down", Format::kQ4_1, 576, 1536},
  };
  for (const int n_tokens : {1, 4, 8, 256})
    for (Case c : layers) {
      c.name = fmt::format("{}/{}/{} tokens", n_tokens == 1 ? "decode" : "prefill", c.name, n_tokens);
      c.n_tokens = n_tokens;
      all.push_back(c);
    }
  all.push_back({"decode/gemma3-270m/head", Format::kQ8_0, 262144, 640});
  all.push_back({"decode/smollm2-135m/head", Format::kQ8_0, 49152, 576});
  return all;
}

}  // namespace
}  // namespace beryl

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("cpu target", beryl::cpu_target());
  for (const beryl::Case& c : beryl::cases())
    benchmark::RegisterBenchmark(c.name.c_str(), [c](benchmark::State& state) { beryl::linear_bench(state, c); })
        ->UseRealTime()
        ->Unit(benchmark::kMicrosecond);
  benchmark::RunSpecifiedBenchmarks();
}
