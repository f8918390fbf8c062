// beryl chat: a talk with a model in a terminal.
//
// Replies go to standard output, all else to standard error. One thread: a reply is generated where the user's line was read, and
// Ctrl-C is looked for before each token and each chunk of a prompt.
#include "cli/chat.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/chat_file.h"
#include "cli/chat_input.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "store/files.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

// Where the lines that were typed are kept: $XDG_STATE_HOME/beryl, or ~/.local/state/beryl. Empty: nowhere.
std::string history_file() {
  std::string folder;
  const char* state = std::getenv("XDG_STATE_HOME");
  const char* home = std::getenv("HOME");
  if (state != nullptr && *state == '/') {   // a relative one is to be ignored, says its specification
    folder = std::string(state) + "/beryl";
  } else if (home != nullptr && *home != '\0') {
    folder = std::string(home) + "/.local/state/beryl";
  } else {
    return {};
  }
  try {
    make_folders(folder);
  } catch (const Error&) {
    return {};
  }
  return folder + "/chat_history";
}

// No shell has seen what is typed here.
std::string expand_home(const std::string& path) {
  const char* home = std::getenv("HOME");
  return path.starts_with("~/") && home != nullptr ? home + path.substr(1) : path;
}

std::string setting_text(const SpeakOptions& options, const SpeakNumber& number) {
  if (number.real != nullptr) return fmt::format("{}", options.*number.real);
  const int64_t value = options.*number.integer;
  return value < 0 ? "random" : fmt::format("{}", value);
}

class Chat {
 public:
  Chat(Speaker& speaker, SpeakOptions& options, ChatHistory history)
      : speaker_(speaker),
        options_(options),
        conversation_(speaker.writer(), speaker.tokenizer(), options.system_text, options.think),
        input_(interrupts_, history == ChatHistory::kKept && LineEditor::is_possible() ? history_file() : "", command_names()) {}

  int run();

 private:
  // Of each: what it takes and does, for /help.
  struct Command {
    std::string_view name, takes, help;
    void (Chat::*obey)(const std::string& argument);
  };
  static const std::array<Command, 10> kCommands;
  static std::vector<std::string> command_names();

  void obey(const std::string& line);
  // Says it to the model. False: there is no reply, and the talk is as it was; a line has told why.
  bool say(const std::string& text);
  // text: the message that the turn says. False: a line has told what would help.
  bool fits(const Turn& turn, const std::string& text) const;
  void print_status(const GenerateResult& result) const;
  void set(const std::string& name, const std::string& value);
  // Of a setting: its value now, and what it takes; empty: there is none of this name.
  struct Setting {
    std::string now, takes;
  };
  std::optional<Setting> setting(const std::string& name) const;
  nlohmann::ordered_json settings() const;
  std::string talk_text() const;   // how long it is, as a sentence
  void require_exchange() const;

  void help(const std::string& argument);
  void reset(const std::string& argument);
  void system(const std::string& argument);
  void save(const std::string& argument);
  void load(const std::string& argument);
  void set_or_show(const std::string& argument);
  void retry(const std::string& argument);
  void undo(const std::string& argument);
  void forget(const std::string& argument);
  void exit(const std::string& argument);

  Speaker& speaker_;
  SpeakOptions& options_;
  InterruptCatcher interrupts_;
  Conversation conversation_;
  ChatInput input_;
  bool ended_ = false;
  bool failed_ = false;            // the last message or command
  uint64_t n_retries_ = 0;
};

const std::array<Chat::Command, 10> Chat::kCommands = {{
    {"/help", "", "this list", &Chat::help},
    {"/reset", "", "forget the talk; settings and the system text stay", &Chat::reset},
    {"/system", "[TEXT | off]", "what the model is told before the talk; alone: show it", &Chat::system},
    {"/save", "FILE", "write the talk to a file", &Chat::save},
    {"/load", "FILE", "go on with a talk that was saved", &Chat::load},
    {"/set", "[NAME VALUE]", "change how replies are made; alone: show it", &Chat::set_or_show},
    {"/retry", "", "another reply to the last message", &Chat::retry},
    {"/undo", "", "drop the last message and its reply", &Chat::undo},
    {"/forget", "[N]", "drop the oldest N messages and their replies, to make room (default 1)", &Chat::forget},
    {"/exit", "", "end; so does Ctrl-D", &Chat::exit},
}};

std::vector<std::string> Chat::command_names() {
  std::vector<std::string> names;
  for (const Command& command : kCommands) names.emplace_back(command.name);
  return names;
}

int Chat::run() {
  if (input_.is_interactive())
    print_note(fmt::format("A chat with {}. /help lists the commands, Ctrl-C ends a reply, /exit or Ctrl-D ends the chat.",
                           speaker_.name()));
  PromptInterrupts in_a_row;
  while (!ended_) {
    interrupts_.clear();
    const Line line = input_.next();
    if (line.end == LineEnd::kEndOfInput) return 0;
    if (line.end == LineEnd::kInterrupted) {
      if (!input_.is_interactive() || in_a_row.is_second()) return kExitInterrupted;
      continue;
    }
    in_a_row.reset();
    if (line.text.find_first_not_of(" \t\r\n") == std::string::npos) continue;
    failed_ = false;
    try {
      if (line.text.starts_with("//")) {
        say(line.text.substr(1));
      } else if (line.text.starts_with('/')) {
        obey(line.text);
      } else {
        say(line.text);
      }
    } catch (const UsageError& error) {
      failed_ = true;
      print_error(error.what());
    } catch (const Error& error) {
      // What was said is no reason to end; a device that fails and an output that is closed are.
      if (error.code != ErrorCode::kBadInput && error.code != ErrorCode::kUnsupported) throw;
      failed_ = true;
      print_error(error.what());
    }
    if (!input_.is_interactive() && failed_) return kExitError;   // what follows was meant for a talk in which it had worked
    if (!input_.is_interactive() && interrupts_.interrupted()) return kExitInterrupted;
  }
  return 0;
}

void Chat::obey(const std::string& line) {
  const size_t space = std::min(line.find_first_of(" \n"), line.size());
  const std::string name = line.substr(0, space);
  const size_t begin = line.find_first_not_of(" \n", space);
  const std::string argument =
      begin == std::string::npos ? "" : line.substr(begin, line.find_last_not_of(" \t\n") + 1 - begin);
  const auto command = std::find_if(kCommands.begin(), kCommands.end(), [&](const Command& each) { return each.name == name; });
  if (command == kCommands.end())
    throw UsageError(fmt::format("there is no command {}; /help lists them, and a message that begins with a slash begins with two",
                                 quote(name)));
  if (command->takes.empty() && !argument.empty()) throw UsageError(fmt::format("{} takes nothing behind it", name));
  (this->*command->obey)(argument);
}

bool Chat::say(const std::string& text) {
  const Turn turn = conversation_.next_turn(text);
  failed_ = !fits(turn, text);
  if (failed_) return false;
  ReplyWriter writer(speaker_.tokenizer(), options_.show_special, turn.in_thought);
  bool shows_progress = false;
  const auto on_read = [&](int64_t n_read, int64_t n) {
    // A line that the reply, or what is said instead, takes the place of.
    if (n_read == 0 || !takes_colour(kStandardError)) return;
    shows_progress = true;
    write_error(fmt::format("\r\x1b[K\x1b[2mreading, {} of {} tokens\x1b[0m", n_read, n));
  };
  bool first = true;
  GenerateResult result;
  try {
    result = speaker_.reply(turn, writer, interrupts_, on_read, [&] {
      if (std::exchange(first, false) && shows_progress) write_error("\r\x1b[K");
    });
  } catch (...) {
    conversation_.forget_cache();   // so has the speaker
    throw;
  }
  if (first && shows_progress) write_error("\r\x1b[K");
  if (result.finish == FinishReason::kFailed) {
    conversation_.forget_cache();
    throw Error(ErrorCode::kBadInput, fmt::format("{}: computes no finite numbers for this text, so there is no reply", options_.model));
  }
  if (result.reply.empty() && result.finish == FinishReason::kCancelled) {
    conversation_.forget_cache();   // a part of the turn was read; what is right of it is kept when the next one is
    print_note(fmt::format("stopped after {} tokens of the message were read; the talk is as it was before it", result.prompt_tokens));
    return false;
  }
  conversation_.add_reply(text, writer.answer(), writer.thought(), result, writer.has_thought());
  print_status(result);
  if (result.finish == FinishReason::kContext)
    print_warning(fmt::format("the context of {} positions is full, so the reply ends here. /forget drops the oldest message and its reply, "
                              "/reset all of them; --ctx makes the context larger",
                              speaker_.context()));
  return true;
}

bool Chat::fits(const Turn& turn, const std::string& text) const {
  const int64_t n = speaker_.length_after(turn);
  if (n <= speaker_.context()) return true;
  const auto positions = [&](const std::string& system_text) {   // of this message, without the talk
    const Conversation alone(speaker_.writer(), speaker_.tokenizer(), system_text, options_.think);
    return static_cast<int64_t>(alone.next_turn(text).ids.size());
  };
  const std::string& system_text = conversation_.system_text();
  const int64_t n_alone = positions(system_text);
  if (n_alone <= speaker_.context()) {
    print_error(fmt::format("with this message the talk takes {} positions, more than the context of {} (--ctx). /forget drops the oldest "
                            "message and its reply, /reset all of them; /save keeps the talk in a file",
                            n, speaker_.context()));
  } else if (!system_text.empty() && positions("") <= speaker_.context()) {
    print_error(fmt::format("this message and what the model is told before the talk take {} positions, more than the context of {}, whatever is "
                            "forgotten: make one of them shorter (/system off drops the second), or the context larger (--ctx)",
                            n_alone, speaker_.context()));
  } else {
    print_error(fmt::format("this message alone takes {} positions, more than the context of {}, whatever is forgotten: make it shorter, or the "
                            "context larger (--ctx)",
                            n_alone, speaker_.context()));
  }
  return false;
}

void Chat::print_status(const GenerateResult& result) const {
  const int64_t length = speaker_.length() + static_cast<int64_t>(result.unseen.size());
  const int64_t used = std::min(length, speaker_.context());
  std::string text = fmt::format("context {} of {} ({} %) | prompt {} tokens, {} | reply {} tokens", used, speaker_.context(),
                                 100 * used / speaker_.context(), result.prompt_tokens,
                                 rate_text(result.prompt_tokens, result.prefill_seconds), result.reply.size());
  if (result.decode_tokens > 0) text += fmt::format(", {}", rate_text(result.decode_tokens, result.decode_seconds));
  if (result.finish == FinishReason::kCancelled) text += " | stopped";
  if (result.finish == FinishReason::kLength) text += " | ended at the most tokens of a reply (/set tokens)";
  if (options_.verbose) text += fmt::format(" | {}", speaker_.machine_text());
  print_note(text);
}

std::string Chat::talk_text() const {
  const size_t n = conversation_.n_exchanges();
  return n == 0 ? "The talk is empty." : fmt::format("The talk has {} message{} and as many replies.", n, n == 1 ? "" : "s");
}

void Chat::require_exchange() const {
  if (conversation_.n_exchanges() == 0) throw UsageError("the talk is empty");
}

void Chat::help(const std::string&) {
  for (const Command& command : kCommands)
    write_error(fmt::format("  {:<22} {}\n", fmt::format("{} {}", command.name, command.takes), command.help));
  write_error(
      "\n"
      "  A message goes on in the next line where a line ends in \\, and over many lines between \"\"\" and \"\"\".\n"
      "  On a terminal Alt-Enter makes a line, the arrows go through what was said, Ctrl-R looks in it, and what is\n"
      "  pasted stays one message. //TEXT says a message that begins with a slash. Ctrl-C ends a reply and keeps the talk.\n");
}

void Chat::reset(const std::string&) {
  conversation_.reset();
  speaker_.forget();
  print_note(talk_text());
}

void Chat::system(const std::string& argument) {
  if (argument.empty()) {
    const std::string& text = conversation_.system_text();
    print_note(text.empty() ? "The model is told nothing before the talk." : fmt::format("The model is told: {}", text));
    return;
  }
  conversation_.set_system_text(argument == "off" ? "" : argument);
}

nlohmann::ordered_json Chat::settings() const {
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (const SpeakNumber& number : sampling_numbers()) {
    if (number.real != nullptr) {
      all[number.name] = options_.*number.real;
    } else if (options_.*number.integer >= 0) {   // a random seed is none to be kept
      all[number.name] = options_.*number.integer;
    }
  }
  if (options_.max_new < INT64_MAX) all["tokens"] = options_.max_new;
  all["think"] = options_.think;
  return all;
}

void Chat::save(const std::string& argument) {
  if (argument.empty()) throw UsageError("/save takes the name of a file");
  try {
    save_talk(expand_home(argument), {speaker_.name(), conversation_.system_text(), settings(), conversation_.messages()});
  } catch (const Error& error) {
    throw UsageError(error.what());   // another file may do
  }
  print_note(fmt::format("{} Saved in {}.", talk_text(), argument));
}

void Chat::load(const std::string& argument) {
  if (argument.empty()) throw UsageError("/load takes the name of a file");
  SavedTalk talk;
  try {
    talk = load_talk(expand_home(argument));
  } catch (const Error& error) {
    throw UsageError(error.what());
  }
  const SpeakOptions before = options_;
  try {
    for (const auto& [name, value] : talk.settings.items())
      set(name, value.is_boolean() ? (value.get<bool>() ? "on" : "off") : value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } catch (const UsageError& error) {
    options_ = before;
    conversation_.set_thinking(options_.think);
    throw UsageError(fmt::format("{}: its settings can not be used: {}", argument, error.what()));
  }
  conversation_.set_system_text(talk.system_text);
  conversation_.set_messages(talk.messages);
  if (talk.model != speaker_.name()) print_note(fmt::format("It was a talk with {}.", talk.model));
  print_note(talk_text());
}

std::optional<Chat::Setting> Chat::setting(const std::string& name) const {
  if (name == "think") return Setting{options_.think ? "on" : "off", "on or off"};
  if (name == "tokens")
    return Setting{options_.max_new == INT64_MAX ? "all" : fmt::format("{}", options_.max_new),
                   fmt::format("a whole number from 1 to {}, or all,", INT32_MAX)};
  for (const SpeakNumber& number : sampling_numbers()) {
    if (name != number.name) continue;
    const bool is_seed = number.integer == &SpeakOptions::seed;
    return Setting{setting_text(options_, number), number.real != nullptr ? fmt::format("a number from {} to {}", number.least, number.most)
                                                   : is_seed              ? "a whole number, or random,"
                                                                          : fmt::format("a whole number from 0 to {:.0f}", number.most)};
  }
  return std::nullopt;
}

void Chat::set(const std::string& name, const std::string& value) {
  const std::optional<Setting> known = setting(name);
  if (!known) {
    std::string names;
    for (const SpeakNumber& number : sampling_numbers()) names += fmt::format("{}, ", number.name);
    throw UsageError(fmt::format("there is no setting {}; there are {}tokens and think", quote(name), names));
  }
  if (value.empty()) throw UsageError(fmt::format("/set {} has no value, {} was expected; it is {} now", name, known->takes, known->now));
  const auto parse = [&]<class Number>(Number& number) {
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    return error == std::errc() && end == value.data() + value.size();
  };
  const auto refuse = [&] { throw UsageError(fmt::format("{} is {}, {} was expected", name, quote(value), known->takes)); };
  if (name == "think") {
    if (value != "on" && value != "off") refuse();
    options_.think = value == "on";
    if (options_.think && !speaker_.writer().can_think())
      print_warning(fmt::format("this changes nothing: the chat format ({}) has no thinking", speaker_.writer().name()));
    conversation_.set_thinking(options_.think);
    return;
  }
  if (name == "tokens") {
    int64_t number = 0;
    if (value != "all" && (!parse(number) || number < 1 || number > INT32_MAX)) refuse();
    options_.max_new = value == "all" ? INT64_MAX : number;
    return;
  }
  const auto numbers = sampling_numbers();
  const auto found = std::find_if(numbers.begin(), numbers.end(), [&](const SpeakNumber& each) { return name == each.name; });
  if (found->real != nullptr) {
    double number = 0;
    // Written so that NaN is refused.
    if (!parse(number) || !(number >= found->least && number <= found->most)) refuse();
    options_.*found->real = number;
    return;
  }
  int64_t number = 0;
  const bool is_seed = found->integer == &SpeakOptions::seed;
  if (is_seed && value == "random") number = -1;
  else if (!parse(number) || number < 0 || static_cast<double>(number) > found->most) refuse();
  options_.*found->integer = number;
}

void Chat::set_or_show(const std::string& argument) {
  if (!argument.empty()) {
    constexpr const char* kBlanks = " \t\n";
    const size_t end = std::min(argument.find_first_of(kBlanks), argument.size());
    set(argument.substr(0, end), argument.substr(std::min(argument.find_first_not_of(kBlanks, end), argument.size())));
    return;
  }
  for (const SpeakNumber& number : sampling_numbers())
    write_error(fmt::format("  {:<18} {:<8} {}\n", number.name, setting_text(options_, number), number.help));
  write_error(fmt::format("  {:<18} {:<8} {}\n", "tokens", options_.max_new == INT64_MAX ? "all" : fmt::format("{}", options_.max_new),
                          "end a reply after N tokens; all: when the model ends it"));
  write_error(fmt::format("  {:<18} {:<8} {}\n", "think", options_.think ? "on" : "off", "let the model think first, where it can"));
}

void Chat::retry(const std::string&) {
  require_exchange();
  const nlohmann::ordered_json before = conversation_.messages();
  // With the same numbers at random the same reply would come.
  const int64_t seed = options_.seed;
  options_.seed = static_cast<int64_t>((speaker_.seed() + ++n_retries_) & INT64_MAX);
  const std::string text = conversation_.drop_last();
  try {
    if (!say(text)) conversation_.set_messages(before);
  } catch (const Error&) {
    conversation_.set_messages(before);
    options_.seed = seed;
    throw;
  }
  options_.seed = seed;
}

void Chat::undo(const std::string&) {
  require_exchange();
  conversation_.drop_last();
  print_note(talk_text());
}

void Chat::forget(const std::string& argument) {
  require_exchange();
  size_t n = 1;
  if (!argument.empty()) {
    const auto [end, error] = std::from_chars(argument.data(), argument.data() + argument.size(), n);
    if (error != std::errc() || end != argument.data() + argument.size() || n < 1 || n > conversation_.n_exchanges())
      throw UsageError(fmt::format("/forget is given {}, a whole number from 1 to {} was expected", quote(argument), conversation_.n_exchanges()));
  }
  conversation_.drop_first(n);
  print_note(talk_text());
}

void Chat::exit(const std::string&) { ended_ = true; }

}  // namespace

int hold_chat(Speaker& speaker, SpeakOptions& options, ChatHistory history) {
  speaker.prepare(0);
  return Chat(speaker, options, history).run();
}

Command add_chat_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("chat", "Talk with a model in this terminal");
  struct ChatOptions {
    SpeakOptions speak;
    bool no_history = false;
  };
  auto options = std::make_shared<ChatOptions>();
  add_model(*app, options->speak.model);
  add_speak_options(*app, options->speak);
  add_sampling_options(*app, options->speak);
  add_machine_options(*app, options->speak);
  add_show_special(*app, options->speak);
  app->add_flag("--verbose", options->speak.verbose, "device, context and seed in the line after a reply")->group("Details");
  app->add_flag("--no-history", options->no_history,
                "keep what is typed in no file (default: in ~/.local/state/beryl/chat_history, for the arrow keys of the next chat)")
      ->group("Details");
  app->footer(
      "/help in the chat lists its commands. Replies go to standard output, all else to standard error. Without a terminal\n"
      "each line that is piped in is a message or a command; the first that fails ends it.\n"
      "\n"
      "Examples:\n"
      "  beryl chat model.gguf\n"
      "  beryl chat model.gguf --system \"Answer in French.\" --temp 0.3 --ctx 16384\n"
      "  printf '/load talk.json\\nAnd in one sentence?\\n' | beryl chat model.gguf");
  return {app, [options] {
            Speaker speaker(options->speak, 0);
            return hold_chat(speaker, options->speak, options->no_history ? ChatHistory::kForgotten : ChatHistory::kKept);
          }};
}

}  // namespace beryl::cli
