#!/usr/bin/env bash
# train_qwen36 as its user meets it: presets, options, config.json, files, ranks, kills, generation. About two minutes of one core after the
# build. What it computes is held against transformers by dev/ref/check_hf.py --model qwen36.
#     dev/test_qwen36.sh                     all parts
#     dev/test_qwen36.sh options ranks       some of them: presets options configs files mtp vision eyes bits ranks kills text releases
#     dev/test_qwen36.sh quick               presets, configs, files, mtp, vision, eyes and bits, of ranks, kills, text and releases a few
#     KILLS=300 dev/test_qwen36.sh kills     more random kills than 20
# Each run happens in a folder that goes away again. Runs are tiny, and compared byte by byte.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1  # of a tiny model: more threads wait for each other
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
kills=${KILLS:-$(is_quick && echo 2 || echo 20)}
parts=${*:-$(is_quick && echo presets configs mtp vision bits ranks kills || echo presets options configs files mtp vision eyes bits ranks kills text releases)}

need_build trainer "CPU=1" train_qwen36
limit=120  # seconds of a run
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

# ---- files: small models ----

write_texts
turn='"rope_parameters":{"rope_type":"default","rope_theta":10000,"partial_rotary_factor":0.5,"mrope_section":[1,0,1]}'
echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"layer_types":["linear_attention","full_attention"],
"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":5,
"linear_value_head_dim":6,"linear_conv_kernel_dim":4,"num_experts":5,"num_experts_per_tok":2,"moe_intermediate_size":10,
"shared_expert_intermediate_size":12,"max_position_embeddings":48,'$turn'}' >tiny.json
edit tiny.json linear.json layer_types '["linear_attention","linear_attention"]' linear_num_value_heads 6 linear_conv_kernel_dim 3
edit tiny.json full.json layer_types '["full_attention","full_attention"]' num_key_value_heads 1 num_experts_per_tok 1
edit tiny.json tied.json layer_types '["full_attention","linear_attention"]' tie_word_embeddings true linear_num_value_heads 2 rms_norm_eps 1e-5
edit tiny.json balance.json num_hidden_layers 3 layer_types - full_attention_interval 2 output_router_logits true router_aux_loss_coef 0.02
edit balance.json long.json max_position_embeddings 160  # of three chunks of 64
edit balance.json mtp.json mtp_num_hidden_layers 1 mtp_weight 0.5
edit tied.json mtp_tied.json layer_types '["linear_attention","linear_attention"]' mtp_num_hidden_layers 1 mtp_weight 0.25
edit tiny.json wide.json hidden_size 64 moe_intermediate_size 64 num_experts 4  # for --ep
"$python" -c 'import json
c = json.load(open("balance.json"))
json.dump({"model_type": "qwen3_5_moe", "tie_word_embeddings": True, "text_config": c}, open("nested.json", "w"))
v = {"depth": 2, "hidden_size": 16, "intermediate_size": 10, "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
     "spatial_merge_size": 2, "num_position_embeddings": 9, "out_hidden_size": 16}
json.dump({"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": c, "vision_config": v, "image_token_id": 200}, open("sees.json", "w"))'
start=(--config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4)
mixed=("${start[@]}" --grad-accum 4 --steps 12 --val-fraction 0.1 --eval-every 6 --sample-every 6 --max-new-tokens 8 --save-every 4)
nest='t = {n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: x for n, x in t.items()}'  # of rewrite

# a folder has the tensors that its config.json asks for, by doc/qwen36.md: FOLDER fused|apart NUMBER
table() {
    "$python" - "$@" <<'PYTHON'
import json, math, struct, sys
c = json.load(open(sys.argv[1] + "/config.json"))
data = open(sys.argv[1] + "/model.safetensors", "rb").read()
found = {n: tuple(x["shape"]) for n, x in json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]]).items() if n != "__metadata__"}
D, V, E, F, S = (c[k] for k in ("hidden_size", "vocab_size", "num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"))
NH, NKV, HS, Hk, Hv, DK, DV, K = (c[k] for k in (
    "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim"))
C = 2 * Hk * DK + Hv * DV
full = {"q_proj": (2 * NH * HS, D), "k_proj": (NKV * HS, D), "v_proj": (NKV * HS, D), "o_proj": (D, NH * HS), "q_norm": (HS,), "k_norm": (HS,)}
linear = {"in_proj_qkv": (C, D), "in_proj_z": (Hv * DV, D), "in_proj_a": (Hv, D), "in_proj_b": (Hv, D), "conv1d": (C, 1, K), "norm": (DV,),
          "out_proj": (D, Hv * DV)}
want = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
n_mtp = c["mtp_num_hidden_layers"]
for l, kind in enumerate(c["layer_types"] + n_mtp * ["full_attention"]):
    at = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,), "mlp.gate.weight": (E, D),
          "mlp.shared_expert_gate.weight": (1, D), "mlp.shared_expert.gate_proj.weight": (S, D), "mlp.shared_expert.up_proj.weight": (S, D),
          "mlp.shared_expert.down_proj.weight": (D, S)}
    if kind == "full_attention": at |= {f"self_attn.{n}.weight": x for n, x in full.items()}
    else: at |= {f"linear_attn.{n}.weight": x for n, x in linear.items()} | {"linear_attn.A_log": (Hv,), "linear_attn.dt_bias": (Hv,)}
    if sys.argv[2] == "fused": at |= {"mlp.experts.gate_up_proj": (E, 2 * F, D), "mlp.experts.down_proj": (E, D, F)}
    else: at |= {f"mlp.experts.{e}.{n}_proj.weight": (D, F) if n == "down" else (F, D) for e in range(E) for n in ("gate", "up", "down")}
    want |= {(f"model.layers.{l}." if l < c["num_hidden_layers"] else "mtp.layers.0.") + n: x for n, x in at.items()}
if n_mtp: want |= {"mtp.fc.weight": (D, 2 * D)} | {f"mtp.{n}.weight": (D,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
wrong = sorted(n for n in want.keys() | found.keys() if want.get(n) != found.get(n))
assert not wrong and len(found) == int(sys.argv[3]), (len(found), len(wrong), [(n, want.get(n), found.get(n)) for n in wrong[:4]])
PYTHON
}

# ---- presets ----

presets() {
    echo "# presets"
    local name count
    while read -r name count; do
        timeout 60 "$trainer" --model $name --plan 1 --seq-len 64 --batch-size 1 >out 2>err
        check "$name: $count parameters" test "$(boxed parameters "[0-9.]*[kMB] = $count( .padded: [0-9]*.)?")" = 1
    done <<'SIZES'
tiny 375608
small 188896480
qwen3.6-35b-a3b 35505251456
SIZES
    check "qwen3.6-35b-a3b: its layers" test "$(boxed '  linear' '30, 32 heads of 128 for 16 of keys of 128, 4 taps') $(boxed '  attention' '10, 16 heads of 256 for 2 of keys and values, 64') $(boxed experts '256 in a layer, 512 wide, a token takes 8 and one')" = "1 1 1"
    # its 40 layers, small: of 256 experts 8, whose tensors are 3 each
    edit tiny.json layers.json num_hidden_layers 40 layer_types - num_experts 8 vocab_size 7
    go --config layers.json --export-hf apart && table apart apart 1573
    verdict $? "40 layers, experts apart: 613 tensors and those of the experts, names and shapes as in doc/qwen36.md" "$(<err)"
    rewrite apart fused 'fuse()'
    go --from fused --export-hf again && table again fused 693
    verdict $? "... as one tensor: 693, as Qwen3.6-35B-A3B without MTP and vision" "$(<err)"
    edit tiny.json vast.json num_hidden_layers 64 layer_types - hidden_size 8192 moe_intermediate_size 32768 num_experts 64
    timeout 60 "$trainer" --config vast.json --dry-run >out 2>err
    check "parameters that no memory holds: status 1, no smaller batch would help" \
        test "$? $(grep -cE 'free: try (.*--(ep|tp|pp|zero).* on (about )?[0-9]+ machines.*|a smaller model)$' err)" = "1 1"
    timeout 60 "$trainer" --model tiny --dry-run --batch-size 65536 --seq-len 256 --head-rows 2147483647 >out 2>err
    check "a batch that no memory holds: status 1, a line with a remedy" \
        test "$? $(grep -cE 'free: try a smaller --batch-size \(at most [1-9][0-9]*; [0-9]+ with --recompute 3\), --seq-len or --model(, or --cp [0-9]+ on [0-9]+ machines)?$' err)" = "1 1"
    refuse "an unknown preset" '--model: expected tiny, small or qwen3.6-35b-a3b, found "huge"' --model huge --train text
}

# ---- options ----

options() {
    local i name
    echo "# options of this trainer"
    for i in 0 2 3; do flag same 4 --recompute $i; done
    for name in linear full tied balance; do flag same "" --recompute 3 --config $name.json; done
    for i in 0 1 2 3; do flag same "" --recompute $i --config balance.json --freeze 'first:1' --doc-reset 1 --train documents; done
    for i in 0 3; do flag same "" --recompute $i --config long.json --seq-len 150 --batch-size 1; done
    for i in 1 7; do flag same 0 --head-rows $i; done
    flag same 0 --head-rows 5 --verify-every 1
    flag same "" --head-rows 3 --config tied.json
    flag 'config router_aux_loss_coef 0.5 && config output_router_logits true && other && [ "$(boxed balance "bias none, loss 0.5")" = 1 ]' -1 --aux-alpha 0.5
    flag 'config output_router_logits false && other' 1001 --aux-alpha 0 --config balance.json
    refuse "--graph in a program for CPUs" "--graph: is for GPUs" "${start[@]}" --graph 1
    refuse "--pp of one rank" "--pp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" --pp 2
    refuse "--pp-chunks without --pp" "--pp-chunks: is for --pp 2 and more" "${start[@]}" --pp-chunks 2
    refuse "--ep of a model with 5 experts" "--ep: 2: expected a number that divides the 5 experts: the nearest is 1" "${start[@]}" --ep 2
    refuse "--ep of one rank" "--ep: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" --config wide.json --ep 2
    refuse "--ep-room without --ep" "--ep-room: is for --ep 2 and more" "${start[@]}" --ep-room 2
    refuse "--tp of one rank" "--tp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" --config wide.json --tp 2
    refuse "--tp of a model with 5 experts" "--tp: 2: expected a power of two that divides the 5 experts: there is none" "${start[@]}" --tp 2
    for i in --pp --pp-chunks --ep --tp --cp; do refuse "$i 0" "$i: expected an integer 1.." "${start[@]}" $i 0; done
    refuse "--cp of one rank" "--cp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "${start[@]}" --cp 2
    tried[--tied]=1
    refuse "--tied of a model that says so itself" "--tied: is for --model; config.json says it as tie_word_embeddings" "${start[@]}" --tied 1
    refuse "--tied 2" "--tied: expected 0 or 1" --model tiny --train text --tied 2
    for i in 0 1; do
        rm -rf with && go --model tiny --tied $i --train text --seq-len 8 --batch-size 1 --steps 1 --run with
        check "--tied $i: $((1 - i)) matrices of the head" \
            test "$(tensors with/step_000001/model.safetensors lm_head | wc -l) $(grep -c "\"tie_word_embeddings\": $([ $i = 1 ] && echo true || echo false)" with/step_000001/config.json)" = "$((1 - i)) 1"
    done
    refuse "training what is stored as bf16" "--weights: bf16 and fp8 are for what does not learn" "${start[@]}" --weights bf16
    mkdir alone && cp with/step_000001/model.safetensors alone
    refuse "a model without its config.json" "alone/config.json: cannot be opened" --from alone/model.safetensors --train text
    refuse "more positions than the model has" "--seq-len: expected at most the model's 48 positions, found 96" "${start[@]}" --seq-len 96

    echo "# options of all trainers"
    for name in tiny linear full; do flag other 2 --doc-reset 1 --train documents --config $name.json; done
    flag 'same_model $plain with && test -s "$(last with)/ema.safetensors"' 1 --ema 0.5
    flag 'same_model $plain with && grep -q "noise_scale" with/metrics.jsonl' -1 --noise-scale 2 --grad-accum 4 --config balance.json
    answers 10 text >examples
    flag 'grep -q "HellaSwag 100.00% .* 10 of 10$" out' "" --hellaswag examples --eval-every 60 --steps 60
    hellaswag_beside "" "--recompute 3 --config balance.json" "--doc-reset 1 --head-rows 3"

    echo "# what learns"
    frozen balance '*linear_attn*' 'linear_attn'
    frozen balance '*.A_log,*.dt_bias' 'A_log|dt_bias'
    frozen balance '*.conv1d.*,*.in_proj_[ab].*' 'conv1d|in_proj_[ab]\.'
    frozen balance '*.linear_attn.norm.weight' 'linear_attn\.norm'
    frozen balance '*.in_proj_qkv.*,*.out_proj.*' 'in_proj_qkv|out_proj'
    frozen balance '*.q_proj.*,*.k_norm.*' 'q_proj|k_norm'
    frozen balance '*self_attn*' 'self_attn'
    frozen balance '*.shared_expert.*' 'shared_expert\.'
    frozen balance '*.shared_expert_gate.*' 'shared_expert_gate'
    frozen balance '*.mlp.gate.weight' 'mlp\.gate\.weight'
    frozen balance '*.experts.3.*' '\.experts\.3\.'
    frozen balance 'first:1' 'layers\.0\.'
    frozen balance 'first:2,model.embed_tokens.*' 'layers\.[01]\.|embed_tokens'
    frozen tied 'indices:1,*norm*' 'layers\.1\.|norm'
    frozen tiny 'model.*,*.experts.*' '^model'
    refuse "--freeze without a tensor" "matches no tensor" "${start[@]}" --config full.json --freeze '*linear_attn*'
    refuse "nothing that learns" "every tensor is frozen" "${start[@]}" --freeze 'first:2,model.*,lm_head.weight'

    echo "# adapters"
    go "${start[@]}" --steps 40 --export-hf base --run book
    local tune=(--from base --lora-rank 3 --train text --seq-len 16 --batch-size 2 --lr 3e-2 --steps 20)
    go "${tune[@]}" --run adapter
    check "beside q, k, v, o, in_proj_qkv, in_proj_z, out_proj and the shared expert, in all 13 matrices" \
        test "$(tensors "$(last adapter)/adapter_model.safetensors" lora_B | wc -l) $(tensors "$(last adapter)/adapter_model.safetensors" 'in_proj_[ab]\.|expert_gate|experts|mlp\.gate\.' | wc -l)" = "13 0"
    write() { go --max-new-tokens 30 --temperature 0 --generate "line 7" "$@" && cat out; }
    go --from base --lora adapter --merge 1 --export-hf merged
    check "... merged: the text that base and adapter write, and not the base's" \
        test "$(write --from merged)" = "$(write --from base --lora adapter)" -a "$(write --from base)" != "$(write --from merged)"
    rm -rf other && go "${tune[@]}" --recompute 3 --head-rows 5 --threads 2 --run other
    check "--recompute 3 --head-rows 5 --threads 2: the same adapter" same_run adapter other
    go "${tune[@]}" --lora-targets in_proj_a,in_proj_b,shared_expert_gate --lora-rank-pattern shared_expert_gate=1 --lora-parameters mlp.experts.down_proj,mlp.gate.weight --run gates
    check "--lora-targets and --lora-parameters: gates, routers, experts" \
        test "$(tensors "$(last gates)/adapter_model.safetensors" 'in_proj_[ab]\.lora_B|shared_expert_gate\.lora_B' | wc -l) $(tensors "$(last gates)/adapter_model.safetensors" 'mlp\.(experts|gate)\..*lora_B' | wc -l)" = "4 4"

    go --help
    local missing=""
    tried[--mtp]=1 tried[--mtp-weight]=1 tried[--vision]=1 tried[--image-max-pixels]=1  # below
    for i in tied aux-alpha mtp mtp-weight vision image-max-pixels recompute head-rows; do
        grep -q "^  --$i " out && [ -n "${tried[--$i]-}" ] || missing+=" $i"
    done
    check "each option of this trainer's own is in --help and was tried (not:$missing)" test -z "$missing"
    check "--help: no line is longer than 100 columns" test "$(wc -L <out)" -le 100
    adapter_resumes "--aux-alpha beside a folder" --from base --aux-alpha 0.9
    adapter_resumes "--aux-alpha beside start values" --config balance.json --aux-alpha 0
    adapter_resumes "--tied 0 of a preset" --model tiny --tied 0
    adapter_resumes "--mtp 0 of a config.json that has it" --config mtp.json --mtp 0
    adapter_resumes "--vision 0 of a config.json that has it" --config sees.json --vision 0
}

# ---- config.json ----

# of rope_parameters other values, as a text: null takes a key away
turning() { "$python" -c 'import json, sys
turn = {**json.loads("{" + sys.argv[1] + "}")["rope_parameters"], **json.loads(sys.argv[2])}
print(json.dumps({k: v for k, v in turn.items() if v is not None}))' "$turn" "$1"; }
turned() { changed "$1" "$2" rope_parameters "$(turning "$3")"; }  # PROMISE TEXT VALUES

configs() {
    echo "# config.json"
    local i key least
    echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":8,"num_hidden_layers":4,"max_position_embeddings":16,
        "num_attention_heads":2,"num_key_value_heads":1,"head_dim":256,"linear_num_key_heads":1,"linear_num_value_heads":2,
        "linear_key_head_dim":3,"linear_value_head_dim":4,"linear_conv_kernel_dim":2,"num_experts":3,"num_experts_per_tok":2,
        "moe_intermediate_size":4,"shared_expert_intermediate_size":5}' >needed.json
    becomes "the seventeen keys that doc/qwen36.md calls needed are enough; the others are what it says they are" \
        'rms_norm_eps": 1e-6|rope_theta": 10000.0|partial_rotary_factor": 0.25|tie_word_embeddings": false|output_router_logits": false|router_aux_loss_coef": 0.001' 6 needed
    listed() { tr -d ' \n"' <with/step_000001/config.json | grep -o "$1:\[[^]]*\]" | sed 's/_attention//g'; }
    check "... every fourth layer is full; no section, as none was said" test "$(listed layer_types) $(listed mrope_section)" = "layer_types:[linear,linear,linear,full] "
    becomes "full_attention_interval 2" full_attention 2 needed full_attention_interval 2
    check "... linear, full, linear, full" test "$(listed layer_types)" = "layer_types:[linear,full,linear,full]"
    becomes "layer_types, whatever the interval says" linear_attention 3 needed full_attention_interval 1 layer_types '["full_attention","linear_attention","linear_attention","linear_attention"]'
    check "... full, linear, linear, linear" test "$(listed layer_types)" = "layer_types:[full,linear,linear,linear]"
    becomes "rope_theta and partial_rotary_factor outside, as in older files" 'rope_theta": 500.0|partial_rotary_factor": 0.5' 2 \
        tiny rope_theta 500 partial_rotary_factor 0.5 rope_parameters '{"mrope_section":[0,2,0]}'
    check "... sections inside" test "$(listed mrope_section)" = "mrope_section:[0,2,0]"
    becomes "... in rope_parameters they are the ones that count" 'rope_theta": 500.0|partial_rotary_factor": 0.25' 2 \
        tiny partial_rotary_factor 0.5 rope_parameters '{"rope_theta":500,"partial_rotary_factor":0.25,"mrope_section":[1,0,0]}'
    becomes "... null, as if they were missing" 'partial_rotary_factor": 0.25|rope_theta": 10000.0' 2 needed rope_parameters null layer_types null full_attention_interval null
    becomes "2 of 49 channels turn: a factor that is read as 2 again" 'partial_rotary_factor": 0.0408' 1 tiny head_dim 49 rope_parameters \
        "$(turning '{"partial_rotary_factor":0.0449,"mrope_section":null}')"
    check "... of which a checkpoint goes on" go --from with --train text --seq-len 16 --batch-size 2 --steps 1
    becomes "no sections, where fewer pairs turn than theirs" 'partial_rotary_factor": 0.5' 1 tiny rope_parameters "$(turning '{"mrope_section":null}')"
    check "... a checkpoint of which the run goes on" go --resume --run with --steps 2
    becomes "router_aux_loss_coef stays out of the loss without output_router_logits" 'output_router_logits": false' 1 tiny router_aux_loss_coef 0.5
    go --config tiny.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 1 --run without && same_model without with
    verdict $? "... and changes nothing" "$(<err)"
    becomes "... 0.001 where it is missing" 'output_router_logits": true|router_aux_loss_coef": 0.001' 2 balance router_aux_loss_coef -
    becomes "text_config, with what stands beside it" 'model_type": "qwen3_5_moe_text"|tie_word_embeddings": true|router_aux_loss_coef": 0.02|num_hidden_layers": 3' 4 nested
    edit nested.json other.json tie_word_embeddings - model_type '"qwen3_5_moe_text"'
    becomes "... of which tie_word_embeddings is not read" 'tie_word_embeddings": false' 1 other text_config "$("$python" -c 'import json
print(json.dumps({**json.load(open("nested.json"))["text_config"], "tie_word_embeddings": True}))')"
    for i in "linear_conv_kernel_dim 1" "num_experts_per_tok 5" "num_experts_per_tok 1" "linear_key_head_dim 1 linear_value_head_dim 1" "hidden_size 1"; do
        becomes "$i" "${i%% *}\": ${i##* }" 1 tiny $i
        check "... of which a checkpoint goes on" go --from with --train text --seq-len 16 --batch-size 2 --steps 1
    done

    echo "# mistakes in config.json"
    changed "another architecture" '"model_type": expected qwen3_5_moe_text|qwen3_5_moe, found "qwen3_moe"' model_type '"qwen3_moe"'
    changed "no architecture" '"model_type": expected qwen3_5_moe_text, found nothing' model_type -
    changed "text_config that is none" '"text_config": expected an object, found 5' text_config 5
    changed "... that is empty" '"max_position_embeddings": expected an integer' text_config '{}'
    local quantized='"quantization_config": expected null, or quant_method fp8 with fmt e4m3, activation_scheme dynamic and weight_block_size [128, 128]; other'
    changed "quantized weights" "$quantized" quantization_config '{"quant_method":"fp8"}'
    base=nested.json changed "... beside text_config" "$quantized" quantization_config '{"quant_method":"fp8","weight_block_size":[64,128]}'
    changed "heads that are no multiple" '"num_attention_heads" 4: expected a multiple of "num_key_value_heads" 3' num_key_value_heads 3
    changed "... of linear layers" '"linear_num_value_heads" 4: expected a multiple of "linear_num_key_heads" 3' linear_num_key_heads 3
    changed "layer_types of other layers" '"layer_types": expected a list of 2, one for each layer' layer_types '["full_attention"]'
    changed "layer_types that is no list" '"layer_types": expected a list of 2, one for each layer' layer_types '"full_attention"'
    changed "layer_types of another kind" '"layer_types": expected linear_attention or full_attention, found sliding_attention' layer_types '["full_attention","sliding_attention"]'
    changed "... of no kind" '"layer_types": expected linear_attention or full_attention, found another type' layer_types '["full_attention",5]'
    changed "every 0th layer" '"full_attention_interval": expected an integer 1..1024, found 0' layer_types - full_attention_interval 0
    changed "an odd number of channels that turn" '"partial_rotary_factor" 0.5 of 6 channels: expected an even number above 0, found 3' head_dim 6
    turned "no channel that turns" '"partial_rotary_factor" 0 of 8 channels: expected an even number above 0, found 0' '{"partial_rotary_factor":0}'
    turned "more channels than there are" '"partial_rotary_factor": expected a number 0..1' '{"partial_rotary_factor":1.5}'
    changed "... said outside" '"partial_rotary_factor": expected a number 0..1' partial_rotary_factor -1
    turned "a section too few" '"mrope_section": expected three numbers of pairs of those that turn, found [1, 1]' '{"mrope_section":[1,1]}'
    turned "a section too many" '"mrope_section": expected three numbers of pairs of those that turn, found [1, 0, 1, 0]' '{"mrope_section":[1,0,1,0]}'
    turned "a section below 0" '"mrope_section": expected three numbers of pairs of those that turn, found [1, 2, -1]' '{"mrope_section":[1,2,-1]}'
    turned "sections that are none" '"mrope_section": expected three numbers of pairs of those that turn, found 5' '{"mrope_section":5}'
    turned "sections of fewer pairs than turn" '"mrope_section": expected numbers whose sum is 2, the pairs that turn, found 1' '{"mrope_section":[1,0,0]}'
    turned "YaRN" '"rope_type": this trainer computes "default", found "yarn"' '{"rope_type":"yarn","factor":4.0}'
    changed "... in rope_scaling" '"rope_scaling": expected null; other kinds of RoPE, as YaRN, are not computed here' rope_scaling '{"type":"yarn","factor":4.0}'
    changed "two thetas" '"rope_theta" 30000: expected 10000, as in "rope_parameters"' rope_theta 30000
    changed "rope_parameters that are none" '"rope_parameters": expected an object or null, found 5' rope_parameters 5
    changed "another activation" '"hidden_act": this trainer computes "silu", found "gelu"' hidden_act '"gelu"'
    changed "dropout" '"attention_dropout": this trainer computes 0.0, found 0.1' attention_dropout 0.1
    changed "biases" '"attention_bias": this trainer computes false, found true' attention_bias true
    changed "weights that do not add up to 1" '"norm_topk_prob": this trainer computes true, found false' norm_topk_prob false
    changed "positions that see what follows" '"is_causal": this trainer computes true, found false' is_causal false
    changed "tied or not" '"tie_word_embeddings": expected true or false, found "yes"' tie_word_embeddings '"yes"'
    changed "output_router_logits that is a number" '"output_router_logits": expected true or false, found 1' output_router_logits 1
    changed "a negative loss of routers" '"router_aux_loss_coef": expected a number 0..1000' router_aux_loss_coef -1
    changed "rms_norm_eps of 0" '"rms_norm_eps": expected a number 1e-12..0.1' rms_norm_eps 0
    changed "more experts for a token than there are" '"num_experts_per_tok": expected at most 5, found 6' num_experts_per_tok 6
    while read -r key i; do
        least=1
        if [ $key = head_dim ]; then least=2; fi
        changed "$key beyond $i" "\"$key\": expected an integer $least..$i, found $((i + 1))" $key $((i + 1))
        is_quick && continue
        changed "$key below $least" "\"$key\": expected an integer $least..$i, found $((least - 1))" $key $((least - 1))
        changed "no $key" "\"$key\": expected an integer $least..$i, found nothing" $key -
        changed "$key that is a text" "\"$key\": expected an integer $least..$i, found" $key '"8"'
    done <<'KEYS'
max_position_embeddings 16777216
vocab_size 16777216
num_hidden_layers 1024
hidden_size 1048576
num_attention_heads 16384
num_key_value_heads 16384
head_dim 1024
linear_num_key_heads 16384
linear_num_value_heads 16384
linear_key_head_dim 1024
linear_value_head_dim 1024
linear_conv_kernel_dim 16
num_experts 1024
num_experts_per_tok 32
moe_intermediate_size 4194304
shared_expert_intermediate_size 4194304
KEYS
    edit tiny.json eight.json num_experts 8 num_experts_per_tok 8 max_position_embeddings 16384
    refuse "more slots than an int can count" "--batch-size: expected at most 16383 rows of 16384 positions, each with 8 experts, found 16384" \
        --config eight.json --dry-run --seq-len 16384 --batch-size 16384
}

# ---- files: probes, Hugging Face folders ----

files() {
    local name i
    echo "# probes: NumPy, before and after saving"
    local positions
    for name in tiny linear full tied balance preset long longer mtp mtp_tied; do
        is_quick && [[ $name == preset || $name == longer ]] && continue
        rm -rf hf again before after truth
        positions=9 i=(--config $name.json)
        case $name in
            preset) i=(--model tiny --tokenizer bytes) ;;
            long) positions=70 ;;
            longer) positions=130 i=(--config long.json) ;;
        esac
        rows $positions >in
        go "${i[@]}" --export-hf hf --probe in --probe-out before
        check "$name: a probe has logits, both losses and the gradient of every tensor" \
            test "$(tensors before '^grad\.' | wc -l) $(tensors before '^(logits|loss|cross_entropy)$' | wc -w)" = "$(tensors hf/model.safetensors . | wc -l) $((5 + 2 * positions * 257))"
        "$python" "$root/dev/ref/qwen36.py" --from hf --probe in --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
        verdict $? "... which are to the last bit those of dev/ref/qwen36.py" "$(<err)"
        go --from hf --probe in --probe-out after --threads 3 --head-rows 4 --recompute 3 --export-hf again && cmp before after && cmp hf/model.safetensors again/model.safetensors && cmp {hf,again}/config.json
        verdict $? "... from the saved folder, other threads, few rows of the head: the same bytes" "$(<err)"
        [[ $name == balance || $name == tied || $name == long || $name == mtp ]] || continue
        rewrite hf fused 'fuse()' && rewrite fused inner "$nest"
        for i in fused inner; do
            is_quick && [[ $name/$i != balance/inner ]] && continue
            go --from $i --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss|cross_entropy)$') <(tensors after '^(logits|loss|cross_entropy)$') &&
                "$python" "$root/dev/ref/qwen36.py" --from $i --probe in --probe-out truth && cmp <(tensors after .) <(tensors truth .)
            verdict $? "... $i, experts of a layer as one tensor: the same logits and losses, the reference's gradients" "$(<err)"
        done
    done
    batch >in
    go --config full.json --probe in --probe-out before
    check "one expert whose weight is 1: the router has no gradient" \
        test "$(tensors before 'grad.*mlp.gate.weight' | wc -l) $(tensors before 'grad.*mlp.gate.weight' | cut -d' ' -f2- | tr ' ' '\n' | grep -vcE '^(0|-2147483648)$')" = "2 0"

    echo "# folders in other forms"
    rm -rf hf shards && go "${start[@]}" --config balance.json --export-hf hf && go --from hf --probe in --probe-out before && go --from hf --export-hf shards --shard-gb 4e-6
    check "its tensors: names and shapes as in doc/qwen36.md" table hf apart $((3 + 2 * 9 + 6 + 3 * (7 + 15)))
    go --from shards --probe in --probe-out after && cmp before after
    verdict $? "a folder of $(ls shards/*.safetensors | wc -l) shards: the same probe" "$(<err)"
    check "... more than one" test "$(ls shards/*.safetensors | wc -l)" -gt 3
    rewrite hf fused 'fuse()' && rewrite hf inner "$nest" && rewrite fused both "$nest" && edit hf/config.json both/config.json model_type '"qwen3_5_moe"' text_config "$("$python" -c 'import json
c = json.load(open("hf/config.json"))
print(json.dumps({k: v for k, v in c.items() if k not in ("tie_word_embeddings", "architectures")}))')" hidden_size 5
    for name in fused inner both; do
        rm -rf leg whole exported
        go --from $name --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
        verdict $? "$name: the same logits and loss, not a word" "$(<err)"
        check "... a gradient for every tensor, by its name in that file" \
            cmp <(tensors after '^grad' | cut -d' ' -f1 | sed 's/^grad\.//') <(tensors $name/model.safetensors . | cut -d' ' -f1)
        check "... their numbers are those of the experts apart" cmp <(tensors before '^grad' | cut -d' ' -f2- | tr ' ' '\n' | sort) <(tensors after '^grad' | cut -d' ' -f2- | tr ' ' '\n' | sort)
        i=("${start[@]:2}" --from $name --schedule constant --warmup 0)
        go "${i[@]}" --run whole && go "${i[@]}" --steps 2 --run leg && go --resume --run leg --steps 4 --export-hf exported && same_run whole leg
        verdict $? "... stopped after 2 of 4 updates, resumed: the same bytes" "$(<err)"
        check "... and its export has those names" cmp <(tensors $name/model.safetensors . | cut -d' ' -f1) <(tensors exported/model.safetensors . | cut -d' ' -f1)
        is_quick && break
    done
    rm -rf apart leg && go "${start[@]:2}" --from hf --run apart && go "${start[@]:2}" --from fused --run leg && rewrite apart/step_000004 stepped 'fuse()'
    check "experts as one tensor learn what experts apart do" cmp <(tensors stepped/model.safetensors .) <(tensors leg/step_000004/model.safetensors .)
    rewrite fused rounded 'cut()'
    check "... with --weights bf16 it writes the same text" test "$(go --from rounded --generate "line 7" --temperature 0 && cat out)" = "$(go --from rounded --weights bf16 --generate "line 7" --temperature 0 && cat out)"
    rewrite fused broken 't.pop("model.layers.2.mlp.experts.gate_up_proj")'
    refuse "... which one layer lacks" '"model.layers.2.mlp.experts.gate_up_proj" is missing' --from broken --train text
    like "vision: a line, the same probe" 1 't["model.visual.merger.norm.weight"] = "F32", [4], bytes(16); t["model.visual.merger.norm.bias"] = "F32", [4], bytes(16)'
    check "... which counts its tensors and says what to do" grep -q '2 tensors of the tower that reads images are left out, as config.json without vision_config or --vision 0 says: keep this folder$' err
    like "a convolution of two axes: not a word" 0 't = {n: (d, [s[0], s[2]] if n.endswith("conv1d.weight") else s, x) for n, (d, s, x) in t.items()}'
    like "a tensor that no layer has: a line" 1 't["model.layers.0.self_attn.q_proj.weight"] = "F32", [24], bytes(96)'
    rewrite hf rounded 'cut()'
    rewrite hf halves 'bf16()'
    go --from rounded --probe in --probe-out before && go --from halves --probe in --probe-out after && cmp before after
    verdict $? "bf16: the probe of its numbers as floats" "$(<err)"
    rm -rf half again && go --from hf --export-hf half --export-dtype bf16 && go --from half --export-hf again --export-dtype bf16 && cmp {half,again}/model.safetensors
    verdict $? "--export-dtype bf16, read and written again: the same tensors" "$(<err)"
    check "... config.json says bfloat16" grep -q '"dtype": "bfloat16"' half/config.json
    broken() {  # PROMISE TEXT PYTHON
        rewrite hf broken "$3"
        refuse "$1" "$2" --from broken --train text --seq-len 16
    }
    for name in model.layers.1.self_attn.q_norm.weight model.layers.0.linear_attn.A_log model.layers.2.linear_attn.conv1d.weight \
        model.layers.0.mlp.shared_expert.up_proj.weight model.layers.2.mlp.shared_expert_gate.weight model.layers.1.mlp.experts.4.up_proj.weight model.norm.weight lm_head.weight; do
        broken "$name is missing" "\"$name\" is missing" "t.pop('$name')"
        broken "... has another shape" "\"$name\": expected " "d, s, x = t['$name']; t['$name'] = d, [*s, 2], x * 2"
        is_quick && break
    done
    broken "a convolution of other axes" '"model.layers.0.linear_attn.conv1d.weight": expected 3 dimensions (44, 1, 4), found 2 (4, 44)' \
        'n = "model.layers.0.linear_attn.conv1d.weight"; d, s, x = t[n]; t[n] = d, [s[2], s[0]], x'
    broken "queries without gates" '"model.layers.1.self_attn.q_proj.weight": expected 2 dimensions (64, 16), found 2 (32, 16)' 'n = "model.layers.1.self_attn.q_proj.weight"; d, s, x = t[n]; t[n] = d, [s[0] // 2, s[1]], x[:len(x) // 2]'
    broken "a tensor has another type" '"model.norm.weight": expected F32, F16 or BF16, found I32' 't["model.norm.weight"] = "I32", [16], bytes(64)'
    broken "NaN" 'expected finite numbers, found 1 of model.layers.0.linear_attn.dt_bias' 'n = "model.layers.0.linear_attn.dt_bias"; d, s, x = t[n]; t[n] = d, s, struct.pack("<f", float("nan")) + x[4:]'

    echo "# a tied head"
    tied_heads tied.json
    rewrite hf inner "$nest" && go --from inner --probe in --probe-out after && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
    verdict $? "under model.language_model.: the same logits and loss" "$(<err)"
    rewrite inner other 't[H] = t["model.language_model.embed_tokens.weight"]' && go --from other --probe in --probe-out after && [ ! -s err ] && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
    verdict $? "... stored twice, the same bytes" "$(<err)"

    echo "# a run and its files"
    rm -rf run && go "${mixed[@]}" --config balance.json --ema 0.9 --tensorboard 1 --run run
    router_keys
    check "... loss = cross_entropy + 0.02 * 2 balance" "$python" -c 'import json
n = 0
for line in open("run/metrics.jsonl"):
    r = json.loads(line)
    if r.get("loss") is not None:
        n += 1
        assert abs(r["loss"] - r["cross_entropy"] - 0.04 * r["balance"]) < 1e-5 and 1 <= r["load"] <= 2.5, r
assert n == 12'
    check "--eval-only: the loss of the last validation" test "$(go --from run --train text --seq-len 16 --batch-size 2 --val-fraction 0.1 --eval-only && grep -o 'val loss [0-9.]*' out)" = "val loss $(printf %.4f "$(value run 12 val_loss)")"
    rm -rf exported && go --from run --export-hf exported && diff -r -x manifest.json -x optimizer.safetensors -x trainer.safetensors -x ema.safetensors exported run/step_000012 >err
    verdict $? "its export is the checkpoint without what training needs" "$(<err)"
    need_build inspect "" tools/inspect
    "$inspect" run/step_000012 >out 2>err
    check "inspect: a verified checkpoint of $(tensors run/step_000012/model.safetensors . | wc -l) tensors" test "$? $(grep -cE '^  manifest +verified|model_type qwen3_5_moe_text' out)" = "0 2"
}

# ---- the token after the next ----

mtp() {
    echo "# the token after the next (MTP)"
    local i name folder=with
    learn() { rm -rf $folder && go "${start[@]}" "$@" --run $folder; }  # OPTION...
    rm -rf run && go "${mixed[@]}" --config mtp.json --run run --export-hf hf
    check "a line of a step has its loss" test "$(grep -cE '^step [0-9]+/12 .* load [0-9.]+ \| mtp [0-9.]+ *$' out)" = 12
    check "loss = cross_entropy + 0.02 * 2 balance + 0.5 mtp_loss, which falls" "$python" -c 'import json
steps = [r for r in map(json.loads, open("run/metrics.jsonl")) if r.get("loss") is not None]
for r in steps:
    assert abs(r["loss"] - r["cross_entropy"] - 0.04 * r["balance"] - 0.5 * r["mtp_loss"]) < 1e-5, r
assert len(steps) == 12 and steps[-1]["mtp_loss"] < steps[0]["mtp_loss"]'
    nothing_counts mtp "" --config mtp.json
    check "its tensors: names and shapes as in doc/qwen36.md" table hf apart $((3 + 2 * 9 + 6 + 3 * (7 + 15) + 4 + 6 + 7 + 15))
    check "all of them learn" test "$(go --config mtp.json --export-hf drawn; comm -12 <(tensors drawn/model.safetensors mtp) <(tensors hf/model.safetensors mtp) | wc -l)" = 0
    learn --config mtp.json --mtp-weight 0 && folder=other learn --config mtp.json --mtp 0
    check "--mtp-weight 0: the model learns what it does without the module" cmp <(tensors with/step_000004/model.safetensors '^(model|lm_head)') <(tensors other/step_000004/model.safetensors .)
    check "... which stays as it was drawn" cmp <(tensors drawn/model.safetensors mtp) <(tensors with/step_000004/model.safetensors mtp)
    check "... and is no part of the losses" test "$(grep -c mtp_loss with/metrics.jsonl) $(grep -cE 'mtp .* more parameters for the token after the next, which stay as they are' out)" = "0 0"
    check "--mtp 0 of a config.json that has it: the same bytes as without" test "$(learn --config balance.json && cmp with/step_000004/model.safetensors other/step_000004/model.safetensors; echo $?)" = 0
    check "--mtp-weight 0.25 in place of config.json's: written as such" test "$(learn --config mtp.json --mtp-weight 0.25; grep -c '"mtp_weight": 0.25' with/step_000004/config.json)" = 1
    for i in 0 1 3; do
        folder=other learn --config mtp.json && learn --config mtp.json --recompute $i --head-rows 3 --threads 2
        check "--recompute $i --head-rows 3: the same bytes" same_run other with
    done
    refuse "a module that the run has learnt, left out on the way" "--mtp: the run began with 1: choose another --run, or leave it out" --resume --run run --mtp 0
    rm -rf with && go "${start[@]:2}" --from hf --mtp 0 --run with
    check "--mtp 0 of a folder that has it: a line" grep -q '^train_qwen36: hf/model.safetensors: 32 tensors of the module that predicts the token after the next are left out, as --mtp 0 says: keep this folder$' err
    check "... a model without" test "$(tensors with/step_000004/model.safetensors mtp | wc -l) $(grep -c '"mtp_num_hidden_layers": 0' with/step_000004/config.json)" = "0 1"
    go "${start[@]:2}" --from with --mtp 1 --freeze 'model.*,lm_head.*' --run grown --export-hf exported && cmp <(tensors with/step_000004/model.safetensors .) <(tensors exported/model.safetensors '^(model|lm_head)')
    verdict $? "--mtp 1 of a folder without, all else frozen: the same parameters" "$(<err)"
    check "... and $(tensors exported/model.safetensors mtp | wc -l) of a new module" table exported apart $((3 + 2 * 9 + 6 + 3 * (7 + 15) + 4 + 6 + 7 + 15))
    rm -rf grown exported fused && rewrite with/step_000004 fused 'fuse()' && go "${start[@]:2}" --from fused --mtp 1 --run grown --export-hf exported
    check "... of a folder with fused experts: fused, too" test "$(tensors exported/model.safetensors 'mtp.*experts' | wc -l)" = 2
    local new="--mtp: 1 gives a new module to a model that is trained, all of it, with --mtp-weight above 0"
    refuse "a new module in an export" "$new" --from with --mtp 1 --export-hf grown
    refuse "a new module beside an adapter" "$new" --from with --mtp 1 --lora-rank 2 --train text
    refuse "a new module that does not learn" "$new" --from with --mtp 1 --mtp-weight 0 --train text
    refuse "a weight without a module" "--mtp-weight: is for a model with that module: --mtp 1" --config tiny.json --train text --mtp-weight 0.7
    refuse "a weight beside an adapter" "--mtp-weight: is not for adapters, beside which the module stays as it is" --from hf --lora-rank 2 --train text --mtp-weight 0.7
    refuse "layers of the module by number" "--freeze: expected a layer 0..2, found \"3\"" --config mtp.json --train text --freeze indices:3
    rm -rf with && go "${start[@]:2}" --from hf --freeze 'model.*,lm_head.*' --run with && cmp <(tensors hf/model.safetensors '^(model|lm_head)') <(tensors with/step_000004/model.safetensors '^(model|lm_head)')
    verdict $? "--freeze of all else: the rest keeps every bit" "$(<err)"
    check "... the module learns" test "$(comm -12 <(tensors hf/model.safetensors mtp) <(tensors with/step_000004/model.safetensors mtp) | wc -l)" = 0
    rm -rf with && go "${start[@]:2}" --from hf --freeze 'mtp.*' --run with && cmp <(tensors hf/model.safetensors mtp) <(tensors with/step_000004/model.safetensors mtp)
    verdict $? "--freeze 'mtp.*': the module keeps every bit" "$(<err)"
    rm -rf with && go "${start[@]:2}" --from hf --lora-rank 2 --run with && go --from hf --lora with --merge 1 --export-hf merged && cmp <(tensors hf/model.safetensors mtp) <(tensors merged/model.safetensors mtp)
    verdict $? "beside an adapter the module stays as it is, and goes along" "$(<err)"
    check "... has no adapters" test "$(tensors with/step_000004/adapter_model.safetensors mtp | wc -l)" = 0
    rewrite hf fused 'fuse()' && rewrite fused mixed 'x = dict(t)
for n, (d, s, b) in x.items():
    if n.startswith("mtp.") and ".experts." in n:
        del t[n]
        e, half = len(b) // s[0], len(b) // s[0] // 2
        for i in range(s[0]):
            if "gate_up" in n:
                t[n.replace("gate_up_proj", f"{i}.gate_proj.weight")] = d, [s[1] // 2, s[2]], b[i * e:i * e + half]
                t[n.replace("gate_up_proj", f"{i}.up_proj.weight")] = d, [s[1] // 2, s[2]], b[i * e + half:(i + 1) * e]
            else:
                t[n.replace("down_proj", f"{i}.down_proj.weight")] = d, s[1:], b[i * e:(i + 1) * e]'
    batch >in
    for name in fused mixed; do
        rm -rf exported && go --from hf --probe in --probe-out before && go --from $name --probe in --probe-out after --export-hf exported && cmp <(tensors before '^(logits|loss)$') <(tensors after '^(logits|loss)$')
        verdict $? "$name: the same logits and loss" "$(<err)"
        check "... and its export has those names" cmp <(tensors $name/model.safetensors . | cut -d' ' -f1 | sort) <(tensors exported/model.safetensors . | cut -d' ' -f1 | sort)
    done
    rewrite hf broken 't.pop("mtp.fc.weight")'
    refuse "a module without its first tensor" '"mtp.fc.weight" is missing' --from broken --train text
    rewrite hf broken 't.pop("mtp.layers.0.self_attn.q_norm.weight")'
    refuse "a module of which a tensor is missing" '"mtp.layers.0.self_attn.q_norm.weight" is missing' --from broken --train text
    edit mtp.json two.json mtp_num_hidden_layers 2
    refuse "two modules" '"mtp_num_hidden_layers": expected an integer 0..1, found 2' --config two.json --train text
    for i in {1..12}; do echo "{\"messages\":[{\"role\":\"user\",\"content\":\"$i\"},{\"role\":\"assistant\",\"content\":\"$((i * i))\"}]}"; done >asked.jsonl
    edit mtp.json wordy.json vocab_size 300 max_position_embeddings 128
    local talk=(--config wordy.json --train asked.jsonl --chat-template chatml --seq-len 128)
    folder=other learn "${talk[@]}" && learn "${talk[@]}" --recompute 3 --threads 2 && same_run other with
    verdict $? "conversations: --recompute 3 --threads 2: the same bytes" "$(<err)"
    check "... with a loss of its own in every step" test "$(grep -cE '"mtp_loss": [0-9.]+' with/metrics.jsonl)" = 4
    greedy_of() { go --from "$1" --generate "line 7" --temperature 0 --max-new-tokens 20 && cat out; }
    check "it has no say in what is written" test "$(greedy_of hf)" = "$(rewrite hf plain 't = {n: x for n, x in t.items() if not n.startswith("mtp.")}'; greedy_of plain)"
}

# ---- images ----

# a probe of 2 rows of 14 positions with images of 4 x 4 and 2 x 6 patches in the first, one of 2 x 2 in the second
looks() {  # GRIDS [PLACEHOLDERS OF THE FIRST IMAGE [i|q|f: GRIDS AS I32, I64, F32]]
    "$python" - "$1" "${2-4}" "${3-i}" <<'PYTHON'
import json, struct, sys
grids, first, kind = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rows = [[5, 6] + first * [200] + [7] + 3 * [200] + [8, 9, 10, 11, 12][:14 - 6 - first], [1, 2, 3, 200, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
targets = [row[1:] + [20] for row in rows]
P = sum(t * h * w for t, h, w in grids)
tensors = {"image_grid_thw": ({"i": "I32", "q": "I64", "f": "F32"}[kind], [len(grids), 3], struct.pack(f"<{3 * len(grids)}{kind}", *[x for g in grids for x in g])),
           "inputs": ("I32", [2, 14], struct.pack("<28i", *rows[0], *rows[1])),
           "pixel_values": ("F32", [P, 24], struct.pack(f"<{24 * P}f", *[(i * 37 % 101) / 50 - 1 for i in range(24 * P)])),
           "targets": ("I32", [2, 14], struct.pack("<28i", *[-100 if x == 200 else x for row in targets for x in row]))}
header, body = {}, b""
for name, (dtype, shape, data) in tensors.items():
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
    body += data
header = json.dumps(header).encode()
sys.stdout.buffer.write(struct.pack("<Q", len(header)) + header + body)
PYTHON
}

vision() {
    echo "# images"
    local grids='[[1,4,4],[1,2,6],[1,2,2]]' i
    looks $grids >seen
    go --config sees.json --export-hf hf --probe seen --probe-out before
    "$python" "$root/dev/ref/qwen36_vision.py" --from hf --probe seen --probe-out truth 2>&1 && cmp <(tensors before .) <(tensors truth .)
    verdict $? "a probe with images: to the last bit dev/ref/qwen36_vision.py" "$(<err)"
    check "... a gradient for each of 21 + 2 * 12 tensors of the tower" test "$(tensors before '^grad.model.visual' | wc -l)" = 33
    go --from hf --probe seen --probe-out after --threads 3 --head-rows 4 --recompute 3 --export-hf again && cmp before after && cmp {hf,again}/model.safetensors && cmp {hf,again}/config.json
    verdict $? "... from the saved folder, other threads, recomputed: the same bytes" "$(<err)"
    for i in q f; do
        looks $grids 4 $i >seen
        go --from hf --probe seen --probe-out after && cmp before after
        verdict $? "... grids as $([ $i = q ] && echo I64 || echo floats): the same bytes" "$(<err)"
    done
    echo '{"patch_size": 2}' >hf/preprocessor_config.json
    go --from hf --export-hf again && cmp {hf,again}/preprocessor_config.json
    verdict $? "preprocessor_config.json goes along" "$(<err)"
    batch >in
    go --from hf --probe in --probe-out after && [ "$(tensors after '^grad.model.visual' | cut -d' ' -f2- | tr ' ' '\n' | grep -vcE '^0$')" = 0 ]
    verdict $? "a probe without images: all gradients of the tower are 0" "$(<err)"
    rm -rf with other && go "${start[@]}" --config sees.json --run with && go "${start[@]}" --config sees.json --vision 0 --run other
    check "text alone: the tower stays as it is, bit for bit" cmp <(tensors hf/model.safetensors visual) <(tensors with/step_000004/model.safetensors visual)
    check "... and changes nothing: --vision 0 learns the same, under plain names" cmp <(tensors other/step_000004/model.safetensors . | sort) \
        <(tensors with/step_000004/model.safetensors 'language_model|lm_head' | sed 's/language_model\.//' | sort)
    check "... with as many FLOP a token" test "$(grep -o '[0-9.]*[kMG] FLOP per token' out)" = "$(go "${start[@]}" --config sees.json --dry-run && grep -o '[0-9.]*[kMG] FLOP per token' out)"
    rm -rf with && go "${start[@]:2}" --from hf --vision 0 --run with
    check "--vision 0 of a folder that has it: a line" grep -q '33 tensors of the tower that reads images are left out, .*: keep this folder$' err
    rewrite hf broken 't.pop("model.visual.patch_embed.proj.weight")'
    refuse "a tower of which a tensor is missing" '"model.visual.patch_embed.proj.weight" is missing' --from broken --train text
    rewrite hf broken 't = {n: x for n, x in t.items() if "visual" not in n}' && rm -rf with && go "${start[@]:2}" --from broken --steps 1 --run with
    check "config.json with a tower of which no file has any: a line" grep -q 'no tensors of the tower of which config.json speaks: this model reads no images$' err
    rm -rf with && go "${start[@]:2}" --from hf --lora-rank 2 --run with && go --from hf --lora with --merge 1 --export-hf merged && cmp <(tensors hf/model.safetensors visual) <(tensors merged/model.safetensors visual)
    verdict $? "beside an adapter it goes along" "$(<err)"
    rewrite hf rounded 'cut()' && for i in fp32 bf16; do go --from rounded --lora-rank 2 --base-dtype $i --probe seen --probe-out $i.out; done
    check "a base in bf16 that fits: the same probe as in fp32" cmp fp32.out bf16.out
    go --config sees.json --export-hf fresh && grep -q '"patch_size": 2' fresh/preprocessor_config.json
    verdict $? "a new model says how images become its patches" "$(<err)"
    unlike() { looks "${@:3}" >seen && refuse "$1" "$2" --from hf --probe seen --probe-out none; }  # PROMISE TEXT GRIDS [PLACEHOLDERS]
    unlike "a placeholder too few" "position 2: expected 4 placeholders for an image of 2 x 2 tokens, found 3" $grids 3
    unlike "a placeholder too many" "position 6: expected 3 placeholders for an image of 1 x 3 tokens, found 1" $grids 5
    unlike "an image too few" "position 17: expected no more placeholders than the images have tokens, found one" '[[1,4,4],[1,2,6]]'
    unlike "an image too many" "expected placeholders for all images, found none for the last 1 of them" '[[1,4,4],[1,2,6],[1,2,2],[1,2,2]]'
    looks $grids 4 f >seen && "$python" -c 'import struct
data = open("seen", "rb").read()
open("halves", "wb").write(data.replace(struct.pack("<3f", 1, 4, 4), struct.pack("<3f", 1, 4.5, 4)))'
    refuse "a grid that is no whole number" "image_grid_thw[1]: expected a number 1..16384, found 4.5" --from hf --probe halves --probe-out none
    unlike "a grid of half a token" "grid 1: expected frames, and rows and columns that are multiples of 2, found 1 3 4" '[[1,4,4],[1,3,4],[1,2,2]]'
    looks $grids >seen
    examples 2 3 "1 200 3 4 5 6" "2 3 4 5 6 7" >seen
    refuse "placeholders without images" "inputs[1] stands for an image: expected pixel_values and image_grid_thw" --from hf --probe seen --probe-out none
    looks $grids >seen
    refuse "images for a model without a tower" "this model reads no images" --config balance.json --probe seen --probe-out none
    refuse "--vision 1 without vision_config" "--vision: 1 is for a config.json with vision_config" --config balance.json --vision 1 --train text
    sees() { "$python" -c 'import json, sys
c = json.load(open("sees.json"))
c["vision_config"][sys.argv[1]] = json.loads(sys.argv[2])
json.dump(c, open("odd.json", "w"))' "$3" "$4"; refuse "$1" "$2" --config odd.json --train text; }  # PROMISE TEXT KEY VALUE
    sees "a head of 3 channels" '"hidden_size" 12: expected four channels in each of "num_heads" 2, or a multiple' hidden_size 12
    sees "positions that are no square" '"num_position_embeddings" 8: expected a square' num_position_embeddings 8
    sees "another width than the text's" '"out_hidden_size": expected 16, the text'"'"'s, found 20' out_hidden_size 20
    sees "features for inner layers" '"deepstack_visual_indexes": this trainer computes none, found 2' deepstack_visual_indexes '[0,1]'
    sees "another activation" '"hidden_act": this trainer computes "gelu_pytorch_tanh", found "gelu"' hidden_act '"gelu"'
    sees "no blocks" '"depth": expected an integer 1..256, found 0' depth 0
}

# ---- learning from images ----

# conversations about images: 24 to learn from, 6 to validate with
draw_shapes() { [ -d shapes ] || "$python" "$root/dev/data/shapes.py" --out shapes --train 24 --val 6 --asked 4 >out 2>err || verdict 1 "dev/data/shapes.py" "$(<err)"; }

eyes() {
    echo "# learning from images"
    local sees i said
    draw_shapes
    sees=(--config shapes/config.json --tokenizer shapes/tokenizer.json --chat-template qwen3.6 --train shapes/train.jsonl --val shapes/val.jsonl
          --seq-len 128 --batch-size 2 --grad-accum 2 --steps 6 --eval-every 3 --save-every 3 --lr 3e-3 --schedule constant --warmup 0)
    rm -rf whole leg && go "${sees[@]}" --run whole && grep -q '^|   images *| 24, [0-9]* placeholders' out
    verdict $? "conversations with images are learned, and the box counts them" "$(<err)"
    check "... loss falls" below "$(value whole 6 loss)" "$(value whole 1 loss)"
    go "${sees[@]}" --steps 3 --threads 3 --run leg && go --resume --run leg --steps 6 --threads 2 --recompute 3 --head-rows 5
    verdict "$(same_run leg whole; echo $?)" "stopped after 3 of 6 updates, resumed with other --threads, --recompute: the same bytes" "$(<err)"
    go "${sees[@]:2}" --from whole/step_000003 --steps 1 --run next --freeze 'model.visual.*' 2>/dev/null || go --from whole/step_000003 "${sees[@]:2}" --steps 1 --run next --freeze 'model.visual.*'
    cmp -s <(tensors whole/step_000003/model.safetensors visual) <(tensors next/step_000001/model.safetensors visual) && ! cmp -s {whole/step_000003,next/step_000001}/model.safetensors
    verdict $? "--freeze 'model.visual.*': all but the tower learns" "$(<err)"
    rm -rf next && go --from whole/step_000003 "${sees[@]:2}" --steps 1 --run next --freeze 'model.language_model.*'
    cmp -s <(tensors whole/step_000003/model.safetensors language) <(tensors next/step_000001/model.safetensors language) && ! cmp -s {whole/step_000003,next/step_000001}/model.safetensors
    verdict $? "... 'model.language_model.*': the tower alone" "$(<err)"
    rm -rf next && go --from whole/step_000003 "${sees[@]:2}" --steps 1 --run next --freeze 'model.language_model.*,model.visual.patch*,model.visual.pos*,model.visual.blocks.*' &&
        [ "$(diff <(tensors whole/step_000003/model.safetensors .) <(tensors next/step_000001/model.safetensors .) | grep -c '^> model.visual.merger')" = 6 ]
    verdict $? "... blocks too: the merger alone, its six tensors" "$(<err)"
    rm -rf next && go --from whole/step_000003 "${sees[@]:2}" --steps 2 --run next --lora-rank 2
    verdict $? "an adapter learns beside a tower that stays" "$(<err)"
    for i in 1 0; do go --from whole "${sees[@]:6:2}" --val shapes/val.jsonl --seq-len 128 --batch-size 1 --pack $i --eval-only && grep -o 'val loss [0-9.]*' out >packed.$i; done
    check "packed and alone: the same validation loss" cmp packed.1 packed.0
    said=(--from whole --generate-file shapes/prompts.jsonl --temperature 0 --max-new-tokens 8)
    go "${said[@]}" --batch-size 1 --generate-out one.jsonl && go "${said[@]}" --batch-size 3 --generate-out three.jsonl && cmp {one,three}.jsonl && [ "$(wc -l <one.jsonl)" = 4 ]
    verdict $? "answers about images, one by one and side by side: the same bytes" "$(<err)"
    "$python" "$root/dev/data/shapes.py" --show shapes/prompts.jsonl one.jsonl >out 2>err && grep -q '^right: [0-9]* of [0-9]* pairs' out
    verdict $? "shapes.py --show counts them" "$(<err)"
    printf '/image shapes/images/val_00000.png \nWhat is it?\n/image none.png\nAnd now?\n' | "$trainer" --from whole --chat --temperature 0 --max-new-tokens 4 >out 2>err
    check "--chat: /image FILE goes with what is said next; one that is not there is reported, also where nobody types" test "$? $(wc -l <out) $(grep -c '/image: ./none.png: cannot be opened' err)" = "0 2 1"
    go "${sees[@]}" --image-max-pixels 512 --dry-run && [ "$(grep -o '24, [0-9]* placeholders' out | cut -d' ' -f2)" -lt 200 ]
    verdict $? "--image-max-pixels: fewer placeholders" "$(<err)"
    cp -r shapes odd && head -c 200 shapes/images/train_00003.png >odd/images/train_00003.png && rm odd/images/train_00004.png && rm -rf next && go "${sees[@]/#shapes/odd}" --run next
    [ "$(grep -cE 'train.jsonl:(4|5): odd/images/train_0000[34].png' out)" = 2 ] && grep -q '^|   images *| 22,' out
    verdict $? "an image that is cut, one that is not there: their conversations are left out, by name" "$(<err)"
    cp shapes/images/train_0000{1,2}.png . && cp train_00001.png odd/images/train_00002.png
    "$trainer" --resume --run next --steps 9 >out 2>err
    check "an image that is another one when a run goes on is refused" test "$? $(grep -c 'training data ha.* changed.* since the run began' err)" = "2 1"
    "$trainer" --resume --run whole --steps 9 --image-max-pixels 300 >out 2>err
    check "images in another size when a run goes on are refused" test "$? $(grep -c 'train.jsonl: --image-max-pixels has changed and so have the rows of the training data' err)" = "2 1"
    cp -r whole/step_000006 blind && rm blind/{preprocessor_config,manifest}.json
    refuse "a tower without its preprocessor_config.json" "blind/config.json: expected preprocessor_config.json beside it, which says how images become patches" --from blind "${sees[@]:2}" --run none
    cp -r shapes fleeting && rm -rf next
    "$trainer" "${sees[@]/#shapes/fleeting}" --eval-every 0 --save-every 0 --save-minutes 0 --steps 100000 --run next >out 2>err &
    for i in {1..600}; do grep -q '^step' out && break || sleep 0.1; done
    rm fleeting/images/*; wait $!
    check "an image that goes away before the first checkpoint: the command again" test "$? $(grep -c 'fleeting/images/.*: changed since the run began: .*; give the old file back, and the command again: there is no checkpoint yet$' err)" = "1 1"
    edit odd/preprocessor_config.json odd/preprocessor_config.json patch_size 8
    refuse "a processor whose patches are not the tower's" "odd/preprocessor_config.json: patch_size: expected 4 as in config.json, found 8" "${sees[@]/#shapes/odd}" --run none
    rm -rf next && go "${sees[@]}" --mtp 1 --run next && below "$(value next 6 mtp_loss)" "$(value next 1 mtp_loss)"
    verdict $? "a module that guesses ahead learns beside them" "$(<err)"
    edit shapes/config.json shapes/other.json image_token_id 331
    refuse "a placeholder that is another token of the tokenizer" "expected the tokenizer of the model, to which <|image_pad|> is token 331" "${sees[@]}" --config shapes/other.json --run none
    edit shapes/config.json shapes/other.json video_token_id 10
    rm -rf next && go "${sees[@]}" --config shapes/other.json --steps 1 --run next
    verdict $? "what stands for videos is a token as others where there are none" "$(<err)"
    edit shapes/config.json shapes/other.json image_token_id 5 video_token_id 5
    refuse "one placeholder for images and videos" '"image_token_id" and "video_token_id": expected two tokens, found 5 for both' --config shapes/other.json --train text
    go "${said[@]}" --generate-out one.jsonl --image-max-pixels 512
    check "answers that were made of images of another size are not gone on with" test $? = 2
    printf '%s\n' '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}' >said.jsonl
    rm -rf next && go "${sees[@]}" --train said.jsonl --run next --batch-size 1 --grad-accum 1 && cmp <(tensors next/step_000003/model.safetensors visual) <(tensors next/step_000006/model.safetensors visual)
    verdict $? "images to validate with alone: the tower stays" "$(<err)"
    rm -rf next && go --from blind "${sees[@]:2}" --train said.jsonl --val said.jsonl --batch-size 1 --grad-accum 1 --steps 7 --run next
    verdict $? "... which conversations without images do not ask for" "$(<err)"
    refuse "--image-max-pixels without a tower" "--image-max-pixels: is for a model that reads images" "${sees[@]}" --vision 0 --image-max-pixels 512 --run none
    if is_quick; then return; fi
    need_build launch "" launch
    for i in "--zero 0" "--zero 2" "--grad-accum 3 --zero 2" "--grad-accum 1"; do
        rm -rf leg whole && go "${sees[@]}" $(sed 's/--zero [0-9]//' <<<"$i") --run whole && "$launch" -n 2 "$trainer" "${sees[@]}" $i --run leg >out 2>err
        verdict "$(same_run leg whole; echo $?)" "two ranks, $i: the bytes of one" "$(<err)"
    done
}

# ---- the same bits another way ----

bits() {
    echo "# the same bits"
    local i steady=("${mixed[@]}" --ema 0.9 --schedule constant --warmup 0)
    for i in $(is_quick && echo balance mtp || echo tiny linear full tied balance nested mtp mtp_tied); do
        rm -rf whole leg
        go "${steady[@]}" --config $i.json --run whole
        go "${steady[@]}" --config $i.json --steps 6 --threads 3 --run leg && go --resume --run leg --steps 12 --threads 2 --recompute 3 --head-rows 5
        verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" \
            "$i: stopped after 6 of 12 updates, resumed with other --threads, --recompute, --head-rows: the same bytes" "$(<err)"
    done
    rm -rf whole leg
    go "${mixed[@]}" --config long.json --seq-len 150 --schedule constant --warmup 0 --run whole
    go "${mixed[@]}" --config long.json --seq-len 150 --schedule constant --warmup 0 --steps 6 --threads 3 --run leg && go --resume --run leg --steps 12 --threads 2 --recompute 3
    verdict "$(same_run leg whole && cmp -s {whole,leg}/samples.txt; echo $?)" "... rows of three chunks of 64" "$(<err)"
    rm -rf leg other && go "${start[@]}" --grad-accum 3 --run leg && go "${start[@]}" --batch-tokens 96 --run other
    check "--grad-accum 3 is --batch-tokens of three micro-batches" same_run leg other
    if is_quick; then return; fi
    any_width train_qwen36 tiny tied long
}

# ---- ranks ----

ranks() {
    echo "# ranks: updates of four micro-batches on 2 and 4"
    export COMM_CHECK=1  # no rank may come by another call than its neighbour
    need_build launch "" launch
    local run=("${mixed[@]}")
    shared() { on_ranks trainer "$@"; }  # DIVIDED PROMISE RANKS/SIZE... OPTION...
    draw_shapes
    # of these rows some have no image
    for i in {1..8}; do echo '{"messages": [{"role": "user", "content": "'$i$i$i'"}, {"role": "assistant", "content": "a"}]}'; done >said.jsonl
    local looks=(--config shapes/config.json --tokenizer shapes/tokenizer.json --chat-template qwen3.6 --train shapes/train.jsonl,said.jsonl --val shapes/val.jsonl
                 --pack 0 --seq-len 64 --batch-size 1 --grad-accum 4 --steps 2 --eval-every 2 --save-every 1 --sample-every 2 --max-new-tokens 4 --lr 3e-3)
    if is_quick; then
        shared --zero "experts that nobody shares" "2/2" --config balance.json --ema 0.9
        shared --ep "experts" "2/2" --config wide.json
        shared --pp "layers" "2/2" --config balance.json
        shared --pp "layers, MTP" "2/2" --config mtp.json
        run=("${looks[@]}")
        shared --pp "layers, images, MTP" "2/2" --mtp 1
        unset COMM_CHECK
        return
    fi
    shared --zero "both kinds of layers" "2/0 2/1 2/2 4/2" --config balance.json --ema 0.9
    shared --zero "a tied head, documents" "2/1 4/2" --config tied.json --doc-reset 1 --train documents
    shared --zero "three chunks of 64" "2/2" --config long.json --seq-len 150
    shared --zero "linear layers that do not learn" "2/2" --freeze '*linear_attn*'
    shared --zero "MTP" "2/0 2/2 4/1" --config mtp.json --ema 0.9
    shared --zero "MTP, a tied head, documents" "2/1" --config mtp_tied.json --doc-reset 1 --train documents
    shared --zero "an adapter" "2/2" --config tiny.json --lora-rank 3 --lora-dropout 0.2
    shared --ep "experts" "2/2 4/2 4/4 4/2/--recompute,3" --config wide.json --ema 0.9
    edit wide.json wide_mtp.json mtp_num_hidden_layers 1
    shared --ep "experts, MTP" "2/2 4/2" --config wide_mtp.json
    shared --ep "experts, some frozen" "4/2" --config wide.json --freeze '*.experts.1.*,first:1'
    shared --ep "experts beside an adapter" "2/2 4/4 4/2/--pp,2" --config wide.json --lora-rank 3 --lora-dropout 0.2
    shared --ep "... in fp8" "2/2 4/4" --config wide.json --lora-rank 3 --base-dtype fp8
    shared --pp "layers" "2/2 3/3 4/2/--zero,2 2/2/--recompute,0" --config balance.json --ema 0.9
    shared --pp "layers, a tied head, documents" "2/2/--recompute,3" --config tied.json --doc-reset 1 --train documents
    edit balance.json deep.json num_hidden_layers 5
    shared --pp "several stages on each rank" "2/2/--pp-chunks,2 4/2/--zero,2,--pp-chunks,2" --config deep.json
    shared --pp "layers and experts" "4/2/--ep,2" --config wide.json
    edit deep.json deep_mtp.json mtp_num_hidden_layers 1
    shared --pp "layers, MTP" "2/2/--recompute,0 3/3 4/2/--zero,2,--recompute,3" --config mtp.json --ema 0.9
    shared --pp "... a tied head, documents" "2/2" --config mtp_tied.json --doc-reset 1 --train documents
    shared --pp "... several stages on each rank" "2/2/--pp-chunks,2" --config deep_mtp.json
    shared --pp "... experts" "4/2/--ep,2 4/2/--tp,2" --config wide_mtp.json
    shared --pp "... which alone learns" "3/3" --config mtp.json --freeze 'model.*,lm_head.*'
    shared --pp "... which stays, as the embedding does" "2/2" --config mtp.json --freeze 'mtp.*,model.embed*'
    shared --pp "layers, a tower that has nothing to read" "3/3" --config sees.json
    run=("${looks[@]}")
    shared --pp "layers, images" "2/2 4/4/--recompute,3 4/2/--zero,2 2/2/--pp-chunks,2" --ema 0.9
    shared --pp "... the tower stays" "4/4" --freeze 'model.visual.*'
    shared --pp "... the tower alone, but for a block" "2/2" --freeze 'model.language_model.*,model.visual.blocks.0.*'
    shared --pp "... an adapter" "2/2" --lora-rank 2 --lora-dropout 0.2
    shared --pp "... MTP" "2/2 4/4 4/2/--zero,2 4/2/--tp,2,--pp-chunks,2" --mtp 1
    shared --pp "... MTP, the tower stays" "4/4/--recompute,3" --mtp 1 --freeze 'model.visual.*'
    unset COMM_CHECK

    echo "# ranks: going on, mistakes"
    rm -rf whole several && go "${mixed[@]}" --config wide.json --run whole
    "$launch" -n 2 "$trainer" "${mixed[@]}" --config wide.json --pp 2 --run several >out 2>err </dev/null
    rm -rf several/step_000012
    "$launch" -n 2 "$trainer" --resume --run several --pp 1 --ep 2 >out 2>err </dev/null && same_run whole several
    verdict $? "written by 2 ranks, --pp 2, resumed by 2, --ep 2: the bytes of one rank" "$(tail -n 1 err)"
    rm -rf several/step_000012 && go --resume --run several --ep 1
    check "... and by one" same_run whole several
    rm -rf seen others && go "${looks[@]}" --mtp 1 --eval-generate shapes/prompts.jsonl --temperature 0 --run seen --export-hf one_file
    "$launch" -n 4 "$trainer" "${looks[@]}" --mtp 1 --eval-generate shapes/prompts.jsonl --temperature 0 --pp 4 --run others >out 2>err </dev/null && cmp {seen,others}/answers.jsonl
    verdict $? "answers about images by four stages: those of one rank" "$(tail -n 1 err)"
    rm -rf others/step_000002 && "$launch" -n 2 "$trainer" --resume --run others --pp 2 --export-hf their_file >out 2>err </dev/null && same_run seen others && cmp {one,their}_file/model.safetensors
    verdict $? "... resumed by two, exported: the files of one rank" "$(tail -n 1 err)"
    "$launch" -n 2 "$trainer" --from seen --eval-only --val shapes/val.jsonl --seq-len 64 --batch-size 2 --pp 2 >losses 2>err </dev/null
    go --from seen --eval-only --val shapes/val.jsonl --seq-len 64 --batch-size 2
    check "... --eval-only by two: the loss of one" test -n "$(grep 'val loss' out)" -a "$(grep 'val loss' out)" = "$(grep 'val loss' losses)"
    refused "--ep that does not divide the experts" "--ep: 2: expected a number that divides the 5 experts" "$launch" -n 2 "$trainer" "${mixed[@]}" --ep 2
    refused "more stages than layers" "--pp: 3: expected at most one stage for each of the 2 layers" "$launch" -n 3 "$trainer" "${mixed[@]}" --pp 3
    refused "... whatever stands before and behind them" "--pp: 4: expected at most one stage for each of the 3 layers" "$launch" -n 4 "$trainer" "${mixed[@]}" --config mtp.json --pp 4
    refused "chunks of more stages than layers" "--pp-chunks: 2: expected at most 1, for 2 layers on 2 ranks" "$launch" -n 2 "$trainer" "${mixed[@]}" --pp 2 --pp-chunks 2
    refused "--pp and --verify-every" "--verify-every: is not for --pp" "$launch" -n 2 "$trainer" "${mixed[@]}" --pp 2 --verify-every 1
    go --config wide.json --export-hf apart && rewrite apart fused 'fuse()'
    run=("${mixed[@]:2}" --export-hf exported)  # of a folder
    SHARE="" shared --ep "experts that are one tensor of the file" "2/2 4/2 4/4" --from fused --ema 0.9
    table exported fused "$(tensors fused/model.safetensors . | wc -l)"
    verdict $? "... and of the export" "$(<err)"
    rm -rf several/step_000012 && "$launch" -n 2 "$trainer" --resume --run several --ep 2 >out 2>err </dev/null && same_run one several
    verdict $? "... resumed by 2 from the checkpoint of 4: the bytes of one rank" "$(tail -n 1 err)"
    sends trainer "  idle|stages" 2 --config balance.json --pp 2
    sends trainer "  idle|stages" 2 --config mtp.json --pp 2
    run=("${looks[@]}" --steps 16)  # the training data twice
    sends trainer "  idle|stages" 4 --pp 4 --mtp 1
}

# ---- kill -9 and --resume ----

kills() {
    echo "# kill -9 at random instants, resumed with other --threads, --recompute, --head-rows"
    RANDOM=11
    killed $((kills / 2)) "both kinds of layers, averaged weights" --config balance.json --ema 0.9 --verify-every 20
    killed $((kills - kills / 2)) "a tied head, documents" --config tied.json --grad-accum 2 --doc-reset 1 --train documents
}

# ---- text ----

text() {
    echo "# text"
    local name one i
    for name in $(is_quick && echo balance || echo tiny linear full balance); do
        greedy $name "states, keys and values"
        check "... with three threads" test "$one" = "$(book_writes --generate "line 7" --threads 3)"
    done
    check "the text is like the book: ${one:0:30}" grep -q "^line 7.*[a-z]" <<<"$one"
    write_prompts >short.jsonl
    at_once --from book
    if is_quick; then return; fi
    check "from standard input the same" test "$one" = "$(printf 'line 7' | "$trainer" --from book --generate - --temperature 0 --max-new-tokens 40 2>err)"
    check "three samples are three texts" test "$(go --from book --generate line --samples 3 --max-new-tokens 20 && grep -v '^---' out | sort -u | wc -l)" -ge 3
    for name in tiny linear full tied balance; do at_once --config $name.json; done
    at_once --config balance.json --weights bf16 --temperature 0 --threads 2

    echo "# longer texts than the model has positions"
    go --from book --generate "line 7" --temperature 0 --max-new-tokens 150 --generate-batch 1 && mv out once
    check "150 tokens in 48 positions: they begin as 40 do" test "$(wc -c <once) $(head -c ${#one} once)" = "157 $one"
    check "... with three threads the same" eval 'go --from book --generate "line 7" --temperature 0 --max-new-tokens 150 --threads 3 && cmp once out'
    check "a prompt of 300 bytes goes on" eval 'go --from book --generate "$(head -c 300 text)" --temperature 0 --max-new-tokens 30 && test $(wc -c <out) -gt 320'
    go --config tiny.json --generate-file short.jsonl --dry-run
    check "the box: 8 texts" test "$(boxed '  texts' '8 side by side, of at most 48 positions')" = 1
    edit tiny.json vast.json max_position_embeddings 16000000 num_hidden_layers 40 layer_types -
    timeout 60 "$trainer" --config vast.json --generate-file short.jsonl --samples 100 --max-new-tokens 15000000 --generate-batch 40 >out 2>err </dev/null
    check "more texts than fit: status 1 before the model is read" test "$? $(grep -c 'free: try a smaller --generate-batch$' err)" = "1 1"

    echo "# conversations"
    edit balance.json talk.json max_position_embeddings 256 hidden_size 32 moe_intermediate_size 32
    for i in Hi Ho "Is 7 prime" "And then"; do echo '{"messages":[{"role":"user","content":"'$i'?"},{"role":"assistant","content":"Yes."},{"role":"user","content":"Sure?"},{"role":"assistant","content":"I am."}]}'; done >talks.jsonl
    go --config talk.json --train talks.jsonl --chat-template chatml --seq-len 250 --batch-size 2 --lr 1e-2 --steps 150 --eval-generate talks.jsonl --sample-every 150 \
        --temperature 0 --max-new-tokens 20 --run talker
    check "the answers are learned" test "$(grep -c '"answer":"I am.","finish":"stop".*"step":150' talker/answers.jsonl)" = 4
    chat() { printf '%s\n' "$@" | timeout 60 "$trainer" --from talker --chat --max-new-tokens 20 "${how[@]}" 2>err | tr '\n' '|'; }  # TURN...
    local how=(--temperature 0)
    check "--chat from a pipe: turn by turn, and anew after /reset" test "$(chat 'Ho?' 'Sure?' /reset 'Is 7 prime?')$(wc -c <err)" = "Yes.|I am.|Yes.|0"
    # answers that differ from turn to turn: those of texts that are computed from their first token on
    "$python" -c 'import json
for i in range(40):
    talk = [(f"{(i * 7 + j * 13) % 40}?", f"{((i * 7 + j * 13) % 40) ** 2} and {i + j}.") for j in range(3)]
    print(json.dumps({"messages": [m for q, a in talk for m in ({"role": "user", "content": q}, {"role": "assistant", "content": a})]}))' >squares.jsonl
    rm -rf talker && go --config talk.json --aux-alpha 0 --train squares.jsonl --chat-template chatml --seq-len 250 --batch-size 2 --lr 1e-2 --steps 150 --run talker
    how=(--temperature 0 --max-new-tokens 40)
    one=$(chat '7?' '12?' '30?')
    "$python" - "$one" <<'PYTHON' >turns.jsonl
import json, sys
answers, talk = sys.argv[1].split("|"), []
for question, answer in zip(("7?", "12?", "30?"), answers):
    talk.append({"role": "user", "content": question})
    print(json.dumps({"messages": talk}))
    talk.append({"role": "assistant", "content": answer})
PYTHON
    go --from talker --generate-file turns.jsonl "${how[@]}"
    check "... a text that goes on where it ended says what one says that begins anew: $one" \
        test "$(tr '|' '\n' <<<"$one" | grep . | sort -u | wc -l)" -gt 1 -a "$("$python" -c 'import json
for line in open("out"): print(json.loads(line)["answer"], end="|")')" = "$one"
}

# ---- folders in fp8, as they are published ----

# Beside one in fp8, `release`, the same numbers as floats: linear layers and full ones, MTP, a tower
releases() {
    local form grids='[[1,4,4],[1,2,6],[1,2,2]]'
    need_build launch "" launch
    looks $grids >seen
    "$python" -c 'import json
c = json.load(open("sees.json"))
c["text_config"].update(hidden_size=144, moe_intermediate_size=136, shared_expert_intermediate_size=130, linear_value_head_dim=40, num_experts=4, mtp_num_hidden_layers=1)
c["vision_config"].update(out_hidden_size=144, intermediate_size=132)
json.dump(c, open("large.json", "w"))'
    go --config large.json --train text --seq-len 16 --batch-size 2 --lr 1e-2 --steps 4 --export-hf begun
    for form in apart fused; do
        echo "# a folder in fp8, experts $form"
        rm -rf base release floats run other several
        if [ $form = apart ]; then
            cp -r begun base && "$python" "$root/dev/ref/fp8.py" base release --release floats --shards 2
        else  # all that can be fp8 is: gates of a head, routers, the embedding, the tower
            rewrite begun base 'fuse()' && "$python" "$root/dev/ref/fp8.py" base release --release floats --scales BF16 --keep 'patch_embed|conv1d'
        fi
        run=("${start[@]:2}" --grad-accum 2 --lora-rank 3)
        go "${run[@]}" --from floats --run run && go "${run[@]}" --from release --run other && [ ! -s err ] && same_model run other && cmp <(columns run) <(columns other)
        verdict $? "an adapter learns what it learns beside floats" "$(<err)"
        check "... and the model stays as it is in the files" test "$(boxed matrices "fp8 and all else as in the files")" = 1
        go --from floats --lora run --probe seen --probe-out before && go --from release --lora other --probe seen --probe-out after && cmp before after
        verdict $? "... logits, loss and gradients of a probe with images: the same bytes" "$(<err)"
        go --from floats --export-hf before_hf && go --from release --export-hf after_hf && cmp {before,after}_hf/model.safetensors && cmp {before,after}_hf/config.json && ! grep -q quantization after_hf/config.json
        verdict $? "--export-hf: the same floats" "$(<err)"
        COMM_CHECK=1 timeout 60 "$launch" -n 2 "$trainer" "${run[@]}" --from release --ep 2 --run several >out 2>err </dev/null
        verdict "$(same_run other several && [ ! -s err ]; echo $?)" "2 ranks, --ep 2: the bytes of one" "$(tail -n 2 err)"
        is_quick && continue
        go --from floats --probe seen --probe-out before && go --from release --probe seen --probe-out after && cmp before after
        verdict $? "all of it learns, as floats: the gradients" "$(<err)"
        check "the text" test "$(go --from floats --generate "line 7" --max-new-tokens 20 && cat out)" = "$(go --from release --generate "line 7" --max-new-tokens 20 && cat out)"
        rm -rf several && COMM_CHECK=1 timeout 60 "$launch" -n 2 "$trainer" "${run[@]}" --from release --tp 2 --run several >out 2>err </dev/null
        verdict "$(same_run other several; echo $?)" "2 ranks, --tp 2: the bytes of one" "$(tail -n 2 err)"
        check "... and their parts stay as they are in the files" test "$(boxed matrices "fp8 and all else as in the files")" = 1
    done
    rewrite release broken 't["model.language_model.layers.0.mlp.experts.down_proj_scale_inv"] = "F32", [4, 2, 1], bytes(32)'
    refuse "scales of other blocks of fused experts" 'tensor "model.language_model.layers.0.mlp.experts.down_proj_scale_inv": expected scales of blocks of 128 x 128, F32, BF16 or F8_E8M0 (4, 2, 2), found F32 (4, 2, 1)' \
        --from broken --train text --lora-rank 3
}

run_parts $parts
