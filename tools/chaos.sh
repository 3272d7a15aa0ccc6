#!/usr/bin/env bash
# usage: bash tools/chaos.sh COUNT [SEED] [pytest arguments]
# Runs COUNT real training jobs with random faults and resumes each; one that hangs, gives no error or does not end on the curve of an undisturbed run fails.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
case "${1:-}" in ""|-h|--help) sed -n '2,3s/^# //p' "$root/tools/chaos.sh"; exit 0;; esac
export CHAOS_COUNT=$1 CHAOS_SEED=${2:-1}
exec bash "$root/tools/test.sh" "$root/tests/faults/test_table.py" -m nightly "${@:3}"
