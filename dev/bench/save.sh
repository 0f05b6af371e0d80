#!/usr/bin/env bash
# What a checkpoint of GPT-2 124M costs: seconds for a save, its share of what the disk takes (the same bytes by dd, with
# fsync), and how long training stands still. Both in turn, 3 rounds; look at the best of each.
#     dev/bench/save.sh [FOLDER]   FOLDER: on the disk to be measured, by default build
set -eu
cd "$(dirname "$0")/../.."
make -s train_gpt2
folder=${1:-build}/bench_save
mkdir -p "$folder"
trap 'rm -rf "$folder"' EXIT
shard=$folder/random.bin
python3 - "$shard" <<'PYTHON'
import array, random, sys
tokens = array.array("H", (random.randrange(50257) for _ in range(8192)))
open(sys.argv[1], "wb").write(array.array("i", [20240520, 1, len(tokens)] + 253 * [0]).tobytes() + tokens.tobytes())
PYTHON
for round in 1 2 3; do
    dd if=/dev/zero of="$folder/dd" bs=1M count=1425 conv=fsync 2>&1 | tail -n 1 | sed 's/^/dd, 1425 MiB with fsync: /'
    rm "$folder/dd"
    for background in 1 0; do
        ./train_gpt2 --model d12 --train "$shard" --batch-size 4 --seq-len 64 --steps 25 --save-every 8 --keep 1 --lr 1e-5 \
            --async-save $background --run "$folder/run" | grep -E '^checkpoints:' | sed "s/^/--async-save $background: /"
        rm -rf "$folder/run"
    done
done
