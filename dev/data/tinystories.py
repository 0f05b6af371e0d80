#!/usr/bin/env python3
"""
TinyStories (Eldan & Li 2023) as token shards: TinyStories_val.bin and TinyStories_train.bin

    python dev/data/tinystories.py                                      downloads 1.6 GB and GPT-2's tokenizer
    python dev/data/tinystories.py --input TinyStories_all_data.tar.gz --tokenizer tokenizer.json
    python dev/data/tinystories.py --input valid.txt train.txt --tokenizer bytes

Inputs: the archive, or its data00.json, data01.json ... (lists of {"story": ...}), or text with <|endoftext|> between
stories. In order of their names in an archive, else as given: the first is for validation, the others are for training.
Stories lose the white space at their ends; end of text stands before each. With GPT-2's tokenizer these are 19,043,638 and
925,653,391 tokens, as many as llm.c's; within a split the order is that of the files, where llm.c shuffles (the trainer
shuffles anyway).
"""
import os

from common import (InputError, Shard, download, downloads, json_documents, make_parser, open_tokenizer, read_documents, run,
                    tar_members, tokenize)

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStories_all_data.tar.gz"


def read_files(paths):
    """the stories of each file, one list or generator after the other"""
    for path in paths:
        if path.endswith((".tar.gz", ".tgz", ".tar")):
            for name, content in tar_members(path, ".json"):
                yield json_documents(content.decode("utf-8", "replace"), "story", f"{path}: {name}")
        else:
            yield read_documents(path, "story")


def main(arguments):
    arguments = make_parser(__doc__, "the archive, or two files or more", "tinystories").parse_args(arguments)
    tokenizer = open_tokenizer(arguments)
    paths = arguments.input or [download(URL, downloads(arguments))]
    files = read_files(paths)
    splits = {"val": [next(files, [])], "train": files}
    for name, part in splits.items():
        stories = (story.strip() for stories in part for story in stories)
        with Shard(os.path.join(arguments.out, f"TinyStories_{name}.bin"), tokenizer.n_tokens) as shard:
            for tokens in tokenize(stories, tokenizer, name):
                shard.add(tokens)
            if shard.count == 0:
                raise InputError(f"--input: no stories for {name}: expected the archive, or a file for validation and others "
                                 "for training")


if __name__ == "__main__":
    run("tinystories", main)
