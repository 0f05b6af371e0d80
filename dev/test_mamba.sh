#!/usr/bin/env bash
# train_mamba_hpn as its user meets it: every option, kills, ranks, builds, growing models, generation, probes. About 50 s of one
# core after four builds.
#     dev/test_mamba.sh                        all parts
#     dev/test_mamba.sh options kills          some of them: options conflicts kills ranks builds growth text files memory
#     dev/test_mamba.sh quick                  kills (3), ranks, growth and text
#     KILLS=300 dev/test_mamba.sh kills        more random kills than 30
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 3 || echo 30)}
parts=${*:-$(is_quick && echo kills ranks growth text || echo options conflicts kills ranks builds growth text files memory)}

need_build trainer "" train_mamba_hpn
limit=60  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files ----

write_texts
echo "Another document, which has a line of its own, and some more words than that." >more
start=(--model tiny --d-model 16 --d-state 4 --base-layers 2 --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)

# rows of 8 tokens below 9, of which the one above 5 says the class, 0..2
class_rows() {  # ROWS SEED
    local r t class inputs="" targets="" x=$2
    for ((r = 0; r < $1; r++)); do
        class=$((r % 3))
        for ((t = 0; t < 8; t++)); do
            x=$((x * 1103515245 + 12345 & 0x7fffffff))
            inputs+=" $((t == 4 + r % 4 ? 6 + class : x >> 12 & 1))"
            targets+=" $((t == 7 ? class : -1))"
        done
    done
    examples "$1" 8 "$inputs" "$targets"
}

# ---- options ----

moments() { same_model "$plain" with && ! same; }  # the same parameters, other moments
printed() { [ "$(grep -cE "$1" out)" = "${2:-1}" ]; }
equals() { rm -rf other && go "${start[@]}" "$@" --run other && same_run other with; }  # what other options give too
n_records() { grep -c "\"kind\": \"$1\"" with/metrics.jsonl; }
record() { grep -q "$1" with/metrics.jsonl && ! grep -q "$1" "$plain/metrics.jsonl"; }

options() {
    local i option value vocabulary
    # token ids as decimal numbers: three shards in a folder, one of another kind of name, one that is for validation
    mkdir shards val_shards
    for i in 0 1 2; do seq $((i * 7)) $((i * 7 + 150)) | awk '{ print $1 % (17 + '$i') }' >shards/$i.txt; done
    seq 0 90 | awk '{ print $1 * $1 % 13 }' >shards/3.ids
    seq 5 60 | awk '{ print $1 % 11 }' >val_shards/v.txt
    cat shards/0.txt >tokens.txt
    echo '{"model_type":"mamba","vocab_size":257,"num_hidden_layers":3,"hidden_size":24,"state_size":5,"conv_kernel":3,"expand":2,"layer_norm_epsilon":1e-5}' >three.json
    go "${start[@]}" --run begun_with
    sed s/mamba/gpt2/ three.json >gpt2.json
    local tokens=(--token-file tokens.txt --train "") shards=(--token-dir shards --train "" --steps 30 --val-fraction 0)
    local val=(--val-fraction 0.1 --eval-every 2) ff=(--ff-lr 1e-2) classes=(--task cls --train rows --seq-len 0)
    class_rows 24 1 >rows

    echo "# options of rust_trainer"
    flag 'test -d with/step_000004' "" --out-dir with
    flag 'test -d with/step_000004' "" --output-dir with
    timeout 30 "$trainer" "${start[@]}" --run text/no >out 2>err
    check "--run below a file: status 1, one line" test "$? $(wc -l <err) $(grep -c '^train_mamba_hpn: text/no: this folder cannot be made' err)" = "1 1 1"
    flag 'printed "^done after step 6,"' x --steps 6
    flag 'test -d with/step_000002 && same_model $plain with' -1 --save-every 2
    flag 'same && printed "^step [24]/4" 2 && printed "^step [13]/4" 0' 0 --log-every 2
    flag 'other && grep -q "\"tokens\": 192," with/metrics.jsonl' 0 --batch-size 3
    flag 'other && grep -q "\"tokens\": 96," with/metrics.jsonl' x --seq-len 12
    flag other 1.5 --seed 7
    flag 'config num_hidden_layers 3' 1025 --base-layers 3
    flag 'config num_hidden_layers 5' "1=>--target-layers: expected at least the 2 layers" --target-layers 5
    flag 'config hidden_size 24' x --d-model 24
    flag 'config state_size 6' 0 --d-state 6
    flag 'config conv_kernel 3' 17 --d-conv 3
    for i in prepend insert:1 specific:0,2; do flag other "" --placement $i --target-layers 4; done
    flag same "specific:1" --placement append --target-layers 4
    refuse "--placement twice" "--placement: layer 1 is there twice" "${start[@]}" --target-layers 4 --placement specific:1,1
    flag other "indices:2" --freeze first:1
    flag other "no.such.*" --freeze 'indices:0,1'
    flag other "first:" --freeze '*.A_log'
    flag other 11 --lr 1e-3
    flag 'other && record "\"ff_updates_applied\": 2"' -1 --ff-lr 1e-2
    flag '[ $(grep -c "\"bp_applied\": true" with/metrics.jsonl) = 2 ] && other' 0 --bp-cadence-steps 2 "${ff[@]}"
    for i in none cagrad cagradstep gradnorm orthograd; do
        flag 'record "\"surgery_method\": \"$(sed s/^cagradstep/cagrad/ <<<'$i')\""' "" --gradient-surgery-method $i "${ff[@]}"
    done
    flag 'same && grep -q "\"surgery_method\": \"pcgrad\"" with/metrics.jsonl' nothing --gradient-surgery-method PCGrad "${ff[@]}"
    flag other -1 --gradient-surgery-epsilon 10 "${ff[@]}" --gradient-surgery-method orthograd
    flag other 101 --gradnorm-alpha 3 "${ff[@]}" --gradient-surgery-method gradnorm --steps 120
    flag other 1 --cagrad-lambda 0.9 "${ff[@]}" --gradient-surgery-method cagrad
    flag other 2 --freeze-embedding 1
    check "... and the embedding keeps its bytes" test "$(tensors "$(last with)/model.safetensors" embeddings)" = "$(go "${start[@]}" --export-hf begun --train "" && tensors begun/model.safetensors embeddings)"
    for i in "token-file tokens.txt 17" "token-dir shards 19"; do
        read -r option value vocabulary <<<"$i"
        tried[--$option]=1
        rm -rf with
        go "${start[@]}" --train "" --$option $value --run with && grep -q "\"vocab_size\": $vocabulary," with/step_000004/config.json
        verdict $? "--$option $value: ids up to $((vocabulary - 1))" "$(<err)"
        refuse "--$option missing" missing "${start[@]}" --train "" --$option missing
    done
    flag '[ $(n_records val) = 3 ]' "missing=>missing" --val-token-file val_shards/v.txt "${tokens[@]}" --eval-every 2
    flag '[ $(n_records val) = 3 ]' "missing=>missing" --val-token-dir val_shards "${tokens[@]}" --eval-every 2
    flag 'config vocab_size 13' "a/b" --shard-ext ids --token-dir shards --train ""
    rm -rf with other
    go "${start[@]}" --train text:1,more:2 --run other
    go "${start[@]}" --train text:1,more:2 --prefetch-workers 2 --run with
    check "--train text:1,more:2: a mixture, of which threads make batches" \
        test "$(same_run other with; echo $?) $(grep -cE '^\|   (33.3|66.7)% of the rows .* rows, [0-9.]+ times' out)" = "0 2"
    refuse "--carry-state and weights" "--train: expected paths without weights, found text:1,more:2: --carry-state" \
        "${start[@]}" --train text:1,more:2 --carry-state 1
    flag other 2 --shuffle-shards 1 "${shards[@]}"
    flag other 2 --packed-sequences 0
    flag same -1 --prefetch-workers 2
    flag same 0 --prefetch-buffer 3 --prefetch-workers 2
    flag 'config vocab_size 300' -1 --vocab-size 300
    flag '[ $(n_records val) = 3 ] && other' "1=>--val-fraction:" --val-ratio 0.1 --eval-every 2
    flag '[ $(n_records val) = 5 ] && same_model $plain with' "-1=>--eval-every:" --val-every 1 "${val[@]}"
    flag '[ $(n_records val) = 3 ] && ! same && same_model $plain with' 0 --eval-batches 1 "${val[@]}"
    flag 'printed "^stopped early after step 2,"' "x=>--early-stop:" --early-stopping-patience 2 --lr 0 --val-fraction 0.1 --eval-every 1
    flag other "-1=>--clip:" --grad-clip-norm 0.1
    tried[--fail-on-non-finite]=1
    timeout 60 "$trainer" "${start[@]}" --steps 200 --lr 10 --weight-decay 10 --clip 0 --fail-on-non-finite 1 --run burnt >out 2>err
    check "--fail-on-non-finite 1: the first update that is not finite ends the run with status 1 and one line" \
        test "$? $(wc -l <err) $(grep -c '1 updates in a row were not finite' err)" = "1 1 1"
    timeout 60 "$trainer" "${start[@]}" --steps 200 --lr 10 --weight-decay 10 --clip 0 --max-skips 2 --run burnt2 >out 2>err
    check "... and without it --max-skips does" test "$? $(grep -c '3 updates in a row were not finite' err)" = "1 1"
    refuse "--fail-on-non-finite 3" "--fail-on-non-finite:" "${start[@]}" --fail-on-non-finite 3
    flag other "4=>--warmup:" --lr-warmup-steps 2
    flag other "2=>--final-lr:" --lr-min-scale 0.9
    flag 'printed "^\{.*\"kind\": \"train\"" 4 && same' 2 --human-log 0
    tried[--config]=1
    rm -rf with
    go --config three.json "${start[@]:8}" --run with
    check "--config: its sizes" test "$(grep -cE '"(state_size": 5|num_hidden_layers": 3|conv_kernel": 3|hidden_size": 24)' with/step_000004/config.json)" = 4
    refuse "--config beside --model" "found --config and --model" "${start[@]}" --config three.json
    refuse "--config of another kind of model" "gpt2.json: \"model_type\": this trainer computes \"mamba\"" "${start[@]:8}" --config gpt2.json
    for i in --base-ckpt --init-hf; do
        tried[$i]=1
        go $i begun_with "${start[@]:8}" --lr 0 --run from${i#-} && same_model begun_with from${i#-}
        verdict $? "$i: begins with the parameters of that run" "$(<err)"
        refuse "$i missing" "missing" $i missing "${start[@]:8}"
    done
    tried[--resume]=1
    go "${start[@]}" --steps 6 --schedule constant --run six && go "${start[@]}" --schedule constant --run four && go --resume --run four --steps 6 && same_run six four
    verdict $? "--resume --run: 4 steps and 2 more are 6 steps" "$(<err)"
    local beside=("${start[@]}" --schedule constant --warmup 0 --ff-lr 0.01 --bp-cadence-steps 2 --ema 0.9)
    go "${beside[@]}" --steps 6 --run six_ff && go "${beside[@]}" --run four_ff && go --resume --run four_ff --steps 6 &&
        same_run six_ff four_ff && cmp -s {six_ff,four_ff}/step_000006/ema.safetensors
    verdict $? "... with steps of Forward-Forward alone, and averaged weights" "$(<err)"
    refuse "--resume of nothing" "--resume: new holds no complete checkpoint" --resume

    echo "# options of ours"
    flag same -1 --threads 3
    flag 'config intermediate_size 48' 0 --expand 3
    flag 'config time_step_rank 3' -1 --dt-rank 3
    flag 'other && record "\"hpn_loss\": [0-9]"' none --head hpn
    flag 'other && record "\"hpn_loss\": [0-9]"' "" --head hpn-softmax
    flag 'config proto .learn. && other' maybe --proto learn --head hpn-softmax
    answers 10 text >answers
    flag 'printed "HellaSwag 100.00% .* 10 of 10$" 1' "text=>text: expected evaluation" --hellaswag answers --eval-every 60 --steps 60
    answers 60 text >many
    tried[--hellaswag]=1
    for i in "" "--recompute layer" "--ff-lr 1e-3"; do  # more and shorter rows than the batches that are trained on
        rm -rf with
        go "${start[@]}" --seq-len 64 --batch-size 8 --hellaswag many --eval-every 2 --steps 2 --run with $i && value=$(grep "^step 2 | HellaSwag" out) &&
            go --from with --eval-only --seq-len 64 --batch-size 3 --hellaswag many && [ "${value#*|}" = "$(grep HellaSwag out | sed "s/^[^|]*|//")" ]
        verdict $? "--hellaswag beside training ($i): the answers of --eval-only" "$value $(grep HellaSwag out) $(<err)"
    done
    flag 'printed "HellaSwag 100.00% .* 3 of 3$" 1' -1 --eval-examples 3 --hellaswag answers --eval-every 60 --steps 60 --head hpn-softmax
    flag other "" --proto learn --head hpn
    flag other -1 --proto-separation 1 --head hpn --proto learn
    flag other "missing=>missing" --proto-init optimize --head hpn
    flag other "" --proto-init orthoplex "${tokens[@]}" --head hpn
    refuse "--proto-init simplex where it does not fit" "--proto-init simplex: 17 prototypes need at least 16 channels" "${start[@]}" "${tokens[@]}" --head hpn --proto-dim 12 --proto-init simplex
    flag same "" --proto-init simplex "${tokens[@]}" --head hpn
    flag 'other && ! equals "${tokens[@]}" --head hpn --proto-init optimize' "" --proto-init random "${tokens[@]}" --head hpn
    flag 'config proto_dim 8 && [ "$(tensors "$(last with)"/model.safetensors hpn.proj | wc -w)" = 129 ]' -1 --proto-dim 8 --head hpn
    flag 'config hpn_scale 8.0' 0 --hpn-scale 8 --head hpn-softmax
    flag other 1 --beta1 0.5
    flag other -0.1 --beta2 0.5
    flag other "0=>--eps:" --adam-eps 1e-3
    flag other 11 --weight-decay 5
    flag 'other && equals --batch-tokens 96' -1 --grad-accum 3
    flag same -1 --scan-chunk 3
    for i in none scan layer; do flag same $i$i --recompute $i --carry-state 1 --doc-sep 10 --shuffle 0; done
    flag other "999=>999" --doc-sep 10
    flag 'equals --train more --doc-sep 256 --shuffle 0' "2" --doc-reset 1 --train more --shuffle 0
    flag other 2 --carry-state 1 --shuffle 0 --val-fraction 0.2
    flag 'cmp -s out_hf/model.safetensors "$(last with)"/model.safetensors && test -s out_hf/generation_config.json' "text/no=>text/no" --export-hf out_hf
    rm -rf with
    tried[--task]=1
    go "${start[@]}" "${classes[@]}" --run with
    check "--task cls: three classes of a file of examples" grep -q '"num_classes": 3' with/step_000004/config.json
    refuse "--task tags" "--task:" "${start[@]}" --task tags
    flag 'config num_classes 5' -1 --classes 5 "${classes[@]}"
    flag other -1 --ff-threshold 2 "${ff[@]}"
    flag other 1.5 --ff-corrupt 0.9 "${ff[@]}"
    flag 'printed "^embeddings of [0-9]+ positions" && test -s e.safetensors' "text/no=>text/no" --embeddings-out e.safetensors "${val[@]}"
    flag '[ $(grep -c "\"lr\": 0.00100000005," with/metrics.jsonl) = 2 ]' -1 --lr-horizon 2

    go --help
    local missing="" name
    for name in out-dir steps save-every log-every batch-size seq-len seed base-layers target-layers d-model d-state d-conv placement freeze \
        lr ff-lr bp-cadence-steps gradient-surgery-method gradient-surgery-epsilon gradnorm-alpha cagrad-lambda freeze-embedding token-file \
        token-dir val-token-file val-token-dir shard-ext shuffle-shards packed-sequences prefetch-workers prefetch-buffer resume vocab-size \
        val-ratio val-every eval-batches early-stopping-patience grad-clip-norm fail-on-non-finite lr-warmup-steps lr-min-scale config \
        human-log base-ckpt threads expand dt-rank head proto proto-init proto-dim hpn-scale beta1 beta2 adam-eps weight-decay grad-accum hellaswag eval-examples \
        scan-chunk recompute doc-sep carry-state export-hf init-hf task \
        $(sed -n '/^more data$/,/^help$/s/^  --\([a-z0-9-]*\).*/\1/p' out); do
        [ -n "${tried[--$name]-}" ] || missing+=" $name"
    done
    check "each option of rust_trainer and of this trainer's part of --help was tried (not:$missing)" test -z "$missing"
}

# ---- what goes not together, and what is none of the values: one line each ----

conflicts() {
    echo "# conflicts"
    local head=(--train text --val-fraction 0.1)
    class_rows 12 1 >rows
    go "${start[@]}" --run small
    refuse "steps without a loss" "--bp-cadence-steps: the steps without back-propagation need --ff-lr" "${start[@]}" --bp-cadence-steps 2
    refuse "Forward-Forward and --zero" "--ff-lr: Forward-Forward goes with neither" "${start[@]}" --ff-lr 1e-3 --zero 1
    refuse "Forward-Forward and carried states" "--ff-lr: Forward-Forward goes with neither" "${start[@]}" --ff-lr 1e-3 --carry-state 1
    refuse "Forward-Forward without a layer that learns" "--ff-lr: every layer is frozen" "${start[@]}" --ff-lr 1e-3 --freeze first:2
    refuse "answers of a classifier" "--hellaswag: a classifier has no text" "${start[@]}" --task cls --train rows --seq-len 0 --hellaswag rows
    examples 4 8 "$(printf ' 1%.0s' {1..32})" "$(printf ' 1%.0s' {1..16})$(printf ' -1%.0s' {1..16})" >silent
    refuse "validation without a target" "silent: all targets of the rows for validation are negative" "${start[@]}" --task cls --train silent --seq-len 0 --val-fraction 0.5
    go "${start[@]}" --carry-state 1 --shuffle 0 --run carrying
    refuse_resume() {  # PROMISE TEXT OPTION...
        timeout 30 "$trainer" --resume --run carrying --steps 8 "${@:3}" >out 2>err </dev/null
        check "refused: $1" test $? = 2 -a "$(wc -l <err)" = 1 -a -n "$(grep -e "$2" err)"
    }
    refuse_resume "carried states for rows of another length" "--seq-len: the checkpoint carries states of 16 positions of a row, found 8" --seq-len 8
    refuse_resume "carried states for other rows" "--batch-size: the checkpoint carries states of 2 rows" --batch-size 3
    refuse_resume "carried states for more micro-batches" "--grad-accum: the checkpoint carries states of 1 micro-batches" --grad-accum 3
    refuse_resume "carried states for other data" "--train: the states that the checkpoint carries are of other data" --train more
    refuse "learnt prototypes that nothing keeps apart" "--proto: learnt prototypes of hpn all become one" "${start[@]}" --head hpn --proto learn --proto-separation 0
    refuse "learnt prototypes of hpn and --zero" "--proto: learnt prototypes of hpn need --zero 0" "${start[@]}" --head hpn --proto learn --zero 1
    refuse "a classifier of tokens" "--task: cls needs examples" "${start[@]}" --task cls --classes 3
    refuse "a language model of examples" "--task: found examples with targets of their own: --task cls" "${start[@]}" --train rows --seq-len 0
    refuse "both sizes of an update" "--grad-accum: says the same as --batch-tokens" "${start[@]}" --grad-accum 2 --batch-tokens 64
    refuse "text from a classifier" "--generate: a classifier has no text" "${start[@]}" --task cls --train rows --seq-len 0 --generate x
    go --model tiny --d-model 16 --base-layers 1 --export-hf other
    refuse "embeddings over another model" 'other/model.safetensors: is there already, and not a file of embeddings, which has a tensor "z"' "${start[@]}" --val-fraction 0.1 --embeddings-out other/model.safetensors
    rm -rf other
    refuse "embeddings of nothing" "--embeddings-out: needs --val or --val-fraction" "${start[@]}" --embeddings-out e.safetensors
    refuse "answers of a head without probabilities" "--hellaswag: the head gives tokens no probabilities" "${start[@]}" --head hpn --hellaswag rows
    refuse "an unknown head" '--head: expected ce|hpn|hpn-softmax, found "softmax"' "${start[@]}" --head softmax
    refuse "fewer layers than there are" "--target-layers: expected at least the 2 layers" "${start[@]}" --target-layers 1
    refuse "a place for no new layers" "--placement: says where new layers stand" "${start[@]}" --placement prepend
    for i in d-model d-state d-conv expand dt-rank base-layers vocab-size; do
        refuse "--$i of a trained model" "--$i: is for a random start" --from small --train text --$i 3
    done
    sized=(--model tiny --d-model 8 --d-state 4 --base-layers 1 --target-layers 2 --train text --seq-len 8 --batch-size 1)
    rm -rf with && go "${sized[@]}" --steps 2 --run with && go "${sized[@]}" --steps 4 --continue --run with
    check "--continue: with the sizes that the run began with, and its new layers" test -d with/step_000004
    refuse "--continue with other sizes" "--d-model: is for a random start (--model): here with/step_000004/config.json says 8, found 16" \
        "${sized[@]}" --d-model 16 --continue --run with
    echo '{"model_type":"mamba","vocab_size":257,"num_hidden_layers":1,"hidden_size":8,"state_size":4,"conv_kernel":4,"head":"hpn","layer":"rt"}' >rt.json
    refuse "a layer that this trainer has no longer" 'rt.json: "layer": expected mamba1, found "rt"' --config rt.json --train text
    echo '{"model_type":"mamba","vocab_size":257,"num_hidden_layers":1,"hidden_size":1048576,"state_size":4,"conv_kernel":4,"expand":1024}' >wide.json
    refuse "more channels than fit" "wide.json: \"expand\": expected at most 4194304 channels" --config wide.json --train text
    refuse "two sources of parameters" "found --from and --model" --from small --model tiny --train text
    refuse "two sources of data" "found --train too" "${start[@]}" --token-file text
    refuse "carried states in random order" "--carry-state: needs rows in file order, found --shuffle" "${start[@]}" --carry-state 1 --shuffle 1
    refuse "carried states that leave tokens out" "--carry-state: needs rows that go on" "${start[@]}" --carry-state 1 --packed-sequences 0
    refuse "two orders" "--shuffle-shards: expected one order" "${start[@]}" --shuffle-shards 1 --shuffle 1
    refuse "nothing to do" "nothing to do: expected --train" --model tiny
    refuse "a probe of other tokens" "]: expected a token 0..1, found" --model tiny --vocab-size 2 --probe rows
    refuse "more classes in the data than in the model" "rows: expected targets below 1, the classes of the model" "${start[@]}" --task cls --train rows --seq-len 0 --classes 1
    refuse "warm-up beyond the horizon" "--warmup: expected less than the 2 steps of --lr-horizon" "${start[@]}" --lr-horizon 2 --warmup 2
    refuse "a misspelt option" "--d-modell: unknown option, did you mean --d-model?" "${start[@]}" --d-modell 3
    refuse "gradient surgery by a wrong name" "--gradient-surgery-method: expected none" "${start[@]}" --ff-lr 1e-3 --gradient-surgery-method pcgrd
}

# ---- kill -9 and --resume ----

vary() {
    varied=(--prefetch-workers $((RANDOM % 3)) --scan-chunk $((RANDOM % 9)) --recompute "$(printf '%s\n' none scan layer | sed -n $((1 + RANDOM % 3))p)")
}

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --prefetch-workers, --scan-chunk, --recompute"
    RANDOM=11
    local each=$(((kills + 4) / 5))
    killed $each "plain" --async-save 1
    killed $each "--carry-state" --async-save 1 --carry-state 1 --shuffle 0 --grad-accum 2
    killed $each "Forward-Forward with gradnorm" --async-save 1 --ff-lr 1e-3 --gradient-surgery-method gradnorm --bp-cadence-steps 2
    killed $each "--prefetch-workers 2" --async-save 1 --prefetch-workers 2 --grad-accum 2
    killed $each "hpn-softmax with learnt prototypes" --async-save 1 --head hpn-softmax --proto learn --verify-every 20
}

# ---- ranks ----

ranks() {
    echo "# ranks: one update of four micro-batches on 1, 2 and 4"
    need_build launch "" launch
    local n zero options=("${start[@]}" --grad-accum 4 --steps 12 --val-fraction 0.1 --eval-every 6 --sample-every 6 --max-new-tokens 8 --save-every 4)
    each() {  # PROMISE ZEROS OPTION...
        local promise=$1 zeros=$2
        shift 2
        rm -rf one
        go "${options[@]}" "$@" --run one
        for zero in $zeros; do
            for n in 1 2 4; do
                rm -rf several
                timeout 60 "$launch" -n $n "$trainer" "${options[@]}" "$@" --zero $zero --run several >out 2>err </dev/null
                status=$?
                same_run one several && cmp -s {one,several}/samples.txt
                verdict $? "$promise on $n ranks, --zero $zero: the bytes of one rank" "status $status: $(tail -n 2 err)"
            done
        done
    }
    answers 7 text >answers
    each "ce, answering examples" "0 1 2" --verify-every 5 --hellaswag answers
    each "hpn-softmax with learnt prototypes" 2 --head hpn-softmax --proto learn
    each "hpn with learnt prototypes" 0 --head hpn --proto learn
    each "Forward-Forward" 0 --ff-lr 1e-3 --bp-cadence-steps 2
    each "Forward-Forward and gradnorm, a frozen layer" 0 --ff-lr 1e-3 --gradient-surgery-method gradnorm --freeze indices:1
    timeout 60 "$launch" -n 2 "$trainer" "${start[@]}" --carry-state 1 --run new >out 2>err </dev/null
    check "--carry-state on two ranks: status 2, said once" test "$? $(grep -c '^train_mamba_hpn: --carry-state: is for one rank' err)" = "2 1"
}

# ---- builds ----

builds() {
    echo "# builds"
    local old name
    need_build old "ARCH=x86-64" train_mamba_hpn
    for name in "ce" "hpn" "hpn-softmax --proto learn" "ce --ff-lr 1e-3 --gradient-surgery-method cagrad"; do
        rm -rf native other
        go "${start[@]}" --head $name --steps 10 --val-fraction 0.1 --eval-every 5 --run native
        timeout 60 "$old" "${start[@]}" --head $name --steps 10 --val-fraction 0.1 --eval-every 5 --run other >out 2>err </dev/null
        check "ARCH=x86-64, $name: the bytes of the native build" same_run native other
    done
}

val_loss() { value "$1" "$2" val_loss; }

# ---- growing ----

growth() {
    echo "# a trained model of 2 layers grows to 6"
    local data=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --val-fraction 0.1 --eval-every 5 --schedule constant)
    local six=(--target-layers 6 --placement specific:0,2,3,5) model
    go "${start[@]}" "${data[@]}" --steps 20 --run small
    go --from small "${data[@]}" "${six[@]}" --steps 1 --run grown
    check "--from: the loss before the first update is the small model's last, to the last bit ($(val_loss grown 0))" \
        test -n "$(val_loss small 20)" -a "$(val_loss small 20)" = "$(val_loss grown 0)"
    go --from small "${data[@]}" "${six[@]}" --export-hf at_first --train ""
    moved() {
        [ "$(tensors at_first/model.safetensors "layers\.$1\.mixer.out_proj")" != "$(tensors grown/step_000001/model.safetensors "layers\.$1\.mixer.out_proj")" ]
    }
    check "out_proj of new layers is 0 at first" \
        test "$(for i in 0 2 3 5; do tensors at_first/model.safetensors "layers\.$i\.mixer.out_proj" | cut -d' ' -f2- | tr ' ' '\n' | sort -u; done | sort -u)" = 0
    check "... and moves with the first update, as the old ones do" eval 'moved 0 && moved 1 && moved 2 && moved 3 && moved 4 && moved 5'
    check "no other tensor of a new layer has a gradient in that update" \
        test "$(tensors grown/step_000001/optimizer.safetensors 'exp_avg\..*layers\.[0235]\..*' | grep -v out_proj | cut -d' ' -f2- | tr ' ' '\n' | sed s/-2147483648/0/ | sort -u)" = 0

    go --from small "${data[@]}" "${six[@]}" --freeze indices:1,4 --steps 8 --save-every 3 --run frozen
    cmp <(tensors at_first/model.safetensors 'layers\.[14]\.') <(tensors frozen/step_000008/model.safetensors 'layers\.[14]\.')
    verdict $? "--freeze indices:1,4: the old layers keep every bit through 8 updates" ""
    cmp <(tensors small/step_000020/model.safetensors 'layers\.[01]\.' | cut -d' ' -f2-) <(tensors frozen/step_000008/model.safetensors 'layers\.[14]\.' | cut -d' ' -f2-)
    verdict $? "... those of the small model" ""
    check "... and every tensor of the new ones moves" test "$(comm -12 <(tensors at_first/model.safetensors 'layers\.[0235]\.' | sort) <(tensors frozen/step_000008/model.safetensors 'layers\.[0235]\.' | sort) | wc -l)" = 0
    counts() { tensors "$(last "$1")/trainer.safetensors" updates | cut -d' ' -f2-; }
    each_slice() { local i; printf '%s' "$1"; for i in {1..10}; do printf ' %s' $2; done; echo " $1"; }  # one of the embedding, ten of each layer, norm_f
    check "updates are counted for each layer: 0 of frozen ones" test "$(counts frozen)" = "$(each_slice 8 '8 0 8 8 0 8')"

    cp -r small wider && cp -r small same
    go --resume --run same --steps 21 --clip 0
    go --resume --run wider --steps 21 --clip 0 "${six[@]}"
    check "--resume: the next loss is that of the model that does not grow ($(value wider 21 loss))" \
        test "$(value same 21 loss)" = "$(value wider 21 loss)"
    check "old layers have 21 updates, new ones 1" test "$(counts wider)" = "$(each_slice 21 '1 21 1 1 21 1')"
    for model in model optimizer; do
        cmp <(tensors same/step_000021/$model.safetensors 'layers\.[01]\.' | sed 's/layers\.1\./layers.4./; s/layers\.0\./layers.1./') \
            <(tensors wider/step_000021/$model.safetensors 'layers\.[14]\.')
        verdict $? "... and the old ones go on with their moments: $model.safetensors" ""
    done
    cp -r small kept && go --resume --run kept --steps 22 "${six[@]}" --freeze indices:1,4
    check "... what is frozen has none" test -z "$(tensors kept/step_000022/optimizer.safetensors 'layers\.[14]\.')"
    go --resume --run wider --steps 25 --save-every 1 --freeze indices:1,4
    check "resumed again, frozen now: counts stand still" test "$(counts wider)" = "$(each_slice 25 '5 21 5 5 21 5')"
    go --resume --run wider --steps 26 --freeze indices:
    check "... and again without: the moments of those layers begin anew, and a line says so" \
        grep -q '20 tensors that learn now were frozen or not there: their moments begin with 0' err
}

# ---- text, classes, embeddings ----

text() {
    echo "# text"
    local prompt one i
    go "${start[@]}" --steps 150 --schedule constant --run book
    write() { go --from book --max-new-tokens 40 "$@" && cat out; }
    one=$(write --generate "line 7" --temperature 0)
    check "the likeliest text is like the book: ${one:0:30}" grep -q "^line 7.*[a-z]" <<<"$one"
    check "the same with three threads" test "$one" = "$(write --generate "line 7" --temperature 0 --threads 3)"
    check "... and with other chunks" test "$one" = "$(write --generate "line 7" --temperature 0 --scan-chunk 3)"
    check "three likeliest texts are three times the same" \
        test "$(write --generate "line 7" --temperature 0 --samples 3 | grep -v "^--- sample . of 3")" = "$one"$'\n'"$one"$'\n'"$one"
    write --generate "line 7" --samples 3 >three
    check "three samples are three texts, the first that of --samples 1" \
        test "$(sort -u three | wc -l)" -ge 3 -a "$(write --generate "line 7" | head -n 1)" = "$(sed -n 2p three)"
    one=$(write --generate "line 7" --temperature 0 --max-new-tokens 300)
    for i in 125 126 128 200 280; do  # tokens of the prompt with the end of text before them: a piece has 128
        [ "$one" = "$(write --generate "${one:0:i}" --temperature 0 --max-new-tokens $((306 - i)))" ]
        verdict $? "a prompt of $i bytes of a text goes on as the text that was written token by token" "$(<out)"
    done
    prompt=$(head -n 6 text)
    one=$(write --generate "$prompt" --temperature 0)
    check "a prompt of ${#prompt} bytes stands before its text" test "${one:0:${#prompt}}" = "$prompt" -a ${#one} -gt ${#prompt}
    check "from standard input the same" test "$one" = "$(printf '%s' "$prompt" | "$trainer" --from book --max-new-tokens 40 --generate - --temperature 0 2>err)"
    check "an empty prompt" test -n "$(write --generate "")"
    check "--max-new-tokens 1" test "$(write --generate ab --max-new-tokens 1 | head -n 1 | wc -c)" -le 7
    for head in hpn "hpn-softmax --proto learn"; do
        rm -rf points
        go "${start[@]}" --head $head --steps 100 --sample-every 50 --max-new-tokens 20 --run points
        check "--head $head: samples while it trains, and afterwards" \
            test "$(grep -c '^--- sample after step \(50\|100\)$' points/samples.txt)" = 2 -a -n "$(go --from points --generate "line" --max-new-tokens 20 && tail -c +5 out)"
    done

    echo "# classes"
    class_rows 60 1 >rows
    class_rows 12 99 >other_rows
    local classes=(--model tiny --d-model 16 --d-state 4 --base-layers 1 --task cls --train rows --val other_rows --batch-size 6 --lr 2e-2 --steps 60 --eval-every 20)
    for head in ce hpn "hpn-softmax --proto learn" "ce --ff-lr 1e-3"; do
        rm -rf digits
        go "${classes[@]}" --head $head --embeddings-out e.safetensors --run digits
        check "--task cls --head $head: every row of others is right" test "$(value digits 60 acc1)" = 1.0
        check "... --embeddings-out: 12 positions, 3 prototypes" test "$(tensors e.safetensors labels)" = "labels 0 1 2 0 1 2 0 1 2 0 1 2" -a \
            "$(tensors e.safetensors prototypes | wc -w)" = 49 -a "$(tensors e.safetensors '^z$' | wc -w)" = 193
        go --from digits --task cls --val other_rows --batch-size 6 --eval-only
        check "... --eval-only from its checkpoint: the same loss" test "$(grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(val_loss digits 60)")"
    done
    check "a classifier is not a language model" grep -q '"MambaModel"' digits/step_000060/config.json
}

# ---- files: probes and Hugging Face folders ----

files() {
    echo "# a probe before and after saving"
    examples 2 5 "1 2 3 4 5 6 7 8 9 10" "2 3 4 5 -1 7 8 9 10 11" >batch
    local model=(--model tiny --d-model 16 --d-state 4 --base-layers 2 --vocab-size 20) head
    for head in ce "hpn --proto-dim 8" "hpn-softmax --proto learn" "ce --target-layers 3 --placement prepend"; do
        rm -rf saved hf shards again
        go "${model[@]}" --head $head --probe batch --probe-out before --export-hf hf
        check "--head $head: the probe has logits, loss and the gradient of every tensor" \
            test "$(tensors before '^grad\.' | wc -l)" = "$(tensors hf/model.safetensors . | wc -l)" -a "$(tensors before '^logits$' | wc -w)" = 201
        go --from hf --probe batch --probe-out after --threads 3 --scan-chunk 2 && cmp before after
        verdict $? "... from the saved folder, other threads, other chunks: the same bytes" ""
        go --from hf --probe batch --probe-out after --recompute layer --export-hf again && cmp before after && cmp hf/model.safetensors again/model.safetensors
        verdict $? "... layers computed again; saved again: the same bytes" ""
    done
    rm -rf again
    go --from hf --export-hf again --shard-gb 1e-5
    go --from again --probe batch --probe-out after && cmp before after
    verdict $? "a folder of $(ls again/*.safetensors | wc -l) shards: the same bytes" ""
    go "${start[@]}" --eval-every 0 --run run && go --from run --probe batch --probe-out first && go --from run/step_000004 --probe batch --probe-out second &&
        go --from run/step_000004/model.safetensors --probe batch --probe-out third && cmp first second && cmp second third
    verdict $? "a run, its checkpoint, and the file in it: the same bytes" "$(<err)"
    go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors exported run/step_000004 >err &&
        test -s exported/tokenizer.json -a -s exported/tokenizer_config.json -a -s exported/generation_config.json
    verdict $? "its export is the checkpoint without what training needs, the tokenizer's files among it" "$(<err)"
    go "${start[@]}" --val-fraction 0.1 --eval-every 4 --run valued && go --from valued --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only
    check "--eval-only: the loss of the last validation" test "$(grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(val_loss valued 4)")"
    check "... and no folder" test ! -e runs
    sed 's/"inputs"/"input_"/' batch >bad
    refuse "a probe without inputs" 'bad: expected a tensor "inputs"' --from run --probe bad
}

planned() {  # OPTION...: hundredths of a MiB that the box plans
    go "${start[@]}" --d-model 128 --d-state 64 --grad-accum 4 --shuffle 0 --dry-run "$@" &&
        awk -F'|' '$2 ~ /^ memory +$/ {split($3, n, " "); print int(100 * n[1])}' out
}

# what a run takes beside model and batch stands in the box
memory() {
    local states copies points
    states=$(($(planned --carry-state 1) - $(planned)))  # as they are read and as they are written
    copies=$(($(planned --carry-state 1 --save-every 1) - $(planned --save-every 1) - states))
    check "memory: carried states are twice there, and once more while a checkpoint is written" \
        test $((states > 100 && copies > states / 2 - 3 && copies < states / 2 + 3)) = 1
    points=$(($(planned --val-fraction 0.5 --embeddings-out e) - $(planned --val-fraction 0.5)))
    check "memory: --embeddings-out, $points hundredths of a MiB" test $points -gt 10
}

for part in $parts; do  # each in a folder of its own
    mkdir "$work/in_$part" && cp text more "$work/in_$part" && cd "$work/in_$part" || exit 1
    $part
    cd "$work" || exit 1
done
finish
