"""Fakes of wandb and trackio with the signatures of their `init`.

They keep everything in memory.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Run:
    """A run of a tracker; `found` is shared by all sessions of that run."""

    def __init__(self, found: dict[str, Any], config: dict[str, Any], resume: str):
        assert resume == "allow"
        self._found = found
        self._found["config"].update(config)
        self._found["opened"] += 1

    def log(self, data: dict[str, Any], step: int) -> None:
        for name, value in data.items():
            self._found["rows"].append((name, step, value))

    def finish(self) -> None:
        self._found["finished"] += 1


def install(monkeypatch: Any, package: str) -> dict[str, dict[str, Any]]:
    """Replace `package` with a fake. Return the data sent to each of its runs, by id or name."""
    sent = {}

    def find(key: str) -> dict[str, Any]:
        return sent.setdefault(key, {"rows": [], "config": {}, "opened": 0, "finished": 0})

    def init_wandb(project, name, config, resume, id, dir, allow_val_change, settings):
        run = Run(find(id), config, resume)
        return run

    def init_trackio(project, name, config, resume):
        return Run(find(name), config, resume)

    module = ModuleType(package)
    module.__spec__ = ModuleSpec(package, None)
    module.init = init_wandb if package == "wandb" else init_trackio
    monkeypatch.setitem(sys.modules, package, module)
    return sent
