// The program's subcommands: each adds itself, its options and its help to the program. One file a subcommand.
#pragma once

#include <functional>

#include <CLI/CLI.hpp>

namespace beryl::cli {

struct Command {
  CLI::App* app;               // parsed() tells whether it was chosen
  std::function<int()> run;    // returns the exit status; throws UsageError or Error. Owns the parsed options
};

Command add_run_command(CLI::App& program);
Command add_chat_command(CLI::App& program);
Command add_serve_command(CLI::App& program);
Command add_form_judge_command(CLI::App& program);
Command add_inspect_command(CLI::App& program);
Command add_tokenize_command(CLI::App& program);
Command add_trace_command(CLI::App& program);
Command add_bench_command(CLI::App& program);
Command add_perplexity_command(CLI::App& program);
Command add_verify_command(CLI::App& program);
Command add_quantize_command(CLI::App& program);
Command add_pull_command(CLI::App& program);
Command add_list_command(CLI::App& program);
Command add_remove_command(CLI::App& program);

}  // namespace beryl::cli
