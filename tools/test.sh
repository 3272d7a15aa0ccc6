#!/usr/bin/env bash
# usage: bash tools/test.sh                    lint, format check, types, then the quick tests (not e2e, slow, dist or nightly)
#        bash tools/test.sh --all              the same, with the tests marked e2e
#        bash tools/test.sh tests/config -k …  only pytest, with these arguments
# Creates the project's Python environment if there is none (tools/env.sh --dev).
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"   # started by `sh`
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
case "${1:-}" in -h|--help) sed -n '2,5s/^# //p' "$root/tools/test.sh"; exit 0;; esac

python=$(bash "$root/tools/env.sh" --dev) || exit 1
export NO_VENV=1 PYTHON=$python   # tests that call tools/train.sh use this environment
tests="not e2e and not slow and not dist and not nightly"
if [ "$*" = --all ]; then
  tests="not slow and not dist and not nightly"
elif [ $# -gt 0 ]; then
  exec "$python" -m pytest --rootdir "$root" -c "$root/pyproject.toml" "$@"
fi

cd "$root"
# run all checks, even after a failed one
status=0 failed=()
check() { "$@" || { status=$?; failed+=("${*:2}"); }; }
check "$python" -m ruff check .
check "$python" -m ruff format --check .
check "$python" -m mypy
# in two processes, because most tests use one core; all tests of a file run in the same process
check "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$tests"
for name in ${failed[@]+"${failed[@]}"}; do printf 'test.sh: failed: python %s\n' "$name" >&2; done
exit $status
