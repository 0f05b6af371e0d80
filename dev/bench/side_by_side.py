"""What mamba_step.py, moe_step.py and qwen_step.py share: options, tokens, running each program as a process of its own, and are their
losses the same?"""
import argparse
import json
import os
import re
import resource
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TOLERANCE = 1e-4  # relative, of the loss of each step
# glibc gives large blocks back to the system at once; PyTorch would take them anew, page by page, in every step
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def step_parser(description, trainer, room, steps, warmup, **sizes):
    """The options of every *_step.py. room: what a run writes, GB; steps, warmup, sizes: defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=steps, help="per round, warm-up included")
    parser.add_argument("--warmup", type=int, default=warmup, help="first steps of a run that do not count: fresh memory, compilation")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one run of one program")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--ours", metavar="FILE", default=os.path.join(ROOT, "build", "gcc-native-O3", trainer),
                        help=f"default build/gcc-native-O3/{trainer}")
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    parser.add_argument("--work", metavar="DIR", help=f"where {room} GB can be written for a while (default the system's temporary folder)")
    parser.add_argument("--plain-malloc", action="store_true", help="leave glibc's malloc as it is for PyTorch: slower, perhaps less memory")
    parser.add_argument("--small", action="store_true", help="a tiny model, one round, T 40")
    return parser


def step_options(parser):
    """What was typed, with the sizes that --small means."""
    options = parser.parse_args()
    if options.small:
        options.seq, options.rounds = 40, 1
    if not 0 <= options.warmup < options.steps:
        parser.error("steps must exceed the warm-up")
    return options


def step_fields(options, work):
    """What stands in braces in the commands of programs, of a run in the folder `work`."""
    return dict(vars(options), here=HERE, root=ROOT, work=work, python=sys.executable, binary=os.path.abspath(options.ours),
                model=os.path.join(work, "model"), tokens=os.path.join(work, "tokens.bin"), run=os.path.join(work, "run"))


def print_load():
    print(f"load before the start: {os.getloadavg()[0]:.2f} (near 0 on a quiet machine; no other program may run)", flush=True)


def write_tokens(path, n_steps, n_step_tokens, vocab, seed=2):
    """A shard of llm.c: 256 int32 of header (magic, version, count), then uint16 tokens. Two batches take turns: the loss falls
    fast, so that a different update shows in it, and a different order of rows does too."""
    tokens = np.random.default_rng(seed).integers(vocab, size=2 * n_step_tokens)
    tokens = np.resize(tokens, n_steps * n_step_tokens + 1)
    with open(path, "wb") as file:
        file.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0"))
        file.write(tokens.astype("<u2").tobytes())


def memory_available():
    with open("/proc/meminfo", encoding="utf-8") as file:
        return 1024 * int(re.search(r"MemAvailable:\s*(\d+)", file.read()).group(1))


def memory_peak(pid):
    """VmHWM in MB so far, 0 where the process has ended"""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as file:
            found = re.search(r"VmHWM:\s*(\d+)", file.read())
    except OSError:
        return 0.0
    return int(found.group(1)) / 1024 if found else 0.0


def run(command, fields, keep_memory=False):
    """Run one program to its end; returns its output and its peak resident memory in MB. Raises RuntimeError where it fails."""
    words = [word.format(**fields) for word in command.split()]
    environment = dict(os.environ, OMP_NUM_THREADS=str(fields["threads"]), TORCHINDUCTOR_CACHE_DIR=os.path.join(fields["work"], "inductor"),
                       HF_HUB_OFFLINE="1", **(KEEP_MEMORY if keep_memory else {}))
    limit = int(0.95 * memory_available())  # a peer that needs more ends itself, instead of whatever the kernel would choose
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a random model may write any byte
        try:
            child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment,
                                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)))
        except OSError as error:
            raise RuntimeError(f"{words[0]}: {error.strerror}") from error
        begin, peak = time.monotonic(), 0.0
        while child.poll() is None:
            peak = max(peak, memory_peak(child.pid))
            if time.monotonic() - begin > fields["timeout"]:
                child.kill()
                child.wait()
                raise RuntimeError(f"not done after {fields['timeout']} s")
            time.sleep(0.05)
        output.seek(0)
        text = output.read()
    if child.returncode != 0:
        last_line = (text.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"status {child.returncode}: {last_line[:200]}")
    return text, peak


def read_steps(text):
    """The records of updates among lines of JSON, of ours or of a program beside it"""
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [record for record in records if record.get("ms") is not None]


def our_program(name, command, options):
    """The trainer of --ours, if it was made."""
    problem = None if os.path.exists(options.ours) else f"no {os.path.relpath(options.ours, ROOT)}: make it first"
    return Program("ours", name, command, options.steps, options.warmup, problem)


class Program:
    def __init__(self, key, name, command, n_steps, n_warmup, problem=None):
        self.key, self.name, self.command, self.n_steps, self.n_warmup, self.problem = key, name, command, n_steps, n_warmup, problem
        self.losses, self.norms, self.steps, self.memory = [], [], [], 0.0

    def measure(self, fields):
        """One run; its losses must be those of the run before, or every figure here would be of something else."""
        if self.problem:
            return
        is_ours = self.key == "ours"
        try:
            text, memory = run(self.command, dict(fields, peer=self.key, steps=self.n_steps), keep_memory=not (is_ours or fields["plain_malloc"]))
            if is_ours:
                with open(os.path.join(fields["run"], "metrics.jsonl"), encoding="utf-8") as file:
                    text = file.read()
        except (RuntimeError, OSError) as error:
            self.problem = str(error)
            return
        finally:
            shutil.rmtree(fields["run"], ignore_errors=True)  # our checkpoint, 1.5 GB
        records = read_steps(text)
        if len(records) != self.n_steps:
            self.problem = f"expected {self.n_steps} steps, found {len(records)}"
            return
        self.losses = self.losses or [record["loss"] for record in records]
        self.norms = self.norms or [record["norm"] for record in records]
        self.steps += records[self.n_warmup :]
        self.memory = max(self.memory, memory)

    def best(self, key="ms"):
        return min(record[key] for record in self.steps)

    def median(self):
        return statistics.median(record["ms"] for record in self.steps)


def worst_difference(values, reference):
    return max(abs(value / expected - 1) for value, expected in zip(values, reference))


def compare_losses(programs):
    """Prints the loss of each step, and how far losses and norms differ from the first program's; ends where they disagree."""
    programs = [program for program in programs if not program.problem]
    if not programs:
        sys.exit("no program ran")
    reference = max(programs, key=lambda p: len(p.losses))
    print("\n| loss | " + " | ".join(p.name for p in programs) + " |\n|---|" + "---|" * len(programs))
    for i in range(len(reference.losses)):
        print(f"| step {i + 1} | " + " | ".join(f"{p.losses[i]:.6f}" if i < len(p.losses) else "" for p in programs) + " |")
    differences = [worst_difference(p.losses, reference.losses) for p in programs]
    print("| worst difference / loss | " + " | ".join(f"{difference:.1e}" for difference in differences) + " |")
    print("| the same of the norm | " + " | ".join(f"{worst_difference(p.norms, reference.norms):.1e}" for p in programs) + " |\n", flush=True)
    wrong = [f"{p.name} against {reference.name}: losses differ by {difference:.1e} of their size, allowed {TOLERANCE:.0e}"
             for p, difference in zip(programs, differences) if not difference <= TOLERANCE]
    if wrong:
        sys.exit("\n".join(["no times, for this is not the same training:"] + wrong))
