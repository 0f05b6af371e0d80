#!/usr/bin/env bash
# Checkpoints that survive anything (doc/checkpoints.md): kill -9 at random instants, the end of the
# process at every file call, errors of every file call and allocation, damage, signals. About a minute on 2 cores.
#     dev/test_faults.sh                                   what every commit keeps
#     dev/test_faults.sh quick                             20 kills, the end of the process at every tenth call, damage, locks
#     KILLS=10000 SECOND=1 dev/test_faults.sh kills calls  only these parts, in other sizes (dev/faults/campaign.sh)
#     KILLS=20 dev/test_faults.sh hello                    the training of `make run` itself
#     TRAINER=train_moe dev/test_faults.sh kills calls     another trainer than train_gpt2
# Nothing is lost means: after a resume without faults
# model, moments, metrics and samples are those of a run that nobody touched, and stderr is empty.
. "$(dirname "$0")/promises.sh"
export ASAN_OPTIONS=exitcode=66 UBSAN_OPTIONS=exitcode=66  # not the 1 of a run that fails as it should
kills=${KILLS:-$(is_quick && echo 20 || echo 200)}
second=${SECOND:-0}  # 1: a second fault while the first is being recovered from
stride=${STRIDE:-$(is_quick && echo 10 || echo 1)}  # of the calls that fail: all, or one in so many
name=${TRAINER:-train_gpt2}
parts=${*:-$(is_quick && echo kills calls damage lock || echo kills calls errors memory disk damage signals skips lock)}

# ---- builds and runs ----

is_quick || build "ASAN=1 OPT=-Og" ${name}_faults >/dev/null &
need_build trainer "" ${name}_faults
wait
is_quick || need_build trainer_asan "ASAN=1 OPT=-Og" ${name}_faults

# in memory where there is such a folder: what is tested is the order of the calls, and fsync costs nothing there
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
for i in {1..12}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text
config() {  # POSITIONS LAYERS HEADS CHANNELS
    case $name in
        train_moe) echo "{\"model_type\":\"mixtral\",\"max_position_embeddings\":$1,\"vocab_size\":257,\"num_hidden_layers\":$2,\"num_attention_heads\":$3,\"num_key_value_heads\":1,\"hidden_size\":$4,\"intermediate_size\":$4,\"num_local_experts\":3,\"num_experts_per_tok\":2,\"balance\":\"bias\"}" ;;
        train_qwen3) echo "{\"model_type\":\"qwen3\",\"max_position_embeddings\":$1,\"vocab_size\":257,\"num_hidden_layers\":$2,\"num_attention_heads\":$3,\"num_key_value_heads\":1,\"head_dim\":8,\"hidden_size\":$4,\"intermediate_size\":$4}" ;;
        train_qwen36) echo "{\"model_type\":\"qwen3_5_moe_text\",\"max_position_embeddings\":$1,\"vocab_size\":257,\"num_hidden_layers\":$(($2 + 1)),\"full_attention_interval\":2,\"num_attention_heads\":$3,\"num_key_value_heads\":1,\"head_dim\":8,\"linear_num_key_heads\":1,\"linear_num_value_heads\":2,\"linear_key_head_dim\":4,\"linear_value_head_dim\":4,\"linear_conv_kernel_dim\":3,\"hidden_size\":$4,\"num_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":$4,\"shared_expert_intermediate_size\":$4,\"rope_parameters\":{\"partial_rotary_factor\":0.5,\"mrope_section\":[1,1,0]}}" ;;
        train_deepseek_v4) echo "{\"model_type\":\"deepseek_v4\",\"max_position_embeddings\":$1,\"vocab_size\":257,\"num_hidden_layers\":$(($2 + 1)),\"layer_types\":[\"compressed_sparse_attention\"$(printf ',"sliding_attention"%.0s' $(seq $2))],\"mlp_layer_types\":[\"hash_moe\"$(printf ',"moe"%.0s' $(seq $2))],\"compress_rates\":{\"compressed_sparse_attention\":2},\"num_attention_heads\":$3,\"head_dim\":8,\"qk_rope_head_dim\":4,\"q_lora_rank\":4,\"o_groups\":1,\"o_lora_rank\":4,\"sliding_window\":2,\"index_n_heads\":1,\"index_head_dim\":4,\"index_topk\":1,\"hc_mult\":2,\"hc_sinkhorn_iters\":2,\"hidden_size\":$4,\"n_routed_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":$4,\"num_nextn_predict_layers\":1,\"indexer_train\":\"kl\",\"bias_update_rate\":0.01,\"seq_balance_coef\":0.1}" ;;
        train_glm5) echo "{\"model_type\":\"glm_moe_dsa\",\"max_position_embeddings\":$1,\"vocab_size\":257,\"num_hidden_layers\":$(($2 + 1)),\"indexer_types\":[\"full\"$(printf ',"shared"%.0s' $(seq $2))],\"mlp_layer_types\":[\"dense\"$(printf ',"sparse"%.0s' $(seq $2))],\"num_attention_heads\":$3,\"q_lora_rank\":4,\"kv_lora_rank\":4,\"qk_nope_head_dim\":4,\"qk_rope_head_dim\":4,\"v_head_dim\":4,\"index_n_heads\":1,\"index_head_dim\":4,\"index_topk\":2,\"hidden_size\":$4,\"intermediate_size\":$4,\"n_routed_experts\":3,\"num_experts_per_tok\":2,\"moe_intermediate_size\":$4,\"rope_parameters\":{\"rope_theta\":10000},\"num_nextn_predict_layers\":1,\"indexer_train\":\"kl\",\"bias_update_rate\":0.01,\"seq_balance_coef\":0.1}" ;;
        *) echo "{\"model_type\":\"gpt2\",\"n_positions\":$1,\"vocab_size\":257,\"n_layer\":$2,\"n_head\":$3,\"n_embd\":$4}" ;;
    esac
}
config 8 1 1 8 >tiny.json
# --save-minutes 0: by the clock of dev/faults/shim.c five minutes are 1.5 s, and a busy machine would save when it liked
tiny=(--config "$work/tiny.json" --train "$work/text" --batch-size 1 --seq-len 4 --threads 1 --schedule constant --lr 1e-2 --save-minutes 0)
all=("${tiny[@]}" --val-fraction 0.2 --eval-every 2 --eval-batches 2 --sample-every 2 --max-new-tokens 3)

run() {  # OPTION...: into out and err; status is kept
    timeout 60 "$trainer" "$@" >out 2>err </dev/null
    status=$?
    [ $status = 0 ] || { echo "      status $status: $name $*"; cat err; }
    return $status
}

# the records of metrics.jsonl without what depends on time
columns() { sed -E 's/"(ms|tok_per_s|peak|time)": [^,}]+//g' "$1"; }

# the run in RUN is, up to the last bit, the run in WHOLE
same_run() {  # RUN WHOLE STEP
    cmp -s "$1/$3/model.safetensors" "$2/$3/model.safetensors" && cmp -s "$1/$3/optimizer.safetensors" "$2/$3/optimizer.safetensors" &&
        cmp -s <(columns "$1/metrics.jsonl") <(columns "$2/metrics.jsonl") && cmp -s "$1/samples.txt" "$2/samples.txt"
}

# ---- row 1: kill -9 at random instants ----

# One process after the other, each killed within 0.1 s, until one comes to the end; then the same again. Threads change.
# Where a machine is so busy that a process comes no further than the one before, the next has 0.1 s more.
kills() {
    local n=0 runs=0 lost=0 option ms patience=1 newest="" at
    rm -rf whole && run "${all[@]}" --steps 300 --save-every 1 --keep-every 50 --run whole
    while ((n < kills)); do
        rm -rf leg
        while :; do
            option=(--resume --run leg)
            compgen -G 'leg/step_*[0-9]/manifest.json' >/dev/null || { rm -rf leg; option=("${all[@]}" --steps 300 --save-every 1 --keep-every 50 --run leg); }
            ms=$((RANDOM % (100 * patience) + 1))
            { timeout -s KILL "$((ms / 1000)).$(printf %03d $((ms % 1000)))" "$trainer" "${option[@]}" --threads $((RANDOM % 3 + 1)) >out 2>err </dev/null; } 2>/dev/null
            status=$?
            [ -s err ] && { lost=$((lost + 1)); echo "      after $n kills: $(<err)"; }
            [ $status = 137 ] || break
            n=$((n + 1))
            at=$(cd leg 2>/dev/null && printf '%s\n' step_*[0-9] | tail -n 1)
            [ "$at" = "$newest" ] && patience=$((patience + 1)) || patience=1
            newest=$at
        done
        runs=$((runs + 1))
        { [ $status = 0 ] && same_run leg whole step_000300 && [ "$(cd leg && echo step_*)" = "$(cd whole && echo step_*)" ]; } ||
            { lost=$((lost + 1)); echo "      after $n kills: status $status, $(ls leg | tr '\n' ' ')"; }
    done
    check "$n times kill -9 in $runs runs of 300 steps and checkpoints: nothing is lost" test $lost = 0
}

# ---- rows 2 and 3: the end, or an error, at every file call ----

# what the faults meet. base: step 2 is saved, the run goes on to step 4 with a validation, samples and two checkpoints.
# again: the run was stopped by a signal at step 4, whose checkpoint is saved anew once its validation is done.
# beside: base, but checkpoints are written while training goes on, as is the default; then the calls have no fixed order.
base() {
    [ -e base ] && return
    run "${all[@]}" --steps 2 --save-every 1 --keep 1 --run beside
    run "${all[@]}" --steps 2 --save-every 1 --keep 1 --async-save 0 --run base
    cp -r base whole4 && run --resume --run whole4 --steps 4 && cp -r whole4 whole5 && run --resume --run whole5 --steps 5
    n_files=$(count 1 base) n_writes=$(count 2 base)
    cp -r base again && FAULT=term:$((n_files / 2)) "$trainer" --resume --run again --steps 4 >out 2>err </dev/null
    check "SIGTERM in the middle of a run: the checkpoint says so" \
        test "$(cd again && echo step_*4) $(grep -c '"interrupted": 1' again/step_000004/manifest.json)" = "step_000004 1"
    cp -r again once && run --resume --run once --steps 4
    check "... and a resume makes up for the validation and sample that it left out" same_run once whole4 step_000004
    n_again=$(count 1 again) n_aside=$(FAULT_NO_EXCHANGE=1 count 1 again)
    echo "# a resume from step 2 to 4 makes $n_files file calls, $n_writes of them direct writes"
}

count() {  # WHICH BASE
    rm -rf counted && cp -r "$2" counted
    FAULT=count:0 "$trainer" --resume --run counted --steps 4 2>&1 >/dev/null | tail -n 1 | cut -d' ' -f"$1"
}

# sweep NAME KIND N BASE: the KIND of fault at the 1st .. N-th call; a line in NAME.bad for each that broke a promise
sweep() {
    local name=$1 kind=$2 last=$3 from=$4 n status bad newest first
    mkdir "$name" && cd "$name" || return
    for ((n = 1; n <= last; n += stride)); do
        rm -rf run && cp -r "../$from" run
        newest=$(cd run && printf '%s\n' step_* | tail -n 1)
        FAULT=$kind:$n timeout 20 "$trainer" --resume --run run --steps 4 >out 2>err </dev/null
        status=$?
        bad=""
        case $kind:$status in
            exit:99 | torn:99 | short:0) bad=$(<err) ;;
            enospc:1) grep -q 'No space left on device' err && ! compgen -G 'run/step_*.tmp' >/dev/null || bad="$(<err) $(ls run)" ;;
            eio:[12]) grep -q 'Input/output error' err || bad="$(<err)" ;;
            enospc:0 | eio:0) bad=$(grep -vE 'No space left on device|Input/output error' err) ;;
            *) bad="status $status: $(<err)" ;;
        esac
        if [ "$second" = 1 ]; then
            FAULT=$kind:$((RANDOM % last + 1)) timeout 20 "$trainer" --resume --run run --steps 4 >out 2>err </dev/null
        fi
        timeout 20 "$trainer" --resume --run run --steps 5 >out 2>err </dev/null
        status=$?
        first=$(grep -m 1 -oE '^step [0-9]+/' out | tr -dc 0-9)  # trained now: none that was saved before
        [ -z "$first" ] || ((first > 10#${newest#step_})) || bad="$bad; $newest was lost"
        { [ $status = 0 ] && [ ! -s err ] && same_run run ../whole5 step_000005 && [ "$(cd run && echo *)" = "$(cd ../whole5 && echo *)" ]; } ||
            bad="$bad; then status $status: $(<err) $(cd run && echo *)"
        [ -z "$bad" ] || echo "call $n: $bad" >>"../$name.bad"
    done
    cd ..
    touch "$name.bad"
}

swept() {  # NAME PROMISE
    verdict "$([ ! -s "$1.bad" ]; echo $?)" "$2$([ $stride = 1 ] || echo ", one in $stride")" "$(wc -l <"$1.bad") broken: $(head -c 2000 "$1.bad")"
}

calls() {
    base
    sweep exits exit "$n_files" base &
    sweep exits_again exit "$n_again" again &
    FAULT_NO_EXCHANGE=1 sweep exits_aside exit "$n_aside" again &
    sweep torn torn "$n_writes" base
    wait
    sweep exits_beside exit "$n_files" beside
    swept exits "the process ends before each of $n_files file calls (after the one before it): nothing is lost"
    swept exits_beside "... and while training goes on"
    swept torn "... in the middle of each of $n_writes writes"
    swept exits_again "... of $n_again calls, when a checkpoint is replaced by one of the same step"
    swept exits_aside "... of $n_aside calls, where two names cannot be exchanged"
}

errors() {
    base
    sweep full enospc "$n_files" base &
    sweep broken eio "$n_files" base &
    sweep short short "$n_writes" base
    wait
    sweep broken_beside eio "$n_files" beside &
    sweep full_beside enospc "$n_files" beside
    wait
    swept full "the disk is full from each of $n_files file calls on: path and reason, no .tmp left, nothing is lost"
    swept full_beside "... and while training goes on"
    swept broken "each of $n_files file calls fails with EIO: path and reason, nothing is lost"
    swept broken_beside "... and while training goes on"
    swept short "each of $n_writes writes accepts half of its bytes: nothing is noticed"
}

# ---- row 5: every allocation fails ----

memory() {
    local build program trainers=("$trainer" "$trainer_asan") exports=(--export-hf hf)
    if [ $name = train_gpt2 ]; then exports+=(--export-bin b.bin); fi
    base
    for program in "${trainers[@]}"; do
        build=$([ "$program" = "$trainer" ] && echo "" || echo " under AddressSanitizer")
        rm -rf resumed new
        cp -r base resumed
        FAULT=nomem:0 timeout 200 "$program" --resume --run resumed --steps 4 >out 2>err
        check "each allocation of a resume fails$build: $(tail -n 1 err)" grep -q ' 0 of them badly$' err
        FAULT=nomem:0 timeout 200 "$program" "${all[@]}" --steps 2 --keep 1 --save-every 1 --async-save 0 --verify-every 2 "${exports[@]}" --run new >out 2>err
        check "each allocation of a new run fails$build: $(tail -n 1 err)" grep -q ' 0 of them badly$' err
        FAULT=nomem:0 timeout 200 "$program" --from base --generate "line" --max-new-tokens 4 >out 2>err
        check "each allocation of a generation fails$build: $(tail -n 1 err)" grep -q ' 0 of them badly$' err
    done
}

# ---- row 3: a real disk that fills up ----

disk() {
    local status steps
    mkdir -p small
    if ! unshare -rm true 2>/dev/null; then skip "a disk of 16 MiB that fills up: mounting is not allowed here"; return; fi
    config 64 2 2 64 >mid.json
    local mid=(--config mid.json --train text --batch-size 1 --seq-len 4 --threads 1 --schedule constant --keep 100 --save-every 1)
    # its files are gone with the namespace, so everything happens inside
    unshare -rm bash -s "$trainer" "${mid[@]}" >disk.out 2>&1 <<'SCRIPT'
mount -t tmpfs -o size=16m tmpfs small || exit 77
"$@" --steps 20 --run small/run >out 2>err
status=$?
n=$(ls -d small/run/step_*[0-9] | wc -l)
grep -qE 'a checkpoint takes [0-9.]+ MiB, the disk has [0-9.]+ [KM]iB free' err && [ $status = 1 ] && [ "$n" -gt 3 ] && ! ls -d small/run/*.tmp 2>/dev/null || { cat err; exit 1; }
head -c $(($(stat -f -c '%a * %S' small) - 200000)) /dev/zero >small/other  # less is free than a file of a checkpoint takes
rm -r "small/run/step_000001" small/run/step_000002
head -c 900000 /dev/zero >>small/other
for step in small/run/step_*; do "$1" --from $step --export-hf hf >/dev/null 2>err || { cat err; exit 2; }; done
rm -r small/other
"$1" --resume --run small/run --steps 10 --keep 2 >out 2>err || { cat err; exit 3; }
"$@" --steps 10 --run small_whole >/dev/null 2>err || { cat err; exit 4; }
cmp small/run/step_000010/model.safetensors small_whole/step_000010/model.safetensors && cmp {small/run,small_whole}/step_000010/optimizer.safetensors
SCRIPT
    status=$?
    if [ $status = 77 ]; then skip "a disk of 16 MiB that fills up: mounting is not allowed here"; return; fi
    verdict $status "a disk of 16 MiB fills up: what is needed and what is free, every checkpoint whole, the same bits once there is room" "status $status: $(<disk.out)"
}

# ---- row 4: damage, as the user meets it (test_checkpoint.c damages every byte) ----

damage() {
    local file
    run "${all[@]}" --steps 6 --save-every 2 --keep 3 --run six
    for file in config.json model.safetensors optimizer.safetensors manifest.json; do
        rm -rf hurt && cp -r six hurt
        printf '\377' | dd of=hurt/step_000006/$file bs=1 seek=200 conv=notrunc 2>/dev/null
        run --resume --run hurt
        check "a byte of $file is wrong: one line names it, the checkpoint before is used, the end is the same" \
            test "$(wc -l <err) $(grep -c "hurt/step_000006: $file: .*looking for the checkpoint before it" err) $(same_run hurt six step_000006; echo $?)" = "1 1 0"
    done
    truncate -s 100 hurt/step_000006/manifest.json
    rm -rf hf && run --from hurt --export-hf hf
    check "--from a run whose newest checkpoint is damaged takes the one before" cmp hf/model.safetensors six/step_000004/model.safetensors
    timeout 20 "$trainer" --from hurt/step_000006 --export-hf hf6 >out 2>err
    check "--from a damaged checkpoint by its name: status 2, one line" test "$? $(wc -l <err) $(ls hf6 2>/dev/null)" = "2 1 "
    for file in hurt/step_*/model.safetensors; do truncate -s -1 "$file"; done
    timeout 20 "$trainer" --resume --run hurt >out 2>err
    check "all checkpoints damaged: status 2, each is named" test "$? $(grep -c 'looking for' err) $(grep -c 'none of its checkpoints is whole' err)" = "2 3 1"
    mv six/step_000006 six/step_000008
    run --resume --run six && grep -q 'of step 6: the folder was renamed' err
    check "a renamed checkpoint is not taken for another step" test $? = 0
}

# ---- row 10: signals ----

# a run that waits in the middle of a step, because nobody reads what it prints; $pid
blocked() {  # OPTION...
    local size=-1
    [ -e pipe ] || mkfifo pipe
    "$trainer" "$@" >pipe 2>err </dev/null &
    pid=$!
    exec 3<pipe
    until [ -s "${@: -1}/metrics.jsonl" ] && [ "$size" = "$(stat -c %s "${@: -1}/metrics.jsonl")" ]; do
        size=$(stat -c %s "${@: -1}/metrics.jsonl" 2>/dev/null)
        sleep 0.3
    done
}

signals() {
    local signal step status
    for signal in TERM INT USR1; do
        blocked "${tiny[@]}" --steps 100000 --run "sig$signal"
        kill -$signal $pid
        cat <&3 >rest
        exec 3<&-
        wait $pid
        status=$?
        step=$(tail -n 1 rest | grep -oE 'step_[0-9]{6}$')
        check "SIG$signal: status 0, a checkpoint within a step, nothing on stderr" test "$status $(ls -d "sig$signal"/step_*) $(wc -c <err)" = "0 sig$signal/$step 0"
    done
    rm -rf twice && run "${all[@]}" --steps 4 --save-every 1 --run twice
    blocked "${tiny[@]}" --steps 100000 --run noticed  # launch tells a rank so whose reader is gone with it
    kill -PIPE $pid && sleep 0.1 && kill -TERM $pid
    cat <&3 >rest
    exec 3<&-
    wait $pid
    check "SIGPIPE, then SIGTERM: asked for the first time, a checkpoint" test "$? $(ls noticed | grep -c '^step_')" = "0 1"
    blocked --resume --steps 100000 --save-every 100000 --sample-every 0 --eval-every 0 --run twice
    kill -TERM $pid
    sleep 0.1
    kill -INT $pid
    wait $pid 2>/dev/null
    status=$?
    exec 3<&-
    check "a second signal ends the process at once (status $status)" test $status = 130
    rm -rf whole && run "${all[@]}" --steps 4 --save-every 1 --run whole && run --resume --run whole --steps 7
    run --resume --run twice --steps 7 --save-every 1 --sample-every 2 --eval-every 2
    check "... and nothing is lost" same_run twice whole step_000007
    "$trainer" "${all[@]}" --steps 300 --save-every 1 --run head 2>err | head -n 90 >/dev/null
    step=${PIPESTATUS[0]}
    run "${all[@]}" --steps 300 --save-every 50 --run straight
    run --resume --run head
    check "| head: status $step, SIGPIPE's or 0, and the resumed run has the bits of one that was not piped" \
        test "$step $(same_run head straight step_000300; echo $?)" = "141 0" -o "$step $(same_run head straight step_000300; echo $?)" = "0 0"
}

# ---- row 11: updates that are skipped, and their state ----

skips() {
    local burn=("${tiny[@]}" --lr 10 --weight-decay 10 --clip 0 --max-skips 5 --warmup 0) first
    timeout 60 "$trainer" "${burn[@]}" --steps 1000 --run burnt >out 2>err
    status=$?
    first=$(grep '| skipped$' out | head -n 1 | sed 's/^step \([0-9]*\).*/\1/')
    check "--max-skips 5: the sixth non-finite update in a row ends the run with status 1" test "$status $(grep -c '| skipped$' out)" = "1 6"
    cp err expected
    run "${burn[@]}" --steps $((first + 2)) --save-every 1 --run burning
    timeout 60 "$trainer" --resume --run burning --steps 1000 >out 2>err
    check "... also when it was stopped and resumed after three of them: the same message" \
        cmp expected <(sed 's/, --from burning.*//' err)
    check "... and a checkpoint from before them" test -e "$(grep -o 'burning/step_[0-9]*' err)/manifest.json"
    local z=("${tiny[@]}" --skip-loss-z 2 --skip-norm-z 2.5 --steps 300 --save-every 10 --keep 100)
    run "${z[@]}" --run outliers
    local n=$(grep -c '"skipped": true' outliers/metrics.jsonl)
    check "--skip-loss-z, --skip-norm-z: outliers are skipped ($n of 300), none in the first 128 steps" \
        test "$n" -gt 0 -a "$(head -n 129 outliers/metrics.jsonl | grep -c '"skipped": true')" = 0
    rm -rf leg && cp -r outliers leg && rm -r leg/step_0001[5-9]0 leg/step_000[23]??
    run --resume --run leg
    check "... their windows are in the checkpoint: resumed from step 140, the same bits" cmp {leg,outliers}/step_000300/model.safetensors
    check "... and the same steps are skipped" cmp <(columns leg/metrics.jsonl) <(columns outliers/metrics.jsonl)
    rm -r leg
    run "${tiny[@]}" --steps 20 --verify-every 1 --run verified && run "${tiny[@]}" --steps 20 --run unverified
    check "--verify-every 1: the same bits" cmp {verified,unverified}/step_000020/optimizer.safetensors
}

# ---- one writer; and what is kept ----

lock() {
    blocked "${tiny[@]}" --steps 100000 --save-every 100 --keep 1 --keep-every 300 --run held
    for option in "--resume --run held" "${tiny[*]} --run held"; do
        timeout 20 "$trainer" $option >out 2>refused
        check "a second writer is refused: status 2, the first one's process id" test "$? $(grep -c "another process ($pid) writes to this run\|there are checkpoints" refused)" = "2 1"
    done
    kill -KILL $pid
    { wait $pid; } 2>/dev/null
    exec 3<&-
    run --resume --run held --steps 650
    check "after kill -9 the run is free again; --keep 1 --keep-every 300 has kept 300, 600 and the last" \
        test "$status $(cd held && echo step_*)" = "0 step_000300 step_000600 step_000650"
}

# ---- the first ten minutes: the run of `make run`, killed at random instants, resumed as the README says ----

# not by itself: KILLS=20 dev/test_faults.sh hello takes twice as long as `make run`, and what the kills cost
hello() {
    local n=0 age lost=0 pid seconds whole=("$hello" --args dev/hello.txt --run)
    cd "$root" && make -s build/hello || return  # whose text it trains on
    "${whole[@]}" "$work/whole" >"$work/out" 2>"$work/err" </dev/null
    check "the run of make run comes to its end" test $? = 0
    until grep -qs final_step "$work/leg/summary.json"; do
        option=("${whole[@]:1}" "$work/leg")
        compgen -G "$work/leg/step_*[0-9]/manifest.json" >/dev/null && option=(--run "$work/leg" --resume)
        "$hello" "${option[@]}" >"$work/out" 2>"$work/err" </dev/null &
        pid=$!
        seconds=$((n < kills ? RANDOM % 15 + 2 : 3600))
        timeout $seconds tail --pid=$pid -f /dev/null
        kill -KILL $pid 2>/dev/null && n=$((n + 1))
        { wait $pid; } 2>/dev/null
        age=$(($(date +%s) - $(stat -c %Y "$work"/leg/step_*[0-9]/manifest.json 2>/dev/null | sort -n | tail -n 1 | grep . || stat -c %Y "$work/leg" 2>/dev/null || date +%s)))
        lost=$((n > 0 && age > lost && seconds < 3600 ? age : lost))
    done
    check "make run, $n times kill -9, each time resumed: at most $lost s of work were lost each time" test $lost -lt 120
    cd "$work" && check "and the end has the bits of a run that nobody touched" same_run leg whole "$(cd whole && ls -d step_* | tail -n 1)"
}
if [ "$parts" = hello ]; then need_build hello "" train_gpt2; fi

for part in $parts; do
    echo "# $part"
    $part
done
finish
