// beryl inspect: what a model file is, what beryl uses of it and what it ignores, the step, the memory it will take.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "cli/recording_checkpoint.h"
#include "model/build_step.h"
#include "model/config.h"
#include "engine/fit.h"
#include "model/memory_plan.h"
#include "model/weights.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

constexpr int64_t kDefaultContext = 4096;

struct InspectOptions {
  std::string model;
  bool tensors = false;
  bool step = false;
  bool plan = false;
  int64_t context = 0;   // 0: the smaller of kDefaultContext and the model's
  int64_t chunk_tokens = 256;
  DeviceOptions device;
};

std::string line(std::string_view what, std::string_view value) { return fmt::format("{:<15}{}\n", what, value); }

// "268 M", "7.24 B": three digits.
std::string human_count(int64_t count) {
  const auto digits = [](double value) { return value < 9.995 ? 2 : value < 99.95 ? 1 : 0; };
  const double value = static_cast<double>(count);
  if (value >= 999.5e6) return fmt::format("{:.{}f} billion", value / 1e9, digits(value / 1e9));
  if (value >= 999.5e3) return fmt::format("{:.{}f} million", value / 1e6, digits(value / 1e6));
  return fmt::format("{}", count);
}

// "0-4, 6-10, 12"
std::string ranges(const std::vector<int>& ascending) {
  std::string text;
  for (size_t i = 0; i < ascending.size();) {
    size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", ascending[i]);
    if (last > i) text += fmt::format("-{}", ascending[last]);
    i = last + 1;
  }
  return text;
}

std::string describe_rope(const RopeSpec& rope) {
  const std::string base = fmt::format("rope base {:g}", rope.base);
  switch (rope.scaling) {
    case RopeSpec::Scaling::kNone: return base;
    case RopeSpec::Scaling::kLinear: return fmt::format("{}, positions / {:g}", base, rope.factor);
    case RopeSpec::Scaling::kLlama3:
      return fmt::format("{}, Llama 3 scaling: factor {:g}, made for {:g} positions", base, rope.factor,
                         rope.original_context);
    case RopeSpec::Scaling::kProportional:
      return fmt::format("{}, {:g} % of each head turns", base, rope.rotated_share * 100);
    case RopeSpec::Scaling::kDivisors: return fmt::format("{}, scaled by the file's divisors", base);
  }
  return base;
}

std::string describe_layer(const LayerSpec& layer, int first) {
  const AttentionSpec& attention = layer.attention;
  std::string text = attention.window > 0 ? fmt::format("window {}", attention.window) : "global";
  text += fmt::format(", {} heads on {} of K and V, {} wide, {}", attention.n_heads, attention.n_kv_heads,
                      attention.head_dim, describe_rope(attention.rope));
  if (attention.v_from_k) text += ", V from K";
  if (!layer.owns_cache(first)) text += fmt::format(", reads the cache of layer {}", attention.cache_layer);
  text +=
      fmt::format("; feed-forward {} {}", layer.ffn.dim, layer.ffn.activation == Activation::kSilu ? "SiLU" : "GELU");
  if (layer.ffn.n_experts > 0)
    text += fmt::format(" and {} of {} experts of {}", layer.ffn.top_k, layer.ffn.n_experts, layer.ffn.expert_dim);
  return text;
}

// Layers that read alike share a line.
std::string describe_layers(const ModelConfig& config) {
  std::vector<std::pair<std::string, std::vector<int>>> kinds;   // in order of their first layer
  for (int i = 0; i < config.n_layers(); ++i) {
    const std::string kind = describe_layer(config.layers[static_cast<size_t>(i)], i);
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& each) { return each.first == kind; });
    if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, {}});
    found->second.push_back(i);
  }
  std::string text = line("layers", fmt::format("{}, counted from 0", config.n_layers()));
  for (const auto& [kind, layers] : kinds) text += fmt::format("  {}: {}\n", ranges(layers), kind);
  return text;
}

std::string describe_config(const ModelConfig& config) {
  std::string text;
  text += line("architecture", fmt::format("{} ({})", quote(config.architecture), family_name(config.family)));
  if (!config.name.empty()) text += line("name", quote(config.name));
  text += line("width", fmt::format("{}", config.model_dim));
  if (config.per_layer_dim > 0)
    text += line("", fmt::format("{} more a layer, from per-layer embeddings", config.per_layer_dim));
  text += line("context", fmt::format("{} positions", config.context));
  text += line("vocabulary", fmt::format("{} tokens", config.vocab));
  if (!config.suppressed_tokens.empty())
    text += line("", fmt::format("{} of them are never sampled: {}", config.suppressed_tokens.size(),
                                 fmt::join(config.suppressed_tokens, ", ")));
  if (config.final_softcap > 0) text += line("logits", fmt::format("soft cap {:g}", config.final_softcap));
  text += describe_layers(config);
  return text;
}

std::string describe_weights(const ModelWeights& weights) {
  struct Sum {
    int64_t n_matrices = 0, n_weights = 0, bytes = 0;
    void add(const Sum& other) {
      n_matrices += other.n_matrices;
      n_weights += other.n_weights;
      bytes += other.bytes;
    }
  };
  std::map<Format, Sum> by_format;
  Sum all;
  for (const WeightMatrix& matrix : weights.set.matrices)
    for (const HostMatrix& part : matrix.parts) {
      const Sum one{1, part.rows * part.cols * part.stack, part.bytes()};
      by_format[part.format].add(one);
      all.add(one);
    }
  int64_t n_vector_values = 0;
  for (const WeightVector& vector : weights.set.vectors) n_vector_values += static_cast<int64_t>(vector.values.size());
  const bool tied = weights.head.index == weights.embedding.index;
  const auto bits = [](const Sum& sum) {
    return 8.0 * static_cast<double>(sum.bytes) / static_cast<double>(sum.n_weights);
  };

  std::string text =
      line("parameters", fmt::format("{} ({}){}", human_count(all.n_weights + n_vector_values),
                                     all.n_weights + n_vector_values, tied ? "; the embedding is the head too" : ""));
  text += line("weights", fmt::format("{} in {} matrices, {:.2f} bits a weight", human_bytes(all.bytes), all.n_matrices,
                                      bits(all)));
  for (const auto& [format, sum] : by_format)
    text += fmt::format("  {:<10}{:>5} matrices {:>16} weights {:>10} {:>7.2f} bits\n", info(format).name,
                        sum.n_matrices, sum.n_weights, human_bytes(sum.bytes), bits(sum));
  return text;
}

// The part of a name that says what it belongs to: up to the last dot, numbers in between as N, so that the tensors or
// keys of one kind fall together.
std::string group_of(const std::string& name) {
  std::string group;
  for (size_t begin = 0; begin < name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (end == name.size() && !group.empty()) break;
    if (!group.empty()) group += '.';
    group += part.find_first_not_of("0123456789") == std::string::npos ? "N" : part;
    begin = end + 1;
  }
  return group;
}

// A line a group: names in full while they are few, else how many.
std::string summarise(const std::vector<std::string>& names, const std::map<std::string, std::string>& notes = {}) {
  constexpr size_t kShown = 3;
  std::vector<std::pair<std::string, std::vector<std::string>>> groups;
  for (const std::string& name : names) {
    const std::string group = group_of(name);
    auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& each) { return each.first == group; });
    if (found == groups.end()) found = groups.insert(groups.end(), {group, {}});
    found->second.push_back(name);
  }
  std::string text;
  for (const auto& [group, members] : groups) {
    if (members.size() > kShown) {
      text += fmt::format("  {} {}.*\n", members.size(), group);
      continue;
    }
    for (const std::string& name : members) {
      const auto note = notes.find(name);
      text += note == notes.end() ? fmt::format("  {}\n", name) : fmt::format("  {} = {}\n", name, note->second);
    }
  }
  return text;
}

std::string describe_ignored(const RecordingCheckpoint& checkpoint, const std::vector<std::string>& ignored_tensors) {
  std::string text;
  if (!ignored_tensors.empty()) {
    int64_t bytes = 0;
    for (const std::string& name : ignored_tensors)
      if (const TensorInfo* tensor = checkpoint.find(name)) bytes += static_cast<int64_t>(tensor->data.size());
    text += line("ignored", fmt::format("{} tensors, {}", ignored_tensors.size(), human_bytes(bytes)));
    text += summarise(ignored_tensors);
  }
  std::vector<std::string> keys = checkpoint.unread_keys();
  // JSON's null is an absent value.
  std::erase_if(keys, [&](const std::string& key) { return !checkpoint.metadata().has(key); });
  if (!keys.empty()) {
    std::map<std::string, std::string> values;
    for (const std::string& key : keys) values[key] = checkpoint.metadata().describe(key);
    text += line("unread keys", fmt::format("{} of {}, which mean nothing to beryl", keys.size(),
                                            checkpoint.metadata().keys().size()));
    text += summarise(keys, values);
  }
  return text;
}

std::string describe_tensors(const Checkpoint& checkpoint) {
  size_t widest = 0;
  for (const TensorInfo& tensor : checkpoint.tensors()) widest = std::max(widest, tensor.name.size());
  std::string text;
  for (const TensorInfo& tensor : checkpoint.tensors())
    text += fmt::format("{:<{}}  {:<10} {:>14}  [{}]\n", tensor.name, widest, info(tensor.format).name,
                        tensor.data.size(), fmt::join(tensor.shape, ", "));
  return text;
}

class Inspection {
 public:
  explicit Inspection(const InspectOptions& options) : options_(options), checkpoint_(open_checkpoint(options.model)) {}

  int run() {
    if (options_.plan) backend_ = make_backend(options_.device);   // what is wrong with the device is said before all else
    // What the file is can be told even when it is no model that beryl runs: each part says what it can, the first
    // failure is reported at the end.
    try_part([&] { describe_file(); });
    try_part([&] { describe_model(); });
    try_part([&] { describe_text(); });
    try_part([&] {
      write_output(describe_ignored(checkpoint_, weights_ ? weights_->ignored : std::vector<std::string>()));
    });
    if (options_.tensors) try_part([&] { write_output("\n" + describe_tensors(checkpoint_)); });
    if (program_ && options_.step) try_part([&] { write_output("\n" + to_text(*program_)); });
    if (program_ && options_.plan) try_part([&] { describe_plan(); });
    if (failure_) std::rethrow_exception(failure_);
    return 0;
  }

 private:
  template <class Part>
  void try_part(const Part& part) {
    try {
      part();
    } catch (const Error& error) {
      if (error.code == ErrorCode::kIo) throw;   // nobody reads the rest
      if (!failure_) failure_ = std::current_exception();
    }
  }

  void describe_file() {
    int64_t bytes = 0;
    for (const TensorInfo& tensor : checkpoint_.tensors()) bytes += static_cast<int64_t>(tensor.data.size());
    const bool gguf = checkpoint_.container() == Container::kGguf;
    std::error_code ignored;
    const bool in_folder = std::filesystem::is_directory(checkpoint_.path(), ignored);
    write_output(line("file", checkpoint_.path()) +
                 line("container", fmt::format("{}: {} tensors, {}; {} metadata keys",
                                               !gguf      ? "Hugging Face folder"
                                               : in_folder ? "safetensors with a GGUF's metadata"
                                                           : "GGUF",
                                               checkpoint_.tensors().size(),
                                               human_bytes(bytes), checkpoint_.metadata().keys().size())));
    for (const std::string& warning : checkpoint_.warnings()) write_output(line("warning", warning));
  }

  void describe_model() {
    config_ = read_config(checkpoint_);
    write_output(describe_config(*config_));
    weights_ = load_weights(checkpoint_, *config_);
    write_output(describe_weights(*weights_));
    program_ = build_step(*config_, *weights_);
  }

  void describe_text() {
    const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(checkpoint_);
    if (tokenizer == nullptr) {
      write_output(line("tokenizer", "none: only ids go in and out"));
      return;
    }
    const auto name_of = [&](std::optional<int32_t> id) {
      return id ? fmt::format("{} ({})", tokenizer->token_text(*id), *id) : std::string("none");
    };
    std::vector<std::string> stops;
    for (int32_t id : tokenizer->stop_ids()) stops.push_back(name_of(id));
    write_output(line("tokenizer", fmt::format("{}, {} tokens", tokenizer->family(), tokenizer->vocab_size())) +
                 line("", fmt::format("BOS {}{}", name_of(tokenizer->bos_id()),
                                      tokenizer->adds_bos() ? ", begins a prompt" : "")) +
                 line("", fmt::format("a reply ends with {}", fmt::join(stops, ", "))));
    for (const std::string& warning : tokenizer->warnings()) write_output(line("warning", warning));
    const std::unique_ptr<ChatWriter> writer = make_chat_writer(checkpoint_, *tokenizer);
    const bool has_template = find_chat_template(checkpoint_).has_value();
    write_output(line("chat format", fmt::format("{}; the file has {} template",
                                                 writer != nullptr ? writer->name() : "none that beryl knows",
                                                 has_template ? "a" : "no")));
    if (writer != nullptr)
      for (const std::string& warning : writer->warnings()) write_output(line("warning", warning));
  }

  void describe_plan() {
    RunLimits run;
    run.context = options_.context > 0 ? options_.context : std::min(kDefaultContext, config_->context);
    run.chunk_tokens = static_cast<int>(std::min(options_.chunk_tokens, run.context));
    warn_of_idle_options(options_.device, *backend_, *program_);
    const MemoryPlan plan = plan_memory(*program_, run, *backend_);
    write_output(
        fmt::format("\nmemory on {} for a context of {}\n{}", backend_->name(), run.context, to_text(plan, *program_)));
    if (const std::optional<DeviceMemory> memory = backend_->memory())
      write_output(fmt::format("  {:<34}{:>10}  of {} on {}\n", "free", human_bytes(memory->free_bytes),
                               human_bytes(memory->total_bytes), backend_->device_name()));
    try {
      require_memory(*program_, run, *backend_);
    } catch (const Error& error) {
      write_output(fmt::format("  {}\n", error.what()));   // an answer to what was asked, no failure
    }
  }

  const InspectOptions& options_;
  RecordingCheckpoint checkpoint_;
  std::optional<ModelConfig> config_;
  std::unique_ptr<ModelWeights> weights_;
  std::optional<Program> program_;
  std::unique_ptr<Backend> backend_;   // with --plan
  std::exception_ptr failure_;
};

}  // namespace

Command add_inspect_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("inspect", "Tell what a model file is and what running it takes");
  auto options = std::make_shared<InspectOptions>();
  add_model(*app, options->model);
  app->add_flag("--tensors", options->tensors, "every tensor: name, format, bytes, shape");
  app->add_flag("--step", options->step, "the list of ops that one step runs");
  app->add_flag("--plan", options->plan, "the memory that a run takes");
  add_integer(*app, "--ctx", options->context, 1, int64_t{1} << 24,
              fmt::format("positions to plan for (default: {}, or the model's if fewer)", kDefaultContext));
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 16, "tokens a step to plan for (default 256)");
  add_device_options(*app, options->device);
  app->footer(
      "Examples:\n"
      "  beryl inspect model.gguf\n"
      "  beryl inspect model.gguf --plan --ctx 32768\n"
      "  beryl inspect model.gguf --step | less");
  return {app, [options] { return Inspection(*options).run(); }};
}

}  // namespace beryl::cli
