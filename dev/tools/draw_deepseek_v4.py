#!/usr/bin/env python3
"""
Draws the pictures of doc/deepseek_v4.md into doc/pictures/: indexer.svg, which entries an indexer chooses before and after it
has learnt, and streams.svg, how a trained model mixes its streams. It trains the model of make run-deepseek-v4 in rows of
256 with ./train_deepseek_v4 (make train_deepseek_v4 CPU=1 build/hello), three runs, about two minutes; what they have learnt is
looked at by the NumPy reference, dev/ref/deepseek_v4.py, in float64. Needs NumPy and matplotlib.
    draw_deepseek_v4.py             writes the SVG files, and prints the numbers of the page
    draw_deepseek_v4.py --runs DIR  leaves the runs `before`, `dense`, `after` in DIR, or takes them from there
    draw_deepseek_v4.py --png DIR   writes PNG files into DIR too, to look at
"""
import argparse
import dataclasses
import glob
import io
import json
import os
import re
import subprocess
import sys
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "dev", "ref"))
import deepseek_v4 as v4
import exact
import trainer

GREY = "#e4e4e4"  # what does not exist yet
EVEN = 3
T, TEXTS = 256, ("train_gpt2.c", "README.md", "llmc/ops/rmsnorm.h", "doc/moe.md")
COMMON = ("--args dev/hello_deepseek_v4.txt --seq-len 256 --batch-size 2 --eval-every 0 --sample-every 0 --save-every 0 "
          "--save-minutes 0 --threads 1").split()
RUNS = (("before", "--indexer off --steps 1500 --lr 3e-3"),
        ("dense", "--indexer dense --indexer-alone 1 --steps 400 --lr 3e-3"),
        ("after", "--indexer kl --indexer-alone 1 --steps 400 --lr 1e-3"))


def train(folder):
    """The runs that are not there; each goes on from the one before"""
    earlier = None
    for name, options in RUNS:
        run = os.path.join(folder, name)
        if not os.path.exists(run):
            start = ["--config", "", "--from", earlier] if earlier else []
            subprocess.run(["./train_deepseek_v4", *COMMON, *start, *options.split(), "--run", run], cwd=ROOT, check=True)
        earlier = run


def look(run, inputs):
    """Config, and activations of a pass in which each position attends to all of its entries"""
    folder = sorted(glob.glob(os.path.join(run, "step_*[0-9]")))[-1]
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        cfg = v4.read_config(json.load(file), path, *inputs.shape)
    cfg, tensors = v4.fit(cfg, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    cfg = dataclasses.replace(cfg, indexer_train="dense", mtp=False)
    p = {name: x.astype(np.float64) for name, x in trainer.from_disk(v4.MODEL, tensors, cfg).items()}
    return cfg, p, v4.forward(p, inputs, np.roll(inputs, -1, axis=1), cfg)


def entries_mass(cfg, p, acts, inputs, l):
    """(B, T, W): of what attention of layer l gives to entries, all heads together, the share of each"""
    a, where = acts["blocks"][l], v4.Where(cfg, inputs, np.dtype(np.float64), None)
    weights, _, _ = v4.sparse.sink_weights(v4.split_heads(a["q"], cfg.num_attention_heads), v4.all_keys(v4.CSA, a),
                                           v4.seen_keys(v4.CSA, a, where), v4.layer_of(p, cfg, l).w["attn_sink"])
    mass = weights[..., inputs.shape[1]:].sum(axis=1)
    return mass / np.maximum(mass.sum(axis=-1, keepdims=True), 1e-30), where.windows[v4.CSA].visible()


def caught(mass, chosen, visible, topk):
    """the mean share of mass on the chosen entries, over the positions that have to leave some out"""
    return (mass * chosen).sum(axis=-1)[visible.sum(axis=-1) > topk].mean()


def draw_indexer(folder, inputs):
    cfg, p, acts = look(os.path.join(folder, "before"), inputs)
    _, _, acts_after = look(os.path.join(folder, "after"), inputs)
    layers = cfg.of_kind(v4.CSA)
    figure, axes = plt.subplots(len(layers), 3, figsize=(9, 8.2), layout="constrained", sharex=True, sharey=True)
    for row, l in zip(axes, layers):
        mass, visible = entries_mass(cfg, p, acts, inputs, l)
        before, after = (v4.sparse.choose(x["blocks"][l]["index_scores"], visible, cfg.index_topk) for x in (acts, acts_after))
        best = v4.sparse.choose(mass, visible, cfg.index_topk)
        shares = [caught(mass, chosen, visible, cfg.index_topk) for chosen in (before, after, best)]
        n_seen = visible.sum(axis=-1)
        at_random = np.mean(cfg.index_topk / n_seen[n_seen > cfg.index_topk])
        print(f"layer {l + 1}: of the mass chosen {shares[0]:.1%} before, {shares[1]:.1%} after, at best {shares[2]:.1%}, "
              f"at random {at_random:.1%}")
        titles = (f"layer {l + 1}: where attention looks", f"chosen before: {shares[0]:.0%} of it",
                  f"chosen after: {shares[1]:.0%} (at best {shares[2]:.0%})")
        of_even = mass[0] * visible[0].sum(axis=-1, keepdims=True) / EVEN  # 1: EVEN times what each had if all had as much
        for axis, title, x in zip(row, titles, (of_even, before[0], after[0])):
            axis.set_facecolor(GREY)
            image = np.where(visible[0], x, np.nan)
            axis.imshow(image, cmap=plt.get_cmap("Blues", 8), vmin=0, vmax=1, aspect="auto", interpolation="none")
            axis.set_title(title, fontsize=9)
        row[0].set_ylabel("position that reads, byte of the text")
    for axis in axes[-1]:
        axis.set_xlabel("entry: 4 bytes of the text")
    axes[0][0].text(62, 12, "not written yet", ha="right", fontsize=8, color="#555555")
    return figure


def draw_streams(folder, inputs):
    cfg, _, acts = look(os.path.join(folder, "before"), inputs)
    hc, L = cfg.hc_mult, cfg.num_hidden_layers
    figure, axes = plt.subplots(2, L, figsize=(9, 5.0), layout="constrained")
    for row, (site, half) in zip(axes, (("hc_attn", "attention"), ("hc_ffn", "experts"))):
        for l, axis in enumerate(row):
            a = acts["blocks"][l]
            means = {key: a[f"{site}_{key}"].mean(axis=(0, 1)) for key in ("pre", "post", "comb")}
            spread = {key: a[f"{site}_{key}"].std(axis=(0, 1)).max() for key in means}
            print(f"layer {l + 1}, {half}: largest deviation over positions", {k: round(float(x), 2) for k, x in spread.items()})
            table = np.full((hc + 1, hc + 1), np.nan)
            table[:hc, 1:], table[:hc, 0], table[hc, 1:] = means["comb"], means["pre"], means["post"]
            axis.imshow(table, cmap="Blues", vmin=0, vmax=1.5, interpolation="none")
            for (i, j), x in np.ndenumerate(table):
                if not np.isnan(x):
                    color = "white" if x > 0.9 else "black"
                    axis.text(j, i, f"{x:.2f}".lstrip("0"), ha="center", va="center", fontsize=7, color=color)
            axis.plot([0.5, 0.5, hc + 0.5], [-0.5, hc - 0.5, hc - 0.5], color="white", linewidth=4)
            axis.set_title(f"layer {l + 1}, {half}", fontsize=9)
            axis.set_xticks(range(hc + 1), ["reads", *(f"to {k + 1}" for k in range(hc))], fontsize=7)
            names = [*(f"from {j + 1}" for j in range(hc)), "writes"] if l == 0 else [""] * (hc + 1)
            axis.set_yticks(range(hc + 1), names, fontsize=7)
            axis.tick_params(length=0)
            for side in axis.spines.values():
                side.set_visible(False)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Draws the pictures of doc/deepseek_v4.md.")
    parser.add_argument("--runs", metavar="DIR", help="leave the runs there, or take them from there")
    parser.add_argument("--png", metavar="DIR", help="write PNG files into DIR too")
    args = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "deepseek_v4", "font.family": "sans-serif", "font.size": 9,
                         "image.composite_image": False})
    text = [open(os.path.join(ROOT, "build", "hello", name), "rb").read()[2000:2000 + T] for name in TEXTS]
    inputs = np.array([list(x) for x in text], np.int32)
    with tempfile.TemporaryDirectory() as place:
        folder = os.path.abspath(args.runs or place)
        os.makedirs(folder, exist_ok=True)
        train(folder)
        for name, draw in (("indexer", draw_indexer), ("streams", draw_streams)):
            figure = draw(folder, inputs)
            if args.png:
                figure.savefig(os.path.join(args.png, name + ".png"), dpi=110, facecolor="white")
            svg = io.StringIO()
            figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
            with open(os.path.join(ROOT, "doc", "pictures", name + ".svg"), "w", encoding="utf-8") as file:
                # matplotlib writes a list of fonts and a turn by nothing beside each number
                short = re.sub("font-family: [^;]*sans-serif", "font-family: sans-serif", svg.getvalue())
                file.write(re.sub(r' transform="rotate\(-0 [^"]*"', "", short))


if __name__ == "__main__":
    main()
