#!/bin/sh
# The boundary codecs on the base model and the medical definitions, with the same tokens: two fast replicas, and the
# anchor as a third where the codec learns from it. Each at its own rate, and those that take a budget at 5% of the bytes.
# One to two minutes a run on two cores. STEPS, LR, SEED, TAG and ONLY as in scripts/study.sh.
cd "$(dirname "$0")/.."
study=codecs
. scripts/study.sh
study_run none -x 2 --codec none
study_run quant8 -x 2 --codec quant8 --anchor 0
study_run quant4 -x 2 --codec quant4 --anchor 0
study_run tahquant -x 2 --codec tahquant --anchor 0
study_run aqsgd -x 2 --codec aqsgd --anchor 0
study_run topk-20x -p 0.95 -x 2 --codec topk --anchor 0
study_run bottleneck-20x -p 0.95 -x 2 --codec bottleneck --anchor 0
study_run mask-20x -p 0.95 -x 2 --anchor 0
study_run klt-10x -p 0.90 -x 3 --codec klt --anchor-use none
study_run klt-20x -p 0.95 -x 3 --codec klt --anchor-use none
study_run klt-40x -p 0.975 -x 3 --codec klt --anchor-use none
study_run klt-20x-fixed -p 0.95 -x 3 --codec klt --codec-coding fixed --anchor-use none
study_run klt-20x-filter -p 0.95 -x 3 --codec klt
study_table
