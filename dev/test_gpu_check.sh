#!/usr/bin/env bash
# dev/gpu_check.sh without a GPU: what it says then, its stages with stand-ins, and what it does when one of them goes wrong.
# About two minutes after the builds of the normal build.
#     dev/test_gpu_check.sh quick   only what it says
. "$(dirname "$0")/promises.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# dev/gpu_check.sh ARGUMENT...: its status in `status`, its output in $work/out and $work/err
gpu_check() {
    (cd "$root" && timeout 300 dev/gpu_check.sh "$@") >"$work/out" 2>"$work/err"
    status=$?
}

# the page of the last rehearsal holds a line that matches: page_says PROMISE EXPRESSION
page_says() {
    grep -qE -- "$2" "$work/r/report.md"
    verdict $? "$1" "no \"$2\" in the page: $(head -c 3000 "$work/r/report.md")"
}

# status STATUS, one line on stderr that holds TEXT: refuses STATUS TEXT PROMISE ARGUMENT...
refuses() {
    local expected=$1 text=$2 promise=$3 good=1
    shift 3
    gpu_check "$@"
    if [ $status = "$expected" ] && [ "$(wc -l <"$work/err")" = 1 ] && [[ $(<"$work/err") == *"$text"* ]]; then good=0; fi
    verdict $good "$promise" "status $status, stderr: $(<"$work/err")"
}

# ---- without a GPU ----

if [ -n "$(nvidia-smi -L 2>/dev/null)" ]; then
    skip "without a GPU it says so: there is one here"
else
    refuses 2 "no GPU here" "without a GPU: one line, status 2" --results "$work/none"
fi
refuses 2 'found "bild"' "a stage that does not exist is named" bild
refuses 2 "expected a value" "an option without its value is named" --results
refuses 2 'call: expected 1, 2 or 3, found "4"' "a call that does not exist is named" call 4
refuses 2 '--steps: expected a whole number from 2 on, found "1"' "too few steps are refused before anything runs" --steps 1 report
refuses 2 '--rounds: expected a whole number from 1 on, found "0"' "... no rounds" --rounds 0 report
refuses 2 '--limit: expected STAGE=SECONDS, found "bild"' "... a limit of a stage that does not exist" --limit bild=9 report

if is_quick; then finish; exit; fi

# ---- all stages ----

gpu_check --rehearse --results "$work/r"
verdict $status "a rehearsal of all stages ends with status 0" "$(tail -n 20 "$work/out")"
page_says "the page says that it is a rehearsal" 'A rehearsal: no GPU'
page_says "it names card and commit" '^\| commit \| [0-9a-f]'
page_says "it counts tests" '^[1-9][0-9]* passed, 0 failed'
page_says "it has a verdict of every tool on every program" '^\| test_gelu \| clean \| clean \| clean \| clean \| clean \|'
page_says "ours and PyTorch's training steps stand in one table" '^\| PyTorch compiled \| B 2 T 16 \| [0-9.,]+ \|'
page_says "clock and power while a step was measured" '^- ours, B 2, medians of its run: clock 1 MHz, power '
page_says "every step computed twice, and no bit differs" '^- --verify-every 1, 2 steps of B 2 T 16: no bit differs'
page_says "a text has tokens a second" '^\| tiny \| [0-9.]+ \| [0-9.,]+ \| [0-9.e-]+ \| [0-9]+ \|'
page_says "a step with and without --graph 1, of one row too" '^\| ours, --graph 1 \| B 1 T 16 \| [0-9.,]+ \|'
page_says "losses from the same start are compared" 'At step 1 they are [0-9.e-]+ apart'
page_says "every op has a time and its share of the copy's speed" '^\| layernorm_backward \| [0-9.]+ \| [0-9.]+ \| [0-9]+ \|'
page_says "... and beside it what is expected of an H200" '^\| layernorm_backward (\| [^|]+){7}\| [0-9.e-]+ \| (\*\*)?[0-9.]+(\*\*)? \|$'
page_says "... of the step, too" '^- expected of ours on an H200, B 64, T 1024: [0-9]+ ms'
page_says "attention has a column for each back end" '^\| forward B 1 T 16 NH 2 HS 16 \| [0-9.]+ \([0-9.e-]+\)( \| ([0-9.]+ \([0-9.e-]+\)|-)){4}'
page_says "Qwen3-0.6B: all parameters beside another program" '^\| ours \| all parameters \| B 2 T 16 \| [0-9.,]+ \|'
page_says "... LoRA, whose first loss is compared" '^\| ours \| LoRA of rank 16 \| B 2 T 16 \| [0-9.,]+ \|'
page_says "... and its text has tokens a second" '^\| ours \| [0-9.]+ \| [0-9.,]+ \| [0-9.e,-]+ \| [0-9]+ \|'
page_says "a kernel that ncu looked at has its numbers, a - where ncu has none" '^\| attention_backward B 8 T 1024 NH 12 \| `flash_backward_kernel<64, 2>` \| 2.5 \| 41.25 \| - \| - \| - \| - \| - \| 234 \|$'
page_says "a step's kernels, its own alone, by their sums" '^\| `layernorm_kernel<4>` \| 2 \| 7.8 \| 0.02 \| [0-9.]+ \|$'
page_says "every trainer has a row" '^\| train_qwen3 \| tiny B 2 T 16 \| [0-9.]+[kM] \| [0-9.,]+ \| [0-9.,]+ \| [0-9.]+ to [0-9.]+ \|$'
for stage in build tests sanitizer ops profile steps trainers qwen; do page_says "stage $stage is recorded" "^\| $stage \| ok \|"; done
awk '/^\|/ { cells = gsub(/[^\\]\|/, ""); if (before && cells != before) { print NR ": " $0; bad = 1 } before = cells; next }
     { before = 0 } END { exit bad }' "$work/r/report.md" >"$work/cells"
verdict $? "every row of a table has as many cells as the row before" "$(<"$work/cells")"
[ "$(find "$work/r" -type f ! -name report.md | wc -l)" -le 10 ]
verdict $? "at most ten files carry everything home" "$(ls "$work/r")"
cp "$work/r/report.md" "$work/first"
gpu_check --rehearse --results "$work/r" report
cmp -s "$work/first" "$work/r/report.md"
verdict $? "the page comes out the same again from the files alone" "$(diff "$work/first" "$work/r/report.md")"

# where a page derives an op's time the report has it: by mma.sync, or by wgmma in a build for sm_90a
sparse="sparse_attention_forward N 4096 H 64 d 512 window 128 topk 512"
read -r by_mma by_wgmma <<<"$(awk -F ' *[|] *' '$2 == "attention forward" { mma = $6; getline; print mma, $6 }' "$root/doc/gpu/deepseek_v4.md")"
printf 'ours\t%s\t1\t546000000\t274000000000\n' "$sparse" >>"$work/r/ops.tsv"
gpu_check --rehearse --results "$work/r" report
page_says "what deepseek_v4.md expects of sparse attention by mma.sync is beside it" "^\| $sparse (\| [^|]+){7}\| $by_mma \|"
sed -i 's,^built in\t.*,built in\tbuild/nvcc-sm_90a-bf16,' "$work/r/machine.txt"
gpu_check --rehearse --results "$work/r" report
page_says "... of a build for sm_90a by wgmma" "^\| $sparse (\| [^|]+){7}\| $by_wgmma \|"
(cd "$root" && "$(make -s folder)/bench/gpu_ops" --list) >"$work/cases"
PYTHONPATH=$root/dev python3 -c 'import roofline; print("\n".join(roofline.DERIVED))' >"$work/derived"
grep -vxFf "$work/cases" "$work/derived" >"$work/lost"
[ -s "$work/derived" ] && [ ! -s "$work/lost" ]
verdict $? "every case for which a page derives a time is one of gpu_ops" "not among them: $(<"$work/lost")"

sed -i 's/^\(loss ours, --graph 1, 1 row\t4\t\).*/\19.9/' "$work/r/steps.tsv"
gpu_check --rehearse --results "$work/r" report
page_says "--graph 1 whose losses differ is not passed over" '--graph 1 has other losses'

gpu_check --rehearse --results "$work/s" steps
rm "$work/r/steps.tsv"
sed -i '/^steps/d' "$work/r/stages.tsv"
gpu_check --rehearse --results "$work/r" --and "$work/s" report
page_says "results of two folders make one page" '^\| ours \| B 2 T 16 \| [0-9.]+ \|'
page_says "... with the stages of both" '^\| steps \| ok \|'

# three calls, each on a machine of its own: a folder for each, and one page of all
for call in 1 2 3; do
    gpu_check --rehearse --results "$work/call$call" call $call
    verdict $status "call $call ends with status 0" "$(tail -n 20 "$work/out")"
done
built() { cut -f 1,2 "$work/call$1/build.tsv" | tr '\t\n' ' ,'; }
check "a call builds only what it runs" test "$(built 1)$(built 2)$(built 3)" = "bf16 test_gelu,bf16 test_layernorm,exact test_gelu,exact test_layernorm,bf16 train_gpt2,bf16 train_moe,bf16 bench/gpu_ops,bf16 bench/gated_delta,bf16 train_gpt2,bf16 train_moe,bf16 train_qwen3,bf16 bench/gpu_ops,"
check "the tools that may not be missed come first" test "$(grep -m 2 -oE '^# (mem|race)check bf16 test_[a-z]+' "$work/call1/log.txt" | sort | tr '\n' ,)" = "# memcheck bf16 test_layernorm,# racecheck bf16 test_layernorm,"
gpu_check --rehearse --results "$work/call1" --and "$work/call2" --and "$work/call3" report
cp "$work/call1/report.md" "$work/r/report.md"
page_says "every trainer has a row" '^\| train_qwen3 \| tiny B 2 T 16 \| [0-9.]+[kM] \| [0-9.,]+ \| [0-9.,]+ \| [0-9.]+ to [0-9.]+ \|$'
for stage in build tests sanitizer ops profile steps trainers qwen; do page_says "three calls: stage $stage is on the page" "^\| $stage \| ok \|"; done

mkdir "$work/llm.c"
printf '#!/bin/sh\nfor i in 90.00 80.00 12.50 13.00; do echo "step    1/4 | loss 5.5 (+nanz)| norm 1 (+nanz)| lr 3e-04 | $i ms | 1.0%% bf16 MFU | 9 tok/s"; done\n' >"$work/llm.c/train_gpt2cu"
chmod +x "$work/llm.c/train_gpt2cu"
gpu_check --rehearse --results "$work/r" --llmc "$work/llm.c" steps report
page_says "llm.c's steps stand beside ours" '^\| llm.c \| B 2 T 16 \| 12.5 \|'

# ---- when something is wrong: it is recorded, and the rest goes on ----

export REHEARSE_FAULT=sanitizer
gpu_check --rehearse --results "$work/r" sanitizer steps report
[ $status = 1 ]
verdict $? "a race that compute-sanitizer reports: status 1" "status $status"
page_says "... with the tool, the program and its words" 'racecheck, bf16 test_gelu: .*Race reported'
page_says "... and the next stage ran" '^\| steps \| ok \|'

export REHEARSE_FAULT=loss
gpu_check --rehearse --results "$work/r" --torch-stand-in steps qwen report
page_says "programs that do not compute the same are not compared in silence" 'At step 1 .*not the same'
page_says "... of Qwen3-0.6B, too" 'First losses, all parameters: .*not the same'

export REHEARSE_FAULT=torch
gpu_check --rehearse --results "$work/r" --torch-stand-in steps report
page_says "a PyTorch that fails fails its stage" '^\| steps \| failed \|'
page_says "... and ours is measured all the same" '^\| ours \| B 2 T 16 \| [0-9.]+ \|'

export REHEARSE_FAULT=ncu
gpu_check --rehearse --results "$work/r" profile report
page_says "a driver that lets nobody count is said, and is no failure" '^- ncu, attention_forward.*ERR_NVGPUCTRPERM'

export REHEARSE_FAULT=hang
gpu_check --rehearse --results "$work/r" --limit sanitizer=5 sanitizer report
page_says "a stage that hangs is stopped at its limit" '^\| sanitizer \| stopped: ran past its 5 s \|'
unset REHEARSE_FAULT
gpu_check --rehearse --results "$work/r" --budget 3 tests report
page_says "a stage for which no time is left is not started" '^\| tests \| not started: no time left \|'
finish
