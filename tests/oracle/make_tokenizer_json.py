#!/usr/bin/env python3
"""A tokenizer.json, with its neighbours, from the vocabulary in a GGUF file.

Usage: make_tokenizer_json.py FILE.gguf FOLDER

The structure is that of the published checkpoints, family by family (Gemma 3, Gemma 4, Llama 3, SmolLM2, GPT-2), so
that the reader of tokenizer.json is tested on what it will meet: merges as strings or as pairs, special tokens inside or
outside model.vocab, the pipelines' own spellings. Gemma 3's GGUF has scores and no merges; the merge list is made from
them as converters do: every split of a token into two tokens, best score first.

Needs only the standard library.
"""

import json
import pathlib
import struct
import sys

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
METASPACE = "\u2581"
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_metadata(path):
    """The key-value section of a GGUF file as a dict."""
    data = pathlib.Path(path).read_bytes()
    position = 0

    def scalar(code):
        nonlocal position
        value = struct.unpack_from("<" + code, data, position)[0]
        position += struct.calcsize("<" + code)
        return value

    def string():
        nonlocal position
        length = scalar("Q")
        value = data[position : position + length].decode("utf-8")
        position += length
        return value

    def value(kind):
        nonlocal position
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return scalar(SCALARS[kind])
        element, count = scalar("I"), scalar("Q")
        if element in SCALARS:
            code = f"<{count}{SCALARS[element]}"
            values = list(struct.unpack_from(code, data, position))
            position += struct.calcsize(code)
            return values
        return [value(element) for _ in range(count)]

    if data[:4] != b"GGUF":
        raise SystemExit(f"{path}: not a GGUF file")
    position = 4 + 4 + 8  # magic, version, number of tensors
    return {string(): value(scalar("I")) for _ in range(scalar("Q"))}


def split_merge(merge):
    space = merge.index(" ", 1)
    return merge[:space], merge[space + 1 :]


def merges_from_scores(tokens, types, scores):
    ids = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    merges = []
    for token, i in ids.items():
        splits = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                splits.append((ids[left], ids[right], left, right))
        merges += [(-scores[i], left, right) for _, _, left, right in sorted(splits)]
    merges.sort(key=lambda merge: merge[0])  # stable: splits of one token stay in their order
    return [(left, right) for _, left, right in merges]


def template_processing(bos, bos_id):
    """What puts a BOS in front; without one only the text."""
    front = [{"SpecialToken": {"id": bos, "type_id": 0}}] if bos else []
    tokens = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}} if bos else {}
    return {
        "type": "TemplateProcessing",
        "single": front + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": front + [{"Sequence": {"id": "A", "type_id": 0}}] + front + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": tokens,
    }


def byte_level(add_prefix_space, trim_offsets, use_regex):
    part = {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets}
    if use_regex is not None:
        part["use_regex"] = use_regex
    return part


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    metadata = read_metadata(source)
    kind = metadata["tokenizer.ggml.model"]
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    bos_id, eos_id = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    pre = metadata.get("tokenizer.ggml.pre")
    by_pre = {"llama-bpe": "llama3", "smollm": "smollm2", "gpt-2": "gpt2"}
    family = {"llama": "gemma3", "gemma4": "gemma4"}.get(kind) or by_pre[pre]
    gemma = family in ("gemma3", "gemma4")
    if gemma:
        tokens = [token.replace(" ", METASPACE) for token in tokens]

    special_types = (CONTROL, UNKNOWN, USER_DEFINED) if family == "gemma4" else (CONTROL, UNKNOWN)
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": family == "gpt2",
            "special": types[i] in special_types,
        }
        for i, token in enumerate(tokens)
        if types[i] in (CONTROL, UNKNOWN, USER_DEFINED)
    ]

    in_vocab = [family != "llama3" or types[i] == NORMAL for i in range(len(tokens))]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>" if gemma else None,
        "continuing_subword_prefix": "" if family == "gpt2" else None,
        "end_of_word_suffix": "" if family == "gpt2" else None,
        "fuse_unk": gemma,
        "byte_fallback": gemma,
        "ignore_merges": family == "llama3",
        "vocab": {token: i for i, token in enumerate(tokens) if in_vocab[i]},
    }
    if family == "gemma3":
        merges = merges_from_scores(tokens, types, metadata["tokenizer.ggml.scores"])
    else:
        merges = [split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]]
    model["merges"] = [list(merge) for merge in merges] if gemma else [" ".join(merge) for merge in merges]

    normalizer, decoder = None, byte_level(True, True, True)
    if gemma:
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE}
        pre_tokenizer = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        decoder = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": METASPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }
        post_processor = template_processing("<bos>" if family == "gemma3" else None, bos_id)
    elif family == "llama3":
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level(False, True, False),
            ],
        }
        post_processor = {
            "type": "Sequence",
            "processors": [byte_level(True, False, True), template_processing(tokens[bos_id], bos_id)],
        }
    elif family == "smollm2":
        pre_tokenizer = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(False, True, True)],
        }
        post_processor = None
    else:
        pre_tokenizer, post_processor = byte_level(False, True, None), byte_level(True, False, None)

    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": post_processor,
            "decoder": decoder,
            "model": model,
        },
        "tokenizer_config.json": {
            "bos_token": tokens[bos_id],
            "eos_token": {"content": tokens[eos_id], "special": True} if family == "smollm2" else tokens[eos_id],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "generation_config.json": {"bos_token_id": bos_id, "eos_token_id": [eos_id] if gemma else eos_id},
    }
    for name, content in contents.items():
        temporary = folder / (name + ".part")  # a reader never sees half a file
        temporary.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
        temporary.replace(folder / name)


if __name__ == "__main__":
    main()
