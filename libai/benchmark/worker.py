"""One rank of a OneFlow contender: builds it from the config and answers the controller, through rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from libai.benchmark.modes import GEMM, find_mode
from libai.benchmark.protocol import Contender, encode, serve
from libai.config import LazyConfig, validate
from libai.launch.guard import leave_at_once
from libai.utils.distributed import barrier, get_rank, get_world_size, is_main_process


def work(config: str, overrides: list[str], mode_name: str, folder: Path) -> int:
    """Serve until told to quit. Every rank of the contender calls it; `folder` is scratch space of this contender."""
    mode = find_mode(mode_name)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model or a library prints must not meet the protocol
    if mode.is_stock:
        os.environ.pop("OPENBLAS_CORETYPE", None)  # that `import libai` has set; oneflow is not imported yet
    run = validate(LazyConfig.apply_overrides(LazyConfig.load(config), overrides), get_world_size())

    def build() -> Contender:
        from libai.benchmark import contenders

        if mode == GEMM:
            return contenders.GemmContender(run, mode)
        return (contenders.RawContender if mode.is_raw else contenders.TrainerContender)(run, mode)

    def reply(message: Mapping[str, Any]) -> None:
        if is_main_process():
            channel.write(encode(message))
            channel.flush()

    serve(build, _messages(folder), reply)
    leave_at_once(0)  # OneFlow's own exit handlers wait for the other ranks


def _messages(folder: Path) -> Iterator[str]:
    """The controller's lines on every rank: rank 0 reads them and passes them on through named pipes.

    Not through OneFlow: its scheduler spins while a broadcast is in flight, and waiting must cost nothing.
    """
    if get_world_size() == 1:
        return iter(sys.stdin.readline, "")
    own = folder / f"turn_{get_rank()}"
    if not is_main_process():
        os.mkfifo(own)
    barrier()
    if is_main_process():
        return _passed_on([open(folder / f"turn_{rank}", "w") for rank in range(1, get_world_size())])
    return iter(open(own).readline, "")


def _passed_on(others: list[TextIO]) -> Iterator[str]:
    for line in iter(sys.stdin.readline, ""):
        for pipe in others:
            pipe.write(line)
            pipe.flush()
        yield line
