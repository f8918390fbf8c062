#include "cli/speaker.h"

#include <algorithm>
#include <future>
#include <limits>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/options.h"
#include "cli/text_input.h"
#include "engine/fit.h"
#include "grammar/reply_constraint.h"

namespace beryl::cli {
namespace {

constexpr int64_t kDefaultContext = 4096;
// Room for a reply behind a prompt that alone fills the default context.
constexpr int64_t kReplyRoom = 1024;
constexpr std::string_view kBuiltInTemplate = "built-in";
constexpr int kHostChunk = 256;

using Options = SpeakOptions;
constexpr SpeakNumber kSamplingNumbers[] = {
    {"temp", &Options::temperature, nullptr, 0, 100, "how far to stray from the likeliest; 0: never (default 0.7)"},
    {"top-k", nullptr, &Options::top_k, 0, INT32_MAX, "choose among the N likeliest; 0: all (default 40)"},
    {"top-p", &Options::top_p, nullptr, 0, 1, "choose among the likeliest that make up this share (default 0.95)"},
    {"min-p", &Options::min_p, nullptr, 0, 1, "drop tokens this much less likely than the likeliest (default 0)"},
    {"repeat-penalty", &Options::repetition_penalty, nullptr, 0.01, 100, "weaken tokens of the prompt and the reply (default 1: no)"},
    {"presence-penalty", &Options::presence_penalty, nullptr, -100, 100, "weaken tokens of the reply, once (default 0)"},
    {"frequency-penalty", &Options::frequency_penalty, nullptr, -100, 100, "weaken tokens of the reply, each time (default 0)"},
    {"seed", nullptr, &Options::seed, 0, static_cast<double>(INT64_MAX), "the same seed gives the same reply (default: a random one)"},
};

}  // namespace

std::span<const SpeakNumber> sampling_numbers() { return kSamplingNumbers; }

void add_speak_options(CLI::App& app, SpeakOptions& options) {
  app.add_option("--system", options.system_text, "what the model is told before a conversation")->type_name("TEXT");
  app.add_flag("--think", options.think, "let the model think first, where it can; thoughts go to standard error");
  app.add_option("--chat-template", options.chat_template,
                 "write conversations by this Jinja file, or built-in: in the built-in format (default: the model's "
                 "own template, else built-in)")
      ->type_name("FILE");
  add_integer(app, "-n,--tokens", options.max_new, 1, INT32_MAX,
              "end a reply after N tokens (default: when the model ends it)");
  add_integer(app, "--ctx", options.context, 1, int64_t{1} << 24,
              fmt::format("positions for prompt and replies (default: {}, or what prompt and -n need)", kDefaultContext));
}

void add_sampling_options(CLI::App& app, SpeakOptions& options) {
  for (const SpeakNumber& number : kSamplingNumbers) {
    const std::string name = fmt::format("--{}", number.name);
    const auto most = number.most < 0x1p63 ? static_cast<int64_t>(number.most) : INT64_MAX;
    CLI::Option* option = number.real != nullptr
                              ? add_real(app, name, options.*number.real, number.least, number.most, number.help)
                              : add_integer(app, name, options.*number.integer, static_cast<int64_t>(number.least), most, number.help);
    option->group("Sampling");
  }
}

void add_machine_options(CLI::App& app, SpeakOptions& options) {
  const std::string machine = "Machine";
  add_device_options(app, options.device, machine);
  add_integer(app, "--chunk", options.chunk_tokens, 1, 1 << 16,
              "tokens of the prompt that are read at once (default 256; on a GPU up to 2048, as memory allows)")
      ->group(machine);
}

CLI::Option* add_show_special(CLI::App& app, SpeakOptions& options) {
  return app.add_flag("--show-special", options.show_special, "show special tokens of the reply by name")->group("Details");
}

std::string rate_text(int64_t n, double seconds) {
  const double value = static_cast<double>(n) / std::max(seconds, 1e-9);
  return fmt::format("{:.{}f} tok/s", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

Speaker::Speaker(const SpeakOptions& options, std::optional<int64_t> most_prompt) : options_(options), model_(open_model(options.model)) {
  // Deferred where the system refuses a thread: then it is made below, when it is asked for.
  std::future<std::unique_ptr<Tokenizer>> tokenizer =
      std::async(std::launch::async | std::launch::deferred, [this] { return require_tokenizer(*model_.checkpoint); });
  for (const std::string& warning : model_.checkpoint->warnings()) print_warning(warning);
  backend_ = make_backend(options_.device);
  warn_of_idle_options(options_.device, *backend_, model_.program);
  // Weights take a while, in which the tokenizer is made. What is wrong with a file of the user's should not be told after that.
  if (most_prompt && options_.chat_template.empty() && choose_context(*most_prompt) == choose_context(0)) prepare(0);
  tokenizer_ = tokenizer.get();
  if (!options_.raw) {
    const TemplateChoice choice = options_.chat_template.empty()              ? TemplateChoice::kAuto
                                  : options_.chat_template == kBuiltInTemplate ? TemplateChoice::kBuiltIn
                                                                               : TemplateChoice::kFile;
    writer_ = make_chat_writer(*model_.checkpoint, *tokenizer_, choice, options_.chat_template);
    if (writer_ == nullptr)
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: has no chat format that beryl knows; with 'beryl run --raw' it goes on with a text", options_.model));
    for (const std::string& warning : writer_->warnings()) print_warning(warning);
    if (options_.think && !writer_->can_think())
      print_warning(fmt::format("--think changes nothing: the chat format ({}) has no thinking", writer_->name()));
  }
  if (options_.context > model_.config.context)
    print_warning(fmt::format("--ctx {} is more than the {} positions that the model was made for", options_.context,
                              model_.config.context));
  std::random_device random;
  // 63 bits, so that --seed takes what --verbose shows.
  random_seed_ = (uint64_t{random()} << 32 | random()) >> 1;
  load_seconds_ = seconds_since_start();
}

int64_t Speaker::choose_context(int64_t n_prompt) const {
  if (options_.context != 0) return options_.context;
  const int64_t reply = options_.max_new == INT64_MAX ? kReplyRoom : options_.max_new;
  const int64_t most = model_.config.context;
  return std::min(most, std::max(kDefaultContext, n_prompt + std::min(reply, most)));
}

double Speaker::seconds_since_start() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

void Speaker::prepare(int64_t n_prompt) {
  RunLimits run;
  run.context = choose_context(n_prompt);
  if (stepper_ != nullptr && stepper_->context() >= run.context) return;
  stepper_.reset();
  stepper_ = load_on(options_.device, backend_, [&](Backend& backend) {
    run.chunk_tokens = options_.chunk_tokens > 0 ? static_cast<int>(std::min(options_.chunk_tokens, run.context))
                                                 : fitting_chunk(model_.program, run, backend, kHostChunk);
    return std::make_unique<Stepper>(model_.program, run, backend);
  });
  load_seconds_ = seconds_since_start();
}

SampleParams Speaker::sampling() const {
  SampleParams params;
  params.temperature = static_cast<float>(options_.temperature);
  params.top_k = static_cast<int32_t>(options_.top_k);
  params.top_p = static_cast<float>(options_.top_p);
  params.min_p = static_cast<float>(options_.min_p);
  params.repetition_penalty = static_cast<float>(options_.repetition_penalty);
  params.presence_penalty = static_cast<float>(options_.presence_penalty);
  params.frequency_penalty = static_cast<float>(options_.frequency_penalty);
  params.seed = seed();
  for (int32_t id : model_.config.suppressed_tokens)
    params.logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
  return params;
}

int64_t Speaker::length_after(const Turn& turn) const {
  return (turn.continues ? length() : 0) + static_cast<int64_t>(turn.ids.size());
}

void Speaker::forget() {
  stepper_->reset(kSequence);
  held_.clear();
}

std::vector<int32_t> Speaker::keep_beginning(const std::vector<int32_t>& ids) {
  // The last token is read in any case: a reply begins with what the model computes for it.
  const size_t most = std::min(held_.size(), ids.size() - 1);
  const auto n = std::mismatch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), held_.begin()).first - ids.begin();
  if (n > 0 && stepper_->rewind(kSequence, n)) {
    held_.resize(static_cast<size_t>(n));
    return {ids.begin() + n, ids.end()};
  }
  forget();
  return ids;
}

GenerateResult Speaker::reply(const Turn& turn, ReplyWriter& writer, const InterruptCatcher& interrupts, const OnRead& on_read,
                              const std::function<void()>& before_token) {
  check_prompt_ids(turn.ids, model_.config.vocab, *tokenizer_);
  GenerateRequest request;
  request.prompt = turn.continues ? turn.ids : keep_beginning(turn.ids);
  request.held = held_;
  request.max_new = options_.max_new;
  request.sampling = sampling();
  request.stop_ids.assign(tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end());
  const int64_t begin = length();
  request.cancelled = [&] {
    if (on_read) on_read(length() - begin, static_cast<int64_t>(request.prompt.size()));
    return interrupts.interrupted();
  };
  const auto on_token = [&](const Sampled& sampled) {
    if (before_token) before_token();
    writer.push(sampled.id);
    return !interrupts.interrupted();
  };
  const std::unique_ptr<TokenConstraint> bounds =
      bind_reply({.content = constraint_, .in_thought = turn.in_thought, .may_think = options_.think}, *tokenizer_, model_.config.vocab);
  request.constraint = bounds.get();
  GenerateResult result;
  try {
    result = generate(*stepper_, kSequence, request, on_token);
  } catch (...) {
    forget();   // nobody knows what it holds
    throw;
  }
  held_ = result.held;
  if (result.finish == FinishReason::kFailed) forget();   // what it holds is not finite
  writer.finish();
  return result;
}

std::string Speaker::name() const { return model_.config.name.empty() ? options_.model : model_.config.name; }

std::string Speaker::machine_text() const {
  return fmt::format("{}, context {}, seed {}", backend_->name(), context(), seed());
}

}  // namespace beryl::cli
