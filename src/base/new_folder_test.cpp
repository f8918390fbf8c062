// What: a new folder appears whole or not at all, and replaces only what may be replaced.
// How:  folders are made, left half done and committed over every kind of thing that can lie in their place.
#include "base/new_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include <gtest/gtest.h>

#include "base/error.h"

namespace beryl {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOwn[] = {"a", "b"};

class NewFolderTest : public testing::Test {
 protected:
  NewFolderTest() {
    std::string pattern = (fs::temp_directory_path() / "beryl-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    root_ = pattern;
  }
  ~NewFolderTest() override {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }

  static void put(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }
  static std::string text_of(const fs::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::set<std::string> names() const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(root_)) found.insert(entry.path().filename().string());
    return found;
  }
  static std::string refusal(const fs::path& path, bool replaces) {
    try {
      NewFolder folder(path.string(), replaces, kOwn);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  fs::path root_;
};

TEST_F(NewFolderTest, AppearsWhenItIsComplete) {
  for (const char* name : {"out", "slash/"}) {
    const fs::path path = root_ / name;
    NewFolder folder(path.string(), false, kOwn);
    put(root_ / "source", std::string(100000, 'x'));
    folder.write_file("a", "text");
    folder.copy_file("b", (root_ / "source").string());
    EXPECT_FALSE(fs::exists(path));
    folder.commit();
    EXPECT_EQ(text_of(path / "a"), "text");
    EXPECT_EQ(text_of(path / "b"), std::string(100000, 'x'));
  }
  EXPECT_EQ(names(), (std::set<std::string>{"out", "slash", "source"}));
}

TEST_F(NewFolderTest, LeavesNothingWithoutCommit) {
  {
    NewFolder folder((root_ / "out").string(), false, kOwn);
    folder.write_file("a", "text");
    put(fs::path(folder.partial_path()) / "other", "written past it");
    EXPECT_THROW(folder.write_file("a", "twice"), Error);
    EXPECT_THROW(folder.copy_file("b", (root_ / "absent").string()), Error);
  }
  EXPECT_TRUE(names().empty());
}

TEST_F(NewFolderTest, ReplacesOnlyFoldersOfItsOwnFiles) {
  const fs::path path = root_ / "out";
  put(path, "a file");
  EXPECT_NE(refusal(path, true).find("no folder"), std::string::npos);
  fs::remove(path);
  EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_NE(refusal(path, true).find("no folder"), std::string::npos);
  fs::remove(path);

  fs::create_directory(path);
  EXPECT_NE(refusal(path, false).find("--force"), std::string::npos);
  put(path / "a", "old");
  put(path / "mine", "precious");
  EXPECT_NE(refusal(path, true).find("'mine'"), std::string::npos);
  fs::remove(path / "mine");
  fs::create_directory(path / "b");   // its own name, but not its own file
  EXPECT_NE(refusal(path, true).find("'b'"), std::string::npos);
  fs::remove(path / "b");
  EXPECT_EQ(text_of(path / "a"), "old");

  {
    NewFolder abandoned(path.string(), true, kOwn);
    abandoned.write_file("b", "new");
  }
  EXPECT_EQ(text_of(path / "a"), "old");
  NewFolder folder(path.string(), true, kOwn);
  folder.write_file("b", "new");
  folder.commit();
  EXPECT_FALSE(fs::exists(path / "a"));
  EXPECT_EQ(text_of(path / "b"), "new");
  EXPECT_EQ(names(), std::set<std::string>{"out"});
}

TEST_F(NewFolderTest, ALinkToAFolderStaysALink) {
  fs::create_directory(root_ / "real");
  fs::create_directory_symlink(root_ / "real", root_ / "link");
  NewFolder folder((root_ / "link").string(), true, kOwn);
  folder.write_file("a", "new");
  folder.commit();
  EXPECT_TRUE(fs::is_symlink(root_ / "link"));
  EXPECT_EQ(text_of(root_ / "real" / "a"), "new");
}

TEST_F(NewFolderTest, SaysWhereItCannotBeMade) {
  const std::string message = refusal(root_ / "no" / "such" / "out", false);
  EXPECT_NE(message.find("no/such/out: cannot create: "), std::string::npos) << message;
  EXPECT_NE(message.find("No such file"), std::string::npos) << message;
  put(root_ / "file", "");
  EXPECT_FALSE(refusal(root_ / "file" / "out", false).empty());
}

}  // namespace
}  // namespace beryl
