// The models that `beryl pull` has fetched: a folder of blobs named by their SHA-256, and names that mean some of them.
//
//   blobs/SHA256             a file's content, read-only; two models that share a file share its blob
//   models/NAME/             the model as it was published: links to blobs under the files' own names, and a manifest.
//                            What is opened is such a link, or the folder
//   incomplete/NAME.json     what a pull is after; it outlives the pull, so that the next one goes on. NAME.lock: one
//                            is at work
//   partial/                 files on their way (partial_file.h)
//   lock                     held while names change and while unused blobs are looked for
//
// A blob stays as long as some model or some unfinished pull means it; what is running has its files open and does not
// mind. Any number of processes may use a store at once. Everything here throws Error(kIo or kBadInput).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "store/files.h"
#include "store/partial_file.h"

namespace beryl {

struct StoredFile {
  std::string name;         // in the model's folder
  int64_t bytes = -1;       // -1: not known yet
  std::string sha256;       // empty: not known yet
  std::string git_sha1;     // what the hub knows a small file by
  std::string partial_key;  // of the partial file
};

struct StoredModel {
  std::string name;
  std::string source;      // hf:OWNER/REPO or an address
  std::string format;      // "gguf q4_k", "safetensors bf16"
  bool is_folder = false;  // what is opened: the folder, or its first file
  std::vector<StoredFile> files;

  int64_t bytes() const;
  std::string digest() const;  // of one file: its own; of several: of the list of theirs
};

struct StoreEntry {
  StoredModel model;
  bool is_complete = true;
  int64_t fetched_bytes = 0;
  bool is_under_way = false;  // a pull is at it right now
  std::string damage = {};    // of a complete one: what is wrong, as a sentence; empty: nothing
};

struct Removed {
  std::string name;
  int64_t freed_bytes = 0;
};

class Store {
 public:
  // $BERYL_STORE, else $XDG_DATA_HOME/beryl, else ~/.local/share/beryl.
  static std::string default_folder();
  explicit Store(std::string folder) : folder_(std::move(folder)) {}  // touches nothing

  const std::string& folder() const { return folder_; }
  // By name; what a damaged manifest keeps from being listed is told in `warnings`. Throws Error(kIo): what should be
  // the store is no folder, or may not be looked into. No store at all is one without models.
  std::vector<StoreEntry> list(std::vector<std::string>& warnings) const;

  // The complete model of this name, or the only one that the name is a part of: OWNER/REPO:TAG is also REPO:TAG,
  // OWNER/REPO and REPO. Throws Error(kBadInput) when several fit, or the one that fits is damaged.
  std::optional<StoredModel> find(const std::string& name) const;
  std::string path_of(const StoredModel& model) const;
  // Names like this one, the nearest first, three at most.
  std::vector<std::string> near(const std::string& name) const;

  // Removes a name, complete or not, and what no other name uses. Throws Error(kBadInput): there is none, or it is
  // being fetched right now.
  Removed remove(const std::string& name);

  // ---- for pulls ----

  // Of two pulls of one name the second waits. Empty: another has it.
  std::optional<OpenFile> claim(const std::string& name);
  // What an earlier pull of this name knew, finished or not.
  std::optional<StoredModel> earlier(const std::string& name) const;
  void plan(const StoredModel& model);  // from now on its blobs and partial files stay
  bool has_blob(const StoredFile& file) const;
  std::string partial_folder() const { return folder_ + "/partial"; }
  // Of a blob that is there. Throws Error(kIo).
  int64_t blob_bytes(const StoredFile& file) const;
  // Opens the blob to be read. Throws Error(kIo).
  OpenFile open_blob(const StoredFile& file) const;
  void remove_blob(const StoredFile& file);  // it is damaged
  // The partial file becomes the blob that files[index].sha256 says.
  void add_blob(const StoredModel& model, PartialFile& partial, const StoredFile& file);
  // All blobs are there: the name means them. check(path) is called with the model as it will be opened, and may throw.
  void finish(StoredModel model, const std::function<std::string(const std::string& path)>& check);
  // Forgets an unfinished pull, and what only it uses.
  void abandon(const StoredModel& model);

 private:
  std::string model_folder(const std::string& name) const;
  std::string incomplete_path(const std::string& name, const char* ending) const;
  std::string blob_path(const std::string& sha256) const { return folder_ + "/blobs/" + sha256; }
  // The damaged ones too, of which no more than the name may be known; they are counted and told in `damaged`.
  std::vector<StoreEntry> entries(std::vector<std::string>& damaged) const;
  // What of a complete model is not as it was fetched; empty: nothing that its files' sizes would tell.
  std::string damage_of(const StoredModel& model) const;
  void require_folder() const;
  bool is_claimed(const std::string& name) const;
  OpenFile lock() const;
  int64_t collect();  // with the lock held; bytes that are free now
  void remove_claim(const std::string& name);

  std::string folder_;
};

// Letters, digits and ._:/@+-, at most 160 of them, the first a letter or a digit.
bool is_model_name(const std::string& name);

}  // namespace beryl
