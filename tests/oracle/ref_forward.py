#!/usr/bin/env python3
"""The formulas of the three families as plain numpy (float64), checked against tests/golden.

    python ref_forward.py [DIR]      prints the largest difference a model; exit status 1 beyond 2e-4

Needs only numpy. Written from the models' definitions, not from a framework: when a C++ result differs
from the golden values, print the same intermediate from here and from `beryl trace` to find the first
one that differs. Shapes: x [T][model_dim], q [T][heads][head_dim], k and v [N][kv_heads][head_dim].
"""
import json
import os
import struct
import sys

import numpy as np

GOLDEN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "golden")
SLIDING, FULL = "sliding_attention", "full_attention"


def model_names(root):
    """The folders of `root` that hold golden answers."""
    return sorted(d for d in os.listdir(root) if os.path.exists(os.path.join(root, d, "golden.safetensors")))


def load_safetensors(path):
    """{name: array}; floats widened to float64 (exact)."""
    with open(path, "rb") as file:
        raw = file.read()
    n = struct.unpack("<Q", raw[:8])[0]
    out = {}
    for name, t in json.loads(raw[8:8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = t["data_offsets"]
        data = raw[8 + n + begin:8 + n + end]
        if t["dtype"] == "BF16":
            v = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            v = np.frombuffer(data, {"F32": "<f4", "I32": "<i4", "I64": "<i8"}[t["dtype"]])
        v = v.reshape(t["shape"])
        out[name] = v.astype(np.float64) if v.dtype.kind == "f" else v
    return out


def rms(x, w=None, eps=1e-6):
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y if w is None else y * w


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def inv_freq(p, head_dim):
    """One frequency for each rotated pair (j, j + head_dim / 2); zero: the pair is not rotated."""
    j = np.arange(head_dim // 2)
    f = p["rope_theta"] ** (-2.0 * j / head_dim)
    kind = p.get("rope_type", "default")
    if kind == "proportional":                       # exponent over the WHOLE head, the tail set to 0
        f[int(p.get("partial_rotary_factor", 1.0) * head_dim // 2):] = 0.0
    elif kind == "linear":
        f = f / p["factor"]
    elif kind == "llama3":
        factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
        wavelength = 2 * np.pi / f
        s = (p["original_max_position_embeddings"] / wavelength - low) / (high - low)
        s = np.clip(s, 0.0, 1.0)                     # 0: fully scaled, 1: untouched
        f = (1 - s) * f / factor + s * f
    return f


def rope(x, pos, f):
    """x [T][heads][head_dim] in half-split pairs, rotated by pos * f."""
    a = pos[:, None, None] * f
    c, s, half = np.cos(a), np.sin(a), x.shape[-1] // 2
    lo, hi = x[..., :half], x[..., half:]
    return np.concatenate([lo * c - hi * s, hi * c + lo * s], -1)


def attend(q, k, v, pos, scale, window):
    """Causal attention over positions `pos` of both queries and keys; window 0: no limit."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)      # query head h reads KV head h // group
    a = np.einsum("thd,nhd->htn", q, k) * scale
    ok = pos[None] <= pos[:, None]
    if window:
        ok &= pos[None] > pos[:, None] - window
    a = np.where(ok[None], a, -np.inf)
    return np.einsum("htn,nhd->thd", softmax(a), v).reshape(len(q), -1)


class Model:
    def __init__(self, folder):
        with open(os.path.join(folder, "config.json")) as file:
            self.cfg = json.load(file)
        self.w = load_safetensors(os.path.join(folder, "model.safetensors"))
        self.kind = self.cfg["model_type"]

    # ---------------------------------------------------------------- gemma 4
    @staticmethod
    def gemma4_geometry(c, i):
        """(head_dim, KV heads) of layer i, from either form of config.json."""
        head_dim, kv_heads = c["head_dim"], c["num_key_value_heads"]
        own = (c.get("per_layer_config") or {}).get(str(i), {})
        if c["layer_types"][i] == FULL:
            head_dim = own.get("head_dim") or c.get("global_head_dim") or 512
            if c.get("attention_k_eq_v"):
                kv_heads = own.get("num_key_value_heads") or c.get("num_global_key_value_heads") or kv_heads
        return head_dim, kv_heads

    def gemma4_attention(self, i, x, pos, kvs):
        """kvs {layer: (k, v)}: layers that own a cache write theirs, the others read."""
        c, p, w = self.cfg, f"model.layers.{i}.", self.w
        eps, n, kind = c["rms_norm_eps"], len(x), c["layer_types"][i]
        head_dim, kv_heads = self.gemma4_geometry(c, i)
        f, window = inv_freq(c["rope_parameters"][kind], head_dim), c["sliding_window"] if kind == SLIDING else 0
        h = rms(x, w[p + "input_layernorm.weight"], eps)
        q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(n, -1, head_dim)
        q = rope(rms(q, w[p + "self_attn.q_norm.weight"], eps), pos, f)
        first_shared = c["num_hidden_layers"] - (c.get("num_kv_shared_layers") or 0)
        if i >= first_shared:                        # read the last layer of the same kind that has its own KV
            k, v = kvs[max(j for j in range(first_shared) if c["layer_types"][j] == kind)]
        else:
            k0 = (h @ w[p + "self_attn.k_proj.weight"].T).reshape(n, kv_heads, head_dim)
            vw = w.get(p + "self_attn.v_proj.weight")
            v0 = k0 if vw is None else (h @ vw.T).reshape(n, kv_heads, head_dim)
            k = rope(rms(k0, w[p + "self_attn.k_norm.weight"], eps), pos, f)
            v = rms(v0, None, eps)                   # V: no weight, no rope, from the RAW projection
            kvs[i] = (k, v)
        return attend(q, k, v, pos, 1.0, window) @ w[p + "self_attn.o_proj.weight"].T

    def gemma4_experts(self, i, x):
        c, p, w = self.cfg, f"model.layers.{i}.", self.w
        eps, half = c["rms_norm_eps"], c["moe_intermediate_size"]
        r = rms(x, None, eps) * w[p + "router.scale"] * c["hidden_size"] ** -0.5
        prob = softmax(r @ w[p + "router.proj.weight"].T)
        e = rms(x, w[p + "pre_feedforward_layernorm_2.weight"], eps)
        out = np.zeros_like(x)
        for t in range(len(x)):
            top = np.argsort(-prob[t], kind="stable")[:c["top_k_experts"]]
            gate = prob[t, top] / prob[t, top].sum() * w[p + "router.per_expert_scale"][top]
            for expert, g in zip(top, gate):
                gate_up = w[p + "experts.gate_up_proj"][expert] @ e[t]
                hidden = gelu_tanh(gate_up[:half]) * gate_up[half:]
                out[t] += g * (w[p + "experts.down_proj"][expert] @ hidden)
        return out

    def gemma4_layer(self, i, x, pos, kvs, per_layer):
        c, p, w = self.cfg, f"model.layers.{i}.", self.w
        eps = c["rms_norm_eps"]
        x = x + rms(self.gemma4_attention(i, x, pos, kvs), w[p + "post_attention_layernorm.weight"], eps)
        h = rms(x, w[p + "pre_feedforward_layernorm.weight"], eps)
        m = gelu_tanh(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
        m = m @ w[p + "mlp.down_proj.weight"].T
        if c.get("enable_moe_block"):                # the experts read x, not h
            m = rms(m, w[p + "post_feedforward_layernorm_1.weight"], eps)
            m = m + rms(self.gemma4_experts(i, x), w[p + "post_feedforward_layernorm_2.weight"], eps)
        x = x + rms(m, w[p + "post_feedforward_layernorm.weight"], eps)
        if per_layer is not None:
            g = gelu_tanh(x @ w[p + "per_layer_input_gate.weight"].T) * per_layer[:, i]
            x = x + rms(g @ w[p + "per_layer_projection.weight"].T, w[p + "post_per_layer_input_norm.weight"], eps)
        return x * w[p + "layer_scalar"]

    def gemma4(self, ids):
        c, w = self.cfg, self.w
        eps, model_dim, n_layers = c["rms_norm_eps"], c["hidden_size"], c["num_hidden_layers"]
        pos = np.arange(len(ids))
        x = w["model.embed_tokens.weight"][ids] * model_dim ** 0.5
        per_layer, width = None, c.get("hidden_size_per_layer_input") or 0
        if width:
            token = w["model.embed_tokens_per_layer.weight"][ids].reshape(-1, n_layers, width) * width ** 0.5
            context = x @ w["model.per_layer_model_projection.weight"].T * model_dim ** -0.5
            context = rms(context.reshape(-1, n_layers, width), w["model.per_layer_projection_norm.weight"], eps)
            per_layer = (context + token) * 2 ** -0.5
        hidden, kvs = [x], {}
        for i in range(n_layers):
            x = self.gemma4_layer(i, x, pos, kvs, per_layer)
            hidden.append(x)
        x = hidden[-1] = rms(x, w["model.norm.weight"], eps)
        y = x @ w["model.embed_tokens.weight"].T
        cap = c.get("final_logit_softcapping")
        return (cap * np.tanh(y / cap) if cap else y), hidden

    # ---------------------------------------------------------------- gemma 3
    def gemma3(self, ids):
        c, w = self.cfg, self.w
        eps, head_dim, pos, n = c["rms_norm_eps"], c["head_dim"], np.arange(len(ids)), len(ids)
        x, hidden = w["model.embed_tokens.weight"][ids] * c["hidden_size"] ** 0.5, []
        for i in range(c["num_hidden_layers"]):
            p, kind = f"model.layers.{i}.", c["layer_types"][i]

            def norm(t, name):
                return rms(t, 1 + w[p + name + ".weight"], eps)

            f = inv_freq(c["rope_parameters"][kind], head_dim)
            hidden.append(x)
            h = norm(x, "input_layernorm")
            q, k, v = ((h @ w[p + f"self_attn.{a}_proj.weight"].T).reshape(n, -1, head_dim) for a in "qkv")
            q, k = rope(norm(q, "self_attn.q_norm"), pos, f), rope(norm(k, "self_attn.k_norm"), pos, f)
            window = c["sliding_window"] if kind == SLIDING else 0
            a = attend(q, k, v, pos, c["query_pre_attn_scalar"] ** -0.5, window)
            x = x + norm(a @ w[p + "self_attn.o_proj.weight"].T, "post_attention_layernorm")
            h = norm(x, "pre_feedforward_layernorm")
            m = gelu_tanh(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
            x = x + norm(m @ w[p + "mlp.down_proj.weight"].T, "post_feedforward_layernorm")
        x = rms(x, 1 + w["model.norm.weight"], eps)
        return x @ w["model.embed_tokens.weight"].T, hidden + [x]

    # ------------------------------------------------------------------ llama
    def llama(self, ids):
        c, w = self.cfg, self.w
        eps, pos, n = c["rms_norm_eps"], np.arange(len(ids)), len(ids)
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        f = inv_freq(c["rope_parameters"], head_dim)
        x, hidden = w["model.embed_tokens.weight"][ids], []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            hidden.append(x)
            h = rms(x, w[p + "input_layernorm.weight"], eps)
            q, k, v = ((h @ w[p + f"self_attn.{a}_proj.weight"].T).reshape(n, -1, head_dim) for a in "qkv")
            a = attend(rope(q, pos, f), rope(k, pos, f), v, pos, head_dim ** -0.5, 0)
            x = x + a @ w[p + "self_attn.o_proj.weight"].T
            h = rms(x, w[p + "post_attention_layernorm.weight"], eps)
            m = silu(h @ w[p + "mlp.gate_proj.weight"].T) * (h @ w[p + "mlp.up_proj.weight"].T)
            x = x + m @ w[p + "mlp.down_proj.weight"].T
        x = rms(x, w["model.norm.weight"], eps)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return x @ head.T, hidden + [x]

    def forward(self, ids):
        """(logits [T][vocab], hidden: after the embedding, after each layer but the last, after the final norm)"""
        run = {"gemma4_text": self.gemma4, "gemma4_unified_text": self.gemma4, "gemma3_text": self.gemma3,
               "llama": self.llama}[self.kind]
        return run(np.asarray(ids))


def largest_difference(root, name):
    golden = load_safetensors(os.path.join(root, name, "golden.safetensors"))
    model = Model(os.path.join(root, name))
    worst = 0.0
    for key in ("one", "long"):
        logits, hidden = model.forward(golden[key + ".ids"])
        worst = max(worst, abs(logits - golden[key + ".logits"]).max())
        if key == "long":
            probes = golden["long.probe_positions"]
            assert len(hidden) == len(golden["long.hidden"])
            for ours, theirs in zip(hidden, golden["long.hidden"]):
                worst = max(worst, abs(ours[probes] - theirs).max())
    for key in ("b0", "b1", "b2"):
        last = model.forward(golden[key + ".ids"])[0][-1]
        worst = max(worst, abs(last - golden[key + ".last_logits"]).max())
    n = int(golden["greedy.prompt_len"][0])
    logits, _ = model.forward(golden["greedy.ids"])
    assert (logits.argmax(-1)[n - 1:-1] == golden["greedy.ids"][n:]).all(), f"{name}: greedy ids differ"
    return worst


def main(root):
    worst = 0.0
    for name in model_names(root):
        difference = largest_difference(root, name)
        print(f"{name:20s} max |difference| {difference:.2e}")
        worst = max(worst, difference)
    return 0 if worst < 2e-4 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else GOLDEN))
