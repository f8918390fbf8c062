// For the tests of this folder: checkpoints that exist only in memory, and the real vocabularies where present.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "text/tokenizer.h"
#include "weights/checkpoint.h"

namespace beryl::test {

class MemoryStrings : public StringList {
 public:
  explicit MemoryStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}
  size_t size() const override { return strings_.size(); }
  std::string_view operator[](size_t index) const override { return strings_[index]; }

 private:
  std::vector<std::string> strings_;
};

using MetadataValue = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>, std::vector<float>,
                                   std::vector<std::string>>;

class MemoryMetadata : public Metadata {
 public:
  std::map<std::string, MetadataValue, std::less<>> values;

  bool has(std::string_view key) const override { return values.contains(key); }
  std::optional<int64_t> integer(std::string_view key) const override { return get<int64_t>(key); }
  std::optional<double> number(std::string_view key) const override { return get<double>(key); }
  std::optional<bool> boolean(std::string_view key) const override { return get<bool>(key); }
  std::optional<std::string> string(std::string_view key) const override { return get<std::string>(key); }
  bool is_array(std::string_view key) const override {
    const auto found = values.find(key);
    return found != values.end() && found->second.index() >= 4;
  }
  std::optional<std::vector<int64_t>> integers(std::string_view key) const override {
    return get<std::vector<int64_t>>(key);
  }
  std::optional<std::vector<float>> floats(std::string_view key) const override { return get<std::vector<float>>(key); }
  std::shared_ptr<const StringList> strings(std::string_view key) const override {
    auto found = get<std::vector<std::string>>(key);
    return found ? std::make_shared<MemoryStrings>(std::move(*found)) : nullptr;
  }
  std::vector<std::string> keys() const override {
    std::vector<std::string> all;
    for (const auto& [key, value] : values) all.push_back(key);
    return all;
  }
  std::string describe(std::string_view key) const override { return std::string(key); }

 private:
  template <class T>
  std::optional<T> get(std::string_view key) const {
    const auto found = values.find(key);
    if (found == values.end()) return std::nullopt;
    const T* value = std::get_if<T>(&found->second);
    if (value == nullptr) throw Error(ErrorCode::kBadInput, std::string(key) + " has another type");
    return *value;
  }
};

class MemoryCheckpoint : public Checkpoint {
 public:
  std::string path_ = "memory.gguf";
  Container container_ = Container::kGguf;
  MemoryMetadata metadata_;

  const std::string& path() const override { return path_; }
  Container container() const override { return container_; }
  const Metadata& metadata() const override { return metadata_; }
  std::span<const TensorInfo> tensors() const override { return {}; }
  const TensorInfo* find(std::string_view) const override { return nullptr; }
  std::span<const std::string> warnings() const override { return {}; }
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

inline nlohmann::ordered_json read_golden(const std::string& name) {
  return nlohmann::ordered_json::parse(read_file(std::filesystem::path(BERYL_SOURCE_DIR) / "tests/golden" / name));
}

// Where downloads lie: $BERYL_HOME, else ~/.cache/beryl.
inline std::filesystem::path beryl_home() {
  if (const char* home = std::getenv("BERYL_HOME")) return home;
  const char* user = std::getenv("HOME");
  return std::filesystem::path(user ? user : ".") / ".cache/beryl";
}

// The GGUF file that a tokenizer of the golden cases is in.
inline std::filesystem::path vocabulary_file(const std::string& name) {
  const auto from = [](const char* variable, const std::filesystem::path& otherwise) -> std::filesystem::path {
    const char* given = std::getenv(variable);
    return given != nullptr ? std::filesystem::path(given) : otherwise;
  };
  if (name == "gemma3") return from("BERYL_GEMMA3_GGUF", beryl_home() / "gemma3-270m-q4_k_m.gguf");
  if (name == "smollm2") return from("BERYL_SMOLLM2_GGUF", beryl_home() / "smollm2-135m-instruct-q4_1.gguf");
  const std::filesystem::path folder = from("BERYL_VOCAB_DIR", beryl_home() / "vocab");
  if (name == "gemma4") return folder / "ggml-vocab-gemma-4.gguf";
  if (name == "llama3") return folder / "ggml-vocab-llama-bpe.gguf";
  return folder / "ggml-vocab-gpt-2.gguf";
}

// A real vocabulary and the file that it is from.
struct RealModel {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<Tokenizer> tokenizer;   // null only if the file has none
};

// Loaded once a process; null when the file is absent.
inline const RealModel* real_model(const std::string& name) {
  static std::map<std::string, std::unique_ptr<RealModel>> loaded;
  if (!loaded.contains(name)) {
    const auto path = vocabulary_file(name);
    loaded[name] = nullptr;
    if (std::filesystem::exists(path)) {
      auto checkpoint = open_checkpoint(path.string());
      auto tokenizer = load_tokenizer(*checkpoint);
      loaded[name] = std::make_unique<RealModel>(RealModel{std::move(checkpoint), std::move(tokenizer)});
    }
  }
  return loaded[name].get();
}

// What a call throws, "" when it does not.
template <class Call>
std::string error_of(Call call, ErrorCode* code = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    if (code != nullptr) *code = error.code;
    return error.what();
  }
  return "";
}

}  // namespace beryl::test
