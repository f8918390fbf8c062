// For tests: builds GGUF and safetensors files byte by byte, so that tests can also build wrong ones.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace beryl::test {

// A folder of its own under the system's temporary folder, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "beryl-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path(std::string_view name = "") const { return name.empty() ? path_ : path_ + "/" + std::string(name); }
  // Removes an old file first: some file systems write a truncated and refilled one to the disk at once.
  std::string write(std::string_view name, std::string_view bytes) const {
    std::filesystem::remove(path(name));
    std::ofstream out(path(name), std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    if (!out.flush()) throw std::runtime_error("cannot write " + path(name));
    return path(name);
  }

 private:
  std::string path_;
};

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

inline std::string gguf_string(std::string_view text) { return raw<uint64_t>(text.size()) + std::string(text); }

// GGUF value types and tensor types by number, as the format has them.
enum GgufValue : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

struct GgufTensor {
  std::string name;
  std::vector<uint64_t> dims;  // innermost first
  uint32_t type = 0;
  std::string data;
  int64_t offset = -1;         // from the start of the data; -1: the next aligned place
};

struct GgufBuilder {
  std::string magic = "GGUF";
  uint32_t version = 3;
  uint32_t alignment = 32;     // used for placing; put it into the file with field()
  int64_t n_tensors = -1;      // -1: the true count
  int64_t n_fields = -1;
  std::vector<std::string> fields;  // key, type, value
  std::vector<GgufTensor> tensors;
  size_t header_bytes = 0;     // set by build(): up to the end of the tensor infos
  std::vector<std::pair<size_t, size_t>> integers;  // set by build(): offset and size of each integer of the frame

  GgufBuilder& field(std::string_view key, uint32_t type, std::string_view value) {
    fields.push_back(gguf_string(key) + raw(type) + std::string(value));
    return *this;
  }
  template <class T>
  GgufBuilder& scalar(std::string_view key, uint32_t type, T value) {
    return field(key, type, raw(value));
  }
  GgufBuilder& text(std::string_view key, std::string_view value) { return field(key, kString, gguf_string(value)); }
  GgufBuilder& array(std::string_view key, uint32_t element_type, uint64_t count, std::string_view elements) {
    return field(key, kArray, raw(element_type) + raw(count) + std::string(elements));
  }
  template <class T>
  GgufBuilder& array(std::string_view key, uint32_t element_type, const std::vector<T>& values) {
    std::string elements;
    for (const T value : values) elements += raw(value);
    return array(key, element_type, values.size(), elements);
  }
  GgufBuilder& strings(std::string_view key, const std::vector<std::string>& values) {
    std::string elements;
    for (const std::string& value : values) elements += gguf_string(value);
    return array(key, kString, values.size(), elements);
  }
  GgufBuilder& tensor(std::string_view name, std::vector<uint64_t> dims, uint32_t type, std::string data,
                      int64_t offset = -1) {
    tensors.push_back({std::string(name), std::move(dims), type, std::move(data), offset});
    return *this;
  }

  std::string build() {
    integers.clear();
    std::string out = magic;
    const auto put = [&]<class T>(T value) {
      integers.emplace_back(out.size(), sizeof(T));
      out += raw(value);
    };
    put(version);
    put(n_tensors < 0 ? uint64_t{tensors.size()} : static_cast<uint64_t>(n_tensors));
    put(n_fields < 0 ? uint64_t{fields.size()} : static_cast<uint64_t>(n_fields));
    for (const std::string& one : fields) {
      // The integers of a field: key length, value type, and the first words of the value (lengths and counts).
      const size_t key_bytes = [&] {
        uint64_t length = 0;
        std::memcpy(&length, one.data(), 8);
        return 8 + static_cast<size_t>(length);
      }();
      integers.emplace_back(out.size(), 8);
      integers.emplace_back(out.size() + key_bytes, 4);
      const size_t value_bytes = one.size() - key_bytes - 4;
      if (value_bytes >= 4) integers.emplace_back(out.size() + key_bytes + 4, 4);
      if (value_bytes >= 8) integers.emplace_back(out.size() + key_bytes + 4, 8);
      if (value_bytes >= 12) integers.emplace_back(out.size() + key_bytes + 8, 8);
      if (value_bytes >= 24) integers.emplace_back(out.size() + key_bytes + 16, 8);
      out += one;
    }
    std::string data;
    for (const GgufTensor& one : tensors) {
      uint64_t offset = data.size() + (alignment - data.size() % alignment) % alignment;
      if (one.offset >= 0) offset = static_cast<uint64_t>(one.offset);
      put(uint64_t{one.name.size()});
      out += one.name;
      put(static_cast<uint32_t>(one.dims.size()));
      for (const uint64_t dim : one.dims) put(dim);
      put(one.type);
      put(offset);
      if (one.offset >= 0 && data.size() >= offset + one.data.size()) continue;  // a test of overlapping tensors
      if (data.size() < offset) data.resize(offset);
      data.resize(offset);
      data += one.data;
    }
    header_bytes = out.size();
    if (!tensors.empty()) out.resize(out.size() + (alignment - out.size() % alignment) % alignment);
    return out + data;
  }
};

inline std::string safetensors_bytes(std::string_view header, std::string_view data) {
  return raw<uint64_t>(header.size()) + std::string(header) + std::string(data);
}

}  // namespace beryl::test
