#!/bin/sh
# The boundary codecs on the base model and all of WordNet, each at its best learning rate: one fast replica of 4 stages,
# and beside it the anchor only where a codec or filter learns from it, so that nothing but the codec differs.
#
#   scripts/run_codecs.sh            runs what is not in runs/codecs-TAG.csv yet, then the table and the plot
#   scripts/run_codecs.sh --table    only those, of the runs that are there
#   scripts/run_codecs.sh --quick    the same study in seconds, of a random model and made-up text, under runs/codecs-quick
#   scripts/run_codecs.sh --returns  aqsgd, and three beside it: needs samples that come back, so the text is the first 700
#                                    medical definitions, 3.4 times over; of WordNet it would have to remember 23 GB
#
# The learning rate of a codec is searched at its own rate, or at a twentieth of the bytes (20x), with the odd lines of
# WordNet's held-out text; the losses told are those of the even lines, after the last step and through no codec.
# About 75 runs of a minute on two idle cores. A run is known by all of its options and `version`: whoever changes what a
# codec does counts that up. STEPS (100), BATCH, TAG, ONLY ('klt.*'), RUNS and TRAIN as in scripts/study.sh, VAL_TOKENS (32768).
cd "$(dirname "$0")/.."
study=codecs version=1 quick=0 table=0 returns=0
for word in "$@"; do
    case $word in
    --quick) quick=1 ;;
    --table) table=1 ;;
    --returns) returns=1 TAG=${TAG:-returns} ;;
    *) echo "usage: scripts/run_codecs.sh [--quick | --returns] [--table]" >&2; exit 2 ;;
    esac
done
if [ $quick = 1 ]; then STEPS=${STEPS:-4} BATCH=${BATCH:-1} TAG=${TAG:-quick}; fi
STEPS=${STEPS:-100}
. scripts/study.sh
columns=hash,config,codec,p,lr,seed,steps,tune_loss,report_loss,codec_loss,cosine,cos_filtered,boundary_bytes
columns=$columns,table_bytes,snapshot_bytes,anchor_bytes,total_bytes,sim_tok_s,seconds,options # bytes: of all cells, a token

if [ $quick = 1 ]; then
    MODEL=$study_folder/base.bin DATA=$study_folder/train.jsonl VAL=$study_folder/val.jsonl SPLITS=$study_folder
    SEQ=32 VAL_TOKENS=256 UP=1e-2 DOWN=3e-3 MORE='--threads 1'
    FIRST='none klt-20x' RATES='' OTHERS='' LAST=''
    export OMP_WAIT_POLICY=passive # many programs of a moment each
else
    MODEL=data/base.bin DATA=data/wordnet/train.jsonl VAL=data/wordnet/val.jsonl SPLITS=$RUNS
    SEQ=256 VAL_TOKENS=${VAL_TOKENS:-32768} UP='1e-3 3e-3' DOWN='3e-4 1e-4' MORE='--link-mbps 200 --device-tflops 4'
    FIRST='none klt-20x' RATES='klt-40x klt-10x'
    OTHERS='mask-20x topk-20x bottleneck-20x quant4 tahquant klt+filter-20x mask+filter-20x quant8'
    LAST='klt-80x klt+flat-40x klt+even-40x klt+bias-40x klt+often-40x klt+seldom-40x klt+unpredicted-20x klt+fixed-20x
        mask+bias-20x topk-10x topk-40x bottleneck-10x bottleneck-40x mask-10x mask-40x klt+filter-40x klt+filter-10x
        mask+filter-10x mask+filter-40x klt+flat-20x klt+even-20x'
fi
if [ $returns = 1 ]; then
    DATA=$study_folder/train.jsonl VAL=data/medical/val.jsonl SPLITS=$study_folder OTHERS='quant4 aqsgd' RATES='' LAST=''
fi
tune=$SPLITS/codecs-tune.jsonl report=$SPLITS/codecs-report.jsonl

# The texts, and in the quick study the model.
prepare() {
    mkdir -p "$study_folder" "$SPLITS"
    [ -s "$study_csv" ] || echo $columns > "$study_csv"
    if [ $quick = 1 ]; then
        [ -s "$MODEL" ] || $TRAIN --init d=32,layers=4,heads=4,kv=2,ffn=48,vocab=258,ctx=64 --export "$MODEL" > /dev/null
        awk 'BEGIN { for (i = 0; i < 300; i++) printf "{\"text\": \"number %d is %s, its square %d\"}\n",
            i, i % 2 ? "odd" : "even", i * i }' > "$DATA"
        sed -n '1,100p' "$DATA" > "$VAL"
    elif [ $returns = 1 ]; then
        [ -s "$VAL" ] || data/medical/prepare.sh
        sed -n '1,700p' data/medical/train.jsonl > "$DATA"
    elif [ ! -s "$DATA" ] || [ ! -s "$VAL" ]; then
        data/wordnet/prepare.sh
    fi
    awk 'NR % 2 == 1' "$VAL" > "$tune.tmp" # moved: another study may be reading the old one
    mv "$tune.tmp" "$tune"
    awk 'NR % 2 == 0' "$VAL" > "$report.tmp"
    mv "$report.tmp" "$report"
}

# Parts of klt and other uses of the anchor have the learning rate of the codec they belong to: flat without the metric,
# even with the same bytes both ways, unpredicted, fixed bits, often and seldom by how old tables get.
# Sets config, p ("-": it has a rate of its own), flags, and whose search it takes its learning rate from, of a name.
configure() {
    case $1 in
    *-10x) p=0.90 ;;
    *-20x) p=0.95 ;;
    *-40x) p=0.975 ;;
    *-80x) p=0.9875 ;;
    *) p=- ;;
    esac
    config=${1%-*x} codec=${1%%[+-]*}
    searched=$config
    case $config in
    klt) flags="-x 2 --anchor-use none" ;;
    klt+flat) flags="-x 2 --anchor-use none --klt-metric 0" searched=klt ;;
    klt+even) flags="-x 2 --anchor-use none --klt-forward 0.5" searched=klt ;;
    klt+unpredicted) flags="-x 2 --anchor-use none --klt-predict 0" searched=klt ;;
    klt+fixed) flags="-x 2 --anchor-use none --codec-coding fixed" searched=klt ;;
    klt+often) flags="-x 2 --anchor-use none --anchor-delay 10" searched=klt ;;
    klt+seldom) flags="-x 2 --anchor-use none --anchor-delay 50" searched=klt ;;
    *+bias) flags="-x 2 --anchor-use bias" searched=${config%+bias} ;;
    *+filter) flags="-x 2" ;;
    *) flags="-x 1 --anchor 0" ;;
    esac
    flags="$flags --codec $codec"
    [ $p = - ] || flags="$flags -p $p"
}

# A row's end, from the log, the last lines of the output and the loss on the reporting split: tune_loss to sim_tok_s.
read_run() { # FOLDER REPORT_LOSS
    own=$(awk '$1 == "anchor" && NF == 4 { print 1e6 * ($2 + $3) }' "$1/output.txt")
    awk -v own="${own:-0}" -v report="$2" '
        function number(text, key,   at) { # what follows the key; "" if nothing does
            at = index(text, "\"" key "\":")
            if (!at) return ""
            text = substr(text, at + length(key) + 3)
            return text ~ /^[-0-9]/ ? text + 0 : ""
        }
        function loss(value) { return value == "" ? "nan" : sprintf("%.6f", value) }
        number($0, "step") > 0 {
            tune = number($0, "val_loss"); through = number($0, "val_loss_masked")
            if (number($0, "blocks") != "") { blocks += number($0, "blocks"); filtered += number($0, "filtered"); n++ }
            sent = substr($0, index($0, "\"bytes\":"))
            boundary += number(sent, "forward") + number(sent, "backward")
            anchor += number(sent, "anchor")
            cells = split(substr(sent, index(sent, "[[")), cell, "]")
            for (i = 1; i <= cells; i++) if (cell[i] ~ /\[/) { n_kinds = split(cell[i], kinds, ","); snapshots += kinds[n_kinds] }
            tokens = number($0, "tokens"); speed = number($0, "sim_tok_s")
        }
        END {
            if (n) { blocks = sprintf("%.4f", blocks / n); filtered = sprintf("%.4f", filtered / n) }
            printf "%s,%s,%s,%s,%s,%.2f,%.2f,%.2f,%.2f,%.2f,%.0f", loss(tune), report, loss(through), blocks, filtered,
                boundary / tokens, (anchor - snapshots) / tokens, snapshots / tokens, own / tokens,
                (boundary + anchor + own) / tokens, speed
        }' "$1/log.jsonl"
}

# The loss of a model on the reporting split into $loss.
evaluate() { # MODEL OUTPUT
    train_to "$2" -m "$1" --eval --val-data "$report" --val-tokens "$VAL_TOKENS" -t "$SEQ"
    loss=$(sed -n 's/^validation loss \([0-9.]*\) .*/\1/p' "$2")
    if [ $status = 0 ] && [ -n "$loss" ]; then return; fi
    grep -q 'the loss is not finite' "$2" || fail "$2"
    loss=nan
}

# Trains and measures one run: what it gave, tune_loss to sim_tok_s, into $results. One that diverges has losses of nan.
measure() { # LR SEED OPTIONS
    run=$study_folder/$name-lr$1-seed$2
    rm -rf "$run"
    mkdir -p "$run"
    # shellcheck disable=SC2086  # words
    train_to "$run/output.txt" $3 -o "$run"
    if grep -q "^done: $STEPS steps" "$run/output.txt"; then
        evaluate "$run/latest/model.bin" "$run/report.txt"
    else
        tail -1 "$run/output.txt" | grep -Eq '^train: .*(not finite|no finite|infinite or NaN)' || fail "$run/output.txt"
        loss=nan
    fi
    results=$(read_run "$run" "$loss")
    rm -rf "$run"/step_* "$run"/best.bin "$run"/latest # the figures stay
}

# One run, unless the CSV has it, this is only a look, or ONLY leaves it out. Sets row (empty: it is not there) and loss,
# the row's on the tuning split; a look also notes in $work what belongs to the study.
codec_run() { # NAME LR SEED
    name=$1
    configure "$name"
    options="-m $MODEL -d $DATA --val-data $tune -n $STEPS -l $2 -b $BATCH -t $SEQ -y 4 --seed $3 $flags --dp none"
    options="$options --val-every $STEPS --val-tokens $VAL_TOKENS --save-every 1000000 --keep 1 --probe $((STEPS / 4 + 1)) $MORE"
    find_row "$options"
    if [ -z "$row" ] && [ -n "$2" ] && [ $looking = 0 ] && echo "$name" | grep -Eqx -- "$ONLY"; then
        before=$(date +%s)
        measure "$2" "$3" "$options"
        took=$(($(date +%s) - before)) started=$((started + 1))
        row="$hash,$config,$codec,$p,$2,$3,$STEPS,$results,$took,$options"
        echo "$row" >> "$study_csv"
        echo "$row" | awk -F, -v n=$started -v all="$missing" -v minutes=$((($(date +%s) - begin) / 60)) -v name="$name" '{
            printf "%d of about %d, %d min: %s lr %s seed %s: tuning loss %s, reporting %s, cosine %s, %.0f bytes a token, %d s\n",
                n, all, minutes, name, $5, $6, $8, $9, $11, $13 + $14, $19 }'
    fi
    loss=$(echo "$row" | cut -d, -f8)
}

# The base model's loss on the reporting split.
start_run() {
    name=start
    find_row "--eval -m $MODEL --val-data $report --val-tokens $VAL_TOKENS -t $SEQ"
    if [ -n "$row" ] || [ $looking = 1 ]; then return; fi
    started=$((started + 1))
    evaluate "$MODEL" "$study_folder/start.txt"
    echo "$hash,start,none,-,-,-,0,,$loss,,,,,,,,,,,--eval" >> "$study_csv"
    echo "$started of about $missing: before training, reporting loss $loss"
}

# The runs of the search with seed 1: from the middle of the list to the side that is better, until it gets worse. Sets
# best_lr; empty if nothing is there.
climb() { # NAME
    codec_run "$1" "${UP%% *}" 1
    above=$loss best=nan best_lr='' side=$DOWN
    codec_run "$1" "${DOWN%% *}" 1
    if is_less "$above" "$loss"; then side=$UP; fi
    for lr in $side; do
        codec_run "$1" "$lr" 1
        if is_less "$loss" "$best"; then
            best=$loss best_lr=$lr
        elif [ "$best" != nan ]; then
            break
        fi
    done
}

# A run at the learning rate that the search has found, which it waits for.
best_run() { # NAME SEED
    configure "$1"
    was=$looking looking=2
    case $p in
    -) climb "$1" ;;
    *) climb "$searched-20x" ;;
    esac
    looking=$was
    codec_run "$1" "$best_lr" "$2"
}

seeds() { # NAMES
    for entry in $1; do
        best_run "$entry" 2
        best_run "$entry" 3
    done
}

# The whole study, what tells most first.
walk() {
    start_run
    for entry in $FIRST; do climb "$entry"; done
    for entry in $RATES; do best_run "$entry" 1; done
    for entry in $OTHERS; do climb "$entry"; done
    seeds "$FIRST"
    for entry in $LAST; do best_run "$entry" 1; done
    seeds "$OTHERS"
}

table() { # from $work/rows to the Markdown file, and to $work/NAME.points for the plot
    {
        echo "# Codecs: $STEPS steps of $BATCH x $SEQ tokens, one replica of 4 stages"
        echo
        echo "Losses in nats a token on the reporting split after the last step, mean over the seeds ± half their range;"
        echo "*gain kept*: what the loss fell, as a share of what it falls without a codec and with the same seed; *codec adds*:"
        echo "to the tuning loss, when that is measured through the codec; *cosine* of the gradient with"
        echo "the one without codec, and after the filter; bytes a token of all boundaries, both ways, and of the anchor's"
        echo "tables and factors. $(wc -l < "$work/rows") runs are in, $missing are not."
        echo
        awk -F, -v points="$work" -v lrs="$(echo "$DOWN $UP" | tr ' ' '\n' | sort -g | tr '\n' ' ')" -f scripts/codecs.awk "$work/rows"
    } > "$work/table.md"
    mv "$work/table.md" "$study_folder.md"
}

# Loss against bytes, with seed 1: a line for what takes -p, points for the others, and the loss before training.
look_of() { # CONFIG: how gnuplot draws it
    case $1 in
    none) echo "points pt 5 ps 1.6 lc rgb '#000000'" ;;
    quant8) echo "points pt 9 ps 1.6 lc rgb '#7f7f7f'" ;;
    quant4) echo "points pt 11 ps 1.6 lc rgb '#7f7f7f'" ;;
    aqsgd) echo "points pt 13 ps 1.6 lc rgb '#9467bd'" ;;
    tahquant) echo "points pt 15 ps 1.6 lc rgb '#8c564b'" ;;
    klt) echo "linespoints pt 7 ps 1.2 lw 2.5 lc rgb '#d62728'" ;;
    klt+filter) echo "linespoints pt 6 ps 1.2 lw 1.5 dt 2 lc rgb '#d62728'" ;;
    topk) echo "linespoints pt 7 ps 1 lw 2 lc rgb '#2ca02c'" ;;
    bottleneck) echo "linespoints pt 7 ps 1 lw 2 lc rgb '#ff7f0e'" ;;
    mask) echo "linespoints pt 7 ps 1 lw 2 lc rgb '#1f77b4'" ;;
    mask+filter) echo "linespoints pt 6 ps 1 lw 1.5 dt 2 lc rgb '#1f77b4'" ;;
    esac
}
plot() {
    if ! command -v gnuplot > /dev/null; then echo "codecs: no gnuplot here, no plot"; return; fi
    curves=
    for config in none quant8 quant4 aqsgd tahquant klt klt+filter topk bottleneck mask mask+filter; do
        [ -s "$work/$config.points" ] || continue
        sort -g "$work/$config.points" -o "$work/$config.points"
        curves="$curves${curves:+, }'$work/$config.points' with $(look_of $config) title '$config'"
    done
    [ -n "$curves" ] || return 0
    range=$(sort -g "$work"/*.points | awk 'NR == 1 { low = $1 } END { print low / 1.4 ":" $1 * 1.4 }')
    if [ -s "$work/start.loss" ]; then curves="$curves, $(cat "$work/start.loss") lw 1.5 dt 3 lc rgb '#7f7f7f' title 'before training'"; fi
    gnuplot << PLOT
set terminal pngcairo size 900,540
set output '$study_folder.png'
set xlabel 'bytes a token: all boundaries, both ways, and tables'
set ylabel 'held-out loss, nats a token'
set logscale x
set xrange [$range]
set xtics (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
set offsets graph 0, graph 0, graph 0.04, graph 0.04
set grid
set key outside right Left reverse
plot $curves
PLOT
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap stop INT TERM HUP
started=0 begin=$(date +%s) looking=0
if [ $table = 0 ]; then
    lock
    prepare
    look
    walk
fi
finish $started
