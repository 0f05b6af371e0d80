#!/usr/bin/env python3
"""
Draws where a model with prototypes (train_mamba_hpn --head hpn) puts its positions:    plot_embeddings.py FILE [OUT.png]

FILE is what --embeddings-out wrote, safetensors with
    z           F32 (n, D)        embeddings, rows of length 1
    labels      I32 (n)           the class of each, negative: none, left out
    prototypes  F32 (classes, D)  rows of length 1
OUT is by default FILE with .png instead of .safetensors. Two panels:
    left    the plane in which the embeddings differ most (their first two principal components), seen from outside: all
            points lie within the circle, the shadow of the sphere. Stars are prototypes, a line goes to the mean of its class
    right   angles on the sphere, which no projection bends: from each embedding to the prototype of its class, and to the
            nearest one of another class. The closer to 0 the first and the farther right the second, the better
The ten most frequent classes have colours, the others are grey. --bytes names classes as the characters of those bytes.
Needs NumPy and matplotlib. Status: 0 drawn, 1 cannot write, 2 wrong input, in one line.
"""
import argparse
import json
import struct
import sys

import numpy as np

# ten colours that people with most kinds of colour vision tell apart, none of them grey
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#1b1b1b", "#bcbd22", "#17becf")
MAX_POINTS = 5000  # drawn; numbers in the titles are of all
GREY = "#b0b0b0"
OWN, OTHER = "#0072b2", "#d55e00"  # Okabe and Ito's, which people with any kind of colour vision tell apart
SHAPES = {"z": ("F32", 2), "labels": ("I32", 1), "prototypes": ("F32", 2)}


class InputError(Exception):
    """What is wrong with the input, in one line."""


# ---- reading ----


def tensor_of(name, header, data, path):
    if name not in header:
        raise InputError(f"{path}: expected tensors z, labels and prototypes, found no {name}")
    dtype, n_dims = SHAPES[name]
    try:
        found, shape, (begin, end) = header[name]["dtype"], header[name]["shape"], header[name]["data_offsets"]
        if found != dtype or len(shape) != n_dims:
            raise InputError(f"{path}: {name}: expected {dtype} of {n_dims} dimension{'s' * (n_dims > 1)}, found {found} of {len(shape)}")
        return np.frombuffer(data[begin:end], dtype="<f4" if dtype == "F32" else "<i4").reshape(shape)
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{path}: {name}: the header does not fit the data") from None


def read_embeddings(path):
    """z (n, D), labels (n), prototypes (classes, D): checked to fit each other, without the rows that have no class"""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    n_header = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    try:
        header = json.loads(data[8 : 8 + n_header])
    except ValueError:
        raise InputError(f"{path}: expected safetensors, found no header") from None
    z, labels, prototypes = (tensor_of(name, header, data[8 + n_header :], path) for name in SHAPES)
    if len(z) != len(labels) or z.shape[1] != prototypes.shape[1] or z.shape[1] < 2:
        raise InputError(f"{path}: expected z (n, D), labels (n), prototypes (classes, D) with D of 2 or more, found {z.shape}, "
                         f"{labels.shape}, {prototypes.shape}")
    z, labels = z[labels >= 0], labels[labels >= 0]
    if len(z) == 0 or labels.max() >= len(prototypes):
        raise InputError(f"{path}: expected labels of classes 0..{len(prototypes) - 1}, found {'none' if len(z) == 0 else labels.max()}")
    if not (np.isfinite(z).all() and np.isfinite(prototypes).all()):
        raise InputError(f"{path}: expected finite numbers, found others")
    return unit(z), labels, unit(prototypes)


def unit(x):
    return x / np.maximum(np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True), 1e-8)


# ---- numbers ----


def angles_of(z, labels, prototypes):
    """degrees from each embedding to its own prototype and to the nearest one of another class"""
    own, other = np.empty(len(z)), np.empty(len(z))
    for begin in range(0, len(z), 1024):  # so that n x classes cosines need not be in memory together
        part = slice(begin, begin + 1024)
        cosine = z[part] @ prototypes.T
        rows = np.arange(len(cosine))
        own[part] = cosine[rows, labels[part]]
        cosine[rows, labels[part]] = -2.0
        other[part] = cosine.max(axis=1) if len(prototypes) > 1 else -1.0
    return np.degrees(np.arccos(np.clip(own, -1, 1))), np.degrees(np.arccos(np.clip(other, -1, 1)))


def mean_pair_cosine(z):
    """mean cosine of two different embeddings: near 1 where all have collapsed into one direction"""
    n = len(z)
    return (np.square(z.sum(axis=0)).sum() - n) / (n * (n - 1)) if n > 1 else 1.0


def principal_plane(z):
    """two orthonormal directions (D, 2) in which z differs most, and the share of all variance along each"""
    values, vectors = np.linalg.eigh(np.cov(z.T, bias=True))
    return vectors[:, [-1, -2]], np.maximum(values[[-1, -2]], 0) / max(values.sum(), 1e-30)


# ---- drawing ----


def label_places(stars, centers):
    """of each class the place of its name: beside its star, as far as it can from other stars, names and the lines to the centers"""
    angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    ring = 0.075 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    lines = [stars[c] + (center - stars[c]) * t for c, center in centers.items() for t in (0.25, 0.5, 0.75, 1.0)]
    taken, places = [stars[c] for c in centers] + lines, {}
    for c in centers:
        options = stars[c] + ring
        distances = np.linalg.norm(options[:, None] - np.array(taken)[None], axis=2).min(axis=1)
        places[c] = options[distances.argmax()]
        taken.append(places[c])
    return places


def draw_plane(axes, z, labels, prototypes, name_of):
    from matplotlib import patheffects

    plane, share = principal_plane(z)
    points, stars = z @ plane, prototypes @ plane
    counts = np.bincount(labels, minlength=len(prototypes))
    colored = [int(c) for c in np.argsort(-counts, kind="stable")[: len(COLORS)] if counts[c] > 0]
    colors = dict(zip(sorted(colored), COLORS))
    chosen = np.random.default_rng(0).permutation(len(z))[:MAX_POINTS]
    point_colors = [colors.get(int(c), GREY) for c in labels[chosen]]
    size = float(np.clip(6000 / len(chosen), 4, 24))
    angle = np.linspace(0, 2 * np.pi, 400)
    axes.plot(np.cos(angle), np.sin(angle), color="#404040", linewidth=0.8)
    axes.scatter(points[chosen, 0], points[chosen, 1], s=size, c=point_colors, alpha=0.55, linewidths=0, rasterized=True)
    others = [c for c in range(len(prototypes)) if c not in colors]
    axes.scatter(stars[others, 0], stars[others, 1], s=18, marker="*", color=GREY, edgecolors="#707070", linewidths=0.4, zorder=3)
    halo = [patheffects.withStroke(linewidth=2.5, foreground="white")]
    centers = {c: points[labels == c].mean(axis=0) for c in colors}
    for c, color in colors.items():
        center = centers[c]
        axes.plot([stars[c, 0], center[0]], [stars[c, 1], center[1]], color=color, linewidth=1.2, zorder=4, path_effects=halo)
        axes.scatter(*stars[c], s=170, marker="*", color=[color], edgecolors="black", linewidths=0.8, zorder=5)
    for c, place in label_places(stars, centers).items():
        axes.text(*place, name_of(c), ha="center", va="center", fontsize=11, zorder=6, path_effects=halo)
    axes.set(aspect="equal", xlim=(-1.06, 1.06), ylim=(-1.06, 1.06), title="Embeddings and prototypes (stars)",
             xlabel=f"first principal component, {100 * share[0]:.0f}% of the variance", ylabel=f"second, {100 * share[1]:.0f}%")


def draw_angles(axes, own, other):
    bins = np.linspace(0, 180, 91)
    is_right = own < other
    for values, color, name in ((own, OWN, "to the prototype of its class"), (other, OTHER, "to the nearest other one")):
        percent = 100.0 * np.histogram(values, bins)[0] / len(values)
        axes.stairs(percent, bins, color=color, fill=True, alpha=0.45)
        axes.stairs(percent, bins, color=color, linewidth=1.2)
        axes.axvline(np.median(values), ymax=0.84, color=color, linestyle="--", linewidth=1.2, label=f"{name}: median {np.median(values):.0f} degrees")
    axes.set(title=f"Nearer to the own prototype: {100 * is_right.mean():.1f}%", xlabel="angle from an embedding, degrees",
             ylabel="% of the embeddings", xlim=(0, min(180, max(95, own.max() + 5, other.max() + 5))))
    axes.margins(y=0.22)  # room for the legend, above the lines
    axes.legend(frameon=False, loc="upper left")


def draw(z, labels, prototypes, name_of, out):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    own, other = angles_of(z, labels, prototypes)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    draw_plane(left, z, labels, prototypes, name_of)
    draw_angles(right, own, other)
    for axes in (left, right):
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{len(z):,} embeddings on the sphere of {z.shape[1]} dimensions, {len(prototypes):,} "
                    f"prototype{'s' * (len(prototypes) > 1)}; mean cosine of two embeddings {round(mean_pair_cosine(z), 2) + 0.0:.2f}")
    figure.savefig(out, dpi=130)


def byte_name(c):
    return repr(chr(c))[1:-1] if 32 < c < 127 else "space" if c == 32 else f"byte {c}"


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("out", metavar="OUT.png", nargs="?")
    parser.add_argument("--bytes", action="store_true", help="classes are bytes: name them as characters")
    options = parser.parse_args(arguments)
    out = options.out or options.file.removesuffix(".safetensors") + ".png"
    draw(*read_embeddings(options.file), byte_name if options.bytes else str, out)
    print(out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        print(f"plot_embeddings: {error}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(f"plot_embeddings: needs Python's {error.name}: dev/setup.sh", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"plot_embeddings: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
