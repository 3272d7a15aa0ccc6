#!/usr/bin/env bash
# usage: bash tools/chaos.sh COUNT [--seed S] [--procs N] [--only I]
# Runs COUNT real training jobs with random faults and prints how each ended; exit code 1 if a job hung or gave no error.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
case "${1:-}" in ""|-h|--help) sed -n '2,3s/^# //p' "$root/tools/chaos.sh"; exit 0;; esac
python=$(bash "$root/tools/env.sh") || exit 1
exec "$python" "$root/tests/chaos/campaign.py" "$@"
