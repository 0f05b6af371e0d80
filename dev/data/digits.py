#!/usr/bin/env python3
"""
Handwritten digits as sequences: digits_train.safetensors and digits_val.safetensors

    python dev/data/digits.py                     1438 and 359 examples, without a network

The 1797 images that come with scikit-learn (Alpaydin & Kaynak 1998, UCI's optical recognition of handwritten digits), 8x8
pixels of 17 grey levels. An example is the 64 pixels row by row, tokens 0..16; its one target, the digit 0..9, stands at the
last position, the others are -1 and not counted. Of each digit a fifth is for validation, chosen by --seed: the same seed gives
the same files.
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


def main(arguments):
    parser = Parser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="data/digits", metavar="DIR", help="folder of the result (default data/digits)")
    parser.add_argument("--seed", type=int, default=1, help="which fifth is for validation (default 1)")
    arguments = parser.parse_args(arguments)
    if arguments.seed < 0:
        raise InputError(f"--seed: expected an integer of 0 or more, found {arguments.seed}")
    pixels, digits = load()
    targets = np.full(pixels.shape, -1, dtype=np.int32)
    targets[:, -1] = digits
    train, val = split(digits, 0.2, arguments.seed)
    for name, rows in (("train", train), ("val", val)):
        write_examples(os.path.join(arguments.out, f"digits_{name}.safetensors"), pixels[rows], targets[rows])


if __name__ == "__main__":
    run("digits", main)
