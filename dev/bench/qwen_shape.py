"""Qwen3-0.6B as benchmarks have it: its shape, with random weights, and a tokenizer of bytes. Standard library.

    python dev/bench/qwen_shape.py FOLDER --batch B --seq T [--small]    config.json, tokenizer.json, and tokens.bin: a shard of one batch
"""
import argparse
import array
import json
import os
import random
import struct

QWEN3_06B = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "vocab_size": 151936,
             "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
             "rope_theta": 1000000.0, "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0,
             "sliding_window": None, "use_sliding_window": False, "bos_token_id": 151643, "eos_token_id": 151643}
SMALL = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 512, "bos_token_id": 511, "eos_token_id": 511}


def shape_of(small):
    return dict(QWEN3_06B, **SMALL) if small else QWEN3_06B


def write_tokenizer(path, n_tokens):
    """As many tokens as the model has: the 256 bytes, names that no text reaches, and an end of text."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves in byte-level BPE
    others = [byte for byte in range(256) if byte not in plain]
    characters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    vocabulary = {characters[byte]: byte for byte in range(256)} | {f"token{i}": i for i in range(256, n_tokens - 1)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": n_tokens - 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
           "special": True}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [end], "normalizer": None, "pre_tokenizer": level,
                   "post_processor": None, "decoder": level,
                   "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                             "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []}}, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shape, rng = shape_of(options.small), random.Random(1)
    os.makedirs(options.folder)
    with open(os.path.join(options.folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(shape, file)
    write_tokenizer(os.path.join(options.folder, "tokenizer.json"), shape["vocab_size"])
    # uint16: of the larger vocabulary the first tokens
    tokens = array.array("H", (rng.randrange(min(shape["vocab_size"], 1 << 16)) for _ in range(options.batch * options.seq + 1)))
    with open(os.path.join(options.folder, "tokens.bin"), "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + tokens.tobytes())


if __name__ == "__main__":
    main()
