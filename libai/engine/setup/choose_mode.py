"""`graph.enabled=auto`: the mode that the hooks allow, or that makes an update faster here, tried without a trace."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from libai.engine.loop.hook_base import HookBase
from libai.engine.trainer.model_trainer import ModelTrainer
from libai.engine.trainer.snapshot import Snapshot
from libai.engine.trainer.switching import TRAINERS
from libai.utils.distributed import all_reduce
from libai.utils.errors import UserError
from libai.utils.seeding import generators_kept

#: updates per timed block, and blocks per mode; the modes alternate, so that both see the machine in the same state
UPDATES_PER_BLOCK = 3
BLOCKS = 3


def mode_of_hooks(hooks: Iterable[HookBase]) -> tuple[str, str] | None:
    """The only mode that every hook works in, and why not the other; None when both will do.

    Raises `UserError` when there is none.
    """
    refusals: dict[str, UserError] = {}
    for hook in hooks:
        for mode in TRAINERS:
            try:
                hook.check_mode(mode)
            except UserError as error:
                refusals.setdefault(mode, error)
    if not refusals:
        return None
    allowed = [mode for mode in TRAINERS if mode not in refusals]
    if not allowed:
        raise UserError("graph.enabled=auto finds no mode: " + " ".join(map(str, refusals.values())))
    (refusal,) = refusals.values()
    return allowed[0], str(refusal).partition(". ")[0]


def time_modes(variants: dict[str, ModelTrainer], micro_batches: list[Any]) -> dict[str, float]:
    """Seconds per update of each variant on the same micro-batches: the fastest block, of the slowest rank.

    Every variant is left as it was: its state is restored bit for bit, and so are the random generators of Python
    and NumPy. Collective; all ranks get the same numbers. Call `prepare()` on graph trainers first.
    """
    with generators_kept():
        snapshots = {name: Snapshot.of(trainer) for name, trainer in variants.items()}
        best = dict.fromkeys(variants, float("inf"))
        for trainer in variants.values():
            _time_block(trainer, micro_batches, updates=1)
        for _ in range(BLOCKS):
            for name, trainer in variants.items():
                best[name] = min(best[name], _time_block(trainer, micro_batches, UPDATES_PER_BLOCK))
        for name, trainer in variants.items():
            snapshots[name].restore(trainer)
    slowest = all_reduce(np.array(list(best.values())), "max")
    return dict(zip(best, slowest.tolist()))


def _time_block(trainer: ModelTrainer, micro_batches: list[Any], updates: int) -> float:
    start = time.perf_counter()
    results = [trainer.update(micro_batches) for _ in range(updates)]
    trainer.collect(results)  # waits for the device
    return (time.perf_counter() - start) / updates
