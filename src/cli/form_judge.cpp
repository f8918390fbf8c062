// beryl form-judge: not for people. The process in which `beryl serve` has forms of replies compiled first (server/form_judge.h);
// standard input is the socket.
#include <sys/stat.h>

#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/options.h"
#include "grammar/constraint.h"
#include "server/form_judge.h"
#include "text/tokenizer.h"

namespace beryl::cli {
namespace {

struct JudgeOptions {
  std::string model;
  int64_t vocab = 1;
};

int judge(const JudgeOptions& options) {
  struct stat input = {};
  if (fstat(0, &input) != 0 || !S_ISSOCK(input.st_mode))
    throw UsageError("form-judge is started by 'beryl serve', with a socket as its standard input");
  const std::unique_ptr<Checkpoint> checkpoint = open_checkpoint(options.model);
  const std::unique_ptr<Tokenizer> tokenizer = load_tokenizer(*checkpoint);
  if (tokenizer == nullptr) throw UsageError("the model has no tokenizer");
  ConstraintCompiler constraints(*tokenizer, options.vocab);
  server::judge_forms(constraints, 0);
  return 0;
}

}  // namespace

Command add_form_judge_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("form-judge", "Compile forms of replies for 'beryl serve'");
  app->group("");   // not in the list of commands
  auto options = std::make_shared<JudgeOptions>();
  add_model(*app, options->model);
  add_integer(*app, "--vocab", options->vocab, 1, int64_t{1} << 31, "ids of the model")->required();
  return {app, [options] { return judge(*options); }};
}

}  // namespace beryl::cli
