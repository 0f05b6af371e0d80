#!/usr/bin/env bash
# --cp: positions of rows on several ranks, of train_gpt2cu, train_moe, train_qwen3, train_qwen36, train_deepseek_v4, train_glm5 and
# train_mamba_hpn, as their user starts them. The same positions on each rank give the same bytes, whatever else the ranks share; the losses of one
# rank within 1e-5, before the first update its bits. Checkpoints, what is sent, refusals. COMM_CHECK=1: no rank may come by another call than its
# neighbour. --cp beside two other ways to share: test_grids.sh.
#     dev/test_context.sh quick   a few of each kind
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1 COMM_CHECK=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
need_build qwen "CPU=1" train_qwen3
need_build qwen36 "CPU=1" train_qwen36
need_build v4 "CPU=1" train_deepseek_v4
need_build glm "CPU=1" train_glm5
need_build gpt2 "CPU=1" train_gpt2cu
need_build moe "CPU=1" train_moe
need_build mamba "" train_mamba_hpn
need_build launch "" launch
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts
write_configs 3 4 '[1]'
# linear and full layers, rows of chunks of 64; texts that are longer than one, whose chunks a rank's end cuts
echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":20,"num_hidden_layers":4,"full_attention_interval":2,"num_attention_heads":4,
"num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":5,"linear_value_head_dim":6,
"linear_conv_kernel_dim":4,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":10,"shared_expert_intermediate_size":12,
"max_position_embeddings":256,"rope_parameters":{"rope_theta":10000,"partial_rotary_factor":0.5,"mrope_section":[1,1,0]},
"output_router_logits":true,"router_aux_loss_coef":0.05}' >linear.json
edit linear.json mtp.json mtp_num_hidden_layers 1 mtp_weight 0.5 tie_word_embeddings true
edit linear.json pure.json layer_types '["linear_attention","linear_attention"]' num_hidden_layers 2 linear_conv_kernel_dim 1 linear_num_value_heads 2
edit linear.json six.json num_attention_heads 6
edit linear.json eight.json num_attention_heads 8 num_key_value_heads 4
edit linear.json full.json layer_types '["full_attention","full_attention"]' num_hidden_layers 2
# DeepSeek V4: windows that reach further than a chunk of 4 ranks, entries of 2 tokens, of which an indexer that learns chooses some, and of 4; a
# document's entries may have tokens of several ranks
echo '{"model_type":"deepseek_v4","vocab_size":257,"hidden_size":16,"num_hidden_layers":3,"max_position_embeddings":96,"num_attention_heads":4,
"head_dim":8,"qk_rope_head_dim":4,"q_lora_rank":10,"o_groups":2,"o_lora_rank":6,"sliding_window":7,"index_n_heads":3,"index_head_dim":6,
"index_topk":2,"hc_mult":3,"hc_sinkhorn_iters":4,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"swiglu_limit":1.0,
"layer_types":["sliding_attention","compressed_sparse_attention","heavily_compressed_attention"],"mlp_layer_types":["hash_moe","moe","moe"],
"compress_rates":{"compressed_sparse_attention":2,"heavily_compressed_attention":4},"num_nextn_predict_layers":1,"mtp_weight":0.5,
"seq_balance_coef":0.1,"bias_update_rate":0.01,"indexer_train":"kl"}' >entries.json
edit entries.json ends.json layer_types '["compressed_sparse_attention","heavily_compressed_attention","compressed_sparse_attention"]' num_nextn_predict_layers 0 \
    indexer_train '"dense"'
edit entries.json windows.json layer_types '["sliding_attention","sliding_attention"]' mlp_layer_types '["moe","moe"]' num_hidden_layers 2 \
    indexer_train '"off"'
write_glm5
mkdir long && for i in {1..30}; do head -c $((300 + i * 137 % 900)) text | tail -c $((30 + i * 59 % 220)) >long/doc_$i; done
chunks=(--seq-len 128 --grad-accum 2)  # of train_qwen36
# Of a new model states fade within a few positions: nobody would miss what is asked of them. `lasting` keeps them for a thousand
timeout 60 "$qwen36" --config mtp.json --export-hf new --train "" >out 2>err
rewrite new lasting 'for name, (_, shape, x) in t.items():
    if name.endswith("A_log"): t[name] = "F32", shape, struct.pack("<f", -7.0) * (len(x) // 4)'
run=(--train text --seq-len 16 --batch-size 2 --lr 1e-3 --grad-accum 4 --steps 20 --val-fraction 0.1 --eval-every 5 --eval-batches 3
     --sample-every 20 --max-new-tokens 8 --save-every 10)

tiny=(--model tiny --base-layers 3 --d-model 20)

# near RUN RUN [WORDS [STEPS]]: each loss within 1e-5 relative, the validation before the first update to the last digit, but for --cp-by ring and where
# chunks of the delta rule are cut
near() {
    "$python" - "$1/metrics.jsonl" "$2/metrics.jsonl" "${3:-}" "${4:-20}" <<'PYTHON'
import json, sys
one, other = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3])
assert len(one) == len(other) > int(sys.argv[4])
first = [[r["val_loss"] for r in run if r.get("val_loss") is not None][0] for run in (one, other)]
assert first[0] == first[1] or "ring" in sys.argv[3] or "cut" in sys.argv[3], f"validation of the same parameters: {first}"
worst = max(abs(a[key] / b[key] - 1) for a, b in zip(one, other) for key in ("loss", "val_loss", "norm") if a.get(key) is not None)
print(f"{worst:.1e}")
assert worst <= 1e-5, worst
PYTHON
}

# shared TRAINER PROMISE "RANKS/C[/MORE,OPTIONS] ..." OPTION...: the first of these ranks have the losses of one, the others the bytes of the
# first, after $steps, 10 if nobody says 20
shared() {
    local trainer=${!1} promise=$2 grids=$3 grid ranks size more status first=""
    local few=(--steps ${steps:-10} --sample-every ${steps:-10})
    shift 3
    in_turn || return
    rm -rf one
    timeout 60 "$trainer" "${run[@]}" "${few[@]}" "$@" --run one >out 2>err || verdict 1 "$promise: alone" "$(tail -n 1 err)"
    for grid in $grids; do
        IFS=/ read -r ranks size more <<<"$grid"
        rm -rf several
        timeout 60 "$launch" -n $ranks "$trainer" "${run[@]}" "${few[@]}" "$@" --cp $size ${more//,/ } --run several >out 2>err </dev/null
        status=$?
        if [ "$first" != $size ]; then
            worst=$(near one several "$more $promise" ${steps:-10} 2>&1)
            verdict $? "$promise, $ranks ranks, --cp $size ${more//,/ }: the losses of one rank within ${worst##*$'\n'}" "status $status: $(tail -n 1 err)"
            first=$size
            rm -rf as_first
            mv several as_first
        else
            same_run as_first several && cmp -s {as_first,several}/samples.txt
            verdict $? "... $ranks ranks, --cp $size ${more//,/ }: the same bytes" "status $status: $(tail -n 1 err)"
        fi
    done
}

if is_quick; then
    shared qwen "output matrix = embedding" "2/2 4/2 4/2/--tp,2" --config tied.json --ema 0.9
    shared qwen "biases and windows" "2/2" --config bias.json
    shared gpt2 "GPT-2" "2/2 4/2/--pp,2" --config gpt2.json
    shared moe "experts" "2/2 4/2/--ep,2" --config experts.json
    shared qwen "windows, documents, --cp-by heads" "2/2/--cp-by,heads 4/2/--cp-by,heads" --config bias.json --train documents --doc-reset 1
    shared qwen "windows, documents, --cp-by ring" "2/2/--cp-by,ring 2/2/--cp-by,ring" --config bias.json --train documents --doc-reset 1
    shared mamba "Mamba, documents" "2/2 4/2" "${tiny[@]}" --train documents --doc-reset 1
    shared qwen36 "linear and full layers" "2/2 4/2/--pp,2,--recompute,3" "${chunks[@]}" --config linear.json
    shared qwen36 "... states that last, 4 ranks, documents whose chunks are cut" "4/4" "${chunks[@]}" --from lasting --seq-len 256 --train long --doc-reset 1
    shared v4 "DeepSeek V4, documents" "2/2/--recompute,3 4/2/--ep,2 4/4" --config entries.json --train documents --doc-reset 1
    shared glm "GLM-5, documents" "2/2/--recompute,3 4/2/--ep,2 4/2/--tp,2 4/4" --config glm_taught.json --train documents --doc-reset 1
    finish
    exit
fi
steps=20 shared qwen "norms of heads" "2/2 2/2 8/2 2/2/--recompute,0 2/2/--recompute,3 2/2/--head-rows,3 4/4 8/4 8/4/--tp,2" --config dense.json
shared qwen "output matrix = embedding" "2/2 4/2/--pp,2 8/8" --config tied.json --ema 0.9 --seq-len 32
shared qwen "biases and windows" "2/2 4/2/--tp,2,--recompute,2 4/4" --config bias.json
shared qwen "rows one by one" "4/4 8/4/--pp,2" --config dense.json --batch-size 1 --grad-accum 3
shared qwen "conversations" "2/2 4/2/--pp,2 4/4" --config dense.json --train talks.jsonl --chat-template chatml --seq-len 96
answers 7 text >examples
shared qwen "documents, answering examples" "2/2 4/2 4/2/--tp,2 4/4" --config dense.json --train documents --doc-reset 1 --hellaswag examples
shared qwen "some does not learn" "2/2 4/2" --config dense.json --freeze '*.layers.0.*,*q_proj*,*q_norm*,*embed*'
steps=20 shared qwen "an adapter" "2/2 2/2/--recompute,3 4/4" --config dense.json --lora-rank 3
shared qwen "an adapter beside a base in fp8" "2/2 4/2" --config dense.json --lora-rank 3 --base-dtype fp8
steps=20 shared gpt2 "GPT-2" "2/2 8/2 2/2/--recompute,3 2/2/--recompute,1 4/4 8/8" --config gpt2.json --ema 0.9
shared gpt2 "GPT-2, documents, some does not learn" "2/2 4/2/--tp,2" --config gpt2.json --train documents --doc-reset 1 --freeze '*.h.0.*,*c_attn*,*wpe*'
echo "# --cp-by heads"
shared qwen "norms of heads" "2/2/--cp-by,heads 2/2/--cp-by,heads 4/2/--cp-by,heads,--pp,2,--recompute,3 4/4/--cp-by,heads 8/4/--cp-by,heads" --config dense.json
shared qwen "two ranks have one head of keys" "4/2/--cp-by,heads,--tp,2 8/2/--cp-by,heads,--tp,2" --config dense.json
shared qwen "windows, documents" "2/2/--cp-by,heads 4/4/--cp-by,heads" --config bias.json --train documents --doc-reset 1
shared gpt2 "GPT-2" "2/2/--cp-by,heads 4/2/--cp-by,heads,--recompute,3 4/4/--cp-by,heads" --config gpt2.json
echo "# --cp-by ring"
shared qwen "norms of heads" "2/2/--cp-by,ring 2/2/--cp-by,ring 4/2/--cp-by,ring,--tp,2 4/2/--cp-by,ring,--pp,2,--recompute,3 4/4/--cp-by,ring 8/4/--cp-by,ring" --config dense.json
shared qwen "windows, documents" "2/2/--cp-by,ring 2/2/--cp-by,ring 4/4/--cp-by,ring" --config bias.json --train documents --doc-reset 1
shared gpt2 "GPT-2" "2/2/--cp-by,ring 4/2/--cp-by,ring,--recompute,3 4/4/--cp-by,ring" --config gpt2.json
echo "# experts, Mamba"
steps=20 shared moe "experts" "2/2 4/2/--ep,2 4/2/--ep,4 2/2/--recompute,3 2/2/--recompute,0 4/4" --config experts.json --ema 0.9
shared moe "experts, balanced by biases" "2/2 4/2/--ep,4 4/2/--pp,2" --config experts.json --balance bias
shared moe "experts, balanced by a loss" "2/2 4/2/--ep,4 4/2/--pp,2 4/4" --config experts.json --balance loss --aux-alpha 0.05
steps=20 shared qwen "Qwen3 with experts" "2/2 4/2/--ep,2" --config sparse.json
steps=20 shared mamba "Mamba" "2/2 2/2 4/2 6/2 2/2/--recompute,scan 2/2/--recompute,layer 2/2/--scan-chunk,3 4/4 8/4" "${tiny[@]}" --ema 0.9
shared mamba "Mamba, fewer positions on each rank than the taps reach" "8/8" "${tiny[@]}" --batch-size 1 --head ce
shared mamba "Mamba, documents, answering examples" "2/2 4/2 4/4" "${tiny[@]}" --train documents --doc-reset 1 --hellaswag examples
answers 7 text >examples
shared mamba "Mamba, more and shorter rows of examples than a batch has" "2/2" "${tiny[@]}" --seq-len 96 --hellaswag examples
# rows of 6 whose only target is at the end: all ranks but one have none
examples 40 6 "$(for i in {1..240}; do echo $((i * i % 11)); done)" "$(for i in {1..240}; do echo $((i % 6 == 0 ? i * i % 11 % 3 : -1)); done)" >classes.safetensors
shared mamba "Mamba, a classifier" "2/2 3/3 6/6" "${tiny[@]}" --task cls --head hpn --proto fixed --proto-dim 8 --train classes.safetensors \
    --val classes.safetensors --val-fraction 0 --seq-len 6 --sample-every 0
shared mamba "Mamba, some does not learn" "2/2 4/2" "${tiny[@]}" --freeze '*.layers.0.*,*A_log*,*conv1d*'
shared mamba "Mamba, fixed prototypes" "2/2 4/2" "${tiny[@]}" --head hpn --proto fixed --proto-dim 256
shared mamba "Mamba, prototypes with a softmax" "2/2 3/3" "${tiny[@]}" --head hpn-softmax --proto-dim 64 --seq-len 18
echo "# linear layers"
steps=20 shared qwen36 "linear and full layers" "2/2 2/2 2/2/--recompute,0 2/2/--recompute,3 4/2/--pp,2,--pp-chunks,2,--recompute,3 4/2/--ep,4 2/2/--head-rows,3" "${chunks[@]}" --config linear.json --ema 0.9
shared qwen36 "... 4 ranks" "4/4 4/4/--recompute,3 8/4/--ep,2" "${chunks[@]}" --seq-len 256 --config linear.json
shared qwen36 "... rows one by one" "4/4 8/4/--pp,2" "${chunks[@]}" --seq-len 256 --config linear.json --batch-size 1 --grad-accum 3
shared qwen36 "... heads" "2/2/--cp-by,heads 4/2/--cp-by,heads,--pp,2,--recompute,3" "${chunks[@]}" --config linear.json
shared qwen36 "... heads of a rank of --tp" "2/2/--cp-by,heads 4/2/--cp-by,heads,--tp,2" "${chunks[@]}" --config eight.json
shared qwen36 "... ring" "2/2/--cp-by,ring 4/2/--cp-by,ring,--pp,2,--recompute,3 4/4/--cp-by,ring" "${chunks[@]}" --seq-len 256 --config linear.json
shared qwen36 "the token after the next" "2/2 4/2/--ep,2 2/2/--recompute,3 4/4" "${chunks[@]}" --seq-len 256 --config mtp.json
shared qwen36 "... and states that last" "2/2 4/2 2/2/--recompute,3 4/4" "${chunks[@]}" --seq-len 256 --from lasting
shared qwen36 "... which does not learn" "2/2 4/2" "${chunks[@]}" --config mtp.json --mtp-weight 0
shared qwen36 "linear layers alone, without a halo" "2/2 4/2 4/4" "${chunks[@]}" --seq-len 256 --config pure.json
shared qwen36 "full layers alone: rows of any length" "2/2 4/2" --config full.json --seq-len 18
shared qwen36 "documents whose chunks are cut" "2/2 4/2/--pp,2 2/2/--recompute,3 4/4" "${chunks[@]}" --seq-len 256 --config linear.json --train long --doc-reset 1
shared qwen36 "conversations whose chunks are cut" "2/2 4/2 4/4" "${chunks[@]}" --seq-len 256 --config mtp.json --train talks.jsonl --chat-template chatml
shared qwen36 "answering examples, more and shorter rows than a batch has" "2/2 4/2" "${chunks[@]}" --seq-len 256 --config linear.json --hellaswag examples
shared qwen36 "some does not learn" "2/2 4/2" "${chunks[@]}" --config linear.json --freeze '*.layers.0.*,*q_proj*,*A_log*,*conv1d*'
shared qwen36 "an adapter" "2/2 4/2/--pp,2 2/2/--recompute,3 4/4" "${chunks[@]}" --seq-len 256 --config linear.json --lora-rank 3
shared qwen36 "an adapter beside a base in fp8" "2/2 4/2" "${chunks[@]}" --config linear.json --lora-rank 3 --base-dtype fp8
echo "# DeepSeek V4"
steps=20 shared v4 "all that a layer may have" "2/2 2/2/--recompute,0 2/2/--recompute,3 4/2/--ep,4 4/2/--pp,2 4/2/--tp,2 4/4 8/4" --config entries.json --ema 0.9
shared v4 "... documents whose entries are cut" "2/2 4/2/--pp,2,--recompute,3 4/2/--tp,2,--recompute,3 4/4" --config entries.json --train documents --doc-reset 1
shared v4 "... the last layer has entries, all chosen" "2/2 2/2/--recompute,3 4/2/--pp,2 3/3" --config ends.json --train documents --doc-reset 1 --seq-len 24
shared v4 "... conversations" "4/4" --config entries.json --train talks.jsonl --chat-template chatml --seq-len 96
shared v4 "... rows one by one, answering examples" "2/2 4/2/--ep,2" --config entries.json --batch-size 1 --grad-accum 4 --hellaswag examples
shared v4 "windows alone: rows of any length" "3/3" --config windows.json --seq-len 18
shared v4 "some does not learn" "2/2 4/2" --config entries.json --freeze 'layers.0.*,*.wkv.*,*ape*,*q_norm*'
shared v4 "an adapter" "2/2 4/2/--pp,2" --config entries.json --lora-rank 3
echo "# GLM-5"
steps=20 shared glm "all that learns" "2/2 2/2/--recompute,0 2/2/--recompute,3 4/2/--ep,4 4/2/--pp,2 4/2/--tp,2 4/4 8/4" --config glm_taught.json --ema 0.9
shared glm "... documents" "2/2 4/2/--pp,2,--recompute,3 4/2/--tp,2,--recompute,3 4/4" --config glm_taught.json --train documents --doc-reset 1
shared glm "... indexers of all positions" "2/2 3/3" --config glm_taught.json --indexer dense --seq-len 18
shared glm "rows of which all is chosen, one by one, answering examples" "2/2 4/2/--ep,2" --config glm.json --seq-len 4 --batch-size 1 --hellaswag examples
shared glm "some does not learn" "2/2 4/2" --config glm_taught.json --freeze '*.layers.0.*,*kv_a_proj*,*q_a_layernorm*'
shared glm "an adapter" "2/2 4/2/--pp,2" --config glm.json --lora-rank 3
echo "# checkpoints"
"$launch" -n 2 "$qwen" "${run[@]}" --config tied.json --cp 2 --run whole >out 2>err </dev/null
for to in "2 --cp 2" "4 --cp 2" "4 --cp 2 --tp 2" "4 --cp 2 --pp 2"; do
    rm -rf several
    timeout 60 "$launch" -n 4 "$qwen" "${run[@]}" --config tied.json --cp 2 --pp 2 --run several >out 2>err </dev/null
    rm -rf several/step_000020
    timeout 60 "$launch" -n ${to%% *} "$qwen" --run several --resume --tp 1 --pp 1 ${to#* } >out 2>err </dev/null
    status=$?
    same_run whole several
    verdict $? "written by 4 ranks, --cp 2 --pp 2, resumed by $to" "status $status: $(tail -n 1 err)"
done
for grid in "--tp 2" "--pp 2"; do
    rm -rf several
    timeout 60 "$launch" -n 4 "$qwen" "${run[@]}" --config tied.json --cp 2 $grid --run several >out 2>err </dev/null
    rm -rf several/step_000020
    timeout 60 "$launch" -n 2 "$qwen" --run several --resume >out 2>err </dev/null
    status=$?
    same_run whole several
    verdict $? "written by 4 ranks, --cp 2 $grid, resumed by 2: what changes no bit gives way" "status $status: $(tail -n 1 err)"
done
rm -rf several one
by_heads=("${run[@]}" --config dense.json --cp 2 --cp-by heads)
"$launch" -n 4 "$qwen" "${by_heads[@]}" --tp 2 --run one >out 2>err </dev/null
for to in "2 1 given_up" "2 1 typed --tp 1" "4 0 kept"; do
    read -r ranks warns what grid <<<"$to"
    rm -rf several && cp -r one several && rm -rf several/step_000020
    timeout 60 "$launch" -n $ranks "$qwen" --run several --resume $grid >out 2>err </dev/null
    status=$?
    said=$(grep -cF -- "--cp-by heads: with --tp 2, as in the checkpoint, the gradients of a head of keys were sums of 2 parts, with --tp 1 of 1:" err)
    same_run one several
    test "$status $said $?" = "0 $warns $warns"
    verdict $? "--cp-by heads, two ranks for a head of keys, --tp 2 is $what: a line says whether digits are others, and they are" "status $status, $said: $(<err)"
done
rm -rf several
timeout 60 "$launch" -n 4 "$qwen" "${run[@]}" --config tied.json --cp 2 --pp 2 --run several >out 2>err </dev/null
rm -rf several/step_000020
timeout 60 "$qwen" --run several --resume >out 2>err </dev/null
check "one rank goes on from it, with a line, and near its losses" test "$? $(grep -cF -- '--cp 2, asked for earlier, does not fit' err) $(near whole several >/dev/null 2>&1; echo $?)" = "0 1 0"
timeout 60 "$launch" -n 2 "$qwen" --run whole --resume --seq-len 18 --steps 21 >out 2>err </dev/null
check "rows of another length that cannot be cut: whole rows, and a line" \
    test "$? $(grep -cF -- '--cp 2, asked for earlier, does not fit' err) $(grep -c '^| positions' out)" = "0 1 0"
rm -rf several
timeout 60 "$launch" -n 2 "$gpt2" "${run[@]}" --config gpt2.json --cp 2 --steps 2 --run several >out 2>err </dev/null
timeout 60 "$launch" -n 2 "$gpt2" --run several --resume --dropout 0.1 --steps 4 >out 2>err </dev/null
check "--dropout, typed now: whole rows, and a line" \
    test "$? $(grep -cF -- '--cp 2, asked for earlier, does not fit' err) $(grep -c '^| positions' out)" = "0 1 0"
rm -rf several
for to in 2/2 4/4 4/2; do
    timeout 60 "$launch" -n ${to%/*} "$qwen" --from whole --eval-only --val text --seq-len 16 --batch-size 2 --cp ${to#*/} >loss_several 2>err
    timeout 60 "$qwen" --from whole --eval-only --val text --seq-len 16 --batch-size 2 >loss 2>err
    check "--eval-only by ${to%/*} ranks, --cp ${to#*/}: the loss of one" test -n "$(grep 'val loss' loss)" -a "$(grep 'val loss' loss)" = "$(grep 'val loss' loss_several)"
done
"$launch" -n 2 "$qwen36" "${run[@]}" "${chunks[@]}" --config mtp.json --cp 2 --run mixed >out 2>err </dev/null
for grid in 2/2 4/2 4/2/--ep,2; do
    rm -rf several
    IFS=/ read -r ranks size more <<<"$grid"
    timeout 60 "$launch" -n 4 "$qwen36" "${run[@]}" "${chunks[@]}" --config mtp.json --cp 2 --ep 4 --run several >out 2>err </dev/null
    rm -rf several/step_000020
    timeout 60 "$launch" -n $ranks "$qwen36" --run several --resume --ep 1 --cp $size ${more//,/ } >out 2>err </dev/null
    status=$?
    same_run mixed several
    verdict $? "train_qwen36, written by 4 ranks, --cp 2 --ep 4, resumed by $ranks, --cp $size ${more//,/ }" "status $status: $(tail -n 1 err)"
done
rm -rf several/step_000020
timeout 60 "$qwen36" --run several --resume >out 2>err </dev/null
check "... one rank goes on from it, with a line, and near its losses" test "$? $(grep -cF -- '--cp 2, asked for earlier, does not fit' err) $(near mixed several >/dev/null 2>&1; echo $?)" = "0 1 0"
for to in 2/2 4/4; do
    timeout 60 "$launch" -n ${to%/*} "$qwen36" --from mixed --eval-only --val text --seq-len 256 --batch-size 2 --cp ${to#*/} >loss_several 2>err
    timeout 60 "$qwen36" --from mixed --eval-only --val text --seq-len 256 --batch-size 2 >loss 2>err
    check "... --eval-only by ${to%/*} ranks, --cp ${to#*/}: the loss of one" test -n "$(grep 'val loss' loss)" -a "$(grep 'val loss' loss)" = "$(grep 'val loss' loss_several)"
done
rm -rf mixed && "$launch" -n 2 "$v4" "${run[@]}" --config entries.json --cp 2 --run mixed >out 2>err </dev/null
rm -rf several
timeout 60 "$launch" -n 4 "$v4" "${run[@]}" --config entries.json --cp 2 --ep 4 --run several >out 2>err </dev/null
rm -rf several/step_000020
timeout 60 "$launch" -n 4 "$v4" --run several --resume --ep 1 --pp 2 >out 2>err </dev/null
status=$?
same_run mixed several
verdict $? "train_deepseek_v4, written by 4 ranks, --cp 2 --ep 4, resumed by 4, --cp 2 --pp 2" "status $status: $(tail -n 1 err)"
rm -rf several/step_000020
timeout 60 "$v4" --run several --resume --pp 1 >out 2>err </dev/null
check "... one rank goes on from it, with a line, and near its losses" test "$? $(grep -cF -- '--cp 2, asked for earlier, does not fit' err) $(near mixed several >/dev/null 2>&1; echo $?)" = "0 1 0"
timeout 60 "$launch" -n 4 "$v4" --from mixed --eval-only --val text --seq-len 32 --batch-size 2 --cp 4 >loss_several 2>err
timeout 60 "$v4" --from mixed --eval-only --val text --seq-len 32 --batch-size 2 >loss 2>err
check "... --eval-only by 4 ranks, --cp 4: the loss of one" test -n "$(grep 'val loss' loss)" -a "$(grep 'val loss' loss)" = "$(grep 'val loss' loss_several)"
echo "# what it costs"
sends qwen "  keys sent|positions" 2 --cp 2 --config tied.json
sends qwen "  keys sent|positions" 4 --cp 4 --recompute 3 --config tied.json
sends qwen "  keys sent|positions" 4 --cp 2 --tp 2 --config tied.json
sends qwen "  keys sent|positions" 8 --cp 2 --pp 2 --recompute 3 --freeze 'first:1' --config tied.json
sends qwen "  keys sent|positions" 4 --cp 2 --lora-rank 3 --lora-targets q_proj,v_proj,o_proj,gate_proj --config tied.json
sends gpt2 "  keys sent|positions" 4 --cp 2 --recompute 3 --config gpt2.json
sends qwen "  keys sent|positions" 4 --cp 4 --cp-by heads --recompute 3 --config tied.json
sends gpt2 "  keys sent|positions" 2 --cp 2 --cp-by heads --config gpt2.json
sends qwen "  keys sent|positions" 4 --cp 4 --cp-by ring --recompute 3 --config tied.json
sends gpt2 "  keys sent|positions" 2 --cp 2 --cp-by ring --config gpt2.json
sends moe "  keys sent|positions" 4 --cp 2 --config experts.json
SHARE="" sends mamba "  states sent|positions" 4 --cp 2 "${tiny[@]}"
check "... and back, and for how long ranks wait: 1 of 3 + 1 layers" test "$(grep -cE '^\| +idle +\| 25% of an update' out) $(tr -d '|\n' <out | tr -s ' ' | grep -c 'all but the last, [0-9.]* KiB back by all but the first')" = "1 1"
sends mamba "  states sent|positions" 3 --cp 3 --seq-len 15 --recompute layer --freeze first:1 "${tiny[@]}"
sends qwen36 "  keys sent|positions" 2 --cp 2 "${chunks[@]}" --config linear.json
sends qwen36 "  keys sent|positions" 4 --cp 4 "${chunks[@]}" --seq-len 256 --recompute 3 --config mtp.json
sends qwen36 "  keys sent|positions" 4 --cp 2 "${chunks[@]}" --config mtp.json --mtp-weight 0 --cp-by heads
sends qwen36 "  keys sent|positions" 4 --cp 2 --pp 2 "${chunks[@]}" --recompute 3 --freeze 'first:1' --config linear.json
sends v4 "  keys sent|positions" 2 --cp 2 --config entries.json --lora-rank 1 --lora-targets q_a_proj
sends v4 "  keys sent|positions" 4 --cp 4 --recompute 3 --config entries.json
sends v4 "  keys sent|positions" 4 --cp 2 --tp 2 --recompute 3 --config entries.json
sends v4 "  keys sent|positions" 4 --cp 2 --pp 2 --freeze first:1 --config ends.json
sends glm "  keys sent|positions" 2 --cp 2 --config glm_taught.json
sends glm "  keys sent|positions" 4 --cp 4 --recompute 3 --config glm.json --lora-rank 1
sends glm "  keys sent|positions" 4 --cp 2 --tp 2 --recompute 3 --config glm_taught.json
sends glm "  keys sent|positions" 4 --cp 2 --pp 2 --freeze first:1 --config glm.json
sends glm "  keys sent|positions" 2 --cp 2 --config glm.json --seq-len 4 --recompute 3  # all is chosen: nobody asks indexers
echo "# refusals"
go=("${run[@]}" --config dense.json)
refused "--cp-by of no way" "--cp-by" "$launch" -n 2 "$qwen" "${go[@]}" --cp 2 --cp-by rings
refused "without ranks" "--cp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "$qwen" "${go[@]}" --cp 2
refused "that does not divide the ranks" "--cp: 2: expected a number that divides the ranks, 3" "$launch" -n 3 "$qwen" "${go[@]}" --cp 2
refused "... nor what --tp leaves" "--cp: 2: expected a number that divides the ranks that share micro-batches, 1: launch -n 4, or leave out --tp or --cp" \
    "$launch" -n 2 "$qwen" "${go[@]}" --tp 2 --cp 2
refused "... in a plan" "that share micro-batches, 3: --plan 8, or leave out --tp or --cp" "$qwen" "${go[@]}" --plan 6 --tp 2 --cp 2
refused "rows that cannot be cut" "--cp: 2: expected rows of a multiple of 4 positions, found 18: --seq-len 16" "$launch" -n 2 "$qwen" "${go[@]}" --seq-len 18 --cp 2
refused "... however many ranks there are" "--cp: 3: expected rows of a multiple of 6 positions, found 16: --seq-len 12" "$launch" -n 4 "$qwen" "${go[@]}" --cp 3
refused "rows that are too short" "--cp: 4: expected rows of a multiple of 8 positions, found 6: --seq-len 8" "$launch" -n 4 "$qwen" "${go[@]}" --seq-len 6 --cp 4
refused "--cp-by without --cp" "--cp-by: is for --cp" "$launch" -n 2 "$qwen" "${go[@]}" --cp-by heads
refused "heads that cannot be shared" "--cp-by: heads: expected a --cp that divides the heads of queries, found --cp 8" "$launch" -n 8 "$qwen" "${go[@]}" --cp 8 --cp-by heads
refused "--zero 1" "--zero: --cp brings --zero 2: leave it out" "$launch" -n 2 "$qwen" "${go[@]}" --cp 2 --zero 1
refused "dropout" "--cp: is not for dropout" "$launch" -n 2 "$qwen" "${go[@]}" --cp 2 --lora-rank 2 --lora-dropout 0.1
refused "--verify-every" "--verify-every: is not for --cp" "$launch" -n 2 "$qwen" "${go[@]}" --verify-every 2 --cp 2
go36=("${run[@]}" "${chunks[@]}" --config linear.json)
refused "linear layers: rows that cannot be cut" "--cp: 2: expected rows of a multiple of 128 positions, found 192: --seq-len 128" "$launch" -n 2 "$qwen36" "${go36[@]}" --seq-len 192 --cp 2
refused "--cp-by heads: heads of a rank of --tp that cannot be shared" "found --cp 2, 3 heads of queries and 1 of keys: --cp-by gather" "$launch" -n 4 "$qwen36" "${run[@]}" "${chunks[@]}" --config six.json --tp 2 --cp 2 --cp-by heads
refused "linear layers: dropout" "--cp: is not for dropout" "$launch" -n 2 "$qwen36" "${go36[@]}" --cp 2 --lora-rank 2 --lora-dropout 0.1
examples 2 9 "$(seq -s ' ' 18)" "$(seq -s ' ' 2 19)" >in
timeout 60 "$launch" -n 2 "$qwen36" --config linear.json --probe in --probe-out probed --cp 2 >out 2>err </dev/null
check "refused: linear layers: a probe, of images or not" test "$? $(grep -cF -- '--cp: is for training and --eval-only' err)" = "2 1"
refused "Mamba: rows that cannot be cut" "--cp: 3: expected rows of a multiple of 3 positions, found 16: --seq-len 15" "$launch" -n 3 "$mamba" "${run[@]}" "${tiny[@]}" --cp 3
refused "Mamba: Forward-Forward" "--cp: is not for Forward-Forward" "$launch" -n 2 "$mamba" "${run[@]}" "${tiny[@]}" --cp 2 --ff-lr 1e-3
refused "Mamba: --carry-state" "--cp: is not for --carry-state" "$launch" -n 2 "$mamba" "${run[@]}" "${tiny[@]}" --cp 2 --carry-state 1
refused "Mamba: learnt prototypes" "--cp: brings --zero 2" "$launch" -n 2 "$mamba" "${run[@]}" "${tiny[@]}" --cp 2 --head hpn --proto learn --proto-separation 0.1
refused "Mamba: --embeddings-out" "--cp: is not for --embeddings-out" "$launch" -n 2 "$mamba" "${run[@]}" "${tiny[@]}" --cp 2 --embeddings-out e.safetensors
gov4=("${run[@]}" --config entries.json --cp 2)
refused "entries: rows that cannot be cut" "--cp: 2: expected rows of a multiple of 8 positions, found 18: --seq-len 16" "$launch" -n 2 "$v4" "${gov4[@]}" --seq-len 18
refused "entries: dropout" "--cp: is not for dropout" "$launch" -n 2 "$v4" "${gov4[@]}" --lora-rank 2 --lora-dropout 0.1
refused "--noise-scale" "--noise-scale: is not for --cp" "$launch" -n 2 "$qwen" "${go[@]}" --noise-scale 2 --cp 2
timeout 60 "$qwen" --from whole --generate x --max-new-tokens 2 --cp 2 >out 2>err
check "refused: --generate" test "$? $(grep -cF -- '--cp: is for training and --eval-only' err)" = "2 1"
finish
