#!/bin/sh
# What `make demo` does: the base model learns medical definitions twice with the same tokens, once as a mesh whose stages
# send each other only a share of their values, once whole ("dense"). Two to three minutes of training on two cores.
# Prints held-out loss beside bytes a token, samples before and after, and leaves runs with checkpoints and plots.
set -eu
model=data/base.bin
prompt='pneumonia:'
steps=${STEPS:-120}
mesh="-p 0.9 -y 2 -x 1 --anchor 0 -l 3e-4"
dense="-y 2 -l 2e-3"
sample() {
    ./train -m "$1" --generate "$prompt" --max-tokens 160 --temperature 0.5 --seed 3
}
held_out() { # a model's held-out loss
    ./train -m "$1" --eval --val-tokens 0 | sed -n 's/.*validation loss \([0-9.]*\).*/\1/p'
}
bytes() { # mean bytes a token and cell over a run's steps
    sed -n 's/.*"per_token":\([0-9.]*\).*/\1/p' "$1/log.jsonl" | awk '{ sum += $1 } END { printf "%.0f", sum / NR }'
}
n=1
while [ -e runs/demo-$n ]; do n=$((n + 1)); done
run=runs/demo-$n
common="-m $model -n $steps -b 16 -t 256 --val-every $(((steps + 2) / 3))"

echo "== before: the base model has read manuals and the Bible, no medicine"
before=$(held_out $model)
sample $model
echo
echo "== the mesh: $mesh"
# shellcheck disable=SC2086  # lists of options
./train $common $mesh -o $run/mesh
echo
echo "== dense: the same stages, every value sent"
# shellcheck disable=SC2086
./train $common $dense -o $run/dense
echo
echo "== after, the mesh's model"
sample $run/mesh/best.bin
echo "== after, the dense model"
sample $run/dense/best.bin
echo
scripts/plot.sh $run/mesh
scripts/plot.sh $run/dense
echo
echo "held-out loss, nats a byte; bytes a token that a cell sends"
printf '  %-10s %8s %10s\n' '' loss bytes
printf '  %-10s %8.4f\n' before "$before"
printf '  %-10s %8.4f %10s   %s\n' mesh "$(held_out $run/mesh/best.bin)" "$(bytes $run/mesh)" "$mesh"
printf '  %-10s %8.4f %10s   %s\n' dense "$(held_out $run/dense/best.bin)" "$(bytes $run/dense)" "$dense"
echo "checkpoints: $run/mesh/latest/model.bin, $run/dense/latest/model.bin; best by held-out loss: best.bin beside them"
