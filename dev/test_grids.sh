#!/usr/bin/env bash
# --tp, --cp, --pp, --ep and ranks that share micro-batches, three ways at a time on 8 ranks, of train_gpt2cu, train_moe, train_qwen3 and
# train_qwen36, 20 steps: without --cp the bytes of one rank, model, moments and records; with --cp the losses of one rank within 1e-5, and the
# same bytes whatever else the ranks share. In short runs of their own rank 0 sends what its box has said, to the last digit; with experts every
# position goes to all of these, for where a router chooses they are not equally busy. A grid is TPxCPxDPxPP, or TPxCPxDPxPPxEP. COMM_CHECK=1: no
# rank may come by another call than its neighbour. The table at the end is that of doc/ranks.md. Under a minute of one core after the build.
#     COMM_CHECK=0 dev/test_grids.sh   and how many bytes a router's choice adds, in the runs of 20 steps
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1 COMM_CHECK=${COMM_CHECK:-1}
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
need_build gpt2 "CPU=1" train_gpt2cu
need_build moe "CPU=1" train_moe
need_build qwen "CPU=1" train_qwen3
need_build qwen36 "CPU=1" train_qwen36
need_build launch "" launch
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts
write_configs 2 4 '[1]'
echo '{"model_type":"qwen3_5_moe_text","vocab_size":257,"hidden_size":20,"num_hidden_layers":2,"layer_types":["linear_attention","full_attention"],
"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"linear_num_key_heads":2,"linear_num_value_heads":4,"linear_key_head_dim":5,
"linear_value_head_dim":6,"linear_conv_kernel_dim":4,"num_experts":4,"num_experts_per_tok":2,"moe_intermediate_size":10,
"shared_expert_intermediate_size":12,"max_position_embeddings":256,"rope_parameters":{"rope_theta":10000,"partial_rotary_factor":0.5,
"mrope_section":[1,1,0]},"output_router_logits":true,"router_aux_loss_coef":0.05}' >linear.json
for name in experts sparse linear; do edit $name.json all_$name.json num_experts_per_tok 4; done  # of 4: all are equally busy
run=(--train text --seq-len 16 --batch-size 1 --lr 1e-3 --grad-accum 4 --val-fraction 0.1 --sample-every 0)
twenty=(--steps 20 --eval-every 10 --eval-batches 2)

# the largest relative difference of the losses of two runs
differ() {
    "$python" - "$1/metrics.jsonl" "$2/metrics.jsonl" <<'PYTHON'
import json, sys
one, other = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3])
pairs = [(a[key], b[key]) for a, b in zip(one, other) for key in ("loss", "val_loss") if a.get(key) is not None]
assert len(one) == len(other) and len(pairs) > 20
print(f"{max(abs(a / b - 1) for a, b in pairs):.1e}")
PYTHON
}

most() { printf '%s\n' "$@" | awk '{ x = $1 < 0 ? -$1 : $1; if (x > y) y = x } END { print y + 0 }'; }

# start TRAINER GRID OPTION...: its ranks into `several`; sets status, cp and `apart`, percent that rank 0 sends beside what the box says.
# 32 bytes to each other rank are no mistake: the norm goes round twice where the largest gradient has another exponent than expected
start() {
    local program=$1 tp dp pp ep
    IFS=x read -r tp cp dp pp ep <<<"$2"
    rm -rf several
    timeout 60 "$launch" -n $((tp * cp * dp * pp)) "$program" "${run[@]}" "${@:3}" --tp $tp --cp $cp --pp $pp ${ep:+--ep $ep} --run several >out 2>err </dev/null
    status=$?
    apart=$(awk -v box="$(kib 'sent per update *\| *')" -v sent="$(kib 'rank 0 sent')" -v norm=$((32 * (tp * cp * dp * pp - 1))) 'BEGIN {
        digit = sent < 1024 ? 0.01 : 10.24  # the last one that is printed
        if (sent > 0 && sent >= box && sent - box < norm / 1024 + 1.01 * digit) { print 0; exit }
        print (box > 0 && sent > 0 ? 100 * (sent / box - 1) : 100) }')
}

# grids TRAINER MODEL "GRID ..." OPTION...: sets worst, of losses, and furthest, of bytes
grids() {
    local program=${!1} model=$2 grid loss what
    worst=0 furthest=0
    rm -rf one first
    timeout 60 "$program" "${run[@]}" "${twenty[@]}" "${@:4}" --run one >out 2>err || verdict 1 "$model: alone" "$(tail -n 1 err)"
    for grid in $3; do
        start "$program" $grid "${twenty[@]}" "${@:4}"
        furthest=$(most $furthest $apart)
        if [ $cp = 1 ]; then
            same_run one several
            verdict $? "$model, $grid: the bytes of one rank" "status $status: $(tail -n 1 err)"
            continue
        fi
        loss=$(differ one several 2>&1)
        loss=${loss##*$'\n'} what=""
        worst=$(most $worst $loss)
        if [ ! -d first ]; then cp -r several first 2>/dev/null; else what=", the bytes of the first with --cp $cp"; fi
        awk -v x="$loss" 'BEGIN { exit !(x ~ /^[0-9]/ && x <= 1e-5) }' && same_run first several
        verdict $? "$model, $grid: losses within $loss of one rank's$what" "status $status: $(tail -n 1 err)"
    done
}

# sends_as_said TRAINER MODEL "GRID ..." OPTION...: sets furthest; COMM_CHECK=0, for its messages would be counted
sends_as_said() {
    local program=${!1} grid
    furthest=0
    for grid in $3; do
        COMM_CHECK=0 start "$program" $grid --steps 2 --eval-every 0 "${@:4}"
        furthest=$(most $furthest $apart)
        [ "$apart" = 0 ] || echo "      $2, $grid: $apart% apart, status $status: $(tail -n 1 err) $(grep sent out)"
    done
    check "... rank 0 of each grid sends what the box says" test $furthest = 0
}

# dense TRAINER MODEL "GRID ..." OPTION...: and a row of the table
dense() {
    in_turn || return
    grids "$@"
    sends_as_said "$@"
    row "$2" "$3" "the same"
}

# sparse TRAINER MODEL "GRID ..." ALL OPTION...: ALL is the model all of whose experts are chosen
sparse() {
    local natural=""
    in_turn || return
    grids "$1" "$2" "$3" "${@:5}"
    [ $COMM_CHECK = 1 ] || natural="; as its router chooses, within $(printf %.1f%% $furthest)"
    sends_as_said "$1" "$2" "$3" "${@:5}" --config "$4"
    row "$2" "$3" "the same$natural"
}

row() { rows+="| $1 | ${2// /, } | $(printf %.0e $worst) | $3 |"$'\n'; }

three="1x2x1x1 2x1x2x2 1x2x2x2 2x2x1x2 2x2x2x1"
shared="1x2x1x1 2x1x2x2x4 1x2x2x2x4 2x2x1x2 2x2x2x1x4"  # --tp brings --ep
rows="" worst=0 furthest=0
dense gpt2 "GPT-2" "$three" --config gpt2.json
dense qwen "Qwen3" "$three" --config dense.json
dense qwen "an adapter of Qwen3, embedding = output matrix" "$three" --config tied.json --lora-rank 3
sparse moe "train_moe" "$shared" all_experts.json --config experts.json
sparse qwen "Qwen3 with experts" "$shared" all_sparse.json --config sparse.json
sparse qwen "an adapter of Qwen3 with experts" "$shared" all_sparse.json --config sparse.json --lora-rank 3
sparse qwen36 "Qwen3.6" "$shared" all_linear.json --config linear.json --seq-len 128
echo "$rows"
finish
