"""A model that says what a test wants: real files, run by the real engine, whose replies are known.

Nothing but the last token counts (attention and feed-forward add zeros): the vector of each token points at the token that follows it. The
chat template ends a prompt with the last character of the last message, so that character chooses the reply.
"""
import array
import json
import pathlib
import random
import re
import struct

from cli_support import byte_characters

# At bytes that no UTF-8 text has.
SPECIAL = {0xf5: "<think>", 0xf6: "</think>", 0xf7: "<tool_call>", 0xf8: "</tool_call>", 0xf9: "<|im_start|>", 0xfa: "<|im_end|>"}
END = 0xfa
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}<|im_end|>\n"
            "{% endfor %}{{ messages[-1].content[-1:] }}")
DIM = 512     # of random signs: two tokens are as good as at right angles


class Loop(str):
    """A reply without an end."""


def pieces_of(text, used):
    """The text cut into pieces that no reply has had yet, as its tokens: what follows a token is one token."""
    special = "|".join(map(re.escape, SPECIAL.values()))
    for part in re.findall(rf"{special}|(?:(?!{special})[\s\S])+", text):
        words = [part] if part in SPECIAL.values() else re.findall(r"\s*\S+(?:\s+$)?", part)
        while words:
            piece = words.pop(0)
            while piece in used or len(piece.encode()) == 1:      # a byte is a token already
                if not words:
                    raise ValueError(f"{piece!r} ends a part of two replies, or stands alone")
                piece += words.pop(0)
            used.add(piece)
            yield piece


def make_scripted_model(folder, scripts, context=1 << 17):
    """scripts: the last character of a message -> the reply; "" -> that to all other messages."""
    rng = random.Random(1)
    characters = byte_characters()
    vocabulary = {character: byte for byte, character in characters.items() if byte not in SPECIAL}
    ids = {name: token for token, name in SPECIAL.items()}
    follows, used = [], set()
    texts = {}
    for key, text in scripts.items():
        before = ord(key) if key else None
        first = None
        for piece in pieces_of(text, used):
            token = ids.get(piece, 256 + len(texts))
            if token >= 256:
                texts[token] = piece
                vocabulary["".join(characters[byte] for byte in piece.encode())] = token
            first = token if first is None else first
            follows.append((before, token))
            before = token
        follows.append((before, first if isinstance(text, Loop) else END))
    n_vocab = 256 + len(texts)

    def signs():
        bits = rng.getrandbits(DIM)
        return [1.0 if bits >> i & 1 else -1.0 for i in range(DIM)]

    default = signs()
    embed = [default if token < 256 and chr(token) not in scripts and token not in SPECIAL else signs() for token in range(n_vocab)]
    head = [[0.0] * DIM for _ in range(n_vocab)]
    for before, after in follows:
        vector = default if before is None else embed[before]
        head[after] = [a + b for a, b in zip(head[after], vector)]

    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": [1.0] * DIM}
    layer = "model.layers.0."
    for name, rows in (("self_attn.q_proj", 64), ("self_attn.k_proj", 64), ("self_attn.v_proj", 64), ("mlp.gate_proj", 64), ("mlp.up_proj", 64)):
        tensors[f"{layer}{name}.weight"] = [[0.0] * DIM] * rows
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{layer}{name}.weight"] = [[0.0] * 64] * DIM
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = [1.0] * DIM

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    header, data = {}, bytearray()
    for name, values in tensors.items():
        is_matrix = isinstance(values[0], list)
        flat = array.array("f", [value for row in values for value in row] if is_matrix else values)
        begin = len(data)
        data += flat.tobytes()
        header[name] = {"dtype": "F32", "shape": [len(values), len(values[0])] if is_matrix else [len(values)],
                        "data_offsets": [begin, len(data)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "vocab_size": n_vocab, "max_position_embeddings": context, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": END}))
    added = [{"id": token, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for token, text in SPECIAL.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level, "post_processor": None,
        "model": {"type": "BPE", "vocab": vocabulary | {text: token for token, text in SPECIAL.items()}, "merges": [], "unk_token": None,
                  "byte_fallback": False, "ignore_merges": False, "fuse_unk": False, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "dropout": None}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[END], "add_bos_token": False, "bos_token": None,
                                                              "chat_template": TEMPLATE}))
    return folder
