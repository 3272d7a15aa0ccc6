"""Check this environment. Prints one line per check with the result, and how to fix any problem.

Exit codes: 0 training works here, perhaps with warnings; 1 training cannot work.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from libai.launch.command_line import Parser
from libai.launch.requirements import explain_versions
from libai.launch.runtime import compile_kernels
from libai.utils import distributed
from libai.utils.errors import UserError
from libai.utils.installation import ROOT, environment_advice
from libai.utils.rank_notes import environment_of_no_rank
from libai.utils.screen import say
from libai.utils.sizes import format_bytes

#: program that imports oneflow as a run does, in a separate process because the import may fail in
#: native code
_LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from libai.launch.facts import collect_env
print(json.dumps(collect_env()))
"""
_LOOK_SECONDS = 400
#: free bytes below which a run can start but is likely to fail
_LOW_DISK = 2e9
_NO_GPU = "none with a driver for CUDA 11.7; training runs on the CPU"


def run(arguments: Sequence[str]) -> int:
    parser = Parser(description=__doc__)
    parser.add_flag("--json", "print the findings as JSON")
    args = parser.parse_args(arguments)
    findings = examine()
    if args.json:
        print(json.dumps(findings, indent=1))
    for finding in findings if not args.json else ():
        print("{status:<8} {name:<9} {found}".format(**finding))
        if finding["todo"]:
            print(f"{'':<18} {finding['todo']}")
    return 1 if any(finding["status"] == "failed" for finding in findings) else 0


def _finding(name: str, found: str, todo: str = "", is_fatal: bool = False) -> dict[str, str]:
    """Return the result of a check as it is printed.

    `todo` is the change to make, empty if there is no problem. `is_fatal` means that no run can
    start.
    """
    status = "failed" if is_fatal else "warning" if todo else "ok"
    return {"name": name, "status": status, "found": found, "todo": todo}


def examine() -> list[dict[str, str]]:
    """Return all findings. The checks that need oneflow are skipped if it cannot be imported."""
    say("libai: importing oneflow")
    with contextlib.suppress(UserError):  # a mistake in LIBAI_PATCHES is reported as a finding
        compile_kernels()
    python = platform.python_version()
    facts, failure = _look()
    if facts is None:
        found = f"`import oneflow` fails on Python {python}: {failure}"
        todo = explain_versions() or environment_advice()
        no_gpu = _finding("gpu", _NO_GPU)
        return [_finding("oneflow", found, todo, is_fatal=True), check_disk(Path()), no_gpu]
    packages = ", ".join(f"{name} {facts['packages'][name]}" for name in ("numpy", "protobuf"))
    oneflow = facts["oneflow"]
    kernels = oneflow["cpu_kernels"]
    is_slow = not kernels.startswith("libai's")
    openblas = oneflow["openblas"]
    is_bundled = not openblas[:1].isdigit()
    devices = [(one["name"], tuple(one["capability"])) for one in facts["cuda"]["devices"]]
    obstacle = distributed.explain_unsupported(devices)
    return [
        _finding("oneflow", f"{oneflow['version']} ({packages}, Python {python})"),
        _finding("kernels", kernels, "Training is slower with oneflow's own kernels." * is_slow),
        _finding(
            "openblas",
            openblas,
            "Matmuls are slower: `pip install scipy-openblas32`." * is_bundled,
        ),
        check_disk(Path()),
        _finding(
            "gpu",
            obstacle or str(devices or _NO_GPU),
            "" if obstacle is None else "Or train with train.device=cpu.",
        ),
    ]


def _look() -> tuple[dict[str, Any] | None, str]:
    """Return the result of `collect_env` from a process that imports oneflow, and an empty string.

    If that process fails, return None and the last line of its error.
    """
    command = [sys.executable, "-c", _LOOK, ROOT]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment_of_no_rank(),
            timeout=_LOOK_SECONDS,
        )
        return json.loads(done.stdout.splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"it did not end within {_LOOK_SECONDS} s"
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, lines[-1].partition("OneFlowImportError: ")[2] or lines[-1]


def check_disk(folder: Path) -> dict[str, str]:
    """Check that the output and temporary folders are writable and have enough free space."""
    found = []
    todo = ""
    for place in (folder.absolute(), Path(tempfile.gettempdir())):
        if not os.access(place, os.W_OK):
            todo = "Choose another folder: train.output_dir=FOLDER, or TMPDIR for temporary files."
            return _finding("disk", f"{place}: cannot write", todo, is_fatal=True)
        free = shutil.disk_usage(place).free
        found.append(f"{format_bytes(free)} free in {place}")
        if free < _LOW_DISK:
            todo = "Checkpoints need space: free some, or set train.output_dir and TMPDIR."
    return _finding("disk", ", ".join(found), todo)
