#!/bin/sh
# The paper's ablations around M95+AP: p, delay, tau, alpha; and what its text leaves open: full-rank factors, debiased
# momentum. About a minute a run on two cores. STEPS, LR and TAG as in scripts/study.sh.
cd "$(dirname "$0")/.."
study=ablations
LR=${LR:-1e-4} BATCH=${BATCH:-4} # where M95 learns at all: at 1e-3 every row would collapse alike
. scripts/study.sh
study_run base -p 0.95 -x 3
study_run p=.90 -p 0.90 -x 3
study_run p=.99 -p 0.99 -x 3
study_run delay=10 -p 0.95 -x 3 --anchor-delay 10
study_run delay=50 -p 0.95 -x 3 --anchor-delay 50
study_run tau=.05-rel -p 0.95 -x 3 --tau-relative --tau 0.05
study_run tau=1e-5 -p 0.95 -x 3 --tau 1e-5
study_run tau=1e-1 -p 0.95 -x 3 --tau 1e-1
study_run alpha=0 -p 0.95 -x 3 --alpha 0
study_run alpha=1 -p 0.95 -x 3 --alpha 1
study_run full-rank -p 0.95 -x 3 --anchor-rank 0
study_run debias -p 0.95 -x 3 --anchor-debias
study_table
