"""
What train_qwen3 --base-dtype fp8 makes of a model, as a folder of floats or bf16: the reference that it must equal bit
for bit. NumPy and the standard library only; nothing is shared with llmc/core/fp8.h, for the nearest number is found in
the sorted list of all of them.

    python dev/ref/fp8.py DIR OUT [--bf16]    a Hugging Face folder with one F32 file, its matrices rounded; config.json and
                                              all else go along. --bf16: matrices as BF16, which loses nothing of them

e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): sign, 4 bits of exponent with the bias 7, 3 of mantissa, no infinity,
largest 448. A matrix has one scale for each block of 128 x 128, the smallest power of two with which no element is above
448, and an element becomes the nearest number times the scale; of two as near the one whose mantissa is even. Experts that
share a tensor (E, rows, columns) have blocks each. The embedding and routers become the nearest bf16; vectors stay.
"""
import argparse
import json
import os
import shutil

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(options.folder, options.out, ignore=shutil.ignore_patterns("manifest.json"))
    path = os.path.join(options.out, "model.safetensors")
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    body, places = b"", {}
    for name, entry in header.items():
        if name == "__metadata__":
            places[name] = entry
            continue
        assert entry["dtype"] == "F32", name
        begin, end = entry["data_offsets"]
        x = round_tensor(name, np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"]))
        is_half = options.bf16 and x.ndim > 1
        if is_half:
            assert np.array_equal(to_bf16(x), x), name
            x = (x.view(np.uint32) >> 16).astype(np.uint16)
        places[name] = {"dtype": "BF16" if is_half else "F32", "shape": entry["shape"],
                        "data_offsets": [len(body), len(body) + x.nbytes]}
        body += x.tobytes()
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)


if __name__ == "__main__":
    main()
