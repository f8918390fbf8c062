#!/usr/bin/env python3
"""Write the tiny models of tests/golden as GGUF files (F32 or BF16 matrices, F32 vectors).

    python make_gguf.py --out DIR [--type f32|bf16] [NAME ...]        DIR/NAME.gguf

Needs numpy and gguf. The vocabulary is empty (tokenizer.ggml.model = "none"): such a model is fed token
ids. Names, shapes and values follow the conventions of the published GGUF files (docs/formats.md).
"""
import argparse
import os

import gguf
import numpy as np

from ref_forward import FULL, GOLDEN, SLIDING, Model, inv_freq, model_names

LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
         "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
         "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
         "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "self_attn.q_proj": "attn_q",
         "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "per_layer_input_gate": "inp_gate",
         "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp"}
LLAMA_LAYER = LAYER | {"post_attention_layernorm": "ffn_norm"}
# tensors whose HF name has no ".weight"
BARE = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight", "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
       "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
       "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight"}


def gguf_name(name, layer_names):
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in BARE:
        return f"blk.{layer}.{BARE[rest]}"
    return f"blk.{layer}.{layer_names[rest.removesuffix('.weight')]}.weight"


def interleave_rope_rows(w, heads):
    """Llama only: the rows of each head from half-split order to interleaved order."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def add_llama_keys(writer, c):
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    parameters = c["rope_parameters"]
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_freq_base(parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if parameters["rope_type"] == "llama3":          # a divisor for each pair, no scaling key
        plain = inv_freq({"rope_theta": parameters["rope_theta"]}, head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inv_freq(parameters, head_dim)).astype(np.float32))


def add_gemma3_keys(writer, c):
    parameters = c["rope_parameters"]
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(c["head_dim"])
    writer.add_value_length(c["head_dim"])
    writer.add_sliding_window(c["sliding_window"])
    writer.add_rope_freq_base(parameters[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(parameters[SLIDING]["rope_theta"])
    if parameters[FULL]["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters[FULL]["factor"])


def add_gemma4_keys(writer, c):
    parameters, n_layers = c["rope_parameters"], c["num_hidden_layers"]
    geometry = [Model.gemma4_geometry(c, i) for i in range(n_layers)]
    is_sliding = [kind == SLIDING for kind in c["layer_types"]]
    full_dim, sliding_dim = geometry[is_sliding.index(False)][0], c["head_dim"]
    n_shared = c.get("num_kv_shared_layers") or 0
    if c.get("use_double_wide_mlp"):                 # the layers that share KV have twice the width
        writer.add_feed_forward_length([c["intermediate_size"] * (2 if i >= n_layers - n_shared else 1)
                                        for i in range(n_layers)])
    else:
        writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count_kv([kv_heads for _, kv_heads in geometry])
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(sliding_dim)
    writer.add_value_length_swa(sliding_dim)
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(sliding_dim)
    writer.add_rope_freq_base(parameters[FULL]["rope_theta"])
    writer.add_rope_freq_base_swa(parameters[SLIDING]["rope_theta"])
    writer.add_sliding_window(c["sliding_window"])
    writer.add_sliding_window_pattern(is_sliding)
    writer.add_shared_kv_layers(n_shared)
    writer.add_embedding_length_per_layer_input(c.get("hidden_size_per_layer_input") or 0)
    if c.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if c.get("enable_moe_block"):
        writer.add_expert_count(c["num_experts"])
        writer.add_expert_used_count(c["top_k_experts"])
        writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    # Partial rotation: a divisor for each pair, so large that the angle of the unrotated ones vanishes.
    n_rotated = int(parameters[FULL]["partial_rotary_factor"] * full_dim // 2)
    divisors = np.r_[np.ones(n_rotated), np.full(full_dim // 2 - n_rotated, 1e30)]
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def convert(name, folder, bf16):
    model = Model(os.path.join(GOLDEN, name))
    c = model.cfg
    arch = {"gemma3_text": "gemma3", "llama": "llama"}.get(model.kind, "gemma4")
    writer = gguf.GGUFWriter(os.path.join(folder, name + ".gguf"), arch)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("none")
    {"llama": add_llama_keys, "gemma3": add_gemma3_keys, "gemma4": add_gemma4_keys}[arch](writer, c)
    layer_names = LLAMA_LAYER if arch == "llama" else LAYER
    for hf_name, v in model.w.items():
        if arch == "gemma3" and hf_name.endswith("norm.weight"):
            v = v + 1.0
        if arch == "llama" and ".q_proj." in hf_name:
            v = interleave_rope_rows(v, c["num_attention_heads"])
        if arch == "llama" and ".k_proj." in hf_name:
            v = interleave_rope_rows(v, c["num_key_value_heads"])
        v = np.ascontiguousarray(v, dtype=np.float32)
        if bf16 and v.ndim >= 2:                     # the weights are exact bf16 values: cutting rounds nothing
            halves = (v.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(gguf_name(hf_name, layer_names), halves.view(np.uint8),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(hf_name, layer_names), v)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder for the files")
    parser.add_argument("--type", choices=("f32", "bf16"), default="f32", help="type of the matrices")
    parser.add_argument("names", nargs="*", help="models; all by default")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for name in args.names or model_names(GOLDEN):
        convert(name, args.out, args.type == "bf16")


if __name__ == "__main__":
    main()
