#!/usr/bin/env bash
# Several ranks as their user meets them: launchers, resume at another number of ranks, ranks that differ, die, stop or come late.
# Every result is compared with that of one rank, byte by byte. About two minutes after three builds.
#     dev/test_ranks.sh              KILLS=500 dev/test_ranks.sh: more random kills than 20; STRIKES=5: at every fifth call
#     dev/test_ranks.sh quick        3 ranks, this build only, no MPI, 4 kills
. "$(dirname "$0")/promises.sh"
export OMP_NUM_THREADS=1
export COMM_CHECK=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LLMC_SECRET

build "" launch >/dev/null &
is_quick || build "ARCH=x86-64" train_gpt2 >/dev/null &
need_build trainer "" train_gpt2
wait
need_build launch "" launch
need_build faults "" train_gpt2_faults
is_quick || need_build trainer_other "ARCH=x86-64" train_gpt2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

mkdir text
for i in {1..250}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text/a.txt
mkdir elsewhere && cp -r text elsewhere/ && echo "one line more" >>elsewhere/text/a.txt
echo '{"model_type":"gpt2","n_positions":24,"vocab_size":257,"n_layer":2,"n_head":3,"n_embd":33}' >tiny.json
start=(--config "$work/tiny.json" --train text --val-fraction 0.1 --seq-len 16 --batch-size 2 --lr 1e-2 --eval-every 10 --eval-batches 5
    --sample-every 20 --max-new-tokens 8 --sample-prompts "$work/prompts.txt")
printf 'line 7\nthe plain loop' >prompts.txt

ranks() {  # NUMBER OPTION...: into out and err; status is kept
    local n=$1
    shift
    timeout 60 "$launch" -n "$n" "$trainer" "$@" >out 2>err </dev/null
    status=$?
}

# the bytes of a checkpoint and what the metrics say beside times
sums() { cat "$1"/*.safetensors | sha256sum | cut -c1-16; }
columns() { sed -E 's/"(ms|tok_per_s|peak|time)": [^,}]+//g' "$1"; }
same_run() {  # RUN RUN STEP
    [ "$(sums "$1/$3")" = "$(sums "$2/$3")" ] && cmp -s <(columns "$1/metrics.jsonl") <(columns "$2/metrics.jsonl") &&
        cmp -s "$1/samples.txt" "$2/samples.txt"
}

# ---- the same bits ----

echo "# ranks x --zero x leaves: model, moments, metrics and samples after 20 steps"
for leaves in $(is_quick && echo 3 4 8 || echo 1 3 4 8); do
    options=("${start[@]}" --batch-tokens $((32 * leaves)) --steps 20)
    "$trainer" "${options[@]}" --run "one$leaves" >out 2>err
    for n in $(is_quick && echo 3 || echo 2 3 4); do
        for zero in 0 1 2; do
            ranks $n "${options[@]}" --zero $zero --run several
            same_run "one$leaves" several step_000020
            verdict $? "$leaves leaves on $n ranks, --zero $zero: the bytes of one rank" "status $status: $(tail -n 3 err)"
            rm -rf several
        done
    done
done
grep -qE '^\| ranks +\| [34] over TCP \(RANK and WORLD_SIZE\), --zero 2' out
verdict $? "the box names ranks, connection, source and --zero" "$(grep ranks out)"
COMM_CHECK=0 ranks 4 "${start[@]}" --batch-tokens 256 --steps 20 --eval-every 0 --sample-every 0 --zero 1 --run several
planned=$(sed -nE 's/^\|   sent per update +\| ([0-9.]+) KiB.*/\1/p' out)
sent=$(sed -nE 's/^ranks: rank 0 sent ([0-9.]+) KiB per update and waited [0-9]+% of the time$/\1/p' out)
check "bytes sent are those that the box has announced, and little more ($planned and $sent KiB)" \
    awk "BEGIN { exit !($sent >= $planned && $sent < 1.1 * $planned + 12) }"
n=$(sed -nE 's/^\| parameters .*padded: ([0-9]+)\).*/\1/p' out)
check "that is 2n(P-1)/P floats for n = $n parameters, within 10%" awk "BEGIN { x = 2 * 4 * $n * 3 / 4 / 1024; exit !($sent > 0.9 * x && $sent < 1.1 * x + 12) }"
rm -rf several

planned() {  # SAVE-EVERY ZERO [ROW]: the memory that the box announces beside parameters, gradients, moments and activations
    ranks 2 "${start[@]}" --steps 20 --batch-tokens 256 --save-every "$1" --zero "$2" --dry-run
    grep "^|   ${3:-workspace, rest}" out
}
kib() { sed -E 's/.*\| ([0-9.]+) KiB, ([0-9.]+) KiB.*/\1 \2/' <<<"$1"; }
read -r grads0 moments0 <<<"$(kib "$(planned 0 0 gradients)")"
read -r grads1 moments1 <<<"$(kib "$(planned 0 1 gradients)")"
read -r grads2 moments2 <<<"$(kib "$(planned 0 2 gradients)")"
check "2 ranks divide the moments with --zero 1 and 2, and with 2 the gradients ($grads0 $moments0, $grads1 $moments1, $grads2 $moments2)" \
    awk "BEGIN { exit !($grads0 == $grads1 && $grads2 < 0.85 * $grads1 && $moments1 == $moments2 && $moments1 < 0.6 * $moments0) }"
check "a checkpoint that is written beside the training costs a copy, with --zero 1 it does not" \
    test "$(planned 10 0)" != "$(planned 0 0)" -a "$(planned 10 1)" = "$(planned 0 1)"

options=("${start[@]}" --batch-tokens 96 --steps 10 --freeze 'transformer.h.*.attn.*' --verify-every 3 --noise-scale 2 --ema 0.9
    --dropout 0.2)
"$trainer" "${options[@]}" --run one >out 2>err
check "--noise-scale: measured in every second step" test "$(grep -c '"noise_scale": [0-9]' one/metrics.jsonl)" = 5
for zero in 0 1 2; do
    ranks 3 "${options[@]}" --zero $zero --run several
    check "--freeze, --verify-every, --noise-scale, --ema and --dropout on 3 ranks, --zero $zero" same_run one several step_000010
    rm -rf several
done
rm -rf one
options=("${start[@]}" --batch-tokens 128 --steps 10 --optimizer muon --freeze '*.h.0.attn.*')
"$trainer" "${options[@]}" --run one >out 2>err
for zero in 0 1; do
    ranks 3 "${options[@]}" --zero $zero --run several
    check "--optimizer muon on 3 ranks, --zero $zero" same_run one several step_000010
    rm -rf several
done
ranks 2 "${options[@]}" --zero 2 --run several
check "--optimizer muon refuses --zero 2" grep -q -- "--optimizer: muon needs whole matrices: several ranks want --zero 0 or 1" err
rm -rf one several
cp text/a.txt other.txt
options=("${start[@]}" --train text/a.txt:1,other.txt:3 --grad-accum 6 --steps 10)
"$trainer" "${options[@]}" --run one >out 2>err
ranks 3 "${options[@]}" --run several
check "a mixture of two texts on 3 ranks" same_run one several step_000010
rm -rf one several
"$trainer" --from one8 --train text --val-fraction 0.1 --seq-len 16 --eval-only --eval-batches 7 >want 2>err
ranks 3 --from one8 --train text --val-fraction 0.1 --seq-len 16 --eval-only --eval-batches 7
check "--eval-only on 3 ranks: the loss of one" cmp <(grep 'val loss' want) <(grep 'val loss' out)

# ---- launchers ----

echo "# launchers"
port() {  # one that nobody uses now
    local p
    while :; do
        p=$((20000 + RANDOM % 12000))
        (exec 3<>/dev/tcp/127.0.0.1/$p) 2>/dev/null || { echo $p; return; }
    done
}
options=("${start[@]}" --batch-tokens 128 --steps 20)
export MASTER_ADDR=127.0.0.1 MASTER_PORT
MASTER_PORT=$(port)
for rank in 1 2; do
    RANK=$rank WORLD_SIZE=3 "$trainer" "${options[@]}" --run several >/dev/null 2>&1 &
done
RANK=0 WORLD_SIZE=3 timeout 60 "$trainer" "${options[@]}" --run several >out 2>err
wait
check "torchrun's variables, set by hand" same_run one4 several step_000020
rm -rf several
unset MASTER_ADDR MASTER_PORT
at=127.0.0.1:$(port)
(sleep 0.7; exec "$trainer" "${options[@]}" --rank "0/2@$at" --run several >/dev/null 2>&1) &
timeout 60 "$trainer" "${options[@]}" --rank "1/2@$at" --run several --threads 2 >out 2>err
check "--rank R/P@HOST:PORT; rank 0 comes late; another number of threads" test $? = 0
wait
check "... the bytes of one rank" same_run one4 several step_000020
check "... and only rank 0 speaks" test ! -s out -a ! -s err
rm -rf several
echo "ranks meet at 127.0.0.1 port 9 run 00000000000000ab secret 12" >meet  # an earlier run has left it
for rank in 1 2; do
    "$trainer" "${options[@]}" --rank "$rank/3@./meet" --run several >out$rank 2>&1 &
done
sleep 0.5
timeout 60 "$trainer" "${options[@]}" --rank "0/3@$work/meet" --run several >out 2>err
wait
check "--rank R/P@PATH, rank 0 late, a file of an earlier run: the bytes of one rank" same_run one4 several step_000020
check "... nobody complains, and the file is gone" test ! -s err -a ! -s out1 -a ! -s out2 -a ! -e meet -a ! -e meet.tmp
rm -rf several
for rank in 1 2; do
    MASTER_ADDR=$work/meet RANK=$rank WORLD_SIZE=3 "$trainer" "${options[@]}" --run several >/dev/null 2>&1 &
done
MASTER_ADDR=$work/meet RANK=0 WORLD_SIZE=3 timeout 60 "$trainer" "${options[@]}" --run several >out 2>err
wait
check "the path as MASTER_ADDR, without a port" same_run one4 several step_000020
rm -rf several
if is_quick; then
    :  # MPI needs a build of its own
elif command -v mpirun >/dev/null; then
    mpirun=(timeout 60 mpirun --oversubscribe -x OMP_NUM_THREADS)
    [ "$(id -u)" != 0 ] || mpirun+=(--allow-run-as-root)
    "${mpirun[@]}" -n 3 "$trainer" "${options[@]}" --run several >out 2>err
    check "mpirun and a build without MPI: status 2, the command that makes one is the advice, no training" \
        test $? = 2 -a ! -e several -a "$(grep -c 'this build has no MPI: make train_gpt2 MPI=1' err)" -ge 1
    "${mpirun[@]}" -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(port)" -n 3 "$trainer" "${options[@]}" --run several >out 2>err
    check "... with MASTER_ADDR and MASTER_PORT it trains over TCP" same_run one4 several step_000020
    rm -rf several
    trainer_mpi=$(build "MPI=1" train_gpt2 2>"$work/err")
    if [ -x "$trainer_mpi" ]; then
        for n in 2 3; do
            "${mpirun[@]}" -n $n "$trainer_mpi" "${options[@]}" --zero $((n - 1)) --run several >out 2>err
            check "mpirun -n $n, MPI=1, --zero $((n - 1)): the bytes of one rank" same_run one4 several step_000020
            check "... over MPI" grep -q "$n over MPI (mpirun)" out
            rm -rf several
        done
        "${mpirun[@]}" -n 3 "$trainer_mpi" "${start[@]}" --train missing --run mistaken >out 2>err
        check "mpirun: a wrong option ends with status 2" test $? = 2
        rm -f out
        "${mpirun[@]}" -n 3 "$trainer_mpi" "${start[@]}" --steps 100000 --run several >out 2>err &
        pid=$!
        while ! grep -qs '^step 5/' out; do sleep 0.05; done
        victim=$(pgrep -n -x -f "$trainer_mpi .*--steps 100000 --run several")
        kill -9 "$victim"
        wait $pid
        check "mpirun: a killed rank ends the run" test $? != 0
        rm -rf several
        "${mpirun[@]}" -n 3 sh -c '[ $OMPI_COMM_WORLD_RANK != 1 ] || kill -STOP $$; exec "$@"' sh "$trainer_mpi" "${options[@]}" --init-timeout 2 \
            --run several >out 2>err
        check "mpirun: a rank that stands still before MPI has begun ends the run after --init-timeout" \
            test $? = 1 -a "$(grep -c 'MPI_Init has not returned for 2 s (--init-timeout): a rank is stuck' err)" -ge 1
        rm -rf several
    else
        skip "MPI=1 does not build here: $(tail -n 1 err)"
    fi
else
    skip "mpirun: not installed"
fi

# ---- resume ----

echo "# resume"
"$trainer" "${options[@]}" --save-every 5 --keep 9 --run first >out 2>err
mkdir chain && cp -r first/step_000005 chain/
ranks 3 --resume --run chain --zero 2
rm -rf first chain/step_000020 chain/step_000015
ranks 2 --resume --run chain --zero 1
[ "$(sums one4/step_000020)" = "$(sums chain/step_000020)" ]
verdict $? "5 steps on one rank, 5 on three with --zero 2, 10 on two with --zero 1: the bytes of one rank" "status $status: $(tail -n 3 err)"
rm -rf chain

# ---- ranks that were not started alike ----

echo "# refused: status 2 on every rank, one line"
two() {  # PROMISE TEXT FOLDER PROGRAM OPTION...: rank 1 is another program, or elsewhere, or has other options
    local promise=$1 text=$2 folder=$3 program=$4 at pid
    shift 4
    at=127.0.0.1:$(port)
    env -C "$folder" "$program" "${options[@]}" --rank "1/2@$at" --run several "$@" >out1 2>err1 &
    pid=$!
    timeout 20 "$trainer" "${options[@]}" --rank "0/2@$at" --run several >out 2>err
    local status0=$?
    wait $pid
    local status1=$?
    [ $status0 = 2 ] && [ $status1 = 2 ] && [ "$(cat err err1 | wc -l)" = 1 ] && grep -q "$text" err err1 && [ ! -e several ]
    verdict $? "$promise" "status $status0, $status1: $(cat err err1)"
    rm -rf several
}
two "other options" "rank 1: lr is 0.25 there, but .* on rank 0" . "$trainer" --lr 0.25
is_quick || two "another program" "rank 1: other program than rank 0" . "$trainer_other"
two "other data" "rank 1: other training data than rank 0" elsewhere "$trainer"
example() { le 4 20240522 1 1 30; head -c 1008 /dev/zero; le 2 65535 30 0 0 4 1 104 1 "$1" 1 98 1 99 1 100; }  # its first completion
small() { echo "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"?\":0,\"a\":1},\"merges\":[],\"unk_token\":\"?\"},\"added_tokens\":[{\"id\":2,\"content\":\"$1\",\"special\":true}]}"; }
mkdir apart && cp -r text apart/
example 97 >examples && small '</s>' >small.json
sed 's/"n_head":3/"n_head":11/' tiny.json >apart/tiny.json
printf 'line 8\n' >apart/prompts.txt && example 101 >apart/examples && small '<|endoftext|>' >apart/small.json
unlike() {  # PROMISE TEXT OPTION...: both ranks have them, and rank 1 finds another file of that name
    local both=("${options[@]}" "${@:3}")
    local options=("${both[@]}")
    two "$1" "$2" apart "$trainer"
}
unlike "other sizes in config.json of the same name" "rank 1: other config.json than rank 0" --config tiny.json
unlike "other examples" "rank 1: other examples (--hellaswag) than rank 0" --hellaswag examples
unlike "other prompts" "rank 1: other prompts (--sample-prompts) than rank 0" --sample-prompts prompts.txt
unlike "another tokenizer" "rank 1: other tokenizer than rank 0" --tokenizer small.json
"$trainer" "${start[@]}" --zero 3 >out 2>err
check "--zero 3" test $? = 2 -a "$(grep -c '^train_gpt2: --zero: expected an integer 0..2, found "3"' err)" = 1
ranks 3 "${options[@]}" --lrr 3
check "a wrong option on three ranks: said once, status 2" test $status = 2 -a "$(wc -l <err)" = 1 -a "$(grep -c '^train_gpt2: --lrr: unknown option' err)" = 1
ranks 3 --help
check "--help on three ranks: printed once" test $status = 0 -a ! -s err -a "$(grep -c -- '--batch-size' out)" = 1
ranks 2 --config tiny.json --generate x
check "--generate on two ranks" test $status = 2 -a "$(grep -c '2 ranks are for training and --eval-only: start one' err)" -ge 1
RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$(port) timeout 20 "$trainer" "${options[@]}" --init-timeout 1 --run several >out 2>err
check "no rank 0: status 1 after --init-timeout" test $? = 1 -a "$(grep -c 'rank 0 did not answer at 127.0.0.1:' err)" = 1
timeout 20 "$trainer" "${options[@]}" --rank 1/2@./meet --init-timeout 1 --run several >out 2>err
check "a file that never comes: status 1 after --init-timeout, one line" \
    test $? = 1 -a "$(wc -l <err)" = 1 -a "$(grep -c '^train_gpt2: ./meet: rank 0 has not written this file within 1 s' err)" = 1
for rank in 0 1; do
    timeout 20 "$trainer" "${options[@]}" --rank $rank/2@nowhere/meet --run several >out 2>err
    check "rank $rank, a file in no folder: status 2, one line" \
        test $? = 2 -a "$(wc -l <err)" = 1 -a "$(grep -c 'nowhere/meet: .*nowhere: No such file or directory' err)" = 1
done
timeout 20 "$trainer" "${options[@]}" --rank 0/2@text/a.txt --run several >out 2>err
check "another file than one to meet by: status 2, one line, untouched" \
    test $? = 2 -a "$(wc -l <err)" = 1 -a "$(grep -c 'text/a.txt: expected a file by which ranks meet' err)" = 1 -a "$(wc -l <text/a.txt)" = 250
RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=$(port) timeout 20 "$trainer" "${options[@]}" --init-timeout 1 --run several >out 2>err
check "ranks that never come are named" test $? = 2 -a "$(grep -c 'after 1 s these of 3 ranks have not come: 1, 2' err)" = 1

# ---- signals ----

echo "# launch and its program"
printf '#!/bin/sh\necho "$RANK"\n' >program && chmod +x program
"$launch" -n 2 program >out 2>err
check "a program here without ./: status 2, one line names it" test "$? $(<err)" = "2 launch: program: not in PATH: expected ./program for the one here"
"$launch" -n 2 ./program >out 2>err
check "... with ./ it runs" test "$? $(sort -n out err | tail -n 1 | grep -c 1)" = "0 1"
"$launch" -n 3 ./missing >out 2>err
check "a program that is not there: said once, status 127" test "$? $(<err)" = "127 launch: ./missing: No such file or directory"
"$launch" -n2 ./train_x >out 2>err
check "a trainer that is not there: said before any rank starts; -n2 is -n 2" test "$? $(<err)" = "2 launch: ./train_x: not there: make train_x builds it"

echo "# signals"
long=("${start[@]}" --batch-tokens 96 --eval-every 0 --sample-every 0 --schedule constant --keep 2)
"$trainer" "${long[@]}" --steps 800 --save-every 40 --run whole >out 2>err

begin() {  # NUMBER OPTION...: in the background, until the fifth step is out
    local n=$1
    shift
    rm -f out
    "$launch" -n "$n" "$trainer" "$@" >out 2>err </dev/null &
    pid=$!
    while ! grep -qs '^step [0-9]*5/' out && kill -0 $pid 2>/dev/null; do sleep 0.02; done
}
rank_pid() { pgrep -P $pid | sed -n "$(($1 + 1))p"; }

begin 3 "${long[@]}" --steps 100000 --run several
kill -TERM $pid
wait $pid
check "SIGTERM to launch: every rank stops, status 0, a checkpoint" test $? = 0 -a "$(grep -cE '^stopped after step [0-9]+, checkpoint in several/step_' out)" = 1
check "... and a command that goes on with as many ranks" grep -qxF "to go on later: $launch -n 3 $trainer --run several --resume" out
rm -rf several
begin 3 "${long[@]}" --steps 100000 --run several
kill -TERM "$(rank_pid 2)"
wait $pid
check "SIGTERM to one rank stops all at the same step" test $? = 0 -a "$(grep -cE '^stopped after step [0-9]+, checkpoint in several/step_' out)" = 1
rm -rf several
begin 4 "${long[@]}" --steps 100000 --save-every 3 --run several
until compgen -G 'several/step_*[0-9]/manifest.json' >/dev/null; do sleep 0.1; done  # it is written while training goes on
sleep 0.3
kill -9 "$(rank_pid 2)"
wait $pid
check "a killed rank: launch ends with 137" test $? = 137
grep -qE '^train_gpt2: rank 2 is gone \(killed, or its machine is\), so rank 0 stops in .* after step [0-9]+; newest checkpoint: several/step_' err &&
    [ "$(grep -c 'rank 2 is gone' err) $(grep -c 'newest checkpoint' err) $(grep -c 'rank 2 is gone.*)$' err)" = "3 1 2" ]
verdict $? "... and every other rank names it, the step and the newest checkpoint" "$(cat err)"
# a rank that dies before the folder is looked at: the ranks of the next start go on with their own run, and only with that
dies_once='[ $RANK = 1 ] && [ ! -e died ] && touch died && kill -9 $$; exec "$@"'
rm -rf several died
"$trainer" "${start[@]}" --steps 10 --save-every 5 --run several >out 2>err
before=$(find several -type f ! -name '.*' | sort | xargs sha256sum)
timeout 60 "$launch" -n 2 --restarts 2 sh -c "$dies_once" sh "$trainer" "${start[@]}" --steps 20 --save-every 5 --run several >out 2>err </dev/null
check "--restarts and a folder with the run of somebody else: refused, and it stays as it was" \
    test $? = 2 -a "$(grep -c 'of a run that this launch has not begun' err)" = 1 -a "$(find several -type f ! -name '.*' | sort | xargs sha256sum)" = "$before"
rm -rf several died
timeout 60 "$launch" -n 2 --restarts 2 sh -c "$dies_once" sh "$trainer" "${start[@]}" --steps 10 --save-every 5 --run several >out 2>err </dev/null
check "... and a new folder: the run begins in the second start" test $? = 0 -a -d several/step_000010
rm -rf several died meet
"$trainer" "${start[@]}" --steps 10 --save-every 5 --run several >out 2>err
"$trainer" --run several --resume --steps 20 --rank 0/2@./meet >out0 2>err0 </dev/null &
"$trainer" "${start[@]}" --steps 20 --run several --rank 1/2@./meet >out 2>err </dev/null
codes=$?
wait $!
check "--resume on one rank of two: status 2 on both, and the rank is named" \
    test $codes$? = 22 -a "$(cat err0 err | grep -c 'rank 1: other choice of --resume and --continue')" = 1
rm -rf several died
stands_once='[ $RANK = 1 ] && [ ! -e died ] && touch died && exec sleep 100; exec "$@"'
timeout 60 "$launch" -n 2 --restarts 1 sh -c "$stands_once" sh "$trainer" "${start[@]}" --steps 10 --init-timeout 2 --run several >out 2>err </dev/null
check "--restarts and a rank that does not come: the next start has it" test $? = 0 -a -d several/step_000010
rm -rf meet here there && mkdir here there
cp -r several text tiny.json prompts.txt here/ && cp -r several text tiny.json prompts.txt there/
printf 'x' | dd of=there/several/step_000010/optimizer.safetensors bs=1 seek=5000 conv=notrunc 2>/dev/null
(cd here && exec "$trainer" --run several --resume --steps 20 --rank 0/2@../meet >../out0 2>../err0 </dev/null) &
(cd there && exec "$trainer" --run several --resume --steps 20 --rank 1/2@../meet >out 2>../err </dev/null)
codes=$?
wait $!
check "--resume from copies, of which one is damaged: status 2, and it is named" \
    test $codes$? = 22 -a "$(cat err0 err | grep -c 'rank 1: its copy of several/step_000010: optimizer.safetensors: ')" = 1
rm -rf several meet here there died
begin 3 "${long[@]}" --steps 100000 --comm-timeout 1 --run several
stopped=$(rank_pid 1)
kill -STOP "$stopped"
wait $pid
code=$?
kill -CONT "$stopped" 2>/dev/null
check "a stopped rank: status 1 after --comm-timeout" test $code = 1
check "... and its name" grep -q "rank 1 has not answered for 1 s (--comm-timeout), so rank 0 stops in" err
rm -rf several
if ! is_quick; then
    begin 2 "${start[@]}" --batch-size 32 --batch-tokens 1024 --steps 350 --eval-every 0 --sample-every 0 --run several
    slow=$(rank_pid 1)
    while kill -STOP "$slow" 2>/dev/null; do sleep 0.05; kill -CONT "$slow" 2>/dev/null; sleep 0.01; done
    wait $pid
    code=$?
    check "a rank that is stopped five times of six: the run goes on, and names it" test $code = 0 -a "$(grep -c ': rank 1 is slow, and the others wait for it: ' err)" -ge 1
    check "... and no other rank" test "$(grep -c ' is slow, and the others wait' err)" = "$(grep -c ': rank 1 is slow' err)"
fi
rm -rf several

kills=${KILLS:-$(is_quick && echo 4 || echo 20)}
RANDOM=7
n_killed=0
n_whole=0
right=0
while [ $n_killed -lt "$kills" ] && [ $right = 0 ]; do
    resume=(--resume)
    if ! compgen -G 'several/step_??????/manifest.json' >/dev/null; then
        rm -rf several
        resume=("${long[@]}" --steps 800 --save-every 40)
    fi
    "$launch" -n $((1 + RANDOM % 4)) "$trainer" "${resume[@]}" --run several --zero $((RANDOM % 3)) >out 2>err </dev/null &
    pid=$!
    sleep "0.$((RANDOM % 8))$((RANDOM % 10))"
    victims=($(pgrep -P $pid))
    [ ${#victims[@]} = 0 ] || kill -9 "${victims[RANDOM % ${#victims[@]}]}" 2>/dev/null
    wait $pid
    code=$?
    if [ $code = 137 ]; then
        n_killed=$((n_killed + 1))
    else  # it was too late for the kill
        n_whole=$((n_whole + 1))
        [ $code = 0 ] && [ "$(sums whole/step_000800)" = "$(sums several/step_000800)" ]
        right=$?
        rm -rf several
    fi
done
while [ $right = 0 ] && ! [ -d several/step_000800 ]; do  # what the last kill has left
    compgen -G 'several/step_??????/manifest.json' >/dev/null || { rm -rf several; break; }
    ranks 2 --resume --run several
    [ $status = 0 ] || right=1
done
[ $right = 0 ] && { [ ! -d several ] || [ "$(sums whole/step_000800)" = "$(sums several/step_000800)" ]; }
verdict $? "$n_killed kills at random (1 to 4 ranks, any --zero), each resumed: $n_whole whole runs, all with the bytes of one rank" \
    "status $code, $status: $(cat err)"

# ---- one line for one error of the user ----

echo "# one line"
one_line() {  # PROMISE LINE STATUS FILE...: all that was said is this line
    local promise=$1 line=$2 good=$3
    shift 3
    [ "$good" = 0 ] && [ "$(cat "$@" | wc -l)" = 1 ] && grep -q "^$line" "$@"
    verdict $? "$promise" "$(cat "$@")"
}
ranks 4 "${start[@]}" --train missing --run mistaken
one_line "4 ranks, a file that none of them has: said once, status 2" "train_gpt2: missing: expected a file" $((status - 2)) err
ranks 4 "${start[@]}" --batch-tokens 33 --run mistaken
one_line "4 ranks, options that contradict each other: said once, status 2" "train_gpt2: --batch-tokens: expected a multiple" $((status - 2)) err
by_hand() {  # FOLDER OPTION...: three ranks into err0, err1 and err2, rank 2 in that folder; `wrong` ranks do not end with status 2
    local at folder=$1 pids=() rank
    at=127.0.0.1:$(port)
    wrong=0
    shift
    for rank in 0 1 2; do
        (if [ $rank = 2 ]; then cd "$folder" || exit 1; fi; exec timeout 20 "$trainer" "${start[@]}" --rank "$rank/3@$at" --run mistaken "$@") \
            >/dev/null 2>err$rank &
        pids+=($!)
    done
    for rank in 0 1 2; do
        wait "${pids[rank]}"
        [ $? = 2 ] || wrong=$((wrong + 1))
    done
}
by_hand . --train missing
one_line "3 ranks by hand, a file that none of them has: said once, status 2" "train_gpt2: missing: expected a file" $wrong err0 err1 err2
mkdir bare
by_hand bare --batch-tokens 96
one_line "a file that only rank 2 lacks: said by rank 2, status 2 everywhere" "train_gpt2 \[rank 2\]: text: expected a file" $wrong err0 err1 err2
for local in 0 1; do  # torchrun's second machine
    RANK=$((2 + local)) WORLD_SIZE=4 LOCAL_RANK=$local TORCHELASTIC_RUN_ID=none "$trainer" --lrr 3 2>err$local
    check "torchrun, rank $local of a machine, a wrong option: status 2" test $? = 2
done
one_line "... said by the first rank of the machine" "train_gpt2: --lrr: unknown option" 0 err0 err1

# ---- ranks that die or stand still, in every phase ----

echo "# strikes"
shim=$work/strike.so
nine=("${start[@]}" --batch-tokens 96 --steps 9 --schedule constant --eval-every 3 --sample-every 0 --save-every 3 --keep 9)
"$trainer" "${nine[@]}" --run nine >out 2>err

struck() {  # RANK STRIKE: three ranks by a file, and what is preloaded into one; codes: those of the other two
    local rank pids=()
    rm -rf several exported meet err?
    for rank in 0 1 2; do
        (if [ $rank = "$1" ]; then export LD_PRELOAD=$shim STRIKE=$2; fi; export COMM_CHECK=0
            exec "$trainer" "${nine[@]}" --zero 2 --comm-timeout 2 --init-timeout 2 --rank $rank/3@./meet --run several --export-hf exported) \
            >out$rank 2>err$rank </dev/null &
        pids+=($!)
    done
    codes=""
    began=$SECONDS
    for rank in 0 1 2; do [ $rank = "$1" ] || { wait "${pids[rank]}"; codes+=$?; }; done
    took=$((SECONDS - began))
    [[ $2 = count* ]] || kill -9 "${pids[$1]}"
    wait "${pids[$1]}"
    cp err$(($1 == 0 ? 2 : 0)) err
} 2>/dev/null

# The others end soon with status 1 and a line each; with 2 and a line of rank 0 where the rank has not even come (or is
# rank 0); with 0 when they were done. What is left goes on to the bytes of a run that nobody struck.
survived() {  # RANK
    local lines=0 rank silent=0
    [ $took -le 14 ] || return 1
    for rank in 0 1 2; do
        [ $rank != "$1" ] || continue
        lines=$(wc -l <err$rank)
        [ "$lines" -le 1 ] || return 1
        silent=$((silent + 1 - lines))
    done
    case $codes in 11) [ $silent = 0 ] ;; 22) [ $silent = 1 ] ;; 01 | 10) [ $silent = 1 ] ;; 00) [ $silent = 2 ] ;; *) false ;; esac || return 1
    [ -d several ] || return 0
    timeout 20 "$trainer" "${nine[@]}" --continue --run several >out 2>err
    [ "$(sums nine/step_000009)" = "$(sums several/step_000009)" ]
}

if cc -O1 -shared -fPIC -D_GNU_SOURCE "$root/dev/faults/strike.c" -o "$shim" -ldl 2>err; then
    for rank in 0 1 2; do
        struck $rank "count:$work/calls"
        n=$(<calls)
        points="$((5 + rank)) 12 $((n / 4)) $((n / 2)) $((n * 3 / 4)) $n"  # the first two while ranks meet
        is_quick && points=$((n / 2))
        [ -z "${STRIKES-}" ] || points=$(seq 1 "$STRIKES" "$n")
        for kind in kill stop; do
            [ $kind = kill ] || [ -n "${STRIKES-}" ] || points=$((n * (2 + rank) / 5))
            if is_quick && [ $kind = stop ] && [ $rank != 1 ]; then continue; fi
            bad=""
            for at in $points; do
                struck $rank $kind:"$at"
                survived $rank || bad+=" $at ($codes, $took s: $(cat err0 err1 err2))"
            done
            verdict $([ -z "$bad" ]; echo $?) "rank $rank of 3, $kind at call $(echo $points | tr ' ' ',') of $n: the others say so and end, --continue gives the same bits" "$bad"
        done
    done
    for rank in 0 1 2; do  # rank 2 stands still when it has reached rank 0, but not rank 1
        (if [ $rank = 2 ]; then export LD_PRELOAD=$shim STRIKE=stop:7; fi
            exec "$trainer" "${start[@]}" --train missing --init-timeout 9 --rank $rank/3@./meet --run mistaken) >/dev/null 2>err$rank &
        pids[rank]=$!
    done
    sleep 1
    kill -CONT "${pids[2]}" 2>/dev/null
    wrong=0
    for rank in 0 1 2; do
        wait "${pids[rank]}"
        [ $? = 2 ] || wrong=$((wrong + 1))
    done
    one_line "a user's mistake while ranks still meet: said once, status 2" "train_gpt2: missing: expected a file" $wrong err0 err1 err2
    (export LD_PRELOAD=$shim CLOCKS=1
        ranks 3 "${nine[@]}" --run clocks
        exit $status)
    check "clocks that jump by days: the bytes of one rank" test $? = 0 -a "$(sums clocks/step_000009)" = "$(sums nine/step_000009)"
    rm -f out
    LD_PRELOAD=$shim CLOCKS=1 "$launch" -n 3 "$trainer" "${long[@]}" --steps 100000 --run several2 --comm-timeout 2 >out 2>err </dev/null &
    pid=$!
    while ! grep -qs '^step [0-9]*5/' out && kill -0 $pid 2>/dev/null; do sleep 0.02; done
    kill -STOP "$(rank_pid 1)"
    began=$SECONDS
    wait $pid
    check "... a stopped rank: named after --comm-timeout, not sooner" \
        test $? = 1 -a $((SECONDS - began)) -ge 1 -a $((SECONDS - began)) -le 15 -a "$(grep -c 'rank 1 has not answered for 2 s' err)" = 2
    LD_PRELOAD=$shim CLOCKS=1 "$launch" -n 2 sh -c '[ $RANK = 1 ] && exit 3; sleep 1; echo late >&2' >out 2>err
    check "... launch gives the others time to say why they end" test $? = 3 -a "$(grep -c '^late' err)" = 1
else
    skip "ranks that are struck: no shared library can be built: $(tail -n 1 err)"
fi
rm -rf several several2 exported

# ---- a bit flips in the memory of one rank ----

echo "# before a checkpoint ranks compare their parameters: no checkpoint has the flipped bit"
compared=("${start[@]}" --batch-tokens 128 --steps 8 --save-every 2 --keep 9)
"$trainer" "${compared[@]}" --run sound >out 2>err

# flips RANKS RANK SUM STEP LIKE OPTION...: in that rank's memory, before its SUM-th sum, which is made at step STEP; who has what most have
flips() {
    local n=$1 bad=$2 sum=$3 step=$4 like=$5 rank ended=() sound=0 pids=() pid checkpoint
    shift 5
    for rank in $(seq $((n - 1)) -1 0); do
        (if [ $rank = $bad ]; then export FAULT=flip:$sum; fi
         COMM_CHECK=0 exec timeout 60 "$faults" "${compared[@]}" --rank $rank/$n@./meet --run several "$@") >out 2>err$rank </dev/null &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait $pid; ended+=($?); done
    for checkpoint in several/step_*; do
        [ -e "$checkpoint" ] && { [ "$(sums "$checkpoint")" = "$(sums sound/${checkpoint#*/})" ] || sound=1; }
    done
    cat err[0-9] >err
    check "sum $sum of rank $bad of $n, $*: status 1 on all, one line, checkpoints up to the one before step $step" \
        test "$(sort -u <<<"${ended[*]}" | tr -d ' 1') $sound $(wc -l <err) $(grep -c "step $step: rank $bad: other bits of .* than rank $like, which has the same" err) $(ls -d several/step_* 2>/dev/null | wc -l)" = " 0 1 1 $((step / 2 - 1))"
    ranks $n "${compared[@]}" --run several --continue
    check "... and --continue ends with the bytes of one rank" same_run sound several step_000008
    rm -rf several err[0-9]
}
flips 2 1 70 6 0 --zero 0
if ! is_quick; then
    flips 2 1 20 2 0 --zero 2
    flips 3 0 50 4 1 --zero 1  # two of three are right
    flips 4 3 30 2 2 --pp 2
fi

# ---- strangers, secrets, other runs ----

echo "# strangers"
export LLMC_SECRET=0123456789abcdef
at=127.0.0.1:$(port)
"$trainer" "${options[@]}" --rank "0/2@$at" --run several >out 2>err &
pid=$!
LLMC_SECRET=fedcba9876543210 "$trainer" "${options[@]}" --rank "1/2@$at" --run theirs >out1 2>err1
check "a rank with another secret: status 2 and the reason" test $? = 2 -a "$(grep -c 'rank 0 has another secret than rank 1' err1)" = 1 -a "$(wc -l <err1)" = 1
LLMC_SECRET=fedcba9876543210 "$trainer" "${options[@]}" --rank "0/2@$at" --run theirs >out1 2>err1
check "another run at the same port: status 2 and the reason" test $? = 2 -a "$(grep -c 'Address already in use (another run?' err1)" = 1
TORCHELASTIC_USE_AGENT_STORE=True "$trainer" "${options[@]}" --rank "0/2@$at" --run theirs >out1 2>err1
check "... torchrun's own port: status 2 and how to start it" test $? = 2 -a "$(grep -c 'in use (torchrun does: start it with TORCH_DISABLE_SHARE' err1)" = 1
"$trainer" "${options[@]}" --rank "1/2@$at" --run several >out1 2>err1
wait $pid
check "... the first run goes on to its bytes" same_run one4 several step_000020
check "the secret is in no file of the run, and in no output" test -z "$(grep -rlE '0123456789abcdef|fedcba9876543210' several out out1 err err1)"
rm -rf several theirs
unset LLMC_SECRET
RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 LLMC_SECRET=short "$trainer" "${options[@]}" 2>err
check "a short secret: status 2, one line, which does not show it" test $? = 2 -a "$(grep -c 'LLMC_SECRET: expected 16 to 255 characters, found 5' err)" = 1 -a "$(grep -c short err)" = 0
for i in 1 2 3; do
    "$launch" -n 2 "$trainer" "${options[@]}" --run several$i >out$i 2>err$i </dev/null &
done
wait
check "three launches at once: each the bytes of one rank" \
    test "$(sums several1/step_000020) $(sums several2/step_000020) $(sums several3/step_000020)" = "$(sums one4/step_000020) $(sums one4/step_000020) $(sums one4/step_000020)"
rm -rf several?

finish
