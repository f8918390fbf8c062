// beryl rm: takes models out of the store.
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/system_memory.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "store/store.h"

namespace beryl::cli {

Command add_remove_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("rm", "Remove models that 'beryl pull' has fetched");
  auto names = std::make_shared<std::vector<std::string>>();
  app->add_option("NAME", *names, "as 'beryl list' shows it; more than one may be given")->type_name("")->required();
  app->footer(
      "Files that another model uses too stay. What an interrupted pull has left is a model as well.\n"
      "\n"
      "Examples:\n"
      "  beryl rm gemma-3-270m-GGUF:Q4_K_M");
  return {app, [names] {
            Store store(Store::default_folder());
            for (const std::string& name : *names) {
              const Removed removed = store.remove(name);
              print_note(fmt::format("removed {}, {} are free again", removed.name, human_bytes(removed.freed_bytes)));
            }
            return 0;
          }};
}

}  // namespace beryl::cli
