#!/usr/bin/env bash
# Everything that only a machine with a GPU can tell: builds natively, runs every test with kernels on the GPU, then under
# compute-sanitizer, measures ops and training steps beside PyTorch's, and writes doc/gpu/<date>-<card>.md.
#     dev/gpu_check.sh                          all stages: build tests sanitizer ops profile steps trainers qwen report
#     dev/gpu_check.sh build tests              some of them, in this order; what they found stays in --results
#     dev/gpu_check.sh call 1                   of three calls of 570 s at most: build tests sanitizer; 2: build ops steps; 3: build profile trainers qwen
#     dev/gpu_check.sh report                   the page again from --results; needs no GPU
#     dev/gpu_check.sh pack                     before going to a machine without a network: .gpu/ gets what a build needs from here
#     dev/gpu_check.sh --rehearse               every stage with stand-ins for what needs a GPU, tiny; two minutes, and what building takes
# Options:
#     --results DIR     where stages leave what they found (build/gpu_check); ten files, log.txt has all output
#     --and DIR         results of other stages on the same card, brought home from elsewhere: for report; may be given again
#     --budget SECONDS  for everything: a stage gets what is left, and is not started when nothing is
#     --limit STAGE=SECONDS   instead of the stage's own limit
#     --llmc DIR        llm.c with its train_gpt2cu built there: measured beside ours
#     --batch N         rows of a training step (64, of 1024 tokens)
#     --steps N, --rounds N, --texts "MODEL ..."   where time is short: steps of a run (200; of `trainers` 40 at most), turns of all programs (3), models
#                     that write (small 6.9b); a rehearsal has its own
# A stage that fails or takes too long is recorded and the next one begins. Needs nvcc, cuBLASLt and NCCL (dev/cuda_flags.sh);
# PyTorch is used where .venv's Python or python3 has it. The card's settings are left as they are.
# Status: 0 all is well, 1 a stage found something or failed (the page says what), 2 no GPU here or a wrong option.
set -u
export LC_ALL=C
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$(dirname "$0")/.." || exit 1
PATH=$PATH:/usr/local/cuda/bin:/usr/local/nvidia/bin  # where containers keep the toolkit's tools and the driver's

results=build/gpu_check
budget=100000
llmc=""
batch=64
seq=1024
rounds=3
steps=200  # a card is at its temperature, and has lowered its clocks, after some ten seconds
verified=5  # steps with --verify-every 1
text_models=(small 6.9b)  # of train_moe, that write text
text_tokens=128
trainers=(moe qwen3 qwen36 deepseek_v4 glm5)
trainer_rows=16 trainer_model=small
rehearse=0
inside=""  # the stage that this process is, and what runs PyTorch there
torch=""
stand_in=0
stages=()
others=()
together=""  # the stages of this call, for the one that builds
declare -A limit=([tests]=300 [sanitizer]=480 [ops]=300 [profile]=240 [steps]=780 [trainers]=240 [qwen]=540 [report]=60)

fail_input() { echo "gpu_check.sh: $1" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --rehearse) rehearse=1; shift; continue ;;
        --torch-stand-in) stand_in=1; shift; continue ;;  # also where PyTorch is, for dev/test_gpu_check.sh
        --results | --budget | --limit | --llmc | --batch | --steps | --rounds | --texts | --inside | --torch | --and | --together | call) [ $# -gt 1 ] || fail_input "$1: expected a value, found none" ;;
        pack | build | tests | sanitizer | ops | profile | steps | trainers | qwen | report) stages+=("$1"); shift; continue ;;
        *) fail_input "expected stages (build tests sanitizer ops profile steps trainers qwen report), pack or an option, found \"$1\"" ;;
    esac
    case $1 in
        --results) results=$2 ;;
        --budget) budget=$2 ;;
        --limit) limit[${2%%=*}]=${2#*=} ;;
        --llmc) llmc=$2 ;;
        --batch) batch=$2 ;;
        --steps) steps=$2 ;;
        --rounds) rounds=$2 ;;
        --texts) read -ra text_models <<<"$2" ;;
        --inside) inside=$2 ;;
        --torch) torch=$2 ;;
        --and) others+=("$2") ;;
        --together) together=$2 ;;
        call)  # each on a machine of its own, so each builds, and only what it runs
            budget=570
            case $2 in
                1) stages+=(build tests sanitizer) limit[build]=220 limit[tests]=120 ;;
                2) stages+=(build ops steps) limit[build]=120 limit[ops]=120 limit[steps]=320 ;;
                3) stages+=(build profile trainers qwen) limit[build]=150 limit[profile]=90 limit[trainers]=60 limit[qwen]=260 ;;
                *) fail_input "call: expected 1, 2 or 3, found \"$2\"" ;;
            esac
            ;;
    esac
    shift 2
done
whole() { [[ $2 =~ ^[1-9][0-9]{0,8}$ ]] && [ "$2" -ge "$3" ] || fail_input "$1: expected a whole number from $3 on, found \"$2\""; }
whole --budget "$budget" 1
whole --batch "$batch" 1
whole --steps "$steps" 2  # half of them are measured
whole --rounds "$rounds" 1
[[ ! "${text_models[*]}" =~ [^a-z0-9._\ -] ]] || fail_input "--texts: expected presets of train_moe, found \"${text_models[*]}\""
[ -n "${limit[build]:-}" ] || limit[build]=$([ $rehearse = 1 ] && echo 1800 || echo 360)  # a rehearsal's are of -O3, on few cores
for stage in "${!limit[@]}"; do
    [[ " build tests sanitizer ops profile steps trainers qwen report " == *" $stage "* ]] || fail_input "--limit: expected STAGE=SECONDS, found \"$stage\""
    whole "--limit $stage" "${limit[$stage]}" 1
done
[ ${#stages[@]} -gt 0 ] || stages=(build tests sanitizer ops profile steps trainers qwen report)
[ -n "$together" ] || together="${stages[*]}"

# ---------------------------------------------------------------------------------------------------------------------
# The machine: what differs between a GPU and a rehearsal.

small=()
graph=(--graph 1)
qwen_rows=8  # of a batch of Qwen3-0.6B
if [ $rehearse = 1 ]; then
    [ "$results" != build/gpu_check ] || results=build/gpu_rehearsal
    PATH=$PWD/dev/gpu_rehearsal:$PATH  # stand-ins for nvidia-smi, compute-sanitizer and ncu
    small=(--small)
    graph=()  # no GPU, no graph: the same program again
    rounds=1 steps=4 verified=2 batch=2 seq=16 qwen_rows=2 text_models=(tiny) text_tokens=200 trainers=(moe qwen3) trainer_rows=2 trainer_model=tiny
    export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive  # tiny loops on a busy machine: threads that spin would wait for each other
fi
mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
cores=$(nproc 2>/dev/null || echo 2)
commit=$(git describe --always --dirty 2>/dev/null || cat .gpu/commit 2>/dev/null || echo unknown)

# the command that runs PyTorch's side, nothing where no Python's PyTorch sees the GPU; a rehearsal takes any PyTorch
find_torch() {
    local candidate
    if [ $stand_in = 1 ]; then echo "dev/gpu_rehearsal/pytorch"; return; fi
    for candidate in "$PWD/.venv/bin/python" python3; do
        if "$candidate" -c "import sys, torch; sys.exit(not ($rehearse or torch.cuda.is_available()))" 2>/dev/null; then
            echo "$candidate dev/bench/pytorch_gpu.py"
            return
        fi
    done
    if [ $rehearse = 1 ]; then echo "dev/gpu_rehearsal/pytorch"; fi
}

# folder of the build with PRECISION $1
folder() {
    if [ $rehearse = 1 ]; then make -s folder; else make -s cuda_folder "PRECISION=$1"; fi
}

# what the build with PRECISION $1 has, as names in its folder
programs() {
    if [ $rehearse = 1 ]; then
        echo train_gpt2 "${trainers[@]/#/train_}" test_gelu test_layernorm bench/gpu_ops bench/gated_delta
    else
        make -s cuda_names "PRECISION=$1"
    fi
}

# this call builds everything: it has no other stage, or every one
builds_all() { [ "$together" = build ] || [[ $together == *" tests "*" qwen"* ]]; }

# of these, what the stages of this call run; another precision than bf16 is for tests
needed() {
    local name stage
    for name in $(programs "$1"); do
        case $name in
            test_*) stage="tests sanitizer" ;;
            bench/gpu_ops) stage="ops profile" ;;
            bench/gated_delta) stage=ops ;;
            train_gpt2*) stage="steps profile" ;;
            train_moe) stage="steps trainers" ;;
            train_qwen3) stage="trainers qwen" ;;
            train_*) stage=trainers ;;
            *) stage=none ;;
        esac
        builds_all || [[ " $together " =~ \ (${stage// /|})\  ]] || continue
        builds_all || [ "$1" = bf16 ] || [[ $name == test_* ]] || continue
        echo "$name"
    done
}

tests() { programs exact | tr ' ' '\n' | grep '^test_'; }

trainer() {
    if [ $rehearse = 1 ]; then echo "$(folder)/train_gpt2"; else echo "$(folder bf16)/train_gpt2cu"; fi
}

query() { nvidia-smi "--query-gpu=$1" --format=csv,noheader 2>/dev/null | head -n 1; }

write_machine() {
    {
        printf 'card\t%s\n' "$(query name)"
        printf 'memory\t%s\n' "$(query memory.total)"
        printf 'driver\t%s\n' "$(query driver_version)"
        printf 'clocks\t%s now, at most %s; memory %s\n' "$(query clocks.sm)" "$(query clocks.max.sm)" "$(query clocks.mem)"
        printf 'power limit\t%s\n' "$(query power.limit)"
        printf 'processor\t%s, %s cores\n' "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)" "$cores"
        printf 'built in\t%s\n' "$(folder bf16)"
        printf 'nvcc\t%s\n' "$(nvcc --version 2>/dev/null | sed -n 's/^Build //p')"
        printf 'host compiler\t%s\n' "$(g++ --version 2>/dev/null | head -n 1)"
        printf 'PyTorch\t%s\n' "$([ -n "$torch" ] && $torch versions 2>/dev/null || echo none that sees the GPU)"
        printf 'commit\t%s\n' "$commit"
        printf 'date\t%s\n' "$(date +%F)"
        printf 'kind\t%s\n' "$([ $rehearse = 1 ] && echo rehearsal || echo measured)"
    } >"$results/machine.txt"
}

# ---------------------------------------------------------------------------------------------------------------------
# Stages. Each begins its own files in $results anew and prints what it does; all of that goes to log.txt as well.

# headers and static libraries of jansson, xxHash, PCRE2, libpng, libjpeg and zlib, and the commit, for a machine that has neither them nor a network
pack() {
    local name file
    rm -rf .gpu
    mkdir -p .gpu/include .gpu/lib
    for file in $(printf '#include <jansson.h>\n#include <xxhash.h>\n#include <zlib.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n#include <stdio.h>\n#include <png.h>\n#include <jpeglib.h>\n' \
        | cc -M -x c - | tr ' \\' '\n\n' | grep -E '/(jansson|xxh|xxh3|pcre2|zlib|zconf|png|jpeglib|jconfig|jmorecfg)[^/]*$'); do
        cp "$file" .gpu/include/
    done
    for name in jansson xxhash pcre2-8 png jpeg z; do
        file=$(cc -print-file-name=lib$name.a)
        [ -e "$file" ] || { echo "gpu_check.sh: no lib$name.a here: install the -dev package" >&2; return 1; }
        cp "$file" .gpu/lib/
    done
    git describe --always --dirty >.gpu/commit
    du -sh .gpu
}

stage_build() {
    local precision name made status=0
    : >"$results/build.tsv"
    for precision in bf16 exact; do
        made=$(folder $precision)
        # other compilers than CI's may warn of more: that is for CI
        if [ $rehearse = 1 ]; then
            make -k -j"$cores" $(needed $precision | sed "s,^,$made/,")
        else
            make -k -j"$cores" $(needed $precision | sed "s,^,$made/,") "PRECISION=$precision" NVCC_WARNINGS=-w "COMMIT=$commit"
        fi
        for name in $(needed $precision); do
            if [ -x "$made/$name" ] && make -q NVCC_WARNINGS=-w "COMMIT=$commit" "PRECISION=$precision" "$made/$name" >/dev/null 2>&1; then
                printf '%s\t%s\tok\n' $precision "$name"
            else
                printf '%s\t%s\tdoes not build\n' $precision "$name"
                status=1
            fi >>"$results/build.tsv"
        done
    done
    return $status
}

# one test program: PRECISION NAME PATH; a line for tests.tsv
run_test() {
    local out status begin=$SECONDS count
    out=$(timeout --foreground 150 "$3" 2>&1 </dev/null)
    status=$?
    count=$(grep -E '^[0-9]+ passed, [0-9]+ failed' <<<"$out" | tail -n 1)
    [ -n "$count" ] || count="0 passed, 1 failed"
    if [ $status != 0 ] && [[ $count == *" 0 failed"* ]]; then count="0 passed, 1 failed"; fi  # it died after its last line
    read -r p _ f _ s _ <<<"${count//,/}"
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$p" "$f" "${s:-0}" $((SECONDS - begin)) "$(explain "$out" "$status")"
    printf '# %s %s\n%s\n' "$1" "$2" "${out:0:50000}" >&2
}

# why it failed, in a line: nothing when it did not
explain() {
    [ "$2" != 0 ] || return
    if [ "$2" = 124 ]; then echo "ran past its time"; return; fi
    { grep -A 1 '^FAIL' <<<"$1"; echo "status $2: $(tail -n 1 <<<"$1")"; } | head -n 2 | tr '\t\n' '  ' | cut -c 1-300
}

# the tool's first words; where it has none, the program's last
findings() { sed -nE '/COMPUTE-SANITIZER/d; s/^=+ +([A-Za-z(])/\1/p' <<<"$1" | grep . || echo "status $2: $(tail -n 1 <<<"$1")"; }

# one tool: TOOL PRECISION NAME PATH; a line for sanitizer.tsv
run_sanitizer() {
    local out status verdict
    out=$(timeout --foreground 200 compute-sanitizer --tool "$1" --error-exitcode 9 "$4" 2>&1 </dev/null)
    status=$?
    case $status in
        0) verdict=clean ;;
        9) verdict="errors" ;;
        124) verdict="no verdict: ran past 200 s" ;;
        *) verdict="test failed" ;;
    esac
    printf '%s\t%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$verdict" \
        "$([ $status = 0 ] || findings "$out" "$status" | head -n 3 | tr '\t\n' '  ' | cut -c 1-300)"
    printf '# %s %s %s\n%s\n' "$1" "$2" "$3" "${out:0:50000}" >&2
}

# runs FUNCTION with each line of standard input as its arguments, N at a time; lines come out whole
in_parallel() {
    export -f run_test run_sanitizer explain findings
    xargs -P "$1" -I '{}' bash -c "$2 {}"
}

stage_tests() {
    for precision in exact bf16; do
        made=$(folder $precision)
        for name in $(tests); do echo "$precision $name $made/$name"; done
    done | in_parallel $((cores > 4 ? 4 : cores)) run_test >"$results/tests.tsv"
    sort -o "$results/tests.tsv" "$results/tests.tsv"
    cat "$results/tests.tsv"
    awk -F '\t' '{ failed += $4 } END { exit failed > 0 || NR == 0 }' "$results/tests.tsv"
}

stage_sanitizer() {
    command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer on this machine"; return 1; }
    # the fast kernels with every tool; the exact ones, which share their indexing, with the first. What may not be missed
    # comes first: the time may not do for all
    local of_both='^(memcheck|racecheck) bf16 test_(attention|layernorm|embedding|crossentropy|matmul) '
    for tool in memcheck racecheck synccheck initcheck; do
        for name in $(tests); do echo "$tool bf16 $name $(folder bf16)/$name"; done
    done >"$results/all"
    for name in $(tests); do echo "memcheck exact $name $(folder exact)/$name"; done >>"$results/all"
    { grep -E "$of_both" "$results/all"; grep -vE "$of_both" "$results/all"; } >"$results/list"
    rm "$results/all"
    in_parallel $((cores > 8 ? 8 : cores)) run_sanitizer <"$results/list" >"$results/sanitizer.tsv"
    rm "$results/list"
    sort -o "$results/sanitizer.tsv" "$results/sanitizer.tsv"
    cat "$results/sanitizer.tsv"
    awk -F '\t' '$4 != "clean" { bad++ } END { exit bad > 0 || NR == 0 }' "$results/sanitizer.tsv"
}

# in turn, so that all see the same clocks and temperature; the report takes minima
stage_ops() {
    local round status=0
    : >"$results/ops.tsv"  # the profile comes later
    for ((round = 1; round <= rounds; round++)); do
        "$(folder bf16)/bench/gpu_ops" --rounds 5 "${small[@]}" >>"$results/ops.tsv" || status=1
        "$(folder bf16)/bench/gated_delta" --rounds 5 "${small[@]}" >>"$results/ops.tsv" || status=1
        [ -z "$torch" ] || $torch ops --rounds 5 "${small[@]}" >>"$results/ops.tsv" || status=1
        [ -z "$torch" ] || $torch attention --rounds 5 "${small[@]}" >>"$results/ops.tsv" || status=1
        [ $round != 1 ] || printf '# clocks after the first round: %s\n' "$(query clocks.sm)" >>"$results/ops.tsv"
    done
    cat "$results/ops.tsv"
    return $status
}

# how long each kernel of a training step takes, alone: lines "launch" of ops.tsv. Two steps, for the first chooses algorithms
profile_step() {
    local out
    write_tokens "$work/model" || return
    out=$(ncu --clock-control none --csv --metrics gpu__time_duration.sum "$(trainer)" --config "$work/model/config.json" --train "$work/model/tokens.bin" \
        --batch-size "$batch" --seq-len "$seq" --steps 2 --warmup 0 --eval-every 0 --save-every 0 --run "$work/run" 2>&1 </dev/null) || { echo "$out" | tail -n 5; return 1; }
    python3 dev/gpu_report.py --step <<<"$out" | tee -a "$results/ops.tsv"
}

# What Nsight Compute counts: the time of each kernel of a step; and of some kernels of gpu_ops, the second time that they run: a case, its kernels,
# how many (LayerNorm's backward has two, and so has a product whose sum is split). Lines "ncu CASE" of ops.tsv
stage_profile() {
    local only kernels n out status=0
    work=$(mktemp -d)  # not local: the trap reads it
    trap 'rm -rf "$work"' EXIT
    touch "$results/ops.tsv"
    sed -i '/^ncu \|^# ncu\|^launch\t/d' "$results/ops.tsv"
    if ! command -v ncu >/dev/null; then
        echo "# ncu: not on this machine, no kernel was profiled" | tee -a "$results/ops.tsv"
        return
    fi
    while IFS=$'\t' read -r only kernels n; do
        out=$(ncu --clock-control none --csv --page details --section SpeedOfLight --section ComputeWorkloadAnalysis --section Occupancy --section LaunchStats \
            --kernel-name "regex:$kernels" --launch-skip "$n" --launch-count "$n" "$(folder bf16)/bench/gpu_ops" --only "$only" --rounds 1 "${small[@]}" 2>&1 </dev/null)
        if [ $? != 0 ]; then
            printf '# ncu, %s: %s\n' "$only" "$(grep -m 1 ERR <<<"$out" || tail -n 1 <<<"$out")" | tee -a "$results/ops.tsv"
            if grep -q ERR_NVGPUCTRPERM <<<"$out"; then return; fi  # the driver lets nobody but root count: not our fault
            status=1
        else
            python3 dev/gpu_report.py --ncu "$only" <<<"$out" | tee -a "$results/ops.tsv"
        fi
    done <<'KERNELS'
attention_forward B 8 T 1024 NH 12	flash_forward	1
attention_backward B 8 T 1024 NH 12	flash_backward	2
attention_forward B 8 T 4096 NH 16	flash_forward	1
attention_backward B 8 T 4096 NH 16	flash_backward	2
residual_layernorm_forward	layernorm	1
layernorm_backward	layernorm_backward	2
crossentropy	crossentropy	1
adamw_update	adamw	1
matmul_forward fc	.	1
matmul_backward_weight attproj	.	2
KERNELS
    grep -q '^ncu ' "$results/ops.tsv" || status=1
    profile_step || status=1
    return $status
}

# config.json and one batch of random tokens, where there is no PyTorch to write weights too
write_tokens() {
    python3 - "$1" "$batch" "$seq" "${small[@]}" <<'PYTHON'
import array, json, os, random, struct, sys
folder, batch, seq = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
layers, heads, channels, vocabulary, positions = (2, 2, 32, 256, 64) if len(sys.argv) > 4 else (12, 12, 768, 50304, 1024)
os.makedirs(folder, exist_ok=True)
with open(f"{folder}/config.json", "w") as file:
    json.dump({"model_type": "gpt2", "n_positions": positions, "vocab_size": vocabulary, "n_layer": layers, "n_head": heads,
               "n_embd": channels}, file)
rng = random.Random(1)
tokens = array.array("H", (rng.randrange(vocabulary) for _ in range(batch * seq + 1)))
with open(f"{folder}/tokens.bin", "wb") as file:
    file.write(struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0") + tokens.tobytes())
PYTHON
}

# the median of numbers
median() { sort -g | awk '{ x[NR] = $1 } END { if (NR) print x[int((NR + 1) / 2)] }'; }

# of the second half of the steps: the first ones choose algorithms, take memory and warm the card
of_steps() { tail -n $((steps - steps / 2)) | median; }

# step, loss and ms of each step of RUN, into $work/ours
read_steps() { sed -n 's/.*"step": *\([0-9]*\), *"loss": *\([^,]*\),.*"ms": *\([0-9.]*\).*/\1 \2 \3/p' "$1/metrics.jsonl" >"$work/ours"; }

# clock and power once a second, into $work/card, until rest_card
watch_card() {
    while :; do nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader,nounits; sleep 1; done >"$work/card" 2>/dev/null &
    watcher=$!
}
rest_card() {  # PROGRAM
    kill "$watcher" && wait "$watcher" 2>/dev/null
    printf '# %s, medians of its run: clock %s MHz, power %s W\n' "$1" "$(cut -d , -f 1 "$work/card" | median)" \
        "$(cut -d , -f 2 "$work/card" | median)" >>"$results/steps.tsv"
}

step_ours() {  # MODEL ROWS PROGRAM OPTION...
    local model=$1 rows=$2 program=$3 curve="loss $3" run=$work/run start=(--config "$1/config.json")
    shift 3
    [ "$rows" = "$batch" ] || curve+=", $rows row"
    [ ! -e "$model/model.safetensors" ] || start=(--from "$model")
    rm -rf "$run"
    "$(trainer)" "${start[@]}" "$@" --train "$model/tokens.bin" --batch-size "$rows" --seq-len "$seq" --steps "$steps" --schedule constant \
        --lr 3e-4 --warmup 0 --eval-every 0 --save-every 0 --run "$run" || return
    read_steps "$run"
    awk -v "curve=$curve" '{ printf "%s\t%s\t%s\n", curve, $1, $2 }' "$work/ours" >>"$results/steps.tsv"
    printf '%s\tstep B %s T %s\t%s\n' "$program" "$rows" "$seq" "$(cut -d ' ' -f 3 "$work/ours" | of_steps)" >>"$results/steps.tsv"
    rm -rf "$run"
}

# each step computed twice and compared, at the full size: MODEL
step_verified() {
    local start=(--config "$1/config.json") said="no bit differs" status=0
    [ ! -e "$1/model.safetensors" ] || start=(--from "$1")
    "$(trainer)" "${start[@]}" --train "$1/tokens.bin" --batch-size "$batch" --seq-len "$seq" --steps $verified --schedule constant --lr 3e-4 \
        --warmup 0 --eval-every 0 --save-every 0 --verify-every 1 --run "$work/run" || { status=1; said="**failed**, see log.txt"; }
    printf '# --verify-every 1, %s steps of B %s T %s: %s\n' "$verified" "$batch" "$seq" "$said" >>"$results/steps.tsv"
    rm -rf "$work/run"
    return $status
}

# milliseconds to start a model and write COUNT tokens, into $work/text: write_text COUNT PROGRAM OPTION...
write_text() {
    local begin count=$1 program=$2
    begin=$(date +%s%N)
    "$(folder bf16)/$program" "${@:3}" --generate "The" --temperature 0 --max-new-tokens "$count" >"$work/text" || return
    echo $((($(date +%s%N) - begin) / 1000000))
}

# Milliseconds of a token: the start, the prompt and the first tokens are in the shorter text too. A still longer one
# must differ from the longer, or that ended early and nothing was measured: step_text PROGRAM OPTION...
step_text() {
    local few many try more=$((16 + text_tokens + 16))
    for try in 1 2 3 4 5; do  # of a machine that is busy with others, the longer text may have taken less time
        few=$(write_text 16 "$@") && many=$(write_text $((16 + text_tokens)) "$@") || return
        [ "$many" -le "$few" ] || break
    done
    if [ "$many" -le "$few" ]; then echo "$text_tokens tokens more take no time: $*" >&2; return 1; fi
    mv "$work/text" "$work/text_many"
    write_text $more "$@" >/dev/null || return
    if cmp -s "$work/text" "$work/text_many"; then echo "the text of $* ended before $more tokens" >&2; return 1; fi
    awk -v ms=$((many - few)) -v n=$text_tokens 'BEGIN { printf "%.4f\n", ms / n }'
}

step_torch() {  # MODEL MODE
    $torch step "$1" --mode "$2" --batch "$batch" --seq "$seq" --steps "$steps" "${small[@]}" >"$work/torch" || return
    sed -n "s/^loss\t/loss PyTorch $2\t/p; /^PyTorch/p" "$work/torch" >>"$results/steps.tsv"
}

step_llmc() {  # MODEL
    (cd "$llmc" && ./train_gpt2cu -i "$1/tokens.bin" -j "$1/tokens.bin" -e d12 -b "$batch" -t "$seq" -d $((batch * seq)) -x "$steps" \
        -l 3e-4 -v 100000 -s 100000 -m 1 -h 0) >"$work/llmc" || return
    printf 'llm.c\tstep B %s T %s\t%s\n' "$batch" "$seq" "$(sed -n 's/.*| *\([0-9.]*\) ms |.*/\1/p' "$work/llmc" | of_steps)" >>"$results/steps.tsv"
}

stage_steps() {
    local round status=0 model rows
    work=$(mktemp -d)  # not local: the trap reads it
    trap 'rm -rf "$work"' EXIT
    model=$work/model
    echo "# $steps steps a run, $(((rounds + 1) / 2)) of each program" >"$results/steps.tsv"
    if [ -n "$torch" ]; then
        $torch model "$model" --batch "$batch" --seq "$seq" "${small[@]}" || { echo "PyTorch cannot write the model"; torch=""; status=1; }
    fi
    [ -e "$model/tokens.bin" ] || write_tokens "$model" || return
    step_verified "$model" || status=1
    for ((round = 1; round <= (rounds + 1) / 2; round++)); do
        # of one row, too: the fewer, the longer the GPU waits for the host
        for rows in "$batch" 1; do
            watch_card
            step_ours "$model" "$rows" ours || status=1
            rest_card "ours, B $rows"
            step_ours "$model" "$rows" "ours, --graph 1" "${graph[@]}" || status=1
        done
        [ -z "$torch" ] || step_torch "$model" eager || status=1
        [ -z "$torch" ] || step_torch "$model" compiled || status=1
        [ -z "$llmc" ] || step_llmc "$model" || status=1
    done
    local ms
    for model in "${text_models[@]}"; do
        if ms=$(step_text train_moe --model "$model"); then printf 'ours\ttext %s\t%s\n' "$model" "$ms" >>"$results/steps.tsv"; else status=1; fi
    done
    cat "$results/steps.tsv"
    return $status
}

# a step of each other trainer, of its preset "small" on our own pages
stage_trainers() {
    local name run status=0
    work=$(mktemp -d)  # not local: the trap reads it
    trap 'rm -rf "$work"' EXIT
    run=$work/run
    : >"$results/trainers.tsv"
    cat doc/*.md >"$work/text"
    for name in "${trainers[@]}"; do
        rm -rf "$run"
        "$(folder bf16)/train_$name" --model "$trainer_model" --train "$work/text" --batch-size "$trainer_rows" --seq-len "$seq" --steps $((steps < 40 ? steps : 40)) \
            --eval-every 0 --sample-every 0 --save-every 0 --run "$run" 2>&1 | tee "$work/said"
        [ "${PIPESTATUS[0]}" = 0 ] || { status=1; continue; }
        read_steps "$run"
        printf 'train_%s\t%s B %s T %s\t%s\t%s\t%s\n' "$name" "$trainer_model" "$trainer_rows" "$seq" "$(tail -n $(($(wc -l <"$work/ours") / 2)) "$work/ours" | cut -d ' ' -f 3 | median)" \
            "$(sed -n 's/^| parameters *| *\([^ =]*\).*/\1/p' "$work/said")" "$(head -n 1 "$work/ours" | cut -d ' ' -f 2) $(tail -n 1 "$work/ours" | cut -d ' ' -f 2)" >>"$results/trainers.tsv"
        sed -n "s/^.*slow: /# train_$name: /p" "$work/said" >>"$results/trainers.tsv"
    done
    cat "$results/trainers.tsv"
    return $status
}

qwen_ours() {  # TASK OPTION...
    local task=$1 run=$work/run case="$1 B $qwen_rows T $seq"
    shift
    rm -rf "$run"
    "$(folder bf16)/train_qwen3" --from "$work/model" --train "$work/shape/tokens.bin" --batch-size "$qwen_rows" --seq-len "$seq" --steps "$steps" \
        --schedule constant --lr 3e-4 --warmup 0 --eval-every 0 --save-every 0 --run "$run" "$@" || return
    read_steps "$run"
    awk -v task="$task" '{ printf "loss %s ours\t%s\t%s\n", task, $1, $2 }' "$work/ours" >>"$results/qwen.tsv"
    printf 'ours\t%s\t%s\n' "$case" "$(cut -d ' ' -f 3 "$work/ours" | of_steps)" >>"$results/qwen.tsv"
    rm -rf "$run"
}

qwen_torch() {  # TASK
    $torch qwen "$work/model" --task "$1" --batch "$qwen_rows" --seq "$seq" --steps "$steps" >"$work/torch" || return
    sed -n "s/^loss /loss $1 /p; /\t$1 B /p" "$work/torch" >>"$results/qwen.tsv"
}

# Qwen3-0.6B with random weights, which our trainer draws and all programs read: all parameters, LoRA, a text
stage_qwen() {
    local round status=0 task ms
    work=$(mktemp -d)  # not local: the trap reads it
    trap 'rm -rf "$work"' EXIT
    : >"$results/qwen.tsv"
    python3 dev/bench/qwen_shape.py "$work/shape" --batch "$qwen_rows" --seq "$seq" "${small[@]}" &&
        "$(folder bf16)/train_qwen3" --config "$work/shape/config.json" --tokenizer "$work/shape/tokenizer.json" --export-hf "$work/model" || return
    cp "$work/shape/tokens.bin" "$work/model/"
    for ((round = 1; round <= (rounds + 1) / 2; round++)); do
        qwen_ours full || status=1
        qwen_ours lora --lora-rank 16 || status=1
        for task in full lora; do [ -z "$torch" ] || qwen_torch $task || status=1; done
    done
    if ms=$(step_text train_qwen3 --from "$work/model"); then printf 'ours\twrite\t%s\n' "$ms" >>"$results/qwen.tsv"; else status=1; fi
    if [ -n "$torch" ]; then $torch qwen-text "$work/model" --tokens $text_tokens --rounds 3 | grep -v '^#' >>"$results/qwen.tsv" || true; fi
    cat "$results/qwen.tsv"
    return $status
}

stage_report() {
    local name page
    name=$(sed -n 's/^card\t//p' "$results/machine.txt" 2>/dev/null | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//; s/[^a-z0-9-]//g')
    [ -n "$name" ] || { echo "nothing in $results: run the other stages first"; return 1; }
    page=doc/gpu/$(sed -n 's/^date\t//p' "$results/machine.txt")-$name.md
    [ $rehearse = 0 ] || page=$results/report.md
    python3 dev/gpu_report.py "$results" "${others[@]}" >"$results/page" && mkdir -p "$(dirname "$page")" && mv "$results/page" "$page" && echo "$page"
}

# ---------------------------------------------------------------------------------------------------------------------
# One stage after the other, each a process of its own under its limit.

if [ -n "$inside" ]; then
    "stage_$inside"
    exit
fi
if [ "${stages[0]}" = pack ]; then
    pack
    exit
fi
if [ "${stages[*]}" != report ]; then
    [ -n "$(query name)" ] || fail_input "no GPU here (nvidia-smi names none); to try the script without one: dev/gpu_check.sh --rehearse"
    torch=$(find_torch)
    write_machine
fi

options=(--results "$results" --batch "$batch" --steps "$steps" --rounds "$rounds" --texts "${text_models[*]}" --torch "$torch" --together "$together")
[ $rehearse = 0 ] || options+=(--rehearse)
for other in "${others[@]}"; do options+=(--and "$other"); done
[ -z "$llmc" ] || options+=(--llmc "$(cd "$llmc" 2>/dev/null && pwd)")
result=0 running=
trap 'trap - TERM INT HUP; [ -z "$running" ] || kill "$running" 2>/dev/null; exit 143' TERM INT HUP  # nothing goes on without this script
if [ "${stages[0]}" = build ]; then (cd "$results" && rm -f -- *.tsv log.txt); fi  # what was found is of other programs
touch "$results/stages.tsv"
for stage in "${stages[@]}"; do
    seconds=${limit[$stage]}
    # the page is written whatever happens
    [ "$stage" = report ] || [ $((budget - SECONDS)) -ge "$seconds" ] || seconds=$((budget - SECONDS))
    begin=$SECONDS
    if [ "$seconds" -lt 5 ]; then
        said="not started: no time left"
    else
        timeout -k 5 "$seconds" "$script" "${options[@]}" --inside "$stage" >"$results/output" 2>&1 &
        running=$!
        wait "$running"
        status=$?
        case $status in
            0) said=ok ;;
            124 | 137) said="stopped: ran past its $seconds s" ;;
            *) said=failed ;;
        esac
        { echo "## $stage"; cat "$results/output"; } >>"$results/log.txt"
    fi
    [ "$said" = ok ] || result=1
    { grep -v "^$stage"$'\t' "$results/stages.tsv"; printf '%s\t%s\t%s\n' "$stage" "$said" $((SECONDS - begin)); } >"$results/stages.new"
    mv "$results/stages.new" "$results/stages.tsv"
    printf '%-10s %s (%d s)\n' "$stage" "$said" $((SECONDS - begin))
    if [ "$said" != ok ] || [ "$stage" = report ]; then tail -n 15 "$results/output" 2>/dev/null | sed 's/^/    /'; fi
    rm -f "$results/output"
done
exit $result
