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

# ---- a trainer with options of its own ----
# the last column of their rows says what they name; no list in llmc/run knows these
own=$work/train_own
sed -e 's|^static double bigram_flops|static const char *adapter, *adapter_out, *place;\n&|' \
    -e 's|^int main|static void own_options(Run* r) {\n    const Option own[] = {\n\
        {"own", "adapter", "", OPTION_TEXT, \&adapter, "", 0, 0, "FILE", "is read", OPTION_READS},\n\
        {"own", "adapter-out", "", OPTION_TEXT, \&adapter_out, "", 0, 0, "FILE", "is written", OPTION_WRITES},\n\
        {"own", "place", "", OPTION_TEXT, \&place, "append", 0, 0, "WHERE", "no path", 0},\n    };\n\
    run_add_options(r, own, sizeof own);\n}\n\n\
static float more[20];\n\
static int own_extras(const Run* r, Extra* x) {\n    const int n = r->trainer->counts_updates;\n\
    for (int i = 0; i < n; i++) {\n        static char names[20][8];\n        snprintf(names[i], 8, "x%d", i);\n\
        const Extra one = {names[i], DTYPE_F32, more + i, 1};\n        x[i] = one;\n    }\n    return n;\n}\n\
static void own_load_extras(Run* r, const char* path) {\n    Extra x[20];\n\
    extras_load(path, x, own_extras(r, x));\n}\n\n&|' \
    -e 's|^    t.close = .*|&\n    t.options = own_options;\n\
    if (getenv("EXTRAS")) { t.extras = own_extras; t.counts_updates = atoi(getenv("EXTRAS")); }\n\
    if (getenv("LOAD_EXTRAS")) { t.load_extras = own_load_extras; }\n\
    if (getenv("SCORES")) { t.n_scores = 2; }|' "$root/dev/examples/train_bigram.c" >"$own.c"
compile() { ${CC:-gcc} -std=gnu11 -D_GNU_SOURCE -O1 -ffp-contract=off -I"$root" "$own.c" -o "$own" -ljansson -lxxhash -lpcre2-8 -lz -lpthread -lm; }
check "a trainer with options of its own compiles" compile
cp book.txt kept.txt && echo mine >adapter.bin
"$own" "${start[@]}" --adapter-out book.txt --run own >out 2>err
check "an output of its own over the data: status 2" test $? = 2 -a "$(<err)" = "train_own: --adapter-out: book.txt is what --train reads: give another name"
"$own" "${start[@]}" --adapter adapter.bin --adapter-out adapter.bin --run own >out 2>err
check "... over an input of its own" test $? = 2 -a "$(<err)" = "train_own: --adapter-out: adapter.bin is what --adapter reads: give another name"
"$own" "${start[@]}" --adapter-out both --export-hf both --run own >out 2>err
check "... over another output" grep -q "is the name of another output" err
check "and what they would have replaced is whole" test "$(cmp book.txt kept.txt; cat adapter.bin)" = mine
"$own" "${start[@]}" --adapter adapter.bin --adapter-out new.bin --run own >out 2>err
mkdir elsewhere && : >append && : >bytes  # files with names of words
(cd elsewhere && "$own" --resume --run ../own --steps 12 >../out 2>../err)
check "--resume from another folder" test $? = 0 -a -e own/step_000012/manifest.json
setting() { grep -oP "^    \"$1\": \K[^,]*" own/settings.json; }
check "... finds its input where the run began" test "$(setting adapter)" = "\"$work/adapter.bin\""
check "... takes a word for a word, though a file has its name" test "$(setting place) $(setting tokenizer)" = '"append" "bytes"'
check "... does not write again where the first wrote" test "$(setting adapter-out)" = '""'

# ---- half of a pair: found at the start, before anything is written ----
broken() {  # NAME=VALUE...: does a trainer with that mistake end before it writes? The shell says no word of the abort
    rm -rf broken
    { env "$@" "$own" "${start[@]}" --run broken >out 2>err; } 2>/dev/null
    [ $? = 134 ] && grep -q 'Assertion' err && [ ! -e broken ]
}
for mistake in EXTRAS=1 LOAD_EXTRAS=1 SCORES=1 "EXTRAS=16 LOAD_EXTRAS=1"; do
    check "at once: a trainer with $mistake and no more" broken $mistake
done
export EXTRAS=15 LOAD_EXTRAS=1  # as many as there may be, beside the counts of updates
"$own" "${start[@]}" --run full >out 2>err && rm -r full/step_000009 && "$own" --run full --resume >out 2>err
check "a trainer with 15 vectors of its own goes on to the same bits" same one full
unset EXTRAS LOAD_EXTRAS
finish
