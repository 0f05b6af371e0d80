#!/usr/bin/env bash
# train_glm5 as its user meets it: presets, options, config.json, files, training of indexers, routers and the MTP module, adapters, ranks,
# kills, generation from both caches. Its folders, in fp8 too, are test_glm5_files.sh's. What it computes is held against numbers of its NumPy
# reference by test_glm5.c, against transformers by dev/ref/check_hf.py --model glm5, against PEFT by dev/ref/check_lora.py.
#     dev/test_glm5.sh                  all parts
#     dev/test_glm5.sh options ranks    some of them: presets options configs files learning adapters bits ranks kills text talks typed
#     dev/test_glm5.sh quick            the most telling of all but options, adapters, talks and typed
#     KILLS=100 dev/test_glm5.sh kills  more random kills than 6
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 1 || echo 6)}
all_parts="presets configs learning bits ranks kills"
is_quick || all_parts+=" options adapters files talks text typed"
parts=${*:-$all_parts}

need_build trainer "CPU=1" train_glm5
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# every option that a run which ended well was given: for `typed`
typed=$work/typed
eval "$(declare -f go | sed '1s/^go /run_once /')"
go() { run_once "$@" && printf '%s\n' "$@" | grep -o '^--[a-z0-9-]*' >>"$typed"; return $status; }

# ---- files: small models ----

write_texts
# each indexer chooses 5 keys for a layer more: T 16 has positions that leave some out
echo '{"model_type":"glm_moe_dsa","vocab_size":257,"hidden_size":16,"num_hidden_layers":4,"max_position_embeddings":48,"num_attention_heads":2,
"q_lora_rank":10,"kv_lora_rank":6,"qk_nope_head_dim":6,"qk_rope_head_dim":4,"v_head_dim":5,"index_n_heads":3,"index_head_dim":6,"index_topk":5,
"indexer_types":["full","shared","full","shared"],"mlp_layer_types":["dense","sparse","sparse","sparse"],"intermediate_size":20,
"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"rope_parameters":{"rope_type":"default","rope_theta":10000}}' >tiny.json
edit tiny.json mtp.json num_nextn_predict_layers 1 mtp_weight 0.5 seq_balance_coef 0.1 bias_update_rate 0.01
edit mtp.json taught.json indexer_train '"kl"'
# all that config.json may say otherwise: biases, groups of experts, two shared ones, halves that turn, a token that fills
edit tiny.json other.json attention_bias true n_group 2 topk_group 1 n_shared_experts 2 norm_topk_prob false routed_scaling_factor 1.5 \
    indexer_rope_interleave false pad_token_id 32 latent_norm_eps 1e-6 rms_norm_eps 1e-4 indexer_kl_target '"source_layer"'
edit tiny.json plain.json num_hidden_layers 2 indexer_types '["full","full"]' mlp_layer_types '["dense","dense"]'  # without experts
edit tiny.json six.json n_routed_experts 6
edit taught.json apart.json indexer_types '["full","full","full","full"]'  # a stage begins with an indexer
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
mixed=("${start[@]}" --grad-accum 4 --steps 8 --val-fraction 0.1 --eval-every 4 --sample-every 4 --max-new-tokens 8 --save-every 4)
index='indexer\.(wq_b|wk|weights_proj|k_norm)'

# ---- presets ----

presets() {
    echo "# presets"
    local name count
    while read -r name count; do
        timeout 60 "$trainer" --model $name --plan 1 --seq-len 64 --batch-size 1 >out 2>err
        check "$name: $count parameters" test "$(boxed parameters "[0-9.]*[kMBT] = $count( .padded: [0-9]*.)?")" = 1
    done <<'SIZES'
tiny 327256
small 208236384
glm-5 753864139008
glm-5.2 753329940480
SIZES
    check "... the box of glm-5.2: heads, indexers, MLPs, experts, the module" test "$(boxed '  attention' '64 heads, keys of 256 of which 64 turn, values of') $(
        boxed '  indexers' 'in 21 layers, of 32 heads, choose 2048 positions') $(boxed mlp '12288 wide, in 3 layers') $(
        boxed experts '256 in a layer, 2048 wide, a token takes 8 and') $(boxed mtp 'a layer and 10.0B more parameters for the token')" = "1 1 1 1 1"
    timeout 60 "$trainer" $(sed -nE 's#^ +\./train_glm5 (--model glm-5\.2 --plan .*[0-9])  .*#\1#p' "$root/doc/glm5.md") >out 2>err
    check "... the plan of doc/glm5.md: status 0, four experts on each of 64 ranks" test "$? $(boxed '  of them' '4 on each of 64 ranks')" = "0 1"
    timeout 60 "$trainer" --model glm-5.2 --dry-run --batch-size 1 >out 2>err
    check "... it does not fit here: status 1, and what to change" test "$? $(grep -cE 'try --recompute 3 with --(ep|tp|pp).* on (about )?[0-9]+ machines' err)" = "1 1"
    refuse "an unknown preset" '--model: expected tiny, small, glm-5 or glm-5.2, found "huge"' --model huge --train text
    go --help
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
    go --version
    check "--version: commit and flags" grep -qE '^train_glm5 [0-9a-z-]+, -O' out
}

# ---- options ----

options() {
    echo "# options of this trainer"
    local i name alone
    for name in tiny taught plain other; do for i in 0 2 3; do flag same "" --recompute $i --config $name.json; done; done
    flag same 4 --recompute 3 --doc-reset 1 --train documents --config taught.json
    flag same 0 --head-rows 5 --verify-every 1
    flag same -1 --threads 3 --config taught.json
    flag 'config indexer_train ".kl." || other' "fast=>--indexer: expected off|kl|dense" --indexer kl
    flag other "" --indexer dense
    flag other 2 --bias-rate 0.1
    flag other -1 --seq-balance 0.5
    flag 'config num_nextn_predict_layers 1 && grep -q mtp_loss with/metrics.jsonl' 2 --mtp 1
    flag other -1 --mtp-weight 0.9 --config mtp.json
    flag other 2 --doc-reset 1 --train documents
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5
    for i in ep pp tp cp; do
        refuse "--$i of one rank" "--$i: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" --$i 2
    done
    refuse "--graph in a program for CPUs" "--graph: is for GPUs" "${start[@]}" --graph 1
    refuse "--ep of a model without experts" "--ep: is for models with experts" "${start[@]}" --config plain.json --ep 2
    refuse "--plan-card in a program for CPUs" "--plan-card: is for a build in bf16: make setup-cuda && make train_glm5 CUDA=1; no GPU is needed to plan" "${start[@]}" --plan 2 --plan-card H200 --plan-rate 0.5
    refuse "more positions than the model has" "--seq-len: expected at most the model's 48 positions, found 96" "${start[@]}" --seq-len 96
    refuse "an indexer alone that does not learn" "--indexer-alone: is for --indexer kl or dense, without an adapter" "${start[@]}" --indexer-alone 1
    for i in bias-rate seq-balance; do
        refuse "--$i beside indexers alone" "--$i: is not for --indexer-alone, beside which routers stay as they are" "${start[@]}" --indexer kl --indexer-alone 1 --$i 0.1
    done
    refuse "a weight without a module" "--mtp-weight: is for a model with that module: --mtp 1" "${start[@]}" --mtp-weight 0.7
    refuse "... beside an adapter, where --mtp 1 would be refused" "--mtp-weight: is not for adapters, beside which the module stays as it is" "${start[@]}" --lora-rank 2 --mtp-weight 0.7
    for i in bias-rate seq-balance; do
        refuse "--$i of a model without experts" "--$i: is for models whose layers choose experts" "${start[@]}" --config plain.json --$i 0.1
    done
    alone=("${start[@]}" --indexer dense --indexer-alone 1 --val-fraction 0.1 --eval-every 1 --early-stop 1)
    refuse "--early-stop of indexers alone that leave no position out" "--early-stop: with --indexer-alone no validation gets better in rows of which all positions are chosen: leave it out, or give more --seq-len" "${alone[@]}" --seq-len 5
    rm -rf with && go "${alone[@]}" --run with
    check "... where they leave some out validations differ" test "$(grep -o '"val_loss": [0-9.]*' with/metrics.jsonl | sort -u | wc -l)" -gt 1

    echo "# options of every trainer, in this one"
    for i in "seed 7" "lr 2e-2" "optimizer muon" "schedule constant" "warmup 2" "final-lr 0.5" "lr-horizon 2" "weight-decay 0.5" "beta1 0.5" "beta2 0.5" \
        "eps 1e-3" "clip 0.1" "shuffle 0" "overfit 1" "batch-tokens 64" "grad-accum 2"; do
        flag other "" --${i% *} ${i#* }
    done
    flag other "" --momentum 0.5 --optimizer muon
    for i in "tokenizer bytes" "async-save 0 --save-every 2" "save-minutes 1" "log-every 2" "max-skips 3" "skip-loss-z 9" "skip-norm-z 9"; do
        flag same "" --${i%% *} ${i#* }
    done
    flag 'test $(value with 2 val_loss) != "" -a $(wc -l <out) -gt 4' "" --val documents --eval-every 2 --eval-batches 3
    flag 'test "$(cd with && echo step_*)" = "step_000003 step_000004"' "" --keep-every 3 --save-every 1 --keep 1
    flag 'grep -q noise with/metrics.jsonl' "" --noise-scale 2 --grad-accum 2
    flag 'test "$(value with 2 val_loss)$(value with 3 val_loss)" = "$(value with 2 val_loss)"' "" --early-stop-delta 100 --early-stop 1 --val-fraction 0.1 --eval-every 1
    flag 'test -s with/events.out.tfevents*' "" --tensorboard 1
    go "${start[@]}" --steps 0 --epochs 0.1 --run epochs
    check "--epochs 0.1: a tenth of the rows" test "$(tail -n 1 epochs/metrics.jsonl | grep -o '"step": [0-9]*')" = "\"step\": $(awk "BEGIN { print int($(wc -c <text) / 16 / 2 * 0.1) + 1 }")"
    printf 'line 7: \nthe plain\n' >prompts
    go "${start[@]}" --sample-every 2 --sample-prompts prompts --prompt-eot 0 --max-new-tokens 5 --run samples
    check "--sample-prompts: each of them, twice" test "$(grep -c '^line 7: ' samples/samples.txt) $(grep -c '^the plain' samples/samples.txt)" = "2 2"
    answers 20 text >many
    go "${start[@]}" --val-fraction 0.1 --eval-every 2 --hellaswag many --eval-examples 10 --run answers
    check "--hellaswag --eval-examples 10: of ten" test "$(grep -c '^step [24] | HellaSwag.* 10' out)" = 2
    printf 'config = tiny.json\ntrain = text\nseq-len = 16  # short\nbatch-size = 2\nlr = 1e-2\nsteps = 4\n' >some.txt
    rm -rf with plain && go "${start[@]}" --run plain && go --args some.txt --run with --continue && same_run plain with
    verdict $? "--args: the run of the same options, typed" "$(<err)"
    go --run with --continue --steps 8 && [ "$(value with 8 loss)" ]
    verdict $? "--continue of a run that has ended: it goes on to 8 steps" "$(<err)"
    edit tiny.json wordy.json vocab_size 300
    rm -rf with other && go "${start[@]}" --config wordy.json --schedule constant --warmup 0 --run other && go "${start[@]}" --config wordy.json --schedule constant --warmup 0 --steps 2 --run with && go --resume --run with --steps 4 && same_run other with
    verdict $? "a model of more tokens than text has bytes: stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
    go --config wordy.json --train text --seq-len 16 --dry-run
    check "a new model with more tokens than bytes has: a line says so" \
        test "$(tr -d '\n' <out | grep -c 'bytes, of 257 tokens; the model has 300: samples')" = 1
    "$trainer" --model small --seq-len 1024 --batch-size 65536 --dry-run >out 2>err
    check "... and a batch that is too large is to be smaller" grep -qE "try a smaller --batch-size \(at most [0-9]+; [0-9]+ with --recompute 3\), --seq-len or --model" err
    refuse "... and other text" "--tokenizer: the model has 300 tokens, bytes has 257: give the model's tokenizer, or token shards" --from with --train text --seq-len 16

    echo "# memory and FLOP per token"
    mib() { awk '/^\| memory  / { print int($4 * ($5 == "GiB" ? 1024 : 1)) }' out; }
    local big=(--model small --mtp 1 --indexer kl --train text --batch-size 2 --seq-len 320 --steps 2) predicted peak
    go "${big[@]}" --dry-run && predicted=$(mib)
    peak=$("$python" -c 'import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10)' "$trainer" "${big[@]}" --steps 1 --save-minutes 0 --run big)
    check "--dry-run of a model that learns all there is: $predicted MiB predicted, $peak MiB used, within 2%" \
        test $((100 * predicted)) -le $((102 * peak)) -a $((100 * predicted)) -ge $((98 * peak))
    flop() { edit tiny.json some.json "$@" && go --config some.json --seq-len 16 --batch-size 1 "${how[@]}" --train text --dry-run 1 >&2; sed -n 's/.*, \([^ ]*\) FLOP per token.*/\1/p' out; }
    local how=(--indexer dense)
    check "--indexer dense: of all positions, whatever index_topk" test "$(flop index_topk 1 v_head_dim 64)" = "$(flop index_topk 40 v_head_dim 64)"
    how=(--indexer kl)
    check "... kl: of those that are chosen" test "$(flop index_topk 1 v_head_dim 64)" != "$(flop index_topk 40 v_head_dim 64)"
    how=(--indexer off)
    check "an indexer without scores does nothing; with scores it does" test "$(flop index_topk 40 index_n_heads 3)" = "$(flop index_topk 40 index_n_heads 300)" -a \
        "$(flop index_topk 1 index_n_heads 3)" != "$(flop index_topk 1 index_n_heads 300)"

    echo "# what learns"
    frozen tiny 'first:1' 'layers\.0\.|indexer|e_score_correction_bias'
    edit taught.json still.json bias_update_rate 0
    frozen still '*kv_b_proj*,*kv_a_layernorm*' 'kv_b_proj|kv_a_layernorm|e_score_correction_bias'
    frozen still '*layers.0.*.indexer.*' 'layers\.0\..*indexer|e_score_correction_bias'
    frozen tiny '*.experts.3.*,*shared*' 'experts\.3\.|shared|indexer|e_score_correction_bias'
    frozen still '*layers.4.mlp.*' 'layers\.4\.mlp|e_score_correction_bias'
    frozen taught '*layers.[1-3].*e_score_correction_bias' 'layers\.[1-3]\..*e_score_correction_bias'
    refuse "every indexer frozen, while config.json has them learn" "--freeze: all indexers are frozen, which --indexer kl lets learn: leave some of them out, or give --indexer off" "${start[@]}" --config taught.json --freeze '*indexer*'
    refuse "every bias frozen, while config.json moves them" "--freeze: the biases of all routers are frozen, which --bias-rate 0.01 moves: leave some of them out, or give --bias-rate 0" "${start[@]}" --config taught.json --freeze '*e_score_correction_bias'
    refuse "... but that of a module that does not learn" "--freeze: the biases of all routers are frozen" "${start[@]}" --config taught.json --mtp-weight 0 --freeze '*layers.[1-3].*e_score_correction_bias'
    refuse "all there is frozen" "--freeze: every tensor is frozen: nothing learns" "${start[@]}" --config taught.json --freeze '*'
    rm -rf with && go "${start[@]}" --config taught.json --freeze '*indexer*,*e_score_correction_bias,*layers.4.*' --indexer off --bias-rate 0 --mtp-weight 0 --run with
    check "... all three, with the remedies" test $status = 0
    help_example() { go --help >/dev/null && tr -s ' \n' ' ' <out | grep -oE -- "--$1 [^']*'[^']*'" | sed "s/.*'\(.*\)'/\1/"; }  # OPTION
    frozen tiny "$(help_example freeze)" 'embed_tokens|layers\.0\.|experts\.3\.|indexer|e_score_correction_bias'
    go "${start[@]:2}" --model tiny --lora-rank 3 --lora-rank-pattern "$(help_example lora-rank-pattern)" --steps 1 --run patterns
    check "--lora-rank-pattern of --help: these ranks" test "$(shapes "$(last patterns)" adapter_model | awk '/lora_A/ { print /layers.0/ ? "first" : /kv_b_proj/ ? "kv_b" : "other", $3 }' | sort -u | xargs)" = "first 4 kv_b 16 other 3"
    refuse "--freeze without a tensor" "matches no tensor" "${start[@]}" --freeze '*v_proj*'
}

# ---- config.json ----

configs() {
    echo "# config.json"
    local key i least
    becomes "keys that are missing are what doc/glm5.md says they are" \
        'rms_norm_eps": 1e-5|latent_norm_eps": 1e-5|routed_scaling_factor": 2.5|n_shared_experts": 1|n_group": 1|topk_group": 1|norm_topk_prob": true|indexer_rope_interleave": true|attention_bias": false|pad_token_id": null|indexer_train": "off"|num_nextn_predict_layers": 0|indexer_kl_coeff": 1.0|indexer_kl_target": "group_average"|seq_balance_coef": 0.0|bias_update_rate": 0.0' 16 tiny
    becomes "what it says otherwise it says again" \
        'rms_norm_eps": (1e-4|0.0001)|latent_norm_eps": 1e-6|routed_scaling_factor": 1.5|n_shared_experts": 2|n_group": 2|topk_group": 1|norm_topk_prob": false|indexer_rope_interleave": false|attention_bias": true|pad_token_id": 32|indexer_kl_target": "source_layer"' 11 other
    kinds() { "$python" -c 'import json, sys; c = json.load(open("with/step_000001/config.json")); print("".join(x[0] for x in c["indexer_types"]), "".join(x[0] for x in c["mlp_layer_types"]))'; }
    becomes "the rule of the published models places indexers, and the number of dense layers MLPs" 'index_topk": 5,' 1 \
        tiny num_hidden_layers 8 indexer_types - index_topk_freq 4 index_skip_topk_offset 3 mlp_layer_types - first_k_dense_replace 2
    check "... layers 0, 1, 2 and 6 have one, the first two MLPs" test "$(kinds)" = "fffsssfs ddssssss"
    becomes "a pattern wins over the rule" 'index_topk": 5,' 1 tiny indexer_types - index_topk_freq 4 index_topk_pattern '"FSSF"'
    check "... beside which a list says the same" test "$(kinds; edit some.json again.json indexer_types '["full","shared","shared","full"]'; rm -rf with; go "${start[@]}" --config again.json --steps 1 --run with; kinds)" = $'fssf dsss\nfssf dsss'
    becomes "without any of them every layer has an indexer (GLM-5)" 'index_topk": 5,' 1 tiny indexer_types -
    check "... all of them" test "$(kinds)" = "ffff dsss"
    becomes "other keys for the number of experts" 'n_routed_experts": 6' 1 tiny n_routed_experts - num_local_experts 6
    becomes "what the published files say, and has one value here" 'n_routed_experts": 4,|head_dim": 4,' 2 tiny scoring_func '"sigmoid"' topk_method '"noaux_tc"' \
        hidden_act '"silu"' num_key_value_heads 2 qk_head_dim 10 head_dim 192 moe_layer_freq 1 first_k_dense_replace 1 num_experts 4 num_local_experts 4 index_topk_pattern '"FSFS"' rope_interleave true ep_size 1 pretraining_tp 1 moe_router_dtype '"float32"'

    echo "# mistakes in config.json"
    changed "another architecture" '"model_type": expected glm_moe_dsa, found "qwen3_moe"' model_type '"qwen3_moe"'
    changed "no architecture" '"model_type": expected glm_moe_dsa, found nothing' model_type -
    changed "a first layer that shares" '"indexer_types": expected full of layer 0, before which there is none, found shared' indexer_types '["shared","full","full","full"]'
    changed "... by a pattern" '"index_topk_pattern": expected full of layer 0, before which there is none, found shared' indexer_types - index_topk_pattern '"SFFF"'
    changed "... by the rule" '"index_skip_topk_offset": expected full of layer 0, before which there is none, found shared' indexer_types - index_topk_freq 3 index_skip_topk_offset 0
    changed "indexers of another kind" '"indexer_types": expected full or shared, found none' indexer_types '["none","full","full","full"]'
    changed "indexers of other layers" '"indexer_types": expected a list of 4, one for each layer, found 1' indexer_types '["full"]'
    changed "a pattern of too few layers" '"index_topk_pattern": expected 4 letters F or S, one for each layer, found "FS"' indexer_types - index_topk_pattern '"FS"'
    changed "MLPs of another kind" '"mlp_layer_types": expected dense or sparse, found moe' mlp_layer_types '["moe","sparse","sparse","sparse"]'
    changed "indexers unlike the pattern" '"indexer_types": expected full of layer 1, as "index_topk_pattern" says, found shared: leave one of them out' index_topk_pattern '"FFSS"'
    changed "... unlike the rule" '"indexer_types": expected full of layer 1, as "index_topk_freq" says, found shared: leave one of them out' index_topk_freq 4
    changed "MLPs unlike their number" '"mlp_layer_types": expected dense of layer 1, as "first_k_dense_replace" says, found sparse: leave one of them out' first_k_dense_replace 2
    becomes "... of 3, which transformers writes beside any list" 'index_topk": 5,' 1 tiny first_k_dense_replace 3
    changed "two numbers of experts" '"n_routed_experts": expected 8, as "num_experts" says, found 4: leave one of them out' num_experts 8
    changed "... of another key" '"num_local_experts": expected 4, as "n_routed_experts" says, found 8: leave one of them out' num_local_experts 8
    changed "an odd number of channels that turn" '"qk_rope_head_dim": expected an even number up to "index_head_dim" 6, found 3' qk_rope_head_dim 3
    changed "more than an index head has" '"qk_rope_head_dim": expected an even number up to "index_head_dim" 6, found 8' qk_rope_head_dim 8
    changed "RoPE of another kind" '"rope_type": this trainer computes "default", found "yarn"' rope_parameters '{"rope_type":"yarn","rope_theta":10000,"factor":4}'
    changed "RoPE without a base" 'expected "rope_theta" in "rope_parameters", found none' rope_parameters -
    changed "groups that are not alike" '"n_group": expected groups of two experts or more, all alike, of which "topk_group" 1 stay, found 3 of 4 experts' n_group 3
    changed "more experts for a token than groups leave" '"num_experts_per_tok": expected at most 2, found 3' n_group 2 num_experts_per_tok 3
    changed "more experts for a token than there are" '"num_experts_per_tok": expected at most 4, found 5' num_experts_per_tok 5
    changed "two modules" '"num_nextn_predict_layers": expected an integer 0..1, found 2' num_nextn_predict_layers 2
    changed "another way to teach indexers" '"indexer_train": expected off|kl|dense, found "fast"' indexer_train '"fast"'
    changed "another target" '"indexer_kl_target": expected group_average|source_layer, found "all"' indexer_kl_target '"all"'
    changed "a rate below 0" '"bias_update_rate": expected a number 0..1' bias_update_rate -1
    changed "a token that fills and is none" '"pad_token_id": expected an integer 0..256, found 257' pad_token_id 257
    for key in 'scoring_func "softmax"' 'topk_method "greedy"' 'hidden_act "gelu"' 'num_key_value_heads 1' 'qk_head_dim 12' 'moe_layer_freq 2' 'rope_interleave false' \
        'mlp_bias true' 'tie_word_embeddings true' 'attention_dropout 0.1'; do
        changed "another ${key% *}" "\"${key% *}\": this trainer computes" ${key% *} "${key#* }"
        is_quick && break
    done
    while read -r key least i; do
        changed "$key beyond $i" "\"$key\": expected an integer $least..$i, found $((i + 1))" $key $((i + 1))
        is_quick && break
        changed "$key below $least" "\"$key\": expected an integer $least..$i, found $((least - 1))" $key $((least - 1))
        changed "no $key" "\"$key\": expected an integer $least..$i, found nothing" $key -
    done <<'KEYS'
index_topk 1 16777216
index_n_heads 1 4096
KEYS
}

# ---- files: probes and folders ----

files() {
    local name i
    echo "# probes: NumPy, before and after saving"
    for name in tiny other taught plain; do
        is_quick && [[ $name == plain || $name == other ]] && continue
        rm -rf hf again before after truth
        rows 19 >in
        go --config $name.json --export-hf hf --probe in --probe-out before
        check "$name: a probe has logits, both losses and the gradient of every tensor" \
            test "$(tensors before '^grad\.' | wc -l) $(tensors before '^(logits|loss|cross_entropy)$' | wc -l)" = "$(shapes hf | wc -l) 3"
        check "... the module's loss, and of each indexer that learns" test "$(tensors before '^(mtp_loss|index_loss)$' | cut -d' ' -f1 | sort | xargs)" = "$([ $name = taught ] && echo index_loss mtp_loss)"
        "$python" "$root/dev/ref/glm5.py" --from hf --probe in --probe-out truth >err 2>&1 && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... which are to the last bit those of dev/ref/glm5.py" "$(<err)"
        go --from hf --probe in --probe-out after --threads 3 --head-rows 4 --recompute 3 --export-hf again && cmp before after && cmp {hf,again}/model.safetensors && cmp {hf,again}/config.json
        verdict $? "... from the saved folder, other threads, few rows of the head: the same bytes" "$(<err)"
    done

    echo "# choices that are given"
    go --config taught.json --indexer off --probe in --probe-out before && go --config taught.json --indexer off --probe in --probe-out after --inject before && cmp before after
    verdict $? "--inject of what the probe has chosen itself: the same bytes" "$(<err)"
    for i in 2:9 0:2 9:0; do rename before "choice(.*)layers\.${i%:*}\.self" "choice\1layers.${i#*:}.self"; done
    rm -f other_choice && go --config taught.json --indexer off --probe in --probe-out other_choice --inject before
    check "... of what two indexers have chosen for each other: other logits" test -s other_choice -a "$(cmp -s <(tensors after '^logits') <(tensors other_choice '^logits'); echo $?)" = 1

    echo "# training that goes on from folders"
    rows 19 >in
    rm -rf hf && go "${start[@]}" --config mtp.json --export-hf hf && rewrite hf fused 'fuse()'
    i=("${start[@]:2}" --from fused --schedule constant --warmup 0)
    rm -rf leg whole && go "${i[@]}" --run whole && go "${i[@]}" --steps 2 --run leg && go --resume --run leg --steps 4 --export-hf again && same_run whole leg
    verdict $? "experts of a layer in one tensor; stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
    rm -rf shards && go --from hf --export-hf shards --shard-gb 2e-5 && go --from shards --probe in --probe-out after && go --from hf --probe in --probe-out before && cmp before after
    verdict $? "a folder of $(ls shards/*.safetensors | wc -l) shards: the same probe" "$(<err)"
    rewrite hf f16 't |= {n: ("F16", s, b"\1\x3c" * s[0]) for n, (d, s, x) in t.items() if n.endswith("norm.weight")}'
    rm -rf as_read && go "${start[@]:2}" --from f16 --steps 2 --freeze first:1 --export-hf as_read --export-dtype as-read && go --from as_read --eval-only --val text --seq-len 16
    verdict $? "--export-dtype as-read after training: a folder that is read again" "$(<err)"
    check "... what was frozen has the folder's bytes, vectors too" test "$(comm -23 <(numbers f16 | sort) <(numbers as_read | sort) | grep -cE '^model\.layers\.0\.')" = 0
    go --from hf --weights fp8 --eval-only --val text --seq-len 15
    check "--weights fp8 of floats: rounded, which the box says" test "$(grep -c 'rounded to fp8' out)" = 1
    local loss=$(grep 'val loss' out)
    go --from hf --weights fp8 --act-fp8 1 --eval-only --val text --seq-len 15
    check "... and their inputs, by --act-fp8 1: another loss" test "$(grep -c 'rounded to fp8' out)" = 2 -a -n "$loss" -a "$loss" != "$(grep 'val loss' out)"

    echo "# a run and its files"
    rm -rf run && go "${mixed[@]}" --config taught.json --ema 0.9 --tensorboard 1 --run run
    router_keys
    rm -rf with && go "${start[@]}" --config plain.json --run with
    check "... and without experts has not one of them" test "$(grep -cE 'cross_entropy|idle_experts' with/metrics.jsonl)" = 0
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 8 val_loss)")"
    rm -rf exported && go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000008 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
    go --from run --ema-weights 1 --export-hf averaged
    check "--ema-weights: another model" test "$(cmp -s {averaged,exported}/model.safetensors; echo $?)" = 1
}

# ---- what indexers, routers and the module learn ----

learning() {
    echo "# indexers, routers, the token after the next"
    local i
    learn() { rm -rf with && go "${start[@]}" "$@" --run with; }  # OPTION...
    moved() { comm -13 <(tensors begun/model.safetensors . | sort) <(tensors "$(last with)/model.safetensors" . | sort) | cut -d' ' -f1; }
    go --config mtp.json --export-hf begun
    learn --config mtp.json --bias-rate 0
    check "indexers and biases of routers stay as they are, all else moves" test "$(moved | grep -cE 'indexer|e_score') $(moved | wc -l)" = "0 $(($(shapes begun | wc -l) - 3 * 5 - 4))"
    learn --config mtp.json --bias-rate 0.01 --steps 3
    check "--bias-rate: biases move by it, the module's too" test "$(moved | grep -c e_score)" = 4
    check "... by 3 steps of 0.01, up, down or, where an expert has its share, none" "$python" - <<'PYTHON'
import struct, json
data = open("with/step_000003/model.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
for name, t in json.loads(data[8:8 + n]).items():
    if name.endswith("e_score_correction_bias"):
        a, b = t["data_offsets"]
        x = struct.unpack(f"<{(b - a) // 4}f", data[8 + n + a:8 + n + b])
        assert any(x) and all(abs(y / 0.01 - round(y / 0.01)) < 1e-4 and abs(y) < 0.031 for y in x), (name, x)
PYTHON
    for i in kl dense; do
        learn --config mtp.json --indexer $i
        check "--indexer $i: five tensors of each of three indexers learn, and the log has their loss" test "$(moved | grep -cE "$index") $(grep -cE '"index_loss": [0-9.]+' with/metrics.jsonl)" = "15 4"
        learn --config mtp.json --indexer $i --indexer-alone 1
        check "... --indexer-alone: the box says that biases stay" test "$(boxed balance 'bias stays, loss 0.1 for each sequence')" = 1
        check "... they alone learn" test "$(moved | grep -cE "$index") $(moved | grep -vcE "$index")" = "15 0"
    done
    edit mtp.json alone.json indexer_kl_target '"source_layer"' && rm -rf other
    learn --config mtp.json --indexer kl --indexer-alone 1 --steps 1 && mv with other && learn --config alone.json --indexer kl --indexer-alone 1 --steps 1
    check "indexer_kl_target: it says whether what other layers look at teaches an indexer that they share; the module's own is shared by none" \
        test "$(comm -13 <(tensors other/step_000001/model.safetensors . | sort) <(tensors with/step_000001/model.safetensors . | sort) |
            grep -oE 'layers\.[0-9]\.self_attn\.indexer' | sort -u | xargs)" = "layers.0.self_attn.indexer layers.2.self_attn.indexer"
    edit mtp.json twice.json indexer_kl_coeff 0 && learn --config twice.json --indexer kl --weight-decay 0
    check "indexer_kl_coeff 0: a loss that teaches nothing" test "$(moved | grep -cE "$index") $(grep -cE '"index_loss": [0-9.]+' with/metrics.jsonl)" = "0 4"
    refuse "a module that the run has learnt, left out on the way" "--mtp: the run began with 1: choose another --run, or leave it out" --resume --run with --mtp 0
    go "${start[@]:2}" --from with --mtp 0 --steps 1 --run without
    check "--mtp 0 of a folder that has it: a line" grep -q '/model.safetensors: 35 tensors of the module that predicts the token after the next are left out, as --mtp 0 says: keep this folder$' err
    learn --config tiny.json --indexer dense --val-fraction 0.1 --eval-every 2
    check "--indexer dense: validations are of the model that is saved, which chooses index_topk positions" \
        test "$(go --from with --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value with 4 val_loss)")"
    edit tiny.json all.json index_topk 48
    learn --config all.json --clip 0 && mv with whole && learn --config all.json --indexer dense --clip 0
    check "... and shares nothing with the rest but the norm that --clip looks at" \
        cmp <(tensors whole/step_000004/model.safetensors '^((?!indexer).)*$') <(tensors with/step_000004/model.safetensors '^((?!indexer).)*$')
    nothing_counts mtp index --config taught.json
    is_quick && return
    rm -rf longer && go "${start[@]}" --indexer kl --indexer-alone 1 --steps 60 --run longer
    check "... whose loss falls" below "$(value longer 60 index_loss)" "$(value longer 1 index_loss)"
    learn --config mtp.json --mtp-weight 0
    check "--mtp-weight 0: the module stays, and is no part of the losses" test "$(moved | grep -c 'layers\.4\.') $(grep -c mtp_loss with/metrics.jsonl)" = "0 0"
    edit mtp.json detached.json mtp_detach true && learn --config detached.json --mtp 0 --clip 0 && mv with apart && learn --config detached.json --clip 0
    check "mtp_detach: the rest learns as without the module" cmp <(tensors apart/step_000004/model.safetensors .) <(tensors with/step_000004/model.safetensors '^(?!model\.layers\.4\.)')
    check "... which learns" test "$(moved | grep -c 'layers\.4\.')" -gt 20
    learn --config mtp.json --mtp 0
    check "--mtp 0: a model without" test "$(shapes with/step_000004 | grep -c 'layers\.4\.') $(grep -c '"num_nextn_predict_layers": 0' with/step_000004/config.json)" = "0 1"
    go "${start[@]:2}" --from with --mtp 1 --freeze 'model.embed*,model.norm*,lm_head*,*layers.[0-3].*' --run grown --export-hf exported &&
        cmp <(tensors with/step_000004/model.safetensors .) <(tensors exported/model.safetensors '^(?!model\.layers\.4\.)')
    verdict $? "--mtp 1 of a folder without, all else frozen: the same parameters and a module" "$(<err)"
    refuse "a new module in an export" "--mtp: 1 gives a new module to a model that is trained, all of it, with --mtp-weight above 0" --from with --mtp 1 --export-hf grown
    rm -rf with && go "${start[@]}" --config mtp.json --steps 8 --run with
    check "loss = cross_entropy + 0.5 mtp_loss + 0.1 of a balance of three layers, and no z-loss is spoken of" "$python" -c 'import json
for r in map(json.loads, open("with/metrics.jsonl")):
    if r.get("loss") is not None:
        more = (r["loss"] - r["cross_entropy"] - 0.5 * r["mtp_loss"]) / 0.1
        assert 2.7 < more < 6.0, (more, r)
    assert "z" not in r, r'
    rm -rf with && tr -d ' ' <text >blanks && go "${start[@]}" --config other.json --steps 1 --weight-decay 0 --lr 1e-1 --run with && go --config other.json --export-hf begun
    check "pad_token_id: the row of the token that fills does not learn, others do" "$python" - begun/model.safetensors with/step_000001/model.safetensors <<'PYTHON'
import json, struct, sys
rows = []
for path in sys.argv[1:]:
    data = open(path, "rb").read()
    n = struct.unpack("<Q", data[:8])[0]
    a, b = json.loads(data[8:8 + n])["model.embed_tokens.weight"]["data_offsets"]
    rows.append([data[8 + n + a + 64 * i:8 + n + a + 64 * i + 64] for i in range((b - a) // 64)])
before, after = rows
assert before[32] == after[32] and before[101] != after[101]  # " ", "e"
PYTHON
}

# ---- adapters ----

adapters() {
    echo "# adapters"
    local i
    go "${start[@]}" --config mtp.json --steps 150 --batch-size 8 --lr 3e-2 --export-hf base --run book
    local tune=(--from base --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 3e-2 --steps 8)
    has() { tensors "$(last $1)/adapter_model.safetensors" "$2" | wc -l; }  # RUN REGEX
    go "${tune[@]}" --run adapter
    check "beside all five matrices of attention of each layer but the module's, by PEFT's names, not a word" \
        test "$(has adapter '^base_model\.model\.model\.layers\.[0-3]\.self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.lora_B\.weight$') $(has adapter lora_B) $(wc -l <err)" = "20 20 0"
    check "... and README.md has PEFT's line" grep -q 'PeftModel.from_pretrained' "$(last adapter)/README.md"
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    go --from base --lora adapter --merge 1 --export-hf merged
    check "... merged: the text that base and adapter write, and not the base's" \
        test "$(write --from merged)" = "$(write --from base --lora adapter)" -a "$(write --from base)" != "$(write --from merged)"
    check "... from the cache of short vectors too, with the adapter of kv_b_proj in both of its halves" test "$(write --from base --lora adapter --absorb)" = "$(write --from merged --absorb)"
    check "... what has no adapter goes along, bit for bit" cmp <(numbers base | grep -v '[0-3]\.self_attn\.[a-z_]*proj' | sort) <(numbers merged | grep -v '[0-3]\.self_attn\.[a-z_]*proj' | sort)
    go --from base --lora adapter --export-lora lent && cmp {lent,"$(last adapter)"}/adapter_model.safetensors
    verdict $? "--export-lora: the same file" "$(<err)"
    rm -rf other && go "${tune[@]}" --recompute 3 --head-rows 5 --threads 2 --run other
    check "--recompute 3 --head-rows 5 --threads 2: the same adapter" same_run adapter other
    rm -rf leg other && go "${tune[@]}" --schedule constant --warmup 0 --run other && go "${tune[@]}" --schedule constant --warmup 0 --steps 4 --run leg && go --resume --run leg --steps 8
    check "... stopped after 4 of 8 updates, resumed: the same adapter" same_run leg other
    rm -rf next && go "${tune[@]:0:2}" "${tune[@]:4}" --lora adapter --run next
    check "--lora: it goes on to learn" test "$(has next lora_B) $(same_model adapter next; echo $?)" = "20 1"
    go "${tune[@]}" --lora-targets all-linear --lora-parameters mlp.experts.gate_up_proj,mlp.gate.weight --run wide
    check "--lora-targets all-linear, experts and routers: no indexer, no module, nor MLPs and shared experts, which PEFT takes for experts" test "$(has wide 'shared_experts\..*lora_B') $(has wide 'layers\.0\.mlp\..*lora_B') $(has wide indexer) $(has wide 'layers\.4') $(has wide 'mlp\.(experts|gate)\..*lora_B')" = "0 0 0 0 6"
    go "${tune[@]}" --lora-targets gate_proj --steps 1 --run named
    check "... where they are named, a line says so" test "$(has named 'layers\.0\.mlp\.gate_proj\.lora_B') $(grep -c '^train_glm5: --lora-targets: .*layers.0.mlp.gate_proj and its like are called as experts. modules are: PEFT 0.21 cannot load their adapters$' err)" = "1 1"
    rm -rf named
    go "${tune[@]}" --lora-targets kv_b_proj,o_proj --steps 1 --run named
    check "--lora-targets kv_b_proj,o_proj: these" test "$(has named '(kv_b|\.o)_proj\.lora_B') $(has named lora_B)" = "8 8"
    for i in "alpha 7" "rslora 1" "dropout 0.5" "alpha-pattern o_proj=20" "rank-pattern layers\\.0\\..*=4"; do
        rm -rf other && go "${tune[@]}" --lora-${i% *} "${i#* }" --run other
        check "--lora-${i% *} ${i#* }: another adapter" test "$(same_model adapter other; echo $?)" = 1
    done
    refuse "an adapter of indexers" "--lora-targets: expected ends of the names of this model's linear layers that may have adapters, q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj, gate_proj, up_proj, down_proj, found \"indexer.wk\"" "${tune[@]}" --lora-targets indexer.wk
    rewrite base rounded 't = {n: (d, s, b"".join(b"\0\0" + x[i + 2:i + 4] for i in range(0, len(x), 4))) if d == "F32" else (d, s, x) for n, (d, s, x) in t.items()}'
    rows 16 >in
    mkdir alone && cp "$(last adapter)"/adapter_* alone
    for i in fp32 bf16; do go --from rounded --lora alone --weights $i --probe in --probe-out $i.out; done
    check "a base in bf16 that fits: the same probe as in fp32" cmp fp32.out bf16.out
    shown() { grep -oE '^\| (mtp-weight|indexer|bias-rate|seq-balance) *\| [^ ]*' out | tr -d '|' | xargs; }  # that are not as --help has them
    go "${tune[@]}" --from "" --config taught.json --steps 1 --run beside
    check "what an adapter leaves as it is, the table of settings has as off or 0" test "$(shown)" = "seq-balance 0.1 mtp-weight 0"
    go "${start[@]}" --config taught.json --steps 1 --run whole
    check "... of a whole model it has what config.json says" test "$(shown)" = "indexer kl bias-rate 0.01 seq-balance 0.1 mtp-weight 0.5"
    go --from whole --export-hf exported
    check "... of an export nothing, and no indexer learns there" test "$(shown)$(boxed '  indexers' '.* choose [0-9]* positions')" = 1
    for i in indexer mtp-weight bias-rate; do
        refuse "--$i beside an adapter" "--$i: is not for adapters, beside which" "${tune[@]}" --$i $([ $i = indexer ] && echo kl || echo 0.5)
    done
    adapter_resumes "--seq-balance beside start values" --model tiny --seq-balance 0.9
    adapter_resumes "--seq-balance beside a folder" --from base --seq-balance 0
    adapter_resumes "--mtp 0 of a config.json that has it" --config mtp.json --mtp 0
    refuse "a new module beside an adapter, of a new model too" "--mtp: 1 gives a new module to a model that is trained, all of it, with --mtp-weight above 0" --model tiny --train text --lora-rank 2 --mtp 1
}

# ---- the same bits another way ----

bits() {
    echo "# the same bits"
    local i
    for i in $(is_quick && echo taught || echo tiny taught other plain); do resumed_bits $i "${mixed[@]}"; done
    talks_bits $(is_quick && echo 40 || echo 200) choices
    is_quick || documents_bits "${mixed[@]}" --config taught.json
}

# ---- ranks ----

ranks() {
    echo "# ranks: updates of four micro-batches on 2 and 4"
    export COMM_CHECK=1  # no rank may come by another call than its neighbour
    need_build launch "" launch
    local run=("${mixed[@]}")
    shared() { on_ranks trainer "$@" && echo $1 >>"$typed"; }  # DIVIDED PROMISE RANKS/SIZE... OPTION...
    if is_quick; then
        shared --zero "all that learns" "2/2" --config taught.json
        shared --ep "experts" "2/2" --config taught.json
        shared --pp "layers" "2/2" --config taught.json
        shared --tp "matrices" "2/2" --config taught.json
        unset COMM_CHECK
        return
    fi
    shared --zero "all that learns" "2/0 2/1 2/2 4/2" --config taught.json --ema 0.9
    shared --zero "documents" "2/2" --config taught.json --doc-reset 1 --train documents
    shared --zero "an adapter" "2/2" --lora-rank 3 --lora-dropout 0.2
    shared --ep "experts" "2/2 4/2 4/4 4/2/--recompute,3" --config taught.json --ema 0.9
    shared --ep "groups of experts" "2/2" --config other.json
    shared --ep "some frozen" "4/2" --config taught.json --freeze '*.experts.1.*,first:1'
    shared --pp "layers" "2/2 4/2/--zero,2 2/2/--recompute,0" --config taught.json --ema 0.9
    shared --pp "layers in two chunks for each rank" "2/2/--pp-chunks,2" --config apart.json && echo --pp-chunks >>"$typed"
    shared --pp "an adapter" "2/2" --lora-rank 3
    shared --tp "matrices" "2/2 4/2/--ep,4" --config taught.json --ema 0.9
    shared --tp "an adapter" "2/2" --lora-rank 3
    rm -rf two four && "$launch" -n 2 "$trainer" "${run[@]}" --config taught.json --cp 2 --run two >out 2>err </dev/null &&
        "$launch" -n 4 "$trainer" "${run[@]}" --config taught.json --cp 2 --run four >out 2>err </dev/null && same_run two four && echo --cp >>"$typed"
    verdict $? "--cp 2: the bytes of two ranks from four" "$(tail -n 1 err)"
    shared --ep "room for three times as many rows" "2/2/--ep-room,3,--comm-timeout,60,--init-timeout,60" && printf '%s\n' --ep-room --comm-timeout --init-timeout >>"$typed"
    go "${mixed[@]}" --config taught.json --ep 2 --plan 2
    check "--plan 2: what two ranks send and keep" test "$(boxed '  sent per update' '[0-9.]+ [KM]iB.*') $(boxed '  of them' '2 on each of 2 ranks')" = "1 1"
    sends trainer "  of them|  rows sent" 2 --config taught.json --ep 2 --val-fraction 0
    edit plain.json module.json num_nextn_predict_layers 1  # whose experts are the module's alone
    sends trainer "  parts sent|matrices" 2 --config module.json --tp 2 --val-fraction 0
    unset COMM_CHECK
    rm -rf whole several && go "${mixed[@]}" --config taught.json --run whole
    "$launch" -n 2 "$trainer" "${mixed[@]}" --config taught.json --ep 2 --run several >out 2>err </dev/null
    rm -rf several/step_000008
    "$launch" -n 2 "$trainer" --resume --run several --ep 1 --zero 2 >out 2>err </dev/null && same_run whole several
    verdict $? "written by 2 ranks, --ep 2, resumed by 2, --zero 2: the bytes of one rank" "$(tail -n 1 err)"
    rm -rf several meet
    timeout 60 "$trainer" "${mixed[@]}" --config taught.json --run several --rank 1/2@./meet >/dev/null 2>second </dev/null &
    go "${mixed[@]}" --config taught.json --run several --rank 0/2@./meet && wait $! && same_run whole several
    verdict $? "--rank, started by hand: the bytes of one rank" "$(cat second err)"
    refused "Muon with --zero 2" "--optimizer: muon needs whole matrices: several ranks want --zero 0 or 1, without --tp, --ep" "$launch" -n 2 "$trainer" "${mixed[@]}" --optimizer muon --zero 2
    refused "--ep that does not divide the experts" "--ep: 4: expected a number that divides the 6 experts" "$launch" -n 4 "$trainer" "${mixed[@]}" --config six.json --ep 4
}

# ---- kill -9 and --resume ----

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --recompute, --head-rows"
    RANDOM=13
    killed $(((kills + 1) / 2)) "all that learns" --config taught.json
    is_quick && return
    killed $((kills / 2)) "documents" --config other.json --grad-accum 2 --doc-reset 1 --train documents
}

# ---- text ----

book_writes() { go --from book --max-new-tokens 40 --temperature 0 --absorb $absorb "$@" && cat out; }  # for greedy

text() {
    echo "# text, from a cache of the keys and values of all heads and from one of short vectors"
    local name one absorb i
    for name in $(is_quick && echo tiny || echo tiny other plain); do
        absorb=0
        greedy $name "keys and values of all heads"
        absorb=1
        check "... the same text from short vectors" test "$(book_writes --generate "line 7")" = "$one"
        for i in 6 17 31; do
            check "... and where a prompt has $i bytes of it" test "$one" = "$(book_writes --generate "${one:0:i}" --max-new-tokens $((46 - i)))"
        done
        check "... which one pass of the whole text would have as last" test "$(book_writes --generate "${one:0:45}" --max-new-tokens 1)" = "${one:0:46}"
    done
    memory() { go --config wide.json --generate a --samples 64 --generate-batch 64 --max-new-tokens 20000 --dry-run "$@" && awk '/^\| memory  / { print $4 * ($5 == "GiB" ? 1024 : 1) }' out; }  # MiB
    edit tiny.json wide.json max_position_embeddings 20100 num_attention_heads 16 qk_nope_head_dim 8 v_head_dim 8 index_topk 20100
    check "--absorb: of 16 heads of 8 + 8 numbers, and 4 that turn, 6 + 4 numbers are left: the caches of 64 texts take 1/26 of the memory" \
        test "$(awk "BEGIN { x = ($(memory) - $(memory --absorb)) * 1048576 / (64 * 20001 * 4 * 4 * (260 - 10)); print (x > 0.95 && x < 1.05) }")" = 1
    check "a text of 10000 positions more needs their caches and no more: its prompt comes in pieces" \
        test "$(awk "BEGIN { x = ($(memory) - $(memory --max-new-tokens 10000)) * 1048576 / (64 * 10000 * 4 * 4 * 260); y = ($(memory --samples 1) - $(memory --samples 1 --max-new-tokens 10000)) * 1048576 / (10000 * 4 * 4 * 260); print (x > 0.97 && x < 1.03 && y > 0.95 && y < 1.1) }")" = 1
    workspace() { go --config wide.json --val text --seq-len 1024 --batch-size 4 --dry-run "$@" && awk '/^\|   workspace, rest/ { print $5 * ($6 ~ /MiB/ ? 1024 : 1) }' out; }  # KiB
    check "--eval-only counts no scratch of a backward pass" \
        test "$(awk "BEGIN { of_one = $(workspace --eval-only); print (of_one > 0 && of_one < 0.5 * $(workspace)) }")" = 1
    write_prompts >short.jsonl
    at_once --from book
    is_quick && return
    at_once --from book --absorb 1
    go --from book --generate "line 7" --temperature 0 --max-new-tokens 150 --generate-batch 1 && mv out once
    check "150 tokens in 48 positions: they begin as 40 do" test "$(head -c ${#one} once)" = "$one"
    echo "# sampling"
    local base way
    drawn() { go --from book --generate "line " --max-new-tokens 60 --seed 3 "$@" && cat out; }
    base=$(drawn)
    for way in "temperature 2" "top-k 2" "top-p 0.3" "min-p 0.5" "repetition-penalty 2" "prompt-eot 0" "stop e" "seed 4"; do
        check "--$way: another text" test "$(drawn --${way% *} ${way#* })" != "$base"
    done
    check "--temperature 0 is --top-k 1" test "$(drawn --temperature 0)" = "$(drawn --top-k 1)"
}

# ---- conversations ----

talks() {
    echo "# conversations"
    local i learned
    edit tiny.json long.json max_position_embeddings 200
    for i in {1..9}; do
        echo "{\"messages\":[{\"role\":\"user\",\"content\":\"$i\"},{\"role\":\"assistant\",\"content\":\"<think>\\nhm\\n</think>\\n\\n$((i * i))\"},{\"role\":\"user\",\"content\":\"b\"},{\"role\":\"assistant\",\"content\":\"bb\"}]}"
    done >talks.jsonl
    echo '{"messages":[{"role":"user","content":"7"}]}' >asked.jsonl
    local run=(--config long.json --train talks.jsonl --chat-template chatml --seq-len 190 --batch-size 2 --lr 1e-2 --steps 4)
    go "${run[@]}" --learn last --eval-generate asked.jsonl --sample-every 2 --max-new-tokens 5 --run last
    check "--learn last, and --eval-generate: last answers are learned, one question is answered twice" test "$(boxed '  learned' '.*, last answers') $(wc -l <last/answers.jsonl)" = "1 2"
    go "${run[@]}" --seq-len 60 --truncate end --run cut
    check "--truncate end: all lose their end" test "$(boxed '  cut' '9 samples lost their end')" = 1
    go "${run[@]}" --chat-template qwen3.6 --run thinks && learned=$(grep '  learned' out)
    go "${run[@]}" --chat-template qwen3.6 --preserve-thinking 1 --run preserved
    check "--preserve-thinking 1: earlier answers have their thoughts" test -n "$learned" -a -n "$(grep '  learned' out)" -a "$(grep '  learned' out)" != "$learned"
    for i in 0 1; do go --from thinks --generate-file asked.jsonl --max-new-tokens 30 --temperature 0 --think $i && mv out think_$i; done
    check "--think 0: another prompt, another answer" test "$(wc -l <think_0) $(cmp -s think_0 think_1; echo $?)" = "1 1"
    go "${run[@]}" --steps 60 --lr 3e-2 --run speaks && go --from speaks --generate-file asked.jsonl --max-new-tokens 5 --temperature 0
    learned=$("$python" -c 'import json; print(json.loads(open("out").readline())["answer"])')
    printf '7\nb\n' | timeout 60 "$trainer" --from speaks --chat --max-new-tokens 5 --temperature 0 >out 2>err
    check "--chat: two turns, two answers, the first that of --generate-file" test "$? $(head -n 1 out)" = "0 $(head -n 1 <<<"$learned")" -a "$(wc -l <out)" -ge 2 -a ! -s err
    echo --chat >>"$typed"
    answer() { echo 7 | timeout 60 "$trainer" "$@" --chat --max-new-tokens 5 --temperature 0 2>err || cat err; }
    go --config long.json --export-hf bare  # a base that has no template
    for i in glm5 chatml; do
        rm -rf adapted lent whole goes && go --from bare --lora-rank 3 "${run[@]:2}" --chat-template $i --run adapted
        go --from bare --lora adapted --export-lora lent && go --from bare --lora adapted --merge --export-hf whole
        cmp "$(last adapted)/chat_template.jinja" lent/chat_template.jinja && cmp {lent,whole}/chat_template.jinja
        verdict $? "$i: an adapter that leaves its run, alone or in its model, takes its template along" "$(ls lent whole)"
        check "... by which one chats with either as with the run" test -n "$(answer --from bare --lora adapted)" -a "$(answer --from bare --lora adapted)" = "$(answer --from bare --lora lent)" \
            -a "$(answer --from bare --lora adapted)" = "$(answer --from whole)"
        go --from bare --lora lent "${run[@]:2:2}" "${run[@]:6}" --run goes && cmp lent/chat_template.jinja "$(last goes)/chat_template.jinja"
        verdict $? "... and goes on to learn, without an option, and takes it along again" "$(boxed 'chat template' $i)"
    done
    mkdir bald && cp lent/adapter_* bald && go --from bare --lora bald --chat-template chatml --export-lora told && go --from bare --chat-template chatml --export-hf named
    check "a template that is typed at an export goes along" cmp {told,named}/chat_template.jinja
    check "... in place of the adapter's own, and is one" test "$(go --from bare --lora lent --chat-template glm5 --export-lora other; cmp -s {other,lent}/chat_template.jinja; echo $?)" = 1
    refuse "a template that nobody knows, at an export" "--chat-template: expected chatml|qwen2|" --from bare --chat-template llama --export-hf x
}

# ---- nothing is left out ----

# the last part: what all others together have typed
typed() {
    local name missing=""
    go --help
    for name in $(sed -n 's/^  --\([a-z0-9-]*\).*/\1/p' out); do
        grep -qx -- "--$name" "$typed" || missing+=" $name"
    done
    check "each option of --help has been given to a run that ended well, but for three for GPUs (not:$missing)" \
        test "$missing" = " plan-card plan-rate graph"
}

run_parts $parts
