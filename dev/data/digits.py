#!/usr/bin/env python3
"""
Handwritten digits as sequences: digits_train.safetensors and digits_val.safetensors

    python dev/data/digits.py                     1438 and 359 examples, without a network
    python dev/data/digits.py --nudge             5 * 1438 and 359 examples: each training image also moved by a pixel

The 1797 images that come with scikit-learn (Alpaydin & Kaynak 1998, UCI's optical recognition of handwritten digits), 8x8
pixels of 17 grey levels. An example is the 64 pixels row by row, tokens 0..16; its one target, the digit 0..9, stands at the
last position, the others are -1 and not counted. Of each digit a fifth is for validation, chosen by --seed: the same seed gives
the same files. Read pixel by pixel, 1438 images are few: a model soon knows them by heart. --nudge adds those moved to the left,
right, up and down by one pixel, which are still the same digits; validation stays as it is.
"""
import argparse
import os

import numpy as np

from common import InputError, Parser, run, write_examples


def load():
    """pixels (1797, 64) and digits (1797)"""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("needs Python's scikit-learn, which brings the images (pip install scikit-learn)") from None
    bunch = load_digits()
    return bunch.data.astype(np.int32), bunch.target.astype(np.int32)


def split(digits, fraction, seed):
    """the rows for training and for validation, ascending: of each class `fraction` is for validation, rounded"""
    random = np.random.Generator(np.random.PCG64(seed))
    is_val = np.zeros(len(digits), dtype=bool)
    for digit in range(10):
        rows = random.permutation(np.flatnonzero(digits == digit))
        is_val[rows[:round(fraction * len(rows))]] = True
    return np.flatnonzero(~is_val), np.flatnonzero(is_val)


def moved(pixels, down, right):
    """the images (n, 64) moved by so many pixels; what leaves on one side is lost, the other side is filled with 0"""
    padded = np.pad(pixels.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    return padded[:, 1 - down:9 - down, 1 - right:9 - right].reshape(-1, 64)


def main(arguments):
    parser = Parser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="data/digits", metavar="DIR", help="folder of the result (default data/digits)")
    parser.add_argument("--seed", type=int, default=1, help="which fifth is for validation (default 1)")
    parser.add_argument("--nudge", action="store_true", help="training images moved by one pixel too: five times as many")
    arguments = parser.parse_args(arguments)
    if arguments.seed < 0:
        raise InputError(f"--seed: expected an integer of 0 or more, found {arguments.seed}")
    pixels, digits = load()
    train, val = split(digits, 0.2, arguments.seed)
    moves = ((0, 0), (0, -1), (0, 1), (-1, 0), (1, 0)) if arguments.nudge else ((0, 0),)
    for name, rows, ways in (("train", train, moves), ("val", val, moves[:1])):
        inputs = np.concatenate([moved(pixels[rows], *way) for way in ways])
        targets = np.full(inputs.shape, -1, dtype=np.int32)
        targets[:, -1] = np.tile(digits[rows], len(ways))
        write_examples(os.path.join(arguments.out, f"digits_{name}.safetensors"), inputs, targets)


if __name__ == "__main__":
    run("digits", main)
