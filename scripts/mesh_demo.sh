#!/bin/sh
# Four processes of this machine, two replicas of two stages, fine-tune the base model on medical definitions. One of them
# is killed on the way: its replica is out, the other loses no step, and the process that is started then takes the place.
# A minute or two on two cores. On several machines it is the same: the command that is printed, on each of them.
#
#   scripts/mesh_demo.sh            STEPS (90) and RUN (runs/mesh_demo-N) may be given
set -eu
cd "$(dirname "$0")/.."
steps=${STEPS:-90}
make -s train medical
n=1
while [ -e runs/mesh_demo-$n ]; do n=$((n + 1)); done
run=${RUN:-runs/mesh_demo-$n}
mkdir -p "$(dirname "$run")"
output=$run.txt
processes=
quit() { # whatever happens, nothing stays behind
    # shellcheck disable=SC2086  # a list of numbers
    kill $processes 2> /dev/null || true
    wait 2> /dev/null || true
}
trap quit EXIT
trap 'exit 1' INT TERM

wait_for() { # TEXT SECONDS: until the coordinator has said it
    tries=0
    until grep -q "$1" "$output" 2> /dev/null; do
        tries=$((tries + 1))
        if [ $tries -gt $(($2 * 5)) ] || ! kill -0 "$coordinator" 2> /dev/null; then
            echo "mesh_demo: '$1' was not said within $2 s; see $output" >&2
            exit 1
        fi
        sleep 0.2
    done
}
join() { # FILE
    ./train --join "@$run/join" --threads 1 > "$run.$1.txt" 2>&1 &
    last=$!
    processes="$processes $last"
}

echo "== the coordinator, which has the first cell itself"
./train -m data/base.bin -d data/medical/train.jsonl --val-data data/medical/val.jsonl -x 2 -y 2 -b 4 -t 256 -l 1e-3 \
    -n "$steps" --local-steps 5 --val-every "$steps" --val-tokens 8192 --peer-timeout 5 --threads 1 \
    --host 'tcp://127.0.0.1:*' -o "$run" > "$output" 2>&1 &
coordinator=$!
processes=$coordinator
wait_for 'others join with' 60
echo "== three others: ./train --join @$run/join"
join 1
join 2
join 3
victim=$last
wait_for "step $((steps / 3))/" 300
echo "== kill -9 of the last one after a third of the steps"
kill -9 $victim
wait_for 'is lost' 60
grep 'is lost' "$output"
wait_for "step $((steps / 2))/" 300
echo "== its replica is out and the other goes on; a new process joins"
join 4
wait "$coordinator"
grep -E '^node|validation|^done' "$output"
grep -E '^step' "$output" | sed -n "1p;\$p"
echo "all it said: $output; the model: $run/latest/model.bin"
