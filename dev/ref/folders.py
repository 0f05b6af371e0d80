"""
Folders of models as fp8.py and fp4.py read and write them; nothing is shared with llmc/files/. NumPy and the standard
library only.

Weights are those that train_* take: model.safetensors, or else the files that model.safetensors.index.json names.
config.json, the tokenizer's files and generation_config.json go along. A new folder is written beside its own name, as
NAME.tmp123, and takes its place when it and all that are written with it are whole. It replaces nothing but a folder
that the same program has written ("written_by" in config.json), with the same other one or alone ("beside"), and in
which nothing else lies. What cannot be read or may not be replaced is one line and status 2, a disk that is
full status 1.
"""
import collections
import json
import os
import re
import signal
import sys

import numpy as np

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "I8": np.uint8,
         "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}
QUANTIZED = ("I8", "F8_E4M3", "F8_E8M0")
ALONG = ("generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
         "processor_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
         "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MAX_HEADER = 100_000_000

# tensors: {name: (dtype, array)}; beside: the folder that has the same numbers in other types, or None
Folder = collections.namedtuple("Folder", "path source tensors n_shards quantization beside",
                                defaults=(1, None, None))


def program():
    return os.path.basename(sys.argv[0])


def regex(option, text):
    try:
        return re.compile(text)
    except re.error as error:
        fail(f"{option}: expected a regular expression, found an error: {error}")


def fail(text, status=2):
    print(f"{program()}: {text}", file=sys.stderr)
    sys.exit(status)


# ---- reading ----

def open_file(path):
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"{path}: expected a file, found something else")
    return open(path, "rb")  # what goes wrong here run() says


def read_json(path):
    with open_file(path) as file:
        try:
            value = json.loads(file.read())
        except (ValueError, RecursionError) as error:
            fail(f"{path}: expected JSON, found an error: {error}")
    if not isinstance(value, dict):
        fail(f"{path}: expected a JSON object, found a {type(value).__name__}")
    return value


def weight_files(folder):
    """[(path, names that the index has there or None)]"""
    path = os.path.join(folder, WEIGHTS)
    if os.path.lexists(path):
        return [(path, None)]
    index = os.path.join(folder, INDEX)
    weight_map, names = read_json(index).get("weight_map"), collections.defaultdict(list)
    if not isinstance(weight_map, dict) or not weight_map:
        fail(f"{index}: expected \"weight_map\", an object of tensor names and their files, found no such")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[^./\\][^/\\]*\.safetensors", shard):
            fail(f"{index}: tensor \"{name}\": expected a file of this folder that ends in .safetensors, found "
                 f"{shard!r}")
        names[shard].append(name)
    return [(os.path.join(folder, shard), names[shard]) for shard in sorted(names)]


def read_tensor(path, name, entry, data):
    """of one entry of a header, which may say anything"""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        fail(f"{path}: tensor \"{name}\": expected dtype, shape and data_offsets, found {entry!r}")
    if dtype not in TYPES:
        fail(f"{path}: tensor \"{name}\": expected one of {', '.join(TYPES)}, found {dtype}")
    if not all(type(n) is int and n >= 0 for n in whole):
        fail(f"{path}: tensor \"{name}\": expected whole numbers as shape and data_offsets, found {entry!r}")
    n_bytes = np.dtype(TYPES[dtype]).itemsize
    for n in shape:
        n_bytes *= n
    if end - begin != n_bytes:
        fail(f"{path}: tensor \"{name}\": expected {n_bytes} bytes of {dtype} {tuple(shape)}, found {end - begin}")
    if end > len(data):
        fail(f"{path}: tensor \"{name}\": expected bytes {begin} to {end}, found {len(data)} in all: the file is cut "
             "short, copy or download it again")
    return dtype, np.frombuffer(data[begin:end], TYPES[dtype]).reshape(shape)


def read_file(path):
    with open_file(path) as file:
        data = file.read()
    n_header = int.from_bytes(data[:8], "little")
    if len(data) < 8 or n_header > MAX_HEADER:
        fail(f"{path}: expected safetensors, found {len(data)} bytes of something else")
    if 8 + n_header > len(data):
        fail(f"{path}: expected a header of {n_header} bytes, found {len(data) - 8}: the file is cut short, copy or "
             "download it again")
    try:
        header = json.loads(data[8:8 + n_header])
        header.pop("__metadata__", None)
    except (ValueError, RecursionError, TypeError, AttributeError):
        fail(f"{path}: expected safetensors, found a header that is no JSON object")
    data = memoryview(data)[8 + n_header:]
    return {name: read_tensor(path, name, entry, data) for name, entry in header.items()}


def read_folder(folder):
    """{name: (dtype, array)} of what train_* read of it"""
    out = {}
    for path, names in weight_files(folder):
        tensors = read_file(path)
        for name in names or []:
            if name not in tensors:
                fail(f"{os.path.join(folder, INDEX)}: expected tensor \"{name}\" in {os.path.basename(path)}, found "
                     "none")
        for name in tensors:
            if name in out:
                fail(f"{path}: tensor \"{name}\" is in two files: nobody can say which one counts")
        out.update(tensors)
    if not out:
        fail(f"{folder}: expected tensors, found none")
    return out


def check_source(folder):
    """Are config.json and weights there?"""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted(name for name in names if re.fullmatch(r"step_\d+", name))
    missing = [] if WEIGHTS in names or INDEX in names else [WEIGHTS]
    if "config.json" not in names:
        missing.append("config.json")
    if missing:
        found = f"a run, whose newest checkpoint is {os.path.join(folder, steps[-1])}" if steps else "no " + missing[0]
        fail(f"{folder}: expected a folder with config.json and {WEIGHTS}, found {found}")
    read_json(os.path.join(folder, "config.json"))


def of_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def check_finite(folder, name, x):
    bad = ~np.isfinite(x)
    if bad.any():
        at = np.argwhere(bad)[0]
        fail(f"{folder}: tensor \"{name}\": expected finite numbers, found {bad.sum()} that are not, the first "
             f"{x[tuple(at)]} at {at.tolist()}: take a checkpoint from before they were")


def read_floats(folder):
    """read_folder of a folder that is not quantised, with F16 and BF16 as F32, which has all of their numbers"""
    out = read_folder(folder)
    remedy = f"give the floats it was made from, or those of fp4.py {folder} FLOATS --floats"
    for name, (dtype, x) in out.items():
        if dtype in QUANTIZED:
            fail(f"{folder}: expected a folder of floats, found tensor \"{name}\" in {dtype}: {remedy}")
        if dtype in ("F16", "BF16"):
            out[name] = "F32", of_bf16(x) if dtype == "BF16" else x.astype(np.float32)
        if dtype in ("F32", "F16", "BF16"):
            check_finite(folder, name, out[name][1])
    if read_json(os.path.join(folder, "config.json")).get("quantization_config"):
        fail(f"{folder}: expected a folder of floats, found quantization_config in its config.json: {remedy}")
    return out


def check_range(folder, tensors, floats):
    """Has every number, which was finite, a finite one in place of it?"""
    for name, (_, x) in floats.items():
        if not np.isfinite(x).all():
            fail(f"{folder}: tensor \"{name}\": expected numbers that are finite in BF16 or fp8, too, found "
                 f"{np.abs(tensors[name][1]).max()}: take a checkpoint with smaller ones")


# ---- writing ----

def bare(path):
    return path.rstrip("/") or path


def is_of_export(folder, name):
    path = os.path.join(folder, name)
    known = name in ("config.json", WEIGHTS, INDEX, *ALONG) or SHARD.fullmatch(name)
    return known and os.path.isfile(path) and not os.path.islink(path)


def lies_in_run(path):
    path = os.path.realpath(path)
    while os.path.dirname(path) != path:
        path = os.path.dirname(path)
        if all(os.path.exists(os.path.join(path, name)) for name in ("metrics.jsonl", "settings.json")):
            return True
    return False


def mark(folder, beside):
    """what config.json says of who wrote it"""
    other = {"beside": os.path.relpath(os.path.realpath(beside), os.path.realpath(folder))} if beside else {}
    return {"written_by": program(), **other}


def check_target(folder, *others, beside=None):
    """Is it new, or a folder whose place may be taken? Apart from the others in any case"""
    for other in others:
        pair = [os.path.realpath(folder), os.path.realpath(other)]
        if os.path.commonpath(pair) in pair:
            fail(f"{folder}: expected a folder apart from {other}")
    if lies_in_run(folder):
        fail(f"{folder} lies in the folder of a run, whose files are the run's: give another")
    parent = os.path.dirname(bare(folder)) or "."
    if not os.path.isdir(parent):
        fail(f"{folder}: expected a folder in one that exists, found no {parent}")
    if not os.path.lexists(bare(folder)):
        return
    if os.path.islink(bare(folder)):
        fail(f"{folder}: expected a folder, found a link: name the folder that it leads to")
    if not os.path.isdir(folder):
        fail(f"{folder}: expected a folder, found a file")
    names = sorted(os.listdir(folder))
    for name in names:
        if not is_of_export(folder, name):
            fail(f"{folder}: holds {name}, which no export writes: choose another folder")
    if not names:
        return
    config = read_json(os.path.join(folder, "config.json")) if "config.json" in names else {}
    found, wanted = {key: config[key] for key in ("written_by", "beside") if key in config}, mark(folder, beside)
    if found.get("written_by") != wanted["written_by"]:
        fail(f"{folder}: holds a model that {program()} did not write: choose another folder")
    if found != wanted:
        how = f"beside {os.path.normpath(os.path.join(folder, str(found['beside'])))}" if "beside" in found else "alone"
        fail(f"{folder}: was written {how}: choose another folder, or remove it")


def write_file(path, tensors):
    header, end = {}, 0
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": x.shape, "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in tensors.values():
            file.write(x.tobytes())


def fill(path, new):
    """an empty folder at this path with what the new one is to hold"""
    config = read_json(os.path.join(new.source, "config.json"))
    for key in ("quantization_config", "written_by", "beside"):
        config.pop(key, None)
    config.update(mark(new.path, new.beside))
    if new.quantization:
        config["quantization_config"] = new.quantization
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    for name in ALONG:
        if os.path.isfile(os.path.join(new.source, name)):
            with open(os.path.join(new.source, name), "rb") as old, open(os.path.join(path, name), "wb") as file:
                file.write(old.read())
    if new.n_shards == 1:
        write_file(os.path.join(path, WEIGHTS), new.tensors)
        return
    names, n = list(new.tensors), new.n_shards
    files = {name: f"model-{i % n + 1:05}-of-{n:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        write_file(os.path.join(path, file), {name: new.tensors[name] for name in names if files[name] == file})
    with open(os.path.join(path, INDEX), "w", encoding="utf-8") as file:
        json.dump({"weight_map": files}, file)


def remove(folder):
    """one that holds nothing else, as check_target has seen"""
    for name in os.listdir(folder):
        if is_of_export(folder, name):
            os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def check_shards(n, most=99999):
    if not 1 <= n <= most:
        fail(f"--shards: expected 1 to {most}, found {n}")


def write_folders(*new):
    """All of them or none"""
    made, aside, placed, path = [], [], [], None
    for folder in new:
        check_shards(folder.n_shards, len(folder.tensors))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for folder in new:
            path = bare(folder.path)
            os.mkdir(f"{path}.tmp{os.getpid()}")
            made.append(f"{path}.tmp{os.getpid()}")
            fill(made[-1], folder)
        for folder, whole in zip(new, list(made)):
            path = bare(folder.path)
            if os.path.lexists(path):
                os.rename(path, f"{path}.old{os.getpid()}")
                aside.append((f"{path}.old{os.getpid()}", path))
            os.rename(whole, path)
            made.remove(whole)
            placed.append(path)
    except BaseException as error:
        for folder in made + placed:
            remove(folder)
        for old, path_of_old in aside:
            os.rename(old, path_of_old)
        if isinstance(error, OSError):
            fail(f"{error.filename or path}: {error.strerror}: nothing is written, and what was there is as it was", 1)
        raise
    for old, _ in aside:
        remove(old)


def run(main):
    try:
        main()
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        sys.exit(130)
