// A file on its way into the store: KEY.part holds its bytes, KEY.json says which of them are there and of what. Both
// outlive the process, so that the next run goes on. While an object lives it holds a lock on the file: of two processes
// that want the same one, the second waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "store/ranges.h"

namespace beryl {

class PartialFile {
 public:
  // Opens or makes FOLDER/KEY.part. Empty: another process has it. What the state says is believed only as far as the
  // file's length backs it. Throws Error(kIo).
  static std::optional<PartialFile> open(const std::string& folder, const std::string& key);

  // How much of it an earlier run has left there.
  static int64_t saved_bytes(const std::string& folder, const std::string& key);

  PartialFile(PartialFile&& other) noexcept;
  PartialFile& operator=(PartialFile&&) = delete;
  ~PartialFile();   // saves what is there, as far as that can be done

  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  const RangeSet& have() const { return have_; }
  // The whole file's size once a server has told it.
  std::optional<int64_t> size() const { return size_; }
  // The server's name of this version of the file (a strong ETag, or Last-Modified); empty: none.
  const std::string& validator() const { return validator_; }

  // Forgets all bytes: they are of another version.
  void restart(std::optional<int64_t> size, std::string validator);
  void set_size(int64_t size) { size_ = size; }

  // Bytes at an offset. Throws Error(kIo): a full disk, mostly.
  void write(int64_t offset, std::span<const std::byte> bytes);
  // Bytes to the disk, then the state. Throws Error(kIo).
  void save();

  // All bytes are there: to the disk, and to this place in the same file system. The object is done with then, but keeps
  // the lock. Throws Error(kIo).
  void move_to(const std::string& place);
  // Removes file and state: the bytes are wrong.
  void discard();

 private:
  PartialFile(std::string path, std::string state_path, int fd) : path_(std::move(path)), state_path_(std::move(state_path)), fd_(fd) {}
  void load();

  std::string path_, state_path_;
  int fd_ = -1;
  RangeSet have_;
  std::optional<int64_t> size_;
  std::string validator_;
  std::chrono::steady_clock::time_point saved_at_ = std::chrono::steady_clock::now();
  bool is_gone_ = false;   // moved or discarded
};

}  // namespace beryl
