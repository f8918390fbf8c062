// A folder that appears whole or not at all: it is filled under another name beside its place, then renamed.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace beryl {

class NewFolder {
 public:
  // Makes PATH.partial-PID. An existing PATH is an Error(kBadInput), unless `replaces` is set and it is a folder that
  // holds nothing but files of these names; whatever else lies there was put there by somebody who may want it.
  // Throws Error(kIo) when the folder cannot be made.
  NewFolder(const std::string& path, bool replaces, std::span<const std::string_view> own_names);
  ~NewFolder();   // removes the partial folder unless commit() has run
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  // Its name; messages use this one.
  const std::string& path() const { return path_; }
  // Where to put its files until commit().
  const std::string& partial_path() const { return partial_path_; }

  // A file of the folder, synced to the disk. Throw Error(kIo).
  void write_file(std::string_view name, std::string_view bytes);
  void copy_file(std::string_view name, const std::string& from);

  // Syncs the folder and renames it; an old one is removed. Throws Error(kIo); then the old one is still there.
  void commit();

 private:
  std::string path_, partial_path_;
  bool old_is_there_ = false;
  bool committed_ = false;
};

}  // namespace beryl
