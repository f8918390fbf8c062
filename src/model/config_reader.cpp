#include "model/config_reader.h"

#include <cmath>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"
#include "model/tensor_names.h"
#include "weights/quote.h"

namespace beryl {

void ConfigReader::refuse(const std::string& name, const std::string& what) const {
  throw Error(ErrorCode::kBadInput, fmt::format("{}: '{}' {}", checkpoint_.path(), key(name), what));
}

void ConfigReader::unsupported(const std::string& name, const std::string& what) const {
  throw Error(ErrorCode::kUnsupported, fmt::format("{}: '{}' {}", checkpoint_.path(), key(name), what));
}

int64_t ConfigReader::check_range(const std::string& name, int64_t value, int64_t low, int64_t high) const {
  if (value < low || value > high)
    refuse(name, fmt::format("is {}, a value from {} to {} was expected", value, low, high));
  return value;
}

std::optional<int64_t> ConfigReader::optional_integer(const std::string& name, int64_t low, int64_t high) const {
  const std::optional<int64_t> value = metadata().integer(key(name));
  if (!value) return std::nullopt;
  return check_range(name, *value, low, high);
}

int64_t ConfigReader::integer(const std::string& name, int64_t low, int64_t high) const {
  const std::optional<int64_t> value = optional_integer(name, low, high);
  if (!value) refuse(name, "is missing");
  return *value;
}

std::optional<double> ConfigReader::optional_number(const std::string& name) const {
  const std::optional<double> value = metadata().number(key(name));
  if (value && !std::isfinite(*value)) refuse(name, fmt::format("is {}, a finite number was expected", *value));
  return value;
}

double ConfigReader::number(const std::string& name) const {
  const std::optional<double> value = optional_number(name);
  if (!value) refuse(name, "is missing");
  return *value;
}

double ConfigReader::positive(const std::string& name) const {
  const double value = number(name);
  if (!(value > 0)) refuse(name, fmt::format("is {}, a positive number was expected", value));
  return value;
}

double ConfigReader::positive_or(const std::string& name, double otherwise) const {
  return optional_number(name) ? positive(name) : otherwise;
}

double ConfigReader::soft_cap(const std::string& name) const {
  const double value = optional_number(name).value_or(0);
  if (value < 0) refuse(name, fmt::format("is {}, a positive number or none was expected", value));
  return value;
}

double ConfigReader::norm_eps(const std::string& name, std::optional<double> otherwise) const {
  const double value = otherwise ? optional_number(name).value_or(*otherwise) : number(name);
  if (!(value > 0 && value < 1)) refuse(name, fmt::format("is {}, a small positive number was expected", value));
  return value;
}

bool ConfigReader::boolean_or(const std::string& name, bool otherwise) const {
  return metadata().boolean(key(name)).value_or(otherwise);
}

std::optional<std::string> ConfigReader::optional_string(const std::string& name) const {
  return metadata().string(key(name));
}

std::optional<std::vector<int64_t>> ConfigReader::optional_array(const std::string& name, int n) const {
  std::optional<std::vector<int64_t>> values = metadata().integers(key(name));
  if (values && static_cast<int>(values->size()) != n)
    refuse(name, fmt::format("has {} values, one for each of {} layers was expected", values->size(), n));
  return values;
}

std::vector<int64_t> ConfigReader::per_layer(const std::string& name, int n_layers, int64_t low, int64_t high) const {
  if (!has(name)) refuse(name, "is missing");
  if (!is_array(name)) return std::vector<int64_t>(static_cast<size_t>(n_layers), integer(name, low, high));
  std::vector<int64_t> values = *optional_array(name, n_layers);
  for (int64_t value : values) check_range(name, value, low, high);
  return values;
}

ConfigReader hugging_face_reader(const Checkpoint& checkpoint) {
  return ConfigReader(checkpoint, checkpoint.metadata().has("text_config") ? "text_config." : "");
}

std::optional<std::vector<bool>> sliding_layers(const ConfigReader& reader, int n_layers) {
  const std::shared_ptr<const StringList> types = reader.checkpoint().metadata().strings(reader.key("layer_types"));
  if (!types) return std::nullopt;
  if (static_cast<int>(types->size()) != n_layers)
    reader.refuse("layer_types",
                  fmt::format("has {} values, one for each of {} layers was expected", types->size(), n_layers));
  std::vector<bool> sliding;
  for (size_t i = 0; i < types->size(); ++i) {
    const std::string_view type = (*types)[i];
    if (type != "sliding_attention" && type != "full_attention")
      reader.unsupported("layer_types",
                         fmt::format("holds {}, sliding_attention or full_attention was expected", quote(type)));
    sliding.push_back(type == "sliding_attention");
  }
  return sliding;
}

RopeSpec read_rope(const ConfigReader& reader, const std::string& prefix, double default_base) {
  RopeSpec rope;
  rope.base = reader.positive_or(prefix + "rope_theta", default_base);
  std::optional<std::string> type = reader.optional_string(prefix + "rope_type");
  if (!type) type = reader.optional_string(prefix + "type");
  if (!type)   // a scaling whose kind is lost must not become none
    for (const char* name : {"factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"})
      if (reader.has(prefix + name)) reader.refuse(prefix + "rope_type", fmt::format("is missing, but '{}' is there", name));
  if (!type || *type == "default") return rope;
  const auto positive = [&](const char* name) { return reader.positive(prefix + name); };
  if (*type == "linear") {
    rope.scaling = RopeSpec::Scaling::kLinear;
    rope.factor = positive("factor");
  } else if (*type == "llama3") {
    rope.scaling = RopeSpec::Scaling::kLlama3;
    rope.factor = positive("factor");
    rope.low_frequency_factor = positive("low_freq_factor");
    rope.high_frequency_factor = positive("high_freq_factor");
    rope.original_context = positive("original_max_position_embeddings");
    if (rope.high_frequency_factor <= rope.low_frequency_factor)
      reader.refuse(prefix + "high_freq_factor", fmt::format("is {}, a number above low_freq_factor {} was expected",
                                                             rope.high_frequency_factor, rope.low_frequency_factor));
  } else if (*type == "proportional") {
    rope.scaling = RopeSpec::Scaling::kProportional;
    rope.rotated_share = reader.optional_number(prefix + "partial_rotary_factor").value_or(1.0);
    if (!(rope.rotated_share > 0 && rope.rotated_share <= 1))
      reader.refuse(prefix + "partial_rotary_factor",
                    fmt::format("is {}, a share from 0 to 1 was expected", rope.rotated_share));
  } else {
    reader.unsupported(prefix + "rope_type",
                       fmt::format("is {}; default, linear, llama3 and proportional are supported", quote(*type)));
  }
  return rope;
}

std::vector<float> rope_divisors(const Checkpoint& checkpoint, int head_dim) {
  const TensorInfo* tensor = checkpoint.find("rope_freqs.weight");
  if (tensor == nullptr) return {};
  if (tensor->format != Format::kF32 || tensor->shape != std::vector<int64_t>{head_dim / 2})
    throw Error(ErrorCode::kBadInput,
                fmt::format("{}: tensor 'rope_freqs.weight' is {} [{}], f32 [{}] was expected", checkpoint.path(),
                            info(tensor->format).name, fmt::join(tensor->shape, ", "), head_dim / 2));
  std::vector<float> divisors = floats_of(checkpoint, *tensor);
  for (float divisor : divisors)
    if (!(divisor > 0))
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{}: tensor 'rope_freqs.weight' holds {}, positive divisors were expected",
                              checkpoint.path(), divisor));
  return divisors;
}

int64_t embedding_rows(const ConfigReader& reader, int64_t model_dim) {
  const Checkpoint& checkpoint = reader.checkpoint();
  const TensorNames names(checkpoint);
  const std::string name = names.of(Role::kEmbedding);
  const TensorInfo* tensor = checkpoint.find(name);
  if (tensor == nullptr)
    throw Error(ErrorCode::kBadInput, fmt::format("{}: tensor '{}' is missing", checkpoint.path(), name));
  const HostMatrix matrix = matrix_of(checkpoint, *tensor);
  if (matrix.cols != model_dim || matrix.rows < 1 || matrix.rows > kMaxVocab || matrix.stack != 1)
    throw Error(ErrorCode::kBadInput, fmt::format("{}: tensor '{}' is [{}, {}], [vocabulary, {}] was expected",
                                                  checkpoint.path(), name, matrix.rows, matrix.cols, model_dim));
  const auto stated = reader.optional_integer("vocab_size", 1, kMaxVocab);
  if (stated && *stated != matrix.rows)
    reader.refuse("vocab_size", fmt::format("is {}, but tensor '{}' has {} rows", *stated, name, matrix.rows));
  return matrix.rows;
}

}  // namespace beryl
