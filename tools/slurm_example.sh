#!/usr/bin/env bash
# usage: sbatch [--nodes=N ...] tools/slurm_example.sh CONFIG [key=value ...]      in the repository's folder; copy and adapt
#
# Slurm starts one launcher on each machine, and the launcher starts PROCS processes there (default: the number of GPUs of
# the machine, else of the CPUs for the task). Before the time limit Slurm sends SIGTERM: the job saves, ends with exit code
# 75 and is queued again.
#SBATCH --job-name=libai
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
if [ $# -lt 1 ]; then sed -n '2s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; fi
if [ -z "${SLURM_JOB_ID:-}" ]; then echo "error: SLURM_JOB_ID is not set, so this is not a Slurm job. Start it with sbatch." >&2; exit 2; fi
cd "${SLURM_SUBMIT_DIR:?}" || exit 2   # Slurm runs a copy of this file from another folder

NODE=$SLURM_JOB_NUM_NODES
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 2
ADDR=${hosts%%$'\n'*}
PORT=$((20000 + SLURM_JOB_ID % 10000))   # two jobs that share a machine rarely collide
PROCS=${PROCS:-${SLURM_GPUS_ON_NODE:-${SLURM_CPUS_PER_TASK:-1}}}
export NODE ADDR PORT PROCS
config=$1; shift
# the job was stopped and queued again: continue from its checkpoint
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then set -- "$@" --resume; fi

# SLURM_NODEID is set only inside srun
srun --kill-on-bad-exit=0 bash -c 'NODE_RANK=$SLURM_NODEID exec bash tools/train.sh tools/train_net.py "$0" "$PROCS" "$@"' "$config" "$@"
code=$?
if [ $code -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
