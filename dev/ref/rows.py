"""
Which row comes when: the order of rows of llmc/text/dataloader.h, in Python's integers.

    python dev/ref/rows.py [--out DIR]     check the reference, then write rows.safetensors (default: dev/golden)

rows.safetensors, for each mixture k of its config ({"mixtures": [{"rows", "weights", "key", "shuffle", "epochs"}]}):
    mixture<k>.rows     I32 (epochs * rows in all, 2)   the source of each index, and the row in it
"""
import argparse
import os
from collections import Counter
from math import floor

import numpy as np

import exact

HERE = os.path.dirname(os.path.abspath(__file__))
WORD = 2**64
GOLDEN = 0x9e3779b97f4a7c15

MIXTURES = [
    {"rows": [60, 7, 20], "weights": [3.0, 1.0, 2.0], "key": 42, "shuffle": 1, "epochs": 4},
    {"rows": [5, 5], "weights": [1.0, 1.0], "key": 0, "shuffle": 1, "epochs": 6},
    {"rows": [300, 3, 20, 1], "weights": [0.5, 0.25, 1.0, 0.01], "key": 1234567890123, "shuffle": 1, "epochs": 2},
    {"rows": [12, 30], "weights": [2.0, 1.0], "key": 42, "shuffle": 0, "epochs": 5},
    {"rows": [9], "weights": [7.0], "key": 1, "shuffle": 1, "epochs": 3},
]


def mix(x):
    """Every bit of the result depends on every bit of x (Stafford's mix 13)."""
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 % WORD
    x = (x ^ x >> 27) * 0x94d049bb133111eb % WORD
    return x ^ x >> 31


def splitmix64(seed, i):
    return mix((seed + (i + 1) * GOLDEN) % WORD)


def permute(key, epoch, i, n):
    """Where index i of 0..n-1 goes: a Feistel network of 8 rounds on 2k bits, again until the result is below n."""
    half = 4
    while 4**half < n:
        half += 1
    epoch_key = mix((mix((key + GOLDEN) % WORD) + epoch) % WORD)
    while True:
        left, right = i >> half, i % 2**half
        for r in range(1, 9):
            left, right = right, left ^ mix((epoch_key + r * GOLDEN) % WORD ^ right) % 2**half
        i = left << half | right
        if i < n:
            return i


def places(rows, weights):
    """The places of an epoch at which each source begins, and the end: shares of all rows, rounded where they meet."""
    n, total, before, borders = sum(rows), sum(weights), 0.0, [0]
    for weight in weights:
        before += weight
        borders.append(floor(n * before / total + 0.5))
    return borders[:-1] + [n]


def mixture_row(mixture, index):
    """(source, row in it) of an index that counts through all epochs."""
    rows, key, borders = mixture["rows"], mixture["key"], places(mixture["rows"], mixture["weights"])
    epoch, place = divmod(index, sum(rows))
    if mixture["shuffle"]:
        place = permute(key, epoch, place, sum(rows))
    source = next(s for s in range(len(rows)) if place < borders[s + 1])
    begin, end = borders[source], borders[source + 1]
    turn, row = divmod(epoch * (end - begin) + place - begin, rows[source])  # a turn has every row of the source once
    if mixture["shuffle"]:
        row = permute(splitmix64(key, source), turn, row, rows[source])
    return source, row


def promises():
    out = []
    for k, mixture in enumerate(MIXTURES):
        rows, borders, n = mixture["rows"], places(mixture["rows"], mixture["weights"]), sum(mixture["rows"])
        drawn = [mixture_row(mixture, i) for i in range(mixture["epochs"] * n)]
        each = [Counter(s for s, _ in drawn[e * n:(e + 1) * n]) for e in range(mixture["epochs"])]
        ideal = [n * w / sum(mixture["weights"]) for w in mixture["weights"]]
        out.append((f"mixture {k}: every epoch has the places of each source",
                    all(c[s] == borders[s + 1] - borders[s] for c in each for s in range(len(rows)))))
        out.append((f"mixture {k}: a source has its share, but for less than a row",
                    all(abs(borders[s + 1] - borders[s] - ideal[s]) < 1 for s in range(len(rows)))))
        for s in range(len(rows)):
            times = Counter(row for source, row in drawn if source == s)
            n_turns, n_more = divmod(sum(times.values()), rows[s])
            expected = {n_turns} if n_more == 0 else {n_turns, n_turns + 1}
            out.append((f"mixture {k}: source {s} gives no row twice before all came once",
                        {times[row] for row in range(rows[s])} <= expected))
    return out


def golden(folder):
    tensors = {f"mixture{k}.rows": np.array([mixture_row(m, i) for i in range(m["epochs"] * sum(m["rows"]))], np.int32)
               for k, m in enumerate(MIXTURES)}
    path = os.path.join(folder, "rows.safetensors")
    exact.write_safetensors(path, tensors, {"mixtures": MIXTURES})
    print(f"{path}  {len(tensors)} tensors, {os.path.getsize(path)} bytes")


def main():
    parser = argparse.ArgumentParser(description="The order of rows in Python; writes its golden file.")
    parser.add_argument("--out", metavar="DIR", default=os.path.join(HERE, "..", "golden"), help="for the golden file")
    args = parser.parse_args()
    if exact.report(promises()):
        return 1
    os.makedirs(args.out, exist_ok=True)
    golden(os.path.normpath(args.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
