#!/usr/bin/env python3
"""Build the tiny reference models of tests/golden and their golden outputs.

    python make_golden.py [--out DIR] [--only NAME[,NAME]]

Needs torch (CPU is enough), transformers >= 5.17, safetensors, numpy. For each model it writes
DIR/NAME/config.json, DIR/NAME/model.safetensors (weights are exact bf16 values) and
DIR/NAME/golden.safetensors (what the reference computed from those weights in fp32).
Once all are built, DIR/manifest.json lists every file with its SHA-256, and the results of these checks:
 * cached one-token-at-a-time decoding agrees with the full forward pass;
 * each feature named under "ablations" really changes the logits.
Two runs give identical bytes (with the versions of torch and transformers that the manifest names).
"""
import argparse
import copy
import hashlib
import json
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch
import transformers
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM,
                          Gemma4TextConfig, LlamaConfig, LlamaForCausalLM)

from ref_forward import FULL, GOLDEN, SLIDING

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

VOCAB = 256
GEMMA4_ROPE = {SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
               FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}
GEMMA4 = dict(vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
              pad_token_id=0, eos_token_id=1, bos_token_id=2, final_logit_softcapping=30.0,
              rope_parameters=GEMMA4_ROPE, sliding_window=8, use_bidirectional_attention=None)

CONFIGS = {
    # 12B/31B shape: K=V global layers with one KV head and twice the head width
    "gemma4_dense": lambda: Gemma4TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=6,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=16,
        global_head_dim=32, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0, **GEMMA4),
    # the same with the real head widths 256 / 512, for kernels that exist only for those
    "gemma4_dense_hd512": lambda: Gemma4TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, layer_types=[SLIDING, FULL],
        num_attention_heads=2, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=256,
        global_head_dim=512, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0, **GEMMA4),
    # E2B/E4B shape: per-layer embeddings, the last 3 layers share KV, double-wide MLP in the sharers
    "gemma4_e2b": lambda: Gemma4TextConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=6,
        layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        num_attention_heads=4, num_key_value_heads=1, head_dim=16, global_head_dim=32,
        attention_k_eq_v=False, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3, use_double_wide_mlp=True, **GEMMA4),
    # 26B-A4B shape: dense MLP and 8 experts (top 2) side by side, K=V globals
    "gemma4_moe": lambda: Gemma4TextConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, layer_types=[SLIDING, FULL],
        num_attention_heads=4, num_key_value_heads=2, num_global_key_value_heads=1, head_dim=16,
        global_head_dim=32, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=0, enable_moe_block=True,
        num_experts=8, top_k_experts=2, moe_intermediate_size=32, **GEMMA4),
    # Gemma 3 with the linear rope scaling that 4B and larger have on the global layers
    "gemma3": lambda: Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16,
        sliding_window=8, sliding_window_pattern=6, max_position_embeddings=512, rms_norm_eps=1e-6,
        rope_parameters={SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                         FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}},
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=2),
    # Llama 3.x: GQA, llama3 rope scaling with all three bands in use, untied head
    "llama": lambda: LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
        tie_word_embeddings=False, pad_token_id=None, eos_token_id=1, bos_token_id=2),
}
# Chosen so that the greedy continuations have no near ties (and the choice of experts as few as possible).
SEEDS = {"gemma4_dense": 38, "gemma4_dense_hd512": 12, "gemma4_e2b": 28, "gemma4_moe": 17, "gemma3": 18, "llama": 76}
CLASSES = {"gemma3": Gemma3ForCausalLM, "llama": LlamaForCausalLM}
# These get the older form of config.json.
OLDER_FORM = {"gemma4_dense_hd512", "gemma4_moe"}


def tokens(n, salt):
    x, out = 12345 + 7919 * salt, []
    for _ in range(n):
        x = (1103515245 * x + 12345) % 2147483648
        out.append(3 + (x >> 8) % (VOCAB - 3))
    return out


SEQUENCES = {"one": tokens(1, 1), "long": [2] + tokens(39, 2),
             "b0": [2] + tokens(4, 3), "b1": [2] + tokens(12, 4), "b2": [2] + tokens(20, 5)}
PROBES = [0, 1, 7, 8, 9, 39]     # positions of "long" whose hidden states are kept
N_GREEDY = 24


def randomize(model, seed):
    """Fill every parameter and every saved buffer with random values, exact in bf16, in the order of names."""
    g = torch.Generator().manual_seed(seed)
    parameters = dict(model.named_parameters(remove_duplicate=True))
    saved = {n: b for n, b in model.named_buffers() if n in model.state_dict()}
    is_gemma4 = isinstance(model, Gemma4ForCausalLM)
    zero_centred = isinstance(model, Gemma3ForCausalLM)      # Gemma 3 stores w and applies 1 + w
    with torch.no_grad():
        for n, p in sorted({**parameters, **saved}.items()):
            r = torch.randn(p.shape, generator=g, dtype=torch.float32)
            if n.endswith("layer_scalar"):
                v = 0.75 + 0.2 * r
            elif n.endswith("per_expert_scale") or n.endswith("router.scale"):
                v = 1.0 + 0.3 * r
            elif "norm" in n and p.dim() == 1:
                v = 1.0 + 0.3 * r
                if n.endswith("k_norm.weight") and is_gemma4:
                    v = v * 1.2 / p.shape[0] ** 0.5          # as in the real weights: the attention scale is 1
                elif n == "model.norm.weight" and is_gemma4:
                    v = 8.0 * v                              # logits large enough for the soft cap to act
                v = v - 1.0 if zero_centred else v
            elif "embed_tokens_per_layer" in n:
                v = r / p.shape[-1] ** 0.5 * len(model.model.layers) ** 0.5
            elif "embed_tokens" in n:
                v = r / p.shape[-1] ** 0.5
            elif p.dim() >= 2:
                v = 1.3 * r / p.shape[-1] ** 0.5
            else:
                v = r
            p.copy_(v.to(torch.bfloat16).to(p.dtype))


def forward(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False, **options)


def logits_of(model, ids):
    return forward(model, ids).logits[0].float()


def decode_difference(model, ids):
    """Largest difference between the full pass and cached decoding (5 tokens at once, then one by one)."""
    full = logits_of(model, ids)
    cache = DynamicCache(config=model.config)
    worst, pos = 0.0, 0
    with torch.no_grad():
        for chunk in [ids[:5]] + [[t] for t in ids[5:]]:
            out = model(input_ids=torch.tensor([chunk]), past_key_values=cache, use_cache=True,
                        position_ids=torch.arange(pos, pos + len(chunk))[None])
            worst = max(worst, (out.logits[0] - full[pos:pos + len(chunk)]).abs().max().item())
            pos += len(chunk)
    return worst


def ablations(name, model):
    """How much the logits of "long" move when one feature is broken; each must be clearly above 0."""
    base = logits_of(model, SEQUENCES["long"])
    out = {}

    def effect(broken):
        d = (logits_of(broken, SEQUENCES["long"]) - base).abs().amax(dim=-1)
        changed = (d > 1e-3).nonzero()
        return {"max": round(d.max().item(), 4),
                "first_position_changed": int(changed[0].item()) if len(changed) else -1}

    def rebuilt(**changes):
        config = CONFIGS[name]()
        for key, value in changes.items():
            setattr(config, key, value)
        broken = type(model)._from_config(config, attn_implementation="eager").float().eval()
        broken.load_state_dict(model.state_dict())
        return broken

    def filled(pattern, value):
        """The effect of setting every parameter whose name holds `pattern` to `value`; puts them back."""
        hit = {n: p for n, p in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
               if pattern in n}
        assert hit, pattern
        with torch.no_grad():
            kept = {n: p.clone() for n, p in hit.items()}
            for p in hit.values():
                p.fill_(value)
            result = effect(model)
            for n, p in hit.items():
                p.copy_(kept[n])
        return result

    if name != "llama":
        for window in (7, 9, 64):
            out[f"window 8 -> {window}"] = effect(rebuilt(sliding_window=window))
    if name.startswith("gemma4"):
        plain = {**GEMMA4_ROPE, FULL: {"rope_type": "default", "rope_theta": 1e6}}
        out["global rope full instead of proportional"] = effect(rebuilt(rope_parameters=plain))
        out["softcap off"] = effect(rebuilt(final_logit_softcapping=None))
        out["layer_scalar = 1"] = filled("layer_scalar", 1.0)
        out["q_norm weight = 1"] = filled("q_norm", 1.0)
    if name == "gemma4_e2b":
        out["per-layer token table = 0"] = filled("embed_tokens_per_layer", 0.0)
        out["per-layer model projection = 0"] = filled("per_layer_model_projection", 0.0)
        out["layer 2 k_proj = 0 (read by layer 5)"] = filled("layers.2.self_attn.k_proj", 0.0)
        out["layer 1 k_proj = 0 (read by layers 3 and 4)"] = filled("layers.1.self_attn.k_proj", 0.0)
    if name == "gemma4_moe":
        out["top-k 2 -> 1"] = effect(rebuilt(top_k_experts=1))
        out["router scale = 1"] = filled("router.scale", 1.0)
        out["per_expert_scale = 1"] = filled("per_expert_scale", 1.0)
        out["expert down_proj = 0"] = filled("experts.down_proj", 0.0)
        out["dense mlp down_proj = 0"] = filled("mlp.down_proj", 0.0)
    if name == "gemma3":
        plain = {**model.config.rope_parameters, FULL: {"rope_type": "default", "rope_theta": 1e6}}
        out["global rope unscaled"] = effect(rebuilt(rope_parameters=plain))
    if name == "llama":
        out["rope scaling off"] = effect(rebuilt(rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    return out


def write_older_form(path):
    """The form of config.json in which the checkpoints were published: global_* keys, no per_layer_config."""
    with open(path) as file:
        config = json.load(file)
    own = next(iter(config.pop("per_layer_config").values()))
    config["global_head_dim"] = own["head_dim"]
    config["num_global_key_value_heads"] = own.get("num_key_value_heads")
    with open(path, "w") as file:
        json.dump(config, file, indent=2, sort_keys=True)


def save(folder, name, model, golden):
    os.makedirs(folder, exist_ok=True)
    # on a copy: .to(bfloat16) would also round the rope frequencies of the model in use
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    if name in OLDER_FORM:
        write_older_form(os.path.join(folder, "config.json"))
    for file in os.listdir(folder):
        if file not in ("config.json", "model.safetensors"):
            os.remove(os.path.join(folder, file))
    save_file({k: v.contiguous() for k, v in golden.items()}, os.path.join(folder, "golden.safetensors"),
              metadata={"model": name})


def answers(model):
    """(golden tensors, smallest margin of a greedy choice)"""
    golden = {}
    for key, ids in SEQUENCES.items():
        out = forward(model, ids, output_hidden_states=(key == "long"))
        golden[f"{key}.ids"] = torch.tensor(ids, dtype=torch.int32)
        if key in ("one", "long"):
            golden[f"{key}.logits"] = out.logits[0].float()
        else:
            golden[f"{key}.last_logits"] = out.logits[0, -1].float()
        if key == "long":        # [n_layers + 1][probes][model_dim]; the last entry is after the final norm
            golden["long.probe_positions"] = torch.tensor(PROBES, dtype=torch.int32)
            golden["long.hidden"] = torch.stack([h[0, PROBES].float() for h in out.hidden_states])
    ids, margin = list(SEQUENCES["b1"]), float("inf")
    for _ in range(N_GREEDY):    # the continuation crosses the window several times
        logits = logits_of(model, ids)[-1]
        top = torch.topk(logits, 2).values
        margin = min(margin, (top[0] - top[1]).item())
        ids.append(int(logits.argmax()))
    golden["greedy.ids"] = torch.tensor(ids, dtype=torch.int32)
    golden["greedy.prompt_len"] = torch.tensor([len(SEQUENCES["b1"])], dtype=torch.int32)
    return golden, margin


def smallest_router_gap(model):
    gap = float("inf")
    for ids in SEQUENCES.values():
        for p in forward(model, ids, output_router_logits=True).router_logits:
            top = torch.topk(p.float(), 3, dim=-1).values
            gap = min(gap, (top[..., 1] - top[..., 2]).min().item())
    return gap


def build(name, root):
    """Write the model's folder; returns its part of the manifest's report."""
    model = CLASSES.get(name, Gemma4ForCausalLM)._from_config(CONFIGS[name](), attn_implementation="eager")
    model = model.float().eval()
    randomize(model, SEEDS[name])
    model.tie_weights()
    golden, margin = answers(model)
    report = {"cached_decode_max_diff": decode_difference(model, SEQUENCES["long"]),
              "greedy_smallest_top2_margin": round(margin, 5),
              "logit_abs_max": round(golden["long.logits"].abs().max().item(), 3),
              "ablations": ablations(name, model)}
    if name == "gemma4_moe":
        report["smallest_router_gap_2nd_minus_3rd"] = round(smallest_router_gap(model), 6)
    folder = os.path.join(root, name)
    save(folder, name, model, golden)
    for key, dtype in (("reloaded_from_disk_max_diff", torch.float32), ("bf16_run_max_diff", torch.bfloat16)):
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        report[key] = round((logits_of(again, SEQUENCES["long"]) - golden["long.logits"]).abs().max().item(), 5)
    return report


def describe(path):
    with open(path, "rb") as file:
        data = file.read()
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=GOLDEN, help="folder to write into; tests/golden by default")
    parser.add_argument("--only", default="", help="names of models, separated by commas; all by default")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CONFIGS)
    report = {name: build(name, args.out) for name in names}
    files = {f"{name}/{file}": describe(os.path.join(args.out, name, file))
             for name in sorted(report) for file in sorted(os.listdir(os.path.join(args.out, name)))}
    manifest = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__,
                "report": report, "files": files}
    if names == list(CONFIGS):
        with open(os.path.join(args.out, "manifest.json"), "w") as file:
            json.dump(manifest, file, indent=1, sort_keys=True)
            file.write("\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
