#!/usr/bin/env bash
# Runs tests and adds up their "N passed, N failed" lines.
#     dev/test.sh check PROGRAM...   the given test programs
#     dev/test.sh quick              `make test`: what a person waits for, about six minutes on 2 cores
#     dev/test.sh rest               `make test-all`: the rest, most of an hour; of long lists that are seldom red a commit's share
#     dev/test.sh all                the rest, and all of each list: two hours
# REST_FOLLOWS=1, as .ci/run says it: what rest runs in full, quick leaves but for a third.
# Each part prints its own lines; a part that ends with status 0 and prints no count is one promise kept.
set -u
cd "$(dirname "$0")/.."
passed=0
failed=0
skipped=0
jobs=$(nproc 2>/dev/null || echo 1)
at_once=$jobs  # parts
n_parts=0
declare -a names
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_WAIT_POLICY=passive KMP_BLOCKTIME=0  # 7 threads that spin on 2 cores wait for each other
longest=1500  # seconds of a part: what takes longer hangs, and is stopped with all that it started
now=$(date +%s)
until=${TEST_UNTIL:-$((now + 86400))}  # no part begins after this second of the epoch; what does not is skipped
end=$((until + 1020))  # nor runs after this one

skip() {  # NAME WHY
    printf '%-52s skipped: %s\n' "$1" "$2"
    skipped=$((skipped + 1))
}

# no_time_is_left NAME: then it is skipped
no_time_is_left() { [ "$(date +%s)" -ge "$until" ] && skip "$1" "no time is left"; }

# cpu_seconds FILE: what a shell has started, of what `times` of that very shell has written: 1m2.345s 0m6.789s
cpu_seconds() { tail -n 1 "$1" | tr ms '  ' | awk '{ print 60 * ($1 + $3) + $2 + $4 }'; }

# part NAME COMMAND...: run it when fewer than at_once others run, then show what it prints and add its count
part() {
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do finish_part; done
    n_parts=$((n_parts + 1))
    local result=$work/$n_parts left
    names[n_parts]=$1
    if no_time_is_left "$1"; then return; fi
    shift
    left=$((end - $(date +%s)))
    {
        local start=$SECONDS status
        timeout -k 10 $((left < longest ? left : longest)) "$@" >"$result.output" 2>&1
        status=$?
        if [ $status = 124 ] || [ $status = 137 ]; then echo "stopped after $((SECONDS - start)) s" >>"$result.output"; fi
        times >"$result.times"
        echo "$status $((SECONDS - start)) $(cpu_seconds "$result.times")" >"$result.status"
    } &
}

# waits for a part and shows those that have ended
finish_part() {
    wait -n
    for ((i = 1; i <= n_parts; i++)); do
        [ -e "$work/$i.status" ] || continue
        show_part "${names[i]}" "$(cat "$work/$i.output")" $(cat "$work/$i.status")
        rm "$work/$i.status"
    done
}

# waits for all of them
finish_parts() { while [ -n "$(jobs -p)" ]; do finish_part; done; }

show_part() {
    local name=$1 output=$2 status=$3 seconds=$4 cpu=$5 count
    count=$(grep -E '^[0-9]+ passed, [0-9]+ failed' <<<"$output" | tail -n 1)
    if [ -z "$count" ]; then
        if [ "$status" = 0 ]; then count="1 passed, 0 failed"; else count="0 passed, 1 failed"; fi
    elif [ "$status" != 0 ] && [[ $count == *" 0 failed"* ]]; then
        count="0 passed, 1 failed"  # it died after its last line
    fi
    read -r p _ f _ s _ <<<"${count//,/}"
    passed=$((passed + p))
    failed=$((failed + f))
    skipped=$((skipped + ${s:-0}))
    if [ "$f" != 0 ] || [ "${VERBOSE:-0}" = 1 ]; then echo "$output"; fi
    printf '%-52s %s (%d s, %.0f of a core)\n' "$name" "$count" "$seconds" "$cpu"
}

# what is needed may be missing on a user's machine; CI installs it all
need() {
    command -v "$1" >/dev/null 2>&1 && return 0
    skip "$2" "no $1 here"
    return 1
}

need_nvcc() {
    dev/cuda_flags.sh nvcc >/dev/null 2>&1 && dev/cuda_flags.sh flags >/dev/null && return 0
    skip "$1" "no nvcc here with all its libraries"
    return 1
}

programs() {
    for program in "$@"; do part "$(basename "$(dirname "$program")") $(basename "$program")" "$program"; done
}

# one build: every test program, or the named ones
build_and_run() {
    local variables=$1 tests folder
    shift
    tests=${*:-$(basename -s .c test_*.c)}
    folder=$(make -s folder $variables)
    if make_all "$folder" $variables $(printf "$folder/%s " $tests); then programs $(printf "$folder/%s " $tests); fi
}

# without NAMES NAME...: the names that are not among NAMES
without() { printf '%s\n' "${@:2}" | grep -vxF "$(printf '%s\n' $1)"; }

# simt exact|fast OPS LONG: the CUDA kernels on this CPU, as their exact or their fast build. Whole models and ranks run in
# one order of threads: races of kernels are found by the tests of their ops
simt() {
    make_all "dev/simt, $1" $(printf "build/simt-$1/%s " $2 $3) || return
    programs $(printf "build/simt-$1/%s " $2)
    SIMT_ORDERS=1 programs $(printf "build/simt-$1/%s " $3)
}

# make_all NAME ARGUMENT...: make them all, or say that something does not build
make_all() {
    local name=$1 start=$SECONDS status
    shift
    if no_time_is_left "building: $name"; then return 1; fi
    echo "building: $name"
    (make -s -j"$jobs" "$@"; status=$?; times >"$work/times"; exit $status)
    status=$?
    if [ $status = 0 ]; then
        printf '... built in %d s, %.0f of a core\n' $((SECONDS - start)) "$(cpu_seconds "$work/times")"
        return
    fi
    failed=$((failed + 1))
    printf '%-52s does not build\n' "$name"
    return 1
}

# what scripts share; build_shared PROGRAM...: and these
build_shared() {
    make_all "trainers and tools" $(printf "$(make -s folder)/%s " $(make -s trainers) tools/inspect tools/tokenize launch train_gpt2_faults "$@")
}

python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)

# of what is in llmc/ops and of its exp, log, tanh: at -O3 the compiler may do to a loop whatever it likes
op_tests() {
    basename -s .c $(grep -L 'include "\(train_\|llmc/\(run\|ranks\|models\)/\)' $(grep -l 'include "llmc/ops/' test_*.c))
    echo test_block_matmul test_fmath
}

# commit_of N: a number 0 to N - 1, another one for most commits: which of N shares is tested where not all of them are
commit_of() { echo $((16#$(git rev-parse --short=6 HEAD 2>/dev/null || echo 0) % $1)); }

# share N NAME...: of names that are seldom red one in N, others for most commits; all of them where all are asked for
is_all=0
share() {
    if [ $is_all = 1 ]; then printf '%s\n' "${@:2}"; else printf '%s\n' "${@:2}" | sed -n "$(($(commit_of $1) + 1))~$1p"; fi
}
# half COMMAND...: the same of lines in a script's lists (in_turn of promises.sh)
half() { if [ $is_all = 1 ]; then "$@"; else SHARE=$(commit_of 2)/2 "$@"; fi; }

# shortly NAME SCRIPT...: the script's quick mode. Where rest follows, which runs all of it, a third of them have their turn
n_shortly=0
shortly() {
    n_shortly=$((n_shortly + 1))
    [ "${REST_FOLLOWS-}" = 1 ] && [ $((n_shortly % 3)) != "$(commit_of 3)" ] && return
    part "$1, quick" "$2" quick "${@:3}"
}

# every test, and of the scripts that show what a user meets their most telling promises: by programs that compile in a
# quarter of the time and have the same bits, as matrix shows, where what ships has its turn
quick() {
    export OPT=-Og
    at_once=$((jobs + 1))  # some tests wait for ranks
    build_and_run ""
    build_shared
    at_once=$((jobs + 2))  # scripts wait for disks, for ranks and for what they have killed
    # the longest first, so that all cores are busy to the end
    shortly "train_qwen3" dev/test_qwen.sh
    shortly "several ranks" dev/test_ranks.sh
    shortly "train_qwen36" dev/test_qwen36.sh
    part "tools: inspect, tokenize, plot" dev/test_tools.sh
    shortly "command line and runs" dev/test_cli.sh
    shortly "train_deepseek_v4" dev/test_deepseek_v4.sh
    part "conversations: data, chat" dev/test_sft.sh data chat
    part "mistakes of users, as doc/mistakes.md says" dev/mistakes.sh
    shortly "train_glm5" dev/test_glm5.sh
    shortly "train_mamba_hpn" dev/test_mamba.sh
    shortly "train_moe" dev/test_moe.sh presets bits files
    shortly "checkpoints and faults" dev/test_faults.sh
    shortly "layers on several ranks" dev/test_stages.sh
    part "what make builds anew" dev/test_make.sh
    part "dashboard: what is served, and to whom" $python dev/tools/test_dashboard.py
    part "rewriting of launches" dev/simt/test_rewrite.py
    part "counting of instructions" $python dev/sass.py --self-test
    part "NumPy reference against llm.c's numbers" $python dev/ref/gpt2.py --upstream
    part "NumPy's madd against fmaf" $python dev/ref/check_madd.py
    part "TensorBoard reads our event files" $python dev/ref/check_tensorboard.py "$(make -s folder)/test_tensorboard"
    part "data scripts write what the loaders read" $python dev/data/test_data.py
    part "documents name the right lines" $python dev/check_docs.py
    part "scripts parse" bash -c 'for script in .ci/run dev/*.sh dev/*/*.sh; do bash -n "$script" || exit 1; done'
    finish_parts
    unset OPT
    at_once=$jobs
}

# The same bits from other compilers, vector widths and levels of optimisation; a build for each, half of them at a commit.
# Vectors are written as such, so other widths are the same code at -Og, too
matrix() {
    local bits="test_gpt2 test_matmul test_attention test_layernorm test_crossentropy test_gelu test_fmath"
    local models row opt
    models=$(without test_gpt2 $(make -s trainers | sed 's/train_/test_/g'))  # which hold all their other ops too
    for row in $(share 2 models clang v3 x86-64 levels clang-x86-64 serial); do
        case $row in
            models) build_and_run "" test_gpt2 $models ;;
            v3)  # else native has its width
                if grep -qm1 avx512f /proc/cpuinfo; then build_and_run "ARCH=x86-64-v3 OPT=-Og" $bits $models test_selective_scan test_router; fi ;;
            x86-64) build_and_run "ARCH=x86-64 OPT=-Og" $bits $models test_selective_scan test_router ;;
            levels) for opt in -O0 -O2; do build_and_run "OPT=$opt" test_gpt2 test_fmath; done ;;
            serial) build_and_run "OMP=0 OPT=-Og" test_gpt2 test_matmul test_attention ;;
            clang)  # the most ops; 40 s of compiler each
                if need clang "clang"; then build_and_run "CC=clang OPT=-O1" $bits test_mamba_hpn test_qwen36 test_deepseek_v4; fi ;;
            clang-x86-64) if need clang "clang, x86-64"; then build_and_run "CC=clang ARCH=x86-64 OPT=-O1" $bits; fi ;;
        esac
    done
}

# what quick leaves: other builds, in full every script that has a quick mode, programs for GPUs, tests of the tests; last
# what a slow machine may leave out
rest() {
    local long ops
    long=$(make -s simt_long_tests)
    ops=$(without "$long" $(make -s simt_tests))
    simt exact "$ops" "$(share 2 $long)"
    build_and_run "ASAN=1 OPT=-Og" $(share 3 $(basename -s .c test_*.c))
    make_all "what ships" $(printf "$(make -s folder)/%s " train_gpt2 train_mamba_hpn train_gpt2_faults tools/inspect tools/tokenize launch)
    finish_parts  # scripts measure time and memory
    at_once=$((jobs + 1))
    part "command line and runs" dev/test_cli.sh
    part "checkpoints and faults" env STRIDE=5 KILLS=100 dev/test_faults.sh  # all of them: dev/faults/campaign.sh
    part "attacks on a run" dev/attacks.sh
    part "several ranks" dev/test_ranks.sh
    part "strangers at the ports of a run" $python dev/faults/strangers.py
    part "train_mamba_hpn, every option and file" env KILLS=10 dev/test_mamba.sh  # how saves end is shown by train_gpt2
    export OPT=-Og  # of quick; their kernels at -O3 have their turn in matrix
    build_shared train_bigram train_moe_faults train_glm5_faults
    part "ranks on several machines" dev/test_machines.sh
    part "train_bigram.c, as its page says" dev/test_example.sh
    part "make run..., each to its end" dev/test_recipes.sh
    part "train_moe, every option and file" env KILLS=10 dev/test_moe.sh
    part "conversations: refusals, bits, resuming, answers" dev/test_sft.sh refused bits resume answers
    part "conversations: resuming, under sanitizers" env ASAN=1 dev/test_sft.sh resume
    # the most that a trainer keeps beside its parameters: biases that count, indexers
    part "train_moe, checkpoints and faults, quick" env TRAINER=train_moe dev/test_faults.sh quick
    part "train_qwen3, every option and file" env KILLS=10 dev/test_qwen.sh
    half part "train_qwen36, every option and file" env KILLS=10 dev/test_qwen36.sh
    part "train_deepseek_v4, every option and file" dev/test_deepseek_v4.sh
    part "train_glm5, every option and file" dev/test_glm5.sh
    part "train_glm5, files" dev/test_glm5_files.sh
    part "train_glm5, checkpoints and faults, quick" env TRAINER=train_glm5 dev/test_faults.sh quick
    half part "layers on several ranks" dev/test_stages.sh
    half part "matrices on several ranks" dev/test_parts.sh
    half part "positions on several ranks" dev/test_context.sh
    half part "three ways to share on 8 ranks" dev/test_grids.sh
    half part "train_gpt2.cu, its kernels on this CPU" dev/test_gpus.sh
    part "bases in fp8 on GPUs, on this CPU" dev/test_gpu_bases.sh
    part "dev/gpu_check.sh, rehearsed" dev/test_gpu_check.sh
    part "headers: each alone as C11, all as C++17" dev/check_headers.sh
    part "golden files are what the reference writes" dev/check_golden.sh $(share 3 $(dev/check_golden.sh names))
    finish_parts
    unset OPT
    if need_nvcc "CUDA programs"; then
        # each kernel in both builds: as trainers ship, and as tests ask for bits
        part "trainers for sm_90, bf16" make -s -j"$jobs" cuda_trainers CUDA_ARCH=sm_90 NVCC_OPT=-O0
        finish_parts
        half part "tables of doc/plan.md are what --plan says" $python dev/check_plans.py "$(make -s cuda_folder CUDA_ARCH=sm_90 NVCC_OPT=-O0)"
        exact=(CUDA_ARCH=sm_90 PRECISION=exact NVCC_OPT=-O0)
        part "tests for sm_90, exact" make -s -j"$jobs" "${exact[@]}" \
            $(printf "$(make -s cuda_folder "${exact[@]}")/%s " $(share 3 $(without test_simt $(make -s simt_tests))))
        finish_parts
        part "kernels for sm_90: none spills" make -s ptxas PTXAS_OPTIONS="--check --archs sm_90"
    fi
    # without those which skip most, as bits are of the exact build, or compute nothing
    simt fast "$(share 2 $ops)" "$(share 2 $(without "test_moe test_qwen3 test_deepseek_v4 test_glm5 test_comm test_shared_matrices" $long))"
    part "staircases, benchmarks and tests compile as CUDA" make -s cuda_syntax \
        CUDA_SOURCES="$(echo $(share 3 dev/cuda/*.cu dev/bench/*.cu $(printf '%s.c ' $(without test_simt $ops $long))))"
    build_and_run "" $(share 2 $(op_tests))
    matrix
    finish_parts
    part "what is broken on purpose finds its place" dev/mutate.sh --places
    # it keeps every core busy by itself
    part "what is broken on purpose turns a test red" dev/mutate.sh $([ $is_all = 1 ] || echo --sixth $(commit_of 6))
    finish_parts
    part "tokenizer against Hugging Face tokenizers" $python dev/ref/check_tokenizer.py --strings 300
    part "images against Pillow and transformers" $python dev/ref/check_images.py --files 200
}

case ${1-} in
    check) programs "${@:2}" ;;
    quick | rest) $1 ;;
    all) is_all=1; rest ;;
    *) echo "test.sh: expected check, quick, rest or all, found \"${1-}\"" >&2; exit 2 ;;
esac
finish_parts
echo "$passed passed, $failed failed$([ $skipped = 0 ] || echo ", $skipped skipped")"
[ $failed = 0 ]
