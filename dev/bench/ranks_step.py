#!/usr/bin/env python3
"""One training step of GPT-2 124M on one machine, by one process and by ranks that share micro-batches, layers, matrices or positions, as
many threads in all. The ways take turns; of each the shortest time counts. First their losses must be equal, digit for digit, with --cp
within 1e-5.
    make CPU=1 train_gpt2cu launch && dev/bench/ranks_step.py
"""
import os
import re
import shutil
import tempfile

from side_by_side import ROOT, print_load, read_steps, run, step_fields, step_options, step_parser, write_tokens

OURS = (" {binary} --model {preset} --train {tokens} --seq-len {seq} --batch-size {batch} --grad-accum {leaves} --steps {steps} --lr {lr} "
        "--eval-every 0 --sample-every 0 --save-every 0 --run {run} --threads ")


def ways(options):
    """A command for each way; {threads} of one process are those of all ranks."""
    ranks = f"{ROOT}/launch -n {{ranks}}{OURS}{options.threads // options.ranks} "
    return {"one rank": OURS + "{threads}", f"{options.ranks} ranks, each some micro-batches": ranks,
            f"--pp {options.ranks}, each some layers": ranks + "--pp {ranks}",
            f"--tp {options.ranks}, each some of every matrix": ranks + "--tp {ranks}",
            f"--cp {options.ranks}, each some of the positions": ranks + "--cp {ranks}"}


def measure(command, fields):
    """Losses, times in ms and what rank 0 says of the network, of one run."""
    try:
        text, _ = run(command, fields)
        with open(os.path.join(fields["run"], "metrics.jsonl"), encoding="utf-8") as file:
            steps = read_steps(file.read())
    finally:
        shutil.rmtree(fields["run"], ignore_errors=True)
    sent = re.search(r"rank 0 sent (.*) per update and waited (\d+%)", text)
    return [s["loss"] for s in steps], [s["ms"] for s in steps[fields["warmup"]:]], sent.groups() if sent else ("", "")


def main():
    parser = step_parser(__doc__, "train_gpt2cu", 2, steps=4, warmup=1, batch=1, seq=256, leaves=8, ranks=2, threads=2, rounds=3)
    options = step_options(parser)
    options.preset = "tiny" if options.small else "d12"
    print_load()
    all_ways = ways(options)
    times, sent, losses = {way: [] for way in all_ways}, {}, {}
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        fields = step_fields(options, work)
        write_tokens(fields["tokens"], options.steps, options.batch * options.seq * options.leaves, 50257 if not options.small else 257)
        for _ in range(options.rounds):
            for way, command in all_ways.items():
                losses[way], ms, sent[way] = measure(command, fields)
                times[way] += ms
    alone = losses["one rank"]
    if any(x != alone if "--cp" not in way else any(abs(a / b - 1) > 1e-5 for a, b in zip(x, alone)) for way, x in losses.items()):
        raise SystemExit(f"no times, for this is not the same training: {losses}")
    alone = min(times["one rank"])
    print(f"\n| {options.leaves} micro-batches of {options.batch * options.seq} positions | ms | of one rank's speed | rank 0 sends | waits |\n|---|---|---|---|---|")
    for way, ms in times.items():
        print(f"| {way} | {min(ms):.0f} | {alone / min(ms):.2f} | {sent[way][0]} | {sent[way][1]} |")


if __name__ == "__main__":
    main()
