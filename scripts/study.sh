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
