#include "store/pull.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <span>

#include <fmt/format.h>

#include "base/error.h"
#include "store/digest.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr size_t kMaxListingBytes = 64 << 20;
constexpr double kLockSeconds = 0.2;  // between looks at a lock that another process holds

[[noreturn]] void fail(ErrorCode code, const std::string& message) { throw Error(code, message); }

// A file's name as a model's name.
std::string name_like(std::string_view text) {
  std::string name;
  for (const char c : text.substr(0, 150))
    name +=
        std::isalnum(static_cast<unsigned char>(c)) != 0 || std::string_view("._-").find(c) != std::string_view::npos
            ? c
            : '-';
  while (!name.empty() && std::isalnum(static_cast<unsigned char>(name.front())) == 0) name.erase(0, 1);
  return name.empty() ? "model" : name;
}

class Pull {
 public:
  Pull(Store& store, const ModelSource& source, PullOptions options)
      : store_(store), source_(source), options_(std::move(options)), downloader_(options_.download) {
    options_.download.hub_origin = origin_of(options_.hub);
    options_.download.on_note = options_.on_note;
    options_.download.on_progress = [this](int64_t have, std::optional<int64_t> all) { show_fetching(have, all); };
  }

  PullResult run() {
    PullResult result;
    result.is_cancelled = true;
    if (!(source_.is_hub ? list_hub() : list_address())) return result;
    if (!options_.sha256.empty()) {
      if (remote_.size() != 1)
        fail(ErrorCode::kBadInput,
             fmt::format("--sha256 is the digest of one file, but {} are to be fetched", remote_.size()));
      if (!remote_[0].sha256.empty() && remote_[0].sha256 != options_.sha256)
        fail(ErrorCode::kBadInput,
             fmt::format("{}: --sha256 is {}, the hub lists {}", model_.name, options_.sha256, remote_[0].sha256));
      remote_[0].sha256 = options_.sha256;
      remote_[0].is_checked = true;
      model_.files[0].sha256 = options_.sha256;
      model_.files[0].partial_key = "sha256-" + options_.sha256;
    }
    if (!options_.name.empty()) model_.name = options_.name;

    std::optional<OpenFile> claim;
    if (!wait_for([&] { return (claim = store_.claim(model_.name)).has_value(); }, model_.name)) return result;
    use_earlier();
    check_space();
    store_.plan(model_);
    bool is_all = false;
    try {
      is_all = fetch_all(result.was_there);
    } catch (...) {
      if (!has_anything()) store_.abandon(model_);
      throw;
    }
    if (!is_all) {
      if (!has_anything()) store_.abandon(model_);
      return result;
    }
    result.is_verified =
        std::all_of(remote_.begin(), remote_.end(), [](const RemoteFile& file) { return file.is_checked; });
    try {
      store_.finish(model_, [&](const std::string& path) {
        return model_.format = options_.check ? options_.check(path, result.is_verified) : "";
      });
    } catch (const Error& error) {
      // Bytes that nobody vouches for and that are no model: not to be gone on with.
      if (error.code != ErrorCode::kIo && !result.is_verified) store_.abandon(model_);
      throw;
    }
    result.model = model_;
    result.is_cancelled = false;
    return result;
  }

 private:
  // What model_ and remote_ are to be. False: cancelled.
  bool list_hub() {
    const std::string repository = escaped_path(source_.repository_path());
    const std::string base = options_.hub + "/" + repository;
    const std::string listing_url = fmt::format("{}/api/models/{}/revision/{}?blobs=true", options_.hub, repository,
                                                escaped_path(source_.revision));
    const auto text = downloader_.fetch_text(listing_url, kMaxListingBytes);
    if (!text) return false;
    const HubListing listing = parse_listing(shown_url(listing_url), *text);
    // All files of one commit, whatever is published meanwhile.
    const std::string revision = listing.commit.empty() ? source_.revision : listing.commit;
    const auto url_of = [&](std::string_view path) {
      return fmt::format("{}/resolve/{}/{}", base, escaped_path(revision), escaped_path(path));
    };
    std::set<std::string> shards;
    if (needs_index(source_, listing)) {
      const auto index = downloader_.fetch_text(url_of(kShardIndex), kMaxListingBytes);
      if (!index) return false;
      shards = shards_of_index(shown_url(url_of(kShardIndex)), *index);
    }
    const Selection selection = select_files(source_, listing, shards);
    others_ = selection.others;
    model_.source = fmt::format("hf:{}", source_.repository_path());
    model_.name = source_.repository_path();
    if (!selection.is_folder) model_.name += fmt::format(":{}", name_like(selection.tag));
    model_.is_folder = selection.is_folder;
    for (const HubFile& file : selection.files) {
      StoredFile stored{last_part(file.path), file.bytes, file.sha256, file.git_sha1, {}};
      RemoteFile remote{url_of(file.path), file.bytes, file.sha256, !file.sha256.empty() || !file.git_sha1.empty()};
      stored.partial_key =
          !file.sha256.empty() ? "sha256-" + file.sha256 : "url-" + sha256_of(remote.url + file.git_sha1).substr(0, 32);
      model_.files.push_back(std::move(stored));
      remote_.push_back(std::move(remote));
    }
    if (!is_model_name(model_.name)) model_.name = name_like(model_.name);
    return true;
  }

  bool list_address() {
    const std::string shown = shown_url(source_.url);
    const std::string file = last_part(shown);
    std::vector<std::string> urls = {source_.url}, names = {file};
    std::string stem = file.substr(0, file.size() - std::string_view(".gguf").size());
    if (const auto split = split_name(file)) {
      stem = split->stem;
      urls.clear();
      names.clear();
      const size_t path_end = std::min(source_.url.find_first_of("?#"), source_.url.size());
      const size_t begin = source_.url.rfind(split_part(*split, split->number).substr(split->stem.size()), path_end);
      if (begin == std::string::npos)
        fail(ErrorCode::kBadInput, fmt::format("{}: cannot tell the addresses of its other parts", shown));
      for (int number = 1; number <= split->count; ++number) {
        const std::string part = split_part(*split, number);
        names.push_back(part);
        urls.push_back(
            std::string(source_.url).replace(begin, part.size() - split->stem.size(), part.substr(split->stem.size())));
      }
    }
    model_.source = shown;
    model_.name = name_like(stem);
    for (size_t i = 0; i < urls.size(); ++i) {
      std::string name = name_like(names[i].substr(0, names[i].size() - 5)) + ".gguf";
      model_.files.push_back({std::move(name), -1, "", "", "url-" + sha256_of(urls[i]).substr(0, 32)});
      remote_.push_back({urls[i], std::nullopt, "", false});
    }
    return true;
  }

  // Small files have no SHA-256 at the hub; what was fetched under the same git name is the same.
  void use_earlier() {
    const std::optional<StoredModel> earlier = store_.earlier(model_.name);
    if (!earlier) return;
    if (earlier->source != model_.source)
      fail(ErrorCode::kBadInput, fmt::format("the name {} is that of the model from {}; give this one another with "
                                             "--name, or remove that with 'beryl rm'",
                                             quote(model_.name), earlier->source));
    for (StoredFile& file : model_.files)
      for (const StoredFile& old : earlier->files)
        if (file.sha256.empty() && !file.git_sha1.empty() && old.git_sha1 == file.git_sha1 && old.bytes == file.bytes &&
            store_.has_blob(old))
          file.sha256 = old.sha256;
  }

  // Sizes that are known, less what is there.
  void check_space() {
    int64_t needed = 0;
    for (const StoredFile& file : model_.files) {
      if (store_.has_blob(file) || file.bytes < 0) continue;
      needed += file.bytes;
      needed -= std::min(file.bytes, PartialFile::saved_bytes(store_.partial_folder(), file.partial_key));
    }
    if (const int64_t free = free_bytes(store_.folder()); needed > free)
      fail(ErrorCode::kIo,
           fmt::format("{}: {:.2f} GB are needed for {}, {:.2f} GB are free", store_.folder(),
                       static_cast<double>(needed) / 1e9, model_.name, static_cast<double>(free) / 1e9));
  }

  // False: cancelled.
  bool fetch_all(bool& was_there) {
    if (options_.on_plan) options_.on_plan(model_, others_);
    was_there = true;
    for (size_t i = 0; i < model_.files.size(); ++i) {
      if (store_.has_blob(model_.files[i]) && !check_blob(model_.files[i])) return false;
      if (!store_.has_blob(model_.files[i])) {
        was_there = false;
        if (!fetch(i)) return false;
      }
      // An address tells no size of what is not asked for, since it is here.
      if (model_.files[i].bytes < 0) model_.files[i].bytes = store_.blob_bytes(model_.files[i]);
      done_bytes_ += model_.files[i].bytes;
    }
    return true;
  }

  // What has been there for a while is compared again, so that a pull repairs what a disk has damaged. False:
  // cancelled.
  bool check_blob(const StoredFile& file) {
    std::array<Digest, 1> digests = {Digest::sha256()};
    if (!add_digests(store_.open_blob(file).get(), file, file.bytes, digests)) return false;
    if (digests[0].hex() == file.sha256) return true;
    if (options_.on_note) options_.on_note(fmt::format("{} is damaged in the store; it is fetched anew", file.name));
    store_.remove_blob(file);
    return true;
  }

  // Is there something that the next run can go on with?
  bool has_anything() const {
    return std::any_of(model_.files.begin(), model_.files.end(), [&](const StoredFile& file) {
      return store_.has_blob(file) || PartialFile::saved_bytes(store_.partial_folder(), file.partial_key) > 0;
    });
  }

  template <class Try>
  bool wait_for(const Try& is_ours, const std::string& what) {
    for (bool first = true; !is_ours(); first = false) {
      if (first && options_.on_note) options_.on_note(fmt::format("another beryl fetches {}; waits for it", what));
      if (!downloader_.wait(kLockSeconds)) return false;
    }
    return true;
  }

  // False: cancelled.
  bool fetch(size_t index) {
    StoredFile& file = model_.files[index];
    RemoteFile& remote = remote_[index];
    current_ = &file;
    std::optional<PartialFile> partial;
    const auto is_ours = [&] {
      if (store_.has_blob(file)) return true;
      if (auto opened = PartialFile::open(store_.partial_folder(), file.partial_key))
        partial.emplace(std::move(*opened));
      return partial.has_value();
    };
    if (!wait_for(is_ours, file.name)) return false;
    if (store_.has_blob(file)) return true;  // another pull has put it there
    if (!downloader_.fetch(remote, *partial)) return false;
    partial->save();

    std::array<Digest, 2> digests = {Digest::sha256(), Digest::git_blob(*partial->size())};
    if (!add_digests(partial->fd(), file, *partial->size(), digests)) return false;
    const std::string sha256 = digests[0].hex();
    compare(*partial, file, file.sha256, sha256, "SHA-256");
    if (file.sha256.empty()) compare(*partial, file, file.git_sha1, digests[1].hex(), "git digest");
    file.bytes = *partial->size();
    file.sha256 = sha256;
    store_.add_blob(model_, *partial, file);
    return true;
  }

  // False: cancelled.
  bool add_digests(int fd, const StoredFile& file, int64_t bytes, std::span<Digest> digests) {
    return add_file(fd, file.name, digests, [&](int64_t done) {
      if (options_.on_progress) options_.on_progress({PullStage::kChecking, file.name, done, bytes});
      return !options_.download.cancelled || !options_.download.cancelled();
    });
  }

  static void compare(PartialFile& partial, const StoredFile& file, const std::string& expected, const std::string& got,
                      std::string_view kind) {
    if (expected.empty() || expected == got) return;
    partial.discard();
    fail(ErrorCode::kBadInput, fmt::format("{}: came with the {} {}, expected {}: it was damaged on the way or is "
                                           "another file; it was thrown away, and the same command fetches it anew",
                                           file.name, kind, got, expected));
  }

  void show_fetching(int64_t have, std::optional<int64_t> all) {
    if (!options_.on_progress) return;
    PullProgress progress{PullStage::kFetching, current_->name, done_bytes_ + have, 0};
    for (const StoredFile& file : model_.files) {
      const std::optional<int64_t> bytes = &file == current_ ? all
                                           : file.bytes < 0  ? std::nullopt
                                                             : std::optional(file.bytes);
      progress.all_bytes = progress.all_bytes && bytes ? std::optional(*progress.all_bytes + *bytes) : std::nullopt;
    }
    options_.on_progress(progress);
  }

  Store& store_;
  const ModelSource& source_;
  PullOptions options_;
  Downloader downloader_;  // refers to options_.download
  StoredModel model_;
  std::vector<RemoteFile> remote_;  // [files]
  std::vector<std::string> others_;
  const StoredFile* current_ = nullptr;
  int64_t done_bytes_ = 0;  // of the files before the current one
};

}  // namespace

PullResult pull(Store& store, const ModelSource& source, PullOptions options) {
  return Pull(store, source, std::move(options)).run();
}

}  // namespace beryl
