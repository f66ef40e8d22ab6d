# shellcheck shell=sh
# A laboratory for meshes of several processes, to be read by other scripts (`. scripts/mesh_lab.sh`): each node in a
# network namespace of its own, joined to a switch by a link of LAB_RATE in both directions, whose faults can be made at
# will. Needs root, ip and tc; where that is not to be had (or LAB=loopback) all nodes share this machine's loopback,
# which is said, and links cannot be limited or cut.
#
#   lab_open 5 200mbit                 nodes 0 .. 4 in the folder $lab; $lab.txt: a text to train on
#   lab_host "-x 2 -y 2 ..."           the coordinator on node 0; waits until it can be joined
#   lab_join 1                         a joiner on node 1, its output in $lab/node1.log
#   lab_await 30 "node 3 .* is lost"   waits for a line of the coordinator, at most 30 s
#   lab_close                          ends what is left; by itself at exit
#
# Faults: lab_signal K SIGNAL; lab_block K in|out|both, lab_unblock K; lab_part A B, lab_reunite A B (the way between two
# nodes); lab_rate K RATE.
# PIN: a command before each program, as "taskset -c 1". LAB_DELAY: of packets each way, where the kernel has netem.
TRAIN=${TRAIN:-./train}
PIN=${PIN:-}
lab=''
lab_nodes=0
lab_has_links=0

lab_can_link() {
    [ "${LAB:-}" != loopback ] && [ "$(id -u)" = 0 ] && command -v ip > /dev/null && command -v tc > /dev/null &&
        ip netns add "mt$$-try" 2> /dev/null && ip netns del "mt$$-try"
}

# The node's name, its address, and where its link and the switch's end of it are.
lab_name() { echo "mt$$-$1"; }
lab_address() { if [ $lab_has_links = 1 ]; then echo "10.77.0.$(($1 + 1))"; else echo 127.0.0.1; fi; }
lab_in() { # node or `switch`, command ...
    lab_where=$1
    shift
    ip netns exec "mt$$-$lab_where" "$@"
}

# Where a link's end sends from here on: at a rate, or nothing at all: the queue takes no packet, none is larger than 1.
lab_shape() { # node or `switch`, interface, rate or `nothing`
    if [ "$3" = nothing ]; then
        lab_in "$1" tc qdisc replace dev "$2" root handle 1: tbf rate 1kbit burst 1b limit 1b
    else
        lab_in "$1" tc qdisc replace dev "$2" root handle 1: tbf rate "$3" burst 64kb latency 100ms
        [ -z "${LAB_DELAY:-}" ] || lab_in "$1" tc qdisc add dev "$2" parent 1:1 handle 10: netem delay "$LAB_DELAY" \
            2> /dev/null || lab_delays=0
    fi
}

lab_rate() { # node, rate of both directions
    [ $lab_has_links = 1 ] || return 0
    lab_shape "$1" eth0 "$2"
    lab_shape switch "p$1" "$2"
}

lab_add_node() { # number
    [ $lab_has_links = 1 ] || return 0
    ip netns add "$(lab_name "$1")"
    lab_in switch ip link add "p$1" type veth peer name eth0 netns "$(lab_name "$1")"
    lab_in switch ip link set "p$1" master hub up
    lab_in "$1" ip addr add "$(lab_address "$1")/24" dev eth0
    lab_in "$1" ip link set lo up
    lab_in "$1" ip link set eth0 gso_max_segs 1 # packets as on a line, for counters
    lab_in "$1" ip link set eth0 up
}

lab_open() { # nodes, rate
    lab=$(mktemp -d "${TMPDIR:-/tmp}/mesh_lab-XXXXXX")
    lab_nodes=$1 lab_full=$2 lab_delays=1
    cat llmc/*.h | head -c 300000 > "$lab.txt" # something to learn that is always here
    trap lab_close EXIT
    trap 'exit 130' INT TERM
    if lab_can_link; then
        lab_has_links=1
        ip netns add "$(lab_name switch)"
        lab_in switch ip link add name hub type bridge
        lab_in switch ip link set hub up
        for k in $(seq 0 $(($1 - 1))); do
            lab_add_node "$k"
            lab_rate "$k" "$2"
        done
        echo "lab: $1 nodes in namespaces, links of $2"
        [ $lab_delays = 1 ] || echo "lab: this kernel has no netem; packets are not delayed"
    else
        echo "lab: no namespaces here; $1 nodes over loopback, whose links are neither limited nor cut"
    fi
}

# Starts a program on a node: its pid in $lab/NAME.pid, its output in $lab/NAME.log; its status in $lab/NAME.rc later.
lab_start() { # node, name, command ...
    lab_node=$1 lab_what=$2
    shift 2
    rm -f "$lab/$lab_what.rc" "$lab/$lab_what.pid"
    [ $lab_has_links = 0 ] || set -- ip netns exec "$(lab_name "$lab_node")" "$@"
    (
        # shellcheck disable=SC2086  # PIN and TRAIN are commands with options
        $PIN "$@" > "$lab/$lab_what.log" 2>&1 &
        echo $! > "$lab/$lab_what.pid.new"
        mv "$lab/$lab_what.pid.new" "$lab/$lab_what.pid"
        status=0
        wait $! 2> /dev/null || status=$?
        echo $status > "$lab/$lab_what.rc.new"
        mv "$lab/$lab_what.rc.new" "$lab/$lab_what.rc"
    ) &
    lab_until 10 test -s "$lab/$lab_what.pid"
}

lab_until() { # seconds, command that is to succeed
    lab_end=$(($(date +%s) + $1))
    shift
    until "$@"; do
        [ "$(date +%s)" -lt $lab_end ] || return 1
        sleep 0.1
    done
}

lab_pid() { cat "$lab/$1.pid"; }
lab_has_ended() { [ -s "$lab/$1.rc" ]; }
lab_is_running() { [ -s "$lab/$1.pid" ] && ! lab_has_ended "$1"; }

# The coordinator, on node 0 with its folder in $lab/run. At its second start it takes the port it had.
lab_host() { # options
    lab_port='*'
    [ $lab_has_links = 0 ] || lab_port=29500
    [ ! -s "$lab/join" ] || lab_port=$(sed 's|.*:\([0-9]*\)?.*|\1|' "$lab/join")
    rm -f "$lab/run/join"
    # shellcheck disable=SC2086
    lab_start 0 host $TRAIN $1 --host "tcp://$(lab_address 0):$lab_port" --threads 1 -o "$lab/run"
    lab_until 30 test -s "$lab/run/join" || return 1
    cp "$lab/run/join" "$lab/join"
}

lab_join() { # node, name or nothing: nodeK, more options
    lab_who=$1 lab_called=${2:-node$1}
    [ $# -lt 2 ] || shift
    shift
    lab_start "$lab_who" "$lab_called" $TRAIN --join "@$lab/join" --threads 1 \
        --listen "tcp://$(lab_address "$lab_who"):*" "$@"
}

lab_says() { grep -q "$2" "$lab/$1.log"; }
lab_await() { # seconds, pattern
    lab_until "$1" lab_says host "$2"
}

# The last step the coordinator has logged.
lab_step() {
    awk '{ if (match($0, /"step":[0-9]+/)) step = substr($0, RSTART + 7, RLENGTH - 7) } END { print step + 0 }' \
        "$lab/run/log.jsonl" 2> /dev/null || echo 0
}
lab_is_at() { [ "$(lab_step)" -ge "$1" ]; }

lab_signal() { # node's number or program's name, signal
    kill "-$2" "$(lab_pid "$(lab_program "$1")")" 2> /dev/null || echo "  $1 is not there any more"
}
lab_program() { case $1 in [0-9]*) echo "node$1" ;; *) echo "$1" ;; esac }

lab_block() { # node, in | out | both
    [ "$2" = in ] || lab_shape "$1" eth0 nothing
    [ "$2" = out ] || lab_shape switch "p$1" nothing
}
lab_unblock() { lab_rate "$1" "$lab_full"; }

# What two nodes send each other goes to an address that nobody has.
lab_part() {
    lab_in "$1" ip neigh replace "$(lab_address "$2")" lladdr 02:00:00:00:00:ff dev eth0 nud permanent
    lab_in "$2" ip neigh replace "$(lab_address "$1")" lladdr 02:00:00:00:00:ff dev eth0 nud permanent
}
lab_reunite() {
    lab_in "$1" ip neigh del "$(lab_address "$2")" dev eth0
    lab_in "$2" ip neigh del "$(lab_address "$1")" dev eth0
}

# What a node's link has carried: "bytes-sent bytes-received packets-sent segments-sent-again", of the last those that
# were sent before, and not only queued.
lab_bytes() {
    # shellcheck disable=SC2016  # of the inner shell
    lab_in "$1" sh -c 'cd /sys/class/net/eth0/statistics && paste -d " " tx_bytes rx_bytes tx_packets | tr "\n" " "
        dropped=$(tc -s qdisc show dev eth0 root | sed -n "s/.*(dropped \([0-9]*\),.*/\1/p" | head -n 1)
        awk -v dropped="${dropped:-0}" "/^Tcp: [0-9]/ { print \$13 - dropped }" /proc/net/snmp'
}

# Programs that are still there, by name.
lab_left() {
    for lab_file in "$lab"/*.pid; do
        [ -e "$lab_file" ] || continue
        lab_file=$(basename "$lab_file" .pid)
        if lab_is_running "$lab_file"; then echo "$lab_file"; fi
    done
}

lab_is_gone() { ! kill -0 "$(lab_pid "$1")" 2> /dev/null; }

# Ends all programs and empties the folder; the nodes stay.
lab_clear() {
    for lab_file in $(lab_left); do
        kill -CONT "$(lab_pid "$lab_file")" 2> /dev/null || true
        kill -9 "$(lab_pid "$lab_file")" 2> /dev/null || true
        lab_until 10 lab_is_gone "$lab_file" || true
    done
    rm -rf "${lab:?}"/*
    if [ $lab_has_links = 1 ]; then
        for k in $(seq 0 $((lab_nodes - 1))); do
            lab_in "$k" ip neigh flush dev eth0 nud permanent
            lab_rate "$k" "$lab_full"
        done
    fi
}

lab_close() {
    trap - EXIT
    trap '' INT TERM
    if [ -n "$lab" ]; then
        lab_clear
        rm -rf "$lab" "$lab.txt"
    fi
    if [ $lab_has_links = 1 ]; then
        for k in $(seq 0 $((lab_nodes - 1))) switch; do ip netns del "$(lab_name "$k")" 2> /dev/null || true; done
    fi
}
