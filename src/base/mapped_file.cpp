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

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {

namespace {

std::mutex living_mutex;

// Begin and bytes of each mapping. Made at first use and never destroyed, since files may live as long as the process.
std::map<const std::byte*, size_t>& living_files() {
  static auto* const files = new std::map<const std::byte*, size_t>;
  return *files;
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
    ::close(fd);
    if (address == MAP_FAILED)
      throw Error(ErrorCode::kIo, fmt::format("{}: cannot map {} bytes: {}", path, size_, std::strerror(map_errno)));
    data_ = static_cast<const std::byte*>(address);
    const std::lock_guard lock(living_mutex);
    living_files().emplace(data_, size_);
  } else {
    ::close(fd);
  }
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  const std::lock_guard lock(living_mutex);
  living_files().erase(data_);
  ::munmap(const_cast<std::byte*>(data_), size_);
}

void release_mapped_pages(std::span<const std::byte> bytes) {
  const std::lock_guard lock(living_mutex);
  auto file = living_files().upper_bound(bytes.data());
  if (file == living_files().begin()) return;
  --file;
  if (bytes.data() + bytes.size() > file->first + file->second) return;
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(bytes.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(bytes.data()) + bytes.size()) / page * page;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);  // only advice: may fail
}

}  // namespace beryl
