#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numbers>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/mapped_file.h"
#include "weights/json_text.h"
#include "model/config_reader.h"
#include "weights/quote.h"

namespace beryl {

std::vector<double> rope_frequencies(const RopeSpec& rope, int head_dim) {
  const int n_pairs = head_dim / 2;
  std::vector<double> frequencies(static_cast<size_t>(n_pairs));
  for (int j = 0; j < n_pairs; ++j) {
    double f = std::pow(rope.base, -2.0 * j / head_dim);
    switch (rope.scaling) {
      case RopeSpec::Scaling::kNone: break;
      case RopeSpec::Scaling::kLinear: f /= rope.factor; break;
      case RopeSpec::Scaling::kLlama3: {
        const double wavelength = 2 * std::numbers::pi / f;
        const double blend = std::clamp((rope.original_context / wavelength - rope.low_frequency_factor) /
                                            (rope.high_frequency_factor - rope.low_frequency_factor), 0.0, 1.0);
        f = (1 - blend) * f / rope.factor + blend * f;
        break;
      }
      case RopeSpec::Scaling::kProportional:
        if (j >= static_cast<int>(rope.rotated_share * head_dim / 2)) f = 0;
        break;
      case RopeSpec::Scaling::kDivisors: {
        // Converters write 1e30 for a pair that does not turn.
        constexpr double kNever = 1e20;
        const double divisor = rope.divisors[static_cast<size_t>(j)];
        f = divisor > kNever ? 0 : f / divisor;
        break;
      }
    }
    frequencies[static_cast<size_t>(j)] = f;
  }
  return frequencies;
}

const char* family_name(Family family) {
  switch (family) {
    case Family::kLlama: return "Llama";
    case Family::kGemma3: return "Gemma 3";
    case Family::kGemma4: return "Gemma 4";
  }
  return "";
}

namespace {

// Far more than real files have (a few hundred bytes), and little to parse.
constexpr size_t kMaxGenerationConfigBytes = 1 << 20;

// Ids that the model's makers say must never be sampled. GGUF has a key; Hugging Face a file beside config.json.
std::vector<int32_t> read_suppressed_tokens(const Checkpoint& checkpoint, int64_t vocab) {
  std::vector<int64_t> ids;
  std::string where;
  if (checkpoint.container() == Container::kGguf) {
    where = fmt::format("{}: 'tokenizer.ggml.suppress_tokens'", checkpoint.path());
    ids = checkpoint.metadata().integers("tokenizer.ggml.suppress_tokens").value_or(std::vector<int64_t>{});
  } else {
    const std::filesystem::path file = std::filesystem::path(checkpoint.path()) / "generation_config.json";
    where = fmt::format("{}: 'suppress_tokens'", file.string());
    if (!std::filesystem::exists(file)) return {};
    const MappedFile mapped(file.string());
    if (mapped.bytes().size() > kMaxGenerationConfigBytes)
      throw Error(ErrorCode::kBadInput, fmt::format("{}: {} bytes, at most {} are allowed", file.string(), mapped.bytes().size(),
                                                    kMaxGenerationConfigBytes));
    const auto json = parse_json<nlohmann::json>(
        file.string(), {reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()});
    if (!json.is_object())
      throw Error(ErrorCode::kBadInput, fmt::format("{}: holds a JSON {}, an object was expected", file.string(), json.type_name()));
    const auto entry = json.find("suppress_tokens");
    if (entry == json.end() || entry->is_null()) return {};
    if (!entry->is_array()) throw Error(ErrorCode::kBadInput, fmt::format("{} is not an array of token ids", where));
    for (const nlohmann::json& id : *entry) {
      if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() > INT64_MAX))
        throw Error(ErrorCode::kBadInput, fmt::format("{} holds something that is no id", where));
      ids.push_back(id.get<int64_t>());
    }
  }
  std::vector<int32_t> result;
  for (int64_t id : ids) {
    if (id < 0 || id >= vocab)
      throw Error(ErrorCode::kBadInput, fmt::format("{} holds {}, the vocabulary has {} tokens", where, id, vocab));
    result.push_back(static_cast<int32_t>(id));
  }
  return result;
}

}  // namespace

ModelConfig read_config(const Checkpoint& checkpoint) {
  constexpr const char* kSupported = "llama, gemma3 and gemma4 are supported";
  const Metadata& metadata = checkpoint.metadata();
  std::string architecture;
  ModelConfig config;
  if (checkpoint.container() == Container::kGguf) {
    architecture = metadata.string("general.architecture").value_or("");
    if (architecture.empty())
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{}: 'general.architecture' is missing; {}", checkpoint.path(), kSupported));
    if (architecture == "llama") {
      config = read_llama_config(checkpoint);
    } else if (architecture == "gemma3") {
      config = read_gemma3_config(checkpoint);
    } else if (architecture == "gemma4") {
      config = read_gemma4_config(checkpoint);
    } else {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: architecture {}; {}", checkpoint.path(), quote(architecture), kSupported));
    }
    config.name = metadata.string("general.name").value_or("");
  } else {
    architecture = metadata.string("model_type").value_or("");
    if (architecture.empty())
      throw Error(ErrorCode::kBadInput,
                  fmt::format("{}: config.json has no 'model_type'; {}", checkpoint.path(), kSupported));
    if (architecture == "llama") {
      config = read_llama_config(checkpoint);
    } else if (architecture == "gemma3" || architecture == "gemma3_text") {
      config = read_gemma3_config(checkpoint);
    } else if (architecture == "gemma4" || architecture == "gemma4_text" || architecture == "gemma4_unified" ||
               architecture == "gemma4_unified_text") {
      config = read_gemma4_config(checkpoint);
    } else {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("{}: model_type {}; {}", checkpoint.path(), quote(architecture), kSupported));
    }
    // Multimodal checkpoints have it at the top or with the text's keys. GGUF has no key for it.
    const std::optional<bool> tied = metadata.boolean("tie_word_embeddings");
    config.untied_head = !hugging_face_reader(checkpoint).boolean_or("tie_word_embeddings", tied.value_or(true));
  }
  config.container = checkpoint.container();
  config.architecture = architecture;
  config.suppressed_tokens = read_suppressed_tokens(checkpoint, config.vocab);
  return config;
}

}  // namespace beryl
