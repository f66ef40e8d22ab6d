#!/bin/sh
# Synchronous or asynchronous, AdamW or rotated, whole boundaries or a twentieth of them: the base model on the medical
# definitions, four stages, every run of as many tokens at the best of RATES ('3e-4 1e-3 3e-3'). A step is 2 x 256 tokens, which an
# asynchronous pipeline takes as one micro-batch; a synchronous one gets steps of 4 x 512 tokens beside it, and a quarter of
# the updates, because it needs micro-batches to fill its stages. Half a minute to three a run on one core. STEPS (152), TAG
# and ONLY as in scripts/study.sh.
cd "$(dirname "$0")/.."
study=schedules
STEPS=${STEPS:-152} BATCH=${BATCH:-2}
. scripts/study.sh
for rate in ${RATES:-3e-4 1e-3 3e-3}; do
    row() { # NAME OPTIONS...
        entry=$1
        shift
        study_run "$entry@$rate" -l "$rate" --threads 1 "$@"
    }
    filled="-b $((4 * BATCH)) --micro-batch $BATCH -n $((STEPS / 4))" klt='--codec klt -p 0.95 -x 2' mask='-p 0.95 -x 2'
    # shellcheck disable=SC2086  # words
    {
        row sync-small --micro-batch 1
        row sync $filled
        row sync-klt $filled $klt
        row async --schedule async
        row async-rotate --schedule async --optimizer rotate
        row async-klt --schedule async $klt
        row async-klt-rotate --schedule async $klt --optimizer rotate
        row async-mask --schedule async $mask
        row async-mask-rotate --schedule async $mask --optimizer rotate
    }
done
echo
echo "$study, $((STEPS * BATCH * 256)) tokens a run, 4 stages; held-out loss in nats a byte, at the best of the rates"
awk -F, 'NR > 1 {
    split($1, part, "@")
    if (!(part[1] in loss)) order[++n] = part[1]
    if (!(part[1] in loss) || $2 + 0 < loss[part[1]]) { loss[part[1]] = $2 + 0; rate[part[1]] = part[2]; row[part[1]] = $6 " " $7 }
}
END {
    printf "%-18s %9s %6s %10s %9s\n", "", "val loss", "lr", "bytes/tok", "tok/s"
    for (i = 1; i <= n; i++) {
        split(row[order[i]], part, " ")
        printf "%-18s %9.4f %6s %10s %9s\n", order[i], loss[order[i]], rate[order[i]], part[1], part[2]
    }
}' "$study_csv"
