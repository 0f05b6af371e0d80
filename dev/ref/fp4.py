"""
Weights in fp4 (e2m1) with scales of e8m0, as DeepSeek V4's published experts have them: the law in NumPy, and a folder
in which experts are so and other matrices in fp8, from one of floats. NumPy and the standard library only; nothing is
shared with llmc/core/fp4.h, for numbers are looked up in tables and the nearest is found by a search.

    python dev/ref/fp4.py --check             the law against itself and what is written down of it
    python dev/ref/fp4.py DIR OUT --release FLOATS [--experts REGEX] [--keep REGEX] [--float REGEX] [--dense F8_E8M0|F32]
                          [--names scale|weight_scale_inv] [--shards N]
                                              OUT: matrices that REGEX of --experts finds in I8, two fp4 in a byte, with
                                              scales of F8_E8M0 for 32 columns each; what --float finds in F32, what
                                              --keep finds and vectors in BF16; all other matrices in F8_E4M3 with scales
                                              of blocks of 128 x 128. BF16 and F16 in DIR count as the floats that they are,
                                              whole numbers go along. Scales of W.weight are W.scale or
                                              W.weight_scale_inv. FLOATS: the same numbers in F32
    python dev/ref/fp4.py OUT FLOATS --floats such a folder, or the published one, in F32

e2m1 (OCP Microscaling 1.0): sign, 2 bits of exponent with the bias 1, 1 of mantissa. Byte j of a row has column 2j in its
lower half. e8m0: 2^(byte - 127), 255 is NaN. A group's scale is 2^ceil(log2(largest / 6)), the largest floored at
6 * 2^-126; an element becomes the nearest number times the scale, of two as near the one whose mantissa is even, at most 6.
The usual regular expressions are those of DeepSeek V4's official names. What is written are new folders, or such that take the
place of those that an earlier run gave the same names (folders.py).
"""
import argparse
import re

import numpy as np

import folders
import fp8

GROUP = 32
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = np.concatenate([NUMBERS, -NUMBERS]).astype(np.float32)  # -0 too
EXPERTS = r"experts\.\d+\.(w[123]|(gate|up|down)_proj)\.weight$"
FLOAT = r"\bhc_|attn_sink|\.ape$|gate\.bias$"
KEEP = r"embed|head\.|\bgate\.weight|compressor\.w|weights_proj|shared_expert_gate|in_proj_[ab]\.|conv1d|visual|mtp\.fc"


def e8m0(bytes_):
    """as float32"""
    x = np.asarray(bytes_)
    return np.where(x == 255, np.nan, np.exp2(x.astype(np.float64) - 127)).astype(np.float32)


def pack(codes):
    """(..., columns) of 0 to 15 to (..., columns / 2)"""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpack(packed):
    """and back"""
    packed = np.asarray(packed).view(np.uint8)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize(packed, scales):
    """float32 of bytes (..., columns / 2) and scales (..., columns / 32)"""
    with np.errstate(over="ignore"):
        return CODES[unpack(packed)] * e8m0(scales).repeat(GROUP, -1)


def nearest(x):
    """of float64 numbers that are not negative: the code of the nearest, at most 6"""
    x = np.minimum(x, 6)
    above = np.searchsorted(NUMBERS, x)
    below = np.maximum(above - 1, 0)
    down, up = x - NUMBERS[below], NUMBERS[above] - x
    return np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)


def quantize(x):
    """bytes and scales of float32 (..., columns)"""
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.maximum(np.abs(groups).max(-1), 6 * 2.0 ** -126)
    exponents = np.ceil(np.log2(largest / 6)).astype(int)
    exponents += largest > 6 * np.exp2(exponents.astype(float))  # where the logarithm was rounded
    exponents -= largest <= 6 * np.exp2(exponents - 1.0)
    exponents = np.clip(exponents, -126, 125)                    # 6 * 2^125 is the largest number
    codes = nearest(np.abs(groups) / np.exp2(exponents.astype(float))[..., None]) + 8 * np.signbit(groups)
    return pack(codes.reshape(x.shape)), (exponents + 127).astype(np.uint8)


def to_fp8(packed, scales):
    """A matrix as float32 numbers of e4m3 and a scale of each block of 128 x 128, and whether none was rounded"""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    numbers, block, exact = np.empty((rows, columns)), [], True
    x = CODES[unpack(packed)].astype(np.float64)
    exponents = scales.astype(int).repeat(GROUP, 1)
    for r in range(0, rows, fp8.BLOCK):
        block.append([])
        for c in range(0, columns, fp8.BLOCK):
            at = slice(r, r + fp8.BLOCK), slice(c, c + fp8.BLOCK)
            largest = exponents[at].max()
            exact &= bool(exponents[at].min() >= largest - 14)
            scaled = x[at] * np.exp2(exponents[at] - largest + 6.0)
            numbers[at] = np.copysign(fp8.NUMBERS[fp8.nearest(np.abs(scaled))], scaled)
            block[-1].append(2.0 ** (largest - 127 - 6))
    return numbers.astype(np.float32), np.array(block, np.float32), exact


# ---- files ----


def scale_names(name):
    return [name + "_scale_inv", name.removesuffix(".weight") + ".scale"]


def release(tensors, options):
    """Of {name: (dtype, array)}: the same as a release has it, and as floats"""
    rng = np.random.default_rng(7)
    out, floats = {}, {}
    for name, (dtype, x) in tensors.items():
        scale = scale_names(name)[options.names == "scale"]
        if dtype != "F32" or re.search(options.float, name):
            out[name] = floats[name] = dtype, x
        elif re.search(options.experts, name):
            if x.ndim < 2 or x.shape[-1] % GROUP or 0 in x.shape:
                folders.fail(f"tensor \"{name}\": expected columns that are a multiple of {GROUP}, found "
                             f"{x.shape}: give --experts a regular expression that does not find it")
            packed, scales = quantize(x)
            out[name], out[scale] = ("I8", packed), ("F8_E8M0", scales)
            floats[name] = "F32", dequantize(packed, scales)
        elif x.ndim < 2 or re.search(options.keep, name):
            out[name] = fp8.half_bits(fp8.to_bf16(x))
            floats[name] = "F32", fp8.to_bf16(x)
        else:
            codes, scales, x = fp8.release_matrices(name, x, options.dense, rng)
            out[name], out[scale] = ("F8_E4M3", codes), (options.dense, fp8.of_scales(scales, options.dense))
            floats[name] = "F32", x
    return out, floats


def scales_of(name, dtype, shape, tensors):
    """their name, type and array"""
    found = [scale for scale in scale_names(name) if scale in tensors]
    if len(found) != 1:
        folders.fail(f"tensor \"{name}\": expected scales \"" + "\" or \"".join(scale_names(name)) +
                     f"\", found {'both' if found else 'neither'}: make the folder again")
    kind, scales = tensors[found[0]]
    kinds = ["F8_E8M0"] if dtype == "I8" else ["F8_E8M0", "F32", "BF16"]
    blocks = (1, GROUP // 2) if dtype == "I8" else (fp8.BLOCK, fp8.BLOCK)
    expected = (*shape[:-2], *(-(-n // block) for n, block in zip(shape[-2:], blocks)))
    if len(shape) < 2 or kind not in kinds or scales.shape != expected or (dtype == "I8" and shape[-1] % blocks[1]):
        folders.fail(f"tensor \"{found[0]}\": expected {' or '.join(kinds)} {expected} beside {dtype} {shape}, found "
                     f"{kind} {scales.shape}: make the folder again")
    return found[0], kind, scales


def of_release(tensors):
    """and back: all as floats, but what is neither a number with scales nor bf16"""
    out, used = {}, set()
    for name, (dtype, x) in tensors.items():
        if dtype not in ("I8", "F8_E4M3"):
            out[name] = ("F32", folders.of_bf16(x)) if dtype == "BF16" else (dtype, x)
            continue
        scale, kind, scales = scales_of(name, dtype, x.shape, tensors)
        used.add(scale)
        if dtype == "I8":
            out[name] = "F32", dequantize(x, scales)
            continue
        scales = e8m0(scales) if kind == "F8_E8M0" else folders.of_bf16(scales) if kind == "BF16" else scales
        signed = np.concatenate([fp8.NUMBERS, [np.nan], -fp8.NUMBERS, [np.nan]]).astype(np.float32)
        spread = scales.repeat(fp8.BLOCK, -2)[..., :x.shape[-2], :].repeat(fp8.BLOCK, -1)[..., :x.shape[-1]]
        out[name] = "F32", signed[x] * spread
    return {name: x for name, x in out.items() if name not in used}


# ---- the law, checked ----

def check():
    two = dequantize(np.array([[0xa3] + 15 * [0]], np.uint8), np.array([[127]], np.uint8))
    assert two[0, 0] == 1.5 and two[0, 1] == -1.0  # deepseek_v4.md 5.2
    assert np.array_equal(unpack(pack(np.arange(16))), np.arange(16))
    assert e8m0(0) == 2.0 ** -127 and e8m0(127) == 1 and e8m0(254) == 2.0 ** 127 and np.isnan(e8m0(255))
    codes = np.tile(np.arange(16), (256, 2))
    x = dequantize(pack(codes), np.arange(256)[:, None].astype(np.uint8))
    for e in range(253):  # all codes under all scales that floats have room for
        want = [(-1) ** (c >> 3) * float(NUMBERS[c & 7]) * 2.0 ** (e - 127) for c in codes[e]]
        assert x[e].tolist() == want and np.array_equal(np.signbit(x[e]), codes[e] >= 8)
        assert np.array_equal(fp8.to_bf16(x[e:e + 1]), x[e:e + 1])
    packed, scales = quantize(x[1:253])
    assert np.array_equal(dequantize(packed, scales), x[1:253])
    middle = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    assert nearest(middle).tolist() == [0, 2, 2, 4, 4, 6, 6] and nearest(np.array([9.0])) == 7
    for largest, exponent in ((6, 0), (np.nextafter(np.float32(6), 9), 1), (3, -1), (1, -2), (0, -126), (1e-45, -126)):
        group = np.zeros((1, GROUP), np.float32)
        group[0, 5] = largest
        assert quantize(group)[1][0, 0] == exponent + 127, (largest, exponent)
    rng = np.random.default_rng(1)
    for apart in (14, 15):
        packed = rng.integers(0, 256, (130, 80), np.uint8)
        scales = rng.integers(100, 101 + apart, (130, 5)).astype(np.uint8)
        numbers, block, exact = to_fp8(packed, scales)
        same = numbers * block.repeat(128, 0)[:130].repeat(128, 1)[:, :160] == dequantize(packed, scales)
        assert exact == (apart == 14) == bool(same.all()), apart
        assert np.abs(numbers).max() <= 384
    tensors = {"layers.0.ffn.experts.0.w1.weight": ("F32", rng.normal(0, 0.02, (64, 96)).astype(np.float32)),
               "layers.0.attn.wq_a.weight": ("F32", rng.normal(0, 0.02, (200, 130)).astype(np.float32)),
               "layers.0.ffn.gate.tid2eid": ("I64", np.arange(6).reshape(3, 2)),
               "layers.0.hc_attn_scale": ("F32", np.ones(3, np.float32)),
               "norm.weight": ("F32", np.ones(96, np.float32))}
    for names in ("scale", "weight_scale_inv"):
        for dense in ("F8_E8M0", "F32"):
            options = argparse.Namespace(names=names, dense=dense, experts=EXPERTS, keep=KEEP, float=FLOAT)
            out, floats = release(tensors, options)
            again = of_release(out)
            assert set(again) == set(floats) == set(tensors)
            assert all(np.array_equal(again[name][1], x) for name, (_, x) in floats.items())
            kinds = [out[name][0] for name in tensors]
            assert kinds == ["I8", "F8_E4M3", "I64", "F32", "BF16"], kinds
    print("fp4: all codes and scales, nearest numbers, scales of groups, as fp8, a release and back: ok")


def in_order(tensors):
    """those of wider types first, as safetensors has them"""
    return dict(sorted(tensors.items(), key=lambda x: (-x[1][1].dtype.itemsize, x[0])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--floats", action="store_true")
    parser.add_argument("--release")
    parser.add_argument("--experts", default=EXPERTS)
    parser.add_argument("--keep", default=KEEP)
    parser.add_argument("--float", default=FLOAT)
    parser.add_argument("--dense", choices=["F8_E8M0", "F32", "BF16"], default="F8_E8M0")
    parser.add_argument("--names", choices=["scale", "weight_scale_inv"], default="scale")
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    if options.check:
        check()
        return
    if options.out is None or bool(options.release) == options.floats:
        folders.fail("expected --check, DIR OUT --release FLOATS or OUT FLOATS --floats (--help)")
    for name in ("experts", "keep", "float"):
        folders.regex("--" + name, getattr(options, name))
    folders.check_shards(options.shards)
    folders.check_source(options.folder)
    if options.floats:
        folders.check_target(options.out, options.folder, beside=options.folder)
        floats = of_release(folders.read_folder(options.folder))
        for name, (_, x) in floats.items():
            folders.check_finite(options.folder, name, x)
        folders.write_folders(
            folders.Folder(options.out, options.folder, in_order(floats), options.shards, beside=options.folder))
        return
    folders.check_target(options.out, options.folder, beside=options.release)
    folders.check_target(options.release, options.folder, options.out, beside=options.out)
    tensors = folders.read_floats(options.folder)
    out, floats = release(tensors, options)
    folders.check_range(options.folder, tensors, floats)
    folders.write_folders(
        folders.Folder(options.release, options.folder, in_order(floats), beside=options.out),
        folders.Folder(options.out, options.folder, in_order(out), options.shards,
                       {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
                        "weight_block_size": [fp8.BLOCK, fp8.BLOCK]}, options.release))


if __name__ == "__main__":
    folders.run(main)
