"""
Holds llmc/text/tokenizer.h against Hugging Face tokenizers, which is right by definition: adversarial strings through both,
token ids and decoded text compared.

    python dev/ref/check_tokenizer.py                      5,000 strings for each of about 50 tokenizers
    python dev/ref/check_tokenizer.py --strings 100000     more of them
    python dev/ref/check_tokenizer.py --style qwen2 --seed 7     only tokenizers whose names begin so; other strings
    python dev/ref/check_tokenizer.py --every-character    also every character of Unicode; minutes for each tokenizer
    python dev/ref/check_tokenizer.py --write-fixtures     write dev/golden/tokenizers anew

The tokenizers are the byte tokenizer as models are exported with it, those of dev/golden/tokenizers (six styles, trained
on sample.txt there) and variants of them: other vocabulary sizes, merges as pairs, every kind of added token, other
post-processors, decoders, regular expressions, no byte fallback. A difference is shrunk to the shortest string that still
shows it. A tokenizer runs in a process of its own, so a crash or an endless loop is one failure and names its string.
Files that must be refused are tried too.
dev/golden/tokenizers/STYLE.expected.jsonl holds strings with the ids and decoded text (special tokens not skipped) that
the library gives; they test the C code where the library is not installed, and are compared with the library here.
Status: 0 all equal, 1 not. Needs the package tokenizers; without it the last line says "1 skipped".
"""
import argparse
import ctypes
import functools
import json
import mmap
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, namedtuple
from multiprocessing.connection import wait

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are forked
os.environ["RUST_BACKTRACE"] = "0"
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIXTURES = os.path.join(ROOT, "dev", "golden", "tokenizers")

try:
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"skipped: {missing}")
    print("0 passed, 0 failed, 1 skipped")
    raise SystemExit(0)
from tokenizer_files import FOREIGN_REGEX, MAY_BE_REFUSED, must_be_refused, training, variants
from tokenizer_strings import CASES, Strings, character_tables, long_strings, old_points, strings_of_every_character

STYLES = training.STYLES
N_FIXTURE = 300        # strings in an expected.jsonl
FIXTURE_VOCAB = 800
SHOWN = 3              # differences shown of each kind and tokenizer
SHRINK_SECONDS = 10
WRONG_BYTES = (0x80, 0xBF, 0xC0, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xF8, 0xFF)  # put into UTF-8 anywhere, these break it


# ---- the C side ----

def build_wrapper(headers, flags, folder, source="tokenizer_shared.c"):
    """Compiles dev/ref/tokenizer_shared.c against the headers of a tree, and loads it; or a source that includes it."""
    path = os.path.join(folder, "tokenizer_shared.so")
    with open(os.path.join(headers, "Makefile"), encoding="utf-8") as file:
        libraries = re.search(r"^LIBS *=(.*)$", file.read(), re.MULTILINE).group(1)
    command = [os.environ.get("CC", "cc"), "-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g", "-fopenmp", "-fPIC", "-shared",
               *shlex.split(flags), "-I" + headers, os.path.join(ROOT, "dev", "ref", source), "-o", path,
               *libraries.split()]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stderr)
        raise SystemExit("check_tokenizer.py: the C tokenizer does not compile: " + shlex.join(command))
    library = ctypes.CDLL(path)
    library.shared_open.restype = library.shared_decode.restype = ctypes.c_void_p
    library.shared_open.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    library.shared_encode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t,
                                      ctypes.POINTER(ctypes.POINTER(ctypes.c_int))]
    library.shared_decode.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int,
                                      ctypes.POINTER(ctypes.c_size_t)]
    library.shared_close.argtypes = library.shared_free.argtypes = [ctypes.c_void_p]
    return library


class Refused(Exception):
    """The C side does not accept a tokenizer.json; its reason."""


class CTokenizer:
    def __init__(self, library, text):
        reason = ctypes.create_string_buffer(1000)
        self.library = library
        self.t = library.shared_open(text, len(text), reason, len(reason))
        if not self.t:
            raise Refused(reason.value.decode(errors="replace"))

    def encode(self, text):
        """The ids of a string or of bytes."""
        text = text if isinstance(text, bytes) else text.encode()
        ids = ctypes.POINTER(ctypes.c_int)()
        n = self.library.shared_encode(self.t, text, len(text), ctypes.byref(ids))
        out = ids[:n] if n > 0 else []
        self.library.shared_free(ids)
        return out

    def decode(self, ids, skip_special):
        """Bytes, for they need not be UTF-8 if the C side is wrong."""
        n_bytes = ctypes.c_size_t()
        p = self.library.shared_decode(self.t, (ctypes.c_int * len(ids))(*ids), len(ids), skip_special,
                                       ctypes.byref(n_bytes))
        out = ctypes.string_at(p, n_bytes.value)
        self.library.shared_free(p)
        return out


# ---- comparing ----

def read_file(path):
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()


@functools.cache
def sample_text(): return read_file(os.path.join(FIXTURES, "sample.txt"))


Difference = namedtuple("Difference", "what input theirs ours")


class Pair:
    """The library's and our tokenizer of one file."""

    def __init__(self, library, text):
        self.theirs = Tokenizer.from_str(text.decode())
        self.ours = CTokenizer(library, text)
        self.n_ids = self.theirs.get_vocab_size()

    def their_ids(self, text):
        """None where the library itself panics: white space claimed by an rstrip and an lstrip token, or by two."""
        try:
            return self.theirs.encode(text).ids
        except BaseException as error:  # a panic is not an Exception
            if "PanicException" not in type(error).__name__:
                raise
            return None

    def their_batch(self, texts):
        try:
            return [encoding.ids for encoding in self.theirs.encode_batch_fast(texts)]
        except BaseException as error:
            if "PanicException" not in type(error).__name__:
                raise
            return [self.their_ids(text) for text in texts]

    def encoded(self, text):
        """Both; equal where there is no truth."""
        theirs, ours = self.their_ids(text), self.ours.encode(text)
        return (ours if theirs is None else theirs), ours

    def decoded(self, ids, skip):
        return self.theirs.decode(ids, skip_special_tokens=bool(skip)).encode(), self.ours.decode(ids, skip)


def shrink(items, differs):
    """The shortest part of a list that still differs, then with simpler items; a list of characters or ids."""
    stop, size = time.monotonic() + SHRINK_SECONDS, max(1, len(items) // 2)
    while size and time.monotonic() < stop:
        begin, smaller = 0, False
        while begin < len(items) and time.monotonic() < stop:
            shorter = items[:begin] + items[begin + size:]
            if differs(shorter):
                items, smaller = shorter, True
            else:
                begin += size
        if size > 1 or not smaller:
            size = size // 2
    for i, item in enumerate(items):
        for simple in "a ":
            simpler = items[:i] + [simple] + items[i + 1:]
            if isinstance(item, str) and item not in "a " and time.monotonic() < stop and differs(simpler):
                items = simpler
                break
    return items


def shown_text(text):
    """ASCII only, long ones cut"""
    text = ascii(text)
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-100:]} ({len(text)} characters)"


def named(tokenizer, ids):
    ids = list(ids)
    words = [f"{id}={ascii(tokenizer.id_to_token(id))}" for id in ids[:30]]
    return " ".join(words) + (f" ... ({len(ids)} ids)" if len(ids) > 30 else "") or "(none)"


def encode_difference(pair, text):
    def differs(chars):
        theirs, ours = pair.encoded("".join(chars))
        return theirs != ours

    text = "".join(shrink(list(text), differs))
    theirs, ours = pair.encoded(text)
    return Difference("encode", shown_text(text), named(pair.theirs, theirs), named(pair.theirs, ours))


def decode_difference(pair, ids, skip):
    def differs(some):
        theirs, ours = pair.decoded(some, skip)
        return theirs != ours

    ids = shrink(list(ids), differs)
    theirs, ours = pair.decoded(ids, skip)
    return Difference(f"decode, special tokens {'skipped' if skip else 'kept'}", named(pair.theirs, ids), repr(theirs),
                      repr(ours))


class Note:
    """Shared memory that says which string a process is at, for whoever finds it dead."""

    SIZE = 1 << 16

    def __init__(self):
        self.memory = mmap.mmap(-1, self.SIZE)

    def write(self, what, value):
        value = shown_text(value) if isinstance(value, (str, bytes)) else str(value)[:2000]
        text = f"{what} {value}".encode()
        self.memory[:8] = len(text).to_bytes(8, "little")
        self.memory[8:8 + len(text)] = text

    def read(self):
        return self.memory[8:8 + int.from_bytes(self.memory[:8], "little")].decode(errors="replace")


class Comparison:
    """Counts of one tokenizer, and the first differences of each kind."""

    def __init__(self, pair, note):
        self.pair, self.note = pair, note
        self.n_strings = self.n_without_truth = self.n_differ = 0
        self.differences = []
        self.n_kind = defaultdict(int)

    def differ(self, kind, make):
        self.n_kind[kind] += 1
        if self.n_kind[kind] <= 10 * SHOWN and sum(d.what.startswith(kind) for d in self.differences) < SHOWN:
            difference = make()
            if difference not in self.differences:
                self.differences.append(difference)

    def strings(self, texts):
        """Compares ids; then both decodings of them. Returns the ids."""
        all_ids = self.pair.their_batch(texts)
        for text, ids in zip(texts, all_ids):
            self.note.write("encode", text)
            ours = self.pair.ours.encode(text)
            if ids is None:
                self.n_without_truth += 1
                continue
            self.n_strings += 1
            if ours != ids:
                self.n_differ += 1
                self.differ("encode", lambda: encode_difference(self.pair, text))
        all_ids = [ids for ids in all_ids if ids is not None]
        self.sequences(all_ids)
        return all_ids

    def sequences(self, all_ids):
        for skip in (0, 1):
            decoded = self.pair.theirs.decode_batch(all_ids, skip_special_tokens=bool(skip))
            for ids, theirs in zip(all_ids, decoded):
                self.note.write("decode", ids)
                if self.pair.ours.decode(ids, skip) != theirs.encode():
                    self.n_differ += 1
                    self.differ("decode", lambda: decode_difference(self.pair, ids, skip))

    def broken_bytes(self, strings, n):
        """Not UTF-8: either nothing, or as if U+FFFD stood there; above all, no crash."""
        for _ in range(n):
            text = bytearray(strings.string().encode())
            for _ in range(strings.rng.randint(1, 3)):
                text.insert(strings.rng.randint(0, len(text)), strings.rng.choice(WRONG_BYTES))
            text = bytes(text[:strings.rng.randint(1, len(text))])
            self.note.write("encode bytes", text)
            ours = self.pair.ours.encode(text)
            mended = text.decode(errors="replace")
            theirs = None if strings.old_only and old_points(mended) != mended else self.pair.their_ids(mended)
            if ours and theirs is not None and ours != theirs:
                self.n_differ += 1
                ids = [named(self.pair.theirs, theirs), named(self.pair.theirs, ours)]
                self.differ("bytes", lambda: Difference("bytes that are not UTF-8", shown_text(text), *ids))


def compare(library, name, text, options, note, out):
    """One tokenizer, in a process of its own."""
    note.write("open", name)
    try:
        pair = Pair(library, text)
    except Refused as refused:
        out.send((0, 0, [Difference("open", name, "accepts the file", f"refuses: {refused}")], 0))
        return
    comparison = Comparison(pair, note)
    foreign = name in FOREIGN_REGEX
    strings = Strings(f"{options.seed} {name}", pair.theirs, sample_text(), old_only=foreign)
    comparison.strings([old_points(text) for text in CASES] if foreign else CASES)
    if name in STYLES:
        comparison.strings(long_strings() + ["".join(strings.string() for _ in range(5000))])
    while comparison.n_strings + comparison.n_without_truth < options.strings:
        n = min(1000, options.strings - comparison.n_strings)
        all_ids = comparison.strings([strings.string() for _ in range(n)])
        comparison.sequences([strings.id_sequence(all_ids, pair.n_ids + 2) for _ in range(n)])
    for texts in strings_of_every_character() if options.every_character else ():
        comparison.strings([old_points(text) for text in texts] if foreign else texts)
    comparison.broken_bytes(strings, max(100, options.strings // 50))
    out.send((comparison.n_strings, comparison.n_differ, comparison.differences, comparison.n_without_truth))


def refuse(library, name, text, options, note, out):
    note.write("open", name)
    try:
        CTokenizer(library, text)
    except Refused as refused:
        reason = str(refused)
        fault = "" if reason and "\n" not in reason else "refused without a reason in one line"
        out.send((1, bool(fault), [Difference("open", name, "one line", fault)] if fault else [], 0))
        return
    out.send((1, 1, [Difference("open", name, "refuses the file", "accepts it")], 0))


# ---- running ----

Job = namedtuple("Job", "name process note out messages started")


def with_messages_to(messages, work, *arguments):
    """What is written on stderr matters only if the process dies: the library's panics would fill the screen."""
    os.dup2(messages.fileno(), 2)
    work(*arguments)


def start(context, work, library, name, text, options):
    note, (receiver, sender), messages = Note(), context.Pipe(False), tempfile.TemporaryFile()
    process = context.Process(target=with_messages_to,
                              args=(messages, work, library, name, text, options, note, sender))
    process.start()
    sender.close()
    return Job(name, process, note, receiver, messages, time.monotonic())


def finish(job, limit):
    """(strings, differing, differences, strings without truth) of a process that ended, or that has to."""
    try:
        if job.out.poll(max(0.0, job.started + limit - time.monotonic())):
            result = job.out.recv()
            job.process.join()
            return result
        what = f"no answer in {limit} s"
        job.process.kill()
    except EOFError:
        what = "the process died"
    job.process.join()
    if job.process.exitcode != -9:
        job.messages.seek(0)
        last_words = job.messages.read()[-3000:].decode(errors="replace")
        what += f", status {job.process.exitcode}; its last words:\n{last_words}"
    return 0, 1, [Difference("crash", job.note.read(), "an answer", what)], 0


def run_all(work, library, tasks, options, limit):
    """Yields (name, result) of every task, two or more at a time, in order."""
    context = multiprocessing.get_context("fork")
    jobs, tasks = [], list(tasks)
    while jobs or tasks:
        while tasks and len(jobs) < (os.cpu_count() or 1):
            jobs.append(start(context, work, library, *tasks.pop(0), options))
        left = max(0.0, jobs[0].started + limit - time.monotonic())
        wait([jobs[0].out], timeout=left)
        job = jobs.pop(0)
        yield job.name, finish(job, limit)


def show(differences):
    for difference in differences:
        print(f"    {difference.what}: {difference.input}")
        print(f"        expected {difference.theirs}\n        found    {difference.ours}")


# ---- fixtures ----

def fixture_path(style, suffix): return os.path.join(FIXTURES, style + suffix)


def as_bytes(content): return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def fixture_texts(style, tokenizer):
    """The cases, and random strings for the rest, short enough to be looked at."""
    strings = Strings(f"fixtures {style}", tokenizer, sample_text())
    texts = list(dict.fromkeys(CASES))
    while len(texts) < N_FIXTURE:
        text = strings.string()
        if len(text) <= 60 and text not in texts:
            texts.append(text)
    return texts


def expected_line(tokenizer, text):
    ids = tokenizer.encode(text).ids
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    line = json.dumps({"text": text, "ids": ids, "decoded": decoded}, separators=(",", ":"))
    return line + "\n"  # ASCII: nothing invisible


def write_fixtures():
    for style in STYLES:
        training.write_json(training.train([sample_text()], style, FIXTURE_VOCAB), fixture_path(style, ".json"))
        tokenizer = Tokenizer.from_file(fixture_path(style, ".json"))
        texts = fixture_texts(style, tokenizer)
        with open(fixture_path(style, ".expected.jsonl"), "w", encoding="ascii") as file:
            file.writelines(expected_line(tokenizer, text) for text in texts)
        print(f"dev/golden/tokenizers/{style}.json: {tokenizer.get_vocab_size()} tokens, {len(texts)} strings")


def fixtures_differ(style):
    """Lines of expected.jsonl that the library does not write today."""
    tokenizer = Tokenizer.from_file(fixture_path(style, ".json"))
    with open(fixture_path(style, ".expected.jsonl"), encoding="ascii") as file:
        lines = file.readlines()
    return len(lines), sum(expected_line(tokenizer, json.loads(line)["text"]) != line for line in lines)


# ---- the three parts: each yields whether something failed, once for each promise ----

def check_fixtures(options):
    for style in STYLES:
        if style.startswith(options.style):
            n, n_differ = fixtures_differ(style)
            print(f"fixtures of {style}: {n} strings, {n_differ} differ")
            yield n_differ != 0


def check_strings(library, files, options):
    tasks = [(name, content if isinstance(content, bytes) else as_bytes(content))
             for name, content in variants(files, sample_text()) if name.startswith(options.style)]
    limit = 300 + options.strings * 0.05 + options.every_character * 3600  # seconds; generous, for a busy machine
    for name, (n, n_differ, differences, n_panics) in run_all(compare, library, tasks, options, limit):
        if name in MAY_BE_REFUSED and differences and differences[0].what == "open":
            print(f"{name}: {differences[0].ours}, as it may", flush=True)
            yield False
            continue
        panics = f" ({n_panics} more: the library panics)" if n_panics else ""
        print(f"{name}: {n} strings, {n_differ} differ{panics}", flush=True)
        show(differences)
        yield bool(differences or n_differ)


def bytes_differences(tokenizer, options):
    """The byte tokenizer's own file: the ids of a text are its bytes, and bytes are the text that Python reads in them."""
    end_of_text = "<|endoftext|>"  # written out in a text it is one token to the library, and thirteen bytes to us
    strings = Strings(f"{options.seed} bytes", tokenizer, sample_text())
    for text in [*CASES, *(strings.string() for _ in range(options.strings))]:
        ids = tokenizer.encode(text).ids
        expected = [id for piece in text.split(end_of_text) for id in (256, *piece.encode())][1:]
        if ids != expected:
            yield Difference("encode", shown_text(text), expected, ids)
    random_ids = [strings.rng.choices(range(256), k=strings.rng.randint(2, 12)) for _ in range(options.strings)]
    for ids in [*([id] for id in range(256)), *random_ids]:
        text = bytes(ids).decode(errors="replace")
        if tokenizer.decode(ids) != text:
            yield Difference("decode", ids, text, tokenizer.decode(ids))
    if [tokenizer.token_to_id(tokenizer.id_to_token(id)) for id in range(257)] != list(range(257)):
        yield Difference("tokens", "0..256", "names of their own", tokenizer.get_vocab())


def check_bytes(library, path, options):
    differences = list(bytes_differences(Tokenizer.from_file(path), options))
    print(f"the file of --tokenizer bytes: {options.strings} strings, 256 bytes, {len(differences)} differ", flush=True)
    show(differences[:SHOWN])
    yield bool(differences)


def check_refusals(library, files, options):
    for name, (_, _, differences, _) in run_all(refuse, library, must_be_refused(files), options, 30):
        if differences:
            print(f"refusal, {name}:")
            show(differences)
        yield bool(differences)


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--strings", type=int, default=5000, metavar="N", help="strings for each tokenizer (5000)")
    parser.add_argument("--style", action="append", metavar="S", help="only tokenizers whose names begin so")
    parser.add_argument("--seed", type=int, default=1, metavar="K", help="other strings (1)")
    parser.add_argument("--headers", default=ROOT, metavar="DIR", help="the tree with the llmc/text/tokenizer.h to check")
    parser.add_argument("--flags", default="", help="more flags for the compiler, in one argument")
    parser.add_argument("--every-character", action="store_true", help="also a string for each character of Unicode")
    parser.add_argument("--write-fixtures", action="store_true", help="write dev/golden/tokenizers anew, check nothing")
    options = parser.parse_args()
    options.style = tuple(options.style or [""])
    if options.write_fixtures:
        write_fixtures()
        return 0

    files = {style: json.loads(read_file(fixture_path(style, ".json"))) for style in STYLES}
    failures = [*check_fixtures(options)]
    with tempfile.TemporaryDirectory() as folder:
        character_tables()  # before the processes part
        library = build_wrapper(os.path.abspath(options.headers), options.flags, folder)
        library.shared_save_bytes(folder.encode())
        path = os.path.join(folder, "tokenizer.json")
        if "bytes".startswith(options.style):
            failures += check_bytes(library, path, options)
        files["bytes"] = json.loads(read_file(path))
        failures += check_strings(library, files, options)
        if options.style == ("",):
            failures += check_refusals(library, files, options)
    print(f"{failures.count(False)} passed, {failures.count(True)} failed")
    return True in failures


if __name__ == "__main__":
    sys.exit(main())
