#!/usr/bin/env bash
# `make run-digits`: one classifier of handwritten digits, trained twice with all else alike: with the head ce (a score for each
# digit, cross entropy) and with hpn (a fixed place on the sphere for each digit, (1 - cosine to it)^2).
#     dev/examples/digits.sh [RUN [OPTION...]]     writes RUN-ce and RUN-hpn, by default runs/digits-ce and runs/digits-hpn;
#                                                  options go to both: --seed 2
# Ends with the accuracy of both on the 359 validation images, draws loss.png into the run folders, and beside them where the
# images stand on the sphere: RUN-ce-embeddings.png, RUN-hpn-embeddings.png.
# A run that has begun goes on.
set -eu
cd "$(dirname "$0")/../.."
run=${1-runs/digits}
shift $(($# > 0))
python=.venv/bin/python
[ -x $python ] || python=python3
data=build/digits
for word in "$@"; do
    case $word in --head* | --run*) echo "digits.sh: $word: heads and runs are its own to say: leave it out" >&2; exit 2 ;; esac
done
export GOMP_SPINCOUNT=10000  # a thread that waits soon sleeps: other programs cannot stall the rest

$python dev/data/digits.py --nudge --out $data
for head in ce hpn; do
    echo "--- head $head"
    if ls -d "$run-$head"/step_*[0-9] >/dev/null 2>&1; then
        ./train_mamba_hpn --run "$run-$head" --resume "$@"
    else
        ./train_mamba_hpn --args dev/examples/digits.txt --train $data/digits_train.safetensors --val $data/digits_val.safetensors \
            --head $head --run "$run-$head" --continue "$@"
    fi
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
