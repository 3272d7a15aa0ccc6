"""Check this environment: one line a check with what was found, and what to do where something is wrong.

Exit codes: 0 training works here, perhaps with warnings; 1 it cannot.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from libai.launch import external, request
from libai.launch.installation import ROOT
from libai.launch.runtime import explain_versions
from libai.native.build import find_compiler
from libai.patches import openblas
from libai.utils import distributed
from libai.utils.errors import UserError
from libai.utils.parser import Parser
from libai.utils.rank_notes import environment_of_no_rank
from libai.utils.sizes import available_bytes, format_bytes

#: imports oneflow as a run does; a process of its own, since the import may fail in native code
_LOOK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from libai.launch.facts import collect_env
print(json.dumps(collect_env()))
"""
_LOOK_SECONDS = 400  # the kernels may be compiled on the way
#: below these a run can start and is likely to fail
_LOW_DISK, _LOW_MEMORY = 2e9, 2e9


@dataclass(frozen=True)
class Finding:
    """The result of a check. `todo`: what to change; empty if all is well."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    todo: str = ""


def run(arguments: Sequence[str]) -> int:
    args = build_parser().parse_args(arguments)
    findings = examine(args.folder)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.status:<8} {finding.name:<9} {finding.found}")
            if finding.todo:
                print(f"{'':<18} {finding.todo}")
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def build_parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where runs will write (default: here)")
    return parser


def examine(folder: Path) -> list[Finding]:
    """All checks; those that need oneflow are left out where it cannot be imported."""
    facts, failure = _look()
    findings = [check_python(), check_oneflow(facts, failure)]
    if facts is not None:
        findings += [check_kernels(facts), check_openblas(facts)]
    findings += [check_compiler(), check_threads(os.environ), check_memory(), check_disk(folder), check_ports()]
    return [*findings, check_launcher(), check_gpu(facts)]


def _look() -> tuple[dict[str, Any] | None, str]:
    """What `collect_env` tells in a process that imports oneflow; else None and the last line of its error."""
    command, environment = [sys.executable, "-c", _LOOK, ROOT], environment_of_no_rank()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LOOK_SECONDS)
        return json.loads(done.stdout.splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"it did not end within {_LOOK_SECONDS} s"
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines()
        return None, lines[-1].partition("OneFlowImportError: ")[2] or lines[-1] if lines else f"{done.returncode}"


def check_python() -> Finding:
    """CPython 3.10, which oneflow 0.9.0 has a wheel for and libai is tested on."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.version_info[:2] == (3, 10) and sys.implementation.name == "cpython":
        return Finding("python", "ok", version)
    return Finding("python", "failed", version, "libai runs on CPython 3.10. `bash tools/env.sh` makes an environment.")


def check_oneflow(facts: dict[str, Any] | None, failure: str) -> Finding:
    """oneflow 0.9.0 can be imported, and numpy and protobuf fit it."""
    if facts is None:
        return Finding("oneflow", "failed", f"`import oneflow` fails: {failure}", explain_versions() or "")
    version = str(facts["oneflow"]["version"])
    packages = ", ".join(f"{name} {facts['packages'][name]}" for name in ("numpy", "protobuf"))
    if version.partition("+")[0] != "0.9.0":
        missing = ", ".join(facts["oneflow"]["missing_parts"]) or "none"
        todo = f"libai is tested with oneflow==0.9.0 only. Private parts that are missing or differ: {missing}."
        return Finding("oneflow", "warning", f"{version} ({packages})", todo)
    return Finding("oneflow", "ok", f"{version} ({packages})")


def check_kernels(facts: dict[str, Any]) -> Finding:
    """libai's own CPU kernels are compiled and in use."""
    found = str(facts["oneflow"]["cpu_kernels"])
    if found.startswith("libai's"):
        return Finding("kernels", "ok", found)
    return Finding("kernels", "warning", found, "CPU training is slower with oneflow's own kernels.")


def check_openblas(facts: dict[str, Any]) -> Finding:
    """Matrix products use a current OpenBLAS."""
    found = str(facts["oneflow"]["openblas"])
    if found[:1].isdigit():
        return Finding("openblas", "ok", found)
    return Finding("openblas", "warning", found, "Products on CPU are slower: `pip install scipy-openblas32`.")


def check_compiler() -> Finding:
    """g++ or clang++, which compiles the CPU kernels."""
    compiler = find_compiler()
    if compiler is None:
        return Finding("compiler", "warning", "no g++ or clang++", "Install one: kernels for CPU are compiled with it.")
    return Finding("compiler", "ok", " ".join(compiler))


def check_threads(environment: Any) -> Finding:
    """Cores that this process may use, and whether others use them already."""
    cores, load = openblas.usable_cores(), os.getloadavg()[0]
    threads = environment.get("OMP_NUM_THREADS")
    found = f"{cores} cores, load {load:.1f}" + (f", OMP_NUM_THREADS={threads}" if threads else "")
    if threads and threads.isdecimal() and int(threads) > cores:
        return Finding(
            "threads", "warning", found, "More threads than cores slow each other down: unset OMP_NUM_THREADS."
        )
    if load > cores + 1:
        return Finding("threads", "warning", found, "Other programs use the cores: training is slower meanwhile.")
    return Finding("threads", "ok", found)


def check_memory() -> Finding:
    """Memory that is free, and a limit on addresses, of which `import oneflow` maps several gigabytes."""
    free = available_bytes()
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    found = "unknown" if free is None else f"{format_bytes(free)} available"
    if limit not in (resource.RLIM_INFINITY, -1):
        return Finding(
            "memory", "warning", f"{found}, limited to {format_bytes(limit)} of addresses", "Run `ulimit -v unlimited`."
        )
    if free is not None and free < _LOW_MEMORY:
        return Finding("memory", "warning", found, "A training of this size may be ended: close other programs.")
    return Finding("memory", "ok", found)


def check_disk(folder: Path) -> Finding:
    """Room where runs write and for temporary files, and the right to write there."""
    places = {str(folder.absolute()): folder, "temporary files": Path(tempfile.gettempdir())}
    for name, place in places.items():
        if not os.access(place, os.W_OK):
            return Finding("disk", "failed", f"{name}: cannot write", "Name another folder: train.output_dir=FOLDER.")
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    found = ", ".join(f"{format_bytes(size)} free for {name}" for name, size in free.items())
    if min(free.values()) < _LOW_DISK:
        return Finding(
            "disk", "warning", found, "Checkpoints need room: free some, or set train.output_dir and TMPDIR."
        )
    return Finding("disk", "ok", found)


def check_ports() -> Finding:
    """A free port at which the ranks of this machine can meet."""
    try:
        port = request.choose_port(os.environ.get("PORT", ""), num_nodes=1, node_rank=0)
    except UserError as error:
        return Finding("ports", "failed", f"no port for ranks to meet: {error}", "Set PORT to a free one.")
    return Finding("ports", "ok", f"{port} is free for ranks to meet")


def check_launcher() -> Finding:
    """Report whether another launcher has started this process, and its place among the others."""
    try:
        place = external.find_place(os.environ)
    except UserError as error:
        return Finding("launcher", "failed", str(error), "docs/distributed.md lists the launchers that are recognised.")
    return Finding("launcher", "ok", "none; libai starts the processes" if place is None else place.describe())


def check_gpu(facts: dict[str, Any] | None) -> Finding:
    """GPUs that oneflow 0.9.0 has machine code for."""
    if facts is not None and facts["cuda"]["available"]:
        devices = [(one["name"], tuple(one["capability"])) for one in facts["cuda"]["devices"]]
        problem = distributed.explain_unsupported(devices)
        if problem is not None:
            return Finding("gpu", "warning", problem, "Or train with train.device=cpu.")
        return Finding("gpu", "ok", ", ".join(f"{name} ({'.'.join(map(str, found))})" for name, found in devices))
    if shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists():
        todo = "Update the NVIDIA driver to one for CUDA 11.7, and look at CUDA_VISIBLE_DEVICES."
        return Finding("gpu", "warning", "there is a GPU, and oneflow cannot use it", todo)
    return Finding("gpu", "ok", "none; training runs on the CPU")
