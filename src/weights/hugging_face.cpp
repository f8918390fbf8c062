// Reads a Hugging Face folder: config.json becomes Metadata under dotted keys, shards become one list of tensors.
#include "weights/hugging_face.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>

#include "base/error.h"
#include "base/mapped_file.h"
#include "weights/json_text.h"
#include "weights/quote.h"
#include "weights/safetensors.h"

namespace beryl {

namespace {

using OrderedJson = nlohmann::ordered_json;

[[noreturn]] void bad(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: {}", path, what));
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// True also when the system does not tell (no permission): then opening the file says why.
bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::status(path, ignored).type() != std::filesystem::file_type::not_found;
}

class OwnedStrings final : public StringList {
 public:
  explicit OwnedStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {}
  size_t size() const override { return strings_.size(); }
  std::string_view operator[](size_t index) const override {
    BERYL_CHECK(index < strings_.size(), "string index out of range");
    return strings_[index];
  }

 private:
  std::vector<std::string> strings_;
};

class ConfigMetadata final : public Metadata {
 public:
  explicit ConfigMetadata(const std::string& path) : path_(path) {
    const MappedFile file(path);
    if (file.bytes().size() > kMaxConfigBytes)
      bad(path, fmt::format("{} bytes, at most {} are allowed", file.bytes().size(), kMaxConfigBytes));
    root_ = parse_json<OrderedJson>(path, text_of(file));
    if (!root_.is_object()) bad(path, fmt::format("holds a JSON {}, expected an object", root_.type_name()));
  }

  bool has(std::string_view key) const override {
    const OrderedJson* value = find(root_, key);
    return value != nullptr && !value->is_null();
  }

  std::optional<int64_t> integer(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    const auto integer = to_integer(*value);
    if (!integer) wrong_type(key, *value, "an integer below 2^63");
    return integer;
  }

  std::optional<double> number(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) wrong_type(key, *value, "a number");
    return value->get<double>();
  }

  std::optional<bool> boolean(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong_type(key, *value, "a bool");
    return value->get<bool>();
  }

  std::optional<std::string> string(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) wrong_type(key, *value, "a string");
    return value->get<std::string>();
  }

  bool is_array(std::string_view key) const override {
    const OrderedJson* value = find(key);
    return value != nullptr && value->is_array();
  }

  std::optional<std::vector<int64_t>> integers(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_array()) wrong_type(key, *value, "an array of integers or bools");
    std::vector<int64_t> out;
    out.reserve(value->size());
    for (const OrderedJson& element : *value) {
      const auto integer = element.is_boolean() ? int64_t{element.get<bool>()} : to_integer(element);
      if (!integer) wrong_type(key, *value, "an array of integers or bools");
      out.push_back(*integer);
    }
    return out;
  }

  std::optional<std::vector<float>> floats(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_array()) wrong_type(key, *value, "an array of numbers");
    std::vector<float> out;
    out.reserve(value->size());
    for (const OrderedJson& element : *value) {
      if (!element.is_number()) wrong_type(key, *value, "an array of numbers");
      out.push_back(static_cast<float>(element.get<double>()));
    }
    return out;
  }

  std::shared_ptr<const StringList> strings(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr) return nullptr;
    if (!value->is_array()) wrong_type(key, *value, "an array of strings");
    std::vector<std::string> out;
    out.reserve(value->size());
    for (const OrderedJson& element : *value) {
      if (!element.is_string()) wrong_type(key, *value, "an array of strings");
      out.push_back(element.get<std::string>());
    }
    return std::make_shared<OwnedStrings>(std::move(out));
  }

  std::vector<std::string> keys() const override {
    std::vector<std::string> out;
    add_keys(root_, "", out);
    return out;
  }

  std::string describe(std::string_view key) const override {
    const OrderedJson* value = find(key);
    if (value == nullptr && find(root_, key) != nullptr) return "null";
    return value == nullptr ? "absent" : describe(*value);
  }

 private:
  static std::optional<int64_t> to_integer(const OrderedJson& value) {
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    if (!value.is_number_integer()) return std::nullopt;
    return value.get<int64_t>();
  }

  static std::string describe(const OrderedJson& value) {
    if (value.is_array())
      return value.empty() ? "an empty array"
                           : fmt::format("array of {}: {}{}", value.size(), describe(value[0]),
                                         value.size() > 1 ? ", ..." : "");
    if (value.is_object()) return fmt::format("object of {} keys", value.size());
    if (value.is_string()) return "string " + quote(value.get_ref<const std::string&>(), 60);
    return value.dump();  // a number, a bool or null: no line break
  }

  [[noreturn]] void wrong_type(std::string_view key, const OrderedJson& value, std::string_view wanted) const {
    bad(path_, fmt::format("{} is {}, expected {}", quote(key), describe(value), wanted));
  }

  // The value at a dotted path; null when absent or JSON null. A key that itself holds dots is found too.
  const OrderedJson* find(std::string_view path) const {
    const OrderedJson* value = find(root_, path);
    if (value == nullptr) refuse_parents(path);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  // A key is absent when an object on its way lacks it, not when something else stands where an object should.
  void refuse_parents(std::string_view path) const {
    for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
      const OrderedJson* parent = find(root_, path.substr(0, dot));
      if (parent != nullptr && !parent->is_null() && !parent->is_object())
        wrong_type(path.substr(0, dot), *parent, "an object");
    }
  }

  static const OrderedJson* find(const OrderedJson& object, std::string_view path) {
    if (!object.is_object()) return nullptr;
    if (const auto at = object.find(std::string(path)); at != object.end()) return &*at;
    for (size_t dot = path.find('.'); dot != path.npos; dot = path.find('.', dot + 1)) {
      const auto at = object.find(std::string(path.substr(0, dot)));
      if (at == object.end()) continue;
      if (const OrderedJson* found = find(*at, path.substr(dot + 1))) return found;
    }
    return nullptr;
  }

  static void add_keys(const OrderedJson& object, const std::string& prefix, std::vector<std::string>& out) {
    for (const auto& [key, value] : object.items()) {
      if (value.is_object() && !value.empty()) {
        add_keys(value, prefix + key + ".", out);
      } else {
        out.push_back(prefix + key);
      }
    }
  }

  const std::string path_;
  OrderedJson root_;
};

class HuggingFaceCheckpoint final : public Checkpoint {
 public:
  explicit HuggingFaceCheckpoint(const std::string& folder)
      : folder_(folder), metadata_(checked(folder + "/config.json")) {
    const std::string single = folder + "/model.safetensors";
    const std::string index = folder + "/model.safetensors.index.json";
    if (exists(single)) {
      add_file(single);
      if (exists(index)) warnings_.push_back(fmt::format("{}: ignored, since model.safetensors is there", index));
    } else if (exists(index)) {
      add_shards(index);
    } else {
      bad(folder, "holds neither model.safetensors nor model.safetensors.index.json");
    }
    by_name_.reserve(tensors_.size());
    for (uint32_t i = 0; i < tensors_.size(); ++i) by_name_.push_back(i);
    std::sort(by_name_.begin(), by_name_.end(),
              [&](uint32_t a, uint32_t b) { return tensors_[a].name < tensors_[b].name; });
    for (size_t i = 1; i < by_name_.size(); ++i)
      if (tensors_[by_name_[i - 1]].name == tensors_[by_name_[i]].name)
        bad(folder, fmt::format("tensor {} lies in two shards", quote(tensors_[by_name_[i]].name)));
  }

  const std::string& path() const override { return folder_; }
  Container container() const override { return Container::kHuggingFace; }
  const Metadata& metadata() const override { return metadata_; }
  std::span<const TensorInfo> tensors() const override { return tensors_; }
  std::span<const std::string> warnings() const override { return warnings_; }

  const TensorInfo* find(std::string_view name) const override {
    const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                     [&](uint32_t i, std::string_view wanted) { return tensors_[i].name < wanted; });
    return at != by_name_.end() && tensors_[*at].name == name ? &tensors_[*at] : nullptr;
  }

 private:
  static const std::string& checked(const std::string& config) {
    if (!exists(config)) bad(config, "missing; a model folder needs it");
    return config;
  }

  const SafetensorsFile& add_file(const std::string& path) {
    files_.push_back(std::make_unique<SafetensorsFile>(path));
    const auto tensors = files_.back()->tensors();
    tensors_.insert(tensors_.end(), tensors.begin(), tensors.end());
    return *files_.back();
  }

  // The index maps each tensor to its shard: {"weight_map": {NAME: FILE}}.
  void add_shards(const std::string& index) {
    std::map<std::string, std::vector<std::string>> names_of_shard;
    {
      const MappedFile file(index);
      if (file.bytes().size() > kMaxIndexBytes)
        bad(index, fmt::format("{} bytes, at most {} are allowed", file.bytes().size(), kMaxIndexBytes));
      const auto root = parse_json<nlohmann::json>(index, text_of(file), SIZE_MAX);
      if (!root.is_object() || !root.contains("weight_map") || !root["weight_map"].is_object())
        bad(index, "has no object 'weight_map'");
      for (const auto& [name, shard] : root["weight_map"].items()) {
        if (!shard.is_string())
          bad(index, fmt::format("'weight_map' gives {} a {}, expected a file name", quote(name), shard.type_name()));
        const auto& shard_name = shard.get_ref<const std::string&>();
        // Shards lie in the folder itself; nothing outside it is opened.
        if (shard_name.empty() || shard_name == "." || shard_name == ".." ||
            shard_name.find_first_of(std::string_view("/\0", 2)) != std::string::npos)
          bad(index, fmt::format("'weight_map' gives {} the file {}, expected a plain file name", quote(name),
                                 quote(shard_name)));
        names_of_shard[shard_name].push_back(name);
      }
    }
    if (names_of_shard.empty()) bad(index, "'weight_map' is empty");
    for (const auto& [shard_name, names] : names_of_shard) {
      const std::string path = folder_ + "/" + shard_name;
      if (!exists(path)) bad(index, fmt::format("shard {} is missing", quote(shard_name)));
      const SafetensorsFile& file = add_file(path);
      for (const std::string& name : names)
        if (file.find(name) == nullptr)
          bad(index, fmt::format("tensor {} should lie in {}, but does not", quote(name), quote(shard_name)));
      if (file.tensors().size() > names.size())
        warnings_.push_back(fmt::format("{}: {} tensors of {} are not in the index; they are used nevertheless", index,
                                        file.tensors().size() - names.size(), quote(shard_name)));
    }
  }

  const std::string folder_;
  ConfigMetadata metadata_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<TensorInfo> tensors_;
  std::vector<uint32_t> by_name_;  // sorted by name
  std::vector<std::string> warnings_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_hugging_face(const std::string& folder) {
  return std::make_unique<HuggingFaceCheckpoint>(folder);
}

}  // namespace beryl
