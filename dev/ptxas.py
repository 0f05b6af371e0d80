"""
What the assembler says of every kernel: registers, shared memory, stack, spills. Writes doc/gpu/ptxas.md.

    make ptxas                          write the table anew
    make ptxas PTXAS_OPTIONS=--check    compare: fails when the table is not what the code gives
    python dev/ptxas.py [--check] [--archs sm_80,sm_90] -- NVCC FLAGS...    what make runs

Compiles the programs in SOURCES to machine code, bf16 build (no GPU is needed), and reads `ptxas -v`; of HOPPER_SOURCES, for sm_90a,
the kernels that no other card has. Fails (status 1) when a
kernel whose name contains one of HOT spills registers: it then goes through memory for what should be at hand. A spill is a
stored register; a stack frame without spills is an array that is indexed at run time, and just as slow.
"""
import argparse
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RECORD = "doc/gpu/ptxas.md"
ARCHS = ["sm_80", "sm_90"]  # of the record
# together they use every kernel as training does
SOURCES = ["train_gpt2.cu", "train_moe.cu", "train_qwen3.cu", "train_qwen36.cu", "train_deepseek_v4.cu", "train_glm5.cu",
           "dev/bench/gpu_ops.cu", "dev/bench/gated_delta.cu"]
HOPPER = "sm_90a"  # what no other card has: kernels with hopper in their name, and what they alone call for
HOPPER_SOURCES = ["dev/bench/gpu_ops.cu", "dev/bench/gated_delta.cu", "train_moe.cu", "train_deepseek_v4.cu", "train_glm5.cu"]
HOT = ["adamw", "attention", "crossentropy", "embedding", "expert", "flash", "gelu", "gemm", "grouped", "hyper", "latent", "layernorm", "lora",
       "matmul", "residual", "rmsnorm", "rope", "router", "swiglu"]

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")

HEADER = """# Kernels as the assembler sees them

Written by `make ptxas` with nvcc {release}, bf16 build; [dev/ptxas.py](../../dev/ptxas.py) says how. Nothing here was
measured on a GPU. Registers are per thread (255 at most; a multiprocessor has 65,536). Shared memory is per block and without
the part that a launch asks for; stack and spills are bytes per thread. Two numbers, `a / b`, are those of {archs}; kernels that only
sm_90a has, most of them with `hopper` in their name, are of that.
A kernel that spills keeps registers in memory. Those with one of these in their name may not, or `make ptxas` fails:
{hot}.
"""


def short(name):
    """void attention_kernel<__nv_bfloat16, (int)64>(...) -> attention_kernel<bf16, 64>"""
    name = re.sub(r"\(anonymous namespace\)::|^void |__nv_|\((?:unsigned )?(?:int|bool|long)\)", "", name)
    name = re.sub(r"\bbfloat16\b", "bf16", name)
    depth = 0
    for i, c in enumerate(name):  # cut at the parenthesis of the arguments, not at one inside < >
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


def parse(text):
    """{mangled name: (registers, shared, stack, spill stores, spill loads)} of one compilation's output."""
    found, name, frame = {}, None, (0, 0, 0)
    for line in text.splitlines():
        entry, size, used = ENTRY.search(line), FRAME.search(line), USED.search(line)
        if entry:
            name, frame = entry[1], (0, 0, 0)
        elif size:
            frame = tuple(int(n) for n in size.groups())
        elif used and name:
            shared = SHARED.search(line)
            found[name] = (int(used[1]), int(shared[1]) if shared else 0) + frame
    return found


def compile_source(nvcc, source, arch):
    """Rows of one source for one card. Raises RuntimeError with the compiler's words."""
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-DWGMMA"] if arch == HOPPER else [f"-arch={arch}"]
    with tempfile.TemporaryDirectory() as work:
        command = nvcc + ["-cubin"] + flags + ["-Xptxas", "-v", "-x", "cu", source, "-o", os.path.join(work, "cubin")]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{source} for {arch} does not compile:\n{done.stdout}")
    if "wgmma.mma_async instructions are serialized" in done.stdout:
        raise RuntimeError(f"{source} for {arch}: products that should overlap are serialized:\n{done.stdout}")
    return parse(done.stdout)


def demangle(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(names, done.stdout.splitlines()))


def collect(nvcc, archs):
    """{(short name, arch): numbers}; a kernel that two sources use the same way is one row."""
    jobs = [(source, arch) for source in SOURCES if os.path.exists(os.path.join(ROOT, source)) for arch in archs]
    jobs += [(source, HOPPER) for source in HOPPER_SOURCES]
    with ThreadPoolExecutor(max_workers=2) as pool:  # each takes a core and a gigabyte
        found = list(pool.map(lambda job: compile_source(nvcc, *job), jobs))
    of_all = {name for (_, arch), rows in zip(jobs, found) if arch != HOPPER for name in rows}
    found = [{name: numbers for name, numbers in rows.items() if arch != HOPPER or name not in of_all} for (_, arch), rows in zip(jobs, found)]
    names = demangle(sorted({name for rows in found for name in rows}))
    return {(short(names[name]), arch): numbers for (_, arch), rows in zip(jobs, found) for name, numbers in rows.items()}


def cell(values):
    """One number where all cards have the same."""
    return f"{values[0]:,}" if len(set(values)) == 1 else " / ".join("-" if v is None else f"{v:,}" for v in values)


def table(rows, archs, release):
    lines = [HEADER.format(release=release, archs=" and ".join(archs), hot=", ".join(HOT)),
             "| kernel | registers | shared | stack | spill stores | spill loads |", "|---|---:|---:|---:|---:|---:|"]
    for name in sorted({name for name, _ in rows}):
        of = archs if any((name, arch) in rows for arch in archs) else [HOPPER]
        numbers = [rows.get((name, arch), (None,) * 5) for arch in of]
        lines.append(f"| `{name}` | " + " | ".join(cell(column) for column in zip(*numbers)) + " |")
    return "\n".join(lines) + "\n"


def spilling(rows):
    return [f"{name} for {arch}: {numbers[3]} bytes of spill stores, {numbers[4]} of loads" for (name, arch), numbers in sorted(rows.items())
            if numbers[3] + numbers[4] and any(hot in name for hot in HOT)]


def of_arch(text, arch):
    """The rows of a table as they are for one of ARCHS; a kernel that is not there has none."""
    at = ARCHS.index(arch)
    rows = [re.sub(r"(\S+) / (\S+)", lambda both: both[at + 1], line) for line in text.splitlines() if line.startswith("| `")]
    return [row for row in rows if "| - |" not in row]


def check_record(text, archs, release):
    """What is wrong with the committed table, or None. Another compiler allocates registers its own way."""
    try:
        with open(os.path.join(ROOT, RECORD), encoding="utf-8") as file:
            record = file.read()
    except FileNotFoundError:
        return f"no {RECORD}: run make ptxas"
    if f"nvcc {release}," not in record:
        print(f"{RECORD} was written with another nvcc, this is {release}: not compared")
        return None
    if archs == ARCHS:
        same = record == text
    else:
        same = all(of_arch(record, arch) == of_arch(text, arch) for arch in archs)
    return None if same else f"{RECORD} is not what the kernels give now: run make ptxas"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed table, write nothing")
    parser.add_argument("--archs", default=",".join(ARCHS), help="with --check one of them, too")
    parser.add_argument("nvcc", nargs="+", help="the compiler and its flags, after --")
    options = parser.parse_args()
    if not options.check and options.archs.split(",") != ARCHS:
        parser.error(f"the record is of {','.join(ARCHS)}: --archs is for --check")
    version = subprocess.run([options.nvcc[0], "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout
    release = re.search(r"release ([\d.]+)", version)[1]
    try:
        archs = options.archs.split(",")
        rows = collect(options.nvcc, archs)
    except RuntimeError as error:
        print(error)
        return 1
    text, problems = table(rows, archs, release), spilling(rows)
    if options.check:
        problems += [p for p in [check_record(text, archs, release)] if p]
    else:
        os.makedirs(os.path.join(ROOT, os.path.dirname(RECORD)), exist_ok=True)
        with open(os.path.join(ROOT, RECORD), "w", encoding="utf-8") as file:
            file.write(text)
        print(f"wrote {RECORD}")
    for problem in problems:
        print(f"FAIL  {problem}")
    print(f"{len({name for name, _ in rows})} kernels, {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
