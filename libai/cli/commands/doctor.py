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
from typing import Any, NamedTuple

from libai.launch.requirements import explain_versions
from libai.launch.runtime import compile_kernels
from libai.utils import distributed
from libai.utils.errors import UserError
from libai.utils.installation import ROOT, environment_advice
from libai.utils.parser import Parser
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


class Finding(NamedTuple):
    """Result of a check.

    `todo` is the change to make, empty if there is no problem. `is_fatal` means that no run can
    start.
    """

    name: str
    found: str
    todo: str = ""
    is_fatal: bool = False

    @property
    def status(self) -> str:
        """One of "ok", "warning" and "failed"."""
        return "failed" if self.is_fatal else "warning" if self.todo else "ok"


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    findings = examine()
    if args.json:
        rows = [
            {"name": one.name, "status": one.status, "found": one.found, "todo": one.todo}
            for one in findings
        ]
        print(json.dumps(rows, indent=1))
    else:
        for finding in findings:
            print(f"{finding.status:<8} {finding.name:<9} {finding.found}")
            if finding.todo:
                print(f"{'':<18} {finding.todo}")
    return 1 if any(finding.is_fatal for finding in findings) else 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def examine() -> list[Finding]:
    """Return all findings. The checks that need oneflow are skipped if it cannot be imported."""
    say("libai: importing oneflow")
    with contextlib.suppress(UserError):  # a mistake in LIBAI_PATCHES is reported as a finding
        compile_kernels()
    facts, failure = _look()
    findings = [check_oneflow(facts, failure)]
    if facts is not None:
        found = facts["oneflow"]
        slower = (
            ""
            if found["cpu_kernels"].startswith("libai's")
            else "Training is slower with oneflow's own kernels."
        )
        openblas = (
            ""
            if found["openblas"][:1].isdigit()
            else "Matmuls are slower: `pip install scipy-openblas32`."
        )
        findings.append(Finding("kernels", found["cpu_kernels"], slower))
        findings.append(Finding("openblas", found["openblas"], openblas))
    return [*findings, check_disk(Path()), check_gpu(facts)]


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


def check_oneflow(facts: dict[str, Any] | None, failure: str) -> Finding:
    """Check that oneflow can be imported (other versions than 0.9.0 are refused)."""
    python = platform.python_version()
    if facts is None:
        todo = explain_versions() or environment_advice()
        return Finding(
            "oneflow", f"`import oneflow` fails on Python {python}: {failure}", todo, is_fatal=True
        )
    version = str(facts["oneflow"]["version"])
    packages = ", ".join(f"{name} {facts['packages'][name]}" for name in ("numpy", "protobuf"))
    return Finding("oneflow", f"{version} ({packages}, Python {python})", "")


def check_disk(folder: Path) -> Finding:
    """Check that the output and temporary folders are writable and have enough free space."""
    found = []
    todo = ""
    for place in (folder.absolute(), Path(tempfile.gettempdir())):
        if not os.access(place, os.W_OK):
            todo = "Choose another folder: train.output_dir=FOLDER, or TMPDIR for temporary files."
            return Finding("disk", f"{place}: cannot write", todo, is_fatal=True)
        free = shutil.disk_usage(place).free
        found.append(f"{format_bytes(free)} free in {place}")
        if free < _LOW_DISK:
            todo = "Checkpoints need space: free some, or set train.output_dir and TMPDIR."
    return Finding("disk", ", ".join(found), todo)


def check_gpu(facts: dict[str, Any] | None) -> Finding:
    """Check that oneflow 0.9.0 has machine code for the GPUs of this machine."""
    if facts is not None and facts["cuda"]["available"]:
        devices = [(one["name"], tuple(one["capability"])) for one in facts["cuda"]["devices"]]
        found = distributed.explain_unsupported(devices)
        return Finding(
            "gpu", found or str(devices), "" if found is None else "Or train with train.device=cpu."
        )
    return Finding("gpu", "none with a driver for CUDA 11.7; training runs on the CPU")
