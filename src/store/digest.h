// Digests of files: SHA-256, which names a blob of the store, and what git calls a file, which is all that a hub tells
// of its small ones. The arithmetic is OpenSSL's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace beryl {

class Digest {
 public:
  static Digest sha256();
  // SHA-1 of "blob N", a NUL and the content: N is content_bytes.
  static Digest git_blob(int64_t content_bytes);

  void add(std::span<const std::byte> bytes);
  void add(std::string_view text) { add(std::as_bytes(std::span(text))); }
  std::string hex();   // lower case; ends the digest

 private:
  struct Free {
    void operator()(void* context) const noexcept;
  };
  explicit Digest(std::unique_ptr<void, Free> context) : context_(std::move(context)) {}
  std::unique_ptr<void, Free> context_;
};

std::string sha256_of(std::string_view text);

// Reads a file once and adds all of it to the digests. keep_going(bytes so far) is asked every few MB; false ends it and
// the result is false. Throws Error(kIo).
bool add_file(int fd, const std::string& path, std::span<Digest> digests, const std::function<bool(int64_t)>& keep_going);

bool is_hex(std::string_view text, size_t length);   // of either case

}  // namespace beryl
