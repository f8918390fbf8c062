// The program: finds the subcommand, runs it, and turns what went wrong into one line and an exit status.
//
//   0  done    1  it failed (a bad file, no memory, ...)    2  the command line is wrong    130  Ctrl-C
#include <algorithm>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "cli/options.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

constexpr const char* kHelp =
    R"(beryl runs Gemma 4, Gemma 3 and Llama models on this machine.

Usage: beryl COMMAND MODEL [OPTIONS]

MODEL is a GGUF file, a Hugging Face folder with config.json, tokenizer.json and safetensors, or the name of a model that
'beryl pull' has fetched.

Commands:
  run         answer a prompt, or go on with a text
  chat        talk with a model in this terminal
  serve       answer clients over HTTP, as OpenAI's and Anthropic's APIs do
  inspect     tell what a model file is and what running it takes
  tokenize    show a text as a model's tokens
  trace       write what a model computes to a file, to compare engines
  bench       measure how fast a model runs
  perplexity  measure how well a model predicts a text
  verify      prove a backend on this machine against double precision
  quantize    write a model in other weight formats
  pull        fetch a model from a hub or an address
  list        the models that have been fetched
  rm          remove one of them

Examples:
  beryl chat model.gguf                               a talk
  beryl run model.gguf -p "Why is the sky blue?"      one answer
  beryl run model.gguf < question.txt                 the same, the prompt from a file
  beryl run model.gguf --raw -p "Once upon a time"    goes on with a text: for base models
  beryl inspect model.gguf --plan                     what is in the file, and how much memory it will take

  beryl COMMAND --help                                all options of a command, with more examples
  beryl --version
)";

// Subcommands' help: what an option takes as its type says it, no more.
class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter() {
    column_width(30);
    label("OPTIONS", "OPTIONS");
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = option->get_type_name().empty() ? "" : " " + option->get_type_name();
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    return text;
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    const bool first = is_positional || group == "Options";
    const std::string text = CLI::Formatter::make_group(std::move(group), is_positional, std::move(options));
    return first ? text
                 : text.substr(std::min(text.find_first_not_of('\n'), text.size()));   // one empty line is enough
  }
  std::string make_usage(const CLI::App* app, std::string) const override {
    std::string usage = "\nUsage: beryl " + app->get_name();
    for (const CLI::Option* option : app->get_options())
      if (option->get_positional())
        usage += option->get_required() ? " " + option->get_name(true) : " [" + option->get_name(true) + "]";
    return usage + " [OPTIONS]\n";
  }
};

std::string one_of(const std::vector<Command>& commands) {
  std::string names;
  for (const Command& command : commands)
    if (!command.app->get_group().empty()) names += (names.empty() ? "" : ", ") + command.app->get_name();
  return names;
}

int run_program(int argc, char** argv) {
  CLI::App program;
  program.formatter(std::make_shared<HelpFormatter>());
  program.set_help_flag("-h,--help", "show this help");
  program.set_version_flag("--version", "beryl " BERYL_VERSION);
  const std::vector<Command> commands = {add_run_command(program), add_chat_command(program), add_serve_command(program), add_form_judge_command(program), add_inspect_command(program),
                                         add_tokenize_command(program), add_trace_command(program),
                                         add_bench_command(program), add_perplexity_command(program),
                                         add_verify_command(program), add_quantize_command(program),
                                         add_pull_command(program), add_list_command(program),
                                         add_remove_command(program)};
  if (argc <= 1 || (argc == 2 && std::string_view(argv[1]) == "help")) {
    write_output(kHelp);
    return 0;
  }
  const std::string first = argv[1];
  const bool known = std::any_of(commands.begin(), commands.end(),
                                 [&](const Command& command) { return command.app->get_name() == first; });
  if (!known && !first.starts_with('-'))
    throw UsageError(fmt::format("there is no command {}; the commands are {}", quote(first), one_of(commands)));

  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    write_output(known ? program.help() : kHelp);
    return 0;
  } catch (const CLI::CallForVersion& version) {
    write_output(fmt::format("{}\n", version.what()));
    return 0;
  } catch (const CLI::ParseError& error) {
    throw UsageError(fmt::format("{}; 'beryl{} --help' tells more", error.what(), known ? " " + first : ""));
  }
  check_environment();
  for (const Command& command : commands)
    if (command.app->parsed()) return command.run();
  throw UsageError(fmt::format("a command was expected: {}", one_of(commands)));
}

}  // namespace
}  // namespace beryl::cli

int main(int argc, char** argv) {
  using namespace beryl::cli;
  open_missing_streams();
  try {
    return run_program(argc, argv);
  } catch (const UsageError& error) {
    print_error(error.what());
    return kExitUsage;
  } catch (const beryl::Error& error) {
    print_error(error.what());
    return kExitError;
  } catch (const std::bad_alloc&) {
    print_error("not enough memory");
    return kExitError;
  } catch (const std::exception& error) {
    print_error(error.what());
    return kExitError;
  }
}
