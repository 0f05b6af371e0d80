# What the shell tests share; each begins with `. dev/promises.sh` from anywhere in the repository and ends with `finish`.
# Every promise is one line, "ok", "FAIL" or "skip"; the last line counts them: "N passed, N failed".
#     verdict STATUS PROMISE DETAIL   0: kept
#     check PROMISE COMMAND...        kept when the command succeeds
#     skip PROMISE                    cannot be tested here, with the reason
#     build VARIABLES PROGRAM         builds it with these Makefile variables; prints its path
#     need_build NAME VARIABLES PROGRAM   the same into a variable, or the end of the test
#     build_simt PROGRAM...           of dev/simt, or the end of the test; scripts that run at once wait for each other's builds
#     go, refuse, last                of a script that runs one trainer: a run, options that are refused, a run's newest checkpoint
#     le BYTES NUMBER...              numbers as a binary file has them
#     in_turn                         of a long list: is it this line's turn? SHARE=K/N: of N lines that ask one after another the K-th's
# `quick` as a script's first argument: its most telling promises of each kind, for `make test`; is_quick asks for it.
set -u
export LC_ALL=C
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # threads that spin while they wait stall for seconds on a busy machine
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
root=$PWD
python=$([ -x .venv/bin/python ] && echo "$root/.venv/bin/python" || echo python3)
passed=0
failed=0
skipped=0
quick=0
if [ "${1-}" = quick ]; then quick=1; shift; fi

is_quick() { [ $quick = 1 ]; }

verdict() {
    if [ "$1" = 0 ]; then
        passed=$((passed + 1))
        echo "ok    $2"
    else
        failed=$((failed + 1))
        echo "FAIL  $2"
        echo "      $3"
    fi
}

check() {
    local promise=$1
    shift
    "$@"
    verdict $? "$promise" "not so: $*; stderr ends: $(tail -n 3 err 2>/dev/null)"
}

skip() {
    skipped=$((skipped + 1))
    echo "skip  $1"
}

build() {
    local folder
    folder=$(make -s -C "$root" folder $1) && make -s -C "$root" $1 "$folder/$2" >&2 && echo "$root/$folder/$2"
}

need_build() {
    local path
    path=$(build "$2" "$3") || { echo "0 passed, 1 failed"; exit 1; }
    printf -v "$1" '%s' "$path"
}

build_simt() {
    mkdir -p "$root/build"
    flock "$root/build/simt.lock" make -s -C "$root" -j2 "$@" >&2 || { echo "0 passed, 1 failed"; exit 1; }
}

# ---- of a script that runs one trainer, "$trainer" ----

go() {  # OPTION...: into out and err, within $limit seconds; status is kept
    timeout "$limit" "$trainer" "$@" >out 2>err </dev/null
    status=$?
    [ $status = 0 ] || { echo "      status $status: ${trainer##*/} $*"; cat err; }
    return $status
}

# exit status 2, one line on stderr that begins with the program's name and holds TEXT, and no new folder
refuse() {  # PROMISE TEXT OPTION...
    local promise=$1 text=$2 status good=1
    shift 2
    timeout 30 "$trainer" --run new "$@" >out 2>err </dev/null
    status=$?
    if [ $status = 2 ] && [ "$(wc -l <err)" = 1 ] && [[ $(<err) == "${trainer##*/}: "*"$text"* ]] && [ ! -e new ]; then good=0; fi
    verdict $good "refused: $promise" "status $status, $(ls -d new 2>/dev/null) stderr: $(<err)"
    rm -rf new
}

last() { printf '%s\n' "$1"/step_*[0-9] | tail -n 1; }  # RUN: its newest checkpoint

# ---- files and the end ----

n_asked=0
in_turn() {
    local k=0 n=1
    if [ -n "${SHARE-}" ]; then IFS=/ read -r k n <<<"$SHARE"; fi
    n_asked=$((n_asked + 1))
    [ $((n_asked % n)) = "$k" ]
}

le() {  # BYTES NUMBER...: little-endian
    local size=$1 text="" number i
    shift
    for number; do
        for ((i = 0; i < size; i++)); do printf -v text '%s\\x%02x' "$text" $((number >> 8 * i & 255)); done
    done
    printf "$text"
}

finish() {
    echo "$passed passed, $failed failed$([ $skipped = 0 ] || echo ", $skipped skipped")"
    [ $failed = 0 ]
}
