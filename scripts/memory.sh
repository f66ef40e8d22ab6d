#!/bin/sh
# Compares the plan of a run with its peak: scripts/memory.sh SECONDS OPTIONS OF ./train...
# Trains for so many seconds at most, in a folder that goes afterwards; prints both in GB. Linux.
set -eu
seconds=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
./train "$@" -o "$folder/run" > "$folder/output" 2>&1 &
pid=$!
peak=0
while [ "$seconds" -gt 0 ] && kill -0 $pid 2> /dev/null; do
    sleep 1
    seconds=$((seconds - 1))
    now=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$pid/status" 2> /dev/null || true)
    peak=${now:-$peak}
done
kill -9 $pid 2> /dev/null || true
wait $pid 2> /dev/null || true
sed -n '/^picked/p; /in all/p' "$folder/output"
echo "peak $peak" | awk '{ printf "  %-28s %10.2f GB\n", "peak of the process", $2 * 1024e-9 }'
