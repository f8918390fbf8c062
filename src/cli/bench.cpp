// beryl bench: how fast a model runs, in llama-bench's terms, and where the time of a token goes.
#include <algorithm>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "engine/bench.h"
#include "model/memory_plan.h"
#include "model/model.h"
#include "model/synthetic.h"

namespace beryl::cli {
namespace {

constexpr int64_t kMaxPositions = 1 << 24;
constexpr int64_t kMaxStreams = 1024;

struct BenchOptions {
  std::string model;
  std::string synthetic;
  std::string format = "fp4_g128";
  std::string head = "fp8";
  DeviceOptions device;
  std::vector<int64_t> prompts = {512};
  std::vector<int64_t> gens = {128};
  std::vector<int64_t> depths = {0};
  std::vector<int64_t> streams = {1};
  std::vector<int64_t> allocated = {0};
  std::string cache = "default";
  int64_t chunk_tokens = 512;
  int64_t n_repetitions = 5;
  std::string output = "md";
  bool ops = false;
};

Format format_option(const char* option, const std::string& name) {
  const std::optional<Format> format = format_by_name(name);
  if (!format || *format == Format::kI32 || *format == Format::kI64 || *format == Format::kU8)
    throw UsageError(fmt::format("{}: '{}' is no weight format; fp4_g128, q4_0, q4_k, q8_0, fp8, bf16 are some", option, name));
  return *format;
}

std::string test_name(const BenchCase& what) {
  std::string name = what.n_prompt > 0 ? fmt::format("pp{}", what.n_prompt) : fmt::format("tg{}", what.n_gen);
  if (what.n_depth > 0) name += fmt::format(" @ d{}", what.n_depth);
  if (what.n_streams > 1) name += fmt::format(" x{}", what.n_streams);
  if (what.allocated > 0) name += fmt::format(" of {}", what.allocated);
  return name;
}

// llama-bench's field names, so that its readers read this too.
nlohmann::json to_json(const BenchResult& result, const Model& model, const Backend& backend, const BenchOptions& options) {
  int64_t bytes = 0, parameters = 0;
  for (const WeightMatrix& matrix : model.weights->set.matrices) {
    bytes += matrix.bytes();
    parameters += matrix.rows() * matrix.cols() * matrix.stack();
  }
  std::vector<int64_t> nanoseconds;
  const auto tokens = static_cast<double>((result.what.n_prompt + result.what.n_gen) * result.what.n_streams);
  for (double speed : result.tokens_per_second) nanoseconds.push_back(static_cast<int64_t>(tokens / speed * 1e9));
  return {{"backends", backend.name()},
          {"model_filename", options.model},
          {"model_type", options.synthetic.empty() ? model.config.name
                                                   : fmt::format("{} {} head {}", options.synthetic, options.format, options.head)},
          {"model_size", bytes},
          {"model_n_params", parameters},
          {"n_batch", options.chunk_tokens},
          {"n_threads", options.device.n_threads},
          {"type_k", options.cache},
          {"type_v", options.cache},
          {"n_prompt", result.what.n_prompt},
          {"n_gen", result.what.n_gen},
          {"n_depth", result.what.n_depth},
          {"n_streams", result.what.n_streams},
          {"n_allocated", result.what.allocated},
          {"test_time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"avg_ts", result.mean()},
          {"stddev_ts", result.standard_deviation()},
          {"median_ts", result.median()},
          {"samples_ts", result.tokens_per_second},
          {"samples_ns", nanoseconds}};
}

void print_ops(const Model& model, Backend& backend, const BenchOptions& options, int64_t depth) {
  const StepTiming timing = time_ops(model.program, backend, depth, cache_type_by_name(options.cache), static_cast<int>(options.n_repetitions));
  std::string text = fmt::format("| op | layer | us | MB | GB/s |\n|---|---:|---:|---:|---:|\n");
  double sum = 0;
  for (const OpTiming& op : timing.ops) {
    const int layer = model.program.layer_of_op[op.op];
    sum += op.microseconds;
    text += fmt::format("| {} | {} | {:.1f} | {:.3f} | {:.1f} |\n", op_name(model.program.ops[op.op]), layer, op.microseconds,
                        static_cast<double>(op.bytes) * 1e-6, static_cast<double>(op.bytes) / op.microseconds * 1e-3);
  }
  text += fmt::format("\nops one by one: {:.1f} us; the step as a whole: {:.1f} us\n", sum, timing.step_microseconds);
  write_output(text);
}

int bench(const BenchOptions& options) {
  if (options.model.empty() == options.synthetic.empty()) throw UsageError("give either MODEL or --synthetic NAME");
  const std::unique_ptr<Backend> backend = make_backend(options.device);
  const Model model = options.synthetic.empty()
                          ? open_model(options.model)
                          : make_synthetic_model(options.synthetic,
                                                 {format_option("--format", options.format), format_option("--head", options.head)}, 1, true);
  if (options.ops) {
    for (int64_t depth : options.depths) print_ops(model, *backend, options, depth);
    return 0;
  }
  std::vector<BenchCase> cases;
  for (int64_t depth : options.depths)
    for (int64_t streams : options.streams)
      for (int64_t allocated : options.allocated) {
        for (int64_t n : options.prompts)
          if (n > 0) cases.push_back({n, 0, depth, static_cast<int>(streams), allocated});
        for (int64_t n : options.gens)
          if (n > 0) cases.push_back({0, n, depth, static_cast<int>(streams), allocated});
      }
  if (cases.empty()) throw UsageError("nothing to measure: -p and -n are both 0");

  nlohmann::json all = nlohmann::json::array();
  if (options.output == "md") write_output("| test | t/s | sd | median |\n|---|---:|---:|---:|\n");
  for (const BenchCase& what : cases) {
    const BenchResult result = run_bench_case(model.program, *backend, what, static_cast<int>(options.chunk_tokens),
                                              cache_type_by_name(options.cache), static_cast<int>(options.n_repetitions));
    if (options.output == "md") {
      write_output(fmt::format("| {} | {:.2f} | {:.2f} | {:.2f} |\n", test_name(what), result.mean(), result.standard_deviation(),
                               result.median()));
    } else {
      all.push_back(to_json(result, model, *backend, options));
    }
  }
  if (options.output == "json") write_output(all.dump(2) + "\n");
  return 0;
}

}  // namespace

Command add_bench_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("bench", "Measure how fast a model runs");
  auto options = std::make_shared<BenchOptions>();
  app->add_option("MODEL", options->model, "a GGUF file or a Hugging Face folder")->type_name("");
  app->add_option("--synthetic", options->synthetic, "instead of MODEL: random weights in the true shapes of " +
                                                         fmt::format("{}", fmt::join(synthetic_names(), ", ")))->type_name("NAME");
  app->add_option("--format", options->format, "synthetic: format of the layers' weights")->type_name("FORMAT")->capture_default_str();
  app->add_option("--head", options->head, "synthetic: format of embedding and head")->type_name("FORMAT")->capture_default_str();
  add_device_options(*app, options->device);
  add_integers(*app, "-p", options->prompts, 0, kMaxPositions, "prompt lengths; 0: none");
  add_integers(*app, "-n", options->gens, 0, kMaxPositions, "tokens to decode; 0: none");
  add_integers(*app, "-d", options->depths, 0, kMaxPositions, "positions already in the cache");
  add_integers(*app, "-b", options->streams, 1, kMaxStreams, "sequences at once");
  add_integers(*app, "--allocate", options->allocated, 0, kMaxPositions, "positions the cache is made for; 0: as many as needed");
  add_choice(*app, "--cache", options->cache, {"default", "f32", "bf16", "fp8"}, "element type of the cache");
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 20, "rows of a prefill step");
  add_integer(*app, "-r", options->n_repetitions, 1, 10000, "repetitions, after one that is not counted");
  add_choice(*app, "-o", options->output, {"md", "json"}, "output: a Markdown table, or JSON with llama-bench's field names");
  app->add_flag("--ops", options->ops, "time each op of a decode step at each depth of -d");
  app->footer(
      "Examples:\n"
      "  beryl bench model.gguf\n"
      "  beryl bench model.gguf -p 0 -n 64 -d 0,4096 -o json\n"
      "  beryl bench --synthetic gemma4-12b --format q4_0 -b 1,4");
  return {app, [options] { return bench(*options); }};
}

}  // namespace beryl::cli
