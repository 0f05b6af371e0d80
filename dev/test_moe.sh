#!/usr/bin/env bash
# train_moe as its user meets it: presets, options, config.json, ranks, kills, generation, probes, files. About a minute of one core
# after the build.
#     dev/test_moe.sh                        all parts
#     dev/test_moe.sh options ranks          some of them: presets options configs bits ranks kills text files learning
#     dev/test_moe.sh quick                  presets, configs, bits and files, of ranks and kills a few
#     KILLS=300 dev/test_moe.sh kills        more random kills than 30
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 3 || echo 30)}
parts=${*:-$(is_quick && echo presets configs bits ranks kills files || echo presets options configs bits ranks kills text files learning)}

need_build trainer "CPU=1" train_moe
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files ----

write_texts
sizes='"vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":6,"intermediate_size":12,"num_local_experts":5,"num_experts_per_tok":2,"max_position_embeddings":48'
echo "{\"model_type\":\"mixtral\",$sizes,\"rope_theta\":10000,\"aux_alpha\":0.01,\"z_lambda\":0.001}" >tiny.json
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
mixed=("${start[@]}" --grad-accum 4 --steps 12 --val-fraction 0.1 --eval-every 6 --sample-every 6 --max-new-tokens 8 --save-every 4)

# a safetensors file whose routers all get these biases
biases() {  # FILE NUMBER...
    "$python" - "$@" <<'PYTHON'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
n = struct.unpack("<Q", data[:8])[0]
for name, t in json.loads(data[8:8 + n]).items():
    if name.endswith("e_score_correction_bias"):
        struct.pack_into(f"<{len(sys.argv) - 2}f", data, 8 + n + t["data_offsets"][0], *map(float, sys.argv[2:]))
open(sys.argv[1], "wb").write(data)
PYTHON
}

# ---- presets ----

presets() {
    echo "# presets"
    go --model tiny --dry-run && check "tiny: 4 experts 256 wide, 2 for a token" test "$(boxed experts '4 in a layer, 256 wide, a token takes 2')" = 1
    go --model small --train text --dry-run --seq-len 64 && check "small: 8 experts 1024 wide" test "$(boxed experts '8 in a layer, 1024 wide, a token takes 2')" = 1
    planned() { go --dry-run "$@" && awk '/^\| memory  / { print int($4 * ($5 == "GiB" ? 1024 : 1)) }' out; }  # OPTION...: MiB
    sed 's/_experts":5/_experts":1024/; s/hidden_size":16/hidden_size":2/; s/_layers":2/_layers":16/; s/"intermediate_size":12/"intermediate_size":1/' tiny.json >counting.json
    local counting=(--config counting.json --seq-len 1 --batch-size 1) few many
    few=$(planned "${counting[@]}" --grad-accum 1) many=$(planned "${counting[@]}" --grad-accum 4000)
    check "--dry-run: what routers count in 4000 leaves is planned twice, as leaves write it and as it is summed ($few and $many MiB)" test $((many - few)) -ge 1000
    check "... and the names of 49 thousand tensors ($few MiB)" test $few -ge 150
    few=$(planned --model small --seq-len 64 --batch-size 1) many=$(planned --model small --seq-len 64 --batch-size 1 --ema 0.9)
    check "... averaged weights, and once more while they are saved ($few and $many MiB)" test $((many - few)) -ge 400
    timeout 60 "$trainer" --model tiny --dry-run --batch-size 65536 --seq-len 256 --head-rows 2147483647 >out 2>err
    check "a batch that no memory holds: status 1, a line with a remedy" \
        test "$? $(grep -cE 'free: try a smaller --batch-size \(at most [1-9][0-9]*; [0-9]+ with --recompute 3\), --seq-len or --model(, or --cp [0-9]+ on [0-9]+ machines)?$' err)" = "1 1"
    echo '{"max_position_embeddings":8,"vocab_size":257,"num_hidden_layers":64,"hidden_size":8192,"num_attention_heads":8,"num_key_value_heads":8,"num_local_experts":128,"num_experts_per_tok":2,"intermediate_size":32768}' >huge.json
    timeout 60 "$trainer" --config huge.json --dry-run >out 2>err
    check "parameters that no memory holds: no smaller batch would help" \
        test "$? $(grep -c 'free: try a smaller model$' err)" = "1 1"
    # parameters of 25.6 GiB and as much again three times: --zero 2 alone is a remedy only where the first fit
    timeout 60 "$trainer" --model 6.9b --dry-run --batch-size 1 --seq-len 1024 --recompute 3 >out 2>err
    check "a model of which memory holds a part: options that share it, and on how many machines" \
        test $? = 0 -o "$(grep -cE 'free: try (.*--(ep|tp|pp|zero).* on (about )?[0-9]+ machines.*|a smaller model)$' err)" = 1
    timeout 60 "$trainer" --model 6.9b --plan 1 --batch-size 1024 --seq-len 8192 >out 2>err
    check "6.9b of 32,000 tokens: the box names no tokenizer, for there is no text" test "$(boxed vocabulary '32000, padded to 32000') $(grep -c '^| *tokenizer' out)" = "1 0"
    check "... 6,882,678,528 parameters, 1,786,599,168 of a token" \
        test "$(boxed parameters '6.9B = 6882678528') $(boxed active '1.8B = 1786599168 parameters of a token')" = "1 1"
    echo '{"max_position_embeddings":8,"vocab_size":257,"num_hidden_layers":1024,"hidden_size":2,"num_attention_heads":1,"num_key_value_heads":1,"head_dim":2,"num_local_experts":170,"num_experts_per_tok":1,"intermediate_size":1}' >names.json
    refuse "more tensors than a file of moments can name" "whose moments no safetensors file can name" --config names.json --dry-run
    refuse "an unknown preset" '--model: expected tiny, small or 6.9b, found "huge"' --model huge --train text
}

# ---- options ----

options() {
    local i
    echo "# options of this trainer"
    flag 'config balance .none. && other' most --balance none
    flag 'config balance .bias. && other' "" --balance bias
    flag 'config aux_alpha 0.5 && other' -1 --aux-alpha 0.5
    flag 'config z_lambda 0.25 && other' 1001 --z-lambda 0.25
    flag other 2 --bias-rate 0.1 --balance bias
    flag 'config rope_alpha 1.1 && config rope_base_positions 44 && config rope_theta 11536.89732987167 && other' 0 --rope-alpha 1.1
    for i in 0 2 3; do flag same 4 --recompute $i; done
    for i in 0 1 2 3; do flag same "" --recompute $i --freeze 'first:1' --doc-reset 1 --train documents; done
    for i in 1 7; do flag same 0 --head-rows $i; done
    flag same 0 --head-rows 5 --verify-every 1
    refuse "--graph in a program for CPUs" "--graph: is for GPUs" "${start[@]}" --graph 1
    tried[--tied]=1
    refuse "--tied of a model that says so itself" "--tied: is for --model; config.json says it as tie_word_embeddings" "${start[@]}" --tied 1
    rm -rf with && go --model tiny --tied 1 --train text --seq-len 8 --batch-size 1 --steps 1 --run with
    check "--tied 1: no matrix of the head" test "$(tensors with/step_000001/model.safetensors lm_head | wc -l) $(grep -c '"tie_word_embeddings": true' with/step_000001/config.json)" = "0 1"
    refuse "--aux-alpha without that loss" "--aux-alpha: is for --balance loss, here it is none" "${start[@]}" --balance none --aux-alpha 0.1
    refuse "--bias-rate without biases" "--bias-rate: is for --balance bias, here it is loss" "${start[@]}" --bias-rate 0.1

    echo "# options of all trainers, with experts"
    flag other 2 --doc-reset 1 --train documents
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5
    biased=(--model tiny --balance bias --bias-rate 0.01 --ema 0.9 --train text --seq-len 16 --batch-size 1 --save-every 1 --keep 30 --steps 25)
    rm -rf with at_once
    go "${biased[@]}" --run with && go "${biased[@]}" --async-save 0 --run at_once
    check "--ema with biases that move: what is written meanwhile is of its step" cmp -s <(cat with/step_*/ema.safetensors) <(cat at_once/step_*/ema.safetensors)
    flag 'same_model $plain with && grep -q "noise_scale" with/metrics.jsonl' -1 --noise-scale 2 --grad-accum 4
    flag same -1 --verify-every 1 --balance bias
    flag 'other && [ $(tail -n 1 with/metrics.jsonl | grep -c "\"idle_experts\": [0-9]") = 1 ]' 1.5 --overfit 1
    answers 10 text >examples
    flag 'grep -q "HellaSwag 100.00% .* 10 of 10$" out' "" --hellaswag examples --eval-every 60 --steps 60
    refuse "--hellaswag of a text" "text: expected evaluation records" "${start[@]}" --hellaswag text
    hellaswag_beside "" "--recompute 3" "--doc-reset 1 --head-rows 3"

    echo "# what learns"
    go "${start[@]}" --export-hf begun --train "" --balance bias 2>/dev/null
    frozen() {  # PATTERN REGEX: exactly these tensors keep every bit
        rm -rf with
        go "${start[@]}" --balance bias --freeze "$1" --run with
        comm -12 <(tensors begun/model.safetensors .) <(tensors "$(last with)/model.safetensors" .) | cut -d' ' -f1 >found
        tensors begun/model.safetensors "$2" | cut -d' ' -f1 >expected
        verdict "$([ -s expected ] && cmp -s expected found; echo $?)" "--freeze '$1': these keep every bit, all others move" "$(diff expected found)"
    }
    frozen '*.experts.*' '\.experts\.'
    frozen '*.experts.3.*' '\.experts\.3\.'
    frozen 'model.embed_tokens.*,*.layers.0.*,*.experts.3.*' 'embed_tokens|layers\.0\.|experts\.3\.'  # of --help
    frozen '*w1*' '\.w1\.'
    frozen '*w[3]*' '\.w3\.'
    frozen '*.block_sparse_moe.gate.weight' 'moe\.gate\.weight'
    frozen '*.0.block_sparse_moe.gate.*' '\.0\.block_sparse_moe\.gate\.'
    frozen 'first:1,model.embed_tokens.weight' 'layers\.0\.|embed_tokens'
    refuse "--freeze without a tensor" "matches no tensor" "${start[@]}" --freeze '*.mlp.*'
    refuse "every bias frozen, with --balance bias" "--freeze: the biases of all routers are frozen, which --bias-rate 0.001 moves" "${start[@]}" --balance bias --freeze '*e_score_correction_bias'
    refuse "nothing that learns but biases" "every tensor is frozen" "${start[@]}" --balance bias --freeze 'first:2,model.*,lm_head.weight'

    go --help
    local missing="" name
    for name in $(sed -n '/^experts$/,/^help$/s/^  --\([a-z0-9-]*\).*/\1/p' out) rope-alpha tied recompute head-rows; do
        grep -q "^  --$name " out && [ -n "${tried[--$name]-}" ] || missing+=" $name"
    done
    check "each option of this trainer's own is in --help and was tried (not:$missing)" test -z "$missing"
    for name in from freeze; do grep -A3 "^  --$name " out; done >rows
    check "--help: what --from takes and how --freeze names tensors are this model's" \
        test "$(grep -c "config.json beside it\|'model.embed_tokens" rows) $(grep -c "\.bin\|transformer\.w" rows)" = "2 0"
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
}

# ---- config.json ----

configs() {
    echo "# config.json"
    sed 's/_experts":5/_experts":8/; s/_per_tok":2/_per_tok":8/; s/embeddings":48/embeddings":16384/' tiny.json >eight.json
    for i in 4096:65535:65536 16384:16383:16384 16384:16383:32767; do
        set -- ${i//:/ }
        refuse "$3 rows of $1 positions: more slots than an int can count" "--batch-size: expected at most $2 rows of $1 positions, each with 8 experts, found $3" \
            --config eight.json --dry-run --seq-len $1 --batch-size $3
    done
    changed "more experts for a token than there are" '"num_experts_per_tok": expected at most 5 experts, found 6' num_experts_per_tok 6
    changed "an odd head_dim" '"head_dim": expected an even number, found 7' head_dim 7
    changed "an odd head_dim that follows from others" '"head_dim": expected an even number, found 1' head_dim - num_attention_heads 16
    changed "heads that are no multiple" '"num_attention_heads" 4: expected a multiple of "num_key_value_heads" 3' num_key_value_heads 3
    changed "another kind of RoPE" '"rope_type": this trainer computes "default", found "yarn"' rope_parameters '{"rope_type":"yarn","rope_theta":10000}'
    changed "... under its older name" '"type": this trainer computes "default", found "linear"' rope_parameters '{"type":"linear","factor":8.0}'
    changed "... beside null" '"type": this trainer computes "default", found "dynamic"' rope_parameters '{"rope_type":null,"type":"dynamic"}'
    changed "... that is no name" '"rope_type": this trainer computes "default", found 5' rope_parameters '{"rope_type":5}'
    changed "... of one kind of layers" '"rope_parameters": expected one set for all layers' rope_parameters '{"full_attention":{"rope_type":"yarn"}}'
    for i in '"yarn"' '["x"]' 5 false; do changed "rope_parameters: $i" "\"rope_parameters\": expected an object or null, found $i" rope_parameters "$i"; done
    changed "two thetas" '"rope_theta" 10000: expected 30000, as in "rope_parameters"' rope_parameters '{"rope_theta":30000}'
    changed "rope_scaling" '"rope_scaling": expected null' rope_scaling '{"type":"linear","factor":2}'
    changed "a sliding window" '"sliding_window": expected null' sliding_window 4096
    changed "another model_type" '"model_type": this trainer computes "mixtral", found "llama"' model_type '"llama"'
    changed "another activation" '"hidden_act": this trainer computes "silu", found "gelu"' hidden_act '"gelu"'
    changed "dropout" '"attention_dropout": this trainer computes 0.0, found 0.1' attention_dropout 0.1
    changed "positions without alpha that are none" '"rope_base_positions": expected an integer' rope_base_positions 0
    changed "an unknown balance" '"balance": expected none|loss|bias, found "aux"' balance '"aux"'
    changed "a theta that base and alpha do not make" '"rope_theta" 10000: expected 50000' rope_base 50000
    echo '{"max_position_embeddings":8,"vocab_size":257,"num_hidden_layers":1,"hidden_size":8,"num_attention_heads":2,"num_key_value_heads":1,"num_local_experts":2,"num_experts_per_tok":1,"intermediate_size":4}' >needed.json
    check "the nine keys that doc/moe.md calls needed are enough" go --config needed.json --train text --steps 1 --run needed
    check "... the others are what it says they are" test "$(grep -cE '"(head_dim": 4|rms_norm_eps": 1e-05|rope_theta": 1000000.0|tie_word_embeddings": false|balance": "loss"|aux_alpha": 0.01|z_lambda": 0.0)' needed/step_000001/config.json)" = 7
    sed 's/"num_local_experts":5/"num_local_experts":32/; s/"num_hidden_layers":2/"num_hidden_layers":11/' tiny.json >many.json
    go --config many.json --train text --seq-len 16 --steps 1 --run many && grep '^layer ' out >rows
    check "the closing lines of 11 layers with 32 experts: below each other, within 80 columns" \
        test "$(grep -c '^layer [ 1][0-9] | load .* idle |.* \.\.\.$' rows) $(($(wc -L <rows) <= 80))" = "11 1"
    check "dev/hello_moe.json as doc/moe.md shows it" "$python" -c 'import json, re, sys
shown = re.search(r"\{\"model_type.*?\}", open(sys.argv[1] + "/doc/moe.md").read(), re.S).group()
assert json.loads(shown) == json.load(open(sys.argv[1] + "/dev/hello_moe.json"))' "$root"
    changed "a theta that no checkpoint may have" 'theta of RoPE: expected 1..1e+12, found 0.01, which alpha 0.001 makes of base 10000 in heads of 4' \
        head_dim 4 rope_theta - rope_base 10000 rope_alpha 0.001
    sed 's/"head_dim":6/"head_dim":4/' tiny.json >heads.json
    for i in 1e-3 1e6; do refuse "--rope-alpha $i where heads are narrow" "--rope-alpha: theta of RoPE: expected 1..1e+12" --config heads.json --train text --rope-alpha $i; done
    for i in aux_alpha z_lambda rope_theta rms_norm_eps; do changed "$i below 0" "\"$i\": expected a number" $i -1; done
    for i in vocab_size hidden_size num_hidden_layers intermediate_size num_local_experts num_experts_per_tok num_key_value_heads max_position_embeddings; do
        changed "$i below 0" "\"$i\": expected an integer" $i -3
        is_quick || changed "no $i" "\"$i\": expected an integer" $i -
    done
}

# ---- the same bits another way ----

bits() {
    echo "# the same bits"
    local i steady=("${mixed[@]}" --ema 0.9 --schedule constant --warmup 0)
    for i in loss bias; do
        rm -rf whole leg
        go "${steady[@]}" --balance $i --run whole
        go "${steady[@]}" --balance $i --steps 6 --threads 3 --run leg && go --resume --run leg --steps 12 --threads 2 --recompute 3
        verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" \
            "--balance $i: stopped after 6 of 12 updates, resumed with other --threads and --recompute: the same bytes" "$(<err)"
    done
    rm -rf leg && go "${start[@]}" --grad-accum 3 --run leg && rm -rf other && go "${start[@]}" --batch-tokens 96 --run other
    check "--grad-accum 3 is --batch-tokens of three micro-batches" same_run leg other
    if is_quick; then return; fi
    need_build old "ARCH=x86-64 CPU=1" train_moe
    for i in loss bias none; do
        rm -rf whole other
        go "${mixed[@]}" --balance $i --run whole
        timeout 60 "$old" "${mixed[@]}" --balance $i --run other >out 2>err </dev/null
        check "ARCH=x86-64, --balance $i: the bytes of the native build" same_run whole other
    done
}

# ---- ranks ----

# a model whose routers' biases let experts 2 and 3 have every token
lopsided() {
    rm -rf one
    go "${start[@]}" --config wide.json --balance bias --steps 1 --run one
    cp -r "$(last one)" lopsided && rm lopsided/manifest.json
    biases lopsided/model.safetensors 0 0 100 100
}

ranks() {
    echo "# ranks: one update of four micro-batches on 1, 2 and 4"
    need_build launch "" launch
    local n zero
    each() {  # PROMISE ZEROS RANKS OPTION...
        local promise=$1 zeros=$2 counts=$3
        shift 3
        rm -rf one
        go "${mixed[@]}" "$@" --run one
        for zero in $zeros; do
            for n in $counts; do
                rm -rf several
                timeout 60 "$launch" -n $n "$trainer" "${mixed[@]}" "$@" --zero $zero --run several >out 2>err </dev/null
                status=$?
                same_run one several && cmp -s {one,several}/samples.txt
                verdict $? "$promise on $n ranks, --zero $zero: the bytes of one rank" "status $status: $(tail -n 2 err)"
            done
        done
    }
    # --ep on all numbers of ranks; P/G
    share() {  # PROMISE GROUPS OPTION...
        local promise=$1 groups=$2 group
        local wide=("${mixed[@]}" --config wide.json "${@:3}")
        rm -rf one
        go "${wide[@]}" --run one
        for group in $groups; do
            rm -rf several
            COMM_CHECK=1 timeout 60 "$launch" -n ${group%/*} "$trainer" "${wide[@]}" --ep ${group#*/} --run several >out 2>err </dev/null
            status=$?
            same_run one several && cmp -s {one,several}/samples.txt
            verdict $? "$promise, ${group%/*} ranks, --ep ${group#*/}: the bytes of one rank" "status $status: $(tail -n 2 err)"
        done
    }
    answers 7 text >examples
    sed 's/"hidden_size":16/"hidden_size":64/; s/"intermediate_size":12/"intermediate_size":64/; s/"num_local_experts":5/"num_local_experts":4/' tiny.json >wide.json
    if is_quick; then
        each "--balance bias" "0 2" "2 4" --balance bias --ema 0.9
        share "experts on ranks" "2/2 4/2" --ema 0.9
        return
    fi
    share "experts on ranks, answering examples" "1/1 2/1 2/2 4/1 4/2 4/4" --hellaswag examples --ema 0.9
    for n in 0 2 3; do share "experts on ranks, --recompute $n" "4/2 4/4" --recompute $n --balance bias; done
    lopsided
    share "experts 2 and 3 take all tokens, so two ranks of four have no rows" "2/2 4/4" --config '' --from lopsided --balance bias --bias-rate 0
    share "experts on ranks, some frozen" "2/2 4/2 4/4" --freeze 'model.layers.1.*.experts.0.*,model.layers.0.*.experts.[123].*,lm_head*'
    share "experts on ranks, all frozen" "4/4" --freeze '*experts*'
    sed 's/"intermediate_size":64/"intermediate_size":63/' wide.json >narrow.json
    share "experts of 63 x 64 on ranks" "2/2 4/4" --config narrow.json
    share "experts on ranks alone learn" "4/2" --freeze '*embed*,*self_attn*,*norm*,lm_head*,*gate.weight' --doc-reset 1
    echo "# checkpoints of experts on ranks"
    local wide=("${mixed[@]}" --config wide.json) from to
    go "${wide[@]}" --run whole
    for from in 1/1 2/2 4/2 4/4; do
        for to in 1/1 2/2 4/4; do
            rm -rf several
            timeout 60 "$launch" -n ${from%/*} "$trainer" "${wide[@]}" --ep ${from#*/} --run several >out 2>err </dev/null
            rm -rf several/step_000012
            timeout 60 "$launch" -n ${to%/*} "$trainer" --run several --resume --ep ${to#*/} >out 2>err </dev/null
            status=$?
            same_run whole several
            verdict $? "written by ${from%/*} ranks, --ep ${from#*/}, resumed by ${to%/*}, --ep ${to#*/}" "status $status: $(tail -n 2 err)"
        done
    done
    rm -rf several/step_000012
    go --run several --resume
    check "--ep of a checkpoint that does not fit the ranks is given up" same_run whole several
    rm -rf several
    "$launch" -n 2 "$trainer" "${wide[@]}" --grad-accum 6 --ep 2 --run several >out 2>err </dev/null
    cp -r several uneven && rm -rf several/step_000012 uneven/step_000012
    "$launch" -n 4 "$trainer" --run several --resume >out 2>err </dev/null && go --run uneven --resume
    check "... and where four ranks have six micro-batches" same_run uneven several
    rm -rf uneven

    echo "# experts on ranks: exports, mistakes"
    rm -rf one hf hf_shared
    go --from whole --eval-only --val text --seq-len 16 --export-hf hf
    "$launch" -n 2 "$trainer" --from whole --eval-only --val text --seq-len 16 --ep 2 --export-hf hf_shared >out 2>err </dev/null
    verdict $? "two ranks that evaluate and export" "$(<err)"
    check "... the folder of one" diff -r hf hf_shared
    together() {  # PROMISE LINE STATUS RANKS OPTION...
        "$launch" -n $4 "$trainer" "${wide[@]}" --run one "${@:5}" >out 2>err </dev/null
        status=$?
        [ $status = $3 ] && grep -qF -- "$2" err
        verdict $? "$1" "status $status: $(<err)"
        rm -rf one
    }
    together "--ep without ranks" "--ep: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" 2 1 --ep 2
    together "--ep that is no power of two" "--ep: expected a power of two, found 3: of those that divide 4 ranks and 4 experts the nearest are 2 and 4" 2 4 --ep 3
    together "--ep that does not divide the experts" "--ep: 8: expected a number that divides the 4 experts: the nearest is 4" 2 8 --ep 8 --grad-accum 8
    together "--ep, and micro-batches for three of four" "expected a multiple of 4 micro-batches in an update, as many as ranks, found 6: --grad-accum 4" 2 4 --ep 4 --grad-accum 6
    together "--ep and --zero 1" "--zero: --ep brings --zero 2: leave it out" 2 2 --ep 2 --zero 1
    together "--ep and --verify-every" "--verify-every: is not for --ep" 2 2 --ep 2 --verify-every 2
    together "--ep-room without --ep" "--ep-room: is for --ep 2 and more" 2 2 --ep-room 2
    together "--ep-room that can never be enough" "--ep-room: expected 0, or 1 and more" 2 2 --ep 2 --ep-room 0.5
    together "--ep that does not divide the experts, on too few ranks" "--ep: 8: expected a number that divides the 4 experts: the nearest is 4" 2 4 --ep 8
    together "more rows than --ep-room has room for" " or more, or 0, which has room for all that can come" 2 2 --ep 2 --ep-room 1 --config '' --from lopsided --balance bias
    each "--balance loss, answering examples" "0 1 2" "1 2 4" --verify-every 5 --hellaswag examples
    each "--balance bias, averaged weights" "0 1 2" "1 2 4" --balance bias --ema 0.9
    each "--balance none, frozen experts" "0 1 2" "2 4" --balance none --freeze '*.experts.1.*,first:1'
}

# ---- kill -9 and --resume ----

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --recompute, --head-rows"
    RANDOM=11
    killed $((kills / 2)) "--balance loss, two micro-batches" --grad-accum 2
    killed $((kills - kills / 2)) "--balance bias, averaged weights" --balance bias --ema 0.9 --verify-every 20
}

# ---- text ----

text() {
    echo "# text"
    local one i n=40 tokens
    go "${start[@]}" --steps 300 --lr 3e-2 --batch-size 8 --seq-len 48 --schedule constant --run book
    write() { go --from book --max-new-tokens $n --temperature 0 "$@" && cat out; }
    one=$(write --generate "line 7")
    check "the likeliest text is like the book: ${one:0:30}" grep -q "^line 7.*[a-z]" <<<"$one"
    check "the same with three threads" test "$one" = "$(write --generate "line 7" --threads 3)"
    tokens=(256 $(printf %s "$one" | od -An -v -tu1))
    examples 1 ${#tokens[@]} "${tokens[*]}" "${tokens[*]}" >in
    go --from book --probe in --probe-out out.safetensors && likeliest out.safetensors 7 "${tokens[@]}"
    verdict $? "a cache of keys and values: each of ${#tokens[@]} tokens is the likeliest by the probe of the whole text" "$(<err)"
    for i in 6 17 31; do
        check "a prompt of $i bytes of that text goes on as it does" test "$one" = "$(n=$((46 - i)) && write --generate "${one:0:i}")"
    done
    check "three samples are three texts" test "$(go --from book --generate line --samples 3 --max-new-tokens 20 && grep -v '^---' out | sort -u | wc -l)" -ge 3
    cut_to_bf16 book rounded
    check "--weights bf16 of numbers that bf16 holds: the text that floats give" \
        test "$(go --from rounded --generate "line 7" --temperature 0 && cat out)" = "$(go --from rounded --weights bf16 --generate "line 7" --temperature 0 && cat out)"
    sed 's/"hidden_size":16/"hidden_size":1/' tiny.json >single.json
    go "${start[@]}" --config single.json --run single && cut_to_bf16 single single_rounded
    evaluated() { go --from single_rounded --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
    check "... matrices of one row too: the loss of validation" test "$(evaluated)" = "$(evaluated --weights bf16)"
    refuse "training what is stored as bf16" "--weights: bf16 is for --generate, --eval-only and --export-hf" --from book --weights bf16 --train text
    check "from standard input the same" test "$one" = "$(printf 'line 7' | "$trainer" --from book --generate - --temperature 0 --max-new-tokens 40 2>err)"

    echo "# longer texts than were trained on"
    refuse "more positions than the model has" "--seq-len: expected at most the model's 48 positions, found 96" --from book --train text --seq-len 96
    go --from book --rope-alpha 4 --train text --seq-len 96 --batch-size 2 --steps 2 --lr 1e-3 --run longer
    check "--from with --rope-alpha 4: four times the positions; config.json says what RoPE computes" \
        test "$(grep -cE '"(max_position_embeddings": 192|rope_alpha": 4.0|rope_base": 10000.0)' longer/step_000002/config.json) $(grep -c '"rope_theta": 80000.0' longer/step_000002/config.json)" = "3 2"
    check "... and a line says it" test "$(<err)" = "train_moe: --rope-alpha 4: the model has 192 positions now, not 48"
    check "... and the run goes on with that" go --resume --run longer --steps 4
    check "... without a word" test ! -s err
    check "... 192 positions of text" test "$(go --from longer --generate "" --temperature 0 --max-new-tokens 180 --prompt-eot 1 && wc -c <out)" -gt 100
    go --config tiny.json --train text --batch-size 2 --steps 2 --run rows && go --resume --run rows --rope-alpha 4 --steps 3
    check "--resume with --rope-alpha 4: rows and updates stay as they were, which is said" \
        test "$(boxed update '96 tokens = 1 x 2 x 48') $(grep -c '"seq-len": 48' rows/settings.json) $(grep -c '192 positions now, not 48; rows stay 48 long' err)" = "1 1 1"
    go --resume --run rows --steps 4
    check "... and when it goes on again" test "$(boxed update '96 tokens = 1 x 2 x 48') $(wc -l <err)" = "1 0"
    for i in 4 1.1 1 0.5; do
        rm -rf back && go --from rows --rope-alpha $i --export-hf forth && go --from forth --rope-alpha 1 --export-hf back &&
            test "$(grep -cE '"(max_position_embeddings": 48|rope_alpha": 1.0|rope_base_positions": 48)' back/config.json)" = 3 && rm -rf forth
        verdict $? "--rope-alpha $i, and back by --rope-alpha 1: the positions of before" "$(<err)"
    done
}

# ---- files: probes, Hugging Face folders, what a run leaves ----

batch() { examples 2 9 "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18" "2 3 4 5 -1 7 8 9 10 11 12 13 14 15 16 17 18 19"; }

files() {
    local name new options
    echo "# probes: NumPy, before and after saving"
    batch >in
    while read -r name options; do
        rm -rf hf again before after truth
        new=(--config tiny.json --export-hf hf --probe in --probe-out before)
        if [ $name = "preset" ]; then new=(--model tiny --tokenizer bytes "${new[@]:2}"); fi
        go "${new[@]}" $options
        check "$options: a probe has logits, loss and the gradient of every tensor" test "$(tensors before '^grad\.' | wc -l)" = "$(tensors hf/model.safetensors . | wc -l)" \
            -a "$(tensors before '^logits$' | wc -w)" = 4627
        check "... and the cross entropy, which the line says too" \
            test "$(tensors before '^cross_entropy$' | wc -w) $(grep -cE '^probe: .*, loss [0-9.]+ \(cross_entropy [0-9.]+\), written' out)" = "2 1"
        "$python" "$root/dev/ref/moe.py" --from hf --probe in --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... which are to the last bit those of dev/ref/moe.py, with the losses of the routers in config.json" "$(<err)"
        go --from hf --probe in --probe-out after --threads 3 --head-rows 4 --export-hf again && cmp before after && cmp hf/model.safetensors again/model.safetensors
        verdict $? "... from the saved folder, other threads, few rows of the head: the same bytes" ""
    done <<'CASES'
config --balance loss
config --balance bias --z-lambda 0
config --balance none --rope-alpha 8
preset --tied 1
CASES
    go --from hf --balance none --z-lambda 0 --probe in --probe-out alone
    check "--balance none --z-lambda 0: the loss is the cross entropy" test "$(tensors alone '^loss$' | cut -d' ' -f2)" = "$(tensors alone '^cross_entropy$' | cut -d' ' -f2)"
    check "... which losses of routers do not change" test "$(tensors alone '^cross_entropy$')" = "$(tensors before '^cross_entropy$')" -a "$(tensors alone '^loss$')" != "$(tensors before '^loss$')"
    if ! is_quick; then
        sed 's/"num_experts_per_tok":2/"num_experts_per_tok":1/' tiny.json >one.json
        go --config one.json --export-hf single --probe in --probe-out before
        check "--export-hf of one expert a token: a line of what transformers would do" \
            test "$(wc -l <err) $(grep -c '^train_moe: --export-hf: Mixtral in transformers has no single expert a token' err)" = "1 1"
        check "--from that folder: not a word" eval 'go --from single --probe in --probe-out after && [ ! -s err ]'
        sed -i '/written_by/d' single/config.json
        go --from single --probe in --probe-out after
        check "... from another program's: a line of what transformers would have computed" \
            test "$(wc -l <err) $(grep -c '^train_moe: --from single: one expert of 5 a token: transformers weighs it by 1' err)" = "1 1"
        sed 's/"num_local_experts":5,"num_experts_per_tok":2/"num_local_experts":1,"num_experts_per_tok":1/' tiny.json >dense.json
        check "one expert of one: not a word" eval 'go --config dense.json --export-hf dense && [ ! -s err ]'
        "$python" "$root/dev/ref/moe.py" --from single --probe in --probe-out truth && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... it computes what dev/ref/moe.py does" ""
    fi
    rm -rf hf again
    go "${start[@]}" --export-hf hf --train "" && go --from hf --export-hf again --shard-gb 1e-5 && go --from hf --probe in --probe-out before && go --from again --probe in --probe-out after && cmp before after
    verdict $? "a folder of $(ls again/*.safetensors | wc -l) shards: the same probe" "$(<err)"
    rm -rf half again && go "${start[@]}" --export-hf half --export-dtype bf16 --train "" --balance bias && go --from half --export-hf again --export-dtype bf16 --shard-gb 2e5 && diff -r half again
    verdict $? "--export-dtype bf16, read and written again: the same folder" "$(<err)"
    check "... its config.json says bfloat16, biases of routers stay floats" \
        test "$(grep -c '"torch_dtype": "bfloat16"' half/config.json) $(head -c 300 half/model.safetensors | grep -c 'e_score_correction_bias":{"dtype":"F32"')" = "1 1"
    go --from half --generate "line 7" --temperature 0 && mv out floats && go --from half --weights bf16 --generate "line 7" --temperature 0 && cmp floats out
    verdict $? "... straight into --weights bf16: the text that its floats give" "$(<err)"
    go --from hf --export-hf rounded --export-dtype bf16 && go --from rounded --weights bf16 --generate "line 7" --temperature 0 && mv out half_text &&
        go --from hf --weights bf16 --generate "line 7" --temperature 0 && cmp half_text out
    verdict $? "... and the text that a file of floats gives there" "$(<err)"
    rm -rf half again rounded
    sed 's/"vocab_size":257/"vocab_size":300/' tiny.json >wide.json
    refuse "text from a model of other tokens" "--generate: the model has 300 tokens, --tokenizer bytes has 257: give the model's tokenizer" \
        --config wide.json --generate a
    refuse "a type that there is not" '--export-dtype' "${start[@]}" --export-hf half --export-dtype fp16

    echo "# a run and its files"
    go "${mixed[@]}" --noise-scale 4 --ema 0.9 --tensorboard 1 --run run
    local key missing=""
    for key in cross_entropy balance z load idle_experts noise_scale; do
        grep -q "\"$key\": [0-9]" run/metrics.jsonl && grep -q "train/$key" run/events.out.* || missing+=" $key"
    done
    check "metrics.jsonl and TensorBoard's events have the routers' keys (not:$missing)" test -z "$missing"
    check "... cross_entropy is the loss without the routers': loss = it + 0.01 * 2 balance + 0.001 * 2 z" \
        "$python" -c 'import json
for line in open("run/metrics.jsonl"):
    r = json.loads(line)
    if r.get("loss") is not None:
        assert abs(r["loss"] - r["cross_entropy"] - 0.02 * r["balance"] - 0.002 * r["z"]) < 1e-5 and 1 <= r["load"] <= 2.5, r'
    check "summary.json" test "$(grep -cE '"(final_step": 12|updates": 12|tokens": 1536|best_step": [0-9]+|checkpoint": "run/step_000012")' run/summary.json)" = 5
    rm -rf with other && go "${start[@]}" --balance none --run with && go "${start[@]}" --aux-alpha 1000 --z-lambda 1000 --run other
    check "... to the last digit, however much the routers' losses weigh" test "$(value with 1 cross_entropy)" = "$(value other 1 cross_entropy)"
    go --resume --run with --steps 4 --export-hf written
    check "summary.json has loads where something was counted" test "$(grep -c '"loads"' other/summary.json) $(grep -c '"loads"' with/summary.json)" = "1 0"
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 12 val_loss)")"
    go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000012 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
    go --from run --ema-weights 1 --export-hf averaged && cmp averaged/model.safetensors run/step_000012/ema.safetensors
    verdict $? "--ema-weights 1: the averaged weights" "$(<err)"
    need_build inspect "" tools/inspect
    "$inspect" run/step_000012 >out 2>err
    check "inspect: a verified checkpoint of $(tensors run/step_000012/model.safetensors . | wc -l) tensors" test "$? $(grep -cE '^  manifest +verified|model_type mixtral' out)" = "0 2"

    sed 's/"num_local_experts":5/"num_local_experts":7/; s/"num_hidden_layers":2/"num_hidden_layers":3/' tiny.json >larger.json
    go --config larger.json --export-hf larger && "$inspect" hf larger >out 2>err
    check "inspect of two sizes: a line for the tensors of all layers and experts that one lacks" \
        test "$(grep -cE 'only in b: model\.layers\.\{0\.\.2\}\.block_sparse_moe\.experts\.\{0\.\.6\}\.w[123]\.weight, 11 of them$' out) $(grep -c 'only in b: model.layers.2.input_layernorm.weight$' out) $(grep -c 'only in a' out)" = "3 1 0"

    echo "# balanced another way from now on"
    go --from hf --balance bias --export-hf biased --probe in --probe-out after && [ "$(tensors biased/model.safetensors e_score | cut -d' ' -f2- | sort -u)" = "0 0 0 0 0" ] &&
        cmp <(tensors before logits) <(tensors after logits)
    verdict $? "--from a model without biases, --balance bias: they start at 0, its logits are the same" "$(<err)"
    rm -rf run2 && go --from hf --balance bias --train text --seq-len 16 --batch-size 2 --steps 3 --run run2 && go --resume --run run2 --steps 5 &&
        check "... and learn by counting" test "$(tensors run2/step_000005/model.safetensors e_score | grep -vc ' 0 0 0 0 0$')" = 2
    for i in short lacking; do cp -r run2/step_000005 $i && rm $i/manifest.json; done
    rename short/model.safetensors '^model\.' '' && rename lacking/model.safetensors '^(.*layers\.0\..*)e_score' '\1other'
    go --from short --export-hf long && cmp long/model.safetensors run2/step_000005/model.safetensors
    verdict $? "... and are read from a file whose names lack \"model.\"" "$(<err)"
    refuse "a file that has biases, but not of layer 0" 'model.layers.0.block_sparse_moe.gate.e_score_correction_bias" is missing' --from lacking --train text --seq-len 16 --steps 1
    rm -rf huge with && cp -r run2/step_000005 huge && rm huge/manifest.json && biases huge/model.safetensors 2e38 2e38 2e38 2e38 2e38
    timeout 30 "$trainer" --from huge --train text --seq-len 16 --batch-size 2 --steps 2 --run with >out 2>err </dev/null
    check "biases whose sum is infinite: status 1 and a line, not a checkpoint of NaN" \
        test "$? $(wc -l <err) $(grep -c 'layer 0: the bias of expert 0 is -inf' err) $(ls with | grep -c step_)" = "1 1 1 0"
    "$python" -c 'import json
c = json.load(open("hf/config.json"))
for key in ("aux_alpha", "z_lambda", "balance", "rope_base", "rope_alpha"): del c[key]
json.dump(c, open("hf/config.json", "w"))'
    rm -rf with && go --from hf --train text --seq-len 16 --steps 1 --run with
    check "config.json without keys of ours: no balancing" test "$(grep -cE '"(balance": "none|aux_alpha": 0.0)' with/step_000001/config.json)" = 2
    check "... which the box and settings.json say" test "$(boxed balance 'bias none, loss none .config.json says nothing.') $(grep -c '"balance": "none"' with/settings.json)" = "1 1"
    refuse "the weight of a loss that such a folder does without" "--aux-alpha: is for --balance loss, here it is none" --from hf --train text --aux-alpha 0.02
    rm -rf with && go --from hf --balance loss --train text --seq-len 16 --steps 1 --run with
    check "... and --balance loss has the weight of --aux-alpha" test "$(grep -cE '"(balance": "loss|aux_alpha": 0.01)' with/step_000001/config.json)" = 2
    rm -rf with && go --config hf/config.json --train text --seq-len 16 --steps 1 --run with
    check "a random start from such a config.json: the default, as --model" \
        test "$(grep -cE '"(balance": "loss|aux_alpha": 0.01)' with/step_000001/config.json) $(boxed balance 'bias none, loss 0.01')" = "2 1"
    rm -rf with && go --config tiny.json --train text --seq-len 16 --steps 1 --run with
    check "... from one that says it: what it says, also in settings.json" \
        test "$(boxed balance 'bias none, loss 0.01 .config.json.') $(boxed '  z-loss' 0.001) $(grep -c '"z-lambda": 0.001' with/settings.json)" = "1 1 1"
}

# ---- learning ----

learning() {
    echo "# learning"
    go --model tiny --train text --seq-len 64 --batch-size 2 --overfit 1 --lr 3e-3 --steps 200 --run heart
    check "--overfit 1, tiny: cross entropy below 0.01 after 200 updates ($(value heart 200 cross_entropy))" below "$(value heart 200 cross_entropy)" 0.01
    local skewed=(--train text --seq-len 64 --batch-size 4 --lr 3e-3 --schedule constant)
    go --model tiny --balance none "${skewed[@]}" --steps 150 --run none
    go --from none --balance none "${skewed[@]}" --lr 1e-3 --steps 100 --run still
    go --from none --balance loss --aux-alpha 0.1 "${skewed[@]}" --lr 1e-3 --steps 100 --run levelled
    go --from none --balance bias --bias-rate 0.02 "${skewed[@]}" --lr 1e-3 --steps 100 --run counted
    check "the busiest expert without a loss: $(value still 100 load) times the mean; with one it falls to $(value levelled 100 load)" \
        eval 'below "$(value levelled 100 load)" "$(value still 100 load)"'
    check "... with biases to $(value counted 100 load)" eval 'below "$(value counted 100 load)" "$(value still 100 load)"'
}

run_parts $parts
