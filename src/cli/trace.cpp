// beryl trace: everything a model computes for given tokens, into a file, to compare engines.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "cli/text_input.h"
#include "engine/trace.h"
#include "model/model.h"
#include "weights/safetensors.h"

namespace beryl::cli {
namespace {

struct TraceOptions {
  std::string model;
  std::string ids;
  std::string prompt;
  bool has_ids = false;
  bool parse_special = false;
  DeviceOptions device;
  int64_t chunk_tokens = 64;
  bool layers = false;
  int64_t n_greedy = 0;
  std::string output;
};

// A trace can take minutes, so what can be known about its file is checked before. Only regular files: the writer puts
// a new file in the place of the old one, which would be the end of /dev/null.
void check_output(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kIo, fmt::format("{}: cannot be written: {}", path, why));
  };
  if (path.empty()) throw UsageError("-o is '', a file's name was expected");
  struct stat status;
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
    refuse(S_ISDIR(status.st_mode) ? "it is a folder" : "it is not an ordinary file");
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (::access(folder.empty() ? "." : folder.c_str(), W_OK | X_OK) != 0) refuse(std::strerror(errno));
}

template <class T>
SafetensorsTensor tensor(std::string name, Format format, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {{std::move(name), format, std::move(shape)}, std::as_bytes(std::span(values)), {}};
}

int run_trace(const TraceOptions& options) {
  check_output(options.output);
  const Model model = open_model(options.model);
  for (const std::string& warning : model.checkpoint->warnings()) print_warning(warning);
  TraceRequest request;
  if (options.has_ids) {
    request.sequences = {parse_ids(options.ids, model.config.vocab)};
  } else {
    const std::unique_ptr<Tokenizer> tokenizer = require_tokenizer(*model.checkpoint);
    request.sequences = {encode_raw_prompt(*tokenizer, options.prompt, options.parse_special)};
    check_prompt_ids(request.sequences.front(), model.config.vocab, *tokenizer);
  }
  const std::vector<int32_t>& ids = request.sequences.front();
  const auto n_tokens = static_cast<int64_t>(ids.size());
  if (n_tokens == 0) throw UsageError("the prompt is empty, and this model begins with no token of its own");
  if (n_tokens + options.n_greedy > model.config.context)
    print_warning(
        fmt::format("{} positions, but the model was made for {}", n_tokens + options.n_greedy, model.config.context));
  request.chunk_tokens = static_cast<int>(std::min(options.chunk_tokens, n_tokens));
  request.layers = options.layers;
  request.n_greedy = options.n_greedy;

  std::unique_ptr<Backend> backend = make_backend(options.device);
  warn_of_idle_options(options.device, *backend, model.program);
  const std::vector<SequenceTrace> traces = naming_model(options.model, [&] {
    return load_on(options.device, backend, [&](Backend& device) { return beryl::trace(model.program, device, request); });
  });
  const SequenceTrace& trace = traces.front();

  const int64_t model_dim = model.config.model_dim;
  std::vector<SafetensorsTensor> tensors;
  tensors.push_back(tensor("ids", Format::kI32, {n_tokens}, ids));
  tensors.push_back(tensor("logits", Format::kF32, {n_tokens, model.program.vocab}, trace.logits));
  if (options.layers) {
    tensors.push_back(tensor("embedded", Format::kF32, {n_tokens, model_dim}, trace.embedded));
    for (size_t i = 0; i < trace.hidden.size(); ++i)
      tensors.push_back(tensor(fmt::format("hidden.{}", i), Format::kF32, {n_tokens, model_dim}, trace.hidden[i]));
  }
  if (options.n_greedy > 0) tensors.push_back(tensor("greedy", Format::kI32, {options.n_greedy}, trace.greedy));
  write_safetensors(options.output, tensors,
                    {{"engine", "beryl " BERYL_VERSION}, {"device", std::string(backend->name())}});
  // Written all the same: with --layers it shows where they begin.
  if (!std::all_of(trace.logits.begin(), trace.logits.end(), [](float value) { return std::isfinite(value); }))
    throw Error(ErrorCode::kBadInput,
                fmt::format("{}: some logits are NaN or infinite: the file is broken ({} shows which)", options.model, options.output));
  return 0;
}

}  // namespace

Command add_trace_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("trace", "Write what a model computes to a file, to compare engines");
  auto options = std::make_shared<TraceOptions>();
  add_model(*app, options->model);
  CLI::Option* ids = app->add_option("--ids", options->ids, "the tokens, as in 2,818,5279")->type_name("IDS");
  CLI::Option* prompt =
      app->add_option("-p,--prompt", options->prompt, "the tokens of this text, behind BOS if the model wants it");
  prompt->type_name("TEXT");
  app->add_flag("--special", options->parse_special, "text that spells a special token, like <bos>, becomes it");
  app->add_flag("--layers", options->layers, "also the residual stream: before the layers, and after each");
  add_integer(*app, "--greedy", options->n_greedy, 0, 1 << 20, "also the N tokens that follow, each the likeliest");
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 16, "tokens a step (default 64)");
  add_device_options(*app, options->device);
  app->add_option("-o,--output", options->output, "the file to write")->type_name("FILE.safetensors")->required();
  app->footer(
      "What is in the file:\n"
      "  ids       I32 [tokens]\n"
      "  logits    F32 [tokens][vocabulary]  after each token\n"
      "  embedded  F32 [tokens][model width] with --layers: what enters the first layer\n"
      "  hidden.I  F32 [tokens][model width] with --layers: the residual stream after layer I; layers count from 0\n"
      "  greedy    I32 [N]                   with --greedy\n"
      "\n"
      "Examples:\n"
      "  beryl trace model.gguf -p \"Hello\" --layers -o hello.safetensors\n"
      "  beryl trace model.gguf --ids 2,818,5279 --device reference --greedy 12 -o exact.safetensors");
  return {app, [options, ids, prompt] {
            options->has_ids = ids->count() > 0;
            if (options->has_ids == (prompt->count() > 0)) throw UsageError("one of --ids and --prompt was expected");
            return run_trace(*options);
          }};
}

}  // namespace beryl::cli
