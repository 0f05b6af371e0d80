#!/usr/bin/env bash
# train_qwen3 as its user meets it: presets, options, config.json of five architectures, files, ranks, kills, generation. About a
# minute of one core after the build. What it computes is held against transformers by dev/ref/check_hf.py --model qwen.
#     dev/test_qwen.sh                       all parts
#     dev/test_qwen.sh options ranks         some of them: presets options configs files bits ranks kills text lora fp8 releases fp4
#     dev/test_qwen.sh quick                 presets, configs, files and bits; of ranks, kills and lora a few; fp8 and the like, where named, too
#     KILLS=300 dev/test_qwen.sh kills       more random kills than 20
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 2 || echo 20)}
parts=${*:-$(is_quick && echo presets configs files bits ranks kills lora || echo presets options configs files bits ranks kills text lora fp8 releases fp4)}

need_build trainer "CPU=1" train_qwen3
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files: one small config.json of each architecture ----

write_texts
echo '{"model_type":"qwen3","vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,
"head_dim":6,"intermediate_size":12,"max_position_embeddings":48,"rope_theta":10000}' >tiny.json
edit tiny.json qwen2.json model_type '"qwen2"' tie_word_embeddings true use_sliding_window true sliding_window 5 max_window_layers 1
edit tiny.json mistral.json model_type '"mistral"' sliding_window 5 rms_norm_eps 1e-5
edit tiny.json llama.json model_type '"llama"' attention_bias true num_key_value_heads 4 tie_word_embeddings true
edit tiny.json moe.json model_type '"qwen3_moe"' num_hidden_layers 3 num_experts 5 num_experts_per_tok 2 moe_intermediate_size 10 \
    norm_topk_prob true mlp_only_layers '[1]' output_router_logits true router_aux_loss_coef 0.02
edit moe.json scores.json norm_topk_prob false num_experts_per_tok 1 output_router_logits false attention_bias true
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
mixed=("${start[@]}" --grad-accum 4 --steps 12 --val-fraction 0.1 --eval-every 6 --sample-every 6 --max-new-tokens 8 --save-every 4)

# ---- presets ----

presets() {
    echo "# presets"
    local name count
    while read -r name count; do
        timeout 60 "$trainer" --model $name --plan 1 --seq-len 64 --batch-size 1 >out 2>err
        check "$name: $count parameters" test "$(boxed parameters "[0-9.]*[KMBk] = $count.*")" = 1
    done <<'SIZES'
tiny 139776
small 44797952
qwen2.5-0.5b 494032768
qwen3-0.6b 596049920
qwen3-8b 8190735360
qwen3-30b-a3b 30532122624
mistral-7b 8224247808
SIZES
    check "mistral-7b: every layer has a window" test "$(boxed '  window' '4096 positions, in 32 layers')" = 1
    edit moe.json windows.json num_hidden_layers 64 hidden_size 8192 moe_intermediate_size 32768
    timeout 60 "$trainer" --config windows.json --dry-run --comm-timeout 1 >out 2>err
    check "parameters that no memory holds: status 1, no smaller batch would help" \
        test "$? $(grep -cE 'free: try (.*--(ep|tp|pp|zero).* on (about )?[0-9]+ machines.*|a smaller model)$' err)" = "1 1"
    # what the line names fits by the planner's numbers: "--recompute 3 with --tp 8 on 8 machines (one rank on each) or --pp 13 on 13"
    edit moe.json many.json num_hidden_layers 32 hidden_size 8192 moe_intermediate_size 8192
    searched "$trainer" --config many.json --dry-run
    free=$(sed -nE 's/.* ([0-9.]+) GiB are free: try .*/\1/p' err)
    sed -nE '/free: try --recompute 3 with/{s/.*free: try --recompute 3 with //; s/ machines \(one rank on each\)//; s/, or a smaller model$//; s/, | or /\n/g; p}' err >ways
    check "32 layers that no machine holds: what to try is named" test -s ways
    while read -r way; do
        timeout 60 "$trainer" --config many.json --dry-run --recompute 3 --plan "${way##* }" ${way% on *} >out 2>err
        check "${way% on *} on ${way##* } machines, which was named for $free GiB, fits" \
            awk -v free="$free" -v took="$(sed -nE 's/.*memory of (rank 0 *\||each rank:) ([0-9.]+) GiB.*/\2/p' out)" 'BEGIN { exit !(took > 0 && took <= free) }'
    done <ways
    timeout 60 "$trainer" --model qwen3-0.6b --dry-run --batch-size 1 --seq-len 40960 >out 2>err
    check "a row too long for this machine, if it is: --cp, with the machines that it takes" \
        test $? = 0 -o "$(grep -cE 'free: try --recompute 3.*, a smaller --seq-len or --model, or --cp [0-9]+ on [0-9]+ machines$' err)" = 1
    timeout 60 "$trainer" --model tiny --dry-run --batch-size 65536 --seq-len 256 --head-rows 2147483647 >out 2>err
    check "a batch that no memory holds: status 1, a line with a remedy" \
        test "$? $(grep -cE 'free: try a smaller --batch-size \(at most [1-9][0-9]*; [0-9]+ with --recompute 3\), --seq-len or --model(, or --cp [0-9]+ on [0-9]+ machines)?$' err)" = "1 1"
    refuse "an unknown preset" '--model: expected tiny, small, qwen2.5-0.5b, qwen3-0.6b, qwen3-8b, qwen3-30b-a3b or mistral-7b, found "huge"' \
        --model huge --train text
}

# ---- options ----

options() {
    local i
    echo "# options of this trainer"
    for i in 0 2 3; do flag same 4 --recompute $i; done
    for i in qwen2 llama moe scores; do flag same "" --recompute 3 --config $i.json; done
    for i in 0 1 2 3; do flag same "" --recompute $i --config moe.json --freeze 'first:1' --doc-reset 1 --train documents; done
    for i in 1 7; do flag same 0 --head-rows $i; done
    flag same 0 --head-rows 5 --verify-every 1
    flag 'config router_aux_loss_coef 0.5 && other && [ "$(boxed balance "bias none, loss 0.5")" = 1 ]' -1 --aux-alpha 0.5 --config moe.json
    flag 'config output_router_logits false && other && [ "$(boxed balance "bias none, loss none")" = 1 ]' 1001 --aux-alpha 0 --config moe.json
    flag 'config output_router_logits true && other' "" --aux-alpha 0.25 --config scores.json
    refuse "--ep-room of a model without experts" "--ep-room: is for --ep, and for models with experts" "${start[@]}" --ep-room 2
    refuse "--aux-alpha of a model without experts" "--aux-alpha: is for models with experts" "${start[@]}" --aux-alpha 0.1
    refuse "--graph in a program for CPUs" "--graph: is for GPUs" "${start[@]}" --graph 1
    tried[--tied]=1 tried[--weights]=1
    refuse "--tied of a model that says so itself" "--tied: is for --model; config.json says it as tie_word_embeddings" "${start[@]}" --tied 1
    for i in 0 1; do
        rm -rf with && go --model tiny --tied $i --train text --seq-len 8 --batch-size 1 --steps 1 --run with
        check "--tied $i: $((1 - i)) matrices of the head" \
            test "$(tensors with/step_000001/model.safetensors lm_head | wc -l) $(grep -c '"tie_word_embeddings": true' with/step_000001/config.json)" = "$((1 - i)) $i"
    done
    refuse "training what is stored as bf16" "--weights: bf16 and fp8 are for what does not learn" "${start[@]}" --weights bf16
    mkdir alone && cp with/step_000001/model.safetensors alone
    refuse "a model without its config.json" "alone/config.json: cannot be opened" --from alone/model.safetensors --train text

    echo "# options of all trainers"
    flag other 2 --doc-reset 1 --train documents
    flag other "" --doc-reset 1 --train documents --config mistral.json
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5
    flag 'same_model $plain with && grep -q "noise_scale" with/metrics.jsonl' -1 --noise-scale 2 --grad-accum 4 --config moe.json
    answers 10 text >examples
    flag 'grep -q "HellaSwag 100.00% .* 10 of 10$" out' "" --hellaswag examples --eval-every 60 --steps 60
    hellaswag_beside "" "--recompute 3 --config moe.json" "--doc-reset 1 --head-rows 3"

    echo "# what learns"
    frozen moe '*.experts.3.*' '\.experts\.3\.'
    frozen moe 'model.embed_tokens.*,*.layers.0.*,*.experts.3.*' 'embed_tokens|layers\.0\.|experts\.3\.'  # of --help
    frozen moe '*.mlp.gate.weight' 'mlp\.gate\.weight'
    frozen moe '*.gate_proj.*' 'gate_proj'
    frozen tiny 'first:1,model.embed_tokens.weight' 'layers\.0\.|embed_tokens'
    frozen tiny '*norm*' 'norm'
    frozen tiny 'indices:1' 'layers\.1\.'
    frozen qwen2 '*.bias' '\.bias'
    frozen qwen2 '*.k_proj.*,*.up_proj.*' 'k_proj|up_proj'
    frozen llama '*.o_proj.bias,model.embed_tokens.weight' 'o_proj\.bias|embed_tokens'
    refuse "--freeze without a tensor" "matches no tensor" "${start[@]}" --freeze '*.bias'
    refuse "nothing that learns" "every tensor is frozen" "${start[@]}" --freeze 'first:2,model.*,lm_head.weight'

    go --help
    local missing="" name
    for name in tied weights aux-alpha recompute head-rows; do
        grep -q "^  --$name " out && [ -n "${tried[--$name]-}" ] || missing+=" $name"
    done
    check "each option of this trainer's own is in --help and was tried (not:$missing)" test -z "$missing"
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
}

# ---- config.json ----

configs() {
    echo "# config.json"
    local i base=tiny.json
    echo '{"model_type":"qwen3","max_position_embeddings":16,"vocab_size":257,"num_hidden_layers":1,"hidden_size":8,"num_attention_heads":2,"num_key_value_heads":1,"intermediate_size":4}' >needed.json
    becomes "the eight keys that doc/qwen.md calls needed are enough; the others are what it says they are" \
        'head_dim": 128|rms_norm_eps": 1e-6|rope_theta": 10000.0|tie_word_embeddings": false|attention_bias": false|use_sliding_window": false' 7 needed
    for i in qwen2 mistral llama; do
        becomes "$i without head_dim: hidden_size / num_attention_heads" 'head_dim": 4,' 1 needed model_type "\"$i\""
    done
    becomes "mistral without sliding_window: 4096" 'sliding_window": 4096' 1 needed model_type '"mistral"'
    becomes "... null: none" 'sliding_window": null' 1 mistral sliding_window null
    becomes "qwen2, a window that is not used" 'sliding_window": null|use_sliding_window": false' 2 qwen2 use_sliding_window false
    becomes "... that is used, but null" 'sliding_window": null|use_sliding_window": false' 2 qwen2 sliding_window null
    becomes "... of a list of layers" 'use_sliding_window": true|sliding_window": 5' 2 qwen2 layer_types '["sliding_attention","full_attention"]'
    check "... which it is" test "$(grep -A2 layer_types with/step_000001/config.json | tr -d ' \n')" = '"layer_types":["sliding_attention","full_attention"'
    becomes "llama has no window, whatever stands there" 'sliding_window|layer_types' 0 llama sliding_window 5
    becomes "theta in rope_parameters: written there and where older programs look" 'rope_theta": 500.0' 2 tiny rope_theta - rope_parameters '{"rope_type":"default","rope_theta":500}'
    becomes "qwen3_moe: norm_topk_prob is false where it is not said, and no loss of routers" 'norm_topk_prob": false|output_router_logits": false' 2 \
        moe norm_topk_prob - output_router_logits -
    becomes "... experts in every second layer" 'decoder_sparse_step": 1' 1 moe decoder_sparse_step 2 mlp_only_layers null
    check "... are MLPs in the others" test "$(grep -A3 mlp_only_layers with/step_000001/config.json | tr -d ' \n')" = '"mlp_only_layers":[0,2],'
    for i in 'mlp_only_layers [0,1,2]' 'decoder_sparse_step 9' 'num_experts 0'; do
        becomes "... $i: MLPs alone, a finite loss, num_experts 0" 'num_experts": 0|norm_topk_prob' 1 moe $i
        check "... of which a checkpoint goes on" go --from with --train text --seq-len 16 --batch-size 2 --steps 1
    done
    becomes "... num_local_experts, as transformers writes it" 'num_experts": 4' 1 moe num_experts - num_local_experts 4

    echo "# mistakes in config.json"
    changed "another architecture" '"model_type": expected qwen2|qwen3|qwen3_moe|mistral|llama, found "mixtral"' model_type '"mixtral"'
    changed "no architecture" '"model_type": expected one of qwen2|qwen3|qwen3_moe|mistral|llama, found nothing' model_type -
    changed "heads that are no multiple" '"num_attention_heads" 4: expected a multiple of "num_key_value_heads" 3' num_key_value_heads 3
    changed "an odd head_dim" '"head_dim": expected an even number, found 7' head_dim 7
    changed "YaRN" '"rope_scaling": expected null; other kinds of RoPE, as YaRN, are not computed here' rope_scaling '{"type":"yarn","factor":4.0}'
    changed "... in rope_parameters" '"rope_type": this trainer computes "default", found "yarn"' rope_parameters '{"rope_type":"yarn","rope_theta":10000}'
    changed "two thetas" '"rope_theta" 10000: expected 30000, as in "rope_parameters"' rope_parameters '{"rope_theta":30000}'
    changed "another activation" '"hidden_act": this trainer computes "silu", found "gelu"' hidden_act '"gelu"'
    changed "dropout" '"attention_dropout": this trainer computes 0.0, found 0.1' attention_dropout 0.1
    changed "positions that see what follows" '"is_causal": this trainer computes true, found false' is_causal false
    local block='"weight_block_size":[128,128]'
    for i in '"quant_method":"awq"' '"quant_method":"fp8"' "\"quant_method\":\"fp8\",${block/128/64}" "\"quant_method\":\"fp8\",\"fmt\":\"e5m2\",$block" \
        "\"quant_method\":\"fp8\",\"activation_scheme\":\"static\",$block" "$block"; do
        changed "quantized weights, $i" '"quantization_config": expected null, or quant_method fp8 with fmt e4m3, activation_scheme dynamic and weight_block_size [128, 128]; other' quantization_config "{$i}"
    done
    becomes "... of fp8 in blocks of 128 x 128 the files decide: settings do not keep it" 'quantization_config' 0 tiny quantization_config "{\"quant_method\":\"fp8\",$block}"
    changed "layer_types without the window" '"layer_types": sliding_attention: expected "use_sliding_window" true and a "sliding_window"' \
        layer_types '["sliding_attention","full_attention"]' sliding_window 5
    changed "layer_types of other layers" '"layer_types": expected a list of 2, one for each layer' layer_types '["full_attention"]'
    changed "layer_types of another kind" '"layer_types": expected full_attention or sliding_attention, found chunked_attention' \
        layer_types '["full_attention","chunked_attention"]'
    changed "use_sliding_window that is a number" '"use_sliding_window": expected true or false, found 1' use_sliding_window 1
    changed "a window of no key" '"sliding_window": expected an integer 1..16777216, found 0' use_sliding_window true sliding_window 0
    changed "a window, but of which layers" '"max_window_layers": expected an integer 0..1024, found nothing' use_sliding_window true sliding_window 5
    changed "tied or not" '"tie_word_embeddings": expected true or false, found "yes"' tie_word_embeddings '"yes"'
    changed "rms_norm_eps of 0" '"rms_norm_eps": expected a number' rms_norm_eps 0
    for i in vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size max_position_embeddings; do
        changed "$i below 0" "\"$i\": expected an integer" $i -3
        is_quick || changed "no $i" "\"$i\": expected an integer" $i -
    done
    base=llama.json
    changed "an MLP with biases" '"mlp_bias": this trainer computes false, found true' mlp_bias true
    changed "llama 3.1's RoPE" '"rope_scaling": expected null' rope_scaling '{"rope_type":"llama3","factor":8.0}'
    changed "heads that do not divide the channels" '"hidden_size" 18: expected a multiple of "num_attention_heads" 4' hidden_size 18
    base=mistral.json
    changed "a window that is no number" '"sliding_window": expected an integer 1..16777216, found "all"' sliding_window '"all"'
    base=moe.json
    changed "more experts for a token than there are" '"num_experts_per_tok": expected at most 5, found 6' num_experts_per_tok 6
    changed "no number of experts" '"num_local_experts": expected an integer 0..1024, found nothing' num_experts -
    changed "two numbers of experts" '"num_local_experts": expected the number of "num_experts", or nothing, found 4' num_local_experts 4
    changed "no width of experts" '"moe_intermediate_size": expected an integer' moe_intermediate_size -
    changed "a layer that is none" '"mlp_only_layers": expected numbers of layers, 0..2' mlp_only_layers '[3]'
    changed "no list of layers" '"mlp_only_layers": expected a list, found 1' mlp_only_layers 1
    changed "experts in every 0th layer" '"decoder_sparse_step": expected an integer 1..1024, found 0' decoder_sparse_step 0
    changed "a negative loss of routers" '"router_aux_loss_coef": expected a number' router_aux_loss_coef -1
    changed "norm_topk_prob that is a number" '"norm_topk_prob": expected true or false, found 1' norm_topk_prob 1
    edit moe.json eight.json num_experts 8 num_experts_per_tok 8 max_position_embeddings 16384
    refuse "more slots than an int can count" "--batch-size: expected at most 16383 rows of 16384 positions, each with 8 experts, found 16384" \
        --config eight.json --dry-run --seq-len 16384 --batch-size 16384
}

# ---- files: probes, Hugging Face folders ----

files() {
    local name
    echo "# probes: NumPy, before and after saving"
    batch >in
    for name in tiny qwen2 mistral llama moe scores preset; do
        rm -rf hf again before after truth
        if [ $name = preset ]; then go --model tiny --tokenizer bytes --export-hf hf --probe in --probe-out before; else
            go --config $name.json --export-hf hf --probe in --probe-out before; fi
        check "$name: a probe has logits, both losses and the gradient of every tensor" \
            test "$(tensors before '^grad\.' | wc -l) $(tensors before '^(logits|loss|cross_entropy)$' | wc -w)" = "$(tensors hf/model.safetensors . | wc -l) 4631"
        "$python" "$root/dev/ref/qwen.py" --from hf --probe in --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... which are to the last bit those of dev/ref/qwen.py" "$(<err)"
        go --from hf --probe in --probe-out after --threads 3 --head-rows 4 --export-hf again && cmp before after && cmp hf/model.safetensors again/model.safetensors && cmp {hf,again}/config.json
        verdict $? "... from the saved folder, other threads, few rows of the head: the same bytes" "$(<err)"
    done
    edit scores.json single.json norm_topk_prob true
    go --config single.json --probe in --probe-out before
    check "one expert whose weight is 1: the router has no gradient" \
        test "$(tensors before 'grad.*mlp.gate.weight' | wc -l) $(tensors before 'grad.*mlp.gate.weight' | cut -d' ' -f2- | tr ' ' '\n' | grep -vcE '^(0|-2147483648)$')" = "2 0"

    echo "# folders in other forms"
    rm -rf hf shards && go "${start[@]}" --config moe.json --export-hf hf && go --from hf --probe in --probe-out before && go --from hf --export-hf shards --shard-gb 4e-6
    go --from shards --probe in --probe-out after && cmp before after
    verdict $? "a folder of $(ls shards/*.safetensors | wc -l) shards: the same probe" "$(<err)"
    like "names without model." 0 't = {name.removeprefix("model."): x for name, x in t.items()}'
    like "inv_freq of old versions: not a word" 0 't["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", [3], bytes(12)'
    like "a tensor that no layer has: a line" 1 't["model.layers.0.self_attn.q_proj.bias"] = "F32", [24], bytes(96)'
    rewrite hf fused 'fuse()'
    go --from fused --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
    verdict $? "experts of a layer as one tensor: the same logits and loss" "$(<err)"
    check "... gradients by the names of that file" test "$(tensors after 'grad.*experts' | cut -d' ' -f1 | tr '\n' ' ')" = \
        "$(for i in 0 2; do for name in down gate_up; do echo -n "grad.model.layers.$i.mlp.experts.${name}_proj "; done; done)"
    check "... their numbers" cmp <(tensors before 'grad.*experts' | cut -d' ' -f2- | tr ' ' '\n' | sort) <(tensors after 'grad.*experts' | cut -d' ' -f2- | tr ' ' '\n' | sort)
    rm -rf whole leg && go "${start[@]}" --config '' --from fused --schedule constant --warmup 0 --run whole &&
        go "${start[@]}" --config '' --from fused --schedule constant --warmup 0 --steps 2 --run leg && go --resume --run leg --steps 4 && same_run whole leg
    verdict $? "... stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
    check "... and its export has that form" test "$(tensors leg/step_000004/model.safetensors experts | wc -l)" = 4
    rewrite fused rounded 'cut()'
    check "... with --weights bf16 it writes the same text" test "$(go --from rounded --generate "line 7" --temperature 0 && cat out)" = "$(go --from rounded --weights bf16 --generate "line 7" --temperature 0 && cat out)"
    rewrite fused broken 't.pop("model.layers.2.mlp.experts.gate_up_proj")'
    refuse "... which one layer lacks" '"model.layers.2.mlp.experts.gate_up_proj" is missing' --from broken --train text
    rewrite hf rounded 'cut()'
    rewrite hf halves 'bf16()'
    go --from rounded --probe in --probe-out before && go --from halves --probe in --probe-out after && cmp before after
    verdict $? "bf16: the probe of its numbers as floats" "$(<err)"
    rewrite hf broken 't.pop("model.layers.1.mlp.up_proj.weight")'
    refuse "a tensor is missing" '"model.layers.1.mlp.up_proj.weight" is missing' --from broken --train text
    rewrite hf broken 't["model.norm.weight"] = "F32", [15], bytes(60)'
    refuse "a tensor has another shape" '"model.norm.weight"' --from broken --train text
    rewrite hf broken 't["model.norm.weight"] = "I32", [16], bytes(64)'
    refuse "a tensor has another type" '"model.norm.weight"' --from broken --train text

    echo "# a tied head"
    tied_heads llama.json
    go --config tiny.json --export-hf free
    rewrite free broken 't.pop(H)'
    refuse "an untied head is missing" '"lm_head.weight" is missing' --from broken --train text

    echo "# a run and its files"
    rm -rf run && go "${mixed[@]}" --config moe.json --ema 0.9 --tensorboard 1 --run run
    router_keys
    rm -rf with && go "${start[@]}" --run with
    check "... which those of a model without experts do not list" test "$(head -n 1 with/metrics.jsonl | grep -cE 'balance|idle_experts|cross_entropy|"z"')" = 0
    check "... loss = cross_entropy + 0.02 * 2 balance" "$python" -c 'import json
for line in open("run/metrics.jsonl"):
    r = json.loads(line)
    if r.get("loss") is not None: assert abs(r["loss"] - r["cross_entropy"] - 0.04 * r["balance"]) < 1e-5 and 1 <= r["load"] <= 2.5, r'
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 12 val_loss)")"
    rm -rf exported && go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000012 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
    need_build inspect "" tools/inspect
    "$inspect" run/step_000012 >out 2>err
    check "inspect: a verified checkpoint of $(tensors run/step_000012/model.safetensors . | wc -l) tensors" test "$? $(grep -cE '^  manifest +verified|model_type qwen3_moe' out)" = "0 2"
}

# ---- the same bits another way ----

bits() {
    echo "# the same bits"
    local i steady=("${mixed[@]}" --ema 0.9 --schedule constant --warmup 0)
    for i in $(is_quick && echo qwen2 moe || echo tiny qwen2 mistral llama moe scores); do
        rm -rf whole leg
        go "${steady[@]}" --config $i.json --run whole
        go "${steady[@]}" --config $i.json --steps 6 --threads 3 --run leg && go --resume --run leg --steps 12 --threads 2 --recompute 3
        verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" \
            "$i: stopped after 6 of 12 updates, resumed with other --threads and --recompute: the same bytes" "$(<err)"
    done
    rm -rf leg other && go "${start[@]}" --grad-accum 3 --run leg && go "${start[@]}" --batch-tokens 96 --run other
    check "--grad-accum 3 is --batch-tokens of three micro-batches" same_run leg other
    if is_quick; then return; fi
    any_width train_qwen3 qwen2 mistral moe
}

# ---- ranks ----

ranks() {
    echo "# ranks: one update of four micro-batches on 1, 2 and 4"
    need_build launch "" launch
    edit moe.json wide.json hidden_size 64 moe_intermediate_size 64 num_experts 4
    alike() {  # PROMISE COUNTS OPTION...: on so many ranks each the bytes of one
        local promise=$1 counts=$2 n
        shift 2
        rm -rf one
        go "${mixed[@]}" "$@" --run one
        for n in $counts; do
            rm -rf several
            COMM_CHECK=1 timeout 60 "$launch" -n ${n%/*} "$trainer" "${mixed[@]}" "$@" ${n#*/} --run several >out 2>err </dev/null
            status=$?
            same_run one several && cmp -s {one,several}/samples.txt
            verdict $? "$promise on ${n%/*} ranks, ${n#*/}: the bytes of one rank" "status $status: $(tail -n 2 err)"
        done
    }
    if is_quick; then
        alike "windows, averaged weights" "2/--zero=2" --config qwen2.json --ema 0.9
        alike "experts" "2/--ep=2" --config wide.json
        return
    fi
    alike "windows, averaged weights" "2/--zero=0 2/--zero=1 2/--zero=2 4/--zero=2" --config qwen2.json --ema 0.9
    alike "a tied head, documents" "2/--zero=1 4/--zero=2" --config llama.json --doc-reset 1 --train documents
    alike "experts that nobody shares" "2/--zero=0 4/--zero=2" --config moe.json
    alike "experts" "2/--ep=2 4/--ep=2 4/--ep=4" --config wide.json --ema 0.9 --recompute 2
    alike "experts, some frozen" "4/--ep=2" --config wide.json --freeze '*.experts.1.*,first:1'
    together() {  # PROMISE LINE STATUS RANKS OPTION...
        rm -rf one
        "$launch" -n $4 "$trainer" "${mixed[@]}" --run one "${@:5}" >out 2>err </dev/null
        status=$?
        [ $status = $3 ] && grep -qF -- "$2" err
        verdict $? "$1" "status $status: $(<err)"
    }
    together "--ep of a model without experts" "--ep: is for models with experts" 2 2 --ep 2
    together "--ep that does not divide the experts" "--ep: 2: expected a number that divides the 5 experts" 2 2 --ep 2 --config moe.json
    go --config wide.json --export-hf apart && rewrite apart fused 'fuse()'
    alike "experts that are one tensor of the file" "2/--ep=2 4/--ep=2" --config '' --from fused
}

# ---- kill -9 and --resume ----

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --recompute, --head-rows"
    RANDOM=11
    killed $((kills / 2)) "a window, a tied head" --config qwen2.json --grad-accum 2
    killed $((kills - kills / 2)) "experts, averaged weights" --config moe.json --ema 0.9 --verify-every 20
}

# ---- text ----

text() {
    echo "# text"
    local name one
    for name in qwen2 mistral moe; do greedy $name "a cache of keys and values"; done
    write_prompts >short.jsonl
    at_once --from book
    for name in qwen2 mistral moe scores tiny; do at_once --config $name.json; done
    at_once --config mistral.json --weights bf16
    at_once --config moe.json --weights bf16 --temperature 0 --threads 2
    go --config tiny.json --generate-file short.jsonl --dry-run
    check "the box: 8 texts" test "$(boxed '  texts' '8 side by side, of at most 48 positions')" = 1
    go --config tiny.json --generate-file short.jsonl --generate-batch 1000 --dry-run
    check "... as many as there are" test "$(boxed '  texts' '11 side by side, of at most 48 positions')" = 1
    edit tiny.json vast.json max_position_embeddings 16000000 num_hidden_layers 40
    for i in "1500000 1000 a smaller --generate-batch" "15000000 8 a smaller --max-new-tokens"; do
        timeout 60 "$trainer" --config vast.json --generate-file short.jsonl --samples 100 --max-new-tokens ${i%% *} --generate-batch $(cut -d' ' -f2 <<<"$i") \
            >out 2>err </dev/null
        check "more texts than fit: status 1 before the model is read, ${i#* * }" test "$? $(grep -c "free: try ${i#* * }\$" err)" = "1 1"
    done
    refuse "more rows than a pass counts" "--generate-batch: 1024 texts of 15000041 positions are more than a pass" --config vast.json \
        --generate-file short.jsonl --samples 100 --max-new-tokens 15000000 --generate-batch 1024
    refuse "more positions than the model has" "--seq-len: expected at most the model's 48 positions, found 96" --from book --train text --seq-len 96
}

# ---- LoRA: adapters ----

# the files of an adapter that has been trained: of a checkpoint or of --export-lora
same_adapter() { cmp "$1"/adapter_model.safetensors "$2"/adapter_model.safetensors && cmp "$1"/adapter_config.json "$2"/adapter_config.json; }

lora() {
    local i one plain start=(--from base --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
    local mixed=("${start[@]}" --grad-accum 4 --steps 12 --val-fraction 0.1 --eval-every 6 --sample-every 6 --max-new-tokens 8 --save-every 4)
    local steady=("${mixed[@]}" --ema 0.9 --schedule constant --warmup 0)
    go --config tiny.json --train text --seq-len 16 --batch-size 4 --lr 1e-2 --steps 40 --export-hf base --run book
    go --config moe.json --export-hf experts

    echo "# LoRA: what learns, and what is written"
    go "${start[@]}" --run run --export-lora adapter
    check "a checkpoint is an adapter of PEFT's: $(tensors run/step_000004/adapter_model.safetensors . | wc -l) tensors, no model" \
        test "$(ls run/step_000004 | grep -c '^model\|^config.json') $(tensors run/step_000004/adapter_model.safetensors '^base_model\.model\.model\.layers\.[01]\..*\.lora_[AB]\.weight$' | wc -l)" = "0 28"
    check "... every B has moved from 0, every A from where it began" test "$(tensors adapter/adapter_model.safetensors lora_B | grep -cvE '^[^ ]+( 0| -2147483648)*$')" = 14
    check "--export-lora: the same files" same_adapter run/step_000004 adapter
    check "the box: rank, alpha, what learns" test "$(go "${start[@]}" --dry-run; boxed adapter "LoRA of rank 3, alpha 6, beside 14 matrices: .*")" = 1
    cp adapter/adapter_model.safetensors kept
    check "... into the same folder again: replaced, whatever stood there" eval 'go "${start[@]}" --seed 7 --run again --export-lora adapter && ! cmp -s kept adapter/adapter_model.safetensors && ! [ -e adapter.tmp ]'
    go "${start[@]}" --export-lora adapter --run third
    mkdir foreign && cp adapter/adapter* foreign
    refuse "--export-lora into a folder of PEFT's" "--export-lora: foreign: holds a model that this program did not write" "${start[@]}" --export-lora foreign
    refuse "... into that of the base" "--export-lora: is the model beside which the adapter learns" "${start[@]}" --export-lora base
    refuse "... into that of another model" "--export-lora: experts: holds a model" "${start[@]}" --export-lora experts
    timeout 30 "$trainer" --from base --lora adapter --merge 1 --export-hf base >/dev/null 2>err
    check "--export-hf --merge over the base is refused" test "$? $(grep -c 'is the model beside which the adapter learns' err)" = "2 1"
    timeout 30 "$trainer" --from base --lora adapter --merge 1 --export-hf adapter >/dev/null 2>err
    check "... and over an adapter" test "$? $(grep -c 'adapter: holds an adapter' err)" = "2 1"
    cmp -s adapter/adapter_model.safetensors third/step_000004/adapter_model.safetensors && [ -s base/model.safetensors ]
    verdict $? "... and all are what they were" ""
    for i in adapter run run/step_000004; do
        refuse "--from $i" "adapter_model.safetensors, a LoRA adapter: --from takes the model that it was trained on" --from $i --train text
    done
    echo '{"prompt": "line 7"}' >asked.jsonl
    for i in "--export-hf book/mine" "--export-hf book/step_000040/mine" "--export-lora book/mine" "--export-lora book/a/b" "--generate-out book/mine.jsonl" \
        "--generate-out book/step_000040/mine.jsonl" "--probe-out book/mine"; do
        timeout 30 "$trainer" --from base $([[ $i == *lora* ]] && echo "--lora adapter") $([[ $i == *generate* ]] && echo "--generate-file asked.jsonl") \
            $([[ $i == *probe* ]] && echo "--probe in") $i >out 2>err </dev/null
        status=$?
        [ $status = 2 ] && grep -q -- "^${trainer##*/}: ${i% *}: ${i#* } lies in the folder of a run, whose files are the run's" err && ! ls -d book/mine* book/a book/*/mine* 2>/dev/null
        verdict $? "$i, in a run's folder, is refused" "status $status: $(<err)"
    done
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    go "${start[@]}" --steps 60 --lr 3e-2 --run long
    go --from base --lora long --merge 1 --export-hf merged
    one=$(write --from base --lora long)
    cut_to_bf16 book cut && "$python" - cut/model.safetensors halves <<'PYTHON'
import json, os, shutil, struct, sys
os.mkdir(sys.argv[2]) or shutil.copy("cut/config.json", sys.argv[2])
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header, at, body = {}, 0, b""
for name, t in json.loads(data[8:8 + n]).items():
    if name == "__metadata__": continue
    begin, end = t["data_offsets"]
    x = bytes(b for i, b in enumerate(data[8 + n + begin:8 + n + end]) if i % 4 > 1)
    header[name] = {"dtype": "BF16", "shape": t["shape"], "data_offsets": [at, at + len(x)]}
    at, body = at + len(x), body + x
header = json.dumps(header).encode()
header += b" " * (-len(header) % 8)
open(sys.argv[2] + "/model.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + body)
PYTHON
    for i in "base fp32: written in fp32" "base bf16: written in fp32, from weights rounded to bf16: +" "halves bf16: written in fp32, from weights in bf16 as their +" "halves fp32 --export-dtype bf16: written in bf16"; do
        set -- ${i%%:*}
        go --from $1 --lora adapter --merge 1 --weights ${*:2} --export-hf mixed
        check "--merge of $1, --weights ${*:2}: the box says ${i#*: }" test "$(boxed '  merged' "${i#*: }.*")" = 1
    done
    check "merged: the text that base and adapter write, and not the base's" \
        test "$(write --from merged)" = "$one" -a "$(write --from base)" != "$one"
    check "... no adapter in its files" test "$(tensors merged/model.safetensors lora | wc -l) $(tensors merged/model.safetensors . | wc -l)" = "0 $(tensors base/model.safetensors . | wc -l)"
    check "--lora of a checkpoint, of an export, of the run: the same text" \
        test "$(write --from base --lora long/step_000060)" = "$one" -a "$(go --from base --lora long --export-lora exported && write --from base --lora exported)" = "$one"
    go --from base --lora long --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 2 --run next && go --from base --lora exported --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 2 --run other
    check "... to go on training it: the same run" same_run next other
    rm -r exported && check "... which --resume continues without the folder that it came from" go --resume --run other --steps 4

    echo "# LoRA: options"
    for i in "--threads 3" "--recompute 0" "--recompute 3" "--head-rows 5" "--verify-every 1"; do flag same "" $i; done
    flag other -1 --lora-alpha 5
    flag other 2 --lora-rslora 1
    flag other 1 --lora-dropout 0.3
    flag other 'no_proj' --lora-targets q_proj,v_proj
    flag other '[' --lora-targets 'model\.layers\.1\..*_proj'
    flag other 'v_proj' --lora-rank-pattern 'v_proj=5'
    flag other 'v_proj=' --lora-alpha-pattern 'v_proj=5'
    flag other -1 --lora-rank 4
    start=("${start[@]/base/experts}") && flag other mlp.experts.gate_proj --lora-parameters mlp.experts.down_proj,mlp.gate.weight && start=("${start[@]/experts/base}")
    tried[--lora]=1 tried[--export-lora]=1 tried[--merge]=1
    local missing="" name
    go --help
    for name in $(sed -n '/^adapter$/,/^[a-z]*$/p' out | grep -o '^  --[a-z-]*') --export-lora --merge; do [ -n "${tried[$name]-}" ] || missing+=" $name"; done
    check "each option of adapters was tried (not:$missing)" test -z "$missing"
    go "${start[@]}" --freeze '*lora_A*,*.layers.1.*' --run frozen
    check "--freeze: all A and layer 1 keep every bit, the rest moves" \
        test "$(comm -12 <(tensors frozen/step_000004/adapter_model.safetensors . | sort) <(go "${start[@]}" --steps 1 --lr 0 --run begun && tensors begun/step_000001/adapter_model.safetensors . | sort) | cut -d' ' -f1 | sort | md5sum)" = \
        "$(tensors frozen/step_000004/adapter_model.safetensors 'lora_A|layers\.1\.' | cut -d' ' -f1 | sort | md5sum)"
    rest() { go --model qwen3-0.6b --lora-rank 4 --seq-len 64 --batch-size 1 --dry-run "$@" && sed -nE 's/^\| *workspace, rest *\|.*, ([0-9.]+) MiB *\|$/\1/p' out; }
    plain=$(rest)
    check "the box counts sums of the base too with --verify-every: 8 bytes for 64 of 596 million, and 12 MiB" \
        "$python" -c "assert 84 < $(rest --verify-every 1) - $plain < 85"
    check "... and with --merge the largest tensor as floats: 593.5 MiB" "$python" -c "assert 593 < $(rest --merge 1 --export-hf new) - $plain < 594"
    edit tiny.json deep.json num_hidden_layers 70 && go --config deep.json --export-hf deep
    refuse "more ranks than a table has rows" "--lora-rank-pattern: expected at most 54 different pairs of a kind of linear layer and a rank, found 56" \
        "${start[@]}" --from deep --lora-rank-pattern "$(for i in {0..69}; do printf 'layers\.%d\..*=%d,' $i $((i % 8 + 1)); done | head -c -1)"
    refuse "a pattern of ranks that no layer has" '--lora-rank-pattern: expected what the name of a layer with an adapter ends with, found "z_proj"' \
        "${start[@]}" --lora-rank-pattern 'v_proj=2,z_proj=4'
    refuse "... of alphas" '--lora-alpha-pattern: expected what' "${start[@]}" --lora-targets q_proj --lora-alpha-pattern 'v_proj=2'
    for i in "--generate x" "--eval-only --val text"; do
        refuse "--lora-rank $i: nothing learns" "--lora-rank: begins an adapter, which adds nothing until it is trained" --from base --lora-rank 4 $i
    done
    for i in "--export-dtype bf16" "--shard-gb 2"; do refuse "$i without --export-hf" "${i% *}: is for --export-hf DIR" "${start[@]}" $i; done
    refuse "--eval-generate that is never asked" "--eval-generate: answers with each validation or sample: --eval-every 0 has none" \
        "${start[@]}" --chat-template chatml --eval-generate asked.jsonl --eval-every 0
    for i in base adapter; do
        timeout 30 "$trainer" --from base --lora adapter --train text --seq-len 16 --steps 1 --run $i >out 2>err </dev/null
        check "--run $i, the folder that is read: refused" test "$? $(grep -cE -- "--run: $i holds (adapter_)?model.safetensors" err) $(ls -d $i/step_* 2>/dev/null | wc -l)" = "2 1 0"
    done
    go "${start[@]}" --merge 1 --export-hf merged_too --run mergers && go --resume --run mergers --steps 6
    check "a run that began with --merge goes on without it" test $? = 0
    refuse "--freeze of all of it" "--freeze: every tensor is frozen" "${start[@]}" --freeze '*lora*'
    for i in model.norm.weight '*lora_A*,model.embed_tokens.*' ; do
        refuse "--freeze '$i': a name of the model alone" 'matches no tensor of the adapter, beside which the whole model is frozen' "${start[@]}" --freeze "$i"
    done
    refuse "... layers without adapters" '"first:1" matches no tensor of the adapter' "${start[@]}" --lora-targets 'model\.layers\.1\..*proj' --freeze first:1
    refuse "a full model in bf16" "--weights: bf16 and fp8 are for what does not learn" --from base --train text --weights bf16
    go "${start[@]}" --ema 0.5 --run mean && go --from base --lora mean --ema-weights 1 --export-lora average
    check "--ema: the same run, and an average that --ema-weights takes" \
        test "$(same_model mean run; echo $?) $(diff <(tensors average/adapter_model.safetensors lora) <(tensors mean/step_000004/ema.safetensors lora) | wc -l)" = "0 0"
    timeout 30 "$trainer" --from base --lora long --ema-weights 1 --generate x >/dev/null 2>err
    check "... where there is none, a line" grep -q "long/step_000060 has no averaged weights" err

    cp -r adapter sick && "$python" - sick/adapter_model.safetensors <<'PYTHON'
import json, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
n = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + n])
at = 8 + n + header["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"]["data_offsets"][0]
data[at:at + 4] = struct.pack("<f", float("nan"))
open(sys.argv[1], "wb").write(data)
PYTHON
    for i in "" "--weights bf16"; do
        refuse "NaN in an adapter ($i)" "sick/adapter_model.safetensors: expected finite numbers, found 1 of base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" \
            --from base --lora sick --train text --seq-len 16 $i
        go --from base --lora sick --generate x --max-new-tokens 1 $i
        check "... a warning where nothing learns from it" test "$(wc -l <err) $(grep -c 'sick/adapter_model.safetensors: 1 numbers of base_model.*up_proj.lora_B.weight are NaN or infinite$' err)" = "1 1"
    done

    echo "# LoRA: going on"
    cut_to_bf16 book rounded
    for i in "" "--lora-dropout 0.3" "--weights bf16 --from rounded" "--lora-dropout 0.2 --lora-rank-pattern v_proj=5 --from experts"; do
        is_quick && [[ $i == *experts ]] && continue
        rm -rf whole leg
        go "${steady[@]}" $i --run whole
        go "${steady[@]}" $i --steps 6 --threads 3 --run leg && go --resume --run leg --steps 12 --threads 2 --recompute 3
        verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" "resumed${i:+ ($i)}: the bytes of one run" "$(<err)"
    done
    go "${start[@]}" --from rounded --run floats && go "${start[@]}" --from rounded --weights bf16 --run rounded_run
    check "--weights bf16 of numbers that bf16 holds: the adapter that floats give" same_run floats rounded_run
    mv base moved
    timeout 30 "$trainer" --resume --run run --steps 6 >/dev/null 2>err
    check "a base that has moved: one line" test "$? $(wc -l <err) $(grep -c -- '--resume: base, the model beside which the adapter learns, is not there: .*--resume --from DIR$' err)" = "2 1 1"
    cp -r run there && go --resume --from moved --run there --steps 6 && mv moved base && cp -r run here && go --resume --run here --steps 6
    check "... --resume --from names it: the same run" same_run there here
    go --config tiny.json --seed 9 --export-hf stranger
    wrong_base() {  # PROMISE OPTION...
        timeout 30 "$trainer" "${@:2}" >out 2>err </dev/null
        status=$?
        [ $status = 2 ] && grep -q 'run/step_[0-9]* has learnt beside another model than stranger, or that one was changed' err
        verdict $? "another base, $1: refused" "status $status: $(<err)"
    }
    wrong_base "--resume" --resume --run run --from stranger --steps 9
    wrong_base "--resume --eval-only" --resume --run run --from stranger --eval-only --val text
    wrong_base "--lora RUN --generate" --from stranger --lora run --generate x
    wrong_base "--lora CHECKPOINT --merge" --from stranger --lora "$(last run)" --merge 1 --export-hf wrong
    wrong_base "--lora RUN in training" --from stranger --lora run --train text --run wrong
    cp -r base copied && go --from copied --lora run --generate x --max-new-tokens 2 && go --from stranger --lora adapter --generate x --max-new-tokens 2
    check "... the same base elsewhere is not, nor PEFT's files, which know none" test ! -s err
    for i in "--lora-rank 4" "--lora-alpha 9" "--lora-targets q_proj" "--lora long" "--lora-rslora 1"; do
        timeout 30 "$trainer" --resume --run run $i --steps 6 >/dev/null 2>err
        check "--resume $i is refused: the run has its own" test "$? $(grep -c -- "^${trainer##*/}: ${i% *}: the run began with " err)" = "2 1"
    done
    check "--continue, typed as at the start" eval 'go "${start[@]}" --continue --run run --steps 6 && same_run run here'
    RANDOM=13
    killed $((kills / 2 + 1)) "kill -9, an adapter, dropout, averages" --lora-dropout 0.3 --ema 0.9

    echo "# LoRA: ranks"
    need_build launch "" launch
    for i in $(is_quick && echo 2/--zero=2 || echo 2/--zero=0 2/--zero=1 2/--zero=2 4/--zero=2); do
        rm -rf one several
        go "${steady[@]}" --lora-dropout 0.3 --run one
        COMM_CHECK=1 timeout 60 "$launch" -n ${i%/*} "$trainer" "${steady[@]}" --lora-dropout 0.3 ${i#*/} --run several >out 2>err </dev/null
        same_run one several && cmp -s {one,several}/samples.txt
        verdict $? "${i%/*} ranks, ${i#*/}: the bytes of one" "$(tail -n 2 err)"
    done

    cp -r base twice && edit base/config.json twice/config.json tie_word_embeddings true
    "$launch" -n 2 "$trainer" "${start[@]}" --grad-accum 2 --from twice --run twins >out 2>err </dev/null
    check "what all ranks find alike the first says: one line" test "$? $(wc -l <err) $(grep -c 'not tied, as in transformers' err)" = "0 1 1"

    echo "# LoRA: conversations"
    edit tiny.json long.json max_position_embeddings 256 hidden_size 32 intermediate_size 48
    go --config long.json --train text --seq-len 64 --batch-size 4 --lr 1e-2 --steps 150 --run spoken --export-hf talker
    for i in Hi Ho "Is 7 prime" "And then"; do echo '{"messages":[{"role":"user","content":"'$i'?"},{"role":"assistant","content":"Yes."}]}'; done >talks.jsonl
    local talks=(--from talker --lora-rank 8 --train talks.jsonl --chat-template chatml --seq-len 250 --batch-size 2 --lr 3e-3 --steps 200)
    go "${talks[@]}" --eval-generate talks.jsonl --sample-every 100 --temperature 0 --max-new-tokens 20 --run answers
    check "packed: 4 conversations in 2 rows" test "$(boxed 'training data' '4 conversations in 2 rows of 250, .*')" = 1
    check "the adapter has learned to answer, and to stop" test "$(grep -c '"answer":"Yes.","finish":"stop".*"step":200' answers/answers.jsonl)" = 4
    printf 'Ho?\n/reset\nIs 7 prime?\n' | timeout 60 "$trainer" --from talker --lora answers --chat --temperature 0 --max-new-tokens 20 >out 2>err
    check "--chat from a pipe, in the chat template that the adapter was trained with" test "$? $(tr '\n' '|' <out)$(wc -c <err)" = "0 Yes.|Yes.|0"
    for i in 1 8; do go --from talker --lora answers --generate-file talks.jsonl --chat-template chatml --samples 4 --max-new-tokens 20 --generate-batch $i && mv out by_$i; done
    check "--generate-file: 8 texts side by side, through the adapter" cmp by_1 by_8
    go --from talker --lora answers --merge 1 --export-hf whole_talker && go --from whole_talker --generate-file talks.jsonl --chat-template chatml --temperature 0 --max-new-tokens 20
    check "... merged, --generate-file: the same answers" test "$(grep -c '"answer":"Yes."' out)" = 4
    check "... and without the adapter none of them" eval 'go --from talker --generate-file talks.jsonl --chat-template chatml --temperature 0 --max-new-tokens 20 && ! grep -q "\"answer\":\"Yes" out'

    echo "# LoRA: what only the settings of a run say"
    adapter_resumes "--aux-alpha beside experts of a folder" --from experts --aux-alpha 0.9
    adapter_resumes "--aux-alpha beside experts at random" --config moe.json --aux-alpha 0.9
    adapter_resumes "--tied 0 of a preset" --model tiny --tied 0
    { le 4 20240520 1 2000; head -c 1012 /dev/zero; le 2 $(seq 2000 | awk '{ print $1 * 37 % 257 }'); } >tokens.bin
    adapter_resumes "--tokenizer beside token shards, of which a preset takes its vocabulary" --model tiny --train tokens.bin --tokenizer bytes
}

# ---- a base in fp8 ----

# the model that it is, as dev/ref/fp8.py has it in floats and in bf16: all that is computed has the same bits
fp8() {
    local name i shapes="dense tied experts fused" start text lora free each
    is_quick && shapes="dense fused"
    # odd sizes: blocks of 128 x 128 that end early, gate and up whose blocks begin within those of one matrix
    edit tiny.json dense.json hidden_size 160 intermediate_size 200 head_dim 66
    edit dense.json tied.json tie_word_embeddings true model_type '"qwen2"' hidden_size 132
    edit moe.json experts.json hidden_size 144 moe_intermediate_size 136 intermediate_size 129
    need_build launch "" launch
    for name in $shapes; do
        echo "# --base-dtype fp8: $name"
        rm -rf base floats halves fp8 begun
        rm -rf begun; go --config ${name/fused/experts}.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 20 --export-hf begun
        [ $name = fused ] && rewrite begun base 'fuse()' || mv begun base
        "$python" "$root/dev/ref/fp8.py" base floats && "$python" "$root/dev/ref/fp8.py" base halves --bf16
        go --from base --base-dtype fp8 --export-hf fp8 && go --from floats --export-hf begun && cmp {fp8,begun}/model.safetensors && ! cmp -s {base,begun}/model.safetensors
        verdict $? "--export-hf: every number that dev/ref/fp8.py has" "$(<err)"
        evaluated() { go --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
        text=$(evaluated --from floats)
        check "the loss of validation, $(echo "$text" | cut -d'|' -f2)" test -n "$text" -a "$text" = "$(evaluated --from base --base-dtype fp8 --threads 3)" \
            -a "$text" = "$(evaluated --from halves --weights bf16)" -a "$text" = "$(evaluated --from halves --weights fp8)"
        start=(--lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
        [[ $name == [ef]* ]] && start+=(--lora-parameters mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight)
        rm -rf run adapter && go "${start[@]}" --from floats --run run
        mkdir adapter && cp "$(last run)"/adapter_* adapter  # which a checkpoint would not lend to a base of other numbers
        for i in "base --base-dtype fp8" "base --base-dtype fp8 --threads 2" "base --base-dtype fp8 --threads 3 --recompute 3" "halves --weights bf16"; do
            rm -rf other && go "${start[@]}" --from $i --run other
            check "an adapter learns the same beside $i" test "$(same_model run other && cmp <(columns run) <(columns other); echo $?)" = 0
        done
        batch >in
        go --from floats --lora adapter --probe in --probe-out before && go --from base --base-dtype fp8 --lora adapter --probe in --probe-out after --threads 3 && cmp before after
        verdict $? "... logits, loss and gradients of a probe: the same bytes" "$(<err)"
        "$python" "$root/dev/ref/lora.py" --from floats --lora adapter --act-fp8 --probe in --probe-out numpy >/dev/null
        go --from base --base-dtype fp8 --act-fp8 1 --lora adapter --probe in --probe-out rounded --threads 3 &&
            cmp <(tensors numpy .) <(tensors rounded .) && ! cmp -s after rounded
        verdict $? "... with --act-fp8 1: to the last bit those of dev/ref/lora.py" "$(<err)"
        write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" --lora adapter "$@" && cat out; }
        text=$(write --from floats)
        check "... the same text" test -n "$text" -a "$text" = "$(write --from base --base-dtype fp8)" -a "$text" = "$(write --from base --weights fp8 --threads 3)"
        rm -rf whole other && go --from floats --lora adapter --merge 1 --export-hf whole && go --from base --base-dtype fp8 --lora adapter --merge 1 --export-hf other && cmp {whole,other}/model.safetensors
        verdict $? "... --merge: the same model" "$(<err)"
    done

    echo "# --weights where memory is short"
    # layers of 4.5 GiB as floats: so many that half of it, or a quarter, has room
    edit tiny.json wide.json hidden_size 16384 intermediate_size 16384 head_dim 64 num_hidden_layers 1000
    timeout 30 "$trainer" --config wide.json --generate a >/dev/null 2>err
    check "--generate that no --weights makes fit: a smaller model" grep -q 'are free: try a smaller model$' err
    free=$(sed -nE 's/.* ([0-9.]+) GiB are free.*/\1/p' err)
    each=$(sed -nE 's/.* needs ([0-9.]+) (GiB|TiB) of.*/\1 \2/p' err | awk '{ print ($2 == "TiB" ? 1024 : 1) * $1 / 1000 }')
    for i in "1.5 bf16" "3 fp8"; do
        edit wide.json deep.json num_hidden_layers "$(awk -v times="${i% *}" -v free="$free" -v each="$each" 'BEGIN { printf "%d", times * free / each }')"
        timeout 30 "$trainer" --config deep.json --generate a >/dev/null 2>err
        check "--generate that takes ${i% *} times the memory: --weights ${i#* }" test "$? $(grep -cE "are free: try --weights ${i#* } \\([0-9.]+ GiB in all\\)$" err)" = "1 1"
        timeout 30 "$trainer" --config deep.json --generate a --dry-run >/dev/null 2>err
        check "... --dry-run, too" test "$? $(grep -cE "are free: try --weights ${i#* } \\(" err)" = "1 1"
    done
    echo "# --base-dtype fp8: going on, ranks, refusals"
    rm -rf base begun && go --config dense.json --export-hf base --train text --seq-len 16 --batch-size 2 --steps 4 --run book
    start=(--from base --base-dtype fp8 --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 8 --grad-accum 2 --schedule constant --warmup 0)
    rm -rf whole leg && go "${start[@]}" --run whole && go "${start[@]}" --steps 4 --run leg && go --resume --run leg --steps 8 --threads 2
    verdict "$(same_run leg whole; echo $?)" "resumed: the bytes of one run, and still in fp8" "$(<err)"
    go --from base --lora whole --eval-only --val text --seq-len 16 && text=$(grep 'val loss' out)
    go --from base --lora whole --eval-only --val text --seq-len 16 --weights fp8 && same=$(grep 'val loss' out)
    go --from base --lora whole --eval-only --val text --seq-len 16 --weights fp32
    check "--lora RUN is beside fp8, as it has learnt, but for a --weights that is typed" test -n "$text" -a "$text" = "$same" -a "$text" != "$(grep 'val loss' out)"
    rm -rf other && go "${start[@]}" --act-fp8 1 --run other
    batch >in
    probe() { go --from base --lora other --probe in --probe-out "$@"; }
    probe learnt.out && probe 1.out --act-fp8 1 && probe 0.out --act-fp8 0 && probe floats.out --weights fp32 && cmp learnt.out 1.out && ! cmp -s 1.out 0.out
    verdict $? "--lora RUN rounds inputs as it has learnt, but for an --act-fp8 that is typed" "$(<err)"
    check "... and says so where --weights fp32 leaves nothing to round" grep -q "inputs are not rounded" err
    refuse "--act-fp8 of floats" "--act-fp8: is for matrices in fp8 or fp4, and here all are bf16 or fp32: --weights fp8 rounds them to fp8" --from base --act-fp8 1 --eval-only --val text
    rm -rf full other && go --from base --lora whole --merge 1 --export-hf full && cp err said && go --from base --lora whole --weights fp8 --merge 1 --export-hf other
    check "... --merge, too, and says so" test "$(cmp {full,other}/model.safetensors && ! [ -s err ]; echo $?) $(grep -cF -- '--weights fp8, beside which the adapter has learnt: with --weights fp32 --merge adds it to the numbers of the files' said)" = "0 1"
    for i in fp32 bf16; do
        timeout 30 "$trainer" --resume --run leg --weights $i --steps 9 >/dev/null 2>err
        check "--resume with $i is refused: the run began with fp8" test "$? $(grep -c -- '--weights: the run began with "fp8": ' err)" = "2 1"
    done
    for i in "--zero 1" "--zero 2"; do
        rm -rf several && COMM_CHECK=1 timeout 60 "$launch" -n 2 "$trainer" "${start[@]}" $i --run several >out 2>err </dev/null
        verdict "$(same_run several whole; echo $?)" "2 ranks, $i: the bytes of one" "$(tail -n 2 err)"
    done
    check "the box says what was rounded" test "$(go "${start[@]}" --dry-run; boxed matrices 'rounded to fp8, the head too')" = 1
    if ! is_quick; then
        edit moe.json wide.json hidden_size 64 moe_intermediate_size 64 num_experts 4 mlp_only_layers '[]'
        go --config wide.json --export-hf experts
        evaluated() { "$@" "$trainer" --from experts --weights fp8 --eval-only --val text --seq-len 15 --batch-size 2 --eval-batches 2 --seed 1 $ep >out 2>err && grep "val loss" out; }
        ep="" && one=$(evaluated timeout 60) && ep="--ep 2"
        check "experts on 2 ranks: the loss of validation of one" test -n "$one" -a "$one" = "$(evaluated timeout 60 "$launch" -n 2)"
    fi
    poke() {  # FLOAT: into the first matrix of layer 1
        rewrite base broken 'name = "model.layers.1.mlp.up_proj.weight"; d, s, x = t[name]; t[name] = d, s, x[:400] + struct.pack("<f", '"$1"') + x[404:]'
    }
    for i in 'float("nan")' 'float("-inf")' 57345; do
        poke "$i"
        refuse "a weight $i" "--weights fp8: expected finite numbers of at most 57344, found 1 of model.layers.1.mlp.up_proj.weight that are not: --weights bf16 keeps larger ones" \
            --from broken --weights fp8 --lora-rank 2 --train text
        timeout 30 "$trainer" --from broken --weights fp8 --generate x >/dev/null 2>err
        check "... and to write a text" test "$? $(wc -l <err)" = "2 1"
    done
    poke 57344
    check "57344 is none too large" eval 'go --from broken --weights fp8 --eval-only --val text --seq-len 15 --batch-size 1 && ! [ -s err ]'
}

# ---- folders in fp8, as they are published ----

# Beside one in fp8, `release`, the same numbers as floats: what is computed is the same, and the matrices stay in memory what they are
releases() {
    local name i text start shapes="dense sparse fused tied"
    is_quick && shapes="sparse fused"
    edit tiny.json dense.json hidden_size 160 intermediate_size 200 head_dim 66
    edit dense.json tied.json tie_word_embeddings true model_type '"qwen2"' hidden_size 132
    edit moe.json sparse.json hidden_size 144 moe_intermediate_size 136 intermediate_size 129
    need_build launch "" launch
    evaluated() { go --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    parameters_kib() { awk '/memory: parameters/ { print int($5 * ($6 == "MiB" ? 1024 : 1)) }' out; }
    start=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
    for name in $shapes; do
        echo "# a folder in fp8: $name"
        rm -rf base begun floats release run other full learned
        rm -rf begun; go --config ${name/fused/sparse}.json "${start[@]}" --steps 20 --export-hf begun
        [ $name = fused ] && rewrite begun base 'fuse()' || mv begun base
        i=()
        case $name in
            sparse) i=(--shards 3) ;;  # scales are in other files than their matrices
            fused) i=(--scales BF16) ;;
            tied) i=(--scales F8_E8M0 --keep '^$') ;;  # the embedding too
        esac
        "$python" "$root/dev/ref/fp8.py" base release --release floats "${i[@]}"
        text=$(evaluated --from floats)
        check "the loss of validation, $(echo "$text" | cut -d'|' -f2), is that of floats" test -n "$text" -a "$text" = "$(evaluated --from release --threads 2)" -a "$text" = "$(evaluated --from release --weights fp32)"
        check "... and the text" test "$(write --from floats)" = "$(write --from release)"
        batch >in
        go --from floats --probe in --probe-out before && go --from release --probe in --probe-out after && cmp before after
        verdict $? "... without an adapter all of it learns, as floats: the gradients" "$(<err)"
        go "${start[@]}" --from floats --lora-rank 3 --run run && kept=$(parameters_kib) && go "${start[@]}" --from release --lora-rank 3 --run other --threads 2 && same_model run other && cmp <(columns run) <(columns other)
        verdict $? "an adapter learns the same" "$(<err)"
        check "... beside a third of the memory ($(parameters_kib) of $kept KiB)" test "$(boxed matrices "fp8 and all else as in the files") $(grep -c '"weights": "fp8"' other/settings.json) $((3 * $(parameters_kib) < kept))" = "1 1 1"
        go --from floats --lora run --probe in --probe-out before && go --from release --lora other --probe in --probe-out after && cmp before after
        verdict $? "... logits, loss and gradients of a probe: the same bytes" "$(<err)"
        go --from floats --export-hf full && go --from release --export-hf learned && cmp {full,learned}/model.safetensors && cmp {full,learned}/config.json && ! grep -q quantization learned/config.json
        verdict $? "--export-hf: the same folder of floats, whose config.json has no quantization_config" "$(<err)"
        is_quick && continue
        rm -rf run other && go "${start[@]}" --from floats --run run && go "${start[@]}" --from release --run other && same_run run other
        verdict $? "training all of it: the bytes of floats" "$(<err)"
        check "--weights bf16: the nearest" test "$(evaluated --from floats --weights bf16)" = "$(evaluated --from release --weights bf16)"
    done

    echo "# a folder in fp8: ranks, refusals"
    edit moe.json wide.json hidden_size 160 moe_intermediate_size 136 num_experts 4 mlp_only_layers '[]' head_dim 66
    rm -rf begun; go --config wide.json --export-hf begun --train text --seq-len 16 --batch-size 2 --steps 4 && "$python" "$root/dev/ref/fp8.py" begun release --release floats
    for name in apart fused; do
        [ $name = fused ] && rewrite begun base 'fuse()' && "$python" "$root/dev/ref/fp8.py" base release --release floats
        run=("${start[@]}" --grad-accum 4 --from release --lora-rank 3)
        rm -rf one other && go "${run[@]}" --run one && go "${run[@]}" --from floats --run other && same_model one other
        verdict $? "$name: an adapter learns what it learns beside floats" "$(<err)"
        for i in "--ep 2" "--zero 2" "--pp 2" "--tp 2"; do
            is_quick && [ "$i" != "--ep 2" ] && continue
            rm -rf several && COMM_CHECK=1 timeout 60 "$launch" -n 2 "$trainer" "${run[@]}" $i --run several >out 2>err </dev/null
            verdict "$(same_run one several && [ ! -s err ]; echo $?)" "$name, 2 ranks, $i: the bytes of one" "$(tail -n 2 err)"
        done
    done
    local up=model.layers.1.mlp.up_proj.weight
    rm -rf begun && go --config dense.json --export-hf begun && "$python" "$root/dev/ref/fp8.py" begun release --release floats
    broken() {  # PROMISE TEXT PYTHON
        rewrite release broken 'W = "'$up'"; S = W + "_scale_inv"; d, s, x = t[S]; '"$3"
        for i in fp8 fp32; do refuse "$1, --weights $i" "broken/model.safetensors: tensor \"$2" --from broken --weights $i --generate x; done
    }
    broken "no scales" "$up\" is F8_E4M3 and has no scales \"${up}_scale_inv\"" 'del t[S]'
    broken "scales of other blocks" "${up}_scale_inv\": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (2, 2), found F32 (1, 2)" 't[S] = d, [1, 2], x[:8]'
    broken "... of another type" "${up}_scale_inv\": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (2, 2), found I32 (2, 2)" 't[S] = "I32", s, x'
    broken "a scale that is NaN" "${up}_scale_inv\": expected finite scales, found nan" 't[S] = d, s, x[:12] + struct.pack("<f", float("nan"))'
    broken "bytes that are NaN" "$up\": expected numbers of e4m3, found 2 bytes that are NaN" 'd, s, x = t[W]; t[W] = d, s, x[:99] + b"\x7f" + x[100:-1] + b"\xff"'
    rewrite release broken 't["'$up'_scale_inv"] = "F32", [2, 2], struct.pack("<4f", 1, 1, -1, 200)'
    refuse "a scale that bytes in memory cannot have" "${up}_scale_inv\": expected scales of at most 128 for --weights fp8, found 200: --weights fp32 has room for it" --from broken --generate x
    check "... and floats can" go --from broken --weights fp32 --generate x --max-new-tokens 1
}

# ---- folders whose experts are in fp4 ----

# Beside one with experts in fp4 and all else in fp8, `release`, the same numbers as floats
fp4() {
    local form i text start names experts adapted
    need_build launch "" launch
    edit moe.json packed.json hidden_size 160 moe_intermediate_size 96 intermediate_size 130 num_experts 4 head_dim 66
    evaluated() { go --eval-only --val text --seq-len 15 --batch-size 3 --eval-batches 2 --seed 1 "$@" && grep "val loss" out; }
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    start=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
    rm -rf begun; go --config packed.json "${start[@]}" --steps 20 --export-hf begun
    for form in apart fused; do
        echo "# experts in fp4, $form"
        rm -rf base release floats run other several as_read merged
        if [ $form = apart ]; then
            cp -r begun base && names=(--names scale --shards 3)
        else
            rewrite begun base 'fuse()' && names=(--names weight_scale_inv --dense F32 --experts 'experts\.(gate_up|down)_proj$')
        fi
        "$python" "$root/dev/ref/fp4.py" base release --release floats "${names[@]}"
        text=$(evaluated --from floats)
        check "the loss of validation, $(echo "$text" | cut -d'|' -f2), is that of floats" test -n "$text" -a "$text" = "$(evaluated --from release --threads 2)" -a "$text" = "$(evaluated --from release --weights fp32)"
        check "... and the text" test "$(write --from floats)" = "$(write --from release)"
        [ $form = fused ] || check "... in bf16, which holds them all, too" test "$text" = "$(evaluated --from release --weights bf16)"
        adapted=("${start[@]}" --grad-accum 2 --lora-rank 3)
        go "${adapted[@]}" --from floats --run run && go "${adapted[@]}" --from release --run other && same_model run other && cmp <(columns run) <(columns other)
        verdict $? "an adapter learns what it learns beside floats" "$(<err)"
        check "... beside what lies in the files" test "$(boxed matrices "fp8, fp4 and all else as in the files") $(grep -c '"weights": "fp8"' other/settings.json)" = "1 1"
        batch >in
        go --from floats --lora run --probe in --probe-out before && go --from release --lora other --probe in --probe-out after && cmp before after
        verdict $? "... logits, loss and gradients of a probe: the same bytes" "$(<err)"
        go --from floats --export-hf before_hf && go --from release --export-hf after_hf && cmp {before,after}_hf/model.safetensors && cmp {before,after}_hf/config.json
        verdict $? "--export-hf: the same folder of floats" "$(<err)"
        go --from release --export-hf as_read --export-dtype as-read && text=$(same_tensors release as_read '^$') && text=$(same_tensors as_read release '^$') && grep -q '"weight_block_size"' as_read/config.json
        verdict $? "--export-dtype as-read: types, bytes and scales of every tensor are the folder's" "$text $(<err)"
        counted() { go --from $1 --export-hf $1_shards --export-dtype $2 --shard-gb 2e-4 && grep '"total_parameters"' $1_shards/*.index.json; }
        rm -rf {floats,release}_shards
        check "... in shards: their index counts parameters, of which scales are none" test "$(counted floats fp32)" = "$(counted release as-read)"
        go "${adapted[@]}" --from release --lora-targets q_proj --merge --export-hf merged --export-dtype as-read && text=$(same_tensors release merged 'q_proj')
        verdict $? "... merged with an adapter: what it has changed is bf16, all else has its bytes" "$text $(<err)"
        check "... which is read again" test -n "$(evaluated --from merged)"
        for i in "--ep 2" "--zero 2" "--pp 2" "--tp 2"; do
            is_quick && [ "$i" != "--ep 2" ] && continue
            rm -rf several && COMM_CHECK=1 timeout 60 "$launch" -n 2 "$trainer" "${adapted[@]}" --from release $i --run several >out 2>err </dev/null
            verdict "$(same_run other several && [ ! -s err ]; echo $?)" "2 ranks, $i: the bytes of one" "$(tail -n 2 err)"
        done
        is_quick && continue
        batch >in
        go --from floats --probe in --probe-out before && go --from release --probe in --probe-out after && cmp before after
        verdict $? "all of it learns, as floats: the gradients" "$(<err)"
    done

    echo "# experts in fp4: refusals"
    rm -rf release && "$python" "$root/dev/ref/fp4.py" begun release --release floats
    local up=model.layers.2.mlp.experts.1.up_proj
    broken() {  # PROMISE TEXT PYTHON
        rewrite release broken 'N = "'$up'"; W = N + ".weight"; S = N + ".scale"; d, s, x = t[S]; '"$3"
        for i in fp8 fp32; do refuse "$1, --weights $i" "broken/model.safetensors: tensor \"$2" --from broken --weights $i --generate x; done
    }
    broken "scales of both names" "$up.weight\": expected scales \"$up.weight_scale_inv\" or \"$up.scale\", found both: remove those that are not its" 't[N + ".weight_scale_inv"] = d, s, x'
    broken "no scales" "$up.weight\" is I8 and has no scales \"$up.weight_scale_inv\" or \"$up.scale\"" 'del t[S]'
    broken "scales alone" "$up.scale\" has the scales of \"$up.weight\", which is missing" 'del t[W]'
    broken "scales beside floats" "$up.weight\": expected F8_E4M3 or I8, for \"$up.scale\" has scales of it, found BF16" 't[W] = "BF16", [96, 160], bytes(2 * 96 * 160)'
    broken "scales of other groups" "$up.scale\": expected scales of 32 columns of a row, F8_E8M0 (96, 5), found F8_E8M0 (96, 10)" 't[S] = d, [96, 10], 2 * x'
    broken "scales of blocks" "$up.scale\": expected scales of 32 columns of a row, F8_E8M0 (96, 5), found F8_E8M0 (1, 2)" 't[S] = d, [1, 2], x[:2]'
    broken "a scale that is NaN" "$up.scale\": expected scales of at most 2^125, with which all fp4 are floats, found nan" 't[S] = d, s, x[:-1] + b"\xff"'
    broken "fp8 in its place, with its scales" "$up.scale\": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (1, 2), found F8_E8M0 (96, 5)" 't[W] = "F8_E4M3", [96, 160], bytes(96 * 160)'
    rewrite release broken 'N = "'$up'"; t[N + ".weight"] = "F8_E4M3", [96, 160], b"\x38" * (96 * 160); t[N + ".scale"] = "F32", [1, 2], struct.pack("<2f", 0.25, 0.5)'
    check "one expert in fp8 among those in fp4: floats of all" go --from broken --generate x --max-new-tokens 1
    refuse "as-read of no folder" "--export-dtype: as-read takes tensors as a folder has them" --config packed.json --train text --export-hf no_hf --export-dtype as-read
}

run_parts $parts
