// beryl run: answers a prompt, or goes on with a text. On a terminal, without a prompt, it is beryl chat.
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "base/system_memory.h"
#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/options.h"
#include "cli/reply_writer.h"
#include "cli/speaker.h"
#include "cli/text_input.h"
#include "cpu/parallel.h"
#include "grammar/constraint.h"

namespace beryl::cli {
namespace {

struct RunOptions {
  SpeakOptions speak;
  std::string prompt;
  bool has_prompt = false;
  bool has_system_text = false;
  bool parse_special = false;
  bool json = false;
  std::string json_schema, regex, grammar;   // a file, the expression, a file
  bool has_regex = false;

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

void print_statistics(const Speaker& speaker, const GenerateResult& result, bool verbose) {
  std::string text = fmt::format("loaded in {:.2f} s | prompt {} tokens, {} | reply {} tokens", speaker.load_seconds(),
                                 result.prompt_tokens, rate_text(result.prompt_tokens, result.prefill_seconds), result.reply.size());
  if (result.decode_tokens > 0) text += fmt::format(", {}", rate_text(result.decode_tokens, result.decode_seconds));
  text += fmt::format(" | peak memory {}", human_bytes(peak_memory_bytes()));
  if (verbose) text += fmt::format(" | {}", speaker.machine_text());
  print_note(text);
}

GenerateResult reply(Speaker& speaker, const SpeakOptions& options, const Turn& turn, const InterruptCatcher& interrupts) {
  ReplyWriter writer(speaker.tokenizer(), options.show_special, turn.in_thought);
  const GenerateResult result = speaker.reply(turn, writer, interrupts);
  if (result.finish == FinishReason::kFailed)   // whose speed means nothing
    throw Error(ErrorCode::kBadInput,
                fmt::format("{}: computes no finite numbers for this text, so the reply ends here", options.model));
  print_statistics(speaker, result, options.verbose);
  if (result.finish == FinishReason::kContext)
    print_warning(fmt::format("the context of {} positions is full (--ctx)", speaker.context()));
  return result;
}

int answer(Speaker& speaker, const RunOptions& options, const std::string& prompt) {
  Turn turn;
  if (options.speak.raw) {
    turn.ids = encode_raw_prompt(speaker.tokenizer(), prompt, options.parse_special);
  } else {
    turn = Conversation(speaker.writer(), speaker.tokenizer(), options.speak.system_text, options.speak.think).next_turn(prompt);
  }
  if (turn.ids.empty()) throw UsageError("the prompt is empty, and this model begins with no token of its own");
  speaker.prepare(static_cast<int64_t>(turn.ids.size()));
  if (speaker.length_after(turn) > speaker.context())
    throw Error(ErrorCode::kBadInput, fmt::format("the prompt has {} tokens, the context {}{}", turn.ids.size(), speaker.context(),
                                                  options.speak.context == 0 ? "" : " (--ctx)"));
  const InterruptCatcher interrupts;
  return reply(speaker, options.speak, turn, interrupts).finish == FinishReason::kCancelled ? kExitInterrupted : 0;
}

// Lines from a terminal until it ends: each is a text of its own, and goes on.
int continue_lines(Speaker& speaker, const RunOptions& options) {
  speaker.prepare(0);
  print_note(fmt::format("{} goes on with each line. /exit or Ctrl-D ends, Ctrl-C ends a reply.", speaker.name()));
  InterruptCatcher interrupts;
  PromptInterrupts in_a_row;
  for (;;) {
    interrupts.clear();
    write_error("> ");
    const Line line = read_line();
    if (line.end == LineEnd::kInterrupted) {
      write_error("\n");
      if (in_a_row.is_second()) return kExitInterrupted;
      continue;
    }
    in_a_row.reset();
    if (line.end == LineEnd::kEndOfInput) write_error("\n");
    if (line.end == LineEnd::kEndOfInput || line.text == "/exit") return 0;
    if (line.text.find_first_not_of(" \t\r") == std::string::npos) continue;
    Turn turn;
    turn.ids = encode_raw_prompt(speaker.tokenizer(), line.text, options.parse_special);
    if (speaker.length_after(turn) > speaker.context()) {
      print_error(fmt::format("the line has {} tokens, the context {} (--ctx)", turn.ids.size(), speaker.context()));
      continue;
    }
    reply(speaker, options.speak, turn, interrupts);
  }
}

int run(RunOptions& options) {
  const SpeakOptions& speak = options.speak;
  if (speak.raw && options.has_system_text) throw UsageError("--system belongs to a chat; with --raw there is none");
  if (speak.raw && !speak.chat_template.empty())
    throw UsageError("--chat-template belongs to a chat; with --raw there is none");
  if (speak.raw && speak.think) throw UsageError("--think belongs to a chat; with --raw there is none");
  if (options.n_constraints() > 1) throw UsageError("give one of --json, --json-schema, --regex and --grammar");
  if (options.parse_special && !speak.raw) throw UsageError("--special needs --raw: in a chat, text stays text");
  const bool has_prompt = options.has_prompt || !is_terminal(kStandardInput);
  std::string prompt;
  if (has_prompt) {
    prompt = options.has_prompt ? options.prompt : read_input();
    // The newline that ends a file or an echo is none of the prompt's.
    if (!options.has_prompt && prompt.ends_with('\n')) prompt.pop_back();
    if (prompt.empty() && !speak.raw)
      throw UsageError(options.has_prompt ? "the prompt is empty"
                                          : "the prompt is empty: give it with -p or on standard input");
  }
  // A byte is a token at most; what a template adds is seldom more than this.
  constexpr size_t kTemplateBytes = 1024;
  std::optional<int64_t> most_prompt;
  if (options.n_constraints() == 0) most_prompt = static_cast<int64_t>(prompt.size() + speak.system_text.size() + kTemplateBytes);
  Speaker speaker(speak, most_prompt);
  if (options.n_constraints() > 0) {
    const auto constraint =
        ConstraintCompiler(speaker.tokenizer(), speaker.model().config.vocab).compile(constraint_of(options));
    for (const std::string& note : constraint->notes()) print_warning(note);
    speaker.set_constraint(constraint);
  }
  if (has_prompt) return answer(speaker, options, prompt);
  if (speak.raw) return continue_lines(speaker, options);
  return hold_chat(speaker, options.speak, ChatHistory::kKept);
}

}  // namespace

Command add_run_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("run", "Answer a prompt, or go on with a text");
  auto options = std::make_shared<RunOptions>();
  SpeakOptions& speak = options->speak;
  add_model(*app, speak.model);
  CLI::Option* prompt = app->add_option("-p,--prompt", options->prompt,
                                        "the prompt; without it, standard input, or a chat on a terminal");
  prompt->type_name("TEXT");
  app->add_flag("--raw", speak.raw, "go on with the prompt as a text, without a chat format: for base models");
  add_speak_options(*app, speak);
  add_sampling_options(*app, speak);

  const std::string form = "Form of the reply";
  app->add_flag("--json", options->json, "a JSON object")->group(form);
  app->add_option("--json-schema", options->json_schema, "JSON of this schema")->type_name("FILE")->group(form);
  CLI::Option* regex = app->add_option("--regex", options->regex, "a text that matches as a whole")->type_name("TEXT")->group(form);
  app->add_option("--grammar", options->grammar, "a text of this grammar: EBNF, its rule \"root\"")->type_name("FILE")->group(form);

  add_machine_options(*app, speak);
  const std::string details = "Details";
  app->add_flag("--special", options->parse_special,
                "with --raw: text that spells a special token, like <bos>, becomes it")
      ->group(details);
  add_show_special(*app, speak);
  app->add_flag("--verbose", speak.verbose, "device, context and seed in the last line")->group(details);
  app->footer(
      "After a reply, a line on standard error tells the time to load, the speeds and the most memory used.\n"
      "Ctrl-C ends a reply.\n"
      "\n"
      "Examples:\n"
      "  beryl run model.gguf -p \"Why is the sky blue?\" -n 200\n"
      "  beryl run model.gguf --system \"Answer in French.\" -p \"Hello\" --temp 0\n"
      "  beryl run model.gguf --raw -p \"Once upon a time\" -n 100 --seed 7\n"
      "  beryl run model.gguf --json-schema person.json -p \"Invent a person.\"\n"
      "  beryl run model.gguf --regex \"(yes|no)\" -p \"Is 17 a prime?\"\n"
      "  git diff | beryl run model.gguf --system \"Write a commit message for this change.\"");
  return {app, [options, prompt, app, regex] {
            options->has_regex = regex->count() > 0;
            options->has_prompt = prompt->count() > 0;
            options->has_system_text = app->get_option("--system")->count() > 0;
            return run(*options);
          }};
}

}  // namespace beryl::cli
