"""
What is recorded of runs, read for plot.py and dashboard.py: metrics.jsonl (llmc/run/log.h says what is in it), also
while a trainer appends to it, and settings.json. What cannot be used is an InputError, one line that says where, what
was expected and what was found.
"""
import json
import math
import os
import stat
import time

KEYS = ("step", "loss", "norm", "lr", "ms", "tokens", "tok_per_s", "peak", "skipped", "val_loss", "val_bpb", "time")
# Okabe and Ito's colours, which people with any kind of colour vision tell apart; the second list is for dark pages
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4d")
DARK_COLORS = ("#56b4e9", "#ff8c42", "#2fc79a", "#e39ac4", "#f0c34e", "#9ad4f5", "#c9c9c9")
DASHES = ("", "6 3", "2 3")  # after the last colour they come again, dashed
SAME_IN_NONE = ("command", "starts", "options.run")  # settings that say nothing of why two runs differ
# of diagrams of keys that trainers explain in the first line of metrics.jsonl, in this order; of others the key. A
# small diagram has room for 24 letters
TITLES = {"balance": "balance of routers", "z": "z-loss of routers", "idle_experts": "experts without a token",
          "mtp_loss": "loss of MTP", "index_loss": "loss of the indexers",
          "acc5": "accuracy, five guesses", "perplexity": "perplexity", "ce_loss": "cross entropy",
          "hpn_loss": "loss of prototypes", "label_cosine": "cosine to the target", "collapse": "cosine among states",
          "ff_loss_mean": "loss, Forward-Forward", "bp_applied": "back-propagation",
          "bp_updates_applied": "updates by AdamW",
          "ff_updates_applied": "updates, Forward-Forward", "conflict_layers": "layers in conflict",
          "clipped": "clipped gradients", "data_wait_ms": "wait for batches", "epoch": "epochs", "rss_mb": "memory"}
LARGEST_STEP = 2**53  # up to here a double counts
LONGEST_LINE = 1 << 20
BLOCK = 1 << 20
MOST_KEYS = 64
N_REMEMBERED = 256  # bytes before the place where reading goes on: a file written anew has others


class InputError(Exception):
    """What is wrong with the input, in one line."""


# ---- which folders ----


def split_folders(text):
    """The folders in `runs/a runs/b`, one text as make hands it on. Names may have blanks: the longest counts."""
    words, folders = text.split(" "), []
    while words:
        n = next((n for n in range(len(words), 0, -1) if os.path.isdir(" ".join(words[:n]))), None)
        if n is None:
            return folders + [" ".join(words)] if "".join(words) else folders
        folders.append(" ".join(words[:n]))
        words = words[n:]
        while words and not words[0]:
            words.pop(0)
    return folders


# ---- metrics.jsonl ----


def is_finite(value):
    """Also of an integer, which JSON may give more digits than a double has room for."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def parse_json(data):
    """json.loads, but whatever is wrong is a ValueError; broken UTF-8 is one already."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_record(line, where):
    """One line of metrics.jsonl: {"schema": ...}, or a record with KEYS, in which what is not finite becomes null."""
    try:
        record = parse_json(line)
    except ValueError:
        raise InputError(f"{where}: expected a JSON object, found {line[:60].decode(errors='replace')!r}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {str(record)[:60]!r}")
    if "schema" in record:
        return record
    for key in KEYS:
        value = record.get(key, "nothing")
        if value is None:
            continue
        if not isinstance(value, (int, float)):
            raise InputError(f"{where}: {key}: expected a number or null, found {str(value)[:60]!r}")
        if not is_finite(value):
            record[key] = None
    step = record["step"]
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise InputError(f"{where}: step: expected an integer 0..2^53, found {str(step)[:60]}")
    return record


def open_file(path, flags=0, dir_fd=None):
    """A descriptor of a file to read; a pipe or device would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError(f"{path}: expected a file, found a folder, pipe or device")
    return fd


class GrowingFile:
    """The lines of a file that a trainer appends to, each given once when it is whole."""

    def __init__(self):
        self.offset, self.n_lines = 0, 0  # what is read
        self.rest = b""  # the beginning of a line whose end is not written yet
        self.identity, self.before = None, b""  # which file it is, and the bytes before offset

    def is_another(self, fd):
        """Has it been replaced, cut or written anew since? Then a new GrowingFile reads it from the start."""
        status = os.fstat(fd)
        if self.identity is None:
            self.identity = (status.st_dev, status.st_ino)
        is_same = (status.st_dev, status.st_ino) == self.identity
        return not is_same or os.pread(fd, len(self.before), self.offset - len(self.before)) != self.before

    def lines(self, fd, where, until=math.inf):
        """Yields (number from 1, line) up to what the file has now, or in blocks until that time (monotonic)."""
        while block := os.pread(fd, BLOCK, self.offset):
            self.offset += len(block)
            self.before = (self.before + block)[-N_REMEMBERED:]
            *whole, self.rest = (self.rest + block).split(b"\n")
            for line in whole:
                self.n_lines += 1
                yield self.n_lines, line
            if len(self.rest) > LONGEST_LINE:
                where = f"{where}:{self.n_lines + 1}"
                raise InputError(f"{where}: expected a line, found none that ends within {LONGEST_LINE} bytes")
            if time.monotonic() >= until:  # here: of several files each gets on
                return


def meanings_of(schema):
    """{key: meaning} of the first line, as text of bounded length."""
    pairs = list(schema.items())[:MOST_KEYS] if isinstance(schema, dict) else []
    return {key: str(meaning)[:200] for key, meaning in pairs}


def read_metrics(path):
    """
    All records of now in the order of their steps, and {key: meaning}. A last line without its end counts if it is whole.
    """
    file = GrowingFile()
    try:
        with os.fdopen(open_file(path), "rb") as opened:
            lines = [pair for pair in file.lines(opened.fileno(), path) if pair[1].strip()]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    records = [parse_record(line, f"{path}:{number}") for number, line in lines]
    if file.rest.strip():
        where = f"{path}:{file.n_lines + 1}"
        try:
            records.append(parse_record(file.rest, where))
        except InputError:
            print(f"{where}: the last line is not complete (a run was stopped, or still writes): left out")
    meanings = {key: text for record in records if "schema" in record for key, text in meanings_of(record["schema"]).items()}
    return sorted((record for record in records if "schema" not in record), key=lambda record: record["step"]), meanings


# ---- settings.json ----


def flatten(settings):
    """Rows (name, value as text): names of inner objects are joined by dots."""
    rows = []

    def add(name, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else key, inner)
        else:
            rows.append((name, value if isinstance(value, str) else json.dumps(value)))

    try:
        add("", settings)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return rows


def read_settings(path):
    """The rows of settings.json; none if there is no such file."""
    try:
        with os.fdopen(open_file(path), "rb") as file:
            return flatten(parse_json(file.read()))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, InputError) as error:
        print(f"{path}: left out: {error}")
        return []
