#!/usr/bin/env bash
# train_gpt2.cu as a user runs it, its kernels on this CPU (dev/simt): the exact build beside train_gpt2, bf16 beside itself, with
# every way to share the work; train_moe.cu with experts on two GPUs; train_qwen36.cu and train_deepseek_v4.cu with all of --tp; train_qwen3.cu, all of it and
# adapters; train_deepseek_v4.cu with entries of two GPUs. Steps are few and the models are tiny: a GPU's lane is simulated one at a time.
#     dev/test_gpus.sh quick   the exact build only, on one and two GPUs
. "$(dirname "$0")/promises.sh"
need_build trainer "" train_gpt2
need_build launch "" launch
simt_builds=$(is_quick && echo exact || echo exact fast)
build_simt $(printf 'build/simt-%s/train_gpt2cu ' $simt_builds)
exact=$root/build/simt-exact/train_gpt2cu
fast=$root/build/simt-fast/train_gpt2cu
export SIMT_ORDERS=1  # the race check is test-simt's
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
for i in {1..100}; do echo "line $i: the plain loop is the law, and $i times $i is $((i * i))."; done >text  # not a page, which changes
cat >tiny.json <<'JSON'
{"model_type": "gpt2", "activation_function": "gelu_new", "n_positions": 24, "vocab_size": 257, "n_layer": 3, "n_head": 2,
 "n_embd": 32, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true}
JSON
options="--config tiny.json --train text --batch-size 2 --seq-len 16 --batch-tokens 96 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"

# same RUN RUN: parameters and moments after the third step have the same bits
same() { cmp "$1/step_000003/model.safetensors" "$2/step_000003/model.safetensors" && cmp "$1/step_000003/optimizer.safetensors" "$2/step_000003/optimizer.safetensors"; }

# train RUN COMMAND...: three steps
train() {
    local run=$1
    shift
    "$@" $options --run "$run" >"$run.out" 2>"$run.err"
}

# both must end well and agree: equal PROMISE RUN RUN
equal() { check "$1" same "$2" "$3"; }

train c "$trainer"
train exact "$exact"
equal "exact build: the bits of train_gpt2" c exact
train graph "$exact" --graph 1
equal "exact: --graph 1 changes no bit" exact graph
# rows of several documents: attention, RoPE and embedding are launched for all of them at once
mkdir pages && for i in {1..20}; do head -c $((200 + i * 37)) text | tail -c $((30 + i * 29 % 120)) >pages/page_$i; done
mkdir notes && for i in {1..40}; do head -c $((200 + i * 37)) text | tail -c $((2 + i * 5 % 9)) >notes/note_$i; done
n_calls() { sed -n 's/.*simt: \([0-9]*\) calls.*/\1/p' "$1.err"; }
few_more() { [ "$(n_calls "$1")" -gt 0 ] && [ "$(n_calls "$2")" -le $(($(n_calls "$1") + 12 * 9)) ]; }  # of 9 micro-batches
train notes_c "$trainer" --train notes --doc-reset 1
SIMT_COUNT=1 train notes "$exact" --train notes --doc-reset 1
equal "exact, --doc-reset 1: the bits of train_gpt2" notes_c notes
SIMT_COUNT=1 train notes_whole "$exact" --train notes
check "... with hardly more launches than without" few_more notes_whole notes
train notes_graph "$exact" --train notes --doc-reset 1 --graph 1
equal "... and --graph 1, wherever documents begin, changes no bit" notes notes_graph
if is_quick; then
    train recomputed "$exact" --recompute 3
    equal "exact: --recompute 3 changes no bit" exact recomputed
    train shared "$launch" -n 2 "$exact" --zero 2
    equal "exact: two GPUs, --zero 2: the bits of one" exact shared
    train parts "$launch" -n 2 "$exact" --tp 2
    equal "exact: matrices on two GPUs: the bits of one" exact parts
    train positions "$launch" -n 2 "$exact" --cp 2
    need_build gpt2_c "CPU=1" train_gpt2cu
    train positions_c "$launch" -n 2 "$gpt2_c" --cp 2
    equal "exact: positions on two GPUs: the bits of two CPUs" positions_c positions
    train staged "$launch" -n 2 "$exact" --pp 2
    equal "exact: layers on two GPUs: the bits of one" exact staged
    finish
    exit
fi
sed 's/"n_layer": 3/"n_layer": 4/' tiny.json >deep.json
deep() { local options="${options/tiny.json/deep.json}"; options=${options/-tokens 96/-tokens 128}; train "$@"; }
deep deep_one "$exact"
deep deep_chunks "$launch" -n 2 "$exact" --pp 2 --pp-chunks 2
equal "exact: four stages on two GPUs: the bits of one" deep_one deep_chunks
# train_moe: experts on two GPUs; with matrices on two, on four
experts_of_gpus() {
    need_build experts_c "CPU=1" train_moe
    build_simt build/simt-exact/train_moe
    experts_gpu=$root/build/simt-exact/train_moe
    cat >wide.json <<'JSON'
    {"model_type": "mixtral", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
     "head_dim": 8, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 24, "rope_theta": 10000}
JSON
    experts() {  # RUN COMMAND...
        local options="--config wide.json --train text --batch-size 1 --seq-len 8 --batch-tokens 16 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    experts experts_c "$experts_c"
    experts experts_one "$experts_gpu"
    equal "train_moe, exact build: the bits of C" experts_c experts_one
    experts experts_two "$launch" -n 2 "$experts_gpu" --ep 2
    equal "train_moe, exact: experts on two GPUs: the bits of one" experts_one experts_two

    cat >heads.json <<'JSON'
    {"model_type": "mixtral", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
     "head_dim": 8, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 24, "rope_theta": 10000}
JSON
    heads() {  # RUN COMMAND...
        local options="--config heads.json --train text --batch-size 1 --seq-len 7 --batch-tokens 14 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    heads heads_c "$experts_c"
    heads heads_parts "$launch" -n 4 "$experts_gpu" --tp 2 --ep 4
    equal "train_moe, exact: matrices on two GPUs, experts on four: the bits of C" heads_c heads_parts
}
if in_turn; then experts_of_gpus; fi

# train_qwen36: both kinds of layers and MTP; matrices on two GPUs, experts on four
layers_of_gpus() {
    need_build qwen36_c "CPU=1" train_qwen36
    build_simt build/simt-exact/train_qwen36
    cat >hybrid.json <<'JSON'
    {"model_type": "qwen3_5_moe_text", "vocab_size": 257, "hidden_size": 64, "num_hidden_layers": 2, "full_attention_interval": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
     "linear_key_head_dim": 5, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
     "moe_intermediate_size": 64, "shared_expert_intermediate_size": 12, "max_position_embeddings": 24, "mtp_num_hidden_layers": 1,
     "output_router_logits": true, "rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}}
JSON
    hybrid() {  # RUN COMMAND...
        local options="--config hybrid.json --train text --batch-size 1 --seq-len 8 --batch-tokens 16 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    hybrid hybrid_c "$qwen36_c"
    hybrid hybrid_parts "$launch" -n 4 "$root/build/simt-exact/train_qwen36" --tp 2 --ep 4
    equal "train_qwen36, exact: matrices on two GPUs, experts on four: the bits of C" hybrid_c hybrid_parts
}
if in_turn; then layers_of_gpus; fi

# train_deepseek_v4: both kinds of entries, an indexer that learns and MTP; heads on two GPUs, experts on four
streams_of_gpus() {
    need_build v4_c "CPU=1" train_deepseek_v4
    build_simt build/simt-exact/train_deepseek_v4
    cat >streams.json <<'JSON'
    {"model_type": "deepseek_v4", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 24,
     "num_attention_heads": 4, "head_dim": 6, "qk_rope_head_dim": 4, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 5, "sliding_window": 3,
     "index_n_heads": 3, "index_head_dim": 6, "index_topk": 2, "hc_mult": 2, "hc_sinkhorn_iters": 3, "n_routed_experts": 4,
     "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_nextn_predict_layers": 1, "indexer_train": "kl",
     "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "mlp_layer_types": ["hash_moe", "moe"],
     "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}}
JSON
    streams() {  # RUN COMMAND...
        local options="--config streams.json --train text --batch-size 1 --seq-len 8 --batch-tokens 16 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    streams streams_c "$v4_c"
    streams streams_parts "$launch" -n 4 "$root/build/simt-exact/train_deepseek_v4" --tp 2 --ep 4
    equal "train_deepseek_v4, exact: matrices on two GPUs, experts on four: the bits of C" streams_c streams_parts
}
if in_turn; then streams_of_gpus; fi

# train_qwen3: all parameters of one with experts, adapters beside a dense one
need_build qwen_c "CPU=1" train_qwen3
build_simt build/simt-exact/train_qwen3 build/simt-fast/train_qwen3
qwen_gpu=$root/build/simt-exact/train_qwen3
qwen_fast=$root/build/simt-fast/train_qwen3
heads='"vocab_size": 257, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 24'
cat >sparse.json <<JSON
{"model_type": "qwen3_moe", $heads, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
 "norm_topk_prob": true, "mlp_only_layers": [1], "output_router_logits": true, "router_aux_loss_coef": 0.02}
JSON
echo "{\"model_type\": \"qwen3\", $heads, \"hidden_size\": 32, \"num_hidden_layers\": 3, \"tie_word_embeddings\": true}" >dense.json
sparse() {  # RUN COMMAND...
    local options="--config sparse.json --train text --batch-size 1 --seq-len 8 --batch-tokens 16 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
    train "$@"
}
sparse sparse_c "$qwen_c"
sparse sparse_one "$qwen_gpu"
equal "train_qwen3 with experts, exact build: the bits of C" sparse_c sparse_one
sparse sparse_two "$launch" -n 2 "$qwen_gpu" --ep 2
equal "train_qwen3, exact: experts on two GPUs: the bits of one" sparse_one sparse_two
sparse sparse_stages "$launch" -n 2 "$qwen_gpu" --pp 2
equal "train_qwen3, exact: a layer on each of two GPUs: the bits of one" sparse_one sparse_stages

# train_qwen36: states of linear layers, and what is asked of them, go from GPU to GPU
states_of_gpus() {
    need_build mixed_c "CPU=1" train_qwen36
    build_simt build/simt-exact/train_qwen36 build/simt-fast/train_qwen36
    mixed_gpu=$root/build/simt-exact/train_qwen36
    mixed_fast=$root/build/simt-fast/train_qwen36
    echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"full_attention_interval":2,"num_attention_heads":2,
    "num_key_value_heads":1,"head_dim":8,"linear_num_key_heads":1,"linear_num_value_heads":2,"linear_key_head_dim":4,"linear_value_head_dim":4,
    "linear_conv_kernel_dim":4,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,"shared_expert_intermediate_size":8,
    "max_position_embeddings":128,"rope_parameters":{"partial_rotary_factor":0.5,"mrope_section":[1,1,0]},"mtp_num_hidden_layers":1}' >mixed.json
    mixed() {  # RUN COMMAND...
        local options="--config mixed.json --train pages --doc-reset 1 --batch-size 1 --seq-len 128 --batch-tokens 128 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    mixed mixed_two_c "$launch" -n 2 "$mixed_c" --cp 2
    mixed mixed_two "$launch" -n 2 "$mixed_gpu" --cp 2
    equal "train_qwen36, exact: positions on two GPUs: the bits of two CPUs" mixed_two_c mixed_two
    mixed mixed_fast "$launch" -n 2 "$mixed_fast" --cp 2
    mixed mixed_staged "$launch" -n 2 "$mixed_fast" --cp 2 --recompute 3
    equal "train_qwen36, bf16: --recompute 3 beside it changes no bit" mixed_fast mixed_staged
    mixed mixed_mtp "$mixed_fast" --graph 1
    check "... MTP, which counts other targets in other documents: no --graph beside --doc-reset" test $? = 2 -a "$(grep -c -- '--graph: is not for --doc-reset' mixed_mtp.err)" = 1
    sed 's/,"mtp_num_hidden_layers":1//' mixed.json >no_mtp.json
    documents() { local options="--config no_mtp.json --train pages --doc-reset 1 --batch-size 1 --seq-len 64 --batch-tokens 128 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"; train "$@"; }
    documents documents_plain "$mixed_fast"
    documents documents_graph "$mixed_fast" --graph 1
    equal "train_qwen36, bf16: --graph 1 changes no bit wherever documents begin" documents_plain documents_graph
}
if in_turn; then states_of_gpus; fi

# train_deepseek_v4: keys, entries and what is asked of them, in documents whose entries have tokens of two GPUs
entries_of_gpus() {
    need_build entries_c "CPU=1" train_deepseek_v4
    build_simt build/simt-exact/train_deepseek_v4
    echo '{"model_type":"deepseek_v4","vocab_size":257,"hidden_size":16,"num_hidden_layers":2,"max_position_embeddings":48,"num_attention_heads":4,
    "head_dim":8,"qk_rope_head_dim":4,"q_lora_rank":10,"o_groups":2,"o_lora_rank":6,"sliding_window":7,"index_n_heads":3,"index_head_dim":6,
    "index_topk":2,"hc_mult":2,"hc_sinkhorn_iters":2,"n_routed_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":8,
    "layer_types":["compressed_sparse_attention","heavily_compressed_attention"],"mlp_layer_types":["hash_moe","moe"],"seq_balance_coef":0.1,
    "compress_rates":{"compressed_sparse_attention":2,"heavily_compressed_attention":4},"indexer_train":"kl"}' >entries.json
    entries() {  # RUN COMMAND...
        local options="--config entries.json --train pages --doc-reset 1 --batch-size 2 --seq-len 16 --batch-tokens 32 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
        train "$@"
    }
    entries entries_two_c "$launch" -n 2 "$entries_c" --cp 2
    entries entries_two "$launch" -n 2 "$root/build/simt-exact/train_deepseek_v4" --cp 2
    equal "train_deepseek_v4, exact: positions on two GPUs: the bits of two CPUs" entries_two_c entries_two
}
if in_turn; then entries_of_gpus; fi

# an adapter's run has no model.safetensors, but its A and B
same_adapter() { cmp "$1/step_000003/adapter_model.safetensors" "$2/step_000003/adapter_model.safetensors" && cmp "$1/step_000003/optimizer.safetensors" "$2/step_000003/optimizer.safetensors"; }
"$qwen_c" --config dense.json --export-hf base --tokenizer bytes >out 2>err
adapt() {  # RUN COMMAND...
    local options="--from base --train text --batch-size 2 --seq-len 16 --batch-tokens 96 --steps 3 --eval-every 0 --lr 1e-2 --threads 1 --lora-rank 4 --lora-rank-pattern v_proj=2 --overfit 1"
    train "$@"
}
adapt lora_c "$qwen_c" --lora-dropout 0.3
adapt lora_one "$qwen_gpu" --lora-dropout 0.3
check "LoRA with dropout, exact build: the bits of C" same_adapter lora_c lora_one
tied() {  # RUN COMMAND...
    local options="--config dense.json --train text --batch-size 1 --seq-len 8 --batch-tokens 24 --steps 3 --eval-every 0 --lr 1e-2 --threads 1"
    train "$@"
}
tied tied_c "$qwen_c"
tied tied_parts "$launch" -n 4 "$qwen_gpu" --tp 2
equal "train_qwen3, exact: matrices on two of four GPUs: the bits of C" tied_c tied_parts
tied positions_c "$launch" -n 2 "$qwen_c" --cp 2
tied positions "$launch" -n 4 "$qwen_gpu" --cp 2 --tp 2
equal "train_qwen3, exact: positions and matrices on four GPUs: the bits of C" positions_c positions
tied positions_fast "$launch" -n 2 "$qwen_fast" --cp 2
tied positions_staged "$launch" -n 4 "$qwen_fast" --cp 2 --pp 2
equal "train_qwen3, bf16: positions on two GPUs, two stages: the bits of one stage" positions_fast positions_staged
tied tied_fast "$qwen_fast"
tied tied_stages "$launch" -n 4 "$qwen_fast" --pp 2 --zero 2
equal "train_qwen3, bf16: two stages on four GPUs, the embedding on both: the bits of one" tied_fast tied_stages
tied tied_both "$launch" -n 8 "$qwen_fast" --pp 2 --tp 2 --zero 2
tied tied_parts_fast "$launch" -n 2 "$qwen_fast" --tp 2
equal "train_qwen3, bf16: two stages, matrices on two GPUs each, on eight: the bits of --tp 2 on two" tied_parts_fast tied_both
loss_of() { sed -nE 's/.*"step": 3, "loss": ([0-9.]+).*/\1/p' $1/metrics.jsonl | tail -n 1; }
check "... and nearly those of one: it rounds sums over the vocabulary at another place" \
    awk -v a="$(loss_of tied_fast)" -v b="$(loss_of tied_both)" 'BEGIN { exit !(a > 0 && b > 0 && a / b < 1.005 && b / a < 1.005) }'
"$launch" -n 2 "$qwen_fast" --run tied_both --resume --tp 2 --pp 1 --steps 5 >tied_both.out 2>&1
"$launch" -n 4 "$qwen_fast" --run tied_parts_fast --resume --tp 2 --pp 2 --zero 2 --steps 5 >tied_parts_fast.out 2>&1
check "... and goes on from either with the same bits, rounded by the noise of one" cmp tied_both/step_000005/model.safetensors tied_parts_fast/step_000005/model.safetensors
adapt lora_two "$launch" -n 2 "$qwen_gpu" --lora-dropout 0.3 --zero 2 --recompute 3
check "LoRA, exact: two GPUs, --zero 2 --recompute 3: the bits of one" same_adapter lora_one lora_two
sparse lora_experts_c "$qwen_c" --lora-rank 2 --lora-parameters mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight --lora-targets q_proj
sparse lora_experts "$qwen_gpu" --lora-rank 2 --lora-parameters mlp.experts.gate_up_proj,mlp.experts.down_proj,mlp.gate.weight --lora-targets q_proj
check "LoRA of experts and router, exact build: the bits of C" same_adapter lora_experts_c lora_experts
adapt refused "$qwen_gpu" --lora-dropout 0.3 --graph 1
check "--graph with --lora-dropout: status 2, and a line says why" test $? = 2 -a "$(grep -c 'train_qwen3: --graph: is not for --lora-dropout' refused.err)" = 1
for program in c gpu; do
    one=qwen_$program
    "${!one}" --from base --lora lora_c --generate "The " --max-new-tokens 8 --temperature 0 >text_$program 2>err
    "${!one}" --from base --lora lora_c --merge 1 --export-hf merged_$program >out 2>err
done
check "--lora --generate: the text of C" cmp text_c text_gpu
check "--merge --export-hf: the file of C" cmp merged_c/model.safetensors merged_gpu/model.safetensors
for build in gpu fast; do
    program=qwen_$build
    adapt lora_$build "${!program}"
    adapt graph_$build "${!program}" --graph 1 --recompute 2
    check "LoRA, $build: --graph 1 --recompute 2 changes no bit" same_adapter lora_$build graph_$build
done
adapt lora_fast_two "$launch" -n 2 "$qwen_fast" --zero 1
check "LoRA, bf16: two GPUs, --zero 1: the bits of one" same_adapter lora_fast lora_fast_two

# --plan with a card: no GPU is asked for anything
cat >large.json <<JSON
{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
 "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": true}
JSON
plan() { timeout 60 "$qwen_fast" --config large.json --seq-len 4096 --batch-size 1 --recompute 2 "$@" >out 2>err; }
plan --plan 64 --plan-card h200 --ep 8 --pp 8 --grad-accum 512
check "--plan of 30B on 64 cards: eight stages fit" test "$? $(grep -c 'at most of 140.4 - 2 GiB: it fits' out) $(grep -cE '^ +[0-7] ' out) $(wc -c <err)" = "0 1 8 0"
seconds() { sed -nE "s/^\| $1 +\| ([0-9.e-]+) s.*/\1/p" out; }
check "... an update is the sum of its parts" awk -v a="$(seconds products)" -v b="$(seconds 'stages wait')" -v c="$(seconds gradients)" -v d="$(seconds streams)" \
    -v e="$(seconds 'rows of experts')" -v all="$(seconds 'an update')" 'BEGIN { n = a + b + c + d + e; exit !(a > 0 && b > 0 && c > 0 && d > 0 && e > 0 && n / all < 1.01 && all / n < 1.01) }'
work_of=$(sed -nE 's/^\| work +\| ([0-9.]+)B FLOP.*/\1/p' out)
plan --plan 64 --plan-card h200 --plan-rate 0.5 --ep 8 --grad-accum 512
check "... products are FLOPs of 8 micro-batches at half the card's peak" awk -v work="$work_of" -v s="$(seconds products)" \
    'BEGIN { n = work * 1e9 * 8 * 4096 / (0.5 * 989e12); exit !(n / s < 1.01 && s / n < 1.01) }'
check "... over the network now" test "$(grep -c '^| gradients .*at 50 GB/s' out) $(grep -c '^| rows of experts .*at 450 GB/s' out)" = "1 1"
plan --plan 1 --plan-card A100
check "30B on one card: status 1, and a line" test "$? $(grep -c 'it does not fit' out) $(grep -c 'train_qwen3: needs .* of memory, a card has 78.00 GiB: try --recompute 3 with --.* on [0-9]* cards.*, or a smaller model$' err) $(wc -l <err)" = "1 1 1 1"
# heads of keys that ranks share: each computes the way back of all of a group's, 2/3 of attention's FLOP
work_of() { sed -nE 's/^\| work +\| ([0-9.]+)B FLOP.*/\1/p' out; }
long() { timeout 60 "$qwen_fast" --model qwen3-8b --batch-size 1 --grad-accum 8 --recompute 3 --plan 16 --tp 16 --plan-card H200 --seq-len "$@" >out 2>err; }
long 16384 && half=$(work_of) && long 32768
check "--plan-card: attention by 16 ranks with 8 heads of keys" awk -v half="$half" -v work="$(work_of)" -v s="$(seconds products)" \
    'BEGIN { n = (work + 2 * (work - half) * 2 / 3) * 1e9 * 8 * 32768 / 16 / (0.4 * 989e12); exit !(n / s < 1.01 && s / n < 1.01) }'
# remedies: of several ranks --zero 1, which costs nothing; nothing that is on; numbers that divide
tried() {  # PROMISE REMEDY OPTION...
    timeout 60 "$qwen_fast" --model qwen3-8b --batch-size 1 --grad-accum 8 --seq-len 4096 --recompute 3 "${@:3}" >out 2>err
    check "remedy: $1" test "$? $(grep -cE -- "has [0-9.]+ GiB: try $2$" err)" = "1 1"
}
tried "8 cards: --zero 1" '--zero 1 \([0-9.]+ GiB in all\)' --plan 8 --plan-card H200
tried "with less memory --recompute 3 besides" '--recompute 3 with --zero 1 \([0-9.]+ GiB in all\)' --plan 8 --plan-card A100 --seq-len 32768 --recompute 1
tried "beside --zero 2 more cards alone, or another grid" 'the same on 3 cards, .*, or a smaller model' --plan 2 --plan-card H100 --zero 2
tried "of groups a multiple" '.*--zero 2 on 4( cards)?[, ].*or a smaller model' --plan 2 --plan-card H100 --tp 2 --seq-len 32768
tried "of stages more" '--pp [4-6] on [4-6] cards, or a smaller model' --plan 3 --plan-card H100 --pp 3 --optimizer muon
build_simt build/simt-fast/bench/gemm_algorithms
row='^    \{"[^"]+", [0-9]+, [0-9]+, \{([0-9]+, ){10}[0-9]+\}, \{([0-9]+, ){8}[0-9]+\}\},  // '
"$root/build/simt-fast/bench/gemm_algorithms" --small --all >out 2>err
check "a row of gemm_algorithms.h for each of the 15 products of a step" test "$? $(grep -cE "$row" out) $(wc -l <out)" = "0 15 15"
declined() {  # PROMISE TEXT COMMAND...
    timeout 60 "${@:3}" --config sparse.json >out 2>err
    check "refused: $1" test "$? $(grep -cF -- "$2" err) $(wc -l <err)" = "2 1 1"
}
declined "a card of which nobody knows the links" "--plan-card: L4: expected one of H100, H200, A100, B200" "$qwen_fast" --plan 2 --plan-card L4
declined "a card whose name is part of another's" "--plan-card: GB200: expected one of H100" "$qwen_fast" --plan 2 --plan-card GB200
declined "--plan-card of a build in floats" "--plan-card: is for a build in bf16" "$qwen_gpu" --plan 2 --plan-card H200
declined "--plan by one of several processes" "--plan: is said by one process" env RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "$qwen_gpu" --plan 2
declined "--plan-card without --plan" "--plan-card: is for --plan W" "$qwen_fast" --plan-card H200 --dry-run

train fast "$fast"
check "bf16: no product and no attention falls back to a plain kernel" test "$(grep -c '^slow: ' fast.out)" = 0
sed 's/"n_embd": 32/"n_embd": 22/' tiny.json >odd.json
odd() { local options=${options/tiny.json/odd.json}; train "$@"; }
odd odd "$fast"
check "bf16, rows of 44 bytes: the end says how many fell back" test "$(grep -cE '^slow: [0-9]+ (products|GELUs apart|attentions)' odd.out)" = 3
check "bf16: the first line and the box name the build" test "$(head -n 1 fast.out | cut -c1-24) $(grep -c "^. build .*bf16" fast.out)" = "train_gpt2cu: fast build 1"
close() {  # RUN RUN FALL: the losses within 1% of each other, and the third lower than the first by so much
    "$python" - "$@" <<'PYTHON'
import json, sys
a, b = ([json.loads(line)["loss"] for line in open(run + "/metrics.jsonl") if '"loss": null' not in line and "schema" not in line] for run in sys.argv[1:3])
sys.exit(not (len(a) == len(b) == 3 and all(abs(x / y - 1) < 0.01 for x, y in zip(a, b)) and a[2] < a[0] - float(sys.argv[3])))
PYTHON
}
check "bf16: the loss falls as train_gpt2's does" close fast c 0.3
check "LoRA, bf16: the loss falls as the exact build's does" close lora_fast lora_gpu 0.05

for build in exact fast; do
    program=${!build}
    train $build-apart "$program" --gelu-fusion 0
    for level in 1 2 3; do
        train $build-r$level "$program" --gelu-fusion 0 --recompute $level
        equal "$build: --recompute $level changes no bit" $build-apart $build-r$level
    done
    for zero in 0 1 2; do
        train $build-z$zero "$launch" -n 2 "$program" --gelu-fusion 0 --zero $zero --recompute $zero
        equal "$build: two GPUs, --zero $zero: the bits of one" $build-apart $build-z$zero
    done
    train $build-p3 "$launch" -n 3 "$program" --zero 2
    equal "$build: three GPUs, --zero 2: the bits of one" $build $build-p3
    train $build-stages "$launch" -n 3 "$program" --gelu-fusion 0 --pp 3 --recompute 2
    equal "$build: a layer on each of three GPUs: the bits of one" $build-apart $build-stages
done
train fused-3 "$fast" --gelu-fusion 2 --recompute 3
equal "bf16: --gelu-fusion 2 is the default, and --recompute 3 changes no bit of it" fast fused-3
train backward-1 "$fast" --recompute 1
train backward-2 "$fast" --recompute 2
equal "bf16: with --recompute 1 and 2 backward alone is fused" backward-1 backward-2
equal "exact: --gelu-fusion changes no bit" exact exact-apart
train forward "$fast" --gelu-fusion 1
check "bf16: each part of --gelu-fusion rounds in its own place" test "$(same fast-apart forward >/dev/null 2>&1; echo $?) $(same forward fast >/dev/null 2>&1; echo $?)" = "1 1"
"$fast" $options --gelu-fusion 1 --recompute 1 >out 2>err
check "--gelu-fusion 1 with --recompute 1: status 2, one line" test $? = 2 -a "$(wc -l <err)" = 1
for bad in "--zero 2" "--batch-tokens 64" "--dropout 0.1"; do  # 64: one micro-batch on each rank
    "$launch" -n 2 "$fast" $options $bad --graph 1 --run refused >out 2>err
    check "--graph with $bad on two GPUs: status 2, and a line says why" test $? = 2 -a "$(grep -c 'train_gpt2cu: --graph: ' err)" = 1
done
train counted env SIMT_COUNT=1 "$fast"
train graphs env SIMT_COUNT=1 "$fast" --graph 1
equal "bf16: --graph 1 changes no bit" fast graphs
calls() { sed -n 's/.*simt: \([0-9]*\) calls.*/\1/p' "$1.err"; }
check "--graph 1: fewer than half as many calls in three steps" test $((2 * $(calls graphs))) -lt "$(calls counted)"
six() { local options="$options --batch-size 1" && train "$@"; }  # micro-batches, three on each of two GPUs
six graph-2 "$launch" -n 2 "$fast" --graph 1
six plain-2 "$launch" -n 2 "$fast"
equal "bf16: --graph 1 on two GPUs, whose last micro-batch is no graph, changes no bit" plain-2 graph-2
train begun-graph "$fast" --graph 1 --save-every 2
rm -r begun-graph/step_000003 && "$launch" -n 2 "$fast" --resume --run begun-graph --zero 2 >out 2>err
equal "bf16: begun with --graph 1, the third step on two GPUs with --zero 2, which has none: the same bits" fast begun-graph
train small-head "$exact" --head-rows 5
equal "exact: --head-rows 5 changes no bit" exact small-head
train nomaster "$fast" --master-weights 0
train nomaster-2 "$launch" -n 2 "$fast" --master-weights 0 --zero 1
equal "bf16 without masters: two GPUs have the bits of one" nomaster nomaster-2

# the box: the largest --batch-size that it names fits, one more does not, and --recompute 3 holds what it says
dry() { "$fast" --model d12 --dry-run "$@" >out 2>err; }
dry --batch-size 1000
too_large=$?
largest=($(tr -d ';' <out | awk '/largest batch-size/ { print $5, $9 }'))
check "a batch too large: status 1, and the remedy names --recompute 3" test $too_large = 1 -a -n "$(grep 'try .*--recompute 3' err)"
for recompute in 0 3; do
    rows=${largest[$((recompute / 3))]}
    dry --recompute $recompute --batch-size "$rows" && fits=yes || fits=no
    dry --recompute $recompute --batch-size $((rows + 1)) && more=yes || more=no
    check "--recompute $recompute: the largest batch-size of the box is the largest" test $fits-$more = yes-no
done

# resume: two steps on two GPUs with --zero 2, the third on one; checkpoints go from trainer to trainer
resumed() {  # RUN PROGRAM: its third step again
    rm -r "$1/step_000003" && "$2" --resume --run "$1" --zero 0 >out 2>err
}
train halted "$launch" -n 2 "$fast" --zero 2 --save-every 2
resumed halted "$fast"
equal "bf16: two steps on two GPUs, the third on one: the bits of never having stopped" fast halted
train begun-cu "$exact" --save-every 2
resumed begun-cu "$trainer"
equal "begun by train_gpt2cu, continued by train_gpt2: the same bits" c begun-cu
train begun-c "$trainer" --save-every 2
resumed begun-c "$exact"
equal "begun by train_gpt2, continued by train_gpt2cu: the same bits" c begun-c

"$trainer" --from c --generate "The " --max-new-tokens 8 --temperature 0 >text-c 2>err
"$exact" --from c --generate "The " --max-new-tokens 8 --temperature 0 >text-cu 2>err
check "--generate: the text of train_gpt2" cmp text-c text-cu
"$exact" --from exact --export-hf hf >out 2>err && "$trainer" --from exact --export-hf hf-c >out 2>err
check "--export-hf: the files of train_gpt2" cmp hf/model.safetensors hf-c/model.safetensors
finish
