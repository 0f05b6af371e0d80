#!/usr/bin/env bash
# A base in fp8, fp4 or bf16 on GPUs, as a user runs it, the kernels on this CPU (dev/simt): the four trainers that know adapters, beside
# their C builds. Steps are few and the models are tiny, but wide enough for several blocks of 128 x 128: a GPU's lane is simulated one at
# a time.
#     dev/test_gpu_bases.sh quick   train_qwen3 alone
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
limit=600
trainers=$(is_quick && echo qwen3 || echo qwen3 qwen36 deepseek_v4 glm5)
need_build launch "" launch
for name in $trainers; do need_build c_$name "CPU=1" train_$name; done
build_simt $(printf 'build/simt-exact/train_%s ' $trainers) build/simt-fast/train_qwen3
export SIMT_ORDERS=1  # the race check is test_widen's
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
for i in {1..100}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text  # not a page, which changes
size='"vocab_size":257,"num_hidden_layers":2,"num_attention_heads":4,"max_position_embeddings":48'
experts='"num_experts_per_tok":2,"moe_intermediate_size":96'
echo '{"model_type":"qwen3_moe",'$size',"hidden_size":160,"num_key_value_heads":2,"head_dim":16,"num_experts":4,'$experts',"intermediate_size":136,
"norm_topk_prob":true,"mlp_only_layers":[1]}' >qwen3.json
echo '{"model_type":"qwen3_5_moe_text",'$size',"hidden_size":144,"full_attention_interval":2,"num_key_value_heads":2,"head_dim":40,
"linear_num_key_heads":2,"linear_num_value_heads":2,"linear_key_head_dim":36,"linear_value_head_dim":40,"linear_conv_kernel_dim":4,"num_experts":4,
'$experts',"shared_expert_intermediate_size":140,"rope_parameters":{"partial_rotary_factor":0.5,"mrope_section":[4,3,3]}}' >qwen36.json
echo '{"model_type":"deepseek_v4",'$size',"hidden_size":160,"head_dim":40,"qk_rope_head_dim":4,"q_lora_rank":132,"o_groups":2,"o_lora_rank":34,
"sliding_window":7,"index_n_heads":3,"index_head_dim":6,"index_topk":2,"hc_mult":2,"hc_sinkhorn_iters":2,"n_routed_experts":4,'$experts',
"layer_types":["compressed_sparse_attention","heavily_compressed_attention"],"mlp_layer_types":["hash_moe","moe"],
"compress_rates":{"compressed_sparse_attention":2,"heavily_compressed_attention":4}}' >deepseek_v4.json
write_glm5
edit glm.json glm5.json hidden_size 160 q_lora_rank 132 kv_lora_rank 136 moe_intermediate_size 136 intermediate_size 288
learn=(--lora-rank 3 --train text --batch-size 1 --seq-len 8 --batch-tokens 16 --steps 3 --eval-every 0 --lr 1e-2 --threads 1)

# run NAME COMMAND...: into NAME.out, NAME.err; status
run() {
    local name=$1
    shift
    timeout $limit "$@" >"$name.out" 2>"$name.err" </dev/null
}
adapter() { run "$1" "${@:2}" "${learn[@]}" --run "$1"; }
alike() { cmp {"$1","$2"}/step_000003/adapter_model.safetensors && cmp {"$1","$2"}/step_000003/optimizer.safetensors; }

# both must end well and agree: equal PROMISE RUN RUN
equal() {
    alike "$2" "$3" >err 2>&1
    verdict $? "$1" "$(<err) $(tail -qn 1 "$2.err" "$3.err")"
}
boxed() { grep -q "^| *$2 *| $3 " "$1.out"; }

for name in $trainers; do
    c=c_$name c=${!c} gpu=$root/build/simt-exact/train_$name
    echo "# train_$name, exact build"
    run hf_$name "$c" --config $name.json --export-hf hf_$name
    file=$([ $name = deepseek_v4 ] && echo fp4.py || echo fp8.py)  # as each is published
    scaled=$([ $name = deepseek_v4 ] && echo "fp8, fp4" || echo fp8)
    "$python" "$root/dev/ref/$file" hf_$name release_$name --release floats_$name
    adapter beside_floats_$name "$c" --from floats_$name
    adapter released_$name "$gpu" --from release_$name
    equal "beside a folder in $scaled: the adapter that C finds beside the same floats" beside_floats_$name released_$name
    check "... which stays as it is" boxed released_$name matrices "$scaled and all else as in the files"
    adapter rounded_c_$name "$c" --config $name.json --base-dtype fp8 --act-fp8 1
    adapter rounded_$name "$gpu" --config $name.json --base-dtype fp8 --act-fp8 1
    equal "--base-dtype fp8 --act-fp8 1 of a model drawn at random: the bits of C" rounded_c_$name rounded_$name
    merge=(--from release_$name --lora released_$name/step_000003 --merge 1)
    run merged "$c" "${merge[@]}" --export-hf merged_c_$name && run merged "$gpu" "${merge[@]}" --export-hf merged_$name &&
        cmp merged_c_$name/model.safetensors merged_$name/model.safetensors >err 2>&1
    verdict $? "--merge: the folder that C writes" "$(cat err merged.err | tail -n 2)"
    is_quick && continue
    adapter parts_$name "$launch" -n 2 "$gpu" --from release_$name --tp 2
    equal "matrices on two GPUs, as they are stored: the bits of one" released_$name parts_$name
    adapter experts_$name "$launch" -n 2 "$gpu" --from release_$name --ep 2
    equal "experts on two GPUs: the same" released_$name experts_$name
done

echo "# train_qwen3"
adapter graph "$root/build/simt-exact/train_qwen3" --from release_qwen3 --graph 1
equal "exact: --graph 1 changes no bit" released_qwen3 graph
gpu=$root/build/simt-exact/train_qwen3 fast=$root/build/simt-fast/train_qwen3
adapter halves_c "$c_qwen3" --from hf_qwen3 --base-dtype bf16
adapter halves "$gpu" --from hf_qwen3 --base-dtype bf16
equal "exact: --base-dtype bf16: the bits of C" halves_c halves
"$python" "$root/dev/ref/fp4.py" hf_qwen3 release4 --release floats4 --experts 'experts.*(gate|up)_proj.weight$'
adapter fours_c "$c_qwen3" --from floats4
adapter fours "$gpu" --from release4
equal "exact: beside experts in fp4: the bits of floats" fours_c fours
adapter fours_rounded_c "$c_qwen3" --from release4 --act-fp8 1
adapter fours_rounded "$gpu" --from release4 --act-fp8 1
equal "exact: ... --act-fp8 1: the bits of C" fours_rounded_c fours_rounded
check "... which stay as they are" boxed fours matrices "fp8, fp4 and all else as in the files"
for tool in "$c_qwen3" "$gpu"; do
    run "text_${#tool}" "$tool" --from release_qwen3 --generate "line 7" --max-new-tokens 6 --temperature 0
    run "loss_${#tool}" "$tool" --from release_qwen3 --eval-only --val text --seq-len 15 --batch-size 1 --eval-batches 2 --seed 1
done
check "exact: the text and the loss of C" eval 'cmp text_${#c_qwen3}.out text_${#gpu}.out >err && [ -n "$(grep "val loss" loss_${#gpu}.out)" ] &&
    [ "$(grep "val loss" loss_${#gpu}.out)" = "$(grep "val loss" loss_${#c_qwen3}.out)" ]'
# scales of --base-dtype fp8 are powers of two: a bf16 has each number
"$python" "$root/dev/ref/fp8.py" hf_qwen3 as_bf16 --bf16
adapter fast_halves "$fast" --from as_bf16
adapter fast_eights "$fast" --from hf_qwen3 --base-dtype fp8
equal "bf16 build: --base-dtype fp8 has the bits of the same numbers as bf16" fast_halves fast_eights
kib() { sed -n 's/.*memory: parameters *| \([0-9]*\).*KiB.*/\1/p' "$1.out"; }
check "... in less than three quarters of the memory" test $((4 * $(kib fast_eights))) -lt $((3 * $(kib fast_halves)))
# more rows than few_rows.h takes, so cuBLASLt's stand-in multiplies codes, but those of gate and up, whose 136 rows end in a block
for name in codes_c codes; do
    run $name "$([ $name = codes ] && echo "$fast" || echo "$c_qwen3")" "${learn[@]}" --config qwen3.json --base-dtype fp8 --act-fp8 1 --seq-len 20 --batch-tokens 20 --run $name
done
near() { awk -v x="$(value "$1" 1 loss)" -v y="$(value "$2" 1 loss)" 'BEGIN { exit !(x > 5 && (x - y) ^ 2 < 1e-4) }'; }
check "bf16 build: --act-fp8 1: the loss of C within a hundredth" near codes_c codes
check "... and a line says which products were not done in fp8" \
    grep -q '^slow: 6 products in fp8 by bf16, which cuBLASLt did not take: the first (20, 272) of sums of 160' codes.out codes.err
trainer=$fast
refuse "floats in a bf16 build" "--weights: this build stores bf16: PRECISION=fp32 makes one of floats" --from hf_qwen3 --weights fp32 --generate x
finish
