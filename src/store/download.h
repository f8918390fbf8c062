// One file from a server into a PartialFile: what is missing of it, in ranges, several at once where the server gives
// ranges, again and again as long as it comes forward.
//
// What servers do and what follows from it:
//   stall, cut, reset, 408, 5xx      tried again after a pause that doubles; the count starts anew with every new byte
//   429, 503 with Retry-After        all wait as long as asked, and fewer ask at once; beyond kLongestWait: an error
//   ignore Range (200)               one stream from the start, no parallel ranges
//   redirect                         followed by hand, the token goes to the origin it belongs to and no other; ranges then
//                                    go to the last address, and to the first again when that one no longer answers
//   lie about length                 an error that names both numbers, before a byte is believed
//   change the file in between       all is fetched anew, twice at most; for files with a known digest, the digest decides
//   401, 403, 404, ...               an error that says what to do
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "store/http.h"
#include "store/partial_file.h"

namespace beryl {

inline constexpr double kLongestWait = 600;   // seconds that a server may ask for

struct DownloadOptions {
  int connections = 4;
  int retries = 5;                   // in a row without a new byte
  double retry_seconds = 1;          // before the first one; then twice as long each time, at most a minute
  double stall_seconds = 30;
  std::string token;                 // empty: none
  std::string hub_origin;            // origin_of() the server that it is for, and whose X-Linked-… fields are believed
  std::function<bool()> cancelled;   // asked several times a second
  std::function<void(int64_t have_bytes, std::optional<int64_t> all_bytes)> on_progress;
  std::function<void(const std::string&)> on_note;   // a line for the user: waits, goes on
};

struct RemoteFile {
  std::string url;
  std::optional<int64_t> bytes;      // as the hub lists it
  std::string sha256;                // of the content, where it is known
  bool is_checked = false;           // the caller has a digest to compare with: ranges of any version may be joined
};

class Downloader {
 public:
  explicit Downloader(const DownloadOptions& options) : options_(options), client_(options.stall_seconds) {}

  // All of a file. False: cancelled, and what has come is kept in `partial`. Throws Error.
  bool fetch(const RemoteFile& file, PartialFile& partial);
  // A text of at most `most_bytes`, a hub's listing. Empty: cancelled. Throws Error.
  std::optional<std::string> fetch_text(const std::string& url, size_t most_bytes);

  // Waits without a request; false: cancelled.
  bool wait(double seconds);

 private:
  class FileFetch;
  const DownloadOptions& options_;
  HttpClient client_;
};

}  // namespace beryl
