#!/usr/bin/env bash
# Every header of llmc/ stands alone: it compiles by itself, first in a file, as C11 and as C++17, with gcc, clang and, where
# there is one, nvcc (as CUDA, for sm_90). Ends with "N passed, N failed".
set -u
cd "$(dirname "$0")/.."
warnings="-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wno-unused-function -Werror"
exact="-D_GNU_SOURCE -O1 -fsyntax-only -ffp-contract=off -I."
passed=0
failed=0

# all headers, or all but those of one model: a program has one, so each model's Config is called Config
includes() { ls llmc/*.h | grep -v "${1:-no such name}" | sed 's/.*/#include "&"/'; }

# try COMPILER...: all headers at once, with each model, so that none leans on another; and each by itself
try() {
    local file=$work/all.$1 log=$work/log
    shift
    for other in llmc/mamba llmc/gpt2; do
        includes $other >"$file"
        if "$@" "$file" >"$log" 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL  $* without $other"; head -n 20 "$log"; fi
    done
    for header in llmc/*.h; do
        echo "#include \"$header\"" >"$file"
        if "$@" "$file" >"$log" 2>&1; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAIL  $* $header"; head -n 20 "$log"; fi
    done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for compiler in gcc clang; do
    command -v $compiler >/dev/null || { echo "skipped: no $compiler"; continue; }
    try c $compiler -std=gnu11 $exact $warnings -fopenmp
    try cpp $compiler -x c++ -std=gnu++17 $exact $warnings -fopenmp
    try c $compiler -std=gnu11 $exact $warnings -Wno-unknown-pragmas -DSYSTEM_LIBM
done
if nvcc=$(dev/cuda_flags.sh nvcc 2>/dev/null) && dev/cuda_flags.sh flags >"$work/flags"; then
    includes llmc/mamba >"$work/all.cu"  # whose trainer is for CPUs
    if $nvcc -std=c++17 -arch=sm_90 -I. --options-file "$work/flags" --fmad=false -diag-suppress 1675 -Xcompiler -Wall -cuda "$work/all.cu" -o "$work/all.ii" >"$work/log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1)); echo "FAIL  nvcc"; head -n 20 "$work/log"
    fi
else
    echo "skipped: no nvcc, or not all libraries that it needs (make setup-cuda)"
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
