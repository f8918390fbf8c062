// beryl tokenize: a text as a model's tokens.
#include <memory>
#include <string>

#include <fmt/format.h>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/text_input.h"
#include "weights/quote.h"

namespace beryl::cli {
namespace {

struct TokenizeOptions {
  std::string model;
  std::string text;
  bool has_text = false;
  bool ids_only = false;
  bool parse_special = false;
  bool bos = false;
};

// A special token's name, with what does not print as \\xNN.
std::string unquoted(std::string_view name) {
  const std::string quoted = quote(name, 400);
  return quoted.substr(1, quoted.size() - 2);
}

int tokenize(const TokenizeOptions& options) {
  if (!options.has_text && is_terminal(kStandardInput))
    throw UsageError("TEXT is missing: give it on the command line or on standard input");
  const std::unique_ptr<Checkpoint> checkpoint = open_checkpoint(options.model);
  for (const std::string& warning : checkpoint->warnings()) print_warning(warning);
  const std::unique_ptr<Tokenizer> tokenizer = require_tokenizer(*checkpoint);
  const std::string text = options.has_text ? options.text : read_input();
  const std::vector<int32_t> ids = options.bos ? encode_raw_prompt(*tokenizer, text, options.parse_special)
                                               : tokenizer->encode(text, options.parse_special);
  std::string output;
  if (options.ids_only) {
    output = join_ids(ids) + '\n';
  } else {
    for (int32_t id : ids) {
      const std::string name(tokenizer->token_text(id));
      output += tokenizer->is_special(id) ? fmt::format("{:>7}  {}\n", id, unquoted(name))
                                          : fmt::format("{:>7}  {}\n", id, quote(tokenizer->token_bytes(id), 400));
    }
  }
  write_output(output);
  return 0;
}

}  // namespace

Command add_tokenize_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("tokenize", "Show a text as a model's tokens");
  auto options = std::make_shared<TokenizeOptions>();
  add_model(*app, options->model);
  CLI::Option* text = app->add_option("TEXT", options->text, "the text; without it, standard input, byte for byte");
  text->type_name("");
  app->add_flag("--ids", options->ids_only, "the ids alone, with commas: what 'beryl trace --ids' takes");
  app->add_flag("--special", options->parse_special, "text that spells a special token, like <bos>, becomes it");
  app->add_flag("--bos", options->bos, "begin as a prompt does: with the BOS token, where the model wants one");
  app->footer(
      "A token that is text is shown in quotes, bytes that do not print as \\xNN; a special token by its name.\n"
      "\n"
      "Examples:\n"
      "  beryl tokenize model.gguf \"Hello, world\"\n"
      "  beryl tokenize model.gguf --ids -- \"-1 is a number\"\n"
      "  beryl tokenize model.gguf --ids < book.txt");
  return {app, [options, text] {
            options->has_text = text->count() > 0;
            return tokenize(*options);
          }};
}

}  // namespace beryl::cli
