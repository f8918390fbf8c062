// beryl list: the models of the store, a line each.
#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/system_memory.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "store/store.h"

namespace beryl::cli {
namespace {

constexpr size_t kDigestLetters = 12;  // enough to tell two apart; --full shows all 64

int list(bool shows_all) {
  const Store store(Store::default_folder());
  std::vector<std::string> warnings;
  const std::vector<StoreEntry> entries = store.list(warnings);
  for (const std::string& warning : warnings) print_warning(warning);
  if (entries.empty() && !warnings.empty()) return 0;  // there are some, as has been said
  if (entries.empty()) {
    print_note(fmt::format("no models in {}; 'beryl pull' fetches one", store.folder()));
    return 0;
  }
  size_t name_width = 4, format_width = 6;
  for (const StoreEntry& entry : entries) {
    name_width = std::max(name_width, entry.model.name.size());
    format_width = std::max(format_width, entry.model.format.size());
  }
  std::string text =
      fmt::format("{:<{}}  {:>9}  {:<{}}  {}\n", "NAME", name_width, "SIZE", "FORMAT", format_width, "DIGEST");
  for (const StoreEntry& entry : entries) {
    const bool has_digest = entry.is_complete && entry.damage.empty();
    const std::string digest = has_digest           ? entry.model.digest()
                               : entry.is_complete  ? "damaged: " + entry.damage
                               : entry.is_under_way ? "being fetched right now"
                                                    : "not all of it is there: pull it again";
    text += fmt::format("{:<{}}  {:>9}  {:<{}}  {}\n", entry.model.name, name_width, human_bytes(entry.fetched_bytes),
                        entry.model.format, format_width,
                        has_digest && !shows_all ? digest.substr(0, kDigestLetters) : digest);
  }
  write_output(harmless_on_terminal(text));
  return 0;
}

}  // namespace

Command add_list_command(CLI::App& program) {
  CLI::App* app = program.add_subcommand("list", "The models that 'beryl pull' has fetched");
  auto shows_all = std::make_shared<bool>(false);
  app->add_flag("--full", *shows_all, "digests in full");
  app->footer(
      "A name is a MODEL of every command; its last part alone will do where it means one model only. The digest is "
      "the\n"
      "SHA-256 of the model's file; where there are several, that of their names and digests.\n"
      "\n"
      "Examples:\n"
      "  beryl list\n"
      "  beryl list --full");
  return {app, [shows_all] { return list(*shows_all); }};
}

}  // namespace beryl::cli
