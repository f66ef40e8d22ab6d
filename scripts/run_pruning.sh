#!/bin/sh
# How weights bear pruning after dense and after compressed training: the base model, and what it becomes on the medical
# definitions whole and as a mesh of 4 stages that sends a twentieth of its boundaries' bytes (klt) or half of them (mask),
# each with 30, 50 and 70% of its layer matrices' smallest weights set to zero, no training after that.
#
#   scripts/run_pruning.sh            runs what is not in runs/pruning-TAG.csv yet, then the table in docs/pruning.md
#   scripts/run_pruning.sh --table    only the table, of the runs that are there
#
# STEPS (100) of BATCH (8) x 256 tokens, LR (1e-3), SEEDS ('1 2'), SHARES ('0 0.3 0.5 0.7'), TAG (STEPS), RUNS (runs), TRAIN
# (./train), MORE (further options of all runs, '--threads 1'), DOCS (docs/pruning.md; where its two marks are, the table
# goes). Whoever changes what a run means takes another TAG. About ten minutes on one core.
set -eu
cd "$(dirname "$0")/.."
STEPS=${STEPS:-100} BATCH=${BATCH:-8} LR=${LR:-1e-3} SEEDS=${SEEDS:-1 2} SHARES=${SHARES:-0 0.3 0.5 0.7}
TAG=${TAG:-$STEPS} RUNS=${RUNS:-runs} TRAIN=${TRAIN:-./train} MORE=${MORE:-} DOCS=${DOCS:-docs/pruning.md}
VAL_TOKENS=${VAL_TOKENS:-32768} MODEL=${MODEL:-data/base.bin}
DATA=${DATA:-data/medical/train.jsonl} VAL=${VAL:-data/medical/val.jsonl}
csv=$RUNS/pruning-$TAG.csv

# The options of a kind of training.
options() {
    case $1 in
    dense) echo "-x 1 -y 1" ;;
    klt) echo "-x 2 -y 4 --codec klt -p 0.95 --anchor-use none" ;;
    mask) echo "-x 1 -y 4 --anchor 0 -p 0.5" ;;
    esac
}

# Trains one unless it is there; $trained is its folder.
train() { # KIND SEED
    trained=$RUNS/pruning-$TAG/$1-$2
    if grep -q "^done: $STEPS steps" "$trained/output.txt" 2> /dev/null; then return; fi
    rm -rf "$trained"
    mkdir -p "$trained"
    # shellcheck disable=SC2046,SC2086  # words
    $TRAIN -m "$MODEL" -d "$DATA" --val-data "$VAL" $(options "$1") -n "$STEPS" -b "$BATCH" -t 256 -l "$LR" --seed "$2" \
        --val-every "$STEPS" --val-tokens "$VAL_TOKENS" --save-every 1000000 --keep 1 $MORE -o "$trained" \
        > "$trained/output.txt" 2>&1 || { tail -3 "$trained/output.txt"; echo "pruning: $1 failed, see $trained/output.txt" >&2; exit 1; }
}

# A line for each share of one model, unless it is there.
measure() { # KIND SEED MODEL
    for share in $SHARES; do
        if grep -q "^$1,$2,$share," "$csv"; then continue; fi
        # shellcheck disable=SC2086  # words
        said=$($TRAIN -m "$3" --eval --val-data "$VAL" --val-tokens "$VAL_TOKENS" -t 256 --prune "$share" $MORE)
        loss=$(echo "$said" | sed -n 's/^validation loss \([0-9.]*\) .*/\1/p')
        [ -n "$loss" ] || { echo "$said"; echo "pruning: no loss of $3" >&2; exit 1; }
        echo "$1,$2,$share,$loss" | tee -a "$csv"
    done
}

# Means over the seeds, and how much above the unpruned one they are.
table() {
    awk -F, -v shares="$SHARES" '
        NR > 1 { sum[$1 "," $3] += $4; n[$1 "," $3]++; if (!($1 in seen)) { seen[$1] = 1; kinds[++k] = $1 } }
        END {
            m = split(shares, share, " ")
            printf "| training | seeds |"
            for (i = 1; i <= m; i++) printf share[i] == 0 ? " whole |" : " %d%% pruned |", 100 * share[i] + 0.5
            printf "\n|---|---|"
            for (i = 1; i <= m; i++) printf "---|"
            printf "\n"
            name["base"] = "none (the base model)"; name["dense"] = "dense"
            name["klt"] = "klt, p 0.95"; name["mask"] = "mask, p 0.5"
            for (j = 1; j <= k; j++) {
                kind = kinds[j]
                printf "| %s | %d |", name[kind], n[kind "," share[1]]
                whole = sum[kind "," share[1]] / n[kind "," share[1]]
                for (i = 1; i <= m; i++) {
                    key = kind "," share[i]
                    if (!n[key]) printf " |"
                    else if (i == 1) printf " %.3f |", sum[key] / n[key]
                    else printf " %.3f (%+.3f) |", sum[key] / n[key], sum[key] / n[key] - whole
                }
                printf "\n"
            }
        }' "$csv"
}

mkdir -p "$RUNS"
[ -s "$csv" ] || echo kind,seed,share,loss > "$csv"
if [ "${1:-}" != --table ]; then
    [ -s "$DATA" ] && [ -s "$VAL" ] || data/medical/prepare.sh
    measure base 0 "$MODEL"
    for seed in $SEEDS; do
        for kind in dense klt mask; do
            train $kind "$seed"
            measure $kind "$seed" "$trained/latest/model.bin"
        done
    done
fi
table > "$RUNS/pruning-$TAG.md"
if grep -q '^<!-- table -->$' "$DOCS" 2> /dev/null; then
    awk -v table="$RUNS/pruning-$TAG.md" '
        /^<!-- \/table -->$/ { inside = 0 }
        !inside { print }
        /^<!-- table -->$/ { inside = 1; print ""; while ((getline row < table) > 0) print row; print "" }
    ' "$DOCS" > "$DOCS.tmp"
    mv "$DOCS.tmp" "$DOCS"
fi
cat "$RUNS/pruning-$TAG.md"
