#include "store/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {

namespace fs = std::filesystem;

OpenFile& OpenFile::operator=(OpenFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

OpenFile::~OpenFile() {
  if (fd_ >= 0) ::close(fd_);
}

int OpenFile::release() { return std::exchange(fd_, -1); }

void fail_io(const std::string& path, std::string_view what, int error) {
  throw Error(ErrorCode::kIo, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

void make_folders(const std::string& path) {
  std::error_code failure;
  fs::create_directories(path, failure);
  if (failure) fail_io(path, "cannot make the folder", failure.value());
}

std::optional<std::string> read_small_file(const std::string& path, size_t most_bytes) {
  const OpenFile file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0 && (errno == ENOENT || errno == ENOTDIR)) return std::nullopt;
  if (file.get() < 0) fail_io(path, "cannot open", errno);
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io(path, "cannot read", errno);
    if (n == 0) return text;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > most_bytes)
      throw Error(ErrorCode::kBadInput, fmt::format("{}: is larger than {} bytes", path, most_bytes));
  }
}

void write_small_file(const std::string& path, std::string_view text) {
  const std::string beside = fmt::format("{}.new-{}", path, ::getpid());
  {
    const OpenFile file(::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file.get() < 0) fail_io(beside, "cannot create", errno);
    while (!text.empty()) {
      const ssize_t n = ::write(file.get(), text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        const int error = errno;
        ::unlink(beside.c_str());
        fail_io(path, "cannot write", error);
      }
      text.remove_prefix(static_cast<size_t>(n));
    }
    if (::fsync(file.get()) != 0 && errno != EINVAL) fail_io(path, "cannot write", errno);
  }
  if (::rename(beside.c_str(), path.c_str()) != 0) fail_io(path, "cannot replace", errno);
}

std::optional<OpenFile> open_locked(const std::string& path, bool waits) {
  for (;;) {
    OpenFile file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (file.get() < 0) fail_io(path, "cannot open", errno);
    while (::flock(file.get(), waits ? LOCK_EX : LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) return std::nullopt;
      if (errno != EINTR) fail_io(path, "cannot lock", errno);
    }
    struct stat held = {}, named = {};
    if (::fstat(file.get(), &held) != 0) fail_io(path, "cannot look at it", errno);
    if (::stat(path.c_str(), &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev) return file;
  }
}

int64_t free_bytes(const std::string& path) {
  fs::path place = path;
  struct statvfs status = {};
  while (::statvfs(place.c_str(), &status) != 0) {
    if (errno != ENOENT || !place.has_relative_path()) fail_io(path, "cannot tell the free space", errno);
    place = place.has_filename() ? place.parent_path() : place.parent_path().parent_path();
    if (place.empty()) place = ".";
  }
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

}  // namespace beryl
