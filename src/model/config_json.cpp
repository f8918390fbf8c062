#include "model/config_json.h"

#include <cmath>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace beryl {
namespace {

using Json = nlohmann::ordered_json;

Json rope_json(const RopeSpec& rope) {
  Json json = {{"rope_theta", rope.base}};
  switch (rope.scaling) {
    case RopeSpec::Scaling::kNone: json["rope_type"] = "default"; break;
    case RopeSpec::Scaling::kLinear:
      json["rope_type"] = "linear";
      json["factor"] = rope.factor;
      break;
    case RopeSpec::Scaling::kLlama3:
      json["rope_type"] = "llama3";
      json["factor"] = rope.factor;
      json["low_freq_factor"] = rope.low_frequency_factor;
      json["high_freq_factor"] = rope.high_frequency_factor;
      json["original_max_position_embeddings"] = rope.original_context;
      break;
    case RopeSpec::Scaling::kProportional:
      json["rope_type"] = "proportional";
      json["partial_rotary_factor"] = rope.rotated_share;
      break;
    case RopeSpec::Scaling::kDivisors: BERYL_CHECK(false, "config.json has no place for divisors");
  }
  return json;
}

const LayerSpec* first_layer(const ModelConfig& config, bool slides) {
  for (const LayerSpec& layer : config.layers)
    if ((layer.attention.window > 0) == slides) return &layer;
  return nullptr;
}

void add_layer_types(const ModelConfig& config, Json& json) {
  Json types = Json::array();
  for (const LayerSpec& layer : config.layers)
    types.push_back(layer.attention.window > 0 ? "sliding_attention" : "full_attention");
  json["layer_types"] = types;
}

// One number where all layers have the same.
Json ffn_dims(const ModelConfig& config) {
  std::vector<int64_t> dims;
  bool same = true;
  for (const LayerSpec& layer : config.layers) {
    dims.push_back(layer.ffn.dim);
    same = same && layer.ffn.dim == dims.front();
  }
  return same ? Json(dims.front()) : Json(dims);
}

void add_llama(const ModelConfig& config, Json& json) {
  const AttentionSpec& attention = config.layers.front().attention;
  json["model_type"] = "llama";
  json["hidden_act"] = "silu";
  json["num_key_value_heads"] = attention.n_kv_heads;
  json["head_dim"] = attention.head_dim;
  json["rope_theta"] = attention.rope.base;
  json["rope_parameters"] = rope_json(attention.rope);
}

void add_sliding(const ModelConfig& config, const LayerSpec& sliding, const LayerSpec& global, Json& json) {
  json["hidden_activation"] = "gelu_pytorch_tanh";
  json["num_key_value_heads"] = sliding.attention.n_kv_heads;
  json["head_dim"] = sliding.attention.head_dim;
  json["sliding_window"] = sliding.attention.window;
  json["rope_parameters"] = {{"full_attention", rope_json(global.attention.rope)},
                             {"sliding_attention", rope_json(sliding.attention.rope)}};
  if (config.final_softcap > 0) json["final_logit_softcapping"] = config.final_softcap;
  add_layer_types(config, json);
}

void add_gemma3(const ModelConfig& config, const LayerSpec& sliding, const LayerSpec& global, Json& json) {
  json["model_type"] = "gemma3_text";
  add_sliding(config, sliding, global, json);
  // The reader takes the root of it: rounded, so that 168 comes back as 168.
  json["query_pre_attn_scalar"] = std::round(1 / (global.attention.scale * global.attention.scale));
}

void add_gemma4(const ModelConfig& config, const LayerSpec& sliding, const LayerSpec& global, Json& json) {
  json["model_type"] = "gemma4_text";
  add_sliding(config, sliding, global, json);
  json["global_head_dim"] = global.attention.head_dim;
  json["num_global_key_value_heads"] = global.attention.n_kv_heads;
  json["attention_k_eq_v"] = global.attention.v_from_k;
  json["hidden_size_per_layer_input"] = config.per_layer_dim;
  int n_shared = 0;
  for (int i = 0; i < config.n_layers(); ++i)
    if (!config.layers[static_cast<size_t>(i)].owns_cache(i)) ++n_shared;
  json["num_kv_shared_layers"] = n_shared;
  const FfnSpec& ffn = global.ffn;
  json["enable_moe_block"] = ffn.n_experts > 0;
  if (ffn.n_experts > 0) {
    json["num_experts"] = ffn.n_experts;
    json["top_k_experts"] = ffn.top_k;
    json["moe_intermediate_size"] = ffn.expert_dim;
  }
}

}  // namespace

std::string config_json(const ModelConfig& config, bool tied) {
  Json json;
  json["num_hidden_layers"] = config.n_layers();
  json["hidden_size"] = config.model_dim;
  json["intermediate_size"] = ffn_dims(config);
  json["num_attention_heads"] = config.layers.front().attention.n_heads;
  json["vocab_size"] = config.vocab;
  json["max_position_embeddings"] = config.context;
  json["rms_norm_eps"] = config.norm_eps;
  json["tie_word_embeddings"] = tied;
  const LayerSpec* sliding = first_layer(config, true);
  const LayerSpec* global = first_layer(config, false);
  BERYL_CHECK(global != nullptr && (config.family == Family::kLlama || sliding != nullptr),
              "Gemma has layers of both kinds, Llama global ones");
  switch (config.family) {
    case Family::kLlama: add_llama(config, json); break;
    case Family::kGemma3: add_gemma3(config, *sliding, *global, json); break;
    case Family::kGemma4: add_gemma4(config, *sliding, *global, json); break;
  }
  return json.dump(2) + "\n";
}

}  // namespace beryl
