"""The modes a config can be benchmarked in, and the process settings that each of them gets. Imports no oneflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from libai.utils.errors import UserError


@dataclass(frozen=True)
class Mode:
    """A kind of contender.

    base: "eager", "graph" or "gemm". is_raw: a hand-written loop instead of our trainer. syncs: reads the loss in every
    iteration. is_stock: a process without our settings and CPU kernels. nudges: the weights start off by their
    last bit.
    """

    name: str
    base: str
    is_raw: bool = False
    syncs: bool = False
    is_stock: bool = False
    nudges: bool = False

    def environment(self, device: str, given: Mapping[str, str]) -> dict[str, str | None]:
        """Variables for its processes, to set or (None) to remove, as tools/launch.py has them for training."""
        if self.is_stock:
            return {
                "OPENBLAS_CORETYPE": None,
                "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD": None,
                "LIBAI_OPENBLAS": "bundled",
                "LIBAI_NATIVE": "0",
            }
        on_cpu = device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())
        if self.base != "graph" and on_cpu and "ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD" not in given:
            return {"ONEFLOW_VM_COMPUTE_ON_WORKER_THREAD": "0"}
        return {}


#: the peak measurement; never named by the user
GEMM = Mode("gemm", "gemm")
#: shows how a training amplifies rounding; never named by the user
NUDGED = Mode("nudged", "eager", is_raw=True, nudges=True)

MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("eager", "eager"),
        Mode("graph", "graph"),
        Mode("raw-eager", "eager", is_raw=True),
        Mode("raw-eager-sync", "eager", is_raw=True, syncs=True),
        Mode("raw-graph", "graph", is_raw=True),
        Mode("raw-graph-sync", "graph", is_raw=True, syncs=True),
        Mode("eager-stock", "eager", is_raw=True, is_stock=True),
        Mode("graph-stock", "graph", is_raw=True, is_stock=True),
    )
}

#: compiled mode -> the eager mode that it must make up for
EAGER_OF = {
    "graph": "eager",
    "raw-graph": "raw-eager",
    "raw-graph-sync": "raw-eager-sync",
    "graph-stock": "eager-stock",
}


def find_mode(name: str) -> Mode:
    """The mode of a name; `UserError` with the names there are."""
    for hidden in (GEMM, NUDGED):
        if name == hidden.name:
            return hidden
    if name not in MODES:
        raise UserError(f"--modes names {name!r}, and there is no such mode. There are: {', '.join(MODES)}.")
    return MODES[name]
