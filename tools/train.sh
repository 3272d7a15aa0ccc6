#!/usr/bin/env bash
# usage: bash tools/train.sh FILE CONFIG PROCS [key=value | +key=value | ~key | --resume | --eval-only | --max-restarts N | ...]
# example: bash tools/train.sh tools/train_net.py configs/gpt_stdlib.py 2 graph.enabled=true train.train_iter=100
# PROCS = processes on this machine. Several machines: before the command NODE=<number of machines> NODE_RANK=<0...> ADDR=<address of machine 0> [PORT=29500]
#
# Creates the project's Python environment if there is none (tools/env.sh), then starts the job (python -m libai.launch).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"   # started by `sh`
set -euo pipefail
# If a job is started with a closed stream (`2>&-`), another file, such as this script, could get the stream's number.
for fd in 1 2; do
  if [ ! -L /proc/self/fd/$fd ] || [ /proc/self/fd/$fd -ef "${BASH_SOURCE[0]}" ]; then eval "exec $fd>/dev/null"; fi
done
tools=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

# report a mistyped command before the environment is created
case "${1:-}" in -h|--help) sed -n '2,4s/^# //p' "$tools/train.sh"; exit 0;; esac
if [ $# -lt 3 ]; then
  echo "error: FILE, CONFIG and PROCS are needed, found $# of them: $*" >&2; sed -n '2,4s/^# //p' "$tools/train.sh" >&2; exit 2
fi
if ! [[ $3 =~ ^[1-9][0-9]*$ ]]; then
  echo "error: PROCS is '$3'; it must be the number of processes on this machine, a whole number of at least 1. The order is FILE CONFIG PROCS." >&2
  exit 2
fi

python=$(bash "$tools/env.sh") || exit 1
exec "$python" "${tools%/*}/libai/launch/__main__.py" "$@"
