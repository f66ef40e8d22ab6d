#!/bin/sh
# What a mesh of processes does over slow links: tokens a second with whole boundaries (dense) and compressed ones (the
# mask and the transform codec at 20 times less), and bytes on the wire by the kernel's counters against the run's own.
# Each node in a network namespace whose link has the rate in both directions (scripts/mesh_lab.sh); the coordinator has
# no cell. Prints the tables of docs/mesh.md.
#   scripts/run_mesh.sh [rate ...]       default: 200mbit 20mbit
# STEPS: of a run (30); STAGES: of a replica (4). Figures are of this machine, all of whose nodes share its cores: what
# they say of links is the ratio, and what they say of bytes.
set -eu
cd "$(dirname "$0")/.."
# shellcheck source=scripts/mesh_lab.sh
. scripts/mesh_lab.sh
steps=${STEPS:-30} stages=${STAGES:-4}
base="-m data/base.bin -d data/medical/train.jsonl --val-data data/medical/val.jsonl --val-tokens 1024"
size="-t 256 -b 8 --micro-batch 2 --precision fp32 -l 3e-4"
common="$base $size -n $steps --val-every $steps --save-every $steps --peer-timeout 30 --no-cell -y $stages"

# Median tokens a second of the second half of a run, and bytes a token and cell by the run's own account.
speed() {
    sed -n 's/.*"tok_s":\([0-9.]*\).*/\1/p' "$lab/run/log.jsonl" | tail -n $((steps / 2)) | sort -n |
        awk '{ v[NR] = $1 } END { printf "%.0f", v[int((NR + 1) / 2)] }'
}
per_token() {
    sed -n 's/.*"per_token":\([0-9.]*\).*/\1/p' "$lab/run/log.jsonl" | awk '{ sum += $1 } END { printf "%.0f", sum / NR }'
}

# Sums of the lines "network:" of all programs: payload, wire and frames, up.
sums() {
    grep -h '^network:' "$lab"/*.log | tr '\r' '\n' |
        sed -n 's/.*network: \([0-9]*\) bytes up and \([0-9]*\) down.*CURVE and TCP, \([0-9]*\) in \([0-9]*\) frames up and \([0-9]*\) in \([0-9]*\) down.*/\1 \3 \4/p' |
        awk '{ p += $1; w += $2; f += $3 } END { print p, w, f }'
}

measure() { # name, cells, options
    lab_rate 0 200mbit # the coordinator, which gives data and takes shards, is where links are good
    : > "$lab/before"
    for k in $(seq 0 "$2"); do lab_bytes "$k" >> "$lab/before"; done
    lab_host "$common $3"
    for k in $(seq "$2"); do lab_join "$k"; done
    lab_until 900 lab_has_ended host || { echo "$1: the run does not end"; exit 1; }
    for k in $(seq "$2"); do lab_until 20 lab_has_ended "node$k" || { echo "$1: node $k does not end"; exit 1; }; done
    [ "$(cat "$lab/host.rc")" = 0 ] || { tail -n 3 "$lab/host.log"; exit 1; }
    kernel=$(for k in $(seq 0 "$2"); do lab_bytes "$k"; done | paste -d ' ' - "$lab/before" |
        awk '{ bytes += $1 - $5; packets += $3 - $7; again += $4 - $8 } END { printf "%.0f %.0f %.0f", bytes, packets, again }')
    # payload; frames of the run's own with what was sent again; 42 bytes of CURVE and ZeroMQ a frame; 66 of Ethernet, IP
    # and TCP a packet, as many as the kernel has counted; 1448 a segment that TCP has sent again
    echo "$1 $(speed) $(per_token) $(sums) $kernel" | awk '{
        account = $5 + 42 * $6 + 66 * $8 + 1448 * $9
        printf "  %-12s %8.0f %10.0f %10.1f %8.2f%% %8.2f%% %8.2f%% %8.2f%% %10.1f %10.1f %8.2f%%\n", $1, $2, $3, $4 / 1e6,
            100 * ($5 - $4) / account, 100 * 42 * $6 / account, 100 * 66 * $8 / account, 100 * 1448 * $9 / account,
            account / 1e6, $7 / 1e6, 100 * ($7 / account - 1) }'
    lab_clear
}

lab_open $((2 * stages + 2)) 200mbit
[ $lab_has_links = 1 ] || { echo "run_mesh.sh needs namespaces: links of loopback have no rate"; exit 1; }
echo "base model, $stages stages, $steps steps of $size; $(uptime | sed 's/.*load/load/')"
[ $# -gt 0 ] || set -- 200mbit 20mbit
for rate in "$@"; do
    lab_full=$rate
    for k in $(seq 0 $((lab_nodes - 1))); do lab_rate "$k" "$rate"; done
    echo "links of $rate"
    printf '  %-12s %8s %10s %10s %9s %9s %9s %9s %10s %10s %9s\n' '' tokens/s bytes/tok 'payload MB' frames CURVE TCP/IP \
        again 'in all MB' 'kernel MB' differs
    measure dense $stages "--codec none -x 1"
    measure "mask_0.95" $((stages + 1)) "-p 0.95 --codec mask -x 2"
    measure "klt_0.95" $((stages + 1)) "-p 0.95 --codec klt -x 2"
done
