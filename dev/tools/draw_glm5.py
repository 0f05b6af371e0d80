#!/usr/bin/env python3
"""
Draws the picture of doc/glm5.md into doc/pictures/: glm5_indexer.svg, which positions an indexer chooses before and after it has
learnt. It trains the model of make run-glm5 in rows of 256 with ./train_glm5 (make train_glm5 CPU=1 build/hello), three runs, about
three minutes: first with attention to all positions, for which index_topk is 256, then the indexers alone, which choose 32. What
they have learnt is looked at by the NumPy reference, dev/ref/glm5.py, in float64. Needs NumPy and matplotlib.
    draw_glm5.py             writes the SVG file, and prints the numbers of the page
    draw_glm5.py --runs DIR  leaves the runs `before`, `dense`, `after` in DIR, or takes them from there
    draw_glm5.py --png DIR   writes a PNG file into DIR too, to look at
"""
import glob
import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np

import pictures

sys.path.insert(0, os.path.join(pictures.ROOT, "dev", "ref"))
import exact
import glm5
import trainer

T = 256


HELLO = os.path.join(pictures.ROOT, "dev", "hello_glm5.json")


def newest(run):
    return sorted(glob.glob(os.path.join(run, "step_*[0-9]")))[-1]


def with_topk(config, topk, path):
    """config.json with another index_topk: at `path`"""
    with open(config, encoding="utf-8") as file:
        changed = {**json.load(file), "index_topk": topk}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(changed, file)
    return path


def start(folder):
    return ["--config", with_topk(HELLO, T, os.path.join(folder, "all.json"))]


def hand_on(run):
    """A folder of the run's model that chooses as many positions as the hello model does"""
    with open(HELLO, encoding="utf-8") as file:
        topk = json.load(file)["index_topk"]
    to = run + "_chooses"
    shutil.copytree(newest(run), to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "optimizer*", "trainer*"))
    with_topk(os.path.join(to, "config.json"), topk, os.path.join(to, "config.json"))
    return to


def look(run, inputs):
    """Config, and activations of a pass in which each position attends to all before it"""
    folder = newest(run)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        cfg = glm5.read_config(json.load(file), path, *inputs.shape)
    cfg, tensors = glm5.fit(cfg, exact.read_safetensors(os.path.join(folder, "model.safetensors")))
    p = {name: x.astype(np.float64) for name, x in trainer.from_disk(glm5.MODEL, tensors, cfg).items()}
    cfg = replace(cfg, indexer_train="dense", mtp=False)
    return cfg, glm5.forward(p, inputs, np.roll(inputs, -1, axis=1), cfg)


def draw_indexer(folder, inputs):
    _, acts = look(os.path.join(folder, "before"), inputs)
    cfg, acts_after = look(os.path.join(folder, "after"), inputs)
    rows = []
    for l, end in zip(cfg.full_layers, (*cfg.full_layers[1:], cfg.num_hidden_layers)):
        mass, visible = glm5.taught(acts["blocks"][l])
        mass = mass / mass.sum(axis=-1, keepdims=True)
        scores = *(x["blocks"][l]["index_scores"] for x in (acts, acts_after)), mass
        name = f"layer {l + 1}" if end == l + 1 else f"layers {l + 1} to {end}"
        rows.append((name, mass, visible, *(glm5.sparse.choose(x, visible, cfg.index_topk) for x in scores)))
    return pictures.draw_choices(rows, cfg.index_topk, "position that is seen")


if __name__ == "__main__":
    pictures.main("train_glm5", "dev/hello_glm5.txt", "doc/glm5.md", T, (("glm5_indexer", draw_indexer),),
                  start, hand_on)
