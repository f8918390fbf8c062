#include "base/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"

namespace beryl {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void io_error(const std::string& path, std::string_view what, int error) {
  throw Error(ErrorCode::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

// Without slashes at the end, and a link's target where there is one, so that the name can be replaced. "." and "..",
// too, become names.
std::string plain_path(const std::string& path) {
  std::error_code failure;
  fs::path plain = fs::weakly_canonical(path, failure);
  if (failure) plain = path;
  if (!plain.has_filename()) plain = plain.parent_path();
  return plain.string();
}

// Best effort where a file system cannot sync folders.
void sync_folder(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

NewFolder::NewFolder(const std::string& path, bool replaces, std::span<const std::string_view> own_names)
    : path_(plain_path(path)), partial_path_(fmt::format("{}.partial-{}", path_, ::getpid())) {
  std::error_code failure;
  const fs::file_status status = fs::symlink_status(path_, failure);
  if (status.type() != fs::file_type::not_found) {
    if (failure) io_error(path, "cannot look at it", failure.value());
    if (status.type() != fs::file_type::directory)
      throw Error(ErrorCode::kBadInput, fmt::format("{}: is there and no folder; a folder is written", path));
    if (!replaces) throw Error(ErrorCode::kBadInput, fmt::format("{}: is there already; --force replaces it", path));
    fs::directory_iterator entry(path_, failure);
    for (; !failure && entry != fs::directory_iterator(); entry.increment(failure)) {
      const std::string name = entry->path().filename().string();
      const bool is_own = std::find(own_names.begin(), own_names.end(), name) != own_names.end();
      if (!is_own || fs::is_directory(entry->symlink_status()))
        throw Error(ErrorCode::kBadInput,
                    fmt::format("{}: holds '{}', which is no file of a model that beryl wrote; remove it first", path,
                                name));
    }
    if (failure) io_error(path, "cannot list it", failure.value());
    old_is_there_ = true;
  }
  if (::mkdir(partial_path_.c_str(), 0777) != 0) io_error(path, "cannot create", errno);
}

NewFolder::~NewFolder() {
  if (committed_) return;
  std::error_code ignored;
  fs::remove_all(partial_path_, ignored);
}

void NewFolder::write_file(std::string_view name, std::string_view bytes) {
  const std::string path = fmt::format("{}/{}", path_, name);   // as it will be called
  const int fd = ::open(fmt::format("{}/{}", partial_path_, name).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) io_error(path, "cannot create", errno);
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const int error = errno;
      ::close(fd);
      io_error(path, "cannot write", error);
    }
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  if (error != 0) io_error(path, "cannot sync", error);
}

void NewFolder::copy_file(std::string_view name, const std::string& from) {
  const MappedFile source(from);
  write_file(name, {reinterpret_cast<const char*>(source.bytes().data()), source.bytes().size()});
}

void NewFolder::commit() {
  sync_folder(partial_path_);
  const std::string old_path = fmt::format("{}.old-{}", path_, ::getpid());
  if (old_is_there_ && ::rename(path_.c_str(), old_path.c_str()) != 0) io_error(path_, "cannot rename", errno);
  if (::rename(partial_path_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    if (old_is_there_) ::rename(old_path.c_str(), path_.c_str());
    io_error(path_, "cannot be given its name", error);
  }
  committed_ = true;
  sync_folder(fs::path(path_).parent_path().string());
  std::error_code ignored;
  if (old_is_there_) fs::remove_all(old_path, ignored);
}

}  // namespace beryl
