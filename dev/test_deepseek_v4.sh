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
parts=${*:-$(is_quick && echo presets configs files learning bits ranks kills text || echo presets options configs files learning adapters bits ranks kills text)}

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
        timeout 60 "$trainer" --model $name --dry-run --seq-len 64 --batch-size 1 >out 2>err
        check "$name: $count parameters" test "$(boxed parameters "[0-9.]*[kMBT] = $count( .padded: [0-9]*.)?")" = 1
    done <<'SIZES'
tiny 378517
small 191881013
deepseek-v4-flash 290942289362
deepseek-v4-pro 1598837347742
SIZES
    timeout 60 "$trainer" --model deepseek-v4-flash --dry-run --seq-len 64 --batch-size 1 >out 2>err
    check "... its box: streams, attention, entries, experts" test "$(boxed model '43 layers, 4 streams of 4096 channels, 1048576') $(
        boxed '  attention' '64 heads of 512, one of keys, 64 channels turn, a') $(boxed '  entries' 'of 4 tokens in 21 layers, of which an indexer') $(
        boxed '' 'of 128 tokens in 20 layers') $(boxed experts '256 in a layer, 2048 wide, a token takes 6 and') $(boxed '  by token' 'in 3 layers')" = "1 1 1 1 1 1"
    refuse "an unknown preset" '--model: expected tiny, small, deepseek-v4-flash or deepseek-v4-pro, found "huge"' --model huge --train text
    go --help
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
}

# ---- options ----

options() {
    local i name
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
    refuse "an indexer of a model without" "--indexer: is for a model with layers of compressed_sparse_attention" "${start[@]}" --config windows.json --indexer kl
    refuse "an indexer alone that does not learn" "--indexer-alone: is for --indexer kl or dense, without an adapter" "${start[@]}" --indexer-alone 1
    refuse "a weight without a module" "--mtp-weight: is for a model with that module: --mtp 1" "${start[@]}" --mtp-weight 0.7
    for name in tiny chosen; do flag other 2 --doc-reset 1 --train documents --config $name.json; done
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5

    echo "# what learns"
    frozen tiny 'first:1' 'layers\.0\.|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.attn.compressor.*' 'attn\.compressor|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.hc_*,*.attn_sink' 'layers.*hc_|attn_sink|indexer|gate\.(bias|tid2eid)'
    frozen tiny '*.experts.3.*,*shared*' 'experts\.3\.|shared|indexer|gate\.(bias|tid2eid)'
    frozen taught 'mtp.*' '^mtp|tid2eid'
    frozen taught '*.gate.bias' 'gate\.(bias|tid2eid)'
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
    changed "an odd number of channels that turn" '"qk_rope_head_dim": expected an even number 2..6, found 3' qk_rope_head_dim 3
    changed "more than an index head has" '"qk_rope_head_dim": expected an even number 2..6, found 8' qk_rope_head_dim 8
    changed "YaRN of windows" '"rope_type": expected default, found yarn' rope_parameters '{"main":{"rope_type":"yarn","factor":2},"compress":{}}'
    changed "another kind of RoPE" '"rope_type": expected default or yarn, found linear' rope_parameters '{"main":{},"compress":{"rope_type":"linear","factor":2}}'
    changed "YaRN without a factor's length" '"original_max_position_embeddings": expected an integer 1..16777216, found nothing' rope_scaling '{"type":"yarn","factor":4}'
    changed "another score" '"scoring_func": this trainer computes "sqrtsoftplus", found "sigmoid"' scoring_func '"sigmoid"'
    changed "a tied head" '"tie_word_embeddings": this trainer computes false, found true' tie_word_embeddings true
    changed "two shared experts" '"n_shared_experts": this trainer computes 1, found 2' n_shared_experts 2
    changed "keys of several heads" '"num_key_value_heads": this trainer computes 1, found 2' num_key_value_heads 2
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
    changed "hc_mult beyond 8" '"hc_mult": expected an integer 1..8, found 9' hc_mult 9
}

# ---- files: probes, folders of the three families of names ----

# 2 rows of so many positions; every seventh target is not counted
rows() { examples 2 $1 "$(seq $((2 * $1)) | awk '{ print $1 * 37 % 257 }')" "$(seq 2 $((2 * $1 + 1)) | awk '{ print NR % 7 ? $1 * 37 % 257 : -1 }')"; }

files() {
    local name i
    echo "# probes: NumPy, before and after saving"
    for name in tiny windows chosen taught; do
        is_quick && [[ $name == windows || $name == chosen ]] && continue
        rm -rf hf again before after truth
        rows 19 >in
        go --config $name.json --export-hf hf --probe in --probe-out before
        check "$name: a probe has logits, both losses and the gradient of every tensor but tables" \
            test "$(tensors before '^grad\.' | wc -l) $(tensors before '^(logits|loss|cross_entropy)$' | wc -l)" = "$(shapes hf | grep -vc tid2eid) 3"
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
    broken "a table that is missing" '"layers.0.ffn.gate.tid2eid" is missing' 't.pop("layers.0.ffn.gate.tid2eid")'
    broken "a table of floats" '"layers.0.ffn.gate.tid2eid": expected I64 or I32, found F32' 'd, s, x = t["layers.0.ffn.gate.tid2eid"]; t["layers.0.ffn.gate.tid2eid"] = "F32", s, bytes(len(x) // 2)'
    for i in 4 -1; do
        broken "a table with expert $i of 4" '"layers.0.ffn.gate.tid2eid"' "d, s, x = t['layers.0.ffn.gate.tid2eid']; t['layers.0.ffn.gate.tid2eid'] = d, s, x[:-8] + struct.pack('<q', $i)"
        check "... the line names the number and the bound" grep -qE "0\.\.3.*$i|found $i" err
    done
    broken "a matrix of whole numbers" '"norm.weight": expected F32, F16 or BF16, found I64' 't["norm.weight"] = "I64", [16], bytes(128)'
    broken "NaN" 'expected finite numbers, found 1 of layers.0.attn.attn_sink' 'n = "layers.0.attn.attn_sink"; d, s, x = t[n]; t[n] = d, s, struct.pack("<f", float("nan")) + x[4:]'

    echo "# a run and its files"
    rm -rf run && go "${mixed[@]}" --config taught.json --ema 0.9 --tensorboard 1 --run run
    router_keys
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 8 val_loss)")"
    rm -rf exported && go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000008 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
}

# of a folder a line for each tensor: its name, type and shape; its name and sum
shapes() { "$python" - "$1/model.safetensors" <<'PYTHON'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
for name, t in sorted(json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]]).items()):
    if name != "__metadata__": print(name, t["dtype"], *t["shape"])
PYTHON
}
numbers() { "$python" - "$1/model.safetensors" <<'PYTHON'
import hashlib, json, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
for name, t in json.loads(data[8:8 + n]).items():
    if name != "__metadata__": print(name, hashlib.md5(data[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]).hexdigest())
PYTHON
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

adapters() {
    echo "# adapters"
    go "${start[@]}" --config mtp.json --steps 40 --export-hf base --run book
    local tune=(--from base --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 3e-2 --steps 8)
    go "${tune[@]}" --run adapter
    check "beside q_a, q_b, kv, o_a and o_b of each layer, by the names that PEFT has" \
        test "$(tensors "$(last adapter)/adapter_model.safetensors" '^base_model\.model\.model\.layers\.[012]\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.lora_B\.weight$' | wc -l) $(tensors "$(last adapter)/adapter_model.safetensors" lora_B | wc -l)" = "15 15"
    check "... which adapter_config.json says in full, as compressors have a kv_proj, too" grep -q '"target_modules": ".*self_attn.*q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj' "$(last adapter)/adapter_config.json"
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    go --from base --lora adapter --merge 1 --export-hf merged
    check "... merged: the text that base and adapter write, and not the base's" \
        test "$(write --from merged)" = "$(write --from base --lora adapter)" -a "$(write --from base)" != "$(write --from merged)"
    check "... what has no adapter goes along, bit for bit" cmp <(numbers base | grep -vE 'attn\.w[qko]' | sort) <(numbers merged | grep -vE 'attn\.w[qko]' | sort)
    rm -rf other && go "${tune[@]}" --recompute 3 --head-rows 5 --threads 2 --run other
    check "--recompute 3 --head-rows 5 --threads 2: the same adapter" same_run adapter other
    go "${tune[@]}" --lora-targets all-linear --lora-parameters mlp.experts.gate_up_proj,mlp.gate.weight --run wide
    check "--lora-targets all-linear, experts and routers" test "$(tensors "$(last wide)/adapter_model.safetensors" 'shared_experts\..*lora_B' | wc -l) $(tensors "$(last wide)/adapter_model.safetensors" 'mlp\.(experts|gate)\..*lora_B' | wc -l)" = "9 6"
    rewrite base rounded 't = {n: (d, s, b"".join(b"\0\0" + x[i + 2:i + 4] for i in range(0, len(x), 4))) if d == "F32" else (d, s, x) for n, (d, s, x) in t.items()}'
    rows 16 >in
    mkdir alone && cp "$(last adapter)"/adapter_* alone
    for i in fp32 bf16; do go --from rounded --lora alone --base-dtype $i --probe in --probe-out $i.out; done
    check "a base in bf16 that fits: the same probe as in fp32" cmp fp32.out bf16.out
    for i in indexer mtp-weight bias-rate; do
        refuse "--$i beside an adapter" "--$i: is not for adapters, beside which" "${tune[@]}" --$i $([ $i = indexer ] && echo kl || echo 0.5)
    done
}

# ---- the same bits another way ----

bits() {
    echo "# the same bits"
    local i steady=("${mixed[@]}" --ema 0.9 --schedule constant --warmup 0)
    for i in $(is_quick && echo taught || echo tiny windows chosen taught); do
        rm -rf whole leg
        go "${steady[@]}" --config $i.json --run whole
        go "${steady[@]}" --config $i.json --steps 4 --threads 3 --run leg && go --resume --run leg --steps 8 --threads 2 --recompute 3 --head-rows 5
        verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" \
            "$i: stopped after 4 of 8 updates, resumed with other --threads, --recompute, --head-rows: the same bytes" "$(<err)"
    done
    if is_quick; then return; fi
    rm -rf whole leg
    steady+=(--doc-reset 1 --train documents --config taught.json)
    go "${steady[@]}" --run whole && go "${steady[@]}" --steps 4 --threads 3 --run leg && go --resume --run leg --steps 8 --threads 2 --recompute 2
    verdict "$(same_run leg whole; echo $?)" "documents: the same bytes" "$(<err)"
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
    is_quick && return
    go --from book --generate "line 7" --temperature 0 --max-new-tokens 150 --generate-batch 1 && mv out once
    check "150 tokens in 48 positions: they begin as 40 do" test "$(head -c ${#one} once)" = "$one"
}

run_parts $parts
