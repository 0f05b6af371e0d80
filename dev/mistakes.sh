#!/usr/bin/env bash
# The worst mistakes of users and what they are told: each is made for real, its message checked against doc/mistakes.md.
#     dev/mistakes.sh           compare: one promise for each line of the table
#     dev/mistakes.sh --write   write the table anew
set -u
export LC_ALL=C OMP_WAIT_POLICY=passive
cd "$(dirname "$0")/.." || exit 1
root=$PWD
make -s train_gpt2 tools || { echo "0 passed, 1 failed"; exit 1; }
build=$root/$(make -s folder)
make -s "$build/train_gpt2_faults" || { echo "0 passed, 1 failed"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
export PATH=$root:$root/dev/tools:$build:$PATH
table=$work/table.md

heading() { printf '\n## %s\n\n| mistake | what is printed | status |\n|---|---|---|\n' "$1" >>"$table"; }

# one row: what went wrong, and a command whose last line on stderr is what its user reads
row() {  # MISTAKE COMMAND...
    local mistake=$1 status message
    shift
    timeout 60 "$@" >out 2>err </dev/null
    status=$?
    message=$(tail -n 1 err | sed -e 's/|/\\|/g' -e 's/[0-9.]* [KMGT]iB are free/N GiB are free/' -e 's/process [0-9]*/process N/')
    printf '| %s | `%s` | %d |\n' "$mistake" "$message" $status >>"$table"
}

# ---- the files they have ----

mkdir text empty
for i in {1..250}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text/a.txt
echo '{"model_type":"gpt2","n_positions":24,"vocab_size":257,"n_layer":1,"n_head":2,"n_embd":16}' >tiny.json
train=(train_gpt2 --config tiny.json --train text --seq-len 16)
"${train[@]}" --steps 4 --save-every 2 --run run --export-hf model --export-bin model.bin >/dev/null || exit 1
le32() { for number; do for i in 0 8 16 24; do printf "\\x$(printf %02x $((number >> i & 255)))"; done; done; }
shard() { le32 20240520 1 $#; head -c 1012 /dev/zero; for t; do printf "\\x$(printf %02x $((t & 255)))\\x$(printf %02x $((t >> 8)))"; done; }
shard $(seq 0 300 50000) >gpt2.bin
