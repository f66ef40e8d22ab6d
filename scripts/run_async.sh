#!/bin/sh
# Asynchronous training from scratch with delays of up to 31 updates: what optimizers make of it, each at its best learning
# rate. A thin Llama of 32 layers on P stages (--schedule async; P = 1 is the same model without delay) learns bytes of
# WordNet, in the same order whatever the optimizer.
#
#   scripts/run_async.sh            runs what is not in runs/async-TAG.csv yet, then the tables and the plot
#   scripts/run_async.sh --table    only those, of the runs that are there
#   scripts/run_async.sh --quick    the same study in seconds, of a tiny model and made-up text, under runs/async-quick
#   scripts/run_async.sh --fine     as many tokens in four times as many steps, a quarter as large: a delay of 31 updates is
#                                   less of such a run. Only P = 1 and 32 of four optimizers; an hour on two cores
#
# First every optimizer at P = 1 and 32, its learning rate climbed for among RATES; then P = 4, 8, 16 of adamw, the better
# baseline and rotate-2nd-bi with the rates from the best at P = 1 to the best at 32, and what differs from such a run in one
# thing (+nostash, +seldom: f = 100 instead of 10, +aware and +reversed: when the stages refresh) with its rate; then models
# of 8 and 16 layers on as many stages with the rates of the 32 layers. Betas .9 and .999 (nesterov .99), decay .01, clipping
# at 1, cosine to a tenth, no dropout.
#
# The slowdown is taken from held-out losses, a trailing mean of 3 validations on the same 4096 tokens, 25 steps apart: a step's
# training loss scatters by 0.09, a mean of 20 still by 0.02, which is what 20 to 40 steps gain towards the end.
#
# The arithmetic: a step of 4 x 128 tokens takes 0.09 s on one core with adamw, 0.16 s rotated (d 64; at d 128 0.2 and 0.5 s),
# a tenth more with validation. About 75 runs, 66 counted in runs of 32 layers, of 1000 steps (0.51M tokens) with 0.14 s a
# step in the mean are 9300 s of one core: 80 minutes on two. Programs run side by side with one thread each: JOBS (one a
# core; `taskset -c 1 scripts/run_async.sh` takes one). On one core STEPS=500 fits 90 minutes.
#
# A run is known by all of its options and `version`: whoever changes what an optimizer does counts that up. STEPS (1000), TAG,
# ONLY ('rotate.*'), RUNS and TRAIN as in scripts/study.sh.
cd "$(dirname "$0")/.."
study=async version=1 quick=0 table=0 fine=0
for word in "$@"; do
    case $word in
    --quick) quick=1 ;;
    --table) table=1 ;;
    --fine) fine=1 STEPS=${STEPS:-4000} TAG=${TAG:-fine} ;;
    *) echo "usage: scripts/run_async.sh [--quick | --fine] [--table]" >&2; exit 2 ;;
    esac
done
if [ $quick = 1 ]; then STEPS=${STEPS:-8} TAG=${TAG:-quick}; fi
STEPS=${STEPS:-1000} JOBS=${JOBS:-$(nproc)}
. scripts/study.sh
columns=hash,name,layers,stages,lr,steps,loss,train_loss,seconds,run,options

if [ $quick = 1 ]; then
    DATA=$study_folder/train.jsonl VAL=$study_folder/val.jsonl
    shape=d=16,heads=2,kv=2,ffn=16,ctx=32 size='-b 1 -t 32' VAL_TOKENS=256 VAL_EVERY=2 WINDOW=2
    RATES='3e-3 1e-2' START=1e-2 DEPTH=4 GRID=2 SIZES=2
    BASELINES='pipedream-lr' ROTATIONS='' VARIANTS='+nostash'
    export OMP_WAIT_POLICY=passive # many programs of a moment each
else
    DATA=data/wordnet/train.jsonl VAL=data/wordnet/val.jsonl
    shape=d=64,heads=2,kv=2,ffn=128,ctx=128 size='-b 4 -t 128' VAL_TOKENS=4096 VAL_EVERY=$(((STEPS + 39) / 40)) WINDOW=3
    RATES='3e-4 1e-3 3e-3 1e-2' START=3e-3 DEPTH=32 GRID='16 8 4' SIZES='16 8'
    BASELINES='pipedream-lr nesterov' ROTATIONS='rotate-2nd-uni rotate-1st-bi rotate-1st-uni'
    VARIANTS='+nostash +seldom +aware +reversed'
fi
if [ $fine = 1 ]; then
    size='-b 1 -t 128' START=1e-3 BASELINES=nesterov ROTATIONS=rotate-1st-bi VARIANTS='' GRID='' SIZES=''
fi

prepare() { # the texts
    mkdir -p "$study_folder"
    [ -s "$study_csv" ] || echo $columns > "$study_csv"
    if [ $quick = 1 ]; then
        awk 'BEGIN { for (i = 0; i < 300; i++) printf "{\"text\": \"number %d is %s, its square %d\"}\n",
            i, i % 2 ? "odd" : "even", i * i }' > "$DATA"
        sed -n '1,100p' "$DATA" > "$VAL"
    elif [ ! -s "$DATA" ] || [ ! -s "$VAL" ]; then
        data/wordnet/prepare.sh
    fi
}

# Sets flags of a name like rotate-2nd-bi+aware at P stages. Without a delay pipedream-lr is adamw.
configure() { # NAME STAGES
    case $1-$2 in
    adamw*-* | pipedream-lr-1) flags='' ;;
    rotate-*)
        flags=${1%%+*} flags=${flags#rotate-}
        flags="--optimizer rotate --rotate-source ${flags%-*} --rotate-geometry ${flags#*-}"
        ;;
    *) flags="--optimizer ${1%%+*}" ;;
    esac
    case $1 in
    *+nostash) flags="$flags --no-stash" ;;
    *+seldom) flags="$flags --rotate-every 100" ;;
    *+aware) flags="$flags --refresh stage-aware" ;;
    *+reversed) flags="$flags --refresh reversed" ;;
    esac
    [ "$2" = 1 ] || flags="--schedule async --wire fp32 $flags" # nothing but the delay differs from P = 1
}

# Trains: loss (mean of the last WINDOW validations) and training loss (of the last tenth), into $results, and the
# validations into $run.curve. A run that diverges has losses of nan.
measure() { # OPTIONS
    folder=$study_folder/$run
    rm -rf "$folder"
    mkdir -p "$folder"
    # shellcheck disable=SC2086  # words
    train_to "$folder/output.txt" $1 --threads 1 -o "$folder"
    if ! grep -q "^done: $STEPS steps" "$folder/output.txt"; then
        tail -1 "$folder/output.txt" | grep -Eq '^train: .*(not finite|no finite|infinite or NaN)' ||
            fail "$folder/output.txt"
    fi
    results=$(awk -v steps="$STEPS" -v window=$WINDOW -v curve="$study_folder/$run.curve" '
        function number(key,   at) { # what follows the key; "" if nothing does
            at = index($0, "\"" key "\":")
            if (!at) return ""
            at = substr($0, at + length(key) + 3, 24)
            return at ~ /^[-0-9]/ ? at + 0 : ""
        }
        { step = number("step"); val = number("val_loss"); loss = number("loss") }
        val != "" { print step, val > curve; vals[n++] = val }
        step > steps * 0.9 && loss != "" { sum += loss; losses++ }
        END {
            if (step < steps || n < window || !losses) { print "nan,nan"; exit }
            for (i = n - window; i < n; i++) last += vals[i]
            printf "%.6f,%.6f\n", last / window, sum / losses
        }' "$folder/log.jsonl")
    rm -rf "$folder"
}

# One run, unless the CSV has it, this is only a look, or ONLY leaves it out. Sets row (empty: it is not there) and loss.
async_run() { # NAME LAYERS STAGES LR
    name=$1
    configure "$1" "$3"
    options="--init $shape,layers=$2,vocab=258 -d $DATA --val-data $VAL $size -y $3 $flags -l $4 -n $STEPS --seed 1"
    options="$options --val-every $VAL_EVERY --val-tokens $VAL_TOKENS --save-every 1000000 --keep 1"
    find_row "$options"
    if [ -z "$row" ] && [ -n "$4" ] && [ $looking = 0 ] && echo "$name" | grep -Eqx -- "$ONLY"; then
        run=$name-L$2-P$3-lr$4 before=$(date +%s)
        measure "$options"
        row="$hash,$name,$2,$3,$4,$STEPS,$results,$(($(date +%s) - before)),$run,$options"
        echo "$row" >> "$study_csv"
        echo "$row" | awk -F, -v n=$(($(wc -l < "$study_csv") - lines)) -v all="$missing" \
            -v minutes=$((($(date +%s) - begin) / 60)) '{
            printf "%d of %d or more, %d min: %s, %d layers, P = %d, lr %s: loss %s, training %s, %d s\n",
                n, all, minutes, $2, $3, $4, $5, $7, $8, $9 }'
    fi
    loss=$(echo "$row" | cut -d, -f7)
}

# Tries rates in turn; goes on while it gets better. Sets best and best_lr.
try_rates() { # NAME LAYERS STAGES RATES...
    searched=$1 layers=$2 stages=$3
    shift 3
    for lr in "$@"; do
        async_run "$searched" "$layers" "$stages" "$lr"
        if is_less "$loss" "$best"; then
            best=$loss best_lr=$lr
        elif [ "$best" != nan ] || [ -z "$loss" ]; then
            break
        fi
    done
}

# The rates of RATES above (1), or below (-1) one, from there on.
rates_beside() {
    echo "$RATES" | tr ' ' '\n' | awk -v from="$1" -v side="$2" '($1 - from) * side > 0' | sort -g |
        if [ "$2" = 1 ]; then cat; else tac; fi
}

# A search from START: up while it gets better, else down. best_lr is empty if nothing is there.
climb() { # NAME STAGES
    best=nan best_lr=''
    try_rates "$1" $DEPTH "$2" $START
    # shellcheck disable=SC2046  # words
    [ "$best" = nan ] || try_rates "$1" $DEPTH "$2" $(rates_beside $START 1)
    # shellcheck disable=SC2046
    if [ -z "$best_lr" ] || [ "$best_lr" = $START ]; then try_rates "$1" $DEPTH "$2" $(rates_beside $START -1); fi
}

# All rates from the best of P = 1 to that of P = DEPTH, either way round.
between() { # NAME STAGES
    found climb "$1" 1
    one=$best_lr
    found climb "$1" $DEPTH
    rates=$(echo "$RATES" | tr ' ' '\n' | awk -v a="${one:-0}" -v b="${best_lr:-0}" '
        $1 + 0 >= (a + 0 < b + 0 ? a : b) + 0 && $1 + 0 <= (a + 0 < b + 0 ? b : a) + 0')
    best=nan best_lr=''
    for rate in $rates; do
        async_run "$1" $DEPTH "$2" "$rate"
        if is_less "$loss" "$best"; then best=$loss best_lr=$rate; fi
    done
}

# What a search has found, looked up only.
found() {
    if [ $looking = 2 ]; then
        "$@"
        return
    fi
    was=$looking looking=2
    "$@"
    looking=$was
}

# The run of a name, with the rate that a search has found.
inherit() { # NAME LAYERS STAGES SEARCH OF STAGES
    found "$4" "$5" "$6"
    async_run "$1" "$2" "$3" "$best_lr"
}

# Goes through cells ("climb NAME P") in JOBS programs at a time, each cell in one; the next stage of the study needs them all.
stage() { # CELLS, one a line
    echo "$1" | sed '/^$/d' > "$work/cells"
    if [ $looking != 0 ]; then
        while read -r cell; do $cell; done < "$work/cells"
        return
    fi
    rm -rf "$work/claims"
    mkdir "$work/claims"
    walkers=
    for _ in $(seq "$JOBS"); do
        (
            trap 'stop > /dev/null' TERM
            claimed=0
            while read -r cell <&8; do
                claimed=$((claimed + 1))
                mkdir "$work/claims/$claimed" 2> /dev/null || continue
                $cell
            done 8< "$work/cells"
        ) &
        walkers="$walkers $!"
    done
    for walker in $walkers; do wait "$walker" || failed=1; done
    walkers=
    [ $failed = 0 ] || exit 1
}
stop_all() {
    # shellcheck disable=SC2086  # words
    [ -z "$walkers" ] || kill $walkers 2> /dev/null || true
    wait
    stop
}

# Sets better: the baseline with the lower loss at the largest delay.
find_better() {
    better=${BASELINES%% *} lowest=nan
    for entry in $BASELINES; do
        found climb "$entry" $DEPTH
        if is_less "$best" "$lowest"; then lowest=$best better=$entry; fi
    done
}

# The whole study, what tells most first.
walk() {
    cells=
    for entry in adamw rotate-2nd-bi $BASELINES $ROTATIONS; do
        [ "$entry" = pipedream-lr ] || cells="$cells
climb $entry 1" # else adamw's
        cells="$cells
climb $entry $DEPTH"
    done
    stage "$cells"
    find_better
    grid="rotate-2nd-bi adamw $better" cells=
    for variant in $VARIANTS; do
        case $variant in
        +nostash) names=$grid ;;
        *) names=rotate-2nd-bi ;;
        esac
        for entry in $names; do
            cells="$cells
inherit $entry$variant $DEPTH $DEPTH climb $entry $DEPTH"
        done
        [ "$variant" != +seldom ] || cells="$cells
inherit rotate-2nd-bi+seldom $DEPTH 1 climb rotate-2nd-bi 1"
    done
    for many in $GRID; do
        for entry in $grid; do
            cells="$cells
between $entry $many"
        done
    done
    stage "$cells"
    cells=
    for many in $SIZES; do
        for entry in $grid; do
            [ "$entry" = pipedream-lr ] || cells="$cells
inherit $entry $many 1 climb $entry 1"
            cells="$cells
inherit $entry $many $many between $entry $many"
        done
    done
    stage "$cells"
}

table() { # from $work/rows to the Markdown file, and to $work/*.points for the plot
    {
        echo "# Asynchronous training: $DEPTH layers, $STEPS steps of ${size#-b } tokens" | sed 's/-t/x/'
        echo
        echo "Losses in nats a byte of the same $VAL_TOKENS held-out tokens every $VAL_EVERY steps; curves are trailing means"
        echo "of $WINDOW of these, and in between straight. *Slowdown*: steps to the loss that the optimizer's own P = 1"
        echo "ends at, or has after a third or a tenth of the steps, over the steps that P = 1 takes to it; \`>x\`: not"
        echo "reached in $STEPS steps. *Beside the baseline*: how many steps fewer to where $better, the better baseline, ends with as"
        echo "many stages. $(wc -l < "$work/rows") runs are in, $missing are not."
        echo
        awk -F, -v points="$work" -v folder="$study_folder" -v window=$WINDOW -v steps="$STEPS" -v depth=$DEPTH \
            -v baseline="$better" -v rates="$RATES" -f scripts/async.awk "$work/rows"
    } > "$work/table.md"
    mv "$work/table.md" "$study_folder.md"
}

look_of() { # NAME: its colour
    case $1 in
    adamw*) echo "lc rgb '#1f77b4'" ;;
    pipedream-lr*) echo "lc rgb '#2ca02c'" ;;
    nesterov*) echo "lc rgb '#ff7f0e'" ;;
    rotate-1st-uni) echo "lc rgb '#c49c94'" ;;
    rotate-1st-bi) echo "lc rgb '#8c564b'" ;;
    rotate-2nd-uni) echo "lc rgb '#9467bd'" ;;
    *) echo "lc rgb '#d62728'" ;;
    esac
}

# Left the losses of P = 1 (dashed) and of the largest P, right the slowdown; what is not reached is an open triangle.
plot() {
    if ! command -v gnuplot > /dev/null; then echo "$study: no gnuplot here, no plot"; return; fi
    losses='' slow=''
    for entry in adamw pipedream-lr nesterov rotate-1st-uni rotate-1st-bi rotate-2nd-uni rotate-2nd-bi; do
        file=$work/$entry-$DEPTH.points
        [ ! -s "$file" ] || losses="$losses${losses:+, }'$file' with lines lw 2 $(look_of $entry) title '$entry'"
        file=$work/$entry-1.points
        [ ! -s "$file" ] || losses="$losses${losses:+, }'$file' with lines lw 1.5 dt 2 $(look_of $entry) notitle"
        file=$work/$entry.slow
        [ -s "$file" ] || continue
        slow="$slow${slow:+, }'$file' using 1:2 with lines lw 2 $(look_of $entry) title '$entry'"
        slow="$slow, '' using 1:(\$3 == 1 ? \$2 : NaN) with points pt 7 ps 1.2 $(look_of $entry) notitle"
        slow="$slow, '' using 1:(\$3 == 1 ? NaN : \$2) with points pt 8 ps 1.6 $(look_of $entry) notitle"
    done
    [ -n "$losses" ] || return 0
    gnuplot << PLOT
set terminal pngcairo size 1300,540
set output '$study_folder.png'
set multiplot layout 1,2
set grid
set key top right
set title '$DEPTH layers: P = $DEPTH, and dashed P = 1'
set xlabel 'step'
set ylabel 'held-out loss, nats a byte'
set xrange [$((STEPS / 10)):$STEPS]
plot $losses
set title 'steps to what P = 1 has after a tenth of them'
set xlabel 'stages P'
set ylabel 'times as many'
set xrange [*:*]
set yrange [0.9:*]
set offsets graph 0.03, graph 0.03, graph 0.05, 0
set logscale x 2
set key top left
${slow:+plot $slow}
unset multiplot
PLOT
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap stop_all INT TERM HUP
begin=$(date +%s) looking=0 failed=0 walkers='' lines=0
if [ $table = 0 ]; then
    lock
    prepare
    look
    lines=$(wc -l < "$study_csv")
    walk
    lines=$(($(wc -l < "$study_csv") - lines))
fi
finish $lines
