// Small jobs with files that the store needs in several places. All throw Error(kIo) that names the path.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace beryl {

// A file descriptor that closes itself, and with it lets go of its lock.
class OpenFile {
 public:
  explicit OpenFile(int fd = -1) : fd_(fd) {}
  OpenFile(OpenFile&& other) noexcept : fd_(other.release()) {}
  OpenFile& operator=(OpenFile&& other) noexcept;
  ~OpenFile();
  int get() const { return fd_; }
  int release();

 private:
  int fd_;
};

void make_folders(const std::string& path);   // and those above it
// The text of a file; empty: there is none. A file larger than `most_bytes` is an error.
std::optional<std::string> read_small_file(const std::string& path, size_t most_bytes);
// Appears whole or not at all, and is on the disk when this returns.
void write_small_file(const std::string& path, std::string_view text);

// Opens or makes the file at `path` and locks it; what is returned is locked and still lies there (it may be renamed or
// removed by whoever has the lock). Empty: another process holds the lock, and `waits` was not set.
std::optional<OpenFile> open_locked(const std::string& path, bool waits);

// Of the file system that `path` lies in, or that the nearest folder above it does.
int64_t free_bytes(const std::string& path);

[[noreturn]] void fail_io(const std::string& path, std::string_view what, int error);

}  // namespace beryl
