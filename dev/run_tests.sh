#!/bin/sh
# Runs test programs one after the other: run_tests.sh "NAME or nothing" PROGRAM...; each prints "N passed, N failed" last.
# The last line printed is their sum. Fails if a program does, or if no test has the name.
name=$1
shift
passed=0 failed=0 broken=0
for program in "$@"; do
    echo "== $program"
    # shellcheck disable=SC2086  # no name is no argument
    { $program $name 2>&1; echo $? > build/test_status.txt; } | tee build/test_output.txt
    code=$(cat build/test_status.txt)
    counts=$(tail -1 build/test_output.txt | sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p')
    if [ "$counts" = "0 0" ]; then continue; fi # no test of this name here
    if [ -z "$counts" ] || [ "$code" != 0 ]; then
        echo "run_tests: $program ended with status $code"
        broken=$((broken + 1))
    fi
    passed=$((passed + ${counts%% *})) failed=$((failed + ${counts##* }))
done
if [ "$broken" -gt "$failed" ]; then failed=$((failed + broken)); fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ] && [ "$passed" != 0 ]
