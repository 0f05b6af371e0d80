#!/usr/bin/env python3
"""Files that nobody honest has, for dev/attacks.sh.
    python3 dev/attack_files.py DIR                     small ones that ask for much time or memory
    python3 dev/attack_files.py --spoil FILE TENSOR N   the last N numbers of a tensor in safetensors become NaN
"""
import json
import os
import struct
import sys

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_characters():
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 324))
    return [chr(b) if b in visible else chr(next(others)) for b in range(256)]


def tokenizer(path, regexes=(), normalizer=None, more="", merges=(("z", "q"),)):
    """Byte-level BPE that cuts words by these expressions; `more` is text put into the object as it is.

    Without a merge it would be the tokenizer of bytes, which no word matters to."""
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


def replace(a, b):
    return {"type": "Replace", "pattern": {"String": a}, "content": b}


def spoil(path, tensor, n):
    with open(path, "r+b") as file:
        n_header = struct.unpack("<Q", file.read(8))[0]
        end = json.loads(file.read(n_header))[tensor]["data_offsets"][1]
        file.seek(8 + n_header + end - 4 * n)
        file.write(struct.pack("<f", float("nan")) * n)


def main():
    if sys.argv[1] == "--spoil":
        spoil(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    os.makedirs(sys.argv[1], exist_ok=True)
    os.chdir(sys.argv[1])
    # words that take quadratic, cubic and exponential time, or much memory
    tokenizer("quadratic.json", ["a+b|a"])
    tokenizer("cubic.json", ["a*a*a*b|a"])
    tokenizer("exponential.json", ["(?:a|aa)+b|a"])
    tokenizer("groups.json", ["(?:a|b)+"])
    write("a.txt", "a" * 200_000)
    write("long_a.txt", "a" * 2_000_000)
    # expressions of real models, and texts that are unusual but honest
    tokenizer("deepseek.json", [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", DEEPSEEK])
    tokenizer("o200k.json", [O200K])
    honest = {"letters": "a", "capitals": "A", "blanks": " ", "newlines": "\n", "characters": "\u6f22", "digits": "7",
              "dots": ".", "blank_lines": "\n  \t", "accents": "e\u0301"}
    for name, text in honest.items():
        write(f"long_{name}.txt", text * (2_000_000 // len(text)))
    # normalizers that make a text 64 times longer
    tokenizer("growth.json", [GPT2], replace("a", "b" * 64))
    tokenizer("growths.json", [GPT2], {"type": "Sequence", "normalizers": [
        replace("a", "bb"), replace("b", "cccc"), replace("c", "dddddddd")]})
    # an evaluation of 500 examples, and the same with tokens that no model has
    for name, token in {"answers.bin": 65, "other_answers.bin": 60000}.items():
        record = [65535, 46, 0, 1, 4, 8, *[token] * 8, *[1, token] * 4]
        record[1] = 2 * len(record)
        with open(name, "wb") as file:
            file.write(struct.pack("<4i", 20240522, 1, 500, 100).ljust(1024, b"\0"))
            file.write(struct.pack(f"<{len(record)}H", *record) * 500)
    # JSON that takes much more memory than disk
    config = '{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 257, '
    write("objects.json", config + '"x": [' + ",".join(["{}"] * 33_000_000) + "]}")
    write("small_objects.json", config + '"x": [' + ",".join(["{}"] * 300_000) + "]}")
    write("spaces.json", config + '"x": ' + " " * 20_000_000 + "1}")
    tokenizer("objects_tokenizer.json", [GPT2], None, ', "x": [' + ",".join(["{}"] * 33_000_000) + "]")
    tokenizer("deep_tokenizer.json", [GPT2], None, ', "x": ' + "[" * 1000 + "]" * 1000)


main()
