#include "base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {

namespace {

std::mutex living_mutex;

struct LivingFile {
  size_t n_bytes = 0;
  int fd = -1;
};
// By where each mapping begins. Made at first use and never destroyed, since files may live as long as the process.
std::map<const std::byte*, LivingFile>& living_files() {
  static auto* const files = new std::map<const std::byte*, LivingFile>;
  return *files;
}

// The file in which `bytes` lie, or null. Requires the lock.
const std::pair<const std::byte* const, LivingFile>* file_of(std::span<const std::byte> bytes) {
  auto file = living_files().upper_bound(bytes.data());
  if (file == living_files().begin()) return nullptr;
  --file;
  return bytes.data() + bytes.size() > file->first + file->second.n_bytes ? nullptr : &*file;
}

// Those that lie within `bytes`, of a mapping.
void release_whole_pages(std::span<const std::byte> bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // only advice: may fail
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a FIFO would otherwise wait for a writer, for ever. It changes nothing for regular files.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) throw Error(ErrorCode::kIo, fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    throw Error(ErrorCode::kIo, fmt::format("{}: not a regular file", path));
  }
  size_ = static_cast<size_t>(status.st_size);
  if (size_ > 0) {
    void* address = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    const int map_errno = errno;
    if (address == MAP_FAILED) {
      ::close(fd);
      throw Error(ErrorCode::kIo, fmt::format("{}: cannot map {} bytes: {}", path, size_, std::strerror(map_errno)));
    }
    data_ = static_cast<const std::byte*>(address);
    const std::lock_guard lock(living_mutex);
    living_files()[data_] = {size_, fd};
  } else {
    ::close(fd);
  }
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  const std::lock_guard lock(living_mutex);
  const auto file = living_files().find(data_);
  ::close(file->second.fd);
  living_files().erase(file);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

void release_mapped_pages(std::span<const std::byte> bytes) {
  const std::lock_guard lock(living_mutex);
  if (file_of(bytes) == nullptr) return;
  release_whole_pages(bytes);
}

void read_without_mapping(std::span<const std::byte> bytes, std::byte* to) {
  int fd = -1;
  off_t offset = 0;
  {
    const std::lock_guard lock(living_mutex);
    if (const auto* const file = file_of(bytes)) {
      fd = file->second.fd;
      offset = bytes.data() - file->first;
    }
  }
  if (fd < 0) {
    std::memcpy(to, bytes.data(), bytes.size());
    return;
  }
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::pread(fd, to + done, bytes.size() - done, offset + static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw Error(ErrorCode::kIo, n == 0 ? "a model's file has become shorter while it was in use"
                                         : fmt::format("cannot read a model's file any more: {}", std::strerror(errno)));
    done += static_cast<size_t>(n);
  }
}

void release_all_mapped_pages() {
  const std::lock_guard lock(living_mutex);
  for (const auto& [begin, file] : living_files()) release_whole_pages({begin, file.n_bytes});
}

}  // namespace beryl
