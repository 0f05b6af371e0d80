#!/usr/bin/env bash
# train_gpt2 as its user meets it: options, files, folders, signals, exit statuses. About 20 s after three builds.
#     dev/test_cli.sh                        the normal build
#     dev/test_cli.sh quick                  without other builds beside it, and of what is refused every eighth
#     ASAN=1 OPT=-Og dev/test_cli.sh         the Makefile's variables choose another
# Each run happens in a folder that goes away again.
. "$(dirname "$0")/promises.sh"

# ---- promises ----

# exit status 2 within the limit, one line on stderr that begins with the program's name and holds TEXT, and no new folder
n_refused=0
refuse() {  # PROMISE TEXT OPTION...
    local promise=$1 text=$2 status good=1
    shift 2
    n_refused=$((n_refused + 1))
    if is_quick && [ $((n_refused % 8)) != 1 ]; then return; fi
    timeout "$limit" "$trainer" "$@" >out 2>err </dev/null
    status=$?
    if [ $status = 2 ] && [ "$(wc -l <err)" = 1 ] && [[ $(<err) == "train_gpt2: "*"$text"* ]] && [ ! -e new ] && [ ! -e runs ]; then good=0; fi
    verdict $good "refused: $promise" "status $status, $(ls -d new runs 2>/dev/null | tr '\n' ' ')stderr: $(<err)"
    rm -rf new runs
}

run() {  # OPTION...: into out and err; status is kept
    timeout 120 "$trainer" "$@" >out 2>err </dev/null
    status=$?
    [ $status = 0 ] || { echo "      status $status: train_gpt2 $*"; cat err; }
    return $status
}

# ---- files ----

tokens() {  # NUMBER BELOW: pseudo-random
    local i x=$1
    for ((i = 0; i < $1; i++)); do
        x=$((x * 1103515245 + 12345 & 0x7fffffff))
        echo $(((x >> 12) % $2))
    done
}

shard() {  # TOKEN...
    le 4 20240520 1 $#
    head -c 1012 /dev/zero
    le 2 "$@"
}

probe_file() {  # DTYPE "B,T" INPUTS TARGETS
    local n_bytes=$((4 * $(wc -w <<<"$3"))) header
    header="{\"inputs\":{\"dtype\":\"$1\",\"shape\":[$2],\"data_offsets\":[0,$n_bytes]},"
    header+="\"targets\":{\"dtype\":\"$1\",\"shape\":[$2],\"data_offsets\":[$n_bytes,$((2 * n_bytes))]}}"
    le 8 ${#header}
    printf '%s' "$header"
    le 4 $3 $4
}

patched() {  # FILE OFFSET BYTES NUMBER...: a copy of the file with other numbers at an offset
    head -c "$2" "$1"
    le "${@:3}"
    tail -c +$(($2 + $3 * ($# - 3) + 1)) "$1"
}

halves() {  # FILE SED-REPLACEMENT: a .bin whose floats (4 bytes, \1 .. \4) are rewritten
    head -c 1024 "$1"
    printf "$(tail -c +1025 "$1" | od -An -v -tx1 -w4 | sed "s/ \(..\) \(..\) \(..\) \(..\)/$2/" | tr -d '\n')"
}

header_bytes() { od -An -tu8 -N8 "$1" | tr -d ' '; }

tensors() {  # FILE: name, begin and end of each tensor
    tail -c +9 "$1" | head -c "$(header_bytes "$1")" |
        grep -oE '"[^"]+":\{"dtype":"F32","shape":\[[0-9,]+\],"data_offsets":\[[0-9]+,[0-9]+\]' |
        sed -E 's/"([^"]+)".*\[([0-9]+),([0-9]+)\]/\1 \2 \3/'
}

equal_tensors() {  # FILE FILE: the names of those with the same bytes in both
    local name begin end data=$((8 + $(header_bytes "$1")))
    while read -r name begin end; do
        cmp -s -i $((data + begin)) -n $((end - begin)) "$1" "$2" && echo "$name"
    done < <(tensors "$1")
}

# the records of metrics.jsonl without what depends on time
columns() { sed -E 's/"(ms|tok_per_s|peak|time)": [^,}]+//g' "$1"; }

first_val() { grep -oE 'val loss [0-9.]+' "$1" | head -n 1 | cut -d' ' -f3; }
last_val() { grep -oE 'val loss [0-9.]+' "$1" | tail -n 1 | cut -d' ' -f3; }
is_less() { awk "BEGIN { exit !($1 < $2) }"; }

# ---- builds ----

is_quick || build "ARCH=x86-64" train_gpt2 >/dev/null &
need_build trainer "" train_gpt2
wait
if ! is_quick; then
    need_build trainer_old "ARCH=x86-64" train_gpt2
    need_build trainer_serial "OMP=0" train_gpt2
fi
is_asan=$([ "${ASAN:-0}" = 1 ] && echo 1 || echo 0)
limit=$([ $is_asan = 1 ] && echo 30 || echo 5)  # seconds for a refusal

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

mkdir text
for i in {1..250}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text/a.txt
echo "Another document, which stands behind an end of text." >text/b.txt
echo '{"model_type":"gpt2","n_positions":24,"vocab_size":257,"n_layer":2,"n_head":3,"n_embd":33}' >tiny.json
echo '{"model_type":"gpt2","n_positions":19,"vocab_size":131,"n_layer":3,"n_head":3,"n_embd":33}' >odd.json
start=(--config tiny.json --train text --seq-len 16)

# ---- training ----

echo "# training on a folder of text"
run "${start[@]}" --val-fraction 0.1 --steps 40 --lr 1e-2 --warmup 4 --eval-every 10 --eval-batches 5 --sample-every 20 \
    --max-new-tokens 20 --save-every 10 --run run
check "trains and ends with status 0" test $status = 0
cp out training
number='[0-9]+(\.[0-9]+)?'
line="^step [0-9]+/40 \| loss [0-9]+\.[0-9]{4} \| norm ([0-9]+\.[0-9]{2}|[0-9.]+e-[0-9]+) \| lr [0-9]\.[0-9]e-[0-9]{2} \| $number ms"
line+=" \| $number[kMB]? tok/s( \| [0-9]+% peak)? \| eta [0-9dhms]+$"  # of a step faster than the measured rate: none
check "a line for each step, in the documented form" test "$(grep -cE "$line" training)" = 40
check "a line for each validation" test "$(grep -cE '^step (0|10|20|30|40) \| val loss [0-9.]+ \| [0-9.]+ bits/byte( \| best)?$' training)" = 5
check "validation loss falls by more than 1" is_less "$(last_val training)" "$(first_val training) - 1"
check "the last line names the checkpoint" grep -qx "done after step 40, checkpoint in run/step_000040" training
keys='"step": .*"loss": .*"norm": .*"lr": .*"ms": .*"tokens": .*"tok_per_s": .*"peak": .*"skipped": .*"val_loss": .*"val_bpb": .*"accuracy": .*"time": '
check "metrics.jsonl: schema, 40 steps, 5 validations, thirteen keys in each" \
    test "$(wc -l <run/metrics.jsonl) $(grep -c '^{"schema"' run/metrics.jsonl) $(tail -n +2 run/metrics.jsonl | grep -cE "^\{$keys[0-9.]+\}$")" = "46 1 45"
for key in trainer command starts options build compiler flags commit cpu lanes threads train val xxh3; do grep -q "\"$key\": " run/settings.json || echo $key; done >missing
check "settings.json: command, options, build, data and checksums" test ! -s missing
check "samples.txt: after steps 20 and 40" test "$(grep -c '^--- sample after step [24]0$' run/samples.txt)" = 2
widest() { LC_ALL=C.UTF-8 wc -L <"$1"; }
cp text/a.txt "$(printf 'b\303\274ch-\346\227\245\346\234\254')-a-name-that-is-so-long-that-it-goes-on-in-the-line-below.txt"
screen=("$root/dev/terminal.py")
long=$(ls -- *-below.txt)
"${screen[@]}" 80 "$trainer" --config tiny.json --train "$long" --seq-len 16 --steps 1000000 --dry-run 2>/dev/null >screen
check "in a terminal of 80 columns no line of the box is longer" test "$(widest screen)" -le 80
check "and names in other scripts do not shift it" \
    test "$(grep '^[|+]' screen | while read -r row; do LC_ALL=C.UTF-8 wc -L <<<"$row"; done | sort -u)" = 78
for columns in 60 80 120; do
    rm -rf screen_run
    "${screen[@]}" $columns "$trainer" --config tiny.json --train text/a.txt --seq-len 16 --steps 3 --run screen_run |
        grep '^step' >screen
    check "step lines fit into $columns columns" test "$(widest screen)" -le $columns -a "$(wc -l <screen)" = 3
done
check "where there is room they have every field" grep -q 'norm .* lr .* ms .* tok/s .* eta' screen
"${screen[@]}" 80 "$trainer" --help >screen
check "--help fits into 80 columns" test "$(widest screen)" -le 80 -a "$(wc -l <screen)" -gt 100
check "checkpoints: --keep 2 of four" test "$(cd run && echo step_*)" = "step_000030 step_000040"
check "a checkpoint is seven files" test "$(cd run/step_000040 && echo *)" = "config.json generation_config.json manifest.json model.safetensors optimizer.safetensors tokenizer.json tokenizer_config.json"

head -c 60 text/a.txt >short.txt
run --config tiny.json --train short.txt --val text/b.txt --seq-len 16 --steps 60 --lr 1e-2 --eval-every 5 --save-every 5 --keep 1 --run best
step=$(grep '| best$' out | tail -n 1 | cut -d' ' -f2)
check "--keep 1 keeps the best checkpoint too (step $step of 60)" test "$(cd best && echo step_*)" = "$(printf 'step_%06d step_000060' "$step")"

run "${start[@]}" --steps 4 --eval-every 0 --val-fraction 0.1 --log-every 2 --run quiet
check "--eval-every 0 does not validate" test "$(grep -c 'val loss' out)" = 0
check "--log-every 2 prints half, metrics.jsonl has all" test "$(grep -c '^step ' out) $(wc -l <quiet/metrics.jsonl)" = "2 5"
run "${start[@]}" --steps 40 --lr 1e-2 --batch-size 1 --overfit 1 --run heart
check "--overfit 1: after 40 updates the rows of the first are known by heart" \
    test "$(grep -o '^step 40/40 | loss [0-9.]*' out | awk '{ print ($5 < 0.5) }')" = 1

run "${start[@]}" --val-fraction 0.1 --steps 50 --lr 0 --eval-every 2 --early-stop 3 --run early
check "--early-stop 3 ends after three validations without a new best" grep -q "^stopped early after step 6, checkpoint in early/step_000006$" out
run "${start[@]}" --steps 3 --lr 1e-2 --export-hf before --run freeze --freeze 'transformer.w?e.*'
run --config tiny.json --export-hf start
check "--freeze: the named tensors keep their bytes, all others change" \
    test "$(equal_tensors start/model.safetensors before/model.safetensors | tr '\n' ' ')" = "transformer.wpe.weight transformer.wte.weight "
timeout 60 "$trainer" "${start[@]}" --steps 200 --lr 10 --weight-decay 10 --clip 0 --max-skips 2 --run burnt >out 2>err
check "--max-skips 2: the third non-finite update in a row ends the run with status 1" test $? = 1
check "... and its message says what was not finite" grep -qE "^train_gpt2: step [0-9]+: 3 updates in a row were not finite \(loss inf, norm [0-9.]+, first bad gradient: none\)" err
check "... and the skipped updates are marked" test "$(grep -c '| skipped$' out) $(grep -c '"skipped": true' burnt/metrics.jsonl)" = "3 3"
shard $(tokens 100 200) >plain.bin
run --model tiny --train plain.bin --seq-len 16 --steps 1 --run numbers
check "shards without a tokenizer: neither the box nor the settings say bytes" \
    test "$(grep -c '^| tokenizer  *| none of 50257 tokens: samples are numbers ' out) $(grep -c '^| tokenizer ' out) $(grep -c '"tokenizer": ""' numbers/settings.json)" = "1 1 1"
printf 'config = tiny.json  # comment\ntrain = text\n\nseq-len=16\nsteps = 1\nrun = from_file\n' >conf.txt
run --args conf.txt --steps 2
check "--args FILE, and a later option wins" test -d from_file/step_000002
"$trainer" --help >out 2>err
check "--help has every option of this test, and status 0" test $? = 0 -a "$(grep -cE '^  --(from|config|model|train|freeze|max-skips|probe|export-bin) ' out)" = 8

# ---- resume ----

echo "# resume"
long=("${start[@]}" --val-fraction 0.1 --eval-every 4 --eval-batches 2 --sample-every 6 --max-new-tokens 8)
run "${long[@]}" --steps 12 --save-every 6 --run whole
same_run() {  # STEP: this checkpoint and the metrics of `whole` and `leg`
    cmp whole/$1/model.safetensors leg/$1/model.safetensors && cmp whole/$1/optimizer.safetensors leg/$1/optimizer.safetensors &&
        cmp <(columns whole/metrics.jsonl) <(columns leg/metrics.jsonl)
}
for threads in 1 3; do
    cp -r whole leg
    rm -r leg/step_000012
    run --resume --run leg --threads $threads
    check "12 steps = 6 steps and --resume with $threads threads: model, moments, metrics" same_run step_000012
    rm -r leg
done
cp -r whole leg
refuse "another optimizer for old moments" "--optimizer: the moments of leg/step_000012 are those of adamw: begin with --from leg/step_000012" --resume --run leg --steps 14 --optimizer muon
rm -r leg
cp -r whole adamw
rm -r whole
run "${long[@]}" --steps 12 --save-every 6 --optimizer muon --lr 1e-2 --run whole
for threads in 1 2 7; do
    cp -r whole leg
    rm -r leg/step_000012
    run --resume --run leg --threads $threads
    check "--optimizer muon: 12 steps = 6 steps and --resume with $threads threads" same_run step_000012
    rm -r leg
done
check "... and it is not AdamW" test "$(cmp whole/step_000012/model.safetensors adamw/step_000012/model.safetensors | wc -l)" = 1
refuse "AdamW for moments of Muon" "are those of muon" --resume --run whole --steps 14 --optimizer adamw
refuse "--momentum of AdamW" "--momentum: is for --optimizer muon" "${start[@]}" --momentum 0.9 --steps 1 --run new
rm -r whole
mv adamw whole
run --resume --run whole
check "resuming a finished run does nothing, status 0" grep -qx "all 12 steps are done, checkpoint in whole/step_000012; to go on, give more --steps" out
run --resume --run whole --steps 8
check "... of one with fewer --steps than it has, too, and says what is done" test "$(<out)" = "12 steps are done, more than --steps 8, checkpoint in whole/step_000012; to go on, give --steps above 12"
rm -r whole

# ---- prompts of samples ----

echo "# --sample-prompts"
printf 'line 7: \n\nthe law\\n\r\na\\\\b\\tc \303\251' >prompts.txt
prompts=("${start[@]}" --steps 12 --eval-every 0 --save-every 6 --max-new-tokens 8)
run "${prompts[@]}" --run plain
run "${prompts[@]}" --sample-every 4 --sample-prompts prompts.txt --run whole
check "samples change no bit of the model" cmp plain/step_000012/model.safetensors whole/step_000012/model.safetensors
grep '^--- sample' whole/samples.txt | head -n 3 >titles
check "samples.txt: which prompt, as it stands in the file" cmp titles - <<'TITLES'
--- sample after step 4, prompt 1 of 3: "line 7: "
--- sample after step 4, prompt 2 of 3: "the law\n"
--- sample after step 4, prompt 3 of 3: "a\\b\tc é"
TITLES
check "... of each at each --sample-every" test "$(grep -c '^--- sample after step \(4\|8\|12\), prompt [123] of 3: ' whole/samples.txt)" = 9
check "... and each sample begins with its prompt" \
    test "$(grep -c '^line 7: ' whole/samples.txt) $(grep -c '^the law$' whole/samples.txt) $(grep -cP '^a\\b\tc é' whole/samples.txt)" = "3 3 3"
check "the terminal shows the same" test "$(grep -v '^---$' whole/samples.txt | grep -cvaxFf out)" = 0
cp -r whole leg && rm -r leg/step_000012
run --resume --run leg --threads 1
check "--resume: the same samples" cmp whole/samples.txt leg/samples.txt
rm -r leg/step_000012 && cp prompts.txt before.txt && printf '\nanother\n' >>prompts.txt
touch marker
refuse "prompts that have changed since the run began" "prompts.txt: the prompts have changed since the run began" --resume --run leg
check "... before anything is written" test "$(find leg -type f -newer marker ! -name .lock | wc -l)" = 0
run --resume --run leg --sample-prompts prompts.txt
check "... unless they are named anew" grep -q 'prompt 4 of 4: "another"' leg/samples.txt
cp before.txt prompts.txt
run "${prompts[@]}" --sample-every 12 --sample-prompts prompts.txt --stop 'e' --temperature 0 --run stopped
check "--stop holds for samples too" test "$(grep '^line 7: ' stopped/samples.txt | tail -c +9 | grep -c e)" = 0
rm -r plain whole leg stopped

# SIGTERM after the third step. Nobody reads the pipe while the signal is on its way, so the run cannot end before it comes.
long+=(--schedule constant --warmup 0 --eval-every 1 --sample-every 1 --max-new-tokens 4 --keep 1)
mkfifo pipe
"$trainer" "${long[@]}" --steps 20000 --run leg >pipe 2>err &
pid=$!
exec 3<pipe
while read -r line <&3 && [[ $line != "step 3/"* ]]; do :; done
kill -TERM $pid
cat <&3 >rest
exec 3<&-
wait $pid
check "SIGTERM: status 0" test $? = 0
last=$(tail -n 1 rest)
check "SIGTERM: the last line names the checkpoint" grep -qxE 'stopped after step [0-9]+, checkpoint in leg/step_[0-9]{6}' <<<"$last"
step=${last##*_}
check "SIGTERM: that checkpoint is there" test -f "leg/step_$step/manifest.json"
steps=$((10#$step + 3))
run --resume --run leg --steps $steps
check "settings.json keeps the first command, and the steps after which others went on" \
    test "$(grep -cE '"(command|after_step)"' leg/settings.json) $(grep -A 2 '"command": \[' leg/settings.json | grep -c -- --resume)" = "5 1"
cp -r leg elsewhere_leg && mkdir elsewhere && steps=$((steps + 1))
(cd elsewhere && run --resume --run ../elsewhere_leg --steps $steps)
check "--resume from another folder finds the data of the first" test -e "elsewhere_leg/$(printf step_%06d $steps)/manifest.json"
rm -r elsewhere elsewhere_leg && steps=$((steps - 1))
run "${long[@]}" --steps $steps --run whole
check "SIGTERM and --resume = never stopped: model, moments, metrics" same_run "$(printf step_%06d $steps)"
check "... and samples" cmp whole/samples.txt leg/samples.txt
"$trainer" "${start[@]}" --steps 30 --run piped 2>err | head -n 1 >out
status=${PIPESTATUS[0]}
check "| head -n 1: status 0, or SIGPIPE's" test $status = 0 -o $status = 141
"$trainer" --config tiny.json --generate hello >/dev/full 2>err
check "a full disk behind standard output: status 1 and a message" test $? = 1 -a "$(grep -c '^train_gpt2: standard output: ' err)" = 1

(ulimit -f 100 && timeout 60 "$trainer" "${start[@]}" --steps 2 --run full >out 2>err)
check "a checkpoint that cannot be written: status 1, path and reason, no step folder" \
    test $? = 1 -a "$(grep -c 'full/step_000002.tmp/model.safetensors: cannot be .*: File too large' err)" = 1 -a ! -e full/step_000002

run --from whole "${start[@]:2}" --steps 2 --save-every 1 --keep 1 --run tuned
touch tuned/step_000002/notes.txt
run --resume --run tuned --steps 4
check "--resume of a run that began with --from; a file of the user's in an old checkpoint is left alone" \
    test $status = 0 -a "$(cd tuned && echo step_*/*)" = "step_000002/notes.txt $(cd tuned && echo step_000004/*)"

cp -r text changing
run --config tiny.json --train changing --seq-len 16 --steps 2 --run changed
echo "one line more" >>"changing/$(ls changing | head -n 1)"
refuse "--resume after the training data has changed" "the training data has changed since" --run changed --resume --steps 4
run --run changed --resume --steps 4 --train changing
check "--resume with --train goes on with other data" test $status = 0 -a -e changed/step_000004

# a mixture, beyond the end of its second epoch: resumed, with other threads, with data and shares that have changed
rm -r whole leg
cp text/a.txt large.txt
mixed=(--config tiny.json --train 'text/b.txt:1,large.txt:2,text:.5' --val-fraction 0.3 --seq-len 16 --batch-size 16 --eval-batches 2 --grad-accum 22)
run "${mixed[@]}" --steps 8 --save-every 4 --run whole
check "a mixture: the box has each source, its share and how often it comes" \
    test "$(grep -cE '^\|   (28.5|57.2|14.3)% of the rows +\| (text/b.txt|large.txt|text): [0-9]+ tokens, [0-9]+ rows, [0-9.]+ times' out)" = 3
sources="import json; print(*[(s['path'], s['weight'], s['rows_per_epoch']) for s in json.load(open('whole/settings.json'))['train']['sources']])"
check "... and settings.json" test "$("$python" -c "$sources" | grep -c "('text/b.txt', 1.0, .*('large.txt', 2.0, .*('text', 0.5, ")" = 1
cp -r whole leg
rm -r leg/step_000008
run --resume --run leg --threads 3
check "... resumed with 3 threads: the bits of a run that was not stopped" same_run step_000008
echo "one line more" >>large.txt
refuse "--resume after one source has changed, which is named" "large.txt: the training data has changed since" --run leg --resume --steps 9
cp text/a.txt large.txt
mixed[3]='text/b.txt:1,large.txt:3,text:.5'
refuse "--continue with other weights" "large.txt: its weight has changed since" "${mixed[@]}" --run leg --continue --steps 9
run "${mixed[@]:2}" --run leg --resume --steps 9
check "--resume with --train goes on with other weights" test $status = 0 -a -e leg/step_000009
rm -r whole leg
run --config tiny.json --train text/a.txt,text/b.txt --val text/b.txt,large.txt --seq-len 16 --steps 1 --run several
check "several paths without weights: all rows of each, once" grep -q '^|   99.[0-9]*% of the rows .* text/a.txt: [0-9]* tokens, [0-9]* rows  *|$' out
sed 's/257/300/' tiny.json >padded.json
begun=(--config padded.json --train text --seq-len 16 --save-every 1 --run padded)
run "${begun[@]}" --steps 1 && run "${begun[@]}" --steps 2 --continue
check "--continue, as launch --restarts gives it, of text in bytes for a model of 300 tokens: it goes on" test $status = 0 -a -e padded/step_000002
check "... a line says that the schedule is of other --steps now" grep -qx "the learning rate is that of 2 steps now, not of 1 as before: --lr-horizon 1 keeps it" out
run "${begun[@]}" --steps 3 --continue --lr-horizon 2
check "... none with --lr-horizon as it was" test $status = 0 -a "$(grep -c 'learning rate is that of' out)" = 0
refuse "... --resume with other text" "--tokenizer: the model has 300 tokens, bytes has 257" --run padded --resume --train large.txt --steps 4
run "${start[@]}" --steps 1 --tokenizer bytes --run bytes && run "${start[@]}" --steps 2 --tokenizer bytes --run bytes --continue
check "--continue with --tokenizer bytes, which is the model's own: without a word" test $status = 0 -a ! -s err
run --from bytes --train text --seq-len 16 --steps 1 --tokenizer bytes --run other
check "... and so is --from" test $status = 0 -a ! -s err
rm -r padded bytes other
run --config tiny.json --train text --seq-len 16 --epochs 0.5 --steps 0 --batch-size 16 --run epochs
run --run epochs --resume --epochs 1
check "--resume with more --epochs plans the steps anew" test $status = 0 -a "$(ls -d epochs/step_* | wc -l)" = 2

# ---- threads and builds ----

echo "# the same bits"
ten=("${start[@]}" --seq-len 13 --batch-size 2 --batch-tokens 78 --steps 10 --lr 1e-2)
run "${ten[@]}" --threads 1 --run one
for threads in 2 3 7; do
    run "${ten[@]}" --threads $threads --run "threads$threads"
    check "10 updates of 3 micro-batches: $threads threads = 1 thread" cmp {one,threads$threads}/step_000010/model.safetensors
done
run "${start[@]}" --seq-len 13 --batch-size 2 --grad-accum 3 --steps 10 --lr 1e-2 --run accum
check "--grad-accum 3 = --batch-tokens of 3 micro-batches" cmp {one,accum}/step_000010/model.safetensors
cp -r accum tokens
run --resume --run accum --grad-accum 2 --steps 12
run --resume --run tokens --batch-tokens 52 --steps 12
check "--batch-tokens typed on --resume replaces the --grad-accum of the run" cmp {accum,tokens}/step_000012/model.safetensors
if ! is_quick; then
    trainer=$trainer_old run "${ten[@]}" --run old
    check "10 updates of 3 micro-batches: ARCH=x86-64 = this build" cmp {one,old}/step_000010/model.safetensors
    check "... which says that it is slow" grep -q "^train_gpt2: exact build, slow" out
    trainer=$trainer_serial run "${ten[@]}" --run serial
    check "10 updates of 3 micro-batches: OMP=0 = this build" cmp {one,serial}/step_000010/model.safetensors
fi

# ---- --from and the exports ----

echo "# models of every kind"
model=run/step_000040
run --from run --export-hf hf --export-bin model.bin
cp -r hf bare
sed -i 's/"transformer\./            "/g' bare/model.safetensors  # blanks: the header keeps its length
halves model.bin '\\x\3\\x\4' >upper
patched upper 4 4 5 >bf16.bin
halves model.bin '\\x00\\x00\\x\3\\x\4' >rounded.bin
from() {  # PATH: the loss, and the parameters in h/
    rm -rf h
    run --from "$1" --val text/b.txt --seq-len 16 --eval-only --export-hf h && loss=$(last_val out)
}
from $model
expected=$loss
for kind in run hf bare bare/model.safetensors model.bin; do
    from $kind
    check "--from $kind: the loss of the checkpoint it came from" test "$loss" = "$expected"
    check "--from $kind: exported again, the same bits" cmp h/model.safetensors $model/model.safetensors
done
same_text() {  # FOLDER: what it generates is what the run generates, and it is read as bytes
    local texts=()
    for folder in run "$1"; do
        run --from "$folder" --generate 'é The' --temperature 0 --max-new-tokens 12 && texts+=("$(od -c out)")
    done
    [ ${#texts[@]} = 2 ] && [ "${texts[0]}" = "${texts[1]}" ] && run --from "$1" --val text/b.txt --seq-len 16 --eval-only &&
        grep -q '^| tokenizer  *| bytes  *|$' out
}
for folder in hf $model; do
    check "a byte model's $folder holds its tokenizer, for others" \
        "$python" -c 'import json, sys
folder = sys.argv[1]
vocab = json.load(open(f"{folder}/tokenizer.json", encoding="utf-8"))["model"]["vocab"]
config = json.load(open(f"{folder}/tokenizer_config.json"))
sys.exit(len(vocab) != 256 or vocab["a"] != 97 or config["eos_token"] != "<|endoftext|>")' $folder
    check "... and reads it back as bytes" same_text $folder
done
from rounded.bin
cp -r h rounded
from bf16.bin
check "--from bf16.bin: the bits of the upper halves" cmp h/model.safetensors rounded/model.safetensors
patched model.bin 1024 4 $(for _ in $(seq 64); do echo $((0x7f7fffff)); done) >huge.bin
timeout 60 "$trainer" --from huge.bin --train text --steps 9 --max-skips 1 --run huge >out 2>err
check "--from huge.bin, of the largest float: no update, status 1, the first bad tensor by name" \
    test $? = 1 -a "$(grep -cE 'step 2: 2 updates .*loss -*(nan|inf), norm -*nan, first bad gradient: transformer.wte.weight' err)" = 1
run --from huge.bin --export-hf halves --export-dtype bf16
check "... as bf16 it is infinite, and a line says so" test $status = 0 -a "$(cat err)" = "train_gpt2: 64 finite numbers of transformer.wte.weight became \
infinite: beyond bf16's largest, 3.39e38; --export-dtype fp32 keeps them"
run --from hf --export-bin again.bin
check "--export-bin of an exported folder: the same file" cmp model.bin again.bin
run --from run --export-bin again.bin
check "... replaces one of its own" cmp model.bin again.bin
patched model.bin 1008 4 0 >theirs.bin
cp theirs.bin kept.bin
refuse "--export-bin over a model of another program" "--export-bin: theirs.bin: is a model that this program did not write: give another name, or remove it" --from hf --export-bin theirs.bin
check "... which keeps every byte" cmp theirs.bin kept.bin
cp -r hf was
for i in hf hf/model.safetensors; do
    refuse "an export in the place of what --from $i reads" "--export-hf: is the folder of the model that is read: choose another" --from $i --export-hf ./hf/ --export-dtype bf16
done
mkdir another && sed 's/"model_type": "gpt2"/"model_type": "mamba"/' hf/config.json >another/config.json
refuse "an export in the place of another model" '--export-hf: another: holds another model, whose model_type is "mamba", not "gpt2": choose another folder' --from run --export-hf another
refuse "a run that begins by --continue without its data, and leaves no folder" "nowhere: " "${start[@]}" --train nowhere --steps 1 --run new --continue
refuse "... into an export that is refused" "--export-hf: another: holds another model" "${start[@]}" --steps 1 --run new --continue --export-hf another
refuse "a new run in a model's folder, which --from would read from then on" "--run: hf holds model.safetensors, in whose place" "${start[@]}" --steps 1 --run hf
refuse "... with --continue" "--run: hf holds model.safetensors" "${start[@]}" --steps 1 --run hf --continue
check "... and the folder stays as it was" diff -r hf was

# ---- files that go along ----

echo "# a downloaded folder's files for transformers"
cp -r hf chat_model
printf '{"eos_token_id": [7, 256], "top_k": 3}' >chat_model/generation_config.json  # no newline: as it is
printf '{"eos_token": "<|endoftext|>",\r\n "chat": "\xc3\xa9"}' >chat_model/tokenizer_config.json
echo '{{ messages }}' >chat_model/chat_template.jinja
for name in special_tokens_map.json added_tokens.json vocab.json merges.txt README.md; do echo "{\"$name\": 1}" >chat_model/$name; done
along="generation_config.json tokenizer_config.json chat_template.jinja special_tokens_map.json added_tokens.json vocab.json merges.txt"
have_along() {  # FOLDER...: all of these files in each, as they were, and README.md in none
    local folder name
    for folder; do
        for name in $along; do cmp "along/$name" "$folder/$name" || return 1; done
        [ ! -e "$folder/README.md" ] || return 1
    done
}
listed() {  # does the manifest verify each?
    local name
    for name in $along; do grep -q "\"$name\"" "$1/manifest.json" || return 1; done
}
cp -r chat_model along
run --from chat_model --train text --seq-len 16 --steps 2 --sample-every 0 --run chat_run --export-hf chat_out
check "go along into checkpoint and export, as they are" have_along chat_run/step_000002 chat_out
check "... and the checkpoint's manifest lists them" listed chat_run/step_000002
rm -r chat_model
run --run chat_run --resume --steps 3 --export-hf chat_out
check "... after --resume too, when the folder is gone, over the earlier export" have_along chat_run/step_000003 chat_out
run --from chat_run --export-hf chat_again
check "... and from a checkpoint into an export" have_along chat_again
echo '{"model": {"unk_token": "a", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": ["a b"]}}' >four.json
run --from along --train text --seq-len 16 --steps 1 --sample-every 0 --tokenizer four.json --run other_run --export-hf other
check "with another tokenizer none of them" test "$(cd other && echo *)" = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
check "... and end of text is that tokenizer's" grep -q '"eos_token_id": 3' other/generation_config.json
run --from along/model.safetensors --export-hf chat_again
check "--from model.safetensors: those beside it" have_along chat_again
rm along/tokenizer.json
run --config along/config.json --train text --seq-len 16 --steps 1 --sample-every 0 --run other_run2 --export-hf other
check "a random start from a config.json has none of them" test "$(cd other && echo *)" = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json"
check "... but ids of its own" grep -q '"pad_token_id": 256' other/generation_config.json

# ---- probe ----

echo "# probe"
shard $(tokens 400 131) >odd.bin
probe_file I32 3,13 "$(tokens 39 131)" "$(tokens 39 139 | sed -E 's/^13[1-9]$/-100/; 1,3s/.*/-1/')" >probe
run --config odd.json --train odd.bin --seq-len 13 --steps 5 --lr 2e-2 --export-hf odd --run odd_run
run --config odd.json --train text --tokenizer four.json --seq-len 13 --doc-reset 1 --steps 2 --sample-every 0 --export-hf padded --run padded_run
check "a padded vocabulary: end of text is the tokenizer's" grep -q '"eos_token_id": 3' padded/config.json
run --from padded --generate ab --max-new-tokens 3
check "... and the tokenizer that came with the model encodes and decodes" test "$status" = 0 -a "$(head -c 2 out)" = ab
refuse "a probe and a text" "--probe: is another task than --generate: give one at a time" --from odd --probe probe --probe-out new --generate a
refuse "a probe and data" "--probe: computes the batch in its own file alone: leave out --train" --from odd --probe probe --probe-out new --train text
refuse "a probe and a validation" "--probe: is another task than --eval-only" --from odd --probe probe --probe-out new --eval-only 1 --val text
refuse "a validation and a text" "--eval-only: is another task than --generate" --from odd --eval-only 1 --val text --generate a
run --from odd --probe probe --probe-out ours.safetensors
check "--probe ends with status 0 and says where the result is" grep -qE '^probe: 3 rows of 13 positions, [0-9]+ targets counted, loss [0-9.]+, written to ours.safetensors$' out
if "$python" -c 'import numpy' 2>/dev/null; then
    "$python" "$root/dev/ref/gpt2.py" --from odd --probe probe --probe-out numpy.safetensors
    "$python" - "$root/dev/ref" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
from exact import read_safetensors
ours, reference = (read_safetensors(f"{name}.safetensors") for name in ("ours", "numpy"))
different = sorted(set(ours) ^ set(reference))  # a name that only one of them has
different += [name for name in set(ours) & set(reference)
              if ours[name].shape != reference[name].shape or ours[name].tobytes() != reference[name].tobytes()]
print("      different:", *different) if different else None
sys.exit(bool(different) or len(ours) != 2 + 4 + 3 * 12)
PYTHON
    check "--probe: logits, loss and every gradient are the NumPy reference's, bit for bit" test $? = 0
else
    skip "--probe against the NumPy reference: no NumPy here"
fi

# ---- averaged weights ----

echo "# averaged weights"
averaged=("${start[@]}" --val-fraction 0.1 --lr 1e-2 --ema 0.8 --eval-every 4 --eval-batches 2)
run "${averaged[@]}" --steps 9 --save-every 1 --keep 20 --run averaged
if "$python" -c 'import numpy' 2>/dev/null; then
    "$python" "$root/dev/ref/check_ema.py" averaged 0.8 >numpy.txt
    check "--ema: the average after each of 9 steps is the NumPy reference's, bit for bit ($(tail -n 1 numpy.txt))" test $? = 0
else
    skip "--ema against the NumPy reference: no NumPy here"
fi
loss=$(sed -nE 's/^step 8 \| val loss ([0-9.]+) of averaged weights$/\1/p' out)
run --from averaged/step_000008 --ema-weights --train text --val-fraction 0.1 --seq-len 16 --eval-batches 2 --eval-only
check "... its loss is printed, and --from --ema-weights has the same ($loss)" test -n "$loss" -a "$(last_val out)" = "$loss"
check "... and is in metrics.jsonl beside the other" grep -q '"step": 8, .*"val_loss": [0-9.]*,.*"val_loss_ema": [0-9]' averaged/metrics.jsonl
columns averaged/metrics.jsonl >want
sums() { cat "$1"/{model,ema,optimizer}.safetensors | sha256sum; }
sum=$(sums averaged/step_000009)
rm -r averaged/step_00000[5-9]
run --resume --run averaged --ema-weights --export-hf average --threads 3
check "... 9 steps = 4 steps and --resume: weights, average and metrics" test "$(sums averaged/step_000009)" = "$sum" -a "$(columns averaged/metrics.jsonl)" = "$(<want)"
check "... --ema-weights: the export at the end has the average" cmp average/model.safetensors averaged/step_000009/ema.safetensors
run "${averaged[@]}" --ema 0 --steps 9 --run plain
check "... without it the weights have the same bits" cmp plain/step_000009/model.safetensors averaged/step_000009/model.safetensors
run --resume --run plain --ema 0.5 --steps 10
check "... a run that goes on may begin to average: after one update that is the weights" \
    test "$(grep -c 'the average begins now' err) $(cmp plain/step_000010/{model,ema}.safetensors 2>&1)" = "1 "
run --resume --run averaged --ema-weights --eval-only
check "... --resume --ema-weights --eval-only validates the average" test "$(last_val out)" != "" -a "$(last_val out)" = "$(run --from averaged --ema-weights --train text --val-fraction 0.1 --seq-len 16 --eval-batches 2 --eval-only; last_val out)"
run --from run --train text --seq-len 16 --steps 3 --ema 0.5 --ema-weights --export-hf tuned_average --run tuned_run
check "... with --from a model without one: the export has this run's" cmp tuned_average/model.safetensors tuned_run/step_000003/ema.safetensors
run --resume --run tuned_run --generate a --max-new-tokens 2
check "... and nobody who did not ask again gets it" test $status = 0
rm -rf tuned_average tuned_run
refuse "--ema-weights of a run that has none" "--ema-weights: run/step_000040 has no averaged weights (ema.safetensors)" --from run --ema-weights --generate x
refuse "--ema-weights of nothing" "--ema-weights: takes the averaged weights of a checkpoint or of a run: give --from, or --ema" "${start[@]}" --ema-weights --steps 2 --run new
rm -rf averaged average plain

# ---- dropout ----

echo "# dropout"
dropped=("${start[@]}" --val-fraction 0.1 --batch-size 2 --lr 1e-2 --dropout 0.2 --eval-every 4 --eval-batches 2)
run "${dropped[@]}" --steps 8 --grad-accum 2 --save-every 4 --run dropped
loss=$(last_val out)
run --from dropped/step_000008 --train text --val-fraction 0.1 --seq-len 16 --batch-size 2 --eval-batches 2 --eval-only --dropout 0.2
check "--dropout: nothing is left out in validation ($loss)" test -n "$loss" -a "$(last_val out)" = "$loss"
run --from dropped/step_000008 --generate line --max-new-tokens 8 --dropout 0.5 && cp out want
run --from dropped/step_000008 --generate line --max-new-tokens 8
check "... nor in text" cmp out want
probe_file I32 1,13 "$(tokens 13 257)" "$(tokens 13 257)" >probe13
run --from dropped/step_000008 --probe probe13 --dropout 0.5 --probe-out a.safetensors
run --from dropped/step_000008 --probe probe13 --probe-out b.safetensors
check "... nor in a probe" cmp a.safetensors b.safetensors
rm -r dropped/step_000008
cp dropped/metrics.jsonl want
run --resume --run dropped --threads 3 --verify-every 2
check "... 8 steps = 4 steps and --resume, which computes twice with 3 threads: the same metrics" cmp <(columns want) <(columns dropped/metrics.jsonl)
run "${dropped[@]}" --steps 8 --grad-accum 2 --dropout 0 --run whole_rows
check "... and it does leave out something in training" test "$(grep -o '"loss": [^,]*' whole_rows/metrics.jsonl)" != "$(grep -o '"loss": [^,]*' dropped/metrics.jsonl)"
rm -rf dropped whole_rows probe13 want a.safetensors b.safetensors

# ---- generate ----

echo "# generate"
generate=(--from run --generate "line 7: " --max-new-tokens 30)
run "${generate[@]}" --seed 5 && cp out first
run "${generate[@]}" --seed 5
check "--generate: the same text for the same --seed" cmp first out
run "${generate[@]}" --seed 6
check "--generate: another text for another" test "$(<first)" != "$(<out)"
run "${generate[@]}" --temperature 0 && cp out greedy
check "--generate begins with its prompt" grep -q '^line 7: ' greedy
run --from run --generate "line 7: the plain loop is the law" --max-new-tokens 3
check "... which may be longer than the model's positions: what is read of it is said" test "$(grep -c "of the prompt's 34 tokens the model reads the last 24" err)" = 1
run "${generate[@]}" --temperature 0 --seed 6 --threads 1
check "--temperature 0: the same text for every --seed" cmp greedy out
run "${generate[@]}" --top-k 1 --seed 8
check "--top-k 1: the text of --temperature 0" cmp greedy out
run "${generate[@]}" --top-p 0 --seed 9
check "--top-p 0: the text of --temperature 0" cmp greedy out
run "${generate[@]}" --min-p 1 --seed 9
check "--min-p 1: the text of --temperature 0" cmp greedy out
run "${generate[@]}" --top-k 5 --top-p 0.9
check "--top-k and --top-p together: status 0" test $status = 0
run "${generate[@]}" --temperature 0 --max-new-tokens 100 && cp out long_greedy
run "${generate[@]}" --temperature 0 --max-new-tokens 100 --repetition-penalty 1.5
check "--repetition-penalty 1.5: another greedy text, in which more different characters come" \
    test "$(grep -o . out | sort -u | wc -l)" -gt "$(grep -o . long_greedy | sort -u | wc -l)"
run "${generate[@]}" --temperature 0 --prompt-eot 0
check "--prompt-eot 0: another text" test $status = 0 -a "$(<out)" != "$(<greedy)"
until_stop() {  # STOP OPTION...: is the text that of the same options up to STOP? The prompt, "line 7: ", is no part of it
    local stop=$1 text
    shift
    run "$@" && text=$(<out) && run "$@" --stop "$stop" &&
        [ "$(<out)" = "line 7: $(printf '%s' "${text#line 7: }" | sed "s/$stop.*//")" ] && [ "$(<out)" != "$text" ]
}
text=$(<long_greedy)
stop=${text:13:2}
check "--stop: the text ends before \"$stop\"" until_stop "$stop" "${generate[@]}" --temperature 0 --max-new-tokens 100
cp out until
run "${generate[@]}" --temperature 0 --max-new-tokens 100 --stop "nowhere\\|$stop"
check "--stop with several texts: the first that comes" cmp out until
run "${generate[@]}" --temperature 0 --max-new-tokens 100 --stop "nowhere\\|line 7: "
check "--stop: what does not come, or stands in the prompt, stops nothing" cmp out long_greedy
echo '{"model": {"unk_token": "a", "vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": ["a b"]},
    "added_tokens": [{"id": 4, "content": "<|im_end|>", "special": true}]}' >five.json
five=(--config five_config.json --tokenizer five.json --generate ab --max-new-tokens 40 --temperature 1)
sed 's/257/5/' tiny.json >five_config.json
wrong="" ended=0
for seed in {1..12}; do  # an untrained model: each of its 5 tokens is as likely
    run "${five[@]}" --seed $seed && text=$(<out)
    for stop in ba aba bb; do
        run "${five[@]}" --seed $seed --stop $stop
        rest=${text#ab}
        [ "$(<out)" = "ab${rest%%$stop*}" ] || wrong+=" $seed:$stop"
    done
    run "${five[@]}" --seed $seed --stop '<|im_end|>'
    [[ $text == "$(<out)"* ]] || wrong+=" $seed:special"
    [ "$text" = "$(<out)" ] || ended=$((ended + 1))
done
check "--stop that begins in the middle of a token or goes over several" test -z "$wrong"
check "--stop with the name of a special token ends at that token" test $ended -gt 0
run "${generate[@]}" --samples 3 --temperature 0
check "--samples 3: three texts, numbered" cmp out <(for i in 1 2 3; do echo "--- sample $i of 3" && cat greedy; done)
printf 'line 7: ' | "$trainer" "${generate[@]}" --generate - --temperature 0 >out
check "--generate -: the prompt from standard input" cmp greedy out
run "${generate[@]}" --max-new-tokens 200 --temperature 0
check "a text longer than the model's 24 positions" test "$(wc -c <out)" -gt 100
run "${generate[@]}" --generate "$(head -c 700 text/a.txt)" --max-new-tokens 5
check "a prompt longer than the model's 24 positions" test $status = 0 -a "$(wc -c <out)" -ge 700

# ---- memory ----

echo "# memory"
shard $(tokens 400 50257) >big.bin
big=(--model d6 --train big.bin --batch-size 4 --seq-len 64 --steps 1000)
run --config tiny.json --train text --seq-len 4 --dry-run
check "the largest batch-size of the box is one that the option takes" test "$(awk '/largest batch-size/ { print $5 <= 65536 }' out)" = 1
run "${big[@]}" --dry-run
check "--dry-run: status 0 and no folder" test $status = 0 -a ! -e runs
mib() { awk '/^\| memory  / { print int($4 * ($5 == "GiB" ? 1024 : 1)) }' out; }
predicted=$(mib)
if [ $is_asan = 1 ]; then
    skip "--dry-run against the real peak: the sanitizer needs memory of its own"
else
    "$trainer" "${big[@]}" --run big >out 2>err &
    pid=$!
    until grep -q '^step 1/' out || ! kill -0 $pid; do sleep 0.1; done
    peak=$(awk '/VmHWM/ { print int($2 / 1024) }' /proc/$pid/status)
    { kill -KILL $pid && wait $pid; } 2>/dev/null
    check "--dry-run: $predicted MiB predicted, $peak MiB used, within 2%" test $((100 * predicted)) -le $((102 * peak)) -a $((100 * predicted)) -ge $((98 * peak))
    run "${start[@]}" --dry-run && predicted=$(mib)
    peak=$("$python" -c 'import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)' "$trainer" "${start[@]}" --steps 4 --run small)
    check "of a tiny model: $predicted MiB predicted, $peak MiB used, no more" test "$peak" -gt 0 -a "$peak" -le $((predicted + 2))
fi
timeout 60 "$trainer" --model gpt3:c12288 --dry-run >out 2>err
check "--dry-run of 175 billion parameters: status 1, memory by class, what to change" \
    test $? = 1 -a "$(grep -cE '^\| +(gradients, moments|activations) ' out)" = 2 -a "$(grep -c 'try a smaller' err)" = 1

# ---- what is refused ----

echo "# refused: status 2, one line, nothing left behind"
broken() {  # NAME FILE SED-SCRIPT: a Hugging Face folder with one thing wrong
    cp -r hf "$1"
    sed -i "$3" "$1/$2"
}
broken missing_tensor model.safetensors 's/ln_f\.bias"/ln_f.bixs"/'
broken shape model.safetensors 's/\[24,33\]/[33,24]/'
broken dtype model.safetensors 's/\(ln_f\.bias":{"dtype":\)"F32"/\1"I32"/'
broken layers config.json 's/"n_layer": 2/"n_layer": 3/'
broken type config.json 's/"n_layer": 2/"n_layer": "2"/'
broken size config.json '/n_embd/d'
broken heads config.json 's/"n_head": 3/"n_head": 2/'
broken relu config.json 's/gelu_new/relu/'
broken untied config.json 's/\("tie_word_embeddings"\): true/\1: false/'
broken llama config.json 's/"gpt2"/"llama"/'
broken json config.json '1s/{/[/'
cp -r hf cut
head -c -7 hf/model.safetensors >cut/model.safetensors
sed 's/257/50257/' tiny.json >large.json
sed 's/24/10000/' tiny.json >deep.json

echo "ten bytes" >ten.txt
patched model.bin 0 4 20240327 >magic.bin
patched model.bin 4 4 1 >version.bin
patched model.bin 12 4 2147483647 >vocabulary.bin
patched model.bin 16 4 1024 3 1048575 >huge.bin
patched model.bin 20 4 2 >heads.bin
patched model.bin 24 4 -33 >negative.bin
head -c 1000 model.bin >header.bin
head -c -1 model.bin >cut.bin
cat model.bin ten.txt >longer.bin
echo '<html><body>Sign in</body></html>' >page.bin
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n' >pointer.bin
shard >empty.bin
head -c -1 big.bin | head -c 1823 >cut_shard.bin
printf 'seed = 1\nsteps = many\n' >bad.txt
mkdir empty

probe_file I32 1,4 "1 2 257 3" "1 2 3 4" >beyond.probe
probe_file I32 1,4 "1 -2 25 3" "1 2 3 4" >negative.probe
probe_file I32 1,4 "1 2 3 4" "1 2 3 300" >target.probe
probe_file I32 1,4 "1 2 3 4" "-1 -2 -3 -100" >uncounted.probe
probe_file I32 1,25 "$(tokens 25 257)" "$(tokens 25 257)" >long.probe
probe_file F32 1,4 "1 2 3 4" "1 2 3 4" >dtype.probe
probe_file I32 4 "1 2 3 4" "1 2 3 4" >flat.probe
probe_file I32 1,4 "1 2 3 4" "1 2 3 4" | sed 's/targets/target_/' >no_targets.probe

touch marker
new=("${start[@]}" --steps 2 --run new)

# an option that some trainers have and others lack: these name those (llmc/run/other_trainers.h), as --help of all says
have() { grep -qE "^  --$2 " "$1.help"; }
if ! is_quick; then
    own=($(make -s -C "$root" trainers) train_gpt2cu)
    for name in "${own[@]}"; do
        need_build program "CPU=1 OPT=-Og" $name  # what they say, not what they compute
        "$program" --help >$name.help
        printf -v "program_$name" '%s' "$program"
    done
    n=0 wrong=""
    for name in $(sed -nE 's/^  --([a-z0-9-]+) .*/\1/p' ./*.help | sort | uniq -c | awk -v all=${#own[@]} '$1 < all { print $2 }'); do
        listed="" lacks=""
        for program in "${own[@]}"; do
            if have $program $name; then listed+=" $program"; else lacks=$program; fi
        done
        at=program_$lacks n=$((n + 1))
        "${!at}" --$name 1 >out 2>err
        [ "$(sed -n 's/.*, found one of //p' err | grep -oE 'train_\w+' | sort)" = "$(printf '%s\n' $listed | sort)" ] || wrong+=" --$name"
    done
    check "an option that only some trainers have, of $n: who lacks it names those (not:$wrong)" test $n -gt 90 -a -z "$wrong"
fi
refuse "an unknown option, with the nearest" "--batch-sise: unknown option, did you mean --batch-size?" "${new[@]}" --batch-sise 4
refuse "a word that is no option" 'found "run"' run
refuse "an integer with letters" '--batch-size: expected an integer 1..65536, found "4x"' "${new[@]}" --batch-size 4x
refuse "a number beyond float" '--lr: expected a number 0..10, found "1e400"' "${new[@]}" --lr 1e400
refuse "nan" '--clip: expected a number' "${new[@]}" --clip nan
refuse "a negative number" '--weight-decay: expected a number 0..10, found "-1"' "${new[@]}" --weight-decay -1
refuse "an integer out of range" '--batch-size: expected an integer 1..65536, found "0"' "${new[@]}" --batch-size 0
refuse "an integer beyond 64 bits" '--steps: expected an integer' "${new[@]}" --steps 99999999999999999999
refuse "a value missing at the end" "--steps: expected" "${new[@]}" --steps
refuse "a value missing before an option" "found the option --lr" "${new[@]}" --steps --lr 1
refuse "a word that is not in the list" '--schedule: expected constant|linear|cosine|wsd, found "step"' "${new[@]}" --schedule step
refuse "a switch that is neither 0 nor 1" "--shuffle: expected 0 or 1" "${new[@]}" --shuffle 2
refuse "--epochs 0" "--epochs: expected a number" "${new[@]}" --epochs 0
refuse "an --args file that is not there" "nowhere.txt: No such file" --args nowhere.txt
refuse "an error in an --args file, with its line" "bad.txt:2: --steps: expected" --args bad.txt
refuse "--from with --model" "expected one of --model, --from, --config and --resume, found --from and --model" --from run --model tiny --train text --run new
refuse "--config with --model" "expected one of" "${new[@]}" --model tiny
refuse "no model at all" "expected one of --model, --from, --config and --resume, found none" --train text --run new
refuse "--resume with --model" "expected one of --model, --from, --config and --resume, found --model and --resume" --resume --run run --model tiny
refuse "--resume without --run" "--resume: needs the --run" --resume
refuse "a pattern without quotes" "found \"text/b.txt\", a second file after --train: put a pattern in quotes (--train '*.txt'), so that the shell leaves it alone, or a comma between two files (--train a,b)" --model tiny --train text/*.txt --run new
refuse "--val with weights" "--val: expected paths without weights, found text:1" --model tiny --train text --val text:1 --run new
refuse "a weight of 0" 'text:0: expected a weight above 0, at most 1e9, after the colon, as in books.txt:3, found "0"' --model tiny --train text:0 --run new
refuse "a path without the weight that others have" "text/b.txt: expected a weight, as other paths have one, found none" --model tiny --train text:1,text/b.txt --run new
refuse "a weight too small for a row" "text/b.txt: its weight 1e-05 of 1.00001 gives it none of the " --model tiny --train text:1,text/b.txt:1e-5 --seq-len 16 --run new
refuse "a source too short for a row" "text/b.txt: too short: a row of --seq-len 128 needs 129 tokens in one piece, the longest piece has 55" --model tiny --train text,text/b.txt --seq-len 128 --run new
refuse "--resume where no run is" "holds no complete checkpoint" --resume --run nowhere
refuse "nothing to do" "nothing to do: expected --train" --model tiny
refuse "a model that no preset names" '--model: expected tiny, d6' --model d13 --train text --run new
refuse "--seq-len beyond the model" "--seq-len: expected at most the model's 24 positions, found 25" "${new[@]}" --seq-len 25
refuse "--batch-tokens that is no multiple" "the nearest are 64 and 128" "${new[@]}" --batch-tokens 100
refuse "--batch-tokens below one micro-batch" "the nearest are 64 and 128" "${new[@]}" --batch-tokens 10
refuse "both sizes of an update" "--grad-accum: says the same as --batch-tokens" "${new[@]}" --grad-accum 2 --batch-tokens 64
refuse "--batch-size times --seq-len beyond 2^29" "--batch-size: 65536 rows of 10000 positions are more than" --config deep.json --train text --batch-size 65536 --seq-len 10000 --run new
run "${start[@]}" --steps 40 --run warm
check "--warmup: a twentieth of the steps unless told otherwise: of 40 the second has the peak" \
    test "$(sed -nE '2,3s/.*"lr": ([^,]*),.*/\1/p' warm/metrics.jsonl | tr '\n' ' ')" = "0.000150000007 0.000300000014 "
rm -rf warm
refuse "--noise-scale of one micro-batch" "--noise-scale: compares the micro-batches of an update, of which there is one: give --grad-accum 2" "${new[@]}" --noise-scale 1
refuse "--warmup as long as the run" "--warmup: expected less than the 2 steps of the run, found 2" "${new[@]}" --warmup 2
refuse "--warmup that is all of the run" "--warmup: expected an integer, 0 or more, or a percentage below 100%, found \"100%\"" "${new[@]}" --warmup 100%
refuse "--freeze that matches nothing" '--freeze: "wte" matches no tensor' "${new[@]}" --freeze wte
refuse "--eval-only without data" "--eval-only: needs --val" --from run --eval-only
refuse "--eval-only and samples" "--sample-every: is for training" --from odd --eval-only --val text --sample-every 4
refuse "--generate without the model's tokenizer" "--generate: the model has 50257 tokens, --tokenizer bytes has 257" --config large.json --generate x
refuse "--generate with a model smaller than its tokenizer" "the model has 131 tokens" --from odd --generate x
echo '{"model":{"type":"BPE","vocab":{"?":0,"a":1},"merges":[],"unk_token":"?"}}' >two.json
shard $(tokens 200 2) >two.bin
refuse "a tokenizer without end of text, which config.json of a checkpoint names" "the tokenizer has no end of text" \
    --model tiny --train two.bin --tokenizer two.json --seq-len 8 --run new
refuse "a tokenizer that is not there" "nowhere.bin: cannot be opened" "${new[@]}" --tokenizer nowhere.bin
refuse "a tokenizer that is something else" "expected a tokenizer file" "${new[@]}" --tokenizer text/a.txt
shard $(tokens 400 100) >other.bin
refuse "--doc-reset with tokens of another tokenizer" "--doc-reset: expected documents that begin with token 130" --config odd.json --train other.bin --seq-len 13 --doc-reset 1 --run new
echo '{"model": {"unk_token": "a", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}' >no_eot.json
shard $(tokens 400 3) >three.bin
refuse "--doc-reset with one source of another tokenizer" "--doc-reset: expected documents that begin with token 256, end of text, found none in plain.bin" --config tiny.json --train text,plain.bin --seq-len 13 --doc-reset 1 --run new
refuse "a tokenizer without end of text, before the first step" "the tokenizer has no end of text" --model tiny --train three.bin --seq-len 13 --tokenizer no_eot.json --sample-every 0 --run new
refuse "training data that is not there" "nowhere: expected a file, a folder or a pattern" "${new[@]}" --train nowhere
refuse "training data in an empty folder" "expected text or token shards" "${new[@]}" --train empty
refuse "text too short for a row" "too short: a row of --seq-len 24 needs 25 tokens" --config tiny.json --train ten.txt --run new
refuse "an empty shard, split" "too short" "${new[@]}" --train empty.bin --val-fraction 0.1
refuse "a shard cut short" "expected 1824 bytes for the header's 400 tokens, found a file of 1823" "${new[@]}" --train cut_shard.bin
refuse "token ids beyond the vocabulary" "big.bin: expected token ids below 257, the vocabulary of the model, found" "${new[@]}" --train big.bin
samples=("${new[@]}" --sample-every 1 --sample-prompts)
mkfifo prompt_pipe
head -c 1100000 /dev/zero | tr '\0' a >long_prompts.txt
printf 'good\n\nbad \\d\n' >bad_prompts.txt
printf 'good\nno \303 UTF-8\n' >no_utf8.txt
printf '\n\r\n' >no_prompts.txt
echo "a prompt of more than 24 bytes" >wide_prompts.txt
refuse "prompts that are not there" "--sample-prompts: nowhere: cannot be opened" "${samples[@]}" nowhere
refuse "prompts in a folder" "--sample-prompts: text: expected a file, found a folder" "${samples[@]}" text
refuse "prompts in a pipe" "--sample-prompts: prompt_pipe: expected a file, found a pipe" "${samples[@]}" prompt_pipe
refuse "more than 1 MiB of prompts" "expected at most 1 MiB of prompts, found 1.05 MiB" "${samples[@]}" long_prompts.txt
refuse "a prompt with another backslash" 'bad_prompts.txt:3: expected \n, \t or \\, a backslash itself, found \d' "${samples[@]}" bad_prompts.txt
refuse "a prompt that is no UTF-8" "no_utf8.txt:2: expected UTF-8" "${samples[@]}" no_utf8.txt
refuse "a file without prompts" "no_prompts.txt: expected a prompt on each line, found none" "${samples[@]}" no_prompts.txt
refuse "a prompt longer than the model" "expected a prompt of at most the model's 24 positions, found 31 tokens with end of text in front" "${samples[@]}" wide_prompts.txt
refuse "prompts without samples" "--sample-prompts: is for samples while training: give --sample-every too" "${new[@]}" --sample-prompts prompts.txt
refuse "prompts for a model without text" "--sample-prompts: the model has 131 tokens" --config odd.json --train odd.bin --seq-len 13 --run new --sample-every 1 --sample-prompts prompts.txt
refuse "--stop for a model without text" "--stop: the model has 131 tokens" --config odd.json --train odd.bin --seq-len 13 --run new --sample-every 1 --stop x
refuse "an empty text in --stop" '--stop: expected texts with \| between them, found an empty one' --from run --generate x --stop 'a\|'
refuse "another backslash in --stop" '--stop: expected \n, \t or \\, a backslash itself, found \.' --from run --generate x --stop 'a\.b'
refuse "an empty prompt without end of text" "a prompt without a token" --from run --generate "" --prompt-eot 0
refuse "an output over the prompts" "--export-bin: prompts.txt is what --sample-prompts reads" "${samples[@]}" prompts.txt --export-bin prompts.txt
refuse "a run folder in use" "there are checkpoints in this folder" "${start[@]}" --steps 2 --run run
refuse "a model that is not there" "nowhere: No such file" --from nowhere --train text --run new
refuse "a config that is not there" "nowhere.json: cannot be opened: No such file" --config nowhere.json --train text --run new
refuse "a folder without a model" "found neither step_* nor config.json in it" --from text --train text --run new
refuse "an HTML page for a model" "found an HTML page" --from page.bin --train text --run new
refuse "a Git LFS pointer for a model" "found a Git LFS pointer" --from pointer.bin --train text --run new
refuse "a .bin with another magic number" "magic.bin: expected a folder, a .safetensors file or llm.c's .bin" --from magic.bin --train text --run new
refuse "a .bin of an old version" "expected version 3 (float32) or 5 (bfloat16), found 1" --from version.bin --train text --run new
refuse "a .bin cut in its header" "expected a header of 1024 bytes" --from header.bin --train text --run new
refuse "a .bin cut short" "cut.bin: expected" --from cut.bin --train text --run new
refuse "a .bin with something appended" "longer.bin: expected" --from longer.bin --train text --run new
refuse "a .bin whose header promises terabytes" "huge.bin: expected" --from huge.bin --train text --run new
refuse "a .bin whose heads do not divide" "heads.bin: expected the sizes of a GPT-2" --from heads.bin --train text --run new
refuse "a .bin with a vocabulary of 2^31 - 1" "vocabulary.bin: expected the sizes of a GPT-2" --from vocabulary.bin --train text --run new
refuse "a .bin with a negative size" "negative.bin: expected the sizes of a GPT-2" --from negative.bin --train text --run new
refuse "safetensors without one tensor" 'tensor "transformer.ln_f.bias" is missing' --from missing_tensor --train text --run new
refuse "safetensors with another shape" 'tensor "transformer.wpe.weight": expected 2 dimensions (24, 33), found 2 (33, 24)' --from shape --train text --run new
refuse "safetensors with another dtype" 'tensor "transformer.ln_f.bias": expected F32, F16 or BF16, found I32' --from dtype --train text --run new
refuse "safetensors cut short" "model.safetensors: tensor" --from cut --train text --run new
refuse "safetensors that config.json does not fit" 'tensor "transformer.h.2.ln_1.weight" is missing' --from layers --train text --run new
refuse "config.json that is no JSON" "config.json:2: expected JSON" --from json --train text --run new
refuse "config.json with another type" '"n_layer": expected an integer 1..1024, found "2"' --from type --train text --run new
refuse "config.json without a size" '"n_embd": expected an integer 1..1048576, found nothing' --from size --train text --run new
refuse "config.json whose heads do not divide" '"n_embd" 33: expected a multiple of "n_head" 2' --from heads --train text --run new
refuse "config.json with another activation" '"activation_function": this trainer computes "gelu_new", found "relu"' --from relu --train text --run new
refuse "config.json with an output matrix of its own" '"tie_word_embeddings": this trainer computes true, found false' --from untied --train text --run new
refuse "config.json of another model" '"model_type": this trainer computes "gpt2", found "llama"' --from llama --train text --run new
refuse "a probe that is not there" "nowhere: cannot be opened" --from run --probe nowhere
refuse "a probe that is text" "text/a.txt: expected safetensors" --from run --probe text/a.txt
refuse "a probe without targets" 'expected a tensor "targets", I32 of shape (B, T), found none of that name: the file has inputs, target_' --from run --probe no_targets.probe
refuse "a probe of another dtype" 'expected a tensor "inputs", I32 of shape (B, T), found F32 of shape (1, 4)' --from run --probe dtype.probe
refuse "a probe of one dimension" 'expected a tensor "inputs", I32 of shape (B, T), found I32 of shape (4)' --from run --probe flat.probe
refuse "a probe with a token beyond the vocabulary" "inputs[2]: expected a token 0..256, found 257" --from run --probe beyond.probe
refuse "a probe with a negative input" "inputs[1]: expected a token" --from run --probe negative.probe
refuse "a probe with a target beyond the vocabulary" "targets[3]: expected a token 0..256 (negative: not counted), found 300" --from run --probe target.probe
refuse "a probe without a counted target" "all targets are negative" --from run --probe uncounted.probe
refuse "a probe longer than the model" "expected at most the model's 24 positions, found 25" --from run --probe long.probe
check "none of them touched the run that was there" test "$(find run -type f -newer marker ! -name .lock | wc -l)" = 0

finish
