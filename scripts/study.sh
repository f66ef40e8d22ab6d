# Functions of the studies, for `. scripts/study.sh`. A study is a list of runs of ./train on the base model and a text;
# each finished run is a line of a CSV, and a study that is started again goes on after the last line.
#
#   study_run NAME OPTIONS...   one run, unless the CSV has it
#   study_table                 the CSV as a table
#
# Set from outside: STEPS (100), BATCH (8 sequences a replica), LR (1e-3), SEED (1), TAG (default), DATA and VAL (the
# medical definitions), ONLY (a pattern: the runs whose name matches it all, '(Dense|M95.*)'), RUNS (runs, the folder for
# it all), TRAIN (./train, the program).
set -eu
STEPS=${STEPS:-100} BATCH=${BATCH:-8} LR=${LR:-1e-3} SEED=${SEED:-1} TAG=${TAG:-default} ONLY=${ONLY:-.*}
RUNS=${RUNS:-runs} TRAIN=${TRAIN:-./train}
DATA=${DATA:-data/medical/train.jsonl} VAL=${VAL:-data/medical/val.jsonl}
study_folder=$RUNS/$study-$TAG
study_csv=$study_folder.csv
columns=name,val_loss,val_masked,cos_blocks,cos_filtered,bytes_token,sim_tok_s,seconds,options

# mean or last number of a key in a log
study_mean() { sed -n "s/.*\"$2\":\([-0-9.e+]*\).*/\1/p" "$1" | awk '{ sum += $1; n++ } END { if (n) printf "%.4f", sum / n }'; }
study_last() { sed -n "s/.*\"$2\":\([-0-9.e+]*\).*/\1/p" "$1" | awk '{ last = $1 } END { if (NR) printf "%.4f", last }'; }

# Cells of 4 TFLOP/s behind 200 Mbit/s stand to each other as cells of 90 TFLOP/s do at a model of 1B: sending a
# token's dense bytes takes about 44 times as long as computing it.
study_run() {
    name=$1
    shift
    if ! echo "$name" | grep -Eqx -- "$ONLY"; then return; fi
    mkdir -p "$RUNS"
    [ -s "$study_csv" ] || echo $columns > "$study_csv"
    if grep -q "^$name," "$study_csv"; then return; fi
    run=$study_folder/$name
    rm -rf "$run"
    mkdir -p "$run"
    $TRAIN -m data/base.bin -d "$DATA" --val-data "$VAL" -o "$run" -n "$STEPS" -l "$LR" -b "$BATCH" -t 256 -y 4 --seed "$SEED" \
        --val-every $((STEPS / 3)) --val-tokens 32768 --save-every 1000000 --keep 1 --probe $((STEPS / 6)) \
        --link-mbps 200 --device-tflops 4 "$@" > "$run/output.txt" 2>&1 ||
        { tail -3 "$run/output.txt"; echo "study: $name failed, see $run/output.txt"; return 1; }
    log=$run/log.jsonl
    set -- "$@"
    total=$(sed -n 's/.*in all \([0-9.]*\) bytes a token.*/\1/p' "$run/output.txt")
    speed=$(sed -n 's/.*simulated: [0-9.]* s, \([0-9]*\) tokens.*/\1/p' "$run/output.txt")
    seconds=$(sed -n 's/^done: .* steps in \([0-9]*\) s.*/\1/p' "$run/output.txt")
    echo "$name,$(study_last "$log" val_loss),$(study_last "$log" val_loss_masked),$(study_mean "$log" blocks),$(study_mean "$log" filtered),$total,$speed,$seconds,$*" >> "$study_csv"
    rm -rf "$run"/step_* "$run"/best.bin "$run"/latest # the figures stay
    tail -1 "$study_csv"
}

study_table() {
    echo
    echo "$study, $STEPS steps, peak lr $LR, two fast replicas of $BATCH x 256 tokens, 4 stages; losses in nats a byte"
    awk -F, 'NR == 1 { printf "%-14s %9s %9s %8s %8s %9s %10s\n", "", "val loss", "masked", "cosine", "filtered",
        "bytes/tok", "tok/s" }
        NR > 1 { printf "%-14s %9s %9s %8s %8s %9s %10s\n", $1, $2, $3, $4, $5, $6, $7 }' "$study_csv"
}

# The rest is for studies that search for learning rates and know a run by a hash of its options: a study sets `version`,
# counted up by whoever changes what its options mean, `name` of the run at hand, `looking` (1: only see what is there),
# `work` (a temporary folder) and functions: `walk` goes through all its runs, `table` and `plot` tell of those in $work/rows.

# One study of a name at a time. What a killed one has left running holds the lock too.
lock() {
    command -v flock > /dev/null || return 0
    mkdir -p "$study_folder"
    exec 9> "$study_folder/lock"
    flock -n 9 || { echo "$study: $study_folder is in use by another study, or by a run that one left behind" >&2; exit 1; }
}

# $TRAIN with words, its output in a file; the status is its own. A signal ends it with the study.
child= # the program that runs
stop() {
    [ -z "$child" ] || kill -9 "$child" 2> /dev/null || true
    echo "$study: stopped; the same command goes on"
    exit 130
}
train_to() {
    output=$1
    shift
    $TRAIN "$@" > "$output" 2>&1 &
    child=$!
    status=0
    wait "$child" || status=$?
    child=
}

fail() { tail -3 "$1"; echo "$study: $name failed, see $1" >&2; exit 1; }

# Sets hash and row, empty if the run is not there; a look also notes what belongs to the study.
find_row() { # OPTIONS
    hash=$(echo "$version $1" | cksum | cut -d' ' -f1)
    row=$(grep "^$hash," "$study_csv" || true)
    [ $looking = 1 ] || return 0
    echo "$hash" >> "$work/plan"
    [ -z "$row" ] || echo "$row" >> "$work/rows"
}

is_less() { # LOSS OTHER: nan and nothing are more than any number
    awk -v a="$1" -v b="$2" 'BEGIN { exit !(a ~ /^[0-9]/ && (b !~ /^[0-9]/ || a + 0 < b + 0)) }'
}

look() { # what of the study is there: $work/rows, and of how many runs
    rm -f "$work/plan" "$work/rows"
    : > "$work/rows"
    looking=1
    walk
    looking=0
    sort -u "$work/plan" -o "$work/plan"
    sort -u "$work/rows" -o "$work/rows"
    missing=$(($(wc -l < "$work/plan") - $(wc -l < "$work/rows")))
}

finish() { # RUNS: how many were made now. The table and the plot of all that are there
    [ -s "$study_csv" ] || { echo "$study: no $study_csv yet" >&2; exit 1; }
    look
    table
    plot
    if [ "$quick" = 1 ]; then
        for kind in csv md $(command -v gnuplot > /dev/null && echo png); do
            [ -s "$study_folder.$kind" ] || { echo "$study: $study_folder.$kind is missing" >&2; exit 1; }
        done
    fi
    cat "$study_folder.md"
    echo
    echo "$study: $1 runs now, $(wc -l < "$work/rows") in all, $missing missing; $study_folder.csv .md .png"
}
