"""How fast the tokenizer encodes, ours and Hugging Face tokenizers on one thread, on the same text and with the same file.
    .venv/bin/python dev/bench/tokenizer.py TOKENIZER.json FILE...      # text files, some megabytes each
Prints MB/s of the whole text in one call, and line by line; the shortest processor time of ROUNDS counts. The number of
tokens must be equal, or the comparison stops. Hugging Face also keeps offsets and masks, which training does not need.
"""
import os
import pathlib
import subprocess
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "0"
from tokenizers import Tokenizer  # noqa: E402  # reads the variable when it is imported

ROUNDS = 3
ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build" / "bench_tokenizer"
BUILD = "gcc -std=gnu11 -D_GNU_SOURCE -O3 -march=native {source} -o {program} -ljansson -lpcre2-8 -lm"


def encode_seconds(tokenizer, texts):
    start = time.process_time()
    n_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    return time.process_time() - start, n_tokens


def main():
    if len(sys.argv) < 3:
        raise SystemExit("tokenizer.py: expected TOKENIZER.json FILE...")
    PROGRAM.parent.mkdir(exist_ok=True)
    subprocess.run(BUILD.format(source=ROOT / "dev/bench/tokenizer.c", program=PROGRAM).split(), check=True)
    print(f"{'file':24} {'MB':>6} {'bytes/token':>11} {'ours':>8} {'lines':>8} {'tokenizers':>10} {'lines':>8}   MB/s, one thread")
    for path in sys.argv[2:]:
        ours = subprocess.run([PROGRAM, sys.argv[1], str(ROUNDS), path], check=True, capture_output=True, text=True)
        n_bytes, n_tokens, whole, lines = (float(x) for x in ours.stdout.split())
        text = pathlib.Path(path).read_bytes().decode("utf-8", errors="replace")
        best = []
        for texts in ([text], [line + "\n" for line in text.split("\n")]):
            runs = []
            for _ in range(ROUNDS):  # a fresh one each time, as ours: no cache of an earlier round
                runs.append(encode_seconds(Tokenizer.from_file(sys.argv[1]), texts))
            best.append(min(runs))
        if best[0][1] != n_tokens:
            raise SystemExit(f"{path}: {n_tokens:.0f} tokens here, {best[0][1]} from tokenizers")
        rates = [n_bytes / 1e6 / seconds for seconds, _ in best]
        print(f"{pathlib.Path(path).name:24} {n_bytes / 1e6:6.1f} {n_bytes / n_tokens:11.2f} {whole:8.1f} {lines:8.1f} "
              f"{rates[0]:10.2f} {rates[1]:8.2f}")


if __name__ == "__main__":
    main()
