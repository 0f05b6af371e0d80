#!/usr/bin/env bash
# The long forms of dev/test_faults.sh and test_checkpoint, by hand: random kills for hours, second faults during recovery,
# random flips, ranks struck. Each part prints what test_faults.sh prints; doc/checkpoints.md has the figures of the last time.
#     dev/faults/campaign.sh            10,000 kills, every fault followed by a second one, 10^6 flips, 1,200 ranks
#     KILLS=500 FLIPS=10000 ROUNDS=1 STRIKES=10 dev/faults/campaign.sh
set -u
cd "$(dirname "$0")/../.."
status=0
KILLS=${KILLS:-10000} nice -n 10 dev/test_faults.sh kills || status=1
for ((round = 0; round < ${ROUNDS:-5}; round++)); do
    SECOND=1 nice -n 10 dev/test_faults.sh calls errors || status=1
done
folder=$(make -s folder)
make -s "$folder/test_checkpoint" "$folder/test_verify" || exit 1
FLIPS=${FLIPS:-1000000} nice -n 10 "$folder/test_checkpoint" || status=1
FLIPS=1000 nice -n 10 "$folder/test_verify" || status=1
STRIKES=${STRIKES:-200} nice -n 10 dev/faults/ranks_campaign.sh || status=1
exit $status
