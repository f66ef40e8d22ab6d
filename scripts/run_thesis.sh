#!/bin/sh
# The thesis of basis rotation where nothing is random: AdamW and rotations on a quadratic of 256 weights (dev/bowl.h), with
# the Hessian's eigenvectors along the weights and turned against them, without delay and with gradients 7 updates old.
# Writes runs/thesis.md, in a second.
set -eu
cd "$(dirname "$0")/.."
make --no-print-directory build/bowl > /dev/null
mkdir -p runs
{
    echo "# A quadratic with a delay"
    echo
    echo "600 updates with a cosine of learning rates; f(W) = 1/2 sum_ij h_i h_j (A W B^T)_ij^2 of a 16 x 16 matrix, h from 1"
    echo "down to 0.01. *Loss*: at the end as a share of the first, at the best of four learning rates, and at 0.03. There, of"
    echo "the updates along the three leading eigenvectors: *flips*, the share of signs that are not those of the update before;"
    echo "*cosine* of successive updates; *travel*, the way gone over the way made (1: straight down)."
    echo
    build/bowl
} > runs/thesis.tmp
mv runs/thesis.tmp runs/thesis.md
cat runs/thesis.md
