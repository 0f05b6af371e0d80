"""Muon against AdamW on the small DeepSeek V4 of `make run-deepseek-v4`: validation loss after equal steps and after
equal time, each with its best learning rate. It writes the tables of doc/muon.md in Markdown.

    make train_deepseek_v4 CPU=1 build/hello
    .venv/bin/python dev/bench/muon_learning.py                   about six minutes on two free cores
    .venv/bin/python dev/bench/muon_learning.py --ratio 1.4       with a ratio of times per step that is known
    .venv/bin/python dev/bench/muon_learning.py --quick           ten steps each: does every row run?

1. Time: runs of 20 steps of both in turns, as many as --rounds, with --threads; the shortest step of each counts, since
   what else a machine does only adds to it. Their ratio says how many steps of AdamW take as long as those of Muon.
2. Rates: one run for each learning rate of --rates, of Muon and of AdamW with --steps, of AdamW with so many more.
3. Seeds: the best rate of each of the three with two seeds more.
The schedule (warm-up of a tenth, cosine) is that of the whole run, so a longer run is one of its own. Losses do not
depend on --threads and --jobs, which is why those of 2 and 3 have one thread each.
"""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OPTIMIZERS = ("adamw", "muon")
SEEDS = (1337, 1, 2)


def records(options, optimizer, steps, words):
    """metrics.jsonl of a run of dev/hello_deepseek_v4.txt"""
    with tempfile.TemporaryDirectory() as folder:
        run = os.path.join(folder, "run")
        command = [options.binary, "--args", "dev/hello_deepseek_v4.txt", "--optimizer", optimizer, "--steps", str(steps),
                   "--warmup", str(steps // 10), "--sample-every", "0", "--save-every", "0", "--save-minutes", "0",
                   "--log-every", "1000000", "--run", run, *map(str, words)]
        env = {**os.environ, "GOMP_SPINCOUNT": "10000"}  # as make run-deepseek-v4 has it
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True)
        if done.returncode != 0:
            raise RuntimeError((done.stdout.strip().splitlines() or ["no output"])[-1])
        with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def shortest_steps(options):
    """ms of the shortest step of each optimizer"""
    shortest = dict.fromkeys(OPTIMIZERS, float("inf"))
    for _ in range(options.rounds):
        for name in OPTIMIZERS:
            found = records(options, name, 20, ["--eval-every", 0, "--threads", options.threads])
            shortest[name] = min([shortest[name], *(r["ms"] for r in found if r.get("ms") is not None)])
    return shortest


def validation_loss(options, optimizer, steps, lr, seed):
    words = ["--lr", lr, "--seed", seed, "--eval-every", steps, "--eval-batches", options.eval_batches, "--threads", 1]
    found = records(options, optimizer, steps, words)
    loss = [r["val_loss"] for r in found if r.get("val_loss") is not None][-1]
    print(f"{optimizer} {steps} steps, lr {lr:g}, seed {seed}: {loss:.4f}", file=sys.stderr, flush=True)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "train_deepseek_v4"), metavar="FILE")
    parser.add_argument("--steps", type=int, default=600, help="of Muon (default 600)")
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3,1.6e-2", metavar="A,B")
    parser.add_argument("--ratio", type=float, help="time of a step of Muon / of AdamW; without it is measured")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each that are measured (default 10)")
    parser.add_argument("--threads", type=int, default=2, help="of the runs that are measured (default 2)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time for losses (default 2)")
    parser.add_argument("--eval-batches", type=int, default=100, help="of 4 x 128 bytes (default 100)")
    parser.add_argument("--quick", action="store_true", help="ten steps each")
    options = parser.parse_args()
    if not os.path.exists(options.binary) or not os.path.exists(os.path.join(ROOT, "build/hello")):
        parser.error("make train_deepseek_v4 CPU=1 build/hello first")
    if options.quick:
        options.steps, options.rounds, options.eval_batches = 10, 1, 2
    ratio = options.ratio
    if ratio is None:
        ms = shortest_steps(options)
        ratio = ms["muon"] / ms["adamw"]
        print(f"A step, the shortest of {20 * options.rounds}, {options.threads} threads: AdamW {ms['adamw']:.1f} ms, "
              f"Muon {ms['muon']:.1f} ms.\n")
    rates = [float(rate) for rate in options.rates.split(",")]
    columns = [("adamw", options.steps), ("muon", options.steps), ("adamw", round(ratio * options.steps))]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        def losses(runs):
            return list(pool.map(lambda run: validation_loss(options, *run), runs))

        tried = losses([(*column, rate, SEEDS[0]) for rate in rates for column in columns])
        of_column = [tried[i::len(columns)] for i in range(len(columns))]
        best = [rates[found.index(min(found))] for found in of_column]
        others = losses([(*column, rate, seed) for column, rate in zip(columns, best) for seed in SEEDS[1:]])
    print("| `--lr` | " + " | ".join(f"{name}, {steps} steps" for name, steps in columns) + " |\n" + "|---" * 4 + "|")
    for i, rate in enumerate(rates):
        print(f"| {rate:g} | " + " | ".join(f"{found[i]:.4f}" for found in of_column) + " |")
    means = [(min(found) + sum(others[2 * i:2 * i + 2])) / 3 for i, found in enumerate(of_column)]
    print("| the best, three seeds | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
