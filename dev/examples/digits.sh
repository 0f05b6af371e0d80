#!/usr/bin/env bash
# `make run-digits`: one classifier of handwritten digits, trained twice with all else alike: with the head ce (a score for each
# digit, cross entropy) and with hpn (a fixed place on the sphere for each digit, (1 - cosine to it)^2).
#     dev/examples/digits.sh [RUN [OPTION...]]     writes RUN-ce and RUN-hpn, by default runs/digits-ce and runs/digits-hpn;
#                                                  options go to both: --seed 2
# Ends with the accuracy of both on the 359 validation images, draws loss.png into the run folders, and beside them where the
# images stand on the sphere: RUN-ce-embeddings.png, RUN-hpn-embeddings.png.
set -eu
cd "$(dirname "$0")/../.."
run=${1-runs/digits}
shift $(($# > 0))
python=.venv/bin/python
[ -x $python ] || python=python3
data=build/digits
for head in ce hpn; do
    if [ -e "$run-$head" ]; then echo "$run-$head exists already: make run-digits RUN=runs/another, or remove it" >&2; exit 2; fi
done
export GOMP_SPINCOUNT=10000  # a thread that waits soon sleeps: other programs cannot stall the rest

$python dev/data/digits.py --nudge --out $data
for head in ce hpn; do
    echo "--- head $head"
    ./train_mamba_hpn --args dev/examples/digits.txt --train $data/digits_train.safetensors --val $data/digits_val.safetensors \
        --head $head --run "$run-$head" "$@"
done

# all validation images in one batch, by the checkpoints that were written last
result=""
for head in ce hpn; do
    out=$(./train_mamba_hpn --from "$run-$head" --task cls --val $data/digits_val.safetensors --batch-size 359 --eval-batches 1 \
        --eval-only --embeddings-out "$run-$head-embeddings.safetensors")
    accuracy=$(sed -n 's/.*accuracy \([^ ]*\).*/\1/p' <<<"$out")
    result+=$(printf 'head %-4s %7s of the validation images are right' "$head" "$accuracy")$'\n'
    $python dev/tools/plot.py "$run-$head"
    $python dev/tools/plot_embeddings.py "$run-$head-embeddings.safetensors"
done
printf '%s' "$result"
