#!/bin/sh
# Draws a run's loss curves: scripts/plot.sh RUN -> RUN/loss.png and RUN/loss.svg. `make plot RUN=dir` is the same.
set -eu
run=${1:?usage: scripts/plot.sh RUN}
log=$run/log.jsonl
[ -r "$log" ] || { echo "plot: $log is missing; give the folder of a run" >&2; exit 1; }
field() { # lines of "step value" for a field of the log
    awk -v name="\"$1\":" '{
        at = index($0, name)
        if (at == 0 || !match($0, /"step":[0-9]+/)) next
        step = substr($0, RSTART + 7, RLENGTH - 7)
        value = substr($0, at + length(name))
        sub(/[,}].*/, "", value)
        if (value != "null") print step, value
    }' "$log"
}
data=$(mktemp -d)
trap 'rm -rf "$data"' EXIT
field loss > "$data/loss"
field val_loss > "$data/val"
[ -s "$data/loss" ] || { echo "plot: $log has no step in it yet" >&2; exit 1; }
for kind in png svg; do
    terminal=$([ $kind = png ] && echo 'pngcairo size 900,540' || echo 'svg size 900,540')
    validation=$([ -s "$data/val" ] && echo ", '$data/val' with linespoints pt 7 ps 0.7 lw 2 title 'held-out'" || true)
    gnuplot <<PLOT
set terminal $terminal
set output '$run/loss.$kind'
set xlabel 'step'
set ylabel 'loss, nats a token'
set grid
set key top right
plot '$data/loss' with lines lc rgb '#b0b0b0' title 'training'$validation
PLOT
done
echo "plot: $run/loss.png $run/loss.svg"
