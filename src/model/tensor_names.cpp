#include "model/tensor_names.h"

#include <initializer_list>

#include <fmt/format.h>

#include "base/error.h"

namespace beryl {
namespace {

struct Names {
  Role role;
  bool per_layer;
  const char* gguf;           // after "blk.N." where per layer
  const char* hugging_face;   // after the prefix, and "layers.N." where per layer
};

constexpr Names kNames[] = {
    {Role::kEmbedding, false, "token_embd.weight", "embed_tokens.weight"},
    {Role::kOutputNorm, false, "output_norm.weight", "norm.weight"},
    {Role::kHead, false, "output.weight", "lm_head.weight"},
    {Role::kPerLayerEmbedding, false, "per_layer_token_embd.weight", "embed_tokens_per_layer.weight"},
    {Role::kPerLayerModelProjection, false, "per_layer_model_proj.weight", "per_layer_model_projection.weight"},
    {Role::kPerLayerProjectionNorm, false, "per_layer_proj_norm.weight", "per_layer_projection_norm.weight"},
    {Role::kAttentionNorm, true, "attn_norm.weight", "input_layernorm.weight"},
    {Role::kQ, true, "attn_q.weight", "self_attn.q_proj.weight"},
    {Role::kK, true, "attn_k.weight", "self_attn.k_proj.weight"},
    {Role::kV, true, "attn_v.weight", "self_attn.v_proj.weight"},
    {Role::kQkv, true, "attn_qkv.weight", "self_attn.qkv_proj.weight"},
    {Role::kAttentionOutput, true, "attn_output.weight", "self_attn.o_proj.weight"},
    {Role::kQNorm, true, "attn_q_norm.weight", "self_attn.q_norm.weight"},
    {Role::kKNorm, true, "attn_k_norm.weight", "self_attn.k_norm.weight"},
    {Role::kPostAttentionNorm, true, "post_attention_norm.weight", "post_attention_layernorm.weight"},
    {Role::kFfnNorm, true, "ffn_norm.weight", "pre_feedforward_layernorm.weight"},
    {Role::kGate, true, "ffn_gate.weight", "mlp.gate_proj.weight"},
    {Role::kUp, true, "ffn_up.weight", "mlp.up_proj.weight"},
    {Role::kDown, true, "ffn_down.weight", "mlp.down_proj.weight"},
    {Role::kPostFfnNorm, true, "post_ffw_norm.weight", "post_feedforward_layernorm.weight"},
    {Role::kOutputScale, true, "layer_output_scale.weight", "layer_scalar"},
    {Role::kPerLayerGate, true, "inp_gate.weight", "per_layer_input_gate.weight"},
    {Role::kPerLayerProjection, true, "proj.weight", "per_layer_projection.weight"},
    {Role::kPostPerLayerNorm, true, "post_norm.weight", "post_per_layer_input_norm.weight"},
    {Role::kRouter, true, "ffn_gate_inp.weight", "router.proj.weight"},
    {Role::kRouterScale, true, "ffn_gate_inp.scale", "router.scale"},
    {Role::kExpertScale, true, "ffn_down_exps.scale", "router.per_expert_scale"},
    {Role::kExpertGateUp, true, "ffn_gate_up_exps.weight", "experts.gate_up_proj"},
    {Role::kExpertGate, true, "ffn_gate_exps.weight", "experts.gate_proj"},
    {Role::kExpertUp, true, "ffn_up_exps.weight", "experts.up_proj"},
    {Role::kExpertDown, true, "ffn_down_exps.weight", "experts.down_proj"},
    {Role::kPostFfnNorm1, true, "post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"},
    {Role::kPreFfnNorm2, true, "pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"},
    {Role::kPostFfnNorm2, true, "post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"},
};

}  // namespace

TensorNames::TensorNames(const Checkpoint& checkpoint) : container_(checkpoint.container()) {
  if (container_ == Container::kGguf) return;
  prefix_ = "model.";
  for (const char* prefix : {"model.language_model.", "language_model.model.", "model."})
    if (checkpoint.find(std::string(prefix) + "embed_tokens.weight") != nullptr) {
      prefix_ = prefix;
      break;
    }
  if (checkpoint.find("language_model.lm_head.weight") != nullptr) head_prefix_ = "language_model.";
}

std::string TensorNames::of(Role role, int layer, Family family) const {
  for (const Names& names : kNames) {
    if (names.role != role) continue;
    BERYL_CHECK(names.per_layer == (layer >= 0), "a layer is given exactly where a tensor belongs to one");
    if (container_ == Container::kGguf)
      return names.per_layer ? fmt::format("blk.{}.{}", layer, names.gguf) : std::string(names.gguf);
    if (role == Role::kHead) return head_prefix_ + names.hugging_face;
    const char* own = family == Family::kLlama && role == Role::kFfnNorm ? "post_attention_layernorm.weight"
                                                                         : names.hugging_face;
    return names.per_layer ? fmt::format("{}layers.{}.{}", prefix_, layer, own) : prefix_ + own;
  }
  BERYL_CHECK(false, "every role has a name");
  return {};
}

}  // namespace beryl
