#!/usr/bin/env bash
# Files of train_glm5 as its user meets them: official names, folders in fp8 of whose matrices no size is one of whole blocks, what is missing,
# unknown, cut off. Against transformers they are held by dev/ref/check_hf.py --model glm5 --files-with, against PEFT by dev/ref/check_lora.py.
#     dev/test_glm5_files.sh                 all parts
#     dev/test_glm5_files.sh names fp8       some of them: names fp8 broken choices talks
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
parts=${*:-names fp8 broken choices talks}

need_build trainer "CPU=1" train_glm5
limit=60  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files: a model of every kind of layer, of which an indexer chooses 5 of 19 positions; one of more than a block in each size ----

write_texts
echo '{"model_type":"glm_moe_dsa","vocab_size":257,"hidden_size":20,"num_hidden_layers":4,"max_position_embeddings":48,"num_attention_heads":3,
"num_key_value_heads":3,"q_lora_rank":14,"kv_lora_rank":11,"qk_nope_head_dim":7,"qk_rope_head_dim":6,"v_head_dim":9,"index_n_heads":4,
"index_head_dim":10,"index_topk":5,"intermediate_size":26,"moe_intermediate_size":12,"n_routed_experts":4,"num_experts_per_tok":2,
"n_shared_experts":2,"mlp_layer_types":["dense","sparse","sparse","sparse"],"indexer_types":["full","full","shared","full"],"head_dim":192,
"rope_parameters":{"rope_type":"default","rope_theta":8000000},"num_nextn_predict_layers":1,"latent_norm_eps":1e-6}' >tiny.json
edit tiny.json wide.json hidden_size 150 num_hidden_layers 3 q_lora_rank 134 kv_lora_rank 140 qk_nope_head_dim 45 qk_rope_head_dim 22 v_head_dim 50 \
    index_n_heads 3 index_head_dim 46 intermediate_size 201 moe_intermediate_size 137 n_shared_experts 1 \
    mlp_layer_types '["dense","sparse","sparse"]' indexer_types '["full","shared","full"]'
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)

same_numbers() { cmp <(numbers "$1") <(numbers "$2"); }

# the same as dev/ref/glm5_config.py has them for a config.json
official() { "$python" - "$root/dev/ref" "$1" <<'PYTHON'
import json, sys
sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import numpy as np, glm5, glm5_config, trainer
cfg = replace(glm5_config.read_config(json.load(open(sys.argv[2])), sys.argv[2], 1, 1), mtp=True)
p = {row.name: np.zeros(row.shape, np.float32) for row in glm5_config.parameter_table(cfg)}
for name, x in sorted(trainer.to_disk(glm5.MODEL, p, cfg).items()): print(name, "F32", *x.shape)
PYTHON
}

# ---- names ----

names() {
    echo "# official names"
    rows 19 >in
    go "${start[@]}" --export-hf hf && go --from hf --probe in --probe-out before
    check "names, types and shapes of all $(shapes hf | wc -l) tensors are those of dev/ref/glm5_config.py" \
        eval 'cmp <(official tiny.json) <(shapes hf)'
    check "... three layers and the module have an indexer, the one that shares has none" \
        test "$(shapes hf | grep -c 'indexer.wk.weight') $(shapes hf | grep -c 'layers.2.*indexer')" = "4 0"
    check "... the module is one layer more, with its own norms and projection" \
        test "$(shapes hf | grep -cE '^model\.layers\.4\.(enorm|hnorm|eh_proj|shared_head\.norm)\.weight F32 20( 40)?$') $(shapes hf | grep -cE 'layers\.4\.(embed|shared_head\.head)')" = "4 0"
    "$python" "$root/dev/ref/glm5.py" --from hf --probe in --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
    verdict $? "a probe is to the last bit that of dev/ref/glm5.py" "$(<err)"

    echo "# round trips, byte for byte"
    go --from hf --export-hf again && cmp {hf,again}/model.safetensors && cmp {hf,again}/config.json
    verdict $? "read and written again: model.safetensors and config.json" "$(<err)"
    go --from hf --export-hf shards --shard-gb 2e-5 && go --from shards --export-hf joined && cmp {hf,joined}/model.safetensors
    verdict $? "by way of $(ls shards/*.safetensors | wc -l) shards" "$(<err)"
    rewrite hf fused 'fuse()'
    go --from fused --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
    verdict $? "experts of a layer as one tensor, as transformers has them in memory: the same logits and loss" "$(<err)"
    go --from fused --export-hf again && same_numbers fused again
    verdict $? "... and they are written so" "$(<err)"
    go --from hf --export-hf half --export-dtype bf16 && go --from half --export-hf again --export-dtype bf16 && cmp {half,again}/model.safetensors
    verdict $? "as bf16" "$(<err)"
    check "... where biases of routers stay floats, and nothing else does" \
        test "$(shapes half | grep -c ' F32 ') $(shapes half | grep -c 'e_score_correction_bias F32 4$')" = "4 4"
    go --from half --export-hf again --export-dtype as-read && cmp {half,again}/model.safetensors
    verdict $? "... and as it was read" "$(<err)"
    edit hf/config.json none.json num_nextn_predict_layers 0
    rewrite hf without 't = {n: x for n, x in t.items() if not n.startswith("model.layers.4.")}'
    cp none.json without/config.json
    go --from without --export-hf again && same_numbers without again && [ ! -s err ]
    verdict $? "a folder without the module, as transformers writes it: not a word" "$(<err)"
    cp hf/config.json without/config.json
    go --from without --export-hf again && same_numbers without again && [ ! -s err ] && grep -q '"num_nextn_predict_layers": 0' again/config.json
    verdict $? "... whose config.json counts one, as published ones do" "$(<err)"
    go --from hf --probe in --probe-out after --mtp 0
    check "--mtp 0: a line says how many tensors are left out" \
        test "$(wc -l <err) $(grep -c "/model.safetensors: $(shapes hf | grep -c layers.4) tensors of the module that predicts the token after the next are left out, as --mtp 0 says: keep this folder\$" err)" = "1 1"
}

# ---- folders in fp8 ----

# Beside one in fp8, `release`, the same numbers as floats: dev/ref/fp8.py makes both
fp8() {
    local i text tune=("${start[@]:2}" --grad-accum 2 --lora-rank 3 --schedule constant --warmup 0)
    local keep='embed_tokens|lm_head|mlp\.gate\.|weights_proj|eh_proj'
    evaluated() { go --eval-only --val text --seq-len 19 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
    writes() { go --generate "line 7" "$@" && cat out; }
    echo "# a folder in fp8, no size of a matrix one of whole blocks"
    rows 19 >in
    go "${start[@]}" --config wide.json --steps 8 --export-hf begun &&
        "$python" "$root/dev/ref/fp8.py" begun release --release floats --keep "$keep" --shards 3
    edit release/config.json release/config.json quantization_config '{"quant_method":"fp8","fmt":"e4m3","activation_scheme":"dynamic",
        "weight_block_size":[128,128],"modules_to_not_convert":["lm_head","model.layers.0.self_attn.indexers_proj","model.layers.0.mlp.gate"]}'
    check "... all but embedding, head, routers, weights of heads and the module's projection" \
        test "$(cat release/*.safetensors | grep -aoE '"[^"]*(proj|wq_b|wk|with_mqa)\.weight_scale_inv"' | wc -l)" = "$(shapes begun | grep -E '(proj|wq_b|wk|with_mqa)\.weight' | grep -cvE 'weights_proj|eh_proj')"
    text=$(evaluated --from floats)
    check "the loss of validation, $(cut -d'|' -f2 <<<"$text"), is that of floats" test -n "$text" \
        -a "$text" = "$(evaluated --from release --threads 2)" -a "$text" = "$(evaluated --from release --weights fp32)"
    check "... and the text" test -n "$(writes --from floats)" -a "$(writes --from floats)" = "$(writes --from release)"
    check "... with short vectors as the cache, too" test "$(writes --from floats --absorb 1)" = "$(writes --from release --absorb 1)"
    go --from floats --probe in --probe-out before && go --from release --probe in --probe-out after && cmp before after
    verdict $? "all of it learns, as floats: logits, loss and every gradient of a probe" "$(<err)"
    go --from floats --export-hf plain && go --from release --export-hf taken && cmp {plain,taken}/model.safetensors &&
        cmp {plain,taken}/config.json && ! grep -q quantization taken/config.json
    verdict $? "written as floats: every number that NumPy has" "$(<err)"
    go "${tune[@]}" --from floats --run beside_floats && go "${tune[@]}" --from release --run beside && same_model beside_floats beside
    verdict $? "an adapter learns what it learns beside floats" "$(<err)"
    check "... beside what lies in the files" \
        test "$(boxed matrices "fp8 and all else as in the files") $(grep -c '"weights": "fp8"' beside/settings.json)" = "1 1"
    mkdir adapter && cp "$(last beside)"/adapter_* adapter
    go --from floats --lora adapter --probe in --probe-out before && go --from release --lora adapter --probe in --probe-out after && cmp before after
    verdict $? "... logits, loss and gradients of its probe" "$(<err)"
    rm -rf leg && go "${tune[@]}" --from release --steps 2 --run leg && go --resume --run leg --steps 4 && same_model beside leg
    verdict $? "... stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
    go --from release --export-hf as_read --export-dtype as-read && text=$(same_tensors release as_read '^$') &&
        text=$(same_tensors as_read release '^$')
    verdict $? "--export-dtype as-read: types, bytes and scales of every tensor are the folder's" "$text $(<err)"
    rm -rf as_read whole leg && go "${start[@]:2}" --from release --freeze '*experts*' --save-every 2 --run leg --export-hf whole --export-dtype as-read &&
        rm -r leg/step_000004 && go --run leg --resume --export-hf as_read && text=$(diff -rq whole as_read)
    verdict $? "... of a run that goes on: the bytes of one that never stopped, experts in fp8" "$text $(<err)"
    go --from release --lora adapter --merge --export-hf merged --export-dtype as-read &&
        text=$(same_tensors release merged '^model\.layers\.[012]\.self_attn\.(q_a|q_b|kv_a|kv_b|o)_proj')
    verdict $? "... merged with the adapter: what it has changed is bf16, all else has its bytes" "$text $(<err)"
    for i in BF16 F8_E8M0; do
        rm -rf release floats
        "$python" "$root/dev/ref/fp8.py" begun release --release floats --keep "$keep" --scales $i
        check "scales as $i: the same loss as floats" test "$(evaluated --from floats)" = "$(evaluated --from release)"
    done

    echo "# in fp8, refused"
    local down=model.layers.1.mlp.experts.3.down_proj.weight kv=model.layers.2.self_attn.kv_a_proj_with_mqa.weight
    rm -rf release floats && "$python" "$root/dev/ref/fp8.py" begun release --release floats --keep "$keep"
    broken_fp8() {  # PROMISE TEXT PYTHON
        rewrite release broken "W, S = '$down', '${down}_scale_inv'; d, s, x = t[S]; $3"
        for i in fp8 fp32; do refuse "$1, --weights $i" "broken/model.safetensors: tensor \"$2" --from broken --weights $i --generate x; done
    }
    broken_fp8 "no scales" "$down\" is F8_E4M3 and has no scales \"${down}_scale_inv\"" 'del t[S]'
    broken_fp8 "scales of whole blocks alone" \
        "${down}_scale_inv\": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (2, 2), found F32 (1, 1)" 't[S] = d, [1, 1], x[:4]'
    broken_fp8 "scales that are NaN" "${down}_scale_inv\": expected finite scales, found nan" 't[S] = d, s, x[:12] + struct.pack("<f", float("nan"))'
    broken_fp8 "numbers that are NaN" "$down\": expected numbers of e4m3, found 1 bytes that are NaN" 'd, s, x = t[W]; t[W] = d, s, x[:99] + b"\x7f" + x[100:]'
    rewrite release broken "t['${down%weight}scale'] = t['${down}_scale_inv']"
    refuse "scales by two names" "$down\": expected scales \"${down}_scale_inv\" or \"${down%weight}scale\", found both" --from broken --generate x
    rewrite release broken "t['model.norm.weight_scale_inv'] = t['${down}_scale_inv']"
    refuse "scales of what is not in fp8" 'tensor "model.norm.weight": expected F8_E4M3 or I8, for "model.norm.weight_scale_inv" has scales of it, found BF16' --from broken --generate x
    rewrite release broken "d, s, x = t['${kv}_scale_inv']; t['${kv}_scale_inv'] = d, [1, 2], x[:8]"
    refuse "the last block of rows of keys without a scale (trap 14)" \
        "tensor \"${kv}_scale_inv\": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (2, 2), found F32 (1, 2)" --from broken --generate x
    edit release/config.json some.json quantization_config '{"quant_method":"fp8","weight_block_size":[64,128]}'
    rewrite release broken '' && cp some.json broken/config.json
    refuse "other blocks" \
        '"quantization_config": expected null, or quant_method fp8 with fmt e4m3, activation_scheme dynamic and weight_block_size [128, 128]' --from broken --generate x
}

# ---- files that are refused ----

broken() {
    local name i
    echo "# files that are refused"
    go "${start[@]}" --export-hf hf
    bad() {  # PROMISE TEXT PYTHON
        rewrite hf bad "$3"
        refuse "$1" "$2" --from bad --train text --seq-len 16
    }
    for name in model.embed_tokens.weight lm_head.weight model.norm.weight model.layers.0.self_attn.q_a_layernorm.weight model.layers.2.self_attn.kv_b_proj.weight \
        model.layers.3.self_attn.indexer.k_norm.bias model.layers.1.self_attn.indexer.weights_proj.weight model.layers.0.mlp.up_proj.weight \
        model.layers.2.mlp.gate.e_score_correction_bias model.layers.3.mlp.experts.2.down_proj.weight model.layers.1.mlp.shared_experts.gate_proj.weight \
        model.layers.4.eh_proj.weight model.layers.4.self_attn.indexer.wq_b.weight; do
        bad "$name is missing" "bad/model.safetensors: tensor \"$name\" is missing" "t.pop('$name')"
        bad "... has another shape" "bad/model.safetensors: tensor \"$name\": expected " "d, s, x = t['$name']; t['$name'] = d, [*s, 2], x * 2"
    done
    bad "... rows that are columns" 'tensor "model.layers.0.self_attn.kv_b_proj.weight": expected' 'n = "model.layers.0.self_attn.kv_b_proj.weight"; d, s, x = t[n]; t[n] = d, s[::-1], x'
    bad "whole numbers" 'tensor "model.norm.weight": expected F32, F16 or BF16, found I64' 't["model.norm.weight"] = "I64", [20], bytes(160)'
    bad "NaN" 'expected finite numbers, found 1 of model.layers.1.mlp.gate.e_score_correction_bias' 'n = "model.layers.1.mlp.gate.e_score_correction_bias"; d, s, x = t[n]; t[n] = d, s, struct.pack("<f", float("nan")) + x[4:]'
    for name in model.layers.2.self_attn.indexer.wk.weight model.layers.9.input_layernorm.weight model.layers.0.mlp.gate.weight lm_head.bias; do
        rewrite hf other "t['$name'] = t['model.layers.0.self_attn.indexer.wk.weight']"
        go --from other --export-hf written
        check "$name, which this model has not: a line, and it is not written" \
            test "$(wc -l <err) $(grep -c "$name" err) $(shapes written | grep -c "$name")" = "1 1 0"
    done
    rewrite hf other 't["model.layers.4.embed_tokens.weight"] = t[E]; t["model.layers.4.shared_head.head.weight"] = t[H]'
    go --from other --export-hf written && [ ! -s err ] && same_numbers hf written
    verdict $? "embedding and head once more in the module: not a word, and they are not written" "$(<err)"
    for i in 4 100 3000 "$(($(stat -c %s hf/model.safetensors) - 1))"; do
        rm -rf bad && cp -r hf bad && head -c $i hf/model.safetensors >bad/model.safetensors
        refuse "a file of $i bytes that was longer" "bad/model.safetensors: " --from bad --generate x
    done
    rm -rf shards bad && go --from hf --export-hf shards --shard-gb 2e-5
    name=$(ls shards/model-*.safetensors | tail -n 1)
    cp -r shards bad && rm bad/${name##*/}
    refuse "a shard that is missing" "${name##*/}" --from bad --generate x
    rm -rf bad && cp -r hf bad && rm bad/config.json
    refuse "no config.json" "config.json" --from bad --generate x
    edit hf/config.json some.json hidden_size 21
    rm -rf bad && cp -r hf bad && cp some.json bad/config.json
    refuse "a config.json of another model" 'tensor "model.embed_tokens.weight": expected 2 dimensions (257, 21), found 2 (257, 20): another model than config.json says' --from bad --generate x
}

# ---- choices of a probe, and those of another ----

choices() {
    local name i
    echo "# choices of a probe"
    rows 19 >in
    go "${start[@]}" --steps 20 --export-hf hf && go --from hf --probe in --probe-out before
    check "a probe has what four indexers and four routers have chosen" test "$(tensors before '^choice\.' | cut -d' ' -f1 | xargs)" = "$(echo \
        choice.model.layers.{0.self_attn.indexer,{1.mlp.gate,1.self_attn.indexer},2.mlp.gate,{3,4}.{mlp.gate,self_attn.indexer}})"
    go --from hf --probe in --probe-out after --inject before && cmp before after
    verdict $? "--inject: its own choices, the same bytes" "$(<err)"
    # an indexer and the bias of a router decide on nothing but choices
    rewrite hf moved 'import random; random.seed(1)
for n, (d, s, x) in list(t.items()):
    if "indexer" in n or "e_score" in n: t[n] = d, s, struct.pack(f"<{len(x) // 4}f", *(random.gauss(0, 0.3) for _ in range(len(x) // 4)))'
    go --from moved --probe in --probe-out other && ! cmp -s <(tensors before choice) <(tensors other choice)
    verdict $? "another indexer and other biases of routers: another choice" "$(<err)"
    go --from hf --probe in --probe-out after --inject other && cmp other after && ! cmp -s before after
    verdict $? "--inject of that: to the last bit its logits, loss and gradients" "$(<err)"
    for i in 1 2 3; do
        go --from hf --probe in --probe-out after --inject other --recompute $i --threads $i && cmp other after
        verdict $? "... --recompute $i" "$(<err)"
    done
    mkdir folder && cp other folder/model.safetensors
    theirs() { rewrite folder theirs "$1" && mv theirs/model.safetensors file; }  # PYTHON: what becomes of `other`
    theirs 'import random
for n, (d, s, x) in list(t.items()):
    if "indexer" in n:
        rows = struct.iter_unpack("<5i", x)  # as transformers has them: in any order, with positions that its mask hides
        rows = [random.sample(y, 5) for y in ([*(v for v in y if v >= 0), *range(i % 19 + 1, i % 19 + 1 + y.count(-1))] for i, y in enumerate(rows))]
        t[n] = "I32", s, b"".join(struct.pack("<5i", *y) for y in rows)
    elif n.startswith("choice"): t[n] = "I64", s, b"".join(struct.pack("<2q", *y[::-1]) for y in struct.iter_unpack("<2i", x))
    else: del t[n]'
    go --from hf --probe in --probe-out after --inject file && cmp other after
    verdict $? "lists as transformers has them, in any order, with positions that are not there yet, as I64: the same" "$(<err)"
    theirs 't = {n: x for n, x in t.items() if "mlp.gate" in n}'
    go --from hf --probe in --probe-out after --inject file
    check "a file of experts alone: indexers choose for themselves" eval \
        'cmp <(tensors after "choice.*gate") <(tensors other "choice.*gate") && cmp <(tensors after "choice.*0.self_attn") <(tensors before "choice.*0.self_attn")'
    examples 1 5 "1 2 3 4 5" "2 3 4 5 6" >short
    go --from hf --probe short --probe-out before && go --from hf --probe short --probe-out after --inject before && cmp before after
    verdict $? "a row of no more positions than are chosen: the same bytes" "$(<err)"
    check "... each sees all up to its own" test "$(tensors before choice.*0.self_attn | cut -d' ' -f2- | xargs)" = \
        "0 -1 -1 -1 -1 0 1 -1 -1 -1 0 1 2 -1 -1 0 1 2 3 -1 0 1 2 3 4"
    "$python" "$root/dev/ref/glm5.py" --from hf --probe short --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
    verdict $? "... as dev/ref/glm5.py has it" "$(<err)"

    echo "# choices that are refused"
    local key=choice.model.layers.3.self_attn.indexer gate=choice.model.layers.2.mlp.gate
    hidden() {  # PROMISE TEXT PYTHON
        theirs "K, G = '$key', '$gate'; d, s, x = t[K]; e, u, y = t[G]; $3"
        refuse "$1" "$2" --from hf --probe in --inject file
    }
    hidden "no choices" "file: expected tensors choice.<module>, as --probe writes them, found none" 't = {n: v for n, v in t.items() if n[0] != "c"}'
    hidden "those of a layer that shares another's" "found choice.model.layers.2.self_attn.indexer: leave it out" \
        't["choice.model.layers.2.self_attn.indexer"] = t[K]'
    hidden "floats" "file: $key: expected I32 or I64 of shape (2, 19, 5), found F32 of shape (2, 19, 5)" 't[K] = "F32", s, x'
    hidden "another batch" "file: $key: expected I32 or I64 of shape (2, 19, 5), found I32 of shape (1, 38, 5)" 't[K] = d, [1, 38, 5], x'
    hidden "fewer than are chosen" "file: $key: expected I32 or I64 of shape (2, 19, 5), found I32 of shape (2, 19, 4)" 't[K] = d, [2, 19, 4], x[:608]'
    hidden "more experts" "file: $gate: expected I32 or I64 of shape (2, 19, 2), found I32 of shape (2, 19, 5)" 't[G] = t[K]'
    hidden "a position beyond the row" "file: $key[1, 3]: expected numbers 0..18, found 19" 't[K] = d, s, x[:440] + struct.pack("<i", 19) + x[444:]'
    hidden "too few of those that are there" "file: $key[0, 2]: expected 3 different numbers 0..2, found 2" 't[K] = d, s, x[:40] + struct.pack("<5i", 0, 2, 9, -1, -1) + x[60:]'
    hidden "one twice" "file: $key[0, 7]: expected 5 different numbers 0..7, found 4" 't[K] = d, s, x[:140] + struct.pack("<5i", 0, 2, 2, 6, 7) + x[160:]'
    hidden "an expert twice" "file: $gate[0, 0]: expected 2 different numbers 0..3, found 1" 't[G] = e, u, struct.pack("<2i", 3, 3) + y[8:]'
    hidden "an expert that is not there" "file: $gate[0, 0]: expected numbers 0..3, found -1" 't[G] = e, u, struct.pack("<2i", 3, -1) + y[8:]'
    head -c 100 other >file
    refuse "a file that is cut off" "file: " --from hf --probe in --inject file
    refuse "no file" "nowhere: " --from hf --probe in --inject nowhere
    refuse "a probe in its place" "--probe-out: other is what --inject reads: give another name" --from hf --probe in --inject other --probe-out other
    refuse "--inject of a run" "--inject: is for --probe" "${start[@]}" --inject other
}

# ---- conversations ----

talks() {
    local i
    echo "# conversations, --chat-template glm5"
    for i in 1 2 3 4 5 6; do echo '{"messages":[{"role":"user","content":"say '$i'"},{"role":"assistant","content":"it is '$i'!"}]}'; done >talks.jsonl
    edit tiny.json talk.json max_position_embeddings 96 index_topk 96
    go --config talk.json --train talks.jsonl --tokenizer bytes --chat-template glm5 --seq-len 72 --batch-size 6 --lr 1e-2 --steps 120 \
        --weight-decay 0 --run run --export-hf tuned
    check "it learns them" below "$(value run 120 loss)" 0.3
    check "... whose template goes along" grep -q '\[gMASK\]<sop>' tuned/chat_template.jinja
    echo '{"messages":[{"role":"user","content":"say 4"}]}' >asked.jsonl
    go --from tuned --generate-file asked.jsonl --generate-out said.jsonl --temperature 0 --max-new-tokens 20 --think 0 &&
        grep -q '"it is 4!"' said.jsonl
    verdict $? "... and is found in the folder: it answers, and stops where a turn of the user would begin" "$(cat said.jsonl out err)"
}

run_parts $parts
