#!/usr/bin/env bash
# --pp: layers on several ranks, of train_gpt2, train_qwen3, train_qwen36, train_moe and train_glm5 as their user starts them: the bytes of one
# rank, whatever the stages, the ranks that share them, what is kept and what learns; checkpoints that any number of ranks goes on from; refusals. COMM_CHECK=1:
# no rank may come by another call than its neighbour. About two minutes of one core after the build.
#     dev/test_stages.sh quick   a few of each kind
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1 COMM_CHECK=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
need_build gpt2 "" train_gpt2
need_build qwen "CPU=1" train_qwen3
need_build qwen36 "CPU=1" train_qwen36
need_build moe "CPU=1" train_moe
need_build glm "CPU=1" train_glm5
need_build launch "" launch
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts
write_configs 5 5 '[1, 3]'
edit experts.json tied_experts.json tie_word_embeddings true
edit experts.json four.json num_local_experts 4 hidden_size 64 intermediate_size 64
edit sparse.json wide.json num_experts 4 hidden_size 64 moe_intermediate_size 64
edit wide.json all_wide.json num_experts_per_tok 4  # each expert has as many rows as the others
# linear and full layers in turn
echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":20,"num_hidden_layers":5,"full_attention_interval":2,"num_attention_heads":4,
"num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":5,"linear_value_head_dim":6,
"linear_conv_kernel_dim":4,"num_experts":5,"num_experts_per_tok":2,"moe_intermediate_size":10,"shared_expert_intermediate_size":12,
"max_position_embeddings":96,"rope_parameters":{"rope_theta":10000,"partial_rotary_factor":0.5,"mrope_section":[1,1,0]},
"output_router_logits":true,"router_aux_loss_coef":0.02}' >linear.json
edit linear.json tied_linear.json tie_word_embeddings true
edit linear.json wide_linear.json num_experts 4 hidden_size 64 moe_intermediate_size 64
write_glm5
edit glm_taught.json glm_detached.json mtp_detach true
edit glm_taught.json glm_each.json indexer_types '["full","full","full","full","full"]'
run=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --grad-accum 5 --steps 4 --val-fraction 0.1 --eval-every 2 --eval-batches 3
     --sample-every 4 --max-new-tokens 8 --save-every 2)

stages() { on_ranks "$1" --pp "${@:2}"; }  # TRAINER PROMISE RANKS/STAGES... OPTION...

# going_on RANKS/STAGES/GROUP/CHUNKS RANKS/STAGES/GROUP/CHUNKS: written by these ranks, --pp, --ep and --pp-chunks, resumed by those; `whole`
# is one rank's run
going_on() {
    local ranks size group chunks status
    rm -rf several
    IFS=/ read -r ranks size group chunks <<<"$1"
    timeout 60 "$launch" -n $ranks "$qwen" "${going[@]}" --pp $size ${group:+--ep $group} ${chunks:+--pp-chunks $chunks} --run several >out 2>err </dev/null
    rm -rf several/step_000004
    IFS=/ read -r ranks size group chunks <<<"$2"
    timeout 60 "$launch" -n $ranks "$qwen" --run several --resume --pp $size ${group:+--ep $group} ${chunks:+--pp-chunks $chunks} --export-hf exported >out 2>err </dev/null
    status=$?
    same_run whole several && cmp -s {whole,exported}/model.safetensors
    verdict $? "written by $1, resumed and exported by $2 (ranks/stages/ranks that share experts/chunks)" "status $status: $(tail -n 1 err)"
    rm -rf exported
}

if is_quick; then
    stages gpt2 "GPT-2" "3/3" --config gpt2.json --dropout 0.1
    stages qwen "output matrix = embedding" "2/2 4/2/--zero,2" --config tied.json --ema 0.9
    stages qwen "experts, balanced over all stages" "3/3/--recompute,3" --config sparse.json
    stages moe "routers that learn by counting" "4/2/--zero,1" --config experts.json --balance bias
    stages qwen36 "linear and full layers" "3/3/--recompute,3" --config tied_linear.json
    stages gpt2 "stages in chunks" "2/2/--pp-chunks,2 4/2/--zero,2,--pp-chunks,2" --config gpt2.json --dropout 0.1 --grad-accum 4
    finish
    exit
fi
answers 7 text >examples
stages gpt2 "GPT-2 with dropout" "2/2 3/3 5/5 8/4 4/2/--zero,1 6/2/--zero,2" --config gpt2.json --dropout 0.1 --hellaswag examples
stages gpt2 "GPT-2, documents, a stage that does not learn" "2/2 5/5" --config gpt2.json --train documents --doc-reset 1 --freeze first:2 --ema 0.9
stages qwen "dense, answering examples" "2/2 3/3 4/4 5/5 4/2 6/2/--zero,1 4/2/--zero,2" --config dense.json --hellaswag examples
stages qwen "output matrix = embedding" "2/2 3/3 5/5 8/4 6/3/--zero,2 4/2/--zero,1" --config tied.json --ema 0.9
stages qwen "biases and windows" "2/2 5/5 3/3/--recompute,3" --config bias.json
stages qwen "conversations" "3/3" --config dense.json --train talks.jsonl --chat-template chatml --seq-len 96
stages qwen "documents" "2/2" --config dense.json --train documents --doc-reset 1
stages qwen "experts, balanced over all stages" "2/2 3/3 5/5 4/2/--zero,2 2/2/--recompute,0 3/3/--recompute,3" --config sparse.json
stages qwen "an adapter with dropout" "2/2 3/3 4/2/--zero,2" --config tied.json --lora-rank 3 --lora-dropout 0.3
stages qwen "an adapter, its model in fp8" "3/3" --config sparse.json --lora-rank 3 --base-dtype fp8
stages qwen36 "linear and full layers, rows of two chunks" "2/2 3/3 5/5 4/2/--zero,2 3/3/--recompute,3" --config linear.json --seq-len 90
stages qwen36 "... output matrix = embedding, documents" "2/2/--recompute,0 6/3/--zero,1" --config tied_linear.json --train documents --doc-reset 1 --ema 0.9
stages qwen36 "... a stage that does not learn" "2/2 5/5" --config linear.json --freeze 'first:3'
stages qwen36 "... experts of a stage on its ranks" "4/2/--ep,2" --config wide_linear.json --grad-accum 8
stages qwen36 "... an adapter" "2/2" --config tied_linear.json --lora-rank 3 --lora-dropout 0.3
stages glm "GLM-5, choices that stay in a stage" "2/2 3/3 6/3/--zero,1" --config glm.json --ema 0.9
stages glm "GLM-5, all that learns" "2/2/--recompute,0 3/3/--recompute,3 4/2/--zero,2" --config glm_taught.json
stages glm "GLM-5, documents, a stage that does not learn" "3/3" --config glm_taught.json --train documents --doc-reset 1 --freeze first:3
stages glm "GLM-5, experts of a stage on its ranks, an indexer in each layer" "4/2/--ep,2 5/5" --config glm_each.json --grad-accum 8
stages glm "GLM-5, a module that reaches nothing but itself" "2/2" --config glm_detached.json
stages glm "GLM-5, an adapter" "3/3" --config glm.json --lora-rank 3 --lora-dropout 0.3
stages moe "experts, a loss of each layer" "2/2 4/4 4/2/--zero,2 2/2/--recompute,2" --config experts.json --z-lambda 0.01
stages moe "routers that learn by counting" "3/3 4/2/--zero,1" --config tied_experts.json --balance bias
stages moe "experts of a stage on its ranks" "4/2/--ep,2 8/2/--ep,4 8/2/--ep,2 6/3/--ep,2" --config four.json --grad-accum 8 --balance bias
stages qwen "experts of a stage on its ranks, some frozen" "4/2/--ep,2 8/2/--ep,4,--recompute,3" --config wide.json --grad-accum 8 --ema 0.9 \
    --freeze 'model.layers.0.*.experts.[01].*,model.layers.4.*.experts.*'
stages qwen "fewer micro-batches than stages" "5/5 4/2" --config tied.json --grad-accum 1
stages qwen "a stage that does not learn" "2/2 5/5 4/2/--zero,2" --config dense.json --freeze first:3
stages qwen "only embeddings learn" "3/3 4/2/--zero,1" --config dense.json --freeze 'model.layers.*,lm_head.*,model.norm.*'
stages qwen "only the last norm learns" "3/3" --config tied.json --freeze 'model.layers.*,model.embed_tokens.*'
echo "# several stages on each rank"
chunks() { stages "$1" "$2" "$3" --grad-accum 12 "${@:4}"; }
edit gpt2.json gpt2_8.json n_layer 8
for name in tied sparse tied_experts four; do edit $name.json ${name}_8.json num_hidden_layers 8; done
chunks gpt2 "GPT-2 with dropout" "2/2/--pp-chunks,4 3/3/--pp-chunks,2 6/3/--zero,2,--pp-chunks,2" --config gpt2_8.json --dropout 0.1 --hellaswag examples
chunks gpt2 "GPT-2, documents, stages that do not learn" "2/2/--pp-chunks,3 4/4/--pp-chunks,2" --config gpt2_8.json --train documents --doc-reset 1 --freeze first:5
chunks qwen "output matrix = embedding" "4/4/--pp-chunks,2 4/2/--zero,1,--pp-chunks,2 2/2/--recompute,3,--pp-chunks,4" --config tied_8.json --ema 0.9
chunks qwen "matrices in parts" "4/2/--tp,2,--pp-chunks,2 4/2/--tp,2,--recompute,3,--pp-chunks,4" --config tied_8.json
chunks qwen "experts, balanced over all stages" "2/2/--pp-chunks,3 6/3/--zero,2,--recompute,3,--pp-chunks,2" --config sparse_8.json
chunks qwen "an adapter with dropout" "2/2/--pp-chunks,2" --config tied.json --lora-rank 3 --lora-dropout 0.3
chunks qwen "only embeddings learn" "4/2/--zero,1,--pp-chunks,2" --config dense.json --freeze 'model.layers.*,lm_head.*,model.norm.*'
chunks qwen36 "linear and full layers" "2/2/--pp-chunks,2 4/2/--zero,2,--recompute,3,--pp-chunks,2" --config tied_linear.json
chunks moe "routers that learn by counting" "4/4/--pp-chunks,2" --config tied_experts_8.json --balance bias
chunks glm "GLM-5, all that learns" "2/2/--pp-chunks,2" --config glm_each.json
chunks moe "experts of a stage on its ranks" "4/2/--ep,2,--pp-chunks,4" --config four_8.json --z-lambda 0.01
chunks qwen "as many micro-batches as ranks" "2/2/--pp-chunks,2" --config tied.json --grad-accum 2
echo "# checkpoints"
whole() {  # OPTION...: one rank's run
    going=("${run[@]}" "$@")
    rm -rf whole
    timeout 60 "$qwen" "${going[@]}" --run whole --export-hf exported >out 2>err
    mv exported/model.safetensors whole/ && rm -rf exported
}
whole --config wide.json --grad-accum 8
for from in 1/1/1 8/2/4 4/2/2/2; do
    for to in 1/1/1 4/2/2 4/1/4 5/5/1; do going_on $from $to; done
done
going_on 8/2/4 2/2/1/2
whole --config tied.json
for from in 1/1 2/2 4/2 5/5; do
    for to in 1/1 3/3 4/2; do going_on $from $to; done
done
for to in 2/2 4/2 5/5 "2/2 --pp-chunks 2"; do
    timeout 60 "$launch" -n ${to%/*} "$qwen" --from whole --eval-only --val text --seq-len 16 --batch-size 2 --pp ${to#*/} >loss_several 2>err
    timeout 60 "$qwen" --from whole --eval-only --val text --seq-len 16 --batch-size 2 >loss 2>err
    check "--eval-only by ${to%/*} ranks, --pp ${to#*/}: the loss of one" test -n "$(grep 'val loss' loss)" -a "$(grep 'val loss' loss)" = "$(grep 'val loss' loss_several)"
done
echo "# files of which a rank reads its part"
# change FILE PATTERN NUMBER: in tensors whose names match, the number in the middle
change() {
    "$python" - "$@" <<'PYTHON'
import json, re, struct, sys
data = bytearray(open(sys.argv[1], "rb").read())
n = struct.unpack("<Q", data[:8])[0]
for name, t in json.loads(data[8:8 + n]).items():
    if re.search(sys.argv[2], name):
        struct.pack_into("<f", data, 8 + n + sum(t["data_offsets"]) // 8 * 4, float(sys.argv[3]))
open(sys.argv[1], "wb").write(data)
PYTHON
}
# own_folders RANKS RUN OPTION...: each rank in the folder rank0, rank1, ..., where model/ is its own
own_folders() {
    local ranks=$1 name=$2
    shift 2
    rm -rf "$name"
    timeout 60 "$launch" -n $ranks sh -c 'cd rank$RANK && exec "$@"' sh "$qwen" --from model "${run[@]}" --run "../$name" "$@" >out 2>err </dev/null
}
same_folders() { rm -rf rank?; for i in 0 1 2 3 4; do mkdir rank$i && cp -r whole/step_000004 rank$i/model && rm rank$i/model/manifest.json && cp text rank$i; done; }
same_folders
own_folders 1 one
change rank1/model/model.safetensors 'layers\.0\.mlp\.up_proj' 3
own_folders 2 several --pp 2
same_run one several
verdict $? "the second stage does not read the first one's layers" "$(tail -n 1 err)"
own_folders 4 refused --pp 2
check "... but ranks of the same stage have read the same" test "$? $(cat err)" = "2 train_qwen3: rank 1: other parameters than rank 0: start all ranks with the same"
rename rank1/model/model.safetensors 'layers.0.mlp.up_proj' layers.0.mlp.up
own_folders 2 refused --pp 2
check "... and files that lack a tensor are refused, whoever needs it" test "$? $(grep -c 'mlp.up_proj' err) $(grep -c . err)" = "2 1 1"
same_folders
change rank1/model/model.safetensors 'layers\.4\.mlp\.up_proj' 3
own_folders 2 several --pp 2
check "... and reads its own" test "$([ -e several/step_000004/model.safetensors ] && ! same_run one several && echo differs)" = differs
same_folders
for i in 0 1 2 3 4; do change rank$i/model/model.safetensors 'layers\.[34]\.mlp\.up_proj' nan; done
said=""
for grid in 1/1 2/2 4/2 5/5; do
    own_folders ${grid%/*} refused --pp ${grid#*/}
    said+="$? $(cat err)"$'\n'
done
check "NaN in two layers: the line of one rank, whoever has read them" test "$(grep -c . <<<"$said") $(sort -u <<<"$said" | grep .)" = \
    "4 2 train_qwen3: model/model.safetensors: expected finite numbers, found 1 of model.layers.3.mlp.up_proj.weight that are NaN or infinite, 1 of other tensors: training cannot mend them, take a sound file"
echo "# what it costs"
timeout 60 "$launch" -n 3 "$qwen" --config tied.json "${run[@]}" --eval-every 0 --sample-every 0 --save-every 0 --pp 3 --run sent >out 2>err
check "the box says which layers are where, and how long ranks wait" test "$(boxed stages '3: layers [0-9, -]*') $(boxed '  idle' '29% of an update of 5 micro-batches')" = "1 1"
COMM_CHECK=0 timeout 60 "$launch" -n 3 "$qwen" --config tied.json "${run[@]}" --eval-every 0 --sample-every 0 --save-every 0 --pp 3 --run sent2 >out 2>err
as_said() { awk -v a="$(kib 'per update *\|')" -v b="$(kib 'rank 0 sent')" 'BEGIN { exit !(a > 0 && b > 0 && a / b < 1.01 && b / a < 1.01) }'; }
check "rank 0 sends what the box has said, within 1%" as_said
COMM_CHECK=0 timeout 60 "$launch" -n 2 "$qwen" --config tied.json "${run[@]}" --grad-accum 6 --eval-every 0 --sample-every 0 --save-every 0 --pp 2 --pp-chunks 2 --run sent4 >out 2>err
check "... of several stages, too" as_said
check "... and the box says which these are" test "$(boxed stages '4: layers [0-9, -]*') $(boxed '  chunks' '2 on each rank, 2 stages apart') $(boxed '  idle' '8% of an update of 6 micro-batches')" = "1 1 1"
COMM_CHECK=0 timeout 60 "$launch" -n 4 "$qwen" --config all_wide.json "${run[@]}" --grad-accum 8 --eval-every 0 --sample-every 0 --save-every 0 --pp 2 --ep 2 --run sent3 >out 2>err
check "... with rows of experts, too, where these are equally busy" as_said
# planned RANKS OPTION...: --plan of RANKS says what their boxes say, and of all stages what the most costly rank takes
planned() {
    local ranks=$1 program=$2 rows='memory: parameters|  gradients, moments|  activations|  workspace, rest|  sent per update|  idle|  rows sent|stages'
    shift 2
    timeout 60 "$launch" -n $ranks "$program" "${run[@]}" "$@" --dry-run >box 2>err </dev/null
    timeout 60 "$program" "${run[@]}" "$@" --plan $ranks >out 2>>err
    check "--plan $ranks $* is what $ranks ranks say, and starts none" test "$? $(grep -E "^\| ($rows)" box)" = "0 $(grep -E "^\| ($rows)" out)" -a "$(grep -cE "^\| ($rows)" out)" -gt 4 -a ! -s err
    grep -q 'of each rank' box || return
    check "... and the table of stages has the rank that takes most" test "$(awk '/of each rank/ { print $8, $9 }' box)" = "$(sed -n 's/^memory of each rank: \(.*\) at most/\1/p' out)"
    check "... and its rows are sums" awk '/^ *[0-9]+ +[0-9,-]+ / { n++; sum = $3 + $4 + $5 + $6 + $7; if (sum - $8 > 0.03 || $8 - sum > 0.03 || $8 < 5) bad = 1 } END { exit bad || n < 2 }' out
}
planned 4 "$qwen" --config dense.json --grad-accum 8 --zero 1
planned 8 "$qwen" --config tied.json --grad-accum 8 --pp 4
planned 8 "$qwen" --config wide.json --grad-accum 8 --pp 2 --ep 4
planned 4 "$qwen36" --config wide_linear.json --grad-accum 8 --pp 2 --ep 2
planned 6 "$moe" --config experts.json --grad-accum 6 --pp 3
planned 2 "$qwen" --config tied.json --grad-accum 8 --pp 2 --pp-chunks 2
planned 4 "$moe" --config four_8.json --grad-accum 8 --pp 2 --ep 2 --pp-chunks 4
planned 4 "$qwen" --config tied_8.json --grad-accum 8 --pp 2 --tp 2 --pp-chunks 2
planned 4 "$gpt2" --config gpt2.json --grad-accum 8 --pp 2 --zero 2
planned 6 "$qwen" --config dense.json --grad-accum 7 --pp 2 --zero 1
planned 4 "$glm" --config glm_taught.json --grad-accum 8 --pp 2 --ep 2
planned 3 "$qwen" --config tied.json --grad-accum 7 --ema 0.9
timeout 60 "$qwen" $(sed -nE 's#^ +\./train_qwen3 (--threads 2 .* --plan .*)#\1#p' "$root/doc/plan.md") >out 2>err
rows_of() { sed -nE 's/^ +([0-9] +[0-9-]+( +[0-9.]+){7})$/\1/p' "$1"; }
check "doc/plan.md has the table that its command prints, with what this build needs as scratch within 2%" \
    awk '{ n++; for (i = 1; i <= 9; i++) bad += i == 7 || i == 8 ? $i / $(i + 9) > 1.02 || $(i + 9) / $i > 1.02 : $i != $(i + 9) } END { exit bad > 0 || n != 4 }' \
    <(paste <(rows_of out) <(rows_of "$root/doc/plan.md"))
timeout 60 "$qwen" --model qwen3-0.6b --train text --seq-len 16 --steps 1 --plan 2 >out 2>err
check "a plan of a preset with a text of bytes says that it is another model" test "$? $(grep -c -- '--model qwen3-0.6b has the 257 tokens of the tokenizer here, and 151936 without --train' err)" = "0 1"
timeout 60 "$qwen" --model qwen3-0.6b --seq-len 16 --plan 2 >out 2>err
check "... without data it is that model" test "$? $(grep -c 'without --train' err) $(boxed vocabulary '151936.*')" = "0 0 1"
timeout 60 "$qwen" --config tied.json "${run[@]}" --grad-accum 3 --plan 8 --tp 2 >out 2>err
check "a plan in which rank 0 has no micro-batch says what the busiest rank sends" \
    test "$(boxed '  parts sent' '0 B per update by rank 0') $(boxed '    at most' '[0-9.]* KiB by the rank that sends most')" = "1 1"
timeout 60 "$launch" -n 4 "$qwen" --config tied.json "${run[@]}" --tp 2 --pp 2 --run both >out 2>err </dev/null
timeout 60 "$launch" -n 2 "$qwen" --run both --resume --steps 5 >out 2>err </dev/null
check "resumed by fewer ranks than --tp 2 --pp 2 take: stages stay, and a line says that matrices are whole" \
    test "$? $(boxed stages '2: layers [0-9, -]*') $(grep -c -- '--tp 2, asked for earlier, does not fit: each rank has whole matrices now' err)" = "0 1 1"
goes_on() { timeout 60 "$launch" -n "$1" "$qwen" --run both --resume "${@:2}" >out 2>err </dev/null; }  # RANKS OPTION...
goes_on 4 --steps 6
check "... by four again: the grid that was asked for, without a word" \
    test "$? $(boxed stages '2: layers [0-9, -]*') $(boxed matrices 'each shared by 2 ranks') $(wc -l <err)" = "0 1 1 0"
goes_on 2 --steps 7 --pp 1
check "... --pp 1, typed: the two that are left share matrices, and no line says what nobody wants any more" test "$? $(boxed matrices 'each shared by 2 ranks') $(wc -l <err)" = "0 1 0"
goes_on 4 --steps 8
check "... nor do four have stages again" test "$? $(grep -c '^| stages' out) $(boxed matrices 'each shared by 2 ranks') $(wc -l <err)" = "0 0 1 0"
timeout 60 "$qwen" --run both --resume --steps 9 >out 2>err </dev/null
check "... one rank, with a line" test "$? $(grep -cx 'train_qwen3: --tp 2, asked for earlier, does not fit: each rank has whole matrices now' err)" = "0 1"
timeout 60 "$launch" -n 2 "$qwen" --run both --resume --steps 9 --pp 4 >out 2>err </dev/null
check "... a refusal names what is typed, and ranks that it needs: --tp 2 of earlier would give way" \
    test "$? $(<err)" = "2 train_qwen3: --pp: 4: expected a number that divides the ranks, 2: launch -n 4, or leave out --pp"
check "... settings.json has what is in use, and what was asked for" test "$(grep -cE '^ +"tp": [12],?$' both/settings.json)" = 2
rm -rf both
timeout 60 "$launch" -n 4 "$qwen" --config wide.json "${run[@]}" --grad-accum 4 --ep 4 --run both >out 2>err </dev/null
goes_on 2 --steps 5
check "--ep 4, two ranks: a line" test "$? $(boxed '  of them' '2 on each of 2 ranks') $(grep -cx 'train_qwen3: --ep 4, asked for earlier, does not fit: 2 now' err)" = "0 1 1"
goes_on 4 --steps 6 --grad-accum 5
check "... four, and micro-batches that do not divide: a line" test "$? $(grep -cx 'train_qwen3: --ep 4, asked for earlier, does not fit: each rank has all experts now' err)" = "0 1"
goes_on 4 --steps 7 --grad-accum 4
check "... four: as it was, without a word" test "$? $(boxed '  of them' '1 on each of 4 ranks') $(wc -l <err)" = "0 1 0"
COMM_CHECK=0 timeout 60 "$launch" -n 2 "$qwen" --model tiny --batch-size 65536 --seq-len 256 --head-rows 2147483647 --grad-accum 2 --dry-run >out 2>err </dev/null
check "ranks that do not fit say it once, as this machine's" test "$? $(wc -l <err) $(grep -c '^train_qwen3: 2 ranks of this machine need .* free: try a smaller --batch-size (at most [0-9]*; [0-9]* with --recompute 3), ' err)" = "1 1 1"
# 6.9B parameters on two ranks: what the line names fits as it stands there, and --ep on half as many ranks does not
pairs=(--model 6.9b --batch-size 1 --grad-accum 2 --tp 2 --dry-run)
searched "$launch" -n 2 "$moe" "${pairs[@]}"
free=$(sed -nE 's/.* ([0-9.]+) GiB are free: try .*/\1/p' err)
sed -nE '/free: try --recompute 3 with/{s/.*free: try --recompute 3 with //; s/ machines \(one rank on each\)//; s/, or a smaller model$//; s/, | or /\n/g; s/the same and //; s/the same//; p}' err >ways
takes() { timeout 60 "$moe" "${pairs[@]}" --recompute 3 "$@" 2>err | sed -nE 's/.*memory of (rank 0 *\||each rank:) ([0-9.]+) GiB.*/\2/p'; }
fits() { awk -v free="$free" -v took="$(takes "$@")" 'BEGIN { exit !(took > 0 && took <= free) }'; }
while IFS= read -r way; do
    check "--tp 2 and ${way% on *} on ${way##* } machines, which was named for $free GiB, fits" fits ${way% on *} --plan ${way##* }
    if [[ $way =~ ^--ep\ ([0-9]+)\ --grad-accum\ ([0-9]+)\ on\ ([0-9]+)$ ]]; then
        fits --ep $((BASH_REMATCH[1] / 2)) --grad-accum $((BASH_REMATCH[2] / 2)) --plan $((BASH_REMATCH[3] / 2))
        check "... --ep $((BASH_REMATCH[1] / 2)) on half as many does not" test $? != 0
    fi
done <ways
timeout 60 "$moe" --model 6.9b --train text --seq-len 64 --continue --noise-scale 2 --grad-accum 2 --run new >out 2>err </dev/null
check "... with --continue, too; and what does not go with it is to be left out" \
    test $? = 0 -o "$(grep -cE 'free: try --recompute 3 --noise-scale 0 with --(ep|pp) [0-9]+ .*on [0-9]+ machines' err)" = 1
timeout 60 "$launch" -n 2 "$qwen" --model qwen3-30b-a3b --seq-len 512 --grad-accum 2 --dry-run --comm-timeout 1 >out 2>err </dev/null
check "... it is planned in a quarter of --comm-timeout: nobody gives rank 0 up meanwhile" test $? = 0 -o "$(grep -c 'free: try ' err) $(grep -c 'not answered' err)" = "1 0"
check "... and a disk that is too small for its checkpoint is said once" test "$(grep -c 'the run keeps up to' err)" -le 1
refused "--plan-card of a trainer for CPUs names the one for GPUs" "--plan-card: is for a build in bf16: make setup-cuda && make train_gpt2cu;" "$gpt2" "${run[@]}" --config gpt2.json --plan 4 --plan-card H200
refused "--plan-rate without --plan" "--plan-rate: is for --plan-card NAME" "$qwen" "${run[@]}" --config dense.json --plan-rate 0.5
refused "--plan and --dry-run 0" "--dry-run: --plan W computes nothing: leave it out" "$qwen" "${run[@]}" --config dense.json --plan 4 --dry-run 0
refused "--plan, --pp and an export of what has not been trained" "--export-hf: with --pp only at the end of training: else by one process, --from RUN --export-hf DIR" "$qwen" --config dense.json --seq-len 16 --plan 2 --pp 2 --export-hf hf
echo "# refusals"
refused "more stages than layers of both kinds" "--pp: 6: expected at most one stage for each of the 5 layers" "$launch" -n 6 "$qwen36" --config linear.json "${run[@]}" --pp 6
refused "more stages than layers with an indexer" "--pp: 4: expected at most one stage for each of the 3 layers with an indexer" "$launch" -n 4 "$glm" --config glm.json "${run[@]}" --pp 4
refused "more stages than layers" "--pp: 6: expected at most one stage for each of the 5 layers" "$launch" -n 6 "$qwen" --config dense.json "${run[@]}" --pp 6
refused "... however many ranks there are" "--pp: 6: expected at most one stage for each of the 5 layers" "$launch" -n 2 "$qwen" --config dense.json "${run[@]}" --pp 6
refused "one rank" "--pp: 2: expected as many ranks or a multiple, found 1: start with launch -n 2" "$qwen" --config dense.json "${run[@]}" --pp 2
refused "ranks that stages do not divide" "--pp: 2: expected a number that divides the ranks, 3" "$launch" -n 3 "$qwen" --config dense.json "${run[@]}" --pp 2
refused "experts on more ranks than a stage has" "--ep: 4: expected a number that divides the ranks of a stage, 2: the nearest is 2, or start other ranks: launch -n 8, or leave out --pp or --ep" "$launch" -n 4 "$moe" --config four.json "${run[@]}" --pp 2 --ep 4
refused "more chunks than layers" "--pp-chunks: 3: expected at most 2, for 5 layers on 2 ranks" "$launch" -n 2 "$qwen" --config dense.json "${run[@]}" --pp 2 --pp-chunks 3
refused "chunks without stages" "--pp-chunks: is for --pp 2 and more" "$qwen" --config dense.json "${run[@]}" --pp-chunks 2
refused "micro-batches that do not go up in chunks" "--pp-chunks: expected a multiple of --pp 2 as micro-batches of an update, found 5: give --grad-accum 6, or --pp-chunks 1" "$launch" -n 2 "$qwen" --config dense.json "${run[@]}" --pp 2 --pp-chunks 2
refused "... nor in lines" "--pp-chunks: expected a multiple of 4 as micro-batches of an update, --pp 2 in each of 2 lines, found 6" "$launch" -n 4 "$moe" --config experts.json "${run[@]}" --grad-accum 6 --pp 2 --pp-chunks 2
refused "--export-bin" "--export-bin: is not for --pp" "$launch" -n 2 "$gpt2" --config gpt2.json "${run[@]}" --pp 2 --export-bin x.bin
refused "--verify-every" "--verify-every: is not for --pp" "$launch" -n 2 "$qwen" --config dense.json "${run[@]}" --pp 2 --verify-every 1
refused "--noise-scale" "--noise-scale: is not for --pp" "$launch" -n 2 "$qwen" --config dense.json "${run[@]}" --pp 2 --noise-scale 1
finish
