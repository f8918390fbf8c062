#!/usr/bin/env python3
"""Write blocks of every GGUF format with what the public `gguf` package decodes them to.

Needs: numpy and the `gguf` package.    make_decode_cases.py OUT.safetensors [MODEL.gguf ...]

OUT holds, for each format and each kind of case, NAME.KIND.blocks (U8 [n_blocks, block_bytes]) and NAME.KIND.values
(F32 [n_blocks, block_weights]). src/weights/decode_test.cpp reads it and wants equality bit for bit. Kinds:
  random      every bit random, except that f16 scales are finite (all finite ones: subnormal, largest, negative)
  patterns    byte j of block k is k + 37 j (mod 256), so every byte takes every value at every place; scales are 1, or
              for byte scales the pattern too
  MODEL       blocks of up to 6 tensors of that format from the given files: the first and the last ones of each
"""
import json
import os
import struct
import sys

import numpy as np
import gguf
from gguf import GGMLQuantizationType as T
from gguf.constants import GGML_QUANT_SIZES

# Byte offsets of the f16 fields of a block.
F16_FIELDS = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
              T.Q6_K: [208], T.MXFP4: [], T.NVFP4: []}
DTYPES = {np.dtype(np.uint8): "U8", np.dtype(np.float32): "F32"}


def write_safetensors(path, tensors):
    """A minimal writer, so that this script needs no package for it. F32 first keeps everything aligned."""
    order = sorted(tensors, key=lambda name: tensors[name].dtype == np.uint8)
    header, offset = {}, 0
    for name in order:
        array = tensors[name]
        header[name] = {"dtype": DTYPES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".partial", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            out.write(np.ascontiguousarray(tensors[name]).tobytes())
    os.replace(path + ".partial", path)


def decode(blocks, kind):
    with np.errstate(all="ignore"):  # MXFP4's largest scales overflow: infinities are part of the definition
        values = gguf.dequantize(blocks, kind)
    return np.ascontiguousarray(values, dtype=np.float32)


def main():
    out, models = sys.argv[1], sys.argv[2:]
    rng = np.random.default_rng(20240229)
    tensors = {}

    def add(kind, case, blocks):
        name = kind.name.lower()
        tensors[f"{name}.{case}.blocks"] = blocks
        tensors[f"{name}.{case}.values"] = decode(blocks, kind)

    for kind, fields in F16_FIELDS.items():
        n_bytes = GGML_QUANT_SIZES[kind][1]
        blocks = rng.integers(0, 256, (1024, n_bytes), dtype=np.uint8)
        patterns = ((np.arange(256)[:, None] + 37 * np.arange(n_bytes)) % 256).astype(np.uint8)
        for at in fields:
            half = blocks[:, at:at + 2].copy().view(np.uint16)
            half[(half & 0x7c00) == 0x7c00] &= 0xfbff  # infinite and NaN scales become large finite ones
            half[:6, 0] = [0x0000, 0x8000, 0x0001, 0x03ff, 0x7bff, 0xfbff]
            blocks[:, at:at + 2] = half.view(np.uint8)
            patterns[:, at:at + 2] = np.array([0x3c00], dtype=np.uint16).view(np.uint8)
        add(kind, "random", blocks)
        add(kind, "patterns", patterns)

    every = np.arange(65536, dtype=np.uint16)
    is_nan = ((every & 0x7c00) == 0x7c00) & ((every & 0x3ff) != 0)
    for kind, codes in ((T.BF16, every), (T.F16, every[~is_nan])):
        add(kind, "random", rng.permutation(codes).view(np.uint8).reshape(-1, 2))

    for model in models:
        case, n_taken = os.path.basename(model), {}
        for tensor in gguf.GGUFReader(model).tensors:
            kind = tensor.tensor_type
            if kind not in F16_FIELDS and kind not in (T.BF16, T.F16):
                continue
            n_taken[kind] = n_taken.get(kind, 0) + 1
            if n_taken[kind] > 6:
                continue
            blocks = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1, GGML_QUANT_SIZES[kind][1])
            add(kind, f"{case}:{tensor.name}", np.concatenate([blocks[:256], blocks[-256:]]))

    write_safetensors(out, tensors)
    print(f"{out}: {len(tensors) // 2} cases")


if __name__ == "__main__":
    main()
