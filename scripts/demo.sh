#!/bin/sh
# What `make demo` does: the base model learns medical definitions, two to three minutes on two cores. Prints held-out
# loss and a sample before and after, leaves the run with its checkpoint and plot.
set -eu
model=data/base.bin
prompt='pneumonia:'
sample() {
    ./train -m "$1" --generate "$prompt" --max-tokens 160 --temperature 0.5 --seed 3
}
n=1
while [ -e runs/demo-$n ]; do n=$((n + 1)); done
run=runs/demo-$n

echo "== before: the base model has read manuals and the Bible, no medicine"
./train -m $model --eval --val-tokens 0
sample $model
echo
echo "== training"
./train -m $model -o $run -n "${STEPS:-300}" -b 16 -t 256 -l 2e-3 --val-every 50
echo
echo "== after"
./train -m $run/best.bin --eval --val-tokens 0
sample $run/best.bin
echo
scripts/plot.sh $run
echo "checkpoint: $run/latest/model.bin; best by held-out loss: $run/best.bin"
