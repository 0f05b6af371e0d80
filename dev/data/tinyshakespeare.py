#!/usr/bin/env python3
"""
Tiny Shakespeare (1 MB) as token shards: tiny_shakespeare_val.bin and tiny_shakespeare_train.bin

    python dev/data/tinyshakespeare.py                                  downloads text and GPT-2's tokenizer
    python dev/data/tinyshakespeare.py --input input.txt --tokenizer gpt2/tokenizer.json --out data

As llm.c does it: the text is cut at blank lines, end of text stands before each piece, and each but the last keeps its two
newlines. The first 32,768 tokens are for validation; with GPT-2's tokenizer 305,260 are left for training.
"""
import os

import numpy as np

from common import InputError, Shard, download, downloads, make_parser, open_tokenizer, read_text, run, tokenize

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
VALIDATION_TOKENS = 32768


def main(arguments):
    arguments = make_parser(__doc__, "input.txt", "tinyshakespeare").parse_args(arguments)
    if len(arguments.input) > 1:
        raise InputError(f"--input: expected one file, found {len(arguments.input)}")
    tokenizer = open_tokenizer(arguments)
    path = arguments.input[0] if arguments.input else download(URL, downloads(arguments))
    pieces = read_text(path).split("\n\n")
    pieces = [piece + "\n\n" for piece in pieces[:-1]] + pieces[-1:]
    tokens = np.concatenate(list(tokenize(pieces, tokenizer)))
    if len(tokens) < VALIDATION_TOKENS + 2:
        raise InputError(f"{path}: expected more than {VALIDATION_TOKENS:,} tokens, found {len(tokens):,}")
    splits = {"val": tokens[:VALIDATION_TOKENS], "train": tokens[VALIDATION_TOKENS:]}
    for name, part in splits.items():
        with Shard(os.path.join(arguments.out, f"tiny_shakespeare_{name}.bin"), tokenizer.n_tokens) as shard:
            shard.add(part)


if __name__ == "__main__":
    run("tinyshakespeare", main)
