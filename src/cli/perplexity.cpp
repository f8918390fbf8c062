// beryl perplexity: how well a model predicts a text, and what a backend's arithmetic changes about that.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/mapped_file.h"
#include "build_commit.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "cli/text_input.h"
#include "engine/perplexity.h"
#include "model/model.h"

namespace beryl::cli {
namespace {

struct PerplexityOptions {
  std::string model;
  std::string file;
  DeviceOptions device;
  std::string against;             // empty: nothing is compared
  int64_t window_tokens = 512;
  std::optional<int64_t> first_scored;
  int64_t skip = 0;
  int64_t chunk_tokens = 64;
  double margin = 0.1;
  std::string output = "text";
};

std::vector<int32_t> read_ids(const Model& model, const Tokenizer& tokenizer, const std::string& path) {
  const MappedFile file(path);
  if (file.bytes().empty()) throw Error(ErrorCode::kBadInput, fmt::format("{}: is empty", path));
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  std::vector<int32_t> ids = encode_raw_prompt(tokenizer, text, false);
  check_prompt_ids(ids, model.config.vocab, tokenizer);
  return ids;
}

nlohmann::ordered_json to_json(std::string_view device, const TextScore& score, int64_t n_read) {
  return {{"device", device},
          {"perplexity", score.perplexity()},
          {"perplexity_error", score.perplexity_error()},
          {"mean_nll", score.mean_nll},
          {"nll_error", score.nll_error},
          {"tokens_per_second", static_cast<double>(n_read) / score.seconds}};
}

std::string to_text(std::string_view device, const TextScore& score, int64_t n_read) {
  return fmt::format("{:<12}perplexity {:.4f} +- {:.4f}, {:.1f} tok/s\n", device, score.perplexity(),
                     score.perplexity_error(), static_cast<double>(n_read) / score.seconds);
}

int run_perplexity(const PerplexityOptions& options) {
  const int64_t first_scored = options.first_scored.value_or(options.window_tokens / 2);
  const int64_t most_skipped = options.window_tokens - 2;
  if (options.first_scored && first_scored > most_skipped)
    throw UsageError(fmt::format("--skip is {}, at most {} was expected: a window of {} has no prediction behind it",
                                 first_scored, most_skipped, options.window_tokens));
  const Model model = open_model(options.model);
  for (const std::string& warning : model.checkpoint->warnings()) print_warning(warning);
  const std::unique_ptr<Tokenizer> tokenizer = require_tokenizer(*model.checkpoint);
  const std::vector<int32_t> ids = read_ids(model, *tokenizer, options.file);
  if (options.window_tokens > model.config.context)
    print_warning(
        fmt::format("{} positions, but the model was made for {}", options.window_tokens, model.config.context));
  PerplexityRequest request;
  request.ids = ids;
  if (tokenizer->adds_bos()) request.bos = tokenizer->bos_id();
  request.window_tokens = options.window_tokens;
  request.first_scored = std::min(first_scored, most_skipped);   // half of a window of two leaves none
  request.chunk_tokens = static_cast<int>(options.chunk_tokens);
  request.margin = options.margin;

  std::unique_ptr<Backend> backend = make_backend(options.device);
  warn_of_idle_options(options.device, *backend, model.program);
  std::unique_ptr<Backend> against;
  if (options.against == "exact") {
    against = make_backend({.name = "cpu", .n_threads = options.device.n_threads, .exact = true});
  } else if (!options.against.empty()) {
    against = make_backend({.name = options.against, .n_threads = options.device.n_threads});
  }
  const PerplexityResult result = naming_model(options.model, [&] {
    return load_on(options.device, backend,
                   [&](Backend& device) { return measure_perplexity(model.program, device, against.get(), request); });
  });

  const auto n_tokens = static_cast<int64_t>(ids.size());
  if (options.output == "json") {
    nlohmann::ordered_json json = {{"build_commit", kBuildCommit},
                                   {"build_version", BERYL_VERSION},
                                   {"model_filename", options.model},
                                   {"model_type", model.config.name},
                                   {"text_filename", options.file},
                                   {"n_tokens", n_tokens},
                                   {"window_tokens", request.window_tokens},
                                   {"n_windows", result.n_windows},
                                   {"n_skipped", request.first_scored},
                                   {"n_scored", result.n_scored}};
    json.update(to_json(backend->name(), result.score, result.n_read));
    if (result.against) {
      const Comparison& compared = *result.against;
      json["against"] = to_json(against->name(), compared.score, result.n_read);
      json["mean_kl"] = compared.mean_kl;
      json["largest_kl"] = compared.largest_kl;
      json["largest_kl_window"] = compared.largest_kl_window;
      json["largest_kl_token"] = compared.largest_kl_row;
      json["n_flips"] = compared.n_flips;
      json["margin"] = request.margin;
      json["n_flips_below_margin"] = compared.n_flips_below_margin;
      json["largest_flip_margin"] = compared.largest_flip_margin;
    }
    write_output(json.dump(2) + "\n");
    return 0;
  }
  std::string text = fmt::format("{} tokens, {} of {} predictions counted: the last {} of each window of {}\n",
                                 n_tokens, result.n_scored, result.n_read, result.n_scored / result.n_windows,
                                 request.window_tokens);
  text += to_text(backend->name(), result.score, result.n_read);
  if (result.against) {
    const Comparison& compared = *result.against;
    text += to_text(against->name(), compared.score, result.n_read);
    text += fmt::format("{:<12}mean {:.3g}, largest {:.3g} after token {} of window {}; of {} from {}, in nats\n", "KL",
                        compared.mean_kl, compared.largest_kl, compared.largest_kl_row, compared.largest_kl_window,
                        backend->name(), against->name());
    text += fmt::format("{:<12}{} ({:.3f} %), {} of them where {}'s largest two logits are less than {} apart; {:.3g} "
                        "at most\n",
                        "top-1 flips", compared.n_flips,
                        100 * static_cast<double>(compared.n_flips) / static_cast<double>(result.n_scored),
                        compared.n_flips_below_margin, backend->name(), request.margin, compared.largest_flip_margin);
  }
  write_output(text);
  return 0;
}

}  // namespace

Command add_perplexity_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("perplexity", "Measure how well a model predicts a text");
  auto options = std::make_shared<PerplexityOptions>();
  add_model(*app, options->model);
  app->add_option("FILE", options->file, "the text")->type_name("")->required();
  add_device_options(*app, options->device);
  add_choice(*app, "--against", options->against, {"reference", "exact", "cpu", "cuda"},
             "also on this device (exact: cpu with --exact), and how far the two lie apart: KL divergence, top-1 flips");
  add_integer(*app, "--ctx", options->window_tokens, 2, 1 << 20, "tokens of a window (default 512)");
  CLI::Option* skip = add_integer(*app, "--skip", options->skip, 0, 1 << 20,
                                  "predictions at the begin of each window that do not count (default: half a window)");
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 16, "tokens a step (default 64)");
  add_real(*app, "--margin", options->margin, 0, 1e9,
           "with --against: a flip is a near tie when the device's two largest logits are closer (default 0.1)");
  add_choice(*app, "-o", options->output, {"text", "json"}, "output: text (the default) or json");
  app->footer(
      "The text is cut into windows, each read for itself, with BOS in the place of its first token where the model\n"
      "wants one; what does not fill a window is left out. With the default --skip that is how llama.cpp's perplexity\n"
      "tool does it; --skip 0 counts every prediction. KL is the sum of p log(p / q), p from --against, q from --device.\n"
      "\n"
      "Examples:\n"
      "  beryl perplexity model.gguf text.txt\n"
      "  beryl perplexity model.gguf text.txt --device cpu --against reference --skip 0 -o json");
  return {app, [options, skip] {
            if (skip->count() > 0) options->first_scored = options->skip;
            return run_perplexity(*options);
          }};
}

}  // namespace beryl::cli
