#!/bin/sh
# The method's variants on the base model and the medical definitions, with the same tokens: two fast replicas each, and
# the anchor as a third where it is on. About 2 minutes a run on two cores. STEPS, LR and TAG as in scripts/study.sh.
cd "$(dirname "$0")/.."
study=variants
. scripts/study.sh
study_run Dense -x 2 --dp dense
study_run +DP -x 2
study_run M90 -p 0.90 -x 2 --anchor 0
study_run M95 -p 0.95 -x 2 --anchor 0
study_run M90+AP -p 0.90 -x 3
study_run M95+AP -p 0.95 -x 3
# what the paper leaves open or takes for granted
study_run +DP-rank8 -x 2 --powersgd-rank 8
study_run no-DP -x 2 --dp none
study_run M50 -p 0.5 -x 2 --anchor 0
study_run M95-lr1e-4 -p 0.95 -x 2 --anchor 0 -l 1e-4
study_run M95+AP-lr1e-4 -p 0.95 -x 3 -l 1e-4
study_run M90-2stages -p 0.9 -x 2 --anchor 0 -y 2 -l 3e-4
study_table
