"""
What the scripts of this folder share: tokenizers, writers of llm.c's token shards, of evaluation records and of examples,
downloads, readers of documents. NumPy is all it needs; `tokenizers` for a tokenizer.json, `pyarrow` for Parquet.

A file appears under its name only when it is complete: it is written as NAME.tmp, which is then renamed.
Exit status: 0 done, 2 what the user gave (or what a download brought) is wrong, in one line; 1 anything else.
"""
import argparse
import contextlib
import csv
import gzip
import io
import json
import os
import struct
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from http.client import HTTPException

import numpy as np

ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # the first that a tokenizer.json has
GPT2_TOKENIZER = "https://huggingface.co/gpt2/resolve/main/tokenizer.json"
READ_ERRORS = (OSError, EOFError, UnicodeDecodeError, zlib.error, tarfile.TarError)
BATCH_DOCUMENTS = 1024  # that go to the tokenizer in one call, which shares them among threads
HEADER_INTS = 256


class InputError(Exception):
    """What is wrong with the input, in one line."""


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise InputError(message)


def make_parser(description, inputs, out):
    """A parser with the options of every script; `inputs` says what --input takes, `out` is the default folder."""
    parser = Parser(description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", metavar="FILE", nargs="+", default=[], help=f"{inputs}; without it they are downloaded")
    parser.add_argument("--tokenizer", default="gpt2", metavar="bytes|gpt2|FILE",
                        help="a tokenizer.json or a folder with one; gpt2: the one of Hugging Face's gpt2, downloaded; "
                        "bytes: 256 bytes and end of text 256")
    parser.add_argument("--eot", default=None, metavar="TOKEN", help="end of text in a tokenizer.json (default: the first of "
                        + " ".join(ENDS_OF_TEXT) + ")")
    parser.add_argument("--out", default=out, metavar="DIR", help=f"folder of the result (default {out})")
    return parser


def run(name, main):
    """main(arguments) with errors as one line"""
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"{name}: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


class Progress:
    """A line on stderr, if that is a terminal: what is done, at most ten times a second."""

    def __init__(self, what):
        self.what, self.drawn, self.shown = what, 0.0, sys.stderr.isatty()

    def show(self, text):
        now = time.monotonic()
        if self.shown and now - self.drawn > 0.1:
            self.drawn = now
            print(f"{self.what}: {text}"[:78].ljust(79), end="\r", file=sys.stderr, flush=True)

    def clear(self):
        if self.shown and self.drawn:
            print(" " * 79, end="\r", file=sys.stderr, flush=True)


# ---- tokenizers: encode(texts) gives an array of ids for each; ids are 0 .. n_tokens-1 ----


class ByteTokenizer:
    n_tokens, eot = 257, 256

    def encode(self, texts):
        return [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint32) for text in texts]


class LibraryTokenizer:
    def __init__(self, tokenizer, name, eot):
        candidates = [eot] if eot else ENDS_OF_TEXT
        found = [tokenizer.token_to_id(token) for token in candidates]
        found = [token for token in found if token is not None]
        if not found:
            raise InputError(f"{name}: has no token {' or '.join(candidates)} to stand before documents: name it with --eot")
        self.tokenizer, self.eot = tokenizer, found[0]
        self.n_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, texts):
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair becomes "?"
        return [np.array(found.ids, dtype=np.uint32) for found in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


def open_tokenizer(arguments):
    name = arguments.tokenizer
    if name == "bytes":
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError:
        raise InputError(f"--tokenizer {name}: needs Python's tokenizers (pip install tokenizers); bytes needs nothing") from None
    if os.path.isdir(name):  # as Hugging Face has them
        name = os.path.join(name, "tokenizer.json")
    elif name == "gpt2" and not os.path.exists(name):
        name = download(GPT2_TOKENIZER, downloads(arguments), "--tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(name)
    except Exception as error:  # the library raises no other kind
        raise InputError(f"{name}: expected a tokenizer.json: {one_line(error)}") from None
    return LibraryTokenizer(tokenizer, name, arguments.eot)


def one_line(error):
    return " ".join(str(error).split())[:200] or type(error).__name__


# ---- files that appear when they are complete ----


class NewFile:
    """with NewFile(path) as file: ...  `file` is written beside its place and moved there if nothing went wrong."""

    def __init__(self, path):
        self.path, self.temporary = path, path + ".tmp"

    def __enter__(self):
        os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
        self.file = open(self.temporary, "wb")
        return self.file

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())
        finally:
            self.file.close()
            if kind is None:
                os.replace(self.temporary, self.path)
            else:
                os.unlink(self.temporary)


# ---- token shards ----


def token_type(n_tokens):
    """magic, version and NumPy type of shards of a vocabulary"""
    return (20240520, 1, "<u2") if n_tokens <= 65536 else (20240801, 7, "<u4")


def write_header(file, *entries):
    file.seek(0)
    file.write(struct.pack(f"<{HEADER_INTS}i", *entries, *[0] * (HEADER_INTS - len(entries))))


class Shard(NewFile):
    """One shard; tokens come in any number of pieces."""

    def __init__(self, path, n_tokens):
        super().__init__(path)
        self.magic, self.version, self.type = token_type(n_tokens)
        self.count = 0

    def __enter__(self):
        write_header(super().__enter__())
        return self

    def add(self, tokens):
        self.count += len(tokens)
        if self.count >= 2**31:
            raise InputError(f"{self.path}: more than 2^31 - 1 tokens do not fit into a shard: make it from fewer files")
        self.file.write(tokens.astype(self.type).tobytes())

    def __exit__(self, kind, error, trace):
        if kind is None:
            write_header(self.file, self.magic, self.version, self.count)
        super().__exit__(kind, error, trace)
        if kind is None:
            print(f"{self.path}: {self.count:,} tokens")


def write_series(pieces, n_tokens, shard_tokens, path_of):
    """Arrays of tokens into shards of exactly shard_tokens (the last: the rest), wherever a piece ends. Returns their number."""
    shard, index = None, 0
    with contextlib.ExitStack() as opened:  # closes the last one, or removes it when something goes wrong
        for piece in pieces:
            while len(piece):
                if shard is None:
                    shard = opened.enter_context(Shard(path_of(index), n_tokens))
                    index += 1
                room = shard_tokens - shard.count
                shard.add(piece[:room])
                piece = piece[room:]
                if shard.count == shard_tokens:
                    opened.pop_all().close()
                    shard = None
    return index


def tokenize(documents, tokenizer, what="tokenising"):
    """end of text and its tokens, for each document"""
    progress, batch, n_documents, n_tokens = Progress(what), [], 0, 0
    eot = np.array([tokenizer.eot], dtype=np.uint32)

    def flush():
        nonlocal n_documents, n_tokens
        for tokens in tokenizer.encode(batch):
            n_documents += 1
            n_tokens += 1 + len(tokens)
            yield np.concatenate([eot, tokens])
        batch.clear()
        progress.show(f"{n_documents:,} documents, {n_tokens:,} tokens")

    for document in documents:
        batch.append(document)
        if len(batch) == BATCH_DOCUMENTS:
            yield from flush()
    yield from flush()
    progress.clear()


# ---- evaluation records ----


def write_eval(path, examples, tokenizer):
    """examples: (context, four completions, label); the format is described in llmc/text/hellaswag.h"""
    if tokenizer.n_tokens > 65535:
        raise InputError(f"a vocabulary of {tokenizer.n_tokens:,}: records hold tokens below 65,535, as GPT-2's are")
    progress, n, longest = Progress("tokenising"), 0, 0
    with NewFile(path) as file:
        write_header(file)
        for context, completions, label in examples:
            lists = tokenizer.encode([context] + completions)
            if len(completions) != 4 or not 0 <= label < 4 or min(map(len, lists)) == 0:
                raise InputError(f"example {n}: expected a context, four completions with text and a label 0..3, found "
                                 f"{one_line(json.dumps([context, completions, label]))}")
            words = [65535, 0, n % 65536, label, 4]
            for tokens in lists:
                words += [len(tokens), *tokens]
            if 2 * len(words) > 65535:
                raise InputError(f"example {n}: a record has at most 65,535 bytes, this one {2 * len(words):,}")
            words[1] = 2 * len(words)
            longest = max(longest, words[1])
            file.write(np.array(words, dtype="<u2").tobytes())
            n += 1
            progress.show(f"{n:,} examples")
        if n == 0:
            raise InputError("the input holds no examples")
        write_header(file, 20240522, 1, n, longest)
    progress.clear()
    print(f"{path}: {n:,} examples")


def eval_main(arguments, description, inputs, url, path, read_examples):
    """the whole of a script that writes records to path[0]/path[1]; read_examples(paths) is what it brings"""
    arguments = make_parser(description, inputs, path[0]).parse_args(arguments)
    tokenizer = open_tokenizer(arguments)
    paths = arguments.input or [download(url, downloads(arguments))]
    write_eval(os.path.join(arguments.out, path[1]), read_examples(paths), tokenizer)


# ---- examples ----


def write_examples(path, inputs, targets):
    """inputs and targets (n, T) of whole numbers as a safetensors file of int32 (llmc/text/examples.h); a negative target is not counted"""
    if inputs.shape != targets.shape or inputs.ndim != 2 or inputs.size == 0 or inputs.min() < 0 or targets.max() < 0:
        raise ValueError("expected inputs of 0 or more and targets of the same shape (n, T), one of which counts")
    tensors, header, at = {"inputs": inputs, "targets": targets}, {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "I32", "shape": list(tensor.shape), "data_offsets": [at, at + 4 * tensor.size]}
        at += 4 * tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with NewFile(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.astype("<i4").tobytes())
    print(f"{path}: {len(inputs):,} examples of {inputs.shape[1]}, {(targets >= 0).sum():,} targets")


# ---- downloads ----


def check_not_html(start, where):
    text = start.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html")):
        raise InputError(f"{where}: an HTML page instead of the file: the download went wrong")


def download(url, folder, instead="--input"):
    """The path of the file behind url, in `folder`; one that is there already is kept. `instead`: the option that takes it"""
    path = os.path.join(folder, url.rsplit("/", 1)[-1])
    if os.path.exists(path):
        return path
    progress = Progress(f"downloading {os.path.basename(path)}")
    try:
        with urllib.request.urlopen(url, timeout=60) as response, NewFile(path) as file:
            expected, done = response.headers.get("Content-Length"), 0
            while chunk := response.read(1 << 20):
                if done == 0:
                    check_not_html(chunk[:256], url)
                file.write(chunk)
                done += len(chunk)
                progress.show(f"{done / 1e6:,.0f}" + (f" of {int(expected) / 1e6:,.0f} MB" if expected else " MB"))
            if done == 0 or (expected is not None and done != int(expected)):
                raise InputError(f"{url}: expected {expected or 'more than 0'} bytes, {done} came: try again")
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        reason = one_line(getattr(error, "reason", error))
        raise InputError(f"{url}: cannot be downloaded ({reason}): get it another way and give it with {instead}") from None
    progress.clear()
    return path


def downloads(arguments):
    """where downloaded files are kept"""
    return os.path.join(arguments.out, "downloads")


# ---- documents ----


def open_input(path):
    """the bytes of a file, unpacked if its name ends in .gz"""
    try:
        file = gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")
        start = file.read(256)
        file.seek(0)
    except READ_ERRORS as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    check_not_html(start, path)
    if start.startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a Git LFS pointer instead of the file (run `git lfs pull`)")
    return file


def read_text(path):
    with open_input(path) as file:
        try:
            return file.read().decode("utf-8")
        except READ_ERRORS as error:
            raise InputError(f"{path}: expected UTF-8 text: {one_line(error)}") from None


def read_lines(path):
    """(line, its number) of those that are not blank"""
    with open_input(path) as file:
        try:
            yield from ((line, number) for number, line in enumerate(file, 1) if line.strip())
        except READ_ERRORS as error:
            raise InputError(f"{path}: cannot be read: {one_line(error)}") from None


def read_json_lines(path):
    """(object, "path:line") of each line"""
    for line, number in read_lines(path):
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where}: expected a JSON object: {one_line(error)}") from None
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected a JSON object, found {line[:60].decode(errors='replace')!r}")
        yield record, where


def text_of(record, key, where):
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{where}: expected an object with the text "{key}", found {one_line(json.dumps(record))[:80]}')
    return text


def read_parquet(path, key):
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: Parquet needs Python's pyarrow (pip install pyarrow); or give JSON Lines") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=[key]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (pyarrow.ArrowException, OSError, IndexError) as error:
        raise InputError(f'{path}: expected Parquet with a column "{key}": {one_line(error)}') from None


def read_documents(path, key):
    """The documents of one file, told by the end of its name: .parquet, .jsonl, .json (a list), all but the first also
    .gz, or text, one document or several with <|endoftext|> between them; `key` names the text of an object."""
    name = path[:-3] if path.endswith(".gz") else path
    if name.endswith(".parquet"):
        yield from read_parquet(path, key)
    elif name.endswith(".jsonl"):
        yield from (text_of(record, key, where) for record, where in read_json_lines(path))
    elif name.endswith(".json"):
        yield from json_documents(read_text(path), key, path)
    else:
        yield from (text for text in read_text(path).split("<|endoftext|>") if text.strip())


def json_documents(text, key, where):
    try:
        records = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: expected JSON: {one_line(error)}") from None
    if not isinstance(records, list):
        raise InputError(f"{where}: expected a list of objects")
    return [text_of(record, key, f"{where}, object {i}") for i, record in enumerate(records)]


def tar_members(path, ending):
    """(name, bytes) of the files in an archive whose names end so, in order of their names"""
    try:
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile() and m.name.endswith(ending)
                       and not os.path.basename(m.name).startswith(".")]
            for member in sorted(members, key=lambda m: m.name):
                yield member.name, archive.extractfile(member).read()
    except READ_ERRORS as error:
        raise InputError(f"{path}: expected a tar archive: {one_line(error)}") from None


def read_csv(text, where):
    try:
        return list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise InputError(f"{where}: expected comma-separated values: {one_line(error)}") from None
