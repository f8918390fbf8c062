#include "cli/model_name.h"

#include <filesystem>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "store/store.h"
#include "weights/quote.h"

namespace beryl::cli {

std::string find_model(const std::string& given) {
  std::error_code failure;
  if (given.empty() || std::filesystem::exists(given, failure)) return given;
  if (failure) throw Error(ErrorCode::kIo, fmt::format("{}: cannot open: {}", quote(given, 200), failure.message()));
  const Store store(Store::default_folder());
  std::vector<std::string> names;
  try {
    if (const auto model = store.find(given)) return store.path_of(*model);
    names = store.near(given);
  } catch (const Error& error) {
    if (error.code != ErrorCode::kIo) throw;
    // Perhaps a file was meant, and no store was ever wanted.
    throw Error(ErrorCode::kIo,
                fmt::format("{}: there is no such file or folder, and no store of models to look in: {}",
                            quote(given, 200), error.what()));
  }
  std::string hint = "'beryl list' shows the names";
  if (!names.empty()) hint = fmt::format("near: {}", fmt::join(names, ", "));
  if (given.starts_with("hf:") || given.starts_with("https://"))
    hint = fmt::format("'beryl pull {}' fetches it", quote(given, 200));
  throw Error(ErrorCode::kIo, fmt::format("{}: there is no such file or folder, and no model of this name; {}",
                                          quote(given, 200), hint));
}

}  // namespace beryl::cli
