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
import dataclasses
import glob
import json
import os
import sys

import matplotlib.pyplot as plt
import numpy as np

import pictures

sys.path.insert(0, os.path.join(pictures.ROOT, "dev", "ref"))
import deepseek_v4 as v4
import exact
import trainer

T = 256


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


def draw_indexer(folder, inputs):
    cfg, p, acts = look(os.path.join(folder, "before"), inputs)
    _, _, acts_after = look(os.path.join(folder, "after"), inputs)
    rows = []
    for l in cfg.of_kind(v4.CSA):
        mass, visible = entries_mass(cfg, p, acts, inputs, l)
        scores = *(x["blocks"][l]["index_scores"] for x in (acts, acts_after)), mass
        rows.append((f"layer {l + 1}", mass, visible, *(v4.sparse.choose(x, visible, cfg.index_topk) for x in scores)))
    return pictures.draw_choices(rows, cfg.index_topk, "entry: 4 bytes of the text")


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


if __name__ == "__main__":
    pictures.main("train_deepseek_v4", "dev/hello_deepseek_v4.txt", "doc/deepseek_v4.md", T,
                  (("indexer", draw_indexer), ("streams", draw_streams)))
