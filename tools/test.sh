#!/usr/bin/env bash
# usage: bash tools/test.sh                    lint, format check, types, then the tests but tests/dist
#        bash tools/test.sh tests/config -k …  only pytest, with these arguments
# Makes the project's Python environment when there is none (tools/env.sh).
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
case "${1:-}" in -h|--help) sed -n '2,4s/^# //p' "$root/tools/test.sh"; exit 0;; esac

python=$(bash "$root/tools/env.sh") || exit 1
export NO_VENV=1 PYTHON=$python   # tests that call tools/train.sh use this environment
if [ $# -gt 0 ]; then exec "$python" -m pytest --rootdir "$root" -c "$root/pyproject.toml" "$@"; fi

cd "$root"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
# two at a time: most tests use one core, and a whole file stays in one process
exec "$python" -m pytest -n 2 --dist loadfile
