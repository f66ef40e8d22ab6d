#!/bin/sh
# A mesh on a Slurm cluster: one process a cell, started by srun. `sbatch scripts/slurm.sh`, after you have set the
# lines below to your cluster.
#
# What must fit together: --ntasks is the number of cells, replicas x stages (-x, -y), and 1 for the anchor: -x 2 -y 2
# without compression has 4; -x 3 -y 2 -p 0.95 has 2 fast replicas of 2 stages and the anchor, 5. The program says so in
# one line if it does not.
#
# Every task runs the same command. Task 0 hosts the run and has a cell; it writes the token into $RUN/join, readable
# for you only, and the others wait for it there: $RUN must be on a file system that all nodes see. No port is chosen
# and no token typed. A requeued job goes on with its last checkpoint.
#
#SBATCH --job-name=meshtune
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
##SBATCH --gpus-per-task=1          # with a CUDA build; each task then sees its own GPU only

RUN=${RUN:-$PWD/runs/slurm}
MODEL=${MODEL:-model.bin}
DATA=${DATA:-data/medical/train.jsonl}

# What an earlier start of this job has left, if there is any.
resume=
if [ -e "$RUN/log.jsonl" ]; then resume=--resume; fi

# --kill-on-bad-exit: who waits for a process that has failed is ended too. Leave it out with --min-replicas, where the
# run goes on without a lost replica.
# --status-port: the run as a page on the first node: ssh -L 8080:localhost:8080 NODE, then http://localhost:8080/
# shellcheck disable=SC2086  # no resume is no argument
exec srun --kill-on-bad-exit=1 ./train -m "$MODEL" -d "$DATA" -x 2 -y 2 -o "$RUN" \
    --threads "${SLURM_CPUS_PER_TASK:-8}" --status-port 8080 $resume
