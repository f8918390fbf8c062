// Llama 3.x and models of the same shape (SmolLM2): pre-norms only, one kind of layer, rope over whole heads.
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"
#include "model/config_reader.h"
#include "weights/quote.h"

namespace beryl {

ModelConfig read_llama_config(const Checkpoint& checkpoint) {
  const bool gguf = checkpoint.container() == Container::kGguf;
  const ConfigReader reader = gguf ? ConfigReader(checkpoint, "llama.") : hugging_face_reader(checkpoint);
  const auto name = [&](const char* in_gguf, const char* in_hugging_face) { return gguf ? in_gguf : in_hugging_face; };

  ModelConfig config;
  config.family = Family::kLlama;
  const int n_layers = static_cast<int>(reader.integer(name("block_count", "num_hidden_layers"), 1, kMaxLayers));
  config.model_dim = reader.integer(name("embedding_length", "hidden_size"), 1, kMaxDim);
  config.context = reader.integer(name("context_length", "max_position_embeddings"), 1, kMaxContext);
  config.norm_eps = reader.norm_eps(name("attention.layer_norm_rms_epsilon", "rms_norm_eps"));
  config.interleaved_rope = gguf;   // GGUF's llama rows are permuted, whatever the model
  if (gguf && reader.optional_integer("expert_count", 0, kMaxExperts).value_or(0) > 0)
    reader.unsupported("expert_count", "is not 0: experts in the llama architecture (Mixtral) are not supported");

  LayerSpec layer;
  AttentionSpec& attention = layer.attention;
  attention.n_heads =
      static_cast<int>(reader.integer(name("attention.head_count", "num_attention_heads"), 1, kMaxHeads));
  attention.n_kv_heads =
      static_cast<int>(reader.optional_integer(name("attention.head_count_kv", "num_key_value_heads"), 1, kMaxHeads)
                           .value_or(attention.n_heads));
  if (attention.n_heads % attention.n_kv_heads != 0)
    reader.refuse(
        name("attention.head_count_kv", "num_key_value_heads"),
        fmt::format("is {}, a divisor of the {} heads was expected", attention.n_kv_heads, attention.n_heads));
  const auto given_dim = reader.optional_integer(name("attention.key_length", "head_dim"), 2, kMaxHeadDim);
  if (!given_dim && config.model_dim % attention.n_heads != 0)
    reader.refuse(
        name("attention.head_count", "num_attention_heads"),
        fmt::format("is {}, which does not divide the model's width {}", attention.n_heads, config.model_dim));
  attention.head_dim = static_cast<int>(given_dim.value_or(config.model_dim / attention.n_heads));
  if (attention.head_dim % 2 != 0 || attention.head_dim > kMaxHeadDim)
    reader.unsupported(name("attention.key_length", "head_dim"),
                       fmt::format("gives heads of {} values", attention.head_dim));
  attention.scale = 1 / std::sqrt(static_cast<double>(attention.head_dim));

  if (gguf) {
    const auto value_dim = reader.optional_integer("attention.value_length", 2, kMaxHeadDim);
    if (value_dim && *value_dim != attention.head_dim)
      reader.unsupported("attention.value_length", fmt::format("is {}, keys have {}", *value_dim, attention.head_dim));
    const auto rotated = reader.optional_integer("rope.dimension_count", 2, kMaxHeadDim);
    if (rotated && *rotated != attention.head_dim)
      reader.unsupported("rope.dimension_count",
                         fmt::format("is {}, whole heads of {} were expected", *rotated, attention.head_dim));
    attention.rope.base = reader.positive_or("rope.freq_base", 10000);
    const std::string scaling = reader.optional_string("rope.scaling.type").value_or("none");
    if (scaling == "linear") {
      attention.rope.scaling = RopeSpec::Scaling::kLinear;
      attention.rope.factor = reader.positive("rope.scaling.factor");
    } else if (scaling != "none") {
      reader.unsupported("rope.scaling.type", fmt::format("is {}; none and linear are supported", quote(scaling)));
    }
    std::vector<float> divisors = rope_divisors(checkpoint, attention.head_dim);
    if (!divisors.empty()) {
      if (attention.rope.scaling != RopeSpec::Scaling::kNone)
        reader.unsupported("rope.scaling.type", "is given together with the tensor 'rope_freqs.weight'");
      attention.rope.scaling = RopeSpec::Scaling::kDivisors;
      attention.rope.divisors = std::move(divisors);
    }
  } else {
    for (const char* bias : {"attention_bias", "mlp_bias"})
      if (reader.boolean_or(bias, false)) reader.unsupported(bias, "is true: biases are not supported");
    const std::string activation = reader.optional_string("hidden_act").value_or("silu");
    if (activation != "silu")
      reader.unsupported("hidden_act", fmt::format("is {}; silu is supported", quote(activation)));
    const double base = reader.positive_or("rope_theta", 10000);
    attention.rope = reader.has("rope_parameters") ? read_rope(reader, "rope_parameters.", base)
                                                   : read_rope(reader, "rope_scaling.", base);
  }

  layer.ffn.activation = Activation::kSilu;
  const std::vector<int64_t> dims =
      reader.per_layer(name("feed_forward_length", "intermediate_size"), n_layers, 1, kMaxDim);
  for (int i = 0; i < n_layers; ++i) {
    layer.attention.cache_layer = i;
    layer.ffn.dim = dims[static_cast<size_t>(i)];
    config.layers.push_back(layer);
  }
  config.vocab = embedding_rows(reader, config.model_dim);
  return config;
}

}  // namespace beryl
