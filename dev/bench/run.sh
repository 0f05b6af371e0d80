#!/usr/bin/env bash
# `make bench`: the matrix product and one training step, each on 2 threads and on 1, against OpenBLAS, PyTorch and llm.c.
#     dev/bench/run.sh [LLM.C]      a checkout of llm.c, by default /tmp/llm.c; under ten minutes on a machine that does nothing else
# What is not installed gets a line that says so; dev/bench/README.md says how to get it and how to read the tables.
set -eu
cd "$(dirname "$0")/../.."
upstream=${1-/tmp/llm.c}
python=.venv/bin/python
[ -x $python ] || python=python3
make --no-print-directory train_gpt2
mkdir -p build
gcc -std=gnu11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -mprefer-vector-width=512 -fopenmp dev/bench/gemm.c -o build/gemm -ldl -lm
PYTHON=$python build/gemm 2 1
for threads in 2 1; do
    $python dev/bench/step.py --upstream "$upstream" --threads $threads
done
