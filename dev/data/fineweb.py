#!/usr/bin/env python3
"""
FineWeb and FineWeb-Edu as token shards: fineweb_val_000000.bin, fineweb_train_000001.bin, ... (edu_fineweb_... of Edu)

    python dev/data/fineweb.py --version 10B                            downloads 28 GB and GPT-2's tokenizer
    python dev/data/fineweb.py --type edu --version 100B --out edu100B
    python dev/data/fineweb.py --input 000_00000.parquet more.jsonl --tokenizer tokenizer.json

Inputs: Parquet (needs pyarrow) or JSON Lines (.jsonl, .jsonl.gz) with "text" in each row, in the order given. End of text
stands before each document; each shard but the last holds exactly --shard-tokens, wherever a document ends. Shard 0 is
for validation.
"""
import glob
import json
import os

from common import (InputError, download, downloads, make_parser, one_line, open_tokenizer, read_documents, run, tokenize,
                    write_series)

REPOSITORIES = {"classic": "HuggingFaceFW/fineweb", "edu": "HuggingFaceFW/fineweb-edu"}
PREFIXES = {"classic": "fineweb", "edu": "edu_fineweb"}
HOST = "https://huggingface.co"


def list_urls(kind, version, folder):
    """the addresses of a sample's Parquet files, which their host lists"""
    repository, sample = REPOSITORIES[kind], f"sample/{version}T"
    path = download(f"{HOST}/api/datasets/{repository}/tree/main/{sample}", folder)
    try:
        with open(path, encoding="utf-8") as file:
            names = [entry["path"] for entry in json.load(file)]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: expected the list of the sample's files: {one_line(error)}: remove it and try again") from None
    names = sorted(name for name in names if name.endswith(".parquet"))
    return [f"{HOST}/datasets/{repository}/resolve/main/{name}" for name in names]


def read_all(arguments):
    if arguments.input:
        for path in arguments.input:
            yield from read_documents(path, "text")
        return
    folder = os.path.join(downloads(arguments), f"{PREFIXES[arguments.type]}_{arguments.version}")  # names of files are alike
    for url in list_urls(arguments.type, arguments.version, folder):
        yield from read_documents(download(url, folder), "text")


def main(arguments):
    parser = make_parser(__doc__, "Parquet or JSON Lines files", "fineweb10B")
    parser.add_argument("--type", choices=["classic", "edu"], default="classic", help="FineWeb or FineWeb-Edu (default classic)")
    parser.add_argument("--version", choices=["10B", "100B"], default="10B", help="sample to download (default 10B)")
    parser.add_argument("--shard-tokens", type=int, default=10**8, metavar="N", help="tokens in a shard (default 100,000,000)")
    arguments = parser.parse_args(arguments)
    if not 2 <= arguments.shard_tokens < 2**31:
        raise InputError(f"--shard-tokens: expected 2 .. 2^31 - 1, found {arguments.shard_tokens}")
    prefix = os.path.join(arguments.out, PREFIXES[arguments.type])
    there = sorted(glob.glob(glob.escape(prefix) + "_*_??????.bin"))
    if there:
        raise InputError(f"{there[0]}: there are shards in this folder: choose another --out, or remove them")
    tokenizer = open_tokenizer(arguments)

    def path_of(index):
        return f"{prefix}_{'train' if index else 'val'}_{index:06d}.bin"

    n_shards = write_series(tokenize(read_all(arguments), tokenizer), tokenizer.n_tokens, arguments.shard_tokens, path_of)
    if n_shards == 0:
        raise InputError("--input: no documents")
    if n_shards == 1:
        print("one shard only: it is for validation, none is left for training (a smaller --shard-tokens makes more)")


if __name__ == "__main__":
    run("fineweb", main)
