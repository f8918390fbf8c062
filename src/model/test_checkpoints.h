// For tests: the tiny golden models, checkpoints with some tensors changed, and small files with any metadata.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "weights/checkpoint.h"
#include "weights/safetensors.h"
#include "weights/test_files.h"

namespace beryl::test {

inline const std::vector<std::string>& golden_models() {
  static const std::vector<std::string> names = {
      "gemma4_dense", "gemma4_dense_hd512", "gemma4_e2b", "gemma4_moe", "gemma3", "llama"};
  return names;
}

inline std::string golden_folder(const std::string& model) {
  return std::string(BERYL_SOURCE_DIR) + "/tests/golden/" + model;
}

// type: "f32" or "bf16". Made by a script; see BERYL_SKIP_WITHOUT_GGUF.
inline std::string golden_gguf(const std::string& model, const std::string& type = "f32") {
  return fmt::format("{}/test-data/golden-gguf/{}/{}.gguf", BERYL_BINARY_DIR, type, model);
}

inline bool have_golden_gguf() {
  return std::all_of(golden_models().begin(), golden_models().end(), [](const std::string& model) {
    return std::filesystem::exists(golden_gguf(model)) && std::filesystem::exists(golden_gguf(model, "bf16"));
  });
}

#define BERYL_SKIP_WITHOUT_GGUF()         \
  if (!::beryl::test::have_golden_gguf()) \
  GTEST_SKIP() << "no golden GGUF files: their script needs Python packages (./test)"

// The ids of a golden sequence: "long" (40 of them), "b0", "b1", "b2", "greedy".
inline std::vector<int32_t> golden_ids(const std::string& model, const std::string& key) {
  const SafetensorsFile file(golden_folder(model) + "/golden.safetensors");
  const TensorInfo* tensor = file.find(key + ".ids");
  if (tensor == nullptr) throw std::runtime_error("golden file lacks " + key);
  std::vector<int32_t> ids(tensor->data.size() / sizeof(int32_t));
  std::memcpy(ids.data(), tensor->data.data(), tensor->data.size());
  return ids;
}

// Another checkpoint with tensors left out, renamed, added or replaced; metadata as it is.
class EditedCheckpoint final : public Checkpoint {
 public:
  explicit EditedCheckpoint(const std::string& path) : base_(open_checkpoint(path)) {
    tensors_.assign(base_->tensors().begin(), base_->tensors().end());
  }

  const std::string& path() const override { return base_->path(); }
  Container container() const override { return base_->container(); }
  const Metadata& metadata() const override { return base_->metadata(); }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  std::span<const std::string> warnings() const override { return base_->warnings(); }
  const TensorInfo* find(std::string_view name) const override {
    const auto at =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const TensorInfo& tensor) { return tensor.name == name; });
    return at == tensors_.end() ? nullptr : &*at;
  }
  // The values of a tensor that must be there.
  std::vector<float> values(std::string_view name) const { return floats_of(*this, at(name)); }
  const std::vector<int64_t>& shape(std::string_view name) const { return at(name).shape; }

  EditedCheckpoint& drop(std::string_view name) {
    at(name);
    std::erase_if(tensors_, [&](const TensorInfo& tensor) { return tensor.name == name; });
    return *this;
  }
  // In f32.
  EditedCheckpoint& add(std::string name, std::vector<int64_t> shape, std::vector<float> values) {
    const std::vector<float>& kept = storage_.emplace_back(std::move(values));
    tensors_.push_back({std::move(name), Format::kF32, std::move(shape), std::as_bytes(std::span(kept))});
    return *this;
  }
  // All zeros.
  EditedCheckpoint& add(std::string name, std::vector<int64_t> shape) {
    int64_t count = 1;
    for (int64_t dim : shape) count *= dim;
    return add(std::move(name), std::move(shape), std::vector<float>(static_cast<size_t>(count)));
  }
  EditedCheckpoint& rename(const std::function<std::string(const std::string&)>& new_name) {
    for (TensorInfo& tensor : tensors_) tensor.name = new_name(tensor.name);
    return *this;
  }

 private:
  const TensorInfo& at(std::string_view name) const {
    const TensorInfo* tensor = find(name);
    if (tensor == nullptr) throw std::runtime_error("the golden model has no tensor " + std::string(name));
    return *tensor;
  }

  std::unique_ptr<Checkpoint> base_;
  std::vector<TensorInfo> tensors_;
  std::list<std::vector<float>> storage_;
};

// A folder with this config.json and nothing but an embedding table of two rows, as wide as the config says.
inline std::unique_ptr<Checkpoint> folder_with(const TempFolder& folder, const nlohmann::json& config,
                                               int64_t model_dim) {
  nlohmann::json own = config;
  nlohmann::json& text = own.contains("text_config") && own["text_config"].is_object() ? own["text_config"] : own;
  if (text.contains("vocab_size") && text["vocab_size"] == 256) text["vocab_size"] = 2;   // the golden models' size
  folder.write("config.json", own.dump());
  const std::string data(static_cast<size_t>(2 * model_dim * 4), '\0');
  const nlohmann::json header = {{"model.embed_tokens.weight",
                                  {{"dtype", "F32"}, {"shape", {2, model_dim}}, {"data_offsets", {0, data.size()}}}}};
  folder.write("model.safetensors", safetensors_bytes(header.dump(), data));
  return open_checkpoint(folder.path());
}

// A GGUF file with these fields (numbers as u32, u64, i64 or f32; arrays of bools or i32), an embedding table of two
// rows, and divisors for the rope where given.
inline std::unique_ptr<Checkpoint> gguf_with(const TempFolder& folder, const nlohmann::ordered_json& fields,
                                             int64_t model_dim, const std::vector<float>& divisors = {}) {
  GgufBuilder builder;
  for (const auto& [key, value] : fields.items()) {
    if (value.is_string()) {
      builder.text(key, value.get<std::string>());
    } else if (value.is_boolean()) {
      builder.scalar<uint8_t>(key, kBool, value.get<bool>());
    } else if (value.is_number_float()) {
      builder.scalar(key, kF32, value.get<float>());
    } else if (value.is_number_integer() && value.get<int64_t>() < 0) {
      builder.scalar(key, kI64, value.get<int64_t>());
    } else if (value.is_number_integer() && value.get<int64_t>() > UINT32_MAX) {
      builder.scalar(key, kU64, value.get<uint64_t>());
    } else if (value.is_number_integer()) {
      builder.scalar(key, kU32, value.get<uint32_t>());
    } else if (value.is_array() && value.at(0).is_boolean()) {
      builder.array(key, kBool, std::vector<uint8_t>(value.begin(), value.end()));
    } else {
      builder.array(key, kI32, value.get<std::vector<int32_t>>());
    }
  }
  builder.tensor("token_embd.weight", {static_cast<uint64_t>(model_dim), 2}, 0,
                 std::string(static_cast<size_t>(2 * model_dim * 4), '\0'));
  if (!divisors.empty()) {
    std::string bytes;
    for (float divisor : divisors) bytes += raw(divisor);
    builder.tensor("rope_freqs.weight", {divisors.size()}, 0, bytes);
  }
  return open_checkpoint(folder.write("model.gguf", builder.build()));
}

// The action throws Error with this code, whose message is one line that holds every one of the fragments.
inline void expect_refused(const std::function<void()>& action, ErrorCode code,
                           const std::vector<std::string>& fragments) {
  try {
    action();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.code, code) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& fragment : fragments)
      EXPECT_NE(message.find(fragment), std::string::npos) << "'" << fragment << "' is not in: " << message;
    return;
  }
  ADD_FAILURE() << "nothing was refused; expected: " << fmt::format("{}", fmt::join(fragments, ", "));
}

}  // namespace beryl::test
