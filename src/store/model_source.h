// Where a model comes from, and which files of a hub's repository make it up. Names, listings and indexes come from
// other people's machines: nothing here is believed further than it is checked, and nothing touches network or disk.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace beryl {

// hf:OWNER/REPO[@REVISION][:FILE or QUANT], or an address.
struct ModelSource {
  bool is_hub = false;
  std::string owner, repository, revision = "main";
  std::string wanted;            // a file, or an ending of a file's name ("Q4_K_M"); empty: the hub's choice is ours
  std::string url;               // of an address

  std::string repository_path() const { return owner + "/" + repository; }
};

// hub: the endpoint, https://huggingface.co. An address of a file there is the same as its hf: form. Throws
// Error(kBadInput), saying what was expected.
ModelSource parse_source(const std::string& text, const std::string& hub);

struct HubFile {
  std::string path;              // in the repository
  int64_t bytes = 0;
  std::string sha256;            // of large files
  std::string git_sha1;          // of small ones, as git counts it
};

struct HubListing {
  std::string commit;            // 40 hex digits; empty: not told
  std::vector<HubFile> files;
};

// The answer to /api/models/OWNER/REPO/revision/REVISION?blobs=true. Files whose names could lead out of a folder are
// left out. Throws Error(kBadInput).
HubListing parse_listing(const std::string& name, std::string_view json);

struct Selection {
  std::vector<HubFile> files;    // the parts of one GGUF file in order, or of a folder
  bool is_folder = false;
  std::string tag;               // what tells this GGUF file from the repository's others: "Q4_K_M", or its name
  std::vector<std::string> others;   // tags that were not taken though nothing asked for this one
};

inline constexpr std::string_view kShardIndex = "model.safetensors.index.json";

// The index names the shards of a folder; it is asked for when needs_index() says so.
bool needs_index(const ModelSource& source, const HubListing& listing);
std::set<std::string> shards_of_index(const std::string& name, std::string_view json);   // throws Error(kBadInput)

// Throws Error(kBadInput) when nothing or more than one thing fits, and says what there is.
Selection select_files(const ModelSource& source, const HubListing& listing, const std::set<std::string>& shards);

// "model-00001-of-00003.gguf": {"model", 1, 3}.
struct SplitName {
  std::string stem;
  int number = 0, count = 0;
};
std::optional<SplitName> split_name(std::string_view path);
std::string split_part(const SplitName& split, int number);   // the file's name of this part

std::string last_part(std::string_view path);   // behind the last slash
// The quantisation that a GGUF file's name ends with, "Q4_K_M", as it is written there; empty: none that is known.
std::string quant_tag(std::string_view file_name);

}  // namespace beryl
