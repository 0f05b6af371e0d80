#!/usr/bin/env bash
# Every header of llmc/ stands alone: it compiles by itself, first in a file, as C11 with gcc; all at once, as C11 and as
# C++17, with gcc, as C++17 with clang and, where there is one, nvcc (as CUDA, for sm_90). Rooms have doors: a header includes only from
# the rooms that its own may see. And lines of headers and trainers have at most 120 characters. Ends with "N passed, N
# failed".
#     dev/check_headers.sh         all of that
#     dev/check_headers.sh quick   without clang and nvcc
set -u
cd "$(dirname "$0")/.."
quick=$([ "${1-}" = quick ] && echo 1 || echo 0)
warnings="-Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wno-unused-function -Werror"
exact="-D_GNU_SOURCE -O1 -fsyntax-only -ffp-contract=off -I."
passed=0
failed=0

# all headers that are no model's, and one model's: a program has one, so each model's Config is called Config
models=$(grep -l '^} Config;' llmc/models/*.h | sed 's/.*\/\([a-z0-9_]*\)\.h/\1/')
includes() { ls llmc/*/*.h | grep -vE "^llmc/models/($(echo $models | tr ' ' '|'))[_.]" | cat - <(ls "llmc/models/$1"[_.]*) | sed 's/.*/#include "&"/'; }

# compiles WHAT COMMAND...: the last word of the command is the file
compiles() {
    local what=$1 log=$work/log
    shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAIL  $* ($what)"
        head -n 20 "$log"
    fi
}

# try_all c|cpp "MODEL ..." COMPILER...: all headers at once, with each of these models; some break only beside others
try_all() {
    local file=$work/all.$1 with=$2 model
    shift 2
    for model in $with; do
        includes $model >"$file"
        compiles "with $model" "$@" "$file"
    done
}

# headers that another one includes before anything else: where that stands alone, they do
firsts() {
    for header in llmc/*/*.h; do
        name=$(sed -n '/^ *# *include/{s/^ *# *include *"\(.*\)".*/\1/p;q}' "$header")
        [ -z "$name" ] || realpath -q --relative-to=. "$(dirname "$header")/$name"
    done | sort -u
}

# try_each COMPILER...: each by itself, so that none leans on another
try_each() {
    for header in $(ls llmc/*/*.h | grep -vxF "$(firsts)"); do
        echo "#include \"$header\"" >"$work/one.c"
        compiles "$header" "$@" "$work/one.c"
    done
}

# ROOM ROOMS...: the rooms that headers of a room may include from, beside their own
doors="core
files core
text core files
ops core
ranks core ops files
run core ops files text ranks
models core ops files text ranks run
test core ops files text ranks run models"

# includes that leave a room by no door; a room that has no line here has none
check_doors() {
    local wrong=0 room seen header included
    for room in llmc/*/; do
        room=$(basename "$room")
        seen=$(grep "^$room\b" <<<"$doors") || { echo "FAIL  llmc/$room/: dev/check_headers.sh does not know this room"; wrong=1; continue; }
        for header in llmc/"$room"/*.h; do
            for included in $(sed -n 's/^ *# *include "\([^"]*\)".*/\1/p' "$header"); do
                [[ $included == */* ]] || continue
                included=${included#../}
                if [[ " $seen " == *" ${included%%/*} "* && -e llmc/$included ]]; then continue; fi
                echo "FAIL  $header includes $included: $room may see $seen"
                wrong=1
            done
        done
    done
    if [ -n "$(ls llmc/*.h 2>/dev/null)" ]; then echo "FAIL  llmc/ itself holds no headers: each lives in a room"; wrong=1; fi
    if [ $wrong = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

# characters, not bytes: a name may hold any
check_lines() {
    if LC_ALL=C.UTF-8 grep -nE '^.{121}' llmc/*/*.h train_*.c train_*.cu; then
        echo "FAIL  these lines are longer than 120 characters"
        failed=$((failed + 1))
    else
        passed=$((passed + 1))
    fi
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
check_doors
check_lines
one=${models%%$'\n'*}  # for what no model's header asks for
try_all c "$models" gcc -std=gnu11 $exact $warnings -fopenmp
try_all c $one gcc -std=gnu11 $exact $warnings -Wno-unknown-pragmas -DSYSTEM_LIBM
try_all cpp "$models" gcc -x c++ -std=gnu++17 $exact $warnings -fopenmp
# what a header lacks by itself it lacks for all compilers; warnings were seen
try_each gcc -std=gnu11 -D_GNU_SOURCE -fsyntax-only -w -Werror=implicit-function-declaration -I.
if [ $quick = 1 ]; then
    echo "$passed passed, $failed failed"
    exit $((failed > 0))
fi
if command -v clang >/dev/null; then
    try_all cpp "$models" clang -x c++ -std=gnu++17 $exact $warnings -fopenmp
    try_all c $one clang -std=gnu11 $exact $warnings -Wno-unknown-pragmas -DSYSTEM_LIBM
else
    echo "skipped: no clang"
fi
if nvcc=$(dev/cuda_flags.sh nvcc 2>/dev/null) && dev/cuda_flags.sh flags >"$work/flags"; then
    includes qwen | grep -vE '/(head|prototypes)\.h' >"$work/all.cu"  # those are Mamba's, for CPUs alone
    for build in "" -DEXACT; do
        compiles "as CUDA" $nvcc -std=c++17 -arch=sm_90 -I. --options-file "$work/flags" --fmad=false -diag-suppress 1675 -Xcompiler -Wall $build \
            -cuda -o "$work/all.ii" "$work/all.cu"
    done
else
    echo "skipped: no nvcc, or not all libraries that it needs (make setup-cuda)"
fi
echo "$passed passed, $failed failed"
[ $failed = 0 ]
