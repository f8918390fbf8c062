// beryl quantize: a model in other weight formats, as a folder that every command loads.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/model_name.h"
#include "cli/options.h"
#include "cpu/parallel.h"
#include "model/quantize_model.h"
#include "model/synthetic.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct QuantizeArguments {
  std::string source;
  std::string destination;
  std::string synthetic;
  std::string format = "fp4";
  std::string head = "auto";
  bool force = false;
  int64_t n_threads = 0;
};

// "fp4" is short for the project's own format.
Format format_of(const std::string& name) { return name == "fp4" ? Format::kFp4G128 : *format_by_name(name); }

std::vector<std::string> format_choices() {
  std::vector<std::string> names = {"fp4"};
  for (int i = 0; i < kFormatCount; ++i) {
    const auto format = static_cast<Format>(i);
    if (format != Format::kI32 && format != Format::kI64 && format != Format::kU8)
      names.emplace_back(info(format).name);
  }
  return names;
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A line on a terminal that is written over; nothing elsewhere.
class ProgressLine {
 public:
  ~ProgressLine() { clear(); }

  void show(const QuantizeProgress& progress) {
    if (!is_terminal(kStandardError)) return;
    const double seconds = seconds_since(start_);
    if (shown_ && seconds - last_seconds_ < 0.1) return;   // more often, nobody reads it
    last_seconds_ = seconds;
    const double share =
        static_cast<double>(progress.n_done) / static_cast<double>(std::max<int64_t>(progress.n_weights, 1));
    std::string line = fmt::format("{:5.1f} %  {:.0f} M weights/s", 100 * share,
                                   static_cast<double>(progress.n_done) / std::max(seconds, 1e-9) / 1e6);
    if (seconds > 1 && share > 0) {
      const auto left = static_cast<int64_t>(seconds / share * (1 - share));
      line += fmt::format("  {}:{:02} left", left / 60, left % 60);
    }
    // Cut, so that it stays one line: names come last, and are all of ASCII in models that there are.
    line += "  " + harmless_on_terminal(quote(progress.tensor, 40));
    write_error("\r\x1b[K" + line);
    shown_ = true;
  }
  void clear() {
    if (shown_) write_error("\r\x1b[K");
    shown_ = false;
  }

 private:
  Clock::time_point start_ = Clock::now();
  double last_seconds_ = 0;
  bool shown_ = false;
};

// What was not encoded, and why: one line, empty where there is nothing.
std::string describe_kept(const QuantizePlan& plan) {
  std::map<Treatment, std::vector<const QuantizeTensor*>> kept;
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    if (plan.treatments[i] != Treatment::kEncoded) kept[plan.treatments[i]].push_back(&plan.tensors[i]);
  std::vector<std::string> parts;
  for (const auto& [treatment, tensors] : kept) {
    const size_t n = tensors.size();
    switch (treatment) {
      case Treatment::kEncoded: break;
      case Treatment::kSame:
        parts.push_back(fmt::format("{} {} in the format asked for already", n, n == 1 ? "matrix" : "matrices"));
        break;
      case Treatment::kVector:
        parts.push_back(fmt::format("{} {}", n, n == 1 ? "vector" : "vectors (norms, scales)"));
        break;
      case Treatment::kRouter: parts.push_back(fmt::format("{} {}", n, n == 1 ? "router" : "routers")); break;
      case Treatment::kOddRows:
        parts.push_back(fmt::format("{} {} whose rows are no whole blocks ({} columns in {}, in {})", n,
                                    n == 1 ? "matrix" : "matrices", tensors.front()->source.cols,
                                    quote(tensors.front()->entry.name), info(tensors.front()->entry.format).name));
        break;
    }
  }
  std::string text = parts.empty() ? "" : fmt::format("kept as they are: {}", fmt::join(parts, ", "));
  if (!plan.dropped.empty())
    text += fmt::format("{}left out: {} tensors that a text model does not use", text.empty() ? "" : "; ",
                        plan.dropped.size());
  return text;
}

// "12.5 MB, 4.31 bits a weight, in 3.2 s; fp4_g128 is off by 9.8 % (rms), fp8 by 2.6 %"
std::string describe_result(const QuantizePlan& plan, const QuantizeResult& result, double seconds) {
  int64_t bytes = 0, n_weights = 0;
  std::map<Format, QuantizeError> errors;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const HostMatrix& source = plan.tensors[i].source;
    const Format format = plan.tensors[i].entry.format;
    const int64_t n_rows = source.stack * source.rows;
    bytes += n_rows * (row_bytes(format, source.cols) + row_scale_bytes(format, source.cols));
    n_weights += n_rows * source.cols;
    if (plan.treatments[i] != Treatment::kEncoded) continue;
    errors[format].squared_error += result.errors[i].squared_error;
    errors[format].squared_weights += result.errors[i].squared_weights;
  }
  std::vector<std::string> off;
  for (const auto& [format, error] : errors) {
    const double share =
        error.squared_weights == 0 ? 0 : std::sqrt(error.squared_error / error.squared_weights);
    off.push_back(share == 0 ? fmt::format("{} is exact", info(format).name)
                             : fmt::format("{} is off by {:.2g} % (rms)", info(format).name, 100 * share));
  }
  return fmt::format("{}, {:.2f} bits a weight, in {:.1f} s{}{}", human_bytes(bytes),
                     8.0 * static_cast<double>(bytes) / static_cast<double>(n_weights), seconds,
                     off.empty() ? "" : "; ", fmt::join(off, ", "));
}

void print_warnings(const QuantizePlan& plan, const std::string& source) {
  if (plan.checkpoint != nullptr)
    for (const std::string& warning : plan.checkpoint->warnings()) print_warning(warning);
  if (plan.was_quantised)
    print_warning(fmt::format("{}: is quantised itself; its errors and the new ones add up", source));
}

int quantize(QuantizeArguments arguments) {
  if (!arguments.synthetic.empty()) {
    // The one path given is where it goes.
    if (!arguments.destination.empty()) throw UsageError("give either SRC or --synthetic NAME");
    std::swap(arguments.source, arguments.destination);
  } else if (arguments.source.empty()) {
    throw UsageError("give SRC or --synthetic NAME");
  }
  if (arguments.destination.empty()) throw UsageError("give DST, the folder to write");
  if (arguments.destination.ends_with(".safetensors") || arguments.destination.ends_with(".gguf"))
    throw UsageError(fmt::format("DST is {}, the name of a folder was expected", quote(arguments.destination)));

  if (arguments.synthetic.empty()) arguments.source = find_model(arguments.source);
  const auto start = Clock::now();
  InterruptCatcher interrupts;
  QuantizeFormats formats;
  formats.layers = format_of(arguments.format);
  if (arguments.head != "auto") formats.head = format_of(arguments.head);
  const QuantizePlan plan = arguments.synthetic.empty() ? plan_quantize(arguments.source, formats)
                                                        : plan_synthetic(arguments.synthetic, formats, /*seed=*/1);
  QuantizeOptions options;
  options.replaces = arguments.force;
  options.n_threads = arguments.n_threads > 0 ? static_cast<int>(arguments.n_threads) : usable_cores();
  ProgressLine line;
  bool warned = false;   // once it is known that there is something to write to, and long before it is done
  options.keep_going = [&](const QuantizeProgress& progress) {
    if (!std::exchange(warned, true)) print_warnings(plan, arguments.source);
    line.show(progress);
    return !interrupts.interrupted();
  };
  const QuantizeResult result = write_model_folder(plan, arguments.destination, options);
  line.clear();
  if (!result.finished) {
    print_note("interrupted: nothing was written");
    return kExitInterrupted;
  }
  if (const std::string kept = describe_kept(plan); !kept.empty()) print_note(kept);
  print_note(fmt::format("{}: {}", arguments.destination, describe_result(plan, result, seconds_since(start))));
  return 0;
}

}  // namespace

Command add_quantize_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("quantize", "Write a model in other weight formats");
  auto arguments = std::make_shared<QuantizeArguments>();
  app->add_option("SRC", arguments->source,
                  "a GGUF file, a Hugging Face folder (config.json, safetensors), or a name that 'beryl list' shows")
      ->type_name("");
  app->add_option("DST", arguments->destination,
                  "the folder to write: model.safetensors and what the tokenizer and the config need")
      ->type_name("");
  app->add_option("--synthetic", arguments->synthetic,
                  fmt::format("instead of SRC: random weights in the true shapes of {}",
                              fmt::join(synthetic_names(), ", ")))
      ->type_name("NAME");
  const std::vector<std::string> formats = format_choices();
  add_choice(*app, "--format", arguments->format, formats,
             fmt::format("format of the layers' matrices (default: fp4): {}", fmt::join(formats, ", ")));
  std::vector<std::string> head_formats = formats;
  head_formats.emplace_back("auto");
  add_choice(*app, "--head", arguments->head, head_formats,
             "format of embedding and head (default: fp8 beside the 4-bit floats, q8_0 beside small integers, else "
             "as --format)");
  app->add_flag("--force", arguments->force, "replace DST, if it holds nothing but a model");
  add_integer(*app, "--threads", arguments->n_threads, 1, 1024, "threads (default: one a core)");
  app->footer(
      "Norms, routers and matrices whose rows are no whole blocks keep their format.\n\n"
      "Examples:\n"
      "  beryl quantize gemma-3-1b-it gemma-3-1b-fp4\n"
      "  beryl quantize model.gguf model-q8 --format q8_0\n"
      "  beryl quantize --synthetic gemma4-12b random-12b --format fp4 --head fp8");
  return {app, [arguments] { return quantize(*arguments); }};
}

}  // namespace beryl::cli
