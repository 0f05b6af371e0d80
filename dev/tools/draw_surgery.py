#!/usr/bin/env python3
"""
Draws doc/pictures/gradient_surgery.svg: two gradients in the plane, and what each method of llmc/ops/gradient_surgery.h makes of them.
    draw_surgery.py [PATH]     another path, or another format by its ending (.png to look at it)
The same input gives the same bytes with one version of matplotlib. Needs NumPy and matplotlib.
"""
import os
import sys
import matplotlib
import numpy as np
from plot import COLORS

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "surgery", "svg.fonttype": "none", "font.size": 10, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial"]})
import matplotlib.pyplot as plt  # noqa: E402  after the choice of a backend

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
B, F = np.array([1.7, 0.15]), np.array([-0.75, 0.55])  # gradients of the head and of Forward-Forward
C = 0.4                                               # of cagrad
BLUE, ORANGE, GREEN = COLORS[:3]
GREY = "#888888"


def projected(v, off):
    """v without its part along `off`."""
    return v - v @ off / (off @ off) * off


def cagrad(b, f, c):
    """Best of 100,000 directions on the circle around the mean."""
    g0 = (b + f) / 2
    angle = np.linspace(0, 2 * np.pi, 100001)
    d = g0 + c * np.linalg.norm(g0) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return d[np.argmax(np.minimum(d @ b, d @ f))]


def arrow(ax, to, color, start=(0.0, 0.0), width=1.6, style="-"):
    ax.annotate("", xy=np.add(start, to), xytext=start,
                arrowprops={"arrowstyle": "-|>", "color": color, "lw": width, "ls": style, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 12})


def label(ax, at, text, color, dx=0.0, dy=0.0):
    ax.text(at[0] + dx, at[1] + dy, text, color=color, ha="center", va="center")


def panel(ax, title, below, result, parts, name="d"):
    """parts: two vectors whose sum is the result, drawn one behind the other; result: what the optimizer gets."""
    far = 9.0
    across_b, across_f = np.array([-B[1], B[0]]), np.array([F[1], -F[0]])  # borders of the cone in which both losses fall
    cone = np.array([[0.0, 0.0], far * across_b, far * (across_b + across_f), far * across_f])
    ax.fill(cone[:, 0], cone[:, 1], color="#e3f2ea", lw=0)
    if parts is not None:
        arrow(ax, parts[0], GREY, width=1.1, style="--")
        arrow(ax, parts[1], GREY, start=parts[0], width=1.1, style="--")
    arrow(ax, B, BLUE)
    arrow(ax, F, ORANGE)
    arrow(ax, result, GREEN, width=2.4)
    label(ax, B, "b", BLUE, dx=0.11)
    label(ax, F, "f", ORANGE, dx=-0.09, dy=0.06)
    label(ax, result, name, GREEN, dx=0.02, dy=0.13)
    ax.set_title(title, fontsize=11, fontweight="bold", pad=4)
    ax.text(0.5, -0.03, below, transform=ax.transAxes, ha="center", va="top", fontsize=9, color="#333333")
    ax.set_xlim(-1.12, 2.06), ax.set_ylim(-0.2, 1.83)
    ax.set_aspect("equal")
    ax.set_xticks([]), ax.set_yticks([])
    for side in ax.spines.values():
        side.set_color("#cccccc")


def said(d):
    """How fast both losses fall with a step against d."""
    return f"d·b = {d @ B:.2f}, d·f = {d @ F:.2f}"


def draw(path):
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 5.0))
    f_off, b_off = projected(F, B), projected(B, F)
    weight = 2 / (1 / np.linalg.norm(B) + 1 / np.linalg.norm(F)) / np.array([np.linalg.norm(B), np.linalg.norm(F)])
    d = cagrad(B, F, C)
    panel(axes[0, 0], "none", said(B + F), B + F, (B, F))
    panel(axes[0, 1], "pcgrad", said(b_off + f_off), b_off + f_off, (b_off, f_off))
    panel(axes[0, 2], f"cagrad, c = {C}", said(d), d, None)
    mean = (B + F) / 2
    axes[0, 2].add_patch(plt.Circle(mean, C * np.linalg.norm(mean), fill=False, color=GREY, lw=1.1, ls="--"))
    axes[0, 2].plot(*mean, marker="o", ms=3, color=GREY)
    label(axes[0, 2], mean, "g0", GREY, dx=0.1, dy=-0.09)
    panel(axes[1, 0], "gradnorm, alpha = 0", said(weight[0] * B + weight[1] * F), weight[0] * B + weight[1] * F, (weight[0] * B, weight[1] * F))
    panel(axes[1, 1], "orthograd", said(B + f_off), B + f_off, (B, f_off))
    axes[1, 2].axis("off")
    figure.subplots_adjust(left=0.01, right=0.99, top=0.94, bottom=0.06, wspace=0.03, hspace=0.24)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "doc", "pictures", "gradient_surgery.svg"))
