"""`graph.enabled=auto`: which mode makes an update faster here, measured without disturbing the run."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from libai.engine.model_trainer import ModelTrainer
from libai.utils.distributed import all_reduce

#: updates per timed block, and blocks per mode; the modes alternate, so that both see the machine in the same state
UPDATES_PER_BLOCK = 3
BLOCKS = 3


def time_modes(contenders: dict[str, ModelTrainer], micro_batches: list[Any]) -> dict[str, float]:
    """Seconds per update of each contender on the same micro-batches: the fastest block, of the slowest rank.

    Every contender is left as it was: its state is restored bit for bit, and so are the random generators of Python
    and NumPy. Collective; all ranks get the same numbers. Call `prepare()` on graph trainers first.
    """
    generators = random.getstate(), np.random.get_state()
    snapshots = {name: trainer.snapshot() for name, trainer in contenders.items()}
    best = dict.fromkeys(contenders, float("inf"))
    for trainer in contenders.values():
        _time_block(trainer, micro_batches, updates=1)
    for _ in range(BLOCKS):
        for name, trainer in contenders.items():
            best[name] = min(best[name], _time_block(trainer, micro_batches, UPDATES_PER_BLOCK))
    for name, trainer in contenders.items():
        trainer.restore(snapshots[name])
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    slowest = all_reduce(np.array(list(best.values())), "max")
    return dict(zip(best, slowest.tolist()))


def _time_block(trainer: ModelTrainer, micro_batches: list[Any], updates: int) -> float:
    start = time.perf_counter()
    results = [trainer.update(micro_batches) for _ in range(updates)]
    trainer.collect(results)  # waits for the device
    return (time.perf_counter() - start) / updates
