#!/usr/bin/env python3
"""
Draws the pictures of doc/selective_scan.md into doc/pictures/: states over time, chunks, memory. Needs NumPy and matplotlib.
    draw_scan.py           writes the SVG files; the same bytes every time
    draw_scan.py --png DIR writes PNG files into DIR instead, to look at
"""
import argparse
import os

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# Okabe and Ito's colours, as in plot.py
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#8c8c8c"


def states():
    """h over time for three rates A. Left: delta is constant. Right: the layer chooses delta, to hold and to replace."""
    T = 120
    figure, axes = plt.subplots(2, 2, figsize=(9, 3.9), sharex=True, sharey="row", height_ratios=(3, 1), layout="constrained")
    u = np.zeros(T)
    u[[5, 22, 30, 38]] = 1.0
    for column in range(2):
        delta, x = np.full(T, 0.05), u.copy()
        if column:
            delta[45:80], delta[90], x[90] = 0.0, 3.0, 0.03
        for A, color in ((-1.0, BLUE), (-4.0, GREEN), (-16.0, ORANGE)):
            h, curve = 0.0, []
            for t in range(T):
                h = np.exp(delta[t] * A) * h + delta[t] * x[t]
                curve.append(h)
            axes[0, column].plot(curve, color=color, label=f"A = {A:g}")
        axes[1, column].step(np.arange(T), np.minimum(delta, 0.14), where="mid", color="#444444")
        axes[1, column].set_xlabel("position t")
        axes[0, column].plot(np.flatnonzero(u), np.full(4, 0.145), "v", color=GREY, markersize=5)
        axes[0, column].text(1, 0.152, "inputs", fontsize=8, color="#555555")
    axes[1, 1].text(92, 0.11, "3", fontsize=8, color="#444444")
    axes[0, 0].set_ylim(0, 0.165)
    axes[1, 0].set_ylim(-0.01, 0.15)
    axes[0, 0].set_ylabel("state h")
    axes[1, 0].set_ylabel("delta")
    axes[0, 0].set_title("a constant delta", fontsize=10)
    axes[0, 1].set_title("delta chosen at each position", fontsize=10)
    axes[0, 1].text(62, 0.075, "delta = 0: hold", ha="center", fontsize=8, color="#444444")
    axes[0, 1].text(92, 0.1, "delta = 3: forget,\ntake the new", fontsize=8, color="#444444")
    axes[0, 0].legend(frameon=False, loc="upper right")
    return figure


def arrow(axis, start, end, color, bend=0.0, style="-|>", dashed=False):
    axis.annotate("", end, start, arrowprops={"arrowstyle": style, "color": color, "shrinkA": 9, "shrinkB": 9, "linewidth": 1.2,
                                              "connectionstyle": f"arc3,rad={bend}", "linestyle": "--" if dashed else "-"})


def circle(axis, x, y, text, color, filled):
    axis.scatter([x], [y], s=360, facecolor=color if filled else "white", edgecolor=color, linewidth=1.4, zorder=3)
    axis.text(x, y, text, ha="center", va="center", fontsize=7.5, color="white" if filled else color, zorder=4)


def chunks():
    """Twelve positions in three chunks: what forward keeps; what backward, in its middle chunk, makes once more."""
    figure, axis = plt.subplots(figsize=(9, 3.9), layout="constrained")
    kept = (-1, 3, 7)
    for row, y in (("forward", 2.6), ("recompute", 1.3), ("adjoint", 0.0)):
        axis.text(-2.9, y, row, ha="left", va="center", fontsize=10, weight="bold")
        for t in range(-1, 12):
            x = t + 0.35 * (t // 4) if t >= 0 else -1.0
            present = row == "forward" or (row == "recompute" and 3 <= t <= 7) or (row == "adjoint" and t >= 4)
            if not present:
                continue
            filled = (row == "forward" and t in kept) or (row == "recompute" and t == 3)
            color = BLUE if row == "forward" else GREEN if row == "recompute" else ORANGE
            circle(axis, x, y, (f"λ{t}" if row == "adjoint" else f"h{t}" if t >= 0 else "h"), color, filled)
            previous = t - 1 + 0.35 * ((t - 1) // 4) if t >= 1 else -1.0
            if row == "forward" and t >= 0 or row == "recompute" and t > 3:
                arrow(axis, (previous, y), (x, y), color)
            if row == "adjoint" and t > 4:
                arrow(axis, (x, y), (previous, y), color)
            if row == "recompute" and t > 3:
                arrow(axis, (x, y), (x, 0.0), GREY)
            if row == "forward" and t in kept:
                axis.text(x, y + 0.5, "kept", ha="center", fontsize=8, color=BLUE)
    at = 3.0
    arrow(axis, (at, 2.6), (at, 1.3), BLUE, dashed=True)
    for boundary in (-0.42, 3.68, 8.03):
        axis.axvline(boundary, color=GREY, linewidth=0.8, linestyle="--")
    for middle, name in ((1.6, "chunk 0"), (5.85, "chunk 1: backward is here"), (10.2, "chunk 2: done")):
        axis.text(middle, 3.55, name, ha="center", fontsize=9, color="#444444")
    axis.text(1.4, 0.65, "not yet", ha="center", va="center", fontsize=9, color=GREY)
    axis.text(10.2, 1.3, "scratch was used again", ha="center", va="center", fontsize=9, color=GREY)
    axis.set_xlim(-3, 12.4)
    axis.set_ylim(-0.5, 3.9)
    axis.axis("off")
    return figure


def memory():
    """Bytes kept for each position of one layer, and scratch of one thread, against the chunk. Mamba 130m: E 1536, NS 16."""
    E, NS, group = 1536, 16, 64
    chunk = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    axis.loglog(chunk, 4 * E * NS / chunk / 1024, "o-", base=2, color=BLUE, label="states, per position and layer")
    axis.loglog(chunk, 4 * 2 * chunk * NS * group / 1024, "s-", base=2, color=ORANGE, label="scratch, per thread")
    axis.axhline(4 * E / 1024, color=GREY, linewidth=0.9, linestyle="--")
    axis.text(256, 4 * E / 1024 * 1.15, "one array (T, E), such as y", ha="right", fontsize=8, color="#555555")
    axis.axvline(32, color=GREY, linewidth=0.9, linestyle=":")
    axis.text(33.5, 1500, "SCAN_CHUNK", fontsize=8, color="#555555")
    axis.set_xticks(chunk, [str(c) for c in chunk])
    ticks = [0.5, 2, 8, 32, 128, 512, 2048]
    axis.set_yticks(ticks, [f"{v:g}" for v in ticks])
    axis.minorticks_off()
    axis.set_xlabel("positions in a chunk")
    axis.set_ylabel("KB")
    axis.legend(frameon=False, loc="lower left", fontsize=9)
    return figure


def main():
    parser = argparse.ArgumentParser(description="Draws the pictures of doc/selective_scan.md.")
    parser.add_argument("--png", metavar="DIR", help="write PNG files into DIR")
    folder = parser.parse_args().png
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scan", "axes.spines.top": False, "axes.spines.right": False,
                         "font.family": "sans-serif", "font.size": 9})
    for name, draw in (("scan_states", states), ("scan_chunks", chunks), ("scan_memory", memory)):
        figure = draw()
        if folder:
            figure.savefig(os.path.join(folder, name + ".png"), dpi=110, facecolor="white")
        else:
            figure.savefig(os.path.join(ROOT, "doc", "pictures", name + ".svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
