#!/usr/bin/env bash
# What others can do to a run, short of being root: names, links and folders put where it reads and writes, descriptors
# closed, signals, kills. It must end soon, say why, lose nothing, and leave alone what is not its own.
#     dev/attacks.sh                 about a minute after the builds
# under nohup a hang-up is ignored, which is one of the things that are tried
[ "${SIGNALS-}" = usual ] || SIGNALS=usual exec env --default-signal=HUP "$0" "$@"
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
need_build trainer "" train_gpt2
need_build launch "" launch
tokenize=$(build "" tools/tokenize) || exit 1
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$work"' EXIT
cd "$work" || exit 1
head -c 20000 "$root/README.md" >text.txt
cat >tiny.json <<'END'
{"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 257}
END
start=(--config tiny.json --train text.txt --seq-len 16 --batch-size 2 --eval-every 0 --threads 1 --save-minutes 0)

run() {  # SECONDS OPTION...: into out and err; status is kept
    timeout "$1" "$trainer" "${@:2}" >out 2>err </dev/null
    status=$?
}

fresh() {  # a run of four steps in `run`, with checkpoints at 2 and 4, and a file of somebody else's
    rm -rf run elsewhere && mkdir elsewhere
    echo mine >elsewhere/victim
    run 60 "${start[@]}" --steps 4 --save-every 2 --run run
    [ $status = 0 ] || { echo "FAIL  no run to attack: $(<err)"; exit 1; }
}

untouched() { [ "$(cat elsewhere/victim)" = mine ]; }

went_on() {  # after resuming to STEP
    [ $status = 0 ] && [ -e "run/step_$1/manifest.json" ] && grep -q "done after step $((10#$1))" out
}

steps() {  # RUN: how many its records have
    local n
    n=$(grep -c '"lr": [0-9]' "$1/metrics.jsonl" 2>/dev/null)
    echo "${n:-0}"
}

whole_checkpoints() { compgen -G 'run/step_*[0-9]/manifest.json' | wc -l; }  # how many `run` has

grows() {  # RUN: does it go on?
    local n
    n=$(steps "$1")
    for _ in $(seq 200); do
        [ "$(steps "$1")" -le "$n" ] || return 0
        sleep 0.05
    done
    return 1
}

begin() {  # OPTION...: in the background, until its third step; $! is its process
    "$trainer" "$@" >out 2>err </dev/null &
    for _ in $(seq 400); do
        [ "$(steps run)" -lt 3 ] || return 0
        sleep 0.05
    done
}

# ---- names ----
fresh
mkdir run/step_20 run/step_7777 && cp run/step_000004/* run/step_20/ && : >run/step_7777/manifest.json
run 30 --resume --run run --steps 6
check "folders named step_20 and step_7777 are nobody's checkpoints" went_on 000006
check "and stay" test -e run/step_20/model.safetensors -a -e run/step_7777/manifest.json

fresh
cp -r run/step_000004 run/step_000004.old && cp -r run/step_000002 run/step_000002.old
run 30 --resume --run run --steps 6
check "copies that somebody has named step_N.old stay" \
    test $status = 0 -a -e run/step_000004.old/model.safetensors -a -e run/step_000002.old/model.safetensors

rm -rf run && mkdir run && echo '{"mine": 1}' >run/settings.json && echo mine >run/summary.json
run 30 "${start[@]}" --steps 2 --run run
check "files of somebody's under the names that a run writes are set aside" \
    test $status = 0 -a "$(<run/settings.old-1.json)" = '{"mine": 1}' -a "$(<run/summary.old-1.json)" = mine

rm -rf run && mkdir run && cp text.txt run/samples.txt && cp tiny.json run/settings.json
run 30 "${start[@]}" --train run/samples.txt --steps 2 --run run
check "the text that a run would read under its own names is refused" test $status = 2 -a -s run/samples.txt
for data in text.txt,run/samples.txt run/samples.txt:2,text.txt:1 'run/*.txt' "run/../run/samples.txt , text.txt"; do
    run 30 "${start[@]}" --train "$data" --steps 2 --run run
    check "... as one of $data, too" test $status = 2 -a -s run/samples.txt -a "$(grep -c -- '--train: run.* a file that the run in --run run writes' err)" = 1
done
run 30 "${start[@]}" --train text.txt,run --val run/samples.txt,text.txt --steps 2 --run run
check "... for validation" test $status = 2 -a -s run/samples.txt -a "$(grep -c -- '--val: run/samples.txt is' err)" = 1
run 30 "${start[@]}" --config run/settings.json --steps 2 --run run
check "and so is its config" test $status = 2 -a "$(cmp -s tiny.json run/settings.json; echo $?)" = 0

rm -rf run && : >run
run 30 "${start[@]}" --steps 2 --run run
check "a file where the run's folder should be: status 2" test $status = 2 -a "$(grep -c 'expected a folder' err)" = 1
rm run

fresh
mkfifo endless.txt
run 10 "${start[@]}" --train endless.txt --steps 2 --run run
check "an occupied folder is refused before any data is read" \
    test $status = 2 -a "$(grep -c 'there are checkpoints in this folder' err)" = 1

rm -rf run texts && mkdir texts && cp text.txt texts/
run 30 "${start[@]}" --train texts --steps 2 --run texts/run --sample-every 1 --max-new-tokens 8
run 30 --resume --run texts/run --steps 4
check "a run inside the folder that it trains on reads no file of its own" test $status = 0
rm -rf texts

# ---- links ----
fresh
mkdir elsewhere/folder && echo '{}' >elsewhere/folder/model.safetensors
ln -s ../elsewhere/folder run/step_000007.tmp
run 30 --resume --run run --steps 6
check "a link in the place of a temporary folder: the run goes on" went_on 000006
check "the link is gone, what it led to is not" test ! -L run/step_000007.tmp -a -e elsewhere/folder/model.safetensors

fresh
mkdir elsewhere/folder && echo '{}' >elsewhere/folder/config.json
ln -s ../elsewhere/folder run/step_000006.tmp
run 30 --resume --run run --steps 6
check "a link under the name that the next checkpoint is written by: the run goes on" went_on 000006
check "nothing is written through it" test "$(ls elsewhere/folder)" = config.json

fresh
mv run/step_000002 elsewhere/ && ln -s ../elsewhere/step_000002 run/step_000002
run 30 --resume --run run --steps 8 --save-every 2
check "a checkpoint moved elsewhere, with a link: the run goes on" went_on 000008
check "what was moved is not pruned" test -e elsewhere/step_000002/model.safetensors

fresh
rm run/.lock && ln -s ../elsewhere/victim run/.lock
run 30 --resume --run run --steps 6
check "a link in the place of .lock is refused" test $status = 1
check "and not written through" untouched

for name in metrics.jsonl.tmp settings.json.tmp summary.json.tmp samples.txt; do
    fresh
    rm -f "run/$name" && ln -s ../elsewhere/victim "run/$name"
    run 30 --resume --run run --steps 6 --sample-every 6 --max-new-tokens 4
    check "a link in the place of $name is not written through" untouched
    check "and the run ends with the reason" test $status = 1 -a "$(grep -c "$name: .*symbolic link" err)" = 1
    rm "run/$name" && ln elsewhere/victim "run/$name"
    run 30 --resume --run run --steps 6 --sample-every 6 --max-new-tokens 4
    check "nor through a second name of a file" untouched
done

fresh
rm run/.lock && ln elsewhere/victim run/.lock
run 30 --resume --run run --steps 6
check "a hard link in the place of .lock is refused, and not written through" test $status = 1 -a "$(cat elsewhere/victim)" = mine

for name in metrics.jsonl samples.txt settings.json .lock step_000004/manifest.json step_000004/model.safetensors; do
    fresh
    rm -f "run/$name" && mkfifo "run/$name"
    run 10 --resume --run run --steps 6 --sample-every 6 --max-new-tokens 4
    check "a pipe in the place of $name does not hang the run" test $status -lt 3
done

fresh
ln -s elsewhere/victim model.bin.tmp
run 30 --from run --export-bin model.bin
check "a link in the place of --export-bin's temporary file is not written through" untouched
rm -f model.bin model.bin.tmp

fresh
echo note >run/step_000002/notes.json
run 30 --resume --run run --steps 8 --save-every 2
check "a user's file in a checkpoint that is pruned stays" test "$(cat run/step_000002/notes.json)" = note
check "but the checkpoint goes" test ! -e run/step_000002/model.safetensors

# ---- folders that change under a run ----
for deed in removed replaced; do
    rm -rf run moved
    begin "${start[@]}" --steps 100000000 --save-every 2000 --run run
    pid=$!
    mv run moved
    [ $deed = removed ] || { mkdir run && echo other >run/.lock; }
    timeout 60 tail --pid=$pid -f /dev/null
    wait $pid
    status=$?
    check "the folder is $deed while a run writes to it: status 1, and the reason" \
        test $status = 1 -a "$(grep -c 'this folder was \(removed or renamed\|replaced\)' err)" = 1
    check "and nothing is written to what stands there now" test "$(ls run 2>/dev/null | wc -l)" = 0
    rm -rf moved
done

rm -rf run
begin "${start[@]}" --steps 100000000 --save-every 2000 --run run
rm run/.lock
for _ in $(seq 400); do [ "$(ls -d run/step_* 2>/dev/null | wc -l)" -lt 1 ] || break; sleep 0.05; done
check "a .lock that somebody has tidied away is taken anew" test -e run/.lock -a "$(grep -c 'locked anew' err)" = 1
kill -TERM $! && wait $!
check "and the run goes on to its end" test $? = 0

# ---- losses that are not finite ----
fresh
run 60 --resume --run run --steps 300 --lr 10 --clip 0 --save-every 1 --keep 1 --max-skips 3
check "updates that are not finite end a run with status 1" test $status = 1
folder=$(grep -o 'run/step_[0-9]*' err | tail -1)
check "the message names a checkpoint of before, and it is there" test -e "$folder/manifest.json"
check "whose last update was finite" grep -q '"skips": 0' "$folder/manifest.json"

# ---- descriptors, signals, kills ----
rm -rf run
timeout 60 "$trainer" "${start[@]}" --steps 4 --run run <&- >&- 2>&-
check "started without standard input, output and error: it trains" test $? = 0
check "and its records hold nothing but records" test "$(grep -vc '^{.*}$' run/metrics.jsonl)" = 0

rm -rf run
begin "${start[@]}" --steps 100000000 --run run
pid=$!
kill -HUP $pid
timeout 60 tail --pid=$pid -f /dev/null
wait $pid
check "SIGHUP, of a terminal that is gone, saves a checkpoint" test "$? $(whole_checkpoints)" = "0 1"

rm -rf run
(
    trap '' HUP
    begin "${start[@]}" --steps 100000000 --run run
    kill -HUP $! && sleep 0.2 && grows run
    went_on=$?
    kill -9 $!
    exit $went_on
)
check "but not under nohup" test $? = 0

rm -rf run
begin "${start[@]}" --steps 100000000 --run run
kill -9 $! && wait $! 2>/dev/null
run 60 "${start[@]}" --steps 4 --run run
check "killed before the first checkpoint: the same command begins anew" test $status = 0 -a -e run/step_000004
check "and the records of the first start are kept" test -s run/metrics.old-1.jsonl

rm -rf run
start+=(--schedule constant)  # the same learning rate, whatever --steps says
run 60 "${start[@]}" --steps 4 --run run --continue
check "--continue begins a run" test $status = 0 -a -e run/step_000004
run 60 "${start[@]}" --steps 6 --run run --continue
check "the same command goes on with it" test $status = 0 -a "$(grep -c 'resumed.*after step 4' out)" = 1
run 60 "${start[@]}" --steps 6 --run straight
check "to the same bits" cmp -s run/step_000006/model.safetensors straight/step_000006/model.safetensors
run 60 "${start[@]}" --config other.json --steps 8 --run run --continue
check "--continue with another model than the run began with is refused" test $status = 2 -a "$(grep -c 'the run began with tiny.json' err)" = 1
run 60 --resume --continue --run run
check "--resume and --continue together are refused" test $status = 2

# its only checkpoint is one that was being replaced when the process was killed, without RENAME_EXCHANGE
rm -rf run/step_000006 && mv run/step_000004 run/step_000004.replaced
run 60 "${start[@]}" --steps 6 --run run --continue
check "--continue finds the checkpoint that a kill left aside" test $status = 0 -a "$(grep -c 'resumed.*after step 4' out)" = 1
mv run/step_000006 run/step_000006.replaced
run 60 --resume --run run --steps 7
check "--resume finds it too, where it is the only one" test $status = 0 -a "$(grep -c 'resumed.*after step 6' out)" = 1
mv run/step_000007 run/step_000007.replaced && rm -rf run/step_00000[46]
run 60 "${start[@]}" --steps 6 --run run
check "and a start refuses to begin beside it" test $status = 2

echo more >>text.txt
run 60 "${start[@]}" --steps 8 --run run --continue
check "but not with a text that has changed since" test $status = 2 -a "$(grep -c 'training data has changed' err)" = 1

rm -rf run
begin "${start[@]}" --steps 100000000 --run run --save-minutes 0.005
for _ in $(seq 600); do [ "$(whole_checkpoints)" = 0 ] || break; sleep 0.05; done
kill -9 $! && wait $! 2>/dev/null
run 60 --resume --run run --steps 1 --dry-run
check "--save-minutes saves by time: a killed run goes on" test $status = 0

# the clock of rank 0, which knows what writing costs, decides for all
rm -rf run
timeout 60 "$launch" -n 2 "$trainer" "${start[@]}" --grad-accum 2 --steps 300 --run run --save-minutes 0.0001 >out 2>err
check "--save-minutes on two ranks: a checkpoint is at most a twentieth of the work" \
    test $? = 0 -a "$(sed -n 's/^checkpoints: \([0-9]*\) of .*/\1/p' out)" -lt 100

# ---- a file system without locks, a clock that jumps ----
cat >odd.c <<'END'
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int flock(int fd, int operation) { (void)fd, (void)operation; errno = ENOLCK; return -1; }
int clock_gettime(clockid_t clock, struct timespec* t) {
    static long calls;
    const int status = (int)syscall(SYS_clock_gettime, clock, t);
    if (clock == CLOCK_REALTIME) { t->tv_sec += ++calls % 2 ? 400000000 : -400000000; }
    return status;
}
time_t time(time_t* t) { if (t) { *t = -1; } return -1; }
END
gcc -O1 -shared -fPIC odd.c -o odd.so
rm -rf run runs whole
run 60 "${start[@]}" --steps 6 --run whole
LD_PRELOAD=$work/odd.so run 60 "${start[@]}" --steps 4 --save-minutes 0.0001
mv runs/* run
check "no locks, and a clock that jumps by years: it trains, and says that nobody is kept away" \
    test $status = 0 -a "$(grep -c 'this file system has no locks' err)" = 1
LD_PRELOAD=$work/odd.so run 60 --resume --run run --steps 6
check "and goes on to the same bits" cmp -s run/step_000006/model.safetensors whole/step_000006/model.safetensors

# ---- runs that begin in the same second ----
rm -rf run runs
for i in 1 2 3; do "$trainer" "${start[@]}" --steps 2 >out$i 2>err$i </dev/null & done
wait
check "three runs without a name, begun at once, have three folders" \
    test "$(ls -d runs/*/step_000002/manifest.json | wc -l)" = 3

# ---- outputs ----
rm -rf run exported
run 60 "${start[@]}" --steps 2 --run run --export-hf exported
rm -rf exported
run 60 --resume --run run --steps 4
check "--resume writes to no folder that is not named now" test $status = 0 -a ! -e exported

rm -rf out.tmp && run 60 "${start[@]}" --steps 2 --run forgotten --export-hf out.tmp
sed -i s/llmc/somebody/ out.tmp/config.json
run 60 --from run --export-hf out
check "a model of somebody's where an export is written first stays" test $status = 2 -a -e out.tmp/model.safetensors
rm -rf out.tmp && mkdir elsewhere/folder && ln -s elsewhere/folder out.tmp
run 60 --from run --export-hf out
check "and so does what a link there leads to" test -d elsewhere/folder
rm -rf out out.tmp forgotten

refused() {  # PROMISE FILE OPTION...: status 2, and the file is what it was
    [ -e "$2" ] || cp text.txt "$2"
    cp "$2" before
    run 30 "${@:3}"
    check "$1 is not written over" test "$status $(cmp -s before "$2"; echo $?)" = "2 0"
}
rm -rf run hf && run 60 "${start[@]}" --steps 2 --run run --export-hf hf
once=(--config tiny.json --seq-len 16 --batch-size 2 --eval-every 0 --threads 1 --steps 2 --run new)
refused "text under the name that an output has first" in.txt.tmp "${once[@]}" --train in.txt.tmp --export-bin in.txt
refused "text that a pattern with another spelling matches" part_0.txt "${once[@]}" --train './part_*.txt' --export-bin part_0.txt
refused "the config.json beside a model that is read" hf/config.json --from hf/model.safetensors --export-bin hf/config.json
echo "train = text.txt" >settings.args
refused "the file of --args" settings.args "${once[@]}" --args settings.args --export-bin settings.args
cp text.txt other.txt
refused "one of several texts" other.txt "${once[@]}" --train text.txt:1,other.txt:2 --export-bin other.txt
refused "one of several texts for validation" other.txt "${once[@]}" --train text.txt --val text.txt,other.txt --probe-out other.txt --export-bin other.txt
refused "somebody's text under --export-bin's name" notes.txt "${once[@]}" --train text.txt --export-bin notes.txt
refused "somebody's text under --probe-out's name" notes.txt --from run --probe nothing.safetensors --probe-out notes.txt
examples 1 4 "1 2 3 4" "2 3 4 5" >in.safetensors
cp -r hf other_hf
refused "another model under --probe-out's name" other_hf/model.safetensors --from hf --probe in.safetensors --probe-out other_hf/model.safetensors
check "... and the line says so" grep -qx 'train_gpt2: --probe-out: other_hf/model.safetensors: is there already, and not the result of a probe, which has a tensor "logits": give another name, or remove it' err
run 60 --from hf --probe in.safetensors --probe-out probed && cp probed result && head -c 3000 result >probed && run 60 --from hf --probe in.safetensors --probe-out probed
check "but over an earlier result it is, one that was cut short, too" cmp result probed
cp text.txt notes.txt
timeout 20 "$tokenize" --tokenizer bytes --out notes.txt text.txt >out 2>err
check "nor does tokenize write over somebody's text" test $? = 2 -a "$(cmp -s text.txt notes.txt; echo $?)" = 0
timeout 20 "$tokenize" --tokenizer bytes --out again.bin text.txt >out 2>err && timeout 20 "$tokenize" --tokenizer bytes --out again.bin text.txt >out 2>err
check "but over a shard it does" test $? = 0
cp text.txt book.txt
timeout 20 "$tokenize" --tokenizer bytes --out book.txt book.txt >out 2>err
check "tokenize does not write over what it reads" test $? = 2 -a "$(cmp -s text.txt book.txt; echo $?)" = 0
cp text.txt x_train_000002.bin.tmp
timeout 20 "$tokenize" --out x --shard-tokens 4000 ./x_train_0*.tmp >out 2>err
check "nor what its second shard would be written to first" \
    test $? = 2 -a "$(cmp -s text.txt x_train_000002.bin.tmp; echo $?) $(ls x_*)" = "0 x_train_000002.bin.tmp"
rm -rf elsewhere && mkdir elsewhere && echo mine >elsewhere/victim && rm x_* && ln -s elsewhere/victim x_val_000000.bin.tmp
timeout 20 "$tokenize" --out x --val-fraction 0.1 text.txt >out 2>err
check "a link where a shard is written first leads nowhere" untouched

# ---- files that ask for much time or memory ----
$python "$root/dev/attack_files.py" hostile || exit 1
cp tiny.json text.txt hostile/
cd hostile || exit 1

within() {  # SECONDS MEGABYTES COMMAND...: into out and err; status is kept
    (ulimit -v $(($2 * 1024)) && timeout "$1" "${@:3}") >out 2>err </dev/null
    status=$?
}

says() {  # STATUS TEXT: it ended so, and with one line, which says that
    [ $status = "$1" ] && [ "$(wc -l <err)" = 1 ] && grep -q "$2" err
}

within 20 400 "$trainer" --config objects.json --train text.txt --dry-run
check "a config.json of 99 MB is refused for its size" says 2 'objects.json:1: .*99000109 bytes, more than'
within 20 400 "$trainer" --config small_objects.json --train text.txt --dry-run
check "one of many objects for their number" says 2 'more than 262144 commas'
within 20 400 "$tokenize" --tokenizer objects_tokenizer.json --out out.bin text.txt
check "a tokenizer.json of 33 million objects too" says 2 'more than 8388608 commas'
within 20 400 "$tokenize" --tokenizer deep_tokenizer.json --out out.bin text.txt
check "and one of 1000 brackets in each other" says 2 'more than 64 nested brackets'

for name in quadratic:takes.more.than.3.0.s cubic:match.limit exponential:match.limit; do
    within 20 400 "$tokenize" --tokenizer "${name%:*}.json" --out out.bin a.txt
    check "a regular expression of ${name%:*} time is given up" says 2 "the tokenizer's regular expression.*${name#*:}"
done
within 20 700 "$tokenize" --tokenizer groups.json --out out.bin long_a.txt
check "and one that takes much memory" says 2 'heap limit'
for tokenizer in deepseek o200k; do
    slow=""
    for text in long_*.txt; do
        within 5 400 "$tokenize" --tokenizer $tokenizer.json --out out.bin "$text"
        [ $status = 0 ] || slow="$slow $text"
    done
    check "$tokenizer's takes two million letters, blanks or line ends in a row" test -z "$slow"
done
for name in growth growths; do
    within 20 400 "$tokenize" --tokenizer $name.json --out out.bin a.txt
    check "a normalizer that makes a text 64 times longer is refused: $name" says 2 'at most 16 times longer, found 64'
done

# ---- data that changes under a run ----
"$tokenize" --tokenizer bytes --out first.bin text.txt >/dev/null && tr ab ba <text.txt >other.txt
"$tokenize" --tokenizer bytes --out second.bin other.txt >/dev/null
long=("${start[@]}" --train shard.bin --steps 100000000 --run run)

rewrite() {  # COMMAND OPTION...: a run, and after its third step the command; status is kept when it has ended
    rm -rf run && cp first.bin shard.bin
    begin "${long[@]}" "${@:2}"
    pid=$!
    eval "$1"
    timeout 60 tail --pid=$pid -f /dev/null
    kill $pid 2>/dev/null
    wait $pid
    status=$?
}

rewrite 'dd if=second.bin of=shard.bin conv=notrunc status=none' --save-every 1000
check "shards that are rewritten under a run end it at the next checkpoint" says 1 'shard.bin: another program has written'
check "which is not saved: it has no manifest newer than the shard" test -z "$(find run -name manifest.json -newer shard.bin)"
rewrite 'touch shard.bin; kill $pid'
check "a time of change is enough" says 1 'shard.bin: another program has written'
rewrite 'kill $pid' && touch shard.bin
"$trainer" --resume --run run >out 2>err </dev/null &
pid=$!
grows run
kill $pid
wait $pid
check "but --resume compares bytes" test $? = 0 -a "$(grep -c '^stopped after step' out)" = 1
rewrite 'head -c 5000 first.bin >shard.bin'
check "a shard that is cut short ends the run with its name" says 1 'shard.bin: cut short by another program'
rewrite 'mv second.bin shard.bin && sleep 1 && kill $pid'
check "one that is replaced does not, and is said" test $status = 0 -a "$(grep -c 'replaced by another file: this run goes on' err)" = 1
cp answers.bin now.bin
rewrite 'dd if=other_answers.bin of=now.bin conv=notrunc status=none' --hellaswag now.bin --val shard.bin --eval-every 2 --eval-batches 1
check "examples that are rewritten are read within bounds" says 1 'now.bin: changed while in use: example .* has token 60000'

# ---- a small stack, of the main thread and of the others ----
small_stack() { (ulimit -s 256 && timeout 60 "$trainer" "$@") >out 2>err </dev/null; }
rm -rf run exported
check "ulimit -s 256: a run that saves while it trains, prunes and draws samples" small_stack "${start[@]}" --steps 4 \
    --save-every 1 --keep 1 --sample-every 4 --max-new-tokens 4 --val text.txt --eval-every 2 --run run
check "goes on and exports" small_stack --resume --run run --steps 6 --export-hf exported
check "and what it has exported generates" small_stack --from exported --generate a --max-new-tokens 4
(ulimit -s 64 && timeout 20 "$trainer" --from exported --generate a --max-new-tokens 4) >out 2>err
status=$?
check "ulimit -s 64: nothing is begun" says 2 'stack: expected a limit of at least 256 KiB, found 64'

# ---- a run inside a checkpoint, which is deleted one day ----
for inside in run/step_000006 run/step_000006/deeper ./run/step_000006/a/b/; do
    run 60 "${start[@]}" --steps 1 --run $inside
    check "--run $inside is refused" says 2 'is or lies in a checkpoint'
done

# ---- weights that are not finite, where no loss shows it ----
rm -rf run bad
run 60 "${start[@]}" --steps 2 --run run --export-hf bad
$python "$root/dev/attack_files.py" --spoil bad/model.safetensors transformer.wpe.weight 3
again=(--from bad --train text.txt --seq-len 8 --batch-size 2 --eval-every 0 --save-minutes 0 --steps 2 --freeze 'transformer.wpe.*')
run 60 "${again[@]}" --run run2
check "NaN in rows that no batch reads: no run learns from them" \
    says 2 'found 3 of transformer.wpe.weight that are NaN or infinite'
check "and none is begun" test ! -e run2
run 60 --from bad --generate a --max-new-tokens 4
check "text is generated, with a warning" says 0 '3 numbers of transformer.wpe.weight are NaN or infinite'

# ---- a model that another process goes on training ----
rm -rf run run2
sed 's/257/258/' tiny.json >one_more.json  # o200k.json's tokens
begin "${start[@]}" --config one_more.json --tokenizer o200k.json --steps 100000000 --save-every 1 --keep 1 --async-save 0 --run run
pid=$!
run 60 --from run --tokenizer o200k.json --train long_characters.txt --seq-len 8 --batch-size 1 --eval-every 0 --steps 1 --run run2
check "--from finds a newer checkpoint when the one it had found is pruned" test $status = 0 -a "$(grep -c 'removed meanwhile: the model is read from' err)" -ge 1
kill $pid && wait $pid

# ---- strangers at the port of ranks ----
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
export LLMC_SECRET=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')

listening() {  # PORT: rank 0 is there
    for _ in $(seq 200); do
        (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null && return
        sleep 0.02
    done
    return 1
}

strangers() {  # PORT NUMBER: connections that say nothing, a byte, or noise, and stay open
    local fd i
    for ((i = 0; i < $2; i++)); do
        { exec {fd}<>"/dev/tcp/127.0.0.1/$1"; } 2>/dev/null || return
        case $((i % 3)) in 1) printf '2' >&$fd ;; 2) head -c 300 /dev/urandom >&$fd ;; esac
    done 2>/dev/null
    sleep 20
}

first_rank() {  # FILES OPTION...: rank 0 of 2 in the background at a free port, with so many descriptors, and 40 strangers
    local files=$1
    at=$((20000 + RANDOM % 12000))
    while (exec 3<>"/dev/tcp/127.0.0.1/$at") 2>/dev/null; do at=$((20000 + RANDOM % 12000)); done
    rm -rf run
    (ulimit -n "$files"; exec "$trainer" "${start[@]}" --steps 4 --grad-accum 2 --run run --rank "0/2@127.0.0.1:$at" "${@:2}") >out 2>err </dev/null &
    pid=$!
    listening $at
    (trap '' PIPE; strangers $at 40) &
    crowd=$!
    sleep 0.5
}

for files in 256 8; do
    first_rank $files --init-timeout 2
    began=$SECONDS
    wait $pid
    check "40 strangers at rank 0, $files descriptors: it waits for --init-timeout and no longer" \
        test $? = 2 -a $((SECONDS - began)) -le 4 -a "$(grep -c 'after 2 s these of 2 ranks have not come: 1' err)" = 1
    pkill -P $crowd; kill $crowd; wait $crowd 2>/dev/null
done
first_rank 256 --init-timeout 20
began=$SECONDS
timeout 20 "$trainer" "${start[@]}" --steps 4 --grad-accum 2 --run run --rank "1/2@127.0.0.1:$at" --init-timeout 20 >out1 2>err1 </dev/null
check "they take no rank's place: two ranks meet and train" test $? = 0 -a $((SECONDS - began)) -le 10
wait $pid
check "and rank 0 is undisturbed" test $? = 0 -a -e run/step_000004/manifest.json -a ! -s err
pkill -P $crowd; kill $crowd; wait $crowd 2>/dev/null
unset LLMC_SECRET

# ---- data that changes without a word ----
"$tokenize" --tokenizer bytes --out second.bin other.txt >/dev/null
rewrite 'touch -r shard.bin was; dd if=second.bin of=shard.bin conv=notrunc status=none; touch -r was shard.bin; kill $pid'
check "a time of change that was put back hides no rewritten shard" says 1 'shard.bin: another program has written'
rewrite 'chmod g+w shard.bin; ln shard.bin backup; kill $pid'
check "a backup's hard link and chmod end no run: the bytes are those of the start" test $status = 0 -a ! -s err
rm backup
cp answers.bin now.bin
rewrite 'touch -r now.bin was; dd if=other_answers.bin of=now.bin conv=notrunc status=none; touch -r was now.bin; kill $pid' \
    --hellaswag now.bin --val shard.bin --eval-every 1000000 --eval-batches 1
check "nor rewritten examples" says 1 'now.bin: another program has written'
# ---- JSON Lines, as others write them ----
lines='{"text": "To be"}\n{"text": "or not"}\n'
printf "$lines" >lines.jsonl
printf "\n \n$lines" >blank.jsonl
printf "\xef\xbb\xbf$lines" >mark.jsonl
printf "$lines" >CAPITALS.JSONL
"$tokenize" --out want.bin lines.jsonl >out 2>err
for name in blank.jsonl mark.jsonl CAPITALS.JSONL; do
    rm -f found.bin
    "$tokenize" --out found.bin $name >out 2>err
    check "tokenize: $name is JSON Lines" cmp -s found.bin want.bin
done
printf '\n[{"text": "To be"}]\n' >array.jsonl
run 60 "${start[@]}" --train array.jsonl --steps 1 --run array
check "a .jsonl that is another thing is refused, not learned" says 2 'array.jsonl:2: expected a JSON object such as {"text": "..."}'
truncate -s 1T sparse.jsonl
timeout 20 "$tokenize" --out sparse.bin sparse.jsonl >out 2>err
status=$?
check "tokenize: a sparse file of 1 TB is refused at its first bytes" says 2 'sparse.jsonl: expected UTF-8 text, found byte 0x00'
rm sparse.jsonl
$python -c 'open("many.jsonl", "w").write("{\"text\": \"a\", \"b\": [" + ", ".join(["{}"] * 2000000) + "]}\n")'
within 30 400 "$tokenize" --out found.bin many.jsonl
check "a line of two million objects is refused for their number" says 2 'many.jsonl:1: .*more than 1048576 commas, colons and brackets'
$python -c 'open("deep.jsonl", "w").write("{\"text\": \"a\", \"b\": " + "[" * 2040 + "]" * 2040 + "}\n")'
(ulimit -s 128 && timeout 20 "$tokenize" --out found.bin deep.jsonl) >out 2>err
status=$?
check "and one of 2040 nested brackets for these" says 2 'deep.jsonl:1: .*more than 128 nested brackets'
echo '{"text": "a", "text": "b"}' >twice.jsonl
run 60 "${start[@]}" --train twice.jsonl --steps 1 --run twice
check "and one with a key twice" says 2 'twice.jsonl:1: .*duplicate object key'
$python -c 'open("book.jsonl", "w").write("{\"text\": \"" + "[{:,}] " * 5000000 + "\"}\n")'
timeout 60 "$tokenize" --out found.bin book.jsonl >out 2>err
check "a book of 35 MB is a line, whatever its text has" test $? = 0
(ulimit -v 100000 && timeout 60 "$tokenize" --out found.bin book.jsonl) >out 2>err
status=$?
check "where memory ends, the line says so" says 1 'no memory'
rm many.jsonl book.jsonl
# ---- names that a checkpoint needs, and folders that look like one ----
fresh
mkdir run/step_000006 && echo '{"mine": 1}' >run/step_000006/mine.json && echo mine >run/step_000006/mine.safetensors
mkdir run/step_000006.old-1
echo mine >run/step_000008
ln -s nowhere run/step_000010
echo mine >run/step_000012.tmp
run 60 --resume --run run --steps 12 --save-every 2 --keep 9
check "folders, files and links under the names of checkpoints: the run saves all of them" \
    test $status = 0 -a "$(ls run/step_0000{06,08,10,12}/manifest.json | wc -l)" = 4
check "the folder of somebody's keeps its files, under the next free name" \
    test "$(cat run/step_000006.old-2/mine.json run/step_000006.old-2/mine.safetensors)" = '{"mine": 1}
mine'
check "so do files, and each is named" \
    test "$(cat run/step_000008.old-1 run/step_000012.tmp.old-1)" = 'mine
mine' -a "$(grep -c 'was in the way of one: its name is' err)" = 3
mkdir run/step_000013.replaced && echo mine >run/step_000013.replaced/mine.json && mkdir run/step_000013
run 60 --resume --run run --steps 14
check "files in a folder named .replaced that no checkpoint was, stay" \
    test $status = 0 -a "$(cat run/step_000013*/mine.json)" = mine

# ---- an output in another ----
rm -rf run hf && run 60 "${start[@]}" --steps 2 --run run
for folder in hf hf.tmp; do
    mkdir $folder
    run 60 --from run --export-hf hf --export-bin $folder/config.json
    check "--export-bin in $folder, when --export-hf is hf, is refused" \
        test "$status $(grep -c 'lies in the folder of --export-hf' err) $(ls $folder)" = "2 1 "
    rmdir $folder
done
rm -rf run
apart() {  # TEXT RUN OUTPUT: an option of an output and its place, when the run goes to RUN
    rm -rf run new
    run 60 "${start[@]}" --steps 2 --run "$2" $3
    check "$3 with --run $2, of which nothing is there yet, is refused" test "$status $(grep -c -- "$1" err) $(ls -d run new 2>&1 | grep -c ^ls)" = "2 1 2"
}
for folder in run/hf run/step_000002.tmp ./run/a/../b new/../run/hf "$PWD/run/hf"; do apart 'lies in --run' run "--export-hf $folder"; done
apart 'lies in --run' run/ "--export-bin run/model.bin"
apart '--export-hf: is the folder of --run' ./run "--export-hf run/"
apart '--run: lies in the folder of --export-hf' new/run "--export-hf new"
apart 'is the name of another output' run "--export-bin new/a --export-hf new/b/../a"

# ---- several that begin or go on with one new run ----
rm -rf run
pids=()
for i in 1 2 3 4; do
    "$trainer" "${start[@]}" --steps 100000000 --save-every 1 --keep 1 --run run --continue >out$i 2>err$i </dev/null &
    pids+=($!)
done
for _ in $(seq 400); do [ "$(cat err[1-4] | wc -l)" -lt 3 ] || break; sleep 0.05; done
check "of four --continue at once on a new folder one trains, and three are told that it does" \
    test "$(cat err[1-4] | wc -l) $(cat err[1-4] | grep -c 'another process .* writes to this run')" = "3 3"
kill "${pids[@]}" 2>/dev/null; wait "${pids[@]}" 2>/dev/null
rm -rf run
run 30 "${start[@]}" --train nowhere.txt --steps 2 --run run --continue
check "--continue whose data is not there leaves no folder" test $status = 2 -a ! -e run
mkdir run && run 30 "${start[@]}" --train nowhere.txt --steps 2 --run run --continue
check "... but one that was there; it is locked before any data is read" test $status = 2 -a -e run/.lock
rm -rf run && : >run
run 30 "${start[@]}" --steps 2 --run run --continue
check "--continue on a file: status 2" test "$status $(grep -c 'expected a folder' err)" = "2 1"
rm run
run 30 "${start[@]}" --steps 2 --run run --continue --dry-run
check "--continue --dry-run makes no folder" test $status = 0 -a ! -e run

# ---- readers, limits and launchers that end ----
rm -rf run
timeout 60 "$trainer" "${start[@]}" --steps 100000000 --run run 2>err </dev/null | (while [ "$(steps run)" -lt 3 ]; do sleep 0.05; done)
check "a run whose standard output is gone saves a checkpoint and ends with status 0" \
    test "${PIPESTATUS[0]} $(whole_checkpoints)" = "0 1"
run 30 --resume --run run --steps 1 --dry-run
check "and can go on" test $status = 0

rm -rf run
(ulimit -S -t 1 && timeout 60 "$trainer" "${start[@]}" --steps 100000000 --run run) >out 2>err </dev/null
check "SIGXCPU, of a limit on CPU time, saves a checkpoint" test "$? $(whole_checkpoints)" = "0 1"

rm -rf run
"$launch" -n 2 "$trainer" "${start[@]}" --grad-accum 2 --steps 100000000 --run run >out 2>err </dev/null &
pid=$!
for _ in $(seq 400); do [ "$(steps run)" -lt 3 ] || break; sleep 0.05; done
ranks=$(pgrep -P $pid)
{ kill -9 $pid && wait $pid; } 2>/dev/null
for rank in $ranks; do timeout 30 tail --pid="$rank" -f /dev/null; done
check "kill -9 of launch: its ranks save a checkpoint and end" \
    test "$(wc -w <<<"$ranks") $(whole_checkpoints)" = "2 1" -a -s run/summary.json

resumed() { run 60 --resume --run run "$@"; }
cp text.txt a.txt
rm -rf run
run 60 "${start[@]}" --train a.txt --steps 2 --run run
cp -r run at_2
"$trainer" --resume --run run --train other.txt --steps 100000000 --save-every 0 --save-minutes 0 >out 2>err </dev/null &
grows run
kill -9 $! && wait $! 2>/dev/null
resumed --steps 4
check "a resume with other data, killed before it saved, leaves the checkpoint to its own data" \
    test $status = 0 -a "$(grep -c '"path": "a.txt"' run/step_000004/manifest.json)" = 1
rm -rf run && cp -r at_2 run && rm run/settings.json && cp other.txt a.txt
resumed --steps 4
check "without settings.json too the data must be what it was" says 2 'a.txt: the training data has changed'
cat >older.c <<'END'
#include "llmc/files/checkpoint.h"
int main(int argc, char** argv) {  // MANIFEST, as it was written before it named data
    SavedFiles files;
    MappedFile file;
    ErrorText error;
    file_map(&file, argv[argc - 1]);
    json_t* manifest = manifest_parse_((const char*)file.bytes, file.n_bytes, &files, &error);
    json_object_del(manifest, "data");
    json_object_del(manifest, "files");
    json_object_del(manifest, "xxh3");
    if (unlink(argv[1]) == 0) { manifest_write(argv[1], manifest, &files); }
}
END
gcc -std=gnu11 -D_GNU_SOURCE -I"$root" older.c -o older -ljansson -lxxhash -lm && ./older run/step_000002/manifest.json
cp at_2/settings.json run/
resumed --steps 4
check "of a checkpoint from before manifests named data settings.json does" says 2 'a.txt: the training data has changed'
rm run/settings.json
resumed --steps 4
check "and without both it goes on" test $status = 0

# the same tokens in other rows
mkdir cut && "$tokenize" --tokenizer bytes --out cut/x --val-fraction 0 --shard-tokens 8000 text.txt >/dev/null
cp -r cut cut_before
cut=("${start[@]}" --train cut --steps 2 --run run)
rm -rf run
run 60 "${cut[@]}"
rm cut/* && "$tokenize" --tokenizer bytes --out cut/x --val-fraction 0 --shard-tokens 4000 text.txt >/dev/null
resumed --steps 4
check "shards that are cut elsewhere are other rows" says 2 'cut: the training data is cut into other shards, so into other rows, since the run began'
rm cut/* && cp cut_before/* cut/
resumed --steps 4 --seq-len 8
check "those of before are the same, also for rows of another length" test $status = 0
rm -rf run cut
mkdir cut && cp text.txt cut/a.txt && cp other.txt cut/b.txt
run 60 "${cut[@]}" --train cut/a.txt,cut/b.txt
run 60 "${cut[@]}" --train cut --steps 4 --continue
check "--continue with one source instead of two" says 2 'cut: the training data has other sources'
rm -rf run
run 60 "${cut[@]}" --train cut/a.txt:1
run 60 "${cut[@]}" --train cut/a.txt --steps 4 --continue
check "or without the weight" says 2 'cut/a.txt: the training data has other sources, or weights'
run 60 "${cut[@]}" --train cut/a.txt:1 --steps 4 --continue
check "is refused, and goes on with what it began with" test $status = 0

# what validates and what is answered
rm -rf run at_2
cp text.txt val.txt && cp answers.bin now.bin
run 60 "${start[@]}" --val val.txt --eval-every 1 --eval-batches 2 --hellaswag now.bin --steps 2 --run run
cp -r run at_2 && cp other.txt val.txt
resumed --steps 4
check "validation data that has changed is refused" says 2 'val.txt: the validation data has changed since the run began: .* --val'
resumed --steps 4 --val other.txt
check "unless it is named: then the best loss so far is forgotten" \
    says 0 'other validation data: the best loss of before, [0-9.]* after step 2, is forgotten'
check "and the first of the new data is the best" grep -q '^step 3 .*best' out
rm -rf run && cp -r at_2 run
resumed --steps 4 --val text.txt
check "the old data under another name is the old data" test $status = 0 -a ! -s err
rm -rf run && mv at_2 run && cp text.txt val.txt
printf B | dd of=now.bin bs=1 seek=1036 conv=notrunc status=none  # the first token of the first context
resumed --steps 4
check "examples that have changed are refused" says 2 'now.bin: the examples have changed since the run began: .* --hellaswag'
# ---- a stranger where rank 0 should be ----
cat >silent.py <<'END'
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
peer = listener.accept()[0]
peer.send(sys.argv[1].encode())
time.sleep(20)
END
for says in "" 2; do
    exec 3< <(exec $python silent.py "$says")
    crowd=$!
    read -r at <&3
    began=$(date +%s%N)
    timeout 30 "$trainer" "${start[@]}" --steps 4 --run new --rank "1/2@127.0.0.1:$at" --init-timeout 2 >out 2>err </dev/null
    check "who accepts and says \"$says\": rank 1 waits for --init-timeout and no longer" \
        test $? = 1 -a $(($(date +%s%N) - began)) -lt 4000000000 -a "$(grep -c 'rank 0 did not answer .* within 2 s' err)" = 1
    kill $crowd; exec 3<&-
done

# ---- two writers to one output ----
rm -rf run hf two* && run 60 "${start[@]}" --steps 2 --run run
held() {  # FILE|FOLDER COMMAND...: while another process has it locked; into out and err; status is kept
    exec 9<"$1"
    flock 9
    timeout 30 "${@:2}" >out 2>err </dev/null 9<&-
    status=$?
    exec 9<&-
}
is_told() { [ "$status $(grep -c "$1: another process writes it" err)" = "1 1" ]; }
for output in two.bin two.tokens; do
    writer=("$trainer" --from run --export-bin $output)
    [ $output = two.bin ] || writer=("$tokenize" --out $output text.txt)
    echo another >$output.tmp
    held $output.tmp "${writer[@]}"
    check "$output: a second writer is told" is_told $output
    check "and leaves the first one's file alone" test "$(cat $output.tmp) $(ls $output* | wc -l)" = "another 1"
    timeout 30 "${writer[@]}" >out 2>err </dev/null
    check "and what a killed one has left is no obstacle" test $? = 0 -a "$(echo $output*)" = $output
done
mkdir hf.tmp
held hf.tmp "$trainer" --from run --export-hf hf
check "--export-hf: a second writer is told" is_told hf
run 60 --from run --export-hf hf && timeout 60 "$trainer" --from run --export-hf hf >out 2>err
check "and a folder that a killed one has left is no obstacle, nor an earlier export" \
    test $? = 0 -a -e hf/model.safetensors -a ! -e hf.tmp
for i in 1 2 3 4 5 6 7 8; do head -c $((i * 100000)) /dev/zero | tr '\0' "$i" >text$i.txt; done
for i in 1 2 3 4 5 6 7 8; do "$tokenize" --out whole$i.bin text$i.txt >out 2>err; done
good=1
rm -f two.bin
for turn in 1 2 3; do
    for i in 1 2 3 4 5 6 7 8; do ("$tokenize" --out two.bin text$i.txt >out$i 2>err$i; echo $? >status$i) & done
    wait
    n_same=0
    for i in 1 2 3 4 5 6 7 8; do
        ! cmp -s whole$i.bin two.bin || n_same=$((n_same + 1))
        [ "$(cat status$i)" = 0 ] || grep -q 'another process writes' err$i || good=0
    done
    [ $n_same = 1 ] && [ ! -e two.bin.tmp ] || good=0
    rm -f two.bin
done
check "eight at once: the file is one of theirs, whole, and who failed says why" test $good = 1
rm -f text[1-8].txt whole?.bin

# ---- limits on the size of files ----
(ulimit -f 8 && timeout 20 "$tokenize" --out limited.bin text.txt) >out 2>err
status=$?
check "tokenize: a limit on file sizes is a message" says 1 'limited.bin.tmp: cannot be written: File too large'
check "and nothing is left" test ! -e limited.bin.tmp -a ! -e limited.bin
(ulimit -f 8 && timeout 60 "$trainer" --from run --export-bin limited.bin) >out 2>err
status=$?
check "--export-bin: the same" test "$status $(grep -c 'limited.bin.tmp: cannot be written: File too large' err) $(compgen -G 'limited*')" = "1 1 "
(ulimit -f 0 && timeout 60 "$trainer" --from run --generate a --max-new-tokens 4 >limited.txt) 2>&1 | cat >err
status=${PIPESTATUS[0]}
check "a standard output that may not grow is a message too" says 1 'standard output: cannot be written: File too large'

# ---- records without an end ----
rm -rf run && run 60 "${start[@]}" --steps 2 --run run
cp run/metrics.jsonl before
truncate -s 100G run/metrics.jsonl
run 20 --resume --run run --steps 4
check "a metrics.jsonl of 100 GB without a line end is no record" says 2 'run/metrics.jsonl:4: expected a record, found a line of more'
check "and stays as it is" cmp -s -n "$(stat -c %s before)" before run/metrics.jsonl
cp before run/metrics.jsonl
run 60 --resume --run run --steps 4
check "cut again, the run goes on" went_on 000004
finish
