#!/usr/bin/env bash
# Is our train_gpt2.c, built with the C library's functions, equal to upstream llm.c to the last bit after 20 training steps?
#     dev/parity/check.sh UPSTREAM_DIR         the small model of the recorded table, then 12 random shapes (a minute)
#     dev/parity/check.sh UPSTREAM_DIR full    also GPT-2 124M, B 4, T 64 (several minutes, 3 GB of memory, 1 GB in TMPDIR)
# Every run is made twice, by upstream.c (upstream's functions) and by ours.c (ours). Both take the options of run.h, print its
# lines "step S loss BITS DECIMAL parameters HASH" and write the parameters to the file `out=` as raw float32; the step lines
# must be equal and so must, under cmp, the files. Ends with "N passed, N failed"; status 1 if any failed.
set -u
cc=${CC:-gcc}
upstream_flags="-O3 -ffp-contract=off -fopenmp -w"  # -w: the warnings of upstream's code are not ours to read
ours_flags="-std=gnu11 -D_GNU_SOURCE -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -DSYSTEM_LIBM=1"
ours_libraries="-ljansson -lxxhash -lpcre2-8 -lpthread -lm"
here=$(cd "$(dirname "$0")" && pwd)

if [ $# -lt 1 ] || [ ! -f "$1/train_gpt2.c" ]; then
    echo "skipped: no train_gpt2.c of upstream llm.c in \"${1-}\". To get it and run this check:"
    echo "    git clone https://github.com/karpathy/llm.c /tmp/llm.c && git -C /tmp/llm.c checkout f1e2ace"
    echo "    dev/parity/check.sh /tmp/llm.c"
    exit 0
fi
upstream=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shellcheck disable=SC2086  # the flags are lists of words
$cc $upstream_flags -DTESTING -DUPSTREAM="\"$upstream/train_gpt2.c\"" "$here/upstream.c" -o "$work/upstream" -lm || exit 1
# shellcheck disable=SC2086
$cc $ours_flags -I"$here/../.." "$here/ours.c" -o "$work/ours" $ours_libraries || exit 1

n_passed=0
n_failed=0
verdict() {  # verdict STATUS TEXT
    if [ "$1" = 0 ]; then n_passed=$((n_passed + 1)); echo "ok    $2"; else n_failed=$((n_failed + 1)); echo "FAIL  $2"; fi
}

# compare THREADS NAME=VALUE...: the run by both drivers, ours with that many threads
compare() {
    local threads=$1
    shift
    "$work/upstream" "$@" out="$work/upstream.f32" | grep ^step >"$work/upstream.txt"
    OMP_NUM_THREADS=$threads "$work/ours" "$@" out="$work/ours.f32" | grep ^step >"$work/ours.txt"
    local difference
    difference=$(diff -y -W 150 --suppress-common-lines "$work/upstream.txt" "$work/ours.txt" | head -n 1; cmp "$work/upstream.f32" "$work/ours.f32" 2>&1)
    [ -s "$work/upstream.txt" ] && [ -s "$work/upstream.f32" ] && [ -z "$difference" ]
    verdict $? "${*:-the run of the table}; ours with $threads threads"
    [ -z "$difference" ] || echo "$difference" | sed 's/^/      /'
    rm -f "$work"/*.f32 "$work"/*.txt
}

# ---- the recorded run: losses and hashes of upstream's functions under glibc 2.36, x86-64 ----
recorded="step 0 loss 40990aa9 4.782551 parameters fa60f63cc0590a75
step 1 loss 409788b1 4.735436 parameters c1f8f7ee65385c55
step 2 loss 4094bb51 4.647866 parameters 827ff46bb29f5e7d
step 3 loss 40957dcc 4.671606 parameters 8f02a8a213a66b88
step 4 loss 40953165 4.662280 parameters 275962bd3abeeb2a
step 9 loss 40956d0d 4.669562 parameters 815f6be84059319e
step 14 loss 40953822 4.663102 parameters 357381d3a8ad1057
step 19 loss 409197f6 4.549800 parameters d3805a375ff9f25c"
if [ "$(getconf GNU_LIBC_VERSION 2>/dev/null) $(uname -m)" = "glibc 2.36 x86_64" ]; then
    [ "$("$work/upstream" | grep -E '^step ([0-4]|9|14|19) ')" = "$recorded" ]
    verdict $? "upstream's functions give the recorded losses and hashes"
else
    echo "skip  the recorded losses and hashes: they hold for glibc 2.36 on x86-64"
fi
compare 1
compare 2

# ---- the smallest shape, then random ones: odd numbers of heads and channels, T that fills no vector ----
compare 1 V=2 Vp=128 maxT=1 L=1 NH=1 C=1 B=1 T=1 steps=20
RANDOM=1
for shape in 1 2 3 4 5 6 7 8 9 10 11 12; do
    NH=$((1 + RANDOM % 5))
    V=$((2 + RANDOM % 300))
    T=$((1 + RANDOM % 40))
    compare $((1 + shape % 4)) V=$V Vp=$(((V + 127) / 128 * 128)) maxT=$((T + RANDOM % 9)) L=$((1 + RANDOM % 3)) NH=$NH \
        C=$((NH * (1 + RANDOM % 24))) B=$((1 + RANDOM % 5)) T=$T steps=20 param_seed=$((1 + RANDOM)) data_seed=$((1 + RANDOM)) \
        lr=0.00$((1 + RANDOM % 9)) weight_decay=0.$((RANDOM % 3))
done

if [ "${2-}" = full ]; then
    compare "$(nproc)" V=50257 Vp=50304 maxT=1024 L=12 NH=12 C=768 B=4 T=64 steps=20 lr=1e-4 weight_decay=0
fi
echo "$n_passed passed, $n_failed failed"
[ "$n_failed" = 0 ]
