#!/usr/bin/env python3
"""
Draws doc/pictures/expert_load.svg: how busy the busiest expert is while a small mixture trains, without balancing, with the
balance loss, and with biases. It trains the three with ./train_moe (make train_moe CPU=1) on build/hello (make build/hello),
a minute or two. Needs matplotlib.
    draw_moe.py           writes the SVG file
    draw_moe.py --png DIR writes a PNG file into DIR too, to look at
"""
import argparse
import json
import os
import subprocess
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from runs import read_metrics

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Okabe and Ito's colours, as in plot.py
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8c8c8c"
EXPERTS, CHOSEN = 8, 2
CONFIG = {"model_type": "mixtral", "max_position_embeddings": 128, "vocab_size": 257, "num_hidden_layers": 2, "hidden_size": 64,
          "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": EXPERTS,
          "num_experts_per_tok": CHOSEN, "intermediate_size": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
OPTIONS = ("--train build/hello --val-fraction 0.05 --batch-size 8 --seq-len 128 --steps 600 --lr 3e-3 --warmup 30 "
           "--eval-every 50 --eval-batches 20 --log-every 100").split()
RUNS = (("none", ORANGE, ["--balance", "none"]), ("loss, weight 0.01", BLUE, ["--balance", "loss"]),
        ("bias, rate 0.01", GREEN, ["--balance", "bias", "--bias-rate", "0.01"]))
SMOOTH = 10  # steps before and after


def train(folder, options):
    """The records of a run."""
    config, run = os.path.join(folder, "config.json"), os.path.join(folder, "run")
    with open(config, "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    subprocess.run(["./train_moe", "--config", config, "--run", run] + OPTIONS + options, cwd=ROOT, check=True)
    return read_metrics(os.path.join(run, "metrics.jsonl"))[0]


def smooth(values):
    around = [values[max(0, i - SMOOTH):i + SMOOTH + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in around]


def draw(runs):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(1.5, 1), layout="constrained")
    for (name, color, _), records in zip(RUNS, runs):
        updates = [record for record in records if record["tokens"] is not None]
        checks = [record for record in records if record["tokens"] is None and record["step"] > 0]
        steps, loads = [record["step"] for record in updates], [record["load"] for record in updates]
        left.plot(steps, loads, color=color, alpha=0.25, linewidth=0.7)
        left.plot(steps, smooth(loads), color=color, label=name)
        right.plot([record["step"] for record in checks], [record["val_loss"] for record in checks], "o-", color=color,
                   markersize=3)
    for load, what in ((1, "all equally busy"), (EXPERTS / CHOSEN, "every token takes it")):
        left.axhline(load, color=GREY, linewidth=0.9, linestyle="--")
        left.text(600, load + 0.05, what, ha="right", fontsize=8, color="#555555")
    left.set_ylim(0.8, EXPERTS / CHOSEN + 0.35)
    left.set_ylabel("busiest expert, multiple of the mean")
    left.legend(frameon=False, title="balance", alignment="left", loc="center right")
    right.set_ylabel("validation loss, nats per byte")
    for axis in (left, right):
        axis.set_xlabel("step")
    return figure


def main():
    parser = argparse.ArgumentParser(description="Draws doc/pictures/expert_load.svg.")
    parser.add_argument("--png", metavar="DIR", help="write a PNG file into DIR too")
    folder = parser.parse_args().png
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "moe", "axes.spines.top": False, "axes.spines.right": False,
                         "font.family": "sans-serif", "font.size": 9})
    runs = []
    for _, _, options in RUNS:
        with tempfile.TemporaryDirectory() as place:
            runs.append(train(place, options))
    figure = draw(runs)
    if folder:
        figure.savefig(os.path.join(folder, "expert_load.png"), dpi=110, facecolor="white")
    figure.savefig(os.path.join(ROOT, "doc", "pictures", "expert_load.svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
