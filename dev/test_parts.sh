#!/usr/bin/env bash
# --tp: matrices on several ranks, of train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4 and train_glm5 as their user starts
# them: the bytes of one rank, whatever the ranks, their stages, what is kept and what learns; checkpoints that any number of ranks goes on from;
# refusals. COMM_CHECK=1: no rank may come by another call than its neighbour. --tp beside two other ways to share: test_grids.sh. About a minute of
# one core after the build.
#     dev/test_parts.sh quick   a few of each kind
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1 COMM_CHECK=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
need_build qwen "CPU=1" train_qwen3
need_build gpt2 "CPU=1" train_gpt2cu
need_build moe "CPU=1" train_moe
need_build qwen36 "CPU=1" train_qwen36
need_build v4 "CPU=1" train_deepseek_v4
need_build glm "CPU=1" train_glm5
need_build launch "" launch
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts
write_configs 3 4 '[1]'
edit dense.json llama.json model_type '"llama"' attention_bias true num_key_value_heads 4 hidden_size 24 tie_word_embeddings true
edit experts.json tied_experts.json tie_word_embeddings true num_key_value_heads 4 hidden_size 24
edit experts.json five.json num_local_experts 5
edit experts.json all_experts.json num_experts_per_tok 4  # each expert has as many rows as the others
# 257 tokens in 384 rows: of four ranks the third has 65, and the fourth none
edit llama.json apart.json tie_word_embeddings false
edit dense.json fifths.json num_attention_heads 5 num_key_value_heads 5 hidden_size 20
# Qwen3.6: linear layers and one with attention; with four heads of keys in both; a module for the token after the next; a tower
turn='"rope_parameters":{"rope_type":"default","rope_theta":10000,"partial_rotary_factor":0.5,"mrope_section":[1,0,1]}'
echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":16,"num_hidden_layers":3,"layer_types":["linear_attention","full_attention",
"linear_attention"],"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,
"linear_key_head_dim":5,"linear_value_head_dim":6,"linear_conv_kernel_dim":4,"num_experts":4,"num_experts_per_tok":2,
"moe_intermediate_size":10,"shared_expert_intermediate_size":12,"max_position_embeddings":96,"output_router_logits":true,
"router_aux_loss_coef":0.02,'$turn'}' >hybrid.json
edit hybrid.json four.json num_key_value_heads 4 linear_num_key_heads 4 linear_num_value_heads 8
edit hybrid.json hybrid_tied.json tie_word_embeddings true
edit hybrid_tied.json mtp.json mtp_num_hidden_layers 1 mtp_weight 0.5
edit sparse.json all_sparse.json num_experts_per_tok 4
edit hybrid.json all.json num_experts_per_tok 4
edit all.json all_mtp.json mtp_num_hidden_layers 1
# DeepSeek V4: a window, entries that are chosen, entries of which all are seen; what learns beside the model
echo '{"model_type":"deepseek_v4","vocab_size":257,"hidden_size":16,"num_hidden_layers":3,"max_position_embeddings":96,"num_attention_heads":4,
"head_dim":6,"qk_rope_head_dim":4,"q_lora_rank":12,"o_groups":4,"o_lora_rank":5,"sliding_window":5,"index_n_heads":3,"index_head_dim":6,
"index_topk":2,"hc_mult":3,"hc_sinkhorn_iters":4,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"swiglu_limit":1.0,
"layer_types":["sliding_attention","compressed_sparse_attention","heavily_compressed_attention"],"mlp_layer_types":["hash_moe","moe","moe"],
"compress_rates":{"compressed_sparse_attention":3,"heavily_compressed_attention":7}}' >streams.json
edit streams.json taught.json num_nextn_predict_layers 1 mtp_weight 0.5 seq_balance_coef 0.1 bias_update_rate 0.01 indexer_train '"kl"'
edit streams.json all_streams.json num_experts_per_tok 4
edit taught.json all_taught.json num_experts_per_tok 4
edit streams.json groups.json o_groups 2
write_glm5
edit glm.json all_glm.json num_experts_per_tok 4
edit glm_taught.json all_glm_taught.json num_experts_per_tok 4
edit glm.json wide_glm.json hidden_size 160 q_lora_rank 132 kv_lora_rank 136 qk_nope_head_dim 66 v_head_dim 70 moe_intermediate_size 136 intermediate_size 288
edit streams.json wide_streams.json hidden_size 160 q_lora_rank 132 head_dim 40 o_lora_rank 34 moe_intermediate_size 64
edit hybrid.json three.json num_attention_heads 3 num_key_value_heads 1 linear_num_key_heads 1
"$python" -c 'import json
v = {"depth": 2, "hidden_size": 16, "intermediate_size": 10, "num_heads": 2, "in_channels": 3, "patch_size": 2, "temporal_patch_size": 2,
     "spatial_merge_size": 2, "num_position_embeddings": 9, "out_hidden_size": 16}
json.dump({"model_type": "qwen3_5_moe", "text_config": json.load(open("all.json")), "vision_config": v}, open("sees.json", "w"))'
# fewer heads of keys than ranks
edit dense.json one_key.json num_key_value_heads 1 head_dim 8
edit sparse.json one_sparse.json num_key_value_heads 1 head_dim 8
edit experts.json one_expert_key.json num_key_value_heads 1 head_dim 8
edit all_experts.json one_all_experts.json num_key_value_heads 1 head_dim 8
edit mtp.json two_keys.json linear_num_key_heads 4 linear_num_value_heads 8
edit all.json two_all.json linear_num_key_heads 4 linear_num_value_heads 8
# matrices whose blocks of 128 x 128 ranks cut; of fp4, between groups of 32 columns
edit dense.json wide.json hidden_size 160 intermediate_size 288 head_dim 66
edit sparse.json wide_sparse.json hidden_size 160 intermediate_size 288 moe_intermediate_size 136 head_dim 66
edit dense.json even.json hidden_size 128 intermediate_size 192 head_dim 32
edit even.json even4.json num_key_value_heads 4
edit wide.json wide_one_key.json num_key_value_heads 1 head_dim 64
edit hybrid_tied.json wide_hybrid.json hidden_size 144 head_dim 40 linear_key_head_dim 37 linear_value_head_dim 42 shared_expert_intermediate_size 140 \
    mtp_num_hidden_layers 1 rope_parameters '{"rope_type":"default","rope_theta":10000,"partial_rotary_factor":0.5,"mrope_section":[4,3,3]}'
run=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --grad-accum 5 --steps 4 --val-fraction 0.1 --eval-every 2 --eval-batches 3
     --sample-every 4 --max-new-tokens 8 --save-every 2)

parts() { on_ranks "$1" --tp "${@:2}"; }  # TRAINER PROMISE RANKS/PARTS... OPTION...

# going_on RANKS/PARTS/STAGES RANKS/PARTS/STAGES: written by these ranks, resumed and exported by those; `whole` is one rank's run
going_on() {
    local ranks size stages status
    in_turn || return
    rm -rf several
    IFS=/ read -r ranks size stages <<<"$1"
    timeout 60 "$launch" -n $ranks "$qwen" "${run[@]}" --config tied.json --tp $size --pp $stages --run several >out 2>err </dev/null
    rm -rf several/step_000004
    IFS=/ read -r ranks size stages <<<"$2"
    timeout 60 "$launch" -n $ranks "$qwen" --run several --resume --tp $size --pp $stages --export-hf exported >out 2>err </dev/null
    status=$?
    same_run whole several && cmp -s {whole,exported}/model.safetensors
    verdict $? "written by $1, resumed and exported by $2 (ranks/parts/stages)" "status $status: $(tail -n 1 err)"
    rm -rf exported
}

# adapters_travel WHAT: "$qwen" with `adapter` on the ranks of each of `writers`, resumed and exported by each of `readers`
adapters_travel() {
    local from to status
    timeout 60 "$qwen" "${adapter[@]}" --run adapter --export-lora exported >out 2>err
    for from in "${writers[@]}"; do
        rm -rf several
        timeout 60 "$launch" -n ${from%% *} "$qwen" "${adapter[@]}" ${from#* } --run several >out 2>err </dev/null
        for to in "${readers[@]}"; do
            rm -rf several/step_000004 again
            timeout 60 "$launch" -n ${to%% *} "$qwen" --run several --resume ${to#* } --export-lora again >out 2>err </dev/null
            status=$?
            same_run adapter several && cmp -s {exported,again}/adapter_model.safetensors
            verdict $? "$1, written by $from, resumed and exported by $to" "status $status: $(tail -n 1 err)"
        done
    done
    rm -rf exported adapter several again
}

# travels TRAINER NAME CONFIG: a model, written by each of `writers`, resumed and exported by each of `readers`;
# `exported` is one rank's
travels() {
    local program=${!1} from to status all=("${run[@]}" --config $3 "${some[@]}")
    rm -rf sole exported
    timeout 60 "$program" "${all[@]}" --run sole --export-hf exported >out 2>err
    for from in "${writers[@]}"; do
        rm -rf several
        timeout 60 "$launch" -n ${from%% *} "$program" "${all[@]}" ${from#* } --run several >out 2>err </dev/null
        for to in "${readers[@]}"; do
            rm -rf several/step_000004 again
            timeout 60 "$launch" -n ${to%% *} "$program" --run several --resume ${to#* } --export-hf again >out 2>err </dev/null
            status=$?
            same_run sole several && cmp -s {exported,again}/model.safetensors && cmp -s {exported,again}/config.json
            verdict $? "$2, written by $from, resumed and exported by $to" "status $status: $(tail -n 1 err)"
        done
    done
    rm -rf sole several again
}

# merges TRAINER NAME GRID... [OPTION...]: an adapter beside `exported`, merged into it
merges() {
    local program=${!1} name=$2 grids=() grid status
    shift 2
    while [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; do grids+=("$1"); shift; done
    local all=("${run[@]}" "${some[@]}" --from exported --lora-rank 3 --merge 1 "$@")
    rm -rf adapter merged
    timeout 60 "$program" "${all[@]}" --run adapter --export-hf merged >out 2>err
    for grid in "${grids[@]}"; do
        rm -rf again several
        timeout 60 "$launch" -n ${grid%% *} "$program" "${all[@]}" ${grid#* } --run several --export-hf again >out 2>err </dev/null
        status=$?
        cmp -s {merged,again}/model.safetensors
        verdict $? "an adapter of $name merged into its base, $grid: the export of one rank" "status $status: $(tail -n 1 err)"
    done
    rm -rf adapter merged again several
}

evaluated() {  # TRAINER NAME FOLDER OPTION...
    local program=${!1} to all=(--from "${@:3}" --eval-only --val text --seq-len 16 --batch-size 2)
    timeout 60 "$program" "${all[@]}" >loss 2>err
    for to in 2/2 4/2; do
        timeout 60 "$launch" -n ${to%/*} "$program" "${all[@]}" --tp ${to#*/} >loss_several 2>err
        check "$2, --eval-only by ${to%/*} ranks, --tp ${to#*/}: the loss of one" \
            test -n "$(grep 'val loss' loss)" -a "$(grep 'val loss' loss)" = "$(grep 'val loss' loss_several)"
    done
}

if is_quick; then
    parts qwen "output matrix = embedding" "2/2 4/2/--pp,2" --config tied.json --ema 0.9
    parts qwen "biases and windows, a head of keys on two ranks" "4/2/--zero,2 4/4" --config bias.json
    parts gpt2 "GPT-2" "4/4" --config gpt2.json --dropout 0.1
    parts moe "experts" "4/2/--ep,4" --config experts.json --grad-accum 4 --seq-len 13
    parts qwen36 "Qwen3.6" "2/2 4/2/--ep,4" --config hybrid.json --grad-accum 4
    parts qwen "an adapter beside a base in fp8, --act-fp8 1" "2/2" --config wide.json --lora-rank 3 --base-dtype fp8 --act-fp8 1
    parts qwen36 "an adapter of Qwen3.6, of experts, too" "4/4" --config four.json --grad-accum 4 --lora-rank 2 --lora-targets all-linear \
        --lora-rank-pattern shared_expert_gate=1 --lora-parameters mlp.experts.down_proj
    parts v4 "DeepSeek V4, all that learns" "4/4 4/2/--ep,4" --config taught.json --grad-accum 4
    parts glm "GLM-5, all that learns" "4/4 4/2/--ep,4" --config glm_taught.json --grad-accum 4
    finish
    exit
fi
parts qwen "norms of heads" "2/2 4/2/--zero,1 6/2/--zero,2 2/2/--recompute,0 2/2/--recompute,3 2/2/--head-rows,7" --config dense.json
parts qwen "output matrix = embedding" "2/2 4/2/--zero,2 6/2/--pp,3 8/2/--pp,2,--zero,2" --config tied.json --ema 0.9
parts qwen "biases and windows" "2/2 4/2/--pp,2,--recompute,2" --config bias.json
parts qwen "biases of o, four parts" "4/4 8/4/--zero,2 8/4/--pp,2" --config llama.json
parts qwen "an output matrix of its own, four parts" "4/4 4/4/--head-rows,3 8/4/--pp,2,--zero,1" --config apart.json
parts qwen "conversations" "2/2 4/2/--pp,2" --config dense.json --train talks.jsonl --chat-template chatml --seq-len 96
answers 7 text >examples
parts qwen "a head of keys on two ranks" "4/4 8/4/--pp,2,--zero,2 4/4/--recompute,3 4/4/--recompute,0" --config dense.json
parts qwen "one head of keys on all ranks" "2/2 4/4 4/2/--zero,1" --config one_key.json
parts qwen "... biases and windows" "4/4" --config bias.json
parts qwen "... conversations" "4/4" --config dense.json --train talks.jsonl --chat-template chatml --seq-len 96
parts qwen "... documents" "4/4" --config dense.json --train documents --doc-reset 1
parts qwen "... some does not learn" "4/4" --config dense.json --freeze '*.layers.0.*,*k_norm*,*v_proj*'
parts qwen "... an adapter with dropout" "4/4 4/4/--recompute,3" --config dense.json --lora-rank 3 --lora-dropout 0.2
parts qwen "... beside a base in bf16" "4/4" --config wide_one_key.json --lora-rank 3 --base-dtype bf16
parts qwen "... in fp8" "4/4 2/2/--recompute,3" --config wide_one_key.json --lora-rank 3 --base-dtype fp8
parts qwen "documents, answering examples" "2/2 4/2" --config dense.json --train documents --doc-reset 1 --hellaswag examples
parts qwen "some matrices do not learn" "2/2 4/2/--zero,2" --config dense.json --freeze '*.layers.0.*,*q_proj*,*q_norm*,*embed*'
parts qwen "only norms learn" "2/2 4/2/--zero,1" --config tied.json --freeze '*_proj*,*embed*'
parts gpt2 "GPT-2" "2/2 4/4 4/2/--zero,2 8/4/--pp,2 2/2/--recompute,3 2/2/--recompute,1" --config gpt2.json --dropout 0.1 --ema 0.9
parts gpt2 "GPT-2, documents, some does not learn" "2/2 4/2/--zero,1" --config gpt2.json --train documents --doc-reset 1 --freeze '*.h.0.*,*c_attn*,*wpe*'
parts qwen "an adapter" "2/2 4/2/--zero,2 2/2/--recompute,3" --config dense.json --lora-rank 3
parts qwen "an adapter with dropout, of some" "2/2 8/4/--pp,2" --config llama.json --lora-rank 4 --lora-dropout 0.3 --lora-targets q_proj,down_proj,up_proj
# 13 positions: no two ranks bring as many
some=(--grad-accum 4 --batch-size 1 --seq-len 13)
parts moe "experts" "2/2 4/2/--ep,4 8/2/--ep,4 6/2/--pp,3 2/2/--recompute,0 2/2/--recompute,3" --config experts.json "${some[@]}" --ema 0.9
parts moe "experts, balanced by biases, embedding = output matrix" "2/2 4/4 8/4 4/2/--pp,2" --config tied_experts.json "${some[@]}" --balance bias
parts moe "experts, some do not learn" "4/2 4/2/--ep,4" --config experts.json "${some[@]}" --freeze '*.layers.0.*,*.experts.2.*,*k_proj*'
parts qwen "Qwen3 with experts" "2/2 4/2/--ep,4 2/2/--recompute,3" --config sparse.json "${some[@]}"
parts qwen "an adapter of Qwen3 with experts" "2/2" --config sparse.json "${some[@]}" --lora-rank 3
every=(--lora-rank 3 --lora-parameters mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight)
parts qwen "adapters of experts" "2/2 4/2/--ep,4 2/1/--ep,2 4/1/--ep,4 8/2/--pp,2,--ep,4,--recompute,3" --config sparse.json "${some[@]}" "${every[@]}" --ema 0.9
parts moe "one head of keys on all ranks" "2/2 4/2/--ep,4 4/4/--recompute,3" --config one_expert_key.json "${some[@]}"
parts qwen "adapters of experts, one head of keys on all ranks" "4/2/--ep,4 4/4" --config one_sparse.json "${some[@]}" "${every[@]}" --ema 0.9
parts qwen36 "Qwen3.6, MTP, a head of keys on two ranks" "4/4 8/4/--ep,4 4/4/--recompute,3" --config two_keys.json "${some[@]}"
parts qwen36 "... adapters, of experts, too" "4/4" --config two_keys.json "${some[@]}" "${every[@]}"
parts qwen36 "Qwen3.6" "2/2 4/2/--ep,4 6/2/--pp,3 2/2/--recompute,0 2/2/--recompute,3" --config hybrid.json "${some[@]}" --ema 0.9
parts qwen36 "Qwen3.6, four parts, rows of two chunks" "4/4 8/4/--pp,2" --config four.json --grad-accum 4 --batch-size 1 --seq-len 70
parts qwen36 "Qwen3.6, documents, embedding = output matrix" "2/2 4/2/--pp,2,--recompute,3" --config hybrid_tied.json --grad-accum 4 --train documents --doc-reset 1
parts qwen36 "Qwen3.6, MTP" "2/2 4/2/--recompute,3 4/2/--ep,4" --config mtp.json "${some[@]}"
parts qwen36 "Qwen3.6, MTP, documents" "2/2" --config mtp.json --grad-accum 4 --train documents --doc-reset 1
parts qwen36 "Qwen3.6 with a tower" "2/2 4/2/--ep,4" --config sees.json "${some[@]}"
parts qwen36 "Qwen3.6, some do not learn" "4/2 2/2" --config hybrid.json "${some[@]}" --freeze '*.layers.0.*,*k_proj*,*q_norm*,*.linear_attn.norm*,*shared_expert.up*'
parts qwen36 "Qwen3.6, conversations" "2/2" --config hybrid.json --grad-accum 4 --train talks.jsonl --chat-template chatml --seq-len 96
parts qwen36 "an adapter of Qwen3.6" "2/2 4/2/--ep,4 8/2/--pp,2,--ep,4 2/2/--recompute,3" --config hybrid.json "${some[@]}" --lora-rank 3
parts qwen36 "an adapter of Qwen3.6 with dropout, of some" "2/2 8/4/--pp,2" --config four.json "${some[@]}" --lora-rank 4 --lora-dropout 0.3 \
    --lora-targets q_proj,down_proj,up_proj,in_proj_qkv,in_proj_a,in_proj_b,out_proj
parts qwen36 "adapters of Qwen3.6's experts" "4/2/--ep,4 4/1/--pp,2,--ep,2" --config hybrid.json "${some[@]}" "${every[@]}"
parts qwen36 "an adapter of Qwen3.6, of gates and routers" "2/2" --config hybrid.json "${some[@]}" --lora-rank 1 --lora-targets all-linear --lora-parameters mlp.gate.weight
parts v4 "DeepSeek V4" "2/2 4/4 4/2/--recompute,0" --config streams.json "${some[@]}" --ema 0.9
parts v4 "DeepSeek V4, all that learns" "2/2 4/2/--ep,4 4/4/--recompute,3 8/4/--pp,2" --config taught.json "${some[@]}"
parts v4 "DeepSeek V4, documents, indexers of all entries" "4/4" --config streams.json --indexer dense --grad-accum 4 --train documents --doc-reset 1
parts v4 "DeepSeek V4, some do not learn" "4/2" --config taught.json "${some[@]}" --freeze 'layers.0.*,*attn.wkv*,*attn_sink,*.wo_b.*,*shared_experts.w2*'
parts v4 "DeepSeek V4, indexers alone" "2/2" --config taught.json "${some[@]}" --indexer-alone 1
in_groups=(--lora-rank 3 --lora-targets 'q_b_proj,kv_proj,o_a_proj,o_b_proj,up_proj,down_proj')
parts v4 "an adapter of DeepSeek V4, of experts, too" "2/2/--recompute,3 4/2/--ep,4" --config streams.json "${some[@]}" "${every[@]}" "${in_groups[@]}"
parts v4 "an adapter of DeepSeek V4 with dropout" "2/2 8/4/--pp,2" --config streams.json "${some[@]}" "${in_groups[@]}" --lora-dropout 0.3
parts glm "GLM-5" "2/2 4/4 4/2/--recompute,0" --config glm.json "${some[@]}" --ema 0.9
parts glm "GLM-5, all that learns" "2/2 4/2/--ep,4 4/4/--recompute,3 8/4/--pp,2" --config glm_taught.json "${some[@]}"
parts glm "GLM-5, documents, indexers of all positions" "4/4" --config glm.json --indexer dense --grad-accum 4 --train documents --doc-reset 1
parts glm "GLM-5, some do not learn" "4/2" --config glm_taught.json "${some[@]}" --freeze '*.layers.0.*,*kv_a_proj*,*q_a_layernorm*,*.o_proj.*,*shared_experts.down*'
parts glm "GLM-5, indexers alone" "2/2" --config glm_taught.json "${some[@]}" --indexer-alone 1
parts glm "an adapter of GLM-5, of experts, too" "2/2/--recompute,3 4/2/--ep,4" --config glm.json "${some[@]}" "${every[@]}" --lora-targets all-linear
parts glm "an adapter of GLM-5 with dropout" "2/2 8/4/--pp,2" --config glm.json "${some[@]}" --lora-rank 3 --lora-dropout 0.3
echo "# bases in less than floats"
parts qwen "an adapter beside a base in bf16" "2/2 4/2/--pp,2" --config wide.json --lora-rank 3 --base-dtype bf16
parts qwen "... in fp8" "2/2 8/2/--pp,2,--recompute,3" --config wide.json --lora-rank 3 --base-dtype fp8
parts qwen "... in fp8, biases of o, four parts" "4/4" --config llama.json --lora-rank 3 --base-dtype fp8
parts qwen "... in fp8, with experts, --act-fp8 1" "2/2 4/2/--ep,4" --config wide_sparse.json "${some[@]}" --lora-rank 3 --base-dtype fp8 --act-fp8 1
parts qwen36 "an adapter of Qwen3.6 beside a base in bf16" "2/2 4/2/--pp,2" --config wide_hybrid.json "${some[@]}" --lora-rank 3 --base-dtype bf16
parts qwen36 "... in fp8" "2/2 4/2/--ep,4" --config wide_hybrid.json "${some[@]}" --lora-rank 3 --base-dtype fp8
# folders as they are published; fp8 with scales that are no powers of two, the embedding too
for name in wide even even4; do timeout 60 "$qwen" --config $name.json --export-hf ${name}_hf >out 2>err; done
timeout 60 "$qwen36" --config wide_hybrid.json --export-hf hybrid_hf >out 2>err
"$python" "$root/dev/ref/fp8.py" wide_hf release8 --release floats --keep '^$' && rm -rf floats
"$python" "$root/dev/ref/fp8.py" hybrid_hf release36 --release floats --keep conv1d --scales BF16 && rm -rf floats
"$python" "$root/dev/ref/fp4.py" even_hf release4 --release floats --experts '(q|o|gate|up|down)_proj.weight$' --keep embed && rm -rf floats
"$python" "$root/dev/ref/fp4.py" even4_hf four4 --release floats --experts '(q|o|gate|up|down)_proj.weight$' --keep embed && rm -rf floats
timeout 60 "$v4" --config wide_streams.json --export-hf streams_hf >out 2>err
"$python" "$root/dev/ref/fp4.py" streams_hf release_v4 --release floats && rm -rf floats
kept() { check "... and the box says so" test "$(boxed matrices "$1 and all else as in the files") $(boxed matrices 'each shared by 2 ranks')" = "1 1"; }
parts qwen "beside a folder in fp8" "4/2/--pp,2 2/2" --from release8 --lora-rank 3 &&
    kept fp8
parts qwen "beside one in fp4 and fp8, --act-fp8 1" "4/2/--pp,2 2/2/--recompute,3" --from release4 --lora-rank 3 --act-fp8 1 &&
    kept "fp8, fp4"
parts qwen36 "Qwen3.6 beside a folder in fp8" "4/2/--ep,4 2/2" --from release36 "${some[@]}" --lora-rank 3 &&
    kept fp8
parts v4 "DeepSeek V4 beside a base in bf16" "4/4" --config wide_streams.json "${some[@]}" "${in_groups[@]}" --base-dtype bf16
parts v4 "... in fp8, --act-fp8 1" "2/2" --config wide_streams.json "${some[@]}" "${in_groups[@]}" --base-dtype fp8 --act-fp8 1
parts v4 "... a folder in fp4 and fp8" "4/2/--ep,4,--recompute,3 8/2/--pp,2" --from release_v4 "${some[@]}" "${in_groups[@]}" &&
    kept "fp8, fp4"
timeout 60 "$glm" --config wide_glm.json --export-hf glm_hf >out 2>err
"$python" "$root/dev/ref/fp8.py" glm_hf release_glm --release floats && rm -rf floats
parts glm "GLM-5 beside a folder in fp8, --act-fp8 1" "8/4/--pp,2 4/2/--ep,4,--recompute,3" --from release_glm "${some[@]}" --lora-rank 3 --act-fp8 1 &&
    kept fp8
merge=("${run[@]}" --from release8 --lora-rank 3 --merge 1)
timeout 60 "$qwen" "${merge[@]}" --run adapter --export-hf merged >out 2>err
rm -rf several
timeout 60 "$launch" -n 4 "$qwen" "${merge[@]}" --tp 2 --pp 2 --run several --export-hf exported >out 2>err </dev/null
status=$?
cmp -s {merged,exported}/model.safetensors
verdict $? "merged into its base in fp8: the export of one rank" "status $status: $(tail -n 1 err)"
rm -rf merged exported adapter several
adapter=("${run[@]}" --from release4 --lora-rank 3)
writers=("2 --tp 2") readers=("1 --tp 1" "4 --tp 2 --pp 2")
adapters_travel "beside a folder in fp4"
evaluated qwen "a folder in fp8" release8
evaluated qwen "a folder of floats as bf16" even_hf --weights bf16
timeout 60 "$moe" --config experts.json --export-hf mixtral >out 2>err
evaluated moe "experts as bf16" mixtral --weights bf16
rewrite even_hf broken 'W = "model.layers.1.mlp.up_proj.weight"; d, s, x = t[W]; t[W] = d, s, b"\0\0\xc0\x7f" + x[4:-4] + b"\0\0\x80\x7f"'
refused "numbers of two ranks that are not finite" "found 2 of model.layers.1.mlp.up_proj.weight that are NaN or infinite: training" \
    "$launch" -n 2 "$qwen" "${run[@]}" --from broken --lora-rank 2 --base-dtype bf16 --tp 2
refused "groups of fp4 that the ranks would cut" "--tp: 4: expected a number that divides the 6 groups of 32 columns that model.layers.0.mlp.down_proj.weight has in fp4 (--weights bf16 has none)" \
    "$launch" -n 4 "$qwen" "${run[@]}" --from four4 --lora-rank 2 --tp 4
echo "# checkpoints"
timeout 60 "$qwen" "${run[@]}" --config tied.json --run whole --export-hf exported >out 2>err
mv exported/model.safetensors whole/ && rm -rf exported
for from in 1/1/1 2/2/1 8/2/2; do
    for to in 1/1/1 2/2/1 4/2/2 3/1/3; do going_on $from $to; done
done
writers=("2 --tp 2" "8 --tp 4 --pp 2") readers=("1 --tp 1 --pp 1" "4 --tp 2 --pp 2")
travels gpt2 "GPT-2" gpt2.json
merge=("${run[@]}" --from whole --lora-rank 3 --merge 1)
timeout 60 "$qwen" "${merge[@]}" --run adapter --export-hf merged >out 2>err
for grid in "2 --tp 2" "2 --pp 2" "4 --tp 2 --pp 2"; do
    rm -rf exported several
    timeout 60 "$launch" -n ${grid%% *} "$qwen" "${merge[@]}" ${grid#* } --run several --export-hf exported >out 2>err </dev/null
    status=$?
    cmp -s {merged,exported}/model.safetensors
    verdict $? "an adapter merged into its base, $grid: the export of one rank" "status $status: $(tail -n 1 err)"
done
rm -rf merged exported adapter several
adapter=("${run[@]}" --from whole --lora-rank 3 --lora-dropout 0.2)
writers=("1 --tp 1" "2 --tp 2" "8 --tp 2 --pp 2") readers=("1 --tp 1 --pp 1" "4 --tp 2 --pp 2")
adapters_travel "an adapter"
timeout 60 "$moe" "${run[@]}" --config experts.json "${some[@]}" --run sole >out 2>err
for from in "4 --tp 2 --ep 4" "4 --ep 2" "8 --tp 2 --pp 2 --ep 4"; do
    rm -rf several
    timeout 60 "$launch" -n ${from%% *} "$moe" "${run[@]}" --config experts.json "${some[@]}" ${from#* } --run several >out 2>err </dev/null
    for to in "1 --tp 1 --ep 1 --pp 1" "2 --tp 2 --ep 2 --pp 1" "8 --tp 2 --ep 4 --pp 2"; do
        rm -rf several/step_000004
        timeout 60 "$launch" -n ${to%% *} "$moe" --run several --resume ${to#* } >out 2>err </dev/null
        status=$?
        same_run sole several
        verdict $? "experts, written by $from, resumed by $to" "status $status: $(tail -n 1 err)"
    done
done
rm -rf sole
timeout 60 "$qwen" "${run[@]}" --config sparse.json "${some[@]}" --run sole >out 2>err
adapter=("${run[@]}" --from sole "${some[@]}" "${every[@]}")
writers=("1 --ep 1" "4 --tp 2 --ep 4" "4 --pp 2 --ep 2") readers=("1 --tp 1 --ep 1 --pp 1" "4 --tp 1 --ep 4 --pp 1")
adapters_travel "adapters of experts"
# as older files have them: a module for each expert
timeout 60 "$qwen" "${run[@]}" --from sole "${some[@]}" --lora-rank 3 --lora-parameters mlp.experts.down_proj --export-lora fused >out 2>err
mv fused/{adapter_model,model}.safetensors
rewrite fused older 'import array
for name in [n for n in t if ".mlp.experts." in n]:
    _, (n, k), x = t.pop(name)
    x, is_B = array.array("f", x), "lora_B" in name
    rows, columns = (n, k // 4) if is_B else (n // 4, k)
    for e in range(4):
        at = [i * k + c * 4 + e if is_B else (e * rows + i) * k + c for i in range(rows) for c in range(columns)]
        t[name.replace("experts.", f"experts.{e}.down_proj.")] = "F32", [rows, columns], array.array("f", [x[j] for j in at]).tobytes()'
mv older/{model,adapter_model}.safetensors
parts qwen "adapters of each expert, of an older file" "4/2/--ep,4 2/1/--ep,2" --from sole --lora older "${some[@]}" --freeze '*.experts.1.*'
rm -rf fused older sole
writers=("1 --tp 1 --ep 1" "2 --tp 2" "4 --tp 2 --ep 4") readers=("1 --tp 1 --ep 1" "2 --tp 2 --ep 2" "4 --tp 2 --ep 4")
travels qwen36 Qwen3.6 mtp.json
rewrite exported fused 'fuse()'
for to in "1 --tp 1" "2 --tp 2" "4 --tp 2 --ep 4"; do
    rm -rf again
    timeout 60 "$launch" -n ${to%% *} "$qwen36" "${run[@]}" --from fused "${some[@]}" ${to#* } --export-hf again >out 2>err </dev/null
    [ -d first ] || mv again first
    check "Qwen3.6 from a folder with fused experts, exported by $to: the bytes of one rank" cmp {first,"$([ -d again ] && echo again || echo first)"}/model.safetensors
done
merges qwen36 Qwen3.6 "2 --tp 2" "4 --tp 2 --ep 4" "4 --ep 2"
evaluated qwen36 Qwen3.6 exported
writers=("2 --tp 2" "4 --tp 4") readers=("1 --tp 1 --ep 1" "4 --tp 2 --ep 4" "4 --tp 2 --pp 2 --ep 2")
travels v4 "DeepSeek V4" taught.json
merges v4 "DeepSeek V4" "4 --tp 4" "${in_groups[@]}"
evaluated v4 "DeepSeek V4" exported
travels glm "GLM-5" glm_taught.json
evaluated glm "GLM-5" exported
rm -rf exported fused first
evaluated qwen "Qwen3" whole
writers=("4 --tp 4" "1 --tp 1") readers=("4 --tp 4" "2 --tp 2" "1 --tp 1") some=()
travels qwen "one head of keys on all ranks" one_key.json
evaluated qwen "one head of keys on all ranks" exported
rm -rf exported
echo "# what it costs"
sends qwen "  parts sent|matrices" 2 --tp 2 --config tied.json
sends qwen "  parts sent|matrices" 2 --tp 2 --recompute 3 --config tied.json
sends qwen "  parts sent|matrices" 6 --tp 2 --pp 3 --config tied.json
sends qwen "  parts sent|matrices" 4 --tp 4 --head-rows 8 --config apart.json
sends qwen "  parts sent|matrices" 4 --tp 2 --zero 2 --freeze 'first:1' --config tied.json
sends qwen "  parts sent|matrices" 4 --tp 2 --zero 2 --lora-rank 3 --lora-targets q_proj,v_proj,o_proj,gate_proj --config tied.json
sends qwen "  parts sent|matrices" 4 --tp 4 --recompute 3 --lora-rank 3 --config apart.json
sends qwen "  parts sent|matrices +. each" 2 --tp 2 --lora-rank 3 --config wide.json --base-dtype bf16
sends qwen "  parts sent|matrices +. each" 4 --tp 2 --pp 2 --lora-rank 3 --config wide.json --base-dtype fp8
sends qwen "  parts sent|matrices +. each" 2 --tp 2 --lora-rank 3 --from release4
sends qwen "  parts sent|matrices" 2 --tp 2 --config tied.json --eval-every 1 --sample-every 1 --save-every 1  # updates alone count
sends qwen "  parts sent|matrices" 4 --tp 2 --ep 4 "${every[@]}" --config all_sparse.json --grad-accum 4
sends qwen "  parts sent|  heads of keys" 4 --tp 4 --config dense.json --recompute 3
sends qwen "  parts sent|  heads of keys" 8 --tp 4 --pp 2 --config dense.json --lora-rank 3
sends qwen "  parts sent|  heads of keys" 4 --tp 4 --config bias.json --freeze 'first:1'
sends qwen "  parts sent|  keys sent" 8 --tp 4 --cp 2 --config dense.json
sends qwen "  parts sent|  keys sent" 4 --tp 2 --cp 2 --cp-by heads --config one_key.json --recompute 3
sends moe "  parts sent|matrices" 4 --tp 2 --ep 4 --recompute 3 --config all_experts.json --grad-accum 4
# of conversations a bound, for the head leaves out what is no target
talks=("${run[@]}" --config dense.json --train talks.jsonl --chat-template chatml --seq-len 96 --tp 2 --eval-every 0 --sample-every 0 --save-every 0)
rm -rf sent
COMM_CHECK=0 timeout 60 "$launch" -n 2 "$qwen" "${talks[@]}" --run sent >out 2>err </dev/null
check "conversations: rank 0 sends no more than the box says, which says that it is a bound" \
    awk -v a="$(kib 'sent per update *\| at most')" -v b="$(kib 'rank 0 sent')" 'BEGIN { exit !(a > 0 && b > 0.5 * a && b <= a) }'
timeout 60 "$qwen" "${talks[@]}" --plan 2 >plan 2>err
check "... so does --plan 2" test "$(grep -E 'sent per update|parts sent' plan)" = "$(grep -E 'sent per update|parts sent' out)" -a "$(grep -cE 'sent +[a-z |]*at most|sent per update +. at most' plan)" = 2
rm -rf sent
alone() { sends $1 "  parts sent|matrices" "${@:2}" --grad-accum 1 --batch-size 1 --seq-len 16; }  # of each line one micro-batch: its way back begins at once
alone qwen 4 --tp 2 --pp 2 --config dense.json
alone qwen 8 --tp 2 --cp 2 --pp 2 --config tied.json --recompute 3
alone v4 4 --tp 2 --pp 2 --config all_streams.json
alone v4 4 --tp 2 --pp 2 --config all_streams.json --recompute 3
alone glm 4 --tp 2 --pp 2 --config all_glm.json --recompute 3
alone qwen36 4 --tp 2 --pp 2 --config all.json --recompute 3
alone moe 4 --tp 2 --pp 2 --config all_experts.json
equally() { sends $1 "  parts sent|matrices" "${@:2}" --grad-accum 4 --batch-size 2 --seq-len 16; }  # busy experts
equally qwen36 2 --tp 2 --config all.json
equally qwen36 2 --tp 2 --recompute 3 --config all.json
equally qwen36 4 --tp 4 --recompute 3 --config two_all.json
equally moe 4 --tp 4 --config one_all_experts.json
equally qwen36 4 --tp 2 --pp 2 --config all.json
equally qwen36 2 --tp 2 --config all_mtp.json
equally qwen36 2 --tp 2 --config sees.json --recompute 3
equally qwen36 2 --tp 2 --config all.json --freeze 'first:1,*norm*'
equally qwen36 2 --tp 2 --config all.json --lora-rank 2 --lora-targets in_proj_qkv,o_proj,up_proj
equally qwen36 2 --tp 2 --config all.json --recompute 3 --lora-rank 2
equally qwen36 2 --tp 2 --config all.json --recompute 3 --lora-rank 2 --base-dtype bf16
equally v4 4 --tp 4 --config all_streams.json
equally v4 2 --tp 2 --config all_streams.json --recompute 3 --freeze 'first:1'
equally v4 4 --tp 2 --pp 2 --config all_taught.json --recompute 3
equally v4 4 --tp 4 --config all_streams.json "${in_groups[@]}"
equally v4 2 --tp 2 --config all_streams.json "${in_groups[@]}" --base-dtype bf16
equally glm 4 --tp 4 --config all_glm.json
equally glm 2 --tp 2 --config all_glm.json --recompute 3 --freeze 'first:1'
equally glm 4 --tp 2 --pp 2 --config all_glm_taught.json --recompute 3
equally glm 4 --tp 4 --config all_glm.json --lora-rank 3
oddly() { sends $1 "  parts sent|matrices" "${@:2}" --grad-accum 4 --batch-size 1 --seq-len 15; }  # positions that ranks do not divide
oddly qwen 4 --tp 4 --config apart.json
oddly qwen 4 --tp 4 --recompute 3 --lora-rank 3 --config apart.json
oddly moe 4 --tp 2 --ep 4 --recompute 3 --config all_experts.json
oddly moe 4 --tp 4 --config one_all_experts.json
oddly qwen36 4 --tp 4 --recompute 3 --config two_all.json
oddly v4 4 --tp 4 --config all_streams.json
oddly glm 4 --tp 4 --config all_glm.json
echo "# a bit that flips in the memory of one rank: what is shared, what all have, what experts are"
need_build faults "CPU=1" train_qwen3_faults
flips() {  # RANKS RANK SUM LIKE OPTION...: before that rank's SUM-th sum, at the checkpoint of step 2 or 4
    local n=$1 bad=$2 sum=$3 like=$4 rank pids=() pid ended=()
    shift 4
    rm -rf several
    for rank in $(seq $((n - 1)) -1 0); do
        (if [ $rank = $bad ]; then export FAULT=flip:$sum; fi
         COMM_CHECK=0 exec timeout 60 "$faults" "${run[@]}" --grad-accum 8 "$@" --rank $rank/$n@./meet --run several) >out 2>err$rank </dev/null &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait $pid; ended+=($?); done
    cat err[0-9] >err
    rm -f err[0-9]
    check "rank $bad of $n, $*: other bits than rank $like" test "$(tr -d ' 1' <<<"${ended[*]}") $(grep -cE "step [24]: rank $bad: other bits of [a-z0-9_.]+ than rank $like, which has the same" err) $(wc -l <err)" = " 1 1"
}
flips 4 2 120 0 --config dense.json --tp 2  # a part of a matrix
flips 4 2 90 0 --config dense.json --tp 2   # or a gain, which all four have
flips 4 3 172 1 --config sparse.json --ep 2  # experts, which rank 1 has, too
echo "# refusals"
go=("${run[@]}" --config dense.json)
refused "without ranks" "--tp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "$qwen" "${go[@]}" --tp 2
refused "that does not divide the ranks" "--tp: 2: expected a number that divides the ranks, 3" "$launch" -n 3 "$qwen" "${go[@]}" --tp 2
refused "more than heads, however many ranks there are" "--tp: 8: expected a number that divides the 4 heads of model.layers.0.self_attn.q_proj.weight: this model takes 2, 4" \
    "$launch" -n 4 "$qwen" "${go[@]}" --tp 8
edit dense.json six.json num_attention_heads 12 hidden_size 24 num_key_value_heads 4
edit dense.json thin.json num_key_value_heads 1 head_dim 6
refused "neither a divisor nor a multiple of the heads of keys" "--tp: 6: expected a number that divides the 4 heads of model.layers.0.self_attn.k_proj.weight, or a multiple" \
    "$launch" -n 6 "$qwen" "${run[@]}" --config six.json --tp 6
refused "a head of keys with fewer channels" "--tp: 4: expected a number that divides both sides of model.layers.0.self_attn.k_proj.weight, 6 and 20" \
    "$launch" -n 4 "$qwen" "${run[@]}" --config thin.json --tp 4
refused "that does not divide the vocabulary" "--tp: 5: expected a number that divides the 384 rows of model.embed_tokens.weight, padded: there is none for this model: leave it out" \
    "$launch" -n 5 "$qwen" "${run[@]}" --config fifths.json --tp 5
sparsely=("$qwen" "${run[@]}" --config sparse.json --grad-accum 4)
hybrid=("$qwen36" "${run[@]}" --grad-accum 4)
refused "more than heads of keys" "--tp: 4: expected a number that divides the 2 heads of model.layers.0.linear_attn.in_proj_qkv.weight" \
    "$launch" -n 4 "${hybrid[@]}" --config hybrid.json --tp 4
refused "one head of keys" "--tp: 2: expected a number that divides the 1 heads of model.layers.0.linear_attn.in_proj_qkv.weight" \
    "$launch" -n 2 "${hybrid[@]}" --config three.json --tp 2
streams=("$v4" "${run[@]}" --grad-accum 4)
refused "more than groups of heads" "--tp: 4: expected a number that divides the 2 groups of layers.0.attn.wo_a.weight" \
    "$launch" -n 4 "${streams[@]}" --config groups.json --tp 4
refused "more than heads" "--tp: 8: expected a number that divides the 4 heads of model.layers.0.self_attn.q_b_proj.weight" \
    "$launch" -n 8 "$glm" "${run[@]}" --config glm.json --grad-accum 4 --tp 8
refused "Muon" "--optimizer: muon needs whole matrices" "$launch" -n 2 "${streams[@]}" --config streams.json --optimizer muon --tp 2
refused "fewer ranks with experts than with matrices" "--ep: 1: ranks that share matrices share experts, too: expected 2, as --tp, or a multiple" \
    "$launch" -n 2 "${sparsely[@]}" --tp 2 --ep 1
refused "micro-batches that groups cannot share" "as many as ranks divided by --tp, found 3: --grad-accum 2" "$launch" -n 4 "${sparsely[@]}" --grad-accum 3 --tp 2
refused "a tp that does not divide the experts" "--tp: 2: expected a number that divides the 5 experts" \
    "$launch" -n 2 "$moe" "${run[@]}" --config five.json --tp 2
refused "llm.c's file" "--export-bin: is not for --pp and --tp: export the checkpoint" "$launch" -n 2 "$gpt2" "${run[@]}" --config gpt2.json --tp 2 --export-bin x.bin
refused "--verify-every" "--verify-every: is not for --tp" "$launch" -n 2 "$qwen" "${go[@]}" --verify-every 2 --tp 2
refused "--noise-scale" "--noise-scale: is not for --tp" "$launch" -n 2 "$qwen" "${go[@]}" --noise-scale 2 --tp 2
timeout 60 "$qwen" --from whole --generate x --max-new-tokens 2 --tp 2 >out 2>err
check "refused: --generate" test "$? $(grep -cF -- '--tp: is for training and --eval-only' err)" = "2 1"
rm -rf several
timeout 60 "$launch" -n 2 "$qwen" "${go[@]}" --tp 2 --run several >out 2>err </dev/null
timeout 60 "$launch" -n 3 "$qwen" --run several --resume --steps 5 >out 2>err </dev/null
check "a run of --tp 2 goes on by 3 ranks with whole matrices, and a line says so" \
    test "$? $(grep -cF -- '--tp 2, asked for earlier, does not fit' err)" = "0 1"
finish
