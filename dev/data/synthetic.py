#!/usr/bin/env python3
"""
Made-up data whose best possible result is known: a sanity check that needs no download.

    python dev/data/synthetic.py counter                      counter_train.bin, counter_val.bin
    python dev/data/synthetic.py markov --noise 0.2           markov_train.bin, markov_val.bin, and the Bayes rate
    python dev/data/synthetic.py copy --length 64             copy_train.safetensors, copy_val.safetensors
    python dev/data/synthetic.py induction --length 64        induction_train.safetensors, induction_val.safetensors

counter    token shards: 0 .. V-1 again and again. Each token names the next: a bigram table gets all of them right.
markov     token shards: each token has one successor (a random permutation), which follows with probability 1 - noise; else
           any of the V tokens comes, all equally likely. No model can be right more often, or have a lower mean loss, than the
           two numbers that are printed. Training and validation are two stretches of one chain.
copy       examples, selective copying (Gu & Dao 2023, arXiv:2312.00752, section 4.1.1): --memory tokens 1 .. V-2 at random
           places among blanks (token 0), then the token V-1 once, then blanks; targets are the tokens in their order at the last
           --memory positions. The distances differ, so only a model that chooses what it keeps can do it.
induction  examples, induction heads (same paper, 4.1.2): random tokens 0 .. V-2; the token V-1 stands at a random place and
           again at the end, where the target is the token that came after it the first time.
Examples are safetensors files with inputs and targets, int32 (n, T); -1 is not counted. The same --seed gives the same bytes.
"""
import argparse
import os

import numpy as np

from common import InputError, Parser, Shard, run, write_examples

KINDS = ("counter", "markov", "copy", "induction")


def counter(n_tokens, vocabulary):
    return np.arange(n_tokens, dtype=np.int64) % vocabulary


def markov(n_tokens, vocabulary, noise, random):
    """a chain of n_tokens that begins anywhere"""
    successor = random.permutation(vocabulary)
    is_noise, noise_tokens = random.random(n_tokens) < noise, random.integers(0, vocabulary, n_tokens)
    tokens = np.empty(n_tokens, dtype=np.int64)
    token = int(random.integers(0, vocabulary))
    for i in range(n_tokens):
        token = int(noise_tokens[i]) if is_noise[i] else int(successor[token])
        tokens[i] = token
    return tokens


def bayes_rate(vocabulary, noise):
    """the best share of right answers, and the best mean loss in nats: the entropy of the next token"""
    right = 1 - noise + noise / vocabulary
    others = np.full(vocabulary - 1, noise / vocabulary)
    p = np.append(others, right)
    p = p[p > 0]
    return right, abs(float((p * np.log(p)).sum()))  # abs: without noise it would print as -0


def selective_copy(n, length, vocabulary, memory, random):
    """rows of length + 1 + memory positions: tokens among blanks, the sign to begin, and blanks to answer in"""
    inputs = np.zeros((n, length + 1 + memory), dtype=np.int32)
    targets = np.full(inputs.shape, -1, dtype=np.int32)
    kept = random.integers(1, vocabulary - 1, (n, memory))
    places = np.sort(random.random((n, length)).argsort(axis=1)[:, :memory], axis=1)
    np.put_along_axis(inputs, places, kept.astype(np.int32), axis=1)
    inputs[:, length] = vocabulary - 1
    targets[:, length + 1:] = kept
    return inputs, targets


def induction(n, length, vocabulary, random):
    inputs = random.integers(0, vocabulary - 1, (n, length)).astype(np.int32)
    targets = np.full(inputs.shape, -1, dtype=np.int32)
    rows, place = np.arange(n), random.integers(0, length - 2, n)  # something comes after it that is not the end
    inputs[rows, place] = inputs[:, -1] = vocabulary - 1
    targets[:, -1] = inputs[rows, place + 1]
    return inputs, targets


def check(arguments):
    a = arguments
    limits = [("--vocab-size", a.vocab_size, 3, 2**31 - 1), ("--tokens", a.tokens, 20, 2**31 - 1), ("--examples", a.examples, 10, 10**8),
              ("--length", a.length, 3, 1 << 20), ("--memory", a.memory, 1, a.length), ("--seed", a.seed, 0, 2**31 - 1)]
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise InputError(f"{name}: expected an integer {low}..{high}, found {value}")
    if not 0 <= a.noise <= 1:
        raise InputError(f"--noise: expected a probability 0..1, found {a.noise}")


def write_shards(arguments, tokens):
    n_val = len(tokens) // 10
    for name, part in (("train", tokens[:-n_val]), ("val", tokens[-n_val:])):
        with Shard(os.path.join(arguments.out, f"{arguments.kind}_{name}.bin"), arguments.vocab_size) as shard:
            shard.add(part)


def write_both(arguments, inputs, targets):
    n_val = len(inputs) // 10
    for name, part in (("train", slice(None, -n_val)), ("val", slice(-n_val, None))):
        write_examples(os.path.join(arguments.out, f"{arguments.kind}_{name}.safetensors"), inputs[part], targets[part])


def main(arguments):
    parser = Parser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", default="data/synthetic", metavar="DIR", help="folder of the result (default data/synthetic)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other data (default 1)")
    parser.add_argument("--vocab-size", type=int, default=16, metavar="V", help="number of tokens (default 16)")
    parser.add_argument("--tokens", type=int, default=200000, metavar="N", help="counter, markov: tokens in all, the last tenth for "
                        "validation (default 200000)")
    parser.add_argument("--noise", type=float, default=0.2, metavar="P", help="markov: probability of a random token (default 0.2)")
    parser.add_argument("--examples", type=int, default=11000, metavar="N", help="copy, induction: rows in all, the last tenth for "
                        "validation (default 11000)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="copy: positions before the answer; induction: of a row "
                        "(default 64)")
    parser.add_argument("--memory", type=int, default=8, metavar="K", help="copy: tokens to remember (default 8)")
    arguments = parser.parse_args(arguments)
    check(arguments)
    random = np.random.Generator(np.random.PCG64(arguments.seed))
    a = arguments
    if a.kind == "counter":
        write_shards(a, counter(a.tokens, a.vocab_size))
    elif a.kind == "markov":
        write_shards(a, markov(a.tokens, a.vocab_size, a.noise, random))
        accuracy, loss = bayes_rate(a.vocab_size, a.noise)
        print(f"Bayes rate: at best {100 * accuracy:.2f}% of the tokens right, a mean loss of {loss:.4f} nats")
    elif a.kind == "copy":
        write_both(a, *selective_copy(a.examples, a.length, a.vocab_size, a.memory, random))
    else:
        write_both(a, *induction(a.examples, a.length, a.vocab_size, random))


if __name__ == "__main__":
    run("synthetic", main)
