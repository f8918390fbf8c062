// beryl serve: answers clients over HTTP, many at once.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "cli/text_input.h"
#include "cpu/parallel.h"
#include "engine/engine.h"
#include "engine/fit.h"
#include "grammar/constraint.h"
#include "model/model.h"
#include "server/api.h"
#include "server/http_server.h"
#include "server/page.h"
#include "text/chat_writer.h"
#include "text/text_tools.h"
#include "text/tokenizer.h"

namespace beryl::cli {
namespace {

constexpr int64_t kDefaultContext = 8192;
constexpr int kHostChunk = 256;
constexpr const char* kKeyVariable = "BERYL_API_KEY";

struct ServeOptions {
  std::string model;
  std::string host = "127.0.0.1";
  int64_t port = 8080;
  std::vector<std::string> keys;
  std::vector<std::string> hosts;
  std::string cors_origin;
  std::string name;
  std::string chat_template;
  int64_t n_parallel = 4;
  int64_t context = 0;        // 0: the default, or the model's own if that is less
  int64_t cache_tokens = 0;   // 0: a whole context for each
  int64_t chunk_tokens = 0;   // 0: chosen by the device
  int64_t max_waiting = 64;
  int64_t max_connections = 128;
  int64_t max_body_bytes = 8 << 20;
  bool no_draft = false;
  DeviceOptions device;
};

// SIGINT and SIGTERM, for this thread and those that it starts: they come to wait() only.
class EndSignals {
 public:
  EndSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  void wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
  }
  // The signal; 0: none.
  int come_within(std::chrono::milliseconds time) const {
    const timespec limit = {time.count() / 1000, time.count() % 1000 * 1'000'000};
    return std::max(sigtimedwait(&set_, nullptr, &limit), 0);
  }

 private:
  sigset_t set_;
};

std::string name_of(const ServeOptions& options, const Model& model) {
  if (!options.name.empty()) return options.name;
  if (!model.config.name.empty()) return model.config.name;
  const std::filesystem::path path(options.model);
  return (path.has_filename() ? path : path.parent_path()).stem().string();
}

// An empty key, of a variable that is not set for example, would let everybody in who sends none.
void require_keys(const std::vector<std::string>& keys) {
  const char* variable = std::getenv(kKeyVariable);
  if (std::find(keys.begin(), keys.end(), "") != keys.end())
    throw UsageError("--api-key is empty, a key was expected; without the option everybody is answered");
  if (keys.empty() && variable != nullptr)
    throw UsageError(fmt::format("{} is empty, a key was expected; where it is not set everybody is answered", kKeyVariable));
}

int serve(const ServeOptions& options) {
  require_keys(options.keys);
  if (options.host.empty()) throw UsageError("--host is empty, an address of this machine was expected");
  const EndSignals signals;
  Model model = open_model(options.model);
  for (const std::string& warning : model.checkpoint->warnings()) print_warning(warning);
  const std::unique_ptr<Tokenizer> tokenizer = require_tokenizer(*model.checkpoint);
  const std::unique_ptr<ChatWriter> writer =
      make_chat_writer(*model.checkpoint, *tokenizer, options.chat_template.empty() ? TemplateChoice::kAuto : TemplateChoice::kFile,
                       options.chat_template);
  if (writer != nullptr)
    for (const std::string& warning : writer->warnings()) print_warning(warning);

  EngineLimits limits;
  limits.run.context = options.context > 0 ? options.context : std::min(kDefaultContext, model.config.context);
  limits.run.n_sequences = static_cast<int>(options.n_parallel);
  limits.run.cache_tokens = options.cache_tokens;
  limits.run.kept_windows = limits.run.n_sequences;
  limits.max_waiting = static_cast<int>(options.max_waiting);
  limits.mask_workers = std::clamp(usable_cores() / 2, 2, 16);
  if (options.no_draft) limits.max_draft = 0;
  if (options.cache_tokens > 0 && options.cache_tokens < limits.run.context)
    throw UsageError(fmt::format("--cache-tokens is {}, at least one context of {} was expected", options.cache_tokens, limits.run.context));
  if (limits.run.context > model.config.context)
    print_warning(fmt::format("--ctx {} is more than the {} positions that the model was made for", limits.run.context, model.config.context));
  std::unique_ptr<Backend> backend = make_backend(options.device);
  warn_of_idle_options(options.device, *backend, model.program);
  const std::unique_ptr<Engine> engine = load_on(options.device, backend, [&](Backend& each) {
    RunLimits run = limits.complete().run;
    run.step_tokens = 0;   // grows with the chunk
    limits.run.chunk_tokens = options.chunk_tokens > 0 ? static_cast<int>(options.chunk_tokens)
                                                       : fitting_chunk(model.program, run, each, kHostChunk);
    return std::make_unique<Engine>(model.program, limits, each);
  });

  size_t longest = 1;
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) longest = std::max(longest, tokenizer->token_bytes(id).size());
  ConstraintCompiler constraints(*tokenizer, model.config.vocab);
  std::vector<std::string> judge;
  if (has_constraints()) judge = {"/proc/self/exe", "form-judge", "--vocab", std::to_string(model.config.vocab), "--", options.model};
  server::FormCompiler forms(constraints, server::FormLimits(), judge);
  const server::ServedModel served = {
      .id = name_of(options, model),
      .created = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count(),
      .tokenizer = *tokenizer,
      .writer = writer.get(),
      .writes_tools = writer != nullptr && writes_tools(*writer),
      .notation = writer == nullptr ? CallNotation::kTagged : call_notation(*writer, *tokenizer),
      .forms = forms,
      .engine = *engine,
      .suppressed_ids = model.config.suppressed_tokens,
      .vocab = std::min<int64_t>(model.config.vocab, tokenizer->vocab_size()),
      .longest_token_bytes = longest};
  std::vector<std::string> hosts = server::local_hosts(options.host);
  if (!hosts.empty()) hosts.insert(hosts.end(), options.hosts.begin(), options.hosts.end());
  server::Api api(served, {options.keys, hosts, options.cors_origin, static_cast<size_t>(options.max_body_bytes)});
  server::HttpLimits http;
  http.max_connections = server::affordable_connections(static_cast<int>(options.max_connections));
  if (http.max_connections < options.max_connections)
    print_warning(fmt::format("--connections {} are more than the files that this process may have allow (ulimit -n); {} are let in", options.max_connections,
                              http.max_connections));
  http.max_body_bytes = static_cast<size_t>(options.max_body_bytes);
  server::HttpServer listener(options.host, static_cast<int>(options.port), http, api.handlers());
  start_thread("a thread for a connection", [] {}).join();   // every client needs one: without any the server would be of no use
  if (!listener.is_local() && options.keys.empty())
    print_warning(fmt::format("--host {} without a key: anyone who reaches this machine can use the model; --api-key KEY, or {} in the environment, "
                              "answers only who sends it", options.host, kKeyVariable));
  const std::string address = fmt::format("http://{}:{}/", listener.url_host(), listener.port());
  print_note(fmt::format("{} at {}v1{} ({}, context {}, {} at once). Ctrl-C ends.", served.id, address,
                         server::has_page() ? fmt::format(", a page to talk with it at {}", address) : "", backend->name(),
                         limits.run.context, limits.run.n_sequences));

  // So that the first form need not wait for it.
  std::vector<std::jthread> prepare = start_helpers(2, [&](int) { constraints.prepare(); });
  if (has_constraints()) forms.prepare();
  signals.wait();
  prepare.clear();
  print_note("Finishing what has begun. Ctrl-C once more ends at once.");
  api.set_draining();
  listener.stop_accepting();
  std::atomic<bool> drained = false;
  const auto finish = [&](int) {
    engine->drain();
    while (listener.n_active() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    drained = true;
  };
  std::vector<std::jthread> drain = start_helpers(2, finish);
  if (drain.empty()) finish(0);   // the system has no thread for it now; a second Ctrl-C waits
  while (!drained)
    if (const int signal = signals.come_within(std::chrono::milliseconds(50)); signal != 0 && !drained)
      std::_Exit(128 + signal);   // as a shell reports a program that it ended
  drain.clear();
  return 0;
}

}  // namespace

Command add_serve_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("serve", "Answer clients over HTTP, as OpenAI's and Anthropic's APIs do");
  auto options = std::make_shared<ServeOptions>();
  add_model(*app, options->model);
  app->add_option("--host", options->host, "address to listen on (default 127.0.0.1: this machine only)")->type_name("NAME");
  add_integer(*app, "--port", options->port, 0, 65535, "port to listen on; 0: any free one (default 8080)");
  app->add_option("--api-key", options->keys, "answer only who sends this key; may be given more than once (default: $BERYL_API_KEY)")
      ->type_name("KEY")
      ->envname(kKeyVariable);
  app->add_option("--allow-host", options->hosts,
                  "where only this machine is listened to: let requests in that call the server so, besides localhost; may be given more than once")
      ->type_name("NAME");
  app->add_option("--cors", options->cors_origin, "let browser pages of this origin read answers; *: of any (default: none)")
      ->type_name("ORIGIN");
  app->add_option("--name", options->name, "the model's name for clients (default: the file's)")->type_name("NAME");
  app->add_option("--chat-template", options->chat_template, "write conversations by this Jinja file")->type_name("FILE");

  const std::string capacity = "Capacity";
  add_integer(*app, "--parallel", options->n_parallel, 1, 1024, "requests that are computed at once (default 4)")->group(capacity);
  add_integer(*app, "--ctx", options->context, 1, int64_t{1} << 24,
              fmt::format("positions for a prompt and its reply (default {}, or the model's if that is less)", kDefaultContext))
      ->group(capacity);
  add_integer(*app, "--cache-tokens", options->cache_tokens, 1, int64_t{1} << 32,
              "positions that all requests share; when they run out the youngest request waits (default: a context for each)")
      ->group(capacity);
  add_integer(*app, "--queue", options->max_waiting, 1, 1 << 20, "requests beyond those that are computed at once; more hear 503 (default 64)")->group(capacity);
  add_integer(*app, "--connections", options->max_connections, 1, 1 << 16, "open connections; more take the place of idle ones, or hear 503 (default 128)")
      ->group(capacity);
  add_integer(*app, "--max-body", options->max_body_bytes, 1024, int64_t{1} << 32, "bytes of a request (default 8388608)")
      ->group(capacity);

  const std::string machine = "Machine";
  add_device_options(*app, options->device, machine);
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 16,
              "tokens of a prompt that are read at once (default 256; on a GPU up to 2048, as memory allows)")
      ->group(machine);
  app->add_flag("--no-draft", options->no_draft, "never guess tokens from the text so far (default: where it pays)")->group(machine);
  app->footer(
      "POST /v1/chat/completions, /v1/completions, /v1/responses (OpenAI), /v1/messages, /v1/messages/count_tokens (Anthropic),\n"
      "     /tokenize, /detokenize\n"
      "GET  /v1/models, /metrics, /health; / is a page to talk with the model in a browser\n"
      "\n"
      "Texts are not logged. SIGTERM and Ctrl-C end the server when all requests that have begun are answered.\n"
      "\n"
      "Examples:\n"
      "  beryl serve model.gguf\n"
      "  beryl serve model.gguf --parallel 16 --ctx 16384 --cache-tokens 65536 --api-key \"$KEY\"\n"
      "  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 200}'");
  return {app, [options] { return serve(*options); }};
}

}  // namespace beryl::cli
