// Gemma 4 text models: dense with K=V globals (12B, 31B), per-layer embeddings and shared KV (E2B, E4B), experts
// (26B-A4B). Sliding and global layers differ in head width, KV heads and rope.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "base/error.h"
#include "model/config_reader.h"
#include "model/tensor_names.h"
#include "weights/quote.h"

namespace beryl {
namespace {

constexpr int kDefaultGlobalHeadDim = 512;

struct Geometry {
  int head_dim;
  int n_kv_heads;
};

// Both forms of config.json: global_head_dim and num_global_key_value_heads beside the flat keys (published
// checkpoints), or per_layer_config with overrides by layer index (recent transformers), where layers that are not
// listed have the flat values.
Geometry hugging_face_geometry(const ConfigReader& reader, int layer, bool slides, bool k_eq_v) {
  const int flat_dim = static_cast<int>(reader.integer("head_dim", 2, kMaxHeadDim));
  const int flat_kv = static_cast<int>(reader.integer("num_key_value_heads", 1, kMaxHeads));
  if (slides) return {flat_dim, flat_kv};
  const std::string own = fmt::format("per_layer_config.{}.", layer);
  Geometry geometry{reader.has("per_layer_config") ? flat_dim : kDefaultGlobalHeadDim, flat_kv};
  if (const auto dim = reader.optional_integer(own + "head_dim", 2, kMaxHeadDim)) {
    geometry.head_dim = static_cast<int>(*dim);
  } else if (const auto global_dim = reader.optional_integer("global_head_dim", 2, kMaxHeadDim)) {
    geometry.head_dim = static_cast<int>(*global_dim);
  }
  if (k_eq_v) {
    if (const auto kv = reader.optional_integer(own + "num_key_value_heads", 1, kMaxHeads)) {
      geometry.n_kv_heads = static_cast<int>(*kv);
    } else if (const auto global_kv = reader.optional_integer("num_global_key_value_heads", 1, kMaxHeads)) {
      geometry.n_kv_heads = static_cast<int>(*global_kv);
    }
  }
  return geometry;
}

// GGUF has no key for K=V: those files hold no attn_v on any global layer that owns its cache. One that lacks it on
// some is damaged, which the loader then reports as a missing tensor.
bool gguf_k_eq_v(const Checkpoint& checkpoint, const std::vector<bool>& sliding, int first_shared) {
  const TensorNames names(checkpoint);
  bool any_global = false;
  for (int i = 0; i < first_shared; ++i) {
    if (sliding[static_cast<size_t>(i)]) continue;
    any_global = true;
    if (checkpoint.find(names.of(Role::kV, i)) != nullptr || checkpoint.find(names.of(Role::kQkv, i)) != nullptr)
      return false;
  }
  return any_global;
}

}  // namespace

ModelConfig read_gemma4_config(const Checkpoint& checkpoint) {
  const bool gguf = checkpoint.container() == Container::kGguf;
  const ConfigReader reader = gguf ? ConfigReader(checkpoint, "gemma4.") : hugging_face_reader(checkpoint);
  const auto name = [&](const char* in_gguf, const char* in_hugging_face) { return gguf ? in_gguf : in_hugging_face; };

  ModelConfig config;
  config.family = Family::kGemma4;
  const int n_layers = static_cast<int>(reader.integer(name("block_count", "num_hidden_layers"), 1, kMaxLayers));
  config.model_dim = reader.integer(name("embedding_length", "hidden_size"), 1, kMaxDim);
  config.context = reader.integer(name("context_length", "max_position_embeddings"), 1, kMaxContext);
  config.norm_eps = reader.norm_eps(name("attention.layer_norm_rms_epsilon", "rms_norm_eps"));
  config.embedding_scale = std::sqrt(static_cast<double>(config.model_dim));
  config.final_softcap = reader.soft_cap("final_logit_softcapping");
  config.per_layer_dim =
      reader.optional_integer(name("embedding_length_per_layer_input", "hidden_size_per_layer_input"), 0, kMaxDim)
          .value_or(0);

  const int n_heads =
      static_cast<int>(reader.integer(name("attention.head_count", "num_attention_heads"), 1, kMaxHeads));
  const int window =
      static_cast<int>(reader.integer(name("attention.sliding_window", "sliding_window"), 1, kMaxContext));
  const int n_shared = static_cast<int>(
      reader.optional_integer(name("attention.shared_kv_layers", "num_kv_shared_layers"), 0, n_layers - 1).value_or(0));
  const int first_shared = n_layers - n_shared;

  std::vector<bool> sliding;
  if (gguf) {
    const std::vector<int64_t> pattern = reader.per_layer("attention.sliding_window_pattern", n_layers, 0, 1);
    sliding.assign(pattern.begin(), pattern.end());
  } else {
    const auto types = sliding_layers(reader, n_layers);
    if (!types) reader.refuse("layer_types", "is missing");
    sliding = *types;
  }

  // No size with per-layer embeddings has K=V, so a V that is missing there is missing.
  const bool k_eq_v = gguf ? config.per_layer_dim == 0 && gguf_k_eq_v(checkpoint, sliding, first_shared)
                           : reader.boolean_or("attention_k_eq_v", false);
  RopeSpec global_rope, local_rope;
  std::vector<Geometry> geometry;
  if (gguf) {
    const int global_dim = static_cast<int>(reader.integer("attention.key_length", 2, kMaxHeadDim));
    const int local_dim = static_cast<int>(reader.integer("attention.key_length_swa", 2, kMaxHeadDim));
    for (const auto& [key, dim] :
         {std::pair{"attention.value_length", global_dim}, std::pair{"attention.value_length_swa", local_dim}})
      if (const auto value_dim = reader.optional_integer(key, 2, kMaxHeadDim); value_dim && *value_dim != dim)
        reader.unsupported(key, fmt::format("is {}, keys have {}", *value_dim, dim));
    const std::vector<int64_t> kv_heads = reader.per_layer("attention.head_count_kv", n_layers, 1, kMaxHeads);
    for (int i = 0; i < n_layers; ++i)
      geometry.push_back({sliding[static_cast<size_t>(i)] ? local_dim : global_dim,
                          static_cast<int>(kv_heads[static_cast<size_t>(i)])});
    global_rope.base = reader.positive_or("rope.freq_base", 1e6);
    local_rope.base = reader.positive_or("rope.freq_base_swa", 1e4);
    global_rope.divisors = rope_divisors(checkpoint, global_dim);
    // Without the tensor nothing says which pairs turn, and turning all of them would be silently wrong.
    if (global_rope.divisors.empty())
      throw Error(ErrorCode::kBadInput, fmt::format("{}: tensor 'rope_freqs.weight' is missing", checkpoint.path()));
    global_rope.scaling = RopeSpec::Scaling::kDivisors;
  } else {
    const std::string activation = reader.optional_string("hidden_activation").value_or("gelu_pytorch_tanh");
    if (activation != "gelu_pytorch_tanh")
      reader.unsupported("hidden_activation", fmt::format("is {}; gelu_pytorch_tanh is supported", quote(activation)));
    if (reader.boolean_or("attention_bias", false))
      reader.unsupported("attention_bias", "is true: biases are not supported");
    for (int i = 0; i < n_layers; ++i)
      geometry.push_back(hugging_face_geometry(reader, i, sliding[static_cast<size_t>(i)], k_eq_v));
    global_rope = read_rope(reader, "rope_parameters.full_attention.", 1e6);
    local_rope = read_rope(reader, "rope_parameters.sliding_attention.", 1e4);
    if (!reader.has("rope_parameters.full_attention.rope_type")) {
      global_rope.scaling = RopeSpec::Scaling::kProportional;
      global_rope.rotated_share = 0.25;
    }
  }

  std::vector<int64_t> ffn_dims =
      reader.per_layer(name("feed_forward_length", "intermediate_size"), n_layers, 1, kMaxDim);
  if (!gguf && reader.boolean_or("use_double_wide_mlp", false))
    for (int i = first_shared; i < n_layers; ++i) ffn_dims[static_cast<size_t>(i)] *= 2;

  FfnSpec ffn;
  ffn.activation = Activation::kGeluTanh;
  const bool has_experts = gguf ? reader.optional_integer("expert_count", 0, kMaxExperts).value_or(0) > 0
                                : reader.boolean_or("enable_moe_block", false);
  if (has_experts) {
    ffn.n_experts = static_cast<int>(reader.integer(name("expert_count", "num_experts"), 1, kMaxExperts));
    ffn.top_k = static_cast<int>(reader.integer(name("expert_used_count", "top_k_experts"), 1, ffn.n_experts));
    ffn.expert_dim = reader.integer(name("expert_feed_forward_length", "moe_intermediate_size"), 1, kMaxDim);
  }

  for (int i = 0; i < n_layers; ++i) {
    const bool slides = sliding[static_cast<size_t>(i)];
    LayerSpec layer;
    layer.post_norms = true;
    layer.output_scale = true;
    layer.ffn = ffn;
    layer.ffn.dim = ffn_dims[static_cast<size_t>(i)];
    AttentionSpec& attention = layer.attention;
    attention.n_heads = n_heads;
    attention.head_dim = geometry[static_cast<size_t>(i)].head_dim;
    attention.n_kv_heads = geometry[static_cast<size_t>(i)].n_kv_heads;
    attention.window = slides ? window : 0;
    attention.rope = slides ? local_rope : global_rope;
    attention.scale = 1;
    attention.qk_norm = true;
    attention.v_norm = true;
    attention.v_from_k = k_eq_v && !slides;
    attention.cache_layer = i;
    if (attention.head_dim % 2 != 0)
      reader.refuse(name("attention.key_length", "head_dim"),
                    fmt::format("gives layer {} odd heads of {}", i, attention.head_dim));
    if (n_heads % attention.n_kv_heads != 0)
      reader.refuse(
          name("attention.head_count_kv", "num_key_value_heads"),
          fmt::format("is {} in layer {}, a divisor of the {} heads was expected", attention.n_kv_heads, i, n_heads));
    if (i >= first_shared) {
      // A sharing layer reads the last layer of its own kind that has a cache.
      int source = first_shared - 1;
      while (source >= 0 && sliding[static_cast<size_t>(source)] != slides) --source;
      if (source < 0)
        reader.refuse(name("attention.shared_kv_layers", "num_kv_shared_layers"),
                      fmt::format("is {}: layer {} has no earlier layer of its kind to share with", n_shared, i));
      const AttentionSpec& owner = config.layers[static_cast<size_t>(source)].attention;
      const auto refuse_other = [&](const char* key, int own, int owners) {
        if (own != owners)
          reader.refuse(key,
                        fmt::format("is {} in layer {}, {} in layer {}, whose cache it reads", own, i, owners, source));
      };
      refuse_other(name("attention.key_length", "head_dim"), attention.head_dim, owner.head_dim);
      refuse_other(name("attention.head_count_kv", "num_key_value_heads"), attention.n_kv_heads, owner.n_kv_heads);
      attention.cache_layer = source;
      attention.v_from_k = owner.v_from_k;
    }
    config.layers.push_back(layer);
  }
  config.vocab = embedding_rows(reader, config.model_dim);
  return config;
}

}  // namespace beryl
