#!/usr/bin/env python3
"""
What a step of GPT-2 124M, and each kernel in it, can cost on an H200 at least, and what we expect: writes doc/gpu/step.md.

    python3 dev/roofline.py              write the page anew
    python3 dev/roofline.py --check      compare: status 1 when the page is not what the formulas give (dev/check_docs.py asks, too)

The limit of a kernel is the larger of its FLOP at the card's rate and its bytes at the memory's. What is expected is more, by a share for
each kind of kernel that is written below, so that a measured time which is longer names the assumption that failed. dev/gpu_report.py puts
expected(case) beside what was measured. Instructions of attention are those that flash_attention.h states (make sass), and of ops for which
another page derives a time that page is read (DERIVED).
MEASURED has what a card said of each row. Standard library only.
"""
import argparse
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAGE = "doc/gpu/step.md"

# ---- the card: H200 SXM ----
TENSOR, MEMORY = 989.4e12, 4.8e12       # FLOP/s of bf16, dense; bytes/s
SMS, SCHEDULERS, CLOCK = 132, 4, 1.83e9  # the clock that belongs to TENSOR: 4096 FLOP a multiprocessor and cycle
MMA_CYCLES = 6.4                        # an mma.sync of 16 x 8 x 16 on one scheduler: 62 % of the rate (dev/sass.py)

# ---- what is assumed; the page says why ----
PRODUCT = 630e12        # FLOP/s of cuBLASLt's large products
STREAM = 26.0 / 100.66  # microseconds for a MB of memory that is read or written once: 3.9 TB/s
ATTENTION = 0.5         # of the cycles that an attention kernel takes, its instructions or its mma would need so many
LAUNCH = 2e-6           # seconds between two kernels

# ---- the model and the batch ----
B, T, C, NH, HS, L, V = 64, 1024, 768, 12, 64, 12, 50304
N, PARAMETERS, HEAD_ROWS = B * T, 124475904, 8192
LAUNCHES = 373          # 345 of an update of one micro-batch under dev/simt (doc/kernels.md), and seven more pieces of the head with four each


# What an H200 took, in ms of one, on 2026-11-28, each kernel alone: first as the code was when it came to the card, then what was chosen
# on that day. Products by bench/gemm_algorithms, the shortest of four runs (of the head, one run); attention forward, and dk, dv and dq as
# chosen, twice a bench's 32 rows; the rest by ncu in a step or by a bench of the kernels side by side. The embedding's last is derived:
# its three scans became 15 us shorter each
MEASURED = {
    "qkv": (0.301, 0.301), "attproj": (0.121, 0.111), "fc, and its GELU": (0.564, 0.497), "fcproj": (0.360, 0.360),
    "dinp of fcproj, and GELU's slope": (0.563, 0.503), "dinp of fc": (0.365, 0.365), "dinp of attproj": (0.129, 0.108),
    "dinp of qkv": (0.293, 0.293), "dW of fcproj": (0.357, 0.357), "dW of fc": (0.351, 0.351), "dW of attproj": (0.108, 0.108),
    "dW of qkv": (0.332, 0.332), "logits": (0.822, 0.725), "dinp of logits": (0.765, 0.765), "dW of logits": (0.723, 0.723),
    "attention forward": (0.436, 0.412), "attention backward: D": (0.064, 0.064), "attention backward: dk, dv": (0.791, 0.616),
    "attention backward: dq": (0.570, 0.360), "first LayerNorm": (0.061, 0.061), "residual and LayerNorm": (0.103, 0.103),
    "LayerNorm backward, and a bias": (0.157, 0.104), "bias of fc": (0.117, 0.094), "bias of qkv": (0.090, 0.073),
    "cross entropy": (0.530, 0.420), "embedding backward": (0.237, 0.192), "AdamW": (1.028, 1.028), "norm": (0.352, 0.127),
}
STEP_MEASURED = 116.314  # ms, of whole steps with the code as it came, the median of the 51st to the 100th


# cases of dev/bench/gpu_ops.cu for which a page derives a time: that page, and the rows of its table by mma.sync (None: it has none) and by wgmma
SPARSE, LATENT = " N 4096 H 64 d 512 window 128 topk 512", " N 4096 H 64 dn 192 dr 64 dv 256"
SPARSE_PAGE, LATENT_PAGE = "doc/gpu/deepseek_v4.md", "doc/gpu/glm5.md"
DERIVED = {
    "sparse_attention_forward" + SPARSE: (SPARSE_PAGE, "attention forward", "attention forward by wgmma"),
    "sparse_attention_backward" + SPARSE: (SPARSE_PAGE, "attention backward", "attention backward by wgmma"),
    "sparse_attention_mass" + SPARSE: (SPARSE_PAGE, "mass", "mass by wgmma"),
    "latent_attention_forward" + LATENT: (LATENT_PAGE, None, "forward"),
    "latent_attention_backward" + LATENT: (LATENT_PAGE, None, "backward in all"),
    "latent_attention_mass apart topk 2048" + LATENT: (LATENT_PAGE, None, "mass"),
}
# nobody says what these take; of sparse and latent attention other sizes and lists than those above
NOT_DERIVED = ("gated delta", "grouped_matmul", "sparse_attention", "latent_attention")


def stream(n_bytes):
    """Seconds that a kernel takes which does nothing but move bytes."""
    return n_bytes / 1e6 * STREAM / 1e6


def instructions():
    """{("forward" | "keys" | "queries", W): what a warp issues for a tile}, as flash_attention.h states it."""
    with open(os.path.join(ROOT, "llmc/ops/flash_attention.h"), encoding="utf-8") as file:
        text = re.sub(r"\s+", " ", file.read())
    found = re.search(r"forward (\d+) instructions \(HS 64\) or (\d+) \(HS 128\), dk and dv (\d+) or (\d+), dq (\d+) or (\d+)", text)
    numbers = [int(n) for n in found.groups()]
    return {(name, W): numbers[2 * i + (W == 128)] for i, name in enumerate(("forward", "keys", "queries")) for W in (64, 128)}


# rows and columns of a block's tiles: queries x keys, for keys: keys x queries; mma of a warp for a tile
TILES = {("forward", 64): (128, 64, 128), ("forward", 128): (64, 64, 128), ("keys", 64): (64, 64, 128), ("keys", 128): (64, 32, 128),
         ("queries", 64): (64, 64, 96), ("queries", 128): (64, 32, 96)}


def tiles(kernel, T, HS):
    """Tiles that the blocks of a head go through, causal."""
    rows, columns, _ = TILES[kernel, 64 if HS <= 64 else 128]
    blocks = range(0, T, rows)
    if kernel == "keys":  # a block of keys is seen by all queries from its first on
        return sum(-(-(T - first) // columns) for first in blocks)
    return sum(-(-min(T, first + rows) // columns) for first in blocks)


def attention_cycles(kernel, heads, T, HS):
    """Cycles of a scheduler, if instructions and mma never waited: the larger of both."""
    W = 64 if HS <= 64 else 128
    each = max(instructions()[kernel, W], TILES[kernel, W][2] * MMA_CYCLES)
    return heads * tiles(kernel, T, HS) * 4 / (SMS * SCHEDULERS) * each


def attention_seconds(kernels, heads, T, HS):
    return sum(attention_cycles(kernel, heads, T, HS) for kernel in kernels) / CLOCK / ATTENTION


class Row:
    """times: how often in a step; flops, n_bytes: of one; seconds: expected of one, None: as long as its bytes take."""

    def __init__(self, name, times, flops, n_bytes, seconds=None):
        self.name, self.times, self.flops, self.n_bytes = name, times, flops, n_bytes
        self.limit = max(flops / TENSOR, n_bytes / MEMORY) * times
        self.expected = (stream(n_bytes) if seconds is None else seconds) * times


def product(name, times, M, IC, OC, out=2, more=0.0):
    """(M, IC) times (IC, OC); out: bytes of an element of the result; more: bytes of an epilogue, which no product hides."""
    flops = 2.0 * M * IC * OC
    return Row(name, times, flops, 2.0 * (M * IC + IC * OC) + out * M * OC + more, flops / PRODUCT + stream(more))


def classes():
    """{class: its rows}, in the order of the page."""
    tensor = 2.0 * N * C  # bytes of (N, C) in bf16
    statistics = 8.0 * N * NH
    counted = 2.0 * B * T * T * C  # FLOP of causal attention, forward: half of the square
    heads = B * NH
    pieces = N // HEAD_ROWS
    return {
        "products of blocks": [
            product("qkv", L, N, C, 3 * C), product("attproj", L, N, C, C), product("fc, and its GELU", L, N, C, 4 * C, more=4 * tensor),
            product("fcproj", L, N, 4 * C, C),
            product("dinp of fcproj, and GELU's slope", L, N, C, 4 * C, more=4 * tensor), product("dinp of fc", L, N, 4 * C, C),
            product("dinp of attproj", L, N, C, C), product("dinp of qkv", L, N, 3 * C, C),
            product("dW of fcproj", L, C, N, 4 * C, out=4), product("dW of fc", L, 4 * C, N, C, out=4),
            product("dW of attproj", L, C, N, C, out=4), product("dW of qkv", L, 3 * C, N, C, out=4)],
        "products of the head": [
            product("logits", pieces, HEAD_ROWS, C, V), product("dinp of logits", pieces, HEAD_ROWS, V, C),
            product("dW of logits", pieces, V, HEAD_ROWS, C, out=4), Row("... added piece to piece", pieces - 1, 0.0, 8.0 * V * C)],
        "attention": [
            Row("attention forward", L, counted, 4 * tensor + statistics, attention_seconds(["forward"], heads, T, HS)),
            Row("attention backward: D", L, 0.0, 2 * tensor + 2 * statistics),
            Row("attention backward: dk, dv", L, 1.5 * counted, 6 * tensor + statistics, attention_seconds(["keys"], heads, T, HS)),
            Row("attention backward: dq", L, counted, 5 * tensor + statistics, attention_seconds(["queries"], heads, T, HS))],
        "LayerNorms": [
            Row("first LayerNorm", 1, 0.0, 2 * tensor), Row("residual and LayerNorm", 2 * L, 0.0, 4 * tensor),
            Row("LayerNorm backward, and a bias", 2 * L + 1, 0.0, 4 * tensor)],
        "biases of fc and qkv": [Row("bias of fc", L, 0.0, 4 * tensor), Row("bias of qkv", L, 0.0, 3 * tensor)],
        "cross entropy": [Row("cross entropy", pieces, 0.0, 4.0 * HEAD_ROWS * V)],
        "embedding, zeros": [
            Row("embedding", 1, 0.0, 2 * tensor), Row("embedding backward", 1, 0.0, 2 * tensor + 2 * 4.0 * V * C),
            Row("stream's gradient set to 0", 1, 0.0, tensor)],
        "AdamW, norm": [Row("AdamW", 1, 0.0, 30.0 * PARAMETERS), Row("norm", 1, 0.0, 4.0 * PARAMETERS)],
        "launches, waits": [Row("between launches", LAUNCHES, 0.0, 0.0, LAUNCH), Row("waits for losses and norm", 1, 0.0, 0.0, 2e-4)],
    }


def rows():
    return [row for part in classes().values() for row in part]


def times_of(page):
    """{row: milliseconds} of the table of a page that has a column `expected`. "... by wgmma" goes on from the row before; what follows a comma is left out."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        rows_ = [[cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else None for line in file]
    found, column, before = {}, None, ""
    for cells in rows_:
        if cells is None:
            column = None
        elif column is None:  # the head of a table
            column = next((i for i, cell in enumerate(cells) if cell in ("expected", "expected, ms")), -1)
        elif column >= 0 and re.fullmatch(r"[0-9.]+", cells[column]):
            name = cells[0].split(",")[0]
            before, name = (before, f"{before} {name[4:]}") if name.startswith("... ") else (name, name)
            found[name] = float(cells[column])
    return found


def derived(case, by_wgmma):
    page, by_mma, other = DERIVED[case]
    row = other if by_wgmma else by_mma
    return times_of(page)[row] if row else None


def expected(case, n_bytes, flops, by_wgmma=False):
    """
    Milliseconds of a case of dev/bench/gpu_ops.cu on an H200; None: nobody says. A case without FLOP is neither a product nor attention: it moves
    bytes. by_wgmma: of a build for sm_90a; attention of other names is expected as by mma.sync all the same.
    """
    if case in DERIVED:
        return derived(case, by_wgmma)
    attention = re.fullmatch(r"attention_(forward|backward) B (\d+) T (\d+) NH (\d+) HS (\d+)", case)
    if attention:
        B, T, NH, HS = (int(n) for n in attention.groups()[1:])
        kernels = ["forward"] if attention[1] == "forward" else ["keys", "queries"]
        return 1e3 * attention_seconds(kernels, B * NH, T, HS) + (0.0 if attention[1] == "forward" else 1e3 * stream(4.0 * B * T * NH * HS))
    if case.startswith(NOT_DERIVED) or not n_bytes:
        return None
    return 1e3 * (flops / PRODUCT if flops else stream(n_bytes))


def step_ms():
    return 1e3 * sum(r.expected for r in rows())


# ---- the page ----

def ms(seconds):
    return f"{1e3 * seconds:.2f}"


def table(header, body, left=1):
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left)] + body
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def taken(row, which):
    """ms in a step, as measured first (0) or last (1); what nobody measured, as expected."""
    return MEASURED[row.name][which] * row.times if row.name in MEASURED else 1e3 * row.expected


def step_table(found):
    body = []
    for r in found:
        cells = ["", "", ""]
        if r.name in MEASURED:
            share = 1e3 * r.expected / taken(r, 0)
            cells = [f"{taken(r, 0):.2f}", f"**{share:.2f}**" if share < 0.85 else f"{share:.2f}", f"{taken(r, 1):.2f}"]
        body.append([r.name, str(r.times), f"{r.flops * r.times / 1e12:.2f}" if r.flops else "", f"{r.n_bytes * r.times / 1e9:.1f}" if r.n_bytes else "",
                     ms(r.limit) if r.limit else "", ms(r.expected)] + cells)
    first, last = (sum(taken(r, i) for r in found) for i in (0, 1))
    total = [f"{sum(r.flops * r.times for r in found) / 1e12:.1f}", f"{sum(r.n_bytes * r.times for r in found) / 1e9:.0f}",
             ms(sum(r.limit for r in found)), ms(sum(r.expected for r in found)), f"{first:.2f}", f"{step_ms() / first:.2f}", f"{last:.2f}"]
    return table(["row", "times", "TFLOP", "GB", "limit, ms", "expected, ms", "measured, ms", "expected / measured", "now, ms"],
                 body + [["**all of them**", ""] + [f"**{cell}**" for cell in total]])


def class_table():
    body = []
    for name, part in classes().items():
        body.append([name, ms(sum(r.limit for r in part)), ms(sum(r.expected for r in part))] + [f"{sum(taken(r, i) for r in part):.2f}" for i in (0, 1)])
    return table(["class", "limit, ms", "expected, ms", "measured, ms", "now, ms"], body)


def split_table():
    """dW without a split sum: tiles of 128 x 256 that are not enough for the multiprocessors."""
    body = []
    for name, OC, IC in (("attproj", C, C), ("qkv", 3 * C, C), ("fc, fcproj", 4 * C, C), ("logits", V, C)):
        n = -(-OC // 128) * -(-IC // 256)
        fill = n / (SMS * -(-n // SMS))
        K = N if name != "logits" else HEAD_ROWS
        seconds = 2.0 * OC * IC * K / PRODUCT
        body.append([name, str(n), f"{100 * fill:.0f} %", ms(seconds), ms(seconds / fill)])
    return table(["dW of", "tiles of 128 x 256", "of 132 multiprocessors, in whole waves", "expected, ms", "if no sum is split, ms"], body)


def attention_table():
    body = []
    issued = instructions()
    for kernel in ("forward", "keys", "queries"):
        for HS in (64, 128):
            rows_, columns, mma = TILES[kernel, HS]
            body.append([{"forward": "forward", "keys": "dk, dv", "queries": "dq"}[kernel], str(HS), f"{rows_} x {columns}", str(issued[kernel, HS]), f"{mma * MMA_CYCLES:.0f}",
                         f"{tiles(kernel, T, HS)}", ms(attention_cycles(kernel, B * NH * 64 // HS, T, HS) / CLOCK),
                         ms(attention_seconds([kernel], B * NH * 64 // HS, T, HS))])
    return table(["kernel", "HS", "tile", "instructions", "cycles of its mma", "tiles of a head", "bound, ms", "expected, ms"], body)


TEXT = """# A step of GPT-2 124M on an H200, row by row

Written by `python3 dev/roofline.py`; [dev/roofline.py](../../dev/roofline.py) has the formulas and what was measured. B {B}, T {T}, bf16, one card:
{N:,} tokens a step. The goal is 600,000 tokens a second, {goal} ms.

The **limit** of a row is what the card cannot beat: FLOP at 989 TFLOP/s or bytes at 4.8 TB/s, every input read once and every
output written once. **Expected** is what was derived before there was a card, by the assumptions below; bold is a row that reached
less than 0.85 of it and so names the assumption that failed. **Measured** is the code as it came to [an H200](2026-11-28-h200.md), each kernel alone; **now**
is what a bench took for the kernels and algorithms that were chosen on that day, alone too, with `CUDA_ARCH=sm_90a` for attention: the kernels in
the code are rewritten from these and have not been on a card, and the embedding's time is what its shorter scans leave of the measured one. [gpu_check.sh](README.md) prints the expected beside
what it measures. Empty: nobody measured it, and the sum has what is expected.

{step}
{classes}
Whole steps took **{whole} ms**, {rate} tokens a second: {factor:.2f} times the sum. Alone, in bursts of 20 ms, a kernel may have the clock's
1,980 MHz; in steps that follow each other the card reaches its 700 W, and the clock is 1,545 to 1,815. **Whole steps with what is now in the code were not measured.** Were they
{factor:.2f} times the sum again, they would take {hoped:.0f} ms.

## What is assumed, and how its failure looks

| kind | assumption | where it comes from | if it fails |
|---|---|---|---|
| products | 630 TFLOP/s, 64 % | what large bf16 products usually reach at the power that a card may draw. **Alone most reach more**: 699 to 881 by their first algorithm, but attproj 639, its dinp 599, and with GELU 550; `matmul 8192` 800 | `matmul 8192` is lower, too: clocks, power. It alone is right: the choice of algorithms ([README](README.md#choosing-cublaslts-algorithms)), or a dW below |
| GELU and its slope | 4 tensors of (N, C) more, {gelu} ms each time, that the product does not hide | bytes | `matmul_gelu_forward fc` beside `matmul_forward fc` |
| memory | 26 us for a tensor of (N, C): 3.9 TB/s, 81 % | what large copies usually reach; a copy of 1 GiB has 4.2 | `copy` is lower, or loads in flight are too few: `% of copy` |
| attention | half of the cycles that instructions or mma need | FlashAttention-2, also mma.sync, has 35 % of an H100's rate at its best ([Shah et al. 2024](https://arxiv.org/abs/2407.08608)), 56 % of what mma.sync can do | more than twice the bound: stalls, `ncu`'s warp states say of what; forward alone: the L2 does not hold a group of heads |
| launches | 2 us each, {launches} of them | counted under dev/simt; 2 us are a guess | `--graph 1` beside it |

## dW: enough tiles only if sums are split

A product's sum over {N:,} positions has few outputs. Where cuBLASLt does not split the sum, most multiprocessors have nothing to do:

{split}
A measured time near the last column says that no sum was split, or that only slow schemes were allowed.

## Attention: cycles of a scheduler

For a tile a warp issues so many instructions, one a cycle, and its mma take so many cycles; the larger of both is the bound. B {B},
T {T}, 768 channels, one layer:

{attention}
Forward and backward are counted as 2 and 5 B T T C operations in TFLOP/s; the kernels do 7 products backward instead of 5, and
the half tiles on the diagonal. These are the kernels by mma.sync; in a build with `CUDA_ARCH=sm_90a` those by
wgmma take their place ([flash_hopper.h](../../llmc/ops/flash_hopper.h)).
"""


def page():
    found = rows()
    first, last = (sum(taken(r, i) for r in found) for i in (0, 1))
    return TEXT.format(B=B, T=T, N=N, goal=f"{1e3 * N / 600e3:.0f}", step=step_table(found), classes=class_table(), whole=f"{STEP_MEASURED:.1f}",
                       rate=f"{1e3 * N / STEP_MEASURED:,.0f}", factor=STEP_MEASURED / first, hoped=STEP_MEASURED / first * last,
                       gelu=f"{1e3 * stream(8.0 * N * C):.2f}", launches=LAUNCHES, split=split_table(), attention=attention_table())


def problem():
    """Why the page is not what the formulas give, or another page has no time for a case of DERIVED; None: all is well."""
    for case in DERIVED:
        try:
            derived(case, False), derived(case, True)
        except (KeyError, OSError) as lost:
            return f"{DERIVED[case][0]} has no expected time in row {lost} for \"{case}\""
    try:
        with open(os.path.join(ROOT, PAGE), encoding="utf-8") as file:
            same = file.read() == page()
    except FileNotFoundError:
        same = False
    return None if same else "is not what the formulas give: python3 dev/roofline.py"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        found = problem()
        print(f"FAIL  {PAGE}: {found}" if found else f"ok    {PAGE}")
        return found is not None
    with open(os.path.join(ROOT, PAGE), "w", encoding="utf-8") as file:
        file.write(page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
