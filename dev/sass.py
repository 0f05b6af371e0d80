#!/usr/bin/env python3
"""
How many instructions a warp issues for one tile of the tensor core kernels, from machine code. Writes doc/gpu/tiles.md.

    make sass                                the page, of sm_90; needs nvcc and nvdisasm, no GPU; some minutes
    make sass SASS_OPTIONS=--check           compare: fails when the page is not what the code gives
    make sass SASS_OPTIONS="--only flash_forward"      prints the rows of some kernels, writes nothing
    python dev/sass.py [--check] [--only NAME] -- NVCC FLAGS...     what make runs
    python dev/sass.py --self-test           the counting itself, on a loop written by hand

The main loop of a kernel is the one with the most tensor core instructions (HMMA, and HGMMA of kernels for sm_90a). Counted is the cheapest way through it that
copies all of the next tile (so many LDGSTS): the tile in which nothing is masked. Loops inside it that hold mma go round as often as is
written here; other loops count once, so a search for what comes next is in it at its shortest. Instructions that a predicate turns off
count, for they are issued all the same. A quarter of a multiprocessor issues one instruction a cycle, and its tensor cores take HMMA_CYCLES
for an mma: where more instructions are issued than these take cycles, instructions are the limit. Both are of one warp, and other
warps of the quarter can fill its gaps: an estimate, no measurement. nvdisasm: that of the toolkit, or the wheel nvidia-cuda-nvdisasm.
"""
import argparse
import glob
import heapq
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = "doc/gpu/tiles.md"
# 16 x 8 x 16 multiply-adds of bf16 by mma.sync on sm_90: 4 cycles at the rate of wgmma, of which mma.sync reaches 62 % (Luo et al. 2024,
# arXiv:2402.13499)
HMMA_CYCLES, WGMMA_CYCLES = 6.4, 4.0
FLAGS = [["-arch=sm_90"], ["-gencode=arch=compute_90a,code=sm_90a", "-DWGMMA"]]  # the second of kernels with hopper in their name
SMS, CLOCK, MEMORY, L2 = 132, 1.83e9, 4.8, 5.5  # of an H200; TB/s, the second-level cache's as others have measured on an H100
MANGLED = {"bf16 const*": "PK13__nv_bfloat16", "StoredMatrix": "12StoredMatrix"}  # types that are template arguments
# a source that has the kernels; of each its template arguments, threads of a block (all, those that copy), copies of 16 bytes that a thread makes for a tile, mma of
# a warp, how often the loops with mma inside the main loop go round, in their order, and what a tile is
KERNELS = [
    ("dev/bench/gpu_ops.cu", [
        ("flash_forward_kernel", (64, 2), 128, 8, 128, (), "128 queries, 64 keys"),
        ("flash_forward_kernel", (128, 1), 128, 16, 128, (), "64 queries, 64 keys"),
        ("flash_backward_keys_kernel", (64, 64), 128, 9, 128, (), "64 keys, 64 queries"),
        ("flash_backward_keys_kernel", (128, 32), 128, 9, 128, (), "64 keys, 32 queries"),
        ("flash_backward_queries_kernel", (64, 64), 128, 8, 96, (), "64 queries, 64 keys"),
        ("flash_backward_queries_kernel", (128, 32), 128, 8, 96, (), "64 queries, 32 keys"),
        ("flash_forward_hopper_kernel", (64, 2, 64, 2), 256, 4, 64, (), "128 queries, 64 keys"),
        ("flash_forward_hopper_kernel", (128, 3, 64, 1), (384, 256), 8, 128, (), "192 queries, 64 keys"),
        ("flash_forward_hopper_kernel", (192, 2, 64, 1), 256, 12, 192, (), "128 queries, 64 keys"),
        ("flash_forward_hopper_kernel", (256, 2, 64, 1), 256, 16, 256, (), "128 queries, 64 keys"),
        ("flash_backward_keys_hopper_kernel", (64, 1, 48, 3), 128, 7, 96, (), "64 keys, 48 queries"),
        ("flash_backward_keys_hopper_kernel", (128, 1, 64, 2), 128, 17, 256, (), "64 keys, 64 queries"),
        ("flash_backward_keys_hopper_kernel", (192, 2, 64, 1), 256, 13, 192, (), "64 keys, 64 queries: dv or dk"),
        ("flash_backward_keys_hopper_kernel", (256, 2, 64, 1), 256, 17, 256, (), "64 keys, 64 queries: dv or dk"),
        ("flash_backward_queries_hopper_kernel", (64, 2, 64, 2), 256, 4, 96, (), "128 queries, 64 keys"),
        ("flash_backward_queries_hopper_kernel", (128, 3, 64, 1), (384, 256), 8, 192, (), "192 queries, 64 keys"),
        ("flash_backward_queries_hopper_kernel", (192, 2, 64, 1), 256, 12, 288, (), "128 queries, 64 keys"),
        ("flash_backward_queries_hopper_kernel", (256, 2, 48, 1), (256, 128), 24, 288, (), "128 queries, 48 keys")]),
    ("train_moe.cu", [
        ("grouped_rows_mma_kernel", (1,), 128, 16, 128, (), "128 rows, 128 columns, 64 terms: forward"),
        ("grouped_rows_mma_kernel", (0,), 128, 16, 128, (), "the same: gradient of the input"),
        ("grouped_weight_mma_kernel", (), 128, 16, 128, (), "128 x 128 of a weight, 64 rows"),
        ("grouped_rows_hopper_kernel", (1, "bf16 const*"), 256, 12, 128, (), "128 rows, 256 columns, 64 terms: forward"),
        ("grouped_rows_hopper_kernel", (0, "bf16 const*"), 256, 12, 128, (), "the same: gradient of the input"),
        ("grouped_weight_hopper_kernel", (), 256, 12, 128, (), "128 x 256 of a weight, 64 rows"),
        ("grouped_rows_hopper_kernel", (1, "StoredMatrix"), 256, 8, 128, (), "forward, weights of fp8"),
        ("grouped_rows_hopper_kernel", (0, "StoredMatrix"), 256, 8, 128, (), "gradient of the input, weights of fp8")]),
    ("dev/bench/gated_delta.cu", [
        ("flash_delta_forward_kernel", (128,), 128, 28, 256, (4, 4, 2, 2, 2), "64 positions, 128 x 64 of the state"),
        ("flash_delta_forward_hopper_kernel", (128,), 128, 28, 256, (), "64 positions, 128 x 64 of the state"),
        ("flash_delta_deltas_kernel", (128,), 128, 16, 96, (4, 2), "64 positions, 64 channels"),
        ("flash_delta_backward_kernel", (128,), 128, 28, 256, (4, 2, 2, 2, 2), "64 positions, 128 x 64 of the state"),
        ("flash_delta_backward_hopper_kernel", (128,), 128, 28, 256, (), "64 positions, 128 x 64 of the state")]),
    ("train_glm5.cu", [
        ("flash_latent_forward_kernel", (256,), 256, 16, 128, (2, 2), "64 positions, 64 keys"),
        ("flash_latent_positions_kernel", (256,), 256, 8, 96, (4,), "64 positions, 32 keys"),
        ("flash_latent_keys_kernel", (256,), 256, 8, 128, (4,), "64 keys, 32 positions"),
        ("flash_latent_forward_hopper_kernel", (256, 256), 256, 16, 256, (), "128 positions, 64 keys"),
        ("flash_latent_positions_hopper_kernel", (256, 256), (256, 192), 16, 288, (), "128 positions, 48 keys"),
        ("flash_latent_keys_hopper_kernel", (256,), 256, 16, 256, (), "64 keys, 64 positions: dv or dk"),
        ("flash_latent_mass_hopper_kernel", (256,), 256, 32, 256, (), "128 positions, 128 keys, a head")]),
    ("train_deepseek_v4.cu", [
        ("flash_sparse_forward_kernel", (512,), 256, 16, 256, (4, 2), "64 heads, 64 gathered keys"),
        ("flash_sparse_backward_kernel", (512,), 256, 8, 320, (4, 2, 2), "64 heads, 32 gathered keys"),
        ("flash_sparse_forward_hopper_kernel", (512, 2, 1), 256, 16, 256, (), "64 heads, 64 gathered keys"),
        ("flash_sparse_backward_hopper_kernel", (512, 1), 256, 16, 640, (), "64 heads, 64 gathered keys, and what these are given"),
        ("flash_sparse_mass_hopper_kernel", (512, 2, 1), 256, 16, 128, (), "64 heads, 64 gathered entries"),
        ("flash_index_kernel", (128,), 128, 8, 128, (), "64 entries, 32 heads of a position")])]
BRANCH = re.compile(r"(@!?U?P\w+ )?BRA(?:\.\w+)* (?:!?U?P\w+, )?`\((\.L_x_\d+)\)")


def functions(text):
    """{mangled name: (instructions, {label: index of the instruction behind it})} of nvdisasm's output."""
    found, at = {}, None
    for line in text.splitlines():
        name, label = re.match(r"\.text\.(\w+):", line), re.match(r"\s*(\.L_x_\d+):", line)
        code = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(.*?)\s*;", line)
        if name:
            at = found[name[1]] = ([], {})
        elif line.startswith("\t.section"):
            at = None
        elif at and label:
            at[1][label[1]] = len(at[0])
        elif at and code:
            at[0].append(re.sub(r"\s+", " ", code[1]))
    return found


def successors(code, labels):
    """Which instructions may follow each."""
    after = []
    for i, text in enumerate(code):
        branch = BRANCH.match(text)
        if branch:
            conditional = branch[1] or re.search(r"P\w+, `", text)
            after.append([labels[branch[2]]] + ([i + 1] if conditional else []))
        else:
            after.append([] if text.startswith("EXIT") else [i + 1])
    return [[j for j in js if j < len(code)] for js in after]


def reached(after):
    """Instructions to which there is a way from the first one."""
    seen, todo = {0}, [0]
    while todo:
        new = [j for j in after[todo.pop()] if j not in seen]
        seen.update(new)
        todo += new
    return seen


def products(text):
    """How many mma of 16 x 8 x 16 an instruction is for its warp: an HGMMA of 64 x N x 16 is of four warps."""
    wide = re.search(r"HGMMA\.64x(\d+)x16", text)
    return int(wide[1]) // 8 if wide else int("HMMA" in text)


def fewest(code, labels, copies, mma=None, rounds=(), copy="LDGSTS"):
    """(instructions, mma of 16 x 8 x 16 that they are) of the cheapest pass through the main loop with so many copies and mma (None: however many there are);
    None: there is no such pass. The loops with HMMA inside it go round so often."""
    after = successors(code, labels)
    is_copy, is_mma = ([bool(re.search(copy, text)) for text in code], [products(text) for text in code])
    live = reached(after)  # without what is put aside for lanes that are not together
    backward = [(i, j) for i, js in enumerate(after) for j in js if j <= i and i in live]
    if not backward:
        return None
    end, head = max(backward, key=lambda edge: (sum(is_mma[edge[1]:edge[0] + 1]), edge[1] - edge[0]))
    inner = sorted((j, i) for i, j in backward if head < j and i < end and any(is_mma[j:i + 1]))
    if len(inner) != len(rounds):
        return None
    more = [((times - 1) * (last + 1 - first), (times - 1) * sum(is_mma[first:last + 1])) for times, (first, last) in zip(rounds, inner)]
    once = mma and mma - sum(n for _, n in more)  # of a pass in which each of them goes round once
    state = (head, int(is_copy[head]), int(is_mma[head]))
    cost, queue = {state: 1}, [(1, state)]
    while queue:
        n, state = heapq.heappop(queue)
        i, n_copies, n_mma = state
        if i == end and n_copies == copies and once in (None, n_mma):
            return n + sum(n for n, _ in more), n_mma + sum(n for _, n in more)
        for j in after[i]:
            to = (j, n_copies + is_copy[j], n_mma + is_mma[j])
            forth = head < j <= end and (j, i) not in inner and to[1] <= copies and (once is None or to[2] <= once)
            if forth and n + 1 < cost.get(to, len(code) * (copies + 1)):
                cost[to] = n + 1
                heapq.heappush(queue, (n + 1, to))
    return None


def find_nvdisasm():
    wheels = [path for folder in sys.path for path in glob.glob(os.path.join(folder, "nvidia", "*", "bin", "nvdisasm"))]
    toolkit = [path for path in [shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm"] if path and os.path.exists(path)]
    return (toolkit + wheels + [None])[0]


def machine_code(nvcc, source, flags):
    """functions() of a source."""
    nvdisasm = find_nvdisasm()
    if not nvdisasm:
        sys.exit("sass.py: nvdisasm is not on this machine: pip install nvidia-cuda-nvdisasm in the Python that runs this")
    with tempfile.TemporaryDirectory() as work:
        cubin = os.path.join(work, "cubin")
        subprocess.run(nvcc + flags + ["-cubin", "-x", "cu", source, "-o", cubin], cwd=ROOT, check=True)
        return functions(subprocess.run([nvdisasm, "-c", cubin], stdout=subprocess.PIPE, text=True, check=True).stdout)


def row(kernel, sizes, threads, copies, tile, counts):
    """Cells of a kernel: both are of one warp; blocks of a multiprocessor share its four schedulers."""
    n, n_mma = counts
    name = kernel + (f"<{', '.join(str(size) for size in sizes)}>" if sizes else "")
    by, rate = ("wgmma", WGMMA_CYCLES) if "hopper" in kernel else ("mma.sync", HMMA_CYCLES)
    threads, copying = threads if isinstance(threads, tuple) else (threads, threads)
    cycles, n_bytes = n_mma * rate, 16 * copying * (copies // 2 * 2)  # an odd one is of few threads: statistics of rows
    asked = n_bytes / (max(n, cycles) * threads / 128) * SMS * CLOCK / 1e12
    limit = "instructions" if n > 1.05 * cycles else by
    return [f"`{name}`", tile, str(n), str(n_mma), f"{cycles:.0f}", limit, f"{n_bytes // 1024}", f"{asked:.1f}" if asked < L2 else f"**{asked:.1f}**"]


def rows(nvcc, only):
    found = []
    wanted = [(source, [kernel for kernel in kernels if only in kernel[0] and ("hopper" in kernel[0]) == hopper], flags)
              for source, kernels in KERNELS for hopper, flags in enumerate(FLAGS)]
    for source, kernels, flags in wanted:
        code = machine_code(nvcc, source, flags) if kernels else {}
        for kernel, sizes, threads, copies, mma, rounds, tile in kernels:
            mangled = f"{len(kernel)}{kernel}" + ("I" + "".join(MANGLED.get(n, f"Li{n}E") for n in sizes) + "E" if sizes else "P")
            copy = r"LDGSTS|LDG\.E\.128" if "StoredMatrix" in sizes else "LDGSTS"  # codes are loaded into registers
            counts = [fewest(*code[name], copies, mma, rounds, copy) for name in code if mangled in name]
            if len(counts) != 1 or not counts[0]:
                sys.exit(f"sass.py: {kernel}<{sizes}> of {source} has no main loop with {copies} copies, {mma} mma and {len(rounds)} loops of these")
            found.append(row(kernel, sizes, threads, copies, tile, counts[0]))
    return found


HEADER = """# Tiles: what a warp issues beside what tensor cores need

Written by `make sass` with nvcc {release} for sm_90, kernels with `hopper` in their name for sm_90a; [dev/sass.py](../../dev/sass.py) says
how it counts. **Nothing here was measured on a GPU.**

A scheduler issues one instruction a cycle, and an mma of 16 x 8 x 16 by `mma.sync` takes {hmma} cycles of its tensor cores, 62 % of the
rate of wgmma, of which one of 64 x N x 16 counts as N / 8 mma for each of its four warps. For a tile a warp issues so many instructions,
and its mma take so many cycles: the larger of both is the **bound**, mma where they differ by less than 5 %. KiB are what a block copies for a tile; TB/s is what all
multiprocessors then ask of the second-level cache, which gives about {l2}: **bold** where that is the limit before all others. Memory
gives 4.8 of it, where nothing comes twice.
"""
FOOTER = """
What it says:

- **Attention** of heads of 64 channels asks for as much as the cache gives, were it at its bound; expected is half of that
  ([step.md](step.md)). 128 queries of a block, not 64, are what keeps forward below. dq has 64, with only three products of its
  four tiles: whoever makes a block of 128 queries of it saves half of its copies.
- **By wgmma** a warp issues less than half of what `mma.sync` needs for the same products of heads of 128 channels, of 64 channels 59 to
  85 %, and products are the limit of all but forward of 64. At their full rate blocks of 64 rows, and forward's of 128, ask for more than
  the cache gives: 192 rows, as heads of 128 channels have them, or a cluster that shares its tiles, do not. Where two warpgroups have dv
  and dk, instructions are those of the one with fewer.
- **Products of experts**: 128 x 128 outputs have 64 FLOP a byte, which 613 TFLOP/s do not get from the cache: {grouped} TFLOP/s are the
  most. 128 x 256 by wgmma has 85, so {wide} TFLOP/s; with weights of fp8, which become bf16 on their way into a tile, 128. A cluster
  that shared a tile would have more. Experts with few rows have another limit before that:
  below {rows} rows their weights take longer from memory than their products from the cache.
- **The gated delta rule** goes from chunk to chunk, so that latency is its limit along a row where few rows leave multiprocessors without
  a block: by `mma.sync` a block of four warps is alone on its multiprocessor, and five barriers separate products that wait for each
  other; by wgmma there are two barriers, none of them between products. Where all multiprocessors have a block, bytes are: of a chunk
  forward with `states` moves some 64 KB, 3,300 cycles of memory. `flash_delta_scores_kernel` (a triangular system, column by column) and
  `flash_delta_keys_kernel` are not counted.
- **Latent and sparse attention**: phases of a chunk are separated by barriers, so their limits add up; [deepseek_v4.md](deepseek_v4.md)
  does that for sparse attention. Keys of a position are gathered once for 64 heads, and come from the cache. Latent attention by wgmma
  has 128 positions a block, where `mma.sync` has 64, and so 128 FLOP a byte of keys and values forward, 192 for dq, and in mass, with
  128 keys, 64: twice as many. The cache remains the limit, of forward and of dk and dv {latent} TFLOP/s.
"""


def page(found, release):
    header = ["kernel", "tile of a block", "instructions", "mma", "cycles of these", "bound by", "KiB", "TB/s"]
    lines = [header, ["---", "---", "---:", "---:", "---:", "---", "---:", "---:"]] + found
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    return HEADER.format(release=release, hmma=HMMA_CYCLES, l2=L2) + "\n" + table + FOOTER.format(grouped=f"{64 * L2:.0f}", latent=f"{128 * L2:.0f}", wide=f"{256 / 3 * L2:.0f}", rows=f"{64 * L2 / MEMORY:.0f}")


def write(nvcc, only, check):
    found = rows(nvcc, only)
    if only:
        print("\n".join(" ".join(line) for line in found))
        return 0
    version = subprocess.run([nvcc[0], "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    text, path = page(found, re.search(r"release ([\d.]+)", version)[1]), os.path.join(ROOT, PAGE)
    if check:
        with open(path, encoding="utf-8") as file:
            same = file.read() == text
        print(f"ok    {PAGE}" if same else f"FAIL  {PAGE} is not what the kernels give now: run make sass")
        return not same
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {PAGE}")
    return 0


# two copies of which the first is made in a loop of its own, a mask that may be skipped, two products
LOOP = """
.text._Z4testv:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.128 [R2], [R4.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.128 [R2], [R4.64] ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0060*/               @P2 BRA `(.L_x_3) ;
        /*0070*/                   FSEL R4, R4, -INF , P3 ;
        /*0080*/                   FSEL R5, R5, -INF , P4 ;
.L_x_3:
        /*0090*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00a0*/               @P5 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
"""


# a copy, a product in a loop of its own, another one
NESTED = """
.text._Z4testv:
.L_x_0:
        /*0010*/                   LDGSTS.E.128 [R2], [R4.64] ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0050*/               @P5 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def self_test():
    code, labels = functions(LOOP)["_Z4testv"]
    found = [fewest(code, labels, copies) for copies in (0, 1, 2, 3)]
    nested, labels = functions(NESTED)["_Z4testv"]
    found += [fewest(nested, labels, 1, mma, rounds) for mma, rounds in ((None, ()), (2, (1,)), (5, (4,)), (6, (4,)))]
    expected = [None, (6, 2), (8, 2), (10, 2)]  # without the mask; a copy more is a copy and its branch
    expected += [None, (5, 2), (11, 5), None]  # of a loop inside, each round is a product and its branch
    found += [products("HGMMA.64x48x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT"), products("FADD R1, R2, R3")]
    expected += [6, 0]
    print("ok    sass.py: the cheapest pass" if found == expected else f"FAIL  sass.py: expected {expected}, found {found}")
    return found != expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare with the committed page, write nothing")
    parser.add_argument("--only", default="", help="kernels whose name contains this; prints rows")
    parser.add_argument("nvcc", nargs="*", help="the compiler and its flags, after --")
    options = parser.parse_args()
    return self_test() if options.self_test else write(options.nvcc, options.only, options.check)


if __name__ == "__main__":
    raise SystemExit(main())
