// beryl run: answers a prompt, holds a conversation, or goes on with a text.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/device.h"
#include "cli/options.h"
#include "cli/reply_writer.h"
#include "cli/text_input.h"
#include "cpu/parallel.h"
#include "engine/fit.h"
#include "engine/generate.h"
#include "grammar/constraint.h"
#include "grammar/reply_constraint.h"
#include "model/memory_plan.h"
#include "model/model.h"
#include "text/chat_writer.h"
#include "text/tokenizer.h"

namespace beryl::cli {
namespace {

constexpr int64_t kDefaultContext = 4096;
// Room for a reply behind a prompt that alone fills the default context.
constexpr int64_t kReplyRoom = 1024;
constexpr std::string_view kBuiltInTemplate = "built-in";
constexpr int kHostChunk = 256;

struct RunOptions {
  std::string model;
  std::string prompt;
  bool has_prompt = false;
  std::string system_text;
  bool has_system_text = false;
  bool raw = false;
  std::string chat_template;   // empty, kBuiltInTemplate, or a file
  bool think = false;
  bool parse_special = false;
  bool show_special = false;
  bool verbose = false;
  int64_t max_new = INT64_MAX;
  int64_t context = 0;   // 0: see choose_context
  int64_t chunk_tokens = 0;         // 0: chosen by the device
  double temperature = 0.7;
  int64_t top_k = 40;
  double top_p = 0.95;
  double min_p = 0;
  double repetition_penalty = 1;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  int64_t seed = -1;   // -1: a random one
  bool json = false;
  std::string json_schema, regex, grammar;   // a file, the expression, a file
  bool has_regex = false;
  DeviceOptions device;

  int n_constraints() const { return (json ? 1 : 0) + (json_schema.empty() ? 0 : 1) + (has_regex ? 1 : 0) + (grammar.empty() ? 0 : 1); }
};

// Requires n_constraints() == 1.
ConstraintSpec constraint_of(const RunOptions& options) {
  using Kind = ConstraintSpec::Kind;
  if (options.json) return {Kind::kJsonObject, ""};
  if (options.has_regex) return {Kind::kRegex, options.regex};
  const MappedFile file(options.grammar.empty() ? options.json_schema : options.grammar);
  const auto bytes = file.bytes();
  return {options.grammar.empty() ? Kind::kJsonSchema : Kind::kGrammar, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}};
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t peak_memory_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// Three digits are enough for a rate.
std::string rate(int64_t n, double seconds) {
  const double value = static_cast<double>(n) / std::max(seconds, 1e-9);
  return fmt::format("{:.{}f} tok/s", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

class Runner {
 public:
  explicit Runner(const RunOptions& options) : options_(options), model_(open_model(options.model)) {
    for (const std::string& warning : model_.checkpoint->warnings()) print_warning(warning);
    tokenizer_ = require_tokenizer(*model_.checkpoint);
    if (!options_.raw) {
      const TemplateChoice choice = options_.chat_template.empty()              ? TemplateChoice::kAuto
                                    : options_.chat_template == kBuiltInTemplate ? TemplateChoice::kBuiltIn
                                                                                 : TemplateChoice::kFile;
      writer_ = make_chat_writer(*model_.checkpoint, *tokenizer_, choice, options_.chat_template);
      if (writer_ == nullptr)
        throw Error(
            ErrorCode::kUnsupported,
            fmt::format("{}: has no chat format that beryl knows; with --raw it goes on with a text", options_.model));
      for (const std::string& warning : writer_->warnings()) print_warning(warning);
      if (options_.think && !writer_->can_think())
        print_warning(fmt::format("--think changes nothing: the chat format ({}) has no thinking", writer_->name()));
    }
    if (options_.context > model_.config.context)
      print_warning(fmt::format("--ctx {} is more than the {} positions that the model was made for", options_.context,
                                model_.config.context));
    set_sampling();
    if (options_.n_constraints() > 0) {
      constraint_ = ConstraintCompiler(*tokenizer_, model_.config.vocab, usable_cores()).compile(constraint_of(options_));
      for (const std::string& note : constraint_->notes()) print_warning(note);
    }
    backend_ = make_backend(options_.device);
  }

  int answer(const std::string& prompt) {
    Turn turn;
    if (options_.raw) {
      turn.ids = encode_raw_prompt(*tokenizer_, prompt, options_.parse_special);
    } else {
      turn = Conversation(*writer_, *tokenizer_, options_.system_text, options_.think).next_turn(prompt);
    }
    if (turn.ids.empty()) throw UsageError("the prompt is empty, and this model begins with no token of its own");
    prepare(static_cast<int64_t>(turn.ids.size()));
    if (static_cast<int64_t>(turn.ids.size()) > stepper_->context())
      throw Error(ErrorCode::kBadInput, fmt::format("the prompt has {} tokens, the context {}{}", turn.ids.size(),
                                                    stepper_->context(), options_.context == 0 ? "" : " (--ctx)"));
    InterruptCatcher interrupts;
    ReplyWriter writer(*tokenizer_, options_.show_special, turn.in_thought);
    const GenerateResult result = reply(turn, writer, interrupts);
    return result.finish == FinishReason::kCancelled ? kExitInterrupted : 0;
  }

  int converse() {
    prepare(0);
    Conversation conversation(*writer_, *tokenizer_, options_.system_text, options_.think);
    print_note(fmt::format("A conversation with {}. /reset forgets it, /exit or Ctrl-D ends it, Ctrl-C ends a reply.",
                           model_name()));
    return for_each_line([&](const std::string& text, InterruptCatcher& interrupts) {
      if (text == "/reset") {
        conversation.reset();
        forget_sequence();
        return;
      }
      const Turn turn = conversation.next_turn(text);
      if (!turn.continues) forget_sequence();
      if (!fits(turn)) {
        if (!turn.continues) conversation.forget_cache();
        return;
      }
      ReplyWriter writer(*tokenizer_, options_.show_special, turn.in_thought);
      const GenerateResult result = reply(turn, writer, interrupts);
      if (result.reply.empty() && result.finish == FinishReason::kCancelled) {
        // Only a part of the turn was read.
        forget_sequence();
        conversation.forget_cache();
        return;
      }
      conversation.add_reply(text, writer.answer(), result, writer.has_thought());
    });
  }

  // Each line is a text of its own, and goes on.
  int continue_lines() {
    prepare(0);
    print_note(fmt::format("{} goes on with each line. /exit or Ctrl-D ends, Ctrl-C ends a reply.", model_name()));
    return for_each_line([&](const std::string& text, InterruptCatcher& interrupts) {
      Turn turn;
      turn.ids = encode_raw_prompt(*tokenizer_, text, options_.parse_special);
      forget_sequence();
      if (!fits(turn)) return;
      ReplyWriter writer(*tokenizer_, options_.show_special, turn.in_thought);
      reply(turn, writer, interrupts);
    });
  }

 private:
  static constexpr int kSequence = 0;

  std::string model_name() const { return model_.config.name.empty() ? options_.model : model_.config.name; }

  void set_sampling() {
    sampling_.temperature = static_cast<float>(options_.temperature);
    sampling_.top_k = static_cast<int32_t>(options_.top_k);
    sampling_.top_p = static_cast<float>(options_.top_p);
    sampling_.min_p = static_cast<float>(options_.min_p);
    sampling_.repetition_penalty = static_cast<float>(options_.repetition_penalty);
    sampling_.presence_penalty = static_cast<float>(options_.presence_penalty);
    sampling_.frequency_penalty = static_cast<float>(options_.frequency_penalty);
    if (options_.seed >= 0) {
      sampling_.seed = static_cast<uint64_t>(options_.seed);
    } else {
      std::random_device random;
      // 63 bits, so that --seed takes what --verbose shows.
      sampling_.seed = (uint64_t{random()} << 32 | random()) >> 1;
    }
    for (int32_t id : model_.config.suppressed_tokens)
      sampling_.logit_bias.emplace_back(id, -std::numeric_limits<float>::infinity());
  }

  // --ctx; else the default, more where the prompt and -n need it, never more than the model was made for.
  int64_t choose_context(int64_t n_prompt) const {
    if (options_.context > 0) return options_.context;
    const int64_t reply = options_.max_new == INT64_MAX ? kReplyRoom : options_.max_new;
    const int64_t model = model_.config.context;
    return std::min(model, std::max(kDefaultContext, n_prompt + std::min(reply, model)));
  }

  void prepare(int64_t n_prompt) {
    RunLimits run;
    run.context = choose_context(n_prompt);
    stepper_ = load_on(options_.device, backend_, [&](Backend& backend) {
      run.chunk_tokens = options_.chunk_tokens > 0 ? static_cast<int>(std::min(options_.chunk_tokens, run.context))
                                                   : fitting_chunk(model_.program, run, backend, kHostChunk);
      return std::make_unique<Stepper>(model_.program, run, backend);
    });
    load_seconds_ = seconds_since(start_);
  }

  // Says why not. In a conversation what does not fit is no reason to end.
  bool fits(const Turn& turn) const {
    const int64_t held = stepper_->length(kSequence);
    const auto n = static_cast<int64_t>(turn.ids.size());
    if (n > 0 && held + n <= stepper_->context()) return true;
    if (n > 0)
      print_error(
          fmt::format("{} tokens more than the {} so far do not fit the context of {} (--ctx); /reset starts anew", n,
                      held, stepper_->context()));
    return false;
  }

  void forget_sequence() {
    stepper_->reset(kSequence);
    held_.clear();
  }

  GenerateResult reply(const Turn& turn, ReplyWriter& writer, const InterruptCatcher& interrupts) {
    check_prompt_ids(turn.ids, model_.config.vocab, *tokenizer_);
    GenerateRequest request;
    request.held = std::move(held_);
    request.prompt = turn.ids;
    request.max_new = options_.max_new;
    request.sampling = sampling_;
    request.stop_ids.assign(tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end());
    request.cancelled = [&] { return interrupts.interrupted(); };
    const auto on_token = [&](const Sampled& sampled) {
      writer.push(sampled.id);
      return !interrupts.interrupted();
    };
    const std::unique_ptr<TokenConstraint> bounds =
        bind_reply({.content = constraint_, .in_thought = turn.in_thought, .may_think = options_.think}, *tokenizer_, model_.config.vocab);
    request.constraint = bounds.get();
    const GenerateResult result = generate(*stepper_, kSequence, request, on_token);
    held_ = result.held;
    writer.finish();
    print_statistics(result);
    if (result.finish == FinishReason::kContext)
      print_warning(fmt::format("the context of {} positions is full (--ctx)", stepper_->context()));
    if (result.finish == FinishReason::kFailed)
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{}: computes no finite numbers for this text, so the reply ends here", options_.model));
    return result;
  }

  void print_statistics(const GenerateResult& result) const {
    std::string text =
        fmt::format("loaded in {:.2f} s | prompt {} tokens, {} | reply {} tokens", load_seconds_, result.prompt_tokens,
                    rate(result.prompt_tokens, result.prefill_seconds), result.reply.size());
    if (result.decode_tokens > 0) text += fmt::format(", {}", rate(result.decode_tokens, result.decode_seconds));
    text += fmt::format(" | peak memory {}", human_bytes(peak_memory_bytes()));
    if (options_.verbose)
      text += fmt::format(" | {}, context {}, seed {}", backend_->name(), stepper_->context(), sampling_.seed);
    print_note(text);
  }

  // Lines from a terminal until it ends. Empty ones count for nothing; /exit ends.
  template <class Answer>
  int for_each_line(const Answer& answer) {
    InterruptCatcher interrupts;
    bool warned = false;
    for (;;) {
      interrupts.clear();
      write_error("> ");
      const Line line = read_line();
      if (line.end == LineEnd::kInterrupted) {
        write_error("\n");
        if (warned) return kExitInterrupted;
        print_note("Ctrl-C once more, Ctrl-D or /exit ends.");
        warned = true;
        continue;
      }
      warned = false;
      if (line.end == LineEnd::kEndOfInput) {
        write_error("\n");
        return 0;
      }
      if (line.text == "/exit") return 0;
      if (line.text.find_first_not_of(" \t\r") != std::string::npos) answer(line.text, interrupts);
    }
  }

  const Clock::time_point start_ = Clock::now();
  const RunOptions& options_;
  Model model_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatWriter> writer_;   // null: raw
  SampleParams sampling_;
  std::shared_ptr<const CompiledConstraint> constraint_;   // null: none
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Stepper> stepper_;
  std::vector<int32_t> held_;          // what the sequence has read
  double load_seconds_ = 0;
};

int run(const RunOptions& options) {
  if (options.raw && options.has_system_text) throw UsageError("--system belongs to a chat; with --raw there is none");
  if (options.raw && !options.chat_template.empty())
    throw UsageError("--chat-template belongs to a chat; with --raw there is none");
  if (options.raw && options.think) throw UsageError("--think belongs to a chat; with --raw there is none");
  if (options.n_constraints() > 1) throw UsageError("give one of --json, --json-schema, --regex and --grammar");
  if (options.parse_special && !options.raw) throw UsageError("--special needs --raw: in a chat, text stays text");
  if (options.has_prompt || !is_terminal(kStandardInput)) {
    std::string prompt = options.has_prompt ? options.prompt : read_input();
    // The newline that ends a file or an echo is none of the prompt's.
    if (!options.has_prompt && prompt.ends_with('\n')) prompt.pop_back();
    if (prompt.empty() && !options.raw)
      throw UsageError(options.has_prompt ? "the prompt is empty"
                                          : "the prompt is empty: give it with -p or on standard input");
    return Runner(options).answer(prompt);
  }
  Runner runner(options);
  return options.raw ? runner.continue_lines() : runner.converse();
}

}  // namespace

Command add_run_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("run", "Answer a prompt, hold a conversation, or go on with a text");
  auto options = std::make_shared<RunOptions>();
  add_model(*app, options->model);
  CLI::Option* prompt = app->add_option("-p,--prompt", options->prompt,
                                        "the prompt; without it, standard input, or a conversation on a terminal");
  prompt->type_name("TEXT");
  CLI::Option* system =
      app->add_option("--system", options->system_text, "what the model is told before a conversation");
  system->type_name("TEXT");
  app->add_flag("--raw", options->raw, "go on with the prompt as a text, without a chat format: for base models");
  app->add_flag("--think", options->think, "let the model think first, where it can; thoughts go to standard error");
  app->add_option("--chat-template", options->chat_template,
                  "write conversations by this Jinja file, or built-in: in the built-in format (default: the model's "
                  "own template, else built-in)")
      ->type_name("FILE");
  add_integer(*app, "-n,--tokens", options->max_new, 1, INT32_MAX,
              "end a reply after N tokens (default: when the model ends it)");
  add_integer(
      *app, "--ctx", options->context, 1, int64_t{1} << 24,
      fmt::format("positions for prompt and replies (default: {}, or what prompt and -n need)", kDefaultContext));

  const std::string sampling = "Sampling";
  add_real(*app, "--temp", options->temperature, 0, 100, "how far to stray from the likeliest; 0: never (default 0.7)")
      ->group(sampling);
  add_integer(*app, "--top-k", options->top_k, 0, INT32_MAX, "choose among the N likeliest; 0: all (default 40)")
      ->group(sampling);
  add_real(*app, "--top-p", options->top_p, 0, 1, "choose among the likeliest that make up this share (default 0.95)")
      ->group(sampling);
  add_real(*app, "--min-p", options->min_p, 0, 1, "drop tokens this much less likely than the likeliest (default 0)")
      ->group(sampling);
  add_real(*app, "--repeat-penalty", options->repetition_penalty, 0.01, 100,
           "weaken tokens of the prompt and the reply (default 1: no)")
      ->group(sampling);
  add_real(*app, "--presence-penalty", options->presence_penalty, -100, 100,
           "weaken tokens of the reply, once (default 0)")
      ->group(sampling);
  add_real(*app, "--frequency-penalty", options->frequency_penalty, -100, 100,
           "weaken tokens of the reply, each time (default 0)")
      ->group(sampling);
  add_integer(*app, "--seed", options->seed, 0, INT64_MAX, "the same seed gives the same reply (default: a random one)")
      ->group(sampling);

  const std::string form = "Form of the reply";
  app->add_flag("--json", options->json, "a JSON object")->group(form);
  app->add_option("--json-schema", options->json_schema, "JSON of this schema")->type_name("FILE")->group(form);
  CLI::Option* regex = app->add_option("--regex", options->regex, "a text that matches as a whole")->type_name("TEXT")->group(form);
  app->add_option("--grammar", options->grammar, "a text of this grammar: EBNF, its rule \"root\"")->type_name("FILE")->group(form);

  const std::string machine = "Machine";
  add_device_options(*app, options->device, machine);
  add_integer(*app, "--chunk", options->chunk_tokens, 1, 1 << 16,
              "tokens of the prompt that are read at once (default 256; on a GPU up to 2048, as memory allows)")
      ->group(machine);

  const std::string details = "Details";
  app->add_flag("--special", options->parse_special,
                "with --raw: text that spells a special token, like <bos>, becomes it")
      ->group(details);
  app->add_flag("--show-special", options->show_special, "show special tokens of the reply by name")->group(details);
  app->add_flag("--verbose", options->verbose, "device, context and seed in the last line")->group(details);
  app->footer(
      "After a reply, a line on standard error tells the time to load, the speeds and the most memory used.\n"
      "Ctrl-C ends a reply.\n"
      "\n"
      "Examples:\n"
      "  beryl run model.gguf\n"
      "  beryl run model.gguf -p \"Why is the sky blue?\" -n 200\n"
      "  beryl run model.gguf --system \"Answer in French.\" -p \"Hello\" --temp 0\n"
      "  beryl run model.gguf --raw -p \"Once upon a time\" -n 100 --seed 7\n"
      "  beryl run model.gguf --json-schema person.json -p \"Invent a person.\"\n"
      "  beryl run model.gguf --regex \"(yes|no)\" -p \"Is 17 a prime?\"\n"
      "  git diff | beryl run model.gguf --system \"Write a commit message for this change.\"");
  return {app, [options, prompt, system, regex] {
            options->has_regex = regex->count() > 0;
            options->has_prompt = prompt->count() > 0;
            options->has_system_text = system->count() > 0;
            return run(*options);
          }};
}

}  // namespace beryl::cli
