// What: a mapped file shows the file's bytes; what cannot be mapped is one line that names it.
#include "base/mapped_file.h"

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

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
}

}  // namespace
}  // namespace beryl
