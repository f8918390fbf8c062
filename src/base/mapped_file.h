// A file mapped read-only into memory. Owns the mapping; spans into it are valid for the object's lifetime.
// Throws Error(kIo) when the file cannot be opened, is not a regular file, or cannot be mapped.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace beryl {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Gives the memory of those whole pages among `bytes` that belong to a living MappedFile back to the system; they come
// again from the file's cache when they are read. Bytes that lie elsewhere stay as they are.
void release_mapped_pages(std::span<const std::byte> bytes);

// The same of all living MappedFiles.
void release_all_mapped_pages();

// As std::memcpy; but what lies in a living MappedFile is read from the file, so that no page of it becomes resident: for a few bytes here
// and there (the system maps 64 KB or more around each byte that is touched). Throws Error(kIo) where the file no longer has them. Any
// thread.
void read_without_mapping(std::span<const std::byte> bytes, std::byte* to);

}  // namespace beryl
