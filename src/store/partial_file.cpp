#include "store/partial_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "store/files.h"

namespace beryl {
namespace {

constexpr auto kSaveEvery = std::chrono::seconds(2);   // what a crash or a kill may cost
constexpr size_t kMaxStateBytes = 1 << 20;

}  // namespace

std::optional<PartialFile> PartialFile::open(const std::string& folder, const std::string& key) {
  const std::string path = folder + "/" + key;
  std::optional<OpenFile> file = open_locked(path + ".part", /*waits=*/false);
  if (!file) return std::nullopt;
  PartialFile partial(path + ".part", path + ".json", file->release());
  partial.load();
  return partial;
}

int64_t PartialFile::saved_bytes(const std::string& folder, const std::string& key) {
  struct stat status = {};
  return ::stat(fmt::format("{}/{}.part", folder, key).c_str(), &status) == 0 ? int64_t{status.st_blocks} * 512 : 0;
}

PartialFile::PartialFile(PartialFile&& other) noexcept
    : path_(std::move(other.path_)),
      state_path_(std::move(other.state_path_)),
      fd_(std::exchange(other.fd_, -1)),
      have_(std::move(other.have_)),
      size_(other.size_),
      validator_(std::move(other.validator_)),
      saved_at_(other.saved_at_),
      is_gone_(other.is_gone_) {}

PartialFile::~PartialFile() {
  if (fd_ < 0) return;
  try {
    if (!is_gone_) save();
  } catch (const Error&) {
    // Then the next run knows of less. There is nothing else to do about it here.
  }
  ::close(fd_);
}

void PartialFile::load() {
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) fail_io(path_, "cannot look at it", errno);
  try {
    const std::optional<std::string> text = read_small_file(state_path_, kMaxStateBytes);
    if (!text) {   // bytes that nothing is known of
      if (status.st_size > 0 && ::ftruncate(fd_, 0) != 0) fail_io(path_, "cannot write", errno);
      return;
    }
    const nlohmann::json state = nlohmann::json::parse(*text);
    RangeSet have;
    for (const auto& range : state.at("have"))
      if (const ByteRange bytes{range.at(0).get<int64_t>(), range.at(1).get<int64_t>()};
          bytes.begin >= 0 && bytes.end <= status.st_size)
        have.add(bytes);
    validator_ = state.at("validator").get<std::string>();
    if (!state.at("size").is_null()) size_ = state.at("size").get<int64_t>();
    have_ = std::move(have);
  } catch (const nlohmann::json::exception&) {   // damaged: as if nothing had been fetched
    restart(std::nullopt, "");
  }
}

void PartialFile::restart(std::optional<int64_t> size, std::string validator) {
  if (have_.bytes() > 0) {
    // In this order, so that no state ever tells of bytes that were another version's.
    ::unlink(state_path_.c_str());
    if (::ftruncate(fd_, 0) != 0) fail_io(path_, "cannot write", errno);
  }
  have_.clear();
  size_ = size;
  validator_ = std::move(validator);
}

void PartialFile::write(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_io(path_, "cannot write", errno);
    have_.add({offset, offset + n});
    offset += n;
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  if (std::chrono::steady_clock::now() - saved_at_ >= kSaveEvery) save();
}

void PartialFile::save() {
  if (::fdatasync(fd_) != 0 && errno != EINVAL) fail_io(path_, "cannot write", errno);
  nlohmann::json ranges = nlohmann::json::array();
  for (const auto& [begin, end] : have_.ends()) ranges.push_back({begin, end});
  const nlohmann::json state = {{"have", std::move(ranges)},
                                {"size", size_ ? nlohmann::json(*size_) : nlohmann::json()},
                                {"validator", validator_}};
  write_small_file(state_path_, state.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
  saved_at_ = std::chrono::steady_clock::now();
}

void PartialFile::move_to(const std::string& place) {
  // Exactly the file: an earlier version may have been longer.
  if (size_ && ::ftruncate(fd_, *size_) != 0) fail_io(path_, "cannot write", errno);
  if (::fsync(fd_) != 0 && errno != EINVAL) fail_io(path_, "cannot write", errno);
  ::fchmod(fd_, 0444);   // many names may mean it, so nobody should write to it
  if (::rename(path_.c_str(), place.c_str()) != 0) fail_io(place, "cannot put the file there", errno);
  ::unlink(state_path_.c_str());
  is_gone_ = true;
}

void PartialFile::discard() {
  ::unlink(state_path_.c_str());
  ::unlink(path_.c_str());
  is_gone_ = true;
}

}  // namespace beryl
