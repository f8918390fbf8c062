// beryl pull: fetches a model into the store.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "base/system_memory.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/options.h"
#include "store/digest.h"
#include "store/pull.h"
#include "weights/checkpoint.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct PullArguments {
  std::string source;
  std::string name;
  std::string sha256;
  int64_t connections = 4;
  int64_t retries = 5;
  double retry_seconds = 1;
  double stall_seconds = 30;
};

// On a terminal one line that is written over; elsewhere a line at the start of each stage and every tenth of it.
class ProgressLines {
 public:
  void show(const PullProgress& progress) {
    if (progress.stage != stage_ || (progress.stage == PullStage::kChecking && progress.file != file_)) {
      stage_ = progress.stage;
      file_ = progress.file;
      start_ = Clock::now();
      start_bytes_ = progress.have_bytes;
      tenth_ = tenth_of(progress);
    }
    if (is_terminal(kStandardError)) {
      show_bar(progress);
    } else if (const int tenth = tenth_of(progress); tenth > tenth_ && progress.stage == PullStage::kFetching) {
      tenth_ = tenth;
      print_note(fmt::format("{} %, {}{}", 10 * tenth, human_bytes(progress.have_bytes), speed_of(progress)));
    }
  }
  void clear() {
    if (is_shown_) write_error("\r\x1b[K");
    is_shown_ = false;
  }

 private:
  static int tenth_of(const PullProgress& progress) {
    if (progress.all_bytes.value_or(0) <= 0) return 0;
    return static_cast<int>(10.0 * static_cast<double>(progress.have_bytes) / static_cast<double>(*progress.all_bytes));
  }

  std::string speed_of(const PullProgress& progress) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    if (seconds < 0.5) return "";
    const double speed = static_cast<double>(progress.have_bytes - start_bytes_) / seconds;
    std::string text = fmt::format(", {}/s", human_bytes(static_cast<int64_t>(speed)));
    if (speed > 0 && progress.all_bytes) {
      const auto left = static_cast<int64_t>(static_cast<double>(*progress.all_bytes - progress.have_bytes) / speed);
      text += left < 3600 ? fmt::format(", {}:{:02} left", left / 60, left % 60)
                          : fmt::format(", {}:{:02}:{:02} left", left / 3600, left / 60 % 60, left % 60);
    }
    return text;
  }

  void show_bar(const PullProgress& progress) {
    if (is_shown_ && Clock::now() - shown_at_ < std::chrono::milliseconds(100)) return;  // more often, nobody reads it
    constexpr int kWidth = 24;
    std::string bar;
    if (progress.all_bytes.value_or(0) > 0) {
      const double share =
          std::min(1.0, static_cast<double>(progress.have_bytes) / static_cast<double>(*progress.all_bytes));
      const int filled = static_cast<int>(share * kWidth);
      bar = fmt::format("[{}{}] {:3.0f} %  ", std::string(static_cast<size_t>(filled), '#'),
                        std::string(static_cast<size_t>(kWidth - filled), '.'), 100 * share);
    }
    std::string line = progress.stage == PullStage::kChecking ? "checking " : "";
    line += fmt::format("{}{}{}", bar, human_bytes(progress.have_bytes), speed_of(progress));
    if (line.size() < 60) line += "  " + harmless_on_terminal(quote(progress.file, 70 - line.size()));
    write_error("\r\x1b[K" + line);
    is_shown_ = true;
    shown_at_ = Clock::now();
  }

  PullStage stage_ = PullStage::kFetching;
  std::string file_;
  Clock::time_point start_ = Clock::now(), shown_at_;
  int64_t start_bytes_ = -1;
  int tenth_ = 0;
  bool is_shown_ = false;
};

// "gguf q4_k": the container, and the format that most of the weights have.
std::string format_of(const Checkpoint& checkpoint) {
  std::map<std::string_view, size_t> bytes;
  for (const TensorInfo& tensor : checkpoint.tensors()) bytes[info(tensor.format).name] += tensor.data.size();
  const auto most =
      std::max_element(bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return fmt::format("{} {}", checkpoint.container() == Container::kGguf ? "gguf" : "safetensors",
                     most == bytes.end() ? "empty" : most->first);
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// HF_ENDPOINT, as the hub's own tools read it.
std::string hub_address() {
  std::string hub = environment("HF_ENDPOINT");
  if (hub.empty()) return kDefaultHub;
  while (hub.ends_with('/')) hub.pop_back();
  try {
    check_url(hub);
  } catch (const Error& error) {
    throw UsageError(fmt::format("HF_ENDPOINT: {}", error.what()));
  }
  return hub;
}

std::string hub_token() {
  std::string token = environment("HF_TOKEN");
  for (const unsigned char c : token)  // it becomes a line of a request's head
    if (c <= ' ' || c >= 0x7f) throw UsageError("HF_TOKEN holds characters that no token has");
  return token;
}

int pull_model(const PullArguments& arguments) {
  PullOptions options;
  options.hub = hub_address();
  options.name = arguments.name;
  if (!arguments.name.empty() && !is_model_name(arguments.name))
    throw UsageError(fmt::format("--name is {}, letters, digits and ._:/@+- were expected", quote(arguments.name)));
  options.sha256 = arguments.sha256;
  std::transform(options.sha256.begin(), options.sha256.end(), options.sha256.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (!options.sha256.empty() && !is_hex(options.sha256, 64))
    throw UsageError(fmt::format("--sha256 is {}, 64 hexadecimal digits were expected", quote(arguments.sha256)));
  ModelSource source;
  try {
    source = parse_source(arguments.source, options.hub);
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  const bool is_open = source.url.starts_with("http://") && options.sha256.empty() && !source.is_hub;
  if (is_open)
    print_warning("http:// is not protected: whoever is in between can change the model; --sha256 would tell");

  InterruptCatcher interrupts;
  ProgressLines lines;
  options.download.connections = static_cast<int>(arguments.connections);
  options.download.retries = static_cast<int>(arguments.retries);
  options.download.retry_seconds = arguments.retry_seconds;
  options.download.stall_seconds = arguments.stall_seconds;
  options.download.token = hub_token();
  options.download.cancelled = [&] { return interrupts.interrupted(); };
  options.on_note = [&](const std::string& text) {
    lines.clear();
    print_note(text);
  };
  options.on_progress = [&](const PullProgress& progress) { lines.show(progress); };
  options.on_plan = [&](const StoredModel& model, const std::vector<std::string>& others) {
    std::string size;
    if (std::all_of(model.files.begin(), model.files.end(), [](const StoredFile& file) { return file.bytes >= 0; }))
      size = ", " + human_bytes(model.bytes());
    print_note(
        fmt::format("{}: {} file{}{}", model.name, model.files.size(), model.files.size() == 1 ? "" : "s", size));
    if (!others.empty())
      print_note(fmt::format("there are also {}; hf:{}:NAME takes another", fmt::join(others, ", "),
                             source.repository_path()));
  };
  options.check = [&](const std::string& path, bool is_verified) -> std::string {
    try {
      return format_of(*open_checkpoint(path));
    } catch (const Error& error) {
      if (!is_verified) throw;
      lines.clear();
      print_warning(fmt::format("this is what was published, but beryl cannot use it: {}", error.what()));
      return "not usable";
    }
  };

  Store store(Store::default_folder());
  PullResult result;
  try {
    result = pull(store, source, options);
  } catch (...) {
    lines.clear();
    throw;
  }
  lines.clear();
  if (result.is_cancelled) {
    print_note("interrupted: what has come is kept; the same command goes on with it");
    return kExitInterrupted;
  }
  print_note(fmt::format("{}: {}, {}, sha256 {}, {}", result.model.name, human_bytes(result.model.bytes()),
                         result.model.format, result.model.digest(),
                         !result.is_verified ? "which nobody vouches for"
                         : result.was_there  ? "which was there already"
                                             : "as published"));
  write_output(result.model.name + "\n");
  return 0;
}

}  // namespace

Command add_pull_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("pull", "Fetch a model from a hub or an address");
  auto arguments = std::make_shared<PullArguments>();
  app->add_option("SOURCE", arguments->source,
                  "hf:OWNER/REPO, hf:OWNER/REPO:QUANT, hf:OWNER/REPO:FILE or https://HOST/FILE.gguf")
      ->type_name("")
      ->required();
  const CLI::Option* name = app->add_option("--name", arguments->name,
                                            "what it is to be called (default: OWNER/REPO:QUANT, or the file's name)")
                                ->type_name("NAME");
  const CLI::Option* sha256 =
      app->add_option("--sha256", arguments->sha256, "what the file's SHA-256 has to be")->type_name("HEX");
  const std::string network = "Network";
  add_integer(*app, "--connections", arguments->connections, 1, 16, "parts that are fetched at once (default 4)")
      ->group(network);
  add_real(*app, "--stall", arguments->stall_seconds, 0.1, 3600,
           "ask again after X seconds without a byte (default 30)")
      ->group(network);
  add_integer(*app, "--retries", arguments->retries, 0, 1000,
              "give up after N failures in a row without a new byte (default 5)")
      ->group(network);
  add_real(*app, "--retry-delay", arguments->retry_seconds, 0, 60,
           "seconds before asking again, then twice as long each time (default 1)")
      ->group(network);
  app->footer(
      "A repository with config.json and safetensors comes whole, as a folder; of GGUF files one comes, with all its "
      "parts.\n"
      "What is fetched is compared with the digests that the hub lists. After an interruption the same command goes "
      "on.\n"
      "\n"
      "  HF_TOKEN      is sent to the hub, and nowhere else: for models that need it\n"
      "  HF_ENDPOINT   the hub (default: https://huggingface.co)\n"
      "  BERYL_STORE   where models lie (default: $XDG_DATA_HOME/beryl or ~/.local/share/beryl)\n"
      "\n"
      "Examples:\n"
      "  beryl pull hf:ggml-org/gemma-3-270m-GGUF\n"
      "  beryl pull hf:google/gemma-3-1b-it\n"
      "  beryl pull hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M --name llama\n"
      "  beryl pull https://example.com/model.gguf --sha256 9f86d0...\n"
      "  beryl run llama");
  return {app, [arguments, name, sha256] {
            // Of a variable that is not set, perhaps; without the option another name is taken, and no digest asked for.
            if (name->count() > 0 && arguments->name.empty()) throw UsageError("--name is empty, a name was expected");
            if (sha256->count() > 0 && arguments->sha256.empty())
              throw UsageError("--sha256 is empty, 64 hexadecimal digits were expected");
            return pull_model(*arguments);
          }};
}

}  // namespace beryl::cli
