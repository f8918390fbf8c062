// How the families' readers look at metadata: required and optional values, checked ranges, messages that name the key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"

namespace beryl {

// Limits of plausible geometry: a damaged file must not ask for absurd memory.
inline constexpr int64_t kMaxLayers = 512;
inline constexpr int64_t kMaxHeads = 1024;
inline constexpr int64_t kMaxHeadDim = 1024;
inline constexpr int64_t kMaxDim = 1 << 20;
inline constexpr int64_t kMaxVocab = 1 << 22;
inline constexpr int64_t kMaxContext = 1 << 24;
inline constexpr int64_t kMaxExperts = 4096;

// Keys of one family under a common prefix ("gemma4." in GGUF; "" or "text_config." in config.json).
class ConfigReader {
 public:
  ConfigReader(const Checkpoint& checkpoint, std::string prefix)
      : checkpoint_(checkpoint), prefix_(std::move(prefix)) {}

  std::string key(const std::string& name) const { return prefix_ + name; }
  bool has(const std::string& name) const { return metadata().has(key(name)); }
  bool is_array(const std::string& name) const { return metadata().is_array(key(name)); }

  int64_t integer(const std::string& name, int64_t low, int64_t high) const;
  std::optional<int64_t> optional_integer(const std::string& name, int64_t low, int64_t high) const;
  double number(const std::string& name) const;                       // finite
  std::optional<double> optional_number(const std::string& name) const;
  double positive(const std::string& name) const;
  double positive_or(const std::string& name, double otherwise) const;
  double soft_cap(const std::string& name) const;                     // 0 when absent: none
  double norm_eps(const std::string& name, std::optional<double> otherwise = {}) const;
  bool boolean_or(const std::string& name, bool otherwise) const;
  std::optional<std::string> optional_string(const std::string& name) const;
  // A value a layer: an array of n, or one number for all.
  std::vector<int64_t> per_layer(const std::string& name, int n_layers, int64_t low, int64_t high) const;
  std::optional<std::vector<int64_t>> optional_array(const std::string& name, int n) const;

  [[noreturn]] void refuse(const std::string& name, const std::string& what) const;        // kBadInput
  [[noreturn]] void unsupported(const std::string& name, const std::string& what) const;   // kUnsupported
  const Checkpoint& checkpoint() const { return checkpoint_; }

 private:
  const Metadata& metadata() const { return checkpoint_.metadata(); }
  int64_t check_range(const std::string& name, int64_t value, int64_t low, int64_t high) const;
  const Checkpoint& checkpoint_;
  std::string prefix_;
};

// config.json: the keys lie flat, or under text_config in multimodal checkpoints.
ConfigReader hugging_face_reader(const Checkpoint& checkpoint);

// True for sliding layers; from "layer_types" ("sliding_attention", "full_attention"). nullopt when absent.
std::optional<std::vector<bool>> sliding_layers(const ConfigReader& reader, int n_layers);

// "rope_parameters" of recent config.json files (at `prefix`), or "rope_scaling" with the base given beside it.
RopeSpec read_rope(const ConfigReader& reader, const std::string& prefix, double default_base);

// GGUF's "rope_freqs.weight", when there: [head_dim / 2] divisors. Empty when absent.
std::vector<float> rope_divisors(const Checkpoint& checkpoint, int head_dim);

// Rows of the embedding table: the vocabulary's size is what the file holds.
int64_t embedding_rows(const ConfigReader& reader, int64_t model_dim);

}  // namespace beryl
