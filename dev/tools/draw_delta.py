#!/usr/bin/env python3
"""
Draws the picture of doc/gated_delta.md into doc/pictures/: what three memories answer, and one chunk of a gate. Needs NumPy and
matplotlib.
    draw_delta.py           writes the SVG file; the same bytes every time
    draw_delta.py --png DIR writes a PNG file into DIR instead, to look at
"""
import argparse
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Okabe and Ito's colours, as in plot.py
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"


def answers(axis):
    """What three memories answer to the first of two keys, whose cosine is 0.5, after each of 16 positions that write under one"""
    keys = np.array([[1.0, 0.0], [0.5, np.sqrt(0.75)]])
    which = np.array([0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    values = np.array([1, 1, 0.4, -1, 0.4, 0.4, 1, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4])
    rules = (("added: S + k v'", ORANGE, 1.0, False), ("corrected: the delta rule", BLUE, 1.0, True),
             ("corrected, and it fades: gated", GREEN, 0.85, True))
    for name, color, gate, corrects in rules:
        S, found = np.zeros(2), []
        for i, v in zip(which, values):
            S = gate * S
            S = S + keys[i] * (v - keys[i] @ S if corrects else v)
            found.append(keys[0] @ S)
        axis.plot(found, "o-", color=color, label=name, markersize=3.5, linewidth=1.2)
    first = np.flatnonzero(which == 0)
    axis.plot(first, values[first], "x", color="black", markersize=8, label="written under this key")
    axis.set_xlabel("position")
    axis.set_ylabel("answer to the first key")
    axis.set_ylim(-1.4, 5.4)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def chunk(axis):
    """decay_ij of a chunk of 64: exp(G_i - G_j), with one position at which much is forgotten"""
    g = -0.03 - 0.02 * np.cos(np.arange(64) / 5.0)
    g[40] = -1.6
    G = np.cumsum(g)
    decay = np.where(np.tri(64, dtype=bool), np.exp(np.minimum(G[:, None] - G[None], 0)), np.nan)
    image = axis.imshow(decay, cmap="Blues", vmin=0, vmax=1)
    axis.set_xlabel("j: what was written")
    axis.set_ylabel("i: who reads")
    axis.annotate("a large forgetting\nat position 40", (12, 41), (27, 12), fontsize=8, arrowprops={"arrowstyle": "-", "color": "#555555"})
    axis.figure.colorbar(image, ax=axis, label="decay", shrink=0.85)


def main():
    parser = argparse.ArgumentParser(description="Draws the picture of doc/gated_delta.md.")
    parser.add_argument("--png", metavar="DIR", help="write a PNG file there instead of the SVG file")
    args = parser.parse_args()
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "delta", "axes.spines.top": False, "axes.spines.right": False,
                         "font.family": "sans-serif", "font.size": 9})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(1.25, 1))
    answers(axes[0])
    chunk(axes[1])
    if args.png:
        figure.savefig(os.path.join(args.png, "gated_delta.png"), dpi=110, facecolor="white")
    else:
        figure.savefig(os.path.join(ROOT, "doc", "pictures", "gated_delta.svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
