#include "store/download.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"
#include "store/files.h"
#include "weights/quote.h"

namespace beryl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kPollSeconds = 0.1;       // how long Ctrl-C may go unnoticed
constexpr double kLongestPause = 60;
constexpr int kMostRedirects = 10;
constexpr int kMostVersions = 3;           // of a file that changes while it is fetched
constexpr int64_t kFirstBytes = 1 << 20;   // asked for while the size is unknown
constexpr int64_t kLeastSegment = 1 << 20;
constexpr int64_t kMostSegment = 64 << 20;

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

bool may_be_tried_again(int status) { return status == 408 || status == 425 || status == 429 || status >= 500; }

[[noreturn]] void fail(ErrorCode code, const std::string& message) { throw Error(code, message); }

// A status that trying again does not change.
[[noreturn]] void refuse_status(const std::string& url, const HttpHead& head, bool is_hub, bool has_token) {
  std::string why;
  if ((head.status == 401 || head.status == 403) && !is_hub)
    fail(ErrorCode::kIo, fmt::format("{} answers {}: it is not for everyone, and HF_TOKEN is for the hub alone", shown_url(url), head.status));
  switch (head.status) {
    case 401:
      why = has_token ? "it does not accept the token in HF_TOKEN, or there is no such repository"
                      : "there is no such repository, or it needs a token: set HF_TOKEN";
      break;
    case 403:
      why = has_token ? "the token in HF_TOKEN has no access; a model's page on the hub tells how to get it"
                      : "it is not for everyone: set HF_TOKEN to a token that has access";
      break;
    case 404:
    case 410: why = "there is no such file or repository"; break;
    case 416: why = "it has no such bytes"; break;
    default: why = "nothing that beryl can use";
  }
  std::string message = fmt::format("{} answers {}: {}", shown_url(url), head.status, why);
  if (!head.error_message.empty()) message += fmt::format("; it says {}", quote(head.error_message, 200));
  fail(ErrorCode::kIo, message);
}

// Counts failures in a row, and says when the next try may be. Transfers that were under way at once fail for one reason
// and count as one: each remembers the round it began in.
class Patience {
 public:
  explicit Patience(const DownloadOptions& options) : options_(options) {}

  int round() const { return round_; }
  void succeeded() { n_failures_ = 0; }
  double seconds_left() const { return std::chrono::duration<double>(not_before_ - Clock::now()).count(); }

  // Throws Error(kIo) when it is enough.
  void failed(int round, const std::string& url, const std::string& reason,
              std::optional<double> asked_seconds = std::nullopt) {
    if (round != round_) return;
    ++round_;
    if (++n_failures_ > options_.retries)
      fail(ErrorCode::kIo, fmt::format("{}: {}; tried {} times without getting further", shown_url(url), reason, n_failures_));
    double seconds = std::min(kLongestPause, options_.retry_seconds * static_cast<double>(1LL << std::min(n_failures_ - 1, 30)));
    if (asked_seconds) {
      if (*asked_seconds > kLongestWait)
        fail(ErrorCode::kIo, fmt::format("{}: {}, and to wait {:.0f} s; run the same command again then", shown_url(url),
                                         reason, *asked_seconds));
      seconds = std::max(*asked_seconds, 0.0);
    }
    not_before_ = std::max(not_before_, Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                           std::chrono::duration<double>(seconds)));
    if (options_.on_note)
      options_.on_note(fmt::format("{}: {}; goes on in {:.3g} s (try {} of {})", host_of(url), reason, seconds,
                                   n_failures_ + 1, options_.retries + 1));
  }

 private:
  const DownloadOptions& options_;
  int round_ = 0, n_failures_ = 0;
  Clock::time_point not_before_ = Clock::now();
};

std::string status_reason(const HttpHead& head) { return fmt::format("the server answers {}", head.status); }

}  // namespace

bool Downloader::wait(double seconds) {
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    if (options_.cancelled && options_.cancelled()) return false;
    const double left = std::chrono::duration<double>(until - Clock::now()).count();
    if (left <= 0) return true;
    client_.run(std::min(left, kPollSeconds));
  }
}

std::optional<std::string> Downloader::fetch_text(const std::string& address, size_t most_bytes) {
  Patience patience(options_);
  std::string url = address;
  for (int n_redirects = 0;;) {
    if (!wait(patience.seconds_left())) return std::nullopt;
    std::string text;
    HttpRequest request;
    request.url = url;
    if (!options_.token.empty() && origin_of(url) == options_.hub_origin) request.token = options_.token;
    const bool has_token = !request.token.empty();
    request.on_head = [&](const HttpHead& head) {
      if (head.status != 200) return false;   // the head tells all
      if (head.length && *head.length > static_cast<int64_t>(most_bytes))
        fail(ErrorCode::kBadInput, fmt::format("{}: announces {} bytes, at most {} were expected", shown_url(url), *head.length, most_bytes));
      return true;
    };
    request.on_body = [&](std::span<const std::byte> bytes) {
      if (text.size() + bytes.size() > most_bytes)
        fail(ErrorCode::kBadInput, fmt::format("{}: sends more than {} bytes", shown_url(url), most_bytes));
      text.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      return true;
    };
    client_.start(std::move(request));
    std::vector<HttpResult> results;
    while (results.empty()) {
      if (options_.cancelled && options_.cancelled()) {
        client_.stop_all();
        return std::nullopt;
      }
      results = client_.run(kPollSeconds);
    }
    const HttpResult& result = results.front();
    if (result.end == HttpEnd::kUnreachable || result.end == HttpEnd::kRefused)
      fail(ErrorCode::kIo, fmt::format("{}: {}", shown_url(url), result.reason));
    if (result.end == HttpEnd::kBroken) {
      patience.failed(patience.round(), url, result.reason);
    } else if (is_redirect(result.head.status)) {
      if (++n_redirects > kMostRedirects)
        fail(ErrorCode::kIo, fmt::format("{}: more than {} redirects", shown_url(address), kMostRedirects));
      url = redirected_url(url, result.head.location);
    } else if (may_be_tried_again(result.head.status)) {
      patience.failed(patience.round(), url, status_reason(result.head), result.head.retry_after_seconds);
    } else if (result.head.status != 200) {
      refuse_status(url, result.head, origin_of(url) == options_.hub_origin, has_token);
    } else {
      return text;
    }
  }
}

// ---- files --------------------------------------------------------------------------------------------------------

class Downloader::FileFetch {
 public:
  FileFetch(const DownloadOptions& options, HttpClient& client, const RemoteFile& file, PartialFile& partial)
      : options_(options), client_(client), file_(file), partial_(partial), patience_(options), n_connections_(options.connections) {
    if (file_.bytes && partial_.size() && *partial_.size() != *file_.bytes) partial_.restart(file_.bytes, "");
    if (file_.bytes) partial_.set_size(*file_.bytes);
    // Bytes of a version that the server has no name for cannot be told from those of another.
    if (!file_.is_checked && partial_.validator().empty()) partial_.restart(file_.bytes, "");
    most_bytes_ = partial_.have().bytes();
  }
  ~FileFetch() { client_.stop_all(); }

  bool run() {
    show();
    while (!is_complete()) {
      if (options_.cancelled && options_.cancelled()) return false;
      const double pause = patience_.seconds_left();
      if (pause <= 0) start_workers();
      const std::vector<HttpResult> results = client_.run(pause > 0 ? std::min(pause, kPollSeconds) : kPollSeconds);
      for (const HttpResult& result : results) end_worker(result);
      if (whole_id_ != 0) stop_others();
      if (is_other_version_) begin_anew();
      show();
    }
    return true;
  }

 private:
  struct Worker {
    ByteRange range;              // asked for; of a whole file [0, size or INT64_MAX)
    int64_t position = 0;         // of the next byte
    std::string url;
    int n_redirects = 0;
    int round = 0;                // Patience::round() when it began
    bool is_direct = false;       // began at the address that an earlier one was redirected to
    bool has_token = false;
    bool takes_body = false;      // the answer is 200 or 206: the body is the file's
    bool has_other_head = false;  // it is another: the head tells all
    bool is_whole = false;        // the answer is 200
  };

  bool is_complete() const { return partial_.size() && partial_.have().covers(*partial_.size()); }

  void show() const {
    if (options_.on_progress) options_.on_progress(partial_.have().bytes(), partial_.size());
  }

  int64_t segment_bytes() const {
    const int64_t size = partial_.size().value_or(0);
    return std::clamp(size / (8 * std::max(options_.connections, 1)), kLeastSegment, kMostSegment);
  }

  void start_workers() {
    const int most = gives_ranges_ ? n_connections_ : 1;   // one, until it is known
    while (static_cast<int>(workers_.size()) < most) {
      RangeSet under_way;
      for (const auto& [id, worker] : workers_) under_way.add({worker.position, worker.range.end});
      Worker worker;
      if (wants_whole_) {
        if (!workers_.empty()) return;
        worker.range = {0, INT64_MAX};
      } else if (partial_.size()) {
        worker.range = partial_.have().first_missing(*partial_.size(), segment_bytes(), under_way);
        if (worker.range.size() <= 0) return;
      } else {
        if (!workers_.empty()) return;
        worker.range = {0, kFirstBytes};
      }
      worker.is_direct = !last_url_.empty();
      worker.url = worker.is_direct ? last_url_ : file_.url;
      start(std::move(worker));
    }
  }

  void start(Worker worker) {
    worker.position = worker.range.begin;
    worker.is_whole = worker.takes_body = worker.has_other_head = false;
    worker.round = patience_.round();
    HttpRequest request;
    request.url = worker.url;
    if (!options_.token.empty() && origin_of(worker.url) == options_.hub_origin) request.token = options_.token;
    worker.has_token = !request.token.empty();
    if (!wants_whole_) request.range = worker.range;
    // A server that has another version then sends all of it.
    if (!file_.is_checked) request.if_range = partial_.validator();
    const auto current = std::make_shared<int>(0);   // the id, once it is known
    request.on_head = [this, current](const HttpHead& head) { return take_head(*current, head); };
    request.on_body = [this, current](std::span<const std::byte> bytes) { return take_body(*current, bytes); };
    *current = client_.start(std::move(request));
    workers_.emplace(*current, std::move(worker));
  }

  [[noreturn]] void fail_size(const Worker& worker, int64_t told) const {
    fail(ErrorCode::kBadInput, fmt::format("{}: the server says that the file has {} bytes, the hub lists {}",
                                           shown_url(worker.url), told, *file_.bytes));
  }

  // What the head says of the file as a whole. False: it is not the file that we began with.
  bool is_same_file(const Worker& worker, const HttpHead& head, std::optional<int64_t> size) {
    if (!head.encoding.empty())
      fail(ErrorCode::kUnsupported, fmt::format("{}: is sent in the encoding {}, which was not asked for", shown_url(worker.url), quote(head.encoding)));
    if (file_.bytes && size && *size != *file_.bytes) fail_size(worker, *size);
    if (file_.is_checked || is_first()) return true;
    if (size && partial_.size() && *size != *partial_.size()) return false;
    return head.validator == partial_.validator();
  }

  // Of a file whose size only its server knows. (What a hub lists is looked at before.)
  void check_space() const {
    if (file_.bytes || !partial_.size()) return;
    const int64_t needed = *partial_.size() - partial_.have().bytes();
    if (const int64_t free = free_bytes(partial_.path()); needed > free)
      fail(ErrorCode::kIo, fmt::format("{}: {:.2f} GB are needed, {:.2f} GB are free", partial_.path(), static_cast<double>(needed) / 1e9, static_cast<double>(free) / 1e9));
  }

  // Nothing depends on an earlier answer.
  bool is_first() const { return partial_.have().bytes() == 0 && workers_.size() == 1; }

  bool take_head(int id, const HttpHead& head) {
    Worker& worker = workers_.at(id);
    if (whole_id_ != 0 || is_other_version_) return false;
    if (is_redirect(head.status)) check_links(worker, head);
    if (head.status == 206) {
      if (!head.range || head.range->begin != worker.range.begin || head.range->end > worker.range.end)
        fail(ErrorCode::kBadInput, fmt::format("{}: asked for bytes {} to {}, the server sends {}", shown_url(worker.url), worker.range.begin,
                                               worker.range.end - 1, head.range ? fmt::format("{} to {}", head.range->begin, head.range->end - 1) : "it does not say which"));
      if (!is_same_file(worker, head, head.total)) return change();
      const bool is_all = head.range->begin == 0 && head.total && head.range->end == *head.total;
      if (!file_.is_checked && head.validator.empty() && !is_all) {
        if (wants_whole_) fail(ErrorCode::kUnsupported, fmt::format("{}: sends a part of the file though all of it was asked for", shown_url(worker.url)));
        // Ranges that cannot be told to be of one version are not joined.
        wants_whole_ = true;
        return false;
      }
      if (!file_.is_checked && is_first()) partial_.restart(head.total, head.validator);
      if (!partial_.size() && head.total) partial_.set_size(*head.total);
      if (!partial_.size())
        fail(ErrorCode::kUnsupported, fmt::format("{}: sends ranges of a file and not how long it is", shown_url(worker.url)));
      check_space();
      worker.range.end = std::min(head.range->end, *partial_.size());
      worker.takes_body = gives_ranges_ = true;
      if (worker.n_redirects > 0) last_url_ = worker.url;
    } else if (head.status == 200) {
      // The whole file, from its start; no other transfer makes sense beside it.
      if (!is_same_file(worker, head, head.length)) return change();
      whole_id_ = id;
      gives_ranges_ = false;
      partial_.restart(file_.bytes ? file_.bytes : head.length, head.validator);
      check_space();
      worker.is_whole = worker.takes_body = true;
      worker.position = 0;
      worker.range = {0, partial_.size().value_or(INT64_MAX)};
    } else {
      worker.has_other_head = true;
    }
    return worker.takes_body;
  }

  // (A callback must not end other transfers.)
  void stop_others() {
    for (auto other = workers_.begin(); other != workers_.end();) {
      if (other->first == whole_id_) {
        ++other;
      } else {
        client_.stop(other->first);
        other = workers_.erase(other);
      }
    }
    if (workers_.empty()) whole_id_ = 0;
  }

  // What a hub says of a file when it redirects to the place where it lies.
  void check_links(const Worker& worker, const HttpHead& head) const {
    if (options_.hub_origin.empty() || origin_of(worker.url) != options_.hub_origin) return;
    if (file_.bytes && head.linked_size && *head.linked_size != *file_.bytes) fail_size(worker, *head.linked_size);
    if (!file_.sha256.empty() && is_sha256(head.linked_digest) && head.linked_digest != file_.sha256)
      fail(ErrorCode::kBadInput, fmt::format("{}: the hub lists SHA-256 {} and now gives {}; run again to take the newer file",
                                             shown_url(worker.url), file_.sha256, head.linked_digest));
  }
  static bool is_sha256(const std::string& text) {
    return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos;
  }

  bool change() {
    is_other_version_ = true;
    return false;
  }

  void begin_anew() {
    if (++n_versions_ >= kMostVersions)
      fail(ErrorCode::kIo, fmt::format("{}: changes while it is fetched", shown_url(file_.url)));
    if (options_.on_note) options_.on_note(fmt::format("{}: the file is another one now; begins anew", host_of(file_.url)));
    client_.stop_all();
    workers_.clear();
    partial_.restart(std::nullopt, "");
    most_bytes_ = 0;
    last_url_.clear();
    whole_id_ = 0;
    is_other_version_ = false;
  }

  bool take_body(int id, std::span<const std::byte> bytes) {
    Worker& worker = workers_.at(id);
    if (is_other_version_ || (whole_id_ != 0 && whole_id_ != id)) return false;
    const int64_t room = worker.range.end - worker.position;
    if (static_cast<int64_t>(bytes.size()) > room) {
      if (worker.is_whole) partial_.restart(file_.bytes, "");   // what such a server sent is nothing to go on with
      if (worker.is_whole)
        fail(ErrorCode::kBadInput, fmt::format("{}: sends more than the {} bytes that the file has", shown_url(worker.url), worker.range.end));
      bytes = bytes.first(static_cast<size_t>(room));
      if (bytes.empty()) return false;
    }
    partial_.write(worker.position, bytes);
    worker.position += static_cast<int64_t>(bytes.size());
    if (partial_.have().bytes() > most_bytes_) {
      most_bytes_ = partial_.have().bytes();
      patience_.succeeded();
    }
    return true;
  }

  void end_worker(const HttpResult& result) {
    const auto at = workers_.find(result.id);
    if (at == workers_.end()) return;
    const Worker worker = std::move(at->second);
    workers_.erase(at);
    if (whole_id_ == result.id) whole_id_ = 0;
    if (result.end == HttpEnd::kStopped && !worker.has_other_head) return;
    if (result.end == HttpEnd::kRefused || (result.end == HttpEnd::kUnreachable && most_bytes_ == 0))
      fail(ErrorCode::kIo, fmt::format("{}: {}", shown_url(worker.url), result.reason));
    const HttpHead& head = result.head;
    if (worker.takes_body) {
      if (result.end == HttpEnd::kDone && !partial_.size()) {
        partial_.set_size(worker.position);   // whole, and its end is the only thing that told its size
      } else if (result.end != HttpEnd::kDone) {
        patience_.failed(worker.round, worker.url, result.reason);
      } else if (worker.position < worker.range.end) {
        patience_.failed(worker.round, worker.url, "fewer bytes came than were announced");
      }
    } else if (!worker.has_other_head) {
      last_url_.clear();
      patience_.failed(worker.round, worker.url, result.end == HttpEnd::kDone ? "no answer came" : result.reason);
    } else if (is_redirect(head.status)) {
      follow(worker, head);
    } else if (may_be_tried_again(head.status)) {
      if (head.status == 429) n_connections_ = std::max(1, n_connections_ / 2);
      patience_.failed(worker.round, worker.url, status_reason(head), head.retry_after_seconds);
    } else if (worker.is_direct) {
      // An address behind a redirect holds for a while only: the first one gives another.
      last_url_.clear();
    } else if (head.status == 416 && head.total == 0) {
      fail(ErrorCode::kBadInput, fmt::format("{}: is empty", shown_url(worker.url)));
    } else if (head.status == 416 && head.total && partial_.size() && *head.total != *partial_.size()) {
      if (file_.bytes) fail_size(worker, *head.total);
      is_other_version_ = true;
    } else {
      // Where the hub sends us to is its own business.
      const bool is_hub = file_.bytes.has_value() || origin_of(worker.url) == options_.hub_origin;
      refuse_status(worker.url, head, is_hub, worker.has_token);
    }
  }

  void follow(Worker worker, const HttpHead& head) {
    if (++worker.n_redirects > kMostRedirects)
      fail(ErrorCode::kIo, fmt::format("{}: more than {} redirects", shown_url(file_.url), kMostRedirects));
    worker.url = redirected_url(worker.url, head.location);
    start(std::move(worker));
  }

  const DownloadOptions& options_;
  HttpClient& client_;
  const RemoteFile& file_;
  PartialFile& partial_;
  Patience patience_;
  int n_connections_;
  std::map<int, Worker> workers_;   // by transfer
  bool gives_ranges_ = false;       // the last answer was one
  bool wants_whole_ = false;        // ask for no ranges
  int whole_id_ = 0;                // the transfer that gets the whole file; 0: none
  std::string last_url_;            // behind redirects; empty: not known
  int64_t most_bytes_ = 0;          // that were there at once: what counts as getting further
  bool is_other_version_ = false;
  int n_versions_ = 0;
};

bool Downloader::fetch(const RemoteFile& file, PartialFile& partial) {
  return FileFetch(options_, client_, file, partial).run();
}

}  // namespace beryl
