#!/bin/sh
# Every fault a mesh of several processes is to live with, one after the other, in network namespaces (or over loopback,
# where links cannot be cut): prints what was done, what was seen, and a verdict a fault. Each has a deadline; each run
# must end by itself with status 0, with nearly the loss of an undisturbed run, and leave no process behind.
#   scripts/run_faults.sh [names of faults]        LAB=loopback: no namespaces; STEPS: of a run; KEEP=1: keep failures
# Five to ten minutes for all of them.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/mesh_lab.sh
. scripts/mesh_lab.sh
steps=${STEPS:-300}
patience=${PATIENCE:-120} # seconds a run may take
model="--init d=64,heads=4,kv=4,ffn=128,ctx=64,layers=4,vocab=258 -b 4 --micro-batch 2 -t 64 --precision fp32 -l 3e-3"
failed=0 n_faults=0

say() { printf '  %s\n' "$1"; }

# Something did not happen.
miss() {
    say "MISSED: $1"
    missed=1
}

# A line of the coordinator within seconds.
expect() { # seconds, pattern, what it means
    lab_from=$(date +%s)
    if lab_await "$1" "$2"; then say "$3 ($(($(date +%s) - lab_from)) s)"; else miss "$3: no line '$2' in $1 s"; fi
}
forbid() { # pattern, what it would mean
    if lab_says host "$1"; then miss "$2"; else say "not: $2"; fi
}
expect_step() { # seconds, step
    lab_until "$1" lab_is_at "$2" || miss "step $2 in $1 s; the run is at $(lab_step)"
}
steps_go_on() { # seconds within which the run gets 5 steps further
    lab_to=$(($(lab_step) + 5))
    lab_until "$1" lab_is_at $lab_to && say "the run goes on" || miss "the run stands at step $(lab_step)"
}

validation() { # first | last: of the run's log
    { grep -o '"val_loss":[0-9.]*' "$lab/run/log.jsonl" 2> /dev/null || echo '"val_loss":99'; } |
        if [ "$1" = first ]; then sed -n '1s/.*://p'; else sed -n '$s/.*://p'; fi
}

start_mesh() { # options, joiners
    lab_host "$1" || miss "the coordinator does not start"
    for k in $(seq "$2"); do # one after the other: the coordinator gives them the same numbers
        lab_join "$k"
        lab_await 30 "^node $k from" || miss "node $k is not admitted"
    done
    lab_until 60 lab_is_at 10 || miss "the run does not get to step 10"
}

# The run ends, and so do those that are named (others are stopped or cut off, and ended here).
finish() { # programs that end with status 0
    if lab_until "$patience" lab_has_ended host; then
        [ "$(cat "$lab/host.rc")" = 0 ] || miss "the coordinator ends with $(cat "$lab/host.rc"): $(tail -n 1 "$lab/host.log")"
    else
        miss "the run is not over in $patience s; it is at step $(lab_step)"
    fi
    for name in $1; do
        lab_until 15 lab_has_ended "$name" || miss "$name does not end"
        [ "$(cat "$lab/$name.rc" 2> /dev/null)" = 0 ] || miss "$name: $(tail -n 1 "$lab/$name.log")"
    done
    say "$(validation first) -> $(validation last)$2"
    ok=$(echo "$(validation first) $(validation last) ${whole:-0}" | awk '{ print ($1 - $2 >= 0.9 * $3) }')
    [ "$ok" = 1 ] || miss "the run has learned less than 90% of an undisturbed one ($whole)"
}

verdict() {
    n_faults=$((n_faults + 1))
    if [ $missed = 0 ]; then
        echo "PASS $fault"
    else
        echo "FAIL $fault"
        failed=$((failed + 1))
        grep -v '^step' "$lab/host.log" | tail -n 15 | sed 's/^/    | /'
        if [ -n "${KEEP:-}" ]; then cp -r "$lab" "/tmp/fault-$fault-$$" && echo "    kept in /tmp/fault-$fault-$$"; fi
    fi
    lab_clear
}

# Kept for the comparison: what an undisturbed run gains.
fault_none() {
    start_mesh "$plain" 4
    finish "node1 node2 node3 node4" ""
    whole=$(echo "$(validation first) $(validation last)" | awk '{ print $1 - $2 }')
}

fault_kill() { # kill -9 of a cell; a new joiner comes
    start_mesh "$plain" 4
    lab_signal 4 9
    expect 10 "is lost" "the loss is seen"
    steps_go_on 15
    lab_join 5
    expect 20 "node 5 from .* replica" "the joiner has the role"
    finish "node1 node2 node3 node5" ""
}

fault_stop() { # SIGSTOP for good
    start_mesh "$plain" 4
    lab_signal 2 STOP
    expect 10 "is lost" "the loss is seen"
    steps_go_on 15
    finish "node1 node3 node4" ""
}

fault_pause() { # SIGSTOP for 20 s; it comes back by itself
    start_mesh "$plain -n $((6 * steps))" 4
    lab_signal 3 STOP
    lab_stopped=$(date +%s)
    expect 10 "is lost" "the loss is seen"
    lab_until $((20 + lab_stopped - $(date +%s))) false || true
    lab_signal 3 CONT
    expect 20 "node 5 from" "it comes back"
    steps_go_on 20
    finish "node1 node2 node3 node4" ""
}

fault_host_pause() { # SIGSTOP of the coordinator for 8 s, more than --peer-timeout: nobody is lost
    start_mesh "$plain" 4
    lab_signal host STOP
    lab_until 8 false || true
    lab_signal host CONT
    steps_go_on 20
    forbid "is lost" "somebody is lost"
    finish "node1 node2 node3 node4" ""
}

cut() { # in | out | both
    start_mesh "$plain -n $((2 * steps))" 4
    lab_block 4 "$1"
    expect 15 "is lost" "the loss is seen"
    steps_go_on 15
    lab_unblock 4
    expect 40 "node 5 from" "it comes back"
    finish "node1 node2 node3 node4" ""
}
fault_cut() { cut both; }
fault_cut_in() { cut in; }
fault_cut_out() { cut out; }

fault_relay() { # the way between two cells of a replica, and between two of a stage, is cut: the coordinator relays
    start_mesh "$plain" 4
    lab_part 1 2
    lab_part 1 3
    steps_go_on 40
    forbid "is lost" "somebody is lost"
    finish "node1 node2 node3 node4" ""
}

fault_slow() { # 20 Mbit/s, then 1 Mbit/s for one node: no false alarm
    start_mesh "$plain" 4
    for k in 1 2 3 4; do lab_rate "$k" 20mbit; done
    lab_rate 2 2mbit
    steps_go_on 40
    forbid "is lost" "somebody is lost"
    finish "node1 node2 node3 node4" ""
}

fault_join() { # a joiner dies while it loads
    start_mesh "$plain -n $((2 * steps))" 4
    lab_signal 4 9
    expect 10 "is lost" "the loss is seen"
    lab_rate 5 2mbit # a slow link: it takes a second to get data
    lab_join 5
    expect 20 "node 5 from" "a joiner has the role"
    lab_signal 5 9
    expect 15 "node 5 .*is lost" "it is lost while it loads"
    steps_go_on 20
    lab_join 5 second
    lab_join 4 third
    expect 30 "node 6 from .*replica" "another comes"
    finish "node1 node2 node3" ""
}

fault_join_state() { # a joiner dies while it gets its state, for which all wait
    start_mesh "$plain -n $((4 * steps))" 4
    lab_signal 4 9
    expect 10 "is lost" "the loss is seen"
    lab_join 5
    expect 20 "node 5 from" "a joiner has the role"
    lab_rate 5 1mbit # it has the data; of its state it gets a part only
    lab_until 20 lab_stands && say "the run waits for its state" || miss "its state was not sent, or at once"
    lab_signal 5 9
    expect 15 "node 5 .*is lost" "it is lost on the way"
    steps_go_on 20
    lab_join 4 second
    expect 30 "node 6 from .*replica" "another comes"
    finish "node1 node2 node3 second" ""
}
lab_stands() { # no step within a second
    lab_at=$(lab_step)
    ! lab_until 1 lab_is_at $((lab_at + 1))
}

fault_hang() { # the main thread of a cell stands still for 100 s while its network answers
    start_mesh "$plain -n $((8 * steps))" 4
    command -v python3 > /dev/null || { say "needs python3 to hold one thread" && finish "" "" && return; }
    python3 -c 'import ctypes, sys, time
trace = ctypes.CDLL(None, use_errno=True).ptrace
trace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
thread = int(sys.argv[1])
trace(0x4206, thread, None, None)  # seize: this thread alone
trace(0x4207, thread, None, None)  # interrupt
time.sleep(100)' "$(lab_pid node3)" &
    expect 110 "node 3 .*is lost: it answers, but" "it is given up"
    steps_go_on 20
    wait $!
    expect 60 "node 5 from" "it comes back"
    finish "node1 node2 node3 node4" ""
}

fault_restart() { # kill -9 of the coordinator; started again with --resume
    start_mesh "$plain" 4
    expect_step 60 $((steps / 4 + 5))
    lab_signal host 9
    lab_until 10 lab_has_ended host || miss "it does not die"
    lab_host "$plain --resume" || miss "it does not start again"
    expect 40 "node 4 from" "all come back"
    finish "node1 node2 node3 node4" ""
}

fault_restart_early() { # the same before there is a checkpoint
    start_mesh "$plain" 4
    lab_signal host 9
    lab_until 10 lab_has_ended host || miss "it does not die"
    lab_host "$plain --resume" || miss "it does not start again"
    expect 40 "node 4 from" "all come back"
    finish "node1 node2 node3 node4" ""
}

fault_all() { # all replicas are lost: the run waits, and goes on from its checkpoint
    start_mesh "$plain" 4
    expect_step 60 $((steps / 4 + 5))
    lab_signal 1 9
    lab_signal 4 9
    expect 20 "the run waits" "the run waits"
    lab_join 1 second
    lab_join 4 third
    finish "node2 node3 second third" ""
}

anchored() { # options, what is checked after the anchor is lost
    start_mesh "$1" 5
    lab_find_anchor
    lab_signal "$lab_anchor" 9
    expect 10 "(the anchor) is lost" "the loss of the anchor is seen"
    steps_go_on 15
}

# The node that has the anchor.
lab_find_anchor() {
    lab_anchor=$(sed -n 's/^node \([0-9]*\) from .*: the anchor$/\1/p' "$lab/host.log" | tail -n 1)
}

three="-x 3 -y 2 --no-cell"
fault_anchor() { # the anchor is lost, and comes back
    anchored "$common $three -p 0.5 --anchor-batch 4 -n $((2 * steps))" ""
    lab_join 6
    expect 20 "node 6 from .*the anchor" "another comes"
    at=$(lab_step)
    lab_until 60 lab_delivers "$at" && say "it delivers" || miss "the new anchor delivers nothing"
    finish "" ""
}
lab_delivers() { grep -o '"step":[0-9]*.*"anchor":{"snapshot"' "$lab/run/log.jsonl" | sed 's/"step":\([0-9]*\).*/\1/' |
    awk -v at="$1" '$1 > at { n++ } END { exit n < 1 }'; }

fault_anchor_stale() { # its factors are not used any more after a while
    anchored "$common $three -p 0.5 --anchor-batch 4 --anchor-timeout 2 -n $((2 * steps))" ""
    finish "" ""
}

fault_anchor_klt() { # with the transform codec
    anchored "$common $three -p 0.8 --codec klt --anchor-batch 4 -n $((2 * steps))" ""
    lab_join 6
    expect 20 "node 6 from .*the anchor" "another comes"
    finish "" ""
}

fault_anchor_delay() { # the fast circuit waits for factors while the anchor, and later the leading replica, is lost
    anchored "$common $three -p 0.5 --anchor-batch 4 --anchor-delay 3 -n $((2 * steps))" ""
    lab_join 6
    expect 20 "node 6 from .*the anchor" "another comes"
    steps_go_on 20
    for k in 1 2 3 4 5; do
        if [ "$missed" = 0 ] && grep -q "^node $k from .*replica 0 stage 0" "$lab/host.log"; then lab_signal "$k" 9; fi
    done
    expect 10 "(replica 0 stage 0) is lost" "the leading replica is lost"
    steps_go_on 20
    finish "" ""
}

fault_last_with_anchor() { # the only replica is lost beside an anchor
    start_mesh "$common -x 2 -y 2 --no-cell -p 0.8 --codec klt --anchor-batch 4" 3
    expect_step 60 $((steps / 4 + 5))
    lab_signal 1 9
    expect 20 "the run waits" "the run waits"
    lab_join 4
    finish "node4" ""
}

fault_token() { # a joiner with another run's token gets nothing
    start_mesh "$plain" 4
    sed 's/key=..../key=0000/' "$lab/join" > "$lab/wrong"
    lab_start 5 wrong $TRAIN --join "@$lab/wrong" --threads 1
    steps_go_on 20
    forbid "node 5 from" "it is admitted"
    expect 15 "refused" "the coordinator tells of it"
    lab_until 30 lab_says wrong "does not answer" && say "it says what is wrong" || miss "it does not say what is wrong"
    finish "node1 node2 node3 node4" ""
}

fault_async() { # asynchronous pipelines: kill -9 of a cell, a new joiner, then the coordinator
    ahead="$plain --micro-batch 4 --schedule async"
    start_mesh "$ahead" 4
    lab_signal 4 9
    expect 10 "is lost" "the loss is seen"
    steps_go_on 15
    lab_join 5
    expect 20 "node 5 from .* replica" "the joiner has the role"
    steps_go_on 20
    lab_signal host 9
    lab_until 10 lab_has_ended host || miss "it does not die"
    lab_host "$ahead --resume" || miss "it does not start again"
    expect 40 "node 4 from" "all come back"
    finish "node1 node2 node3 node5" ""
}

fault_spare() { # more processes than roles
    start_mesh "$plain" 5
    expect 20 "node 5 from .*a spare" "the fifth is a spare"
    lab_signal 2 9
    expect 10 "is lost" "the loss is seen"
    steps_go_on 20
    finish "node1 node3 node4 node5" ""
}

lab_open 7 200mbit
common="$model -d $lab.txt --val-tokens 4096 -n $steps --val-every $steps --save-every $((steps / 4)) --peer-timeout 3"
plain="$common -x 2 -y 2 --no-cell"
names="$*"
if [ -z "$names" ]; then
    names="kill stop pause host_pause join join_state hang restart restart_early all anchor anchor_stale anchor_klt anchor_delay last_with_anchor async token spare"
    [ $lab_has_links = 0 ] || names="$names cut cut_in cut_out relay slow"
fi
for fault in none $names; do
    missed=0
    echo "== $fault"
    "fault_$fault"
    verdict
done
echo "$((n_faults - failed)) of $n_faults passed"
[ $failed = 0 ]
