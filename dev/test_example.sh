#!/usr/bin/env bash
# dev/examples/train_bigram.c as doc/your_own_trainer.md says: every option, checkpoint and rank comes with llmc/run/.
# Ends with "N passed, N failed".
. "$(dirname "$0")/promises.sh"
need_build trainer "" train_bigram
need_build launch "" launch
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
cat "$root"/doc/*.md >book.txt
start=(--model tiny --train book.txt --val-fraction 0.1 --steps 9 --lr 0.1 --batch-size 2 --seq-len 32 --batch-tokens 192)
start+=(--eval-every 3 --sample-every 3 --max-new-tokens 20 --save-every 3 --keep 9 --threads 1)
same() {  # A B: the files of their last step
    cmp "$1/step_000009/model.safetensors" "$2/step_000009/model.safetensors" &&
        cmp "$1/step_000009/optimizer.safetensors" "$2/step_000009/optimizer.safetensors"
}
"$trainer" "${start[@]}" --run one >out 2>err
check "trains, validates, samples, saves" test $? = 0 -a -e one/step_000009/model.safetensors -a -s one/samples.txt
for zero in 0 1 2; do
    "$launch" -n 3 "$trainer" "${start[@]}" --zero $zero --run "ranks$zero" >out 2>err
    check "3 ranks, --zero $zero: the bits of one" same one "ranks$zero"
done
cp -r one cut && rm -r cut/step_000006 cut/step_000009
"$trainer" --run cut --resume >out 2>err
check "--resume: the bits of never having stopped" same one cut
"$trainer" --from one --generate "The " >out 2>err
check "--generate" test $? = 0 -a -s out
"$trainer" --from one --export-hf hf >out 2>err
check "--export-hf: the parameters of the checkpoint" cmp hf/model.safetensors one/step_000009/model.safetensors
"$trainer" --from one --eval-only --val book.txt >out 2>err
check "--eval-only" grep -q 'val loss' out
"$trainer" "${start[@]}" --freeze 'bigram.*' --run frozen >out 2>err
check "--freeze of all that there is: status 2, one line" test $? = 2 -a "$(wc -l <err)" = 1
"$trainer" --model nonsense --train book.txt --dry-run >out 2>err
check "a preset that it has not: status 2, one line" test $? = 2 -a "$(wc -l <err)" = 1
finish
