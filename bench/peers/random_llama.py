#!/usr/bin/env python3
"""A GGUF file of random weights in the shapes of a Llama 3.2, for measuring speed; it has no tokenizer and says nothing.

    bench/peers/random_llama.py llama3.2-1b q4_0 FILE.gguf        llama3.2-1b or llama3.2-3b; q4_0, q4_k or mxfp4

All matrices of layers have the format; embedding and head are one matrix of Q8_0, as in `beryl bench --synthetic NAME --format FORMAT
--head q8_0`. Codes are random, scales such that each matrix keeps the size of what it multiplies. Needs the packages gguf and numpy.
"""
import argparse
import pathlib

import gguf
import numpy as np

# width, layers, heads, KV heads, head size, FFN width, vocabulary: as src/model/synthetic.cpp
SHAPES = {"llama3.2-1b": (2048, 16, 32, 8, 64, 8192, 128256), "llama3.2-3b": (3072, 28, 24, 8, 128, 8192, 128256)}
TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_k": gguf.GGMLQuantizationType.Q4_K, "q8_0": gguf.GGMLQuantizationType.Q8_0,
         "mxfp4": gguf.GGMLQuantizationType.MXFP4}
FILE_TYPES = {"q4_0": gguf.LlamaFileType.MOSTLY_Q4_0, "q4_k": gguf.LlamaFileType.MOSTLY_Q4_K_M, "mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE}


def blocks(random, name, rows, cols):
    """[rows][bytes of a row]: codes of all values, scales that make the weights' deviation about 1 / sqrt(cols)."""
    size, n_bytes = gguf.GGML_QUANT_SIZES[TYPES[name]]
    data = random.integers(0, 256, (rows, cols // size, n_bytes), dtype=np.uint8)
    half = {"q4_0": 4.6, "q4_k": 4.6 * 32, "q8_0": 73.9}.get(name)   # deviation of the codes, of Q4_K with its scales of about 32

    def set_half(at, value):
        data[:, :, at:at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if name == "mxfp4":
        data[:, :, 0] = 127 - int(np.log2(3 * np.sqrt(cols)))        # a power of two
    elif name == "q4_k":
        set_half(0, 1 / (half * np.sqrt(cols)))
        set_half(2, 7.5 / (half * np.sqrt(cols)))                    # the mins' mean takes the codes' away
    else:
        set_half(0, 1 / (half * np.sqrt(cols)))
    return data.reshape(rows, -1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", choices=FILE_TYPES)
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    width, n_layers, n_heads, n_kv, head_dim, ffn_dim, vocab = SHAPES[options.shape]
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(options.file, "llama")
    writer.add_name(f"{options.shape} {options.format}")
    writer.add_file_type(FILE_TYPES[options.format])
    writer.add_context_length(131072)
    writer.add_embedding_length(width)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(ffn_dim)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv(n_kv)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name, rows, cols, format_name):
        data = blocks(random, format_name, rows, cols)
        writer.add_tensor(name, data, raw_dtype=TYPES[format_name])

    def ones(name):
        writer.add_tensor(name, np.ones(width, np.float32))

    matrix("token_embd.weight", vocab, width, "q8_0")
    ones("output_norm.weight")
    for i in range(n_layers):
        ones(f"blk.{i}.attn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", n_heads * head_dim, width, options.format)
        matrix(f"blk.{i}.attn_k.weight", n_kv * head_dim, width, options.format)
        matrix(f"blk.{i}.attn_v.weight", n_kv * head_dim, width, options.format)
        matrix(f"blk.{i}.attn_output.weight", width, n_heads * head_dim, options.format)
        ones(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.ffn_gate.weight", ffn_dim, width, options.format)
        matrix(f"blk.{i}.ffn_up.weight", ffn_dim, width, options.format)
        matrix(f"blk.{i}.ffn_down.weight", width, ffn_dim, options.format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
