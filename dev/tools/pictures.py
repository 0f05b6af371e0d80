"""
Shared by draw_deepseek_v4.py and draw_glm5.py, which draw the pictures of doc/deepseek_v4.md and doc/glm5.md: runs that go on
from each other, what an indexer catches of what attention looks at, and how a picture is written. Needs NumPy and matplotlib.
"""
import argparse
import io
import os
import re
import subprocess
import tempfile

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GREY = "#e4e4e4"  # what does not exist yet
EVEN = 3
BLUES = plt.get_cmap("Blues", 8)
RUNS = (("before", "--indexer off --steps 1500 --lr 3e-3"),
        ("dense", "--indexer dense --indexer-alone 1 --steps 400 --lr 3e-3"),
        ("after", "--indexer kl --indexer-alone 1 --steps 400 --lr 1e-3"))
TEXTS = ("train_gpt2.c", "README.md", "llmc/ops/rmsnorm.h", "doc/moe.md")


def train(trainer, args, folder, start, hand_on):
    """The runs that are not there: the first with the options of start(folder), each other from hand_on(the run before)"""
    common = (f"--args {args} --seq-len 256 --batch-size 2 --eval-every 0 --sample-every 0 --save-every 0 --save-minutes 0 "
              "--threads 1").split()
    earlier = None
    for name, options in RUNS:
        run = os.path.join(folder, name)
        if not os.path.exists(run):
            of_model = ["--config", "", "--from", hand_on(earlier)] if earlier else start(folder)
            subprocess.run([f"./{trainer}", *common, *of_model, *options.split(), "--run", run], cwd=ROOT, check=True)
        earlier = run


def texts(T):
    """(len(TEXTS), T): bytes of files that the runs have read"""
    read = [open(os.path.join(ROOT, "build", "hello", name), "rb").read()[2000:2000 + T] for name in TEXTS]
    return np.array([list(x) for x in read], np.int32)


def caught(mass, chosen, visible, topk):
    """the mean share of mass on the chosen entries, over the positions that have to leave some out"""
    return (mass * chosen).sum(axis=-1)[visible.sum(axis=-1) > topk].mean()


def draw_choices(rows, topk, column):
    """Rows of three panels: where attention looks, what is chosen before and after. Each of `rows`: its name, mass and visible
    (B, T, W), of which mass sums to one in each position, choices before, after and the best. column: what a column is"""
    figure, axes = plt.subplots(len(rows), 3, figsize=(9, 8.2), layout="constrained", sharex=True, sharey=True)
    for row, (name, mass, visible, *choices) in zip(axes, rows):
        shares = [caught(mass, chosen, visible, topk) for chosen in choices]
        n_seen = visible.sum(axis=-1)
        at_random = np.mean(topk / n_seen[n_seen > topk])
        print(f"{name}: of the mass chosen {shares[0]:.1%} before, {shares[1]:.1%} after, at best {shares[2]:.1%}, "
              f"at random {at_random:.1%}")
        titles = (f"{name}: where attention looks", f"chosen before learning: {shares[0]:.0%} of it",
                  f"chosen after: {shares[1]:.0%} (at best {shares[2]:.0%})")
        of_even = mass[0] * visible[0].sum(axis=-1, keepdims=True) / EVEN  # 1: EVEN times what each had if all had as much
        for axis, title, x in zip(row, titles, (of_even, choices[0][0], choices[1][0])):
            axis.set_facecolor(GREY)
            image = np.where(visible[0], x, np.nan)
            axis.imshow(image, cmap=BLUES, vmin=0, vmax=1, aspect="auto", interpolation="none")
            axis.set_title(title, fontsize=9)
        row[0].set_ylabel("position that reads, byte of the text")
    for axis in axes[-1]:
        axis.set_xlabel(column)
    shades = ((1.0, f"left: {EVEN} times an even share of attention, or more; others: chosen"), (1 / EVEN, "left: an even share"),
              (0.0, "left: hardly any; others: not chosen"))
    handles = [Patch(facecolor=BLUES(value), edgecolor="#888888", linewidth=0.5, label=text) for value, text in shades]
    handles.append(Patch(facecolor=GREY, edgecolor="#888888", linewidth=0.5, label="not written yet"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    axes[0][0].text(axes[0][0].get_xlim()[1] - 1.5, 12, "not written yet", ha="right", fontsize=8, color="#555555")
    return figure


def main(trainer, args, page, T, pictures, start=lambda folder: [], hand_on=lambda run: run):
    """pictures: (name, function of the folder of runs and the texts); start, hand_on: of train"""
    parser = argparse.ArgumentParser(description=f"Draws the pictures of {page}.")
    parser.add_argument("--runs", metavar="DIR", help="leave the runs there, or take them from there")
    parser.add_argument("--png", metavar="DIR", help="write PNG files into DIR too")
    parser.add_argument("--out", metavar="DIR", default=os.path.join(ROOT, "doc", "pictures"),
                        help="where the SVG files go: those of the page, unless you say another folder")
    typed = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": os.path.basename(page)[:-3], "font.family": "sans-serif",
                         "font.size": 9, "image.composite_image": False})
    with tempfile.TemporaryDirectory() as place:
        folder = os.path.abspath(typed.runs or place)
        os.makedirs(folder, exist_ok=True)
        train(trainer, args, folder, start, hand_on)
        for name, draw in pictures:
            figure = draw(folder, texts(T))
            if typed.png:
                figure.savefig(os.path.join(typed.png, name + ".png"), dpi=110, facecolor="white")
            svg = io.StringIO()
            figure.savefig(svg, format="svg", facecolor="white", metadata={"Date": None})
            with open(os.path.join(typed.out, name + ".svg"), "w", encoding="utf-8") as file:
                # matplotlib writes a list of fonts and a turn by nothing beside each number
                short = re.sub("font-family: [^;]*sans-serif", "font-family: sans-serif", svg.getvalue())
                file.write(re.sub(r' transform="rotate\(-0 [^"]*"', "", short))
