"""What train_mamba_hpn learns on small data: heads, prototypes, gradient surgery, Forward-Forward. Writes doc/mamba_learning.md.

    make train_mamba_hpn && .venv/bin/python dev/bench/mamba_learning.py            all groups, some minutes on two cores
    .venv/bin/python dev/bench/mamba_learning.py --only text,surgery --out /tmp/learning.md
    .venv/bin/python dev/bench/mamba_learning.py --quick --out /tmp/learning.md     ten steps each: does every row run?

Groups:
    text       this repository's own sources, byte by byte: M 64, 2 layers, 300 steps
    digits     handwritten digits of 8 x 8 pixels as sequences of 64 (dev/data/digits.py), one class each
    counter    0, 1, 2, ... again and again (dev/data/synthetic.py): accuracy must reach 100%
    markov     a noisy Markov chain (dev/data/synthetic.py): accuracy must come within 2 points of the best possible
    surgery    text, 200 steps: every method of gradient surgery, without Forward-Forward, with it at every step, and with
               back-propagation at every fourth step only
Final loss is the mean of the last 20 training losses, each in its head's own measure, so it compares within one head only;
accuracy is the last of validation. Every run has the same seed. Status 1 if a run failed: its row says why.
"""
import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
LAST = 20  # training losses that make the final one
FF_LR = "1e-3"

COMMON = {
    "model": "tiny", "d-model": 64, "base-layers": 2, "d-state": 16, "d-conv": 4, "expand": 2,
    "lr": "3e-3", "warmup": 20, "schedule": "cosine", "final-lr": 0.1, "weight-decay": 0.1, "beta1": 0.9, "beta2": 0.95, "clip": 1,
    "ff-lr": 0, "bp-cadence-steps": 1, "gradient-surgery-method": "none",
    "seed": 42, "save-every": 0, "async-save": 0, "sample-every": 0, "log-every": 1000,
}
TEXT = {"train": "{root}", "val-fraction": 0.01, "tokenizer": "bytes", "batch-size": 8, "seq-len": 128, "steps": 300,
        "eval-batches": 20}
DIGITS = {"train": "{data}/digits_train.safetensors", "val": "{data}/digits_val.safetensors", "task": "cls", "batch-size": 32,
          "steps": 600, "eval-batches": 50}
COUNTER = {"train": "{data}/counter_train.bin", "val": "{data}/counter_val.bin", "batch-size": 8, "seq-len": 64, "steps": 300,
           "eval-batches": 20}
MARKOV = {"train": "{data}/markov_train.bin", "val": "{data}/markov_val.bin", "batch-size": 8, "seq-len": 64, "steps": 600,
          "eval-batches": 20}

# 257 byte tokens: orthoplex needs 129 dimensions or more, simplex 256
TEXT_HEADS = [
    {"head": "ce"},
    {"head": "hpn", "proto-init": "random", "proto": "fixed", "proto-dim": 64},
    {"head": "hpn", "proto-init": "optimize", "proto": "fixed", "proto-dim": 64},
    {"head": "hpn", "proto-init": "random", "proto": "fixed", "proto-dim": 160},
    {"head": "hpn", "proto-init": "orthoplex", "proto": "fixed", "proto-dim": 160},
    {"head": "hpn", "proto-init": "simplex", "proto": "fixed", "proto-dim": 256},
    {"head": "hpn", "proto-init": "random", "proto": "learn", "proto-dim": 64},
    {"head": "hpn-softmax", "proto-init": "random", "proto": "learn", "proto-dim": 64, "hpn-scale": 16},
    {"head": "hpn-softmax", "proto-init": "orthoplex", "proto": "fixed", "proto-dim": 160, "hpn-scale": 16},
]
FEW_CLASSES_HEADS = [
    {"head": "ce"},
    {"head": "hpn", "proto-init": "simplex", "proto": "fixed"},
    {"head": "hpn", "proto-init": "orthoplex", "proto": "fixed"},
    {"head": "hpn-softmax", "proto-init": "simplex", "proto": "fixed", "hpn-scale": 16},
]
SYNTHETIC_HEADS = [
    {"head": "ce"},
    {"head": "hpn", "proto-init": "orthoplex", "proto": "fixed"},
    {"head": "hpn-softmax", "proto-init": "random", "proto": "learn", "hpn-scale": 16},
]
METHODS = ("none", "pcgrad", "cagrad", "gradnorm", "orthograd")
CADENCES = ({"bp-cadence-steps": 1, "ff-lr": 0}, {"bp-cadence-steps": 1, "ff-lr": FF_LR}, {"bp-cadence-steps": 4, "ff-lr": FF_LR})

# name: (heading, sentence, options of all rows, the rows)
GROUPS = {
    "text": ("Text, byte by byte", "This repository's own sources; the last hundredth is for validation.", TEXT, TEXT_HEADS),
    "digits": ("Digits", "8 x 8 pixels, 17 shades, read as a sequence of 64; one class at the end.", DIGITS, FEW_CLASSES_HEADS),
    "counter": ("Counter", "0, 1, 2, ... again and again: the next token is certain.", COUNTER, SYNTHETIC_HEADS),
    "markov": ("Noisy Markov chain", "Each token has one likely successor. The best that any model can do: {bayes}.", MARKOV, SYNTHETIC_HEADS),
    "surgery": ("Gradient surgery and Forward-Forward",
                "Text as above with the head ce. Without Forward-Forward there is one task, and every method is `none`.",
                dict(TEXT, steps=200, head="ce"),
                [dict(cadence, **{"gradient-surgery-method": method}) for cadence in CADENCES for method in METHODS]),
}


# ---- data ----


def make_data(groups, folder):
    """The files that the groups read; returns what their sentences need to know."""
    facts = {"bayes": "not told"}
    if "digits" in groups:
        call([sys.executable, os.path.join(ROOT, "dev/data/digits.py"), "--out", folder])
    for name in ("counter", "markov"):
        if name in groups:
            output = call([sys.executable, os.path.join(ROOT, "dev/data/synthetic.py"), name, "--out", folder])
            facts["bayes"] = next((line.removeprefix("Bayes rate: at best ") for line in output.splitlines() if "Bayes" in line), facts["bayes"])
    return facts


def call(words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError((done.stdout.strip().splitlines() or ["no output"])[-1])
    return done.stdout


# ---- one run ----


def command_of(options, row_options, run, data):
    words = [options.binary]
    for name, value in row_options.items():
        words += [f"--{name}", str(value).format(root=ROOT, data=data)]
    words += ["--eval-every", str(row_options["steps"]), "--threads", str(options.threads), "--run", run]
    return words


def mean(values):
    return sum(values) / len(values)


def read_run(folder):
    """What metrics.jsonl says at the end: loss, val_loss, accuracy, collapse (None where it says nothing) and seconds."""
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    steps = [record for record in records if record.get("ms") is not None]
    losses = [record["loss"] for record in steps if record["loss"] is not None]  # null at steps of Forward-Forward alone

    def last(key):
        return next((record[key] for record in reversed(records) if record.get(key) is not None), None)

    return {"loss": mean(losses[-LAST:]) if losses else None, "val_loss": last("val_loss"), "accuracy": last("acc1"), "collapse": last("collapse"),
            "seconds": sum(record["ms"] for record in steps) / 1e3}


def train(options, row_options, work):
    run = os.path.join(work, "run")
    try:
        call(command_of(options, row_options, run, work))
        return read_run(run)
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        return {"problem": str(error)}
    finally:
        shutil.rmtree(run, ignore_errors=True)


# ---- the page ----


def spelled(row_options):
    return " ".join(f"--{name} {value}" for name, value in row_options.items())


def number(value, form):
    return "-" if value is None else format(value, form)


def table_lines(rows, results):
    lines = ["| settings | final loss | validation loss | accuracy | mean cosine | seconds |", "|---|---|---|---|---|---|"]
    for row, r in zip(rows, results):
        if "problem" in r:
            lines.append(f"| `{spelled(row)}` | failed: {r['problem'].replace('|', '/')} | | | | |")
            continue
        accuracy = "-" if r["accuracy"] is None else f"{100 * r['accuracy']:.1f}%"
        lines.append(f"| `{spelled(row)}` | {number(r['loss'], '.4f')} | {number(r['val_loss'], '.4f')} | {accuracy} | "
                     f"{number(r['collapse'], '.2f')} | {r['seconds']:.1f} |")
    return lines


def page(sections, threads):
    """sections: (heading, sentence, options of all rows, rows, results)"""
    commit = call(["git", "rev-parse", "--short", "HEAD"]).strip()
    lines = ["# What small models learn", "",
             f"Written by `dev/bench/mamba_learning.py` on {datetime.date.today()} at commit {commit}, {threads} threads. Final loss is the mean of the",
             f"last {LAST} training losses, in the head's own measure: `hpn` counts (1 - cosine)^2, the others nats, so losses compare within one",
             "head only and accuracy, the share of right answers in validation, between heads. Mean cosine is that of pairs of states in",
             "validation; near 1 all have collapsed into one direction. Seconds are spent in training steps.", "",
             "All rows: `" + spelled(COMMON) + "`"]
    for heading, sentence, shared, rows, results in sections:
        shown = {name: value for name, value in shared.items() if "{" not in str(value)}
        lines += ["", f"## {heading}", "", f"{sentence} `{spelled(shown)}`", ""] + table_lines(rows, results)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "train_mamba_hpn"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default=",".join(GROUPS), metavar="A,B", help=f"groups, of {','.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="ten steps each")
    parser.add_argument("--out", default=os.path.join(ROOT, "doc", "mamba_learning.md"), metavar="FILE")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown or not os.path.exists(options.binary):
        parser.error(f"--only: {unknown[0]} is none of {','.join(GROUPS)}" if unknown else f"no {options.binary}: make train_mamba_hpn first")
    sections = []
    with tempfile.TemporaryDirectory() as work:
        facts = make_data(chosen, work)
        for name in chosen:
            heading, sentence, shared, rows = GROUPS[name]
            shared, results = {**shared, **({"steps": 10, "warmup": 2} if options.quick else {})}, []
            for row in rows:
                results.append(train(options, {**COMMON, **shared, **row}, work))
                print(f"{name}: {spelled(row)}: {json.dumps(results[-1])}", flush=True)
            sections.append((heading, sentence.format(**facts), shared, rows, results))
    with open(options.out, "w", encoding="utf-8") as file:
        file.write(page(sections, options.threads))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([{"group": name, "rows": section[3], "results": section[4]} for name, section in zip(chosen, sections)], file, indent=1)
    sys.exit(1 if any("problem" in result for section in sections for result in section[4]) else 0)


if __name__ == "__main__":
    main()
