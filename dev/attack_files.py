#!/usr/bin/env python3
"""Small files that ask for much time or memory: python3 dev/attack_files.py DIR writes them for dev/attacks.sh."""
import json
import os
import sys

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_characters():
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 324))
    return [chr(b) if b in visible else chr(next(others)) for b in range(256)]


def tokenizer(path, regexes=(), normalizer=None, more="", merges=()):
    """Byte-level BPE that cuts words by these expressions; `more` is text put into the object as it is."""
    vocab = {c: i for i, c in enumerate(byte_characters())}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    splits = [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in regexes]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    text = json.dumps({
        "added_tokens": [{"id": len(vocab), "content": "<|endoftext|>", "special": True, "normalized": False}],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits + [level]},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]},
    })
    write(path, text[:-1] + more + "}")


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main():
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    # JSON that takes much more memory than disk
    config = '{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 257, '
    write("objects.json", config + '"x": [' + ",".join(["{}"] * 33_000_000) + "]}")
    write("small_objects.json", config + '"x": [' + ",".join(["{}"] * 300_000) + "]}")
    write("spaces.json", config + '"x": ' + " " * 20_000_000 + "1}")
    tokenizer("objects_tokenizer.json", [GPT2], None, ', "x": [' + ",".join(["{}"] * 33_000_000) + "]")
    tokenizer("deep_tokenizer.json", [GPT2], None, ', "x": ' + "[" * 1000 + "]" * 1000)


main()
