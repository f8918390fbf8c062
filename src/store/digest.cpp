#include "store/digest.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fmt/format.h>
#include <openssl/evp.h>

#include "base/error.h"

namespace beryl {
namespace {

EVP_MD_CTX* context_of(void* context) { return static_cast<EVP_MD_CTX*>(context); }

void* start(const EVP_MD* kind) {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  if (context == nullptr || EVP_DigestInit_ex(context, kind, nullptr) != 1)
    throw Error(ErrorCode::kUnsupported, "the OpenSSL library has no such digest");
  return context;
}

}  // namespace

void Digest::Free::operator()(void* context) const noexcept { EVP_MD_CTX_free(context_of(context)); }

Digest Digest::sha256() { return Digest(std::unique_ptr<void, Free>(start(EVP_sha256()))); }

Digest Digest::git_blob(int64_t content_bytes) {
  Digest digest(std::unique_ptr<void, Free>(start(EVP_sha1())));
  const std::string head = fmt::format("blob {}", content_bytes);
  digest.add(std::string_view(head.c_str(), head.size() + 1));
  return digest;
}

void Digest::add(std::span<const std::byte> bytes) {
  EVP_DigestUpdate(context_of(context_.get()), bytes.data(), bytes.size());
}

std::string Digest::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes;
  unsigned size = 0;
  EVP_DigestFinal_ex(context_of(context_.get()), bytes.data(), &size);
  std::string text;
  for (unsigned i = 0; i < size; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

std::string sha256_of(std::string_view text) {
  Digest digest = Digest::sha256();
  digest.add(text);
  return digest.hex();
}

bool add_file(int fd, const std::string& path, std::span<Digest> digests,
              const std::function<bool(int64_t)>& keep_going) {
  std::vector<std::byte> buffer(4 << 20);
  for (int64_t offset = 0;;) {
    if (!keep_going(offset)) return false;
    const ssize_t n = ::pread(fd, buffer.data(), buffer.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(ErrorCode::kIo, fmt::format("{}: cannot read: {}", path, std::strerror(errno)));
    if (n == 0) return true;
    for (Digest& digest : digests) digest.add(std::span(buffer).first(static_cast<size_t>(n)));
    offset += n;
  }
}

bool is_hex(std::string_view text, size_t length) {
  return text.size() == length && text.find_first_not_of("0123456789abcdefABCDEF") == text.npos;
}

}  // namespace beryl
