"""
Trains a tokenizer on your own text and writes the tokenizer.json that the
trainers read (--tokenizer FILE).

    python dev/data/train_tokenizer.py PATH... --style STYLE --vocab-size N
            --out DIR

    gpt2           byte-level BPE as GPT-2's file has it: words, numbers,
                   punctuation; <|endoftext|> is the last entry
    gpt2-prefix    the same with a space put before the text (RoBERTa's setting)
    qwen2          Qwen2, 2.5, 3: NFC, their regular expression, byte-level BPE;
                   chat and tool tokens come last
    qwen3.5        Qwen3.5 and 3.6: as qwen2, with combining marks counted as
                   letters
    mistral-v0.1   BPE on characters, space as U+2581, one in front of every
                   piece; rare characters as bytes; <s> first
    mistral-v0.3   the same with U+2581 only in front of the text, and [INST]
                   and the tool tokens as single tokens

The pipeline (normaliser, splits, decoder, added tokens) is that of the
published files, so what works with a file made here works with theirs; only
vocabulary and merges are your own. One difference: v0.3's unused [control_N]
are left out. PATH is a file or a folder, read whole; binary files, and folders
and files whose names begin with a dot, are skipped. Needs the Python package
tokenizers (pip install tokenizers). Status: 0 written, 1 cannot write, 2 wrong
input.
"""
import argparse
import json
import os
import sys
from collections import Counter

try:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
except ImportError:
    Tokenizer = None  # main says so, after --help and what is wrong with the options

QWEN2_REGEX = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN35_REGEX = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>").split()
QWEN_ADDED = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>").split()
MISTRAL_SPECIAL = ["<unk>", "<s>", "</s>"]
MISTRAL_CONTROL = ("[INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
                   "[TOOL_RESULTS] [/TOOL_RESULTS]").split()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
STYLES = ("gpt2", "gpt2-prefix", "qwen2", "qwen3.5", "mistral-v0.1", "mistral-v0.3")
CHUNK_CHARS = 1 << 20  # text goes to the library in pieces of about this size, cut after a line


# ---- reading ----

def die(message, status=2):
    print(f"train_tokenizer.py: {message}", file=sys.stderr)
    raise SystemExit(status)


def files_below(paths):
    """Every file of the given files and folders, in a fixed order."""
    for path in paths:
        if not os.path.exists(path):
            die(f"{path}: no such file or folder")
        if not os.path.isdir(path):
            yield path
            continue
        for folder, folders, files in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            yield from (os.path.join(folder, name) for name in sorted(files) if not name.startswith("."))


def read_text(path):
    """The text of a file; None for a binary one: a NUL in its first 8 KB, or bytes that are not UTF-8."""
    try:
        with open(path, "rb") as file:
            start = file.read(8192)
            if b"\0" in start:
                return None
            return (start + file.read()).decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        die(f"{path}: {error.strerror}")


class Text:
    """The training text in pieces; counts what it read, and says so on a terminal."""

    def __init__(self, paths):
        self.paths = list(files_below(paths))
        self.sample = ""  # the first piece, to measure the result on

    def __iter__(self):
        self.n_files = self.n_chars = self.n_bytes = self.n_skipped = 0
        for path in self.paths:
            text = read_text(path)
            if text is None:
                self.n_skipped += 1
                continue
            self.n_files += 1
            self.n_chars += len(text)
            self.n_bytes += len(text.encode())
            if sys.stderr.isatty():
                read = f"{self.n_files} of {len(self.paths)} files, {self.n_bytes / 1e6:.1f} MB"
                print(f"\rread {read}", end="", file=sys.stderr)
            yield from self.pieces(text)
        if sys.stderr.isatty():
            print(file=sys.stderr)

    def pieces(self, text):
        begin = 0
        while begin < len(text):
            end = begin + CHUNK_CHARS
            end = len(text) if end >= len(text) else text.find("\n", end) + 1 or len(text)
            self.sample = self.sample or text[begin:end]
            yield text[begin:end]
            begin = end


# ---- the pipelines of the published files ----

def added_token(id, content, special, normalized=False):
    return {"id": id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": normalized, "special": special}


def byte_level(prefix, trim, use_regex=None):
    """use_regex is younger than GPT-2's file, which lacks it: it is true then."""
    step = {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim}
    return step if use_regex is None else {**step, "use_regex": use_regex}


def gpt2_file(vocab, merges, prefix):
    vocab = {**vocab, "<|endoftext|>": len(vocab)}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added_token(len(vocab) - 1, "<|endoftext|>", special=True, normalized=True)],
        "normalizer": None,
        "pre_tokenizer": byte_level(prefix, trim=True),
        "post_processor": byte_level(True, trim=False),
        "decoder": byte_level(True, trim=True),
        # no "type" and no "byte_fallback": the file of 2019 knows neither
        "model": {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                  "fuse_unk": False, "vocab": vocab, "merges": merges},
    }


def qwen_file(vocab, merges, regex):
    added = [(content, True) for content in QWEN_SPECIAL] + [(content, False) for content in QWEN_ADDED]
    plain = byte_level(False, trim=False, use_regex=False)
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added_token(len(vocab) + i, *token) for i, token in enumerate(added)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}, plain]},
        "post_processor": plain,
        "decoder": plain,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab, "merges": merges},
    }


def mistral_file(vocab, merges, special, metaspace):
    def template(*letters):
        """<s> before each sequence, type_id its number"""
        steps = []
        for type_id, letter in enumerate(letters):
            steps.append({"SpecialToken": {"id": "<s>", "type_id": type_id}})
            steps.append({"Sequence": {"id": letter, "type_id": type_id}})
        return steps

    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                                   {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [added_token(id, content, special=True) for id, content in enumerate(special)],
        "normalizer": None if metaspace else prepend,
        "pre_tokenizer": first if metaspace else None,
        "post_processor": {"type": "TemplateProcessing", "single": template("A"), "pair": template("A", "B"),
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": vocab, "merges": merges},
    }


# ---- training ----

def first_entries(style):
    """Tokens that stand before the learned ones (Mistral), and how many come after them."""
    if style == "mistral-v0.1":
        return MISTRAL_SPECIAL + BYTE_TOKENS, 0
    if style == "mistral-v0.3":
        return MISTRAL_SPECIAL + MISTRAL_CONTROL + BYTE_TOKENS, 0
    return [], 1 if style.startswith("gpt2") else len(QWEN_SPECIAL + QWEN_ADDED)


def smallest_vocabulary(style):
    first, n_after = first_entries(style)
    return (len(first) + 128) if first else 256 + n_after


def most_frequent(text, n):
    """The n most frequent characters, a space being U+2581; of equals the lower ones."""
    counts = Counter()
    for piece in text:
        counts.update(piece)
    counts["▁"] += counts.pop(" ", 0)
    return sorted(counts, key=lambda char: (-counts[char], char))[:n]


def learner(text, style, vocab_size, progress):
    """A tokenizer that splits as the training needs it, and its trainer."""
    first, n_after = first_entries(style)
    tokenizer = Tokenizer(models.BPE())
    if first:
        # no token spans two words or two digits: so do the published vocabularies, which SentencePiece made
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True)])
        n_letters = max(128, (vocab_size - len(first)) // 8)  # rarer ones are left to the byte tokens
        alphabet = most_frequent(text, n_letters)
        return tokenizer, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=first, initial_alphabet=alphabet,
                                              limit_alphabet=len(alphabet), max_token_length=16, show_progress=progress)
    if style.startswith("gpt2"):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=style == "gpt2-prefix")
    else:
        regex = QWEN2_REGEX if style == "qwen2" else QWEN35_REGEX
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(regex), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ])
    return tokenizer, trainers.BpeTrainer(vocab_size=vocab_size - n_after, show_progress=progress,
                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def train(text, style, vocab_size, progress=False):
    """The content of a tokenizer.json, trained on strings; `text` may be iterated over twice."""
    tokenizer, trainer = learner(text, style, vocab_size, progress)
    tokenizer.train_from_iterator(text, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab = dict(sorted(model["vocab"].items(), key=lambda entry: entry[1]))
    merges = [" ".join(pair) for pair in model["merges"]]
    if style.startswith("gpt2"):
        return gpt2_file(vocab, merges, prefix=style == "gpt2-prefix")
    if style.startswith("qwen"):
        return qwen_file(vocab, merges, QWEN2_REGEX if style == "qwen2" else QWEN35_REGEX)
    metaspace = style == "mistral-v0.3"
    return mistral_file(vocab, merges, MISTRAL_SPECIAL + (MISTRAL_CONTROL if metaspace else []), metaspace)


def write_json(content, path):
    """All of it or nothing; vocabulary and merges are most of it, so one line holds all."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    Tokenizer.from_str(text)  # the library reads it back, or says what is wrong
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser(
        prog="train_tokenizer.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__,
        epilog="example:\n    train_tokenizer.py README.md doc llmc --style gpt2 --vocab-size 4096 --out t")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a text file or a folder of them")
    parser.add_argument("--style", required=True, choices=STYLES, metavar="STYLE")
    parser.add_argument("--vocab-size", required=True, type=int, metavar="N", help="tokens in all, added ones included")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for tokenizer.json, or a name in .json")
    options = parser.parse_args()
    if Tokenizer is None:
        in_venv = sys.prefix != sys.base_prefix
        pip = os.path.relpath(os.path.join(sys.prefix, "bin/pip")) if in_venv else "pip"  # of .venv/bin/python
        die(f"needs the Python package tokenizers: {pip} install tokenizers", status=1)
    least = smallest_vocabulary(options.style)
    if options.vocab_size < least:
        die(f"--vocab-size: expected at least {least} for {options.style} (bytes and added tokens), "
            f"found {options.vocab_size}")
    path = options.out if options.out.endswith(".json") else os.path.join(options.out, "tokenizer.json")
    text = Text(options.paths)
    content = train(text, options.style, options.vocab_size, progress=sys.stderr.isatty())
    if text.n_chars == 0:
        die(f"no text in {' '.join(options.paths)} ({text.n_skipped} files skipped: binary)")
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_json(content, path)
    except OSError as error:
        die(f"{error.filename}: {error.strerror}", status=1)
    tokenizer = Tokenizer.from_file(path)
    n_tokens = tokenizer.get_vocab_size()
    skipped = f" ({text.n_skipped} files skipped: binary)" if text.n_skipped else ""
    print(f"trained on {text.n_files} files, {text.n_bytes / 1e6:.1f} MB{skipped}")
    if n_tokens < options.vocab_size:
        print(f"the text gives only {n_tokens} of {options.vocab_size} tokens: every word of it is one token now")
    n_ids = len(tokenizer.encode(text.sample, add_special_tokens=False).ids)
    bytes_per_token = len(text.sample.encode()) / max(1, n_ids)
    print(f"wrote {path}: {n_tokens} tokens, {bytes_per_token:.2f} bytes per token on its first text")


if __name__ == "__main__":
    main()
