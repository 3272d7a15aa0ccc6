"""Facts about machine and software for a report; no host names and no paths, since reports are shown around."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from libai.launch.facts import collect_env, git_state


def describe_machine(repository: Path) -> dict[str, Any]:
    """CPU, memory, versions, the commit of `repository`, the load average before anything was started."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    facts = collect_env()
    state = git_state(repository)
    commit = "not in a git repository" if state is None else state["commit"][:9] + " changed" * bool(state["dirty"])
    machine = facts["machine"]
    return {
        **{name: machine[name] for name in ("os", "cpu", "cores", "memory_gb")},
        "devices": [device["name"] for device in facts["cuda"]["devices"]],
        "libai": facts["libai"],
        "oneflow": facts["oneflow"]["version"],
        "openblas": facts["oneflow"]["openblas"],
        "cpu_kernels": facts["oneflow"]["cpu_kernels"],
        "python": facts["python"],
        "commit": commit,
        "load": load,
    }
