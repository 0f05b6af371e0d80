"""
What train_qwen3 --base-dtype fp8 makes of a model, as a folder of floats or bf16: the reference that it must equal bit
for bit; and folders in fp8 as they are published. NumPy and the standard library only; nothing is shared with
llmc/core/fp8.h, for the nearest number is found in the sorted list of all of them.

    python dev/ref/fp8.py DIR OUT [--bf16]    a Hugging Face folder of floats, its matrices rounded; config.json and the
                                              tokenizer's files go along. --bf16: matrices as BF16, which loses nothing of them
    python dev/ref/fp8.py DIR OUT --release FLOATS [--scales F32|BF16|F8_E8M0] [--keep REGEX] [--shards N]
                                              OUT: matrices in F8_E4M3 with "<name>_scale_inv", scales that are no powers of
                                              two, the tensors dealt out over N files; what REGEX finds, and vectors, in
                                              BF16. FLOATS: the same numbers in F32
BF16 and F16 in DIR count as the floats that they are; whole numbers, such as DeepSeek V4's tables, go along as they are.
OUT and FLOATS are new folders, or take the place of those that an earlier run gave the same names (folders.py). No trainer
takes them for its own, which an export may replace.

e4m3 (Micikevicius et al. 2022, arXiv:2209.05433): sign, 4 bits of exponent with the bias 7, 3 of mantissa, no infinity,
largest 448. A matrix has one scale for each block of 128 x 128, the smallest power of two with which no element is above
448, and an element becomes the nearest number times the scale; of two as near the one whose mantissa is even. Experts that
share a tensor (E, rows, columns) have blocks each. The embedding and routers become the nearest bf16; vectors stay.
A release's scale is any float with which no element is above 448, and a weight is its number times that, rounded once.
"""
import argparse
import re

import numpy as np

import folders

BLOCK = 128
MOST = 448 * 128  # the largest scale of --base-dtype fp8 is 128
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
    with np.errstate(over="ignore"):
        return codes, scales, signed[codes] * spread


def release_matrices(name, x, scales_as, rng):
    """release_matrix of one, or of experts (E, rows, columns)"""
    if x.ndim not in (2, 3) or 0 in x.shape:
        folders.fail(f"tensor \"{name}\": expected rows and columns, or experts of them, found {x.shape}: name it in "
                     "--keep")
    if x.ndim == 2:
        return release_matrix(x, scales_as, rng)
    return [np.stack(part) for part in zip(*(release_matrix(matrix, scales_as, rng) for matrix in x))]


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
        codes, scales, x = release_matrices(name, x, options.scales, rng)
        out[name] = "F8_E4M3", codes
        out[name + "_scale_inv"] = options.scales, of_scales(scales, options.scales)
        floats[name] = "F32", x
    return out, floats


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
    folders.regex("--keep", options.keep)
    folders.check_shards(options.shards)
    if options.bf16 and options.release:
        folders.fail("--bf16: is not for --release: leave one of them out")
    folders.check_source(options.folder)
    folders.check_target(options.out, options.folder, beside=options.release)
    if options.release:
        folders.check_target(options.release, options.folder, options.out, beside=options.out)
    tensors = folders.read_floats(options.folder)
    if options.release:
        out, floats = release(tensors, options)
        kept = [name for name, (dtype, _) in out.items() if dtype == "BF16"]
        folders.check_range(options.folder, tensors, floats)
        folders.write_folders(
            folders.Folder(options.release, options.folder, floats, beside=options.out),
            folders.Folder(options.out, options.folder, out, options.shards,
                           {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": kept}, options.release))
        return
    rounded = {}
    for name, (dtype, x) in tensors.items():
        rounded[name] = dtype, x
        if dtype == "F32":
            if x.ndim > 1 and x.size and np.abs(x).max() > MOST:
                folders.fail(f"{options.folder}: tensor \"{name}\": expected numbers of at most {MOST}, found "
                             f"{np.abs(x).max()}: --release has scales for them")
            if x.ndim > 3:
                folders.fail(f"{options.folder}: tensor \"{name}\": expected rows and columns, or experts of them, "
                             f"found {x.shape}: --release --keep leaves it as it is")
            x = round_tensor(name, x)
            assert not options.bf16 or x.ndim < 2 or np.array_equal(to_bf16(x), x), name
            rounded[name] = half_bits(x) if options.bf16 and x.ndim > 1 else ("F32", x)
    folders.write_folders(folders.Folder(options.out, options.folder, rounded, options.shards))


if __name__ == "__main__":
    folders.run(main)
