// beryl bench: how fast a model runs, in llama-bench's terms, and where the time of a token goes.
#include <algorithm>
#include <ctime>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/system_memory.h"
#include "build_commit.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/model_name.h"
#include "cli/options.h"
#include "cpu/parallel.h"
#include "cpu/read_speed.h"
#include "engine/bench.h"
#include "model/memory_plan.h"
#include "model/model.h"
#include "model/synthetic.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

constexpr int64_t kMaxPositions = 1 << 24;
constexpr int64_t kMaxStreams = 1024;
constexpr int64_t kReadBytes = 512 << 20;   // no cache holds a part of it that counts

struct BenchOptions {
  std::string model;
  std::string synthetic;
  std::string formats = "fp4_g128";
  std::string heads = "fp8";
  DeviceOptions device;
  std::vector<int64_t> prompts = {512};
  std::vector<int64_t> gens = {128};
  std::vector<int64_t> depths = {0};
  std::vector<int64_t> streams = {1};
  std::vector<int64_t> allocated = {0};
  std::vector<std::string> caches = {"default"};
  int64_t chunk_tokens = 0;         // 0: chosen by the device
  int64_t n_repetitions = 5;
  std::string output = "md";
  bool ops = false;
  bool read = false;
  bool floor = false;
  bool names_formats = false;      // --format or --head was given
};

std::vector<Format> format_list(const char* option, const std::string& names) {
  std::vector<Format> formats;
  for (const std::string& name : split_list(names)) {
    const std::optional<Format> format = format_by_name(name);
    if (!format || *format == Format::kI32 || *format == Format::kI64 || *format == Format::kU8)
      throw UsageError(fmt::format("{}: {} is no weight format; fp4_g128, q4_0, q4_k, q8_0, fp8, bf16 are some", option, quote(name)));
    formats.push_back(*format);
  }
  return formats;
}

// Each of --format with the one of --head at its place; one head serves all.
std::vector<SyntheticFormats> synthetic_formats(const BenchOptions& options) {
  const std::vector<Format> layers = format_list("--format", options.formats), heads = format_list("--head", options.heads);
  if (heads.size() != 1 && heads.size() != layers.size())
    throw UsageError(fmt::format("--head names {} formats, --format {}: one for all or one for each was expected", heads.size(),
                                 layers.size()));
  std::vector<SyntheticFormats> all;
  for (size_t i = 0; i < layers.size(); ++i) all.push_back({layers[i], heads[heads.size() == 1 ? 0 : i]});
  return all;
}

// All that is measured on one load of the weights. The cross product of the lists, in llama-bench's order.
std::vector<BenchCase> bench_cases(const BenchOptions& options) {
  std::vector<BenchCase> cases;
  for (int64_t streams : options.streams)
    for (int64_t depth : options.depths) {
      for (int64_t n : options.prompts)
        if (n > 0) cases.push_back({n, 0, depth, static_cast<int>(streams)});
      for (int64_t n : options.gens)
        if (n > 0) cases.push_back({0, n, depth, static_cast<int>(streams)});
    }
  if (cases.empty()) throw UsageError("nothing to measure: -p and -n are both 0");
  return cases;
}

// Positions behind those that a model was made for are read as slowly as any, and mean nothing.
void require_positions(const Model& model, const std::vector<BenchCase>& cases) {
  for (const BenchCase& what : cases) {
    const int64_t needed = what.n_depth + what.n_prompt + what.n_gen;
    if (needed <= model.config.context) continue;
    throw Error(ErrorCode::kBadInput,
                fmt::format("-d {} and {} {} need {} positions, the model was made for {}", what.n_depth, what.n_prompt > 0 ? "-p" : "-n",
                            what.n_prompt + what.n_gen, needed, model.config.context));
  }
}

// Random weights lie in memory twice on a host: as a file would have them, and as products read them. Asked for before any is made,
// since the system lends more than it has and ends somebody's process when it is used.
void require_memory_for_synthetic(const std::string& name, const SyntheticFormats& formats, const Backend& backend) {
  const Model model = make_synthetic_model(name, formats, 1, false);
  RunLimits run;
  run.context = run.chunk_tokens = 1;
  const MemoryPlan plan = plan_memory(model.program, run, backend);
  const int64_t random = plan.total(MemoryKind::kMappedWeights), needed = random + plan.total(), available = available_memory_bytes();
  if (needed <= available) return;
  throw Error(ErrorCode::kOutOfMemory,
              fmt::format("out of memory: {} with weights in {} needs {} at least ({} of random weights, {} as the backend keeps them), "
                          "{} are free",
                          name, info(formats.layers).name, human_bytes(needed), human_bytes(random), human_bytes(plan.total()),
                          human_bytes(available)));
}

std::string test_name(const BenchResult& result, bool with_allocation) {
  const BenchCase& what = result.what;
  std::string name = what.n_prompt > 0 ? fmt::format("pp{}", what.n_prompt) : fmt::format("tg{}", what.n_gen);
  if (what.n_depth > 0) name += fmt::format(" @ d{}", what.n_depth);
  if (what.n_streams > 1) name += fmt::format(" x{}", what.n_streams);
  if (with_allocation) name += fmt::format(" of {}", result.n_allocated);
  return name;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) {
      const size_t colon = line.find(": ");
      return colon == std::string::npos ? std::string() : line.substr(colon + 2);
    }
  return {};
}

// "q6_k", or "q6_k (does not fit all: 180 of 210 are q8_0)": rows must be a whole number of blocks.
std::string layer_formats(const Model& model, const SyntheticFormats& formats) {
  const std::string wanted(info(formats.layers).name), head(info(formats.head).name);
  std::map<std::string, int> others;
  int n_parts = 0;
  for (const WeightMatrix& matrix : model.weights->set.matrices)
    for (const HostMatrix& part : matrix.parts) {
      if (part.rows == model.config.vocab) continue;   // embedding and head
      ++n_parts;
      if (part.format != formats.layers) ++others[std::string(info(part.format).name)];
    }
  if (others.empty()) return wanted;
  std::string text = wanted + " (does not fit all:";
  for (const auto& [name, n] : others) text += fmt::format(" {} of {} are {}", n, n_parts, name);
  return text + ")";
}

// What is the same for all results of a load.
struct BenchSubject {
  std::string file;
  std::string type;
  int64_t weight_bytes = 0;
  int64_t n_parameters = 0;
};

BenchSubject describe_subject(const Model& model, const BenchOptions& options, const SyntheticFormats* formats) {
  BenchSubject subject;
  subject.file = options.model;
  subject.type = formats == nullptr ? model.config.name
                                    : fmt::format("{} {} head {}", options.synthetic, layer_formats(model, *formats),
                                                  info(formats->head).name);
  for (const WeightMatrix& matrix : model.weights->set.matrices) {
    subject.weight_bytes += matrix.bytes();
    subject.n_parameters += matrix.rows() * matrix.cols() * matrix.stack();
  }
  return subject;
}

// llama-bench's field names, so that its readers read this too; n_streams, n_allocated, median_ts and build_version are ours.
nlohmann::ordered_json to_json(const BenchResult& result, const BenchSubject& subject, const Backend& backend, std::string_view cache,
                               int chunk_tokens, const BenchOptions& options) {
  const std::vector<double> speeds = result.tokens_per_second();
  std::vector<int64_t> nanoseconds;
  for (double seconds : result.seconds) nanoseconds.push_back(static_cast<int64_t>(seconds * 1e9));
  nlohmann::ordered_json json = {
      {"build_commit", kBuildCommit},
      {"build_version", BERYL_VERSION},
      {"cpu_info", processor_name()},
      {"gpu_info", backend.device_name()},
      {"backends", backend.name()},
      {"model_filename", subject.file},
      {"model_type", subject.type},
      {"model_size", subject.weight_bytes},
      {"model_n_params", subject.n_parameters},
      {"n_batch", chunk_tokens},
      {"n_ubatch", chunk_tokens},
      {"n_threads", options.device.n_threads > 0 ? options.device.n_threads : int64_t{std::thread::hardware_concurrency()}},
      {"type_k", cache},
      {"type_v", cache},
      {"n_prompt", result.what.n_prompt},
      {"n_gen", result.what.n_gen},
      {"n_depth", result.what.n_depth},
      {"n_streams", result.what.n_streams},
      {"n_allocated", result.n_allocated},
      {"test_time", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
      {"avg_ns", static_cast<int64_t>(mean(result.seconds) * 1e9)},
      {"stddev_ns", static_cast<int64_t>(standard_deviation(result.seconds) * 1e9)},
      {"avg_ts", mean(speeds)},
      {"stddev_ts", standard_deviation(speeds)},
      {"median_ts", median(speeds)},
      {"samples_ns", nanoseconds},
      {"samples_ts", speeds}};
  if (result.read_speeds.empty()) return json;
  std::vector<double> gigabytes;
  for (double each : result.read_speeds) gigabytes.push_back(each * 1e-9);
  json["samples_read_gb_s"] = gigabytes;
  if (result.what.n_gen == 0) return json;
  json["step_bytes"] = result.step_bytes;
  json["samples_share_of_read"] = result.shares_of_read();
  return json;
}

const char* cache_words(const Backend& backend, int element_bytes) {
  switch (element_bytes) {
    case 1: return "fp8";
    case 2: return backend.memory() ? "bf16" : "f16";
    case 8: return "f64";
    default: return "f32";
  }
}

// The ceiling of decoding on a CPU: GB/s at which threads read memory that no cache holds.
int print_read_speed(const BenchOptions& options) {
  if (!options.model.empty() || !options.synthetic.empty()) throw UsageError("--read measures the machine: it takes no MODEL");
  const int most = options.device.n_threads > 0 ? static_cast<int>(options.device.n_threads) : usable_cores();
  std::string text = "| threads | GB/s read | sd | median |\n|---:|---:|---:|---:|\n";
  for (int n_threads = 1; n_threads <= most; n_threads = n_threads < most && 2 * n_threads > most ? most : 2 * n_threads) {
    std::vector<double> speeds = measure_read_speed(n_threads, kReadBytes, static_cast<int>(options.n_repetitions));
    for (double& speed : speeds) speed *= 1e-9;
    text += fmt::format("| {} | {:.1f} | {:.1f} | {:.1f} |\n", n_threads, mean(speeds), standard_deviation(speeds), median(speeds));
  }
  write_output(text);
  return 0;
}

// Of a device's own ceiling: a plain read, measured by the same command.
std::string share_of(double bytes, double microseconds, double ceiling) {
  if (ceiling <= 0 || microseconds <= 0) return "";
  return fmt::format("{:.0f} %", 100 * bytes / microseconds * 1e6 / ceiling);
}

void print_ops(const Model& model, Backend& backend, const BenchOptions& options, CacheType cache, int64_t depth) {
  const double ceiling = backend.read_ceiling();
  const StepTiming timing = time_ops(model.program, backend, depth, cache, static_cast<int>(options.n_repetitions));
  std::string text;
  if (ceiling > 0) text += fmt::format("a plain read of this device's memory: {:.0f} GB/s\n\n", ceiling * 1e-9);
  const auto line = [&](const std::string& name, size_t op, double microseconds, double bytes) {
    text += fmt::format("| {} | {} | {:.1f} | {:.3f} | {:.1f} | {} |\n", name, model.program.layer_of_op[op], microseconds, bytes * 1e-6,
                        bytes / microseconds * 1e-3, share_of(bytes, microseconds, ceiling));
  };
  text += fmt::format("depth {}, ops one by one:\n\n| op | layer | us | MB | GB/s | of the ceiling |\n|---|---:|---:|---:|---:|---:|\n", depth);
  double sum = 0;
  for (const OpTiming& op : timing.ops) {
    sum += op.microseconds;
    line(op_name(model.program.ops[op.op]), op.op, op.microseconds, static_cast<double>(op.bytes));
  }
  text += fmt::format("\nops one by one: {:.1f} us; the step as a whole: {:.1f} us\n", sum, timing.step_microseconds);
  if (!timing.parts.empty()) {
    text += "\nas the step runs them; read: the same without the products, a plain read of the weights, or of keys and values, at this place:\n\n"
            "| ops | layer | us | MB | GB/s | of the ceiling | preparing, us | read, us | of the read |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for (const PartTiming& timed : timing.parts) {
      const StepPart& part = timed.part;
      std::string names;
      for (size_t op = part.op_begin; op < part.op_end; ++op)
        names += fmt::format("{}{}", names.empty() ? "" : " ", op_name(model.program.ops[op]));
      const auto bytes = static_cast<double>(timed.bytes);
      const std::string of_read = part.reading > 0 ? fmt::format("{:.1f} | {:.0f} %", part.reading, 100 * part.reading / part.microseconds) : "| ";
      text += fmt::format("| {} | {} | {:.1f} | {:.3f} | {:.1f} | {} | {:.1f} | {} |\n", names, model.program.layer_of_op[part.op_end - 1],
                          part.microseconds, bytes * 1e-6, bytes / part.microseconds * 1e-3,
                          share_of(bytes, part.microseconds, ceiling), part.preparing, of_read);
    }
    text += "\n| where one token's time goes | us | share |\n|---|---:|---:|\n";
    for (const LedgerLine& each : step_ledger(model.program, timing))
      text += fmt::format("| {} | {:.1f} | {:.1f} % |\n", each.what, each.microseconds, 100 * each.microseconds / timing.step_microseconds);
    text += fmt::format("| step | {:.1f} | |\n", timing.step_microseconds);
  }
  write_output(text);
}

class Bench {
 public:
  explicit Bench(const BenchOptions& options) : options_(options) {}

  int run() {
    if ((options_.read || options_.ops) && options_.output != "md")
      throw UsageError(fmt::format("-o {}: {} prints Markdown only (-o md)", options_.output, options_.read ? "--read" : "--ops"));
    if (options_.read && options_.ops) throw UsageError("--read measures the machine and --ops a model: one of them at a time");
    if (options_.read && options_.device.name == "cuda") throw UsageError("--read measures the host's memory; on a GPU --ops does, beside a model");
    if (options_.read && options_.floor)
      throw UsageError("--floor measures a model beside memory, --read memory alone: one of them at a time");
    if (options_.read) return print_read_speed(options_);
    if (options_.floor && options_.ops) throw UsageError("--floor is for whole runs, not for --ops");
    if (options_.model.empty() == options_.synthetic.empty()) throw UsageError("give either MODEL or --synthetic NAME");
    if (options_.synthetic.empty() && options_.names_formats)
      throw UsageError("--format and --head are for --synthetic: a file has the formats it has");
    if (options_.device.name == "reference" && options_.caches != std::vector<std::string>{"default"})
      throw UsageError("--cache: the reference's cache has double precision");
    std::vector<SyntheticFormats> formats = {{}};
    if (!options_.synthetic.empty()) formats = synthetic_formats(options_);
    if (options_.ops) {
      for (const int64_t depth : options_.depths) cases_.push_back({0, kTimedSteps, depth, 1});
    } else {
      cases_ = bench_cases(options_);
    }
    if (!options_.synthetic.empty()) synthetic_config(options_.synthetic);   // an unknown name is said before a device is opened
    backend_ = make_backend(options_.device);
    if (options_.floor) {
      if (backend_->memory()) throw UsageError("--floor measures the host's memory; on a GPU --ops measures the device's");
      meter_.emplace(static_cast<int>(options_.device.n_threads), kReadBytes);
    }
    for (SyntheticFormats& each : formats) {
      // Devices with memory of their own take a copy of each matrix.
      each.separate = !backend_->memory();
      const bool synthetic = !options_.synthetic.empty();
      if (synthetic && each.separate) require_memory_for_synthetic(options_.synthetic, each, *backend_);
      const Model model = synthetic ? make_synthetic_model(options_.synthetic, each, 1, true) : open_model(options_.model);
      if (!synthetic)
        for (const std::string& warning : model.checkpoint->warnings()) print_warning(warning);
      require_positions(model, cases_);
      warn_of_idle_options(options_.device, *backend_, model.program);
      const BenchSubject subject = describe_subject(model, options_, synthetic ? &each : nullptr);
      naming_model(synthetic ? options_.synthetic : options_.model, [&] {
        for (const std::string& cache : options_.caches) measure(model, subject, cache_type_by_name(cache));
      });
    }
    if (options_.output == "json") write_output(all_.dump(2) + "\n");
    return 0;
  }

 private:
  void measure(const Model& model, const BenchSubject& subject, CacheType cache) {
    if (options_.ops) {
      for (int64_t depth : options_.depths)
        load_on(options_.device, backend_, [&](Backend& backend) { print_ops(model, backend, options_, cache, depth); });
      return;
    }
    for (int64_t allocated : options_.allocated) {
      const auto make = [&](Backend& backend) {
        return std::make_unique<BenchRunner>(model.program, backend, cases_, allocated, static_cast<int>(options_.chunk_tokens), cache);
      };
      // A table half of one device and half of another would mislead.
      const std::unique_ptr<BenchRunner> runner = n_results_ == 0 ? load_on(options_.device, backend_, make) : make(*backend_);
      std::function<double()> read;
      if (meter_) read = [this] { return meter_->measure(); };
      for (const BenchCase& what : cases_)
        report(runner->run(what, static_cast<int>(options_.n_repetitions), read), subject,
               cache_words(*backend_, runner->cache_element_bytes()), runner->chunk_tokens());
    }
  }

  void report(const BenchResult& result, const BenchSubject& subject, std::string_view cache, int chunk_tokens) {
    const bool first = n_results_++ == 0;
    if (options_.output == "md") {
      if (first)
        write_output(fmt::format("| model | cache | test | t/s | sd | median |{}\n|---|---|---|---:|---:|---:|{}\n",
                                 meter_ ? " GB/s read | share |" : "", meter_ ? "---:|---:|" : ""));
      const std::vector<double> speeds = result.tokens_per_second();
      const bool with_allocation = options_.allocated.size() > 1 || options_.allocated.front() > 0;
      std::string floor;
      if (meter_) {
        const std::vector<double> shares = result.shares_of_read();
        floor = fmt::format(" {:.1f} | {} |", median(result.read_speeds) * 1e-9,
                            shares.empty() ? "" : fmt::format("{:.0f} %", 100 * median(shares)));
      }
      write_output(fmt::format("| {} | {} | {} | {:.2f} | {:.2f} | {:.2f} |{}\n", subject.type, cache, test_name(result, with_allocation),
                               mean(speeds), standard_deviation(speeds), median(speeds), floor));
      return;
    }
    nlohmann::ordered_json line = to_json(result, subject, *backend_, cache, chunk_tokens, options_);
    if (options_.output == "jsonl")
      write_output(line.dump() + "\n");
    else
      all_.push_back(std::move(line));
  }

  const BenchOptions& options_;
  std::vector<BenchCase> cases_;
  std::unique_ptr<Backend> backend_;
  std::optional<ReadMeter> meter_;   // with --floor
  nlohmann::ordered_json all_ = nlohmann::ordered_json::array();
  int n_results_ = 0;
};

}  // namespace

Command add_bench_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("bench", "Measure how fast a model runs");
  auto options = std::make_shared<BenchOptions>();
  app->add_option("MODEL", options->model, "a GGUF file, a Hugging Face folder, or a name that 'beryl list' shows")
      ->type_name("");
  app->final_callback([options] { options->model = find_model(options->model); });
  app->add_option("--synthetic", options->synthetic, "instead of MODEL: random weights in the true shapes of " +
                                                         fmt::format("{}", fmt::join(synthetic_names(), ", ")))->type_name("NAME");
  app->add_option("--format", options->formats, "synthetic: formats of the layers' weights, with commas")
      ->type_name("FORMAT,...")
      ->capture_default_str();
  app->add_option("--head", options->heads, "synthetic: format of embedding and head, one for all of --format or one for each")
      ->type_name("FORMAT,...")
      ->capture_default_str();
  add_device_options(*app, options->device);
  add_integers(*app, "-p", options->prompts, 0, kMaxPositions, "prompt lengths; 0: none");
  add_integers(*app, "-n", options->gens, 0, kMaxPositions, "tokens to decode; 0: none");
  add_integers(*app, "-d", options->depths, 0, kMaxPositions, "positions already in the cache");
  add_integers(*app, "-b", options->streams, 1, kMaxStreams, "sequences at once");
  add_integers(*app, "--allocate", options->allocated, 0, kMaxPositions,
               "positions the cache is made for; 0: as many as the longest case needs");
  add_choices(*app, "--cache", options->caches, {"default", "f32", "f16", "bf16", "fp8"},
              "element types of the cache: f16 (the default) and f32 on the CPU; bf16 (the default), fp8 and f32 on a GPU");
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 20, "rows of a prefill step (default 512; on a GPU up to 2048, as memory allows)");
  add_integer(*app, "-r", options->n_repetitions, 1, 10000, "repetitions, after one or two that are not counted");
  add_choice(*app, "-o", options->output, {"md", "json", "jsonl"},
             "output: a Markdown table, or JSON (jsonl: a line a result, as it comes) with llama-bench's field names");
  app->add_flag("--ops", options->ops, "time each op of a decode step at each depth of -d");
  app->add_flag("--read", options->read, "without a model: how fast memory is read by 1, 2, 4, ... threads, up to --threads");
  app->add_flag("--floor", options->floor,
                "on a host: also how fast memory is read, measured between the repetitions, and the share of that speed at which "
                "decoding moved what a token must move");
  app->footer(
      "Examples:\n"
      "  beryl bench --read\n"
      "  beryl bench model.gguf\n"
      "  beryl bench model.gguf -p 0 -n 64 -d 0,4096 -o json\n"
      "  beryl bench model.gguf -p 0 -n 8 -r 9 --floor\n"
      "  beryl bench --synthetic gemma4-12b --format q4_0 -b 1,4\n"
      "  beryl bench --synthetic gemma4-12b --format fp4_g128,q4_0 --head fp8,q8_0 --cache bf16,fp8 -o jsonl\n"
      "\n"
      "Every combination of the lists is measured; the weights are loaded once for each format, cache and --allocate.");
  return {app, [app, options] {
            options->names_formats = app->count("--format") + app->count("--head") > 0;
            return Bench(*options).run();
          }};
}

}  // namespace beryl::cli
