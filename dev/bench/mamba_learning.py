"""What train_mamba_hpn learns on small data: heads, prototypes, gradient surgery, Forward-Forward. It writes the tables
of doc/mamba_learning.md in Markdown.

    make train_mamba_hpn && .venv/bin/python dev/bench/mamba_learning.py   all groups, about ten minutes on two cores
    .venv/bin/python dev/bench/mamba_learning.py --only text,surgery --out /tmp/learning.md
    .venv/bin/python dev/bench/mamba_learning.py --quick                   ten steps each: does every row run?

Groups:
    text       the headers of llmc/, byte by byte: M 64, 2 layers, 300 steps
    digits     handwritten digits of 8 x 8 pixels as sequences of 64 (dev/data/digits.py), one class each; needs
               scikit-learn
    counter    0, 1, 2, ... again and again (dev/data/synthetic.py): accuracy must reach 100%
    markov     a noisy Markov chain (dev/data/synthetic.py): accuracy must come within 2 points of the best possible
    surgery    text, 200 steps: every method of gradient surgery, without Forward-Forward, with it at every step, and
               with back-propagation at every fourth step only
Final loss is the mean of the last 20 training losses, each in its head's own measure, so it compares within one head
only; the other columns are those of the last validation. Losses do not depend on --threads and --jobs. Status 1 if a
run failed: its row says why.
"""
import argparse
import concurrent.futures
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

# what is not said has its default
COMMON = {"model": "tiny", "d-model": 64, "base-layers": 2, "lr": "3e-3", "warmup": 20, "seed": 42}
SILENT = {"save-every": 0, "async-save": 0, "sample-every": 0, "log-every": 1000000}
TEXT = {"train": "{root}/llmc", "val-fraction": 0.05, "tokenizer": "bytes", "batch-size": 8, "seq-len": 128,
        "steps": 300, "eval-batches": 40}
DIGITS = {"train": "{data}/digits_train.safetensors", "val": "{data}/digits_val.safetensors", "task": "cls",
          "d-model": 32, "d-state": 8, "d-conv": 16, "batch-size": 32, "steps": 2500, "lr": "1e-2", "warmup": 100,
          "final-lr": 0, "weight-decay": 0.5, "eval-batches": 11}
COUNTER = {"train": "{data}/counter_train.bin", "val": "{data}/counter_val.bin", "batch-size": 8, "seq-len": 64,
           "steps": 300, "eval-batches": 30}
MARKOV = {"train": "{data}/markov_train.bin", "val": "{data}/markov_val.bin", "batch-size": 8, "seq-len": 64,
          "steps": 600, "eval-batches": 30}

# 257 byte tokens: orthoplex needs 129 dimensions or more, simplex 256
TEXT_HEADS = [
    {"head": "ce"},
    {"head": "hpn", "proto-init": "random", "proto-dim": 64},
    {"head": "hpn", "proto-init": "optimize", "proto-dim": 64},
    {"head": "hpn", "proto-init": "random", "proto-dim": 160},
    {"head": "hpn", "proto-init": "orthoplex", "proto-dim": 160},
    {"head": "hpn", "proto-init": "simplex", "proto-dim": 256},
    {"head": "hpn", "proto-init": "random", "proto-dim": 64, "proto": "learn", "proto-separation": 0.1},
    {"head": "hpn", "proto-init": "random", "proto-dim": 64, "proto": "learn", "proto-separation": 1},
    {"head": "hpn", "proto-init": "random", "proto-dim": 64, "proto": "learn", "proto-separation": 10},
    {"head": "hpn-softmax", "proto-init": "random", "proto-dim": 64},
    {"head": "hpn-softmax", "proto-init": "random", "proto-dim": 64, "proto": "learn"},
    {"head": "hpn-softmax", "proto-init": "orthoplex", "proto-dim": 160},
]
DIGITS_HEADS = [{"head": head, "seed": seed} for head in ("ce", "hpn") for seed in (42, 1, 2)] + [
    {"head": "hpn", "proto-init": "orthoplex"},
    {"head": "hpn-softmax"},  # simplex too: 10 classes fit into 32 dimensions
]
SYNTHETIC_HEADS = [
    {"head": "ce"},
    {"head": "hpn", "proto-init": "simplex"},
    {"head": "hpn", "proto-init": "orthoplex"},
    {"head": "hpn-softmax", "proto-init": "random", "proto": "learn"},
]
METHODS = ("none", "pcgrad", "cagrad", "gradnorm", "orthograd")
CADENCES = ({}, {"ff-lr": FF_LR}, {"ff-lr": FF_LR, "bp-cadence-steps": 4})
SURGERY = [{"gradient-surgery-method": method, **cadence} for cadence in CADENCES for method in METHODS] + [
    {"gradient-surgery-method": "none", "ff-lr": "1e-4"},
    {"gradient-surgery-method": "pcgrad", "ff-lr": "1e-4"},
    {"steps": 50, "warmup": 5},  # as many steps of back-propagation as --bp-cadence-steps 4 leaves of 200
]

# name: (heading, sentence, options of all rows, the rows)
GROUPS = {
    "text": ("Text, byte by byte", "The headers of llmc/; the last twentieth is for validation.", TEXT, TEXT_HEADS),
    "digits": ("Digits", "8 x 8 pixels, 17 shades, read as a sequence of 64; one class at the end (dev/data/digits.py "
               "--nudge).", DIGITS, DIGITS_HEADS),
    "counter": ("Counter", "0, 1, 2, ... again and again: the next token is certain.", COUNTER, SYNTHETIC_HEADS),
    "markov": ("Noisy Markov chain", "Each token has one likely successor. The best that any model can do: {bayes}.",
               MARKOV, SYNTHETIC_HEADS),
    "surgery": ("Gradient surgery and Forward-Forward", "Text as above, with the head ce.",
                dict(TEXT, steps=200, head="ce"), SURGERY),
}


# ---- data ----


def make_data(groups, folder):
    """The files that the groups read; returns what their sentences need to know."""
    facts = {"bayes": "not told"}
    if "digits" in groups:
        call([sys.executable, os.path.join(ROOT, "dev/data/digits.py"), "--nudge", "--out", folder])
    for name in ("counter", "markov"):
        if name in groups:
            output = call([sys.executable, os.path.join(ROOT, "dev/data/synthetic.py"), name, "--out", folder])
            told = [line.removeprefix("Bayes rate: at best ") for line in output.splitlines() if "Bayes" in line]
            facts["bayes"] = told[0] if told else facts["bayes"]
    return facts


def call(words):
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError((done.stdout.strip().splitlines() or ["no output"])[-1])
    return done.stdout


# ---- one run ----


def command_of(options, row_options, run, data):
    words = [options.binary]
    for name, value in {**row_options, **SILENT}.items():
        words += [f"--{name}", str(value).format(root=ROOT, data=data)]
    words += ["--eval-every", str(row_options["steps"]), "--threads", str(options.threads), "--run", run]
    return words


def mean(values):
    return sum(values) / len(values)


def read_run(folder):
    """What metrics.jsonl says at the end; None where it says nothing."""
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    steps = [record for record in records if record.get("ms") is not None]
    # steps of Forward-Forward alone have null
    losses = [record["loss"] for record in steps if record["loss"] is not None]

    def last(key):
        return next((record[key] for record in reversed(records) if record.get(key) is not None), None)

    found = {key: last(key) for key in ("val_loss", "acc1", "perplexity", "collapse")}
    return {"loss": mean(losses[-LAST:]) if losses else None, **found}


def train(options, row_options, data):
    run = tempfile.mkdtemp()
    try:
        call(command_of(options, row_options, os.path.join(run, "run"), data))
        result = read_run(os.path.join(run, "run"))
    except (RuntimeError, OSError, ValueError, KeyError) as error:
        result = {"problem": str(error)}
    finally:
        shutil.rmtree(run, ignore_errors=True)
    print(f"{spelled(row_options)}: {json.dumps(result)}", file=sys.stderr, flush=True)
    return result


# ---- the page ----


def spelled(row_options):
    return " ".join(f"--{name} {value}" for name, value in row_options.items())


def number(value, form):
    return "-" if value is None else format(value, form).replace("-0.00", "0.00")


def table_lines(rows, results):
    lines = ["| settings | final loss | validation loss | accuracy | perplexity | among states |",
             "|---|---|---|---|---|---|"]
    for row, r in zip(rows, results):
        if "problem" in r:
            lines.append(f"| `{spelled(row)}` | failed: {r['problem'].replace('|', '/')} | | | | |")
            continue
        cells = [number(r["loss"], ".4f"), number(r["val_loss"], ".4f"), number(r["acc1"], ".1%"),
                 number(r["perplexity"], ".3g"), number(r["collapse"], ".2f")]
        lines.append(f"| `{spelled(row)}` | {' | '.join(cells)} |")
    return lines


def tables(sections):
    """sections: (heading, sentence, options of all rows, rows, results)"""
    lines = ["All rows: `" + spelled(COMMON) + "`"]
    for heading, sentence, shared, rows, results in sections:
        shown = {name: value for name, value in shared.items() if "{" not in str(value)}
        lines += ["", f"## {heading}", "", f"{sentence} `{spelled(shown)}`", ""] + table_lines(rows, results)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default=os.path.join(ROOT, "train_mamba_hpn"), metavar="FILE")
    parser.add_argument("--threads", type=int, default=1, help="of each run (default 1)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="A,B", help=f"groups, of {','.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="ten steps each")
    parser.add_argument("--out", metavar="FILE", help="default: standard output")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown or not os.path.exists(options.binary):
        parser.error(f"--only: {unknown[0]} is none of {','.join(GROUPS)}" if unknown
                     else f"no {options.binary}: make train_mamba_hpn first")
    sections = []
    with tempfile.TemporaryDirectory() as data, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        facts = make_data(chosen, data)
        for name in chosen:
            heading, sentence, shared, rows = GROUPS[name]
            shared = {**shared, **({"steps": 10, "warmup": 2} if options.quick else {})}
            results = list(pool.map(lambda row: train(options, {**COMMON, **shared, **row}, data), rows))
            sections.append((heading, sentence.format(**facts), shared, rows, results))
    text = tables(sections)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text, end="")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            groups = [{"group": name, "rows": rows, "results": results}
                      for name, (_, _, _, rows, results) in zip(chosen, sections)]
            json.dump(groups, file, indent=1)
    sys.exit(1 if any("problem" in result for section in sections for result in section[4]) else 0)


if __name__ == "__main__":
    main()
