#!/bin/sh
# Runs test programs, one a core: run_tests.sh "NAME or nothing" PROGRAM...; each prints "N passed, N failed" last. Those of
# test_gpt.cu run in parts, since much of their time is waiting for a network. Every line says whose it is, and lies in
# build/PROGRAM.PART.log too. The last line printed is the sum. Fails if a program does, or if no test has the name.
if [ "$1" = --job ]; then # run_tests.sh --job NAME PROGRAM:K/N
    name=$2 program=${3%:*} part=${3##*:}
    log=build/${program##*/}.${part%/*}
    # shellcheck disable=SC2086  # no name is no argument
    { TEST_PART=$part $program $name 2>&1; echo $? > "$log.status"; } | tee "$log.log" | sed -u "s|^|${program##*/} |"
    exit
fi
name=$1
shift
# Threads that wait for each other sleep: where programs share the cores, spinning makes a test take up to fifty times as long.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
cores=$(nproc)
jobs=
for program in "$@"; do
    parts=1
    case $program in *_gpt*) parts=$((cores < 4 ? cores : 4)) ;; esac
    for part in $(seq 0 $((parts - 1))); do jobs="$jobs $program:$part/$parts"; done
done
# shellcheck disable=SC2086  # a list
printf '%s\n' $jobs | xargs -P "$cores" -I JOB "$0" --job "$name" JOB

passed=0 failed=0 broken=0
for job in $jobs; do
    program=${job%:*} part=${job##*:}
    log=build/${program##*/}.${part%/*}
    code=$(cat "$log.status")
    counts=$(tail -1 "$log.log" | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p')
    if [ "$counts" = "0 0" ]; then continue; fi # no test of this name here
    if [ -z "$counts" ] || [ "$code" != 0 ]; then
        echo "run_tests: $program ended with status $code: $log.log"
        broken=$((broken + 1)) counts=${counts:-0 0}
    fi
    passed=$((passed + ${counts%% *})) failed=$((failed + ${counts##* }))
done
if [ "$broken" -gt "$failed" ]; then failed=$((failed + broken)); fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
