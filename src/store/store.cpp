#include "store/store.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <set>
#include <stdexcept>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "store/digest.h"
#include "weights/quote.h"

namespace beryl {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxManifestBytes = 16 << 20;
constexpr const char* kManifest = ".beryl.json";

// A name as a file's name; different names stay different.
std::string encoded(const std::string& name) {
  std::string text;
  for (const char c : name) {
    if (c == '/') {
      text += "%2F";
    } else {
      text += c;
    }
  }
  return text;
}

std::string decoded(std::string_view text) {
  std::string name;
  for (size_t at = text.find("%2F"); at != text.npos; at = text.find("%2F")) {
    name.append(text.substr(0, at)).append("/");
    text.remove_prefix(at + 3);
  }
  return name.append(text);
}

std::string to_json(const StoredModel& model) {
  nlohmann::ordered_json files = nlohmann::ordered_json::array();
  for (const StoredFile& file : model.files)
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"sha256", file.sha256},
                     {"git_sha1", file.git_sha1},
                     {"partial", file.partial_key}});
  const nlohmann::ordered_json root = {{"name", model.name},
                                       {"source", model.source},
                                       {"format", model.format},
                                       {"is_folder", model.is_folder},
                                       {"files", files}};
  return root.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
}

bool is_file_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.size() <= 255 && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

// A manifest's member. Throws std::invalid_argument: what is wrong with it.
const nlohmann::json& member(const nlohmann::json& object, const char* name, nlohmann::json::value_t type) {
  if (!object.is_object()) throw std::invalid_argument(fmt::format("an object with '{}' was expected", name));
  const auto found = object.find(name);
  if (found == object.end()) throw std::invalid_argument(fmt::format("'{}' is missing", name));
  if (found->type() != type)
    throw std::invalid_argument(
        fmt::format("'{}' is of type {}, {} was expected", name, found->type_name(), nlohmann::json(type).type_name()));
  return *found;
}

std::string text_member(const nlohmann::json& object, const char* name) {
  return member(object, name, nlohmann::json::value_t::string).get<std::string>();
}

// Of a file; -1: not known yet. What is no size would end up in sums and on the screen.
int64_t bytes_member(const nlohmann::json& object, bool is_complete) {
  constexpr int64_t kMost = int64_t{1} << 50;
  const auto found = object.find("bytes");
  if (found == object.end()) throw std::invalid_argument("'bytes' is missing");
  const int64_t bytes = found->is_number_integer() ? found->get<int64_t>() : INT64_MIN;
  if (bytes < (is_complete ? 0 : -1) || bytes > kMost)
    throw std::invalid_argument(fmt::format("'bytes' is {}, a file's size was expected", quote(found->dump())));
  return bytes;
}

// What helps where a model is damaged.
std::string advice_for(const std::string& name) {
  return fmt::format("pull the model again, or remove it: beryl rm {}", is_model_name(name) ? name : quote(name));
}

// Of the model `name`. Empty: there is no such file. Throws Error(kBadInput) when it is none of ours.
std::optional<StoredModel> read_manifest(const std::string& path, const std::string& name, bool is_complete) {
  const std::optional<std::string> text = read_small_file(path, kMaxManifestBytes);
  if (!text) return std::nullopt;
  StoredModel model;
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kBadInput, fmt::format("{}: is damaged: {}; {}", path, why, advice_for(name)));
  };
  try {
    const auto root = nlohmann::json::parse(*text);
    model.name = text_member(root, "name");
    model.source = text_member(root, "source");
    model.format = text_member(root, "format");
    model.is_folder = member(root, "is_folder", nlohmann::json::value_t::boolean).get<bool>();
    for (const auto& entry : member(root, "files", nlohmann::json::value_t::array)) {
      StoredFile file;
      file.name = text_member(entry, "name");
      file.bytes = bytes_member(entry, is_complete);
      file.sha256 = text_member(entry, "sha256");
      file.git_sha1 = text_member(entry, "git_sha1");
      file.partial_key = text_member(entry, "partial");
      const bool has_digest = is_hex(file.sha256, 64) || (file.sha256.empty() && !is_complete);
      if (!is_file_name(file.name) || !has_digest || !is_file_name(file.partial_key))
        refuse(fmt::format("it holds the file {}, which no pull wrote", quote(file.name)));
      model.files.push_back(std::move(file));
    }
  } catch (const nlohmann::json::parse_error& error) {
    refuse(fmt::format("it is no JSON from byte {} on", error.byte));
  } catch (const nlohmann::json::exception&) {
    refuse("no pull wrote it");  // a number that is none, for example
  } catch (const std::invalid_argument& error) {
    refuse(error.what());
  }
  if (model.name != name) refuse(fmt::format("it is that of {}", quote(model.name)));
  if (model.files.empty()) refuse("it has no files");
  return model;
}

// Names in a folder, sorted; none when there is no folder.
std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code failure;
  for (fs::directory_iterator entry(folder, failure); !failure && entry != fs::directory_iterator();
       entry.increment(failure))
    names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

int64_t stored_bytes(const std::string& path) {
  struct stat status = {};
  return ::stat(path.c_str(), &status) == 0 ? int64_t{status.st_blocks} * 512 : 0;
}

// Insertions, deletions and replacements from a to b.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (std::tolower(static_cast<unsigned char>(a[i - 1])) ==
                                                  std::tolower(static_cast<unsigned char>(b[j - 1]))
                                              ? 0
                                              : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

// All that a model may be called: its name without OWNER/, without :TAG, without both.
std::vector<std::string> short_names(const std::string& name) {
  const size_t slash = name.rfind('/', name.rfind(':')), colon = name.rfind(':');
  std::vector<std::string> names = {name};
  if (slash != name.npos) names.push_back(name.substr(slash + 1));
  if (colon != name.npos && (slash == name.npos || colon > slash)) {
    names.push_back(name.substr(0, colon));
    if (slash != name.npos) names.push_back(name.substr(slash + 1, colon - slash - 1));
  }
  return names;
}

// The entries that `given` may mean: the one of this name, else all that may be called so.
std::vector<const StoreEntry*> meant(const std::vector<StoreEntry>& entries, std::string given) {
  if (given.starts_with("hf:")) given = given.substr(3);
  std::vector<const StoreEntry*> fitting;
  for (const StoreEntry& entry : entries)
    if (entry.model.name == given) return {&entry};
  for (const StoreEntry& entry : entries) {
    const std::vector<std::string> names = short_names(entry.model.name);
    if (std::find(names.begin(), names.end(), given) != names.end()) fitting.push_back(&entry);
  }
  return fitting;
}

const StoreEntry* the_one(const std::vector<const StoreEntry*>& fitting, const std::string& name) {
  if (fitting.size() > 1) {
    std::vector<std::string> names;
    for (const StoreEntry* entry : fitting) names.push_back(entry->model.name);
    throw Error(ErrorCode::kBadInput, fmt::format("{} may be {}; say which", quote(name), fmt::join(names, " or ")));
  }
  return fitting.empty() ? nullptr : fitting.front();
}

}  // namespace

int64_t StoredModel::bytes() const {
  int64_t sum = 0;
  for (const StoredFile& file : files) sum += std::max<int64_t>(file.bytes, 0);
  return sum;
}

std::string StoredModel::digest() const {
  if (files.size() == 1) return files.front().sha256;
  std::string list;
  for (const StoredFile& file : files) list += fmt::format("{}  {}\n", file.sha256, file.name);
  return sha256_of(list);
}

bool is_model_name(const std::string& name) {
  const auto is_good = [](unsigned char c) {
    return std::isalnum(c) != 0 || (c != 0 && std::strchr("._:/@+-", c) != nullptr);
  };
  return !name.empty() && name.size() <= 160 && std::isalnum(static_cast<unsigned char>(name.front())) != 0 &&
         std::all_of(name.begin(), name.end(), is_good);
}

std::string Store::default_folder() {
  if (const char* folder = std::getenv("BERYL_STORE"); folder != nullptr && *folder != '\0') return folder;
  // A relative XDG_DATA_HOME is to be ignored, says its specification.
  if (const char* folder = std::getenv("XDG_DATA_HOME"); folder != nullptr && *folder == '/')
    return std::string(folder) + "/beryl";
  const char* home = std::getenv("HOME");
  if (home == nullptr || *home == '\0')
    throw Error(ErrorCode::kBadInput, "there is no place for models: neither BERYL_STORE nor HOME is set");
  return std::string(home) + "/.local/share/beryl";
}

std::string Store::model_folder(const std::string& name) const { return folder_ + "/models/" + encoded(name); }

std::string Store::incomplete_path(const std::string& name, const char* ending) const {
  return folder_ + "/incomplete/" + encoded(name) + ending;
}

void Store::require_folder() const {
  std::error_code failure;
  const fs::file_status status = fs::status(folder_, failure);
  if (status.type() == fs::file_type::not_found && failure != std::errc::not_a_directory) return;
  if (failure && failure != std::errc::not_a_directory)
    fail_io(folder_, "cannot look for models there", failure.value());
  if (failure || !fs::is_directory(status))
    throw Error(
        ErrorCode::kIo,
        fmt::format("{}: models are to lie there, but it is no folder and can be none; BERYL_STORE names another",
                    folder_));
  if (::access(folder_.c_str(), R_OK | X_OK) != 0) fail_io(folder_, "cannot look for models there", errno);
}

OpenFile Store::lock() const {
  require_folder();
  make_folders(folder_);
  return std::move(*open_locked(folder_ + "/lock", /*waits=*/true));
}

std::vector<StoreEntry> Store::entries(std::vector<std::string>& damaged) const {
  require_folder();
  std::vector<StoreEntry> found;
  const auto add = [&](const std::string& path, const std::string& name, bool is_complete) {
    StoreEntry entry;
    entry.model.name = name;
    entry.is_complete = is_complete;
    std::error_code failure;
    try {
      if (std::optional<StoredModel> model = read_manifest(path, name, is_complete)) {
        entry.model = std::move(*model);
      } else if (is_complete && fs::exists(model_folder(name), failure)) {
        entry.damage = fmt::format("{}: is missing; {}", path, advice_for(name));
      } else {
        return;  // removed in between
      }
    } catch (const Error& error) {
      entry.damage = error.what();
    }
    if (!entry.damage.empty()) damaged.push_back(entry.damage);
    found.push_back(std::move(entry));
  };
  for (const std::string& name : names_in(folder_ + "/models"))
    if (!name.starts_with('.')) add(folder_ + "/models/" + name + "/" + kManifest, decoded(name), true);
  for (const std::string& name : names_in(folder_ + "/incomplete"))
    if (name.ends_with(".json")) add(folder_ + "/incomplete/" + name, decoded(name.substr(0, name.size() - 5)), false);
  return found;
}

std::string Store::damage_of(const StoredModel& model) const {
  for (const StoredFile& file : model.files) {
    const std::string path = model_folder(model.name) + "/" + file.name;
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0)
      return fmt::format("its file {} is not there ({}); pull it again", quote(file.name), path);
    if (status.st_size != file.bytes)
      return fmt::format("its file {} has {} bytes, {} were expected ({}); pull it again", quote(file.name),
                         status.st_size, file.bytes, path);
  }
  return {};
}

// Takes the lock for a moment; who wants it right then waits as for a pull.
bool Store::is_claimed(const std::string& name) const {
  const OpenFile file(::open(incomplete_path(name, ".lock").c_str(), O_RDONLY | O_CLOEXEC));
  return file.get() >= 0 && ::flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

std::vector<StoreEntry> Store::list(std::vector<std::string>& warnings) const {
  std::vector<StoreEntry> found = entries(warnings);
  std::erase_if(found, [](const StoreEntry& entry) { return !entry.damage.empty(); });
  const auto is_all_there = [&](const StoreEntry& planned) {  // a pull that only compares, or was stopped while it did
    return std::any_of(found.begin(), found.end(), [&](const StoreEntry& entry) {
      return entry.is_complete && entry.model.name == planned.model.name &&
             entry.model.digest() == planned.model.digest();
    });
  };
  std::vector<StoreEntry> planned;
  std::copy_if(found.begin(), found.end(), std::back_inserter(planned),
               [](const StoreEntry& entry) { return !entry.is_complete; });
  std::erase_if(planned, is_all_there);
  std::erase_if(found, [](const StoreEntry& entry) { return !entry.is_complete; });
  for (StoreEntry& entry : found) {
    entry.damage = damage_of(entry.model);
    entry.fetched_bytes = entry.model.bytes();
  }
  for (StoreEntry& entry : planned) {
    entry.is_under_way = is_claimed(entry.model.name);
    for (const StoredFile& file : entry.model.files)
      entry.fetched_bytes +=
          has_blob(file) ? blob_bytes(file) : stored_bytes(partial_folder() + "/" + file.partial_key + ".part");
    found.push_back(std::move(entry));
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const StoreEntry& a, const StoreEntry& b) { return a.model.name < b.model.name; });
  return found;
}

std::optional<StoredModel> Store::find(const std::string& name) const {
  std::vector<std::string> ignored;
  std::vector<StoreEntry> complete = entries(ignored);
  std::erase_if(complete, [](const StoreEntry& entry) { return !entry.is_complete; });
  // A damaged one counts: that another may be meant as well does not make it the one that is.
  const StoreEntry* entry = the_one(meant(complete, name), name);
  if (entry == nullptr) return std::nullopt;
  if (!entry->damage.empty()) throw Error(ErrorCode::kBadInput, entry->damage);
  if (const std::string damage = damage_of(entry->model); !damage.empty())
    throw Error(ErrorCode::kBadInput, fmt::format("the model {} is damaged: {}", quote(entry->model.name), damage));
  return entry->model;
}

std::string Store::path_of(const StoredModel& model) const {
  const std::string folder = model_folder(model.name);
  return model.is_folder ? folder : folder + "/" + model.files.front().name;
}

std::vector<std::string> Store::near(const std::string& name) const {
  std::vector<std::string> ignored;
  std::vector<std::pair<size_t, std::string>> scored;
  for (const StoreEntry& entry : entries(ignored)) {
    size_t best = SIZE_MAX;
    for (const std::string& alias : short_names(entry.model.name)) {
      size_t distance = edit_distance(name, alias);
      if (distance > std::max<size_t>(2, std::max(name.size(), alias.size()) / 3)) {
        const bool is_part = name.size() >= 3 && alias.find(name) != alias.npos;
        distance = is_part ? 1000 + alias.size() : SIZE_MAX;
      }
      best = std::min(best, distance);
    }
    if (best != SIZE_MAX && entry.is_complete && entry.damage.empty()) scored.emplace_back(best, entry.model.name);
  }
  std::sort(scored.begin(), scored.end());
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min<size_t>(scored.size(), 3); ++i) names.push_back(scored[i].second);
  return names;
}

Removed Store::remove(const std::string& name) {
  std::vector<std::string> ignored;
  std::error_code failure;
  require_folder();
  if (!fs::exists(folder_, failure))
    throw Error(ErrorCode::kBadInput,
                fmt::format("there is no model {}: the store {} is not there", quote(name), folder_));
  const OpenFile locked = lock();
  // A name may have both a complete model and an unfinished pull of a newer one.
  const std::vector<StoreEntry> all = entries(ignored);
  std::vector<const StoreEntry*> fitting = meant(all, name);
  std::set<std::string> names;
  std::erase_if(fitting, [&](const StoreEntry* entry) { return !names.insert(entry->model.name).second; });
  const StoreEntry* entry = the_one(fitting, name);
  if (entry == nullptr) {
    const std::vector<std::string> alike = near(name);
    throw Error(ErrorCode::kBadInput, fmt::format("there is no model {}{}", quote(name),
                                                  alike.empty() ? "; 'beryl list' tells what there is"
                                                                : fmt::format("; near: {}", fmt::join(alike, ", "))));
  }
  Removed removed{entry->model.name, 0};
  make_folders(folder_ + "/incomplete");
  const std::optional<OpenFile> claimed = claim(removed.name);
  if (!claimed) throw Error(ErrorCode::kBadInput, fmt::format("{} is being fetched right now", quote(removed.name)));
  // In one step, as others see it; collect() takes what a kill leaves of the second.
  const std::string place = model_folder(removed.name);
  const std::string beside = fmt::format("{}/models/.{}-{}", folder_, ::getpid(), encoded(removed.name));
  fs::remove_all(beside, failure);  // of a run that was killed, and had this number
  if (::rename(place.c_str(), beside.c_str()) != 0 && errno != ENOENT) fail_io(place, "cannot remove", errno);
  if (!fs::remove_all(beside, failure) && failure) fail_io(beside, "cannot remove", failure.value());
  ::unlink(incomplete_path(removed.name, ".json").c_str());
  removed.freed_bytes = collect();
  remove_claim(removed.name);
  return removed;
}

int64_t Store::collect() {
  std::vector<std::string> damaged;
  std::set<std::string> used;
  for (const StoreEntry& entry : entries(damaged))
    for (const StoredFile& file : entry.model.files) {
      used.insert(file.sha256);
      if (!entry.is_complete) used.insert(file.partial_key);
    }
  // What a manifest that cannot be read means, nobody knows.
  if (!damaged.empty()) return 0;
  int64_t freed_bytes = 0;
  for (const std::string& name : names_in(folder_ + "/blobs")) {
    if (used.contains(name) || !is_hex(name, 64)) continue;
    const int64_t bytes = stored_bytes(blob_path(name));
    if (::unlink(blob_path(name).c_str()) == 0) freed_bytes += bytes;
  }
  for (const std::string& name : names_in(partial_folder())) {
    const size_t dot = name.rfind('.');
    if (!name.ends_with(".part") || used.contains(name.substr(0, dot))) continue;
    const int64_t bytes = stored_bytes(partial_folder() + "/" + name);
    if (std::optional<PartialFile> partial = PartialFile::open(partial_folder(), name.substr(0, dot))) {
      partial->discard();
      freed_bytes += bytes;
    }
  }
  // ".PID-NAME": of a run that was killed while it put a model there.
  for (const std::string& name : names_in(folder_ + "/models"))
    if (const int pid = name.starts_with('.') ? std::atoi(name.c_str() + 1) : 0;
        pid > 0 && ::kill(pid, 0) != 0 && errno == ESRCH) {
      std::error_code ignored;
      fs::remove_all(folder_ + "/models/" + name, ignored);
    }
  return freed_bytes;
}

std::optional<OpenFile> Store::claim(const std::string& name) {
  require_folder();
  make_folders(folder_ + "/incomplete");
  return open_locked(incomplete_path(name, ".lock"), /*waits=*/false);
}

void Store::remove_claim(const std::string& name) { ::unlink(incomplete_path(name, ".lock").c_str()); }

std::optional<StoredModel> Store::earlier(const std::string& name) const {
  for (const bool is_complete : {false, true}) {
    try {
      const std::string path = is_complete ? model_folder(name) + "/" + kManifest : incomplete_path(name, ".json");
      if (std::optional<StoredModel> model = read_manifest(path, name, is_complete)) return model;
    } catch (const Error&) {
      // Damaged: then it knew nothing.
    }
  }
  return std::nullopt;
}

void Store::plan(const StoredModel& model) {
  for (const char* part : {"/blobs", "/models", "/partial", "/incomplete"}) make_folders(folder_ + part);
  const OpenFile locked = lock();
  write_small_file(incomplete_path(model.name, ".json"), to_json(model));
}

bool Store::has_blob(const StoredFile& file) const {
  struct stat status = {};
  return !file.sha256.empty() && ::stat(blob_path(file.sha256).c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
         (file.bytes < 0 || status.st_size == file.bytes);
}

int64_t Store::blob_bytes(const StoredFile& file) const {
  struct stat status = {};
  if (::stat(blob_path(file.sha256).c_str(), &status) != 0) fail_io(blob_path(file.sha256), "cannot look at", errno);
  return status.st_size;
}

OpenFile Store::open_blob(const StoredFile& file) const {
  OpenFile blob(::open(blob_path(file.sha256).c_str(), O_RDONLY | O_CLOEXEC));
  if (blob.get() < 0) fail_io(blob_path(file.sha256), "cannot open", errno);
  return blob;
}

void Store::remove_blob(const StoredFile& file) { ::unlink(blob_path(file.sha256).c_str()); }

void Store::add_blob(const StoredModel& model, PartialFile& partial, const StoredFile& file) {
  const OpenFile locked = lock();
  write_small_file(incomplete_path(model.name, ".json"), to_json(model));  // before there is a blob that nobody means
  partial.move_to(blob_path(file.sha256));
}

void Store::finish(StoredModel model, const std::function<std::string(const std::string& path)>& check) {
  const std::string place = model_folder(model.name);
  const std::string beside = fmt::format("{}/models/.{}-{}", folder_, ::getpid(), encoded(model.name));
  std::error_code failure;
  try {
    fs::remove_all(beside, failure);
    make_folders(beside);
    for (const StoredFile& file : model.files) {
      const std::string link = beside + "/" + file.name;
      if (::symlink(("../../blobs/" + file.sha256).c_str(), link.c_str()) != 0) fail_io(link, "cannot link", errno);
    }
    model.format = check(model.is_folder ? beside : beside + "/" + model.files.front().name);
    const OpenFile locked = lock();
    write_small_file(beside + "/" + kManifest, to_json(model));
    // An old one goes in the same step.
    if (::renameat2(AT_FDCWD, beside.c_str(), AT_FDCWD, place.c_str(), RENAME_EXCHANGE) == 0) {
      fs::remove_all(beside, failure);
    } else {
      fs::remove_all(place, failure);
      if (::rename(beside.c_str(), place.c_str()) != 0) fail_io(place, "cannot put the model there", errno);
    }
    ::unlink(incomplete_path(model.name, ".json").c_str());
    collect();
    remove_claim(model.name);
  } catch (...) {
    fs::remove_all(beside, failure);
    throw;
  }
}

void Store::abandon(const StoredModel& model) {
  const OpenFile locked = lock();
  ::unlink(incomplete_path(model.name, ".json").c_str());
  collect();
  remove_claim(model.name);
}

}  // namespace beryl
