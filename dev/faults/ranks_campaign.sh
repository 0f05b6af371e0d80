#!/usr/bin/env bash
# Ranks that die or stand still at random instants, many times: kill -9 or SIGSTOP of any of 4, in each grid of ranks. All others must
# say so and end within --comm-timeout (here 2 s) and 2 s more, and what is left goes on to the bytes of a run that nobody touched.
# A table at the end: one line for each grid.
#     dev/faults/ranks_campaign.sh              10 strikes in each of 9 grids, some minutes
#     STRIKES=200 dev/faults/ranks_campaign.sh  SEED=3: other instants; GRIDS="--tp_2 --ep_2": only these, "dp" is the one without an option
. "$(dirname "$0")/../promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LLMC_SECRET
need_build qwen "CPU=1" train_qwen3
need_build moe "CPU=1" train_moe
need_build launch "" launch
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts
RANDOM=${SEED:-1}
strikes=${STRIKES:-10}
timeout=2  # --comm-timeout
write_configs 4 4 '[1]'
run=(--train text --seq-len 16 --batch-size 2 --lr 1e-2 --grad-accum 4 --steps 120 --save-every 10 --keep 2 --val-fraction 0.1 --eval-every 40
    --eval-batches 3 --sample-every 60 --max-new-tokens 8 --init-timeout 5 --comm-timeout $timeout)
seconds() { awk "BEGIN { printf \"%.2f\", $1 - $2 }"; }

# Each of the others has said why it ends, in time. Where no step had been made yet, ranks may still have been waiting for each other:
# then rank 0 speaks for all, or launch, which waits 5 s for them. In the last steps the others may have been done, and say nothing
ended_well() {
    local said
    said=$(grep -oE '^[a-z0-9_]+( \[rank [0-3]\])?: ' err | grep -v '^launch' | sort -u | wc -l)
    if grep -q '^step ' out && ! grep -q '^done after' out && ! { [ "$said" = 0 ] && grep -qE '^step (119|120)/' out; }; then
        [ "$said" = 3 ] && awk "BEGIN { exit !($took <= $timeout + 2) }"
        return
    fi
    early=$((early + 1))
    [ -s err ] && awk "BEGIN { exit !($took <= 12) }"
}

is_there() { [ -e "/proc/$1" ] && ! grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }

# one strike: the run is begun, or goes on, until it is struck or over. took: until the last of the others has ended
strike() {
    local victims victim signal begun pid struck=0 n_left=1
    "$launch" -n 4 "$program" "${options[@]}" --run several --continue >out 2>err </dev/null &
    pid=$!
    sleep "$(awk "BEGIN { printf \"%.3f\", $whole_time * $RANDOM / 32768 * 0.9 }")"
    victims=($(pgrep -P $pid))
    signal=$((RANDOM % 2 ? 9 : 19))
    if [ ${#victims[@]} = 4 ]; then
        victim=${victims[RANDOM % 4]}
        kill -$signal "$victim" 2>/dev/null && struck=1
    fi
    begun=$EPOCHREALTIME
    while [ $struck = 1 ] && [ $n_left -gt 0 ]; do
        sleep 0.02
        n_left=0
        for other in "${victims[@]}"; do [ $other = $victim ] || ! is_there $other || n_left=$((n_left + 1)); done
    done
    took=$(seconds $EPOCHREALTIME $begun)
    [ $struck = 0 ] || [ $signal = 9 ] || kill -9 "$victim" 2>/dev/null
    wait $pid
    status=$?
    if [ $struck = 0 ] || [ $status = 0 ]; then return; fi
    if [ $signal = 9 ]; then killed=$((killed + 1)); else stopped=$((stopped + 1)); fi
    ended_well || { wrong=$((wrong + 1)); echo "      signal $signal, status $status after $took s:"; sed 's/^/      /' err; }
    if [ $early = $was_early ]; then slowest=$(awk "BEGIN { print ($took > $slowest ? $took : $slowest) }"); fi
    was_early=$early
}

grid() {  # NAME PROGRAM --config MODEL OPTION...
    local name=$1 program=${!2} killed=0 stopped=0 slowest=0 wrong=0 runs=0 lost=0 early=0 was_early=0 strange=0 begun
    local -a options=("${run[@]}" "${@:3}")
    [ -z "${GRIDS-}" ] || [[ " $GRIDS " == *" ${name// /_} "* ]] || return 0
    rm -rf whole several
    begun=$EPOCHREALTIME
    timeout 60 "$launch" -n 4 "$program" "${options[@]}" --run several >out 2>err </dev/null || { verdict 1 "$name: runs" "$(cat err)"; return; }
    whole_time=$(seconds $EPOCHREALTIME $begun)
    # with --cp the bits are those of as many positions on each rank
    if [[ $name == *--cp* ]]; then timeout 60 "$launch" -n 2 "$program" "${options[@]}" --run whole >out 2>err </dev/null
    else timeout 60 "$program" "${run[@]}" "${@:3:2}" --run whole >out 2>err </dev/null; fi || { verdict 1 "$name: nobody touched" "$(cat err)"; return; }
    same_run whole several || lost=1
    rm -rf several
    while [ $((killed + stopped)) -lt "$strikes" ] && [ $((lost + wrong + strange)) -lt 5 ]; do
        strike
        case $status in
            0) runs=$((runs + 1)); same_run whole several || { lost=$((lost + 1)); echo "      other bytes: $(ls several | tr '\n' ' ')"; }; rm -rf several ;;
            1 | 2 | 137) ;;
            *) strange=$((strange + 1)); echo "      status $status: $(cat err)" ;;
        esac
    done
    if [ -d several ]; then  # what the last strike has left
        timeout 60 "$launch" -n 4 "$program" "${options[@]}" --run several --continue >out 2>err </dev/null
        runs=$((runs + 1))
        same_run whole several || { lost=$((lost + 1)); echo "      other bytes: $(cat err)"; }
    fi
    table+=$(printf '%-21s %5d %7d %8d %15s %6d %10d %5d' "$name" $runs $killed $stopped "$slowest" $early $wrong $lost)$'\n'
    check "$name: $((killed + stopped)) strikes, $runs whole runs: the others say so and end in time, the bytes of a run that nobody touched" \
        test $((wrong + lost + strange)) = 0
}

table=""
grid "dp 4" qwen --config dense.json
grid "--tp 2" qwen --config dense.json --tp 2
grid "--pp 2" qwen --config dense.json --pp 2
grid "--pp 2 --pp-chunks 2" qwen --config dense.json --pp 2 --pp-chunks 2
grid "--tp 2 --pp 2" qwen --config dense.json --tp 2 --pp 2
grid "--cp 2" qwen --config dense.json --cp 2
grid "--cp 2 --cp-by ring" qwen --config dense.json --cp 2 --cp-by ring
grid "--ep 2" moe --config experts.json --ep 2
grid "--tp 2 --ep 4" moe --config experts.json --tp 2 --ep 4
echo "# early: before the first step or behind the last; slowest: of the others, of strikes between them; lost: whole runs with other bytes"
printf '%-21s %5s %7s %8s %15s %6s %10s %5s\n' grid runs killed stopped "slowest exit, s" early "badly ended" lost
printf '%s' "$table"
finish
