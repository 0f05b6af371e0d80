#!/usr/bin/env python3
"""
How many instructions a warp issues for one tile: of the main loops of flash_attention.h, from machine code.

    make sass                                the table, for sm_90; needs nvcc and nvdisasm, no GPU
    python dev/sass.py [--arch sm_90] -- NVCC FLAGS...     what make runs
    python dev/sass.py --self-test           the counting itself, on a loop written by hand

The main loop of a kernel is the one with the most tensor core instructions (HMMA). Counted is the cheapest way through it that
copies all of the next tile (so many LDGSTS): the tile in which nothing is masked. Instructions that a predicate turns off count,
for they are issued all the same. A quarter of a multiprocessor issues one instruction a cycle, and its tensor cores take HMMA_CYCLES
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
SOURCE = "dev/bench/gpu_ops.cu"  # has every kernel below
# 16 x 8 x 16 multiply-adds of bf16 by mma.sync on sm_90: 4 cycles at the rate of wgmma, of which mma.sync reaches 62 % (Luo et al. 2024,
# arXiv:2402.13499)
HMMA_CYCLES = 6.4
# (kernel, template arguments, copies of 16 bytes that a thread makes for a tile)
KERNELS = [("flash_forward_kernel", (64, 2), 8), ("flash_forward_kernel", (128, 1), 16),
           ("flash_backward_keys_kernel", (64, 64), 9), ("flash_backward_keys_kernel", (128, 32), 9),
           ("flash_backward_queries_kernel", (64, 64), 8), ("flash_backward_queries_kernel", (128, 32), 8)]
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


def fewest(code, labels, copies):
    """(instructions, of them HMMA) of the cheapest pass through the main loop with so many LDGSTS; None: there is no such pass."""
    after = successors(code, labels)
    backward = [(i, j) for i, js in enumerate(after) for j in js if j <= i]
    if not backward:
        return None
    end, head = max(backward, key=lambda edge: (sum("HMMA" in text for text in code[edge[1]:edge[0] + 1]), edge[1] - edge[0]))
    state = (head, int("LDGSTS" in code[head]))
    cost, before, queue = {state: 1}, {}, [(1, state)]
    while queue:
        n, state = heapq.heappop(queue)
        if state == (end, copies):
            path = [state]
            while path[-1] in before:
                path.append(before[path[-1]])
            return n, sum("HMMA" in code[i] for i, _ in path)
        for j in after[state[0]]:
            to = (j, state[1] + ("LDGSTS" in code[j]))
            if head < j <= end and to[1] <= copies and n + 1 < cost.get(to, len(code) * copies):
                cost[to], before[to] = n + 1, state
                heapq.heappush(queue, (n + 1, to))
    return None


def find_nvdisasm():
    wheels = [path for folder in sys.path for path in glob.glob(os.path.join(folder, "nvidia", "*", "bin", "nvdisasm"))]
    toolkit = [path for path in [shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm"] if path and os.path.exists(path)]
    return (toolkit + wheels + [None])[0]


def table(nvcc, arch):
    nvdisasm = find_nvdisasm()
    if not nvdisasm:
        sys.exit("sass.py: nvdisasm is not on this machine: pip install nvidia-cuda-nvdisasm in the Python that runs this")
    with tempfile.TemporaryDirectory() as work:
        cubin = os.path.join(work, "cubin")
        subprocess.run(nvcc + ["-cubin", f"-arch={arch}", "-x", "cu", SOURCE, "-o", cubin], cwd=ROOT, check=True)
        text = subprocess.run([nvdisasm, "-c", cubin], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = functions(text)
    print(f"| kernel for {arch} | instructions issued for a tile | HMMA | cycles of these |\n|---|---:|---:|---:|")
    failed = 0
    for kernel, sizes, copies in KERNELS:
        mangled = f"{len(kernel)}{kernel}" + "I" + "".join(f"Li{n}E" for n in sizes)
        counts = [fewest(*found[name], copies) for name in found if mangled in name]
        if len(counts) != 1 or not counts[0]:
            print(f"sass.py: {kernel}<{sizes[0]}, {sizes[1]}>: {SOURCE} has no main loop with {copies} copies", file=sys.stderr)
            failed = 1
        else:
            n, n_hmma = counts[0]
            print(f"| `{kernel}<{sizes[0]}, {sizes[1]}>` | {n} | {n_hmma} | {n_hmma * HMMA_CYCLES:.0f} |")
    return failed


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


def self_test():
    code, labels = functions(LOOP)["_Z4testv"]
    found = [fewest(code, labels, copies) for copies in (0, 1, 2, 3)]
    expected = [None, (6, 2), (8, 2), (10, 2)]  # without the mask; a copy more is a copy and its branch
    print("ok    sass.py: the cheapest pass" if found == expected else f"FAIL  sass.py: expected {expected}, found {found}")
    return found != expected


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("nvcc", nargs="*", help="the compiler and its flags, after --")
    options = parser.parse_args()
    return self_test() if options.self_test else table(options.nvcc, options.arch)


if __name__ == "__main__":
    raise SystemExit(main())
