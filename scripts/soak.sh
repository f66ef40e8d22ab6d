#!/bin/sh
# A mesh that trains for long while its processes are killed, stopped, slowed down, cut off and started again at random,
# and its coordinator too: `make soak`. It must end by itself with at least 90% of what an undisturbed run learns. In
# network namespaces, or over loopback without the faults of links.
#   SOAK_SECONDS=1800 SEED=1 scripts/soak.sh        LAB=loopback; TRAIN, PIN: scripts/mesh_lab.sh
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/mesh_lab.sh
. scripts/mesh_lab.sh
length=${SOAK_SECONDS:-1800}
seed=${SEED:-$(date +%s)}
nodes=7 # of them one is a spare
model="--init d=64,heads=4,kv=4,ffn=128,ctx=64,layers=4,vocab=258 -b 4 --micro-batch 2 -t 64 --precision fp32 -l 3e-3"
drawn=0

# A random number below a limit: a function of the seed and of how many were drawn before.
draw() { # limit
    drawn=$((drawn + 1))
    drawn_number=$(awk -v seed="$seed" -v n=$drawn -v limit="$1" 'BEGIN {
        x = seed % 65521 + 1
        for (i = 0; i < n + 3; i++) x = (x * 16807 + n) % 2147483647
        printf "%d", int(x / 2147483647 * limit) }')
}

gain() { # log: first validation loss less the last
    sed -n 's/.*"val_loss":\([0-9.]*\).*/\1/p' "$1" | awk 'NR == 1 { first = $1 } { last = $1 } END { print first - last }'
}

said=0
tell() { echo "  $(($(date +%s) - began)) s, step $(lab_step): $1" && said=$((said + 1)); }

join_again() { # node
    births=$((births + 1))
    lab_join "$1" "node$1"
}

strike() { # action, node
    case $1 in
    kill | stop) lab_signal "$2" "$(if [ "$1" = kill ]; then echo 9; else echo STOP; fi)" 2> /dev/null || true ;;
    pause) lab_signal "$2" STOP 2> /dev/null || true ;;
    cut) lab_block "$2" "$(set -- in out both && shift "$way" && echo "$1")" ;;
    slow) lab_rate "$2" 2mbit ;;
    host) lab_signal host 9 ;;
    esac
}

mend() { # action, node
    case $1 in
    kill | stop)
        lab_signal "$2" 9 2> /dev/null || true
        lab_until 20 lab_has_ended "node$2" || true
        join_again "$2"
        ;;
    pause) lab_signal "$2" CONT 2> /dev/null || true ;;
    cut | slow) lab_unblock "$2" ;;
    host)
        lab_until 20 lab_has_ended host || true
        lab_host "$mesh --no-cell -n $steps --val-every $steps --save-every $saves --resume" ||
            { echo "the coordinator does not start again" && tail -n 3 "$lab/host.log" && exit 1; }
        ;;
    esac
}

trouble() {
    actions="kill stop pause kill stop pause host"
    [ $lab_has_links = 0 ] || actions="kill stop pause cut slow cut host"
    draw 7
    # shellcheck disable=SC2086
    action=$(set -- $actions && shift "$drawn_number" && echo "$1")
    draw 3
    way=$drawn_number
    draw $nodes
    first=$((drawn_number + 1))
    draw $nodes
    second=$((drawn_number + 1))
    draw 3 # every third time it is two at once
    if [ "$drawn_number" != 0 ] || [ "$action" = host ] || [ $second = $first ]; then second=''; fi
    draw 8
    pause=$((drawn_number + 1))
    tell "$action ${second:+$second and }$(if [ "$action" != host ]; then echo "$first "; fi)for $pause s"
    for k in $first $second; do strike "$action" "$k"; done
    lab_until $pause lab_has_ended host || true
    [ "$action" != host ] && lab_has_ended host && return
    for k in $first $second; do mend "$action" "$k"; done
}

lab_open $((nodes + 1)) 200mbit
mesh="$model -d $lab.txt --val-tokens 4096 -x 3 -y 2 --peer-timeout 3"
echo "soak: $length s, seed $seed"
# How fast it is here says how many steps are to be done, half of the time being lost with faults.
lab_host "$mesh --no-cell -n 100000"
for k in $(seq $nodes); do lab_join "$k"; done
lab_until 60 lab_is_at 10 || { echo "soak: no steps: $(tail -n 1 "$lab/host.log")" && exit 1; }
at=$(lab_step)
lab_until 6 false || true
steps=$((($(lab_step) - at) * length / 12))
[ $steps -ge 50 ] || steps=50
saves=$((steps / 40 + 5))
lab_clear
# What it would learn: the same in one process has the same bits.
# shellcheck disable=SC2086
$PIN $TRAIN $mesh -n $steps --val-every $steps --save-every $steps --threads 1 -o "$lab/whole" > "$lab/whole.log"
whole=$(gain "$lab/whole/log.jsonl")
echo "soak: $steps steps; undisturbed they gain $whole"
births=0 began=$(date +%s)
lab_host "$mesh --no-cell -n $steps --val-every $steps --save-every $saves"
for k in $(seq $nodes); do join_again "$k"; done
while ! lab_has_ended host && [ $(($(date +%s) - began)) -lt $((4 * length + 120)) ]; do
    draw 5
    lab_until $((drawn_number + 1)) lab_has_ended host && break
    trouble
done
ended=$(cat "$lab/host.rc" 2> /dev/null || echo "not at all")
got=$(gain "$lab/run/log.jsonl")
echo "soak: $said troubles in $(($(date +%s) - began)) s, $births processes; $steps steps gain $got, undisturbed $whole"
if [ "$ended" != 0 ]; then
    echo "soak: FAILED, seed $seed: it ends with $ended at step $(lab_step)"
    tail -n 5 "$lab/host.log"
    exit 1
fi
[ "$(echo "$got $whole" | awk '{ print ($1 >= 0.9 * $2) }')" = 1 ] || { echo "soak: FAILED, seed $seed: it has learned less" && exit 1; }
echo "soak: passed, seed $seed"
