"""
What train_qwen3 --base-dtype fp8 makes of a model, as a folder of floats or bf16: the reference that it must equal bit
for bit; and folders in fp8 as they are published. NumPy and the standard library only; nothing is shared with
llmc/core/fp8.h, for the nearest number is found in the sorted list of all of them.

    python dev/ref/fp8.py DIR OUT [--bf16]    a Hugging Face folder with one F32 file, its matrices rounded; config.json and
                                              all else go along. --bf16: matrices as BF16, which loses nothing of them
    python dev/ref/fp8.py DIR OUT --release FLOATS [--scales F32|BF16|F8_E8M0] [--keep REGEX] [--shards N]
                                              OUT: matrices in F8_E4M3 with "<name>_scale_inv", scales that are no powers of
                                              two, the tensors dealt out over N files; what REGEX finds, and vectors, in
                                              BF16. FLOATS: the same numbers in F32
What is not F32 in DIR, such as DeepSeek V4's tables of whole numbers, goes along as it is. OUT and FLOATS are new folders, or
take the place of those that an earlier run gave the same names. No trainer takes them for its own, which an export may replace.

e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): sign, 4 bits of exponent with the bias 7, 3 of mantissa, no infinity,
largest 448. A matrix has one scale for each block of 128 x 128, the smallest power of two with which no element is above
448, and an element becomes the nearest number times the scale; of two as near the one whose mantissa is even. Experts that
share a tensor (E, rows, columns) have blocks each. The embedding and routers become the nearest bf16; vectors stay.
A release's scale is any float with which no element is above 448, and a weight is its number times that, rounded once.
"""
import argparse
import glob
import json
import os
import re
import shutil
import sys

import numpy as np

BLOCK = 128
NUMBERS = np.array([m / 512 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1])


def nearest(x):
    """of float64 numbers that are not negative and at most 448: the place in NUMBERS of the nearest"""
    above = np.searchsorted(NUMBERS, x)
    below = np.maximum(above - 1, 0)
    down, up = x - NUMBERS[below], NUMBERS[above] - x
    return np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)


def round_block(x):
    """A block as fp8 has it; x is float32 and what comes back is, exactly"""
    largest = np.abs(x.astype(np.float64)).max()
    scale = 2.0 ** -120
    while scale * 448 < largest:
        scale *= 2
    assert scale <= 128 and np.isfinite(largest)
    rounded = np.copysign(NUMBERS[nearest(np.abs(x.astype(np.float64)) / scale)] * scale, x)
    assert np.array_equal(rounded.astype(np.float32), rounded)
    return rounded.astype(np.float32)


def round_matrix(x):
    out = np.empty_like(x)
    for r in range(0, x.shape[0], BLOCK):
        for c in range(0, x.shape[1], BLOCK):
            out[r:r + BLOCK, c:c + BLOCK] = round_block(x[r:r + BLOCK, c:c + BLOCK])
    return out


def to_bf16(x):
    """the nearest, ties to even, as float32"""
    bits = x.view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000).astype(np.uint32).view(np.float32)


def round_tensor(name, x):
    if x.ndim < 2:
        return x
    if name.endswith(("embed_tokens.weight", "mlp.gate.weight")):
        return to_bf16(x)
    return round_matrix(x) if x.ndim == 2 else np.stack([round_matrix(matrix) for matrix in x])


# by the names of Qwen, GLM and DeepSeek V4
KEEP = (r"embed|head\.|\bgate\.|shared_expert_gate|in_proj_[ab]\.|conv1d|visual|mtp\.fc|"
        r"\bhc_|\.ape$|compressor\.w|weights_proj")


def release_matrix(x, scales_as, rng):
    """Bytes and scales of a matrix, and its numbers as float32"""
    rows, columns = x.shape
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    for r in range(0, rows, BLOCK):
        for c in range(0, columns, BLOCK):
            block = x[r:r + BLOCK, c:c + BLOCK].astype(np.float64)
            scale = np.float32(max(np.abs(block).max(), 1e-30) / 448 * rng.uniform(1.01, 2))
            if scales_as == "BF16":
                scale = to_bf16(np.array([scale]))[0]
            if scales_as == "F8_E8M0":
                scale = np.float32(2.0 ** np.ceil(np.log2(scale)))
            codes[r:r + BLOCK, c:c + BLOCK] = nearest(np.minimum(np.abs(block) / scale, 448)) + 128 * np.signbit(block)
            scales[r // BLOCK, c // BLOCK] = scale
    signed = np.concatenate([NUMBERS, [np.nan], -NUMBERS, [np.nan]]).astype(np.float32)
    spread = scales.repeat(BLOCK, 0)[:rows].repeat(BLOCK, 1)[:, :columns]
    return codes, scales, signed[codes] * spread


def of_scales(x, dtype):
    if dtype == "F8_E8M0":
        return (np.log2(x) + 127).astype(np.uint8)
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else x


def half_bits(x):
    return "BF16", (x.view(np.uint32) >> 16).astype(np.uint16)


def release(tensors, options):
    """Of {name: (dtype, array)}: the same in fp8, and as floats"""
    rng = np.random.default_rng(7)
    out, floats = {}, {}
    for name, (dtype, x) in tensors.items():
        if dtype != "F32":
            out[name] = floats[name] = dtype, x
            continue
        if x.ndim < 2 or re.search(options.keep, name):
            out[name] = half_bits(to_bf16(x))
            floats[name] = "F32", to_bf16(x)
            continue
        parts = [release_matrix(matrix, options.scales, rng) for matrix in (x if x.ndim == 3 else [x])]
        codes, scales, x = ((p if x.ndim == 3 else p[0]) for p in map(np.stack, zip(*parts)))
        out[name] = "F8_E4M3", codes
        out[name + "_scale_inv"] = options.scales, of_scales(scales, options.scales)
        floats[name] = "F32", x
    return out, floats


# ---- files ----

TYPES = {"F32": np.float32, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "I8": np.uint8, "F8_E4M3": np.uint8,
         "F8_E8M0": np.uint8}
# of a folder, what is no longer true of one with other numbers
NOT_COPIED = ("manifest.json", "model*.safetensors", "model.safetensors.index.json", "optimizer.safetensors",
              "trainer.safetensors", "ema.safetensors")


def weights(folder):
    return sorted(glob.glob(os.path.join(glob.escape(folder), "model*.safetensors")))


def read_folder(folder):
    """{name: (dtype, array)} of all files of a folder"""
    out = {}
    for path in weights(folder):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            data = file.read()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in TYPES:
                fail(f"{path}: tensor \"{name}\": expected one of {', '.join(TYPES)}, found {entry['dtype']}")
            x = np.frombuffer(data[slice(*entry["data_offsets"])], TYPES[entry["dtype"]])
            out[name] = entry["dtype"], x.reshape(entry["shape"])
    return out


def fail(text):
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    sys.exit(2)


def check_source(folder):
    """Are config.json and weights there?"""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    steps = sorted(name for name in names if re.fullmatch(r"step_\d+", name))
    missing = [] if weights(folder) else ["model.safetensors"]
    if "config.json" not in names:
        missing.append("config.json")
    if missing:
        found = f"a run, whose newest checkpoint is {os.path.join(folder, steps[-1])}" if steps else "no " + missing[0]
        fail(f"{folder}: expected a folder with config.json and model.safetensors, found {found}")


def mark(folder, beside):
    """Of a file: which program made the folder, with which other"""
    return {"format": "pt", "written_by": os.path.basename(sys.argv[0]), "beside": os.path.relpath(beside or folder, folder)}


def is_marked(folder, beside):
    """Has this program written the folder, with the same other one?"""
    try:
        with open(weights(folder)[0], "rb") as file:
            found = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (IndexError, OSError, ValueError):
        return False
    return found.get("__metadata__") == mark(folder, beside)


def check_target(folder, beside, *others):
    """Is it new, or this program's, which then has written it with the same other folder? Apart from the others in any case"""
    for other in others:
        pair = [os.path.realpath(folder), os.path.realpath(other)]
        if os.path.commonpath(pair) in pair:
            fail(f"{folder}: expected a folder apart from {other}")
    if os.path.lexists(folder) and not (os.path.isdir(folder) and (is_marked(folder, beside) or not os.listdir(folder))):
        pair = f" with {beside}" if beside else ""
        fail(f"{folder}: expected a new folder, or one that this program wrote{pair}, whose place the new one takes")


def write(path, tensors, metadata=None):
    """tensors: {name: (dtype, array)}"""
    header, body = {"__metadata__": metadata} if metadata else {}, b""
    for name, (dtype, x) in tensors.items():
        header[name] = {"dtype": dtype, "shape": x.shape, "data_offsets": [len(body), len(body) + x.nbytes]}
        body += x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)


def write_folder(folder, source, tensors, n_shards=1, quantization=None, beside=None):
    """beside: the folder that is written with it"""
    metadata = mark(folder, beside)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    if n_shards == 1:
        write(os.path.join(folder, "model.safetensors"), tensors, metadata)
    else:
        names = list(tensors)
        files = {name: f"model-{i % n_shards + 1:05}-of-{n_shards:05}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            write(os.path.join(folder, file), {name: tensors[name] for name in names if files[name] == file}, metadata)
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"weight_map": files}, file)
    path = os.path.join(folder, "config.json")
    with open(path) as file:
        config = json.load(file)
    was = [config.pop(key, None) for key in ("quantization_config", "written_by")]  # by a trainer: not this one
    if any(was) or quantization:
        with open(path, "w") as file:
            json.dump({**config, "quantization_config": quantization} if quantization else config, file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--release")
    parser.add_argument("--scales", choices=["F32", "BF16", "F8_E8M0"], default="F32")
    parser.add_argument("--keep", default=KEEP)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    check_source(options.folder)
    check_target(options.out, options.release, options.folder)
    if options.release:
        check_target(options.release, options.out, options.folder, options.out)
    tensors = read_folder(options.folder)
    if options.release:
        out, floats = release(tensors, options)
        kept = [name for name, (dtype, _) in out.items() if dtype == "BF16"]
        write_folder(options.release, options.folder, floats, beside=options.out)
        write_folder(options.out, options.folder, out, options.shards,
                     {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                      "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}, options.release)
        return
    rounded = {}
    for name, (dtype, x) in tensors.items():
        rounded[name] = dtype, x
        if dtype == "F32":
            x = round_tensor(name, x)
            assert not options.bf16 or x.ndim < 2 or np.array_equal(to_bf16(x), x), name
            rounded[name] = half_bits(x) if options.bf16 and x.ndim > 1 else ("F32", x)
    write_folder(options.out, options.folder, rounded)


if __name__ == "__main__":
    main()
