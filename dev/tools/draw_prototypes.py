#!/usr/bin/env python3
"""
Draws the pictures of doc/hpn.md, with NumPy and matplotlib:
    draw_prototypes.py              writes doc/pictures/prototypes.svg and doc/pictures/separation.svg
    draw_prototypes.py --png DIR    writes them as PNG to DIR
prototypes: where simplex, orthoplex, random and optimize put prototypes on a circle and on a sphere.
separation: cosines of all pairs of 256 prototypes in 16, 64 and 256 dimensions, random and optimised.
The placements are those of llmc/models/prototypes.h, in double and with other random numbers.
"""
import argparse
import os

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "doc", "pictures")
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#b0b0b0"  # Okabe and Ito's


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def simplex(V, C):
    s = [np.sqrt(V * (V - c - 1) / ((V - 1) * (V - c))) for c in range(V - 1)]
    p = np.zeros((V, C))
    for v in range(V):
        for c in range(min(v + 1, V - 1)):
            p[v, c] = s[c] if c == v else -s[c] / (V - 1 - c)
    return p


def orthoplex(V, C):
    return np.concatenate([np.eye(C), -np.eye(C)])[:V]


def random(V, C, seed=3):
    return unit(np.random.default_rng(seed).standard_normal((V, C)))


def cosines(p):
    """(V, V), the diagonal at -2 so that no row is its own neighbour."""
    c = p @ p.T
    np.fill_diagonal(c, -2)
    return c


def optimize(V, C, steps=1000):
    if C == 2:
        angle = 2 * np.pi * np.arange(V) / V
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)
    p, rows = random(V, C), np.arange(V)
    for step in range(steps):
        c = cosines(p)
        nearest, most = c.argmax(1), c.max(1)
        weight = (0.1 * 1000**(-step / steps) / np.sqrt(2 - 2 * np.minimum(most, 0.9999)))[:, None]
        move = np.zeros_like(p)
        np.subtract.at(move, rows, weight * p[nearest])
        np.subtract.at(move, nearest, weight * p)
        p = unit(p + move)
    return p


def neighbours(p):
    """Pairs i < j of which one is nearest to the other, or as near as the nearest."""
    c = cosines(p)
    near = c > c.max(1, keepdims=True) - 0.01
    return np.argwhere(np.triu(near | near.T))


def draw_circle(axes, p):
    for i, j in neighbours(p):
        axes.plot(*zip(p[i], p[j]), color=GREY, linewidth=1, zorder=1)
    for x, y in p:
        axes.plot([0, x], [0, y], color=BLUE, linewidth=1.2, zorder=2)
    axes.plot(p[:, 0], p[:, 1], "o", color=BLUE, markersize=6, zorder=3)


def turned(p):
    """Seen from a little above and from the side, so that no axis points at the reader: columns right, up, towards the reader."""
    a, b = 0.45, 0.35
    side = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
    above = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    return p @ (above @ side).T


def draw_sphere(axes, p):
    q = turned(p)
    for i, j in neighbours(p):
        front = q[i, 2] + q[j, 2] > 0
        color, width = ("#707070", 1.4) if front else ("#d8d8d8", 1)
        axes.plot(q[[i, j], 0], q[[i, j], 1], color=color, linewidth=width, zorder=1 + front)
    for part, color, size in ((q[q[:, 2] <= 0], "#9ecbe6", 5), (q[q[:, 2] > 0], BLUE, 7)):
        axes.plot(part[:, 0], part[:, 1], "o", color=color, markersize=size, zorder=3)


def draw_prototypes():
    columns = [("simplex", simplex, 3, 4), ("orthoplex", orthoplex, 4, 6), ("random", random, 8, 12), ("optimize", optimize, 8, 12)]
    figure, rows = plt.subplots(2, 4, figsize=(8, 5))
    for i, (name, place, on_circle, on_sphere) in enumerate(columns):
        for axes, V, C, draw in ((rows[0, i], on_circle, 2, draw_circle), (rows[1, i], on_sphere, 3, draw_sphere)):
            p = place(V, C)
            axes.add_patch(plt.Circle((0, 0), 1, fill=False, color="#909090", linewidth=0.8))
            draw(axes, p)
            axes.set_title(f"{name}, V = {V}, C = {C}", fontsize=9)
            axes.text(0, -1.32, f"largest cosine {cosines(p).max():.2f}", ha="center", va="center", fontsize=9)
            axes.set_xlim(-1.15, 1.15), axes.set_ylim(-1.45, 1.15), axes.set_aspect("equal"), axes.axis("off")
    figure.tight_layout(pad=0.4, h_pad=1.6)
    return figure


def draw_separation(V=256):
    figure, row = plt.subplots(1, 3, figsize=(8, 2.7), sharex=True)
    bins = np.linspace(-0.9, 0.9, 61)
    for axes, C in zip(row, (16, 64, 256)):
        for p, color, name in ((random(V, C), BLUE, "random"), (optimize(V, C), ORANGE, "optimize")):
            c = cosines(p)
            pairs = c[np.triu_indices(V, 1)]
            axes.stairs(np.histogram(pairs, bins)[0], bins, baseline=0.5, fill=True, color=color, alpha=0.45,
                        label=f"{name}, largest {pairs.max():.2f}")
            axes.axvline(pairs.max(), 0, 0.75, color=color, linewidth=1, linestyle="--")
        axes.set_title(f"{V} prototypes, C = {C}", fontsize=9)
        axes.set_xlabel("cosine of a pair", fontsize=9), axes.set_yscale("log"), axes.set_ylim(1, 1e6)
        axes.minorticks_off(), axes.tick_params(labelsize=8), axes.legend(fontsize=7.5, loc="upper left", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    row[0].set_ylabel("pairs", fontsize=9)
    figure.tight_layout(pad=0.4)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", metavar="DIR", help="write PNG files to DIR")
    folder = parser.parse_args().png
    plt.rcParams.update({"svg.hashsalt": "prototypes", "svg.fonttype": "none"})  # the same bytes each time; text as text
    os.makedirs(folder or FOLDER, exist_ok=True)
    for name, draw in (("prototypes", draw_prototypes), ("separation", draw_separation)):
        if folder:
            draw().savefig(os.path.join(folder, name + ".png"), dpi=110)
        else:
            draw().savefig(os.path.join(FOLDER, name + ".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
