#include "store/model_source.h"

#include <algorithm>
#include <cctype>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "store/digest.h"
#include "store/http.h"
#include "weights/json_text.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr std::string_view kHubPrefix = "hf:";
constexpr std::string_view kGguf = ".gguf";
constexpr int kMaxParts = 999;
constexpr int64_t kMaxFileBytes = int64_t{1} << 44;
// Files of a folder beside its weights: configuration, tokenizer, template.
constexpr int64_t kMaxSmallBytes = 256 << 20;
// Which of several quantisations is taken when nobody says.
constexpr std::string_view kFavourites[] = {"Q4_K_M", "Q4_0", "Q8_0"};

[[noreturn]] void bad(const std::string& message) { throw Error(ErrorCode::kBadInput, message); }

std::string upper(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return result;
}

bool is_repository_name(std::string_view name) {
  const auto is_good = [](unsigned char c) { return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.'; };
  return !name.empty() && name.size() <= 128 && name.front() != '.' && std::all_of(name.begin(), name.end(), is_good);
}

bool is_revision(std::string_view name) {
  const auto is_good = [](unsigned char c) { return std::isalnum(c) != 0 || std::string_view("-_./").find(static_cast<char>(c)) != std::string_view::npos; };
  return !name.empty() && name.size() <= 200 && name.find("..") == name.npos && std::all_of(name.begin(), name.end(), is_good);
}

// A relative path of plain names: nothing that leads elsewhere, hides, or steers a terminal.
bool is_plain_path(std::string_view path) {
  if (path.empty() || path.size() > 1000 || !is_utf8(path)) return false;
  for (const char c : path)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\') return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view name = path.substr(begin, end - begin);
    if (name.empty() || name.front() == '.' || name.size() > 200) return false;
    begin = end + 1;
  }
  return true;
}

bool ends_with_ignoring_case(std::string_view text, std::string_view ending) {
  return text.size() >= ending.size() && upper(text.substr(text.size() - ending.size())) == upper(ending);
}

// What is no model for text: image encoders, importance matrices.
bool is_side_file(const std::string& path) {
  const std::string name = upper(last_part(path));
  return name.starts_with("MMPROJ") || name.find("IMATRIX") != name.npos || name.find("-MMPROJ") != name.npos;
}

// GGUF files of a repository, the parts of a split one as one.
struct GgufSet {
  std::string stem;                  // path without ".gguf" and part number
  std::vector<HubFile> files;        // by part
  int n_parts = 1;
  std::string tag() const {
    const std::string quant = quant_tag(stem);
    return quant.empty() ? last_part(stem) + std::string(kGguf) : upper(quant);
  }
  bool is_whole() const { return static_cast<int>(files.size()) == n_parts; }
};

std::vector<GgufSet> gguf_sets(const HubListing& listing) {
  std::map<std::pair<std::string, int>, std::map<int, HubFile>> parts;   // stem and count -> parts
  for (const HubFile& file : listing.files) {
    if (!ends_with_ignoring_case(file.path, kGguf) || is_side_file(file.path)) continue;
    if (const auto split = split_name(file.path)) {
      parts[{split->stem, split->count}].emplace(split->number, file);
    } else {
      parts[{file.path.substr(0, file.path.size() - kGguf.size()), 1}].emplace(1, file);
    }
  }
  std::vector<GgufSet> sets;
  for (const auto& [key, files] : parts) {
    GgufSet set{key.first, {}, key.second};
    for (const auto& [number, file] : files) set.files.push_back(file);
    sets.push_back(std::move(set));
  }
  return sets;
}

// Is `wanted` this set's file, one of its parts, or what its name ends with?
bool is_named(const GgufSet& set, const std::string& wanted) {
  for (const HubFile& file : set.files)
    if (file.path == wanted || last_part(file.path) == wanted) return true;
  if (!ends_with_ignoring_case(set.stem, wanted)) return false;
  const size_t before = set.stem.size() - wanted.size();
  return before == 0 || std::string_view("-._/").find(set.stem[before - 1]) != std::string_view::npos;
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 12;
  if (names.size() <= kMost) return fmt::format("{}", fmt::join(names, ", "));
  return fmt::format("{}, and {} more", fmt::join(names.begin(), names.begin() + kMost, ", "), names.size() - kMost);
}

bool is_folder_model(const HubListing& listing) {
  bool has_config = false, has_weights = false;
  for (const HubFile& file : listing.files) {
    has_config |= file.path == "config.json";
    has_weights |= file.path == "model.safetensors" || file.path == kShardIndex;
  }
  return has_config && has_weights;
}

bool has_file(const HubListing& listing, std::string_view path) {
  return std::any_of(listing.files.begin(), listing.files.end(), [&](const HubFile& file) { return file.path == path; });
}

bool takes_folder(const ModelSource& source, const HubListing& listing) {
  return source.wanted.empty() && is_folder_model(listing);
}

// Configuration, tokenizer, chat template, and the weights that config.json belongs to.
Selection select_folder(const ModelSource& source, const HubListing& listing, const std::set<std::string>& shards) {
  Selection selection;
  selection.is_folder = true;
  const bool is_single = has_file(listing, "model.safetensors");
  std::set<std::string> missing = is_single ? std::set<std::string>{} : shards;
  for (const HubFile& file : listing.files) {
    if (file.path.find('/') != file.path.npos) continue;
    const bool is_weights = is_single ? file.path == "model.safetensors" : missing.erase(file.path) > 0;
    const bool is_index = file.path.ends_with(".index.json");
    const bool is_small = (file.path.ends_with(".json") && !is_index) || file.path.ends_with(".jinja") ||
                          file.path.ends_with(".model") || file.path == "merges.txt" || file.path == "vocab.txt";
    if (is_weights || (file.path == kShardIndex && !is_single) || (is_small && file.bytes <= kMaxSmallBytes))
      selection.files.push_back(file);
  }
  if (!missing.empty())
    bad(fmt::format("{}: its index names {}, which the repository does not have", source.repository_path(), quote(*missing.begin())));
  return selection;
}

}  // namespace

std::string last_part(std::string_view path) {
  const size_t slash = path.rfind('/');
  return std::string(slash == path.npos ? path : path.substr(slash + 1));
}

std::optional<SplitName> split_name(std::string_view path) {
  // STEM-00001-of-00003.gguf
  constexpr size_t kTail = sizeof("-00001-of-00003.gguf") - 1;
  if (path.size() <= kTail || !ends_with_ignoring_case(path, kGguf)) return std::nullopt;
  const std::string_view tail = path.substr(path.size() - kTail);
  const std::string_view number = tail.substr(1, 5), count = tail.substr(10, 5);
  const auto is_digits = [](std::string_view text) { return text.find_first_not_of("0123456789") == text.npos; };
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || !is_digits(number) || !is_digits(count)) return std::nullopt;
  SplitName split{std::string(path.substr(0, path.size() - kTail)), std::stoi(std::string(number)), std::stoi(std::string(count))};
  if (split.number < 1 || split.number > split.count || split.count > kMaxParts) return std::nullopt;
  return split;
}

std::string split_part(const SplitName& split, int number) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", split.stem, number, split.count);
}

std::string quant_tag(std::string_view file_name) {
  std::string name = last_part(file_name);
  if (const auto split = split_name(name)) name = split->stem;
  else if (ends_with_ignoring_case(name, kGguf)) name.resize(name.size() - kGguf.size());
  // The longest ending, behind a separator, that reads as a quantisation.
  const auto is_tag = [](std::string_view text) {
    std::string tag = upper(text);
    if (tag.starts_with("UD-")) tag = tag.substr(3);
    for (const std::string_view whole : {"BF16", "F16", "F32", "FP16", "FP32", "MXFP4", "MXFP4_MOE", "NVFP4"})
      if (tag == whole) return true;
    if (tag.starts_with("IQ") || tag.starts_with("TQ")) tag = tag.substr(1);
    if (tag.size() < 4 || tag[0] != 'Q' || std::isdigit(static_cast<unsigned char>(tag[1])) == 0 || tag[2] != '_') return false;
    return std::all_of(tag.begin() + 3, tag.end(), [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; });
  };
  for (size_t at = 0; at < name.size(); ++at)
    if ((at == 0 || std::string_view("-._").find(name[at - 1]) != std::string_view::npos) && is_tag(std::string_view(name).substr(at)))
      return name.substr(at);
  return "";
}

ModelSource parse_source(const std::string& text, const std::string& hub) {
  ModelSource source;
  if (text.starts_with("https://") || text.starts_with("http://")) {
    check_url(text);
    source.url = text;
    // OWNER/REPO/resolve/REVISION/FILE at the hub: its listing knows more of the file.
    const std::string shown = shown_url(text);
    if (origin_of(text) == origin_of(hub) && shown.starts_with(hub + "/")) {
      const std::string path = shown.substr(hub.size() + 1);
      std::vector<std::string> parts;
      for (size_t begin = 0; begin <= path.size() && parts.size() < 4;) {
        const size_t end = parts.size() < 4 ? std::min(path.find('/', begin), path.size()) : path.size();
        parts.push_back(path.substr(begin, end - begin));
        begin = end + 1;
      }
      const bool is_file = parts.size() == 4 && (parts[2] == "resolve" || parts[2] == "blob");
      if (is_file && is_repository_name(parts[0]) && is_repository_name(parts[1]) && is_revision(parts[3])) {
        const size_t head = parts[0].size() + parts[1].size() + parts[2].size() + parts[3].size() + 4;
        if (head < path.size() && path.find('%') == path.npos) {
          source.is_hub = true;
          source.owner = parts[0];
          source.repository = parts[1];
          source.revision = parts[3];
          source.wanted = path.substr(head);
        }
      }
    }
    if (!source.is_hub && !ends_with_ignoring_case(shown, kGguf))
      bad(fmt::format("{}: an address of a .gguf file was expected; a folder of safetensors comes as hf:OWNER/REPO", quote(shown, 200)));
    return source;
  }
  constexpr std::string_view kExpected = "expected hf:OWNER/REPO, hf:OWNER/REPO:QUANT, hf:OWNER/REPO:FILE or https://HOST/FILE.gguf";
  if (!text.starts_with(kHubPrefix)) bad(fmt::format("{}: {}", quote(text), kExpected));
  std::string rest = text.substr(kHubPrefix.size());
  source.is_hub = true;
  if (const size_t colon = rest.find(':'); colon != rest.npos) {
    source.wanted = rest.substr(colon + 1);
    rest.resize(colon);
    if (!is_plain_path(source.wanted)) bad(fmt::format("{}: {} names no file or quantisation, {}", quote(text), quote(source.wanted), kExpected));
  }
  if (const size_t at = rest.find('@'); at != rest.npos) {
    source.revision = rest.substr(at + 1);
    rest.resize(at);
    if (!is_revision(source.revision)) bad(fmt::format("{}: {} names no revision", quote(text), quote(source.revision)));
  }
  const size_t slash = rest.find('/');
  if (slash == rest.npos || !is_repository_name(rest.substr(0, slash)) || !is_repository_name(rest.substr(slash + 1)))
    bad(fmt::format("{}: {}", quote(text), kExpected));
  source.owner = rest.substr(0, slash);
  source.repository = rest.substr(slash + 1);
  return source;
}

namespace {

// nlohmann turns any number into an integer, far too large ones by undefined behaviour.
int64_t size_in(const nlohmann::json& entry) {
  const auto& size = entry.at("size");
  if (!size.is_number_integer()) throw nlohmann::json::type_error::create(302, "a size is no whole number", &entry);
  return size.get<int64_t>();
}

}  // namespace

HubListing parse_listing(const std::string& name, std::string_view text) {
  const auto root = parse_json<nlohmann::json>(name, text);
  HubListing listing;
  std::set<std::string> paths;
  try {
    if (const auto commit = root.find("sha"); commit != root.end() && commit->is_string() && is_hex(commit->get_ref<const std::string&>(), 40))
      listing.commit = commit->get<std::string>();
    for (const auto& entry : root.at("siblings")) {
      HubFile file;
      file.path = entry.at("rfilename").get<std::string>();
      if (!is_plain_path(file.path)) continue;
      const auto lfs = entry.find("lfs");
      if (lfs != entry.end() && lfs->is_object()) {
        file.sha256 = lfs->at("sha256").get<std::string>();
        file.bytes = size_in(*lfs);
        if (!is_hex(file.sha256, 64)) bad(fmt::format("{}: the SHA-256 of {} is {}", name, quote(file.path), quote(file.sha256)));
        std::transform(file.sha256.begin(), file.sha256.end(), file.sha256.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
      } else {
        file.bytes = size_in(entry);
        const auto blob = entry.find("blobId");
        if (blob != entry.end() && blob->is_string() && is_hex(blob->get_ref<const std::string&>(), 40)) file.git_sha1 = blob->get<std::string>();
      }
      if (file.bytes < 0 || file.bytes > kMaxFileBytes)
        bad(fmt::format("{}: {} has {} bytes", name, quote(file.path), file.bytes));
      if (!paths.insert(file.path).second) bad(fmt::format("{}: lists {} twice", name, quote(file.path)));
      listing.files.push_back(std::move(file));
    }
  } catch (const nlohmann::json::exception& exception) {
    bad(fmt::format("{}: no listing of a repository: {}", name, json_reason(exception)));
  }
  return listing;
}

bool needs_index(const ModelSource& source, const HubListing& listing) {
  return takes_folder(source, listing) && !has_file(listing, "model.safetensors");
}

std::set<std::string> shards_of_index(const std::string& name, std::string_view text) {
  const auto root = parse_json<nlohmann::json>(name, text, size_t{1} << 20);
  std::set<std::string> shards;
  try {
    for (const auto& [tensor, shard] : root.at("weight_map").items()) {
      const auto& file = shard.get_ref<const std::string&>();
      if (!is_plain_path(file) || file.find('/') != file.npos || !file.ends_with(".safetensors"))
        bad(fmt::format("{}: tensor {} lies in {}, a safetensors file beside the index was expected", name, quote(tensor), quote(file)));
      shards.insert(file);
    }
  } catch (const nlohmann::json::exception& exception) {
    bad(fmt::format("{}: no index of shards: {}", name, json_reason(exception)));
  }
  return shards;
}

Selection select_files(const ModelSource& source, const HubListing& listing, const std::set<std::string>& shards) {
  if (takes_folder(source, listing)) return select_folder(source, listing, shards);
  const std::vector<GgufSet> sets = gguf_sets(listing);
  std::vector<std::string> tags;
  for (const GgufSet& set : sets) tags.push_back(set.tag());
  if (sets.empty())
    bad(fmt::format("{}: holds no GGUF file{}", source.repository_path(),
                    is_folder_model(listing) ? fmt::format("; hf:{} is its folder of safetensors", source.repository_path())
                                             : ", and no config.json with model.safetensors"));
  std::vector<const GgufSet*> fitting;
  Selection selection;
  if (!source.wanted.empty()) {
    for (const GgufSet& set : sets)
      if (is_named(set, source.wanted)) fitting.push_back(&set);
    if (fitting.empty()) bad(fmt::format("{}: has no GGUF file {}; it has {}", source.repository_path(), quote(source.wanted), list_of(tags)));
  } else if (sets.size() == 1) {
    fitting.push_back(&sets.front());
  } else {
    for (const std::string_view favourite : kFavourites) {
      for (const GgufSet& set : sets)
        if (set.tag() == favourite) fitting.push_back(&set);
      if (!fitting.empty()) break;
    }
    if (fitting.empty()) bad(fmt::format("{}: has several GGUF files: {}; say which: hf:{}:NAME", source.repository_path(), list_of(tags), source.repository_path()));
    for (const GgufSet& set : sets)
      if (&set != fitting.front()) selection.others.push_back(set.tag());
  }
  if (fitting.size() > 1) {
    std::vector<std::string> paths;
    for (const GgufSet* set : fitting) paths.push_back(set->files.front().path);
    bad(fmt::format("{}: several files fit: {}; say which: hf:{}:FILE", source.repository_path(), list_of(paths), source.repository_path()));
  }
  const GgufSet& set = *fitting.front();
  if (!set.is_whole())
    bad(fmt::format("{}: {} is split into {} parts, of which the repository has {}", source.repository_path(), quote(set.stem), set.n_parts, set.files.size()));
  selection.files = set.files;
  // A quantisation that two files have names neither.
  const auto n_alike = std::count(tags.begin(), tags.end(), set.tag());
  selection.tag = n_alike == 1 ? set.tag() : last_part(set.stem) + std::string(kGguf);
  return selection;
}

}  // namespace beryl
