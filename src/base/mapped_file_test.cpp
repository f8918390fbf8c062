// What: a mapped file shows the file's bytes; what cannot be mapped is one line that names it.
#include "base/mapped_file.h"

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace beryl {
namespace {

class MappedFileTest : public testing::Test {
 protected:
  MappedFileTest() {
    std::string pattern = std::filesystem::path(testing::TempDir()) / "beryl-mapped-file-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());   // its own: a run that was killed leaves its files behind
  }
  ~MappedFileTest() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& bytes) {
    const std::string path = folder_ / name;
    std::FILE* file = std::fopen(path.c_str(), "wb");
    EXPECT_EQ(std::fwrite(bytes.data(), 1, bytes.size(), file), bytes.size());
    std::fclose(file);
    return path;
  }
  static std::string error_of(const std::string& path) {
    try {
      const MappedFile file(path);
    } catch (const Error& error) {
      EXPECT_EQ(error.code, ErrorCode::kIo);
      return error.what();
    }
    return "";
  }

  std::filesystem::path folder_;
};

TEST_F(MappedFileTest, ShowsTheBytes) {
  std::string bytes(10000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 % 251);
  const MappedFile file(write("bytes", bytes));
  ASSERT_EQ(file.bytes().size(), bytes.size());
  EXPECT_EQ(std::memcmp(file.bytes().data(), bytes.data(), bytes.size()), 0);
  EXPECT_EQ(file.path(), folder_ / "bytes");
}

TEST_F(MappedFileTest, StaysReadableAfterTheNameIsGone) {
  const std::string path = write("bytes", "beryl");
  const MappedFile file(path);
  std::filesystem::remove(path);
  EXPECT_EQ(std::memcmp(file.bytes().data(), "beryl", 5), 0);
}

TEST_F(MappedFileTest, AnEmptyFileHasNoBytes) { EXPECT_TRUE(MappedFile(write("empty", "")).bytes().empty()); }

TEST_F(MappedFileTest, WhatCannotBeMappedIsNamed) {
  const std::string missing = folder_ / "missing";
  EXPECT_EQ(error_of(missing), missing + ": cannot open: No such file or directory");
  EXPECT_EQ(error_of(folder_), folder_.string() + ": not a regular file");
  EXPECT_EQ(error_of("/dev/null"), "/dev/null: not a regular file");
}

// Opening one in the ordinary way waits until somebody writes to it: without the fix this test never ends.
TEST_F(MappedFileTest, AFifoIsRefusedAtOnce) {
  const std::string fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_EQ(error_of(fifo), fifo + ": not a regular file");
}

TEST_F(MappedFileTest, ReleasedPagesComeBackAndOtherMemoryIsLeftAlone) {
  std::string bytes(100000, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 % 251);
  const MappedFile file(write("bytes", bytes));
  release_mapped_pages(file.bytes());
  release_mapped_pages(file.bytes().subspan(5000, 20000));
  EXPECT_EQ(std::memcmp(file.bytes().data(), bytes.data(), bytes.size()), 0);
  std::string other = bytes;
  release_mapped_pages(std::as_bytes(std::span(other)));
  release_mapped_pages({});
  EXPECT_EQ(other, bytes);
  release_all_mapped_pages();
  EXPECT_EQ(std::memcmp(file.bytes().data(), bytes.data(), bytes.size()), 0);
  EXPECT_EQ(other, bytes);
}

// How many KB of the mapping at this address are resident, by /proc/self/smaps.
int64_t resident_kb(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  const std::string begin = fmt::format("{:x}-", reinterpret_cast<uintptr_t>(address));
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(begin)) found = true;
    if (found && line.starts_with("Rss:")) return std::atoll(line.c_str() + 4);
  }
  return -1;
}

TEST_F(MappedFileTest, ReadingWithoutMappingLeavesNoPageResident) {
  std::string bytes(3 << 20, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 % 251);
  const MappedFile file(write("bytes", bytes));
  EXPECT_EQ(resident_kb(file.bytes().data()), 0);
  std::string read(1000, '\0');
  for (size_t at = 0; at < bytes.size() - read.size(); at += 100'003) {
    read_without_mapping(file.bytes().subspan(at, read.size()), reinterpret_cast<std::byte*>(read.data()));
    ASSERT_EQ(read, bytes.substr(at, read.size())) << at;
  }
  EXPECT_EQ(resident_kb(file.bytes().data()), 0);
  EXPECT_EQ(static_cast<char>(file.bytes()[1]), bytes[1]);
  EXPECT_GT(resident_kb(file.bytes().data()), 0) << "what the test measures";
  release_all_mapped_pages();
  EXPECT_EQ(resident_kb(file.bytes().data()), 0);

  const std::string other = "not in a file";
  read_without_mapping(std::as_bytes(std::span(other)), reinterpret_cast<std::byte*>(read.data()));
  EXPECT_EQ(read.substr(0, other.size()), other);
  read_without_mapping({}, nullptr);
}

TEST_F(MappedFileTest, AFileThatBecameShorterIsAnError) {
  const std::string path = write("bytes", std::string(20'000, 'x'));
  const MappedFile file(path);
  std::filesystem::resize_file(path, 10'000);
  std::vector<std::byte> to(6'000);
  try {
    read_without_mapping(file.bytes().subspan(5'000, 6'000), to.data());
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code, ErrorCode::kIo);
    EXPECT_NE(std::string(error.what()).find("shorter"), std::string::npos) << error.what();
  }
  read_without_mapping(file.bytes().subspan(4'000, 6'000), to.data());
}

}  // namespace
}  // namespace beryl
