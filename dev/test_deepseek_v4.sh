#!/usr/bin/env bash
# train_deepseek_v4 as its user meets it: presets, options, config.json, files, training of indexers and routers, adapters, ranks, kills,
# generation. What it computes is held against transformers by dev/ref/check_hf.py --model deepseek_v4, against numbers of a
# tiny model by dev/ref/deepseek_v4_checks.py --probe-with, against PEFT by dev/ref/check_lora.py.
#     dev/test_deepseek_v4.sh                  all parts
#     dev/test_deepseek_v4.sh options ranks    some of them: presets options configs files learning adapters bits ranks kills text
#     dev/test_deepseek_v4.sh quick            of all but options and adapters the most telling
#     KILLS=100 dev/test_deepseek_v4.sh kills  more random kills than 8
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 1 || echo 8)}
parts=${*:-$(is_quick && echo presets configs learning bits ranks kills || echo presets options configs files learning adapters bits ranks kills text)}

need_build trainer "CPU=1" train_deepseek_v4
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files: small models ----

write_texts
# a window of 5, entries of 3 and of 7 tokens, of which the first kind's are chosen: T 16 crosses all of it
echo '{"model_type":"deepseek_v4","vocab_size":257,"hidden_size":16,"num_hidden_layers":3,"max_position_embeddings":48,"num_attention_heads":4,
"head_dim":8,"qk_rope_head_dim":4,"q_lora_rank":10,"o_groups":2,"o_lora_rank":6,"sliding_window":5,"index_n_heads":3,"index_head_dim":6,
"index_topk":2,"hc_mult":3,"hc_sinkhorn_iters":4,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"swiglu_limit":1.0,
"layer_types":["sliding_attention","compressed_sparse_attention","heavily_compressed_attention"],"mlp_layer_types":["hash_moe","moe","moe"],
"compress_rates":{"compressed_sparse_attention":3,"heavily_compressed_attention":7}}' >tiny.json
edit tiny.json mtp.json num_nextn_predict_layers 1 mtp_weight 0.5 seq_balance_coef 0.1 bias_update_rate 0.01
edit mtp.json taught.json indexer_train '"kl"'
edit tiny.json windows.json layer_types '["sliding_attention","sliding_attention"]' mlp_layer_types '["moe","moe"]' num_hidden_layers 2
edit tiny.json chosen.json layer_types '["compressed_sparse_attention","compressed_sparse_attention"]' mlp_layer_types '["hash_moe","hash_moe"]' \
    num_hidden_layers 2 hc_mult 1 o_groups 1 rope_parameters '{"main":{"rope_type":"default","rope_theta":10000},"compress":{"rope_type":"yarn",
    "rope_theta":100,"factor":4,"original_max_position_embeddings":64,"beta_fast":8,"beta_slow":1}}'
edit taught.json deep.json num_hidden_layers 4 layer_types '["sliding_attention","compressed_sparse_attention","heavily_compressed_attention",
    "compressed_sparse_attention"]' mlp_layer_types '["hash_moe","moe","moe","moe"]'  # for --pp
edit tiny.json six.json n_routed_experts 6
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
mixed=("${start[@]}" --grad-accum 4 --steps 8 --val-fraction 0.1 --eval-every 4 --sample-every 4 --max-new-tokens 8 --save-every 4)

# Python of `rewrite`: of official names those that transformers writes; and those that it has in memory, experts of a layer as one tensor
written='t = {n if n == "head.weight" or n.startswith("mtp.") else "model.embed_tokens.weight" if n == "embed.weight" else
    re.sub(r"^hc_head_", "model.hc_head.hc_", n) if n.startswith("hc_head") else "model." + n.replace(".kv_norm.", ".norm."): x for n, x in t.items()}'
in_memory='pairs = (("hc_attn_", "attn_hc."), ("hc_ffn_", "ffn_hc."), ("attn_norm.", "input_layernorm."), ("ffn_norm.", "post_attention_layernorm."),
    ("attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj"), ("attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj"),
    ("attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias"), ("attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm"),
    ("attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj"), ("attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj"),
    ("attn.compressor.wkv", "self_attn.compressor.kv_proj"), ("attn.compressor.wgate", "self_attn.compressor.gate_proj"),
    ("attn.compressor.ape", "self_attn.compressor.position_bias"), ("attn.compressor.norm", "self_attn.compressor.kv_norm"),
    ("attn.wq_a", "self_attn.q_a_proj"), ("attn.q_norm", "self_attn.q_a_norm"), ("attn.wq_b", "self_attn.q_b_proj"), ("attn.wkv", "self_attn.kv_proj"),
    ("attn.kv_norm", "self_attn.kv_norm"), ("attn.attn_sink", "self_attn.sinks"), ("attn.wo_a", "self_attn.o_a_proj"), ("attn.wo_b", "self_attn.o_b_proj"),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"), ("ffn.", "mlp."), ("experts.w1", "experts.gate_proj"), ("experts.w3", "experts.up_proj"),
    ("experts.w2", "experts.down_proj"))
def name(n):
    if n.startswith("mtp."): return n
    if not n.startswith("layers."):
        return {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight", "norm.weight": "model.norm.weight"}.get(n, n.replace("hc_head_", "model.hc_head.hc_"))
    _, l, rest = n.split(".", 2)
    for old, new in pairs:
        if rest.startswith(old) or ".experts" not in n and "shared" in rest and old in rest: rest = rest.replace(old, new)
    return f"model.layers.{l}.{rest}"
t = {name(n): x for n, x in t.items()}
t = {re.sub(r"(experts\.\d+\.)w([123])\.", lambda m: m[1] + {"1": "gate", "2": "down", "3": "up"}[m[2]] + "_proj.", n) if not n.startswith("mtp.") else n: x for n, x in t.items()}
outside = {n: t.pop(n) for n in [n for n in t if n.startswith("mtp.")]}
fuse()
t.update(outside)'

# ---- presets ----

presets() {
    echo "# presets"
    local name count
    while read -r name count; do
        timeout 60 "$trainer" --model $name --plan 1 --seq-len 64 --batch-size 1 >out 2>err
        check "$name: $count parameters" test "$(boxed parameters "[0-9.]*[kMBT] = $count( .padded: [0-9]*.)?")" = 1
    done <<'SIZES'
tiny 378517
small 191881013
deepseek-v4-flash 290942289362
deepseek-v4-pro 1598837347742
SIZES
    timeout 60 "$trainer" --model deepseek-v4-flash --plan 1 --seq-len 64 --batch-size 1 >out 2>err
    check "... its box: streams, attention, entries, experts" test "$(boxed model '43 layers, 4 streams of 4096 channels, 1048576') $(
        boxed '  attention' '64 heads of 512, one of keys, 64 channels turn, a') $(boxed '  entries' 'of 4 tokens in 21 layers, of which an indexer') $(
        boxed '' 'of 128 tokens in 20 layers') $(boxed experts '256 in a layer, 2048 wide, a token takes 6 and') $(boxed '  by token' 'in 3 layers')" = "1 1 1 1 1 1"
    timeout 60 "$trainer" --model tiny --dry-run --batch-size 65536 --seq-len 256 --head-rows 2147483647 >out 2>err
    check "a batch that no memory holds: status 1, a line with the largest that fits" \
        test "$? $(grep -cE 'free: try a smaller --batch-size \(at most [1-9][0-9]*; [0-9]+ with --recompute 3\), --seq-len or --model(, or --cp [0-9]+ on [0-9]+ machines)?$' err)" = "1 1"
    timeout 60 "$trainer" --model deepseek-v4-flash --dry-run --batch-size 65536 --seq-len 256 --comm-timeout 1 >out 2>err
    check "... beside parameters that do not fit either: the batch first" \
        test "$? $(grep -c 'free: try --recompute 3 with a smaller --batch-size or --seq-len, and then --ep, --tp or --pp$' err)" = "1 1"
    refuse "an unknown preset" '--model: expected tiny, small, deepseek-v4-flash or deepseek-v4-pro, found "huge"' --model huge --train text
    go --help
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
    check "... five options that presets set say so" test "$(tr -s ' \n' ' ' <out | grep -oE "Where it is not typed, [^.]*\.?[^.]* preset" | wc -l)" = 5
}

# ---- options ----

options() {
    local i name alone
    echo "# options of this trainer"
    for name in tiny windows chosen taught; do for i in 0 2 3; do flag same "" --recompute $i --config $name.json; done; done
    flag same 4 --recompute 3 --doc-reset 1 --train documents --config taught.json
    flag same 0 --head-rows 5 --verify-every 1
    flag 'config indexer_train ".kl" || other' "fast=>--indexer: expected off|kl|dense" --indexer kl
    flag other "" --indexer dense
    flag other 2 --bias-rate 0.1
    flag other -1 --seq-balance 0.5
    for i in --pp --ep; do
        refuse "$i of one rank" "$i: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" $i 2
        refuse "$i 0" "$i: expected an integer 1.." "${start[@]}" $i 0
    done
    refuse "--graph in a program for CPUs" "--graph: is for GPUs" "${start[@]}" --graph 1
    refuse "more positions than the model has" "--seq-len: expected at most the model's 48 positions, found 96" "${start[@]}" --seq-len 96
    refuse "an indexer of a model without" "--indexer: is for a model that has indexers" "${start[@]}" --config windows.json --indexer kl
    refuse "an indexer alone that does not learn" "--indexer-alone: is for --indexer kl or dense, without an adapter" "${start[@]}" --indexer-alone 1
    for i in dense kl; do
        refuse "--indexer $i of rows without an entry" "--seq-len: expected at least the 3 tokens of an entry, among which indexers learn to choose, found 2: give more, or --indexer off" "${start[@]}" --indexer $i --seq-len 2
    done
    alone=("${start[@]}" --indexer dense --indexer-alone 1 --val-fraction 0.1 --eval-every 1 --early-stop 1)
    refuse "--early-stop of indexers alone that leave no entry out" "--early-stop: with --indexer-alone no validation gets better in rows of 8 positions: all of their 2 entries are chosen (index_topk is 2): leave it out, or give more --seq-len" "${alone[@]}" --seq-len 8
    rm -rf with && go "${alone[@]}" --run with
    check "... where they leave some out validations differ" test "$(grep -o '"val_loss": [0-9.]*' with/metrics.jsonl | sort -u | wc -l)" -gt 1
    refuse "a weight without a module" "--mtp-weight: is for a model with that module: --mtp 1" "${start[@]}" --mtp-weight 0.7
    for name in tiny chosen; do flag other 2 --doc-reset 1 --train documents --config $name.json; done
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5

    echo "# FLOP per token"
    flop() { edit tiny.json some.json "$@" && go --config some.json --seq-len 16 --batch-size 1 "${how[@]}" --train text --dry-run 1 >&2; sed -n 's/.*, \([^ ]*\) FLOP per token.*/\1/p' out; }
    how=(--indexer dense)
    check "--indexer dense: of all entries, whatever index_topk" test "$(flop index_topk 1 head_dim 64)" = "$(flop index_topk 40 head_dim 64)"
    how=(--indexer kl)
    check "... kl: of those that are chosen" test "$(flop index_topk 1 head_dim 64)" != "$(flop index_topk 40 head_dim 64)"
    how=(--indexer off)
    check "an indexer without scores does nothing; with scores it does" test "$(flop index_topk 40 index_n_heads 3)" = "$(flop index_topk 40 index_n_heads 300)" -a \
        "$(flop index_topk 1 index_n_heads 3)" != "$(flop index_topk 1 index_n_heads 300)"
    check "ape is no matrix that is multiplied by" test \
        "$(flop compress_rates '{"heavily_compressed_attention":17}')" = "$(flop compress_rates '{"heavily_compressed_attention":17000}')"

    echo "# what learns"
    frozen tiny 'first:1' 'layers\.0\.|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.attn.compressor.*' 'attn\.compressor|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.hc_*,*.attn_sink' 'layers.*hc_|attn_sink|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.experts.3.*,*shared*' 'experts\.3\.|shared|indexer|gate\.(bias|tid2eid)'
    frozen taught 'mtp.*.ffn.*' '^mtp.*\.ffn\.|tid2eid'
    frozen taught 'layers.*.gate.bias' '^layers.*gate\.bias|tid2eid'
    refuse "every indexer frozen, while config.json has them learn" "--freeze: all indexers are frozen, which --indexer kl lets learn: leave some of them out, or give --indexer off" "${start[@]}" --config taught.json --freeze '*indexer*'
    refuse "every bias frozen, while config.json moves them" "--freeze: the biases of all routers are frozen, which --bias-rate " "${start[@]}" --config taught.json --freeze '*.gate.bias'
    help_example() { go --help >/dev/null && tr -s ' \n' ' ' <out | grep -oE -- "--$1 [^']*'[^']*'" | sed "s/.*'\(.*\)'/\1/"; }  # OPTION
    frozen tiny "$(help_example freeze)" '^embed\.|layers\.0\.|experts\.3\.|indexer|gate\.(bias|tid2eid)'
    go "${start[@]:2}" --model tiny --lora-rank 3 --lora-rank-pattern "$(help_example lora-rank-pattern)" --steps 1 --run patterns
    check "--lora-rank-pattern of --help: these ranks" test "$(shapes "$(last patterns)" adapter_model | awk '/lora_A/ { print /layers.0/ ? "first" : /kv_proj/ ? "kv" : "other", $3 }' | sort -u | xargs)" = "first 4 kv 16 other 3"
    refuse "--freeze without a tensor" "matches no tensor" "${start[@]}" --config windows.json --freeze '*indexer*'
}

# ---- config.json ----

configs() {
    echo "# config.json"
    local key i least
    becomes "keys that are missing are what doc/deepseek_v4.md says they are" \
        'rms_norm_eps": 1e-6|hc_eps": 1e-6|routed_scaling_factor": 1.5|rope_theta": 10000.0|compress_rope_theta": 160000.0|indexer_train": "off"|num_nextn_predict_layers": 0' 8 tiny
    becomes "the form of the published models: labels, of which it takes as many as there are layers" 'sliding_attention"|compressed_sparse_attention"|heavily_compressed_attention"' 5 \
        tiny layer_types - mlp_layer_types - compress_rates - compress_ratios '[0,4,128,4,0]' num_hash_layers 1 compress_rate_csa 3 compress_rate_hca 7
    check "... with the bytes of the other form" test "$(go --config some.json --export-hf one && go --config tiny.json --export-hf other && cmp one/model.safetensors other/model.safetensors && cmp one/config.json other/config.json; echo $?)" = 0
    becomes "without indexers all channels may turn" 'qk_rope_head_dim": 8,' 1 windows qk_rope_head_dim 8
    becomes "the share of channels that turn, of both sets of RoPE's settings" 'qk_rope_head_dim": 4,|partial_rotary_factor": 0.5' 4 \
        chosen qk_rope_head_dim - rope_parameters '{"main":{"partial_rotary_factor":0.5},"compress":{"partial_rotary_factor":0.5}}'
    becomes "what is said twice, alike" 'qk_rope_head_dim": 4,|compressed_sparse_attention": 3,|n_routed_experts": 4,|moe_intermediate_size": 8,|factor": 4.0' 5 tiny \
        partial_rotary_factor 0.5 compress_rate_csa 3 num_local_experts 4 intermediate_size 8 num_hash_layers 1 compress_ratios '[0,4,128,0]' \
        rope_scaling '{"type":"yarn","rope_type":"yarn","factor":4,"original_max_position_embeddings":64,"rope_theta":10000,"mscale":1,"mscale_all_dim":1}'
    check "a share that is a little less than channels (98 times 6/98 is below 6): its own export is read" test "$(
        edit tiny.json some.json head_dim 98 qk_rope_head_dim 6 && go --config some.json --export-hf share && go --config share/config.json --export-hf again && cmp {share,again}/config.json; echo $?)" = 0
    becomes "YaRN of layers with entries" 'rope_type": "yarn"|factor": 4.0|beta_fast": 8.0' 3 chosen

    echo "# mistakes in config.json"
    changed "another architecture" '"model_type": expected deepseek_v4, found "qwen3_moe"' model_type '"qwen3_moe"'
    changed "no architecture" '"model_type": expected deepseek_v4, found nothing' model_type -
    changed "heads that are no multiple" '"num_attention_heads" 4: expected a multiple of "o_groups" 3' o_groups 3
    changed "layers of another kind" '"layer_types": expected sliding_attention, compressed_sparse_attention or heavily_compressed_attention, found full_attention' layer_types '["full_attention","sliding_attention","sliding_attention"]'
    changed "layer_types of other layers" '"layer_types": expected a list of 3, one for each layer' layer_types '["sliding_attention"]'
    changed "routers of another kind" '"mlp_layer_types": expected hash_moe or moe, found dense' mlp_layer_types '["dense","moe","moe"]'
    changed "no layers" 'expected "layer_types" or "compress_ratios", a list of 3, one for each layer' layer_types -
    changed "another label" '"compress_ratios": expected 0, 4 or 128 for each layer, found 8' layer_types - compress_ratios '[0,8,128]'
    changed "an entry of no token" '"compressed_sparse_attention": expected an integer 1..65536, found 0' compress_rates '{"compressed_sparse_attention":0}'
    changed "an odd number of channels that turn" '"qk_rope_head_dim": expected an even number of channels 2..6, at most "index_head_dim", found 3' qk_rope_head_dim 3
    changed "more than an index head has" '"qk_rope_head_dim": expected an even number of channels 2..6, at most "index_head_dim", found 8' qk_rope_head_dim 8
    changed "a share of the channels that is odd" '"partial_rotary_factor" of "head_dim": expected an even number of channels 2..6, at most "index_head_dim", found 3' qk_rope_head_dim - partial_rotary_factor 0.4
    changed "neither channels that turn nor their share" 'expected "qk_rope_head_dim", channels of a head that turn, or "partial_rotary_factor", their share, found neither' qk_rope_head_dim -
    base=windows.json changed "more than a head has, without indexers" '"qk_rope_head_dim": expected an even number of channels 2..8, at most "head_dim", found 10' qk_rope_head_dim 10
    changed "YaRN of windows" '"rope_type": expected default, found "yarn"' rope_parameters '{"main":{"rope_type":"yarn","factor":2},"compress":{}}'
    changed "another kind of RoPE" '"rope_type": expected default|yarn, found "linear"' rope_parameters '{"main":{},"compress":{"rope_type":"linear","factor":2}}'
    changed "YaRN without a factor's length" '"original_max_position_embeddings": expected an integer 1..16777216, found nothing' rope_scaling '{"type":"yarn","factor":4}'
    yarn='"factor":4,"original_max_position_embeddings":16'
    changed "RoPE that is no set" '"rope_parameters": expected an object or null, found [1, 2, 3]' rope_parameters '[1,2,3]'
    changed "... in rope_scaling" '"rope_scaling": expected an object or null, found "yarn"' rope_scaling '"yarn"'
    changed "... in one of two" '"main": expected an object or null, found 5' rope_parameters '{"main":5,"compress":7}'
    changed "one set of two" '"rope_parameters": expected both "main" and "compress", or neither, found {"main": {}}' rope_parameters '{"main":{}}'
    changed "two sets in rope_scaling" '"rope_scaling": expected one set, that of layers with entries, found {"main": {}' rope_scaling '{"main":{},"compress":{}}'
    changed "a type that is no name" '"type": expected default|yarn, found 7' rope_scaling '{"type":7,"factor":4}'
    changed "YaRN without its type" '"rope_scaling": expected "rope_type" beside "factor", found none' rope_scaling "{$yarn}"
    changed "YaRN that is not cut to whole pairs" '"truncate": this trainer computes true, found false' rope_scaling "{\"type\":\"yarn\",\"truncate\":false,$yarn}"
    changed "a base that is of no layers" '"rope_theta" of "rope_parameters": expected 10000 or 160000, as "rope_theta" and "compress_rope_theta" say, found 500: set these instead' \
        rope_parameters "{\"rope_type\":\"yarn\",\"rope_theta\":500,$yarn}"
    changed "another score" '"scoring_func": this trainer computes "sqrtsoftplus", found "sigmoid"' scoring_func '"sigmoid"'
    changed "a tied head" '"tie_word_embeddings": this trainer computes false, found true' tie_word_embeddings true
    changed "two shared experts" '"n_shared_experts": this trainer computes 1, found 2' n_shared_experts 2
    changed "keys of several heads" '"num_key_value_heads": this trainer computes 1, found 2' num_key_value_heads 2
    changed "two modules of a new model" '"num_nextn_predict_layers": expected 0 or 1 of a new model, which predicts one token further at most, found 2: write 1, or give --mtp 0 or 1' num_nextn_predict_layers 2
    edit tiny.json two.json num_nextn_predict_layers 2
    for i in 0 1; do
        go --config two.json --mtp $i --export-hf with_$i
        check "... --mtp $i says how many" grep -q "\"num_nextn_predict_layers\": $i" with_$i/config.json
    done
    changed "another way to teach indexers" '"indexer_train": expected off|kl|dense, found "fast"' indexer_train '"fast"'
    changed "a rate below 0" '"bias_update_rate": expected a number 0..1' bias_update_rate -1
    changed "more experts for a token than there are" '"num_experts_per_tok": expected at most 4, found 5' num_experts_per_tok 5
    while read -r key least i; do
        changed "$key beyond $i" "\"$key\": expected an integer $least..$i, found $((i + 1))" $key $((i + 1))
        is_quick && continue
        changed "$key below $least" "\"$key\": expected an integer $least..$i, found $((least - 1))" $key $((least - 1))
        changed "no $key" "\"$key\": expected an integer $least..$i, found nothing" $key -
    done <<'KEYS'
hidden_size 1 1048576
head_dim 2 1024
q_lora_rank 1 1048576
o_lora_rank 1 1048576
sliding_window 1 16777216
index_n_heads 1 4096
index_topk 1 16777216
n_routed_experts 1 1024
moe_intermediate_size 1 4194304
KEYS
    edit windows.json bare.json index_topk - index_n_heads - index_head_dim -
    rm -rf with without && go "${start[@]}" --config windows.json --run with && go "${start[@]}" --config bare.json --run without && same_model with without
    verdict $? "a model without an indexer needs no sizes of one, and learns the same" "$(<err)"
    rm -rf with without
    changed "groups whose outputs no int counts" '"o_lora_rank": expected at most 1024 of each of the 4096 "o_groups", found 1048576' \
        num_attention_heads 4096 o_groups 4096 o_lora_rank 1048576
    edit tiny.json long.json max_position_embeddings 16777216 head_dim 1024 compress_rates '{"compressed_sparse_attention":1,"heavily_compressed_attention":1}'
    memory() { timeout 60 "$trainer" --config long.json --generate a --max-new-tokens $1 --dry-run >out 2>err </dev/null; sed -n 's/^| memory *| \([0-9.]*\) GiB of .*/\1/p' out; }
    check "entries of a text that no int counts: 2.2 times the text needs 2.2 times the memory" test "$(awk "BEGIN { x = $(memory 2200000) / $(memory 1000000); print (x > 2.15 && x < 2.25) }")" = 1
    edit long.json heads.json num_attention_heads 16
    refuse "more rows than an int counts heads of" "--batch-size: expected at most 31 rows of 4194304 positions, which a pass of this model can count, found 32" \
        --config heads.json --seq-len 4194304 --batch-size 32 --plan 1
    for i in {1..70}; do echo '{"prompt":"a"}'; done >prompts.jsonl
    refuse "... of texts" "--generate-batch: 70 texts of 16000002 positions are more than a pass of this model can count: give fewer, or a smaller --max-new-tokens" \
        --config heads.json --generate-file prompts.jsonl --generate-batch 70 --max-new-tokens 16000000
    changed "hc_mult beyond 8" '"hc_mult": expected an integer 1..8, found 9' hc_mult 9

    echo "# config.json says a thing twice, and otherwise"
    changed "two types" '"type": expected yarn, as "rope_type" says, found default: leave one of them out' rope_scaling "{\"rope_type\":\"yarn\",\"type\":\"default\",$yarn}"
    changed "two YaRNs" '"rope_scaling": expected the same RoPE as in "compress", found another: leave one of them out' \
        rope_scaling "{\"type\":\"yarn\",$yarn}" rope_parameters '{"main":{},"compress":{}}'
    changed "channels that turn, and their share" '"partial_rotary_factor" of "head_dim": expected 4 channels of 8, as "qk_rope_head_dim" says, found 0.25, which is 2' partial_rotary_factor 0.25
    changed "... of a kind of layers" '"partial_rotary_factor" of "main": expected 4 channels of 8, as "qk_rope_head_dim" says, found 0.25, which is 2' \
        rope_parameters '{"main":{"partial_rotary_factor":0.25},"compress":{}}'
    changed "layers" '"compress_ratios": expected compressed_sparse_attention of layer 1, as "layer_types" says, found sliding_attention: leave one' compress_ratios '[0,0,0]'
    changed "labels of too few layers" '"compress_ratios": expected a list of 3 or more, one for each layer' compress_ratios '[0,4]'
    changed "routers" '"num_hash_layers": expected moe of layer 1, as "mlp_layer_types" says, found hash_moe: leave one' num_hash_layers 3
    changed "experts" '"num_local_experts": expected 4, as "n_routed_experts" says, found 8: leave one' num_local_experts 8
    changed "widths" '"intermediate_size": expected 8, as "moe_intermediate_size" says, found 9: leave one' intermediate_size 9
    changed "tokens of an entry" '"compress_rate_csa": expected 3, as "compressed_sparse_attention" says, found 4: leave one' compress_rate_csa 4
    changed "... of layers that nobody knows" '"compress_rates": expected compressed_sparse_attention and heavily_compressed_attention, found "compressed_attention"' \
        compress_rates '{"compressed_attention":3}'
}

# ---- files: probes, folders of the three families of names ----

files() {
    local name i
    echo "# probes: NumPy, before and after saving"
    for name in tiny windows chosen taught deep; do
        is_quick && [[ $name == windows || $name == chosen || $name == deep ]] && continue
        rm -rf hf again before after truth
        rows 19 >in
        go --config $name.json --export-hf hf --probe in --probe-out before
        check "$name: a probe has logits, both losses and the gradient of every tensor but tables" \
            test "$(tensors before '^grad\.' | wc -l) $(tensors before '^(logits|loss|cross_entropy)$' | wc -l)" = "$(shapes hf | grep -vc tid2eid) 3"
        check "... the module's loss, and of each indexer that learns" test "$(tensors before '^(mtp_loss|index_loss)$' | cut -d' ' -f1 | sort | xargs)" = "$([[ $name == taught || $name == deep ]] && echo index_loss mtp_loss)"
        "$python" "$root/dev/ref/deepseek_v4.py" --from hf --probe in --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... which are to the last bit those of dev/ref/deepseek_v4.py" "$(<err)"
        go --from hf --probe in --probe-out after --threads 3 --head-rows 4 --recompute 3 --export-hf again && cmp before after && cmp {hf,again}/model.safetensors && cmp {hf,again}/config.json
        verdict $? "... from the saved folder, other threads, few rows of the head: the same bytes" "$(<err)"
    done

    echo "# folders: three families of names"
    rows 19 >in
    rm -rf hf && go "${start[@]}" --config mtp.json --export-hf hf && go --from hf --probe in --probe-out before
    check "a new model has official names, and of a module what doc/deepseek_v4.md says" \
        test "$(shapes hf | grep -cE '^(embed|norm|head)\.weight|^hc_head_(fn|base|scale)|^layers\.[012]\.(attn|ffn|hc)|^mtp\.0\.') $(shapes hf | grep -c '^mtp')" = "$(shapes hf | wc -l) 41"
    check "... tables of whole numbers" test "$(shapes hf | grep tid2eid)" = "layers.0.ffn.gate.tid2eid I64 257 2"
    rewrite hf written "$written"
    rewrite hf in_memory "$in_memory"
    rewrite in_memory older 't = {n.replace("indexer.scorer.", "indexer."): x for n, x in t.items()}'
    for name in written in_memory older; do
        rm -rf leg whole exported
        go --from $name --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
        verdict $? "$name: the same logits and loss, not a word" "$(<err)"
        check "... a gradient for every tensor but tables, by its name in that file" \
            cmp <(tensors after '^grad' | cut -d' ' -f1 | sed 's/^grad\.//' | sort) <(shapes $name | grep -v tid2eid | cut -d' ' -f1 | sort)
        go --from $name --export-hf exported
        check "... and its export has those names and numbers" cmp <(numbers $name | sort) <(numbers exported | sort)
        is_quick && [ $name = in_memory ] && break
        i=("${start[@]:2}" --from $name --schedule constant --warmup 0)
        go "${i[@]}" --run whole && go "${i[@]}" --steps 2 --run leg && go --resume --run leg --steps 4 --export-hf again && same_run whole leg
        verdict $? "... stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
    done
    rm -rf shards && go --from hf --export-hf shards --shard-gb 2e-5 && go --from shards --probe in --probe-out after && cmp before after
    verdict $? "a folder of $(ls shards/*.safetensors | wc -l) shards: the same probe" "$(<err)"
    rewrite hf other 'n = "layers.0.ffn.gate.tid2eid"; d, s, x = t[n]; t[n] = "I32", s, b"".join(x[i:i + 4] for i in range(0, len(x), 8))'
    go --from other --probe in --probe-out after && cmp before after
    verdict $? "a table of int32: the same probe" "$(<err)"
    rewrite hf other 't |= {n.replace("mtp.0.", "mtp.1."): x for n, x in t.items() if n.startswith("mtp.0.")}; t["mtp.0.head.weight"] = t["head.weight"]'
    go --from other --probe in --probe-out after && cmp before after && [ "$(wc -l <err)" = 1 ] && grep -q '41 tensors of modules that predict tokens further ahead are left out: keep this folder$' err
    verdict $? "modules of later releases: left out with a line; the module's copy of the head: without" "$(<err)"
    rm -rf half again && go --from hf --export-hf half --export-dtype bf16 && go --from half --export-hf again --export-dtype bf16 && cmp {half,again}/model.safetensors
    verdict $? "--export-dtype bf16, read and written again: the same tensors" "$(<err)"
    check "... sites, sinks, position biases and biases of routers stay floats, as in published files" \
        test "$(shapes half | grep ' F32 ' | grep -vcE 'hc_|attn_sink|\.ape |gate\.bias') $(shapes half | grep ' BF16 ' | grep -cE 'hc_|attn_sink|\.ape |gate\.bias')" = "0 0"
    rewrite hf f16 't |= {n: ("F16", s, b"\1\x3c" * s[0]) for n, (d, s, x) in t.items() if n.endswith("norm.weight")}'
    rm -rf as_read && go "${start[@]:2}" --from f16 --steps 2 --freeze first:1 --export-hf as_read --export-dtype as-read && go --from as_read --eval-only --val text --seq-len 16
    verdict $? "--export-dtype as-read after training: a folder that is read again" "$(<err)"
    check "... the table and what was frozen have the folder's bytes, vectors too, but for biases of routers" \
        test "$(comm -23 <(numbers f16 | sort) <(numbers as_read | sort) | grep -cE '^layers\.0\.|tid2eid') $(shapes as_read | grep -c 'tid2eid I64')" = "0 1"

    broken() {  # PROMISE TEXT PYTHON
        rewrite hf broken "$3"
        refuse "$1" "$2" --from broken --train text --seq-len 16
    }
    for name in layers.1.attn.indexer.weights_proj.weight layers.0.attn.attn_sink layers.2.attn.compressor.ape layers.1.hc_ffn_scale layers.1.ffn.gate.bias \
        layers.1.ffn.experts.3.w2.weight mtp.0.attn.wkv.weight hc_head_fn; do
        broken "$name is missing" "\"$name\" is missing" "t.pop('$name')"
        is_quick && break
        broken "... has another shape" "\"$name\": expected " "d, s, x = t['$name']; t['$name'] = d, [*s, 2], x * 2"
    done
    for name in hf:embed.weight written:model.embed_tokens.weight written:head.weight in_memory:lm_head.weight; do
        rewrite ${name%:*} broken "t.pop('${name#*:}')"
        refuse "${name%:*}: without ${name#*:} it keeps its family of names" "\"${name#*:}\" is missing" --from broken --train text --seq-len 16
    done
    broken "a table that is missing" '"layers.0.ffn.gate.tid2eid" is missing' 't.pop("layers.0.ffn.gate.tid2eid")'
    broken "a table of floats" '"layers.0.ffn.gate.tid2eid": expected I64 or I32, found F32' 'd, s, x = t["layers.0.ffn.gate.tid2eid"]; t["layers.0.ffn.gate.tid2eid"] = "F32", s, bytes(len(x) // 2)'
    for i in 4 -1; do
        broken "a table with expert $i of 4" '"layers.0.ffn.gate.tid2eid"' "d, s, x = t['layers.0.ffn.gate.tid2eid']; t['layers.0.ffn.gate.tid2eid'] = d, s, x[:-8] + struct.pack('<q', $i)"
        check "... the line names the number and the bound" grep -qE "0\.\.3.*$i|found $i" err
    done
    broken "a matrix of whole numbers" '"norm.weight": expected F32, F16 or BF16, found I64' 't["norm.weight"] = "I64", [16], bytes(128)'
    broken "NaN" 'expected finite numbers, found 1 of layers.0.attn.attn_sink' 'n = "layers.0.attn.attn_sink"; d, s, x = t[n]; t[n] = d, s, struct.pack("<f", float("nan")) + x[4:]'

    echo "# a folder with experts in fp4, all else in fp8, as DeepSeek publishes them"
    released

    echo "# a run and its files"
    rm -rf run && go "${mixed[@]}" --config taught.json --ema 0.9 --tensorboard 1 --run run
    router_keys
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 8 val_loss)")"
    rm -rf exported && go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000008 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
}

# `release` with experts in fp8, of the very numbers
experts_in_fp8() {
    "$python" - "$root/dev/ref" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, folders, fp4, fp8
t = folders.read_folder("release")
out = dict(t)
for name, (dtype, x) in t.items():
    scale = name.removesuffix(".weight") + ".scale"
    if dtype == "I8":
        numbers, block, exact = fp4.to_fp8(x, t[scale][1])
        assert exact
        out[name], out[scale] = ("F8_E4M3", (fp8.nearest(np.abs(numbers)) + 128 * np.signbit(numbers)).astype(np.uint8)), ("F32", block)
folders.write_folders(folders.Folder("in_fp8", "release", fp4.in_order(out), 1, {"quant_method": "fp8", "weight_block_size": [128, 128]}))
PYTHON
}

# the sum of all names here and of every file in folders that fp4.py and fp8.py are to leave as they are
sum_of_folders() { { ls; find begun beside kept mine mine_floats release with_notes -type f -exec cksum {} + | sort; } | cksum; }

# What fp4.py or fp8.py must not replace, and what it cannot read: one line, status 2, and nothing is written or gone
refuse_release() {  # fp4|fp8
    local tool=$root/dev/ref/$1.py case expected before up=layers.1.ffn.experts.0.w3.weight
    rm -rf kept mine mine_floats && mkdir kept && echo kept >kept/file
    "$python" "$tool" begun mine --release mine_floats && cp -r mine with_notes && mkdir with_notes/notes && echo mine >with_notes/notes/thesis.txt
    rewrite begun not_finite 'd, s, x = t["'$up'"]; t["'$up'"] = d, s, x[:8] + struct.pack("<2f", float("nan"), float("-inf")) + x[16:]'
    for case in no_json list_json short lone; do rm -rf $case && cp -r begun $case; done
    echo '{"a": 1,}' >no_json/config.json && echo '[1]' >list_json/config.json && truncate -s -9 short/model.safetensors
    mv lone/model{,-00001-of-00002}.safetensors && echo '{"weight_map": {"a": "model-00003-of-00002.safetensors"}}' >lone/model.safetensors.index.json
    ln -sfn mine link && rm -rf stray && cp -r begun stray && head -c 99 text >stray/model-old.safetensors
    before=$(sum_of_folders)
    while IFS=: read -r case expected; do
        "$python" "$tool" $case >out 2>err
        check "$1.py $case: a line, nothing is written" test "$? $(wc -l <err) $(sum_of_folders)" = "2 1 $before" \
            -a "$(sed "s/found an error: .*/found an error/" err)" = "$1.py: $expected"
    done <<CASES
beside new --release new_floats:beside: expected a folder with config.json and model.safetensors, found a run, whose newest checkpoint is beside/step_000004
begun begun/new --release new_floats:begun/new: expected a folder apart from begun
begun . --release new_floats:.: expected a folder apart from begun
begun kept --release new_floats:kept: holds file, which no export writes: choose another folder
begun new --release kept:kept: holds file, which no export writes: choose another folder
begun with_notes --release new_floats:with_notes: holds notes, which no export writes: choose another folder
begun new --release with_notes:with_notes: holds notes, which no export writes: choose another folder
begun beside/step_000004 --release new_floats:beside/step_000004 lies in the folder of a run, whose files are the run's: give another
begun new --release beside/new:beside/new lies in the folder of a run, whose files are the run's: give another
begun list_json --release new_floats:list_json/config.json: expected a JSON object, found a list
short begun --release new_floats:begun: holds a model that $1.py did not write: choose another folder
begun link --release new_floats:link: expected a folder, found a link: name the folder that it leads to
begun new --release mine_floats:mine_floats: was written beside mine: choose another folder, or remove it
begun mine --release new_floats:mine: was written beside mine_floats: choose another folder, or remove it
begun as_read --release new_floats:as_read: holds a model that $1.py did not write: choose another folder
begun new --release new_floats --shards 0:--shards: expected 1 to 99999, found 0
begun new --release new_floats --keep (:--keep: expected a regular expression, found an error
no_json new --release new_floats:no_json/config.json: expected JSON, found an error
list_json new --release new_floats:list_json/config.json: expected a JSON object, found a list
release new --release new_floats:release: expected a folder of floats, found tensor "layers.0.attn.wkv.weight" in F8_E4M3: give the floats it was made from, or those of fp4.py release FLOATS --floats
not_finite new --release new_floats:not_finite: tensor "$up": expected finite numbers, found 2 that are not, the first nan at [0, 2]: take a checkpoint from before they were
lone new --release new_floats:lone/model-00003-of-00002.safetensors: No such file or directory
CASES
    "$python" "$tool" short new --release new_floats >out 2>err
    check "$1.py of a file that is cut short: a line, nothing is written" test "$? $(wc -l <err) $(sum_of_folders)" = "2 1 $before" \
        -a "$(sed 's/tensor "norm.*in all: /.../' err)" = "$1.py: short/model.safetensors: ...the file is cut short, copy or download it again"
    if [ $1 = fp4 ]; then
        rewrite begun narrow 'd, s, x = t["'$up'"]; t["'$up'"] = d, [4 * s[0], s[1] // 4], x' && before=$(sum_of_folders)
        "$python" "$tool" narrow new --release new_floats >out 2>err
        check "... of columns that are no multiple of 32" test "$? $(sum_of_folders) $(<err)" = "2 $before \
$1.py: tensor \"$up\": expected columns that are a multiple of 32, found (128, 16): give --experts a regular expression that does not find it"
    fi
    # 8 KiB a file are a full disk
    (ulimit -f 8 && "$python" "$tool" begun mine --release mine_floats) >out 2>err
    check "$1.py on a full disk: a line, status 1, the folders before are whole" test "$? $(sum_of_folders) $(<err)" = \
        "1 $before $1.py: mine_floats: File too large: nothing is written, and what was there is as it was"
    "$python" "$tool" stray mine --release mine_floats 2>err
    check "$1.py: takes the place of what it has written; reads model.safetensors, no file beside it" test "$? $(sum_of_folders) $(<err)" = "0 $before "
    rewrite begun cut 't = {n: (d, s, x if d != "F32" else b"".join(b"\0\0" + x[i:i + 2] for i in range(2, len(x), 4))) for n, (d, s, x) in t.items()}'
    rewrite begun halves 't = {n: (d, s, x) if d != "F32" else ("BF16", s, b"".join(x[i:i + 2] for i in range(2, len(x), 4))) for n, (d, s, x) in t.items()}'
    "$python" "$tool" cut cut_new --release cut_floats && "$python" "$tool" halves new --release new_floats && cmp {cut_new,new}/model.safetensors && cmp {cut,new}_floats/model.safetensors
    verdict $? "$1.py of a folder in bf16: what it makes of the same floats" ""
    rm -rf new new_floats cut_new cut_floats with_notes not_finite no_json list_json short lone link stray cut halves narrow
}

# dev/ref/fp4.py makes it, in three files, and `floats`, the same numbers
released() {
    local i text tune=("${start[@]:2}" --grad-accum 2 --lora-rank 3)
    edit mtp.json packed.json hidden_size 64 moe_intermediate_size 32 q_lora_rank 32 head_dim 32 index_head_dim 32 o_lora_rank 16
    go "${start[@]}" --config packed.json --steps 20 --export-hf begun && "$python" "$root/dev/ref/fp4.py" begun release --release floats --shards 3
    evaluated() { go --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
    text=$(evaluated --from floats)
    check "the loss of validation, $(cut -d'|' -f2 <<<"$text"), is that of floats, as it is read and as floats" test -n "$text" -a "$text" = "$(evaluated --from release --threads 2)" -a "$text" = "$(evaluated --from release --weights fp32)"
    go "${tune[@]}" --from floats --run beside_floats && go "${tune[@]}" --from release --run beside && same_model beside_floats beside
    verdict $? "an adapter learns what it learns beside floats" "$(<err)"
    check "... beside what lies in the files, each matrix in its type" test "$(boxed matrices "fp8, fp4 and all else as in the files") $(grep -cE '^\|   each in its type +\| [0-9]+ fp8, [0-9]+ fp4, [0-9]+ bf16, [0-9]+ fp32' out)" = "1 1"
    go --from release --export-hf as_read --export-dtype as-read && text=$(same_tensors release as_read '^$') && text=$(same_tensors as_read release '^$')
    verdict $? "--export-dtype as-read: types, bytes and scales of every tensor are the folder's" "$text $(<err)"
    rm -rf whole && go "${start[@]:2}" --from release --freeze '*experts*' --save-every 2 --run legs --export-hf whole --export-dtype as-read &&
        rm -r as_read legs/step_000004 && go --run legs --resume --export-hf as_read && text=$(diff -rq whole as_read)
    verdict $? "... of a run that goes on: the bytes of one that never stopped, experts in fp4" "$text $(<err)"
    go --from release --mtp 0 --export-hf plain --export-dtype as-read && go "${start[@]:2}" --from plain --mtp 1 --freeze '[!m]*' --export-hf grown --export-dtype as-read
    verdict $? "... of a module that the folder lacks" "$(<err)"
    check "... it is bf16, but for what is float in published files" \
        test "$(shapes grown | grep '^mtp' | grep ' F32 ' | grep -vcE 'hc_|attn_sink|gate\.bias') $(shapes grown | grep '^mtp' | cut -d' ' -f2 | sort -u | xargs)" = "0 BF16 F32"
    mv release elsewhere && refuse "... without the folder that it began with" "--export-dtype: as-read takes what has not learnt from release, with which the run began, and that is \
not there: put it back, or give --export-dtype bf16" --run legs --resume --export-hf as_read
    mv elsewhere release && refuse "... over that folder" "--export-hf: release: holds a model that this program did not write: choose another folder" --run legs --resume --export-hf release
    rm -rf legs as_read && go "${start[@]:2}" --from release --steps 2 --run legs && go --run legs --resume --steps 4 --freeze '*experts*' --export-hf as_read --export-dtype as-read
    verdict $? "... experts that are frozen now alone" "$(<err)"
    check "... are bf16, for they have learnt before" test "$(shapes as_read | grep experts | cut -d' ' -f2 | sort -u)" = BF16
    go --from release --lora beside --merge --export-hf merged --export-dtype as-read && text=$(same_tensors release merged '^layers.*attn\.(wq_a|wq_b|wkv|wo_b)\.')
    verdict $? "... merged with the adapter: what it has changed is bf16, experts have their bytes" "$text $(<err)"
    check "... a line says what was rounded, and by how much" \
        grep -qE '^merged: 12 matrices rounded to bf16, numbers by at most [0-9.e-]+ in layers\.[012]\.attn\.w[a-z_]+\.weight; the adapter had changed them by up to [0-9.e-]+$' out
    "$python" "$root/dev/ref/fp8.py" begun eights --release eight_floats
    check "fp8.py: tables of whole numbers go along, and the loss is that of floats" \
        test -n "$(evaluated --from eights)" -a "$(evaluated --from eights)" = "$(evaluated --from eight_floats)"
    experts_in_fp8
    text=$(evaluated --from release --act-fp8 1)
    check "--act-fp8 1: inputs of experts in fp4 are rounded, as those of the same numbers in fp8" test "$(boxed '  inputs of fp8, fp4' 'rounded to fp8')" = 1 \
        -a "$text" = "$(evaluated --from in_fp8 --act-fp8 1)" -a "$text" != "$(evaluated --from release)"
    is_quick && return
    rm -rf beside_floats beside && go "${tune[@]}" --from in_fp8 --act-fp8 1 --run beside_floats && go "${tune[@]}" --from release --act-fp8 1 --run beside && same_model beside_floats beside
    verdict $? "... an adapter learns the same" "$(<err)"
    refuse "... where all of it learns: why, and what to do" "--act-fp8: is for matrices in fp8 or fp4, and what learns is fp32, here the whole model: leave it out, or train an adapter beside such matrices (--lora-rank N)" \
        "${start[@]:2}" --from release --act-fp8 1
    for i in fp4 fp8; do refuse_release $i; done
    "$python" "$root/dev/ref/fp8.py" begun new --release floats >out 2>err
    check "fp8.py: floats of another folder, by fp4.py, stay" test "$? $(<err)" = "2 fp8.py: floats: holds a model that fp8.py did not write: choose another folder" -a ! -e new
    "$python" "$root/dev/ref/fp8.py" begun eights --release eight_floats >out 2>err
    check "... but take the place of their own" test "$? $(<err)" = "0 "
    timeout 60 "$trainer" --from begun --export-hf release >out 2>err
    check "a folder of fp4.py's gives way to no export" test "$? $(grep -c -- '--export-hf: release: ' err) $(ls release | grep -c 'of-00003')" = "2 1 3"
    check "... which is read again" test -n "$(evaluated --from merged)"
    check "... and the text is that of floats" test "$(go --from floats --generate "line 7" && cat out)" = "$(go --from release --generate "line 7" && cat out)"
    go --from floats --probe in --probe-out before && go --from release --probe in --probe-out after && cmp before after
    verdict $? "all of it learns, as floats: the gradients" "$(<err)"
    refuse "nothing is rounded to fp4" '--weights: expected fp32|bf16|fp8, found "fp4"' "${tune[@]}" --from floats --weights fp4
}

# ---- what indexers, routers and the module learn ----

learning() {
    echo "# the indexer, routers, the token after the next"
    local i
    learn() { rm -rf with && go "${start[@]}" "$@" --run with; }  # OPTION...
    moved() { comm -13 <(tensors begun/model.safetensors . | sort) <(tensors with/step_000004/model.safetensors . | sort) | cut -d' ' -f1; }
    go --config mtp.json --export-hf begun
    learn --config mtp.json --bias-rate 0
    check "indexers and biases of routers stay as they are" test "$(moved | grep -cE 'indexer|gate.bias|tid2eid') $(moved | grep -cE '^mtp' )" = "0 40"
    learn --config mtp.json --bias-rate 0.01
    check "--bias-rate: biases move by it, the module's too" test "$(moved | grep -c gate.bias)" = 3
    check "... by 4 steps of 0.01 or less" "$python" - <<'PYTHON'
import struct, json
data = open("with/step_000004/model.safetensors", "rb").read()
n = struct.unpack("<Q", data[:8])[0]
for name, t in json.loads(data[8:8 + n]).items():
    if name.endswith("gate.bias"):
        a, b = t["data_offsets"]
        x = struct.unpack(f"<{(b - a) // 4}f", data[8 + n + a:8 + n + b])
        assert any(x) and all(abs(y / 0.01 - round(y / 0.01)) < 1e-4 and abs(y) < 0.041 for y in x), (name, x)
PYTHON
    for i in kl dense; do
        learn --config mtp.json --indexer $i --steps 4
        check "--indexer $i: six tensors of the indexer learn, and the log has their loss" test "$(moved | grep -c indexer) $(grep -cE '"index_loss": [0-9.]+' with/metrics.jsonl)" = "6 4"
        learn --config mtp.json --indexer $i --indexer-alone 1
        check "... --indexer-alone: they alone" test "$(moved | grep -c indexer) $(moved | grep -vc indexer)" = "6 0"
    done
    refuse "a module that the run has learnt, left out on the way" "--mtp: the run began with 1: choose another --run, or leave it out" --resume --run with --mtp 0
    go "${start[@]:2}" --from with --mtp 0 --steps 1 --run without
    check "--mtp 0 of a folder that has it: a line" grep -q '/model.safetensors: 41 tensors of the module that predicts the token after the next are left out, as --mtp 0 says: keep this folder$' err
    learn --config tiny.json --indexer dense --val-fraction 0.1 --eval-every 2
    check "--indexer dense: validations are of the model that is saved, which chooses index_topk entries" \
        test "$(go --from with --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value with 4 val_loss)")"
    nothing_counts "mtp index" "" --config taught.json
    is_quick && return
    rm -rf longer && go "${start[@]}" --indexer kl --indexer-alone 1 --steps 60 --run longer
    check "... whose loss falls" below "$(value longer 60 index_loss)" "$(value longer 1 index_loss)"
    learn --config mtp.json --mtp-weight 0
    check "--mtp-weight 0: the module stays, and is no part of the losses" test "$(moved | grep -c '^mtp') $(grep -c mtp_loss with/metrics.jsonl)" = "0 0"
    learn --config mtp.json --mtp 0
    check "--mtp 0: a model without" test "$(shapes with/step_000004 | grep -c mtp) $(grep -c '"num_nextn_predict_layers": 0' with/step_000004/config.json)" = "0 1"
    go "${start[@]:2}" --from with --mtp 1 --freeze '[!m]*' --run grown --export-hf exported && cmp <(tensors with/step_000004/model.safetensors .) <(tensors exported/model.safetensors '^[^m]')
    verdict $? "--mtp 1 of a folder without, all else frozen: the same parameters and a module" "$(<err)"
    go --config mtp.json --export-hf hf
    refuse "a new module in an export" "--mtp: 1 gives a new module to a model that is trained, all of it, with --mtp-weight above 0" --from with --mtp 1 --export-hf grown
    rm -rf with && go "${start[@]}" --config mtp.json --steps 8 --run with
    check "loss = cross_entropy + 0.5 mtp_loss + 0.1 of a balance of two layers" "$python" -c 'import json
for r in map(json.loads, open("with/metrics.jsonl")):
    if r.get("loss") is not None:
        more = (r["loss"] - r["cross_entropy"] - 0.5 * r["mtp_loss"]) / 0.1
        assert 1.8 < more < 4.0, (more, r)'
}

# ---- adapters ----

# By PEFT's rules target_modules of this folder finds, of the linear layers that transformers' tiny.json has, those in its file
peft_finds() { "$python" - "$1" <<'PYTHON'
import json, re, struct, sys
targets = json.load(open(sys.argv[1] + "/adapter_config.json"))["target_modules"]
data = open(sys.argv[1] + "/adapter_model.safetensors", "rb").read()
names = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
has = {n[len("base_model.model."):-len(".lora_A.weight")] for n in names if n.endswith(".lora_A.weight")}
of_all = ["self_attn." + x for x in ("q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj")] + [f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")]
entries = ["self_attn.compressor.kv_proj", "self_attn.compressor.gate_proj"]
indexer = ["self_attn.compressor.indexer." + x for x in ("kv_proj", "gate_proj", "q_b_proj", "scorer.weights_proj")]
modules = {f"model.layers.{l}.{x}" for l, of in enumerate(([], entries + indexer, entries)) for x in of_all + of}
found = {m for m in modules if (re.fullmatch(targets, m) if isinstance(targets, str) else any(m == x or m.endswith("." + x) for x in targets))}
assert found == has, (targets, sorted(found ^ has))
PYTHON
}

adapters() {
    echo "# adapters"
    go "${start[@]}" --config mtp.json --steps 40 --export-hf base --run book
    local tune=(--from base --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 3e-2 --steps 8)
    go "${tune[@]}" --run adapter
    check "beside q_a, q_b, kv and o_b of each layer, by the names that PEFT has, not a word" \
        test "$(tensors "$(last adapter)/adapter_model.safetensors" '^base_model\.model\.model\.layers\.[012]\.self_attn\.(q_a|q_b|kv|o_b)_proj\.lora_B\.weight$' | wc -l) $(tensors "$(last adapter)/adapter_model.safetensors" lora_B | wc -l) $(wc -l <err)" = "12 12 0"
    check "... which adapter_config.json says in full, as compressors have a kv_proj, too" grep -q '"target_modules": ".*self_attn.*q_a_proj|q_b_proj|kv_proj|o_b_proj' "$(last adapter)/adapter_config.json"
    check "... and README.md has PEFT's line" grep -q 'PeftModel.from_pretrained' "$(last adapter)/README.md"
    go "${tune[@]}" --config chosen.json --from "" --steps 1 --run single
    check "... in one group o_a, too" test "$(tensors "$(last single)/adapter_model.safetensors" 'o_a_proj\.lora_B' | wc -l)" = 2
    check "... beside a model at random: a line says that nothing can use it, and what to do" grep -qx "train_deepseek_v4: the adapter learns beside a model of random numbers, which no folder holds: nothing but --resume can use it. Write that model first (--config chosen.json --seed 42 --export-hf BASE), then train with --from BASE" err
    go --config chosen.json --seed 42 --export-hf random && go "${tune[@]}" --from random --steps 1 --run same && same_model single same
    verdict $? "... which makes the same adapter" "$(<err)"
    check "... which can be used, without that line" test "$(wc -l <err)" = 0 -a -n "$(go --from random --lora same --generate "line 7" --max-new-tokens 2 && cat out)"
    refuse "an adapter as a model: the model that it needs" "$(last same): expected model.safetensors, found adapter_model.safetensors, a LoRA adapter: --from takes the model that it was trained on, --lora this folder (where a trainer has it): --from random --lora $(last same)" \
        --from same --generate a
    refuse "... one that names none" ": --from DIR --lora $(last single), where DIR is that model: adapter_config.json names none" --from single --generate a
    refuse "an adapter without its model" "--lora: needs the model that it belongs to: --from DIR" --lora same --generate a
    go "${tune[@]}" --lora-targets o_a_proj --steps 1 --run grouped --export-lora grouped_peft
    check "--lora-targets o_a_proj in two groups: a line says that PEFT cannot run it" \
        grep -qx 'train_deepseek_v4: --lora-targets: model.layers.0.self_attn.o_a_proj and its like, in 2 groups: PEFT 0.21 cannot run this adapter; --merge makes a model of it' err
    check "... its README.md, too" test "$(grep -c 'cannot run it, for$' grouped_peft/README.md) $(grep -c PeftModel grouped_peft/README.md)" = "1 0"
    go --from base --lora grouped_peft --generate "line 7" --max-new-tokens 2
    check "... a text without that line" test ! -s err
    go --from base --lora grouped_peft --export-lora again
    check "... an export of it with that line" test "$(wc -l <err) $(grep -c 'grouped_peft/adapter_config.json: .*cannot run this adapter' err)" = "1 1"
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    go --from base --lora adapter --merge 1 --export-hf merged
    check "... merged: the text that base and adapter write, and not the base's" \
        test "$(write --from merged)" = "$(write --from base --lora adapter)" -a "$(write --from base)" != "$(write --from merged)"
    check "... what has no adapter goes along, bit for bit" cmp <(numbers base | grep -vE 'attn\.w[qko]' | sort) <(numbers merged | grep -vE 'attn\.w[qko]' | sort)
    rm -rf other && go "${tune[@]}" --recompute 3 --head-rows 5 --threads 2 --run other
    check "--recompute 3 --head-rows 5 --threads 2: the same adapter" same_run adapter other
    go "${tune[@]}" --lora-targets all-linear --lora-parameters mlp.experts.gate_up_proj,mlp.gate.weight --run wide
    check "--lora-targets all-linear, experts and routers" test "$(tensors "$(last wide)/adapter_model.safetensors" 'shared_experts\..*lora_B' | wc -l) $(tensors "$(last wide)/adapter_model.safetensors" o_a_proj | wc -l) $(tensors "$(last wide)/adapter_model.safetensors" 'mlp\.(experts|gate)\..*lora_B' | wc -l)" = "9 0 6"
    for i in kv_proj q_a_proj,q_b_proj '.*\.[lk].*b_proj' o_b_proj all-linear; do
        rm -rf named && go "${tune[@]}" --steps 1 --lora-targets "$i" --run named
        check "--lora-targets $i: by adapter_config.json PEFT finds the layers of the file, and no indexer's" peft_finds "$(last named)"
    done
    mkdir peft && cp "$(last adapter)/adapter_model.safetensors" peft/model.safetensors && edit "$(last adapter)/adapter_config.json" peft/adapter_config.json target_modules '["q_a_proj","q_b_proj"]'
    rewrite peft peft_made 't = {n: x for n, x in t.items() if ".q_" in n}; a = "base_model.model.model.layers.1.self_attn."
for x in "AB": t[a + f"compressor.indexer.q_b_proj.lora_{x}.weight"] = t[a + f"q_b_proj.lora_{x}.weight"]'
    mv peft_made/model.safetensors peft_made/adapter_model.safetensors
    refuse "an adapter of PEFT's, of indexers, too" 'compressor.indexer.q_b_proj.lora_A.weight": this layer takes no adapter here: train one without it, by target_modules=(?!.*\.self_attn\.compressor\.indexer\.q_b_proj$)(.*\.)?(q_a_proj|q_b_proj)' \
        --from base --lora peft_made --generate a
    rewrite base rounded 't = {n: (d, s, b"".join(b"\0\0" + x[i + 2:i + 4] for i in range(0, len(x), 4))) if d == "F32" else (d, s, x) for n, (d, s, x) in t.items()}'
    rows 16 >in
    mkdir alone && cp "$(last adapter)"/adapter_* alone
    for i in fp32 bf16; do go --from rounded --lora alone --base-dtype $i --probe in --probe-out $i.out; done
    check "a base in bf16 that fits: the same probe as in fp32" cmp fp32.out bf16.out
    shown() { grep -oE '^\| (mtp-weight|indexer|bias-rate|seq-balance) *\| [^ ]*' out | tr -d '|' | xargs; }  # that are not as --help has them
    go "${tune[@]}" --from "" --config taught.json --steps 1 --run beside
    check "what an adapter leaves as it is, the table of settings has as off or 0" test "$(shown)" = "seq-balance 0.1 mtp-weight 0"
    check "... and settings.json" test "$(grep -cE '"(mtp-weight": 0.0|indexer": "off"|bias-rate": 0.0|seq-balance": 0.1)' beside/settings.json)" = 4
    go "${start[@]}" --config taught.json --steps 1 --run whole
    check "... of a whole model it has what config.json says" test "$(shown)" = "indexer kl bias-rate 0.01 seq-balance 0.1 mtp-weight 0.5"
    go --config taught.json --probe in --probe-out alone.out
    check "... of a probe all but biases, which an update moves" test "$(shown)" = "indexer kl seq-balance 0.1 mtp-weight 0.5"
    go --from whole --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && go --from whole --export-hf exported
    check "... of an export nothing, whose config.json keeps all" test "$(shown) $(grep -cE '"(mtp_weight": 0.5|indexer_train": "kl|bias_update_rate": 0.01|seq_balance_coef": 0.1)' exported/config.json)" = " 4"
    check "... and there no indexer learns" test "$(grep -c 'an indexer' out) $(grep -c learns out)" = "1 0"
    edit windows.json unread.json indexer_train '"kl"' && go "${start[@]}" --config unread.json --steps 1 --run unread
    check "... of a model without indexers none that learn" test "$(shown)" = ""
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
    for i in $(is_quick && echo taught || echo tiny windows chosen taught); do resumed_bits $i "${mixed[@]}"; done
    is_quick && return
    documents_bits "${mixed[@]}" --config taught.json
    talks_bits 200 "windows and entries"
}

# ---- ranks ----

ranks() {
    echo "# ranks: updates of four micro-batches on 2 and 4"
    export COMM_CHECK=1  # no rank may come by another call than its neighbour
    need_build launch "" launch
    local run=("${mixed[@]}")
    shared() { on_ranks trainer "$@"; }  # DIVIDED PROMISE RANKS/SIZE... OPTION...
    if is_quick; then
        shared --zero "all that learns" "2/2" --config taught.json
        shared --ep "experts" "2/2" --config taught.json
        shared --pp "layers" "2/2" --config deep.json
        unset COMM_CHECK
        return
    fi
    shared --zero "all that learns" "2/0 2/1 2/2 4/2" --config taught.json --ema 0.9
    shared --zero "documents" "2/2" --config taught.json --doc-reset 1 --train documents
    shared --zero "an adapter" "2/2" --lora-rank 3 --lora-dropout 0.2
    shared --ep "experts" "2/2 4/2 4/4 4/2/--recompute,3" --config taught.json --ema 0.9
    shared --ep "some frozen" "4/2" --config taught.json --freeze '*.experts.1.*,first:1'
    shared --pp "layers" "2/2 4/4 4/2/--zero,2 2/2/--recompute,0" --config deep.json --ema 0.9
    shared --pp "layers, documents" "2/2/--recompute,3" --config deep.json --doc-reset 1 --train documents
    shared --pp "layers and experts" "4/2/--ep,2" --config deep.json
    shared --pp "an adapter" "2/2" --config deep.json --lora-rank 3
    unset COMM_CHECK
    rm -rf whole several && go "${mixed[@]}" --config deep.json --run whole
    "$launch" -n 2 "$trainer" "${mixed[@]}" --config deep.json --pp 2 --run several >out 2>err </dev/null
    rm -rf several/step_000008
    "$launch" -n 2 "$trainer" --resume --run several --pp 1 --ep 2 >out 2>err </dev/null && same_run whole several
    verdict $? "written by 2 ranks, --pp 2, resumed by 2, --ep 2: the bytes of one rank" "$(tail -n 1 err)"
    refused "Muon with --zero 2" "--optimizer: muon needs whole matrices: several ranks want --zero 0 or 1, without --tp, --ep" "$launch" -n 2 "$trainer" "${mixed[@]}" --optimizer muon --zero 2
    refused "--ep that does not divide the experts" "--ep: 4: expected a number that divides the 6 experts" "$launch" -n 4 "$trainer" "${mixed[@]}" --config six.json --ep 4
    refused "more stages than layers" "--pp: 4: expected at most one stage for each of the 3 layers" "$launch" -n 4 "$trainer" "${mixed[@]}" --pp 4
}

# ---- kill -9 and --resume ----

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --recompute, --head-rows"
    RANDOM=13
    killed $(((kills + 1) / 2)) "all that learns" --config taught.json
    is_quick && return
    killed $((kills / 2)) "documents" --config chosen.json --grad-accum 2 --doc-reset 1 --train documents
}

# ---- text ----

text() {
    echo "# text"
    local name one
    for name in $(is_quick && echo tiny || echo tiny chosen windows); do
        greedy $name "windows, entries and what becomes one"
    done
    write_prompts >short.jsonl
    at_once --from book
    for name in "line 7: the plain" "line 7: the plain loop is" "line 7: the plain loop is the law"; do echo "{\"prompt\":\"$name\"}"; done >longer.jsonl
    go --from book --generate-file longer.jsonl --max-new-tokens 10 --generate-batch 1 && mv out alone && go --from book --generate-file longer.jsonl --max-new-tokens 10 --generate-batch 3
    check "texts that begin with what another row has: they say what each says alone" cmp out alone
    is_quick && return
    go --from book --generate "line 7" --temperature 0 --max-new-tokens 150 --generate-batch 1 && mv out once
    check "150 tokens in 48 positions: they begin as 40 do" test "$(head -c ${#one} once)" = "$one"
}

run_parts $parts
