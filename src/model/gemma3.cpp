// Gemma 3 (270M to 27B): norms before and after each block, q and k normed, five sliding layers to one global.
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"
#include "model/config_reader.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr int64_t kDefaultPeriod = 6;   // every sixth layer is global

// GGUF: a period, an array of bools (true = sliding), or nothing. Hugging Face: layer_types, or a period under two
// names.
std::vector<bool> read_sliding(const ConfigReader& reader, bool gguf, int n_layers) {
  int64_t period = kDefaultPeriod;
  if (gguf) {
    const std::string key = "attention.sliding_window_pattern";
    if (reader.is_array(key)) {
      const std::vector<int64_t> pattern = reader.per_layer(key, n_layers, 0, 1);
      return {pattern.begin(), pattern.end()};
    }
    period = reader.optional_integer(key, 1, kMaxLayers).value_or(kDefaultPeriod);
  } else {
    if (const auto sliding = sliding_layers(reader, n_layers)) return *sliding;
    period = reader.optional_integer("sliding_window_pattern", 1, kMaxLayers)
                 .value_or(reader.optional_integer("_sliding_window_pattern", 1, kMaxLayers).value_or(kDefaultPeriod));
  }
  std::vector<bool> sliding;
  for (int i = 0; i < n_layers; ++i) sliding.push_back((i + 1) % period != 0);
  return sliding;
}

}  // namespace

ModelConfig read_gemma3_config(const Checkpoint& checkpoint) {
  const bool gguf = checkpoint.container() == Container::kGguf;
  const ConfigReader reader = gguf ? ConfigReader(checkpoint, "gemma3.") : hugging_face_reader(checkpoint);
  const auto name = [&](const char* in_gguf, const char* in_hugging_face) { return gguf ? in_gguf : in_hugging_face; };
  // Real config.json files leave out what equals the defaults; GGUF files do not.
  const auto integer = [&](const char* in_gguf, const char* in_hugging_face, int64_t low, int64_t high,
                           int64_t otherwise) {
    return gguf ? reader.integer(in_gguf, low, high)
                : reader.optional_integer(in_hugging_face, low, high).value_or(otherwise);
  };

  ModelConfig config;
  config.family = Family::kGemma3;
  const int n_layers = static_cast<int>(reader.integer(name("block_count", "num_hidden_layers"), 1, kMaxLayers));
  config.model_dim = reader.integer(name("embedding_length", "hidden_size"), 1, kMaxDim);
  config.context = integer("context_length", "max_position_embeddings", 1, kMaxContext, 131072);
  config.norm_eps = gguf ? reader.norm_eps("attention.layer_norm_rms_epsilon") : reader.norm_eps("rms_norm_eps", 1e-6);
  config.norm_plus_one = !gguf;   // converters to GGUF have added it
  config.embedding_scale = std::sqrt(static_cast<double>(config.model_dim));
  config.final_softcap = reader.soft_cap("final_logit_softcapping");

  LayerSpec layer;
  layer.post_norms = true;
  AttentionSpec& attention = layer.attention;
  attention.qk_norm = true;
  attention.n_heads = static_cast<int>(integer("attention.head_count", "num_attention_heads", 1, kMaxHeads, 8));
  attention.n_kv_heads = static_cast<int>(integer("attention.head_count_kv", "num_key_value_heads", 1, kMaxHeads, 4));
  attention.head_dim = static_cast<int>(integer("attention.key_length", "head_dim", 2, kMaxHeadDim, 256));
  if (attention.n_heads % attention.n_kv_heads != 0)
    reader.refuse(
        name("attention.head_count_kv", "num_key_value_heads"),
        fmt::format("is {}, a divisor of the {} heads was expected", attention.n_kv_heads, attention.n_heads));
  if (attention.head_dim % 2 != 0)
    reader.refuse(name("attention.key_length", "head_dim"),
                  fmt::format("is {}, an even number was expected", attention.head_dim));
  const int window =
      static_cast<int>(reader.integer(name("attention.sliding_window", "sliding_window"), 1, kMaxContext));

  RopeSpec global_rope, local_rope;
  if (gguf) {
    const auto value_dim = reader.optional_integer("attention.value_length", 2, kMaxHeadDim);
    if (value_dim && *value_dim != attention.head_dim)
      reader.unsupported("attention.value_length", fmt::format("is {}, keys have {}", *value_dim, attention.head_dim));
    global_rope.base = reader.positive_or("rope.freq_base", 1e6);
    local_rope.base = reader.positive_or("rope.freq_base_swa", 1e4);
    const std::string scaling = reader.optional_string("rope.scaling.type").value_or("none");
    if (scaling == "linear") {
      global_rope.scaling = RopeSpec::Scaling::kLinear;
      global_rope.factor = reader.positive("rope.scaling.factor");
    } else if (scaling != "none") {
      reader.unsupported("rope.scaling.type", fmt::format("is {}; none and linear are supported", quote(scaling)));
    }
    // The file does not hold the scale. It is head_dim^-1/2 in every size but 27B, which is told by its 62 layers.
    constexpr int kLayersOf27B = 62;
    const double scale_dim = n_layers == kLayersOf27B ? static_cast<double>(config.model_dim) / attention.n_heads
                                                      : static_cast<double>(attention.head_dim);
    attention.scale = 1 / std::sqrt(scale_dim);
  } else {
    const std::string activation = reader.optional_string("hidden_activation").value_or("gelu_pytorch_tanh");
    if (activation != "gelu_pytorch_tanh")
      reader.unsupported("hidden_activation", fmt::format("is {}; gelu_pytorch_tanh is supported", quote(activation)));
    if (reader.boolean_or("attention_bias", false))
      reader.unsupported("attention_bias", "is true: biases are not supported");
    if (reader.has("rope_parameters")) {
      global_rope = read_rope(reader, "rope_parameters.full_attention.", 1e6);
      local_rope = read_rope(reader, "rope_parameters.sliding_attention.", 1e4);
    } else {
      global_rope = read_rope(reader, "rope_scaling.", reader.positive_or("rope_theta", 1e6));
      local_rope.base = reader.positive_or("rope_local_base_freq", 1e4);
    }
    if (reader.boolean_or("use_bidirectional_attention", false))
      reader.unsupported("use_bidirectional_attention", "is true: models that embed texts are not supported");
    attention.scale = 1 / std::sqrt(reader.positive_or("query_pre_attn_scalar", 256));
    attention.softcap = reader.soft_cap("attn_logit_softcapping");
  }

  layer.ffn.activation = Activation::kGeluTanh;
  const std::vector<int64_t> dims =
      reader.per_layer(name("feed_forward_length", "intermediate_size"), n_layers, 1, kMaxDim);
  const std::vector<bool> sliding = read_sliding(reader, gguf, n_layers);
  for (int i = 0; i < n_layers; ++i) {
    const bool slides = sliding[static_cast<size_t>(i)];
    attention.window = slides ? window : 0;
    attention.rope = slides ? local_rope : global_rope;
    attention.cache_layer = i;
    layer.ffn.dim = dims[static_cast<size_t>(i)];
    config.layers.push_back(layer);
  }
  config.vocab = embedding_rows(reader, config.model_dim);
  return config;
}

}  // namespace beryl
