#!/usr/bin/env bash
# usage: bash tools/infer.sh SOURCE PROCS [PROMPT ...] [flags of `libai generate`]
# example: bash tools/infer.sh out/gpt_stdlib 1 "def main(" --max-new-tokens 50
# SOURCE = a run's output folder or a Hugging Face folder; PROCS = processes on this machine that share the model
#
# Creates the project's Python environment if there is none (tools/env.sh), then continues the prompts (libai generate).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"   # started by `sh`
set -euo pipefail
tools=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)

# report a mistyped command before the environment is created
case "${1:-}" in -h|--help) sed -n '2,4s/^# //p' "$tools/infer.sh"; exit 0;; esac
if [ $# -lt 2 ] || ! [[ $2 =~ ^[1-9][0-9]*$ ]]; then
  echo "error: SOURCE and PROCS, a number of processes, are needed, found: $*" >&2; sed -n '2,4s/^# //p' "$tools/infer.sh" >&2; exit 2
fi

python=$(bash "$tools/env.sh") || exit 1
source=$1 procs=$2
shift 2
exec "$python" "$tools/../libai/__main__.py" generate "$source" --procs "$procs" "$@"
