"""One training step of GPT-2 124M side by side: ours, PyTorch eager and compiled, and upstream llm.c -Ofast, float32 on the CPU.

    make train_gpt2 && .venv/bin/python dev/bench/step.py --upstream /tmp/llm.c [--batch 4 --seq 64 --threads 2 --rounds 3]

In every round each program runs once, as a process of its own, so that all see the same neighbours and the same clock; the
shortest step of all rounds counts. A program that is missing gets a line that says so. The Python that runs this file needs
torch, which is measured with both ways to write attention: F.scaled_dot_product_attention and plain matrix products; the first
of them through torch.compile too, whose compiling falls into the first step.
FLOPs of one step: (6 P + 6 L C T) B T, where P = 12 L C^2 + Vp C are the weights of matrix products (forward 2 per weight and
token, backward 4) and the second term is causal attention (half of the T x T products).
"""

import argparse
import array
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

# {batch} {seq} {threads} {steps} {tokens} {run} are filled in. Every program prints "| MS ms" once per step.
OURS = ("{root}/train_gpt2 --model d12 --batch-size {batch} --seq-len {seq} --steps {steps} --threads {threads} --train {tokens} "
        "--val {tokens} --eval-every 0 --save-every 0 --sample-every 0 --log-every 1 --clip 0 --run {run}")
PYTORCH = "{python} {here}/pytorch_gpt2.py --batch {batch} --seq {seq} --threads {threads} --steps {steps} --attention "
UPSTREAM = "{work}/upstream_step {batch} {seq} {upstream_steps}"
UPSTREAM_BUILD = ("{cc} -w -Ofast -march=native -fopenmp -DTESTING -DUPSTREAM=\"{upstream}/train_gpt2.c\" {here}/upstream_step.c "
                  "-lm -o {work}/upstream_step")
PEAK_BUILD = "{cc} -O3 -march=native -ffp-contract=off -fopenmp {here}/vector_peak.c -lm -o {work}/vector_peak"
PEAK = "{work}/vector_peak {threads}"

L, C, VOCAB, PADDED_VOCAB = 12, 768, 50257, 50304


def write_tokens(path, n):
    """A token shard in llm.c's format: 256 int32 of header (magic, version, count), then uint16 tokens."""
    rng = random.Random(1)
    with open(path, "wb") as f:
        f.write(struct.pack("<3i", 20240520, 1, n).ljust(1024, b"\0"))
        array.array("H", (rng.randrange(VOCAB) for _ in range(n))).tofile(f)


def run(command, fields):
    """Run one program to its end; returns its output and its peak resident memory in MB. Raises RuntimeError where it fails."""
    words = [word.format(**fields) for word in command.split()]
    environment = dict(os.environ, OMP_NUM_THREADS=str(fields["threads"]))
    try:
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    except OSError as error:
        raise RuntimeError(f"{words[0]}: {error.strerror}") from error
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        last_line = (output.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"{os.path.basename(words[0])} ended with status {child.returncode}: {last_line}")
    return output, usage.ru_maxrss / 1024


class Program:
    def __init__(self, name, command):
        self.name, self.command = name, command
        self.ms, self.memory, self.problem = float("inf"), 0.0, None

    def measure(self, fields):
        if self.problem:
            return
        try:
            output, memory = run(self.command, fields)
        except RuntimeError as error:
            self.problem = str(error)
            return
        steps = [float(ms) for ms in re.findall(r"\| *([0-9.]+) ms\b", output)]
        if not steps:
            self.problem = "printed no step time"
            return
        self.ms = min(self.ms, *steps)
        self.memory = max(self.memory, memory)
        print(f"    {self.name}: {' '.join(f'{ms:.0f}' for ms in steps)} ms", flush=True)


def prepare(options, fields):
    """Build what is compiled here, write the tokens; returns the programs, ours first."""
    run(PEAK_BUILD, fields)
    write_tokens(fields["tokens"], (options.steps + 2) * options.batch * options.seq + 1)
    upstream = Program("llm.c -Ofast", UPSTREAM)
    if os.path.exists(os.path.join(options.upstream, "train_gpt2.c")):
        run(UPSTREAM_BUILD, fields)
    else:
        upstream.problem = f"no train_gpt2.c in {options.upstream}; --upstream names a checkout of llm.c"
    return [Program("ours", OURS), Program("PyTorch, sdpa", PYTORCH + "sdpa"),
            Program("PyTorch, matmul", PYTORCH + "matmul"), Program("torch.compile", PYTORCH + "sdpa --compile"), upstream]


def print_table(programs, options, peak):
    flops = (6 * (12 * L * C * C + PADDED_VOCAB * C) + 6 * L * C * options.seq) * options.batch * options.seq
    print(f"\nGPT-2 124M, B {options.batch}, T {options.seq}, {options.threads} threads, shortest step of {options.rounds} rounds; "
          f"{flops / 1e9:.1f} GFLOP per step")
    print(f"peak: {peak:.1f} GFLOP/s of fused multiply-adds")
    print(f"{'':16}{'ms':>10}{'/ ours':>9}{'GFLOP/s':>10}{'% of peak':>11}{'peak MB':>10}")
    for p in programs:
        if p.problem:
            print(f"{p.name:16}  not measured: {p.problem}")
            continue
        ratio = "-" if programs[0].problem else f"{p.ms / programs[0].ms:.2f}"
        rate = flops / p.ms / 1e6
        print(f"{p.name:16}{p.ms:10.1f}{ratio:>9}{rate:10.1f}{100 * rate / peak:11.1f}{p.memory:10.0f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64, help="at most 1024")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="per round, ours and PyTorch")
    parser.add_argument("--upstream-steps", type=int, default=3, help="per round, llm.c, which is slow; its first step is the slowest")
    parser.add_argument("--upstream", default="/tmp/llm.c", help="checkout of llm.c")
    parser.add_argument("--cc", default="gcc")
    options = parser.parse_args()
    print(f"load before the start: {os.getloadavg()[0]:.2f} (near 0 on a quiet machine; no other program may run)")
    with tempfile.TemporaryDirectory() as work:
        fields = dict(vars(options), here=HERE, root=ROOT, work=work, python=sys.executable,
                      tokens=os.path.join(work, "tokens.bin"), run=os.path.join(work, "run"))
        programs = prepare(options, fields)
        peak = 0.0
        for i in range(options.rounds):
            print(f"round {i + 1} of {options.rounds}", flush=True)
            peak = max(peak, float(re.search(r"([0-9.]+) GFLOP/s", run(PEAK, fields)[0]).group(1)))
            for program in programs:
                program.measure(fields)
                shutil.rmtree(fields["run"], ignore_errors=True)  # our checkpoint, 1.5 GB:
                os.sync()  # nothing of it is left to be written while the next program runs
    print_table(programs, options, peak)


if __name__ == "__main__":
    main()
