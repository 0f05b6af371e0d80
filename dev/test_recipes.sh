#!/usr/bin/env bash
# Every `make run...` of the README to its end: in a copy of the tree, a few steps in place of two minutes, and what each is
# to leave behind. Then once more: a run that is there goes on.
# Ends with "N passed, N failed".
. "$(dirname "$0")/promises.sh"
for name in train_gpt2 train_mamba_hpn train_moe train_qwen3 train_qwen36 train_deepseek_v4 train_glm5; do need_build trainer "" $name; done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do [ ! -e "$file" ] || printf '%s\0' "$file"; done |
    xargs -0 cp -a --parents -t "$work"
mkdir "$work/build"  # of the tree's own; what the recipes make of texts and images is the copy's
for file in build/*; do
    case $file in build/hello | build/questions | build/shapes | build/digits) ;; *) ln -s "$root/$file" "$work/build/" ;; esac
done
[ ! -e .venv ] || ln -s "$root/.venv" "$work/.venv"
commit=$(git describe --always --dirty --exclude '*' 2>/dev/null || echo unknown)  # the programs' own: nothing is built anew
more="--steps 6 --eval-every 3 --save-every 3 --eval-batches 2 --sample-every 0 --log-every 1"
cd "$work" || exit 1

# NAME FOLDER FILE...: these files of runs/FOLDER are there
recipe() {
    local name=$1 folder=$2 file missing=""
    shift 2
    timeout 300 make "$name" RUN="runs/$folder" COMMIT="$commit" MORE="$more" >out 2>err
    local status=$?
    for file in "$@"; do [ -s "runs/$folder$file" ] || missing+=" runs/$folder$file"; done
    check "make $name: ends well, its files are there" test "$status:$missing" = 0:
    ! grep -q "^gcc\|^cc\|^clang" out || check "make $name: nothing is built anew" false
}

recipe run hello /step_000006/model.safetensors /loss.png
recipe run-mamba hello-mamba /step_000006/model.safetensors /loss.png
recipe run-moe hello-moe /step_000006/model.safetensors /loss.png
recipe run-qwen36 hello-qwen36 /step_000006/model.safetensors /loss.png
recipe run-deepseek-v4 hello-deepseek-v4 /step_000006/model.safetensors /loss.png
recipe run-glm5 hello-glm5 /step_000006/model.safetensors /loss.png
recipe run-lora hello-lora /base/step_000006/model.safetensors /base/loss.png /adapter/step_000006/adapter_model.safetensors \
    /adapter/loss.png /before.jsonl /after.jsonl
recipe run-shapes hello-shapes /model/step_000006/model.safetensors /answers.jsonl /answers.png /model/loss.png
if $python -c 'import sklearn' 2>/dev/null; then
    recipe run-digits digits -ce/step_000006/model.safetensors -ce/loss.png -hpn/loss.png -ce-embeddings.png -hpn-embeddings.png
    check "... with the accuracy of both" test "$(grep -c '^head [a-z]* .*% of the validation images are right' out)" = 2
else
    skip "make run-digits: needs scikit-learn"
fi

# a run that is there goes on, as it was begun: with its own steps, or with more
again() {  # NAME FOLDER STEPS
    local steps=${3:+--steps $3}
    timeout 300 make "$1" COMMIT="$commit" MORE="$steps" >out 2>err
    check "make $1${3:+ with more steps}: the run goes on" test $? = 0 -a -d "runs/$2/step_00000${3:-6}" \
        -a ! -e "runs/$2/step_001500" -a "$(grep -c 'exists: it goes on' out)" = 1
}
again run hello 9
again run-moe hello-moe ""
again run-shapes hello-shapes/model 9
again run-lora hello-lora/adapter 9
refused() {  # PROMISE TEXT NAME VARIABLE...
    local promise=$1 text=$2
    shift 2
    ! make "$@" COMMIT="$commit" >out 2>err
    check "$promise" test $? = 0 -a "$(cat out err | grep -cF -- "$text")" -ge 1
}
refused "--run in MORE: it is RUN's" "MORE: --run is said by RUN=FOLDER" run MORE="--run x"
make run COMMIT="$commit" RUN="runs/a b'c" MORE="--dry-run" >out 2>err
check "a name with blanks, and a dry run: nothing is drawn" test $? = 0 -a ! -e "runs/a b'c/loss.png"
if $python -c 'import sklearn' 2>/dev/null; then
    make run-digits COMMIT="$commit" RUN="runs/d 3" MORE="$more" >out 2>err
    check "make run-digits: a name with blanks" test $? = 0 -a -s "runs/d 3-hpn-embeddings.png"
    refused "make run-digits: heads are its own" "--head: heads and runs are its own to say" run-digits RUN=runs/other MORE="--head ce"
fi
finish
