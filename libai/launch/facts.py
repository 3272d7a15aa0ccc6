"""Collect facts about the environment of a run that can be stored as JSON.

They cover versions, machine, code, layout and relevant environment variables.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from libai import __version__
from libai.launch.requirements import installed_version
from libai.launch.runtime import read_cpuinfo
from libai.native.kernels import kernels_in_use
from libai.patches.openblas import openblas_in_use, threads_in_use
from libai.patches.table import patches_that_are_on
from libai.utils.distributed import get_local_rank, get_rank, get_world_size

_PACKAGES = ("numpy", "omegaconf", "hydra-core", "tensorboardX", "safetensors", "protobuf")
#: the only environment variables that are recorded, together with the prefixes below; others may
#: hold secrets
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE",
    "NODE_RANK",
    "SLURM_JOB_ID",
    "VIRTUAL_ENV",
)
_VARIABLE_PREFIXES = ("ONEFLOW_", "OPENBLAS_", "OMP_", "MKL_", "NCCL_", "LIBAI_")


def collect_env() -> dict[str, Any]:
    """Return facts about the environment of this process.

    Imports oneflow, so call it after the environment is prepared. Unavailable facts are None. Only
    environment variables that are known to matter are included.
    """
    return {
        "libai": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "oneflow": _oneflow(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
        "machine": _machine(),
        "cuda": _cuda(),
        "git": git_state(Path.cwd()),
        "layout": {
            "rank": get_rank(),
            "world_size": get_world_size(),
            "local_rank": get_local_rank(),
        },
        "command": list(sys.argv),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)
        },
    }


def _oneflow() -> dict[str, Any]:
    import oneflow as flow

    return {
        "version": flow.__version__,
        "commit": getattr(flow, "__git_commit__", None),
        "openblas": openblas_in_use(),
        "openblas_threads": threads_in_use(),
        "cpu_kernels": kernels_in_use(),
        "patches": patches_that_are_on(),
    }


def _machine() -> dict[str, Any]:
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    models = (
        line.split(":", 1)[1].strip()
        for line in read_cpuinfo().splitlines()
        if line.startswith("model name")
    )
    return {
        "os": platform.platform(),
        "host": platform.node(),
        "cpu": next(models, platform.processor() or None),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(pages * page_size / 2**30, 1),
    }


def _cuda() -> dict[str, Any]:
    import oneflow as flow

    if not flow.cuda.is_available():
        return {"available": False, "devices": []}
    devices = [
        {
            "name": flow.cuda.get_device_name(i),
            "capability": list(flow.cuda.get_device_capability(i)),
        }
        for i in range(flow.cuda.device_count())
    ]
    return {"available": True, "devices": devices}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `{"commit": hash, "dirty": bool}` for the repository that contains `folder`.

    Returns None if there is no repository or git is missing.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {
        "commit": commit,
        "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no")),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
