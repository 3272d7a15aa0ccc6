#!/usr/bin/env bash
# Print the Python interpreter to use. If no environment has the packages, create the project's own (.venv) first, with
# the command `libai` of this clone (.venv/bin/libai).
#
#   bash tools/env.sh                          an active environment that can import oneflow, else .venv
#   bash tools/env.sh --dev                    the same, with the packages for tests and documentation
#   PYTHON=/path/to/python3.10 bash tools/env.sh    create .venv from that interpreter
#   VENV=/big/disk/venv bash tools/env.sh           create the environment in that folder
#   NO_VENV=1 [PYTHON=…] bash tools/env.sh          use the current interpreter, or PYTHON, as it is
#   NO_UV=1 bash tools/env.sh                       install with pip even if uv is available
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"   # started by `sh`
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=${VENV:-$root/.venv}
case "$venv" in /*) ;; *) venv=$PWD/$venv;; esac
parent=$(dirname "$venv")
core=$root/requirements/core.lock dev=$root/requirements/dev.lock
modules="oneflow numpy omegaconf hydra tensorboardX rich safetensors filelock tokenizers" extra=
if [ "${1:-}" = --dev ]; then modules+=" pytest pytest_timeout xdist hypothesis ruff mypy matplotlib sacrebleu" extra='[dev]'; fi

say() { printf 'env: %s\n' "$*" >&2; }
die() { say "$1"; shift; for line in "$@"; do printf '     %s\n' "$line" >&2; done; exit 1; }

# ---------------------------------------------------------------- an existing environment

if [ "${NO_VENV:-0}" = 1 ]; then
  for name in "${PYTHON:-}" python3 python; do [ -n "$name" ] && command -v "$name" && exit 0; done
  die "NO_VENV=1, but there is no python3 on PATH. Set PYTHON=/path/to/python3.10."
fi

# .ready holds the hash of each lock file whose packages are all installed; .command holds the clone that bin/libai runs
digest() { sha256sum < "$1" | cut -d' ' -f1; }
has() { [ -x "$venv/bin/python" ] && grep -qsx "$(digest "$1")" "$venv/.ready"; }
has_command() { [ -f "$venv/.command" ] && [ "$(< "$venv/.command")" = "$root" ]; }
is_ready() { has_command && has "$core" && { [ -z "$extra" ] || has "$dev"; }; }
finish() { printf '%s\n' "$venv/bin/python"; exit 0; }

# Prints the interpreter and exits if it has all the packages. Looks for the modules first (30 ms) and imports oneflow
# (1 s) only if all modules are found.
use_if_complete() {
  local answer status=0
  command -v "$1" >/dev/null 2>&1 || return 0
  answer=$(MODULES=$modules EXTRA=$extra "$1" - <<'PY' 2>/dev/null
import importlib.util, os, sys
missing = [name for name in os.environ["MODULES"].split() if importlib.util.find_spec(name) is None]
if "oneflow" in missing:
    sys.exit(1)
if missing:
    print(f"env: {sys.executable} has oneflow but not {', '.join(missing)}; "
          f"`{sys.executable} -m pip install -e '.{os.environ['EXTRA']}'` in this repository adds them")
    sys.exit(3)
for name in ("RANK", "WORLD_SIZE"):  # otherwise the import would wait for other ranks
    os.environ.pop(name, None)
import oneflow
if oneflow.__version__.split("+")[0] != "0.9.0":
    print(f"env: {sys.executable} has oneflow {oneflow.__version__}; 0.9.0 is needed")
    sys.exit(3)
print(sys.executable, flush=True)
os._exit(0)
PY
  ) || status=$?
  if [ $status = 0 ] && [ -n "$answer" ]; then printf '%s\n' "$answer"; exit 0; fi
  if [ $status = 3 ]; then printf '%s\n' "$answer" >&2; fi
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
asked=${PYTHON:-}${VENV:-}            # with PYTHON or VENV, the user wants an environment of this project
if [ -z "$asked" ] && [ -n "$active" ] && [ ! "$active" -ef "$venv" ]; then use_if_complete "$active/bin/python"; fi
if is_ready; then finish; fi          # the usual case; it takes a few milliseconds and no lock
if [ -z "$asked" ] && ! has "$core"; then for name in python3 python; do use_if_complete "$name"; done; fi

# ---------------------------------------------------------------- one set-up at a time

{ mkdir -p "$parent" && : >> "$venv.lock"; } 2>/dev/null || die "cannot write to $parent. Put the environment elsewhere: VENV=/some/folder/venv"
exec 9>>"$venv.lock"
if command -v flock >/dev/null && ! flock -n 9; then
  say "another run is setting up $venv; waiting for it"
  flock 9
fi
if is_ready; then finish; fi
if [ -e "$venv" ] && [ ! -e "$venv/.made-by-libai" ]; then
  use_if_complete "$venv/bin/python"
  [ -d "$venv" ] && [ -z "$(ls -A "$venv")" ] || die "$venv exists and is not ours to replace. Move it away, or choose another place: VENV=/some/folder/venv"
fi

# ---------------------------------------------------------------- Python 3.10

# Prints the path of the interpreter that a name starts if it is a 64-bit CPython 3.10. A pyenv shim may print nothing.
real_python() {
  "$1" -c 'import sys; sys.exit(1) if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 10) or sys.maxsize < 2**32 else print(sys.executable)' 2>/dev/null
}
find_python() {
  local candidate conda=${CONDA_EXE:-/nonexistent/bin/conda} data=${XDG_DATA_HOME:-$HOME/.local/share}
  if [ -n "${PYTHON:-}" ]; then real_python "$PYTHON"; return; fi
  for candidate in python3.10 python3 python \
      "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.10*/bin/python3.10 \
      "${CONDA_PREFIX:-/nonexistent}"/bin/python "${conda%/*/*}"/{bin,envs/*/bin}/python3.10 \
      "$HOME"/{miniconda3,anaconda3,miniforge3,mambaforge,micromamba}/{bin,envs/*/bin}/python3.10 \
      "$data"/uv/python/cpython-3.10*/bin/python3.10 "$data"/mise/installs/python/3.10*/bin/python3.10 \
      "$HOME"/.asdf/installs/python/3.10*/bin/python3.10 \
      /usr/local/bin/python3.10 /opt/conda/{bin,envs/*/bin}/python3.10 /opt/python/cp310-cp310/bin/python; do
    real_python "$candidate" && return
  done
  if command -v uv >/dev/null; then
    say "no Python 3.10 found; asking uv for one"
    uv python install -q 3.10 >&2 && candidate=$(uv python find -q --no-project 3.10) && real_python "$candidate" && return
  fi
  return 1
}
choose_python() {
  [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "oneflow 0.9.0 has wheels for Linux on x86_64 only; this is $(uname -s) on $(uname -m)."
  if base=$(find_python); then return; fi
  if [ -n "${PYTHON:-}" ]; then die "PYTHON=$PYTHON is not a 64-bit CPython 3.10 (it answers: $("$PYTHON" --version 2>&1 | head -1)); oneflow 0.9.0 has no wheel for others that libai runs on."; fi
  die "Python 3.10 is needed and none was found (oneflow 0.9.0 has no wheels for newer ones). Get one, then run the same command again:" \
      "uv python install 3.10   |   pyenv install 3.10   |   conda create -n py310 python=3.10" \
      "or point at one:  PYTHON=/path/to/python3.10 bash tools/env.sh"
}

# ---------------------------------------------------------------- install

start=$SECONDS installer=
downloads=$parent/.piptmp.$(basename "$venv")     # not in /tmp, which is often small
log=$downloads/log
trap 'rm -rf "$downloads"' EXIT
stop() { if [ -n "$installer" ]; then kill "$installer" 2>/dev/null || true; wait "$installer" 2>/dev/null || true; fi; say "interrupted; the same command starts again"; exit 130; }
trap stop INT TERM HUP

free_mb() { df -Pm "$parent" | awk 'NR == 2 { print $4 }'; }
size_mb() { du -smc "$@" 2>/dev/null | awk 'END { print $1 }'; }
require_disk() {
  need_mb=${NEED_MB:-$1}
  [ "$(free_mb)" -ge "$need_mb" ] || die "the environment needs about $(((need_mb + 999) / 1000)) GB free in $parent; only $(free_mb) MB are. Put it on another disk: VENV=/big/disk/venv"
}

# Runs a long command in the background, so that this script can handle signals, and prints its progress.
run_long() {
  "$@" >> "$log" 2>&1 &
  installer=$!
  local status=0 next=$((SECONDS + 20))
  while kill -0 "$installer" 2>/dev/null; do
    sleep 0.5
    if [ $SECONDS -ge $next ]; then
      next=$((SECONDS + 20))
      say "$((SECONDS - start)) s, $(size_mb "$downloads" "$venv") MB so far"
    fi
  done
  wait "$installer" || status=$?
  installer=
  return $status
}
# uv is faster, but does not read pip's settings: if pip's settings name an index, pip is used.
uv_fits() {
  command -v uv >/dev/null && [ "${NO_UV:-0}" != 1 ] || return 1
  [ -n "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || ! "$venv/bin/python" -m pip config list 2>/dev/null | grep -qE "(^|[.])'?(index-url|no-index)"
}
install() {
  local lock=$1 cache=()
  say "installing $(grep -c '^[a-zA-Z].*==' "$lock") pinned packages (requirements/$(basename "$lock")), once: $2"
  if uv_fits; then
    if run_long uv pip install -p "$venv/bin/python" --require-hashes -r "$lock"; then return; fi
    say "uv could not install them ($(tail -1 "$log")); trying pip"
  fi
  if [ "$(free_mb)" -lt 9000 ]; then cache=(--no-cache-dir); fi   # pip's cache would keep a second copy of the downloads
  TMPDIR=$downloads run_long "$venv/bin/python" -m pip install --disable-pip-version-check ${cache[@]+"${cache[@]}"} --require-hashes -r "$lock" && return
  if [ "$(free_mb)" -lt 100 ] || grep -q "No space left on device" "$log"; then
    die "the disk of $parent is full ($(free_mb) MB left); the environment needs $(((need_mb + 999) / 1000)) GB. Put it on another disk: VENV=/big/disk/venv"
  fi
  if grep -qiE "NewConnectionError|Temporary failure|ConnectTimeout|Connection refused|ProxyError|SSLError|from versions: none|dns error|No matching distribution" "$log"; then
    die "the packages could not be downloaded: is there a network? Set PIP_INDEX_URL to a mirror or PIP_FIND_LINKS to a folder of wheels, then run the same command again."
  fi
  tail -n 15 "$log" >&2
  die "pip could not install requirements/$(basename "$lock") (its last lines are above)."
}

if ! has "$core"; then
  choose_python
  require_disk 6500   # 5.7 GB were used while installing: downloads and unpacked packages until pip is done
  rm -rf "$downloads" "$venv" && mkdir -p "$downloads" "$venv" && : > "$venv/.made-by-libai"
  say "making $venv with $("$base" --version) and oneflow 0.9.0"
  "$base" -m venv "$venv" >> "$log" 2>&1 || die "'$base -m venv' failed: $(tail -1 "$log") (On Debian and Ubuntu install python3.10-venv.)"
  install "$core" "1.8 GB to download, 4.0 GB on disk"
  ( unset RANK WORLD_SIZE; "$venv/bin/python" -c 'import oneflow' ) > "$log" 2>&1 || { tail -n 5 "$log" >&2; die "installed, but 'import oneflow' fails (above)."; }
  digest "$core" > "$venv/.ready"
  # takes 10 s; if it fails, runs use oneflow's own CPU kernels and print a warning
  PYTHONPATH=$root run_long "$venv/bin/python" -m libai.native.build || say "$(tail -n 1 "$log")"
fi
if [ -n "$extra" ] && ! has "$dev"; then
  require_disk 700
  rm -rf "$downloads" && mkdir "$downloads"
  install "$dev" "0.1 GB to download, 0.3 GB on disk"
  { digest "$core"; digest "$dev"; } > "$venv/.ready"
fi
if ! has_command; then
  mkdir -p "$downloads"
  # writes libai_oneflow.egg-info into the clone; a clone that is read-only still trains, without the command
  run_long "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e "$root" ||
    say "the command libai could not be installed ($(tail -n 1 "$log")); use '$venv/bin/python $root/libai/__main__.py'"
  printf '%s\n' "$root" > "$venv/.command"
fi
say "ready in $((SECONDS - start)) s, $(size_mb "$venv") MB"
finish
