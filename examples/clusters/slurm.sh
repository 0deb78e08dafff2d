#!/bin/bash
# A training on two nodes with four ranks each: `sbatch slurm.sh train.py --epochs 10`. srun's tasks are the ranks, so the
# script says neither `devices` nor `num_nodes`.
#
# It can survive its time limit: 120 s before, SLURM sends SIGUSR1 to every rank, and `fabric.should_stop` becomes true
# on all of them at the same step. The script then saves, and rank 0 calls `scontrol requeue $SLURM_JOB_ID`. The job
# starts again with SLURM_RESTART_COUNT in its environment, and the script loads what it had saved.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Where nodes have GPUs, one for each rank, take away one # of the next line.
##SBATCH --gpus-per-node=4
set -euo pipefail

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# A rank that fails ends the others at once.
exec srun --kill-on-bad-exit=1 python "$@"
