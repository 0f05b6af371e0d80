#!/usr/bin/env bash
# Ranks on several machines as their user starts them: launch --hosts and --restarts. The machines are network namespaces of this one,
# joined by a bridge: links that are cut, links that are slow, ranks and whole machines that die or stand still, what listens where.
# Every result is compared with that of one rank, byte by byte. About 70 s after two builds.
# Where no namespaces are allowed (most containers) all of it is skipped; as root, or as a user who may make namespaces of users.
. "$(dirname "$0")/promises.sh"
. "$root/dev/runs.sh"
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LLMC_SECRET SSH_CONNECTION

if [ -z "${MACHINES-}" ]; then
    need_build trainer "" train_gpt2
    need_build qwen "CPU=1" train_qwen3
    need_build moe "CPU=1" train_moe
    need_build launch "" launch
    export trainer qwen moe launch MACHINES=1
    own=$([ "$(id -u)" = 0 ] && echo -nm || echo -rnm)  # sshd wants more users than a namespace of users gives
    if why=$(unshare $own sh -c 'ip link add x type bridge && ip link add y type veth peer name z' 2>&1); then exec unshare $own "$0" "$@"; fi
    skip "ranks on several machines: no network namespaces here: $(head -n 1 <<<"$why")"
    finish
    exit
fi
work=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
pids=()
trap 'kill "${pids[@]}" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work" || exit 1
write_texts

# ---- the machines ----

declare -A machine  # address: a process in its namespace
ip link set lo up
ip link add switch type bridge && ip addr add 10.9.0.254/24 dev switch && ip link set switch up
for i in 1 2 3; do
    unshare -n sleep infinity &
    pid=$!
    pids+=($pid)
    until [ "$(readlink /proc/$pid/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
    machine[10.9.0.$i]=$pid
    echo $pid >machine.10.9.0.$i
    ip link add port$i type veth peer name eth0 netns $pid
    ip link set port$i master switch up
    nsenter -t $pid -n sh -c "ip link set lo up && ip addr add 10.9.0.$i/24 dev eth0 && ip link set eth0 up"
done
ip link add second type veth peer name eth1 netns ${machine[10.9.0.1]}  # the first has another network, too
ip addr add 10.8.0.254/24 dev second && ip link set second up
nsenter -t ${machine[10.9.0.1]} -n sh -c "ip addr add 10.8.0.1/24 dev eth1 && ip link set eth1 up"
on() { local host=$1; shift; nsenter -t ${machine[$host]} -n "$@"; }  # HOST COMMAND...
# what belongs to a machine, beside the process that holds its namespace
processes() { local net; net=$(readlink /proc/${machine[$1]}/ns/net); for p in /proc/[0-9]*; do [ "$(readlink $p/ns/net 2>/dev/null)" != "$net" ] || echo ${p#/proc/}; done | grep -vx ${machine[$1]}; }
ranks_of() { for p in $(processes "$1"); do [[ $(readlink /proc/$p/exe) != */train_* ]] || echo $p; done; }
cat >ssh <<'SSH'
#!/bin/bash
# ssh as launch uses it: HOST COMMAND; nothing of our environment goes along
cd "$(dirname "$0")" || exit 255
[ ! -e "off.$1" ] || { echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }
exec nsenter -t "$(<"machine.$1")" -n env -i PATH="$PATH" HOME=/ sh -c "$2"
SSH
chmod +x ssh
two=(--hosts 10.9.0.1,10.9.0.2 --ssh "$work/ssh" -n 2)
three=(--hosts 10.9.0.1,10.9.0.2,10.9.0.3 --ssh "$work/ssh" -n 1)

# ---- the same bits ----

echo "# the bits of one rank"
echo '{"model_type":"gpt2","n_positions":24,"vocab_size":257,"n_layer":2,"n_head":3,"n_embd":33}' >tiny.json
start=(--config tiny.json --train text --val-fraction 0.1 --seq-len 16 --batch-size 2 --lr 1e-2 --batch-tokens 128 --eval-every 10 --eval-batches 5
    --sample-every 20 --max-new-tokens 8 --schedule constant --init-timeout 20 --comm-timeout 2)
"$trainer" "${start[@]}" --steps 20 --run one >/dev/null 2>err
launched() {  # OPTION of launch... : OPTION of the trainer...
    local own=()
    while [ "$1" != : ]; do own+=("$1"); shift; done
    shift
    rm -rf several
    timeout 60 "$launch" "${own[@]}" "$trainer" "${start[@]}" "$@" >out 2>err </dev/null
    status=$?
}
equal() {  # PROMISE
    same_run one several && cmp -s {one,several}/samples.txt
    verdict $? "$1: the bytes of one rank" "status $status: $(tail -n 3 err)"
    rm -rf several
}
launched "${two[@]}" : --steps 20 --run several
grep -q '| ranks  *| 4 over TCP' out
verdict $? "4 ranks on 2 machines: the box says so" "status $status: $(cat err)"
check "... launch adds nothing to what is said" test ! -s err
equal "4 ranks on 2 machines"
printf '# ours\n10.9.0.1\n10.9.0.2 2  # it has two\n\n10.9.0.3\n' >machines
launched --hosts machines --ssh "$work/ssh" : --steps 20 --run several
equal "a file of hosts, of which one takes 2 ranks"
if tc qdisc add dev port2 root netem delay 3ms 2>err; then
    launched "${two[@]}" : --steps 20 --run several
    equal "a link that delays by 3 ms"
    tc qdisc del dev port2 root
else
    skip "a link that delays: the kernel has no netem: $(head -n 1 err)"
fi
if tc qdisc add dev port2 root tbf rate 16mbit burst 4kb latency 50ms 2>err; then
    launched "${two[@]}" : --steps 20 --run several
    equal "a link of 16 Mbit/s, which loses packets"
    tc qdisc del dev port2 root
else
    skip "a slow link: the kernel has no tbf: $(head -n 1 err)"
fi

# ---- who may listen, and who may know ----

echo "# ports and secrets"
hold="until [ \$RANK != 3 ] || [ -e $work/go ]; do sleep 0.05; done; exec \"\$@\""  # until then the others wait for it
timeout 60 "$launch" "${two[@]}" sh -c "$hold" sh "$trainer" "${start[@]}" --steps 20 --run several >out 2>err </dev/null &
pid=$!
until [ "$(ranks_of 10.9.0.1 | wc -l)" = 2 ] && on 10.9.0.1 ss -Hltn | grep -q .; do sleep 0.05; done
sleep 0.3
at=$(on 10.9.0.1 ss -Hltn | awk '{ print $4 }')
check "rank 0 and 1 listen at the address of their host, and nowhere else" test -n "$at" -a -z "$(grep -v '^10\.9\.0\.1:' <<<"$at")"
reach() { timeout 2 "${@:3}" bash -c "exec 3<>/dev/tcp/$1/$2" 2>/dev/null; }  # ADDRESS PORT [COMMAND...]
reached=""
for port in ${at//10.9.0.1:/}; do
    reach 10.9.0.1 $port && reached+="own "
    reach 10.8.0.1 $port && reached+="other-network "
    reach 127.0.0.1 $port nsenter -t ${machine[10.9.0.1]} -n && reached+="loopback "
done
check "... from another network, and from the machine itself, nobody reaches them" test "$reached" = "own own "
secret=$(tr '\0' '\n' </proc/"$(ranks_of 10.9.0.1 | head -n 1)"/environ | sed -n 's/^LLMC_SECRET=//p')
arguments=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\0' '\n')
[ ${#secret} = 64 ] && [[ $arguments == *10.9.0.2* ]] && [[ $arguments != *"$secret"* ]]
verdict $? "the secret is among the arguments of no process" "${#secret} characters"
touch "$work/go"
wait $pid
status=$?
equal "strangers at the door: 4 ranks on 2 machines"

# ---- what goes wrong ----

echo "# links, ranks and machines that go"
long=(--steps 400 --save-every 40 --eval-every 0 --sample-every 0)
"$trainer" "${start[@]}" "${long[@]}" --run whole >/dev/null 2>err
begin() {  # OPTION of launch... : OPTION of the trainer...; in the background, until step 55 is out
    local own=()
    while [ "$1" != : ]; do own+=("$1"); shift; done
    shift
    rm -rf several out
    timeout 60 "$launch" "${own[@]}" "${program:-$trainer}" "${options[@]-}" "$@" --run several >out 2>err </dev/null &
    pid=$!
    while ! grep -qs '^step 55/' out && kill -0 $pid 2>/dev/null; do sleep 0.02; done
    began=$EPOCHREALTIME
}
ended() {  # status and the time it took
    wait $pid
    status=$?
    took=$(awk "BEGIN { printf \"%.1f\", $EPOCHREALTIME - $began }")
}
within() { awk "BEGIN { exit !($took <= $1) }"; }
options=("${start[@]}" --steps 100000 --save-every 40 --eval-every 0 --sample-every 0)
begin "${two[@]}" :
ip link set port2 down
ended
lines=$(grep -cE 'train_gpt2.* rank [0-3] (has not answered for 2 s|is gone)' err)
[ $status = 1 ] && within 12 && [ "$lines" = 4 ]
verdict $? "a link that is cut: each of 4 ranks says so and ends, status 1 ($took s; --comm-timeout 2)" "status $status, $took s: $(cat err)"
check "... nobody is left on the machines" test -z "$(processes 10.9.0.1)$(processes 10.9.0.2)"
ip link set port2 up
apart() { ip link set port2 type bridge_slave isolated $1 && ip link set port3 type bridge_slave isolated $1; }
begin "${three[@]}" :
if apart on 2>why; then
    ended
    lines=$(grep -cE 'train_gpt2.* rank [0-2] (has not answered for 2 s|is gone)' err)
    [ $status = 1 ] && within 12 && [ "$lines" = 3 ]
    verdict $? "two of three machines that do not reach each other any more: each of 3 ranks says so and ends ($took s)" "status $status, $took s: $(cat err)"
    launched "${three[@]}" : --steps 20 --init-timeout 3 --comm-timeout 60
    [ $status = 1 ] && grep -q '^\[rank 2 @10.9.0.3\] train_gpt2: rank 2 cannot reach rank 1 at 10.9.0.2: ' err
    verdict $? "... nor before they meet: status 1 and the address, after 10 s" "status $status: $(cat err)"
    apart off
else
    kill $pid
    ended
    skip "two machines that do not reach each other: $(<why)"
fi
begin "${two[@]}" :
kill -9 "$(ranks_of 10.9.0.2 | head -n 1)"
ended
[ $status = 137 ] && within 6 && grep -q '^launch: rank [23] @10.9.0.2 was killed by signal 9' err && [ "$(grep -c 'is gone (killed' err)" = 3 ]
verdict $? "a rank that is killed: status 137, the others name it ($took s)" "status $status, $took s: $(cat err)"
begin "${two[@]}" :
kill -STOP "$(ranks_of 10.9.0.2 | head -n 1)"
ended
[ $status = 1 ] && within 15 && [ "$(grep -c 'has not answered for 2 s' err)" -ge 2 ]
verdict $? "a rank that stands still: status 1 after --comm-timeout ($took s)" "status $status, $took s: $(cat err)"
begin "${two[@]}" :
kill -TERM "$(pgrep -P $pid)"
ended
check "SIGTERM to launch: a checkpoint, status 0" test $status = 0 -a "$(grep -c '^stopped after step' out)" = 1
begin "${two[@]}" :
{ kill -9 "$(pgrep -P $pid)" && ended; } 2>/dev/null
for _ in {1..100}; do [ -n "$(processes 10.9.0.1)$(processes 10.9.0.2)" ] || break; sleep 0.1; done
check "kill -9 of launch: the ranks on all machines save and end" test -z "$(processes 10.9.0.1)$(processes 10.9.0.2)" -a -s several/summary.json

echo "# restarts"
options=("${start[@]}" "${long[@]}")
went_on() {  # PROMISE: after restarts the bytes of the run that nobody touched
    ended
    [ $status = 0 ] && same_run whole several
    verdict $? "$1: the bytes of a run that nobody touched" "status $status: $(cat err)"
}
begin "${two[@]}" --restarts 2 :
kill -9 "$(ranks_of 10.9.0.1 | head -n 1)"
went_on "--restarts, a rank is killed"
check "... launch says why, and how often it may" grep -q '^launch: the run ended with status 137: restart 1 of 2' err
begin -n 3 --restarts 2 :
kill -9 "$(pgrep -P "$(pgrep -P $pid)" | sed -n 2p)"
went_on "--restarts on one machine, a rank is killed"
program=sh
options=(-c '[ $RANK = 0 ] && setsid sleep 3 >/dev/null 2>&1 & exec "$@"' sh "$trainer" "${options[@]}")
begin "${two[@]}" --restarts 2 :
kill -9 "$(ranks_of 10.9.0.2 | head -n 1)"
went_on "--restarts, something of the first start stays on a host"
check "... the second waits for it" grep -q 'launch: host 10.9.0.1: ranks of the start before are there yet: waiting' err
unset program
options=("${start[@]}" "${long[@]}")
lose() {  # HOST: its power is cut
    touch off.$1
    ip link set port${1##*.} down
    kill -9 $(processes $1)
}
find_again() { rm off.$1; ip link set port${1##*.} up; }
begin "${three[@]}" --restarts 2 --min-ranks 2 :
lose 10.9.0.2
went_on "--restarts, a machine is lost"
check "... it is left out, and 2 ranks go on" grep -q '^launch: host 10.9.0.2 cannot be reached: it is left out' err
check "... as launch says" grep -q '^launch: 2 ranks go on' err
find_again 10.9.0.2
begin "${three[@]}" --restarts 2 :
lose 10.9.0.1
went_on "--restarts, the machine of rank 0 is lost"
find_again 10.9.0.1
begin "${three[@]}" --restarts 2 --min-ranks 3 :
lose 10.9.0.3
ended
check "--min-ranks 3 of 3, a machine is lost: launch gives up with the status of the run" \
    test $status != 0 -a $status != 2 -a "$(grep -c '^launch: 2 ranks can run, fewer than --min-ranks 3: giving up' err)" = 1
find_again 10.9.0.3
heads='"vocab_size":257,"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":6,"max_position_embeddings":96,"rope_theta":10000'
echo "{\"model_type\":\"qwen3\",$heads,\"hidden_size\":20,\"intermediate_size\":28}" >dense.json
echo "{\"model_type\":\"mixtral\",$heads,\"hidden_size\":20,\"intermediate_size\":12,\"num_local_experts\":4,\"num_experts_per_tok\":2}" >experts.json
# a run with --tp 2 on these machines loses 10.9.0.2
pairs_went_on() {  # PROMISE PROGRAM CONFIG MACHINE...
    program=$2 options=("${start[@]}" "${long[@]}" --config "$3" --steps 200)
    rm -rf whole
    "$program" "${options[@]}" --run whole >/dev/null 2>err
    printf '%s\n' "${@:4}" >machines
    begin --hosts machines --ssh "$work/ssh" --restarts 1 : --tp 2
    lose 10.9.0.2
    went_on "$1"
}
pairs_went_on "--tp 2 on 4 ranks, of which 3 are left" "$qwen" dense.json 10.9.0.1 10.9.0.2 "10.9.0.3 2"
check "... 2 go on, and launch says why" grep -q '^launch: 3 ranks can run, of which 2 fit --tp 2' err
find_again 10.9.0.2
# four pairs share experts, too, and three would not divide the micro-batches: ranks find that out
pairs_went_on "--tp 2 of a model with experts on 8 ranks, of which 6 are left" "$moe" experts.json "10.9.0.1 2" "10.9.0.2 2" "10.9.0.3 4"
check "... which are refused, so that 4 go on" test "$(sed -nE 's/^launch: ([0-9]+ ranks (go on|are refused|can).*)/\1;/p' err | tr '\n' ' ')" = \
    "6 ranks go on; 6 ranks are refused: a number that divides the 8 of the first start is tried; 6 ranks can run, of which 4 fit --tp 2 and divide 8; 4 ranks go on; "
find_again 10.9.0.2
unset program options

# ---- mistakes ----

echo "# refused: one line, status 2"
refused() {  # TEXT OPTION...
    local text=$1
    shift
    timeout 30 "$launch" "$@" >out 2>err </dev/null
    status=$?
    [ $status = 2 ] && [ "$(grep -c "^launch: $text" err)" = 1 ] && [ "$(grep -vc '^ssh: ' err)" = 1 ]
    verdict $? "refused: $text" "status $status: $(cat err)"
}
touch off.10.9.0.3
refused '--hosts: 10.9.0.3 cannot be reached: expected .* to work, found status 255' "${three[@]}" "$trainer"
rm off.10.9.0.3
echo 'exit 127' >no_launch
refused '--hosts: 10.9.0.1: expected this program there, too, at ' --hosts 10.9.0.1 --ssh "sh no_launch" "$trainer"
refused '--hosts: expected hosts such as node1 or ann@10.0.0.1, found "-oProxyCommand=x"' --hosts "-oProxyCommand=x" "$trainer"
refused '--hosts: expected each host once, found a again' --hosts a,b,a "$trainer"
echo '10.9.0.1 two' >machines
refused 'machines: line 1: expected a number 1..1024, found "two"' --hosts machines "$trainer"
refused '--hosts: ./missing: No such file or directory' --hosts ./missing "$trainer"
refused '--restarts: expected --run DIR behind' -n 2 --restarts 2 "$trainer" "${start[@]}"
refused '--min-ranks: is for --hosts' -n 2 --restarts 2 --min-ranks 2 "$trainer" --run x
launched "${two[@]}" --restarts 3 : --lrr 3 --run several
check "a wrong option on two machines: said once, status 2, no restart" test $status = 2 -a "$(wc -l <err)" = 1 -a "$(grep -c -e '--lrr: unknown option' err)" = 1
launched "${two[@]}" --restarts 3 : --train missing --run several
check "a file that is not there: said once, status 2, no restart" test $status = 2 -a "$(wc -l <err)" = 1

# ---- ssh itself ----

echo "# ssh"
sshd=$(command -v sshd || ls /usr/sbin/sshd 2>/dev/null)
if [ -n "$sshd" ] && [ "$(id -u)" = 0 ] && command -v ssh >/dev/null && mount -t tmpfs none /run 2>/dev/null && mkdir /run/sshd; then
    ssh-keygen -q -t ed25519 -N '' -f host_key && ssh-keygen -q -t ed25519 -N '' -f key && cp key.pub authorized
    cat >sshd_config <<CONFIG
Port 2222
HostKey $work/host_key
AuthorizedKeysFile $work/authorized
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
CONFIG
    for host in 10.9.0.1 10.9.0.2; do
        nsenter -t ${machine[$host]} -n "$sshd" -D -e -f "$work/sshd_config" >sshd.$host 2>&1 &
        pids+=($!)
    done
    sleep 0.3
    over_ssh=(--hosts 10.9.0.1,10.9.0.2 -n 2 --ssh "ssh -o BatchMode=yes -p 2222 -i $work/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR")
    launched "${over_ssh[@]}" : --steps 20 --run several
    equal "over ssh"
    options=("${start[@]}" "${long[@]}")
    rm -rf whole
    "$trainer" "${options[@]}" --run whole >/dev/null 2>err
    begin "${over_ssh[@]}" --restarts 1 :
    kill -9 "$(pgrep -P "$(pgrep -P $pid)" | tail -n 1)"  # the ssh to the second host
    went_on "--restarts, an ssh dies"
    check "... its host is said to be lost" grep -q '^launch: host 10.9.0.2 ' err
else
    skip "over ssh itself: no sshd here, or not root"
fi
finish
